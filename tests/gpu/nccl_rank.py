"""What ranks do that NCCL connects: torchrun --nproc-per-node N tests/gpu/nccl_rank.py [names of checks].

Any number of GPUs: rank r uses GPU r modulo their number. NCCL 2.30 and later can put several ranks on one
(NCCL_MULTI_RANK_GPU_ENABLE=1). Rank 0 prints a line a check; the exit status is 1 when one failed anywhere.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("GRADGEN_TEST_DEVICE", "cuda")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import gradgen  # noqa: E402
from tests import support  # noqa: E402
from tests.support import STRATEGIES, config, fill_block, fill_weight, outside, shards, whole_step  # noqa: E402

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GPU = support.DEVICE != "cpu"  # GRADGEN_TEST_DEVICE=cpu checks the checks, over the CPU's transports
DTYPES: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "bfloat16", "accumulator": "float32"},
    {"dtype": "bfloat16", "rounding": "stochastic", "seed": 3},
    {"wire": "bfloat16"},
    {"dtype": "float16", "accumulator": "float32"},
)
BIG = {"hidden": 96, "odd": 40, "layers": 4}


def ranks_shards(grads: Any) -> list[Any]:
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, shards(grads))
    return everyone


def whole(grads: Any) -> dict[str, np.ndarray]:
    return support.assemble(ranks_shards(grads))


def contribution(rank: int, m: int) -> float:
    return float(np.random.default_rng([rank, m]).integers(-64, 64)) / 8  # exact in every dtype, sums too


def mean(micro_steps: int) -> float:
    return sum(contribution(r, m) for r in range(WORLD) for m in range(micro_steps)) / WORLD


def sums(comm: Any) -> None:
    """Every strategy and choice of dtypes gives the mean over ranks of the sum over micro-steps."""
    for strategy in STRATEGIES:
        for options in DTYPES:
            grads = support.manager(comm, strategy, config(**BIG), **options)
            assert grads.transport == ("nccl" if GPU else "shared")
            for _ in range(2):
                whole_step(grads, 2, lambda m: contribution(RANK, m))
                for name, value in whole(grads).items():
                    wanted = mean(2)
                    tolerance = 1e-6 if options in ({}, DTYPES[1], DTYPES[4]) else 2e-2
                    assert np.all(np.abs(value - wanted) <= tolerance * max(1.0, abs(wanted))), (
                        strategy,
                        options,
                        name,
                        wanted,
                        value.ravel()[:4],
                    )
            memory, plan = grads.memory(), grads.plan.strategy(strategy)
            assert memory["total"] == plan.memory_bytes
            grads.close()


def as_on_the_cpu(comm: Any) -> None:
    """all_to_all sums are bit for bit those of CPU ranks; the others agree to fp32's rounding."""
    cpu = gradgen.load(
        support.SPECS / "mini.yaml", device=support.DEVICE
    )  # a GPU build has managers on the CPU too
    for strategy in STRATEGIES:
        for options in ({}, {"dtype": "bfloat16", "rounding": "stochastic", "seed": 8}):
            gpu = support.manager(comm, strategy, config(**BIG), **options)
            host = cpu.GradientManager(config(**BIG), comm, strategy=strategy, device="cpu", **options)
            for i in range(2):
                for grads in (gpu, host):
                    noisy_step_by_layer(grads, 2, i)
            a, b = whole(gpu), whole(host)
            for name in a:
                if strategy == "fully_sharded" or not options:
                    same = np.array_equal(a[name], b[name])
                    close = np.allclose(a[name], b[name], rtol=2e-6, atol=1e-6)
                    assert same if strategy == "fully_sharded" else close, (strategy, options, name)


def noisy_step_by_layer(grads: Any, micro_steps: int, seed: int) -> None:
    for m in range(micro_steps):
        with grads.micro_step(m, micro_steps):
            for name in outside(grads):
                fill_weight(grads, name, value_of(seed, m, name))
            for layer in reversed(range(grads.blocks["layer"])):
                fill_block(grads, layer, lambda name, m=m, layer=layer: value_of(seed, m, f"{layer}.{name}"))


def value_of(seed: int, m: int, name: str) -> float:
    bits = np.random.default_rng([seed, RANK, m, *name.encode()]).standard_normal()
    return float(np.float32(bits).astype(np.float16))


