"""From kinds of blocks to the blocks of a spec: kinds that differ in a few weights are one block with conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gradgen.infer_facts import EXPERT, Facts, Parameter
from gradgen.infer_ids import kind_words, stack_ids, weight_ids
from gradgen.infer_indices import rule
from gradgen.infer_stacks import Kind, Structure


@dataclass(frozen=True)
class Entry:
    """One weight of the spec. `parameter` is its first occurrence, `relative` its name in the block."""

    id: str
    relative: str
    parameter: Parameter
    indices: tuple[int, ...] = ()  # of the blocks that have it; () outside
    when: str = ""
    experts: int = 0  # of which this entry stands for all; `relative` has {e}
    switch: str = (
        ""  # the key of a configuration that makes this weight; it is not there as the configuration is
    )


@dataclass(frozen=True)
class Stack:
    """One block of the spec."""

    id: str
    prefix: str
    count: int
    at: str | list[int]  # "" for all
    indices: tuple[int, ...]
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        return f"{self.prefix}.{{i}}"


def outside_entries(facts: Facts, found: Structure, taken: Sequence[str]) -> tuple[Entry, ...]:
    plain = [Entry("", p.name, p) for p in found.outside]
    return with_biases(facts, _named(plain, outside=True, taken=taken))


def _named(entries: Sequence[Entry], outside: bool = False, taken: Sequence[str] = ()) -> tuple[Entry, ...]:
    """With ids; weights that each of several experts has are one entry."""
    joined = _experts(entries)
    names = [entry.relative.replace("experts.{e}.", "expert.") for entry in joined]
    ids = weight_ids(names, outside, taken)
    return tuple(replace(entry, id=ids[name]) for entry, name in zip(joined, names, strict=True))


def _experts(entries: Sequence[Entry]) -> list[Entry]:
    """`experts.0.up.weight`, `experts.1.up.weight`, ... of one shape become `experts.{e}.up.weight`."""
    groups: dict[str, dict[int, Entry]] = {}
    for entry in entries:
        found = EXPERT.search(entry.relative)
        if found and len(EXPERT.findall(entry.relative)) == 1:
            groups.setdefault(EXPERT.sub(r"\1experts.{e}.", entry.relative), {})[int(found[2])] = entry
    joined: dict[str, Entry] = {}  # by the relative name of the first expert's
    gone: set[str] = set()
    for name, members in groups.items():
        first = members.get(0)
        alike = {
            (m.parameter.shape, m.parameter.trainable, m.parameter.owner, m.indices, m.when)
            for m in members.values()
        }
        if (
            first is None
            or first.parameter.owner
            or len(alike) > 1
            or sorted(members) != list(range(len(members)))
        ):
            continue
        joined[first.relative] = replace(first, relative=name, experts=len(members))
        gone.update(m.relative for m in members.values())
    return [joined.get(e.relative, e) for e in entries if e.relative in joined or e.relative not in gone]


def with_biases(facts: Facts, entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries, and after each weight the bias that it has where a yes/no key is turned over."""
    out: list[Entry] = []
    taken = {entry.id for entry in entries}
    for entry in entries:
        out.append(entry)
        if entry.parameter.leaf != "weight" or entry.parameter.owner:
            continue
        name = f"{entry.parameter.name.removesuffix('weight')}bias"
        for switch in facts.switches:
            id = f"{entry.id.removesuffix('_proj')}_bias"
            if switch.harmless and name in switch.added and id not in taken:
                bias = Parameter(name, switch.added[name], True, "", entry.parameter.module)
                relative = f"{entry.relative.removesuffix('weight')}bias"
                out.append(Entry(id, relative, bias, entry.indices, entry.when, switch=switch.key))
                taken.add(id)
                break
    return tuple(out)


