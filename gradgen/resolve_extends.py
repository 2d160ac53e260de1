"""Specs over another spec: what they take over from it, and low-rank adapters around its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradgen import paths
from gradgen.diagnostics import SpecError, UsageError, quote, suggest
from gradgen.expr import Bool, Expr
from gradgen.model import Backward, Block, Facts, Model, Place, Weight
from gradgen.scope import BROKEN, Scope
from gradgen.source import Source, load

TAKEN_OVER = ("groups", "weights", "blocks", "buffers", "backward")


def base_of(scope: Scope, check: Callable[[Source], Model]) -> Model | None:
    """The model that a spec extends. Its dims and flags may stand in this spec's expressions."""
    data = scope.source.data
    if "extends" not in data:
        if "lora" in data:
            hint = "name the base by `extends`"
            scope.add(scope.key("lora"), "lora wraps the weights of another spec", "extends", hint)
        return None
    place = scope.place("extends")
    for key in (key for key in TAKEN_OVER if key in data):
        message = f"the spec has {key} of its own and extends another"
        scope.add(scope.key(key), message, "extends", "the base spec says it all; write a spec of its own")
    path = _path(scope.source.file, data["extends"])
    if path is None:
        message, hint = f"there is no spec {quote(data['extends'])}", "it is looked for beside this one"
        scope.add(place, message, "extends", hint + " and among those that come with gradgen")
        return None
    try:
        source = load(path)
        if isinstance(source.data, dict) and "extends" in source.data:
            message = f"{quote(data['extends'])} extends a spec itself"
            scope.add(place, message, "extends", "extend that one")
            return None
        base = check(source)
    except SpecError as error:
        count = len(error.diagnostics)
        said = f"the spec {quote(data['extends'])} has {count} finding{'s' if count > 1 else ''} of its own"
        scope.add(place, said, "extends", f"see `gradgen check {path.name}`")
        return None
    except UsageError as error:
        scope.add(place, f"cannot read the spec {quote(data['extends'])}: {error}", "extends")
        return None
    scope.inherit(base)
    return base


def _path(file: str, name: str) -> Path | None:
    beside = Path(file).parent / f"{name}.yaml"
    for path in (beside, paths.specs_dir() / f"{name}.yaml"):
        if path.is_file() and not (Path(file).is_file() and path.samefile(file)):
            return path
    return None


def extended(scope: Scope, base: Model, own: Model) -> Model:
    """`own`, whose weights are those of `base`, with adapters where the spec asks for them."""
    for kind, entries, others in (
        ("dim", own.dims, base.dims),
        ("flag", own.flags, base.flags),
        ("preset", own.presets, base.presets),
    ):
        taken = {entry.name: entry.place for entry in others}
        for entry in entries:
            if entry.name in taken:
                message = f"{kind} {quote(entry.name)} is one of the base spec as well"
                other = taken[entry.name]
                hint = f"it stands in {Path(other.file).name}, line {other.line}"
                scope.add(entry.place, message, "duplicate-name", hint)
    model = replace(
        own,
        dims=(*base.dims, *own.dims),
        flags=(*base.flags, *own.flags),
        require=(*base.require, *own.require),
        presets=(*base.presets, *own.presets),
        weights=base.weights,
        blocks=base.blocks,
        backward=base.backward,
        buffers=base.buffers,
        strategies=own.strategies if "strategies" in scope.source.data else base.strategies,
    )
    lora = scope.source.data.get("lora")
    return model if lora is None else _Adapters(scope, model, lora).model()


class _Adapters:
    """LoRA, as peft builds it."""

    def __init__(self, scope: Scope, base: Model, data: dict[str, Any]) -> None:
        self.scope, self.base = scope, base
        self.rank = scope.size(("lora", "rank"), data["rank"])
        self.place = scope.key("lora")
        self.prefix = data.get("prefix", "base_model.model")
        self.adapter = data.get("adapter", "default")
        self.transposed = data.get("transposed", False)
        self.targets = {name: scope.place("lora", "targets", i) for i, name in enumerate(data["targets"])}
        groups = (base.weights, *(block.weights for block in base.blocks))
        known = {weight.id for weights in groups for weight in weights}
        for name, place in self.targets.items():
            if name not in known:
                hint = suggest(name, sorted(known))
                scope.add(place, f"lora names the unknown weight {quote(name)}", "unknown-weight", hint)

    def model(self) -> Model:
        weights = self.around(self.base.weights, "")
        ids = {weight.id for weight in weights}
        return replace(
            self.base,
            weights=tuple(replace(w, name=f"{self.prefix}.{w.name}") for w in weights),
            blocks=tuple(self.block(block) for block in self.base.blocks),
            backward=tuple(step for item in self.base.backward for step in self.backward(item, ids)),
            buffers=tuple(replace(b, name=f"{self.prefix}.{b.name}") for b in self.base.buffers),
        )

    def block(self, block: Block) -> Block:
        weights = self.around(block.weights, block.name + ".")
        return replace(block, name=f"{self.prefix}.{block.name}", weights=weights)

    def backward(self, item: Backward, ids: Collection[str]) -> Iterator[Backward]:
        for suffix in ("_lora_b", "_lora_a"):
            if item.weight is not None and item.weight + suffix in ids:
                yield Backward(item.weight + suffix, (), item.place)
        yield item

    def around(self, weights: Sequence[Weight], before: str) -> tuple[Weight, ...]:
        """Frozen weights under their wrapped names, each target followed by its adapter."""
        modules = {w.name.removesuffix(".weight") for w in weights if w.id in self.targets}
        out: list[Weight] = []
        for weight in weights:
            path, _, leaf = weight.name.rpartition(".")
            disk = weight.facts.disk or (None if weight.facts.parts else before + weight.name)
            frozen = replace(
                weight,
                name=f"{path}.base_layer.{leaf}" if path in modules else weight.name,
                trainable=Bool(False),
                uses=None,
                may_be_absent=False,
                facts=replace(weight.facts, disk=disk, dtype=None, accumulator=None, rounding=None),
            )
            out.append(frozen)
            if weight.id in self.targets and self.fits(weight, self.targets[weight.id]):
                rows, columns = weight.shape[::-1] if self.transposed else weight.shape
                out.append(self.adapter_of(weight, "a", path, before, (self.rank, columns)))
                out.append(self.adapter_of(weight, "b", path, before, (rows, self.rank)))
        return tuple(out)

    def fits(self, weight: Weight, place: Place) -> bool:
        if weight.experts is None and len(weight.shape) == 2 and weight.name.endswith(".weight"):
            return self.rank is not BROKEN
        message = f"lora cannot wrap weight {quote(weight.id)}"
        hint = "adapters go around matrices whose names end in .weight, not around experts"
        self.scope.add(place, message, "lora", hint)
        return False

    def adapter_of(
        self, weight: Weight, which: str, path: str, before: str, shape: tuple[Expr, Expr]
    ) -> Weight:
        id = f"{weight.id}_lora_{which}"
        self.scope.identifier(self.targets[weight.id], id, "weight")
        module = f"{path}.lora_{which.upper()}"
        disk = f"{self.prefix}.{before}{module}.weight"
        name = f"{module}.{self.adapter}.weight"
        return Weight(
            id, shape, name, None, self.targets[weight.id], weight.when, facts=Facts(disk=disk)
        )  # fmt: skip
