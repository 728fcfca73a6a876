"""BrickProfiler on a clock that moves only when told to, so that every figure is exact."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import brickline as bl
from brickline import (
    BrickCategory,
    BrickId,
    BrickProfiler,
    Run,
    Sampling,
    SyncMode,
    TileLevel,
)
from brickline.abi import RecordFlag
from brickline.errors import CountError, RunExists, UsageError
from brickline.graph import EdgeKind, ExecutionGraph, NodeKind, TransferDirection


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps runs without a path out of the user's state directory."""
    directory = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    monkeypatch.delenv("BRICKLINE_RUN", raising=False)
    return directory


Make = Callable[..., BrickProfiler]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes enabled profilers on device NULL and closes them."""
    made: list[BrickProfiler] = []

    def profiler(**options: Any) -> BrickProfiler:
        made.append(BrickProfiler("test", **({"enabled": True, "device": "NULL"} | options)))
        return made[-1]

    yield profiler
    for each in made:
        each.close()


@pytest.fixture
def p(make: Make) -> BrickProfiler:
    return make()


def spend(p: BrickProfiler, brick: BrickId | str, ns: int, **where: Any) -> None:
    with p.brick(brick, **where):
        p.advance(ns)


# ----------------------------------------------------------------------------------- start and stop


def test_start_and_stop_by_id(p: BrickProfiler) -> None:
    timer = p.start_brick(BrickId.RMS_NORM)
    p.advance(1500)
    p.stop_brick(timer, 64)
    stats = p.brick_stats(BrickId.RMS_NORM)
    assert (stats.count, stats.timed, stats.total_ns, stats.total_elements) == (1, 1, 1500, 64)
    assert (stats.name, stats.brick, stats.category) == ("RmsNorm", BrickId.RMS_NORM, 0)


def test_elements_are_one_unless_given(p: BrickProfiler) -> None:
    p.stop_brick(p.start_brick(BrickId.RMS_NORM))
    p.stop(p.start("RmsNorm"), elements=0)
    p.stop(p.start("RmsNorm", layer=None), 5)
    assert p.brick_stats(BrickId.RMS_NORM).total_elements == 6


@pytest.mark.parametrize("name", ["QkvProjection", "Qkv"])
def test_a_known_name_or_alias_goes_to_its_id(p: BrickProfiler, name: str) -> None:
    timer = p.start(name)
    p.advance(7)
    p.stop(timer, 1)
    assert p.brick_stats(BrickId.QKV_PROJECTION).total_ns == 7
    assert p.brick_stats(name) == p.brick_stats(2) == p.stats(name)
    assert [row.name for row in p.all_brick_stats()] == ["QkvProjection"]


def test_any_other_name_is_a_dynamic_brick_under_other(p: BrickProfiler) -> None:
    timer = p.start("my own brick: Ω")
    p.advance(7)
    p.stop(timer, 3)
    (row,) = p.all_brick_stats()
    assert (row.name, row.brick, row.category) == ("my own brick: Ω", None, BrickCategory.OTHER)
    assert p.category_stats()[BrickCategory.OTHER].total_ns == 7


def test_a_brick_that_never_ran_has_no_count(p: BrickProfiler) -> None:
    assert p.brick_stats(BrickId.LM_HEAD).count == 0
    assert p.brick_stats("Head").category is BrickCategory.OTHER
    assert p.brick_stats("unheard of").count == 0
    assert p.stats("LmHead") is None
    assert p.all_brick_stats() == []
    assert (p.total_ns(), p.total_elements(), p.total_throughput()) == (0, 0, 0.0)


def test_the_facade_and_its_rooms_are_the_same_calls(p: BrickProfiler) -> None:
    timer = p.timers.start_brick(BrickId.RMS_NORM)
    p.advance(4)
    p.timers.stop_brick(timer, 1)
    with p.timers.brick("RmsNorm"):
        p.advance(6)
    p.timers.stop(p.timers.start("RmsNorm"))
    assert p.brick_stats("RmsNorm").total_ns == 10
    assert p.brick_stats("RmsNorm").count == 3


def test_a_timer_that_is_stopped_after_its_brick_is_disabled_leaves_nothing(
    p: BrickProfiler,
) -> None:
    timer = p.start("A")
    p.disable()
    p.stop(timer)
    p.enable()
    assert p.stats("A") is None


# ------------------------------------------------------------------------------------------ handles


def test_one_handle_for_one_brick_and_layer(p: BrickProfiler) -> None:
    assert p.brick(BrickId.RMS_NORM) is p.brick("RmsNorm") is p.brick(0)
    assert p.brick("RmsNorm", layer=3) is p.brick("RmsNorm", 3)
    assert p.brick("RmsNorm", layer=3) is not p.brick("RmsNorm", layer=4)
    assert p.brick("RmsNorm", layer=None) is p.brick("RmsNorm")
    assert p.brick("own") is p.brick("own")
    work = p.brick("RmsNorm", layer=3, elements=7, bytes=8, flops=9.0)
    assert work is p.brick("RmsNorm", layer=3, elements=7, bytes=8, flops=9)
    assert work is not p.brick("RmsNorm", layer=3)
    assert (work.name, work.layer, work.elements) == ("RmsNorm", 3, 7)
    assert (work.bytes, work.flops, work.profiler) == (8, 9.0, p)
    assert repr(work) == "<brick RmsNorm, layer 3>"


def test_a_kept_handle_and_an_inline_one_record_the_same(p: BrickProfiler) -> None:
    kept = p.brick("Activation", layer=1, elements=10)
    with kept as entered:
        p.advance(5)
    assert entered is kept
    with p.brick("SiLU", layer=1, elements=10):
        p.advance(7)
    stats = p.brick_stats("Activation")
    assert (stats.count, stats.total_ns, stats.total_elements) == (2, 12, 20)


def test_a_handle_made_before_enabling_records_afterwards(make: Make) -> None:
    p = make(enabled=False)
    handle = p.brick("RmsNorm", layer=0)
    with handle:
        p.advance(5)
    p.enable()
    with handle:
        p.advance(7)
    assert p.brick_stats("RmsNorm").total_ns == 7


def test_declared_work_that_changes_with_every_entry_is_summed(p: BrickProfiler) -> None:
    for length in range(1, 3001):  # more than the handles that are kept
        with p.brick("KvCache", elements=length, bytes=2 * length, flops=float(length)):
            p.advance(1)
    stats = p.brick_stats("KvCache")
    total = 3000 * 3001 // 2
    assert (stats.count, stats.total_elements, stats.total_bytes) == (3000, total, 2 * total)
    assert stats.total_flops == total
    assert stats.gflops == pytest.approx(total / 3000)
    assert stats.arithmetic_intensity == pytest.approx(0.5)


def test_a_brick_left_by_an_exception_is_recorded_and_the_exception_passes(
    p: BrickProfiler,
) -> None:
    def fail() -> None:
        with p.brick("A"):
            p.advance(3)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert p.brick_stats("A").total_ns == 3


# ------------------------------------------------------------------------------------------ nesting


def test_nested_bricks_have_inclusive_and_exclusive_time(p: BrickProfiler) -> None:
    with p.brick("Outer"):
        p.advance(10)
        spend(p, "Inner", 20)
        p.advance(30)
        with p.brick("Inner"):
            p.advance(40)
            spend(p, "Innermost", 50)
    outer, inner = p.brick_stats("Outer"), p.brick_stats("Inner")
    assert (outer.total_ns, outer.exclusive_ns) == (150, 40)
    assert (inner.total_ns, inner.exclusive_ns, inner.count) == (110, 60, 2)
    assert p.brick_stats("Innermost").exclusive_ns == 50
    profile = p.profile()
    assert profile.exclusive_ns == 150
    assert profile.total_ns == 150 + 110 + 50
    assert sum(profile.share(row) for row in profile.bricks) == pytest.approx(1.0)


def test_a_brick_may_hold_itself(p: BrickProfiler) -> None:
    with p.brick("A"):
        p.advance(1)
        with p.brick("A"):
            p.advance(2)
    stats = p.brick_stats("A")
    assert (stats.count, stats.total_ns, stats.exclusive_ns) == (2, 5, 3)


def test_timers_and_blocks_nest_in_each_other(p: BrickProfiler) -> None:
    timer = p.start("Timer")
    with p.brick("Block"):
        inner = p.start("InnerTimer")
        p.advance(5)
        p.stop(inner)
    p.advance(2)
    p.stop(timer)
    assert p.brick_stats("Timer").exclusive_ns == 2
    assert p.brick_stats("Block").exclusive_ns == 0
    assert p.brick_stats("InnerTimer").exclusive_ns == 5


def test_bricks_deeper_than_the_stack_are_counted_and_not_timed(p: BrickProfiler) -> None:
    names = [f"depth {depth}" for depth in range(70)]
    for name in names:
        p.brick(name).__enter__()
        p.advance(1)
    for name in reversed(names):
        p.brick(name).__exit__(None, None, None)
    spend(p, "after", 9)
    rows = {row.name: row for row in p.all_brick_stats()}
    assert all(rows[name].count == 1 for name in names)
    assert [name for name in names if not rows[name].timed] == names[64:]
    assert rows["depth 0"].total_ns == 70
    assert rows["after"].exclusive_ns == 9


# --------------------------------------------------------------------------------------------- mark


def test_marks_are_contiguous(p: BrickProfiler) -> None:
    p.mark("Embedding")
    p.advance(5)
    p.mark(BrickId.RMS_NORM, layer=0)
    p.advance(7)
    p.mark("LmHead", 1)
    p.advance(11)
    p.mark(None)
    p.advance(1000)
    p.mark()
    rows = {row.name: row for row in p.profile().brick_layers}
    assert {name: row.total_ns for name, row in rows.items()} == {
        "Embedding": 5,
        "RmsNorm": 7,
        "LmHead": 11,
    }
    assert [rows[name].layer for name in ("Embedding", "RmsNorm", "LmHead")] == [None, 0, 1]


def test_a_handle_marks_with_what_it_declares(p: BrickProfiler) -> None:
    norm = p.brick("RmsNorm", layer=2)
    gate = p.brick("Gate", layer=2, elements=7, bytes=64, flops=128.0)
    for _ in range(3):
        with p.step(tokens=1):
            norm.mark()
            p.advance(10)
            gate.mark()
            p.advance(30)
    rows = {row.name: row for row in p.all_brick_stats()}
    assert (rows["RmsNorm"].count, rows["RmsNorm"].total_ns) == (3, 30)
    row = rows["GateProjection"]
    assert (row.count, row.total_ns, row.total_elements) == (3, 90, 21)
    assert (row.total_bytes, row.total_flops) == (192, 384.0)


def test_a_marked_handle_outlives_its_names(p: BrickProfiler) -> None:
    """The stack alone holds it: other handles with work push it out of the cache."""
    p.brick("Kept", elements=3, bytes=5).mark()
    for number in range(5000):
        p.brick("Other", elements=number, bytes=number)
    gc.collect()
    p.advance(4)
    p.mark()
    stats = p.brick_stats("Kept")
    assert (stats.total_elements, stats.total_bytes, stats.total_ns) == (3, 5, 4)


def test_a_handle_may_die_between_its_look_up_and_its_entry(p: BrickProfiler) -> None:
    """As in `with p.brick(...)` when another thread takes its place in the cache meanwhile."""
    for number in range(200):
        handle = p.brick("Dying", elements=3, bytes=number + 1)
        enter, leave = handle.__enter__, handle.__exit__
        del handle
        for other in range(1200):
            p.brick("Other", elements=other, bytes=number + 5)
        entered = enter()
        p.advance(1)
        assert (entered.name, entered.bytes) == ("Dying", number + 1)
        leave(None, None, None)
        if number % 2:
            del leave, enter  # whichever goes last
        assert entered.elements == 3
    stats = p.brick_stats("Dying")
    assert (stats.count, stats.total_ns) == (200, 200)
    gc.collect()


def test_reset_forgets_a_marked_handle(p: BrickProfiler) -> None:
    handle = p.brick("Kept", elements=3)
    before = sys.getrefcount(handle)
    handle.mark()
    p.reset()
    assert sys.getrefcount(handle) <= before


def test_start_and_stop_of_a_handle_are_a_block(p: BrickProfiler) -> None:
    outer, inner = p.brick("Outer", elements=2), p.brick("Inner")
    outer.start()
    p.advance(5)
    with inner:
        p.advance(7)
    outer.stop()
    outer.start()
    inner.start()
    outer.stop()  # out of order
    inner.stop()
    stats = p.brick_stats("Outer")
    assert (stats.count, stats.total_ns, stats.exclusive_ns) == (2, 12, 5)
    assert (stats.total_elements, stats.out_of_order) == (4, 1)
    assert p.brick_stats("Inner").out_of_order == 1


def test_leaving_what_encloses_a_mark_ends_it(p: BrickProfiler) -> None:
    with p.brick("Outer"):
        p.advance(1)
        p.mark("Marked")
        p.advance(2)
    p.advance(100)
    assert p.brick_stats("Marked").total_ns == 2
    assert (p.brick_stats("Outer").total_ns, p.brick_stats("Outer").exclusive_ns) == (3, 1)
    with p.step(tokens=1):
        p.mark("Marked")
        p.advance(3)
    assert p.brick_stats("Marked").total_ns == 5
    timer = p.start("Timer")
    p.mark("Marked")
    p.advance(4)
    p.stop(timer)
    assert p.brick_stats("Marked").total_ns == 9


def test_a_brick_inside_a_mark_is_nested_in_it(p: BrickProfiler) -> None:
    p.mark("Marked")
    p.advance(2)
    spend(p, "Inner", 3)
    p.mark(None)
    assert p.brick_stats("Marked").exclusive_ns == 2
    assert p.brick_stats("Marked").total_ns == 5


# ---------------------------------------------------------------------------------------- decorator


def test_a_decorated_function_is_one_entry_per_call(p: BrickProfiler) -> None:
    @p.brick("Work", layer=2, elements=3)
    def work(a: int, *, b: int = 0) -> int:
        """Adds."""
        p.advance(5)
        return a + b

    assert work(1, b=2) == 3
    assert work(1) == 1
    assert (work.__name__, work.__doc__, work.__module__) == ("work", "Adds.", __name__)
    assert work.__wrapped__(4) == 4  # type: ignore[attr-defined]
    assert str(inspect.signature(work)) == "(a: 'int', *, b: 'int' = 0) -> 'int'"
    stats = p.brick_stats("Work")
    assert (stats.count, stats.total_ns, stats.total_elements) == (2, 10, 6)


def test_a_decorated_function_raises_what_it_raises(p: BrickProfiler) -> None:
    @p.brick("Work")
    def fail() -> None:
        p.advance(2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert p.brick_stats("Work").total_ns == 2


def test_methods_class_methods_and_static_methods(p: BrickProfiler) -> None:
    class Model:
        @p.brick("Method")
        def forward(self, x: int) -> tuple[Model, int]:
            return self, x

        @classmethod
        @p.brick("ClassMethod")
        def make(cls) -> type[Model]:
            return cls

        @staticmethod
        @p.brick("StaticMethod")
        def double(x: int) -> int:
            return 2 * x

    model = Model()
    assert model.forward(3) == (model, 3)
    assert Model.forward(model, 3) == (model, 3)
    assert Model.make() is Model
    assert model.double(4) == 8
    counts = {row.name: row.count for row in p.all_brick_stats()}
    assert counts == {"Method": 2, "ClassMethod": 1, "StaticMethod": 1}


def test_a_coroutine_is_timed_over_its_awaits(p: BrickProfiler) -> None:
    @p.brick("Work")
    async def work(x: int) -> int:
        p.advance(1)
        await asyncio.sleep(0)
        p.advance(2)
        return x

    assert inspect.iscoroutinefunction(work)
    assert asyncio.run(work(7)) == 7
    assert work.__name__ == "work"
    stats = p.brick_stats("Work")
    assert (stats.total_ns, stats.exclusive_ns, stats.out_of_order) == (3, 3, 0)


def test_a_generator_is_timed_from_its_first_value_to_its_last(p: BrickProfiler) -> None:
    @p.brick("Work")
    def work(n: int) -> Iterator[int]:
        for i in range(n):
            p.advance(1)
            yield i
        return "done"  # type: ignore[return-value]

    iterator = work(3)
    p.advance(1000)
    assert p.stats("Work") is None
    assert list(iterator) == [0, 1, 2]
    assert p.brick_stats("Work").total_ns == 3
    assert inspect.isgeneratorfunction(work)

    @p.brick("Async")
    async def agen() -> Any:
        p.advance(2)
        yield 1

    async def consume() -> list[int]:
        return [value async for value in agen()]

    assert asyncio.run(consume()) == [1]
    assert p.brick_stats("Async").total_ns == 2


def test_a_decorated_function_of_a_disabled_profiler_just_runs(make: Make) -> None:
    p = make(enabled=False)

    @p.brick("Work")
    def work() -> int:
        return 3

    assert work() == 3
    p.enable()
    assert work() == 3
    assert p.brick_stats("Work").count == 1


# ----------------------------------------------------------------------------------- supplied spans


def test_record_elapsed_takes_nanoseconds_or_a_timedelta(p: BrickProfiler) -> None:
    p.record_elapsed(BrickId.LM_HEAD, 1_500, 32)
    p.record_elapsed("LmHead", timedelta(microseconds=2), elements=32, layer=1)
    p.record_elapsed("own", np.int64(9))
    stats = p.brick_stats("LmHead")
    assert (stats.count, stats.total_ns, stats.total_elements) == (2, 3_500, 64)
    assert (stats.exclusive_ns, stats.exclusive_count, stats.approximate) == (0, 0, 0)
    assert p.brick_stats("own").total_ns == 9


def test_record_elapsed_with_bytes_and_cycles(p: BrickProfiler) -> None:
    work = {"bytes_in": 4096, "bytes_out": 1024, "flops": 8192.0}
    p.record_elapsed("FormatConvert", 1000, 100, cycles=3000, **work)
    p.record_elapsed("FormatConvert", 3000, 100, cycles=5000, **work)
    p.record_elapsed("FormatConvert", 1000, 100)
    stats = p.brick_stats("FormatConvert")
    assert (stats.total_bytes, stats.total_compressed_bytes) == (8192, 2048)
    assert stats.compression_ratio == 4.0
    assert stats.throughput_gbps == pytest.approx(8192 / 5000)
    assert stats.total_flops == 16384.0
    assert (stats.total_cycles, stats.min_cycles, stats.max_cycles) == (8000, 3000, 5000)
    assert stats.avg_cycles == 4000
    assert stats.cycles_per_element == pytest.approx(8000 / 300)


def test_large_counts_survive(p: BrickProfiler) -> None:
    most = 2**40 - 1
    p.record_elapsed("A", 2**62, most, bytes_in=2**60, bytes_out=2**60, cycles=2**48 - 1)
    spend(p, "B", 1, elements=most, bytes=2**60, flops=1e30, layer=2**20)
    a, b = p.brick_stats("A"), p.brick_stats("B")
    assert (a.total_ns, a.total_elements, a.total_cycles) == (2**62, most, 2**48 - 1)
    assert (a.total_bytes, a.total_compressed_bytes) == (2**60, 2**60)
    assert (b.total_elements, b.total_bytes, b.total_flops) == (most, 2**60, 1e30)
    assert p.profile().brick_layers[-1].layer in (2**20, None)


def test_deferred_spans_keep_the_published_arithmetic(p: BrickProfiler) -> None:
    """Three kernels launched at 0, 5 and 10 µs, one wait at 310 µs."""
    with p.step(tokens=1, phase="decode"):
        p.record_deferred(BrickId.RMS_NORM, 0, 1)
        p.record_deferred(BrickId.QKV_PROJECTION, 5_000, 2)
        p.record_deferred_dynamic("own", 10_000, 3)
        assert (p.pending_count(), p.has_pending()) == (3, True)
        assert p.all_brick_stats() == []
        spend(p, "LmHead", 400)
        p.advance(600)
        p.finalize(310_000)
    assert (p.pending_count(), p.has_pending()) == (0, False)
    totals = {row.name: row.total_ns for row in p.all_brick_stats()}
    supplied = {"RmsNorm": 310_000, "QkvProjection": 305_000, "own": 300_000}
    assert totals == supplied | {"LmHead": 400}
    for name in supplied:
        stats = p.brick_stats(name)
        assert (stats.approximate, stats.exclusive_ns, stats.exclusive_count) == (1, 0, 0)
    profile = p.profile()
    assert profile.coverage == pytest.approx(0.4), "supplied spans are out of coverage"
    assert profile.recording.approximate == 3
    p.finalize(999_000)
    assert p.total_ns() == 915_400, "a second call does nothing"


def test_a_deferred_start_after_the_end_gives_zero(p: BrickProfiler) -> None:
    p.record_deferred(BrickId.RMS_NORM, 500)
    p.finalize(100)
    stats = p.brick_stats(BrickId.RMS_NORM)
    assert (stats.count, stats.total_ns, stats.min_ns) == (1, 0, 0)


def test_the_epoch_counts_from_its_last_reset(p: BrickProfiler) -> None:
    start = p.elapsed_ns()
    p.advance(50)
    assert p.elapsed_ns() - start == 50
    p.reset_epoch()
    assert p.elapsed_ns() == 0
    p.record_deferred(BrickId.RMS_NORM, p.elapsed_ns())
    p.advance(30)
    p.finalize(p.elapsed_ns())
    assert p.total_ns() == 30


def test_a_span_that_comes_while_others_are_finalized_waits(p: BrickProfiler) -> None:
    class Late:
        """A start that is read while another thread finalizes."""

        def __int__(self) -> int:
            p.finalize(100)
            return 40

    p.record_deferred(BrickId.RMS_NORM, Late())  # type: ignore[arg-type]
    assert p.pending_count() == 1
    p.finalize(100)
    assert p.brick_stats(BrickId.RMS_NORM).total_ns == 60


def test_pending_spans_wait_while_the_profiler_is_disabled(p: BrickProfiler) -> None:
    p.record_deferred(BrickId.RMS_NORM, 0)
    p.disable()
    p.record_deferred(BrickId.RMS_NORM, 0)
    p.finalize(10)
    assert p.pending_count() == 1
    p.enable()
    p.finalize(10)
    assert p.brick_stats(BrickId.RMS_NORM).total_ns == 10


# --------------------------------------------------------------------------------- steps and phases


def test_tokens_are_counted_by_steps_and_elements_by_bricks(p: BrickProfiler) -> None:
    with p.step(tokens=128, phase="prefill"):
        spend(p, "RmsNorm", 1000, elements=128)
    for _ in range(4):
        with p.step(tokens=1, phase="decode"):
            spend(p, "RmsNorm", 100)
            spend(p, "LmHead", 300)
            p.advance(100)
    assert p.total_tokens() == 132
    assert p.total_elements() == 136
    profile = p.profile()
    assert {phase: row.tokens for phase, row in profile.steps.items()} == {
        "prefill": 128,
        "decode": 4,
    }
    assert profile.steps["decode"].wall_ns == 2000
    assert profile.us_per_token == pytest.approx(0.5)
    assert p.total_throughput() == pytest.approx(136 / 2600 * 1e9)
    by_phase = {(row.name, row.phase): row.total_ns for row in profile.brick_phases}
    assert by_phase == {
        ("RmsNorm", "prefill"): 1000,
        ("RmsNorm", "decode"): 400,
        ("LmHead", "decode"): 1200,
    }
    assert profile.coverage == pytest.approx(2600 / 3000)


def test_a_step_may_learn_its_tokens_before_it_ends(p: BrickProfiler) -> None:
    with p.step(tokens=8, phase="decode") as step:
        step.tokens = 5  # speculative decoding: three were refused
    assert p.total_tokens() == 5


def test_a_step_left_by_an_exception_is_counted(p: BrickProfiler) -> None:
    def fail() -> None:
        with p.step(tokens=2), p.brick("A"):
            p.advance(3)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert p.total_tokens() == 2
    assert p.profile().steps[""].wall_ns == 3


def test_steps_may_nest_and_give_the_phase_back(p: BrickProfiler) -> None:
    with p.step(phase="decode"):
        with p.step(phase="draft"):
            spend(p, "A", 1)
        spend(p, "A", 2)
    spend(p, "A", 4)
    by_phase = {row.phase: row.total_ns for row in p.profile().brick_phases}
    assert by_phase == {"draft": 1, "decode": 2, "": 4}


def test_layers_are_kept_apart(p: BrickProfiler) -> None:
    for layer in (0, 1, 1, 7):
        spend(p, "RmsNorm", 10 + layer, layer=layer)
    spend(p, "RmsNorm", 1)
    profile = p.profile()
    rows = {row.layer: (row.count, row.total_ns) for row in profile.brick_layers}
    assert rows == {None: (1, 1), 0: (1, 10), 1: (2, 22), 7: (1, 17)}
    assert {layer: row.total_ns for layer, row in profile.layers.items() if layer >= 0} == {
        0: 10,
        1: 22,
        7: 17,
    }


def test_categories_are_indexed_by_category(p: BrickProfiler) -> None:
    spend(p, "RmsNorm", 100)
    spend(p, "LayerNorm", 50, elements=4)
    spend(p, "Gate", 250)
    spend(p, "own", 600)
    stats = p.category_stats()
    assert len(stats) == 7
    norm = stats[BrickCategory.NORM]
    assert (norm.count, norm.total_ns, norm.total_elements) == (2, 150, 5)
    assert norm.avg_us == pytest.approx(0.075)
    assert norm.percentage(p.total_ns()) == pytest.approx(15.0)
    assert norm.percentage(0) == 0.0
    assert stats[BrickCategory.FFN].total_ns == 250
    assert stats[BrickCategory.OTHER].total_ns == 600
    assert stats[BrickCategory.SOLVER].count == 0
    assert [row.name for row in stats] == [category.label for category in BrickCategory]
    assert p.category_stats() == stats, "in order, and by name where nothing was recorded"
    nothing = BrickProfiler().category_stats()
    assert [(row.name, row.count, row.avg_us) for row in nothing] == [
        (category.label, 0, 0) for category in BrickCategory
    ]


# --------------------------------------------------------------------------------------- statistics


def test_statistics_of_known_durations(p: BrickProfiler) -> None:
    durations = [1000, 2000, 2000, 4000, 11000]
    for ns in durations:
        spend(p, "A", ns, elements=10)
    stats = p.brick_stats("A")
    assert (stats.min_ns, stats.max_ns, stats.avg_ns) == (1000, 11000, 4000)
    assert (stats.min_us, stats.max_us, stats.avg_us) == (1.0, 11.0, 4.0)
    assert stats.std_ns == pytest.approx(np.std(durations, ddof=1))
    assert stats.p50_ns == pytest.approx(2000, rel=0.045)
    assert stats.p90_ns == pytest.approx(11000, rel=0.045)
    assert stats.p999_ns == pytest.approx(11000, rel=0.045)
    assert stats.throughput == pytest.approx(50 / 20e-6)
    assert stats.tokens_per_sec == stats.throughput


def test_percentiles_of_many_durations_are_within_a_bucket(p: BrickProfiler) -> None:
    durations = np.random.default_rng(7).lognormal(9, 1, 20_000).astype(int)
    handle = p.brick("A")
    for ns in durations.tolist():
        with handle:
            p.advance(ns)
    stats = p.brick_stats("A")
    assert (stats.count, stats.total_ns) == (20_000, durations.sum())
    for q in (0.5, 0.9, 0.99, 0.999):
        exact = np.quantile(durations, q, method="inverted_cdf")
        assert stats.quantile_ns(q) == pytest.approx(exact, rel=0.045)
    assert stats.std_ns == pytest.approx(durations.std(ddof=1), rel=1e-9)


def test_noted_facts(p: BrickProfiler) -> None:
    assert p.l2_cache_hit_rate() is None
    assert not p.is_zero_copy()
    p.set_l2_cache_hit_rate(0.25)
    p.set_l2_cache_hit_rate(0.75)
    p.set_zero_copy(True)
    assert p.l2_cache_hit_rate() == 0.75
    assert p.is_zero_copy()
    assert p.profile().facts == {"l2_cache_hit_rate": 0.75, "zero_copy": 1.0}
    p.set_l2_cache_hit_rate(1.5)
    assert p.l2_cache_hit_rate() == 1.0
    p.set_l2_cache_hit_rate(-1)
    assert p.l2_cache_hit_rate() == 0.0


def test_facts_are_written_into_every_run_of_a_profiler(make: Make) -> None:
    p = make(enabled=False)
    p.set_l2_cache_hit_rate(0.25)
    p.set_zero_copy(True)
    assert (p.l2_cache_hit_rate(), p.is_zero_copy()) == (0.25, True)
    p.enable()
    assert p.profile().facts == {"l2_cache_hit_rate": 0.25, "zero_copy": 1.0}
    p.close()
    p.set_l2_cache_hit_rate(0.5)
    p.enable()
    assert p.profile().facts == {"l2_cache_hit_rate": 0.5, "zero_copy": 1.0}
    p.reset()
    assert (p.l2_cache_hit_rate(), p.is_zero_copy(), dict(p.profile().facts)) == (None, False, {})


# ------------------------------------------------------------------------------ enabling, resetting


def everything(p: BrickProfiler) -> None:
    with p.step(tokens=3, phase="decode"), p.brick("A", layer=1, elements=2, bytes=3, flops=4):
        timer = p.tiles.start(TileLevel.MACRO, 1, 2)
        p.advance(10)
        p.tiles.stop(timer, 5, 6.0, 7)
    p.record_elapsed("B", 5, cycles=9)
    p.mark("C")
    p.advance(1)
    p.mark(None)
    p.record_deferred(BrickId.RMS_NORM, 0)
    p.set_l2_cache_hit_rate(0.5)
    p.set_zero_copy(True)
    p.add_trace(bl.KernelTrace("rope", 0, 0, "NULL"))
    p.graph.record_brick("drawn by hand", timing_ns=5)


def test_reset_resets_everything(make: Make, tmp_path: Path) -> None:
    p = make(graph=True, timeline_steps=2, path=tmp_path / "run")
    everything(p)
    p.advance(100)
    assert len(p.graph) > 0
    p.reset()
    assert p.is_enabled()
    assert p.all_brick_stats() == []
    assert (p.total_ns(), p.total_elements(), p.total_tokens()) == (0, 0, 0)
    assert [row.count for row in p.tiles.all_stats()] == [0, 0, 0]
    assert (p.pending_count(), p.elapsed_ns(), len(p.traces)) == (0, 0, 0)
    assert (p.l2_cache_hit_rate(), p.is_zero_copy()) == (None, False)
    assert len(p.graph) == 0
    profile = p.profile()
    assert (dict(profile.steps), profile.timeline, profile.coverage) == ({}, [], None)
    assert profile.recording.counted == 0
    with p.step(tokens=1, phase="decode"):
        assert p._where()["step"] == 1, "steps are numbered anew"
        spend(p, "A", 7, layer=1)
    assert p.brick_stats("A").total_ns == 7
    p.close()
    run = bl.Run.open(tmp_path / "run")
    assert len(run.parts) == 1
    assert bl.Profile.from_run(run).total_ns == 7


def a_step_of(p: BrickProfiler, *bricks: str) -> None:
    with p.step(phase="decode"):
        for layer in range(2):
            for name in bricks:
                with p.brick("outer", layer=layer), p.brick(name, layer=layer, bytes=8):
                    tile = p.tiles.start(TileLevel.MACRO)
                    p.advance(100)
                    p.tiles.stop(tile)


@pytest.mark.parametrize("folded", [False, True])
def test_one_brick_is_reset_and_the_others_are_not(
    make: Make, tmp_path: Path, folded: bool
) -> None:
    p = make(path=tmp_path / "run", sampling=Sampling(steps=2), timeline_steps=2)
    for _ in range(4):
        a_step_of(p, "mine", "other")
    if folded:
        assert (p.brick_stats("mine").count, p.brick_stats("mine").timed) == (8, 4)
    p.reset_brick("mine")
    assert p.stats("mine") is None
    assert p.brick_stats("mine").count == 0
    others = {row.name: (row.count, row.timed, row.total_ns) for row in p.all_brick_stats()}
    assert others == {"outer": (16, 8, 800), "other": (8, 4, 400)}
    assert p.brick_stats("outer").exclusive_ns == 0, "what was inside was inside"
    assert sum(row.count for row in p.profile().tiles) == 16, "tiles are others'"
    a_step_of(p, "mine")
    p.record_elapsed("mine", 50, layer=1)
    again = p.brick_stats("mine")
    assert (again.count, again.min_ns, again.max_ns) == (3, 50, 100)
    assert again.histogram.count == again.timed == 3
    p.close()
    (row,) = (
        each
        for each in bl.Profile.from_run(Run.open(tmp_path / "run")).bricks
        if each.name == "mine"
    )
    assert (row.count, row.total_ns) == (3, 250)


def test_a_brick_that_is_open_counts_when_it_is_left(p: BrickProfiler) -> None:
    with p.brick(BrickId.RMS_NORM):
        with p.brick(BrickId.RMS_NORM, layer=3):
            p.advance(5)
        p.reset_brick(BrickId.RMS_NORM)
        p.advance(10)
    assert (p.brick_stats("RmsNorm").count, p.brick_stats("RmsNorm").total_ns) == (1, 15)


def test_a_reset_brick_needs_a_brick_and_a_run(make: Make) -> None:
    p = make(enabled=False)
    p.reset_brick("A")
    assert p.path is None
    with pytest.raises(UsageError, match="no brick with id 99"):
        p.reset_brick(99)
    p.enable()
    with p.brick("A"):
        pass
    p.close()
    with pytest.raises(UsageError, match="was closed"):
        p.reset_brick("A")
    assert p.brick_stats("A").count == 1


def test_reset_inside_bricks_and_steps_forgets_them(p: BrickProfiler) -> None:
    with p.step(tokens=9, phase="decode"), p.brick("A"):
        timer = p.start("B")
        p.reset()
        p.advance(10)
        p.stop(timer)
        spend(p, "C", 5)
    spend(p, "D", 6)
    rows = {row.name: (row.total_ns, row.exclusive_ns) for row in p.all_brick_stats()}
    assert rows == {"C": (5, 5), "D": (6, 6)}
    assert p.total_tokens() == 0


def test_a_disabled_profiler_is_a_no_op(make: Make, state: Path) -> None:
    p = make(enabled=False)
    everything_but_facts(p)
    assert not p.is_enabled()
    assert p.path is None
    assert p.all_brick_stats() == []
    assert p.pending_count() == 0
    assert len(p.traces) == 0
    assert not p.profile().enabled
    assert not list(state.rglob("*.spool"))


def everything_but_facts(p: BrickProfiler) -> None:
    with p.step(tokens=3, phase="decode"), p.brick("A", layer=1):
        p.tiles.stop(p.tiles.start(TileLevel.MACRO))
    p.tiles.record(TileLevel.MACRO, 5)
    p.stop_brick(p.start_brick(BrickId.RMS_NORM), 1)
    p.record_elapsed("B", 5)
    p.mark("C")
    p.mark(None)
    p.record_deferred(BrickId.RMS_NORM, 0)
    p.finalize(10)
    p.record_checksum("rope", 0, 0, [1.0])


def test_the_summary_of_a_disabled_profiler_says_how_to_enable_it() -> None:
    text = BrickProfiler().summary()
    assert "disabled" in text
    assert "enabled=True" in text
    assert "enable()" in text
    document = json.loads(BrickProfiler().to_json())
    assert document["enabled"] is False


def test_the_timer_of_a_disabled_profiler_may_be_stopped_anywhere(make: Make) -> None:
    p, q = make(enabled=False), make()
    timer = p.start("A")
    q.stop(timer)
    q.stop(timer)
    p.tiles.stop(timer)
    assert repr(timer) == "<timer of a disabled profiler>"


def test_pauses_lose_only_what_they_touch(p: BrickProfiler) -> None:
    for _ in range(200):  # more than the stack could hold if pauses left anything on it
        spend(p, "kept", 10)
        with p.brick("cut short"):
            p.advance(5)
            p.disable()
        spend(p, "unseen", 7)
        with p.brick("cut short"):
            p.enable()
            p.advance(3)
    rows = {row.name: row for row in p.all_brick_stats()}
    assert set(rows) == {"kept"}
    assert (rows["kept"].timed, rows["kept"].exclusive_ns) == (200, 2000)
    assert p.profile().recording.orphan_exits == 200


def test_a_pause_inside_bricks_leaves_later_exclusive_times_alone(p: BrickProfiler) -> None:
    with p.brick("Outer"):
        spend(p, "Inner", 40)
        p.disable()
    p.enable()
    spend(p, "Next", 100)
    assert p.brick_stats("Inner").total_ns == 40
    assert p.brick_stats("Next").exclusive_ns == 100


# ----------------------------------------------------------------------------------------- sampling


def decode(p: BrickProfiler, steps: int, layers: int = 4) -> None:
    for _ in range(steps):
        with p.step(tokens=1, phase="decode"):
            for layer in range(layers):
                with p.brick("Block", layer=layer, elements=2):
                    p.advance(100)
                    spend(p, "RmsNorm", 900)
            p.advance(400)


def test_sampling_by_steps_counts_all_and_times_some(make: Make) -> None:
    p = make(sampling=Sampling(steps=4))
    decode(p, 10)
    block = p.brick_stats("Block")
    assert (block.count, block.timed) == (40, 12)
    assert (block.total_elements, block.timed_elements) == (80, 24)
    assert (block.total_ns, block.exclusive_ns) == (12_000, 1_200)
    assert block.estimated_total_ns == 40_000
    assert p.total_tokens() == 10
    assert p.profile().coverage == pytest.approx(4000 / 4400)


def test_left_out_steps_count_what_is_declared_in_every_phase(make: Make) -> None:
    p = make(sampling=Sampling(steps=4))
    plain, declared = p.brick("Plain", layer=1), p.brick("Declared", elements=5)
    for number in range(16):
        with p.step(tokens=1, phase="prefill" if number < 4 else "decode"):
            plain.mark()
            with declared:
                pass
            with p.brick("Declared", elements=number):  # other elements of the same brick
                pass
            plain.start()
            plain.stop()
    profile = p.profile()
    rows = {(row.name, row.phase): row for row in profile.brick_phases}
    assert (rows["Plain", "prefill"].count, rows["Plain", "prefill"].timed) == (8, 2)
    assert (rows["Plain", "decode"].count, rows["Plain", "decode"].timed) == (24, 6)
    both = p.brick_stats("Declared")
    assert (both.count, both.timed) == (32, 8)
    assert both.total_elements == 16 * 5 + sum(range(16))


def test_a_brick_around_a_left_out_step_is_timed(make: Make) -> None:
    p = make(sampling=Sampling(steps=2))
    with p.step(tokens=1):
        p.mark("Marked")
        p.advance(1)
        with p.brick("Outer"):
            p.advance(2)
            with p.step(tokens=1), p.brick("Inner"):
                p.advance(3)
    outer, marked = p.brick_stats("Outer"), p.brick_stats("Marked")
    assert (outer.count, outer.timed, outer.total_ns) == (1, 1, 5)
    assert (marked.timed, marked.total_ns) == (1, 6)
    assert (p.brick_stats("Inner").count, p.brick_stats("Inner").timed) == (1, 0)


def test_sampling_by_layers_counts_all_and_times_some(make: Make) -> None:
    p = make(sampling=Sampling(layers=2))
    decode(p, 3)
    block, norm = p.brick_stats("Block"), p.brick_stats("RmsNorm")
    assert (block.count, block.timed) == (12, 6)
    assert (norm.count, norm.timed) == (12, 12), "bricks outside layers are all timed"
    assert block.exclusive_ns == 600, "what an untimed brick held is not taken from the next one"
    assert norm.exclusive_ns == 12 * 900


def test_sampling_outside_steps_times_every_nth_entry(make: Make) -> None:
    p = make(sampling=Sampling(steps=3))
    for _ in range(9):
        spend(p, "A", 10)
    stats = p.brick_stats("A")
    assert (stats.count, stats.timed, stats.total_ns) == (9, 3, 30)


def test_sampling_may_change_while_recording(p: BrickProfiler) -> None:
    decode(p, 2)
    p.set_sampling(Sampling(steps=2))
    decode(p, 4)
    p.set_sampling(Sampling())
    decode(p, 2)
    block = p.brick_stats("Block")
    assert (block.count, block.timed) == (32, 24)
    assert p.sampling == Sampling()


@pytest.mark.parametrize("mode", [*SyncMode, "deferred", "Per-Layer", 0])
def test_every_sync_mode_is_the_host_clock_without_a_device(make: Make, mode: Any) -> None:
    p = make(sync_mode=mode)
    spend(p, "A", 10, layer=0)
    spend(p, "A", 10, layer=1)
    assert p.brick_stats("A").total_ns == 20
    assert p.sync_mode is SyncMode.parse(mode)
    p.set_sync_mode("none")
    assert p.sync_mode is SyncMode.NONE


# ----------------------------------------------------------------------------------------- timeline


def test_a_timeline_has_every_entry_of_the_last_steps(make: Make) -> None:
    p = make(timeline_steps=2)
    with p.step(tokens=1, phase="decode"):
        p.advance(5)
        spend(p, "RmsNorm", 10, layer=3, elements=4)
        p.record_deferred(BrickId.LM_HEAD, 0)
        p.finalize(7)
    spans = {span.name or "step": span for span in p.profile().timeline}
    norm = spans["RmsNorm"]
    assert (norm.start_ns, norm.end_ns, norm.layer, norm.elements) == (5, 15, 3, 4)
    assert (norm.phase, norm.step, norm.depth, norm.flags) == ("decode", 1, 1, 0)
    assert spans["LmHead"].flags & RecordFlag.APPROXIMATE


def test_a_timeline_is_bounded_and_keeps_the_latest(make: Make) -> None:
    p = make(timeline_steps=1)
    for _ in range(5000):
        spend(p, "old", 1)
    spend(p, "new", 1)
    timeline = p.profile().timeline
    assert len(timeline) == 1024
    assert timeline[-1].name == "new"
    assert p.brick_stats("old").count == 5000
    assert BrickProfiler().profile().timeline == []


# -------------------------------------------------------------------------------------------- tiles


def test_tiles_have_levels_places_work_and_rates(p: BrickProfiler) -> None:
    with p.brick("GateProjection", layer=0):
        for row in range(2):
            for column in range(3):
                timer = p.tiles.start(TileLevel.MACRO, row, column)
                p.advance(100 * (row + 1))
                p.tiles.stop(timer, 64, 1200.0, 300)
    p.tiles.record(TileLevel.MICRO, 50, row=9, column=8, elements=4, flops=200.0, bytes=10)
    macro = p.tiles.stats(TileLevel.MACRO)
    assert (macro.level_name, macro.count, macro.total_ns) == ("macro", 6, 900)
    assert (macro.min_ns, macro.max_ns, macro.total_elements) == (100, 200, 384)
    assert macro.gflops == pytest.approx(8.0)
    assert macro.arithmetic_intensity == pytest.approx(4.0), "of real bytes, not of elements"
    assert macro.peak_share(16.0) == pytest.approx(0.5)
    assert macro.cache_efficiency(1.0) == 1.0
    assert macro.cache_efficiency(0.0) == 0.0
    (tile, micro) = sorted(p.profile().tiles, key=lambda row: row.level)
    assert (tile.owner, micro.owner) == ("GateProjection", None)
    assert [(cell.row, cell.count, cell.total_ns) for cell in tile.by_row()] == [
        (0, 3, 300),
        (1, 3, 600),
    ]
    assert [(cell.column, cell.count) for cell in tile.by_column()] == [(0, 2), (1, 2), (2, 2)]
    assert [(cell.row, cell.column) for cell in micro.cells] == [(9, 8)]
    assert micro.gflops == pytest.approx(4.0)
    assert p.tiles.all_stats() == tuple(p.tiles.stats(level) for level in TileLevel)


def test_a_level_without_tiles_is_all_zeros(make: Make) -> None:
    for p in (make(), make(enabled=False)):
        assert [row.level_name for row in p.tiles.all_stats()] == ["macro", "midi", "micro"]
        for level in TileLevel:
            stats = p.tiles.stats(level)
            assert (stats.level, stats.name, stats.owner) == (level, level.label, None)
            assert (stats.count, stats.total_ns, stats.total_elements) == (0, 0, 0)
            assert (stats.avg_us, stats.gflops, stats.arithmetic_intensity) == (0, 0, 0)
            assert (stats.cells, stats.by_row(), stats.p99_ns) == ((), [], 0)
    for level in (-1, 3, "macro", None):
        with pytest.raises(CountError, match="level: expected a whole number from 0 to 2"):
            p.tiles.stats(level)  # type: ignore[arg-type]


def test_tiles_are_reset_alone(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run", sampling=Sampling(steps=2))
    for _ in range(2):
        with p.step(phase="decode"), p.brick("Gate", layer=0):
            timer = p.tiles.start(TileLevel.MACRO, 1, 2)
            p.advance(100)
            p.tiles.stop(timer, 64, 10.0)
    p.tiles.record(TileLevel.MICRO, 50)
    p.trace("k", outputs=[])
    open_one = p.tiles.start(TileLevel.MIDI, 5, 6)
    p.tiles.reset()
    assert p.profile().tiles == ()
    assert [row.count for row in p.tiles.all_stats()] == [0, 0, 0]
    gate = p.brick_stats("Gate")
    assert (gate.count, gate.timed, gate.total_ns) == (2, 1, 100)
    assert (p.total_tokens(), len(p.kernel_traces())) == (2, 1)
    p.advance(7)
    p.tiles.stop(open_one)
    p.tiles.record(TileLevel.MACRO, 30, row=1, column=2)
    macro, midi, micro = p.tiles.all_stats()
    assert (macro.count, macro.total_ns, macro.min_ns, midi.total_ns, micro.count) == (
        1,
        30,
        30,
        7,
        0,
    )
    assert [(cell.row, cell.column, cell.total_ns) for cell in macro.cells] == [(1, 2, 30)]
    p.close()
    (part,) = Run.open(tmp_path / "run").parts
    assert int(part.cells["count"].sum()) == 2
    with pytest.raises(UsageError, match="was closed"):
        p.tiles.reset()
    BrickProfiler().tiles.reset()


def test_tiles_take_nothing_from_their_brick_and_inner_tiles_belong_to_it(
    p: BrickProfiler,
) -> None:
    with p.brick("Gate"):
        outer = p.tiles.start(TileLevel.MACRO)
        p.advance(10)
        inner = p.tiles.start(TileLevel.MICRO)
        p.advance(20)
        spend(p, "Inside", 5)
        p.tiles.stop(inner)
        p.tiles.stop(outer)
    gate = p.brick_stats("Gate")
    assert (gate.total_ns, gate.exclusive_ns) == (35, 30)
    assert {(row.owner, row.level_name): row.total_ns for row in p.profile().tiles} == {
        ("GateProjection", "macro"): 35,
        ("GateProjection", "micro"): 25,
    }
    assert {row.name for row in p.all_brick_stats()} == {"GateProjection", "Inside"}


def test_a_tile_outside_any_brick_leaves_the_next_brick_alone(p: BrickProfiler) -> None:
    timer = p.tiles.start(TileLevel.MIDI)
    spend(p, "Inside", 50)
    p.tiles.stop(timer)
    spend(p, "Next", 100)
    assert p.brick_stats("Next").exclusive_ns == 100


def test_tiles_are_switched_apart_from_bricks(p: BrickProfiler) -> None:
    assert p.tiles.is_enabled()
    p.tiles.disable()
    with p.brick("A"):
        p.tiles.stop(p.tiles.start(TileLevel.MACRO))
        p.tiles.record(TileLevel.MACRO, 5)
    assert [row.count for row in p.tiles.all_stats()] == [0, 0, 0]
    assert p.brick_stats("A").count == 1
    p.tiles.enable()
    p.tiles.record(TileLevel.MACRO, 5)
    assert p.tiles.all_stats()[0].count == 1


def test_tile_places_past_the_bound_share_one_cell(p: BrickProfiler) -> None:
    for row in range(5000):
        p.tiles.record(TileLevel.MICRO, 1, row=row)
    (tile,) = p.profile().tiles
    assert tile.count == 5000
    assert sum(cell.count for cell in tile.cells) == 5000
    assert len(tile.cells) <= 4097


# -------------------------------------------------------------------------------------------- graph


def test_bricks_are_drawn_with_containment_sequence_and_time(make: Make) -> None:
    p = make(graph=True)
    decode(p, 2, layers=2)
    graph = p.graph
    steps = [node for node in graph.nodes() if node.name == "Step (decode)"]
    assert [node.timing_ns for node in steps] == [2400, 2400]
    layers = [node for node in graph.nodes() if node.kind is NodeKind.LAYER]
    assert [node.name for node in layers] == ["Layer0", "Layer1"] * 2
    kinds = {(graph.node(e.source).name, e.kind, graph.node(e.target).name) for e in graph.edges()}
    assert kinds == {
        ("Step (decode)", EdgeKind.SEQUENCE, "Step (decode)"),
        ("Step (decode)", EdgeKind.CONTAINS, "Layer0"),
        ("Step (decode)", EdgeKind.CONTAINS, "Layer1"),
        ("Layer0", EdgeKind.SEQUENCE, "Layer1"),
        ("Layer0", EdgeKind.CONTAINS, "Block"),
        ("Layer1", EdgeKind.CONTAINS, "Block"),
        ("Block", EdgeKind.CONTAINS, "RmsNorm"),
    }
    assert graph.critical_path().total_ns == 4800, "the two steps, one after the other"
    assert "RmsNorm" in graph.to_tree()


def test_the_critical_path_of_a_step_is_the_step(make: Make) -> None:
    p = make(graph=True)
    with p.step(tokens=1):
        spend(p, "A", 50)
        with p.brick("B"):
            p.advance(200)
            spend(p, "C", 150)
        p.advance(7)
    assert p.graph.critical_path().total_ns == p.profile().wall_ns == 407


def test_drawing_is_off_by_default_and_may_be_switched(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    assert not p.is_graph_enabled()
    spend(p, "A", 1)
    assert len(p.graph) == 0
    p.enable_graph()
    spend(p, "B", 2)
    assert [node.name for node in p.graph.nodes()] == ["B"]
    p.graph.record_kernel_launch("by hand", timing_ns=4)
    p.disable_graph()
    spend(p, "C", 3)
    p.graph.record_kernel_launch("while off", timing_ns=4)
    assert [node.name for node in p.graph.nodes()] == ["B", "by hand"]
    p.close()
    (part,) = bl.Run.open(tmp_path / "run").parts
    assert len(part.graph.nodes) == 2, "what is drawn by hand is in the run too"


@pytest.mark.parametrize("enabled", [False, True])
def test_a_graph_that_is_off_takes_nothing(make: Make, enabled: bool) -> None:
    p = make(enabled=enabled)
    graph = p.graph

    def add_everything() -> None:
        layer = graph.add_layer(0)
        with graph.scope(layer):
            brick = graph.record_brick(BrickId.RMS_NORM, timing_ns=100, elements=64)
            assert graph.push_scope(brick) == brick
            kernel = graph.record_kernel_launch("square", 7, grid=4)
            graph.record_transfer("gpu:y", "host", 8, TransferDirection.DEVICE_TO_HOST)
            graph.add_dependency(kernel, graph.add_function("f"))
            assert graph.pop_scope() == brick
        graph.add_edge(layer, graph.add_async_task("t", 1, 0, 5), EdgeKind.CALLS)

    add_everything()
    counts = (graph.num_nodes, graph.num_edges, graph.dropped_nodes, graph.dropped_edges)
    assert counts == (0, 0, 0, 0), "nothing, and nothing was lost"
    assert graph.current_scope is None
    assert graph.is_scope_balanced()
    with pytest.raises(CountError):
        graph.record_brick("own", elements=-1)  # arguments are checked all the same
    p.enable_graph()
    add_everything()
    assert (graph.num_nodes, graph.num_edges) == (6, 6)
    p.disable_graph()
    add_everything()
    assert (graph.num_nodes, graph.num_edges, graph.dropped_edges) == (6, 6, 0)
    graph.clear()
    assert len(graph) == 0
    ExecutionGraph().add_layer(0)


def test_a_graph_is_switched_within_its_scopes(make: Make) -> None:
    p = make(graph=True)
    graph = p.graph
    with graph.scope(outer := graph.add_function("outer")):
        p.disable_graph()
        with graph.scope(graph.add_function("while off")):
            known = graph.current_scope
            p.enable_graph()
            graph.record_kernel_launch("of outer")
            p.disable_graph()
        with graph.scope(outer):
            pass
        p.enable_graph()
    assert known == outer
    assert graph.is_scope_balanced()
    assert links(p) == [("outer", "Launches", "of outer")]
    later = graph.add_function("later")
    p.disable_graph()
    with graph.scope(later):
        pass
    p.enable_graph()
    with graph.scope(outer), graph.scope(later):
        pass
    assert links(p, EdgeKind.CONTAINS) == [("outer", "Contains", "later")]


def test_what_is_out_of_order_or_supplied_is_not_drawn(make: Make) -> None:
    p = make(graph=True)
    a, b = p.brick("A"), p.brick("B")
    a.__enter__()
    b.__enter__()
    spend(p, "Inside", 10)
    a.__exit__(None, None, None)
    b.__exit__(None, None, None)
    p.record_elapsed("Supplied", 5)
    spend(p, "Next", 100)
    graph = p.graph
    assert {node.name for node in graph.nodes()} == {"Inside", "Next"}
    contains = [edge for edge in graph.edges() if edge.kind is EdgeKind.CONTAINS]
    assert contains == [], "Inside is no part of Next"


def links(p: BrickProfiler, *kinds: EdgeKind) -> list[tuple[str, str, str]]:
    graph = p.graph
    return [
        (graph.node(edge.source).name, edge.kind.label, graph.node(edge.target).name)
        for edge in graph.edges()
        if not kinds or edge.kind in kinds
    ]


def test_a_kernel_is_a_child_of_the_brick_it_is_recorded_in(make: Make) -> None:
    p = make(graph=True)
    with p.step(phase="decode"):
        spend(p, "Before", 10)
        with p.brick("RmsNorm", layer=0):
            p.graph.record_kernel_launch("square", 7, grid=4, timing_ns=5)
            with p.brick("inner"):
                p.graph.record_kernel_launch("sum", timing_ns=2)
            p.graph.record_kernel_launch("scale", timing_ns=3)
            p.graph.record_transfer("gpu:y", "host", 8, TransferDirection.DEVICE_TO_HOST)
            p.advance(20)
        p.graph.record_kernel_launch("sample")
    p.graph.record_kernel_launch("outside")
    launches = [
        ("inner", "Launches", "sum"),
        ("RmsNorm", "Launches", "square"),
        ("RmsNorm", "Launches", "scale"),
        ("Step (decode)", "Launches", "sample"),
    ]
    assert links(p, EdgeKind.LAUNCHES) == launches
    order = ["square", "inner", "scale", "D2H:gpu:y->host"]
    inside = [each for each in links(p) if each[0] in order]
    assert inside[1:] == list(zip(order, ["Sequence"] * 3, order[1:], strict=False))
    assert p.graph.critical_path().total_ns == 30
    assert p.graph.node_by_name("square").detail.source_hash == 7  # type: ignore[union-attr]
    p.close()
    assert links(p, EdgeKind.LAUNCHES) == launches, "once"


def test_of_a_scope_and_a_brick_the_inner_one_has_the_kernel(make: Make) -> None:
    p = make(graph=True)
    graph = p.graph
    with graph.scope(graph.add_function("outer")), p.brick("A"):
        graph.record_kernel_launch("of A")
        with graph.scope(graph.add_function("inner")):
            graph.record_kernel_launch("of inner")
            with p.brick("B"):
                graph.record_kernel_launch("of B", sequence=False)
                graph.record_kernel_launch("of B too", sequence=False)
    assert links(p, EdgeKind.LAUNCHES, EdgeKind.CONTAINS) == [
        ("inner", "Launches", "of inner"),
        ("B", "Launches", "of B"),
        ("B", "Launches", "of B too"),
        ("A", "Launches", "of A"),
        ("A", "Contains", "inner"),
        ("A", "Contains", "B"),
    ]
    assert ("of B", "Sequence", "of B too") not in links(p), "they overlap"


def test_a_brick_that_is_not_drawn_hands_its_kernels_on(make: Make) -> None:
    p = make(graph=True, sampling=Sampling(layers=2))
    tile = TileLevel.MACRO
    with p.step(), p.brick("timed", layer=0), p.brick("left out", layer=1):
        timer = p.tiles.start(tile)
        p.graph.record_kernel_launch("k")
        p.tiles.stop(timer)
    assert links(p, EdgeKind.LAUNCHES) == [("timed", "Launches", "k")]
    p.disable_graph()
    with p.brick("off"):
        p.graph.record_kernel_launch("alone")
    p.enable_graph()
    with p.brick("a"), p.brick("b"):
        with p.brick("c"):
            p.graph.record_kernel_launch("deep")
        p.reset()
        p.graph.record_kernel_launch("after reset")
    assert links(p) == []
    assert [node.name for node in p.graph.nodes()] == ["after reset"]


def test_kernels_of_several_threads_stay_in_their_bricks(make: Make) -> None:
    p = make(graph=True)

    def work(number: int) -> None:
        for _ in range(20):
            with p.brick(f"brick {number}"):
                p.graph.record_kernel_launch(f"kernel {number}")
                p.brick_stats("brick 0")  # folds the lanes of all threads

    threads = [threading.Thread(target=work, args=(each,)) for each in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = links(p, EdgeKind.LAUNCHES)
    assert len(launches) == 60
    assert {(a[-1], b[-1]) for a, _, b in launches} == {("0", "0"), ("1", "1"), ("2", "2")}


# -------------------------------------------------------------------------------- traces, run, save


def test_traces_are_numbered_and_kept(make: Make, tmp_path: Path) -> None:
    p = make(path=tmp_path / "run")
    with p.step(phase="decode"):
        p.advance(5_000)
        assert p.traces.add(bl.KernelTrace("rope", 3, 7, "NULL", time_us=2.0)) == 1
    p.add_trace(bl.KernelTrace("norm", 0, 0, "NULL", params='{"n": 1}', output_checksum=2**64 - 1))
    assert len(p.traces) == 2
    p.close()
    (part,) = bl.Run.open(tmp_path / "run").parts
    first, second = part.traces
    assert (part.string(first["name"]), first["layer"], first["position"]) == ("rope", 3, 7)
    assert (first["start_ns"], first["end_ns"], first["step"]) == (3_000, 5_000, 1)
    assert part.phases[int(first["phase"])] == "decode"
    assert (second["output_checksum"], second["has_checksums"]) == (2**64 - 1, 2)
    assert part.string(second["params"]) == '{"n": 1}'


def test_a_run_without_a_path_is_removed_when_closed(make: Make, state: Path) -> None:
    p = make()
    spend(p, "A", 5)
    assert p.path is not None
    assert p.path.is_relative_to(state)
    assert p.path.is_dir()
    p.close()
    assert not p.path.exists()
    assert p.brick_stats("A").total_ns == 5, "figures stay readable"
    assert p.summary().count("A") >= 1
    p.close()


def test_a_saved_run_stays_and_recording_goes_on(make: Make, tmp_path: Path) -> None:
    p = make()
    spend(p, "A", 5)
    before = p.path
    assert p.save(tmp_path / "kept") == tmp_path / "kept"
    assert before is not None
    assert not before.exists()
    assert p.path == tmp_path / "kept"
    spend(p, "A", 7)
    assert p.brick_stats("A").total_ns == 12
    p.close()
    assert bl.Profile.from_run(bl.Run.open(tmp_path / "kept")).total_ns == 12


def test_saving_refuses_a_taken_path_and_goes_on(make: Make, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    p = make()
    spend(p, "A", 5)
    with pytest.raises(RunExists, match="taken"):
        p.save(tmp_path / "taken")
    spend(p, "A", 7)
    assert p.brick_stats("A").total_ns == 12
    p.save(tmp_path / "free")
    q = make()
    q.save(tmp_path / "free2")
    q.close()
    p.save(tmp_path / "free2", overwrite=True)
    p.close()
    assert bl.Profile.from_run(bl.Run.open(tmp_path / "free2")).total_ns == 12


def test_a_run_with_a_path_stays_and_a_second_enable_begins_another(
    make: Make, tmp_path: Path
) -> None:
    p = make(path=tmp_path / "run")
    spend(p, "A", 5)
    p.close()
    assert not p.is_enabled()
    assert bl.Profile.from_run(bl.Run.open(tmp_path / "run")).total_ns == 5
    with pytest.raises(RunExists, match="overwrite=True"):
        p.enable()
    assert not p.is_enabled()
    with make(path=tmp_path / "run", overwrite=True) as q:
        spend(q, "A", 7)
    assert bl.Profile.from_run(bl.Run.open(tmp_path / "run")).total_ns == 7


def test_a_closed_profiler_without_a_path_may_be_enabled_again(p: BrickProfiler) -> None:
    spend(p, "A", 5)
    first = p.path
    p.close()
    p.enable()
    assert p.path != first
    spend(p, "A", 7)
    assert p.brick_stats("A").total_ns == 7


def test_the_run_is_made_by_the_first_enable(make: Make, tmp_path: Path) -> None:
    p = make(enabled=False, path=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    p.enable()
    assert (tmp_path / "run" / "manifest.json").exists()
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["name"] == "test"


def test_profilers_do_not_mix(make: Make) -> None:
    p, q = make(), make()
    with p.brick("A"):
        p.advance(5)
        with q.brick("A"):
            q.advance(7)
    assert (p.brick_stats("A").total_ns, q.brick_stats("A").total_ns) == (5, 7)
    assert p.path != q.path


def test_what_stands_in_words(p: BrickProfiler) -> None:
    assert repr(p) == "<BrickProfiler 'test', enabled, NULL>"
    timer = p.start("A")
    assert repr(timer) == "<running timer>"
    p.stop(timer)
    assert repr(timer) == "<stopped timer>"
    assert "timers of" in repr(p.timers)


def test_summary_and_json_tell_the_same(p: BrickProfiler) -> None:
    decode(p, 2)
    text, document = p.summary(), json.loads(p.to_json())
    assert (document["schema"], document["version"]) == ("brickline-profile", 1)
    assert document["total_tokens"] == 2
    for row in document["bricks"]:
        assert row["name"] in text


def test_a_profiler_is_not_pickled_or_copied(p: BrickProfiler) -> None:
    import copy
    import pickle

    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UsageError, match="make one in each process"):
            attempt(p)


def test_only_the_null_clock_is_moved(make: Make) -> None:
    with pytest.raises(UsageError, match="NULL"):
        make(device="CPU").advance(1)


# --------------------------------------------------------------------------------------- properties


@dataclass
class Entry:
    """One entry of a random program."""

    name: str
    layer: int | None
    kind: str
    before_ns: int
    inner: list[Entry]
    after_ns: int
    elements: int = 1

    def run(self, p: BrickProfiler) -> None:
        timer = None
        handle = p.brick(self.name, layer=self.layer, elements=self.elements)
        if self.kind == "with":
            handle.__enter__()
        elif self.kind == "timer":
            timer = p.start(self.name, layer=self.layer)
        else:
            timer = p.tiles.start(TileLevel.MACRO, len(self.inner), 0)
        p.advance(self.before_ns)
        for entry in self.inner:
            entry.run(p)
        p.advance(self.after_ns)
        if self.kind == "with":
            handle.__exit__(None, None, None)
        elif self.kind == "timer":
            p.stop(timer, self.elements)
        else:
            p.tiles.stop(timer, self.elements)

    @property
    def total_ns(self) -> int:
        return self.before_ns + self.after_ns + sum(entry.total_ns for entry in self.inner)

    @property
    def brick_ns(self) -> int:
        """The part that an enclosing brick gives away."""
        if self.kind != "tile":
            return self.total_ns
        return sum(entry.brick_ns for entry in self.inner)

    def walk(self) -> Iterator[Entry]:
        yield self
        for entry in self.inner:
            yield from entry.walk()


def entries(inner: st.SearchStrategy[list[Entry]]) -> st.SearchStrategy[list[Entry]]:
    entry = st.builds(
        Entry,
        name=st.sampled_from(["RmsNorm", "Gate", "own", "Ω"]),
        layer=st.sampled_from([None, 0, 1, 5]),
        kind=st.sampled_from(["with", "timer", "tile"]),
        before_ns=st.integers(0, 10**6),
        inner=inner,
        after_ns=st.integers(0, 10**6),
        elements=st.integers(0, 2**40 - 1),
    )
    return st.lists(entry, max_size=4)


TREES = st.recursive(st.just([]), entries, max_leaves=25)
STEPS = st.lists(st.tuples(st.sampled_from(["", "prefill", "decode"]), TREES), max_size=4)


@dataclass
class Sums:
    """What brute force says of a group of entries."""

    durations: list[int] = field(default_factory=list)
    exclusive_ns: int = 0
    elements: int = 0

    def add(self, entry: Entry) -> None:
        self.durations.append(entry.total_ns)
        self.exclusive_ns += entry.total_ns - sum(inner.brick_ns for inner in entry.inner)
        self.elements += entry.elements

    def agrees_with(self, stats: bl.BrickStats) -> None:
        assert stats.count == stats.timed == len(self.durations)
        assert stats.total_ns == sum(self.durations)
        assert (stats.min_ns, stats.max_ns) == (min(self.durations), max(self.durations))
        assert stats.exclusive_ns == self.exclusive_ns
        assert stats.total_elements == self.elements
        assert stats.std_ns == pytest.approx(
            np.std(self.durations, ddof=1) if len(self.durations) > 1 else 0, rel=1e-6, abs=1e-3
        )


def label(name: str) -> str:
    known = BrickId.from_name(name)
    return name if known is None else known.label


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, outside=TREES)
def test_random_programs_agree_with_brute_force(
    steps: list[tuple[str, list[Entry]]], outside: list[Entry]
) -> None:
    p = BrickProfiler("random", enabled=True, device="NULL")
    by_brick: dict[str, Sums] = defaultdict(Sums)
    by_layer: dict[tuple[str, int | None], Sums] = defaultdict(Sums)
    by_phase: dict[tuple[str, str], Sums] = defaultdict(Sums)
    tiles = Sums()
    for phase, program in [*steps, (None, outside)]:
        if phase is None:
            for entry in program:
                entry.run(p)
        else:
            with p.step(tokens=len(program), phase=phase):
                for entry in program:
                    entry.run(p)
        for entry in (each for top in program for each in top.walk()):
            if entry.kind == "tile":
                tiles.add(entry)
                continue
            name = label(entry.name)
            by_brick[name].add(entry)
            by_layer[name, entry.layer].add(entry)
            by_phase[name, phase or ""].add(entry)
    profile = p.profile()
    p.close()
    assert {row.name for row in profile.bricks} == set(by_brick)
    for row in profile.bricks:
        by_brick[row.name].agrees_with(row)
    assert {(row.name, row.layer) for row in profile.brick_layers} == set(by_layer)
    for row in profile.brick_layers:
        by_layer[row.name, row.layer].agrees_with(row)
    assert {(row.name, row.phase) for row in profile.brick_phases} == set(by_phase)
    for row in profile.brick_phases:
        by_phase[row.name, row.phase or ""].agrees_with(row)
    (tile_row,) = profile.tile_levels or (None,)
    assert (tile_row.total_ns if tile_row else 0) == sum(tiles.durations)
    assert profile.total_tokens == sum(len(program) for _, program in steps)
    wall = sum(entry.total_ns for _, program in steps for entry in program)
    assert profile.wall_ns == wall
    everything_ns = wall + sum(entry.total_ns for entry in outside)
    assert profile.exclusive_ns <= everything_ns


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1000)), max_size=60))
def test_exits_in_any_order_never_exceed_wall_time(moves: list[tuple[int, int]]) -> None:
    """Each move enters a brick, or leaves it where it is open: every interleaving there is."""
    p = BrickProfiler("random", enabled=True, device="NULL")
    open_at: dict[int, int] = {}
    now = 0
    durations: dict[int, list[int]] = defaultdict(list)
    for number, ns in [*moves, *((number, 1) for number in range(4))]:
        handle = p.brick(f"brick {number}")
        if number in open_at:
            handle.__exit__(None, None, None)
            durations[number].append(now - open_at.pop(number))
        else:
            handle.__enter__()
            open_at[number] = now
        p.advance(ns)
        now += ns
    profile = p.profile()
    p.close()
    rows = {row.name: row for row in profile.bricks}
    assert set(rows) == {f"brick {number}" for number in durations}
    for number, each in durations.items():
        row = rows[f"brick {number}"]
        assert (row.count, row.total_ns) == (len(each), sum(each))
        assert row.exclusive_count + row.out_of_order == row.timed
        assert row.exclusive_ns <= row.total_ns
    assert profile.exclusive_ns <= now


def test_numpy_is_loaded_when_a_profiler_is_enabled_and_not_before() -> None:
    code = (
        "import sys, brickline as bl; p = bl.BrickProfiler('x'); before = 'numpy' in sys.modules;"
        "p.enable(); print(before, 'numpy' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(bl.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False True\n"
