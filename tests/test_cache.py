"""What is loaded is what was built: keys, damage, and cache folders that cannot be trusted or written."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from build_support import Workshop, rendered

from gradgen import BuildError, CacheError, keys, manifest, notes, paths
from gradgen.cache import cache_entries, clean
from gradgen.runtime_files import runtime_sources
from gradgen.toolchain import find_toolchain


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zero(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3] + bytes(len(data) // 3) + data[2 * (len(data) // 3) :])


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": flip,
    "zeroed": zero,
    "empty": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("not a library\n"),
    "directory": directory,
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("which", ["toy", "gradgen_runtime"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_binary_is_built_again(
    shop: Workshop, damage: str, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = shop.built().build()
    (path,) = first.dir.glob(f"{which}_*.so")
    content = path.read_bytes()
    path.chmod(0o600)
    DAMAGE[damage](path)
    shop.notes.clear()
    second = shop.build()
    assert second.dir == first.dir
    assert path.read_bytes() == content
    assert "compiled" in shop.notes[-1]
    assert f"{path.name}" in capsys.readouterr().err
    assert shop.leftovers() == []


@pytest.mark.parametrize(
    "text", ["", "{", "true", "[]", "null", '{"format": 1}', '{"format": 2, "builds": {}}', None, b"\xff"]
)
def test_bad_manifest_is_a_miss(shop: Workshop, text: str | bytes | None) -> None:
    path = shop.built().build().dir / manifest.NAME
    wanted = path.read_text()
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    shop.build()
    assert path.read_text() == wanted


def test_manifest_of_another_key_is_a_miss(shop: Workshop) -> None:
    path = shop.built().build().dir / manifest.NAME
    data = json.loads(path.read_text())
    (build,) = data["builds"].values()
    build["key"] = build["key"][:12] + "0" * 52
    path.write_text(json.dumps(data))
    shop.notes.clear()
    shop.build()
    assert "compiled" in shop.notes[-1]


def model_key(shop: Workshop, **changes: object) -> str:
    found = dataclasses.replace(find_toolchain(), **changes)  # type: ignore[arg-type]
    return keys.model_key(rendered(), "toy", keys.runtime_key(runtime_sources(), found))


def touch(shop: Workshop) -> None:
    for path in shop.runtime.rglob("*"):
        os.utime(path, (1, 1))


def move(shop: Workshop) -> None:
    moved = shop.folder / "elsewhere"
    shutil.move(shop.runtime, moved)
    shop.runtime = moved


SAME: dict[str, Callable[[Workshop], object]] = {
    "nothing": lambda shop: None,
    "times": touch,
    "the folder": move,
    "a file that is no source": lambda shop: (shop.runtime / "src/core.cpp.orig").write_text("x"),
    "the folder of the cache": lambda shop: shop.patch.setenv("GRADGEN_CACHE", "/nowhere"),
    "variables of the environment": lambda shop: shop.patch.setenv("CPATH", "/nowhere"),
}
OTHER: dict[str, Callable[[Workshop], object]] = {
    "a header": lambda shop: (shop.runtime / "include/gradgen/fake.h").write_text(
        "#pragma once\nint runtime_value( );\n"
    ),
    "a source": lambda shop: (shop.runtime / "src/core.cpp").write_text(
        "int runtime_value() { return 41; }\n"
    ),
    "a new file": lambda shop: (shop.runtime / "src/more.cpp").write_text(""),
    "a file's name": lambda shop: (shop.runtime / "src/core.cpp").rename(shop.runtime / "src/heart.cpp"),
    "flags": lambda shop: shop.patch.setenv("GRADGEN_CXXFLAGS", "-O3"),
    "options in CXX": lambda shop: shop.patch.setenv("CXX", "g++ -DX"),
}
FIELDS = {
    "version": "g++ 99",
    "arch": "x86_64-0",
    "flags": ("-O0",),
    "python_tag": "cpython-399",
    "pybind11_version": "3.9",
    "device": "cuda",
}


@pytest.mark.parametrize("what", SAME)
def test_same_key(shop: Workshop, what: str) -> None:
    before = model_key(shop)
    SAME[what](shop)
    assert model_key(shop) == before


@pytest.mark.parametrize("what", OTHER)
def test_other_key(shop: Workshop, what: str) -> None:
    before = model_key(shop)
    OTHER[what](shop)
    assert model_key(shop) != before


@pytest.mark.parametrize("field", FIELDS)
def test_other_toolchain_is_another_key(shop: Workshop, field: str) -> None:
    assert model_key(shop) != model_key(shop, **{field: FIELDS[field]})


def test_the_path_of_the_compiler_is_not_in_the_key_and_its_version_is(shop: Workshop) -> None:
    before = model_key(shop)
    script = shop.compiler()
    assert model_key(shop) == before
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo g++ 12.2.1 || exec g++ "$@"\n')
    find_toolchain.__globals__["_find"].cache_clear()
    assert model_key(shop) != before


def test_text_and_name_of_the_model_are_in_the_key() -> None:
    files = rendered()
    others = [rendered(3), {**files, "more.h": ""}, {**files, "__init__.py": "x"}]
    made = {keys.model_key(text, "toy", "r") for text in (files, *others)}
    assert len({*made, keys.model_key(files, "tay", "r"), keys.model_key(files, "toy", "s")}) == 6


def test_text_hash_is_the_renderer_s() -> None:
    from gradgen.render import text_hash

    files = rendered()
    assert keys.text_hash(files) == text_hash(
        {name: text for name, text in files.items() if name != "__init__.py"}
    )


def test_list_and_clean(shop: Workshop) -> None:
    shop.built()
    process = shop.start("load(3); print('loaded', flush=True); sys.stdin.read(); print(load(3).value)")
    assert process.stdout is not None
    process.stdout.readline()
    kinds = [(entry.kind, entry.model, entry.in_use) for entry in cache_entries()]
    assert sorted(kinds) == [("model", "toy", False), ("model", "toy", True), ("runtime", "", False)]
    assert all(entry.bytes > 1000 and entry.to_json()["path"] for entry in cache_entries())
    cleaned = clean()
    assert [entry.in_use for entry in cleaned.kept] == [True]
    assert len(cleaned.removed) == 2 and cleaned.bytes > 2000
    process.communicate()
    assert len(clean().removed) == 1
    assert cache_entries() == ()


def test_cache_that_is_removed_is_built_again(shop: Workshop) -> None:
    """Between the check and the import."""
    result = shop.built().run(
        """
        import shutil
        import gradgen.load, gradgen.render, gradgen.resolve
        from types import SimpleNamespace
        gradgen.resolve.check = lambda spec: SimpleNamespace(name="toy")
        gradgen.render.render = lambda model: rendered(2)
        real, seen = sys.modules["gradgen.load"].import_artifact, []
        def late(artifact):
            if not seen:
                seen.append(1)
                shutil.rmtree(artifact.dir)
            return real(artifact)
        sys.modules["gradgen.load"].import_artifact = late
        print(gradgen.load("toy.yaml").value, len(seen))
        """
    )
    assert result.stdout == "42 1\n", result.stderr


def test_folders_that_are_refused(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    target = shop.folder / "target"
    target.mkdir()
    (shop.folder / "link").symlink_to(target)
    (shop.folder / "file").write_text("")
    (shop.folder / "open").mkdir()
    (shop.folder / "open").chmod(0o777)
    cases = {
        "link": "is a symbolic link",
        "file": "is not a folder",
        "open": "others can write to",
        "file/x": "cannot make",
    }
    for name, reason in cases.items():
        monkeypatch.setenv("GRADGEN_CACHE", str(shop.folder / name))
        with pytest.raises(CacheError, match=f"{reason}.*GRADGEN_CACHE"):
            paths.cache_dir()
    assert list(target.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_folder_of_another_user_is_refused(shop: Workshop) -> None:
    shop.cache.mkdir()
    os.chown(shop.cache, 12345, 12345)
    with pytest.raises(CacheError, match="belongs to user 12345.*GRADGEN_CACHE"):
        paths.cache_dir()


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRADGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache_dir() == tmp_path / "xdg" / "gradgen"
    assert paths.cache_dir().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert paths.cache_dir() == tmp_path / "home" / ".cache" / "gradgen"


def test_home_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No home, or one that cannot be written: a private folder and one warning."""
    monkeypatch.delenv("GRADGEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "file").write_text("")
    for home in (str(tmp_path / "file"), "~"):
        notes.warn_once.cache_clear()
        monkeypatch.setattr(paths.os.path, "expanduser", lambda path, home=home: home)
        for _ in range(2):
            assert paths.cache_dir() == tmp_path / f"gradgen-{os.geteuid()}"
        assert capsys.readouterr().err.count("set GRADGEN_CACHE to a folder of your own") == 1


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_user_without_an_entry(request: pytest.FixtureRequest) -> None:
    """As in containers that run with a bare user id."""
    tmp_path = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    tmp_path.chmod(0o777)
    code = "from gradgen import paths; print(paths.cache_dir())"
    environment = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    result = subprocess.run(
        ["setpriv", "--reuid", "12345", "--clear-groups", sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
    )
    if "ermission denied" in result.stderr and not result.stdout:
        pytest.skip("the interpreter cannot be read by other users")
    assert result.stdout == f"{tmp_path}/gradgen-12345\n", result.stderr
    assert result.stderr.count("\n") == 1


def test_lock_that_is_a_link_is_refused(shop: Workshop) -> None:
    key = shop.built().build().key
    clean()
    victim = shop.folder / "victim"
    (shop.cache / "locks" / f"toy_{key[:12]}").symlink_to(victim)
    with pytest.raises(CacheError, match="symbolic link"):
        shop.build()
    assert not victim.exists()


def test_file_system_without_locks(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    notes.warn_once.cache_clear()
    monkeypatch.setattr(fcntl, "flock", refuse)
    shop.build(2)
    shop.build(3)
    assert capsys.readouterr().err.count("no locks") == 1


def test_errors_of_the_disk_name_the_place(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self), None, str(target))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(BuildError, match="No space left on device; free some space"):
        shop.build()
    assert shop.leftovers() == []
    assert cache_entries() == ()
