"""From what a session measured to a `DivergenceReport`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from brickline.checking.facts import Fact
from brickline.checking.session import Position, Session
from brickline.checking.stage import layer_of
from brickline.verdicts import (
    Coverage,
    DivergenceReport,
    Finding,
    Status,
    Verdict,
    VerdictRow,
    VerdictTable,
)


def report_of(session: Session, failure: BaseException | None = None) -> DivergenceReport:
    """Write the report of a session, also of one that ended early."""
    findings = _findings(session)
    table = _table(session)
    coverage = _coverage(session, failure)
    guilty = [each for each in findings if each.verdict is Verdict.CULPRIT]
    if guilty:
        status = Status.DIVERGED
    elif failure is None and coverage.complete:
        status = Status.MATCHED
    else:
        status = Status.INCONCLUSIVE
    return DivergenceReport(
        status=status,
        candidate=session.candidate.stage.name,
        reference=session.reference.stage.name,
        findings=tuple(findings),
        verdicts=table,
        coverage=coverage,
        kernels_compared=len(table),
    )


def _findings(session: Session) -> list[Finding]:
    groups: dict[str, list[tuple[Position, Fact]]] = defaultdict(list)
    for position in session.positions:
        for fact in position.culprits:
            groups[fact.modules[0]].append((position, fact))
    findings = [_finding(session, path, facts) for path, facts in groups.items()]
    return sorted(findings, key=lambda each: -(each.share or 0.0))


def _finding(session: Session, path: str, facts: list[tuple[Position, Fact]]) -> Finding:
    position, first = facts[0]
    here = [fact for each, fact in facts if each is position]
    worst = max(here, key=lambda each: each.ratios.z)
    shares = position.shares
    return Finding(
        name=session.candidate.stage.display(path),
        verdict=Verdict.CULPRIT,
        layer_idx=layer_of(path),
        position=position.number,
        ordinal=first.key.call,
        op=first.key.op,
        z=worst.ratios.z,
        local_error=worst.ratios.relative_l2,
        share=None if shares is None else shares.share(path),
        reference_name=session.reference.stage.display(first.reference_key.path),
    )


def _table(session: Session) -> VerdictTable:
    table = VerdictTable()
    for position in session.positions:
        for fact in position.facts:
            table.append(
                VerdictRow(
                    session.candidate.stage.display(fact.key.path),
                    session.reference.stage.display(fact.reference_key.path),
                    layer_of(fact.key.path),
                    position.number,
                    fact.key.call,
                    "forward",
                    None,
                    fact.key.op,
                    fact.verdict,
                    fact.ratios.z,
                    fact.ratios.relative_l2,
                    None,
                )
            )
    return table


def _coverage(session: Session, failure: BaseException | None) -> Coverage:
    notes: list[str] = []
    for position in session.positions:
        if position.problem:
            notes.append(f"call {position.number}: {position.problem}")
    if failure is not None:
        notes.append(f"the run ended early: {type(failure).__name__}: {failure}")
    total = sum(each.values for each in session.positions)
    compared = sum(each.values for each in session.positions if each.facts)
    return Coverage(compared, total, tuple(notes))


def _unused(_: Any) -> None: ...
