"""`brickline top` and `brickline report` against processes that really record."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from brickline.commands.report import report
from brickline.commands.top import Frame, frames, render_frame, top
from brickline.commands.watched import WatchedProcess
from brickline.errors import BudgetError, NotARun, ProcessError, UsageError
from brickline.profile import Profile
from brickline.report.figures import Look

RECORDER = """
import sys, time
import brickline as bl
profiler = bl.BrickProfiler("watched", enabled=True, path=sys.argv[1] or None)
norm = profiler.brick(bl.BrickId.RMS_NORM, layer=0)
for step in range(10**9):
    with profiler.step(tokens=2, phase="decode"), norm:
        pass
    if step == 100:
        print("ready", flush=True)
    time.sleep(0.001)
"""

app = typer.Typer()
app.command()(report)
app.command()(top)


@contextmanager
def recorder(path: str = "", **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RECORDER, path],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_live_process_is_watched_until_it_is_killed(tmp_path: Path):
    with recorder(str(tmp_path / "run")) as recording, WatchedProcess(recording.pid) as watched:
        seen = []
        for frame in frames(watched, 0.2):
            seen.append(frame)
            if len(seen) == 3:
                recording.kill()
    last = seen[-1]
    assert [frame.ended for frame in seen] == [False] * (len(seen) - 1) + [True]
    norm = last.profile.brick("RmsNorm")
    assert norm is not None
    assert norm.count >= 100
    assert seen[1].rate(norm) > 0
    assert seen[1].tokens_per_s > 0
    text = str(render_frame(last, recording.pid, Look(), 100, 40))
    assert text


def test_a_temporary_run_is_readable_after_its_process_has_removed_it(tmp_path: Path):
    home = {"XDG_STATE_HOME": str(tmp_path)}
    with recorder(**home) as recording, WatchedProcess(recording.pid) as watched:
        spools = list(tmp_path.rglob("*.spool"))
        assert len(spools) == 1
        spools[0].unlink()
        recording.kill()
        recording.wait()
        assert watched.wait(5.0)
        (part,) = watched.parts()
    assert part.process == recording.pid


def test_once_prints_one_snapshot_and_plain_output_has_no_escape_codes(tmp_path: Path):
    with recorder(str(tmp_path / "run")) as recording:
        result = CliRunner().invoke(app, ["top", str(recording.pid), "--once"])
    assert result.exit_code == 0
    assert "RmsNorm" in result.stdout
    assert "\x1b" not in result.stdout


def test_ctrl_c_leaves_a_terminal_cleanly_and_the_process_running(tmp_path: Path):
    code = "from brickline.commands.top import top; import sys; top(int(sys.argv[1]), 0.2)"
    with recorder(str(tmp_path / "run")) as recording:
        ours, theirs = pty.openpty()
        watching = subprocess.Popen(
            [sys.executable, "-c", code, str(recording.pid)],
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "90", "LINES": "30"},
            # A suite that runs in the background inherits a Ctrl-C that is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        giving_up = threading.Timer(60, watching.kill)
        giving_up.start()
        shown = b""
        with suppress(OSError):  # reading a terminal that nobody holds any more
            while b"RmsNorm" not in shown:
                shown += os.read(ours, 65536)
            watching.send_signal(signal.SIGINT)
            while more := os.read(ours, 65536):
                shown += more
        giving_up.cancel()
        os.close(ours)
        assert watching.wait(10) == 0
        assert recording.poll() is None
    assert b"Traceback" not in shown


def test_a_process_that_is_gone():
    finished = subprocess.Popen([sys.executable, "-c", ""])
    finished.wait()
    with pytest.raises(ProcessError, match="found none with id"):
        WatchedProcess(finished.pid)


def test_a_process_that_has_ended_and_was_not_waited_for():
    finished = subprocess.Popen([sys.executable, "-c", ""])
    try:
        for _ in range(500):
            state = Path(f"/proc/{finished.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                break
            time.sleep(0.01)
        with pytest.raises(ProcessError, match="found none with id"):
            WatchedProcess(finished.pid)
    finally:
        finished.wait()


def test_a_process_that_records_nothing():
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(ProcessError, match="records no bricks; enable"):
            WatchedProcess(idle.pid)
    finally:
        idle.kill()
        idle.wait()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every process")
def test_a_process_that_is_not_ours():
    with pytest.raises(ProcessError, match="belongs to another user or is protected"):
        WatchedProcess(1)


def test_rates_never_fall_below_zero():
    frame = Frame(Profile("now"), seconds=1.0, before=Profile("before"))
    assert frame.tokens_per_s == 0.0


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from brickline import BrickProfiler

    path = tmp_path_factory.mktemp("runs") / "run"
    with BrickProfiler("finished", enabled=True, device="NULL", path=path) as profiler:
        for _ in range(4):
            with profiler.step(tokens=1, phase="decode"), profiler.brick("RmsNorm", layer=0):
                profiler.advance(2000)
    return path


def test_report_prints_a_table(finished_run: Path):
    result = CliRunner().invoke(app, ["report", str(finished_run), "--validate"])
    assert result.exit_code == 0, result.output
    assert "finished · 4 steps, 4 tokens · 2.00 µs per token (decode)" in result.stdout
    assert "coverage" in result.stdout


@pytest.mark.parametrize(("limit", "status"), [(1.0, 1), (3.0, 0)])
def test_an_exceeded_budget_is_named_and_exits_1(
    finished_run: Path, tmp_path: Path, limit: float, status: int
):
    budget = tmp_path / "budget.toml"
    budget.write_text(f"[bricks]\nRmsNorm = {limit}\n")
    result = CliRunner().invoke(app, ["report", str(finished_run), "--budget", str(budget)])
    assert result.exit_code == status
    assert ("FAILED   bricks.RmsNorm.avg: 2.00 µs exceeds" in result.stdout) == bool(status)


def test_report_as_json_and_csv(finished_run: Path):
    result = CliRunner().invoke(app, ["report", str(finished_run), "--json"])
    assert json.loads(result.stdout)["bricks"][0]["avg_us"] == 2.0
    result = CliRunner().invoke(app, ["report", str(finished_run), "--csv"])
    assert result.stdout.startswith("table,name,")


def test_reports_of_what_is_not_there_are_refused(finished_run: Path, tmp_path: Path):
    refusals = {
        NotARun: [str(tmp_path / "nothing")],
        BudgetError: [str(finished_run), "--budget", str(tmp_path / "nothing.toml")],
        UsageError: [str(finished_run), "--json", "--csv"],
    }
    for error, arguments in refusals.items():
        result = CliRunner().invoke(app, ["report", *arguments])
        assert isinstance(result.exception, error)
