"""The contract between gloo processes: the same bits as between threads, over shared memory and over the group's collectives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.process_rank import OPTIONS, noise
from tests.support import STRATEGIES, config, model, run_ranks, shards, whole_step

ROOT = Path(__file__).resolve().parents[1]


def spawn(world: int, *command: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [
        subprocess.Popen(
            [sys.executable, *command], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip


def finish(ranks: list[subprocess.Popen[str]], timeout: float = 120) -> list[str]:
    try:
        return [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def by_threads(world: int) -> list[dict[str, np.ndarray]]:
    def body(rank: int, comm: Any) -> dict[str, np.ndarray]:
        out: dict[str, np.ndarray] = {}
        for strategy in STRATEGIES:
            for name, options in OPTIONS.items():
                grads = model().GradientManager(
                    config(tied=name == "fp32"), comm, strategy=strategy, **options
                )
                for _ in range(2):
                    whole_step(grads, 2, lambda m: noise(rank, m))
                for weight, (offset, shape, value) in shards(grads).items():
                    out[f"{strategy}|{name}|{weight}|{offset}|{'x'.join(map(str, shape))}"] = value
        return out

    return run_ranks(world, body)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_give_the_bits_of_threads(world: int, tmp_path: Path) -> None:
    model(), model("rows")  # compiled before the ranks ask for them
    transports = ["shared", "group"] if world > 1 else ["auto"]
    results: dict[str, list[dict[str, np.ndarray]]] = {}
    for transport in transports:
        out = tmp_path / transport
        out.mkdir()
        ranks = (
            spawn(world, "-m", "tests.process_rank", str(out), transport)
            if world > 1
            else spawn(2, "-m", "tests.process_rank", str(out), transport)
        )
        texts = finish(ranks)
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(texts)
        results[transport] = [dict(np.load(out / f"rank{rank}.npz")) for rank in range(len(ranks))]
    reference = by_threads(max(world, 2))
    for transport, per_rank in results.items():
        for rank, found in enumerate(per_rank):
            for key, value in reference[rank].items():
                assert np.array_equal(found[key], value), (transport, rank, key)
    if len(results) == 2:
        for rank, (shared, group) in enumerate(zip(results["shared"], results["group"], strict=True)):
            assert shared.keys() == group.keys()
            for key, value in shared.items():
                assert np.array_equal(value, group[key]), (rank, key)


LOST = textwrap.dedent(
    """
    import os, sys, time
    import torch.distributed as dist
    import gradgen
    from tests.support import config, fill_block, model

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    grads = model().GradientManager(config(), gradgen.comm.from_torch(transport="shared"), strategy="sharded")
    grads.start_micro_step(0, 1)
    fill_block(grads, 2, 1.0)
    print("READY", flush=True)
    if rank == 1:
        time.sleep(600)
    start = time.monotonic()
    try:
        grads.end_micro_step()
    except gradgen.PeerLost as error:
        print(f"LOST {time.monotonic() - start:.2f} {error}", flush=True)
        try:
            grads.start_micro_step(0, 1)
        except gradgen.CommError as again:
            print("AGAIN", "reset" in str(again), flush=True)
    os._exit(0)
    """
)


def test_a_killed_rank_is_noticed_at_once(tmp_path: Path) -> None:
    model()
    script = tmp_path / "lost.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + LOST)
    ranks = spawn(2, str(script))
    assert ranks[1].stdout is not None
    lines = iter(ranks[1].stdout.readline, "")
    assert any("READY" in line for line in lines)
    time.sleep(0.3)
    ranks[1].send_signal(signal.SIGKILL)
    text = finish(ranks)[0]
    found = next((line for line in text.splitlines() if line.startswith("LOST")), "")
    assert found, text
    assert float(found.split()[1]) < 5 and "rank 1" in found
    assert "AGAIN True" in text
