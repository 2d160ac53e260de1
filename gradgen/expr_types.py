"""What an expression yields, and when two sizes are the same: questions about expressions without values."""

from __future__ import annotations

from collections.abc import Mapping

from gradgen.expr import (
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
    short,
    to_text,
)

INTEGER, TRUTH = "an integer", "true or false"
MAX_TERMS = 64


def kind(expr: Expr, kinds: Mapping[str, str]) -> str | None:
    """INTEGER or TRUTH, None where an unknown name decides. `kinds` has the names' own.

    Raises ExprError where the two are mixed: `layers and tied` reads as if it meant something, and
    `tied * hidden` would be 0 or `hidden` in silence.
    """
    if isinstance(expr, (Num, Bool)):
        return TRUTH if isinstance(expr, Bool) else INTEGER
    if isinstance(expr, Name):
        return kinds.get(expr.name)
    if isinstance(expr, (Not, Logic)):
        for operand in (expr.operand,) if isinstance(expr, Not) else (expr.left, expr.right):
            _want(operand, TRUTH, "not" if isinstance(expr, Not) else expr.op, kinds)
        return TRUTH
    if isinstance(expr, Compare):
        left, right = kind(expr.left, kinds), kind(expr.right, kinds)
        if left and right and left != right:
            raise ExprError(f"`{short(expr)}` compares {left} with {right}")
        if TRUTH in (left, right) and expr.op not in ("==", "!="):
            raise ExprError(f"`{short(expr)}` orders true and false")
        return TRUTH
    if isinstance(expr, Neg):
        _want(expr.operand, INTEGER, "-", kinds)
        return INTEGER
    for operand in expr.arguments if isinstance(expr, Call) else (expr.left, expr.right):
        _want(operand, INTEGER, expr.function if isinstance(expr, Call) else expr.op, kinds)
    return INTEGER


def _want(operand: Expr, wanted: str, operator: str, kinds: Mapping[str, str]) -> None:
    got = kind(operand, kinds)
    if got is not None and got != wanted:
        cure = "; compare it with something" if wanted == TRUTH else ""
        raise ExprError(f"`{operator}` takes {wanted}, and `{short(operand)}` is {got}{cure}")


def same_size(a: Expr, b: Expr) -> bool:
    """Whether two sizes are equal for all values: sums and products are compared as polynomials."""
    return a == b or _polynomial(a) == _polynomial(b)


_Terms = dict[tuple[str, ...], int]  # {sorted factors: coefficient}


def _polynomial(expr: Expr) -> _Terms:
    terms = _terms(expr)
    return {factors: count for factors, count in terms.items() if count} or {(): 0}


def _terms(expr: Expr) -> _Terms:
    if isinstance(expr, Num):
        return {(): expr.value}
    if isinstance(expr, Neg):
        return {factors: -count for factors, count in _terms(expr.operand).items()}
    if isinstance(expr, BinOp) and expr.op in ("+", "-", "*"):
        left, right = _terms(expr.left), _terms(expr.right)
        out: _Terms = {}
        if expr.op == "*" and len(left) * len(right) <= MAX_TERMS:
            for a, x in left.items():
                for b, y in right.items():
                    factors = tuple(sorted(a + b))
                    out[factors] = out.get(factors, 0) + x * y
            return out
        if expr.op != "*":
            out = dict(left)
            for factors, count in right.items():
                out[factors] = out.get(factors, 0) + (count if expr.op == "+" else -count)
            return out
    return {(to_text(expr),): 1}
