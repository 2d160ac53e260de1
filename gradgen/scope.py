"""The names that a spec declares, and the expressions over them, with their findings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from gradgen.diagnostics import Diagnostic, quote, suggest
from gradgen.expr import INDEX, Bool, Expr, ExprError, Num, names, parse
from gradgen.expr_types import INTEGER, TRUTH, kind
from gradgen.identifiers import bad_identifier
from gradgen.model import Model, Place
from gradgen.source import PathKey, Source

BROKEN = Num(1)  # stands for an expression with a finding of its own


class Scope:
    """Collects findings while a spec is resolved. Nothing here raises for a user's mistake."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: list[Diagnostic] = []
        self._seen: set[Diagnostic] = set()
        self.dims: dict[str, Any] = source.data.get("dims") or {}
        self.flags: dict[str, Any] = source.data.get("flags") or {}
        self.kinds = {**dict.fromkeys(self.dims, INTEGER), **dict.fromkeys(self.flags, TRUTH)}
        self.dim_names: Collection[str] = self.dims  # those that a default may name
        self.inside = False  # of a block, where expressions may name its index

    def inherit(self, base: Model) -> None:
        """The dims and flags of a base spec may stand in expressions of this one."""
        self.kinds.update({dim.name: INTEGER for dim in base.dims})
        self.kinds.update({flag.name: TRUTH for flag in base.flags})
        self.dim_names = {*self.dims, *(dim.name for dim in base.dims)}

    def add(self, place: Place, message: str, code: str, hint: str = "") -> None:
        finding = Diagnostic(place, message, code, hint)
        if finding not in self._seen:  # the weights of a group are looked at for every block that has it
            self._seen.add(finding)
            self.found.append(finding)

    def place(self, *path: str | int) -> Place:
        return self.source.place(path)

    def key(self, *path: str | int) -> Place:
        return self.source.key(path)

    def identifier(
        self, place: Place, name: str, what: str, rule: Callable[[str], str] = bad_identifier
    ) -> None:
        problem = rule(name)
        if problem:
            self.add(place, f"{what} {quote(name)} {problem}", "bad-name", "choose another name")

    def size(self, path: PathKey, value: Any, known: Collection[str] | None = None) -> Expr:
        """An expression that yields an integer. `known`: only these names may stand in it."""
        return self._expression(path, value, INTEGER, known)

    def condition(self, path: PathKey, value: Any) -> Expr:
        """An expression that yields true or false."""
        return self._expression(path, value, TRUTH, None)

    def optional_condition(self, path: PathKey, value: Any) -> Expr | None:
        return None if value is None else self.condition(path, value)

    def _expression(self, path: PathKey, value: Any, wanted: str, known: Collection[str] | None) -> Expr:
        place = self.source.place(path)
        try:
            expr: Expr = Bool(value) if isinstance(value, bool) else parse(str(value))
        except ExprError as error:
            message = f"{quote(value)} is no expression: {error.message}"
            self.add(self._inside(place, str(value), error.offset), message, "expression")
            return BROKEN
        kinds = {**self.kinds, INDEX: INTEGER} if self.inside else self.kinds
        scope = kinds if known is None else known
        unknown = sorted(name for name in names(expr) if name not in scope)
        for name in unknown:
            what = "dim" if known is not None else "dim or flag"
            hint = suggest(name, scope) or "declare it"
            if name == INDEX:
                hint = "the index of a block stands in `at` and in shapes and conditions of its weights"
            if known is not None and name in self.flags:
                hint = "it is a flag; only dims may stand here"
            at = self._inside(place, str(value), str(value).find(name))
            self.add(at, f"unknown {what} {quote(name)}", "unknown-dim", hint)
        if unknown:
            return BROKEN
        try:
            got = kind(expr, kinds)
        except ExprError as error:
            self.add(place, error.message, "expression-type")
            return BROKEN
        if got not in (None, wanted):
            cure = (
                "compare it with something"
                if wanted == TRUTH
                else "a size is counted, a condition holds or not"
            )
            shown = str(value).lower() if isinstance(value, (bool, int)) else quote(value)
            self.add(place, f"{shown} is {got}, and {wanted} is needed here", "expression-type", cure)
            return BROKEN
        return expr

    def _inside(self, place: Place, text: str, offset: int) -> Place:
        """The column of a character of a value, where the value stands in the file as it is."""
        lines = self.source.text.split("\n", place.line)
        line = lines[place.line - 1] if place.line <= len(lines) else ""
        start = place.column - 1
        quoted = line[start : start + 1] in ("'", '"')
        if offset < 0 or "\n" in text or not line[start + quoted :].startswith(text):
            return place
        return Place(place.file, place.line, place.column + quoted + offset)
