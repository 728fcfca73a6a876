"""What the facts of a comparison amount to. The one place that decides it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from brickline.verdict.facts import Facts
from brickline.verdict.verdicts import CLEAN, Status

OUTPUT_MARGIN = 10.0
"""The final output of a report that matched differs by at most this often what rounding makes.

What rounding makes is one measurement, of the reference in the candidate's dtype, and several
values may each exceed their own by a little: so there is room."""


def status_of(facts: Facts) -> Status:
    """Return diverged where a finding is guilty, matched where nothing is left open."""
    if facts.guilty:
        return Status.DIVERGED
    return Status.MATCHED if next(open_points(facts), None) is None else Status.INCONCLUSIVE


def open_points(facts: Facts) -> Iterator[str]:
    """Give what keeps a report without a guilty finding from being matched, in words."""
    yield from facts.unshown
    for question, answer in facts.answers.items():
        if answer.exceeds:
            yield f"{question}: {answer}, and no module was named for it"
    yield from _output_points(facts)
    for finding in facts.findings:
        if finding.verdict not in CLEAN:
            reason = f": {finding.reason}" if finding.reason else ""
            yield f"not shown either way: {finding.name} is {finding.verdict}{reason}"
    rows = Counter(verdict for verdict in facts.verdicts.columns["verdict"] if verdict not in CLEAN)
    for verdict, count in rows.items():
        yield f"not shown either way: {count} of {len(facts.verdicts)} values are {verdict}"
    yield from _coverage_points(facts)


def _output_points(facts: Facts) -> Iterator[str]:
    error, floor = facts.final_error, facts.noise_floor
    if error is None:
        return
    if not math.isfinite(error):
        yield "the final outputs are not finite in the same places, and no module was named for it"
    elif floor and error > OUTPUT_MARGIN * floor and not facts.accepted:
        yield (
            f"the final output differs by {error:.2g} (relative L2), where rounding alone makes "
            f"{floor:.2g}, and no module was named for it"
        )


def _coverage_points(facts: Facts) -> Iterator[str]:
    coverage = facts.coverage
    if not coverage.complete:
        count = f"{coverage.compared} of {coverage.total} values were compared"
        short = count if coverage.total else "nothing could be compared"
        yield f"not shown either way: {coverage.notes[0] if coverage.notes else short}"
    if facts.unmatched:
        yield (
            f"not shown either way: {len(facts.unmatched)} ops or launches have no counterpart, "
            f"the first of the {facts.unmatched[0]}"
        )
    logic, arithmetic = facts.logic, facts.arithmetic
    if logic is not None and arithmetic is not None and not (logic.shown or arithmetic.shown):
        yield f"neither logic nor arithmetic was shown: {logic}; {arithmetic}"
