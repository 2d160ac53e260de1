"""Every CUDA source compiles without warnings for sm_80 and sm_90; where there is a GPU, the kernels match the CPU's bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

RUNTIME = ROOT / "gradgen" / "runtime"
SOURCES = sorted((RUNTIME / "cuda").glob("*.cu"))
TARGETS = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is missing")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles_for_ampere_and_hopper(source: Path, tmp_path: Path) -> None:
    command = ["nvcc", "-std=c++20", "-fmad=false", "-Xptxas=-O1", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra"]
    result = subprocess.run(
        [*command, *TARGETS, f"-I{RUNTIME / 'include'}", "-c", str(source), "-o", str(tmp_path / "out.o")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_the_generic_runtime_and_the_public_headers_are_free_of_cuda() -> None:
    """The core builds without the toolkit, and who calls the kernels needs none of its headers."""
    for path in [*(RUNTIME / "src").iterdir(), *(RUNTIME / "include").rglob("*.h")]:
        text = path.read_text()
        assert "#include <cuda" not in text, path
        if path.parent.name == "src":
            assert "__global__" not in text, path


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_on_the_gpu(tmp_path: Path) -> None:
    result = subprocess.run(
        [ROOT / "tests" / "gpu" / "run.sh"], capture_output=True, text=True, env={**os.environ, "OUT": str(tmp_path)}
    )
    assert result.returncode == 0, result.stdout + result.stderr
