"""Planning, validation and lineage of a megakernel against brute force, byte by byte."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brickline.errors import PlanError
from brickline.executor.megakernel.planning import (
    ATOMIC,
    NO_TASK,
    PURE,
    REASONS,
    SET,
    Initial,
    PlannedTasks,
    TaskBuilder,
    Tasks,
    check_schedule,
    plan_tasks,
)
from brickline.hazards import Tracker
from brickline.lineage import Lineage

BYTES = 48
"""Small, so that ranges meet in every way, and wide enough for one read of many pieces."""


@dataclass(frozen=True)
class Touch:
    """A range of a space; `step` bytes of it for each block, all of it where that is 0."""

    space: int
    begin: int
    end: int
    step: int = 0

    def of_block(self, block: int) -> range:
        """The bytes that one block touches."""
        if not self.step:
            return range(self.begin, self.end)
        first = min(self.begin + block * self.step, self.end)
        return range(first, min(first + self.step, self.end))


@dataclass(frozen=True)
class Task:
    """One submission."""

    op: int = 0
    reads: tuple[Touch, ...] = ()
    writes: tuple[Touch, ...] = ()
    param: int = 0
    blocks: int = 1
    flags: int = 0


def blocks_meet(a: Task, b: Task) -> bool:
    """Whether a block of one touches what another block of the other writes, or the reverse."""
    for i, j in product(range(a.blocks), range(b.blocks)):
        if i == j:
            continue
        for x, y in [
            *product(a.writes, b.reads + b.writes),
            *product(a.reads, b.writes),
        ]:
            if x.space == y.space and set(x.of_block(i)) & set(y.of_block(j)):
                return True
    return False


def on_its_own(task: Task) -> Task:
    """A task whose blocks do not meet each other: with one block, where they would."""
    return replace(task, blocks=1) if blocks_meet(task, task) else task


def built(program: list[Task]) -> Tasks:
    """The columns of a program."""
    builder = TaskBuilder()
    for task in program:
        reads = [(each.space, each.begin, each.end, each.step) for each in task.reads]
        writes = [(each.space, each.begin, each.end, each.step) for each in task.writes]
        builder.add(task.op, reads, writes, [task.param], blocks=task.blocks, flags=task.flags)
    return builder.tasks()


@st.composite
def touches(draw: st.DrawFn) -> Touch:
    """Ranges on a grid, often whole spaces and often one piece of them."""
    space = draw(st.integers(0, 2))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return Touch(space, 0, BYTES, draw(st.sampled_from([0, 12, 16])))
    if kind == 1:
        begin = 4 * draw(st.integers(0, 11))
        return Touch(space, begin, begin + 4)
    begin, end = sorted((draw(st.integers(0, BYTES)), draw(st.integers(0, BYTES))))
    return Touch(space, begin, end, draw(st.sampled_from([0, 0, 3, 12])))


tasks_of_one_block = st.builds(
    Task,
    op=st.integers(0, 1),
    reads=st.lists(touches(), max_size=2).map(tuple),
    writes=st.lists(touches(), max_size=2).map(tuple),
    flags=st.sampled_from([0, PURE, PURE, PURE | ATOMIC]),
)
tasks_of_blocks = st.builds(
    Task,
    op=st.integers(0, 1),
    reads=st.lists(touches(), max_size=2).map(tuple),
    writes=st.lists(touches(), max_size=1).map(tuple),
    blocks=st.sampled_from([1, 2, 4, 4, 4]),
    flags=st.sampled_from([0, PURE]),
).map(on_its_own)


def repeated(tasks: st.SearchStrategy[Task], most: int = 16) -> st.SearchStrategy[list[Task]]:
    """Programs whose tasks come again and again."""
    return st.lists(tasks, min_size=1, max_size=6).flatmap(
        lambda few: st.lists(st.sampled_from(few), max_size=most)
    )


programs = st.one_of(
    st.lists(tasks_of_one_block, max_size=12),
    repeated(tasks_of_one_block),
    st.lists(tasks_of_blocks, max_size=12),
    repeated(tasks_of_blocks),
)


# --------------------------------------------------------------------------------- dependencies


def hazards_by_byte(program: list[Task]) -> list[set[int]]:
    """Of each task, the earlier ones that touch one of its bytes, one of the two writing."""
    found = []
    for number, task in enumerate(program):
        mine = [(each, False) for each in task.reads] + [(each, True) for each in task.writes]
        found.append(
            {
                earlier
                for earlier in range(number)
                for (x, x_writes), (y, y_writes) in product(
                    mine,
                    [(each, False) for each in program[earlier].reads]
                    + [(each, True) for each in program[earlier].writes],
                )
                if (x_writes or y_writes)
                and x.space == y.space
                and max(x.begin, y.begin) < min(x.end, y.end)
            }
        )
    return found


def closed(direct: list[set[int]]) -> list[set[int]]:
    """All that come before each task."""
    found: list[set[int]] = []
    for each in direct:
        found.append(each.union(*(found[earlier] for earlier in each)))
    return found


@given(programs)
def test_tasks_wait_for_what_hazards_say(program: list[Task]) -> None:
    planned = plan_tasks(built(program), dedupe=False, join=False)
    waits = [set(planned.waits_of(task)) for task in range(len(program))]
    hazards = hazards_by_byte(program)
    for mine, wanted in zip(waits, hazards, strict=True):
        assert mine <= wanted, "a wait for a task that has nothing to do with it"
    before = closed(waits)
    for mine, wanted in zip(before, hazards, strict=True):
        assert wanted <= mine, "a hazard that nothing orders"
    tracker, by_reference = Tracker(), []
    for number, task in enumerate(program):
        found = [h for t in task.reads for h in tracker.read(number, t.space, t.begin, t.end)]
        found += [h for t in task.writes for h in tracker.write(number, t.space, t.begin, t.end)]
        by_reference.append({hazard.earlier for hazard in found})
    assert before == closed(by_reference)
    levels: list[int] = []
    for mine in waits:
        levels.append(1 + max((levels[each] for each in mine), default=-1))
    assert planned.level.tolist() == levels
    assert planned.critical_cost == (1 + max(levels) if levels else 0)


def test_many_who_read_many_share_one_set() -> None:
    builder = TaskBuilder()
    for level in range(4):
        for k in range(128):
            reads = [(level % 2, 0, 128)] if level else []
            builder.add(0, reads, [((level + 1) % 2, k, k + 1)])
    planned = plan_tasks(builder.tasks(), dedupe=False, join=False)
    assert len(planned.set_begin) - 1 == 3
    assert len(planned.entries) == 3 * 128
    assert planned.waits_of(200) == list(range(128))
    assert planned.waits_of(511) == list(range(256, 384))


# --------------------------------------------------------------------------------------- values


@dataclass
class Memory:
    """Bytes, each with a value that tells how it came about."""

    bytes: dict[tuple[int, int], object] = field(default_factory=dict)

    def read(self, touch: Touch, block: int) -> tuple[object, ...]:
        """What a block reads."""
        return tuple(self.bytes.get((touch.space, at), at) for at in touch.of_block(block))

    def run(self, task: Task, block: int) -> None:
        """One block: all that it writes follows from all that it reads."""
        seen = tuple(self.read(touch, block) for touch in task.reads)
        for touch in task.writes:
            if touch.step or block == 0:
                for at in touch.of_block(block):
                    value = hash((task.op, task.param, block, seen, at))
                    if task.flags & ATOMIC:
                        value += hash(self.bytes.get((touch.space, at), at))
                    self.bytes[touch.space, at] = value


def serial(program: list[Task]) -> Memory:
    """The memory after all tasks, one after the other."""
    memory = Memory()
    for task in program:
        for block in range(task.blocks):
            memory.run(task, block)
    return memory


def shuffled(
    program: list[Task], planned: PlannedTasks, workers: int, chance: random.Random
) -> Memory:
    """The memory after a run by workers that take turns at random, block by block."""
    first = planned.assign(workers)
    begins, listed = planned.lists(workers, first)
    queues = []
    for worker in range(workers):
        steps = []
        for task in listed[int(begins[worker]) : int(begins[worker + 1])].tolist():
            blocks, parts = program[task].blocks, min(program[task].blocks, workers)
            part = (worker - int(first[task])) % workers
            share = range(blocks * part // parts, blocks * (part + 1) // parts)
            steps += [(task, block, block == share[0], block == share[-1]) for block in share]
        queues.append(steps)
    missing = [min(task.blocks, workers) for task in program]
    memory = Memory()
    while any(queues):
        able = [
            queue
            for queue in queues
            if queue
            and (
                not queue[0][2] or not any(missing[each] for each in planned.waits_of(queue[0][0]))
            )
        ]
        assert able, "all workers wait"
        task, block, _, is_last = chance.choice(able).pop(0)
        memory.run(program[task], block)
        missing[task] -= is_last
    return memory


@given(programs, st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_any_run_of_a_plan_gives_what_a_serial_run_gives(
    program: list[Task], workers: int, chance: random.Random
) -> None:
    planned = plan_tasks(built(program))
    first = planned.assign(workers)
    lists = planned.lists(workers, first)
    check_schedule(planned)
    check_schedule(planned, workers=workers, first_worker=first, lists=lists, slots=len(program))
    expected = serial(program)
    for _ in range(3):
        assert shuffled(program, planned, workers, chance).bytes == expected.bytes


# --------------------------------------------------------------------------------------- dedupe


def last_writers(touch: Touch, program: list[Task], upto: int, runs: list[bool]) -> list[int]:
    """Of each byte of a range, who wrote it last, of those that ran."""
    found = []
    for at in range(touch.begin, touch.end):
        writers = [
            task
            for task in range(upto)
            if runs[task]
            and any(w.space == touch.space and w.begin <= at < w.end for w in program[task].writes)
        ]
        found.append(writers[-1] if writers else -1)
    return found


@given(repeated(st.one_of(tasks_of_one_block, tasks_of_blocks)))
@settings(max_examples=150)
def test_what_is_computed_again_is_left_out_and_nothing_else(program: list[Task]) -> None:
    planned = plan_tasks(built(program), join=False)
    refusals = {each.later: each for each in planned.refusals}
    runs: list[bool] = []
    inputs: list[list[list[int]]] = []
    for number, task in enumerate(program):
        mine = [last_writers(touch, program, number, runs) for touch in task.reads]
        has_output = any(touch.begin < touch.end for touch in task.writes)
        same = replace(task, flags=0)
        alike = [
            each for each in range(number) if runs[each] and replace(program[each], flags=0) == same
        ]
        alike = alike if has_output else []
        code = None
        if alike:
            newest = alike[-1]
            outputs = [last_writers(touch, program, number, runs) for touch in task.writes]
            if (task.flags | program[newest].flags) & ATOMIC:
                code = "MK202"
            elif not task.flags & program[newest].flags & PURE:
                code = "MK201"
            elif mine != inputs[newest]:
                code = "MK203"
            elif any(set(each) - {newest} for each in outputs):
                code = "MK204"
            if code is None:
                assert planned.alias[number] == newest
                assert planned.region[number] == NO_TASK
                assert number not in refusals
            elif not any(set(each) - {newest} for each in outputs):
                assert (refusals[number].earlier, refusals[number].code) == (newest, code)
                assert refusals[number].reason == REASONS[int(code[2:])]
            elif number in refusals:  # it was found among those who wrote there before
                assert refusals[number].earlier in alike
                assert refusals[number].code in ("MK201", "MK202", "MK203", "MK204")
        else:
            assert number not in refusals
        is_run = not alike or code is not None
        assert (planned.alias[number] < 0) == is_run
        runs.append(is_run)
        inputs.append(mine)
    assert planned.deduped == runs.count(False)


def test_a_range_without_bytes_is_the_same_again() -> None:
    program = [Task(writes=(Touch(0, 0, 48), Touch(1, 0, 0)), flags=PURE)] * 2
    planned = plan_tasks(built(program))
    assert planned.alias.tolist() == [-1, 0]
    check_schedule(planned)


def test_a_write_in_between_and_an_atomic_are_never_deduped() -> None:
    x, y = Touch(0, 0, 8), Touch(1, 0, 8)
    copy = Task(0, (x,), (y,), flags=PURE)
    for between, code in (
        (Task(1, (), (Touch(0, 7, 8),)), "MK203"),
        (Task(1, (), (Touch(1, 0, 1),)), "MK204"),
    ):
        planned = plan_tasks(built([copy, between, copy, copy]), join=False)
        assert planned.alias.tolist() == [-1, -1, -1, 2]
        assert [each.code for each in planned.refusals] == [code]
        assert next(planned.refusals).other == 1
    add = Task(0, (x,), (y,), flags=PURE | ATOMIC)
    assert plan_tasks(built([add, add])).deduped == 0
    in_place = Task(0, (x,), (x,), flags=PURE)
    assert plan_tasks(built([in_place, in_place])).deduped == 0


# --------------------------------------------------------------------------------------- regions


@given(st.one_of(st.lists(tasks_of_blocks, max_size=12), repeated(tasks_of_blocks)))
@settings(max_examples=150)
def test_regions_are_chains_of_blocks_that_never_meet(program: list[Task]) -> None:
    planned = plan_tasks(built(program), dedupe=False)
    apart = plan_tasks(built(program), dedupe=False, join=False)
    members: dict[int, list[int]] = {}
    for task, region in enumerate(planned.region.tolist()):
        members.setdefault(region, []).append(task)
    for chain in members.values():
        assert len({program[task].blocks for task in chain}) == 1
        for k, later in enumerate(chain):
            assert not any(blocks_meet(program[each], program[later]) for each in chain[:k])
            assert k == 0 or chain[k - 1] in apart.waits_of(later)
    for task in range(len(program)):
        mine = planned.region[task]
        assert all(planned.region[each] < mine for each in planned.waits_of(task))
        outside = [each for each in apart.waits_of(task) if planned.region[each] != mine]
        assert planned.waits_of(task) == outside
    joined = {task for chain in members.values() for task in chain[1:]}
    waiting = {task for task in range(len(program)) if apart.waits_of(task)}
    assert {each.later for each in planned.refusals} == waiting - joined
    places = {task: place for place, task in enumerate(planned.order.tolist())}
    assert all(places[each] < places[t] for t in places for each in apart.waits_of(t))


CHAIN = Touch(0, 0, 16, 4), Touch(1, 0, 16, 4), Touch(2, 0, 16, 4)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ([Task(0, (), (CHAIN[0],), 0, 4), Task(1, (CHAIN[0],), (CHAIN[1],), 0, 4)], None),
        ([Task(0, (), (Touch(0, 0, 16),)), Task(1, (Touch(0, 0, 16),), ())], None),
        ([Task(0, (), (CHAIN[0],), 0, 4), Task(1, (Touch(0, 0, 16, 8),), (), 0, 2)], "MK302"),
        ([Task(0, (), (CHAIN[0],), 0, 4), Task(1, (Touch(0, 0, 16),), (), 0, 4)], "MK303"),
        ([Task(0, (), (CHAIN[0],), 0, 4), Task(1, (Touch(0, 4, 16, 4),), (), 0, 4)], "MK303"),
        (
            [
                Task(0, (), (CHAIN[0],), 0, 4),
                Task(1, (CHAIN[0],), (CHAIN[1],), 0, 4),
                Task(2, (CHAIN[0],), (CHAIN[2],), 0, 4),
            ],
            "MK304",
        ),
        (
            [
                Task(0, (), (CHAIN[0],), 0, 4, ATOMIC),
                Task(1, (CHAIN[0],), (CHAIN[1],), 0, 4),
            ],
            "MK305",
        ),
        (  # 2 waits for 0 and 1, and 1 for 0: it can follow neither without the other
            [
                Task(0, (), (CHAIN[0],), 0, 4),
                Task(1, (Touch(0, 0, 16),), (Touch(1, 0, 4),), 0, 1),
                Task(2, (CHAIN[0], Touch(1, 0, 4)), (CHAIN[2],), 0, 4),
            ],
            "MK302",
        ),
        (
            [
                Task(0, (), (CHAIN[0],), 0, 4),
                Task(1, (), (CHAIN[1],), 0, 4),
                Task(2, (CHAIN[0], CHAIN[1]), (CHAIN[2],), 0, 4),
            ],
            "MK307",
        ),
    ],
)
def test_each_refusal_to_join_has_its_code(program: list[Task], code: str | None) -> None:
    planned = plan_tasks(built(program))
    last = len(program) - 1
    refused = [each.code for each in planned.refusals if each.later == last]
    assert refused == ([] if code is None else [code])
    assert (planned.region[last] == planned.region[0]) == (code is None)


def test_a_cycle_through_the_region_has_its_code() -> None:
    """3 would follow 2 in the region of 0, but waits for 1, which waits for 0."""
    program = [
        Task(0, (), (CHAIN[0],), 0, 4),
        Task(1, (Touch(0, 0, 16),), (Touch(3, 0, 4),), 0, 1),
        Task(2, (CHAIN[0],), (CHAIN[1],), 0, 4),
        Task(3, (CHAIN[1], Touch(3, 0, 4)), (), 0, 4),
    ]
    planned = plan_tasks(built(program))
    assert planned.region[2] == planned.region[0] != planned.region[3]
    found = {each.later: each for each in planned.refusals}
    assert (found[3].code, found[3].earlier, found[3].other) == ("MK306", 2, 1)


# -------------------------------------------------------------------------------------- validator


def happens_before(
    program: list[Task],
    waits: list[list[int]],
    order: list[int],
    first: list[int],
    workers: int,
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Of each part of a task, the parts that are over when it begins."""
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    last: dict[int, tuple[int, int]] = {}
    parts = [min(task.blocks, workers) for task in program]
    for task in order:
        made = {}
        for part in range(parts[task]):
            worker = (first[task] + part) % workers
            before = {(each, k) for each in waits[task] for k in range(parts[each])}
            if worker in last:
                before.add(last[worker])
            made[part] = before.union(*(found[each] for each in before))
        for part, before in made.items():
            found[task, part] = before
            last[(first[task] + part) % workers] = (task, part)
    return found


