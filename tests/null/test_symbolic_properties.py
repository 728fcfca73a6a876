"""Expressions against brute force: any tree, every value, Python's own arithmetic as the judge."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from itertools import product
from typing import TypeAlias

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from brickline.errors import SymbolicError
from brickline.symbolic import Expr, Variable, ceil_div, maximum, minimum
from brickline.symbolic_ops import INT64_MAX, INT64_MIN, Op

Tree: TypeAlias = "int | str | tuple[str, Tree, Tree]"
"""An integer, the name of a variable, or an operation: what a user writes, before any rule."""

PLAIN: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "ceil_div": lambda a, b: -(-a // b),
    "minimum": min,
    "maximum": max,
}
SYMBOLIC: dict[str, Callable[[Expr, Expr], Expr]] = {
    **{name: PLAIN[name] for name in ("+", "-", "*", "//", "%")},  # type: ignore[dict-item]
    "ceil_div": ceil_div,
    "minimum": minimum,
    "maximum": maximum,
}


def trees(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Tree]:
    leaves = st.one_of(numbers, st.sampled_from(["a", "b"]))
    return st.recursive(
        leaves,
        lambda inner: st.tuples(st.sampled_from(sorted(PLAIN)), inner, inner),
        max_leaves=8,
    )


@st.composite
def variables(draw: st.DrawFn, least: int = -6, most: int = 6) -> dict[str, Variable]:
    """Two variables with bounds narrow enough to try every value."""
    bounds = {
        name: sorted([draw(st.integers(least, most)), draw(st.integers(least, most))])
        for name in ("a", "b")
    }
    return {name: Variable(name, low, high) for name, (low, high) in bounds.items()}


def built(tree: Tree, known: dict[str, Variable]) -> Expr:
    if isinstance(tree, int):
        return Expr.constant(tree)
    if isinstance(tree, str):
        return known[tree]
    return SYMBOLIC[tree[0]](built(tree[1], known), built(tree[2], known))


def plain(tree: Tree, values: dict[str, int]) -> int:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return values[tree]
    return PLAIN[tree[0]](plain(tree[1], values), plain(tree[2], values))


def every_value(known: dict[str, Variable]) -> list[dict[str, int]]:
    ranges = [range(each.low, each.high + 1) for each in known.values()]
    return [dict(zip(known, values, strict=True)) for values in product(*ranges)]


def built_or_rejected(tree: Tree, known: dict[str, Variable]) -> Expr:
    """A division by what is always zero, or too large a constant, is refused at once."""
    try:
        return built(tree, known)
    except SymbolicError:
        assume(False)
        raise


small = st.integers(-7, 7)


def assert_values_are_pythons(tree: Tree, known: dict[str, Variable]) -> None:
    expr = built_or_rejected(tree, known)
    for values in every_value(known):
        try:
            expected = plain(tree, values)
        except ZeroDivisionError:
            continue  # a part that cancels takes its errors with it
        assert expr.evaluate(values) == expected, f"{expr} with {values}"
        assert expr.low <= expected <= expr.high, f"{expr} with {values}"


@given(trees(small), variables())
def test_values_are_pythons_and_bounds_hold(tree: Tree, known: dict[str, Variable]):
    assert_values_are_pythons(tree, known)


@given(trees(st.integers(1, 40)), variables(least=1, most=9))
def test_sizes_are_pythons_and_bounds_hold(tree: Tree, known: dict[str, Variable]):
    """Positive numbers, as launch shapes have them, reach the rules for divisions."""
    assert_values_are_pythons(tree, known)


@given(trees(small), variables())
def test_one_object_per_expression(tree: Tree, known: dict[str, Variable]):
    expr = built_or_rejected(tree, known)
    assert built(tree, known) is expr
    assert Expr.parse(str(expr), known.values()) is expr
    assert Expr.from_json(json.loads(json.dumps(expr.to_json()))) is expr
    assert pickle.loads(pickle.dumps(expr)) is expr


@given(trees(st.integers(1, 40)), trees(st.integers(1, 40)), variables(least=1, most=9))
def test_sums_and_products_do_not_depend_on_order(
    left: Tree, right: Tree, known: dict[str, Variable]
):
    a, b = built_or_rejected(left, known), built_or_rejected(right, known)
    assert a + b is b + a
    assert a * b is b * a
    assert (a + b) * 3 is b * 3 + 3 * a
    assert a - b is -(b - a)
    assert (a + b) - b is a
    assert minimum(a, b) is minimum(b, a)
    assert maximum(a, b, a) is maximum(b, a)


@given(st.integers(1, 300), st.integers(-1000, 1000), variables(least=0, most=9))
def test_ways_to_round_up_meet(by: int, offset: int, known: dict[str, Variable]):
    n = known["a"] * 3 + known["b"] + offset
    assert ceil_div(n, by) is (n + by - 1) // by
    assert ceil_div(n, by) is -(-n // by)
    assert ceil_div(n, by) is (n - 1) // by + 1
    assert ceil_div(n * by, by) is n


RECORD = struct.Struct("<IIq")


def run(program: bytes, values: list[int]) -> int | None:
    """The native evaluator in a few lines; None where a step leaves int64 or divides by zero."""
    stack: list[int] = []
    for opcode, reserved, operand in RECORD.iter_unpack(program):
        assert reserved == 0
        op = Op(opcode)
        if op in (Op.CONST, Op.VALUE):
            stack.append(operand if op is Op.CONST else values[operand])
        elif op is Op.NEG:
            stack.append(-stack.pop())
        else:
            right, left = stack.pop(), stack.pop()
            name = {Op.ADD: "+", Op.MUL: "*", Op.FLOORDIV: "//", Op.MOD: "%"}.get(op)
            name = name or {Op.CEILDIV: "ceil_div", Op.MIN: "minimum", Op.MAX: "maximum"}[op]
            if right == 0 and name in ("//", "%", "ceil_div"):
                return None
            stack.append(PLAIN[name](left, right))
        assert len(stack) <= 32
        if not INT64_MIN <= stack[-1] <= INT64_MAX:
            return None
    (result,) = stack
    return result


edges = st.sampled_from([INT64_MIN, INT64_MIN + 1, -(2**32), -1, 0, 1, 2**31, 2**62, INT64_MAX])


@given(trees(st.one_of(small, edges)), st.data())
def test_overflow_is_found_exactly_where_a_step_leaves_int64(tree: Tree, data: st.DataObject):
    known = {name: Variable(name, INT64_MIN, INT64_MAX) for name in ("a", "b")}
    expr = built_or_rejected(tree, known)
    values = {name: data.draw(st.one_of(edges, small), name) for name in known}
    expected = run(expr.program(["a", "b"]), [values["a"], values["b"]])
    if expected is None:
        with pytest.raises(SymbolicError, match=r"every step within int64|a divisor other than 0"):
            expr.evaluate(values)
    else:
        assert expr.evaluate(values) == expected
