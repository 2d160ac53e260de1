"""The C++ tests of the CPU kernels, built for each instruction set that this machine has."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "gradgen" / "runtime"
SHARED = ("dtype", "tensor")  # no vector code: compiled once, as the test programs are
KERNELS = ("kernels", "kernels_f32", "kernels_f64", "kernels_bf16", "kernels_f16")
PROGRAMS = ("test_kernels", "test_rounding", "test_tensor")
CXX = os.environ.get("CXX", "g++")

# name -> (flags, the CPU features that running it needs, the name that kernel_isa() must report)
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
Build = tuple[tuple[str, ...], tuple[str, ...], "str | None"]
X86: dict[str, Build] = {
    "avx512": (("-mavx2", "-mfma", *(f"-m{name}" for name in AVX512)), AVX512, "avx512"),
    "avx2": (("-mavx2", "-mfma"), ("avx2", "fma"), "avx2"),
    "avx2-f16c": (("-mavx2", "-mfma", "-mf16c"), ("avx2", "fma", "f16c"), "avx2"),
    "generic": (("-mno-avx",), (), "generic"),
}
OTHER: dict[str, Build] = {"native": ((), (), None)}
BUILDS = X86 if platform.machine() in ("x86_64", "AMD64") else OTHER

pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason=f"no C++ compiler {CXX!r}")


def cpu_features() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = [line.split(":", 1)[1] for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return set(lines[0].split()) if lines else set()


def compile_one(arguments: list[str], output: Path) -> None:
    """Runs the compiler unless `output` is there; renames, so that parallel sessions can share the folder."""
    if output.exists():
        return
    aside = output.with_name(f"{output.name}.{os.getpid()}")
    command = [CXX, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", *arguments, "-o", str(aside)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    aside.rename(output)


def build(name: str) -> dict[str, Path]:
    """The test programs of one build, in a temporary folder that is named by what goes into them."""
    flags = BUILDS[name][0]
    sources = {unit: RUNTIME / "src" / f"{unit}.cpp" for unit in SHARED + KERNELS}
    sources |= {program: ROOT / "tests" / "cpp" / f"{program}.cpp" for program in PROGRAMS}
    headers = [
        *RUNTIME.glob("include/gradgen/*.h"),
        *RUNTIME.glob("src/*.h"),
        *(ROOT / "tests" / "cpp").glob("*.h"),
    ]
    version = subprocess.run([CXX, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(repr((str(ROOT), version, BUILDS)).encode())
    for path in sorted([*headers, *sources.values()]):
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = Path(tempfile.gettempdir()) / f"gradgen-test-kernels-{os.getuid()}" / key.hexdigest()[:20]
    folder.mkdir(parents=True, exist_ok=True)

    def compile_unit(unit: str) -> Path:
        special = unit in KERNELS
        output = folder / (f"{unit}.{name}.o" if special else f"{unit}.o")
        arguments = [*(flags if special else ()), "-I", str(RUNTIME / "include"), "-c", str(sources[unit])]
        compile_one(arguments, output)
        return output

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(zip(sources, pool.map(compile_unit, sources), strict=True))
    library = [str(objects[unit]) for unit in SHARED + KERNELS]
    programs = {program: folder / f"{program}.{name}" for program in PROGRAMS}
    for program, output in programs.items():
        compile_one([str(objects[program]), *library], output)
    return programs


class Builds:
    """Builds and runs on first use, once a session."""

    def __init__(self) -> None:
        self.programs: dict[str, dict[str, Path]] = {}
        self.outputs: dict[tuple[str, str], subprocess.CompletedProcess[str]] = {}

    def run(self, name: str, program: str) -> subprocess.CompletedProcess[str]:
        missing = set(BUILDS[name][1]) - cpu_features()
        if missing:
            pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
        if name not in self.programs:
            self.programs[name] = build(name)
        key = (name, program)
        if key not in self.outputs:
            self.outputs[key] = subprocess.run(
                [str(self.programs[name][program])], capture_output=True, text=True, timeout=300
            )
        return self.outputs[key]


@pytest.fixture(scope="session")
def builds() -> Builds:
    return Builds()


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(builds: Builds, name: str, program: str) -> None:
    done = builds.run(name, program)
    failures = "\n".join(line for line in done.stdout.splitlines() if line.startswith("FAIL"))
    assert done.returncode == 0, (
        f"{program} built for {name} exits with {done.returncode}\n{failures}\n{done.stderr}"
    )


@pytest.mark.parametrize("name", BUILDS)
def test_reports_the_instruction_set(builds: Builds, name: str) -> None:
    expected = BUILDS[name][2]
    if expected is None:
        pytest.skip("the name depends on the machine")
    assert builds.run(name, "test_kernels").stderr.strip() == f"isa {expected}"


@pytest.mark.parametrize("name", [name for name in BUILDS if name != "generic"])
def test_same_bits_as_generic(builds: Builds, name: str) -> None:
    """Every case prints a digest of its result; they must not depend on the width of the vectors."""
    if "generic" not in BUILDS:
        pytest.skip("one build only")
    wanted = builds.run("generic", "test_kernels").stdout.splitlines()
    got = builds.run(name, "test_kernels").stdout.splitlines()
    assert len(wanted) > 500
    different = [f"{a}   {name}: {b}" for a, b in zip(wanted, got, strict=True) if a != b]
    assert not different, "\n".join(different[:20])
