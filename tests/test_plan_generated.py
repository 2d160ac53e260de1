"""Generated C++ and the planner agree: configurations, defaults, refusals, and the layout of every weight."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from gradgen.configure import configure
from gradgen.diagnostics import ConfigError
from gradgen.model import Model
from gradgen.plan import layout_text, plan
from gradgen.render import render
from gradgen.resolve import check
from tests import samples

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "gradgen" / "runtime"
SPECS = sorted([*(ROOT / "specs").glob("*.yaml"), *(ROOT / "tests" / "specs").glob("*.yaml")])

# Reads `n`, then n lines `model count name value ... world`; prints values and layout, or the error. Links no
# engine: only what describe() reaches is kept.
MAIN = r"""
#include <iostream>

using namespace gradgen;

template <class Config>
void answer(ModelDesc (*describe)(const Config&), const ConfigValues& given, int world) {
    try {
        const auto config = Config::from(given);
        const std::string layout = describe_layout(describe(config), world);
        for (const auto& [name, value] : config.values()) std::cout << name << '=' << value << ' ';
        std::cout << '\n' << layout;
    } catch (const ConfigError& error) {
        std::cout << "error: " << error.what() << '\n';
    }
    std::cout << "end\n";
}

int main() {
    int cases = 0;
    std::cin >> cases;
    while (cases-- > 0) {
        std::string model;
        int count = 0, world = 1;
        ConfigValues given;
        std::cin >> model >> count;
        while (count-- > 0) {
            given.emplace_back();
            std::cin >> given.back().first >> given.back().second;
        }
        std::cin >> world;
"""

Case = tuple[dict[str, "int | bool"], int]


class Program:
    """Configurations and layouts of generated models, as one process."""

    def __init__(self, models: list[Model], folder: Path) -> None:
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        self.path = folder / "main"
        includes, calls = "", ""
        for model in models:
            (folder / model.name).mkdir()
            for name, text in render(model).items():
                (folder / model.name / name).write_text(text)
            includes += f'#include "{model.name}/manager.cpp"\n'
            describe = f"models::{model.name}::describe"
            calls += f'        if (model == "{model.name}") answer({describe}, given, world);\n'
        (folder / "main.cpp").write_text(includes + MAIN + calls + "    }\n}\n")
        flags = ["-std=c++20", "-O0", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections"]
        sources = [folder / "main.cpp", RUNTIME / "src" / "layout.cpp", RUNTIME / "src" / "config.cpp"]
        command = ["g++", *flags, f"-I{RUNTIME / 'include'}", *map(str, sources), "-o", str(self.path)]
        subprocess.run(command, check=True)

    def answers(self, model: Model, cases: list[Case]) -> list[str]:
        lines = [str(len(cases))]
        for values, world in cases:
            pairs = " ".join(f"{name} {int(value)}" for name, value in values.items())
            lines.append(f"{model.name} {len(values)} {pairs} {world}")
        text = "\n".join(lines)
        done = subprocess.run([str(self.path)], input=text, capture_output=True, text=True, check=True)
        return done.stdout.split("end\n")[:-1]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program([samples.tiny(), *map(check, SPECS)], tmp_path_factory.mktemp("generated"))


def random_values(model: Model, rng: random.Random) -> dict[str, int | bool]:
    values: dict[str, int | bool] = {}
    for dim in model.dims:
        if dim.default is None or rng.random() < 0.3:
            values[dim.name] = rng.choice((1, 2, 3, 4, 6, 8, 12, 64, 100))
    for flag in model.flags:
        if flag.default is None or rng.random() < 0.5:
            values[flag.name] = rng.random() < 0.5
    return values or {model.dims[0].name: 3}  # plan() wants to be told something


def expected(model: Model, values: dict[str, int | bool], world: int) -> str | None:
    """What the program should print; None for a configuration that is refused."""
    try:
        config = configure(model, values)
        text = layout_text(plan(model, values=values, dp=world))
    except ConfigError:
        return None
    return "".join(f"{name}={int(value)} " for name, value in config.values.items()) + "\n" + text


def compare(program: Program, model: Model, cases: list[Case]) -> tuple[int, int]:
    """How many configurations were fine and how many refused, by both."""
    refused = 0
    for (values, world), answer in zip(cases, program.answers(model, cases), strict=True):
        wanted = expected(model, values, world)
        if wanted is None:
            refused += 1
            assert answer.startswith("error: "), (values, world)
        else:
            assert answer == wanted, (values, world)
    return len(cases) - refused, refused


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.stem)
def test_specs(spec: Path, program: Program) -> None:
    model = check(spec)
    rng = random.Random(11)
    cases = [(random_values(model, rng), world) for _ in range(60) for world in (1, 2, 3, 4, 8)]
    cases += [(dict(preset.values), world) for preset in model.presets for world in (1, 8)]
    fine, refused = compare(program, model, cases)
    assert fine >= 20 and fine + refused == len(cases)


def test_everything_that_a_spec_can_state(program: Program) -> None:
    model = samples.tiny()
    rng = random.Random(12)
    cases = [(random_values(model, rng), world) for _ in range(150) for world in (1, 2, 3, 4, 8)]
    fine, refused = compare(program, model, cases)
    assert fine >= 100 and refused >= 20


def test_refusals_name_everything(program: Program) -> None:
    cases: list[Case] = [
        ({"vocab": 7, "hiden": 6, "layers": 3, "bias": 2}, 1),
        ({"vocab": 7, "hidden": 6, "layers": 0, "heads": 1 << 40, "bias": 1}, 1),
        ({"vocab": 7, "hidden": 6, "layers": 3, "heads": 2, "kv_heads": 3, "bias": 1}, 1),
        ({"vocab": 7, "hidden": 1, "layers": 3, "heads": 2, "bias": 1}, 1),
        ({"vocab": 1 << 31, "hidden": 1 << 31, "layers": 1, "heads": 1, "head_dim": 1, "bias": 1}, 1),
    ]
    limits = "must be between 1 and 2147483648, not"
    assert program.answers(samples.tiny(), cases) == [
        "error: tiny: missing 'hidden', 'heads'; unknown dim or flag 'hiden'; did you mean 'hidden'?; "
        "'bias' must be true or false, not 2\n",
        f"error: tiny: 'layers' {limits} 0; 'heads' {limits} 1099511627776\n",
        "error: tiny: heads % kv_heads == 0 or tied does not hold: "
        "each KV head serves whole heads (specs/tiny.yaml:16)\n",
        f"error: tiny: 'head_dim' {limits} 0\n",
        "error: tiny: weight 'embedding' (specs/tiny.yaml:20) is too large\n",
    ]
