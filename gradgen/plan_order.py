"""The order in which gradients become ready; collectives follow it on every rank.

runtime/src/engine_setup.cpp makes its units in the same order; every test that compares a trace with the plan
compares the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from gradgen.configure import ConcreteModel
from gradgen.model import Model


class Run(NamedTuple):
    """Blocks of one kind that follow each other, or a weight outside the blocks."""

    unit: str  # id of its arena
    layers: Sequence[int]  # in the order in which they become ready


def order(model: Model, concrete: ConcreteModel, units: Collection[str]) -> tuple[Run, ...]:
    """Units in the order in which they are complete: a tied one after the last use of any."""
    owners = {weight.id: weight.tie or weight.id for weight in concrete.weights if weight.trainable}
    last: dict[str, int] = {}
    for position, step in enumerate(model.backward):
        if step.weight is not None and step.weight in owners:
            last[owners[step.weight]] = position
    out: list[Run] = []
    for position, step in enumerate(model.backward):
        if step.weight is None:
            out += _visited(step.blocks, concrete, units)
            continue
        unit = owners.get(step.weight, "")
        if unit in units and last[unit] == position:
            out.append(Run(unit, (0,)))
    return tuple(out)


def _visited(blocks: Sequence[str], concrete: ConcreteModel, units: Collection[str]) -> Iterator[Run]:
    """Stacks that are visited together: the highest index first, at one index in the order of `blocks`."""
    kinds = [kind for id in blocks for kind in concrete.blocks if kind.id == id and kind.unit in units]
    if len(kinds) < 2:
        yield from (Run(kind.unit, kind.layers[::-1]) for kind in kinds)
        return
    instances = sorted((-layer, blocks.index(kind.id), kind.unit) for kind in kinds for layer in kind.layers)
    for unit, run in groupby(instances, key=lambda instance: instance[2]):
        yield Run(unit, tuple(-layer for layer, _, _ in run))
