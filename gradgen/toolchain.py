"""Which compiler builds a module, for which Python, and with which flags."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from gradgen.cuda_toolchain import CudaToolchain, cuda_available, find_cuda, parse_arch
from gradgen.diagnostics import UsageError
from gradgen.probe import ToolchainMissing, Unfit, output

__all__ = ["LINK", "ROLES", "Toolchain", "ToolchainMissing", "find_toolchain", "python_tag"]

GCC, CLANG = 12, 16  # the first ones with what the runtime uses of C++20
CANDIDATES = ("g++", "clang++", "c++", "g++-15", "g++-14", "g++-13", "g++-12", "clang++-19", "clang++-18")
INSTALL = (
    f"install GCC {GCC} or newer (Debian, Ubuntu: apt install g++) or Clang {CLANG} or newer, or set CXX"
)
# No fused multiply-add behind the source's back: sums must be the same bits on every machine.
COMMON = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-semantic-interposition", "-Wno-psabi")
ROLES = {
    "core": ("-O2", "-I."),  # its symbols are what models link against
    "cuda": ("-O2", "-I."),  # C++ that calls the CUDA runtime
    "bindings": ("-O1", "-fvisibility=hidden", "-I."),
    "model": ("-O2", "-fvisibility=hidden"),
    "module": ("-O1", "-fvisibility=hidden"),  # calls that Python makes once
}
# A compiler that links its C++ library statically (the CUDA runtime always is): what is inside must not mix with the
# copy that torch brings.
LINK = ("-shared", "-Wl,-s", "-Wl,--exclude-libs,ALL", "-Wl,--build-id=none", "-Wl,-rpath,$ORIGIN")


@dataclass(frozen=True)
class Toolchain:
    """A compiler and what it compiles for. Equal toolchains make equal modules."""

    command: tuple[str, ...]  # the compiler, perhaps behind a launcher such as ccache
    version: str
    arch: str  # what -march=native means on this CPU
    flags: tuple[str, ...]
    python_tag: str  # cpython-311-x86_64-linux-gnu
    python_include: str
    pybind11_include: str
    pybind11_version: str
    device: str = "cpu"
    cuda: CudaToolchain | None = None

    @property
    def target(self) -> str:
        """What is built for, as a line about a build says it: "cpu", or "cuda sm_80,sm_90"."""
        return f"{self.device} {','.join(self.cuda.archs)}" if self.cuda else self.device

    def compile(self, role: str, source: str, target: str, *more: str) -> tuple[str, ...]:
        include = ("-Iinclude", "-isystem", self.pybind11_include, "-isystem", self.python_include)
        return (
            *self.command,
            *self.flags,
            *ROLES[role],
            *more,
            *(("-DGRADGEN_CUDA=1",) if self.device == "cuda" else ()),
            *self._unnamed(),
            *include,
            *(self.cuda.includes() if self.cuda and role == "cuda" else ()),
            "-c",
            source,
            "-o",
            target,
        )

    def link(self, objects: list[str], target: str, *more: str) -> tuple[str, ...]:
        return (*self.command, *LINK, f"-Wl,-soname,{target}", "-o", target, *objects, *more)

    def _unnamed(self) -> tuple[str, ...]:
        """Keeps this machine's folders out of the binary."""
        folders = {self.pybind11_include: "pybind11", self.python_include: "python"}
        return tuple(f"-ffile-prefix-map={folder}={name}" for folder, name in folders.items())


