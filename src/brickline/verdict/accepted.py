"""Accepted differences: which bricks may differ, why, and by how much at most.

::

    [[accept]]
    brick = "layers.*.mlp"                       # dotted name; * is one part of it, ** any number
    reason = "tanh-GELU instead of erf-GELU"     # for whoever reads the report
    relative_l2 = 1e-3                           # of its own error; beyond it, it fails again

An accepted finding stays in the report. One that grows beyond its size fails, an entry that nothing
needs warns, and a file that cannot be understood is an exception: a typo would otherwise be a
difference that nobody looks at. Knows reports only; how they come about is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from brickline.verdict.accepted_entries import (
    ACCEPTABLE,
    NEEDS_ENTRY,
    Accepted,
    Given,
    key_of,
    load_accepted,
    parse_accepted,
    size_of,
)
from brickline.verdict.accepted_proposal import propose_accept, write_accept
from brickline.verdict.verdicts import (
    CLEAN,
    GUILTY,
    DivergenceReport,
    Finding,
    Status,
    Verdict,
    VerdictRow,
    VerdictTable,
)

__all__ = [
    "Accepted",
    "apply_accepted",
    "load_accepted",
    "parse_accepted",
    "propose_accept",
    "unused_entries",
    "write_accept",
]


def apply_accepted(
    report: DivergenceReport,
    accepted: Given | None,
    *,
    judge: Callable[[DivergenceReport], Status] | None = None,
) -> DivergenceReport:
    """Return the report with the accepted differences marked, and its status said anew.

    Args:
        report: What a check or a comparison found.
        accepted: Entries, or what `load_accepted` takes.
        judge: Says the status of a report in which nothing is guilty any more. By default it is
            matched only if coverage is complete, nothing is unmatched and every verdict is clean.

    Raises:
        AcceptError: if the entries cannot be understood.
    """
    entries = load_accepted(accepted)
    if not entries:
        return report
    marked = [_mark(finding, report.verdicts, entries) for finding in report.findings]
    order = {True: 0, False: 2}
    ranked = sorted(
        marked, key=lambda each: 1 if each.verdict is Verdict.ACCEPTED else order[_guilty(each)]
    )
    notes = (*report.coverage.notes, *unused_entries(report, entries))
    out = replace(
        report,
        findings=tuple(ranked),
        verdicts=_mark_rows(report.verdicts, entries, marked),
        coverage=replace(report.coverage, notes=notes),
        whys=(*report.whys, *_grown(ranked)),
    )
    return _say_again(report, out, judge or _judge)


def unused_entries(report: DivergenceReport, accepted: Given | None) -> tuple[str, ...]:
    """Return a warning for each entry that covers no difference, before or after it is applied."""
    found: list[tuple[str | None, ...]] = [
        (each.name, each.brick)
        for each in (*report.findings, *report.verdicts)
        if each.verdict in NEEDS_ENTRY
    ]
    seen = {each.name for each in (*report.findings, *report.verdicts)}
    warnings = []
    for entry in load_accepted(accepted):
        if any(entry.covers(name) for names in found for name in names):
            continue
        if any(entry.covers(name) for name in seen):
            why = "the bricks it names do not differ any more; take the entry out"
        else:
            close = get_close_matches(entry.brick, sorted(seen), n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else "take the entry out, or correct it"
            why = f"no brick has such a name; {hint}"
        warnings.append(f"unused accepted difference {entry.brick!r} ({entry.source}): {why}")
    return tuple(warnings)


def _guilty(each: Finding | VerdictRow) -> bool:
    return each.verdict in GUILTY


def _entry_for(each: Finding | VerdictRow, entries: Sequence[Accepted]) -> Accepted | None:
    """Return the entry with the largest size among those that cover it."""
    fitting = [entry for entry in entries if entry.covers(each.name) or entry.covers(each.brick)]
    return max(fitting, key=lambda entry: entry.relative_l2, default=None)


def _place(each: Finding | VerdictRow) -> tuple[Any, ...]:
    return (*key_of(each), each.position, each.ordinal)


def _mark(finding: Finding, rows: VerdictTable, entries: Sequence[Accepted]) -> Finding:
    entry = _entry_for(finding, entries)
    if entry is None or finding.verdict not in NEEDS_ENTRY - {Verdict.ACCEPTED}:
        return finding
    sizes = [size_of(finding)]
    # The finding tells of the first call in which it acts; it may grow in a later one.
    same = [row for row in rows if key_of(row) == key_of(finding) and row.verdict in ACCEPTABLE]
    sizes += [size for size in map(size_of, same) if size is not None]
    limits = {**finding.evidence, "accepted_relative_l2": entry.relative_l2}
    refusal = _refusal(finding, sizes, entry)
    if refusal is None:
        return replace(
            finding, verdict=Verdict.ACCEPTED, reason=entry.reason.strip(), evidence=limits
        )
    before = f"{finding.reason}; " if finding.reason else ""
    return replace(finding, reason=before + refusal, evidence=limits)


def _refusal(finding: Finding, sizes: Sequence[float | None], entry: Accepted) -> str | None:
    """Return why an entry does not cover a finding of these sizes; None where it does."""
    where = f"{entry.source}: {entry.reason.strip()}"
    if finding.verdict is Verdict.NONFINITE_ORIGIN:
        return f"not accepted: values that are not finite have no size ({where})"
    known = [size for size in sizes if size is not None]
    if not known:
        return f"not accepted: its error was not measured ({where})"
    largest = max(known, key=lambda size: math.inf if math.isnan(size) else size)
    if largest <= entry.relative_l2:
        return None
    return (
        f"grew beyond what is accepted: relative L2 {largest:.3g}, "
        f"accepted up to {entry.relative_l2:.3g} ({where})"
    )


def _mark_rows(
    rows: VerdictTable, entries: Sequence[Accepted], findings: Sequence[Finding]
) -> VerdictTable:
    failed = {key_of(each) for each in findings if _guilty(each)}
    own = {_place(each) for each in findings if each.verdict is Verdict.ACCEPTED}
    verdicts = []
    for row in rows:
        entry = _entry_for(row, entries) if row.verdict in ACCEPTABLE else None
        size = size_of(row)
        fits = entry is not None and (
            _place(row) in own if size is None else size <= entry.relative_l2
        )
        verdicts.append(Verdict.ACCEPTED if fits and key_of(row) not in failed else row.verdict)
    return VerdictTable({**rows.columns, "verdict": verdicts})


def _grown(findings: Sequence[Finding]) -> list[str]:
    return [
        f"{each.name} {each.reason}"
        for each in findings
        if _guilty(each) and "accepted_relative_l2" in each.evidence
    ]


def _judge(report: DivergenceReport) -> Status:
    clean = all(each.verdict in CLEAN for each in (*report.findings, *report.verdicts))
    shown = clean and report.coverage.complete and not report.unmatched
    return Status.MATCHED if shown else Status.INCONCLUSIVE


def _say_again(
    before: DivergenceReport,
    after: DivergenceReport,
    judge: Callable[[DivergenceReport], Status],
) -> DivergenceReport:
    """Return the report with a status, a headline and a first kernel that fit its findings."""
    newly = [each for each in after.findings if each.verdict is Verdict.ACCEPTED]
    changed = after.verdicts.columns != before.verdicts.columns or any(
        each not in before.findings for each in newly
    )
    if not changed:
        return after
    top = next((each for each in after.findings if _guilty(each)), None)
    if top is None and not any(_guilty(row) for row in after.verdicts):
        status = before.status if before.status is Status.MATCHED else judge(after)
        headline = _headline_of_accepted(newly, status)
        return replace(
            after,
            status=status,
            headline=headline,
            diagnosis=headline,
            next_command=None,
            first_divergent_kernel=None,
            expected_trace=None,
            actual_trace=None,
        )
    first = next((each for each in before.findings if _guilty(each)), None)
    if top is None or first is None or top.name == first.name:
        return replace(after, status=Status.DIVERGED)
    return replace(after, status=Status.DIVERGED, headline=_headline_of_guilty(top, newly))


def _headline_of_accepted(accepted: Sequence[Finding], status: Status) -> str:
    differences = f"{len(accepted)} accepted difference{'s' * (len(accepted) != 1)}"
    largest = max((size for size in map(size_of, accepted) if size is not None), default=None)
    size = "" if largest is None else f" (largest relative L2 {largest:.2g})"
    rest = "nothing else differs" if status is Status.MATCHED else "the rest was not shown to match"
    return f"{differences}{size}; {rest}"


def _headline_of_guilty(top: Finding, accepted: Sequence[Finding]) -> str:
    word = "the culprit" if top.verdict is not Verdict.SUSPECT else "the suspect"
    about = ": ".join(part for part in (top.cause, top.where) if part)
    more = f"; {len(accepted)} other accepted" if accepted else ""
    return f"{top.name} is {word}{f' - {about}' if about else ''}{more}"
