"""Wrong specs and exactly what is said about them: tests/invalid/NAME.yaml and NAME.txt.

After a change that is meant, write the texts again: `python -m tests.test_frontend_invalid`.
"""

from __future__ import annotations

import copy
import os
import random
import re
import resource
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from gradgen.diagnostics import SpecError, UsageError
from gradgen.explain import explanations
from gradgen.render import render
from gradgen.resolve import check, check_text

INVALID = Path(__file__).with_name("invalid")
NAMES = sorted(path.stem for path in INVALID.glob("*.yaml"))
VALID = "gradgen: 1\nmodel: small\nweights:\n  w: {shape: [3], name: w}\n"


def findings(name: str) -> str:
    """What `check` says about a spec of the corpus, with its bare name for a path."""
    path = INVALID / f"{name}.yaml"
    with pytest.raises(SpecError) as caught:
        check(path)
    return str(caught.value).replace(str(path), path.name) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_corpus(name):
    assert findings(name) == (INVALID / f"{name}.txt").read_text(encoding="utf-8")


def test_every_finding_has_a_place_a_code_and_no_long_quotes():
    codes = {entry.code for entry in explanations()}
    for name in NAMES:
        places = []
        for line in findings(name).splitlines():
            match = re.fullmatch(r"[a-z0-9-]+\.yaml:(\d+):(\d+): error: (.+) \[([a-z0-9-]+)\]", line)
            assert match is not None, line
            assert match[4] in codes
            assert line.isascii()
            assert not re.search(r"(.)\1{90}", line), line
            places.append((int(match[1]), int(match[2])))
        assert places == sorted(places), name


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (VALID.encode("utf-16"), ":1:1: error: the file is not UTF-8 text"),
        (VALID.encode("utf-16-le"), ":1:2: error: the file holds NUL bytes"),
        (VALID.encode() + b"summary: gr\xfcn\n", ":5:12: error: the file is not UTF-8 text"),
        (VALID.encode() + b"summary: a\0b\n", ":5:11: error: the file holds NUL bytes"),
        (VALID.encode() + b"summary: \xed\xa0\x80\n", ":5:10: error: the file is not UTF-8 text"),
        (b"\x7fELF\x02\x01\x01" + bytes(100), ":1:8: error: the file holds NUL bytes"),
        (VALID.encode() + b"summary: a\x1bb\n", ":5:11: error: invisible character '\\x1b'; remove it"),
    ],
    ids=["utf-16 with a mark", "utf-16", "latin-1", "nul", "surrogate", "elf", "escape"],
)
def test_bytes_that_are_no_text(tmp_path, data, said):
    path = tmp_path / "spec.yaml"
    path.write_bytes(data)
    with pytest.raises(SpecError) as caught:
        check(path)
    assert str(caught.value).startswith(f"{path}{said}")


