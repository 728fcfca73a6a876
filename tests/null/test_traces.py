"""Launches in a run: how they are built, written and read, and the profiler's calls around them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brickline import BrickProfiler, KernelTrace, Run, abi
from brickline.checksums import KernelChecksum, fnv1a_f32
from brickline.comparison.traces.comparison import compare_traces
from brickline.errors import CountError, RunError, UsageError
from brickline.fingerprints import fingerprint
from brickline.traces import FINGERPRINT_BYTES, MOST_WAITING, Operand, Traces
from brickline.verdict import DivergenceReport

Make = Callable[..., BrickProfiler]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.delenv("BRICKLINE_RUN", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[BrickProfiler] = []

    def make_one(name: str = "p", **options: Any) -> BrickProfiler:
        made.append(BrickProfiler(name, **({"enabled": True, "device": "NULL"} | options)))
        return made[-1]

    yield make_one
    for profiler in made:
        profiler.close()


# ---------------------------------------------------------------------------------- building traces


def test_a_trace_is_built_step_by_step() -> None:
    bare = KernelTrace.new("rope", 3, 7, "CUDA")
    assert bare == KernelTrace("rope", 3, 7, "CUDA")
    assert (bare.input_checksum, bare.output_checksum) == (None, None)
    built = (
        bare.with_input_checksum([1.0])
        .with_output_checksum(np.array([1, 2, 3, 4]))
        .with_params('{"heads": 12}')
        .with_time_us(12.5)
    )
    assert (built.input_checksum, built.output_checksum) == (
        0x4B72477F9C5C2F98,
        0x8FAA0A18FAF0FB98,
    )
    assert (built.params, built.time_us) == ('{"heads": 12}', 12.5)
    assert bare.output_checksum is None, "the first is as it was"
    with pytest.raises(UsageError, match="params: expected a str"):
        bare.with_params({})  # type: ignore[arg-type]
    with pytest.raises(CountError, match="time_us"):
        bare.with_time_us(-1)


def test_a_trace_survives_json() -> None:
    import json

    built = KernelTrace.new("rope", 3, 7, "CUDA").with_output_checksum([1.0]).with_time_us(2)
    text = json.dumps(built.to_dict())
    assert '"output_checksum": "0x4B72477F9C5C2F98"' in text, "no reader cuts off a text"
    assert KernelTrace.from_dict(json.loads(text)) == built
    assert KernelTrace.from_dict({**built.to_dict(), "output_checksum": 9}).output_checksum == 9


@pytest.mark.parametrize(
    "change", [{"layer": 1}, {"output_checksum": "x"}, {"layer_idx": -1}, {"kernel_name": None}]
)
def test_a_dict_that_is_no_trace_is_refused(change: dict[str, Any]) -> None:
    document = KernelTrace("k", 0, 0, "CPU").to_dict()
    with pytest.raises(UsageError, match="expected"):
        KernelTrace.from_dict(document | change)
    with pytest.raises(UsageError, match="expected the dict"):
        KernelTrace.from_dict([])  # type: ignore[arg-type]


def test_a_trace_holds_what_json_holds() -> None:
    import json

    given = KernelTrace.new("k", np.int64(3), 2.0, "CPU").with_time_us(np.float32(2.5))
    assert given == KernelTrace("k", 3, 2, "CPU", time_us=2.5)
    document = replace(given, input_checksum=np.uint64(7)).to_dict()
    assert json.loads(json.dumps(document)) == document
    assert {type(each) for each in document.values()} == {str, int, float, type(None)}
    report = compare_traces([given], [given])
    assert DivergenceReport.from_json(report.to_json()).diagnosis == report.diagnosis
    for wrong in ("1", True, float("nan"), np.inf, None):
        with pytest.raises(CountError, match="time_us: expected"):
            given.with_time_us(wrong)  # type: ignore[arg-type]


def test_a_position_fills_its_column(make: Make) -> None:
    p, last = make(), 2**32 - 1
    p.add_trace(KernelTrace("k", 0, last, "CPU"))
    p.record_checksum("k", 0, last, [1.0])
    p.trace("k", 0, last)
    assert [each.position for each in p.kernel_traces()] == [last] * 3
    for wrong in (last + 1, -1, None):
        with pytest.raises(CountError, match="position: expected"):
            KernelTrace("k", 0, wrong, "CPU")  # type: ignore[arg-type]


def test_a_checksum_that_a_seed_never_took_is_none() -> None:
    """Its JSON has no other way to say so: a checksum is a number, and 0 until it is taken."""
    seed: dict[str, Any] = {"kernel_name": "rope", "layer_idx": 0, "position": 7, "params": ""}
    seed |= {"input_checksum": 0, "output_checksum": 0, "time_us": 0.0, "backend": "CPU"}
    unset = KernelTrace.from_dict(seed)
    assert (unset.input_checksum, unset.output_checksum) == (None, None)
    report = compare_traces([unset], [unset])
    assert (report.status, report.kernels_compared) == ("inconclusive", 0)
    taken = KernelTrace.from_dict(seed | {"output_checksum": 0x4B72477F9C5C2F98})
    assert compare_traces([taken], [taken]).matched
    kept = KernelTrace("k", 0, 0, "CPU", output_checksum=0)
    assert KernelTrace.from_dict(kept.to_dict()) == kept, "ours says null where none was taken"


# ------------------------------------------------------------------------------------------ writing


def record(number: int) -> bytes:
    return fingerprint(np.full(3, number, np.float32)).to_bytes()


def write(traces: Traces, number: int, **fields: Any) -> None:
    known: dict[str, Any] = {"name": "k", "enqueue_ns": 1, "start_ns": 2, "end_ns": 5}
    traces.write(number, **(known | fields))


def test_what_is_written_is_read(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    first, second = p.traces.reserve(), p.traces.reserve()
    taken = p.traces.fingerprint(record(1))
    operand = Operand(1, 0, 2**63, 4, "bf16", (2, 3), (3, 1), taken)
    with p.step(phase="decode"):
        write(
            *(p.traces, second),
            **{"name": "up", "layer": 3, "position": 9, "ordinal": 2, "parent": first},
            **{"direction": 1, "backend": "CUDA", "params": "{}", "device": 1, "stream": 77},
            **{"slot": 0, "kernel_hash": 5, "output_checksum": 0, "clock_domain": 1},
            operands=[operand, operand._replace(role=0, shape=(), strides=(), fingerprint=0)],
        )
    write(p.traces, first)
    p.close()
    (part,) = Run.open(tmp_path / "run").parts
    inner, outer = part.traces
    assert (inner["trace"], inner["parent"], outer["trace"]) == (second, first, first)
    assert [part.string(inner[name]) for name in ("name", "backend", "params")] == [
        *("up", "CUDA", "{}"),
    ]
    numbers = ("layer", "position", "ordinal", "direction", "device", "stream", "kernel_hash")
    assert [inner[name] for name in numbers] == [3, 9, 2, 1, 1, 77, 5]
    assert (inner["has_checksums"], inner["output_checksum"], inner["timed"]) == (2, 0, 1)
    assert part.phases[int(inner["phase"])] == "decode"
    assert (outer["layer"], outer["slot"], outer["device"]) == (-1, abi.NO_SLOT, -1)
    out, given = part.operands
    assert (out["trace"], out["tensor"], out["version"]) == (second, 2**63, 4)
    assert (part.string(out["dtype"]), out["dimensions"]) == ("bf16", 2)
    assert (out["shape"][:2].tolist(), out["strides"][:2].tolist()) == ([2, 3], [3, 1])
    assert (given["role"], given["dimensions"], given["fingerprint"]) == (0, 0, 0)
    assert part.fingerprints[out["fingerprint"] - 1].tobytes() == record(1)


def test_more_than_eight_dimensions_keep_their_number(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    write(p.traces, 1, operands=[Operand(0, 0, 1, 0, "f32", (1,) * 10, (1,) * 10, 0)])
    p.close()
    (row,) = Run.open(tmp_path / "run").parts[0].operands
    assert (row["dimensions"], row["shape"].tolist()) == (10, [1] * 8)


@pytest.mark.parametrize(
    "fields",
    [{"layer": 2**31}, {"position": -1}, {"stream": "s"}, {"end_ns": 1.5}, {"slot": -1}],
    ids=str,
)
def test_what_fits_no_column_is_refused(make: Make, fields: dict[str, Any]) -> None:
    p = make()
    with pytest.raises(CountError, match="fit the columns"):
        write(p.traces, 1, **fields)
    assert len(p.traces) == 0


def test_a_disabled_profiler_writes_nothing(make: Make) -> None:
    p = make(enabled=False)
    write(p.traces, p.traces.reserve())
    assert p.traces.fingerprint(record(1)) == 0
    assert p.trace("k", inputs=[np.ones(3)], outputs=object()) is None
    p.record_checksum("k", 0, 0, [1.0])
    assert (p.kernel_traces(), p.get_checksums(), len(p.traces)) == ([], [], 0)
    assert "never enabled" in p.compare([KernelTrace("k", 0, 0, "CPU")]).diagnosis
    assert p.path is None


def test_threads_write_at_once(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    kept: dict[int, int] = {}

    def work(thread: int) -> None:
        for number in range(thread * 100, thread * 100 + 100):
            kept[number] = p.traces.fingerprint(record(number))
            write(p.traces, p.traces.reserve(), position=number)

    threads = [threading.Thread(target=work, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    p.close()
    (part,) = Run.open(tmp_path / "run").parts
    assert sorted(part.traces["trace"]) == list(range(1, 401))
    assert sorted(part.traces["position"]) == list(range(400))
    for number, row in kept.items():
        assert part.fingerprints[row - 1].tobytes() == record(number)


def test_what_is_written_is_there_after_a_kill(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    child = os.fork()
    if child == 0:
        try:
            for number in range(50):
                taken = p.traces.fingerprint(record(number))
                operand = Operand(1, 0, 1, 0, "f32", (3,), (1,), taken)
                write(p.traces, p.traces.reserve(), position=number, operands=[operand])
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    p.close()
    (part,) = (part for part in Run.open(tmp_path / "run").parts if part.process == child)
    assert part.traces["position"].tolist() == list(range(50))
    assert part.operands["fingerprint"].tolist() == list(range(1, 51))
    assert part.fingerprints[49].tobytes() == record(49)


# ---------------------------------------------------------------------- fingerprints that come late


def written(p: BrickProfiler, path: Path) -> list[bytes]:
    p.close()
    return [row.tobytes() for row in Run.open(path).parts[0].fingerprints]


def test_a_reserved_fingerprint_keeps_its_place(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    late = p.traces.reserve_fingerprint()
    early = p.traces.fingerprint(record(2))
    other = p.traces.reserve_fingerprint()
    assert (late, early, other) == (1, 2, 3)
    assert p.traces.fingerprint(record(3), other) == 3
    assert len(Run.open(tmp_path / "run").parts[0].fingerprint_rows) == 0, "these wait"
    assert p.traces.fingerprint(record(1), late) == 1
    assert len(Run.open(tmp_path / "run").parts[0].fingerprint_rows) == 3
    assert p.traces.fingerprint(record(4)) == 4
    assert written(p, tmp_path / "run") == [record(n) for n in (1, 2, 3, 4)]
    assert p.traces.lost_fingerprints == 0


def test_one_that_never_comes_is_an_empty_row(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    lost = p.traces.reserve_fingerprint()
    p.traces.fingerprint(record(2))
    p.traces.reserve_fingerprint()
    rows = written(p, tmp_path / "run")
    assert (lost, len(rows), rows[1]) == (1, 2, record(2))
    assert not any(rows[0])
    assert p.traces.lost_fingerprints == 1


def test_a_reserved_one_is_taken_after_disabling(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    late, later = p.traces.reserve_fingerprint(), p.traces.reserve_fingerprint()
    p.disable()
    assert p.traces.fingerprint(record(9)) == 0
    assert p.traces.fingerprint(record(2), later) == later
    assert p.traces.fingerprint(record(1), late) == late
    assert written(p, tmp_path / "run") == [record(1), record(2)]
    assert p.traces.fingerprint(record(3), later) == 0, "closed"


def test_what_waits_is_bounded(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    lost, one = p.traces.reserve_fingerprint(), record(5)
    for _ in range(MOST_WAITING + 10):
        p.traces.fingerprint(one)
    assert p.traces.lost_fingerprints == 1
    assert p.traces.fingerprint(record(1), lost) == lost, "too late, and no harm"
    rows = written(p, tmp_path / "run")
    assert len(rows) == MOST_WAITING + 11
    assert (any(rows[0]), set(rows[1:])) == (False, {one})


def test_a_record_of_another_size_and_a_place_of_nobody_are_refused(make: Make) -> None:
    p = make()
    assert abi.FINGERPRINT.itemsize == FINGERPRINT_BYTES
    for wrong in (b"", bytes(1025), record(1)[:-1]):
        with pytest.raises(UsageError, match="expected 1016 bytes of fingerprint, got"):
            p.traces.fingerprint(wrong)
    p.traces.fingerprint(record(1))
    with pytest.raises(UsageError, match="fingerprint 3 was not reserved"):
        p.traces.fingerprint(record(1), 3)


# ---------------------------------------------------------------------------------- life of the run


def test_a_difference_that_came_with_the_inputs_is_marked_too(make: Make) -> None:
    p = make()
    p.add_trace(KernelTrace("a", 0, 0, "CPU", input_checksum=1, output_checksum=1))
    p.compare_and_mark([KernelTrace("a", 0, 0, "CPU", input_checksum=2, output_checksum=2)])
    assert p.is_diverged()
    assert "inputs differ" in p.divergence_diagnosis


def test_reset_forgets_launches_and_the_outcome(make: Make) -> None:
    p = make()
    p.record_checksum("a", 0, 0, [1.0])
    p.compare_and_mark([KernelTrace("a", 0, 0, "CPU", output_checksum=1)])
    assert p.is_diverged()
    p.reset()
    assert (p.is_diverged(), p.divergence_diagnosis, p.kernel_traces()) == (False, "", [])
    p.add_trace(KernelTrace("b", 1, 2, "CPU", params="x"))
    assert p.kernel_traces() == [KernelTrace("b", 1, 2, "CPU", params="x")]


def test_another_run_has_names_of_its_own(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run", overwrite=True)
    p.add_trace(KernelTrace("first", 0, 0, "CPU"))
    p.close()
    assert [each.kernel_name for each in p.kernel_traces()] == ["first"]
    p.enable()
    p.add_trace(KernelTrace("second", 0, 0, "NULL"))
    assert [each.kernel_name for each in p.kernel_traces()] == ["second"]


def test_a_forked_child_writes_its_own(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run", device="CPU")
    p.trace("parent", outputs=[np.ones(2)])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            p.trace("child", outputs=[np.zeros(2)])
            status = int([each.kernel_name for each in p.kernel_traces()] != ["child"])
            p.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    p.close()
    run = Run.open(tmp_path / "run")
    assert sorted(part.string(row["name"]) for part in run.parts for row in part.traces) == [
        *("child", "parent"),
    ]
    assert all(len(part.fingerprints) == 1 for part in run.parts)


# ------------------------------------------------------------------------ trace(), and comparing it


def two_steps(p: BrickProfiler, fault: float = 0.0, place: int = 99, **options: Any) -> None:
    x = np.arange(100, dtype=np.float32)
    for position in range(2):
        y = x * 2
        y[place] += fault
        z = y + 1
        p.trace("scale", 0, position, inputs=[x], outputs=[y], params={"by": 2}, **options)
        p.trace("shift", 0, position, inputs=y, outputs=z, time_us=3.5, **options)


def test_a_launch_of_ones_own_is_kept_whole(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run", device="CPU")
    x, y = np.ones((2, 3), np.float32), np.zeros((3, 2), np.float16).T
    kept = p.trace("k", 4, 5, inputs=[x], outputs=[y], params={"b": 1, "a": 2}, time_us=8)
    assert kept == KernelTrace("k", 4, 5, "CPU", '{"a": 2, "b": 1}', 8, fnv1a_f32(x), fnv1a_f32(y))
    p.trace("outside", inputs=[y])
    assert p.kernel_traces()[0] == kept
    p.close()
    (part,) = Run.open(tmp_path / "run").parts
    assert part.traces["layer"].tolist() == [4, -1]
    assert part.traces["has_checksums"].tolist() == [3, 1]
    given, made, again = part.operands
    assert (part.string(made["dtype"]), made["strides"][:2].tolist()) == ("f16", [1, 2])
    assert made["tensor"] == again["tensor"] != given["tensor"], "dataflow can be followed"
    assert part.fingerprints[given["fingerprint"] - 1].tobytes() == fingerprint(x).to_bytes()


def test_the_same_launches_match(make: Make) -> None:
    mine, theirs = make("mine"), make("theirs")
    for p in (mine, theirs):
        two_steps(p)
    report = mine.compare_and_mark(theirs)
    assert report
    assert report.diagnosis == "all 4 kernels matched between mine (CPU) and theirs (CPU)"
    assert (report.kernels_compared, report.coverage.notes) == (4, ())
    assert not mine.is_diverged()


@pytest.mark.parametrize("closed", [False, True])
def test_a_fault_past_the_first_64_floats_is_found(make: Make, closed: bool) -> None:
    mine, theirs = make("mine"), make("theirs")
    two_steps(mine, fault=5.0, backend="CUDA")
    two_steps(theirs)
    if closed:
        mine.close()
        theirs.close()
    report = mine.compare_and_mark(theirs)
    assert mine.is_diverged()
    assert [str(each) for each in report.verdicts.columns["verdict"]] == [
        "suspect",
        "propagated",
    ] * 2
    assert report.first_divergent_kernel is not None
    assert report.first_divergent_kernel.kernel_name == "scale"
    assert [each.position for each in report.findings] == [0, 1]
    error = report.findings[0].local_error
    assert error is not None
    assert 0.1 * 5 / 1146 < error < 10 * 5 / 1146
    assert "CUDA (candidate) agree in the first 64 floats" in report.diagnosis
    assert mine.divergence_diagnosis == report.diagnosis
    assert mine.find_divergence(theirs) is None, "the seed's checksum is blind there"
    assert "mine (CUDA)" in str(report)


def test_a_run_and_a_list_are_references_too(make: Make, tmp_path: Path) -> None:
    theirs, mine = make("theirs", path=tmp_path / "run"), make("mine")
    two_steps(theirs)
    two_steps(mine, fault=1.0, place=0)
    theirs.close()
    report = mine.compare(Run.open(tmp_path / "run"))
    assert (report.status, report.findings[0].name) == ("diverged", "scale")
    assert mine.compare(theirs.kernel_traces()).status == "diverged"
    assert mine.compare(mine.kernel_traces()).status == "matched"
    with pytest.raises(UsageError, match="reference: expected traces"):
        mine.compare(str(tmp_path))


def test_launches_are_found_by_kernel_and_layer(make: Make) -> None:
    p = make()
    for layer in range(3):
        for name in ("norm", "rope"):
            p.add_trace(KernelTrace(name, layer, 0, "CPU"))
    assert [each.layer_idx for each in p.traces_for_kernel("rope")] == [0, 1, 2]
    assert [each.kernel_name for each in p.traces_for_layer(1)] == ["norm", "rope"]
    assert (p.traces_for_kernel("none"), p.traces_for_layer(9)) == ([], [])
    with pytest.raises(CountError, match="layer_idx"):
        p.traces_for_layer(-1)
    with pytest.raises(UsageError, match="expected a KernelTrace"):
        p.add_trace("rope")  # type: ignore[arg-type]


def test_checksums_are_recorded_compared_and_forgotten(make: Make) -> None:
    mine, theirs = make(), make()
    for p, value in ((mine, 2.0), (theirs, 2.5)):
        p.record_checksum("norm", 0, 7, [1.0])
        p.record_checksum("rope", 3, 7, np.array([1.0, value], np.float32))
    assert mine.get_checksums()[0] == KernelChecksum("norm", 0, 7, fnv1a_f32([1.0]))
    found = mine.find_divergence(theirs)
    assert found == mine.find_divergence(theirs.get_checksums())
    assert found is not None
    assert (found.kernel_name, found.layer_idx, found.position) == ("rope", 3, 7)
    assert found.expected_checksum == fnv1a_f32([1.0, 2.5])
    assert mine.compare(theirs).findings[0].name == "rope"
    mine.reset_checksums()
    assert (mine.get_checksums(), mine.find_divergence(theirs)) == ([], None)
    mine.record_checksum("norm", 0, 8, [1.0])
    assert len(mine.get_checksums()) == 1
    for wrong in ((-1, 0), (0, 2**40)):
        with pytest.raises(CountError):
            mine.record_checksum("norm", *wrong, [1.0])
    with pytest.raises(UsageError, match="expected numbers"):
        mine.record_checksum("norm", 0, 0, "text")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inputs": 3}, "inputs: expected a tensor"),
        ({"outputs": [1.0, 2.0]}, "outputs: expected tensors of torch, NumPy or DLPack"),
        ({"outputs": ["a"]}, "outputs: expected tensors"),
        ({"inputs": [np.array([1j])]}, "inputs"),
        ({"params": {"a": {1, 2}}}, "params: expected JSON"),
        ({"layer": -1}, "layer: expected"),
        ({"position": 1.5}, "position: expected"),
        ({"time_us": -2}, "time_us: expected"),
        ({"name": 3}, "kernel_name: expected"),
        ({"backend": 3}, "backend: expected"),
    ],
    ids=str,
)
def test_what_cannot_be_traced_is_refused(make: Make, fields: dict[str, Any], words: str) -> None:
    p = make()
    with pytest.raises(UsageError, match=words):
        p.trace(**({"name": "k"} | fields))
    assert len(p.traces) == 0


def test_a_launch_outside_layers_is_not_in_layer_0(make: Make, tmp_path: Path) -> None:
    one = np.ones(4, np.float32)

    def record_norms(name: str, factor: float, outside_first: bool = False) -> BrickProfiler:
        p = make(name, path=tmp_path / name)
        calls = [(0, one), (None, one * factor)]
        for layer, output in calls[::-1] if outside_first else calls:
            p.trace("rms_norm", layer, inputs=one, outputs=output)
        return p

    p = record_norms("p", 2)
    assert [each.layer_idx for each in p.kernel_traces()] == [0, None]
    assert len(p.traces_for_layer(0)) == len(p.traces_for_layer(None)) == 1
    report = p.compare(record_norms("reference", 1))
    assert (report.duplicates, report.first_divergent_kernel) == ((), p.kernel_traces()[1])
    assert report.findings[0].layer_idx is None
    assert "(outside layers, position 0)" in report.diagnosis
    again = DivergenceReport.from_json(report.to_json())
    assert again.actual_trace == report.actual_trace
    other = record_norms("other", 2, outside_first=True)
    assert p.compare(other).matched, "whatever the order"
    assert p.compare(Run.open(tmp_path / "other")).matched
    added = make()
    for each in p.kernel_traces():
        added.add_trace(each)
        added.record_checksum("alone", each.layer_idx, 0, [1.0])
    assert added.kernel_traces()[::2] == p.kernel_traces()
    assert [each.layer_idx for each in added.get_checksums()] == [0, 0, None, None]


def test_times_are_kept_as_they_were_given(make: Make, tmp_path: Path) -> None:
    from brickline.tables import table_from_run

    times = [0.0, 5e-324, 0.0004, 1.23456789, 41.5, 1e13, 1e300]
    for device in ("NULL", "CPU"):
        p = make(device=device, path=tmp_path / device)
        for time_us in times:
            p.add_trace(KernelTrace("k", 0, 0, "CPU", time_us=time_us))
            p.trace("k", outputs=np.ones(2), time_us=time_us)
        assert [each.time_us for each in p.kernel_traces()[::2]] == times
        assert [each.time_us for each in p.kernel_traces()[1::2]] == times
        assert p.total_time_us == pytest.approx(2e300)
        p.close()
        rows = table_from_run(Run.open(tmp_path / device), "traces").to_pylist()
        assert [row["time_us"] or 0.0 for row in rows[::2]] == times
        assert rows[0]["time_us"] is None, "0 is not known"


def test_a_time_lies_on_the_clock_as_far_as_that_goes(make: Make) -> None:
    p = make()
    p.advance(2_000)
    for time_us in (1.5, 2.5):
        p.add_trace(KernelTrace("k", 0, 0, "CPU", time_us=time_us))
    rows = p._part().traces  # type: ignore[union-attr]
    spans = rows[["start_ns", "end_ns", "timed"]].tolist()
    assert spans == [(500, 2000, 1), (-1, 2000, 0)], "it began before the clock"


def test_what_is_handed_over_is_kept_by_a_disabled_profiler(make: Make, tmp_path: Path) -> None:
    """The seed's example as it stands: nobody enables anything."""
    x, y = [1.0, 2.0], [3.0, 4.0]
    mine, theirs = make("mine", enabled=False), make("theirs", enabled=False)
    for p, output in ((mine, y), (theirs, [3.0, 4.5])):
        trace = KernelTrace.new("rope_neox", 0, 7, "CPU").with_input_checksum(x)
        p.add_trace(trace.with_output_checksum(output).with_time_us(2.5))
    assert (mine.diverged, mine.is_enabled()) == (False, False)
    report = mine.compare_and_mark(theirs)
    assert not report.matched
    assert (mine.diverged, mine.is_diverged(), report.diverged) == (True, True, True)
    assert mine.divergence_diagnosis == report.diagnosis
    assert (mine.total_time_us, report.total_time_us, report.reference_total_time_us) == (2.5,) * 3
    assert len(mine.traces) == 1
    saved = Run.open(mine.save(tmp_path / "kept.brick"))
    assert len(saved.parts[0].traces) == 1
    mine.enable()
    with mine.brick("A"):
        pass
    mine.disable()
    mine.add_trace(KernelTrace("second", None, 0, "CPU"))
    assert [each.kernel_name for each in mine.kernel_traces()] == ["rope_neox", "second"]
    assert mine.brick_stats("A").count == 1
    mine.close()
    with pytest.raises(UsageError, match="was closed"):
        mine.add_trace(trace)
    assert len(mine.kernel_traces()) == 2


