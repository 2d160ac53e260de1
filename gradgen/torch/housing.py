"""Parameters in memory that the other ranks of a host can read, so that an update reaches them with one copy."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradgen.torch.names import Pair

_ALIGNMENT = 64  # bytes, as torch aligns its own memory


class Housing:
    """The memory of some parameters, laid out alike on every rank. It lives as long as a view of it."""

    def __init__(
        self, comm: Any, memory: Any, offsets: Mapping[str, int], addresses: Mapping[str, int]
    ) -> None:
        self.comm = comm
        self.memory = memory
        self.offsets = offsets  # of a parameter's first byte, by name
        self._addresses = addresses

    def holds(self, pairs: Sequence[Pair]) -> bool:
        return all(self._addresses.get(p.name) == p.parameter.data_ptr() for p in pairs)


_housings: weakref.WeakSet[Housing] = weakref.WeakSet()


def house(pairs: Sequence[Pair], model: torch.nn.Module, comm: Any) -> tuple[Housing | None, set[str]]:
    """Moves parameters into memory of the communicator. Returns where, and the names of those that it holds.

    Collective. `parameter.data` becomes a view of the new memory: the Parameter object, its values, ties, hooks
    and requires_grad stay. A view that somebody took of it before keeps the old memory. On every rank alike,
    parameters stay where they are when they overlap another tensor of the model in memory, and all of them when
    ranks cannot read each other's memory or a rank has none left.
    """
    if not comm.shares_memory or not pairs:
        return None, set()
    aliased = _aliased(model)
    fixed = [p.name for p in pairs if p.parameter.device.type != "cpu" or id(p.parameter) in aliased]
    movable = [p for p in pairs if p.name not in fixed]
    known = next((h for h in _housings if h.comm is comm and h.holds(movable)), None)
    answers = _agree(comm, {"fixed": fixed, "known": known is not None})
    names = {p.name for p in pairs}.difference(*(answer["fixed"] for answer in answers))
    if known is None or not all(answer["known"] for answer in answers):
        known = _move([p for p in movable if p.name in names], comm)
    return known, names if known is not None else set()


def _move(pairs: Sequence[Pair], comm: Any) -> Housing | None:
    offsets, end = {}, 0
    for pair in pairs:
        offsets[pair.name] = end
        end += -(-pair.parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory, problem = None, ""
    try:
        memory = comm.allocate(end)
    except Exception as error:  # whatever it is, the other ranks wait for this one's answer
        problem = str(error) or type(error).__name__
    if any(answer["problem"] for answer in _agree(comm, {"problem": problem})):
        return None
    view, addresses = memoryview(memory), {}  # type: ignore[arg-type]
    with torch.no_grad():
        for pair in pairs:
            parameter, begin = pair.parameter, offsets[pair.name]
            # A storage for each: torch.save of one weight writes that weight and not all of them.
            new = torch.frombuffer(view[begin : begin + parameter.nbytes], dtype=parameter.dtype)
            parameter.data = new.view(parameter.shape).copy_(parameter)
            addresses[pair.name] = parameter.data_ptr()
    housing = Housing(comm, memory, offsets, addresses)
    _housings.add(housing)
    return housing


def _aliased(model: torch.nn.Module) -> set[int]:
    """ids of parameters and buffers that overlap another in memory. Tied parameters are one object, and no alias."""
    tensors = {
        id(t): t for t in [*model.parameters(), *model.buffers()] if t.device.type == "cpu" and t.numel()
    }
    spans = sorted((*_span(tensor), key) for key, tensor in tensors.items())
    found: set[int] = set()
    reach, last = 0, 0  # end of what came before, and whose end it is
    for begin, end, key in spans:
        if begin < reach:
            found |= {key, last}
        if end > reach:
            reach, last = end, key
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end, of the tensor or (where it is not contiguous) of its storage."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _agree(comm: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in comm.gather_objects(json.dumps(mine).encode())]
