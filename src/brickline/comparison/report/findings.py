"""A suspect becomes a finding: where in the tensor it differs, and what recorded facts explain.

Knows nothing of the report that the finding goes into.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from brickline.comparison.operands import Differences
from brickline.comparison.pairing import Alignment
from brickline.comparison.report.places import place_of_difference, scale_of_difference
from brickline.comparison.report.run_pair import name_of
from brickline.comparison.rounding.directions import Directions
from brickline.comparison.sides import OP, PARAMETER_INDEX, Side, settings_of
from brickline.comparison.suspects import Sign, Suspect
from brickline.comparison.triage import IN, LEAF, Units
from brickline.verdict import Finding, Verdict

NOT_KNOWN = "fingerprints do not tell z, share and a repro; a re-execution does"


class Findings:
    """Writes down what was found of each suspect."""

    def __init__(
        self,
        a: Side,
        b: Side,
        alignment: Alignment,
        found: Differences,
        directions: Directions,
        units: Units,
    ) -> None:
        self.a, self.b = a, b
        self.directions = directions
        self.alignment, self.found, self.units = alignment, found, units

    def of(self, suspect: Suspect) -> Finding:
        """Return the finding of one suspect."""
        a, row, unit = self.a, suspect.row, suspect.unit
        other = int(self.alignment.partner[row])
        mode = int(self.units.mode[unit])
        where, cause = self._details(suspect)
        causes = [each for each in (cause, self._kernel(row)) if each is not None]
        evidence: dict[str, Any] = {
            "difference_in": suspect.source,
            "difference_out": suspect.target,
            "explained_by_rounding": float(self.units.rounding[unit]),
            "ratio": suspect.ratio,
            **suspect.facts,
        }
        if mode == IN:
            evidence["before"] = a.path(int(self.units.row[unit]))
        layer = int(a.layer[row])
        brick = int(a.brick[row])
        return Finding(
            name=name_of(a, row),
            verdict=Verdict.NONFINITE_ORIGIN if suspect.broken else Verdict.SUSPECT,
            layer_idx=None if layer < 0 else layer,
            position=int(a.position[row]),
            ordinal=int(a.ordinal[row]),
            brick=None if brick < 0 else a.words[brick],
            op=a.path(row) if a.level[row] == OP else None,
            direction="backward" if a.direction[row] else "forward",
            local_error=None if suspect.broken else suspect.excess,
            propagated_error=None if suspect.broken else suspect.target,
            where=where,
            cause="; ".join(causes) or None,
            reference_name=name_of(self.b, other) if other >= 0 else None,
            reason=NOT_KNOWN,
            evidence=evidence,
        )

    def _details(self, suspect: Suspect) -> tuple[str | None, str | None]:
        """Return where in the tensor, and what a parameter or a factor explains."""
        a, b, found = self.a, self.b, self.found
        unit, mode = suspect.unit, int(self.units.mode[suspect.unit])
        row = int(self.units.row[unit])
        cause = self._parameter(suspect.row) if mode == LEAF else None
        cause = cause or self._settings(suspect.row)
        operand = self._worst(row, outputs=mode != IN)
        if operand is None:
            return None, cause
        other = int(found.other[operand])
        where = place_of_difference(a, operand, b, other)
        if suspect.broken:
            count = int(a.prints.nonfinite[a.print[operand]])
            return where, cause or f"{count} elements are not finite, all that went in is"
        if cause is None and self.units.resized[unit]:
            cause = f"{int(a.elements[operand])} elements, reference {int(b.elements[other])}"
        if cause is None and suspect.sign is Sign.BIAS:
            cause = f"what it computes is {self.directions.bias_in_words(operand)}"
        if cause is None and suspect.sign is Sign.PEAK:
            cause = "a few elements are further off than rounding explains"
        if cause is None:
            factor = scale_of_difference(a, operand, b, other)
            cause = None if factor is None else f"scaled by {factor:.4g}"
        return where, cause

    def _worst(self, row: int, *, outputs: bool) -> int | None:
        a, found = self.a, self.found
        own = np.arange(a.first[row], a.first[row + 1])
        chosen = (
            a.role[own] > 0 if outputs else (a.role[own] == 0) & (a.index[own] < PARAMETER_INDEX)
        )
        own = own[chosen & (found.other[own] >= 0) & (a.print[own] >= 0) & ~found.same[own]]
        own = own[self.b.print[found.other[own]] >= 0]
        if not len(own):
            return None
        size = np.nan_to_num(found.delta[own], nan=-1.0, posinf=1e300)
        return int(own[np.argmax(size)])

    def _parameter(self, row: int) -> str | None:
        a, found = self.a, self.found
        own = np.arange(a.first[row], a.first[row + 1])
        own = own[(a.role[own] == 0) & (a.index[own] >= PARAMETER_INDEX)]
        own = own[~np.isnan(found.delta[own]) & (found.delta[own] > 2 * found.roundoff[row])]
        if not len(own):
            return None
        worst = int(own[np.argmax(found.delta[own])])
        number = int(a.index[worst]) - PARAMETER_INDEX
        names = a.parameter_names.get(int(a.params[row]), ())
        name = names[number] if number < len(names) else f"parameter {number}"
        return f"its {name} differs from the reference's by {found.delta[worst]:.1e} (relative L2)"

    def _settings(self, row: int) -> str | None:
        """Return how a module's recorded settings differ from its counterpart's."""
        other = int(self.alignment.partner[row])
        if other < 0 or self.a.type[row] != self.b.type[other]:
            return None
        ours, theirs = settings_of(self.a, row), settings_of(self.b, other)
        odd = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        if not odd:
            return None
        shown = ", ".join(f"{key} {ours.get(key)}, reference {theirs.get(key)}" for key in odd[:3])
        return f"its settings differ: {shown}"

    def _kernel(self, row: int) -> str | None:
        """Return which kernel a plan's launch is, where the reference's is another one."""
        other = int(self.alignment.partner[row])
        ours, theirs = self.a.kernel[row], self.b.kernel[other] if other >= 0 else -1
        if ours < 0 or theirs < 0 or ours == theirs:
            return None
        return f"its kernel is {self.a.words[ours]}, the reference's {self.b.words[theirs]}"
