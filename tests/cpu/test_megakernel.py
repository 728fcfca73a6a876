"""Plans as megakernels on CPU: the bits of serial runs, faults that stay put, true reports."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_table import check_counters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_plans import COLUMNS, MIX, ROWS, Launch, by_themselves, drawn, launches, planned

import brickline as bl
from brickline import _core
from brickline.cache import KernelCache
from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, random_weights
from brickline.errors import DeadlineReached, DeviceHung, InternalError, LaunchError, PlanError
from brickline.executor.megakernel.deduped import Deduped
from brickline.executor.megakernel.proving import RACE, Prover
from brickline.executor.megakernel.refusals import REASONS
from brickline.executor.megakernel.regions import REASONS as NOT_JOINED
from brickline.executor.megakernel.regions import Regions, find_regions
from brickline.executor.megakernel.tables import TASK
from brickline.executor.prepared import PreparedPlan
from brickline.graph_rows import EdgeKind
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import residual, rms_norm, silu_gate, softmax
from brickline.megakernel_tables import TaskState
from brickline.plan import Plan
from brickline.profile import profile_from_run

pytestmark = pytest.mark.usefixtures("state")
PIECE = ("block_x * 16", "minimum((block_x + 1) * 16, n * 4)")
"""Bytes of four floats for each block."""


def fours(
    name: str, body: str, *more: Param | Scalar, touches: Any = PIECE, **facts: Any
) -> Kernel:
    """A kernel whose block handles four floats, from x to y."""
    declared = [
        Param("x", "f32", "n", touches=touches),
        Param("y", "f32", "n", "write", touches=touches),
        Scalar("n", low=1, high=1 << 20),
        *more,
    ]
    given = "".join(f", int64_t {each.name}" for each in more)
    source = (
        f"BRICKLINE void {name}(Block& block, const float* x, float* y, int64_t n{given}) {{"
        " int64_t first = block.index() * 4;"
        f" block.each(minimum(n - first, int64_t(4)), [&](int64_t k) {{"
        f" int64_t i = first + k; {body} }}); }}"
    )
    return Kernel(name, source, declared, global_size="ceil_div(n, 4)", **facts)


ADD_ONE = fours("add_one", "y[i] = x[i] + 1;")
FAIL_AT = fours(
    "fail_at",
    "y[i] = x[i] + 1; if (first / 4 == at || first / 4 == also) block.fault(20);",
    Scalar("at", low=-1, high=1 << 20),
    Scalar("also", low=-1, high=1 << 20),
)
LINGER = Kernel(
    "linger",
    """extern "C" int usleep(unsigned);
       BRICKLINE void linger(Block& block, const float* x, float* y, int64_t n, int64_t us) {
           if (us) usleep(unsigned(us));
           block.once([&] { y[block.index()] = x[block.index()] + 1; });
       }""",
    [
        *(Param("x", "f32", "n"), Param("y", "f32", "n", "write")),
        *(Scalar("n", low=1, high=4096), Scalar("us", high=999_999)),
    ],
    global_size="n",
)
"""An item takes as long as it is told."""
ADD_UP = Kernel(
    "add_up",
    """BRICKLINE void add_up(Block& block, const float* x, float* y, int64_t n) {
           block.once([&] { block.atomic_add(y, x[block.index()]); });
       }""",
    [
        Param("x", "f32", "n", touches=("block_x * 4", "(block_x + 1) * 4")),
        Param("y", "f32", 1, "read-write", accumulate="add"),
        Scalar("n", low=1, high=1 << 20),
    ],
    global_size="n",
)


# ------------------------------------------------------------------------------- the bits of serial

WAYS = [
    *({"workers": workers} for workers in (1, 2, 3, 8)),
    *({"workers": workers, "max_wall_time": 100} for workers in (1, 3)),
    {"workers": 2, "trace": True, "lineage": True},
]


@given(program=launches, seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_megakernel_has_the_bits_of_launches_by_themselves(
    cache: KernelCache, program: list[Launch], seed: int
) -> None:
    plan, taken = planned(program)
    for values in ({}, {"t": -1.5, "n": 1}, {"n": COLUMNS}):
        settled = {**plan.defaults, **values}
        expected = by_themselves(cache, taken, settled["t"], int(settled["n"]))
        for way in WAYS:
            prepared = plan.prepare("CPU", "megakernel", cache=cache, **way)
            prepared._run.delay_seed = seed
            for name, number in zip("abc", range(3), strict=True):
                prepared.write(name, drawn(ROWS, COLUMNS, seed=number))
            prepared(**values, meet=int(way["workers"] > 1))
            for name, array in zip("abc", expected, strict=True):
                assert prepared.read(name).tobytes() == array.tobytes(), (way, name)
            report = prepared.report
            assert report.is_complete
            assert report.items_processed == report.published_items + report.deduped_items
            assert sum(each.items for each in report.workers) == report.published_items


@pytest.mark.parametrize("fused", [True, False])
def test_a_decoder_has_the_same_bits_on_every_executor(cache: KernelCache, fused: bool) -> None:
    config = DecoderConfig(capacity=32)
    decoder, weights = (
        Decoder(config, dtype="f32", fused=fused),
        random_weights(config, dtype="f32"),
    )
    ways: list[dict[str, Any]] = [
        {"executor": "serial"},
        {"executor": "parallel", "threads": 2},
        *({"executor": "megakernel", "workers": workers} for workers in (1, 2, 5)),
    ]
    steps = []
    for way in ways:
        decoding = decoder.prepare(weights, "CPU", cache=cache, **way)
        tokens = []
        for position in range(12):
            decoding.step(7 if position == 0 else None)
            tokens.append(decoding.prepared.read("token").tobytes())
        names = [name for name in decoding.prepared.buffers if name not in weights]
        steps.append((tokens, {name: decoding.prepared.read(name).tobytes() for name in names}))
    assert all(each == steps[0] for each in steps[1:])


def test_a_thousand_runs_are_the_same_bits_whatever_scratch_holds(cache: KernelCache) -> None:
    """Whoever reads before it is written finds 0xCD or NaN, or what the run before left."""
    plan, n = Plan("again"), 601
    given, out = plan.buffer("given", n, "f32"), plan.buffer("out", n, "f32")
    scratch = [plan.buffer(f"s{number}", n, "f32") for number in range(4)]
    total = plan.buffer("total", 1, "f32")
    plan.launch(ADD_ONE, x=given, y=scratch[0], n=n)
    plan.launch(ADD_ONE, x=scratch[0], y=scratch[1], n=n)
    plan.launch(silu_gate(), gate=scratch[0], up=scratch[1], y=scratch[2], n=n)
    plan.launch(softmax(), x=scratch[2].reshape(1, n), y=scratch[3].reshape(1, n), rows=1, n=n)
    plan.launch(MIX, x=given, y=scratch[2], n=n, by=0.5)
    plan.launch(residual(), a=scratch[2], b=scratch[3], y=out, n=n)
    plan.launch(ADD_ONE, x=scratch[3][:1], y=total, n=1)
    plan.launch(ADD_UP, x=out, y=total, n=n)
    array = drawn(n)
    serial = plan.prepare("CPU", cache=cache)
    serial.write("given", array)
    expected = serial().read("out").tobytes(), serial.read("total").tobytes()
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=4)
    prepared.write("given", array)
    poisons = [np.full(n, np.nan, np.float32), np.full(n, 0xCDCDCDCD, np.uint32).view(np.float32)]
    for run in range(1000):
        for number in range(4):
            prepared.write(f"s{number}", poisons[run % 2])
        prepared._run.delay_seed = run + 1
        prepared()
        assert (prepared.read("out").tobytes(), prepared.read("total").tobytes()) == expected


def test_blocks_that_add_up_do_so_in_the_order_of_a_serial_run(cache: KernelCache) -> None:
    plan, n = Plan("sum"), 5000
    plan.launch(ADD_UP, x=plan.buffer("x", n, "f32"), y=plan.buffer("y", 1, "f32"), n=n)
    runs = [
        plan.prepare("CPU", cache=cache),
        plan.prepare("CPU", "megakernel", cache=cache, workers=4),
    ]
    for run in runs:
        run.write("x", drawn(n))
        run()
    assert runs[0].read("y").tobytes() == runs[1].read("y").tobytes()


def test_variables_and_memory_change_from_run_to_run(cache: KernelCache) -> None:
    plan = Plan("changing")
    n = plan.variable("n", 1, 64, default=64)
    x, y = (plan.buffer(name, n, "f32") for name in "xy")
    plan.launch(ADD_ONE, x=x, y=y, n=n)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=3)
    for count in (64, 3, 1, 17, 64):
        prepared.write("y", np.zeros(64, np.float32))
        assert prepared(n=count).read("y").sum() == count
        assert prepared.report.items_processed == -(-count // 4)
    other = np.full(64, 2, np.float32)
    assert prepared(x=other).read("y").sum() == 3 * 64


@pytest.mark.parametrize("limit", [None, 60])
def test_a_plan_that_nobody_has_any_more_goes_at_once(
    cache: KernelCache, limit: float | None
) -> None:
    prepared = chain(2).prepare("CPU", "megakernel", cache=cache, max_wall_time=limit)
    prepared()
    gone, memory = weakref.ref(prepared), weakref.ref(prepared._memory)
    del prepared
    assert gone() is None
    assert memory() is None


def test_null_checks_and_executes_nothing(cache: KernelCache) -> None:
    plan = chain(3)
    prepared = plan.prepare("NULL", "megakernel")
    prepared()
    assert prepared.report is None


# ------------------------------------------------------------------------------------------- faults


def chain(count: int, kernel: Kernel = ADD_ONE, n: int = 40, **more: Any) -> Plan:
    plan = Plan("chain")
    buffers = [plan.buffer(f"b{number}", n, "f32") for number in range(count + 1)]
    for number in range(count):
        plan.launch(kernel, x=buffers[number], y=buffers[number + 1], n=n, **more)
    return plan


@pytest.mark.parametrize(("workers", "limit"), [(1, None), (2, None), (3, 60), (8, None)])
def test_a_fault_keeps_what_depends_on_it_from_running_and_nothing_else(
    cache: KernelCache, workers: int, limit: float | None
) -> None:
    plan, n = Plan("faulty"), 40
    at, also = (plan.variable(name, -1, 100) for name in ("at", "also"))
    names = ("given", "before", "bad", "after", "later", "beside", "over")
    given, before, bad, after, later, beside, over = (plan.buffer(each, n, "f32") for each in names)
    plan.launch(ADD_ONE, x=given, y=before, n=n)
    plan.launch(FAIL_AT, x=before, y=bad, n=n, at=at, also=also)
    plan.launch(
        rms_norm(), x=bad.reshape(1, n), y=after.reshape(1, n), weight=given, rows=1, n=n, eps=1e-5
    )
    plan.launch(ADD_ONE, x=given, y=beside, n=n)
    plan.launch(ADD_ONE, x=after, y=later, n=n)
    plan.launch(ADD_ONE, x=beside, y=over, n=n)
    prepared = plan.prepare(
        "CPU", "megakernel", cache=cache, workers=workers, max_wall_time=limit, trace=True
    )
    for name in names[1:]:
        prepared.write(name, np.full(n, -7, np.float32))
    for _ in range(3):
        with pytest.raises(LaunchError) as caught:
            prepared(at=6, also=8)
        words = str(caught.value)
        assert "failed at launch 1 (fail_at), which reported fault 20" in words
        assert "at item 6, so that 2 launches that wait for it were not run" in words
        assert "4 of 6 launches had finished" not in words
        assert "3 of 6 launches had finished, their results stay" in words
        assert (prepared.read("after") == -7).all()
        assert (prepared.read("later") == -7).all()
        assert (prepared.read("beside") == 1).all()
        assert (prepared.read("over") == 2).all()
        assert (prepared.read("bad") == 2).all(), "other items of a launch with a fault go on"
        report = prepared.report
        assert [(each.task, each.item, each.code, each.op) for each in report.faults] == [
            (1, 6, "20", "fail_at")
        ]
        assert report.items_processed + report.items_remaining == 51
        assert (report.items_faulted, report.items_skipped) == (2, 11)
        assert report.items_remaining == 13
        done, skipped = TaskState.DONE, TaskState.SKIPPED
        assert list(report.tasks.state) == [done, TaskState.FAULTED, skipped, done, skipped, done]
        with pytest.raises(PlanError, match=r"call reset\(\)"):
            prepared(at=-1)
        prepared.reset()
    prepared(at=-1, also=-1)
    assert prepared.report.is_complete
    assert (prepared.read("later") > -7).all()


def test_a_fault_within_a_region_skips_the_rest_of_its_part(cache: KernelCache) -> None:
    plan, n = Plan("region"), 40
    at = plan.variable("at", -1, 100)
    buffers = [plan.buffer(name, n, "f32") for name in "abcd"]
    plan.launch(FAIL_AT, x=buffers[0], y=buffers[1], n=n, at=at, also=-1)
    plan.launch(ADD_ONE, x=buffers[1], y=buffers[2], n=n)
    c, d = (each.reshape(1, n) for each in buffers[2:])
    plan.launch(rms_norm(), x=c, y=d, weight=buffers[0], rows=1, n=n, eps=1e-5)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2)
    assert list(prepared.regions) == [(0, 1), (2,)]
    prepared.write("c", np.full(n, -7, np.float32))
    with pytest.raises(LaunchError, match="at item 7, so that 2 launches"):
        prepared(at=7)
    found = prepared.read("c")
    assert (found[:20] == 2).all()
    assert (found[20:] == -7).all(), "the part of the worker that met the fault"
    assert not prepared.read("d").any()
    assert prepared.report.items_processed + prepared.report.items_remaining == 21
    prepared.reset()
    assert (prepared(at=-1).read("c") == 2).all()


# ------------------------------------------------------------------------------------ the end of it


def lingering(cache: KernelCache, **options: Any) -> tuple[PreparedPlan, int]:
    plan, n, count = Plan("lingering"), 4, 30
    us = plan.variable("us", 0, 999_999, default=0)
    buffers = [plan.buffer(f"b{number}", n, "f32") for number in range(count + 1)]
    for number in range(count):
        plan.launch(LINGER, x=buffers[number], y=buffers[number + 1], n=n, us=us)
    return plan.prepare("CPU", "megakernel", cache=cache, **options), n * count


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_deadline_leaves_a_true_partial_report(cache: KernelCache, workers: int) -> None:
    prepared, items = lingering(cache, workers=workers, max_wall_time=0.1, trace=True)
    began = time.monotonic()
    with pytest.raises(DeadlineReached) as caught:
        prepared(us=20_000)
    took = time.monotonic() - began
    assert 0.09 < took < 0.6, "to the length of one item, and of this machine's hiccups"
    report = prepared.report
    assert 0 < report.items_processed < items
    assert report.items_processed + report.items_remaining == items
    words = f"{report.items_processed} of {items} items were executed and {report.items_remaining}"
    assert words in str(caught.value)
    assert "max_wall_time of 0.1 s came first" in str(caught.value)
    written = [int((prepared.read(f"b{number + 1}") != 0).sum()) for number in range(30)]
    assert list(report.tasks.done) == written, "what is told is what lies there"
    assert sum(worker.items for worker in report.workers) == report.items_processed
    with pytest.raises(PlanError, match=r"max_wall_time of 0.1 s .* call reset\(\)"):
        prepared()
    prepared.reset()
    for _ in range(3):
        assert prepared(us=0).report.is_complete
    assert (prepared.read("b30") == 30).all()


@pytest.mark.parametrize("limit", [None, 60])
def test_stop_ends_a_run_between_two_items(cache: KernelCache, limit: float | None) -> None:
    prepared, items = lingering(cache, workers=2, max_wall_time=limit)
    prepared.stop()  # nothing runs, so nothing happens
    timer = threading.Timer(0.15, prepared.stop)
    timer.start()
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"stop\(\) ended the run: \d+ of 120 items") as caught:
        prepared(us=30_000)
    timer.join()
    assert time.monotonic() - began < 1
    assert not isinstance(caught.value, DeadlineReached)
    assert 0 < prepared.report.items_remaining < items
    prepared.reset()
    assert prepared(us=0).report.is_complete


def test_stop_is_for_megakernels(cache: KernelCache) -> None:
    prepared = chain(1).prepare("CPU", cache=cache)
    with pytest.raises(PlanError, match=r"stop\(\) is for executor megakernel, got serial"):
        prepared.stop()
    assert prepared.report is None
    assert prepared.regions is None


@contextmanager
def interrupted(after: float) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("limit", [None, 60])
def test_an_interrupt_ends_a_run_between_two_items(cache: KernelCache, limit: float | None) -> None:
    prepared, items = lingering(cache, workers=2, max_wall_time=limit)
    began = time.monotonic()
    with interrupted(0.2), pytest.raises(KeyboardInterrupt):
        prepared(us=30_000)
    assert time.monotonic() - began < 1
    assert prepared.report.items_processed + prepared.report.items_remaining == items
    with pytest.raises(PlanError, match=r"was stopped by KeyboardInterrupt; \d+ of 30 launches"):
        prepared()
    prepared.reset()
    assert prepared(us=0).report.is_complete


def test_a_partial_report_has_the_time_of_every_item(cache: KernelCache) -> None:
    plan = Plan("partial")
    x, y = (plan.buffer(name, 64, "f32") for name in "xy")
    plan.launch(LINGER, x=x, y=y, n=64, us=20_000)
    prepared = plan.prepare(
        "CPU", "megakernel", cache=cache, workers=2, max_wall_time=0.2, trace=True, lineage=True
    )
    with pytest.raises(DeadlineReached):
        prepared()
    report = prepared.report
    (op,) = report.op_times
    assert 0 < op.items == report.items_processed < 64
    assert report.op_items == (op.items,)
    worked = sum(worker.work_ns for worker in report.workers)
    assert op.work_ns == pytest.approx(worked, rel=0.01)
    assert op.work_ns / op.items > 15e6
    assert report.spans.items.sum() == op.items
    assert f"with 64 items, of which {op.items} are done" in report.explain("y")


def test_a_worker_that_is_stopped_while_it_waits_has_waited(cache: KernelCache) -> None:
    plan = Plan("waits")
    x, y, z = (plan.buffer(name, 2, "f32") for name in "xyz")
    plan.launch(LINGER, x=x[:1], y=y[:1], n=1, us=300_000)
    plan.launch(LINGER, x=y, y=z, n=2, us=0)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2, max_wall_time=0.1)
    with pytest.raises(DeadlineReached):
        prepared()
    (waited,) = (each for each in prepared.report.workers if not each.work_ns)
    # All the time that it was there: how long that is depends on when its thread was run.
    assert waited.dependency_wait_ns > 0.9 * (waited.end_ns - waited.begin_ns) > 0


def test_executed_items_of_a_faulted_plan_are_counted(cache: KernelCache) -> None:
    plan = Plan("faulted")
    x, y, z = (plan.buffer(name, 256, "f32") for name in "xyz")
    plan.launch(FAIL_AT, x=x, y=y, n=256, at=3, also=5)
    plan.launch(ADD_ONE, x=y, y=z, n=256)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2, lineage=True)
    with pytest.raises(LaunchError):
        prepared()
    report = prepared.report
    executed = {row.name: row.items for row in report.op_times}
    assert executed["fail_at"] == 64
    assert sum(executed.values()) == sum(worker.items for worker in report.workers)
    assert report.faults[0].words == "a code of its own, from block.fault"


HANGS_UNTIL_INTERRUPTED = """
import os, signal, sys, threading, time
from brickline.cache import KernelCache
from brickline.errors import DeviceHung, PlanError
from brickline.kernel import Kernel, Param, Scalar
from brickline.plan import Plan

