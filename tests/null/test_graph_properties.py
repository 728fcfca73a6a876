"""ExecutionGraph against brute force on random graphs with containment."""

import re

from hypothesis import given
from hypothesis import strategies as st

from brickline.graph import EdgeKind, ExecutionGraph, TransferDirection

CONTAINMENT = (EdgeKind.CONTAINS, EdgeKind.LAUNCHES, EdgeKind.CALLS)
DEPENDENCY = (EdgeKind.SEQUENCE, EdgeKind.DEPENDS_ON, EdgeKind.TRANSFER)


@st.composite
def scheduled_graphs(draw):
    """Times, containers and waits that are free of cycles, with ids in random order.

    Nodes get a container among the earlier ones. A wait leads from one child of a container to a
    later child of the same one, or from anything inside the one to anything inside the other:
    every such edge agrees with the order of a walk over the tree, so no cycle can arise.
    """
    count = draw(st.integers(1, 12))
    times = [draw(st.none() | st.integers(0, 50)) for _ in range(count)]
    container = [draw(st.none() | st.integers(0, i - 1)) if i else None for i in range(count)]
    ancestors = []
    for node in range(count):
        up = container[node]
        ancestors.append([] if up is None else [up, *ancestors[up]])
    pairs = [(a, b) for a in walk(container) for b in range(count)]
    position = {node: place for place, node in enumerate(walk(container))}
    free = [
        (a, b)
        for a, b in pairs
        if position[a] < position[b] and a not in ancestors[b] and b not in ancestors[a]
    ]
    waits = draw(st.lists(st.sampled_from(free), max_size=15)) if free else []
    order = draw(st.permutations(range(count)))
    return times, container, waits, order


def walk(container):
    """Every node, containers before contents, contents together."""
    contents: dict[int | None, list[int]] = {}
    for node, up in enumerate(container):
        contents.setdefault(up, []).append(node)
    stack, order = list(reversed(contents.get(None, []))), []
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(contents.get(node, [])))
    return order


def build(case, kinds):
    times, container, waits, order = case
    graph = ExecutionGraph()
    ids = {node: graph.add_brick(f"B{node}", timing_ns=times[node]) for node in order}
    for node, up in enumerate(container):
        if up is not None:
            graph.add_edge(ids[up], ids[node], CONTAINMENT[node % 3])
    for number, (source, target) in enumerate(waits):
        graph.add_edge(ids[source], ids[target], DEPENDENCY[(number + kinds) % 3])
    return graph, ids


def settle(times, container, waits):
    """Start and finish by repeating the definition until nothing moves."""
    count = len(times)
    start, finish = [0] * count, [0] * count
    while True:
        before = start[:], finish[:]
        for v in range(count):
            earliest = [finish[u] for u, w in waits if w == v]
            if container[v] is not None:
                earliest.append(start[container[v]])
            start[v] = max([0, *earliest])
            inside = [finish[c] for c in range(count) if container[c] == v]
            finish[v] = max([start[v] + (times[v] or 0), *inside])
        if (start, finish) == before:
            return start, finish


def total_with_remainders(remainder, container, waits, held_up, delay):
    """The whole's finish when remainders are kept and one node finishes ``delay`` later."""
    count = len(remainder)
    start, finish = [0] * count, [0] * count
    while True:
        before = start[:], finish[:]
        for v in range(count):
            earliest = [finish[u] for u, w in waits if w == v]
            if container[v] is not None:
                earliest.append(start[container[v]])
            start[v] = max([0, *earliest])
            inside = [finish[c] for c in range(count) if container[c] == v]
            finish[v] = max([start[v], *inside]) + remainder[v] + (delay if v == held_up else 0)
        if (start, finish) == before:
            return max(finish)


@given(scheduled_graphs(), st.integers(0, 2))
def test_critical_path_equals_brute_force(case, kinds):
    times, container, waits, _ = case
    graph, ids = build(case, kinds)
    start, finish = settle(times, container, waits)
    path = graph.critical_path()
    assert path.total_ns == max(finish)
    assert sum(path.contributions_ns) == path.total_ns
    assert all(contribution > 0 for contribution in path.contributions_ns)
    # The contributions follow one another without gap or overlap, inside their nodes' spans.
    by_id = {node_id: node for node, node_id in ids.items()}
    clock = 0
    for node_id, at, contribution in zip(
        path.nodes, path.starts_ns, path.contributions_ns, strict=True
    ):
        node = by_id[node_id]
        assert at == clock
        assert start[node] <= at
        clock += contribution
        assert clock == finish[node]
        assert contribution <= (times[node] or 0)


