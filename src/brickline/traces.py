"""Traces: kernel launches as they happened.

Owns `KernelTrace` and writing it to a run. Knows nothing of comparison.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from brickline import abi
from brickline.errors import CountError, UsageError
from brickline.timers import checked_count

if TYPE_CHECKING:
    from brickline import _core


@dataclass(frozen=True)
class KernelTrace:
    """One kernel launch: which, where in the model, on what, and how long it took."""

    kernel_name: str
    layer_idx: int
    position: int
    backend: str
    params: str = ""
    """Launch parameters, as JSON text."""
    time_us: float = 0.0
    input_checksum: int | None = None
    """None where none was taken; an unset checksum equals no other."""
    output_checksum: int | None = None

    def __post_init__(self) -> None:
        for name in ("kernel_name", "backend", "params"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name}: expected a str, got {getattr(self, name)!r}")
        for name in ("layer_idx", "position"):
            checked_count(name, getattr(self, name), 2**31 - 1)
        for name in ("input_checksum", "output_checksum"):
            if getattr(self, name) is not None:
                checked_count(name, getattr(self, name), 2**64 - 1)
        if not isinstance(self.time_us, int | float) or not 0 <= self.time_us < math.inf:
            raise CountError(f"time_us: expected a finite number from 0 on, got {self.time_us!r}")


class Traces:
    """Writes traces into a profiler's run; reached as `BrickProfiler.traces`."""

    __slots__ = ("_core", "_count", "_rank")

    def __init__(self, core: _core.ProfilerCore, rank: int) -> None:
        self._core = core
        self._rank = rank
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, trace: KernelTrace) -> int | None:
        """Append a launch that has just ended; return its id, or None when disabled."""
        core = self._core
        if not core.is_enabled():
            return None
        import numpy as np

        now_ns, where = core._now_ns(), core._where()
        self._count += 1
        row = np.zeros(1, abi.TRACE)
        row["trace"] = self._count
        row["entries"] = row["timed"] = 1
        row["start_ns"] = row["enqueue_ns"] = now_ns - round(trace.time_us * 1e3)
        row["end_ns"] = now_ns
        row["item"] = row["worker"] = row["region"] = -1
        row["name"] = core._intern(trace.kernel_name)
        row["slot"] = abi.NO_SLOT
        row["layer"] = trace.layer_idx
        row["position"] = trace.position
        row["rank"] = self._rank
        row["process"] = os.getpid()
        row["thread"] = threading.get_native_id()
        row["device"] = -1
        row["step"] = where["step"]
        row["phase"] = where["phase"]
        row["params"] = core._intern(trace.params)
        row["backend"] = core._intern(trace.backend)
        row["input_checksum"] = trace.input_checksum or 0
        row["output_checksum"] = trace.output_checksum or 0
        row["has_checksums"] = (trace.input_checksum is not None) + 2 * (
            trace.output_checksum is not None
        )
        core._append(int(abi.Table.TRACE), row.tobytes())
        return self._count

    def _restart(self) -> None:
        self._count = 0
