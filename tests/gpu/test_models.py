"""Tiny transformers models on the GPU: gradients equal to plain autograd's, and an optimizer's steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support import DEVICE, run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="needs GRADGEN_TEST_DEVICE=cuda (tests/gpu/run.sh sets it)"),
]
MODELS = ("llama", "llama-tied", "qwen2", "qwen3", "gpt2")
MICRO_STEPS = 2


def setup(name: str, dtype: Any) -> tuple[Any, Any, Any]:
    from tests import torch_models

    model, _, _ = torch_models.make(name, load=False)
    spec, _ = torch_models.MODELS[name]
    import gradgen

    module = gradgen.load(torch_models.SPECS / f"{spec}.yaml", device="cuda")
    return model.to("cuda", dtype), module, module.Config.from_hf(model.config)


def reference(model: Any, data: Any) -> dict[str, Any]:
    from tests import torch_models

    return torch_models.reference(model, data)


def check(grads: Any, wanted: dict[str, Any], tolerance: float) -> None:
    named = grads.named_gradients()
    assert set(named) == set(wanted)
    for name, shard in named.items():
        if shard.numel == 0:
            continue
        part = wanted[name].reshape(-1)[shard.offset : shard.offset + shard.numel].double()
        scale = wanted[name].double().norm() * (shard.numel / wanted[name].numel()) ** 0.5
        got = torch.from_dlpack(shard).reshape(-1).double()
        error = (got - part).norm() / torch.maximum(part.norm(), scale).clamp_min(1e-30)
        assert float(error) <= tolerance, (name, float(error))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_parity(name: str, world: int, dtype: str, fused: bool) -> None:
    from gradgen.torch import attach
    from tests import torch_models

    kind = getattr(torch, dtype)
    model, module, config = setup(name, kind)
    data = torch_models.tokens(0, MICRO_STEPS, world).cuda()
    # The yardstick is fp32 autograd on the same (rounded) weights: bf16 paths may differ from it by bf16's own noise.
    exact = reference(copy.deepcopy(model).float(), data)
    own = reference(model, data)
    floor = max(
        float((own[n].double() - exact[n].double()).norm() / exact[n].double().norm().clamp_min(1e-30))
        for n in exact
    )
    tolerance = 2e-6 if dtype == "float32" else 1.5 * floor

    def body(rank: int, comm: Any) -> None:
        mine = copy.deepcopy(model)
        for strategy in module.GradientManager._strategies:
            for accumulator in {dtype, "float32"}:
                grads = module.GradientManager(
                    config, comm, strategy=strategy, dtype=dtype, accumulator=accumulator, device="cuda"
                )
                attachment = attach(mine, grads, fuse_wgrad=fused)
                for _ in range(2):
                    for i in range(MICRO_STEPS):
                        with grads.micro_step(i, MICRO_STEPS):
                            torch_models.loss(mine, data[i, rank]).backward()
                    assert all(p.grad is None for p in mine.parameters())
                    check(grads, exact, tolerance)
                attachment.detach()
                grads.close()

    run_ranks(world, body, timeout=120)


@pytest.mark.parametrize("case", ["autocast", "checkpoint", "compile", "graph"])
def test_ways_to_run_a_model(case: str) -> None:
    from gradgen.torch import attach
    from tests import torch_models

    model, module, config = setup("llama", torch.float32)
    data = torch_models.tokens(0, 1, 1).cuda()
    ids = data[0, 0]

    def loss(m: Any) -> Any:
        if case == "autocast":
            with torch.autocast("cuda", torch.bfloat16):
                return torch_models.loss(m, ids)
        return torch_models.loss(m, ids)

    if case == "checkpoint":
        model.gradient_checkpointing_enable()
        model.train()
    plain = copy.deepcopy(model)
    loss(plain).backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    grads = module.GradientManager(config, None, strategy="unsharded", device="cuda")
    attachment = attach(model, grads, fuse_wgrad=True)
    run = torch.compile(model) if case == "compile" else model
    tolerance = 3e-2 if case == "autocast" else 1e-5
    if case == "graph":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                with grads.micro_step(0, 1):
                    loss(run).backward()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), grads.micro_step(0, 1):
            loss(run).backward()
        graph.replay()
        torch.cuda.synchronize()
    else:
        for _ in range(2):
            with grads.micro_step(0, 1):
                loss(run).backward()
    check(grads, wanted, tolerance)
    attachment.detach()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_steps_of_an_optimizer(world: int, offload: bool) -> None:
    """Ten AdamW steps with clipping end where a single process on the whole batch ends."""
    from gradgen.torch import ShardedOptimizer, attach
    from tests import torch_models

    model, module, config = setup("llama-tied", torch.float32)
    plain = copy.deepcopy(model)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for s in range(10):
        data = torch_models.tokens(s, 1, world).cuda()
        adam.zero_grad()
        for ids in data[0]:
            (torch_models.loss(plain, ids) / world).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()

    def body(rank: int, comm: Any) -> Any:
        mine = copy.deepcopy(model)
        grads = module.GradientManager(config, comm, strategy="fully_sharded", device="cuda", offload=offload)
        attach(mine, grads)
        optimizer = ShardedOptimizer(torch.optim.AdamW, mine, grads, lr=1e-2)
        for s in range(10):
            data = torch_models.tokens(s, 1, world).cuda()
            with grads.micro_step(0, 1):
                torch_models.loss(mine, data[0, rank]).backward()
            optimizer.step(max_norm=1.0)
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return {n: p.detach().clone() for n, p in mine.named_parameters()}

    for found in run_ranks(world, body, timeout=120):
        for name, value in plain.named_parameters():
            assert torch.allclose(found[name], value, rtol=2e-3, atol=2e-4), name