def find_toolchain(device: str = "cpu", arch: str | Sequence[str] | None = None) -> Toolchain:
    """The compiler that CXX names, else the first of CANDIDATES that is new enough; with nvcc for CUDA.

    device: "cpu", "cuda", or "auto": cuda where nvcc and a GPU are present or `arch` is given. arch: the GPUs to
    compile for, "sm_80,sm_90" or a list of such names (None: those of this machine). GRADGEN_CXXFLAGS and
    GRADGEN_NVCCFLAGS add flags. Raises ToolchainMissing, which says what is missing and how to get it. Asking a
    compiler takes 30 ms, so nothing about it is kept on disk: what a wrapper hides is asked each time.
    """
    if device not in ("cpu", "cuda", "auto"):
        raise UsageError(f"device must be cpu, cuda or auto, not {device!r}")
    if device == "cpu" and arch is not None:
        raise UsageError(
            f"arch names GPUs and device is cpu: leave --arch (arch={arch!r}) out, or take device cuda"
        )
    if arch is not None:
        parse_arch(arch)  # before compilers are looked for: what is wrong with the call comes first
    found = _find(
        os.environ.get("CXX", ""), os.environ.get("GRADGEN_CXXFLAGS", ""), os.environ.get("PATH", "")
    )
    if device == "cpu" or (device == "auto" and arch is None and not cuda_available()):
        return found
    return replace(found, device="cuda", cuda=find_cuda(arch, found.command))


@lru_cache(maxsize=8)
def _find(cxx: str, extra: str, path: str) -> Toolchain:
    command, version, arch = _compiler(cxx, shlex.split(extra), path)
    pybind11_include, pybind11_version = _pybind11()
    return Toolchain(
        command=command,
        version=version,
        arch=arch,
        flags=(*COMMON, _native_flag(), *shlex.split(extra)),
        python_tag=python_tag(),
        python_include=_python_include(),
        pybind11_include=pybind11_include,
        pybind11_version=pybind11_version,
    )


def python_tag() -> str:
    """The ABI that an extension module is compiled for."""
    from importlib.machinery import EXTENSION_SUFFIXES

    return EXTENSION_SUFFIXES[0].removeprefix(".").removesuffix(".so")


def _native_flag() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"


def _compiler(cxx: str, extra: list[str], path: str) -> tuple[tuple[str, ...], str, str]:
    reasons = []
    for words in [shlex.split(cxx)] if cxx.strip() else [[name] for name in CANDIDATES]:
        found = shutil.which(words[0], path=path)
        if found is None:
            if cxx.strip() or words[0] in CANDIDATES[:2]:
                reasons.append(f"{words[0]}: not found")
            continue
        command = (found, *words[1:])
        try:
            return (command, *_ask(command, extra))
        except Unfit as reason:
            reasons.append(f"{shlex.join(command)}: {reason}")
    what = f"the compiler of CXX={cxx!r} cannot be used" if cxx.strip() else "no C++ compiler"
    raise ToolchainMissing(f"{what} ({'; '.join(reasons)}); {INSTALL}")


def _ask(command: tuple[str, ...], extra: list[str]) -> tuple[str, str]:
    """Version and architecture. The macros that a compiler predefines tell all that its native target has."""
    version = output((*command, "--version")).split("\n")[0].strip()
    macros = output((*command, *COMMON, _native_flag(), *extra, "-dM", "-E", "-x", "c++", os.devnull))
    number = re.search(r"#define __clang_major__ (\d+)", macros)
    name, needed = ("Clang", CLANG) if number else ("GCC", GCC)
    number = number or re.search(r"#define __GNUC__ (\d+)", macros)
    if number is None:
        raise Unfit("neither GCC nor Clang")
    if int(number[1]) < needed:
        raise Unfit(f"{name} {number[1]} is too old, {needed} is needed")
    digest = hashlib.sha256("\n".join(sorted(macros.split("\n"))).encode()).hexdigest()
    return version, f"{platform.machine()}-{digest[:16]}"


def _python_include() -> str:
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").is_file():
        raise ToolchainMissing(
            f"Python's headers are missing ({folder}/Python.h); install them "
            "(Debian, Ubuntu: apt install python3-dev)"
        )
    return folder


def _pybind11() -> tuple[str, str]:
    try:
        import pybind11
    except ImportError:
        raise ToolchainMissing("pybind11 is missing; install it: pip install 'pybind11>=3.0,<4'") from None
    if int(pybind11.__version__.split(".")[0]) != 3:
        raise ToolchainMissing(f"pybind11 {pybind11.__version__} is not 3.x; pip install 'pybind11>=3.0,<4'")
    return pybind11.get_include(), pybind11.__version__
