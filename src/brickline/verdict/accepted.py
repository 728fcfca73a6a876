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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from brickline.verdict.accepted_entries import (
    ACCEPTABLE,
    NEEDS_ENTRY,
    Accepted,
    Given,
    key_of,
    keys_of,
    load_accepted,
    size_of,
)
from brickline.verdict.answer import Answer
from brickline.verdict.finding import Finding
from brickline.verdict.report import DivergenceReport
from brickline.verdict.table import VerdictRow, VerdictTable
from brickline.verdict.verdicts import GUILTY, Verdict


def apply_accepted(report: DivergenceReport, accepted: Given | None) -> DivergenceReport:
    """Return the report with the accepted differences marked; its status follows from the rest.

    Args:
        report: What a check or a comparison found.
        accepted: Entries, or what `load_accepted` takes.

    Raises:
        AcceptError: if the entries cannot be understood.
    """
    entries = load_accepted(accepted)
    if not entries:
        return report
    marked = [_mark(finding, report.verdicts, entries) for finding in report.findings]
    rows = _mark_rows(report.verdicts, entries, marked)
    findings = sorted((*marked, *_unnamed(rows, marked)), key=_rank)
    out = replace(
        report,
        findings=tuple(findings),
        verdicts=rows,
        coverage=replace(
            report.coverage, notes=(*report.coverage.notes, *unused_entries(report, entries))
        ),
        whys=(*report.whys, *_grown(findings)),
    )
    if out.guilty or not out.accepted:
        return out
    changes: dict[str, Any] = {
        question: _excused(answer) for question, answer in out.answers.items()
    }
    changes |= dict.fromkeys(
        ("next_command", "first_divergent_kernel", "expected_trace", "actual_trace")
    )
    return replace(out, diagnosis="", **changes)


def _rank(finding: Finding) -> int:
    if finding.is_guilty:
        return 0
    return 1 if finding.verdict is Verdict.ACCEPTED else 2


def _unnamed(rows: VerdictTable, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Give a finding for each op with a guilty row that no guilty finding is about."""
    named = _keys(finding for finding in findings if finding.is_guilty)
    for row in rows:
        if row.verdict in GUILTY and key_of(row) not in named:
            named.add(key_of(row))
            yield Finding(**row._asdict())


def _excused(answer: Answer) -> Answer:
    """Return an answer whose figure may be as large as accepted differences make it."""
    if not answer.exceeds:
        return answer
    note = "; ".join(filter(None, (answer.note, "larger by accepted differences")))
    return replace(answer, limit=None, note=note)


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


def _entry_for(each: Finding | VerdictRow, entries: Sequence[Accepted]) -> Accepted | None:
    """Return the entry with the largest size among those that cover it."""
    fitting = [entry for entry in entries if entry.covers(each.name) or entry.covers(each.brick)]
    return max(fitting, key=lambda entry: entry.relative_l2, default=None)


def _keys(findings: Iterable[Finding]) -> set[tuple[Any, ...]]:
    return {key for finding in findings for key in keys_of(finding)}


def _mark(finding: Finding, rows: VerdictTable, entries: Sequence[Accepted]) -> Finding:
    entry = _entry_for(finding, entries)
    if entry is None or finding.verdict not in NEEDS_ENTRY - {Verdict.ACCEPTED}:
        return finding
    sizes, keys = [size_of(finding)], keys_of(finding)
    # The finding tells of the first call in which it acts; it may grow in a later one.
    same = [row for row in rows if key_of(row) in keys and row.verdict in ACCEPTABLE]
    sizes += [size for size in map(size_of, same) if size is not None]
    limits = {**finding.evidence, "accepted_relative_l2": entry.relative_l2}
    refusal = _uncovered(finding, entries) or _refusal(finding, sizes, entry)
    if refusal is None:
        return replace(
            finding, verdict=Verdict.ACCEPTED, reason=entry.reason.strip(), evidence=limits
        )
    before = f"{finding.reason}; " if finding.reason else ""
    return replace(finding, reason=before + refusal, evidence=limits)


def _uncovered(finding: Finding, entries: Sequence[Accepted]) -> str | None:
    """Return why entries do not cover a finding that is about several modules."""
    for name in finding.names[1:]:
        if not any(entry.covers(name) for entry in entries):
            return f"not accepted: it is about {name} as well, which no entry covers"
    return None


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
    failed = _keys(finding for finding in findings if finding.is_guilty)
    own = {
        (*key, finding.position, finding.ordinal)
        for finding in findings
        if finding.verdict is Verdict.ACCEPTED
        for key in keys_of(finding)
    }
    verdicts = []
    for row in rows:
        entry = _entry_for(row, entries) if row.verdict in ACCEPTABLE else None
        size = size_of(row)
        place = (*key_of(row), row.position, row.ordinal)
        fits = entry is not None and (place in own if size is None else size <= entry.relative_l2)
        verdicts.append(Verdict.ACCEPTED if fits and key_of(row) not in failed else row.verdict)
    return VerdictTable({**rows.columns, "verdict": verdicts})


def _grown(findings: Sequence[Finding]) -> list[str]:
    return [
        f"{each.name} {each.reason}"
        for each in findings
        if each.is_guilty and "accepted_relative_l2" in each.evidence
    ]