spin = Kernel(
    "spin",
    "BRICKLINE void spin(Block& block, float* y, int64_t n) {"
    " volatile int64_t go = 1; while (go) {} block.once([&] { y[0] = 1; }); }",
    [Param("y", "f32", "n", "write"), Scalar("n", low=1)],
    global_size="n",
)
plan = Plan("spins")
plan.launch(spin, y=plan.buffer("y", 1, "f32"), n=1)
cache, workers = KernelCache(sys.argv[1]), int(sys.argv[2])
prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=workers, trace=True)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    prepared()
except KeyboardInterrupt as error:
    (note,) = error.__notes__
    assert "an item has not returned: item 0 of launch 0 (spin), on worker 0; its" in note, note
assert time.monotonic() - began < 4
assert prepared.report.workers[0].state == "hung"
assert prepared.report.workers[0].work_ns > 1e9
assert prepared.report.op_times[0].work_ns is None
try:
    prepared()
except PlanError as error:
    assert "reset" not in str(error), error
    assert str(error).count("this plan does not run again") == 1, error
prepared.reset()
try:
    prepared()
except DeviceHung as error:
    assert error.item == 0
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_interrupt_gives_up_an_item_that_never_returns(
    cache: KernelCache, tmp_path: Path, workers: str
) -> None:
    script = tmp_path / "spins.py"
    script.write_text(HANGS_UNTIL_INTERRUPTED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(cache.directory), workers],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "done\n", done.stdout + done.stderr


