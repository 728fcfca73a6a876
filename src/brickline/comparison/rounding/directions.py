"""Whether a difference points somewhere: a common factor, a common shift, or a few elements.

Rounding errors have no common direction, so they cancel in a norm and in a sum: over n independent
elements what is left of a relative error e is e / √n. A factor, a constant or a tail of zeros does
not cancel, and shows where the distance alone is no larger than rounding makes it. Knows
fingerprints and what rounding may add; says nothing of blame.

Rounding is not independent everywhere. The error of a row's norm is the same in all of its columns,
and where the two sides round weights differently, that of a weight is the same in every row. So n
counts rows, or columns where these are fewer, and elements only where a launch rounds its output
and little else. Where few elements are large it counts these: n ≥ lines · (rms / absmax)².
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from brickline.align.keys import Ints
from brickline.align.sequences import Bools
from brickline.comparison.fingerprint_columns import CHUNK, FingerprintColumns
from brickline.comparison.operands import Differences, Floats
from brickline.comparison.rounding.envelope import UNIT_ROUNDOFF, unit_roundoff
from brickline.comparison.rounding.limits import is_lean
from brickline.comparison.sides import PARAMETER_INDEX, Side

COARSE = UNIT_ROUNDOFF["float16"]
"""Unit roundoff from which on directions are looked at. In float32 the limit of a distance is no
larger than what approximations of one function make of a factor."""
LARGE = 0.1
"""Relative L2 above which a difference needs no direction to show."""
APPROXIMATE = 32.0
"""Factors that clean kernels differ by, in roundoffs of their float32 accumulators: attention
kernels of one GPU differ by 8 (H200, docs/performance.md)…"""
TRUNCATED = 0.1
"""…and tensor cores, which truncate, by 0.024 for each product of one sign that they sum."""
BIASED_TF32 = 0.1
"""…and products in TF32 by 0.03 roundoffs where all terms have one sign (H200)."""
SIGMAS = 6.0
"""How far one bucket of 64 may lie from the others."""
NORMAL_MEDIAN = 0.6745
"""Median magnitude of a standard normal number."""


class Direction(NamedTuple):
    """One entry per launch: the largest over some of its operands."""

    bias: Floats
    spread: Floats
    own_spread: Floats
    peak: Floats


@dataclass(eq=False)
class Directions:
    """One entry per operand of the candidate; 0 where nothing was measured."""

    side: Side
    factor: Floats
    """By how much the factor between the two differs from 1."""
    shift: Floats
    """What every element has more than the reference's, in root mean squares of these."""
    spread: Floats
    """Part of a relative error that lines have in common which shows as a factor or a shift."""
    own_spread: Floats
    """The same of errors that the launch itself makes."""
    peak: Floats
    """Error of single elements beyond what the others have, to the largest element."""
    floor: Floats
    """One entry per launch: the bias that clean code may have without any cancelling."""

    @cached_property
    def bias(self) -> Floats:
        """The larger of factor and shift."""
        return np.maximum(np.abs(self.factor), np.abs(self.shift))

    def bias_in_words(self, operand: int) -> str:
        """Say how an operand differs from the reference's as a whole."""
        factor, shift = float(self.factor[operand]), float(self.shift[operand])
        if abs(factor) >= abs(shift):
            return f"{1.0 + factor:.5g} times the reference's"
        return f"shifted by {shift:+.1e} of its root mean square from the reference's"

    @cached_property
    def inputs(self) -> Direction:
        """Of what goes in, parameters left out."""
        return self._of((self.side.role == 0) & (self.side.index < PARAMETER_INDEX))

    @cached_property
    def outputs(self) -> Direction:
        """Of what comes out, gradients of parameters left out."""
        return self._of((self.side.role > 0) & (self.side.index < PARAMETER_INDEX))

    @cached_property
    def gradients(self) -> Direction:
        """Of the gradients of parameters."""
        return self._of((self.side.role > 0) & (self.side.index >= PARAMETER_INDEX))

    def _of(self, chosen: Bools) -> Direction:
        largest = []
        for values in (self.bias, self.spread, self.own_spread, self.peak):
            out = np.zeros(len(self.side))
            np.maximum.at(out, self.side.owner[chosen], values[chosen])
            largest.append(out)
        return Direction(*largest)


