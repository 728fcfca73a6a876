"""A queue of a megakernel on CPU: results, hazards, dedupe, faults, and every way it ends."""

from __future__ import annotations

import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from queue_scenarios import *  # noqa: F403
from queue_scenarios import MIX, SCALE, SOURCES, Side

import brickline as bl
from brickline.errors import CompileError, DeviceHung, QueueError, UsageError
from brickline.executor.megakernel.queue import Megakernel, Priority
from brickline.executor.megakernel.queue_refusals import REASONS
from brickline.export.megakernel_metrics import sources_of
from brickline.export.megakernel_perfetto import write_megakernel_perfetto
from brickline.export.perfetto_packets import Events, PacketWriter
from brickline.kernel import Kernel, Param
from brickline.megakernel_tables import TaskState, WorkerState
from brickline.report.html.megakernel_page import megakernel_document


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.fixture
def mega(request: pytest.FixtureRequest) -> Iterator[Megakernel]:
    options = {"workers": 2, "slots": 1024, **getattr(request, "param", {})}
    with Megakernel("CPU", SOURCES, **options) as made:
        yield made


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def spin(mega: Megakernel) -> tuple[Any, Any, int]:
    """Submit an item that is executed until its gate opens, and wait until it is."""
    gate, y = np.zeros(1, np.int32), floats(1)
    number = mega.submit("spin", writes={"gate": gate, "y": y})
    until = time.monotonic() + 20
    while not any(each["inside"] for each in mega._core.workers()):
        assert time.monotonic() < until
    return gate, y, number


# ------------------------------------------------------------------------------------------ results


def test_arguments_go_by_name_or_in_order(mega: Megakernel) -> None:
    x, y, z = np.ones(64, np.float32), floats(64), floats(64)
    mega.submit("scale", [x], [y], [64, 2.0])
    mega.submit("scale", {"x": bl.as_buffer(y)}, {"y": z}, {"n": np.int32(64), "by": 2})
    mega.drain()
    assert z[0] == 4


def test_one_array_for_all_submissions_is_shared(mega: Megakernel) -> None:
    x, y = np.ones(64, np.float32), floats(3, 64)
    mega.submit_many("scale", [x], [y], [64, np.array([1.0, 2.0, 3.0])], priority=[0, 4, 2])
    mega.drain()
    assert y[:, 0].tolist() == [1, 2, 3]
    assert mega.submit_many("scale", [x], [floats(0, 64)], [64, 1.0]) == range(3, 3)


class Drawn:
    """A few submissions over eight buffers, and the same in NumPy."""

    def __init__(self, rows: list[tuple[int, int, int, int]]) -> None:
        self.rows = rows
        self.start = np.random.default_rng(3).random((8, 16), np.float32)

    def expected(self) -> Any:
        memory = self.start.copy()
        for a, b, y, salt in self.rows:
            memory[y] = memory[a] * np.float32(0.5) + memory[b][::-1] * np.float32(0.25) + salt
        return memory


drawn = st.lists(
    st.tuples(*(st.integers(0, 7),) * 3, st.integers(0, 5)).filter(
        lambda row: row[2] not in row[:2]
    ),
    min_size=1,
    max_size=60,
)


@pytest.mark.parametrize(("workers", "slots"), [(1, 60), (2, 60), (3, 64)])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=drawn, in_one_batch=st.booleans(), seed=st.integers(0, 3))
def test_any_submissions_are_as_one_after_the_other(
    workers: int, slots: int, rows: list[tuple[int, int, int, int]], in_one_batch: bool, seed: int
) -> None:
    case = Drawn(rows)
    with Megakernel("CPU", [MIX], workers=workers, slots=slots, delay_seed=seed) as mega:
        memory = case.start.copy()

        def submit_all() -> None:
            for a, b, y, salt in rows:
                mega.submit("mix", [memory[a], memory[b]], [memory[y]], [salt], priority=salt % 5)

        if in_one_batch:
            with mega.batch():
                submit_all()
        else:
            submit_all()
        report = mega.drain()
    np.testing.assert_array_equal(memory, case.expected())
    assert report.items_processed == len(rows)
    assert report.published_items is not None
    assert report.deduped_items is not None
    assert report.published_items + report.deduped_items == len(rows)


# ------------------------------------------------------------------------------------------- dedupe


