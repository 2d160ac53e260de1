"""What gradient handling adds to a training step: gradgen beside DDP and FSDP2, two ranks over gloo on this
machine.

    python benchmarks/step.py --config light --rounds 5

Every round runs every variant once, in rotated order, each in fresh processes with one thread a rank. The
overhead of a variant is its median step minus the floor's median step of the same round; the table shows
medians over the rounds. Peak memory is the steady peak (VmHWM after the warm-up). Results go to
benchmarks/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
WORLD = 2
CONFIGS = {"light": {"length": 32, "batch": 1}, "standard": {"length": 128, "batch": 2}}
DDP = ("ddp", "ddp_view_nosync", "ddp_view_nosync_zero")
FSDP2 = ("fsdp2", "fsdp2_nosync", "fsdp2_nosync_keep")
GRADGEN = (
    "gradgen_unsharded",
    "gradgen_unsharded_fused",
    "gradgen_replicated",
    "gradgen_sharded",
    "gradgen_sharded_all_to_all",
)
VARIANTS = ("floor", *DDP, *FSDP2, *GRADGEN)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def busy_seconds() -> float:
    """Processor seconds used by everyone on this machine."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(limit: float) -> bool:
    """Waits until others use less than 6 % of the processors; `limit` in seconds. False: they did not."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        before, start = busy_seconds(), time.monotonic()
        time.sleep(1.0)
        if (busy_seconds() - before) / (time.monotonic() - start) / (os.cpu_count() or 1) < 0.06:
            return True
    return False


def run(variant: str, options: dict[str, Any], timeout: float = 300) -> list[dict[str, Any]]:
    """One variant, one process a rank. Raises RuntimeError with the end of its log."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes, logs = [], []
        for rank in range(WORLD):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            arguments = [f"--{key}={value}" for key, value in options.items()]
            log = Path(folder, f"log{rank}")
            logs.append(log)
            command = [
                sys.executable,
                str(HERE / "step_rank.py"),
                variant,
                f"--out={folder}/{rank}.json",
                *arguments,
            ]
            with log.open("w") as stream:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
                )
        deadline = time.monotonic() + timeout
        try:
            codes = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [-1] * WORLD
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            text = "\n".join(log.read_text()[-2000:] for log in logs)
            raise RuntimeError(f"{variant}: ranks ended with {codes}\n{text}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]


def step_ms(ranks: list[dict[str, Any]]) -> float:
    """Median over the steps of the slower rank's time, milliseconds."""
    return 1000 * median(max(times) for times in zip(*(rank["times"] for rank in ranks), strict=True))


def measure(
    variants: list[str], options: dict[str, Any], rounds: int, quiet: float
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Per variant one entry a round; yields after every round, so that what was measured is never lost."""
    rows: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for index in range(rounds):
        shift = index * 5 % len(variants)
        for variant in variants[shift:] + variants[:shift]:
            calm = wait_for_quiet(quiet)
            ranks = run(variant, options)
            rows[variant].append(
                {
                    "ms": step_ms(ranks),
                    "cpu_ms": 1000
                    * median(sum(cpu) / WORLD for cpu in zip(*(rank["cpu"] for rank in ranks), strict=True)),
                    "peak_mib": max(rank["peak_mib"] for rank in ranks),
                    "calm": calm,
                    "gradient_mib": max(rank["gradient_bytes"] for rank in ranks) / 2**20,
                    "planned_mib": (ranks[0]["planned_bytes"] or 0) / 2**20,
                    "loss": median(rank["losses"][-1] for rank in ranks),
                }
            )
            entry = rows[variant][-1]
            print(
                f"round {index} {variant:28s} {entry['ms']:8.1f} ms  {entry['peak_mib']:7.1f} MiB"
                f"{'' if calm else '  (busy)'}",
                file=sys.stderr,
            )
        yield rows


def summarise(rows: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians over rounds, and each variant's overhead relative to the best DDP and FSDP2."""
    table: dict[str, dict[str, Any]] = {}
    for variant, entries in rows.items():
        overheads = [entry["ms"] - base["ms"] for entry, base in zip(entries, rows["floor"], strict=True)]
        table[variant] = {
            "step_ms": median(entry["ms"] for entry in entries),
            "overhead_ms": median(overheads),
            "cpu_overhead_ms": median(
                entry["cpu_ms"] - base["cpu_ms"] for entry, base in zip(entries, rows["floor"], strict=True)
            ),
            "overhead_range_ms": [min(overheads), max(overheads)],
            "peak_mib": median(entry["peak_mib"] for entry in entries),
            "gradient_mib": entries[0]["gradient_mib"],
            "planned_mib": entries[0]["planned_mib"],
            "loss": entries[0]["loss"],
        }
    for label, family in (("of_best_ddp", DDP), ("of_best_fsdp2", FSDP2), ("of_fsdp2", ("fsdp2",))):
        best = min((table[v]["overhead_ms"] for v in family if v in table), default=None)
        for row in table.values():
            row[label] = row["overhead_ms"] / best if best is not None and best > 0 else None
    return table


def show(table: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'variant':28s} {'step':>8s} {'over floor (range)':>24s} {'cpu':>6s} "
        f"{'/DDP':>6s} {'/FSDP2':>6s} {'gradients':>9s} {'plan':>7s} {'peak':>7s}"
    ]
    for variant, row in table.items():
        low, high = row["overhead_range_ms"]
        over = f"{row['overhead_ms']:.0f} ({low:.0f}..{high:.0f})"
        ratios = [
            f"{row[key]:6.2f}" if row[key] is not None else "     -"
            for key in ("of_best_ddp", "of_best_fsdp2")
        ]
        plan = f"{row['planned_mib']:7.1f}" if row["planned_mib"] else "      -"
        lines.append(
            f"{variant:28s} {row['step_ms']:8.0f} {over:>24s} {row['cpu_overhead_ms']:6.0f} "
            f"{ratios[0]} {ratios[1]} "
            f"{row['gradient_mib']:9.1f} {plan} {row['peak_mib']:7.0f}"
        )
    return "\n".join(
        [
            *lines,
            "milliseconds and MiB a rank; cpu: processor time over the floor's; "
            "/DDP, /FSDP2: overhead relative to the best variant of each",
        ]
    )


def machine() -> dict[str, Any]:
    import torch

    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", choices=[*CONFIGS, "both"], default="light")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--variants", nargs="*", default=list(VARIANTS), metavar="VARIANT", help=f"of {', '.join(VARIANTS)}"
    )
    parser.add_argument(
        "--quiet",
        type=float,
        default=60,
        help="seconds to wait for other users of the machine, before each run",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the ranks end with this process
    variants = ["floor", *(variant for variant in args.variants if variant != "floor")]
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for config in CONFIGS if args.config == "both" else [args.config]:
        options = {**CONFIGS[config], "steps": args.steps, "dtype": args.dtype}
        for rows in measure(variants, options, args.rounds, args.quiet):
            entries = [entry for runs in rows.values() for entry in runs]
            table = summarise(rows)
            results[f"{config}-{args.dtype}"] = {
                "machine": machine(),
                "command": " ".join(
                    ["python benchmarks/step.py", *(a for a in sys.argv[1:] if not os.path.isabs(a))]
                ),
                "world": WORLD,
                "micro_steps": 4,
                **options,
                "rounds": len(rows["floor"]),
                "busy_runs": sum(not entry["calm"] for entry in entries),
                "summary": table,
                "runs": rows,
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{config}, {args.dtype}, {args.rounds} rounds\n{show(table)}")
        busy = sum(not entry["calm"] for entry in entries)
        print(
            f"{busy} of {len(entries)} runs while others used the machine: then read cpu, not time\n"
            if busy
            else ""
        )


if __name__ == "__main__":
    main()
