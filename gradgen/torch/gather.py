"""Every rank's updated shards, into every rank's parameters: straight from the memory of the others where ranks share
it, else by few collectives through one small buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradgen.torch.housing import Housing
from gradgen.torch.shards import Shard


@dataclass
class Chunk:
    """One collective: what this rank packs, and where the other ranks' bytes go. Views only.

    `direct`: what this rank sends lies in one piece of a parameter already, and nothing is packed.
    """

    direct: torch.Tensor | None = None
    packed: list[torch.Tensor] = field(default_factory=list)  # of the send buffer
    own: list[torch.Tensor] = field(default_factory=list)  # of parameters
    received: list[torch.Tensor] = field(default_factory=list)  # of the receive buffer
    others: list[torch.Tensor] = field(default_factory=list)  # of parameters


@dataclass(frozen=True)
class Stream:
    """The chunks of one dtype. `send`: one rank's piece of a chunk; `receive`: every rank's."""

    send: torch.Tensor
    receive: torch.Tensor
    chunks: list[Chunk]


class InPlaceGather:
    """Gathers parameters that live in memory of the communicator: one copy a byte, one exchange for all of them."""

    def __init__(
        self, shards: Sequence[Shard], ranks: Sequence[Mapping[str, tuple[int, int]]], housing: Housing
    ) -> None:
        self._housing = housing
        sizes = {s.name: s.parameter.element_size() for s in shards}
        self._owned = [
            [
                (housing.offsets[name] + entries[name][0] * size, entries[name][1] * size)
                for name, size in sizes.items()
                if entries[name][1]
            ]
            for entries in ranks
        ]

    def __call__(self) -> None:
        """Collective, blocking."""
        self._housing.comm.gather_in_place(self._housing.memory, self._owned)


class PackedGather:
    """Gathers parameters through a buffer. Each rank's shards form one long row of elements, cut into pieces of at most
    `piece_bytes`; a collective carries one piece a rank, so its number is (model bytes / world / piece_bytes) and
    memory stays at world * piece_bytes.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        ranks: Sequence[Mapping[str, tuple[int, int]]],
        rank: int,
        all_gather: Callable[[Any, Any], None],
        piece_bytes: int,
    ) -> None:
        self._all_gather = all_gather
        self._streams: list[Stream] = []
        for dtype in sorted({s.parameter.dtype for s in shards}, key=str):
            group = [s for s in shards if s.parameter.dtype == dtype]
            self._streams.append(_stream(group, ranks, rank, max(piece_bytes // dtype.itemsize, 1)))

    def __call__(self) -> None:
        """Collective, blocking."""
        for stream in self._streams:
            for chunk in stream.chunks:
                if chunk.own:
                    torch._foreach_copy_(chunk.packed, chunk.own)
                self._all_gather(stream.receive, stream.send if chunk.direct is None else chunk.direct)
                if chunk.others:
                    torch._foreach_copy_(chunk.others, chunk.received)


def divided(shards: Sequence[Shard], ranks: Sequence[Mapping[str, tuple[int, int]]]) -> list[Shard]:
    """Those that some rank does not own whole: what has to be gathered."""
    return [s for s in shards if any(entries[s.name][1] != s.parameter.numel() for entries in ranks)]


def _stream(
    group: Sequence[Shard], ranks: Sequence[Mapping[str, tuple[int, int]]], rank: int, limit: int
) -> Stream:
    longest = max(sum(entries[s.name][1] for s in group) for entries in ranks)
    count = -(-longest // limit)
    piece = -(-longest // count)  # chunks of equal size
    like = group[0].parameter
    receive = like.new_zeros(len(ranks) * piece)
    send = receive[rank * piece : (rank + 1) * piece]  # gathered in place
    chunks = [Chunk() for _ in range(count)]
    for r, entries in enumerate(ranks):
        position = 0
        for shard in group:
            begin, numel = entries[shard.name]
            flat = shard.parameter.view(-1)[begin : begin + numel]
            while flat.numel():
                index, start = divmod(position, piece)
                part, flat = flat[: piece - start], flat[piece - start :]
                if r == rank:
                    chunks[index].own.append(part)
                    chunks[index].packed.append(send[start : start + part.numel()])
                else:
                    chunks[index].others.append(part)
                    chunks[index].received.append(
                        receive[r * piece + start : r * piece + start + part.numel()]
                    )
                position += part.numel()
    for chunk in chunks:
        if len(chunk.own) == 1 and chunk.own[0].numel() == piece:
            chunk.direct = chunk.own.pop()
            chunk.packed.clear()
    return Stream(send, receive, chunks)
