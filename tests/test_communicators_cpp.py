"""The C++ communicators: compiled from the runtime's sources, then run as threads and as forked processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "gradgen" / "runtime"
CORE = ("arena", "communicator", "single", "threads", "process", "shared", "shared_world", "transaction")
TESTS = (
    "test_communicators",
    "comm_exchange_tests",
    "comm_transaction_tests",
    "comm_failure_tests",
    "comm_place_tests",
    "comm_benchmark",
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


SOURCE = RUNTIME / "src"


def compile_all(folder: Path, files: list[Path], *flags: str) -> list[Path]:
    """Compiles `files`, as many at a time as there are cores, and returns the objects."""
    folder.mkdir(exist_ok=True)
    common = ["g++", "-std=c++20", "-g1", f"-I{RUNTIME / 'include'}", *flags]

    def compile_one(file: Path) -> Path:
        target = folder / f"{file.stem}.o"
        subprocess.run([*common, "-c", str(file), "-o", str(target)], check=True, timeout=300)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, files))


def build(folder: Path, kernels: list[Path], *flags: str) -> Path:
    """Compiles communicators and tests with `flags`, links `kernels`, and returns the program."""
    files = [SOURCE / f"{name}.cpp" for name in CORE] + sorted(SOURCE.glob("host_*.cpp"))
    files += [ROOT / "tests" / "cpp" / f"{name}.cpp" for name in TESTS]
    objects = [*compile_all(folder, files, *flags), *kernels]
    program = folder / "test_communicators"
    command = ["g++", *flags, *map(str, objects), "-o", str(program), "-lpthread"]
    subprocess.run(command, check=True, timeout=120)
    return program


def run(program: Path, mode: str) -> None:
    done = subprocess.run([str(program), mode], capture_output=True, text=True, timeout=240)
    bad = [line for line in done.stdout.splitlines() if ": ok (" not in line]
    assert done.returncode == 0, "\n".join([*bad, done.stderr])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    files = [SOURCE / "dtype.cpp", SOURCE / "tensor.cpp", *sorted(SOURCE.glob("kernels*.cpp"))]
    return compile_all(tmp_path_factory.mktemp("kernels"), files, "-O1")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, kernels: list[Path]) -> Path:
    return build(tmp_path_factory.mktemp("communicators"), kernels, "-O1")


@pytest.mark.parametrize("mode", ["single", "threads", "processes"])
def test_communicators(program: Path, mode: str) -> None:
    run(program, mode)


def test_threads_have_no_data_race(tmp_path: Path, kernels: list[Path]) -> None:
    """No payload and no slot is touched out of turn: ThreadSanitizer ends the program with 66 if one is."""
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    command = ["g++", "-fsanitize=thread", str(probe), "-o", str(tmp_path / "probe")]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this g++ has no ThreadSanitizer")
    if subprocess.run([str(tmp_path / "probe")], capture_output=True).returncode != 0:
        pytest.skip("ThreadSanitizer does not run here (address layout)")
    run(build(tmp_path, kernels, "-O1", "-fsanitize=thread"), "threads")
