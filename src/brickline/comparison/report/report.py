"""What was found in two runs becomes a `DivergenceReport`: coverage, figures and what is open.

From fingerprints alone it names suspects, never culprits: what would prove the first one is the
report's `next_command`. Finds nothing itself.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from brickline.comparison.conditions import all_recording_facts, recording_facts
from brickline.comparison.operands import Differences
from brickline.comparison.pairing import Alignment
from brickline.comparison.report.ends import LaunchEnds, Output, RootEnds, ends_of
from brickline.comparison.report.findings import Findings
from brickline.comparison.report.run_pair import (
    RunPair,
    launch_name,
    problems_of,
    unmatched_launches,
)
from brickline.comparison.rounding.directions import Directions
from brickline.comparison.sides import FLAT, OP, Side
from brickline.comparison.suspects import Sign, Spared, Suspect
from brickline.comparison.traces.sides import traces_from_part
from brickline.comparison.triage import Units, first_update
from brickline.comparison.verdicts import ORDER, Judgement, reference_covered
from brickline.runs import Run
from brickline.traces import KernelTrace
from brickline.verdict import Coverage, DivergenceReport, Finding, Status, VerdictTable

DECIDES = "bl.check(candidate, ..., reference=...) decides"
PLAN_CHECK = (
    "bl.check(candidate, reference=reference), both prepared plans: holds every launch to the "
    "reference's on its own inputs; without reference=, to the NumPy reference of its kernel"
)
KERNEL_CHECK = (
    "bl.check(candidate, *inputs, reference=reference), both functions or kernels: holds one to "
    "the other on the same inputs"
)
MOST_ODD, MOST_OUTPUTS = 3, 4
"""Inputs and outputs that are told of one by one."""
REPLAY = "brickline check --runs executes each again where tensors were kept"


class Report:
    """Puts what was found into a `DivergenceReport`."""

    def __init__(
        self,
        pair: RunPair,
        alignment: Alignment,
        found: Differences,
        directions: Directions,
        units: Units,
        suspects: list[Suspect],
        judgement: Judgement,
        spared: Spared | None = None,
    ) -> None:
        self.pair, self.a, self.b = pair, pair.a, pair.b
        self.alignment, self.found, self.units = alignment, found, units
        self.directions = directions
        self.suspects, self.judgement, self.spared = suspects, judgement, spared
        call = int(self.a.position[suspects[0].row]) if suspects else None
        self.ends = ends_of(self.a, self.b, alignment, found, judgement.envelope, call)
        self.outputs, self.odd_inputs = self.ends.outputs(), self.ends.odd_inputs()

    def report(self) -> DivergenceReport:
        """Return all that is said of the two runs."""
        write = Findings(self.a, self.b, self.alignment, self.found, self.directions, self.units)
        findings = tuple(write.of(suspect) for suspect in self.suspects)
        coverage = self._coverage()
        worst = self._worst_output()
        report = DivergenceReport(
            *self.pair.names,
            findings=findings,
            verdicts=self._table(),
            coverage=coverage,
            unshown=tuple(self._unshown(coverage)),
            unmatched=tuple(unmatched_launches(self.pair, *self._lost())),
            noise_floor=None if worst is None else worst.floor,
            final_error=None if worst is None else worst.error,
            outputs=max(sum(each.error is not None for each in self.outputs), 1),
            whys=tuple(self._whys(findings)),
            circumstances=self.pair.circumstances,
            kernels_compared=coverage.compared,
        )
        ours, theirs = self._traces(self._first_row(report.status))
        return replace(
            report,
            next_command=self._next_command(findings, report.status),
            first_divergent_kernel=ours,
            expected_trace=theirs,
            actual_trace=ours,
        )

    # --- what is not shown

    def _lost(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which launches of either side were compared with nothing."""
        lost = ~self.judgement.covered & (self.alignment.partner < 0)
        return lost, ~reference_covered(self.b, self.alignment)

    @property
    def is_sound(self) -> bool:
        """Whether both runs were given the same, and nothing was lost while they were recorded."""
        sound = not self.pair.a.problems and not self.pair.b.problems and not self.odd_inputs
        return sound and not any(map(_unobserved, (self.pair.candidate, self.pair.reference)))

    def _is_whole(self, coverage: Coverage) -> bool:
        """Whether everything was recorded, compared, and given the same inputs."""
        compared = coverage.complete and bool(reference_covered(self.b, self.alignment).all())
        return compared and self.is_sound

    def _unshown(self, coverage: Coverage) -> Iterator[str]:
        told = (self.found.made.count > 0) & (self.alignment.partner >= 0)
        alike = bool(self.judgement.within[told].all()) and bool(told.any())
        if not self._is_whole(coverage) or not (alike or self.suspects):
            yield self._open_words(coverage)

    def _coverage(self) -> Coverage:
        outputs, partner = self.found.made, self.alignment.partner
        tells = (outputs.count > 0) | (partner < 0)
        covered = self.judgement.covered & tells
        direct = int((tells & (partner >= 0) & outputs.known).sum())
        inside = int(covered.sum()) - direct
        notes = list(problems_of(self.pair))
        if inside > 0:
            notes.append(
                f"{inside} launches were compared at the outer boundary of what they are in"
            )
        for role, run in (("candidate", self.pair.candidate), ("reference", self.pair.reference)):
            notes += [f"{role}: {text}" for text in _unobserved(run)]
        missing = int((tells & ~self.judgement.covered).sum())
        if missing:
            notes.append(f"{missing} launches have no partner or no fingerprint")
        lost = int((~reference_covered(self.b, self.alignment)).sum())
        if lost:
            notes.append(f"{lost} launches of the reference have no partner")
        if self.pair.ops:
            notes.append(
                f"{self.pair.ops} ops were compared at the boundary of their modules; {REPLAY}"
            )
        moved = int(self.alignment.reordered.sum())
        if moved:
            notes.append(f"{moved} launches came in another order")
        return Coverage(int(covered.sum()), int(tells.sum()), tuple(notes))

    # --- figures of the whole

    def _worst_output(self) -> Output | None:
        """Return the output that tells the final difference; None where one is of another size."""
        if any(each.is_lost for each in self.outputs):
            return self.outputs[0] if isinstance(self.ends, RootEnds) else None
        sized = [each for each in self.outputs if each.error is not None]
        return max(sized, key=lambda each: each.error or 0.0, default=None)

    def _first_row(self, status: Status) -> int | None:
        """Return the launch at which the runs first part: a suspect, else other bits."""
        if status is Status.MATCHED:
            return None
        if self.suspects:
            return min(suspect.row for suspect in self.suspects)
        return first_difference(self.alignment, self.found)

    def _traces(self, row: int | None) -> tuple[KernelTrace | None, KernelTrace | None]:
        if row is None:
            return None, None
        other = int(self.alignment.partner[row])
        ours = _kernel_trace(self.pair.candidate, self.a, row)
        return ours, _kernel_trace(self.pair.reference, self.b, other) if other >= 0 else None

    # --- tables

    def _table(self) -> VerdictTable:
        a, b, judged = self.a, self.b, self.judgement
        told = np.flatnonzero((self.found.made.count > 0) | (self.alignment.partner < 0))
        texts = [*a.words.texts, None]
        partner = self.alignment.partner[told]
        other = np.where(partner >= 0, b.name[partner], -1)
        is_op = a.level[told] == OP
        above = np.where(is_op & (a.parent[told] >= 0), a.name[a.parent[told]], a.name[told])
        verdicts = [ORDER[code] for code in judged.code[told].tolist()]
        delta = self.found.made.delta[told]
        delta[~self.found.made.known[told]] = np.nan
        delta[self.found.made.nonfinite[told]] = np.inf
        table = VerdictTable()
        table.columns = {
            "name": [texts[number] for number in above.tolist()],
            "reference_name": [texts[number] for number in other.tolist()],
            "layer_idx": [None if layer < 0 else layer for layer in a.layer[told].tolist()],
            "position": a.position[told].tolist(),
            "ordinal": a.ordinal[told].tolist(),
            "direction": ["backward" if way else "forward" for way in a.direction[told].tolist()],
            "brick": [texts[number] for number in a.brick[told].tolist()],
            "op": [
                texts[number] if op else None
                for number, op in zip(a.name[told].tolist(), is_op.tolist(), strict=True)
            ],
            "verdict": verdicts,
            "z": [None] * len(told),
            "local_error": _numbers(judged.local[told]),
            "propagated_error": _numbers(delta),
        }
        return table

    # --- words

    def _open_words(self, coverage: Coverage) -> str:
        if self.odd_inputs:
            return self._given_otherwise()
        problems = problems_of(self.pair)
        if problems:
            return f"no suspect among what could be compared, but {problems[0]}"
        if self.spared is not None:
            name = launch_name(self.a, int(self.units.blamed[self.spared.unit]))
            return f"{name} stands out, but {self.spared.reason}; {DECIDES}"
        update = first_update(self.a, self.found)
        if update is not None:
            return (
                f"weights differ from call {update} on that were the same before: what came of the "
                f"gradients or the optimiser differs, and no gradient tells whose; {DECIDES}"
            )
        alone = self._alone()
        if alone:
            told = (self.found.made.count > 0) & (self.alignment.partner >= 0)
            both = f"the {coverage.compared} launches that both runs have"
            agree = bool(self.judgement.within[told].all())
            begin = f"{both} agree" if agree else f"no suspect among {both}"
            return f"{begin}; {' and '.join(alone)}"
        if not coverage.complete or not reference_covered(self.b, self.alignment).all():
            return (
                f"no suspect among what could be compared ({coverage.compared} of {coverage.total} "
                "launches); the rest is not shown to match"
            )
        return (
            "no launch stands out, and the difference is larger than rounding is known to make; "
            f"{DECIDES}"
        )

    def _given_otherwise(self) -> str:
        first = self.odd_inputs[0]
        if isinstance(self.ends, RootEnds):
            return (
                f"the runs were given other inputs from call {first.call} on, so what follows "
                "cannot be judged; record both on the same inputs"
            )
        return f"{first.text}: what comes of it cannot be judged; run both on the same inputs"

    def _alone(self) -> list[str]:
        """Say what either side has alone: how many launches, and from where on."""
        ours, theirs = self._lost()
        sides = (("the candidate", self.a, ours), ("the reference", self.b, theirs))
        out = []
        for who, side, lost in sides:
            rows = np.flatnonzero(lost)
            if len(rows):
                name, call = launch_name(side, int(rows[0])), int(side.position[rows[0]])
                out.append(
                    f"{who} has {len(rows)} more without a counterpart, from {name} in call {call} "
                    "on"
                )
        return out

    def _whys(self, findings: Sequence[Finding]) -> list[str]:
        out = []
        prefix = identical_prefix(self.alignment, self.found)
        if prefix:
            what = "first launch is" if prefix == 1 else f"first {prefix} launches are"
            out.append(f"the {what} the same to the bit")
        out += self._given()
        for finding, suspect in zip(findings[:3], self.suspects, strict=False):
            out.append(self._why(finding, suspect))
        return out + self._put_out()

    def _given(self) -> list[str]:
        """Say what the candidate was given that the reference was not."""
        # What a later call is given may be what a suspect made in an earlier one.
        until = min((suspect.row for suspect in self.suspects), default=len(self.a) - 1)
        last = int(self.a.position[until])
        odd = [each.text for each in self.odd_inputs if each.call <= last][:MOST_ODD]
        values = self.ends.odd_values() if isinstance(self.ends, LaunchEnds) else None
        return odd if values is None or values in odd else [values, *odd]

    def _put_out(self) -> list[str]:
        """Say how what goes out differs, of many what differs most."""
        told = self.outputs
        if isinstance(self.ends, RootEnds):
            return [each.text for each in told if each.error is not None]
        if len(told) <= MOST_OUTPUTS:
            return [each.text for each in told]
        same = sum(each.is_same for each in told)
        rest = [each for each in told if not each.is_same]
        rest.sort(key=lambda each: -math.inf if each.error is None else -each.error)
        begin = f"{same} of {len(told)} outputs are the same to the bit"
        return [begin, *(each.text for each in rest[:MOST_OUTPUTS])]

    def _why(self, finding: Finding, suspect: Suspect) -> str:
        before = finding.evidence.get("before")
        name = launch_name(self.a, suspect.row)
        what = f"what {name} hands to {before}" if before else f"{name}'s output"
        if self.a.level[suspect.row] == FLAT:
            what = f"what {name} puts out"
        if suspect.broken:
            return f"{what} is not finite, and all that went in is"
        if self.units.resized[suspect.unit]:
            return f"{what} has another size, and nothing that went in has"
        entered = "is the same to the bit"
        if not self.units.clean[suspect.unit]:
            entered = f"differs by {suspect.source:.1e} at most"
        unit = suspect.unit
        if suspect.sign is Sign.BIAS:
            return (
                f"{what} has a factor or a shift of {float(self.units.bias[unit]):.1e}; what went "
                f"in {entered}, and rounding, which cancels, leaves "
                f"{float(self.units.explained_bias[unit]):.1e}"
            )
        if suspect.sign is Sign.PEAK:
            return (
                f"{what} has elements that are off by {float(self.units.peak[unit]):.1e} of the "
                f"largest one; what went in {entered}, and rounding explains "
                f"{float(self.units.base[unit]):.1e}"
            )
        return (
            f"{what} differs by {suspect.target:.1e}; what went in {entered}, and rounding "
            f"explains {float(self.units.rounding[unit]):.1e}"
        )

    def _next_command(self, findings: Sequence[Finding], status: Status) -> str | None:
        if status is Status.MATCHED:
            return None
        ours, theirs = self.pair.candidate.path, self.pair.reference.path
        check = f"brickline check --runs {shlex.quote(str(ours))} {shlex.quote(str(theirs))}"
        if _holds_tensors(ours) and _holds_tensors(theirs):
            return check
        if not findings:
            return None
        if isinstance(self.ends, LaunchEnds):
            return PLAN_CHECK if self.ends.is_plan else KERNEL_CHECK
        include = findings[0].name
        paths = [_beside(path) for path in (ours, theirs)]
        record = ", ".join(
            f'bl.record("{path}", model, level="op", tensors="all", include="{include}")'
            for path in paths
        )
        again = " ".join(shlex.quote(path) for path in paths)
        return f"{record}; then: brickline check --runs {again}"


