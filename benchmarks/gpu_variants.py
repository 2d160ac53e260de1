"""How DDP, FSDP2, plain autograd and gradgen each run one step of benchmarks/gpu_model.py, without an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_model import Decoder, Size

SPEC = Path(__file__).resolve().parent / "step_model_gpu.yaml"
Context = Callable[[int, int], AbstractContextManager[Any]]


def no_context(_i: int, _n: int) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


@dataclass
class Variant:
    """`micro(i, n)` surrounds micro-step i of n; `clear` drops the gradients; `norm` is of the mean gradient over
    ranks, at the end of a step. `held` counts gradient bytes on the device that torch's allocator does not know.
    """

    forward: Callable[..., torch.Tensor]
    clear: Callable[[], None]
    norm: Callable[[], float]
    micro: Context = no_context
    held: Callable[[], int] = lambda: 0
    planned: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    trace: Callable[[], Any] = list
    close: Callable[[], None] = lambda: None


def needs_group(name: str, world: int) -> bool:
    return world > 1 or name.startswith(("ddp", "fsdp2"))


def clearing(parameters: list[torch.nn.Parameter]) -> Callable[[], None]:
    def clear() -> None:
        for parameter in parameters:
            parameter.grad = None

    return clear


def squares(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Sum of squares of what this rank holds."""
    parts = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        parts.append(local.float().square().sum())
    return torch.stack(parts).sum()


def floor(model: Decoder) -> Variant:
    """Ranks that do not talk to each other: what the model costs by itself."""
    parameters = list(model.parameters())
    return Variant(model, clearing(parameters), lambda: float(squares(parameters)) ** 0.5)


def ddp(model: Decoder, options: set[str], device: torch.device) -> Variant:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view="view" in options,
    )

    def micro(i: int, n: int) -> AbstractContextManager[Any]:
        return wrapped.no_sync() if "nosync" in options and i < n - 1 else contextlib.nullcontext()

    parameters = list(model.parameters())
    return Variant(wrapped, clearing(parameters), lambda: float(squares(parameters)) ** 0.5, micro)


def fsdp2(model: Decoder, options: set[str], device: torch.device) -> Variant:
    """keep: parameters stay whole, as gradgen's do, so that only gradients travel. nosync: gradients stay whole until
    the last micro-step.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if "fp32" in options else None)
    keep = "keep" in options
    kept: dict[str, Any] = {"reshard_after_forward": False} if keep else {}  # else as FSDP2 chooses
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, **kept)
    sharded: Any = model  # fully_shard has added methods
    if keep:
        sharded.set_reshard_after_backward(False)
    parameters = list(model.parameters())  # the shards: once gathered, the model shows whole ones

    def micro(i: int, n: int) -> AbstractContextManager[Any]:
        if "nosync" in options:
            sharded.set_requires_gradient_sync(i == n - 1)
        return contextlib.nullcontext()

    def norm() -> float:
        total = squares(parameters)
        dist.all_reduce(total)
        return float(total) ** 0.5

    return Variant(model, clearing(parameters), norm, micro)


def gradgen_variant(model: Decoder, size: Size, strategy: str, fused: bool, device: torch.device) -> Variant:
    import gradgen
    from gradgen.torch import attach

    module = gradgen.load(SPEC, device=device.type)
    comm = gradgen.comm.from_torch() if dist.is_initialized() else gradgen.comm.single()
    grads = module.GradientManager(
        module.Config(**size.dims),
        comm,
        strategy=strategy,
        dtype=str(model.head.weight.dtype).removeprefix("torch."),
        device=str(device),
    )
    attachment = attach(model, grads, fuse_wgrad=fused)

    def close() -> None:
        attachment.detach()
        grads.close()
        comm.close()

    return Variant(
        model,
        grads.zero_grad,
        lambda: float(grads.grad_norm()),
        grads.micro_step,
        lambda: int(grads.memory()["total"]) - int(grads.memory()["pinned"]),
        grads.plan.strategy(strategy).memory_bytes,
        {"transport": grads.transport, "fused": len(attachment.fused), "memory": dict(grads.memory())},
        grads.trace,
        close,
    )


def build(name: str, model: Decoder, size: Size, device: torch.device) -> Variant:
    family, _, rest = name.partition("_")
    options = set(rest.split("_")) - {""}
    if family == "floor":
        return floor(model)
    if family == "ddp":
        return ddp(model, options, device)
    if family == "fsdp2":
        return fsdp2(model, options, device)
    if family == "gradgen":
        return gradgen_variant(model, size, rest.removesuffix("_fused"), rest.endswith("_fused"), device)
    raise ValueError(f"no variant {name!r}: floor, ddp..., fsdp2... or gradgen_STRATEGY[_fused]")
