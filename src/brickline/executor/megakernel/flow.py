"""Where the values of a plan's run came from: who read what of whom, and who wrote last.

Follows from the bytes that launches touch at the values of a run. Knows launches, nothing of
engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from brickline.executor.megakernel.launch_columns import access_columns
from brickline.executor.megakernel.lineage_flow import Named, lineage_of
from brickline.megakernel_flow import Flow
from brickline.plan_launches import Launch


def flow_of(
    launches: Sequence[Launch], computed_by: Sequence[int], values: Mapping[str, int | float]
) -> tuple[Flow, dict[str, tuple[int, ...]]]:
    """Return where the values that launches read came from, and who wrote last to each storage.

    A launch's sources are those that wrote last to some byte that it reads; what it reads beyond
    them is memory that was there before. One that is not run has one source, the launch that
    computed its values.

    Args:
        launches: All of a plan.
        computed_by: Of each, the launch that computes its values: itself, where it is run.
        values: Of the plan's variables in the run.
    """
    access_begin, accesses, spaces = access_columns(launches, values)
    storages = [buffer.storage for launch in launches for _, buffer in launch.buffers()]
    numbers = np.array([storage.number for storage in storages], np.int64)
    known = {storage.number: storage for storage in storages}
    names = {number: storage.name for number, storage in known.items()}

    def memory(places: NDArray[np.int64]) -> Named:
        return numbers[places], names

    alias = np.asarray(computed_by)
    outputs = {
        storage.name: (spaces[storage.space], storage.base, storage.base + storage.nbytes)
        for storage in sorted(known.values(), key=lambda each: each.name)
    }
    flow, writers = lineage_of(
        access_begin,
        accesses,
        np.where(alias == np.arange(len(alias)), -1, alias),
        memory,
        outputs,
    )
    return flow, {name: last for name, last in writers.items() if last}
