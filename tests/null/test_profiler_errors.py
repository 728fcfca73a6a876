"""Bad input: each gets a clear error with the next step, and nothing recorded before is lost."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brickline as bl
from brickline import BrickId, BrickProfiler, KernelTrace, Sampling, SyncMode, TileLevel, errors
from brickline.budgets import parse_budgets
from brickline.errors import (
    BricklineError,
    BudgetError,
    CountError,
    DeviceError,
    GraphError,
    InternalError,
    RunError,
    RunExists,
    TimerError,
    UsageError,
)

HUGE = 10**400


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps runs without a path out of the user's state directory."""
    directory = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    monkeypatch.delenv("BRICKLINE_RUN", raising=False)
    return directory


@pytest.fixture
def p() -> Iterator[BrickProfiler]:
    """An enabled profiler that has recorded one entry, which must survive whatever happens."""
    profiler = BrickProfiler("test", enabled=True, device="NULL")
    with profiler.brick("kept"):
        profiler.advance(5)
    yield profiler
    kept = profiler.brick_stats("kept")
    assert (kept.count, kept.total_ns) == (1, 5)
    profiler.close()


def survives_pickling(error: BricklineError) -> bool:
    copy = pickle.loads(pickle.dumps(error))
    return type(copy) is type(error) and str(copy) == str(error) and copy.args == error.args


# ------------------------------------------------------------------------------------------- counts

WHOLE: list[Any] = [-1, 1.5, math.nan, math.inf, -math.inf, HUGE, "3", None, [1]]
"""No whole number that a record can hold."""

COUNTS: dict[str, Callable[[BrickProfiler, Any], object]] = {
    "stop_brick": lambda p, n: p.stop_brick(p.start_brick(BrickId.RMS_NORM), n),
    "stop": lambda p, n: p.stop(p.start("own"), elements=n),
    "brick elements": lambda p, n: p.brick("own", elements=n),
    "brick bytes": lambda p, n: p.brick("own", bytes=n),
    "step": lambda p, n: p.step(tokens=n),
    "record_elapsed": lambda p, n: p.record_elapsed("own", n),
    "record_elapsed elements": lambda p, n: p.record_elapsed("own", 1, n),
    "record_elapsed bytes_in": lambda p, n: p.record_elapsed("own", 1, bytes_in=n),
    "record_elapsed bytes_out": lambda p, n: p.record_elapsed("own", 1, bytes_out=n),
    "record_elapsed cycles": lambda p, n: p.record_elapsed("own", 1, cycles=n),
    "record_deferred": lambda p, n: p.record_deferred(BrickId.RMS_NORM, n),
    "record_deferred elements": lambda p, n: p.record_deferred_dynamic("own", 0, n),
    "finalize": lambda p, n: p.finalize(n),
    "tiles.start": lambda p, n: p.tiles.start(TileLevel.MACRO, n),
    "tiles.start column": lambda p, n: p.tiles.start(TileLevel.MACRO, column=n),
    "tiles.stop": lambda p, n: p.tiles.stop(p.tiles.start(TileLevel.MACRO), n),
    "tiles.stop bytes": lambda p, n: p.tiles.stop(p.tiles.start(TileLevel.MACRO), bytes=n),
    "tiles.record": lambda p, n: p.tiles.record(TileLevel.MACRO, n),
    "tiles.record row": lambda p, n: p.tiles.record(TileLevel.MACRO, 1, row=n),
    "tiles.record elements": lambda p, n: p.tiles.record(TileLevel.MACRO, 1, elements=n),
    "timeline_steps": lambda p, n: BrickProfiler(timeline_steps=n),
    "advance": lambda p, n: p.advance(n),
    "graph": lambda p, n: p.graph.record_brick("own", timing_ns=0, elements=n),
    "trace position": lambda p, n: KernelTrace("k", 0, n, "NULL"),
}


