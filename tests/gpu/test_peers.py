"""Ranks that are threads of one process, each on its own GPU: they read each other's memory across the link."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import DEVICE, STRATEGIES, assemble, config, manager, run_ranks, shards, whole_step

torch = pytest.importorskip("torch")
GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu", reason="needs GRADGEN_TEST_DEVICE=cuda (tests/gpu/run_multi.sh sets it)"
    ),
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}"),
]
BIG = {"hidden": 96, "odd": 40, "layers": 4}


def value(rank: int, micro_step: int) -> float:
    return float(np.random.default_rng([rank, micro_step]).integers(-64, 64)) / 8  # exact in bf16, sums too


def sums(strategy: str, places: list[str], **options: Any) -> dict[str, Any]:
    """The gradients of two micro-steps, put together from every rank's shards."""

    def body(rank: int, comm: Any) -> Any:
        with torch.cuda.device(places[rank]):
            grads = manager(comm, strategy, config(**BIG), device=places[rank], **options)
            assert grads.transport == "threads" and grads.device == places[rank]
            for _ in range(2):
                whole_step(grads, 2, lambda m: value(rank, m))
            found = shards(grads)
            grads.close()
            return found

    return assemble(run_ranks(len(places), body, timeout=60.0))


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16", "accumulator": "float32"}], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_over_gpus(strategy: str, options: dict[str, Any]) -> None:
    """The mean over ranks, and the same bits as ranks that share one GPU."""
    apart = sums(strategy, [f"cuda:{rank}" for rank in range(GPUS)], **options)
    together = sums(strategy, ["cuda:0"] * GPUS, **options)
    wanted = sum(value(rank, m) for rank in range(GPUS) for m in range(2)) / GPUS
    assert set(apart) == set(together)
    for name, gradient in apart.items():
        assert np.allclose(gradient, wanted, rtol=1e-6, atol=1e-6), name
        assert np.array_equal(gradient, together[name]), name


def test_stochastic_rounding_does_not_depend_on_where_ranks_are() -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "rounding": "stochastic", "seed": 5}
    apart = sums("sharded_all_to_all", [f"cuda:{rank}" for rank in range(GPUS)], **options)
    together = sums("sharded_all_to_all", ["cuda:0"] * GPUS, **options)
    assert all(np.array_equal(gradient, together[name]) for name, gradient in apart.items())
