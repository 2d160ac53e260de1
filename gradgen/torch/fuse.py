"""Which layers have their weight gradient computed in place (`attach(..., fuse_wgrad=True)`), and which not, and why.

A layer is recognised by the `forward` that its class has, so subclasses count unless they have their own. That
`forward` is replaced on the module; a call that the replacement does not understand goes to the original one, and
autograd's gradient to the manager's hook: slower, and as right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradgen.torch.linear import Lookup, Product, wide_products

Forward = Callable[..., Tensor]


class Link(Protocol):
    """The attachment, as a fused layer sees it."""

    running: bool  # within a micro-step

    def take(self, unit: Any, index: int) -> tuple[Tensor, bool]: ...


class Layer:
    """The forward of one module while it is fused, and the sink of its weight's gradient."""

    reason: str | None = None  # why a call was left to autograd
    weight: torch.nn.Parameter
    unit: Any  # the weight's place
    index: int
    kind: str  # device type
    dtype: torch.dtype
    zeroed: bool
    transposed = False
    padding: int | None = None

    def __init__(self, module: torch.nn.Module, link: Link | None) -> None:
        self.module = module
        self.link = link  # None: of a copied model, which is not attached
        self.original: Forward = MethodType(type(module).forward, module)

    def take(self) -> tuple[Tensor, bool]:
        assert self.link is not None
        return self.link.take(self.unit, self.index)

    def _idle(self) -> bool:
        """Whether this call is none of ours. A compiled graph computes gradients by itself."""
        link = self.link
        return (
            torch.compiler.is_compiling() or link is None or not link.running or not torch.is_grad_enabled()
        )

    def product(self, x: Tensor) -> Tensor:
        """The forward of linear layers."""
        if self._idle():
            return self.original(x)
        parameters = self.module._parameters
        weight = parameters["weight"]
        reason = self._reason(weight, x)
        if reason is None:
            assert weight is not None
            compute = weight.dtype
            if torch.is_autocast_enabled(self.kind):
                compute = torch.get_autocast_dtype(self.kind)
                if compute != weight.dtype and not (
                    weight.dtype == torch.float32 and wide_products(self.kind, compute)[0]
                ):
                    reason = (
                        f"autocast: torch has no {_short(compute)} product with {_short(weight.dtype)} sums here "
                        "(it needs a GPU and torch 2.8)"
                    )
                elif x.dtype != compute and x.is_floating_point() and x.dtype != torch.float64:
                    x = x.to(compute)
            if reason is None and x.dtype == compute:
                out: Tensor = Product.apply(x, weight, parameters.get("bias"), self, self.transposed)  # type: ignore[no-untyped-call]
                return out
        if reason:
            self.reason = reason
        return self.original(x)

    def lookup(self, indices: Tensor) -> Tensor:
        """The forward of embeddings."""
        if self._idle():
            return self.original(indices)
        weight = self.module._parameters["weight"]
        reason = self._reason(weight, indices)
        if reason is None:
            out: Tensor = Lookup.apply(indices, weight, self, self.padding)  # type: ignore[no-untyped-call]
            return out
        if reason:
            self.reason = reason
        return self.original(indices)

    def _reason(self, weight: Tensor | None, x: object) -> str | None:
        """None: this call can be fused. Else why not; "" for what autograd's way reports by itself."""
        if weight is not self.weight or weight.dtype != self.dtype or not weight.requires_grad:
            return ""  # replaced, converted or frozen after attach
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return f"its input is a {type(x).__name__}"
        if torch._C._are_functorch_transforms_active():
            return "a torch.func transform runs around it"
        if forward_ad._current_level >= 0:
            return "forward-mode differentiation runs around it"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """Of a copied model: a layer of the copied module."""
        return Layer(deepcopy(self.module, memo), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Layer, (self.module, None)


def fuse(
    module: torch.nn.Module, link: Link, unit: Any, index: int, zeroed: bool
) -> tuple[Layer, Callable[[], None]] | str:
    """Replaces the forward of a module whose `weight` has a place; the second result undoes it. Or why not."""
    refusal = _refusal(module)
    if refusal is not None:
        return refusal
    layer, weight = Layer(module, link), module.weight
    assert isinstance(weight, torch.nn.Parameter)
    layer.unit, layer.index, layer.zeroed = unit, index, zeroed
    layer.weight, layer.kind, layer.dtype = weight, weight.device.type, weight.dtype
    layer.transposed = _shape_of(module) == "Conv1D"
    layer.padding = getattr(module, "padding_idx", None)
    forward: Any = layer.lookup if _shape_of(module) == "Embedding" else layer.product
    module.forward = forward

    def undo() -> None:
        if _layer_of(module) is layer:
            del module.__dict__["forward"]

    return layer, undo


def _layer_of(module: torch.nn.Module) -> Layer | None:
    layer = getattr(module.__dict__.get("forward"), "__self__", None)
    return layer if isinstance(layer, Layer) else None


def _shape_of(module: torch.nn.Module) -> str | None:
    """What a module computes, by the forward of its class: "Linear", "Conv1D", "Embedding", or None."""
    forward = type(module).forward
    for cls in _known():
        if forward is cls.forward:
            return str(cls.__name__)
    return None


def _known() -> Iterator[Any]:
    yield torch.nn.Linear
    yield torch.nn.Embedding
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)  # GPT-2's: [in, out]
    if conv1d is not None:
        yield conv1d


def _refusal(module: Any) -> str | None:
    name = type(module).__name__
    shape = _shape_of(module)
    if shape is None:
        if isinstance(module, tuple(_known())):
            return f"{name} has a forward of its own"
        return f"{name} is neither a linear layer nor an embedding"
    if "forward" in module.__dict__ and getattr(_layer_of(module), "link", module) is not None:
        return "its forward has been replaced by something else"
    if type(module.weight) is not torch.nn.Parameter:
        return f"its weight is a {type(module.weight).__name__}"
    if shape == "Embedding":
        if module.sparse:
            return "its gradient is sparse"
        if module.max_norm is not None or module.scale_grad_by_freq:
            return f"it uses {'max_norm' if module.max_norm is not None else 'scale_grad_by_freq'}"
        if module.weight.dtype not in (torch.float32, torch.float64):
            return f"in {_short(module.weight.dtype)} every row added would be rounded; autograd rounds once"
        if module.padding_idx is not None and module.weight.device.type != "cpu":
            return "all rows of padding_idx would be added to one row, one after the other, on a GPU"
    return None


@lru_cache(maxsize=1)
def none_reaches_hooks() -> bool:
    """Whether torch runs the hooks of a parameter whose gradient is None, as newer ones do."""
    seen: list[object] = []
    probe: Any = torch.nn.Parameter(torch.zeros(1))
    probe.register_post_accumulate_grad_hook(seen.append)
    with torch.enable_grad():
        _Nowhere.apply(probe).sum().backward()  # type: ignore[no-untyped-call]
    return bool(seen)


class _Nowhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
