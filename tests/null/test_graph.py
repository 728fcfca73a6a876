"""ExecutionGraph: recording, scopes, look-ups, analyses by hand, exports, bad input."""

import json
import threading

import numpy as np
import pytest

from brickline import _core
from brickline.bricks import BrickId
from brickline.errors import CountError, GraphError
from brickline.graph import (
    DROPPED_NODE,
    EdgeKind,
    ExecutionGraph,
    GraphEdge,
    GraphTables,
    KernelRegistry,
    NodeKind,
    TransferDirection,
)
from brickline.graph_rows import detail_dtype, edge_dtype, node_dtype

H2D, D2H = TransferDirection.HOST_TO_DEVICE, TransferDirection.DEVICE_TO_HOST


def us(value: int) -> int:
    return value * 1000


def one_of_each() -> ExecutionGraph:
    graph = ExecutionGraph()
    with graph.scope(graph.add_function("decode", "model.py", 12)):
        with graph.scope(graph.add_layer(3, timing_ns=us(500))):
            with graph.scope(graph.add_brick(BrickId.RMS_NORM, timing_ns=us(200), elements=4096)):
                graph.record_kernel_launch(
                    "rms", 0xFEEDFACECAFEBEEF, (4, 2), 128, 1024, timing_ns=us(180),
                    arithmetic_intensity=0.3, achieved_tflops=1.1, start_ns=2**60,
                )  # fmt: skip
            graph.record_brick("MyBrick", timing_ns=us(100), layer=3)
        moved = graph.record_transfer("gpu:y", "host", 4096, D2H, timing_ns=us(7))
    task = graph.add_async_task("sampler", 3, 2, us(40))
    graph.add_edge(moved, task, EdgeKind.TRANSFER, size_bytes=4096, direction=D2H, weight=0.5)
    return graph


# Recording


def test_nodes_come_back_as_they_were_added():
    graph = one_of_each()
    function, layer, brick, kernel, dynamic, transfer, task = graph.nodes()
    assert (function.kind, function.name) == (NodeKind.FUNCTION, "decode")
    assert (function.detail.file, function.detail.line) == ("model.py", 12)
    assert (layer.name, layer.layer, layer.timing_ns) == ("Layer3", 3, us(500))
    assert (brick.name, brick.brick, brick.elements) == ("RmsNorm", BrickId.RMS_NORM, 4096)
    assert kernel.detail.grid == (4, 2, 1)
    assert kernel.detail.block == (128, 1, 1)
    assert kernel.detail.source_hash == 0xFEEDFACECAFEBEEF
    assert (kernel.detail.arithmetic_intensity, kernel.detail.achieved_tflops) == (0.3, 1.1)
    assert kernel.start_ns == 2**60
    assert (dynamic.name, dynamic.brick, dynamic.layer) == ("MyBrick", None, 3)
    assert transfer.name == "D2H:gpu:y->host"
    assert (task.detail.poll_count, task.detail.yield_count, task.timing_ns) == (3, 2, us(40))
    assert [graph.node(node.id) for node in graph.nodes()] == graph.nodes()


def test_scopes_link_containers_and_siblings():
    graph = one_of_each()
    assert graph.edges() == [
        GraphEdge(0, 1, EdgeKind.CONTAINS),
        GraphEdge(1, 2, EdgeKind.CONTAINS),
        GraphEdge(2, 3, EdgeKind.LAUNCHES),
        GraphEdge(1, 4, EdgeKind.CONTAINS),
        GraphEdge(2, 4, EdgeKind.SEQUENCE),
        GraphEdge(0, 5, EdgeKind.CONTAINS),
        GraphEdge(1, 5, EdgeKind.SEQUENCE),
        GraphEdge(5, 6, EdgeKind.TRANSFER, 0.5, 4096, D2H),
    ]
    assert graph.outgoing_edges(1) == [graph.edges()[i] for i in (1, 3, 6)]
    assert graph.incoming_edges(5) == [graph.edges()[i] for i in (5, 6)]


def test_known_names_become_ids():
    graph = ExecutionGraph()
    node = graph.node(graph.add_brick("Qkv"))
    assert (node.name, node.brick) == ("QkvProjection", BrickId.QKV_PROJECTION)


