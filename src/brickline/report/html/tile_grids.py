"""Tiles by row and column: one grid of mean times for each level and brick.

Owns how many cells a page holds; it knows nothing of how a grid is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brickline.profile import Profile
from brickline.profile_rows import TileCell, TileStats
from brickline.report.html.bands import bands
from brickline.report.html.page import named

MAX_GRIDS = 40
"""Levels and bricks on a page, those with the longest time."""
MAX_SIDE = 64
"""Rows and columns of one grid; neighbours share a cell where there are more."""


def tile_grids(profile: Profile) -> dict[str, Any] | None:
    """Return the grids, or None for a run without tiles."""
    if not profile.tiles:
        return None
    longest = sorted(profile.tiles, key=lambda tile: -tile.total_ns)
    peak = profile.peaks.gflops if profile.peaks else None
    return {
        "left_out": max(0, len(longest) - MAX_GRIDS),
        "grids": [_grid(tile, peak) for tile in longest[:MAX_GRIDS]],
    }


def _grid(tile: TileStats, peak: float | None) -> dict[str, Any]:
    placed = [cell for cell in tile.cells if cell.row is not None and cell.column is not None]
    past = [cell for cell in tile.cells if cell.row is None]
    rows = bands(sorted({cell.row for cell in placed if cell.row is not None}), MAX_SIDE)
    columns = bands(sorted({cell.column for cell in placed if cell.column is not None}), MAX_SIDE)
    sums: dict[tuple[int, int], list[TileCell]] = {}
    for cell in placed:
        if cell.row is not None and cell.column is not None:
            sums.setdefault((rows[1][cell.row], columns[1][cell.column]), []).append(cell)
    return {
        "level": tile.level_name,
        "owner": named(tile.owner) if tile.owner is not None else None,
        "count": tile.count,
        "timed": tile.timed,
        "avg_us": tile.avg_us,
        "p50_us": tile.p50_ns / 1e3,
        "p99_us": tile.p99_ns / 1e3,
        "max_us": tile.max_us,
        "total_ns": tile.total_ns,
        "gflops": tile.gflops,
        "peak_share": tile.peak_share(peak) if peak else None,
        "rows": rows[0],
        "columns": columns[0],
        "cells": [[*place, *_cell(cells)] for place, cells in sorted(sums.items())],
        "past_bound": sum(cell.count for cell in past),
    }


def _cell(cells: Sequence[TileCell]) -> tuple[int, int, int, int, float]:
    """Return count, total, shortest, longest and GFLOP/s of the cells together."""
    total = sum(cell.total_ns for cell in cells)
    flops = sum(cell.total_flops for cell in cells)
    return (
        sum(cell.count for cell in cells),
        total,
        min(cell.min_ns for cell in cells),
        max(cell.max_ns for cell in cells),
        round(flops / total, 3) if total else 0.0,
    )
