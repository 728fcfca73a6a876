"""`compare`: two recorded runs become a report.

Conducts the steps of the other modules and puts what they found into words. From fingerprints alone
it names suspects, never culprits: what would prove the first one is the report's `next_command`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from brickline.comparison.align import Alignment, align
from brickline.comparison.conditions import (
    differing_circumstances,
    recording_facts,
    uses_tf32,
)
from brickline.comparison.envelope import UNIT_ROUNDOFF
from brickline.comparison.judging import ORDER, Judgement, judge, reference_covered
from brickline.comparison.operands import Differences, measure
from brickline.comparison.places import place_of_difference, scale_of_difference
from brickline.comparison.sides import (
    MODULE,
    OP,
    PARAMETER_INDEX,
    Side,
    Vocabulary,
    modules_alone,
    settings_of,
    side_from_run,
)
from brickline.comparison.suspects import Suspect, find_suspects
from brickline.comparison.triage import IN, LEAF, Units, units_of
from brickline.errors import UsageError
from brickline.runs import Run
from brickline.traces import KernelTrace
from brickline.verdicts import Coverage, DivergenceReport, Finding, Status, Verdict, VerdictTable

Given: TypeAlias = str | os.PathLike[str] | Run

NOT_KNOWN = "fingerprints do not tell z, share and a repro; a re-execution does"
MOST_LISTED = 200
"""Launches without a partner that are listed by name; the rest is counted."""


def compare(candidate: Given, reference: Given) -> DivergenceReport:
    """Say whether two runs agree, and if not, who is the first suspect.

    The runs may come from other processes, machines, devices and dtypes, and may differ in length,
    names and nesting; none of that raises.

    Args:
        candidate: The run that is in question, as a path or opened.
        reference: The run that it is held against.

    Returns:
        Diverged when a suspect stands; matched only when everything was compared and every pair is
        identical or within the frozen rounding envelope; otherwise inconclusive.

    Raises:
        UsageError: if an argument is neither a path nor a run.
        RunError: if a path holds no readable run.
    """
    ours, theirs = opened(candidate, "candidate"), opened(reference, "reference")
    words = Vocabulary()
    a, b = side_from_run(ours, words), side_from_run(theirs, words)
    ops = int((a.level == OP).sum())
    # The same few ops are everywhere; modules say which of them belong together.
    if (a.level == MODULE).any() and (b.level == MODULE).any():
        a, b = modules_alone(a), modules_alone(b)
    pair = _Pair(
        ours, theirs, a, b, differing_circumstances(ours, theirs), ops - int((a.level == OP).sum())
    )
    refusal = _nothing_to_compare(pair)
    if refusal:
        return _empty(pair, refusal)
    alignment = align(a, b)
    if not len(alignment.rows):
        return _empty(pair, _nothing_in_common(pair))
    found = measure(a, b, alignment)
    if uses_tf32(ours) or uses_tf32(theirs):
        coarse = UNIT_ROUNDOFF["tf32"]
        found.roundoff = np.where(found.roundoff > 0, np.maximum(found.roundoff, coarse), 0.0)
    units = units_of(a, b, alignment, found)
    suspects = find_suspects(a, b, alignment, found, units)
    judgement = judge(a, alignment, found, units, suspects)
    return _Report(pair, alignment, found, units, suspects, judgement).report()


@dataclass(frozen=True, eq=False)
class _Pair:
    """The two runs and their launches."""

    candidate: Run
    reference: Run
    a: Side
    b: Side
    circumstances: tuple[str, ...]
    ops: int = 0
    """Ops of the candidate that are judged by the modules they are in."""

    @property
    def names(self) -> tuple[str, str]:
        return _label(self.candidate), _label(self.reference)


def opened(given: Given, role: str) -> Run:
    """Return a run from what a caller gave.

    Raises:
        UsageError: if it is neither a path nor a run.
        RunError: if the path holds no readable run.
    """
    if isinstance(given, Run):
        return given
    if isinstance(given, str | os.PathLike):
        return Run.open(given)
    raise UsageError(
        f"{role}: expected the path of a run or a Run, got {type(given).__name__}; "
        "record one with bl.record(path, model), or compare live models with bl.check"
    )


def _label(run: Run) -> str:
    return run.path.name or run.name


# --- nothing can be said


def _nothing_to_compare(pair: _Pair) -> str | None:
    for side, run in ((pair.a, pair.candidate), (pair.b, pair.reference)):
        name = _label(run)
        if not len(side):
            return (
                f"{name} holds no launches, so nothing was compared; record them with "
                "bl.record(path, model) or brickline run --torch SCRIPT"
            )
        if not (side.print >= 0).any():
            return (
                f"{name} holds {len(side)} launches and no fingerprints, so no value was compared; "
                "record it again with bl.record(path, model), which takes them"
            )
    return None


def _nothing_in_common(pair: _Pair) -> str:
    first = [side.path(0) for side in (pair.a, pair.b)]
    return (
        f"the runs have no launch in common: {len(pair.a)} launches from {first[0]!r} on, "
        f"reference {len(pair.b)} from {first[1]!r} on; record the same model on the same inputs"
    )


def _empty(pair: _Pair, headline: str) -> DivergenceReport:
    names = pair.names
    return DivergenceReport(
        Status.INCONCLUSIVE,
        *names,
        coverage=Coverage(0, len(pair.a), _problems(pair)),
        unmatched=tuple(_unmatched(pair, None)),
        headline=headline,
        circumstances=pair.circumstances,
        diagnosis=headline,
    )


def _problems(pair: _Pair) -> tuple[str, ...]:
    return tuple(
        f"{role}: {text}"
        for role, side in (("candidate", pair.a), ("reference", pair.b))
        for text in side.problems
    )


def _unmatched(pair: _Pair, alignment: Alignment | None) -> list[str]:
    a, b = pair.a, pair.b
    free_a = np.arange(len(a)) if alignment is None else np.flatnonzero(alignment.partner < 0)
    free_b = np.arange(len(b))
    if alignment is not None:
        free_b = np.flatnonzero(alignment.back(len(b)) < 0)
    out = []
    for role, side, rows in (("candidate", a, free_a), ("reference", b, free_b)):
        out += [f"{role}: {_place(side, int(row))}" for row in rows[:MOST_LISTED]]
        if len(rows) > MOST_LISTED:
            out.append(f"{role}: and {len(rows) - MOST_LISTED} more")
    return out


def _place(side: Side, row: int) -> str:
    text = _name(side, row)
    if side.level[row] == OP:
        text += f" ({side.path(row)})"
    where = f"{text}, call {int(side.position[row])}"
    return where + (" backward" if side.direction[row] else "")


def _name(side: Side, row: int) -> str:
    """Return whose work a launch is: its module's, for an op."""
    parent = int(side.parent[row])
    return side.path(parent) if side.level[row] == OP and parent >= 0 else side.path(row)


