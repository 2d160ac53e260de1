"""Corners of the contract where a plausible manager gives wrong numbers or waits for ever."""

from __future__ import annotations

import os
import time
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
    run_ranks,
    shards,
    whole_step,
)

OUTSIDE = ("lm_head", "spare", "logit_scale", "twice", "positions", "embedding")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stochastic_rounding_is_unbiased_over_ranks(strategy: str) -> None:
    """Rounding local sums and then the sum over ranks with the same bits would double the excess."""

    def body(rank: int, comm: Any) -> Any:
        grads = manager(
            comm,
            strategy,
            config(hidden=256, odd=96, layers=2),
            dtype="float32",
            accumulator="bfloat16",
            rounding="stochastic",
        )
        whole_step(grads, 1, lambda m: 1 + 2**-9 if rank == 0 else 1.0)
        return shards(grads)

    value = assemble(run_ranks(2, body))["layers.0.proj.weight"]
    excess = (value - 1).mean() / 2**-7
    assert abs(excess - 0.125) < 5 * np.sqrt(0.125 / value.size) + 0.01, excess


def test_final_scale_rounds_stochastically() -> None:
    grads = manager(
        None,
        "unsharded",
        config(hidden=256, odd=96, layers=2),
        dtype="bfloat16",
        rounding="stochastic",
        divide=3,
    )
    for m in range(2):
        with grads.micro_step(m, 2):
            if m == 0:
                for name in OUTSIDE:
                    fill_weight(grads, name, 1.0)
                for layer in (1, 0):
                    fill_block(grads, layer, 1.0)
    value = shards(grads)["layers.0.proj.weight"][2]
    assert len(np.unique(value)) == 2 and abs(value.mean() - 1 / 3) < 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_dropped_steps_leave_zeros(strategy: str, world: int) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy)
        whole_step(grads, 1, lambda m: 3.0 + rank)
        grads.zero_grad()
        assert grads.grad_norm() == 0.0 and grads.clip_grad_norm_(1.0) == 0.0
        whole_step(grads, 1, lambda m: 3.0 + rank)
        comm.barrier()
        grads.reset()
        assert grads.grad_norm() == 0.0
        assert all(np.all(value == 0) for _, _, value in shards(grads).values())

    run_ranks(world, body)


def test_local_values_are_not_readable_after_a_failed_end() -> None:
    """The other rank leaves while this one waits for it: what is in the buffers is not a reduced gradient."""

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, "unsharded")
        grads.start_micro_step(0, 1)
        for name in OUTSIDE:
            fill_weight(grads, name, 10.0)
        for layer in (2, 1, 0):
            fill_block(grads, layer, 10.0)
        if rank == 1:
            comm.close()
            return
        with pytest.raises(gradgen.PeerLost):
            grads.end_micro_step()
        for read in (
            grads.named_gradients,
            grads.grad_norm,
            lambda: grads.block_shard(0),
            lambda: grads.clip_grad_norm_(1.0),
        ):
            with pytest.raises(gradgen.CommError, match="earlier call failed"):
                read()

    run_ranks(2, body)


def test_divisors_of_ranks_must_agree() -> None:
    def construct(rank: int, comm: Any) -> Any:
        manager(comm, "sharded", divide=1234567 + rank)

    def step(rank: int, comm: Any) -> Any:
        whole_step(manager(comm, "sharded"), 1, lambda m: 1.0, divide=2.0 + rank)

    for body, text in ((construct, "1234568"), (step, "rank 1 by 3")):
        for error in run_ranks(2, body, expect_errors=True):
            assert isinstance(error, gradgen.MismatchError) and text in str(error), error


def test_a_forked_child_cannot_touch_the_gradients() -> None:
    grads = manager(None, "unsharded")
    whole_step(grads, 1, lambda m: 1.0)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: grads.start_micro_step(0, 1),
            lambda: grads.scale_gradients(7.0),
            grads.named_gradients,
        ):
            try:
                call()
            except gradgen.StateError as error:
                refused += "forked process" in str(error)
        os._exit(0 if refused == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(np.all(value == 1.0) for _, _, value in shards(grads).values())


@pytest.mark.parametrize("strategy", ["unsharded", "sharded", "fully_sharded"])
def test_a_late_rank_and_many_layers(strategy: str) -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, config(layers=90))
        if rank == 1:
            time.sleep(0.5)
        for m in range(2):
            with grads.micro_step(m, 2):
                if m == 0:  # nothing at all in the second
                    for name in OUTSIDE:
                        fill_weight(grads, name, 1.0)
                    for layer in reversed(range(90)):
                        fill_block(grads, layer, 1.0)
        return shards(grads)

    for value in assemble(run_ranks(2, body)).values():
        assert np.all(value == 1.0)


