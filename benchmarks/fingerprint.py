"""Claims: what a fingerprint costs, beside reading the same memory and beside `torch.hash_tensor`.

* 64 MB of float32 on one core: at most the time of `torch.hash_tensor` on one thread, and at most
  1 / 0.3 times that of a plain sum, which reads as fast as one core can.
* On CUDA, 1 GiB: at most 1 / 0.7 (float32) and 1 / 0.5 (bfloat16) times a streaming read; 1 MiB: at
  most 3 times the time of reading it. Skipped where torch sees no CUDA device.

Listed without a target: other dtypes and shapes, a transposed matrix, the vector units that the
machine would not choose, and eight small tensors in one launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
from harness import Claim
from streaming_read import graph_seconds, streaming_read

from brickline import _core
from brickline.fingerprints import fingerprint_bytes, view_of

GIB, MIB = 1 << 30, 1 << 20
ELEMENTS = 16 << 20


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each call, one value per round; all of them take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, call in calls.items():
            begin = time.thread_time()
            call()
            if number:
                times[name].append(time.thread_time() - begin)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


# --- CPU ------------------------------------------------------------------------------------------


def on_cpu(torch: Any, repeats: int) -> list[dict[str, Any]]:
    """64 MB of float32 on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with harness.quiet():
            return [*_cpu_claims(torch, repeats), _cpu_others(torch, repeats)]
    finally:
        torch.set_num_threads(before)


def _cpu_claims(torch: Any, repeats: int) -> list[dict[str, Any]]:
    x = torch.randn(ELEMENTS)
    calls: dict[str, Callable[[], Any]] = {
        "fingerprint": lambda: fingerprint_bytes(x),
        "torch.sum": lambda: x.sum(),
        "fp64 L1 norm (DebugMode)": lambda: torch.linalg.vector_norm(x, 1, dtype=torch.float64),
    }
    if hasattr(torch, "hash_tensor"):
        calls["torch.hash_tensor"] = lambda: torch.hash_tensor(x)
    times = interleaved(calls, repeats)
    middle = medians(times)
    speeds = "; ".join(f"{name} {4 * ELEMENTS / s / 1e9:.1f} GB/s" for name, s in middle.items())
    note = f"{_core.fingerprint_engines()[0]}: {speeds}"
    peer = middle.get("torch.hash_tensor")
    rest = {name: value / peer for name, value in middle.items()} if peer else {}
    return [
        Claim(
            "fingerprint of 64 MB of float32 on one core, against torch.hash_tensor",
            middle["fingerprint"] / peer if peer else None,
            "of torch.hash_tensor",
            1.0,
            rest,
            note,
        ).as_dict(),
        Claim(
            "fingerprint of 64 MB of float32 on one core, against reading it",
            middle["fingerprint"] / middle["torch.sum"],
            "of torch.sum",
            1 / 0.3,
            {name: value / middle["torch.sum"] for name, value in middle.items()},
            note,
        ).as_dict(),
    ]


def _cpu_others(torch: Any, repeats: int) -> dict[str, Any]:
    x = torch.randn(1024, 1024)
    tensors = {
        "float32": x,
        "float32, transposed": x.t(),
        "float32, 1000 columns": x[:, :1000].contiguous(),
        "bfloat16": x.bfloat16(),
        "float16": x.half(),
        "float8_e4m3fn": x.to(torch.float8_e4m3fn),
        "float64": x.double(),
        "int64": (x * 100).long(),
        "half of it zeros": x.relu(),
    }
    calls = {name: _taking(tensor) for name, tensor in tensors.items()}
    view = view_of(x)
    for number, engine in enumerate(_core.fingerprint_engines()):
        calls[f"float32 by {engine}"] = _taking_with(view, number)
    small = torch.randn(4096)
    calls["4096 of float32 (microseconds)"] = lambda: fingerprint_bytes(small)
    middle = medians(interleaved(calls, repeats))
    base = middle["float32"]
    microseconds = middle.pop("4096 of float32 (microseconds)") * 1e6
    return Claim(
        "fingerprint of 1024 x 1024 on one core, by dtype and layout",
        1.0,
        "of float32, contiguous",
        None,
        {name: value / base for name, value in middle.items()},
        f"float32 takes {base * 1e6:.0f} us, {4 * MIB / base / 1e9:.1f} GB/s; 4096 of float32 "
        f"{microseconds:.2f} us with the call from Python",
    ).as_dict()


