"""What the contract tests share: models to build, ranks to run, and a plain reference to compare with.

With GRADGEN_TEST_DEVICE=cuda every test that uses this runs on the GPU (tests/gpu/run.sh does).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgen

SPECS = Path(__file__).parent / "specs"
STRATEGIES = ("unsharded", "sharded", "sharded_all_to_all", "replicated", "fully_sharded")
WORLDS = (1, 2, 3, 4, 8)
DEVICE = os.environ.get("GRADGEN_TEST_DEVICE", "cpu")
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="of host memory")
_models: dict[str, Any] = {}


def model(name: str = "mini") -> Any:
    """The built module of tests/specs/NAME.yaml; compiled once, then cached."""
    if name not in _models:
        built = gradgen.load(SPECS / f"{name}.yaml", device=DEVICE)
        _models[name] = built if DEVICE == "cpu" else OnGpu(built)
    return _models[name]


class OnGpu:
    """A built module whose managers are made on the GPU, with norms as floats so that tests can compare them."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def GradientManager(self, *arguments: Any, **options: Any) -> Any:
        grads = self._module.GradientManager(*arguments, **{"device": DEVICE, **options})
        grads.grad_norm, grads.clip_grad_norm_ = _floats(grads.grad_norm), _floats(grads.clip_grad_norm_)
        return grads


def _floats(call: Callable[..., Any]) -> Callable[..., float]:
    return lambda *arguments: float(call(*arguments))


def rank_stream() -> Any:
    """A stream of the rank's own, where ranks are threads of a process with a GPU."""
    if DEVICE == "cpu":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


def config(**changes: Any) -> Any:
    return model().Config(**{"hidden": 6, "vocab": 7, "layers": 3, **changes})


def manager(comm: Any, strategy: str, cfg: Any = None, **options: Any) -> Any:
    """A manager of the mini model on `comm`; None: one rank."""
    return model().GradientManager(cfg or config(), comm, strategy=strategy, **options)