HANGS = """
import sys, time
import numpy as np
from brickline.cache import KernelCache
from brickline.errors import DeviceHung, PlanError
from brickline.kernel import Kernel, Param, Scalar
from brickline.plan import Plan

SPIN = Kernel(
    "spin",
    '''BRICKLINE void spin(Block& block, const float* x, float* y, int64_t n, int64_t at) {
           volatile int64_t* where = &at;
           while (block.index() == *where) {}
           block.once([&] { y[block.index()] = x[block.index()]; });
       }''',
    [Param("x", "f32", "n"), Param("y", "f32", "n", "write"), Scalar("n", low=1, high=64),
     Scalar("at", low=-1, high=64)],
    global_size="n",
)
plan = Plan("hangs")
x, y, z = (plan.buffer(name, 4, "f32") for name in "xyz")
at = plan.variable("at", -1, 64)
plan.launch(SPIN, x=x, y=y, n=4, at=at)
plan.launch(SPIN, x=y, y=z, n=4, at=-1)
cache = KernelCache(sys.argv[1])
prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2, max_wall_time=0.1)
prepared(at=-1)
began = time.monotonic()
try:
    prepared(at=1)
except DeviceHung as error:
    took = time.monotonic() - began
    print(error)
    assert took < 2.1, took
    assert (error.task, error.item, error.worker, error.missing) == (0, 1, 0, 0), error.args
else:
    raise SystemExit("nothing was raised")
report = prepared.report
assert report.items_processed + report.items_remaining == 8
assert report.items_processed == 3
assert [worker.state for worker in report.workers] == ["hung", "stopped"]
prepared.reset()
try:
    prepared(at=-1)
except DeviceHung as error:
    assert "an earlier run left an item that has not returned" in str(error)
else:
    raise SystemExit("a dead engine ran")
del prepared
again = plan.prepare("CPU", "megakernel", cache=cache, workers=2)
assert again(at=-1).report.is_complete
print("done", flush=True)
"""


