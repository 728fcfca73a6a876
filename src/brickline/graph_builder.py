"""GraphBuilder: how an execution graph is filled, with nodes, edges and scopes.

Owns the checks of what is added and that recorded nodes are placed; the rows are the core's, what
is open on a thread is in `brickline.graph_scopes`. Knows nothing of reading, analyses or exports.
"""

from __future__ import annotations

import math
from typing import Self

from brickline import _core
from brickline.bricks import BrickId
from brickline.errors import CountError, GraphError
from brickline.graph_arguments import (
    MAX_U32,
    count,
    dim3,
    direction_code,
    graph_errors,
    node_id,
    number,
    optional_count,
    rate,
    text,
)
from brickline.graph_rows import EdgeKind, TransferDirection
from brickline.graph_scopes import GraphScopes, Scope


class GraphBuilder:
    """The half of an `ExecutionGraph` that fills it; the contract stands there."""

    def __init__(self, node_budget: int = 1_000_000) -> None:
        self._attach(_core.GraphStore(count("node_budget", node_budget, MAX_U32 - 1)))

    @classmethod
    def from_store(cls, store: _core.GraphStore) -> Self:
        """Return a graph over rows that the core fills, such as a profiler's."""
        graph = cls.__new__(cls)
        graph._attach(store)
        return graph

    @property
    def store(self) -> _core.GraphStore:
        """The rows themselves, for the core and for runs."""
        return self._store

    def follow(self, profiler: _core.ProfilerCore) -> None:
        """Take the bricks that are open in a profiler for scopes of their threads."""
        self._scopes.profiler = profiler

    def _attach(self, store: _core.GraphStore) -> None:
        self._store = store
        self._scopes = GraphScopes(store)

    # Adding nodes

    def add_brick(
        self,
        brick: BrickId | int | str,
        *,
        timing_ns: int | None = None,
        elements: int = 0,
        layer: int | None = None,
        start_ns: int | None = None,
    ) -> int:
        """Add a brick and return its id.

        Args:
            brick: An id, or a name; a known name or alias becomes its id, any other is dynamic.
            timing_ns: Inclusive time. Default None: not measured.
            elements: How many elements it worked on.
            layer: The model layer, when it belongs to one.
            start_ns: When it started, on any one clock.
        """
        if isinstance(brick, str):
            known = BrickId.from_name(brick)
        else:
            known = BrickId(count("brick", brick, BrickId.COUNT - 1))
        name = text("brick", brick) if known is None else known.label
        return self._add_brick(name, known, timing_ns, elements, layer, start_ns)

    def _add_brick(
        self,
        name: str,
        brick: int | None,
        timing_ns: int | None,
        elements: int,
        layer: int | None,
        start_ns: int | None,
    ) -> int:
        return self._store.add_brick(
            name,
            -1 if brick is None else int(brick),
            -1 if layer is None else count("layer", layer, 2**31 - 1),
            optional_count("timing_ns", timing_ns),
            count("elements", elements),
            count("start_ns", start_ns or 0),
        )

    def add_kernel(
        self,
        name: str,
        source_hash: int = 0,
        grid: int | tuple[int, ...] = 1,
        block: int | tuple[int, ...] = 1,
        shared_bytes: int = 0,
        *,
        timing_ns: int | None = None,
        arithmetic_intensity: float | None = None,
        achieved_tflops: float | None = None,
        start_ns: int | None = None,
    ) -> int:
        """Add one kernel launch and return its id.

        Args:
            name: The kernel's name.
            source_hash: From `KernelRegistry.register`. Default 0: not known.
            grid: Blocks launched; missing dimensions are 1.
            block: Threads of a block; missing dimensions are 1.
            shared_bytes: Dynamic shared memory of a block.
            timing_ns: Measured time. Default None: not measured.
            arithmetic_intensity: FLOP per byte, for `roofline_distance`.
            achieved_tflops: Measured rate, for `roofline_distance`.
            start_ns: When it started, on any one clock.
        """
        return self._store.add_kernel(
            text("name", name),
            count("source_hash", source_hash, 2**64 - 1),
            dim3("grid", grid),
            dim3("block", block),
            count("shared_bytes", shared_bytes, MAX_U32),
            optional_count("timing_ns", timing_ns),
            rate("arithmetic_intensity", arithmetic_intensity),
            rate("achieved_tflops", achieved_tflops),
            count("start_ns", start_ns or 0),
        )

    def add_transfer(
        self,
        source: str,
        target: str,
        size_bytes: int,
        direction: TransferDirection,
        *,
        timing_ns: int | None = None,
        start_ns: int | None = None,
    ) -> int:
        """Add a copy of ``size_bytes`` from one place to another and return its id."""
        return self._store.add_transfer(
            text("source", source),
            text("target", target),
            count("size_bytes", size_bytes),
            direction_code(direction),
            optional_count("timing_ns", timing_ns),
            count("start_ns", start_ns or 0),
        )

    def add_function(
        self,
        name: str,
        file: str | None = None,
        line: int | None = None,
        *,
        timing_ns: int | None = None,
        start_ns: int | None = None,
    ) -> int:
        """Add a host function and return its id."""
        return self._store.add_function(
            text("name", name),
            None if file is None else text("file", file),
            count("line", line or 0, MAX_U32),
            optional_count("timing_ns", timing_ns),
            count("start_ns", start_ns or 0),
        )

    def add_layer(
        self, index: int, *, timing_ns: int | None = None, start_ns: int | None = None
    ) -> int:
        """Add a model layer, named ``Layer{index}``, and return its id."""
        return self._store.add_layer(
            count("index", index, 2**31 - 1),
            optional_count("timing_ns", timing_ns),
            count("start_ns", start_ns or 0),
        )

    def add_async_task(
        self,
        name: str,
        poll_count: int,
        yield_count: int,
        total_poll_ns: int,
        *,
        start_ns: int | None = None,
    ) -> int:
        """Add an async task and return its id; its time is the time spent in polls."""
        return self._store.add_async_task(
            text("name", name),
            count("poll_count", poll_count),
            count("yield_count", yield_count),
            count("total_poll_ns", total_poll_ns),
            count("start_ns", start_ns or 0),
        )

    # Adding edges

    def add_edge(
        self,
        source: int,
        target: int,
        kind: EdgeKind,
        *,
        weight: float = 1.0,
        size_bytes: int | None = None,
        direction: TransferDirection | None = None,
    ) -> None:
        """Add an edge.

        Args:
            source: The containing, calling, launching or earlier node.
            target: The contained, called, launched or later node.
            kind: What the edge says.
            weight: A finite number to keep with it. Default 1.
            size_bytes: Bytes moved, on a ``TRANSFER`` edge; ``direction`` goes with it.
            direction: Which way they moved.
        """
        ends = node_id(source), node_id(target)
        try:
            kind = EdgeKind(kind)
        except ValueError:
            raise GraphError(f"expected an EdgeKind, got {kind!r}") from None
        weight = number("weight", weight)
        if not math.isfinite(weight) or abs(weight) > 3.4e38:
            raise CountError(f"expected a finite single-precision weight, got {weight}")
        if (size_bytes is None) != (direction is None) or (
            size_bytes is not None and kind is not EdgeKind.TRANSFER
        ):
            raise GraphError("expected size_bytes and direction together, on a TRANSFER edge only")
        with graph_errors():
            if size_bytes is None or direction is None:
                self._store.add_edge(*ends, kind, weight)
            else:
                moved = count("size_bytes", size_bytes), direction_code(direction)
                self._store.add_transfer_edge(*ends, *moved, weight)

    def add_dependency(self, source: int, target: int) -> None:
        """Say that ``target`` starts after ``source`` has finished."""
        self.add_edge(source, target, EdgeKind.DEPENDS_ON)

    # Scopes

    def push_scope(self, node: int, *, sequence: bool = True) -> int:
        """Open a node as the calling thread's current scope and return its id.

        A node that nothing contains yet is placed in the scope that was current, as `record_brick`
        would place it.

        Args:
            node: The node to open.
            sequence: Whether it follows what the outer scope held last. Default True, because one
                thread does one thing after another; give False for work that overlaps.
        """
        return self._scopes.push(node_id(node), sequence)

    def pop_scope(self) -> int:
        """Close the calling thread's current scope and return its node.

        Raises:
            GraphError: No scope is open on this thread.
        """
        return self._scopes.pop()

    def scope(self, node: int, *, sequence: bool = True) -> Scope:
        """Return ``node`` as a ``with`` block: `push_scope` and, however it is left, `pop_scope`.

        Args:
            node: The node to open; ``as`` gives its id.
            sequence: As for `push_scope`.
        """
        return Scope(self._scopes, node_id(node), sequence)

    @property
    def current_scope(self) -> int | None:
        """The innermost open node of the calling thread, or None."""
        return self._scopes.current()

    def is_scope_balanced(self) -> bool:
        """Whether every scope that any thread opened has been closed."""
        return self._scopes.open_count == 0

    # Recording into the current scope

    def record_brick(
        self,
        brick: BrickId | int | str,
        *,
        timing_ns: int | None = None,
        elements: int = 0,
        layer: int | None = None,
        start_ns: int | None = None,
        sequence: bool = True,
    ) -> int:
        """Add a brick inside the current scope; see `add_brick` and `push_scope`."""
        node = self.add_brick(
            brick, timing_ns=timing_ns, elements=elements, layer=layer, start_ns=start_ns
        )
        self._scopes.place(node, EdgeKind.CONTAINS, sequence)
        return node

    def record_kernel_launch(
        self,
        name: str,
        source_hash: int = 0,
        grid: int | tuple[int, ...] = 1,
        block: int | tuple[int, ...] = 1,
        shared_bytes: int = 0,
        *,
        timing_ns: int | None = None,
        arithmetic_intensity: float | None = None,
        achieved_tflops: float | None = None,
        start_ns: int | None = None,
        sequence: bool = True,
    ) -> int:
        """Add a kernel that the current scope launches, with what was measured of it.

        See `add_kernel` and, for ``sequence``, `push_scope`; give ``sequence=False`` for launches
        on different streams.
        """
        node = self.add_kernel(
            name,
            source_hash,
            grid,
            block,
            shared_bytes,
            timing_ns=timing_ns,
            arithmetic_intensity=arithmetic_intensity,
            achieved_tflops=achieved_tflops,
            start_ns=start_ns,
        )
        self._scopes.place(node, EdgeKind.LAUNCHES, sequence)
        return node

    def record_transfer(
        self,
        source: str,
        target: str,
        size_bytes: int,
        direction: TransferDirection,
        *,
        timing_ns: int | None = None,
        start_ns: int | None = None,
        sequence: bool = True,
    ) -> int:
        """Add a transfer inside the current scope; see `add_transfer` and `push_scope`."""
        node = self.add_transfer(
            source, target, size_bytes, direction, timing_ns=timing_ns, start_ns=start_ns
        )
        self._scopes.place(node, EdgeKind.CONTAINS, sequence)
        return node

    def clear(self) -> None:
        """Remove everything, open scopes included; ids start at 0 again."""
        self._scopes.clear()
        self._store.clear()
