"""What a strategy costs: bytes of memory, bytes sent, and the collectives of a step in their order.

The memory rules are those of docs/design/layout-and-memory.md ("Memory of a manager"); the runtime's engine follows
the same rules and a test compares what it allocates and issues with what is planned here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradgen.layout import Arena
from gradgen.model import Strategy

DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}  # bytes an element
ROUNDINGS = ("nearest", "stochastic")
TRANSPORTS = ("single", "threads", "shared", "group", "nccl")
COPYING = ("group", "nccl")  # these receive into staging; the others read other ranks' memory in place


@dataclass(frozen=True)
class Settings:
    """How a manager is built and run: everything that bytes depend on besides the model."""

    dp: int = 1  # ranks
    ga: int = 1  # micro-steps a step
    dtype: str = "float32"  # of produced gradients
    accumulator: str = "float32"
    wire: str | None = None  # None: dtype for sharded units, the accumulator's for full ones
    rounding: str = "nearest"
    block_buffers: int = 2
    transport: str = "group"
    offload: bool = False  # block shards in pinned host memory

    @property
    def direct(self) -> bool:
        """Backward writes where sums are kept; otherwise it writes to staging first."""
        return self.dtype == self.accumulator and self.rounding == "nearest"

    def receives(self, strategy: Strategy | StrategyPlan, unit: Arena) -> bool:
        """Slices of other ranks are copied here before they are summed. NCCL sums an arena in place where it can."""
        if self.transport not in COPYING or self.dp == 1:
            return False
        sharded = is_sharded(strategy, unit)
        converts = self.wire_of(sharded) != (self.dtype if sharded else self.accumulator)
        return self.transport != "nccl" or strategy.collective == "all_to_all" or unit.packed or converts

    def wire_of(self, sharded: bool) -> str:
        return self.wire or (self.dtype if sharded else self.accumulator)


class Collective(NamedTuple):
    """One entry of the trace. `bytes` is what a rank sends."""

    operation: str  # reduce_scatter | all_to_all | all_reduce | all_gather | end_step
    unit: str  # "weight 'embedding'", "block 'decoder' layer 3"; the model's name at the end of a step
    bytes: int
    micro_step: int


@dataclass(frozen=True)
class StrategyPlan:
    """What one strategy costs. Bytes are per rank; traffic and collectives are per optimizer step."""

    id: str
    blocks: str  # full | sharded
    non_blocks: str
    collective: str
    full_bytes: int  # full-size buffers that hold sums
    shard_bytes: int
    staging_bytes: int  # produced gradients on their way to a sum
    receive_bytes: int  # what a process group receives into and sends from
    pinned_bytes: int
    wire_bytes: int  # sent
    collectives: int

    @property
    def memory_bytes(self) -> int:
        return (
            self.full_bytes + self.shard_bytes + self.staging_bytes + self.receive_bytes + self.pinned_bytes
        )


def is_sharded(strategy: Strategy | StrategyPlan, unit: Arena) -> bool:
    """At one rank there is nothing to divide: every unit is placed full."""
    placement = strategy.blocks if unit.kind == "block" else strategy.non_blocks
    return unit.world > 1 and placement == "sharded"


def cost(strategy: Strategy, units: Sequence[Arena], settings: Settings) -> StrategyPlan:
    sharded = [unit for unit in units if is_sharded(strategy, unit)]
    full = [unit for unit in units if not is_sharded(strategy, unit)]
    produced, accumulator = DTYPES[settings.dtype], DTYPES[settings.accumulator]
    staged = [
        unit
        for unit in units
        if not settings.direct or is_sharded(strategy, unit) or settings.offload and unit.kind == "block"
    ]
    staging = _slots(staged, settings.block_buffers, lambda unit: unit.numel)
    kept = [(unit, unit.shard_numel if is_sharded(strategy, unit) else unit.numel) for unit in units]
    offloaded = [(unit, numel) for unit, numel in kept if settings.offload and unit.kind == "block"]
    bounced = 2 * max((numel for _, numel in offloaded), default=0)  # on their way to the host and back
    sent = collectives = 0
    for unit in units if settings.dp > 1 else ():
        times = unit.count * (settings.ga if is_sharded(strategy, unit) else 1)
        sent, collectives = sent + times * slice_bytes(strategy, unit, settings), collectives + times
        if strategy.collective == "all_reduce":
            sent, collectives = sent + unit.count * gather_bytes(unit, settings), collectives + unit.count
    return StrategyPlan(
        strategy.id,
        strategy.blocks,
        strategy.non_blocks,
        strategy.collective,
        full_bytes=accumulator * sum(unit.count * unit.numel for unit in full if not _hosted(unit, settings)),
        shard_bytes=accumulator
        * sum(unit.count * unit.shard_numel for unit in sharded if not _hosted(unit, settings)),
        staging_bytes=produced * staging + accumulator * bounced,
        receive_bytes=_receive(strategy, units, settings)
        if settings.transport in COPYING and settings.dp > 1
        else 0,
        pinned_bytes=accumulator * sum(unit.count * numel for unit, numel in offloaded),
        wire_bytes=sent,
        collectives=collectives + (settings.dp > 1),
    )


def _hosted(unit: Arena, settings: Settings) -> bool:
    return settings.offload and unit.kind == "block"


def slice_bytes(strategy: Strategy | StrategyPlan, unit: Arena, settings: Settings) -> int:
    """Bytes that a rank sends when one unit is reduced: every other rank's slice."""
    return (unit.world - 1) * unit.shard_numel * DTYPES[settings.wire_of(is_sharded(strategy, unit))]


