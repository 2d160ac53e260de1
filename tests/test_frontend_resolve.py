"""What a good spec becomes: short forms written out, defaults, order and places."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradgen.expr import Bool, Not, Num, parse
from gradgen.model import Place, Shard
from gradgen.resolve import check, check_text
from gradgen.serialize import model_from_json, model_to_json

ROOT = Path(__file__).resolve().parent.parent
SPECS = sorted([*(ROOT / "specs").glob("*.yaml"), *(ROOT / "tests" / "specs").glob("*.yaml")])

SPEC = """\
gradgen: 1
model: sample
dims:
  ffn:    {default: 4 * hidden}
  hidden: {hf: hidden_size}
  layers: {}
flags:
  tied: {default: false}
weights:
  embedding: {shape: [9, hidden], name: embed.weight, zero: {unless: tied}}
  head:      {shape: [9, hidden], name: head.weight, zero: never, tied_to: {weight: embedding, when: tied}}
  scale:     {shape: [], name: scale, zero: {when: "tied"}, trainable: not tied, uses: 2}
  copy:      {shape: [9, hidden], name: copy, tied_to: embedding, trainable: false}
blocks:
  layer:
    count: layers
    name: layers.{i}
    weights:
      up:   {shape: [ffn, hidden], name: up, zero: never, shard: rows}
      down: {shape: [hidden, ffn], name: down, shard: {rows: 8}, may_be_absent: true}
  last:
    count: 1
    name: last
    uses: 3
    weights:
      up: {shape: [hidden, 'max(hidden, 4)'], name: up, shard: whole, when: true}
"""


@pytest.fixture(scope="module")
def model():
    return check_text(SPEC, "sample.yaml")


def test_dims_come_after_what_they_need(model):
    assert [(dim.name, dim.hf) for dim in model.dims] == [
        ("hidden", "hidden_size"),
        ("ffn", None),
        ("layers", None),
    ]
    assert model.dims[1].default == parse("4 * hidden")


def test_weights(model):
    embedding, head, scale, copy = model.weights
    assert (embedding.shape, embedding.zero) == ((Num(9), parse("hidden")), Not(parse("tied")))
    assert (head.zero, head.tied_to.weight, head.tied_to.when) == (None, "embedding", parse("tied"))
    assert (scale.shape, scale.zero, scale.trainable, scale.uses) == (
        (),
        parse("tied"),
        parse("not tied"),
        Num(2),
    )
    assert (copy.zero, copy.tied_to.when, copy.trainable, copy.uses) == (Bool(True), None, Bool(False), None)


def test_blocks(model):
    layer, last = model.blocks
    assert (layer.count, layer.name, layer.uses) == (parse("layers"), "layers.{i}", None)
    assert [weight.shard for weight in layer.weights] == [Shard("rows", 1), Shard("rows", 8)]
    assert [weight.may_be_absent for weight in layer.weights] == [False, True]
    assert (last.count, last.uses, last.weights[0].shard, last.weights[0].when) == (
        Num(1),
        Num(3),
        Shard("whole"),
        Bool(True),
    )


def test_places(model):
    assert model.weights[1].place == Place("sample.yaml", 11, 3)
    assert model.weights[1].tied_to.place == Place("sample.yaml", 11, 85)
    assert str(model.blocks[1].weights[0].place) == "sample.yaml:26:7"


def test_backward_defaults_to_the_reverse_of_what_is_declared(model):
    order = [step.weight or step.blocks[0] for step in model.backward]
    assert order == ["last", "layer", "copy", "scale", "head", "embedding"]


def test_strategies_have_defaults(model):
    assert [(s.id, s.blocks, s.non_blocks, s.collective) for s in model.strategies] == [
        ("unsharded", "full", "full", "reduce_scatter"),
        ("sharded", "sharded", "full", "reduce_scatter"),
        ("sharded_all_to_all", "sharded", "full", "all_to_all"),
        ("replicated", "full", "full", "all_reduce"),
        ("fully_sharded", "sharded", "sharded", "all_to_all"),
    ]


def test_conditional_weights_may_share_a_name():
    """As a biased and an unbiased variant of one parameter do, when no configuration has both."""
    spec = "gradgen: 1\nmodel: m\nflags: {a: {}}\nweights:\n  x: {shape: [3], name: n, when: a}\n"
    model = check_text(spec + "  y: {shape: [4], name: n, when: not a}\n")
    assert [weight.name for weight in model.weights] == ["n", "n"]


def test_integers_are_expressions_everywhere():
    text = "gradgen: 1\nmodel: m\ndims: {d: {default: 3}}\n"
    model = check_text(
        text + "blocks: {b: {count: 2, name: 'b.{i}', weights: {w: {shape: [3, d], name: w}}}}\n"
    )
    assert (model.dims[0].default, model.blocks[0].count) == (Num(3), Num(2))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_json_round_trip(path):
    model = check(path)
    text = model_to_json(model)
    assert model_from_json(text) == model
    assert model_to_json(model_from_json(text)) == text
    assert text.isascii() and text.endswith("}\n")


def test_json_of_another_format():
    with pytest.raises(ValueError, match="format 99; this gradgen reads 1"):
        model_from_json('{"format": 99}')


def big(n: int) -> str:
    """A spec of n weights, half of them in a block."""
    lines = [
        "gradgen: 1",
        "model: big",
        "dims: {hidden: {}, layers: {}}",
        "presets: {a: {hidden: 64, layers: 4}}",
    ]
    entries = [f"w{i}: {{shape: [hidden, {i + 1}], name: w{i}.weight, zero: never}}" for i in range(n // 2)]
    lines += ["weights:", *(f"  {entry}" for entry in entries)]
    lines += ["blocks:", "  layer:", "    count: layers", "    name: layers.{i}", "    weights:"]
    return "\n".join([*lines, *(f"      {entry}" for entry in entries)]) + "\n"


def test_time_grows_with_the_number_of_weights():
    """2,000 weights take 0.7 s of one core; four times the weights must not take sixteen times the time."""
    check_text(big(20))
    seconds = []
    for n in (500, 2000):
        start = time.process_time()
        model = check_text(big(n))
        seconds.append(time.process_time() - start)
        assert len(model.weights) + len(model.blocks[0].weights) == n
    assert seconds[1] < 10 * seconds[0]


def test_models_and_expressions_need_no_third_party_code():
    """A built package plans from its model.json: no yaml, jsonschema or jinja2."""
    code = (
        "import sys, gradgen.serialize, gradgen.configure, gradgen.expr, gradgen.model, gradgen.diagnostics\n"
        "print(*sorted({'yaml', 'jsonschema', 'jinja2', 'click', 'torch', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == ""
