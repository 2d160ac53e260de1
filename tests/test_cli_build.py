"""`gradgen build`: what it compiles, what it says, and how it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.test_cli import terminal


@pytest.fixture
def failing_compiler(tmp_path):
    """A compiler that knows its version and compiles nothing."""
    script = tmp_path / "c++"
    real = shutil.which("g++") or shutil.which("clang++")
    script.write_text(
        f"""#!/bin/sh
case "$*" in
*.cpp*) echo "fatal: no luck today" >&2; exit 1 ;;
*) exec {real} "$@" ;;
esac
"""
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_build_and_import(cli, tiny, tmp_path):
    first = cli("build", "tiny.yaml", "--device", "cpu", "-j", "2", timeout=600)
    assert first.returncode == 0, first.stderr
    assert "generated/tiny" in first.stdout
    imported = subprocess.run(
        [sys.executable, "-c", "from generated import tiny; tiny.GradientManager"], cwd=tmp_path
    )
    assert imported.returncode == 0

    before = {
        path.name: path.read_bytes() for path in (tmp_path / "generated" / "tiny").iterdir() if path.is_file()
    }
    again = cli("build", "tiny.yaml", "--device", "cpu")
    assert again.returncode == 0, again.stderr
    assert "cached" in again.stdout + again.stderr
    assert {n: (tmp_path / "generated" / "tiny" / n).read_bytes() for n in before} == before
    assert cli("generate", "--check", "tiny.yaml").returncode == 0
    assert cli("generate", "tiny.yaml").returncode == 0


@pytest.mark.slow
def test_a_terminal_sees_no_escapes_in_what_is_left(cli, tiny, tmp_path):
    """The spinner wipes itself; with NO_COLOR no colour is left either."""
    shown = terminal(tmp_path, ["build", "tiny.yaml", "--device", "cpu"], NO_COLOR="1")
    assert "\x1b[3" not in shown
    assert "generated/tiny" in shown


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_no_compiler(cli, tiny, compiler):
    result = cli("build", "tiny.yaml", "--device", "cpu", env={"CXX": compiler})
    assert result.returncode == 3
    assert compiler in result.stderr
    assert "Traceback" not in result.stderr


def test_no_compiler_at_all(cli, tiny, tmp_path):
    (tmp_path / "bin").mkdir()
    result = cli("build", "tiny.yaml", "--device", "cpu", env={"PATH": str(tmp_path / "bin"), "CXX": ""})
    assert result.returncode == 3
    assert "g++" in result.stderr


def test_a_compiler_that_fails(cli, tiny, tmp_path, failing_compiler):
    env = {"CXX": failing_compiler, "GRADGEN_CACHE": str(tmp_path / "cache")}
    result = cli("build", "tiny.yaml", "--device", "cpu", env=env)
    assert result.returncode == 1
    assert "no luck today" in result.stderr
    assert "Traceback" not in result.stderr


def test_foreign_files_are_refused(cli, tiny, tmp_path):
    folder = tmp_path / "generated" / "tiny"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    result = cli("build", "tiny.yaml", "--device", "cpu")
    assert result.returncode == 2
    assert "notes.txt" in result.stderr
    assert os.listdir(folder) == ["notes.txt"]


def test_cache(cli, tmp_path):
    cache = tmp_path / "cache"
    env = {"GRADGEN_CACHE": str(cache)}
    assert cli("cache", "dir", env=env).stdout == f"{cache}\n"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert cli("cache", "list", env=env).stdout == "the cache is empty\n"
    entry = cache / "failed" / "tiny_0123456789abcdef"
    entry.mkdir(parents=True)
    (entry / "log.txt").write_text("x" * 2000)
    (shown,) = json.loads(cli("cache", "list", "--json", env=env).stdout)
    assert (shown["kind"], shown["name"], shown["in_use"]) == ("failed", "tiny_0123456789abcdef", False)
    assert "tiny_0123456789abcdef" in cli("cache", "list", env=env).stdout
    cleaned = cli("cache", "clean", env=env)
    assert cleaned.returncode == 0, cleaned.stderr
    assert cleaned.stdout.startswith("removed 1 entry, 2.0 KiB")
    assert not entry.exists()


def test_a_cache_that_others_can_write_is_refused(cli, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    result = cli("cache", "list", env={"GRADGEN_CACHE": str(cache)})
    assert result.returncode != 0
    assert "chmod 700" in result.stderr
    assert "Traceback" not in result.stderr