@pytest.mark.parametrize("value", WHOLE, ids=lambda value: repr(value)[:8])
@pytest.mark.parametrize("call", COUNTS.values(), ids=COUNTS)
def test_a_count_that_is_none_is_refused(
    p: BrickProfiler, call: Callable[[BrickProfiler, Any], object], value: Any
) -> None:
    with pytest.raises(CountError, match=r"expected .*got") as caught:
        call(p, value)
    assert repr(value)[:20] in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert survives_pickling(caught.value)
    assert "own" not in {row.name for row in p.all_brick_stats()}


@pytest.mark.parametrize("value", [value for value in WHOLE if value is not None], ids=repr)
def test_a_layer_of_a_trace_is_a_count_or_none(value: Any) -> None:
    with pytest.raises(CountError, match=r"expected .*got"):
        KernelTrace("k", value, 0, "NULL")
    assert KernelTrace("k", None, 0, "NULL").layer_idx is None


@pytest.mark.parametrize(
    "value", [each for each in WHOLE if each is not None], ids=lambda value: repr(value)[:8]
)
def test_a_trace_is_in_a_numbered_layer_or_in_none(value: Any) -> None:
    with pytest.raises(CountError, match=r"layer_idx: expected .*got"):
        KernelTrace("k", value, 0, "NULL")
    assert KernelTrace("k", None, 0, "NULL").layer_idx is None


@pytest.mark.parametrize(
    "value", [-1, math.nan, math.inf, HUGE, "3", None, [1]], ids=lambda value: repr(value)[:8]
)
def test_flops_are_finite_and_not_negative(p: BrickProfiler, value: Any) -> None:
    for call in (
        lambda: p.brick("own", flops=value),
        lambda: p.record_elapsed("own", 1, flops=value),
        lambda: p.tiles.record(TileLevel.MACRO, 1, flops=value),
        lambda: p.tiles.stop(p.tiles.start(TileLevel.MACRO), 1, value),
    ):
        with pytest.raises(CountError, match="flops: expected a number from 0 to"):
            call()


@pytest.mark.parametrize("value", [2**40, 2**63, 2**64])
def test_more_elements_than_a_record_holds_are_refused(p: BrickProfiler, value: int) -> None:
    with pytest.raises(CountError, match=f"from 0 to {2**40 - 1}, got {value}"):
        p.brick("own", elements=value)


def test_rows_that_a_cell_cannot_name_are_refused(p: BrickProfiler) -> None:
    for call in (
        lambda: p.tiles.start(TileLevel.MACRO, 2**32),
        lambda: p.tiles.record(TileLevel.MACRO, 1, row=2**32),
        lambda: p.tiles.record(TileLevel.MACRO, 1, column=2**33),
    ):
        with pytest.raises(CountError, match="4294967294"):
            call()


def test_a_negative_duration_is_refused(p: BrickProfiler) -> None:
    with pytest.raises(CountError, match="elapsed"):
        p.record_elapsed("own", timedelta(microseconds=-1))


def test_tokens_that_are_learned_later_are_checked_too(p: BrickProfiler) -> None:
    with pytest.raises(CountError, match="tokens"), p.step(tokens=1) as step:
        step.tokens = -3
    with p.step(tokens=2):
        pass
    assert p.total_tokens() == 3


@pytest.mark.parametrize("rate", [math.nan, "0.5", None])
def test_a_rate_is_a_number(p: BrickProfiler, rate: Any) -> None:
    with pytest.raises(CountError, match="from 0 to 1"):
        p.set_l2_cache_hit_rate(rate)


@pytest.mark.parametrize(
    "fields",
    [
        {"time_us": math.nan},
        {"time_us": -1.0},
        {"time_us": "1"},
        {"input_checksum": 2**64},
        {"output_checksum": -1},
        {"kernel_name": 3},
        {"params": {}},
        {"backend": None},
    ],
    ids=str,
)
def test_a_trace_checks_itself(fields: dict[str, Any]) -> None:
    (name,) = fields
    known: dict[str, Any] = {"kernel_name": "k", "layer_idx": 0, "position": 0, "backend": "NULL"}
    with pytest.raises(UsageError, match=f"{name}: expected"):
        KernelTrace(**(known | fields))


