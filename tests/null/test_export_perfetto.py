"""Perfetto traces, read back with Perfetto's own classes and held to the run."""

from __future__ import annotations

import io
from pathlib import Path

import export_runs
import profile_runs
import pytest

from brickline import BrickProfiler
from brickline.abi import SlotKind
from brickline.export.perfetto import Drawn, write_perfetto
from brickline.export.spans import clock_shifts
from brickline.profile import profile_from_run
from brickline.runs import Run

pytest.importorskip("perfetto", reason="perfetto is not installed")


def exported(path: Path) -> tuple[export_runs.ReadTrace, Drawn]:
    file = io.BytesIO()
    drawn = write_perfetto(Run.open(path), file)
    return export_runs.read_trace(file.getvalue()), drawn


def test_every_entry_of_the_timeline_is_a_slice_of_its_thread(tmp_path: Path) -> None:
    run = profile_runs.rich_run(tmp_path / "rich.brick", steps=5, layers=3)
    trace, drawn = exported(run)
    profile = profile_from_run(Run.open(run))
    threads = [track for track in trace.tracks.values() if track.tid]
    assert {track.tid for track in threads} == {lane.thread for lane in profile.lanes}
    found = sorted((start, end) for track in threads for start, end, _, _ in track.slices)
    assert found == sorted((span.start_ns, span.end_ns) for span in profile.timeline)
    assert drawn.overlapping == 0
    bricks = {(s.start_ns, s.name, s.layer) for s in profile.timeline if s.layer is not None}
    shown = {
        (start, name, said["layer"])
        for track in threads
        for start, _, name, said in track.slices
        if "layer" in said
    }
    assert shown == bricks


def test_steps_are_called_by_their_phase_and_hold_their_bricks(tmp_path: Path) -> None:
    trace, _ = exported(profile_runs.rich_run(tmp_path / "rich.brick", steps=3, layers=2))
    slices = [each for track in trace.tracks.values() if track.tid for each in track.slices]
    steps = [each for each in slices if each[2] in ("prefill", "decode")]
    assert [name for _, _, name, _ in sorted(steps)] == ["prefill", "decode", "decode", "decode"]
    assert [said["step"] for _, _, _, said in sorted(steps)] == [1, 2, 3, 4]


def test_layers_have_tracks_with_a_slice_per_pass(tmp_path: Path) -> None:
    trace, _ = exported(export_runs.launched_run(tmp_path / "run.brick", steps=3))
    host = [track for track in trace.tracks.values() if track.name == "layer 1"]
    above = {trace.above(track).name for track in host}
    assert above == {"layers of the host", "layers of CUDA:0"}
    for track in host:
        assert len(track.slices) == 3
        assert [said["step"] for *_, said in track.slices] == [1, 2, 3]
        assert {trace.above(trace.above(track)).name} == {"launches"}


def test_a_run_without_a_timeline_shows_each_brick_from_first_to_last(tmp_path: Path) -> None:
    path = tmp_path / "run.brick"
    with BrickProfiler("brief", enabled=True, device="NULL", path=path) as profiler:
        for _ in range(3):
            with profiler.step(tokens=1, phase="decode"):
                for name, took in (("RmsNorm", 4_000), ("LmHead", 9_000)):
                    with profiler.brick(name, layer=1):
                        profiler.advance(took)
    trace, drawn = exported(path)
    (thread,) = [track for track in trace.tracks.values() if track.tid]
    above = [track for track in trace.tracks.values() if track is not thread]
    slices = {each[2]: each for track in (thread, *above) for each in track.slices}
    assert slices["decode"][0] == slices["RmsNorm"][0]
    assert slices["decode"][1] == slices["LmHead"][1]
    assert slices["LmHead"][1] - slices["RmsNorm"][0] == 39_000
    assert slices["RmsNorm"][3] == {"layer": 1, "elements": 3, "entries": 3, "total_ns": 12_000}
    assert (drawn.slices, drawn.summaries, drawn.overlapping) == (3, 3, 1)
    assert not [track for track in above if "layer" in track.name]


def test_a_brick_that_launches_show_is_not_summed_up(tmp_path: Path) -> None:
    path = tmp_path / "run.brick"
    with BrickProfiler("brief", enabled=True, device="NULL", path=path) as profiler:
        shown = profiler.brick("Shown")
        for name in ("Shown", "Alone"):
            with profiler.step(tokens=1), profiler.brick(name):
                profiler.advance(1_000)
        number, times = profiler.traces.reserve(), {"enqueue_ns": 0, "start_ns": 0, "end_ns": 1_000}
        profiler.traces.write(number, name="Shown", slot=shown.slot, **times)
    trace, drawn = exported(path)
    names = [each[2] for track in trace.tracks.values() for each in track.slices]
    assert sorted(names) == ["Alone", "Shown"]
    assert drawn.summaries == 1


