"""The open scopes of an execution graph, per thread.

Owns where a recorded node is placed: inside the innermost open node of the calling thread, after
what that held last. A brick that a profiler measures counts as open although it is drawn when it
ends. Knows nothing of kinds, times or analyses.
"""

from __future__ import annotations

import threading
from types import TracebackType

from brickline import _core
from brickline.errors import GraphError
from brickline.graph_arguments import graph_errors
from brickline.graph_rows import NO_NODE, EdgeKind


class _Frame:
    """An open scope of one thread; the outermost frame has no node."""

    __slots__ = ("depth", "last_content", "node", "opened_by")

    def __init__(self, node: int | None, depth: int = 0, opened_by: Scope | None = None) -> None:
        self.node = node
        self.opened_by = opened_by
        """The ``with`` block that opened it; nodes that were not stored have one id for all."""
        self.depth = depth
        """How many bricks were open when it was opened."""
        self.last_content: int | None = None


class _ThreadFrames(threading.local):
    """The frames of the calling thread; void once the graph's generation has moved."""

    def __init__(self) -> None:
        self.generation = -1
        self.frames: list[_Frame] = []


class GraphScopes:
    """Open scopes of one graph, a stack for each thread."""

    def __init__(self, store: _core.GraphStore) -> None:
        self._store = store
        self._local = _ThreadFrames()
        self._lock = threading.Lock()
        # No containment edge tells of these that they were placed before: an outermost node never
        # has one, and what lies in a brick gets it when the brick ends.
        self._placed: set[int] = set()
        self.profiler: _core.ProfilerCore | None = None
        """Whose open bricks count as scopes."""
        self.generation = 0
        self.open_count = 0
        """Open scopes of all threads together."""

    def _frames(self) -> list[_Frame]:
        local = self._local
        if local.generation != self.generation:
            local.generation = self.generation
            local.frames = [_Frame(None)]
        return local.frames

    def _count(self, change: int) -> None:
        with self._lock:
            self.open_count += change

    def _innermost(self) -> _Frame:
        # A scope that was opened while the graph took nothing has no node to hold what follows.
        return next(frame for frame in reversed(self._frames()) if frame.node != NO_NODE)

    def current(self) -> int | None:
        """Return the innermost open node of the calling thread."""
        return self._innermost().node

    def place(self, node: int, kind: EdgeKind, sequence: bool) -> None:
        """Put a node inside the current scope, unless it has its place already."""
        if node == NO_NODE or not self._store.is_open():
            return
        frame = self._innermost()
        with graph_errors():
            if self._store.is_contained(node) or node in self._placed:
                return
            if self.profiler is not None and self._open_bricks() > frame.depth:
                self._placed.add(node)
                self.profiler._place_in_open(node, kind, sequence)
                return
            if frame.node is None:
                self._placed.add(node)
            else:
                self._store.add_edge(frame.node, node, kind)
            if sequence and frame.last_content is not None:
                self._store.add_edge(frame.last_content, node, EdgeKind.SEQUENCE)
        frame.last_content = node

    def push(self, node: int, sequence: bool, opened_by: Scope | None = None) -> int:
        """Place a node and open it."""
        self.place(node, EdgeKind.CONTAINS, sequence)
        self._frames().append(_Frame(node, self._open_bricks(), opened_by))
        self._count(+1)
        return node

    def _open_bricks(self) -> int:
        return 0 if self.profiler is None else self.profiler._open_depth()

    def pop(self) -> int:
        """Close the innermost scope of the calling thread."""
        frames = self._frames()
        node = frames[-1].node
        if node is None:
            raise GraphError(
                "expected an open scope on this thread, got none; call push_scope first, on the "
                "same thread, or use `with graph.scope(node)`"
            )
        frames.pop()
        self._count(-1)
        return node

    def leave(self, scope: Scope, quiet: bool) -> None:
        """Close a scope that a ``with`` block opened, and what was left open inside it."""
        frames = self._frames()
        depth = next((i for i in range(len(frames) - 1, 0, -1) if frames[i].opened_by is scope), 0)
        if depth == 0:
            raise GraphError(
                f"expected node {scope.node} to be an open scope of this thread, got none such; "
                "leave a scope on the thread that entered it, and do not pop it by hand inside "
                "`with`"
            )
        left_open = [frame.node for frame in frames[depth + 1 :]]
        # Closed before the complaint, so that what is recorded next lands in the right place.
        del frames[depth:]
        self._count(-1 - len(left_open))
        if left_open and not quiet:
            raise GraphError(
                f"expected node {scope.node} as the innermost scope, got {left_open} still open "
                "inside; close inner scopes with pop_scope before the `with` block ends"
            )

    def clear(self) -> None:
        """Forget every scope of every thread."""
        with self._lock:
            self.generation += 1
            self.open_count = 0
            self._placed = set()


class Scope:
    """A node as a ``with`` block; made by `ExecutionGraph.scope`."""

    __slots__ = ("_generation", "_scopes", "_sequence", "node")

    def __init__(self, scopes: GraphScopes, node: int, sequence: bool) -> None:
        self._scopes = scopes
        self._sequence = sequence
        self._generation = -1
        self.node = node

    def __enter__(self) -> int:
        self._generation = self._scopes.generation
        return self._scopes.push(self.node, self._sequence, self)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A clear() inside the block has closed the scope already.
        if self._generation == self._scopes.generation:
            self._scopes.leave(self, quiet=exc_type is not None)