def test_edge_index_follows_later_additions():
    graph = ExecutionGraph()
    first, second = graph.add_layer(0), graph.add_layer(1)
    assert graph.outgoing_edges(first) == []
    graph.add_dependency(first, second)
    third = graph.add_layer(2)
    graph.add_dependency(first, third)
    assert [edge.target for edge in graph.outgoing_edges(first)] == [second, third]
    assert [edge.source for edge in graph.incoming_edges(third)] == [first]


def test_names_find_all_nodes_and_the_last():
    graph = ExecutionGraph()
    assert graph.node_by_name("RmsNorm") is None
    assert graph.nodes_by_name("RmsNorm") == []
    ids = [graph.add_brick("RmsNorm", timing_ns=i) for i in range(3)]
    assert [node.id for node in graph.nodes_by_name("RmsNorm")] == ids
    assert graph.node_by_name("RmsNorm").id == ids[-1]
    ids.append(graph.add_brick("RmsNorm"))
    assert graph.node_by_name("RmsNorm").id == ids[-1]


def test_budget_counts_what_it_drops():
    graph = ExecutionGraph(node_budget=2)
    with graph.scope(graph.add_layer(0)):
        kept = graph.record_brick("A", timing_ns=1)
        lost = graph.record_brick("B", timing_ns=1)
        with graph.scope(lost):
            assert graph.record_brick("Inside", timing_ns=1) == DROPPED_NODE
    graph.add_dependency(kept, lost)
    assert (graph.num_nodes, graph.dropped_nodes, graph.dropped_edges) == (2, 2, 1)
    assert graph.is_scope_balanced()
    assert graph.critical_path().total_ns == 1
    with pytest.raises(GraphError, match="node budget of 2"):
        graph.node(lost)


def test_clear_empties_everything():
    graph = one_of_each()
    graph.push_scope(0)
    graph.clear()
    assert (graph.num_nodes, graph.num_edges, graph.edges()) == (0, 0, [])
    assert graph.is_scope_balanced()
    assert graph.current_scope is None
    assert graph.node_by_name("decode") is None
    assert graph.add_layer(0) == 0


# Scopes


def test_pop_without_push_is_an_error():
    with pytest.raises(GraphError, match="call push_scope first"):
        ExecutionGraph().pop_scope()


def test_balance_and_current_scope():
    graph = ExecutionGraph()
    layer = graph.push_scope(graph.add_layer(0))
    assert graph.current_scope == layer
    assert not graph.is_scope_balanced()
    assert graph.pop_scope() == layer
    assert graph.is_scope_balanced()


def test_scope_left_with_inner_scope_open_is_an_error_and_recovers():
    graph = ExecutionGraph()
    outer, inner = graph.add_layer(0), graph.add_layer(1)
    with pytest.raises(GraphError, match="still open inside"), graph.scope(outer):
        graph.push_scope(inner)
    assert graph.is_scope_balanced()
    assert graph.current_scope is None


def test_scope_popped_by_hand_inside_with_is_an_error():
    graph = ExecutionGraph()
    with pytest.raises(GraphError, match="do not pop it by hand"), graph.scope(graph.add_layer(0)):
        graph.pop_scope()


def test_an_exception_closes_its_scopes_and_is_not_replaced():
    graph = ExecutionGraph()

    def fail_inside() -> None:
        with graph.scope(graph.add_layer(0)):
            graph.push_scope(graph.add_layer(1))
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert graph.is_scope_balanced()
    assert graph.current_scope is None


