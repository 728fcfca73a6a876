"""Where in a tensor two fingerprints differ, and how, in words.

Reads sketches and stripes of one pair. Says nothing of who is to blame.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from brickline.comparison.sides import Side

MOST = 0.95
"""Part of the difference that lies in the stripes that are named."""
FEW = 0.3
"""Part of the stripes up to which naming them says something."""
SCALED = 0.15
"""What a factor leaves of a difference that is one of scale."""


def place_of_difference(a: Side, operand: int, b: Side, other: int) -> str | None:
    """Return which rows or columns hold the difference; None where it is all over."""
    records = _records(a, operand), _records(b, other)
    if not all("rows" in (each.dtype.names or ()) for each in records):
        return None
    width = max(int(a.width[operand]), 1)
    height = max(int(a.elements[operand]) // width, 1)
    found = [
        _stripes("row", records[0]["rows"] - records[1]["rows"], height, -(-height // 32)),
        _stripes(
            "column", records[0]["columns"] - records[1]["columns"], width, 4 * -(-width // 128)
        ),
    ]
    named = [each for each in found if each]
    return " and ".join(named) if named else None


def _records(side: Side, operand: int) -> NDArray[np.void]:
    record: NDArray[np.void] = side.prints.records(side.print[[operand]])[0]
    return record


def _stripes(what: str, gap: NDArray[np.float32], length: int, step: int) -> str | None:
    energy = np.asarray(gap, np.float64) ** 2
    used = -(-length // step)
    total = float(energy.sum())
    if used < 4 or not np.isfinite(total) or total == 0:
        return None
    order = np.argsort(energy)[::-1]
    enough = int(np.searchsorted(np.cumsum(energy[order]), MOST * total)) + 1
    if enough > max(1, FEW * used):
        return None
    stripes = sorted(order[:enough].tolist())
    ranges: list[list[int]] = []
    for stripe in stripes:
        first, last = stripe * step, min((stripe + 1) * step, length) - 1
        if ranges and ranges[-1][1] + 1 == first:
            ranges[-1][1] = last
        else:
            ranges.append([first, last])
    text = ", ".join(str(one) if one == two else f"{one}-{two}" for one, two in ranges[:4])
    return f"{what}s {text} of {length}"


def scale_of_difference(a: Side, operand: int, b: Side, other: int) -> float | None:
    """Return the factor between two tensors, where a factor is all that differs."""
    ours, theirs = (
        side.prints.sketches(side.print[[at]])[0] for side, at in ((a, operand), (b, other))
    )
    norm = float(theirs @ theirs)
    gap = float(np.linalg.norm(ours - theirs))
    if norm == 0 or gap == 0:
        return None
    factor = float(ours @ theirs) / norm
    left = float(np.linalg.norm(ours - factor * theirs))
    return factor if left < SCALED * gap else None
