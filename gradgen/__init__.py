"""gradgen: a compiler from YAML model specs to native gradient managers for distributed training.

Functions are imported on first use: a built module needs neither yaml, jinja2, jsonschema nor torch, and
imports in milliseconds.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from gradgen.diagnostics import (
    BuildError,
    CacheError,
    CommError,
    CommTimeout,
    ConfigError,
    Diagnostic,
    Error,
    MismatchError,
    NonFiniteError,
    PeerLost,
    SpecError,
    StateError,
    UsageError,
)

__version__ = "0.1.0"
__all__ = [
    "BuildError",
    "CacheError",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "Diagnostic",
    "Error",
    "MismatchError",
    "NonFiniteError",
    "PeerLost",
    "SpecError",
    "StateError",
    "UsageError",
    "build",
    "check",
    "comm",
    "generate",
    "infer",
    "load",
    "plan",
]

_FUNCTIONS = {
    "build": "gradgen.package",
    "check": "gradgen.resolve",
    "generate": "gradgen.generate",
    "infer": "gradgen.infer",
    "load": "gradgen.load",
    "plan": "gradgen.plan",
}


def __getattr__(name: str) -> Any:
    if name == "comm":
        return import_module("gradgen.comm")
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'gradgen' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_FUNCTIONS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing the module gradgen.plan must not replace the function gradgen.plan by the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _FUNCTIONS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
