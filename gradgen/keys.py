"""What decides about a binary, and nothing else. Same key: same binary, whoever built it, where and when.

Not in a key: folders (compiling happens in a fresh one, with relative paths), the clock, times of files,
environment variables (those that change what a compiler does are taken away from it, see compilers.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from gradgen.runtime_files import content_hash, sources_hash
from gradgen.toolchain import LINK, ROLES, Toolchain


def runtime_key(sources: Mapping[str, bytes], toolchain: Toolchain) -> str:
    return content_hash(
        sources_hash(sources).encode(),
        toolchain.version.encode(),  # other compilers make other code, and name C++ symbols differently
        # Options in CXX. The path of the compiler is not in the binary and not in the key.
        " ".join(toolchain.command[1:]).encode(),
        repr((toolchain.flags, sorted(ROLES.items()), LINK)).encode(),
        # A home folder is mounted on machines with other CPUs; code for the wrong one ends with SIGILL.
        toolchain.arch.encode(),
        toolchain.python_tag.encode(),  # another Python has other structures in memory
        toolchain.pybind11_version.encode(),  # its types are shared between modules of equal internals only
        toolchain.device.encode(),
        # nvcc, its flags and the architectures. The key of a CPU build knows nothing of CUDA.
        *((repr(toolchain.cuda.identity).encode(),) if toolchain.cuda else ()),
    )


def model_key(files: Mapping[str, str], model: str, runtime: str) -> str:
    """The runtime's key holds the toolchain. Python text counts too: it is imported from the same folder."""
    texts = (part for name, text in sorted(files.items()) for part in (name.encode(), text.encode()))
    return content_hash(runtime.encode(), model.encode(), *texts)


def text_hash(files: Mapping[str, str]) -> str:
    """What a package's __init__.py says its binary must be made from (`render.text_hash`, without Jinja)."""
    parts = (
        part
        for name, text in sorted(files.items())
        if name != "__init__.py"
        for part in (name.encode(), text.encode())
    )
    return content_hash(*parts)[:16]
