"""What the ranks of test_torch_parity.py and test_torch_comm.py do. Each function runs in a gloo group and
returns plain values.
"""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_models import loss, make, reference, relative, tokens

import gradgen
from gradgen.comm_torch import TorchTransport, default_group_info
from gradgen.torch import ShardedOptimizer, attach

MICRO_STEPS = 2


def shard_errors(grads: Any, wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative error of this rank's shards; every wanted gradient must be there."""
    named = grads.named_gradients()
    assert set(named) == set(wanted), set(named) ^ set(wanted)
    worst = 0.0
    for name, shard in named.items():
        assert tuple(shard.global_shape) == tuple(wanted[name].shape), name
        if shard.numel:
            part = wanted[name].reshape(-1)[shard.offset : shard.offset + shard.numel]
            scale = wanted[name].double().norm() * (shard.numel / wanted[name].numel()) ** 0.5
            got = torch.from_dlpack(shard).reshape(-1).double()
            worst = max(
                worst, ((got - part.double()).norm() / torch.maximum(part.double().norm(), scale)).item()
            )
    return worst


def ddp_error(model: torch.nn.Module, data: torch.Tensor, wanted: dict[str, torch.Tensor]) -> float:
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    rank = dist.get_rank()
    for i, row in enumerate(data):
        wrapped.require_backward_grad_sync = i == len(data) - 1
        loss(wrapped, row[rank]).backward()
    return max(
        relative(p.grad, wanted[name]) for name, p in wrapped.module.named_parameters() if p.grad is not None
    )


def everything(models: list[str], train: list[str], faults: bool) -> dict[str, Any]:
    """All that test_torch_parity.py asks of one world size, in one start of the ranks."""
    results: dict[str, Any] = {
        "parity": parity(models),
        "bf16": bf16_errors(["llama-tied", "gpt2"]),
        "curves": curves("llama-tied", train, 30),
    }
    if faults:
        results["state"] = state_roundtrip()
        results["faults"] = optimizer_faults()
    return results


def parity(models: list[str]) -> dict[str, dict[str, float]]:
    """Per model: errors of DDP and of every strategy, against one process that sees every rank's data."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results: dict[str, dict[str, float]] = {}
    for name in models:
        model, module, config = make(name)
        data = tokens(0, MICRO_STEPS, world)
        wanted = reference(model, data)
        results[name] = {"ddp": ddp_error(model, data, wanted)}
        for strategy in module.GradientManager._strategies:
            grads = module.GradientManager(
                config, gradgen.comm.from_torch(), strategy=strategy, dtype="float32"
            )
            for fused in (False, True):
                way = f"{strategy} fused" if fused else strategy
                attachment = attach(model, grads, fuse_wgrad=fused)
                for _ in range(2):  # a second step: first touches again
                    for i, row in enumerate(data):
                        with grads.micro_step(i, MICRO_STEPS):
                            loss(model, row[rank]).backward()
                    assert all(p.grad is None for p in model.parameters())
                    results[name][way] = max(results[name].get(way, 0.0), shard_errors(grads, wanted))
                    grads.zero_grad()
                assert not attachment.not_fused
                attachment.detach()
            grads.close()
    return results


def bf16_errors(models: list[str]) -> dict[str, float]:
    """Per model and way: errors against the same bf16 model's gradients by plain autograd in one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    for name in models:
        model, module, config = make(name)
        model = model.to(torch.bfloat16)
        data = tokens(0, MICRO_STEPS, world)
        wanted = reference(model, data)
        for fused in (False, True):
            grads = module.GradientManager(
                config,
                gradgen.comm.from_torch(),
                strategy="sharded_all_to_all",
                dtype="bfloat16",
                accumulator="float32",
            )
            attachment = attach(model, grads, fuse_wgrad=fused)
            for i, row in enumerate(data):
                with grads.micro_step(i, MICRO_STEPS):
                    loss(model, row[rank]).backward()
            results[f"{name} fused" if fused else name] = shard_errors(grads, wanted)
            assert bool(attachment.fused) == fused
            attachment.detach()
            grads.close()
    return results


def curves(name: str, strategies: list[str], steps: int) -> dict[str, list[float]]:
    """Losses of `steps` optimizer steps: by one process on the global batch ("single"), and by strategy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, module, config = make(name)
    results = {"single": single_curve(copy.deepcopy(model), world, steps)}
    for strategy in strategies:
        mine = copy.deepcopy(model)
        grads = module.GradientManager(config, gradgen.comm.from_torch(), strategy=strategy, dtype="float32")
        attach(mine, grads)
        optimizer = ShardedOptimizer(
            torch.optim.AdamW, mine, grads, lr=3e-3, no_decay=lambda _, p: p.ndim < 2, gather_bytes=8192
        )
        results[strategy] = []
        for step in range(steps):
            data, total = tokens(step % 4, MICRO_STEPS, world), 0.0
            for i, row in enumerate(data):
                with grads.micro_step(i, MICRO_STEPS):
                    value = loss(mine, row[rank])
                    value.backward()
                total += value.item()
            optimizer.step(max_norm=1.0)
            optimizer.zero_grad()
            mean = torch.tensor(total)
            dist.all_reduce(mean)
            results[strategy].append(mean.item() / world)
        grads.close()
    return results


def single_curve(model: torch.nn.Module, world: int, steps: int) -> list[float]:
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=3e-3)
    losses = []
    for step in range(steps):
        total = 0.0
        for row in tokens(step % 4, MICRO_STEPS, world):
            for ids in row:
                value = loss(model, ids) / world
                value.backward()
                total += value.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def optimizer_faults() -> dict[str, str]:
    """Messages of what a ShardedOptimizer refuses, on ranks that differ in one parameter."""
    model, module, config = make("llama")
    grads = module.GradientManager(config, gradgen.comm.from_torch(), strategy="sharded", dtype="float32")
    messages = {}
    for cls in (torch.optim.LBFGS, torch.optim.Adafactor, type("Mine", (torch.optim.Optimizer,), {})):
        messages[cls.__name__] = message(lambda cls=cls: ShardedOptimizer(cls, model, grads))
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            model.model.norm.weight[3] += 1  # type: ignore[union-attr,index]
    messages["differ"] = message(lambda: ShardedOptimizer(torch.optim.SGD, model, grads, lr=0.1))
    grads.close()
    return messages


def state_roundtrip() -> bool:
    """Two steps, save, two steps; load into a fresh optimizer and repeat: bitwise the same parameters."""
    model, module, config = make("llama")
    rank, world = dist.get_rank(), dist.get_world_size()
    grads = module.GradientManager(config, gradgen.comm.from_torch(), strategy="sharded", dtype="float32")
    attach(model, grads)

    def steps(optimizer: ShardedOptimizer, first: int) -> None:
        for step in range(first, first + 2):
            with grads.micro_step(0, 1):
                loss(model, tokens(step, 1, world)[0, rank]).backward()
            optimizer.step()
            optimizer.zero_grad()

    optimizer = ShardedOptimizer(torch.optim.AdamW, model, grads, lr=1e-2)
    steps(optimizer, 0)
    saved, parameters = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    steps(optimizer, 2)
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(parameters)
    fresh = ShardedOptimizer(torch.optim.AdamW, model, grads, lr=1e-2)
    fresh.load_state_dict(saved)
    steps(fresh, 2)
    same = all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    refused = message(lambda: fresh.load_state_dict({**saved, "rank": rank + 1}))
    grads.close()
    return same and "another rank" in refused


def transport() -> dict[str, Any]:
    """The collectives of TorchTransport on small buffers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    link = TorchTransport()
    inp, out = bytearray(b"".join(bytes([10 * rank + r]) * 3 for r in range(world))), bytearray(3 * world)
    work = link.all_to_all(out, memoryview(inp), True)
    work.wait()
    gathered = bytearray(5 * world)
    link.all_gather(gathered, bytes([rank]) * 5)
    link.all_gather(bytearray(0), b"")
    link.barrier()
    objects = link.gather_objects(b"x" * rank)
    info = default_group_info()
    sub = dist.new_group([0])
    gone = dist.new_group(list(range(world)))
    dist.destroy_process_group(gone)
    return {
        "all_to_all": list(out),
        "done": work.is_completed(),
        "all_gather": list(gathered),
        "objects": [len(o) for o in objects],
        "info": [info.rank, info.world, info.backend, info.timeout],
        "member": message(lambda: default_group_info(sub)),
        "gone": message(lambda: default_group_info(gone)),
        "sizes": message(lambda: link.all_gather(bytearray(7), b"abc")),
    }


def lost_peer() -> dict[str, Any]:
    """The last rank ends without a word; the others see PeerLost, again at every later call."""
    link = TorchTransport()
    link.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(7)
    start = time.monotonic()
    first = message(lambda: link.gather_objects(b"abc"))
    seconds = time.monotonic() - start
    result = {"first": first, "again": message(lambda: link.barrier()), "seconds": seconds}
    import json
    import sys
    from pathlib import Path

    Path(sys.argv[2]).write_text(json.dumps(result))
    os._exit(0)  # the group is broken: nothing to wait for


def message(call: Any) -> str:
    """Type and text of the error that `call` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