def test_an_item_that_never_returns_is_named_and_the_caller_goes_on(
    cache: KernelCache, tmp_path: Path
) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(cache.directory)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "item 1 of launch 0 (spin), on worker 0, with max_wall_time=0.1 s" in done.stdout
    assert "worker 1 waits for launch 0 (spin), of which 1 of 2 parts have come" in done.stdout
    assert done.stdout.endswith("done\n")


def test_what_hung_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(DeviceHung("words", 1, 2, 3, 4)))
    assert (str(error), error.task, error.item, error.worker, error.missing) == (
        "words",
        1,
        2,
        3,
        4,
    )


FORKED = """
import os, sys
from brickline.cache import KernelCache
from brickline.kernels.catalog import residual
from brickline.plan import Plan

plan = Plan("forked")
x, y = (plan.buffer(name, 4000, "f32") for name in "xy")
plan.launch(residual(), a=x, b=x, y=y, n=4000)
plan.launch(residual(), a=y, b=y, y=x, n=4000)
cache = KernelCache(sys.argv[1])
ways = ({}, {"max_wall_time": 60})
runs = [plan.prepare("CPU", "megakernel", cache=cache, workers=3, **way) for way in ways]
for run in runs:
    run()
child = os.fork()
for _ in range(20):
    for run in runs:
        assert run().report.is_complete
if child:
    _, status = os.waitpid(child, 0)
    raise SystemExit(os.waitstatus_to_exitcode(status))
os._exit(0)
"""


def test_a_forked_child_has_workers_of_its_own(cache: KernelCache, tmp_path: Path) -> None:
    script = tmp_path / "forked.py"
    script.write_text(FORKED, encoding="utf-8")
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        str(script),
        str(cache.directory),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------- refusals


