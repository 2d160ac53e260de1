"""Several GPUs of one host: collectives beside NCCL's own, steps beside DDP and FSDP2, and scaling from 1 to N.

    python benchmarks/gpu_multi.py                                  # a rank a GPU, everything
    python benchmarks/gpu_multi.py collectives step --ranks 2       # of collectives, step, scaling, large
    python benchmarks/gpu_multi.py --device cpu --ranks 2 --quick   # the same path over gloo, for a check

`collectives`: Llama-7B and Qwen2.5-0.5B blocks, bf16 and fp32, a step of the manager against the bare calls of
torch.distributed on the same bytes; bus bandwidth is bytes * (N - 1) / N / time. `step`: 953M parameters, 4 micro-steps,
no optimizer; what a variant adds to plain autograd on ranks that do not talk is its exposed communication. FSDP2
gathers parameters too, except where they are kept whole ("keep"), which is what gradgen does. `scaling`: the same at
1, 2, 4, ... ranks. `large`: a model of the shape of Llama-7B, with fewer layers where memory demands it. In `scaling`
and `large` one variant follows the other. Ranks beyond the number of GPUs share them (NCCL 2.30 or later). What does
not fit into --limit seconds is left out, and said. Results go to benchmarks/results/gpu_multi.json after every part.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from gpu_report import RESULTS, Target, command_line, short, table, targets_json, write
from gpu_step import PLAIN, check_norms, measure, one_run, prebuild, summarise
from gpu_step import show as show_steps
from gpu_workers import HERE, Group, driver, gpu_count, gpu_gib

PARTS = {
    "collectives": 40.0,
    "step": 90.0,
    "large": 100.0,
    "scaling": 50.0,
}  # seconds that each takes at most
FULL = ("ddp_view_nosync", "gradgen_unsharded_fused")  # every rank keeps all gradients
SHARDED = ("fsdp2", "fsdp2_keep", "fsdp2_fp32_keep")
OWN_SHARDED = ("gradgen_sharded_fused", "gradgen_sharded_all_to_all_fused")
STEP = (PLAIN, *FULL, *SHARDED, *OWN_SHARDED)
LARGE = (PLAIN, *FULL, *SHARDED[1:], *OWN_SHARDED)
SCALED = ("ddp_view_nosync", "gradgen_unsharded_fused", "gradgen_sharded_fused")
RESIDENT_GIB = 14.0  # of a rank of a 953M variant
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.gpus = gpu_count() if args.device == "cuda" else 0
        self.ranks = args.ranks or self.gpus
        self.sharing = -(-self.ranks // self.gpus) if self.gpus else 1
        self.more = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if self.sharing > 1 else {}
        self.memory = gpu_gib() / self.sharing if self.gpus else 1000.0
        self.started = time.monotonic()
        self.results: dict[str, Any] = {}

    def left(self) -> float:
        return float(self.args.limit) - (time.monotonic() - self.started)

    def group(self, script: str, arguments: list[str], world: int) -> Group:
        return Group(script, [*arguments, "--device", self.args.device], world, **self.more)

    def collectives(self) -> dict[str, Any]:
        models = ["tiny"] if self.args.quick else ["llama-7b", "qwen2.5-0.5b"]
        group = self.group("gpu_multi_rank.py", [], self.ranks)
        try:
            machine = group.ask("build")[0]["machine"]
            found = {}
            for model in models:
                for dtype, name in DTYPES.items():
                    ranks = group.ask(f"collectives {model} {dtype} {self.args.rounds + 2}")
                    found[f"{model} {name}"] = join_collectives(ranks, self.ranks)
            group.end()
        finally:
            group.kill()
        return {"machine": machine, "cases": found}

    def options(self, size: str, layers: int = 0) -> list[str]:
        return ["--size", "tiny" if self.args.quick else size, "--layers", str(layers)]

    def steps(
        self, variants: tuple[str, ...], world: int, options: list[str], resident: bool
    ) -> dict[str, Any]:
        """Where all variants fit into memory they take turns; otherwise one follows the other. They start together."""
        groups: dict[str, Group] = {}
        built, runs = {}, {}
        try:
            for variant in variants:
                groups[variant] = self.group("gpu_step_rank.py", [variant, *options], world)
            for variant, group in groups.items():
                built[variant] = group.ask("build", 180)
                print(f"built {variant}, {world} ranks", file=sys.stderr)
                if not resident:
                    runs[variant] = [one_run(group, self.args.steps)]
                    group.end()
            if resident:
                runs = measure(groups, self.args.rounds, self.args.steps, self.started + self.args.limit)
                for group in groups.values():
                    group.end()
        finally:
            for group in groups.values():
                group.kill()
        first = variants[0]
        summary = summarise(runs, built, first)
        return {
            "world": world,
            "machine": built[first][0]["machine"],
            "parameters": built[first][0]["parameters"],
            "in_turns": resident,
            "summary": summary,
            "problems": check_norms(summary, first),
            "runs": runs,
        }

    def step(self) -> dict[str, Any]:
        return self.steps(STEP, self.ranks, self.options("953m"), self.memory >= RESIDENT_GIB * len(STEP))

    def scaling(self) -> dict[str, Any]:
        """Fewer ranks one after the other; all of them only where `step` has not measured that."""
        worlds = [2**i for i in range(7) if 2**i < self.ranks]
        done = self.results.get("step")
        if done is None:
            worlds.append(self.ranks)
        groups: dict[tuple[int, str], Group] = {}
        times: dict[str, dict[str, float]] = {str(world): {} for world in worlds}
        try:
            for world in worlds:
                for variant in SCALED:
                    groups[world, variant] = self.group(
                        "gpu_step_rank.py", [variant, *self.options("953m")], world
                    )
            for (world, variant), group in groups.items():
                group.ask("build", 180)
                times[str(world)][variant] = one_run(group, self.args.steps)["ms"]
                group.end()
        finally:
            for group in groups.values():
                group.kill()
        if done is not None:
            times[str(self.ranks)] = {name: done["summary"][name]["step_ms"] for name in SCALED}
        return {"step_ms": times}

    def large(self) -> dict[str, Any]:
        layers = 2 if self.args.quick else large_layers(self.memory)
        found = self.steps(LARGE, self.ranks, self.options("7b", layers), False)
        return {**found, "layers": layers}


def large_layers(memory_gib: float) -> int:
    """A layer of the 7B shape takes 1.6 GiB with whole gradients and activations, the rest 8 GiB."""
    return max(2, min(32, int((memory_gib - 8) / 1.6)))


def join_collectives(ranks: list[dict[str, Any]], world: int) -> dict[str, Any]:
    """Per way the median over rounds of the slowest rank, and what it means on the bus."""
    first = ranks[0]
    rounds = {
        name: [max(values) for values in zip(*(rank["ms"][name] for rank in ranks), strict=True)]
        for name in first["ms"]
    }
    bus = first["arena_bytes"] * (world - 1) / world / 1e6
    wide = rounds.get("nccl reduce_scatter fp32")
    of_nccl = {
        name: median(b / a for a, b in zip(rounds[f"manager {name}"], rounds[f"nccl {name}"], strict=True))
        for name in ("reduce_scatter", "all_to_all")
    }
    return {
        "arena_bytes": first["arena_bytes"],
        "transport": first["transport"],
        "ms": {name: median(values) for name, values in rounds.items()},
        "bus_gb_per_s": {
            name: (2 if name.endswith("fp32") else 1) * bus / median(values)
            for name, values in rounds.items()
        },
        "of_nccl": of_nccl,
        "of_fp32_reduce_scatter": wide
        and median(a / b for a, b in zip(rounds["manager all_to_all"], wide, strict=True)),
        "memory": first["memory"],
        "host_behind": sum(rank["host_behind"] for rank in ranks),
    }


def show_collectives(part: dict[str, Any]) -> str:
    rows = [["blocks", "MB", "collective", "manager us", "NCCL us", "bus GB/s", "of NCCL", "of fp32 RS"]]
    for case, row in part["cases"].items():
        for name in ("reduce_scatter", "all_to_all"):
            ours, theirs = row["ms"][f"manager {name}"], row["ms"][f"nccl {name}"]
            wide = row["of_fp32_reduce_scatter"] if name == "all_to_all" else None
            rows.append(
                [
                    case,
                    f"{row['arena_bytes'] / 1e6:.0f}",
                    name,
                    f"{1e3 * ours:.1f}",
                    f"{1e3 * theirs:.1f}",
                    f"{row['bus_gb_per_s'][f'manager {name}']:.1f}",
                    short(row["of_nccl"][name]),
                    short(wide),
                ]
            )
    return table(rows)


def show_scaling(part: dict[str, Any]) -> str:
    worlds = list(part["step_ms"])
    rows = [["step ms (efficiency)", *(f"{world} ranks" for world in worlds)]]
    for variant, alone in part["step_ms"][worlds[0]].items():
        times = [part["step_ms"][world][variant] for world in worlds]
        rows.append([variant, *(f"{time:.1f} ({alone / time:.3f})" for time in times)])
    return table(rows)


def show(results: dict[str, Any]) -> str:
    parts = []
    if "collectives" in results:
        parts.append(show_collectives(results["collectives"]))
    for name in ("step", "large"):
        if name in results:
            part = results[name]
            over = [[variant, f"{row['over_plain_ms']:.2f}"] for variant, row in part["summary"].items()]
            title = f"{part['parameters'] / 1e6:.0f}M parameters, {part['world']} ranks"
            parts.append(f"{title}\n{show_steps(part['summary'])}")
            parts.append(table([["exposed communication", "ms"], *over[1:]]))
    if "scaling" in results:
        parts.append(show_scaling(results["scaling"]))
    return "\n\n".join(parts)


def best(summary: dict[str, dict[str, Any]], names: tuple[str, ...], key: str) -> float:
    return float(min(summary[name][key] for name in names if name in summary))


def targets(results: dict[str, Any]) -> list[Target]:
    found = []
    for case, row in results.get("collectives", {}).get("cases", {}).items():
        for name, share in row["of_nccl"].items():
            found.append(Target(f"{case} {name}: bandwidth / NCCL", share, 0.95, at_least=True))
        if row["of_fp32_reduce_scatter"]:
            found.append(
                Target(
                    f"{case} all_to_all: time / NCCL fp32 reduce_scatter", row["of_fp32_reduce_scatter"], 0.9
                )
            )
        for name, (held, planned) in row["memory"].items():
            found.append(Target(f"{case} {name}: bytes held / plan", held / planned, 1.0))
    for part in ("step", "large"):
        if part not in results:
            continue
        summary = results[part]["summary"]
        size = "953M" if part == "step" else "7B shape"
        peer = best(summary, SHARDED, "over_plain_ms")
        if peer > 0:
            ours = best(summary, OWN_SHARDED, "over_plain_ms")
            found.append(Target(f"{size}: exposed communication / FSDP2", ours / peer, 0.5))
        ours, peer = best(summary, FULL[1:], "step_ms"), best(summary, FULL[:1], "step_ms")
        found.append(Target(f"{size}, whole gradients: step / DDP", ours / peer, 1.0))
        ours, peer = best(summary, OWN_SHARDED, "step_ms"), best(summary, SHARDED, "step_ms")
        found.append(Target(f"{size}, sharded: step / best FSDP2", ours / peer, 1.0))
        for name, row in summary.items():
            if row["planned_bytes"]:
                share = row["manager_bytes"] / row["planned_bytes"]
                found.append(Target(f"{size} {name}: bytes held / plan", share, 1.0))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--ranks", type=int, default=0, help="one a GPU by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of a variant and round")
    parser.add_argument("--limit", type=float, default=330, help="seconds for everything")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models: a check of this script, no measurement"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_multi.json")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    run = Run(args)
    if run.ranks < 2:
        parser.error(f"needs 2 ranks or more, and there are {run.gpus} GPUs; --ranks N puts several on one")
    for spec in ("gpu_blocks.yaml", "step_model_gpu.yaml"):
        prebuild(args.device, HERE / spec)
    results = run.results
    results |= {
        "command": command_line("python benchmarks/gpu_multi.py"),
        "driver": driver(),
        "gpus": run.gpus,
        "ranks": run.ranks,
        "left_out": [],
    }
    failed = 0
    for part in args.parts or PARTS:
        if run.left() < PARTS[part] and not args.quick:
            results["left_out"].append(part)
            print(f"{part}: left out, {run.left():.0f} s are left of {args.limit:.0f}", file=sys.stderr)
            continue
        begun = time.monotonic()
        try:
            results[part] = getattr(run, part)()
        except RuntimeError as error:  # one part that fails must not take the others with it
            failed += 1
            print(f"{part} FAILED: {error}", file=sys.stderr)
            continue
        results[part]["seconds"] = time.monotonic() - begun
        failed += len(results[part].get("problems", ()))
        results["targets"] = targets_json(targets(results))
        write(args.out, results)
    print(show(results))
    if args.quick or args.device == "cpu":
        print("a check of this script: no measurement")
    else:
        print("\n".join(target.line() for target in targets(results)))
    for part in ("step", "large"):
        for text in results.get(part, {}).get("problems", ()):
            print(f"WRONG   {part}: {text}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
