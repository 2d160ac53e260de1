"""A model in one configuration: every weight that exists, with its sizes, by kinds of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gradgen.checkpoint_names import Named, clash
from gradgen.diagnostics import ConfigError, quote
from gradgen.expr import INDEX, Expr, ExprError, evaluate, names, to_text
from gradgen.model import Block, Buffer, Model, Shard, Weight

MAX_LAYERS = 2**20  # of a stack whose blocks are told apart one by one
MAX_EXPERTS = 2**16
OUTSIDE = ""  # the scope of weights outside the blocks

Env = Mapping[str, "int | bool"]


@dataclass(frozen=True)
class ConcreteWeight:
    id: str  # "gate_proj.3" of an expert
    name: str
    shape: tuple[int, ...]
    numel: int
    zeroed: bool
    trainable: bool
    tie: str | None  # id of the owner
    uses: int
    uses_declared: bool
    may_be_absent: bool
    shard: Shard
    index: int  # among the declared weights of its block, or of the model
    tie_block: str | None = None  # that the owner is in; None: the same, or outside as this weight is
    tie_layer: int = 0
    expert: int | None = None


@dataclass(frozen=True)
class ConcreteBlock:
    """The blocks of a stack that have equal weights: all of them, or one of several kinds."""

    id: str
    name: str
    layers: Sequence[int]  # their indices, ascending; a range where all of a stack are alike
    uses: int
    weights: tuple[ConcreteWeight, ...]
    index: int  # of the stack in the spec
    kind: int = 0  # number of this kind in its stack
    kinds: int = 1  # of the stack

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def unit(self) -> str:
        """What layouts and plans call it: `decoder`, or `decoder.1` where a stack has several kinds."""
        return self.id if self.kinds == 1 else f"{self.id}.{self.kind}"


@dataclass(frozen=True)
class ConcreteModel:
    name: str
    weights: tuple[ConcreteWeight, ...]
    blocks: tuple[ConcreteBlock, ...]  # kinds, those of a stack in the order of their first layers

    def find(self, block: str, layer: int, id: str) -> ConcreteWeight | None:
        """A weight of one block, or outside the blocks."""
        if block == OUTSIDE:
            return next((weight for weight in self.weights if weight.id == id), None)
        for kind in self.blocks:
            if kind.id == block and layer in kind.layers:
                return next((weight for weight in kind.weights if weight.id == id), None)
        return None


def materialize(model: Model, env: Env) -> ConcreteModel:
    """Every weight that exists for these values. Raises ConfigError naming weight and dim."""
    weights = _weights(model.weights, env, None)
    blocks: list[ConcreteBlock] = []
    for index, block in enumerate(model.blocks):
        layers = _layers(model, block, env)
        kinds: dict[tuple[ConcreteWeight, ...], Sequence[int]] = {}
        inside = {weight.id for weight in block.weights}
        if any(INDEX in names(expr) for weight in block.weights for expr in expressions(weight)):
            _one_by_one(model, block, layers)
            found: dict[tuple[ConcreteWeight, ...], list[int]] = {}
            for layer in layers:
                here = _weights(block.weights, {**env, INDEX: layer}, inside)
                found.setdefault(here, []).append(layer)
            kinds.update((here, tuple(indices)) for here, indices in found.items() or [((), [])])
        else:
            kinds[_weights(block.weights, env, inside)] = layers
        uses = _uses(block.uses, env, f"block '{block.id}'")
        blocks += [
            ConcreteBlock(block.id, block.name, indices, uses, here, index, kind, len(kinds))
            for kind, (here, indices) in enumerate(kinds.items())
        ]
    concrete = ConcreteModel(model.name, weights, tuple(blocks))
    _check_ties(concrete)
    _check_names(model, concrete, env)
    return concrete


def expressions(weight: Weight) -> list[Expr]:
    """Those that may name the index of a block."""
    tie = weight.tied_to
    owner = (tie.when, tie.at) if tie is not None else ()
    conditions = (weight.when, weight.zero, weight.trainable, *owner)
    return [*weight.shape, *(expr for expr in conditions if expr is not None)]


def exists(entry: Weight | Buffer, env: Env) -> bool:
    return entry.when is None or _bool(entry.when, env, entry.id)


def _layers(model: Model, block: Block, env: Env) -> Sequence[int]:
    """The indices of a stack that exist."""
    what = f"{model.name}: block '{block.id}'"
    count = size(block.count, env, f"count of block '{block.id}'")
    if count < 0:
        raise ConfigError(f"{model.name}: the count of block '{block.id}' is {count}")
    if block.at is None:
        return range(count)
    if isinstance(block.at, tuple):
        beyond = [index for index in block.at if index >= count]
        if beyond:
            raise ConfigError(f"{what} has the index {beyond[0]} under `at`, and its count is {count}")
        return block.at
    _one_by_one(model, block, range(count))
    return tuple(i for i in range(count) if _bool(block.at, {**env, INDEX: i}, block.id, "block"))


def _one_by_one(model: Model, block: Block, layers: Sequence[int]) -> None:
    if len(layers) > MAX_LAYERS:
        message = f"block '{block.id}' has {len(layers)} layers, which differ by their index"
        raise ConfigError(f"{model.name}: {message}; at most {MAX_LAYERS} can be told apart")


def _weights(weights: Sequence[Weight], env: Env, inside: set[str] | None) -> tuple[ConcreteWeight, ...]:
    """Those of one block, whose declared ids are `inside`, or those outside the blocks."""
    present = {weight.id for weight in weights if exists(weight, env)}
    return tuple(
        one
        for index, weight in enumerate(weights)
        if weight.id in present
        for one in _weight(weight, index, env, present, inside)
    )


def _weight(
    weight: Weight, index: int, env: Env, present: set[str], inside: set[str] | None
) -> Iterator[ConcreteWeight]:
    what = f"weight '{weight.id}'"
    shape = tuple(size(extent, env, f"the shape of {what}") for extent in weight.shape)
    numel = 1
    for extent, text in zip(shape, weight.shape, strict=True):
        if extent < 0:
            raise ConfigError(f"{what} has {to_text(text)} = {extent} in its shape")
        numel *= extent
    if numel * 8 >= 2**63:
        raise ConfigError(f"{what} of shape {list(shape)} has more bytes than 63 bits count")
    for dim in {part.dim for part in weight.facts.parts}:
        sizes = [size(part.size, env, f"a part of {what}") for part in weight.facts.parts]
        if min(sizes) < 0 or sum(sizes) != shape[dim]:
            raise ConfigError(f"{what} has {shape[dim]} in dimension {dim}, and its parts {sizes}")
    tie, scope, layer = _tie(weight, env, present, inside)
    one = ConcreteWeight(
        weight.id,
        weight.name,
        shape,
        numel,
        zeroed=weight.zero is not None and _bool(weight.zero, env, weight.id),
        trainable=weight.trainable is None or _bool(weight.trainable, env, weight.id),
        tie=tie,
        uses=_uses(weight.uses, env, what),
        uses_declared=weight.uses is not None,
        may_be_absent=weight.may_be_absent,
        shard=weight.shard,
        index=index,
        tie_block=scope,
        tie_layer=layer,
    )
    if weight.experts is None:
        yield one
        return
    experts = size(weight.experts, env, f"the experts of {what}")
    if not 0 <= experts <= MAX_EXPERTS:
        raise ConfigError(f"{what} has {experts} experts; there may be up to {MAX_EXPERTS}")
    for expert in range(experts):
        name = weight.name.replace("{e}", str(expert))
        yield replace(one, id=f"{weight.id}.{expert}", name=name, expert=expert)


def _tie(
    weight: Weight, env: Env, present: set[str], inside: set[str] | None
) -> tuple[str | None, str | None, int]:
    """Id, block and layer of the owner."""
    tie = weight.tied_to
    if tie is None or (tie.when is not None and not _bool(tie.when, env, weight.id)):
        return None, None, 0
    if tie.block is not None:
        layer = size(tie.at, env, f"the owner's index of weight '{weight.id}'") if tie.at is not None else 0
        return tie.weight, tie.block, layer
    if inside is not None and tie.weight not in inside:
        return tie.weight, OUTSIDE, 0
    if tie.weight not in present:
        message = f"weight '{weight.id}' is tied to '{tie.weight}', which this configuration does not have"
        raise ConfigError(message)
    return tie.weight, None, 0


def _uses(expr: Expr | None, env: Env, what: str) -> int:
    if expr is None:
        return 0
    uses = size(expr, env, f"the uses of {what}")
    if not 1 <= uses <= MAX_LAYERS:
        raise ConfigError(f"{what} has {uses} uses; there are between 1 and {MAX_LAYERS}")
    return uses


def _check_ties(concrete: ConcreteModel) -> None:
    scopes = [(OUTSIDE, 0, concrete.weights)]
    scopes += [(kind.id, kind.layers[0], kind.weights) for kind in concrete.blocks if kind.layers]
    for block, layer, weights in scopes:
        by_id = {weight.id: weight for weight in weights}
        for weight in weights:
            if weight.tie is None:
                continue
            owner, where = by_id.get(weight.tie), f"'{weight.tie}'"
            if weight.tie_block is not None:
                owner = concrete.find(weight.tie_block, weight.tie_layer, weight.tie)
                if weight.tie_block != OUTSIDE:
                    where += f" of block '{weight.tie_block}' layer {weight.tie_layer}"
            problem = _tie_problem(weight, owner, where)
            if problem:
                at = f" of block '{block}' layer {layer}" if block else ""
                raise ConfigError(f"{concrete.name}: weight '{weight.id}'{at} {problem}")


def _tie_problem(weight: ConcreteWeight, owner: ConcreteWeight | None, where: str) -> str:
    if owner is None:
        return f"is tied to {where}, which this configuration does not have"
    if owner.tie is not None:
        return f"is tied to {where}, which is tied itself"
    if owner.shape != weight.shape:
        return f"of shape {list(weight.shape)} is tied to {where} of shape {list(owner.shape)}"
    if weight.trainable and not owner.trainable:
        return f"is trainable and tied to {where}, which is frozen: its gradient would have no place"
    return ""


def _check_names(model: Model, concrete: ConcreteModel, env: Env) -> None:
    entries = [Named(weight.name, range(1), weight.id) for weight in concrete.weights]
    entries += [Named(buffer.name, range(1), buffer.id) for buffer in model.buffers if exists(buffer, env)]
    for block in concrete.blocks:
        entries += [Named(f"{block.name}.{weight.name}", block.layers, weight.id) for weight in block.weights]
    for stack in model.blocks if not any(kind.count > MAX_LAYERS for kind in concrete.blocks) else ():
        layers = sorted(i for kind in concrete.blocks if kind.id == stack.id for i in kind.layers)
        for buffer in stack.buffers:
            here = [i for i in layers if exists(buffer, {**env, INDEX: i})]
            entries.append(Named(f"{stack.name}.{buffer.name}", here, buffer.id))
    found = clash(entries)
    if found:
        a, b, name = found
        message = f"weights '{a.owner}' and '{b.owner}' have one checkpoint name, {quote(name)}"
        raise ConfigError(f"{concrete.name}: {message}")


def size(expr: Expr, env: Env, what: str) -> int:
    try:
        return int(evaluate(expr, env))
    except ExprError as error:
        raise ConfigError(f"{what}, {to_text(expr)}: {error}") from error


def _bool(expr: Expr, env: Env, id: str, what: str = "weight") -> bool:
    try:
        return bool(evaluate(expr, env))
    except ExprError as error:
        raise ConfigError(f"a condition of {what} '{id}', {to_text(expr)}: {error}") from error
