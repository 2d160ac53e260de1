"""Tiny transformers models with random weights, the specs they match, and reference gradients by plain
autograd.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

import gradgen

SPECS = Path(__file__).resolve().parents[1] / "specs"
VOCAB, LENGTH, BATCH = 97, 12, 2

torch.set_num_threads(1)  # tiny models: threads only wait for each other


def _llama_like(prefix: str, **extra: Any) -> torch.nn.Module:
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **extra,
    )
    return getattr(transformers, f"{prefix}ForCausalLM")(config)  # type: ignore[no-any-return]


def _gpt2(**extra: Any) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **extra,
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


MODELS = {
    "llama": ("llama", lambda: _llama_like("Llama", tie_word_embeddings=False)),
    "llama-tied": ("llama", lambda: _llama_like("Llama", tie_word_embeddings=True)),
    "qwen2": ("llama", lambda: _llama_like("Qwen2", tie_word_embeddings=False)),
    "qwen2-tied": ("llama", lambda: _llama_like("Qwen2", tie_word_embeddings=True)),
    "qwen3": ("qwen3", lambda: _llama_like("Qwen3", tie_word_embeddings=False, head_dim=16)),
    "gpt2": ("gpt2", _gpt2),
    "gpt2-untied": ("gpt2", lambda: _gpt2(tie_word_embeddings=False)),
}


def make(name: str, load: bool = True) -> tuple[torch.nn.Module, Any, Any]:
    """The model (the same on every rank), the built module of its spec, and its configuration; `load` False: the model
    only.
    """
    spec, build = MODELS[name]
    torch.manual_seed(0)
    model = build()
    if not load:
        return model, None, None
    module = gradgen.load(SPECS / f"{spec}.yaml", device="cpu")
    return model, module, config_for(name, model, module)


def config_for(name: str, model: torch.nn.Module, module: ModuleType) -> Any:
    return module.Config.from_hf(model.config)


def tokens(step: int, micro_steps: int, world: int) -> torch.Tensor:
    """[micro_steps, world, BATCH, LENGTH] ids: the same on every rank."""
    return torch.randint(
        0, VOCAB, (micro_steps, world, BATCH, LENGTH), generator=torch.Generator().manual_seed(100 + step)
    )


def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


def reference(model: torch.nn.Module, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the sum over micro-steps of the mean over ranks, by plain autograd in one process."""
    model = copy.deepcopy(model)
    for row in data:
        for ids in row:
            (loss(model, ids) / data.shape[1]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, L2."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
