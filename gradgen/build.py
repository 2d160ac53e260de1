"""Compiles: the runtime once a toolchain, a model once a text. What is in the cache is not compiled again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradgen import failure, keys, manifest, paths
from gradgen.cache import Entry, publish, workspace
from gradgen.compilers import Finished, default_jobs, ending_cleanly, run_all
from gradgen.diagnostics import BuildError
from gradgen.lock import locked
from gradgen.notes import note
from gradgen.recipes import Recipe, Sources, model_recipe, runtime_recipe
from gradgen.runtime_files import runtime_sources
from gradgen.toolchain import Toolchain

Log = Callable[[str], None]


@dataclass(frozen=True)
class RuntimeArtifact:
    """The compiled runtime. `path` is its shared object."""

    key: str
    path: Path
    build: manifest.Build


@dataclass(frozen=True)
class ModelArtifact:
    """A compiled model. `dir` is a package folder: text, the model's binary and its runtime's."""

    model: str
    key: str
    dir: Path
    build: manifest.Build


@dataclass(frozen=True)
class _How:
    jobs: int
    retry: bool
    log: Log


def build_runtime(
    toolchain: Toolchain, log: Log = note, *, jobs: int | None = None, retry: bool = False
) -> RuntimeArtifact:
    """The runtime's extension module. `retry` compiles again what is known to fail. Raises BuildError."""
    return _runtime(runtime_sources(toolchain.device), toolchain, _How(jobs or default_jobs(), retry, log))


def build_model(
    files: Mapping[str, str],
    model: str,
    toolchain: Toolchain,
    jobs: int | None = None,
    log: Log = note,
    *,
    retry: bool = False,
) -> ModelArtifact:
    """A model's package from its rendered text, `{file name: text}`.

    `retry` compiles again what is known to fail. Raises BuildError.
    """
    started = time.monotonic()
    how = _How(jobs or default_jobs(), retry, log)
    sources = runtime_sources(toolchain.device)
    runtime_key = keys.runtime_key(sources, toolchain)
    entry = Entry(paths.cache_dir(), model, keys.model_key(files, model, runtime_key))
    build = entry.find()
    if build is not None:
        log(_line(entry, toolchain, f"cached, {(time.monotonic() - started) * 1e3:.0f} ms"))
    else:
        runtime = _runtime(sources, toolchain, how)
        build = _obtain(model_recipe(entry, files, sources, runtime.path, runtime_key, toolchain), how)
    return ModelArtifact(model, entry.key, entry.path, build)


def _runtime(sources: Sources, toolchain: Toolchain, how: _How) -> RuntimeArtifact:
    entry = Entry(paths.cache_dir(), "", keys.runtime_key(sources, toolchain))
    build = entry.find() or _obtain(runtime_recipe(entry, sources, toolchain), how)
    return RuntimeArtifact(entry.key, entry.path / f"{entry.name}.so", build)


def _obtain(recipe: Recipe, how: _How) -> manifest.Build:
    """Compiles an entry that is not there, once: who comes second waits and finds it."""
    entry, started = recipe.entry, time.monotonic()
    with locked(entry.lock, entry.path.exists, lambda text: how.log(f"gradgen: {entry.label}: {text}")):
        build = entry.find()
        if build is not None:
            how.log(_line(entry, recipe.toolchain, f"waited, {time.monotonic() - started:.1f} s"))
            return build
        known = None if how.retry else failure.recall(entry)
        if known is not None:
            raise known
        with ending_cleanly():
            return _compile(recipe, how)


def _compile(recipe: Recipe, how: _How) -> manifest.Build:
    entry, started = recipe.entry, time.monotonic()
    finished: list[Finished] = []

    def say(state: str, *more: str) -> None:
        text = f"{state}, {time.monotonic() - started:.1f} s"
        how.log("; ".join((_line(entry, recipe.toolchain, text, finished), *more)))

    place: Path = entry.root
    try:
        with workspace(entry.root) as place:
            recipe.prepare(place)
            for commands in (recipe.units, (recipe.link,)):
                finished += run_all(commands, place, how.jobs)
                if finished[-1].code != 0:
                    error = failure.compile_error(entry, finished[-1], place)
                    failure.keep(entry, place, finished, error)
                    say("failed", f"log and sources: {entry.failed}")
                    raise error
            build = recipe.finish(place)
            publish(place, entry)
    except OSError as error:
        if isinstance(error, BuildError):
            raise
        where = error.filename2 or error.filename or place
        cure = "free some space, or set GRADGEN_CACHE to a folder elsewhere"
        raise BuildError(f"building {entry.label} failed: {where}: {error.strerror}; {cure}") from error
    say("compiled")
    shutil.rmtree(entry.failed, ignore_errors=True)
    return build


def _line(entry: Entry, toolchain: Toolchain, state: str, finished: Sequence[Finished] = ()) -> str:
    """`gradgen: llama 3f2a1b7c cpu: manager.cpp 0.1 s, module.cpp 6.4 s (compiled, 6.6 s)`"""
    units = [done for done in finished if not done.command.name.endswith(".so")]
    shown = sorted(units, key=lambda done: done.command.name)
    if len(units) > 3:
        shown = [max(units, key=lambda done: done.seconds)]
    times = ", ".join(f"{done.command.name} {done.seconds:.1f} s" for done in shown)
    if len(units) > 3:
        times = f"{len(units)} files, the slowest {times}"
    return f"gradgen: {entry.label} {toolchain.target}: {times + ' ' if times else ''}({state})"
