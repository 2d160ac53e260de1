"""What gradient handling adds to a training step on one GPU: gradgen beside plain autograd, DDP and FSDP2, one rank.

    python benchmarks/gpu_step.py                                  # 953M parameters, bf16, 4 micro-steps
    python benchmarks/gpu_step.py --device cpu --size tiny         # the same path without a GPU, for a check

One process a variant. All live through all rounds (about 15 GiB each for 953M), and take turns: every round runs every
variant, in rotated order. Ratios are to plain autograd in the same round; the table shows medians over rounds. Peak
memory is what torch allocated and what the manager holds besides; `device` is how much less of the GPU was free once a
variant had run its first steps, while no other was allocating. Results go to benchmarks/results/gpu_step.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from gpu_report import GIB, RESULTS, Target, command_line, short, table, targets_json, write
from gpu_workers import HERE, Group, driver, environment

PLAIN = "floor"
VARIANTS = (
    PLAIN,
    "ddp",
    "ddp_view_nosync",
    "fsdp2",
    "fsdp2_nosync",
    "gradgen_unsharded",
    "gradgen_unsharded_fused",
)
NAMES = {
    PLAIN: "plain autograd",
    "ddp": "DDP",
    "ddp_view_nosync": "DDP, bucket views, no_sync",
    "fsdp2": "FSDP2",
    "fsdp2_nosync": "FSDP2, no sync",
    "fsdp2_keep": "FSDP2, parameters kept",
    "fsdp2_fp32_keep": "FSDP2, parameters kept, fp32",
    "gradgen_unsharded": "attach",
    "gradgen_unsharded_fused": "attach, fuse_wgrad",
    "gradgen_sharded_fused": "attach, fuse_wgrad, sharded",
    "gradgen_sharded_all_to_all_fused": "attach, fuse_wgrad, all_to_all",
}
STEP_LIMITS = {"gradgen_unsharded": 1.01, "gradgen_unsharded_fused": 0.99}
PEAK_LIMIT = 1.01


def prebuild(device: str, spec: Path = HERE / "step_model_gpu.yaml") -> None:
    """Compiles before the clock runs and ranks wait for each other."""
    code = f"import gradgen; gradgen.load({str(spec)!r}, device={device!r})"
    done = subprocess.run([sys.executable, "-c", code], env=environment())
    if done.returncode:  # it has said why
        raise SystemExit(f"{spec.name} could not be built for {device}")


def one_run(group: Group, steps: int) -> dict[str, Any]:
    """The slowest rank of every step counts."""
    ranks = group.ask(f"run {steps}")
    slowest = [max(times) for times in zip(*(rank["ms"] for rank in ranks), strict=True)]
    return {
        "ms": median(slowest),
        "allocated_bytes": max(rank["allocated_bytes"] for rank in ranks),
        "reserved_bytes": max(rank["reserved_bytes"] for rank in ranks),
    }


def measure(
    groups: dict[str, Group], rounds: int, steps: int, deadline: float
) -> dict[str, list[dict[str, Any]]]:
    """Per variant one entry a round. Rounds that would end after `deadline` are left out, but for the first."""
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in groups}
    order = list(groups)
    longest = 0.0
    for index in range(rounds):
        started = time.monotonic()
        if index and started + longest > deadline:
            print(f"time for {index} of {rounds} rounds", file=sys.stderr)
            break
        shift = index * 3 % len(order)
        for variant in order[shift:] + order[:shift]:
            runs[variant].append(one_run(groups[variant], steps))
            print(f"round {index} {variant:28s} {runs[variant][-1]['ms']:9.2f} ms", file=sys.stderr)
        longest = max(longest, time.monotonic() - started)
    return runs


def summarise(
    runs: dict[str, list[dict[str, Any]]], built: dict[str, list[dict[str, Any]]], plain: str = PLAIN
) -> dict[str, dict[str, Any]]:
    summary: dict[str, dict[str, Any]] = {}
    for variant, entries in runs.items():
        ranks = built[variant]
        times = [entry["ms"] for entry in entries]
        held = max(rank["held_bytes"] for rank in ranks)
        summary[variant] = {
            "step_ms": median(times),
            "range_ms": [min(times), max(times)],
            "of_plain": median(a["ms"] / b["ms"] for a, b in zip(entries, runs[plain], strict=True)),
            "over_plain_ms": median(a["ms"] - b["ms"] for a, b in zip(entries, runs[plain], strict=True)),
            "peak_bytes": max(entry["allocated_bytes"] for entry in entries) + held,
            "reserved_bytes": max(entry["reserved_bytes"] for entry in entries) + held,
            "device_bytes": max(rank["device_bytes"] for rank in ranks),
            "manager_bytes": held,
            "planned_bytes": ranks[0]["planned_bytes"],
            "norm": ranks[0]["norm"],
            "notes": ranks[0]["notes"],
        }
    base = summary[plain]
    for row in summary.values():
        for key in ("peak", "reserved", "device"):
            whole = base[f"{key}_bytes"]
            row[f"{key}_of_plain"] = row[f"{key}_bytes"] / whole if whole else None
    return summary


def check_norms(summary: dict[str, dict[str, Any]], plain: str = PLAIN) -> list[str]:
    """All ranks see the same tokens, so every variant must end with the gradient of plain autograd."""
    right = summary[plain]["norm"]
    return [
        f"{variant}: gradient norm {row['norm']:.6g}, plain autograd {right:.6g}"
        for variant, row in summary.items()
        if abs(row["norm"] - right) > 0.02 * right
    ]


def show(summary: dict[str, dict[str, Any]]) -> str:
    rows = [["variant", "step ms", "range", "/plain", "peak GiB", "/plain", "reserved", "device", "/plain"]]
    for variant, row in summary.items():
        low, high = row["range_ms"]
        rows.append(
            [
                NAMES.get(variant, variant),
                f"{row['step_ms']:.2f}",
                f"{low:.2f}..{high:.2f}",
                short(row["of_plain"]),
                f"{row['peak_bytes'] / GIB:.2f}",
                short(row["peak_of_plain"]),
                f"{row['reserved_bytes'] / GIB:.2f}",
                f"{row['device_bytes'] / GIB:.2f}",
                short(row["device_of_plain"]),
            ]
        )
    return table(rows)


def targets(summary: dict[str, dict[str, Any]]) -> list[Target]:
    found = []
    for variant, limit in STEP_LIMITS.items():
        if variant in summary:
            row, name = summary[variant], NAMES[variant]
            found.append(Target(f"{name}: step / plain", row["of_plain"], limit))
            found.append(Target(f"{name}: peak memory / plain", row["peak_of_plain"], PEAK_LIMIT))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=["953m", "7b", "tiny"], default="953m")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a variant and round")
    parser.add_argument(
        "--limit", type=float, default=140, help="seconds after which no further round starts"
    )
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_step.json")
    args = parser.parse_args()
    variants = [PLAIN, *(variant for variant in args.variants if variant != PLAIN)]
    prebuild(args.device)
    deadline = time.monotonic() + args.limit
    options = ["--size", args.size, "--device", args.device]
    groups: dict[str, Group] = {}
    try:
        for variant in variants:
            groups[variant] = Group("gpu_step_rank.py", [variant, *options])
        built = {}
        for variant, group in groups.items():  # one after the other: each sees its own allocations only
            built[variant] = group.ask("build")
            print(f"built {variant}", file=sys.stderr)
        runs = measure(groups, args.rounds, args.steps, deadline)
        for group in groups.values():
            group.end()
    finally:
        for group in groups.values():
            group.kill()
    summary = summarise(runs, built)
    met = targets(summary)
    problems = check_norms(summary)
    results = {
        "machine": {**built[PLAIN][0]["machine"], "driver": driver()},
        "command": command_line("python benchmarks/gpu_step.py"),
        "size": args.size,
        "parameters": built[PLAIN][0]["parameters"],
        "micro_steps": 4,
        "rounds": len(runs[PLAIN]),
        "steps": args.steps,
        "summary": summary,
        "targets": targets_json(met),
        "problems": problems,
        "runs": runs,
    }
    write(args.out, results)
    print(f"{args.size}, {results['parameters'] / 1e6:.0f}M parameters, {results['rounds']} rounds")
    print(show(summary))
    if args.device == "cpu" or args.size == "tiny":
        print("a check of this script: no measurement")
    else:
        print("\n".join(target.line() for target in met))
    for text in problems:
        print(f"WRONG   {text}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
