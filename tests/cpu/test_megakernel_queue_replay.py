"""Replay of a queue: what was submitted is run again anywhere, and the first difference named."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from queue_scenarios import FAIL, SPIN
from typer.testing import CliRunner

from brickline.commands import app
from brickline.errors import DeviceHung, LaunchError, PlanError, QueueError
from brickline.executor.megakernel import queue_recording
from brickline.executor.megakernel import replay as replaying
from brickline.executor.megakernel.queue import Megakernel
from brickline.executor.megakernel.queue_recording import QueueRecorder
from brickline.executor.megakernel.queue_replay import QueueRunner
from brickline.executor.megakernel.replay import replay
from brickline.executor.megakernel.replay_log import DOCUMENT, ReplayLog
from brickline.executor.megakernel.replay_recording import record
from brickline.executor.megakernel.replay_result import ReplayStatus
from brickline.executor.prepared import PreparedPlan
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import residual
from brickline.megakernel_tables import TaskState
from brickline.plan import Plan
from brickline.plan_launches import Launch

PIECE = ("block_x * 64", "minimum((block_x + 1) * 64, n * 4)")
"""Bytes of sixteen floats for each block."""
SCALE = Kernel(
    "scale",
    """BRICKLINE void scale(Block& block, const float* x, float* y, int64_t n, float by) {
           int64_t first = block.index() * 16, left = n - first;
           block.each(left < 16 ? left : 16, [&](int64_t i) { y[first + i] = x[first + i] * by; });
       }""",
    [
        *(Param("x", "f32", "n"), Param("y", "f32", "n", "write", touches=PIECE)),
        *(Scalar("n", low=0, high=1 << 16), Scalar("by", "f32")),
    ],
    global_size="maximum(ceil_div(n, 16), 1)",
)
BUMP = Kernel(
    "bump",
    """BRICKLINE void bump(Block& block, int32_t* x, int64_t n) {
           block.once([&] { for (int64_t i = 0; i < n; ++i) x[i] = x[i] * 3 + 1; });
       }""",
    [Param("x", "i32", "n", "read-write"), Scalar("n", low=1, high=1 << 16)],
)
LINGER = Kernel(
    "linger",
    """extern "C" int usleep(unsigned);
       BRICKLINE void linger(Block& block, float* y, int64_t us) {
           usleep(unsigned(us));
           y[0] = 1;
       }""",
    [Param("y", "f32", 1, "write"), Scalar("us", high=10**6)],
    pure=False,
)
OPS = [SCALE, BUMP, FAIL, LINGER, SPIN]
EXECUTORS = ["serial", "parallel", "megakernel", "queue"]


@pytest.fixture
def mega() -> Iterator[Megakernel]:
    with Megakernel("CPU", OPS, workers=2, slots=1024, trace=True) as made:
        yield made


def floats(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def scale(mega: Megakernel, x: Any, y: Any, by: float = 2.0, **options: Any) -> int:
    return mega.submit("scale", {"x": x}, {"y": y}, {"n": len(x), "by": by}, **options)


def chain(mega: Megakernel, count: int = 100) -> tuple[Any, ...]:
    """Four submissions; t is overwritten, so that its first contents are known to nobody."""
    x, t, y, z = floats(4, count)
    scale(mega, x, t, 2.0)
    scale(mega, t, y, 3.0, priority="high")
    with mega.batch():
        scale(mega, x, t, 5.0)
        scale(mega, t, z, 7.0, priority="low")
    return x, t, y, z


def chain_log(mega: Megakernel) -> ReplayLog:
    with QueueRecorder(mega).recording() as recorder:
        chain(mega)
        mega.drain()
    return recorder.log()


class Faulty:
    """Runs launches in order, and changes one element of what some of them write."""

    def __init__(self, prepared: PreparedPlan, wrong: Sequence[int], element: int) -> None:
        self._prepared, self._wrong, self._element = prepared, wrong, element

    def run(self, stream: int) -> tuple[int, int, int]:
        launches = self._prepared.launches
        for launch in launches:
            self._prepared._core.run_serial(stream, launch.number, launch.number + 1)
            if launch.number in self._wrong:
                (buffer,) = [each for param, each in launch.buffers() if param.access.writes]
                whole = self._prepared.buffers[buffer.name].numpy()
                whole[self._element] += 1
        return len(launches), 0, -1


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make every executor of plans but the serial one wrong in some launches."""

    def break_it(*wrong: int, element: int = 40) -> None:
        sound = replaying.prepare

        def prepared(plan: Any, device: Any, executor: str, **options: Any) -> PreparedPlan:
            made = sound(plan, device, "serial", **options)
            if executor != "serial":
                made._run = Faulty(made, wrong, element)
            return made

        monkeypatch.setattr(replaying, "prepare", prepared)

    return break_it


