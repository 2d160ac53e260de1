"""Fused layers one by one, on the CPU and, where there is one, on a GPU: first touches and sums, against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_models import relative

from gradgen.torch import fuse, linear

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


class Buffer:
    """A link with one buffer, as an attachment has for each weight."""

    def __init__(self, weight: Tensor) -> None:
        self.running, self.tensor, self.touched = True, torch.full_like(weight, float("nan")), False

    def take(self, unit: Any, index: int) -> tuple[Tensor, bool]:
        add, self.touched = self.touched, True
        return self.tensor, add


def two_backwards(module: nn.Module, x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of x of two backward passes."""
    slopes = []
    for i in range(2):
        with torch.autocast(x.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            probe = x.detach().requires_grad_() if x.is_floating_point() else x
            out = module(probe)
        scale = torch.linspace(-1, 1 + i, out.numel(), device=x.device).view(out.shape)
        (out.float() * scale).sum().backward()
        slopes += [probe.grad] if probe.grad is not None else []
    return out.detach(), slopes


def check(module: Any, x: Tensor, tolerance: float, dtype: torch.dtype | None = None) -> Buffer:
    out, slopes = two_backwards(module, x, dtype)
    wanted = module.weight.grad
    for p in module.parameters():
        p.grad = None
    link = Buffer(module.weight)
    layer, undo = fuse.fuse(module, link, None, 0, False)  # type: ignore[misc]
    fused_out, fused_slopes = two_backwards(module, x, dtype)
    undo()
    assert layer.reason is None and link.touched and module.weight.grad is None
    assert torch.equal(fused_out, out)
    assert all(relative(a, b) <= tolerance for a, b in zip(fused_slopes, slopes, strict=True))
    assert relative(link.tensor, wanted) <= tolerance
    return link


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear(device: str, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(24, 40, bias=bias, device=device, dtype=dtype)
    check(module, torch.randn(3, 7, 24, device=device, dtype=dtype), 1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_under_autocast_sums_in_fp32(dtype: torch.dtype) -> None:
    """Nearer to the exact gradient than autograd, which rounds it to 16 bits first."""
    torch.manual_seed(0)
    module = nn.Linear(64, 40, device="cuda")
    x = torch.randn(3, 7, 64, device="cuda")
    assert linear.wide_products("cuda", dtype)[0]
    found = check(module, x, 1e-2, dtype).tensor
    out = torch.linspace(-1, 1, 840, device="cuda") + torch.linspace(-1, 2, 840, device="cuda")
    assert relative(found, out.view(21, 40).t() @ x.view(21, 64)) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_embedding(device: str) -> None:
    torch.manual_seed(0)
    module = nn.Embedding(50, 16, padding_idx=4 if device == "cpu" else None, device=device)
    ids = torch.randint(0, 50, (64, 32), generator=torch.Generator().manual_seed(0)).to(device)
    runs = [check(module, ids, 1e-6).tensor for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_padding_elsewhere_than_on_the_cpu() -> None:
    module = nn.Embedding(50, 16, padding_idx=4, device="meta")
    reason = fuse.fuse(module, Buffer(module.weight), None, 0, False)
    assert reason == "all rows of padding_idx would be added to one row, one after the other, on a GPU"