def duplicates(rows: list[tuple[int, int, int, int]]) -> int:
    """Count by hand what computes the same as an earlier one, with no write in between."""
    found = 0
    last: dict[tuple[int, ...], int] = {}
    written: dict[int, int] = {}
    for k, row in enumerate(rows):
        a, b, y, _ = row
        twin = last.get(row, -1)
        if twin >= 0 and written[y] == twin and max(written.get(a, -1), written.get(b, -1)) < twin:
            found += 1
            continue
        last[row], written[y] = k, k
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    pool=drawn.map(lambda rows: rows[:4]),
    picks=st.lists(st.integers(0, 3), min_size=2, max_size=40),
)
def test_dedupe_is_exact_and_changes_nothing(
    pool: list[tuple[int, int, int, int]], picks: list[int]
) -> None:
    case = Drawn([pool[pick % len(pool)] for pick in picks])
    with Megakernel("CPU", [MIX], workers=2, slots=64) as mega:
        memory = case.start.copy()
        with mega.batch():
            for a, b, y, salt in case.rows:
                mega.submit("mix", [memory[a], memory[b]], [memory[y]], [salt])
        report = mega.drain()
    np.testing.assert_array_equal(memory, case.expected())
    assert report.deduped_items == duplicates(case.rows)
    assert report.is_complete


@pytest.mark.parametrize("what", ["input", "output", "parameter", "impure", "off"])
def test_what_is_not_the_same_is_executed(what: str) -> None:
    kernels = {"scale": SCALE, "impure": Kernel.from_json({**SCALE.to_json(), "pure": False})}
    x, y, z = np.ones(64, np.float32), floats(64), floats(64)
    with Megakernel("CPU", kernels, workers=2, dedupe=what != "off") as mega:
        op = "impure" if what == "impure" else "scale"
        with mega.batch():
            mega.submit(op, [x], [y], [64, 2.0])
            if what == "input":  # x changes in between
                mega.submit("scale", [y], [x], [64, 3.0])
            if what == "output":
                mega.submit("scale", [z], [y], [64, 1.0])
            mega.submit(op, [x], [y], [64, 4.0 if what == "parameter" else 2.0])
        report = mega.drain()
    assert report.deduped_items == 0
    expected = {"input": 12, "parameter": 4}
    assert y[0] == expected.get(what, 2)


def test_another_batch_is_not_a_duplicate(mega: Megakernel) -> None:
    x, y = np.ones(64, np.float32), floats(64)
    mega.wait(mega.submit("scale", [x], [y], [64, 2.0]))
    x[:] = 5  # which a queue cannot see
    mega.wait(mega.submit("scale", [x], [y], [64, 2.0]))
    assert y[0] == 10


# ------------------------------------------------------------------------------------------- faults


# --------------------------------------------------------------------------------------------- ends


def test_an_op_that_never_returns_is_named() -> None:
    made = Megakernel("CPU", SOURCES, workers=2, slots=64)
    gate, y, number = spin(made)
    z = floats(1)
    waiter = made.submit("scale", [y], [z], [1, 1.0])
    x, outs = np.ones(64, np.float32), floats(8, 64)
    made.submit_many("scale", [x], [outs], [64, 1.0])
    began = time.monotonic()
    with pytest.raises(DeviceHung) as found:
        made.drain(max_wall_time=0.3)
    assert time.monotonic() - began < 2.3
    error = pickle.loads(pickle.dumps(found.value))
    assert (error.task, error.item, error.missing) == (number, 0, number)
    assert error.worker in (0, 1)
    assert f"submission {waiter} waits for submission {number}" in str(error)
    assert "op spin" in str(error)
    assert (outs == 1).all()  # the other worker went on
    for call in (lambda: made.submit("scale", [x], [outs[0]], [64, 1.0]), made.drain, made.clear):
        with pytest.raises(DeviceHung):
            call()
    assert made.state == "dead"
    made.close()
    made.close()
    gate[0] = 1  # the thread may write to what is kept, and ends


