"""Fingerprints on CUDA against those of the same tensors on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from brickline import abi
from brickline.dtypes import DTYPES
from brickline.errors import UsageError
from brickline.fingerprints import Fingerprint, distance, fingerprint

SHAPES = [(), (1,), (7,), (64,), (3, 5), (33, 100), (40, 128), (5, 1024), (17, 67), (2, 3, 700)]
SHAPES += [(3000, 2), (5000, 1), (0, 4), (3072,), (1, 5000), (300, 4096), (64, 11008), (1 << 20,)]
SHAPES += [(3, (1 << 20) + 8), (70_000, 3)]
EXACT = ["hash", "elements", "nan_count", "inf_count", "first_nan", "first_inf", "nonfinite_hash"]
EXACT += ["zeros", "subnormals", "saturated", "dtype", "dimensions", "shape", "version"]
EXACT += ["minimum", "maximum", "absmax"]


def tensor_of(torch, name, shape, *, special=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, DTYPES[name].numpy_name)
    elements = int(np.prod(shape))
    if DTYPES[name].kind == "float":
        values = torch.randn(elements, generator=generator, dtype=torch.float64)
        if special and elements > 10:
            values[3], values[7], values[8] = (
                float("nan"),
                0.0,
                torch.finfo(dtype).smallest_normal / 2,
            )
            values[elements // 2], values[-1] = float("-inf"), float("inf")
            values[elements // 3] = torch.finfo(dtype).max
        return values.to(dtype).reshape(shape)
    if name == "bool":
        return (torch.rand(elements, generator=generator) < 0.5).reshape(shape)
    bits = torch.randint(-(2**62), 2**62, (elements,), generator=generator)
    return (
        bits.to(torch.int64)
        .view(torch.uint8)[: elements * DTYPES[name].size_bytes]
        .clone()
        .view(dtype)
        .reshape(shape)
    )


def check_alike(on_cuda: Fingerprint, on_cpu: Fingerprint) -> None:
    a, b = on_cuda.record[0], on_cpu.record[0]
    for field in EXACT:
        assert np.array_equal(a[field], b[field]), (field, a[field], b[field])
    scale = max(on_cpu.l2, 1e-300)
    assert np.abs(a["sketch"] - b["sketch"]).max() <= 1e-12 * scale
    for field in ("l1", "l2", "total"):
        assert a[field] == pytest.approx(b[field], rel=1e-12, abs=1e-12 * max(on_cpu.l1, 1e-300))
    for field in ("rows", "columns"):
        assert np.allclose(a[field], b[field], rtol=2e-7, atol=1e-12 * max(on_cpu.l1, 1e-300))


@pytest.mark.parametrize("name", list(DTYPES))
def test_the_same_as_on_the_cpu(torch, name):
    for number, shape in enumerate(SHAPES):
        tensor = tensor_of(torch, name, shape, special=name != "f64", seed=number)
        check_alike(fingerprint(tensor.cuda()), fingerprint(tensor))


@pytest.mark.parametrize("name", ["f64", "f32", "bf16", "f8e4m3", "i8"])
def test_strides_do_not_show(torch, name):
    base = tensor_of(torch, name, (48, 70, 36), special=name != "f64")
    cuda = base.cuda()
    views = [lambda x: x.permute(2, 0, 1), lambda x: x[:, ::3], lambda x: x[5:, 1:, 3:]]
    views += [lambda x: x[0, 0], lambda x: x[:, :1].expand(48, 9, 36), lambda x: x.flatten()[1:]]
    for view in views:
        check_alike(fingerprint(view(cuda)), fingerprint(view(base)))
        check_alike(fingerprint(view(cuda).contiguous()), fingerprint(view(base)))


def test_a_ring_takes_without_waiting_and_returns_in_order(torch):
    from brickline.fingerprint_cuda import DeviceFingerprints

    ring = DeviceFingerprints(0, capacity=16)
    tensors = [tensor_of(torch, "f32", (7, 10 + k), seed=k) for k in range(40)]
    tickets = [ring.take(tensor.cuda()) for tensor in tensors]
    drained = ring.drain()
    assert [ticket for ticket, _ in drained] == tickets
    assert ring.pending == 0
    for (_, record), tensor in zip(drained, tensors, strict=True):
        check_alike(Fingerprint(record), fingerprint(tensor))


def test_small_tensors_share_a_launch(torch):
    from brickline.fingerprint_cuda import DeviceFingerprints

    names = ["f32", "bf16", "i64", "bool"]
    tensors = [
        tensor_of(torch, names[k % 4], SHAPES[k % len(SHAPES)], special=False, seed=k)
        for k in range(60)
    ]
    ring = DeviceFingerprints(0)
    tickets = ring.take_many([tensor.cuda() for tensor in tensors])
    drained = dict(ring.drain())
    for ticket, tensor in zip(tickets, tensors, strict=True):
        check_alike(Fingerprint(drained[ticket]), fingerprint(tensor))


def test_streams_do_not_disturb_each_other(torch):
    from brickline.fingerprint_cuda import DeviceFingerprints

    ring = DeviceFingerprints(0)
    tensors = [torch.randn(1 << 20, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    for number, tensor in enumerate(tensors * 4):
        with torch.cuda.stream(streams[number % 4]):
            ring.take(tensor)
    records = [Fingerprint(record) for _, record in ring.drain()]
    for number, record in enumerate(records):
        check_alike(record, fingerprint(tensors[number % 8].cpu()))


def test_repeats_are_alike(torch):
    tensor = torch.randn(1 << 24, device="cuda")
    first = fingerprint(tensor)
    for _ in range(5):
        check_alike(fingerprint(tensor), first)


def test_devices_and_dtypes_compare(torch):
    tensor = torch.randn(512, 1024)
    far = distance(fingerprint(tensor.cuda().bfloat16()), fingerprint(tensor))
    true = float((tensor.bfloat16().double() - tensor.double()).norm() / tensor.double().norm())
    assert far.relative_l2 == pytest.approx(true, rel=0.5)


def test_a_ring_refuses_other_devices(torch):
    from brickline.fingerprint_cuda import DeviceFingerprints

    ring = DeviceFingerprints(0)
    with pytest.raises(UsageError, match="expected a tensor on CUDA:0, got one on CPU"):
        ring.take(torch.zeros(3))
    assert abi.FINGERPRINT.itemsize <= 1024
