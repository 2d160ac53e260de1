"""attach(fuse_wgrad=True): the same gradients as plain autograd, computed in place, however the model is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusing import EVERY, Forward, Net, assert_equal, entropy, ids, manager
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_models import loss, make, reference, tokens
from torch_scenarios import shard_errors

import gradgen
from gradgen.torch import attach, fuse, linear


class Watch(TorchDispatchMode):
    """Counts tensors of a weight's size that operations make."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes, self.made = sizes, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage().data_ptr() for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)
        }
        for t in out if isinstance(out, tuple) else (out,):
            if (
                isinstance(t, Tensor)
                and t.numel() in self.sizes
                and t.untyped_storage().data_ptr() not in known
            ):
                self.made.append(str(func))
        return out


def test_no_temporary_no_memset_and_no_pass_to_add() -> None:
    sizes = {128, 88}  # of up, down, embed and head; activations have 120 to 240 elements
    made = {}
    for fused in (False, True):
        net, grads = Net(), manager()
        attachment = attach(net, grads, fuse_wgrad=fused)
        for i in range(2):
            with grads.micro_step(i, 2):
                value = entropy(net, i)
                with Watch(sizes) as watch:
                    value.backward()
        made[fused] = watch.made
        assert attachment.fused == (EVERY if fused else ()) and attachment.not_fused == {}
    assert len(made[False]) >= 6
    assert made[True] == []


@pytest.mark.parametrize("tied", [False, True])
def test_gradients(tied: bool) -> None:
    net, grads = Net(tied), manager(tied)
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads)
    assert attachment.fused == EVERY
    attachment.detach()
    assert not any("forward" in module.__dict__ for module in net.modules())
    entropy(net, 0).backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3", "gpt2", "gpt2-untied"])
def test_transformers(name: str) -> None:
    model, module, config = make(name)
    grads = module.GradientManager(config, dtype="float32")
    attachment = attach(model, grads, fuse_wgrad=True)
    data = tokens(0, 3, 1)
    for _ in range(2):
        for i, row in enumerate(data):
            with grads.micro_step(i, 3):
                loss(model, row[0]).backward()
        assert shard_errors(grads, reference(model, data)) <= 1e-6
    matrices = {n for n, m in model.named_modules() if getattr(getattr(m, "weight", None), "ndim", 0) == 2}
    assert set(attachment.fused) == matrices and attachment.not_fused == {}


@pytest.mark.parametrize("accumulator", [None, "float32"])
def test_bf16(accumulator: str | None) -> None:
    net, grads = Net().bfloat16(), manager(dtype="bfloat16", accumulator=accumulator)
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, tolerance=1e-2)
    assert attachment.fused == EVERY[1:]
    assert attachment.not_fused == {
        "embed": "in bfloat16 every row added would be rounded; autograd rounds once"
    }


