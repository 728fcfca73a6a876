"""Measured peaks of this machine: how fast it multiplies and moves memory.

Kept in the user's state directory by `brickline doctor --peaks` and carried by every run that is
recorded afterwards, so that a brick's bottleneck follows from measurements. Owns measuring and
keeping; what a peak means for a brick is in `brickline.roofline`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from brickline.circumstances import cpu_model
from brickline.documents import parsed_json
from brickline.errors import DeviceError, RunError
from brickline.run_directory import state_directory, write_json

FILE = "peaks.json"

_MATRIX = 2048
_COPY_BYTES = 256 * 2**20


def load_peaks(device: str) -> dict[str, float] | None:
    """Return the peaks that were measured for a device on this machine, or None."""
    directory = state_directory(make=False)
    if directory is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        document = parsed_json((directory / FILE).read_text(encoding="utf-8"))
        entry = document[device]
        if entry["machine"] == cpu_model():
            return {"gflops": float(entry["gflops"]), "gbps": float(entry["gbps"])}
    return None


def measure_peaks(device: str = "CPU", seconds: float = 2.0) -> dict[str, float]:
    """Measure multiplication and memory copy on a device; about `seconds` in all.

    Multiplication is float32 on a CPU, as NumPy does it, and bfloat16 on CUDA's matrix units.

    Raises:
        DeviceError: if the device cannot be measured here.
    """
    if device == "CPU":
        return _measure_cpu(seconds / 2)
    if device.startswith("CUDA:"):
        return _measure_cuda(device, seconds / 2)
    raise DeviceError(f"peaks: expected CPU or CUDA:n, got {device!r}")


def keep_peaks(device: str, peaks: dict[str, float]) -> None:
    """Remember peaks for the runs to come.

    Raises:
        RunError: if the state directory cannot be written to.
    """
    directory = state_directory()
    if directory is None:
        raise RunError(
            "the peaks cannot be kept: the state directory is not writable; "
            "set XDG_STATE_HOME to one that is"
        )
    document: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        document = parsed_json((directory / FILE).read_text(encoding="utf-8"))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    document[device] = {**peaks, "machine": cpu_model(), "measured": when}
    write_json(directory / FILE, document)


def _best_rate(work: Callable[[], object], amount: float, seconds: float) -> float:
    """Return the largest amount per nanosecond over repeats that fill `seconds`."""
    work()
    best = 0.0
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        before = time.perf_counter_ns()
        work()
        best = max(best, amount / (time.perf_counter_ns() - before))
    return best


def _measure_cpu(seconds: float) -> dict[str, float]:
    import numpy as np

    generator = np.random.default_rng(0)
    a = generator.standard_normal((_MATRIX, _MATRIX), dtype=np.float32)
    b = generator.standard_normal((_MATRIX, _MATRIX), dtype=np.float32)
    out = np.empty_like(a)
    gflops = _best_rate(lambda: np.matmul(a, b, out=out), 2.0 * _MATRIX**3, seconds)
    source = np.ones(_COPY_BYTES // 4, np.float32)
    target = np.zeros_like(source)
    gbps = _best_rate(lambda: np.copyto(target, source), 2.0 * _COPY_BYTES, seconds)
    return {"gflops": gflops, "gbps": gbps}


def _measure_cuda(device: str, seconds: float) -> dict[str, float]:
    try:
        import torch
    except ImportError:
        raise DeviceError("measuring CUDA's peaks needs torch; install brickline[torch]") from None
    if not torch.cuda.is_available():
        raise DeviceError(f"{device} cannot be measured: torch sees no CUDA device")
    place = device.lower()
    side = 8192
    a = torch.randn(side, side, device=place, dtype=torch.bfloat16)
    b = torch.randn(side, side, device=place, dtype=torch.bfloat16)
    source = torch.randn(2**28, device=place)
    target = torch.empty_like(source)

    def timed(work: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(5):
                work()
            torch.cuda.synchronize(place)

        return run

    gflops = _best_rate(timed(lambda: torch.mm(a, b)), 5 * 2.0 * side**3, seconds)
    gbps = _best_rate(timed(lambda: target.copy_(source)), 5 * 2.0 * source.nbytes, seconds)
    return {"gflops": gflops, "gbps": gbps}
