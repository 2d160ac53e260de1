"""The order in which gradients become ready; collectives follow it on every rank.

runtime/src/engine_units.cpp makes its units in the same order; every test that compares a trace with the plan
compares the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from gradgen.concrete import ConcreteBlock, ConcreteModel, ConcreteWeight
from gradgen.model import Model


class Run(NamedTuple):
    """Blocks of one kind that follow each other, or a weight outside the blocks."""

    unit: str  # id of its arena
    layers: Sequence[int]  # in the order in which they become ready


def order(model: Model, concrete: ConcreteModel, units: Collection[str]) -> tuple[Run, ...]:
    """Units in the order in which they are complete: those of tied weights after the last use of any."""
    owners = {weight.id: _owner(concrete, weight) for weight in concrete.weights if weight.trainable}
    tied = {kind.unit: _owners(concrete, kind) for kind in concrete.blocks}
    shared = {*owners.values(), *(owner for found in tied.values() for owner in found)}
    uses: list[Run] = []
    for step in model.backward:
        if step.weight is None:
            uses += _visited(step.blocks, concrete, units, tied)
        elif step.weight in owners:
            unit, layer = owners[step.weight]
            uses.append(Run(unit, (layer,)))
    out: list[Run] = []
    seen: set[tuple[str, int]] = set()
    names = {unit for unit, _ in shared}
    for run in reversed(uses):
        layers = run.layers
        if run.unit in names:
            layers = tuple(layer for layer in layers if (run.unit, layer) not in seen)
            seen.update((run.unit, layer) for layer in layers)
        if layers and out and out[-1].unit == run.unit:
            out[-1] = Run(run.unit, (*layers, *out[-1].layers))
        elif layers:
            out.append(Run(run.unit, layers))
    return tuple(out[::-1])


def _owner(concrete: ConcreteModel, weight: ConcreteWeight) -> tuple[str, int]:
    """The unit and the layer that a weight's gradient lies in: its own, or that of the weight it is tied to."""
    if weight.tie is None or not weight.tie_block:
        return weight.tie or weight.id, 0
    for kind in concrete.blocks:
        if kind.id == weight.tie_block and weight.tie_layer in kind.layers:
            return kind.unit, weight.tie_layer
    raise AssertionError(f"internal error: the owner of {weight.id!r} is missing")


def _owners(concrete: ConcreteModel, kind: ConcreteBlock) -> list[tuple[str, int]]:
    """Units elsewhere that the weights of a block are tied to, each once."""
    tied = (weight for weight in kind.weights if weight.tie_block is not None and weight.trainable)
    return list(dict.fromkeys(_owner(concrete, weight) for weight in tied)) if kind.layers else []


def _visited(
    blocks: Sequence[str],
    concrete: ConcreteModel,
    units: Collection[str],
    tied: Mapping[str, Sequence[tuple[str, int]]],
) -> Iterator[Run]:
    """Stacks that are visited together: the highest index first, at one index in the order of `blocks`."""
    here = [kind for id in blocks for kind in concrete.blocks if kind.id == id]
    here = [kind for kind in here if kind.unit in units or tied[kind.unit]]
    if len(here) == 1 and not tied[here[0].unit]:
        yield Run(here[0].unit, here[0].layers[::-1])
        return
    instances = sorted((-layer, blocks.index(kind.id), kind.unit) for kind in here for layer in kind.layers)
    for unit, run in groupby(instances, key=lambda instance: instance[2]):
        layers = tuple(-layer for layer, _, _ in run)
        if not tied[unit]:
            yield Run(unit, layers)
            continue
        for layer in layers:
            if unit in units:
                yield Run(unit, (layer,))
            yield from (Run(owner, (index,)) for owner, index in tied[unit])