# --- the report


class _Report:
    """Puts what was found into a `DivergenceReport`."""

    def __init__(
        self,
        pair: _Pair,
        alignment: Alignment,
        found: Differences,
        units: Units,
        suspects: list[Suspect],
        judgement: Judgement,
    ) -> None:
        self.pair, self.a, self.b = pair, pair.a, pair.b
        self.alignment, self.found, self.units = alignment, found, units
        self.suspects, self.judgement = suspects, judgement
        self.roots = np.flatnonzero(
            (self.a.parent < 0) & (alignment.partner >= 0) & (self.a.direction == 0)
        )

    def report(self) -> DivergenceReport:
        findings = tuple(self._finding(suspect) for suspect in self.suspects)
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
            unmatched=tuple(_unmatched(self.pair, self.alignment)),
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
        notes = list(_problems(self.pair))
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
                f"{self.pair.ops} ops were compared at the boundary of their modules; "
                "brickline check --runs executes each again where tensors were kept"
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

    def _finding(self, suspect: Suspect) -> Finding:
        a, row, unit = self.a, suspect.row, suspect.unit
        other = int(self.alignment.partner[row])
        mode = int(self.units.mode[unit])
        where, cause = self._details(suspect)
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
            name=_name(a, row),
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
            cause=cause,
            reference_name=_name(self.b, other) if other >= 0 else None,
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
        own = own[b_prints(self.b, found.other[own])]
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
            return f"all {coverage.compared} launches agree, {how}"
        if self._odd_inputs():
            calls = self._odd_inputs()
            return (
                f"the runs were given other inputs from call {calls[0]} on, so what follows cannot "
                "be judged; record both on the same inputs"
            )
        if not coverage.complete or not reference_covered(self.b, self.alignment).all():
            return (
                f"no suspect among what could be compared ({coverage.compared} of {coverage.total} "
                "launches); the rest is not shown to match"
            )
        return (
            "no launch stands out, and the difference is larger than rounding is known to make; "
            "bl.check(candidate, ..., reference=...) decides"
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
        if final is not None and floor is not None:
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


def b_prints(b: Side, operands: np.ndarray) -> np.ndarray:
    """Return which of the reference's operands have a fingerprint."""
    found: np.ndarray = b.print[operands] >= 0
    return found


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
    """Return what the recorder says it could not observe."""
    found = recording_facts(run).get("unobserved")
    if isinstance(found, dict):
        return [f"{count} {what}" for what, count in found.items() if count]
    if isinstance(found, list):
        return [str(each) for each in found]
    return [f"{found} tensors unobserved"] if found else []


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
