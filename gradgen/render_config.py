"""What the C++ templates show of a model's configuration, and the helpers that lay out lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradgen import cpp
from gradgen.expr import to_text
from gradgen.model import Model, Place

WIDTH = 140


@dataclass(frozen=True)
class ConfigView:
    members: list[str]
    reads: list[str]
    presets: list[str]
    checks: list[str]
    values: list[str]


def config_view(model: Model) -> ConfigView:
    c, own = members(model, "c."), members(model, "")
    fields, dim_reads, flag_reads, checks, values = [], [], [], [], []
    for dim in model.dims:
        text, field = cpp.string(dim.name), cpp.identifier(dim.name)
        default = f"default {cpp.comment(to_text(dim.default))}; " if dim.default is not None else ""
        fields.append((f"std::int64_t {field} = 0;", default + place(dim.place)))
        fallback = f", [&] {{ return {cpp.expression(dim.default, c)}; }}" if dim.default is not None else ""
        least = ", 0" if dim.min == 0 else ""
        read = f"c.{field} = read.dim({text}{fallback});"
        if least:
            read = f"c.{field} = read.dim_from(0, {text}{fallback});"
        dim_reads.append((read, place(dim.place)))
        checks.append((f"require_dim(kName, {text}, {field}{least});", ""))
        values.append(f"{{{text}, {field}}},")
    for flag in model.flags:
        text, field = cpp.string(flag.name), cpp.identifier(flag.name)
        fields.append((f"bool {field} = {cpp.boolean(bool(flag.default))};", place(flag.place)))
        fallback = f", {cpp.boolean(flag.default)}" if flag.default is not None else ""
        flag_reads.append((f"c.{field} = read.flag({text}{fallback});", place(flag.place)))
        values.append(f"{{{text}, {field}}},")
    for requirement in model.require:
        texts = (
            cpp.string(to_text(requirement.that)),
            cpp.string(requirement.because),
            place_text(requirement.place),
        )
        checks.append((f"require({cpp.condition(requirement.that, own)}, kName, {', '.join(texts)});", ""))
    presets: list[str] = []
    for preset in model.presets:
        items = [f"{{{cpp.string(name)}, {cpp.integer(int(value))}}}" for name, value in preset.values]
        presets.append(f"if (name == {cpp.string(preset.name)}) {{  // {place(preset.place)}")
        presets += wrapped("    return from({", items, "});")
        presets.append("}")
    return ConfigView(
        members=aligned(fields),
        reads=aligned(flag_reads + dim_reads),  # defaults of dims may ask for flags
        presets=presets,
        checks=aligned(checks),
        values=values,
    )


def members(model: Model, prefix: str) -> dict[str, cpp.Spelled]:
    """How expressions name dims and flags: members of the configuration."""
    dims = {dim.name: cpp.dim(prefix + cpp.identifier(dim.name), dim.min) for dim in model.dims}
    return dims | {flag.name: cpp.flag(prefix + cpp.identifier(flag.name)) for flag in model.flags}


def place(place: Place) -> str:
    return cpp.comment(f"{place.file}:{place.line}")


def place_text(place: Place) -> str:
    return cpp.string(f"{place.file}:{place.line}")


def aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Code with its comment, comments in one column."""
    width = max((len(code) for code, _ in lines), default=0)
    return [f"{code.ljust(width)}  // {comment}" if comment else code for code, comment in lines]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """`{a, b, c},` with the cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    return [
        "{"
        + "".join((cell + ", ").ljust(width + 2) for cell, width in zip(row[:-1], widths, strict=False))
        + row[-1]
        + "},"
        for row in rows
    ]


def wrapped(head: str, items: Sequence[str], tail: str) -> list[str]:
    """`head item, item, ... tail` over as many lines as it needs."""
    lines, line = [], head
    for index, item in enumerate(items):
        piece = item + (", " if index < len(items) - 1 else tail)
        if len(line) + len(piece) > WIDTH - 4 and line.strip():
            lines.append(line.rstrip())
            line = " " * 8
        line += piece
    return [*lines, line if items else head + tail]


def name_list(name: str, texts: Sequence[str]) -> list[str]:
    return wrapped(
        f"constexpr std::array<std::string_view, {len(texts)}> {name} = {{",
        [cpp.string(text) for text in texts],
        "};",
    )
