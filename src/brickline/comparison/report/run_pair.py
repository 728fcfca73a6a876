"""The two runs that are compared, and how their launches are named in a report.

Knows nothing of what differs between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brickline.comparison.sides import FLAT, OP, Side
from brickline.runs import Run

MOST_LISTED = 200
"""Launches without a partner that are listed by name; the rest is counted."""


@dataclass(frozen=True, eq=False)
class RunPair:
    """The two runs and their launches."""

    candidate: Run
    reference: Run
    a: Side
    b: Side
    circumstances: tuple[str, ...]
    ops: int = 0
    """Ops of the candidate that are judged by the modules they are in."""

    @property
    def names(self) -> tuple[str, str]:
        """Return what candidate and reference are called."""
        return label_of(self.candidate), label_of(self.reference)


def label_of(run: Run) -> str:
    """Return what a run is called: its directory, or else its name."""
    return run.path.name or run.name


def problems_of(pair: RunPair) -> tuple[str, ...]:
    """Return what was wrong with the launches of either run."""
    return tuple(
        f"{role}: {text}"
        for role, side in (("candidate", pair.a), ("reference", pair.b))
        for text in side.problems
    )


def unmatched_launches(pair: RunPair, ours: np.ndarray, theirs: np.ndarray) -> list[str]:
    """Name the launches of either side that were compared with nothing.

    Args:
        pair: The two runs.
        ours: Which launches of the candidate they are.
        theirs: The same of the reference.
    """
    out = []
    for role, side, lost in (("candidate", pair.a, ours), ("reference", pair.b, theirs)):
        rows = np.flatnonzero(lost)
        out += [f"{role}: {_place(side, int(row))}" for row in rows[:MOST_LISTED]]
        if len(rows) > MOST_LISTED:
            out.append(f"{role}: and {len(rows) - MOST_LISTED} more")
    return out


def _place(side: Side, row: int) -> str:
    text = launch_name(side, row)
    if side.level[row] == OP:
        text += f" ({side.path(row)})"
    where = f"{text}, call {int(side.position[row])}"
    return where + (" backward" if side.direction[row] else "")


def launch_name(side: Side, row: int) -> str:
    """Return whose work a launch is, with its layer where its name does not tell it."""
    layer, name = int(side.layer[row]), name_of(side, row)
    return name if side.level[row] != FLAT or layer < 0 else f"{name} (layer {layer})"


def name_of(side: Side, row: int) -> str:
    """Return whose work a launch is: its module's, for an op."""
    parent = int(side.parent[row])
    return side.path(parent) if side.level[row] == OP and parent >= 0 else side.path(row)
