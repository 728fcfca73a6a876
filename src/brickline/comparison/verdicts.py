"""A verdict for every pair of launches, and what may be said of the whole.

Owns the step from units and suspects to verdicts. Knows neither files nor words for people.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brickline.align.keys import Ints
from brickline.align.sequences import Bools
from brickline.comparison.operands import Differences, Floats
from brickline.comparison.pairing import Alignment
from brickline.comparison.rounding.directions import Directions
from brickline.comparison.rounding.envelope import deep_envelope
from brickline.comparison.sides import Side
from brickline.comparison.suspects import Suspect
from brickline.comparison.triage import LEAF, OUT, Units
from brickline.verdict import Verdict

ORDER = (
    Verdict.IDENTICAL,
    Verdict.ROUNDING,
    Verdict.PROPAGATED,
    Verdict.AMPLIFIED,
    Verdict.TIE,
    Verdict.STRUCTURAL,
    Verdict.UNKNOWN,
    Verdict.SUSPECT,
    Verdict.NONFINITE_ORIGIN,
)
_CODE = {verdict: code for code, verdict in enumerate(ORDER)}
AMPLIFIES = 3.0
"""From this ratio on an op made the difference much larger."""


@dataclass(eq=False)
class Judgement:
    """One entry per launch of the candidate."""

    code: Ints
    """Place of the verdict in `ORDER`."""
    local: Floats
    """Relative L2 that the launch adds; nan where not known."""
    envelope: Floats
    """What rounding alone may have grown to here."""
    within: Bools
    """Identical, or within that envelope."""
    covered: Bools
    """Compared, or inside something that was."""

    def verdict(self, row: int) -> Verdict:
        """Return the verdict of a launch."""
        return ORDER[int(self.code[row])]


def judge(
    a: Side,
    alignment: Alignment,
    found: Differences,
    directions: Directions,
    units: Units,
    suspects: list[Suspect],
) -> Judgement:
    """Give every launch of the candidate its verdict."""
    outputs = found.made
    paired = alignment.partner >= 0
    limit = _limits(a, found)
    local, ratio, source_known = _own_units(a, units)
    code = np.full(len(a), _CODE[Verdict.PROPAGATED])
    code[ratio > AMPLIFIES] = _CODE[Verdict.AMPLIFIED]
    code[~source_known] = _CODE[Verdict.UNKNOWN]
    small = paired & outputs.known & (outputs.delta <= limit) & ~outputs.nonfinite
    made = directions.outputs
    small &= made.bias <= made.spread * limit + directions.floor
    code[small] = _CODE[Verdict.ROUNDING]
    choice = paired & outputs.choice
    code[choice & (outputs.delta <= limit)] = _CODE[Verdict.TIE]
    code[choice & (outputs.delta <= limit) & found.inputs.same] = _CODE[Verdict.UNKNOWN]
    code[paired & outputs.same] = _CODE[Verdict.IDENTICAL]
    code[paired & outputs.resized] = _CODE[Verdict.STRUCTURAL]
    code[~paired | (~outputs.known & ~outputs.resized)] = _CODE[Verdict.UNKNOWN]
    code[~paired] = _CODE[Verdict.STRUCTURAL]
    for suspect in suspects:
        guilty = Verdict.NONFINITE_ORIGIN if suspect.broken else Verdict.SUSPECT
        code[suspect.row] = _CODE[guilty]
    within = paired & (outputs.same | (small & ~outputs.choice & ~outputs.resized))
    return Judgement(code, local, limit, within, _covered(a, paired & outputs.known))


def _limits(a: Side, found: Differences) -> Floats:
    layers = int(a.layer.max(initial=-1)) + 1
    depth = np.where(a.layer >= 0, a.layer + 1, layers).astype(float)
    width = np.maximum(found.inputs.width, found.made.width).astype(float)
    return deep_envelope(found.roundoff, depth, width)


def _own_units(a: Side, units: Units) -> tuple[Floats, Floats, Bools]:
    """Return what each launch adds, its ratio, and whether all that went into it was seen."""
    local, ratio = np.full(len(a), np.nan), np.zeros(len(a))
    known = np.zeros(len(a), bool)
    own = np.flatnonzero((units.mode == LEAF) | (units.mode == OUT))
    rows = units.row[own]
    excess = np.sqrt(np.maximum(units.target[own] ** 2 - units.source[own] ** 2, 0.0))
    local[rows] = excess
    ratio[rows] = units.ratio[own]
    known[rows] = units.known[own]
    return local, ratio, known


def _covered(a: Side, compared: Bools) -> Bools:
    """Return which launches were compared, or lie inside one that was."""
    out = compared.copy()
    for _ in range(64):
        inside = ~out & (a.parent >= 0)
        inside[inside] = out[a.parent[inside]]
        if not inside.any():
            break
        out |= inside
    return out


def reference_covered(b: Side, alignment: Alignment) -> Bools:
    """Return which launches of the reference have a partner, or lie inside one that has."""
    return _covered(b, alignment.back(len(b)) >= 0)