def gather_bytes(unit: Arena, settings: Settings) -> int:
    """Bytes that a rank sends when reduced slices of one unit are gathered: its own, to every other rank."""
    return (unit.world - 1) * unit.shard_numel * DTYPES[settings.accumulator]


def trace(
    strategy: StrategyPlan, order: Sequence[tuple[Arena, Sequence[int]]], settings: Settings, model: str
) -> Iterator[Collective]:
    """The collectives of one step; `order`: units and those of their layers that follow each other.

    Sharded units travel in every micro-step, full ones in the last.
    """
    if settings.dp == 1:
        return
    last = settings.ga - 1
    for micro_step in range(settings.ga):
        for unit, layers in order:
            if micro_step < last and not is_sharded(strategy, unit):
                continue
            size = slice_bytes(strategy, unit, settings)
            for name in instance_names(unit, layers):
                yield Collective(strategy.collective, name, size, micro_step)
    if strategy.collective == "all_reduce":
        for unit, layers in order:
            for name in instance_names(unit, layers):
                yield Collective("all_gather", name, gather_bytes(unit, settings), last)
    yield Collective("end_step", model, 0, last)


def instance_names(unit: Arena, layers: Sequence[int]) -> list[str]:
    """The names that traces and errors use."""
    if unit.kind == "weight":
        return [f"weight '{unit.id}'"]
    return [f"block '{unit.block}' layer {layer}" for layer in layers]


def _slots(units: Sequence[Arena], block_buffers: int, size: Callable[[Arena], int]) -> int:
    """Elements of staging: slots that all blocks share, as large as the largest, and one slot a weight."""
    blocks = [unit for unit in units if unit.kind == "block"]
    slots = min(block_buffers, sum(unit.count for unit in blocks))
    return slots * max(map(size, blocks), default=0) + sum(
        size(unit) for unit in units if unit.kind == "weight"
    )


def _receive(strategy: Strategy, units: Sequence[Arena], settings: Settings) -> int:
    """Bytes that a process group receives into, and sends from where a slice must be converted or packed.

    Staged units have their own; one more, as large as the largest exchange, serves full units and ranks that
    contribute nothing.
    """
    units = [unit for unit in units if settings.receives(strategy, unit)]
    sharded = [unit for unit in units if is_sharded(strategy, unit)]
    wire = settings.wire_of(sharded=True)
    converts = wire != settings.dtype
    block_packs = any(unit.packed for unit in sharded if unit.kind == "block")
    sending = [unit for unit in sharded if converts or unit.packed or unit.kind == "block" and block_packs]
    own = sum(
        _slots(part, settings.block_buffers, lambda unit: unit.shard_numel) for part in (sharded, sending)
    )
    full_converts = settings.wire_of(sharded=False) != settings.accumulator
    full_packs = any(full_converts or unit.packed for unit in units if not is_sharded(strategy, unit))
    largest = max((slice_bytes(strategy, unit, settings) // (unit.world - 1) for unit in units), default=0)
    return settings.dp * (DTYPES[wire] * own + largest * (2 if full_packs else 1))
