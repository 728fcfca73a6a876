"""Which submissions of a queue are one region, and why others are not, in words."""

from __future__ import annotations

import numpy as np

from brickline.megakernel_tables import Tasks
from brickline.plan_words import counted

APART = {
    302: "it has another number of blocks",
    303: "a block of it may touch what another block of the region writes, or the reverse; what a "
    "block touches is declared with Param.touches",
    304: "another submission is joined to that one already",
    305: "its blocks, or those of that one, add to one another's results",
    307: "it waits for something else, too",
    311: "it has another priority",
    312: "that one was submitted in an earlier batch",
    313: "it reads nothing that that one writes",
    314: "the queue was made with fuse=False",
}
"""Why a submission is not joined to the last one that it waits for, by the number after MK."""
MOST_LINES = 100


def regions_text(tasks: Tasks, first: int) -> str:
    """Return the regions of several submissions, and why others are apart, a line each.

    Args:
        tasks: Of a queue.
        first: The number of the first one.
    """
    runs = np.flatnonzero(tasks.alias < 0)
    order = runs[np.argsort(tasks.region[runs], kind="stable")]
    heads, begins = np.unique(tasks.region[order], return_index=True)
    members = [each for each in np.split(order, begins[1:]) if len(each) > 1]
    lines = [
        f"submissions {', '.join(str(first + int(each)) for each in region[:20])}"
        f"{' ...' if len(region) > 20 else ''} are one region: a worker runs their items without a "
        "hop"
        for region in members
    ]
    if tasks.apart is not None:
        lines += [
            f"submission {first + int(row)}: MK{tasks.apart[row]}: "
            f"{APART.get(int(tasks.apart[row]), 'for a reason of its own')}"
            for row in np.flatnonzero(tasks.apart)
        ]
    more = len(lines) - MOST_LINES
    title = f"{counted(len(runs), 'submission')} in {counted(len(heads), 'region')}"
    rest = [f"and {more} more lines"] if more > 0 else []
    return "\n".join([title, *lines[:MOST_LINES], *rest])
