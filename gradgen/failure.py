"""How a build fails: a message that leads to the spec, and a folder with what is needed to try by hand."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from gradgen.cache import Entry, remove
from gradgen.compilers import Finished
from gradgen.diagnostics import BuildError

RECORD = "failed.json"
LOG = "log.txt"
MADE = ("*.o", "*.s", "*.keep")  # what compilers left; *.keep are nvcc's folders
SHOWN = 12  # lines of a compiler's output where no error can be found in it
ERROR = re.compile(
    r"^(?P<file>[^\s:][^:]*):(?P<line>\d+):(?:(?P<column>\d+):)? (?:fatal )?error: (?P<text>.*)$"
)
NVCC_ERROR = re.compile(
    r"^(?P<file>[^\s:(][^:(]*)\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?: (?P<text>.*)$"
)
LOCATION = re.compile(r"^(?P<file>[^\s:][^:]*):(?P<line>\d+):")
PLACE = re.compile(r"[\w./-]+\.ya?ml:\d+")
# Another attempt may well succeed: such failures are not remembered.
PASSING = re.compile(
    r"Killed|[Oo]ut of memory|[Mm]emory exhausted|annot allocate memory|No space left|quota exceeded"
    r"|internal compiler error|Input/output error|Bus error|Segmentation fault|Terminated"
)


class CompileError(BuildError):
    """A compiler refused or failed. `lasting`: the same sources would fail again."""

    def __init__(self, message: str, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


@dataclass(frozen=True)
class Remembered:
    key: str
    message: str


def recall(entry: Entry) -> BuildError | None:
    """The error of an earlier attempt with exactly these sources and this compiler."""
    try:
        data = json.loads((entry.failed / RECORD).read_text(encoding="utf-8"))
        record = Remembered(**data)
    except (OSError, ValueError, TypeError):
        return None
    if record.key != entry.key:
        return None
    again = (
        "it failed before and nothing has changed since; to try again: gradgen build, or remove that folder"
    )
    return CompileError(f"{record.message}\n  {again}", lasting=True)


def keep(entry: Entry, folder: Path, commands: Iterable[Finished], error: BuildError) -> None:
    """Moves sources and log to where the message says they are.

    A full disk keeps nothing, and that is all right.
    """
    try:
        log = "".join(f"$ {shlex.join(done.command.arguments)}\n{done.output}\n" for done in commands)
        for path in [*(path for end in MADE for path in folder.glob(end)), folder / ".owner"]:
            remove(path)
        (folder / LOG).write_text(log, encoding="utf-8")
        if isinstance(error, CompileError) and error.lasting:
            (folder / RECORD).write_text(
                json.dumps(asdict(Remembered(entry.key, str(error)))), encoding="utf-8"
            )
        entry.failed.parent.mkdir(mode=0o700, exist_ok=True)
        remove(entry.failed)
        folder.rename(entry.failed)
    except OSError:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def compile_error(entry: Entry, done: Finished, folder: Path) -> CompileError:
    """The first error, its line of generated code, and the line of the spec that it was generated from."""
    name = done.command.name
    what = f"{'linking' if name.endswith('.so') else 'compiling'} {name} of {entry.label}"
    lines = [*_reason(done, folder)]
    lines.append(f"command: {shlex.join(done.command.arguments)}")
    lines.append(f"sources and log: {entry.failed}")
    lasting = done.code > 0 and PASSING.search(done.output) is None
    return CompileError("\n  ".join([f"{what} failed", *lines]), lasting)


def _reason(done: Finished, folder: Path) -> list[str]:
    if done.timed_out:
        return [f"it was stopped after {done.seconds:.0f} s"]
    if re.search(r"No space left|quota exceeded", done.output):
        return [f"no space left on the disk of {folder.parent}"]
    if done.code < 0 or re.search(
        r"Killed|[Oo]ut of memory|[Mm]emory exhausted|annot allocate memory", done.output
    ):
        ended = f"ended by {signal.Signals(-done.code).name}" if done.code < 0 else "killed, or out of memory"
        return [f"the compiler was {ended} (for lack of memory? try fewer at a time: -j 1)"]
    output = done.output.split("\n")
    for number, line in enumerate(output):
        match = ERROR.match(line) or NVCC_ERROR.match(line)
        if (
            match is not None and "host_config.h" in match["file"]
        ):  # nvcc's own words say which versions it takes
            return [line, "name a C++ compiler that this nvcc takes: for example CXX=g++-13"]
        if match is not None:
            return [
                line,
                *_origin(
                    output[max(0, number - 30) : number + 30], match["file"], int(match["line"]), folder
                ),
            ]
    said = [line for line in output if line.strip()][:SHOWN]
    return said or [f"it ended with exit code {done.code} and said nothing"]


def _origin(around: list[str], file: str, line: int, folder: Path) -> list[str]:
    """The line of generated code. For an error in the runtime:

    the first line of the model's that led there.
    """
    places = [(file, line)]
    for text in around:
        match = LOCATION.match(text)
        if match is not None:
            places.append((match["file"], int(match["line"])))
    for name, number in places:
        if "/" not in name:
            with contextlib.suppress(OSError, IndexError):
                code = (folder / name).read_text(encoding="utf-8", errors="replace").split("\n")[number - 1]
                found = PLACE.findall(code)
                shown = (
                    [f"{name}:{number}: {code.strip()}"]
                    if (name, number) != (file, line)
                    else [f"    {code.strip()}"]
                )
                return [*shown, *([f"from {found[-1]}"] if found else [])]
    return []
