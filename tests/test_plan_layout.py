"""The planner's layout (gradgen/layout.py) and the runtime's (layout.cpp) are one algorithm, twice."""

from __future__ import annotations

import random
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gradgen import layout
from gradgen.diagnostics import ConfigError
from gradgen.model import Shard

RUNTIME = Path(__file__).parents[1] / "gradgen" / "runtime"
WORLDS = (1, 2, 3, 4, 8)

# Reads models from stdin, prints describe_layout and every rank's segments.
READER = r"""
#include <iostream>
#include "gradgen/layout.h"
using namespace gradgen;

static WeightDesc read_weight() {
    WeightDesc w;
    int dims = 0, kind = 0;
    std::cin >> w.id >> w.zero >> w.may_be_absent >> kind >> w.rows >> dims;
    w.shard = static_cast<ShardKind>(kind);
    for (int i = 0; i < dims; ++i) { w.shape.push_back(0); std::cin >> w.shape.back(); }
    return w;
}
static void print(const ArenaLayout& arena) {
    for (int rank = 0; rank < arena.world; ++rank)
        for (const Segment& s : arena.segments(rank, 100))
            std::cout << "segment " << rank << ' ' << s.weight << ' ' << s.source << ' ' << s.shard << ' '
                      << s.numel << ' ' << s.element << '\n';
}
int main() {
    int models = 0;
    std::cin >> models;
    while (models-- > 0) {
        ModelDesc model;
        int world = 1, weights = 0, blocks = 0;
        std::cin >> world >> weights;
        while (weights-- > 0) model.weights.push_back(read_weight());
        std::cin >> blocks;
        while (blocks-- > 0) {
            BlockDesc block;
            std::cin >> block.id >> block.count >> weights;
            while (weights-- > 0) block.weights.push_back(read_weight());
            model.blocks.push_back(block);
        }
        std::cout << describe_layout(model, world);
        int index = 0;
        for (const WeightDesc& weight : model.weights) print(layout_weight(weight, index++, world, 0));
        for (const BlockDesc& block : model.blocks) print(layout_block(block, world, world - 1));
        std::cout << "end\n";
    }
}
"""


@dataclass(frozen=True)
class W:
    id: str
    shape: tuple[int, ...]
    zeroed: bool = False
    may_be_absent: bool = False
    shard: Shard = field(default_factory=Shard)
    name: str = ""

    @property
    def numel(self) -> int:
        product = 1
        for dim in self.shape:
            product *= dim
        return product

    def describe(self) -> str:
        kind = ("flat", "rows", "whole").index(self.shard.kind)
        dims = " ".join(map(str, (len(self.shape), *self.shape)))
        return f"{self.id} {int(self.zeroed)} {int(self.may_be_absent)} {kind} {self.shard.rows} {dims}\n"


Model = tuple[list[W], list[tuple[str, int, list[W]]]]


def random_weight(rng: random.Random, name: str) -> W:
    shape = tuple(rng.choice((0, 1, 1, 2, 3, 5, 7, 8, 64, 65, 100, 1023)) for _ in range(rng.randrange(4)))
    kind = rng.choice(("flat", "flat", "flat", "rows", "whole"))
    divisors = [k for k in (1, 2, 3, 5, 8) if not shape or shape[0] % k == 0]
    rows = rng.choice(divisors) if kind == "rows" else 1
    return W(name, shape, rng.random() < 0.4, rng.random() < 0.1, Shard(kind, rows))


def random_model(rng: random.Random) -> Model:
    weights = [random_weight(rng, f"w{i}") for i in range(rng.randrange(4))]
    blocks = []
    for b in range(rng.randrange(3)):
        inner = [random_weight(rng, f"b{b}w{i}") for i in range(rng.choice((0, 1, 2, 8, 9, 17, 64)))]
        blocks.append((f"block{b}", rng.randrange(1, 40), inner))
    return weights, blocks


def arenas(model: Model, world: int) -> tuple[list[layout.Arena], list[list[str]]]:
    weights, blocks = model
    units = [layout.arena("weight", w.id, 1, [w], world) for w in weights]
    units += [layout.arena("block", name, count, inner, world) for name, count, inner in blocks]
    order = [{w.id: i} for i, w in enumerate(weights)] + [
        {w.id: i for i, w in enumerate(inner)} for _, _, inner in blocks
    ]
    return units, [segments(unit, index) for unit, index in zip(units, order, strict=True)]


def segments(unit: layout.Arena, index: dict[str, int]) -> list[str]:
    """Every rank's segments by the rules in docs/design/layout-and-memory.md, not by those in layout.cpp."""
    lines = []
    for rank in range(unit.world):
        shard, flat_base = 0, -1
        for slot in unit.slots:
            begin, end = slot.owned(unit, rank)
            if slot.shard == "flat":
                if flat_base < 0:
                    flat_base, shard = shard, shard + unit.flat_shard
                at = flat_base + slot.offset + begin - unit.flat_begin - rank * unit.flat_shard
            else:
                at, shard = shard, shard + layout.round_up(slot.owned(unit, 0)[1], layout.ALIGN)
            if begin < end:
                lines.append(
                    f"segment {rank} {100 + index[slot.id]} {slot.offset + begin} {at} {end - begin} {begin}"
                )
    return lines


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("layout")
    (folder / "reader.cpp").write_text(READER)
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{RUNTIME / 'include'}"]
    sources = [str(folder / "reader.cpp"), str(RUNTIME / "src" / "layout.cpp")]
    subprocess.run(["g++", *flags, *sources, "-o", str(folder / "reader")], check=True)
    return folder / "reader"


