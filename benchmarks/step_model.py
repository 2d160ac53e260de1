"""The model of benchmarks/step.py: a pre-norm decoder with rotary positions, SwiGLU and an untied head;
33.7M parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, LAYERS, HEADS, FFN = 8192, 512, 8, 8, 1376


def rotary_tables(head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, [length, head_dim / 2] each, fp32."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, heads, length, head_dim]."""
    even, odd = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (self._split(project(normed)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Decoder(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(HIDDEN, HEADS, FFN) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        cos, sin = rotary_tables(HIDDEN // HEADS, length)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: [batch, length] integers. Returns the mean loss, fp32."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
