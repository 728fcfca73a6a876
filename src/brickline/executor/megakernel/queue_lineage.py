"""Where the values of a queue's submissions came from, and what memory that was given is called.

Memory has the name that `drain(outputs=)` gives it, else that of the first argument which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from brickline.executor.megakernel.lineage_flow import Named, lineage_of
from brickline.executor.megakernel.planning import READ
from brickline.megakernel_flow import Flow


def queue_lineage(
    access_begin: NDArray[np.int64],
    accesses: NDArray[np.void],
    alias: NDArray[np.int64],
    argument: Callable[[int, int], str],
    named: Mapping[str, tuple[int, int]],
) -> tuple[Flow, dict[str, tuple[int, ...]]]:
    """Return who read whom, and of each named memory the rows of those that wrote last to it.

    Args:
        access_begin: Where the accesses of each row begin; one more than rows.
        accesses: Rows of `ACCESS_DTYPE`, addresses, one for each buffer of a submission.
        alias: Of each row, the row that computed its values, or -1 where it is run.
        argument: Returns what a buffer is called, by row and place among the buffers of the row.
        named: Memory by a name: first address and end.
    """
    bounds = np.unique(np.array(list(named.values()), np.uint64))
    whole, cut = _cut(accesses, bounds)
    cut_begin = np.searchsorted(whole, access_begin)
    names = list(named)
    name_of = _shortest(list(named.values()), bounds)

    def memory(places: NDArray[np.int64]) -> Named:
        """Name memory; the same bytes have one name, whoever reads them."""
        numbers = name_of[np.searchsorted(bounds, cut["begin"][places], "right")]
        rest = np.flatnonzero(numbers < 0)
        read = whole[places[rest]]
        ranges = np.stack([accesses["begin"][read], accesses["end"][read]], axis=1)
        _, first, which = np.unique(ranges, axis=0, return_index=True, return_inverse=True)
        numbers[rest] = len(names) + np.ravel(which)
        rows = np.searchsorted(access_begin, read[first], "right") - 1
        pairs = zip(rows.tolist(), (read[first] - access_begin[rows]).tolist(), strict=True)
        return numbers, [*names, *(argument(row, place) for row, place in pairs)]

    outputs = {name: (0, begin, end) for name, (begin, end) in named.items()}
    return lineage_of(cut_begin, cut, alias, memory, outputs)


def _cut(
    accesses: NDArray[np.void], bounds: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """Return accesses of which those that read are cut at some addresses, and whose piece each is.

    So a piece of given memory lies in what has a name, or beside it, and never in both.
    """
    low = np.searchsorted(bounds, accesses["begin"], "right")
    inside = np.searchsorted(bounds, accesses["end"], "left") - low
    cuts = np.where(accesses["mode"] & READ, np.maximum(inside, 0), 0)
    whole = np.repeat(np.arange(len(accesses)), cuts + 1)
    nth = np.arange(len(whole)) - np.repeat(np.cumsum(cuts + 1) - cuts - 1, cuts + 1)
    cut = accesses[whole]
    begins_at, ends_at = np.flatnonzero(nth), np.flatnonzero(nth < cuts[whole])
    cut["begin"][begins_at] = bounds[(low[whole] + nth - 1)[begins_at]]
    cut["end"][ends_at] = bounds[(low[whole] + nth)[ends_at]]
    return whole, cut


def _shortest(ranges: list[tuple[int, int]], bounds: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the number of the shortest range around each stretch between bounds; -1 of none.

    Stretch k ends at bound k; the last one is behind all of them.
    """
    found = np.full(len(bounds) + 1, -1)
    sizes = [end - begin for begin, end in ranges]
    for number in sorted(range(len(ranges)), key=lambda each: (-sizes[each], -each)):
        first, last = np.searchsorted(bounds, np.array(ranges[number], np.uint64))
        found[first + 1 : last + 1] = number
    return found
