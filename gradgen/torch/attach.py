"""Gradients of an unchanged torch model, from autograd into a gradient manager's buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gradgen.diagnostics import StateError
from gradgen.torch.linear import fuse
from gradgen.torch.names import Pair, Rename, match
from gradgen.torch.types import Manager, as_torch


def attach(
    model: torch.nn.Module, grads: Manager, *, rename: Rename = None, fuse_linear: bool = False
) -> Attachment:
    """Sends every gradient of `model` to `grads`, from now on, by checkpoint name.

    Within `with grads.micro_step(i, n):` a backward pass writes (first touch) or adds each parameter's
    gradient to the manager's buffer as soon as autograd has it, and drops it: `p.grad` is None afterwards. A
    block is handed over when all its trainable parameters have theirs, or at the end of the micro-step when
    some got none.

    rename: from a parameter's name to its checkpoint name where the two differ (a function or a mapping).
    fuse_linear: the weight gradients of nn.Linear layers are written by the matrix product itself: no
    temporary, no extra pass. It replaces the layers' `forward` until `detach()`; hooks on those weights do
    not see a gradient.

    Raises AttachError, which lists every parameter and weight that do not match: missing, extra, shape,
    dtype, frozen, tied. A backward pass outside a micro-step raises StateError.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"attach(model, grads): the first argument is the torch module, not a {type(model).__name__}"
        )
    return Attachment(match(model, grads, rename), grads, model if fuse_linear else None)


@dataclass(slots=True)
class Unit:
    """One block instance, or one weight outside the blocks, and what this visit has brought so far.

    `written`: indices whose buffers hold something; `done`: indices whose gradient autograd has finished.
    """

    block: str | None
    layer: int
    ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    buffers: list[torch.Tensor] | None = None  # None: not handed out
    kept: list[torch.Tensor] | None = None  # the same buffers in every micro-step
    accumulate: bool = False
    written: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)

    def open(self, grads: Manager) -> list[torch.Tensor]:
        """Takes the unit's buffers from the manager."""
        if self.block is None:
            tensor = grads.non_block_full(self.ids[0])
            self.accumulate = tensor.accumulate
            self.buffers = self.kept or [as_torch(tensor)]
        else:
            block = grads.block_full(self.layer, self.block)
            self.accumulate = block.accumulate
            self.buffers = self.kept or [as_torch(block[id]) for id in self.ids]
        if grads.direct:
            self.kept = self.buffers
        self.written.clear()
        self.done.clear()
        return self.buffers

    def close(self, grads: Manager) -> None:
        """Hands the unit over to the manager, and names what was written when that is not everything."""
        self.buffers = None
        if self.block is None:
            grads.notify_non_block(self.ids[0])
        elif len(self.written) == len(self.ids):
            grads.notify_block(self.layer, self.block)
        else:
            grads.notify_block(self.layer, self.block, written=[self.ids[i] for i in sorted(self.written)])


class Attachment:
    """The link between a model and a manager, until `detach()`."""

    def __init__(self, pairs: list[Pair], grads: Manager, fused: torch.nn.Module | None) -> None:
        self._grads = grads
        self._running = False
        self._units: dict[tuple[str | None, int | str], Unit] = {}
        self._undo: list[Callable[[], None]] = []
        places = {id(pair.parameter): self._add(pair) for pair in pairs}
        for module in fused.modules() if fused is not None else ():
            if type(module) is torch.nn.Linear and id(module.weight) in places:
                unit, index = places[id(module.weight)]
                self._undo.append(fuse(module, self._sink(unit, index), lambda: self._running))
        grads.on_start.append(self._start)
        grads.on_end.append(self._end)

    def detach(self) -> None:
        """Removes the hooks; gradients go to `p.grad` again. Safe to call twice."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        for callbacks, own in ((self._grads.on_start, self._start), (self._grads.on_end, self._end)):
            if own in callbacks:
                callbacks.remove(own)

    def _add(self, pair: Pair) -> tuple[Unit, int]:
        record = pair.record
        key = (record.block, record.layer or 0) if record.block is not None else (None, record.id)
        unit = self._units.setdefault(key, Unit(record.block, record.layer or 0))
        index = len(unit.ids)
        unit.ids.append(record.id)
        unit.names.append(pair.name)
        parameter: Any = pair.parameter  # torch leaves the method untyped
        handle = parameter.register_post_accumulate_grad_hook(lambda p: self._receive(unit, index, p))
        self._undo.append(handle.remove)
        return unit, index

    def _receive(self, unit: Unit, index: int, parameter: torch.Tensor) -> None:
        """Autograd has finished a parameter's gradient: all uses summed, or None when the layer wrote it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            if gradient.is_sparse:
                raise StateError(
                    f"{unit.names[index]}: a sparse gradient; make its embedding with sparse=False"
                )
            buffer, accumulate = self._take(unit, index)
            if gradient.dtype != buffer.dtype:
                raise StateError(
                    f"{unit.names[index]}: a {gradient.dtype} gradient for a {buffer.dtype} buffer; the model was "
                    "converted after attach(): detach, make a manager with the new dtype, attach again"
                )
            if accumulate:
                buffer.add_(gradient.detach())
            else:
                buffer.copy_(gradient.detach())
        if unit.buffers is None or index not in unit.written:
            return  # no gradient at all
        unit.done.add(index)
        if len(unit.done) == len(unit.ids):
            unit.close(self._grads)

    def _take(self, unit: Unit, index: int) -> tuple[torch.Tensor, bool]:
        """The buffer of one weight, about to be written, and whether to add."""
        if not self._running:
            raise StateError(
                f"{unit.names[index]}: a gradient outside a micro-step; run backward() within "
                "`with grads.micro_step(i, n):`, or detach() the model first"
            )
        buffers = unit.buffers
        if buffers is None:
            buffers = unit.open(self._grads)
        accumulate = unit.accumulate or index in unit.written
        unit.written.add(index)
        return buffers[index], accumulate

    def _sink(self, unit: Unit, index: int) -> Callable[[], tuple[torch.Tensor, bool]]:
        return lambda: self._take(unit, index)

    def _start(self) -> None:
        self._running = True
        for unit in self._units.values():  # what an exception left open
            unit.buffers = None

    def _end(self) -> None:
        self._running = False
        for unit in self._units.values():
            if unit.buffers is not None:
                unit.close(self._grads)
