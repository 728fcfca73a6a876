"""Differences no larger than rounding that have a direction: a factor, a constant, a tail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hand_made_launches import Launches
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from brickline.comparison.comparing import compare
from brickline.verdict import DivergenceReport, Status, Verdict

Array = NDArray[Any]
GRIDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ROWS, WIDTH = 64, 512


def rounded(values: Array, dtype: str) -> Array:
    return values.astype(GRIDS[dtype]).astype(np.float64)


def run(
    dtype: str,
    *,
    change: Callable[[Array], Array] = lambda y: y,
    noise: float = 0.0,
    seed: int = 0,
    shape: tuple[int, int] = (ROWS, WIDTH),
    kind: str = "RMSNorm",
    given: Array | None = None,
) -> Any:
    """One norm on random inputs, with rounding noise of its own before the result is stored."""
    x = np.random.default_rng(seed).standard_normal(shape) if given is None else given
    x = rounded(x, dtype)
    y = change(x / np.sqrt((x**2).mean(-1, keepdims=True)))
    y = y * (1 + noise * np.random.default_rng(seed + 1).standard_normal(y.shape))
    out = Launches()
    root = out.add("Model", [x], [rounded(y, dtype)], kind="Model", dtype=dtype)
    out.add("norm", [x], [rounded(y, dtype)], kind=kind, parent=root, dtype=dtype)
    return out.run("c")


def compared(dtype: str, change: Callable[[Array], Array], **options: Any) -> DivergenceReport:
    noise = ROUNDOFF[dtype] / 8
    return compare(run(dtype, change=change, noise=noise, **options), run(dtype, **options))


def factor(size: float) -> Callable[[Array], Array]:
    return lambda y: y * (1 - size)


def constant(size: float) -> Callable[[Array], Array]:
    return lambda y: y + size


def tail(count: int) -> Callable[[Array], Array]:
    def change(y: Array) -> Array:
        out = y.copy()
        out.reshape(-1)[-count:] = 0
        return out

    return change


@pytest.mark.parametrize("dtype", GRIDS)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (factor, "times the reference's"),
        (constant, "shifted by"),
    ],
)
@pytest.mark.parametrize("roundoffs", [1.3, -1.3])
def test_what_a_whole_tensor_has_in_common_is_no_rounding(
    dtype: str, change: Any, word: str, roundoffs: float
) -> None:
    report = compared(dtype, change(roundoffs * ROUNDOFF[dtype]))
    assert report.status is Status.DIVERGED
    (finding,) = report.findings
    assert (finding.name, finding.verdict) == ("norm", Verdict.SUSPECT)
    assert finding.cause is not None
    assert word in finding.cause
    assert finding.evidence["bias"] == pytest.approx(1.3 * ROUNDOFF[dtype], rel=0.1)
    assert finding.evidence["bias"] > finding.evidence["bias_explained_by_rounding"]
    assert "rounding, which cancels, leaves" in report.whys[0]


def test_a_tail_of_zeros_is_no_rounding() -> None:
    report = compared("bfloat16", tail(8))
    assert report.status is Status.DIVERGED
    assert report.findings[0].name == "norm"
    assert report.findings[0].cause == "a few elements are further off than rounding explains"


def test_what_the_fault_hands_on_is_not_called_rounding() -> None:
    report = compared("bfloat16", factor(0.015))
    assert Verdict.ROUNDING not in report.verdicts.columns["verdict"]


def test_the_smallest_factor_that_shows_shrinks_with_the_tensor() -> None:
    """Errors cancel: what hides in four rows shows in four thousand."""
    seen = {
        rows: compared("bfloat16", factor(0.25 * ROUNDOFF["bfloat16"]), shape=(rows, 64)).status
        for rows in (4, 4096)
    }
    assert seen == {4: Status.MATCHED, 4096: Status.DIVERGED}


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(sorted(GRIDS)),
    seed=st.integers(0, 2**20),
    rows=st.integers(1, 300),
    width=st.integers(1, 300),
    mean=st.sampled_from([0.0, 1.0, 10.0]),
    channels=st.booleans(),
)
def test_rounding_is_matched(
    dtype: str, seed: int, rows: int, width: int, mean: float, channels: bool
) -> None:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, width)) + mean
    if channels:
        x = x * np.where(draw.random(width) < 0.03, 30.0, 1.0)
    assert compared(dtype, lambda y: y, given=x, seed=seed).status is Status.MATCHED


@pytest.mark.parametrize("dtype", GRIDS)
def test_one_element_that_rounds_to_its_neighbour_is_matched(dtype: str) -> None:
    def nudged(y: Array) -> Array:
        out = rounded(y, dtype)
        at = np.unravel_index(np.abs(out).argmax(), out.shape)
        out[at] *= 1 + 2 * ROUNDOFF[dtype]
        return out

    assert compare(run(dtype, change=nudged), run(dtype)).status is Status.MATCHED