def test_flows_lead_from_the_launch_to_the_kernel(tmp_path: Path) -> None:
    trace, drawn = exported(export_runs.launched_run(tmp_path / "run.brick", steps=3))
    stream = trace.track(f"stream {export_runs.STREAM:#x}")
    assert trace.above(stream).name == "CUDA:0"
    assert [name for _, _, name, _ in stream.slices] == ["rms_0", "rms_1"] * 3
    (thread,) = [track for track in trace.tracks.values() if track.tid]
    assert drawn.flows == len(stream.flows_to) == 6
    assert thread.flows_from.keys() == stream.flows_to.keys()
    for flow, began in stream.flows_to.items():
        assert began - thread.flows_from[flow] == 30_000
    assert not thread.flows_to
    assert not stream.flows_from


def test_what_overlaps_gets_a_further_track(tmp_path: Path) -> None:
    trace, drawn = exported(export_runs.overlapping_run(tmp_path / "run.brick"))
    (thread,) = [track for track in trace.tracks.values() if track.tid]
    further = trace.track(f"{thread.name} (further 1)")
    assert trace.above(further) is thread
    slices = sorted(each[:3] for track in (thread, further) for each in track.slices)
    ends = [(0, 100), (10, 20), (50, 150), (60, 70), (120, 120), (120, 130)]
    assert slices == [(start, end, f"{start}-{end}") for start, end in ends]
    assert thread.instants == [(40, "point")]
    assert (drawn.slices, drawn.instants, drawn.untimed) == (6, 1, 1)
    assert drawn.overlapping == len(further.slices)


def test_the_clock_maps_to_unix_time(tmp_path: Path) -> None:
    run = export_runs.launched_run(tmp_path / "run.brick")
    trace, _ = exported(run)
    header = Run.open(run).parts[0].header
    assert trace.primary_clock == 3
    assert trace.clocks == {3: header["anchor_ns"], 1: header["anchor_unix_ns"]}


class PartOnAClock:
    def __init__(self, name: str, anchor_ns: int, anchor_unix_ns: int) -> None:
        self.name = name
        self.header = {"anchor_ns": anchor_ns, "anchor_unix_ns": anchor_unix_ns}


def test_parts_of_one_machine_share_a_clock_and_others_are_moved() -> None:
    hour = 3600 * 10**9
    parts = [
        PartOnAClock("late", 10, 5 * hour),
        PartOnAClock("same", 20, 5 * hour + 15),
        PartOnAClock("early", 30, 2 * hour),
    ]
    shifts, unix_minus_clock = clock_shifts(parts)  # type: ignore[arg-type]
    assert unix_minus_clock == 2 * hour - 30
    assert shifts["early"] == 0
    assert shifts["late"] == shifts["same"] == 3 * hour + 20


def test_names_come_through_as_text(tmp_path: Path) -> None:
    trace, _ = exported(profile_runs.hostile_run(tmp_path / "run.brick"))
    names = {name for track in trace.tracks.values() for _, _, name, _ in track.slices}
    assert {name.replace("\x00", "\ufffd") for name in profile_runs.HOSTILE} <= names


def test_an_empty_run_is_a_trace_without_events(tmp_path: Path) -> None:
    trace, drawn = exported(profile_runs.empty_run(tmp_path / "run.brick"))
    assert drawn.slices == drawn.instants == 0
    assert [track.name for track in trace.tracks.values()] == ["nothing"]


def test_a_live_run_is_shown_as_it_is_now(tmp_path: Path) -> None:
    profiler = BrickProfiler(
        "live", enabled=True, device="NULL", path=tmp_path / "run.brick", timeline_steps=4
    )
    with profiler, profiler.step(tokens=1):
        with profiler.brick("LmHead"):
            profiler.advance(1_000)
        trace, _ = exported(tmp_path / "run.brick")
    slices = [each[:3] for track in trace.tracks.values() for each in track.slices]
    assert slices == [(0, 1_000, "LmHead")]


def test_ids_of_two_runs_differ_and_of_one_run_stay(tmp_path: Path) -> None:
    runs = [export_runs.launched_run(tmp_path / name) for name in ("a.brick", "b.brick")]
    (first, _), (second, _), (again, _) = map(exported, (*runs, runs[0]))
    assert first.tracks.keys() == again.tracks.keys()
    assert not first.tracks.keys() & second.tracks.keys()


def test_the_spools_kinds_are_those_that_are_known() -> None:
    assert {kind.name for kind in SlotKind} == {"BRICK", "STEP", "TILE"}
