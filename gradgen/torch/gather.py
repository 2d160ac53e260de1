"""Every rank's updated shards, into every rank's parameters: few collectives through one small buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradgen.torch.shards import Shard
from gradgen.torch.types import Communicator


@dataclass
class Chunk:
    """One collective: what this rank packs, and where the other ranks' bytes go. Views only."""

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


class ParameterGather:
    """Gathers parameters whose shards are divided among ranks. Weights that every rank owns whole are left
    alone.

    Each rank's shards form one long row of elements, cut into pieces of at most `piece_bytes`; a collective
    carries one piece a rank, so its number is (model bytes / world / piece_bytes) and memory stays at
    world * piece_bytes.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        ranks: Sequence[Mapping[str, tuple[int, int]]],
        rank: int,
        comm: Communicator,
        piece_bytes: int,
    ) -> None:
        self._comm = comm
        self._streams: list[Stream] = []
        divided = [s for s in shards if any(entries[s.name][1] != s.parameter.numel() for entries in ranks)]
        for dtype in sorted({s.parameter.dtype for s in divided}, key=str):
            group = [s for s in divided if s.parameter.dtype == dtype]
            self._streams.append(_stream(group, ranks, rank, max(piece_bytes // dtype.itemsize, 1)))

    def __call__(self) -> None:
        """Collective, blocking."""
        for stream in self._streams:
            for chunk in stream.chunks:
                if chunk.own:
                    torch._foreach_copy_(chunk.packed, chunk.own)
                self._comm.all_gather(stream.receive, stream.send)
                if chunk.others:
                    torch._foreach_copy_(chunk.others, chunk.received)


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
    return Stream(send, receive, chunks)
