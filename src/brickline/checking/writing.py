"""From what a session measured to a `DivergenceReport`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

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
from brickline.checking.logic.writing import DIFFERENT, logic_answer, logic_findings
from brickline.checking.masks import IDLE
from brickline.checking.session import Session
from brickline.checking.stage import INPUT, layer_of
from brickline.verdict import (
    GUILTY,
    Answer,
    Coverage,
    DivergenceReport,
    Finding,
    Verdict,
    VerdictRow,
    VerdictTable,
    arithmetic_answer,
    evidence_lines,
)

WATCHED = 5
"""How many values above the clean limit are listed as findings."""
STATE = Answer.not_asked("no call of both sides was compared in float64")

Explain: TypeAlias = Callable[[tuple[Finding, ...]], tuple[Finding, ...]]


def report_of(
    session: Session, failure: BaseException | None, explain: Explain
) -> DivergenceReport:
    """Write the report of a session, also of one that ended early.

    Args:
        session: What was measured.
        failure: What ended the session, if anything did.
        explain: Adds causes and repros to findings.
    """
    writer = _Writer(session)
    findings, repair = _with_repair(explain(tuple(writer.findings())))
    table = writer.table()
    shares = next((each.shares for each in session.positions if each.culprits), None)
    if shares is None:
        shares = next((each.shares for each in session.positions if each.shares), None)
    circumstances = session.said()
    state = session.candidate.state
    if IDLE in circumstances and not any(finding.is_guilty for finding in findings):
        shares = None  # measured over queries that have no answer, too
    report = DivergenceReport(
        candidate=session.candidate.stage.name,
        reference=session.reference.stage.name,
        findings=findings,
        state=STATE if state is None else Answer(line=state.line),
        logic=logic_answer(session.positions),
        arithmetic=arithmetic_answer(table, CULPRIT_LIMIT, CLEARED),
        repair=repair,
        verdicts=table,
        coverage=writer.coverage(failure),
        unshown=(*_unshown(findings, failure), *_open_calls(session)),
        noise_floor=None if shares is None else shares.floor,
        final_error=None if shares is None else shares.final,
        kernels_compared=len(table),
        circumstances=circumstances,
    )
    return replace(report, whys=tuple(evidence_lines(report)))


def _with_repair(
    findings: Sequence[Finding],
) -> tuple[tuple[Finding, ...], Mapping[str, Any] | None]:
    """Take the repair of the first finding that has one out of its evidence: it is the report's."""
    made = list(findings)
    for number, finding in enumerate(findings):
        evidence = dict(finding.evidence)
        repair = evidence.pop("repair", None)
        if repair is not None:
            made[number] = replace(finding, evidence=evidence)
            return tuple(made), repair
    return tuple(made), None


def _unshown(findings: Iterable[Finding], failure: BaseException | None) -> Iterator[str]:
    """Give why nothing was shown, for differences that are nobody's and a run that ended early."""
    for finding in findings:
        reason = finding.reason or ""
        if reason.startswith((DIFFERENT, SOMEWHERE)):
            yield reason
        elif finding.verdict is Verdict.UNKNOWN and reason != STARVED:
            yield f"{SOMEWHERE} at or before {finding.name}; no single module stands out"
    if failure is not None:
        yield f"not shown either way: {ending(failure)}"


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
        if any(finding.verdict is Verdict.CULPRIT for finding in fed):
            guilty = self._with_figures(fed, guilty)
        guilty += backward_findings(self.session.backward, self.brick)
        if not guilty:
            guilty = fed
        watched.sort(key=lambda each: -each[1].ratios.z)
        return guilty + [self._watched(*each) for each in watched[:WATCHED]]

    def _with_figures(self, fed: list[Finding], measured: list[Finding]) -> list[Finding]:
        """Return those whose logic is wrong, with what was measured of them in their dtype."""
        known = {finding.name: finding for finding in measured}
        found: list[Finding] = []
        for finding in fed:
            other = known.get(finding.name)
            if other is None:
                found.append(finding)
                continue
            position = min(finding.position or 0, other.position or 0)
            found.append(
                replace(
                    other,
                    position=position,
                    cause=finding.cause,
                    reason=finding.reason,
                    source=finding.source,
                    alternatives=finding.alternatives,
                    members=finding.members,
                    share=other.share if finding.share is None else finding.share,
                    evidence={**other.evidence, **finding.evidence},
                )
            )
        return sorted(found, key=lambda finding: -(finding.share or 0.0))

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
            alternatives=tuple(stage.display(each) for each in worst.notes.get("equals", ())),
            reference_name=self.session.reference.stage.display(first.reference_key.path),
            evidence={
                **worst.ratios.evidence,
                "dtype": str(worst.dtype).removeprefix("torch."),
                "shape": list(worst.shape),
                "values_wrong": len(here),
                "positions_wrong": len({each.number for each, _ in facts}),
                "repaired_to": None if shares is None else shares.repaired.get(path),
                "other_modules": [stage.display(each) for each in worst.modules[1:]],
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
            if position.logic is not None and position.logic.unexplained is not None:
                notes.append(f"call {position.number}: {position.logic.unexplained}")
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
        if any(not (call.facts or call.problem or _differs(call)) for call in positions):
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
CLEARED = "cleared by the operations that made them, or by float64"
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


def _open_calls(session: Session) -> Iterator[str]:
    """Yield what keeps calls from having been compared in float64."""
    if any(call.logic is not None and call.logic.is_open for call in session.positions):
        yield f"not shown either way: {logic_answer(session.positions)}"


def _differs(call: Position) -> bool:
    """Return whether the outputs of a call were compared in float64 and differ."""
    return call.logic is not None and call.logic.differs


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
