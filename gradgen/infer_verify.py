"""The round trip: the spec that was written, read again and planned, must hold exactly the model's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradgen.concrete import OUTSIDE, ConcreteModel, ConcreteWeight, materialize
from gradgen.configure import configure
from gradgen.diagnostics import ConfigError, SpecError
from gradgen.infer_facts import Facts, InferError, Parameter
from gradgen.model import Model


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
                at = (id, i) if weight.tie_block is None else (weight.tie_block, weight.tie_layer)
                owner = names[(*at, weight.tie)]
            yield names[id, i, weight.id], Said(weight.shape, weight.trainable, owner)


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


def _tie(owner: str) -> str:
    return f"the same parameter as {owner}" if owner else "a parameter of its own"


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
