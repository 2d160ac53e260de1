"""A runtime and a model that compile in a fraction of a second, and processes that build and load them."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gradgen import keys, paths
from gradgen.build import ModelArtifact, build_model
from gradgen.toolchain import find_toolchain

EXTENSION = """\
#include <Python.h>
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
"""
RUNTIME = {
    "include/gradgen/fake.h": "#pragma once\nint runtime_value();\n",
    "src/core.cpp": '#include "gradgen/fake.h"\nint runtime_value() { return 40; }\n',
    "bindings/module.cpp": EXTENSION
    + """\
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, TEXT(GRADGEN_RUNTIME_MODULE), nullptr, -1};
PyMODINIT_FUNC JOIN(PyInit_, GRADGEN_RUNTIME_MODULE)() { return PyModule_Create(&definition); }
""",
}
MODULE = (
    EXTENSION
    + """\
int model_value();
static PyObject* compute(PyObject*, PyObject*) { return PyLong_FromLong(model_value()); }
static PyMethodDef methods[] = {{"compute", compute, METH_NOARGS, ""}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, TEXT(GRADGEN_MODEL_MODULE), nullptr, -1, methods};
PyMODINIT_FUNC JOIN(PyInit_, GRADGEN_MODEL_MODULE)() {
    PyObject* module = PyModule_Create(&definition);
    if (module != nullptr) PyModule_AddIntConstant(module, "value", model_value());
    return module;
}
"""
)


def rendered(value: int = 2, manager: str | None = None) -> dict[str, str]:
    """The text of a model whose module has `value` = 40 + value."""
    code = f"int model_value() {{ return runtime_value() + {value}; }}  // specs/toy.yaml:7"
    files = {
        "manager.cpp": manager or f'// by gradgen\n#include "gradgen/fake.h"\n{code}\n',
        "module.cpp": MODULE.replace("int model_value", "// by gradgen\nint model_value", 1),
        "model.json": "{}\n",
        "py.typed": "",
    }
    load = f"module = native(__file__, 'toy', {keys.text_hash(files)!r})"
    return {**files, "__init__.py": f"from gradgen.importer import native\n{load}\nvalue = module.value\n"}


_built: list[Path] = []


class Workshop:
    """A cache, a runtime and a compiler that counts, all of the test's own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.cache, self.runtime = folder / "cache", folder / "runtime"
        for name, text in RUNTIME.items():
            path = self.runtime / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setenv("GRADGEN_CACHE", str(self.cache))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(paths, "runtime_dir", lambda: self.runtime)
        self.notes: list[str] = []

    def built(self) -> Workshop:
        """This workshop with a cache that already holds `rendered(2)`: keys know no folders."""
        if not _built:
            self.build(2)
            _built.append(Path(tempfile.mkdtemp(prefix="gradgen-built-")))
            atexit.register(shutil.rmtree, _built[0], ignore_errors=True)
            shutil.copytree(self.cache, _built[0] / "cache")
        else:
            shutil.copytree(_built[0] / "cache", self.cache)
        self.notes.clear()
        return self

    def compiler(self, body: str = "") -> Path:
        """A compiler that writes its arguments to `calls`, then runs `body` when it compiles."""
        script = self.folder / "g++"
        log = self.folder / "calls"
        script.write_text(
            f'#!/bin/sh\ncase "$*" in *" -c "*) echo "$*" >> {log}\n{body}\n:;; esac\nexec g++ "$@"\n'
        )
        script.chmod(0o755)
        self.patch.setenv("CXX", str(script))
        return script

    def sleeping_compiler(self) -> None:
        """One that never ends; `sleepers()` are its process ids."""
        self.compiler(f"echo $$ >> {self.folder / 'pids'}; exec sleep 600")

    def sleepers(self) -> list[int]:
        try:
            return [int(line) for line in (self.folder / "pids").read_text().split()]
        except FileNotFoundError:
            return []

    def alive(self) -> list[int]:
        return [pid for pid in self.sleepers() if os.path.exists(f"/proc/{pid}")]

    def compiled(self) -> list[str]:
        """The files that the compiler of `compiler()` was called for, one a call."""
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return sorted(line.split(" -c ")[1].split()[0] for line in lines)

    def build(self, value: int = 2, *, files: dict[str, str] | None = None, **options: Any) -> ModelArtifact:
        text = rendered(value) if files is None else files
        return build_model(text, "toy", find_toolchain(), 2, self.notes.append, **options)

    def start(self, code: str, wrapper: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
        """A process that has this runtime, `build(value)` and `load(value)`."""
        prelude = f"""
            import sys
            from pathlib import Path
            import gradgen.paths
            gradgen.paths.runtime_dir = lambda: Path({str(self.runtime)!r})
            from gradgen.build import build_model
            from gradgen.load import import_artifact
            from gradgen.toolchain import find_toolchain
            from build_support import rendered

            def build(value=2):
                return build_model(rendered(value), "toy", find_toolchain(), 2)

            def load(value=2):
                return import_artifact(build(value))
        """
        return subprocess.Popen(
            [*wrapper, sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, wrapper: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(code, wrapper, **env)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.cache.glob(".tmp-*"))
