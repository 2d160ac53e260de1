"""The plan: where every gradient lies, what a strategy costs, and which collectives run in which order.

    plan = gradgen.plan("specs/llama.yaml", preset="llama-3.2-1b", dp=8, ga=4)

Everything is computed per kind of block, so a model of 126 layers costs no more than one of 2. All bytes are
per rank and are gradients only: parameters, optimizer states and activations are not the manager's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradgen import layout, plan_cost, plan_order
from gradgen.configure import ConcreteModel, ConcreteWeight, configure, materialize
from gradgen.configure import preset as preset_values
from gradgen.diagnostics import UsageError
from gradgen.layout import Arena, Slot
from gradgen.model import Model
from gradgen.plan_cost import DTYPES, ROUNDINGS, TRANSPORTS, Collective, Settings, StrategyPlan
from gradgen.plan_order import Run

__all__ = [
    "Arena",
    "Collective",
    "Plan",
    "Run",
    "Slot",
    "StrategyPlan",
    "layout_text",
    "lower",
    "plan",
    "verify",
]


@dataclass(frozen=True)
class Plan:
    model: str
    summary: str
    values: tuple[tuple[str, int | bool], ...]  # the configuration: dims and flags
    settings: Settings
    arenas: tuple[Arena, ...]  # weights outside blocks, then kinds of blocks, in spec order
    order: tuple[Run, ...]  # in which gradients become ready
    strategies: tuple[StrategyPlan, ...]

    @property
    def dp(self) -> int:
        return self.settings.dp

    @property
    def ga(self) -> int:
        return self.settings.ga

    @property
    def backward(self) -> tuple[str, ...]:
        """Ids of arenas in the order in which the first gradients of each become ready."""
        return tuple(dict.fromkeys(run.unit for run in self.order))

    def arena(self, unit: str) -> Arena:
        for arena in self.arenas:
            if arena.id == unit:
                return arena
        known = ", ".join(arena.id for arena in self.arenas)
        raise UsageError(f"{self.model} has no weight or block {unit!r} with gradients; it has {known}")

    def strategy(self, strategy: str | None = None) -> StrategyPlan:
        for candidate in self.strategies:
            if strategy in (None, candidate.id):
                return candidate
        known = ", ".join(candidate.id for candidate in self.strategies)
        raise UsageError(f"{self.model} has no strategy {strategy!r}; it has {known}")

    def trace(self, strategy: str | None = None) -> tuple[Collective, ...]:
        """The collectives of one step, in order: a function of spec, strategy and settings alone."""
        order = [(self.arena(run.unit), run.layers) for run in self.order]
        return tuple(plan_cost.trace(self.strategy(strategy), order, self.settings, self.model))

    def to_json(self) -> dict[str, Any]:
        """Plain data for `gradgen plan --json`."""
        data = asdict(self)
        data["scope"] = "gradients only"
        data["values"] = dict(self.values)
        for entry, arena in zip(data["arenas"], self.arenas, strict=True):
            entry["padding"], entry["count"] = arena.padding, arena.count
            entry["layers"] = layout.spans(arena.layers) if arena.kind == "block" else None
        data["backward"] = self.backward
        data["order"] = [[run.unit, *run.layers] for run in self.order]
        for entry, strategy in zip(data["strategies"], self.strategies, strict=True):
            entry["memory_bytes"] = strategy.memory_bytes
        return data


def plan(
    spec: str | Path | Model,
    *,
    preset: str | None = None,
    values: Mapping[str, int | bool] | None = None,
    dp: int = 1,
    ga: int = 1,
    strategy: str | None = None,
    dtype: str = "float32",
    accumulator: str | None = None,
    wire: str | None = None,
    rounding: str = "nearest",
    block_buffers: int = 2,
    transport: str = "group",
    offload: bool = False,
) -> Plan:
    """Plans `spec` (a path or a resolved model) for a preset, for `values` of dims and flags, or for both.

    Where both are given, `values` change the preset's. `dp` ranks, `ga` micro-steps a step; `strategy` None
    plans all of the spec's. Raises SpecError, UsageError, and ConfigError for values that no such model has.
    """
    settings = Settings(
        dp, ga, dtype, accumulator or dtype, wire, rounding, block_buffers, transport, offload
    )
    _check(settings)
    model = spec if isinstance(spec, Model) else _load(spec)
    config = configure(model, _values(model, preset, values))
    return lower(model, config.values, materialize(model, config), settings, strategy)


def lower(
    model: Model,
    values: Mapping[str, int | bool],
    concrete: ConcreteModel,
    settings: Settings,
    strategy: str | None = None,
) -> Plan:
    """The planner proper: concrete sizes in, verified plan out."""
    arenas = [
        layout.arena("weight", weight.id, 1, [weight], settings.dp)
        for weight in concrete.weights
        if _owns(weight)
    ]
    for block in concrete.blocks:
        weights = [weight for weight in block.weights if _owns(weight)]
        if weights and block.count:
            arenas.append(layout.arena("block", block.unit, block.layers, weights, settings.dp))
    chosen = [candidate for candidate in model.strategies if strategy in (None, candidate.id)]
    if not chosen:
        known = ", ".join(candidate.id for candidate in model.strategies)
        raise UsageError(f"{model.name} has no strategy {strategy!r}; it has {known}")
    if settings.offload and settings.dp > 1:  # only shards of blocks are offloaded
        chosen = [candidate for candidate in chosen if candidate.blocks == "sharded"]
        if not chosen:
            raise UsageError(
                f"offload keeps shards of blocks on the host, and {strategy or 'every strategy of ' + model.name} keeps "
                "blocks whole; choose a strategy with blocks: sharded"
            )
    costs = tuple(plan_cost.cost(candidate, arenas, settings) for candidate in chosen)
    result = Plan(
        model.name,
        model.summary,
        tuple(values.items()),
        settings,
        tuple(arenas),
        plan_order.order(model, concrete, {arena.id for arena in arenas}),
        costs,
    )
    verify(result)
    return result


def verify(plan: Plan) -> None:
    """Checks the plan's invariants. A failure is a bug of gradgen and says which."""
    for arena in plan.arenas:
        layout.verify(arena)
    runs: dict[str, list[Sequence[int]]] = {arena.id: [] for arena in plan.arenas}
    for run in plan.order:
        runs[run.unit].append(run.layers)
    for arena in plan.arenas:
        parts = runs[arena.id]
        whole = len(parts) == 1 and parts[0][::-1] == arena.layers
        if not whole and sorted(layer for part in parts for layer in part) != list(arena.layers):
            raise AssertionError(
                f"internal error: the order of {arena.kind} {arena.id!r} does not name each layer once: {parts}"
            )


