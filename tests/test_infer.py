"""`gradgen.infer` on torch modules: stacks, kinds, ties, frozen weights, zero patterns, and models that no spec can hold."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import gradgen
from gradgen.infer_facts import InferError
from gradgen.resolve import check_text


class Block(nn.Module):
    def __init__(self, hidden: int, ffn: int, gate: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden, bias=False)
        if gate:
            self.router = nn.Linear(hidden, 3, bias=False)
            self.experts = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(3))
            self.extra = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + self.extra(x) + self.router(x).sum() + self.experts[0](x) if hasattr(self, "router") else x


class Toy(nn.Module):
    """An embedding, some blocks, a head. `gates`: the blocks that have a router."""

    def __init__(
        self, layers: int = 4, gates: tuple[int, ...] = (), tied: bool = False, hidden: int = 24
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, hidden)
        self.layers = nn.ModuleList(Block(hidden, 40, i in gates) for i in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.unused = nn.Parameter(torch.zeros(3))
        self.positions = nn.Parameter(torch.zeros(7, hidden), requires_grad=False)
        self.head = nn.Linear(hidden, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


SPEC = """\
# Written by `gradgen infer`. What it chose, and what it could not know:
# - zero, may_be_absent and the order of `backward` are what one backward pass with the given inputs showed
# - got no gradient from the given inputs, so may_be_absent: unused; drop it where your training reaches them
gradgen: 1
model: toy
summary: Toy of {package}

weights:
  unused:          {shape: [3], name: unused, zero: always, may_be_absent: true}
  positions:       {shape: [7, 24], name: positions, zero: always, trainable: false}
  embed:           {shape: [50, 24], name: embed.weight, zero: always}
  final_norm:      {shape: [24], name: norm.weight, zero: always}
  final_norm_bias: {shape: [24], name: norm.bias, zero: always}
  head:            {shape: [50, 24], name: head.weight, zero: never}

blocks:
  layer:
    count: 4
    name: layers.{i}
    weights:
      norm:      {shape: [24], name: norm.weight, zero: always}
      norm_bias: {shape: [24], name: norm.bias, zero: always}
      up:        {shape: [40, 24], name: up.weight, zero: never}
      up_bias:   {shape: [40], name: up.bias, zero: always}
      down:      {shape: [24, 40], name: down.weight, zero: never}

backward: [head, final_norm, final_norm_bias, {block: layer}, embed, positions, unused]

