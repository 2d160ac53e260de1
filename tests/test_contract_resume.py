"""The contract on saving and resuming: in the middle of accumulation, after it, and at another number of ranks."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradgen
from tests import support
from tests.support import (
    STRATEGIES,
    assemble,
    config,
    fill_block,
    fill_weight,
    outside,
    run_ranks,
    shards,
    values,
    visit_all,
    whole_step,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed": {"dtype": "bfloat16", "accumulator": "float32"},
    "stochastic": {"dtype": "bfloat16", "rounding": "stochastic", "seed": 7},
    "clipped": {"nonfinite": "skip"},
}


@pytest.fixture(params=["numpy", "torch"])
def arrays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What state_dict gives: it looks at whether the process has imported torch."""
    if support.DEVICE != "cpu" and request.param == "numpy":
        pytest.skip("the test itself reads a GPU with torch")
    if request.param == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    yield request.param


def manager(comm: Any, strategy: str, **options: Any) -> Any:
    changes = {key: options.pop(key) for key in ("tied", "bias", "hidden") if key in options}
    return support.manager(comm, strategy, config(**changes), **options)


def noise(rank: int, m: int) -> float:
    return float(np.random.default_rng([rank, m]).standard_normal())


def go_on(grads: Any, micro_steps: int, end: int, gradient: Any) -> None:
    for m in range(grads.next_micro_step, end):
        with grads.micro_step(m, micro_steps):
            visit_all(grads, gradient(m))


def bits(grads: Any) -> dict[str, bytes]:
    return {name: value.tobytes() for name, (_, _, value) in shards(grads).items()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_step_has_the_bits_of_one_that_was_not_stopped(
    strategy: str, options: str, world: int, arrays: str
) -> None:
    def body(rank: int, comm: Any) -> None:
        kinds = {"tied": options == "fp32", **OPTIONS[options]}
        straight, first = manager(comm, strategy, **kinds), manager(comm, strategy, **kinds)
        for grads in (straight, first):  # the step's number is part of the random counter
            whole_step(grads, 1, lambda m: noise(rank, 50))
        go_on(straight, 4, 4, lambda m: noise(rank, m))
        go_on(first, 4, 2, lambda m: noise(rank, m))
        state = first.state_dict()
        assert (state["step"], state["micro_step"], state["micro_steps"]) == (1, 2, 4)
        first.close()
        second = manager(comm, strategy, **kinds)
        second.load_state_dict(state)
        assert (second.step, second.next_micro_step) == (1, 2)
        go_on(second, 4, 4, lambda m: noise(rank, m))
        assert bits(second) == bits(straight)
        assert second.grad_norm() == straight.grad_norm()
        for grads in (straight, second):
            whole_step(grads, 2, lambda m: noise(rank, 9 + m))
        assert bits(second) == bits(straight)

    run_ranks(world, body)


def plain(value: Any, array: type) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain(v, array) for k, v in value.items())
    if isinstance(value, list):
        return all(plain(v, array) for v in value)
    return value is None or type(value) in (int, float, bool, str, array)