def test_numpy_integers_are_whole_numbers(p: BrickProfiler) -> None:
    n = np.int64(2)
    with p.step(tokens=n), p.brick("a", layer=n, elements=n, bytes=n, flops=np.float32(2)):
        p.tiles.record(TileLevel.MACRO, n, row=n)
        p.tiles.stop(p.tiles.start(TileLevel.MACRO, n, n), n)
    p.record_elapsed("a", n, n, cycles=n)
    p.add_trace(KernelTrace("k", n, n, "NULL"))  # type: ignore[arg-type]
    assert p.brick_stats("a").total_elements == 4


# ------------------------------------------------------------------------------------------- timers


def test_a_timer_is_stopped_once(p: BrickProfiler) -> None:
    timer = p.start_brick(BrickId.RMS_NORM)
    p.advance(3)
    p.stop_brick(timer)
    with pytest.raises(TimerError, match="already stopped; start a new one") as caught:
        p.stop_brick(timer)
    assert survives_pickling(caught.value)
    assert p.brick_stats("RmsNorm").count == 1


def test_a_timer_is_stopped_by_its_own_profiler(p: BrickProfiler) -> None:
    other = BrickProfiler(enabled=True, device="NULL")
    timer = p.start("own")
    with pytest.raises(TimerError, match="another profiler; stop it with the profiler that"):
        other.stop(timer)
    p.advance(3)
    p.stop(timer)
    assert p.brick_stats("own").total_ns == 3, "the refusal did not stop it"
    assert other.all_brick_stats() == []
    other.close()


def test_a_tile_is_stopped_as_a_tile_and_a_brick_as_a_brick(p: BrickProfiler) -> None:
    tile, brick = p.tiles.start(TileLevel.MACRO), p.start("own")
    with pytest.raises(TimerError, match=r"times a tile; stop it with tiles\.stop"):
        p.stop_brick(tile)
    with pytest.raises(TimerError, match="times a brick; stop it with stop_brick or stop"):
        p.tiles.stop(brick)
    p.stop(brick)
    p.tiles.stop(tile)
    with pytest.raises(TimerError, match="already stopped"):
        p.tiles.stop(tile)


@pytest.mark.parametrize("timer", [None, 3, "RmsNorm"])
def test_anything_else_is_no_timer(p: BrickProfiler, timer: Any) -> None:
    with pytest.raises(TimerError, match=f"expected the timer .* got {type(timer).__name__}"):
        p.stop(timer)


def test_a_timer_outlives_a_refused_count(p: BrickProfiler) -> None:
    timer = p.start("own")
    with pytest.raises(CountError):
        p.stop(timer, -1)
    p.advance(4)
    p.stop(timer, 1)
    assert p.brick_stats("own").total_ns == 4


def test_timers_that_nobody_stops_are_counted_and_harmless(p: BrickProfiler) -> None:
    for _ in range(100):  # more than may be open at once
        p.start("forgotten")
    with p.brick("after"):
        p.advance(7)
    after = p.brick_stats("after")
    assert (after.count, after.timed, after.exclusive_ns) == (1, 1, 7)
    assert p.stats("forgotten") is None
    assert p.profile().recording.abandoned_timers == 100


def test_a_timer_forgotten_inside_a_brick_leaves_the_brick_in_order(p: BrickProfiler) -> None:
    with p.brick("outer"):
        p.start("forgotten")
        p.advance(7)
    outer = p.brick_stats("outer")
    assert (outer.exclusive_ns, outer.out_of_order) == (7, 0)
    assert p.profile().recording.abandoned_timers == 1


