"""Dimension expressions: names, integers, + - * // %, comparisons, and/or/not, ceil_div, min, max.

Nothing in a spec is ever evaluated as code. Every node's value is bounded to 63 bits, so that no spec makes
the compiler compute for long and the C++ that is rendered from it cannot overflow where Python did not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradgen.expr_nodes import (
    BinOp,
    Bool,
    Call,
    Compare,
    Expr,
    ExprError,
    Logic,
    Name,
    Neg,
    Not,
    Num,
)

__all__ = [
    "BinOp",
    "Bool",
    "Call",
    "Compare",
    "Expr",
    "ExprError",
    "Logic",
    "Name",
    "Neg",
    "Not",
    "Num",
    "evaluate",
    "names",
    "parse",
    "short",
    "to_text",
]

MAX_LENGTH = 500
MAX_DEPTH = 40  # of parentheses, and of the tree: what reads it (here, in C++ rendering) recurses
LIMIT = 2**63 - 1
INDEX = "i"  # of a block in its stack: a name in `at` and in expressions of the block's weights
FUNCTIONS = {"ceil_div": 2, "min": -2, "max": -2}  # number of arguments; negative: at least that many

Env = Mapping[str, "int | bool"]

_TOKEN = re.compile(
    r"[ \t\r\n]*(?:(?P<num>[0-9]+)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<op>//|==|!=|<=|>=|[-+*%<>(),]))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("or",),
    ("and",),
    ("==", "!=", "<", "<=", ">", ">="),
    ("+", "-"),
    ("*", "//", "%"),
)
_ALLOWED = "names, integers, + - * // %, comparisons, and/or/not, ceil_div, min, max"
_NOT_LEVEL = 2  # `not` binds looser than comparisons and tighter than `and`


class _Parser:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise ExprError(
                f"the expression is {len(text)} characters long; at most {MAX_LENGTH} are allowed", 0
            )
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                start = at + len(text[at:]) - len(text[at:].lstrip())
                raise ExprError(f"unexpected {ascii(text[start])}; allowed are {_ALLOWED}", start)
            kind = str(match.lastgroup)
            self.tokens.append((kind, match[kind], match.start(kind)))
            at = match.end()
        self.tokens.append(("end", "the end", len(text)))
        self.position = 0
        self.depth = 0

    def peek(self) -> str:
        kind, text, _ = self.tokens[self.position]
        return text if kind != "end" else ""

    def fail(self, expected: str) -> ExprError:
        kind, text, offset = self.tokens[self.position]
        found = " at the end" if kind == "end" else f", found {text[:40]!r}"
        return ExprError(f"expected {expected}{found}", offset)

    def take(self, text: str) -> None:
        if self.peek() != text:
            raise self.fail(repr(text))
        self.position += 1

    def level(self, n: int) -> Expr:
        self.depth += 1
        if self.depth > MAX_DEPTH * (len(_LEVELS) + 2):
            raise ExprError("the expression is nested too deeply", self.tokens[self.position][2])
        try:
            if n == len(_LEVELS):
                return self.unary()
            if n == _NOT_LEVEL and self.peek() == "not":
                self.position += 1
                return Not(self.level(n))
            left = self.level(n + 1)
            while self.tokens[self.position][0] in ("op", "name") and self.peek() in _LEVELS[n]:
                op = self.peek()
                self.position += 1
                right = self.level(n + 1)
                if op in ("and", "or"):
                    left = Logic(op, left, right)
                elif n == 2:
                    left = Compare(op, left, right)
                    if self.peek() in _LEVELS[2]:
                        offset = self.tokens[self.position][2]
                        raise ExprError("comparisons cannot be chained; join them with `and`", offset)
                else:
                    left = BinOp(op, left, right)
            return left
        finally:
            self.depth -= 1

    def unary(self) -> Expr:
        kind, text, offset = self.tokens[self.position]
        if text == "-":
            self.position += 1
            self.depth += 1
            if self.depth > MAX_DEPTH * (len(_LEVELS) + 2):
                raise ExprError("the expression is nested too deeply", offset)
            inner = self.unary()
            self.depth -= 1
            return Neg(inner)
        if text == "(":
            self.position += 1
            expr = self.level(0)
            self.take(")")
            return expr
        if kind == "num":
            if len(text) > 19 or int(text) > LIMIT:
                raise ExprError("the number does not fit 63 bits", offset)
            self.position += 1
            return Num(int(text))
        if kind == "name" and text not in ("and", "or", "not"):
            self.position += 1
            if self.peek() == "(":
                return self.call(text, offset)
            return Bool(text == "true") if text in ("true", "false") else Name(text)
        raise self.fail("a name, a number or '('")

    def call(self, function: str, offset: int) -> Expr:
        if function not in FUNCTIONS:
            raise ExprError(f"unknown function {function!r}; there are {', '.join(FUNCTIONS)}", offset)
        self.take("(")
        arguments = [self.level(0)]
        while self.peek() == ",":
            self.position += 1
            arguments.append(self.level(0))
        self.take(")")
        wanted = FUNCTIONS[function]
        if (wanted > 0 and len(arguments) != wanted) or len(arguments) < abs(wanted):
            least = "at least " if wanted < 0 else ""
            message = f"{function} takes {least}{abs(wanted)} arguments, got {len(arguments)}"
            raise ExprError(message, offset)
        return Call(function, tuple(arguments))


def parse(text: str) -> Expr:
    """The expression that `text` spells. Raises ExprError with the offset of what is wrong."""
    parser = _Parser(text)
    if not parser.peek():
        raise ExprError("the expression is empty", 0)
    expr = parser.level(0)
    if parser.peek():
        raise parser.fail("an operator")
    layer: tuple[Expr, ...] = (expr,)
    for _ in range(MAX_DEPTH):
        layer = tuple(child for parent in layer for child in _children(parent))
    if layer:
        raise ExprError(f"the expression is more than {MAX_DEPTH} operations deep", 0)
    return expr


def names(expr: Expr) -> set[str]:
    """Every dim and flag that the expression mentions."""
    if isinstance(expr, Name):
        return {expr.name}
    found: set[str] = set()
    for child in _children(expr):
        found |= names(child)
    return found


def _children(expr: Expr) -> tuple[Expr, ...]:
    if isinstance(expr, (Neg, Not)):
        return (expr.operand,)
    if isinstance(expr, (BinOp, Compare, Logic)):
        return (expr.left, expr.right)
    return expr.arguments if isinstance(expr, Call) else ()


def evaluate(expr: Expr, env: Env) -> int | bool:
    """The value in `env`. Raises ExprError for unknown names, division by zero, results outside 63 bits."""
    if isinstance(expr, (Num, Bool)):
        return expr.value
    if isinstance(expr, Name):
        if expr.name not in env:
            raise ExprError(f"unknown name {expr.name[:80]!r}")
        return env[expr.name]
    if isinstance(expr, Not):
        return not evaluate(expr.operand, env)
    if isinstance(expr, Logic):
        left = bool(evaluate(expr.left, env))
        if left == (expr.op == "or"):
            return left
        return bool(evaluate(expr.right, env))
    if isinstance(expr, Compare):
        a, b = evaluate(expr.left, env), evaluate(expr.right, env)
        return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[expr.op]
    value = _arithmetic(expr, env)
    if abs(value) > LIMIT:
        raise ExprError(f"the value of {short(expr)} does not fit 63 bits")
    return value


def _arithmetic(expr: Expr, env: Env) -> int:
    if isinstance(expr, Neg):
        return -int(evaluate(expr.operand, env))
    if isinstance(expr, BinOp):
        a, b = int(evaluate(expr.left, env)), int(evaluate(expr.right, env))
        if expr.op in ("//", "%"):
            if b == 0:
                raise ExprError(f"division by zero in {short(expr)}")
            return a // b if expr.op == "//" else a % b
        return a + b if expr.op == "+" else a - b if expr.op == "-" else a * b
    assert isinstance(expr, Call)
    values = [int(evaluate(argument, env)) for argument in expr.arguments]
    if expr.function == "ceil_div":
        if values[1] == 0:
            raise ExprError(f"division by zero in {short(expr)}")
        return -(-values[0] // values[1])
    return min(values) if expr.function == "min" else max(values)


_BINDING = {"or": 1, "and": 2, "not": 3, "+": 5, "-": 5, "*": 6, "//": 6, "%": 6, "neg": 7}
_BINDING |= dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), 4)


def to_text(expr: Expr) -> str:
    """Canonical text: parse(to_text(e)) == e, and equal expressions have equal texts."""
    return _text(expr)[0]


def short(expr: Expr) -> str:
    """to_text as a message shows it: never long."""
    text = to_text(expr)
    return text if len(text) <= 80 else text[:77] + "..."


def _text(expr: Expr) -> tuple[str, int]:
    if isinstance(expr, Num):
        return str(expr.value), 9
    if isinstance(expr, Bool):
        return ("true" if expr.value else "false"), 9
    if isinstance(expr, Name):
        return expr.name, 9
    if isinstance(expr, Call):
        return f"{expr.function}({', '.join(to_text(a) for a in expr.arguments)})", 9
    if isinstance(expr, (Neg, Not)):
        inner, binds = _text(expr.operand)
        own = _BINDING["neg" if isinstance(expr, Neg) else "not"]
        inner = f"({inner})" if binds < own else inner
        return (f"-{inner}" if isinstance(expr, Neg) else f"not {inner}"), own
    own = _BINDING[expr.op]
    left, left_binds = _text(expr.left)
    right, right_binds = _text(expr.right)
    left = f"({left})" if left_binds < own or (own == 4 and left_binds == 4) else left
    right = f"({right})" if right_binds <= own else right
    return f"{left} {expr.op} {right}", own
