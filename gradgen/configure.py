"""From a model and numbers to concrete sizes: defaults filled in, requirements checked, ties decided."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradgen import concrete
from gradgen.concrete import ConcreteBlock as ConcreteBlock
from gradgen.concrete import ConcreteModel as ConcreteModel
from gradgen.concrete import ConcreteWeight as ConcreteWeight
from gradgen.diagnostics import ConfigError, UsageError, did_you_mean, quote, suggest
from gradgen.expr import ExprError, evaluate, names, to_text
from gradgen.model import Dim, Flag, Model

MAX_DIM = 2**31


@dataclass(frozen=True)
class Config:
    model: str
    values: Mapping[str, int | bool]  # every dim and flag, in spec order


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
                value = values[entry.name]
                if isinstance(entry, Flag):
                    env[entry.name] = check_flag(entry.name, value)
                else:
                    env[entry.name] = check_dim(entry.name, value, entry.min)
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


def check_dim(name: str, value: Any, least: int = 1) -> int:
    """`value` as a dim. Raises ConfigError for what is no integer (NumPy's are) or out of range."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"dim '{name}' must be an integer, got {quote(value)}") from None
    if not least <= number <= MAX_DIM:
        raise ConfigError(f"dim '{name}' must be between {least} and {MAX_DIM}, got {_shown(number)}")
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
        return check_dim(dim.name, evaluate(dim.default, env), dim.min)
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

    values: dict[str, int | bool | None] = {}
    model_type = str(read("model_type"))
    for dim in model.dims:
        found = [value for value in map(read, (dim.hf, *dim.hf_others)) if value is not None]
        values[dim.name] = found[0] if found else None
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
    return concrete.materialize(model, config.values)
