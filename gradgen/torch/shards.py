"""This rank's part of every parameter and of its gradient, as views."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradgen.diagnostics import MismatchError
from gradgen.torch.names import Pair
from gradgen.torch.types import Manager, as_torch


@dataclass(frozen=True)
class Shard:
    """Elements [offset, offset + numel) of the flattened parameter `name`, and their gradient.

    `values` and `gradient` have the parameter's shape when the shard is all of it, else they are flat.
    `gradient` has the accumulator's dtype.
    """

    name: str
    parameter: torch.Tensor
    offset: int
    numel: int
    values: torch.Tensor
    gradient: torch.Tensor


def collect(pairs: Sequence[Pair], grads: Manager) -> list[Shard]:
    """This rank's shard of every pair, empty ones too, in the manager's order."""
    blocks: dict[tuple[str, int], Any] = {}
    shards = []
    for pair in pairs:
        record = pair.record
        if record.block is None:
            native = grads.non_block_shard(record.id)
        else:
            key = (record.block, record.layer or 0)
            if key not in blocks:
                blocks[key] = grads.block_shard(key[1], key[0])
            native = blocks[key][record.id]
        shards.append(_shard(pair, native.offset, native.numel, as_torch(native) if native.numel else None))
    return shards


def _shard(pair: Pair, offset: int, numel: int, gradient: torch.Tensor | None) -> Shard:
    parameter = pair.parameter.detach()
    if not parameter.is_contiguous():
        raise ValueError(f"{pair.name}: not contiguous; call .contiguous() before building the optimizer")
    values = parameter.view(-1)[offset : offset + numel]
    if gradient is None:
        gradient = values.new_empty(0)
    gradient = gradient.view(-1)
    if numel == parameter.numel():
        values, gradient = parameter, gradient.view(parameter.shape)
    return Shard(pair.name, parameter, offset, numel, values, gradient)


def exchange(shards: Sequence[Shard], grads: Manager) -> list[dict[str, tuple[int, int]]]:
    """(offset, numel) of every parameter's shard, for every rank; checks that all ranks hold the same
    parameters.

    Collective. Raises MismatchError, on every rank, naming the first parameters whose names, shapes or
    values differ.
    """
    mine: dict[str, list[Any]] = {
        s.name: [s.offset, s.numel, list(s.parameter.shape), sum_]
        for s, sum_ in zip(shards, checksums(shards), strict=True)
    }
    if grads.world_size == 1:
        return [{name: (entry[0], entry[1]) for name, entry in mine.items()}]
    ranks = [json.loads(text) for text in grads.comm.gather_objects(json.dumps(mine).encode())]
    _compare(ranks)
    return [{name: (entry[0], entry[1]) for name, entry in entries.items()} for entries in ranks]


def _compare(ranks: Sequence[Mapping[str, Any]]) -> None:
    problems = []
    for rank, entries in enumerate(ranks[1:], 1):
        for name in [*ranks[0], *(n for n in entries if n not in ranks[0])]:
            ours, theirs = ranks[0].get(name), entries.get(name)
            if ours is None or theirs is None:
                problems.append(f"{name}: on rank {0 if ours else rank} only")
            elif ours[2] != theirs[2]:
                problems.append(f"{name}: shape {ours[2]} on rank 0, {theirs[2]} on rank {rank}")
            elif ours[3] != theirs[3]:
                problems.append(f"{name}: values differ between rank 0 and rank {rank}")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise MismatchError(
            "ranks hold different parameters; start them from one seed or one checkpoint\n  "
            + "\n  ".join(problems[:8])
            + more
        )


def checksums(shards: Sequence[Shard]) -> list[int]:
    """An exact sum of every parameter's bits, whatever the order of summation. One host synchronisation in
    all.
    """
    if not shards:
        return []
    sums = [_bit_sum(shard.parameter) for shard in shards]
    return [int(value) for value in torch.stack(sums).tolist()]


def _bit_sum(parameter: torch.Tensor) -> torch.Tensor:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    flat = parameter.reshape(-1).view(bits)
    total = torch.zeros((), dtype=torch.int64, device=parameter.device)
    for part in torch.split(flat, 1 << 22):  # an int64 copy of all of it at once would be twice the parameter
        total += part.sum(dtype=torch.int64)
    return total
