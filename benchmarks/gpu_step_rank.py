"""One rank of one variant of a step, for benchmarks/gpu_step.py and gpu_multi.py, which start it.

It reads a command a line ("build", "run STEPS", "end") and answers each with one line of JSON after an "@". It lives
through all rounds, so that a round costs the steps that it measures and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_model import SIZES, batches, make
from gpu_variants import build, needs_group

WARMUP = 3


def answer(**values: Any) -> None:
    print("@" + json.dumps(values), flush=True)


class Clock:
    """Milliseconds between marks, on the device where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def pairs(self) -> list[float]:
        """Between the first and second mark, the third and fourth, and so on."""
        if self.gpu:
            torch.cuda.synchronize()
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        return [a.elapsed_time(b) if self.gpu else 1e3 * (b - a) for a, b in pairs]


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


class Rank:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.size = args, SIZES[args.size]
        if args.layers:
            self.size = self.size._replace(layers=args.layers)
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cpu")
        if args.device == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())

    def build(self) -> dict[str, Any]:
        device, world = self.device, int(os.environ.get("WORLD_SIZE", "1"))
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # the context is nobody's gradient memory
            torch.cuda.synchronize()
        before = free_bytes(device)
        if needs_group(self.args.variant, world):
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        model = make(self.size, device)
        parameters = sum(p.numel() for p in model.parameters())
        self.variant = build(self.args.variant, model, self.size, device)
        self.data = batches(self.size, device, self.args.micro_steps)
        for _ in range(WARMUP - 1):
            self.step(self.variant.clear)
        norms: list[float] = []
        self.step(lambda: norms.append(self.variant.norm()))
        self.variant.clear()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return {
            "norm": norms[0],
            "device_bytes": before - free_bytes(device),
            "held_bytes": self.variant.held(),
            "planned_bytes": self.variant.planned,
            "parameters": parameters,
            "notes": self.variant.notes,
            "machine": machine(device),
        }

    def step(self, finish: Callable[[], None]) -> None:
        n = len(self.data)
        for i, (tokens, targets) in enumerate(self.data):
            with self.variant.micro(i, n):
                (self.variant.forward(tokens, targets) / n).backward()
        finish()

    def run(self, steps: int) -> dict[str, Any]:
        gpu = self.device.type == "cuda"
        self.step(self.variant.clear)  # ranks arrive together
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        clock = Clock(self.device)
        for _ in range(steps):
            clock.mark()
            self.step(clock.mark)
            self.variant.clear()
        return {
            "ms": clock.pairs(),
            "allocated_bytes": torch.cuda.max_memory_allocated() if gpu else 0,
            "reserved_bytes": torch.cuda.max_memory_reserved() if gpu else 0,
        }

    def end(self) -> None:
        self.variant.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant")
    parser.add_argument("--size", choices=SIZES, default="953m")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--micro-steps", type=int, default=4)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    rank = None
    answer(ready=True)
    for line in sys.stdin:
        command, *values = line.split()
        if command == "build":
            rank = Rank(args)
            answer(**rank.build())
            continue
        assert rank is not None, "build comes first"
        if command == "run":
            answer(**rank.run(int(values[0])))
        elif command == "end":
            rank.end()
            answer(ended=True)
            return


if __name__ == "__main__":
    main()