def test_a_state_is_plain_and_survives_torch_save() -> None:
    torch = pytest.importorskip("torch")
    straight, grads = (manager(None, "sharded", dtype="bfloat16") for _ in range(2))
    go_on(straight, 3, 3, lambda m: noise(0, m))
    go_on(grads, 3, 2, lambda m: noise(0, m))
    state = grads.state_dict()
    assert plain(state, torch.Tensor)
    assert all(e["values"].dtype == torch.bfloat16 for e in state["gradients"].values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = manager(None, "sharded", dtype="bfloat16")
    other.load_state_dict(torch.load(file, weights_only=True))
    go_on(other, 3, 3, lambda m: noise(0, m))
    assert bits(other) == bits(straight)


@pytest.mark.skipif(support.DEVICE != "cpu", reason="the test itself reads a GPU with torch")
def test_a_state_is_a_copy_and_plain_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    grads = manager(None, "unsharded")
    go_on(grads, 2, 1, lambda m: 3.0)
    state = grads.state_dict()
    assert plain(state, np.ndarray)
    go_on(grads, 2, 2, lambda m: 4.0)
    assert all(np.all(entry["values"] == 3.0) for entry in state["gradients"].values())


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (2, 1), (1, 2), (3, 3)])
@pytest.mark.parametrize(
    "strategies", [(s, s) for s in STRATEGIES] + [("unsharded", "sharded"), ("sharded", "replicated")]
)
def test_another_number_of_ranks_goes_on_with_the_same_values(
    old: int, new: int, strategies: tuple[str, str]
) -> None:
    """Every rank brings the same gradients, so that their mean is the same at any number of ranks."""

    def save(rank: int, comm: Any) -> dict[str, Any]:
        grads = manager(comm, strategies[0], bias=True)
        go_on(grads, 4, 2, lambda m: 1.0 + m)
        return grads.state_dict()

    states = run_ranks(old, save)
    for name, entry in states[0]["gradients"].items():
        counts = [state["gradients"][name]["numel"] for state in states]
        whole = int(np.prod(entry["global_shape"]))
        assert counts == [whole] * old if entry["partial"] else sum(counts) == whole, (
            f"{name}: padding was stored"
        )

    def resume(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategies[1], bias=True)
        grads.load_state_dict(states[::-1])
        go_on(grads, 4, 4, lambda m: 1.0 + m)
        return shards(grads), grads.grad_norm()

    results = run_ranks(new, resume)
    full = assemble([r[0] for r in results])
    assert all(np.all(value == 10.0) for value in full.values())
    assert results[0][1] == pytest.approx(10.0 * sum(v.size for v in full.values()) ** 0.5)


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("strategy", ["unsharded", "sharded"])
def test_sums_go_on_at_any_number_of_ranks(old: int, new: int, strategy: str) -> None:
    """With a divisor that does not depend on the ranks. Ranks differ, and some have not visited every block."""

    def step(grads: Any, rank: int, world: int, m: int) -> None:
        with grads.micro_step(m, 2):
            for name in outside(grads):
                fill_weight(grads, name, 1.0 + rank)
            for layer in (2, 1, 0):
                if layer != 1 or rank == world - 1 or m == 1:
                    fill_block(grads, layer, 1.0 + rank)

    def save(rank: int, comm: Any) -> dict[str, Any]:
        grads = manager(comm, strategy, divide=1.0)
        step(grads, rank, old, 0)
        return grads.state_dict()

    states = run_ranks(old, save)

    def resume(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, divide=1.0)
        grads.load_state_dict(states)
        step(grads, rank, new, 1)
        return shards(grads)

    everyone = {w: sum(range(1, w + 1)) for w in (old, new)}
    for name, value in assemble(run_ranks(new, resume)).items():
        before = float(old) if name.startswith("layers.1.") else everyone[old]
        uses = 2 if name == "twice" else 1
        assert np.all(value == uses * (before + everyone[new])), name


@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_finished_step_can_be_read_at_any_number_of_ranks(strategy: str, new: int) -> None:
    def save(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy)
        whole_step(grads, 2, lambda m: noise(rank, m))
        return grads.state_dict(), shards(grads), grads.grad_norm()

    saved = run_ranks(2, save)

    def resume(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy)
        grads.load_state_dict([state for state, _, _ in saved])
        assert grads.step == 1
        norm = grads.clip_grad_norm_(1e9)
        found = shards(grads)
        whole_step(grads, 1, lambda m: 2.0)
        assert all(np.all(v == 2.0) for _, _, v in shards(grads).values())
        return found, norm

    results = run_ranks(new, resume)
    wanted, found = (assemble(list(parts)) for parts in ([s for _, s, _ in saved], [s for s, _ in results]))
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
    assert all(norm == saved[0][2] for _, norm in results)


