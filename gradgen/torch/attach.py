"""Gradients of an unchanged torch model, from autograd into a gradient manager's buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradgen.diagnostics import StateError
from gradgen.torch.fuse import Layer, fuse, none_reaches_hooks
from gradgen.torch.names import Pair, Rename, match
from gradgen.torch.types import Manager, as_torch

UNSEEN = (
    "its gradient came from autograd: torch.compile, or code that uses the weight without calling the module"
)


def attach(
    model: torch.nn.Module, grads: Manager, *, rename: Rename = None, fuse_wgrad: bool = False
) -> Attachment:
    """Sends every gradient of `model` to `grads`, from now on, by checkpoint name.

    Within `with grads.micro_step(i, n):` a backward pass writes (first touch) or adds each parameter's
    gradient to the manager's buffer as soon as autograd has it, and drops it: `p.grad` is None afterwards. A
    block is handed over when all its trainable parameters have theirs, or at the end of the micro-step when
    some got none.

    rename: from a parameter's name to its checkpoint name where the two differ (a function or a mapping).
    fuse_wgrad: the weight gradients of linear layers, and of fp32 embeddings, are computed in the manager's
    buffers: no temporary, no extra pass. It replaces the layers' `forward` until `detach()`. What cannot be
    done so goes the usual way: `attachment.fused` and `attachment.not_fused` say what and why.

    Raises AttachError, which lists every parameter and weight that do not match: missing, extra, shape,
    dtype, frozen, tied. A backward pass outside a micro-step raises StateError.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"attach(model, grads): the first argument is the torch module, not a {type(model).__name__}"
        )
    return Attachment(match(model, grads, rename), grads, model if fuse_wgrad else None)


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
    layers: dict[int, list[Layer]] = field(
        default_factory=dict
    )  # those that write a weight's gradient themselves
    mixed: set[int] = field(default_factory=set)  # indices of weights that other modules use too
    optional: set[int] = field(default_factory=set)  # indices of weights that may be absent

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
        self.running = False  # within a micro-step
        # Autograd runs the hooks of all ranks of a process in one thread a GPU, where a rank that waits for another
        # would wait for ever. Where ranks are threads, backward stays in the rank's own.
        self._meets = grads.device != "cpu" and grads.world_size > 1 and grads.transport == "threads"
        self._autograd: bool | None = None  # what was set before a micro-step
        self._units: dict[tuple[str | None, int | str], Unit] = {}
        self._undo: list[Callable[[], None]] = []
        self._layers: dict[str, Layer] = {}
        self._nodes: list[Any] = []
        self._refused: dict[str, str] = {}
        places = {id(pair.parameter): (pair, *self._add(pair)) for pair in pairs}
        if fused is not None:
            self._fuse(fused, places)
        grads.on_start.append(self._start)
        grads.on_end.append(self._end)

    @property
    def fused(self) -> tuple[str, ...]:
        """The modules whose weight gradient is computed in the manager's buffer; so far, in every call."""
        return tuple(name for name in self._layers if name not in self.not_fused)

    @property
    def not_fused(self) -> Mapping[str, str]:
        """The modules with trainable matrices whose gradient comes through autograd, at least once: why.

        Empty unless `fuse_wgrad` was asked for.
        """
        calls = {name: layer.reason for name, layer in self._layers.items() if layer.reason}
        return {**self._refused, **calls}

    def _release(self) -> None:
        if self._autograd is not None:
            torch._C._set_multithreading_enabled(self._autograd)
            self._autograd = None

    def detach(self) -> None:
        """Removes the hooks; gradients go to `p.grad` again. Safe to call twice."""
        self._release()
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
        if record.may_be_absent:
            unit.optional.add(index)
        parameter: Any = pair.parameter  # torch leaves the method untyped
        handle = parameter.register_post_accumulate_grad_hook(lambda p: self._receive(unit, index, p))
        self._undo.append(handle.remove)
        return unit, index

    def _receive(self, unit: Unit, index: int, parameter: torch.Tensor) -> None:
        """Autograd has finished a parameter's gradient: all uses summed, or None when the layer wrote it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            if index in unit.layers and index not in unit.mixed:
                for layer in unit.layers[index]:
                    layer.reason = layer.reason or UNSEEN
            if gradient.is_sparse:
                raise StateError(
                    f"{unit.names[index]}: a sparse gradient; make its embedding with sparse=False"
                )
            buffer, accumulate = self.take(unit, index)
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

    def take(self, unit: Unit, index: int) -> tuple[torch.Tensor, bool]:
        """The buffer of one weight, about to be written, and whether to add."""
        if not self.running:
            raise StateError(
                f"{unit.names[index]}: a gradient outside a micro-step; run backward() within "
                "`with grads.micro_step(i, n):`, or detach() the model first"
            )
        buffers = unit.buffers
        if buffers is None:
            buffers = self._open(unit)
        accumulate = unit.accumulate or index in unit.written
        unit.written.add(index)
        return buffers[index], accumulate

    def _open(self, unit: Unit) -> list[torch.Tensor]:
        """The unit's buffers. Where all are out, blocks that miss only what may be absent make room: autograd has gone on
        to another block, so their gradients do not come any more.
        """
        try:
            return unit.open(self._grads)
        except StateError:
            units = [u for u in self._units.values() if u.block is not None and u.buffers is not None]
            done = [u for u in units if len(u.done | u.optional) == len(u.ids)]
            if not done:
                raise
        for other in done:
            other.close(self._grads)
        return unit.open(self._grads)

    def _fuse(self, model: torch.nn.Module, places: Mapping[int, tuple[Pair, Unit, int]]) -> None:
        for name, module in model.named_modules():
            for kind, parameter in module.named_parameters(recurse=False):
                if parameter.ndim < 2 or id(parameter) not in places:
                    continue
                pair, unit, index = places[id(parameter)]
                if kind == "weight":
                    done = fuse(module, self, unit, index, bool(pair.record.zero))
                else:
                    done = f"{type(module).__name__} is neither a linear layer nor an embedding"
                if isinstance(done, str):
                    self._refused[name] = done
                    unit.mixed.add(index)
                    continue
                self._layers[name], undo = done
                self._undo.append(undo)
                unit.layers.setdefault(index, []).append(done[0])
                if not none_reaches_hooks():
                    node = torch.autograd.graph.get_gradient_edge(parameter).node
                    self._nodes.append(node)  # its hook lives as long as it does
                    self._undo.append(node.register_hook(self._finisher(unit, index, parameter)).remove)

    def _finisher(self, unit: Unit, index: int, parameter: torch.Tensor) -> Callable[..., None]:
        return lambda *_: self._receive(unit, index, parameter)

    def _start(self) -> None:
        if self._meets and self._autograd is None:
            self._autograd = torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(False)
        self.running = True
        for unit in self._units.values():  # what an exception left open
            unit.buffers = None

    def _end(self) -> None:
        self._release()
        self.running = False
        for unit in self._units.values():
            if unit.buffers is not None:
                unit.close(self._grads)
