"""One rank of the collectives of benchmarks/gpu_multi.py, which starts it and gives it commands, a line each:
"build", "collectives BLOCKS DTYPE ROUNDS", "end". It answers with one line of JSON after an "@".
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_step_rank import answer, machine

import gradgen

SPEC = Path(__file__).resolve().parent / "gpu_blocks.yaml"
MICRO_STEPS = 4
BLOCKS: dict[str, dict[str, int | bool]] = {
    "llama-7b": {"hidden": 4096, "ffn": 11008, "layers": 8},
    "qwen2.5-0.5b": {"hidden": 896, "kv": 128, "ffn": 4864, "layers": 24, "qkv_bias": True},
    "tiny": {"hidden": 64, "ffn": 128, "layers": 3},
}
SPIN = 40_000_000  # cycles, about 20 ms: the host enqueues a step meanwhile
Body = Callable[[], None]


def milliseconds(body: Body, device: torch.device) -> tuple[float, bool]:
    """Of the device, from the caller's stream to the caller's stream, and whether the host was too slow to keep ahead."""
    if device.type == "cpu":
        dist.barrier()
        begun = time.perf_counter()
        body()
        return 1e3 * (time.perf_counter() - begun), False
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN)
    start.record()
    body()
    end.record()
    late = start.query()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)), late


def through_manager(
    module: Any, values: dict[str, Any], comm: Any, device: torch.device, **options: Any
) -> Any:
    """A manager of the blocks, and a step of it without a backward pass."""
    grads = module.GradientManager(module.Config(**values), comm, device=str(device), **options)
    layers = int(values["layers"])

    def step() -> None:
        for m in range(MICRO_STEPS):
            with grads.micro_step(m, MICRO_STEPS):
                for layer in reversed(range(layers)):
                    grads.block_full(layer)
                    grads.notify_block(layer)

    return grads, step


def bare(operation: str, arena: Any, dtype: torch.dtype, device: torch.device) -> Body:
    """The same calls straight to torch.distributed: an arena for each block, from two that take turns."""
    world, calls = dist.get_world_size(), MICRO_STEPS * arena.count
    room = world * arena.shard_numel
    inputs = [torch.zeros(room, dtype=dtype, device=device) for _ in range(2)]
    out = torch.zeros(
        arena.shard_numel if operation == "reduce_scatter" else room, dtype=dtype, device=device
    )
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def run() -> None:
        for call in range(calls):
            if operation == "reduce_scatter":
                reduce_scatter(out, inputs[call % 2])
            else:
                dist.all_to_all_single(out, inputs[call % 2])

    return run


def collectives(
    module: Any, comm: Any, device: torch.device, blocks: str, dtype: str, rounds: int
) -> dict[str, Any]:
    """Milliseconds a block and micro-step, one value a round, of each way; and bytes."""
    values, kind = BLOCKS[blocks], getattr(torch, dtype)
    managers, bodies, memory = [], {}, {}
    for name, strategy in (("reduce_scatter", "sharded"), ("all_to_all", "sharded_all_to_all")):
        grads, step = through_manager(module, values, comm, device, strategy=strategy, dtype=dtype)
        managers.append(grads)
        bodies[f"manager {name}"] = step
        memory[name] = [int(grads.memory()["total"]), int(grads.plan.strategy(strategy).memory_bytes)]
    (arena,) = managers[0].plan.arenas
    bodies["nccl reduce_scatter"] = bare("reduce_scatter", arena, kind, device)
    bodies["nccl all_to_all"] = bare("all_to_all", arena, kind, device)
    if dtype != "float32":
        bodies["nccl reduce_scatter fp32"] = bare("reduce_scatter", arena, torch.float32, device)
    calls = MICRO_STEPS * arena.count
    times: dict[str, list[float]] = {name: [] for name in bodies}
    behind = 0
    for index in range(rounds + 1):
        for name, body in bodies.items():
            spent, late = milliseconds(body, device)
            if index:  # the first opens connections
                times[name].append(spent / calls)
                behind += late
    result = {
        "ms": times,
        "arena_bytes": arena.numel * kind.itemsize,
        "memory": memory,
        "host_behind": behind,
        "transport": managers[0].transport,
    }
    for grads in managers:
        grads.close()
    del bodies, grads, step, managers
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    device, comm, module = torch.device("cpu"), None, None
    if args.device == "cpu":
        torch.set_num_threads(1)
    answer(ready=True)
    for line in sys.stdin:
        command, *values = line.split()
        if command == "build":
            if args.device == "cuda":
                index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
                device = torch.device("cuda", index)
                torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
            module, comm = gradgen.load(SPEC, device=args.device), gradgen.comm.from_torch()
            answer(machine=machine(device))
        elif command == "collectives":
            blocks, dtype, rounds = values
            answer(**collectives(module, comm, device, blocks, dtype, int(rounds)))
        elif command == "end":
            if comm is not None:
                comm.close()
            dist.destroy_process_group()
            answer(ended=True)
            return


if __name__ == "__main__":
    main()
