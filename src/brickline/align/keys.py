"""Rows of two sides with equal keys belong together.

Owns the hashing of columns to one key a row, and the pairing of rows that share one. Knows nothing
of what the columns hold.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Keys: TypeAlias = NDArray[np.uint64]


def mixed(seed: NDArray[Any], value: NDArray[Any]) -> Keys:
    """Return a 64-bit hash of two columns (splitmix64's finaliser)."""
    out = np.asarray(seed).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    out = out + np.asarray(value).astype(np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed_up: Keys = out ^ (out >> np.uint64(31))
    return mixed_up


def hashed(*columns: NDArray[Any]) -> Keys:
    """Return a 64-bit hash of several columns, row by row."""
    out: Keys = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        out = mixed(out, column)
    return out


def pairs_by_key(ours: Keys, theirs: Keys) -> tuple[Ints, Ints]:
    """Return the rows with equal keys, in their order, where a key has as many rows on both sides.

    A key with more rows on one side is left out: a count alone would shift everything after it.
    """
    order_a, order_b = (np.argsort(keys, kind="stable") for keys in (ours, theirs))
    keys_a, start_a, count_a = np.unique(ours[order_a], return_index=True, return_counts=True)
    keys_b, start_b, count_b = np.unique(theirs[order_b], return_index=True, return_counts=True)
    _, at_a, at_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    equal = count_a[at_a] == count_b[at_b]
    at_a, at_b = at_a[equal], at_b[equal]
    rows_a, rows_b = (_spread(start, count_a[at_a]) for start in (start_a[at_a], start_b[at_b]))
    return order_a[rows_a], order_b[rows_b]


def _spread(start: Ints, count: Ints) -> Ints:
    """Return start, start + 1, … for each of several stretches."""
    offset = np.repeat(start - np.concatenate([[0], np.cumsum(count)[:-1]]), count)
    rows: Ints = offset + np.arange(int(count.sum()))
    return rows