def rows_and_whole(comm: Any) -> None:
    """Row shards, and weights that every rank keeps whole: the same bits on all of them."""
    module = support.model("rows")
    for strategy in ("unsharded", "sharded", "replicated", "fully_sharded"):
        grads = module.GradientManager(
            module.Config(hidden=24, heads=5, layers=3),
            comm,
            strategy=strategy,
            dtype="bfloat16",
            accumulator="float32",
        )
        for m in range(2):
            with grads.micro_step(m, 2):
                for name in ("head", "gain"):
                    tensor = grads.non_block_full(name)
                    support.write(tensor, contribution(RANK, m) / 3, tensor.accumulate, name == "gain")
                    grads.notify_non_block(name)
                for layer in (2, 1, 0):
                    block = grads.block_full(layer)
                    for name, tensor in block.items():
                        support.write(
                            tensor, contribution(RANK, m) / 3, block.accumulate, name in ("bias", "norm")
                        )
                    grads.notify_block(layer)
        found = whole(grads)  # equal where two ranks have an element: assemble checks
        produced = [
            [torch.tensor(contribution(r, m) / 3).bfloat16().float() for m in range(2)] for r in range(WORLD)
        ]
        wanted = float(sum(sum(row) for row in produced) / WORLD)
        for name, value in found.items():
            assert np.allclose(value, wanted, rtol=1e-2, atol=1e-3), (
                strategy,
                name,
                wanted,
                value.ravel()[:3],
            )


def absent(comm: Any) -> None:
    """Blocks that a rank visits in one micro-step only are still reduced, with zeros from that rank: each its own sum."""
    for strategy in STRATEGIES:
        grads = support.manager(comm, strategy, config(**BIG))
        for m in range(2):
            with grads.micro_step(m, 2):
                for name in outside(grads):
                    fill_weight(grads, name, 1.0)
                for layer in (3, 2, 1, 0):
                    if layer not in (1, 2) or RANK == 0 or m == 1:
                        fill_block(grads, layer, 1.0 + layer)
        for name, value in whole(grads).items():
            wanted = 2.0
            if name.startswith("layers."):
                layer = int(name.split(".")[1])
                wanted = (1.0 + layer) * (1.0 + 1.0 / WORLD if layer in (1, 2) else 2.0)
            wanted = 4.0 if name == "twice" else wanted
            assert np.allclose(value, wanted, rtol=1e-6), (strategy, name, value.ravel()[:3])


def norms(comm: Any) -> None:
    for strategy in STRATEGIES:
        grads = support.manager(comm, strategy, config(**BIG))
        whole_step(grads, 1, lambda m: 2.0)
        norm = grads.clip_grad_norm_(1.0)
        count = sum(int(np.prod(s.global_shape)) for s in grads.named_gradients().values())
        assert abs(norm - 2.0 * count**0.5) < 1e-4 * norm, (strategy, norm, count)
        assert abs(grads.grad_norm() - 1.0) < 1e-4
        total = sum(float((v**2).sum()) for v in whole(grads).values()) ** 0.5
        assert abs(total - 1.0) < 1e-4


def nonfinite(comm: Any) -> None:
    """A nan on one rank: the step is skipped on all, or raises on all and names weight and rank."""
    skip = support.manager(comm, "fully_sharded", config(**BIG), nonfinite="skip")
    whole_step(skip, 1, lambda m: float("nan") if RANK == WORLD - 1 else 1.0)
    assert skip.step_skipped and skip.skipped_steps == 1 and not np.isfinite(skip.grad_norm())
    whole_step(skip, 1, lambda m: 1.0)
    assert not skip.step_skipped and skip.skipped_steps == 1
    strict = support.manager(comm, "fully_sharded", config(**BIG), nonfinite="raise")
    try:
        whole_step(strict, 1, lambda m: float("inf") if RANK == 0 else 1.0)
    except gradgen.NonFiniteError as error:
        assert "embed.weight" in str(error) and "rank" in str(error), error
    else:
        raise AssertionError("no error")


def errors_and_reset(comm: Any) -> None:
    """An exception on one rank reaches the others as an error, not a hang; reset() makes the next step right."""
    for strategy in ("sharded", "sharded_all_to_all"):
        grads = support.manager(comm, strategy, config(**BIG))
        whole_step(grads, 1, lambda m: 1.0)
        try:
            with grads.micro_step(0, 1):
                if RANK == WORLD - 1:
                    raise KeyError("a bug in the model")
                for name in outside(grads):
                    fill_weight(grads, name, 1.0)
                for layer in (3, 2, 1, 0):
                    fill_block(grads, layer, 1.0)
        except (KeyError, gradgen.CommError) as error:
            if RANK != WORLD - 1:
                assert "a bug in the model" in str(error), error
        else:
            raise AssertionError("no error")
        grads.reset()
        whole_step(grads, 2, lambda m: contribution(RANK, m))
        for name, value in whole(grads).items():
            assert np.allclose(value, mean(2), rtol=1e-6), (strategy, name)


def late(comm: Any) -> None:
    """A rank that does not come: an error that says so within the time limit, and the others are told."""
    for steps_before in (0, 1):  # also at the very first exchange, when NCCL has not set up anything yet
        short = gradgen.comm.from_torch(timeout=3.0)
        grads = support.manager(short, "sharded", config(**BIG))
        for _ in range(steps_before):
            whole_step(grads, 1, lambda m: 1.0)
        start = time.monotonic()
        try:
            if RANK == WORLD - 1:
                time.sleep(8.0)
            whole_step(grads, 1, lambda m: 1.0)
            torch.cuda.synchronize()
            whole_step(grads, 1, lambda m: 1.0)
        except gradgen.CommError:
            assert time.monotonic() - start < 20
        else:
            raise AssertionError("no error")
        dist.barrier()
        grads.reset()
        whole_step(grads, 1, lambda m: 1.0)
        assert np.allclose(whole(grads)["layers.0.proj.weight"], 1.0)