# ------------------------------------------------------------------------------------- out of order


def test_an_exit_out_of_order_is_flagged_and_not_exclusive(p: BrickProfiler) -> None:
    outer, inner = p.start("outer"), p.start("inner")
    p.advance(10)
    p.stop(outer)
    p.advance(20)
    p.stop(inner)
    with p.brick("next"):
        p.advance(100)
    rows = {row.name: row for row in p.all_brick_stats()}
    for name, total in (("outer", 10), ("inner", 30)):
        assert (rows[name].total_ns, rows[name].out_of_order) == (total, 1)
        assert (rows[name].exclusive_ns, rows[name].exclusive_count) == (0, 0)
    assert rows["next"].exclusive_ns == 100
    assert p.profile().recording.out_of_order == 2


def test_what_ran_inside_is_not_taken_from_the_next_brick(p: BrickProfiler) -> None:
    outer, inner = p.start("outer"), p.start("inner")
    with p.brick("inside"):
        p.advance(10)
    p.stop(outer)
    p.stop(inner)
    with p.brick("next"):
        p.advance(100)
    assert p.brick_stats("inside").exclusive_ns == 10
    assert p.brick_stats("next").exclusive_ns == 100


def test_tasks_that_await_inside_bricks(p: BrickProfiler) -> None:
    async def work(name: str, ns: int) -> None:
        with p.brick(name):
            p.advance(ns)
            await asyncio.sleep(0)
            p.advance(ns)

    async def both() -> None:
        await asyncio.gather(work("a", 1), work("b", 10))

    with p.brick("outer"):
        asyncio.run(both())
    rows = {row.name: row for row in p.all_brick_stats()}
    # a: 1, then b's 10, then 1; b: 10, then a's 1, then 10
    assert (rows["a"].total_ns, rows["b"].total_ns) == (12, 21)
    assert (rows["a"].exclusive_ns, rows["b"].exclusive_ns) == (12, 21)
    # The first task takes the lane that `outer` stands on; what overlaps with it is inside nothing.
    assert (rows["outer"].total_ns, rows["outer"].exclusive_ns) == (22, 22 - 12)
    assert p.profile().recording.out_of_order == 0


def test_generators_that_are_left_in_any_order(p: BrickProfiler) -> None:
    def values(ns: int) -> Iterator[int]:
        for i in range(3):
            p.advance(ns)
            yield i

    first, second = p.brick("first")(values), p.brick("second")(values)
    assert list(zip(first(1), second(10), strict=True)) == [(0, 0), (1, 1), (2, 2)]
    unfinished = first(100)
    next(unfinished)
    with p.brick("next"):
        p.advance(7)
        unfinished.close()
    rows = {row.name: row for row in p.all_brick_stats()}
    assert (rows["first"].count, rows["first"].out_of_order) == (2, 2)
    assert (rows["second"].count, rows["second"].out_of_order) == (1, 1)
    assert (rows["first"].total_ns, rows["second"].total_ns) == (33 + 107, 32)
    assert rows["first"].exclusive_ns == rows["second"].exclusive_ns == 0
    assert (rows["next"].total_ns, rows["next"].out_of_order) == (7, 1)


def test_an_exit_without_an_entry_is_counted_and_nothing_else(p: BrickProfiler) -> None:
    p.brick("own").__exit__(None, None, None)
    assert p.stats("own") is None
    assert p.profile().recording.orphan_exits == 1