def run_ranks(
    world: int, body: Callable[[int, Any], Any], timeout: float = 20.0, expect_errors: bool = False
) -> list[Any]:
    """body(rank, comm) in one thread a rank. The first error of any rank is raised; `expect_errors` returns them instead."""
    comms = gradgen.comm.threads(world, timeout=timeout)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def play(rank: int) -> None:
        try:
            with rank_stream():
                results[rank] = body(rank, comms[rank])
        except BaseException as error:
            errors[rank] = error
            if not expect_errors:
                comms[rank].abort(f"rank {rank}: {error}")

    ranks = [threading.Thread(target=play, args=(rank,)) for rank in range(world)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if expect_errors:
        return [error if error is not None else result for error, result in zip(errors, results, strict=True)]
    for error in errors:
        if error is not None and not isinstance(error, gradgen.CommError):
            raise error
    for error in errors:
        if error is not None:
            raise error
    return results


def array(tensor: Any) -> np.ndarray:
    """A writable NumPy view of a gradient; bf16 as uint16 bits is not wanted here, so bf16 goes through `values`."""
    return np.asarray(tensor)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float -> bfloat16 bits, to nearest even."""
    u = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def values(tensor: Any) -> np.ndarray:
    """The numbers of a gradient of any dtype, as float64 in its shape (a copy)."""
    if _on_gpu(tensor):
        return np.asarray(_torch(tensor).double().cpu().numpy())
    if tensor.dtype == "bfloat16":
        bits = np.frombuffer(tensor.view_bits(), np.uint16) if tensor.numel else np.zeros(0, np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(tensor.shape)
    return np.asarray(tensor, dtype=np.float64).reshape(tensor.shape).copy()


def _on_gpu(tensor: Any) -> bool:
    return bool(tensor.__dlpack_device__()[0] == 2)


def _torch(tensor: Any) -> Any:
    import torch

    return torch.from_dlpack(tensor)


def alias(tensor: Any) -> Any:
    """A view of a gradient that another library holds: NumPy on the host, torch on a GPU."""
    return _torch(tensor) if _on_gpu(tensor) else np.from_dlpack(tensor)


def on_host(view: Any) -> np.ndarray:
    return np.asarray(view.cpu().numpy() if DEVICE != "cpu" else view)


def overwrite(tensor: Any, gradient: Any) -> None:
    write(tensor, gradient, accumulate=False, zeroed=False)


def write(tensor: Any, gradient: Any, accumulate: bool, zeroed: bool) -> None:
    """What a backward pass does: adds where the manager gave zeros or says so, overwrites elsewhere."""
    gradient = np.broadcast_to(np.asarray(gradient, np.float64), tensor.shape)
    if tensor.numel == 0:
        return
    if _on_gpu(tensor):
        import torch

        out = _torch(tensor)
        there = torch.from_numpy(np.array(gradient, np.float64)).to(out.device)
        if accumulate or zeroed:  # rounds once, as the lines below do
            there += out.double()
        out.copy_(there.float() if out.dtype != torch.float64 else there)
        return
    if tensor.dtype == "bfloat16":
        bits = np.frombuffer(tensor.view_bits(), np.uint16).reshape(tensor.shape)
        old = values(tensor) if accumulate or zeroed else 0.0
        bits[...] = bf16_bits(np.asarray(old + gradient, np.float32))
        return
    out = array(tensor)
    if accumulate or zeroed:
        out += gradient.astype(out.dtype)
    else:
        out[...] = gradient


def zeroed_ids(grads: Any) -> set[tuple[str | None, str]]:
    return {(w.block, w.id) for w in grads.weights() if w.zero}


def fill_block(grads: Any, layer: int, gradient: Any, only: set[str] | None = None) -> None:
    """One visit of a block: every weight gets `gradient`, a number or a function of the checkpoint-local id."""
    zero = zeroed_ids(grads)
    block = grads.block_full(layer)
    for name, tensor in block.items():
        if only is None or name in only:
            write(
                tensor,
                gradient(name) if callable(gradient) else gradient,
                block.accumulate,
                ("layer", name) in zero,
            )
    grads.notify_block(layer, written=None if only is None else sorted(only))


def fill_weight(grads: Any, name: str, gradient: Any) -> None:
    tensor = grads.non_block_full(name)
    write(tensor, gradient, tensor.accumulate, (None, name) in zeroed_ids(grads))
    grads.notify_non_block(name)


def outside(grads: Any) -> list[str]:
    """Weights outside the blocks that can be visited, in the order of the mini spec's backward pass."""
    present = {w.id for w in grads.weights() if w.block is None and w.trainable}
    return [
        name
        for name in ("lm_head", "spare", "logit_scale", "twice", "twice", "positions", "embedding")
        if name in present
    ]


def visit_all(grads: Any, gradient: float) -> None:
    """One micro-step's backward pass: every weight gets `gradient` everywhere (`twice` in two halves, ties in two)."""
    tied = {w.id for w in grads.weights() if w.tied_to}
    for name in ("lm_head", "spare", "logit_scale"):
        if name in outside(grads):
            fill_weight(grads, name, gradient / (2 if name in tied else 1))
    for layer in reversed(range(grads.blocks["layer"])):
        fill_block(grads, layer, gradient)
    fill_weight(grads, "twice", gradient / 2)
    fill_weight(grads, "twice", gradient / 2)
    if "positions" in outside(grads):
        fill_weight(grads, "positions", gradient)
    fill_weight(grads, "embedding", gradient / (2 if tied else 1))


def whole_step(grads: Any, micro_steps: int, gradient: Callable[[int], float], **options: Any) -> None:
    """A step in which every weight gets gradient(micro_step)."""
    for m in range(micro_steps):
        with grads.micro_step(m, micro_steps, **options):
            visit_all(grads, gradient(m))


def assemble(results: list[dict[str, tuple[int, tuple[int, ...], np.ndarray]]]) -> dict[str, np.ndarray]:
    """Whole gradients from every rank's shards; each element must come from some rank, and equal ones where two have it."""
    out: dict[str, np.ndarray] = {}
    for name, (_, shape, _) in results[0].items():
        full = np.full(int(np.prod(shape)), np.nan)
        seen = np.zeros(full.shape, bool)
        for rank in results:
            offset, _, data = rank[name]
            part = slice(offset, offset + data.size)
            assert not seen[part].any() or np.array_equal(
                full[part][seen[part]], data.ravel()[seen[part]], equal_nan=True
            ), name
            full[part] = data.ravel()
            seen[part] = True
        assert seen.all(), f"{name}: elements {np.flatnonzero(~seen)} belong to no rank"
        out[name] = full.reshape(shape)
    return out


def shards(grads: Any) -> dict[str, tuple[int, tuple[int, ...], np.ndarray]]:
    return {name: (s.offset, tuple(s.global_shape), values(s)) for name, s in grads.named_gradients().items()}
