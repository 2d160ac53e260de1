"""A spec with its structural errors taken out, so that names and expressions are checked in the same run.

The result is never compiled: `resolve.check` raises what is found in it together with the structural errors.
"""

from __future__ import annotations

import copy
from typing import Any

from gradgen.schema import VERSION, Problem, schema
from gradgen.source import PathKey, Source

_PLAIN: dict[str, Any] = {"gradgen": VERSION, "model": "model", "summary": ""}
_STAND_INS: dict[str, dict[str, Any]] = {
    "weights": {"shape": [], "name": "x"},
    "buffers": {"shape": [], "name": "x"},
    "blocks": {"count": 1, "name": "x", "weights": {}},
    "strategies": {"blocks": "full", "collective": "reduce_scatter"},
    "require": {"that": True, "because": "x"},
}


def repaired(source: Source, problems: list[Problem]) -> Source | None:
    """None where so much is missing that nothing true can be said about the rest."""
    data = copy.deepcopy(source.data)
    for problem in problems:
        if not _mend(data, problem.path):
            return None
    return Source(source.file, source.text, data, source.places, source.keys)


def _mend(data: Any, path: PathKey) -> bool:
    if len(path) < 2:
        key = path[0] if path else None
        if key in _PLAIN:
            data[key] = _PLAIN[str(key)]
        elif key is not None and key not in schema()["properties"]:
            del data[key]
        else:
            return False
        return True
    if path[0] == "backward":
        data["backward"][path[1]] = None
        return True
    if path[0] in ("lora", "extends"):
        return False
    depth = 4 if len(path) >= 4 and path[0] == "blocks" and path[2] in ("weights", "buffers") else 2
    stand_in = _STAND_INS.get(str(path[depth - 2]), {})
    if path[0] == "groups" and len(path) > 2:
        depth, stand_in = 3, _STAND_INS["weights"]
    group = data
    for key in path[: depth - 1]:
        group = group[key]
    name = path[depth - 1]
    if len(path) == depth or not isinstance(group[name], dict):
        group[name] = copy.deepcopy(stand_in)
    elif path[depth] in stand_in:
        group[name][path[depth]] = copy.deepcopy(stand_in[str(path[depth])])
    else:
        group[name].pop(path[depth], None)
    return True
