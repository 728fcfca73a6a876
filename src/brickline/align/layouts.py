"""In which orders the elements of one value may lie in another.

An order is an index array: ``ours = theirs[order]``, of flat elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

MOST_SPLITS = 8
"""Ways to cut the dimensions of one side into those of the other."""
MOST_DIMENSIONS = 6
"""Values of more dimensions are not looked at in other orders of them."""


def orders_by_shape(
    ours: Iterable[Sequence[int]], theirs: Iterable[Sequence[int]]
) -> Iterator[np.ndarray]:
    """Yield the orders in which dimensions are exchanged, the plainest first.

    A dimension of one side may be several of the other's, as heads in groups are.

    Args:
        ours: Shapes in which a value of ours is seen, all of them in the same order of elements.
        theirs: Those of the other's.
    """
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for wanted, given in itertools.product(map(_squeezed, ours), map(_squeezed, theirs)):
        if int(np.prod(wanted)) != int(np.prod(given)):
            continue
        yield from _exchanges(wanted, given, seen)
        if sorted(wanted) != sorted(given):
            for fine in itertools.islice(_splits(given, wanted), MOST_SPLITS):
                yield from _exchanges(wanted, fine, seen)
            for fine in itertools.islice(_splits(wanted, given), MOST_SPLITS):
                yield from _exchanges(fine, given, seen)


def _exchanges(
    wanted: tuple[int, ...],
    given: tuple[int, ...],
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]],
) -> Iterator[np.ndarray]:
    if sorted(wanted) != sorted(given) or len(given) > MOST_DIMENSIONS:
        return
    places = np.arange(int(np.prod(given))).reshape(given)
    for dimensions in itertools.permutations(range(len(given))):
        key = (given, dimensions)
        if tuple(given[k] for k in dimensions) == wanted and key not in seen:
            seen.add(key)
            yield places.transpose(dimensions).reshape(-1)


def _splits(coarse: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the ways to cut dimensions into factors of the given sizes, each of them used once."""
    if not coarse:
        if not sizes:
            yield ()
        return
    first, rest = coarse[0], coarse[1:]
    for count in range(1, len(sizes) - len(rest) + 1):
        for factors in set(itertools.permutations(sizes, count)):
            if int(np.prod(factors)) != first:
                continue
            left = list(sizes)
            for factor in factors:
                left.remove(factor)
            for others in _splits(rest, tuple(left)):
                yield (*factors, *others)


def shape_of(shape: Sequence[int], elements: int) -> tuple[int, ...]:
    """Return the shape of a value's flat elements; a complex number is two of them."""
    sizes = tuple(shape)
    return sizes if int(np.prod(sizes)) == elements else (*sizes, 2)


def order_of_equals(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the order in which one value lies in another with the same elements."""
    order = np.empty(ours.size, dtype=int)
    order[np.argsort(ours, kind="stable")] = np.argsort(theirs, kind="stable")
    return order


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)
