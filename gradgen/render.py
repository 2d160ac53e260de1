"""Renders a model: `{path within the package's folder: text}`. Pure and deterministic: same spec, same bytes.

Templates hold layout only. What they show is spelled before they run, by cpp.py, render_view.py and
render_python.py; spec text is data to them and is never rendered as a template.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gradgen import cpp
from gradgen.model import Model, Place
from gradgen.render_python import python_context, python_string
from gradgen.render_view import cpp_context
from gradgen.serialize import model_to_json

NATIVE = ("manager.h", "manager.cpp", "module.cpp")
PYTHON = ("__init__.pyi",)


def render(model: Model) -> dict[str, str]:
    """The text of a model's package. Paths are relative to the package's folder, `<model>/`."""
    source = portable_path(model.file)
    model = _map_places(model, _portable, file=source)
    context = {
        "source": cpp.comment(source),
        "summary": cpp.comment(model.summary) or f"Gradient managers of {cpp.comment(model.name)}",
        **cpp_context(model, meaning_hash(model)),
        **python_context(model),
    }
    files = {name: _template(name).render(context) for name in (*NATIVE, *PYTHON)}
    files["model.json"] = model_to_json(model).rstrip("\n") + "\n"
    files["py.typed"] = ""
    files["__init__.py"] = _template("__init__.py").render(context, text_hash=python_string(text_hash(files)))
    return dict(sorted(files.items()))


def text_hash(files: dict[str, str]) -> str:
    """16 hex digits over names and texts: what a built module must have been compiled from."""
    digest = hashlib.sha256()
    for name, text in sorted(files.items()):
        for part in (name.encode(), text.encode()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def meaning_hash(model: Model) -> str:
    """16 hex digits over what a spec means, wherever its text stands. Ranks compare it at start."""
    return hashlib.sha256(
        model_to_json(_map_places(model, lambda place: Place("", 0, 0), file="")).encode()
    ).hexdigest()[:16]


def portable_path(file: str) -> str:
    """`specs/llama.yaml` for a file in a folder called specs, else its name: the same on every machine."""
    path = PurePath(file.replace("\\", "/"))
    return f"specs/{path.name}" if path.parent.name == "specs" else path.name


def _portable(place: Place) -> Place:
    """Of the spec, or of the one that it extends."""
    return Place(portable_path(place.file), place.line, place.column)


def _map_places(model: Model, change: Any, file: str) -> Model:
    """The model with every Place changed."""

    def walk(value: Any) -> Any:
        if isinstance(value, Place):
            return change(value)
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "place"):
            return dataclasses.replace(
                value, **{f.name: walk(getattr(value, f.name)) for f in dataclasses.fields(value)}
            )
        return value

    parts = {f.name: walk(getattr(model, f.name)) for f in dataclasses.fields(model)}
    return dataclasses.replace(model, **parts | {"file": file})


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Templates of the package only; a name that a template uses and nobody defines is an error."""
    return Environment(
        loader=FileSystemLoader(templates_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # nosec: C++ and Python, spelled by cpp.py
    )


def templates_folder() -> Path:
    from gradgen.paths import templates_dir

    return Path(templates_dir())


def _template(name: str) -> Any:
    return environment().get_template(name + ".j2")
