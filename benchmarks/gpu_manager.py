"""What a manager costs on one GPU without any model: host time, launches, traffic, and offload to the host.

    python benchmarks/gpu_manager.py                       # everything
    python benchmarks/gpu_manager.py host launches         # of host, launches, device, offload

`host`: get and notify of a block, from Python and (gpu_host_time.cpp, built by tests/gpu/run.sh) from C++.
`launches`: what a block and micro-step puts on the GPU, counted by the profiler in models of 12 and 24 layers.
`device`: a whole step of stochastic bf16 sums against copies on the device of the same bytes, read and written.
`offload`: sums kept in pinned host memory against copies of the same bytes over the same bus.
Results go to benchmarks/results/gpu_manager.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from gpu_report import RESULTS, Target, command_line, table, targets_json, write  # noqa: E402

MICRO_STEPS = 4
PARTS = ("host", "launches", "device", "offload")
LLAMA, QWEN = ("llama-2-7b", 8), ("qwen2.5-0.5b", 24)
KINDS: dict[str, dict[str, Any]] = {
    "direct bf16": {"dtype": "bfloat16"},
    "bf16, fp32 sums": {"dtype": "bfloat16", "accumulator": "float32"},
    "stochastic bf16": {"dtype": "bfloat16", "rounding": "stochastic"},
}
BUILT = sorted(HERE.parent.glob(".cache/gpu-tests/sm_*/gpu_host_time"))


def manager(module: Any, preset: str, layers: int, device: str, **options: Any) -> Any:
    config = module.Config.preset(preset, layers=layers)
    return module.GradientManager(config, strategy="unsharded", device=device, **options)


def visit(grads: Any, weight: str) -> None:
    grads.non_block_full(weight)
    grads.notify_non_block(weight)


def visit_blocks(grads: Any, layers: int) -> None:
    for layer in reversed(range(layers)):
        grads.block_full(layer)
        grads.notify_block(layer)


def step(grads: Any, layers: int) -> None:
    """The calls of a step, without a backward pass: whatever the buffers hold is summed."""
    for m in range(MICRO_STEPS):
        with grads.micro_step(m, MICRO_STEPS):
            visit(grads, "lm_head")
            visit(grads, "final_norm")
            visit_blocks(grads, layers)
            visit(grads, "embedding")


def host_time(grads: Any, layers: int, steps: int, wait: Callable[[], None]) -> float:
    """Microseconds a block of get and notify. The GPU is idle when the clock starts, so no queue is full."""
    times = []
    for _ in range(steps):
        for m in range(MICRO_STEPS):
            with grads.micro_step(m, MICRO_STEPS):
                visit(grads, "lm_head")
                visit(grads, "final_norm")
                wait()
                start = time.perf_counter_ns()
                visit_blocks(grads, layers)
                times.append((time.perf_counter_ns() - start) / 1e3 / layers)
                visit(grads, "embedding")
    return median(times[MICRO_STEPS:])


def host(module: Any, device: str, wait: Callable[[], None], program: Path | None) -> dict[str, Any]:
    preset, layers = QWEN
    found: dict[str, Any] = {}
    for name in ("direct bf16", "stochastic bf16"):
        grads = manager(module, preset, layers, device, **KINDS[name])
        found[f"python, {name}"] = host_time(grads, layers, 50, wait)
        grads.close()
    if program is not None:
        done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr}")
        answer = json.loads(done.stdout)
        found["C++, direct bf16"] = answer["direct_us"]
        found["C++, stochastic bf16"] = answer["stochastic_us"]
    return found


def host_targets(found: dict[str, Any]) -> list[Target]:
    return [
        Target(f"host us a block, {language}, {name}", found.get(f"{language}, {name}"), limit)
        for language, limit in (("python", 25.0), ("C++", 8.0))
        for name in ("direct bf16", "stochastic bf16")
    ]


def launches(module: Any, device: str) -> dict[str, Any]:
    """Per kind of manager: launches a block and micro-step, by kind and name."""
    from gpu_timeline import difference, record

    preset, layers = QWEN
    found: dict[str, Any] = {}
    record(lambda: None)  # the profiler's own start
    for name, options in KINDS.items():
        runs = []
        for count in (layers, layers // 2):
            grads = manager(module, preset, count, device, **options)
            step(grads, count)
            runs.append(record(lambda grads=grads, count=count: step(grads, count)))
            grads.close()
        found[name] = count_launches(difference(*runs, (layers - layers // 2) * MICRO_STEPS))
    return found


def count_launches(per_block: dict[tuple[str, str], float]) -> dict[str, Any]:
    totals: dict[str, Any] = {"memset": 0.0, "kernel": 0.0, "memcpy": 0.0}
    for (kind, _), times in per_block.items():
        totals[kind] += times
    return {**totals, "names": {name: times for (_, name), times in per_block.items()}}


def launch_targets(found: dict[str, Any]) -> list[Target]:
    out = []
    for name, counts in found.items():
        out.append(Target(f"memsets a block and micro-step, {name}", counts["memset"], 1.0))
        out.append(Target(f"kernels a block and micro-step, {name}", counts["kernel"], 1.0))
        out.append(Target(f"copies a block and micro-step, {name}", counts["memcpy"], 0.0))
    return out


def traffic(plan: Any) -> list[tuple[int, int]]:
    """Bytes read and written for each unit in the first and in a later micro-step of stochastic bf16 sums.

    The first writes the sum from the gradient, later ones read it too; whatever starts at zero is zeroed each time.
    """
    out = []
    for arena in plan.arenas:
        n, zero = 2 * arena.weights_numel, 2 * arena.zero_numel
        out += [(2 * n + zero, 3 * n + zero)] * arena.count
    return out


def device_ms(body: Callable[[], None]) -> float:
    """Milliseconds on the device. A spinning kernel holds it until everything is enqueued, so that the host's pace does
    not count.
    """
    import torch

    cycles = 20_000_000
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        body()
        end.record()
        late = start.query()
        torch.cuda.synchronize()
        if not late:
            return float(start.elapsed_time(end))
        if cycles > 10_000_000_000:
            raise RuntimeError("the host does not enqueue a step before a spin of seconds ends")
        cycles *= 2


def device(module: Any, place: str, rounds: int) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    for preset, layers in (LLAMA, QWEN):
        grads = manager(module, preset, layers, place, **KINDS["stochastic bf16"])
        units = traffic(grads.plan)
        copies = [[first // 2 // 16 * 16, later // 2 // 16 * 16] for first, later in units]
        room = [max(sizes) for sizes in copies]
        source = [torch.zeros(size, dtype=torch.uint8, device=place) for size in room]
        target = [torch.empty_like(part) for part in source]

        def copy_step(copies: Any = copies, source: Any = source, target: Any = target) -> None:
            for m in range(MICRO_STEPS):
                for sizes, a, b in zip(copies, source, target, strict=True):
                    size = sizes[min(m, 1)]
                    b[:size].copy_(a[:size])

        def own(grads: Any = grads, layers: int = layers) -> None:
            step(grads, layers)

        own(), copy_step()
        times = [(device_ms(own), device_ms(copy_step)) for _ in range(rounds)]
        moved = sum(first + (MICRO_STEPS - 1) * later for first, later in units)
        ours, theirs = median(a for a, _ in times), median(b for _, b in times)
        found[f"{preset}, {layers} layers"] = {
            "step_ms": ours,
            "copy_ms": theirs,
            "gb_per_s": moved / ours / 1e6,
            "copy_gb_per_s": moved / theirs / 1e6,
            "of_copy": median(b / a for a, b in times),
        }
        grads.close()
        del grads, source, target, copy_step, own
        torch.cuda.empty_cache()
    return found


def device_targets(found: dict[str, Any]) -> list[Target]:
    limits = [0.98, 1.0]
    return [
        Target(f"stochastic step's traffic / copy, {name}", row["of_copy"], limit, at_least=True)
        for (name, row), limit in zip(found.items(), limits, strict=True)
    ]


def seconds(body: Callable[[], None]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    body()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def offload(module: Any, place: str, rounds: int) -> dict[str, Any]:
    import torch

    preset, layers = LLAMA
    small = manager(module, QWEN[0], 1, place, dtype="bfloat16", offload=True)
    step(small, 1)  # what the driver takes for contexts and kernels is nobody's gradient memory
    torch.cuda.synchronize()
    small.close()
    del small
    gc.collect()
    before = torch.cuda.mem_get_info()[0]
    grads = manager(module, preset, layers, place, dtype="bfloat16", offload=True)
    built = before - torch.cuda.mem_get_info()[0]
    step(grads, layers)
    torch.cuda.synchronize()
    drop = before - torch.cuda.mem_get_info()[0]
    memory, plan = grads.memory(), grads.plan.strategy("unsharded")
    size = 2 * next(arena for arena in grads.plan.arenas if arena.kind == "block").numel
    hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(layers)]
    buffers = [torch.empty(size, dtype=torch.uint8, device=place) for _ in range(2)]
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def one_by_one() -> None:
        """The bytes of a step: every sum written in the first micro-step, read and written in later ones."""
        for m in range(MICRO_STEPS):
            for i, host in enumerate(hosts):
                if m:
                    buffers[i % 2].copy_(host, non_blocking=True)
                host.copy_(buffers[i % 2], non_blocking=True)

    def both_ways() -> None:
        """The same bytes, each direction on a stream of its own."""
        for m in range(MICRO_STEPS):
            for host in hosts:
                if m:
                    with torch.cuda.stream(up):
                        buffers[0].copy_(host, non_blocking=True)
                with torch.cuda.stream(down):
                    host.copy_(buffers[1], non_blocking=True)

    bodies = {"step": lambda: step(grads, layers), "one": one_by_one, "both": both_ways}
    for body in bodies.values():
        body()
    times = [{name: seconds(body) for name, body in bodies.items()} for _ in range(rounds)]
    moved = layers * size * (2 * MICRO_STEPS - 1)
    medians = {name: median(row[name] for row in times) for name in bodies}
    found = {
        "blocks": layers,
        "block_bytes": size,
        "moved_bytes": moved,
        "step_s": medians["step"],
        "gb_per_s": moved / medians["step"] / 1e9,
        "copy_gb_per_s": moved / medians["one"] / 1e9,
        "both_ways_gb_per_s": moved / medians["both"] / 1e9,
        "of_copy": median(row["one"] / row["step"] for row in times),
        "of_both_ways": median(row["both"] / row["step"] for row in times),
        "manager_bytes": memory["total"] - memory["pinned"],
        "planned_bytes": plan.memory_bytes - plan.pinned_bytes,
        "pinned_bytes": memory["pinned"],
        "device_drop_built_bytes": built,
        "device_drop_bytes": drop,
    }
    grads.close()
    return found


def offload_targets(found: dict[str, Any]) -> list[Target]:
    planned = found["planned_bytes"]
    return [
        Target("offload: bytes a second / pinned copies", found["of_copy"], 0.8, at_least=True),
        Target("offload: device bytes held / plan", found["manager_bytes"] / planned, 1.0),
        Target("offload: device memory gone / plan", found["device_drop_bytes"] / planned, 1.01),
    ]


def show(results: dict[str, Any]) -> str:
    parts = []
    if "host" in results:
        rows = [["host time of get and notify", "us a block"]]
        parts.append(table(rows + [[name, f"{us:.2f}"] for name, us in results["host"].items()]))
    if "launches" in results:
        rows = [["launches a block and micro-step", "memset", "kernel", "copy"]]
        for name, counts in results["launches"].items():
            rows.append([name, *(f"{counts[kind]:.2f}" for kind in ("memset", "kernel", "memcpy"))])
        parts.append(table(rows))
    if "device" in results:
        rows = [["stochastic bf16, whole step", "ms", "copies ms", "GB/s", "of copy"]]
        for name, row in results["device"].items():
            numbers = (row["step_ms"], row["copy_ms"], row["gb_per_s"])
            rows.append([name, *(f"{number:.2f}" for number in numbers), f"{row['of_copy']:.3f}"])
        parts.append(table(rows))
    if "offload" in results:
        row = results["offload"]
        parts.append(
            table(
                [
                    ["offload, Llama-7B blocks", "GB/s", "share of copies"],
                    ["sums in host memory", f"{row['gb_per_s']:.1f}", ""],
                    ["copies, one after the other", f"{row['copy_gb_per_s']:.1f}", f"{row['of_copy']:.3f}"],
                    [
                        "copies, both ways at once",
                        f"{row['both_ways_gb_per_s']:.1f}",
                        f"{row['of_both_ways']:.3f}",
                    ],
                ]
            )
        )
    return "\n\n".join(parts)


def all_targets(results: dict[str, Any]) -> list[Target]:
    judges = {
        "host": host_targets,
        "launches": launch_targets,
        "device": device_targets,
        "offload": offload_targets,
    }
    return [target for part, judge in judges.items() if part in results for target in judge(results[part])]


def measure(parts: Sequence[str], rounds: int, program: Path | None) -> dict[str, Any]:
    import torch
    from gpu_step_rank import machine
    from gpu_workers import driver

    import gradgen

    place = "cuda:0"
    torch.cuda.set_device(0)
    module = gradgen.load("llama", device="cuda")
    results: dict[str, Any] = {"machine": {**machine(torch.device(place)), "driver": driver()}}
    if "offload" in parts:  # first, while nothing else holds memory
        results["offload"] = offload(module, place, rounds)
    if "host" in parts:
        results["host"] = host(module, place, torch.cuda.synchronize, program)
    if "launches" in parts:
        results["launches"] = launches(module, place)
    if "device" in parts:
        results["device"] = device(module, place, rounds)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--program", type=Path, default=BUILT[-1] if BUILT else None, help="gpu_host_time")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_manager.json")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results = measure(args.parts or PARTS, args.rounds, args.program)
    met = all_targets(results)
    results["command"] = command_line("python benchmarks/gpu_manager.py")
    results["targets"] = targets_json(met)
    write(args.out, results)
    print(show(results))
    print("\n".join(target.line() for target in met))
    return 0


if __name__ == "__main__":
    sys.exit(main())
