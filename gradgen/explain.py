"""What the codes of findings mean, each with an example of the mistake and of its cure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gradgen.diagnostics import UsageError, quote, suggest


@dataclass(frozen=True)
class Explanation:
    code: str
    what: str
    wrong: str  # part of a spec that has this finding
    right: str  # the same part without it
    whole: bool = False  # the examples are whole specs

    @property
    def text(self) -> str:
        parts = [self.code, "", _wrapped(self.what), "", "Wrong:", "", _indented(self.wrong)]
        return "\n".join([*parts, "", "Right:", "", _indented(self.right)])

    @property
    def line(self) -> str:
        """The first sentence."""
        return self.what.split(". ")[0].rstrip(".")

    def to_json(self) -> dict[str, str]:
        return {"code": self.code, "what": self.what, "wrong": self.wrong, "right": self.right}


@lru_cache(maxsize=1)
def explanations() -> tuple[Explanation, ...]:
    """All, in alphabetical order of their codes."""
    import yaml

    text = Path(__file__).with_name("explanations.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)
    return tuple(Explanation(code, **entry) for code, entry in sorted(entries.items()))


def find(code: str) -> Explanation:
    """The explanation of a code. Raises UsageError for what is none."""
    for entry in explanations():
        if entry.code == code:
            return entry
    cure = suggest(code, [entry.code for entry in explanations()])
    raise UsageError(f"there is no finding with the code {quote(code)}; {cure}")


def explain(code: str) -> str:
    """What `gradgen explain CODE` prints."""
    return find(code).text


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, width=88, break_long_words=False, break_on_hyphens=False)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip("\n").split("\n"))
