"""What gradgen.torch needs of a gradient manager: the part of its interface that is used here, for type
checking and reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack


class WeightRecord(Protocol):
    """One present weight, as `grads.weights()` lists it. `name` is the full checkpoint name."""

    name: str
    id: str
    block: str | None
    layer: int | None
    shape: Sequence[int]
    trainable: bool
    tied_to: str | None
    zero: bool
    may_be_absent: bool
    buffer: bool
    decay: bool


class Communicator(Protocol):
    def all_gather(self, out: Any, inp: Any) -> None: ...
    def gather_objects(self, mine: bytes) -> list[bytes]: ...


class Manager(Protocol):
    """A gradient manager of a built model. Tensors and shards speak DLPack."""

    rank: int
    world_size: int
    dtype: str
    accumulator: str
    strategy: str
    step: int
    direct: bool
    comm: Any
    device: str
    on_start: list[Callable[[], None]]
    on_end: list[Callable[[], None]]

    @property
    def step_skipped(self) -> bool: ...

    def weights(self) -> Iterable[Any]: ...
    def block_full(self, layer: int, block: str | None = None) -> Any: ...
    def notify_block(
        self, layer: int, block: str | None = None, written: Sequence[str] | None = None
    ) -> None: ...
    def non_block_full(self, id: str) -> Any: ...
    def notify_non_block(self, id: str) -> None: ...
    def block_shard(self, layer: int, block: str | None = None) -> Any: ...
    def non_block_shard(self, id: str) -> Any: ...
    def grad_norm(self) -> Any: ...
    def clip_grad_norm_(self, max_norm: float) -> Any: ...
    def zero_grad(self) -> None: ...
    def all_gather(self, out: Any, input: Any) -> None: ...


def torch_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def as_torch(tensor: Any) -> torch.Tensor:
    """A view of a native tensor, without a copy; it keeps the memory alive."""
    view: torch.Tensor = from_dlpack(tensor)
    return view
