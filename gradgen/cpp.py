"""How C++ spells what a model means: identifiers, literals, comments and expressions.

The only place that knows. Nothing of a spec reaches generated code except through a function of this module,
so that no text of a spec, whatever it holds, can change a token of it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradgen.cpp_words import KEYWORDS, MACROS, OWN
from gradgen.expr import LIMIT, BinOp, Bool, Call, Compare, Expr, Logic, Name, Neg, Not, Num

DIM_RANGE = (1, 1 << 31)
INT64 = (-LIMIT, LIMIT)


def identifier(name: str) -> str:
    """`name` as a C++ identifier: with `w_` before it where C++, a macro or generated code needs the word.

    Injective: the prefix is also put before names that would be the result of a prefixing.
    """
    stem = name
    while stem.startswith("w_"):
        stem = stem[2:]
    return "w_" + name if _is_taken(stem) else name


def _is_taken(name: str) -> bool:
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is not None
    return (
        not plain
        or name in KEYWORDS
        or name in MACROS
        or name in OWN
        or "__" in name
        or re.fullmatch(r"[A-Z][A-Z0-9_]+|[A-Z][A-Z0-9]+_\w+|I|M_\w+", name) is not None
        or re.fullmatch(r"k[A-Z].*|.*(Block|Weight|Weights|Manager)", name) is not None
    )


def type_names(ids: Iterable[str]) -> dict[str, str]:
    """decoder -> Decoder, mtp_head -> MtpHead. Ids that would get the same name keep their own spelling."""
    names = {name: "".join(part[:1].upper() + part[1:] for part in name.split("_")) for name in ids}
    counts: dict[str, int] = {}
    for pascal in names.values():
        counts[pascal] = counts.get(pascal, 0) + 1
    return {name: pascal if counts[pascal] == 1 else name for name, pascal in names.items()}


def string(text: str) -> str:
    """A string literal: printable ASCII as it is, every other byte of its UTF-8 in octal, and no trigraph."""
    out = []
    previous = ""
    for byte in text.encode("utf-8", "backslashreplace"):
        char = chr(byte)
        if char in '"\\' or (char == "?" and previous == "?"):
            out.append("\\" + char)
        elif 0x20 <= byte < 0x7F:
            out.append(char)
        else:
            out.append(f"\\{byte:03o}")
        previous = char
    return '"' + "".join(out) + '"'


def comment(text: str) -> str:
    """The text of a one-line comment: no line ends or control characters, nothing that continues it."""
    shown = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in text)
    shown = re.sub(r"\?(?=\?)", "? ", " ".join(shown.split())).replace("*/", "* /").replace("/*", "/ *")
    while shown.endswith("\\"):
        shown = shown[:-1].rstrip() + "/"
    return shown


def boolean(value: bool) -> str:
    return "true" if value else "false"


def integer(value: int) -> str:
    return str(value)


@dataclass(frozen=True)
class Spelled:
    """An expression in C++ with the precedence of its outermost operator and the range of its values."""

    text: str
    level: int
    low: int = 0
    high: int = 1
    boolean: bool = False

    def at(self, level: int) -> str:
        return self.text if self.level >= level else f"({self.text})"


ATOM, UNARY, PRODUCT, SUM, RELATION, EQUALITY, AND, OR = 9, 8, 7, 6, 5, 4, 3, 2


def expression(expr: Expr, names: Mapping[str, Spelled]) -> str:
    """C++ for `expr`: the values that the spec's own evaluation gives, or a ConfigError where that fails.

    Plain operators are used where the operands' ranges (dims are 1 to 2^31) show that they mean the same: no
    overflow, and no negative operand of a division. Elsewhere the runtime's checked functions are called.
    """
    return _spell(expr, names).text


def condition(expr: Expr, names: Mapping[str, Spelled]) -> str:
    """C++ of type bool for `expr`; integers are true unless they are 0."""
    spelled = _spell(expr, names)
    return spelled.text if spelled.boolean else f"{spelled.at(RELATION)} != 0"


def dim(text: str, least: int = 1) -> Spelled:
    return Spelled(text, ATOM, least, DIM_RANGE[1])


def index(text: str) -> Spelled:
    """The index of a block in its stack."""
    return Spelled(text, ATOM, 0, DIM_RANGE[1])


def flag(text: str) -> Spelled:
    return Spelled(text, ATOM, boolean=True)


def _spell(expr: Expr, names: Mapping[str, Spelled]) -> Spelled:
    match expr:
        case Num(value):
            return Spelled(integer(value), ATOM if value >= 0 else UNARY, value, value)
        case Bool(value):
            return Spelled(boolean(value), ATOM, int(value), int(value), boolean=True)
        case Name(name):
            return names[name]
        case Not(operand):
            return Spelled("!" + _spell(operand, names).at(UNARY), UNARY, boolean=True)
        case Neg(operand):
            return _arithmetic("-", Spelled("0", ATOM, 0, 0), _spell(operand, names))
        case BinOp(op, left, right):
            return _arithmetic(op, _spell(left, names), _spell(right, names))
        case Compare(op, left, right):
            level = EQUALITY if op in ("==", "!=") else RELATION
            a, b = _spell(left, names), _spell(right, names)
            return Spelled(f"{a.at(level + 1)} {op} {b.at(level + 1)}", level, boolean=True)
        case Logic(op, left, right):
            sign, level = ("&&", AND) if op == "and" else ("||", OR)
            return Spelled(
                f"{_side(_spell(left, names), level)} {sign} {_side(_spell(right, names), level)}",
                level,
                boolean=True,
            )
        case Call(function, arguments):
            return _call(function, [_spell(argument, names) for argument in arguments])
    raise TypeError(f"no C++ for {expr!r}")


def _side(operand: Spelled, level: int) -> str:
    """`a || (b && c)` needs no parentheses, but compilers warn without."""
    return operand.text if operand.level == level or operand.level > AND else f"({operand.text})"


FUNCTIONS = {"+": "checked_add", "-": "checked_sub", "*": "checked_mul", "//": "floor_div", "%": "floor_mod"}


def _arithmetic(op: str, a: Spelled, b: Spelled) -> Spelled:
    a, b = _integer(a), _integer(b)
    divides = op in ("//", "%")
    low, high = _range(op, a, b)
    fits = low >= INT64[0] and high <= INT64[1]
    if fits and a.low == a.high and b.low == b.high and low == high:
        return Spelled(integer(low), ATOM if low >= 0 else UNARY, low, high)
    low, high = (min(max(bound, INT64[0]), INT64[1]) for bound in (low, high))
    if divides and not (a.low >= 0 and b.low >= 1) or not fits:
        return Spelled(f"{FUNCTIONS[op]}({a.text}, {b.text})", ATOM, low, high)
    level = SUM if op in ("+", "-") else PRODUCT
    sign = "/" if op == "//" else op
    if op == "-" and (a.low, a.high, a.text) == (0, 0, "0"):
        return Spelled(f"-{b.at(UNARY + 1)}", UNARY, low, high)
    return Spelled(f"{a.at(level)} {sign} {b.at(level + 1)}", level, low, high)


def _integer(a: Spelled) -> Spelled:
    """Flags and comparisons count as 0 and 1, with room for what is added to them."""
    return Spelled(f"std::int64_t{{{a.text}}}", ATOM, a.low, a.high) if a.boolean else a


def _range(op: str, a: Spelled, b: Spelled) -> tuple[int, int]:
    """Bounds of the result where it exists; wide ones where a divisor may be zero or negative."""
    if op == "+":
        return a.low + b.low, a.high + b.high
    if op == "-":
        return a.low - b.high, a.high - b.low
    if op == "*":
        corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return min(corners), max(corners)
    if b.low < 1:
        size = max(abs(a.low), abs(a.high), abs(b.low), abs(b.high))
        return -size - 1, size + 1
    if op == "%":
        return (a.low % b.low, a.low % b.low) if a.low == a.high and b.low == b.high else (0, b.high - 1)
    corners = [x // y for x in (a.low, a.high) for y in (b.low, b.high)]
    return min(corners), max(corners)


def _call(function: str, arguments: list[Spelled]) -> Spelled:
    texts = ", ".join(argument.text for argument in arguments)
    if function in ("min", "max"):
        pick = min if function == "min" else max
        low, high = pick(a.low for a in arguments), pick(a.high for a in arguments)
        return Spelled(f"std::{function}<std::int64_t>({{{texts}}})", ATOM, low, high)
    if function == "ceil_div":
        a, b = arguments
        low, high = _range("//", Spelled("", ATOM, -a.high, -a.low), b)
        return Spelled(f"ceil_div({texts})", ATOM, -high, -low)
    raise TypeError(f"no C++ for the function {function!r}")
