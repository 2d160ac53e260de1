"""Tiny instances of real transformers classes for `architectures.py`: a model with random weights, and a batch a rank.

    model, batches = make("qwen3_moe", world=2)

A name is the model type of a causal language model, or "other.NAME" from OTHERS. Every configuration is its class's
default with its sizes lowered (tiny_configs.py); lists with an entry for each layer are cut so that every kind of layer
stays; dropout is off.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from tiny_configs import CHANGES, FIRST, VOCAB, shrink
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

ROWS, LENGTH = 2, 16
Batch = dict[str, Any]
Maker = Callable[[Any, torch.Generator], Batch]


def _causal() -> dict[str, str]:
    """One model type for each class: the first that names it."""
    seen: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        seen.setdefault(str(name), kind)
    return {kind: name for name, kind in seen.items()}


CAUSAL = _causal()


def ids(g: torch.Generator, *shape: int, low: int = FIRST, high: int = VOCAB) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=g)


def noise(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g)


def text(config: Any, g: torch.Generator) -> Batch:
    """Tokens and as many labels."""
    high = getattr(config.get_text_config(), "vocab_size", VOCAB)
    return {"input_ids": ids(g, ROWS, LENGTH, high=high), "labels": ids(g, ROWS, LENGTH, high=high)}


def text_and(**more: Callable[[torch.Generator], torch.Tensor]) -> Maker:
    return lambda config, g: {**text(config, g), **{name: make(g) for name, make in more.items()}}


def text_with_image(tokens: int, key: str, **more: Callable[[torch.Generator], torch.Tensor]) -> Maker:
    """Text whose first tokens stand for an image."""

    def make(config: Any, g: torch.Generator) -> Batch:
        batch = text_and(**more)(config, g)
        batch["input_ids"][:, :tokens] = getattr(config, key)
        return batch

    return make


def codes(config: Any, g: torch.Generator) -> Batch:
    return {"input_ids": ids(g, ROWS * 4, LENGTH), "labels": ids(g, ROWS, LENGTH, 4)}


def draft(config: Any, g: torch.Generator) -> Batch:
    """One step of a draft model, over keys and values of the model that it drafts for."""

    def pair(size: int) -> tuple[torch.Tensor, ...]:
        return tuple(noise(g, ROWS, 2, LENGTH, size) for _ in range(2))

    return {
        "inputs_embeds": noise(g, ROWS, 1, 128),
        "position_ids": torch.full((ROWS, 1), LENGTH - 1),
        "labels": ids(g, ROWS, 1),
        "shared_kv_states": {"full_attention": pair(32), "sliding_attention": pair(16)},
    }


def image(config: Any, g: torch.Generator) -> Batch:
    return {
        "pixel_values": noise(g, ROWS, 3, 32, 32),
        "labels": torch.randint(0, config.num_labels, (ROWS,), generator=g),
    }


def image_and_text(config: Any, g: torch.Generator) -> Batch:
    return {
        "input_ids": ids(g, ROWS, LENGTH),
        "pixel_values": noise(g, ROWS, 3, 32, 32),
        "return_loss": True,
    }


def wave(config: Any, g: torch.Generator) -> Batch:
    return {"input_values": noise(g, ROWS, 1600), "labels": ids(g, ROWS, 3, low=1, high=30)}


def sentence(config: Any, g: torch.Generator) -> Batch:
    return {"input_ids": ids(g, ROWS, LENGTH), "labels": torch.tensor([0, 1])}


def masked_image(config: Any, g: torch.Generator) -> Batch:
    return {"pixel_values": noise(g, ROWS, 3, 32, 32), "noise": torch.rand(ROWS, 16, generator=g)}


def mask(config: Any, g: torch.Generator) -> Batch:
    """An image and what its embedding shall be."""
    return {"pixel_values": noise(g, ROWS, 3, 64, 64), "labels": noise(g, ROWS, 16, 4, 4)}


def grid(side: int) -> Callable[[torch.Generator], torch.Tensor]:
    places = [[x, y] for y in range(side) for x in range(side)]
    return lambda g: torch.tensor([places] * ROWS)


def first(count: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda g: (torch.arange(LENGTH) < count).long().expand(ROWS, LENGTH)


def like(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda g: noise(g, ROWS, *shape)


def tokens(g: torch.Generator) -> torch.Tensor:
    return ids(g, ROWS, LENGTH)


BATCHES: dict[str, Maker] = {
    "gemma4": text_with_image(
        4, "image_token_id", pixel_values=like(16, 48), image_position_ids=grid(4), mm_token_type_ids=first(4)
    ),
    "gemma4_assistant": draft,
    "gemma4_unified_assistant": draft,
    "got_ocr2": text_with_image(4, "image_token_index", pixel_values=like(3, 128, 128)),
    "mllama": text_and(cross_attention_states=like(8, 64)),
    "musicgen": codes,
    "roc_bert": text_and(input_shape_ids=tokens, input_pronunciation_ids=tokens),
    "trocr": text_and(encoder_hidden_states=like(8, 64)),
}

SMALL_IMAGE = {"image_size": 32, "patch_size": 8}
STAGES = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [3] * 4}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2, 4],
    "num_heads": [2, 2, 4],
    "window_size": 4,
}
HUBERT = {
    "conv_dim": [16] * 3,
    "conv_stride": [5, 4, 2],
    "conv_kernel": [10, 8, 4],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
}
PERCEIVER = {
    "max_position_embeddings": LENGTH,
    "d_latents": 64,
    "num_latents": 8,
    "num_self_attends_per_block": 3,
}
SAM = {
    "image_size": 64,
    "patch_size": 16,
    "window_size": 2,
    "output_channels": 16,
    "mlp_dim": 128,
    "global_attn_indexes": [1, 3],
}
MAE = {
    **SMALL_IMAGE,
    "decoder_hidden_size": 32,
    "decoder_num_attention_heads": 4,
    "decoder_num_hidden_layers": 3,
    "decoder_intermediate_size": 64,
}
OTHERS: dict[str, tuple[str, dict[str, Any], Maker]] = {
    "bart": ("BartForConditionalGeneration", {}, text),
    "blip": (
        "BlipForConditionalGeneration",
        {"vision_config": SMALL_IMAGE},
        text_and(pixel_values=like(3, 32, 32)),
    ),
    "clip": ("CLIPModel", {"vision_config": SMALL_IMAGE}, image_and_text),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [2, 2, 3, 2]},
        image,
    ),
    "distilbert": ("DistilBertForSequenceClassification", {}, sentence),
    "funnel": ("FunnelForMaskedLM", {"block_sizes": [2, 2, 2]}, text),
    "hubert": ("HubertForCTC", HUBERT, wave),
    "led": ("LEDForConditionalGeneration", {"attention_window": 4}, text_and(global_attention_mask=first(1))),
    "longformer": ("LongformerForMaskedLM", {"attention_window": 4}, text),
    "mpnet": ("MPNetForMaskedLM", {"relative_attention_num_buckets": 32}, text),
    "perceiver": ("PerceiverForMaskedLM", PERCEIVER, text),
    "regnet": ("RegNetForImageClassification", {**STAGES, "groups_width": 8}, image),
    "resnet": ("ResNetForImageClassification", STAGES, image),
    "sam": ("SamVisionModel", SAM, mask),
    "siglip": ("SiglipModel", {"vision_config": SMALL_IMAGE}, image_and_text),
    "swin": ("SwinForImageClassification", SWIN, image),
    "swinv2": ("Swinv2ForImageClassification", SWIN, image),
    "switch": ("SwitchTransformersForConditionalGeneration", {"decoder_start_token_id": 0}, text),
    "umt5": ("UMT5ForConditionalGeneration", {}, text),
    "vit-mae": ("ViTMAEForPreTraining", MAE, masked_image),
    "xlnet-cls": ("XLNetForSequenceClassification", {}, sentence),
    "lora-llama": ("LlamaForCausalLM", {}, text),
}


# What `architectures.py` trains: causal, encoder, encoder-decoder, vision, audio, adapters.
_MODELS = """
afmoe apertus arcee axk1 axk2 bailing_hybrid bamba bart bert bert-generation biogpt bitnet blenderbot
blenderbot-small bloom blt codegen cohere cohere2 cohere2_moe cpmant deepseek_v2 deepseek_v3 diffllama dory
dots1 ernie4_5_moe exaone falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4
gemma4_assistant gemma4_text gemma4_unified_assistant glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3
gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granitemoehybrid granitemoeshared hrm_text hunyuan_v1_moe
hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text jais2 jamba jetmoe kimi_linear laguna
longcat_flash mamba mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral
mistral mllama modernbert-decoder moshi mpt musicgen nemotron olmo3 olmo_hybrid olmoe openai-gpt opt other.bart
other.blip other.clip other.convnext other.distilbert other.funnel other.hubert other.led other.longformer
other.mpnet other.perceiver other.regnet other.resnet other.sam other.siglip other.swin other.swinv2
other.switch other.umt5 other.vit-mae other.xlnet-cls persimmon phi prophetnet qwen2_moe qwen3 qwen3_5
qwen3_5_moe qwen3_moe qwen3_next reformer roberta roberta-prelayernorm roc_bert roformer seed_oss smollm3
solar_open starcoder2 trocr vaultgemma xglm xlm xlm-roberta xlnet xmod youtu zamba2 zaya
"""
MODELS = _MODELS.split()


def make(name: str, world: int) -> tuple[torch.nn.Module, list[Batch]]:
    """The model in train mode, the same at each call, and one batch for each rank."""
    key = name.removeprefix("other.")
    other = name.startswith("other.")
    class_name, changes, batch = (
        OTHERS[key] if other else (CAUSAL[key], CHANGES.get(key, {}), BATCHES.get(key, text))
    )
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    config = shrink(cls.config_class, changes, {})
    model = cls(config).float()
    if key == "lora-llama":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
        )
    model.train()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():  # so that no weight is all zeros or all ones
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(0.02 * torch.randn(p.shape, generator=g))
    return model, [batch(config, torch.Generator().manual_seed(2 + rank)) for rank in range(world)]


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss; without one, how far its output is from the labels."""
    import inspect

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "labels" not in batch or "labels" in inspect.signature(inner.forward).parameters:
        return model(**batch).loss  # type: ignore[no-any-return]
    rest = {key: value for key, value in batch.items() if key != "labels"}
    return loss_without(model(**rest), batch["labels"])


def loss_without(output: Any, labels: torch.Tensor) -> torch.Tensor:
    if labels.is_floating_point():
        return (output[0] - labels).square().mean()
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
