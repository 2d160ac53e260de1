"""Steps of any spec: every use of every weight gets a gradient of its own, and the sums that must come out."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradgen.resolve import check
from tests.support import write


def gradient(name: str, shape: tuple[int, ...], rank: int, micro_step: int, visit: int = 0) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(f"{name} {rank} {micro_step} {visit}".encode()))
    return rng.standard_normal(shape).astype(np.float32)


class Steps:
    """Visits in the order of the spec's backward pass, with every weight at every place where it is used."""

    def __init__(self, spec: Path, grads: Any, visits: dict[str, int] | None = None) -> None:
        self.model, self.grads, self.visits = check(spec), grads, visits or {}
        every = [record for record in grads.weights() if not record.buffer]
        self.records = {(w.block, w.layer, w.id): w for w in every if w.trainable}
        self.owners = {w.name: w for w in every}

    def run(self, rank: int, micro_steps: int, absent: frozenset[str] = frozenset()) -> None:
        for m in range(micro_steps):
            with self.grads.micro_step(m, micro_steps):
                for block, layer, visit in self.places():
                    self.visit(block, layer, visit, rank, m, absent)

    def places(self) -> Iterator[tuple[str | None, Any, int]]:
        """(None, id) of weights outside; (block, layer), as often as a block is run."""
        for step in self.model.backward:
            if step.weight is not None:
                if (None, None, step.weight) in self.records:
                    yield None, step.weight, 0
                continue
            layers = {layer for block in step.blocks for layer in self.grads.layers[block]}
            for layer in sorted(layers, reverse=True):
                for block in step.blocks:
                    if layer in self.grads.layers[block]:
                        for visit in range(self.visits.get(block, 1)):
                            yield block, layer, visit

    def uses(self, block: str | None, place: Any) -> list[Any]:
        if block is None:
            return [self.records[None, None, place]]
        return [w for (b, layer, _), w in self.records.items() if (b, layer) == (block, place)]

    def visit(
        self, block: str | None, place: Any, visit: int, rank: int, m: int, absent: frozenset[str]
    ) -> None:
        own = [w for w in self.uses(block, place) if block is not None and w.tied_to is None]
        if own:
            tensors = self.grads.block_full(place, block)
            assert sorted(tensors) == sorted(w.id for w in own)
            for w in own:
                assert tuple(tensors[w.id].shape) == w.shape
                if w.name not in absent:
                    value = gradient(w.name, w.shape, rank, m, visit)
                    write(tensors[w.id], value, tensors.accumulate, w.zero)
            self.grads.notify_block(place, block, written=[w.id for w in own if w.name not in absent])
        for w in self.uses(block, place):
            if w not in own:
                self.elsewhere(w, gradient(w.name, w.shape, rank, m, visit))

    def elsewhere(self, use: Any, value: np.ndarray) -> None:
        """A weight outside the blocks, or one whose owner is somewhere else."""
        owner = self.owners[use.tied_to] if use.tied_to else use
        if owner.block is not None:
            tensors = self.grads.block_full(owner.layer, owner.block)
            write(tensors[owner.id], value, tensors.accumulate, owner.zero)
            self.grads.notify_block(owner.layer, owner.block, written=[owner.id])
            return
        id = use.id if use.block is None else owner.id
        tensor = self.grads.non_block_full(id)
        write(tensor, value, tensor.accumulate, owner.zero)
        self.grads.notify_non_block(id)

    def expected(
        self, world: int, micro_steps: int, absent: frozenset[str] = frozenset()
    ) -> dict[str, np.ndarray]:
        """The mean over ranks of all uses, by the owner's name."""
        out = {w.name: np.zeros(w.shape) for w in self.records.values() if w.tied_to is None}
        for block, place, visit in self.places():
            for w in self.uses(block, place):
                for rank in range(world if w.name not in absent else 0):
                    for m in range(micro_steps):
                        out[w.tied_to or w.name] += gradient(w.name, w.shape, rank, m, visit) / world
        return out