def refused(code: str, plan: Plan, cache: KernelCache, **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        plan.prepare("CPU", "megakernel", cache=cache, **options)
    assert f"{code}: {REASONS[code]}" in str(caught.value)
    return str(caught.value)


def test_a_kernel_that_is_not_written_against_block_is_refused(cache: KernelCache) -> None:
    plan = chain(1)
    source = "void plain(const float* x, float* y) { y[0] = x[0]; }"
    params = [Param("x", "f32", 1), Param("y", "f32", 1, "write")]
    x, y = (plan.buffer(name, 1, "f32") for name in "xy")
    plan.launch(Kernel("plain", source, params, language="c"), x=x, y=y)
    words = refused("MK101", plan, cache)
    assert "launch 1 (plain)" in words
    assert "language 'c'" in words


def test_more_arguments_than_a_task_has_are_refused(cache: KernelCache) -> None:
    params = [Param(f"x{number}", "f32", 1) for number in range(24)]
    listed = ", ".join(f"const float* {each.name}" for each in params)
    source = f"BRICKLINE void wide(Block& block, {listed}, float* y) {{ y[0] = x0[0]; }}"
    kernel = Kernel("wide", source, [*params, Param("y", "f32", 1, "write")])
    plan = Plan("wide")
    x, y = (plan.buffer(name, 1, "f32") for name in "xy")
    plan.launch(kernel, y=y, **{each.name: x for each in params})
    assert "25 arguments" in refused("MK104", plan, cache)


def test_more_shared_memory_than_a_worker_has_is_refused(cache: KernelCache) -> None:
    kernel = fours("greedy", "y[i] = x[i];", shared_bytes=(1 << 20) + 1)
    assert "1048577 bytes of 1048576" in refused("MK102", chain(1, kernel), cache)


def test_more_blocks_than_a_task_counts_are_refused_before_and_at_a_run(cache: KernelCache) -> None:
    source = "BRICKLINE void many(Block& block, float* y, int64_t n) { y[0] = 1; }"
    signature = [Param("y", "f32", 1, "write"), Scalar("n", low=1, high=65535)]
    kernel = Kernel("many", source, signature, global_size=(65535, 65535, "n"))
    plan = Plan("many")
    plan.launch(kernel, y=plan.buffer("y", 1, "f32"), n=2)
    assert "8589672450 blocks" in refused("MK105", plan, cache)
    plan = Plan("varying")
    n = plan.variable("n", 1, 4)
    plan.launch(kernel, y=plan.buffer("y", 1, "f32"), n=n)
    prepared = plan.prepare("CPU", "megakernel", cache=cache)
    with pytest.raises(PlanError, match="MK105: it has more than 4294967295 blocks; got launch 0"):
        prepared(n=2)
    assert prepared.report is None


@pytest.mark.parametrize(
    "limit", [0, -1, -0.5, float("nan"), float("inf"), True, "1", 1e300, 1e-12]
)
def test_a_deadline_that_is_none_is_refused(cache: KernelCache, limit: Any) -> None:
    words = refused("MK106", chain(1), cache, max_wall_time=limit)
    assert f"got {limit!r}, and expected seconds above 0 and up to 1000000000" in words


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2", 1025])
def test_workers_are_a_number(cache: KernelCache, workers: Any) -> None:
    assert "expected 1 to 1024" in refused("MK108", chain(1), cache, workers=workers)


@pytest.mark.parametrize(
    "option",
    [
        *({"workers": 2}, {"max_wall_time": 1}),
        *({"trace": True}, {"lineage": True}, {"dedupe": False}),
    ],
)
def test_options_of_a_megakernel_are_no_other_executors(
    cache: KernelCache, option: dict[str, Any]
) -> None:
    (name,) = option
    for executor in ("serial", "parallel"):
        with pytest.raises(PlanError, match=f"{name} is an option of executor megakernel"):
            chain(1).prepare("CPU", executor, cache=cache, **option)


@pytest.mark.parametrize("option", ["trace", "lineage", "dedupe"])
def test_switches_are_true_or_false(cache: KernelCache, option: str) -> None:
    with pytest.raises(PlanError, match=option):
        chain(1).prepare("CPU", "megakernel", cache=cache, **{option: "yes"})


def test_codes_are_stable_and_apart() -> None:
    assert list(REASONS) == [f"MK{number}" for number in range(101, 101 + len(REASONS))]
    assert not REASONS.keys() & NOT_JOINED.keys()


# ----------------------------------------------------------------------------------------- regions


def why_not(*kernels: Kernel, n: int = 64) -> str | None:
    """The code that keeps the last of a chain out of the region; None where it joins."""
    plan = Plan("two")
    buffers = [plan.buffer(f"b{number}", n, "f32") for number in range(len(kernels) + 1)]
    for number, kernel in enumerate(kernels):
        plan.launch(kernel, x=buffers[number], y=buffers[number + 1], n=n)
    regions = find_regions(plan.launches)
    return next((each.code for each in regions.refused if each.launch == len(kernels) - 1), None)


def touching(begin: str, end: str) -> Kernel:
    return fours("touches", "y[i] = x[i];", touches=(begin, end))


@pytest.mark.parametrize(
    ("begin", "end", "code"),
    [
        (*PIECE, None),
        ("block_x * 16", "block_x * 16 + 16", None),
        ("block_x * 16", "block_x * 16 + 17", "MK303"),  # reaches into the next one's part
        ("block_x * 16 - minimum(block_x, 1) * 4", "block_x * 16 + 16", "MK303"),  # a halo
        ("0", "n * 4", "MK303"),  # every block all of it
        ("maximum(0, 240 - block_x * 16)", "256 - block_x * 16", "MK303"),  # from the other end
        ("block_x * 8", "block_x * 8 + 16", "MK303"),  # half as far apart as it is long
        ("block_x % 2 * 16", "block_x % 2 * 16 + 16", "MK303"),
    ],
)
def test_a_launch_joins_where_blocks_keep_to_their_parts(
    begin: str, end: str, code: str | None
) -> None:
    assert why_not(ADD_ONE, touching(begin, end)) == code
    assert why_not(touching(begin, end), ADD_ONE) == code
    assert why_not(ADD_ONE, touching(*PIECE), touching(begin, end)) == code


def test_every_refusal_to_join_has_its_code() -> None:
    anything = fours("anything", "y[i] = x[i];", touches=None)
    alone = fours("alone", "y[i] = x[i];", host_parallel_safe=False)
    assert why_not(ADD_ONE, anything) == "MK303"
    assert why_not(ADD_ONE, alone) == "MK310"
    assert why_not(alone, ADD_ONE) == "MK310"
    assert why_not(ADD_ONE, residual_like()) == "MK302"
    assert why_not(anything, anything, n=3) is None, "both have one block"
    plan = Plan("apart")
    x, y, z, total = (plan.buffer(name, 64, "f32") for name in ("x", "y", "z", "total"))
    plan.launch(ADD_ONE, x=x, y=y, n=64)
    plan.launch(ADD_ONE, x=x, y=z, n=64)
    plan.launch(ADD_UP, x=z.view(16), y=total.view(1), n=16)
    plan.launch(fours("spread", "y[i] = x[0];", touches=None), x=total, y=y, n=64)
    codes = [each.code for each in find_regions(plan.launches).refused]
    assert codes == ["MK301", "MK303", "MK305"]


def residual_like() -> Kernel:
    """Another number of blocks over the same memory."""
    made = fours("eights", "y[i] = x[i];", touches=("block_x * 32", "(block_x + 1) * 32"))
    facts = made.to_json() | {"global_size": ["ceil_div(n, 8)", "1", "1"]}
    return Kernel.from_json(facts)


def test_variables_of_a_plan_do_not_keep_launches_apart() -> None:
    plan = Plan("symbolic")
    n, rows = plan.variable("n", 1, 1 << 16), plan.variable("rows", 1, 64)
    x, y, z = (plan.buffer(name, n, "f32") for name in "xyz")
    plan.launch(residual(), a=x, b=x, y=y, n=n)
    plan.launch(silu_gate(), gate=y, up=x, y=z, n=n)
    plan.launch(residual(), a=z, b=y, y=x, n=n)  # overwrites what both have read
    a, b = (plan.buffer(name, (rows, 32), "f32") for name in "ab")
    weight = plan.buffer("weight", 32, "f32")
    plan.launch(softmax(), x=a, y=b, rows=rows, n=32)
    plan.launch(rms_norm(), x=b, y=a, weight=weight, rows=rows, n=32, eps=1e-5)
    regions = find_regions(plan.launches)
    assert list(regions) == [(0, 1, 2), (3, 4)]
    assert "launches 0 to 2 are one region" in regions.explain()
    assert "launch 3: MK301" in regions.explain()


def test_a_variable_named_like_a_blocks_place_joins_nothing() -> None:
    plan = Plan("shadowed")
    n = plan.variable("block_x", 1, 2**32 - 2)
    x, y, z = (plan.buffer(name, 64, "f32") for name in "xyz")
    kernel = fours("shadow", "y[i] = x[i];", Scalar("m", low=0, high=1 << 40),
                   touches=("m * 16", "m * 16 + 16"))  # fmt: skip
    plan.launch(kernel, x=x, y=y, n=64, m=n)
    plan.launch(kernel, x=y, y=z, n=64, m=n)
    assert [each.code for each in find_regions(plan.launches).refused] == ["MK303"]


PIECES = st.tuples(st.sampled_from([0, 8, 16, 16, 16, 24]), st.integers(0, 12), st.integers(0, 24))
"""Step, first byte and size of what blocks touch."""


@given(pieces=st.lists(PIECES, min_size=2, max_size=3), offset=st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_what_is_joined_touches_nothing_of_other_blocks(
    pieces: list[tuple[int, int, int]], offset: int
) -> None:
    """Against brute force: every block of every member with every other block."""
    touched, regions = shared_pieces(pieces, offset)
    for region in regions:
        for one, other in product(region, region):
            pairs = product(enumerate(touched[one]), enumerate(touched[other]))
            for (i, (begin, end)), (j, (first, last)) in pairs:
                is_apart = begin >= end or first >= last or end <= first or last <= begin
                assert one >= other or i == j or is_apart, (region, i, j)


def shared_pieces(
    pieces: list[tuple[int, int, int]], offset: int
) -> tuple[list[list[list[int]]], Any]:
    """Launches that write pieces of one buffer: the bytes of each block, and their regions."""
    plan, n = Plan("pieces"), 64
    shared, touched = plan.buffer("shared", n + 8, "f32"), []
    for number, (step, first, size) in enumerate(pieces):
        end = f"minimum(block_x * {step} + {first + size}, n * 4)"
        kernel = fours("piece", "y[i] = x[i];", touches=(f"block_x * {step} + {first}", end))
        view = shared.view(n, offset if number == 1 else 0)
        plan.launch(kernel, x=plan.buffer(f"x{number}", n, "f32"), y=view, n=n)
        ends = kernel.params[1].touches
        assert ends is not None
        touched.append(
            [
                [each.evaluate({"n": n, "block_x": block}) + view.offset for each in ends]
                for block in range(16)
            ]
        )
    return touched, find_regions(plan.launches)


@pytest.mark.parametrize(
    ("pieces", "offset", "joins"),
    [
        ([(16, 0, 16), (16, 0, 16)], 0, True),
        ([(16, 0, 16), (16, 4, 12)], 0, True),
        ([(16, 4, 8), (16, 0, 16)], 0, True),
        ([(16, 4, 12), (16, 4, 8)], 1, True),
        ([(16, 0, 16), (16, 0, 16)], 1, False),
        ([(16, 0, 16), (16, 4, 16)], 0, False),
        ([(24, 0, 16), (16, 0, 16)], 0, False),
    ],
)
def test_pieces_join_where_they_stay_within_one_part(
    pieces: list[tuple[int, int, int]], offset: int, joins: bool
) -> None:
    assert shared_pieces(pieces, offset)[1].joined == (False, joins)


# ----------------------------------------------------------------------------------------- repeats

REPEATED = st.tuples(
    st.sampled_from(["residual", "mix", "vary", "count", "shuffle", "softmax"]),
    *(st.integers(0, 2),) * 2,
    *(st.integers(0, 1),) * 2,
    st.integers(1, 2),
)
"""Launches over a few rows, so that many repeat another."""


def left_out(taken: list[Launch]) -> list[int | None]:
    """Of each launch, the earlier one that computed the same, found row by row; None: it runs."""
    writers: dict[tuple[int, int], int] = {}
    seen: list[tuple[Launch, dict[tuple[int, int], int | None]]] = []
    found: list[int | None] = []
    for number, launch in enumerate(taken):
        kind, source, target, begin, end, rows = launch
        rows = 1 if kind == "vary" else rows  # the beginning of one
        written = [(target, end + row) for row in range(rows)]
        reads = [(source, begin + row) for row in range(rows)]
        if kind in ("mix", "vary", "count"):
            reads = (reads if kind != "count" else []) + written
        versions = {place: writers.get(place) for place in reads}
        who = {writers.get(place) for place in written}
        alias = next(iter(who)) if len(who) == 1 and kind != "count" else None
        is_same = alias is not None and seen[alias] == (launch, versions)
        found.append(alias if is_same else None)
        seen.append((launch, versions))
        if not is_same:
            writers |= dict.fromkeys(written, number)
    return found


@given(program=st.lists(REPEATED, min_size=2, max_size=16), seed=st.integers(0, 1000))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_repeats_are_left_out_and_the_bits_are_those_of_all_launches(
    cache: KernelCache, program: list[Launch], seed: int
) -> None:
    """Against brute force: who wrote each row last, and what each launch read."""
    plan, taken = planned(program)
    first = len(plan.launches) - len(taken)
    wanted = [None if each is None else each + first for each in left_out(taken)]
    for workers, dedupe in ((1, True), (3, True), (2, False)):
        prepared = plan.prepare(
            "CPU", "megakernel", cache=cache, workers=workers, dedupe=dedupe, lineage=True
        )
        alias = [None if number == by else by for number, by in enumerate(computed_by(prepared))]
        assert alias == [*[None] * first, *(wanted if dedupe else [None] * len(wanted))]
        for values in ({}, {"t": -1.5, "n": 1}, {"n": COLUMNS}):
            settled = {**prepared.values, **values}
            expected = by_themselves(cache, taken, settled["t"], int(settled["n"]))
            prepared._run.delay_seed = seed
            for name, number in zip("abc", range(3), strict=True):
                prepared.write(name, drawn(ROWS, COLUMNS, seed=number))
            prepared(**values, meet=int(workers > 1))
            for name, array in zip("abc", expected, strict=True):
                assert prepared.read(name).tobytes() == array.tobytes(), (workers, dedupe, name)
            report = prepared.report
            assert [int(each) for each in report.tasks.alias] == [
                -1 if each is None else each for each in alias
            ]


def computed_by(prepared: PreparedPlan) -> tuple[int, ...]:
    assert prepared.deduped is not None
    return prepared.deduped.computed_by


def repeating(n: Any = 40, **more: Any) -> Plan:
    """Launch 2 repeats launch 0 between two that read its output; launch 4 repeats launch 1."""
    plan = Plan("repeating")
    x, y, z, w = (plan.buffer(name, 40, "f32") for name in "xyzw")
    plan.launch(ADD_ONE, x=x, y=y, n=n, brick="First", layer=0)
    plan.launch(ADD_ONE, x=y, y=z, n=n, brick="Second", layer=0)
    plan.launch(ADD_ONE, x=x, y=y, n=n, brick="First", layer=1)
    plan.launch(ADD_ONE, x=y, y=w, n=n, brick="Third", layer=1)
    plan.launch(ADD_ONE, x=y, y=z, n=n, brick="Second", layer=1)
    return plan


def test_a_repeat_is_not_run_and_is_told_as_an_alias(cache: KernelCache) -> None:
    prepared = repeating().prepare(
        "CPU", "megakernel", cache=cache, workers=2, trace=True, lineage=True
    )
    assert computed_by(prepared) == (0, 1, 0, 3, 1)
    assert prepared.deduped.explain() == (
        "2 of 5 launches not run\n"
        "launch 2: launch 0 computes the same\n"
        "launch 4: launch 1 computes the same"
    )
    assert list(prepared.regions) == [(0, 1), (3,)]
    assert "3 launches in 2 regions" in prepared.regions.explain()
    assert (prepared().read("w") == 2).all()
    assert (prepared.read("z") == 2).all()
    report = prepared.report
    assert (report.published_items, report.deduped_items) == (30, 20)
    assert (report.items_processed, report.items_remaining) == (50, 0)
    assert list(report.tasks.alias) == [-1, -1, 0, -1, 1]
    done, deduped = TaskState.DONE, TaskState.DEDUPED
    assert list(report.tasks.state) == [done, done, deduped, done, deduped]
    assert list(report.tasks.region) == [0, 0, 0, 1, 0]
    assert set(report.spans.task) == {0, 1, 3}
    assert report.flow.direct(3) == [0], "what it really read"
    assert report.flow.direct(2) == [0]
    assert report.flow.given_to(2) == []
    assert report.outputs == {"w": (3,), "y": (2,), "z": (4,)}
    assert "4  add_one  Second  layer 1  = 1, which computed the same" in report.explain("z")
    assert "given memory x" in report.explain("y")
    begin, waits = prepared._run.engine.waits()
    assert list(waits[begin[3] : begin[4]]) == [0], "it waits for who computed it, and nobody else"


def test_everything_is_run_where_that_is_asked_for(cache: KernelCache) -> None:
    prepared = repeating().prepare("CPU", "megakernel", cache=cache, workers=2, dedupe=False)
    assert computed_by(prepared) == (0, 1, 2, 3, 4)
    assert prepared().report.deduped_items == 0
    assert prepared.report.published_items == 50
    assert repeating().prepare("CPU", cache=cache).deduped is None


def test_repeats_hold_whatever_variables_and_memory_are(cache: KernelCache) -> None:
    plan = Plan("varied")
    n, m = (plan.variable(name, 1, 40, default=20) for name in "nm")
    x, y, z = (plan.buffer(name, 40, "f32") for name in "xyz")
    for length, target in ((n, y), (n, y), (m, y), (20, y), (20, z), (20, z)):
        room = 20 if length == 20 else 40
        plan.launch(ADD_ONE, x=x.view(room), y=target.view(room), n=length)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2)
    # Those with m and 20 are the same as those with n in some runs, and not in others.
    assert computed_by(prepared) == (0, 0, 2, 3, 4, 4)
    for values in ({}, {"n": 33}, {"m": 40}, {"n": 1, "m": 1}):
        prepared.write("y", np.zeros(40, np.float32))
        prepared(**values)
        length = max(prepared.values["n"], prepared.values["m"], 20)
        assert prepared.read("y").sum() == length
        blocks = -(-int(prepared.values["n"]) // 4)
        assert prepared.report.deduped_items == blocks + 5
    other, fresh = np.full(40, 2, np.float32), np.zeros(40, np.float32)
    prepared(x=other, z=fresh)
    assert (fresh[:20] == 3).all()
    with pytest.raises(PlanError, match="overlap, which was not planned"):
        prepared(x=fresh)


STATEFUL = fours("stateful", "y[i] = x[i] + 1;", pure=False)
SCALE = Kernel(
    "scale",
    """BRICKLINE void scale(Block& block, const float* x, float* y, float by) {
           block.once([&] { y[0] = x[0] * by; });
       }""",
    [Param("x", "f32", 1), Param("y", "f32", 1, "write"), Scalar("by", "f32")],
)


def test_every_refusal_to_leave_out_a_repeat_has_its_code(cache: KernelCache) -> None:
    plan, n = Plan("refused"), 16
    x, y, z, total = (plan.buffer(name, n, "f32") for name in ("x", "y", "z", "total"))
    for _ in range(2):
        plan.launch(STATEFUL, x=x, y=y, n=n)
    for _ in range(2):
        plan.launch(ADD_UP, x=x, y=total.view(1), n=n)
    plan.launch(ADD_ONE, x=x, y=z, n=n)
    plan.launch(ADD_ONE, x=y, y=x, n=n)
    plan.launch(ADD_ONE, x=x, y=z, n=n)
    plan.launch(ADD_ONE, x=y[:4], y=z[:4], n=4)
    plan.launch(ADD_ONE, x=x, y=z, n=n)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2)
    assert computed_by(prepared) == tuple(range(9))
    assert [(each.later, each.code, each.other) for each in prepared.deduped.refused] == [
        (1, "MK201", None),
        (3, "MK202", None),
        (6, "MK203", 5),
        (8, "MK204", 7),
    ]
    assert "launch 6 repeats launch 4 and is run: MK203: an input was written in between, by " in (
        prepared.deduped.explain()
    )
    serial = plan.prepare("CPU", cache=cache)
    for run in (prepared, serial):
        run.write("x", drawn(n))
        run()
    for name in ("x", "y", "z", "total"):
        assert prepared.read(name).tobytes() == serial.read(name).tobytes()


def test_parameters_are_the_same_where_their_bits_are(cache: KernelCache) -> None:
    plan = Plan("bits")
    t, u = (plan.variable(name, dtype="f32", default=0.5) for name in "tu")
    x, y = plan.buffer("x", 1, "f32"), plan.buffer("y", 1, "f32")
    for by in (0.0, -0.0, -0.0, float("nan"), float("nan"), t, t, u):
        plan.launch(SCALE, x=x, y=y, by=by)
    prepared = plan.prepare("CPU", "megakernel", cache=cache)
    assert computed_by(prepared) == (0, 1, 1, 3, 3, 5, 5, 7)


def test_a_fault_is_also_that_of_what_repeats_it(cache: KernelCache) -> None:
    plan, n = Plan("faulty"), 40
    at = plan.variable("at", -1, 100)
    x, y, z, w = (plan.buffer(name, n, "f32") for name in "xyzw")
    plan.launch(ADD_ONE, x=x, y=w, n=n)
    for _ in range(2):
        plan.launch(FAIL_AT, x=x, y=y, n=n, at=at, also=-1)
    plan.launch(rms_norm(), x=y.reshape(1, n), y=z.reshape(1, n), weight=x, rows=1, n=n, eps=1e-5)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2)
    assert computed_by(prepared) == (0, 1, 1, 3)
    with pytest.raises(LaunchError, match=r"launch 1 .*1 of 4 launches had finished"):
        prepared(at=6)
    report = prepared.report
    assert list(report.tasks.done) == [10, 9, 9, 0]
    assert (report.items_processed, report.items_remaining) == (28, 3)
    assert (report.items_faulted, report.items_skipped) == (1, 1)
    prepared.reset()
    assert prepared(at=-1).report.is_complete


