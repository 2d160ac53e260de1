"""Finds the expression over dims that explains a size, from what the size is in several configurations.

With one configuration a 4096 can be the hidden size, heads * head_dim or a coincidence. With the same model built
again for a changed key, only what follows the change is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

Vector = tuple[int, ...]  # one value for each configuration; the first is the model's own

MAX_KEYS = 7  # that a sum is searched over
FACTORS = range(1, 9)
CONSTANTS = range(-4, 17)


@dataclass(frozen=True)
class Term:
    """factor * key * key ... ; a key can be a quotient `a // b`."""

    factor: int
    keys: tuple[str, ...]
    vector: Vector

    @property
    def cost(self) -> int:
        return len(self.keys) * 2 + (self.factor != 1) + sum(" " in key for key in self.keys)

    def text(self, without: str = "") -> str:
        keys = list(self.keys)
        if without:
            keys.remove(without)
        parts = [str(self.factor)] if self.factor != 1 or not keys else []
        parts += [f"({key})" if " " in key and (parts or len(keys) > 1) else key for key in keys]
        return " * ".join(parts)


def fit(target: Vector, dims: dict[str, Vector]) -> str | None:
    """The simplest expression over `dims` whose value is `target` in every configuration, or None."""
    for name, vector in dims.items():
        if vector == target:
            return name
    for name, vector in dims.items() if len(target) > 1 else ():
        factor = target[0] // vector[0]  # 48 heads that no key counts: 48 * head_dim
        if factor > FACTORS[-1] and all(t == factor * x for t, x in zip(target, vector, strict=True)):
            return f"{factor} * {name}"
    terms = _terms(dims)
    best = min((t for t in terms if t.vector == target), key=lambda t: t.cost, default=None)
    if best is not None:
        return best.text()
    return _sum(target, terms) if len(dims) <= MAX_KEYS else None


def _terms(dims: dict[str, Vector]) -> list[Term]:
    """Products of up to three keys or quotients, with a small factor."""
    atoms = {**dims, **dict(_quotients(dims))}
    out = []
    for many in (1, 2, 3):
        for keys in combinations_with_replacement(atoms, many):
            if many == 3 and any(" " in key for key in keys):
                continue
            vector = tuple(_product(values) for values in zip(*(atoms[key] for key in keys), strict=True))
            out += [Term(f, keys, tuple(f * value for value in vector)) for f in FACTORS]
    return out


def _quotients(dims: dict[str, Vector]) -> Iterator[tuple[str, Vector]]:
    """Those that are more than 1 in every configuration, rounded down as the language does."""
    for a, b in ((a, b) for a in dims for b in dims if a != b):
        pairs = list(zip(dims[a], dims[b], strict=True))
        if all(y and x > y for x, y in pairs):
            yield f"{a} // {b}", tuple(x // y for x, y in pairs)
    for a, vector in dims.items():
        for c in (2, 4, 8):
            if all(x % c == 0 and x > c for x in vector):
                yield f"{a} // {c}", tuple(x // c for x in vector)


def _sum(target: Vector, terms: Sequence[Term]) -> str | None:
    """Two or three terms, the last perhaps a constant; the fewest keys win."""
    simple = sorted((t for t in terms if t.cost <= 7), key=lambda t: t.cost)
    found: list[tuple[int, tuple[Term, ...]]] = []
    by_vector: dict[Vector, Term] = {}
    ones = len(target)
    for term in [*simple, *(Term(c, (), (c,) * ones) for c in CONSTANTS if c)]:
        by_vector.setdefault(term.vector, term)
    for a in simple:
        rest = by_vector.get(tuple(t - x for t, x in zip(target, a.vector, strict=True)))
        if rest is not None:
            found.append((a.cost + rest.cost, (a, rest)))
    if not found:
        whole = [t for t in simple if t.cost <= 5 and not any(" " in key for key in t.keys)]
        for a, b in combinations(whole[:300], 2):
            rest = by_vector.get(tuple(t - x - y for t, x, y in zip(target, a.vector, b.vector, strict=True)))
            if rest is not None:
                found.append((a.cost + b.cost + rest.cost, (a, b, rest)))
    if not found:
        return None
    return _sum_text(min(found, key=lambda entry: entry[0])[1])


def _sum_text(terms: Sequence[Term]) -> str:
    """With a common key taken out: head_dim * (heads + 2 * kv_heads)."""
    common = [key for key in terms[0].keys if all(key in term.keys for term in terms)]
    if not common:
        text = terms[0].text()
        for term in terms[1:]:
            text += f" - {-term.factor}" if not term.keys and term.factor < 0 else f" + {term.text()}"
        return text
    inner = " + ".join(term.text(without=common[0]) for term in terms)
    return f"{common[0]} * ({inner})"


def _product(values: Sequence[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result
