"""From plain data to a Model: names, ids, expressions, defaults and order. All errors of a spec at once."""

from __future__ import annotations

import os
from pathlib import Path

from gradgen.consistency import clashes, findings
from gradgen.diagnostics import Diagnostic, SpecError
from gradgen.identifiers import bad_model_name
from gradgen.model import Model, Preset, Requirement
from gradgen.repair import repaired
from gradgen.resolve_blocks import block, unused_groups
from gradgen.resolve_extends import base_of, extended
from gradgen.resolve_order import backward, strategies
from gradgen.resolve_quantities import dims, flags
from gradgen.resolve_weights import buffer, weight
from gradgen.schema import problems
from gradgen.scope import Scope
from gradgen.source import Source, load, load_text


def check(path: str | os.PathLike[str]) -> Model:
    """The model that a spec file describes.

    Raises UsageError for what is no readable file, SpecError with all findings for a wrong spec.
    """
    return check_source(load(Path(path) if os.fspath(path) else ""))  # Path("") is the current folder


def check_text(text: str, file: str = "<text>") -> Model:
    """The same for text; `file` is the name that messages show."""
    return check_source(load_text(text, file))


def check_source(source: Source) -> Model:
    """Structure, then meaning. A wrong structure is mended in a copy, so that one run shows all findings."""
    wrong = problems(source)
    if not wrong:
        return resolve(source)
    found = [problem.finding for problem in wrong if problem.finding]
    rest = repaired(source, wrong)
    if rest is not None:
        found += _model(rest)[1]
    raise SpecError(found, source.text)


def resolve(source: Source) -> Model:
    """The model that validated data describes. Raises SpecError."""
    model, found = _model(source)
    found = found or list(findings(model, source))
    if found:
        raise SpecError(found, source.text)
    return model


def _model(source: Source) -> tuple[Model, list[Diagnostic]]:
    """A model, and what is wrong with it: then it stands only for its names."""
    data = source.data
    scope = Scope(source)
    base = base_of(scope, check_source)
    name = str(data["model"])
    scope.identifier(scope.place("model"), name, "model", bad_model_name)
    model = Model(
        name=name,
        summary=str(data.get("summary", "")),
        dims=dims(scope),
        flags=flags(scope),
        require=tuple(
            Requirement(
                scope.condition(("require", i, "that"), entry["that"]),
                entry["because"],
                scope.place("require", i),
            )
            for i, entry in enumerate(data.get("require") or [])
        ),
        presets=tuple(
            Preset(name, tuple(values.items()), scope.key("presets", name))
            for name, values in (data.get("presets") or {}).items()
        ),
        weights=tuple(
            weight(scope, ("weights", id), id, entry) for id, entry in (data.get("weights") or {}).items()
        ),
        blocks=tuple(block(scope, id, entry) for id, entry in (data.get("blocks") or {}).items()),
        backward=backward(scope),
        strategies=strategies(scope),
        file=source.file,
        buffers=tuple(
            buffer(scope, ("buffers", id), id, entry) for id, entry in (data.get("buffers") or {}).items()
        ),
    )
    unused_groups(scope)
    if base is not None:
        model = extended(scope, base, model)
    elif "extends" not in data and not data.get("weights") and not data.get("blocks"):
        hint = "declare `weights:` or `blocks:`"
        scope.add(scope.place(), "the spec has no weights", "no-weights", hint)
    return model, [*scope.found, *clashes(model)]
