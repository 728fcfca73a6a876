"""The facts of a comparison in sentences: its headline, and the chain from effect to cause.

The headline says who, what and how sure, in the same words for checks, runs, traces and the demo.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

from brickline.verdict.accepted_entries import size_of
from brickline.verdict.facts import Facts
from brickline.verdict.finding import Finding
from brickline.verdict.status import open_points
from brickline.verdict.verdicts import Status, Verdict

LEAST_SHARE = 0.0005
"""A smaller share would be printed as 0.0 %, and says nothing."""


def headline_of(facts: Facts, status: Status) -> str:
    """Return the one sentence to act on."""
    if status is Status.DIVERGED:
        return _guilty_line(facts)
    accepted = _accepted_words(facts.accepted)
    if status is Status.INCONCLUSIVE:
        point = next(open_points(facts))
        return f"{accepted}; the rest was not shown to match: {point}" if accepted else point
    line = f"{accepted}; nothing else differs" if accepted else _agreement(facts)
    for question, answer in facts.answers.items():
        if question != "state" and not answer.shown:
            line += f"; {question} {answer}"
    return line


def subject_of(finding: Finding) -> str:
    """Return whom a finding is about: the module, those that may be it, or those like it.

    Example:
        >>> subject_of(Finding("a", Verdict.CULPRIT, alternatives=("b", "c")))
        'either a, b or c'
        >>> subject_of(Finding("layers.0.attn", Verdict.CULPRIT, members=("layers.1.attn",)))
        'layers.0.attn and 1 like it'
    """
    name = finding.title
    others = _others_like(finding)
    if finding.alternatives:
        first = ", ".join((name, *finding.alternatives[:-1]))
        return f"either {first} or {finding.alternatives[-1]}"
    return f"{name} and {others} like it" if others else name


def percentage(share: float | None) -> str:
    """Return a share as a percentage; empty where it rounds to none or is not a number."""
    if share is None or not math.isfinite(share) or share < LEAST_SHARE:
        return ""
    return "more than 99.9 %" if 0.999 < share <= 1 else f"{100 * share:.1f} %"


def _others_like(finding: Finding) -> int:
    return len({*finding.members} - {finding.name})


def _guilty_line(facts: Facts) -> str:
    guilty = facts.guilty
    top = guilty[0]
    subject = subject_of(top)
    # Without another side each op is compared with its own float64, and the op itself is meant.
    alone = facts.logic is not None and not facts.logic.shown
    if alone and top.reference_name == facts.reference and top.op not in (None, top.name, "output"):
        subject = f"{top.op} in {subject}"
    line = f"{subject} {_predicate(top)}"
    if top.source:
        line += f" ({os.path.basename(top.source)})"
    share = percentage(top.share)
    if share:
        of = "gradients'" if top.direction == "backward" else "final"
        line += f"; repairing it removes {share} of the {of} difference"
    if len(guilty) > 1:
        line += f" ({len(guilty) - 1} more)"
    return f"{line}; {len(facts.accepted)} other accepted" if facts.accepted else line


def _predicate(finding: Finding) -> str:
    """Return what is said of it, as sure as the verdict is."""
    plural = bool(_others_like(finding)) and not finding.alternatives
    be = "are" if plural else "is"
    when = f" from call {finding.position} on" if finding.position else ""
    if finding.direction == "backward":
        when = f" in {'their' if plural else 'its'} backward pass{when}"
    if finding.verdict is Verdict.CULPRIT:
        if finding.cause and finding.cause.startswith("is "):
            return f"{be} {finding.cause[3:]}{when}"
        what = "wrong"
    elif finding.verdict is Verdict.SUSPECT:
        what = "the first suspects" if plural else "the first suspect"
    else:
        what = "where values stop being finite"
    return f"{be} {what}{when}" + (f": {finding.cause}" if finding.cause else "")


def _accepted_words(accepted: Sequence[Finding]) -> str:
    if not accepted:
        return ""
    largest = max((size for size in map(size_of, accepted) if size is not None), default=None)
    size = "" if largest is None else f" (largest relative L2 {largest:.2g})"
    return f"{len(accepted)} accepted difference{'s' * (len(accepted) != 1)}{size}"


def _agreement(facts: Facts) -> str:
    count = len(facts.verdicts) or facts.coverage.compared
    same = facts.verdicts.counts().get(Verdict.IDENTICAL, 0)
    values = "the only value agrees" if count == 1 else f"all {count} values agree"
    if same == count:
        return f"{values} bit for bit"
    return f"{values}{f': {same} bit for bit, {count - same}' if same else ''} within rounding"


def evidence_lines(facts: Facts) -> Iterator[str]:
    """Give the chain from what is seen to what causes it, of values that were executed again."""
    top = next(iter(facts.guilty), None)
    if top is None:
        return
    if facts.final_error is not None:
        floor = facts.noise_floor
        call = "" if top.position is None else f" of call {top.position}"
        beside = "" if floor is None else f"; rounding alone makes {floor:.2g}"
        yield f"the output{call} differs by {facts.final_error:.2g} (relative L2){beside}"
    if top.z is not None and top.local_error is not None:
        held = top.reference_name or "float64"
        exact = held if held in ("float64", facts.reference) else f"{held} in float64"
        yield (
            f"on its own inputs {top.name} is {top.local_error:.2g} away from {exact}: "
            f"z = {top.z:.3g}; rounding stays below 1"
        )
    counts = facts.verdicts.counts()
    clean = sum(counts.get(verdict, 0) for verdict in _RIGHT)
    if clean:
        yield f"{clean} of {len(facts.verdicts)} values are right on their own inputs"
    left = top.evidence.get("repaired_to")
    if top.share is not None and left is not None:
        what = "the gradients differ" if top.direction == "backward" else "the output differs"
        yield f"with its value repaired {what} by {left:.2g}"
    if top.where:
        yield f"where: {top.where}"


_RIGHT = (Verdict.IDENTICAL, Verdict.ROUNDING, Verdict.PROPAGATED)
