"""From what was measured of gradients to findings and rows of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from brickline.checking.backward import BackwardFact, BackwardWatch
from brickline.checking.backward_evidence import Accusation
from brickline.checking.stage import layer_of
from brickline.verdict import Finding, Verdict, VerdictRow

Brick = Callable[[str], str | None]


def backward_findings(watch: BackwardWatch, brick: Brick) -> list[Finding]:
    """Return the modules whose gradients are wrong, by their share, then by their error."""
    groups: defaultdict[str, list[BackwardFact]] = defaultdict(list)
    for fact in watch.culprits():
        groups[fact.path].append(fact)
    findings = [_finding(watch, path, facts, brick) for path, facts in groups.items()]
    return sorted(
        findings,
        key=lambda each: (each.position or 0, -(each.share or 0.0), -(each.local_error or 0.0)),
    )


def _finding(watch: BackwardWatch, path: str, facts: list[BackwardFact], brick: Brick) -> Finding:
    first = min(facts, key=lambda each: (each.position, each.call))
    here = [each for each in facts if each.position == first.position]
    worst = max(here, key=lambda each: each.ratios.z)
    origin = any(each.ratios.nonfinite for each in here)
    known = watch.accusations.get(path, Accusation())
    return Finding(
        name=watch.candidate.stage.display(path),
        verdict=Verdict.NONFINITE_ORIGIN if origin else Verdict.CULPRIT,
        layer_idx=layer_of(path),
        position=first.position,
        ordinal=first.call,
        brick=brick(path),
        op=f"gradient of {worst.what}" if not worst.what.startswith("gradient") else worst.what,
        direction="backward",
        z=worst.ratios.z,
        local_error=worst.ratios.relative_l2,
        reference_name=watch.reference.stage.display(worst.reference_path),
        share=known.share,
        reason=known.reason,
        evidence={
            **worst.ratios.evidence,
            "gradients_wrong": sorted({each.what for each in here}),
            "repaired_to": known.left,
        },
    )


def backward_rows(watch: BackwardWatch, brick: Brick) -> list[VerdictRow]:
    """Return a row for every gradient that was compared."""
    return [
        VerdictRow(
            watch.candidate.stage.display(fact.path),
            watch.reference.stage.display(fact.reference_path),
            layer_of(fact.path),
            fact.position,
            fact.call,
            "backward",
            brick(fact.path),
            fact.what,
            fact.verdict,
            fact.ratios.z,
            fact.ratios.relative_l2,
            None,
        )
        for fact in watch.rows()
    ]


def backward_notes(watch: BackwardWatch) -> list[str]:
    """Return what was not judged, and why."""
    return [
        f"the gradients of {count} module calls were not judged: {why}"
        for why, count in watch.notes.most_common()
    ]
