"""The runtime's sources as bytes, and hashes of contents. A built package reads them too, so this imports little."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from gradgen import paths

PARTS = ("include", "src", "bindings")
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")


def runtime_sources(device: str = "cpu") -> dict[str, bytes]:
    """Every file of a device's runtime by relative name. Read once: what is hashed is what is compiled."""
    root = paths.runtime_dir()
    parts = (*PARTS, "cuda") if device == "cuda" else PARTS
    files = (path for part in parts for path in (root / part).rglob("*") if path.suffix in SUFFIXES)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(files)}


def sources_hash(sources: Mapping[str, bytes]) -> str:
    """Of contents and names: moving a header changes what `#include` finds."""
    return content_hash(
        *(part for name, content in sorted(sources.items()) for part in (name.encode(), content))
    )


def content_hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
