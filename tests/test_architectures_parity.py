"""Tiny models of every architecture: gradients through `attach` are plain autograd's, at several world sizes.

A run takes a third of the architectures and some strategies for each, others for another commit; GRADGEN_EVERY=1 takes
all of both.
"""

from __future__ import annotations

import copy
import os
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, SPECS, Architecture
from torch_scenarios import shard_errors

import gradgen
from gradgen.torch import attach
from tests.steps import Steps
from tests.support import STRATEGIES, assemble, run_ranks, shards

MICRO_STEPS = 2
WORLDS = (1, 2, 3)
ALWAYS = ("gpt2", "llama", "qwen3", "t5", "deepseek_v3")  # other tests build most of them as well


def turn() -> int:
    """A number that changes with the commit."""
    command = ["git", "-C", str(SPECS), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout[:8] or "0", 16)


def chosen(spec: str, world: int) -> tuple[str, ...]:
    """Strategies to run: every one is run at some world size for every spec."""
    if os.environ.get("GRADGEN_EVERY"):
        return STRATEGIES
    start = (turn() + list(ARCHITECTURES).index(spec)) % len(STRATEGIES)
    rotated = STRATEGIES[start:] + STRATEGIES[:start]
    return {1: rotated[:1], 2: rotated[1:3], 3: rotated[3:]}[world]


def skip_unless_its_turn(spec: str) -> None:
    turns = (turn() + list(ARCHITECTURES).index(spec)) % 3 == 0
    if spec not in ALWAYS and not turns and not os.environ.get("GRADGEN_EVERY"):
        pytest.skip("its turn is another commit's; GRADGEN_EVERY=1 runs all")


def reference(model: Any, batches: list[list[dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Of the sum over micro-steps of the mean over ranks: autograd's gradients of every batch, summed in float64."""
    model = copy.deepcopy(model)
    total: dict[str, torch.Tensor] = {}
    for row in batches:
        for batch in row:
            model.zero_grad()
            model(**batch).loss.backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] = total.get(name, 0.0) + p.grad.double() / len(row)
    return total


def errors(
    module: Any, config: Any, model: Any, architecture: Architecture, strategy: str, world: int
) -> list[float]:
    """Every rank's largest relative error after two steps."""
    batches = architecture.batches(MICRO_STEPS, world)
    wanted = reference(model, batches)
    copies = [copy.deepcopy(model) for _ in range(world)]

    def body(rank: int, comm: Any) -> float:
        torch.set_num_threads(1)  # of this thread: other kernels would round otherwise than the reference's
        grads = module.GradientManager(config, comm, strategy=strategy, poison=True)
        attachment = attach(copies[rank], grads)
        worst = 0.0
        for _ in range(2):
            for i, row in enumerate(batches):
                with grads.micro_step(i, MICRO_STEPS):
                    copies[rank](**row[rank]).loss.backward()
            assert tuple(grads.trace()) == grads.plan_for(MICRO_STEPS).trace(strategy)
            worst = max(worst, shard_errors(grads, wanted))
        attachment.detach()
        grads.close()
        return worst

    return run_ranks(world, body, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ARCHITECTURES)
def test_gradients_are_those_of_autograd(spec: str) -> None:
    skip_unless_its_turn(spec)
    architecture = ARCHITECTURES[spec]
    module, model = gradgen.load(SPECS / f"{spec}.yaml"), architecture.small()
    config = module.Config.from_hf(model.config)
    for world in WORLDS:
        for strategy in chosen(spec, world):
            found = errors(module, config, model, architecture, strategy, world)
            assert max(found) <= 1e-6, (world, strategy, found)


@pytest.mark.slow
def test_lora() -> None:
    """At the first step the gradient of A is exactly zero, since B is: that is not an absent one."""
    peft = pytest.importorskip("peft")
    module = gradgen.load(SPECS / "llama_lora.yaml")
    base = ARCHITECTURES["llama"].small()
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj",
                                "o_proj", "gate_proj", "up_proj", "down_proj"])).eval()  # fmt: skip
    config = module.Config.from_hf(base.config, rank=3)
    wanted = reference(model, ARCHITECTURES["llama"].batches(MICRO_STEPS, 2))
    assert not any(value.any() for name, value in wanted.items() if "lora_A" in name)
    for strategy in ("sharded", "replicated"):
        assert max(errors(module, config, model, ARCHITECTURES["llama"], strategy, 2)) <= 1e-6
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    found = errors(module, config, model, ARCHITECTURES["llama"], chosen("llama", 3)[0], 3)
    assert max(found) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["qwen3_moe", "deepseek_v3"])
