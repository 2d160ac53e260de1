"""`gradgen build`: a package folder with its text and its binaries, to commit the one and ship the other.

A running process may have the old binaries mapped, and another one may just be importing. So every file is
written aside and renamed, the manifest comes last, and what it no longer names is removed after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradgen import manifest, paths
from gradgen.build import Log, ModelArtifact, build_model
from gradgen.diagnostics import BuildError, CacheError, UsageError
from gradgen.lock import locked
from gradgen.notes import note
from gradgen.recipes import link_or_copy
from gradgen.toolchain import Toolchain, find_toolchain

BINARY = re.compile(r"(?P<module>\w+)_[0-9a-f]{12}\.so")
ASIDE = re.compile(r"\..+\.\d+\.tmp")


@dataclass(frozen=True)
class Package:
    """A built package: what `from <out> import <model>` finds."""

    model: str
    dir: Path
    key: str
    written: tuple[str, ...]  # names of the files that changed


def build(
    spec: str | os.PathLike[str],
    out: str | os.PathLike[str] = "generated",
    *,
    device: str = "auto",
    arch: str | Sequence[str] | None = None,
    jobs: int | None = None,
    force: bool = False,
    log: Log = note,
) -> Package:
    """Makes the package `<out>/<model>/` of a spec: its text and its binaries for this Python.

    `device` is "cpu", "cuda" (its managers run on either) or "auto": cuda where nvcc and a GPU are present, or
    `arch` is given. `arch` names the GPUs to compile for, such as "sm_80,sm_90"; they need not be present (None:
    those of this machine). A package holds one build a Python: that of the last device.
    `force` builds into a folder that holds other people's files, or that is a symbolic link. Raises
    SpecError, BuildError, or UsageError for a folder that is not gradgen's.
    """
    from gradgen.load import find_spec
    from gradgen.render import render
    from gradgen.resolve import check

    model = check(find_spec(spec))
    toolchain = find_toolchain(device, arch)
    return build_package(render(model), model.name, Path(out), toolchain, jobs=jobs, force=force, log=log)


def build_package(
    files: Mapping[str, str],
    model: str,
    out: Path,
    toolchain: Toolchain,
    *,
    jobs: int | None = None,
    force: bool = False,
    log: Log = note,
) -> Package:
    """Compiles rendered text in the cache and brings `<out>/<model>/` up to date with it."""
    folder = out / model
    if not force:
        refuse_foreign(folder, model, files)
    artifact = build_model(files, model, toolchain, jobs, log, retry=True)
    lock = (
        paths.cache_dir()
        / "locks"
        / f"package_{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]}"
    )
    with locked(lock, lambda: False, lambda text: log(f"gradgen: {folder}: {text}")):
        try:
            return Package(model, folder, artifact.key, tuple(_update(folder, files, artifact)))
        except OSError as error:
            if isinstance(error, BuildError):
                raise
            raise BuildError(f"cannot write {error.filename or folder}: {error.strerror}") from error


def refuse_foreign(folder: Path, model: str, files: Mapping[str, str]) -> None:
    """Raises UsageError where a package would land among files that gradgen did not write."""
    for path in (folder.parent, folder):
        if path.is_symlink():
            raise UsageError(f"{path} is a symbolic link; name the folder that it leads to, or use --force")
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is not a folder; choose another one with -o")
    if not folder.is_dir():
        return
    foreign = [path.name for path in sorted(folder.iterdir()) if not _ours(path, model, files)]
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UsageError(
            f"{folder} holds files that gradgen did not write ({shown}); "
            "move them, choose another folder with -o, or use --force"
        )


def _ours(path: Path, model: str, files: Mapping[str, str]) -> bool:
    match = BINARY.fullmatch(path.name)
    if match is not None:
        return match["module"] in (model, "gradgen_runtime")
    if path.name not in files:
        return path.name in (manifest.NAME, "__pycache__") or ASIDE.fullmatch(path.name) is not None
    if path.suffix in (".py", ".h", ".cpp"):  # the user's own file may have the name of one of ours
        if not path.is_file():  # a FIFO of that name would keep the read waiting
            return False
        with contextlib.suppress(OSError):
            return "gradgen" in path.read_text(encoding="utf-8", errors="replace")
    return True


def _update(folder: Path, files: Mapping[str, str], artifact: ModelArtifact) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    written = [name for name, text in sorted(files.items()) if _write(folder / name, text.encode())]
    written += [name for name in artifact.build.files if _place(artifact.dir / name, folder / name, artifact)]
    try:
        builds = manifest.read(folder)
    except CacheError:
        builds = {}
    tag = artifact.build.python
    if _write(folder / manifest.NAME, manifest.text({**builds, tag: artifact.build}).encode()):
        written.append(manifest.NAME)
    kept = {name for build in builds.values() if build.python != tag for name in build.files}
    _remove_old(folder, artifact.model, kept | set(artifact.build.files))
    return written


def _write(path: Path, content: bytes) -> bool:
    """Only if it changes:

    times of unchanged files stay, and so nothing that depends on them is made again.
    """
    with contextlib.suppress(OSError):
        if not path.is_symlink() and path.read_bytes() == content:
            return False
    aside = _aside(path)
    try:
        aside.write_bytes(content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return True


def _place(source: Path, target: Path, artifact: ModelArtifact) -> bool:
    with contextlib.suppress(OSError):
        if manifest.file_hash(target) == artifact.build.files[source.name]:
            return False
    aside = _aside(target)
    try:
        link_or_copy(source, aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    return True


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _remove_old(folder: Path, model: str, kept: Sequence[str] | set[str]) -> None:
    """Binaries of earlier builds. Those that other Pythons' builds name stay."""
    for path in folder.glob("*.so"):
        match = BINARY.fullmatch(path.name)
        if match is not None and match["module"] in (model, "gradgen_runtime") and path.name not in kept:
            with contextlib.suppress(OSError):
                path.unlink()
