"""`gradgen build`: what lands in a package's folder, what is refused, and what an import says of a binary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from build_support import Workshop, rendered

from gradgen import UsageError, manifest
from gradgen.package import Package, build_package
from gradgen.toolchain import find_toolchain, python_tag


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch).built()


def pack(shop: Workshop, value: int = 2, force: bool = False) -> Package:
    toolchain = find_toolchain()
    return build_package(
        rendered(value), "toy", shop.folder / "out", toolchain, jobs=2, force=force, log=shop.notes.append
    )


def loaded(shop: Workshop, code: str = "import toy; print(toy.value)") -> str:
    """What an import prints, or the end of its traceback."""
    result = shop.run(f"sys.path.insert(0, {str(shop.folder / 'out')!r})\n{code}")
    return result.stdout.strip() or result.stderr.strip().split("\n")[-1]


def test_package(shop: Workshop) -> None:
    package = pack(shop)
    names = {path.name for path in package.dir.iterdir()}
    build = manifest.read(package.dir)[python_tag()]
    assert names == {*rendered(), *build.files, "build.json"}
    assert set(package.written) == names
    assert loaded(shop) == "42"
    assert loaded(shop, "sys.path[0] += '/..'; from out import toy; print(toy.value)") == "42"


def test_unchanged_files_are_not_written(shop: Workshop) -> None:
    folder = pack(shop).dir
    before = {path.name: path.stat() for path in folder.iterdir()}
    assert pack(shop).written == ()
    after = {path.name: path.stat() for path in folder.iterdir()}
    assert {name: (s.st_ino, s.st_mtime_ns) for name, s in before.items()} == {
        name: (s.st_ino, s.st_mtime_ns) for name, s in after.items()
    }


def test_old_binaries_go_and_those_of_other_pythons_stay(shop: Workshop) -> None:
    folder = pack(shop, 2).dir
    (old,) = folder.glob("toy_*.so")
    data = json.loads((folder / "build.json").read_text())
    other = {**data["builds"][python_tag()], "python": "cpython-399", "key": "f" * 64}
    other["files"] = {
        f"toy_{'f' * 12}.so": "0" * 64,
        **{name: h for name, h in other["files"].items() if "runtime" in name},
    }
    data["builds"]["cpython-399"] = other
    (folder / "build.json").write_text(json.dumps(data))
    (folder / f"toy_{'f' * 12}.so").write_text("")
    pack(shop, 3)
    assert not old.exists()
    assert (folder / f"toy_{'f' * 12}.so").exists()
    assert set(manifest.read(folder)) == {python_tag(), "cpython-399"}
    assert loaded(shop) == "43"


def test_running_process_keeps_its_binary(shop: Workshop) -> None:
    """Rebuilding renames; writing in place would end the process with SIGBUS."""
    pack(shop, 2)
    code = "import toy; print('ready', flush=True); sys.stdin.read(); print(toy.module.compute())"
    process = shop.start(f"sys.path.insert(0, {str(shop.folder / 'out')!r})\n{code}")
    assert process.stdout is not None
    process.stdout.readline()
    pack(shop, 3)
    out, err = process.communicate()
    assert (out, process.returncode) == ("42\n", 0), err


def test_foreign_files_are_refused(shop: Workshop) -> None:
    folder = shop.folder / "out" / "toy"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"did not write \(notes.txt\).*--force"):
        pack(shop)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    pack(shop, force=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert loaded(shop) == "42"


def test_own_file_with_a_name_of_ours_is_refused(shop: Workshop) -> None:
    folder = shop.folder / "out" / "toy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("mine = 1\n")
    with pytest.raises(UsageError, match="__init__.py"):
        pack(shop)
    assert (folder / "__init__.py").read_text() == "mine = 1\n"


@pytest.mark.parametrize("link", ["out", "out/toy"])
def test_links_and_files_are_refused(shop: Workshop, link: str) -> None:
    (shop.folder / "target").mkdir()
    path = shop.folder / link
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(shop.folder / "target")
    with pytest.raises(UsageError, match="symbolic link"):
        pack(shop)
    path.unlink()
    path.write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        pack(shop)
    assert list((shop.folder / "target").iterdir()) == []


def test_binaries_that_do_not_fit(shop: Workshop) -> None:
    folder = pack(shop).dir
    again = f"build it again: gradgen build toy.yaml -o {folder.parent}"
    for name, text in rendered(3).items():
        (folder / name).write_text(text)
    assert loaded(shop).endswith(f"is stale: its text has changed since it was built; {again}")
    assert loaded(shop, "try:\n import toy\nexcept ImportError: print('caught')") == "caught"

    pack(shop, 3)
    data = json.loads((folder / "build.json").read_text())
    data["builds"] = {"cpython-399": data["builds"][python_tag()]}
    (folder / "build.json").write_text(json.dumps(data))
    assert f"is built for cpython-399, and this is {python_tag()}; {again}" in loaded(shop)
    (folder / "build.json").unlink()
    assert loaded(shop).endswith(f"is not built; {again}")
    (folder / "build.json").write_text("{")
    assert "is not a manifest" in loaded(shop)

    pack(shop, 3)
    (binary,) = folder.glob("toy_*.so")
    content = binary.read_bytes()
    binary.unlink()
    assert loaded(shop).endswith(f"{binary.name} is missing; {again}")
    binary.write_bytes(content[: len(content) // 2])
    assert loaded(shop).endswith(f"{binary.name} is damaged; {again}")
    assert pack(shop, 3).written == (binary.name,)
    assert loaded(shop) == "43"

    (shop.runtime / "src/core.cpp").write_text("int runtime_value() { return 50; }\n")
    assert loaded(shop).endswith(f"was built by a gradgen with another runtime; {again}")
    pack(shop, 3)
    assert loaded(shop) == "53"


def test_one_runtime_a_process(shop: Workshop) -> None:
    pack(shop)
    result = shop.run(
        f"""
        load(7)
        (gradgen.paths.runtime_dir() / "src/more.cpp").write_text("")
        sys.path.insert(0, {str(shop.folder / "out")!r})
        build()
        import toy
        """
    )
    assert "was built by a gradgen with another runtime" in result.stderr
    result = shop.run('load(7)\n(gradgen.paths.runtime_dir() / "src/more.cpp").write_text("int x;")\nload(7)')
    assert "this process already uses another one" in result.stderr


def test_importing_needs_nothing_heavy(shop: Workshop) -> None:
    pack(shop)
    names = ("torch", "jinja2", "yaml", "jsonschema", "click", "pybind11", "inspect")
    heavy = f"[name for name in {names} if name in sys.modules]"
    environment = {**os.environ, "PYTHONPATH": str(shop.folder / "out")}
    code = f"""
import sys
from pathlib import Path
import gradgen.paths
gradgen.paths.runtime_dir = lambda: Path({str(shop.runtime)!r})
import toy
print({heavy}, toy.value)
"""
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout == "[] 42\n", result.stderr


def test_functions_are_not_replaced_by_the_modules_of_their_names() -> None:
    code = """
import gradgen, gradgen.build, gradgen.load, gradgen.plan
from gradgen.build import build_model
print(*(callable(f) for f in (gradgen.build, gradgen.load, gradgen.plan, gradgen.check, gradgen.generate)))
print(gradgen.SpecError is __import__("gradgen.diagnostics").diagnostics.SpecError, gradgen.comm.__name__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "True True True True True\nTrue gradgen.comm\n", result.stderr
