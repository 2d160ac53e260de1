"""Gradients and training of real transformers models equal plain autograd, for every strategy, at W = 1, 2, 3, with the
weight gradients of linear layers and embeddings computed in place and without."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch_ranks import run_ranks

pytestmark = pytest.mark.slow

MODELS = ["llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "gpt2", "gpt2-untied"]
STRATEGIES = ["unsharded", "sharded", "sharded_all_to_all", "replicated", "fully_sharded"]


@cache
def ranks(world: int) -> list[dict[str, Any]]:
    """What every rank found; the ranks of a world size start once for all tests."""
    return run_ranks(
        world,
        "torch_scenarios:everything",
        models=MODELS if world < 3 else ["llama", "llama-tied", "gpt2"],
        train={1: [], 2: STRATEGIES, 3: ["sharded"]}[world],
        faults=world == 2,
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_equal_plain_autograd_and_ddp(world: int) -> None:
    for rank, results in enumerate(ranks(world)):
        for model, errors in results["parity"].items():
            assert set(errors) == {"ddp", *STRATEGIES, *(f"{strategy} fused" for strategy in STRATEGIES)}
            bad = {way: error for way, error in errors.items() if not error <= 1e-6}
            assert not bad, f"W={world} rank {rank} {model}: relative errors {bad}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_in_bf16_are_close(world: int) -> None:
    """The reference rounds each of its sums too, so it is off by some roundings of bf16 (2 ** -9)."""
    for results in ranks(world):
        errors = results["bf16"]
        assert set(errors) == {"llama-tied", "llama-tied fused", "gpt2", "gpt2 fused"}
        assert max(errors.values()) <= 10 * 2**-9, errors
        assert all(errors[f"{model} fused"] <= 1.1 * errors[model] for model in ("llama-tied", "gpt2")), (
            errors
        )


@pytest.mark.parametrize("world", [2, 3])
def test_thirty_steps_follow_one_process(world: int) -> None:
    for results in ranks(world):
        single = results["curves"]["single"]
        assert single[-1] < single[0] - 1
        for strategy, losses in results["curves"].items():
            worst = max(abs(a - b) / b for a, b in zip(losses, single, strict=True))
            assert worst < 2e-4, f"{strategy}: {worst}"


def test_refused_optimizers_and_ranks_that_differ() -> None:
    for results in ranks(2):
        messages = results["faults"]
        assert messages["LBFGS"].startswith(
            "UsageError: torch.optim.LBFGS cannot be used here: it needs a closure"
        )
        assert (
            "Adafactor is not an elementwise optimizer (it keeps row and column sums" in messages["Adafactor"]
        )
        assert "pass elementwise=True" in messages["Mine"]
        assert messages["differ"].startswith("MismatchError")
        assert "model.norm.weight: values differ between rank 0 and rank 1" in messages["differ"]


def test_optimizer_state_survives_save_and_load() -> None:
    assert [results["state"] for results in ranks(2)] == [True, True]
