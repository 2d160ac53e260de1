"""What one entity alone cannot tell: names that clash, ties, and presets that break a rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gradgen.checkpoint_names import exclusive
from gradgen.configure import check_dim, configure, materialize
from gradgen.diagnostics import ConfigError, Diagnostic, did_you_mean, quote, suggest
from gradgen.expr import Bool, Expr, ExprError, evaluate, names, short, to_text
from gradgen.expr_types import same_size
from gradgen.model import Block, Model, Preset, Tie, Weight
from gradgen.scope import BROKEN
from gradgen.source import Source


def clashes(model: Model) -> Iterator[Diagnostic]:
    """Names that two weights share, and ties that lead nowhere. Holds for every configuration."""
    seen: dict[str, tuple[Weight, bool]] = {}
    groups = [("", model.weights, False)]
    groups += [(block.name + ".", block.weights, block.at is not None) for block in model.blocks]
    for prefix, weights, some in groups:
        for weight in weights:
            name = prefix + weight.name
            other, others_some = seen.setdefault(name, (weight, some))
            apart = (some or others_some) and "{i}" in prefix  # configurations tell
            if other is not weight and not apart and not exclusive(other, weight, model):
                both = f"{quote(other.id)} and {quote(weight.id)}"
                message = f"weights {both} have one checkpoint name, {quote(name)}"
                hint = f"the first stands in line {other.place.line}"
                yield Diagnostic(weight.place, message, "duplicate-name", hint)
    for block in (None, *model.blocks):
        yield from _ties(model, block)


def _ties(model: Model, block: Block | None) -> Iterator[Diagnostic]:
    weights = model.weights if block is None else block.weights
    outside = {weight.id: weight for weight in model.weights}
    for weight in weights:
        tie = weight.tied_to
        if tie is None:
            continue
        by_id = {one.id: one for one in weights}
        if tie.block is not None:
            stack = next((one for one in model.blocks if one.id == tie.block), None)
            if stack is None:
                message = (
                    f"weight {quote(weight.id)} is tied to a weight of the unknown block {quote(tie.block)}"
                )
                hint = did_you_mean(tie.block, [one.id for one in model.blocks])
                yield Diagnostic(tie.place, message, "tie", hint or "name a block of this spec")
                continue
            by_id = {one.id: one for one in stack.weights}
        owner = by_id.get(tie.weight) or (outside.get(tie.weight) if tie.block is None else None)
        problem = _tie_problem(weight, tie, owner, {**outside, **by_id} if tie.block is None else by_id)
        if problem:
            yield Diagnostic(tie.place, f"weight {quote(weight.id)} {problem[0]}", "tie", problem[1])


def _tie_problem(
    weight: Weight, tie: Tie, owner: Weight | None, known: Mapping[str, Weight]
) -> tuple[str, str] | None:
    """What is wrong for every configuration, and a cure."""
    if owner is None:
        hint = (
            did_you_mean(tie.weight, known) or "a tie is to a weight of the same block, or outside the blocks"
        )
        return f"is tied to the unknown weight {quote(tie.weight)}", hint
    if owner is weight:
        if tie.block is not None and tie.when is not None:
            return None  # to another layer: configurations tell
        return "is tied to itself", "name the weight that owns the tensor"
    name = f"{quote(owner.id)}"
    if owner.tied_to is not None:
        line = owner.tied_to.place.line
        cure = "tie both to the weight that owns the tensor"
        return f"is tied to {name}, which is tied itself (line {line})", cure
    if owner.experts is not None:
        cure = "tie weights that are one tensor"
        return f"is tied to {name}, which is one weight an expert (line {owner.place.line})", cure
    if not _same_shape(owner, weight):
        theirs = f"{name} of shape {_shape(owner)} (line {owner.place.line})"
        return f"of shape {_shape(weight)} is tied to {theirs}", "tied weights are one tensor"
    if owner.trainable == Bool(False) and weight.trainable != Bool(False):
        cure = "freeze both, or neither"
        return f"is trainable and tied to {name}, which is frozen (line {owner.place.line})", cure
    return None


def _same_shape(a: Weight, b: Weight) -> bool:
    if any(size is BROKEN for size in (*a.shape, *b.shape)):
        return True
    return len(a.shape) == len(b.shape) and all(map(_maybe_same_size, a.shape, b.shape))


def _maybe_same_size(a: Expr, b: Expr) -> bool:
    """Sizes with // and the like can be equal for all values that matter: presets and configurations tell."""
    text = to_text(a) + to_text(b)
    return same_size(a, b) or any(part in text for part in ("//", "%", "ceil_div", "min", "max"))


