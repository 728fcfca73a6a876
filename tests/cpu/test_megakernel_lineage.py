"""Lineage of megakernels on CPU: of a plan's run at its values, and of a queue, by element.

Who wrote an element last is what a plain list says; reports must say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import brickline as bl
from brickline.cache import KernelCache
from brickline.executor.megakernel.queue import Megakernel
from brickline.export.megakernel_metrics import sources_of
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import residual
from brickline.megakernel_report import MegakernelReport
from brickline.plan import Plan

pytestmark = pytest.mark.usefixtures("state")

TOUCH = Kernel(
    "touch",
    """BRICKLINE void touch(Block& block, const float* a, const float* b, float* y, int64_t m,
                            int64_t k, int64_t n) {
           block.each(n, [&](int64_t i) { y[i] = a[i % m] + 2 * b[i % k] + 1; });
       }""",
    [
        *(Param("a", "f32", "m"), Param("b", "f32", "k"), Param("y", "f32", "n", "write")),
        *(Scalar(name, low=1, high=64) for name in "mkn"),
    ],
)
"""Reads all of a and b, and writes all of y."""
FILL = Kernel(
    "fill",
    """BRICKLINE void fill(Block& block, float* y, int64_t n, float value) {
           block.each(n, [&](int64_t i) { y[i] = value; });
       }""",
    [Param("y", "f32", "n", "write"), Scalar("n", low=1), Scalar("value", "f32")],
)
COPY = Kernel(
    "copy",
    """BRICKLINE void copy(Block& block, const float* x, float* y, int64_t n) {
           block.each(n, [&](int64_t i) { y[i] = x[i]; });
       }""",
    [Param("x", "f32", "n"), Param("y", "f32", "n", "write"), Scalar("n", low=1, high=64)],
)


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


# ------------------------------------------------------------------------------ plans and variables

LENGTH = 12
PIECES = st.tuples(st.integers(0, 2), st.integers(0, 6), st.sampled_from([1, 3, 6, "n", "m"]))
"""Storage, first element and size, which may be a variable."""
LAUNCHES = st.tuples(PIECES, PIECES, PIECES).filter(
    lambda row: row[2][0] not in (row[0][0], row[1][0])
)


class ByElement:
    """Who wrote each element last, by storage and place; None: nobody."""

    def __init__(self) -> None:
        self.writer: dict[tuple[int, int], int] = {}
        self.last: dict[tuple[int, int], int] = {}

    def write(self, task: int, alias: int, elements: Sequence[tuple[int, int]]) -> None:
        self.last |= dict.fromkeys(elements, task)
        if alias < 0:
            self.writer |= dict.fromkeys(elements, task)

    def last_to(self, elements: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        return tuple(sorted({self.last[each] for each in elements if each in self.last}))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(LAUNCHES, min_size=1, max_size=10),
    values=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3),
    dedupe=st.booleans(),
)
def test_lineage_of_a_plan_is_that_of_its_elements_at_the_values_of_each_run(
    cache: KernelCache, rows: list[Any], values: list[tuple[int, int]], dedupe: bool
) -> None:
    plan = Plan("drawn")
    sizes: dict[Any, Any] = {name: plan.variable(name, 1, 6) for name in "nm"}
    storages = [plan.buffer(name, LENGTH, "f32") for name in "xyz"]
    for pieces in rows:
        counts = [sizes.get(size, size) for _, _, size in pieces]
        a, b, y = (
            storages[storage].view((count,), first)
            for (storage, first, _), count in zip(pieces, counts, strict=True)
        )
        plan.launch(TOUCH, a=a, b=b, y=y, m=counts[0], k=counts[1], n=counts[2])
    prepared = plan.prepare(
        "CPU", "megakernel", cache=cache, workers=2, lineage=True, dedupe=dedupe
    )
    assert prepared.deduped is not None
    for n, m in values:
        at = {"n": n, "m": m}
        report = prepared(**at).report
        assert report is not None
        assert report.flow is not None
        memory = ByElement()
        for task, pieces in enumerate(rows):
            alias = int(report.tasks.alias[task])
            assert (task if alias < 0 else alias) == prepared.deduped.computed_by[task]
            *reads, write = (
                [(storage, first + k) for k in range(at.get(size, size))]
                for storage, first, size in pieces
            )
            read = [element for piece in reads for element in piece]
            sources = {memory.writer[each] for each in read if each in memory.writer}
            names = {"xyz"[each[0]] for each in read if each not in memory.writer}
            if alias >= 0:
                sources, names = {alias}, set()
            assert report.flow.direct(task) == sorted(sources)
            assert set(report.flow.given_to(task)) == names
            memory.write(task, alias, write)
        everything = ([(storage, k) for k in range(LENGTH)] for storage in range(3))
        last = dict(zip("xyz", map(memory.last_to, everything), strict=True))
        assert report.outputs == {name: found for name, found in last.items() if found}


def test_lineage_follows_the_values_of_each_run(cache: KernelCache) -> None:
    plan = Plan("varied")
    n = plan.variable("n", 1, 64)
    x, y, z = plan.buffer("x", 64, "f32"), plan.buffer("y", 64, "f32"), plan.buffer("z", 32, "f32")
    plan.launch(COPY, x=x.view((n,)), y=y.view((n,)), n=n)
    plan.launch(COPY, x=y.view((32,), 32), y=z, n=32)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, lineage=True)
    for value, sources, memory in (
        (4, [], ["y"]),
        (64, [0], []),
        (48, [0], ["y"]),
        (32, [], ["y"]),
    ):
        report = prepared(n=value).report
        assert report is not None
        assert report.flow is not None
        assert (report.flow.direct(1), report.flow.given_to(1)) == (sources, memory), value
    before = prepared(n=4)
    with pytest.raises(bl.errors.BricklineError):
        before(n=1000)
    assert before.report is not None
    assert "y" in before.report.explain("z"), "of the run, whatever was asked for since"


def test_items_of_sources_are_items_that_ran(cache: KernelCache) -> None:
    plan = Plan("repeated")
    x, y = plan.buffer("x", 4096, "f32"), plan.buffer("y", 4096, "f32")
    for _ in range(3):
        plan.launch(residual(), a=x, b=x, y=y, n=4096)
    report = plan.prepare("CPU", "megakernel", cache=cache, lineage=True)().report
    assert report is not None
    assert report.outputs == {"y": (2,)}
    assert [(each.tasks, each.items) for each in sources_of(report, report.outputs["y"])] == [
        (1, report.published_items)
    ]
    assert f"in all 2 launches with {report.published_items} items" in report.explain("y")


# ------------------------------------------------------------------------------------------- queues

WORDS = 40
SLICES = st.tuples(st.integers(0, WORDS - 8), st.integers(1, 8))
SUBMISSIONS = st.tuples(SLICES, SLICES, SLICES).filter(
    lambda row: all(
        each[0] + each[1] <= row[2][0] or row[2][0] + row[2][1] <= each[0] for each in row[:2]
    )
)


def elements(piece: tuple[int, int]) -> list[tuple[int, int]]:
    return [(0, piece[0] + k) for k in range(piece[1])]


def check_queue(
    report: MegakernelReport,
    rows: Sequence[tuple[tuple[int, int], ...]],
    named: dict[str, tuple[int, int]],
) -> None:
    """Compare a report with who wrote what, element by element, since the queue was empty."""
    assert report.flow is not None
    memory, first, unnamed = ByElement(), report.first_submission, dict[Any, str]()
    for task, pieces in enumerate(rows):
        alias = int(report.tasks.alias[task])
        sources, names = set[int](), set[str]()
        for argument, piece in zip("ab", pieces[:2], strict=True):
            for each in elements(piece):
                if each in memory.writer:
                    sources.add(memory.writer[each])
                    continue
                around = [
                    (size, place, name)
                    for place, (name, (begin, size)) in enumerate(named.items())
                    if begin <= each[1] < begin + size
                ]
                own = f"{argument} of submission {first + task}"
                if alias < 0:
                    names.add(min(around)[2] if around else unnamed.setdefault(piece, own))
        if alias >= 0:
            sources, names = {alias}, set()
        assert report.flow.direct(task) == sorted(sources)
        assert set(report.flow.given_to(task)) == names
        memory.write(task, alias, elements(pieces[2]))
    for name, piece in named.items():
        assert report.outputs[name] == tuple(
            first + each for each in memory.last_to(elements(piece))
        )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    periods=st.lists(
        st.lists(st.lists(SUBMISSIONS, min_size=1, max_size=5), min_size=1, max_size=4),
        min_size=1,
        max_size=2,
    ),
    copies=st.integers(1, 3),
    named=st.dictionaries(st.sampled_from("opqr"), SLICES, max_size=4),
)
def test_lineage_of_a_queue_is_that_of_its_elements(
    periods: list[list[list[Any]]], copies: int, named: dict[str, tuple[int, int]]
) -> None:
    """Batches that repeat their submissions, so that some are aliases of others."""
    memory = floats(WORDS)

    def part(piece: tuple[int, int]) -> Any:
        return memory[piece[0] : sum(piece)]

    with Megakernel("CPU", [TOUCH], workers=2, lineage=True) as mega:
        for batches in periods:
            rows = [row for batch in batches for row in batch * copies]
            for batch in batches:
                with mega.batch():
                    for row in batch * copies:
                        a, b, y = map(part, row)
                        mega.submit("touch", [a, b], [y], [len(a), len(b), len(y)])
            report = mega.drain(outputs={name: part(piece) for name, piece in named.items()})
            check_queue(report, rows, named)


def test_a_repeat_has_the_lineage_of_what_it_repeats() -> None:
    b, c, y = floats(32), floats(32), floats(32)

    def one(mega: Megakernel) -> None:
        mega.submit("fill", writes={"y": b}, params={"n": 32, "value": 1.0})

    with Megakernel("CPU", [FILL, COPY], workers=1, lineage=True) as mega:
        with mega.batch():
            one(mega)
            mega.submit("fill", writes={"y": c}, params={"n": 32, "value": 2.0})
            mega.submit("copy", {"x": c}, {"y": y}, {"n": 32})
            one(mega)  # computed by 0
            one(mega)  # and so is this
            mega.submit("copy", {"x": b}, {"y": c}, {"n": 32})
        with mega.batch():  # a batch of its own knows nothing of the one before
            one(mega)
            one(mega)
        report = mega.drain(outputs={"b": b, "c": c, "y": y})
    assert report.tasks.alias.tolist() == [-1, -1, -1, 0, 0, -1, -1, 6]
    assert report.flow is not None
    assert [report.flow.direct(row) for row in range(8)] == [[], [], [1], [0], [0], [0], [], [6]]
    assert report.outputs == {"b": (7,), "c": (5,), "y": (2,)}
    assert "3  fill  = 0, which computed the same" in report.explain(3)
    assert report.region_lineage[0] == (0,)
    assert report.lineage_items == 8


def test_given_memory_of_a_queue_has_the_name_that_fits_its_bytes() -> None:
    x, y, z = floats(32), floats(8), floats(16)
    with Megakernel("CPU", [FILL, COPY], workers=1, lineage=True) as mega:
        mega.submit("fill", writes={"y": x[:8]}, params={"n": 8, "value": 1.0})
        mega.submit("copy", {"x": x[:16]}, {"y": z}, {"n": 16})
        mega.submit("copy", {"x": x[4:12]}, {"y": y}, {"n": 8})
        mega.submit("copy", {"x": x[:16]}, {"y": z}, {"n": 16})
        report = mega.drain(outputs={"head": x[:8], "middle": x[8:12], "all": x[:24]})
        assert report.flow is not None
        assert report.flow.given_to(1) == ["middle", "all"], "what is named head was written"
        assert report.flow.given_to(2) == ["middle"]
        mega.submit("copy", {"x": x[:16]}, {"y": z}, {"n": 16})
        mega.submit("copy", {"x": x[:16]}, {"y": z}, {"n": 16})
        report = mega.drain()
    assert report.flow is not None
    assert report.flow.memory == ("x of submission 4",), "the same bytes have one name"
    assert "from x of submission 4" in report.explain(5)
    assert report.lineage_ns is not None


def test_a_queue_without_lineage_keeps_nothing() -> None:
    y = floats(8)
    for lineage in (False, True):
        with Megakernel("CPU", [FILL], workers=1, lineage=lineage) as mega:
            mega.submit("fill", writes={"y": y}, params={"n": 8, "value": 1.0})
            ends, accesses = mega._core.accesses()
            assert (len(ends), len(accesses)) == ((8, 32) if lineage else (0, 0))
            report = mega.drain()
            assert (report.lineage_ns is None) == (report.flow is None) == (not lineage)
            assert mega._core.accesses() == (b"", b"")


def test_memory_without_elements_is_nobodys(cache: KernelCache) -> None:
    kernel = Kernel(
        "maybe",
        """BRICKLINE void maybe(Block& block, const float* a, const float* x, float* y, int64_t k) {
               block.once([&] { y[0] = k ? a[0] : x[0]; });
           }""",
        [
            *(Param("a", "f32", "k"), Param("x", "f32", 1), Param("y", "f32", 1, "write")),
            Scalar("k", low=0),
        ],
    )
    empty, x, y = floats(0), floats(1), floats(1)
    with Megakernel("CPU", [kernel], workers=1, lineage=True, prove=True, cache=cache) as mega:
        with mega.batch():
            for _ in range(2):
                mega.submit("maybe", [empty, x], [y], [0])
        report = mega.drain()
    assert report.tasks.alias.tolist() == [-1, 0]
    assert report.flow is not None
    assert report.flow.given_to(0) == ["x of submission 0"]


# ------------------------------------------------------------------------------------ planning time


def test_a_report_has_the_planning_of_its_run(cache: KernelCache) -> None:
    plan = Plan("planned")
    n = plan.variable("n", 1, 65536)
    a, y = plan.buffer("a", n, "f32"), plan.buffer("y", n, "f32")
    plan.launch(residual(), a=a, b=a, y=y, n=n)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2)
    planned = []
    for value in (64, 64, 60000, 64):
        report = prepared(n=value).report
        assert report is not None
        spent = (report.queue_plan_ns, report.queue_publish_ns, report.backend_dispatch_ns)
        assert sum(each or 0 for each in spent) <= report.wall_time_ns
        planned.append(report.queue_plan_ns)
    assert planned[1] == 0, "nothing was planned"
    assert all(planned[k] for k in (0, 2, 3)), "in prepare(), and as the number of blocks changed"