@given(scheduled_graphs(), st.integers(0, 2))
def test_slack_is_exactly_how_much_later_a_node_may_finish(case, kinds):
    times, container, waits, _ = case
    graph, ids = build(case, kinds)
    start, finish = settle(times, container, waits)
    count = len(times)
    remainder = [
        finish[v] - max([start[v], *(finish[c] for c in range(count) if container[c] == v)])
        for v in range(count)
    ]
    slack = graph.slack()
    total = max(finish)
    for node, node_id in ids.items():
        free = int(slack[node_id])
        assert total_with_remainders(remainder, container, waits, node, free) == total
        assert total_with_remainders(remainder, container, waits, node, free + 1) == total + 1
    assert all(slack[node_id] == 0 for node_id in graph.critical_path().nodes)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
COUNTS = st.integers(0, 2**63 - 1)
TIMES = st.none() | COUNTS
RATES = st.none() | st.floats(0, 1e30)
WHICH = st.sampled_from(list(TransferDirection))


@st.composite
def any_graphs(draw):
    graph = ExecutionGraph()
    adders = [
        lambda: graph.add_brick(
            draw(NAMES | st.integers(0, 22)), timing_ns=draw(TIMES), elements=draw(COUNTS),
            layer=draw(st.none() | st.integers(0, 99)), start_ns=draw(TIMES),
        ),
        lambda: graph.add_kernel(
            draw(NAMES), draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**32 - 1)),
            (1, draw(st.integers(0, 1024))), draw(st.integers(0, 2**32 - 1)),
            timing_ns=draw(TIMES), arithmetic_intensity=draw(RATES), achieved_tflops=draw(RATES),
        ),
        lambda: graph.add_transfer(draw(NAMES), draw(NAMES), draw(COUNTS), draw(WHICH),
                                   timing_ns=draw(TIMES)),
        lambda: graph.add_function(draw(NAMES), draw(st.none() | NAMES),
                                   draw(st.none() | st.integers(1, 9999))),
        lambda: graph.add_layer(draw(st.integers(0, 99)), timing_ns=draw(TIMES)),
        lambda: graph.add_async_task(draw(NAMES), draw(COUNTS), draw(COUNTS), draw(COUNTS)),
    ]  # fmt: skip
    for adder in draw(st.lists(st.sampled_from(adders), min_size=1, max_size=8)):
        adder()
    nodes = st.integers(0, graph.num_nodes - 1)
    for kind in draw(st.lists(st.sampled_from(list(EdgeKind)), max_size=10)):
        moved = {}
        if kind is EdgeKind.TRANSFER and draw(st.booleans()):
            moved = {"size_bytes": draw(COUNTS), "direction": draw(WHICH)}
        graph.add_edge(
            draw(nodes), draw(nodes), kind, weight=draw(st.floats(-9, 9, width=32)), **moved
        )
    return graph


@given(any_graphs())
def test_json_and_tables_round_trip(graph):
    for again in (
        ExecutionGraph.from_json(graph.to_json()),
        ExecutionGraph.from_tables(graph.tables()),
    ):
        assert again.nodes() == graph.nodes()
        assert again.edges() == graph.edges()
        assert again.to_json() == graph.to_json()


DOT_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\n])*"'
DOT_NODE = re.compile(rf"  n\d+ \[label={DOT_STRING}, fillcolor=[a-z]+\];")
DOT_EDGE = re.compile(r'  n\d+ -> n\d+ \[style=[a-z]+(, color="[a-z]+")?\];')


@given(any_graphs())
def test_dot_is_one_statement_a_line_whatever_the_names(graph):
    lines = graph.to_dot().split("\n")
    assert lines[0] == "digraph execution {"
    assert lines[-2:] == ["}", ""]
    body = lines[3:-2]
    assert len(body) == graph.num_nodes + graph.num_edges
    assert all(DOT_NODE.fullmatch(line) for line in body[: graph.num_nodes])
    assert all(DOT_EDGE.fullmatch(line) for line in body[graph.num_nodes :])


@given(any_graphs())
def test_tree_accounts_for_every_node(graph):
    tree = graph.to_tree(max_depth=3, max_rows=6)
    left = re.search(r"left out: (\d+) of (\d+) nodes", tree)
    assert left is None or int(left[2]) == graph.num_nodes
