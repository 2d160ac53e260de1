"""The cache: one folder a module, built aside, renamed once, verified before each use.

    runtime/<key>/   models/<model>_<key>/   failed/<module>/   locks/<module>   .tmp-<pid>-<random>/

A folder is there in whole or not at all, so readers need no lock; the lock only saves eight ranks from
compiling the same module eight times.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradgen import manifest, paths
from gradgen.diagnostics import CacheError
from gradgen.lock import open_lock, try_lock
from gradgen.notes import note

YOUNG = 60.0  # seconds that a folder without its owner's lock may be one that was just made
_in_use: dict[Path, int] = {}


@dataclass(frozen=True)
class Entry:
    """One place of the cache."""

    root: Path
    model: str  # "" is the runtime
    key: str

    @property
    def name(self) -> str:
        return manifest.module_name(self.model, self.key)

    @property
    def label(self) -> str:
        return f"{self.model or 'runtime'} {self.key[:8]}"

    @property
    def path(self) -> Path:
        return self.root / ("models" if self.model else "runtime") / self.name

    @property
    def failed(self) -> Path:
        return self.root / "failed" / self.name

    @property
    def lock(self) -> Path:
        return self.root / "locks" / self.name

    def find(self) -> manifest.Build | None:
        """The build that lies here.

        One that is not what was built is moved out of the way, with a warning.
        """
        if not self.path.exists():
            return None
        try:
            builds = [build for build in manifest.read(self.path).values() if build.key == self.key]
            reason = (
                manifest.problem(self.path, builds[0])
                if builds
                else f"{manifest.NAME} is missing or of another key"
            )
        except CacheError as error:
            builds, reason = [], str(error)
        if reason is None:
            return builds[0]
        if self.path.exists():  # else someone else has just done the same
            note(f"gradgen: warning: {self.path}: {reason}; building it again")
            quarantine(self.root, self.path)
        return None


@contextlib.contextmanager
def workspace(root: Path) -> Iterator[Path]:
    """A folder to build in, gone afterwards unless it was published.

    Its lock tells others that its owner lives.
    """
    sweep(root)
    folder = root / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    try:
        descriptor = open_lock(folder / ".owner")
        try:
            try_lock(descriptor)
            yield folder
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, entry: Entry) -> None:
    """Renames a finished folder to its place. Losing the race to an equal build is fine."""
    (folder / ".owner").unlink(missing_ok=True)
    entry.path.parent.mkdir(mode=0o700, exist_ok=True)
    for _ in range(3):
        try:
            folder.rename(entry.path)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        if entry.find() is not None:
            return
        if not entry.path.is_dir():
            quarantine(entry.root, entry.path)
    raise CacheError(f"cannot replace {entry.path}; remove it, or set GRADGEN_CACHE to another folder")


def quarantine(root: Path, path: Path) -> None:
    """Out of the way at once, then removed. A process that has it mapped keeps what it has."""
    aside = root / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CacheError(
            f"cannot move {path} away ({error.strerror}); set GRADGEN_CACHE to another folder"
        ) from error
    remove(aside)


def remove(path: Path) -> None:
    """Cleaning up never fails a build."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sweep(root: Path) -> int:
    """Removes what builders left that were killed. Returns how many folders."""
    swept = 0
    for folder in root.glob(".tmp-*"):
        if _abandoned(folder):
            remove(folder)
            swept += 1
    return swept


def _abandoned(folder: Path) -> bool:
    """Its owner is gone. A pid alone does not tell:

    the owner may run in another container or on another host.
    """
    pid = folder.name.split("-")[1]
    if pid.isdigit() and _alive(int(pid)):
        return False
    try:
        descriptor = os.open(folder / ".owner", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        with contextlib.suppress(OSError):
            return abs(time.time() - folder.lstat().st_mtime) > YOUNG
        return False
    try:
        return try_lock(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def hold(folder: Path) -> None:
    """Tells `clean` that this process uses a folder: a lock that the process keeps to its end."""
    if folder not in _in_use:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / manifest.NAME, os.O_RDONLY | os.O_CLOEXEC)
            _in_use[folder] = descriptor
            try_lock(descriptor, shared=True)


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache, as `gradgen cache list` shows it."""

    name: str
    kind: str  # runtime | model | failed
    model: str
    device: str
    python: str
    bytes: int
    in_use: bool
    path: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Cleaned:
    removed: tuple[CacheEntry, ...]
    kept: tuple[CacheEntry, ...]  # in use
    abandoned: int  # folders of builders that were killed

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.removed)


def cache_entries() -> tuple[CacheEntry, ...]:
    """Everything in the cache, by kind and name."""
    root = paths.cache_dir()
    kinds = {"runtime": "runtime", "models": "model", "failed": "failed"}
    return tuple(
        _entry(path, kind) for folder, kind in kinds.items() for path in sorted((root / folder).glob("*"))
    )


def _entry(path: Path, kind: str) -> CacheEntry:
    try:
        build = next(iter(manifest.read(path).values()), None)
    except CacheError:
        build = None
    size = 0
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):
            size += file.lstat().st_size
    model, device, python = (build.model, build.device, build.python) if build else ("", "", "")
    return CacheEntry(path.name, kind, model, device, python, size, _used(path), str(path))


def _used(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / manifest.NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)


def clean() -> Cleaned:
    """Removes what no running process uses."""
    root = paths.cache_dir()
    entries = cache_entries()
    removed = tuple(entry for entry in entries if not entry.in_use)
    for entry in removed:
        quarantine(root, Path(entry.path))
    for lock in (root / "locks").glob("*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            if try_lock(descriptor):
                lock.unlink()
            os.close(descriptor)
    return Cleaned(removed, tuple(entry for entry in entries if entry.in_use), sweep(root))
