"""Finds the stacks of a model in its parameter names, and the kinds of blocks in each stack.

A number in a name is an index: `model.layers.3.mlp.up_proj.weight` is weight `mlp.up_proj.weight` of block 3 of
`model.layers`. Blocks with the same weights, shapes and frozen parts are one kind, whatever they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradgen.infer_facts import Parameter, word_set

STACK_WORDS = word_set("layers layer blocks block h stages stage encoders decoders groups resblocks")
MAX_LONE = 64  # numbered single parameters up to here stand outside the blocks


@dataclass(frozen=True)
class Kind:
    """Blocks of one stack that have the same weights: one block of the spec."""

    prefix: str  # of the stack, without its index: "model.layers"
    indices: tuple[int, ...]
    stack: tuple[int, ...]  # the indices of all kinds of the stack
    weights: tuple[Parameter, ...]  # of the first block, names whole

    @property
    def name(self) -> str:
        return f"{self.prefix}.{{i}}"

    def block(self, index: int) -> str:
        return f"{self.prefix}.{index}."

    def relative(self, parameter: Parameter) -> str:
        return parameter.name.removeprefix(self.block(self.indices[0]))


@dataclass(frozen=True)
class Structure:
    outside: tuple[Parameter, ...]
    kinds: tuple[Kind, ...]  # by stack, in the order of their first blocks


def structure(parameters: Sequence[Parameter]) -> Structure:
    """Every parameter stands outside or belongs to one block of one kind."""
    kinds: list[Kind] = []
    outside: set[str] = set()
    _divide(parameters, 0, kinds, outside)
    return Structure(tuple(p for p in parameters if p.name in outside), tuple(kinds))


def _divide(parameters: Sequence[Parameter], depth: int, kinds: list[Kind], outside: set[str]) -> None:
    """`depth`: how many components of the names are settled."""
    stacks: dict[str, dict[int, list[Parameter]]] = {}
    for parameter in parameters:
        parts = parameter.name.split(".")
        at = next((k for k in range(depth, len(parts) - 1) if is_index(parts[k])), None)
        if at is None:
            outside.add(parameter.name)
        else:
            stacks.setdefault(".".join(parts[:at]), {}).setdefault(int(parts[at]), []).append(parameter)
    for prefix, blocks in stacks.items():
        _stack(prefix, blocks, kinds, outside)


def is_index(part: str) -> bool:
    return part.isdecimal() and part.isascii() and str(int(part)) == part


def _stack(prefix: str, blocks: dict[int, list[Parameter]], kinds: list[Kind], outside: set[str]) -> None:
    depth = len(prefix.split(".")) + 1 if prefix else 1
    groups: dict[frozenset[tuple[object, ...]], list[int]] = {}
    for index, members in sorted(blocks.items()):
        groups.setdefault(signature(prefix, index, members), []).append(index)
    inner = [_inner(p.name, depth) for members in blocks.values() for p in members]
    word = prefix.rpartition(".")[2]
    alike = len(groups) < len(blocks)
    if all(at == depth for at in inner) or (not alike and any(at is not None for at in inner)):
        for members in blocks.values():  # stages: what repeats lies deeper
            _divide(members, depth, kinds, outside)
        return
    lone = all(len(members) == 1 for members in blocks.values()) and len(blocks) <= MAX_LONE
    named = any(part in word for part in STACK_WORDS if len(part) > 1) or word in STACK_WORDS
    whole = sorted(blocks) == list(range(len(blocks)))
    if lone or not prefix or not whole or not (alike or named):
        outside.update(p.name for members in blocks.values() for p in members)
        return
    stack = tuple(sorted(blocks))
    kinds.extend(
        Kind(prefix, tuple(indices), stack, tuple(blocks[indices[0]])) for indices in groups.values()
    )


def signature(prefix: str, index: int, members: Iterable[Parameter]) -> frozenset[tuple[object, ...]]:
    """What makes two blocks alike. A tie inside of a block counts by its relative name, one to the outside by its name."""
    start = f"{prefix}.{index}."
    return frozenset(
        (p.name.removeprefix(start), p.shape, p.trainable, p.owner.removeprefix(start)) for p in members
    )


def _inner(name: str, depth: int) -> int | None:
    """Where the next index of a name stands, counted in components."""
    parts = name.split(".")
    return next((k for k in range(depth, len(parts) - 1) if is_index(parts[k])), None)
