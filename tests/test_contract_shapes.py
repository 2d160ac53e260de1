"""Contract rules 11 to 14 and 28: shapes, frozen weights, memory, one rank, names."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.support import (
    STRATEGIES,
    WORLDS,
    alias,
    assemble,
    config,
    fill_block,
    fill_weight,
    manager,
    model,
    on_host,
    run_ranks,
    shards,
    values,
    whole_step,
    write,
)


def random_step(grads: Any, rank: int, micro_steps: int, seed: int) -> dict[str, np.ndarray]:
    """A step of random integers in every weight; returns this rank's plain sum by checkpoint name."""
    total: dict[str, np.ndarray] = {}
    records = {w.name: w for w in grads.weights() if w.trainable and not w.tied_to}
    by_id = {(w.block, w.layer, w.id): w for w in records.values()}
    rng = np.random.default_rng([seed, rank])
    for m in range(micro_steps):
        with grads.micro_step(m, micro_steps):
            for name in [w.id for w in records.values() if w.block is None and w.id != "twice"] + ["twice"]:
                record = by_id[None, None, name]
                gradient = rng.integers(-8, 9, record.shape).astype(float)
                fill_weight(grads, name, gradient)
                total[record.name] = total.get(record.name, 0) + gradient
            for layer in reversed(range(grads.blocks["layer"])):
                block = grads.block_full(layer)
                for name, tensor in block.items():
                    record = by_id["layer", layer, name]
                    gradient = rng.integers(-8, 9, record.shape).astype(float)
                    write(tensor, gradient, block.accumulate, record.zero)
                    total[record.name] = total.get(record.name, 0) + gradient
                grads.notify_block(layer)
    return total


SIZES = [
    {"hidden": 1, "vocab": 1, "layers": 1, "odd": 1},
    {"hidden": 5, "vocab": 3, "layers": 2, "odd": 3},
    {"hidden": 64, "vocab": 9, "layers": 9, "odd": 17},
    {"hidden": 127, "vocab": 65, "layers": 3, "odd": 8, "bias": True},
]


@pytest.mark.parametrize("size", range(len(SIZES)))
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_shape_at_any_world(strategy: str, world: int, size: int) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, config(**SIZES[size]), poison=True)
        total = random_step(grads, rank, 2, size)
        return shards(grads), total, grads.grad_norm()

    results = run_ranks(world, body)
    whole = assemble([r[0] for r in results])
    expected = {name: sum(r[1][name] for r in results) / world for name in results[0][1]}
    assert whole.keys() == expected.keys()
    for name, value in whole.items():
        assert value.shape == expected[name].shape
        assert np.allclose(value, expected[name], rtol=1e-6, atol=1e-6), name
    norm = np.sqrt(sum((value**2).sum() for value in expected.values()))
    assert all(r[2] == pytest.approx(norm, rel=1e-6) for r in results)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["unsharded", "sharded", "replicated", "fully_sharded"])
