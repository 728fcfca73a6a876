"""Text that no UTF-8 can hold: refused where somebody names a thing, replaced where it is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brickline import BrickProfiler, Run
from brickline.errors import RunError, UsageError

HALF = "a\ud800b"
NAMED: dict[str, Callable[[BrickProfiler], Any]] = {
    "brick": lambda profiler: profiler.brick(HALF),
    "start": lambda profiler: profiler.start(HALF),
    "record_elapsed": lambda profiler: profiler.record_elapsed(HALF, 5),
    "phase": lambda profiler: profiler.step(tokens=1, phase=HALF).__enter__(),
    "trace": lambda profiler: profiler.trace(HALF),
    "graph": lambda profiler: profiler.graph.add_function(HALF),
}
RECORDED = """
import sys
from brickline import BrickProfiler
with BrickProfiler("a", enabled=True, device="NULL", path=sys.argv[1]) as profiler:
    with profiler.step(tokens=1), profiler.brick("a"):
        profiler.advance(10)
"""


@pytest.mark.parametrize("name", NAMED)
def test_a_name_is_refused_where_it_is_given(name: str) -> None:
    with (
        BrickProfiler("a", enabled=True, device="NULL") as profiler,
        pytest.raises(UsageError, match=r"valid Unicode, got 'a\\ud800b'"),
    ):
        NAMED[name](profiler)


@pytest.mark.parametrize("enabled", [False, True])
def test_so_is_the_name_of_a_run(enabled: bool) -> None:
    with pytest.raises(UsageError, match=r"valid Unicode, got 'a\\ud800b'"):
        BrickProfiler(HALF, enabled=enabled, device="NULL")


@pytest.mark.parametrize("place", ["\ud800.brick", os.fsdecode(b"\xff.brick")])
def test_so_is_a_path(tmp_path: Path, place: str) -> None:
    with pytest.raises(RunError, match="valid UTF-8"):
        BrickProfiler("a", enabled=True, device="NULL", path=tmp_path / place)
    with pytest.raises(RunError, match="valid UTF-8"):
        Run.open(tmp_path / place)
    assert not list(tmp_path.iterdir())


def test_a_command_line_in_another_encoding_leaves_the_run_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.brick"
    subprocess.run([sys.executable, "-c", RECORDED, path, b"\xff.txt"], check=True, timeout=60)
    assert Run.open(path).circumstances["argv"][-1] == "?.txt"
    report = [sys.executable, "-m", "brickline", "report", path]
    assert subprocess.run(report, capture_output=True, timeout=60).stderr == b""
