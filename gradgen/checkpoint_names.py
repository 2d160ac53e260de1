"""Whether two weights would have one checkpoint name, and so silently share a gradient."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from gradgen.expr import ExprError, evaluate, names
from gradgen.model import Model, Weight

_RUN = re.compile(r"[0-9]+")
_MAX_INDEX = 100_000
_MAX_FLAGS = 10


@dataclass(frozen=True)
class Named:
    """A checkpoint name, perhaps with {i} for one of `indices`, which ascend."""

    text: str
    indices: Sequence[int]
    owner: str

    def has(self, name: str) -> bool:
        before, _, after = self.text.partition("{i}")
        index = name[len(before) : len(name) - len(after)]
        fits = name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after)
        return fits and index.isdecimal() and str(int(index)) == index and int(index) in self.indices

    def expand(self) -> Iterator[str]:
        return (self.text.replace("{i}", str(i)) for i in self.indices[:_MAX_INDEX])

    def shared(self, other: Named) -> int | None:
        """An index at which two equal texts are one name."""
        if "{i}" not in self.text:
            return 0
        if isinstance(self.indices, range) and isinstance(other.indices, range):
            return 0 if self.indices and other.indices else None
        return next(iter(sorted(set(self.indices) & set(other.indices))), None)


def clash(entries: Iterable[Named]) -> tuple[Named, Named, str] | None:
    """Two entries that share a name, and the name. `layer.{i}.norm` and `layer.7.norm` do when count > 7."""
    exact: dict[str, list[Named]] = {}
    patterns: dict[str, list[Named]] = {}
    for entry in entries:
        if not entry.indices:
            continue
        for other in exact.setdefault(entry.text, []):
            index = other.shared(entry)
            if index is not None:
                return other, entry, entry.text.replace("{i}", str(index))
        exact[entry.text].append(entry)
        if "{i}" in entry.text:
            patterns.setdefault(re.sub(r"[0-9]*\{i\}[0-9]*", "{i}", entry.text), []).append(entry)
    for alike in patterns.values():
        for a, b in zip(alike, alike[1:], strict=False):
            shared = sorted(set(a.expand()) & set(b.expand()))
            if shared and a.text != b.text:
                return a, b, shared[0]
    for entry in (entry for entries in exact.values() for entry in entries):
        for run in _RUN.finditer(entry.text) if "{i}" not in entry.text else ():
            for other in patterns.get(entry.text[: run.start()] + "{i}" + entry.text[run.end() :], ()):
                if other.has(entry.text):
                    return other, entry, entry.text
    return None


def exclusive(a: Weight, b: Weight, model: Model) -> bool:
    """Whether `when` keeps the two from existing together. Conditions over dims wait for configurations."""
    if a.when is None or b.when is None:
        return False
    used = sorted(names(a.when) | names(b.when))
    flags = {flag.name for flag in model.flags}
    if len(used) > _MAX_FLAGS or not set(used) <= flags:
        return True
    try:
        return not any(
            evaluate(a.when, env) and evaluate(b.when, env)
            for values in product((False, True), repeat=len(used))
            for env in [dict(zip(used, values, strict=True))]
        )
    except ExprError:
        return True
