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
from brickline.traces import Operand

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


def role_bytes(role: int, index: int) -> bytes:
    """Return role and index as an operand's row holds them."""
    return _ROLES.get((role, index)) or _ROLE.pack(role, index)


def identity_bytes(number: int, fingerprint: int) -> bytes:
    """Return a tensor's number and fingerprint as the first input's row holds them."""
    return _IDENTITY.pack(number, fingerprint) + _ROLES[0, 0]


def with_role(row: bytes, role: int, index: int) -> bytes:
    """Return an operand's row, which lacks the trace, in another role."""
    return row[:16] + role_bytes(role, index) + row[24:]


def fingerprint_in(row: bytes) -> int:
    """Return the id of the fingerprint that an operand's row names, which lacks the trace."""
    return int.from_bytes(row[8:16], "little")


class Rows:
    """Packs rows for one profiler's spool, and appends them."""

    def __init__(self, profiler: BrickProfiler) -> None:
        self._profiler = profiler
        self._strings: dict[str, int] = {}
        self._texts: dict[int, str] = {}
        self._views: dict[tuple[Any, ...], bytes] = {}
        self._traces: list[bytes] = []
        self._operands: list[bytes] = []
        self._lock = threading.Lock()

    def string(self, text: str) -> int:
        """Return the id of a string in the spool."""
        number = self._strings.get(text)
        if number is None:
            number = self._strings[text] = self._profiler._intern(text)
            self._texts[number] = text
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

    def operand(self, row: bytes, role: int, index: int) -> Operand:
        """Return a row, which lacks the trace, as an operand that `Traces.write` takes."""
        number, fingerprint = _IDENTITY.unpack_from(row)
        version, dtype, dimensions, _, *sizes = _VIEW.unpack_from(row, 24)
        shape, strides = tuple(sizes[:dimensions]), tuple(sizes[8 : 8 + dimensions])
        name = self._texts[dtype]
        return Operand(role, index, number, version, name, shape, strides, fingerprint)

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
