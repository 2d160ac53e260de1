"""The order in which gradients become ready, and the strategies."""

from __future__ import annotations

from typing import Any

from gradgen.diagnostics import did_you_mean, plain, quote
from gradgen.model import Backward, Strategy
from gradgen.scope import Scope

DEFAULT_STRATEGIES = (
    ("unsharded", "full", "full", "reduce_scatter"),
    ("sharded", "sharded", "full", "reduce_scatter"),
    ("sharded_all_to_all", "sharded", "full", "all_to_all"),
    ("replicated", "full", "full", "all_reduce"),
    ("fully_sharded", "sharded", "sharded", "all_to_all"),
)


def backward(scope: Scope) -> tuple[Backward, ...]:
    """As declared, or the reverse of the declarations: weights outside the blocks, then blocks."""
    data = scope.source.data
    known = {"weight": list(data.get("weights") or {}), "block": list(data.get("blocks") or {})}
    if "backward" not in data:
        place = scope.place()
        forward = [Backward(w, (), place) for w in known["weight"]]
        forward += [Backward(None, ids, place) for ids in _together(data.get("blocks") or {})]
        return tuple(forward[::-1])
    out: list[Backward] = []
    seen: dict[tuple[str, str], int] = {}
    meant: set[tuple[str, str]] = set()  # by items with a finding: not missing as well
    ids = {what: set(names) for what, names in known.items()}
    for i, item in enumerate(data["backward"]):
        if item is None:
            continue
        what, other = ("weight", "block") if isinstance(item, str) else ("block", "weight")
        place = scope.place("backward", i)
        good: list[str] = []
        for name in _names(item):
            if name not in ids[what]:
                hint = did_you_mean(name, known[what])
                if name in ids[other]:
                    meant.add((other, name))
                    hint = f"write {plain(name)}"
                    if what == "weight":
                        hint = f"it is a block: write {{block: {plain(name)}}}"
                elif hint:
                    meant.add((what, hint.split("'")[1]))
                scope.add(place, f"backward names the unknown {what} {quote(name)}", "unknown-weight", hint)
            elif (what, name) in seen:
                hint = f"item {seen[what, name]} says it already; declare `uses` for several contributions"
                scope.add(place, f"backward names {what} {quote(name)} twice", "backward-order", hint)
            else:
                seen[what, name] = i + 1
                good.append(name)
        if good:
            out.append(
                Backward(good[0], (), place) if what == "weight" else Backward(None, tuple(good), place)
            )
    if None not in data["backward"]:
        for what, names in known.items():
            for name in (name for name in names if (what, name) not in seen and (what, name) not in meant):
                item = plain(name) if what == "weight" else f"{{block: {plain(name)}}}"
                message = f"backward does not name {what} {quote(name)}"
                hint = f"put {item} where its gradients become ready"
                scope.add(scope.key("backward"), message, "backward-order", hint)
    return tuple(out)


def _names(item: Any) -> list[str]:
    """The ids that an item of `backward` names."""
    if isinstance(item, str):
        return [item]
    return [str(name) for name in item["block"]] if isinstance(item["block"], list) else [str(item["block"])]


def _together(blocks: dict[str, Any]) -> list[tuple[str, ...]]:
    """Ids of blocks, those with one checkpoint name in one group, where the first of them stands."""
    groups: dict[str, list[str]] = {}
    for id, entry in blocks.items():
        groups.setdefault(str(entry["name"]), []).append(id)
    return [tuple(ids) for ids in groups.values()]


def strategies(scope: Scope) -> tuple[Strategy, ...]:
    data = scope.source.data
    if "strategies" not in data:
        return tuple(Strategy(*entry, scope.place()) for entry in DEFAULT_STRATEGIES)
    out = []
    for id, entry in data["strategies"].items():
        place = scope.key("strategies", id)
        scope.identifier(place, id, "strategy")
        non_blocks = entry.get("non_blocks", "full")
        if entry["collective"] == "all_reduce" and "sharded" in (entry["blocks"], non_blocks):
            at = scope.place("strategies", id, "collective")
            message = f"strategy {quote(id)} shards gradients, and all_reduce leaves whole ones on every rank"
            scope.add(
                at, message, "strategy", "use reduce_scatter or all_to_all, or make both placements full"
            )
        out.append(Strategy(id, entry["blocks"], non_blocks, entry["collective"], place))
    return tuple(out)
