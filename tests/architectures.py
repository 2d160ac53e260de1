"""The architectures of specs/ as transformers builds them: published configurations, tiny models, batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

SPECS = Path(__file__).resolve().parents[1] / "specs"
VOCAB, LENGTH, BATCH = 97, 10, 2

warnings.filterwarnings("ignore", module="transformers")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # tiny models: threads only wait for each other

Batch = dict[str, torch.Tensor]


def tokens(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(4, VOCAB, shape, generator=generator)


def causal(generator: torch.Generator) -> Batch:
    ids = tokens(generator, BATCH, LENGTH)
    return {"input_ids": ids, "labels": ids}


def masked(generator: torch.Generator) -> Batch:
    return {**causal(generator), "next_sentence_label": torch.randint(0, 2, (BATCH,), generator=generator)}


def images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(BATCH, 3, 12, 12, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (BATCH,), generator=generator)}


def translation(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator, BATCH, LENGTH), "labels": tokens(generator, BATCH, 7)}


def speech(generator: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 6, 2 * 9, generator=generator)
    return {"input_features": features, "labels": tokens(generator, BATCH, 7)}


@dataclass(frozen=True)
class Architecture:
    """`published`: the keys of a transformers configuration by preset; `common`: of all of them."""

    model: str
    config: str
    published: dict[str, dict[str, Any]]
    tiny: dict[str, Any]
    common: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[torch.Generator], Batch] = causal
    sets: dict[str, int | bool] = field(default_factory=dict)  # of the spec, where no configuration says it

    def configuration(self, keys: dict[str, Any]) -> Any:
        return getattr(transformers, self.config)(**{**self.common, **keys})

    def meta(self, keys: dict[str, Any]) -> Any:
        """The model in its full size, without memory."""
        with torch.device("meta"):
            model = getattr(transformers, self.model)(self.configuration(keys))
        model.tie_weights()
        return model

    def small(self, **keys: Any) -> Any:
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(self.configuration({**self.tiny, **keys}))
        with torch.no_grad():  # zeros would hide gradients, as those behind LoRA's B would be
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn_like(parameter))
        return model.eval()

    def batches(self, micro_steps: int, world: int, seed: int = 7) -> list[list[Batch]]:
        """By micro-step and rank; the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return [[self.batch(generator) for _ in range(world)] for _ in range(micro_steps)]


