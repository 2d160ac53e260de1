"""The part of YAML that specs use: mappings, lists, text, decimal integers, true and false.

Data is built here from PyYAML's events (of its safe loader), so no constructor of YAML runs. What YAML 1.1
reads differently from how it looks, and what lets a file say something twice or nowhere (tags, anchors, merge
keys), is refused with its place.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

import yaml

from gradgen.diagnostics import Diagnostic, quote
from gradgen.model import Place

MAX_DEPTH = 32

_INT = re.compile(r"-?(0|[1-9][0-9]*)\Z")
_BOOL = {"true": True, "false": False}
_SURPRISES = re.compile(
    r"(?P<bool>(?i:yes|no|on|off|true|false))\Z"
    r"|(?P<number>[-+]?(0[0-9_]+|0[xob][0-9a-fA-F_]*|[0-9]+_[0-9_]*|[0-9]+(:[0-5]?[0-9])+|\+[0-9]+)(\.[0-9_]*)?)\Z"
    r"|(?P<float>[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
    r"|\.(?i:inf|nan)))\Z"
    r"|(?P<date>[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*)\Z"
    r"|(?P<null>~|(?i:null))\Z"
)
_CURES = {
    "bool": "write true or false, or quote it to mean text",
    "number": "write a plain decimal integer, or quote it to mean text",
    "float": "write an integer, or quote it to mean text",
    "date": "quote it to mean text",
    "null": "give a value, leave the key out, or quote it to mean text",
}

PathKey = tuple["str | int", ...]  # keys and indices from the top of a spec to a value


@dataclass
class Reading:
    """What was read, and everything that was refused on the way."""

    file: str
    data: Any = None
    places: dict[PathKey, Place] = field(default_factory=dict)
    keys: dict[PathKey, Place] = field(default_factory=dict)
    found: list[Diagnostic] = field(default_factory=list)


@dataclass
class _Open:
    """A mapping or list whose end has not come yet."""

    value: Any
    path: PathKey
    key: str | None = None  # of the entry whose value comes next
    discard: bool = False  # that entry was refused: its value is read and dropped


def read(text: str, file: str) -> Reading:
    """Never raises: what is wrong is in `found`."""
    reading = Reading(file)
    builder = _Builder(reading)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if not builder.take(event):
                break
    except yaml.MarkedYAMLError as error:
        reading.found.append(_syntax(error, file))
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        # PyYAML lets escapes beyond Unicode and endless version numbers through to Python.
        reading.found.append(Diagnostic(builder.here, "not valid YAML from here on", "yaml-syntax"))
    if not builder.seen and not reading.found:
        cure = "start with `gradgen: 1` and `model: NAME`"
        reading.found.append(Diagnostic(Place(file, 1, 1), "the spec is empty", "empty", cure))
    return reading


class _Builder:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.open: list[_Open] = []
        self.documents = 0
        self.seen = False
        self.here = Place(reading.file, 1, 1)

    def refuse(self, message: str, code: str, hint: str = "") -> None:
        self.reading.found.append(Diagnostic(self.here, message, code, hint))

    def take(self, event: yaml.Event) -> bool:
        """Whether reading goes on."""
        mark = event.start_mark
        if mark is not None:
            self.here = Place(self.reading.file, mark.line + 1, mark.column + 1)
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                self.refuse("a second document starts here", "several-documents", "write one spec a file")
            return self.documents == 1
        if isinstance(event, yaml.CollectionEndEvent):
            self.open.pop()
        elif isinstance(event, (yaml.AliasEvent, yaml.ScalarEvent, yaml.CollectionStartEvent)):
            self.properties(event)
            if self.open and isinstance(self.open[-1].value, dict) and self.open[-1].key is None:
                return self.key(event)
            return self.value(event)
        return True

    def properties(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            self.refuse(
                f"aliases are not allowed: {quote(f'*{event.anchor}')}", "alias", "write the value out"
            )
        elif event.anchor is not None:
            self.refuse(f"anchors are not allowed: {quote(f'&{event.anchor}')}", "anchor", "write values out")
        if getattr(event, "tag", None) is not None:
            self.refuse(f"tags are not allowed: {quote(event.tag)}", "tag", "remove it")

    def key(self, event: Any) -> bool:
        mapping = self.open[-1]
        if not isinstance(event, yaml.ScalarEvent):
            if not isinstance(event, yaml.AliasEvent):
                self.refuse("a key must be plain text", "bad-key", "remove the '?' or the brackets")
                return self.start(event, (*mapping.path, f"({self.here})"), as_key=True)
            mapping.key, mapping.discard = f"({self.here})", True
            return True
        key = str(event.value)
        path = (*mapping.path, key)
        mapping.key, mapping.discard = key, True
        self.characters(key)
        surprise = None if event.style or _INT.match(key) or key in _BOOL else _SURPRISES.match(key)
        if not event.style and key == "<<":
            self.refuse("merge keys are not allowed", "merge-key", "write the keys out")
        elif surprise or (not event.style and not key):
            shown = quote(key) if key else "an empty key"
            self.refuse(f"{shown} is not text in YAML 1.1", "yaml-surprise", _cure(surprise))
        elif path in self.reading.keys:
            line = self.reading.keys[path].line
            self.refuse(f"duplicate key {quote(key)}", "duplicate-key", f"it stands in line {line} already")
        else:
            mapping.discard = False
            self.reading.keys[path] = self.here
        if mapping.discard:
            mapping.key = f"{key} ({self.here})"
        return True

    def value(self, event: Any) -> bool:
        if not self.open and isinstance(event, yaml.ScalarEvent) and not event.value and not event.style:
            return True  # a document without content
        self.seen = True
        if isinstance(event, yaml.CollectionStartEvent):
            return self.start(event, self.path())
        path = self.path()
        self.reading.places[path] = self.here
        self.put(self.scalar(event) if isinstance(event, yaml.ScalarEvent) else "")
        return True

    def start(self, event: Any, path: PathKey, as_key: bool = False) -> bool:
        self.reading.places[path] = self.here
        value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        if as_key:
            self.open[-1].key, self.open[-1].discard = f"({self.here})", True
        else:
            self.put(value)
        self.open.append(_Open(value, path))
        if len(self.open) > MAX_DEPTH:
            self.refuse(f"nested deeper than {MAX_DEPTH} levels", "too-deep", "specs are flat")
        return len(self.open) <= MAX_DEPTH

    def path(self) -> PathKey:
        if not self.open:
            return ()
        parent = self.open[-1]
        return (*parent.path, parent.key if isinstance(parent.value, dict) else len(parent.value))  # type: ignore[arg-type]

    def put(self, value: Any) -> None:
        if not self.open:
            self.reading.data = value
            return
        parent = self.open[-1]
        if isinstance(parent.value, list):
            parent.value.append(value)
        elif not parent.discard:
            parent.value[parent.key] = value
        parent.key, parent.discard = None, False

    def scalar(self, event: Any) -> Any:
        text = str(event.value)
        self.characters(text)
        if event.style:
            return text
        if text in _BOOL:
            return _BOOL[text]
        if _INT.match(text):
            if len(text) <= 19 and abs(int(text)) < 2**63:
                return int(text)
            self.refuse(f"the integer {quote(text)} does not fit 63 bits", "too-big")
            return 0
        surprise = _SURPRISES.match(text)
        if not text:
            self.refuse("a value is missing here", "missing-value", "give one, or leave the key out")
        elif surprise:
            self.refuse(f"{quote(text)} is not plain text in YAML 1.1", "yaml-surprise", _cure(surprise))
        return text

    def characters(self, text: str) -> None:
        """Those that escapes such as "\\u202e" put in. Line ends and tabs are left to who reads the value."""
        if not text.isprintable():
            for char in text:
                if char not in "\n\r\t" and is_invisible(char):
                    shown = f"the text {quote(text)} holds the invisible character {ascii(char)}"
                    self.refuse(shown, "control-character", "remove it")
                    break


def _cure(surprise: re.Match[str] | None) -> str:
    return next((cure for name, cure in _CURES.items() if surprise and surprise[name]), "give the key a name")


_PROBLEMS = (  # PyYAML's words are about its scanner; these are about the file
    (
        "escape",
        "an unknown escape in a quoted text",
        "yaml-syntax",
        "write \\\\ for a backslash, or use single quotes",
    ),
    ("'\\t'", "a tab in the indentation", "tab", "indent with spaces"),
    (
        "quoted scalar",
        "a quoted text is not closed",
        "yaml-syntax",
        "end it with its quote",
    ),
    ("that cannot start", "a value cannot begin with this character", "yaml-syntax", "quote the value"),
    (
        "mapping values",
        "a second ':' in one line",
        "yaml-syntax",
        "quote the value, or put the key on its own line",
    ),
    (
        "flow",
        "a bracket is not closed, or a comma is missing",
        "yaml-syntax",
        "check the brackets before this",
    ),
    ("block", "this line does not fit the indentation around it", "yaml-syntax", "check its indentation"),
    ("simple key", "a line without ':'", "yaml-syntax", "write `key: value`"),
)


def _syntax(error: yaml.MarkedYAMLError, file: str) -> Diagnostic:
    mark = error.problem_mark or error.context_mark
    place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file, 1, 1)
    said = f"{error.problem or ''} {error.context or ''}"
    for part, message, code, hint in _PROBLEMS:
        if part in said:
            return Diagnostic(place, message, code, hint)
    return Diagnostic(place, "not valid YAML here", "yaml-syntax", "check indentation, quotes and brackets")


def is_invisible(char: str) -> bool:
    """Control, bidirectional and other format characters, lone surrogates, and what Unicode never assigns."""
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") or (ord(char) & 0xFFFE) == 0xFFFE
