"""What the Python templates show of a model: its stub and its package file."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterable, Sequence
from typing import Any

from gradgen import cpp
from gradgen.model import Model, Weight

WRITTEN = "written: list[str] | None = None"


def python_string(text: str) -> str:
    """A string literal in printable ASCII."""
    return json.dumps(text)


def docstring(text: str) -> str:
    """Text for a place inside triple quotes."""
    return cpp.comment(text).replace("\\", "/").replace('"', "'")


def python_context(model: Model) -> dict[str, Any]:
    types = cpp.type_names(block.id for block in model.blocks)
    ids = [strategy.id for strategy in model.strategies]
    return {
        "strategy_ids": "("
        + "".join(python_string(name) + ", " for name in ids).rstrip(" " if len(ids) == 1 else ", ")
        + ")",
        "doc_summary": docstring(model.summary) or f"Gradient managers of {model.name}.",
        "doc_source": docstring(model.file),
        "typing_names": "Any, Literal, overload" if len(model.blocks) > 1 else "Any, Literal",
        "literals": {
            "strategies": _literal(ids),
            "presets": _literal(preset.name for preset in model.presets),
            "weights": _literal(weight.id for weight in model.weights),
        },
        "config_fields": _config_fields(model),
        "config_arguments": _config_arguments(model),
        "stub_blocks": [
            {"type": types[block.id], "lines": _attributes(block.weights)} for block in model.blocks
        ],
        "block_methods": _block_methods([(block.id, types[block.id]) for block in model.blocks]),
    }


def _literal(names: Iterable[str]) -> str:
    shown = ", ".join(map(python_string, names))
    return f"Literal[{shown}]" if shown else "str"


def _attribute(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is not None and not keyword.iskeyword(name)


def _config_fields(model: Model) -> list[str]:
    names = [(dim.name, "int") for dim in model.dims] + [(flag.name, "bool") for flag in model.flags]
    return [f"{name}: {kind}" for name, kind in names if _attribute(name)]


def _config_arguments(model: Model) -> list[str]:
    """Keyword-only, in the spec's order; what has a default may be left out."""
    names = [(dim.name, "int", dim.default is not None) for dim in model.dims]
    names += [(flag.name, "bool", flag.default is not None) for flag in model.flags]
    shown = [
        f"{name}: {kind}" + (" = ..." if optional else "") + ","
        for name, kind, optional in names
        if _attribute(name)
    ]
    others = ["**others: int | bool,"] if len(shown) < len(names) else []
    return [*(["*,"] if shown else []), *shown, *others]


def _attributes(weights: Sequence[Weight]) -> list[str]:
    """One attribute a weight; an id that Python reserves is reached as block["id"]."""
    lines = []
    for weight in weights:
        if _attribute(weight.id):
            lines.append(f"{weight.id}: {'Tensor' if weight.experts is None else 'list[Tensor]'}")
        else:
            lines.append(f"# block[{python_string(weight.id)}]: Tensor")
    return [*lines, "..."] if all(line.startswith("#") for line in lines) else lines


def _block_methods(blocks: Sequence[tuple[str, str]]) -> list[str]:
    """The block methods: the block's id may be left out when there is only one kind."""
    if not blocks:
        return []
    names = _literal(name for name, _ in blocks)
    optional = " | None = None" if len(blocks) == 1 else ""
    several = len(blocks) > 1
    lines = []
    for method in ("block_full", "block_shard"):
        for name, kind in blocks:
            block = f"block: Literal[{python_string(name)}]{optional}"
            lines += [
                *(["@overload"] if several else []),
                f"def {method}(self, layer: int, {block}) -> {kind}Block: ...",
            ]
    return [
        *lines,
        f"def notify_block(self, layer: int, block: {names}{optional}, {WRITTEN}) -> None: ...",
    ]
