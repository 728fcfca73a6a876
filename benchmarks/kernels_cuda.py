"""Claims: launches from Python into an idle stream, and a GEMV against a streaming read.

* Bursts of 200 launches, host time before the sync: at most 0.6 of CuPy's. Listed beside: torch, a
  Triton kernel, and a loop of bare `cuLaunchKernel` calls in C.
* GEMV of bf16 at 16384 x 2048 and larger: at least 0.75 of a streaming read in the same run.

Skipped where torch sees no CUDA device.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from harness import Claim
from streaming_read import graph_seconds, streaming_read

BURST = 200
SHAPES = ((16384, 2048), (28672, 4096), (128256, 2048))

NOTHING = """
BRICKLINE void nothing(Block& block, const float* x, float* y, int64_t n) {
    if (n < 0) y[0] = x[0];
}
"""
BARE_LOOP = """
#include <stddef.h>
typedef int (*Launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void*, void**, void**);
void burst(Launch launch, void* function, void* stream, void** arguments, int count) {
    for (int i = 0; i < count; ++i)
        launch(function, 1, 1, 1, 128, 1, 1, 0, stream, arguments, NULL);
}
"""


def launches(torch: Any, repeats: int) -> dict[str, Any]:
    """Host microseconds of one launch of a kernel that does nothing, in bursts."""
    import brickline as bl
    from brickline.buffers import as_buffer

    x, y = torch.zeros(16, device="cuda"), torch.zeros(16, device="cuda")
    signature = [bl.Param("x", "f32", "n"), bl.Param("y", "f32", "n", "write"), bl.Scalar("n")]
    kernel = bl.Kernel("nothing", NOTHING, signature, local_size=128)
    cached = bl.KernelCache(disk=False).get_or_compile(kernel, "CUDA:0")
    launch, bx, by = cached.launch, as_buffer(x), as_buffer(y)

    def ours() -> None:
        for _ in range(BURST):
            launch(bx, by, 16)

    def ours_with_tensors() -> None:
        for _ in range(BURST):
            launch(x, y, 16)

    variants: dict[str, Callable[[], None]] = {
        "brickline": ours,
        "brickline, torch tensors as arguments": ours_with_tensors,
        "a loop of bare cuLaunchKernel in C": _bare_loop(cached, bx, by),
    }
    variants |= _peers(torch, x, y)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(repeats + 5):
        for name, burst in variants.items():
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            burst()
            spent = (time.perf_counter_ns() - begin) / BURST / 1e3
            if number >= 5:
                times[name].append(spent)
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians.get("CuPy RawKernel")
    return Claim(
        "cuda: host time of a launch from Python",
        medians["brickline"] / base if base else None,
        "of CuPy RawKernel",
        0.6,
        {name: value / base for name, value in medians.items()} if base else {},
        "; ".join(f"{name} {value:.2f} us" for name, value in medians.items()),
    ).as_dict()


def _bare_loop(cached: Any, x: Any, y: Any) -> Callable[[], None]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "burst.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=BARE_LOOP.encode(), check=True)
        library = ctypes.CDLL(str(path))
    driver = ctypes.CDLL("libcuda.so.1")
    values = [ctypes.c_uint64(x.address), ctypes.c_uint64(y.address), ctypes.c_int64(16)]
    values.append(ctypes.c_uint64(cached.program.fault))
    arguments = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
    function = ctypes.c_void_p(cached.program.function)
    launch = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p)

    def burst(keep: Any = values) -> None:
        library.burst(launch, function, None, arguments, BURST)

    return burst


def _peers(torch: Any, x: Any, y: Any) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}

    def torch_op() -> None:
        for _ in range(BURST):
            x.zero_()

    found["torch tensor.zero_()"] = torch_op
    try:
        import cupy
    except ImportError:
        pass
    else:
        text = 'extern "C" __global__ void nothing(const float* x, float* y, long long n) {}'
        raw = cupy.RawKernel(text, "nothing")
        cx, cy, n = cupy.asarray(x), cupy.asarray(y), cupy.int64(16)

        def cupy_raw() -> None:
            for _ in range(BURST):
                raw((1,), (128,), (cx, cy, n))

        found["CuPy RawKernel"] = cupy_raw
    try:
        import triton_nothing
    except ImportError:
        pass
    else:
        found["Triton"] = triton_nothing.burst(x, y, BURST)
    return found


def gemv(torch: Any, repeats: int) -> list[dict[str, Any]]:
    """Bytes per second of a GEMV, and of a kernel that only reads as many bytes."""
    import brickline as bl
    from brickline.kernels.catalog import gemv as gemv_kernel

    cache = bl.KernelCache(disk=False)
    ours = cache.get_or_compile(gemv_kernel("bf16"), "CUDA:0").launch
    read = streaming_read(cache)
    return [_gemv_claim(torch, ours, read, *shape, repeats) for shape in SHAPES]


def _gemv_claim(
    torch: Any, ours: Any, read: Any, rows: int, columns: int, repeats: int
) -> dict[str, Any]:
    nbytes = rows * columns * 2
    copies = max(2, -(-(256 << 20) // nbytes))  # more than the L2 cache holds
    weights = [
        torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(copies)
    ]
    x = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(rows, device="cuda")
    words = [w.view(torch.uint32).view(-1, 4) for w in weights]
    sink = torch.zeros(4, device="cuda").view(torch.uint32)[:1]
    variants: dict[str, Callable[[int], object]] = {
        "brickline gemv": lambda i: ours(weights[i], x, y, rows, columns),
        "streaming read": lambda i: read(words[i], sink, nbytes // 16),
        "cuBLAS (torch.mv)": lambda i: torch.mv(weights[i], x),
    }
    speeds = {
        name: nbytes / graph_seconds(torch, call, copies, repeats) / 1e9
        for name, call in variants.items()
    }
    expected = weights[0].double() @ x.double()
    ours(weights[0], x, y, rows, columns)
    error = float((y.double() - expected).norm() / expected.norm())
    shown = "; ".join(f"{name} {speed:.0f} GB/s" for name, speed in speeds.items())
    return Claim(
        f"cuda: time of a bf16 GEMV of {rows} x {columns}",
        speeds["streaming read"] / speeds["brickline gemv"],
        "of a streaming read's",
        1 / 0.75,
        {name: speeds["streaming read"] / speed for name, speed in speeds.items()},
        f"{shown}; relative error {error:.1e}",
    ).as_dict()


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim of this file."""
    torch = harness.torch_with_cuda()
    if torch is None:
        return harness.not_measured("kernels_cuda", harness.NO_GPU)
    scale = 1 if quick else 4
    return [launches(torch, 25 * scale), *gemv(torch, 10 * scale)]


if __name__ == "__main__":
    raise SystemExit(harness.main(run, None, __doc__))