# ----------------------------------------------------------------------------------------- the same


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("every", [False, True])
def test_every_executor_gives_the_recorded_bits(
    mega: Megakernel, executor: str, every: bool
) -> None:
    log = chain_log(mega)
    assert (log.kind, log.executor, log.device) == ("queue", "queue", "CPU")
    found = replay(log, executor=executor, every=every)
    assert found, str(found)
    assert found.exit_status == 0
    hidden = "; 1 more are overwritten" if every and executor != "serial" else ""
    pieces = 4 if every and executor == "serial" else 3
    assert f"the same bits, 4 submissions, {pieces} pieces compared{hidden}" in str(found)


def test_the_log_tells_what_was_submitted_and_in_which_order_it_ran(mega: Megakernel) -> None:
    log = chain_log(mega)
    queue = log.queue
    assert queue is not None
    assert queue.ops == ("scale", "bump", "fail", "linger", "spin")
    assert queue.op == (0, 0, 0, 0)
    assert queue.priority == (2, 1, 2, 3)
    assert queue.batch_ends == (1, 2, 4)
    assert queue.states == (TaskState.DONE,) * 4
    assert queue.workers == 2
    assert queue.items is not None
    assert sorted(each[:2] for each in queue.items) == [
        (number, block) for number in range(4) for block in range(7)
    ]
    (run,) = log.runs
    assert run.order is not None
    assert sorted(run.order) == [0, 1, 2, 3]
    assert run.order.index(0) < run.order.index(1)
    assert [len(each) for each in run.written] == [0, 1, 1, 1]  # t is known of its last writer
    assert [each.name for each in log.plan.storages] == ["x", "y", "y_1", "y_2"]
    assert [each.brick for each in log.plan.launches] == ["scale"] * 4


