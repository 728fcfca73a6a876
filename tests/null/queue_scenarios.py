"""What holds for a queue of a megakernel wherever its workers are; the tests of each side run it.

A test file gives the fixture `side`, where the queue's workers and its memory are, and imports the
tests from here.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_table import check_counters

from brickline.cache import KernelCache
from brickline.errors import QueueError, UsageError
from brickline.executor.megakernel.queue import Megakernel
from brickline.executor.megakernel.queue_report import RECORD
from brickline.executor.megakernel.replay import replay
from brickline.executor.megakernel.replay_log import ReplayLog
from brickline.kernel import Kernel, Param, Scalar
from brickline.megakernel_regions import APART
from brickline.megakernel_tables import TaskState, WorkerState
from brickline.profiler import BrickProfiler
from brickline.tiles import TileLevel

SCALE = Kernel(
    "scale",
    """BRICKLINE void scale(Block& block, const float* x, float* y, int64_t n, float by) {
           int64_t first = block.index() * 64, left = n - first;
           block.each(left < 64 ? left : 64, [&](int64_t i) { y[first + i] = x[first + i] * by; });
       }""",
    [
        Param("x", "f32", "n", touches=("block_x*256", "min(block_x*256 + 256, n*4)")),
        Param("y", "f32", "n", "write", touches=("block_x*256", "min(block_x*256 + 256, n*4)")),
        *(Scalar("n", low=1), Scalar("by", "f32")),
    ],
    global_size="ceil_div(n, 64)",
)
MIX = Kernel(
    "mix",
    """BRICKLINE void mix(Block& block, const float* a, const float* b, float* y, int64_t salt) {
           block.each(16, [&](int64_t i) { y[i] = a[i] * 0.5f + b[15 - i] * 0.25f + salt; });
       }""",
    [
        *(Param("a", "f32", 16), Param("b", "f32", 16), Param("y", "f32", 16, "write")),
        Scalar("salt"),
    ],
)
COUNT_UP = Kernel(
    "count_up",
    """BRICKLINE void count_up(Block& block, float* total, int64_t blocks) {
           block.once([&] { block.atomic_add(total, 1.0f / (block.index() + 1)); });
       }""",
    [Param("total", "f32", 1, "read-write", accumulate="add"), Scalar("blocks", low=1)],
    global_size="blocks",
)
FAIL = Kernel(
    "fail",
    """BRICKLINE void fail(Block& block, int32_t* tries, float* y, int64_t times) {
           block.once([&] {
               if (tries[block.index()]++ < times) block.fault(20);
               else y[block.index()] = 7;
           });
       }""",
    [
        Param("tries", "i32", 2, "read-write", touches=("block_x*4", "block_x*4 + 4")),
        Param("y", "f32", 2, "write", touches=("block_x*4", "block_x*4 + 4")),
        Scalar("times", high=1000),
    ],
    global_size=2,
    pure=False,
)
NEGATE = Kernel(
    "negate",
    """BRICKLINE void negate(Block& block, const float* x, float* y) {
           block.once([&] { y[block.index()] = -x[block.index()]; });
       }""",
    [
        Param("x", "f32", 2, touches=("block_x*4", "block_x*4 + 4")),
        Param("y", "f32", 2, "write", touches=("block_x*4", "block_x*4 + 4")),
    ],
    global_size=2,
)
SWAP = Kernel(
    "swap",
    """BRICKLINE void swap(Block& block, const float* x, float* y) {
           block.once([&] { y[block.index()] = x[1 - block.index()]; });
       }""",
    [Param("x", "f32", 2), Param("y", "f32", 2, "write")],
    global_size=2,
)
SPIN = Kernel(
    "spin",
    """BRICKLINE void spin(Block& block, int32_t* gate, float* y) {
           volatile int32_t* word = gate;
           while (!*word) {}
           y[0] = 1;
       }""",
    [Param("gate", "i32", 1, "read-write"), Param("y", "f32", 1, "write")],
    pure=False,
)
SHARED = Kernel(
    "shared",
    """BRICKLINE void shared(Block& block, float* y, int64_t k) {
           float* memory = block.shared<float>(256);
           block.each(256, [&](int64_t i) { memory[i] = float(i + k); });
           block.sync();
           const float sum = block.sum(256, [&](int64_t i) { return memory[i]; });
           block.once([&] { y[block.index()] = sum; });
       }""",
    [Param("y", "f32", 4, "write"), Scalar("k")],
    global_size=4,
    shared_bytes=1024,
)
WIDE = Kernel.from_json({**SHARED.to_json(), "name": "wide", "local_size": 64})
SOURCES = [SCALE, MIX, COUNT_UP, FAIL, NEGATE, SWAP, SPIN, SHARED, WIDE]


class Side:
    """Where the workers of a queue and its memory are: here, threads and the host."""

    device = "CPU"
    mode = "threads"

    def mega(self, ops: Any = SOURCES, **options: Any) -> Megakernel:
        """Return a queue of two workers."""
        return Megakernel(self.device, ops, **{"workers": 2, "slots": 1024, **options})

    def array(self, values: Any) -> Any:
        """Return memory of the workers with these values."""
        return values

    def read(self, array: Any) -> Any:
        """Return what is there."""
        return np.array(array)

    def fill(self, array: Any, value: float) -> None:
        """Write to all of it, also while workers run."""
        array.fill(value)

    def copy(self, values: Any, to: Any) -> None:
        """Write values to memory of the workers, before they have it."""
        to[:] = values

    def ones(self, *shape: int) -> Any:
        return self.array(np.ones(shape, np.float32))

    def floats(self, *shape: int) -> Any:
        return self.array(np.zeros(shape, np.float32))

    def integers(self, *shape: int) -> Any:
        return self.array(np.zeros(shape, np.int32))

    def spin(self, mega: Megakernel) -> tuple[Any, Any, int]:
        """Submit an item that is executed until its gate opens, and wait until it is."""
        gate, y = self.integers(1), self.floats(1)
        number = mega.submit("spin", writes={"gate": gate, "y": y})
        self.await_inside(mega)
        return gate, y, number

    def await_inside(self, mega: Megakernel) -> None:
        """Wait until a worker executes an item."""
        until = time.monotonic() + 20
        while not any(each["inside"] for each in mega._core.workers()):
            assert time.monotonic() < until

    def later(self, seconds: float, *gates: Any) -> threading.Timer:
        """Open gates after a while."""
        timer = threading.Timer(seconds, lambda: [self.fill(gate, 1) for gate in gates])
        timer.start()
        return timer


# ------------------------------------------------------------------------------------------ results


def test_every_block_is_an_item(side: Side) -> None:
    x, y = np.arange(1000, dtype=np.float32), side.floats(1000)
    with side.mega() as mega:
        given = side.array(x)
        assert mega.submit("scale", {"x": given}, {"y": y}, {"n": 1000, "by": 3.0}) == 0
        report = mega.drain()
    np.testing.assert_array_equal(side.read(y), x * 3)
    assert (report.items_processed, report.items_remaining) == (16, 0)
    assert report.published_items == 16
    assert (report.mode, report.device) == ("queue", side.device)
    assert sum(worker.items for worker in report.workers) == 16
    assert report.op_work_ns is not None
    assert report.op_work_ns[0] > 0
    assert report.telemetry.execution_mode == side.mode


def test_counters_are_measured_where_the_documentation_says(side: Side) -> None:
    x, y = side.ones(1000), side.floats(1000)
    reports = {}
    for option, options in (
        ("", {}),
        ("`trace=True`", {"trace": True}),
        ("`memory_budget=`", {"memory_budget": 1 << 32}),
    ):
        with side.mega([SCALE], **options) as mega:
            mega.submit("scale", {"x": x}, {"y": y}, {"n": 1000, "by": 2.0})
            reports[option] = mega.drain()
    check_counters(f"queue, {side.device.partition(':')[0]}", reports)


def test_a_queue_is_compiled_and_allocated_for_its_first_report(side: Side, tmp_path: Path) -> None:
    x, y = side.ones(1000), side.floats(1000)
    for is_compiled in (False, True):
        cache = KernelCache(tmp_path / "cache")
        with side.mega([SCALE], cache=cache) as mega:
            found = []
            for _ in range(2):
                mega.submit("scale", {"x": x}, {"y": y}, {"n": 1000, "by": 2.0})
                found.append(mega.drain().telemetry)
        first, second = found
        assert (first.compiled_cache_hit, second.compiled_cache_hit) == (is_compiled, True)
        assert (first.resident_cache_hit, second.resident_cache_hit) == (False, True)
        assert first.kernel_launches
        assert (first.resident_allocations, second.resident_allocations) == (
            (0, 0) if side.device == "CPU" else (4, 0)
        )


def test_a_submission_waits_for_what_it_reads_and_overwrites(side: Side) -> None:
    x, y, z = side.ones(256), side.floats(256), side.floats(256)
    with side.mega() as mega:
        for step in range(50):
            mega.submit("scale", [x], [y], [256, 1.0 + step])
            mega.submit("scale", [y], [z], [256, 2.0])
            mega.submit("scale", [z], [x], [256, 1 / (2.0 * (1 + step))], priority=step % 5)
        mega.drain()
    np.testing.assert_allclose(side.read(x), 1, rtol=1e-4)


@pytest.mark.parametrize("op", ["shared", "wide"])
def test_shared_memory_and_a_reduction(side: Side, op: str) -> None:
    ys = [side.floats(4) for _ in range(20)]
    with side.mega() as mega:
        for k, y in enumerate(ys):
            mega.submit(op, writes=[y], params=[k])
        mega.drain()
    for k, y in enumerate(ys):
        np.testing.assert_array_equal(side.read(y), float(sum(range(256)) + 256 * k))


def test_items_that_add_to_one_element_do_so_in_order(side: Side) -> None:
    found = set()
    with side.mega() as mega:
        for _ in range(10):
            total = side.floats(1)
            mega.submit("count_up", writes={"total": total}, params={"blocks": 300})
            mega.drain()
            found.add(side.read(total)[0].item())
    expected = np.float32(0)
    for k in range(300):
        expected = np.float32(expected + np.float32(1.0) / np.float32(k + 1))
    assert found == {expected.item()}


@pytest.mark.parametrize("as_list", [False, True])
def test_many_submissions_at_once(side: Side, as_list: bool) -> None:
    values = np.random.default_rng(1).random((500, 64), np.float32)
    x, y = side.array(values), side.floats(500, 64)
    by = np.arange(500, dtype=np.float64)
    rows = (list(x), list(y)) if as_list else (x, y)
    with side.mega() as mega:
        numbers = mega.submit_many("scale", {"x": rows[0]}, {"y": rows[1]}, {"n": 64, "by": by})
        assert numbers == range(500)
        report = mega.drain()
    np.testing.assert_array_equal(side.read(y), values * by.astype(np.float32)[:, None])
    assert report.items_processed == 500
    assert len(report.tasks) == 500


def test_many_blocks_and_many_producers(side: Side) -> None:
    """200 that write, then 200 that each read all of it, of 8 blocks each."""
    x, y = side.ones(200, 512), side.floats(200, 512)
    z, whole = side.floats(200, 512), 200 * 512
    with side.mega(slots=4096, workers=4) as mega:
        mega.submit_many("scale", [x], [y], [512, 2.0])
        mega.drain()
        mega.submit_many("scale", [y], [x], [512, 3.0])
        flat = x.reshape(whole)
        for out in range(2):
            mega.submit("scale", [flat], [z.reshape(whole)], [whole, 1.0 + out])
        report = mega.drain()
    assert report.items_processed == 200 * 8 + 2 * 1600
    np.testing.assert_array_equal(side.read(z), 12)


def test_a_thousand_runs_give_the_same_bits(side: Side) -> None:
    rng = np.random.default_rng(0)
    rows = [tuple(int(n) for n in rng.permutation(8)[:3]) for _ in range(24)]
    start = np.random.default_rng(3).random((8, 16), np.float32)
    found = set()
    for seed in range(1, 5):
        with side.mega([MIX], workers=3, slots=64, delay_seed=seed) as mega:
            for _ in range(250):
                memory = side.array(start.copy())
                with mega.batch():
                    for k, (a, b, y) in enumerate(rows):
                        mega.submit("mix", [memory[a], memory[b]], [memory[y]], [k % 3])
                mega.drain()
                found.add(side.read(memory).tobytes())
    assert len(found) == 1


def test_it_is_fed_while_it_runs(side: Side) -> None:
    with side.mega() as mega:
        gate, y, number = side.spin(mega)
        outs = side.floats(100, 64)
        numbers = mega.submit_many("scale", [side.ones(64)], [outs], [64, 2.0])
        assert mega.wait(numbers[-1], 20) is TaskState.DONE  # beside the one that spins
        assert mega.wait(number, 0.01) is None
        side.fill(gate, 1)
        assert mega.drain().items_processed == 101
        assert (side.read(outs) == 2).all()
        assert side.read(y)[0] == 1


@pytest.mark.parametrize("pause", [0.0, 0.01])
def test_it_rests_and_goes_on(side: Side, pause: float) -> None:
    x, y = side.ones(64), side.floats(64)
    with side.mega() as mega:
        for turn in range(20):
            mega.submit("scale", [x], [y], [64, float(turn)])
            assert mega.drain().items_processed == 1
            assert side.read(y)[0] == turn
            time.sleep(pause)


# ------------------------------------------------------------------------------------------- dedupe


def test_equal_submissions_of_a_batch_are_executed_once(side: Side) -> None:
    x, y, z = side.ones(64), side.floats(64), side.floats(64)
    with side.mega() as mega:
        with mega.batch():
            numbers = [mega.submit("scale", [x], [y], [64, 2.0]) for _ in range(5)]
            mega.submit("scale", [y], [z], [64, 2.0])
        report = mega.drain()
        assert (report.published_items, report.deduped_items) == (2, 4)
        assert (report.items_processed, report.items_remaining) == (6, 0)
        assert report.tasks.alias.tolist() == [-1, 0, 0, 0, 0, -1]
        assert report.tasks.state is not None
        assert report.tasks.state[1] == TaskState.DEDUPED
        assert mega.wait(numbers[4]) is TaskState.DONE
    assert side.read(z)[0] == 4


# ------------------------------------------------------------------------------------------ regions


def _began(mega: Megakernel) -> Any:
    """Return the items in the order in which they began."""
    records = np.frombuffer(mega._core.records(), RECORD)
    return records[np.argsort(records["ready"], kind="stable")]


def test_a_chain_of_a_batch_is_one_region(side: Side) -> None:
    steps, memory = 6, side.floats(7, 640)
    values = np.random.default_rng(7).random(640, np.float32)
    side.copy(values, memory[0])
    with side.mega(trace=True) as mega:
        with mega.batch():
            for k in range(steps):
                mega.submit("scale", [memory[k]], [memory[k + 1]], [640, 2.0])
        mega.wait(steps - 1)
        began = _began(mega)
        report = mega.drain()
    np.testing.assert_array_equal(side.read(memory)[-1], values * 2**steps)
    assert report.items_processed == 10 * steps
    assert report.tasks.region.tolist() == [0] * steps
    assert (report.regions.tasks.tolist(), report.regions.items.tolist()) == ([steps], [60])
    assert report.explain_regions() == (
        "6 submissions in 1 region\nsubmissions 0, 1, 2, 3, 4, 5 are one region: a worker runs "
        "their items without a hop"
    )
    # Who executes an item goes on with what follows it, but for one in eight.
    worker = {(int(each["submission"]), int(each["block"])): int(each["worker"]) for each in began}
    stayed = [worker[k, b] == worker[k + 1, b] for k in range(steps - 1) for b in range(10)]
    assert sum(stayed) >= 40
    for block in range(10):
        order = [int(each["submission"]) for each in began if each["block"] == block]
        assert order == list(range(steps))


def test_submissions_are_apart_for_a_reason(side: Side) -> None:
    two, x, total = (side.floats(2) for _ in range(3)), side.ones(128), side.floats(1)
    a, b, c = two
    (w, y, z), ones = (side.floats(128) for _ in range(3)), side.ones(16)
    m, n, o = (side.floats(16) for _ in range(3))
    with side.mega() as mega:
        gate, spun, _ = side.spin(mega)
        with mega.batch():
            begun = [
                mega.submit("scale", [spun], [total], [1, 1.0]),  # waits for an earlier batch
                mega.submit("count_up", writes={"total": total}, params={"blocks": 1}),
                mega.submit("scale", [x], [y], [128, 2.0]),
                mega.submit("scale", [y[:64]], [z[:64]], [64, 2.0]),
                mega.submit("scale", [y], [w], [128, 3.0], priority="high"),
                mega.submit("negate", [side.ones(2)], [a]),
                mega.submit("swap", [a], [b]),
                mega.submit("negate", [b], [c]),
                mega.submit("mix", [ones, ones], [m], [1]),
                mega.submit("mix", [ones, ones], [n], [2]),
                mega.submit("mix", [m, n], [o], [3]),
                mega.submit("mix", [m, ones], [side.floats(16)], [4]),
                mega.submit("mix", [m, ones], [side.floats(16)], [5]),
                mega.submit("mix", [ones, ones], [m], [6]),
            ]
        side.fill(gate, 1)
        report = mega.drain()
    assert report.tasks.apart is not None
    found = {number: int(report.tasks.apart[number]) for number in begun}
    expected = [312, 305, 0, 302, 311, 0, 303, 303, 0, 0, 307, 0, 304, 313]
    assert list(found.values()) == expected
    assert set(expected) - {0} == set(APART) - {314}  # of queues that join nothing
    assert f"submission {begun[3]}: MK302: it has another number of blocks" in (
        report.explain_regions()
    )
    assert side.read(c).tolist() == [1, 1]
    assert side.read(o)[0] == 1.75 * 0.5 + 2.75 * 0.25 + 3


def test_nothing_is_joined_where_that_is_not_wanted(side: Side) -> None:
    x, y, z = side.ones(64), side.floats(64), side.floats(64)
    with side.mega(fuse=False) as mega:
        with mega.batch():
            mega.submit("scale", [x], [y], [64, 2.0])
            mega.submit("scale", [y], [z], [64, 2.0])
        report = mega.drain()
    assert report.explain_regions() == (
        "2 submissions in 2 regions\nsubmission 1: MK314: the queue was made with fuse=False"
    )
    assert side.read(z)[0] == 4


def test_a_fault_skips_what_follows_its_item(side: Side) -> None:
    tries, y, z, w = side.array(np.array([9, 0], np.int32)), *(side.floats(2) for _ in range(3))
    with side.mega() as mega:
        with mega.batch():
            bad = mega.submit("fail", writes=[tries, y], params=[5])  # of its second block
            follower = mega.submit("negate", [y], [z])
            last = mega.submit("negate", [z], [w])
            reader = mega.submit("swap", [w], [side.floats(2)])
        report = mega.drain()
    states = report.tasks.state
    assert states is not None
    assert states.tolist() == [TaskState.FAULTED, *[TaskState.SKIPPED] * 3]
    assert report.tasks.region[[bad, follower, last]].tolist() == [bad] * 3
    assert report.tasks.region[reader] == reader
    assert report.tasks.done is not None
    assert report.tasks.done.tolist() == [1, 1, 1, 0]
    assert (report.items_faulted, report.items_skipped, report.items_processed) == (1, 4, 3)
    assert side.read(w).tolist() == [7, 0]


def test_an_item_that_is_tried_again_is_followed_then(side: Side) -> None:
    tries, y, z = side.integers(2), side.floats(2), side.floats(2)
    with side.mega(retry_codes=[20], retry_limit=3) as mega:
        with mega.batch():
            mega.submit("fail", writes=[tries, y], params=[2])
            mega.submit("negate", [y], [z])
        report = mega.drain()
    assert (report.items_processed, report.items_requeued) == (4, 4)
    assert side.read(z).tolist() == [-7, -7]


def test_a_deadline_comes_between_two_items_of_a_region(side: Side) -> None:
    with side.mega() as mega:
        gate, y, z = side.integers(1), side.floats(1), side.floats(1)
        with mega.batch():
            mega.submit("spin", writes={"gate": gate, "y": y})
            mega.submit("scale", [y], [z], [1, 5.0])
        timer = side.later(0.3, gate)
        report = mega.drain(max_wall_time=0.1)
        timer.join()
        assert (report.items_processed, report.items_remaining) == (1, 1)
        assert side.read(z)[0] == 0
        report = mega.drain()
        assert (report.items_processed, report.items_remaining) == (2, 0)
        assert report.tasks.region.tolist() == [0, 0]
    assert side.read(z)[0] == 5


def test_a_region_does_not_keep_urgent_work_waiting(side: Side) -> None:
    memory, gate = side.floats(101, 1), side.integers(1)
    x, y = side.ones(16), side.floats(16)
    with side.mega(workers=1, trace=True) as mega:
        with mega.batch():
            mega.submit("spin", writes={"gate": gate, "y": memory[0]})
            for k in range(100):
                mega.submit("scale", [memory[k]], [memory[k + 1]], [1, 1.0])
        side.await_inside(mega)
        urgent = mega.submit("scale", [x], [y], [16, 1.0], priority="critical")
        time.sleep(0.1)  # a device takes it in by itself
        side.fill(gate, 1)
        for number in range(urgent + 1):
            mega.wait(number)
        order = [int(each["submission"]) for each in _began(mega)]
        assert mega.drain().tasks.region.tolist() == [*[0] * 101, urgent]
    assert order.index(urgent) <= 9  # a worker leaves a region after eight items at the latest
    assert side.read(memory).ravel().tolist() == [1] * 101


def test_batches_are_proved_where_that_is_wanted(side: Side) -> None:
    """Random batches with hazards, repeats and chains, proved and not, give the same bits."""
    rng = np.random.default_rng(5)
    start = rng.random((6, 16), np.float32)
    rows = [tuple(int(n) for n in rng.permutation(6)[:3]) for _ in range(60)]
    found = set()
    for prove in (False, True):
        with side.mega([MIX], prove=prove) as mega:
            memory = side.array(start.copy())
            for batch in range(0, 60, 6):
                with mega.batch():
                    for k, (a, b, y) in enumerate(rows[batch : batch + 6]):
                        for _ in range(1 + k % 2):
                            mega.submit("mix", [memory[a], memory[b]], [memory[y]], [k % 3])
            report = mega.drain()
            assert report.deduped_items == 30
            assert (report.tasks.region != np.arange(90)).any()
            found.add(side.read(memory).tobytes())
    assert len(found) == 1


def test_a_profiler_is_told_of_items_and_submissions(side: Side) -> None:
    profiler = BrickProfiler("queue", enabled=True)
    x, y, z = side.ones(128), side.floats(128), side.floats(128)
    with side.mega(profiler=profiler) as mega:
        for _ in range(2):
            with mega.batch():
                mega.submit("scale", [x], [y], [128, 2.0])
                mega.submit("scale", [y], [z], [128, 3.0])
            mega.drain()
    (tiles,) = profiler.profile().tiles
    assert (tiles.level, tiles.count) == (TileLevel.MACRO, 8)
    assert {cell.column for cell in tiles.cells} == {0, 1, 2, 3}
    traces = profiler.kernel_traces()
    assert [(each.kernel_name, each.position) for each in traces] == [
        *[("scale", 0)] * 2,
        *[("scale", 1)] * 2,
    ]
    said = json.loads(traces[3].params)
    assert (said["level"], said["task"], said["region"], said["items"]) == ("submission", 3, 2, 2)
    assert said["work_ns"] > 0


# ------------------------------------------------------------------------------------------- faults


def test_a_fault_is_reported_and_the_rest_goes_on(side: Side) -> None:
    tries, y, w, a = side.integers(2), side.floats(2), side.floats(16), side.ones(16)
    with side.mega() as mega:
        bad = mega.submit("fail", writes={"tries": tries, "y": y}, params={"times": 9})
        good = mega.submit("mix", [a, a], [w], [1])
        assert mega.wait(bad) is TaskState.FAULTED
        assert mega.wait(good) is TaskState.DONE
        report = mega.drain()
    assert [(f.task, f.item, f.code, f.op) for f in report.faults] == [
        (bad, 0, "20", "fail"),
        (bad, 1, "20", "fail"),
    ]
    assert (report.items_processed, report.items_remaining, report.items_faulted) == (1, 2, 2)
    assert side.read(w)[0] == 1.75


def test_a_fault_is_also_that_of_what_is_left_out(side: Side) -> None:
    tries, y = side.array(np.array([9, 0], np.int32)), side.floats(2)
    z, w = side.floats(2), side.floats(2)
    with side.mega([FAIL, NEGATE], fuse=False, lineage=True) as mega:
        with mega.batch():
            mega.submit("negate", [y], [z])
            mega.submit("negate", [y], [z])
            mega.submit("fail", writes=[tries, y], params=[5])
            for _ in range(2):
                mega.submit("negate", [y], [w])
        report = mega.drain(outputs={"w": w, "other": side.floats(2)})
    assert report.tasks.alias.tolist() == [-1, 0, -1, -1, 3]
    assert (report.items_processed, report.items_remaining) == (5, 5)
    assert (report.items_faulted, report.items_skipped) == (1, 4)
    assert "not begun" not in str(report)
    with pytest.raises(UsageError, match="expected a task from 0 to 4, got 5"):
        report.task_name(5)
    assert report.task_name(4) == "submission 4 (negate)"
    assert report.explain("other") == "other: nobody of this report wrote to it"


def test_what_reads_a_fault_is_skipped_and_what_overwrites_it_is_not(side: Side) -> None:
    tries, y, z = side.integers(2), side.floats(2), side.floats(2)
    two = side.array(np.full(2, 2, np.float32))
    with side.mega() as mega:
        bad = mega.submit("fail", writes=[tries, y], params=[9])
        reader = mega.submit("scale", [y], [z], [2, 1.0])
        of_reader = mega.submit("scale", [z], [side.floats(2)], [2, 1.0])
        again = mega.submit("scale", [two], [y], [2, 1.0])
        after = mega.submit("scale", [y], [z], [2, 3.0])
        found = [mega.wait(number) for number in (bad, reader, of_reader, again, after)]
        assert found == [
            TaskState.FAULTED,
            TaskState.SKIPPED,
            TaskState.SKIPPED,
            TaskState.DONE,
            TaskState.DONE,
        ]
        late = mega.submit("scale", [z], [side.floats(2)], [2, 1.0])
        assert mega.wait(late) is TaskState.DONE
        assert mega.drain().items_skipped == 2
    assert side.read(z).tolist() == [6, 6]


def test_a_reader_that_comes_after_the_fault_is_skipped_until_the_report(side: Side) -> None:
    tries, y, z = side.integers(2), side.floats(2), side.floats(2)
    with side.mega() as mega:
        assert mega.wait(mega.submit("fail", writes=[tries, y], params=[9])) is TaskState.FAULTED
        assert mega.wait(mega.submit("scale", [y], [z], [2, 1.0])) is TaskState.SKIPPED
        assert mega.drain().items_skipped == 1
        side.fill(y, 3)  # the caller knows of it now
        mega.submit("scale", [y], [z], [2, 1.0])
        assert mega.drain().is_complete
    assert side.read(z)[0] == 3


@pytest.mark.parametrize(("times", "done"), [(3, True), (4, False)])
def test_an_item_is_tried_again(side: Side, times: int, done: bool) -> None:
    tries, y = side.integers(2), side.floats(2)
    with side.mega(retry_codes=[20], retry_limit=3) as mega:
        mega.submit("fail", writes=[tries, y], params=[times])
        report = mega.drain()
    assert report.is_complete == done
    assert report.items_requeued == 6
    assert side.read(tries).tolist() == [4, 4]
    assert [fault.retries for fault in report.faults] == ([] if done else [3, 3])


# --------------------------------------------------------------------------------------------- ends


def test_a_deadline_leaves_a_true_partial_report(side: Side) -> None:
    with side.mega() as mega:
        gate, _, _ = side.spin(mega)
        more, y = side.integers(1), side.floats(1)
        mega.submit("spin", writes=[more, y])
        outs = side.floats(100, 64)
        mega.submit_many("scale", [side.ones(64)], [outs], [64, 1.0])
        opener = side.later(0.4, gate, more)
        began = time.monotonic()
        report = mega.drain(max_wall_time=0.1)
        assert time.monotonic() - began < 1.5
        opener.join()
        assert mega.state == "expired"
        assert report.items_processed == 2 + int((side.read(outs)[:, 0] == 1).sum())
        assert report.items_processed + report.items_remaining == 102
        assert report.items_remaining > 0
        assert all(worker.state is WorkerState.STOPPED for worker in report.workers)
        again = mega.drain()  # what remains, and what was there
        assert (again.items_processed, again.items_remaining) == (102, 0)
        assert (side.read(outs) == 1).all()
        assert len(again.tasks) == 102
        assert mega.drain().items_processed == 0


def test_a_submission_wakes_workers_after_a_deadline(side: Side) -> None:
    with side.mega() as mega:
        gate, _, number = side.spin(mega)
        side.later(0.2, gate)
        assert mega.drain(0.01).items_processed in (0, 1)
        x, y = side.ones(64), side.floats(64)
        assert mega.wait(mega.submit("scale", [x], [y], [64, 2.0]), 20) is TaskState.DONE
        assert mega.wait(number, 20) is TaskState.DONE


def test_stop_from_another_thread_ends_a_drain(side: Side) -> None:
    with side.mega() as mega:
        gate, y, _ = side.spin(mega)
        waiting, outs = side.floats(50, 1), side.floats(50, 64)
        mega.submit_many("scale", [y], [waiting], {"n": 1, "by": 1.0})  # waits for the spin
        threading.Timer(0.1, mega.stop).start()
        side.later(0.3, gate)
        report = mega.drain()
        assert mega.state == "stopped"
        assert (report.items_processed, report.items_remaining) == (1, 50)
        with pytest.raises(QueueError, match="MK505"):
            mega.submit_many("scale", [side.ones(64)], [outs], [64, 1.0])
        assert mega.report().items_remaining == 50
        with pytest.raises(QueueError, match="MK505"):
            mega.submit("scale", [side.ones(64)], [outs[0]], [64, 1.0])


def test_clear_cancels_what_remains(side: Side) -> None:
    with side.mega() as mega:
        gate, y, _ = side.spin(mega)
        mega.submit_many("scale", [y], [side.floats(50, 1)], {"n": 1, "by": 1.0})
        side.later(0.1, gate)
        report = mega.clear()
        assert mega.state == "running"
        assert report.items_processed + report.items_remaining == 51
        assert report.items_processed >= 1
        x, z = side.ones(64), side.floats(64)
        mega.submit("scale", [x], [z], [64, 2.0])
        assert mega.drain().items_processed == 1
    assert side.read(z)[0] == 2


def test_what_became_of_a_submission_is_known_after_its_report(side: Side) -> None:
    tries, y, z = side.integers(2), side.floats(2), side.floats(2)
    with side.mega() as mega:
        with mega.batch():
            bad = mega.submit("fail", writes=[tries, y], params=[9])
            reader = mega.submit("scale", [y], [z], [2, 1.0])
            again = mega.submit("scale", [y], [z], [2, 1.0])
        good = mega.submit("scale", [side.floats(2)], [side.floats(2)], [2, 1.0])
        assert mega.drain().tasks.alias.tolist() == [-1, -1, 1, -1]
        gate, spun, number = side.spin(mega)
        cancelled = mega.submit("scale", [spun], [side.floats(1)], [1, 1.0])
        side.later(0.2, gate)
        mega.clear()
        found = [mega.wait(each) for each in (bad, reader, again, good, number, cancelled)]
    assert found == [
        *(TaskState.FAULTED, TaskState.SKIPPED, TaskState.SKIPPED, TaskState.DONE),
        *(TaskState.DONE, TaskState.NOT_RUN),
    ]


def test_waiting_for_what_there_is_not(side: Side) -> None:
    with side.mega() as mega:
        with pytest.raises(QueueError, match="MK513"):
            mega.wait(0)
        gate, _, number = side.spin(mega)
        assert mega.wait(number, 0.01) is None
        with pytest.raises(QueueError, match="MK510"):
            mega.report()
        side.fill(gate, 1)
        assert mega.wait(number) is TaskState.DONE


def test_urgent_work_goes_first_and_nothing_starves(side: Side) -> None:
    with side.mega(workers=1, trace=True) as mega:
        gate, _, _ = side.spin(mega)
        x, outs = side.ones(64), side.floats(100, 64)
        priorities = np.array([4] * 50 + [0] * 50)
        mega.submit_many("scale", [x], [outs], [64, 1.0], priority=priorities)
        side.fill(gate, 1)
        report = mega.drain()
    assert report.spans is not None
    order = [int(task) - 1 for task in report.spans.task[np.argsort(report.spans.ready_ns)]][1:]
    urgent = [place for place, task in enumerate(order) if task >= 50]
    assert max(urgent) <= 50 * 8 / 7 + 2
    assert min(place for place, task in enumerate(order) if task < 50) <= 8


# ------------------------------------------------------------------------------------------- memory


def test_slots_are_recycled_and_waited_for(side: Side) -> None:
    with side.mega(slots=8, workers=1) as mega:
        x, outs = side.ones(64), side.floats(500, 64)
        for out in outs:
            mega.submit("scale", [x], [out], [64, 1.0])
        assert mega.drain().items_processed == 500
        gate, y, _ = side.spin(mega)
        for _ in range(7):
            mega.submit("scale", [y], [side.floats(1)], [1, 1.0])
        with pytest.raises(QueueError, match="MK510"):
            mega.submit("scale", [y], [side.floats(1)], [1, 1.0], wait=False)
        side.fill(gate, 1)
        assert mega.drain().items_processed == 8


# ------------------------------------------------------------------------------------------ reports


def test_a_report_tells_where_values_came_from(side: Side) -> None:
    x, y, z = side.ones(64), side.floats(64), side.floats(64)
    with side.mega(trace=True, lineage=True) as mega:
        mega.submit("scale", [x], [y], [64, 2.0])
        mega.submit("scale", [x], [z], [64, 2.0])
        mega.submit("scale", [y], [z], [64, 2.0])
        report = mega.drain(outputs={"z": z, "x": x})
        assert report.flow is not None
        assert [report.flow.direct(task) for task in range(3)] == [[], [], [0]]
        assert report.outputs == {"z": (2,), "x": ()}
        assert report.lineage_items == 3
        assert report.spans is not None
        assert sorted(report.spans.task.tolist()) == [0, 1, 2]
        ended = dict(zip(report.spans.task.tolist(), report.spans.end_ns.tolist(), strict=True))
        began = dict(zip(report.spans.task.tolist(), report.spans.ready_ns.tolist(), strict=True))
        assert began[2] >= max(ended[0], ended[1])
        assert report.wall_time_ns >= max(ended.values())
        assert report.telemetry.frontier_density_bps is not None
        second = mega.drain()
        assert second.flow is not None
        assert len(second.flow) == 0


# ------------------------------------------------------------------------------------------- replay


def logged(side: Side, path: Path) -> ReplayLog:
    """Two submissions, a write of the host, and two more, one of which overwrites."""
    x, y, z = side.array(np.linspace(-1, 1, 64, dtype=np.float32)), side.floats(64), side.floats(64)
    with side.mega(log=path) as mega:
        mega.submit("scale", [x], [y], [64, 2.0])
        mega.submit("scale", [y], [z], [64, 3.0], priority="high")
        mega.drain()
        side.fill(x, 5)
        with mega.batch():
            mega.submit("scale", [x], [y], [64, 0.5])
            mega.submit("mix", [x[:16], y[16:32]], [z[48:]], [1])
        mega.drain()
    return ReplayLog.load(path)


def test_a_queue_is_logged_and_replayed_anywhere(side: Side, tmp_path: Path) -> None:
    log = logged(side, tmp_path / "steps.json")
    assert (log.device, log.executor) == (side.device, "queue")
    assert log.queue is not None
    assert len(log.runs) == 2
    assert log.queue.batch_ends == (1, 2, 4)
    assert len(log.queue.items or ()) == 4
    for device in {"CPU", side.device}:
        for executor in ("serial", "queue"):
            result = replay(log, device, executor)
            assert result.difference is None, result
            assert result.compared == 4


def test_a_replay_names_the_submission_that_differs(side: Side, tmp_path: Path) -> None:
    log = logged(side, tmp_path / "steps.json")
    written = log.runs[1].written[1]
    wrong = replace(written[0], digests="0" * len(written[0].digests))
    runs = [log.runs[0], replace(log.runs[1], written=(log.runs[1].written[0], (wrong,)))]
    found = replay(replace(log, runs=tuple(runs)), side.device, "queue")
    assert found.difference is not None
    assert "submission 3 (mix)" in str(found)
