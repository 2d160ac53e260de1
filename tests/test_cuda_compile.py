"""Every CUDA source compiles without warnings for sm_80 and sm_90; on a GPU the kernels give the CPU's bits."""

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
    flags = ["-std=c++20", "-fmad=false", "-Xptxas=-O1", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra"]
    files = [f"-I{RUNTIME / 'include'}", "-c", str(source), "-o", str(tmp_path / "out.o")]
    result = subprocess.run(
        ["nvcc", *flags, *TARGETS, *files],
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
    script = ROOT / "tests" / "gpu" / "run.sh"
    result = subprocess.run(
        [script], capture_output=True, text=True, env={**os.environ, "OUT": str(tmp_path)}
    )
    assert result.returncode == 0, result.stdout + result.stderr
