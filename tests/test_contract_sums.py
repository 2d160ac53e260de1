"""Contract rules 1 to 5: sums, first touch, zero patterns, conditional weights, ties and several uses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gradgen
from tests.support import (
    DEVICE,
    STRATEGIES,
    WORLDS,
    assemble,
    config,
    fill_block,
    fill_weight,
    manager,
    overwrite,
    run_ranks,
    shards,
    values,
    whole_step,
    write,
)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_steps_sum_and_ranks_average(strategy: str, world: int) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy)
        contributions = [[10.0, 20.0], [1.0, 2.0]]
        whole_step(grads, 2, lambda m: contributions[m][rank % 2])
        return shards(grads)

    expected = sum([11.0, 22.0][rank % 2] for rank in range(world)) / world
    for name, value in assemble(run_ranks(world, body)).items():
        assert np.all(value == pytest.approx(expected, rel=1e-6)), (name, value, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_divisor_is_applied_once(strategy: str, world: int, dtype: str) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, dtype=dtype, divide=8)
        whole_step(grads, 2, lambda m: 32.0 / world)
        first = shards(grads)
        whole_step(grads, 2, lambda m: 32.0 / world, divide=16.0)
        return first, shards(grads)

    results = run_ranks(world, body)
    for value in assemble([first for first, _ in results]).values():
        assert np.all(value == 8.0)
    for value in assemble([second for _, second in results]).values():
        assert np.all(value == 4.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_global_token_mean(strategy: str) -> None:
    """Tokens 1 and 3 with gradients per token 4 and 0: the mean over tokens is 1, known only in the last micro-step."""

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy)
        tokens, per_token = [(1, 4.0), (3, 0.0)][rank]
        whole_step(grads, 1, lambda m: tokens * per_token, divide=np.float32(4))
        return shards(grads)

    for value in assemble(run_ranks(2, body)).values():
        assert np.all(value == 1.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "1", True])
def test_bad_divisors_are_refused(strategy: str, bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="divide"):
        manager(None, strategy, divide=bad)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_first_touch_belongs_to_the_step(strategy: str, world: int) -> None:
    """A block visited only in micro-step 1 of 3 holds that gradient and nothing of the last step; poison tells."""

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, poison=True)
        whole_step(grads, 2, lambda m: 77.0)
        grads._native.poison()
        for m in range(3):
            with grads.micro_step(m, 3):
                if m == 0:
                    for name in ("lm_head", "spare", "logit_scale", "twice", "positions", "embedding"):
                        fill_weight(grads, name, 2.0)
                for layer in (2, 1, 0):
                    if layer != 1 or m == 1:
                        fill_block(grads, layer, float(m + 1))
        return shards(grads)

    whole = assemble(run_ranks(world, body))
    for name, value in whole.items():
        want = 2.0 if not name.startswith("layers.") else (2.0 if name.startswith("layers.1.") else 6.0)
        assert np.allclose(value, want, rtol=1e-6), (name, value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_block_visited_twice_holds_the_sum(strategy: str, world: int) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy)
        with grads.micro_step(0, 1):
            for name in ("lm_head", "spare", "logit_scale", "twice", "positions", "embedding"):
                fill_weight(grads, name, 1.0)
            for layer in (2, 1, 0):
                fill_block(grads, layer, 1.0)
                fill_block(grads, layer, 2.0)
        return shards(grads)

    for name, value in assemble(run_ranks(world, body)).items():
        assert np.all(value == (3.0 if name.startswith("layers.") else 1.0)), name


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_random_visit_masks(strategy: str, world: int, seed: int) -> None:
    """Every rank visits its own random blocks in its own micro-steps, each block at least once a step."""
    rng = np.random.default_rng(seed)
    micro_steps, layers = 3, 5
    masks = rng.random((world, micro_steps, layers)) < 0.5
    for rank, layer in itertools.product(range(world), range(layers)):
        if not masks[rank, :, layer].any():
            masks[rank, rng.integers(micro_steps), layer] = True
    gradients = rng.integers(1, 9, (world, micro_steps, layers)).astype(float)

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, config(layers=layers), poison=True)
        for m in range(micro_steps):
            with grads.micro_step(m, micro_steps):
                if m == 1:
                    for name in ("lm_head", "spare", "logit_scale", "twice", "positions", "embedding"):
                        fill_weight(grads, name, 1.0)
                for layer in reversed(range(layers)):
                    if masks[rank, m, layer]:
                        fill_block(grads, layer, gradients[rank, m, layer])
        return shards(grads), grads.trace()

    results = run_ranks(world, body)
    assert all(trace == results[0][1] for _, trace in results)
    expected = (masks * gradients).sum((0, 1)) / world
    for name, value in assemble([shard for shard, _ in results]).items():
        want = expected[int(name.split(".")[1])] if name.startswith("layers.") else 1.0
        assert np.allclose(value, want, rtol=1e-6), (name, value, want)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_patterns(strategy: str) -> None:
    """Zeroed weights are zero when handed out; others are left alone, and `accumulate` says overwrite."""
    grads = manager(None, strategy, dtype="float32")
    whole_step(grads, 1, lambda m: 5.0)
    grads._native.poison()
    grads.start_micro_step(0, 1)
    block = grads.block_full(0)
    assert not block.accumulate
    assert np.all(values(block.norm) == 0)
    assert np.all(values(block.expert) == 0)  # may be absent: contributes zeros unless written
    assert np.all(np.isnan(values(block.proj)))  # never touched
    grads.notify_block(0)
    embedding = grads.non_block_full("embedding")
    assert np.all(values(embedding) == 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_conditional_weights_and_guard_bytes(strategy: str, world: int, bias: bool, tied: bool) -> None:
    def body(rank: int, comm: Any) -> Any:
        cfg = config(bias=bias, tied=tied)
        grads = manager(comm, strategy, cfg)
        slots = grads.plan.to_json()["arenas"]
        guards = []
        for name, buffer in grads._native.buffers():
            overwrite(buffer, 12345.0)
            guards.append((name, buffer))
        whole_step(grads, 2, lambda m: 1.0)
        padding = {a["id"]: a for a in slots}
        for name, buffer in guards:
            data = values(buffer)
            if world == 1 and name.startswith("block"):
                used = np.zeros(data.size, bool)
                for slot in padding["layer"]["slots"]:
                    used[slot["offset"] : slot["offset"] + slot["numel"]] = True
                # On a GPU one launch zeroes the zero range, and the padding between its weights with it.
                touched = padding["layer"]["zero_numel"] if DEVICE != "cpu" else 0
                assert np.all(data[touched:][~used[touched:]] == 12345.0), name
                assert np.all(data[used] == 2.0), name
        return shards(grads), {w.id for w in grads.weights()}

    results = run_ranks(world, body)
    names, ids = set(results[0][0]), results[0][1]
    assert ("layers.0.proj.bias" in names) == bias and ("shift" in ids) == bias
    assert ("head.weight" in names) == (not tied) and "embed.weight" in names
    for name, value in assemble([shard for shard, _ in results]).items():
        assert np.all(value == 2.0), name
    grads = manager(None, strategy, config(bias=bias, tied=tied))
    grads.start_micro_step(0, 1)
    block = grads.block_full(0)
    assert ("shift" in block) == bias
    if not bias:
        with pytest.raises(AttributeError, match="has no weight 'shift'"):
            _ = block.shift


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ties_add_and_reduce_once(strategy: str, world: int) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, config(tied=True), poison=True)
        for m in range(2):
            with grads.micro_step(m, 2):
                fill_weight(grads, "lm_head", 1.0)
                for name in ("spare", "logit_scale", "positions"):
                    fill_weight(grads, name, 1.0)
                for layer in (2, 1, 0):
                    fill_block(grads, layer, 1.0)
                fill_weight(grads, "twice", 1.0)
                fill_weight(grads, "twice", 2.0)
                fill_weight(grads, "embedding", 2.0)
        reduced = [entry for entry in grads.trace() if "embedding" in entry[1] and entry[0] != "all_gather"]
        return shards(grads), len(reduced), grads.grad_norm()

    results = run_ranks(world, body)
    whole = assemble([r[0] for r in results])
    assert np.all(whole["embed.weight"] == 6.0) and np.all(whole["twice"] == 6.0)
    assert results[0][1] == (0 if world == 1 else (2 if strategy == "fully_sharded" else 1))
    norm = np.sqrt(sum((value**2).sum() for value in whole.values()))
    assert all(r[2] == pytest.approx(norm, rel=1e-6) for r in results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_weights_in_an_unexpected_order_are_safe(strategy: str) -> None:
    """The look-up writes before the head does: the buffer is zeroed and everybody adds."""
    grads = manager(None, strategy, config(tied=True), poison=True)
    grads.start_micro_step(0, 1)
    embedding = grads.non_block_full("embedding")
    assert embedding.accumulate and np.all(values(embedding) == 0)
    write(embedding, 1.0, accumulate=True, zeroed=False)
    grads.notify_non_block("embedding")
    head = grads.non_block_full("lm_head")
    assert head.accumulate and np.all(values(head) == 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_uses_than_declared(strategy: str) -> None:
    grads = manager(None, strategy)
    grads.start_micro_step(0, 1)
    fill_weight(grads, "twice", 1.0)
    fill_weight(grads, "twice", 2.0)
    with pytest.raises(
        gradgen.StateError,
        match=r"mini: weight 'twice', micro-step 0 of 1: use 3, but the spec declares uses: 2",
    ):
        grads.non_block_full("twice")