def test_between_steps_only_numbers_are_saved() -> None:
    grads = manager(None, "unsharded")
    for _ in range(3):
        whole_step(grads, 1, lambda m: 1.0)
    grads.zero_grad()
    state = grads.state_dict()
    assert state["gradients"] == {} and state["phase"] == "fresh"

    def resume(rank: int, comm: Any) -> None:
        other = manager(comm, "sharded")
        other.load_state_dict(state)
        assert (other.step, other.next_micro_step) == (3, 0)
        assert all(np.all(v == 0.0) for _, _, v in shards(other).values())
        whole_step(other, 1, lambda m: 5.0)
        assert other.step == 4 and all(np.all(v == 5.0) for _, _, v in shards(other).values())

    run_ranks(2, resume)


def test_unwritten_weights_are_remembered() -> None:
    """What was written before the stop counts afterwards, and what nobody wrote is named."""
    for skip, complains in ((1, False), (0, True)):
        grads = manager(None, "unsharded")
        for m in range(2):
            grads.start_micro_step(m, 2)
            for name in outside(grads):
                if not (name == "logit_scale" and m >= skip):
                    fill_weight(grads, name, 1.0)
            for layer in (2, 1, 0):
                fill_block(grads, layer, 1.0)
            if m == 1 and complains:
                with pytest.raises(
                    gradgen.StateError, match="no gradient in any of its 2 micro-steps:\n  logit_scale"
                ):
                    grads.end_micro_step()
                continue
            grads.end_micro_step()
            if m == 0:
                state = grads.state_dict()
                grads = manager(None, "unsharded")
                grads.load_state_dict(state)


def refused(states: Any, world: int, strategy: str, match: str, **options: Any) -> None:
    """Every rank is told, holds nothing, and can go on."""

    def body(rank: int, comm: Any) -> str:
        grads = manager(comm, strategy, **options)
        try:
            grads.load_state_dict(states(rank) if callable(states) else states)
        except (ValueError, gradgen.MismatchError) as error:
            assert grads.step == 0 and all(np.all(v == 0.0) for _, _, v in shards(grads).values())
            whole_step(grads, 1, lambda m: options.get("divide", world) / world)
            assert all(np.all(v == 1.0) for _, _, v in shards(grads).values())
            return str(error)
        return "no error"

    for text in run_ranks(world, body):
        assert match in text


def saved(
    world: int, strategy: str, micro: int = 1, gradient: Any = lambda m: 1.0, **options: Any
) -> list[Any]:
    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, **options)
        go_on(grads, 4, micro, gradient)
        return grads.state_dict()

    return run_ranks(world, body)


def test_what_cannot_be_restored_is_refused() -> None:
    two = saved(2, "unsharded")
    refused(lambda rank: two[rank], 1, "unsharded", "pass the states of all 2 ranks, as a list")
    refused(lambda rank: two[0], 2, "unsharded", "pass the states of all 2 ranks, as a list")
    refused(lambda rank: two[rank], 2, "sharded", "needs the states of all 2 ranks")
    refused([two[0], saved(2, "unsharded", 2)[1]], 2, "unsharded", "rank 1 at step 0, 2 of 4 micro-steps")
    refused([two[0], two[0]], 2, "unsharded", "not the states of different ranks of one run")
    refused(two, 2, "unsharded", 'build it with accumulator="float32"', dtype="bfloat16")
    refused(two, 3, "unsharded", "cannot go on as a mean over 3 without rounding")
    refused(two, 2, "unsharded", "takes the mean over ranks, and this manager divides by 2", divide=2.0)
    refused({**two[0], "model": "llama"}, 1, "unsharded", "it was saved by llama")
    refused({"a": 1}, 1, "unsharded", "not the state of a gradient manager: KeyError: 'format'")
    refused([], 2, "unsharded", "no state was given")
    refused(
        {**two[0], "world_size": 10**9}, 1, "unsharded", "saved by 1000000000 ranks; there are at most 64"
    )
    bad = {**two[0], "gradients": {**two[0]["gradients"]}}
    name = "layers.1.proj.weight"
    bad["gradients"][name] = {**bad["gradients"][name], "values": np.zeros(3, np.float32)}
    refused(lambda rank: [bad, two[1]][rank], 2, "unsharded", f"{name}: 12 bytes of values for 30 elements")
    del bad["gradients"][name]
    refused([bad, two[1]], 2, "unsharded", f"{name}: not in the state of rank 0")
    refused(saved(1, "unsharded", hidden=7)[0], 1, "unsharded", "another shape was saved")
    seeded = saved(1, "unsharded", dtype="bfloat16", rounding="stochastic", seed=3)[0]
    refused(seeded, 1, "unsharded", "saved with seed=3", dtype="bfloat16", rounding="stochastic", seed=4)


