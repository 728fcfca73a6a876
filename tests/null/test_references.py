"""References, called as their kernels would be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from brickline.errors import KernelError, LaunchError, SymbolicError
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import gemv, rms_norm
from brickline.references import run_reference

SOURCE = "BRICKLINE void f(Block& block) {}"


def kernel(reference: Any = None, dtype: str = "bf16") -> Kernel:
    signature = [
        Param("x", dtype, "n"),
        Param("y", dtype, "n", "read-write"),
        Param("sum", "f32", 1, "write"),
        Scalar("n", low=1),
        Scalar("by", "f32"),
    ]
    return Kernel("f", SOURCE, signature, reference=reference)


def test_small_floats_arrive_widened_and_leave_rounded() -> None:
    seen = {}

    def reference(x: Any, y: Any, n: int, by: float) -> Any:
        seen.update(x=x.dtype, y=y.dtype, n=n)
        return y + by * x, x.sum(keepdims=True)

    x = np.array([1, 2, 3], ml_dtypes.bfloat16)
    y = np.array([0.1, 0.2, 0.3], ml_dtypes.bfloat16)
    got = run_reference(kernel(reference), {"x": x, "y": y, "n": 3, "by": 0.01})
    assert seen == {"x": np.float32, "y": np.float32, "n": 3}
    assert got["y"].dtype == ml_dtypes.bfloat16
    exact = (y.astype("f4") + 0.01 * x.astype("f4")).astype(ml_dtypes.bfloat16)
    assert np.array_equal(got["y"], exact)
    assert got["sum"].tolist() == [6.0]
    assert y[0] == ml_dtypes.bfloat16(0.1)  # what was given is left alone


@pytest.mark.parametrize("dtype", ["f64", "f32", "i32", "bool"])
def test_other_types_arrive_as_they_are(dtype: str) -> None:
    seen = []

    def reference(x: Any, y: Any, n: int, by: float) -> Any:
        seen.append(x.dtype)
        return y, np.zeros(1)

    made = kernel(reference, dtype)
    x = np.ones(2, dtype.replace("f", "float").replace("i", "int"))
    run_reference(made, {"x": x, "y": x, "n": 2, "by": 1.0})
    assert seen == [x.dtype]


def test_what_does_not_fit_is_refused() -> None:
    def reference(x: Any, y: Any, n: int, by: float) -> Any:
        return y, np.zeros(1)

    x = np.ones(2, ml_dtypes.bfloat16)
    good = {"x": x, "y": x, "n": 2, "by": 1.0}
    with pytest.raises(KernelError, match="kernel f has no reference"):
        run_reference(kernel(), good)
    with pytest.raises(LaunchError, match="argument x is missing"):
        run_reference(kernel(reference), {k: v for k, v in good.items() if k != "x"})
    with pytest.raises(SymbolicError, match="n"):
        run_reference(kernel(reference), good | {"n": 0})
    with pytest.raises(LaunchError, match=r"expected bf16\[3\], got bfloat16\[2\]"):
        run_reference(kernel(reference), good | {"n": 3})
    with pytest.raises(LaunchError, match=r"expected bf16\[2\], got float32\[2\]"):
        run_reference(kernel(reference), good | {"x": x.astype("f4")})
    with pytest.raises(LaunchError, match="has no argument yy; it takes x, y, sum, n, by"):
        run_reference(kernel(reference), good | {"yy": 1})
    with pytest.raises(LaunchError, match="by: expected a number, got None"):
        run_reference(kernel(reference), {k: v for k, v in good.items() if k != "by"})
    with pytest.raises(KernelError, match="to take x, y, n, by: what is read"):
        run_reference(kernel(lambda x, n: x), good)
    with pytest.raises(KernelError, match="to return y, sum, got 1 results"):
        run_reference(kernel(lambda **given: given["y"]), good)
    with pytest.raises(KernelError, match=r"return shape \(1,\), got \(3,\)"):
        run_reference(kernel(lambda **given: (given["y"], np.zeros(3))), good)


def test_the_kernels_that_ship_have_one() -> None:
    x = np.ones((2, 8), ml_dtypes.bfloat16)
    weight = np.ones(8, ml_dtypes.bfloat16)
    got = run_reference(rms_norm("bf16"), {"x": x, "weight": weight, "rows": 2, "n": 8, "eps": 0.0})
    assert got["y"].dtype == ml_dtypes.bfloat16
    assert np.all(got["y"] == 1)
    product = run_reference(gemv("bf16"), {"w": x, "x": weight, "m": 2, "n": 8})
    assert product["y"].tolist() == [8.0, 8.0]
