"""Stacks with blocks of several kinds: layouts, order and gradients of the real indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradgen
from gradgen.configure import configure, materialize
from gradgen.diagnostics import ConfigError
from gradgen.plan import layout_text, plan
from gradgen.resolve import check, check_text
from gradgen.serialize import model_from_json, model_to_json
from tests.steps import Steps
from tests.support import SPECS, STRATEGIES, assemble, model, run_ranks, shards

SPEC = SPECS / "kinds.yaml"
SIZES: dict[str, int | bool] = {"hidden": 3, "layers": 5, "dense": 2, "bias": True}


def units(**changes: int | bool) -> dict[str, list[int]]:
    return {arena.id: list(arena.layers) for arena in plan(SPEC, values={**SIZES, **changes}).arenas[2:]}


def test_layouts_are_by_kind() -> None:
    assert units() == {
        "mlp": [0, 1],
        "moe.0": [2, 3],
        "moe.1": [4],
        "tower.0": [0],
        "tower.1": [1],
        "tower.2": [2],
        "tower.3": [3],
        "tower.4": [4],
        "side": [1, 3],
    }
    assert units(every=100)["tower.2"] == [2, 4]
    assert len(units(layers=600, every=1000)) == 3 + 3 + 1
    assert "mlp" in units(dense=4) and "mlp" not in {unit for unit in units(layers=1) if "moe" in unit}


def test_the_highest_index_comes_first() -> None:
    order = [(run.unit, list(run.layers)) for run in plan(SPEC, values={**SIZES, "every": 100}).order]
    assert order == [
        ("head", [0]),
        ("tower.2", [4]),
        ("side", [3]),
        ("tower.1", [3]),
        ("tower.2", [2]),
        ("side", [1]),
        ("tower.1", [1]),
        ("tower.0", [0]),
        ("moe.1", [4]),
        ("moe.0", [3, 2]),
        ("mlp", [1, 0]),
        ("embedding", [0]),
    ]


def test_blocks_with_one_name_are_visited_together_by_default() -> None:
    text = SPEC.read_text()
    loose = "\n".join(line for line in text.split("\n") if not line.startswith("backward"))
    assert [step.weight or step.blocks for step in check_text(loose).backward] == [
        ("side",),
        ("tower",),
        ("mlp", "moe"),
        "head",
        "embedding",
    ]


def test_stages_of_blocks_are_a_block_each() -> None:
    """Two levels of indices, as in Swin: every stage has its own sizes and its own count."""
    stages = "".join(
        f"  stage{s}: {{count: depth{s}, name: 'encoder.layers.{s}.blocks.{{i}}', "
        f"weights: {{w: {{shape: [{2**s} * hidden], name: norm.weight}}}}}}\n"
        for s in range(3)
    )
    dims = "dims: {hidden: {}, depth0: {}, depth1: {}, depth2: {}}\n"
    swin = check_text(f"gradgen: 1\nmodel: swin\n{dims}blocks:\n{stages}")
    result = plan(swin, values={"hidden": 100, "depth0": 2, "depth1": 6, "depth2": 2}, dp=2)
    assert [(run.unit, len(run.layers)) for run in result.order] == [
        ("stage2", 2),
        ("stage1", 6),
        ("stage0", 2),
    ]
    assert [arena.numel for arena in result.arenas] == [128, 256, 512]
    concrete = materialize(swin, configure(swin, dict(result.values)))
    assert concrete.blocks[1].name == "encoder.layers.1.blocks.{i}"


def test_json_round_trip() -> None:
    assert model_from_json(model_to_json(check(SPEC))) == check(SPEC)


@pytest.mark.parametrize(
    ("change", "values", "said"),
    [
        (
            ("at: i >= dense", "at: i > 0"),
            {},
            "weights 'norm' and 'norm' have one checkpoint name, 'layers.1.norm.weight'",
        ),
        (
            ("count: 4", "count: layers"),
            {"layers": 3},
            "block 'side' has the index 3 under `at`, and its count is 3",
        ),
        (("1 + i // every", "1 - i"), {}, "weight 'grow' has 1 - i = -1 in its shape"),
        (("at: i < dense", "at: 3 // i > 0"), {}, "a condition of block 'mlp', 3 // i > 0: division by zero"),
        (("at: i < dense", "at: i < 1"), {"layers": 2**21}, "block 'mlp' has 2097152 layers, which differ"),
    ],
)
def test_configurations_that_cannot_be(change: tuple[str, str], values: dict[str, int], said: str) -> None:
    changed = check_text(SPEC.read_text().replace(*change))
    with pytest.raises(ConfigError, match=said):
        materialize(changed, configure(changed, {**SIZES, **values}))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_and_trace(strategy: str, world: int) -> None:
    config = model("kinds").Config(**SIZES)

    def body(rank: int, comm: Any) -> Any:
        grads = model("kinds").GradientManager(config, comm, strategy=strategy, poison=True)
        assert grads._native.layout_text() == layout_text(grads.plan)
        steps = Steps(SPEC, grads)
        for _ in range(2):
            steps.run(rank, 2)
            assert tuple(grads.trace()) == grads.plan_for(2).trace(strategy)
        return shards(grads), steps.expected(world, 2)

    ranks = run_ranks(world, body)
    results, wanted = assemble([mine for mine, _ in ranks]), ranks[0][1]
    concrete = materialize(check(SPEC), configure(check(SPEC), SIZES))
    names = {weight.name for weight in concrete.weights}
    for kind in concrete.blocks:
        prefixes = [kind.name.replace("{i}", str(layer)) for layer in kind.layers]
        names |= {f"{prefix}.{weight.name}" for prefix in prefixes for weight in kind.weights}
    assert set(results) == set(wanted) == names and len(names) == 2 + 2 * 2 + 3 * 2 + 1 + 1 + 5 * 2 + 2
    for name, got in results.items():
        np.testing.assert_allclose(got, wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_layers_that_do_not_exist() -> None:
    grads = model("kinds").GradientManager(model("kinds").Config(**SIZES))
    assert grads.layers == {"mlp": (0, 1), "moe": (2, 3, 4), "tower": (0, 1, 2, 3, 4), "side": (1, 3)}
    assert grads.blocks == {"mlp": 5, "moe": 5, "tower": 5, "side": 4}
    grads.start_micro_step(0, 1)
    with pytest.raises(IndexError, match="block 'moe' has layers 2-4, got 1"):
        grads.block_full(1, "moe")
    with pytest.raises(IndexError, match="block 'side' has layers 1,3, got 4"):
        grads.block_full(4, "side")
    assert "table" not in grads.block_full(4, "tower")
    with pytest.raises(KeyError, match="no weight 'tabel'"):
        grads.notify_block(4, "tower", written=["tabel"])
    none = model("kinds").GradientManager(model("kinds").Config(**{**SIZES, "dense": 5}))
    none.start_micro_step(0, 1)
    with pytest.raises(IndexError, match="block 'moe' has no layers in this configuration, got 4"):
        none.block_full(4, "moe")


def test_many_layers_make_no_more_source() -> None:
    """The text is the same for every number of layers: it is a function of the spec alone."""
    from gradgen.render import render

    text = render(check(SPEC))["manager.cpp"]
    assert "keep_layers(block, layers_where(block, [&](std::int64_t i) { return i < c.dense; }));" in text
    assert "keep_layers(block, layers_of(block, {1, 3}));" in text
    assert "add_kinds(block, all_layers(block), [&](std::int64_t i) {" in text
    assert gradgen.plan(SPEC, values={**SIZES, "layers": 1000, "every": 2000}).arena("tower.2").count == 499
