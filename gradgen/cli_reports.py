"""What the commands ask for and how it reads: values in, text or JSON out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gradgen import cli_console as console
from gradgen.diagnostics import Diagnostic, SpecError, UsageError
from gradgen.model import Model, Place

if TYPE_CHECKING:
    from gradgen.cache import CacheEntry, Cleaned
    from gradgen.explain import Explanation
    from gradgen.generate import Generated

EXCERPT = 200  # characters of a source line
MAX_SOURCE = 1 << 20  # bytes; no spec is larger


@dataclass(frozen=True)
class CheckResult:
    """One spec: a model, or findings, or the reason why it cannot be read."""

    file: str
    model: Model | None = None
    findings: tuple[Diagnostic, ...] = ()
    unreadable: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "ok": self.model is not None,
            "model": self.model.name if self.model else None,
            "error": self.unreadable,
            "findings": [finding_json(finding) for finding in self.findings],
        }


@dataclass(frozen=True)
class CheckReport:
    results: tuple[CheckResult, ...]

    @property
    def code(self) -> int:
        if any(result.unreadable for result in self.results):
            return console.USAGE
        return console.FINDINGS if any(result.findings for result in self.results) else console.OK

    def to_json(self) -> dict[str, Any]:
        return {"specs": [result.to_json() for result in self.results]}


def check(specs: Sequence[str]) -> CheckReport:
    """Checks every spec, whatever is wrong with the others."""
    from gradgen import resolve

    results = []
    for spec in specs:
        try:
            results.append(CheckResult(spec, model=resolve.check(spec)))
        except SpecError as error:
            results.append(CheckResult(spec, findings=tuple(error.diagnostics)))
        except UsageError as error:
            results.append(CheckResult(spec, unreadable=str(error)))
    return CheckReport(tuple(results))


def result_text(result: CheckResult, stream: TextIO) -> str:
    if result.model is None:
        return findings_text(result.findings, stream)
    model = result.model
    weights = len(model.weights) + sum(len(block.weights) for block in model.blocks)
    parts = (
        counted(weights, "weight"),
        counted(len(model.blocks), "block"),
        counted(len(model.presets), "preset"),
    )
    return f"{result.file}: ok ({model.name}: {', '.join(parts)})"


def finding_json(finding: Diagnostic) -> dict[str, Any]:
    place = finding.place
    where = {"file": place.file, "line": place.line, "column": place.column}
    return {**where, "code": finding.code, "message": finding.message, "hint": finding.hint or None}


def findings_text(findings: Sequence[Diagnostic], stream: TextIO) -> str:
    """One line a finding, in the form that editors read; on a terminal with the source line and a caret."""
    lines = []
    for finding in findings:
        text = str(finding)
        if console.coloured(stream):
            text = text.replace(" error: ", f" {console.RED}error:{console.RESET} ", 1)
        lines.append(text)
        if stream.isatty():
            lines += excerpt(finding.place, stream)
    return "\n".join(lines)


def excerpt(place: Place, stream: TextIO) -> list[str]:
    """The line of a place and a caret under its column; nothing where the file can no longer be read."""
    try:
        rows = source_lines(place.file)
        row = rows[place.line - 1]
    except (OSError, IndexError):
        return []
    shown = "".join(character if character.isprintable() else "\ufffd" for character in row)[:EXCERPT]
    gutter = f"{place.line} | "
    lines = [console.styled(gutter, console.DIM, stream) + shown]
    if place.column <= len(shown) + 1:
        lines.append(" " * (len(gutter) + place.column - 1) + console.styled("^", console.RED, stream))
    return lines


@lru_cache(maxsize=8)
def source_lines(file: str) -> list[str]:
    path = Path(file)
    if not path.is_file() or path.stat().st_size > MAX_SOURCE:
        raise FileNotFoundError(file)
    return path.read_text(encoding="utf-8", errors="replace").split("\n")


def counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def generated_text(result: Generated, again: str, stream: TextIO) -> str:
    """What was written; for a check the differences, and what to do about them."""
    if not result.check:
        written = [f"{file.state:8} {file.path}" for file in result.stale]
        return "\n".join([*written, f"{counted(len(result.files), 'file')}, {len(result.stale)} written"])
    if not result.stale:
        return f"{counted(len(result.files), 'file')} of {result.out} up to date"
    diffs = [diff_text(file.diff, stream) for file in result.stale if file.diff]
    lines = []
    for file in result.stale:
        said = {
            "created": "is missing",
            "changed": "is stale",
            "foreign": "is not gradgen's: move or delete it",
        }[file.state]
        lines.append(f"{file.path}: {said}")
    if any(file.state != "foreign" for file in result.stale):
        lines.append(f"run `{again}`")
    return "".join(diffs) + "\n".join(lines)


def diff_text(diff: str, stream: TextIO) -> str:
    if not console.coloured(stream):
        return diff
    styles = {"-": "\x1b[31m", "+": "\x1b[32m", "@": "\x1b[36m"}
    lines = (console.styled(line, styles.get(line[:1], ""), stream) for line in diff.split("\n"))
    return "\n".join(lines)


def shipped_specs() -> list[str]:
    """specs/*.yaml of this folder where there are any, else those that came with gradgen."""
    from gradgen import paths

    here = sorted(Path("specs").glob("*.yaml"))
    return [str(path) for path in here or sorted(paths.specs_dir().glob("*.yaml"))]


def schema_text() -> str:
    from gradgen.schema import schema

    return json.dumps(schema(), indent=2)


def codes_table(every: Sequence[Explanation]) -> str:
    from gradgen.plan_table import aligned

    return "\n".join(aligned([(one.code, one.line) for one in every], left=2))


def cache_table(entries: Sequence[CacheEntry]) -> str:
    """What the cache holds, a row each."""
    from gradgen.plan_table import aligned, bytes_text

    if not entries:
        return "the cache is empty"
    rows = [("kind", "name", "device", "python", "in use", "size")]
    for entry in entries:
        used = "yes" if entry.in_use else "no"
        rows.append((entry.kind, entry.name, entry.device, entry.python, used, bytes_text(entry.bytes)))
    return "\n".join(aligned(rows, left=5))


def cleaned_text(cleaned: Cleaned) -> str:
    from gradgen.plan_table import bytes_text

    kept = f"; kept {counted(len(cleaned.kept), 'entry', 'entries')} in use" if cleaned.kept else ""
    return f"removed {counted(len(cleaned.removed), 'entry', 'entries')}, {bytes_text(cleaned.bytes)}{kept}"
