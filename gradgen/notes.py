"""Remarks on stderr that no caller asked for. Under torchrun from rank 0 only:

eight ranks would say them eight times.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import cache


def note(text: str) -> None:
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to fail
            print(text, file=sys.stderr, flush=True)


@cache
def warn_once(text: str) -> None:
    note(f"gradgen: warning: {text}")
