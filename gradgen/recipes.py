"""What is compiled and linked for the runtime and for a model: relative paths only, in a fresh folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradgen import keys, manifest
from gradgen.cache import Entry
from gradgen.compilers import Command
from gradgen.diagnostics import CacheError
from gradgen.runtime_files import sources_hash
from gradgen.toolchain import Toolchain

Sources = Mapping[str, bytes]


@dataclass(frozen=True)
class Recipe:
    """How an entry of the cache comes about."""

    entry: Entry
    toolchain: Toolchain
    files: Sources  # what is compiled, by relative path
    shared: Path | None  # the runtime that a model links against
    units: tuple[Command, ...]
    link: Command
    keep: frozenset[str]  # text that stays beside the binaries
    runtime_key: str
    sources: str
    text_hash: str

    def prepare(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        if self.shared is not None:
            link_or_copy(self.shared, folder / self.shared.name)

    def finish(self, folder: Path) -> manifest.Build:
        """Removes what was only needed to compile, and writes the manifest last."""
        binaries = [self.link.name, *([self.shared.name] if self.shared else [])]
        for path in folder.iterdir():
            if path.name not in self.keep and path.name not in (*binaries, ".owner"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        build = manifest.Build(
            model=self.entry.model,
            key=self.entry.key,
            runtime_key=self.runtime_key,
            sources=self.sources,
            text_hash=self.text_hash,
            python=self.toolchain.python_tag,
            device=self.toolchain.device,
            arch=",".join(self.toolchain.cuda.archs) if self.toolchain.cuda else "",
            files={name: manifest.file_hash(folder / name) for name in binaries},
        )
        (folder / manifest.NAME).write_text(manifest.text({build.python: build}), encoding="utf-8")
        return build


def runtime_recipe(entry: Entry, sources: Sources, toolchain: Toolchain) -> Recipe:
    """All bindings as one unit, all of the core as another, and the kernels a file each; for CUDA its C++ files as
    one more.

    A file alone spends most of its time on headers: bindings 60 s in six files and 12 s in one, the core 26 s in
    twenty and 9 s in one. So two files of the core cannot give one name to two things, not even privately.
    """
    define = f"-DGRADGEN_RUNTIME_MODULE={entry.name}"
    sources_of = {
        part: sorted(n for n in sources if n.startswith(f"{part}/") and n.endswith(".cpp"))
        for part in ("src", "bindings", "cuda")
    }
    kernels = [name for name in sources_of["src"] if name.startswith("src/kernels")]
    joined = {
        "bindings.cpp": sources_of["bindings"],
        "core.cpp": [name for name in sources_of["src"] if name not in kernels],
        "cuda.cpp": sources_of["cuda"],
    }
    roles = {name.removesuffix(".cpp"): name.removesuffix(".cpp") for name, parts in joined.items() if parts}
    roles = {f"{name}.cpp": role for name, role in roles.items()} | dict.fromkeys(kernels, "core")
    objects = {name: name.replace("/", "_") + ".o" for name in roles}
    units = [
        Command(name.replace("/", "_"), toolchain.compile(role, name, objects[name], define))
        for name, role in roles.items()
    ]  # slow ones first
    files = {**sources, **{name: _including(parts) for name, parts in joined.items() if parts}}
    more: tuple[str, ...] = ()
    if toolchain.cuda is not None:
        for name in (n for n in sorted(sources) if n.endswith(".cu")):
            objects[name] = name.replace("/", "_") + ".o"
            keep = f"{objects[name]}.keep"
            files[f"{keep}/.empty"] = b""  # nvcc does not make the folder
            command = toolchain.cuda.compile(name, objects[name], keep)
            units.append(Command(name.replace("/", "_"), command))
        units.sort(
            key=lambda unit: not unit.name.startswith("cuda_kernels")
        )  # nvcc may refuse the C++ compiler
        more = toolchain.cuda.link()
    library = f"{entry.name}.so"
    return Recipe(
        entry=entry,
        toolchain=toolchain,
        files=files,
        shared=None,
        units=tuple(units),
        link=Command(library, toolchain.link(sorted(objects.values()), library, *more)),
        keep=frozenset(),
        runtime_key=entry.key,
        sources=sources_hash(sources),
        text_hash="",
    )


def model_recipe(
    entry: Entry,
    files: Mapping[str, str],
    sources: Sources,
    shared: Path,
    runtime_key: str,
    toolchain: Toolchain,
) -> Recipe:
    """The model's text against the headers that its runtime was made from."""
    define = f"-DGRADGEN_MODEL_MODULE={entry.name}"
    units = sorted(
        (name for name in files if name.endswith(".cpp")), key=lambda name: (name != "module.cpp", name)
    )
    headers = {name: content for name, content in sources.items() if name.startswith("include/")}
    library = f"{entry.name}.so"
    return Recipe(
        entry=entry,
        toolchain=toolchain,
        files={**headers, **{name: text.encode() for name, text in files.items()}},
        shared=shared,
        units=tuple(
            Command(
                name,
                toolchain.compile("module" if name == "module.cpp" else "model", name, f"{name}.o", define),
            )
            for name in units
        ),
        link=Command(library, toolchain.link([*(f"{name}.o" for name in units), shared.name], library)),
        keep=frozenset(files),
        runtime_key=runtime_key,
        sources=sources_hash(sources),
        text_hash=keys.text_hash(files),
    )


def _including(names: Sequence[str]) -> bytes:
    return "".join(f'#include "{name}"\n' for name in names).encode()


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise CacheError(f"{source} has just been removed; try again") from None
    except OSError:  # another file system, one without links, or another user's file
        shutil.copyfile(source, target)
