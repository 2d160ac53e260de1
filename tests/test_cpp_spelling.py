"""cpp.py: identifiers, literals, comments and expressions mean in C++ what they mean in a spec."""

from __future__ import annotations

import random
import re
import shutil
import string
import subprocess
from pathlib import Path

import pytest

from gradgen import cpp
from gradgen.cpp_words import KEYWORDS, MACROS, OWN
from gradgen.expr import ExprError, evaluate, parse

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "gradgen" / "runtime"


def compile_and_run(folder: Path, source: str, *files: Path) -> str:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    (folder / "main.cpp").write_text(source)
    flags = [
        "-std=c++20",
        "-O0",
        "-Wall",
        "-Wextra",
        "-Wno-unused-but-set-variable",
        f"-I{RUNTIME / 'include'}",
    ]
    subprocess.run(
        ["g++", *flags, str(folder / "main.cpp"), *map(str, files), "-o", str(folder / "main")], check=True
    )
    return subprocess.run(
        [str(folder / "main")], capture_output=True, text=True, check=True, errors="surrogateescape"
    ).stdout


def test_ordinary_names_stay() -> None:
    for name in ("q_proj", "embedding", "w", "w1", "ln_f", "A_log", "D", "wte", "kv_a_proj"):
        assert cpp.identifier(name) == name


def test_taken_names_get_a_prefix() -> None:
    for name in (
        "class",
        "linux",
        "NULL",
        "__a",
        "_A",
        "a__b",
        "1a",
        "int",
        "std",
        "accumulate",
        "I",
        "EOF",
        "errno",
        "DecoderBlock",
    ):
        assert cpp.identifier(name) == "w_" + name


def test_identifiers_are_injective() -> None:
    names = ["linux", "w_linux", "w_w_linux", "w_w_w_linux", "x", "w_x", "w_w_x", "w_", "w_w_"]
    assert len({cpp.identifier(name) for name in names}) == len(names)


def test_every_keyword_and_macro_compiles(tmp_path: Path) -> None:
    """Also what this compiler and its headers define, with a lower-case or mixed-case name."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    names = (
        "<complex.h>",
        "<cstdio>",
        "<cerrno>",
        "<cassert>",
        "<sys/types.h>",
        '"gradgen/tables.h"',
    )
    headers = "".join(f"#include {name}\n" for name in names)
    command = ["g++", "-std=gnu++20", "-dM", "-E", "-x", "c++", "-", f"-I{RUNTIME / 'include'}"]
    macros = subprocess.run(command, input=headers, capture_output=True, text=True, check=True).stdout
    names = (
        {name for name in re.findall(r"#define (\w+)\b(?!\()", macros) if not name.startswith("_")}
        | KEYWORDS
        | MACROS
        | OWN
    )
    rows = "".join(f"    {cpp.identifier(name)},\n" for name in sorted(names))
    source = headers + "namespace n { enum class E : int {\n" + rows + "}; }\nint main() { return 0; }\n"
    compile_and_run(tmp_path, source)


def test_type_names() -> None:
    assert cpp.type_names(["decoder", "mtp_head"]) == {"decoder": "Decoder", "mtp_head": "MtpHead"}
    assert cpp.type_names(["a_b", "aB", "c"]) == {"a_b": "a_b", "aB": "aB", "c": "C"}
    assert cpp.type_names(["b_1", "b1"]) == {"b_1": "b_1", "b1": "b1"}


TEXTS = (
    "plain",
    'quote " and \\ backslash',
    "??/ ??( ???",
    "\n\r\t\0\x7f",
    "7\x01" + "7",
    "größe 漢字 \u202e",
    "{{ x }} %} {%",
    "",
    'R"(x)"',
    *("".join(random.Random(i).choices(string.printable + "äß漢\0\u2028", k=40)) for i in range(40)),
)


def test_strings_keep_every_byte(tmp_path: Path) -> None:
    rows = "".join(
        f"    show(std::string_view({cpp.string(text)}, sizeof({cpp.string(text)}) - 1));\n" for text in TEXTS
    )
    show = (
        'void show(std::string_view s) { for (unsigned char c : s) std::printf("%02x", c); std::puts(""); }\n'
    )
    source = f"#include <cstdio>\n#include <string_view>\n{show}int main() {{\n{rows}}}\n"
    assert all(ord(char) < 128 for char in source)
    assert "??" not in source
    assert compile_and_run(tmp_path, source).splitlines() == [text.encode().hex() for text in TEXTS]


def test_comments_stay_on_their_line() -> None:
    for text in (*TEXTS, "x \\", "x \\  ", "x ??/", "\\\\\\", "*/", "/*", "a\u2028b", "a\x85b", "\ud800"):
        shown = cpp.comment(text)
        assert not re.search(
            r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\*/|/\*|\?\?", shown
        )
        assert not shown.endswith("\\")


def random_expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(
            ["a", "b", "c", str(rng.choice((0, 1, 2, 3, 7, 64, 1 << 20, (1 << 31), (1 << 40))))]
        )
    left, right = random_expression(rng, depth - 1), random_expression(rng, depth - 1)
    kind = rng.choice(("+", "-", "*", "//", "%", "min", "max", "ceil_div", "neg"))
    if kind in ("min", "max", "ceil_div"):
        return f"{kind}({left}, {right})"
    return f"(-({left}))" if kind == "neg" else f"(({left}) {kind} ({right}))"


def random_condition(rng: random.Random, depth: int) -> str:
    if depth == 0:
        left, right = random_expression(rng, 2), random_expression(rng, 2)
        return rng.choice(
            ["flag", "not flag", f"({left}) {rng.choice(('==', '!=', '<', '<=', '>', '>='))} ({right})"]
        )
    left, right = random_condition(rng, depth - 1), random_condition(rng, depth - 1)
    return rng.choice([f"({left}) and ({right})", f"({left}) or ({right})", f"not ({left})"])


def expected(text: str, env: dict[str, int | bool]) -> str:
    try:
        return str(int(evaluate(parse(text), env)))
    except ExprError:
        return "error"


def test_expressions_mean_the_same(tmp_path: Path) -> None:
    """Floor division, remainders, overflow and division by zero, at both ends of what a dim may be."""
    rng = random.Random(7)
    texts = [random_expression(rng, rng.randrange(1, 5)) for _ in range(250)] + [
        random_condition(rng, rng.randrange(3)) for _ in range(80)
    ]
    values = [(1, 1, 1), (7, 3, 2), (4096, 32, 100003), (1 << 31, (1 << 31) - 1, 1)]
    names = {name: cpp.dim(f"c.{name}") for name in "abc"} | {"flag": cpp.flag("c.flag")}

    def spelled(text: str) -> str:
        return cpp.expression(parse(text), names)

    body = "".join(
        f"    show(c, []([[maybe_unused]] const C& c) -> std::int64_t {{ return {spelled(text)}; }});\n"
        for text in texts
    )
    source = f"""#include <algorithm>
