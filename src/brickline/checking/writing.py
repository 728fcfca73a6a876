"""From what a session measured to a `DivergenceReport`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from brickline.adapters.torch_sites import brick_of
from brickline.checking.arbitration import SOMEWHERE
from brickline.checking.backward_writing import (
    backward_findings,
    backward_notes,
    backward_rows,
)
from brickline.checking.endings import ending
from brickline.checking.examining import Position
from brickline.checking.facts import CULPRIT_LIMIT, Fact
from brickline.checking.forcing import STARVED, is_starved
from brickline.checking.logic.writing import DIFFERENT, logic_findings, logic_line
from brickline.checking.session import Session
from brickline.checking.stage import INPUT, layer_of
from brickline.checking.state.tensors import plain_name
from brickline.verdicts import (
    GUILTY,
    Coverage,
    DivergenceReport,
    Finding,
    Status,
    Verdict,
    VerdictRow,
    VerdictTable,
)

LOGIC = "logic: "
"""How the line begins that says whether both sides compute the same function."""
WATCHED = 5
"""How many values above the clean limit are listed as findings."""


def report_of(session: Session, failure: BaseException | None = None) -> DivergenceReport:
    """Write the report of a session, also of one that ended early."""
    writer = _Writer(session)
    findings = writer.findings()
    table = writer.table()
    coverage = writer.coverage(failure)
    shares = next((each.shares for each in session.positions if each.culprits), None)
    if shares is None:
        shares = next((each.shares for each in session.positions if each.shares), None)
    report = DivergenceReport(
        status=_status(findings, coverage, failure),
        candidate=session.candidate.stage.name,
        reference=session.reference.stage.name,
        findings=tuple(findings),
        verdicts=table,
        coverage=coverage,
        noise_floor=None if shares is None else shares.floor,
        final_error=None if shares is None else shares.final,
        kernels_compared=len(table),
        circumstances=session.said(),
    )
    return worded(report, logic_line(session.positions))


def _status(findings: list[Finding], coverage: Coverage, failure: BaseException | None) -> Status:
    if any(each.verdict in GUILTY for each in findings):
        return Status.DIVERGED
    if any(each.verdict is Verdict.UNKNOWN for each in findings):
        return Status.INCONCLUSIVE
    return Status.MATCHED if failure is None and coverage.complete else Status.INCONCLUSIVE


class _Writer:
    def __init__(self, session: Session) -> None:
        self.session = session
        self._bricks: dict[str, str | None] = {}

    def brick(self, path: str) -> str | None:
        """Return the brick that a module is."""
        if path not in self._bricks:
            module = self.session.candidate.stage.modules.get(path)
            found: Any = None
            if isinstance(module, torch.nn.Module):
                found = brick_of(path, module, {})
            self._bricks[path] = None if found is None else str(found)
        return self._bricks[path]

    def findings(self) -> list[Finding]:
        """Return culprits by their share, then what is worth watching."""
        groups: dict[str, list[tuple[Position, Fact]]] = defaultdict(list)
        watched: list[tuple[Position, Fact]] = []
        for position in self.session.positions:
            for fact in position.culprits:
                groups[fact.modules[0]].append((position, fact))
            watched += [(position, each) for each in position.facts if each.verdict in _LISTED]
        guilty = [self._culprit(path, facts) for path, facts in groups.items()]
        guilty.sort(key=lambda each: (-(each.share or 0.0), each.position or 0))
        display = self.session.candidate.stage.display
        fed = logic_findings(self.session.positions, display, self.brick)
        guilty = self._with_parts(guilty, fed)
        guilty += backward_findings(self.session.backward, self.brick)
        if not guilty:
            guilty = fed
        watched.sort(key=lambda each: -each[1].ratios.z)
        return guilty + [self._watched(*each) for each in watched[:WATCHED]]

    def _with_parts(self, guilty: list[Finding], fed: list[Finding]) -> list[Finding]:
        """Return culprits with the parts named that compute something else, in place of a whole."""
        stage = self.session.candidate.stage
        paths = {stage.display(path): plain_name(path) for path in stage.modules}
        paths |= {stage.display(path): path for path in paths.values()}
        known = {each.name for each in guilty}
        kept = list(guilty)
        for part in fed if guilty else ():
            path = paths.get(part.name)
            if part.verdict is not Verdict.CULPRIT or part.name in known or path is None:
                continue
            around = [each for each in kept if _encloses(paths.get(each.name), path)]
            kept = [each for each in kept if each not in around]
            kept.insert(0 if around else len(kept), part)
        return kept

    def _culprit(self, path: str, facts: list[tuple[Position, Fact]]) -> Finding:
        position, first = facts[0]
        here = [fact for each, fact in facts if each is position]
        worst = max(here, key=lambda each: each.ratios.z)
        origin = any(each.ratios.nonfinite for each in here)
        shares = position.shares
        stage = self.session.candidate.stage
        return Finding(
            name=stage.display(path),
            verdict=Verdict.NONFINITE_ORIGIN if origin else Verdict.CULPRIT,
            layer_idx=layer_of(path),
            position=self.session.first_act(path, position.number),
            ordinal=first.key.call if first.key.path == path else 0,
            brick=self.brick(path),
            op=_op(first),
            z=worst.ratios.z,
            local_error=worst.ratios.relative_l2,
            propagated_error=position.propagated.get(worst.key),
            share=None if shares is None else shares.share(path),
            reference_name=self.session.reference.stage.display(first.reference_key.path),
            evidence={
                **worst.ratios.evidence,
                "dtype": str(worst.dtype).removeprefix("torch."),
                "shape": list(worst.shape),
                "values_wrong": len(here),
                "positions_wrong": len({each.number for each, _ in facts}),
                "repaired_to": None if shares is None else shares.repaired.get(path),
                "alternatives": [stage.display(each) for each in worst.modules[1:]],
                "as_likely": [stage.display(each) for each in worst.notes.get("equals", ())],
            },
        )

    def _watched(self, position: Position, fact: Fact) -> Finding:
        path = fact.modules[0] if fact.modules else fact.key.path
        return Finding(
            name=self.session.candidate.stage.display(path),
            verdict=fact.verdict,
            layer_idx=layer_of(path),
            position=position.number,
            ordinal=fact.key.call,
            brick=self.brick(path),
            op=_op(fact),
            z=None if is_starved(fact) else fact.ratios.z,
            local_error=None if is_starved(fact) else fact.ratios.relative_l2,
            reason=fact.notes.get("reason") or _reason_of(fact),
        )

    def table(self) -> VerdictTable:
        """Return a row for every pair, in order of execution."""
        table = VerdictTable()
        stage, other = self.session.candidate.stage, self.session.reference.stage
        for position in self.session.positions:
            for fact in position.facts:
                path = fact.modules[0] if fact.verdict in GUILTY else fact.key.path
                table.append(
                    VerdictRow(
                        stage.display(path),
                        other.display(fact.reference_key.path),
                        layer_of(path),
                        position.number,
                        fact.key.call,
                        "forward",
                        self.brick(path),
                        fact.key.op,
                        _row_verdict(fact, position.propagated),
                        None if is_starved(fact) else fact.ratios.z,
                        None if is_starved(fact) else fact.ratios.relative_l2,
                        position.propagated.get(fact.key),
                    )
                )
        for row in backward_rows(self.session.backward, self.brick):
            table.append(row)
        return table

    def coverage(self, failure: BaseException | None) -> Coverage:
        """Return how much was seen, and what was not."""
        notes: list[str] = []
        positions = self.session.positions
        if failure is not None:
            notes.append(ending(failure))
        for position in positions:
            notes += position.unshown
            if position.problem:
                notes.append(f"call {position.number}: {position.problem}")
        if not positions and failure is None:
            notes.append("the candidate was never called; call it in drive=, or give arguments")
        if self.session.unobserved:
            notes.append(
                f"{self.session.unobserved} calls were not looked at, because that of another "
                "thread did not end"
            )
        unstable = sum(each.unstable for each in positions)
        if unstable:
            notes.append(f"{unstable} values are not the same when the candidate runs again")
        if any(not each.facts and not each.problem for each in positions):
            notes.append(
                "of some calls nothing could be compared: no tensors, empty ones, or nothing in "
                "common"
            )
        unseen = backward_notes(self.session.backward)
        notes += unseen
        # Gradients that nobody held against anything leave something to be shown.
        total = sum(each.values for each in positions) + len(unseen) + self.session.unobserved
        compared = sum(each.values for each in positions if each.ends_compared and not each.problem)
        # Of a call that raised, what was made until then.
        for each in positions:
            if each.problem and each.facts:
                compared += min(len(each.facts), each.values - 1)
        starved = [fact for each in positions for fact in each.facts if is_starved(fact)]
        if starved:
            notes.append(self._starved_note(starved))
            compared = max(0, compared - len(starved))
        return Coverage(compared, total, tuple(dict.fromkeys(notes)))

    def _starved_note(self, facts: list[Fact]) -> str:
        stage = self.session.candidate.stage
        names = list(dict.fromkeys(stage.display(each.key.path) for each in facts))
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        count = "1 value was" if len(facts) == 1 else f"{len(facts)} values were"
        return f"{count} not held: {STARVED}, in {shown}; check fewer tokens or a smaller batch"


COARSER = (
    "it rounds more than the reference does: each of its operations is within its own bound, "
    "and in float64 it computes the same"
)
_LISTED = frozenset({Verdict.WATCH, Verdict.NONDETERMINISTIC, Verdict.UNKNOWN})
_REASONS: Mapping[Verdict, str] = {
    Verdict.WATCH: "more than the clean limit, less than twice it",
    Verdict.NONDETERMINISTIC: "two executions of the candidate differ by as much",
    Verdict.UNKNOWN: "several modules had a hand in it and none stands out",
}


def _reason_of(fact: Fact) -> str | None:
    """Return why a value is listed: what was excused although it is beyond the limit says so."""
    if fact.verdict is Verdict.WATCH and fact.ratios.z > CULPRIT_LIMIT:
        return COARSER
    return _REASONS.get(fact.verdict)


def _encloses(path: str | None, inner: str) -> bool:
    """Return whether one module lies inside another, by their paths."""
    return path is not None and path != inner and (not path or inner.startswith(f"{path}."))


def _op(fact: Fact) -> str:
    return "what it is called with" if fact.key.op == INPUT else fact.key.op


def _row_verdict(fact: Fact, propagated: Mapping[Any, float]) -> Verdict:
    """Tell an error that came with the inputs from none at all."""
    if fact.verdict not in (Verdict.IDENTICAL, Verdict.ROUNDING):
        return fact.verdict
    came = propagated.get(fact.key)
    if came is None or not fact.dtype.is_floating_point:
        return fact.verdict
    unit = torch.finfo(fact.dtype).eps
    return Verdict.PROPAGATED if came > 100 * unit and came > 1e-5 else fact.verdict


def worded(report: DivergenceReport, logic: str | None = None) -> DivergenceReport:
    """Return the report with its headline and the chain of whys.

    Args:
        report: Findings and figures.
        logic: What float64 says of the outputs. Default None: what the report says of it already.
    """
    told = (each for each in report.whys if each.startswith(LOGIC))
    logic = next(told, None) if logic is None else f"{LOGIC}{logic}"
    report = _worded(report)
    return report if logic is None else replace(report, whys=(*report.whys, logic))


def _worded(report: DivergenceReport) -> DivergenceReport:
    guilty = [each for each in report.findings if each.verdict in GUILTY]
    if guilty:
        return replace(report, headline=_guilty_line(guilty), whys=_whys(report, guilty[0]))
    if report.status is Status.MATCHED:
        return replace(report, headline=_matched_line(report), whys=_matched_whys(report))
    return replace(report, headline=_open_line(report))


def _guilty_line(guilty: list[Finding]) -> str:
    top = guilty[0]
    when = f" from call {top.position} on" if top.position else ""
    what = f": {top.cause}" if top.cause else ""
    share = ""
    if top.share is not None and top.share > 0.005:
        of = "gradients' " if top.direction == "backward" else "final "
        share = f"; repairing it removes {_percent(top.share)} of the {of}difference"
    more = f" ({len(guilty) - 1} more)" if len(guilty) > 1 else ""
    backward = " in its backward pass" if top.direction == "backward" else ""
    others = top.evidence.get("as_likely") or ()
    either = f", or {others[0]} is: nothing tells them apart" if others else ""
    return f"{top.name} is wrong{backward}{when}{either}{what}{share}{more}"


def _percent(share: float) -> str:
    return "more than 99.9 %" if share > 0.999 else f"{100 * share:.1f} %"


def _whys(report: DivergenceReport, top: Finding) -> tuple[str, ...]:
    lines: list[str] = []
    if report.final_error is not None:
        floor = report.noise_floor
        lines.append(
            f"the output of call {top.position} differs by {report.final_error:.2g} "
            "(relative L2)" + ("" if floor is None else f"; rounding alone makes {floor:.2g}")
        )
    if top.z is not None and top.local_error is not None:
        held = top.reference_name or "float64"
        lines.append(
            f"on its own inputs {top.name} is {top.local_error:.2g} away from {held} in float64: "
            f"z {top.z:.3g}, where 1 is the most that rounding makes"
        )
    counts = report.verdicts.counts()
    clean = sum(counts.get(each, 0) for each in ("identical", "rounding", "propagated"))
    if clean:
        lines.append(f"{clean} of {len(report.verdicts)} values are right on their own inputs")
    left = top.evidence.get("repaired_to")
    if top.share is not None and left is not None:
        what = "the gradients differ" if top.direction == "backward" else "the output differs"
        lines.append(f"with its value repaired {what} by {left:.2g}")
    if top.where:
        lines.append(f"where: {top.where}")
    return tuple(lines)


def _matched_line(report: DivergenceReport) -> str:
    counts = report.verdicts.counts()
    same = counts.get("identical", 0)
    return (
        f"all {len(report.verdicts)} values are identical or within rounding "
        f"({same} bit for bit the reference's)"
    )


def _matched_whys(report: DivergenceReport) -> tuple[str, ...]:
    worst = max(report.verdicts, key=lambda each: each.z or 0.0, default=None)
    lines = []
    if worst is not None and worst.z:
        lines.append(f"the largest z is {worst.z:.2g}, at {worst.name}; 1 is the clean limit")
        if worst.z > CULPRIT_LIMIT:
            lines.append(COARSER)
    if report.final_error is not None and report.noise_floor is not None:
        lines.append(
            f"the first output differs by {report.final_error:.2g}; rounding makes "
            f"{report.noise_floor:.2g}"
        )
    return tuple(lines)


def _open_line(report: DivergenceReport) -> str:
    for each in report.findings:
        if each.reason and each.reason.startswith(DIFFERENT):
            return each.reason
        if each.verdict is Verdict.UNKNOWN and each.reason != STARVED:
            if each.reason and each.reason.startswith(SOMEWHERE):
                return each.reason
            return f"{SOMEWHERE} at or before {each.name}; no single module stands out"
    if report.coverage.notes:
        return f"not shown either way: {report.coverage.notes[0]}"
    return "not shown either way: nothing could be compared"
