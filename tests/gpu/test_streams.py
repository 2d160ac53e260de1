"""Managers on a GPU: order of streams, offload, CUDA graphs, scalars that stay on the device, launches, leaks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support import (
    DEVICE,
    STRATEGIES,
    assemble,
    config,
    manager,
    outside,
    run_ranks,
    shards,
    visit_all,
    whole_step,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="needs GRADGEN_TEST_DEVICE=cuda (tests/gpu/run.sh sets it)"),
]
LATE = 100_000_000  # cycles of a spinning kernel: some 50 ms
BIG = {"hidden": 96, "odd": 40, "layers": 4}


def torch() -> Any:
    return pytest.importorskip("torch")


def visit(grads: Any, gradient: float, before_write: Callable[[], None] = lambda: None) -> None:
    """Everything once, in backward order, with device tensors that are never touched by the host."""
    t = torch()
    zero = {(w.block, w.id) for w in grads.weights() if w.zero}

    def put(tensor: Any, accumulate: bool, zeroed: bool) -> None:
        out = t.from_dlpack(tensor)
        value = t.full_like(out, gradient) + t.linspace(0, 1, max(out.numel(), 1), device=out.device)[
            : out.numel()
        ].reshape(out.shape).to(out.dtype)
        before_write()
        if accumulate or zeroed:
            out += value
        else:
            out.copy_(value)

    names = outside(grads)
    for name in [n for n in names if n in ("lm_head", "spare", "logit_scale")]:
        tensor = grads.non_block_full(name)
        put(tensor, tensor.accumulate, (None, name) in zero)
        grads.notify_non_block(name)
    for layer in reversed(range(grads.blocks["layer"])):
        block = grads.block_full(layer)
        for name, tensor in block.items():
            put(tensor, block.accumulate, ("layer", name) in zero)
        grads.notify_block(layer)
    for name in [n for n in names if n not in ("lm_head", "spare", "logit_scale")]:
        tensor = grads.non_block_full(name)
        put(tensor, tensor.accumulate, (None, name) in zero)
        grads.notify_non_block(name)


def step(grads: Any, micro_steps: int, first: float, before_write: Callable[[], None] = lambda: None) -> None:
    for m in range(micro_steps):
        with grads.micro_step(m, micro_steps):
            visit(grads, first + m, before_write)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert set(a) == set(b)
    for name in a:
        assert np.array_equal(a[name], b[name], equal_nan=True), name


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_delays_change_nothing(strategy: str, world: int) -> None:
    """A producer, a peer and an optimizer that are 50 ms late: the same bits as without."""
    t = torch()

    def body(delay: str) -> Callable[[int, Any], Any]:
        def run(rank: int, comm: Any) -> Any:
            grads = manager(comm, strategy, config(**BIG), dtype="bfloat16", accumulator="float32")
            late = [0]

            def spin() -> None:
                late[0] += 1
                if late[0] % 17 == 1 and (delay == "producer" or delay == "peer" and rank == 0):
                    t.cuda._sleep(LATE)

            out = []
            for i in range(3):
                step(grads, 2, float(rank + i), spin)
                if delay == "optimizer":
                    t.cuda._sleep(LATE)  # the optimizer reads after this, the next step must wait for it
                out.append([t.from_dlpack(s).clone() for s in grads.named_gradients().values()])
            t.cuda.synchronize()
            return [[g.cpu().numpy() for g in grads] for grads in out]

        return run

    wanted = run_ranks(world, body("none"))
    for delay in ("producer", "peer", "optimizer"):
        for rank, found in enumerate(run_ranks(world, body(delay))):
            for a, b in zip(wanted[rank], found, strict=True):
                assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)), (delay, rank)


@pytest.mark.parametrize("world", [1, 2])
def test_the_host_never_waits_inside_a_step(world: int) -> None:
    """A whole step is enqueued while a kernel before it still spins; the norm and the clipping too."""
    t = torch()

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, "sharded_all_to_all", config(**BIG), dtype="bfloat16")
        clip = grads._native.clip_grad_norm_
        step(grads, 2, 1.0)
        clip(1.0)
        t.cuda.synchronize()
        t.cuda._sleep(20 * LATE)
        done = t.cuda.Event()
        done.record()
        step(grads, 2, 1.0)
        norm = clip(1.0)
        waited = done.query()
        t.cuda.synchronize()
        return waited, float(norm)

    for waited, norm in run_ranks(world, body):
        assert not waited and norm > 1.0


@pytest.mark.parametrize("micro_steps", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16", "accumulator": "float32"}, {"dtype": "bfloat16", "rounding": "stochastic"}],
)
def test_offload_gives_the_same_bits(options: dict[str, Any], world: int, micro_steps: int) -> None:
    def body(offload: bool) -> Callable[[int, Any], Any]:
        def run(rank: int, comm: Any) -> Any:
            grads = manager(comm, "fully_sharded", config(**BIG), offload=offload, seed=3, **options)
            for i in range(2):
                step(grads, micro_steps, float(rank + i))
            before = shards(grads)
            norm = grads.clip_grad_norm_(1.0)
            memory, plan = grads.memory(), grads.plan.strategy("fully_sharded")
            assert memory["pinned"] == plan.pinned_bytes and memory["total"] == plan.memory_bytes
            assert (memory["pinned"] > 0) == offload
            return before, shards(grads), norm

        return run

    device, host = run_ranks(world, body(False)), run_ranks(world, body(True))
    for part in (0, 1):
        equal(assemble([r[part] for r in device]), assemble([r[part] for r in host]))
    assert [r[2] for r in device] == pytest.approx([r[2] for r in host], rel=1e-6)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("options", [{"rounding": "stochastic"}, {"accumulator": "float32"}, {}])
def test_a_captured_step_replays_as_if_it_ran(options: dict[str, Any], micro_steps: int) -> None:
    """Fresh random bits, the right step and the right flags: bit for bit what an eager manager gives."""
    t = torch()
    made = {"dtype": "bfloat16", "seed": 5, **options}
    eager, replayed = (manager(None, "unsharded", config(**BIG), **made) for _ in range(2))
    stream = t.cuda.Stream()
    with t.cuda.stream(stream):
        step(eager, micro_steps, 1.0)
        step(replayed, micro_steps, 1.0)
    stream.synchronize()
    graph = t.cuda.CUDAGraph()
    with t.cuda.graph(graph, stream=stream):
        step(replayed, micro_steps, 1.0)
    seen = []
    for i in range(3):
        with t.cuda.stream(stream):
            graph.replay()
            step(eager, micro_steps, 1.0)
            stream.synchronize()
            assert replayed.step == eager.step == i + 2
            equal(assemble([shards(replayed)]), assemble([shards(eager)]))
            seen.append(assemble([shards(replayed)])["layers.0.proj.weight"])
    if "rounding" in options and micro_steps > 1:
        assert not np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[1], seen[2])
    with t.cuda.stream(stream):  # and eager again
        step(replayed, micro_steps, 1.0)
        step(eager, micro_steps, 1.0)
        equal(assemble([shards(replayed)]), assemble([shards(eager)]))


def test_the_norm_of_a_replayed_step_is_its_own() -> None:
    """Asked for after every replay: the gradients differ, and the host was told of the first step only."""
    t = torch()
    grads = manager(None, "unsharded", config(**BIG))
    scale = t.ones((), device="cuda")
    stream = t.cuda.Stream()

    def one_step() -> None:
        with grads.micro_step(0, 1):
            visit(grads, 1.0)
        for shard in grads.named_gradients().values():
            t.from_dlpack(shard).mul_(scale)

    with t.cuda.stream(stream):
        one_step()
    stream.synchronize()
    graph = t.cuda.CUDAGraph()
    with t.cuda.graph(graph, stream=stream):
        one_step()
    norms = []
    with t.cuda.stream(stream):
        for factor in (1.0, 3.0, 5.0):
            scale.fill_(factor)
            graph.replay()
            norms.append(float(grads.grad_norm()) / factor)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_offload_shows_zeros_after_zero_grad() -> None:
    grads = manager(None, "sharded", config(**BIG), offload=True)
    for _ in range(3):
        step(grads, 1, 1.0)
        grads.zero_grad()
        assert not np.any(np.asarray(grads.block_shard(0)["proj"]))


def test_micro_steps_captured_one_by_one() -> None:
    """Graphs of the first, a middle and the last micro-step; the middle one runs as often as there are."""
    t = torch()
    made = {"dtype": "bfloat16", "rounding": "stochastic", "seed": 9}
    eager, replayed = (manager(None, "unsharded", config(**BIG), **made) for _ in range(2))
    stream = t.cuda.Stream()
    with t.cuda.stream(stream):
        step(replayed, 3, 1.0)
        step(eager, 3, 1.0)
    stream.synchronize()
    graphs = []
    for m in range(3):
        graph = t.cuda.CUDAGraph()
        with t.cuda.graph(graph, stream=stream), replayed.micro_step(m, 3):
            visit(replayed, 1.0)
        graphs.append(graph)
    with t.cuda.stream(stream):
        for order in ([0, 1, 2], [0, 1, 1, 1, 2]):
            for index in order:
                graphs[index].replay()
            for m in range(len(order)):
                with eager.micro_step(m, len(order)):
                    visit(eager, 1.0)
            equal(assemble([shards(replayed)]), assemble([shards(eager)]))


def test_a_divisor_that_only_the_device_knows() -> None:
    """Tokens 1 and 3 with gradients per token 4 and 0: 1.0, with the token count never on the host."""
    t = torch()

    def body(rank: int, comm: Any) -> Any:
        grads = manager(comm, "fully_sharded")
        tokens, per_token = [(1, 4.0), (3, 0.0)][rank]
        count = t.tensor(4.0, device="cuda")
        whole_step(grads, 1, lambda m: tokens * per_token, divide=count)
        first = shards(grads)
        for m in range(2):
            with grads.micro_step(m, 2):
                if m == 1:
                    grads.set_divide(count * 2)
                visit_all(grads, 8.0)
        return first, shards(grads)

    results = run_ranks(2, body)
    for value in assemble([first for first, _ in results]).values():
        assert np.all(value == 1.0)
    for value in assemble([second for _, second in results]).values():
        assert np.all(value == 2 * 2 * 8.0 / 8.0)


def test_norms_are_tensors_of_their_own() -> None:
    t = torch()
    grads = manager(None, "unsharded", config(**BIG))
    norm_of, clip = grads._native.grad_norm, grads._native.clip_grad_norm_
    step(grads, 1, 1.0)
    first = norm_of()
    assert isinstance(first, t.Tensor) and first.is_cuda and first.shape == () and first.dtype == t.float32
    kept = float(first)
    assert float(clip(0.5)) == kept
    assert float(norm_of()) == pytest.approx(0.5, rel=1e-5)
    step(grads, 1, 3.0)
    assert float(first) == kept  # the next step leaves it alone
    assert float(norm_of()) > kept


def test_launches_of_a_block() -> None:
    """At most one memset and one accumulate a block and micro-step, whatever the number of weights."""
    t = torch()
    from torch.profiler import ProfilerActivity, profile

    grads = manager(None, "unsharded", config(**BIG), dtype="bfloat16", accumulator="float32")
    step(grads, 2, 1.0)
    grads.start_micro_step(0, 2)
    t.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for layer in (3, 2, 1, 0):
            grads.block_full(layer)
            grads.notify_block(layer)
        grads.block_full  # noqa: B018 - the last block is summed by the next call or the end
        grads._native.non_block_full("logit_scale")
        grads._native.notify_non_block("logit_scale")
        t.cuda.synchronize()
    device = [e for e in seen.events() if e.device_type == t.autograd.DeviceType.CUDA]
    memsets = [e for e in device if "Memset" in e.name]
    kernels = [e for e in device if "reduce" in e.name]
    assert len(kernels) == 4, [e.name for e in device]
    assert len(memsets) <= 4 + 1, [e.name for e in device]
    assert len(device) == len(kernels) + len(memsets), [e.name for e in device]
    grads.reset()


@pytest.mark.parametrize("options", [{}, {"offload": True}])
def test_a_hundred_managers_leak_nothing(options: dict[str, Any]) -> None:
    t = torch()

    def once() -> None:
        grads = manager(None, "sharded", config(hidden=500, odd=400, layers=2), dtype="bfloat16", **options)
        step(grads, 1, 1.0)
        grads.close()

    for _ in range(10):
        once()
    gc.collect()
    t.cuda.synchronize()
    free = t.cuda.mem_get_info()[0]
    for _ in range(100):
        once()
    gc.collect()
    t.cuda.synchronize()
    assert free - t.cuda.mem_get_info()[0] < 32 << 20  # a hundred of them hold 160 MiB; the driver grows by 8


def test_a_user_stream() -> None:
    """Without torch's current stream: calls go where the user says."""
    t = torch()
    grads = manager(None, "unsharded", config(**BIG))
    stream = t.cuda.Stream()
    grads.use_stream(stream)
    with t.cuda.stream(stream):
        t.cuda._sleep(LATE)
        step(grads, 1, 1.0)
        found = assemble([shards(grads)])
    grads.use_stream(None)
    step(grads, 1, 1.0)
    equal(found, assemble([shards(grads)]))
