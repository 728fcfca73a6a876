"""Bands of neighbours: how many places share a few columns of a page."""

from __future__ import annotations

from collections.abc import Sequence


def bands(places: Sequence[int], most: int) -> tuple[list[str], dict[int, int]]:
    """Return a label per band, at most ``most`` of them, and the band of each place.

    Args:
        places: numbers in ascending order, such as layers.
        most: bands at most; with no more places than that each has its own.
    """
    size = max(1, -(-len(places) // most))
    labels: list[str] = []
    band_of: dict[int, int] = {}
    for start in range(0, len(places), size):
        group = places[start : start + size]
        band_of |= dict.fromkeys(group, len(labels))
        labels.append(str(group[0]) if len(group) == 1 else f"{group[0]}–{group[-1]}")
    return labels, band_of
