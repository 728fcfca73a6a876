"""Plans while they are built: what is refused and why, what waits for what, and in which words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brickline.errors import PlanError
from brickline.executor.prepared import EXECUTORS
from brickline.hazards import HazardKind
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import residual, rms_norm
from brickline.plan import Plan
from brickline.plan_buffers import PlanBuffer

COPY = Kernel(
    "copy",
    "BRICKLINE void copy(Block& block, const float* x, float* y, int64_t n, float by) {"
    " block.each(n, [&](int64_t i) { y[i] = by * x[i]; }); }",
    [
        *(Param("x", "f32", "n"), Param("y", "f32", "n", "write")),
        *(Scalar("n", high=4096), Scalar("by", "f32")),
    ],
)
GROW = Kernel(
    "grow",
    "BRICKLINE void grow(Block& block, float* x, int64_t n) {"
    " block.each(n, [&](int64_t i) { x[i] += 1; }); }",
    [Param("x", "f32", "n", "read-write"), Scalar("n", low=1)],
    host_parallel_safe=False,
)
WIDE = Kernel(
    "wide",
    "BRICKLINE void wide(Block& block, float* x) { block.each(4, [&](int64_t i) { x[i] = 1; }); }",
    [Param("x", "f32", 4, "write", align=16)],
)


class Made:
    """A plan with three buffers of 8 floats, and copies between them."""

    def __init__(self) -> None:
        self.plan = Plan("made")
        self.x, self.y, self.z = (self.plan.buffer(name, 8, "f32") for name in "xyz")

    def copy(self, x: Any, y: Any, n: Any = 8, by: Any = 1.0, **more: Any) -> Any:
        return self.plan.launch(COPY, x=x, y=y, n=n, by=by, **more)


@pytest.fixture
def made() -> Made:
    return Made()


# ------------------------------------------------------------------------------------ declarations


@pytest.mark.parametrize("name", ["", "two\nlines", "\0", "\ud800", 3, None])
def test_a_plan_has_a_name_that_can_be_printed(name: Any) -> None:
    with pytest.raises(PlanError, match="a plan's name"):
        Plan(name)


@pytest.mark.parametrize("name", ["", "1x", "a b", "float", "x" * 300, None, 3, "brickline_x"])
def test_names_are_identifiers(made: Made, name: Any) -> None:
    for declare in (made.plan.buffer, made.plan.variable):
        with pytest.raises(PlanError, match="the name of a variable or buffer"):
            declare(name, 1, 2)


def test_a_name_is_taken_once(made: Made) -> None:
    made.plan.variable("n", 0, 9)
    for taken in ("n", "x"):
        with pytest.raises(
            PlanError, match=f"{taken} is a variable or buffer of plan made already"
        ):
            made.plan.buffer(taken, 8, "f32")
        with pytest.raises(PlanError, match="already"):
            made.plan.variable(taken, 0, 1)


def test_the_argument_of_a_run_is_no_name_of_a_variable(made: Made) -> None:
    with pytest.raises(PlanError, match="stream"):
        made.plan.variable("stream", 0, 1)


def test_a_declaration_that_is_refused_leaves_its_name_free(made: Made) -> None:
    for refused in (
        lambda: made.plan.variable("n"),
        lambda: made.plan.variable("n", 3, 1),
        lambda: made.plan.variable("n", 0, 1, default=2),
        lambda: made.plan.buffer("n"),
        lambda: made.plan.buffer("n", -1, "f32"),
        lambda: made.plan.buffer("n", 1, "f31"),
    ):
        with pytest.raises(PlanError):
            refused()
    assert made.plan.variable("n", 0, 1).name == "n"
    assert len(made.plan.storages) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"low": 0},
        {"high": 3},
        {"low": 0, "high": 3, "dtype": "u8"},
        {"low": "a", "high": "b"},
        {"low": 3, "high": 1},
        {"low": 0, "high": 2**70},
        {"low": 0, "high": 3, "default": 4},
        {"low": 0, "high": 3, "default": 1.5},
        {"low": 0, "high": 3, "default": True},
        {"low": 0, "high": 3, "dtype": "f32"},
        {"dtype": "f32", "default": "1"},
        {"dtype": "f32", "default": True},
    ],
)
def test_variables_that_contradict_themselves(made: Made, arguments: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="n"):
        made.plan.variable("n", **arguments)


def test_defaults_are_the_low_end_or_as_given(made: Made) -> None:
    made.plan.variable("a", 2, 5)
    made.plan.variable("b", 2, 5, default=3)
    made.plan.variable("c", dtype="f32")
    made.plan.variable("d", dtype="f64", default=2)
    assert made.plan.defaults == {"a": 2, "b": 3, "c": 0.0, "d": 2.0}
    assert list(made.plan.variables) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("shape", [-1, 1.5, "8", None, [2, -2], (True,), (math.nan,)])
def test_sizes_are_whole_numbers_from_zero_on(made: Made, shape: Any) -> None:
    with pytest.raises(PlanError, match="expected"):
        made.plan.buffer("b", shape, "f32")


def test_the_array_of_a_buffer_decides_shape_and_dtype(made: Made) -> None:
    array = np.zeros((2, 3), np.float32)
    buffer = made.plan.buffer("a", (2, 3), "f32", array=array)
    assert (buffer.shape, buffer.dtype) == ((2, 3), "f32")
    with pytest.raises(PlanError, match=r"the array's shape \[2, 3\], got 6"):
        made.plan.buffer("b", 6, array=array)
    with pytest.raises(PlanError, match="the array's dtype f32, got f64"):
        made.plan.buffer("b", array=array, dtype="f64")
    with pytest.raises(PlanError, match=r"buffer c|c: expected a Buffer or an array"):
        made.plan.buffer("c", array="text")
    with pytest.raises(PlanError, match="contiguous"):
        made.plan.buffer("d", array=array.T)


def test_a_size_over_a_foreign_variable_is_refused(made: Made) -> None:
    stranger = Plan("other").variable("m", 1, 8)
    with pytest.raises(PlanError, match="is no variable of plan made"):
        made.plan.buffer("b", stranger, "f32")
    with pytest.raises(PlanError, match="from -1"):
        made.plan.buffer("b", made.plan.variable("n", 0, 4) - 1, "f32")


# ------------------------------------------------------------------------------------------- views


def brute_bytes(buffer: PlanBuffer) -> set[int]:
    """Every byte that a view has, one element after the other."""
    steps = buffer.strides
    if steps is None:
        count = math.prod(buffer.shape)
        return set(range(buffer.offset, buffer.offset + count * buffer.itemsize))
    found = set()
    for place in np.ndindex(*buffer.shape):
        first = buffer.offset + sum(np.multiply(place, steps)) * buffer.itemsize
        found |= set(range(int(first), int(first) + buffer.itemsize))
    return found


keys = st.one_of(
    st.integers(-4, 3),
    st.builds(
        slice,
        st.none() | st.integers(-5, 5),
        st.none() | st.integers(-5, 5),
        st.none() | st.integers(1, 3),
    ),
)


@given(st.lists(keys, min_size=1, max_size=3))
def test_indexing_takes_the_elements_that_numpy_takes(chain: list[Any]) -> None:
    array = np.arange(4 * 3 * 2, dtype=np.float32).reshape(4, 3, 2)
    whole = Plan().buffer("x", array.shape, "f32")
    view, expected = whole, array
    for key in chain:
        if not expected.shape or (
            isinstance(key, int) and not -len(expected) <= key < len(expected)
        ):
            with pytest.raises(PlanError):
                view[key]
            return
        view, expected = view[key], expected[key]
    assert view.shape == np.shape(expected)
    elements = {int(value) for value in np.ravel(expected)}
    assert {byte // 4 for byte in brute_bytes(view)} == elements
    _, begin, end = view.range
    assert brute_bytes(view) <= set(range(begin, end)), "the hull misses nothing"
    if view.strides is None:
        assert end - begin == 4 * len(elements), "and has nothing else where it is contiguous"


def test_rows_are_iterated(made: Made) -> None:
    rows = list(made.x.reshape((2, 4)))
    assert [(row.offset, row.shape) for row in rows] == [(0, (4,)), (16, (4,))]
    assert len(made.x) == 8


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (lambda x: x[8], "expected an index below 8"),
        (lambda x: x[-9], "expected an index below 8"),
        (lambda x: x["a"], "expected an index"),
        (lambda x: x[0, 0], "expected an index"),
        (lambda x: x[0.0], "expected an index"),
        (lambda x: x[True], "expected an index"),
        (lambda x: x[0][0], "has no axis"),
        (lambda x: x[::-1], "goes forward"),
        (lambda x: x[::0], "whole numbers"),
        (lambda x: x["a":], "whole numbers"),
        (lambda x: x.view(9), "reaches 4 bytes beyond"),
        (lambda x: x.view(8, 1), "reaches 4 bytes beyond"),
        (lambda x: x[2:6].view(8), "reaches 16 bytes beyond"),
        (lambda x: x.view(2, 4, strides=[4]), "reaches 4 bytes beyond"),
        (lambda x: x.view((2, 2), strides=[2]), "expected 2 strides"),
        (lambda x: x.view(2, strides=[0]), "strides of 1 or more"),
        (lambda x: x.view(2, strides=[-1]), "strides of 1 or more"),
        (lambda x: x.view(2, strides=None, offset=-1), "offset from 0 on"),
        (lambda x: x.view(2, "1"), "offset from 0 on"),
        (lambda x: x.view(-2), "sizes from 0 on"),
        (lambda x: x.view(2, dtype="f31"), "expected a dtype"),
        (lambda x: x.view(5, dtype="f64"), "reaches 8 bytes beyond"),
        (lambda x: x[::2].view(2), "is strided"),
        (lambda x: x.reshape(9), "as many elements"),
        (lambda x: x.reshape((2, -1)), "sizes from 0 on"),
        (lambda x: x.reshape((2**40, 2**40)), "as many elements"),
        (lambda x: x[::2].reshape(4), "follow each other"),
    ],
)
def test_views_that_cannot_be(made: Made, take: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        take(made.x)


def test_views_of_another_dtype_count_its_elements(made: Made) -> None:
    view = made.x.view(4, 8, dtype="bf16")
    assert (view.offset, view.span, view.itemsize) == (16, 8, 2)


def test_sizes_that_vary_are_not_indexed(made: Made) -> None:
    n = made.plan.variable("n", 1, 8)
    varying = made.plan.buffer("v", n, "f32")
    assert varying.range[1:] == (0, 32), "room for the largest"
    for take in (lambda: varying[0], lambda: made.plan.buffer("w", (2, n), "f32")[0]):
        with pytest.raises(PlanError, match="sizes that vary"):
            take()
    with pytest.raises(TypeError, match="no fixed length"):
        len(varying)


# --------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, "misses x; kernel copy takes x, y, n, by"),
        ({"n": None}, "misses n"),
        ({"more": 1}, "has no argument more"),
        ({"x": 3.5}, "expected a Buffer or an array"),
        ({"x": "text"}, "expected a Buffer or an array"),
        ({"x": np.zeros(8)}, "expected f32, got f64"),
        ({"x": np.zeros(7, np.float32)}, r"expected shape \[8\], got <x_1 f32\[7\]>"),
        ({"n": 8.0}, "expected a whole number"),
        ({"n": True}, "expected a whole number"),
        ({"n": "8"}, "expected a whole number"),
        ({"n": -1}, "expected a value from 0 to 4096, got -1"),
        ({"n": 5000}, "expected a value from 0 to 4096, got 5000"),
        ({"by": "1"}, "expected a number"),
        ({"by": True}, "expected a number"),
        ({"by": 1e300}, "expected a number that fits f32, got 1e.300"),
        ({"by": -1e39}, "fits f32"),
        ({"by": [1.0]}, "expected a number"),
        ({"by": object()}, "expected a number"),
        ({"layer": -1}, "expected layer"),
        ({"layer": 1.5}, "expected layer"),
        ({"layer": 2**40}, "expected layer"),
        ({"brick": ""}, "expected brick"),
        ({"brick": 3}, "expected brick"),
    ],
)
def test_arguments_that_do_not_fit(made: Made, change: dict[str, Any], words: str) -> None:
    arguments = {"x": made.x, "y": made.y, "n": 8, "by": 1.0} | change
    given = {name: value for name, value in arguments.items() if value is not None}
    with pytest.raises(PlanError, match=words) as refused:
        made.plan.launch(COPY, **given)
    assert "launch 0 (copy)" in str(refused.value)
    assert made.plan.launches == ()


def test_what_is_no_kernel_is_not_launched(made: Made) -> None:
    with pytest.raises(PlanError, match="expected a Kernel, got str"):
        made.plan.launch("copy", x=made.x)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"layer": -1}, {"brick": ""}, {"by": "?"}, {"n": 7}])
def test_a_launch_that_is_refused_leaves_no_trace(made: Made, change: dict[str, Any]) -> None:
    made.copy(made.x, made.y)
    with pytest.raises(PlanError):
        made.plan.launch(COPY, **({"x": made.z, "y": made.y, "n": 8, "by": 1.0} | change))
    made.copy(made.x, made.plan.buffer("w", 8, "f32"))
    assert made.copy(made.y, made.z).waits_for == (0,)


def test_infinities_and_zeros_of_both_signs_are_themselves(made: Made) -> None:
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38]
    given = [made.copy(made.x, made.y, by=value).arguments[-1] for value in values]
    assert list(map(str, given)) == list(map(str, values))


def test_numbers_of_numpy_are_numbers(made: Made) -> None:
    launch = made.copy(made.x, made.y, n=np.int32(8), by=np.float32(2))
    assert launch.arguments[2:] == (8, 2.0)
    assert {type(value) for value in launch.arguments[2:]} == {int, float}


def test_expressions_are_held_against_bounds(made: Made) -> None:
    n = made.plan.variable("n", 1, 8)
    launch = made.copy(made.x.view(n), made.y.view(n), n)
    assert launch.arguments[2] is n
    with pytest.raises(PlanError, match=r"expected a value from 0 to 4096, got .*from 0 to 4200"):
        made.copy(made.x, made.y, (n - 1) * 600)
    with pytest.raises(PlanError, match=r"got .*from -7 to 0"):
        made.copy(made.x, made.y, 1 - n)


def test_strangers_are_refused(made: Made) -> None:
    other = Plan("other")
    with pytest.raises(PlanError, match="belongs to plan other"):
        made.copy(other.buffer("x", 8, "f32"), made.y)
    with pytest.raises(PlanError, match="no variable of plan made"):
        made.copy(made.x, made.y, other.variable("n", 1, 8))
    with pytest.raises(PlanError, match="no variable of plan made"):
        made.copy(made.x, made.y, by=other.variable("t", dtype="f32"))
    with pytest.raises(PlanError, match="expected a buffer of plan made"):
        made.plan.protect(other.buffer("w", 8, "f32"))


def test_a_float_of_another_plan_is_a_stranger_whatever_its_name(made: Made) -> None:
    made.copy(made.x, made.y, by=made.plan.variable("t", dtype="f32"))
    with pytest.raises(PlanError, match="no variable of plan made"):
        made.copy(made.x, made.y, by=Plan("other").variable("t", dtype="f32"))


def test_a_float_is_no_integer_and_no_buffer(made: Made) -> None:
    t = made.plan.variable("t", dtype="f32")
    with pytest.raises(PlanError, match="expected a whole number"):
        made.copy(made.x, made.y, n=t)
    with pytest.raises(PlanError, match="expected a Buffer"):
        made.copy(t, made.y)


def test_a_shape_that_varies_takes_the_beginning(made: Made) -> None:
    n = made.plan.variable("n", 1, 8)
    launch = made.copy(made.x, made.y, n)
    assert launch.arguments[0].shape == (n,)
    assert launch.arguments[0].range == made.x.range, "hazards count the largest"
    with pytest.raises(PlanError, match=r"expected shape \[n\] \(at most 8 elements\)"):
        made.copy(made.plan.buffer("less", 7, "f32"), made.y, n)
    with pytest.raises(PlanError, match=r"expected shape \[n\]"):
        made.copy(made.x.reshape((2, 4)), made.y, n)
    with pytest.raises(PlanError, match=r"expected shape \[8\]"):
        made.copy(made.plan.buffer("v", n, "f32"), made.y, 8)
    with pytest.raises(PlanError, match="expected shape"):
        made.plan.launch(
            *(rms_norm(),),
            **{"x": made.x.reshape((2, 4)), "weight": made.y[:4], "y": made.z.reshape((2, 4))},
            **{"rows": 2, "n": made.plan.variable("m", 1, 4), "eps": 0.0},
        )


def test_launch_shapes_without_blocks_are_refused(made: Made) -> None:
    with pytest.raises(PlanError, match=r"expected global_size\[0\] of at least 1, got 0"):
        made.plan.launch(residual(), a=made.x[:0], b=made.y[:0], y=made.z[:0], n=0)


def test_strided_views_are_copied_first(made: Made) -> None:
    with pytest.raises(PlanError, match=r"elements that follow each other.*plan a copy"):
        made.copy(made.x[::2], made.y[:4], 4)


def test_alignment_is_that_of_the_kernel(made: Made) -> None:
    made.plan.launch(WIDE, x=made.x[4:])
    with pytest.raises(PlanError, match=r"aligned to 16 bytes.*begin the view at a multiple"):
        made.plan.launch(WIDE, x=made.x[2:6])
    memory = np.zeros(64, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    with pytest.raises(PlanError, match="aligned to 16 bytes"):
        made.plan.launch(WIDE, x=memory[start : start + 16].view(np.float32))


@pytest.mark.parametrize(
    ("x", "y", "shared"), [(slice(0, 4), slice(0, 4), 16), (slice(0, 4), slice(3, 7), 4)]
)
def test_a_launch_does_not_write_what_it_reads(made: Made, x: slice, y: slice, shared: int) -> None:
    with pytest.raises(PlanError, match=f"writes to y, which shares {shared} bytes with x"):
        made.copy(made.x[x], made.x[y], 4)
    made.copy(made.x[0:4], made.x[4:8], 4)
    made.copy(made.x[:0], made.x[:0], 0)


def test_inputs_may_alias_each_other(made: Made) -> None:
    assert made.plan.launch(residual(), a=made.x, b=made.x, y=made.y, n=8).waits_for == ()


def test_arrays_alias_by_address() -> None:
    plan, memory = Plan(), np.zeros(12, np.float32)
    with pytest.raises(PlanError, match="shares 16 bytes"):
        plan.launch(COPY, x=memory[:8], y=memory[4:], n=8, by=1.0)
    plan = Plan()
    plan.launch(COPY, x=memory[:4], y=memory[4:8], n=4, by=1.0)
    assert plan.launch(COPY, x=memory[6:10], y=memory[0:4], n=4, by=1.0).waits_for == (0,)
    assert plan.launch(COPY, x=memory[8:], y=np.zeros(4, np.float32), n=4, by=1.0).waits_for == ()


def test_the_same_array_is_one_buffer() -> None:
    plan, array, out = Plan(), np.zeros(8, np.float32), np.zeros(8, np.float32)
    for _ in range(3):
        plan.launch(COPY, x=array, y=out, n=8, by=1.0)
    assert [storage.name for storage in plan.storages] == ["x", "y"]


# --------------------------------------------------------------------------------------- read-only


def test_read_only_buffers_are_not_written(made: Made) -> None:
    weights = made.plan.buffer("w", 8, "f32", read_only=True)
    made.copy(weights, made.y)
    for view in (weights, weights[7:].view(1)):
        with pytest.raises(PlanError, match=r"writes to y.*what of w is declared read-only"):
            made.copy(made.x[: view.shape[0]], view, view.shape[0])


def test_a_view_is_protected_before_and_after(made: Made) -> None:
    made.copy(made.x[:4], made.y[:4], 4)
    with pytest.raises(PlanError, match=r"cannot be read-only: launch 0 \(copy\) writes there"):
        made.plan.protect(made.y[3:5])
    assert made.plan.protect(made.y[4:]) is not None
    made.copy(made.x[:4], made.y[:4], 4)
    with pytest.raises(PlanError, match="what of y is declared read-only"):
        made.copy(made.x[:4], made.y[1:5], 4)
    assert len(made.plan.launches) == 2


def test_overlapping_arrays_are_protected_together() -> None:
    plan, memory = Plan(), np.zeros(12, np.float32)
    plan.buffer("w", array=memory[:8], read_only=True)
    over = plan.buffer("over", array=memory[4:])
    with pytest.raises(PlanError, match="what of w is declared read-only"):
        plan.launch(COPY, x=np.ones(8, np.float32), y=over, n=8, by=1.0)
    plan.launch(COPY, x=memory[:4], y=over[4:], n=4, by=1.0)
    with pytest.raises(PlanError, match="cannot be read-only"):
        plan.buffer("late", array=memory, read_only=True)
    assert "late" not in [storage.name for storage in plan.storages]


def test_read_only_arrays_are_not_written(made: Made) -> None:
    array = np.zeros(8, np.float32)
    array.flags.writeable = False
    made.copy(array, made.y)
    with pytest.raises(PlanError, match="whose array is read-only"):
        made.copy(made.x, array)


# ------------------------------------------------------------------------------------------- edges


def test_every_kind_of_hazard_is_an_edge(made: Made) -> None:
    made.copy(made.x, made.y)
    made.copy(made.y, made.z)
    assert made.copy(made.x, made.y).waits_for == (0, 1)
    kinds = [hazard.kind for hazard in made.plan.launches[2].hazards]
    assert kinds == [HazardKind.WRITE_AFTER_READ, HazardKind.WRITE_AFTER_WRITE]
    assert made.plan.launches[1].hazards[0].kind is HazardKind.READ_AFTER_WRITE


parts = st.tuples(st.integers(0, 15), st.integers(1, 8), st.integers(1, 3))


@given(st.lists(st.tuples(parts, parts), min_size=2, max_size=8))
def test_contiguous_views_have_exactly_the_edges_of_their_bytes(
    program: list[tuple[Any, Any]],
) -> None:
    plan = Plan()
    x, y = plan.buffer("x", 24, "f32"), plan.buffer("y", 24, "f32")
    touched = []
    for (a, length, which), (b, *_) in program:
        source, target = (x, y) if which == 1 else (y, x)
        inside, out = source[a : a + length], target[b : b + length]
        plan.launch(COPY, x=inside, y=out, n=length, by=1.0)
        reads = {(source.name, byte) for byte in brute_bytes(inside)}
        touched.append((reads, {(target.name, byte) for byte in brute_bytes(out)}))
    before: list[set[int]] = []
    expected: list[set[int]] = []
    for late, (reads, writes) in enumerate(touched):
        waits = set(plan.launches[late].waits_for)
        conflicts = {
            early
            for early in range(late)
            if touched[early][1] & (reads | writes) or touched[early][0] & writes
        }
        assert waits <= conflicts
        before.append(waits.union(*(before[early] for early in waits)))
        expected.append(conflicts.union(*(expected[early] for early in conflicts)))
    assert before == expected


@given(st.lists(parts, min_size=2, max_size=6))
def test_strided_views_conflict_wherever_their_bytes_meet(program: list[Any]) -> None:
    whole = Plan().buffer("x", 24, "f32")
    views = [whole[first : first + length : step] for first, length, step in program]
    for view in views:
        for other in views:
            begin = max(view.range[1], other.range[1])
            meets = begin < min(view.range[2], other.range[2])
            assert meets or not brute_bytes(view) & brute_bytes(other)


# ----------------------------------------------------------------------------------------- explain


def test_explain_says_why_each_edge_is_there(made: Made) -> None:
    made.copy(made.x, made.y, layer=0)
    made.copy(made.y[2:], made.z[2:], 6, brick="Move", layer=1)
    made.copy(made.x, made.y)
    made.plan.launch(GROW, x=made.x, n=8)
    assert made.plan.explain().splitlines() == [
        "plan made: 4 launches over 3 buffers, 5 edges; the longest chain has 4 launches",
        "   0  copy  layer 0",
        "   1  copy  Move  layer 1",
        "        after launch 0 (copy, layer 0): reads y bytes 8 to 32",
        "   2  copy",
        "        after launch 0 (copy, layer 0): overwrites y bytes 0 to 32",
        "        after launch 1 (copy, layer 1): overwrites what is read y bytes 8 to 32",
        "   3  grow",
        "        after launch 0 (copy, layer 0): overwrites what is read x bytes 0 to 32",
        "        after launch 2 (copy): overwrites what is read x bytes 0 to 32",
        "        alone: the kernel is not host_parallel_safe",
    ]
    assert Plan("empty").explain().startswith("plan empty: 0 launches over 0 buffers, 0 edges")


def test_explain_of_a_pair_has_four_answers(made: Made) -> None:
    other = made.plan.buffer("other", 8, "f32")
    made.copy(made.x, made.y)
    made.copy(made.y, made.z)
    made.copy(made.z, other)
    made.copy(made.x, made.plan.buffer("free", 8, "f32"))
    made.plan.launch(GROW, x=made.plan.buffer("own", 8, "f32"), n=8)
    explain = made.plan.explain
    assert explain(1, 0) == explain(0, 1)
    assert explain(0, 1) == "launch 1 (copy) waits for launch 0 (copy): it reads y bytes 0 to 32"
    assert explain(0, 2) == "launch 2 (copy) waits for launch 0 (copy) through launch 1 (copy)"
    assert "may overlap: neither touches what the other writes" in explain(0, 3)
    assert "but launch 4 (grow) runs alone on a CPU" in explain(3, 4)


@pytest.mark.parametrize(
    "pair", [(0, 9), (-1, 0), (0, 0), (0, None), (None, 1), ("a", 1), (0, 1.5)]
)
def test_explain_wants_two_launches(made: Made, pair: tuple[Any, Any]) -> None:
    made.copy(made.x, made.y)
    made.copy(made.y, made.z)
    with pytest.raises(PlanError, match="expected"):
        made.plan.explain(*pair)


# ------------------------------------------------------------------------------------------ devices


@pytest.mark.parametrize("executor", ["serial", "parallel"])
@pytest.mark.parametrize("checked", [False, True])
def test_a_plan_is_checked_without_a_compiler(
    made: Made, monkeypatch: pytest.MonkeyPatch, executor: str, checked: bool
) -> None:
    monkeypatch.setenv("PATH", "")
    n = made.plan.variable("n", 1, 8)
    made.copy(made.x, made.y, n, by=made.plan.variable("t", dtype="f32"))
    prepared = made.plan.prepare("NULL", executor, checked=checked)
    assert prepared(n=3, t=0.5).values == {"n": 3, "t": 0.5}
    with pytest.raises(ValueError, match="expected n from 1 to 8, got 9"):
        prepared(n=9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "fast"}, "expected executor serial, parallel, graph"),
        ({"executor": "graph"}, "executor graph is CUDA's; NULL runs plans with serial"),
        ({"bind": {"w": np.zeros(8, np.float32)}}, "has no buffer 'w'; it has x, y, z"),
        ({"bind": {"x": np.zeros(7, np.float32)}}, r"expected f32\[8\], got f32\[7\]"),
        ({"bind": {"x": np.zeros(8)}}, r"expected f32\[8\], got f64\[8\]"),
        ({"bind": {"x": "text"}}, "expected a Buffer or an array"),
    ],
)
def test_what_prepare_refuses(made: Made, options: dict[str, Any], words: str) -> None:
    made.copy(made.x, made.y)
    with pytest.raises(PlanError, match=words):
        made.plan.prepare("NULL", **options)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("device", ["NULL", "CPU", "CUDA:0"])
def test_an_empty_plan_is_not_prepared(made: Made, executor: str, device: str) -> None:
    with pytest.raises(PlanError, match="plan made has no launches; add some"):
        made.plan.prepare(device, executor)


def test_a_plan_that_grows_does_not_disturb_what_was_prepared(made: Made) -> None:
    made.copy(made.x, made.y)
    prepared = made.plan.prepare("NULL")
    made.copy(made.y, made.plan.buffer("w", 8, "f32"))
    made.plan.variable("n", 0, 1)
    assert list(prepared().buffers) == ["x", "y", "z"]
    assert list(made.plan.prepare("NULL")().buffers) == ["x", "y", "z", "w"]
