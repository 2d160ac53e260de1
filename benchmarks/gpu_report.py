"""What the GPU benchmarks share when they report: targets, tables, and results with machine and command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 2**30


class Target(NamedTuple):
    """`value` shall be at most, or at least, `limit`. None: not measured."""

    what: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        sign = ">=" if self.at_least else "<="
        value = "not measured" if self.value is None else f"{self.value:.3f}"
        verdict = {True: "met", False: "MISSED", None: "-"}[self.met]
        return f"{verdict:7s} {self.what}: {value} ({sign} {self.limit:g})"


def targets_json(targets: Sequence[Target]) -> list[dict[str, Any]]:
    return [{**target._asdict(), "met": target.met} for target in targets]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def command_line(script: str) -> str:
    """As a reader would type it: without the folders of the machine that ran it."""
    arguments, skip = [], False
    for argument in sys.argv[1:]:
        if skip or os.path.isabs(argument) or argument.startswith("--out="):
            skip = False
            continue
        if argument == "--out":
            skip = True
            continue
        arguments.append(argument)
    return " ".join([script, *arguments])


def write(out: Path, results: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def short(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
