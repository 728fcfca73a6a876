"""Rows: traces of module calls in the bytes that the spool holds, packed for speed.

`Traces.write` does the same for one trace at a time and with every field checked; it costs more
than a small module does. Here what does not change between calls is packed once. A call's rows are
appended when it has ended, so that it is in the run whatever comes next. The layouts are those of
`abi`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from brickline.profiler import BrickProfiler
from brickline.traces import Operand

if TYPE_CHECKING:
    from brickline.adapters.torch_calls import Call

TRACE = struct.Struct("<6Q4q2Q2Ii5IiIIii2I4B")
"""A TraceRow."""
OPERAND_BYTES = 176
"""Of an OperandRow: trace (8), identity (16), role and index (8), view (144)."""
_VIEW = struct.Struct("<4I16q")
_ROLE = struct.Struct("<2I")
_IDENTITY = struct.Struct("<2Q")
_ZEROS = (0,) * 8
MOST_CACHED = 1 << 16

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


def without_fingerprint(row: bytes) -> bytes:
    """Return an operand's row, which lacks the trace, as that of a tensor nobody looked at."""
    return row[:8] + bytes(8) + row[16:]


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
        self.unseen = identity_bytes(0, 0) + self.view_bytes(0, "unknown", (), ())
        """The row of a tensor of which nothing is known, as the first input's."""

    def string(self, text: str) -> int:
        """Return the id of a string in the spool."""
        number = self._strings.get(text)
        if number is None:
            # A module's name or a file's may hold what no UTF-8 can: no reason to stop a model.
            stored = text.encode("utf-8", "replace").decode()
            number = self._strings[text] = self._profiler._intern(stored)
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

    def of_call(self, call: Call, process: int, end_ns: int, params: int, device: int) -> bytes:
        """Return the row of a module's call that has ended; a device does not tell its times."""
        site, place, on_host = call.site, call.place, device < 0
        return TRACE.pack(
            call.trace,
            call.parent,
            0,
            0,
            1,
            int(on_host),
            call.start_ns,
            call.start_ns if on_host else -1,
            end_ns if on_host else -1,
            -1,
            0,
            0,
            site.name_id,
            site.slot,
            site.layer,
            place.position,
            call.ordinal,
            self._profiler._rank,
            process,
            place.thread,
            device,
            place.step,
            0,
            -1,
            -1,
            params,
            self.string(site.backend),
            place.phase,
            0,
            0,
            0,
        )

    def add(self, trace: bytes, operands: list[bytes]) -> bool:
        """Append the row of a trace, and the pieces of its operands' rows in order.

        Gives False where nothing is recorded any more, as on a full disk.
        """
        return self._profiler.traces.write_rows(1, trace, b"".join(operands))