def stacks(facts: Facts, found: Structure) -> tuple[Stack, ...]:
    """The blocks in the order of the model, kinds of one stack side by side."""
    causal = any(
        word in facts.summary for word in ("CausalLM", "LMHead", "TextModel", "ConditionalGeneration")
    )
    groups = [(prefix, list(kinds)) for prefix, kinds in groupby(found.kinds, key=lambda kind: kind.prefix)]
    names = stack_ids([prefix for prefix, _ in groups], causal, taken=())
    out: list[Stack] = []
    for prefix, kinds in groups:
        merged = _merge(kinds)
        if merged is not None:
            out.append(replace(merged, id=names[prefix]))
            continue
        words = kind_words([[kind.relative(p) for p in kind.weights] for kind in kinds])
        out += [
            replace(_one(kind), id=f"{names[prefix]}_{word}" if word else names[prefix])
            for kind, word in zip(kinds, words, strict=True)
        ]
    return tuple(replace(stack, entries=with_biases(facts, stack.entries)) for stack in out)


def _one(kind: Kind) -> Stack:
    entries = _named([Entry("", kind.relative(p), p, kind.indices) for p in kind.weights])
    return Stack("", kind.prefix, len(kind.stack), rule(kind.indices, kind.stack), kind.indices, entries)


def _merge(kinds: Sequence[Kind]) -> Stack | None:
    """One block for kinds that differ in few weights, none of which has two shapes; None where they differ in more."""
    if len(kinds) == 1:
        return _one(kinds[0])
    union: dict[str, tuple[Parameter, set[int]]] = {}
    order: list[str] = []
    for kind in kinds:
        last = -1
        for p in kind.weights:
            name = kind.relative(p)
            if name not in union:
                union[name] = (p, set())
                order.insert(last + 1, name)
            first = union[name][0]
            inner = p.owner.removeprefix(kind.block(kind.indices[0]))
            other = first.owner.removeprefix(first.name.removesuffix(name))
            if (first.shape, first.trainable, other) != (p.shape, p.trainable, inner):
                return None
            union[name][1].update(kind.indices)
            last = order.index(name)
    stack = kinds[0].stack
    optional = [name for name in order if union[name][1] != set(stack)]
    if len(optional) > max(1, (len(order) - len(optional)) // 4):
        return None
    rules = {name: rule(sorted(union[name][1]), stack) for name in optional}
    if not all(isinstance(text, str) for text in rules.values()):
        return None
    entries = _named(
        [
            Entry("", name, union[name][0], tuple(sorted(union[name][1])), str(rules.get(name, "")))
            for name in order
        ]
    )
    return Stack("", kinds[0].prefix, len(stack), "", stack, entries)


@dataclass(frozen=True)
class BufferEntry:
    """One buffer of the spec."""

    id: str
    relative: str
    buffer: Parameter  # its first occurrence
    when: str = ""


def buffers(
    facts: Facts, blocks: Sequence[Stack], outside: Sequence[Entry]
) -> tuple[list[BufferEntry], dict[str, list[BufferEntry]], list[str]]:
    """Buffers outside the blocks, those of each block by its id, and the names of those that no rule describes."""
    places = {f"{block.prefix}.{index}": (block, index) for block in blocks for index in block.indices}
    inside: dict[str, dict[str, dict[int, Parameter]]] = {}
    free: list[Parameter] = []
    for buffer in facts.buffers:
        parts = buffer.name.split(".")
        place = next((p for n in range(len(parts)) if (p := places.get(".".join(parts[:n])))), None)
        if place is None:
            free.append(buffer)
        else:
            block, index = place
            relative = buffer.name.removeprefix(f"{block.prefix}.{index}.")
            inside.setdefault(block.id, {}).setdefault(relative, {})[index] = buffer
    left: list[str] = []
    found: dict[str, list[BufferEntry]] = {}
    for block in blocks:
        rules: dict[str, str] = {}
        for relative, own in inside.get(block.id, {}).items():
            text = rule(sorted(own), block.indices)
            if len({b.shape for b in own.values()}) > 1 or not isinstance(text, str):
                left += [b.name for b in own.values()]
            else:
                rules[relative] = text
        ids = weight_ids(list(rules), outside=False, taken=[entry.id for entry in block.entries])
        for relative, text in rules.items():
            first = next(iter(inside[block.id][relative].values()))
            found.setdefault(block.id, []).append(BufferEntry(ids[relative], relative, first, text))
    taken = [*(block.id for block in blocks), *(entry.id for entry in outside)]
    ids = weight_ids([b.name for b in free], outside=True, taken=taken)
    return [BufferEntry(ids[b.name], b.name, b) for b in free], found, left
