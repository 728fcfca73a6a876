"""From the rows of a run's nodes to statistics, whole groups at a time.

Knows the layouts of `abi.NODE` and `abi.BIN`, and nothing of slots, lanes or runs: the caller says
which rows belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.histogram import Histogram
from brickline.stats import SUMMED, BrickLabel, BrickStats, CategoryStats

_NODE_FIELDS = {
    "total_elements": "elements",
    "total_bytes": "bytes_in",
    "total_compressed_bytes": "bytes_out",
    "total_flops": "flops",
    "total_cycles": "cycles",
}
_NONE_U64 = np.iinfo(np.uint64).max


def _group_order(groups: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the order that makes groups contiguous, and where each begins."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    return order, starts


def _split_histograms(
    bins: NDArray[Any], zeros: list[int], groups: NDArray[Any]
) -> list[Histogram]:
    """Add the bins of every group; ``groups`` is the group of each node."""
    owner = groups[bins["node"]].astype(np.int64)
    key = owner * (1 << 16) + (bins["index"] + 1)
    unique, place = np.unique(key, return_inverse=True)
    counts = np.zeros(len(unique), np.uint64)
    np.add.at(counts, place, bins["count"])
    indices = ((unique & 0xFFFF) - 1).astype(np.int32)
    ends = np.searchsorted(unique >> 16, np.arange(len(zeros) + 1), side="left")
    cuts = ends.tolist()
    return [
        Histogram(indices[low:high], counts[low:high], zero)
        for low, high, zero in zip(cuts, cuts[1:], zeros, strict=False)
    ]


def stats_from_nodes(
    nodes: NDArray[Any],
    bins: NDArray[Any],
    groups: NDArray[Any],
    labels: Sequence[BrickLabel],
    on_device: NDArray[Any] | None = None,
) -> list[BrickStats]:
    """Fold node rows into one BrickStats per group.

    Args:
        nodes: rows of `abi.NODE`.
        bins: rows of `abi.BIN` that name rows of ``nodes``.
        groups: for every node its group, from 0 to ``len(labels) - 1``; no group is empty.
        labels: what each group stands for.
        on_device: for every node whether its times are a stream's. Default: none is.
    """
    if not labels:
        return []
    order, starts = _group_order(groups)
    rows = nodes[order]
    columns: dict[str, list[Any]] = {}
    streams = np.zeros(len(rows), bool) if on_device is None else on_device[order]
    for name in SUMMED:
        if name == "stream_ns":
            values = np.where(streams, rows["total_ns"], np.uint64(0))
        else:
            values = rows[_NODE_FIELDS.get(name, name)]
        columns[name] = np.add.reduceat(values, starts).tolist()
    for kind, known in (("ns", rows["timed"] > 0), ("cycles", rows["cycles_count"] > 0)):
        low = np.where(known, rows[f"min_{kind}"], _NONE_U64)
        lowest = np.minimum.reduceat(low, starts)
        columns[f"min_{kind}"] = np.where(lowest == _NONE_U64, np.uint64(0), lowest).tolist()
        high = np.where(known, rows[f"max_{kind}"], np.uint64(0))
        columns[f"max_{kind}"] = np.maximum.reduceat(high, starts).tolist()
    shifts, squares = _group_squares(rows, starts, columns)
    columns |= {"shift_ns": shifts, "sum_squares": squares}
    zeros = np.add.reduceat(rows["zero_count"], starts).tolist()
    columns["histogram"] = _split_histograms(bins, zeros, groups)
    names = list(columns)
    return [
        BrickStats(
            label.name,
            label.brick,
            label.category,
            label.layer,
            label.phase,
            **dict(zip(names, values, strict=True)),
        )
        for label, *values in zip(labels, *columns.values(), strict=True)
    ]


def _group_squares(
    rows: NDArray[Any], starts: NDArray[Any], columns: dict[str, list[Any]]
) -> tuple[list[int], list[float]]:
    """Return per group a shift near its mean and the sum of squares about it."""
    timed = rows["timed"].astype(np.float64)
    means = rows["total_ns"] / np.maximum(timed, 1.0)
    centred = rows["sum_squares"] - timed * (means - rows["shift_ns"]) ** 2
    shifts = [
        round(total / count) if count else 0
        for total, count in zip(columns["total_ns"], columns["timed"], strict=True)
    ]
    sizes = np.diff(np.append(starts, len(rows)))
    away = means - np.repeat(np.asarray(shifts, np.float64), sizes)
    about = np.where(timed > 0, np.maximum(centred, 0.0) + timed * away**2, 0.0)
    return shifts, np.add.reduceat(about, starts).tolist()


def category_stats_from_nodes(
    nodes: NDArray[Any], groups: NDArray[Any], names: Sequence[str], bricks: NDArray[Any]
) -> list[CategoryStats]:
    """Fold node rows into one CategoryStats per group; arguments as in `stats_from_nodes`.

    Args:
        nodes: rows of `abi.NODE`.
        groups: for every node its group.
        names: what each group is called.
        bricks: for every node a number of its brick. Sampling is undone brick by brick within a
            group, because one node may hold what was timed and another what was only counted.
    """
    if not names:
        return []
    order, starts = _group_order(groups)
    rows = nodes[order]
    fields = ("count", "timed", "total_ns", "exclusive_ns", "elements", "timed_elements")
    sums = [np.add.reduceat(rows[name], starts).tolist() for name in fields]
    _, members = np.unique(groups.astype(np.int64) << 32 | bricks, return_inverse=True)
    sums.append(np.add.reduceat(share_ns_of_nodes(nodes, members)[order], starts).tolist())
    return [CategoryStats(*row) for row in zip(names, *sums, strict=True)]


def share_ns_of_nodes(nodes: NDArray[Any], members: NDArray[Any]) -> NDArray[np.float64]:
    """Return each node's part of `BrickStats.share_ns` of the rows it is a member of."""
    count, timed = np.bincount(members, nodes["count"]), np.bincount(members, nodes["timed"])
    total = np.bincount(members, nodes["total_ns"])
    known = nodes["exclusive_count"] + nodes["out_of_order"]
    supplied = np.maximum(timed - np.bincount(members, known), 0.0)
    safe = np.maximum(timed, 1.0)
    row = (np.bincount(members, nodes["exclusive_ns"]) + total / safe * supplied) * (count / safe)
    # The row is dealt out to its nodes by their measured time.
    shares: NDArray[np.float64] = row[members] * nodes["total_ns"] / np.maximum(total, 1.0)[members]
    return shares
