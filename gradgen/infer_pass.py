"""One backward pass on the meta device: which gradients come, in which order, from how many uses, and which of them a
single matrix product writes. Costs no memory and no arithmetic.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gradgen.infer_facts import Pass
from gradgen.infer_module import plain_name
from gradgen.infer_transformers import quiet

if TYPE_CHECKING:
    import torch

LENGTH = 16
SMALL = 50_000_000  # elements of a model that is copied without being asked
# Nodes that only show another shape of a gradient, and those that are a product of two matrices.
_VIEWS = frozenset(["T", "Transpose", "Permute", "View", "UnsafeView", "Reshape", "Alias", "ToCopy"])
_PRODUCTS = frozenset(["Mm", "Addmm", "Linear"])


class NoPass(Exception):
    """The module cannot be run here; str() says why in a few words."""


Loss = Callable[[Any], "torch.Tensor"]


def backward_pass(
    module: torch.nn.Module, inputs: Mapping[str, Any] | None = None, loss: Loss | None = None
) -> Pass:
    """Runs a copy of `module` forward and backward with `inputs`, or with what a transformers model takes. Raises NoPass.

    The copy shares no parameter with the module: neither its gradients nor its buffers are touched. Where the meta
    device will not do (control flow that looks at values), a module with memory runs on a real copy, if it is small or
    inputs are given.
    """
    problem = ""
    real = _has_memory(module) and (inputs is not None or _elements(module) <= SMALL)
    for place in ("meta", "memory") if real else ("meta",):
        try:
            with quiet():
                return _run(_copy(module, place == "meta"), inputs, loss or _loss, place == "meta")
        except NoPass:
            raise
        except Exception as error:
            first = str(error).split("\n")[0][:120]
            problem = problem or f"{type(error).__name__}: {first}"
    raise NoPass(problem)


def _has_memory(module: torch.nn.Module) -> bool:
    return not any(p.is_meta for p in module.parameters())


def _elements(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _copy(module: torch.nn.Module, meta: bool) -> torch.nn.Module:
    """A copy whose parameters and buffers are on the meta device, or real ones of its own."""
    import torch

    memo: dict[int, Any] = {}
    if meta:
        for parameter in module.parameters():
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in module.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _run(module: torch.nn.Module, inputs: Mapping[str, Any] | None, loss: Loss, meta: bool) -> Pass:
    import torch

    module.train()
    for child in module.modules():
        config = getattr(child, "config", None)
        if hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = "batched_mm"  # type: ignore[union-attr]  # no loop over experts
    names = {id(p): plain_name(name) for name, p in module.named_parameters() if p.requires_grad}
    order: list[str] = []

    def arrived(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            order.append(names[id(parameter)])

    flat = {
        names[id(p)] for p in module.parameters() if p.requires_grad and p.ndim < 2
    }  # a bias is a sum of rows
    for parameter in module.parameters():
        if parameter.requires_grad:
            hook: Any = parameter.register_post_accumulate_grad_hook  # torch leaves the method untyped
            hook(arrived)
    given, words = (inputs, "the given inputs") if inputs is not None else _inputs(module)
    if meta:
        given = {key: _meta(value) for key, value in given.items()}
        with torch.device("meta"), _values_do_not_matter():
            value = loss(module(**given))
            uses, products = _graph(value, names)
            value.backward()  # type: ignore[no-untyped-call]
    else:
        value = loss(module(**given))
        uses, products = _graph(value, names)
        value.backward()  # type: ignore[no-untyped-call]
    return Pass(tuple(order), uses, products - flat, frozenset(names.values()) - set(order), words)


def _values_do_not_matter() -> Any:
    """Code that asks a tensor for its value gets one: a mask is all true, a number is 1."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
                return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
            return func(*args, **(kwargs or {}))

    return Values()  # type: ignore[no-untyped-call]


def _meta(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _meta(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_meta(inner) for inner in value)
    return value


def _inputs(module: torch.nn.Module) -> tuple[dict[str, Any], str]:
    """The main input of a transformers model, and of its decoder."""
    import torch

    main = getattr(module, "main_input_name", "")
    config = getattr(module, "config", None)
    takes = set(inspect.signature(module.forward).parameters)
    if not main or config is None or main not in takes:
        raise NoPass("no inputs are known for it")
    device = next(module.parameters()).device
    channels = getattr(config, "num_channels", 3)
    size = getattr(config, "image_size", None)
    tall, wide = size if isinstance(size, (list, tuple)) else (size or 224, size or 224)
    books = getattr(config, "num_codebooks", 1) if "Musicgen" in type(module).__name__ else 1
    make: dict[str, Callable[[], torch.Tensor]] = {
        "input_ids": lambda: torch.ones(books, LENGTH, dtype=torch.long, device=device),
        "pixel_values": lambda: torch.ones(1, channels, tall, wide, device=device),
        "input_values": lambda: torch.ones(1, 4000, device=device),
        "input_features": lambda: torch.ones(1, getattr(config, "num_mel_bins", 80), 3000, device=device),
    }
    if main not in make:
        raise NoPass(f"no {main} are known for it")
    out: dict[str, Any] = {main: make[main]()}
    if "decoder_input_ids" in takes and main != "decoder_input_ids":
        out["decoder_input_ids"] = make["input_ids"]()
    words = " and ".join(out)
    if "use_cache" in takes:
        out["use_cache"] = False
    return out, words


def _loss(output: Any) -> torch.Tensor:
    """The model's own, else the sum of the logits, or of everything that a gradient can come from."""
    import torch

    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad and own.ndim == 0:
        return own
    logits = getattr(output, "logits", None)
    found = [logits] if isinstance(logits, torch.Tensor) and logits.requires_grad else list(_tensors(output))
    sums = [tensor.float().sum() for tensor in found if tensor.is_floating_point() and tensor.requires_grad]
    if not sums:
        raise NoPass("its output has nothing to differentiate")
    return torch.stack(sums).sum()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def _graph(loss: torch.Tensor, names: Mapping[int, str]) -> tuple[dict[str, int], frozenset[str]]:
    """How many nodes feed each parameter's gradient, and whether a lone one is a matrix product."""
    users: dict[Any, list[Any]] = {}
    seen = {loss.grad_fn}
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None:
                users.setdefault(following, []).append(node)
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
    uses: dict[str, int] = {}
    products = set()
    for node, feeding in users.items():
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            uses[name] = len(feeding)
            while len(feeding) == 1 and _kind(feeding[0]) in _VIEWS:
                feeding = users.get(feeding[0], [])
            if len(feeding) == 1 and _kind(feeding[0]) in _PRODUCTS:
                products.add(name)
            else:
                uses[name] = max(uses[name], len(feeding))
    return uses, frozenset(products)


def _kind(node: Any) -> str:
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")
