"""Which blocks of a stack a kind has, as a rule that reads well: `i < 3`, `i % 4 == 3`, or the list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

Rule = tuple[str, Callable[[int], bool]]


def rule(indices: Sequence[int], stack: Sequence[int]) -> str | list[int]:
    """The shortest rule that picks `indices` out of `stack`, or the indices themselves. "" for all."""
    wanted = set(indices)
    if wanted == set(stack):
        return ""
    for text, holds in _rules(sorted(wanted), sorted(stack)):
        if {i for i in stack if holds(i)} == wanted:
            return text
    return sorted(wanted)


def _rules(wanted: list[int], stack: list[int]) -> Iterator[Rule]:
    first, last = wanted[0], wanted[-1]
    if len(wanted) == 1:
        yield f"i == {first}", lambda i: i == first
    if len(stack) - len(wanted) == 1:
        missing = next(i for i in stack if i not in wanted)
        if missing not in (stack[0], stack[-1]):
            yield f"i != {missing}", lambda i: i != missing
    yield f"i < {last + 1}", lambda i: i <= last
    yield f"i >= {first}", lambda i: i >= first
    yield f"i >= {first} and i < {last + 1}", lambda i: first <= i <= last
    for period in range(2, min(12, len(stack)) + 1):
        for phase in range(period):
            for text, holds in _periodic(period, phase):
                yield text, holds
                if first > stack[0]:
                    yield f"i >= {first} and {text}", lambda i, holds=holds: i >= first and holds(i)  # type: ignore[misc]
                if last < stack[-1]:
                    yield f"i < {last + 1} and {text}", lambda i, holds=holds: i <= last and holds(i)  # type: ignore[misc]
    for text, holds in _two_periods(len(stack)):
        yield text, holds


def _two_periods(length: int) -> Iterator[Rule]:
    """Only where a stack is long enough to show them twice."""
    for period in range(3, min(12, length // 2) + 1):
        for a, b in combinations(range(period), 2):
            yield f"i % {period} == {a} or i % {period} == {b}", lambda i, p=period, s=(a, b): i % p in s  # type: ignore[misc]
            yield f"i % {period} != {a} and i % {period} != {b}", lambda i, p=period, s=(a, b): i % p not in s  # type: ignore[misc]
    for short in (2, 3, 4):
        for long in range(2 * short, min(12, length // 2) + 1, short):
            for a in range(short):
                for b in range(a, long, short):
                    yield (
                        f"i % {short} == {a} and i % {long} != {b}",
                        lambda i, s=short, n=long, a=a, b=b: i % s == a and i % n != b,  # type: ignore[misc]
                    )


def _periodic(period: int, phase: int) -> Iterator[Rule]:
    yield f"i % {period} == {phase}", lambda i: i % period == phase
    if period > 2:
        yield f"i % {period} != {phase}", lambda i: i % period != phase


def bounded_by(text: str, dims: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Versions of `i < 3` and `i >= 3` with a dim instead of the number, and the dim."""
    text = "i < 1" if text == "i == 0" else text
    for comparison in ("i < ", "i >= "):
        if text.startswith(comparison) and text.removeprefix(comparison).isdecimal():
            number = int(text.removeprefix(comparison))
            for name, value in dims.items():
                if value == number and value > 0:
                    yield f"{comparison}{name}", name
