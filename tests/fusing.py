"""A small net whose layers can be fused, its manager, and the comparison with plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_models import relative

import gradgen

SPEC = Path(__file__).parent / "specs" / "fusing.yaml"
EVERY = ("embed", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head")
Forward = Callable[["Net", int], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(functional.gelu(self.up(self.frozen(x))))
        return out


class Net(nn.Module):
    def __init__(self, tied: bool = False, padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8, padding_idx=padding)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def ids(seed: int) -> Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(seed))


def entropy(net: Net, seed: int) -> Tensor:
    """A loss that every weight takes part in."""
    return functional.cross_entropy(net(ids(seed)).float().flatten(0, 1), ids(seed + 100).flatten())


def manager(tied: bool = False, **options: Any) -> Any:
    module = gradgen.load(SPEC, device="cpu", log=lambda text: None)
    return module.GradientManager(module.Config(tied=tied), **options)


def backward(net: Net, forward: Forward, step: int) -> None:
    forward(net, step).backward()


def differences(
    net: Net, grads: Any, forward: Forward = entropy, micro_steps: int = 2, run: Any = backward
) -> dict[str, float]:
    """By weight, of a step with `grads` against the same step of a copy by plain autograd."""
    plain = copy.deepcopy(net)
    for i in range(micro_steps):
        run(plain, forward, i)
        with grads.micro_step(i, micro_steps):
            run(net, forward, i)
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    named = {name: torch.from_dlpack(shard).clone() for name, shard in grads.named_gradients().items()}
    assert named.keys() == {name for name, p in net.named_parameters() if "frozen" not in name}
    assert all(p.grad is None for p in net.parameters())
    zero = torch.zeros(1)
    return {
        name: relative(
            value.view(-1), (zero if wanted[name] is None else wanted[name]).reshape(-1).expand(value.numel())
        )
        for name, value in named.items()
    }


def assert_equal(
    net: Net, grads: Any, forward: Forward = entropy, tolerance: float = 1e-6, **options: Any
) -> None:
    for _ in range(2):  # the second step: first touches again
        found = differences(net, grads, forward, **options)
        assert all(value <= tolerance for value in found.values()), found