def test_scopes_are_per_thread():
    graph = ExecutionGraph()
    layer = graph.push_scope(graph.add_layer(0))
    seen: list[object] = []

    def other() -> None:
        seen.append(graph.current_scope)
        seen.append(graph.incoming_edges(graph.record_brick("Elsewhere", timing_ns=1)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [None, []]
    assert graph.current_scope == layer
    assert not graph.is_scope_balanced()


def test_clear_inside_a_scope_closes_it():
    graph = ExecutionGraph()
    with graph.scope(graph.add_layer(0)):
        graph.clear()
    assert graph.is_scope_balanced()


def test_reopening_a_node_links_it_once():
    graph = ExecutionGraph()
    first, second = graph.add_layer(0), graph.add_layer(1)
    for node in (first, second, first):
        with graph.scope(node):
            pass
    assert graph.edges() == [GraphEdge(first, second, EdgeKind.SEQUENCE)]


def test_threads_adding_together_lose_nothing():
    graph = ExecutionGraph()

    def work(worker: int) -> None:
        with graph.scope(graph.add_layer(worker)):
            for _ in range(500):
                graph.record_brick("Work", timing_ns=10)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert graph.num_nodes == 8 * 501
    assert graph.critical_path().total_ns == 5000


# Analyses


def test_containment_is_not_counted_twice():
    graph = ExecutionGraph()
    brick = graph.add_brick("Attention", timing_ns=us(200))
    with graph.scope(graph.add_layer(0)) as layer, graph.scope(brick):
        kernel = graph.record_kernel_launch("attention", timing_ns=us(180))
    assert graph.incoming_edges(brick) == [GraphEdge(layer, brick, EdgeKind.CONTAINS)]
    path = graph.critical_path()
    assert path.total_ns == us(200)
    assert path.nodes == (kernel, brick)
    assert path.contributions_ns == (us(180), us(20))
    assert path.starts_ns == (0, us(180))
    assert graph.slack().tolist() == [0, 0, 0]


def test_siblings_in_sequence_add_up():
    graph = ExecutionGraph()
    with graph.scope(graph.add_layer(0)):
        bricks = [graph.record_brick("W", timing_ns=us(t)) for t in (50, 200, 150, 300)]
    assert graph.critical_path().total_ns == us(700)
    assert graph.critical_path().nodes == tuple(bricks)


def test_parallel_branches_take_the_longest():
    graph = ExecutionGraph()
    start, short, long, end = (graph.add_brick("W", timing_ns=t) for t in (10, 20, 50, 5))
    for source, target in ((start, short), (start, long), (short, end), (long, end)):
        graph.add_dependency(source, target)
    path = graph.critical_path()
    assert (path.total_ns, path.nodes) == (65, (start, long, end))
    assert graph.slack().tolist() == [0, 30, 0, 0]


def test_order_of_containers_orders_their_contents():
    graph = ExecutionGraph()
    with graph.scope(graph.add_layer(0)):
        graph.record_brick("A", timing_ns=10)
    with graph.scope(graph.add_layer(1)):
        graph.record_brick("B", timing_ns=20)
    assert graph.critical_path().total_ns == 30


def test_waiting_inside_a_container_is_not_its_work():
    graph = ExecutionGraph()
    first = graph.add_kernel("a", timing_ns=100)
    with graph.scope(graph.add_brick("Waits", timing_ns=150)):
        second = graph.record_kernel_launch("b", timing_ns=50)
    graph.add_dependency(first, second)
    assert graph.critical_path().total_ns == 150


def test_recursive_calls_are_no_cycle():
    graph = ExecutionGraph()
    first, second = graph.add_function("f", timing_ns=10), graph.add_function("g", timing_ns=4)
    graph.add_edge(first, second, EdgeKind.CALLS)
    graph.add_edge(second, first, EdgeKind.CALLS)
    graph.add_edge(first, first, EdgeKind.CALLS)
    assert graph.critical_path().total_ns == 10
    assert graph.to_tree().splitlines()[0].startswith("f")


def test_cycle_is_an_error_that_names_its_nodes():
    graph = ExecutionGraph()
    outside, *cycle = (graph.add_brick(name, timing_ns=1) for name in ("X", "A", "B", "C"))
    for source, target in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        graph.add_dependency(source, target)
    graph.add_dependency(cycle[0], outside)
    with pytest.raises(GraphError) as raised:
        graph.critical_path()
    assert all(f"'{name}'" in str(raised.value) for name in "ABC")
    assert "'X'" not in str(raised.value)
    with pytest.raises(GraphError, match="without a cycle"):
        graph.slack()


@pytest.mark.parametrize("kind", list(EdgeKind))
def test_a_node_cannot_wait_for_or_contain_itself(kind):
    graph = ExecutionGraph()
    node = graph.add_brick("Self", timing_ns=7)
    graph.add_edge(node, node, kind)
    if kind is EdgeKind.CALLS:
        assert graph.critical_path().total_ns == 7
    else:
        with pytest.raises(GraphError, match="'Self'"):
            graph.critical_path()


def test_container_ordered_against_its_contents_is_an_error():
    graph = ExecutionGraph()
    with graph.scope(graph.add_layer(0)) as layer:
        brick = graph.record_brick("Inner", timing_ns=1)
    graph.add_dependency(layer, brick)
    with pytest.raises(GraphError, match="its own contents"):
        graph.critical_path()


def test_empty_and_untimed_graphs_have_an_empty_path():
    graph = ExecutionGraph()
    assert graph.critical_path().nodes == ()
    assert graph.slack().shape == (0,)
    graph.add_layer(0)
    assert (graph.critical_path().total_ns, graph.critical_path().nodes) == (0, ())


def test_slowest_kernel_is_a_kernel():
    graph = ExecutionGraph()
    assert graph.slowest_kernel() is None
    graph.add_brick("Long", timing_ns=1000)
    graph.add_kernel("untimed")
    slow = graph.add_kernel("slow", timing_ns=20)
    graph.add_kernel("fast", timing_ns=10)
    graph.add_kernel("equal", timing_ns=20)
    assert graph.slowest_kernel().id == slow
    assert [node.name for node in graph.kernel_nodes()] == ["untimed", "slow", "fast", "equal"]


def test_roofline_distance():
    graph = ExecutionGraph()
    memory = graph.add_kernel("memory", arithmetic_intensity=10, achieved_tflops=5)
    compute = graph.add_kernel("compute", arithmetic_intensity=1000, achieved_tflops=75)
    graph.add_kernel("no work per byte", arithmetic_intensity=0, achieved_tflops=1)
    graph.add_kernel("not measured", arithmetic_intensity=10)
    first, second = graph.roofline_distance(peak_tflops=100, peak_gbps=1000)
    assert (first.node, first.is_memory_bound, first.attainable_tflops) == (memory, True, 10)
    assert first.distance == pytest.approx(0.5)
    assert (second.node, second.is_memory_bound, second.name) == (compute, False, "compute")
    assert second.distance == pytest.approx(0.25)


@pytest.mark.parametrize("peaks", [(0, 1), (1, 0), (-1, 1), (float("nan"), 1), (1, float("inf"))])
def test_roofline_peaks_must_be_real(peaks):
    with pytest.raises(GraphError, match="peaks above 0"):
        ExecutionGraph().roofline_distance(*peaks)


def test_ping_pong_pairs_each_return_once():
    graph = ExecutionGraph()
    up = graph.add_transfer("host", "gpu:x", 100, H2D)
    graph.add_transfer("gpu:x", "host", 99, D2H)
    graph.add_transfer("gpu:y", "host", 100, D2H)
    down = graph.add_transfer("gpu:x", "elsewhere", 100, D2H)
    graph.add_transfer("gpu:x", "gpu:y", 100, TransferDirection.DEVICE_TO_DEVICE)
    again = graph.add_transfer("host", "gpu:x", 100, H2D)
    pairs = [(pair.first, pair.second, pair.size_bytes) for pair in graph.ping_pong()]
    assert pairs == [(up, down, 100), (down, again, 100)]


def test_kernel_registry_keeps_every_name():
    registry = KernelRegistry()
    first = registry.register("a", "source", path="a.cu")
    assert registry.register("b", b"source") == first
    other = registry.register("c", "other source")
    assert registry.lookup(first).names == ("a", "b")
    assert registry.lookup(first).text == "source"
    assert (registry.lookup_name(first), registry.lookup_path(first)) == ("b", "a.cu")
    assert registry.lookup(1) is None
    assert registry.hashes == (first, other)
    assert len(registry) == 2
    assert other in registry


@pytest.mark.parametrize(
    ("source", "expected"), [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C),
                             (b"foobar", 0x85944171F73967E8)]
)  # fmt: skip
def test_source_hash_is_fnv1a(source, expected):
    assert KernelRegistry.hash_source(source) == expected


# Exports


def test_dot_has_colours_styles_and_escaped_labels():
    graph = ExecutionGraph()
    odd = graph.add_function('say "hi"\\\n')
    graph.add_edge(odd, graph.add_kernel("k", timing_ns=1500), EdgeKind.LAUNCHES)
    dot = graph.to_dot()
    assert r'n0 [label="say \"hi\"\\\n", fillcolor=lightgray];' in dot
    assert r'n1 [label="k\n1.5 µs\ngrid (1,1,1)\nblock (1,1,1)", fillcolor=lightyellow];' in dot
    assert 'n0 -> n1 [style=bold, color="red"];' in dot


def test_dot_says_of_every_kind_what_the_tree_says():
    labels = [
        line.split('"')[1] for line in one_of_each().to_dot().splitlines() if "label=" in line
    ]
    assert labels == [
        r"decode\nmodel.py:12",
        r"Layer3\n500.0 µs",
        r"RmsNorm\n200.0 µs\n4096 elements",
        r"rms\n180.0 µs\ngrid (4,2,1)\nblock (128,1,1)\n1024 B shared",
        r"MyBrick\n100.0 µs",
        r"D2H:gpu:y->host\n7.0 µs\n4096 bytes",
        r"sampler\n40.0 µs\n3 polls\n2 yields\n13.3 µs a poll\n33.3% efficient",
    ]


def test_tree_collapses_identical_siblings():
    graph = ExecutionGraph()
    for index in range(32):
        with graph.scope(graph.add_layer(index)):
            for _ in range(12):
                with graph.scope(graph.add_brick("RmsNorm", timing_ns=us(2), elements=8)):
                    graph.record_kernel_launch("rms", 0, 4, 64, timing_ns=us(1))
            graph.record_kernel_launch("rms", 0, 5, 64, timing_ns=us(1))
    assert graph.to_tree() == (
        "Layer0…Layer31  ×32\n"
        "├─ RmsNorm  ×384  768.0 µs  3072 elements\n"
        "│  └─ rms  ×384  384.0 µs  grid (4,1,1)  block (64,1,1)\n"
        "└─ rms  ×32  32.0 µs  grid (5,1,1)  block (64,1,1)"
    )


def test_tree_says_what_it_left_out():
    graph = ExecutionGraph()
    with graph.scope(graph.add_layer(0)):
        for index in range(10):
            graph.record_brick(f"B{index}", timing_ns=us(1))
    lines = graph.to_tree(max_rows=4).splitlines()
    assert lines[-2] == "└─ … 7 more"
    assert lines[-1] == "left out: 7 of 11 nodes (max_depth=12, max_rows=4)"
    lines = graph.to_tree(max_depth=1).splitlines()
    assert lines == [
        "Layer0",
        "└─ … 10 inside",
        "left out: 10 of 11 nodes (max_depth=1, max_rows=200)",
    ]


def test_tree_of_every_kind_and_of_none():
    assert ExecutionGraph().to_tree() == "(empty graph)"
    tree = one_of_each().to_tree()
    assert tree.splitlines()[0] == "Execution graph"
    assert "├─ decode  model.py:12" in tree
    assert "D2H:gpu:y->host  7.0 µs  4096 bytes" in tree
    assert "└─ sampler  40.0 µs  3 polls  2 yields  13.3 µs a poll  33.3% efficient" in tree


def test_a_function_has_a_place_where_both_file_and_line_are_known():
    graph = ExecutionGraph()
    for place in ((None, None), ("a.py", None), (None, 7), ("a.py", 7), ("a.py", 7), ("b.py", 7)):
        graph.add_function("f", *place)
    rows = [row[3:] for row in graph.to_tree().splitlines()[1:]]
    assert rows == ["f", "f", "f", "f  ×2  a.py:7", "f  b.py:7"]
    dot = graph.to_dot()
    assert (dot.count('"f"'), dot.count(r'"f\na.py:7"')) == (3, 2)


def test_a_single_thing_is_no_plural():
    graph = ExecutionGraph()
    task = graph.add_async_task("ready at once", 1, 0, us(4))
    graph.add_brick("B", elements=1)
    graph.add_transfer("host", "gpu:x", 1, TransferDirection.HOST_TO_DEVICE)
    graph.add_async_task("never polled", 0, 1, 0)
    assert graph.to_tree().splitlines()[1:] == [
        "├─ ready at once  4.0 µs  1 poll  0 yields  4.0 µs a poll  100.0% efficient",
        "├─ B  1 element",
        "├─ H2D:host->gpu:x  1 byte",
        "└─ never polled  0.0 µs  0 polls  1 yield",
    ]
    assert graph.critical_path().nodes == (task,)
    assert graph.critical_path_summary().splitlines()[0] == "Critical path: 0.004 ms over 1 node"


def test_summary_lists_path_and_slack():
    graph = ExecutionGraph()
    a, b, c = (graph.add_brick(name, timing_ns=us(t)) for name, t in (("A", 5), ("B", 9), ("C", 1)))
    graph.add_dependency(a, c)
    graph.add_dependency(b, c)
    assert graph.critical_path_summary().splitlines() == [
        "Critical path: 0.010 ms over 2 nodes",
        "────────────────────────────────────",
        "├─ B  9.0 µs",
        "└─ C  1.0 µs",
        "Most slack:",
        "   A  4.0 µs",
    ]
    assert "└─ … 1 more node, 1.0 µs" in graph.critical_path_summary(max_rows=1)


def test_summary_says_of_a_task_how_it_was_polled():
    graph = ExecutionGraph()
    load = graph.add_async_task("load", 4, 3, us(6))
    graph.add_dependency(load, graph.add_brick("A", timing_ns=us(5)))
    assert graph.critical_path_summary().splitlines() == [
        "Critical path: 0.011 ms over 2 nodes",
        "────────────────────────────────────",
        "├─ load  6.0 µs  4 polls  3 yields  1.5 µs a poll  25.0% efficient",
        "└─ A  5.0 µs",
    ]


def test_json_round_trips_and_keeps_64_bits_as_text():
    graph = one_of_each()
    document = json.loads(graph.to_json())
    assert (document["format"], document["version"]) == ("brickline-graph", 1)
    assert document["nodes"][3]["source_hash"] == "0xfeedfacecafebeef"
    assert document["nodes"][3]["start_ns"] == str(2**60)
    again = ExecutionGraph.from_json(graph.to_json(indent=1))
    assert again.nodes() == graph.nodes()
    assert again.edges() == graph.edges()
    assert again.critical_path() == graph.critical_path()


def test_json_keeps_what_was_dropped():
    graph = ExecutionGraph(node_budget=1)
    graph.add_layer(0)
    graph.add_layer(1)
    assert ExecutionGraph.from_json(graph.to_json()).dropped_nodes == 1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "text that is none"),
        ("[]", "format 'brickline-graph'"),
        ('{"format": "brickline-graph", "version": 2}', "version 1"),
        ('{"format": "brickline-graph", "version": 1}', "lists of nodes"),
        ('{"format": "brickline-graph", "version": 1, "nodes": [{"kind": "X"}], "edges": []}',
         r"'X' - at \$\.nodes\[0\]"),
        ('{"format": "brickline-graph", "version": 1, "nodes": [7], "edges": []}',
         r"at \$\.nodes\[0\]"),
        ('{"format": "brickline-graph", "version": 1, "nodes": [{"kind": "Brick", "name": "A", '
         '"timing_ns": 1.5}], "edges": []}', "timing_ns as an integer"),
        ('{"format": "brickline-graph", "version": 1, "nodes": [], "edges": [{"source": 0, '
         '"target": 0, "kind": "Calls"}]}', r"at \$\.edges\[0\]"),
    ],
)  # fmt: skip
def test_bad_json_is_refused(text, match):
    with pytest.raises(GraphError, match=match):
        ExecutionGraph.from_json(text)


