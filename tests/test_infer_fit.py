"""Expressions for sizes, from what they are in several configurations."""

from __future__ import annotations

import pytest

from gradgen.expr import evaluate, parse
from gradgen.infer_fit import fit
from gradgen.infer_indices import rule

HEADS, KV, DIM, HIDDEN = (4, 8, 4, 4, 4), (2, 2, 1, 2, 2), (8, 8, 8, 16, 8), (32, 32, 32, 32, 64)
DIMS = {"heads": HEADS, "kv_heads": KV, "head_dim": DIM, "hidden": HIDDEN}


@pytest.mark.parametrize(
    "text",
    [
        "hidden",
        "3 * hidden",
        "heads * head_dim",
        "2 * kv_heads * head_dim",
        "hidden // heads",
        "hidden // 2",
        "48 * head_dim",
        "hidden + 2",
        "hidden + heads",
        "head_dim * (heads + 2 * kv_heads)",
        "heads + 2 * hidden + kv_heads * head_dim",
        "kv_heads * (hidden // heads)",
    ],
)
def test_what_an_expression_gives_is_found_again(text: str) -> None:
    target = tuple(
        int(evaluate(parse(text), {name: vector[k] for name, vector in DIMS.items()}))
        for k in range(len(HEADS))
    )
    found = fit(target, DIMS)
    assert found is not None
    again = tuple(
        int(evaluate(parse(found), {name: vector[k] for name, vector in DIMS.items()}))
        for k in range(len(HEADS))
    )
    assert again == target
    assert len(found) <= len(text)


def test_a_rounding_is_not_explained() -> None:
    assert fit((2731, 5461, 2731), {"hidden": (1024, 2048, 1024), "layers": (4, 4, 8)}) is None


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        (range(6), ""),
        ([0], "i == 0"),
        ([0, 1, 2], "i < 3"),
        ([4, 5], "i >= 4"),
        ([0, 1, 3, 4, 5], "i != 2"),
        ([1, 3, 5], "i % 2 == 1"),
        ([0, 1, 3, 4], "i % 3 != 2"),
        ([3, 5], "i >= 3 and i % 2 == 1"),
        ([0, 1, 4], [0, 1, 4]),
    ],
)
def test_indices_get_the_simplest_rule(indices: list[int], text: str | list[int]) -> None:
    found = rule(list(indices), range(6))
    assert found == text
    if isinstance(found, str) and found:
        assert [i for i in range(6) if evaluate(parse(found), {"i": i})] == list(indices)


@pytest.mark.parametrize(
    "text",
    [
        "i % 2 == 0 and i % 8 != 4",
        "i % 5 == 0 or i % 5 == 2",
        "i % 5 != 0 and i % 5 != 2",
        "i >= 2 and i % 6 != 5",
    ],
)
def test_rules_of_long_stacks(text: str) -> None:
    stack = range(32)
    assert rule([i for i in stack if evaluate(parse(text), {"i": i})], stack) == text
