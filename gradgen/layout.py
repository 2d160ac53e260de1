"""Where every gradient lies: one flat arena a unit, in elements. runtime/src/layout.cpp is the same in C++.

A unit is one block of a stack or one weight outside the blocks. Its arena orders weights so that those that
must be zeroed form one range (one memset), and those that are sharded flat form another (one slice a rank):

    A zeroed rows|whole    B zeroed flat    C other flat    D other rows|whole
    [---- zero range ---------------------)
                           [-- flat range: world * flat_shard --)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradgen.diagnostics import ConfigError
from gradgen.model import Shard

ALIGN = 64  # elements; every weight and every shard starts at a multiple
MAX_ELEMENTS = 1 << 60  # 2**63 bytes of the widest type


class LayoutWeight(Protocol):
    """What the layout needs to know of a weight (configure.ConcreteWeight has it)."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def numel(self) -> int: ...
    @property
    def zeroed(self) -> bool: ...
    @property
    def may_be_absent(self) -> bool: ...
    @property
    def shard(self) -> Shard: ...


@dataclass(frozen=True)
class Slot:
    """One weight in an arena. Offsets in elements."""

    id: str
    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    zeroed: bool
    shard: str  # flat | rows | whole
    rows: int

    @property
    def group(self) -> int:
        if self.zeroed:
            return 1 if self.shard == "flat" else 0
        return 2 if self.shard == "flat" else 3

    def owned(self, arena: Arena, rank: int) -> tuple[int, int]:
        """The range of this weight's elements that `rank` owns; (0, 0) if none."""
        if self.shard == "flat":
            begin = arena.flat_begin + rank * arena.flat_shard - self.offset
            first, last = max(begin, 0), min(begin + arena.flat_shard, self.numel)
            return (first, last) if first < last else (0, 0)
        if self.shard == "whole" or not self.shape or not self.numel:
            return 0, self.numel
        units = self.shape[0] // self.rows
        share = -(-units // arena.world)
        unit = self.numel // units
        return min(rank * share, units) * unit, min((rank + 1) * share, units) * unit


@dataclass(frozen=True)
class Arena:
    """The arena of one block kind or of one weight outside the blocks, for one world size. Elements."""

    kind: str  # weight | block
    id: str  # of the weight or block, with the number of the kind where a stack has several: "decoder.1"
    layers: Sequence[int]  # indices of the blocks that are laid out so; one for a weight
    world: int
    numel: int  # padded: what is allocated
    zero_numel: int  # [0, zero_numel) is zeroed at the first touch
    flat_begin: int
    flat_shard: int  # [flat_begin, flat_begin + world * flat_shard) is divided evenly over ranks
    shard_numel: int  # of a rank's shard buffer, the same on every rank
    slots: tuple[Slot, ...]  # in arena order

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def block(self) -> str:
        """The id in the spec."""
        return self.id.partition(".")[0]

    @property
    def packed(self) -> bool:
        """A rank's slice is not one range of the arena."""
        return any(slot.shard != "flat" for slot in self.slots)

    @property
    def weights_numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        return self.numel - self.weights_numel

    def pieces(self, slot: Slot) -> Iterator[tuple[int, int, int]]:
        """(rank, begin, end) of every non-empty part of a weight; linear in the number of parts."""
        ranks = range(self.world)
        if slot.shard == "flat" and slot.numel:
            first = (slot.offset - self.flat_begin) // self.flat_shard
            last = (slot.offset + slot.numel - 1 - self.flat_begin) // self.flat_shard
            ranks = range(first, last + 1)
        for rank in ranks:
            begin, end = slot.owned(self, rank)
            if begin < end:
                yield rank, begin, end


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def arena(
    kind: str, unit: str, layers: int | Sequence[int], weights: Sequence[LayoutWeight], world: int
) -> Arena:
    """Lays out the weights of one unit (trainable, present and not tied to others) for `world` ranks.

    `layers`: the indices of the blocks that are laid out so, or their number where it is all of a stack.
    """
    layers = range(layers) if isinstance(layers, int) else layers
    cursor = shard_numel = zero_numel = flat_begin = flat_shard = 0
    slots: list[Slot] = []
    groups: tuple[list[LayoutWeight], ...] = ([], [], [], [])
    for weight in weights:
        zeroed = weight.zeroed or weight.may_be_absent
        flat = weight.shard.kind == "flat"
        groups[(1 if flat else 0) if zeroed else (2 if flat else 3)].append(weight)
    for group, members in enumerate(groups):
        if group == 1:
            flat_begin = cursor
        for weight in members:
            flat = weight.shard.kind == "flat"
            slots.append(
                Slot(
                    weight.id,
                    weight.name,
                    weight.shape,
                    offset=cursor,
                    numel=weight.numel,
                    zeroed=group < 2,
                    shard=weight.shard.kind,
                    rows=weight.shard.rows,
                )
            )
            cursor += round_up(weight.numel, ALIGN)
            if not flat:
                shard_numel += round_up(largest_part(weight, world), ALIGN)
        if group == 1:
            zero_numel = cursor
        if group == 2:
            flat_shard = round_up(cursor - flat_begin, ALIGN * world) // world
            cursor = flat_begin + world * flat_shard
            shard_numel += flat_shard
    if cursor > MAX_ELEMENTS:
        raise ConfigError(f"{kind} {unit!r} needs {cursor} elements: more than a machine can address")
    return Arena(
        kind, unit, layers, world, cursor, zero_numel, flat_begin, flat_shard, shard_numel, tuple(slots)
    )


def largest_part(weight: LayoutWeight, world: int) -> int:
    """Elements of the largest rank's part of a weight that is whole on every rank or divided by rows."""
    if weight.shard.kind == "whole" or not weight.shape or not weight.numel:
        return weight.numel
    rows, unit = weight.shape[0], weight.shard.rows
    if unit < 1 or rows % unit:
        problem = f"{rows} rows are not a multiple of rows({unit})"
        raise ConfigError(f"weight {weight.id!r}: {problem}, so {world} ranks cannot divide it")
    return -(-(rows // unit) // world) * unit * (weight.numel // rows)


def text(arenas: Sequence[Arena], world: int) -> str:
    """Canonical text, the same as the runtime's describe_layout; ranks compare it when they start."""
    lines = [f"world {world}"]
    for unit in arenas:
        count = f" {layers_text(unit.layers)}" if unit.kind == "block" else ""
        sizes = f"arena {unit.numel} zero {unit.zero_numel} flat {unit.flat_begin} {unit.flat_shard}"
        lines.append(f"{unit.kind} {unit.id}{count} {sizes} shard {unit.shard_numel}")
        lines.extend(f"  {slot.id} {slot.offset} {slot.numel}" for slot in unit.slots)
    return "\n".join(lines) + "\n"


def layers_text(layers: Sequence[int]) -> str:
    """`count 24` for all of a stack from its first block on, else `layers 0,3-23`."""
    count = len(layers)
    if isinstance(layers, range) or not count or layers[0] == 0 and layers[-1] == count - 1:
        return f"count {count}"
    return f"layers {spans(layers)}"


def spans(layers: Sequence[int]) -> str:
    """`0,3-23` of ascending integers."""
    out: list[list[int]] = []
    for layer in layers:
        if out and layer == out[-1][1] + 1:
            out[-1][1] = layer
        else:
            out.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in out)


def verify(unit: Arena) -> None:
    """Checks what every layout must satisfy; a failure is a bug of gradgen, never of a spec."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            where = f"{unit.kind} {unit.id!r} at {unit.world} ranks"
            raise AssertionError(f"internal error: gradgen planned a wrong layout for {where}: {what}")

    sizes = {
        "arena": unit.numel,
        "zero range": unit.zero_numel,
        "slice": unit.flat_shard,
        "shard": unit.shard_numel,
    }
    for name, size in sizes.items():
        require(size >= 0 and size % ALIGN == 0, f"its {name} has {size} elements, not a multiple of {ALIGN}")
    flat_end = unit.flat_begin + unit.world * unit.flat_shard
    end, shard_numel = 0, unit.flat_shard
    for slot in unit.slots:
        require(slot.offset % ALIGN == 0, f"{slot.id} starts at {slot.offset}, which is not aligned")
        require(slot.offset >= end, f"{slot.id} overlaps the weight before it")
        end = slot.offset + slot.numel
        require(
            slot.zeroed == (slot.offset < unit.zero_numel) or not slot.numel,
            f"{slot.id} is on the wrong side of the zero range",
        )
        require(not slot.zeroed or end <= unit.zero_numel, f"{slot.id} is only partly in the zero range")
        if slot.shard == "flat":
            require(unit.flat_begin <= slot.offset and end <= flat_end, f"{slot.id} leaves the flat range")
        else:
            require(end <= unit.flat_begin or slot.offset >= flat_end, f"{slot.id} lies in the flat range")
            shard_numel += round_up(slot.owned(unit, 0)[1], ALIGN)
        verify_parts(unit, slot, require)
    require(end <= unit.numel, "its last weight does not fit")
    require(
        shard_numel == unit.shard_numel, f"a shard needs {shard_numel} elements and has {unit.shard_numel}"
    )
    require(unit.world > 1 or unit.shard_numel == unit.numel, "one rank's shard is not the arena")


def verify_parts(unit: Arena, slot: Slot, require: Callable[[bool, str], None]) -> None:
    """Every element of a weight belongs to one rank, or the whole weight to all."""
    parts = list(unit.pieces(slot))
    if slot.shard == "whole" or not slot.shape and slot.shard == "rows":
        require(
            not slot.numel or parts == [(rank, 0, slot.numel) for rank in range(unit.world)],
            f"{slot.id} is not whole on every rank",
        )
        return
    covered = 0
    for rank, begin, stop in parts:
        require(begin == covered, f"rank {rank}'s part of {slot.id} starts at {begin}, not {covered}")
        covered = stop
    require(covered == slot.numel, f"the ranks' parts of {slot.id} cover {covered} of {slot.numel} elements")
