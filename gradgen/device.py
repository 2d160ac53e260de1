"""Which GPU a manager lives on, and on which stream its work goes. torch is looked at only where the process has it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from gradgen.diagnostics import UsageError

CPU = -1
# Calls that put work on the caller's stream.
ON_STREAM = (
    "start_micro_step",
    "end_micro_step",
    "block_full",
    "notify_block",
    "non_block_full",
    "notify_non_block",
    "block_shard",
    "non_block_shard",
    "named_gradients",
    "scale_gradients",
    "zero_grad",
    "all_gather",
    "set_divide_on_device",
)


def gpu_index(device: Any) -> int:
    """CPU for "cpu", else the GPU's number, from "cuda", "cuda:1", an integer or a torch.device. Raises UsageError."""
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    text = str(device)
    if text == "cpu":
        return CPU
    found = re.fullmatch(r"cuda(?::(\d+))?", text)
    if found is None:
        raise UsageError(f'device must be "cpu", "cuda" or "cuda:N", got {text!r}')
    if found[1] is not None:
        return int(found[1])
    torch = _torch_cuda()
    return int(torch.cuda.current_device()) if torch is not None else 0


def _torch_cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


class OnStream:
    """A native manager on a GPU whose calls first say on which stream they come: torch's current one, or a given one."""

    def __init__(self, native: Any, index: int) -> None:
        self._native, self._index = native, index
        self._chosen: int | None = None
        for name in ON_STREAM:
            setattr(self, name, self._following(getattr(native, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":
            self._native.step = value
        else:
            super().__setattr__(name, value)

    def choose(self, stream: Any) -> None:
        """A cudaStream_t as an integer, a torch.cuda.Stream, or None: torch's current stream."""
        self._chosen = None if stream is None else int(getattr(stream, "cuda_stream", stream))
        self._native.use_stream(self.current())

    def current(self) -> int:
        if self._chosen is not None:
            return self._chosen
        torch = sys.modules.get("torch")
        return int(torch._C._cuda_getCurrentRawStream(self._index)) if torch is not None else 0

    def grad_norm(self) -> Any:
        """A 0-dim fp32 torch tensor on the GPU, for which nothing waits; a float where torch is not imported."""
        self._native.use_stream(self.current())
        return self._scalar(self._native.grad_norm, self._native.grad_norm_tensor)

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """As `grad_norm`, of before; every gradient is multiplied by min(1, max_norm / (norm + 1e-6)) on the GPU."""
        self._native.use_stream(self.current())
        return self._scalar(
            lambda: self._native.clip_grad_norm_(max_norm),
            lambda: self._native.clip_grad_norm_tensor(max_norm),
        )

    def _scalar(self, on_host: Callable[[], Any], on_device: Callable[[], Any]) -> Any:
        torch = _torch_cuda()
        return on_host() if torch is None else torch.from_dlpack(on_device()).clone()

    def set_divide(self, divide: Any) -> None:
        """A number, or one fp32 or fp64 element on this GPU, read when the work reaches it."""
        if getattr(divide, "is_cuda", False):
            if divide.numel() != 1:
                raise ValueError(f"divide must be one number, got a tensor of {divide.numel()}")
            self._kept = divide.detach().double()  # what the kernel reads must live until the next divisor
            self.set_divide_on_device(self._kept.data_ptr(), "float64")
        else:
            self._native.set_divide(divide)

    def _following(self, call: Callable[..., Any]) -> Callable[..., Any]:
        use, current = self._native.use_stream, self.current

        def follow(*arguments: Any, **named: Any) -> Any:
            use(current())
            return call(*arguments, **named)

        return follow
