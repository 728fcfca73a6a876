"""Fused and split projections: one launch of one side that is several of the other.

Where one product holds what several hold on the other side, such as q, k and v, its output is
theirs side by side. Fingerprints of the parts do not add up to that of the whole, but the sums of
their stripes do: stripes of columns one after the other, stripes of rows element by element. An
error that is not hidden inside one stripe changes them by its own size. Knows launches and
fingerprints, not blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from brickline.comparison.fingerprint_columns import relative_distances
from brickline.comparison.pairing import Alignment
from brickline.comparison.sides import PARAMETER_INDEX, Side
from brickline.comparison.similarity import NEAR

MOST_PARTS = 4
MOST_GROUPS = 20_000
"""Launches without a partner that are looked at; more take too long."""


def fused_differences(a: Side, b: Side, alignment: Alignment) -> dict[int, float]:
    """Return the relative L2 of outputs that are the other side's side by side, by operand.

    Of the candidate's launches without a partner: those that are several of the reference's, and
    those that are a part of one.
    """
    lone_a = _lone(a, alignment.partner < 0)
    lone_b = _lone(b, alignment.back(len(b)) < 0)
    if not lone_a or not lone_b or len(lone_a) + len(lone_b) > MOST_GROUPS:
        return {}
    around_a = a.around(alignment.partner >= 0)
    around_b = b.around(alignment.back(len(b)) >= 0)
    theirs: dict[int, list[int]] = {}
    for row in lone_b:
        theirs.setdefault(int(around_b[row]), []).append(row)
    mine: dict[int, list[int]] = {}
    for row in lone_a:
        mine.setdefault(int(around_a[row]), []).append(row)
    out: dict[int, float] = {}
    for scope, rows in mine.items():
        others = theirs.get(int(alignment.partner[scope]), []) if scope >= 0 else []
        if others:
            out |= _of_scope(a, rows, b, others)
    return out


def _lone(side: Side, free: NDArray[np.bool_]) -> list[int]:
    rows = np.flatnonzero(free & ~side.has_children() & (side.direction == 0))
    return [
        int(row) for row in rows if _output(side, int(row)) >= 0 and _input(side, int(row)) >= 0
    ]


def _output(side: Side, row: int) -> int:
    own = np.arange(side.first[row], side.first[row + 1])
    own = own[(side.role[own] > 0) & (side.print[own] >= 0)]
    return int(own[0]) if len(own) else -1


def _input(side: Side, row: int) -> int:
    own = np.arange(side.first[row], side.first[row + 1])
    chosen = (side.role[own] == 0) & (side.index[own] < PARAMETER_INDEX) & (side.print[own] >= 0)
    return int(own[chosen][0]) if chosen.any() else -1


def _of_scope(a: Side, rows: list[int], b: Side, others: list[int]) -> dict[int, float]:
    out: dict[int, float] = {}
    for row in rows:
        parts = [each for each in others if _fed_alike(a, row, b, each)]
        found = _as_whole(a, row, b, parts)
        if found is not None:
            out[_output(a, row)] = found
    for whole in others:
        parts = [row for row in rows if _fed_alike(a, row, b, whole)]
        parts = [row for row in parts if _output(a, row) not in out]
        out |= _as_parts(a, parts, b, whole)
    return out


def _fed_alike(a: Side, row: int, b: Side, other: int) -> bool:
    """Return whether two launches are of one type and were given the same."""
    if a.type[row] != b.type[other]:
        return False
    ours, theirs = a.print[[_input(a, row)]], b.print[[_input(b, other)]]
    if a.prints.elements[ours[0]] != b.prints.elements[theirs[0]]:
        return False
    return bool(relative_distances(a.prints, ours, b.prints, theirs)[0] < 4 * NEAR)


def _as_whole(a: Side, row: int, b: Side, parts: Sequence[int]) -> float | None:
    """Return how far one launch is from several of the reference's, side by side."""
    width = int(a.width[_output(a, row)])
    if not 2 <= len(parts) <= MOST_PARTS:
        return None
    if sum(int(b.width[_output(b, part)]) for part in parts) != width:
        return None
    record = _record(a, row)
    pieces = [_record(b, part) for part in parts]
    widths = [int(b.width[_output(b, part)]) for part in parts]
    norm = float(np.sqrt(sum(float(piece["l2"]) ** 2 for piece in pieces)))
    if norm == 0:
        return None
    rows = np.sum([np.asarray(piece["rows"], float) for piece in pieces], axis=0)
    across = float(np.linalg.norm(record["rows"] - rows))
    along = min(
        _column_gap(record["columns"], width, [(pieces[at]["columns"], widths[at]) for at in order])
        for order in permutations(range(len(parts)))
    )
    return max(across, along) / norm


def _as_parts(a: Side, parts: Sequence[int], b: Side, whole: int) -> dict[int, float]:
    """Return how far several launches are from their part of one of the reference's."""
    width = int(b.width[_output(b, whole)])
    widths = [int(a.width[_output(a, part)]) for part in parts]
    if not 2 <= len(parts) <= MOST_PARTS or sum(widths) != width:
        return {}
    record = _record(b, whole)
    pieces = [_record(a, part) for part in parts]
    best: dict[int, float] = {}
    for order in permutations(range(len(parts))):
        found: dict[int, float] = {}
        offset = 0
        for at in order:
            gap = _part_gap(record["columns"], width, offset, pieces[at]["columns"], widths[at])
            norm = float(pieces[at]["l2"])
            if gap is not None and norm > 0:
                found[_output(a, parts[at])] = gap / norm
            offset += widths[at]
        if sum(found.values()) < sum(best.values()) or not best:
            best = found
    # One part that disagrees is wrong; where several do, they lie in another order or layout.
    calm = {operand: gap for operand, gap in best.items() if gap < NEAR}
    return best if len(best) == len(parts) == len(calm) + 1 else calm


def _record(side: Side, row: int) -> NDArray[np.void]:
    record: NDArray[np.void] = side.prints.records(side.print[[_output(side, row)]])[0]
    return record


def _edges(columns: NDArray[np.float32], width: int, offset: int = 0) -> dict[int, float]:
    """Return the sum of all columns before each edge between stripes."""
    step = 4 * -(-width // 128)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(columns, np.float64))])
    count = -(-width // step)
    return {offset + min(at * step, width): float(sums[at]) for at in range(count + 1)}


def _column_gap(
    whole: NDArray[np.float32], width: int, parts: Sequence[tuple[NDArray[np.float32], int]]
) -> float:
    ours = _edges(whole, width)
    theirs: dict[int, float] = {}
    offset, before = 0, 0.0
    for columns, length in parts:
        inside = _edges(columns, length, offset)
        theirs |= {edge: before + value for edge, value in inside.items()}
        offset += length
        before = theirs[offset]
    return _gap(ours, theirs)


def _part_gap(
    whole: NDArray[np.float32],
    width: int,
    offset: int,
    part: NDArray[np.float32],
    length: int,
) -> float | None:
    theirs, ours = _edges(whole, width), _edges(part, length, offset)
    if offset not in theirs or offset + length not in theirs:
        return None
    base = theirs[offset]
    return _gap(ours, {edge: value - base for edge, value in theirs.items()})


def _gap(ours: dict[int, float], theirs: dict[int, float]) -> float:
    common = sorted(ours.keys() & theirs.keys())
    gaps = np.diff([ours[edge] - theirs[edge] for edge in common])
    return float(np.linalg.norm(gaps))