#include <cstdio>
#include "gradgen/config.h"
using namespace gradgen;
struct C {{ std::int64_t a, b, c; bool flag; }};
template <class F> void show(const C& c, F f) {{
    try {{
        std::puts(std::to_string(f(c)).c_str());
    }} catch (const ConfigError&) {{
        std::puts("error");
    }}
}}
void all(const C& c) {{
{body}}}
int main() {{
{"".join(f"    all(C{{{a}, {b}, {c}, {cpp.boolean(a == 7)}}});" for a, b, c in values)}
}}
"""
    lines = compile_and_run(
        tmp_path, source, *(RUNTIME / "src" / name for name in ("config.cpp", "layout.cpp"))
    ).splitlines()
    wanted = [
        expected(text, {"a": a, "b": b, "c": c, "flag": a == 7}) for a, b, c in values for text in texts
    ]
    wrong = [
        (texts[i % len(texts)], got, want)
        for i, (got, want) in enumerate(zip(lines, wanted, strict=True))
        if got != want
    ]
    assert not wrong, wrong[:5]
    assert 0 < wanted.count("error") < len(wanted) / 2


def test_plain_arithmetic_reads_plainly() -> None:
    names = {name: cpp.dim(name) for name in ("hidden", "heads", "head_dim")} | {
        "tied": cpp.flag("tied"),
        "bias": cpp.flag("bias"),
    }
    for text, spelled in (
        ("hidden // heads", "hidden / heads"),
        ("heads * head_dim", "heads * head_dim"),
        ("(hidden + 1) * heads", "(hidden + 1) * heads"),
        ("hidden - heads - (head_dim - 1)", "hidden - heads - (head_dim - 1)"),
        ("heads * head_dim * hidden", "checked_mul(heads * head_dim, hidden)"),
        ("(hidden - heads) // 2", "floor_div(hidden - heads, 2)"),
        ("65536 * 65536 * 2", "8589934592"),
        ("not tied and bias or tied", "(!tied && bias) || tied"),
        ("not (tied or bias)", "!(tied || bias)"),
        ("max(hidden, 64)", "std::max<std::int64_t>({hidden, 64})"),
        ("ceil_div(hidden, 3) == heads", "ceil_div(hidden, 3) == heads"),
    ):
        assert cpp.expression(parse(text), names) == spelled
