"""Trains a model of one's own with a spec of one's own: two spirals, told apart by a residual MLP.

python examples/own_spec/train.py                                              # one process
torchrun --standalone --nproc-per-node 2 examples/own_spec/train.py            # two ranks
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradgen
from gradgen.torch import ShardedOptimizer, attach

WIDTH, LAYERS, STEPS, MICRO_STEPS, BATCH = 64, 3, 60, 2, 128


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(LAYERS))
        self.classifier = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, points: Tensor) -> Tensor:
        x = self.embed(points)
        for block in self.blocks:
            x = block(x)
        return self.classifier(x)


def spirals(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points [BATCH, 2] on two interleaved spirals, and which of the two, [BATCH]."""
    radius = torch.rand(BATCH, generator=generator).sqrt()
    label = torch.randint(0, 2, (BATCH,), generator=generator)
    angle = 3 * math.pi * radius + math.pi * label
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), label


def main() -> None:
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        comm = gradgen.comm.from_torch()
        rank = dist.get_rank()
    else:
        comm, rank = gradgen.comm.single(), 0
    torch.manual_seed(0)
    model = Classifier()
    built = gradgen.load(Path(__file__).with_name("my_model.yaml"), device="cpu")
    grads = built.GradientManager(
        built.Config(width=WIDTH, layers=LAYERS, classes=2), comm, strategy="sharded", dtype="float32"
    )
    attach(model, grads)
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, grads, lr=3e-3)
    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(STEPS):
        for i in range(MICRO_STEPS):
            points, label = spirals(generator)
            with grads.micro_step(i, MICRO_STEPS):
                loss = F.cross_entropy(model(points), label) / MICRO_STEPS
                loss.backward()
        optimizer.step(max_norm=1.0)
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item() * MICRO_STEPS:.4f}")
    points, label = spirals(torch.Generator().manual_seed(0))
    if rank == 0:
        print(f"accuracy {(model(points).argmax(1) == label).float().mean().item():.3f}")
    grads.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
