"""Which names a spec may use: they become C++ members, Python attributes, folders and checkpoint keys."""

from __future__ import annotations

import keyword
import re
import sys

from gradgen.cpp_words import KEYWORDS

_ID = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_CHECKPOINT = re.compile(r"[A-Za-z0-9_.{}:/@+\-]{1,256}\Z")
# Macros that any C++ file may see. cpp.py gives its own spelling to those that only some headers define.
_MACROS = frozenset(
    [
        "linux",
        "unix",
        "i386",
        "null",
        "errno",
        "assert",
        "stdin",
        "stdout",
        "stderr",
        "offsetof",
        "alloca",
        "setjmp",
    ]
)
_PYTHON = frozenset(keyword.kwlist) | {"match", "case", "type", "self", "none"}
_EXPRESSION = frozenset(["ceil_div", "min", "max", "and", "or", "not", "true", "false"])
# Attributes of what generated code hands out: blocks are mappings by weight id.
_ATTRIBUTES = frozenset(["accumulate", "items", "keys", "values", "get", "gradgen", "std"])
# A built package of that name on the module search path would hide the real one.
_PACKAGES = frozenset(
    ["torch", "numpy", "jax", "click", "yaml", "jinja2", "jsonschema", "pybind11", "transformers", "triton"]
)


def bad_identifier(name: str) -> str:
    """What is wrong with an id, or ""."""
    if not _ID.match(name):
        return "is no id: lower-case letters, digits and _, at most 64, beginning with a letter"
    if "__" in name or name.endswith("_"):
        return "has '__' or ends in '_', which C++ and Python keep for themselves"
    if name in KEYWORDS:
        return "is a word of C++"
    if name in _MACROS:
        return "is a macro of C or C++"
    if name in _PYTHON:
        return "is a word of Python"
    if name in _ATTRIBUTES:
        return "is a name that generated code uses itself"
    return ""


def bad_quantity(name: str) -> str:
    """The same for a dim or a flag, whose name also stands in expressions."""
    if name == "i":
        return "is the index of a block in expressions"
    return "is a word of expressions" if name in _EXPRESSION else bad_identifier(name)


def bad_model_name(name: str) -> str:
    """The same for a model, whose name is that of a Python package."""
    if name in sys.stdlib_module_names or name in _PACKAGES:
        return "is the name of a Python module, which the built package would hide"
    return bad_identifier(name)


def bad_checkpoint_name(name: str, index: bool, experts: bool = False) -> str:
    """What is wrong with a checkpoint name, or "". `index`, `experts`: whether {i} and {e} may stand in it."""
    if not name:
        return "is empty"
    if len(name) > 256:
        return "is longer than 256 characters"
    if not _CHECKPOINT.match(name):
        return "may hold letters, digits and . _ - : / @ + only"
    bare = name.replace("{i}", "").replace("{e}", "")
    if "{" in bare or "}" in bare:
        return "may use braces for {i} only"
    if not index and "{i}" in name:
        return "has {i}, which only the name of a block may have"
    if not experts and "{e}" in name:
        return "has {e}, which only a weight with `experts` may have, and a part"
    for mark in ("{i}", "{e}"):
        if name.count(mark) > 1:
            return f"has {mark} more than once"
    return "has an empty part" if "" in name.split(".") else ""