# Tables


def test_tables_round_trip():
    graph = one_of_each()
    again = ExecutionGraph.from_tables(graph.tables())
    assert again.nodes() == graph.nodes()
    assert again.edges() == graph.edges()
    assert again.tables().details.tobytes() == graph.tables().details.tobytes()
    assert again.nodes_by_name("rms") == graph.nodes_by_name("rms")


def test_dtypes_match_the_core():
    for name, dtype in (("node", node_dtype()), ("edge", edge_dtype()), ("detail", detail_dtype())):
        size, offsets = _core.graph_layout()[name]
        assert dtype.itemsize == size
        assert {field: dtype.fields[field][1] for field in dtype.names} == offsets


@pytest.mark.parametrize(
    ("table", "row", "field", "value", "match"),
    [
        ("nodes", 0, "kind", 6, "kind below 6"),
        ("nodes", 0, "name", 99, "name below"),
        ("nodes", 0, "flags", 8, "flags below"),
        ("nodes", 0, "layer", -2, "layer and brick"),
        ("nodes", 0, "timing_ns", 5, "untimed"),
        ("edges", 2, "kind", 6, "kind below 6"),
        ("edges", 2, "source", 7, "source below 7"),
        ("edges", 2, "target", 0xFFFFFFFF, "target below 7"),
        ("edges", 2, "weight", np.nan, "finite"),
        ("details", 0, "kind", 5, "kind below 5"),
        ("details", 0, "kind", 0, "another kind"),
        ("details", 0, "direction", 3, "direction below 3"),
        ("details", 0, "owner", 7, "owner below 7"),
        ("details", 0, "owner", 1, "another kind"),
        ("details", 0, "file", 99, "file below"),
        ("details", 2, "transfer_target", 99, "target below"),
    ],
)
def test_damaged_tables_are_refused(table, row, field, value, match):
    tables = one_of_each().tables()
    columns = {name: getattr(tables, name).copy() for name in ("nodes", "edges", "details")}
    columns[table][row][field] = value
    with pytest.raises(GraphError, match=match):
        ExecutionGraph.from_tables(GraphTables(tables.strings, **columns))


