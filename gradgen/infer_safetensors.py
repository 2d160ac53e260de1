"""Names and shapes out of safetensors headers. No tensor is read, and nothing in a header is believed unchecked.

The format: 8 bytes with the header's length, a JSON object of `name: {dtype, shape, data_offsets}`, then the data, which
the tensors cover without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradgen.diagnostics import UsageError, quote
from gradgen.infer_facts import Facts, InferError, Parameter, refuse_odd
from gradgen.infer_ids import model_id

MAX_HEADER = 100_000_000  # the format's own limit
MAX_INDEX = 200_000_000
MAX_SHARDS = 10_000
BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "U64": 64,
    "I32": 32,
    "U32": 32,
    "I16": 16,
    "U16": 16,
}
BITS |= {
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
}
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
TRAINED = ("F64", "F32", "F16", "BF16")
# Buffers that lie beside the weights. Whether another tensor is a buffer, a header cannot say.
_BUFFER = re.compile(
    r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq|position_ids|masked_bias|attn\.bias|"
    r"relative_position_index|rotary_emb\..*|e_score_correction_bias)\Z"
)
_QUANTISED = re.compile(
    r"(^|\.)(qweight|qzeros|scales|g_idx|weight_scale|weight_scale_inv|absmax|quant_map)\Z"
)


@dataclass(frozen=True)
class Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]


def facts_of_checkpoint(path: Path, name: str | None) -> Facts:
    """Facts from one file, or from an index and the files that it names. Raises UsageError and InferError."""
    entries = read_index(path) if path.name.endswith(".json") else read_header(path)
    wrong = [f"{e.name}: is quantised ({e.dtype})" for e in entries if _quantised(e)]
    if wrong:
        cure = "infer from the configuration, or from the checkpoint before quantisation"
        raise InferError(f"{path} holds quantised weights, which have no gradients; {cure}", wrong)
    kept = [e for e in entries if e.dtype in TRAINED and not _BUFFER.search(e.name)]
    left = [e.name for e in entries if e not in set(kept)]
    kept.sort(key=lambda e: natural(e.name))
    parameters = tuple(Parameter(e.name, e.shape) for e in kept)
    refuse_odd(parameters)
    notes = [
        f"read from the header of {path.name}: which weights are frozen, tied, or used in which order it does not say; every "
        "gradient starts at zero, and `backward` is the reverse of the declarations"
    ]
    if left:
        from gradgen.infer_yaml import listed

        notes.append(f"taken for buffers: {listed(left)}")
    stem = re.sub(r"(\.safetensors)?(\.index)?(\.json)?\Z", "", path.name)
    generic = re.match(r"(pytorch_)?model\b", stem)
    folder = path.resolve().parent.name
    facts = Facts(
        model_id(name or (folder if generic else stem)),
        f"{path.name} of {folder}",
        parameters,
        notes=tuple(notes),
    )
    return _with_config(path.parent / "config.json", facts)


def _with_config(config: Path, facts: Facts) -> Facts:
    """Integer keys of a configuration beside the checkpoint, for the names of dims."""
    if not config.is_file():
        return facts
    from gradgen.infer_config import read_config

    data = read_config(config)
    text = data["text_config"] if isinstance(data.get("text_config"), dict) else data
    values = {
        key: value
        for key, value in text.items()
        if type(value) is int and value > 0 and not key.endswith("_id")
    }
    if "head_dim" not in values and {"hidden_size", "num_attention_heads"} <= values.keys():
        heads = values["num_attention_heads"]
        values["head_dim"] = max(values["hidden_size"] // heads, 1)
    kind = str(data.get("model_type", ""))
    note = "sizes are matched with config.json by their values alone; check them"
    return replace(facts, values=values, model_type=kind, preset=facts.model, notes=(*facts.notes, note))


def _quantised(entry: Entry) -> bool:
    small = BITS[entry.dtype] <= 8 and entry.dtype != "BOOL" and len(entry.shape) > 1
    return small or bool(_QUANTISED.search(entry.name))


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key in which layer 10 follows layer 9, and a weight its bias does not precede."""
    parts = name.split(".")
    order: list[tuple[int, int | str]] = []
    for part in parts:
        order.append((0, int(part)) if part.isdecimal() and part.isascii() and len(part) < 10 else (1, part))
    if parts[-1] in ("weight", "bias"):
        order[-1] = (0, int(parts[-1] == "bias"))
    return tuple(order)