def sizes(names: str, *rows: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
    """Rows of values under the keys `names`; each begins with the name of its preset."""
    return {str(row[0]): dict(zip(names.split(), row[1:], strict=True)) for row in rows}


DECODER = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
TINY = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 32}  # fmt: skip
LLAMA = sizes(
    DECODER,
    ("llama-2-7b", 32000, 4096, 32, 32, 32, 11008),
    ("llama-2-13b", 32000, 5120, 40, 40, 40, 13824),
    ("llama-2-70b", 32000, 8192, 80, 64, 8, 28672),
    ("llama-3-8b", 128256, 4096, 32, 32, 8, 14336),
    ("llama-3-70b", 128256, 8192, 80, 64, 8, 28672),
    ("llama-3.1-405b", 128256, 16384, 126, 128, 8, 53248),
    ("mistral-7b", 32000, 4096, 32, 32, 8, 14336),
)
LLAMA |= sizes(
    DECODER + " head_dim tie_word_embeddings",
    ("llama-3.2-1b", 128256, 2048, 16, 32, 8, 8192, 64, True),
    ("llama-3.2-3b", 128256, 3072, 28, 24, 8, 8192, 128, True),
)
MOE = " head_dim moe_intermediate_size num_experts"
DEEPSEEK = (
    "vocab_size hidden_size num_hidden_layers first_k_dense_replace num_attention_heads num_key_value_heads "
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size "
    "moe_intermediate_size n_routed_experts n_shared_experts"
)
GEMMA = {"tie_word_embeddings": True}
BERT = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size"
T5 = "vocab_size d_model d_kv d_ff num_layers num_heads feed_forward_proj"
WHISPER = (
    "vocab_size d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads "
    "encoder_ffn_dim decoder_ffn_dim num_mel_bins"
)
MAMBA = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 5}

ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        sizes(
            "n_embd n_layer n_head",
            ("gpt2", 768, 12, 12),
            ("gpt2-medium", 1024, 24, 16),
            ("gpt2-large", 1280, 36, 20),
            ("gpt2-xl", 1600, 48, 25),
        ),
        {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 12},
    ),
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", LLAMA, TINY),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        sizes(
            DECODER + " tie_word_embeddings",
            ("qwen3-0.6b", 151936, 1024, 28, 16, 8, 3072, True),
            ("qwen3-1.7b", 151936, 2048, 28, 16, 8, 6144, True),
            ("qwen3-4b", 151936, 2560, 36, 32, 8, 9728, True),
            ("qwen3-8b", 151936, 4096, 36, 32, 8, 12288, False),
            ("qwen3-14b", 151936, 5120, 40, 40, 8, 17408, False),
            ("qwen3-32b", 151936, 5120, 64, 64, 8, 25600, False),
        ),
        {**TINY, "head_dim": 10},
        {"head_dim": 128},
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        sizes(
            DECODER + MOE,
            ("qwen3-30b-a3b", 151936, 2048, 48, 32, 4, 6144, 128, 768, 128),
            ("qwen3-235b-a22b", 151936, 4096, 94, 64, 4, 12288, 128, 1536, 128),
            ("qwen3-coder-480b-a35b", 151936, 6144, 62, 96, 8, 8192, 128, 2560, 160),
        ),
        {**TINY, "head_dim": 10, "moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2,
         "decoder_sparse_step": 2},
    ),
    "gemma": Architecture(
        "GemmaForCausalLM",
        "GemmaConfig",
        sizes(
            DECODER,
            ("gemma-2b", 256000, 2048, 18, 8, 1, 16384),
            ("gemma-7b", 256000, 3072, 28, 16, 16, 24576),
        ),
        {**TINY, "head_dim": 10, "num_key_value_heads": 1},
        GEMMA,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        sizes(
            DECODER + " head_dim",
            ("gemma-2-2b", 256000, 2304, 26, 8, 4, 9216, 256),
            ("gemma-2-9b", 256000, 3584, 42, 16, 8, 14336, 256),
            ("gemma-2-27b", 256000, 4608, 46, 32, 16, 36864, 128),
        ),
        {**TINY, "head_dim": 10, "sliding_window": 6},
        GEMMA,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        sizes(
            DECODER + " head_dim",
            ("gemma-3-1b", 262144, 1152, 26, 4, 1, 6912, 256),
            ("gemma-3-4b", 262208, 2560, 34, 8, 4, 10240, 256),
            ("gemma-3-12b", 262208, 3840, 48, 16, 8, 15360, 256),
            ("gemma-3-27b", 262208, 5376, 62, 32, 16, 21504, 128),
        ),
        {**TINY, "head_dim": 10, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        GEMMA,
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        sizes(
            DECODER + " num_local_experts",
            ("mixtral-8x7b", 32000, 4096, 32, 32, 8, 14336, 8),
            ("mixtral-8x22b", 32000, 6144, 56, 48, 8, 16384, 8),
        ),
        {**TINY, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        sizes(
            DEEPSEEK,
            ("deepseek-v3", 129280, 7168, 61, 3, 128, 128, 1536, 512, 128, 64, 128, 18432, 2048, 256, 1),
            ("moonlight-16b-a3b", 163840, 2048, 27, 1, 16, 16, None, 512, 128, 64, 128, 11264, 1408, 64, 2),
        ),
        {**TINY, "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 10, "kv_lora_rank": 7,
         "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "moe_intermediate_size": 12,
         "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        sizes(
            "hidden_size num_hidden_layers",
            ("mamba-130m", 768, 24),
            ("mamba-370m", 1024, 48),
            ("mamba-790m", 1536, 48),
            ("mamba-1.4b", 2048, 48),
            ("mamba-2.8b", 2560, 64),
        ),
        {**MAMBA, "use_bias": True},
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        sizes(
            "vocab_size hidden_size num_hidden_layers num_heads n_groups tie_word_embeddings",
            ("mamba2-130m", 50288, 768, 24, 24, 1, True),
            ("mamba2-370m", 50288, 1024, 48, 32, 1, True),
            ("mamba2-780m", 50288, 1536, 48, 48, 1, True),
            ("mamba2-1.3b", 50288, 2048, 48, 64, 1, True),
            ("mamba2-2.7b", 50288, 2560, 64, 80, 1, True),
            ("mamba-codestral-7b", 32768, 4096, 64, 128, 8, False),
        ),
        {**MAMBA, "num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "tie_word_embeddings": True},
    ),
    "bert": Architecture(
        "BertForPreTraining",
        "BertConfig",
        sizes(
            BERT,
            ("bert-base-uncased", 30522, 768, 12, 12, 3072),
            ("bert-large-uncased", 30522, 1024, 24, 16, 4096),
            ("bert-base-cased", 28996, 768, 12, 12, 3072),
            ("bert-large-cased", 28996, 1024, 24, 16, 4096),
            ("bert-base-multilingual-cased", 119547, 768, 12, 12, 3072),
        ),
        {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 40, "max_position_embeddings": 13},
        batch=masked,
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        sizes(
            "hidden_size num_hidden_layers num_attention_heads intermediate_size image_size patch_size",
            ("vit-base-patch16-224", 768, 12, 12, 3072, 224, 16),
            ("vit-base-patch16-384", 768, 12, 12, 3072, 384, 16),
            ("vit-base-patch32-384", 768, 12, 12, 3072, 384, 32),
            ("vit-large-patch16-224", 1024, 24, 16, 4096, 224, 16),
            ("vit-large-patch32-384", 1024, 24, 16, 4096, 384, 32),
        ),
        {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40,
         "image_size": 12, "patch_size": 4, "num_labels": 5},
        {"num_labels": 1000},
        batch=images,
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        sizes(
            T5,
            ("t5-small", 32128, 512, 64, 2048, 6, 8, "relu"),
            ("t5-base", 32128, 768, 64, 3072, 12, 12, "relu"),
            ("t5-large", 32128, 1024, 64, 4096, 24, 16, "relu"),
            ("t5-3b", 32128, 1024, 128, 16384, 24, 32, "relu"),
            ("t5-11b", 32128, 1024, 128, 65536, 24, 128, "relu"),
            ("t5-v1.1-small", 32128, 512, 64, 1024, 8, 6, "gated-gelu"),
            ("t5-v1.1-base", 32128, 768, 64, 2048, 12, 12, "gated-gelu"),
            ("t5-v1.1-large", 32128, 1024, 64, 2816, 24, 16, "gated-gelu"),
            ("t5-v1.1-xl", 32128, 2048, 64, 5120, 24, 32, "gated-gelu"),
            ("t5-v1.1-xxl", 32128, 4096, 64, 10240, 24, 64, "gated-gelu"),
        ),
        {"vocab_size": VOCAB, "d_model": 24, "d_kv": 7, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2,
         "num_heads": 4, "relative_attention_num_buckets": 8},
        {"decoder_start_token_id": 0},
        batch=translation,
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        sizes(
            WHISPER,
            ("whisper-tiny", 51865, 384, 4, 4, 6, 6, 1536, 1536, 80),
            ("whisper-base", 51865, 512, 6, 6, 8, 8, 2048, 2048, 80),
            ("whisper-small", 51865, 768, 12, 12, 12, 12, 3072, 3072, 80),
            ("whisper-medium", 51865, 1024, 24, 24, 16, 16, 4096, 4096, 80),
            ("whisper-large-v2", 51865, 1280, 32, 32, 20, 20, 5120, 5120, 80),
            ("whisper-large-v3", 51866, 1280, 32, 32, 20, 20, 5120, 5120, 128),
            ("whisper-large-v3-turbo", 51866, 1280, 32, 4, 20, 20, 5120, 5120, 128),
        ),
        {"vocab_size": VOCAB, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36, "num_mel_bins": 6,
         "max_source_positions": 9, "max_target_positions": 11, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1, "begin_suppress_tokens": None, "suppress_tokens": None},
        batch=speech,
    ),
}  # fmt: skip
