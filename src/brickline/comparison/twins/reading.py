"""The report of two runs, decided by their float64 twins where both have them.

Three questions: do both runs compute the same in float64; are their weights the same up to
rounding; is what each put out natively no further from its own twin than rounding takes it. Each
that is answered with no is a finding. Owns the words; measures and blame are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from brickline.comparison.operands import Differences
from brickline.comparison.pairing import Alignment
from brickline.comparison.report.run_pair import RunPair, label_of, launch_name, name_of
from brickline.comparison.sides import MODULE, PARAMETER_INDEX, settings_of
from brickline.comparison.twins.blame import Blame, innermost, operands_of
from brickline.comparison.twins.measures import (
    JUMP,
    SUMS,
    Twins,
    measure_twins,
    side_twins,
)
from brickline.run.twin_rows import texts_of_run
from brickline.verdict import Coverage, DivergenceReport, Finding, Status, Verdict, VerdictTable

REASON = "shown by the float64 twins of both runs; fingerprints do not tell z, share and a repro"
FOREIGN = 0.5
"""Relative L2 from which on an input of a call is another input."""
MOST_WEIGHTS = 3
"""Weights that are findings of their own."""
SPREAD = 1.0
"""Own errors below so many units of rounding are all alike."""


def with_twins(
    report: DivergenceReport,
    pair: RunPair,
    alignment: Alignment,
    found: Differences,
    *,
    whole: bool,
) -> DivergenceReport:
    """Return a report in which twins decide, where both runs have some.

    Args:
        report: What is said without twins.
        pair: The two runs.
        alignment: Which launches belong together.
        found: Which operands belong together, and how far native values are apart.
        whole: Whether nothing was lost or unobserved while either run was recorded, and both were
            given the same.
    """
    ours, theirs = side_twins(pair.candidate, pair.a), side_twins(pair.reference, pair.b)
    if ours is None and theirs is None:
        return report
    notes = [
        f"{role}: {text}"
        for role, run in (("candidate", pair.candidate), ("reference", pair.reference))
        for text in texts_of_run((run.manifest, *run.joined))
    ]
    if ours is None or theirs is None:
        has, lacks = pair.candidate, pair.reference
        if ours is None:
            has, lacks = lacks, has
        text = f"{label_of(has)} has float64 twins and {label_of(lacks)} has none: {WITHOUT}"
        return _noted(report, [text, *notes])
    twins = measure_twins(pair, found, ours, theirs)
    return _noted(Reading(report, pair, alignment, found, twins).report(whole), notes)


WITHOUT = "compared as without; record both with twin=True to decide by them"


def _noted(report: DivergenceReport, notes: list[str]) -> DivergenceReport:
    coverage = replace(report.coverage, notes=(*report.coverage.notes, *notes))
    return replace(report, coverage=coverage)


@dataclass
class Reading:
    """What the twins say, on the way into a report."""

    before: DivergenceReport
    pair: RunPair
    alignment: Alignment
    found: Differences
    twins: Twins

    def report(self, whole: bool) -> DivergenceReport:
        """Return the report that the twins decide."""
        roots = self._roots()
        told = [row for row in roots if self._is_told(row)]
        if not told:
            return _noted(self.before, ["no call has a float64 twin in both runs"])
        logic = self._logic_blame(told)
        inner = None if logic else self._inside(told)
        arithmetic = None if logic or inner else self._arithmetic(told)
        findings = [*self._logic(logic), *self._off(arithmetic)]
        if inner is not None and self._is_same_code(inner.row):
            findings += self._logic(inner, Verdict.SUSPECT)
        named = {finding.name for finding in findings}
        findings += [each for each in self._weight_findings() if each.name not in named]
        backward = [each for each in self.before.findings if each.direction == "backward"]
        whole &= len(told) == len(roots) and not self._unseen(told)
        if findings or backward:
            return self._diverged([*findings, *backward], told, whole=whole, parted=bool(logic))
        if inner is not None:
            other = f"but {name_of(self.pair.a, inner.row)} computes something else inside"
            return self._cleared(told, other)
        return self._cleared(told, None if whole else self._what_lacks(told))

    # --- which calls, and whether they agree

    def _roots(self) -> list[int]:
        a = self.pair.a
        rows = np.flatnonzero((a.parent < 0) & (a.direction == 0) & (a.level == MODULE))
        return [int(row) for row in rows]

    def _is_told(self, row: int) -> bool:
        """Whether outputs of a call have twins, and what it was given is the same up to noise."""
        twins = self.twins
        made, given = (operands_of(self.pair.a, row, role) for role in (1, 0))
        if not bool(twins.known[made].any()):
            return False
        same, discrete = self.found.same, self.found.discrete
        return all(
            same[each] if discrete[each] else not twins.gap[each] > FOREIGN
            for each in given
            if self.found.other[each] >= 0
        )

    def _unseen(self, told: list[int]) -> bool:
        """Whether an output or a call has no counterpart, or what no twin tells is not shown."""
        a, b, found = self.pair.a, self.pair.b, self.found
        made = [each for row in told for each in operands_of(a, row, 1)]
        lost = any(found.other[each] < 0 or found.resized[each] for each in made)
        lost |= bool(((b.parent < 0) & (self.alignment.back(len(b)) < 0)).any())
        beside = (a.direction != 0) | ((a.parent < 0) & (a.level != MODULE))
        return lost or bool(beside.any() and self.before.status is not Status.MATCHED)

    def _parts(self, operand: int) -> bool | None:
        """Whether the logic differs at an operand; None: not known."""
        gap = self.twins.gap[operand]
        return None if np.isnan(gap) else bool(gap > self.twins.limit[operand])

    def _parts_far(self, operand: int) -> bool | None:
        """The same by more than a constant that was rounded to float32 makes."""
        gap = self.twins.gap[operand]
        return None if np.isnan(gap) else bool(gap > self.twins.weak[operand])

    def _logic_blame(self, told: list[int]) -> Blame | None:
        """Return where the logic differs; a rounded constant is no difference but of a setting."""
        blame = self._first(told, self._parts)
        if blame is None or self._parts_far(blame.operand):
            return blame
        if self._settings(blame.row) or self._weight_cause(blame.row):
            return blame
        return self._first(told, self._parts_far)

    def _first(self, told: list[int], is_bad: Any) -> Blame | None:
        for row in told:
            blame = innermost(self.pair.a, self.alignment, row, is_bad)
            if blame is not None:
                return blame
        return None

    def _inside(self, told: list[int]) -> Blame | None:
        """Return the first module that computes something else, where the outputs do not show it.

        Where both sides hold the same bits and the outputs agree, it is another way of writing.
        """
        a, twins = self.pair.a, self.twins
        for row in told:
            if bool(twins.exact[operands_of(a, row, 1)].any()):
                continue
            inside = (a.position == a.position[row]) & (a.direction == 0) & (a.parent >= 0)
            for child in np.flatnonzero(inside & (self.alignment.partner >= 0)).tolist():
                given = [self._parts(operand) for operand in operands_of(a, child, 0)]
                made = [self._parts(operand) for operand in operands_of(a, child, 1)]
                if any(made) and not any(given):
                    return innermost(a, self.alignment, child, self._parts)
        return None

    def _is_same_code(self, row: int) -> bool:
        other = int(self.alignment.partner[row])
        return other >= 0 and bool(self.pair.a.type[row] == self.pair.b.type[other])

    def _arithmetic(self, told: list[int]) -> tuple[Blame, bool] | None:
        """Return whose arithmetic is off and where: the candidate's, or the reference's."""
        one = self._first(told, lambda operand: self._jumps(operand, reference=False))
        if one is not None:
            return one, False
        other = self._first(told, lambda operand: self._jumps(operand, reference=True))
        return None if other is None else (other, True)

    def _jumps(self, operand: int, *, reference: bool) -> bool | None:
        """Whether a side's own error is more than rounding makes and than the other side's is."""
        twins = self.twins
        units, other = twins.own_units[operand], twins.other_units[operand]
        moved = twins.own_moved[operand]
        if reference:
            units, other, moved = other, units, twins.other_moved[operand]
        if np.isnan(units) or np.isnan(other):
            return None
        coarse = units and (twins.other_own if reference else twins.own)[operand] / units
        slack = SUMS / coarse if coarse else 0.0
        return bool(units - slack > JUMP * max(other, SPREAD) and moved > JUMP)

    def _weight_findings(self) -> list[Finding]:
        out = []
        for operand in list(self.twins.weights)[:MOST_WEIGHTS]:
            difference, rounding = self.twins.weights[operand]
            row, cause = int(self.found.owner[operand]), self._weight_words(operand)
            facts = {"weight_difference": difference, "explained_by_rounding": rounding}
            out.append(self._finding(row, cause, difference, facts))
        return out

    def _weight_words(self, operand: int) -> str:
        difference, rounding = self.twins.weights[operand]
        what = f"its {self._weight(operand)} differs from the reference's by {difference:.1e}"
        if not rounding:
            return f"{what} (relative L2), where most weights are the same to the bit"
        return f"{what} (relative L2); rounding makes {rounding:.1e} at most"

    def _weight(self, operand: int) -> str:
        a = self.pair.a
        number = int(a.index[operand]) - PARAMETER_INDEX
        names = a.parameter_names.get(int(a.params[self.found.owner[operand]]), ())
        return names[number] if number < len(names) else f"parameter {number}"

    # --- findings

    def _logic(self, blame: Blame | None, verdict: Verdict = Verdict.CULPRIT) -> list[Finding]:
        if blame is None:
            return []
        twins, operand = self.twins, blame.operand
        causes = [self._weight_cause(blame.row), self._settings(blame.row)]
        what = "its output differs"
        if blame.before is not None:
            what = f"what it hands to {launch_name(self.pair.a, blame.before)} differs"
        gap = float(twins.gap[operand])
        size = "in another choice" if np.isinf(gap) else f"by {gap:.1e}"
        cause = "; ".join(each for each in causes if each) or (
            f"in float64 {what} {size}, from the same inputs"
        )
        facts = {
            "float64_difference": gap if np.isfinite(gap) else None,
            "limit": float(twins.limit[operand]),
            "noise": float(twins.noise[operand]),
        }
        return [self._finding(blame.row, cause, gap, facts, verdict, blame.alternatives)]

    def _off(self, found: tuple[Blame, bool] | None) -> list[Finding]:
        if found is None:
            return []
        blame, reference = found
        twins, operand = self.twins, blame.operand
        own, other = float(twins.own[operand]), float(twins.other_own[operand])
        whose, error, rest = "its", own, other
        if reference:
            whose, error, rest = "the reference's", other, own
        what = (
            "output"
            if blame.before is None
            else (f"value that it hands to {launch_name(self.pair.a, blame.before)}")
        )
        size = (
            "is not finite where its twin is"
            if np.isinf(error)
            else (f"is {error:.1e} from its own float64 twin")
        )
        cause = (
            f"{whose} arithmetic is off: both compute the same in float64, and {whose} {what} "
            f"{size}, the other side's {rest:.1e}"
        )
        facts = _finite(
            own_error=own,
            reference_own_error=other,
            own_error_in_roundings=float(twins.own_units[operand]),
            reference_own_error_in_roundings=float(twins.other_units[operand]),
        )
        return [self._finding(blame.row, cause, error, facts, alternatives=blame.alternatives)]

    def _finding(
        self,
        row: int,
        cause: str,
        size: float,
        facts: Mapping[str, Any],
        verdict: Verdict = Verdict.CULPRIT,
        alternatives: Sequence[int] = (),
    ) -> Finding:
        a, other = self.pair.a, int(self.alignment.partner[row])
        layer, brick = int(a.layer[row]), int(a.brick[row])
        return Finding(
            name=name_of(a, row),
            verdict=verdict,
            layer_idx=None if layer < 0 else layer,
            position=int(a.position[row]),
            ordinal=int(a.ordinal[row]),
            brick=None if brick < 0 else a.words[brick],
            local_error=size if np.isfinite(size) else None,
            cause=cause,
            alternatives=tuple(name_of(a, row) for row in alternatives),
            reference_name=name_of(self.pair.b, other) if other >= 0 else None,
            reason=REASON,
            evidence=facts,
        )

    def _weight_cause(self, row: int) -> str | None:
        for operand in self.twins.weights:
            if self._is_same_module(operand, row):
                return self._weight_words(operand)
        return None

    def _is_same_module(self, operand: int, row: int) -> bool:
        return bool(self.pair.a.name[self.found.owner[operand]] == self.pair.a.name[row])

    def _settings(self, row: int) -> str | None:
        """Return how a module's recorded settings differ from its counterpart's."""
        other = int(self.alignment.partner[row])
        if other < 0:
            return None
        ours, theirs = settings_of(self.pair.a, row), settings_of(self.pair.b, other)
        odd = [key for key in ours if key in theirs and ours[key] != theirs[key]]
        shown = ", ".join(f"{key} {ours[key]}, reference {theirs[key]}" for key in odd[:3])
        return f"its settings differ: {shown}" if odd else None

    # --- the report

    def _diverged(
        self, findings: list[Finding], told: list[int], *, whole: bool, parted: bool
    ) -> DivergenceReport:
        rest = Verdict.PROPAGATED
        return replace(
            self.before,
            findings=tuple(findings),
            verdicts=self._table(findings, {Verdict.SUSPECT: rest, Verdict.AMPLIFIED: rest}),
            unshown=() if whole else (self._what_lacks(told),),
            whys=(*self._whys(told, parted), *self.before.whys),
        )

    def _cleared(self, told: list[int], lacks: str | None) -> DivergenceReport:
        suspects = [each for each in self.before.findings if each.verdict is Verdict.SUSPECT]
        calls = "1 call agrees" if len(told) == 1 else f"{len(told)} calls agree"
        agreement = f"{calls} in float64, and what differs natively is rounding"
        whys = [agreement, *self._whys(told, False)]
        if suspects:
            names = ", ".join(each.name for each in suspects[:3])
            whys.append(f"{names}: what stood out without twins is rounding")
        cleared = [Verdict.SUSPECT, Verdict.AMPLIFIED]
        if lacks is None:
            cleared += [Verdict.UNKNOWN, Verdict.STRUCTURAL]
        report = replace(
            self.before,
            findings=(),
            verdicts=self._table([], dict.fromkeys(cleared, Verdict.ROUNDING)),
            noise_floor=self._floor(told),
            unshown=() if lacks is None else (f"{agreement}; {lacks}",),
            whys=(*whys, *self.before.whys),
        )
        if lacks is not None:
            return report
        return replace(
            report,
            coverage=self._whole_coverage(),
            unmatched=(),
            next_command=None,
            first_divergent_kernel=None,
            expected_trace=None,
            actual_trace=None,
        )

    def _whole_coverage(self) -> Coverage:
        """Return the coverage where each launch lies in a call whose outputs have twins."""
        before = self.before.coverage
        inside = before.total - before.compared
        if not inside:
            return before
        note = f"{inside} launches were compared at the outputs of their call, in float64"
        return replace(before, compared=before.total, notes=(*before.notes, note))

    def _floor(self, told: list[int]) -> float | None:
        """Return what rounding makes of the outputs: measured by twins, or what it may grow to."""
        if self.before.final_error is None:
            return self.before.noise_floor
        twins = self.twins
        made = [each for row in told for each in operands_of(self.pair.a, row, 1)]
        sizes = np.array([twins.noise[made], twins.own[made], twins.other_own[made]])
        measured = np.sqrt(np.nansum(np.where(np.isfinite(sizes), sizes, 0.0) ** 2, axis=0))
        return max(self.before.noise_floor or 0.0, float(measured.max(initial=0.0))) or None

    def _what_lacks(self, told: list[int]) -> str:
        lost = len(self._roots()) - len(told)
        if lost:
            which = "1 more has no twin" if lost == 1 else f"{lost} more have no twins"
            return f"{which} on both sides, or not the same inputs"
        return "but not everything was observed, as the coverage says"

    def _whys(self, told: list[int], parted: bool) -> list[str]:
        twins, a = self.twins, self.pair.a
        made = [each for row in told for each in operands_of(a, row, 1)]
        made = [each for each in made if twins.known[each]]
        worst = max(made, key=lambda each: twins.gap[each])
        gap, limit = float(twins.gap[worst]), float(twins.limit[worst])
        held = "hold the same bits" if twins.exact[worst] else "differ by rounding"
        texts = [
            f"weights and inputs {held}; in float64 the outputs differ by {gap:.1e}, where "
            f"{limit:.1e} is what the measured noise allows"
        ]
        own, other = float(twins.own[worst]), float(twins.other_own[worst])
        if not (np.isnan(own) or np.isnan(other)):
            texts.append(
                f"what they put out natively is {own:.1e} from its own twin, the reference's "
                f"{other:.1e}"
            )
        return texts

    def _table(self, findings: list[Finding], instead: Mapping[Verdict, Verdict]) -> VerdictTable:
        """Return the verdicts: culprits are those of the twins, suspects are none any more.

        Args:
            findings: Those of the twins.
            instead: What verdicts without twins become.
        """
        columns = {name: list(values) for name, values in self.before.verdicts.columns.items()}
        named = {(each.name, each.position, each.ordinal): each.verdict for each in findings}
        places = zip(columns["name"], columns["position"], columns["ordinal"], strict=True)
        for number, place in enumerate(places):
            if columns["direction"][number] == "backward":
                continue
            if place in named and columns["op"][number] is None:
                columns["verdict"][number] = named[place]
            else:
                before = columns["verdict"][number]
                columns["verdict"][number] = instead.get(before, before)
        return VerdictTable(columns)


def _finite(**facts: float) -> dict[str, float | None]:
    """Return facts as JSON can hold them."""
    return {name: value if np.isfinite(value) else None for name, value in facts.items()}
