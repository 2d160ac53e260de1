"""What a model of 671 billion parameters costs the compiler: DeepSeek-V3 with one weight an expert, more than 45,000 of them.

    python benchmarks/architectures_plan.py

Commands run in fresh processes. `MiB` is the largest resident size of any of them. Text and compile times stand beside
those of Llama: a generated model is proportional to its kinds of blocks, not to layers or experts. `cpu` is the time of
all processors together, which a busy machine changes little. Results go to benchmarks/results/architectures_plan.json.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "architectures_plan.json"
SPEC, PRESET = "specs/deepseek_v3.yaml", "deepseek-v3-separate"
GRADGEN = [sys.executable, "-m", "gradgen"]
SECONDS, MEBIBYTES, WEIGHTS = 3.0, 500.0, 40_000


def run(command: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """Seconds, seconds of all processors, and what it printed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return (
        seconds,
        after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
        done.stdout,
    )


def planning(environment: dict[str, str]) -> dict[str, Any]:
    check = run([*GRADGEN, "check", SPEC], environment)
    plan = run([*GRADGEN, "plan", SPEC, "--preset", PRESET, "--dp", "64", "--json"], environment)
    mebibytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    arenas = json.loads(plan[2])["arenas"]
    weights = sum(arena["count"] * len(arena["slots"]) for arena in arenas)
    elements = sum(arena["count"] * slot["numel"] for arena in arenas for slot in arena["slots"])
    return {
        "check": check[0],
        "plan": plan[0],
        "mebibytes": mebibytes,
        "weights": weights,
        "elements": elements,
    }


def building(environment: dict[str, str], out: str) -> dict[str, dict[str, float]]:
    """Lines of generated C++ and processor seconds of compiling it; the runtime is built before, with GPT-2."""
    run([*GRADGEN, "build", "specs/gpt2.yaml", "-o", out], environment)
    rows = {}
    for model in ("llama", "deepseek_v3"):
        _, cpu, _ = run([*GRADGEN, "build", f"specs/{model}.yaml", "-o", out], environment)
        sources = [path for path in Path(out, model).iterdir() if path.suffix in (".h", ".cpp")]
        lines = sum(path.read_text(encoding="utf-8").count("\n") for path in sources)
        rows[model] = {"lines": lines, "cpu": cpu}
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GRADGEN_CACHE": f"{folder}/cache", "PYTHONPATH": str(ROOT)}
        plan = planning(environment)
        built = building(environment, f"{folder}/out")
    total = plan["check"] + plan["plan"]
    print(f"{plan['weights']} weights, {plan['elements']} elements")
    print(f"{'check':12} {plan['check']:8.2f} s")
    print(f"{'plan':12} {plan['plan']:8.2f} s")
    print(f"{'together':12} {total:8.2f} s of {SECONDS}, {plan['mebibytes']:.0f} MiB of {MEBIBYTES:.0f}")
    for model, row in built.items():
        print(
            f"{model:12} {row['lines']:8.0f} lines, {row['cpu']:6.1f} s of processors to render and compile"
        )
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "plan": plan, "build": built}, indent=2) + "\n")
    if total > SECONDS or plan["mebibytes"] > MEBIBYTES or plan["weights"] <= WEIGHTS:
        raise SystemExit("over budget")


if __name__ == "__main__":
    main()