def test_a_byte_order_mark_and_windows_line_ends_are_harmless(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode())
    assert check(path).weights[0].place.line == 4


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing.yaml", "missing.yaml: cannot read it: No such file or directory"),
        (".", ".: is a directory; name a spec file"),
        ("", "'': cannot read it: No such file or directory"),
        ("/dev/zero", "/dev/zero: is not a regular file"),
        ("fifo", "fifo: is not a regular file"),
        ("loop", "loop: cannot read it: Too many levels of symbolic links"),
        ("huge.yaml", "huge.yaml: has 52428800 bytes; a spec has at most 1048576"),
        ("a" * 300, "cannot read it: the name is too long"),
        ("a\0b", r"'a\x00b': cannot be a path: it holds a null character"),
        ("missing.yaml/x", "missing.yaml/x: cannot read it: No such file or directory"),
    ],
    ids=lambda text: text[:20].replace("\0", "0"),
)
def test_what_is_no_readable_file(tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    with open("huge.yaml", "wb") as file:
        file.truncate(50 << 20)
    with pytest.raises(UsageError) as caught:
        check(path)
    assert said in str(caught.value)


HOSTILE = {
    "deep flow": "a: " + "[" * 100_000,
    "deep blocks": "\n".join(" " * i + f"k{i}:" for i in range(900)),
    "many unknown keys": VALID + "\n".join(f"key{i}: 1" for i in range(3000)),
    "many unknown names": VALID + "backward: [" + ", ".join(f"w{i}" for i in range(3000)) + "]",
    "many duplicate keys": "a: 1\n" * 3000,
    "long names": VALID + "  " + "x" * 100_000 + ": {}\n",
    "long expression": VALID + "  v: {shape: ['" + "(" * 100_000 + "'], name: v}\n",
    "billion laughs": "a: &a [x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefg")),
    "long version": "%YAML 1." + "9" * 5000 + "\n---\na: 1\n",
    "long chain of dims": "gradgen: 1\nmodel: m\ndims:\n"
    + "".join(f"  d{i}: {{default: d{i + 1}}}\n" for i in range(3000))
    + "  d3000: {default: d0}\nweights: {w: {shape: [d0], name: w}}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_soon(name):
    """Bad inputs 9 to 11 and 21: a SpecError with a line, in little time and memory."""
    before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SpecError, match=r"^spec\.yaml:\d+:\d+: error: "):
        check_text(HOSTILE[name], "spec.yaml")
    assert time.process_time() - before[0] < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 300_000  # KiB


def test_random_damage_never_escapes():
    """Any damage to a good spec gives a model or findings, nothing else."""
    text = (INVALID.parent.parent / "specs" / "llama.yaml").read_text()
    chance = random.Random(7)
    for _ in range(150):
        damaged = list(text[:1500])
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(damaged))
            damaged[at : at + chance.randint(0, 3)] = chance.choice(
                ["", ":", "{", "]", "\n", "'", "- ", "&a ", "*", "9" * 30, "\t", "?"]
            )
        try:
            check_text("".join(damaged))
        except SpecError as error:
            assert error.diagnostics


JUNK = [None, True, 0, -1, 2**63, "", "hidden +", "a.{i}", "class", "e\nf", [], {}, [[]], {"x": 1}]
JUNK += [
    {"block": "layer"},
    {"block": 3},
    {"weight": "embedding"},
    {"when": {}},
    {"rows": "k"},
    "tied",
    "layers",
    "i",
    "i // 0",
    "x.{e}",
    [0, 5],
    ["attention", {"group": "attention", "as": "two", "name": "x"}],
    {"weight": "shared", "block": "encoder", "at": "i - 1"},
    [{"name": "a.{e}", "size": "hidden"}],
    {"sharded": 1},
]


def paths(data, path=()):
    """Of all values within `data`."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


@pytest.mark.parametrize("name", ["mini", "kinds", "sharing"])
def test_random_values_anywhere_never_escape(name):
    """Wrong structure is mended for the checks of names: no combination of mistakes may break those."""
    good = yaml.safe_load((INVALID.parent / "specs" / f"{name}.yaml").read_text())
    sizes = {"hidden": 3, "layers": 2, "vocab": 5}
    good["presets"] = {"tiny": {key: value for key, value in sizes.items() if key in good["dims"]}}
    chance = random.Random(11)
    for _ in range(100):
        data = copy.deepcopy(good)
        for _ in range(chance.randint(1, 4)):
            *parents, key = chance.choice(list(paths(data)))
            parent = data
            for step in parents:
                parent = parent[step]
            if chance.random() < 0.7:
                parent[key] = copy.deepcopy(chance.choice(JUNK))
            else:
                del parent[key]
        try:
            render(check_text(yaml.safe_dump(data, sort_keys=False), "spec.yaml"))
        except SpecError as error:
            assert all(line.startswith("spec.yaml:") for line in str(error).split("\n"))


def rewrite() -> None:
    for name in NAMES:
        (INVALID / f"{name}.txt").write_text(findings(name), encoding="utf-8")


if __name__ == "__main__":
    rewrite()