def test_rows_and_whole_shards(strategy: str, world: int) -> None:
    """Rows in units of 3, whole weights on every rank and counted once, flat slices, in one block."""
    module = model("rows")

    def body(rank: int, comm: Any) -> Any:
        grads = module.GradientManager(module.Config(hidden=5, heads=7, layers=2), comm, strategy=strategy)
        rng = np.random.default_rng(rank)
        total: dict[str, Any] = {}
        names = {(w.block, w.layer, w.id): w for w in grads.weights()}
        for m in range(2):
            with grads.micro_step(m, 2):
                for name in ("head", "gain"):
                    record = names[None, None, name]
                    gradient = rng.integers(-8, 9, record.shape).astype(float)
                    fill_weight(grads, name, gradient)
                    total[record.name] = total.get(record.name, 0) + gradient
                for layer in (1, 0):
                    block = grads.block_full(layer)
                    for name, tensor in block.items():
                        record = names["layer", layer, name]
                        gradient = rng.integers(-8, 9, record.shape).astype(float)
                        write(tensor, gradient, block.accumulate, record.zero)
                        total[record.name] = total.get(record.name, 0) + gradient
                    grads.notify_block(layer)
        shapes = {name: tuple(s.shape) for name, s in grads.named_gradients().items()}
        return shards(grads), total, grads.grad_norm(), shapes

    results = run_ranks(world, body)
    whole = assemble([r[0] for r in results])
    expected = {name: sum(r[1][name] for r in results) / world for name in results[0][1]}
    for name, value in whole.items():
        assert np.allclose(value, expected[name], rtol=1e-6), name
    norm = np.sqrt(sum((value**2).sum() for value in expected.values()))
    assert all(r[2] == pytest.approx(norm, rel=1e-6) for r in results)
    if world > 1 and strategy in ("sharded", "fully_sharded"):
        units = -(-7 // world)
        for rank, result in enumerate(results):
            owned = max(0, min((rank + 1) * units, 7) - min(rank * units, 7))
            assert result[3]["layers.0.q.weight"] == (owned * 3, 5)
            assert result[3]["layers.0.scale"] == (2,)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_frozen_weights_cost_nothing(strategy: str, world: int) -> None:
    def body(rank: int, comm: Any) -> Any:
        free, frozen = (manager(comm, strategy, config(frozen=f, hidden=64)) for f in (False, True))
        with frozen.micro_step(0, 1):
            for name in ("lm_head", "spare", "logit_scale", "twice", "embedding"):
                fill_weight(frozen, name, 1.0)
            for layer in (2, 1, 0):
                fill_block(frozen, layer, 1.0)
        assert "fixed" not in frozen.block_shard(0)
        names = set(frozen.named_gradients())
        assert "positions" not in names and "layers.0.fixed" not in names
        assert not any("positions" in entry[1] for entry in frozen.trace())
        return free.memory()["total"], frozen.memory()["total"]

    for free, frozen in run_ranks(world, body):
        assert frozen < free


@pytest.mark.parametrize(
    "dtypes",
    [
        {},
        {"dtype": "bfloat16", "accumulator": "float32"},
        {"dtype": "bfloat16", "rounding": "stochastic"},
        {"wire": "bfloat16"},
    ],
)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_what_was_planned(strategy: str, world: int, dtypes: dict[str, str]) -> None:
    """To the byte; sharded strategies grow with the number of layers by shards alone."""

    def body(rank: int, comm: Any) -> Any:
        out = []
        for layers in (4, 8):
            grads = manager(comm, strategy, config(layers=layers, hidden=100), **dtypes)
            plan = grads.plan.strategy(strategy)
            memory = grads.memory()
            assert memory["total"] == plan.memory_bytes
            bytes_of = {name: buffer.nbytes for name, buffer in grads._native.buffers()}
            assert sum(bytes_of.values()) == memory["total"] - memory["exchange"]
            out.append((memory, plan))
        return out

    for (few, _), (many, plan) in run_ranks(world, body):
        arena = plan.id  # the plan names its strategy
        assert arena == strategy
        if world > 1 and "sharded" in strategy and strategy != "unsharded":
            assert many["staging"] == few["staging"]
            assert many["full"] == few["full"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_sends_nothing_and_equals_unsharded(strategy: str) -> None:
    results = []
    for name in ("unsharded", strategy):
        grads = manager(None, name)
        random_step(grads, 0, 3, 7)
        assert grads.trace() == [] and grads.memory()["staging"] == 0
        results.append(shards(grads))
    for name, (_, _, value) in results[0].items():
        assert np.array_equal(value, results[1][name][2]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_names_offsets_and_lifetime(strategy: str, world: int) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, config(bias=True))
        whole_step(grads, 1, lambda m: float(rank + 1))
        views = grads.named_gradients()
        expected = {w.name: w.shape for w in grads.weights() if w.trainable and not w.tied_to}
        assert {name: tuple(view.global_shape) for name, view in views.items()} == expected
        assert list(views) == list(expected)
        before = {name: values(view) for name, view in views.items()}
        dlpack = {name: alias(view) for name, view in views.items() if view.numel}
        grads.close()
        del grads
        gc.collect()
        for name, view in views.items():
            assert np.array_equal(values(view), before[name]), name
            if view.numel:
                assert np.array_equal(on_host(dlpack[name]).ravel(), before[name].ravel().astype(np.float32))
        return True

    assert all(run_ranks(world, body))
