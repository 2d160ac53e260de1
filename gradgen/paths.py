"""Where gradgen's data and its cache lie."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradgen.diagnostics import CacheError
from gradgen.notes import warn_once

PACKAGE = Path(__file__).resolve().parent
CURE = "set GRADGEN_CACHE to a folder of your own"


def runtime_dir() -> Path:
    """The runtime's sources: include/, src/, bindings/ and cuda/."""
    return PACKAGE / "runtime"


def templates_dir() -> Path:
    return _data("templates")


def specs_dir() -> Path:
    """The specs that come with gradgen."""
    return _data("specs")


def _data(name: str) -> Path:
    """A checkout (editable installs too) keeps its data beside the package, a wheel inside of it."""
    inside = PACKAGE / "_data" / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def cache_dir() -> Path:
    """The folder of compiled modules, made if missing: GRADGEN_CACHE, else gradgen/ in the user's caches.

    What lies there is loaded into the process, so a folder that others can write to is refused with
    CacheError. Where the user has no home or cannot write to it, a private folder among the temporary files
    serves instead.
    """
    chosen = os.environ.get("GRADGEN_CACHE")
    if chosen:
        return _private(Path(os.path.abspath(os.path.expanduser(chosen))))
    home = _user_cache()
    if home is not None:
        try:
            home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = _private(home)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            pass
    import tempfile  # late: it imports much, and a built module imports this one

    why = "there is no home folder" if home is None else f"cannot write to {home}"
    folder = _private(Path(tempfile.gettempdir()) / f"gradgen-{os.geteuid()}")
    warn_once(f"{why}: compiled modules go to {folder}; {CURE}")
    return folder


def _user_cache() -> Path | None:
    """None for a user without a home: HOME unset and no entry in the password file, as in many containers."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "gradgen"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "gradgen" if os.path.isabs(home) else None


class _Unwritable(CacheError, OSError):
    """A cache folder that cannot be made.

    An OSError, so that the default place can be given up for another one.
    """


def _private(folder: Path) -> Path:
    """`folder`, made if missing, and nobody else's. Names it and the cure in every error."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except FileExistsError:
        status = folder.lstat()
    except OSError as error:
        raise _Unwritable(f"cannot make the cache folder {folder} ({error.strerror}); {CURE}") from error
    if stat.S_ISLNK(status.st_mode):
        raise CacheError(f"the cache folder {folder} is a symbolic link; {CURE}")
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"the cache folder {folder} is not a folder; {CURE}")
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(f"the cache folder {folder} belongs to user {status.st_uid}, not to you; {CURE}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"others can write to the cache folder {folder}, so its binaries cannot be trusted; "
            f"chmod 700 it, or {CURE}"
        )
    return folder
