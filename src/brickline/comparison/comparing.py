"""`compare`: two recorded runs become a report.

Opens the runs, conducts the steps of the other modules, and says so where there is nothing to
compare.
"""

from __future__ import annotations

import os
from typing import TypeAlias

import numpy as np

from brickline.comparison.conditions import differing_circumstances, uses_tf32
from brickline.comparison.operands import measure
from brickline.comparison.pairing import align
from brickline.comparison.report.report import Report
from brickline.comparison.report.run_pair import RunPair, label_of, problems_of, unmatched_launches
from brickline.comparison.rounding.directions import directions_of
from brickline.comparison.rounding.envelope import UNIT_ROUNDOFF
from brickline.comparison.sides import MODULE, OP, Vocabulary, modules_alone, side_from_run
from brickline.comparison.suspects import find_suspects
from brickline.comparison.triage import units_of
from brickline.comparison.twins import with_twins
from brickline.comparison.verdicts import judge
from brickline.errors import UsageError
from brickline.run.failures import is_failure
from brickline.runs import Run
from brickline.verdict import Coverage, DivergenceReport

Given: TypeAlias = str | os.PathLike[str] | Run
OF_A_PLAN = "those of a plan with prepared.watch(profiler, fingerprints=True)"


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
    pair = RunPair(
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
    directions = directions_of(a, b, found)
    units = units_of(a, b, alignment, found, directions)
    suspects, spared = find_suspects(a, b, alignment, found, units)
    judgement = judge(a, alignment, found, directions, units, suspects)
    report = Report(pair, alignment, found, directions, units, suspects, judgement, spared)
    return with_twins(report.report(), pair, alignment, found, whole=report.is_sound)


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


# --- nothing can be said


def _nothing_to_compare(pair: RunPair) -> str | None:
    for side, run in ((pair.a, pair.candidate), (pair.b, pair.reference)):
        name = label_of(run)
        if side.problems and not (len(side) and (side.print >= 0).any()):
            if is_failure(side.problems[0]):
                return f"{name} holds nothing to compare: {side.problems[0]}"
            return f"{name} is damaged, so nothing was compared: {side.problems[0]}"
        if not len(side):
            return (
                f"{name} holds no launches, so nothing was compared; record them with "
                f"bl.record(path, model) or brickline run --torch SCRIPT, {OF_A_PLAN}"
            )
        if not (side.print >= 0).any():
            return (
                f"{name} holds {len(side)} launches and no fingerprints, so no value was compared; "
                f"record it again with bl.record(path, model), which takes them, {OF_A_PLAN}"
            )
    return None


def _nothing_in_common(pair: RunPair) -> str:
    first = [side.path(0) for side in (pair.a, pair.b)]
    return (
        f"the runs have no launch in common: {len(pair.a)} launches from {first[0]!r} on, "
        f"reference {len(pair.b)} from {first[1]!r} on; record the same model or plan on the same "
        "inputs"
    )


def _empty(pair: RunPair, reason: str) -> DivergenceReport:
    every = (np.ones(len(side), dtype=bool) for side in (pair.a, pair.b))
    return DivergenceReport(
        *pair.names,
        coverage=Coverage(0, len(pair.a), problems_of(pair)),
        unshown=(reason,),
        unmatched=tuple(unmatched_launches(pair, *every)),
        circumstances=pair.circumstances,
    )
