"""The kernels of a transformer on a real GPU: the bits of the CPU, for every case and dtype.

`kernel_cases` has the launches; tests/cpu holds them against NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import CASES, Case, arguments

from brickline.buffers import as_buffer
from brickline.cache import KernelCache
from brickline.device.base import Device, open_device
from brickline.errors import LaunchError
from brickline.kernel import Kernel
from brickline.kernels import catalog
from brickline.launching import launch_guarded

LARGE = [
    Case("qkv", catalog.norm_gemv, {"m": 3072, "n": 2048, "eps": 1e-5}),
    Case("gate and up", catalog.gated_gemv, {"hidden": 8192, "n": 2048}),
    Case("down", catalog.gemv_residual, {"m": 2048, "n": 8192}),
    Case(
        "logits",
        lambda dtype: catalog.norm_gemv(dtype, "f32", rows_per_block=16),
        {"m": 20_000, "n": 2048, "eps": 1e-5},
    ),
    Case(
        "attention",
        catalog.attention_decode,
        {"kv_heads": 8, "capacity": 4096, "length": 3001, "scale": 0.125},
    ),
    Case("parts", catalog.attention_combine, {"kv_heads": 8, "capacity": 4096}),
    Case("largest", catalog.argmax_tiles, {"rows": 1, "n": 128_256}),
    Case("rows", catalog.gemm, {"m": 64, "n": 2048, "k": 2048}),
    Case("one row", catalog.gemm, {"m": 1, "n": 2048, "k": 2048}),
    Case("prompt", catalog.rope, {"rows": 100, "heads": 32, "dim": 64, "position": 3000}),
    Case(
        "prompt kept",
        catalog.kv_append,
        {"rows": 100, "kv_heads": 8, "dim": 64, "capacity": 4096, "position": 3000},
    ),
]
"""Shapes of Llama 3.2 1B."""


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("CUDA:0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("kernels") / "cache")


def on_both(
    cache: KernelCache, device: Device, kernel: Kernel, values: dict[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Launch on CPU and CUDA; what each wrote, by parameter."""
    on_host, on_device = dict(values), dict(values)
    for param in kernel.params:
        on_host[param.name] = as_buffer(values[param.name].copy())
        on_device[param.name] = device.from_numpy(values[param.name])
    cache.get_or_compile(kernel, "CPU").launch(**on_host)
    cache.get_or_compile(kernel, "CUDA:0").launch(**on_device)
    device.synchronize()
    names = [kernel.params[slot].name for slot in kernel.outs]
    return [(name, on_host[name].numpy(), device.to_numpy(on_device[name])) for name in names]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_kernel_has_the_bits_of_the_cpu(device, cache, case, dtype):
    kernel, values = case.kernel(dtype), case.arguments(dtype, seed=3)
    for name, cpu, cuda in on_both(cache, device, kernel, values):
        assert cpu.tobytes() == cuda.tobytes(), name


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", LARGE, ids=[case.name for case in LARGE])
def test_a_kernel_has_the_bits_of_the_cpu_at_the_size_of_a_model(device, cache, case, dtype):
    kernel, values = case.kernel(dtype), case.arguments(dtype, seed=4)
    for name, cpu, cuda in on_both(cache, device, kernel, values):
        assert cpu.tobytes() == cuda.tobytes(), name


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_kernel_writes_within_bounds(device, cache, case):
    kernel, values = case.kernel("bf16"), case.arguments("bf16")
    for param in kernel.params:
        values[param.name] = device.from_numpy(values[param.name])
    launch_guarded(cache.get_or_compile(kernel, "CUDA:0"), values)
    device.synchronize()


def test_a_length_changes_and_the_grid_does_not(device, cache):
    kernel = catalog.attention_decode("bf16")
    sizes = {"kv_heads": 8, "capacity": 1024, "scale": 0.125}
    for length in (1, 64, 65, 1000, 1024):
        values = arguments(kernel, sizes | {"length": length}, seed=5)
        for name, cpu, cuda in on_both(cache, device, kernel, values):
            assert cpu.tobytes() == cuda.tobytes(), (name, length)


def test_faults_have_codes_of_their_own(device, cache):
    kernel = catalog.embedding("bf16")
    sizes = {"rows": 2, "vocabulary": 5, "n": 64}
    values = arguments(kernel, sizes, given={"ids": (5, 1)})
    table = values["table"]
    for param in kernel.params:
        values[param.name] = device.from_numpy(values[param.name])
    cache.get_or_compile(kernel, "CUDA:0").launch(**values)
    with pytest.raises(LaunchError, match=f"fault {catalog.FAULT_TOKEN}"):
        device.synchronize()
    rows = device.to_numpy(values["y"])
    assert not rows[0].astype(np.float32).any()
    assert rows[1].tobytes() == table[1].tobytes()

    kernel = catalog.rope_append("bf16")
    sizes = {"heads": 4, "kv_heads": 2, "dim": 64, "capacity": 7, "position": 7}
    values = arguments(kernel, sizes)
    keys = values["k_cache"]
    for param in kernel.params:
        values[param.name] = device.from_numpy(values[param.name])
    cache.get_or_compile(kernel, "CUDA:0").launch(**values)
    with pytest.raises(LaunchError, match=f"fault {catalog.FAULT_CAPACITY}"):
        device.synchronize()
    assert device.to_numpy(values["k_cache"]).tobytes() == keys.tobytes()
