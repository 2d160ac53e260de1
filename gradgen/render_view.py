"""What the C++ templates show of a model: every line of a table or of straight code, spelled and aligned.

Templates lay these out; they decide nothing. Lines that stand for an entity of the spec end with its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradgen import cpp
from gradgen.concrete import expressions
from gradgen.expr import INDEX, Bool, Expr, Num, to_text
from gradgen.expr import names as expr_names
from gradgen.model import Block, Model, Strategy, Tie, Weight
from gradgen.render_config import aligned, columns, config_view, members, name_list, place, place_text

BASES = {"full": "UnshardedGradientManager", "sharded": "ShardedBlocksGradientManager"}


@dataclass(frozen=True)
class Table:
    """Rows of weights: one enum, one constexpr array."""

    name: str
    enum: str
    last: str  # the last enumerator
    rows: list[str]


@dataclass(frozen=True)
class WeightsView:
    enumerators: list[str]
    facts: list[str]


@dataclass(frozen=True)
class BlockView:
    name: str  # as an identifier
    label: str  # in comments
    type: str
    enumerators: list[str]
    members: list[str]
    facts: list[str]
    initializers: list[str]


@dataclass(frozen=True)
class StrategyView:
    id: str
    label: str
    type: str
    type_text: str
    base: str
    about: str
    desc: str
    place: str


def cpp_context(model: Model, key: str) -> dict[str, Any]:
    types = cpp.type_names(block.id for block in model.blocks)
    names = members(model, "c.") | {INDEX: cpp.index("i")}
    tables = [] if not model.weights else [_table("kWeights", "Weight", model.weights)]
    tables += [
        _table(f"k{types[block.id]}Weights", f"{types[block.id]}Weight", block.weights)
        for block in model.blocks
    ]
    return {
        "name": cpp.string(model.name),
        "scope": cpp.identifier(model.name),
        "key": cpp.string(key),
        "config": config_view(model),
        "weights": WeightsView(
            _enumerators(model.weights),
            [
                _fact("model.weights", "kWeights", "Weight", weight, model.weights, names)
                for weight in model.weights
            ],
        ),
        "block_enumerators": aligned(
            [(cpp.identifier(block.id) + ",", place(block.place)) for block in model.blocks]
        ),
        "blocks": [_block(block, types[block.id], names) for block in model.blocks],
        "tables": tables,
        "backward": aligned(
            [(_backward(step.weight, step.blocks), place(step.place)) for step in model.backward]
        ),
        "strategies": _strategies(model.strategies),
        "name_lists": [
            *name_list(
                "kConfigNames", [*(dim.name for dim in model.dims), *(flag.name for flag in model.flags)]
            ),
            *name_list("kPresets", [preset.name for preset in model.presets]),
            *name_list("kStrategies", [strategy.id for strategy in model.strategies]),
        ],
    }


# Weights and blocks


def _zero_text(weight: Weight) -> str:
    if weight.zero is None or weight.zero == Bool(False):
        return "never"
    return "always" if weight.zero == Bool(True) else to_text(weight.zero)


def _shape_text(weight: Weight) -> str:
    return cpp.comment("[" + ", ".join(map(to_text, weight.shape)) + "]")


def _enumerators(weights: Sequence[Weight]) -> list[str]:
    return aligned([(cpp.identifier(weight.id) + ",", _shape_text(weight)) for weight in weights])


def _table(name: str, enum: str, weights: Sequence[Weight]) -> Table:
    rows = [
        (
            f"{enum}::{cpp.identifier(weight.id)}",
            cpp.string(weight.id),
            cpp.string(weight.name),
            cpp.string(_zero_text(weight)),
            place_text(weight.place),
        )
        for weight in weights
    ]
    return Table(name, enum, cpp.identifier(weights[-1].id), columns(rows))


def _fact(
    target: str,
    table: str,
    enum: str,
    weight: Weight,
    siblings: Sequence[Weight],
    names: dict[str, cpp.Spelled],
) -> str:
    """The line that describes a weight in a configuration: its shape, and what is not the default."""
    shape = ", ".join(cpp.expression(extent, names) for extent in weight.shape)
    facts = []
    for field, condition in (
        ("present", weight.when),
        ("trainable", weight.trainable),
        ("zero", weight.zero),
    ):
        if condition is not None and condition != Bool(field != "zero"):
            facts.append(f".{field} = {cpp.condition(condition, names)}")
    if weight.tied_to is not None:
        owner = cpp.string(weight.tied_to.weight)
        if weight.tied_to.when is not None:
            owner = f'{_parenthesized(cpp.condition(weight.tied_to.when, names))} ? {owner} : ""'
        facts.append(f".tied_to = {owner}")
        facts += _owner(weight.tied_to, siblings, names)
    if weight.uses is not None:
        facts.append(f".uses = {_uses(weight.uses, names)}")
    if weight.may_be_absent:
        facts.append(".may_be_absent = true")
    if weight.shard.kind != "flat":
        facts.append(f".shard = ShardKind::{weight.shard.kind}")
    if weight.shard.kind == "rows":
        facts.append(f".rows = {cpp.integer(weight.shard.rows)}")
    tail = f", {{{', '.join(facts)}}}" if facts else ""
    row = f"{target}, {table}, {enum}::{cpp.identifier(weight.id)}"
    line = f"add({row}, {{{shape}}}{tail});"
    if weight.experts is not None:
        line = f"add_experts({row}, {cpp.expression(weight.experts, names)}, {{{shape}}}{tail});"
    if weight.when is not None and ("(" in line[4:-2] and weight.experts is None or "(" in line[12:-2]):
        # What may fail to compute is computed only where the weight exists.
        return f"if ({cpp.condition(weight.when, names)}) {line} else add_absent({row});"
    return line


def _uses(expr: Expr, names: dict[str, cpp.Spelled]) -> str:
    text = cpp.expression(expr, names)
    return text if isinstance(expr, Num) else f"declared_uses({text})"


def _owner(tie: Tie, siblings: Sequence[Weight], names: dict[str, cpp.Spelled]) -> list[str]:
    """Where the owner of a tensor is, when it is elsewhere."""
    if tie.block is not None:
        layer = f".tied_layer = {cpp.expression(tie.at, names)}" if tie.at is not None else ".tied_layer = 0"
        return [f".tied_block = static_cast<int>(Block::{cpp.identifier(tie.block)})", layer]
    return [] if any(one.id == tie.weight for one in siblings) else [".tied_block = kOutside"]


def _parenthesized(text: str) -> str:
    return f"({text})" if " " in text else text


def _block(block: Block, type_name: str, names: dict[str, cpp.Spelled]) -> BlockView:
    facts = [
        f"block.id = {cpp.string(block.id)};",
        f"block.name = {cpp.string(block.name)};",
        f"block.count = {cpp.expression(block.count, names)};",
        *([f"block.uses = {_uses(block.uses, names)};"] if block.uses is not None else []),
    ]
    table, enum = f"k{type_name}Weights", f"{type_name}Weight"
    if any(INDEX in expr_names(expr) for weight in block.weights for expr in expressions(weight)):
        facts.append(f"add_kinds(block, {_layers(block, names)}, [&](std::int64_t i) {{")
        facts.append("    std::vector<WeightDesc> weights;")
        facts += [
            "    " + _fact("weights", table, enum, weight, block.weights, names) for weight in block.weights
        ]
        facts += ["    return weights;", "});"]
    else:
        facts += [
            _fact("block.weights", table, enum, weight, block.weights, names) for weight in block.weights
        ]
        facts += [f"keep_layers(block, {_layers(block, names)});"] if block.at is not None else []
    fields = [cpp.identifier(weight.id) for weight in block.weights]
    members = [
        (f"{'Tensor' if weight.experts is None else 'std::vector<Tensor>'} {field};", _shape_text(weight))
        for field, weight in zip(fields, block.weights, strict=True)
    ]
    taken = [
        f"{field}({'tensor_of' if weight.experts is None else 'tensors_of'}(gradients.tensors, "
        f"{cpp.string(weight.id)})),"
        for field, weight in zip(fields, block.weights, strict=True)
    ]
    return BlockView(
        name=cpp.identifier(block.id),
        label=cpp.comment(block.id),
        type=type_name,
        enumerators=_enumerators(block.weights),
        members=aligned(
            [*members, ("bool accumulate = false;", "false: overwrite what is there; true: add to it")]
        ),
        facts=facts,
        initializers=[(": " if index == 0 else "  ") + line for index, line in enumerate(taken)],
    )


def _layers(block: Block, names: dict[str, cpp.Spelled]) -> str:
    """The indices of a stack that exist."""
    if block.at is None:
        return "all_layers(block)"
    if isinstance(block.at, tuple):
        return f"layers_of(block, {{{', '.join(map(cpp.integer, block.at))}}})"
    return f"layers_where(block, [&](std::int64_t i) {{ return {cpp.condition(block.at, names)}; }})"


def _backward(weight: str | None, blocks: Sequence[str]) -> str:
    if weight is not None:
        return f"after_weight(Weight::{cpp.identifier(weight)}),"
    return f"after_blocks({{{', '.join(f'Block::{cpp.identifier(block)}' for block in blocks)}}}),"


# Strategies


def _strategies(strategies: Sequence[Strategy]) -> list[StrategyView]:
    types = cpp.type_names(strategy.id for strategy in strategies)
    views = []
    for strategy in strategies:
        class_name = types[strategy.id] + "GradientManager"
        collective = f".collective = Collective::{strategy.collective}"
        placements = f".blocks = Placement::{strategy.blocks}, .non_blocks = Placement::{strategy.non_blocks}"
        views.append(
            StrategyView(
                id=cpp.string(strategy.id),
                label=cpp.comment(strategy.id),
                type=class_name,
                type_text=cpp.string(class_name),
                base=BASES[strategy.blocks],
                about=f"{strategy.blocks} blocks, other weights {strategy.non_blocks}, {strategy.collective}",
                desc=f"{{.id = {cpp.string(strategy.id)}, {placements}, {collective}}}",
                place=place(strategy.place),
            )
        )
    return views