@pytest.mark.parametrize("is_on", [False, True])
def test_unbalanced_graph_scopes(p: BrickProfiler, is_on: bool) -> None:
    graph = p.graph
    if is_on:
        p.enable_graph()
    with pytest.raises(GraphError, match="call push_scope first") as caught:
        graph.pop_scope()
    assert survives_pickling(caught.value)
    layer = graph.add_layer(0)
    graph.push_scope(layer)
    assert not graph.is_scope_balanced()
    assert graph.pop_scope() == layer
    outer, inner = graph.add_layer(1), graph.add_layer(2)
    with pytest.raises(GraphError, match="close inner scopes"), graph.scope(outer):
        graph.push_scope(inner)
    assert graph.is_scope_balanced()


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("mode", ["defered", "", 9, -1, None, 1.0])
def test_an_unknown_sync_mode(p: BrickProfiler, mode: Any) -> None:
    for call in (lambda: BrickProfiler(sync_mode=mode), lambda: p.set_sync_mode(mode)):
        with pytest.raises(UsageError, match="IMMEDIATE, PER_LAYER, DEFERRED, NONE") as caught:
            call()
        assert repr(mode) in str(caught.value)
    assert p.sync_mode is SyncMode.DEFERRED


@pytest.mark.parametrize("device", ["TPU", "", "cuda:x", "CPU:1", "NULL:2", "CUDA:-1", None, 0])
def test_an_unknown_device(device: Any) -> None:
    with pytest.raises(DeviceError, match=r"expected (CPU|NULL)") as caught:
        BrickProfiler(device=device)
    assert repr(device) in str(caught.value)


def test_a_stream_belongs_to_a_device_with_streams() -> None:
    for device in ("CPU", "NULL"):
        with pytest.raises(DeviceError, match=r"no streams; leave stream= out, or use device="):
            BrickProfiler(device=device, stream=7)


@pytest.mark.parametrize("sampling", [3, "all", (1, 2)])
def test_sampling_is_a_sampling(p: BrickProfiler, sampling: Any) -> None:
    for call in (lambda: BrickProfiler(sampling=sampling), lambda: p.set_sampling(sampling)):
        with pytest.raises(UsageError, match=r"expected Sampling\(steps=, layers=\), got"):
            call()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, 2**31])
def test_sampling_counts_from_one(value: Any) -> None:
    for options in ({"steps": value}, {"layers": value}):
        with pytest.raises(UsageError, match=r"from 1 on, got"):
            Sampling(**options)


@pytest.mark.parametrize("brick", [31, -1, 2**70, BrickId(99)])
def test_an_unknown_brick_id(p: BrickProfiler, brick: Any) -> None:
    for call in (p.brick, p.start_brick, p.mark, lambda b: p.record_elapsed(b, 1)):
        with pytest.raises(UsageError, match="ids go from 0 to 30") as caught:
            call(brick)
        assert repr(brick) in str(caught.value)
    for call in (p.brick_stats, p.profile().brick):
        with pytest.raises(UsageError, match="from 0 to 30"):
            call(brick)


def test_a_bad_deferred_span_is_refused_where_it_is_made(p: BrickProfiler) -> None:
    p.record_deferred(BrickId.RMS_NORM, 0)
    for brick in (BrickId(99), "", None):
        with pytest.raises(UsageError):
            p.record_deferred(brick, 0)  # type: ignore[arg-type]
    p.record_deferred(BrickId.LM_HEAD, 0)
    p.finalize(10)
    assert p.brick_stats(BrickId.RMS_NORM).total_ns == 10
    assert p.brick_stats(BrickId.LM_HEAD).total_ns == 10


@pytest.mark.parametrize("brick", [None, 3.5, b"RmsNorm", ("RmsNorm",)])
def test_a_brick_is_an_id_or_a_name(p: BrickProfiler, brick: Any) -> None:
    for call in (p.brick, p.start):
        with pytest.raises(UsageError, match=f"expected int or str, got {type(brick).__name__}"):
            call(brick)


@pytest.mark.parametrize("name", ["", "x" * 1025])
def test_a_name_has_a_length(p: BrickProfiler, name: str) -> None:
    with pytest.raises(UsageError, match=f"1 to 1024 bytes, this one has {len(name)}"):
        p.brick(name)


