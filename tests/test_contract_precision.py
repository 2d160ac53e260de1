"""Contract rules 15 to 20: three dtypes, exact all-to-all sums, stochastic rounding, norm, clipping, non-finite gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradgen
from tests.support import (
    STRATEGIES,
    WORLDS,
    assemble,
    config,
    manager,
    run_ranks,
    shards,
    whole_step,
)


def accumulate(
    strategy: str, contributions: list[float], seed: int = 0, cfg: Any = None, **options: Any
) -> dict[str, np.ndarray]:
    grads = manager(None, strategy, cfg, dtype="bfloat16", seed=seed, **options)
    whole_step(grads, len(contributions), lambda m: contributions[m])
    return assemble([shards(grads)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulator_and_rounding_are_choices(strategy: str) -> None:
    """256 then 1 in bf16: 257 in an fp32 accumulator, 256 to nearest, 257 in the mean when stochastic."""
    assert np.all(accumulate(strategy, [256.0, 1.0], accumulator="float32")["layers.0.proj.weight"] == 257.0)
    assert np.all(accumulate(strategy, [256.0, 1.0])["layers.0.proj.weight"] == 256.0)
    big = config(hidden=200, odd=50)
    stochastic = accumulate(strategy, [256.0, 1.0], rounding="stochastic", cfg=big)["layers.0.proj.weight"]
    assert set(np.unique(stochastic)) == {256.0, 258.0}
    assert abs(stochastic.mean() - 257.0) < 5 / np.sqrt(stochastic.size)


def test_six_hundred_ones() -> None:
    big = config(hidden=100, odd=40, layers=1)
    assert np.all(
        accumulate("unsharded", [1.0] * 600, accumulator="float32", cfg=big)["layers.0.proj.weight"] == 600.0
    )
    assert np.all(accumulate("unsharded", [1.0] * 600, cfg=big)["layers.0.proj.weight"] == 256.0)
    stochastic = accumulate("unsharded", [1.0] * 600, rounding="stochastic", cfg=big)["layers.0.proj.weight"]
    assert abs(stochastic.mean() - 600.0) < 5 * 30 / np.sqrt(stochastic.size)


@pytest.mark.parametrize(
    "options,match",
    [
        ({"dtype": "float32", "wire": "float64"}, "wire dtype float64 is not narrower"),
        (
            {"dtype": "float32", "rounding": "stochastic"},
            "stochastic rounding needs a bfloat16 or float16 accumulator",
        ),
        ({"dtype": "float64", "accumulator": "bfloat16"}, "no kernel sums float64|not narrower"),
        ({"dtype": "int8"}, "int8"),
        ({"block_buffers": 0}, "block_buffers must be at least 1"),
    ],
)
def test_impossible_dtypes_are_refused_at_construction(options: dict[str, Any], match: str) -> None:
    with pytest.raises((gradgen.Error, ValueError), match=match):
        manager(None, "sharded", **options)


@pytest.mark.parametrize("big", range(8))
def test_all_to_all_sums_exactly(big: int) -> None:
    """One rank has 256, seven have 1, on a bf16 wire: 263 before the one final rounding, whichever rank holds the 256."""

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, "fully_sharded", dtype="bfloat16", accumulator="float32", divide=1)
        whole_step(grads, 1, lambda m: 256.0 if rank == big else 1.0)
        return shards(grads)

    for name, value in assemble(run_ranks(8, body)).items():
        if name not in ("twice", "embed.weight", "head.weight"):
            assert np.all(value == 263.0), (name, value)


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bitwise_reproducible(strategy: str, wire: str | None) -> None:
    """The same bits over runs, and on the shared wire as in separate copies of it (fp32 sums in rank order)."""
    rng = np.random.default_rng(3)
    noise = rng.standard_normal((4, 2))

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, wire=wire)
        whole_step(grads, 2, lambda m: noise[rank, m])
        return shards(grads)

    first, second = (assemble(run_ranks(4, body)) for _ in range(2))
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name


@pytest.mark.parametrize("world", WORLDS)
def test_stochastic_rounding_is_the_same_for_every_world(world: int) -> None:
    """Bits depend on seed, step, micro-step, weight and element alone: W ranks that share a gradient give one rank's bits."""

    def run(size: int) -> dict[str, np.ndarray]:
        def body(rank: int, comm: Any) -> Any:
            grads = manager(
                comm,
                "fully_sharded",
                config(hidden=50, odd=9),
                dtype="bfloat16",
                rounding="stochastic",
                seed=11,
            )
            for _ in range(2):
                whole_step(grads, 3, lambda m: 1.0 + m / 128)
            return shards(grads)

        return assemble(run_ranks(size, body))

    alone, many = run(1), run(world)
    if world in (1, 2, 4, 8):  # the mean of equal contributions is exact for powers of two
        for name, value in many.items():
            assert np.array_equal(value, alone[name]), name
    else:
        assert {name: value.shape for name, value in many.items()} == {
            name: value.shape for name, value in alone.items()
        }


