"""Running compilers: lists of arguments, a few at a time, a checked return code, and an error that shows what a user can act on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gradgen.diagnostics import BuildError

LIMIT = 900.0  # seconds for one compiler


@dataclass(frozen=True)
class Step:
    name: str  # what a person calls it: "manager.cpp"
    command: tuple[str, ...]


class CompileFailed(BuildError):
    """One compiler failed. `output` is all it printed."""

    def __init__(self, message: str, output: str, deterministic: bool) -> None:
        super().__init__(message)
        self.output = output
        self.deterministic = deterministic


def run(steps: Sequence[Step], folder: Path, jobs: int) -> list[tuple[str, float]]:
    """Runs all steps, at most `jobs` at once; (name, seconds) each. The first failure ends the others and is raised."""
    running: set[subprocess.Popen[bytes]] = set()
    stopped = False

    def one(step: Step) -> tuple[str, float]:
        if stopped:
            return step.name, 0.0
        start = time.monotonic()
        log = folder / f"{step.name}.log"
        with open(log, "wb") as output:
            try:
                process = subprocess.Popen(
                    step.command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True, env={**os.environ, "LC_ALL": "C"},
                )  # fmt: skip
            except OSError as error:
                raise CompileFailed(f"{step.command[0]} did not start: {error.strerror}", "", False) from None
            running.add(process)
            try:
                code = process.wait(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise CompileFailed(f"{step.name}: the compiler did not end within {LIMIT:.0f} s and was stopped", "", False) from None
            finally:
                running.discard(process)
        if code != 0 and not stopped:
            raise _failure(step, code, log.read_text(encoding="utf-8", errors="replace"), folder)
        return step.name, time.monotonic() - start

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        futures = [pool.submit(one, step) for step in steps]
        try:
            return [future.result() for future in futures]
        except BaseException:  # a failure, Ctrl-C or a signal: no compiler outlives the build
            stopped = True
            for process in list(running):
                _kill(process)
            raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _failure(step: Step, code: int, output: str, folder: Path) -> CompileFailed:
    command = " ".join(step.command)
    if code < 0 or "Killed signal" in output or "out of memory" in output.lower():
        reason = f"was killed by signal {-code}" if code < 0 else "ran out of memory"
        return CompileFailed(f"{step.name}: the compiler {reason}\n  command: {command}", output, False)
    if "No space left" in output:
        return CompileFailed(f"{step.name}: no space left on the disk of {folder}", output, False)
    lines = output.splitlines()
    first = next((line for line in lines if re.search(r"\b(fatal )?error:", line)), lines[0] if lines else f"exit code {code}")
    shown = [f"{step.name} does not compile (exit code {code})", f"  {first}"]
    found = re.match(r"([^:\s]+):(\d+)", first)
    if found and (folder / found.group(1)).is_file():
        text = (folder / found.group(1)).read_text(encoding="utf-8", errors="replace").splitlines()
        number = int(found.group(2))
        if 0 < number <= len(text):
            shown.append(f"  {number} | {text[number - 1].strip()[:200]}")
            origin = next((m.group(1) for line in text[number - 1 :: -1][:40] if (m := re.search(r"//\s*(\S+\.ya?ml:\d+)", line))), None)
            if origin:
                shown.append(f"  from {origin}")
    shown.append(f"  command: {command}")
    return CompileFailed("\n".join(shown), output, True)
