"""Weights and blocks: expressions parsed, short forms written out, names checked."""

from __future__ import annotations

from typing import Any

from gradgen.diagnostics import quote
from gradgen.expr import Bool, Expr, Not, Num, short
from gradgen.identifiers import bad_checkpoint_name
from gradgen.model import Block, Shard, Tie, Weight
from gradgen.scope import Scope
from gradgen.source import PathKey


def weight(scope: Scope, path: PathKey, id: str, data: dict[str, Any]) -> Weight:
    place = scope.key(*path)
    scope.identifier(place, id, "weight")
    _checkpoint_name(scope, (*path, "name"), data["name"], index=False)
    trainable = scope.optional_condition((*path, "trainable"), data.get("trainable"))
    return Weight(
        id=id,
        shape=tuple(_extent(scope, (*path, "shape", i), size) for i, size in enumerate(data["shape"])),
        name=data["name"],
        zero=_zero(scope, (*path, "zero"), data.get("zero", "always")),
        place=place,
        when=scope.optional_condition((*path, "when"), data.get("when")),
        trainable=None if trainable == Bool(True) else trainable,
        tied_to=_tie(scope, (*path, "tied_to"), data.get("tied_to")),
        uses=data.get("uses"),
        may_be_absent=data.get("may_be_absent", False),
        shard=_shard(data.get("shard", "flat")),
    )


def block(scope: Scope, id: str, data: dict[str, Any]) -> Block:
    path: PathKey = ("blocks", id)
    place = scope.key(*path)
    scope.identifier(place, id, "block")
    if id in (scope.source.data.get("weights") or {}):
        line = scope.key("weights", id).line
        message = f"block {quote(id)} has the id of a weight outside the blocks"
        scope.add(place, message, "duplicate-name", f"the weight stands in line {line}")
    count = scope.size((*path, "count"), data["count"])
    name = data["name"]
    if _checkpoint_name(scope, (*path, "name"), name, index=True) and "{i}" not in name and count != Num(1):
        blocks = f"blocks, {short(count)} of them,"
        message = f"the name of block {quote(id)} has no {{i}}, so its {blocks} would share names"
        scope.add(scope.place(*path, "name"), message, "no-index", "put {i} where the index stands")
    if isinstance(data["count"], int) and data["count"] < 1:
        message = f"block {quote(id)} has a count of {data['count']}"
        scope.add(scope.place(*path, "count"), message, "too-small", "a stack has at least one block")
    scope.inside = True
    at = _at(scope, (*path, "at"), data.get("at"), count)
    weights = tuple(weight(scope, (*path, "weights", w), w, entry) for w, entry in data["weights"].items())
    scope.inside = False
    return Block(id, count, name, weights, place, data.get("uses"), at)


def _at(scope: Scope, path: PathKey, value: Any, count: Expr) -> Expr | tuple[int, ...] | None:
    """Which blocks of a stack exist."""
    if not isinstance(value, list):
        at = scope.optional_condition(path, value)
        return None if at == Bool(True) else at
    for i, index in enumerate(value):
        if index in value[:i]:
            scope.add(scope.place(*path, i), f"the index {index} twice", "index", "leave one out")
        elif isinstance(count, Num) and index >= count.value:
            hint = "indices are 0 to count - 1"
            scope.add(scope.place(*path, i), f"the index {index} in a stack of {count.value}", "index", hint)
    return tuple(sorted(value))


def _checkpoint_name(scope: Scope, path: PathKey, name: str, index: bool) -> bool:
    problem = bad_checkpoint_name(name, index)
    if problem:
        scope.add(scope.place(*path), f"the checkpoint name {quote(name)} {problem}", "bad-checkpoint-name")
    return not problem


def _extent(scope: Scope, path: PathKey, value: Any) -> Expr:
    expr = scope.size(path, value)
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        scope.add(scope.place(*path), f"a size of {value}", "too-small", "sizes are 0 or more")
    return expr


def _zero(scope: Scope, path: PathKey, value: Any) -> Expr | None:
    if value in ("always", "never"):
        return Bool(True) if value == "always" else None
    if "when" in value:
        return scope.condition((*path, "when"), value["when"])
    return Not(scope.condition((*path, "unless"), value["unless"]))


def _tie(scope: Scope, path: PathKey, value: Any) -> Tie | None:
    if value is None:
        return None
    if isinstance(value, str):
        return Tie(value, None, scope.place(*path))
    when = scope.optional_condition((*path, "when"), value.get("when"))
    return Tie(value["weight"], when, scope.place(*path, "weight"))


def _shard(value: Any) -> Shard:
    return Shard(value) if isinstance(value, str) else Shard("rows", value["rows"])
