"""Builds and runs benchmarks/kernels.cpp: CPU kernels against memcpy, one thread, side by side in one run.

    python benchmarks/kernels.py                      # -march=native, 64 MiB buffers
    python benchmarks/kernels.py --isa native --isa avx2 --mib 64 --rounds 11

Prints a table of (bytes read plus written) per second, absolute and relative to memcpy's, and writes it to
benchmarks/results/kernels.json. Times are medians of thread CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "gradgen" / "runtime"
FLAGS = {
    "native": ["-march=native"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "generic": ["-mno-avx"] if platform.machine() == "x86_64" else [],
}
# The least ratio to memcpy that each kernel is meant to reach, by the instruction set that it was built for.
TARGETS = {
    "fp32 += fp32": {"avx512": 1.4, "avx2": 1.4},
    "fp32 += bf16": {"avx512": 1.4, "avx2": 1.4},
    "bf16 += bf16": {"avx512": 1.4, "avx2": 1.4},
    "bf16 += bf16 stochastic": {"avx512": 0.75, "avx2": 0.6},
}


def build(isa: str, folder: Path) -> Path:
    program = folder / f"kernels-{isa}"
    sources = [RUNTIME / "src" / "dtype.cpp", *sorted((RUNTIME / "src").glob("kernels*.cpp"))]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", *FLAGS[isa], "-I", str(RUNTIME / "include")]
    command += [str(ROOT / "benchmarks" / "kernels.cpp"), *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(program: Path, mib: int, rounds: int) -> dict[str, Any]:
    done = subprocess.run(
        [str(program), str(mib * 1024), str(rounds)], check=True, capture_output=True, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    copy = result["cases"][0]
    for case in result["cases"]:
        case["gb_per_s"] = case["traffic"] / case["median"] / 1e9
        case["of_memcpy"] = case["gb_per_s"] / (copy["traffic"] / copy["median"] / 1e9)
        case["target"] = TARGETS.get(case["name"], {}).get(result["isa"])
    return result


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def print_table(result: dict[str, Any]) -> None:
    print(f"\n{result['isa']}, {result['bytes'] >> 20} MiB buffers")
    print(f"{'kernel':36} {'ms':>8} {'GB/s':>7} {'of memcpy':>10}  target")
    for case in result["cases"]:
        target = "" if case["target"] is None else f"{case['target']:.2f}"
        note = "" if case["target"] is None or case["of_memcpy"] >= case["target"] else "  missed"
        times = f"{case['median'] * 1e3:8.2f} {case['gb_per_s']:7.1f} {case['of_memcpy']:10.2f}"
        print(f"{case['name']:36} {times}  {target}{note}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--isa", action="append", choices=sorted(FLAGS), help="builds to run (default: native)"
    )
    parser.add_argument("--mib", type=int, default=64, help="size of each of the nine buffers (default: 64)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernels.json")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for isa in arguments.isa or ["native"]:
            results.append(run(build(isa, Path(folder)), arguments.mib, arguments.rounds))
            print_table(results[-1])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    text = json.dumps({"cpu": cpu_name(), "load": load, "runs": results}, indent=1)
    arguments.out.write_text(text + "\n")
    print(f"\nwritten to {arguments.out}; load average {load:.1f}")


if __name__ == "__main__":
    main()
