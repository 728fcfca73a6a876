"""The execution graph of a page: a tree that is cut to size, and what its critical path is made of.

Works on the graph's tables, so that a graph of a million nodes costs a few passes over arrays. The
first rows of every level stay, level by level; the rest is counted where it would have stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.errors import GraphError
from brickline.graph import ExecutionGraph
from brickline.graph_rows import NO_NODE, TIMED, NodeKind
from brickline.profile import Profile
from brickline.report.html.page import named
from brickline.runs import Part

Ids: TypeAlias = NDArray[np.uint32]
Times: TypeAlias = NDArray[np.int64]

MAX_GRAPHS = 8
"""Processes whose graphs a page shows."""
MAX_ROWS = 2500
"""Rows of all trees together."""
MAX_CHILDREN = 400
"""Rows directly inside one row."""
MAX_ALIKE = 8
"""More siblings of one kind and name than this share a row."""
MAX_PATH = 600
"""Pieces of a path that are drawn; the rest is drawn as one."""
MAX_LABEL = 80
"""Characters of a name."""
MAX_PATH_NAMES = 60
"""Names that the path is summed by."""


def graph_views(profile: Profile) -> dict[str, Any]:
    """Return the trees of all processes that drew a graph."""
    parts = [part for part in profile.parts if len(part.graph.nodes)]
    return {
        "left_out": max(0, len(parts) - MAX_GRAPHS),
        "graphs": [
            _view(part, MAX_ROWS // min(len(parts), MAX_GRAPHS)) for part in parts[:MAX_GRAPHS]
        ],
    }


def _view(part: Part, max_rows: int) -> dict[str, Any]:
    view: dict[str, Any] = {"process": int(part.header.get("process", 0))}
    try:
        graph = ExecutionGraph.from_tables(part.graph, drop_torn_tail=True)
        tables = graph.tables()
        tree = _Tree(tables.nodes, tables.strings, graph.store.containers(), max_rows)
    except GraphError as error:
        return view | {"problem": named(f"the graph cannot be drawn: {error}")}
    view |= {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "dropped_nodes": graph.dropped_nodes,
    }
    try:
        path = graph.critical_path()
        slack = graph.slack()
    except GraphError as error:
        view["problem"] = named(f"no critical path: {error}")
        return view | {"tree": tree.fields(None)}
    contributions = np.zeros(graph.num_nodes, np.uint64)
    contributions[list(path.nodes)] = path.contributions_ns
    tree.contributions, tree.slack = contributions, slack
    names = tables.nodes["name"][list(path.nodes)]
    times = np.array(path.contributions_ns, np.int64)
    return view | {
        "tree": tree.fields(path.total_ns),
        "path": {
            "total_ns": path.total_ns,
            "nodes": len(path.nodes),
            "pieces": _pieces(names, times, tables.strings),
            "names": _by_name(names, times, tables.strings),
        },
    }


def _pieces(names: Ids, times: Times, strings: Sequence[str]) -> list[tuple[str, int]]:
    """Return name and time along the path; neighbours of one name are one piece."""
    if not len(names):
        return []
    starts = np.flatnonzero(np.append(True, names[1:] != names[:-1]))
    sums = np.add.reduceat(times, starts).tolist()
    shown = [named(strings[name], MAX_LABEL) for name in names[starts[:MAX_PATH]].tolist()]
    pieces = list(zip(shown, sums, strict=False))
    rest = sum(sums[MAX_PATH:])
    return pieces + ([("…", rest)] if rest else [])


def _by_name(names: Ids, times: Times, strings: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return name, nodes and time of what the path is made of, longest first."""
    found, place, counts = np.unique(names, return_inverse=True, return_counts=True)
    sums = np.zeros(len(found), np.int64)
    np.add.at(sums, place, times)
    order = np.argsort(-sums, kind="stable")
    shown = [
        (named(strings[int(found[at])], MAX_LABEL), int(counts[at]), int(sums[at]))
        for at in order[:MAX_PATH_NAMES].tolist()
    ]
    rest = order[MAX_PATH_NAMES:]
    if len(rest):
        shown.append((f"{len(rest):,} other names", int(counts[rest].sum()), int(sums[rest].sum())))
    return shown