@pytest.mark.parametrize("layer", [-1, 1.5, "0", 2**20 + 1, 2**70])
def test_a_bad_layer(p: BrickProfiler, layer: Any) -> None:
    for call in (
        lambda: p.brick("own", layer=layer),
        lambda: p.start("own", layer=layer),
        lambda: p.start("own", layer),
        lambda: p.mark("own", layer=layer),
        lambda: p.record_elapsed("own", 1, layer=layer),
    ):
        with pytest.raises(CountError, match=r"layer: expected a whole number from 0 to 1048576"):
            call()
    assert p.stats("own") is None


@pytest.mark.parametrize("phase", [None, 3, b"decode"])
def test_a_phase_is_a_name(p: BrickProfiler, phase: Any) -> None:
    with pytest.raises(UsageError, match="phase: expected a str"):
        p.step(phase=phase)


def test_too_many_phases(p: BrickProfiler) -> None:
    for number in range(15):
        with p.step(tokens=1, phase=f"phase {number}"):
            pass
    with pytest.raises(UsageError, match="at most 15 phases apart; use a few fixed names"):
        p.step(tokens=1, phase="one more").__enter__()
    with p.step(tokens=1, phase="phase 3"):
        pass
    assert p.total_tokens() == 16


@pytest.mark.parametrize("level", [3, -1, "macro", None, [0]])
def test_an_unknown_tile_level(p: BrickProfiler, level: Any) -> None:
    for call in (lambda: p.tiles.start(level), lambda: p.tiles.record(level, 1)):
        with pytest.raises(UsageError, match=r"level: expected .* 0 to 2"):
            call()


def test_unknown_and_missing_arguments(p: BrickProfiler) -> None:
    timer = p.start("own")
    for call in (
        lambda: p.brick("own", layers=3),
        lambda: p.start("own", elements=3),
        lambda: p.stop(timer, bytes=3),
        lambda: p.mark("own", elements=3),
        lambda: p.tiles.start(0, rows=3),
        lambda: p.tiles.stop(timer, gflops=3),
    ):
        with pytest.raises(UsageError):
            call()
    for short in (p.brick, p.start, p.stop, p.tiles.start, p.tiles.stop):
        with pytest.raises(UsageError, match="takes"):
            short()
    with pytest.raises(UsageError, match="takes"):
        p.mark("own", 1, 2)
    p.stop(timer)


@pytest.mark.parametrize("name", [None, 3])
def test_a_profiler_has_a_name(name: Any) -> None:
    with pytest.raises(UsageError, match="name: expected a str"):
        BrickProfiler(name)


@pytest.mark.parametrize("thing", [3, "RmsNorm", None])
def test_only_functions_are_decorated(p: BrickProfiler, thing: Any) -> None:
    with pytest.raises(UsageError, match="expected a callable, got"):
        p.brick("own")(thing)
    with pytest.raises(UsageError, match="one function"):
        p.brick("own")(elements=3)


@pytest.mark.parametrize("rank", ["", "x", "-1", "1.5", "99999999999"])
def test_a_rank_that_is_none_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    with BrickProfiler(enabled=True, path=tmp_path / "run"):
        pass
    assert bl.Run.open(tmp_path / "run").parts[0].rank == 0


def test_captures_need_cuda(p: BrickProfiler) -> None:
    with pytest.raises(UsageError, match="CUDA:n"), p.capture():
        pass


# ------------------------------------------------------------------------------------------ the run


