"""`gradgen infer` on checkpoints: headers are read, never believed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradgen.diagnostics import UsageError
from gradgen.infer import infer_file
from gradgen.infer_facts import InferError
from gradgen.infer_safetensors import natural

SIZES = {"F32": 4, "BF16": 2, "I64": 8, "U8": 1, "F8_E4M3": 1}


def header(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    """A right header, and the bytes of data that belong to it."""
    out: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for extent in shape:
            size *= extent
        out[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    return out, place


def write(path: Path, head: Any, data: int, length: int | None = None) -> Path:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
    return path


LAYERS = {
    f"model.layers.{i}.{name}": ("BF16", shape)
    for i in range(11)
    for name, shape in {"mlp.up_proj.bias": [12], "mlp.up_proj.weight": [12, 8], "norm.weight": [8]}.items()
}
GOOD = {
    "model.embed.weight": ("BF16", [20, 8]),
    **dict(sorted(LAYERS.items())),
    "model.norm.weight": ("F32", [8]),
}


def test_names_and_shapes_come_from_the_header(tmp_path: Path) -> None:
    result = infer_file(write(tmp_path / "toy.safetensors", *header(GOOD)))
    assert result.model == "toy"
    assert "count: 11\n    name: model.layers.{i}" in result.text
    assert "up_proj: {shape: [12, 8], name: mlp.up_proj.weight, zero: always}" in result.text
    assert result.text.index("up_proj:") < result.text.index("up_bias:")
    assert result.round_trip.trainable == len(GOOD)
    assert any("which weights are frozen, tied" in finding for finding in result.findings)


def test_an_index_joins_its_files(tmp_path: Path) -> None:
    names = list(GOOD)
    parts = {"a-1-of-2.safetensors": names[:9], "a-2-of-2.safetensors": names[9:]}
    for file, own in parts.items():
        write(tmp_path / file, *header({name: GOOD[name] for name in own}))
    where = {name: file for file, own in parts.items() for name in own}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    whole = infer_file(write(tmp_path / "whole.safetensors", *header(GOOD)), name="same").text
    assert infer_file(index, name="same").text.split("weights:")[1] == whole.split("weights:")[1]

    for change, said in (
        (
            {names[0]: "a-2-of-2.safetensors"},
            "model.embed.weight: is in a-1-of-2.safetensors, which the index does not say",
        ),
        (
            {"more": "a-1-of-2.safetensors"},
            "more: the index says a-1-of-2.safetensors, which does not have it",
        ),
        ({"more": "../a.safetensors"}, "'../a.safetensors': is no file name"),
    ):
        index.write_text(json.dumps({"weight_map": {**where, **change}}))
        with pytest.raises(InferError) as caught:
            infer_file(index)
        assert said in str(caught.value)
    (tmp_path / "a-2-of-2.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(
        UsageError, match=r"1 of 2 are not there \(a-2-of-2\.safetensors\); infer from config\.json"
    ):
        infer_file(index)


def test_a_configuration_beside_the_file_names_the_dims(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 12,
        "vocab_size": 20,
        "num_hidden_layers": 11,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = infer_file(write(tmp_path / "toy.safetensors", *header(GOOD))).text
    assert "embed:      {shape: [vocab, hidden]" in text
    assert "count: layers" in text
    assert "  toy: {vocab: 20, hidden: 8, layers: 11, ffn: 12}" in text
    assert "sizes are matched with config.json by their values alone" in text


def test_buffers_are_left_out_by_name_and_dtype(tmp_path: Path) -> None:
    more = {**GOOD, "bn.running_mean": ("F32", [8]), "steps": ("I64", []), "rope.inv_freq": ("F32", [4])}
    result = infer_file(write(tmp_path / "toy.safetensors", *header(more)))
    assert result.round_trip.trainable == len(GOOD)
    assert any(
        "taken for buffers: bn.running_mean, steps, rope.inv_freq" in finding for finding in result.findings
    )


def test_quantised_checkpoints(tmp_path: Path) -> None:
    more = {**GOOD, "model.q.weight": ("F8_E4M3", [8, 8]), "model.q.weight_scale_inv": ("F32", [1, 1])}
    with pytest.raises(InferError) as caught:
        infer_file(write(tmp_path / "toy.safetensors", *header(more)))
    assert caught.value.problems == (
        "model.q.weight: is quantised (F8_E4M3)",
        "model.q.weight_scale_inv: is quantised (F32)",
    )


def one(**changes: Any) -> dict[str, Any]:
    return {"a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}}


def two(begin: int, end: int) -> dict[str, Any]:
    return {**one(), "b": {"dtype": "F32", "shape": [6], "data_offsets": [begin, end]}}


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty file": (
        lambda p: p.write_bytes(b""),
        "is truncated: it has 0 bytes, too few for 8 bytes of length",
    ),
    "length beyond the file": (
        lambda p: write(p, one(), 24, length=500),
        "too few for a header of 500 bytes",
    ),
    "gigantic length": (
        lambda p: write(p, one(), 24, length=2**63),
        "too few for a header of 9223372036854775808 bytes",
    ),
    "length inside the header": (lambda p: write(p, one(), 24, length=20), "its header is not JSON"),
    "not JSON": (lambda p: write(p, b"{" * 40, 0), "its header is not JSON"),
    "deep JSON": (lambda p: write(p, b"[" * 200_000, 0), "its header is not JSON"),
    "not UTF-8": (lambda p: write(p, b'{"\xff": 1}', 0), "its header is not JSON"),
    "a list": (lambda p: write(p, b"[]", 0), "its header is no JSON object"),
    "a key twice": (lambda p: write(p, b'{"a": 1, "a": 2}', 0), "has the key 'a' twice"),
    "an inner key twice": (
        lambda p: write(p, b'{"a": {"dtype": "F32", "dtype": "F16"}}', 0),
        "has the key 'dtype' twice",
    ),
    "no tensors": (lambda p: write(p, {"__metadata__": {}}, 0), "the model has no parameters"),
    "no dict": (lambda p: write(p, {"a": 3}, 0), "a: has no dtype, shape and data_offsets"),
    "unknown dtype": (lambda p: write(p, one(dtype="F31"), 24), "a.weight: has the unknown dtype 'F31'"),
    "dtype no text": (lambda p: write(p, one(dtype=["F32"]), 24), "a.weight: has the unknown dtype"),
    "negative size": (lambda p: write(p, one(shape=[-2, 3]), 24), "a.weight: its shape is no list of sizes"),
    "bool size": (lambda p: write(p, one(shape=[True, 6]), 24), "a.weight: its shape is no list of sizes"),
    "float size": (lambda p: write(p, one(shape=[2.0, 3]), 24), "a.weight: its shape is no list of sizes"),
    "NaN size": (
        lambda p: write(p, b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', 4),
        "is not JSON",
    ),
    "huge size": (lambda p: write(p, one(shape=[2**62, 2**62]), 24), "its offsets say 24"),
    "size beyond 63 bits": (
        lambda p: write(p, one(shape=[2**70]), 24),
        "a.weight: its shape is no list of sizes",
    ),
    "three offsets": (
        lambda p: write(p, one(data_offsets=[0, 24, 24]), 24),
        "its data_offsets has 3 entries",
    ),
    "offsets backwards": (
        lambda p: write(p, one(data_offsets=[24, 0]), 24),
        "its data ends at 0, before it begins at 24",
    ),
    "lying offsets": (
        lambda p: write(p, one(data_offsets=[0, 20]), 24),
        "F32 of shape [2, 3] has 24 bytes, its offsets say 20",
    ),
    "overlap": (
        lambda p: write(p, two(12, 36), 36),
        "b: its data at 12 overlaps the tensor before it, which ends at 24",
    ),
    "gap": (
        lambda p: write(p, two(28, 52), 52),
        "b: its data at 28 leaves a gap before it, which ends at 24",
    ),
    "truncated data": (
        lambda p: write(p, two(24, 48), 40),
        "is truncated: its tensors end at 48 of 40 bytes of data",
    ),
    "data too long": (
        lambda p: write(p, two(24, 48), 50),
        "is damaged: its tensors end at 48 of 50 bytes of data",
    ),
    "a name of many characters": (
        lambda p: write(p, {"a" * 5000: one()["a.weight"]}, 24),
        "is longer than 256 characters",
    ),
    "a name with a line end": (
        lambda p: write(p, {"a\n: x": one()["a.weight"]}, 24),
        "may hold letters, digits",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_header_that_lies_is_an_error_that_says_how(fault: str, tmp_path: Path) -> None:
    make, said = FAULTS[fault]
    path = tmp_path / "bad.safetensors"
    make(path)
    with pytest.raises(InferError) as caught:
        infer_file(path)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_a_gigantic_header_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.safetensors", b"{}", 0, length=10**9)
    os.truncate(path, 2 * 10**9)  # sparse: it takes no room
    with pytest.raises(InferError, match="its header claims 1000000000 bytes; the format allows 100000000"):
        infer_file(path)


def test_paths_that_hold_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "dir.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name, said in (
        ("no", "cannot read it: No such file"),
        ("dir", "not a regular file"),
        ("pipe", "not a regular file"),
    ):
        with pytest.raises(UsageError, match=said):
            infer_file(tmp_path / f"{name}.safetensors")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.safetensors", *header(GOOD)).read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in (*range(0, 40, 7), *range(40, len(whole), len(whole) // 60), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InferError):
            infer_file(path)


def test_layers_are_in_the_order_of_their_numbers() -> None:
    names = ["l.10.weight", "l.9.weight", "l.9.bias", "a"]
    assert sorted(names, key=natural) == ["a", "l.9.weight", "l.9.bias", "l.10.weight"]
