"""Ranks that reach each other through a torch.distributed group: gloo, MPI or UCC, on one host or on many.

`gradgen.comm.from_torch` uses this where ranks cannot map each other's memory. Buffers are Python objects
that speak the buffer protocol (uint8); they are wrapped without a copy, and numpy is never needed. torch is
imported on first use.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gradgen.diagnostics import CommError, CommTimeout, Error, PeerLost, StateError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_TIMEOUT = 1800.0  # seconds; torch's own default for gloo

_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer closed|remote (worker|peer)|socket closed"
    r"|unexpected eof|not connected",
    re.IGNORECASE,
)
_LATE = re.compile(r"timed?[ -]?out|deadline", re.IGNORECASE)


@dataclass(frozen=True)
class GroupInfo:
    """What gradgen needs to know of a process group. `timeout` in seconds."""

    group: Any
    rank: int
    world: int
    backend: str
    timeout: float


def default_group_info(group: Any = None) -> GroupInfo:
    """Rank, size, backend and time limit of `group`, or of the default group.

    Raises StateError when there is no default group, ValueError when this rank is not in `group`, CommError
    when `group` has been destroyed, ModuleNotFoundError when torch is missing.
    """
    dist = _distributed()
    if not dist.is_available():
        raise StateError(
            "this torch was built without torch.distributed; "
            "use gradgen.comm.single() or gradgen.comm.threads(n)"
        )
    if not dist.is_initialized():
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            raise StateError(
                "torch.distributed has no default group: call torch.distributed.init_process_group('gloo') "
                "(under torchrun), or use gradgen.comm.single()"
            )
        raise CommError(
            "the process group has been destroyed: make a new one before gradgen.comm.from_torch(group)"
        )
    if group is None:
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_not_a_member(dist))
    try:
        rank, world, backend = dist.get_rank(group), dist.get_world_size(group), str(dist.get_backend(group))
    except (ValueError, RuntimeError) as error:
        raise CommError(f"the process group has been destroyed or was never registered: {error}") from error
    if rank < 0:
        raise ValueError(_not_a_member(dist))
    return GroupInfo(group, rank, world, backend, _timeout_of(group))


def host_group(group: Any = None) -> Any:
    """A gloo group of the same ranks. Collective over them."""
    dist = _distributed()
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class TorchWork:
    """A collective in flight. Keeps its buffers alive until it is done."""

    def __init__(self, work: Any, op: str, transport: TorchTransport, *keep: Any) -> None:
        self._work, self._op, self._transport, self._keep = work, op, transport, keep

    def is_completed(self) -> bool:
        """True when `wait` will not block. Errors are raised by `wait` only."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Blocks until the collective is done. Raises PeerLost, CommTimeout or CommError, which name the operation.

        It looks again after short sleeps instead of waiting inside torch: so Ctrl-C is heard, and the time limit is ours.
        """
        if self._work is not None:
            with self._transport.errors(self._op):
                self._poll()
                self._work.wait()
        self._work, self._keep = None, ()

    def _poll(self) -> None:
        start, pause = time.monotonic(), 20e-6
        while not self._work.is_completed():
            if time.monotonic() - start > self._transport.timeout:
                raise RuntimeError(f"timed out after {self._transport.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)


class TorchTransport:
    """Collectives on uint8 buffers over a process group. Every rank makes the same calls in the same order.

    A failed group cannot be trusted again: after the first error each call raises that error again.
    """

    def __init__(self, group: Any = None, timeout: float | None = None) -> None:
        info = default_group_info(group)
        self.timeout = info.timeout if timeout is None else timeout  # seconds
        self.info, self.rank, self.world = info, info.rank, info.world
        self._dist = _distributed()
        self._failure: str | None = None
        self._failure_type: type[CommError] = CommError
        self._single = True  # the backend can gather into one tensor

    def all_to_all(self, out: Any, inp: Any, asynchronous: bool = False) -> TorchWork:
        """Slice r of `inp` goes to rank r; slice r of `out` is rank r's. Both are `world` equal slices
        long.
        """
        op = f"all_to_all of {_nbytes(inp)} bytes"
        with self.errors(op):
            into, source = _tensor(out), _tensor(inp)
            self._check(
                op,
                into.numel() == source.numel() and source.numel() % self.world == 0,
                into.numel(),
                source.numel(),
            )
            if source.numel() == 0:
                return TorchWork(None, op, self)
            work = self._dist.all_to_all_single(into, source, group=self.info.group, async_op=True)
        pending = TorchWork(work, op, self, into, source, out, inp)
        if not asynchronous:
            pending.wait()
        return pending

    def all_gather(self, out: Any, inp: Any) -> None:
        """`out` becomes every rank's `inp`, in rank order. Blocking."""
        op = f"all_gather of {_nbytes(inp)} bytes"
        with self.errors(op):
            into, source = _tensor(out), _tensor(inp)
            self._check(op, into.numel() == source.numel() * self.world, into.numel(), source.numel())
            if source.numel():
                self._gather(into, source)

    def barrier(self) -> None:
        with self.errors("barrier"):
            work = self._dist.barrier(group=self.info.group, async_op=True)
        TorchWork(work, "barrier", self).wait()

    def gather_objects(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in rank order."""
        import torch

        with self.errors("gather_objects"):
            length = torch.tensor([len(mine)], dtype=torch.int64)
            lengths = torch.empty(self.world, dtype=torch.int64)
            self._gather(lengths, length)
            sizes = lengths.tolist()
            longest = max(max(sizes), 1)
            padded = _tensor(bytearray(mine.ljust(longest, b"\0")))
            everything = bytearray(longest * self.world)
            self._gather(_tensor(everything), padded)
        return [bytes(everything[r * longest : r * longest + size]) for r, size in enumerate(sizes)]

    @contextmanager
    def errors(self, op: str) -> Iterator[None]:
        """Turns what torch raises within into gradgen's errors, and keeps the first for later calls."""
        if self._failure is not None:
            raise self._failure_type(f"{op}: the process group failed before: {self._failure}")
        try:
            yield
        except Error:
            raise
        except (
            RuntimeError,
            ValueError,
        ) as error:  # torch's DistError, DistBackendError... are RuntimeErrors
            kind, text = _classify(str(error))
            self._failure_type = kind
            self._failure = f"{op} on rank {self.rank} of {self.world} ({self.info.backend}): {text}"
            raise kind(self._failure) from error

    def _gather(self, into: Tensor, source: Tensor) -> None:
        if self._single:
            try:
                work = _all_gather_single(self._dist)(into, source, group=self.info.group, async_op=True)
                TorchWork(work, "all_gather", self, into, source)._poll()
                work.wait()
                return
            except (RuntimeError, NotImplementedError) as error:
                if not re.search("not support|no support|not implemented", str(error), re.IGNORECASE):
                    raise
                self._single = False
        self._dist.all_gather(list(into.chunk(self.world)), source, group=self.info.group)

    def _check(self, op: str, right: bool, out: int, inp: int) -> None:
        if not right:
            raise CommError(
                f"{op}: output of {out} bytes and input of {inp} bytes do not fit {self.world} ranks"
            )


def _not_a_member(dist: Any) -> str:
    rank = dist.get_rank()
    return f"rank {rank} is not in the process group: only its members may build a communicator on it"


def _distributed() -> Any:
    try:
        import torch.distributed as dist
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; install it with: pip install 'gradgen[torch]'", name=error.name
        ) from None
    return dist


