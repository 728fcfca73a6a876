"""What holds of every kernel that ships, on CPU: bits, touched bytes, faults and estimates.

`kernel_cases` has the launches.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from kernel_cases import CASES, Case

from brickline.kernel import Kernel
from brickline.kernels import catalog
from brickline.references import run_reference

DTYPES = ("f32", "bf16", "f16")
IDS = [case.name for case in CASES]
NORM = {"f32": 2e-6, "f16": 2e-3, "bf16": 2e-2}
"""Of a difference, over that of the reference: four roundings, as a fused kernel has."""


def outputs(kernel: Kernel, values: dict[str, Any]) -> dict[str, Any]:
    return {kernel.params[slot].name: values[kernel.params[slot].name] for slot in kernel.outs}


def copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def integers(kernel: Kernel, values: dict[str, Any]) -> dict[str, int]:
    return {variable.name: values[variable.name] for variable in kernel.variables}


def grid(kernel: Kernel, values: dict[str, Any]) -> tuple[int, int, int]:
    scalars = {scalar.name: values[scalar.name] for scalar in kernel.scalars}
    return kernel.sizes(scalars).global_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_kernel_computes_what_its_reference_does(host: Any, case: Case, dtype: str) -> None:
    kernel, values = case.kernel(dtype), case.arguments(dtype, seed=1)
    expected = run_reference(kernel, copied(values))
    assert host.load(kernel)(**values) == 0
    for name, found in outputs(kernel, values).items():
        wide, right = found.astype(np.float64), expected[name].astype(np.float64)
        finite = np.isfinite(right)
        np.testing.assert_array_equal(wide[~finite], right[~finite])
        error = np.linalg.norm(wide[finite] - right[finite])
        assert error <= NORM[dtype] * np.linalg.norm(right[finite]), name


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bits_do_not_depend_on_who_executes_which_blocks(host: Any, case: Case, dtype: str) -> None:
    kernel, whole = case.kernel(dtype), case.arguments(dtype)
    parts = copied(whole)
    loaded = host.load(kernel)
    assert loaded(**whole) == 0
    blocks = prod(grid(kernel, whole))
    cuts = np.random.default_rng(2).integers(0, blocks + 1, 3)
    ends = sorted({0, blocks, *map(int, cuts)})
    for first, last in reversed(list(pairwise(ends))):
        assert loaded((first, last), **parts) == 0
    for name, found in outputs(kernel, whole).items():
        assert found.tobytes() == parts[name].tobytes(), name


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_block_reads_and_writes_within_the_bytes_that_it_declares(host: Any, case: Case) -> None:
    kernel, whole = case.kernel("bf16"), case.arguments("bf16")
    before = copied(whole)
    loaded = host.load(kernel)
    assert loaded(**whole) == 0
    across, down, _ = grid(kernel, whole)
    known = integers(kernel, whole)
    for block in range(across * down):
        place = known | {"block_x": block % across, "block_y": block // across, "block_z": 0}
        values, inside = copied(before), {}
        for param in kernel.params:
            data = values[param.name].reshape(-1).view(np.uint8)
            inside[param.name] = np.ones(data.size, bool)
            if param.touches is None:
                continue
            first, end = (byte.evaluate(place) for byte in param.touches)
            assert 0 <= first <= end <= data.size, (param.name, block)
            inside[param.name][:first] = False
            inside[param.name][end:] = False
            data[~inside[param.name]] = 0xFF  # NaN, and no token, for what it must not read
        started = copied(values)
        assert loaded((block, block + 1), **values) == 0
        for name, found in outputs(kernel, values).items():
            data = found.reshape(-1).view(np.uint8)
            was = started[name].reshape(-1).view(np.uint8)
            right = whole[name].reshape(-1).view(np.uint8)
            outside = ~inside[name]
            np.testing.assert_array_equal(data[outside], was[outside])
            changed = data != was
            np.testing.assert_array_equal(data[changed], right[changed])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_estimates_are_declared(case: Case) -> None:
    kernel = case.kernel("bf16")
    known = integers(kernel, case.arguments("bf16"))
    assert kernel.flops is not None
    assert kernel.bytes is not None
    assert kernel.flops.evaluate(known) >= 0
    moved = kernel.bytes.evaluate(known)
    held = sum(
        prod(size.evaluate(known) for size in param.shape) * (4 if param.dtype == "f32" else 2)
        for param in kernel.params
        if "cache" not in param.name and param.name != "table"
    )
    positions = known.get("length", known.get("position", 0) + 1)
    cached = sum(
        positions * prod(size.evaluate(known) for size in param.shape) // known["capacity"] * 2
        for param in kernel.params
        if "cache" in param.name
    )
    assert 0 < moved <= 3 * held + cached


def test_every_kernel_that_ships_has_a_case() -> None:
    here = {case.kernel("f32").name for case in CASES}
    elsewhere = {"rms_norm", "gemv", "softmax", "silu_gate", "residual"}  # test_kernels.py
    makers = {name for name in catalog.__all__ if callable(getattr(catalog, name))}
    assert here | elsewhere == makers