def layout_text(plan: Plan) -> str:
    """The canonical text that ranks compare at start; equal to the runtime's describe_layout."""
    return layout.text(plan.arenas, plan.dp)


def _owns(weight: ConcreteWeight) -> bool:
    return weight.trainable and weight.tie is None


def _check(settings: Settings) -> None:
    """Refuses what no manager can be built with; names what is allowed."""
    for name in ("dp", "ga", "block_buffers"):
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} must be a positive integer, not {value!r}")
    choices = {
        "dtype": DTYPES,
        "accumulator": DTYPES,
        "wire": DTYPES,
        "rounding": ROUNDINGS,
        "transport": TRANSPORTS,
    }
    for name, allowed in choices.items():
        value = getattr(settings, name)
        if value not in allowed and not (name == "wire" and value is None):
            raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    if settings.rounding == "stochastic" and DTYPES[settings.accumulator] != 2:
        raise UsageError(
            f"stochastic rounding needs a bfloat16 or float16 accumulator, not {settings.accumulator}"
        )
    for wire, source in (
        (settings.wire_of(True), settings.dtype),
        (settings.wire_of(False), settings.accumulator),
    ):
        if wire != source and DTYPES[wire] >= DTYPES[source]:
            raise UsageError(f"the wire dtype {wire} is not narrower than what is sent, {source}")


def _values(
    model: Model, preset: str | None, values: Mapping[str, int | bool] | None
) -> dict[str, int | bool]:
    """The preset's values, changed by `values`."""
    if preset is None:
        if not values and model.dims:
            known = ", ".join(candidate.name for candidate in model.presets) or "none"
            wanted = " ".join(f"--set {dim.name}=N" for dim in model.dims if dim.default is None)
            raise UsageError(
                f"{model.name} needs a preset or values of its dims; presets: {known}"
                + (f"; values: {wanted}" if wanted else "")
            )
        return dict(values or {})
    return preset_values(model, preset) | dict(values or {})


def _load(path: str | Path) -> Model:
    from gradgen.resolve import check

    return check(path)
