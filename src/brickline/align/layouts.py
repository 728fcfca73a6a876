"""In which orders the elements of one value may lie in another.

An order is an index array: ``ours = theirs[order]``, of flat elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

MOST_DIMENSIONS = 5
"""Values of more dimensions are not looked at in other orders of them."""


def orders_by_shape(
    ours: Iterable[Sequence[int]], theirs: Iterable[Sequence[int]]
) -> Iterator[np.ndarray]:
    """Yield the orders in which dimensions of the same sizes are exchanged, the plainest first.

    Args:
        ours: Shapes in which a value of ours is seen, all of them in the same order of elements.
        theirs: Those of the other's.
    """
    pairs = itertools.product(map(_squeezed, ours), map(_squeezed, theirs))
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for wanted, given in pairs:
        if sorted(wanted) != sorted(given) or len(given) > MOST_DIMENSIONS:
            continue
        places = np.arange(int(np.prod(given))).reshape(given)
        for dimensions in itertools.permutations(range(len(given))):
            key = (given, dimensions)
            if tuple(given[k] for k in dimensions) == wanted and key not in seen:
                seen.add(key)
                yield places.transpose(dimensions).reshape(-1)


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
