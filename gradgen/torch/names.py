"""Pairs the parameters of a torch module with the weights of a spec, by checkpoint name, and says
everything that differs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradgen.diagnostics import Error
from gradgen.torch.types import Manager, WeightRecord, torch_dtype

Rename = Callable[[str], str] | Mapping[str, str] | None

_WRAPPERS = (
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
    "_fsdp_wrapped_module.",
)  # torch.compile, activation checkpointing

_FOLD = 3  # so many parameters of one dtype are named one by one


class AttachError(Error, ValueError):
    """A model and a spec that do not match. `problems` lists every difference, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} difference" + ("s" if len(problems) > 1 else "")
        super().__init__(
            f"the model does not match the spec: {count}\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )


@dataclass(frozen=True)
class Pair:
    """A trainable weight that owns a buffer, and the parameter whose gradient goes there. `name`: the
    checkpoint name.
    """

    name: str
    record: WeightRecord
    parameter: torch.nn.Parameter


def match(model: torch.nn.Module, grads: Manager, rename: Rename = None) -> list[Pair]:
    """One pair for each trainable weight with a buffer of its own, in the manager's order. Tied names are
    one pair.

    `rename` maps a parameter's name to its checkpoint name where the two differ. Raises AttachError.
    """
    parameters = {
        _checkpoint_name(name, rename): p for name, p in model.named_parameters(remove_duplicate=False)
    }
    every = list(grads.weights())
    records = {record.name: record for record in every if not record.buffer}
    problems = _missing_and_extra(parameters, records)
    problems += _buffer_differences(model, [record for record in every if record.buffer], rename)
    pairs = []
    for name, record in records.items():
        parameter = parameters.get(name)
        if parameter is None:
            continue
        problems += _differences(name, record, parameter)
        if record.trainable and record.tied_to is None:
            pairs.append(Pair(name, record, parameter))
    problems += _dtype_differences(parameters, records, torch_dtype(grads.dtype))
    problems += _tie_differences(parameters, records)
    if problems:
        raise AttachError(problems)
    return pairs


def _checkpoint_name(name: str, rename: Rename) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    if rename is None:
        return name
    return rename(name) if callable(rename) else rename.get(name, name)


def _missing_and_extra(parameters: Mapping[str, torch.nn.Parameter], records: Mapping[str, Any]) -> list[str]:
    extra = [n for n, p in parameters.items() if n not in records and p.requires_grad]
    missing = [n for n, r in records.items() if n not in parameters and r.tied_to is None]
    problems = [f"{n}: in the spec, not in the model{_hint(n, extra)}" for n in missing]
    return problems + [f"{n}: in the model, not in the spec{_hint(n, missing)}" for n in extra]


def _buffer_differences(model: torch.nn.Module, records: list[WeightRecord], rename: Rename) -> list[str]:
    buffers = {_checkpoint_name(name, rename): b for name, b in model.named_buffers()} if records else {}
    problems = []
    for record in records:
        buffer = buffers.get(record.name)
        if buffer is None:
            problems.append(f"{record.name}: a buffer in the spec, not in the model")
        elif tuple(buffer.shape) != tuple(record.shape):
            shapes = f"{list(buffer.shape)} in the model, {list(record.shape)} in the spec"
            problems.append(f"{record.name}: a buffer of shape {shapes}")
    return problems


def _hint(name: str, others: list[str]) -> str:
    close = difflib.get_close_matches(name, others, 1, 0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _differences(name: str, record: WeightRecord, parameter: torch.nn.Parameter) -> list[str]:
    problems = []
    if tuple(parameter.shape) != tuple(record.shape):
        problems.append(
            f"{name}: shape {list(parameter.shape)} in the model, {list(record.shape)} in the spec"
        )
    if parameter.requires_grad and not record.trainable:
        problems.append(f"{name}: frozen in the spec, trainable in the model; freeze it, or trainable: true")
    if record.trainable and not parameter.requires_grad:
        problems.append(
            f"{name}: trainable in the spec, frozen in the model; unfreeze it, or trainable: false"
        )
    if parameter.is_meta:
        problems.append(f"{name}: on the meta device; give the model real memory first")
    return problems


def _dtype_differences(
    parameters: Mapping[str, torch.nn.Parameter], records: Mapping[str, Any], dtype: torch.dtype
) -> list[str]:
    """One line a parameter, or one for all where a whole model has another dtype."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    seen: set[int] = set()  # a tied parameter has several names
    for name, record in records.items():
        parameter = parameters.get(name)
        if parameter is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if record.trainable and parameter.dtype != dtype:
            by_dtype.setdefault(parameter.dtype, []).append(name)
    problems = []
    for other, names in by_dtype.items():
        text = f"dtype {_short(other)} in the model, {_short(dtype)} in the manager (dtype=)"
        if len(names) > _FOLD:
            problems.append(f"{len(names)} parameters, {names[0]} the first: {text}")
        else:
            problems += [f"{name}: {text}" for name in names]
    return problems


def _tie_differences(parameters: Mapping[str, torch.nn.Parameter], records: Mapping[str, Any]) -> list[str]:
    """Ties that one side has and the other has not."""
    problems: list[str] = []
    owner: dict[int, str] = {}
    for name, record in records.items():
        parameter = parameters.get(name)
        if record.tied_to is None and parameter is not None:
            first = owner.setdefault(id(parameter), name)
            if first != name:
                problems.append(
                    f"{name}: the same parameter as {first} in the model, not in the spec; add tied_to:"
                )
    for name, record in records.items():
        parameter, target = parameters.get(name), parameters.get(record.tied_to) if record.tied_to else None
        if parameter is not None and target is not None and parameter is not target:
            problems.append(
                f"{name}: tied to {record.tied_to} in the spec, not in the model; tie them (tie_weights())"
            )
    return problems


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
