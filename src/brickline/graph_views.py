"""An execution graph as text: DOT, a tree, JSON, a summary of the critical path.

Owns only presentation; it reads a graph through its public calls and changes none.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from brickline.bricks import BrickId
from brickline.documents import parsed_json
from brickline.errors import CountError, GraphError
from brickline.graph_arguments import count, text
from brickline.graph_rows import (
    NO_NODE,
    AsyncTaskDetail,
    EdgeKind,
    FunctionDetail,
    GraphEdge,
    GraphNode,
    KernelDetail,
    NodeKind,
    TransferDetail,
    TransferDirection,
)

if TYPE_CHECKING:
    from brickline.graph import ExecutionGraph

JSON_FORMAT = "brickline-graph"
JSON_VERSION = 1
MAX_TREE_DEPTH = 200
MAX_INDENT = 16
NOTEBOOK_ROWS = 60
"""Rows of the tree in a notebook's output."""
# Above this, readers that hold numbers as doubles lose digits; such integers are written as text.
_EXACT_IN_DOUBLE = 2**53

_FILL = ("lightgreen", "lightyellow", "lightsalmon", "lightgray", "lightblue", "lightcyan")
_STYLE = (
    "style=solid",
    "style=dashed",
    'style=bold, color="red"',
    "style=dotted",
    'style=solid, color="blue"',
    'style=bold, color="orange"',
)


def _us(value_ns: int) -> str:
    return f"{value_ns / 1000:.1f} µs"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    # DOT has no escape for control characters, and a raw NUL ends the file for Graphviz.
    shown = "".join("\\n" if c == "\n" else c if c.isprintable() else "\ufffd" for c in escaped)
    return f'"{shown}"'


def dot(nodes: Sequence[GraphNode], edges: Sequence[GraphEdge]) -> str:
    """Return nodes and edges in Graphviz's language."""
    lines = ["digraph execution {", "  rankdir=TB;", "  node [shape=box, style=filled];"]
    for node in nodes:
        label = "\n".join([node.name, *_label_parts([node])])
        lines.append(f"  n{node.id} [label={_quoted(label)}, fillcolor={_FILL[node.kind]}];")
    lines.extend(f"  n{edge.source} -> n{edge.target} [{_STYLE[edge.kind]}];" for edge in edges)
    return "\n".join([*lines, "}", ""])


# Tree


class _Tree:
    """Rows of a text tree. A group holds siblings that read the same and share one row."""

    def __init__(
        self, nodes: Sequence[GraphNode], containers: Sequence[int], max_depth: int, max_rows: int
    ) -> None:
        self.nodes = nodes
        self.max_depth = max_depth
        self.max_rows = max_rows
        self.lines: list[str] = []
        self.shown = 0
        self.contents: dict[int, list[int]] = {}
        self.roots: list[int] = []
        for node, container in enumerate(containers):
            if container == NO_NODE:
                self.roots.append(node)
            else:
                self.contents.setdefault(container, []).append(node)

    def groups(self, nodes: Sequence[int]) -> list[list[int]]:
        found: dict[object, list[int]] = {}
        for node in nodes:
            found.setdefault(self.key(node), []).append(node)
        return list(found.values())

    def key(self, node_id: int) -> object:
        node = self.nodes[node_id]
        if node.kind is NodeKind.LAYER:
            # Layers differ by number only; those that hold the same things share a row.
            inside = [self.nodes[content] for content in self.contents.get(node_id, ())]
            return node.kind, tuple((content.kind, content.name) for content in inside)
        if isinstance(node.detail, KernelDetail):
            detail = node.detail
            return node.kind, node.name, detail.grid, detail.block, detail.shared_bytes
        if isinstance(node.detail, FunctionDetail):
            return node.kind, node.name, node.detail
        return node.kind, node.name

    def draw(self, group: list[int], prefix: str, branch: str, depth: int) -> None:
        self.lines.append(prefix + branch + group_label([self.nodes[node] for node in group]))
        self.shown += len(group)
        inner = prefix + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        contents = [content for node in group for content in self.contents.get(node, ())]
        if contents and depth >= self.max_depth:
            self.lines.append(f"{inner}└─ … {len(contents)} inside")
            return
        self.draw_all(self.groups(contents), inner, depth)

    def draw_all(self, groups: list[list[int]], prefix: str, depth: int) -> None:
        for index, group in enumerate(groups):
            if len(self.lines) >= self.max_rows:
                left = sum(len(other) for other in groups[index:])
                self.lines.append(f"{prefix}└─ … {left} more")
                return
            branch = "└─ " if index == len(groups) - 1 else "├─ "
            self.draw(group, prefix, branch, depth + 1)


