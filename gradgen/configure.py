"""From a model and numbers to concrete sizes: defaults filled in, requirements checked, ties decided."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradgen.checkpoint_names import Named, clash
from gradgen.diagnostics import ConfigError, UsageError, did_you_mean, quote, suggest
from gradgen.expr import INDEX, Expr, ExprError, evaluate, names, to_text
from gradgen.model import Block, Dim, Flag, Model, Shard, Weight

MAX_DIM = 2**31
MAX_LAYERS = 2**20  # of a stack whose blocks are told apart one by one


@dataclass(frozen=True)
class Config:
    model: str
    values: Mapping[str, int | bool]  # every dim and flag, in spec order


@dataclass(frozen=True)
class ConcreteWeight:
    id: str
    name: str
    shape: tuple[int, ...]
    numel: int
    zeroed: bool
    trainable: bool
    tie: str | None
    uses: int
    uses_declared: bool
    may_be_absent: bool
    shard: Shard
    index: int  # among the declared weights of its block, or of the model


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


def configure(model: Model, values: Mapping[str, Any]) -> Config:
    """Fills defaults and checks requirements. Raises ConfigError with everything that is wrong."""
    known = [dim.name for dim in model.dims] + [flag.name for flag in model.flags]
    unknown = [name for name in values if name not in known]
    problems = [f"unknown dim or flag {quote(name)}; {suggest(str(name), known)}" for name in unknown]
    env: dict[str, int | bool] = {}
    entries: list[Flag | Dim] = [*model.flags, *model.dims]
    for entry in entries:
        try:
            if entry.name in values:
                check = check_flag if isinstance(entry, Flag) else check_dim
                env[entry.name] = check(entry.name, values[entry.name])
            elif isinstance(entry, Dim):
                value = _default(entry, env, values)
                if value is not None:
                    env[entry.name] = value
            elif entry.default is None:
                raise ConfigError(f"flag '{entry.name}' is missing")
            else:
                env[entry.name] = entry.default
        except ConfigError as error:
            problems.append(str(error))
    for requirement in model.require if not problems else ():
        text = to_text(requirement.that)
        try:
            if not evaluate(requirement.that, env):
                used = ", ".join(f"{name} = {env[name]}" for name in known if name in names(requirement.that))
                problems.append(f"{requirement.because} ({text} does not hold for {used.lower()})")
        except ExprError as error:
            problems.append(f"cannot evaluate the requirement {text}: {error}")
    if problems:
        raise ConfigError(f"{model.name}: " + "; ".join(problems))
    return Config(model.name, {name: env[name] for name in known})


def check_dim(name: str, value: Any) -> int:
    """`value` as a dim. Raises ConfigError for what is no integer (NumPy's are) or out of range."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"dim '{name}' must be an integer, got {quote(value)}") from None
    if not 1 <= number <= MAX_DIM:
        raise ConfigError(f"dim '{name}' must be between 1 and {MAX_DIM}, got {_shown(number)}")
    return number


def check_flag(name: str, value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # NumPy's is no bool
        return bool(value)
    raise ConfigError(f"flag '{name}' must be true or false, got {quote(value)}")


def _shown(number: int) -> str:
    return str(number) if number.bit_length() < 128 else f"a number of {number.bit_length()} bits"


def _default(dim: Dim, env: Mapping[str, int | bool], values: Mapping[str, Any]) -> int | None:
    """None where a dim that the default needs is wrong or missing: that is said already."""
    if dim.default is None:
        raise ConfigError(f"dim '{dim.name}' is missing")
    if not names(dim.default) <= set(env):
        return None
    text = to_text(dim.default)
    try:
        return check_dim(dim.name, evaluate(dim.default, env))
    except ExprError as error:
        raise ConfigError(f"the default of dim '{dim.name}', {text}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{error} (its default, {text})") from error


def preset(model: Model, name: str) -> dict[str, int | bool]:
    """The values of a preset. Raises UsageError that lists them."""
    for candidate in model.presets:
        if candidate.name == name:
            return dict(candidate.values)
    known = [candidate.name for candidate in model.presets]
    cure = f"presets: {', '.join(known)}" if known else "its spec has none"
    choice = did_you_mean(name, known)
    raise UsageError(f"{model.name} has no preset {quote(name)}; {choice + ' ' if choice else ''}{cure}")


def from_hf(model: Model, config: Any) -> dict[str, int | bool]:
    """Dims and flags from a transformers configuration or its dict.

    Keys that are missing or None are left out, so that `configure` takes their defaults.
    """
    if not isinstance(config, Mapping) and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    elif isinstance(config, Mapping) and isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]

    def read(key: str | None) -> Any:
        if key is None:
            return None
        return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

    values: dict[str, int | bool] = {}
    model_type = str(read("model_type"))
    for dim in model.dims:
        values[dim.name] = read(dim.hf)
    for flag in model.flags:
        values[flag.name] = dict(flag.hf_model_types).get(model_type, read(flag.hf))
    return {name: value for name, value in values.items() if value is not None}


def missing_hf(model: Model, values: Mapping[str, Any]) -> list[str]:
    """What `values` lack and nothing gives a default, by the key that a transformers configuration would have."""
    entries: list[Flag | Dim] = [*model.dims, *model.flags]
    lacking = [e for e in entries if e.default is None and e.name not in values]
    return [f"{e.hf} ({e.name})" if e.hf else e.name for e in lacking]


def materialize(model: Model, config: Config) -> ConcreteModel:
    """Every weight that exists in `config`, with its sizes. Raises ConfigError naming weight and dim."""
    env = config.values
    present = {w.id for w in model.weights if w.when is None or _bool(w.when, env, w.id)}
    weights = tuple(_weight(w, i, env, present) for i, w in enumerate(model.weights) if w.id in present)
    blocks = []
    for index, block in enumerate(model.blocks):
        layers = _layers(model, block, env)
        kinds: dict[tuple[ConcreteWeight, ...], Sequence[int]] = {}
        if any(INDEX in names(expr) for weight in block.weights for expr in expressions(weight)):
            _one_by_one(model, block, layers)
            found: dict[tuple[ConcreteWeight, ...], list[int]] = {}
            for layer in layers:
                found.setdefault(_weights(block, {**env, INDEX: layer}), []).append(layer)
            kinds.update((weights, tuple(indices)) for weights, indices in found.items() or [((), [])])
        else:
            kinds[_weights(block, env)] = layers
        blocks += [
            ConcreteBlock(block.id, block.name, indices, block.uses or 0, weights, index, kind, len(kinds))
            for kind, (weights, indices) in enumerate(kinds.items())
        ]
    concrete = ConcreteModel(model.name, weights, tuple(blocks))
    _check_ties(concrete)
    _check_names(concrete)
    return concrete


def expressions(weight: Weight) -> list[Expr]:
    """Those that may name the index of a block."""
    when = weight.tied_to.when if weight.tied_to else None
    conditions = (weight.when, weight.zero, weight.trainable, when)
    return [*weight.shape, *(expr for expr in conditions if expr is not None)]


def _layers(model: Model, block: Block, env: Mapping[str, int | bool]) -> Sequence[int]:
    """The indices of a stack that exist."""
    what = f"{model.name}: block '{block.id}'"
    count = _int(block.count, env, f"count of block '{block.id}'")
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


def _weights(block: Block, env: Mapping[str, int | bool]) -> tuple[ConcreteWeight, ...]:
    here = {w.id for w in block.weights if w.when is None or _bool(w.when, env, w.id)}
    return tuple(_weight(w, i, env, here) for i, w in enumerate(block.weights) if w.id in here)


def _check_ties(concrete: ConcreteModel) -> None:
    for weights in (concrete.weights, *(block.weights for block in concrete.blocks)):
        by_id = {weight.id: weight for weight in weights}
        for weight in weights:
            owner = by_id[weight.tie] if weight.tie else weight
            if owner.shape != weight.shape:
                shapes = f"{list(weight.shape)} is tied to '{owner.id}' of shape {list(owner.shape)}"
                raise ConfigError(f"{concrete.name}: weight '{weight.id}' of shape {shapes}")


def _check_names(concrete: ConcreteModel) -> None:
    entries = [Named(weight.name, range(1), weight.id) for weight in concrete.weights]
    for block in concrete.blocks:
        entries += [Named(f"{block.name}.{weight.name}", block.layers, weight.id) for weight in block.weights]
    found = clash(entries)
    if found:
        a, b, name = found
        message = f"weights '{a.owner}' and '{b.owner}' have one checkpoint name, {quote(name)}"
        raise ConfigError(f"{concrete.name}: {message}")


def _weight(weight: Weight, index: int, env: Mapping[str, int | bool], present: set[str]) -> ConcreteWeight:
    shape = tuple(_int(size, env, f"the shape of weight '{weight.id}'") for size in weight.shape)
    numel = 1
    for size, text in zip(shape, weight.shape, strict=True):
        if size < 0:
            raise ConfigError(f"weight '{weight.id}' has {to_text(text)} = {size} in its shape")
        numel *= size
    if numel * 8 >= 2**63:
        raise ConfigError(f"weight '{weight.id}' of shape {list(shape)} has more bytes than 63 bits count")
    tie = None
    if weight.tied_to is not None and (
        weight.tied_to.when is None or _bool(weight.tied_to.when, env, weight.id)
    ):
        tie = weight.tied_to.weight
        if tie not in present:
            message = f"weight '{weight.id}' is tied to '{tie}', which this configuration does not have"
            raise ConfigError(message)
    return ConcreteWeight(
        weight.id,
        weight.name,
        shape,
        numel,
        zeroed=weight.zero is not None and _bool(weight.zero, env, weight.id),
        trainable=weight.trainable is None or _bool(weight.trainable, env, weight.id),
        tie=tie,
        uses=weight.uses or 0,
        uses_declared=weight.uses is not None,
        may_be_absent=weight.may_be_absent,
        shard=weight.shard,
        index=index,
    )


def _int(expr: Expr, env: Mapping[str, int | bool], what: str) -> int:
    try:
        return int(evaluate(expr, env))
    except ExprError as error:
        raise ConfigError(f"{what}, {to_text(expr)}: {error}") from error


def _bool(expr: Expr, env: Mapping[str, int | bool], id: str, what: str = "weight") -> bool:
    try:
        return bool(evaluate(expr, env))
    except ExprError as error:
        raise ConfigError(f"a condition of {what} '{id}', {to_text(expr)}: {error}") from error