def test_python_and_cpp_agree(reader: Path) -> None:
    rng = random.Random(20260101)
    models = [(random_model(rng), world) for _ in range(120) for world in WORLDS]
    text = [f"{len(models)}\n"]
    for (weights, blocks), world in models:
        text += [f"{world} {len(weights)}\n", *(w.describe() for w in weights), f"{len(blocks)}\n"]
        for name, count, inner in blocks:
            text += [f"{name} {count} {len(inner)}\n", *(w.describe() for w in inner)]
    done = subprocess.run([str(reader)], input="".join(text), capture_output=True, text=True, check=True)
    answers = done.stdout.split("end\n")[:-1]
    assert len(answers) == len(models)
    for (model, world), answer in zip(models, answers, strict=True):
        units, parts = arenas(model, world)
        for unit in units:
            layout.verify(unit)
        expected = layout.text([unit for unit in units if unit.slots], world)
        expected += "".join(line + "\n" for lines in parts for line in lines)
        assert answer == expected


def test_the_example_of_the_interface_document() -> None:
    embedding = W("embedding", (1000,))
    block = [W("input_norm", (64,), zeroed=True), W("q_proj", (4000,))]
    units = [
        layout.arena("weight", "embedding", 1, [embedding], 2),
        layout.arena("block", "decoder", 8, block, 2),
    ]
    assert layout.text(units, 2) == (
        "world 2\n"
        "weight embedding arena 1024 zero 0 flat 0 512 shard 512\n"
        "  embedding 0 1000\n"
        "block decoder count 8 arena 4096 zero 64 flat 0 2048 shard 2048\n"
        "  input_norm 0 64\n"
        "  q_proj 64 4000\n"
    )


def test_groups_lie_in_order_a_b_c_d() -> None:
    weights = [
        W("d", (6, 10), shard=Shard("rows", 2)),
        W("c", (5,)),
        W("b", (3,), zeroed=True),
        W("absent", (3,), may_be_absent=True),
        W("a", (7,), zeroed=True, shard=Shard("whole")),
    ]
    unit = layout.arena("block", "x", 1, weights, 4)
    assert [(slot.id, slot.offset) for slot in unit.slots] == [
        ("a", 0),
        ("b", 64),
        ("absent", 128),
        ("c", 192),
        ("d", 320),
    ]
    assert (unit.zero_numel, unit.flat_begin, unit.flat_shard) == (192, 64, 64)
    assert [unit.slots[4].owned(unit, rank) for rank in range(4)] == [(0, 20), (20, 40), (40, 60), (60, 60)]
    assert unit.shard_numel == 64 + 64 + 64
    layout.verify(unit)


def test_sizes_of_5_and_3_elements_at_four_ranks() -> None:
    unit = layout.arena("block", "x", 2, [W("five", (5,)), W("three", (3,))], 4)
    assert (unit.numel, unit.shard_numel, unit.padding) == (256, 64, 248)
    assert [unit.slots[0].owned(unit, rank) for rank in range(4)] == [(0, 5), (0, 0), (0, 0), (0, 0)]
    assert [unit.slots[1].owned(unit, rank) for rank in range(4)] == [(0, 0), (0, 3), (0, 0), (0, 0)]


def test_rows_that_do_not_divide_name_weight_rows_and_world() -> None:
    with pytest.raises(
        ConfigError, match=r"weight 'x': 10 rows are not a multiple of rows\(3\), so 2 ranks cannot divide it"
    ):
        layout.arena("weight", "x", 1, [W("x", (10, 2), shard=Shard("rows", 3))], 2)


def test_verify_finds_a_broken_layout() -> None:
    from dataclasses import replace

    unit = layout.arena("block", "x", 1, [W("a", (65,), zeroed=True), W("b", (65,))], 2)
    first, second = unit.slots
    broken = {
        "b overlaps the weight before it": replace(unit, slots=(first, replace(second, offset=64))),
        "b starts at 130, which is not aligned": replace(unit, slots=(first, replace(second, offset=130))),
        "b is on the wrong side of the zero range": replace(unit, zero_numel=192),
        "a is only partly in the zero range": replace(unit, zero_numel=64),
        "b leaves the flat range": replace(unit, slots=(first, replace(second, offset=1280))),
        "a shard needs 128 elements and has 192": replace(unit, shard_numel=192),
    }
    layout.verify(unit)
    for message, wrong in broken.items():
        with pytest.raises(
            AssertionError,
            match=r"internal error: gradgen planned a wrong layout for block 'x' at 2 ranks: " + message,
        ):
            layout.verify(wrong)
