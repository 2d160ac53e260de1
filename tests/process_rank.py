"""One gloo rank of test_contract_processes.py: runs contract steps over a transport and writes its shards.

python -m tests.process_rank OUT TRANSPORT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import gradgen
from tests.support import STRATEGIES, config, fill_block, fill_weight, model, shards, whole_step

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed": {"dtype": "bfloat16", "accumulator": "float32"},
    "stochastic": {"dtype": "bfloat16", "rounding": "stochastic", "seed": 5},
    "wire": {"wire": "bfloat16", "wire_rounding": "stochastic"},
}


def noise(rank: int, m: int) -> float:
    return float(np.random.default_rng([rank, m]).standard_normal())


def main(out: Path, transport: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    comm = gradgen.comm.from_torch(transport=transport)
    results: dict[str, np.ndarray] = {}
    for strategy in STRATEGIES:
        for name, options in OPTIONS.items():
            grads = model().GradientManager(config(tied=name == "fp32"), comm, strategy=strategy, **options)
            for _ in range(2):
                whole_step(grads, 2, lambda m: noise(rank, m))
            assert grads.trace() == [tuple(entry) for entry in grads.plan_for(2).trace(strategy)]
            assert grads.memory()["total"] == grads.plan.strategy(strategy).memory_bytes
            for weight, (offset, shape, value) in shards(grads).items():
                results[f"{strategy}|{name}|{weight}|{offset}|{'x'.join(map(str, shape))}"] = value
            results[f"{strategy}|{name}|norm"] = np.asarray(grads.grad_norm())
    rows(rank, comm, results)
    skipped(rank, comm)
    unequal(rank, comm)
    np.savez(out / f"rank{rank}.npz", **results)
    comm.barrier()
    dist.destroy_process_group()


def rows(rank: int, comm: Any, results: dict[str, np.ndarray]) -> None:
    """Row and whole shards travel packed."""
    module = model("rows")
    for strategy in ("unsharded", "sharded", "replicated", "fully_sharded"):
        grads = module.GradientManager(module.Config(hidden=5, heads=7, layers=2), comm, strategy=strategy)
        with grads.micro_step(0, 1):
            for name in ("head", "gain"):
                fill_weight(grads, name, noise(rank, 7))
            for layer in (1, 0):
                fill_block(grads, layer, noise(rank, layer))
        for weight, (offset, shape, value) in shards(grads).items():
            results[f"{strategy}|rows|{weight}|{offset}|{'x'.join(map(str, shape))}"] = value


def skipped(rank: int, comm: Any) -> None:
    """A rank that skips blocks sends zeros for them, also when every buffer is in use."""
    grads = model().GradientManager(config(layers=6), comm, strategy="sharded", block_buffers=1)
    for m in range(2):
        with grads.micro_step(m, 2):
            for name in ("lm_head", "spare", "logit_scale", "twice", "positions", "embedding"):
                fill_weight(grads, name, 1.0)
            for layer in (5, 3, 1) if (rank + m) % 2 == 0 else (4, 2, 0):
                fill_block(grads, layer, 2.0)
    for name, (_, _, value) in shards(grads).items():
        assert np.all(value == 2.0), (name, value)


def unequal(rank: int, comm: Any) -> None:
    """Ranks that build different managers are told so, all of them, and the communicator stays usable."""
    try:
        model().GradientManager(config(hidden=7 if rank == 0 else 6), comm, strategy="sharded")
    except gradgen.MismatchError as error:
        assert "rank 1" in str(error), error
    else:
        raise AssertionError("different models were accepted")
    comm.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
