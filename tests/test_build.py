"""Compiling: once, whoever asks; and what happens when a compiler, a process or a disk fails."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from build_support import Workshop, rendered

from gradgen import BuildError, compilers, lock, toolchain
from gradgen.cache import Entry
from gradgen.manifest import file_hash
from gradgen.toolchain import ToolchainMissing, find_toolchain


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_line_a_module(shop: Workshop) -> None:
    shop.build()
    shop.build()
    runtime, compiled, cached = shop.notes
    assert runtime.startswith("gradgen: runtime ")
    assert "bindings.cpp" in runtime and "core.cpp" in runtime
    assert compiled.split(" cpu: ")[1].startswith("manager.cpp ")
    assert ", module.cpp " in compiled and "(compiled, " in compiled
    assert cached.endswith(" ms)") and "(cached, " in cached


def test_load(shop: Workshop) -> None:
    result = shop.run("a = load(); print(a.value, load() is a)")
    assert result.stdout == "42 True\n", result.stderr


def test_two_versions_in_one_process(shop: Workshop) -> None:
    result = shop.built().run("a, b = load(2), load(3); print(a.value, b.value, a.value)")
    assert result.stdout == "42 43 42\n", result.stderr


def test_eight_processes_compile_once(shop: Workshop) -> None:
    shop.compiler("sleep 0.3")
    start = time.time() + 1
    processes = [
        shop.start(f"import time; time.sleep(max(0, {start} - time.time())); print(load().value)")
        for _ in range(8)
    ]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["42\n"] * 8
    assert shop.compiled() == ["bindings.cpp", "core.cpp", "manager.cpp", "module.cpp"]
    assert shop.leftovers() == []


def test_notes_come_from_rank_0(shop: Workshop) -> None:
    assert shop.built().run("load(3)", RANK="3").stderr == ""
    assert "(cached, " in shop.run("load()", RANK="0").stderr


def test_killed_builder_hinders_nobody(shop: Workshop) -> None:
    shop.sleeping_compiler()
    process = shop.start("build()")
    wait_for(lambda: len(shop.sleepers()) == 2)
    process.kill()
    process.communicate()
    for sleeper in shop.sleepers():
        os.kill(sleeper, signal.SIGKILL)  # nobody else is left to end them
    assert shop.leftovers()
    shop.compiler()
    started = time.monotonic()
    shop.build()
    assert time.monotonic() - started < 25
    assert shop.leftovers() == []


def test_waiter_says_for_whom_and_has_a_deadline(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that a dead builder forked keeps its lock; the waiter builds by itself."""
    monkeypatch.setattr(lock, "TELL", 0.1)
    monkeypatch.setattr(lock, "DEADLINE", 0.3)
    entry = Entry(shop.cache, "toy", shop.built().build().key)
    shutil.rmtree(entry.path)
    holder = shop.start(
        f"""
        import os, time
        from gradgen.lock import locked
        with locked(Path({str(entry.lock)!r}), lambda: False, print):
            child = os.fork()
            if child == 0:
                os.close(1)
                os.close(2)
                time.sleep(60)
            print(child, flush=True)
            os._exit(0)
        """
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    holder.wait()
    shop.notes.clear()
    assert shop.build().dir == entry.path
    os.kill(child, signal.SIGKILL)
    assert f"waiting 0 s for pid {holder.pid}, which is building it" in shop.notes[0]
    assert any("building it here" in text for text in shop.notes)


def test_compile_error_leads_to_the_spec(shop: Workshop) -> None:
    shop.compiler()
    code = "int model_value() { return wrong; }  // specs/toy.yaml:31"
    files = rendered(manager=f'// by gradgen\n#include "gradgen/fake.h"\n{code}\n')
    with pytest.raises(BuildError) as caught:
        shop.build(files=files)
    message = str(caught.value)
    assert "manager.cpp:3:" in message and "'wrong' was not declared" in message
    assert "int model_value() { return wrong; }" in message
    assert "from specs/toy.yaml:31" in message
    assert "command: " in message
    (kept,) = (shop.cache / "failed").iterdir()
    assert str(kept) in message
    assert (kept / "manager.cpp").read_text() == files["manager.cpp"]
    assert "'wrong' was not declared" in (kept / "log.txt").read_text()
    assert "(failed, " in shop.notes[-1] and str(kept) in shop.notes[-1]
    assert shop.leftovers() == []

    calls = len(shop.compiled())
    with pytest.raises(BuildError, match="it failed before"):
        shop.build(files=files)
    assert len(shop.compiled()) == calls, "a lasting failure is remembered"
    with pytest.raises(BuildError):
        shop.build(files=files, retry=True)
    assert len(shop.compiled()) > calls


def test_error_in_a_header_leads_to_the_line_that_uses_it(shop: Workshop) -> None:
    header = shop.runtime / "include/gradgen/fake.h"
    header.write_text(
        "#pragma once\nint runtime_value();\ntemplate <class T> int twice(T x) { return x->y; }\n"
    )
    code = "int model_value() { return twice(1); }  // specs/toy.yaml:12"
    with pytest.raises(BuildError) as caught:
        shop.build(files=rendered(manager=f'// by gradgen\n#include "gradgen/fake.h"\n{code}\n'))
    assert "include/gradgen/fake.h:3:" in str(caught.value)
    assert "manager.cpp:3: int model_value() { return twice(1); }" in str(caught.value)
    assert "from specs/toy.yaml:12" in str(caught.value)


def test_a_killed_compiler_is_not_remembered(shop: Workshop) -> None:
    shop.compiler('case "$*" in *manager.cpp*) kill -9 $$;; esac')
    with pytest.raises(BuildError, match="SIGKILL.*try fewer at a time: -j 1"):
        shop.build()
    killed = "g++: fatal error: Killed signal terminated program cc1plus"
    body = f'case "$*" in *manager.cpp*) echo "{killed}"; exit 1;; esac'
    shop.compiler(body)
    with pytest.raises(BuildError, match="killed, or out of memory"):
        shop.build()
    shop.compiler()
    shop.build()
    assert not list((shop.cache / "failed").iterdir())


def test_a_hanging_compiler_is_ended(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "LIMIT", 0.5)
    shop.sleeping_compiler()
    with pytest.raises(BuildError, match="stopped after"):
        shop.build()
    assert shop.sleepers() and not shop.alive()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(shop: Workshop, number: signal.Signals, code: int) -> None:
    shop.sleeping_compiler()
    process = shop.start(
        """
        try:
            build()
        except KeyboardInterrupt:
            sys.exit(130)
        """
    )
    wait_for(shop.sleepers)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == code
    assert shop.leftovers() == []
    wait_for(lambda: not shop.alive(), 5)
    shop.compiler()
    shop.build()


def test_full_disk(shop: Workshop) -> None:
    """On a file system of 64 KiB: an error that names the disk, and nothing left on it."""
    small = str(shop.folder / "small")
    script = f"""
        import subprocess, os
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", {small!r}]
        mounted = subprocess.run(mount)
        if mounted.returncode: sys.exit(77)
        from gradgen import BuildError
        try:
            build()
        except BuildError as error:
            print(error)
            print(os.listdir({small!r}))
    """
    (shop.folder / "small").mkdir()
    result = shop.run(script, wrapper=("unshare", "-m"), GRADGEN_CACHE=small)
    if result.returncode == 77 or result.stderr.startswith("unshare:"):
        pytest.skip("may not mount a file system")
    message, left = result.stdout.rsplit("\n", 2)[:2]
    assert "no space left" in message.lower() and small in message
    assert ".tmp" not in left and "models" not in left


def test_same_bytes_in_every_folder(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shop.build()
    monkeypatch.setenv("GRADGEN_CACHE", str(shop.folder / "another place"))
    second = shop.build()
    assert first.dir != second.dir and first.key == second.key
    assert first.build == second.build
    for name, digest in second.build.files.items():
        content = (second.dir / name).read_bytes()
        assert file_hash(first.dir / name) == digest
        assert str(shop.folder).encode() not in content and b"/site-packages/" not in content


def test_compilers_that_cannot_be_used(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainMissing, match="no-such-compiler: not found.*apt install g"):
        find_toolchain()
    monkeypatch.setenv("CXX", "/bin/true")
    with pytest.raises(ToolchainMissing, match="/bin/true: neither GCC nor Clang"):
        find_toolchain()
    old = shop.folder / "old-g++"
    old.write_text("#!/bin/sh\necho '#define __GNUC__ 9'\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(ToolchainMissing, match="GCC 9 is too old, 12 is needed"):
        find_toolchain()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(shop.folder))
    with pytest.raises(
        ToolchainMissing, match=r"no C\+\+ compiler \(g\+\+: not found; clang\+\+: not found\)"
    ):
        find_toolchain()
    assert ToolchainMissing.missing


def test_headers_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ToolchainMissing, match="Python.h.*python3-dev"):
        toolchain._python_include()
    monkeypatch.setitem(__import__("sys").modules, "pybind11", None)
    with pytest.raises(ToolchainMissing, match="pip install 'pybind11"):
        toolchain._pybind11()
