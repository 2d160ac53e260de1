"""Runs compilers: several at a time, each in its own process group, none of which outlives the build."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

POLL = 0.005
LIMIT = 900.0  # seconds that one compiler may take
# They change what is compiled, and no key knows of them.
REMOVED = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "GCC_COMPARE_DEBUG",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
)


@dataclass(frozen=True)
class Command:
    name: str  # what is made, for messages
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Finished:
    command: Command
    code: int  # negative: the signal that ended it
    seconds: float
    output: str
    timed_out: bool = False


@dataclass
class _Running:
    command: Command
    process: subprocess.Popen[bytes]
    output: BinaryIO
    started: float


def default_jobs() -> int:
    return len(os.sched_getaffinity(0))


def run_all(
    commands: Sequence[Command], folder: Path, jobs: int, limit: float | None = None
) -> list[Finished]:
    """Runs all in `folder`, or up to the first that fails.

    What still runs then, or on any exception, is killed.
    """
    limit = LIMIT if limit is None else limit
    waiting, running, finished = list(commands), list[_Running](), list[Finished]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(0), folder))
            time.sleep(POLL)
            _raise_pending()
            for job in list(running):
                done = _poll(job, limit)
                if done is not None:
                    running.remove(job)
                    finished.append(done)
                    if done.code != 0:
                        return finished
    finally:
        for job in running:
            _kill(job.process)
    return finished


def _start(command: Command, folder: Path) -> _Running:
    """The compiler's temporary files go into `folder` and disappear with it.

    Its output is kept in memory, so that a full disk does not swallow its own error.
    """
    environment = {name: value for name, value in os.environ.items() if name not in REMOVED}
    environment |= {"LC_ALL": "C", "TMPDIR": str(folder)}
    output = open(os.memfd_create("output"), "w+b")  # noqa: SIM115 - closed by _poll or with its last user
    process = subprocess.Popen(
        command.arguments,
        cwd=folder,
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    return _Running(command, process, output, time.monotonic())


def _poll(job: _Running, limit: float) -> Finished | None:
    code = job.process.poll()
    seconds = time.monotonic() - job.started
    if code is None and seconds < limit:
        return None
    if code is None:
        _kill(job.process)
    with job.output as file:
        file.seek(0)
        output = file.read().decode(errors="replace")
    ended = -signal.SIGKILL if code is None else code
    return Finished(job.command, ended, seconds, output, timed_out=code is None)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The driver and what it started: `g++` alone would leave cc1plus behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_pending: list[int] = []  # signals that arrived during `ending_cleanly`


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """Ctrl-C and SIGTERM (exit code 143) take effect between two steps of `run_all`, or at the end.

    As exceptions they could hit while a compiler is being started, which then nobody would know to end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = {number: handler for number, handler in defaults.items() if signal.getsignal(number) is handler}
    for number in ours:
        signal.signal(number, lambda number, frame: _pending.append(number))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        _raise_pending()


def _raise_pending() -> None:
    if _pending and threading.current_thread() is threading.main_thread():
        number = _pending[0]
        _pending.clear()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
