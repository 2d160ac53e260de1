"""The model of the GPU benchmarks: a pre-norm decoder with fused projections, SwiGLU, an untied head and no
positions; 953M parameters, or the shape of a 7B model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Size(NamedTuple):
    vocab: int
    hidden: int
    heads: int
    layers: int
    ffn: int
    batch: int  # sequences of a micro-step and rank
    length: int

    @property
    def dims(self) -> dict[str, int]:
        """What the spec calls dims."""
        return {name: getattr(self, name) for name in ("vocab", "hidden", "layers", "ffn")}


SIZES = {
    "tiny": Size(256, 64, 4, 3, 176, 2, 16),
    "953m": Size(32000, 2048, 16, 16, 5632, 4, 1024),
    "7b": Size(32000, 4096, 32, 32, 11008, 1, 2048),
}


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden, self.heads = size.hidden, size.heads
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_up = nn.Linear(hidden, 2 * size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: [batch, length] integers. Returns the mean loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make(size: Size, device: Any, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Made where and as it is used: a copy in fp32 on the way would count as peak memory. The same on every rank."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Decoder(size)
    finally:
        torch.set_default_dtype(before)


def batches(size: Size, device: Any, micro_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of a step. All ranks get the same, so that their mean gradient is each rank's own."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, size.vocab, (micro_steps, size.batch, size.length + 1), generator=generator).to(
        device
    )
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def mark_layers(model: Decoder, mark: Callable[[int], None]) -> list[Callable[[], None]]:
    """Calls `mark(layer)` where the backward pass of a layer begins. Returns what removes that."""

    def watch(layer: int) -> Callable[..., None]:
        def begin(_module: object, _inputs: object, output: torch.Tensor) -> None:
            output.register_hook(lambda _gradient: mark(layer))

        return begin

    return [part.register_forward_hook(watch(i)).remove for i, part in enumerate(model.layers)]
