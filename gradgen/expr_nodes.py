"""The nodes of dimension expressions: a frozen tree. `gradgen.expr` parses, evaluates and prints them."""

from __future__ import annotations

from dataclasses import dataclass


class ExprError(ValueError):
    """What is wrong with an expression. `offset`: 0-based, in its text; -1 when it is about a value."""

    def __init__(self, message: str, offset: int = -1) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


@dataclass(frozen=True)
class Num:
    value: int


@dataclass(frozen=True)
class Bool:
    value: bool


@dataclass(frozen=True)
class Name:
    name: str


@dataclass(frozen=True)
class Neg:
    operand: Expr


@dataclass(frozen=True)
class Not:
    operand: Expr


@dataclass(frozen=True)
class BinOp:
    op: str  # + - * // %
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Compare:
    op: str  # == != < <= > >=
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Logic:
    op: str  # and, or
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Call:
    function: str
    arguments: tuple[Expr, ...]


Expr = Num | Bool | Name | Neg | Not | BinOp | Compare | Logic | Call
