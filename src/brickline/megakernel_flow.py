"""Flow: where values of a megakernel came from, task by task, and the sets that follow from it.

Knows tasks by their numbers and given memory by its name, nothing of bytes or engines: whoever
plans finds who reads what of whom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from brickline.errors import UsageError
from brickline.megakernel_tables import Column, Tasks, check_range, column


class Flow:
    """Where values came from: of each task, the tasks whose output it read, and given memory.

    Built from what tasks read and wrote, by byte range. Sets of all sources follow from it, however
    large they are.

    Args:
        begin: Of each list of sources, its first place in `sources`; one more at the end.
        sources: Tasks whose values a task read, earlier than itself.
        given_begin: Of each task, its first place in `given`; one more at the end. Default: nothing
            is known of it.
        given: Places in `memory`: what a task read that no task had written.
        memory: Names of given memory.
        lists: Of each task, its list of sources. Default: as many lists as tasks, in order. Tasks
            that read the same share a list, so that levels which all read all stay small.

    Raises:
        UsageError: The columns contradict each other.
    """

    def __init__(
        self,
        begin: Any,
        sources: Any,
        given_begin: Any = None,
        given: Any = (),
        memory: Sequence[str] = (),
        lists: Any = None,
    ) -> None:
        self.begin = column(begin, "lineage, begin")
        self.sources = column(sources, "lineage, sources")
        self.memory = tuple(memory)
        if not all(isinstance(name, str) for name in self.memory):
            raise UsageError("lineage, memory: expected names")
        _check_pointers(self.begin, len(self.sources), "lineage, begin")
        kinds = len(self.begin) - 1
        known = np.arange(kinds) if lists is None else lists
        self.lists = column(known, "lineage, lists")
        check_range(self.lists, 0, max(kinds, 0), "lineage, lists")
        count = len(self.lists)
        known = np.zeros(count + 1, np.int64) if given_begin is None else given_begin
        self.given_begin = column(known, "lineage, given_begin")
        self.given = column(given, "lineage, given")
        _check_pointers(self.given_begin, len(self.given), "lineage, given_begin")
        if len(self.given_begin) != count + 1:
            raise UsageError("lineage: lists and given_begin are not of as many tasks")
        check_range(self.sources, 0, max(count, 0), "lineage, sources")
        check_range(self.given, 0, len(self.memory), "lineage, given")
        self._check_earlier()

    def _check_earlier(self) -> None:
        first_reader = np.full(len(self.begin) - 1, len(self), np.int64)
        np.minimum.at(first_reader, self.lists, np.arange(len(self)))
        whose = np.repeat(first_reader, np.diff(self.begin))
        late = np.flatnonzero(self.sources >= whose)
        if len(late):
            raise UsageError(
                f"lineage: task {whose[late[0]]} has the source {self.sources[late[0]]}, which is "
                "not earlier"
            )

    def __len__(self) -> int:
        return len(self.lists)

    def shared(self) -> Flow:
        """Return the same with every list of sources once."""
        places: dict[bytes, int] = {}
        kept: list[int] = []
        lists = np.empty(len(self), np.int64)
        for task, which in enumerate(self.lists.tolist()):
            key = self.sources[self.begin[which] : self.begin[which + 1]].tobytes()
            found = places.setdefault(key, len(places))
            if found == len(kept):
                kept.append(which)
            lists[task] = found
        pieces = [self.sources[self.begin[which] : self.begin[which + 1]] for which in kept]
        begin = np.cumsum([0, *map(len, pieces)])
        sources = np.concatenate([np.empty(0, np.int64), *pieces])
        return Flow(begin, sources, self.given_begin, self.given, self.memory, lists)

    def direct(self, task: int) -> list[int]:
        """Return the tasks whose values a task read, in order."""
        which = self.lists[task]
        found: list[int] = self.sources[self.begin[which] : self.begin[which + 1]].tolist()
        return found

    @property
    def source_counts(self) -> Column:
        """How many tasks each task read from."""
        return np.diff(self.begin)[self.lists]

    def given_to(self, task: int) -> list[str]:
        """Return the names of given memory that a task read."""
        here = self.given[self.given_begin[task] : self.given_begin[task + 1]].tolist()
        return [self.memory[place] for place in here]

    def given_to_all(self, tasks: Sequence[int]) -> list[str]:
        """Return the names of given memory that some tasks read, each once, in order."""
        reads = np.zeros(len(self), bool)
        reads[np.asarray(tasks, np.int64)] = True
        places = self.given[np.repeat(reads, np.diff(self.given_begin))]
        _, first = np.unique(places, return_index=True)
        return [self.memory[place] for place in places[np.sort(first)].tolist()]

    def all_sources(self, tasks: Sequence[int]) -> Column:
        """Return every task that contributed to some, themselves included, in order."""
        seen = np.zeros(len(self), bool)
        front = np.unique(np.asarray(tasks, np.int64))
        seen[front] = True
        while len(front):
            which = np.unique(self.lists[front])
            first, count = self.begin[which], self.begin[which + 1] - self.begin[which]
            at = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
            found = np.unique(self.sources[at])
            front = found[~seen[found]]
            seen[front] = True
        return np.flatnonzero(seen)

    @cached_property
    def _inverse(self) -> tuple[Column, Column, Column, Column]:
        """First place and list of each source, and first place and task of each list."""
        kinds = np.arange(len(self.begin) - 1)
        by_source = np.argsort(self.sources, kind="stable")
        by_list = np.argsort(self.lists, kind="stable")
        return (
            np.searchsorted(self.sources[by_source], np.arange(len(self) + 1)),
            np.repeat(kinds, np.diff(self.begin))[by_source],
            np.searchsorted(self.lists[by_list], np.arange(len(kinds) + 1)),
            by_list,
        )

    def readers(self, task: int) -> list[int]:
        """Return the tasks that read a task's values, in order."""
        begin, lists, task_begin, tasks = self._inverse
        return sorted(
            reader
            for which in lists[begin[task] : begin[task + 1]].tolist()
            for reader in tasks[task_begin[which] : task_begin[which + 1]].tolist()
        )


class NoLineage(tuple[tuple[int, ...], ...]):
    """The lineage of a run that kept none: empty, and says so where a region is asked for."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ()
        raise UsageError("the run kept no lineage; run it again with lineage=True")


class RegionLineage(Sequence[tuple[int, ...]]):
    """Of each region, the tasks that contributed to its output, its own included.

    A set is made when it is looked at: all of them together may be as large as the square of the
    number of tasks.
    """

    def __init__(self, tasks: Tasks, flow: Flow) -> None:
        self._tasks, self._flow = tasks, flow
        self._order = np.argsort(tasks.region, kind="stable")
        self._numbers = np.unique(tasks.region)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        number = self._numbers[range(len(self))[index]]
        sorted_regions = self._tasks.region[self._order]
        first, last = np.searchsorted(sorted_regions, [number, number + 1])
        return tuple(self._flow.all_sources(self._order[first:last].tolist()).tolist())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (self[place] for place in range(len(self)))


def _check_pointers(begin: Column, end: int, where: str) -> None:
    if not len(begin) or begin[0] != 0 or begin[-1] != end or (np.diff(begin) < 0).any():
        raise UsageError(
            f"{where}: expected places that rise from 0 to {end}, one per task and one"
        )