def test_what_was_done_before_a_hang_is_reported() -> None:
    made = Megakernel("CPU", SOURCES, workers=2, slots=64, trace=True, lineage=True)
    x, outs = np.ones(64, np.float32), floats(3, 64)
    made.submit_many("scale", [x], [outs], [64, 1.0])
    made.drain()
    gate, y, number = spin(made)
    waiter = made.submit("scale", [y], [floats(1)], [1, 1.0])
    done = made.submit("scale", [x], [outs[0]], [64, 2.0])
    assert made.wait(done) is TaskState.DONE
    with pytest.raises(DeviceHung):
        made.drain(max_wall_time=0.1)
    report = made.report()
    assert (report.items_processed, report.items_remaining) == (1, 2)
    assert report.tasks.state is not None
    rows = report.rows_of([number, waiter, done])
    assert rows == (0, 1, 2)
    assert report.tasks.state.tolist() == [TaskState.NOT_RUN, TaskState.NOT_RUN, TaskState.DONE]
    hung = [each for each in report.workers if each.state is WorkerState.HUNG]
    assert [each.task for each in hung] == [number]
    assert f"submission {number} (spin)" in str(report)
    assert "not in the trace" in " ".join(report.notes)
    assert type(report).from_json(report.to_json()).items_remaining == 2
    made.close()
    gate[0] = 1
    until = time.monotonic() + 20
    while made.report().items_processed < 2:  # it is told, also when the queue is closed
        assert time.monotonic() < until
    assert y[0] == 1


HANGS = """
import sys
import numpy as np
from brickline.errors import DeviceHung
from brickline.executor.megakernel.queue import Megakernel
from brickline.kernel import Kernel, Param

never = Kernel(
    "never",
    "BRICKLINE void never(Block& block, float* y) { volatile int go = 1; while (go) y[0] += 1; }",
    [Param("y", "f32", 1, "write")],
)
mega = Megakernel("CPU", [never], workers=2)
mega.submit("never", writes=[np.zeros(1, np.float32)])
while not any(each["inside"] for each in mega._core.workers()):
    pass
try:
    if "drain" in sys.argv:
        mega.drain(max_wall_time=0.05)
    if "close" in sys.argv:
        mega.close()
except DeviceHung:
    print("hung")
if "del" in sys.argv:
    del mega
print("end")
"""


@pytest.mark.parametrize("how", ["drain", "drain close", "close", "drain del", "del", "none"])
def test_a_process_with_a_hung_worker_ends_as_any(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, *how.split()], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.split()
    assert said[-1] == "end"
    assert ("hung" in said) == ("drain" in how or "close" in how)


def test_a_hung_worker_is_noticed_when_it_is_closed() -> None:
    made = Megakernel("CPU", SOURCES, workers=1, slots=64)
    gate, _, _ = spin(made)
    with pytest.raises(DeviceHung):
        made.close()
    gate[0] = 1


def test_a_forked_child_is_refused(mega: Megakernel) -> None:
    x, y = np.ones(64, np.float32), floats(64)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mega.submit("scale", [x], [y], [64, 2.0])
        except QueueError as error:
            status = 0 if "MK506" in str(error) else 2
        mega.close()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    mega.submit("scale", [x], [y], [64, 2.0])
    assert mega.drain().is_complete


def test_two_threads_and_one_queue(mega: Megakernel) -> None:
    gate, _, _ = spin(mega)
    found: list[BaseException] = []
    drainer = threading.Thread(target=mega.drain)
    drainer.start()
    until = time.monotonic() + 20
    while not mega._lock.locked():
        assert time.monotonic() < until
    try:
        mega.submit("scale", [floats(64)], [floats(64)], [64, 1.0])
    except QueueError as error:
        found.append(error)
    gate[0] = 1
    drainer.join()
    assert "MK506" in str(found[0])


def test_a_signal_ends_the_wait_and_not_the_work(mega: Megakernel) -> None:
    gate, y, number = spin(mega)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            mega.drain()
    finally:
        signal.signal(signal.SIGALRM, before)
    gate[0] = 1
    assert mega.wait(number) is TaskState.DONE
    assert y[0] == 1


def test_threads_have_names_take_no_signals_and_end() -> None:
    def names() -> list[str]:
        found = []
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/comm", encoding="ascii") as file:
                found.append(file.read().strip())
        return sorted(name for name in found if name.startswith("brickline-q"))

    def come_to_be(wanted: list[str]) -> bool:
        until = time.monotonic() + 20
        while names() != wanted and time.monotonic() < until:
            time.sleep(0.01)
        return names() == wanted

    assert come_to_be([])  # those that hung in other tests have ended
    with Megakernel("CPU", [SCALE], workers=3, slots=64):
        assert come_to_be(["brickline-q0", "brickline-q1", "brickline-q2"])
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/status", encoding="ascii") as file:
                facts = dict(line.split(":", 1) for line in file)
            if facts["Name"].strip().startswith("brickline-q"):
                assert int(facts["SigBlk"], 16) & (1 << (signal.SIGINT - 1))
    assert names() == []


