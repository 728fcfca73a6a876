"""ExecutionGraph: what ran inside what, what waited for what, and what that says.

Owns reading and the results of analyses. How a graph is filled is in `brickline.graph_builder`,
exports are in `brickline.graph_views`; rows and analyses are the core's. Knows nothing of
profilers, devices or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from brickline.graph_arguments import graph_errors, node_id, number, text
from brickline.graph_builder import GraphBuilder
from brickline.graph_rows import (
    NO_NODE,
    AsyncTaskDetail,
    EdgeKind,
    FunctionDetail,
    GraphEdge,
    GraphNode,
    GraphTables,
    KernelDetail,
    NodeKind,
    TransferDetail,
    TransferDirection,
    detail_dtype,
    edge_dtype,
    edges_from_tables,
    node_dtype,
    node_from_row,
    nodes_from_tables,
)
from brickline.kernel_registry import KernelRegistry, KernelSource

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "DROPPED_NODE",
    "AsyncTaskDetail",
    "CriticalPath",
    "EdgeKind",
    "ExecutionGraph",
    "FunctionDetail",
    "GraphEdge",
    "GraphNode",
    "GraphTables",
    "KernelDetail",
    "KernelRegistry",
    "KernelSource",
    "NodeKind",
    "PingPong",
    "RooflineDistance",
    "TransferDetail",
    "TransferDirection",
]

DROPPED_NODE = NO_NODE
"""The id of a node that was not stored: past the budget, or while a profiler's graph is disabled.

Accepted wherever a node is expected, and ignored there."""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of work that decides how long the whole takes; ``docs/graph.md`` defines it."""

    total_ns: int
    nodes: tuple[int, ...]
    """Ids of the nodes that add time, in order."""
    contributions_ns: tuple[int, ...]
    """What each adds: its time less what its contents cover. They sum to ``total_ns``."""
    starts_ns: tuple[int, ...]
    """When each contribution starts, from 0."""


@dataclass(frozen=True, slots=True)
class RooflineDistance:
    """How far below its roof a kernel ran."""

    node: int
    name: str
    attainable_tflops: float
    achieved_tflops: float
    distance: float
    """0 at the roof, towards 1 far below it."""
    is_memory_bound: bool


@dataclass(frozen=True, slots=True)
class PingPong:
    """Two transfers of which the second undoes the first."""

    first: int
    second: int
    size_bytes: int


