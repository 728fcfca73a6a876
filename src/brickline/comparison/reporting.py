"""What was found in two runs becomes a `DivergenceReport`: status, coverage, figures and words.

From fingerprints alone it names suspects, never culprits: what would prove the first one is the
report's `next_command`. Finds nothing itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from brickline.comparison.align import Alignment
from brickline.comparison.conditions import all_recording_facts, recording_facts
from brickline.comparison.findings import Findings
from brickline.comparison.judging import ORDER, Judgement, reference_covered
from brickline.comparison.operands import Differences
from brickline.comparison.run_pair import RunPair, name_of, problems_of, unmatched_launches
from brickline.comparison.sides import OP, Side
from brickline.comparison.suspects import Spared, Suspect
from brickline.comparison.triage import Units, first_update
from brickline.runs import Run
from brickline.traces import KernelTrace
from brickline.verdicts import Coverage, DivergenceReport, Finding, Status, Verdict, VerdictTable

DECIDES = "bl.check(candidate, ..., reference=...) decides"
REPLAY = "brickline check --runs executes each again where tensors were kept"


class Report:
    """Puts what was found into a `DivergenceReport`."""

    def __init__(
        self,
        pair: RunPair,
        alignment: Alignment,
        found: Differences,
        units: Units,
        suspects: list[Suspect],
        judgement: Judgement,
        spared: Spared | None = None,
    ) -> None:
        self.pair, self.a, self.b = pair, pair.a, pair.b
        self.alignment, self.found, self.units = alignment, found, units
        self.suspects, self.judgement, self.spared = suspects, judgement, spared
        self.roots = np.flatnonzero(
            (self.a.parent < 0) & (alignment.partner >= 0) & (self.a.direction == 0)
        )

    def report(self) -> DivergenceReport:
        """Return all that is said of the two runs."""
        write = Findings(self.a, self.b, self.alignment, self.found, self.units)
        findings = tuple(write.of(suspect) for suspect in self.suspects)
        coverage = self._coverage()
        status = self._status(coverage)
        first = self._first_row(status)
        headline = self._headline(status, findings, coverage)
        ours, theirs = self._traces(first)
        return DivergenceReport(
            status,
            *self.pair.names,
            findings=findings,
            verdicts=self._table(),
            coverage=coverage,
            unmatched=tuple(unmatched_launches(self.pair, self.alignment)),
            noise_floor=self._noise_floor(),
            final_error=self._final_error(),
            headline=headline,
            whys=tuple(self._whys(findings)),
            circumstances=self.pair.circumstances,
            next_command=self._next_command(findings, status),
            first_divergent_kernel=ours,
            expected_trace=theirs,
            actual_trace=ours,
            kernels_compared=coverage.compared,
            diagnosis=headline,
        )

    # --- status

    def _status(self, coverage: Coverage) -> Status:
        if self.suspects:
            return Status.DIVERGED
        judged = self.judgement
        told = (self.found.made.count > 0) & (self.alignment.partner >= 0)
        alike = bool(judged.within[told].all()) and bool(told.any())
        whole = coverage.complete and not self.pair.a.problems and not self.pair.b.problems
        whole &= bool(reference_covered(self.b, self.alignment).all())
        whole &= not _unobserved(self.pair.candidate) and not _unobserved(self.pair.reference)
        return Status.MATCHED if alike and whole and not self._odd_inputs() else Status.INCONCLUSIVE

    def _odd_inputs(self) -> list[int]:
        """Return the calls of the root that were given something else."""
        inputs, roots = self.found.inputs, self.roots
        limit = self.judgement.envelope[roots]
        odd = inputs.choice[roots] | inputs.resized[roots] | (inputs.delta[roots] > limit)
        return [int(position) for position in np.unique(self.a.position[roots[odd]])]

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

    def _acting_root(self) -> int | None:
        """Return the root's call that tells the final difference."""
        if not len(self.roots):
            return None
        if self.suspects:
            position = self.a.position[self.suspects[0].row]
            there = self.roots[self.a.position[self.roots] == position]
            if len(there):
                return int(there[0])
        return int(self.roots[np.argmax(self.found.made.delta[self.roots])])

    def _final_error(self) -> float | None:
        root = self._acting_root()
        if root is None or not self.found.made.known[root]:
            return None
        return float(self.found.made.delta[root])

    def _noise_floor(self) -> float | None:
        root = self._acting_root()
        return None if root is None else float(self.judgement.envelope[root])

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

    def _headline(self, status: Status, findings: Sequence[Finding], coverage: Coverage) -> str:
        if findings:
            first = findings[0]
            word = "is the first suspect"
            if first.verdict is Verdict.NONFINITE_ORIGIN:
                word = "is where values stop being finite"
            about = f": {first.cause}" if first.cause else ""
            call = f" in call {first.position}" if len(np.unique(self.a.position)) > 1 else ""
            return f"{first.name}{call} {word}{about}"
        if status is Status.MATCHED:
            same = int((self.judgement.code == 0).sum())
            rest = int(self.judgement.within.sum()) - same
            how = "to the bit" if rest <= 0 else f"{same} to the bit, {rest} within rounding"
            how = how if same else "within rounding"
            return f"all {coverage.compared} launches agree, {how}"
        if self._odd_inputs():
            calls = self._odd_inputs()
            return (
                f"the runs were given other inputs from call {calls[0]} on, so what follows cannot "
                "be judged; record both on the same inputs"
            )
        problems = problems_of(self.pair)
        if problems:
            return f"no suspect among what could be compared, but {problems[0]}"
        if self.spared is not None:
            name = name_of(self.a, int(self.units.blamed[self.spared.unit]))
            return f"{name} stands out, but {self.spared.reason}; {DECIDES}"
        update = first_update(self.a, self.found)
        if update is not None:
            return (
                f"weights differ from call {update} on that were the same before: what came of the "
                f"gradients or the optimiser differs, and no gradient tells whose; {DECIDES}"
            )
        if not coverage.complete or not reference_covered(self.b, self.alignment).all():
            return (
                f"no suspect among what could be compared ({coverage.compared} of {coverage.total} "
                "launches); the rest is not shown to match"
            )
        return (
            "no launch stands out, and the difference is larger than rounding is known to make; "
            f"{DECIDES}"
        )

    def _whys(self, findings: Sequence[Finding]) -> list[str]:
        out = []
        prefix = identical_prefix(self.alignment, self.found)
        if prefix:
            out.append(f"the first {prefix} launches are the same to the bit")
        odd = self._odd_inputs()
        if odd:
            out.append(f"the root was given other inputs in call {odd[0]}")
        for finding, suspect in zip(findings[:3], self.suspects, strict=False):
            out.append(self._why(finding, suspect))
        final, floor = self._final_error(), self._noise_floor()
        if final == 0:
            out.append("the output is the same to the bit")
        elif final is not None and floor is not None:
            word = "more" if final > floor else "no more"
            out.append(
                f"the output differs by {final:.1e}, {word} than the {floor:.1e} that rounding "
                "may grow to"
            )
        return out

    def _why(self, finding: Finding, suspect: Suspect) -> str:
        before = finding.evidence.get("before")
        what = f"what {finding.name} hands to {before}" if before else f"{finding.name}'s output"
        if suspect.broken:
            return f"{what} is not finite, and all that went in is"
        if self.units.resized[suspect.unit]:
            return f"{what} has another size, and nothing that went in has"
        entered = "is the same to the bit"
        if not self.units.clean[suspect.unit]:
            entered = f"differs by {suspect.source:.1e} at most"
        return (
            f"{what} differs by {suspect.target:.1e}; what went in {entered}, and rounding "
            f"explains {float(self.units.rounding[suspect.unit]):.1e}"
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
    trace = run.parts[part].traces[place]
    return KernelTrace(
        side.path(row),
        max(int(side.layer[row]), 0),
        int(side.position[row]),
        side.words[int(side.backend[row])],
        params=side.words[int(side.params[row])],
        time_us=max(int(trace["end_ns"]) - int(trace["start_ns"]), 0) / 1e3,
    )


def _holds_tensors(path: Path) -> bool:
    try:
        return any((path / "tensors").iterdir())
    except OSError:
        return False


def _beside(path: Path) -> str:
    return f"{path.stem}-tensors.brick"
