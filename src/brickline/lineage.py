"""Lineage: of every task, the tasks and the memory that contributed to what it computed.

From what was really read and written: who wrote the bytes that a task read, who wrote what those
read, and so on. Sets of any size. It is made only where it is asked for, and costs nothing else.
Knows tasks by their numbers and memory by its spaces; names are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from brickline import _core
from brickline.errors import PlanError
from brickline.executor.megakernel.planning import PlannedTasks, Tasks

MOST_LINES = 60
"""What `Lineage.explain` prints unless told otherwise: a screen."""


class InitialRead(NamedTuple):
    """Bytes that a task read and no task wrote before: an input, a weight."""

    task: int
    space: int
    begin: int
    end: int


class Lineage:
    """Who contributed to what each task computed.

    Example:
        >>> from brickline.executor.megakernel.planning import TaskBuilder
        >>> builder = TaskBuilder()
        >>> builder.add(0, [], [(0, 0, 8)]), builder.add(0, [(0, 0, 8)], [(1, 0, 8)])
        (0, 1)
        >>> builder.add(0, [(1, 4, 8)], [(2, 0, 8)])
        2
        >>> Lineage(builder.tasks()).of(2).tolist()
        [0, 1]
    """

    def __init__(
        self, tasks: Tasks | PlannedTasks, alias: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Follow what tasks read and wrote.

        Args:
            tasks: In the order of submission; of planned ones, those that are not run are aliases
                of what computed them.
            alias: Of each task, the earlier one that computed its values, or -1 where it is run.
                Default None: what was planned, else all are run.

        Raises:
            PlanError: The columns do not fit each other.
        """
        self.tasks: Tasks = tasks.tasks if isinstance(tasks, PlannedTasks) else tasks
        if alias is None and isinstance(tasks, PlannedTasks):
            alias = tasks.alias
        try:
            self._core = _core.MegaLineage(self.tasks.core, alias)
        except ValueError as error:
            raise PlanError(f"{error} - at lineage") from None

    def __len__(self) -> int:
        """How many tasks there are."""
        return len(self._core)

    def runs_of(self, task: int) -> npt.NDArray[np.uint32]:
        """Return the tasks that contributed, as rows of first and end, ascending."""
        return self._core.of(self._checked(task))

    def of(self, task: int) -> npt.NDArray[np.uint32]:
        """Return the tasks that contributed, ascending, without the task itself."""
        runs = self.runs_of(task)
        if not len(runs):
            return np.empty(0, np.uint32)
        return np.concatenate([np.arange(first, last, dtype=np.uint32) for first, last in runs])

    def direct(self, task: int) -> npt.NDArray[np.uint32]:
        """Return the tasks that wrote what a task reads itself, ascending."""
        return self._core.direct(self._checked(task))

    def direct_lists(
        self, count: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Return who wrote what the first tasks read, in lists that tasks share.

        The list of each task, where lists begin and one more, and the tasks of all lists. Of a task
        that was not run, what computed its values.
        """
        return self._core.direct_lists(count)

    @cached_property
    def reads_initial(self) -> npt.NDArray[np.uint8]:
        """Of each access, whether it reads bytes that no task wrote before."""
        return self._core.reads_initial()

    def computed_by(self, task: int) -> int:
        """Return the task that computed it: itself, or another where it was left out."""
        return self._core.computed_by(self._checked(task))

    def initial(self, task: int) -> list[InitialRead]:
        """Return the memory from before all tasks that contributed, in the order of tasks.

        A range is what a task read; some of its bytes, or all, no task had written.
        """
        found = []
        for each in [*self.of(task).tolist(), self.computed_by(task)]:
            first, last = self.tasks.access_begin[each], self.tasks.access_begin[each + 1]
            for k in np.flatnonzero(self.reads_initial[first:last]) + int(first):
                row = self.tasks.accesses[k]
                found.append(
                    InitialRead(each, int(row["space"]), int(row["begin"]), int(row["end"]))
                )
        return found

    def explain(
        self,
        task: int,
        name: Callable[[int], str] = "task {}".format,
        space_name: Callable[[int], str] = "space {}".format,
        most_lines: int = MOST_LINES,
    ) -> str:
        """Return the chain of sources as text, nearest first, each task once.

        Args:
            task: Whose output is explained.
            name: What to call a task. Default its number.
            space_name: What to call a space. Default its number.
            most_lines: Where to stop. Default 60.
        """
        lines = []
        start = self.computed_by(task)
        if start != task:
            lines.append(f"{name(task)} was not run: {name(start)} had computed the same")
        sources, seen = [(start, 0)], {start}
        for each, depth in sources:  # grows meanwhile
            if len(lines) >= most_lines:
                lines.append(f"... and {len(self.of(start)) + 1 - len(seen)} more")
                break
            lines.append("  " * depth + self._sentence(each, name, space_name))
            for source in self.direct(each).tolist():
                if source not in seen:
                    seen.add(source)
                    sources.append((source, depth + 1))
        return "\n".join(lines)

    def _sentence(
        self, task: int, name: Callable[[int], str], space_name: Callable[[int], str]
    ) -> str:
        direct = self.direct(task).tolist()
        first, last = self.tasks.access_begin[task], self.tasks.access_begin[task + 1]
        read = np.flatnonzero(self.reads_initial[first:last]) + int(first)
        spaces = sorted({int(self.tasks.accesses[k]["space"]) for k in read})
        parts = []
        if direct:
            shown = ", ".join(name(each) for each in direct[:4])
            parts.append(shown + (f" and {len(direct) - 4} more" if len(direct) > 4 else ""))
        if spaces:
            parts.append("memory: " + ", ".join(space_name(each) for each in spaces[:4]))
        return f"{name(task)} from {'; '.join(parts) if parts else 'nothing'}"

    def _checked(self, task: int) -> int:
        if not 0 <= task < len(self):
            raise PlanError(
                f"expected a task from 0 to {len(self) - 1}, got {task} - at lineage"
                if len(self)
                else "there are no tasks to ask for - at lineage"
            )
        return task
