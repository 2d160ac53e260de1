"""Plans as text: one plain aligned table for terminal, pipe and golden tests."""

from __future__ import annotations

from collections.abc import Sequence

from gradgen.layout import Arena, layers_text
from gradgen.plan import Plan
from gradgen.plan_cost import DTYPES

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def table(plan: Plan) -> str:
    """Units with their sizes, then what each strategy costs. Bytes are a rank's, of gradients only."""
    settings = plan.settings
    element = DTYPES[settings.accumulator]
    rows: list[tuple[str, ...]] = [
        ("unit", "count", "weights", "elements", "padding", "zeroed", "bytes each", "bytes")
    ]
    for arena in plan.arenas:
        each = arena.numel * element
        numbers = (arena.count, len(arena.slots), arena.weights_numel, arena.padding, arena.zero_numel)
        rows.append((arena.id, *map(str, numbers), bytes_text(each), bytes_text(each * arena.count)))
    total = sum(arena.count * arena.weights_numel for arena in plan.arenas)
    every = sum(arena.count * arena.numel for arena in plan.arenas) * element
    rows.append(("total", "", "", str(total), "", "", "", bytes_text(every)))

    costs: list[tuple[str, ...]] = [
        (
            "strategy",
            "blocks",
            "others",
            "full",
            "shards",
            "staging",
            "receive",
            *(("pinned",) if plan.settings.offload else ()),  # on the host
            "memory",
            "sent a step",
            "collectives",
        )
    ]
    for cost in plan.strategies:
        parts = (
            cost.full_bytes,
            cost.shard_bytes,
            cost.staging_bytes,
            cost.receive_bytes,
            *((cost.pinned_bytes,) if plan.settings.offload else ()),
            cost.memory_bytes,
            cost.wire_bytes,
        )
        costs.append((cost.id, cost.blocks, cost.non_blocks, *map(bytes_text, parts), str(cost.collectives)))
    return "\n".join([*header(plan), "", *aligned(rows, left=1), "", *aligned(costs, left=3), ""])


def block_table(plan: Plan, block: str) -> str:
    """The weights of one unit in layout order: where each lies, padding after it, whether it is zeroed."""
    arena = plan.arena(block)
    element = DTYPES[plan.settings.accumulator]
    ends = [slot.offset for slot in arena.slots[1:]] + [arena.numel]
    rows: list[tuple[str, ...]] = [
        ("weight", "shape", "shard", "offset", "elements", "bytes", "padding", "zeroed")
    ]
    for slot, end in zip(arena.slots, ends, strict=True):
        shape = "[" + ", ".join(map(str, slot.shape)) + "]"
        shard = f"rows({slot.rows})" if slot.shard == "rows" else slot.shard
        numbers = (slot.offset, slot.numel, slot.numel * element, end - slot.offset - slot.numel)
        rows.append((slot.id, shape, shard, *map(str, numbers), "yes" if slot.zeroed else "no"))
    flat_end = arena.flat_begin + arena.world * arena.flat_shard
    lines = [
        f"{plan.model} {arena.kind} {arena.id}{_layers(arena)}: gradients only, {settings_text(plan)}",
        f"arena {arena.numel} elements, {bytes_text(arena.numel * element)}; zeroed [0, {arena.zero_numel})",
        f"flat [{arena.flat_begin}, {flat_end}), {arena.flat_shard} a rank; shard {arena.shard_numel}",
    ]
    return "\n".join([*lines, "", *aligned(rows, left=3), ""])


def _layers(arena: Arena) -> str:
    text = layers_text(arena.layers) if arena.kind == "block" else ""
    return f", {text}" if text.startswith("layers") else f" x {arena.count}"


def header(plan: Plan) -> list[str]:
    values = " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in plan.values
    )
    return [f"{plan.model}: gradients only, {settings_text(plan)}", *([values] if values else [])]


def settings_text(plan: Plan) -> str:
    settings = plan.settings
    ranks = "1 rank" if settings.dp == 1 else f"{settings.dp} ranks"
    steps = "1 micro-step" if settings.ga == 1 else f"{settings.ga} micro-steps"
    wire = f", wire {settings.wire}" if settings.wire else ""
    sums = f"{settings.dtype} into {settings.accumulator} ({settings.rounding})"
    return f"{ranks}, {steps}, {sums}{wire}, {settings.transport}"


def bytes_text(count: int) -> str:
    """1536 -> '1.5 KiB'; exact bytes below 1 KiB."""
    if count < 1024:
        return f"{count} B"
    value, unit = float(count), 0
    while value >= 1023.95 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}"


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns two spaces apart; the first `left` ones to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
