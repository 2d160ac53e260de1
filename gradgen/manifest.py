"""build.json: what lies in a folder of built modules, and whether it is still what was built.

Read before anything is loaded: a truncated shared object loads, answers, and then ends the process with
SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gradgen.diagnostics import CacheError

NAME = "build.json"
FORMAT = 1
ATTEMPTS = 3  # network file systems forget a handle (ESTALE) and find the file again


class Build(NamedTuple):
    """One module, or the runtime (`model` is "" then), built for one Python."""

    model: str
    key: str  # of everything that decides about the binaries
    runtime_key: str
    sources: str  # hash of the runtime's sources
    text_hash: str  # of the model's text
    python: str
    device: str
    files: Mapping[str, str]  # sha256 of every binary
    arch: str = ""  # of the GPUs: sm_80,sm_90

    @property
    def module(self) -> str:
        return module_name(self.model, self.key)

    @property
    def runtime_module(self) -> str:
        return module_name("", self.runtime_key)


def module_name(model: str, key: str) -> str:
    """Holds the key: pybind11 answers a second module of the same name with the first one."""
    return f"{model or 'gradgen_runtime'}_{key[:12]}"


def read(folder: Path) -> dict[str, Build]:
    """The builds of a folder by Python tag; empty without a manifest.

    Raises CacheError for one that is no manifest.
    """
    try:
        text = _read(folder / NAME).decode()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise CacheError(f"{folder / NAME} cannot be read ({error})") from error
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise CacheError(f"{folder / NAME} has format {data['format']}; this gradgen reads {FORMAT}")
        return {tag: _build(fields) for tag, fields in data["builds"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheError(f"{folder / NAME} is not a manifest ({type(error).__name__})") from error


def _build(fields: dict[str, Any]) -> Build:
    build = Build(**fields)
    texts = (
        build.model,
        build.key,
        build.runtime_key,
        build.sources,
        build.text_hash,
        build.python,
        build.device,
        build.arch,
    )
    if not all(isinstance(text, str) for text in (*texts, *build.files, *build.files.values())):
        raise TypeError
    if f"{build.runtime_module}.so" not in build.files or any("/" in name for name in build.files):
        raise ValueError
    return build


def text(builds: Mapping[str, Build]) -> str:
    data = {"format": FORMAT, "builds": {tag: build._asdict() for tag, build in sorted(builds.items())}}
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def problem(folder: Path, build: Build) -> str | None:
    """Why the binaries are not those of the manifest; None if they are."""
    for name, wanted in build.files.items():
        try:
            found = file_hash(folder / name)
        except OSError as error:
            return f"{name} is missing" if error.errno == errno.ENOENT else f"{name}: {error.strerror}"
        if found != wanted:
            return f"{name} is damaged"
    return None


def file_hash(path: Path) -> str:
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    """The bytes of a regular file, with another attempt where a network file system lost it."""
    for attempt in range(ATTEMPTS):
        with contextlib.ExitStack() as stack:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                file = stack.enter_context(open(descriptor, "rb"))
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", str(path))
                return file.read()
            except OSError as error:
                if error.errno != errno.ESTALE or attempt == ATTEMPTS - 1:
                    raise
    raise AssertionError
