"""A model as canonical JSON and back: what a built package carries so that planning needs no YAML."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from gradgen.expr import Expr, parse, to_text
from gradgen.model import (
    Backward,
    Block,
    Buffer,
    Dim,
    Facts,
    Flag,
    Model,
    Part,
    Place,
    Preset,
    Requirement,
    Shard,
    Strategy,
    Tie,
    Weight,
)

FORMAT = 1
At = Callable[[Place], "list[int | str]"]


def model_to_json(model: Model) -> str:
    """Canonical text: the same model gives the same bytes."""

    def at(place: Place) -> list[int | str]:
        """A base spec's places name its file."""
        return [place.line, place.column, *([place.file] if place.file != model.file else [])]

    data = {
        "format": FORMAT,
        "name": model.name,
        "summary": model.summary,
        "file": model.file,
        "dims": [
            _clean(
                name=d.name,
                hf=d.hf,
                default=_text(d.default),
                min=d.min if d.min != 1 else None,
                hf_others=list(d.hf_others) or None,
                at=at(d.place),
            )
            for d in model.dims
        ],
        "flags": [
            _clean(
                name=f.name,
                hf=f.hf,
                default=f.default,
                model_types=[list(t) for t in f.hf_model_types] or None,
                at=at(f.place),
            )
            for f in model.flags
        ],
        "require": [_clean(that=to_text(r.that), because=r.because, at=at(r.place)) for r in model.require],
        "presets": [_clean(name=p.name, values=dict(p.values), at=at(p.place)) for p in model.presets],
        "weights": [_weight(w, at) for w in model.weights],
        "buffers": [_buffer(b, at) for b in model.buffers],
        "blocks": [
            _clean(
                id=b.id,
                count=to_text(b.count),
                name=b.name,
                uses=_text(b.uses),
                exists=list(b.at) if isinstance(b.at, tuple) else _text(b.at),
                weights=[_weight(w, at) for w in b.weights],
                buffers=[_buffer(x, at) for x in b.buffers] or None,
                at=at(b.place),
            )
            for b in model.blocks
        ],
        "backward": [
            _clean(weight=b.weight, blocks=list(b.blocks) or None, at=at(b.place)) for b in model.backward
        ],
        "strategies": [
            _clean(id=s.id, blocks=s.blocks, non_blocks=s.non_blocks, collective=s.collective, at=at(s.place))
            for s in model.strategies
        ],
    }
    return json.dumps(data, indent=1, sort_keys=False, ensure_ascii=True) + "\n"


def model_from_json(text: str) -> Model:
    """The inverse of model_to_json. Raises ValueError for another format."""
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(
            f"model.json has format {data.get('format')!r}; this gradgen reads {FORMAT}: build it again"
        )
    file = data["file"]

    def place(entry: dict[str, Any]) -> Place:
        line, column, *other = entry["at"]
        return Place(other[0] if other else file, line, column)

    def weight(w: dict[str, Any]) -> Weight:
        tie = w.get("tied_to")
        return Weight(
            id=w["id"],
            shape=tuple(map(parse, w["shape"])),
            name=w["name"],
            zero=_parse(w.get("zero")),
            place=place(w),
            when=_parse(w.get("when")),
            trainable=_parse(w.get("trainable")),
            tied_to=Tie(
                tie["weight"], _parse(tie.get("when")), place(tie), tie.get("block"), _parse(tie.get("layer"))
            )
            if tie
            else None,
            uses=_parse(w.get("uses")),
            may_be_absent=w.get("may_be_absent", False),
            shard=Shard(*w.get("shard", ("flat", 1))),
            experts=_parse(w.get("experts")),
            facts=_facts(w.get("facts", {})),
        )

    def buffer(b: dict[str, Any]) -> Buffer:
        return Buffer(b["id"], tuple(map(parse, b["shape"])), b["name"], place(b), _parse(b.get("when")))

    return Model(
        name=data["name"],
        summary=data["summary"],
        dims=tuple(
            Dim(
                d["name"],
                d.get("hf"),
                _parse(d.get("default")),
                place(d),
                d.get("min", 1),
                tuple(d.get("hf_others", ())),
            )
            for d in data["dims"]
        ),
        flags=tuple(
            Flag(
                f["name"],
                f.get("hf"),
                f.get("default"),
                place(f),
                tuple((t, v) for t, v in f.get("model_types", ())),
            )
            for f in data["flags"]
        ),
        require=tuple(Requirement(parse(r["that"]), r["because"], place(r)) for r in data["require"]),
        presets=tuple(Preset(p["name"], tuple(p["values"].items()), place(p)) for p in data["presets"]),
        weights=tuple(map(weight, data["weights"])),
        blocks=tuple(
            Block(
                b["id"],
                parse(b["count"]),
                b["name"],
                tuple(map(weight, b["weights"])),
                place(b),
                _parse(b.get("uses")),
                _exists(b.get("exists")),
                tuple(map(buffer, b.get("buffers", ()))),
            )
            for b in data["blocks"]
        ),
        backward=tuple(
            Backward(b.get("weight"), tuple(b.get("blocks", ())), place(b)) for b in data["backward"]
        ),
        strategies=tuple(
            Strategy(s["id"], s["blocks"], s["non_blocks"], s["collective"], place(s))
            for s in data["strategies"]
        ),
        file=file,
        buffers=tuple(map(buffer, data["buffers"])),
    )


def _facts(data: dict[str, Any]) -> Facts:
    parts = tuple(Part(name, parse(size), dim) for name, size, dim in data.get("parts", ()))
    return Facts(**{**data, "parts": parts})


def _facts_data(facts: Facts) -> dict[str, Any] | None:
    """What is not the default."""
    data = {f.name: getattr(facts, f.name) for f in fields(facts) if getattr(facts, f.name) != f.default}
    if facts.parts:
        data["parts"] = [[part.name, to_text(part.size), part.dim] for part in facts.parts]
    return data or None


def _buffer(b: Buffer, at: At) -> dict[str, Any]:
    shape = [to_text(size) for size in b.shape]
    return _clean(id=b.id, shape=shape, name=b.name, when=_text(b.when), at=at(b.place))


def _weight(w: Weight, at: At) -> dict[str, Any]:
    tie = w.tied_to
    return _clean(
        id=w.id,
        shape=[to_text(size) for size in w.shape],
        name=w.name,
        zero=_text(w.zero),
        when=_text(w.when),
        trainable=_text(w.trainable),
        tied_to=_clean(
            weight=tie.weight, when=_text(tie.when), block=tie.block, layer=_text(tie.at), at=at(tie.place)
        )
        if tie
        else None,
        uses=_text(w.uses),
        may_be_absent=w.may_be_absent or None,
        shard=[w.shard.kind, w.shard.rows] if w.shard != Shard() else None,
        experts=_text(w.experts),
        facts=_facts_data(w.facts),
        at=at(w.place),
    )


def _clean(**entries: Any) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}


def _exists(value: str | list[int] | None) -> Expr | tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) else _parse(value)


def _text(expr: Expr | None) -> str | None:
    return None if expr is None else to_text(expr)


def _parse(text: str | None) -> Expr | None:
    return None if text is None else parse(text)
