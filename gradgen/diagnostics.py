"""Every error that gradgen raises on purpose, and the form in which a spec's errors are shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a built model imports the errors, and has no use for the compiler's types
    from gradgen.model import Place

MAX_QUOTE = 80
MAX_CANDIDATES = 200


class Error(Exception):
    """Base of all."""


class UsageError(Error):
    """A call or command line that cannot be meant: a missing file, an unknown preset."""


class ConfigError(Error):
    """Dimensions or flags that a model cannot have."""


class StateError(Error):
    """A call that the manager's state does not allow."""


class CommError(Error):
    """A collective that could not be completed."""


class PeerLost(CommError):
    """A rank ended or left."""


class CommTimeout(CommError):
    """A rank did not arrive in time."""


class MismatchError(CommError):
    """Ranks disagree about what they do."""


class NonFiniteError(Error):
    """Gradients hold inf or nan, and the manager was told to raise."""


class BuildError(Error):
    """Compiling failed."""


class CacheError(BuildError):
    """A built module or the build cache cannot be used as it is."""


class Diagnostic(NamedTuple):  # a dataclass would cost every built model the import of inspect
    """One finding in a spec. `code` is explained by `gradgen explain CODE`."""

    place: Place
    message: str
    code: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.place}: error: {self.message}{hint} [{self.code}]"


def _order(finding: Diagnostic) -> tuple[str, int, int, str]:
    return finding.place.file, finding.place.line, finding.place.column, finding.message


class SpecError(Error):
    """All findings of a spec, in line order. str() gives one line each, in the form that editors parse."""

    def __init__(self, diagnostics: Iterable[Diagnostic], text: str = "") -> None:
        self.diagnostics = tuple(sorted(set(diagnostics), key=_order))
        self.text = text
        super().__init__("\n".join(map(str, self.diagnostics)))


def quote(value: object) -> str:
    """A value as a message shows it: escaped, and never long."""
    try:
        text = ascii(value)
    except Exception:  # integers of thousands of digits, and whatever a caller's own repr does
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_QUOTE else f"{text[: MAX_QUOTE - 4]}...{text[-1]}"


def plain(name: str) -> str:
    """A name without quotes, for a hint that shows what to write; escaped and never long all the same."""
    return quote(name)[1:-1]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "did you mean 'shape'?" where something close exists, else ""."""
    import difflib

    candidates = list(known)
    if (
        len(candidates) > MAX_CANDIDATES
    ):  # thousands of unknown names among thousands of known ones must stay quick
        candidates = [name for name in candidates if name[:2] == word[:2] and abs(len(name) - len(word)) < 3]
    close = difflib.get_close_matches(word[:MAX_QUOTE], candidates[:MAX_CANDIDATES], n=1, cutoff=0.6)
    return f"did you mean {quote(close[0])}?" if close else ""


def known_are(known: Iterable[str], limit: int = 20) -> str:
    """ "known are a, b, c", of which a message shows the first few."""
    names = [plain(name) for name in known]
    return f"known are {', '.join(names[:limit])}{', ...' if len(names) > limit else ''}" if names else ""


def suggest(word: str, known: Iterable[str]) -> str:
    """The close match, or else what there is."""
    names = list(known)
    return did_you_mean(word, names) or known_are(names)