def _shape(weight: Weight) -> str:
    return "[" + ", ".join(short(size) for size in weight.shape) + "]"


def findings(model: Model, source: Source) -> Iterator[Diagnostic]:
    """What presets and constants show. The model must be free of other findings."""
    constant = list(_constants(model))
    yield from constant
    for preset in model.presets:
        own = preset.place.file == source.file  # not of the base spec, where it was looked at
        values = list(_preset_values(model, preset, source)) if own else []
        yield from values
        if not values and not constant:
            yield from _preset(model, preset)


def _preset_values(model: Model, preset: Preset, source: Source) -> Iterator[Diagnostic]:
    dims = {dim.name: dim.min for dim in model.dims}
    flags = {flag.name for flag in model.flags}
    for name, value in preset.values:
        path = ("presets", preset.name, name)
        if name not in dims.keys() | flags:
            hint = suggest(name, [*(d.name for d in model.dims), *(f.name for f in model.flags)])
            message = f"preset {quote(preset.name)} sets the unknown dim or flag {quote(name)}"
            yield Diagnostic(source.key(path), message, "preset", hint)
            continue
        try:
            if name in dims:
                check_dim(name, value, dims[name])
            elif not isinstance(value, bool):
                raise ConfigError(f"flag {quote(name)} must be true or false, got {value}")
        except ConfigError as error:
            yield Diagnostic(source.place(path), f"preset {quote(preset.name)}: {error}", "preset")


def _preset(model: Model, preset: Preset) -> Iterator[Diagnostic]:
    def found(message: str, code: str = "preset", hint: str = "") -> Diagnostic:
        return Diagnostic(preset.place, f"preset {quote(preset.name)}: {message}", code, hint)

    try:
        concrete = materialize(model, configure(model, dict(preset.values)))
    except ConfigError as error:
        yield found(str(error).removeprefix(f"{model.name}: "))
        return
    for block in model.blocks:
        here = [kind for kind in concrete.blocks if kind.id == block.id]
        if block.at is None and not sum(kind.count for kind in here):
            message = f"block {quote(block.id)} has a count of 0"
            yield found(message, hint="a stack has at least one block")
    for weight in (*concrete.weights, *(w for block in concrete.blocks for w in block.weights)):
        rows = weight.shape[0] if weight.shape else 0
        if weight.shard.kind == "rows" and rows % weight.shard.rows:
            units = f"{rows} rows, which units of {weight.shard.rows} do not divide"
            yield found(f"weight '{weight.id}' has {units}", "rows", "change `rows` or the shape")


def _constants(model: Model) -> Iterator[Diagnostic]:
    """Sizes and conditions without dims are known now."""
    for weight in (*model.weights, *(w for block in model.blocks for w in block.weights)):
        for size in weight.shape:
            if not names(size):
                yield from _constant(size, weight)
        for condition in (weight.when, weight.trainable, weight.zero):
            if condition is not None and not names(condition):
                yield from _constant(condition, weight)
    for block in model.blocks:
        if not names(block.count) and block.weights:
            yield from _constant(block.count, block.weights[0])


def _constant(expr: Expr, weight: Weight) -> Iterator[Diagnostic]:
    try:
        value = evaluate(expr, {})
    except ExprError as error:
        message = f"weight {quote(weight.id)}: {error}"
        yield Diagnostic(weight.place, message, "expression")
        return
    if value < 0:
        yield Diagnostic(weight.place, f"weight {quote(weight.id)} has a size of {value}", "too-small")
