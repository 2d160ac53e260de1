"""The shipped specs against the models that transformers and peft build: names, shapes, ties, frozen weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, SPECS

from gradgen.configure import configure, from_hf, materialize, preset
from gradgen.model import Model
from gradgen.plan import plan
from gradgen.records import WeightRecord, records
from gradgen.resolve import check

MODELS = {path.stem: check(path) for path in sorted(SPECS.glob("*.yaml"))}
PUBLISHED = [(spec, name) for spec, entry in ARCHITECTURES.items() for name in entry.published]


def declared(model: Model, values: dict[str, int | bool]) -> dict[str, tuple[tuple[int, ...], bool, str]]:
    """Shape, whether it is trainable, and the name of the tensor's owner, by checkpoint name."""
    concrete = materialize(model, configure(model, values))
    owners = {weight.id: weight.name for weight in concrete.weights}
    out = {w.name: (w.shape, w.trainable, owners[w.tie or w.id]) for w in concrete.weights}
    for kind in concrete.blocks:
        for layer in kind.layers:
            prefix = kind.name.replace("{i}", str(layer)) + "."
            out |= {prefix + w.name: (w.shape, w.trainable, prefix + w.name) for w in kind.weights}
    return out


def built(model: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], bool, str]]:
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: (tuple(p.shape), p.requires_grad, owners[id(p)]) for name, p in every}


def test_every_spec_and_every_preset_is_here() -> None:
    assert set(ARCHITECTURES) | {"llama_lora"} == set(MODELS)
    presets = {spec: {entry.name for entry in MODELS[spec].presets} for spec in ARCHITECTURES}
    presets["llama"] -= {"qwen2.5-0.5b", "qwen2.5-7b"}  # of another class: test_frontend_specs.py
    presets["deepseek_v3"] -= {"deepseek-v3-separate"}  # transformers stacks experts
    assert presets == {spec: set(entry.published) for spec, entry in ARCHITECTURES.items()}


@pytest.mark.parametrize(("spec", "name"), PUBLISHED, ids=[name for _, name in PUBLISHED])
def test_published_models(spec: str, name: str) -> None:
    architecture, model = ARCHITECTURES[spec], MODELS[spec]
    module = architecture.meta(architecture.published[name])
    values = preset(model, name)
    given = from_hf(model, module.config) | ({"tied_head": False} if "v1.1" in name else {})
    assert configure(model, given) == configure(model, values)
    if "v1.1" in name:  # transformers ties what was trained apart
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    assert declared(model, values) == built(module)


@pytest.mark.parametrize("spec", ARCHITECTURES)
def test_tiny_models_with_other_choices(spec: str) -> None:
    """What presets do not show: biases, other norms, untied heads, blocks of both kinds."""
    choices: list[dict[str, Any]] = [{}, {"tie_word_embeddings": False}]
    choices += {"gemma": [{"attention_bias": True}], "deepseek_v3": [{"attention_bias": True}, {"q_lora_rank": None}],
                "qwen3_moe": [{"attention_bias": True}, {"decoder_sparse_step": 1}], "mamba": [{"use_conv_bias": False}],
                "vit": [{"qkv_bias": False}], "mamba2": [{"use_bias": True}],
                "llama": [{"attention_bias": True, "mlp_bias": True}]}.get(spec, [])  # fmt: skip
    for keys in choices:
        module = ARCHITECTURES[spec].meta({**ARCHITECTURES[spec].tiny, **keys})
        assert declared(MODELS[spec], from_hf(MODELS[spec], module.config)) == built(module), keys


@pytest.mark.parametrize("spec", ARCHITECTURES)
def test_a_dict_of_the_configuration_says_the_same(spec: str) -> None:
    """As far as it says it: the number of labels is only in the configuration's class."""
    config = ARCHITECTURES[spec].configuration(ARCHITECTURES[spec].tiny)
    whole = from_hf(MODELS[spec], config)
    assert from_hf(MODELS[spec], config.to_dict()) == {k: v for k, v in whole.items() if k != "labels"}


