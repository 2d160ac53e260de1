"""An elementwise torch optimizer on this rank's shards: optimizer state, and the work of the update,
divided by the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from gradgen.diagnostics import StateError, UsageError
from gradgen.torch.gather import InPlaceGather, PackedGather, divided
from gradgen.torch.housing import house
from gradgen.torch.names import Rename, match
from gradgen.torch.shards import Shard, collect, exchange
from gradgen.torch.types import Manager

NoDecay = Callable[[str, torch.Tensor], bool] | Collection[str] | None

_ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_REASONS = {
    "Adafactor": "it keeps row and column sums of each matrix",
    "Muon": "it orthogonalises each matrix",
    "LBFGS": "it needs a closure and the whole parameter vector",
    "SparseAdam": "it needs sparse gradients",
}


class ShardedOptimizer(torch.optim.Optimizer):
    """`cls(shards, **kw)` on this rank's shards of the model's parameters; the updated parameters are
    gathered.

    model, grads: as given to `attach`; parameters are fp32 or bf16, contiguous, and equal on all ranks
        (checked by a checksum).
    no_decay: weights that get weight_decay=0: a predicate of (name, parameter), or checkpoint names; None:
        those for which the spec says `decay: false`; (): none.
    master: keep this rank's shards in the accumulator's dtype too, and step those; None: when the
        parameters' dtype is another.
    elementwise: vouch for a class that gradgen does not know. gather_bytes: of one rank's piece of a
        collective, where ranks do not share memory.

    Where ranks read each other's memory (threads, processes of one host), the constructor moves the parameters'
    values into memory of the communicator: `p.data` is then a view of it, so that an update reaches the other ranks
    with one copy. The Parameter objects, their ties and hooks stay; views that were taken of them before do not
    follow, and a forked child shares the memory with its parent. Parameters that overlap other tensors of the
    model stay where they are and are gathered through a buffer.

    Constructing and `step` are collective. Raises AttachError, MismatchError (which names the parameters
    that differ between ranks) and UsageError for an optimizer that is not elementwise, unless ranks own
    whole weights.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        model: torch.nn.Module,
        grads: Manager,
        *,
        no_decay: NoDecay = None,
        master: bool | None = None,
        elementwise: bool = False,
        rename: Rename = None,
        gather_bytes: int | None = None,
        **kw: Any,
    ) -> None:
        if not isinstance(cls, type):
            raise UsageError(
                "pass the optimizer's class and its arguments, not an instance: "
                f"ShardedOptimizer(torch.optim.{type(cls).__name__}, model, grads, ...)"
            )
        if gather_bytes is None:  # a buffer that caches hold, or one that fills the links between GPUs
            gather_bytes = 2 << 20 if grads.device == "cpu" else 64 << 20
        self._grads = grads
        pairs = match(model, grads, rename)
        self._first = pairs[0].record if pairs else None
        self._shards = collect(pairs, grads)
        ranks = exchange(self._shards, grads)
        total = {s.name: s.parameter.numel() for s in self._shards}
        cut = any(numel not in (0, total[name]) for entries in ranks for name, (_, numel) in entries.items())
        _check_class(cls, elementwise or not cut)
        self._gathers: list[Callable[[], None]] = []
        moving = {s.name for s in divided(self._shards, ranks)}
        housing, housed = house([p for p in pairs if p.name in moving], model, grads.comm)
        if housing is not None:
            self._shards = collect(pairs, grads)  # the parameters lie elsewhere now
            direct = [s for s in self._shards if s.name in housed]
            self._gathers.append(InPlaceGather(direct, ranks, housing))
        packed = [s for s in self._shards if s.name in moving - housed]
        if packed:
            self._gathers.append(PackedGather(packed, ranks, grads.rank, grads.all_gather, gather_bytes))
        self._own = [s for s in self._shards if s.numel]
        self._local = [_local(shard, master) for shard in self._own]
        if no_decay is None:
            no_decay = {pair.name for pair in pairs if not pair.record.decay}
        self.inner = cls(_groups(self._own, self._local, no_decay), **kw)
        self.skipped = 0  # steps left out because of non-finite gradients
        self._memory = [(p.name, p.parameter, p.parameter.data_ptr(), p.parameter.dtype) for p in pairs]
        self._used = grads.step  # gradients of the steps before this one have been consumed or dropped
        self._built = False
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self._built = True
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: None = None, *, max_norm: float | None = None) -> Any:  # type: ignore[override]
        """Clips to `max_norm` (L2 over all weights and ranks), updates this rank's shards, gathers the
        parameters.

        Returns the norm before clipping when `max_norm` is given, else None. A step with a non-finite
        gradient on any rank is left out on all of them when the manager has nonfinite="skip".
        """
        if closure is not None:
            raise UsageError(
                "closures are not supported: run the micro-steps first, then step() or step(max_norm=...)"
            )
        self._look()
        self._check()
        if self._grads.step_skipped:
            self.skipped += 1
            return self._grads.grad_norm() if max_norm is not None else None
        norm = self._grads.clip_grad_norm_(max_norm) if max_norm is not None else None
        self.inner.step()
        for shard, local in zip(self._own, self._local, strict=True):
            if local.data_ptr() != shard.values.data_ptr():
                shard.values.copy_(local)
        for gather in self._gathers:
            gather()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the manager's gradients, pending micro-steps too. No memory is written; nothing is set to
        None.
        """
        self._grads.zero_grad()
        self._used = self._grads.step

    def state_dict(self) -> dict[str, Any]:
        """This rank's optimizer state: tensors and plain values. `shards` says what each entry of the state
        belongs to.
        """
        return {
            "rank": self._grads.rank,
            "world_size": self._grads.world_size,
            "shards": self._layout(),
            "master": [
                local.detach()
                for local, shard in zip(self._local, self._own, strict=True)
                if _is_copy(local, shard)
            ],
            "optimizer": self.inner.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`, for the same rank, world size and strategy; nothing is changed when it
        raises ValueError.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"load_state_dict takes the dict that this rank's state_dict() gave, not a {type(state_dict).__name__}; "
                "optimizer state is divided like the gradients: resume at the number of ranks that saved it"
            )
        for key, want in (
            ("world_size", self._grads.world_size),
            ("rank", self._grads.rank),
            ("shards", self._layout()),
        ):
            have = state_dict.get(key)
            if have != want:
                detail = "" if key == "shards" else f": saved {have}, here {want}"
                raise ValueError(f"the optimizer state belongs to another {key.replace('_', ' ')}{detail}")
        copies = [
            local for local, shard in zip(self._local, self._own, strict=True) if _is_copy(local, shard)
        ]
        if len(state_dict["master"]) != len(copies):
            raise ValueError("the optimizer state was saved with another choice of master=")
        self.inner.load_state_dict(state_dict["optimizer"])
        with torch.no_grad():
            for local, saved in zip(copies, state_dict["master"], strict=True):
                local.copy_(saved)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while constructing: the manager knows the weights of its spec, no others."""
        if self._built:
            raise UsageError(
                "parameters cannot be added later: a gradient manager holds the weights of its spec"
            )
        super().add_param_group(param_group)

    def _look(self) -> None:
        """Lets the manager say when its gradients cannot be read now, and zero them after zero_grad()."""
        if self._first is not None:
            if self._first.block is None:
                self._grads.non_block_shard(self._first.id)
            else:
                self._grads.block_shard(self._first.layer or 0, self._first.block)

    def _check(self) -> None:
        """There are new gradients, and the parameters still lie where this optimizer updates them."""
        if self._grads.step == self._used:
            raise StateError("no gradients for this step: run the micro-steps first, once for every step()")
        for name, parameter, address, dtype in self._memory:
            if parameter.data_ptr() != address or parameter.dtype != dtype:
                raise StateError(
                    f"{name}: its memory was replaced after ShardedOptimizer was made (model.to(), .half(), "
                    "p.data = ..., another ShardedOptimizer on another communicator): convert the model first, then attach "
                    "it and make the optimizer"
                )
        self._used = self._grads.step

    def _layout(self) -> list[list[Any]]:
        """[name, offset, numel] of every entry, in the order of the inner optimizer's indices."""
        where = {id(local): shard for local, shard in zip(self._local, self._own, strict=True)}
        ordered = [where[id(p)] for group in self.inner.param_groups for p in group["params"]]
        return [[shard.name, shard.offset, shard.numel] for shard in ordered]


