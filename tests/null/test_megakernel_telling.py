"""A profiler that is told of a megakernel's run: tiles for parts of tasks, traces for tasks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hand_made_megakernels import decoder_report

from brickline import BrickProfiler, Run, TileLevel
from brickline.errors import UsageError
from brickline.executor.megakernel.telling import tell_profiler
from brickline.profile import profile_from_run


def test_parts_are_tiles_and_tasks_are_traces(tmp_path: Path) -> None:
    report = decoder_report(began_unix_ns=time.time_ns() - 1_000_000)
    with BrickProfiler("mega", enabled=True, path=tmp_path / "mega.brick") as profiler:
        assert tell_profiler(report, profiler, position=3) == (26, 8)
        now = profiler._now_ns()
    (tiles,) = profile_from_run(Run.open(tmp_path / "mega.brick")).tiles
    assert tiles.level == TileLevel.MACRO
    assert (tiles.count, tiles.total_ns) == (26, 21_000)
    assert {cell.row for cell in tiles.cells} == set(range(4))
    assert {cell.column for cell in tiles.cells} == set(range(8))
    traces = profiler.kernel_traces()
    assert [trace.kernel_name for trace in traces] == list(report.ops) * 2
    assert [trace.layer_idx for trace in traces] == [0] * 4 + [1] * 4
    assert {trace.position for trace in traces} == {3}
    assert traces[1].time_us == pytest.approx(1.0)
    said = json.loads(traces[1].params)
    assert said == {
        **{"level": "launch", "task": 1, "region": 0, "items": 8},
        **{"work_ns": 4000, "wait_ns": 1440},
    }
    # Where they lie in time: a ms before, on the run's own clock.
    (part,) = Run.open(tmp_path / "mega.brick").parts
    first = int(part.traces["start_ns"][0])
    assert now - 10_000_000_000 < first < now


def test_who_is_disabled_hears_nothing_and_an_untraced_run_says_so() -> None:
    profiler = BrickProfiler("mega")
    assert tell_profiler(decoder_report(), profiler) == (0, 0)
    with pytest.raises(UsageError, match="trace=True"):
        tell_profiler(decoder_report(records=None), profiler)