def graph(comm: Any) -> None:
    """A captured step of several ranks replays its collectives."""
    stream = torch.cuda.Stream()
    for strategy in ("sharded", "sharded_all_to_all", "unsharded"):
        grads = support.manager(comm, strategy, config(**BIG))
        source = torch.ones((), device="cuda")

        def step(grads: Any = grads, source: torch.Tensor = source) -> None:
            with grads.micro_step(0, 1):
                for name in outside(grads):
                    tensor = grads.non_block_full(name)
                    out = torch.from_dlpack(tensor)
                    if tensor.accumulate:
                        out.add_(source)
                    else:
                        out.copy_(source.expand(out.shape))
                    grads.notify_non_block(name)
                for layer in (3, 2, 1, 0):
                    for _, tensor in grads.block_full(layer).items():
                        torch.from_dlpack(tensor).copy_(source)
                    grads.notify_block(layer)

        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        stream.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            step()
        for value in (1.0, 5.0):
            with torch.cuda.stream(stream):
                source.fill_(value + RANK)
                captured.replay()
            stream.synchronize()
            wanted = value + (WORLD - 1) / 2
            found = whole(grads)
            assert np.allclose(found["layers.0.proj.weight"], wanted), (
                strategy,
                found["layers.0.proj.weight"][0],
            )


def models(comm: Any) -> None:
    """Tiny transformers models: gradients, and ten steps of AdamW, equal those of one process."""
    from gradgen.torch import ShardedOptimizer, attach
    from tests import torch_models
    from tests.gpu.test_models import check

    for name in ("llama-tied", "gpt2"):
        model, _, _ = torch_models.make(name, load=False)
        spec, _ = torch_models.MODELS[name]
        module = gradgen.load(torch_models.SPECS / f"{spec}.yaml", device="cuda")
        model = model.cuda()
        data = torch_models.tokens(0, 2, WORLD).cuda()
        wanted = torch_models.reference(model, data)
        for strategy in module.GradientManager._strategies:
            mine = copy.deepcopy(model)
            grads = module.GradientManager(
                module.Config.from_hf(model.config), comm, strategy=strategy, device="cuda"
            )
            attach(mine, grads, fuse_wgrad=True)
            for i in range(2):
                with grads.micro_step(i, 2):
                    torch_models.loss(mine, data[i, RANK]).backward()
            check(grads, wanted, 5e-6)
        plain = copy.deepcopy(model)
        adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        mine = copy.deepcopy(model)
        grads = module.GradientManager(
            module.Config.from_hf(model.config), comm, strategy="fully_sharded", device="cuda"
        )
        attach(mine, grads)
        optimizer = ShardedOptimizer(torch.optim.AdamW, mine, grads, lr=1e-2)
        for s in range(10):
            rows = torch_models.tokens(s, 1, WORLD).cuda()
            adam.zero_grad()
            for ids in rows[0]:
                (torch_models.loss(plain, ids) / WORLD).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            adam.step()
            with grads.micro_step(0, 1):
                torch_models.loss(mine, rows[0, RANK]).backward()
            optimizer.step(max_norm=1.0)
            optimizer.zero_grad()
        for (key, a), b in zip(mine.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=2e-3, atol=3e-4), (name, key, float((a - b).abs().max()))


CHECKS: tuple[Callable[[Any], None], ...] = (
    sums,
    as_on_the_cpu,
    rows_and_whole,
    absent,
    norms,
    nonfinite,
    graph,
    models,
    errors_and_reset,
    late,
)


def main() -> int:
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # Small messages of the tests go by gloo; the managers under test make their own NCCL communicator.
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    chosen = [c for c in CHECKS if not sys.argv[1:] or c.__name__ in sys.argv[1:]]
    chosen = [c for c in chosen if GPU or c not in (graph, models, late)]
    failed = 0
    comm = gradgen.comm.from_torch(timeout=60.0)
    for check in chosen:
        start, problem = time.monotonic(), ""
        try:
            check(comm)
        except Exception:
            problem = traceback.format_exc(limit=-6)
        problems: list[Any] = [None] * WORLD
        dist.all_gather_object(problems, problem)
        bad = [f"rank {r}: {p}" for r, p in enumerate(problems) if p]
        failed += bool(bad)
        if RANK == 0:
            print(
                f"{'FAILED' if bad else 'ok':7}{check.__name__:20}{time.monotonic() - start:6.1f} s",
                flush=True,
            )
            if bad:
                print("\n".join(bad), flush=True)
        if bad:
            comm = gradgen.comm.from_torch(timeout=60.0)
    if RANK == 0:
        print(f"{len(chosen) - failed} of {len(chosen)} passed with {WORLD} ranks over NCCL", flush=True)
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
