"""The command line as its users meet it: a process with streams, an exit code and an environment."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import gradgen
from tests.conftest import TINY

READERS = (
    ["check", "tiny.yaml"],
    ["plan", "tiny.yaml", "--preset", "small"],
    ["explain", "unknown-key"],
    ["cache", "list"],
)


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(
        TINY.replace("zero: never}\nblocks", "zero: never, shap: 1}\nblocks").replace(
            "count: layers", "count: layer"
        )
    )
    return path


def test_version(cli):
    result = cli("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"gradgen {gradgen.__version__}\n", "")


@pytest.mark.parametrize(
    "command", [[], ["check"], ["generate"], ["build"], ["plan"], ["schema"], ["explain"], ["cache"]]
)
def test_help_everywhere(cli, command):
    result = cli(*command, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: gradgen")
    assert result.stderr == ""


def test_check_of_a_clean_spec(cli, tiny):
    result = cli("check", "tiny.yaml")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("tiny.yaml: ok")


def test_check_shows_all_findings_of_all_specs(cli, tiny, wrong):
    result = cli("check", "wrong.yaml", "tiny.yaml")
    assert result.returncode == 1
    assert "wrong.yaml:14:69:" in result.stdout
    assert "unknown key 'shap'" in result.stdout
    assert "[unknown-key]" in result.stdout
    assert "tiny.yaml: ok" in result.stdout
    assert result.stderr == ""


def test_check_as_json(cli, tiny, wrong):
    result = cli("check", "wrong.yaml", "tiny.yaml", "--json")
    assert result.returncode == 1
    first, second = json.loads(result.stdout)["specs"]
    assert (first["file"], first["ok"], second["file"], second["ok"]) == (
        "wrong.yaml",
        False,
        "tiny.yaml",
        True,
    )
    finding = first["findings"][0]
    assert finding["line"] == 14
    assert finding["code"] == "unknown-key"


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_readers_answer_on_stdout_and_in_json(cli, tiny, arguments):
    plain, data = cli(*arguments), cli(*arguments, "--json")
    assert (plain.returncode, data.returncode) == (0, 0), plain.stderr + data.stderr
    assert (plain.stderr, data.stderr) == ("", "")
    json.loads(data.stdout)


def test_plan_options(cli, tiny):
    options = ["--set", "hidden=32", "--set", "layers=3", "--set", "bias=true", "--dp", "4", "--ga", "2"]
    result = cli("plan", tiny, *options, "--dtype", "bfloat16", "--strategy", "sharded", "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["values"] == {"hidden": 32, "layers": 3, "ffn": 128, "bias": True}
    assert (data["settings"]["dp"], data["settings"]["ga"], data["settings"]["dtype"]) == (4, 2, "bfloat16")
    assert [strategy["id"] for strategy in data["strategies"]] == ["sharded"]


def test_plan_says_which_ranks_it_is_for(cli, tiny):
    """Receive staging is needed between hosts only, so the default plans for the most memory, and says so."""
    options = ["plan", tiny, "--preset", "small", "--dp", "2"]
    assert "--transport shared" in cli(*options).stderr
    for more in (["--transport", "group"], ["--transport", "shared"], ["--json"]):
        assert cli(*options, *more).stderr == ""


def test_plan_of_one_block(cli, tiny):
    plain = cli("plan", tiny, "--preset", "small", "--block", "layer")
    assert plain.returncode == 0, plain.stderr
    assert "norm" in plain.stdout
    assert "embedding" not in plain.stdout
    data = json.loads(cli("plan", tiny, "--preset", "small", "--block", "layer", "--json").stdout)
    assert (data["id"], data["count"]) == ("layer", 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "hidden"], "dim=integer"),
        (["--set", "hidden=1e3"], "dim=integer"),
        (["--set", "hidden=" + "9" * 5000], "dim=integer"),
        (["--set", "hidden=1", "--set", "hidden=2"], "hidden is set twice"),
        (["--preset", "huge"], "small"),
        (["--preset", "small", "--set", "hiden=1"], "hidden"),
        (["--preset", "small", "--dp", "0"], "--dp"),
        (["--preset", "small", "--ga", "-1"], "--ga"),
        (["--preset", "small", "--dtype", "int8"], "bfloat16"),
        (["--preset", "small", "--strategy", "none"], "unsharded"),
        (["--preset", "small", "--block", "none"], "layer"),
        ([], "presets: small"),
        (["--set", "hidden=4"], "layers"),
    ],
)
def test_plan_refuses(cli, tiny, arguments, said):
    result = cli("plan", tiny, *arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check"], "SPEC"),
        (["check", "tiny.yaml", "--unknown"], "--unknown"),
        (["build", "tiny.yaml", "--jobs", "0"], "--jobs"),
        (["build", "tiny.yaml", "-j", "0"], "-j"),
        (["build", "tiny.yaml", "--device", "tpu"], "cuda"),
        (["build", "tiny.yaml", "--device", "cuda", "--arch", "sm_1"], "--arch"),
        (["chek", "tiny.yaml"], "chek"),
        (["explain", "no-such-code"], "no-such-code"),
        (["check", "-"], "standard input"),
        (["cache", "burn"], "burn"),
    ],
)
def test_wrong_usage(cli, tiny, arguments, said):
    result = cli(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.fixture
def unreadable(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")


NO_SPECS = ["missing.yaml", "folder.yaml", "fifo.yaml", "loop.yaml", "/dev/zero", "a" * 300, ""]


@pytest.mark.parametrize(
    ("command", "spec"),
    [*(("check", spec) for spec in NO_SPECS), *((c, "fifo.yaml") for c in ("plan", "generate", "build"))],
)
def test_what_is_no_spec(cli, unreadable, command, spec):
    """Bad input 27: exit 2 with the path and the reason, at once."""
    result = cli(command, spec, timeout=60)
    assert result.returncode == 2
    assert spec in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_missing_spec_does_not_hide_the_findings_of_others(cli, tiny, wrong):
    result = cli("check", "missing.yaml", "wrong.yaml", "tiny.yaml")
    assert result.returncode == 2
    assert "missing.yaml" in result.stderr
    assert "[unknown-key]" in result.stdout
    assert "tiny.yaml: ok" in result.stdout


def test_findings_of_other_commands_go_to_stderr(cli, wrong):
    for command in (["plan", wrong, "--set", "hidden=1"], ["generate", wrong], ["build", wrong]):
        result = cli(*command)
        assert (result.returncode, result.stdout) == (1, "")
        assert "[unknown-key]" in result.stderr


def terminal(tmp_path: Path, arguments: list[str], **env: str) -> str:
    """What a command writes to stdout when that is a terminal."""
    ours, theirs = pty.openpty()
    clean = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"} | env
    process = subprocess.Popen(
        [sys.executable, "-m", "gradgen", *arguments], stdout=theirs, stderr=theirs, cwd=tmp_path, env=clean
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:  # Linux says EIO when the last writer is gone
        pass
    finally:
        os.close(ours)
        process.wait(60)
    return written.decode()


def test_colour_on_a_terminal_only(cli, tmp_path, wrong):
    assert "\x1b[" in terminal(tmp_path, ["check", "wrong.yaml"])
    assert "\x1b[" not in cli("check", "wrong.yaml").stdout
    assert "\x1b[" not in terminal(tmp_path, ["check", "wrong.yaml"], NO_COLOR="1")
    assert "\x1b[" not in terminal(tmp_path, ["check", "wrong.yaml"], TERM="dumb")


def test_a_caret_on_a_terminal(tmp_path, wrong):
    shown = terminal(tmp_path, ["check", "wrong.yaml"], NO_COLOR="1")
    assert "shap: 1" in shown
    assert "^" in shown


@pytest.mark.parametrize(
    "arguments", [*READERS, ["schema"], ["--help"], ["check", "wrong.yaml"]], ids=" ".join
)
def test_a_reader_that_leaves(tmp_path, tiny, wrong, arguments):
    """Bad input 30: `gradgen ... | head` gives no traceback. The reader is gone before the first write."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "gradgen", *arguments]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, text=True)
    os.close(writing)
    assert result.stderr == ""
    assert result.returncode == (1 if "wrong.yaml" in arguments else 0)