def test_a_repeat_that_is_none_is_found_before_anything_runs(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "brickline.executor.megakernel.program.find_deduped",
        lambda launches: Deduped((0, 1, 0), ((), (0,), ())),
    )
    plan, n = Plan("wrong"), 40
    x, y = plan.buffer("x", n, "f32"), plan.buffer("y", n, "f32")
    for source, target in ((x, y), (y, x), (x, y)):
        plan.launch(ADD_ONE, x=source, y=target, n=n)
    with pytest.raises(InternalError, match=r"MK409: launch 2 \(add_one\) beside launch 0"):
        plan.prepare("CPU", "megakernel", cache=cache)


def test_a_profiler_is_told_of_what_runs_and_fingerprints_are_of_all(cache: KernelCache) -> None:
    profiler = bl.BrickProfiler("repeats", enabled=True, graph=True)
    plan = repeating()
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2, profiler=profiler)
    prepared()
    assert [profiler.brick_stats(each).count for each in ("First", "Second", "Third")] == [1] * 3
    nodes = profiler.graph.kernel_nodes()
    assert [node.timing_ns is None for node in nodes] == [False, False, True, False, True]
    for number, earlier in ((2, 0), (4, 1), (3, 2)):
        edges = profiler.graph.incoming_edges(nodes[number].id)
        waits = [each.source for each in edges if each.kind is EdgeKind.DEPENDS_ON]
        assert waits == [nodes[earlier].id]
    prepared.watch(profiler, fingerprints=True)
    prepared()
    assert len(profiler.kernel_traces()) == 5, "every launch is run, and waited for"
    assert profiler.brick_stats("First").count == 3
    profiler.close()