strategies:
"""
IDS = {"ids": torch.zeros(1, 4, dtype=torch.long)}


def weights(text: str) -> dict[str, str]:
    """Lines of the spec by checkpoint name, relative in blocks."""
    return {m[1]: m[0].strip() for m in re.finditer(r".*name: ([\w.{}]+)[,}].*", text)}


def test_the_spec_of_a_module_reads_like_one_written_by_hand() -> None:
    text = gradgen.infer(Toy(), inputs=IDS).text
    assert text.startswith(SPEC.replace("{package}", Toy.__module__.split(".")[0])), text


def test_backward_is_the_order_in_which_gradients_came() -> None:
    model = check_text(gradgen.infer(Toy(), inputs=IDS).text, "toy.yaml")
    order = [step.weight or step.blocks for step in model.backward]
    assert order.index("head") < order.index("final_norm") < order.index(("layer",)) < order.index("embed")


def test_a_weight_that_is_complete_between_blocks_comes_after_them() -> None:
    class Between(Toy):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for i, layer in enumerate(self.layers):
                x = layer(x) + (self.unused.sum() if i == 2 else 0)
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    text = gradgen.infer(Between(), inputs=IDS).text
    assert "backward: [head, final_norm, final_norm_bias, {block: layer}, unused, embed, positions]" in text


def test_without_inputs_every_gradient_starts_at_zero_and_the_spec_says_why() -> None:
    result = gradgen.infer(Toy())
    assert "zero: never" not in result.text
    assert any("could not be run here (no inputs are known for it)" in finding for finding in result.findings)
    assert "# - it could not be run here" in result.text


def test_kinds_of_blocks_get_rules() -> None:
    text = gradgen.infer(Toy(8, gates=(3, 4, 5, 6, 7)), inputs=IDS).text
    assert "  layer_dense:\n    count: 8\n    name: layers.{i}\n    at: i < 3\n" in text
    assert "  layer_moe:\n    count: 8\n    name: layers.{i}\n    at: i >= 3\n" in text
    assert "{block: [layer_dense, layer_moe]}" in text
    assert "may_be_absent: true}  # an expert may get no tokens" in text
    assert "at: i % 3 == 2" in gradgen.infer(Toy(9, gates=(2, 5, 8))).text
    assert "at: [0, 1, 4, 7]" in gradgen.infer(Toy(9, gates=(0, 1, 4, 7))).text


def test_a_weight_that_only_some_blocks_have_gets_a_condition() -> None:
    model = Toy(5)
    model.layers[0].bias_table = nn.Parameter(torch.zeros(4, 2))
    assert "when: i == 0" in weights(gradgen.infer(model).text)["bias_table"]


def test_ties_are_found_by_identity() -> None:
    result = gradgen.infer(Toy(tied=True), inputs=IDS)
    assert "zero: never, tied_to: embed" in weights(result.text)["head.weight"]
    assert result.round_trip.tied == 1
    assert "tied_to" not in gradgen.infer(Toy(), inputs=IDS).text


def test_the_module_is_left_as_it_was() -> None:
    model = Toy().eval()
    model.register_buffer("mean", torch.zeros(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradgen.infer(model, inputs=IDS)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]


def test_the_meta_device_is_enough() -> None:
    with torch.device("meta"):
        model = Toy(tied=True)
    assert gradgen.infer(model, inputs=IDS).text == gradgen.infer(Toy(tied=True), inputs=IDS).text


def test_values_that_steer_the_forward_pass_need_memory() -> None:
    class Steered(Toy):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows = torch.nonzero(ids[0] == 0)[:, 0]
            return super().forward(ids[:, rows])

    assert "zero: never" in gradgen.infer(Steered(), inputs=IDS).text
    with torch.device("meta"):
        model = Steered()
    assert "zero: never" not in gradgen.infer(model, inputs=IDS).text


def test_the_same_model_gives_the_same_bytes() -> None:
    assert gradgen.infer(Toy(6, gates=(1, 3, 5))).text == gradgen.infer(Toy(6, gates=(1, 3, 5))).text


def test_wrappers_leave_no_trace_in_names() -> None:
    model = Toy()
    model.layers[0] = torch.compile(model.layers[0])  # type: ignore[call-overload]
    assert "_orig_mod" not in gradgen.infer(model).text


class Bare(nn.Module):
    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, value)


def refused(model: nn.Module) -> InferError:
    with pytest.raises(InferError) as caught:
        gradgen.infer(model)
    return caught.value


def test_an_empty_model() -> None:
    assert "has no parameters" in str(refused(Bare()))


def test_lazy_modules_need_shapes_first() -> None:
    error = refused(Bare(a=nn.LazyLinear(3), b=nn.Linear(2, 2)))
    assert error.problems == (
        "a.weight: has no shape yet (lazy); run one forward pass first",
        "a.bias: has no shape yet (lazy); run one forward pass first",
    )


def test_quantised_parameters() -> None:
    codes = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    assert refused(Bare(a=nn.Linear(2, 2), codes=codes)).problems == (
        "codes: is quantised (int8) and has no gradient; infer from the model before quantisation",
    )
    observed = torch.ao.nn.quantized.Linear(2, 2)
    assert "a: is quantised (torch.Linear)" in str(refused(Bare(a=observed, b=nn.Linear(2, 2))))


def test_complex_parameters() -> None:
    assert "is complex" in str(refused(Bare(a=nn.Parameter(torch.zeros(2, dtype=torch.complex64)))))


def test_parameters_that_overlap_in_memory() -> None:
    memory = torch.zeros(10)
    error = refused(Bare(a=nn.Parameter(memory[:6]), b=nn.Parameter(memory[4:])))
    assert "b: lies in the memory of a and is another parameter" in str(error)
    gradgen.infer(Bare(a=nn.Parameter(memory[:5]), b=nn.Parameter(memory[5:])))


def test_names_that_are_one_without_wrappers() -> None:
    inner = Bare(weight=nn.Parameter(torch.zeros(2)))
    model = Bare(a=inner)
    model.a._orig_mod = Bare(weight=nn.Parameter(torch.zeros(2)))
    assert refused(model).problems == ("a.weight: two parameters have this name",)


def test_more_dimensions_than_a_weight_has() -> None:
    error = refused(Bare(a=nn.Parameter(torch.zeros(1, 1, 1, 1, 1, 2))))
    assert error.problems == ("a: has 6 dimensions; a weight has at most 5",)


def test_names_that_no_checkpoint_has() -> None:
    model = Bare(a=nn.Linear(2, 2))
    model.register_parameter("größe", nn.Parameter(torch.zeros(2)))
    assert "may hold letters, digits" in str(refused(model))


def test_scalars_and_tensors_without_elements() -> None:
    text = gradgen.infer(
        Bare(scale=nn.Parameter(torch.tensor(1.0)), none=nn.Parameter(torch.zeros(0, 4)))
    ).text
    assert "shape: []" in text and "shape: [0, 4]" in text


def test_what_is_no_module() -> None:
    with pytest.raises(gradgen.UsageError, match=r"takes a torch\.nn\.Module, not a dict"):
        gradgen.infer({})  # type: ignore[arg-type]


def test_experts_with_weights_of_their_own_are_one_line() -> None:
    text = gradgen.infer(Toy(3, gates=(0, 1, 2))).text
    assert '"experts.{e}.weight", zero: always, may_be_absent: true}' in text
    line = next(line for line in text.splitlines() if "{e}" in line)
    assert line.strip().startswith("expert:") and "{experts: 3, shape: [24, 24]" in line
    odd = Toy(3, gates=(0, 1, 2))
    for layer in odd.layers:
        layer.experts[1] = nn.Linear(24, 8)  # type: ignore[index,operator,union-attr]
    assert "{e}" not in gradgen.infer(odd).text


def test_ties_across_blocks() -> None:
    model = Toy(4)
    model.layers[3].up = model.layers[1].up
    model.layers[2].down.weight = model.layers[1].down.weight  # type: ignore[union-attr]
    model.free = model.layers[0].norm.weight
    result = gradgen.infer(model)
    assert result.round_trip.tied == 4
    said = [line.strip() for line in result.text.splitlines() if "tied_to" in line]
    assert [line.split(":")[0] for line in said] == ["norm", "down", "up", "up_bias"]
    assert said[0].endswith("name: norm.weight, zero: always, tied_to: free}")
    assert said[1].endswith("tied_to: {weight: down, block: layer_b, at: 1}}")
    assert said[2].endswith("tied_to: {weight: up, block: layer_b, at: 1}}")


def test_buffers_of_the_checkpoint() -> None:
    model = Toy(3)
    model.register_buffer("scale", torch.zeros(5))
    model.register_buffer("scratch", torch.zeros(5), persistent=False)
    for layer in model.layers:
        layer.register_buffer("mean", torch.zeros(24))
    model.layers[0].register_buffer("first", torch.zeros(2, 2))  # type: ignore[operator,union-attr]
    text = gradgen.infer(model).text
    assert '\nbuffers:\n  scale: {shape: [5], name: "scale"}\n' in text
    block = """
    buffers:
      mean:  {shape: [24], name: "mean"}
      first: {shape: [2, 2], name: "first", when: i == 0}
"""
    assert block in text
    assert "scratch" not in text


def test_blocks_that_stay_open_need_more_buffers() -> None:
    class Late(Toy):
        """The blocks in `late` have a weight that is used after all blocks."""

        late: tuple[int, ...] = ()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            for i in self.late:
                x = x + self.layers[i].last(x)  # type: ignore[operator,union-attr]
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    for late, needed in (((0,), ""), ((0, 1), "need block_buffers=3"), ((0, 1, 2), "need block_buffers=4")):
        model = Late(5)
        model.late = late
        for i in late:
            model.layers[i].last = nn.Linear(24, 24)
        findings = " ".join(gradgen.infer(model, inputs=IDS).findings)
        assert needed in findings and ("block_buffers" in findings) == bool(needed)
