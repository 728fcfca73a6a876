"""Replay on CPU: the same bits pass, and of others the first launch, byte and block are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import brickline as bl
from brickline.commands import app
from brickline.errors import PlanError, UsageError
from brickline.executor.megakernel import replay as replaying
from brickline.executor.megakernel.replay import replay
from brickline.executor.megakernel.replay_log import ReplayLog
from brickline.executor.megakernel.replay_recording import ReplayRecorder, record
from brickline.executor.megakernel.replay_result import ReplayStatus
from brickline.executor.prepared import PreparedPlan
from brickline.kernels.catalog import residual, silu_gate
from brickline.plan import Plan
from brickline.plan_launches import Launch

SIZE = 4096
EXECUTORS = ["serial", "parallel", "megakernel"]


def chain() -> Plan:
    """Five launches; scratch is overwritten twice, so that its first contents do not survive."""
    plan = Plan("chain")
    n = plan.variable("n", 1, SIZE, default=SIZE)
    gate, up, x, y, scratch = (
        plan.buffer(name, n, "f32") for name in ("gate", "up", "x", "y", "scratch")
    )
    plan.launch(silu_gate(), gate=gate, up=up, y=scratch, n=n, brick="Activation", layer=0)
    plan.launch(residual(), a=x, b=scratch, y=y, n=n, brick="Residual", layer=0)
    plan.launch(silu_gate(), gate=y, up=up, y=scratch, n=n, brick="Activation", layer=1)
    plan.launch(residual(), a=y, b=scratch, y=x, n=n, brick="Residual", layer=1)
    plan.launch(residual(), a=x, b=gate, y=scratch, n=n, brick="Last", layer=1)
    return plan


def filled(prepared: PreparedPlan, seed: int = 0) -> PreparedPlan:
    draw = np.random.default_rng(seed)
    for name in ("gate", "up", "x"):
        prepared.write(name, draw.standard_normal(SIZE, dtype=np.float32))
    return prepared


@pytest.fixture(scope="module")
def log() -> ReplayLog:
    return record(filled(chain().prepare("CPU")), n=3000)


class Faulty:
    """Runs launches in order, and changes one element of what some of them write."""

    def __init__(
        self, prepared: PreparedPlan, wrong: Sequence[int], element: int, first_run: int
    ) -> None:
        self._prepared, self._wrong, self._element = prepared, wrong, element
        self._sound_runs = first_run

    def run(self, stream: int) -> tuple[int, int, int]:
        launches = self._prepared.launches
        for launch in launches:
            self._prepared._core.run_serial(stream, launch.number, launch.number + 1)
            if launch.number in self._wrong and self._sound_runs <= 0:
                (buffer,) = [each for param, each in launch.buffers() if param.access.writes]
                whole = self._prepared.buffers[buffer.name].numpy()
                whole[self._element] += 1.0
        self._sound_runs -= 1
        return len(launches), 0, -1


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make every executor but the serial one wrong in some launches."""

    def break_it(*wrong: int, element: int = 1500, first_run: int = 0) -> None:
        sound = replaying.prepare

        def prepared(plan: Any, device: Any, executor: str, **options: Any) -> PreparedPlan:
            made = sound(plan, device, "serial", **options)
            if executor != "serial":
                made._run = Faulty(made, wrong, element, first_run)
            return made

        monkeypatch.setattr(replaying, "prepare", prepared)

    return break_it


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("recorded", EXECUTORS)
def test_every_executor_gives_the_recorded_bits(executor: str, recorded: str) -> None:
    options = {"trace": True} if recorded == "megakernel" else {}
    made = record(filled(chain().prepare("CPU", recorded, **options)), n=3000)
    assert made.executor == recorded
    found = replay(made, "CPU", executor)
    assert found, str(found)
    assert found.status is ReplayStatus.SAME
    assert found.exit_status == 0
    assert found.compared > 0
    assert f"recorded on CPU, {recorded}, replayed on CPU, {executor}: the same bits" in str(found)


def test_what_is_overwritten_is_compared_where_it_can_be(log: ReplayLog) -> None:
    serial, parallel = replay(log), replay(log, executor="parallel")
    assert serial.compared == serial.pieces == 20
    assert (parallel.compared, parallel.pieces) == (12, 20)
    assert "8 more are overwritten later" in str(parallel)
    whole = record(filled(chain().prepare("CPU", "parallel")))
    assert [len(each) for each in whole.runs[0].written] == [0, 1, 0, 1, 1]
    assert replay(whole).compared == 12


