"""Stacks of blocks: which of their indices exist, and the groups of weights that they share with others."""

from __future__ import annotations

from typing import Any

from gradgen.diagnostics import quote, suggest
from gradgen.expr import Bool, Expr, Num, short
from gradgen.model import Block, Weight
from gradgen.resolve_weights import Prefix, buffer, checkpoint_name, uses, weight
from gradgen.scope import Scope
from gradgen.source import PathKey


def block(scope: Scope, id: str, data: dict[str, Any]) -> Block:
    path: PathKey = ("blocks", id)
    place = scope.key(*path)
    scope.identifier(place, id, "block")
    if id in (scope.source.data.get("weights") or {}):
        line = scope.key("weights", id).line
        message = f"block {quote(id)} has the id of a weight outside the blocks"
        scope.add(place, message, "duplicate-name", f"the weight stands in line {line}")
    count = scope.size((*path, "count"), data["count"])
    for key in ("name", "disk"):
        name = data.get(key)
        if name is None:
            continue
        if checkpoint_name(scope, (*path, key), name, index=True) and "{i}" not in name and count != Num(1):
            blocks = f"blocks, {short(count)} of them,"
            message = f"the name of block {quote(id)} has no {{i}}, so its {blocks} would share names"
            scope.add(scope.place(*path, key), message, "no-index", "put {i} where the index stands")
    if isinstance(data["count"], int) and data["count"] < 1:
        message = f"block {quote(id)} has a count of {data['count']}"
        scope.add(scope.place(*path, "count"), message, "too-small", "a stack has at least one block")
    visits = uses(scope, path, f"block {quote(id)}", data)
    scope.inside = True
    at = _at(scope, (*path, "at"), data.get("at"), count)
    weights = _weights(scope, path, id, data, Prefix(data["name"], data.get("disk", data["name"])))
    buffers = tuple(
        buffer(scope, (*path, "buffers", b), b, entry) for b, entry in (data.get("buffers") or {}).items()
    )
    scope.inside = False
    return Block(id, count, data["name"], weights, place, visits, at, buffers)


def unused_groups(scope: Scope) -> None:
    """Looks at the groups that no block has: what is wrong with them is said all the same."""
    data = scope.source.data
    scope.inside = True
    for group, weights in (data.get("groups") or {}).items():
        scope.identifier(scope.key("groups", group), group, "group")
        for id, entry in weights.items():
            weight(scope, ("groups", group, id), id, entry)
    scope.inside = False


def _weights(
    scope: Scope, path: PathKey, id: str, data: dict[str, Any], prefix: Prefix
) -> tuple[Weight, ...]:
    out: list[Weight] = []
    for i, item in enumerate(data.get("use") or ()):
        out += _used(scope, (*path, "use", i), item, prefix)
    own = data.get("weights") or {}
    if "weights" not in data and "use" not in data:
        message = f"block {quote(id)} has no 'weights'"
        scope.add(scope.key(*path), message, "missing-key", "add `weights:` or `use:`")
    out += [weight(scope, (*path, "weights", w), w, entry, prefix) for w, entry in own.items()]
    seen: dict[str, Weight] = {}
    for one in out:
        other = seen.setdefault(one.id, one)
        if other is not one:
            message = f"block {quote(id)} has the weight {quote(one.id)} twice"
            hint = f"the other stands in line {other.place.line}; tell groups apart by `as`"
            scope.add(scope.key(*path), message, "duplicate-name", hint)
    return tuple(seen.values())


def _used(scope: Scope, path: PathKey, item: Any, prefix: Prefix) -> list[Weight]:
    """The weights of a group, under the ids and names that they have in a block."""
    groups = scope.source.data.get("groups") or {}
    entry = {"group": item} if isinstance(item, str) else item
    name = str(entry["group"])
    if name not in groups:
        hint = suggest(name, list(groups)) or "declare it under `groups`"
        scope.add(scope.place(*path), f"there is no group {quote(name)}", "group", hint)
        return []
    ids, names = entry.get("as"), entry.get("name")
    if names is not None and not checkpoint_name(scope, (*path, "name"), names, index=False):
        return []
    weights = groups[name]
    out = []
    for id, data in weights.items():
        data = dict(data)
        for key in ("name", "disk"):
            if names and key in data:
                data[key] = f"{names}.{data[key]}"
        if names and "parts" in data:
            data["parts"] = [{**part, "name": f"{names}.{part['name']}"} for part in data["parts"]]
        tie = data.get("tied_to")
        owner = tie.get("weight") if isinstance(tie, dict) else tie
        if ids and owner in weights:
            data["tied_to"] = {**(tie if isinstance(tie, dict) else {}), "weight": f"{ids}_{owner}"}
        out.append(weight(scope, ("groups", name, id), f"{ids}_{id}" if ids else id, data, prefix))
    return out


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
