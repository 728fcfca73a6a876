"""Expressions: what is simplified, how they are written, and what every error says."""

from __future__ import annotations

import copy
import gc
import json
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import numpy as np
import pytest

from brickline.errors import SymbolicError
from brickline.symbolic import Expr, Variable, ceil_div, maximum, minimum
from brickline.symbolic_ops import INT64_MAX, INT64_MIN
from brickline.symbolic_values import check_values

n = Variable("n", 1, 4096)
m = Variable("m", 0, 100)
d = Variable("d", 1, 64)
s = Variable("s", -8, 8)
KNOWN = (n, m, d, s)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (n + 0, "n"),
        (n * 1, "n"),
        (n * 0, "0"),
        (n - n, "0"),
        (0 - n, "-n"),
        (5 - n, "5 - n"),
        (n - 5 - m, "n - m - 5"),
        (m + 2 * n + m + 3, "2*m + 2*n + 3"),
        (3 * (n + m) * 2, "6*m + 6*n"),
        ((m + 1) * n - n * m, "n"),
        ((s + 1) * (s - 1), "s*s - 1"),
        (n // 1, "n"),
        (n // -1, "-n"),
        (n % 1, "0"),
        (n // n, "1"),
        (n % n, "0"),
        (0 // n, "0"),
        ((n * 4) // 4, "n"),
        ((n * 4 + 3) // 4, "n"),
        ((n * 4 - 1) // 4, "n - 1"),
        ((n * d) // d, "n"),
        ((n * d + d - 1) // d, "n"),
        ((n * d + d - 1) % d, "d - 1"),
        (m // 101, "0"),
        (m % 101, "m"),
        ((m + 202) % 101, "m"),
        (m % -101, "-((100*m) % 101)"),
        (-1 // d, "-1"),
        (-1 % d, "d - 1"),
        ((6 * n + 3) // 4, "ceil_div(3*n, 2)"),
        ((6 * n + 3) % 4, "2*((n + 1) % 2) + 1"),
        (n // 4 // 8, "n // 32"),
        (ceil_div(ceil_div(n, 4), 8), "ceil_div(n, 32)"),
        (-(-n // 256), "ceil_div(n, 256)"),
        ((n + 255) // 256, "ceil_div(n, 256)"),
        ((n + d - 1) // d, "ceil_div(n, d)"),
        (-(-n // d), "ceil_div(n, d)"),
        (ceil_div(n + 1, 256), "n // 256 + 1"),
        (n // -3, "-ceil_div(n, 3)"),
        (ceil_div(n, -3), "-(n // 3)"),
        (n % -3, "-((2*n) % 3)"),
        (minimum(n, 5000), "n"),
        (maximum(n, 1), "n"),
        (minimum(n, n + m, 7), "minimum(7, n)"),
        (minimum(minimum(n, 7), minimum(8, m)), "minimum(7, m, n)"),
        (maximum(n), "n"),
        (n // s, "n // s"),
        (-3 // s, "(-3) // s"),
        (2 - (-3) // s, "2 - ((-3) // s)"),
        (s // s, "s // s"),
        (2 * (n // 3) * m, "2*m*(n // 3)"),
        (Expr.constant(7) // -2, "-4"),
        (Expr.constant(-7) % 3, "2"),
        (ceil_div(7, 2), "4"),
    ],
)
def test_simplified_and_written(expr: Expr, text: str):
    assert str(expr) == text
    assert Expr.parse(text, KNOWN) is expr
    assert Expr.from_json(json.loads(json.dumps(expr.to_json()))) is expr


@pytest.mark.parametrize(
    ("expr", "bounds"),
    [
        (n, (1, 4096)),
        (ceil_div(n, 256), (1, 16)),
        ((n - 1) * m, (0, 409500)),
        (s * s, (0, 64)),
        (s * s * s, (-512, 512)),
        (n // s, (-4096, 4096)),
        (s % d, (0, 63)),
        (m % s, (-7, 7)),
        (m % d, (0, 63)),
        (minimum(n, m), (0, 100)),
        (maximum(n, m, 50), (50, 4096)),
        (n * n * n * n * n * n, (1, 4096**6)),
    ],
    ids=str,
)
def test_bounds(expr: Expr, bounds: tuple[int, int]):
    assert (expr.low, expr.high) == bounds


def test_variables_are_those_that_matter():
    assert (n * m + d - d).variables == {n, m}
    assert n.variables == {n}
    assert Expr.constant(3).variables == frozenset()


def test_numpy_integers_mix_on_both_sides():
    assert np.int64(3) + n is n + 3
    assert n * np.uint8(3) is 3 * n
    assert np.int32(7) // d is 7 // d
    assert np.int32(7) - n is 7 - n
    assert np.int16(7) % d is 7 % d
    assert type((n + np.int64(3)).args[1].args[0]) is int
    assert (n + 1).evaluate({"n": np.int32(7)}) == 8
    assert type(n.evaluate({"n": np.int64(7)})) is int


@pytest.mark.parametrize(
    "value", [True, np.True_, 1.0, np.float32(1), "n", None, [1], np.arange(2)]
)
def test_only_integers_mix(value: Any):
    for build in (lambda: n + value, lambda: n // value, lambda: minimum(n, value)):
        with pytest.raises(SymbolicError, match="expected an expression or an integer, got"):
            build()


def test_an_expression_is_immutable_and_has_no_constructor():
    with pytest.raises(AttributeError, match="immutable"):
        n.low = 0
    with pytest.raises(AttributeError, match="immutable"):
        (n + 1).anything = 0
    with pytest.raises(TypeError, match=r"expected Expr\.constant"):
        Expr()


def test_copies_are_the_object():
    expr = ceil_div(n, 3) + m
    assert copy.copy(expr) is copy.deepcopy(expr) is expr
    assert {expr: 1}[ceil_div(n, 3) + m] == 1
    assert repr(expr) == "<Expr ceil_div(n, 3) + m>"
    assert repr(n) == "Variable('n', 1, 4096)"


def test_what_nobody_holds_is_freed():
    gc.disable()
    try:
        expr = Variable("forgotten", 0, 9) * 31 + 17
        gone = weakref.ref(expr)
        del expr
        assert gone() is None
    finally:
        gc.enable()


def test_threads_get_one_object():
    start = threading.Barrier(8)

    def build(_: int) -> list[Expr]:
        start.wait()
        return [ceil_div(n + k, 7) * d for k in range(300)]

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(build, range(8))
    for other in others:
        assert all(a is b for a, b in zip(first, other, strict=True))


# Variables.


@pytest.mark.parametrize("name", ["", "2n", "a b", "größe", "lambda", "min", "ceil_div", "n\n", 7])
def test_a_name_that_cannot_stand_in_an_expression(name: Any):
    with pytest.raises(SymbolicError, match="expected a variable's name as an identifier"):
        Variable(name, 0, 1)


@pytest.mark.parametrize(
    ("low", "high"),
    [(2, 1), (INT64_MIN - 1, 0), (0, INT64_MAX + 1), pytest.param(0, 10**5000, id="huge")],
)
def test_bounds_that_hold_no_value_of_int64(low: int, high: int):
    with pytest.raises(SymbolicError, match="expected bounds of x within int64"):
        Variable("x", low, high)


@pytest.mark.parametrize(("low", "high"), [(0, 1.5), (None, 1), (False, True), ("0", 1)])
def test_bounds_are_integers(low: Any, high: Any):
    with pytest.raises(SymbolicError, match="expected integer bounds of x, got"):
        Variable("x", low, high)


@pytest.mark.parametrize("build", [lambda a, b: a + b, lambda a, b: a - b, ceil_div, minimum])
def test_one_name_has_one_pair_of_bounds(build: Any):
    words = r"got Variable\('n', 0, 9\) and Variable\('n', 1, 4096\); declare it once"
    with pytest.raises(SymbolicError, match=words):
        build(n + m, Variable("n", 0, 9))


# Evaluation.

WHERE = "kernel rms_norm, global_size[0]"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "expected a value of n from 1 to 4096, got none - at {}; pass n=..."),
        ({"n": 0}, "expected n from 1 to 4096, got 0 - at {}; pass a value within its bounds"),
        ({"n": 4097}, "got 4097 - at {}"),
        ({"n": 10**5000}, "got one of 16610 bits - at {}"),
        ({"n": 2.0}, "expected n as an integer from 1 to 4096, got 2.0 - at {}"),
        ({"n": True}, "got True - at {}"),
        ({"n": "2"}, "got '2' - at {}"),
        ({"n": None}, "got None - at {}"),
    ],
)
def test_values_that_do_not_fit(values: dict[str, Any], words: str):
    with pytest.raises(SymbolicError, match=re.escape(words.format(WHERE))):
        ceil_div(n, 256).evaluate(values, WHERE)


def test_one_expression_ignores_other_names():
    assert ceil_div(n, 256).evaluate({"n": 257, "other": 1.5}) == 2


def test_a_division_by_zero_names_the_step():
    words = "expected a divisor other than 0, got 9 // 0 with n=9, s=0 - at a place = n // s; pass"
    with pytest.raises(SymbolicError, match=re.escape(words)):
        (n // s).evaluate({"n": 9, "s": 0}, "a place")
    for always in (lambda: n // 0, lambda: n % (m - m), lambda: ceil_div(n, Variable("z", 0, 0))):
        with pytest.raises(SymbolicError, match="expected a divisor other than 0"):
            always()


def test_int64_is_the_edge():
    x = Variable("x", INT64_MIN, INT64_MAX)
    assert x.evaluate({"x": INT64_MIN}) == INT64_MIN
    assert ceil_div(x, 256).evaluate({"x": INT64_MAX}) == 2**55
    assert (x + 1).evaluate({"x": INT64_MAX - 1}) == INT64_MAX
    for expr, value in [(x + 1, INT64_MAX), (-x, INT64_MIN), (x * 2, 2**62), (x // -1, INT64_MIN)]:
        with pytest.raises(SymbolicError, match=r"expected every step within int64, got .*with x="):
            expr.evaluate({"x": value})
    y = Variable("y", -1, 1)
    assert (x % y).evaluate({"x": INT64_MIN, "y": -1}) == 0
    with pytest.raises(SymbolicError, match="9223372036854775808"):
        (x // y).evaluate({"x": INT64_MIN, "y": -1})


def test_constants_lie_within_int64():
    assert str(Expr.constant(INT64_MIN)) == str(INT64_MIN)
    assert Expr.parse(str(INT64_MIN + 1)) is Expr.constant(INT64_MIN + 1)
    for build in (
        lambda: Expr.constant(INT64_MAX + 1),
        lambda: n * 2**40 * 2**40,
        lambda: n + 2**63,
        lambda: n + 10**5000,
        lambda: Expr.constant(INT64_MIN) // -1,
    ):
        with pytest.raises(SymbolicError, match="constants and coefficients within int64, got"):
            build()


def test_an_expression_that_no_launch_needs_is_refused():
    many = [Variable(f"v{k}", 1, 9) for k in range(40)]
    with pytest.raises(SymbolicError, match="at most 512 operations"):
        sum(many, start=n) * sum(many, start=n)
    with pytest.raises(SymbolicError, match="with at most 32 values waiting"):
        reduce(lambda deep, each: minimum(each, each // (deep + 1) + m), many, n)
    with pytest.raises(SymbolicError, match="at most 512 operations"):
        reduce(lambda chain, _: (chain + m) % (d + 1), range(600), n)


# Many values at once.


def test_check_values_returns_plain_integers_in_order():
    checked = check_values((m, n), {"n": np.int64(5), "m": 0}, "kernel k")
    assert list(checked.items()) == [("m", 0), ("n", 5)]
    assert {type(value) for value in checked.values()} == {int}
    assert check_values((), {}, "kernel k") == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n": 5}, "expected a value of m from 0 to 100, got none - at kernel k; pass m=..."),
        ({"n": 5, "m": 1, "k": 2}, "expected values for n, m, got one for k too - at kernel k"),
        ({"n": 5, "m": -1}, "expected m from 0 to 100, got -1 - at kernel k"),
        ({"n": 5, "m": 0.5}, "expected m as an integer from 0 to 100, got 0.5 - at kernel k"),
    ],
)
def test_check_values_refuses(values: dict[str, Any], words: str):
    with pytest.raises(SymbolicError, match=re.escape(words)):
        check_values((n, m), values, "kernel k")


# Text and JSON.


def test_parse_takes_what_people_write():
    assert Expr.parse(" ( n+255 ) // 256 ", KNOWN) is ceil_div(n, 256)
    assert Expr.parse("min(n, m, 3)", KNOWN) is minimum(n, m, 3)
    assert Expr.parse("max(n, m)", KNOWN) is Expr.parse("maximum(m, n)", KNOWN)
    assert Expr.parse("-n - -3", KNOWN) is 3 - n
    assert Expr.parse("0x10 + 1_000") is Expr.constant(1016)
    assert Expr.of("n * 2", KNOWN) is Expr.of(2 * n) is 2 * n
    assert Expr.of(np.int8(3)) is Expr.constant(3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k + 1", r"expected a variable \(n, m, d, s\), got 'k'; declare it first - at 'k \+ 1'"),
        ("n / 2", r"expected integers, variables, \+ - \* // % .*got 'n / 2'"),
        ("n ** 2", "got 'n [*][*] 2'"),
        ("n << 2", "got 'n << 2'"),
        ("n if m else d", "got 'n if m else d'"),
        ("n.low", "got 'n.low'"),
        ("abs(n)", "got 'abs[(]n[)]'"),
        ("__import__('os')", "got .*__import__"),
        ("ceil_div(n, b=2)", "got 'ceil_div[(]n, b=2[)]'"),
        ("ceil_div(*n)", "got"),
        ("(lambda: 0)()", "got"),
        ("n < 3", "got 'n < 3'"),
        ("[n]", "got"),
        ("+n", "got '[+]n'"),
        ("1.5", "expected an expression or an integer, got 1.5"),
        ("True", "got True"),
        ("'n'", "got 'n'"),
        ("ceil_div(n)", "expected operands of ceil_div, got 1 of them"),
        ("min()", "expected one or more values"),
        ("n // 0", "expected a divisor other than 0"),
        ("9223372036854775808", "within int64"),
        ("", r"expected an integer expression such as .*\(SyntaxError\)"),
        ("n n", "SyntaxError"),
        ("n; m", "SyntaxError"),
        ("n\0", "Error"),
        ("1" * 4000, "within int64|Error"),
        ("-" * 4000 + "n", "expected"),
        ("(" * 2000 + "n" + ")" * 2000, "expected an integer expression"),
        ("n" * 5000, "at most 4096 characters, got 5000"),
    ],
)
def test_text_that_is_no_expression(text: str, words: str):
    with pytest.raises(SymbolicError, match=words):
        Expr.parse(text, KNOWN)


def test_json_is_lists_and_integers():
    assert (2 * n + 3).to_json() == ["+", ["*", 2, ["variable", "n", 1, 4096]], 3]
    assert Expr.constant(3).to_json() == 3


def nested(depth: int) -> Any:
    data: Any = 1
    for _ in range(depth):
        data = ["+", data, 1]
    return data


@pytest.mark.parametrize(
    "data",
    [
        *(None, 1.5, True, "n", {}, [], [["+"]], ["+"], ["^", 1, 2]),
        *(["//", 1], ["%", 1, 2, 3], ["ceil_div"], ["minimum"]),
        *(["variable", "n"], ["variable", "n", 2, 1], ["variable", 3, 2, 1]),
        nested(100_000),
    ],
    ids=lambda data: f"{type(data).__name__}",
)
def test_json_that_is_no_expression(data: Any):
    with pytest.raises(SymbolicError, match="expected"):
        Expr.from_json(data)


def test_program_is_postfix_records():
    assert ceil_div(n, 256).program(("m", "n")).hex(" ", 8) == (
        "0100000000000000 0100000000000000 "
        "0000000000000000 0001000000000000 "
        "0600000000000000 0000000000000000"
    )
    assert len((-n).program(["n"])) == 2 * 16
    assert Expr.constant(-1).program(()) == bytes(8) + b"\xff" * 8
    words = "expected the variables of m + n among n, got m too"
    with pytest.raises(SymbolicError, match=re.escape(words)):
        (n + m).program(["n"])