def test_torn_tail_is_dropped_when_asked():
    tables = one_of_each().tables()
    cut = GraphTables(tables.strings, tables.nodes[:5], tables.edges, tables.details)
    with pytest.raises(GraphError, match="below 5"):
        ExecutionGraph.from_tables(cut)
    graph = ExecutionGraph.from_tables(cut, drop_torn_tail=True)
    assert graph.nodes() == one_of_each().nodes()[:5]
    assert graph.edges() == one_of_each().edges()[:5]


def test_cut_off_rows_are_refused():
    store = _core.GraphStore()
    with pytest.raises(ValueError, match="multiple of 40 bytes, got 39"):
        store.load([], b"\0" * 39, b"", b"")
    with pytest.raises(ValueError, match="each string once"):
        store.load(["a", "a"], b"", b"", b"")


# Bad input


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.add_brick("A", timing_ns=-1),
        lambda g: g.add_brick("A", timing_ns=float("nan")),
        lambda g: g.add_brick("A", elements=-1),
        lambda g: g.add_brick("A", elements=2**63),
        lambda g: g.add_brick(BrickId.COUNT),
        lambda g: g.add_layer(-1),
        lambda g: g.add_kernel("k", grid=(1, 2, 3, 4)),
        lambda g: g.add_kernel("k", block=(-1,)),
        lambda g: g.add_kernel("k", arithmetic_intensity=float("inf")),
        lambda g: g.add_kernel("k", achieved_tflops=-1),
        lambda g: g.add_edge(0, 0, EdgeKind.CALLS, weight=float("nan")),
        lambda g: g.to_tree(max_rows=0),
        lambda g: ExecutionGraph(node_budget=-1),
    ],
)
def test_bad_counts(call):
    graph = ExecutionGraph()
    graph.add_layer(0)
    with pytest.raises(CountError):
        call(graph)
    assert graph.num_nodes == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.add_brick(""),
        lambda g: g.add_kernel(None),
        lambda g: g.add_function("\ud800"),
        lambda g: g.add_transfer("a", "b", 1, 7),
        lambda g: g.add_edge(0, 1, EdgeKind.CALLS),
        lambda g: g.add_edge(0, 0, 9),
        lambda g: g.add_edge(0, -1, EdgeKind.CALLS),
        lambda g: g.add_edge(0, 0, EdgeKind.CALLS, size_bytes=1, direction=H2D),
        lambda g: g.add_edge(0, 0, EdgeKind.TRANSFER, size_bytes=1),
        lambda g: g.push_scope(1),
        lambda g: g.scope("layer"),
        lambda g: g.node(1),
        lambda g: g.node(2**40),
        lambda g: g.outgoing_edges(5),
    ],
)
def test_bad_calls(call):
    graph = ExecutionGraph()
    graph.add_layer(0)
    with pytest.raises(GraphError, match="expected"):
        call(graph)
    assert (graph.num_nodes, graph.num_edges) == (1, 0)
    assert graph.is_scope_balanced()
