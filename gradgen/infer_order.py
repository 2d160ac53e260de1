"""The order in which gradients become ready: as a backward pass showed it, else the reverse of the declarations."""

from __future__ import annotations

from collections.abc import Sequence

from gradgen.infer_blocks import Entry, Stack
from gradgen.infer_facts import Facts

Item = str | list[str]  # a weight outside the blocks, or the blocks that are visited together


def backward(facts: Facts, outside: Sequence[Entry], blocks: Sequence[Stack]) -> list[tuple[Item, bool]]:
    """Items of `backward`, and whether each is a list of blocks."""
    if facts.backward is None:
        return _reversed(facts, outside, blocks)
    done = {name: place for place, name in enumerate(facts.backward.order)}
    end = len(done)
    spans: dict[str, list[int]] = {}  # of the completions in each stack, by prefix
    for block in blocks:
        starts = tuple(f"{block.prefix}.{index}." for index in block.indices)
        places = [place for name, place in done.items() if name.startswith(starts)]
        spans.setdefault(block.prefix, []).extend(places)
    groups = _interleaved(spans)
    rows: list[tuple[float, int, Item, bool]] = []
    for n, prefixes in enumerate(groups):
        last = max((place for prefix in prefixes for place in spans[prefix]), default=end)
        ids = [block.id for prefix in prefixes for block in blocks if block.prefix == prefix]
        rows.append((last, n, ids, True))
    for n, entry in enumerate(reversed(outside)):
        if entry.parameter.owner:
            rows.append((-1.0, n, entry.id, False))  # another use of a tensor whose owner is complete later
        else:
            place = done.get(entry.parameter.name, end)
            # One that is complete between the blocks of a stack comes after it: blocks do not wait for it then.
            for prefixes in groups:
                places = [p for prefix in prefixes for p in spans[prefix]]
                if places and min(places) < place < max(places):
                    place = max(places)
            rows.append((place + 0.5, n, entry.id, False))
    return [(item, many) for _, _, item, many in sorted(rows, key=lambda row: (row[0], row[1]))]


def _interleaved(spans: dict[str, list[int]]) -> list[list[str]]:
    """Stacks whose blocks are visited in turns, as one group. Those whose order is not known stand alone."""
    groups: list[list[str]] = []
    reach: list[tuple[int, int]] = []
    for prefix in sorted(spans, key=lambda prefix: min(spans[prefix], default=1 << 60)):
        places = spans[prefix]
        if places and reach and min(places) < reach[-1][1]:
            groups[-1].append(prefix)
            reach[-1] = (reach[-1][0], max(reach[-1][1], max(places)))
        else:
            groups.append([prefix])
            reach.append((min(places), max(places)) if places else (0, 0))
    return groups


def _reversed(facts: Facts, outside: Sequence[Entry], blocks: Sequence[Stack]) -> list[tuple[Item, bool]]:
    first: dict[str, int] = {}
    for place, parameter in enumerate(facts.parameters):
        for block in blocks:
            if parameter.name.startswith(f"{block.prefix}."):
                first.setdefault(block.prefix, place)
        first.setdefault(parameter.name, place)
    rows: list[tuple[int, Item, bool]] = [
        (first[prefix], [block.id for block in blocks if block.prefix == prefix], True)
        for prefix in dict.fromkeys(block.prefix for block in blocks)
    ]
    rows += [(first[entry.parameter.name], entry.id, False) for entry in outside]
    return [(item, many) for _, item, many in sorted(rows, key=lambda row: row[0], reverse=True)]


def open_at_once(facts: Facts, blocks: Sequence[Stack]) -> int:
    """The most blocks that have some of their gradients and not all: so many buffers a sharded strategy needs."""
    if facts.backward is None:
        return 0
    names: dict[str, tuple[str, int]] = {}
    for block in blocks:
        for entry in block.entries:
            for index in entry.indices:
                names[f"{block.prefix}.{index}.{entry.relative}"] = (block.prefix, index)
    spans: dict[tuple[str, int], list[int]] = {}
    for place, name in enumerate(facts.backward.order):
        if name in names:
            span = spans.setdefault(names[name], [place, place])
            span[1] = place
    ends = [span[1] for span in spans.values()]
    return max((sum(a <= end <= b for a, b in spans.values()) for end in ends), default=0)