def has_race(
    program: list[Task],
    waits: list[list[int]],
    order: list[int],
    first: list[int],
    workers: int,
) -> bool:
    """Whether two blocks touch one byte, one writing, and neither order is certain."""
    before = happens_before(program, waits, order, first, workers)

    def part_of(task: int, block: int) -> tuple[int, int]:
        blocks, parts = program[task].blocks, min(program[task].blocks, workers)
        shares = [blocks * (k + 1) // parts for k in range(parts)]
        return task, next(k for k, end in enumerate(shares) if block < end)

    for later in range(len(program)):
        for earlier in range(later):
            a, b = program[earlier], program[later]
            pairs = [*product(a.writes, b.reads + b.writes), *product(a.reads, b.writes)]
            for x, y in pairs:
                if x.space != y.space or max(x.begin, y.begin) >= min(x.end, y.end):
                    continue
                for i, j in product(range(a.blocks), range(b.blocks)):
                    if (
                        set(x.of_block(i)) & set(y.of_block(j))
                        and part_of(earlier, i) not in before[part_of(later, j)]
                    ):
                        return True
    return False


@given(
    st.one_of(st.lists(tasks_of_blocks, max_size=9), repeated(tasks_of_blocks, 10)),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200)
def test_the_validator_finds_every_race_of_a_damaged_schedule(
    program: list[Task], workers: int, chance: random.Random
) -> None:
    planned = plan_tasks(built(program), dedupe=False, join=chance.random() < 0.5)
    first = planned.assign(workers)
    begins, listed = planned.waits
    kept = [chance.random() < 0.8 for _ in listed]
    waits = [
        [each for each, keep in zip(mine, marks, strict=True) if keep]
        for mine, marks in (
            (listed[a:b].tolist(), kept[a:b])
            for a, b in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
        )
    ]
    entry_begin = np.cumsum([0, *map(len, waits)]).astype(np.uint32)
    entries = np.array([each for mine in waits for each in mine], np.uint32)
    arguments = {
        "workers": workers,
        "first_worker": first,
        "lists": planned.lists(workers, first),
        "waits": (entry_begin, entries),
    }
    if has_race(program, waits, planned.order.tolist(), first.tolist(), workers):
        with pytest.raises(PlanError, match="MK406"):
            check_schedule(planned, **arguments)
    elif all(kept):
        check_schedule(planned, **arguments)


def a_chain() -> PlannedTasks:
    """Three tasks of four blocks that are not joined, as each reads all of the one before."""
    program = [
        Task(0, (), (CHAIN[0],), 0, 4),
        Task(1, (Touch(0, 0, 16),), (CHAIN[1],), 0, 4),
        Task(2, (Touch(1, 0, 16),), (CHAIN[2],), 0, 4),
    ]
    return plan_tasks(built(program))


def words(*numbers: int) -> np.ndarray:
    """A column."""
    return np.array(numbers, np.uint32)


@pytest.mark.parametrize(
    ("waits", "code"),
    [
        ((words(0, 0, 1, 2), words(0, 7)), "MK402"),
        ((words(0, 0, 1, 2), words(0, SET + 5)), "MK402"),
        ((words(0, 1, 2, 3), words(0, 0, 1)), "MK405"),
        ((words(0, 1, 2, 3), words(2, 0, 1)), "MK405"),
        ((words(0, 0, 0, 1), words(1)), "MK406"),
        ((words(0, 0, 1, 1), words(0)), "MK406"),
    ],
)
def test_wrong_waits_have_their_codes(waits: tuple[np.ndarray, np.ndarray], code: str) -> None:
    with pytest.raises(PlanError, match=code):
        check_schedule(a_chain(), waits=waits)


def test_wrong_schedules_have_their_codes() -> None:
    planned = a_chain()
    first = planned.assign(2)
    begins, listed = planned.lists(2, first)
    right = {"workers": 2, "first_worker": first}
    check_schedule(planned, lists=(begins, listed), **right)
    signals = np.array([1, 0, 1], np.uint8)
    with pytest.raises(PlanError, match=r"MK404.*let it signal"):
        check_schedule(planned, signals=signals)
    with pytest.raises(PlanError, match="MK408"):
        check_schedule(planned, slots=2)
    with pytest.raises(PlanError, match="MK405"):
        check_schedule(planned, lists=(begins, words(0, 2, 1, 0, 1, 2)), **right)
    for wrong in (words(0, 1, 1, 0, 1, 2), words(0, 1, 9, 0, 1, 2)):
        with pytest.raises(PlanError, match="MK407"):
            check_schedule(planned, lists=(begins, wrong), **right)
    short = np.array([0, 2, 5], np.uint64)
    with pytest.raises(PlanError, match="MK407"):
        check_schedule(planned, lists=(short, words(0, 1, 0, 1, 2)), **right)
    with pytest.raises(PlanError, match="ascend"):
        check_schedule(planned, lists=(np.array([0, 9, 6], np.uint64), listed), **right)
    planned.region[:] = 0
    with pytest.raises(PlanError, match="MK410"):
        check_schedule(planned, workers=2, first_worker=words(0, 1, 0), lists=(begins, listed))


def test_a_wrong_alias_is_found() -> None:
    copy = Task(0, (Touch(0, 0, 8),), (Touch(1, 0, 8),), flags=PURE)
    other = Task(1, (), (Touch(0, 0, 1),))
    planned = plan_tasks(built([copy, copy, other]), join=False)
    check_schedule(planned)
    planned.alias[2] = 0
    planned = _without(planned, 2)
    with pytest.raises(PlanError, match="MK409"):
        check_schedule(planned)
    late = plan_tasks(built([copy, other, copy]), join=False)
    late.alias[2] = 0
    with pytest.raises(PlanError, match="MK409"):
        check_schedule(_without(late, 2), waits=(words(0, 0, 1, 1), words(0)))
    skipped = plan_tasks(built([copy, copy, Task(2, (Touch(1, 0, 8),), ())]), join=False)
    with pytest.raises(PlanError, match="MK403"):
        check_schedule(skipped, waits=(words(0, 0, 0, 1), words(1)))


def _without(planned: PlannedTasks, task: int) -> PlannedTasks:
    planned.order = planned.order[planned.order != task].copy()
    planned.entry_begin = words(0, 0, 0, 0)
    planned.entries = words()
    return planned


# -------------------------------------------------------------------------------------- assignment


@given(programs, st.integers(1, 6), st.booleans())
def test_regions_stay_on_their_workers(program: list[Task], workers: int, has_costs: bool) -> None:
    planned = plan_tasks(built(program))
    costs = np.arange(1, len(program) + 1, dtype=np.uint64) if has_costs else None
    first = planned.assign(workers, costs)
    lists = planned.lists(workers, first)
    assert len(lists[1]) == sum(min(program[t].blocks, workers) for t in planned.order.tolist())
    for region in set(planned.region.tolist()) - {NO_TASK}:
        assert len(set(first[planned.region == region].tolist())) == 1
    check_schedule(planned, workers=workers, first_worker=first, lists=lists)


def test_small_tasks_are_spread_over_workers() -> None:
    program = [Task(0, (), (Touch(0, k, k + 1),), k) for k in range(40)]
    planned = plan_tasks(built(program))
    assert np.bincount(planned.assign(8)).tolist() == [5] * 8
    costs = np.array([100] + [1] * 39, np.uint64)
    loads = np.bincount(planned.assign(8, costs), weights=costs.astype(float))
    assert loads.max() == 100
    assert sorted(loads)[-2] <= 6


# ---------------------------------------------------------------------------------------- lineage


@given(programs, st.booleans())
@settings(max_examples=150)
def test_lineage_is_who_wrote_what_was_read_and_so_on(program: list[Task], dedupe: bool) -> None:
    planned = plan_tasks(built(program), dedupe=dedupe, join=False)
    lineage = Lineage(planned)
    writer: dict[tuple[int, int], int] = {}
    sources: list[set[int]] = []
    for number, task in enumerate(program):
        if planned.alias[number] >= 0:
            original = int(planned.alias[number])
            sources.append(sources[original])
            assert lineage.computed_by(number) == original
            assert "was not run" in lineage.explain(number)
        else:
            read = [(t.space, at) for t in task.reads for at in range(t.begin, t.end)]
            direct = {writer[each] for each in read if each in writer}
            assert lineage.direct(number).tolist() == sorted(direct)
            sources.append(direct.union(*(sources[each] for each in direct)))
            from_before = {each for each in read if each not in writer}
            mine = [each for each in lineage.initial(number) if each.task == number]
            assert {s.space for s in mine} == {space for space, _ in from_before}
            for touch in task.writes:
                writer.update({(touch.space, at): number for at in range(touch.begin, touch.end)})
        assert lineage.of(number).tolist() == sorted(sources[number])


def test_lineage_of_many_interleaved_chains() -> None:
    """Closures of many runs each, which are kept as differences."""
    chains, length = 40, 200
    builder = TaskBuilder()
    for _, chain in product(range(length), range(chains)):
        builder.add(0, [(0, chain, chain + 1)], [(0, chain, chain + 1)])
    builder.add(1, [(0, 0, chains)], [])
    builder.add(1, [(0, 3, 5)], [])
    lineage = Lineage(builder.tasks())
    for task in (0, 57, 4003, chains * length - 1):
        assert lineage.of(task).tolist() == list(range(task % chains, task, chains))
    assert lineage.runs_of(chains * length).tolist() == [[0, chains * length]]
    both = sorted([*range(3, chains * length, chains), *range(4, chains * length, chains)])
    assert lineage.of(chains * length + 1).tolist() == both


def test_an_explanation_names_sources_once_and_ends() -> None:
    builder = TaskBuilder()
    builder.add(0, [(9, 0, 4)], [(0, 0, 8)])
    for k in range(100):
        builder.add(1, [(k, 0, 8)], [(k + 1, 0, 8)])
    lineage = Lineage(builder.tasks())
    text = lineage.explain(2, name=lambda task: f"launch {task}", space_name=lambda _: "weights")
    assert text.splitlines() == [
        "launch 2 from launch 1",
        "  launch 1 from launch 0",
        "    launch 0 from memory: weights",
    ]
    lines = lineage.explain(100, most_lines=10).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "... and 90 more"
    with pytest.raises(PlanError, match="from 0 to 100, got 101"):
        lineage.of(101)


# -------------------------------------------------------------------------------------- bad input


def test_reads_of_what_nobody_wrote_are_refused_where_that_is_asked_for() -> None:
    program = [
        Task(0, (Touch(0, 0, 8),), (Touch(1, 0, 8),)),
        Task(1, (Touch(1, 4, 12),), ()),
    ]
    tasks = built(program)
    plan_tasks(tasks)
    with pytest.raises(PlanError, match=r"MK401.*task 1, bytes 4 to 12 of space 1"):
        plan_tasks(tasks, initial=Initial([(0, 0, 100)]))
    with pytest.raises(PlanError, match=r"MK401.*task 0"):
        plan_tasks(tasks, initial=Initial())
    plan_tasks(tasks, initial=Initial([(0, 0, 4), (0, 4, 8), (1, 8, 12)]))


def test_columns_that_do_not_fit_are_refused() -> None:
    right = built([Task(0, (Touch(0, 0, 8),), (Touch(1, 0, 8),)), Task(1)])
    columns = {name: getattr(right, name) for name in right.__slots__ if name != "core"}

    def refused(match: str, **changed: np.ndarray) -> None:
        with pytest.raises(PlanError, match=match):
            Tasks(**{**columns, **changed})

    refused("uint32.*column op", op=np.zeros(2, np.int64))
    refused("expected a contiguous", op=np.zeros(4, np.uint32)[::2])
    refused("one axis", params=np.zeros((1, 2), np.uint64))
    refused("as many blocks", blocks=words(1))
    refused("flags of PURE", flags=words(0, 4))
    for begins in (words(0, 1), words(0, 9, 2), words(0, 1, 1), words(1, 1, 2), words()):
        refused("begins of parameters", param_begin=begins)
        refused("begins of accesses", access_begin=begins)
    for name, value in (("mode", 0), ("mode", 4), ("end", 0), ("per_block", -1), ("begin", 2**63)):
        wrong = columns["accesses"].copy()
        wrong[0]["end" if name == "end" else name] = value
        if name == "end":
            wrong[0]["begin"] = 4
        refused("access - at 0", accesses=wrong)
    with pytest.raises(PlanError, match="as many costs"):
        plan_tasks(right, costs=np.ones(3, np.uint64))
    with pytest.raises(PlanError, match="workers, got 0"):
        plan_tasks(right).assign(0)
    with pytest.raises(PlanError, match="first worker below"):
        plan_tasks(right).lists(2, words(0, 2))
    builder = TaskBuilder()
    builder.add(-1)
    with pytest.raises(PlanError, match="32 bits"):
        builder.tasks()
    with pytest.raises(PlanError, match="space, begin, end"):
        TaskBuilder().add(0, [(1, 2)])


def test_no_tasks_at_all() -> None:
    planned = plan_tasks(TaskBuilder().tasks())
    check_schedule(planned)
    assert (len(planned.order), planned.critical_cost, planned.waits[1].tolist()) == (0, 0, [])
    assert len(Lineage(planned)) == 0


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_addresses_of_any_size(a: int, b: int, space: int) -> None:
    begin, end = min(a, b), max(a, b)
    builder = TaskBuilder()
    builder.add(0, [], [(space, begin, end)])
    builder.add(1, [(space, begin, end)], [], blocks=3)
    builder.add(1, [(space, begin, end, 2**62)], [], blocks=3)
    planned = plan_tasks(builder.tasks())
    check_schedule(planned)
    assert planned.waits_of(1) == planned.waits_of(2) == ([0] if begin < end else [])