def test_stochastic_rounding_errors_are_independent() -> None:
    """Different micro-steps, steps, seeds and weights use different bits; neighbours do not agree more than chance."""
    big = config(hidden=200, odd=100, layers=2)
    up = {
        seed: accumulate("unsharded", [256.0, 1.0], seed=seed, rounding="stochastic", cfg=big)
        for seed in (1, 2)
    }
    a, b = (up[seed]["layers.0.proj.weight"].ravel() == 258.0 for seed in (1, 2))
    c = up[1]["layers.1.proj.weight"].ravel() == 258.0
    bound = 5 / (2 * np.sqrt(a.size))
    assert abs((a & b).mean() - 0.25) < bound and abs((a & c).mean() - 0.25) < bound
    assert abs((a[1:] & a[:-1]).mean() - 0.25) < bound
    assert np.array_equal(
        up[1]["layers.0.proj.weight"],
        accumulate("unsharded", [256.0, 1.0], seed=1, rounding="stochastic", cfg=big)["layers.0.proj.weight"],
    )


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norm_and_clipping(strategy: str, world: int) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, config(tied=True))
        whole_step(grads, 1, lambda m: 2.0)
        count = sum(int(np.prod(s.global_shape)) for s in grads.named_gradients().values())
        norm = grads.clip_grad_norm_(1.0)
        assert norm == pytest.approx(2.0 * np.sqrt(count), rel=1e-6)
        assert grads.grad_norm() == pytest.approx(1.0, rel=1e-4)
        before = shards(grads)
        assert grads.clip_grad_norm_(100.0) == pytest.approx(1.0, rel=1e-4)
        after = shards(grads)
        assert all(np.array_equal(before[name][2], after[name][2]) for name in before)
        return after, norm

    results = run_ranks(world, body)
    for name, value in assemble([r[0] for r in results]).items():
        assert np.allclose(value, 2.0 / (results[0][1] + 1e-6), rtol=1e-5), name


def test_clipping_multiplies_by_max_over_norm() -> None:
    """norm 10, max 1: every gradient times 0.1."""
    grads = manager(None, "unsharded", config(hidden=1, vocab=1, layers=1, odd=1, experts=1))
    count = sum(int(np.prod(s.global_shape)) for s in grads.named_gradients().values())
    whole_step(grads, 1, lambda m: 10.0 / np.sqrt(count))
    assert grads.clip_grad_norm_(1.0) == pytest.approx(10.0, rel=1e-6)
    for value in assemble([shards(grads)]).values():
        assert np.allclose(value, 1.0 / np.sqrt(count), rtol=1e-5)
    with pytest.raises(ValueError, match="max_norm must be positive"):
        grads.clip_grad_norm_(0.0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_non_finite_gradients(strategy: str, world: int, poison: float) -> None:
    def body(rank: int, comm: Any) -> Any:
        out = []
        for choice in ("ignore", "skip", "raise"):
            grads = manager(comm, strategy, nonfinite=choice)

            def bad(m: int, rank: int = rank) -> float:
                return poison if rank == world - 1 else 1.0

            if choice == "raise":
                with pytest.raises(
                    gradgen.NonFiniteError,
                    match=r"(?s)gradient elements are inf or nan.*layers\.0\.proj\.weight",
                ):
                    whole_step(grads, 1, bad)
                grads.reset()
            else:
                whole_step(grads, 1, bad)
                assert not np.isfinite(grads.grad_norm())
            out.append((grads.step_skipped, grads.skipped_steps))
            whole_step(grads, 1, lambda m: 1.0)
            assert all(np.all(value == 1.0) for _, _, value in shards(grads).values())
            assert np.isfinite(grads.grad_norm()) and not grads.step_skipped
        return out

    for ignored, skipped, raised in run_ranks(world, body):
        assert ignored == (False, 0) and skipped == (True, 1) and raised[1] == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_bf16_is_unbiased_and_bounded(strategy: str, world: int) -> None:
    rng = np.random.default_rng(5)
    noise = rng.standard_normal((world, 4))

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, config(hidden=40, odd=20), dtype="bfloat16", rounding="stochastic")
        whole_step(grads, 4, lambda m: noise[rank, m])
        return shards(grads)

    expected = noise.sum() / world
    scale = np.abs(noise).sum()
    for name, value in assemble(run_ranks(world, body)).items():
        assert np.all(np.abs(value - expected) < scale * 2**-6), name
