"""Fingerprints of torch tensors: layouts, dtypes, subclasses, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brickline.errors import UsageError
from brickline.fingerprints import distance, fingerprint

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
DTYPES += [torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DTYPES += [torch.bool, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = (torch.randn(40, 70) * 3).to(torch.int8).to(dtype)
    taken = fingerprint(tensor)
    assert taken.shape == (40, 70)
    assert taken.total == tensor.to(torch.float64).sum().item()
    assert taken == fingerprint(tensor.clone())
    assert taken == fingerprint(tensor.t().contiguous().t())


def test_numpy_and_torch_agree() -> None:
    array = np.random.default_rng(0).standard_normal((30, 50)).astype(np.float32)
    tensor = torch.from_numpy(array)
    assert fingerprint(tensor) == fingerprint(array)
    assert fingerprint(tensor.t()) == fingerprint(array.T)


def test_layouts() -> None:
    base = torch.randn(4, 8, 6, 10)
    views = [base.permute(0, 2, 3, 1), base.contiguous(memory_format=torch.channels_last)]
    views += [
        base[:, ::2, 1:],
        base[:, :, :, :1].expand(4, 8, 6, 9),
        base[0, 0, 0, 0],
        base.flatten()[3:],
    ]
    for view in views:
        assert fingerprint(view) == fingerprint(view.clone(memory_format=torch.contiguous_format))


def test_gradients_parameters_and_subclasses() -> None:
    tensor = torch.randn(20, 30)
    expected = fingerprint(tensor)

    class Named(torch.Tensor):
        pass

    assert fingerprint(tensor.clone().requires_grad_()) == expected
    assert fingerprint(torch.nn.Parameter(tensor)) == expected
    assert fingerprint(tensor.as_subclass(Named)) == expected
    assert fingerprint(tensor.clone().requires_grad_() * 1.0) == expected
    with torch.inference_mode():
        assert fingerprint(tensor * 1.0) == expected
    assert fingerprint(torch._neg_view(tensor)) == fingerprint(-tensor)


def test_subnormals_count_where_torch_flushes_them() -> None:
    tensor = torch.full((5000,), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        taken = fingerprint(tensor)
    finally:
        torch.set_flush_denormal(False)
    assert taken.subnormals == 5000
    assert taken.l1 == pytest.approx(5000e-40, rel=1e-3)


def test_dtypes_compare() -> None:
    tensor = torch.randn(300, 200)
    far = distance(fingerprint(tensor.bfloat16()), fingerprint(tensor))
    true = ((tensor.bfloat16().double() - tensor.double()).norm() / tensor.double().norm()).item()
    assert far.relative_l2 == pytest.approx(true, rel=0.4)


def test_zero_size() -> None:
    assert fingerprint(torch.zeros(0, 5)).elements == 0
    assert fingerprint(torch.zeros(3)[3:]).shape == (0,)


def refused() -> list[tuple[torch.Tensor, str]]:
    return [
        (torch.zeros(3, 3).to_sparse(), "to_dense"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.zeros(3, dtype=torch.complex64), "view_as_real"),
    ]


@pytest.mark.parametrize(("tensor", "words"), refused(), ids=["sparse", "meta", "complex"])
def test_what_has_no_dense_elements_is_refused(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fingerprint(tensor)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_tensors_are_refused() -> None:
    quantised = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    with pytest.raises(UsageError, match="int_repr"):
        fingerprint(quantised)


def test_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(4)
    with pytest.raises(UsageError, match="run the model on real tensors"):
        fingerprint(fake)