# ------------------------------------------------------------------------------------------ proofs


class Tampered:
    """Tables of an engine, one of them spoilt."""

    def __init__(self, engine: Any, **tables: Any) -> None:
        self.workers = engine.workers
        for name in ("tasks", "waits", "lists"):
            found = tables.get(name, getattr(engine, name)())
            setattr(self, name, lambda found=found: found)


def test_tables_that_cannot_be_run_are_found_before_they_are(cache: KernelCache) -> None:
    plan, n = Plan("proved"), 40
    a, b, c = (plan.buffer(name, n, "f32") for name in "abc")
    plan.launch(LINGER, x=a, y=b, n=n, us=0)
    plan.launch(LINGER, x=b, y=c, n=n, us=0)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2)
    run = prepared._run
    engine, prover = run.engine, Prover(run._launches)
    assert prover.breach(Tampered(engine), {}) is None
    tasks, (begin, lists) = engine.tasks(), engine.lists()
    no_waits = np.zeros(3, np.int64), np.zeros(0, np.uint32)
    assert prover.breach(Tampered(engine, waits=no_waits), {}) == (RACE, 1, 0)
    silent = tasks.copy()
    silent["flags"] = 0
    assert prover.breach(Tampered(engine, tasks=silent), {})[0] == 404
    assert prover.breach(Tampered(engine, lists=(begin, lists[::-1])), {})[0] == 405
    twice = np.array([0, 0, 0, 1], np.uint32)
    assert prover.breach(Tampered(engine, lists=(begin, twice)), {})[0] == 407
    joined = tasks.copy()
    joined["flags"][1] = 2
    assert prover.breach(Tampered(engine, tasks=joined, waits=no_waits), {}) == (RACE, 1, 0)
    run.engine = Tampered(engine, waits=no_waits)
    with pytest.raises(InternalError, match=r"MK406: launch 1 \(linger\) beside launch 0"):
        run._prove()


