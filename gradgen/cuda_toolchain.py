"""Which nvcc compiles the kernels, and for which GPUs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gradgen.diagnostics import UsageError, quote
from gradgen.probe import ToolchainMissing, Unfit, output

NVCC = 12  # the first one with C++20
OLDEST = 80  # bf16 arithmetic and warp reductions in hardware
TOOLKIT = "/usr/local/cuda"  # where NVIDIA's installers put it
INSTALL = f"install the CUDA toolkit {NVCC} or newer, or set CUDACXX to its nvcc"
NAME_IT = "name it: --arch sm_90 (H100, H200), --arch sm_80 (A100), or several, as in --arch sm_80,sm_90"
ARCH = re.compile(r"sm_(?P<number>[1-9][0-9]{1,2})[af]?")
# Sums must be the same bits as on the CPU, which multiplies and adds in two steps.
FLAGS = ("-std=c++20", "-O3", "-fmad=false", "-Xcompiler=-fPIC,-fno-semantic-interposition,-ffp-contract=off")
LIBRARIES = ("-lcudart_static", "-ldl", "-lrt", "-lpthread")
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")
# In a process of its own: one that has initialised the driver cannot fork children that use it.
ASK_DRIVER = """
import ctypes, sys
def call(name, *arguments):
    code = getattr(driver, name)(*arguments)
    if code: sys.exit(f"{name} fails with {code}")
