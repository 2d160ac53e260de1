"""Contract rules 6 to 10: the state machine, unwritten weights, collectives, dropping a step, construction and destruction."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradgen
from tests.support import (
    STRATEGIES,
    assemble,
    config,
    fill_block,
    fill_weight,
    manager,
    model,
    overwrite,
    run_ranks,
    shards,
    whole_step,
)

OUTSIDE = ("lm_head", "spare", "logit_scale", "twice", "positions", "embedding")


def refused(error: type[BaseException], match: str, call: Any, *args: Any) -> None:
    with pytest.raises(error, match=match):
        call(*args)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_named_errors_leave_the_step_usable(strategy: str) -> None:
    grads = manager(None, strategy)
    at = "mini: block 'layer' layer 1, micro-step 0 of 2"
    refused(
        gradgen.StateError,
        "mini: block_full of block 'layer' layer 1 outside of a micro-step",
        grads.block_full,
        1,
    )
    refused(gradgen.StateError, "end_micro_step without start_micro_step", grads.end_micro_step)
    refused(
        gradgen.StateError, r"start_micro_step\(1, 2\): expected micro-step 0", grads.start_micro_step, 1, 2
    )
    refused(gradgen.StateError, "at least one micro-step", grads.start_micro_step, 0, 0)
    grads.start_micro_step(0, 2)
    refused(gradgen.StateError, "has not ended", grads.start_micro_step, 1, 2)
    refused(gradgen.StateError, f"{at}: notified without having been handed out", grads.notify_block, 1)
    block = grads.block_full(1)
    refused(gradgen.StateError, f"{at}: handed out already; notify it", grads.block_full, 1)
    refused(gradgen.StateError, f"{at}: handed out but not notified", grads.end_micro_step)
    refused(gradgen.StateError, "zero_grad inside micro-step 0 of 2", grads.zero_grad)
    for _, tensor in block.items():
        overwrite(tensor, 3.0)
    grads.notify_block(1)
    refused(gradgen.StateError, "notified without", grads.notify_block, 1)
    for layer in (0, 2):
        fill_block(grads, layer, 3.0)
    for name in OUTSIDE:
        fill_weight(grads, name, 3.0)
    grads.end_micro_step()
    refused(gradgen.StateError, "expected micro-step 1 of 2", grads.start_micro_step, 0, 2)
    refused(gradgen.StateError, "the number cannot change inside a step", grads.start_micro_step, 1, 3)
    refused(gradgen.StateError, "in the middle of a step", grads.named_gradients)
    refused(gradgen.StateError, "in the middle of a step", grads.grad_norm)
    whole = None
    with grads.micro_step(1, 2):
        fill_block(grads, 2, 1.0)
    whole = assemble([shards(grads)])
    assert np.all(whole["layers.1.proj.weight"] == 3.0) and np.all(whole["layers.2.proj.weight"] == 4.0)


@pytest.mark.parametrize(
    "bad,error",
    [
        (-1, IndexError),
        (3, IndexError),
        (2**70, IndexError),
        (True, TypeError),
        (1.0, TypeError),
        ("0", TypeError),
    ],
)
def test_bad_layers(bad: Any, error: type[BaseException]) -> None:
    grads = manager(None, "unsharded")
    grads.start_micro_step(0, 1)
    refused(error, "layer", grads.block_full, bad)
    assert grads.block_full(np.int64(2)) is not None


def test_unknown_names() -> None:
    grads = manager(None, "unsharded")
    refused(KeyError, "mini has no weight 'nope' outside its blocks.*embedding", grads.non_block_full, "nope")
    refused(KeyError, "no block kind 'nope'; it has layer", grads.block_full, 0, "nope")
    refused(ValueError, "no strategy 'nope'; it has unsharded", manager, None, "nope")
    frozen = manager(None, "unsharded", config(frozen=True))
    frozen.start_micro_step(0, 1)
    refused(gradgen.StateError, "weight 'positions' is frozen", frozen.non_block_full, "positions")


def test_every_public_name_exists() -> None:
    assert all(getattr(gradgen, name) is not None for name in gradgen.__all__)
    with pytest.raises(TypeError, match=r"threads\(n\) makes n of them: pass comms\[rank\]"):
        manager(gradgen.comm.threads(2), "unsharded")


def test_use_after_close() -> None:
    grads = manager(None, "sharded")
    grads.close()
    grads.close()
    refused(gradgen.StateError, r"mini: start_micro_step after close\(\)", grads.start_micro_step, 0, 1)
    refused(gradgen.StateError, r"after close\(\)", grads.named_gradients)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reset_after_an_exception(strategy: str, world: int) -> None:
    """One rank fails in the middle of its backward pass: the others hear of it at once, reset() mends all."""

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy)
        start = time.monotonic()
        try:
            with grads.micro_step(0, 1):
                fill_weight(grads, "lm_head", 9.0)
                fill_block(grads, 2, 9.0)
                if rank == world - 1:
                    grads.block_full(1)
                    raise RuntimeError("out of luck")
                fill_block(grads, 1, 9.0)
                fill_block(grads, 0, 9.0)
                for name in OUTSIDE[1:]:
                    fill_weight(grads, name, 9.0)
            raise AssertionError("the step ended although a rank failed")
        except (RuntimeError, gradgen.CommError) as error:
            assert "out of luck" in str(error), error
        assert time.monotonic() - start < 5
        refused(gradgen.CommError, r"(?s)out of luck.*reset\(\)", grads.start_micro_step, 0, 1)
        grads.reset()
        whole_step(grads, 2, lambda m: 1.0)
        return shards(grads)

    for value in assemble(run_ranks(world, body)).values():
        assert np.all(value == 2.0)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unwritten_weights(strategy: str, world: int) -> None:
    """What may be absent counts as zero; anything else is an error on every rank, and the next step works."""

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, poison=True)
        grads._native.poison()
        with pytest.raises(gradgen.StateError) as caught, grads.micro_step(0, 1):
            for name in OUTSIDE:
                if name != "spare" and (name != "logit_scale" or rank != world - 1):
                    fill_weight(grads, name, 1.0)
            for layer in (2, 1):
                fill_block(grads, layer, 1.0, only={"proj", "norm", "one", "fixed", "conv"})
            if rank != world - 1:
                fill_block(grads, 0, 1.0)
        text = str(caught.value)
        who = f" (rank {world - 1})" if world > 1 else ""
        for name in ("logit_scale", "layers.0.proj.weight", "layers.0.conv"):
            assert f"\n  {name}{who}\n" in text, text
        assert "spare" not in text and "experts" not in text and "layers.1" not in text
        grads.reset()
        with grads.micro_step(0, 1):
            for name in OUTSIDE:
                if name != "spare":
                    fill_weight(grads, name, 1.0)
            for layer in (2, 1, 0):
                fill_block(grads, layer, 1.0, only={"proj", "norm", "one", "fixed", "conv"})
        return shards(grads)

    for name, value in assemble(run_ranks(world, body)).items():
        assert np.all(value == (0.0 if name == "spare" or name.endswith("experts") else 1.0)), (name, value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_order_of_arrival_does_not_matter(strategy: str) -> None:
    """Rank 0 notifies (2, 1, 0), rank 1 (1, 2, 0): the same collectives in plan order, right sums."""

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy)
        for m in range(2):
            with grads.micro_step(m, 2):
                for name in OUTSIDE:
                    fill_weight(grads, name, 1.0)
                for layer in [(2, 1, 0), (1, 2, 0)][rank]:
                    fill_block(grads, layer, 10.0 * layer + rank)
        plan = grads.plan_for(2)
        assert grads.trace() == [tuple(entry) for entry in plan.trace(strategy)]
        return shards(grads), grads.trace()

    results = run_ranks(2, body)
    assert results[0][1] == results[1][1]
    for name, value in assemble([r[0] for r in results]).items():
        if name.startswith("layers."):
            assert np.allclose(value, 2 * (10.0 * int(name.split(".")[1]) + 0.5)), name


def test_too_many_blocks_at_once() -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, "sharded")
        grads.start_micro_step(0, 1)
        grads.block_full(2)
        grads.block_full(1)
        refused(
            gradgen.StateError, "more blocks are in use at once than block_buffers = 2", grads.block_full, 0
        )

    run_ranks(2, body)


@pytest.mark.parametrize("strategy", ["sharded", "sharded_all_to_all", "fully_sharded"])
@pytest.mark.parametrize(
    ("order", "needed"), [((0, 1, 2), 3), ((2, 0, 1), 2), ((1, 0, 2), 3), ((2, 1, 0), 1)]
)
def test_blocks_in_another_order_need_buffers_and_are_never_lost(
    order: tuple[int, ...], needed: int, strategy: str
) -> None:
    """A block that comes when blocks behind it fill every buffer is refused; it is not summed without its gradient."""

    def body(buffers: int) -> Callable[[int, Any], Any]:
        def run(rank: int, comm: Any) -> Any:
            grads = manager(comm, strategy, block_buffers=buffers)
            grads.start_micro_step(0, 1)
            for name in OUTSIDE:
                fill_weight(grads, name, 1.0)
            for layer in order:
                try:
                    fill_block(grads, layer, 10.0 * layer + rank)
                except gradgen.StateError as error:
                    return str(error)
            grads.end_micro_step()
            return shards(grads)

        return run

    for buffers in (1, 2, 3):
        results = run_ranks(2, body(buffers), expect_errors=True)
        if buffers < needed:
            for text in results:
                assert isinstance(text, str) and "block_buffers" in text and "`backward`" in text, text
            continue
        for name, value in assemble(results).items():
            if name.startswith("layers."):
                assert np.allclose(value, 10.0 * int(name.split(".")[1]) + 0.5), (buffers, name)


@pytest.mark.parametrize("difference", ["config", "strategy", "dtype", "seed", "divide"])
def test_ranks_that_differ_are_told_at_construction(difference: str) -> None:
    def body(rank: int, comm: Any) -> Any:
        odd = rank == 1
        cfg = config(hidden=8 if odd and difference == "config" else 6)
        strategy = "sharded" if odd and difference == "strategy" else "unsharded"
        dtype = "bfloat16" if odd and difference == "dtype" else "float16"
        seed = 3 if odd and difference == "seed" else 0
        divide = 5 if odd and difference == "divide" else "mean"
        manager(comm, strategy, cfg, dtype=dtype, seed=seed, divide=divide)

    start = time.monotonic()
    results = run_ranks(3, body, expect_errors=True)
    assert time.monotonic() - start < 5
    want = {
        "config": "lm_head",
        "strategy": "strategy: sharded",
        "dtype": "dtype: bfloat16",
        "seed": "seed: 3",
        "divide": "divide: 5",
    }
    for error in results:
        assert isinstance(error, gradgen.MismatchError), error
        assert want[difference] in str(error) and "rank 1" in str(error), error


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_grad_drops_everything_pending(strategy: str, world: int) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy)
        grads.start_micro_step(0, 2)
        for layer in (2, 1, 0):
            fill_block(grads, layer, [10.0, 20.0][rank])
        grads.end_micro_step()
        grads.zero_grad()
        assert all(np.all(value == 0) for _, _, value in shards(grads).values())
        whole_step(grads, 1, lambda m: [1.0, 2.0][rank])
        return shards(grads)

    for value in assemble(run_ranks(world, body)).values():
        assert np.all(value == (1.5 if world == 2 else 1.0))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_construct_and_destroy_is_flat(strategy: str) -> None:
    model()

    def once() -> None:
        def body(rank: int, comm: Any) -> None:
            grads = manager(comm, strategy, config(vocab=4096, hidden=64))
            whole_step(grads, 1, lambda m: 1.0)

        run_ranks(2, body)
        with pytest.raises(gradgen.Error):
            manager(None, strategy, wire="float64")

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    for _ in range(10):
        once()
    before, files = resident(), len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        once()
    assert resident() - before < 4096, "KiB grew over 100 constructions"
    assert len(os.listdir("/proc/self/fd")) <= files
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
