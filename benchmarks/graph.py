"""A graph of a million nodes: time of its critical path, and memory a node.

Claims: under 2 s, at most 100 bytes a node with two edges each. Peer: networkx's
``dag_longest_path`` over the same dependencies at a size it can bear, per node. Run with
``python benchmarks/graph.py``.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np
from harness import Claim, main

from brickline.graph import EdgeKind, ExecutionGraph, GraphTables, NodeKind
from brickline.graph_rows import NO_DETAIL, TIMED, detail_dtype, edge_dtype, node_dtype

NODES = 1_000_000
PEER_NODES = 20_000
BRICKS = 99
"""Bricks in a layer; layers follow one another and so do the bricks inside each."""


def decode_graph(count: int) -> GraphTables:
    """Return layers of timed bricks: each brick is contained in one and follows another."""
    ids = np.arange(count)
    is_layer = ids % (BRICKS + 1) == 0
    nodes = np.zeros(count, node_dtype())
    nodes["kind"] = np.where(is_layer, NodeKind.LAYER, NodeKind.BRICK)
    nodes["name"] = np.where(is_layer, 0, 1 + ids % 8)
    nodes["timing_ns"] = np.where(is_layer, 0, 1000 + ids * 7919 % 5000)
    nodes["flags"] = np.where(is_layer, 0, TIMED)
    nodes["detail"] = NO_DETAIL
    nodes["layer"] = ids // (BRICKS + 1)
    nodes["brick"] = -1
    layer_of = ids - ids % (BRICKS + 1)
    bricks, layers = ids[~is_layer], ids[is_layer]
    follows = bricks[bricks % (BRICKS + 1) > 1]
    parts = (
        (layer_of[bricks], bricks, EdgeKind.CONTAINS),
        (follows - 1, follows, EdgeKind.SEQUENCE),
        (layers[:-1], layers[1:], EdgeKind.SEQUENCE),
    )
    edges = np.zeros(sum(len(part[0]) for part in parts), edge_dtype())
    edges["source"] = np.concatenate([part[0] for part in parts])
    edges["target"] = np.concatenate([part[1] for part in parts])
    edges["kind"] = np.repeat([part[2] for part in parts], [len(part[0]) for part in parts])
    edges["weight"] = 1.0
    strings = ["Layer", *(f"Brick{i}" for i in range(8))]
    return GraphTables(strings, nodes, edges, np.zeros(0, detail_dtype()))


def best_of(times: int, call: Any) -> float:
    """Return the shortest of a few runs in seconds."""
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return min(durations)


def networkx_ns_per_node() -> float | None:
    """Return what the peer takes, or None where it is not installed."""
    try:
        import networkx
    except ImportError:
        return None
    tables = decode_graph(PEER_NODES)
    times = tables.nodes["timing_ns"].tolist()
    bricks = np.flatnonzero(tables.nodes["kind"] == NodeKind.BRICK).tolist()
    peer = networkx.DiGraph()
    # The peer knows no containers: one chain of bricks is the same path, in its favour.
    peer.add_weighted_edges_from((a, b, times[b]) for a, b in pairwise(bricks))
    return best_of(3, lambda: networkx.dag_longest_path(peer)) / PEER_NODES * 1e9


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Return one row for each claim."""
    count, repeats = (NODES // 10, 1) if quick else (NODES, 3)
    graph = ExecutionGraph.from_tables(decode_graph(count))
    path_s = best_of(repeats, graph.critical_path)
    slack_s = best_of(repeats, graph.slack)
    stored = graph.size_bytes / count
    graph.outgoing_edges(0)
    graph.nodes_by_name("Brick0")
    indexed = graph.size_bytes / count
    peers = {f"networkx dag_longest_path, {PEER_NODES} nodes": networkx_ns_per_node()}
    claims = (
        Claim(f"graph: critical path of {count:,} nodes", path_s, "s", 2.0),
        Claim(f"graph: slack of {count:,} nodes", slack_s, "s", 2.0),
        Claim("graph: critical path, each node", path_s / count * 1e9, "ns", 2000.0, peers),
        Claim("graph: memory, each node with two edges", stored, "bytes", 100.0),
        Claim("graph: the same with every index built", indexed, "bytes", None),
    )
    return [claim.as_dict() for claim in claims]


if __name__ == "__main__":
    sys.exit(main(run, description=__doc__))