def identical_prefix(alignment: Alignment, found: Differences) -> int:
    """Return how many launches from the first on put out the same bits on both sides."""
    told = (found.made.count > 0) | (alignment.partner < 0)
    same = found.made.same & (alignment.partner >= 0)
    broken = np.flatnonzero(told & ~same)
    end = int(broken[0]) if len(broken) else len(told)
    return int((told[:end] & same[:end]).sum())


def first_difference(alignment: Alignment, found: Differences) -> int | None:
    """Return the first paired launch of the candidate whose output is not the same to the bit."""
    seen = (alignment.partner >= 0) & (found.made.known | found.made.resized)
    rows = np.flatnonzero(seen & ~found.made.same)
    return int(rows[0]) if len(rows) else None


def _numbers(values: np.ndarray) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _unobserved(run: Run) -> list[str]:
    """Return what the recorders say they could not observe, and what found no space."""
    said = []
    for facts in all_recording_facts(run) or [recording_facts(run)]:
        found = facts.get("unobserved")
        if isinstance(found, dict):
            said += [f"{count} {what}" for what, count in found.items() if count]
        elif isinstance(found, list):
            said += [str(each) for each in found]
        elif found:
            said.append(f"{found} tensors unobserved")
    lost = sum(int(part.header.get("lost_records", 0)) for part in run.parts)
    if lost:
        said.append(f"{lost} entries found no space on the disk: the run is cut off")
    return said


def _kernel_trace(run: Run, side: Side, row: int) -> KernelTrace:
    part, place = divmod(int(side.source[row]), 1 << 40)
    (trace,) = traces_from_part(run.parts[part], np.array([place]))
    return trace


def _holds_tensors(path: Path) -> bool:
    try:
        return any((path / "tensors").iterdir())
    except OSError:
        return False


def _beside(path: Path) -> str:
    return f"{path.stem}-tensors.brick"
