"""Structure of a spec against schema.json: all errors at once, in our own words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gradgen.diagnostics import Diagnostic, SpecError, did_you_mean, quote, suggest
from gradgen.source import PathKey, Source

VERSION = 1
MANY = 1000  # keys of a mapping: for each unknown one a search for what was meant would take long


@dataclass(frozen=True)
class Problem:
    """A finding and the path of the value that is wrong: to take out, or to put in where it is missing."""

    path: PathKey
    finding: Diagnostic | None  # None where another finding says it


@lru_cache(maxsize=1)
def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of spec files."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return data


def validate(source: Source) -> Source:
    """Returns `source` when its structure is right. Raises SpecError with everything that is not."""
    found = problems(source)
    if found:
        raise SpecError([problem.finding for problem in found if problem.finding], source.text)
    return source


def problems(source: Source) -> list[Problem]:
    """Everything that schema.json does not allow."""
    unfit = _unfit(source)
    if unfit:
        return [Problem((), unfit)]
    return [
        problem for error in _validator().iter_errors(source.data) for problem in _translate(error, source)
    ]


@lru_cache(maxsize=1)
def _validator() -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend

    def pattern(_: Any, wanted: str, instance: Any, __: Any) -> Iterator[ValidationError]:
        """JSON Schema's `$` is the end of the text. Python's also stands before a line end there."""
        if isinstance(instance, str) and not re.search(re.sub(r"\$\Z", r"\\Z", wanted), instance):
            yield ValidationError("")

    return extend(Draft202012Validator, {"pattern": pattern})(schema())  # type: ignore[no-untyped-call]


def _unfit(source: Source) -> Diagnostic | None:
    """What makes all other findings noise: no mapping, or another version of the language."""
    data = source.data
    if not isinstance(data, dict):
        cure = "start with `gradgen: 1` and `model: NAME`"
        return Diagnostic(source.place(()), f"a spec is a mapping, not {_kind(data)}", "not-a-mapping", cure)
    version = data.get("gradgen")
    if isinstance(version, int) and not isinstance(version, bool) and version != VERSION:
        newer = f"needs gradgen >= {version}; this one reads version {VERSION}"
        cure = newer if version > VERSION else f"write `gradgen: {VERSION}`"
        return Diagnostic(source.place(("gradgen",)), f"unknown spec version {version}", "version", cure)
    return None


def _translate(error: Any, source: Source) -> Iterator[Problem]:
    path: PathKey = tuple(error.absolute_path)
    value, kind, wanted = error.instance, str(error.validator), error.validator_value
    what, place = describe(path), source.place(path)
    if kind == "additionalProperties":
        known = list(error.schema.get("properties", {}))
        for key in (key for key in value if key not in known):
            message = f"unknown key {quote(key)} in {describe(path)}"
            at = (*path, key)
            hint = suggest(key, known) if len(value) < MANY else ""
            yield Problem(at, Diagnostic(source.key(at), message, "unknown-key", hint))
    elif kind == "required":
        yield from _missing(error, source, path)
    elif "propertyNames" in error.schema_path:
        at = (*path, value)
        message = f"the name {quote(value)} in {what} has characters that it may not have, or too many"
        yield Problem(at, Diagnostic(source.key(at), message, "bad-name", f"it must match {wanted}"))
    else:
        message, code, hint = _value(kind, what, value, wanted)
        yield Problem(path, Diagnostic(place, message, code, hint))


def _missing(error: Any, source: Source, path: PathKey) -> Iterator[Problem]:
    """jsonschema reports every missing key on its own. A key that was probably meant is named by its typo."""
    known = set(error.schema.get("properties", {}))
    typos = [key for key in error.instance if key not in known]
    missing = [key for key in error.validator_value if key not in error.instance]
    key = next(key for key in missing if error.message.startswith(repr(key)))
    place = source.place(path) if not path or isinstance(path[-1], int) else source.key(path)
    if path == () and key == "gradgen":
        message, hint = (
            "the spec does not say its version",
            f"needs gradgen >= {VERSION}: begin with `gradgen: {VERSION}`",
        )
        yield Problem((key,), Diagnostic(place, message, "no-version", hint))
    elif not any(did_you_mean(typo, sorted(known)) == did_you_mean(key, [key]) for typo in typos):
        message = f"{describe(path)} has no '{key}'"
        yield Problem((*path, key), Diagnostic(place, message, "missing-key", f"add `{key}:`"))
    else:
        yield Problem((*path, key), None)


def _value(kind: str, what: str, value: Any, wanted: Any) -> tuple[str, str, str]:
    """Message, code and hint."""
    if kind == "type":
        names = wanted if isinstance(wanted, list) else [wanted]
        return f"{what} must be {' or '.join(_NAMES[n] for n in names)}, not {_kind(value)}", "wrong-type", ""
    if kind == "enum":
        allowed = [str(item) for item in wanted]
        choice = did_you_mean(str(value), allowed)
        allowed_are = f"allowed are {', '.join(allowed)}"
        return (
            f"{what} is {quote(value)}",
            "unknown-value",
            f"{choice} {allowed_are}" if choice else allowed_are,
        )
    if kind == "pattern":
        return (
            f"{what} is {quote(value)}",
            "bad-name",
            _ID if "a-z][a-z0-9_]" in wanted else f"it must match {wanted}",
        )
    if kind == "maximum":
        return f"{what} is {quote(value)}", "too-big", f"it must be at most {wanted}"
    if kind == "minimum":
        return f"{what} is {quote(value)}", "too-small", f"it must be at least {wanted}"
    if kind in ("minProperties", "minLength", "minItems"):
        return f"{what} is empty", "empty", "give it something, or leave the key out"
    if kind == "maxProperties":
        return f"{what} has {len(value)} keys", "too-many", f"{wanted} is allowed"
    return (
        f"{what} has {len(value)} {'items' if kind == 'maxItems' else 'characters'}",
        "too-long",
        f"at most {wanted}",
    )


_ID = "ids are lower-case letters, digits and _, at most 64, beginning with a letter"
_NAMES = {
    "string": "text",
    "integer": "an integer",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"the integer {quote(value)}"
    if isinstance(value, str):
        return f"the text {quote(value)}"
    return "a mapping" if isinstance(value, dict) else "a list"


_GROUPS = {
    "weights": "weight",
    "groups": "group",
    "buffers": "buffer",
    "blocks": "block",
    "dims": "dim",
    "flags": "flag",
    "presets": "preset",
    "strategies": "strategy",
    "require": "requirement",
}


def describe(path: PathKey) -> str:
    """The innermost thing that has a name: "item 1 of 'shape' of weight 'q_proj'"."""
    parts: list[str] = []
    i = 0
    while i < len(path):
        head = path[i]
        follower = path[i + 1] if i + 1 < len(path) else None
        if head in _GROUPS and follower is not None and (i == 0 or path[i - 2] == "blocks"):
            name = str(follower + 1) if isinstance(follower, int) else quote(follower)
            parts, i = [f"{_GROUPS[str(head)]} {name}"], i + 2
        else:
            parts, i = [f"item {head + 1}" if isinstance(head, int) else quote(head), *parts], i + 1
    return " of ".join(parts) if parts else "the spec"
