"""Which slices of one tensor are slices of another: rows, heads, positions in other places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Array = np.ndarray
Places = list["int | None"]
MOST_SLICES = 4096
DIFFER, DIFFERS = "differ", "differs"
"""In what is said of slices for whose difference there is no reason."""
ROUNDED = 1e-6
"""Part of the largest element by which float32 may round what was multiplied or moved."""
FEW = 6
"""Places that are named one by one."""


def places_of(ours: Array, theirs: Array, dim: int, tolerance: float) -> Places:
    """Return for each slice of ours where it lies in the other's; None where it is none of them.

    Its own place counts before others, and places that no other slice took before those that one
    did.
    """
    mine = np.moveaxis(ours, dim, 0).reshape(ours.shape[dim], -1)
    other = np.moveaxis(theirs, dim, 0).reshape(theirs.shape[dim], -1)
    if mine.shape[1] != other.shape[1] or max(len(mine), len(other)) > MOST_SLICES:
        return [None] * len(mine)
    mark = np.cos(np.arange(mine.shape[1]) * 1.618 + 0.5)
    marks, known = mine @ mark, other @ mark
    margin = tolerance * np.abs(mark).sum() + 1e-300
    order = np.argsort(known, kind="stable")
    ordered = known[order]
    taken: set[int] = set()
    places: Places = []
    for index, row in enumerate(mine):
        first = np.searchsorted(ordered, marks[index] - margin)
        last = np.searchsorted(ordered, marks[index] + margin, side="right")
        near = [int(k) for k in order[first:last]]
        near.sort(key=lambda k: (k != index, k in taken, k))
        place = next(
            (k for k in near if np.abs(row - other[k]).max(initial=0.0) <= tolerance), None
        )
        if place is not None:
            taken.add(place)
        places.append(place)
    return places


def permutation(places: Sequence[int | None]) -> list[int] | None:
    """Return where each slice is found; None where some are missing or all are right."""
    if None in places or sorted(places) != list(range(len(places))):  # type: ignore[type-var]
        return None
    inverse = [0] * len(places)
    for index, place in enumerate(places):
        inverse[place] = index  # type: ignore[index]
    return None if inverse == list(range(len(places))) else inverse


def order_words(places: Sequence[int]) -> str:
    """Return how things are ordered of which the k-th is another's `places[k]`-th."""
    size = len(places)
    moved = [index for index, place in enumerate(places) if place != index]
    if len(moved) == 2:
        return f"{moved[0]} and {moved[1]} are exchanged"
    if list(places) == list(range(size))[::-1]:
        return "they are in reverse order"
    shift = places[0] % size
    if all(place == (index + shift) % size for index, place in enumerate(places)):
        shift = shift if shift <= size // 2 else shift - size
        if shift * 2 == size:
            return "the two halves are exchanged"
        return f"they are shifted by {-shift} round the end"
    for groups in (k for k in range(2, size) if size % k == 0):
        if all(
            place == index % groups * (size // groups) + index // groups
            for index, place in enumerate(places)
        ):
            return (
                f"{groups} groups of {size // groups} are interleaved, "
                "where the reference has one group after the other"
            )
    inner = next(
        (k for k in range(2, size // 2 + 1) if size % k == 0 and _is_blockwise(places, k)), None
    )
    if inner is not None and inner < size:
        return f"in each group of {inner}, " + order_words(list(places[:inner]))
    if size <= 16:
        return "their order is " + " ".join(map(str, places))
    return f"{len(moved)} of {size} are in another's place"


def _is_blockwise(places: Sequence[int], size: int) -> bool:
    first = places[:size]
    return sorted(first) == list(range(size)) and all(
        place == first[index % size] + index // size * size for index, place in enumerate(places)
    )


def listed(indices: Sequence[int]) -> str:
    """Return a few indices, or their range, in words."""
    if len(indices) > 2 and list(indices) == list(range(indices[0], indices[-1] + 1)):
        return f"{indices[0]} to {indices[-1]}"
    if len(indices) > FEW:
        return ", ".join(map(str, indices[:FEW])) + f" and {len(indices) - FEW} more"
    return " and ".join(filter(None, (", ".join(map(str, indices[:-1])), str(indices[-1]))))


def slice_words(ours: Array, theirs: Array, dim: int, places: Places) -> str | None:
    """Say what is wrong with slices that are not in their place; None where nothing plain is."""
    size = len(places)
    wrong = [index for index, place in enumerate(places) if place != index]
    if not wrong or (len(wrong) == size and None in places):
        shifted = _shift(places)
        return None if shifted is None else f"shifted by {shifted}"
    shifted = _shift(places)
    if shifted is not None and len(wrong) > 2:
        return f"shifted by {shifted}"
    if None not in places and sorted(places) == list(range(size)):  # type: ignore[type-var]
        return order_words([int(place) for place in places if place is not None])
    if len(wrong) > size // 2:
        return None
    facts = list(dict.fromkeys(_fact(ours, theirs, dim, index, places[index]) for index in wrong))
    if len(facts) > 3:
        return f"{listed(wrong)} of {size} {DIFFER}"
    if len(wrong) > 1 and len(facts) == 1 and "holds" not in facts[0]:
        return f"{listed(wrong)} of {size}: each {facts[0]}"
    return "; ".join(
        f"{index} {_fact(ours, theirs, dim, index, places[index])}" for index in wrong[:3]
    ) + (f" (of {size})" if size > 1 else "")


def _shift(places: Places) -> int | None:
    """Return by how much slices are shifted, those at the ends left aside."""
    shifts = {index - place for index, place in enumerate(places) if place is not None}
    known = sum(place is not None for place in places)
    if len(shifts) != 1 or shifts == {0}:
        return None
    shift = shifts.pop()
    return shift if known == len(places) - abs(shift) and known >= 3 else None


def _fact(ours: Array, theirs: Array, dim: int, index: int, place: int | None) -> str:
    mine = np.take(ours, index, axis=dim).reshape(-1)
    right = np.take(theirs, index, axis=dim).reshape(-1)
    if not mine.any():
        return "is zero"
    if place is not None:
        return f"holds what belongs in {place}"
    if not right.any():
        return "is zero in the reference"
    factor = float(mine @ right) / float(right @ right)
    if np.abs(mine - factor * right).max() <= ROUNDED * np.abs(right).max():
        if abs(factor + 1) < ROUNDED:
            return "has the other sign"
        return f"is {factor:.6g} times what it should be"
    offset = mine - right
    if mine.size > 1 and np.ptp(offset) <= ROUNDED * np.abs(right).max():
        return f"is larger by {offset[0]:.6g}"
    gap = float(np.linalg.norm(mine - right) / np.linalg.norm(right))
    return f"{DIFFERS} by {gap:.2g} (relative L2)"


def dims_of(shape: Sequence[int]) -> Iterator[int]:
    """Yield the dimensions of more than one slice, the last first."""
    yield from (dim for dim in reversed(range(len(shape))) if 1 < shape[dim] <= MOST_SLICES)