@pytest.mark.parametrize("arguments", [*READERS, ["schema"], ["--help"]], ids=" ".join)
def test_a_closed_stdout(tmp_path, tiny, arguments):
    line = f'"{sys.executable}" -m gradgen {" ".join(arguments)} >&-'
    result = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, cwd=tmp_path, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said(tmp_path, tiny):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gradgen", "check", "tiny.yaml"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, text=True)
    assert result.returncode == 2
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
    ],
    ids=str,
)
def test_an_ascii_locale(cli, tmp_path, env):
    """Bad input 30: text that the locale cannot spell is escaped, not a UnicodeEncodeError."""
    (tmp_path / "grün.yaml").write_text(TINY.replace("The smallest model", "Größe → alles"), encoding="utf-8")
    (tmp_path / "rot.yaml").write_text(TINY.replace("count: layers", "count: größe"), encoding="utf-8")
    assert cli("check", "grün.yaml", env=env).returncode == 0
    assert cli("plan", "grün.yaml", "--preset", "small", env=env).returncode == 0
    result = cli("check", "rot.yaml", env=env)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


def test_an_internal_error_is_said_and_kept(tmp_path, tiny):
    """Bad input 31."""
    code = """
import sys, gradgen.cli, gradgen.resolve
def broken(path): raise ZeroDivisionError("by nought")
gradgen.resolve.check = broken
sys.exit(gradgen.cli.main(["check", "tiny.yaml"]))
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert result.returncode == 70
    assert "internal error, please report: ZeroDivisionError: by nought" in result.stderr
    assert "Traceback" not in result.stderr
    (log,) = tmp_path.glob("gradgen-error-*.log")
    assert str(log) in result.stderr
    assert "Traceback" in log.read_text()


def test_errors_name_the_rank(cli):
    assert cli("plan", "missing.yaml", env={"RANK": "3"}).stderr.startswith("[rank 3] error: ")


def test_nothing_heavy_is_imported(cli, tiny):
    """`--version` and `plan` start fast because of what they leave alone."""
    code = """
import sys, gradgen.cli
gradgen.cli.main(sys.argv[1:])
heavy = {"torch", "numpy", "jinja2", "yaml", "jsonschema", "rich"}
print(*sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    for arguments, allowed in (
        (["--version"], set()),
        (["plan", str(tiny), "--preset", "small"], {"yaml", "jsonschema"}),
    ):
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert set(result.stderr.split()) <= allowed