@dataclass
class _Row:
    """One row of the tree: a node, or siblings that read alike."""

    nodes: NDArray[np.int64]
    parent: int
    hidden: int = 0
    """Nodes directly inside it that have no row."""


@dataclass
class _Tree:
    """Rows level by level, until the page's share is full."""

    nodes: NDArray[Any]
    strings: Sequence[str]
    containers: NDArray[Any]
    max_rows: int
    contributions: NDArray[np.uint64] | None = None
    slack: NDArray[np.uint64] | None = None
    rows: list[_Row] = field(default_factory=list)
    hidden_roots: int = 0

    def __post_init__(self) -> None:
        # Nodes sorted by container: what lies in one is a slice, in order of time. What lies in
        # none comes last.
        size = len(self.nodes)
        within = np.where(self.containers == NO_NODE, size, self.containers).astype(np.int64)
        self._order = np.lexsort((self._starts_ns(within), within))
        self._starts = np.append(0, np.cumsum(np.bincount(within, minlength=size + 1)))
        self._fill()

    def _starts_ns(self, within: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return when each node started; one without a time of its own with its first content."""
        unknown = np.iinfo(np.uint64).max
        starts = np.where(self.nodes["start_ns"] == 0, unknown, self.nodes["start_ns"])
        first = np.full(len(starts) + 1, unknown, np.uint64)
        np.minimum.at(first, within, starts)
        return np.where(starts == unknown, first[:-1], starts)

    def _inside(self, containers: NDArray[np.int64]) -> NDArray[np.int64]:
        starts, ends = self._starts[containers].tolist(), self._starts[containers + 1].tolist()
        return np.concatenate([self._order[a:b] for a, b in zip(starts, ends, strict=True)])

    def _fill(self) -> None:
        self.hidden_roots = self._add(self._inside(np.array([len(self.nodes)])), -1)
        at = 0
        while at < len(self.rows):
            row = self.rows[at]
            row.hidden = self._add(self._inside(row.nodes), at)
            at += 1

    def _add(self, nodes: NDArray[np.int64], parent: int) -> int:
        """Add a row for each group of nodes while there is room, and return how many have none."""
        if not len(nodes):
            return 0
        room = min(MAX_CHILDREN, self.max_rows - len(self.rows))
        groups = self._groups(nodes)
        self.rows += [_Row(group, parent) for group in groups[:room]]
        return sum(len(group) for group in groups[room:])

    def _groups(self, nodes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the nodes in order, those that share a row together at the first one's place."""
        keys = self.nodes["name"][nodes].astype(np.int64) << 8 | self.nodes["kind"][nodes]
        _, first, group_of, sizes = np.unique(
            keys, return_index=True, return_inverse=True, return_counts=True
        )
        alike = sizes > MAX_ALIKE
        by_group = np.split(np.argsort(group_of, kind="stable"), np.cumsum(sizes)[:-1])
        found = [
            (int(place), nodes[members])
            for shared, place, members in zip(alike, first, by_group, strict=True)
            if shared
        ]
        alone = np.flatnonzero(~alike[group_of])
        found += [(place, nodes[place : place + 1]) for place in alone.tolist()]
        return [group for _, group in sorted(found, key=lambda each: each[0])]

    def fields(self, total_ns: int | None) -> dict[str, Any]:
        """Return the rows as JSON values: a list per row, its parent before it."""
        return {
            "rows": [self._fields(row) for row in self.rows],
            "hidden_roots": self.hidden_roots,
            "shown": sum(len(row.nodes) for row in self.rows),
            "marked": total_ns is not None,
        }

    def _fields(self, row: _Row) -> list[Any]:
        """Return parent, name, kind, nodes, time, layer, on the path, slack, hidden."""
        first = self.nodes[int(row.nodes[0])]
        timed = (self.nodes["flags"][row.nodes] & TIMED) != 0
        timing = int(self.nodes["timing_ns"][row.nodes][timed].sum()) if timed.any() else None
        on_path = slack = 0
        if self.contributions is not None and self.slack is not None:
            on_path = int(self.contributions[row.nodes].sum())
            slack = int(self.slack[row.nodes].min())
        return [
            row.parent,
            named(self.strings[int(first["name"])], MAX_LABEL),
            NodeKind(int(first["kind"])).label,
            len(row.nodes),
            timing,
            on_path,
            slack,
            row.hidden,
        ]
