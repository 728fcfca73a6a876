"""Torch tensors as buffers, and buffers as torch tensors."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from brickline.buffers import aligned_memory, as_buffer
from brickline.dtypes import DTYPES
from brickline.errors import LaunchError

torch = pytest.importorskip(
    "torch", reason="torch is not installed: pip install 'brickline[torch]'"
)

# Unsigned integers of more than a byte have few operations in torch; fill_ is one of them.
NAMES = {name: getattr(torch, dtype.numpy_name) for name, dtype in DTYPES.items()}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_taken_as_it_is(name: str) -> None:
    tensor = torch.zeros((2, 3), dtype=NAMES[name])
    buffer = as_buffer(tensor)
    assert (buffer.dtype, buffer.shape, buffer.nbytes) == (name, (2, 3), tensor.nbytes)
    assert (buffer.address, buffer.device) == (tensor.data_ptr(), "CPU")
    assert buffer.owner is tensor
    assert not buffer.is_read_only
    buffer.numpy()[1, 2] = 1
    assert tensor[1, 2].item() == 1, "the memory is shared"


@pytest.mark.parametrize("name", DTYPES)
def test_torch_takes_every_dtype_without_a_copy(name: str) -> None:
    buffer = aligned_memory((2, 3), name)
    buffer.numpy()[...] = 1
    tensor = torch.from_dlpack(buffer)
    assert (tensor.dtype, tuple(tensor.shape)) == (NAMES[name], (2, 3))
    assert tensor.data_ptr() == buffer.address
    assert as_buffer(tensor).dtype == name


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1, 1), (1,) * 8])
def test_shapes(shape: tuple[int, ...]) -> None:
    buffer = as_buffer(torch.zeros(shape))
    assert buffer.shape == shape
    assert tuple(torch.from_dlpack(buffer).shape) == shape


def test_tensors_of_many_kinds_are_tensors() -> None:
    class Mine(torch.Tensor):
        pass

    for tensor in (
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True),
        torch.ones(3).as_subclass(Mine),
        torch.ones(4)[1:],
        torch.ones(3, 4)[:1],
    ):
        assert as_buffer(tensor).address == tensor.data_ptr()
    with torch.inference_mode():
        assert as_buffer(torch.ones(3)).shape == (3,)


def test_other_strides_are_refused_with_the_remedy() -> None:
    for tensor in (torch.zeros(2, 3).T, torch.zeros(8)[::2], torch.zeros(1).expand(4)):
        with pytest.raises(LaunchError, match=r"got strides \(.*; pass tensor.contiguous\(\)"):
            as_buffer(tensor)
        assert as_buffer(tensor.contiguous())


def test_values_that_memory_does_not_hold_are_refused() -> None:
    # torch negates lazily: memory holds the other sign.
    lazy = torch._neg_view(torch.ones(3))
    with pytest.raises(LaunchError, match=r"as memory holds them; pass tensor.resolve_neg\(\)"):
        as_buffer(lazy)
    assert as_buffer(lazy.resolve_neg()).numpy().tolist() == [-1.0] * 3


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_without_dense_memory_are_refused() -> None:
    for tensor in (
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.zeros(3, dtype=torch.complex64),
    ):
        with pytest.raises(LaunchError):
            as_buffer(tensor)
    with pytest.raises(LaunchError, match="expected a tensor on cpu or cuda, got meta"):
        as_buffer(torch.zeros(3, device="meta"))


def test_tensors_of_a_transform_are_refused() -> None:
    def body(row: Any) -> Any:
        with pytest.raises(LaunchError):
            as_buffer(row)
        return row

    torch.vmap(body)(torch.ones(2, 3))


def test_nine_dimensions_are_too_many() -> None:
    with pytest.raises(LaunchError, match="at most 8 dimensions, got 9"):
        as_buffer(torch.zeros((1,) * 9))


def test_memory_is_kept_both_ways() -> None:
    array = np.arange(3.0)
    alive = weakref.ref(array)
    tensor = torch.from_dlpack(as_buffer(array))
    del array
    assert alive() is not None
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    del tensor
    assert alive() is None

    buffer = as_buffer(torch.arange(3.0))
    gc.collect()
    assert buffer.numpy().tolist() == [0.0, 1.0, 2.0]


def test_references_stay_level() -> None:
    tensor, strided = torch.ones(3), torch.ones(2, 3).T
    buffer = aligned_memory((3,), "f32")

    def use() -> None:
        as_buffer(tensor)
        torch.from_dlpack(buffer)
        with pytest.raises(LaunchError):
            as_buffer(strided)

    use()
    gc.collect()
    before = [sys.getrefcount(each) for each in (tensor, strided, buffer)]
    for _ in range(1000):
        use()
    assert [sys.getrefcount(each) for each in (tensor, strided, buffer)] == before
