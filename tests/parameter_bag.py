"""A torch module with the parameters that a manager's weights ask for, and a loss with a gradient for each."""

from __future__ import annotations

from typing import Any

import torch


class Bag(torch.nn.Module):
    """Parameters by checkpoint name, ties and frozen ones as the manager has them. The same values on every rank."""

    def __init__(self, grads: Any) -> None:
        super().__init__()
        dtype, made = getattr(torch, grads.dtype), {}
        generator = torch.Generator().manual_seed(3)
        for record in grads.weights():
            if record.tied_to is None:
                values = torch.randn(tuple(record.shape), generator=generator).to(dtype)
                made[record.name] = torch.nn.Parameter(values, requires_grad=record.trainable)
        for record in grads.weights():
            *path, leaf = record.name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, made[record.tied_to or record.name])

    def _in_order(self) -> list[torch.nn.Parameter]:
        """Against the mini spec's backward order, so that autograd meets them in that order."""
        last = ["embed.weight", "positions", "twice", "layers", "logit_scale", "spare", "head.weight"]
        named = list(self.named_parameters())
        return [p for prefix in last for name, p in named if name.startswith(prefix)]

    def forward(self, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        total = torch.zeros(())
        for p in self._in_order():
            if p.requires_grad:
                total = total + (p.float() * torch.randn(p.shape, generator=generator)).sum()
        return total


def train(bag: Bag, grads: Any, optimizer: Any, rank: int, steps: int) -> None:
    """Steps of two micro-steps; without an optimizer the gradients are left for the caller."""
    for step in range(steps):
        for m in range(2):
            with grads.micro_step(m, 2):
                bag(rank, 2 * step + m).backward()
        if optimizer is not None:
            optimizer.step(max_norm=1.0)
            optimizer.zero_grad()
