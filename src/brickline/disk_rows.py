"""Rows of a run that stay on disk until they are asked for.

Operands and fingerprints of a long run do not fit into memory. The native core says where in the
spool they lie; here pieces of them become NumPy arrays. It knows neither traces nor fingerprints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brickline.errors import RunDamaged, RunError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[Any]

_NEAR_ROWS = 64
"""Rows that are read in passing rather than skipped."""


class DiskRows:
    """A table of one spool, in pieces that hold whole rows.

    Args:
        path: The spool.
        dtype: Of one row.
        spans: Offset and bytes of each piece, in order.
    """

    def __init__(
        self, path: Path, dtype: np.dtype[Any], spans: Sequence[tuple[int, int]] = ()
    ) -> None:
        import numpy as np  # not with the module: a disabled profiler reads nothing

        self.path = path
        self.dtype = dtype
        counts = [size // dtype.itemsize for _, size in spans]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._offsets = [offset for offset, _ in spans]
        self._descriptor: int | None = None

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, start: int = 0, stop: int | None = None) -> Rows:
        """Return the rows from `start` up to `stop`, without it, as far as there are any.

        Raises:
            RunError: if the spool is gone or cut off by now.
        """
        import numpy as np

        end = len(self) if stop is None else min(stop, len(self))
        begin = min(max(start, 0), max(end, 0))
        rows = np.empty(max(end - begin, 0), self.dtype)
        if not len(rows):
            return rows
        piece = int(np.searchsorted(self._first, begin, "right")) - 1
        with self._open() as descriptor:
            at = begin
            while at < end:
                last = min(end, int(self._first[piece + 1]))
                offset = self._offsets[piece] + (at - int(self._first[piece])) * self.dtype.itemsize
                self._fill(descriptor, rows[at - begin : last - begin], offset)
                at, piece = last, piece + 1
        return rows

    def take(self, rows: Any) -> Rows:
        """Return the rows with these numbers, in their order; each is read once.

        Raises:
            IndexError: if there is no such row.
            RunError: if the spool is gone or cut off by now.
        """
        import numpy as np

        wanted, place = np.unique(np.asarray(rows, np.int64), return_inverse=True)
        if not len(wanted):
            return np.empty(0, self.dtype)
        if wanted[0] < 0 or wanted[-1] >= len(self):
            raise IndexError(f"expected rows from 0 to {len(self) - 1}, got {wanted[[0, -1]]}")
        found = np.empty(len(wanted), self.dtype)
        breaks = np.flatnonzero(np.diff(wanted) > _NEAR_ROWS) + 1
        for begin, end in zip([0, *breaks], [*breaks, len(wanted)], strict=True):
            near = wanted[begin:end]
            found[begin:end] = self.read(int(near[0]), int(near[-1]) + 1)[near - near[0]]
        return found[place.reshape(-1)]

    def chunks(self, size: int = 1 << 16) -> Iterator[Rows]:
        """Return all rows, so many at a time."""
        for start in range(0, len(self), size):
            yield self.read(start, start + size)

    def hold(self) -> None:
        """Keep the spool open, so that its rows can be read after it was moved or deleted."""
        if self._descriptor is None and len(self):
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]

    @contextmanager
    def _open(self) -> Iterator[int]:
        if self._descriptor is not None:
            yield self._descriptor
            return
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(
                f"cannot read {self.path}: {error.strerror}; open the run again where it lies now"
            ) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _fill(self, descriptor: int, rows: Rows, offset: int) -> None:
        import numpy as np

        rest = rows.view(np.uint8).data
        while rest:
            count = os.preadv(descriptor, [rest], offset)
            if count == 0:
                raise RunDamaged(f"expected {len(rest)} more bytes at {offset} - at {self.path}")
            rest, offset = rest[count:], offset + count