@pytest.mark.parametrize("reaches", [True, False])
def test_units_close_while_backward_runs(reaches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch, as older ones, runs no hook for a gradient that is None."""
    net, grads = Net(), manager()
    if not reaches:
        own = Tensor.register_post_accumulate_grad_hook

        def register(p: Tensor, hook: Any) -> Any:
            return own(p, lambda q: hook(q) if q.grad is not None else None)

        monkeypatch.setattr(Tensor, "register_post_accumulate_grad_hook", register)
        fuse.none_reaches_hooks.cache_clear()
    attach(net, grads, fuse_wgrad=True)
    assert fuse.none_reaches_hooks() in {reaches, False}
    fuse.none_reaches_hooks.cache_clear()
    events: list[str] = []
    notify_block, notify = grads.notify_block, grads.notify_non_block
    grads.notify_block = lambda layer, *rest: (events.append(f"layer {layer}"), notify_block(layer, *rest))
    grads.notify_non_block = lambda id: (events.append(id), notify(id))
    for i, layer in enumerate(net.layers):
        layer.register_full_backward_hook(lambda *_, i=i: events.append(f"backward of {i}"))
    with grads.micro_step(0, 1):
        entropy(net, 0).backward()
        events.append("end")
    assert events == ["head", "layer 1", "backward of 1", "layer 0", "backward of 0", "embedding", "end"]


# Ways to run a model


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def forward(net: Net, seed: int) -> Tensor:
        x = net.embed(ids(seed))
        for layer in (*net.layers, net.layers[1]):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return functional.cross_entropy(net.head(x).flatten(0, 1), ids(seed + 100).flatten())

    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, forward)
    assert attachment.fused == EVERY


@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_that_is_used_several_times(tied: bool) -> None:
    def forward(net: Net, seed: int) -> Tensor:
        x = net.embed(ids(seed)) + net.embed(ids(seed + 7))
        for _ in range(3):
            x = net.layers[0](x)
        return net.head(x).square().mean() + net.head(net.layers[1](x)).mean()  # type: ignore[no-any-return]

    net, grads = Net(tied), manager(tied)
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, forward)
    assert attachment.not_fused == {}


@pytest.mark.parametrize("first", ["attach", "compile"])
def test_torch_compile(first: str) -> None:
    """The compiled graph computes the gradients itself: no graph break, the usual way to the manager."""
    net, grads = Net(), manager()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if first == "compile":
        run: Any = torch.compile(net, backend="aot_eager")
        run(ids(0))
        attachment = attach(net, grads, fuse_wgrad=True)
    else:
        attachment = attach(net, grads, fuse_wgrad=True)
        run = torch.compile(net, backend="aot_eager")

    def forward(target: Net, seed: int) -> Tensor:
        out = run(ids(seed)) if target is net else target(ids(seed))
        return functional.cross_entropy(out.flatten(0, 1), ids(seed + 100).flatten())

    assert_equal(net, grads, forward)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert attachment.fused == () and set(attachment.not_fused.values()) == {
        "its gradient came from autograd: torch.compile, or code that uses the weight without calling the module"
    }


def test_a_compiled_part_of_a_model() -> None:
    torch._dynamo.reset()
    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    net.layers[0].compile(backend="aot_eager")
    assert_equal(net, grads)
    assert attachment.fused == ("embed", "layers.1.up", "layers.1.down", "head")


def autocast(net: Net, seed: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return entropy(net, seed)


def test_autocast_of_a_bf16_model() -> None:
    net, grads = Net().bfloat16(), manager(dtype="bfloat16")
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, autocast, tolerance=1e-2)
    assert attachment.fused == EVERY[1:]


def test_autocast_of_an_fp32_model_on_the_cpu() -> None:
    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, autocast)
    assert attachment.fused == ("embed",)
    assert attachment.not_fused["head"] == (
        "autocast: torch has no bfloat16 product with float32 sums here (it needs a GPU and torch 2.8)"
    )


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_of_an_fp32_model_where_products_have_wide_sums(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose product is replaced here by one that is as exact."""

    def wide(buffer: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
        assert (left.dtype, right.dtype, buffer.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        product = left.float() @ right.float()
        buffer.add_(product) if add else buffer.copy_(product)

    def run(net: Net, forward: Forward, seed: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):  # around backward() too
            forward(net, seed).backward()

    def forward(net: Net, seed: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = net.embed(ids(seed))
            for layer in net.layers:
                x = layer(x)
            # A use that autograd must see: autocast's cache of casts holds none that it does not know.
            return net.head(x).float().square().mean() + functional.linear(x, net.head.weight).float().mean()

    monkeypatch.setattr(fuse, "wide_products", lambda *_: (True, True))
    monkeypatch.setattr(linear, "_wide", wide)
    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, forward, tolerance=1e-2, run=run)
    assert attachment.fused == EVERY[:-1]
    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, autocast, tolerance=1e-2, run=run)
    assert attachment.fused == EVERY


def test_float64_input_under_autocast_and_wrong_dtypes() -> None:
    net, grads = Net().bfloat16(), manager(dtype="bfloat16")
    attach(net, grads, fuse_wgrad=True)
    with grads.micro_step(0, 1):
        with pytest.raises(RuntimeError, match="dtype"):
            net.head(torch.zeros(2, 8))
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
            net.head(torch.zeros(2, 8, dtype=torch.float64))


def test_frozen_inputs_and_odd_shapes() -> None:
    """No gradient for x; one row, no rows, one dimension, rows that do not lie side by side."""
    shapes = [(1, 8), (0, 8), (8,), (2, 3, 0, 8), (5, 8)]

    def forward(net: Net, seed: int) -> Tensor:
        torch.manual_seed(seed)
        total = (
            net.head(torch.randn(8, 6).t()).square().sum() + net.head(torch.randn(1, 8).expand(3, 8)).sum()
        )
        for shape in shapes:
            total = total + net.head(torch.randn(shape)).square().sum()
        return total  # type: ignore[no-any-return]

    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, forward)
    assert attachment.not_fused == {}

    def nothing(net: Net, seed: int) -> Tensor:
        return net.head(torch.zeros(0, 8)).sum()  # type: ignore[no-any-return]

    assert_equal(net, grads, nothing)


def test_without_gradients() -> None:
    net, grads = Net(), manager()
    attach(net, grads, fuse_wgrad=True)
    with torch.no_grad():
        outside = net(ids(0))
    with grads.micro_step(0, 1):
        with torch.no_grad():
            assert torch.equal(net(ids(0)), outside)
        with torch.inference_mode():
            assert torch.equal(net(ids(0)), outside)
        entropy(net, 0).backward()
    with pytest.raises(gradgen.StateError, match="outside a micro-step"):
        entropy(net, 0).backward()


def test_a_weight_that_is_frozen_later() -> None:
    net, grads = Net(), manager()
    attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads)
    net.head.weight.requires_grad_(False)
    net.embed.weight.requires_grad_(False)
    assert_equal(net, grads)


def test_torch_func_transforms() -> None:
    """They get their gradients; the manager gets nothing of them."""
    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def value(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (x,)).square().mean()  # type: ignore[no-any-return]

    wanted = torch.func.grad(value)(parameters, ids(0))

    def forward(target: Net, seed: int) -> Tensor:
        if target is net:
            for name, found in torch.func.grad(value)(parameters, ids(0)).items():
                assert torch.equal(found, wanted[name]), name
            rows = torch.func.vmap(lambda x: net.head(x))(torch.ones(4, 8))
            assert torch.allclose(rows, functional.linear(torch.ones(4, 8), net.head.weight))
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(torch.ones(2, 8), torch.ones(2, 8))
                out = torch.autograd.forward_ad.unpack_dual(net.head(dual)).tangent
            assert torch.allclose(out, functional.linear(torch.ones(2, 8), net.head.weight))
        return entropy(target, seed)

    assert_equal(net, grads, forward)
    assert set(attachment.not_fused) == {"head"}
