"""From a transformers configuration to facts: the model on the meta device, and built again with keys changed.

Only classes of the installed transformers are used: a configuration that asks for code of its own is refused. Nothing is
downloaded and no weight gets memory.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from gradgen.infer_config import said
from gradgen.infer_facts import Facts, InferError, Parameter, Switch, Variant
from gradgen.infer_module import buffers_of, parameters_of
from gradgen.infer_stacks import structure

LAYER_KEYS = [
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "depth",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
]
_PASSIVE = (
    "token_id",
    "token_ids",
    "token_index",
    "_version",
    "seed",
    "pruned_heads",
    "num_labels",
    "_temperature",
)


def build(cls: Any, config: Any) -> Any:
    """The model without memory. Whatever its constructor raises comes through."""
    import torch

    with quiet(), torch.device("meta"):
        return cls(copy.deepcopy(config))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Constructors of models warn about what training code would care for."""
    import logging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


class Builder:
    """Builds one model class from changed copies of one configuration."""

    def __init__(self, cls: Any, config: Any) -> None:
        self.cls, self.config = cls, config
        self.text = config.get_text_config()
        self.sub = next(
            (k for k in getattr(config, "sub_configs", {}) if getattr(config, k, None) is self.text), None
        )
        data = self.text.to_dict()
        self.integers = {k: v for k, v in data.items() if type(v) is int and not _passive(k)}
        self.flags = {k: v for k, v in data.items() if type(v) is bool}
        self.lists = {k: v for k, v in data.items() if isinstance(v, list)}

    def changed(self, **changes: Any) -> Any:
        """A configuration made anew, so that what its class derives follows the change."""
        data = self.config.to_dict()
        (data[self.sub] if self.sub else data).update(changes)
        with quiet():
            return type(self.config).from_dict(data)

    def build(self, **changes: Any) -> tuple[Any, tuple[Parameter, ...]]:
        module = build(self.cls, self.changed(**changes) if changes else self.config)
        return module, parameters_of(module)

    def with_layers(self, key: str, count: int) -> dict[str, Any]:
        """The changes that give the model `count` layers: lists with an entry for each layer follow."""
        own = self.integers[key]
        cut = {name: value[:count] for name, value in self.lists.items() if len(value) == own and count < own}
        return {key: count, **cut}

    def attempts(self, key: str) -> Iterator[dict[str, Any]]:
        value = self.integers[key]
        if key in LAYER_KEYS:
            yield self.with_layers(key, value - 1 if value > 1 else 2)
        for other in (2 * value, 3 * value, value // 2, value + 1):
            if other > 0 and other != value:
                yield {key: other}


def _passive(key: str) -> bool:
    """Keys that no size depends on."""
    return key.startswith("_") or key.endswith(_PASSIVE)


def small(builder: Builder, parameters: tuple[Parameter, ...]) -> dict[str, Any]:
    """Changes that make the model shallower and keep a block of each kind; {} where that does not work."""
    found = structure(parameters)
    needed = max((kind.indices[0] for kind in found.kinds), default=0) + 2
    keys = [key for key in LAYER_KEYS if builder.integers.get(key, 0) > needed]
    changes: dict[str, Any] = {}
    for key in keys:
        changes |= builder.with_layers(key, needed)
    if not changes:
        return {}
    try:
        shallow = {p.name: p for p in builder.build(**changes)[1]}
    except Exception:
        return {}
    same = {p.name: p for p in parameters}
    kept = all(p.name in shallow for kind in found.kinds for p in kind.weights)
    kept = kept and all(p.name in shallow for p in found.outside)
    return changes if kept and all(same.get(name) == p for name, p in shallow.items()) else {}


def vary(builder: Builder, base: dict[str, Any]) -> tuple[tuple[Variant, ...], frozenset[str]]:
    """The model with each integer key changed in turn, and the keys that allow no change.

    What is refused alone (hidden * expand must be heads * head_dim) is tried in pairs.
    """
    variants = []
    refused = []
    for key in builder.integers:
        start = {} if key in LAYER_KEYS else base
        variant = next(
            _built(builder, ({**start, **changes} for changes in builder.attempts(key)), (key,)), None
        )
        variants += [variant] if variant else []
        refused += [] if variant else [key]
    unknown = set(refused)
    for a, b in itertools.combinations([key for key in refused if key not in LAYER_KEYS], 2):
        x, y = builder.integers[a], builder.integers[b]
        changes = [{a: 2 * x, b: 2 * y}, {a: 2 * x, b: y // 2}, {a: x // 2, b: 2 * y}]
        variant = next(_built(builder, ({**base, **pair} for pair in changes), (a, b)), None)
        if variant:
            variants.append(variant)
            unknown -= {a, b}
    return tuple(variants), frozenset(unknown)


def _built(builder: Builder, attempts: Iterable[dict[str, Any]], keys: tuple[str, ...]) -> Iterator[Variant]:
    """The variants that the class takes."""
    for changes in attempts:
        try:
            module, parameters = builder.build(**changes)
        except Exception:  # a constructor says in its own ways what it does not take
            continue
        data = module.config.get_text_config().to_dict()
        values = {k: data[k] for k in builder.integers if type(data.get(k)) is int}
        yield Variant(keys, values, {p.name: p.shape for p in (*parameters, *buffers_of(module))})


def switch(builder: Builder, parameters: tuple[Parameter, ...], base: dict[str, Any]) -> Iterator[Switch]:
    """The yes/no keys that change which weights there are."""
    own = {p.name: p for p in (builder.build(**base)[1] if base else parameters)}
    with contextlib.suppress(Exception):
        defaults = type(builder.text)().to_dict()
    for key, value in builder.flags.items():
        try:
            other = {p.name: p for p in builder.build(**{**base, key: not value})[1]}
        except Exception:
            continue
        if other == own:
            continue
        gone = frozenset(own.keys() - other.keys())
        both = own.keys() & other.keys()
        untied = frozenset(name for name in both if own[name].owner and not other[name].owner)
        tied = {name: other[name].owner for name in both if other[name].owner and not own[name].owner}
        new = {name: other[name].shape for name in other.keys() - own.keys()}
        biases = all(name.endswith(".bias") and f"{name[:-5]}.weight" in own for name in new)
        harmless = biases and all(own[n].shape == other[n].shape for n in both)
        default = defaults.get(key, value)
        yield Switch(key, value, bool(default), gone, new, untied, tied, harmless)


def class_defaults(builder: Builder) -> dict[str, int]:
    """What the configuration's class puts in where a key is left out (None)."""
    out = {}
    for key in ("num_key_value_heads", "num_kv_heads", "head_dim", "intermediate_size", "n_inner"):
        if key in builder.integers:
            with contextlib.suppress(Exception):
                value = builder.changed(**{key: None}).get_text_config().to_dict().get(key)
                if type(value) is int:
                    out[key] = value
    return out


def facts_of(cls: Any, config: Any, name: str, vary_keys: bool = True) -> tuple[Any, Facts]:
    """The module on the meta device, and what it says of itself. Raises InferError."""
    builder = Builder(cls, config)
    try:
        module, parameters = builder.build()
    except InferError:
        raise
    except Exception as error:
        raise InferError(
            f"transformers cannot build {cls.__name__} from this configuration: {said(error)}"
        ) from None
    kind = str(getattr(config, "model_type", ""))
    facts = Facts(
        model=name,
        summary=f"{cls.__name__} of transformers",
        parameters=parameters,
        buffers=buffers_of(module),
        values=builder.integers,
        model_type=kind,
        preset=kind,
    )
    if not vary_keys:
        return module, facts
    base = small(builder, parameters)
    variants, unknown = vary(builder, base)
    return (builder.build(**base)[0] if base else module), replace(
        facts,
        variants=variants,
        unknown=unknown,
        switches=tuple(switch(builder, parameters, base)),
        defaults=class_defaults(builder),
    )
