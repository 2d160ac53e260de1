"""`generate`: check specs, render them, and bring an output folder up to date, or say how it differs.

Nothing is written before every spec is clean. A file is written only if its text changes, aside and renamed,
so that a reader never sees half of it. Nothing is deleted. A folder that holds other files is refused.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradgen.diagnostics import Diagnostic, SpecError, UsageError
from gradgen.model import Model
from gradgen.package import ASIDE, BINARY, refuse_foreign

BUILT = ("build.json", "__pycache__")  # beside the text after a build, with the binaries


@dataclass(frozen=True)
class GeneratedFile:
    path: str
    state: str  # unchanged | created | changed | foreign (there, and not gradgen's)
    diff: str = (
        ""  # unified, from what is there to what should be; only where the state is changed or created
    )


@dataclass(frozen=True)
class Generated:
    """What `generate` did, or with `check` would do."""

    out: str
    check: bool
    files: tuple[GeneratedFile, ...]

    @property
    def stale(self) -> tuple[GeneratedFile, ...]:
        return tuple(file for file in self.files if file.state != "unchanged")


def generate(
    specs: str | Path | Sequence[str | Path],
    out: str | Path = "generated",
    *,
    check: bool = False,
    force: bool = False,
) -> Generated:
    """Renders `specs` (one or several) into `<out>/<model>/`; with `check` writes nothing.

    `force` writes into a folder with other files, or one that is a symbolic link. Raises SpecError with the
    findings of all specs, and UsageError for a file that cannot be read or written.
    """
    models = check_specs([specs] if isinstance(specs, str | Path) else specs)
    texts = {model.name: _render(model) for model in models}
    root = Path(out)
    for name, files in texts.items():
        for path in files:
            _is_file(root / name / path)
    if not check and not force:
        for name, files in texts.items():
            refuse_foreign(root / name, name, files)
    found = [_update(root / name / path, text, check) for name in texts for path, text in texts[name].items()]
    if check:
        found += [file for name, files in texts.items() for file in _foreign(root / name, files)]
    return Generated(str(out), check, tuple(sorted(found, key=lambda file: file.path)))


def check_specs(specs: Sequence[str | Path]) -> tuple[Model, ...]:
    """The models of `specs`. Raises one error with the findings of all of them."""
    from gradgen.resolve import check

    models: dict[str, Model] = {}
    findings: list[Diagnostic] = []
    for spec in specs:
        try:
            model = check(spec)
        except SpecError as error:
            findings.extend(error.diagnostics)
            continue
        if model.name in models:
            raise UsageError(f"{spec} and {models[model.name].file} both declare the model {model.name}")
        models[model.name] = model
    if findings:
        raise SpecError(tuple(findings))
    return tuple(models.values())


def _render(model: Model) -> dict[str, str]:
    from gradgen.render import render

    return render(model)


def _foreign(folder: Path, texts: Mapping[str, str]) -> Iterator[GeneratedFile]:
    """What lies in a package's folder and neither rendering nor building put there."""
    if folder.is_dir():
        for path in folder.iterdir():
            built = path.name in BUILT or BINARY.fullmatch(path.name) or ASIDE.fullmatch(path.name)
            if not built and path.name not in texts:
                yield GeneratedFile(str(path), "foreign")


def _update(path: Path, text: str, check: bool) -> GeneratedFile:
    wanted = text.encode()
    try:
        old = path.read_bytes() if _is_file(path) else None
        if old == wanted:
            return GeneratedFile(str(path), "unchanged")
        if not check:
            _write(path, wanted)
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {error.strerror}") from error
    return GeneratedFile(str(path), "created" if old is None else "changed", _diff(path, old, text))


def _is_file(path: Path) -> bool:
    """Whether there is a file to compare with. A FIFO or a device is neither waited for nor replaced."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a regular file")
    return True


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def _diff(path: Path, old: bytes | None, new: str) -> str:
    before = (old or b"").decode(errors="replace").splitlines(keepends=True)
    lines = difflib.unified_diff(before, new.splitlines(keepends=True), f"{path} (is)", f"{path} (should be)")
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )
