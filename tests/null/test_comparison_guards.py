"""Clean pairs that one rule keeps from being blamed, and that no case of the benchmark holds."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hand_made_launches import Array, Launches

from brickline.comparison.comparing import compare
from brickline.verdict import DivergenceReport, Status


def drawn(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def stored(values: Array) -> Array:
    return values.astype(ml_dtypes.bfloat16).astype(np.float64)


def noisy(values: Array, seed: int) -> Array:
    """Values as another kernel would round them; those of seed 0 are the reference's."""
    noise = drawn(100 + seed, *values.shape) if seed else 0.0
    return stored(values * (1 + 2.0**-9 * noise))


def returns(launches: Launches, trace: int, value: Array, dtype: str = "float32") -> None:
    launches._operand(trace, 1, 0, value, dtype, True)


def compared(candidate: Launches, reference: Launches) -> DivergenceReport:
    return compare(candidate.run("c"), reference.run("r"))


def residual(seed: int) -> Launches:
    """A block whose residual is nearly taken back by what is added to it."""
    out, dtype = Launches(), "bfloat16"
    x = stored(drawn(0, 64, 64))
    weight = stored(-0.97 * np.eye(64) + 0.03 * drawn(2, 64, 64) / 8)
    y = noisy(x @ weight, seed)
    root = out.add("Model", [x], kind="Model", dtype=dtype)
    block = out.add("layers.0", [x], kind="Block", parent=root, layer=0, dtype=dtype)
    out.add("layers.0.down", [x], [y], [weight], parent=block, layer=0, kind="Linear", dtype=dtype)
    for launch in (block, root):
        returns(out, launch, stored(x + y), dtype)
    return out


def product(seed: int) -> Launches:
    """Inputs of one sign, and weights that sum to nearly nothing."""
    out, dtype = Launches(), "bfloat16"
    given = stored(drawn(0, 64, 64))
    x = noisy(1 + 0.1 * drawn(1, 64, 64), seed)
    weight = drawn(2, 64, 64) / 8
    weight = stored(weight - weight.mean(0))
    root = out.add("Model", [given], kind="Model", dtype=dtype)
    out.add("norm", [given], [x], kind="LayerNorm", parent=root, dtype=dtype)
    out.add("up", [x], [stored(x @ weight)], [weight], parent=root, kind="Linear", dtype=dtype)
    returns(out, root, stored(x @ weight), dtype)
    return out


@pytest.mark.parametrize("record", [residual, product])
@pytest.mark.parametrize("seed", range(1, 6))
def test_terms_that_cancel_make_no_suspect(record: Callable[[int], Launches], seed: int) -> None:
    assert not compared(record(seed), record(0)).findings


def blocks(*, exchanged: bool, fault: int = -1) -> Launches:
    """Blocks that are given a table, before or after what they work on."""
    out = Launches()
    x, table = drawn(0, 8, 32), drawn(9, 4, 4)
    root = out.add("Model", [x], kind="Model")
    for layer in range(3):
        y = np.tanh(x @ drawn(layer + 1, 32, 32) / 6) * (1.5 if layer == fault else 1.0)
        given = [table, x] if exchanged else [x, table]
        out.add(f"layers.{layer}", given, [y], kind="Block", parent=root, layer=layer)
        x = y
    returns(out, root, x)
    return out


def test_arguments_in_another_order_are_paired_by_their_size() -> None:
    assert compared(blocks(exchanged=True), blocks(exchanged=False)).status is Status.MATCHED
    report = compared(blocks(exchanged=True, fault=1), blocks(exchanged=False))
    assert [finding.name for finding in report.findings] == ["layers.1"]
