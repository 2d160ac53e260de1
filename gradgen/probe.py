"""Asks programs about themselves, and says which of them are missing."""

from __future__ import annotations

import os
import subprocess

from gradgen.diagnostics import BuildError


class ToolchainMissing(BuildError):
    """There is no compiler or GPU, or it lacks what it needs.

    `missing` is what makes the command line exit with 3.
    """

    missing = True


class Unfit(Exception):
    """Why a program cannot be used."""


def output(command: tuple[str, ...], errors: bool = False) -> str:
    """What a program prints, with its stderr if `errors`. Raises Unfit."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=60,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise Unfit("does not answer") from None
    except OSError as error:
        raise Unfit(error.strerror or str(error)) from error
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).split("\n") if line.strip()]
        raise Unfit(said[0].strip() if said else f"ends with {done.returncode}")
    return done.stdout