def read_header(path: Path) -> list[Entry]:
    """The tensors of one file, in its order. Raises UsageError for no readable file and InferError for a wrong one."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: is not a regular file")
        size = status.st_size
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                shown = f"a header of {length} bytes" if len(start) == 8 else "8 bytes of length"
                raise InferError(f"{path}: is truncated: it has {size} bytes, too few for {shown}")
            if length > MAX_HEADER:
                raise InferError(f"{path}: its header claims {length} bytes; the format allows {MAX_HEADER}")
            text = file.read(length)
    except OSError as error:
        raise UsageError(f"{path}: cannot read it: {error.strerror}") from None
    if len(text) < length:
        raise InferError(f"{path}: is truncated inside its header")
    return _entries(path, _json(path, text), size - 8 - length)


def read_index(path: Path) -> list[Entry]:
    """The tensors of a sharded checkpoint. Raises InferError where index and files differ."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: is not a regular file")
        if status.st_size > MAX_INDEX:
            raise UsageError(f"{path}: has {status.st_size} bytes; an index has at most {MAX_INDEX}")
        data = _json(path, path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot read it: {error.strerror}") from None
    where = data.get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise InferError(f"{path}: has no weight_map of tensor names to files, so it is no safetensors index")
    files = sorted(set(where.values()))
    odd = [
        f"{quote(file)}: is no file name"
        for file in files
        if not re.fullmatch(r"[A-Za-z0-9_.\-]+\.safetensors", file)
    ]
    if odd or len(files) > MAX_SHARDS:
        raise InferError(
            f"{path}: names {len(files)} files, some of which cannot be files of a checkpoint", odd
        )
    missing = [file for file in files if not (path.parent / file).exists()]
    if missing:
        shown = ", ".join(missing[:3])
        raise UsageError(
            f"{path}: shapes are in the files that it names, and {len(missing)} of {len(files)} are not there ({shown}); "
            "infer from config.json instead"
        )
    entries: list[Entry] = []
    problems = []
    seen: dict[str, str] = {}
    for file in files:
        for entry in read_header(path.parent / file):
            if entry.name in seen:
                problems.append(f"{entry.name}: is in {seen[entry.name]} and in {file}")
            elif where.get(entry.name) != file:
                problems.append(f"{entry.name}: is in {file}, which the index does not say")
            seen[entry.name] = file
            entries.append(entry)
    problems += [
        f"{name}: the index says {file}, which does not have it"
        for name, file in where.items()
        if name not in seen
    ]
    if problems:
        raise InferError(f"{path}: index and files differ", problems)
    return entries


def _json(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise InferError(f"{path}: has the key {quote(key)} twice")
            out[key] = value
        return out

    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise InferError(
            f"{path}: its header is not JSON, so it is no safetensors file or it is damaged"
        ) from None
    if not isinstance(data, dict):
        raise InferError(f"{path}: its header is no JSON object")
    return data


def _no_number(text: str) -> None:
    raise ValueError(text)


def _entries(path: Path, header: dict[str, Any], data_size: int) -> list[Entry]:
    """Every tensor checked: dtype, shape, and a range of the data that is its own and has its size."""
    problems: list[str] = []
    entries: list[Entry] = []
    ranges: list[tuple[int, int, str]] = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        wrong = _wrong(info)
        if wrong:
            problems.append(f"{quote(name)[1:-1]}: {wrong}")
            continue
        begin, end = info["data_offsets"]
        entry = Entry(name, info["dtype"], tuple(info["shape"]))
        bits = BITS[entry.dtype]
        for extent in entry.shape:
            bits *= extent
        if bits != 8 * (end - begin):
            problems.append(
                f"{name}: {entry.dtype} of shape {list(entry.shape)} has {-(-bits // 8)} bytes, its offsets say {end - begin}"
            )
        entries.append(entry)
        ranges.append((begin, end, name))
    place = 0
    for begin, end, name in sorted(ranges):
        if begin != place:
            what = "overlaps the tensor before it" if begin < place else "leaves a gap before it"
            problems.append(f"{name}: its data at {begin} {what}, which ends at {place}")
        place = max(place, end)
    if not problems and place != data_size:
        word = "truncated: its tensors end at" if place > data_size else "damaged: its tensors end at"
        raise InferError(f"{path}: is {word} {place} of {data_size} bytes of data")
    if problems:
        raise InferError(f"{path}: its header contradicts itself", problems)
    return entries


def _wrong(info: Any) -> str:
    """What is wrong with the description of one tensor, or ""."""
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        return "has no dtype, shape and data_offsets"
    if not isinstance(info["dtype"], str) or info["dtype"] not in BITS:
        return f"has the unknown dtype {quote(info['dtype'])}"
    for key, length in (("shape", None), ("data_offsets", 2)):
        value = info[key]
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
            return f"its {key} is no list of sizes"
        if length is not None and len(value) != length:
            return f"its {key} has {len(value)} entries"
    begin, end = info["data_offsets"]
    return "" if begin <= end else f"its data ends at {end}, before it begins at {begin}"
