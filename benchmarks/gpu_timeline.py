"""What ran on a GPU and when, from torch's profiler, and how much of communication lay beside computation."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {"kernel": "kernel", "gpu_memset": "memset", "gpu_memcpy": "memcpy"}
MARK = "spin_kernel"  # what torch.cuda._sleep launches
Spans = list[tuple[float, float]]


class Activity(NamedTuple):
    """Something that the device did; microseconds."""

    kind: str  # kernel | memset | memcpy
    name: str
    stream: int
    start: float
    end: float

    @property
    def marks(self) -> bool:
        return MARK in self.name

    @property
    def exchanges(self) -> bool:
        """An NCCL kernel that moves gradients to where they are summed."""
        name = self.name.lower()
        return "nccl" in name and "allgather" not in name and "broadcast" not in name


def mark() -> None:
    """A kernel of a microsecond that can be found again in the timeline, on the current stream."""
    import torch

    torch.cuda._sleep(1)


def record(body: Callable[[], None]) -> list[Activity]:
    """Runs `body` under the profiler; what the device did, in order of start."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        body()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return activities(json.loads(path.read_text()))


def activities(trace: dict[str, Any]) -> list[Activity]:
    """Of a Chrome trace as torch's profiler writes it."""
    found = []
    for event in trace["traceEvents"]:
        kind = KINDS.get(event.get("cat", ""))
        if kind is None or event.get("ph") != "X":
            continue
        start, stream = float(event["ts"]), event.get("args", {}).get("stream", event.get("tid", 0))
        found.append(Activity(kind, event["name"], int(stream), start, start + float(event.get("dur", 0))))
    return sorted(found, key=lambda activity: activity.start)


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def common(a: Spans, b: Spans) -> float:
    """Length of what two unions share."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def launches(found: Sequence[Activity]) -> Counter[tuple[str, str]]:
    """How often each kind and name occurred."""
    return Counter((activity.kind, activity.name) for activity in found if not activity.marks)


def difference(
    more: Sequence[Activity], less: Sequence[Activity], units: int
) -> dict[tuple[str, str], float]:
    """Launches per unit: two runs that differ in nothing but the number of units."""
    a, b = launches(more), launches(less)
    return {key: (a[key] - b[key]) / units for key in sorted(a | b) if a[key] != b[key]}


class Exchange(NamedTuple):
    """The reduction of one unit. Microseconds from the first mark; `covered`: its share beside computation."""

    unit: str
    micro_step: int
    start: float
    end: float
    covered: float


def exchanges(found: Sequence[Activity], trace: Sequence[Any], zero: float, busy: Spans) -> list[Exchange]:
    """`trace`: the manager's collectives in the order in which they were issued, (operation, unit, bytes, micro_step)."""
    entries = [entry for entry in trace if entry[0] not in ("end_step", "all_gather")]
    kernels = [activity for activity in found if activity.exchanges]
    if not entries or not kernels or len(kernels) % len(entries):
        raise RuntimeError(
            f"{len(kernels)} NCCL kernels and {len(entries)} collectives in the manager's trace: {launches(kernels)}"
        )
    each = len(kernels) // len(entries)  # large sends may take several kernels
    out = []
    for i, (_, unit, _, micro_step) in enumerate(entries):
        spans = union((k.start, k.end) for k in kernels[i * each : (i + 1) * each])
        share = common(spans, busy) / length(spans) if spans else 0.0
        start, end = (spans[0][0], spans[-1][1]) if spans else (0.0, 0.0)
        out.append(Exchange(unit, micro_step, start - zero, end - zero, share))
    return out


class Timeline(NamedTuple):
    """One step. `compute[m][layer]`: when the backward pass of a layer ran in micro-step m, from the first mark."""

    compute: list[dict[int, tuple[float, float]]]
    exchanges: list[Exchange]
    overlapped: float  # share of all exchanges' time during which computation ran
    exposed_us: float  # time of exchanges without computation
    behind: int  # blocks whose reduction ran while the next one computed
    blocks: int  # that have a next one


def timeline(found: Sequence[Activity], trace: Sequence[Any], layers: int, micro_steps: int) -> Timeline:
    """Each micro-step has marks at its start, at the start of each layer's backward pass (last layer first), and at
    its end.
    """
    marks = [activity for activity in found if activity.marks]
    if len(marks) != micro_steps * (layers + 2):
        raise RuntimeError(f"{len(marks)} marks on the timeline, expected {micro_steps * (layers + 2)}")
    zero, stream = marks[0].start, marks[0].stream
    busy = union((a.start, a.end) for a in found if a.stream == stream and not a.marks)
    compute = []
    for m in range(micro_steps):
        own = marks[m * (layers + 2) : (m + 1) * (layers + 2)]
        spans = {}
        for i, layer in enumerate(reversed(range(layers))):
            spans[layer] = (own[1 + i].start - zero, own[2 + i].start - zero)
        compute.append(spans)
    moved = exchanges(found, trace, zero, busy)
    everything = union((e.start + zero, e.end + zero) for e in moved)
    shared = common(everything, busy)
    behind = blocks = 0
    for exchange in moved:
        layer = layer_of(exchange.unit)
        if layer is None or layer == 0:
            continue
        blocks += 1
        behind += common([(exchange.start, exchange.end)], [compute[exchange.micro_step][layer - 1]]) > 0
    return Timeline(
        compute,
        moved,
        shared / length(everything) if everything else 0.0,
        length(everything) - shared,
        behind,
        blocks,
    )


def layer_of(unit: str) -> int | None:
    """3 of "block 'decoder' layer 3"; None for a weight outside the blocks."""
    return int(unit.rsplit(" ", 1)[1]) if unit.startswith("block ") else None