# ------------------------------------------------------------------------------------------- memory


def test_memory_is_kept_until_it_is_done(mega: Megakernel) -> None:
    class Owned(np.ndarray):
        pass

    gate, y, _ = spin(mega)
    z = floats(1).view(Owned)
    mega.submit("scale", [y], [z], [1, 1.0])
    alive = weakref.ref(z)
    del z
    gc.collect()
    assert alive() is not None
    gate[0] = 1
    mega.drain()
    gc.collect()
    assert alive() is None


def test_a_queue_that_is_dropped_ends_before_its_memory() -> None:
    made = Megakernel("CPU", SOURCES, workers=2, slots=1024)
    x = np.ones(64, np.float32)
    for _ in range(500):
        made.submit("scale", [x], [floats(64)], [64, 2.0])
    core = weakref.ref(made._held)
    del made
    gc.collect()
    assert core() is None


def test_the_memory_gate_refuses_before_anything_is_published() -> None:
    tables = Megakernel("CPU", [SCALE], workers=1, slots=64)
    used = tables._core.tables_bytes
    tables.close()
    x, y = np.ones(1 << 16, np.float32), floats(1 << 16)
    with pytest.raises(QueueError, match="MK504"):
        Megakernel("CPU", [SCALE], workers=1, slots=1 << 16, memory_budget=1000)
    with Megakernel(
        "CPU", [SCALE], workers=1, slots=1024, memory_budget=20 * used + 2 * x.nbytes
    ) as mega:
        mega.submit("scale", [x], [y], [1 << 16, 2.0])
        with pytest.raises(QueueError, match="MK504"):
            mega.submit_many("scale", [x], [floats(64, 1 << 16)], [1 << 16, 2.0], count=64)
        for _ in range(20):  # one after the other they fit
            mega.submit("scale", [x], [floats(1 << 16)], [1 << 16, 2.0])
        report = mega.drain()
        assert report.items_processed == 21 * 1024
        assert report.telemetry.memory_budget_bytes == mega.memory_budget
        assert report.telemetry.peak_memory_bytes is not None
        assert report.telemetry.peak_memory_bytes <= mega.memory_budget


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"op": "nothing"}, "MK502: .*expected one of scale"),
        ({"reads": {}}, "MK507: .*x is missing; pass it in reads="),
        ({"reads": {"z": floats(64)}}, "MK507: .*reads: expected x, got 'z'"),
        ({"writes": None}, "MK507: .*y is missing; pass it in writes="),
        ({"params": {"n": 64}}, "MK507: .*by is missing; pass it in params="),
        ({"params": [64]}, "MK507: .*params: expected n, by"),
        ({"params": {"n": 0, "by": 1.0}}, "MK507: .*expected a value from 1"),
        ({"params": {"n": 2.5, "by": 1.0}}, "MK507: .*whole number"),
        ({"params": {"n": True, "by": 1.0}}, "MK507: .*whole number"),
        ({"params": {"n": 2**70, "by": 1.0}}, "MK507: .*whole number of 64 bits"),
        ({"params": {"n": 64, "by": "2"}}, "MK507: .*expected a number"),
        ({"params": {"n": 64, "by": 1e300}}, "MK507: .*fits f32"),
        ({"params": {"n": 63, "by": 1.0}}, "MK507: .*expected 63 elements along axis 0.*got 64"),
        ({"reads": {"x": np.zeros(64)}}, "MK507: .*expected f32, got f64"),
        ({"reads": {"x": floats(128)[::2]}}, "MK507: .*contiguous"),
        ({"reads": {"x": floats(8, 8)}}, "MK507: .*expected 1 dimensions, got 2"),
        ({"reads": {"x": "text"}}, "MK507: .*expected a Buffer or an array"),
        ({"priority": 5}, "MK509: .*critical, high, normal, low, idle"),
        ({"priority": "urgent"}, "MK509"),
        ({"params": {"n": 70000, "by": 1.0}, "wide": 70000}, "MK503: .*at most 1024"),
    ],
)
def test_a_bad_submission_is_refused_whole(
    mega: Megakernel, given: dict[str, Any], words: str
) -> None:
    size = given.pop("wide", 64)
    arguments: dict[str, Any] = {
        "op": "scale",
        "reads": {"x": floats(size)},
        "writes": {"y": floats(size)},
        "params": {"n": size, "by": 1.0},
        **given,
    }
    with pytest.raises(QueueError, match=words):
        mega.submit(**arguments)
    x, y = np.ones(64, np.float32), floats(64)
    mega.submit("scale", [x], [y], [64, 2.0])
    report = mega.drain()
    assert (report.items_processed, len(report.tasks)) == (1, 1)


