"""Lineage as a report keeps it: a list of sources for each task, and names of given memory.

`Lineage` knows byte ranges and sets that follow from them; a report is saved and read where neither
tasks nor memory are, so it gets who read whom. The one way to it, for plans and for queues: both
tell what their tasks touched, and what they call memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.executor.megakernel.planning import ACCESS_DTYPE, READ, Tasks
from brickline.lineage import Lineage
from brickline.megakernel_flow import Flow

Named: TypeAlias = tuple[NDArray[np.int64], Mapping[int, str] | Sequence[str]]
"""Of some accesses the number of the memory that they touch, and the names that numbers have."""


def lineage_of(
    access_begin: NDArray[Any],
    accesses: NDArray[Any],
    alias: NDArray[Any],
    memory: Callable[[NDArray[np.int64]], Named],
    outputs: Mapping[str, tuple[int, int, int]],
) -> tuple[Flow, dict[str, tuple[int, ...]]]:
    """Return who read whom, and of each output the tasks that wrote last to some byte of it.

    A task that was not run counts as a writer, as in the order of submission it is one.

    Args:
        access_begin: Where the accesses of each task begin; one more than tasks.
        accesses: Rows of `ACCESS_DTYPE`: what tasks touch, in the order of submission.
        alias: Of each task, the earlier one that computed its values, or -1 where it is run.
        memory: Returns what accesses of given memory are called, of which it gets the places.
        outputs: Memory by a name: space, first byte and end.
    """
    # Who wrote last to an output is who a task reads from that comes after all and reads it.
    count, ends = len(alias), np.arange(1, len(outputs) + 1) + len(accesses)
    reads = [(begin, end, 0, space, READ) for space, begin, end in outputs.values()]
    total = count + len(outputs)
    tasks = Tasks(
        op=np.zeros(total, np.uint32),
        blocks=np.ones(total, np.uint32),
        flags=np.zeros(total, np.uint32),
        param_begin=np.zeros(total + 1, np.uint32),
        params=np.zeros(0, np.uint64),
        access_begin=np.concatenate([access_begin, ends]).astype(np.uint32),
        accesses=np.concatenate([accesses, np.array(reads, ACCESS_DTYPE)]),
    )
    runs = np.full(len(outputs), -1)
    lineage = Lineage(tasks, np.concatenate([alias, runs]).astype(np.int32))
    # What a task wrote has stayed until the last one that was not run because of it.
    last, repeats = np.arange(count), np.flatnonzero(alias >= 0)
    last[alias[repeats]] = repeats  # of several, the last one stays
    writers = {
        name: tuple(sorted(last[lineage.direct(number)].tolist()))
        for number, name in enumerate(outputs, count)
    }
    return flow_from_lineage(lineage, memory, count), writers


def flow_from_lineage(
    lineage: Lineage,
    memory: Callable[[NDArray[np.int64]], Named] | None = None,
    count: int | None = None,
) -> Flow:
    """Return who read whom, for `MegakernelReport.of_program` and `of_queue`.

    A task that was not run has one source, the task that computed its values.

    Args:
        lineage: Of all tasks, in the order of the report's.
        memory: As of `lineage_of`. Default: what lies in one space is one memory.
        count: How many tasks the report has, the first ones. Default None: all.
    """
    tasks, count = lineage.tasks, len(lineage) if count is None else count
    lists, begin, sources = lineage.direct_lists(count)
    first = tasks.access_begin[: count + 1].astype(np.int64)
    whose = np.repeat(np.arange(count), np.diff(first))
    kept = np.flatnonzero(lineage.reads_initial[: first[-1]])
    numbers, names = (_spaces_of(tasks) if memory is None else memory)(kept)
    pairs = np.unique(np.stack([whose[kept], numbers], axis=1), axis=0)
    used, given = np.unique(pairs[:, 1], return_inverse=True)
    given_begin = np.searchsorted(pairs[:, 0], np.arange(count + 1))
    known = [names[number] for number in used.tolist()]
    return Flow(begin, sources, given_begin, np.ravel(given), known, lists)


def _spaces_of(tasks: Tasks) -> Callable[[NDArray[np.int64]], Named]:
    def named(places: NDArray[np.int64]) -> Named:
        spaces, numbers = np.unique(tasks.accesses["space"][places], return_inverse=True)
        return np.ravel(numbers), [f"space {space}" for space in spaces.tolist()]

    return named
