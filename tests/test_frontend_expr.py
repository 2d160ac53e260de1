"""Dimension expressions: what they yield, what is refused, and that their text is canonical."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    evaluate,
    names,
    parse,
    to_text,
)
from gradgen.expr_types import INTEGER, TRUTH, kind, same_size

ENV = {"hidden": 512, "heads": 8, "tied": True, "bias": False}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),
        ("7 // 2 // 2", 1),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("7 % -3", -2),
        ("--3", 3),
        ("2 * -3", -6),
        ("hidden // heads", 64),
        ("ceil_div(hidden + 1, heads)", 65),
        ("ceil_div(-7, 2)", -3),
        ("min(3, 1, 2) + max(3, 5)", 6),
        ("hidden % heads == 0", True),
        ("not tied or bias", False),
        ("not (tied and bias)", True),
        ("tied == true and bias != true", True),
        ("not hidden == 512", False),
        ("1 < 2 and 2 <= 2 and 3 > 2 and 3 >= 3", True),
        ("false and 1 // 0 == 1", False),
        ("true or 1 // 0 == 1", True),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775807", -(2**63) + 1),
        (" \n hidden\t", 512),
    ],
)
def test_value(text, value):
    got = evaluate(parse(text), ENV)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "offset", "said"),
    [
        ("", 0, "the expression is empty"),
        ("9**9**9", 2, "expected a name, a number or '(', found '*'"),
        ("__import__('os')", 11, 'unexpected "\'"'),
        ("a.b()", 1, "unexpected '.'"),
        ("f(1)", 0, "unknown function 'f'; there are ceil_div, min, max"),
        ("1 / 2", 2, "unexpected '/'"),
        ("1.5", 1, "unexpected '.'"),
        ("1e5", 1, "expected an operator, found 'e5'"),
        ("٣", 0, "unexpected '\\u0663'"),
        ("9223372036854775808", 0, "the number does not fit 63 bits"),
        ("9" * 400, 0, "the number does not fit 63 bits"),
        ("(" * 300, 40, "the expression is nested too deeply"),
        ("-" * 400 + "1", 274, "the expression is nested too deeply"),
        ("+".join("1" * 60), 0, "the expression is more than 40 operations deep"),
        ("1" + " " * 500, 0, "the expression is 501 characters long; at most 500 are allowed"),
        ("a if b else c", 2, "expected an operator, found 'if'"),
        ("min(1)", 0, "min takes at least 2 arguments, got 1"),
        ("ceil_div(1, 2, 3)", 0, "ceil_div takes 2 arguments, got 3"),
        ("a == b == c", 7, "comparisons cannot be chained"),
        ("not", 3, "expected a name, a number or '(' at the end"),
        ("a and", 5, "expected a name, a number or '(' at the end"),
        ("{{a}}", 0, "unexpected '{'"),
    ],
)
def test_refused(text, offset, said):
    with pytest.raises(ExprError) as caught:
        parse(text)
    assert said in caught.value.message
    assert caught.value.offset == offset or said == "the expression is nested too deeply"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 // (heads - 8)", "division by zero in 1 // (heads - 8)"),
        ("1 % 0", "division by zero in 1 % 0"),
        ("ceil_div(1, 0)", "division by zero in ceil_div(1, 0)"),
        ("9223372036854775807 + 1", "the value of 9223372036854775807 + 1 does not fit 63 bits"),
        ("max(1, 9223372036854775807 * 2)", "the value of 9223372036854775807 * 2 does not fit 63 bits"),
        ("layers + 1", "unknown name 'layers'"),
    ],
)
def test_no_value(text, said):
    with pytest.raises(ExprError) as caught:
        evaluate(parse(text), ENV)
    assert caught.value.message == said


def test_names():
    assert names(parse("ceil_div(a, b) + -c * (d if_ // 1)".replace(" if_", ""))) == {"a", "b", "c", "d"}
    assert names(parse("not tied and x == 3")) == {"tied", "x"}


NAMES = st.sampled_from(["hidden", "heads"]).map(Name)
SIZES: st.SearchStrategy[Expr] = st.recursive(
    st.one_of(st.integers(0, 99).map(Num), NAMES),
    lambda inner: st.one_of(
        inner.map(Neg),
        st.builds(BinOp, st.sampled_from(["+", "-", "*", "//", "%"]), inner, inner),
        st.builds(Call, st.just("ceil_div"), st.tuples(inner, inner)),
        st.builds(Call, st.sampled_from(["min", "max"]), st.tuples(inner, inner, inner)),
    ),
    max_leaves=12,
)
CONDITIONS: st.SearchStrategy[Expr] = st.recursive(
    st.one_of(
        st.booleans().map(Bool),
        st.sampled_from(["tied", "bias"]).map(Name),
        st.builds(Compare, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), SIZES, SIZES),
    ),
    lambda inner: st.one_of(
        inner.map(Not),
        st.builds(Logic, st.sampled_from(["and", "or"]), inner, inner),
        st.builds(Compare, st.sampled_from(["==", "!="]), inner, inner),
    ),
    max_leaves=6,
)


@settings(deadline=None, derandomize=True)
@given(st.one_of(SIZES, CONDITIONS))
def test_text_is_canonical(expr):
    text = to_text(expr)
    if len(text) <= 500:
        assert parse(text) == expr


@settings(deadline=None, derandomize=True)
@given(SIZES)
def test_values_are_those_of_python(expr):
    scope = {"min": min, "max": max, "ceil_div": lambda a, b: -(-a // b), **ENV}
    try:
        wanted = eval(to_text(expr), {"__builtins__": {}}, scope)  # our own text, of our own tree
    except ZeroDivisionError:
        with pytest.raises(ExprError, match="division by zero"):
            evaluate(expr, ENV)
        return
    try:
        assert evaluate(expr, ENV) == wanted
    except ExprError as error:
        assert "63 bits" in error.message


@settings(deadline=None, derandomize=True)
@given(st.text(alphabet="ab01()+-*/%<>=!,. \n'\"_{}andornotminmax", max_size=60))
def test_any_text_is_an_expression_or_an_error(text):
    with contextlib.suppress(ExprError):
        evaluate(parse(text), {"a": 1, "b": 2})


KINDS = {"hidden": INTEGER, "heads": INTEGER, "tied": TRUTH}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("hidden // heads", INTEGER),
        ("-min(hidden, 3)", INTEGER),
        ("hidden > 3", TRUTH),
        ("tied", TRUTH),
        ("not tied and hidden % 2 == 0", TRUTH),
        ("(hidden > 3) == tied", TRUTH),
        ("unheard_of", None),
    ],
)
def test_kind(text, wanted):
    assert kind(parse(text), KINDS) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hidden + tied", "`+` takes an integer, and `tied` is true or false"),
        ("max(hidden, tied)", "`max` takes an integer, and `tied` is true or false"),
        ("-tied", "`-` takes an integer, and `tied` is true or false"),
        ("not hidden", "`not` takes true or false, and `hidden` is an integer; compare it with something"),
        ("tied == 1", "`tied == 1` compares true or false with an integer"),
        ("tied < true", "`tied < true` orders true and false"),
    ],
)
def test_kinds_do_not_mix(text, said):
    with pytest.raises(ExprError) as caught:
        kind(parse(text), KINDS)
    assert caught.value.message == said


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("a * b", "b * a", True),
        ("a + a", "2 * a", True),
        ("(a + b) * (a - b)", "a * a - b * b", True),
        ("a - a", "0", True),
        ("3 * (a // 2)", "(a // 2) * 3", True),
        ("a // 2 * 2", "a", False),
        ("a * b", "a + b", False),
        ("*".join(f"({x} + 1)" for x in "abcdefghij"), "*".join(f"(1 + {x})" for x in "jihgfedcba"), False),
    ],
)
def test_same_size(a, b, same):
    """The last pair is equal, and too large to multiply out: equal texts only."""
    assert same_size(parse(a), parse(b)) is same
