"""What a manager says of every weight: what its runtime knows, and the facts of the spec that others need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gradgen.concrete import exists, size
from gradgen.diagnostics import ConfigError
from gradgen.expr import INDEX
from gradgen.model import Buffer, Model, Weight


class DiskPart(NamedTuple):
    """One tensor of a checkpoint: `weight[where]` is what it holds."""

    name: str
    where: tuple[int | slice, ...] = ()


class WeightRecord(NamedTuple):
    """One weight or buffer that exists in a configuration.

    `name` is its full checkpoint name in memory, `tied_to` the name of the owner of its tensor. `disk`: the tensors
    that it is on disk (none for a tied weight), so that
    `{part.name: tensor[part.where] for part in record.disk}` is what a checkpoint holds of it, and
    `tensor[part.where] = checkpoint[part.name]` reads it. `tp` is "sum", "avg", "none", or the sharded dimension.
    """

    name: str
    id: str
    block: str | None
    layer: int | None
    shape: tuple[int, ...]
    trainable: bool
    zero: bool
    may_be_absent: bool
    tied_to: str | None
    expert: int | None = None
    buffer: bool = False  # stored, without a gradient
    decay: bool = True
    group: str = "data"
    tp: str | int = "none"
    dtype: str | None = None
    accumulator: str | None = None
    rounding: str | None = None
    disk: tuple[DiskPart, ...] = ()


def records(
    native: Iterable[tuple[Any, ...]],
    model: Model,
    values: Mapping[str, int | bool],
    layers: Mapping[str, Iterable[int]],
) -> list[WeightRecord]:
    """Weights in spec order, with the facts of the spec; then buffers."""
    stacks = {block.id: block for block in model.blocks}
    declared: dict[tuple[str | None, str], Weight] = {(None, weight.id): weight for weight in model.weights}
    declared |= {(block.id, weight.id): weight for block in model.blocks for weight in block.weights}
    out = [_record(WeightRecord(*entry), declared, values) for entry in native]
    out += [_buffer(b, None, None, "", values) for b in model.buffers if exists(b, values)]
    for id, block in stacks.items():
        for layer in layers.get(id, ()) if block.buffers else ():
            env = {**values, INDEX: layer}
            prefix = block.name.replace("{i}", str(layer)) + "."
            out += [_buffer(b, id, layer, prefix, env) for b in block.buffers if exists(b, env)]
    return out


def refuse_other_dtypes(
    model: Model, values: Mapping[str, int | bool], dtype: str, accumulator: str | None, rounding: str
) -> None:
    """Raises ConfigError for a weight that wants another dtype or rounding than the manager's."""
    from gradgen.concrete import materialize

    weights = [*model.weights, *(weight for block in model.blocks for weight in block.weights)]
    wanting = {w.id for w in weights if w.facts.dtype or w.facts.accumulator or w.facts.rounding}
    if not wanting:
        return
    concrete = materialize(model, values)
    scopes = [(model.weights, concrete.weights)]
    scopes += [(model.blocks[kind.index].weights, kind.weights) for kind in concrete.blocks]
    own = {"dtype": dtype, "accumulator": accumulator or dtype, "rounding": rounding}
    for entries, present in scopes:
        for weight in present:
            facts = entries[weight.index].facts
            for key, has in own.items():
                wants = getattr(facts, key)
                if weight.trainable and wants not in (None, has):
                    message = f"weight '{weight.id}' wants {key} {wants}, and this manager has {has}"
                    cure = f"pass {key}='{wants}' for all weights"
                    raise ConfigError(f"{model.name}: {message}; {cure}: one manager has one {key}")


def _record(
    record: WeightRecord,
    declared: Mapping[tuple[str | None, str], Weight],
    values: Mapping[str, int | bool],
) -> WeightRecord:
    id, _, expert = record.id.partition(".")
    weight = declared[record.block, id]
    facts = weight.facts
    record = record._replace(
        expert=int(expert) if expert else None,
        decay=facts.decay,
        group=facts.group,
        tp=facts.tp,
        dtype=facts.dtype,
        accumulator=facts.accumulator,
        rounding=facts.rounding,
    )
    if record.tied_to is None:
        record = record._replace(disk=tuple(_disk(record, weight, values)))
    return record


def _disk(record: WeightRecord, weight: Weight, values: Mapping[str, int | bool]) -> Iterator[DiskPart]:
    facts = weight.facts
    env = values if record.layer is None else {**values, INDEX: record.layer}

    def name(text: str, expert: int | None) -> str:
        text = text.replace("{i}", str(record.layer))
        return text if expert is None else text.replace("{e}", str(expert))

    if not facts.parts:
        yield DiskPart(name(facts.disk, record.expert) if facts.disk else record.name)
        return
    stacked = "{e}" in facts.parts[0].name and record.expert is None
    for expert in range(record.shape[0]) if stacked else (record.expert,):
        begin = 0
        for part in facts.parts:
            end = begin + size(part.size, env, f"a part of {record.name}")
            cut = slice(begin, end)
            before = part.dim - 1 if stacked else part.dim
            first: tuple[int | slice, ...] = (expert,) if stacked and expert is not None else ()
            yield DiskPart(name(part.name, expert), (*first, *(slice(None),) * before, cut))
            begin = end


def _buffer(
    buffer: Buffer, block: str | None, layer: int | None, prefix: str, env: Mapping[str, int | bool]
) -> WeightRecord:
    shape = tuple(size(extent, env, f"the shape of buffer '{buffer.id}'") for extent in buffer.shape)
    name = prefix + buffer.name
    return WeightRecord(
        name, buffer.id, block, layer, shape, False, False, False, None, buffer=True, disk=(DiskPart(name),)
    )  # fmt: skip