try: driver = ctypes.CDLL("libcuda.so.1")
except OSError: sys.exit("not found")
count, number = ctypes.c_int(), ctypes.c_int()
call("cuInit", 0)
call("cuDeviceGetCount", ctypes.byref(count))
for device in range(count.value):
    for attribute, end in ((75, "."), (76, "\\n")):
        call("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
        print(number.value, end=end)
"""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler and where its toolkit keeps what it needs."""

    command: tuple[str, ...]
    version: str
    known: tuple[str, ...]  # architectures, oldest first
    include: str  # "" where the C++ compiler looks anyway
    libraries: str


@dataclass(frozen=True)
class CudaToolchain:
    """What turns the runtime's .cu files into objects. Equal `identity` makes equal objects."""

    nvcc: Nvcc
    archs: tuple[str, ...]
    host: str  # the C++ compiler behind nvcc
    flags: tuple[str, ...]

    @property
    def identity(self) -> tuple[object, ...]:
        return (self.nvcc.version, self.nvcc.command[1:], self.archs, FLAGS, self.flags, LIBRARIES)

    def compile(self, source: str, target: str, keep: str) -> tuple[str, ...]:
        """nvcc names things after the source's absolute path and its own process id: with the source included into
        an empty file and intermediate files in a folder `keep`, the object is the same wherever it is compiled."""
        return (
            *self.nvcc.command,
            *FLAGS,
            *_gencode(self.archs),
            *self.flags,
            "-ccbin",
            self.host,
            *("--keep", "--keep-dir", keep),
            *("-DGRADGEN_CUDA=1", "-Iinclude", "-I."),
            *("-x", "cu", "-include", source, "-c", os.devnull, "-o", target),
        )

    def includes(self) -> tuple[str, ...]:
        """For C++ sources that call the CUDA runtime."""
        folder = self.nvcc.include
        return ("-isystem", folder, f"-ffile-prefix-map={folder}=cuda") if folder else ()

    def link(self) -> tuple[str, ...]:
        """Its symbols stay inside: torch brings a libcudart of its own, perhaps of another version."""
        return (f"-L{self.nvcc.libraries}", *LIBRARIES)


def find_cuda(arch: str | Sequence[str] | None, cxx: tuple[str, ...]) -> CudaToolchain:
    """nvcc, and the architectures of `arch`, else those of the GPUs of this machine.

    `cxx` is the C++ compiler that nvcc shall use. GRADGEN_NVCCFLAGS adds flags. Raises UsageError for text that
    is no architecture, and ToolchainMissing, which names everything that is missing.
    """
    wanted = parse_arch(arch) if arch is not None else None
    missing = []
    try:
        nvcc = find_nvcc()
    except ToolchainMissing as error:
        nvcc = None
        missing.append(f"{error}; {INSTALL}")
    present: tuple[str, ...] = ()
    if wanted is None:
        present, reasons = gpu_archs(os.environ.get("PATH", ""))
        if not present:
            missing.append(f"no GPU to compile for ({'; '.join(reasons)}); {NAME_IT}")
    if missing or nvcc is None:
        raise ToolchainMissing("device cuda: " + "\n  and ".join(missing))
    archs = _known(wanted, nvcc) if wanted is not None else _fitting(present, nvcc)
    host = next(
        word
        for word in cxx
        if Path(word).name not in LAUNCHERS  # nvcc wants the compiler itself
    )
    host = shutil.which(host) or host
    flags = shlex.split(os.environ.get("GRADGEN_NVCCFLAGS", ""))
    return CudaToolchain(nvcc, archs, host, tuple(flags))


def cuda_available() -> bool:
    """Whether a build for the GPUs of this machine is possible: `device="auto"` takes CUDA then."""
    try:
        find_nvcc()
    except ToolchainMissing:
        return False
    return bool(gpu_archs(os.environ.get("PATH", ""))[0])


def parse_arch(arch: str | Sequence[str]) -> tuple[str, ...]:
    """ "sm_90,sm_80" as ("sm_80", "sm_90")."""
    names = arch.split(",") if isinstance(arch, str) else list(arch)
    names = [name.strip() if isinstance(name, str) else name for name in names]
    for name in names:
        match = ARCH.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            digits = re.sub(r"\D", "", str(name))
            hint = f"; did you mean 'sm_{digits}'?" if 2 <= len(digits) <= 3 else ""
            raise UsageError(
                f"{quote(name)} is not a GPU architecture: write sm_90, or sm_80,sm_90 for several{hint}"
            )
        if int(match["number"]) < OLDEST:
            raise UsageError(f"{name} is too old: the kernels need sm_{OLDEST} or newer")
    if not names:
        raise UsageError("no GPU architecture given; write sm_90, or sm_80,sm_90 for several")
    return tuple(sorted(set(names), key=_order))


def _order(arch: str) -> tuple[int, str]:
    return _number(arch), arch


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def _gencode(archs: tuple[str, ...]) -> tuple[str, ...]:
    """Machine code for each, and PTX of the newest for GPUs to come."""
    names = [arch.removeprefix("sm_") for arch in archs]
    machine = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    return (*machine, f"-gencode=arch=compute_{names[-1]},code=compute_{names[-1]}")


def _known(archs: tuple[str, ...], nvcc: Nvcc) -> tuple[str, ...]:
    for arch in archs:
        if arch not in nvcc.known and re.sub("[af]$", "", arch) not in nvcc.known:
            raise UsageError(
                f"nvcc {nvcc.version} cannot compile for {arch}; it can for {', '.join(nvcc.known)}"
            )
    return archs


def _fitting(present: tuple[str, ...], nvcc: Nvcc) -> tuple[str, ...]:
    """For a GPU that is newer than nvcc, the newest that nvcc knows: its PTX runs there too."""
    archs = set()
    for arch in present:
        if _number(arch) < OLDEST:
            raise ToolchainMissing(
                f"device cuda: the GPU here is {arch}, and the kernels need sm_{OLDEST} or newer; "
                "name another architecture with --arch to build for another machine"
            )
        older = [known for known in nvcc.known if _number(known) <= _number(arch)]
        if not older:
            raise ToolchainMissing(
                f"device cuda: nvcc {nvcc.version} cannot compile for the GPU here ({arch}); {INSTALL}"
            )
        archs.add(max(older, key=_order))
    return tuple(sorted(archs, key=_order))


def find_nvcc() -> Nvcc:
    """The first that is new enough of CUDACXX, CUDA_HOME, CUDA_PATH, PATH and the toolkit's usual folder."""
    names = ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "PATH")
    return _find_nvcc(*(os.environ.get(name, "") for name in names))


