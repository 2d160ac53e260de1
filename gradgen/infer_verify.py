"""The round trip: the spec that was written, read again and planned, must hold exactly the model's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradgen.concrete import OUTSIDE, ConcreteModel, ConcreteWeight, materialize
from gradgen.configure import configure
from gradgen.diagnostics import ConfigError, SpecError
from gradgen.infer_facts import EXPERT, Facts, InferError, Parameter
from gradgen.model import Model
from gradgen.records import records


@dataclass(frozen=True)
class RoundTrip:
    """What spec -> plan gave, counted. It is only ever made where everything fits."""

    parameters: int  # names, tied ones too
    trainable: int  # with a gradient of their own
    tied: int
    frozen: int
    elements: int  # trainable
    blocks: int
    kinds: int


def verify(text: str, facts: Facts) -> tuple[Model, RoundTrip]:
    """Raises InferError that lists every parameter that the spec has not, has too much, or has otherwise."""
    from gradgen.plan import plan
    from gradgen.resolve import check_text

    try:
        model = check_text(text, f"{facts.model}.yaml")
        values = dict(model.presets[0].values) if model.presets else {}
        concrete = materialize(model, configure(model, values).values)
        planned = plan(model, values=values)
    except SpecError as error:
        raise InferError(
            "the spec language cannot say all of this model", [str(d) for d in error.diagnostics]
        ) from None
    except ConfigError as error:
        raise InferError("the spec language cannot say all of this model", [str(error)]) from None
    said = dict(_said(concrete))
    problems = list(_problems(facts, said))
    problems += _buffer_problems(facts, model, planned.values)
    slots = sum(len(arena.slots) * arena.count for arena in planned.arenas)
    own = [p for p in facts.parameters if p.trainable and not p.owner]
    if not problems and slots != len(own):
        problems.append(f"the plan has {slots} gradients, the model {len(own)} trainable parameters")
    if problems:
        raise InferError("spec and model differ", problems)
    blocks = [block for block in concrete.blocks if block.count]
    return model, RoundTrip(
        len(facts.parameters),
        len(own),
        sum(bool(p.owner) for p in facts.parameters),
        sum(not p.trainable for p in facts.parameters),
        sum(_numel(p.shape) for p in own),
        sum(block.count for block in blocks),
        len(blocks),
    )


@dataclass(frozen=True)
class Said:
    shape: tuple[int, ...]
    trainable: bool
    owner: str
    scope: tuple[str, int]  # block and index


def _said(concrete: ConcreteModel) -> Iterator[tuple[str, Said]]:
    """Every weight of the spec by its full name, in spec order."""
    scopes: list[tuple[str, int, str, tuple[ConcreteWeight, ...]]] = [(OUTSIDE, 0, "", concrete.weights)]
    for block in concrete.blocks:
        for i in block.layers:
            scopes.append((block.id, i, block.name.replace("{i}", str(i)) + ".", block.weights))
    names = {
        (id, i, weight.id): prefix + weight.name for id, i, prefix, weights in scopes for weight in weights
    }
    for id, i, _, weights in scopes:
        for weight in weights:
            owner = ""
            if weight.tie is not None:
                here = weight.tie_block is None
                block_id, layer = (id, i) if here else (str(weight.tie_block), weight.tie_layer)
                owner = names[block_id, layer, weight.tie]
            yield names[id, i, weight.id], Said(weight.shape, weight.trainable, owner, (id, i))


def _problems(facts: Facts, said: dict[str, Said]) -> Iterator[str]:
    known: dict[str, Parameter] = {p.name: p for p in facts.parameters}
    for name, p in known.items():
        entry = said.get(name)
        if entry is None:
            yield f"{name}: in the model, not in the spec"
        elif entry.shape != p.shape:
            yield f"{name}: shape {list(p.shape)} in the model, {list(entry.shape)} in the spec"
        elif entry.owner != p.owner:
            yield f"{name}: {_tie(p.owner)} in the model, {_tie(entry.owner)} in the spec"
        elif entry.trainable != p.trainable:
            states = ("frozen", "trainable")
            yield f"{name}: {states[p.trainable]} in the model, {states[entry.trainable]} in the spec"
    for name in said:
        if name not in known:
            yield f"{name}: in the spec, not in the model"
    yield from _order(facts, said)


def _buffer_problems(facts: Facts, model: Model, values: tuple[tuple[str, int | bool], ...]) -> Iterator[str]:
    """Buffers that the spec states are the model's."""
    known = {b.name: b.shape for b in facts.buffers}
    layers: dict[str, list[int]] = {}
    for block in materialize(model, dict(values)).blocks:
        layers.setdefault(block.id, []).extend(block.layers)
    for record in records((), model, dict(values), layers):
        if known.get(record.name) != record.shape:
            yield f"{record.name}: a buffer of shape {list(record.shape)} in the spec, not in the model"


def _order(facts: Facts, said: dict[str, Said]) -> Iterator[str]:
    """Weights outside the blocks, and those of each block, stand as in named_parameters(); experts lie side by side."""
    places = {p.name: place for place, p in enumerate(facts.parameters) if not EXPERT.search(p.name)}
    last: dict[tuple[str, int], str] = {}
    for name, entry in said.items():
        before = last.get(entry.scope)
        if name in places:
            if before is not None and places[name] < places[before]:
                yield f"{name}: stands after {before} in the spec, before it in the model"
            last[entry.scope] = name


def _tie(owner: str) -> str:
    return f"the same parameter as {owner}" if owner else "a parameter of its own"


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