def directions_of(a: Side, b: Side, found: Differences) -> Directions:
    """Measure the direction of every pair of operands of coarse dtypes."""
    count = len(a.role)
    columns = [np.zeros(count) for _ in range(4)]
    chosen = (found.other >= 0) & (a.print >= 0) & ~found.same & (found.delta > 0)
    chosen &= (found.delta <= LARGE) & ~found.discrete & ~found.resized & ~found.fused
    chosen &= found.roundoff[a.owner] >= COARSE
    operands = np.flatnonzero(chosen)
    operands = operands[b.print[found.other[operands]] >= 0]
    if len(operands):
        prints = max(len(b.prints), 1)
        pairs = a.print[operands] * prints + b.print[found.other[operands]]
        _, first, at = np.unique(pairs, return_index=True, return_inverse=True)
        one = operands[first]
        measured = _measured(
            a.prints, a.print[one], b.prints, b.print[found.other[one]], found.delta[one]
        )
        for column, values in zip(columns, measured, strict=True):
            column[operands] = values[at.reshape(-1)]
    factor, shift, evenness, peak = columns
    ours, theirs = _roundoffs(a, b, found)
    differs, is_tf32 = ours != theirs, found.roundoff > np.maximum(ours, theirs)
    shared, own = (
        1.0 / np.sqrt(np.maximum(lines * evenness, 1.0))
        for lines in _independent(a, found, differs | is_tf32)
    )
    return Directions(a, factor, shift, shared, own, peak, _floor(found, differs, is_tf32))


def _measured(
    a: FingerprintColumns, ours: Ints, b: FingerprintColumns, theirs: Ints, delta: Floats
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return factor, shift, evenness and peak of paired fingerprints."""
    elements = np.maximum(b.elements[theirs], 1).astype(float)
    with np.errstate(all="ignore"):  # a damaged run may hold any numbers
        size = b.l2[theirs]
        # ‖a‖² = ‖b‖² + 2 a factor's part of it + ‖a - b‖².
        factor = ((a.l2[ours] / size) ** 2 - 1.0 - delta**2) / 2.0
        shift = (a.total[ours] - b.total[theirs]) / size / np.sqrt(elements)
        evenness = (size / b.absmax[theirs]) ** 2 / elements
        peak = _peaks(a, ours, b, theirs) / b.absmax[theirs]
    factor, shift, evenness, peak = (
        np.nan_to_num(values, posinf=0.0, neginf=0.0) for values in (factor, shift, evenness, peak)
    )
    return factor, shift, evenness, peak


def _peaks(a: FingerprintColumns, ours: Ints, b: FingerprintColumns, theirs: Ints) -> Floats:
    """Return how far the largest bucket of each difference lies beyond all others' spread."""
    out = np.zeros(len(ours))
    for begin in range(0, len(ours), CHUNK):
        here = slice(begin, begin + CHUNK)
        gap = np.abs(a.sketches(ours[here]) - b.sketches(theirs[here]))
        spread = np.median(gap, axis=1) / NORMAL_MEDIAN
        out[here] = np.maximum(gap.max(axis=1) - SIGMAS * spread, 0.0)
    return out


def _independent(a: Side, found: Differences, other_weights: Bools) -> tuple[Floats, Floats]:
    """Return how many lines of each operand err independently, and how many of its elements do.

    The second holds where the launch rounds its output and little else.

    Args:
        a: The candidate.
        found: How its tensors differ.
        other_weights: Of each launch, whether the two sides round its weights differently.
    """
    elements = np.maximum(a.elements, 1).astype(float)
    width = np.maximum(a.width, 1)
    lines = np.maximum(elements / width, 1.0)
    held = found.parameters
    other_weights = other_weights | ((held.count > 0) & ~held.same)
    lines = np.where(other_weights[a.owner], np.minimum(lines, width), lines)
    alone = is_lean(a, np.arange(len(a))) & ~other_weights
    return lines, np.where(alone[a.owner], elements, lines)


def _roundoffs(a: Side, b: Side, found: Differences) -> tuple[Floats, Floats]:
    """Return the roundoff of the coarsest dtype of each launch, on either side."""
    ours, theirs = np.zeros(len(a)), np.zeros(len(a))
    roundoffs = np.array([unit_roundoff(text) for text in a.words.texts], float)
    paired = np.flatnonzero(found.other >= 0)
    np.maximum.at(ours, a.owner[paired], roundoffs[a.dtype[paired]])
    np.maximum.at(theirs, a.owner[paired], roundoffs[b.dtype[found.other[paired]]])
    return ours, theirs


def _floor(found: Differences, differs: Bools, is_tf32: Bools) -> Floats:
    """Return the bias that each launch may have in clean code, whatever its size."""
    accumulator = np.minimum(found.roundoff, UNIT_ROUNDOFF["float32"])
    products = np.maximum(found.inputs.width, found.made.width)
    out: Floats = accumulator * (APPROXIMATE + TRUNCATED * products)
    # A constant such as √width is rounded to the dtype of one side, and not to that of the other.
    out = out + np.where(differs, found.roundoff, 0.0)
    return out + np.where(is_tf32, BIASED_TF32 * found.roundoff, 0.0)
