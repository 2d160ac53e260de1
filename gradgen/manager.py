"""The Python side of a built model: its manager class, and what needs no C++.

A generated package calls `bind_package`; nothing here imports yaml, jinja2, jsonschema or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradgen.built import BaseConfig, Package, typed_values
from gradgen.device import CPU, OnStream, gpu_index
from gradgen.diagnostics import ConfigError, UsageError
from gradgen.records import WeightRecord, records, refuse_other_dtypes

if TYPE_CHECKING:
    from gradgen.plan import Plan


class BaseGradientManager:
    """Owns the gradients of one rank. See `docs/contract.md` for what it promises.

    config: dims and flags. comm: a communicator (None: one rank). strategy: an id of the spec's strategies.
    dtype: of the gradients that backward produces; accumulator: of sums (None: dtype); wire: of what travels (None: dtype for
    sharded blocks, the accumulator's for full ones); dtypes are "float32", "float64", "bfloat16", "float16".
    rounding, wire_rounding: "nearest" or "stochastic". seed: of stochastic rounding. divide: "mean" (over ranks), or the number
    that the sum over ranks and micro-steps is divided by. block_buffers: full-size blocks that exist at once when sharded.
    device: "cpu", "cuda" or "cuda:N". offload: (GPU) keep block shards in pinned host memory.
    nonfinite: what the end of a step does with inf and nan: "ignore", "skip" (see step_skipped) or "raise".
    Raises ConfigError for what the model or strategy cannot do, MismatchError where ranks differ.
    """

    _package: Package
    _strategies: tuple[str, ...]

    def __init__(
        self,
        config: Any,
        comm: Any = None,
        *,
        strategy: str | None = None,
        dtype: Any = "float32",
        accumulator: Any = None,
        wire: Any = None,
        device: Any = "cpu",
        rounding: str = "nearest",
        wire_rounding: str = "nearest",
        seed: int = 0,
        divide: float | str = "mean",
        block_buffers: int = 2,
        nonfinite: str = "ignore",
        offload: bool = False,
        poison: bool = False,
    ) -> None:
        from gradgen.comm import Communicator, single

        package = self._package
        if not isinstance(config, package.native.Config):
            raise TypeError(
                f"config must be a {package.native.model_name}.Config, got {type(config).__name__}"
            )
        gpu = CPU if device == "cpu" else gpu_index(device)
        if gpu != CPU and not hasattr(package.runtime, "nccl_communicator"):
            from gradgen.importer import wrong_device

            raise UsageError(wrong_device(package.folder, package.native.model_name, str(device)))
        comm = single() if comm is None else comm
        if not isinstance(comm, Communicator):
            raise TypeError(
                f"comm must be one rank's communicator, not {type(comm).__name__}; "
                "gradgen.comm.threads(n) makes n of them: pass comms[rank]"
            )
        strategy = self._strategies[0] if strategy is None else strategy
        try:
            if strategy not in self._strategies:
                name, known = package.native.model_name, ", ".join(self._strategies)
                raise ValueError(f"{name} has no strategy {strategy!r}; it has {known}")
            refuse_other_dtypes(
                package.model(),
                typed_values(package, config),
                _dtype(dtype),
                None if accumulator is None else _dtype(accumulator),
                rounding,
            )
            options = package.runtime.Options(
                dtype=_dtype(dtype),
                accumulator=None if accumulator is None else _dtype(accumulator),
                wire=None if wire is None else _dtype(wire),
                rounding=rounding,
                wire_rounding=wire_rounding,
                seed=seed,
                divide=_divide(divide),
                block_buffers=block_buffers,
                nonfinite=nonfinite,
                poison=poison,
                cuda=gpu,
                offload=offload,
            )
        except (TypeError, ValueError, ConfigError) as error:
            if comm.world_size > 1:  # the others wait for this rank in their constructors
                comm.native(package.runtime).abort(f"rank {comm.rank} could not build its manager: {error}")
            raise
        self.config = config
        self.comm = comm
        self.nonfinite = nonfinite
        self.on_start: list[Callable[[], None]] = []
        self.on_end: list[Callable[[], None]] = []
        self._options = {
            "dtype": _dtype(dtype),
            "accumulator": accumulator and _dtype(accumulator),
            "wire": wire and _dtype(wire),
        }
        self._rounding, self._block_buffers, self._offload = rounding, block_buffers, offload
        self._plan: dict[int, Plan] = {}
        self._records: list[WeightRecord] | None = None
        reached = comm.native(package.runtime) if gpu == CPU else comm.on_gpu(package.runtime, gpu)
        native = package.native.make_gradient_manager(config, reached, strategy, options)
        if gpu != CPU:
            native = OnStream(native, gpu)
            native.choose(None)
        self._native = native
        self.device: str = native.device
        # Bound methods of the native manager: a block costs one call, not two.
        self.block_full = native.block_full
        self.notify_block = native.notify_block
        self.non_block_full = native.non_block_full
        self.notify_non_block = native.notify_non_block
        self.block_shard = native.block_shard
        self.non_block_shard = native.non_block_shard
        self.named_gradients = native.named_gradients
        self.grad_norm = native.grad_norm
        self.clip_grad_norm_ = native.clip_grad_norm_
        self.scale_gradients = native.scale_gradients
        self.zero_grad = native.zero_grad
        self.reset = native.reset
        self.close = native.close
        self.trace = native.trace
        self.memory = native.memory
        self.strategy: str = native.strategy
        self.dtype: str = native.dtype
        self.accumulator: str = native.accumulator
        self.wire: str = native.wire
        self.direct: bool = native.direct
        self.rank: int = native.rank
        self.world_size: int = native.world_size
        self.blocks: dict[str, int] = native.blocks  # the counts of stacks
        self.layers: dict[str, tuple[int, ...]] = native.layers  # the indices of stacks that exist
        self._verify()

    # A step

    def start_micro_step(self, micro_step: int, micro_steps: int, divide: Any = None) -> None:
        """Begins micro-step `micro_step` of `micro_steps` (0-based). divide: replaces the divisor of this step from here on."""
        on_device = divide if getattr(divide, "is_cuda", False) and self.device != "cpu" else None
        self._native.start_micro_step(
            _index(micro_step, "micro_step"),
            _index(micro_steps, "micro_steps"),
            None if on_device is not None else _divide(divide),
        )
        if on_device is not None:
            self._native.set_divide(on_device)
        for callback in self.on_start:
            callback()

    def end_micro_step(self) -> None:
        """Ends a micro-step; at the last one every gradient is reduced when this returns."""
        for callback in self.on_end:
            callback()
        self._native.end_micro_step()

    @contextmanager
    def micro_step(self, micro_step: int, micro_steps: int, divide: Any = None) -> Iterator[Any]:
        """start_micro_step ... end_micro_step. An exception inside marks the manager failed on every rank: reset() mends it."""
        try:
            self.start_micro_step(micro_step, micro_steps, divide)
            yield self
            self.end_micro_step()
        except BaseException as error:
            if self._native.accumulating:  # else the step is over, and every rank knows what this one found
                where = f"rank {self.rank} left micro-step {micro_step} of {micro_steps}"
                self._native.fail(f"{where} with {type(error).__name__}: {error}"[:500])
            raise

    def set_divide(self, divide: Any) -> None:
        """Sets the divisor of the current step, for example the global token count once it is known. A number or a 0-dim tensor."""
        on_device = getattr(divide, "is_cuda", False) and self.device != "cpu"
        self._native.set_divide(divide if on_device else _divide(divide))

    def use_stream(self, stream: Any) -> None:
        """GPU: work goes on this stream (a torch.cuda.Stream, or a cudaStream_t as an integer; it must outlive the manager)
        instead of torch's current one, which None brings back.
        """
        if self.device == "cpu":
            raise UsageError("a manager on the CPU has no streams")
        self._native.choose(stream)

    # Saving and resuming

    @property
    def next_micro_step(self) -> int:
        """The micro-step that comes next in this step: after load_state_dict, where to go on."""
        return int(self._native.next_micro_step)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the step so far, between micro-steps or after the last: numbers, and flat copies of what was summed,
        by checkpoint name (torch tensors where torch is imported, else NumPy arrays). Padding is not in it. Every rank calls it.
        """
        from gradgen.state import save

        return save(self._native)

    def load_state_dict(self, states: Any) -> None:
        """Goes on where `states` was saved: this rank's state_dict, or a list of those of all ranks of the run that saved, whose
        number may be another. Collective. What cannot be restored exactly raises ValueError (MismatchError on the other ranks), and
        all ranks are then as after zero_grad().
        """
        from gradgen.state import load

        load(self._native, states)

    def all_gather(self, out: Any, input: Any) -> None:
        """out = every rank's input, in rank order. Contiguous tensors of the manager's device; on a GPU in stream order."""
        if self.device == "cpu":
            self.comm.all_gather(out, input)
        elif out.nbytes != input.nbytes * self.world_size or not (
            out.is_contiguous() and input.is_contiguous()
        ):
            raise ValueError("all_gather: out must hold world_size times input, both contiguous")
        else:
            self._native.all_gather(out.data_ptr(), input.data_ptr(), input.nbytes)

    # What is known

    @property
    def plan(self) -> Plan:
        """What this manager does, from the same planner as `gradgen plan`; for one micro-step a step (see plan_for)."""
        return self.plan_for(1)

    def plan_for(self, micro_steps: int) -> Plan:
        if micro_steps not in self._plan:
            from gradgen.plan import plan

            self._plan[micro_steps] = plan(
                self._package.model(),
                values=typed_values(self._package, self.config),
                dp=self.world_size,
                ga=micro_steps,
                strategy=self.strategy,
                rounding=self._rounding,
                block_buffers=self._block_buffers,
                offload=self._offload,
                transport=self._native.transport,
                **self._options,
            )
        return self._plan[micro_steps]

    def weights(self) -> list[WeightRecord]:
        """Every weight that exists in this configuration, in spec order, and then its buffers."""
        if self._records is None:
            values = typed_values(self._package, self.config)
            self._records = records(self._native.weights(), self._package.model(), values, self.layers)
        return list(self._records)

    @property
    def step(self) -> int:
        """Optimizer steps finished; part of the key of stochastic rounding."""
        return int(self._native.step)

    @step.setter
    def step(self, value: int) -> None:
        self._native.step = value

    @property
    def skipped_steps(self) -> int:
        """Steps with inf or nan in a gradient, where nonfinite is "skip" or "raise"."""
        return int(self._native.skipped_steps)

    @property
    def step_skipped(self) -> bool:
        """True after a step whose gradients must not be used (nonfinite="skip")."""
        return bool(self._native.step_skipped)

    @property
    def transport(self) -> str:
        return str(self._native.transport)

    def __repr__(self) -> str:
        name = self._package.native.model_name
        if not hasattr(self, "_native"):
            return f"<{name}.GradientManager that could not be built>"
        held = self.memory()["total"]
        ranks = f"rank {self.rank} of {self.world_size}"
        return f"<{name}.GradientManager {self.strategy} {self.dtype}, {ranks}, {held:,} bytes>"

    def _verify(self) -> None:
        """The planner and the manager must agree on every offset and every byte: what was printed is what was built."""
        from gradgen.plan import layout_text

        plan, memory = self.plan, self.memory()
        strategy = plan.strategy(self.strategy)
        planned = (
            strategy.full_bytes,
            strategy.shard_bytes,
            strategy.staging_bytes,
            strategy.receive_bytes,
            strategy.pinned_bytes,
        )
        allocated = tuple(memory[part] for part in ("full", "shards", "staging", "exchange", "pinned"))
        if layout_text(plan) != self._native.layout_text() or planned != allocated:
            raise RuntimeError(
                f"internal error, please report: {self._package.native.model_name} plans {planned} bytes "
                f"and allocated {allocated}\n"
                f"planned layout:\n{layout_text(plan)}\nmanager's layout:\n{self._native.layout_text()}"
            )


def bind_package(native: Any, package_file: str, strategies: tuple[str, ...]) -> tuple[type, type]:
    """The Config and GradientManager classes of a built model."""
    from gradgen.importer import runtime_module

    package = Package(native, Path(package_file).parent, runtime_module())
    config = type(
        "Config",
        (BaseConfig, native.Config),
        {"_package": package, "values": native.Config.values, "__doc__": BaseConfig.__doc__},
    )
    manager = type(
        "GradientManager",
        (BaseGradientManager,),
        {"_package": package, "_strategies": strategies, "__doc__": BaseGradientManager.__doc__},
    )
    return config, manager


def _dtype(dtype: Any) -> str:
    """ "bfloat16" from a name, a torch dtype or a NumPy dtype."""
    text = str(getattr(dtype, "__name__", dtype))
    return text.removeprefix("torch.")


def _divide(divide: Any) -> float | None:
    """None is the mean over ranks. Takes numbers and 0-dim tensors."""
    if divide is None or isinstance(divide, str):
        if divide in (None, "mean"):
            return None
        raise ValueError(f'divide must be "mean" or a positive number, got {divide!r}')
    if isinstance(divide, bool):
        raise TypeError("divide must be a number, not a bool")
    value = float(divide)
    if not 0 < value < float("inf"):
        raise ValueError(f"divide must be positive and finite, got {value}")
    return value


def _index(value: Any, name: str) -> int:
    import operator

    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not a bool")
    return operator.index(value)