def test_what_was_not_timed_has_no_total(make: Make) -> None:
    p = make()
    assert p.total_time_us == 0
    p.trace("k", outputs=np.ones(2))
    report = p.compare(p)
    assert (report.total_time_us, report.reference_total_time_us) == (None, None)
    for time_us in (1e16, 1.0, 1.0):
        p.trace("k", time_us=time_us)
    assert p.compare(p).total_time_us == p.total_time_us == 1e16 + 2, "one sum, and exact"


# ------------------------------------------------------------------------------------- rows on disk


def test_rows_on_disk_are_read_in_pieces(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    for number in range(3000):
        p.traces.fingerprint(record(number))
    p.close()
    (part,) = Run.open(tmp_path / "run").parts
    rows = part.fingerprint_rows
    assert len(rows) == 3000
    assert (np.concatenate(list(rows.chunks(700))) == rows.read()).all()
    assert [row.tobytes() for row in rows.read(998, 1001)] == [record(n) for n in (998, 999, 1000)]
    wanted = [2999, 0, 5, 5, 1500]
    assert [row.tobytes() for row in rows.take(wanted)] == [record(n) for n in wanted]
    assert (len(rows.take([])), len(rows.read(4000)), len(rows.read(5, 2))) == (0, 0, 0)
    with pytest.raises(IndexError):
        rows.take([3000])
    part.hold()
    part.path.unlink()
    assert rows.read(7, 8)[0].tobytes() == record(7)
    with pytest.raises(RunError, match="open the run again"):
        part.fingerprint_rows.__class__(part.path, rows.dtype, [(4096, 4096)]).read()


def test_a_spool_that_was_cut_off_meanwhile_says_so(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    for number in range(100):
        p.traces.fingerprint(record(number))
    p.close()
    (part,) = Run.open(tmp_path / "run").parts
    os.truncate(part.path, 8192)
    with pytest.raises(RunError, match="more bytes"):
        part.fingerprint_rows.read()


def test_a_million_traces_would_not_be_held_in_memory(make: Make) -> None:
    """What a profiler keeps of its launches does not grow with their number."""
    p = make()
    for number in range(2000):
        p.traces.fingerprint(record(number % 7))
        write(p.traces, p.traces.reserve(), name="k", position=number)
    held = p.traces
    assert len(held._strings) < 10
    assert not held._waiting


def test_operands_and_fingerprints_are_tables(make: Make, tmp_path: Path) -> None:
    from brickline.tables import table_from_run

    p = make(path=tmp_path / "run")
    x = np.array([[1.0, -2.0, np.nan], [0.0, 3.0, np.inf]], np.float32)
    p.traces.reserve_fingerprint()
    p.trace("k", inputs=[x], outputs=[np.arange(3)])
    p.close()
    run = Run.open(tmp_path / "run")
    given, made = table_from_run(run, "operands").to_pylist()
    assert (given["role"], made["role"], given["shape"]) == ("input", "output", [2, 3])
    assert (given["fingerprint"], made["fingerprint"]) == (2, 3)
    lost, first, second = table_from_run(run, "fingerprints").to_pylist()
    assert {name for name, value in lost.items() if value is not None} == {
        *("part", "rank", "process", "fingerprint"),
    }
    taken = fingerprint(x)
    assert (first["fingerprint"], first["hash"]) == (2, f"{taken.hash:032x}")
    assert (first["dtype"], first["shape"], second["dtype"]) == ("f32", [2, 3], "i64")
    assert np.allclose(first["sketch"], np.asarray(taken.sketch), equal_nan=True)
    assert (len(first["sketch"]), len(first["rows"]), len(first["columns"])) == (64, 32, 32)
    published = run.publish()
    assert published is not None
    assert (published / "fingerprints.parquet").is_file()


# ----------------------------------------------------------------------------------- what it costs


def test_a_run_says_what_its_traces_took(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = make()

    def slow(array: Any) -> Any:
        profiler.advance(700)
        return fingerprint(array)

    monkeypatch.setattr("brickline.launch_traces.fingerprint", slow)
    with profiler.step(tokens=1):
        profiler.advance(2_000)
        profiler.trace("gemv", inputs=[np.ones(4)], outputs=[np.ones(4)])
    profile = profiler.profile()
    assert profile.recording.observing_ns == profile.recording.overhead_ns == 1_400
    assert profile.overhead_share == 1_400 / 3_400
    assert "Recording took about 1.40 µs, 41.2 % of the steps." in str(profiler.summary())
    profiler.reset()
    assert profiler.profile().recording.overhead_ns == 0
