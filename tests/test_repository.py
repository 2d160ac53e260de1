"""The repository itself: what is committed is current, small and portable, and its wheel works elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import jinja2
import pytest

ROOT = Path(__file__).resolve().parent.parent


@cache
def tracked() -> tuple[Path, ...]:
    """Committed files, and new ones that git would add."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.split("\0") if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_generated_is_current(cli):
    result = cli("generate", "--check", cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_spec_is_generated_and_nothing_else():
    specs = {path.stem for path in (ROOT / "specs").glob("*.yaml")}
    folders = {
        path.name for path in (ROOT / "generated").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert specs == folders


def test_no_binaries():
    found = [str(path.relative_to(ROOT)) for path in tracked() if b"\0" in path.read_bytes()]
    images = [name for name in found if name.startswith("docs/") and name.endswith(".png")]
    assert sorted(found) == sorted(images)


def test_no_machine_paths_and_no_registry_hosts():
    folders = "|".join(("work", "root", "home"))
    hosts = "|".join(
        (
            "pypi" + r"\.org",
            "python" + r"hosted\.org",
            "download\\.py" + r"torch\.org",
            "conda" + r"\.anaconda",
        )
    )
    wrong = re.compile(rf"(?<![\w.~*-])/(?:{folders})/\w|(?:{hosts})")
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if wrong.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_files_stay_small():
    lengths = {
        path: path.read_text(encoding="utf-8").count("\n") for path in tracked() if path.suffix == ".py"
    }
    long = [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in lengths.items() if lines >= 400]
    assert not long, "\n".join(long)


def test_changelog_has_unreleased():
    assert "\n## Unreleased\n" in text("CHANGELOG.md")


def test_one_version():
    import gradgen

    declared = re.search(r'^version = "(.+)"$', text("pyproject.toml"), re.MULTILINE)
    assert declared is not None
    assert gradgen.__version__ == declared[1]


def test_constraints_pin_exactly():
    lines = [line for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    loose = [
        line
        for line in lines
        if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*(; python_version [<>=]+ \"3\.\d+\")?", line)
    ]
    assert not loose
    assert "torch==2.13.0" in lines


def test_constraints_pin_what_pyproject_names():
    named = set(re.findall(r'"([a-z0-9-]+)(?:\[[a-z,]+\])?[>=<]', text("pyproject.toml")))
    pinned = {line.split("==")[0] for line in text("constraints.txt").splitlines()}
    assert named - pinned == set()


def test_jinja_turns_braces_into_calls():
    """The trap that the next test looks for: C++ `a{{1, 2}}` is a Jinja expression."""
    assert jinja2.Template("int a[2]{{1, 2}};").render() == "int a[2](1, 2);"


def test_templates_print_names_only():
    """Every `{{` of a template starts with a name, so no C++ braces were taken for an expression."""
    templates = sorted((ROOT / "templates").glob("*.j2"))
    assert templates
    for path in templates:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not re.search(r"\{\{(?!-?\s*[a-z_])", line), f"{path.name}:{number}: {line}"


def test_generated_has_no_tuple_from_braces():
    for path in sorted((ROOT / "generated").rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert not re.search(r"[=\]>]\s*\(\d+(, \d+)+,?\)", line), f"{path}:{number}: {line}"


@pytest.mark.slow
def test_wheel_works_elsewhere(tmp_path):
    """Pure Python, carries its data, and works from another folder with nothing of the checkout in sight."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    subprocess.run([*pip, "wheel", *offline, "-w", str(tmp_path), str(ROOT)], check=True, env=environment)
    (wheel,) = tmp_path.glob("gradgen-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in ("templates", "specs"):
        for path in (ROOT / folder).iterdir():
            assert f"gradgen/_data/{folder}/{path.name}" in names
    assert {
        "gradgen/schema.json",
        "gradgen/explanations.yaml",
        "gradgen/runtime/include/gradgen/manager.h",
        "gradgen/py.typed",
    } <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]

    target = tmp_path / "site"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)],
        check=True,
        env=environment,
    )
    elsewhere = tmp_path / "elsewhere"
    spec = elsewhere / "specs" / "llama.yaml"
    spec.parent.mkdir(parents=True)
    spec.write_text((target / "gradgen/_data/specs/llama.yaml").read_text())
    environment["PYTHONPATH"] = str(target)
    where = (
        "import gradgen, gradgen.cli, sys; print(gradgen.__file__); sys.exit(gradgen.cli.main(sys.argv[1:]))"
    )
    for command in (["check", "specs/llama.yaml"], ["generate"], ["generate", "--check"]):
        result = subprocess.run(
            [sys.executable, "-c", where, *command],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.startswith(str(target))
    for name in ("manager.h", "manager.cpp", "module.cpp"):
        assert (elsewhere / "generated" / "llama" / name).read_bytes() == (
            ROOT / "generated" / "llama" / name
        ).read_bytes()