def test_an_existing_path_is_refused(tmp_path: Path) -> None:
    with BrickProfiler(enabled=True, device="NULL", path=tmp_path / "run") as first:
        first.record_elapsed("a", 5)
    with pytest.raises(RunExists, match=r"overwrite=True \(--force") as caught:
        BrickProfiler(enabled=True, device="NULL", path=tmp_path / "run")
    assert str(tmp_path / "run") in str(caught.value)
    assert survives_pickling(caught.value)
    assert bl.Profile.from_run(bl.Run.open(tmp_path / "run")).total_ns == 5


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_is_no_run_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "thesis"
    if kind == "directory":
        target.mkdir()
        (target / "chapter").write_text("1")
    elif kind == "file":
        target.write_text("1")
    else:
        target.symlink_to(tmp_path / "nowhere")
    if kind == "link":
        BrickProfiler(enabled=True, device="NULL", path=target, overwrite=True).close()
        assert target.is_symlink()
        return
    with pytest.raises(RunExists, match="choose another path"):
        BrickProfiler(enabled=True, device="NULL", path=target, overwrite=True)
    assert (target / "chapter" if kind == "directory" else target).read_text() == "1"


def test_a_path_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="path"):
        BrickProfiler(enabled=True, device="NULL", path=tmp_path / "file" / "run")


def test_there_is_nothing_to_save(p: BrickProfiler, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"call save\(\) before close\(\), or give path="):
        BrickProfiler().save(tmp_path / "run")
    other = BrickProfiler(enabled=True, device="NULL")
    other.close()
    with pytest.raises(UsageError, match="nothing to save"):
        other.save(tmp_path / "run")


def test_a_device_that_is_absent_leaves_no_run_behind(tmp_path: Path) -> None:
    from brickline import _core

    if _core.cuda_driver()["devices"]:
        pytest.skip("there is a CUDA device here")
    with pytest.raises(DeviceError, match="CUDA"):
        BrickProfiler(enabled=True, device="CUDA:0", path=tmp_path / "run")
    assert not (tmp_path / "run").exists()


FULL_DISK = """
import resource, sys, warnings
import brickline as bl

p = bl.BrickProfiler("full", enabled=True, device="NULL", path=sys.argv[1])
with p.brick("before"):
    p.advance(5)
p.total_ns()
(spool,) = (p.path / "spool").iterdir()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (spool.stat().st_size + int(sys.argv[2]), hard))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for number in range(20_000):
        with p.brick(f"brick {number}", layer=number % 7):
            p.advance(1)
print("the program goes on")
for warning in caught:
    print(warning.category.__name__, warning.message)
print("before", p.brick_stats("before").total_ns)
try:
    p.close()
except bl.BricklineError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("room", [0, 30_000, 300_000])
def test_a_full_disk_ends_the_recording_and_not_the_program(tmp_path: Path, room: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path / "run", str(room)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "the program goes on" in done.stdout
    assert "RuntimeWarning brickline stopped recording" in done.stdout
    assert done.stdout.count("RuntimeWarning") == 1
    assert "free some space" in done.stdout
    assert "before 5" in done.stdout
    assert "RunError the disk of" in done.stdout
    profile = bl.Profile.from_run(bl.Run.open(tmp_path / "run"))
    before = profile.brick("before")
    assert before is not None
    assert before.total_ns == 5
    recorded = {row.name for row in profile.bricks}
    assert {f"brick {number}" for number in range(20)} <= recorded


def test_a_full_disk_at_the_start(tmp_path: Path) -> None:
    code = """
import resource, sys
import brickline as bl
from brickline.measurement_cost import entry_costs
entry_costs()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    bl.BrickProfiler("full", enabled=True, device="NULL", path=sys.argv[1])
except bl.BricklineError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("RunError")
    assert "free some space" in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_budget_with_a_typo() -> None:
    with pytest.raises(BudgetError, match="categories") as caught:
        parse_budgets("[category]\nNorm = 9.0\n")
    assert survives_pickling(caught.value)


# --------------------------------------------------------------------------------------- the errors


TREE = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, BricklineError)
]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_is_documented_and_survives_pickling(kind: type[BricklineError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")
    assert (kind.__doc__ or "").endswith(".")
    assert survives_pickling(kind("expected 1, got 2 - at here; do this"))


def test_a_mistake_and_a_bug_are_different_classes() -> None:
    assert not issubclass(InternalError, UsageError)
    assert not issubclass(UsageError, InternalError)
