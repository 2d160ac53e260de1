"""Linear layers whose weight gradient is written, or added, into the manager's buffer by the matrix product
itself.

Autograd makes a gradient, then something copies or adds it where it belongs: two more passes over memory,
and a temporary of the weight's size. A GEMM can do both by itself (beta = 0 or 1), as Megatron's gradient
accumulation fusion does on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Sink = Callable[[], tuple[torch.Tensor, bool]]  # the weight's buffer, and whether to add
Active = Callable[[], bool]


class _Linear(torch.autograd.Function):
    """x [..., in], weight [out, in] -> [..., out]. The weight gets no gradient through autograd: `sink`
    takes it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        buffer, accumulate = ctx.sink()
        if accumulate:
            buffer.addmm_(rows.t(), x.reshape(-1, x.shape[-1]))
        else:
            torch.mm(rows.t(), x.reshape(-1, x.shape[-1]), out=buffer)
        into_x = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        into_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return into_x, None, into_bias, None


def fuse(module: torch.nn.Linear, sink: Sink, active: Active) -> Callable[[], None]:
    """Replaces the forward of one layer; the result undoes it. Falls back to the original forward outside
    of micro-steps, without gradients, under autocast, for other dtypes and while torch.compile traces.
    """
    original = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if (
            torch.compiler.is_compiling()
            or not active()
            or not torch.is_grad_enabled()
            or torch.is_autocast_enabled(x.device.type)
            or x.dtype != weight.dtype
        ):
            return original(x)
        result: torch.Tensor = _Linear.apply(x, weight, module.bias, sink)  # type: ignore[no-untyped-call]
        return result

    def undo() -> None:
        if module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]

    module.forward = forward  # type: ignore[method-assign,assignment]
    return undo
