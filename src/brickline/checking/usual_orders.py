"""The order of rows that joined weights have in most layers: that of another layer may be a fault.

Rows of one weight of the reference may lie in any order in a weight of the candidate that joins
several. What several layers, or several parts of one, have in common is meant.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import torch

from brickline.checking.stage import family_of
from brickline.checking.weights import WeightMap

IN_ORDER = ""
"""Stands for a reference of which several parts have their rows in order."""


class UsualOrders:
    """The orders of rows that are found more than once."""

    def __init__(self, weights: WeightMap) -> None:
        self._orders = _orders_of(weights)

    def of_layers(self, name: str, reference: str) -> np.ndarray | None:
        """Return the order of a reference's rows in other layers."""
        return self._orders.get((family_of(name), family_of(reference)))

    def near(self, name: str, reference: str, order: torch.Tensor) -> np.ndarray | None:
        """Return the order of rows in other layers, or else in other parts of a layer.

        That of another part begins where the order that was found begins.
        """
        families = family_of(name), family_of(reference)
        first = int(order.min())
        for place, start in ((families, 0), ((families[0], _kind(reference)), first)):
            usual = self._orders.get(place)
            if usual is not None and len(usual) == len(order):
                return usual + start
        in_order = (families[0], IN_ORDER) in self._orders
        return np.arange(len(order)) + first if in_order else None


def _kind(name: str) -> str:
    """Return the last words of a weight's name: its own, and that of the module that holds it."""
    return "…" + ".".join(name.split(".")[-2:])


def _orders_of(weights: WeightMap) -> dict[tuple[str, str], np.ndarray]:
    """Return the order of rows that most layers share, by the families of both names."""
    seen: defaultdict[tuple[str, str], Counter[tuple[int, ...]]] = defaultdict(Counter)
    for name, rows in (*weights.rows.items(), *weights.inverse.items()):
        own = family_of(name)
        for each in rows:
            order = each.ours[each.theirs.argsort()]
            part = tuple((order - order.min()).tolist())
            if part == tuple(range(len(part))):
                seen[own, IN_ORDER][()] += 1
            seen[own, family_of(each.reference)][tuple(order.tolist())] += 1
            seen[own, _kind(each.reference)][part] += 1
    found: dict[tuple[str, str], np.ndarray] = {}
    for families, orders in seen.items():
        usual, count = orders.most_common(1)[0]
        if count > 1:
            found[families] = np.array(usual)
    return found
