"""Layers whose weight gradient is written, or added, into the manager's buffer where it is computed.

Autograd makes a gradient, then something copies or adds it where it belongs: two more passes over memory, and a
temporary of the weight's size. A matrix product can do both by itself (beta = 0 or 1), as Megatron's gradient
accumulation fusion does on GPUs; an embedding's rows can be added one by one.

Each function here is what autograd would do, but for the weight's gradient: autograd gets None for it, and the
manager's buffer the sum. Where only autograd can do what is asked for (a graph of the gradient, a gradient that
`torch.autograd.grad` returns, a weight that this backward pass leaves out), it does it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Gradients = tuple["Tensor | None", ...]


class Sink(Protocol):
    """Where the gradient of one weight goes."""

    weight: torch.nn.Parameter
    kind: str  # device type
    zeroed: bool  # the buffer is zero when it is handed out
    reason: str | None  # why a gradient was left to autograd

    def take(self) -> tuple[Tensor, bool]:
        """The weight's buffer, about to be written, and whether to add."""


def wanted(ctx: Any, sink: Sink) -> bool:
    """Whether this backward pass is one that only adds to the gradient of the weight, the function's second input.

    It is not for `backward(inputs=...)` without the weight, nor for `torch.autograd.grad`. Autograd's node for the
    weight is asked for here and not kept: it would pin the stream on which the weight's hook runs.
    """
    if torch.is_grad_enabled():  # create_graph=True: what is done here is differentiated too
        sink.reason = "a graph of its gradient was asked for"
        return False
    weight = sink.weight
    if weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > 1:
        sink.reason = "its weight has a hook, which wants to see the gradient"
        return False
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[1][0])
    except RuntimeError:  # torch.autograd.grad with the weight among its inputs
        return False


class Product(torch.autograd.Function):
    """x [..., in], weight [out, in] -> [..., out], and [in, out] where `transposed`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink, transposed: bool
    ) -> Tensor:
        ctx.sink, ctx.transposed = sink, transposed
        used = weight
        if weight.dtype != x.dtype:  # autocast; its cache must not learn of casts that autograd does not see
            used, bias = weight.to(x.dtype), bias if bias is None else bias.to(x.dtype)
            ctx.save_for_backward(x, weight, used)
        else:
            ctx.save_for_backward(x, weight)
        if not transposed:
            return functional.linear(x, used, bias)
        rows = x.reshape(-1, x.shape[-1])
        product = torch.mm(rows, used) if bias is None else torch.addmm(bias, rows, used)
        return product.view(*x.shape[:-1], used.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        sink: Sink = ctx.sink
        if torch.is_autocast_enabled(sink.kind):  # backward() within autocast: the products stay as they are
            with torch.autocast(sink.kind, enabled=False):
                return _product_backward(ctx, sink, gradient)
        return _product_backward(ctx, sink, gradient)


def _product_backward(ctx: Any, sink: Sink, gradient: Tensor) -> Gradients:
    x, weight, *cast = ctx.saved_tensors
    into_x, into_weight, into_bias = ctx.needs_input_grad[:3]
    used = cast[0] if cast else weight
    if cast and torch.is_grad_enabled():
        used = weight.to(x.dtype)  # as a part of the graph
    flat = x.dim() == 2
    rows = gradient if flat else gradient.reshape(-1, gradient.shape[-1])
    columns = x if flat else x.reshape(-1, x.shape[-1])
    left, right = (columns, rows) if ctx.transposed else (rows, columns)
    of_weight = None
    if into_weight and wanted(ctx, sink):
        buffer, add = sink.take()
        if buffer.dtype != left.dtype:
            _wide(buffer, left.t(), right, add)
        elif add:
            buffer.addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=buffer)
    elif into_weight:
        of_weight = left.t().mm(right).to(weight.dtype)
    of_x = None
    if into_x:
        of_x = rows.mm(used.t() if ctx.transposed else used)
        of_x = of_x if flat else of_x.view(x.shape)
    return of_x, of_weight, rows.sum(0) if into_bias else None, None, None


def _wide(buffer: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
    """Products of 16-bit numbers summed into an fp32 buffer, not rounded to 16 bits in between."""
    if not add:
        torch.mm(left, right, out_dtype=buffer.dtype, out=buffer)
    elif wide_products(buffer.device.type, left.dtype)[1]:
        torch.addmm(buffer, left, right, out_dtype=buffer.dtype, out=buffer)
    else:  # torch 2.8 adds to 16-bit sums only
        buffer.add_(torch.mm(left, right, out_dtype=buffer.dtype))


@lru_cache
def wide_products(kind: str, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether torch multiplies 16-bit matrices into an fp32 one on this kind of device, and adds to one. It differs
    between versions, and there is no other way to know than to try, once."""
    ones, out = torch.ones(16, 16, dtype=dtype, device=kind), torch.zeros(16, 16, device=kind)
    try:
        torch.mm(ones, ones, out_dtype=out.dtype, out=out)
    except (TypeError, RuntimeError):
        return False, False
    try:
        torch.addmm(out, ones, ones, out_dtype=out.dtype, out=out)
    except (TypeError, RuntimeError):
        return True, False
    return True, torch.equal(out, torch.full_like(out, 32))


class Lookup(torch.autograd.Function):
    """Rows of an embedding. On GPUs they are added in an order that does not change from run to run."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, sink: Sink, padding: int | None) -> Tensor:
        ctx.sink, ctx.padding, ctx.rows = sink, padding, weight.shape[0]
        ctx.save_for_backward(indices)
        return functional.embedding(indices, weight, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        (indices,) = ctx.saved_tensors
        sink: Sink = ctx.sink
        if not wanted(ctx, sink):
            padding = -1 if ctx.padding is None else ctx.padding
            of_weight = torch.ops.aten.embedding_backward(gradient, indices, ctx.rows, padding, False, False)
            return None, of_weight, None, None
        buffer, add = sink.take()
        if not add and not sink.zeroed:
            buffer.zero_()
        kept = None if ctx.padding is None else buffer[ctx.padding].clone()
        flat, rows = indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if sink.kind == "cpu":
            buffer.index_add_(0, flat, rows)
        else:
            buffer.index_put_((flat,), rows, accumulate=True)
        if kept is not None:
            buffer[ctx.padding] = kept
        return None, None, None, None
