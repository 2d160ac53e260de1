"""Dims: which keys of a configuration explain the sizes of a model, and what a person would call them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gradgen.identifiers import bad_quantity
from gradgen.infer_facts import Facts, Parameter
from gradgen.infer_fit import Vector, fit

# Names of the shipped specs, in the order in which a spec lists them.
NAMES = {
    "vocab": "vocab_size",
    "positions": "max_position_embeddings n_positions max_seq_len n_ctx",
    "hidden": "hidden_size n_embd d_model dim",
    "layers": "num_hidden_layers n_layer n_layers num_layers",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers num_decoder_layers",
    "heads": "num_attention_heads n_head n_heads num_heads",
    "kv_heads": "num_key_value_heads num_kv_heads",
    "head_dim": "head_dim d_head d_kv attention_head_dim",
    "ffn": "intermediate_size n_inner ffn_dim d_ff d_inner",
    "experts": "num_local_experts num_experts n_routed_experts moe_num_experts",
    "expert_ffn": "moe_intermediate_size expert_ffn_hidden_size",
    "shared_experts": "n_shared_experts num_shared_experts",
    "dense_layers": "first_k_dense_replace num_dense_layers",
}
_BY_KEY = {key: name for name, keys in NAMES.items() for key in keys.split()}
_ORDER = {name: place for place, name in enumerate(NAMES)}
# What a class computes where its configuration leaves a key out.
_DEFAULTS = {
    "kv_heads": ("heads",),
    "head_dim": ("hidden // heads",),
    "ffn": ("4 * hidden",),
}
USUAL = ("hidden", "heads", "kv_heads", "head_dim")
SMALL = 8  # below, and with one configuration only, a size says nothing about where it comes from


def dim_name(key: str, taken: Iterable[str]) -> str:
    """`num_key_value_heads` -> `kv_heads`; unknown keys lose what every key has."""
    name = _BY_KEY.get(key, "")
    if not name or name in taken:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()
        name = re.sub(r"^(num|n)_|_size$|^max_(?=.*positions$)|(?<=ffn)_dim$", "", name)
        name = re.sub(r"_(num|n)_", "_", name)
        name = re.sub(r"[^a-z0-9]+", "_", name).strip("_")
    if not re.match(r"[a-z]", name):
        name = f"dim_{name}"
    while bad_quantity(name) or name in taken:
        name += "_dim" if not name.endswith("_dim") else "_2"
    return name


class Dims:
    """Explains sizes, and keeps the dims that the explanations use."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.names: dict[str, str] = {}  # dim -> key
        for key in sorted(facts.values, key=lambda key: _ORDER.get(_BY_KEY.get(key, ""), len(_ORDER))):
            if facts.values[key] >= 1:
                self.names[dim_name(key, self.names)] = key
        self.used: dict[str, None] = {}
        self.unexplained: dict[str, str] = {}  # size -> the keys that change it
        self._configurations: list[Mapping[str, int]] = [facts.values, *(v.values for v in facts.variants)]
        self._counts = [_counts(variant.shapes) for variant in facts.variants]

    def size(self, parameter: Parameter, axis: int) -> str:
        """The expression of one size of a parameter; a number where nothing explains it."""
        own = parameter.shape[axis]
        seen: list[int | None] = [own]
        for variant in self.facts.variants:
            shape = variant.shapes.get(parameter.name, ())
            seen.append(shape[axis] if len(shape) == len(parameter.shape) else None)
        return self._explain(seen, f"{parameter.name}[{axis}]")

    def count(self, prefix: str, own: int) -> str:
        """The number of blocks in a stack."""
        return self._explain([own, *(counts.get(prefix) for counts in self._counts)], prefix)

    def _explain(self, seen: list[int | None], what: str) -> str:
        own = seen[0]
        assert own is not None
        rows = [k for k, value in enumerate(seen) if value is not None]
        target: Vector = tuple(value for value in seen if value is not None)
        moved = {key for k in rows[1:] if seen[k] != own for key in self.facts.variants[k - 1].keys}
        known = {key for k in rows[1:] for key in self.facts.variants[k - 1].keys}
        if self.facts.variants:
            keys = moved | {key for key in self.facts.values if key not in known and own >= SMALL}
        else:
            keys = set(self.facts.values) if own >= SMALL else set()
        every: dict[str, Vector] = {}
        for name, key in self.names.items():
            values = [self._configurations[k].get(key) for k in rows]
            if all(value is not None and value >= 1 for value in values):
                every[name] = tuple(value for value in values if value is not None)
        dims = {name: vector for name, vector in every.items() if self.names[name] in keys}
        must = {name for name, key in self.names.items() if key in moved and name in dims}
        text = fit(target, {name: dims[name] for name in dims if name in must}) if must else None
        if text is None and not must:  # no key that could be varied moves it
            text = next((name for name, vector in dims.items() if vector == target and own >= SMALL), None)
            if text is None and not self.facts.variants:
                text = self._guess(target, dims)
        if text is None and must:
            text = fit(target, dims)
        if text is None and must:  # heads * (hidden // heads) does not move with the heads
            text = fit(target, {name: v for name, v in every.items() if name in must or name in USUAL})
        if text is None:
            if moved:
                self.unexplained[what] = ", ".join(sorted(moved))
            return str(own)
        for name in re.findall(r"[a-z][a-z0-9_]*", text):
            self.used.setdefault(name)
        return text

    def _guess(self, target: Vector, dims: Mapping[str, Vector]) -> str | None:
        """With one configuration: only relations that many models have."""
        for text in ("heads * head_dim", "kv_heads * head_dim", "3 * hidden", "4 * hidden", "2 * ffn"):
            names = [part for part in text.split(" * ") if not part.isdecimal()]
            if all(name in dims for name in names):
                value = 1
                for part in text.split(" * "):
                    value *= int(part) if part.isdecimal() else dims[part][0]
                if (value,) == target:
                    return text
        return None

    def declared(self) -> dict[str, dict[str, str]]:
        """The dims that are used, in the order of a spec, with `hf` and, where the class has one, `default`."""
        order = [name for name in self.names if name in self.used]
        out: dict[str, dict[str, str]] = {}
        for name in order:
            key = self.names[name]
            out[name] = {"hf": key}
            for default in _DEFAULTS.get(name, ()):
                needs = re.findall(r"[a-z][a-z_]*", default)
                missing = self.facts.defaults.get(key)
                if set(needs) <= set(order) and missing is not None and missing == self._value(default):
                    out[name]["default"] = default
        return out

    def values(self) -> dict[str, int]:
        """What a preset has to say: the values that no default gives."""
        return {
            name: self.facts.values[self.names[name]]
            for name, fields in self.declared().items()
            if "default" not in fields
            or self._value(fields["default"]) != self.facts.values[self.names[name]]
        }

    def _value(self, text: str) -> int:
        from gradgen.expr import evaluate, parse

        values = {name: self.facts.values[key] for name, key in self.names.items()}
        return int(evaluate(parse(text), values))


def _counts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Blocks by the prefix of their stack."""
    found: dict[str, set[int]] = {}
    for name in shapes:
        parts = name.split(".")
        for k, part in enumerate(parts[:-1]):
            if part.isdecimal():
                found.setdefault(".".join(parts[:k]), set()).add(int(part))
    return {prefix: len(indices) for prefix, indices in found.items()}
