"""Rows: traces of module calls in the bytes that the spool holds, packed for speed.

`Traces.write` does the same for one trace at a time and with every field checked; it costs more
than a small module does. Here what does not change between calls is packed once, and rows are
appended for many calls together. The layouts are those of `abi`.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

from brickline.profiler import BrickProfiler

TRACE = struct.Struct("<6Q4q2Q2Ii5IiIIii2I4B")
"""A TraceRow."""
OPERAND_BYTES = 176
"""Of an OperandRow: trace (8), identity (16), role and index (8), view (144)."""
_VIEW = struct.Struct("<4I16q")
_ROLE = struct.Struct("<2I")
_IDENTITY = struct.Struct("<2Q")
_ZEROS = (0,) * 8
MOST_CACHED = 1 << 16
MOST_CALLS = 64
"""Calls whose rows wait in memory, at most."""

_ROLES = {
    (role, index): _ROLE.pack(role, index)
    for role in (0, 1)
    for index in (*range(64), *range(1000, 1016))
}


FIRST_INPUT, FIRST_OUTPUT = _ROLES[0, 0], _ROLES[1, 0]


def role_bytes(role: int, index: int) -> bytes:
    """Return role and index as an operand's row holds them."""
    return _ROLES.get((role, index)) or _ROLE.pack(role, index)


def identity_bytes(number: int, fingerprint: int) -> bytes:
    """Return a tensor's number and fingerprint as an operand's row holds them."""
    return _IDENTITY.pack(number, fingerprint)


class Rows:
    """Packs rows for one profiler's spool, and appends them."""

    def __init__(self, profiler: BrickProfiler) -> None:
        self._profiler = profiler
        self._strings: dict[str, int] = {}
        self._views: dict[tuple[Any, ...], bytes] = {}
        self._traces: list[bytes] = []
        self._operands: list[bytes] = []
        self._lock = threading.Lock()

    def string(self, text: str) -> int:
        """Return the id of a string in the spool."""
        number = self._strings.get(text)
        if number is None:
            number = self._strings[text] = self._profiler._intern(text)
        return number

    def view_bytes(
        self, version: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> bytes:
        """Return what an operand's row says of a tensor's form."""
        key = (version, dtype, shape, strides)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MOST_CACHED:
                self._views.clear()
            sizes = (*(shape + _ZEROS)[:8], *(strides + _ZEROS)[:8])
            view = _VIEW.pack(version & 0xFFFFFFFF, self.string(dtype), len(shape), 0, *sizes)
            self._views[key] = view
        return view

    def add(self, trace: bytes, operands: list[bytes]) -> None:
        """Take the row of a trace, and the pieces of its operands' rows in order."""
        with self._lock:
            self._operands += operands
            self._traces.append(trace)
            is_full = len(self._traces) >= MOST_CALLS
        if is_full:
            self.flush()

    def flush(self) -> None:
        """Append what waits."""
        with self._lock:
            traces, self._traces = self._traces, []
            operands, self._operands = self._operands, []
            if traces:
                self._profiler.traces.write_rows(len(traces), b"".join(traces), b"".join(operands))
