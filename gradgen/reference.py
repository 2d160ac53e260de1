"""The reference of the spec language, docs/spec.md, written from the descriptions in schema.json.

`python -m gradgen.reference > docs/spec.md`; a test keeps the file current.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradgen.schema import schema

_INTRODUCTION = """\
# The spec language

Written from `gradgen/schema.json` by `python -m gradgen.reference`; do not edit. `gradgen schema`
prints the schema for editors. `gradgen explain CODE` explains a finding.
`specs/llama.yaml` is a whole example.

A spec is one YAML mapping of text, decimal integers, `true` and `false`, lists and mappings. Tags,
anchors, aliases, merge keys, duplicate keys and what YAML 1.1 reads in surprising ways (`no`,
`12:30`, `010`, `1e5`, dates) are refused. A file has at most 1 MiB.

**Ids** (of the model, dims, flags, weights, blocks and strategies) are lower-case letters, digits
and single underscores, at most 64, beginning with a letter. Words of C++ and Python are taken. A
block and a weight outside the blocks have different ids; different blocks may use the same weight
ids. **Checkpoint names** are unique in every configuration, with `{i}` and `{e}` filled in.

**Expressions** have dims, flags, in a block its index `i`, integers, `+ - * // %`, `== != < <= > >=`, `and or not`,
`ceil_div(a, b)`, `min`, `max` and parentheses; division rounds down. Sizes are integers, conditions
are true or false, and the two do not mix. At most 500 characters, and 63 bits for every value in
them.
"""

_SECTIONS = {
    "dim": "A dim",
    "flag": "A flag",
    "requirement": "A requirement",
    "preset": "A preset",
    "weight": "A weight",
    "part": "A part",
    "buffer": "A buffer",
    "block": "A block",
    "group": "A group",
    "use": "An item of `use`",
    "lora": "`lora`",
    "backward": "An item of `backward`",
    "strategy": "A strategy",
}


def reference() -> str:
    """The text of docs/spec.md."""
    parts: list[str] = [_INTRODUCTION, "## The spec\n", _table(schema())]
    for name, title in _SECTIONS.items():
        definition = schema()["$defs"][name]
        parts += [f"## {title}\n", definition["description"] + "\n"]
        if "properties" in definition:
            parts.append(_table(definition))
    return "\n".join(parts)


def _table(definition: dict[str, Any]) -> str:
    rows = ["| key | value | meaning |", "|---|---|---|"]
    required = definition.get("required", ())
    for key, entry in definition["properties"].items():
        needed = " (required)" if key in required else ""
        rows.append(f"| `{key}`{needed} | {_cell(_type(entry))} | {_cell(entry.get('description', ''))} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _type(entry: dict[str, Any]) -> str:
    if "$ref" in entry:
        name = str(entry["$ref"]).rsplit("/", 1)[1]
        return {"hf_key": "text", "lora": "mapping"}.get(name, name)
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    if entry["type"] == "array":
        return f"list of {_plural(_type(entry['items']))}"
    if entry["type"] == "object":
        return f"mapping to {_plural(_type(entry['additionalProperties']))}"
    words = list(_words(entry))
    return " or ".join(dict.fromkeys(words))


def _words(entry: dict[str, Any]) -> Iterator[str]:
    types = entry["type"] if isinstance(entry["type"], list) else [entry["type"]]
    short = entry["then"] if entry.get("if") == {"type": "string"} else {}
    for name in types:
        if name == "string" and "enum" in short:
            yield from (f"`{value}`" for value in short["enum"])
        else:
            yield {
                "string": "text",
                "boolean": "`true`, `false`",
                "object": "mapping",
                "array": "list",
            }.get(name, str(name))


def _plural(text: str) -> str:
    words = {"`true`, `false`": "truth values", "strategy": "strategies", "backward": "items", "use": "items"}
    return words.get(text, text if text == "text" else f"{text}s")


if __name__ == "__main__":
    print(reference(), end="")