def test_memory_that_is_read_only_or_shared_is_refused(mega: Megakernel) -> None:
    x, y = floats(64), floats(64)
    y.flags.writeable = False
    with pytest.raises(QueueError, match=r"MK507: .*read-only"):
        mega.submit("scale", [x], [y], [64, 1.0])
    with pytest.raises(QueueError, match=r"MK507: .*shares 256 bytes with x"):
        mega.submit("scale", [x], [x], [64, 1.0])


def test_what_is_written_is_not_given_as_what_is_read(mega: Megakernel) -> None:
    x, y = floats(64), floats(64)
    with pytest.raises(QueueError, match=r"MK507: .*y is written; pass it in writes="):
        mega.submit("scale", {"x": x, "y": y}, None, [64, 1.0])
    with pytest.raises(QueueError, match=r"wait: MK511: .*expected True or False, got 'no'"):
        mega.submit("scale", [x], [y], [64, 1.0], wait="no")  # type: ignore[arg-type]
    with pytest.raises(QueueError, match="wait: MK511"), mega.batch(wait=7):  # type: ignore[arg-type]
        pass
    assert mega.drain().items_processed == 0


def test_a_cpu_has_no_streams(mega: Megakernel) -> None:
    with pytest.raises(QueueError, match=r"stream: MK511: .*a CPU has no streams; leave it out"):
        mega.submit("scale", [floats(64)], [floats(64)], [64, 1.0], stream=3)
    assert mega.drain().items_processed == 0


def test_a_batch_is_published_whole_or_not_at_all(mega: Megakernel) -> None:
    x, outs = np.ones(64, np.float32), floats(10, 64)

    def submit_all(sizes: list[int]) -> None:
        with mega.batch():
            for size in sizes:
                mega.submit("scale", [x], [floats(64)], [size, 1.0])
            if len(sizes) == 1:
                raise ZeroDivisionError

    with pytest.raises(QueueError, match="MK507"):
        submit_all([64, 63])
    with pytest.raises(ZeroDivisionError):
        submit_all([64])
    with pytest.raises(QueueError, match=r"submission 2 of 3.*from 1"):
        mega.submit_many("scale", [x], [floats(3, 64)], [np.array([64, 64, 0]), 1.0])
    with pytest.raises(QueueError, match="MK503"):
        submit_all([64] * 1025)
    with mega.batch():
        numbers = [mega.submit("scale", [x], [out], [64, 1.0]) for out in outs]
        assert not outs.any()
    report = mega.drain()
    assert numbers == list(range(10))
    assert (report.items_processed, len(report.tasks)) == (10, 10)
    with pytest.raises(QueueError, match=r"MK510.*is being collected"), mega.batch(), mega.batch():
        pass


@pytest.mark.parametrize("number", [0, -1, 1.5, "0", None])
def test_a_submission_is_waited_for_by_its_number(mega: Megakernel, number: Any) -> None:
    with pytest.raises(QueueError, match=r"MK513: .*nothing is submitted"):
        mega.wait(number)


@pytest.mark.parametrize("call", ["drain", "report", "clear"])
def test_a_batch_ends_before_it_is_waited_for(mega: Megakernel, call: str) -> None:
    x, y = np.ones(64, np.float32), floats(64)
    words = f"megakernel queue, {call}: MK510: it cannot be done now; a batch is being collected"
    with mega.batch():
        number = mega.submit("scale", [x], [y], [64, 2.0])
        with pytest.raises(QueueError, match=words):
            getattr(mega, call)()
        with pytest.raises(QueueError, match=r"MK513: .*those of a batch are when it ends"):
            mega.wait(number)
    assert mega.drain().items_processed == 1  # nothing of it is lost
    assert y[0] == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"by": np.ones(2)}, "each of 3 submissions, got 2"),
        ({"n": np.ones(3)}, "expected a whole number for each"),
        ({"x": floats(2, 64)}, "expected a first axis of 3"),
        ({"x": [floats(64)] * 2}, "expected 3 arrays, got 2"),
        ({"x": [floats(64), floats(64), floats(32)]}, "arrays of one shape"),
        ({"priority": [0, 1]}, "expected 3 numbers from 0 to 4"),
        ({"priority": [0, 1, 9]}, "MK509"),
    ],
)
def test_bad_columns_are_refused(mega: Megakernel, given: dict[str, Any], words: str) -> None:
    priority = given.pop("priority", 2)
    columns: dict[str, Any] = {"x": floats(3, 64), "n": 64, "by": 1.0, **given}
    with pytest.raises(QueueError, match=words):
        mega.submit_many(
            "scale",
            {"x": columns["x"]},
            {"y": floats(3, 64)},
            {"n": columns["n"], "by": columns["by"]},
            count=3,
            priority=priority,
        )
    assert mega.drain().items_processed == 0


