"""Whose weights are the reference's, though nothing that it puts out could be compared.

Other code keeps weights in other pieces and orders, so that the output of a product has no
counterpart. Sums over their elements do not change with that: where what lies inside a module
without a partner holds the same numbers on both sides, the products are not what is wrong, unless
their rows lie in a wrong order. Knows nothing of blame.
"""

from __future__ import annotations

import numpy as np

from brickline.align.keys import Ints
from brickline.align.sequences import Bools
from brickline.comparison.operands import Differences, Floats
from brickline.comparison.pairing import Alignment
from brickline.comparison.rounding.envelope import unit_roundoff
from brickline.comparison.sides import PARAMETER_INDEX, Side
from brickline.comparison.similarity import multiplies

EXACT = 1e-6
"""How far sums over the same float32 numbers in other pieces may be apart."""

SIBLINGS = 2
"""Fewest siblings that tell how a port keeps its weights."""


def cleared_by_weights(
    a: Side, b: Side, alignment: Alignment, found: Differences, around: Ints
) -> Bools:
    """Return which products hold the reference's weights."""
    products = multiplies(a, np.arange(len(a))) & ~a.has_children() & (a.direction == 0)
    held = found.parameters
    known = held.known & (held.delta <= 2 * found.roundoff) & (alignment.partner >= 0)
    lost = alignment.partner < 0
    # The whole that the pieces lie in, -1 where none is paired.
    whole = np.where(lost, around, np.arange(len(a)))
    lost_b = alignment.back(len(b)) < 0
    whole_b = np.where(lost_b, b.around(~lost_b), np.arange(len(b)))
    ours, sizes = _sums(a, whole, len(a))
    theirs, _ = _sums(b, whole_b, len(b))
    rows = np.flatnonzero(alignment.partner >= 0)
    other = theirs[alignment.partner[rows]]
    near = np.abs(ours[rows] - other) <= sizes[rows, None] * np.abs(other[:, [0, 1, 2, 1]])
    same = np.zeros(len(a), bool)
    same[rows] = near.all(axis=1) & (ours[rows, 0] > 0)
    inside = lost & (around >= 0) & same[np.maximum(around, 0)]
    cleared: Bools = products & (known | inside)
    return cleared


def odd_ones(a: Side, b: Side, found: Differences) -> Ints:
    """Return the products that hold the reference's weights as they are, and no sibling does.

    A port that keeps weights in another order, or with a factor, does so in every layer.
    """
    rows = np.flatnonzero(multiplies(a, np.arange(len(a))) & ~a.has_children() & (a.direction == 0))
    in_place = _in_place(a, b, found)[rows]
    kinds, names = a.kind[rows], a.name[rows]
    out = []
    for kind in np.unique(kinds[in_place]):
        here = kinds == kind
        placed = np.unique(names[here & in_place])
        if len(placed) == 1 and len(np.unique(names[here & ~in_place])) >= SIBLINGS:
            out += rows[here & in_place].tolist()
    return np.array(out, np.int64)


def _in_place(a: Side, b: Side, found: Differences) -> Bools:
    """Return whose largest weight is one of the reference's, or its counterpart's."""
    weights = np.flatnonzero((a.role == 0) & (a.index >= PARAMETER_INDEX) & (a.print >= 0))
    order = np.lexsort((-a.elements[weights], a.owner[weights]))
    owners, first = np.unique(a.owner[weights[order]], return_index=True)
    largest = weights[order[first]]
    theirs = (b.role == 0) & (b.index >= PARAMETER_INDEX) & (b.print >= 0)
    known = np.unique(b.prints.hash[b.print[theirs], 0])
    out = np.zeros(len(a), bool)
    out[owners] = np.isin(a.prints.hash[a.print[largest], 0], known)
    out[owners] |= found.delta[largest] <= 2 * found.roundoff[owners]
    return out


def _sums(side: Side, whole: Ints, count: int) -> tuple[Floats, Floats]:
    """Return sums over all weights of each whole, and how far they may be apart.

    The columns are the number of elements, the sums of their sizes and of their squares, and their
    sum.
    """
    owner = side.owner
    chosen = (side.role == 0) & (side.index >= PARAMETER_INDEX) & (side.print >= 0)
    chosen &= (side.direction[owner] == 0) & (whole[owner] >= 0)
    prints, at = side.print[chosen], whole[owner[chosen]]
    columns = (
        side.elements[chosen].astype(float),
        side.prints.l1[prints],
        side.prints.l2[prints] ** 2,
        side.prints.total[prints],
    )
    sums = np.zeros((count, len(columns)))
    for number, each in enumerate(columns):
        sums[:, number] = np.bincount(at, weights=each, minlength=count)
    coarse = np.zeros(count)
    roundoffs = np.array([unit_roundoff(text) for text in side.words.texts], float)
    np.maximum.at(coarse, at, roundoffs[side.dtype[chosen]])
    return sums, EXACT + 4 * coarse / np.sqrt(np.maximum(sums[:, 0], 1.0))
