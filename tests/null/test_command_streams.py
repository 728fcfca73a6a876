"""What commands write: exact documents in a pipe, nothing that a terminal obeys, whole files."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brickline import BrickProfiler
from brickline.commands.streams import harmless
from brickline.errors import RunError, UsageError
from brickline.report.html.page import write_page
from brickline.whole_files import whole_file

NAME = "\x1b[31mred\x1b]0;title\x07\x9b5m\u202e"
FORMS = [
    ["report", "--csv"],
    ["report", "--json"],
    ["export", "--to", "csv"],
    ["export", "--to", "prometheus"],
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "escapes.brick"
    with (
        BrickProfiler(NAME, enabled=True, device="NULL", path=path) as profiler,
        profiler.step(tokens=1, phase="decode"),
        profiler.brick(NAME),
    ):
        profiler.advance(1000)
    return path


def started(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "brickline", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]


def in_a_terminal(*arguments: object) -> bytes:
    """What a terminal gets, standard error included."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "brickline", *map(str, arguments)], stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    process.wait(60)
    return shown


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_a_terminal_gets_no_escape_of_a_run(run: Path, form: list[str]) -> None:
    shown = in_a_terminal(form[0], run, *form[1:]).decode()
    assert "u001b[31mred" in shown
    assert not [each for each in shown if not each.isprintable() and each not in "\r\n"]


def test_an_error_brings_no_escape(tmp_path: Path) -> None:
    shown = in_a_terminal("report", tmp_path / NAME).decode()
    assert "u001b[31mred" in shown
    assert "\x1b" not in shown


def test_a_pipe_gets_the_document_as_it_is(run: Path) -> None:
    process = started("report", run, "--csv", stdout=subprocess.PIPE)
    assert NAME in process.communicate(timeout=60)[0].decode()


def test_harmless_text_stays_json() -> None:
    assert harmless('"a\x9b\U000e0001"\n') == '"a\\u009b\\udb40\\udc01"\n'
    assert harmless("é漢\n") == "é漢\n"


def test_a_reader_that_leaves_is_no_failure(run: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = started("report", run, "--csv", stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


def test_output_that_finds_no_room_is_said(run: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "wb") as full:
        process = started("report", run, stdout=full)
        said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 2
    assert said.startswith("brickline: cannot write the output: No space left")
    assert len(said.splitlines()) == 1


INTERRUPTED = """
import os, runpy, signal, sys

class Interrupting:
    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting(sys.argv.pop(1)))
runpy.run_module("brickline", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["typer", "brickline.commands.report", "rich.console"])
def test_ctrl_c_while_loading_says_nothing(run: Path, module: str) -> None:
    """The program interrupts itself where it first looks for `module`."""
    command = [sys.executable, "-c", INTERRUPTED, module, "report", str(run)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGINT
    assert done.stdout + done.stderr == b""


def test_ctrl_c_ends_a_long_question(run: Path) -> None:
    pytest.importorskip("duckdb", reason="duckdb is not installed")
    sql = "SELECT count(*) FROM range(1000000000000) a, range(1000000) b"
    process = started("query", run, sql, stdout=subprocess.DEVNULL)
    try:
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.communicate(timeout=30)[1]
    finally:
        process.kill()  # it would ask for days
    assert process.returncode in (130, -signal.SIGINT)


def test_a_link_stays_a_link_and_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(real)
    for text in (b"one", b"two"):
        with whole_file(link, force=True) as file:
            file.write(text)
    assert link.is_symlink()
    assert real.read_bytes() == b"two"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="a device or a pipe"):
        write_page("text", pipe, force=True)
    assert pipe.is_fifo()


def test_an_interrupted_file_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        with whole_file(tmp_path / "a", force=False) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not list(tmp_path.iterdir())


def test_names_as_long_as_a_disk_takes_them(tmp_path: Path) -> None:
    assert write_page("text", tmp_path / ("a" * 250)).read_text() == "text"
    with pytest.raises(RunError, match="too long"):
        write_page("text", tmp_path / ("a" * 300))


def test_a_link_to_itself_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "loop.brick").symlink_to("loop.brick")
    shown = in_a_terminal("report", tmp_path / "loop.brick").decode()
    assert "symbolic links" in shown
    assert "Traceback" not in shown
