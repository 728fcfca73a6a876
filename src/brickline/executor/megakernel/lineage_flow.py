"""Lineage as a report keeps it: a list of sources for each task, and names of given memory.

`Lineage` knows byte ranges and sets that follow from them; a report is saved and read where neither
tasks nor memory are, so it gets who read whom.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from brickline.executor.megakernel.planning import Tasks
from brickline.lineage import Lineage
from brickline.megakernel_flow import Flow


def flow_from_lineage(
    lineage: Lineage, space_name: Callable[[int], str] = "space {}".format
) -> Flow:
    """Return who read whom, for `MegakernelReport.of_program` and `of_queue`.

    A task that was not run has one source, the task that computed its values.

    Args:
        lineage: Of all tasks, in the order of the report's.
        space_name: What to call the memory of a space. Default its number.
    """
    tasks = lineage.tasks
    assert isinstance(tasks, Tasks)
    places: dict[bytes, int] = {}
    pieces: list[NDArray[np.uint32]] = []
    lists = np.empty(len(lineage), np.int64)
    for task in range(len(lineage)):
        computed_by = lineage.computed_by(task)
        found = lineage.direct(task) if computed_by == task else np.array([computed_by], np.uint32)
        place = lists[task] = places.setdefault(found.tobytes(), len(places))
        if place == len(pieces):
            pieces.append(found)
    begin = np.cumsum([0, *map(len, pieces)])
    sources = np.concatenate([np.empty(0, np.uint32), *pieces])
    # What a task read that no task had written before, by space; of an alias nothing was read.
    is_given = lineage._core.reads_initial() != 0
    first = tasks.access_begin.astype(np.int64)
    whose = np.repeat(np.arange(len(lineage)), first[1:] - first[:-1])
    own = np.array([lineage.computed_by(task) == task for task in range(len(lineage))], bool)
    kept = np.flatnonzero(is_given & own[whose]) if len(whose) else np.empty(0, np.int64)
    pairs = np.unique(
        np.stack([whose[kept], tasks.accesses["space"][kept].astype(np.int64)], axis=1), axis=0
    )
    spaces, given = np.unique(pairs[:, 1], return_inverse=True)
    given_begin = np.searchsorted(pairs[:, 0], np.arange(len(lineage) + 1))
    names = [space_name(space) for space in spaces.tolist()]
    return Flow(begin, sources, given_begin, np.ravel(given), names, lists)