def test_the_first_wrong_launch_byte_and_block(log: ReplayLog, faulty: Any) -> None:
    faulty(1)
    found = replay(log, executor="parallel")
    assert not found
    assert found.exit_status == 1
    difference = found.difference
    assert difference is not None
    assert (difference.task, difference.launch) == (1, "launch 1 (residual, layer 0)")
    assert (difference.buffer, difference.begin, difference.element) == ("y", 6000, 1500)
    assert difference.is_exact
    assert difference.block == (1, 0, 0)
    assert difference.recorded is not None
    assert difference.replayed is not None
    assert float(difference.replayed) == pytest.approx(float(difference.recorded) + 1, rel=1e-5)
    text = str(found)
    assert "differs first at launch 1 (residual, layer 0), brick Residual" in text
    assert "element 1500 of f32, byte 6000" in text
    assert "block (1, 0, 0) writes it" in text


@pytest.mark.parametrize("wrong", [(0,), (0, 3), (2,), (2, 4), (4,), (3,)])
def test_a_launch_whose_output_is_overwritten_is_found_too(
    log: ReplayLog, faulty: Any, wrong: tuple[int, ...]
) -> None:
    faulty(*wrong)
    difference = replay(log, executor="megakernel").difference
    assert difference is not None
    assert difference.task == wrong[0]
    assert difference.is_exact
    assert difference.element == 1500


def test_a_log_that_nobody_meets_says_which_piece(log: ReplayLog, tmp_path: Path) -> None:
    run = log.runs[0]
    (entry,) = run.written[3]
    turned = entry.digests[:16] + ("0" if entry.digests[16] != "0" else "1") + entry.digests[17:]
    written = (*run.written[:3], (replace(entry, digests=turned),), run.written[4])
    path = replace(log, runs=(replace(run, written=written),)).save(tmp_path / "log.json")
    for executor in ("serial", "parallel"):
        found = replay(ReplayLog.load(path), executor=executor)
        difference = found.difference
        assert difference is not None
        assert (difference.task, difference.is_exact) == (3, False)
        assert (difference.begin, difference.end) == (4096, 8192)
        assert difference.block == (1, 0, 0)
        assert "does not give the recorded bits either" in str(found)


def test_several_runs_with_memory_that_changes_in_between() -> None:
    prepared = filled(chain().prepare("CPU"))
    recorder = ReplayRecorder(prepared)
    with recorder.recording():
        prepared(n=7)
        prepared(n=SIZE)
        prepared.write("gate", np.ones(SIZE, np.float32))
        prepared(n=100)
    made = recorder.log()
    assert [sorted(run.memory) for run in made.runs] == [
        ["gate", "scratch", "up", "x", "y"],
        [],
        ["gate"],
    ]
    assert [dict(run.values)["n"] for run in made.runs] == [7, SIZE, 100]
    for executor in ("serial", "parallel"):
        found = replay(made, executor=executor)
        assert found, str(found)
        assert "15 launches over 3 runs" in str(found)


def test_a_difference_in_a_later_run_names_the_run(faulty: Any) -> None:
    prepared = filled(chain().prepare("CPU"))
    recorder = ReplayRecorder(prepared)
    with recorder.recording():
        prepared(n=7)
        prepared(n=SIZE)
    faulty(3, first_run=1)
    found = replay(recorder.log(), executor="parallel")
    assert found.difference is not None
    assert (found.difference.run, found.difference.task) == (1, 3)
    assert found.difference.element == 1500
    assert "differs first in run 1 at launch 3" in str(found)