def test_submissions_are_made_again_as_they_were(
    mega: Megakernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = chain_log(mega)
    ran: list[Any] = []
    submit, batch = Megakernel.submit, Megakernel.batch
    monkeypatch.setattr(
        Megakernel,
        "submit",
        lambda self, *given, **more: ran.append(more["priority"]) or submit(self, *given, **more),
    )
    monkeypatch.setattr(Megakernel, "batch", lambda self: ran.append("batch") or batch(self))
    assert replay(log, executor="queue")
    assert ran == ["batch", 2, "batch", 1, "batch", 2, 3]


def test_the_recorded_order_is_run_again(mega: Megakernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = floats(4, 16), floats(4, 16)
    with QueueRecorder(mega).recording() as recorder:
        mega.submit_many("scale", {"x": x}, {"y": y}, {"n": 16, "by": np.arange(4.0)})
        mega.drain()
    log = recorder.log()
    log = replace(log, runs=(replace(log.runs[0], order=(2, 0, 3, 1)),))
    ran: list[int] = []
    step = replaying.stepped

    def noted(prepared: PreparedPlan, launch: Launch, stream: int) -> tuple[int, int, int]:
        ran.append(launch.number)
        return step(prepared, launch, stream)

    monkeypatch.setattr(replaying, "stepped", noted)
    assert replay(log)
    assert ran == [2, 0, 3, 1]


def test_rows_of_one_array_are_one_buffer(mega: Megakernel) -> None:
    x, y = floats(50, 16), floats(50, 16)
    with QueueRecorder(mega).recording() as recorder:
        mega.submit_many(
            "scale",
            {"x": x},
            {"y": y},
            {"n": 16, "by": np.linspace(0, 1, 50)},
            priority=np.arange(50) % 5,
        )
        mega.submit_many("scale", {"x": [x[3], x[1]]}, {"y": [y[2], y[0]]}, {"n": 16, "by": 2.0})
        mega.drain()
    log = recorder.log()
    assert [(each.name, each.nbytes) for each in log.plan.storages] == [("x", 3200), ("y", 3200)]
    assert log.queue is not None
    assert log.queue.batch_ends == (50, 52)
    assert log.queue.priority[:6] == (0, 1, 2, 3, 4, 0)
    for executor in EXECUTORS:
        assert replay(log, executor=executor)


def test_memory_of_two_dtypes_and_of_none(mega: Megakernel) -> None:
    memory = np.zeros(68, np.uint8)
    words, reals = memory[4:].view(np.int32), memory[4:].view(np.float32)
    words[:] = np.arange(16)
    with QueueRecorder(mega).recording() as recorder:
        mega.submit("bump", writes={"x": words[2:]}, params={"n": 14})
        scale(mega, reals[:8].copy(), reals[8:])
        scale(mega, floats(0), floats(0))
        mega.drain()
    log = recorder.log()
    assert log.plan.storages[0].dtype == "u8"
    for executor in EXECUTORS:
        found = replay(log, executor=executor)
        assert found, str(found)


# ----------------------------------------------------------------------------- what the host writes


@pytest.mark.parametrize("learned", ["drain", "wait", "open"])
def test_what_the_host_writes_in_between_is_noticed(mega: Megakernel, learned: str) -> None:
    x, y, z = floats(3, 64)
    with QueueRecorder(mega).recording() as recorder:
        number = scale(mega, x, y)
        if learned == "drain":
            mega.drain()
        elif learned == "wait":
            mega.wait(number)
        else:
            while mega.open:
                pass
        y[10:20] = -1  # what a submission wrote
        scale(mega, y, z)
        mega.wait(number + 1)
        x[:] = 3  # what a submission read
        scale(mega, x, y, 4.0)
        mega.drain()
        scale(mega, z, y)  # which nobody has changed
        mega.drain()
    log = recorder.log()
    assert [run.first for run in log.runs] == [0, 1, 2]
    for executor in EXECUTORS:
        found = replay(log, executor=executor)
        assert found, str(found)
        assert "4 submissions over 3 runs" in str(found)


def test_a_wait_for_one_leaves_the_others_alone(mega: Megakernel) -> None:
    """Of two that run, one is waited for and its memory changed; the other one is still running."""
    gate, y = np.zeros(1, np.int32), floats(1)
    a, b = floats(64), floats(64)
    with QueueRecorder(mega).recording() as recorder:
        mega.submit("spin", writes={"gate": gate, "y": y})
        mega.wait(scale(mega, a, b))
        b[5] = 9
        scale(mega, b, a)
        gate[0] = 1
        mega.drain()
    log = recorder.log()
    assert [run.first for run in log.runs] == [0, 2]
    assert [len(each) for run in log.runs for each in run.written] == [2, 1, 1]


def test_freed_memory_that_is_used_again(mega: Megakernel) -> None:
    out = floats(64)
    with QueueRecorder(mega).recording() as recorder:
        for value in range(20):
            scale(mega, np.full(64, value, np.float32), out)
            mega.drain()
            assert out[0] == 2 * value
    for executor in ("serial", "queue"):
        found = replay(recorder.log(), executor=executor)
        assert found, str(found)


# ------------------------------------------------------------------------------------- what differs


def test_the_first_wrong_submission_element_and_item(mega: Megakernel, faulty: Any) -> None:
    log = chain_log(mega)
    faulty(1)
    found = replay(log, executor="parallel")
    assert (found.status, found.exit_status) == (ReplayStatus.DIFFERS, 1)
    difference = found.difference
    assert difference is not None
    assert (difference.task, difference.launch) == (1, "submission 1 (scale)")
    assert (difference.element, difference.begin, difference.is_exact) == (40, 160, True)
    assert difference.block == (2, 0, 0)
    assert difference.recorded is not None
    assert difference.replayed is not None
    assert float(difference.replayed) == pytest.approx(float(difference.recorded) + 1, rel=1e-5)
    text = str(found)
    assert "differs first at submission 1 (scale), wrote something else to y_1" in text
    assert "that is element 40 of its argument y; block (2, 0, 0) writes it, recorded as" in text
    assert "to begin, on worker" in text


def test_a_part_of_an_array_is_counted_from_its_own_beginning(
    mega: Megakernel, faulty: Any
) -> None:
    x, y = floats(64), floats(64)
    with QueueRecorder(mega).recording() as recorder:
        scale(mega, x[:16], y[:16])
        scale(mega, x[32:], y[32:])
        scale(mega, x, y)
        scale(mega, x[32:], y[32:], 3.0)
        mega.drain()
    faulty(3)
    found = replay(recorder.log(), executor="parallel")
    assert "element 40 of f32, byte 160" in str(found)
    assert "that is element 8 of its argument y; block (0, 0, 0) writes it" in str(found)


@pytest.mark.parametrize("executor", ["parallel", "megakernel"])
def test_an_output_that_is_overwritten_is_compared_where_it_is_asked_for(
    mega: Megakernel, faulty: Any, executor: str
) -> None:
    log = chain_log(mega)
    faulty(0)  # which writes t, and nobody knows what it was
    hidden = replay(log, executor=executor)
    assert hidden.difference is not None
    assert hidden.difference.task == 1  # which read it
    every = replay(log, executor=executor, every=True)
    assert every.difference is not None
    assert (every.difference.task, every.difference.element) == (0, 40)
    assert every.difference.is_exact


def test_a_queue_that_computes_something_else(
    mega: Megakernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = chain_log(mega)
    submit = Megakernel.submit

    def other(self: Megakernel, op: str, reads: Any, writes: Any, params: Any, **more: Any) -> int:
        by = 6.0 if params["by"] == 5.0 else params["by"]
        return submit(self, op, reads, writes, {**params, "by": by}, **more)

    monkeypatch.setattr(Megakernel, "submit", other)
    found = replay(log, executor="queue")
    assert found.difference is not None
    assert (found.difference.task, found.difference.begin) == (2, 0)
    assert found.difference.is_exact


def test_a_log_that_nobody_meets_says_which_piece(mega: Megakernel) -> None:
    log = chain_log(mega)
    (run,) = log.runs
    (entry,) = run.written[2]
    turned = replace(entry, digests=("0" if entry.digests[0] != "0" else "1") + entry.digests[1:])
    wrong = replace(run, written=(*run.written[:2], (turned,), run.written[3]))
    for executor in EXECUTORS:
        for every in (False, True):
            found = replay(replace(log, runs=(wrong,)), executor=executor, every=every)
            assert found.difference is not None
            assert (found.difference.task, found.difference.is_exact) == (2, False)
            assert "does not give the recorded bits either" in str(found)


# -------------------------------------------------------------------------- faults, dedupe, the end


def test_what_faulted_faults_again_in_a_queue_and_is_left_out_elsewhere(mega: Megakernel) -> None:
    x, t, y, z = floats(4, 2)
    tries = np.array([5, 0], np.int32)
    with QueueRecorder(mega).recording() as recorder:
        scale(mega, x, y)
        mega.submit("fail", writes={"tries": tries, "y": t}, params={"times": 3})
        scale(mega, t, z)  # skipped
        scale(mega, x, z, 9.0)  # only overwrites
        mega.drain()
        scale(mega, t, y)  # what the fault left there is the host's from now on
        mega.drain()
    log = recorder.log()
    queue = log.queue
    assert queue is not None
    done, faulted, skipped = TaskState.DONE, TaskState.FAULTED, TaskState.SKIPPED
    assert queue.states == (done, faulted, skipped, done, done)
    assert queue.faults == ((1, 1, 20),)
    for executor in EXECUTORS:
        found = replay(log, executor=executor)
        assert found, str(found)
        left = executor != "queue"
        assert ("2 more were deduped or not done, and are left out" in str(found)) is left


@pytest.mark.parametrize("times", [0, 1])
def test_a_submission_that_ends_otherwise_is_named(
    mega: Megakernel, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Recorded with a fault at item 1, replayed with one at item 0; and the reverse."""
    x, y = floats(2), floats(2)
    tries = np.array([5, times], np.int32)
    with QueueRecorder(mega).recording() as recorder:
        scale(mega, x, y)
        mega.submit("fail", writes={"tries": tries, "y": x}, params={"times": 1})
        mega.drain()
    submit = Megakernel.submit

    def other(self: Megakernel, op: str, reads: Any, writes: Any, params: Any, **more: Any) -> int:
        params = {"times": 1 - times} if op == "fail" and times else params
        params = {"times": 6} if op == "fail" and not times else params
        return submit(self, op, reads, writes, params, **more)

    if times:
        monkeypatch.setattr(Megakernel, "submit", other)
        assert replay(recorder.log(), executor="queue")  # both are done
        return
    assert replay(recorder.log(), executor="queue")
    monkeypatch.setattr(Megakernel, "submit", other)
    found = replay(recorder.log(), executor="queue")
    assert found.exit_status == 1
    assert (
        "differs first at submission 1 (fail), was recorded as faulted (fault 20 at item 1), and "
        "replayed as faulted (fault 20 at item 0)"
    ) in str(found)


def test_what_was_tried_again_is_tried_again() -> None:
    tries, y = np.zeros(2, np.int32), floats(2)
    options: Any = {"workers": 2, "retry_codes": [20], "retry_limit": 2, "trace": True}
    with Megakernel("CPU", OPS, **options) as mega, QueueRecorder(mega).recording() as recorder:
        mega.submit("fail", writes={"tries": tries, "y": y}, params={"times": 1})
        mega.drain()
    log = recorder.log()
    assert log.queue is not None
    assert (log.queue.states, log.queue.retry_codes) == ((TaskState.DONE,), (20,))
    assert log.queue.items is not None
    assert len(log.queue.items) == 4
    assert replay(log, executor="queue")
    with pytest.raises(LaunchError, match="fault 20"):
        replay(log)


def test_what_was_deduped_is_an_alias(mega: Megakernel) -> None:
    x, y, z = floats(3, 32)
    with QueueRecorder(mega).recording() as recorder:
        scale(mega, x, z)
        with mega.batch():
            scale(mega, x, y)
            scale(mega, y, z)
            scale(mega, x, y)
        mega.drain()
    log = recorder.log()
    assert log.queue is not None
    assert log.queue.states[3] is TaskState.DEDUPED
    assert log.queue.aliases == (-1, -1, -1, 1)
    assert [len(each) for each in log.runs[0].written] == [0, 1, 1, 0]
    for executor in EXECUTORS:
        found = replay(log, executor=executor)
        assert found, str(found)
        assert found.compared == 2


def test_what_was_not_run_is_in_the_log(tmp_path: Path) -> None:
    x, y, z = floats(16), floats(1), floats(16)
    with Megakernel("CPU", OPS, workers=1, log=tmp_path / "q.json") as mega:
        scale(mega, x, z)
        mega.wait(0)
        mega.submit("linger", writes=[y], params=[200_000])
        scale(mega, z, x)
        mega.stop()
    log = ReplayLog.load(tmp_path / "q.json")
    assert log.queue is not None
    assert log.queue.states[0] is TaskState.DONE
    assert log.queue.states[2] is TaskState.NOT_RUN
    for executor in EXECUTORS:
        found = replay(log, executor=executor)
        assert found, str(found)
        assert "more were deduped or not done" in str(found)


def test_what_was_cleared_is_not_run_again(mega: Megakernel) -> None:
    x, y, z = floats(16), floats(1), floats(16)
    with QueueRecorder(mega).recording() as recorder:
        scale(mega, x, z)
        for _ in range(2):
            mega.submit("linger", writes=[y], params=[200_000])
        mega.clear()
        z[:] = y[0] = 4
        scale(mega, z, x)
        mega.drain()
    log = recorder.log()
    assert log.queue is not None
    assert log.queue.states[2] is TaskState.NOT_RUN
    assert log.queue.states[3] is TaskState.DONE
    assert log.runs[-1].first == 3
    for executor in EXECUTORS:
        found = replay(log, executor=executor)
        assert found, str(found)


def test_the_log_of_a_queue_that_hangs_is_written(tmp_path: Path) -> None:
    gate, y, x, z = np.zeros(1, np.int32), floats(1), floats(16), floats(16)
    mega = Megakernel("CPU", OPS, workers=2, log=tmp_path / "q.json")
    scale(mega, x, z)
    mega.wait(0)
    mega.submit("spin", writes={"gate": gate, "y": y})
    with pytest.raises(DeviceHung):
        mega.drain(max_wall_time=0.05)
    mega.close()
    log = ReplayLog.load(tmp_path / "q.json")
    assert log.queue is not None
    assert log.queue.states == (TaskState.DONE, TaskState.NOT_RUN)
    assert replay(log)
    gate[0] = 1


# ---------------------------------------------------------------------------------- files and faces


def test_a_file_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    with Megakernel("CPU", OPS, workers=2, log=path) as mega:
        chain(mega)
        report = mega.drain()
        assert report.spans is not None
        assert not path.exists()
    log = ReplayLog.load(path)
    assert replay(log, executor="queue")
    assert [each.name for each in tmp_path.iterdir()] == ["q.json"]
    again = log.save(tmp_path / "again.json")
    assert ReplayLog.load(again) == log
    with Megakernel("CPU", OPS, log=tmp_path / "none.json") as mega:
        pass
    assert not (tmp_path / "none.json").exists()  # nothing was submitted
    with Megakernel("CPU", OPS) as mega:
        assert mega._feed.log is None


@pytest.mark.parametrize(
    ("path", "words"),
    [(3, "expected a file's path"), ("q.json", "is there already"), ("no/q.json", "no directory")],
)
def test_a_path_that_cannot_be_written_is_refused_first(
    path: Any, words: str, tmp_path: Path
) -> None:
    (tmp_path / "q.json").write_text("mine")
    where = tmp_path / path if isinstance(path, str) else path
    with pytest.raises(QueueError, match=words):
        Megakernel("CPU", OPS, log=where)
    assert (tmp_path / "q.json").read_text() == "mine"


def test_a_log_replaces_another_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    path.write_text("mine")
    with Megakernel("CPU", OPS, log=path, overwrite=True) as mega:
        pass
    assert path.read_text() == "mine"  # nothing was submitted
    with Megakernel("CPU", OPS, workers=2, log=path, overwrite=True) as mega:
        chain(mega)
        mega.drain()
        assert path.read_text() == "mine"
    assert replay(ReplayLog.load(path))
    with pytest.raises(QueueError, match=r"is there already; .*overwrite=True"):
        Megakernel("CPU", OPS, log=path)
    with pytest.raises(QueueError, match="expected a file's path, got the directory"):
        Megakernel("CPU", OPS, log=tmp_path, overwrite=True)


def test_what_cannot_be_logged_is_refused(
    mega: Megakernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, y = np.zeros(1, np.int32), floats(1)
    mega.submit("spin", writes={"gate": gate, "y": y})
    with pytest.raises(QueueError, match="drain it first"):
        QueueRecorder(mega)
    gate[0] = 1
    mega.drain()
    recorder = QueueRecorder(mega)
    with pytest.raises(PlanError, match="nothing was submitted"):
        recorder.log()
    with recorder.recording():
        second = QueueRecorder(mega).recording()
        with pytest.raises(QueueError, match="is being logged"):
            second.__enter__()
    monkeypatch.setattr(queue_recording, "MAX_SUBMISSIONS", 2)
    x, t, z = floats(3, 16)
    with QueueRecorder(mega).recording() as recorder:
        scale(mega, x, t)
        many = mega.batch()
        many.__enter__()
        scale(mega, t, z)
        scale(mega, x, z)
        with pytest.raises(QueueError, match="holds 1 submissions of at most 2"):
            many.__exit__(None, None, None)
        scale(mega, t, z)
        mega.drain()
    assert [each.number for each in recorder.log().plan.launches] == [0, 1]
    named = Kernel(
        "named",
        "BRICKLINE void named(Block& block, float* y, int64_t layer) { y[0] = layer; }",
        [Param("y", "f32", 1, "write"), Scalar("layer")],
    )
    with Megakernel("CPU", [named]) as other, pytest.raises(QueueError, match="argument layer"):
        QueueRecorder(other)


def test_a_queue_that_was_given_nothing_dispatched_nothing(mega: Megakernel) -> None:
    assert mega.drain().backend_dispatch_ns is None
    scale(mega, floats(16), floats(16))
    assert (mega.drain().backend_dispatch_ns or 0) > 0
    assert mega.drain().backend_dispatch_ns is None


def test_what_is_submitted_unlogged_is_noticed(mega: Megakernel) -> None:
    x, y = floats(2, 16)
    recorder = QueueRecorder(mega)
    scale(mega, x, y)
    with recorder.recording(), pytest.raises(PlanError, match="something was submitted"):
        scale(mega, x, y)
    mega.drain()


def test_a_refused_submission_leaves_no_trace(mega: Megakernel) -> None:
    x, y = floats(2, 16)
    with QueueRecorder(mega).recording() as recorder:
        with pytest.raises(QueueError):
            scale(mega, x, y[:8])
        ended = mega.batch()
        ended.__enter__()
        scale(mega, x, y)
        ended.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        with mega.batch():
            with pytest.raises(QueueError):
                scale(mega, x, x)
            scale(mega, x, y)
        mega.drain()
    log = recorder.log()
    assert len(log.plan.launches) == 1
    assert replay(log)


def test_contents_that_are_not_kept_must_be_given_and_be_the_same(
    mega: Megakernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = floats(2, 64)
    for contents, kept in ((False, 1 << 20), (None, 300)):
        monkeypatch.setattr(queue_recording, "KEPT_BYTES", kept)
        with QueueRecorder(mega, contents=contents).recording() as recorder:
            before = {"x": x.copy(), "y": y.copy()}
            scale(mega, x, y)
            mega.drain()
        log = recorder.log()
        with pytest.raises(PlanError, match=r"does not hold the 256 bytes of x; give them"):
            replay(log)
        for executor in EXECUTORS:
            assert replay(log, executor=executor, bind=before, every=True)
        with pytest.raises(PlanError, match="x is not what it was when the log was recorded"):
            replay(log, bind={**before, "x": before["y"] + 1})
    with QueueRecorder(mega, contents=True).recording() as recorder:
        scale(mega, x, y)
        mega.drain()
    assert replay(recorder.log())


def test_a_plan_is_replayed_as_a_queue() -> None:
    plan = Plan("adds")
    n = plan.variable("n", 1, 64, default=64)
    x, y, z = (plan.buffer(name, n, "f32") for name in "xyz")
    plan.launch(residual(), a=x, b=x, y=y, n=n)
    plan.launch(residual(), a=y, b=x, y=z, n=n)
    prepared = plan.prepare("CPU")
    prepared.write("x", floats(64))
    log = record(prepared, n=50)
    assert log.kind == "plan"
    found = replay(log, executor="queue")
    assert found, str(found)
    assert "2 launches" in str(found)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", "replay", *map(str, arguments)])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "q.json"
    with Megakernel("CPU", OPS, workers=2, log=path, name="steps") as mega:
        chain(mega)
        mega.drain()
    for executor in EXECUTORS:
        found = run(path, "--executor", executor, "--every")
        assert found.exit_code == 0, found.output
        assert f"steps: recorded on CPU, queue, replayed on CPU, {executor}" in found.output
    submit = QueueRunner._submit
    monkeypatch.setattr(
        QueueRunner,
        "_submit",
        lambda self, mega, prepared, piece, number: (
            number == 1 or submit(self, mega, prepared, piece, number)
        ),
    )
    found = run(path, "--executor", "queue")
    assert found.exit_code == 1
    assert "differs first at submission" in found.output


# --------------------------------------------------------------------------------------- properties

WIDTH, SLICE = 96, 16
steps = st.lists(
    st.one_of(
        st.tuples(st.just("scale"), st.integers(0, 80), st.integers(0, 80), st.integers(0, 4)),
        st.tuples(st.just("bump"), st.integers(0, 92), st.integers(1, 4), st.integers(0, 4)),
        st.tuples(st.just("write"), st.integers(0, 95), st.integers(0, 7)),
        st.tuples(st.sampled_from(["drain", "wait", "batch"])),
    ),
    min_size=1,
    max_size=14,
)


def submitted(mega: Megakernel, memory: Any, given: list[Any]) -> int:
    """Submit random work over one array and return how many submissions that were."""
    words, reals = memory[:WIDTH], memory[WIDTH:].view(np.float32)
    count, batch = 0, None
    for name, *numbers in given:
        if batch is not None and name != "scale" and name != "bump":
            batch.__exit__(None, None, None)
            batch = None
        if name == "scale":
            source, target, level = numbers
            if abs(source - target) < SLICE:
                continue
            x, y = reals[source : source + SLICE], reals[target : target + SLICE]
            scale(mega, x, y, 0.5 + level, priority=level)
            count += 1
        elif name == "bump":
            first, size, level = numbers
            part = words[first : first + size]
            mega.submit("bump", writes=[part], params=[size], priority=level)
            count += 1
        elif name == "write":
            mega.drain()
            (reals if numbers[1] % 2 else words)[numbers[0]] = numbers[1]
        elif name == "wait" and count:
            mega.wait(mega._core.next - 1)
        elif name == "drain":
            mega.drain()
        elif name == "batch":
            batch = mega.batch()
            batch.__enter__()
    if batch is not None:
        batch.__exit__(None, None, None)
    mega.drain()
    return count


@pytest.fixture(scope="module")
def shared() -> Iterator[Megakernel]:
    with Megakernel("CPU", OPS, workers=2, trace=True, delay_seed=7) as made:
        yield made


@given(given=steps, data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_submissions_replay_equal_and_a_planted_difference_is_named(
    shared: Megakernel, given: list[Any], data: st.DataObject
) -> None:
    memory = np.arange(2 * WIDTH, dtype=np.int32)
    with QueueRecorder(shared).recording() as recorder:
        count = submitted(shared, memory, given)
    if not count:
        return
    log = recorder.log()
    assert len(log.plan.launches) == count
    for executor in ("serial", "megakernel", "queue"):
        found = replay(log, executor=executor, every=data.draw(st.booleans()))
        assert found, str(found)
        assert found.compared
    assert log.queue is not None
    done = [at for at, state in enumerate(log.queue.states) if state is TaskState.DONE]
    wrong, seen = data.draw(st.sampled_from(done)), 0
    step = replaying.stepped

    def planted(prepared: PreparedPlan, launch: Launch, stream: int) -> tuple[int, int, int]:
        """Turn a bit of what one submission writes, when all are run for the second time."""
        nonlocal seen
        outcome = step(prepared, launch, stream)
        run, number = divmod(seen, len(done))
        seen += 1
        if run == 1 and ordered[number] == wrong:
            ((_, buffer),) = [each for each in launch.buffers() if each[0].access.writes]
            whole = prepared.buffers[buffer.name].numpy().reshape(-1).view(np.uint8)
            whole[buffer.offset + 1] ^= 4
        return outcome

    ordered = [
        number
        for run in log.runs
        for number in (
            run.order or [at for at in done if run.first <= at < run.first + len(run.written)]
        )
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "stepped", planted)
        found = replay(log, every=True)
    assert found.difference is not None
    assert found.difference.task == wrong
    assert found.difference.is_exact
    assert "element 0 of its argument" in str(found)


# ------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("logs") / "q.json"
    x, t = floats(2, 40)
    tries = np.zeros(2, np.int32)
    with Megakernel("CPU", OPS, workers=2, log=path) as mega:
        scale(mega, x, t)
        with mega.batch():
            scale(mega, x, t)
            scale(mega, x, t)
        mega.submit("fail", writes={"tries": tries, "y": x[:2]}, params={"times": 1})
        mega.drain()
        x[:] = 3
        scale(mega, x, t)
        mega.drain()
    return path, json.loads(path.read_bytes())["log"]


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    return [way] + [each for key, inner in pairs for each in places(inner, (*way, key))]


JUNK = [None, True, -1, 0, 1, 7, 2**31, 2**63, 1.5, "x", [], {}, [0], [[0, 0, 0]], "queue", "plan"]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_hostile_log_is_refused_or_a_log(data: st.DataObject, contents: tuple[Path, Any]) -> None:
    """Whatever is put anywhere, with a digest that fits: an error of ours, or a sound log."""
    changed = copy.deepcopy(contents[1])
    where = changed[data.draw(st.sampled_from(["queue", "runs"]))]
    if data.draw(st.booleans()):
        where = changed
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(places(where)[1:] or [()]))
        if not way:
            break
        holder = where
        for key in way[:-1]:
            holder = holder[key]
        holder[way[-1]] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
    path = contents[0].parent / "hostile.json"
    path.write_text(DOCUMENT.text(changed))
    try:
        log = ReplayLog.load(path)
    except PlanError:
        return
    assert sum(len(run.written) for run in log.runs) == len(log.plan.launches)
    assert list(log.pieces())
    assert list(log.pieces(faulted=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda log: log.update(kind="plan"), "log of a plan or of a queue"),
        (lambda log: log["queue"]["states"].pop(), "one for each of 5 submissions, got 4"),
        (lambda log: log["queue"]["batch_ends"].pop(), "batches of all 5"),
        (lambda log: log["queue"]["op"].__setitem__(0, 2), "the kernel of its op"),
        (lambda log: log["queue"]["priority"].__setitem__(0, 5), "priorities to 4, got 5"),
        (lambda log: log["queue"]["aliases"].__setitem__(0, 0), "what became of it"),
        (lambda log: log["queue"]["states"].__setitem__(0, 1), "what became of it"),
        (lambda log: log["queue"]["faults"][0].__setitem__(0, 0), "that did not fault"),
        (lambda log: log["queue"]["items"][0].__setitem__(1, 99), "there is no item 99"),
        (lambda log: log["queue"]["items"][0].__setitem__(2, 99), "workers below 2"),
        (lambda log: log["queue"]["ops"].__setitem__(0, "bump"), "names, each once"),
        (lambda log: log["runs"][1].update(first=3), "runs of all 5 submissions"),
        (lambda log: log["runs"][0]["order"].pop(), "an order of the 2 that were done"),
        (lambda log: log["runs"][0]["order"].reverse(), "began before"),
        (lambda log: log["runs"][0]["placed"][0].__setitem__(1, 9), "lie outside of it"),
        (lambda log: log["runs"][0]["placed"][0].__setitem__(0, 9), "lie outside of it"),
        (
            lambda log: log["runs"][0]["memory"].update(x=log["runs"][0]["placed"][0][2]),
            "what the host placed",
        ),
        (
            lambda log: log["runs"][0]["written"].__setitem__(3, log["runs"][0]["written"][1]),
            "does not write|was not done",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    contents: tuple[Path, Any], change: Any, words: str
) -> None:
    changed = copy.deepcopy(contents[1])
    change(changed)
    path = contents[0].parent / "changed.json"
    path.write_text(DOCUMENT.text(changed))
    with pytest.raises(PlanError, match=words) as error:
        ReplayLog.load(path)
    assert str(path) in str(error.value)


def test_damage_is_found_and_said(contents: tuple[Path, Any]) -> None:
    path = contents[0].parent / "damaged.json"
    whole = contents[0].read_bytes()
    for text, words in (
        (whole[:-30], "is cut off"),
        (whole.replace(b'"workers":2', b'"workers":3', 1), "digest"),
        (whole.replace(b'"version": 1', b'"version": 2', 1), "upgrade brickline"),
    ):
        path.write_bytes(text)
        with pytest.raises(PlanError, match=words):
            ReplayLog.load(path)
