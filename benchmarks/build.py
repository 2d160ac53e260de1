"""What building costs: the runtime with a first model, each further model, and commands with nothing to do.

    python benchmarks/build.py

Everything runs through the command line, in fresh processes and with an empty cache. `seconds` are those of a
clock on the wall, `cpu` those of all processors together: on a busy machine only the second says something.
Results go to benchmarks/results/build.json.
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
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "build.json"
FIRST, *FURTHER = ("llama", "gpt2", "qwen3")
HEAVY = ("torch", "jinja2", "yaml", "jsonschema")
IMPORT = f"""
import sys, time
start = time.perf_counter()
import {FIRST}
print((time.perf_counter() - start) * 1e3, *(name for name in {HEAVY} if name in sys.modules))
"""


def children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed(command: list[str], environment: dict[str, str], times: int = 1) -> dict[str, float]:
    """Medians over some runs of a command that must succeed."""
    seconds, cpu = [], []
    for _ in range(times):
        used, start = children(), time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
        cpu.append(children() - used)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return {"seconds": median(seconds), "cpu": median(cpu)}


def measure(folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "GRADGEN_CACHE": str(folder / "cache"), "PYTHONPATH": f"{folder}/out:{ROOT}"}
    gradgen, out = [sys.executable, "-m", "gradgen"], ["-o", f"{folder}/out"]
    rows = []

    def row(name: str, target: float, command: list[str], times: int = 1) -> None:
        rows.append({"what": name, "target": target, **timed(command, environment, times)})

    row(f"runtime and first model ({FIRST})", 25, [*gradgen, "build", f"specs/{FIRST}.yaml", *out])
    for model in FURTHER:
        row(f"a further model ({model})", 8, [*gradgen, "build", f"specs/{model}.yaml", *out])
    row("build, unchanged", 0.5, [*gradgen, "build", f"specs/{FIRST}.yaml", *out], 7)
    row("check", 0.5, [*gradgen, "check", f"specs/{FIRST}.yaml"], 7)
    imports = []
    for _ in range(11):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True
        )
        milliseconds, *heavy = done.stdout.split()
        if heavy:
            raise SystemExit(f"importing {FIRST} imports {', '.join(heavy)}")
        imports.append(float(milliseconds) / 1e3)
    rows.append({"what": f"import {FIRST}", "target": 0.05, "seconds": median(imports), "cpu": min(imports)})
    return rows


def main() -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    print(f"{'':38} {'target':>8} {'seconds':>8} {'cpu':>8}")
    for row in rows:
        print(f"{row['what']:38} {row['target']:8.3f} {row['seconds']:8.3f} {row['cpu']:8.3f}")
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, load {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end")
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"cores": cores, "load": [load, os.getloadavg()[0]], "python": platform.python_version()}
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
