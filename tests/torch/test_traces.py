"""Checksums, traces and saved tensors of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brickline import BrickProfiler, Run
from brickline.checksums import fnv1a_f32
from brickline.dtypes import dtype_of
from brickline.errors import UsageError
from brickline.fingerprints import fingerprint
from brickline.run_tensors import load_tensor, save_tensor

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_tensor_has_the_checksum_of_its_values(dtype: torch.dtype) -> None:
    values = (torch.arange(100) % 5).reshape(4, 25).to(dtype)
    expected = fnv1a_f32(values.to(torch.float32).flatten().tolist())
    assert fnv1a_f32(values) == expected
    assert fnv1a_f32(values.T.contiguous().T) == expected
    assert fnv1a_f32(values.T) != expected


def test_a_gradient_a_parameter_and_a_view_are_read() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert fnv1a_f32(weight * 2) == fnv1a_f32([2.0] * 3)
    assert fnv1a_f32(torch.zeros(())) == fnv1a_f32([0.0])
    assert fnv1a_f32(torch.zeros(3, 0)) == fnv1a_f32([])
    huge = torch.ones(1).expand(1 << 20, 1 << 20)  # 4 TiB where it is copied
    assert fnv1a_f32(huge) == fnv1a_f32([1.0] * 64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.ones(2, dtype=torch.complex64),
    ],
    ids=["sparse", "meta", "complex"],
)
def test_what_has_no_numbers_in_order_is_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected real numbers"):
        fnv1a_f32(make())
    with pytest.raises(UsageError, match="expected a d"):
        save_tensor(tmp_path, None, make())
    p = BrickProfiler("p", enabled=True, device="NULL")
    with pytest.raises(UsageError, match="outputs: "):
        p.trace("k", outputs=[make()])
    assert p.kernel_traces() == []
    p.close()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int16, torch.bool], ids=str)
def test_a_saved_tensor_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    values = (torch.arange(12) % 3).reshape(3, 4).to(dtype).T
    save_tensor(tmp_path, None, values)
    found = load_tensor(tmp_path, fingerprint(values))
    assert (found.shape, dtype_of(found.dtype)) == ((4, 3), dtype_of(dtype))
    assert (found.astype(np.float32) == values.float().numpy()).all()


def test_torch_and_numpy_agree_in_a_run(tmp_path: Path) -> None:
    x = torch.arange(200, dtype=torch.float32).reshape(2, 100)
    mine = BrickProfiler("mine", enabled=True, device="NULL", path=tmp_path / "mine")
    theirs = BrickProfiler("theirs", enabled=True, device="NULL")
    mine.trace("double", 0, 0, inputs=[x], outputs=(x * 2).T.contiguous().T)
    theirs.trace("double", 0, 0, inputs=[x.numpy()], outputs=x.numpy() * 2)
    assert mine.compare(theirs).matched
    mine.trace("add_", 0, 0, inputs=[x])
    x.add_(1)
    mine.trace("next", 0, 0, inputs=[x])
    mine.close()
    theirs.close()
    (part,) = Run.open(tmp_path / "mine").parts
    first, _, before, after = part.operands
    assert first["tensor"] == before["tensor"] != after["tensor"]
    assert (before["version"], after["version"]) == (0, 1)
    assert part.string(part.traces[0]["backend"]) == "CPU"
