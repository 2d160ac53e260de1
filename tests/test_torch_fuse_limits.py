"""attach(fuse_wgrad=True): what else asks for gradients, what cannot be fused, and what happens to a model afterwards."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fusing import Forward, Net, assert_equal, entropy, ids, manager
from torch import Tensor, nn
from torch.nn import functional
from torch_models import relative
from torch_scenarios import shard_errors

import gradgen
from gradgen.torch import attach

# Ways to ask for gradients


def test_gradients_that_the_caller_asks_for() -> None:
    """`torch.autograd.grad` and `backward(inputs=)` give what they give without fusion; the manager gets the rest."""
    net, grads = Net(), manager()
    attach(net, grads, fuse_wgrad=True)

    def forward(target: Net, seed: int) -> Tensor:
        value = entropy(target, seed)
        weights = [target.head.weight, target.layers[0].up.weight, target.embed.weight]
        found = torch.autograd.grad(value, weights, retain_graph=True)
        plain = [p.detach().requires_grad_() for p in target.parameters()]
        twin = copy.deepcopy(target)
        entropy(twin, seed).backward()
        for got, weight in zip(found, [twin.head, twin.layers[0].up, twin.embed], strict=True):
            assert relative(got, weight.weight.grad) <= 1e-6
        assert len(plain) > 0
        probe = torch.zeros((), requires_grad=True)
        (value * (1 + probe)).backward(inputs=[probe], retain_graph=True)
        assert probe.grad is not None and torch.allclose(probe.grad, value)
        return value

    assert_equal(net, grads, forward)


def test_gradients_of_gradients() -> None:
    """A penalty on the gradient of an input, through fused layers; also within autocast."""

    def forward(net: Net, seed: int) -> Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        out = functional.gelu(net.layers[0](x)) + net.layers[1](x)
        (slope,) = torch.autograd.grad(net.head(out).square().sum(), x, create_graph=True)
        return slope.square().sum() + entropy(net, seed)

    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, forward)
    assert attachment.not_fused["head"] == "a graph of its gradient was asked for"
    assert attachment.fused == ("embed",)


def test_hooks_on_weights_see_and_change_gradients() -> None:
    seen: list[str] = []

    def run(net: Net, forward: Forward, seed: int) -> None:
        handles = [
            net.head.weight.register_hook(lambda g: 2 * g),
            net.embed.weight.register_hook(lambda g: seen.append("embed")),
        ]
        value = forward(net, seed)
        handles.append(net.layers[0].up.weight.register_hook(lambda g: -g))  # between forward and backward
        value.backward()
        for handle in handles:
            handle.remove()

    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal(net, grads, run=run)
    assert len(seen) == 8
    assert attachment.fused == ("layers.0.down", "layers.1.up", "layers.1.down")
    assert attachment.not_fused["head"] == "its weight has a hook, which wants to see the gradient"


def test_hooks_after_accumulation_and_of_modules() -> None:
    net, grads = Net(), manager()
    seen: list[Any] = []
    net.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    attachment = attach(net, grads, fuse_wgrad=True)
    net.layers[0].up.register_forward_hook(lambda module, args, out: out * 3)
    net.layers[0].down.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    plain = Net()
    plain.layers[0].up.register_forward_hook(lambda module, args, out: out * 3)
    plain.layers[0].down.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    with grads.micro_step(0, 1):
        entropy(net, 0).backward()
    entropy(plain, 0).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert shard_errors(grads, wanted) <= 1e-6
    assert torch.equal(seen[0], plain.head.weight.grad) and "head" in attachment.not_fused


# Modules


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Named(nn.Linear):
    """A subclass that computes what nn.Linear does."""


def test_subclasses() -> None:
    net, grads = Net(), manager()
    net.head = Doubling(8, 11, bias=False)
    net.layers[0].down = Named(16, 8, bias=False)
    replaced = net.layers[1].up.forward
    net.layers[1].up.forward = lambda x: replaced(x) + 1  # type: ignore[method-assign,assignment]
    attachment = attach(net, grads, fuse_wgrad=True)
    assert_equal_without_copy(net, grads)
    assert attachment.fused == ("embed", "layers.0.up", "layers.0.down", "layers.1.down")
    assert attachment.not_fused == {
        "head": "Doubling has a forward of its own",
        "layers.1.up": "its forward has been replaced by something else",
    }


def assert_equal_without_copy(net: Net, grads: Any) -> None:
    """For a model whose replaced forward a copy would share."""
    with grads.micro_step(0, 1):
        entropy(net, 0).backward()
    named = {name: torch.from_dlpack(shard).clone() for name, shard in grads.named_gradients().items()}
    weights = dict(net.named_parameters())
    with grads.micro_step(0, 1):
        value = torch.autograd.grad(entropy(net, 0), [weights[name] for name in named])
        entropy(net, 0).backward()
    assert shard_errors(grads, dict(zip(named, value, strict=True))) <= 1e-6


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[x]


def test_other_modules_and_what_an_embedding_can_ask_for() -> None:
    modules: dict[str, Any] = {
        "Table is neither a linear layer nor an embedding": Table(),
        "it uses max_norm": nn.Embedding(11, 8, max_norm=1.0),
        "it uses scale_grad_by_freq": nn.Embedding(11, 8, scale_grad_by_freq=True),
    }
    for reason, module in modules.items():
        net, grads = Net(), manager()
        net.embed = module
        attachment = attach(net, grads, fuse_wgrad=True)
        assert_equal(net, grads)
        assert attachment.not_fused == {"embed": reason}
    net = Net()
    net.embed = nn.Embedding(11, 8, sparse=True)
    assert attach(net, manager(), fuse_wgrad=True).not_fused == {"embed": "its gradient is sparse"}


@pytest.mark.parametrize("tied", [False, True])
def test_padding(tied: bool) -> None:
    """Rows of the padding index get nothing from the embedding, and keep what the head brought."""
    net, grads = Net(tied, padding=3), manager(tied)
    attachment = attach(net, grads, fuse_wgrad=True)
    assert (ids(0) == 3).any() and (ids(1) == 3).any()
    assert_equal(net, grads)
    assert attachment.not_fused == {}


def test_a_tied_embedding_that_comes_before_its_head() -> None:
    """The buffer is not zeroed then: the look-up clears it before it adds."""

    def forward(net: Net, seed: int) -> Tensor:
        return net.embed(net.head(torch.randn(4, 8)).argmax(-1)).square().sum()  # type: ignore[no-any-return]

    net = Net(tied=True)
    grads = manager(tied=True, poison=True)
    attach(net, grads, fuse_wgrad=True)

    def run(target: Net, forward: Forward, seed: int) -> None:
        torch.manual_seed(seed)
        forward(target, seed).backward()

    assert_equal(net, grads, forward, run=run)


def test_a_model_converted_or_changed_afterwards() -> None:
    net, grads = Net(), manager()
    attach(net, grads, fuse_wgrad=True)
    net.bfloat16()
    with (
        pytest.raises(
            gradgen.StateError, match=r"head.weight: a torch.bfloat16 gradient for a torch.float32 buffer"
        ),
        grads.micro_step(0, 1),
    ):
        entropy(net, 0).backward()
    grads.reset()
    net.float()
    assert_equal(net, grads)
    net.head.weight = nn.Parameter(torch.randn(11, 8))  # the manager knows nothing of it
    with grads.micro_step(0, 1):
        entropy(net, 0).backward()
    assert net.head.weight.grad is not None


def test_copies_and_pickles_are_not_attached() -> None:
    net, grads = Net(), manager()
    attachment = attach(net, grads, fuse_wgrad=True)
    with grads.micro_step(0, 1):
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            with torch.no_grad():
                twin.head.weight.mul_(2)
            assert torch.allclose(twin(ids(0)), 2 * net(ids(0)))
            entropy(twin, 0).backward()
            assert twin.head.weight.grad is not None
            twin.zero_grad(set_to_none=True)
            others = manager()
            second = attach(twin, others, fuse_wgrad=True)
            assert second.fused == attachment.fused
            assert_equal(twin, others)
        entropy(net, 0).backward()
        assert (
            "its forward has been replaced by something else"
            in attach(net, manager(), fuse_wgrad=True).not_fused["head"]
        )
    attachment.detach()
    attachment.detach()
    assert net.head.weight.grad is None
