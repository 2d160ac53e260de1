"""How the command line speaks and ends: answers on stdout, notes and errors on stderr, stable exit codes.

A reader that stops early (`| head`), a closed stdout and an ASCII locale are ordinary, not errors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

OK, FINDINGS, USAGE, MISSING, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 70, 130
FRAMES = "|/-\\"
RED, BOLD, DIM, RESET = "\x1b[31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"


def prepare() -> None:
    """Characters that the locale cannot spell become escapes; closed streams swallow what they are given."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, stream: TextIO) -> str:
    return f"{style}{text}{RESET}" if text and coloured(stream) else text


def answer(text: str) -> None:
    """What was asked for, on stdout. Text that does not end a line gets its line end."""
    _write(sys.stdout, text if text.endswith("\n") or not text else text + "\n")


def answer_json(data: Any) -> None:
    answer(json.dumps(data, indent=2))


def note(text: str) -> None:
    """Progress and remarks, on stderr; under torchrun from rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        _write(sys.stderr, f"{text}\n")


def error(text: str) -> None:
    """On stderr; under torchrun from every rank, with its number."""
    rank = os.environ.get("RANK")
    prefix = f"[rank {rank}] " if rank is not None else ""
    _write(sys.stderr, "".join(f"{prefix}{line}\n" for line in text.splitlines()))


class AnswerError(Exception):
    """The answer could not be written, and not because its reader left."""


def finish(code: int) -> int:
    """Flushes. An answer that cannot be written is a failure, unless its reader left."""
    for stream in (sys.stdout, sys.stderr):
        try:
            _guarded(stream, stream.flush)
        except AnswerError as reason:
            error(f"error: {reason}")
            code = code or USAGE
    return code


def internal_error(arguments: list[str]) -> int:
    """For a bug of gradgen: keeps the traceback in a file and names it."""
    kind, value, _ = sys.exc_info()
    shown = f"{kind.__name__ if kind else 'unknown'}: {value}".splitlines()[0][:200]
    text = f"gradgen {' '.join(map(repr, arguments))}\nPython {sys.version}\n\n{traceback.format_exc()}"
    try:
        handle, path = tempfile.mkstemp(prefix="gradgen-error-", suffix=".log")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as log:
            log.write(text)
    except OSError:
        error(text)
        path = "above"
    error(f"internal error, please report: {shown}\ntraceback: {path}")
    return INTERNAL


def _write(stream: TextIO, text: str) -> None:
    _guarded(stream, lambda: stream.write(text))


def _guarded(stream: TextIO, action: Callable[[], object]) -> None:
    try:
        action()
    except OSError as reason:
        _abandon(stream)
        if stream is sys.stdout and not isinstance(reason, BrokenPipeError):
            raise AnswerError(f"cannot write the answer: {reason.strerror}") from None


def _abandon(stream: TextIO) -> None:
    """Nobody reads `stream` any more: what is still written to it, also at exit, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Progress:
    """A spinner on a terminal while compilers run, elsewhere nothing; `line` prints one line a module."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.done = threading.Event()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._spin, daemon=True)

    def line(self, text: str) -> None:
        with self.lock:
            if self.live:
                _write(sys.stderr, "\r\x1b[K")
            note(text)

    def __enter__(self) -> Callable[[str], None]:
        if self.live:
            self.thread.start()
        return self.line

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done.set()
        if self.live:
            self.thread.join()
            _write(sys.stderr, "\r\x1b[K")
            sys.stderr.flush()

    def _spin(self) -> None:
        turn = 0
        while not self.done.wait(0.1):
            with self.lock:
                _write(sys.stderr, f"\r{FRAMES[turn % len(FRAMES)]} {self.what}\x1b[K")
                sys.stderr.flush()
            turn += 1