def test_a_reset_that_failed_leaves_the_manager_refused() -> None:
    comms = gradgen.comm.threads(2, timeout=0.3)

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, "sharded")
        comm.barrier()
        if rank == 1:
            time.sleep(1.0)
            return
        grads.start_micro_step(0, 1)
        grads.block_full(2)
        with pytest.raises(gradgen.CommError):
            grads.reset()
        with pytest.raises(gradgen.CommError, match="reset"):
            grads.notify_block(2, written=[])

    import threading

    errors: list[BaseException] = []

    def play(rank: int) -> None:
        try:
            body(rank, comms[rank])
        except BaseException as error:
            errors.append(error)

    ranks = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert not errors, errors


def test_ranks_agree_on_the_step_after_reset() -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, "sharded")
        whole_step(grads, 1, lambda m: 1.0)
        grads.step = 5 + rank  # as if one rank had finished a step that the other had not
        comm.barrier()
        grads.reset()
        assert grads.step == 6
        whole_step(grads, 1, lambda m: 2.0)
        return shards(grads)

    for value in assemble(run_ranks(2, body)).values():
        assert np.all(value == 2.0)


@pytest.mark.parametrize(
    "options", [{"wire": "float64"}, {"dtype": "int8"}, {"rounding": "up"}, {"strategy": "nope"}]
)
def test_one_rank_that_cannot_build_does_not_keep_the_others_waiting(options: dict[str, Any]) -> None:
    def body(rank: int, comm: Any) -> Any:
        chosen = {"strategy": "sharded", **(options if rank == 1 else {})}
        model().GradientManager(config(), comm, **chosen)

    start = time.monotonic()
    first, second = run_ranks(2, body, expect_errors=True)
    assert time.monotonic() - start < 3
    assert isinstance(first, gradgen.CommError) and "rank 1 could not build its manager" in str(first), first
    assert isinstance(second, (gradgen.ConfigError, ValueError)), second


def test_an_error_at_the_end_of_a_micro_step_reaches_the_others() -> None:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, "sharded")
        told = pytest.raises((gradgen.StateError, gradgen.CommError), match="handed out but not notified")
        with told, grads.micro_step(0, 1):
            for name in OUTSIDE:
                fill_weight(grads, name, 1.0)
            for layer in (2, 1):
                fill_block(grads, layer, 1.0)
            if rank == 0:
                grads.block_full(0)  # and forgotten
            else:
                fill_block(grads, 0, 1.0)
        grads.reset()
        whole_step(grads, 1, lambda m: 1.0)
        return shards(grads)

    start = time.monotonic()
    for value in assemble(run_ranks(2, body)).values():
        assert np.all(value == 1.0)
    assert time.monotonic() - start < 5


def test_two_managers_on_one_communicator_do_not_mix() -> None:
    def right(rank: int, comm: Any) -> Any:
        first, second = manager(comm, "sharded"), manager(comm, "sharded")
        for _ in range(2):
            whole_step(first, 1, lambda m: 1.0)
            whole_step(second, 1, lambda m: 100.0)
        return shards(first), shards(second)

    results = run_ranks(2, right)
    for index, want in ((0, 1.0), (1, 100.0)):
        for value in assemble([result[index] for result in results]).values():
            assert np.all(value == want)

    def crossed(rank: int, comm: Any) -> Any:
        pair = [manager(comm, "sharded"), manager(comm, "sharded")]
        for grads in pair if rank == 0 else reversed(pair):
            whole_step(grads, 1, lambda m: 1.0)

    for error in run_ranks(2, crossed, expect_errors=True):
        assert isinstance(error, gradgen.MismatchError), error


def test_numbers_that_cannot_be_meant() -> None:
    grads = manager(None, "unsharded")
    whole_step(grads, 1, lambda m: 1.0)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            grads.scale_gradients(bad)
    for bad_step in (-1, 2**63 - 1):
        with pytest.raises(ValueError, match="step number"):
            grads.step = bad_step
    with pytest.raises(gradgen.ConfigError, match="hidden.*must"):
        config(hidden=2**70)
    with pytest.raises((gradgen.ConfigError, ValueError), match="divide"):
        manager(None, "unsharded", divide=1e300)
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            gradgen.comm.threads(2, timeout=timeout)
    big = manager(None, "unsharded", dtype="float64")
    whole_step(big, 1, lambda m: 1e200)
    assert big.clip_grad_norm_(1.0) == float("inf")
    assert np.all(shards(big)["layers.0.norm.weight"][2] == 1e200)  # not silently zero
