"""Triton's compiled kernels, seen as cached kernels."""

from __future__ import annotations

import pytest

from brickline.adapters.triton import triton_kernels
from brickline.errors import LaunchError, UsageError

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def add_one(x, y, n, SIZE: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def test_a_compiled_kernel_is_read(torch):
    x = torch.zeros(1000, device="cuda")
    y = torch.empty_like(x)
    add_one[(8,)](x, y, 1000, SIZE=128, num_warps=4)
    add_one[(4,)](x, y, 1000, SIZE=256, num_warps=8)
    torch.cuda.synchronize()
    found = triton_kernels(add_one)
    assert len(found) == 2
    for kernel in found:
        assert kernel.device == "CUDA:0"
        assert kernel.entry_point == "add_one"
        assert kernel.var_names == ("n",)
        assert kernel.globals == kernel.ins[:2] == (0, 1)
        assert ".visible .entry add_one" in kernel.code
        assert kernel.resources["registers"] > 0
        assert [str(size) for size in kernel.global_size] == ["grid_x", "grid_y", "grid_z"]
        with pytest.raises(LaunchError, match="is Triton's"):
            kernel.launch(x, y, 1000)
    assert sorted(str(kernel.local_size[0]) for kernel in found) == ["128", "256"]
    assert len({kernel.key for kernel in found}) == 2


def test_something_else_is_refused():
    with pytest.raises(UsageError, match=r"expected a function of triton\.jit"):
        triton_kernels(print)