def group_label(group: Sequence[GraphNode]) -> str:
    """Return the row of nodes that read the same."""
    first = group[0]
    parts = [first.name.replace("\n", " ")]
    if len(group) > 1:
        if first.kind is NodeKind.LAYER and first.name != group[-1].name:
            parts[0] += f"…{group[-1].name}"
        parts.append(f"×{len(group)}")
    return "  ".join([*parts, *_label_parts(group)])


def _label_parts(group: Sequence[GraphNode]) -> list[str]:
    """Return what is said of nodes that read the same, besides their name."""
    timed = [node.timing_ns for node in group if node.timing_ns is not None]
    elements = sum(node.elements for node in group)
    details = [node.detail for node in group if node.detail is not None]
    return [
        *([_us(sum(timed))] if timed else []),
        *([_counted(elements, "element")] if elements else []),
        *_detail_parts(details, sum(timed)),
    ]


def _detail_parts(details: Sequence[object], timing_ns: int) -> list[str]:
    if not details:
        return []
    first = details[0]
    if isinstance(first, KernelDetail):
        grid, block = (",".join(map(str, sizes)) for sizes in (first.grid, first.block))
        shared = [f"{first.shared_bytes} B shared"] if first.shared_bytes else []
        return [f"grid ({grid})", f"block ({block})", *shared]
    if isinstance(first, FunctionDetail):
        is_known = first.file is not None and first.line is not None
        return [f"{first.file}:{first.line}"] if is_known else []
    if isinstance(first, TransferDetail):
        moved = sum(d.size_bytes for d in details if isinstance(d, TransferDetail))
        return [_counted(moved, "byte")]
    tasks = [detail for detail in details if isinstance(detail, AsyncTaskDetail)]
    polls = sum(task.poll_count for task in tasks)
    yields = sum(task.yield_count for task in tasks)
    parts = [_counted(polls, "poll"), _counted(yields, "yield")]
    if polls:
        parts += [f"{_us(timing_ns // polls)} a poll", f"{len(tasks) / polls:.1%} efficient"]
    return parts


def tree(
    nodes: Sequence[GraphNode], containers: Sequence[int], *, max_depth: int, max_rows: int
) -> str:
    """Return containment as text.

    Args:
        nodes: Every node, in id order.
        containers: By node id, the node it lies in, or ``NO_NODE``.
        max_depth: Levels shown.
        max_rows: Rows shown.
    """
    max_depth, max_rows = count("max_depth", max_depth), count("max_rows", max_rows)
    if not 1 <= max_depth <= MAX_TREE_DEPTH or max_rows < 1:
        raise CountError(f"expected max_depth from 1 to {MAX_TREE_DEPTH} and max_rows from 1, got "
                         f"{max_depth} and {max_rows}")  # fmt: skip
    if not nodes:
        return "(empty graph)"
    view = _Tree(nodes, containers, max_depth, max_rows)
    groups = view.groups(view.roots)
    if len(groups) == 1:
        view.draw(groups[0], "", "", 1)
    else:
        view.lines.append("Execution graph")
        view.draw_all(groups, "", 0)
    if view.shown < len(nodes):
        left = len(nodes) - view.shown
        view.lines.append(
            f"left out: {left} of {len(nodes)} nodes (max_depth={max_depth}, max_rows={max_rows})"
        )
    return "\n".join(view.lines)


def tree_html(graph: ExecutionGraph) -> str:
    """Return containment for a notebook's output: the tree as plain text, with a few rows."""
    shown = graph.to_tree(max_rows=NOTEBOOK_ROWS)
    plain = "".join(each if each.isprintable() or each == "\n" else "�" for each in shown)
    return f"<pre>{html.escape(plain)}</pre>"


# Critical path