def _taking(tensor: Any) -> Callable[[], Any]:
    return lambda: fingerprint_bytes(tensor)


def _taking_with(view: Any, engine: int) -> Callable[[], Any]:
    return lambda: _core.fingerprint(view.address, view.dtype, view.shape, view.strides, engine)


# --- CUDA -----------------------------------------------------------------------------------------


def on_cuda(torch: Any, repeats: int) -> list[dict[str, Any]]:
    """1 GiB and 1 MiB against a streaming read, and small tensors in one launch."""
    import brickline as bl
    from brickline.fingerprint_cuda import DeviceFingerprints

    read = streaming_read(bl.KernelCache(disk=False))
    ring = DeviceFingerprints(0, capacity=1 << 14)
    claims = []
    for name, target in (("float32", 1 / 0.7), ("bfloat16", 1 / 0.5)):
        claims.append(_cuda_claim(torch, ring, read, name, GIB, target, 2, repeats))
    for name in ("float32", "bfloat16"):
        claims.append(_cuda_claim(torch, ring, read, name, MIB, 3.0, 64, repeats))
    claims.append(_shared_claim(torch, ring, repeats))
    ring.drain()
    return claims


def _cuda_claim(
    torch: Any,
    ring: Any,
    read: Any,
    name: str,
    nbytes: int,
    target: float,
    copies: int,
    repeats: int,
) -> dict[str, Any]:
    dtype = getattr(torch, name)
    elements = nbytes // dtype.itemsize
    tensors = [torch.randn(elements, device="cuda", dtype=dtype) for _ in range(copies)]
    out = torch.zeros(1, dtype=torch.int32, device="cuda").view(torch.uint32)
    words = [tensor.view(torch.int32).view(torch.uint32).view(-1, 4) for tensor in tensors]
    calls: dict[str, Callable[[int], Any]] = {
        "fingerprint": lambda i: ring.take(tensors[i]),
        "a streaming read": lambda i: read(words[i], out, nbytes // 16),
        "torch.sum": lambda i: tensors[i].sum(),
    }
    if hasattr(torch, "hash_tensor"):
        calls["torch.hash_tensor"] = lambda i: torch.hash_tensor(tensors[i])
    seconds = {name: graph_seconds(torch, call, copies, repeats) for name, call in calls.items()}
    base = seconds["a streaming read"]
    size = "1 GiB" if nbytes == GIB else "1 MiB"
    speeds = "; ".join(
        f"{peer} {s * 1e6:.1f} us, {nbytes / s / 1e12:.2f} TB/s" for peer, s in seconds.items()
    )
    return Claim(
        f"cuda: fingerprint of {size} of {name}",
        seconds["fingerprint"] / base,
        f"of reading {size}",
        target,
        {peer: value / base for peer, value in seconds.items()},
        speeds,
    ).as_dict()


def _shared_claim(torch: Any, ring: Any, repeats: int) -> dict[str, Any]:
    tensors = [torch.randn(16, 1024, device="cuda") for _ in range(64)]

    def alone() -> None:
        for tensor in tensors:
            ring.take(tensor)

    calls = {"one launch each": alone, "take_many": lambda: ring.take_many(tensors)}
    host: dict[str, list[float]] = {name: [] for name in calls}
    device: dict[str, float] = {}
    for name, call in calls.items():
        device[name] = graph_seconds(torch, lambda _, call=call: call(), 1, repeats) / len(tensors)
        for _ in range(repeats):
            torch.cuda.synchronize()
            ring.drain()
            begin = time.perf_counter()
            call()
            host[name].append((time.perf_counter() - begin) / len(tensors))
    note = "; ".join(
        f"{name}: host {statistics.median(host[name]) * 1e6:.2f} us, device "
        f"{device[name] * 1e6:.2f} us a tensor"
        for name in calls
    )
    return Claim(
        "cuda: 64 tensors of 16 x 1024 float32 that share launches",
        device["take_many"] / device["one launch each"],
        "of one launch each, on the device",
        1.0,
        {},
        note,
    ).as_dict()


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim of this file."""
    try:
        import torch
    except ImportError:
        return harness.not_measured("fingerprint", harness.NO_TORCH)
    claims = on_cpu(torch, 5 if quick else 25)
    if torch.cuda.is_available():
        claims += on_cuda(torch, 10 if quick else 40)
    return claims


if __name__ == "__main__":
    raise SystemExit(harness.main(run, None, __doc__))