def test_one_rank_that_refuses_is_heard_by_all() -> None:
    two = saved(2, "sharded")
    refused(
        lambda rank: two[0] if rank == 0 else {"format": 0},
        2,
        "sharded",
        "format 0, and this gradgen reads 1",
    )


def test_sums_that_do_not_fit_sixteen_bits_are_not_rounded() -> None:
    """256 and 1 are bfloat16, 257 is not."""

    def save(rank: int, comm: Any) -> Any:
        grads = manager(comm, "unsharded", dtype="bfloat16", divide=1.0)
        go_on(grads, 4, 1, lambda m: 256.0 if rank == 0 else 2.0 if rank == 1 else 1.0)
        return grads.state_dict()

    three = run_ranks(3, save)
    same = {"dtype": "bfloat16", "divide": 1.0}
    refused(three, 1, "unsharded", "do not fit one bfloat16 without rounding", **same)
    refused(three, 2, "unsharded", "resume at 3 ranks or more", **same)

    def resume(rank: int, comm: Any) -> Any:
        grads = manager(comm, "unsharded", **same)
        grads.load_state_dict(three)
        for m in range(1, 4):
            with grads.micro_step(m, 4):
                visit_all(grads, 0.0)
        return shards(grads)

    for value in assemble(run_ranks(4, resume)).values():
        assert np.all(value == 260.0)  # 259 in the middle of two bfloat16 numbers, rounded once


def test_a_rank_that_is_gone_leaves_the_others_in_need_of_reset() -> None:
    two = saved(2, "sharded")

    def body(rank: int, comm: Any) -> None:
        grads = manager(comm, "sharded")
        if rank == 1:
            comm.close()
            return
        with pytest.raises(gradgen.PeerLost):
            grads.load_state_dict(two)
        with pytest.raises(gradgen.CommError, match="(?s)an earlier call failed.*reset"):
            grads.start_micro_step(1, 4)

    run_ranks(2, body)


def test_a_resumed_mean_takes_no_other_divisor() -> None:
    two = saved(2, "unsharded")

    def body(rank: int, comm: Any) -> None:
        grads = manager(comm, "unsharded")
        grads.load_state_dict(two)
        with pytest.raises(gradgen.StateError, match="resumed at another number of ranks as a mean"):
            grads.start_micro_step(1, 4, divide=3.0)
        grads.start_micro_step(1, 4)
        with pytest.raises(gradgen.StateError, match="give divide before the state is saved"):
            grads.set_divide(5.0)
        grads.reset()

    run_ranks(1, body)


def test_not_inside_a_micro_step() -> None:
    grads = manager(None, "sharded")
    state = grads.state_dict()
    grads.start_micro_step(0, 1)
    for call in (grads.state_dict, lambda: grads.load_state_dict(state)):
        with pytest.raises(gradgen.StateError, match="state_dict inside micro-step 0 of 1"):
            call()
    visit_all(grads, 1.0)
    grads.end_micro_step()
    assert all(np.all(values(s) == 1.0) for s in grads.named_gradients().values())
