"""The contract on saving and resuming: the norm of a finished step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import STRATEGIES, assemble, manager, on_cpu, run_ranks, shards, whole_step


@pytest.mark.parametrize("nonfinite", ["ignore", "skip"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_finished_step_has_the_same_norm_at_any_number_of_ranks(strategy: str, nonfinite: str) -> None:
    """One rank measures its gradients when it is asked; several must know what it would have found."""

    def save(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, nonfinite=nonfinite)
        whole_step(grads, 2, lambda m: 1.0 + m)
        return grads.state_dict()

    def load(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, nonfinite=nonfinite)
        grads.load_state_dict(states)
        norm = grads.clip_grad_norm_(1.0)
        return norm, grads.grad_norm(), shards(grads)

    wanted = None
    for old, new in ((1, 2), (1, 3), (2, 1), (3, 2)):
        states = run_ranks(old, save)
        results = run_ranks(new, load)
        clipped = sum(float((v**2).sum()) for v in assemble([r[2] for r in results]).values()) ** 0.5
        assert clipped == pytest.approx(1.0, rel=1e-5)
        for norm, after, _ in results:
            wanted = wanted or norm
            assert norm == pytest.approx(wanted, rel=1e-12) and after == pytest.approx(1.0, rel=1e-5)


@on_cpu
def test_saving_does_not_settle_the_norm() -> None:
    grads = manager(None, "sharded")
    whole_step(grads, 1, lambda m: 1.0)
    saved = grads.state_dict()["norm_squared"] ** 0.5
    for shard in grads.named_gradients().values():
        view = np.asarray(shard)
        view *= 2
    assert grads.grad_norm() == pytest.approx(2 * saved)