def path_summary(graph: ExecutionGraph, max_rows: int) -> str:
    """Return the critical path and the nodes with most slack as text."""
    import numpy as np

    max_rows = count("max_rows", max_rows)
    path = graph.critical_path()
    length = _counted(len(path.nodes), "node")
    title = f"Critical path: {path.total_ns / 1e6:.3f} ms over {length}"
    lines = [title, "─" * len(title)]
    steps = list(zip(path.nodes, path.contributions_ns, strict=True))
    for index, (node, contribution_ns) in enumerate(steps[:max_rows]):
        branch = "└─" if index == len(steps) - 1 else "├─"
        found = graph.node(node)
        partial = "" if found.timing_ns == contribution_ns else "  not covered by its contents"
        row = [f"{branch} {found.name}", _us(contribution_ns)]
        if isinstance(found.detail, AsyncTaskDetail):
            row += _detail_parts([found.detail], found.timing_ns or 0)
        lines.append("  ".join(row) + partial)
    if len(steps) > max_rows:
        rest_ns = sum(contribution for _, contribution in steps[max_rows:])
        lines.append(f"└─ … {_counted(len(steps) - max_rows, 'more node')}, {_us(rest_ns)}")
    slack = graph.slack()
    order = np.argsort(slack, kind="stable")[::-1][:5].tolist()
    loose = [node for node in order if slack[node] > 0]
    if loose:
        lines.append("Most slack:")
        lines.extend(f"   {graph.node(node).name}  {_us(int(slack[node]))}" for node in loose)
    return "\n".join(lines)


# JSON


def _number(value: int) -> int | str:
    return value if value <= _EXACT_IN_DOUBLE else str(value)


def _node_json(node: GraphNode) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": node.kind.label, "name": node.name}
    for field in ("timing_ns", "start_ns", "layer"):
        value = getattr(node, field)
        if value is not None:
            out[field] = _number(value)
    if node.elements:
        out["elements"] = _number(node.elements)
    if node.brick is not None:
        out["brick"] = int(node.brick)
    detail = node.detail
    if isinstance(detail, KernelDetail):
        out |= {"source_hash": f"0x{detail.source_hash:016x}", "grid": list(detail.grid),
                "block": list(detail.block), "shared_bytes": detail.shared_bytes}  # fmt: skip
        for rate in ("arithmetic_intensity", "achieved_tflops"):
            if getattr(detail, rate) is not None:
                out[rate] = getattr(detail, rate)
    elif isinstance(detail, TransferDetail):
        out |= {"source": detail.source, "target": detail.target,
                "size_bytes": _number(detail.size_bytes),
                "direction": detail.direction.label}  # fmt: skip
    elif isinstance(detail, FunctionDetail):
        places = {"file": detail.file, "line": detail.line}
        out |= {field: place for field, place in places.items() if place is not None}
    elif isinstance(detail, AsyncTaskDetail):
        out["poll_count"] = _number(detail.poll_count)
        out["yield_count"] = _number(detail.yield_count)
    return out


def _edge_json(edge: GraphEdge) -> dict[str, Any]:
    out: dict[str, Any] = {"source": edge.source, "target": edge.target, "kind": edge.kind.label}
    if edge.weight != 1.0:
        out["weight"] = edge.weight
    if edge.size_bytes is not None and edge.direction is not None:
        out["size_bytes"] = _number(edge.size_bytes)
        out["direction"] = edge.direction.label
    return out


def json_text(graph: ExecutionGraph, indent: int | None) -> str:
    """Return a graph as JSON. Times are in ns; a node's id is its place in ``nodes``."""
    indent = None if indent is None else count("indent", indent, MAX_INDENT)
    document = {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "dropped_nodes": graph.dropped_nodes,
        "dropped_edges": graph.dropped_edges,
        "nodes": [_node_json(node) for node in graph.nodes()],
        "edges": [_edge_json(edge) for edge in graph.edges()],
    }
    return json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)


_NODE_KINDS = {kind.label: kind for kind in NodeKind}
_EDGE_KINDS = {kind.label: kind for kind in EdgeKind}
_DIRECTIONS = {direction.label: direction for direction in TransferDirection}


def _whole(row: dict[str, Any], field: str, default: int | None) -> int | None:
    value = row.get(field, default)
    return int(value, 0) if isinstance(value, str) else value


