"""Runs a function in several processes that form a gloo group, and brings back what each rank returns.

    results = run_ranks(2, "torch_scenarios:parity", models=["llama"])

The function gets the keyword arguments and returns plain JSON values. A rank that fails makes `run_ranks`
raise with its log.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    world: int, function: str, timeout: float = 240, codes: tuple[int, ...] | None = None, **arguments: Any
) -> list[Any]:
    """What `module:name` returns on ranks 0 to world - 1. `codes`: the exit codes to expect, None for a
    rank without a result.
    """
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{HERE.parent}:{HERE}",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = []
        for rank in range(world):
            command = [
                sys.executable,
                __file__,
                function,
                str(folder / f"{rank}.json"),
                json.dumps(arguments),
            ]
            with (folder / f"log{rank}").open("w") as log:
                ranked = {
                    **environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world),
                }
                processes.append(subprocess.Popen(command, env=ranked, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + timeout
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if codes is None and any(p.poll() for p in processes):
                time.sleep(2)  # the others see it by themselves, or they hang
                break
            time.sleep(0.02)
        for process in processes:
            process.kill()
        ended = tuple(process.wait() for process in processes)
        if ended != (codes or (0,) * world):
            logs = "\n".join(
                f"--- rank {r}\n{(folder / f'log{r}').read_text()[-3000:]}" for r in range(world)
            )
            raise AssertionError(f"{function}: ranks ended with {ended}\n{logs}")
        files = [folder / f"{rank}.json" for rank in range(world)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]


def main() -> None:
    import torch
    import torch.distributed as dist

    function, out, arguments = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