def test_the_recorded_order_is_run_again(log: ReplayLog, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("free")
    x = plan.buffer("x", 64, "f32")
    for name in "abc":
        plan.launch(residual(), a=x, b=x, y=plan.buffer(name, 64, "f32"), n=64)
    made = record(plan.prepare("CPU"))
    made = replace(made, runs=(replace(made.runs[0], order=(2, 0, 1)),))
    ran: list[int] = []
    step = replaying.stepped

    def noted(prepared: PreparedPlan, launch: Launch, stream: int) -> tuple[int, int, int]:
        ran.append(launch.number)
        return step(prepared, launch, stream)

    monkeypatch.setattr(replaying, "stepped", noted)
    assert replay(made)
    assert ran == [2, 0, 1]


def test_a_parallel_run_tells_in_which_order_it_began() -> None:
    made = record(filled(chain().prepare("CPU", "parallel")))
    assert made.runs[0].order == (0, 1, 2, 3, 4)
    assert record(filled(chain().prepare("CPU", "megakernel"))).runs[0].order is None  # not traced


def test_without_digests_nothing_is_compared() -> None:
    made = record(filled(chain().prepare("CPU")), digests=False)
    found = replay(made)
    assert not found
    assert (found.status, found.exit_status) == (ReplayStatus.INCONCLUSIVE, 3)
    assert "nothing was compared" in str(found)


def test_contents_that_are_not_kept_must_be_given_and_be_the_same() -> None:
    prepared = filled(chain().prepare("CPU"))
    arrays = {name: prepared.read(name) for name in ("gate", "up", "x")}
    made = record(prepared, contents=False)
    with pytest.raises(PlanError, match=r"does not hold the 16384 bytes of gate; give them"):
        replay(made)
    assert replay(made, bind=arrays)
    with pytest.raises(PlanError, match="up is not what it was when the log was recorded"):
        replay(made, bind={**arrays, "up": arrays["gate"]})
    with pytest.raises(PlanError, match="no buffer 'w'"):
        replay(made, bind={"w": arrays["x"]})


def test_what_cannot_be_logged_is_refused() -> None:
    with pytest.raises(PlanError, match="memory of NULL has no contents"):
        record(chain().prepare("NULL"))
    with pytest.raises(PlanError, match="memory of NULL has no contents"):
        replay(record(filled(chain().prepare("CPU"))), "NULL")
    prepared = chain().prepare("CPU")
    with bl.BrickProfiler("p", enabled=True) as profiler:
        prepared.watch(profiler)
        with pytest.raises(PlanError, match="is watched by a profiler"):
            record(prepared)
    prepared.watch(None)
    assert record(prepared).runs
    plan = chain()
    grown = plan.prepare("CPU")
    x = plan.buffer("more", 4, "f32")
    plan.launch(residual(), a=x, b=x, y=plan.buffer("other", 4, "f32"), n=4)
    with pytest.raises(PlanError, match="has grown since"):
        record(grown)


def test_a_run_that_is_refused_leaves_the_log_and_the_plan_alone() -> None:
    prepared = filled(chain().prepare("CPU"))
    recorder = ReplayRecorder(prepared)
    with recorder.recording(), pytest.raises(bl.BricklineError):
        prepared(n=SIZE + 1)
    assert recorder.log().runs == ()
    prepared(n=5)
    assert recorder.log().runs == ()


# ---------------------------------------------------------------------------------------- commands


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    chain().save(tmp_path / "chain.plan")
    return tmp_path / "chain.plan"


def test_the_commands_log_and_replay(plan_file: Path) -> None:
    target = plan_file.parent / "chain.replay.json"
    ran = run("run", plan_file, "--random", 1, "--set", "n=2000", "--log", target, "--repeat", 2)
    assert ran.exit_code == 0, ran.output
    assert f"Logged {target}" in ran.output
    for executor in EXECUTORS:
        again = run("replay", target, "--executor", executor)
        assert again.exit_code == 0, again.output
        assert "the same bits, 10 launches over 2 runs" in again.output
    unknown = run("replay", target, "--executor", "foo")
    assert isinstance(unknown.exception, PlanError)
    assert "serial, parallel, graph, megakernel, queue, got 'foo'" in str(unknown.exception)
    taken = run("run", plan_file, "--log", target)
    assert isinstance(taken.exception, UsageError)
    assert run("run", plan_file, "--log", target, "--force").exit_code == 0


def test_the_commands_say_what_differs(plan_file: Path, faulty: Any) -> None:
    target = plan_file.parent / "chain.replay.json"
    assert run("run", plan_file, "--random", 1, "--log", target).exit_code == 0
    faulty(2)
    found = run("replay", target, "--executor", "megakernel")
    assert found.exit_code == 1
    assert "differs first at launch 2 (silu_gate, layer 1)" in found.output


@pytest.mark.parametrize("other", [["--checked"], ["--save", "x.brick"]])
def test_options_that_do_not_go_together(plan_file: Path, other: list[str]) -> None:
    refused = run("run", plan_file, "--log", plan_file.parent / "l.json", *other)
    assert isinstance(refused.exception, UsageError)
    assert "got both" in str(refused.exception)
    alone = run("run", plan_file, "--contents")
    assert isinstance(alone.exception, UsageError)


def test_a_replay_of_something_else_is_refused(plan_file: Path) -> None:
    refused = run("replay", plan_file)
    assert isinstance(refused.exception, PlanError)
    assert "something else than a replay log" in str(refused.exception)
