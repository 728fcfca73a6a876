"""Runs for the exports: launches on streams, overlapping work, and a Perfetto trace read back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brickline import BrickProfiler
from brickline.abi import ClockDomain

STREAM = 0x7F10


def launched_run(path: Path, *, steps: int = 3) -> Path:
    """Every step has two bricks with a kernel each, which the device runs 30 us later."""
    with BrickProfiler(
        "launches", enabled=True, device="NULL", path=path, timeline_steps=steps
    ) as profiler:
        for step in range(steps):
            with profiler.step(tokens=1, phase="decode"):
                for layer in range(2):
                    with profiler.brick("RmsNorm", layer=layer, elements=64):
                        profiler.advance(4_000)
                        _launch(profiler, f"rms_{layer}", layer, step)
                        profiler.advance(6_000)
    return path


def _launch(profiler: BrickProfiler, name: str, layer: int, step: int) -> None:
    now = profiler.elapsed_ns()
    profiler.traces.write(
        profiler.traces.reserve(),
        name=name,
        enqueue_ns=now,
        start_ns=now + 30_000,
        end_ns=now + 37_000,
        layer=layer,
        position=step,
        device=0,
        stream=STREAM,
        clock_domain=ClockDomain.CUDA,
        backend="CUDA:0",
    )


def overlapping_run(path: Path) -> Path:
    """Launches of one thread that end after others they began in, and some without times."""
    with BrickProfiler("overlaps", enabled=True, device="NULL", path=path) as profiler:
        for start, end in ((0, 100), (10, 20), (50, 150), (60, 70), (120, 130), (120, 120)):
            profiler.traces.write(
                profiler.traces.reserve(),
                name=f"{start}-{end}",
                enqueue_ns=start,
                start_ns=start,
                end_ns=end,
            )
        write = profiler.traces.write
        write(profiler.traces.reserve(), name="point", enqueue_ns=40, start_ns=-1, end_ns=-1)
        write(profiler.traces.reserve(), name="never", enqueue_ns=-1, start_ns=-1, end_ns=-1)
    return path


@dataclass
class ReadTrack:
    """One track of a trace as a viewer shows it."""

    name: str
    parent: int
    pid: int = 0
    tid: int = 0
    slices: list[tuple[int, int, str, dict[str, int]]] = field(default_factory=list)
    """Start, end, name and annotations."""
    instants: list[tuple[int, str]] = field(default_factory=list)
    flows_from: dict[int, int] = field(default_factory=dict)
    """Time by flow."""
    flows_to: dict[int, int] = field(default_factory=dict)


@dataclass
class ReadTrace:
    """A Perfetto trace decoded by Perfetto's own classes, and its sequences followed."""

    tracks: dict[int, ReadTrack] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    primary_clock: int = 0

    def track(self, name: str) -> ReadTrack:
        (found,) = [each for each in self.tracks.values() if each.name == name]
        return found

    def above(self, track: ReadTrack) -> ReadTrack:
        return self.tracks[track.parent]


def read_trace(data: bytes) -> ReadTrace:
    """Follow every rule that trace_processor does: sequences, defaults, interning, stacks."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

    trace = pb.Trace()
    trace.ParseFromString(data)
    read = ReadTrace()
    states: dict[int, dict[str, Any]] = {}
    events = []
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        assert sequence, "a packet without a sequence is dropped"
        if packet.HasField("clock_snapshot"):
            read.clocks = {
                clock.clock_id: clock.timestamp for clock in packet.clock_snapshot.clocks
            }
            read.primary_clock = packet.clock_snapshot.primary_trace_clock
        if packet.HasField("track_descriptor"):
            _describe(read, packet.track_descriptor)
        if packet.sequence_flags & 1:
            states[sequence] = _state(packet)
        if packet.HasField("track_event"):
            assert packet.sequence_flags & 2
            state = states[sequence]
            assert state["clock"] == read.primary_clock
            events.append((packet.timestamp, packet.track_event, state))
    events.sort(key=lambda each: each[0])  # stable, as trace_processor sorts
    stacks: dict[int, list[Any]] = {}
    for time, event, state in events:
        _follow(read, stacks, time, event, state)
    assert not any(stacks.values()), "a slice that never ends"
    return read


def _describe(read: ReadTrace, track: Any) -> None:
    assert track.uuid not in read.tracks
    assert not track.parent_uuid or track.parent_uuid in read.tracks
    name = track.name or track.process.process_name or track.thread.thread_name
    read.tracks[track.uuid] = ReadTrack(
        name, track.parent_uuid, track.process.pid or track.thread.pid, track.thread.tid
    )


def _state(packet: Any) -> dict[str, Any]:
    defaults, interned = packet.trace_packet_defaults, packet.interned_data
    return {
        "clock": defaults.timestamp_clock_id,
        "track": defaults.track_event_defaults.track_uuid,
        "names": {each.iid: each.name for each in interned.event_names},
        "categories": {each.iid: each.name for each in interned.event_categories},
        "annotations": {each.iid: each.name for each in interned.debug_annotation_names},
    }


def _follow(
    read: ReadTrace, stacks: dict[int, list[Any]], time: int, event: Any, state: dict[str, Any]
) -> None:
    track, stack = read.tracks[state["track"]], stacks.setdefault(state["track"], [])
    track.flows_from.update(dict.fromkeys(event.flow_ids, time))
    track.flows_to.update(dict.fromkeys(event.terminating_flow_ids, time))
    if event.type == event.TYPE_SLICE_END:
        began, name, said = stack.pop()
        track.slices.append((began, time, name, said))
        return
    name = state["names"][event.name_iid]
    assert all(iid in state["categories"] for iid in event.category_iids)
    said = {state["annotations"][each.name_iid]: each.int_value for each in event.debug_annotations}
    if event.type == event.TYPE_SLICE_BEGIN:
        stack.append((time, name, said))
    else:
        track.instants.append((time, name))
