"""Weights with several uses: ties between stacks, blocks that run again, groups, experts, names on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradgen
from gradgen.configure import configure, materialize
from gradgen.diagnostics import ConfigError, StateError
from gradgen.plan import layout_text
from gradgen.resolve import check, check_text
from gradgen.serialize import model_from_json, model_to_json
from gradgen.torch import AttachError, ShardedOptimizer, attach
from tests.steps import Steps, gradient
from tests.support import SPECS, STRATEGIES, assemble, model, run_ranks, shards

SPEC = SPECS / "sharing.yaml"
SIZES: dict[str, int | bool] = {"hidden": 3, "layers": 3}


def manager(comm: Any = None, strategy: str = "unsharded", **options: Any) -> Any:
    return model("sharing").GradientManager(
        model("sharing").Config(**SIZES), comm, strategy=strategy, **options
    )


def test_json_round_trip() -> None:
    assert model_from_json(model_to_json(check(SPEC))) == check(SPEC)


def test_order_waits_for_the_last_use() -> None:
    """The owners in the encoder after the decoder's uses, the shared table after the encoder's."""
    order = [(run.unit, *run.layers) for run in gradgen.plan(SPEC, values=SIZES).order]
    assert order == [
        ("decoder.2", 2),  # each of them has another owner
        ("decoder.1", 1),
        ("decoder.0", 0),
        ("moe", 2, 1, 0),
        ("again", 0),
        ("encoder", 2, 1, 0),
        ("shared", 0),
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("at: 1}", "at: 9}", "is tied to 'memory' of block 'encoder' layer 9, which this configuration does"),
        ("at: 1}", "at: layers - 9}", "'encoder' layer -6, which this configuration does not have"),
        ("memory: {shape: [2, hidden], name: memory, zero: never}",
         "memory: {shape: [2, hidden], name: memory, trainable: extra > 0}",
         "weight 'outlier' is trainable and tied to 'memory' of block 'encoder' layer 1, which is frozen"),
        ("shape: [2, hidden], name: outlier", "shape: [1 + 1 // 1, layers], name: outlier", None),
        ("shape: [2, hidden], name: outlier", "shape: [2, layers // 3 * 4], name: outlier",
         r"of shape \[2, 4\] is tied to 'memory' of block 'encoder' layer 1 of shape \[2, 3\]"),
        ("size: 3}]", "size: 4}]", r"weight 'stacked' has 5 in dimension 1, and its parts \[2, 4\]"),
        ("uses: layers", "uses: layers - 3", "block 'again' has 0 uses"),
        ("{experts: experts,", "{experts: experts - 9,", "weight 'up' has -6 experts"),
        ("name: late.{i}", "name: dec.{i}", None),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be(old: str, new: str, said: str | None) -> None:
    text = SPEC.read_text()
    assert text.count(old) >= 1
    try:
        changed = check_text(text.replace(old, new, 1))
    except gradgen.SpecError as error:
        assert said is None and " [tie]" in str(error) or "[duplicate-name]" in str(error)
        return
    assert said is not None
    with pytest.raises(ConfigError, match=said):
        materialize(changed, configure(changed, SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_and_trace(strategy: str, world: int) -> None:
    absent = frozenset({"moe.0.experts.1.up.weight", "moe.2.experts.2.up.weight"})

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, poison=True, block_buffers=5)
        assert grads._native.layout_text() == layout_text(grads.plan)
        steps = Steps(SPEC, grads, {"again": 3})
        for _ in range(2):
            steps.run(rank, 2, absent)
            assert tuple(grads.trace()) == grads.plan_for(2).trace(strategy)
        return shards(grads), steps.expected(world, 2, absent), grads.grad_norm()

    ranks = run_ranks(world, body)
    results, wanted = assemble([mine for mine, _, _ in ranks]), ranks[0][1]
    assert set(results) == set(wanted)
    assert {"shared.weight", "enc.1.memory", "dec.0.memory", "moe.1.experts.2.up.weight"} <= set(results)
    assert not {"head.weight", "outlier.weight", "enc.0.table.weight", "late.0.memory"} & set(results)
    assert not results["moe.0.experts.1.up.weight"].any()
    for name, got in results.items():
        np.testing.assert_allclose(got, wanted[name], rtol=1e-6, atol=1e-6, err_msg=name)
    norm = np.sqrt(sum((value**2).sum() for value in wanted.values()))  # each tensor once
    assert [mine for _, _, mine in ranks] == pytest.approx([norm] * world, rel=1e-6)


@pytest.mark.slow
def test_the_owner_hands_out() -> None:
    grads = manager()
    grads.start_micro_step(0, 1)
    with pytest.raises(
        StateError, match="block 'late' layer 1 has no buffers of its own: .* such as 'memory'"
    ):
        grads.block_full(1, "late")
    with pytest.raises(
        StateError, match="'outlier' is tied to 'memory' of block 'encoder', which hands it out"
    ):
        grads.non_block_full("outlier")
    assert "memory" not in grads.block_full(2, "decoder")
    assert "table" not in grads.block_full(2, "encoder")
    for _ in range(3):
        grads.block_full(0, "again")
        grads.notify_block(0, "again")
    with pytest.raises(StateError, match="use 4, but the spec declares uses: 3"):
        grads.block_full(0, "again")


@pytest.mark.slow
def test_a_block_that_waits_for_more_uses_keeps_its_buffer() -> None:
    def body(rank: int, comm: Any) -> None:
        grads = manager(comm, "sharded")
        with pytest.raises(StateError, match="raise block_buffers"):
            Steps(SPEC, grads, {"again": 3}).run(rank, 1)

    run_ranks(2, body)


class Leaf(torch.nn.Module):
    """Parameters under the names of a spec; tied ones are one. Its forward pass uses each where the spec does."""

    def __init__(self, records: list[Any]) -> None:
        super().__init__()
        self.uses: list[tuple[str, torch.nn.Parameter]] = []
        made: dict[str, Any] = {}
        for record in sorted(records, key=lambda record: record.tied_to is not None):
            place: Any = self
            *path, leaf = record.name.split(".")
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, torch.nn.Module())
                place = getattr(place, part)
            if record.buffer:
                place.register_buffer(leaf, torch.zeros(record.shape))
                continue
            owner = made.get(record.tied_to)
            made[record.name] = torch.nn.Parameter(torch.zeros(record.shape)) if owner is None else owner
            place.register_parameter(leaf, made[record.name])
        self.made = made

    def forward(self, steps: Steps, rank: int, micro_step: int) -> torch.Tensor:
        total = torch.zeros(())
        for block, place, visit in reversed(list(steps.places())):
            for use in steps.uses(block, place):
                value = gradient(use.name, use.shape, rank, micro_step, visit)
                total = total + (self.made[use.name] * torch.from_numpy(value)).sum()
        return total


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attach_brings_all_uses_at_once(strategy: str) -> None:
    """Autograd sums the uses of a shared tensor itself. Blocks that are declared to have more do not hold others up."""

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, strategy, poison=True)
        module, steps = Leaf(grads.weights()), Steps(SPEC, grads, {"again": 3})
        attach(module, grads)
        for _ in range(2):
            for m in range(2):
                with grads.micro_step(m, 2):
                    module(steps, rank, m).backward()
            assert tuple(grads.trace()) == grads.plan_for(2).trace(strategy)
        return shards(grads), steps.expected(2, 2)

    ranks = run_ranks(2, body)
    results, wanted = assemble([mine for mine, _ in ranks]), ranks[0][1]
    assert set(results) == set(wanted)
    for name, got in results.items():
        np.testing.assert_allclose(got, wanted[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_weight_decay_and_buffers_come_from_the_spec() -> None:
    grads = manager()
    module = Leaf(grads.weights())
    optimizer = ShardedOptimizer(torch.optim.AdamW, module, grads, weight_decay=0.5)
    plain = {record.name for record in grads.weights() if not record.decay and not record.buffer}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert len(optimizer.param_groups[1]["params"]) == len(plain) == 9
    every = ShardedOptimizer(torch.optim.AdamW, Leaf(grads.weights()), grads, weight_decay=0.5, no_decay=())
    assert [group["weight_decay"] for group in every.param_groups] == [0.5]
    del module.enc.get_submodule("1")._buffers["mean"]
    with pytest.raises(AttachError, match="enc.1.mean: a buffer in the spec, not in the model"):
        attach(module, grads)


@pytest.mark.slow
def test_experts() -> None:
    grads = manager()
    grads.start_micro_step(0, 1)
    block = grads.block_full(1, "moe")
    assert [tensor.shape for tensor in block.up] == [(2, 3)] * 3
    assert block["up.2"].data_ptr == block["up"][2].data_ptr
    assert not np.asarray(block.up[1]).any()  # may be absent, so it starts at zero
    with pytest.raises(KeyError, match="no weight 'up.3'"):
        block["up.3"]


@pytest.mark.slow
def test_records() -> None:
    """What checkpoints, optimizers and parallel strategies need to know."""
    records = {record.name: record for record in manager().weights()}
    bias = records["enc.1.q.bias"]
    assert (bias.decay, bias.tp, records["enc.1.q.weight"].tp) == (False, "sum", 0)
    assert [part.name for part in bias.disk] == ["encoder.layer.1.inner.query.bias"]
    assert records["dec.2.cross_attn.q.bias"].disk[0].name == "dec.2.cross_attn.query.bias"
    assert records["enc.1.memory"].disk == (("encoder.layer.1.inner.memory", ()),)
    expert = records["moe.0.experts.2.up.weight"]
    assert (expert.id, expert.expert, expert.group) == ("up.2", 2, "expert")
    assert records["outlier.weight"].tied_to == "enc.1.memory" and records["outlier.weight"].disk == ()
    assert records["dec.2.memory"].tied_to == "enc.2.memory" and records["dec.0.memory"].tied_to is None
    buffers = [record.name for record in records.values() if record.buffer]
    assert buffers == ["total", "enc.1.mean", "enc.2.mean"]
    assert (records["enc.1.mean"].shape, records["enc.1.mean"].trainable) == ((3,), False)


@pytest.mark.slow
def test_parts_take_a_fused_weight_apart_and_together() -> None:
    records = {record.name: record for record in manager().weights()}
    stacked, qkv = records["moe.1.experts.gate_up"], records["moe.1.qkv"]
    value = np.arange(45.0).reshape(3, 5, 3)
    disk = {part.name: value[part.where] for part in stacked.disk}
    assert disk["moe.1.e.2.gate.weight"].tolist() == value[2, :2].tolist()
    assert disk["moe.1.e.0.up.weight"].shape == (3, 3) and len(disk) == 6
    back = np.zeros_like(value)
    for part in stacked.disk:
        back[part.where] = disk[part.name]
    assert (back == value).all()
    assert [(part.name, part.where) for part in qkv.disk] == [
        ("moe.1.q", (slice(None), slice(0, 3))),
        ("moe.1.kv", (slice(None), slice(3, 9))),
    ]


@pytest.mark.slow
def test_a_dtype_that_the_manager_does_not_have() -> None:
    text = SPEC.read_text().replace("model: sharing", "model: strict", 1)
    changed = check_text(text.replace("name: router.weight", "name: router.weight, accumulator: float64", 1))
    from gradgen.records import refuse_other_dtypes

    refuse_other_dtypes(changed, {**SIZES, "experts": 3, "extra": 0}, "float32", "float64", "nearest")
    with pytest.raises(
        ConfigError, match="weight 'router' wants accumulator float64, and this manager has float32"
    ):
        refuse_other_dtypes(changed, {**SIZES, "experts": 3, "extra": 0}, "float32", None, "nearest")