def test_launches_that_were_joined_wrongly_are_cut_apart(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two proofs must agree, or launches wait for each other."""
    monkeypatch.setattr(
        "brickline.executor.megakernel.program.find_regions",
        lambda launches, deduped: Regions([number > 0 for number in range(len(launches))], ()),
    )
    turned = fours("turned", "y[i] = x[n - 1 - i];", touches=None)
    plan, n = Plan("wrong"), 40
    buffers = [plan.buffer(name, n, "f32") for name in "abcd"]
    for number, kernel in enumerate((ADD_ONE, turned, ADD_ONE)):
        plan.launch(kernel, x=buffers[number], y=buffers[number + 1], n=n)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=4)
    assert list(prepared.regions) == [(0,), (1,), (2,)]
    assert [each.code for each in prepared.regions.refused] == ["MK303", "MK303"]
    array = drawn(n)
    for run in range(50):
        prepared._run.delay_seed = run
        prepared.write("a", array)
        assert (prepared().read("d") == array[::-1] + 1 + 1).all()


# ------------------------------------------------------------------------------------- what is told


def test_a_report_has_times_regions_lineage_and_outputs(cache: KernelCache) -> None:
    plan = chain(3)
    prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2, trace=True, lineage=True)
    assert prepared.report is None, "nothing has run"
    report = prepared().report
    assert report is prepared.report, "made once"
    assert report.name == "chain"
    assert len(report.workers) == 2
    assert list(report.tasks.region) == [0, 0, 0]
    assert list(report.tasks.done) == [10, 10, 10]
    assert report.outputs == {f"b{number}": (number - 1,) for number in (1, 2, 3)}
    assert "given memory b0" in report.explain("b3")
    assert sum(report.spans.items) == 30
    assert report.wall_time_ns >= report.backend_dispatch_ns > 0
    assert {worker.state for worker in report.workers} == {"finished"}
    assert prepared() is prepared
    assert prepared.report is not report, "each run has its own"
    plain = plan.prepare("CPU", "megakernel", cache=cache, workers=2)
    assert plain().report.spans is None
    assert plain.report.flow is None


def test_a_report_knows_who_wrote_last_to_parts_of_a_buffer(cache: KernelCache) -> None:
    plan = Plan("parts")
    x, y = plan.buffer("x", 32, "f32"), plan.buffer("y", 32, "f32")
    plan.launch(ADD_ONE, x=x, y=y, n=32)
    plan.launch(ADD_ONE, x=x[:16], y=y[:16], n=16)
    plan.launch(ADD_ONE, x=x[:16], y=y[16:], n=16)
    plan.launch(ADD_ONE, x=y, y=x, n=32)
    report = plan.prepare("CPU", "megakernel", cache=cache, lineage=True)().report
    assert report.outputs == {"x": (3,), "y": (1, 2)}
    assert report.flow.direct(3) == [1, 2]
    assert report.flow.given_to(0) == ["x"]
    assert report.flow.given_to(3) == []


def test_counters_are_measured_where_the_documentation_says(cache: KernelCache) -> None:
    reports = {
        option: chain(3).prepare("CPU", "megakernel", cache=cache, workers=2, **options)().report
        for option, options in (("", {}), ("`trace=True`", {"trace": True}))
    }
    check_counters("plan, CPU", reports)
    nothing = {"bytes_moved", "resident_allocations", "readback_buffers"}
    assert {name: getattr(reports[""].telemetry, name) for name in nothing} == dict.fromkeys(
        nothing, 0
    )


def test_a_plan_is_compiled_and_planned_for_its_first_run(tmp_path: Path) -> None:
    plan = Plan("counted")
    n = plan.variable("n", 1, 400)
    x, y = plan.buffer("x", n, "f32"), plan.buffer("y", n, "f32")
    plan.launch(ADD_ONE, x=x, y=y, n=n)
    for is_compiled in (False, True):
        cache = KernelCache(tmp_path / "cache")
        prepared = plan.prepare("CPU", "megakernel", cache=cache, workers=2)
        found = [prepared(n=value).report.telemetry for value in (40, 40, 400)]
        assert [each.compiled_cache_hit for each in found] == [is_compiled, True, True]
        assert [each.resident_cache_hit for each in found] == [False, True, False]
        assert [each.kernel_launches for each in found] == [1, 1, 1]


@pytest.mark.parametrize("limit", [None, 60])
def test_a_profiler_is_told_of_launches_and_dependencies(
    cache: KernelCache, limit: float | None
) -> None:
    plan, n = Plan("watched"), 40
    x, y, z = (plan.buffer(name, n, "f32") for name in "xyz")
    plan.launch(ADD_ONE, x=x, y=y, n=n, brick="First", layer=1)
    plan.launch(ADD_ONE, x=y, y=z, n=n, brick="Second")
    profiler = bl.BrickProfiler("watched", enabled=True, graph=True)
    prepared = plan.prepare(
        "CPU", "megakernel", cache=cache, workers=2, max_wall_time=limit, profiler=profiler
    )
    for _ in range(3):
        prepared()
    for name in ("First", "Second"):
        assert profiler.brick_stats(name).count == 3
    nodes = profiler.graph.kernel_nodes()
    assert len(nodes) == 6
    assert all(node.timing_ns is not None for node in nodes)
    edges = [edge.kind for edge in profiler.graph.incoming_edges(nodes[1].id)]
    assert EdgeKind.DEPENDS_ON in edges
    assert (prepared.read("z") == 2).all()
    profiler.close()


def test_a_profiler_is_told_what_each_worker_did_where_that_is_recorded(
    cache: KernelCache, tmp_path: Path
) -> None:
    profiler = bl.BrickProfiler("told", enabled=True, path=tmp_path / "told.brick")
    plan = chain(3)
    for trace in (False, True):
        prepared = plan.prepare(
            "CPU", "megakernel", cache=cache, workers=2, trace=trace, profiler=profiler
        )
        prepared()
        assert len(profiler.kernel_traces()) == (3 if trace else 0), "one for each launch"
    profiler.close()
    (tiles,) = profile_from_run(bl.Run.open(tmp_path / "told.brick")).tiles
    assert tiles.count == 6, "one for each part of a launch"


def test_rows_of_the_core_are_read_as_they_are(cache: KernelCache) -> None:
    prepared = chain(2).prepare("CPU", "megakernel", cache=cache, workers=2)
    prepared()
    assert TASK.itemsize == 80
    tasks = prepared._run.engine.tasks()
    assert list(tasks["blocks"]) == [10, 10]
    assert list(tasks["parts"]) == [2, 2]
    assert list(tasks["arguments"]) == [3, 3]
    with pytest.raises(KeyError):
        prepared._run.engine._core.table("nothing")
    with pytest.raises(ValueError, match="expected a plan on CPU"):
        _core.MegaCpuCore(chain(1).prepare("NULL")._core, [], 1, held=())
