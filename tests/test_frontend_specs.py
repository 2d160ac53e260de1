"""The shipped specs against the models that transformers builds: names, shapes, ties and biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradgen.configure import ConcreteModel, configure, from_hf, materialize, preset
from gradgen.model import Model
from gradgen.resolve import check

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
MODELS = {name: check(ROOT / "specs" / f"{name}.yaml") for name in ("llama", "gpt2", "qwen3")}
DECODER = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
DECODER |= {"intermediate_size": 80, "num_key_value_heads": 2, "pad_token_id": None}
GPT2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 32}

CASES = [
    ("llama", "LlamaConfig", DECODER),
    ("llama", "LlamaConfig", {**DECODER, "tie_word_embeddings": True, "head_dim": 20}),
    ("llama", "LlamaConfig", {**DECODER, "attention_bias": True, "mlp_bias": True}),
    ("llama", "MistralConfig", DECODER),
    ("llama", "MistralConfig", {**DECODER, "head_dim": 16}),
    ("llama", "Qwen2Config", DECODER),
    ("llama", "Qwen2Config", {**DECODER, "tie_word_embeddings": True}),
    ("gpt2", "GPT2Config", GPT2),
    ("gpt2", "GPT2Config", {**GPT2, "n_inner": 64, "tie_word_embeddings": False}),
    ("qwen3", "Qwen3Config", DECODER),
    (
        "qwen3",
        "Qwen3Config",
        {**DECODER, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
]


def meta_model(config: Any) -> Any:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def declared(concrete: ConcreteModel) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights but those that are tied to another."""
    shapes = {weight.name: weight.shape for weight in concrete.weights if weight.tie is None}
    for block in concrete.blocks:
        for i in range(block.count):
            prefix = block.name.replace("{i}", str(i))
            shapes.update({f"{prefix}.{weight.name}": weight.shape for weight in block.weights})
    return shapes


def concrete(model: Model, values: dict[str, int | bool]) -> ConcreteModel:
    return materialize(model, configure(model, values))


@pytest.mark.parametrize(("spec", "config", "keys"), CASES, ids=lambda value: str(value)[:24])
def test_names_shapes_and_ties(spec, config, keys):
    config = getattr(transformers, config)(**keys)
    model = meta_model(config)
    mine = concrete(MODELS[spec], from_hf(MODELS[spec], config))
    assert declared(mine) == {name: tuple(value.shape) for name, value in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owners = {weight.id: weight.name for weight in mine.weights}
    for weight in mine.weights:
        if weight.tie is not None:
            assert parameters[weight.name] is parameters[owners[weight.tie]]


@pytest.mark.parametrize(("spec", "config", "keys"), CASES[:9:3], ids=lambda value: str(value)[:24])
def test_a_dict_of_the_configuration_says_the_same(spec, config, keys):
    config = getattr(transformers, config)(**keys)
    assert from_hf(MODELS[spec], config.to_dict()) == from_hf(MODELS[spec], config)


@pytest.mark.parametrize("spec", MODELS)
def test_biases_norms_and_positions_start_at_zero_and_products_do_not(spec):
    model = MODELS[spec]
    flags = {flag.name: True for flag in model.flags}
    mine = concrete(model, {**dict(model.presets[0].values), **flags})
    for weight in (*mine.weights, *mine.blocks[0].weights):
        product = len(weight.shape) == 2 and weight.id != "position_embedding"
        assert weight.zeroed is not product, weight.id
    untied = concrete(model, {**dict(model.presets[0].values), "tied_embeddings": False})
    assert [weight.id for weight in untied.weights if weight.zeroed and len(weight.shape) == 2][0].endswith(
        "embedding"
    )


PUBLISHED = {  # parameters, each tensor counted once
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize(
    ("model", "name"),
    [(model, entry.name) for model in MODELS.values() for entry in model.presets],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_presets_have_the_published_number_of_parameters(model, name):
    mine = concrete(model, preset(model, name))
    total = sum(weight.numel for weight in mine.weights if weight.tie is None)
    total += sum(block.count * weight.numel for block in mine.blocks for weight in block.weights)
    assert total == PUBLISHED[name]
