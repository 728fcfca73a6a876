"""`brickline top` and `brickline report` against processes that really record."""

from __future__ import annotations

import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from brickline.abi import SlotKind
from brickline.commands.report import report
from brickline.commands.top import frames, top
from brickline.errors import BudgetError, NotARun, ProcessError, RunError, RunExists, UsageError
from brickline.profile import profile_from_run
from brickline.report.figures import Look
from brickline.runs import Run
from brickline.top.plain import render_frame
from brickline.top.snapshot import save_snapshot
from brickline.top.watched import WatchedProcess

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
    (norm,) = last.places(SlotKind.BRICK)
    assert last.rows[norm].name == "RmsNorm"
    assert last.now.sums["count"][norm] >= 100
    (rate,) = seen[1].figures([norm]).rate or ()
    assert rate > 0
    assert seen[0].tokens_per_s is None
    assert seen[1].tokens_per_s
    console = Console(file=StringIO(), width=100)
    console.print(render_frame(last, "watched", Look(), 100, 40))
    assert "this is its final state" in console.file.getvalue()  # type: ignore[attr-defined]


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


def in_terminal(
    code: str, recording: subprocess.Popen[str], terminal: str = "xterm-256color"
) -> tuple[bytes, int]:
    """Run code in a terminal until it shows a brick, then press Ctrl-C; what it showed, status."""
    ours, theirs = pty.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-c", code, str(recording.pid)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": terminal, "COLUMNS": "90", "LINES": "30"},
        start_new_session=True,
    )
    os.close(theirs)
    giving_up = threading.Timer(60, watching.kill)
    giving_up.start()
    shown = b""
    with suppress(OSError):  # reading a terminal that nobody holds any more
        while b"RmsNorm" not in shown:
            shown += os.read(ours, 65536)
        os.write(ours, b"\x03")
        watching.send_signal(signal.SIGINT)
        while more := os.read(ours, 65536):
            shown += more
    giving_up.cancel()
    os.close(ours)
    assert b"Traceback" not in shown
    return shown, watching.wait(10)


def test_ctrl_c_leaves_a_terminal_cleanly_and_the_process_running(tmp_path: Path):
    code = "from brickline.commands.top import top; import sys; top(int(sys.argv[1]), 0.2)"
    with recorder(str(tmp_path / "run")) as recording:
        _, status = in_terminal(code, recording)
        assert status == 0
        assert recording.poll() is None


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


def test_a_profiler_that_was_reset_is_followed_into_its_new_spool(tmp_path: Path):
    code = RECORDER.replace("time.sleep(0.001)", "line = sys.stdin.readline(); profiler.reset()")
    reset = subprocess.Popen(
        [sys.executable, "-c", code.replace("step == 100", "True"), str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reset.stdin is not None
        assert reset.stdout is not None
        reset.stdout.readline()
        with WatchedProcess(reset.pid) as watched:
            reset.stdin.write("\n" * 3)
            reset.stdin.flush()
            for _ in range(3):
                reset.stdout.readline()
            watched._look_around()
            assert len(watched.statistics()) == 1
    finally:
        reset.kill()
        reset.communicate()


def test_a_snapshot_is_a_run_of_its_own(tmp_path: Path):
    with recorder(str(tmp_path / "run")) as recording, WatchedProcess(recording.pid) as watched:
        saved = save_snapshot(watched, tmp_path / "kept" / "snapshot.brick")
        with pytest.raises(RunExists, match="exists; pass overwrite"):
            save_snapshot(watched, saved)
        assert sorted(os.listdir(saved.parent)) == ["snapshot.brick"]
        run = Run.open(saved)
        assert not run.is_live
        assert run.problems == []
        assert run.name == "watched"
        assert run.manifest["snapshot"]["process"] == recording.pid
        assert (saved / "tables" / "index.json").exists()
        profile = profile_from_run(run)
        norm = profile.brick("RmsNorm")
        assert norm is not None
        assert 0 <= norm.count - profile.steps["decode"].count <= 1
    result = CliRunner().invoke(app, ["report", str(saved)])
    assert result.exit_code == 0
    assert "RmsNorm" in result.stdout
    assert "1 part was not closed" in " ".join(result.stdout.split())


def test_a_snapshot_of_a_run_that_was_deleted_and_by_the_command(tmp_path: Path):
    with recorder(XDG_STATE_HOME=str(tmp_path)) as recording:
        with WatchedProcess(recording.pid) as watched:
            (spool,) = tmp_path.rglob("*.spool")
            shutil.rmtree(spool.parent.parent)
            saved = save_snapshot(watched, tmp_path / "kept.brick")
            assert Run.open(saved).name == f"process {recording.pid}"
        other = tmp_path / "other.brick"
        arguments = ["top", str(recording.pid), "--save", str(other)]
        # The spool has no name any more: only whoever watched already, or root, can open it.
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code == 0) == other.exists()


def test_a_snapshot_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "there").mkdir()
    with recorder(str(tmp_path / "run")) as recording, WatchedProcess(recording.pid) as watched:
        monkeypatch.setattr("brickline.top.snapshot.copy_file", full)
        with pytest.raises(RunError, match="free some space"):
            save_snapshot(watched, tmp_path / "there" / "a.brick")
    assert os.listdir(tmp_path / "there") == []


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_without_textual_or_on_a_dumb_terminal_there_is_text(tmp_path: Path, terminal: str):
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "textual" else find(name, *rest)
from brickline.commands.top import top
top(int(sys.argv[1]), 0.2)
"""
    with recorder(str(tmp_path / "run")) as recording:
        shown, status = in_terminal(code, recording, terminal)
    assert status == 0
    assert (b"pip install 'brickline[tui]'" in shown) == (terminal == "xterm")
    assert (b"\x1b" in shown) == (terminal == "xterm")


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
