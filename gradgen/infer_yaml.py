"""YAML text in the style of the shipped specs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

STRATEGIES = """\
strategies:
  unsharded:          {blocks: full, collective: reduce_scatter}
  sharded:            {blocks: sharded, collective: reduce_scatter}
  sharded_all_to_all: {blocks: sharded, collective: all_to_all}
  replicated:         {blocks: full, collective: all_reduce}
  fully_sharded:      {blocks: sharded, non_blocks: sharded, collective: all_to_all}
"""
Row = tuple[str, dict[str, str], str]  # id, fields and comment of a weight
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./+\-]*(\{i\}[A-Za-z0-9_./+\-]*)?")


def aligned(entries: Mapping[str, Mapping[str, str]], indent: int) -> list[str]:
    width = max(map(len, entries), default=0) + 1
    return [f"{' ' * indent}{f'{name}:':<{width}} {flow(fields)}" for name, fields in entries.items()]


def rows(weights: Sequence[tuple[str, Mapping[str, str], str]], indent: int) -> list[str]:
    """One weight a line; ids are padded up to a width that most have."""
    width = min(max((len(id) for id, _, _ in weights), default=0), 32) + 1
    return [
        f"{' ' * indent}{f'{id}:':<{width}} {flow(fields)}" + (f"  # {comment}" if comment else "")
        for id, fields, comment in weights
    ]


def flow(fields: Mapping[str, object]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in fields.items())}}}"


def name_text(name: str) -> str:
    """A checkpoint name as YAML text; quoted where YAML could read it as something else."""
    plain = _PLAIN.fullmatch(name) is not None and ("." in name or len(name) > 5)
    return name if plain else f'"{name}"'


def scalar(text: str) -> str:
    """Any text as one line of YAML."""
    text = printable(text)
    if not re.search(r"[:#\"'\\\[\]{}]", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def printable(text: str) -> str:
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def yes(value: bool) -> str:
    return "true" if value else "false"


def listed(names: Iterable[str], limit: int = 6) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
