"""A model as canonical JSON and back: what a built package carries so that planning needs no YAML."""

from __future__ import annotations

import json
from typing import Any

from gradgen.expr import Expr, parse, to_text
from gradgen.model import (
    Backward,
    Block,
    Dim,
    Flag,
    Model,
    Place,
    Preset,
    Requirement,
    Shard,
    Strategy,
    Tie,
    Weight,
)

FORMAT = 1


def model_to_json(model: Model) -> str:
    """Canonical text: the same model gives the same bytes."""
    data = {
        "format": FORMAT,
        "name": model.name,
        "summary": model.summary,
        "file": model.file,
        "dims": [_clean(name=d.name, hf=d.hf, default=_text(d.default), at=_at(d.place)) for d in model.dims],
        "flags": [
            _clean(
                name=f.name,
                hf=f.hf,
                default=f.default,
                model_types=[list(t) for t in f.hf_model_types] or None,
                at=_at(f.place),
            )
            for f in model.flags
        ],
        "require": [_clean(that=to_text(r.that), because=r.because, at=_at(r.place)) for r in model.require],
        "presets": [_clean(name=p.name, values=dict(p.values), at=_at(p.place)) for p in model.presets],
        "weights": [_weight(w) for w in model.weights],
        "blocks": [
            _clean(
                id=b.id,
                count=to_text(b.count),
                name=b.name,
                uses=b.uses,
                exists=list(b.at) if isinstance(b.at, tuple) else _text(b.at),
                weights=[_weight(w) for w in b.weights],
                at=_at(b.place),
            )
            for b in model.blocks
        ],
        "backward": [
            _clean(weight=b.weight, blocks=list(b.blocks) or None, at=_at(b.place)) for b in model.backward
        ],
        "strategies": [
            _clean(
                id=s.id, blocks=s.blocks, non_blocks=s.non_blocks, collective=s.collective, at=_at(s.place)
            )
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
        return Place(file, *entry["at"])

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
            tied_to=Tie(tie["weight"], _parse(tie.get("when")), place(tie)) if tie else None,
            uses=w.get("uses"),
            may_be_absent=w.get("may_be_absent", False),
            shard=Shard(*w.get("shard", ("flat", 1))),
        )

    return Model(
        name=data["name"],
        summary=data["summary"],
        dims=tuple(Dim(d["name"], d.get("hf"), _parse(d.get("default")), place(d)) for d in data["dims"]),
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
                b.get("uses"),
                _exists(b.get("exists")),
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
    )


def _weight(w: Weight) -> dict[str, Any]:
    tie = w.tied_to
    return _clean(
        id=w.id,
        shape=[to_text(size) for size in w.shape],
        name=w.name,
        zero=_text(w.zero),
        when=_text(w.when),
        trainable=_text(w.trainable),
        tied_to=_clean(weight=tie.weight, when=_text(tie.when), at=_at(tie.place)) if tie else None,
        uses=w.uses,
        may_be_absent=w.may_be_absent or None,
        shard=[w.shard.kind, w.shard.rows] if w.shard != Shard() else None,
        at=_at(w.place),
    )


def _clean(**entries: Any) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}


def _exists(value: str | list[int] | None) -> Expr | tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) else _parse(value)


def _at(place: Place) -> list[int]:
    return [place.line, place.column]


def _text(expr: Expr | None) -> str | None:
    return None if expr is None else to_text(expr)


def _parse(text: str | None) -> Expr | None:
    return None if text is None else parse(text)
