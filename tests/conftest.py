"""What all tests share: a cache that outlives a run, a GPU check, and the command line as a process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "gradgen-tests"

# Before anything imports gradgen. The user's own cache is never touched; a second run compiles nothing again.
CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
CACHE.chmod(0o700)
os.environ["GRADGEN_CACHE"] = str(CACHE)
for variable in ("NO_COLOR", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
    os.environ.pop(variable, None)

TINY = """\
gradgen: 1
model: tiny
summary: The smallest model that has everything
dims:
  hidden: {hf: hidden_size}
  layers: {hf: num_hidden_layers}
  ffn:    {hf: intermediate_size, default: 4 * hidden}
flags:
  bias: {default: false}
presets:
  small: {hidden: 64, layers: 2}
weights:
  embedding: {shape: [100, hidden], name: embed.weight, zero: always}
  head:      {shape: [100, hidden], name: head.weight, zero: never}
blocks:
  layer:
    count: layers
    name: layers.{i}
    weights:
      norm:    {shape: [hidden], name: norm.weight, zero: always}
      up:      {shape: [ffn, hidden], name: up.weight, zero: never}
      up_bias: {shape: [ffn], name: up.bias, zero: always, when: bias}
backward: [head, {block: layer}, embedding]
strategies:
  unsharded: {blocks: full, collective: reduce_scatter}
  sharded:   {blocks: sharded, collective: reduce_scatter}
"""


@cache
def gpus() -> int:
    """CUDA devices that the driver shows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (gpus() == 0 or shutil.which("nvcc") is None):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and nvcc"))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A clean spec in a folder of the test's own."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Run:
    """`cli("check", spec)` runs the command line as a process in the test's folder."""

    def run(*arguments: str | Path, env: dict[str, str] | None = None, **options: Any) -> Any:
        return subprocess.run(
            [sys.executable, "-m", "gradgen", *map(str, arguments)],
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "encoding": "utf-8",
                "cwd": tmp_path,
                "timeout": 300,
                **options,
            },
            env={**os.environ, **(env or {})},
        )

    return run
