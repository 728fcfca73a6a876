"""Prover: whether tables of a program can be run: no cycle, no race, no wait without a producer.

Lays out what launches touch for the core's validator, which shares no code with whoever made the
tables. What was proved once is not proved again. Knows launches and tables, nothing of engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from brickline import _core
from brickline.errors import SymbolicError
from brickline.executor.megakernel.block_ranges import BlockRange, block_range
from brickline.executor.megakernel.launch_columns import columns_of
from brickline.executor.megakernel.tables import SIGNALS, region_numbers
from brickline.plan_launches import Launch

RACE = 406
"""Two launches touch the same bytes, one of them writes, and nothing keeps them in order."""
MOST_KEPT = 256
"""Proofs that are remembered; plans whose sizes vary come back to a few shapes."""


class Tables(Protocol):
    """What a program is run by."""

    workers: int

    def tasks(self) -> NDArray[Any]:
        """Return a row for each launch."""

    def waits(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the launches that each one waits for: first places and one more, and launches."""

    def lists(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return where the list of each worker begins and one more, and the launches of all."""


class Prover:
    """Proves tables of one plan, at the values of a run."""

    def __init__(
        self, launches: Sequence[Launch], computed_by: Sequence[int] | None = None
    ) -> None:
        self._known: set[bytes] = set()
        self._columns = columns_of(launches)
        count = len(launches)
        self._computed_by = np.asarray(range(count) if computed_by is None else computed_by)
        self._is_run = self._computed_by == np.arange(count)
        self._ranges: list[list[tuple[int, BlockRange]]] = []
        """Of each launch, its accesses whose blocks keep to ranges of their own."""
        for launch, first in zip(launches, self._columns.access_begin.tolist(), strict=False):
            pairs = enumerate(launch.buffers(), first)
            found = [(place, block_range(launch, *use)) for place, use in pairs]
            self._ranges.append([(place, each) for place, each in found if each is not None])

    def breach(
        self, tables: Tables, values: Mapping[str, int | float]
    ) -> tuple[int, int, int] | None:
        """Return what is wrong: the number of a code, a launch and another; None: nothing is.

        Args:
            tables: Those of the program.
            values: Of the plan's variables.
        """
        tasks, waits, lists = tables.tasks(), tables.waits(), tables.lists()
        accesses = self._columns.accesses.copy()
        for launch in np.flatnonzero(self._is_joined(tasks)).tolist():
            for place, found in self._ranges[launch]:
                _lay_out(accesses[place], found, int(tasks["blocks"][launch]), values)
        # A launch that is not shared out is one part, whatever its blocks touch.
        is_whole = tasks["parts"] < np.minimum(tasks["blocks"], tables.workers)
        blocks = np.where(is_whole, tasks["parts"], tasks["blocks"]).astype(np.uint32)
        blocks = blocks[self._computed_by]
        columns = (blocks, tasks["flags"], tasks["first_worker"], *waits, *lists, accesses)
        key = b"".join(np.ascontiguousarray(each).tobytes() for each in columns)
        if key in self._known:
            return None
        breach = self._validated(tables.workers, tasks, blocks, waits, lists, accesses)
        if breach is None:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known.add(key)
        return breach

    def _is_joined(self, tasks: NDArray[Any]) -> NDArray[Any]:
        """Return of each launch whether the one that computes its values shares its region."""
        regions = region_numbers(tasks)
        is_shared = np.bincount(regions[self._is_run])[regions] > 1
        return np.asarray(is_shared[self._computed_by])

    def _validated(
        self,
        workers: int,
        tasks: NDArray[Any],
        blocks: NDArray[Any],
        waits: tuple[NDArray[Any], NDArray[Any]],
        lists: tuple[NDArray[Any], NDArray[Any]],
        accesses: NDArray[Any],
    ) -> tuple[int, int, int] | None:
        columns = replace(self._columns, blocks=blocks, accesses=accesses)
        alias = np.where(self._is_run, -1, self._computed_by).astype(np.int32)
        code, launch, other = _core.mega_validate(
            columns.core,
            alias,
            waits[0].astype(np.uint32),
            np.ascontiguousarray(waits[1], np.uint32),
            np.zeros(1, np.uint64),
            np.zeros(0, np.uint32),
            np.flatnonzero(self._is_run).astype(np.uint32),
            region_numbers(tasks).astype(np.uint32),
            ((tasks["flags"] & SIGNALS) != 0).astype(np.uint8),
            workers,
            np.ascontiguousarray(tasks["first_worker"]),
            lists[0].astype(np.uint64),
            np.ascontiguousarray(lists[1], np.uint32),
            2**64 - 1,
        )
        return (code, launch, other) if code else None


def _lay_out(
    access: Any, found: BlockRange, blocks: int, values: Mapping[str, int | float]
) -> None:
    """Give an access the ranges of its blocks, where these are steps of one length.

    Block b has [begin + b * step, begin + (b + 1) * step), cut at the end.
    """
    integers = {name: value for name, value in values.items() if isinstance(value, int)}

    def at(block: int) -> tuple[int, int]:
        places = integers | {"block_x": block}
        return found.begin.evaluate(places), found.end.evaluate(places)

    try:
        (begin, end), (last_begin, last_end) = at(0), at(blocks - 1)
        step = at(1)[0] - begin if blocks > 1 else end - begin
    except SymbolicError:  # beyond int64
        return
    is_regular = step > 0 and end <= begin + step and last_begin == begin + (blocks - 1) * step
    if is_regular and begin >= 0 and last_begin <= last_end <= last_begin + step:
        access["begin"] = found.base + begin
        access["end"] = found.base + last_end
        access["per_block"] = step
