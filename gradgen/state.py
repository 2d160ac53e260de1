"""state_dict and load_state_dict of a manager: numbers, and plain arrays by checkpoint name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = 1
_NUMBERS = (
    "rank",
    "world_size",
    "accumulator",
    "seed",
    "step",
    "skipped_steps",
    "phase",
    "micro_step",
    "micro_steps",
    "divide",
    "mean",
    "norm_squared",
    "nonfinite",
    "step_skipped",
)


def save(native: Any) -> dict[str, Any]:
    """Copies of what the manager holds now."""
    numbers, gradients = native.save_state()
    entries = {
        name: {
            "values": None if values is None else _array(values),
            "offset": offset,
            "numel": numel,
            "global_shape": list(shape),
            "partial": partial,
            "written": written,
        }
        for name, shape, offset, numel, partial, written, values in gradients
    }
    return {
        "format": FORMAT,
        "model": native.model_name,
        "strategy": native.strategy,
        **numbers,
        "gradients": entries,
    }


def load(native: Any, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """`states`: this rank's, or those of all ranks of the run that saved them."""
    given = [states] if isinstance(states, Mapping) else list(states)
    try:
        plain, problem = [_plain(native, state) for state in given], ""
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        plain, problem = [], f"not the state of a gradient manager: {type(error).__name__}: {error}"
    native.load_state(plain, problem)  # also with a problem: the other ranks wait for this one


def _plain(native: Any, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    if state["format"] != FORMAT:
        raise ValueError(f"format {state['format']}, and this gradgen reads {FORMAT}")
    if state["model"] != native.model_name:
        raise ValueError(f"it was saved by {state['model']}")
    gradients = [
        (name, e["global_shape"], e["offset"], e["numel"], e["partial"], e["written"], _buffer(e["values"]))
        for name, e in state["gradients"].items()
    ]
    return {key: state[key] for key in _NUMBERS}, gradients


def _array(tensor: Any) -> Any:
    """A flat copy: a torch tensor where torch is in use, else a NumPy array (bfloat16 as its bits, uint16)."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.from_dlpack(tensor).reshape(-1).clone()
    import numpy

    if tensor.dtype == "bfloat16":
        return numpy.frombuffer(tensor.view_bits(), numpy.uint16).copy()
    return numpy.asarray(tensor).reshape(-1).copy()


def _buffer(values: Any) -> Any:
    """What the runtime can read: torch tensors may be on another device, or require gradients."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return values.detach().cpu().contiguous()
    return values