def test_experts_without_tokens(spec: str) -> None:
    """Their gradients are zero on every rank, whatever the buffers held before."""
    skip_unless_its_turn(spec)
    architecture = ARCHITECTURES[spec]
    module, model = gradgen.load(SPECS / f"{spec}.yaml"), architecture.small()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if spec == "qwen3_moe" and name.endswith("mlp.gate.weight"):
                v, u = parameter[1].clone(), parameter[3].clone()  # two of v, -v, u and -u are above zero
                parameter.copy_(torch.stack([torch.zeros_like(v), v, -v, u, -u]))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer[0] = -10.0
    batches = architecture.batches(MICRO_STEPS, 2)
    wanted = reference(model, batches)
    stacked = [value for name, value in wanted.items() if "experts.gate_up_proj" in name]
    assert stacked and all(not value[0].any() and value[1].any() for value in stacked)
    config = module.Config.from_hf(model.config)
    for strategy in ("unsharded", "sharded_all_to_all"):
        assert max(errors(module, config, model, architecture, strategy, 2)) <= 1e-6


@pytest.mark.slow
def test_experts_that_are_modules_of_their_own() -> None:
    """The names on disk in memory: an expert without tokens has no gradient at all."""
    architecture = ARCHITECTURES["deepseek_v3"]
    module, model = gradgen.load(SPECS / "deepseek_v3.yaml"), architecture.small()
    config = module.Config.from_hf(model.config, separate_experts=True)
    wanted = reference(model, architecture.batches(1, 1))
    stacked = module.Config.from_hf(model.config)
    records = {w.name: w for w in module.GradientManager(stacked).weights()}
    apart = {part.name: value[part.where] for name, value in wanted.items() for part in records[name].disk}

    def body(rank: int, comm: Any) -> dict[str, tuple[int, Any]]:
        grads = module.GradientManager(config, comm, strategy="sharded", poison=True)
        names = {w.name: w for w in grads.weights() if not w.buffer}
        assert set(names) == set(apart)
        with grads.micro_step(0, 1):
            for run in grads.plan.order:
                for layer in run.layers:
                    arena = grads.plan.arena(run.unit)
                    place = (arena.block, layer) if arena.kind == "block" else (None, None)
                    mine = [w for w in names.values() if (w.block, w.layer) == place]
                    if arena.kind == "weight":
                        (one,) = [w for w in mine if w.id == run.unit]
                        torch.from_dlpack(grads.non_block_full(one.id)).copy_(apart[one.name])
                        grads.notify_non_block(one.id)
                        continue
                    block = grads.block_full(layer, arena.block)
                    written = [w for w in mine if apart[w.name].any()]
                    assert len(written) == len(mine) or arena.block == "moe"
                    for w in written:
                        torch.from_dlpack(block[w.id]).copy_(apart[w.name])
                    grads.notify_block(layer, arena.block, written=[w.id for w in written])
        return shard_errors(grads, apart)

    assert max(run_ranks(2, body)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_uses_of_one_table_by_hand(strategy: str) -> None:
    """T5's head, decoder and encoder each add to the one gradient; it is reduced once, after the last."""
    module = gradgen.load(SPECS / "t5.yaml")
    config = module.Config(
        vocab=11, hidden=6, layers=2, decoder_layers=3, heads=2, head_dim=3, ffn=5, buckets=4
    )

    def body(rank: int, comm: Any) -> Any:
        grads = module.GradientManager(config, comm, strategy=strategy, poison=True)
        steps = Steps(SPECS / "t5.yaml", grads)
        for _ in range(2):
            steps.run(rank, 2)
            assert tuple(grads.trace()) == grads.plan_for(2).trace(strategy)
        return shards(grads), steps.expected(2, 2)

    ranks = run_ranks(2, body)
    found, wanted = assemble([mine for mine, _ in ranks]), ranks[0][1]
    assert "shared.weight" in found and "lm_head.weight" not in found
    assert [n for n in found if "bias" in n] == [
        f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for side in ("encoder", "decoder")
    ]
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, atol=1e-6)
