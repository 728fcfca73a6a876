"""The fingerprints of one side, read a few columns at a time.

A record is up to 1 KiB, so a long run holds gigabytes of them. The small columns are copied once;
sketches and stripes are read for the rows that are asked for. Knows the record's columns, not what
a launch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.disk_rows import DiskRows

CHUNK = 16_384
"""Rows read at a time, so that a pass over a long run needs some megabytes."""


class FingerprintColumns:
    """Fingerprints of several parts behind one numbering."""

    def __init__(self, parts: Sequence[DiskRows | NDArray[Any]]) -> None:
        self._parts = list(parts)
        self.offsets = np.cumsum([0, *map(len, self._parts)])
        count = len(self)
        self.hash = np.zeros((count, 2), np.uint64)
        self.nonfinite_hash = np.zeros(count, np.uint64)
        self.elements = np.zeros(count, np.int64)
        self.l1, self.l2, self.total = np.zeros(count), np.zeros(count), np.zeros(count)
        self.absmax, self.nonfinite = np.zeros(count), np.zeros(count)
        self.nan = np.zeros(count)
        at = 0
        for rows in self._chunks():
            here = slice(at, at + len(rows))
            self.hash[here] = _hash_of(rows)
            self.nonfinite_hash[here] = rows["nonfinite_hash"]
            self.elements[here] = rows["elements"]
            self.l1[here], self.l2[here] = rows["l1"], rows["l2"]
            self.total[here], self.absmax[here] = rows["total"], rows["absmax"]
            self.nan[here] = rows["nan_count"]
            self.nonfinite[here] = self.nan[here] + rows["inf_count"]
            at += len(rows)
        # One that was announced and never came is a row of zeros; no tensor hashes to that.
        self.taken = self.hash.any(axis=1) | (self.elements > 0)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def _chunks(self) -> Iterator[NDArray[Any]]:
        for part in self._parts:
            for begin in range(0, len(part), CHUNK):
                end = begin + CHUNK
                yield part.read(begin, end) if isinstance(part, DiskRows) else part[begin:end]

    def records(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return whole records."""
        wanted = np.asarray(rows, np.int64)
        if len(self._parts) == 1:
            return _taken(self._parts[0], wanted)
        part_of = np.searchsorted(self.offsets, wanted, side="right") - 1
        out = np.empty(len(wanted), self._parts[0].dtype)
        for number in np.unique(part_of):
            chosen = part_of == number
            out[chosen] = _taken(self._parts[number], wanted[chosen] - self.offsets[number])
        return out

    def sketches(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Return the linear sketches of the given rows."""
        if not len(rows):
            return np.empty((0, 64))
        return np.asarray(self.records(rows)["sketch"], np.float64)


def _taken(part: DiskRows | NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    chosen: NDArray[Any] = part.take(rows) if isinstance(part, DiskRows) else part[rows]
    return chosen


def _hash_of(rows: NDArray[Any]) -> NDArray[Any]:
    """Return both halves of the hash."""
    both: NDArray[Any] = np.asarray(rows["hash"]).reshape(len(rows), 2)
    return both


def same_bits(
    a: FingerprintColumns, rows_a: NDArray[Any], b: FingerprintColumns, rows_b: NDArray[Any]
) -> NDArray[Any]:
    """Return where two fingerprints have one hash, hence the same bits at the same places."""
    equal: NDArray[Any] = (a.hash[rows_a] == b.hash[rows_b]).all(axis=1)
    equal &= a.elements[rows_a] == b.elements[rows_b]
    return equal


def relative_distances(
    a: FingerprintColumns, rows_a: NDArray[Any], b: FingerprintColumns, rows_b: NDArray[Any]
) -> NDArray[np.float64]:
    """Return ‖a − b‖ / ‖b‖ of paired fingerprints, each within ±9 % (one sigma, from 64 buckets).

    Infinite where elements are not finite at other places, or ‖b‖ is zero and ‖a‖ is not.
    """
    out = np.zeros(len(rows_a))
    different = np.flatnonzero(~same_bits(a, rows_a, b, rows_b))
    for begin in range(0, len(different), CHUNK):
        at = different[begin : begin + CHUNK]
        one, two = rows_a[at], rows_b[at]
        with np.errstate(all="ignore"):  # a damaged run may hold any numbers
            gap = a.sketches(one) - b.sketches(two)
            size = np.sqrt(np.einsum("ij,ij->i", gap, gap))
            ratio = size / b.l2[two]
        ratio[size == 0] = 0.0
        ratio[(a.nonfinite_hash[one] != b.nonfinite_hash[two])] = np.inf
        ratio[np.isnan(ratio)] = np.inf
        out[at] = ratio
    return out


def cosines(
    a: FingerprintColumns, rows_a: NDArray[Any], b: FingerprintColumns, rows_b: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the cosine of every pair, one row of `a` by one column of `b`; nan across sizes."""
    one, two = a.sketches(rows_a), b.sketches(rows_b)
    with np.errstate(all="ignore"):  # a damaged run may hold any numbers
        norms = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(two, axis=1)[None, :]
        out: NDArray[np.float64] = (one @ two.T) / norms
    out[a.elements[rows_a][:, None] != b.elements[rows_b][None, :]] = np.nan
    return out
