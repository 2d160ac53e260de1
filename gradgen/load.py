"""`gradgen.load`: from a spec to an imported module in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from gradgen import paths
from gradgen.build import Log, ModelArtifact, build_model
from gradgen.cache import hold
from gradgen.diagnostics import CacheError, UsageError
from gradgen.importer import load_package
from gradgen.notes import note
from gradgen.toolchain import find_toolchain

ATTEMPTS = 3


def load(
    spec: str | os.PathLike[str],
    device: str = "cpu",
    arch: str | Sequence[str] | None = None,
    *,
    jobs: int | None = None,
    log: Log = note,
) -> ModuleType:
    """The module of a spec, compiled if it is not in the cache yet. The same spec twice is the same module.

    `spec` is a file, or the name of a spec that comes with gradgen, such as "llama". `device` is "cpu", "cuda"
    (its managers run on either) or "auto"; `arch` names the GPUs to compile for, such as "sm_80,sm_90" (None:
    those of this machine). Compiling takes some seconds and happens once however many processes ask; `log` gets
    a line about it. Raises SpecError, BuildError or UsageError; ToolchainMissing, a BuildError, where a compiler
    or GPU is missing.
    """
    from gradgen.render import render
    from gradgen.resolve import check

    model = check(find_spec(spec))
    files = render(model)
    toolchain = find_toolchain(device, arch)
    for attempt in range(1, ATTEMPTS + 1):
        artifact = build_model(files, model.name, toolchain, jobs, log)
        try:
            return import_artifact(artifact)
        except (CacheError, FileNotFoundError):
            if attempt == ATTEMPTS or artifact.dir.exists():
                raise  # else someone cleaned the cache between the check and the import
    raise AssertionError


def import_artifact(artifact: ModelArtifact) -> ModuleType:
    """The module name holds the key, so two versions of a spec live side by side."""
    hold(artifact.dir)
    return load_package(artifact.dir, f"gradgen_model_{artifact.build.module}", verified=True)


def find_spec(spec: str | os.PathLike[str]) -> str:
    """The path of a spec file, or of a shipped spec by its name."""
    text = os.fspath(spec)
    if not isinstance(text, str):
        raise UsageError(f"a spec is a path or a name, not {type(spec).__name__}")
    shipped = paths.specs_dir() / f"{text}.yaml"
    if not os.path.lexists(text) and "/" not in text and "." not in text:
        if shipped.is_file():
            return str(shipped)
        names = ", ".join(sorted(path.stem for path in Path(paths.specs_dir()).glob("*.yaml")))
        raise UsageError(f"no file and no shipped spec {text!r}; there are: {names}")
    return text
