"""Every code of a finding is explained, with examples that are true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gradgen
from gradgen.diagnostics import SpecError, UsageError
from gradgen.explain import Explanation, explain, explanations, find
from gradgen.reference import reference
from gradgen.resolve import check, check_text

ROOT = Path(__file__).resolve().parent.parent
REST = {
    "gradgen": "gradgen: 1",
    "model": "model: small",
    "dims": "dims: {hidden: {}, layers: {}}",
    "weights": "weights: {rest: {shape: [hidden], name: rest}}",
}


def whole(entry: Explanation, part: str) -> str:
    """An example with what every spec needs around it."""
    if entry.whole:
        return part
    rest = [line for key, line in REST.items() if not re.search(rf"^{key}:", part, re.MULTILINE)]
    return "\n".join([*rest, part]) + "\n"


def codes_of(tmp_path: Path, entry: Explanation, part: str) -> set[str]:
    path = tmp_path / "spec.yaml"
    data = whole(entry, part).encode()
    path.write_bytes(data.replace(b"\\xfc", b"\xfc") if entry.code == "not-utf8" else data)
    try:
        check(path)
    except SpecError as error:
        return {finding.code for finding in error.diagnostics}
    return set()


@pytest.mark.parametrize("entry", explanations(), ids=lambda entry: entry.code)
def test_examples_are_true(tmp_path, entry):
    assert entry.code in codes_of(tmp_path, entry, entry.wrong)
    assert codes_of(tmp_path, entry, entry.right) == set()


CODE_ARGUMENT = {"Diagnostic": 2, "add": 2, "refuse": 1, "found": 1}


def emitted(path: Path) -> set[str]:
    """The codes in calls that make a finding, and in the tables and tuples that such calls unpack."""
    constants = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            constants += node.args[CODE_ARGUMENT[name] :][:1] if name in CODE_ARGUMENT else []
        elif isinstance(node, ast.Tuple):
            constants += node.elts[1:2] if path.stem == "schema" else []
            constants += node.elts[2:3] if path.stem == "yaml_reader" else []
    values = {node.value for node in constants if isinstance(node, ast.Constant)}
    return {value for value in values if isinstance(value, str) and re.fullmatch(r"[a-z0-9-]+", value)}


def test_every_code_of_the_source_is_explained_and_no_other():
    package = Path(gradgen.__file__).parent
    stems = ["source", "yaml_reader", "schema", "scope", "consistency"]
    stems += [path.stem for path in package.glob("resolve*.py")]
    codes = {code for stem in stems for code in emitted(package / f"{stem}.py")}
    known = {entry.code for entry in explanations()}
    assert codes | {"preset"} == known  # `preset` is a default argument


def test_the_corpus_has_every_code():
    corpus = "".join(path.read_text() for path in (ROOT / "tests" / "invalid").glob("*.txt"))
    reported = set(re.findall(r" \[([a-z0-9-]+)\]$", corpus, re.MULTILINE))
    assert {entry.code for entry in explanations()} - reported == {"not-utf8"}  # made by the test of bytes


def test_text():
    text = explain("unknown-key")
    assert text.startswith("unknown-key\n\nThe key has no meaning here")
    assert "Wrong:\n\n    weights: {head: {shap: [hidden], name: head}}" in text
    assert "Right:\n\n    weights: {head: {shape: [hidden], name: head}}" in text
    assert find("tie").line.startswith("A tied weight is the same tensor as another one")


def test_unknown_code():
    with pytest.raises(
        UsageError, match=r"no finding with the code 'unknown-keys'; did you mean 'unknown-key'\?"
    ):
        explain("unknown-keys")


def test_reference_is_current():
    """docs/spec.md is written from schema.json: `python -m gradgen.reference > docs/spec.md`."""
    assert (ROOT / "docs" / "spec.md").read_text(encoding="utf-8") == reference()


def test_everything_in_the_schema_is_described():
    from gradgen.schema import schema

    for name, definition in [("spec", schema()), *schema()["$defs"].items()]:
        assert definition.get("description"), name
        for key, entry in definition.get("properties", {}).items():
            assert entry.get("description"), f"{name}.{key}"


def test_the_schema_is_a_schema():
    from jsonschema import Draft202012Validator

    from gradgen.schema import schema

    Draft202012Validator.check_schema(schema())


def test_findings_point_into_the_text():
    with pytest.raises(SpecError) as caught:
        check_text("gradgen: 1\nmodel: small\nweights:\n  w: {shape: [2 * hiden], name: w}\n", "a.yaml")
    assert str(caught.value) == "a.yaml:4:19: error: unknown dim or flag 'hiden'; declare it [unknown-dim]"