def test_masked_language_models_have_no_pooler() -> None:
    with torch.device("meta"):
        module = transformers.BertForMaskedLM(transformers.BertConfig())
    module.tie_weights()
    values = {**from_hf(MODELS["bert"], module.config), "next_sentence": False}
    assert declared(MODELS["bert"], values) == built(module)


def test_lora_is_what_peft_builds() -> None:
    peft = pytest.importorskip("peft")
    module = ARCHITECTURES["llama"].meta(ARCHITECTURES["llama"].published["llama-3.2-1b"])
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with torch.device("meta"):
        wrapped = peft.get_peft_model(module, peft.LoraConfig(r=16, target_modules=targets))
    values = from_hf(MODELS["llama_lora"], module.config)
    mine = declared(MODELS["llama_lora"], values)
    assert mine == built(wrapped)
    assert sum(torch.Size(shape).numel() for shape, trainable, _ in mine.values() if trainable) == 11_272_192


def test_buffers_are_those_of_the_model() -> None:
    architecture, model = ARCHITECTURES["deepseek_v3"], MODELS["deepseek_v3"]
    module = architecture.meta(architecture.tiny)
    values = configure(model, from_hf(model, module.config)).values
    found: list[WeightRecord] = records([], model, values, {"dense": (0,), "moe": (1, 2)})
    named = dict(module.named_buffers())
    assert [record.name for record in found] == [name for name in named if "correction" in name]
    assert all(record.shape == tuple(named[record.name].shape) for record in found)


def test_shapes_that_no_world_size_divides() -> None:
    vit = declared(MODELS["vit"], preset(MODELS["vit"], "vit-base-patch16-224"))
    assert vit["vit.embeddings.position_embeddings"][0] == (1, 197, 768)
    assert vit["classifier.weight"][0] == (1000, 768)
    mamba = declared(MODELS["mamba"], preset(MODELS["mamba"], "mamba-130m"))
    assert mamba["backbone.layers.5.mixer.x_proj.weight"][0] == (48 + 2 * 16, 1536)


def test_whisper_positions_are_frozen_and_t5_has_its_bias_table_in_the_first_block() -> None:
    whisper = declared(MODELS["whisper"], preset(MODELS["whisper"], "whisper-large-v3"))
    frozen = [name for name, (_, trainable, _) in whisper.items() if not trainable]
    assert frozen == ["model.encoder.embed_positions.weight"]
    t5 = declared(MODELS["t5"], preset(MODELS["t5"], "t5-large"))
    tables = [name for name in t5 if "relative_attention_bias" in name]
    assert tables == [
        f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for side in ("encoder", "decoder")
    ]
    assert [name for name, (_, _, owner) in t5.items() if owner == "shared.weight"] == [
        "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight",
    ]  # fmt: skip


def test_published_numbers_of_parameters() -> None:
    for spec, name, count in (
        ("deepseek_v3", "deepseek-v3", 671_026_404_352),
        ("deepseek_v3", "deepseek-v3-separate", 671_026_404_352),
        ("qwen3_moe", "qwen3-30b-a3b", 30_532_122_624),
        ("mixtral", "mixtral-8x7b", 46_702_792_704),
        ("bert", "bert-base-uncased", 110_106_428),
        ("vit", "vit-base-patch16-224", 86_567_656),
        ("t5", "t5-small", 60_506_624),
        ("whisper", "whisper-large-v3", 1_543_490_560),
        ("mamba", "mamba-130m", 129_135_360),
    ):
        mine = declared(MODELS[spec], preset(MODELS[spec], name))
        total = sum(torch.Size(shape).numel() for key, (shape, _, owner) in mine.items() if owner == key)
        assert total == count, (spec, name, total)


@pytest.mark.parametrize("spec", MODELS)
def test_every_preset_is_planned_for_any_world(spec: str) -> None:
    """`plan` verifies what it makes: offsets, padding, shards, order."""
    for entry in MODELS[spec].presets:
        for world in (1, 3, 8):
            result = plan(MODELS[spec], preset=entry.name, dp=world)
            frozen = {"encoder_positions"} & {arena.id for arena in result.arenas}
            assert not frozen and all(arena.numel % world == 0 for arena in result.arenas)