@lru_cache(maxsize=8)
def _find_nvcc(chosen: str, home: str, cuda_path: str, path: str) -> Nvcc:
    if chosen.strip():
        candidates = [(f"CUDACXX={chosen}", shlex.split(chosen))]
    else:
        candidates = [
            (f"{name}={folder}", [str(Path(folder, "bin", "nvcc"))])
            for name, folder in (("CUDA_HOME", home), ("CUDA_PATH", cuda_path))
            if folder
        ]
        candidates += [("nvcc", ["nvcc"]), (f"{TOOLKIT}/bin/nvcc", [f"{TOOLKIT}/bin/nvcc"])]
    reasons = []
    for label, words in candidates:
        found = shutil.which(words[0], path=path)
        try:
            if found is None:
                raise Unfit("not found" if "=" not in label or chosen else "no bin/nvcc there")
            return _ask((found, *words[1:]))
        except Unfit as reason:
            reasons.append(f"{label}: {reason}")
    raise ToolchainMissing(f"no CUDA compiler ({'; '.join(reasons)})")


def _ask(command: tuple[str, ...]) -> Nvcc:
    release = re.search(r"release (\d+)\.\d+, V([\d.]+)", output((*command, "--version")))
    if release is None:
        raise Unfit("not nvcc")
    if int(release[1]) < NVCC:
        raise Unfit(f"nvcc {release[2]} is too old, {NVCC} is needed")
    known = sorted(set(re.findall(r"sm_\d+", output((*command, "--list-gpu-code")))), key=_order)
    plan = output((*command, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull), errors=True)
    headers = _folders(plan, "INCLUDES", "-I") + ["/usr/include"]
    libraries = _folders(plan, "LIBRARIES", "-L")
    libraries += [f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}", "/usr/lib64", "/usr/lib"]
    include = _holding(headers, "cuda_runtime_api.h", "cuda-cudart-dev")
    return Nvcc(
        command,
        release[2],
        tuple(arch for arch in known if _number(arch) >= OLDEST),
        "" if include == "/usr/include" else include,
        _holding(libraries, "libcudart_static.a", "cuda-cudart-dev"),
    )


def _folders(plan: str, variable: str, option: str) -> list[str]:
    """The folders that nvcc itself searches, from its --dryrun."""
    line = re.search(rf"^#\$ {variable}=(.*)$", plan, re.MULTILINE)
    words = shlex.split(line[1]) if line else []
    return [os.path.realpath(word.removeprefix(option)) for word in words if word.startswith(option)]


def _holding(folders: list[str], file: str, package: str) -> str:
    for folder in folders:
        if Path(folder, file).is_file():
            return folder
    raise Unfit(f"its toolkit lacks {file} (Debian, Ubuntu: apt install {package}-<version>)")


@lru_cache(maxsize=4)
def gpu_archs(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The architectures of the GPUs of this machine, and why there are none. Needs no torch."""
    reasons = []
    smi = shutil.which("nvidia-smi", path=path)
    asked = (smi, "--query-gpu=compute_cap", "--format=csv,noheader") if smi else None
    for name, command in (
        ("nvidia-smi", asked),
        ("libcuda.so.1", (sys.executable, "-I", "-S", "-c", ASK_DRIVER)),
    ):
        try:
            if command is None:
                raise Unfit("not found")
            found = re.findall(r"^\s*(\d+)\.(\d)\s*$", output(command), re.MULTILINE)
            if found:
                return tuple(sorted({f"sm_{major}{minor}" for major, minor in found}, key=_order)), ()
            reasons.append(f"{name}: shows none")
        except Unfit as reason:
            reasons.append(f"{name}: {reason}")
    return (), tuple(reasons)
