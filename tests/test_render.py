"""What render() makes: deterministic text that compiles, and that no text of a spec can change a token of."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from gradgen.model import Dim, Flag, Model, Place, Preset, Requirement
from gradgen.render import environment, meaning_hash, portable_path, render, text_hash
from tests import samples

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "gradgen" / "runtime" / "include"
TEMPLATES = sorted((ROOT / "templates").glob("*.j2"))
HOSTILE = (
    "*/ int evil = 1; /*",
    "ends with a backslash \\",
    "ends with a backslash and space \\ ",
    "a\rint evil = 2;",
    "a\nint evil = 3;",
    "a\u2028int evil = 4;",
    'quotes " \' """',
    "{{ evil }} {% evil %} %} }} {#",
    "trigraph ??/",
    "??/\nint evil = 5;",
    "#include <evil>",
    'R"(raw)"',
    "\u202e bidi \u2066",
    "\0 nul \x7f",
)


def needs_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")


def syntax_check(folder: Path, text: dict[str, str], *flags: str) -> None:
    for name in ("manager.h", "manager.cpp"):
        (folder / name).write_text(text[name])
    warnings = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    command = [
        "g++",
        "-std=c++20",
        *warnings,
        "-fsyntax-only",
        f"-I{INCLUDE}",
        *flags,
        str(folder / "manager.cpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr[:4000]


def tokens(text: str) -> list[str]:
    """The C++ tokens of a text without its comments, the contents of string literals dropped."""
    found = re.findall(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|[A-Za-z_]\w*|\d[\w.]*|\S', text)
    return ['""' if token.startswith('"') else token for token in found if not token.startswith("//")]


def python_tokens(text: str) -> list[str]:
    """The Python tokens without comments, the contents of strings dropped."""
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        '""' if token.type == tokenize.STRING else token.string
        for token in found
        if token.type != tokenize.COMMENT
    ]


def test_files_of_a_package() -> None:
    files = render(samples.tiny())
    assert list(files) == [
        "__init__.py",
        "__init__.pyi",
        "manager.cpp",
        "manager.h",
        "model.json",
        "module.cpp",
        "py.typed",
    ]
    assert all(text.endswith("\n") and "\r" not in text for name, text in files.items() if name != "py.typed")
    rest = {name: text for name, text in files.items() if name != "__init__.py"}
    assert f'"tiny", "{text_hash(rest)}"' in files["__init__.py"]


def test_everything_compiles_without_a_warning(tmp_path: Path) -> None:
    needs_compiler()
    syntax_check(tmp_path, render(samples.tiny()))


@pytest.mark.parametrize("spec", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda path: path.stem)
def test_specs_compile(spec: Path, tmp_path: Path) -> None:
    needs_compiler()
    from gradgen.resolve import check

    syntax_check(tmp_path, render(check(spec)))


def test_a_model_without_weights_outside_blocks_or_dims(tmp_path: Path) -> None:
    needs_compiler()
    bare = samples.model((), (samples.block("only", "3", samples.weight("w", "4")),), dims=())
    syntax_check(tmp_path, render(bare))
    syntax_check(tmp_path, render(samples.model((samples.weight("w", "4"),), (), dims=(), summary="")))


def test_names_that_cpp_has_other_uses_for(tmp_path: Path) -> None:
    """Fault 16: keywords, macros and names that generated code uses itself."""
    needs_compiler()
    words = [
        "class",
        "linux",
        "NULL",
        "EOF",
        "int",
        "std",
        "gradgen",
        "Tensor",
        "accumulate",
        "gradients",
        "layer",
    ]
    words += [
        "c",
        "from",
        "values",
        "validate",
        "Config",
        "errno",
        "min",
        "I",
        "A_log",
        "checked_mul",
        "unix",
    ]
    weights = tuple(samples.weight(word, "hidden") for word in words)
    blocks = tuple(
        samples.block(word, "2", *weights)
        for word in ("class", "get_block", "non_block", "block", "decoder_1", "decoder1", "std")
    )
    dims = tuple(Dim(word, None, None, samples.place()) for word in ("hidden", *words))
    for name in ("std", "linux", "index"):
        syntax_check(tmp_path, render(samples.model(weights, blocks, dims=dims, name=name)), "-DSLOTS=1")


def test_output_depends_on_the_spec_alone() -> None:
    """The same bytes from any folder, hash seed and locale."""
    code = "from tests.samples import tiny; from gradgen.render import render; print(render(tiny()))"
    outputs = set()
    for seed, locale in (("0", "C"), ("1", "C.UTF-8"), ("2", "C")):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONPATH": str(ROOT)}
        outputs.add(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, check=True, env=environ, cwd="/"
            ).stdout
        )
    assert len(outputs) == 1


def relocated(model: Model, file: str) -> Model:
    from gradgen.model import Place
    from gradgen.render import _map_places

    return _map_places(model, lambda place: Place(file, place.line, place.column), file)


def test_paths_of_machines_stay_out() -> None:
    assert portable_path("/a/b/specs/llama.yaml") == "specs/llama.yaml"
    assert portable_path("llama.yaml") == "llama.yaml"
    assert portable_path("/a/b/mine.yaml") == "mine.yaml"
    assert render(relocated(samples.tiny(), "/a/specs/tiny.yaml")) == render(
        relocated(samples.tiny(), "specs/tiny.yaml")
    )
    assert "elsewhere" not in "".join(render(samples.tiny()).values())


def test_key_is_of_the_meaning() -> None:
    model = samples.tiny()
    assert meaning_hash(model) == meaning_hash(relocated(model, "other.yaml"))
    moved = dataclasses.replace(model.weights[0], place=Place("x", 99, 1))
    assert meaning_hash(model) == meaning_hash(
        dataclasses.replace(model, weights=(moved, *model.weights[1:]))
    )
    changed = dataclasses.replace(model.weights[0], may_be_absent=True)
    assert meaning_hash(model) != meaning_hash(
        dataclasses.replace(model, weights=(changed, *model.weights[1:]))
    )


def poisoned(text: str) -> Model:
    """A model that carries `text` wherever a spec may hold free text."""
    place = Place("/elsewhere/specs/" + text, 1, 1)
    weights = (
        dataclasses.replace(samples.weight("w", "hidden", zero=samples.ALWAYS), name=text, place=place),
        dataclasses.replace(samples.weight("v", "hidden"), name=text + "2", place=place),
    )
    block = dataclasses.replace(samples.block("b", "layers", *weights), name=text + ".{i}", place=place)
    return samples.model(
        weights,
        (block,),
        summary=text,
        dims=tuple(Dim(name, text, None, place) for name in ("hidden", "layers")),
        flags=(Flag("flag", text, True, place),),
        require=(Requirement(samples.parse("hidden > 1"), text, place),),
        presets=(Preset(text, (("hidden", 4), ("layers", 2)), place),),
        file=place.file,
    )


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_text_of_a_spec_changes_no_token(text: str) -> None:
    """Fault 19, in every free text of a spec at once."""
    plain, hostile = render(poisoned("plain")), render(poisoned(text))
    for name in ("manager.h", "manager.cpp", "module.cpp"):
        assert tokens(hostile[name]) == tokens(plain[name])
        assert hostile[name].count("\n") == plain[name].count("\n")
        assert all(ord(char) >= 32 or char == "\n" for char in hostile[name])
    for name in ("__init__.py", "__init__.pyi"):
        compile(hostile[name], name, "exec")
        assert python_tokens(hostile[name]) == python_tokens(plain[name])


def test_hostile_text_compiles(tmp_path: Path) -> None:
    """The compiler agrees, also with trigraphs on. (A NUL has no place in a file's name.)"""
    needs_compiler()
    syntax_check(tmp_path, render(poisoned("".join(HOSTILE) + "\\")), "-trigraphs", "-Wno-error=trigraphs")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_show_names_and_decide_nothing(path: Path) -> None:
    """A C++ `a{{1, 2}}` would be a Jinja expression that prints `a(1, 2)`: only names may stand in braces."""
    text = path.read_text()
    for expression in re.findall(r"\{\{(.*?)\}\}", text, re.DOTALL):
        assert re.fullmatch(r" [a-z_]+(\.[a-z_]+)? ", expression), expression
    for statement in re.findall(r"\{%(.*?)%\}", text, re.DOTALL):
        assert re.fullmatch(r" (for [a-z_]+ in [a-z_]+(\.[a-z_]+)?|endfor) ", statement), statement
    assert text.count("\n") <= 120


def test_no_braces_became_calls() -> None:
    for files in (render(samples.tiny()), render(poisoned("x"))):
        for name in ("manager.h", "manager.cpp"):
            assert not re.search(r"[=\]>\w]\(\d+(, \d+)*,?\)", re.sub(r'"[^"]*"|//.*', "", files[name]))


def test_undefined_names_are_errors() -> None:
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError):
        environment().from_string("{{ nothing }}").render()


def test_stub_names_every_weight_and_dim() -> None:
    stub = render(samples.tiny())["__init__.pyi"]
    for name in ("input_norm", "q_proj", "q_bias", "kv_proj", "expert", "router", "up"):
        assert f"    {name}: Tensor\n" in stub
    assert "        kv_heads: int = ...,\n" in stub and "        bias: bool,\n" in stub
    assert 'def block_full(self, layer: int, block: Literal["mtp_head"]) -> MtpHeadBlock: ...' in stub


def test_two_thousand_weights_render() -> None:
    """Growth is linear; benchmarks/ says how long it takes."""
    weights = tuple(samples.weight(f"w{i}", "hidden", "hidden", zero=samples.ALWAYS) for i in range(2000))
    files = render(samples.model((), (samples.block("wide", "layers", *weights),)))
    assert files["manager.cpp"].count("WideWeight::w1999") == 3
