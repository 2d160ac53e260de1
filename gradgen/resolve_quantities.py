"""Dims and flags: what a configuration supplies."""

from __future__ import annotations

from gradgen.diagnostics import plain, quote
from gradgen.expr import names
from gradgen.identifiers import bad_quantity
from gradgen.model import Dim, Flag
from gradgen.scope import Scope


def flags(scope: Scope) -> tuple[Flag, ...]:
    out = []
    for name, entry in scope.flags.items():
        place = scope.key("flags", name)
        scope.identifier(place, name, "flag", bad_quantity)
        if name in scope.dims:
            line = scope.key("dims", name).line
            message = f"flag {quote(name)} has the name of a dim"
            scope.add(place, message, "duplicate-name", f"the dim stands in line {line}")
        by_type = tuple((entry.get("hf_model_types") or {}).items())
        out.append(Flag(name, entry.get("hf"), entry.get("default"), place, by_type))
    return tuple(out)


def dims(scope: Scope) -> tuple[Dim, ...]:
    """In an order in which each default follows what it needs: spec order where that is one."""
    parsed: dict[str, Dim] = {}
    for name, entry in scope.dims.items():
        place = scope.key("dims", name)
        scope.identifier(place, name, "dim", bad_quantity)
        default = entry.get("default")
        expr = None if default is None else scope.size(("dims", name, "default"), default, scope.dim_names)
        keys = entry.get("hf")
        keys = keys if isinstance(keys, list) else [keys]
        parsed[name] = Dim(name, keys[0], expr, place, entry.get("min", 1), tuple(keys[1:]))
    needs = {
        name: sorted(names(dim.default) & parsed.keys()) if dim.default else []
        for name, dim in parsed.items()
    }
    order: dict[str, Dim] = {}
    for root in parsed:
        trail = {root: None}  # in order
        while trail:
            name = next(reversed(trail))
            waiting = next((other for other in needs[name] if other not in order), None)
            if waiting is None:
                order.setdefault(name, parsed[name])
                del trail[name]
            elif waiting in trail:
                path = list(trail)
                cycle = [plain(other) for other in (*path[path.index(waiting) :], waiting)]
                shown = " -> ".join(cycle if len(cycle) < 12 else [*cycle[:10], "...", cycle[-1]])
                message = f"the default of dim {quote(waiting)} depends on itself: {shown}"
                scope.add(
                    parsed[waiting].place, message, "cyclic-default", "leave out the default of one of them"
                )
                needs[name] = []
            else:
                trail[waiting] = None
    return tuple(order.values())
