"""Bricks that tasks and generators of one thread hold open at once, on a clock of its own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brickline import BrickProfiler
from brickline.errors import UsageError
from brickline.graph import EdgeKind


@pytest.fixture
def p() -> Iterator[BrickProfiler]:
    with BrickProfiler("tasks", enabled=True, device="NULL") as profiler:
        yield profiler


class Expected:
    """What a brute force over the events of every task gives: each has a stack of its own."""

    def __init__(self, profiler: BrickProfiler) -> None:
        self._profiler = profiler
        self._open: dict[Any, list[list[Any]]] = defaultdict(list)
        self.totals: dict[str, list[int]] = defaultdict(list)
        self.exclusive: dict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def brick(self, task: Any, name: str) -> Iterator[None]:
        """Hold a brick open, and expect its entry."""
        stack = self._open[task]
        with self._profiler.brick(name):
            stack.append([name, self._profiler.elapsed_ns(), 0])
            try:
                yield
            finally:
                _, began, inner = stack.pop()
                duration = self._profiler.elapsed_ns() - began
                self.totals[name].append(duration)
                self.exclusive[name] += duration - inner
                if stack:
                    stack[-1][2] += duration

    def check(self) -> None:
        """Compare what was recorded."""
        rows = {row.name: row for row in self._profiler.all_brick_stats()}
        assert set(rows) == set(self.totals)
        for name, row in rows.items():
            durations = self.totals[name]
            assert (row.count, row.total_ns) == (len(durations), sum(durations)), name
            assert (row.min_ns, row.max_ns) == (min(durations), max(durations)), name
            assert row.exclusive_ns == self.exclusive[name], name
        assert self._profiler.profile().recording.out_of_order == 0


# A brick: its name, and what happens in it. A number is time that passes, None an await.
_BRICKS = st.deferred(
    lambda: st.tuples(st.sampled_from(["a", "b", "c"]), st.lists(_EVENTS, max_size=4))
)
_EVENTS: st.SearchStrategy[Any] = st.one_of(st.integers(1, 50), st.none(), _BRICKS)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(_EVENTS, max_size=5), min_size=1, max_size=8))
def test_random_tasks_have_the_times_of_a_stack_each(programs: list[list[Any]]) -> None:
    with BrickProfiler("tasks", enabled=True, device="NULL") as p:
        expected = Expected(p)

        async def run(task: int, events: list[Any]) -> None:
            for event in events:
                if event is None:
                    await asyncio.sleep(0)
                elif isinstance(event, int):
                    p.advance(event)
                else:
                    # Nothing of the expectation may stand between: frames tell entries apart.
                    with expected.brick(task, event[0]):
                        await run(task, event[1])

        async def main() -> None:
            await asyncio.gather(*(run(task, events) for task, events in enumerate(programs)))

        asyncio.run(main())
        expected.check()


def test_eight_tasks_hold_a_brick_across_their_awaits(p: BrickProfiler) -> None:
    async def fetch(task: int) -> None:
        for _ in range(20):
            with p.brick("Fetch"):
                for _ in range(1 + task):
                    p.advance(1)
                    await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(fetch(task) for task in range(8)))

    asyncio.run(main())
    row = p.brick_stats("Fetch")
    # While all eight run, a round of the loop takes 8 ns: task 0 waits for one, task 7 for eight.
    assert (row.count, row.out_of_order, row.min_ns, row.max_ns) == (160, 0, 8, 64)
    assert row.exclusive_ns == row.total_ns
    assert len(p.profile().lanes) == 8


def test_a_task_group_that_is_cancelled_leaves_its_bricks(p: BrickProfiler) -> None:
    async def hold(ns: int) -> None:
        with p.brick("Held"), p.brick("Inner"):
            p.advance(ns)
            await asyncio.sleep(3600)

    async def fail() -> None:
        await asyncio.sleep(0)
        p.advance(100)
        raise ValueError("enough")

    async def main() -> None:
        with p.brick("Group"):
            async with asyncio.TaskGroup() as group:
                for ns in (1, 10):
                    group.create_task(hold(ns))
                group.create_task(fail())

    with pytest.raises(ExceptionGroup):
        asyncio.run(main())
    rows = {row.name: row for row in p.all_brick_stats()}
    assert (rows["Held"].count, rows["Held"].total_ns) == (2, 111 + 110)
    assert (rows["Held"].exclusive_ns, rows["Inner"].exclusive_ns) == (0, 111 + 110)
    assert rows["Group"].total_ns == 111
    assert p.profile().recording.out_of_order == 0
    with p.brick("After"):
        p.advance(7)
    assert p.brick_stats("After").exclusive_ns == 7


def test_async_generators_hold_a_brick_across_their_values(p: BrickProfiler) -> None:
    async def tokens(ns: int) -> AsyncIterator[int]:
        with p.brick("Tokens"):
            for token in range(3):
                p.advance(ns)
                await asyncio.sleep(0)
                yield token

    async def consume(ns: int) -> None:
        async for _ in tokens(ns):
            with p.brick("Detokenize"):
                p.advance(1)

    async def main() -> None:
        await asyncio.gather(consume(10), consume(1000))

    asyncio.run(main())
    rows = {row.name: row for row in p.all_brick_stats()}
    # Each begins with its own first token and ends with the last of its consumer's work.
    assert rows["Tokens"].count == 2
    assert (rows["Tokens"].max_ns, rows["Tokens"].min_ns) == (3035, 3036 - 10)
    assert rows["Detokenize"].total_ns == 6
    assert p.profile().recording.out_of_order == 0


def test_a_generator_that_another_task_closes_ends_its_own_entry(p: BrickProfiler) -> None:
    async def tokens() -> AsyncIterator[int]:
        with p.brick("Tokens"):
            while True:
                yield 0

    async def take_one(streams: list[Any]) -> None:
        streams.append(tokens())
        await anext(streams[-1])
        p.advance(1)

    async def main() -> None:
        streams: list[Any] = []
        await asyncio.gather(*(take_one(streams) for _ in range(3)))  # begun at 0, 1 and 2
        p.advance(100)
        await asyncio.create_task(streams[1].aclose())  # at 103
        p.advance(1000)
        await asyncio.create_task(streams[0].aclose())
        await asyncio.create_task(streams[2].aclose())

    asyncio.run(main())
    row = p.brick_stats("Tokens")
    assert (row.count, row.min_ns, row.max_ns) == (3, 102, 1103)
    assert row.total_ns == 102 + 1103 + 1101
    assert p.profile().recording.orphan_exits == 0


def test_generators_in_turns_have_true_durations(p: BrickProfiler) -> None:
    def values(ns: int) -> Iterator[int]:
        with p.brick("Values"):
            for value in range(2):
                p.advance(ns)
                yield value

    assert list(zip(values(1), values(10), strict=True)) == [(0, 0), (1, 1)]
    row = p.brick_stats("Values")
    # The first from 0 to 22, the second from 1 to 22; on one stack neither lies inside the other.
    assert (row.count, row.total_ns, row.min_ns) == (2, 22 + 21, 21)
    assert (row.out_of_order, row.exclusive_ns) == (2, 0)


def test_tasks_that_share_a_context_have_true_durations(p: BrickProfiler) -> None:
    async def work(ns: int) -> None:
        with p.brick("Work"):
            p.advance(ns)
            await asyncio.sleep(0)
            p.advance(ns)

    async def main() -> None:
        shared = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.create_task(work(ns), context=shared) for ns in (1, 10)))

    asyncio.run(main())
    row = p.brick_stats("Work")
    assert (row.count, row.min_ns, row.max_ns) == (2, 12, 21)


def test_what_runs_in_a_context_of_its_own_lies_inside(p: BrickProfiler) -> None:
    def inner(depth: int) -> None:
        if depth:
            contextvars.copy_context().run(inner, depth - 1)
        else:
            with p.brick("Inner"):
                p.advance(10)

    with p.brick("Outer"):
        p.advance(1)
        contextvars.copy_context().run(inner, 5)
        asyncio.run(asyncio.sleep(0))
    outer, inside = p.brick_stats("Outer"), p.brick_stats("Inner")
    assert (outer.total_ns, outer.exclusive_ns) == (11, 1)
    assert inside.exclusive_ns == 10
    assert len(p.profile().lanes) == 1


def test_a_stack_of_exits_may_leave_bricks_elsewhere(p: BrickProfiler) -> None:
    def enter(stack: contextlib.ExitStack) -> None:
        stack.enter_context(p.brick("Outer"))
        stack.enter_context(p.brick("Inner"))

    stack = contextlib.ExitStack()
    stack.enter_context(p.step(tokens=2))
    enter(stack)
    p.advance(5)
    stack.close()
    assert p.brick_stats("Outer").total_ns == p.brick_stats("Inner").exclusive_ns == 5
    assert p.profile().recording.out_of_order == 0
    assert p.profile().steps[""].tokens == 2
    with pytest.raises(UsageError, match=r"expected a brickline\._core\.BrickHandle.*got int"):
        type(p.brick("Outer")).__enter__(3)  # type: ignore[arg-type]


def test_a_timer_may_be_stopped_by_another_task(p: BrickProfiler) -> None:
    async def start(ns: int) -> Any:
        timer = p.start("Request")
        p.advance(ns)
        await asyncio.sleep(0)
        return timer

    async def main() -> None:
        for timer in await asyncio.gather(start(1), start(10)):
            p.stop(timer)

    asyncio.run(main())
    row = p.brick_stats("Request")
    assert (row.count, row.min_ns, row.max_ns, row.out_of_order) == (2, 10, 11, 0)


def test_more_tasks_than_have_a_stack_of_their_own(p: BrickProfiler) -> None:
    async def hold(barrier: asyncio.Barrier) -> None:
        with p.brick("Held"):
            p.advance(1)
            await barrier.wait()

    async def main() -> None:
        barrier = asyncio.Barrier(300)
        await asyncio.gather(*(hold(barrier) for _ in range(300)))

    asyncio.run(main())
    row = p.brick_stats("Held")
    assert (row.count, row.total_ns) == (300, sum(range(1, 301)))
    assert p.profile().recording.lost == 0


def test_steps_of_tasks_are_passes_of_their_own(p: BrickProfiler) -> None:
    async def serve(tokens: int) -> None:
        for _ in range(3):
            with p.step(tokens=tokens, phase="decode"), p.brick("LmHead"):
                p.advance(10)
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(serve(tokens) for tokens in (1, 2, 3, 4)))

    asyncio.run(main())
    steps = p.profile().steps["decode"]
    assert (steps.count, steps.tokens) == (12, 30)
    assert steps.elapsed_ns == 120
    assert steps.wall_ns == p.brick_stats("LmHead").total_ns > 3 * 120
    assert steps.tokens_per_s == pytest.approx(30 / 120e-9)
    assert steps.us_per_token == pytest.approx(steps.wall_ns / 1e3 / 30)
    assert p.profile().coverage == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 20)), max_size=40))
def test_elapsed_time_is_the_union_of_the_passes(events: list[tuple[bool, int, int]]) -> None:
    """Passes begin and end in any order; a moment in which several run counts once."""
    with BrickProfiler("union", enabled=True, device="NULL") as p:
        stacks: dict[int, Any] = {}
        union, spans, now = set(), {}, 0
        for begins, which, ns in events:
            context = contextvars.copy_context()
            if begins and which not in stacks:
                step = p.step(tokens=2, phase="decode")
                context.run(step.__enter__)
                stacks[which], spans[which] = (context, step), now
            elif not begins and which in stacks:
                context, step = stacks.pop(which)
                context.run(step.__exit__, None, None, None)
                union.update(range(spans.pop(which), now))
            p.advance(ns)
            now += ns
        ended = {moment for began in spans.values() for moment in range(began, now)}
        steps = p.profile().steps.get("decode")
        elapsed = steps.elapsed_ns if steps else 0
        # What is still open adds its time when it ends.
        assert len(union - ended) <= elapsed <= len(union | ended)
        for context, step in stacks.values():
            context.run(step.__exit__, None, None, None)
        if steps or stacks:
            assert p.profile().steps["decode"].elapsed_ns == len(union | ended)


def test_tokens_per_second_of_threads_are_those_of_all(p: BrickProfiler) -> None:
    begun, ended = threading.Barrier(5), threading.Barrier(5)

    def work() -> None:
        with p.step(tokens=3, phase="decode"):
            begun.wait()
            ended.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    p.advance(1_000_000)
    ended.wait()
    for thread in threads:
        thread.join()
    steps = p.profile().steps["decode"]
    assert (steps.elapsed_ns, steps.wall_ns) == (1_000_000, 4_000_000)
    assert steps.tokens_per_s == pytest.approx(12 / 1e-3)
    assert "12000 tokens/s" in str(p.summary())


def test_the_graph_of_tasks_keeps_what_each_held(p: BrickProfiler) -> None:
    p.enable_graph()

    async def work(name: str) -> None:
        with p.brick(name):
            await asyncio.sleep(0)
            with p.brick(f"in {name}"):
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(main())
    nodes = {node.id: node.name for node in p.graph.nodes()}
    contains = {
        (nodes[edge.source], nodes[edge.target])
        for edge in p.graph.edges()
        if edge.kind is EdgeKind.CONTAINS
    }
    assert contains == {("a", "in a"), ("b", "in b")}
