"""Where ShardedOptimizer keeps parameters, and how an update reaches the other ranks: in memory that they share, or
through a buffer; the same bits either way.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch_ranks import run_ranks as run_processes

import gradgen
import gradgen.torch.optimizer
from gradgen.torch import ShardedOptimizer, attach
from tests.parameter_bag import Bag, train
from tests.support import config, model, run_ranks

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied-frozen": {"tied": True, "frozen": True, "bias": True},
    "bf16": {"dtype": "bfloat16"},
}


def setup(comm: Any, strategy: str = "unsharded", dtype: str = "float32", **changes: Any) -> tuple[Bag, Any]:
    grads = model().GradientManager(config(**changes), comm, strategy=strategy, dtype=dtype)
    bag = Bag(grads)
    attach(bag, grads)
    return bag, grads


def sgd(bag: Bag, grads: Any) -> ShardedOptimizer:
    return ShardedOptimizer(torch.optim.SGD, bag, grads, lr=0.25, momentum=0.5)


def bits(bag: Bag) -> dict[str, bytes]:
    return {
        name: p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, p in bag.named_parameters()
    }


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ["unsharded", "sharded", "fully_sharded"])
def test_shared_memory_gives_the_bits_of_the_buffer(
    world: int, case: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int, comm: Any) -> tuple[dict[str, bytes], list[str]]:
        bag, grads = setup(comm, strategy, **CASES[case])
        before = {name: (id(p), p.requires_grad, p.data_ptr()) for name, p in bag.named_parameters()}
        values = bits(bag)
        optimizer = sgd(bag, grads)
        assert bits(bag) == values, "housing changed a value"
        after = {name: (id(p), p.requires_grad, p.data_ptr()) for name, p in bag.named_parameters()}
        assert {n: v[:2] for n, v in before.items()} == {n: v[:2] for n, v in after.items()}
        train(bag, grads, optimizer, rank, 3)
        return bits(bag), sorted(name for name in before if before[name][2] != after[name][2])

    shared = run_ranks(world, body)
    monkeypatch.setattr(gradgen.torch.optimizer, "house", lambda *_: (None, set()))
    packed = run_ranks(world, body)
    for rank in range(world):
        assert shared[rank][0] == shared[0][0] == packed[rank][0]
        assert packed[rank][1] == []
        assert ("layers.0.proj.weight" in shared[rank][1]) == (world > 1)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_memory_or_use_the_group_with_the_same_bits(world: int) -> None:
    ranks = run_processes(world, "torch_housing_scenarios:both_transports", cases=CASES)
    for results in ranks:
        assert results == ranks[0]
        for case in CASES:
            assert results[f"{case} shared"] == results[f"{case} group"], case


def test_a_rank_that_dies_before_the_update_is_named() -> None:
    results = run_processes(2, "torch_housing_scenarios:dies_before_the_update", codes=(0, 9))
    assert "PeerLost" in results[0]["message"] and "rank 1" in results[0]["message"]


def test_a_rank_that_fails_before_the_update_wakes_the_others() -> None:
    def body(rank: int, comm: Any) -> str:
        bag, grads = setup(comm)
        optimizer = sgd(bag, grads)
        train(bag, grads, optimizer, rank, 1)
        kept = bits(bag)
        train(bag, grads, None, rank, 1)
        comm.barrier()  # the step has ended on both
        if rank == 1:
            bag.get_parameter("spare").data = torch.zeros(3, 5)
            with pytest.raises(gradgen.StateError, match="spare: its memory was replaced"):
                optimizer.step()
            comm.abort("rank 1 stopped")
            comm.reset()
            return ""
        with pytest.raises(gradgen.CommError) as caught:
            optimizer.step()
        assert bits(bag).keys() == kept.keys()
        comm.reset()
        return str(caught.value)

    assert "rank 1 stopped" in run_ranks(2, body)[0]


def test_parameters_that_overlap_stay_where_they_are() -> None:
    def body(rank: int, comm: Any) -> None:
        bag, grads = setup(comm)
        proj = bag.get_parameter("layers.0.proj.weight")
        bag.register_buffer("window", proj.detach()[1:])
        address = proj.data_ptr()
        optimizer = sgd(bag, grads)
        assert proj.data_ptr() == address
        before = proj.detach().clone()
        train(bag, grads, optimizer, rank, 2)
        assert not torch.equal(before, proj)
        assert torch.equal(bag.get_buffer("window"), proj.detach()[1:]), "the buffer lost its parameter"
        gathered = comm.gather_objects(bits(bag)["layers.0.proj.weight"])
        assert gathered[0] == gathered[1]

    run_ranks(2, body)


def test_a_second_optimizer_finds_the_memory_of_the_first() -> None:
    def body(rank: int, comm: Any) -> None:
        bag, grads = setup(comm)
        first = sgd(bag, grads)
        places = {name: p.data_ptr() for name, p in bag.named_parameters()}
        second = sgd(bag, grads)
        assert places == {name: p.data_ptr() for name, p in bag.named_parameters()}
        train(bag, grads, first, rank, 1)
        train(bag, grads, second, rank, 1)
        first._used = -1
        first.step()  # still the owner of the same memory

    run_ranks(2, body)


def test_an_optimizer_whose_parameters_moved_to_another_communicator_says_so() -> None:
    others = gradgen.comm.threads(2)

    def body(rank: int, comm: Any) -> None:
        bag, grads = setup(comm)
        first = sgd(bag, grads)
        elsewhere = model().GradientManager(config(), others[rank])
        sgd(bag, elsewhere)
        train(bag, grads, None, rank, 1)
        with pytest.raises(gradgen.StateError, match="its memory was replaced.*another ShardedOptimizer"):
            first.step()

    run_ranks(2, body)


def test_copies_and_checkpoints_of_housed_parameters() -> None:
    """One saved weight is as large as the weight, and a copy of the model lives in memory of its own."""

    def body(rank: int, comm: Any) -> None:
        bag, grads = setup(comm, hidden=64, vocab=500)
        small = bag.get_parameter("layers.0.norm.weight")
        optimizer = sgd(bag, grads)
        file = io.BytesIO()
        torch.save(small, file)
        assert len(file.getvalue()) < 4000
        other = copy.deepcopy(bag)
        train(bag, grads, optimizer, rank, 1)
        assert not torch.equal(other.get_parameter("layers.0.norm.weight"), small)
        state = {name: value.clone() for name, value in bag.state_dict().items()}
        train(bag, grads, optimizer, rank, 1)
        bag.load_state_dict(state)  # in place: the memory stays
        train(bag, grads, optimizer, rank, 1)

    run_ranks(2, body)


def test_the_memory_goes_with_the_model() -> None:
    import gc

    def body(rank: int, comm: Any) -> int:
        bag, grads = setup(comm)
        sgd(bag, grads)
        comm.barrier()
        del bag, grads
        gc.collect()
        comm.barrier()
        return len([h for h in gradgen.torch.housing._housings if h.comm is comm])  # type: ignore[attr-defined]

    assert run_ranks(2, body) == [0, 0]
