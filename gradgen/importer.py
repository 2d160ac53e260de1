"""Loads built modules: verified first, the runtime before the model, each once a process.

A built package imports this. Nothing here imports yaml, jinja2, jsonschema or torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gradgen import manifest
from gradgen.diagnostics import CacheError

RUNTIME = "gradgen_runtime_"


class UnusableModule(CacheError, ImportError):
    """A built module that cannot be imported here: `except ImportError` catches it, as for any module."""


_lock = threading.RLock()
_verified: set[Path] = set()  # folders of the cache that were verified just now, by their key


def native(package_file: str, model: str, text_hash: str) -> ModuleType:
    """The compiled half of the package that `package_file` (its __init__.py) belongs to.

    Raises UnusableModule, an ImportError, for a binary that is missing, damaged, or made from other text, by
    another gradgen, or for another Python; it says how to build it again.
    """
    folder = Path(package_file).resolve().parent
    again = f"; build it again: {_command(folder, model)}"
    build = _chosen(folder, model, text_hash, again)
    with _lock:
        reason = None if folder in _verified else manifest.problem(folder, build)
        if reason is not None:
            raise UnusableModule(f"{folder}: {reason}{again}")
        _load_runtime(folder, build, again)
        return _load(build.module, folder / f"{build.module}.so", again)


def _command(folder: Path, model: str, device: str = "") -> str:
    """The command line that builds a package: for `device`, else for what it was built for."""
    out = os.path.relpath(folder.parent)
    out = str(folder.parent) if out.startswith("..") else out
    build = _built(folder)
    device = device or (build.device if build and build.device != "cpu" else "")
    arch = f" --arch {build.arch}" if build and build.arch and device == "cuda" else ""
    return f"gradgen build {_spec_of(folder, model)} -o {out}" + (device and f" --device {device}{arch}")


def _built(folder: Path) -> manifest.Build | None:
    """What a folder holds for this Python, as far as it can be read."""
    with contextlib.suppress(CacheError):
        return manifest.read(folder).get(_python_tag())
    return None


def _python_tag() -> str:
    return EXTENSION_SUFFIXES[0].removeprefix(".").removesuffix(".so")


def wrong_device(folder: Path, model: str, device: str) -> str:
    """Why a manager of the package in `folder` cannot be on `device`, and what to do."""
    build = _built(folder)
    if device.split(":")[0] != "cuda":
        return f"device must be 'cpu' or 'cuda', not {device!r}"
    loaded = build is not None and folder.name == build.module  # by gradgen.load, from the cache
    spec = _spec_of(folder, model)
    how = f'gradgen.load("{spec}", device="cuda")' if loaded else _command(folder, model, "cuda")
    return f"{model} is built for the CPU; for device={device!r} build it for CUDA: {how}"


def _spec_of(folder: Path, model: str) -> str:
    """What to name on the command line: the spec's path where it can be seen from here, else the shipped spec."""
    from gradgen.paths import specs_dir

    file = f"{model}.yaml"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        file = str(json.loads((folder / "model.json").read_text(encoding="utf-8"))["file"])
    shipped = specs_dir() / f"{model}.yaml"
    return model if not os.path.exists(file) and shipped.is_file() else file


def _chosen(folder: Path, model: str, text_hash: str, again: str) -> manifest.Build:
    """The build for this Python, if it was made from this text and for this gradgen."""
    try:
        builds = manifest.read(folder)
    except CacheError as error:
        raise UnusableModule(f"{error}{again}") from error
    tag = _python_tag()
    build = builds.get(tag)
    if build is None:
        others = ", ".join(sorted(builds))
        what = f"is built for {others}, and this is {tag}" if others else "is not built"
        raise UnusableModule(f"the module of {model} in {folder} {what}{again}")
    if build.model != model or f"{build.module}.so" not in build.files:
        raise UnusableModule(
            f"{folder / manifest.NAME} is of {build.model or 'the runtime'}, not of {model}{again}"
        )
    if build.text_hash != text_hash:
        raise UnusableModule(
            f"the binary in {folder} is stale: its text has changed since it was built{again}"
        )
    if folder in _verified:
        return build
    from gradgen.runtime_files import runtime_sources, sources_hash

    if build.sources != sources_hash(runtime_sources(build.device)):
        raise UnusableModule(f"the binary in {folder} was built by a gradgen with another runtime{again}")
    return build


def load_package(directory: str | Path, name: str, *, verified: bool = False) -> ModuleType:
    """Imports the package folder `directory` as the module `name`. The same name twice is the same module.

    `verified`: it is a folder of the cache and has just been found to be what its key says.
    """
    folder = Path(directory).resolve()
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        if verified:
            _verified.add(folder)
        file = str(folder / "__init__.py")
        spec = importlib.util.spec_from_file_location(
            name, file, loader=_TextLoader(name, file), submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        finally:
            _verified.discard(folder)
        return module


class _TextLoader(SourceFileLoader):
    """Reads no compiled .pyc: a damaged one would be run unseen."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True)


def runtime_module() -> Any:
    """The runtime of this process:

    the one that a model brought, else the one of this gradgen, built if need be.
    """
    with _lock:
        loaded = _loaded_runtime()
        if loaded is not None:
            return loaded
        from gradgen.build import build_runtime
        from gradgen.cache import hold
        from gradgen.toolchain import find_toolchain

        artifact = build_runtime(find_toolchain())
        hold(artifact.path.parent)
        _load_runtime(artifact.path.parent, artifact.build, "")
        return _loaded_runtime()


def _loaded_runtime() -> ModuleType | None:
    return next((module for name, module in sys.modules.items() if name.startswith(RUNTIME)), None)


def _load_runtime(folder: Path, build: manifest.Build, again: str) -> None:
    """One runtime a process: a second one would bring a second set of the same classes."""
    loaded = _loaded_runtime()
    if loaded is not None and loaded.__name__ != build.runtime_module:
        other = _built(Path(str(loaded.__file__)).parent)
        if other is not None and other.device != build.device:
            raise UnusableModule(
                f"{folder} is built for {build.device}, and this process already uses a runtime that is built for "
                f"{other.device} ({loaded.__file__}): build all modules of a process for one device; what is built "
                "with --device cuda (gradgen.load: device='cuda') runs on the CPU too"
            )
        raise UnusableModule(
            f"the binary in {folder} needs the runtime {build.runtime_key[:8]}, and this process already "
            f"uses another one ({loaded.__file__}): build all modules of a process with one gradgen and one "
            f"compiler{again}"
        )
    _load(build.runtime_module, folder / f"{build.runtime_module}.so", again)


def _load(name: str, path: Path, again: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, str(path), loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loader.exec_module(module)
    except ImportError as error:
        sys.modules.pop(name, None)
        raise UnusableModule(f"{path} cannot be loaded ({error}){again}") from error
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
