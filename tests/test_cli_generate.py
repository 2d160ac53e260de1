"""`gradgen generate`: what it writes, what it leaves alone, and what `--check` says."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.conftest import ROOT, TINY


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def generated(cli, tiny, tmp_path):
    result = cli("generate", "tiny.yaml")
    assert result.returncode == 0, result.stderr
    return tmp_path / "generated"


def test_it_writes_a_package(cli, tiny, tmp_path):
    result = cli("generate", "tiny.yaml")
    assert (result.returncode, result.stderr) == (0, "")
    assert "created  generated/tiny/manager.h\n" in result.stdout
    assert {
        "manager.h",
        "manager.cpp",
        "module.cpp",
        "__init__.py",
        "__init__.pyi",
        "py.typed",
        "model.json",
    } <= set(os.listdir(tmp_path / "generated" / "tiny"))


def test_a_second_run_touches_nothing(cli, generated):
    before = {path: path.stat().st_mtime_ns for path in generated.rglob("*")}
    result = cli("generate", "tiny.yaml")
    assert result.returncode == 0
    assert ", 0 written" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in generated.rglob("*")} == before


def test_only_what_changed_is_written(cli, generated):
    kept = (generated / "tiny" / "module.cpp").stat().st_mtime_ns
    (generated / "tiny" / "manager.h").write_text("// gradgen, old\n")
    result = cli("generate", "tiny.yaml")
    assert "changed  generated/tiny/manager.h\n" in result.stdout
    assert ", 1 written" in result.stdout
    assert (generated / "tiny" / "module.cpp").stat().st_mtime_ns == kept


def test_check_of_what_is_current(cli, generated):
    result = cli("generate", "--check", "tiny.yaml")
    assert (result.returncode, result.stderr) == (0, "")
    assert "up to date" in result.stdout


def test_check_shows_the_difference_and_what_to_do(cli, generated):
    header = generated / "tiny" / "manager.h"
    header.write_text(header.read_text() + "// by hand\n")
    (generated / "tiny" / "module.cpp").unlink()
    before = contents(generated)
    result = cli("generate", "--check", "tiny.yaml")
    assert result.returncode == 1
    assert "--- generated/tiny/manager.h (is)" in result.stdout
    assert "\n-// by hand\n" in result.stdout
    assert "generated/tiny/manager.h: is stale" in result.stdout
    assert "generated/tiny/module.cpp: is missing" in result.stdout
    assert result.stdout.endswith("run `gradgen generate tiny.yaml`\n")
    assert contents(generated) == before


def test_check_before_anything_was_generated(cli, tiny, tmp_path):
    result = cli("generate", "--check", "tiny.yaml", "-o", "elsewhere")
    assert result.returncode == 1
    assert "run `gradgen generate tiny.yaml -o elsewhere`" in result.stdout
    assert not (tmp_path / "elsewhere").exists()


def test_foreign_files_are_refused_and_kept(cli, tiny, tmp_path):
    """Bad input 29."""
    folder = tmp_path / "generated" / "tiny"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    result = cli("generate", "tiny.yaml")
    assert result.returncode == 2
    assert "notes.txt" in result.stderr
    assert "--force" in result.stderr
    assert os.listdir(folder) == ["notes.txt"]

    assert cli("generate", "tiny.yaml", "--force").returncode == 0
    assert (folder / "notes.txt").read_text() == "mine"
    result = cli("generate", "--check", "tiny.yaml")
    assert result.returncode == 1
    assert "generated/tiny/notes.txt: is not gradgen's" in result.stdout


def test_build_products_are_not_foreign(cli, generated):
    for name in ("tiny_0123456789ab.so", "gradgen_runtime_0123456789ab.so", "build.json"):
        (generated / "tiny" / name).write_bytes(b"")
    (generated / "tiny" / "__pycache__").mkdir()
    assert cli("generate", "tiny.yaml").returncode == 0
    assert cli("generate", "--check", "tiny.yaml").returncode == 0


@pytest.mark.parametrize("link", ["generated", "generated/tiny", "generated/tiny/manager.h"])
def test_links_are_not_followed(cli, tiny, tmp_path, link):
    """Bad input 29. A link in the place of a file is replaced, never written through."""
    (tmp_path / "target").mkdir()
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    target = tmp_path / "target"
    if link.endswith(".h"):
        target = target / "precious.h"
        target.write_text("// gradgen, precious")
    (tmp_path / link).symlink_to(target)
    result = cli("generate", "tiny.yaml")
    if link.endswith(".h"):
        assert result.returncode == 0
        assert target.read_text() == "// gradgen, precious"
    else:
        assert result.returncode == 2
        assert "symbolic link" in result.stderr
        assert os.listdir(target) == []


@pytest.mark.parametrize("what", ["file", "fifo"])
def test_something_else_in_the_way(cli, tiny, tmp_path, what):
    if what == "file":
        (tmp_path / "generated").write_text("a file")
    else:
        (tmp_path / "generated" / "tiny").mkdir(parents=True)
        os.mkfifo(tmp_path / "generated" / "tiny" / "manager.h")
    result = cli("generate", "tiny.yaml", timeout=60)
    assert result.returncode == 2
    assert "generated" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_place_that_cannot_be_written(cli, tiny):
    result = cli("generate", "tiny.yaml", "-o", "/proc/nowhere")
    assert result.returncode == 2
    assert "/proc/nowhere" in result.stderr
    assert "Traceback" not in result.stderr


def test_one_wrong_spec_writes_nothing(cli, tiny, tmp_path):
    (tmp_path / "wrong.yaml").write_text(
        TINY.replace("model: tiny", "model: wrong").replace("zero: never}", "zero: nevr}", 1)
    )
    result = cli("generate", "tiny.yaml", "wrong.yaml")
    assert result.returncode == 1
    assert "wrong.yaml:14:" in result.stderr
    assert not (tmp_path / "generated").exists()


def test_two_specs_of_one_model(cli, tiny, tmp_path):
    (tmp_path / "twin.yaml").write_text(TINY)
    result = cli("generate", "tiny.yaml", "twin.yaml")
    assert result.returncode == 2
    assert "both declare the model tiny" in result.stderr
    assert not (tmp_path / "generated").exists()


def test_without_specs_it_takes_those_of_the_folder_or_those_shipped(cli, tmp_path):
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "tiny.yaml").write_text(TINY)
    assert cli("generate").returncode == 0
    assert os.listdir(tmp_path / "generated") == ["tiny"]

    shutil.rmtree(tmp_path / "specs")
    shutil.rmtree(tmp_path / "generated")
    assert cli("generate").returncode == 0
    assert contents(tmp_path / "generated") == {
        path: content
        for path, content in contents(ROOT / "generated").items()
        if path.suffix not in (".so", ".pyc", ".json") or path.name == "model.json"
    }


def test_the_same_bytes_whatever_the_hash_seed_and_the_folder(cli, tmp_path):
    results = []
    for seed in ("0", "1", "4711"):
        folder = tmp_path / seed
        folder.mkdir()
        (folder / "tiny.yaml").write_text(TINY)
        assert cli("generate", "tiny.yaml", cwd=folder, env={"PYTHONHASHSEED": seed}).returncode == 0
        results.append(contents(folder / "generated"))
    assert results[0] == results[1] == results[2]
