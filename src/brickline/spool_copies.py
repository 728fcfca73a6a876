"""Copying a spool that is being written to, so that the copy holds one consistent state.

Statistics of a lane change in place when its thread folds; everything else is appended. So each
lane is copied by itself, again and again until no fold came between, and tables are copied after
the lanes, up to what was committed. What appears meanwhile is left empty in the copy. It knows
where things lie in a spool, as `include/brickline/abi.h` draws it, not what they mean.

::

    order of copying      what may refer to it was copied before it
    1. tables, so far     bulk: rows never change once they are committed
    2. lanes              each at rest, or within one open fold, which readers undo
    3. tables, the rest   first those that name things, then strings, operands, fingerprints
    4. header             its `file_bytes` ends at the last extent that was seen
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from brickline.abi import Table
from brickline.errors import RunError

PAGE_BYTES = 4096
_FILE_BYTES = struct.Struct("<Q")
_FILE_BYTES_AT = 40  # SpoolHeader::file_bytes
_EXTENT = struct.Struct("<4I2Q")  # ExtentHeader: magic, kind, lane, ordinal, bytes, used
_EXTENT_BYTES = 64
_EXTENT_MAGIC = 0x54584542
_USED_AT = 24  # ExtentHeader::used
_LANE = 1  # ExtentKind::Lane
_MOMENT = struct.Struct("<4Q")  # LaneHeader: sequence, journal_bytes, journal_capacity, batch
_MOMENT_AT = 120
_NAMED_LAST = frozenset({Table.STRING, Table.OPERAND, Table.FINGERPRINT})
"""Tables that rows of other tables refer to: those rows are written after what they name."""

_ATTEMPTS = 400
_PATIENCE = 100
"""Attempts that wait for a lane at rest; a fold that stays open was left by a dead process."""
_CHUNK_BYTES = 1 << 22


@dataclass
class _Extent:
    offset: int
    kind: int
    lane: int
    size: int
    copied: int = 0
    """Payload bytes that the copy has."""

    @property
    def payload(self) -> int:
        return self.offset + _EXTENT_BYTES


def copy_spool(source: Path, target: Path) -> None:
    """Copy a spool to a new file, whether or not it is being written to.

    Raises:
        RunError: if a lane does not come to rest.
        OSError: if the disk refuses.
    """
    with open(source, "rb") as reading, open(target, "wb") as writing:
        copy = _Copy(source, reading.fileno(), writing.fileno())
        if not copy.is_sound:
            copy.span(0, os.fstat(reading.fileno()).st_size)  # damage is kept as it is
            return
        copy.take()


class _Copy:
    def __init__(self, path: Path, source: int, target: int) -> None:
        self._path, self._source, self._target = path, source, target
        self._extents: list[_Extent] = []
        self._file_bytes = 0
        self.is_sound = self._walk()

    def take(self) -> None:
        self._tables(self._extents)
        for lane in [each for each in self._extents if each.kind == _LANE]:
            self._lane(lane)
        self._walk()
        self._tables(each for each in self._extents if each.kind not in _NAMED_LAST)
        self._walk()
        self._tables(each for each in self._extents if each.kind in _NAMED_LAST)
        self._headers()

    def span(self, offset: int, size: int) -> None:
        """Copy a range, as far as the file goes."""
        end = offset + size
        while offset < end:
            piece = os.pread(self._source, min(_CHUNK_BYTES, end - offset), offset)
            if not piece:
                break
            self._write(offset, piece)
            offset += len(piece)

    def _walk(self) -> bool:
        """Add the extents that have appeared; False where the file is damaged or cut off."""
        head = os.pread(self._source, _FILE_BYTES_AT + 8, 0)
        if len(head) < _FILE_BYTES_AT + 8 or not head.startswith(b"BRKSPOOL"):
            return False
        end = int(_FILE_BYTES.unpack_from(head, _FILE_BYTES_AT)[0])
        last = self._extents[-1] if self._extents else None
        offset = last.offset + last.size if last else PAGE_BYTES
        while offset < end:
            text = os.pread(self._source, _EXTENT_BYTES, offset)
            if len(text) < _EXTENT_BYTES:
                return False
            magic, kind, lane, _, size, _ = _EXTENT.unpack_from(text)
            if magic != _EXTENT_MAGIC or size < PAGE_BYTES or size > end - offset:
                return False
            self._extents.append(_Extent(offset, kind, lane, size))
            offset += size
        self._file_bytes = end
        return os.fstat(self._source).st_size >= end

    def _tables(self, extents: Iterable[_Extent]) -> None:
        for extent in extents:
            if extent.kind >= Table.STRING:
                used = self._used(extent)
                self.span(extent.payload + extent.copied, used - extent.copied)
                extent.copied = max(extent.copied, used)

    def _used(self, extent: _Extent) -> int:
        text = os.pread(self._source, 8, extent.offset + _USED_AT)
        used = int.from_bytes(text, "little")
        return min(used, extent.size - _EXTENT_BYTES)

    def _lane(self, lane: _Extent) -> None:
        """Copy all that a lane consists of, as of one moment between two folds."""
        for attempt in range(_ATTEMPTS):
            before = self._moment(lane)
            if before[0] % 2 == 0 or attempt >= _PATIENCE:
                # Listed after the first look: what earlier folds have added is there.
                self._walk()
                self._lane_extents(lane)
                if self._moment(lane) == before:
                    return
            time.sleep(0.0005)
        raise RunError(
            f"{self._path} changes faster than it can be copied; try again, or close its profiler"
        )

    def _lane_extents(self, lane: _Extent) -> None:
        # The lane's own page first: its ring may only grow beyond what that page says.
        self.span(lane.payload, lane.size - _EXTENT_BYTES)
        lane.copied = self._used(lane)
        for extent in self._extents:
            if extent.lane == lane.lane and _LANE < extent.kind < Table.STRING:
                extent.copied = self._used(extent)
                self.span(extent.payload, extent.size - _EXTENT_BYTES)

    def _moment(self, lane: _Extent) -> tuple[int, int, int]:
        text = os.pread(self._source, _MOMENT.size, lane.payload + _MOMENT_AT)
        sequence, journal, _, batch = _MOMENT.unpack(text)
        return sequence, journal, batch

    def _headers(self) -> None:
        """Write the headers last, each with what the copy has."""
        for extent in self._extents:
            text = bytearray(os.pread(self._source, _EXTENT_BYTES, extent.offset))
            text[_USED_AT : _USED_AT + 8] = extent.copied.to_bytes(8, "little")
            self._write(extent.offset, bytes(text))
        page = bytearray(os.pread(self._source, PAGE_BYTES, 0))
        page[_FILE_BYTES_AT : _FILE_BYTES_AT + 8] = _FILE_BYTES.pack(self._file_bytes)
        os.ftruncate(self._target, self._file_bytes)
        self._write(0, bytes(page))

    def _write(self, offset: int, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            done = os.pwrite(self._target, view, offset)
            view, offset = view[done:], offset + done