@pytest.mark.parametrize("seconds", [0, -1, 1e10, float("nan"), float("inf"), "1", True])
def test_a_deadline_is_a_time(mega: Megakernel, seconds: Any) -> None:
    words = r"MK508: .*seconds above 0 and up to 1000000000, or None"
    with pytest.raises(QueueError, match=words):
        mega.drain(seconds)
    number = mega.submit("scale", [floats(64)], [floats(64)], [64, 1.0])
    with pytest.raises(QueueError, match=words):
        mega.wait(number, seconds)
    assert mega.drain(1_000_000_000).is_complete


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers: MK511: .*expected a whole number from 1 to 255, got 0"),
        ({"workers": 1000}, "MK511"),
        ({"slots": 0}, "slots"),
        ({"slots": 2**40}, "slots: MK511: .*expected a whole number from 1 to 16777216"),
        ({"slots": 1.5}, "slots"),
        ({"memory_budget": -1}, "memory_budget"),
        ({"retry_limit": -1}, "retry_limit"),
        ({"retry_codes": [0]}, "retry_codes"),
        ({"retry_codes": 20}, r"retry_codes: MK511: .*a list of codes such as \[20\], got 20"),
        ({"retry_codes": "20"}, "a list of codes"),
        ({"delay_seed": -1}, "delay_seed: MK511: .*got -1"),
        ({"delay_seed": 2**70}, "delay_seed"),
        ({"trace": "yes"}, "trace: MK511: .*expected True or False, got 'yes'"),
        ({"lineage": 1}, "lineage"),
        ({"dedupe": None}, "dedupe"),
        ({"fuse": "yes"}, "fuse"),
        ({"prove": 1}, "prove"),
        ({"profiler": "a name"}, "expected a BrickProfiler"),
        ({"overwrite": "no"}, "overwrite"),
        ({"cache": "here"}, "expected a KernelCache"),
        ({"name": ""}, "expected text"),
        ({"device": "NULL"}, "expected CPU, or a GPU such as CUDA:0, got NULL"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(QueueError, match=words):
        Megakernel(**{"device": "CPU", "ops": [SCALE], **options})


def test_kernels_that_cannot_be_ops_are_refused() -> None:
    plain = Kernel(
        "plain", "void plain(float* y) { y[0] = 1; }", [Param("y", "f32", 1, "write")], language="c"
    )
    for ops in ([plain], [Kernel.from_json({**SCALE.to_json(), "host_parallel_safe": False})], [3]):
        with pytest.raises(QueueError, match="MK501"):
            Megakernel("CPU", ops)  # type: ignore[arg-type]
    for empty in ([], {}, "scale", [SCALE, SCALE]):
        with pytest.raises(QueueError, match="MK511"):
            Megakernel("CPU", empty)  # type: ignore[arg-type]
    broken = Kernel(
        "broken",
        "BRICKLINE void broken(Block& block, float* y) { y[0] = nothing; }",
        [Param("y", "f32", 1, "write")],
    )
    with pytest.raises(CompileError):
        Megakernel("CPU", [broken])


def test_a_closed_queue_says_so(mega: Megakernel) -> None:
    mega.close()
    assert mega.state == "closed"
    for call in (mega.drain, mega.report, mega.clear):
        with pytest.raises(QueueError, match="MK505"):
            call()
    mega.close()
    mega.stop()


def test_every_code_has_words() -> None:
    assert list(REASONS) == sorted(REASONS)
    assert all(code.startswith("MK5") and words for code, words in REASONS.items())
    assert [each.lower() for each in Priority.__members__] == [
        *("critical", "high", "normal", "low", "idle")
    ]


# ------------------------------------------------------------------------------------------ reports


def test_outputs_need_lineage(mega: Megakernel) -> None:
    with pytest.raises(QueueError, match="lineage=True"):
        mega.drain(outputs={"y": floats(1)})


@pytest.mark.parametrize("mega", [{"lineage": True}], indirect=True)
def test_outputs_are_arrays_that_were_written(mega: Megakernel) -> None:
    x, y, z = np.ones(64, np.float32), floats(64), floats(64)
    with pytest.raises(QueueError, match=r"outputs: MK511: .*nothing was submitted since"):
        mega.drain(outputs={"z": z})
    mega.submit("scale", [x], [y], [64, 1.0])
    for wrong in ([y], y, {1: y}, {"y": 3}):
        with pytest.raises(QueueError, match=r"outputs.*MK511"):
            mega.drain(outputs=wrong)  # type: ignore[arg-type]
    report = mega.drain(outputs={"y": y, "z": z})
    assert report.outputs == {"y": (0,), "z": ()}
    assert report.notes == ("output z: no submission of this report wrote to it",)


@pytest.mark.parametrize("mega", [{"lineage": True, "trace": True}], indirect=True)
def test_a_report_has_the_numbers_that_submit_returned(mega: Megakernel, tmp_path: Path) -> None:
    x, outs = np.ones(64, np.float32), floats(3, 64)
    mega.submit_many("scale", [x], [outs], [64, 1.0])
    assert mega.drain().first_submission == 0
    tries, y = np.zeros(2, np.int32), floats(2)
    good = mega.submit("scale", [x], [outs[0]], [64, 2.0])
    last = mega.submit("scale", [outs[0]], [outs[1]], [64, 2.0])
    bad = mega.submit("fail", writes=[tries, y], params=[9])
    report = mega.drain(outputs={"last": outs[1]})
    assert (good, last, bad, report.first_submission) == (3, 4, 5, 3)
    assert {fault.task for fault in report.faults} == {bad}
    assert f"submission {bad} (fail)" in str(report)
    assert report.outputs == {"last": (last,)}
    text = report.explain(last)
    assert text.splitlines()[0].startswith(f"submission {last} (scale)")
    assert f"     {last}  scale  from {good}" in text
    assert report.explain("last").splitlines()[1:] == text.splitlines()[1:]
    for wrong in (0, good - 1, bad + 1):
        with pytest.raises(UsageError, match=f"expected a task from {good} to {bad}, got {wrong}"):
            report.explain(wrong)
    again = type(report).load(report.save(tmp_path / "q.megakernel.json"))
    assert (again.first_submission, again.outputs) == (3, report.outputs)
    assert again.explain(last) == text
    document = megakernel_document(report)
    assert (document["first"], document["outputs"]) == (3, [["last", [1]]])
    assert {row[0] for row in document["faults"]} == {bad - 3}
    assert [each.items for each in sources_of(report, report.outputs["last"])] == [2]
    said: list[int] = []
    write = PacketWriter.write

    def note(self: PacketWriter, track: int, events: Events, *names: Any) -> None:
        said.extend(events.annotations[0].tolist())
        write(self, track, events, *names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PacketWriter, "write", note)
        write_megakernel_perfetto(report, io.BytesIO())
    assert set(said) == {good, last, bad}


def test_a_report_is_saved_and_shown(mega: Megakernel, tmp_path: Any) -> None:
    x, outs = np.ones(64, np.float32), floats(10, 64)
    mega.submit_many("scale", [x], [outs], [64, 2.0], priority=Priority.HIGH)
    report = mega.drain()
    report.save(tmp_path / "queue.megakernel.json")
    again = type(report).load(tmp_path / "queue.megakernel.json")
    assert again.items_processed == 10
    assert report.tasks.priority is not None
    assert report.tasks.priority.tolist() == [1] * 10
    figures = report.telemetry.known()
    assert figures["execution_mode"] == "threads"
    assert figures["capacity"] == 1024
    assert report.queue_plan_ns is not None
    assert report.queue_publish_ns is not None
    assert report.backend_dispatch_ns is not None
    assert 0 < report.queue_plan_ns < report.wall_time_ns
    assert 0 < report.queue_publish_ns < report.wall_time_ns
    assert 0 < report.backend_dispatch_ns <= report.wall_time_ns
