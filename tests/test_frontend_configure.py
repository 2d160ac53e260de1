"""Configurations: defaults filled in, everything that is wrong said at once, sizes decided."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gradgen.configure import configure, from_hf, materialize, preset
from gradgen.diagnostics import ConfigError, UsageError
from gradgen.resolve import check, check_text

ROOT = Path(__file__).resolve().parent.parent
LLAMA = check(ROOT / "specs" / "llama.yaml")
SMALL = {"vocab": 100, "hidden": 64, "layers": 2, "heads": 8, "ffn": 96}


def test_defaults():
    values = configure(LLAMA, SMALL).values
    assert values == {
        **SMALL,
        "kv_heads": 8,
        "head_dim": 8,
        "tied_embeddings": False,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
    }
    assert list(values)[:3] == ["vocab", "hidden", "layers"]


def test_numpy_values():
    values = configure(LLAMA, {**SMALL, "hidden": np.int64(64), "tied_embeddings": np.bool_(True)}).values
    assert (values["hidden"], values["tied_embeddings"]) == (64, True)
    assert (type(values["hidden"]), type(values["tied_embeddings"])) == (int, bool)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hiden": 3}, "unknown dim or flag 'hiden'; did you mean 'hidden'?"),
        ({"hidden": True}, "dim 'hidden' must be an integer, got True"),
        ({"hidden": 64.0}, "dim 'hidden' must be an integer, got 64.0"),
        ({"hidden": "64"}, "dim 'hidden' must be an integer, got '64'"),
        ({"hidden": None}, "dim 'hidden' must be an integer, got None"),
        ({"hidden": 0}, "dim 'hidden' must be between 1 and 2147483648, got 0"),
        ({"hidden": -1}, "dim 'hidden' must be between 1 and 2147483648, got -1"),
        ({"hidden": 2**31 + 1}, "dim 'hidden' must be between 1 and 2147483648, got 2147483649"),
        ({"hidden": 10**5000}, "dim 'hidden' must be between 1 and 2147483648, got a number of 16610 bits"),
        ({"qkv_bias": 1}, "flag 'qkv_bias' must be true or false, got 1"),
        ({"qkv_bias": 10**5000}, "flag 'qkv_bias' must be true or false, got <int>"),
        ({"qkv_bias": "yes"}, "flag 'qkv_bias' must be true or false, got 'yes'"),
        (
            {"hidden": 4},
            "dim 'head_dim' must be between 1 and 2147483648, got 0 (its default, hidden // heads)",
        ),
        (
            {"heads": 6, "kv_heads": 4},
            "each KV head serves a whole number of query heads "
            "(heads % kv_heads == 0 does not hold for heads = 6, kv_heads = 4)",
        ),
    ],
)
def test_refused(changes, said):
    with pytest.raises(ConfigError) as caught:
        configure(LLAMA, {**SMALL, **changes})
    assert str(caught.value) == f"llama: {said}"


def test_everything_wrong_is_said_at_once_and_nothing_that_follows_from_it():
    with pytest.raises(ConfigError) as caught:
        configure(LLAMA, {"vocab": 0, "layer": 3, "heads": 8, "ffn": 96, "mlp_bias": 2})
    assert str(caught.value) == (
        "llama: unknown dim or flag 'layer'; did you mean 'layers'?; "
        "flag 'mlp_bias' must be true or false, got 2; "
        "dim 'vocab' must be between 1 and 2147483648, got 0; "
        "dim 'hidden' is missing; dim 'layers' is missing"
    )


def test_a_flag_without_a_default():
    model = check_text("gradgen: 1\nmodel: m\nflags: {a: {}}\nweights: {w: {shape: [3], name: w, when: a}}\n")
    with pytest.raises(ConfigError, match="m: flag 'a' is missing"):
        configure(model, {})
    assert materialize(model, configure(model, {"a": False})).weights == ()


def test_preset():
    assert preset(LLAMA, "llama-3.2-1b")["head_dim"] == 64
    with pytest.raises(
        UsageError, match=r"llama has no preset 'llama-3-8B'; did you mean 'llama-3-8b'\? presets: "
    ):
        preset(LLAMA, "llama-3-8B")


def test_from_hf_reads_objects_and_mappings():
    keys = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    keys |= {"intermediate_size": 96, "head_dim": None, "tie_word_embeddings": True, "model_type": "llama"}
    wanted = {**SMALL, "tied_embeddings": True}
    assert from_hf(LLAMA, keys) == wanted
    assert from_hf(LLAMA, SimpleNamespace(**keys)) == wanted
    assert from_hf(LLAMA, {"text_config": keys, "model_type": "vision"}) == wanted
    assert from_hf(LLAMA, SimpleNamespace(get_text_config=lambda: SimpleNamespace(**keys))) == wanted


def test_from_hf_takes_flags_from_the_model_type():
    """Qwen2 always has query, key and value biases; its configuration does not say so."""
    assert from_hf(LLAMA, {"model_type": "qwen2"}) == {"qkv_bias": True, "o_bias": False}
    assert from_hf(LLAMA, {"model_type": "llama", "attention_bias": True}) == {
        "qkv_bias": True,
        "o_bias": True,
    }


def test_materialize():
    concrete = materialize(LLAMA, configure(LLAMA, {**SMALL, "kv_heads": 2, "qkv_bias": True}))
    (block,) = concrete.blocks
    weights = {weight.id: weight for weight in block.weights}
    assert (block.count, block.name) == (2, "model.layers.{i}")
    assert (weights["k_proj"].shape, weights["k_proj"].numel, weights["k_proj"].zeroed) == (
        (16, 64),
        1024,
        False,
    )
    assert (weights["k_bias"].shape, weights["k_bias"].zeroed, weights["k_bias"].index) == ((16,), True, 4)
    assert "o_bias" not in weights
    assert [weight.tie for weight in concrete.weights] == [None, None, None]


def test_materialize_decides_ties_and_zeros():
    for tied in (False, True):
        concrete = materialize(LLAMA, configure(LLAMA, {**SMALL, "tied_embeddings": tied}))
        embedding, head, _ = concrete.weights
        assert (embedding.zeroed, head.tie) == (not tied, "embedding" if tied else None)


@pytest.mark.parametrize(
    ("weights", "values", "said"),
    [
        (
            "w: {shape: [a, b], name: w}",
            {"a": 2**31, "b": 2**31},
            "weight 'w' of shape [2147483648, 2147483648]",
        ),
        ("w: {shape: [a - b], name: w}", {"a": 1, "b": 2}, "weight 'w' has a - b = -1 in its shape"),
        (
            "v: {shape: [a // 2 * 2], name: v}\n  w: {shape: [a], name: w, tied_to: v}",
            {"a": 3, "b": 1},
            "weight 'w' of shape [3] is tied to 'v' of shape [2]",
        ),
        (
            "v: {shape: [a], name: v, when: a > b}\n  w: {shape: [a], name: w, tied_to: v}",
            {"a": 1, "b": 1},
            "weight 'w' is tied to 'v', which this configuration does not have",
        ),
        (
            "v: {shape: [a], name: n, when: a > 1}\n  w: {shape: [a], name: n, when: b > 1}",
            {"a": 2, "b": 2},
            "weights 'v' and 'w' have one checkpoint name, 'n'",
        ),
    ],
)
def test_sizes_that_a_model_cannot_have(weights, values, said):
    model = check_text(f"gradgen: 1\nmodel: m\ndims: {{a: {{}}, b: {{}}}}\nweights:\n  {weights}\n")
    with pytest.raises(ConfigError) as caught:
        materialize(model, configure(model, values))
    assert said in str(caught.value)


STACKS = """\
gradgen: 1
model: m
dims: {a: {}, b: {}}
weights: {extra: {shape: [3], name: layers.3.w}}
blocks:
  one: {count: a, name: 'layers.{i}', weights: {w: {shape: [3], name: w}}}
  two: {count: b, name: 'layers.1{i}', weights: {w: {shape: [3], name: w}}}
"""


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (3, 2, None),
        (4, 2, "weights 'w' and 'extra' have one checkpoint name, 'layers.3.w'"),
        (3, 200, None),
        (11, 1, "weights 'w' and 'w' have one checkpoint name, 'layers.10.w'"),
    ],
)
def test_names_of_stacks_that_meet(a, b, said):
    """Whether `layers.{i}` and `layers.3` meet depends on the number of layers, as in DeepSeek."""
    model = check_text(STACKS)
    if said is None:
        assert materialize(model, configure(model, {"a": a, "b": b})).blocks[0].count == a
    else:
        with pytest.raises(ConfigError, match=said):
            materialize(model, configure(model, {"a": a, "b": b}))