def _all_gather_single(dist: Any) -> Callable[..., Any]:
    """torch 2.13 renamed all_gather_into_tensor; the old name warns."""
    function: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function


def _tensor(buffer: Any) -> Tensor:
    """A flat uint8 view of a buffer, without a copy."""
    import torch

    if isinstance(buffer, torch.Tensor):
        return buffer.view(-1).view(torch.uint8)
    view = memoryview(buffer)
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if view.readonly:
        import warnings

        with warnings.catch_warnings():  # collectives only read their input
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(view, dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)


def _nbytes(buffer: Any) -> int:
    return int(buffer.nbytes) if hasattr(buffer, "nbytes") else memoryview(buffer).nbytes


def _timeout_of(group: Any) -> float:
    """Seconds that the group's collectives may take."""
    import torch

    try:
        limit = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        limit = getattr(group, "_timeout", None)
    return limit.total_seconds() if isinstance(limit, timedelta) else DEFAULT_TIMEOUT


def _classify(text: str) -> tuple[type[CommError], str]:
    """Which of gradgen's errors a torch message means, and its first sentence without source paths and
    jokes.
    """
    first = re.sub(r"^\[[^]]*\]\s*", "", text.strip().splitlines()[0] if text.strip() else "unknown error")
    first = re.split(r"\. This is typically|GLHF", first)[0].strip()
    if _LATE.search(text):
        return CommTimeout, f"{first}; a rank did not arrive in time"
    if _LOST.search(text):
        return PeerLost, f"{first}; a rank has ended or left"
    return CommError, first
