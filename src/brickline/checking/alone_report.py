"""From what a `Watch` has seen to a `DivergenceReport`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from brickline.checking.causes import explain
from brickline.checking.endings import ending
from brickline.checking.repro import write_repro
from brickline.checking.stage import layer_of
from brickline.checking.watching import Seen, Watch
from brickline.oracle.holding import CULPRIT
from brickline.verdict import (
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

REFERENCE = "its own float64"
STATE = Answer.not_asked("there is no reference whose weights these could be")
LOGIC = Answer.not_asked("model logic (eps, RoPE, masks, weights) needs a reference=")
UNHARMED = "they reach no output"
NO_SHARE = "share: without a reference there is no final difference to explain"


def report_of(
    watch: Watch, nonfinite: set[int], failure: BaseException | None, repro: Any = None
) -> DivergenceReport:
    """Write the report, also of a run that ended early.

    Args:
        watch: What was seen.
        nonfinite: Positions whose output is not finite.
        failure: What ended the run, if anything did.
        repro: Directory for scripts that show culprits alone.
    """
    seen = _consequences([_settled(each, nonfinite) for each in watch.seen])
    findings = _findings(watch, seen, repro)
    coverage = _coverage(watch, seen, failure)
    allowed = dict.fromkeys(each.held.allowed for each in watch.seen if each.held.allowed)
    table = _table(watch, seen)
    report = DivergenceReport(
        candidate=watch.stage.name,
        reference=REFERENCE,
        findings=tuple(findings),
        state=STATE,
        logic=LOGIC,
        arithmetic=arithmetic_answer(table, CULPRIT, UNHARMED),
        verdicts=table,
        coverage=coverage,
        unshown=() if failure is None else (f"not shown either way: {ending(failure)}",),
        circumstances=tuple(str(each) for each in allowed),
        kernels_compared=coverage.compared,
    )
    return replace(report, whys=tuple(evidence_lines(report)))


def _settled(seen: Seen, nonfinite: set[int]) -> tuple[Seen, Verdict]:
    """An infinity or NaN that reaches no output may be meant: it is watched."""
    verdict = seen.held.verdict
    if verdict is not Verdict.NONFINITE_ORIGIN or seen.place.position in nonfinite:
        return seen, verdict
    wrong = seen.held.z is not None and math.isinf(seen.held.z)
    backward = seen.place.direction == "backward"
    return seen, verdict if wrong or backward else Verdict.WATCH


def _consequences(seen: list[tuple[Seen, Verdict]]) -> list[tuple[Seen, Verdict]]:
    """Excuse a NaN made from an infinity where an earlier operation of the call made one."""
    made: set[tuple[int, str]] = set()
    settled: list[tuple[Seen, Verdict]] = []
    for each, verdict in seen:
        if verdict is Verdict.NONFINITE_ORIGIN:
            where = (each.place.position, each.place.direction)
            if not each.held.carried:
                made.add(where)
            elif where in made:
                verdict = Verdict.PROPAGATED
        settled.append((each, verdict))
    return settled


def _table(watch: Watch, seen: list[tuple[Seen, Verdict]]) -> VerdictTable:
    table = VerdictTable()
    for each, verdict in seen:
        ratios = each.held.ratios
        table.append(
            VerdictRow(
                name=watch.stage.display(each.place.path),
                reference_name=None,
                layer_idx=layer_of(each.place.path),
                position=each.place.position,
                ordinal=each.ordinal,
                direction=each.place.direction,
                brick=None,
                op=each.op,
                verdict=verdict,
                z=each.held.z,
                local_error=ratios.relative_l2 if ratios is not None else None,
                propagated_error=None,
            )
        )
    return table


# --- Findings -------------------------------------------------------------------------------------


def _findings(watch: Watch, seen: list[tuple[Seen, Verdict]], repro: Any) -> list[Finding]:
    guilty = (Verdict.CULPRIT, Verdict.NONFINITE_ORIGIN, Verdict.NONDETERMINISTIC)
    groups: dict[tuple[str, str, str, Verdict], list[Seen]] = defaultdict(list)
    for each, verdict in seen:
        if verdict in guilty:
            key = (each.place.path, each.op, each.place.direction, verdict)
            groups[key].append(each)
    found = [_finding(watch, key[3], each, repro) for key, each in groups.items()]
    order = {Verdict.NONFINITE_ORIGIN: 0, Verdict.CULPRIT: 1, Verdict.NONDETERMINISTIC: 2}
    # Of values that are not finite the first is the origin; of errors the largest comes first.
    return sorted(
        found,
        key=lambda each: (
            order[each.verdict],
            each.position if each.verdict is Verdict.NONFINITE_ORIGIN else 0,
            0.0 if each.verdict is Verdict.NONFINITE_ORIGIN else -(each.local_error or 0.0),
        ),
    )


def _finding(watch: Watch, verdict: Verdict, seen: list[Seen], repro: Any) -> Finding:
    first = seen[0]
    worst = max(seen, key=lambda each: each.held.z or 0.0)
    ratios = worst.held.ratios
    evidence = next((each.evidence for each in seen if each.evidence is not None), None)
    cause, where, facts = None, None, {}
    if evidence is not None and verdict is Verdict.CULPRIT:
        explanation = explain(evidence)
        cause, where, facts = explanation.cause, explanation.where, dict(explanation.facts)
    if verdict is Verdict.NONFINITE_ORIGIN:
        cause = first.held.reason
    facts["operations"] = len(seen)
    if ratios is not None:
        facts |= {"element": ratios.element, "rmse": ratios.rmse, "bias": ratios.bias}
    path, reason = _repro(evidence, repro, worst.held.z)
    return Finding(
        name=watch.stage.display(first.place.path),
        verdict=verdict,
        layer_idx=layer_of(first.place.path),
        position=first.place.position,
        ordinal=first.ordinal,
        op=first.op,
        direction=first.place.direction,
        z=worst.held.z,
        local_error=ratios.relative_l2 if ratios is not None else None,
        where=where,
        cause=cause,
        repro=path,
        reference_name=REFERENCE,
        reason="; ".join(each for each in (first.held.reason, NO_SHARE, reason) if each),
        evidence=facts,
    )


def _repro(evidence: Any, directory: Any, z: float | None) -> tuple[str | None, str | None]:
    """Write a script that shows a culprit alone; return its path, or why there is none."""
    if evidence is None or directory is None or directory is False:
        return None, None
    made = write_repro(evidence, directory, z=z)
    return (None, f"repro: {made.reason}") if made.path is None else (str(made.path), None)


# --- Words ----------------------------------------------------------------------------------------


def _coverage(
    watch: Watch, seen: list[tuple[Seen, Verdict]], failure: BaseException | None
) -> Coverage:
    unknown = [each for each, verdict in seen if verdict is Verdict.UNKNOWN]
    opaque = sum(watch.tally.opaque.values())
    notes: list[str] = []
    if failure is not None:
        notes.append(ending(failure))
    reasons = Counter((each.op, each.held.reason or "no reason") for each in unknown)
    for (op, reason), count in reasons.most_common(12):
        notes.append(f"{op}: {reason} ({_times(count)})")
    if opaque:
        places = ", ".join(watch.tally.opaque)
        notes.append(
            f"{_count(opaque, 'tensor')} changed without an operation of PyTorch, by a kernel that "
            f"is launched past it, before {places} read it; give a reference= to check that kernel"
        )
    if watch.tally.random:
        names = ", ".join(sorted(watch.tally.random))
        notes.append(f"random by design, not held to anything: {names}")
    if watch.tally.compiled_backward:
        notes.append("the backward pass of a compiled region was not observed")
    if watch.stage.elsewhere:
        notes.append(
            f"{_count(watch.stage.elsewhere, 'call')} of modules on other threads, whose "
            "operations were not seen; give a reference= to check what comes out of them"
        )
    total = len(seen) + opaque + watch.stage.elsewhere + (1 if watch.tally.compiled_backward else 0)
    return Coverage(len(seen) - len(unknown), total, tuple(notes))


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"
