"""The CUDA build: every source compiles without warnings for sm_80 and sm_90, the package imports without a GPU, and
on a GPU the kernels give the CPU's bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from build_support import Workshop

from gradgen import manifest
from gradgen.build import build_runtime
from gradgen.cuda_toolchain import find_nvcc
from gradgen.package import build
from gradgen.toolchain import ToolchainMissing, find_toolchain, python_tag
from tests.conftest import ROOT

RUNTIME = ROOT / "gradgen" / "runtime"
ARCH = "sm_80,sm_90"
# One build for all tests here, kept in the tests' cache; -O1 halves the time that ptxas takes.
STRICT = "-Xptxas=-O1 -Werror=all-warnings -Xcompiler=-Wall,-Wextra"


def nvcc_is_missing() -> bool:
    try:
        find_nvcc()
    except ToolchainMissing:
        return True
    return False


needs_nvcc = pytest.mark.skipif(nvcc_is_missing(), reason="nvcc 12 or newer is missing")


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADGEN_NVCCFLAGS", STRICT)


@pytest.mark.slow
@needs_nvcc
def test_compiles_for_ampere_and_hopper(strict: None) -> None:
    runtime = build_runtime(find_toolchain("cuda", ARCH))
    assert (runtime.build.device, runtime.build.arch) == ("cuda", ARCH)
    binary = runtime.path.read_bytes()
    # Static cudart, and inside: torch brings a libcudart of its own.
    needed = subprocess.run(["ldd", str(runtime.path)], capture_output=True, text=True).stdout
    assert "libcudart" not in needed and "libcuda.so" not in needed
    assert b"tmpxft_" not in binary and str(ROOT).encode() not in binary


USE = """\
import sys, numpy as np
from generated import llama
config = llama.Config(vocab=32, hidden=8, layers=1, heads=2, ffn=16)
grads = llama.GradientManager(config)
with grads.micro_step(0, 1):
    for weight in grads.weights():
        if weight.block is None:
            np.asarray(grads.non_block_full(weight.id))[...] = 2
            grads.notify_non_block(weight.id)
    block = grads.block_full(0)
    for name in block:
        np.asarray(block[name])[...] = 3
    grads.notify_block(0)
gradients = {name: np.asarray(value) for name, value in grads.named_gradients().items()}
print(sorted({float(value.max()) for value in gradients.values()}))
"""


@pytest.mark.slow
@needs_nvcc
def test_a_package_for_cuda_imports_and_serves_the_cpu(strict: None, tmp_path: Path) -> None:
    """Also on a machine without a driver: libcuda is looked for only when a GPU is used."""
    package = build(ROOT / "specs" / "llama.yaml", tmp_path / "generated", device="cuda", arch=ARCH)
    assert manifest.read(package.dir)[python_tag()].device == "cuda"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "[2.0, 3.0]\n", done.stderr


KERNEL = """\
#include "gradgen/fake.h"
namespace { __global__ void fill(int* out) { *out = 1; } }
int launch(int* out) { fill<<<1, 1>>>(out); return cudaGetLastError(); }
"""


@pytest.mark.slow
@needs_nvcc
def test_same_bytes_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc names what it makes after the folder and its process id, unless told otherwise."""
    shop = Workshop(tmp_path, monkeypatch)
    (shop.runtime / "cuda").mkdir()
    (shop.runtime / "cuda/one.cu").write_text(KERNEL)
    builds = []
    for name in ("one", "another place"):
        monkeypatch.setenv("GRADGEN_CACHE", str(shop.folder / name))
        builds.append(build_runtime(find_toolchain("cuda", "sm_80"), shop.notes.append).build)
    assert builds[0] == builds[1]


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
