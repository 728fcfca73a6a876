"""Share of brick time by layer: one grid of categories, one of bricks.

Owns which rows and columns there are; it knows nothing of how a grid is drawn.
"""

from __future__ import annotations

from typing import Any

from brickline.profile import Profile
from brickline.report.html.bands import bands
from brickline.report.html.page import named

MAX_COLUMNS = 64
"""More layers than this are shown in runs of neighbours."""
MAX_BRICK_ROWS = 40
"""Bricks of the second grid, those with the largest share; the others share the last row."""
OUTSIDE = "no layer"


def layer_heat(profile: Profile) -> dict[str, Any] | None:
    """Return the grids, or None for a run in which no brick has a layer."""
    if not profile.layers:
        return None
    columns, column_of = bands(sorted(profile.layers), MAX_COLUMNS)
    if any(row.layer is None for row in profile.brick_layers):
        columns.append(OUTSIDE)
    largest = sorted(profile.bricks, key=lambda row: -row.share_ns)
    shown = [row.name for row in largest[:MAX_BRICK_ROWS]]
    rest = len(largest) - len(shown)
    category_rows = sorted(profile.categories.values(), key=lambda row: -row.share_ns)
    categories = _Grid([row.name for row in category_rows], len(columns))
    bricks = _Grid([*shown, *([f"{rest:,} other bricks"] if rest else [])], len(columns))
    for row in profile.brick_layers:
        column = len(columns) - 1 if row.layer is None else column_of[row.layer]
        share = profile.share(row)
        categories.add(row.category.label, column, share)
        bricks.add(row.name, column, share)
    return {
        "columns": columns,
        "layers": len(profile.layers),
        "categories": categories.fields(),
        "bricks": bricks.fields(),
    }


class _Grid:
    """Shares by row and column; an unknown row name counts in the last row."""

    def __init__(self, names: list[str], columns: int) -> None:
        self.names = names
        self.row_of = {name: at for at, name in enumerate(names)}
        self.cells = [[0.0] * columns for _ in names]

    def add(self, name: str, column: int, share: float) -> None:
        """Count a share."""
        self.cells[self.row_of.get(name, len(self.cells) - 1)][column] += share

    def fields(self) -> dict[str, Any]:
        """Return the grid as JSON values; shares to six places, a ten-thousandth of a percent."""
        return {
            "rows": [named(name) for name in self.names],
            "cells": [[round(share, 6) for share in row] for row in self.cells],
        }
