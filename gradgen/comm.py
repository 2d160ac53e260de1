"""Communicators: how the ranks of a data-parallel run reach each other.

    comm = gradgen.comm.single()           # one rank
    comms = gradgen.comm.threads(4)        # four ranks in one process; comms[r] belongs to the thread that plays rank r
    comm = gradgen.comm.from_torch()       # the torch.distributed group that torchrun set up

A communicator is made here and opened by the runtime of the manager that it is given to. It can also be used by itself:
`comm.all_reduce(tensor)`, `comm.reduce_scatter(out, input)`, `comm.all_to_all(out, input)`, `comm.all_gather(out, input)`,
`comm.barrier()`, `comm.gather_objects(bytes)`. Tensors are contiguous host memory: NumPy arrays, torch tensors, gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

DEFAULT_TIMEOUT = 600.0  # seconds, for ranks of one process


class Communicator:
    """One rank's end. `timeout` (seconds) bounds every wait for another rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        open_native: Callable[[Any], Any],
        open_gpu: Callable[[Any, Any, int], Any] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._open_native = open_native
        self._open_gpu = open_gpu
        self._on_gpu: dict[int, Any] = {}
        self._native: Any = None
        self._runtime: Any = None

    def native(self, runtime: Any = None) -> Any:
        """The runtime's communicator. Opened once: all managers of a process share one runtime."""
        if self._native is None:
            if runtime is None:
                from gradgen.importer import runtime_module

                runtime = runtime_module()
            self._native, self._runtime = self._open_native(runtime), runtime
        elif runtime is not None and runtime is not self._runtime:
            from gradgen.diagnostics import StateError

            raise StateError(
                "this communicator is open in another gradgen runtime: all modules of a process must be built by one gradgen; "
                "rebuild them with `gradgen build`"
            )
        return self._native

    def on_gpu(self, runtime: Any, index: int) -> Any:
        """The communicator that managers on GPU `index` use: NCCL where ranks are processes. Collective when it is opened."""
        host = self.native(runtime)
        if self._open_gpu is None or self.world_size == 1:
            return host
        if index not in self._on_gpu:
            self._on_gpu[index] = self._open_gpu(runtime, host, index)
        return self._on_gpu[index]

    @property
    def transport(self) -> str:
        """ "single", "threads", "shared" (ranks map each other's memory) or "group" (the process group's own collectives)."""
        return str(self.native().transport)

    def all_gather(self, out: Any, input: Any) -> None:
        """out = every rank's input, in rank order."""
        self.native().all_gather(out, input)

    def all_to_all(self, out: Any, input: Any) -> None:
        """Slice r of input goes to rank r; slice r of out comes from rank r."""
        self.native().all_to_all(out, input)

    def reduce_scatter(self, out: Any, input: Any) -> None:
        """out = the sum over ranks of slice `rank` of input, in rank order in fp32, rounded once."""
        self.native().reduce_scatter(out, input)

    def all_reduce(self, tensor: Any) -> None:
        """In place: the sum over ranks, in rank order in fp32, rounded once."""
        self.native().all_reduce(tensor)

    @property
    def shares_memory(self) -> bool:
        """True where ranks read each other's memory: `gather_in_place` works."""
        return bool(self.native().shares_memory)

    def allocate(self, nbytes: int) -> Any:
        """Zeroed host memory with the buffer protocol, which the other ranks can read in `gather_in_place`."""
        return self.native().allocate(nbytes)

    def gather_in_place(self, memory: Any, owned: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Every rank has memory of one layout from `allocate`, and rank r has written `owned[r]` of it, (first byte, bytes)
        each: copies the others' parts from their memory into this rank's. One copy a byte. Raises StateError over a process group
        that does not share memory, MismatchError when ranks pass different `owned`.
        """
        self.native().gather_in_place(memory, owned)

    def barrier(self) -> None:
        self.native().barrier()

    def gather_objects(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes (of any length), in rank order."""
        return list(self.native().gather_objects(mine))

    def abort(self, why: str) -> None:
        """Wakes every rank that waits with a CommError that says why; reset() on every rank makes it usable again."""
        self.native().abort(why)

    def reset(self) -> None:
        self.native().reset()

    def close(self) -> None:
        """Leaves. Ranks that wait for this one get PeerLost."""
        for gpu in self._on_gpu.values():
            gpu.close()
        if self._native is not None:
            self._native.close()

    def __repr__(self) -> str:
        return f"<gradgen communicator: rank {self.rank} of {self.world_size}>"


class Threads(Sequence[Communicator]):
    """The communicators of n ranks in one process, indexed by rank."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self._lock = threading.Lock()
        self._natives: dict[int, list[Any]] = {}

        def opener(rank: int) -> Callable[[Any], Any]:
            def open_native(runtime: Any) -> Any:
                with self._lock:
                    if id(runtime) not in self._natives:
                        self._natives[id(runtime)] = runtime.threads_communicators(world_size, timeout)
                    return self._natives[id(runtime)][rank]

            return open_native

        self._ranks = [Communicator(rank, world_size, timeout, opener(rank)) for rank in range(world_size)]

    def __getitem__(self, rank: Any) -> Any:
        return self._ranks[rank]

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._ranks)


def single() -> Communicator:
    """One rank, alone."""
    return Communicator(0, 1, DEFAULT_TIMEOUT, lambda runtime: runtime.single_communicator())


def threads(n: int, timeout: float = DEFAULT_TIMEOUT) -> Threads:
    """n ranks in one process, one a thread. Raises ValueError for n < 1 or a timeout that is not positive (seconds)."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"threads(n) takes the number of ranks, an integer, not {n!r}")
    if n < 1:
        raise ValueError(f"threads(n) needs at least one rank, got {n}")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a positive, finite number of seconds, got {timeout}")
    return Threads(n, timeout)


def from_torch(
    process_group: Any = None, timeout: float | None = None, transport: str = "auto"
) -> Communicator:
    """The ranks of a torch.distributed group, the default one when None. Collective: every rank of the group calls it.

    transport: "shared" maps the memory of the other ranks (all on one host); "group" uses the group's own collectives;
    "auto" takes "shared" where every rank can, else "group" on every rank. `timeout` in seconds, the group's own when None.
    Raises StateError without a default group, ValueError when this rank is not in the group, CommError when the group is gone.
    """
    if transport not in ("auto", "shared", "group"):
        raise ValueError(f"transport must be 'auto', 'shared' or 'group', got {transport!r}")
    from gradgen.comm_torch import TorchTransport, default_group_info, host_group

    info = default_group_info(process_group)
    limit = info.timeout if timeout is None else timeout
    if not 0 < limit < float("inf"):
        raise ValueError(f"timeout must be a positive, finite number of seconds, got {limit}")

    def open_native(runtime: Any) -> Any:
        if info.world == 1:
            return runtime.single_communicator()
        # Small messages need a backend for host memory, which a group of NCCL alone has not.
        small = host_group(process_group) if info.backend == "nccl" else process_group
        group = TorchTransport(small, limit)
        if transport != "group":
            from gradgen.diagnostics import CommError

            try:
                return runtime.shared_communicator(info.rank, info.world, limit, group.gather_objects)
            except CommError:
                if transport == "shared":
                    raise
        return runtime.group_communicator(info.rank, info.world, group)

    def open_gpu(runtime: Any, host: Any, index: int) -> Any:
        if not hasattr(runtime, "nccl_communicator"):
            return host  # built for the CPU: the manager says so
        return runtime.nccl_communicator(host, index, limit, find_nccl())

    return Communicator(info.rank, info.world, limit, open_native, open_gpu)


def find_nccl() -> str:
    """The libnccl of this process: GRADGEN_NCCL, else the one that torch loaded, else the system's by name."""
    import os

    named = os.environ.get("GRADGEN_NCCL")
    if named:
        return named
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if path.startswith("/") and os.path.basename(path).startswith("libnccl.so"):
                return path
    return "libnccl.so.2"