def _check_class(cls: type, any_will_do: bool) -> None:
    name = cls.__name__
    known = cls.__module__.startswith("torch.optim")
    if known and name in ("LBFGS", "SparseAdam"):
        raise UsageError(f"torch.optim.{name} cannot be used here: {_REASONS[name]}")
    if any_will_do or any(
        c.__name__ in _ELEMENTWISE and c.__module__.startswith("torch.optim") for c in cls.__mro__
    ):
        return
    reason = _REASONS.get(
        name,
        "gradgen does not know that it is; pass elementwise=True if it updates each element by itself",
    )
    raise UsageError(
        f"{name} is not an elementwise optimizer ({reason}), and ranks hold parts of weights; "
        f"use one of {', '.join(_ELEMENTWISE)}, or a strategy under which ranks own whole weights"
    )


def _local(shard: Shard, master: bool | None) -> torch.nn.Parameter:
    """What the inner optimizer steps: a view of the parameter, or a copy in the accumulator's dtype; with
    its gradient set.
    """
    accumulator, own = shard.gradient.dtype, shard.values.dtype
    if master is False and accumulator != own:
        raise UsageError(
            f"{shard.name}: {own} parameters and {accumulator} gradients need master=True (or None)"
        )
    place = shard.gradient.device  # the host, where shards are offloaded
    copy = accumulator != own or place != shard.values.device if master is None else master
    values = shard.values.to(place, accumulator, copy=True) if copy else shard.values
    local = torch.nn.Parameter(values, requires_grad=True)
    local.grad = shard.gradient
    return local


def _is_copy(local: torch.Tensor, shard: Shard) -> bool:
    return local.data_ptr() != shard.values.data_ptr()


def _groups(shards: list[Shard], local: list[torch.nn.Parameter], no_decay: NoDecay) -> list[dict[str, Any]]:
    if not no_decay:
        return [{"params": local}]
    if isinstance(no_decay, str):
        raise UsageError(
            "no_decay takes a predicate of (name, parameter) or checkpoint names, not one string"
        )
    exempt = no_decay if callable(no_decay) else (lambda name, _: name in no_decay)
    plain = [p for s, p in zip(shards, local, strict=True) if exempt(s.name, s.parameter)]
    chosen = {id(p) for p in plain}
    return [{"params": [p for p in local if id(p) not in chosen]}, {"params": plain, "weight_decay": 0.0}]