def _add_node(graph: ExecutionGraph, row: dict[str, Any]) -> int:
    kind = _NODE_KINDS[row["kind"]]
    start_ns = _whole(row, "start_ns", None)
    timing_ns = _whole(row, "timing_ns", None)
    if kind is NodeKind.BRICK:
        brick = row.get("brick")
        known = None if brick is None else count("brick", brick, BrickId.COUNT - 1)
        elements = _whole(row, "elements", 0) or 0
        return graph._add_brick(
            text("name", row["name"]), known, timing_ns, elements, row.get("layer"), start_ns
        )
    if kind is NodeKind.KERNEL:
        return graph.add_kernel(row["name"], _whole(row, "source_hash", 0) or 0,
                                tuple(row["grid"]), tuple(row["block"]), row["shared_bytes"],
                                timing_ns=timing_ns, start_ns=start_ns,
                                arithmetic_intensity=row.get("arithmetic_intensity"),
                                achieved_tflops=row.get("achieved_tflops"))  # fmt: skip
    if kind is NodeKind.TRANSFER:
        return graph.add_transfer(row["source"], row["target"], _whole(row, "size_bytes", 0) or 0,
                                  _DIRECTIONS[row["direction"]], timing_ns=timing_ns,
                                  start_ns=start_ns)  # fmt: skip
    if kind is NodeKind.FUNCTION:
        return graph.add_function(row["name"], row.get("file"), row.get("line"),
                                  timing_ns=timing_ns, start_ns=start_ns)  # fmt: skip
    if kind is NodeKind.LAYER:
        return graph.add_layer(row["layer"], timing_ns=timing_ns, start_ns=start_ns)
    return graph.add_async_task(row["name"], _whole(row, "poll_count", 0) or 0,
                                _whole(row, "yield_count", 0) or 0, timing_ns or 0,
                                start_ns=start_ns)  # fmt: skip


def _add_edge(graph: ExecutionGraph, row: dict[str, Any]) -> None:
    direction = row.get("direction")
    graph.add_edge(row["source"], row["target"], _EDGE_KINDS[row["kind"]],
                   weight=row.get("weight", 1.0), size_bytes=_whole(row, "size_bytes", None),
                   direction=None if direction is None else _DIRECTIONS[direction])  # fmt: skip


def _document(source: str | bytes) -> dict[str, Any]:
    try:
        document = parsed_json(source)
    except ValueError as error:
        raise GraphError(f"expected the JSON of a graph, got text that is none: {error}") from None
    if not isinstance(document, dict) or document.get("format") != JSON_FORMAT:
        raise GraphError(f"expected JSON with format {JSON_FORMAT!r}, got something else; "
                         "ExecutionGraph.to_json writes it")  # fmt: skip
    version = document.get("version")
    if version != JSON_VERSION:
        raise GraphError(f"expected version {JSON_VERSION} of {JSON_FORMAT}, got {version!r}; "
                         "read it with the brickline that wrote it, or a newer one")  # fmt: skip
    return document


def fill_from_json(graph_type: type[ExecutionGraph], source: str | bytes) -> ExecutionGraph:
    """Return the graph that JSON describes; every field goes through the checks of ``add_*``."""
    document = _document(source)
    nodes, edges = document.get("nodes"), document.get("edges")
    if not isinstance(nodes, list) or not isinstance(edges, list):
        raise GraphError("expected lists of nodes and edges, got something else")
    graph = graph_type(node_budget=max(1_000_000, len(nodes), len(edges) // 4 + 1))
    for table, rows in (("nodes", nodes), ("edges", edges)):
        for index, row in enumerate(rows):
            try:
                _add_node(graph, row) if table == "nodes" else _add_edge(graph, row)
            except (KeyError, TypeError, ValueError, AttributeError, GraphError) as error:
                what = f"no or unknown {error}" if isinstance(error, KeyError) else str(error)
                raise GraphError(f"{what} - at $.{table}[{index}]; the file is damaged or was "
                                 "edited, export the graph again") from None  # fmt: skip
    dropped = [count(field, document.get(field, 0)) for field in ("dropped_nodes", "dropped_edges")]
    graph._store.note_dropped(*dropped)
    return graph
