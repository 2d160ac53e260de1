"""One rank of one variant of benchmarks/step.py, which starts it. Writes JSON to --out."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_model import LAYERS, VOCAB, Decoder

HERE = Path(__file__).resolve().parent
LR = 1e-4
Context = Callable[[int, int], AbstractContextManager[Any]]


def no_context(_i: int, _n: int) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


@dataclass
class Variant:
    """How a peer runs one step. `micro(i, n)` surrounds micro-step i of n; `gradient_bytes` counts what it
    holds after backward.
    """

    forward: Callable[..., torch.Tensor]
    step: Callable[[], None]
    gradient_bytes: Callable[[], int]
    micro: Context = no_context
    planned_bytes: int | None = None
    close: list[Callable[[], None]] = field(default_factory=list)


def adamw(parameters: Iterable[torch.Tensor], **kw: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True, **kw)


def stored(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    sizes = {}
    for tensor in tensors:
        if tensor is not None:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def optimizer_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def floor(model: Decoder) -> Variant:
    """Ranks that do not talk to each other: what the model and its optimizer cost by themselves."""
    return Variant(
        model, optimizer_step(adamw(model.parameters())), lambda: stored(p.grad for p in model.parameters())
    )


def ddp(model: Decoder, options: set[str]) -> Variant:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view="view" in options)
    if "zero" in options:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=LR, fused=True
        )
    else:
        optimizer = adamw(model.parameters())

    def micro(i: int, n: int) -> AbstractContextManager[Any]:
        return wrapped.no_sync() if "nosync" in options and i < n - 1 else contextlib.nullcontext()

    buckets = sum(
        p.numel() * p.element_size() for p in model.parameters()
    )  # DDP's own buckets, beside p.grad unless views

    def gradient_bytes() -> int:
        return stored(p.grad for p in model.parameters()) + (0 if options == {"view"} else buckets)

    return Variant(wrapped, optimizer_step(optimizer), gradient_bytes, micro)


def fsdp2(model: Decoder, options: set[str]) -> Variant:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    keep = "keep" in options
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep)

    def micro(i: int, n: int) -> AbstractContextManager[Any]:
        if "nosync" in options:
            model.set_requires_gradient_sync(i == n - 1)  # type: ignore[operator]
            if keep:
                model.set_reshard_after_backward(i == n - 1)  # type: ignore[operator]
        return contextlib.nullcontext()

    full = sum(p.numel() * p.element_size() for p in model.parameters()) if "nosync" in options else 0

    def gradient_bytes() -> int:
        return max(stored(p.grad for p in model.parameters()), full)

    return Variant(model, optimizer_step(adamw(model.parameters())), gradient_bytes, micro)


def gradgen_variant(model: Decoder, strategy: str, extra: dict[str, Any]) -> Variant:
    import gradgen
    from gradgen.torch import ShardedOptimizer, attach

    module = gradgen.load(HERE / "step_model.yaml", device="cpu")
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    manager = module.GradientManager(
        module.Config(layers=LAYERS), gradgen.comm.from_torch(), strategy=strategy, dtype=dtype
    )
    attachment = attach(model, manager, **extra)
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, manager, lr=LR, fused=True)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    planned = manager.plan.strategy(strategy)
    planned_bytes = planned.full_bytes + planned.shard_bytes + planned.staging_bytes + planned.receive_bytes

    def gradient_bytes() -> int:
        return int(manager.memory()["total"]) + stored(p.grad for p in model.parameters())

    return Variant(
        model, step, gradient_bytes, manager.micro_step, planned_bytes, [attachment.detach, manager.close]
    )


def build(name: str, model: Decoder) -> Variant:
    family, _, rest = name.partition("_")
    if family == "floor":
        return floor(model)
    if family == "ddp":
        return ddp(model, set(rest.split("_")) - {""})
    if family == "fsdp2":
        return fsdp2(model, set(rest.split("_")) - {""})
    return gradgen_variant(model, rest.removesuffix("_fused"), {"fuse_wgrad": rest.endswith("_fused")})


def status_mib(key: str) -> float:
    """A value of /proc/self/status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--micro-steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Decoder(args.length).to(getattr(torch, args.dtype))
    variant = build(args.variant, model)
    generator = torch.Generator().manual_seed(1 + rank)
    data = [
        torch.randint(0, VOCAB, (args.batch, args.length + 1), generator=generator)
        for _ in range(args.micro_steps)
    ]
    losses: list[float] = []
    gradient_bytes = 0

    def step(timed: bool) -> tuple[float, float]:
        nonlocal gradient_bytes
        dist.barrier()
        start, cpu, total = time.perf_counter(), time.process_time(), 0.0
        for i, tokens in enumerate(data):
            with variant.micro(i, len(data)):
                loss = variant.forward(tokens[:, :-1], tokens[:, 1:])
                (loss / len(data)).backward()
                total += loss.item() / len(data)
            if not timed:
                gradient_bytes = max(gradient_bytes, variant.gradient_bytes())
        variant.step()
        losses.append(total)
        return time.perf_counter() - start, time.process_time() - cpu

    for _ in range(args.warmup):
        step(False)
    Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the steady peak
    times = [step(True) for _ in range(args.steps)]
    result = {
        "variant": args.variant,
        "rank": rank,
        "times": [wall for wall, _ in times],
        "cpu": [cpu for _, cpu in times],
        "losses": losses,
        "gradient_bytes": gradient_bytes,
        "planned_bytes": variant.planned_bytes,
        "peak_mib": status_mib("VmHWM"),
        "parameters": sum(p.numel() for p in Decoder(1).parameters()),
    }
    Path(args.out).write_text(json.dumps(result))
    dist.barrier()
    for close in variant.close:
        close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