class ExecutionGraph(GraphBuilder):
    """Nodes for bricks, kernels, transfers, functions, layers and tasks, and edges between them.

    ``add_*`` adds a node and nothing else. ``record_*`` also places it inside the calling
    thread's current scope, after what that scope held last. All calls are safe from several
    threads; scopes are per thread.

    Args:
        node_budget: How many nodes are stored, four edges for each. Default 1,000,000, about
            76 MB with two edges a node; nodes past it are counted in `dropped_nodes`.

    Example:
        >>> graph = ExecutionGraph()
        >>> with graph.scope(graph.add_layer(0)):
        ...     for brick_us in (50, 200, 150, 300):
        ...         _ = graph.record_brick("Work", timing_ns=brick_us * 1000)
        >>> graph.critical_path().total_ns
        700000
    """

    # Reading

    @property
    def num_nodes(self) -> int:
        """How many nodes are stored."""
        return self._store.counts()["nodes"]

    @property
    def num_edges(self) -> int:
        """How many edges are stored."""
        return self._store.counts()["edges"]

    @property
    def dropped_nodes(self) -> int:
        """How many nodes the budget did not admit."""
        return self._store.counts()["dropped_nodes"]

    @property
    def dropped_edges(self) -> int:
        """How many edges the budget did not admit, or led to a dropped node."""
        return self._store.counts()["dropped_edges"]

    @property
    def size_bytes(self) -> int:
        """Memory that the graph holds."""
        return self._store.bytes()

    def node(self, node: int) -> GraphNode:
        """Return one node.

        Raises:
            GraphError: There is no such node.
        """
        with graph_errors():
            return node_from_row(node, *self._store.node(node_id(node)))

    def nodes(self) -> list[GraphNode]:
        """Return every node, in id order."""
        strings, nodes, _, details = self._store.tables()
        return list(nodes_from_tables(strings, nodes, details))

    def edges(self) -> list[GraphEdge]:
        """Return every edge, in order of addition."""
        _, _, edges, details = self._store.tables()
        return list(edges_from_tables(edges, details))

    def nodes_by_name(self, name: str) -> list[GraphNode]:
        """Return all nodes of that name, in id order."""
        return [self.node(node) for node in self._store.nodes_by_name(text("name", name))]

    def node_by_name(self, name: str) -> GraphNode | None:
        """Return the last node of that name, or None."""
        node = self._store.last_node_by_name(text("name", name))
        return None if node is None else self.node(node)

    def outgoing_edges(self, node: int) -> list[GraphEdge]:
        """Return the edges that leave a node, in order of addition."""
        with graph_errors():
            return [self._edge(edge) for edge in self._store.outgoing(node_id(node))]

    def incoming_edges(self, node: int) -> list[GraphEdge]:
        """Return the edges that reach a node, in order of addition."""
        with graph_errors():
            return [self._edge(edge) for edge in self._store.incoming(node_id(node))]

    def _edge(self, index: int) -> GraphEdge:
        source, target, kind, weight, size_bytes, direction = self._store.edge(index)
        moved = None if direction is None else TransferDirection(direction)
        return GraphEdge(source, target, EdgeKind(kind), weight, size_bytes, moved)

    def kernel_nodes(self) -> list[GraphNode]:
        """Return every kernel node, in id order."""
        return [self.node(node) for node in self._store.kernel_ids()]

    # Analyses

    def slowest_kernel(self) -> GraphNode | None:
        """Return the kernel that took longest (the first of equals), or None if none was timed."""
        node = self._store.slowest_kernel()
        return None if node is None else self.node(node)

    def critical_path(self) -> CriticalPath:
        """Return the chain of dependent work that decides how long the whole takes.

        Only ``SEQUENCE``, ``DEPENDS_ON`` and ``TRANSFER`` edges make a node wait. Containment
        does not add up: a container adds only the time that its contents do not cover.

        Raises:
            GraphError: Nodes wait for each other; the message names them.
        """
        with graph_errors():
            total_ns, nodes, starts_ns, contributions_ns = self._store.critical_path()
        columns = (tuple(column.tolist()) for column in (nodes, contributions_ns, starts_ns))
        return CriticalPath(total_ns, *columns)

    def slack(self) -> npt.NDArray[np.uint64]:
        """Return, by node id, by how many ns a node may finish later without delaying the whole.

        Raises:
            GraphError: Nodes wait for each other; the message names them.
        """
        with graph_errors():
            return self._store.slack()

    def critical_path_summary(self, *, max_rows: int = 40) -> str:
        """Return the critical path as text, with the nodes that have most slack below it."""
        from brickline.graph_views import path_summary

        return path_summary(self, max_rows)

    def roofline_distance(self, peak_tflops: float, peak_gbps: float) -> list[RooflineDistance]:
        """Return how far each kernel ran below the roof that its arithmetic intensity sets.

        Kernels without an achieved rate, or with an arithmetic intensity of 0, are left out.

        Args:
            peak_tflops: Measured compute peak, above 0.
            peak_gbps: Measured memory bandwidth in GB/s, above 0.
        """
        with graph_errors():
            peaks = number("peak_tflops", peak_tflops), number("peak_gbps", peak_gbps)
            rows = self._store.roofline_distance(*peaks)
        return [RooflineDistance(row[0], self.node(row[0]).name, *row[1:]) for row in rows]

    def ping_pong(self) -> list[PingPong]:
        """Return pairs of transfers that move equal bytes to a device place and back, or reversed.

        Each transfer is paired with at most one earlier transfer, the nearest that is still free.
        """
        return [PingPong(*row) for row in self._store.ping_pong()]

    # Exports

    def to_dot(self) -> str:
        """Return the graph in Graphviz's language."""
        from brickline.graph_views import dot

        return dot(self.nodes(), self.edges())

    def to_tree(self, *, max_depth: int = 12, max_rows: int = 200) -> str:
        """Return what contains what as text; identical siblings share a row marked ``×12``.

        Args:
            max_depth: Levels shown. Default 12.
            max_rows: Rows shown. Default 200; a last line says how many nodes were left out.
        """
        from brickline.graph_views import tree

        containers = self._store.containers().tolist()
        return tree(self.nodes(), containers, max_depth=max_depth, max_rows=max_rows)

    def _repr_html_(self) -> str:
        from brickline.graph_views import tree_html

        return tree_html(self)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the graph as JSON of a versioned form; `from_json` reads it back."""
        from brickline.graph_views import json_text

        return json_text(self, indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> ExecutionGraph:
        """Return the graph that `to_json` wrote; scopes are closed.

        Raises:
            GraphError: The text is not such JSON, or was written by a newer version.
        """
        from brickline.graph_views import fill_from_json

        return fill_from_json(cls, text)

    def tables(self) -> GraphTables:
        """Return the graph as tables, as a run stores it."""
        import numpy as np

        strings, nodes, edges, details = self._store.tables()
        return GraphTables(
            strings,
            np.frombuffer(nodes, node_dtype()),
            np.frombuffer(edges, edge_dtype()),
            np.frombuffer(details, detail_dtype()),
        )

    @classmethod
    def from_tables(cls, tables: GraphTables, *, drop_torn_tail: bool = False) -> ExecutionGraph:
        """Return the graph that tables describe; every id and kind is checked.

        Args:
            tables: What `tables` returned, or a run held.
            drop_torn_tail: Leave out rows at the ends whose node, edge or name never arrived, as
                when a recording was killed. Default False: they are errors.

        Raises:
            GraphError: A row is out of range or of an unknown kind.
        """
        graph = cls(node_budget=max(1_000_000, len(tables.nodes), len(tables.edges) // 4 + 1))
        rows = tables.nodes.tobytes(), tables.edges.tobytes(), tables.details.tobytes()
        with graph_errors():
            graph._store.load(list(tables.strings), *rows, drop_torn_tail)
        return graph

    def __len__(self) -> int:
        return self.num_nodes

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"ExecutionGraph({self.num_nodes} nodes, {self.num_edges} edges)"
