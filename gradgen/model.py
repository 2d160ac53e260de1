"""The meaning of a spec: frozen values that say what was declared, with no C++ text and no sizes inside.

`resolve` is the only writer. Everything downstream (plan, render, infer, torch) reads these values. Every entity
carries the `Place` it came from, so that a failure anywhere can point back at the user's file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradgen.expr import Expr


@dataclass(frozen=True)
class Place:
    """A position in a spec, 1-based, as editors count."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Dim:
    """A positive integer that a configuration supplies, or that a default derives from other dims."""

    name: str
    hf: str | None  # key of a transformers config
    default: Expr | None
    place: Place
    min: int = 1  # 0 or 1
    hf_others: tuple[str, ...] = ()  # keys that stand for it where `hf` is not there


@dataclass(frozen=True)
class Flag:
    """A yes/no choice of a configuration. `default` None: the configuration must supply it."""

    name: str
    hf: str | None
    default: bool | None
    place: Place
    hf_model_types: tuple[tuple[str, bool], ...] = ()  # the value where a transformers model type implies it


@dataclass(frozen=True)
class Requirement:
    that: Expr
    because: str
    place: Place


@dataclass(frozen=True)
class Preset:
    name: str
    values: tuple[tuple[str, int | bool], ...]
    place: Place


@dataclass(frozen=True)
class Tie:
    """This weight is the same tensor as `weight`, always or `when` an expression holds."""

    weight: str
    when: Expr | None
    place: Place
    block: str | None = None  # that the owner is in; None: the same block, or outside the blocks
    at: Expr | None = None  # the owner's index in `block`


@dataclass(frozen=True)
class Shard:
    """How ranks divide a weight: `flat` slices of its block's arena, `rows` in units of k, or `whole` on every rank."""

    kind: str = "flat"  # flat | rows | whole
    rows: int = 1


@dataclass(frozen=True)
class Part:
    """A slice of a fused weight that is a tensor of its own on disk."""

    name: str  # whole, with {i} and {e}
    size: Expr
    dim: int


@dataclass(frozen=True)
class Facts:
    """What a manager does not need for its sums, and others do: checkpoints, optimizers, parallel strategies."""

    disk: str | None = None  # whole name on disk, with {i} and {e}; None: the one in memory
    parts: tuple[Part, ...] = ()
    decay: bool = True
    group: str = "data"  # data | expert
    tp: str | int = "none"  # sum | avg | none, or the dimension that is sharded
    dtype: str | None = None
    accumulator: str | None = None
    rounding: str | None = None


@dataclass(frozen=True)
class Weight:
    id: str
    shape: tuple[Expr, ...]
    name: str  # checkpoint name; within a block it is relative to the block's name
    zero: Expr | None  # the condition under which the first touch needs zeros; None: never
    place: Place
    when: Expr | None = None  # the weight exists only when this holds
    trainable: Expr | None = None  # None: always
    tied_to: Tie | None = None
    uses: Expr | None = None  # contributions a micro-step; None: not declared (one, or more in a row)
    may_be_absent: bool = False
    shard: Shard = field(default_factory=Shard)
    experts: Expr | None = None  # that many weights, with {e} in their names
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class Buffer:
    """A tensor that is stored and has no gradient."""

    id: str
    shape: tuple[Expr, ...]
    name: str
    place: Place
    when: Expr | None = None


@dataclass(frozen=True)
class Block:
    id: str
    count: Expr
    name: str  # with {i} for the index
    weights: tuple[Weight, ...]
    place: Place
    uses: Expr | None = None
    at: Expr | tuple[int, ...] | None = None  # which indices of 0 .. count - 1 exist; None: all
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True)
class Backward:
    """One step of the order in which gradients become ready: a weight outside the blocks, or stacks that are visited
    together, the highest index first (at one index, in the order of `blocks`)."""

    weight: str | None
    blocks: tuple[str, ...]
    place: Place


@dataclass(frozen=True)
class Strategy:
    id: str
    blocks: str  # full | sharded
    non_blocks: str  # full | sharded
    collective: str  # reduce_scatter | all_to_all | all_reduce
    place: Place


@dataclass(frozen=True)
class Model:
    name: str
    summary: str
    dims: tuple[Dim, ...]  # in an order in which defaults can be evaluated
    flags: tuple[Flag, ...]
    require: tuple[Requirement, ...]
    presets: tuple[Preset, ...]
    weights: tuple[Weight, ...]  # outside the blocks
    blocks: tuple[Block, ...]
    backward: tuple[Backward, ...]
    strategies: tuple[Strategy, ...]
    file: str
    buffers: tuple[Buffer, ...] = ()  # outside the blocks
