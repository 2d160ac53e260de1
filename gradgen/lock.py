"""A lock between processes that the operating system releases with its holder, however the holder ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gradgen.diagnostics import CacheError
from gradgen.notes import warn_once

POLL = 0.02  # seconds between two attempts
TELL = 2.0  # seconds before a waiter says why it waits; then each time twice as long
DEADLINE = 600.0  # seconds after which a waiter goes on without the lock
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def open_lock(path: Path) -> int:
    """A descriptor of the lock file. Links are refused, children do not inherit it."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CacheError(
            f"cannot open the lock {path} ({reason}); set GRADGEN_CACHE to a folder of your own"
        ) from error


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """False: someone else holds it. Where a file system has no locks, true with one warning:

    renames keep it right.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in UNSUPPORTED:
            raise
        why = f"the cache's file system has no locks ({error.strerror})"
        warn_once(f"{why}: ranks may compile the same module at once")
    return True


@contextlib.contextmanager
def locked(path: Path, done: Callable[[], bool], log: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock, or goes on without it as soon as `done()` or after DEADLINE seconds.

    A holder that ended has released it, unless a child that it forked still has it: hence the deadline.
    Whoever goes on without the lock does the same work in its own folder, and one rename decides.
    """
    descriptor = open_lock(path)
    try:
        if _wait(descriptor, done, log):
            with contextlib.suppress(OSError):  # only read by the messages of others
                os.pwrite(descriptor, f"{os.getpid():<20}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, done: Callable[[], bool], log: Callable[[str], None]) -> bool:
    start, tell = time.monotonic(), TELL
    while not try_lock(descriptor):
        waited = time.monotonic() - start
        if done():
            return False
        if waited > DEADLINE:
            log(f"waited {waited:.0f} s for {_holder(descriptor)}; building it here")
            return False
        if waited > tell:
            log(f"waiting {waited:.0f} s for {_holder(descriptor)}, which is building it")
            tell *= 2
        time.sleep(POLL)
    return True


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 32, 0).strip().decode(errors="replace")
    return f"pid {text}" if text.isdigit() else "another process"
