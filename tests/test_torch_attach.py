"""attach: names and ties, where gradients go, what lingers, errors and recovery. One process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_models import config_for, loss, make, reference, relative, tokens
from torch_scenarios import shard_errors

import gradgen
from gradgen.torch import AttachError, ShardedOptimizer, attach


def manager(module: Any, config: Any, strategy: str = "unsharded", **options: Any) -> Any:
    return module.GradientManager(
        config, gradgen.comm.single(), strategy=strategy, **{"dtype": "float32", **options}
    )


def run_step(model: Any, grads: Any, data: Any) -> None:
    for i, row in enumerate(data):
        with grads.micro_step(i, len(data)):
            loss(model, row[0]).backward()


def test_every_difference_is_listed_at_once() -> None:
    model, module, config = make("llama-tied")
    grads = manager(module, config)
    model.model.layers[0].mlp.gate_prj = model.model.layers[0].mlp.gate_proj
    del model.model.layers[0].mlp.gate_proj
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(3, 3, dtype=torch.float16))
    model.model.norm.weight.requires_grad_(False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(AttachError) as caught:
        attach(model, grads)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, gradgen.Error)
    first, second = "model.layers.0.mlp", "model.layers.1.mlp"
    assert set(caught.value.problems) == {
        f"{first}.gate_proj.weight: in the spec, not in the model; did you mean {first}.gate_prj.weight?",
        f"{first}.gate_prj.weight: in the model, not in the spec; did you mean {first}.gate_proj.weight?",
        f"{second}.up_proj.weight: shape [3, 3] in the model, [56, 32] in the spec",
        f"{second}.up_proj.weight: dtype float16 in the model, float32 in the manager (dtype=)",
        "model.norm.weight: trainable in the spec, frozen in the model; unfreeze it, or trainable: false",
        "lm_head.weight: tied to model.embed_tokens.weight in the spec, not in the model; "
        "tie them (tie_weights())",
    }
    assert str(caught.value).startswith("the model does not match the spec: 6 differences\n  ")
    assert not grads.on_start and not grads.on_end


def test_a_model_of_another_dtype_is_one_difference() -> None:
    model, module, config = make("llama-tied")
    with pytest.raises(AttachError) as caught:
        attach(model.to(torch.bfloat16), manager(module, config))
    count = len(list(model.parameters()))
    assert caught.value.problems == (
        f"{count} parameters, model.embed_tokens.weight the first: "
        "dtype bfloat16 in the model, float32 in the manager (dtype=)",
    )


def test_a_configuration_that_lacks_keys_is_told_in_its_own_words() -> None:
    model, module, _ = make("llama")
    keys = {k: v for k, v in model.config.to_dict().items() if k not in ("vocab_size", "num_hidden_layers")}
    with pytest.raises(
        gradgen.ConfigError, match=r"does not have vocab_size \(vocab\), num_hidden_layers \(layers\);"
    ):
        module.Config.from_hf(keys)
    with pytest.raises(gradgen.ConfigError, match=r"does not have vocab_size \(vocab\);"):
        module.Config.from_hf(keys, layers=2)
    assert module.Config.from_hf(keys, layers=2, vocab=9).values()["vocab"] == 9


def test_a_tie_that_the_spec_does_not_know() -> None:
    model, module, config = make("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(AttachError, match="not in the spec; add tied_to:"):
        attach(model, manager(module, config))


def test_rename_maps_parameter_names() -> None:
    model, module, config = make("llama")
    wrapped = torch.nn.ModuleDict({"inner": model})
    attach(wrapped, manager(module, config), rename=lambda name: name.removeprefix("inner.")).detach()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_no_gradient_lingers(name: str) -> None:
    model, module, config = make(name)
    grads = manager(module, config)
    attach(model, grads)
    seen: list[int] = []
    for p in model.parameters():
        p.register_hook(lambda _: seen.append(sum(q.grad is not None for q in model.parameters())))
    data = tokens(0, 3, 1)
    run_step(model, grads, data)
    assert len(seen) >= 3 * len(list(model.parameters()))
    assert max(seen) == 0
    assert shard_errors(grads, reference(model, data)) <= 1e-6


def test_a_gradient_outside_a_micro_step() -> None:
    model, module, config = make("llama")
    grads = manager(module, config)
    attachment = attach(model, grads)
    with pytest.raises(gradgen.StateError, match=r"a gradient outside a micro-step; run backward\(\) within"):
        loss(model, tokens(0, 1, 1)[0, 0]).backward()
    attachment.detach()
    attachment.detach()
    loss(model, tokens(0, 1, 1)[0, 0]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_reset_after_an_exception_in_backward() -> None:
    model, module, config = make("llama")
    grads = manager(module, config)
    attach(model, grads)
    data = tokens(0, 2, 1)

    def fail(_: Any) -> None:
        raise RuntimeError("boom")

    handle = model.model.layers[1].mlp.down_proj.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="boom"):
        run_step(model, grads, data)
    handle.remove()
    with pytest.raises(gradgen.Error, match="reset"):
        run_step(model, grads, data)
    grads.reset()
    run_step(model, grads, data)
    assert shard_errors(grads, reference(model, data)) <= 1e-6


def test_reentrant_checkpoints_of_a_shared_layer() -> None:
    """A layer that runs in two checkpoints; reentrant ones bring its gradients in two parts, which add up."""
    model, module, config = make("llama")
    plain = copy.deepcopy(model)

    def twice(m: Any, reentrant: bool | None) -> Any:
        layer = m.model.layers[1]
        original = layer.forward

        def forward(hidden: Any, **kw: Any) -> Any:
            for _ in range(2):
                call = partial(original, **kw)
                hidden = (
                    call(hidden) if reentrant is None else checkpoint(call, hidden, use_reentrant=reentrant)
                )
            return hidden

        layer.forward = forward

    twice(plain, None)
    wanted = reference_of(plain)
    for reentrant in (True, False, None):
        mine = copy.deepcopy(model)
        twice(mine, reentrant)
        grads = manager(module, config)
        attach(mine, grads)
        run_step(mine, grads, tokens(0, 1, 1))
        assert shard_errors(grads, wanted) <= 1e-6


def reference_of(model: Any) -> dict[str, Any]:
    loss(model, tokens(0, 1, 1)[0, 0]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_reentrant_checkpointing_of_transformers() -> None:
    model, module, config = make("llama")
    wanted = reference(model, tokens(0, 2, 1))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    grads = manager(module, config)
    attach(model, grads)
    run_step(model, grads, tokens(0, 2, 1))
    assert shard_errors(grads, wanted) <= 1e-6


@pytest.mark.parametrize("accumulator", [None, "float32"])
def test_bf16_model(accumulator: str | None) -> None:
    model, module, config = make("llama-tied")
    model = model.to(torch.bfloat16)
    grads = manager(module, config, dtype="bfloat16", accumulator=accumulator)
    attach(model, grads)
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, grads, lr=3e-3)
    losses = []
    for step in range(12):
        data = tokens(step % 2, 2, 1)
        if step == 0:
            wanted = reference(model, data)
        run_step(model, grads, data)
        if step == 0:
            assert shard_errors(grads, wanted) <= 8e-3
        losses.append(loss(model, data[0, 0]).item())
        optimizer.step(max_norm=1.0)
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.5
    assert next(model.parameters()).dtype == torch.bfloat16


def test_optimizer_equals_torch_and_takes_schedulers() -> None:
    model, module, config = make("llama")
    plain = copy.deepcopy(model)
    grads = manager(module, config)
    attach(model, grads)
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, grads, lr=1e-2, no_decay=["model.norm.weight"])
    other = torch.optim.AdamW(
        [
            {"params": [p for n, p in plain.named_parameters() if n != "model.norm.weight"]},
            {"params": [plain.model.norm.weight], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)) for o in (optimizer, other)
    ]
    for step in range(3):
        data = tokens(step, 2, 1)
        run_step(model, grads, data)
        norm = optimizer.step(max_norm=0.5)
        optimizer.zero_grad()
        for row in data:
            loss(plain, row[0]).backward()
        assert float(norm) == pytest.approx(
            float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)), rel=1e-5
        )
        other.step()
        other.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative(p.detach(), q.detach()) < 1e-5, name
    with pytest.raises(gradgen.Error, match="closures are not supported"):
        optimizer.step(lambda: None)
    with pytest.raises(gradgen.Error, match="cannot be added later"):
        optimizer.add_param_group({"params": []})


def test_a_step_needs_new_gradients() -> None:
    model, module, config = make("llama")
    grads = manager(module, config, "sharded")
    attach(model, grads)
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, grads, lr=0.1)
    before = copy.deepcopy(model.state_dict())
    data = tokens(0, 2, 1)
    for prepare in (lambda: None, optimizer.zero_grad):
        prepare()
        with pytest.raises(gradgen.StateError, match="no gradients for this step"):
            optimizer.step()
    run_step(model, grads, data)
    optimizer.zero_grad()
    with pytest.raises(gradgen.StateError, match="no gradients for this step"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    run_step(model, grads, data)
    optimizer.step()
    with pytest.raises(gradgen.StateError, match="no gradients for this step"):
        optimizer.step()


def test_a_model_converted_afterwards_is_noticed() -> None:
    model, module, config = make("llama")
    grads = manager(module, config, "sharded")
    attach(model, grads)
    optimizer = ShardedOptimizer(torch.optim.SGD, model, grads, lr=1.0)
    data = tokens(0, 2, 1)
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    run_step(model, grads, data)
    with pytest.raises(gradgen.StateError, match="model.norm.weight: its memory was replaced"):
        optimizer.step()
    model.to(torch.bfloat16)
    with pytest.raises(gradgen.StateError, match="torch.bfloat16 gradient for a torch.float32 buffer"):
        run_step(model, grads, data)
    with pytest.raises(gradgen.UsageError, match="pass the optimizer's class"):
        ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, grads)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="first argument is the torch module"):
        attach(grads, model)  # type: ignore[arg-type]


def test_a_step_with_nan_is_skipped() -> None:
    model, module, config = make("llama")
    grads = manager(module, config, nonfinite="skip")
    attach(model, grads)
    optimizer = ShardedOptimizer(torch.optim.SGD, model, grads, lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    handle = model.model.norm.weight.register_hook(lambda g: g * float("nan"))
    run_step(model, grads, tokens(0, 1, 1))
    optimizer.step(max_norm=1.0)
    optimizer.zero_grad()
    handle.remove()
    assert optimizer.skipped == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    run_step(model, grads, tokens(0, 1, 1))
    optimizer.step(max_norm=1.0)
    assert not torch.equal(model.model.norm.weight, before["model.norm.weight"])


def test_a_parameter_without_gradient_is_named() -> None:
    model, module, config = make("llama")
    grads = manager(module, config)
    attach(model, grads)
    model.model.layers[1].mlp.down_proj.forward = lambda x: x[..., :32] * 0 + x.mean()  # type: ignore[method-assign,assignment]
    with pytest.raises(gradgen.StateError, match="down_proj"):
        run_step(model, grads, tokens(0, 1, 1))


def test_config_for_is_from_the_models_config() -> None:
    model, module, config = make("qwen2")
    assert config == config_for("qwen2", model, module)
    assert config.values()["qkv_bias"] == 1
