"""From a file to plain data with a position for every key and value. Nothing in a spec is ever executed.

Files are looked at before they are opened and never read past a limit, so that neither a device nor a pipe
nor a huge file holds anyone up.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradgen.diagnostics import Diagnostic, SpecError, UsageError, quote
from gradgen.model import Place
from gradgen.yaml_reader import PathKey as PathKey
from gradgen.yaml_reader import is_invisible, read

MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """A loaded spec. `places[path]` is where the value at a path begins, `keys[path]` where its key does."""

    file: str
    text: str
    data: Any
    places: dict[PathKey, Place] = field(repr=False)
    keys: dict[PathKey, Place] = field(repr=False)

    def place(self, path: PathKey) -> Place:
        """Of the value at `path`, or of the nearest thing around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(self.file, 1, 1))

    def key(self, path: PathKey) -> Place:
        return self.keys.get(path) or self.place(path)


def load(path: str | Path) -> Source:
    """Reads and parses a spec. Raises UsageError for no readable file, SpecError for no spec."""
    name = os.fspath(path)
    data = _bytes(name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = _place(name, data, error.start)
        raise SpecError(
            [Diagnostic(place, "the file is not UTF-8 text", "not-utf8", "save it as UTF-8")]
        ) from None
    if "\0" in text:
        place = _place(name, data, data.index(b"\0"))
        found = Diagnostic(
            place, "the file holds NUL bytes", "not-utf8", "save it as UTF-8, not UTF-16 or binary"
        )
        raise SpecError([found])
    return load_text(text, name)


def _bytes(name: str) -> bytes:
    try:
        status = os.stat(name)
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{name}: is a directory; name a spec file")
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{name}: is not a regular file")
        if status.st_size > MAX_BYTES:
            raise UsageError(f"{name}: has {status.st_size} bytes; a spec has at most {MAX_BYTES}")
        # Not blocking, should a pipe have taken its place since; what grew since is not read to its end.
        with open(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = "the name is too long" if error.errno == errno.ENAMETOOLONG else error.strerror or str(error)
        raise UsageError(f"{name or quote(name)}: cannot read it: {reason}") from None
    except ValueError as error:
        reason = "it holds a null character" if "\0" in name else str(error)  # Pythons word it differently
        raise UsageError(f"{quote(name)}: cannot be a path: {reason}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name}: has more than {MAX_BYTES} bytes")
    return data


def _place(file: str, data: bytes, offset: int) -> Place:
    start = data.rfind(b"\n", 0, offset) + 1
    return Place(
        file, data.count(b"\n", 0, offset) + 1, len(data[start:offset].decode("utf-8", "replace")) + 1
    )


def load_text(text: str, file: str) -> Source:
    """The same for text that is already read; `file` is the name that messages show."""
    if len(text) > MAX_BYTES:
        raise UsageError(f"{file}: has more than {MAX_BYTES} characters")
    found = [_invisible(text, offset, file) for offset in _invisible_characters(text)]
    if found:
        raise SpecError(found[:20], text)

    reading = read(text, file)
    if reading.found:
        raise SpecError(reading.found, text)
    return Source(file, text, reading.data, reading.places, reading.keys)


_UNUSUAL = re.compile(r"[^ -~\n\t]")


def _invisible_characters(text: str) -> Iterator[int]:
    """They make an editor show something else than what is read, in a spec and in generated comments."""
    for match in _UNUSUAL.finditer(text):
        char, at = match[0], match.start()
        line_end = char == "\r" and text[at + 1 : at + 2] in ("\n", "")
        byte_order_mark = char == "\ufeff" and at == 0
        if is_invisible(char) and not line_end and not byte_order_mark:
            yield at


def _invisible(text: str, offset: int, file: str) -> Diagnostic:
    place = Place(file, text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset))
    return Diagnostic(place, f"invisible character {ascii(text[offset])}", "control-character", "remove it")
