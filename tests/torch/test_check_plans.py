"""`bl.check` of prepared plans: the launch that is wrong is named, over strided views too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import brickline as bl
from brickline.errors import LaunchError, UsageError
from brickline.kernel import Kernel
from brickline.kernels.catalog import gemv, silu_gate


def wrong_gate() -> Kernel:
    right = silu_gate()
    source = right.source.replace("exp(-g)", "exp(-1.01f * g)")
    return Kernel.from_json(right.to_json() | {"source": source})


def gate_plan(kernel: Kernel) -> bl.PreparedPlan:
    plan = bl.Plan("gate")
    n = plan.variable("n", 1, 64)
    gate, up, y = (plan.buffer(name, n, "f32") for name in ("gate", "up", "y"))
    plan.launch(kernel, gate=gate, up=up, y=y, n=n)
    prepared = plan.prepare()
    for name in ("gate", "up"):
        prepared.write(name, np.linspace(-2, 2, 64, dtype=np.float32))
    return prepared


def test_sizes_change_during_a_check() -> None:
    drive = lambda plan: [plan(n=size) for size in (7, 64, 3)]  # noqa: E731
    report = bl.check(gate_plan(silu_gate()), reference=gate_plan(silu_gate()), drive=drive)
    assert report.status == "matched", str(report)


def test_without_a_reference_a_launch_is_held_to_its_kernels_own() -> None:
    drive = lambda plan: plan(n=64)  # noqa: E731
    assert bl.check(gate_plan(silu_gate()), drive=drive).status == "matched"
    plan = gate_plan(wrong_gate())
    with pytest.raises(UsageError, match="silu_gate have no reference="):
        bl.check(plan, drive=drive)


def test_in_float64_a_launch_is_its_kernels_reference() -> None:
    asked: list[np.dtype] = []

    def counted(**given: np.ndarray) -> np.ndarray:
        asked.append(given["gate"].dtype)
        assert shipped is not None
        return shipped(**given)

    shipped = silu_gate().reference
    facts = silu_gate().to_json()
    with_reference = replace(silu_gate(), reference=counted)
    drive = lambda plan: plan(n=64)  # noqa: E731
    wrong = gate_plan(wrong_gate())
    report = bl.check(wrong, reference=gate_plan(with_reference), drive=drive, repro=False)
    assert report.findings[0].name == "silu_gate"
    assert asked
    assert set(asked) == {np.dtype(np.float64)}
    # Without one, the kernel itself is run again.
    report = bl.check(wrong, reference=gate_plan(Kernel.from_json(facts)), drive=drive, repro=False)
    assert report.status == "diverged"


@pytest.mark.parametrize(("rows", "columns"), [(256, 64), (8, 4096), (4, 65536)])
def test_rounding_of_a_product_is_not_held_against_it(rows: int, columns: int) -> None:
    def product(kernel: Kernel) -> bl.PreparedPlan:
        generator = np.random.default_rng(1)
        w = generator.normal(size=(rows, columns)).astype(np.float32)
        x = generator.normal(size=columns).astype(np.float32)
        plan = bl.Plan("product")
        plan.launch(kernel, w=w, x=x, y=plan.buffer("y", rows, "f32"), m=rows, n=columns)
        return plan.prepare()

    right = gemv("f32")
    assert bl.check(product(right), drive=lambda plan: plan()).status == "matched"
    # One term too many is more than rounding.
    reference = lambda w, x, **_: w.astype(float) @ x + w[:, 0] * x[0]  # noqa: E731
    report = bl.check(
        product(replace(right, reference=reference)), drive=lambda plan: plan(), repro=False
    )
    assert report.status == "diverged"


# ----------------------------------------------------------------------------------- strided views

COLUMN_SUM = """
BRICKLINE void column_sum(Block& block, const float* x, float* y, int64_t m, int64_t n,
                          int64_t step, int64_t apart) {
    block.each(m, [&](int64_t r) {
        float sum = 0.0f;
        for (int64_t c = 0; c < n; ++c) sum = sum + x[r * step + c];
        y[r * apart] = sum;
    });
}
"""


def column_sum(old: str = "", new: str = "") -> Kernel:
    """Sum the first n columns of every row, with a part of the source replaced."""
    assert old in COLUMN_SUM
    return Kernel(
        "column_sum",
        COLUMN_SUM.replace(old, new) if old else COLUMN_SUM,
        [
            bl.Param("x", "f32", ("m", "n"), strides=("step", 1)),
            bl.Param("y", "f32", "m", "write", strides="apart"),
            *(bl.Scalar(name, low=1) for name in ("m", "n", "step", "apart")),
        ],
        reference=lambda x, **_: x.sum(axis=1),
    )


WRONG = ("y[r * apart] = sum", "y[r * apart] = 1.01f * sum")
ROWS = np.random.default_rng(3).normal(size=(6, 10)).astype(np.float32)


def strided_plan(first: Kernel | None = None, second: Kernel | None = None) -> bl.PreparedPlan:
    """Sum columns of x into one of y, and columns of y into one of x, for a number of rows."""
    plan = bl.Plan("strided")
    m = plan.variable("m", 1, 6)
    x, y = (plan.buffer(name, (6, 10), "f32") for name in ("x", "y"))
    plan.launch(
        first or column_sum(),
        x=x.view((m, 4), strides=(10, 1)),
        y=y.view((m,), 2, strides=(10,)),
        m=m,
        n=4,
        step=10,
        apart=10,
        brick="First",
    )
    plan.launch(
        second or column_sum(),
        x=y.view((m, 3), strides=(10, 1)),
        y=x.view((m,), 9, strides=(10,)),
        m=m,
        n=3,
        step=10,
        apart=10,
        brick="Second",
    )
    prepared = plan.prepare()
    prepared.write("x", ROWS)
    prepared.write("y", ROWS[::-1])
    return prepared


def sizes(*given: int) -> Callable[[Any], Any]:
    return lambda plan: [plan(m=size) for size in given]


def test_strided_views_are_checked_at_every_size() -> None:
    plan = strided_plan()
    report = bl.check(plan, reference=strided_plan(), drive=sizes(6, 1, 4))
    assert report.status == "matched", str(report)
    assert np.array_equal(plan.read("x"), ROWS)
    assert np.array_equal(plan.read("y"), ROWS[::-1])
    assert bl.check(plan, drive=sizes(2, 6)).status == "matched"


@pytest.mark.parametrize("reference", [strided_plan, lambda: None], ids=["plan", "numpy"])
@pytest.mark.parametrize("name", ["First", "Second"])
def test_a_wrong_kernel_over_strided_views_is_named(
    name: str, reference: Callable[[], bl.PreparedPlan | None]
) -> None:
    plan = strided_plan(**{name.lower(): column_sum(*WRONG)})
    report = bl.check(plan, reference=reference(), drive=sizes(1, 6), repro=False)
    assert report.status == "diverged"
    assert [each.name for each in report.findings] == [name]


def test_what_is_written_to_a_strided_view_is_in_the_memory() -> None:
    seen: dict[str, Any] = {}

    def drive(plan: Any) -> None:
        seen.update(plan(m=4), x=plan.read("x"), y=plan.read("y"))

    assert bl.check(strided_plan(), drive=drive).status == "matched"
    expected = strided_plan()(m=4)
    assert np.array_equal(seen["x"], expected.read("x"))
    assert np.array_equal(seen["y"], expected.read("y"))
    assert not np.array_equal(seen["x"], ROWS)


def test_a_kernel_that_reads_between_the_elements_of_a_view_is_named() -> None:
    plan = strided_plan(first=column_sum("c < n", "c <= n"))
    report = bl.check(plan, reference=strided_plan(), drive=sizes(6), repro=False)
    assert [each.name for each in report.findings] == ["First"]


def test_a_kernel_that_writes_between_the_elements_of_a_view_is_refused() -> None:
    plan = strided_plan(second=column_sum("y[r * apart] = sum;", "y[r * apart] = y[r + 1] = sum;"))
    with pytest.raises(LaunchError, match=r"launch 1 \(column_sum\) writes between .* of y"):
        bl.check(plan, reference=strided_plan(), drive=sizes(6))


def test_a_kernel_that_declares_strides_takes_dense_buffers_too() -> None:
    def dense(kernel: Kernel) -> bl.PreparedPlan:
        plan = bl.Plan("dense")
        x, y = plan.buffer("x", array=ROWS.copy()), plan.buffer("y", 6, "f32")
        plan.launch(kernel, x=x, y=y, m=6, n=10, step=10, apart=1)
        return plan.prepare()

    assert bl.check(dense(column_sum()), drive=lambda plan: plan()).status == "matched"
    report = bl.check(dense(column_sum(*WRONG)), drive=lambda plan: plan(), repro=False)
    assert report.findings[0].name == "column_sum"


def test_every_view_that_nobody_reads_is_a_result() -> None:
    plan = bl.Plan("columns")
    x, y = plan.buffer("x", array=ROWS.copy()), plan.buffer("y", (6, 2), "f32")
    for column in range(2):
        plan.launch(
            column_sum(),
            x=x.view((6, 5), 5 * column, strides=(10, 1)),
            y=y.view((6,), column, strides=(2,)),
            m=6,
            n=5,
            step=10,
            apart=2,
        )
    made: dict[str, Any] = {}
    report = bl.check(plan.prepare(), drive=lambda plan: made.update(plan()))
    assert report.status == "matched"
    sums = ROWS.reshape(6, 2, 5).sum(axis=2)
    assert np.allclose(np.stack([each.numpy() for each in made.values()], axis=1), sums)
    assert list(made) == ["<y f32[6] strides [2]>", "<y+4 f32[6] strides [2]>"]
