"""Weights and buffers: expressions parsed, short forms written out, names checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradgen.diagnostics import quote
from gradgen.expr import Bool, Expr, Not, Num
from gradgen.identifiers import bad_checkpoint_name
from gradgen.model import Buffer, Facts, Part, Shard, Tie, Weight
from gradgen.scope import Scope
from gradgen.source import PathKey


@dataclass(frozen=True)
class Prefix:
    """What stands before the checkpoint names of a block's weights, in memory and on disk."""

    memory: str = ""
    disk: str = ""

    def on_disk(self, name: str) -> str:
        return f"{self.disk}.{name}" if self.disk else name


OUTSIDE = Prefix()


def weight(scope: Scope, path: PathKey, id: str, data: dict[str, Any], prefix: Prefix = OUTSIDE) -> Weight:
    place = scope.key(*path)
    scope.identifier(place, id, "weight")
    experts = scope.size((*path, "experts"), data["experts"]) if "experts" in data else None
    if checkpoint_name(scope, (*path, "name"), data["name"], index=False, experts=experts is not None):
        _expert_name(scope, (*path, "name"), data["name"], id, experts)
    trainable = scope.optional_condition((*path, "trainable"), data.get("trainable"))
    tie = _tie(scope, (*path, "tied_to"), data.get("tied_to"))
    if tie is not None and experts is not None:
        message = f"weight {quote(id)} is one weight an expert, and those cannot be tied"
        scope.add(tie.place, message, "tie", "leave out `experts` or `tied_to`")
    return Weight(
        id=id,
        shape=tuple(extent(scope, (*path, "shape", i), size) for i, size in enumerate(data["shape"])),
        name=data["name"],
        zero=_zero(scope, (*path, "zero"), data.get("zero", "always")),
        place=place,
        when=scope.optional_condition((*path, "when"), data.get("when")),
        trainable=None if trainable == Bool(True) else trainable,
        tied_to=tie,
        uses=uses(scope, path, f"weight {quote(id)}", data),
        may_be_absent=data.get("may_be_absent", False),
        shard=_shard(data.get("shard", "flat")),
        experts=experts,
        facts=_facts(scope, path, id, data, prefix),
    )


def buffer(scope: Scope, path: PathKey, id: str, data: dict[str, Any]) -> Buffer:
    place = scope.key(*path)
    scope.identifier(place, id, "buffer")
    checkpoint_name(scope, (*path, "name"), data["name"], index=False)
    shape = tuple(extent(scope, (*path, "shape", i), size) for i, size in enumerate(data["shape"]))
    when = scope.optional_condition((*path, "when"), data.get("when"))
    return Buffer(id, shape, data["name"], place, when)


def uses(scope: Scope, path: PathKey, what: str, data: dict[str, Any]) -> Expr | None:
    if "uses" not in data:
        return None
    expr = scope.size((*path, "uses"), data["uses"])
    if isinstance(expr, Num) and expr.value < 1:
        message = f"'uses' of {what} is {expr.value}"
        scope.add(scope.place(*path, "uses"), message, "too-small", "it must be at least 1")
    return expr


def checkpoint_name(scope: Scope, path: PathKey, name: str, index: bool, experts: bool = False) -> bool:
    problem = bad_checkpoint_name(name, index, experts)
    if problem:
        scope.add(scope.place(*path), f"the checkpoint name {quote(name)} {problem}", "bad-checkpoint-name")
    return not problem


def _expert_name(scope: Scope, path: PathKey, name: str, id: str, experts: Expr | None) -> None:
    if experts is not None and "{e}" not in name:
        message = f"the name of weight {quote(id)} has no {{e}}, so its experts would share it"
        scope.add(scope.place(*path), message, "no-index", "put {e} where the expert's index stands")


def extent(scope: Scope, path: PathKey, value: Any) -> Expr:
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
    block = value.get("block")
    at = scope.size((*path, "at"), value.get("at", 0)) if block is not None else None
    if block is None and "at" in value:
        hint = "name the owner's block by `block`"
        scope.add(scope.place(*path, "at"), "a tie has an index and no block", "tie", hint)
    return Tie(value["weight"], when, scope.place(*path, "weight"), block, at)


def _shard(value: Any) -> Shard:
    return Shard(value) if isinstance(value, str) else Shard("rows", value["rows"])


def _facts(scope: Scope, path: PathKey, id: str, data: dict[str, Any], prefix: Prefix) -> Facts:
    tp = data.get("tp", "none")
    if isinstance(tp, dict):
        tp = int(tp["sharded"])
        if tp >= len(data["shape"]):
            message = f"weight {quote(id)} of {len(data['shape'])} dimensions is sharded along dimension {tp}"
            scope.add(scope.place(*path, "tp", "sharded"), message, "parts", "dimensions count from 0")
    name = data.get("disk")
    if name is not None:
        checkpoint_name(scope, (*path, "disk"), name, index=False, experts="experts" in data)
    elif prefix.disk != prefix.memory:
        name = data["name"]
    parts = _parts(scope, path, id, data, prefix)
    if parts and "disk" in data:
        message = f"weight {quote(id)} has a name on disk and parts with names of their own"
        scope.add(scope.place(*path, "parts"), message, "parts", "leave one of the two out")
    return Facts(
        disk=None if name is None else prefix.on_disk(name),
        parts=parts,
        decay=data.get("decay", True),
        group=data.get("group", "data"),
        tp=tp,
        dtype=data.get("dtype"),
        accumulator=data.get("accumulator"),
        rounding=data.get("rounding"),
    )


def _parts(scope: Scope, path: PathKey, id: str, data: dict[str, Any], prefix: Prefix) -> tuple[Part, ...]:
    out: list[Part] = []
    for i, entry in enumerate(data.get("parts") or ()):
        at = (*path, "parts", i)
        checkpoint_name(scope, (*at, "name"), entry["name"], index=False, experts=True)
        stacked = "{e}" in entry["name"]
        dim = entry.get("dim", 1 if stacked and "experts" not in data else 0)
        size = scope.size((*at, "size"), entry["size"])
        least = 1 if stacked and "experts" not in data else 0
        if not least <= dim < len(data["shape"]):
            message = f"a part of weight {quote(id)} cuts dimension {dim}, of {len(data['shape'])}"
            hint = "with {e} the first dimension counts experts" if least and not dim else "they count from 0"
            scope.add(scope.place(*at), message, "parts", hint)
            continue
        out.append(Part(prefix.on_disk(entry["name"]), size, dim))
    if len({(part.dim, "{e}" in part.name) for part in out}) > 1:
        message = f"the parts of weight {quote(id)} cut it in different ways"
        hint = "all have one `dim`, and all or none have {e}"
        scope.add(scope.place(*path, "parts"), message, "parts", hint)
        return ()
    return tuple(out)
