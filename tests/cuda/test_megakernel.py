"""Plans as one persistent launch: the bits of serial runs, rows copied ahead, faults, ends."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_table import check_counters

import brickline as bl
from brickline.cache import KernelCache
from brickline.errors import DeadlineReached, LaunchError, PlanError
from brickline.executor.prepared import PreparedPlan
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import gemv, gemv_residual, norm_gemv, residual
from brickline.plan import Plan
from brickline.profile import profile_from_run

PIECE = ("block_x * 128", "minimum((block_x + 1) * 128, n * 4)")
"""Bytes of 32 floats for each block."""


def pieces(name: str, body: str, *more: Scalar) -> Kernel:
    """A kernel whose block handles 32 floats, from x to y."""
    given = "".join(f", int64_t {each.name}" for each in more)
    source = f"""
    BRICKLINE void {name}(Block& block, const float* x, float* y, int64_t n{given}) {{
        const int64_t first = block.index() * 32;
        block.each(minimum<int64_t>(n - first, 32), [&](int64_t k) {{
            const int64_t i = first + k;
            {body}
        }});
    }}"""
    declared = [
        Param("x", "f32", "n", touches=PIECE),
        Param("y", "f32", "n", "write", touches=PIECE),
        Scalar("n", low=1, high=1 << 24),
        *more,
    ]
    return Kernel(name, source, declared, global_size="ceil_div(n, 32)", local_size=64)


ADD_ONE = pieces("add_one", "y[i] = x[i] + 1.0f;")
FAIL_AT = pieces(
    "fail_at",
    "y[i] = x[i] + 1.0f; if (block.index() == at) block.fault(20);",
    Scalar("at", low=-1, high=1 << 20),
)
LINGER = Kernel(
    "linger",
    """BRICKLINE void linger(Block& block, const float* x, float* y, int64_t n, int64_t turns) {
           float value = x[block.index()];
           for (int64_t k = 0; k < turns; ++k) value = value * 0.5f + 1.0f;
           block.once([&] { y[block.index()] = value; });
       }""",
    [
        *(Param("x", "f32", "n"), Param("y", "f32", "n", "write")),
        *(Scalar("n", low=1, high=1 << 20), Scalar("turns", high=1 << 40)),
    ],
    global_size="n",
    local_size=32,
)


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


# ------------------------------------------------------------------------------------ rows ahead


def product_plan(kernel: Kernel, rows: int, columns: int) -> Plan:
    plan = Plan("product")
    dtype = kernel.params[0].dtype
    given: dict[str, Any] = {
        "w": plan.buffer("w", (rows, columns), dtype),
        "x": plan.buffer("x", columns, kernel.params[1].dtype),
    }
    for param in kernel.params[2:]:
        size = columns if param.name == "weight" else rows
        given[param.name] = plan.buffer(param.name, size, param.dtype)
    scalars = {"m": rows, "n": columns, "eps": 1e-5}
    names = [each.name for each in kernel.signature if isinstance(each, Scalar)]
    plan.launch(kernel, **given, **{name: scalars[name] for name in names})
    return plan


def filled(plan: Plan, executor: str, **options: Any) -> PreparedPlan:
    prepared = plan.prepare("CUDA:0", executor, **options)
    for number, storage in enumerate(plan.storages):
        rng = np.random.default_rng(number)
        values = rng.standard_normal(storage.shape, dtype=np.float32)
        prepared.write(storage.name, values.astype(bl.dtypes.DTYPES[storage.dtype].numpy))
    return prepared


@pytest.mark.parametrize(
    ("kernel", "rows", "columns", "is_ahead"),
    [
        (gemv(), 4096, 2048, True),
        (gemv(rows_per_block=48, lanes=384), 5003, 2048, True),
        (gemv(), 77, 256, True),
        (gemv(rows_per_block=1, lanes=64), 1000, 4096, True),
        (gemv(rows_per_block=40, lanes=512), 1000, 8192, True),
        (gemv("f32"), 300, 1024, True),
        (gemv(), 300, 16384, False),  # a row is more than a slot
        (gemv(), 300, 1004, False),  # rows do not begin at multiples of 16 bytes
        (norm_gemv(), 3000, 2048, True),
        (gemv_residual(), 2048, 8192, True),
    ],
    ids=str,
)
def test_rows_that_are_copied_ahead_give_the_same_bits(
    kernel: Kernel, rows: int, columns: int, is_ahead: bool
) -> None:
    plan = product_plan(kernel, rows, columns)
    expected = bits(filled(plan, "serial")().read("y"))
    prepared = filled(plan, "megakernel")
    assert (prepared._run.engine.streams[0] is not None) == is_ahead
    for _ in range(3):
        assert bits(prepared().read("y")) == expected


def test_rows_that_another_launch_writes_are_not_copied_ahead() -> None:
    plan = Plan("written")
    w, x = plan.buffer("w", (256, 512), "bf16"), plan.buffer("x", 512, "bf16")
    y, v = plan.buffer("y", 256, "f32"), plan.buffer("v", 256 * 512, "bf16")
    flat = w.reshape(256 * 512)
    plan.launch(residual("bf16"), a=v, b=v, y=flat, n=256 * 512)
    plan.launch(gemv(), w=w, x=x, y=y, m=256, n=512)
    expected = bits(filled(plan, "serial")().read("y"))
    prepared = filled(plan, "megakernel")
    assert prepared._run.engine.streams == [None, None]
    assert bits(prepared().read("y")) == expected


def test_many_products_one_after_the_other_keep_the_ring_in_step() -> None:
    plan = Plan("products")
    x = plan.buffer("x", 512, "bf16")
    for number in range(40):
        rows = 16 + 37 * number
        w, y = (
            plan.buffer(f"w{number}", (rows, 512), "bf16"),
            plan.buffer(f"y{number}", rows, "f32"),
        )
        kernel = gemv(rows_per_block=(8, 3, 20)[number % 3])
        plan.launch(kernel, w=w, x=x, y=y, m=rows, n=512)
    one, other = filled(plan, "serial")(), filled(plan, "megakernel")
    other._run.delay_seed = 7
    for _ in range(5):
        other()
        for number in range(40):
            assert bits(one.read(f"y{number}")) == bits(other.read(f"y{number}")), number


# ----------------------------------------------------------------------------- order and repetition


def chain(levels: int, n: int = 4096) -> Plan:
    plan = Plan("chain")
    a, b = plan.buffer("a", n, "f32"), plan.buffer("b", n, "f32")
    turn = [a, b]
    everything = Kernel(
        "shift",
        """BRICKLINE void shift(Block& block, const float* x, float* y, int64_t n) {
               block.each(32, [&](int64_t k) {
                   const int64_t i = block.index() * 32 + k;
                   y[i] = x[(i + n / 2 + 31) % n] + 1.0f;
               });
           }""",
        [
            Param("x", "f32", "n"),
            Param("y", "f32", "n", "write"),
            Scalar("n", low=32, high=1 << 20),
        ],
        global_size="n // 32",
        local_size=32,
    )
    for level in range(levels):
        plan.launch(everything, x=turn[level % 2], y=turn[(level + 1) % 2], n=n)
    return plan


def test_a_thousand_runs_with_delays_are_the_same_bits() -> None:
    plan = chain(12)
    expected = bits(filled(plan, "serial")().read("a"))
    prepared = filled(plan, "megakernel")
    start = prepared.read("a").copy()
    poison = np.full(4096, np.nan, np.float32)
    for run in range(1000):
        prepared._run.delay_seed = run % 50
        prepared.write("a", start)
        prepared.write("b", poison)
        assert bits(prepared().read("a")) == expected, run


@pytest.mark.parametrize("workers", [1, 2, 7, 132])
def test_any_number_of_workers_gives_the_same_bits(workers: int) -> None:
    plan = chain(9)
    expected = bits(filled(plan, "serial")().read("b"))
    assert bits(filled(plan, "megakernel", workers=workers)().read("b")) == expected


def test_regions_run_without_a_hop_and_give_the_same_bits() -> None:
    plan = Plan("region")
    buffers = [plan.buffer(f"b{k}", 10_000, "f32") for k in range(5)]
    for x, y in pairwise(buffers):
        plan.launch(ADD_ONE, x=x, y=y, n=10_000)
    prepared = filled(plan, "megakernel")
    assert prepared.regions is not None
    assert len(prepared.regions) == 1
    expected = bits(filled(plan, "serial")().read("b4"))
    assert bits(prepared().read("b4")) == expected


# ------------------------------------------------------------------------------------------ repeats


def repeats(seed: int, launches: int = 24, n: int = 1280) -> Plan:
    """Launches over four buffers and two parts of them, so that many repeat another."""
    rng, plan = np.random.default_rng(seed), Plan("repeats")
    buffers = [plan.buffer(f"b{k}", n, "f32") for k in range(4)]
    pieces = [each for buffer in buffers for each in (buffer, buffer[:640])]
    shift = chain(1).launches[0].kernel
    for _ in range(launches):
        x, y = rng.choice(4, 2, replace=False)
        half, kernel = int(rng.integers(2)), (ADD_ONE, shift)[int(rng.integers(2))]
        source, target = pieces[2 * x + half], pieces[2 * y + half]
        plan.launch(kernel, x=source, y=target, n=640 if half else n)
    return plan


def test_repeats_are_left_out_and_give_the_bits_of_serial_runs() -> None:
    left_out = 0
    for seed in range(12):
        plan = repeats(seed)
        serial, mega = filled(plan, "serial"), filled(plan, "megakernel")
        everything = filled(plan, "megakernel", dedupe=False)
        for run in range(3):
            mega._run.delay_seed = run
            for prepared in (serial, mega, everything):
                prepared()
            for name in ("b0", "b1", "b2", "b3"):
                expected = bits(serial.read(name))
                assert bits(mega.read(name)) == expected, (seed, run, name)
                assert bits(everything.read(name)) == expected, (seed, run, name)
        report = mega.report
        assert report is not None
        assert report.is_complete
        assert sum(each.items for each in report.workers) == report.published_items
        assert everything.report.deduped_items == 0  # type: ignore[union-attr]
        left_out += report.deduped_items or 0
    assert left_out > 0


def test_a_fault_is_also_that_of_what_repeats_it() -> None:
    plan = Plan("faulty")
    at = plan.variable("at", -1, 100)
    x, y, z = (plan.buffer(name, 3200, "f32") for name in "xyz")
    for _ in range(2):
        plan.launch(FAIL_AT, x=x, y=y, n=3200, at=at)
    plan.launch(chain(1).launches[0].kernel, x=y, y=z, n=3200)
    prepared = plan.prepare("CUDA:0", "megakernel")
    assert prepared.deduped is not None
    assert prepared.deduped.computed_by == (0, 0, 2)
    prepared(at=70)
    with pytest.raises(LaunchError, match=r"launch 0 .*item 70, so that 1 launch that .*0 of 3"):
        prepared.synchronize()
    report = prepared.report
    assert report is not None
    assert report.tasks.done is not None
    assert report.tasks.done.tolist() == [99, 99, 0]
    assert report.items_remaining == 102
    prepared.reset()
    assert (prepared(at=-1).read("z") == 2).all()


# ------------------------------------------------------------------------------------------ watched


@pytest.mark.parametrize("clock", ["CPU", "CUDA:0"])
def test_a_watched_run_is_one_launch_whose_workers_take_the_times(clock: str) -> None:
    plan = Plan("watched")
    x, y, z, w = (plan.buffer(name, 4096, "f32") for name in "xyzw")
    shift = chain(1).launches[0].kernel
    plan.launch(shift, x=x, y=y, n=4096, brick="First", layer=0)
    plan.launch(shift, x=y, y=z, n=4096, brick="Second", layer=0)
    plan.launch(shift, x=x, y=y, n=4096, brick="First", layer=1)  # is not run
    plan.launch(shift, x=z, y=w, n=4096, brick="Third", layer=1)
    profiler = bl.BrickProfiler("watched", enabled=True, device=clock, graph=True)
    prepared = plan.prepare("CUDA:0", "megakernel", profiler=profiler)
    began = time.monotonic_ns()
    for _ in range(3):
        prepared()
    took = time.monotonic_ns() - began
    report = prepared.report
    assert report is not None, "a megakernel ran"
    assert report.telemetry.kernel_launches == 1
    assert (prepared.read("w") == 3).all()
    for name in ("First", "Second", "Third"):
        stats = profiler.brick_stats(name)
        assert stats.count == 3
        assert 0 < stats.total_ns < took
    nodes = profiler.graph.kernel_nodes()
    for run in (nodes[:4], nodes[4:8], nodes[8:]):
        assert [node.timing_ns is None for node in run] == [False, False, True, False]
        first, second, _, third = run
        slack = 3_000  # ns: clocks of workers are aligned by two moments
        assert began < first.start_ns < second.start_ns < third.start_ns < began + took
        assert first.start_ns + first.timing_ns < second.start_ns + slack
    assert not profiler.kernel_traces(), "parts were not asked for"
    prepared.watch(None)
    assert prepared().report.spans is None  # type: ignore[union-attr]
    assert (prepared.read("w") == 3).all()
    profiler.close()


def test_counters_are_measured_where_the_documentation_says() -> None:
    reports = {}
    for option, options in (("", {}), ("`trace=True`", {"trace": True})):
        report = filled(chain(3), "megakernel", **options)().report
        assert report is not None
        reports[option] = report
    check_counters("plan, CUDA", reports)
    plain, traced = (reports[option].telemetry for option in ("", "`trace=True`"))
    assert plain.readback_buffers == 3, "progress, faults and what was executed"
    assert traced.readback_buffers == 4
    assert traced.bytes_read_back is not None
    assert plain.bytes_read_back is not None
    assert traced.bytes_read_back > plain.bytes_read_back > 0


def test_a_plan_is_compiled_and_allocated_for_its_first_run(tmp_path: Path) -> None:
    plan = Plan("counted")
    n = plan.variable("n", 1, 1 << 16)
    x, y = plan.buffer("x", n, "f32"), plan.buffer("y", n, "f32")
    plan.launch(ADD_ONE, x=x, y=y, n=n)
    for is_compiled in (False, True):
        cache = KernelCache(tmp_path / "cache")
        prepared = plan.prepare("CUDA:0", "megakernel", cache=cache)
        found = []
        for value in (64, 64, 1 << 16):
            prepared(n=value).synchronize()
            assert prepared.report is not None
            found.append(prepared.report.telemetry)
        assert [each.compiled_cache_hit for each in found] == [is_compiled, True, True]
        assert [each.resident_cache_hit for each in found] == [False, True, False]
        first, second, third = (each.resident_allocations or 0 for each in found)
        # Counters, faults, stopped, progress, stop, tables and executed; the last two are made for
        # the largest values, and the first run's may need more room.
        assert 7 <= first <= 9
        assert second == 0
        assert third <= 2, "tables and executed may need more room"
        uploaded = [each.bytes_uploaded or 0 for each in found]
        assert uploaded[0] > uploaded[1], "tables are copied once"


def test_a_watched_run_tells_parts_where_they_are_recorded(tmp_path: Path) -> None:
    profiler = bl.BrickProfiler("told", enabled=True, path=tmp_path / "told.brick")
    prepared = filled(chain(5), "megakernel", trace=True, profiler=profiler)
    prepared()
    assert len(profiler.kernel_traces()) == 5
    profiler.close()
    (tiles,) = profile_from_run(bl.Run.open(tmp_path / "told.brick")).tiles
    assert tiles.count == 5 * 128, "one for each part of a launch"


def test_a_watched_run_lies_behind_what_its_stream_was_given_before() -> None:
    before, plan = Plan("before"), chain(3)
    x, y = before.buffer("x", 64, "f32"), before.buffer("y", 64, "f32")
    before.launch(LINGER, x=x, y=y, n=64, turns=1 << 24)  # some 50 ms
    slow = before.prepare("CUDA:0")
    profiler = bl.BrickProfiler("behind", enabled=True, graph=True)
    prepared = plan.prepare("CUDA:0", "megakernel", profiler=profiler)
    prepared()
    slow().synchronize()
    began = time.monotonic_ns()
    slow().synchronize()
    lingers = time.monotonic_ns() - began
    began = time.monotonic_ns()
    slow()
    prepared()
    took = time.monotonic_ns() - began
    first = profiler.graph.kernel_nodes()[3]
    assert began + 0.8 * lingers < first.start_ns < began + took
    profiler.close()


def test_a_fault_of_a_watched_run_is_raised_at_once() -> None:
    plan = Plan("faulty")
    at = plan.variable("at", -1, 100)
    x, y = plan.buffer("x", 3200, "f32"), plan.buffer("y", 3200, "f32")
    plan.launch(FAIL_AT, x=x, y=y, n=3200, at=at)
    profiler = bl.BrickProfiler("faulty", enabled=True)
    prepared = plan.prepare("CUDA:0", "megakernel", profiler=profiler)
    with pytest.raises(LaunchError, match=r"fault 20.* at item 7;"):
        prepared(at=7)
    prepared.reset()
    assert (prepared(at=-1).read("y") == 1).all()
    assert profiler.brick_stats("fail_at").count == 1
    profiler.close()


def test_fingerprints_are_taken_launch_by_launch() -> None:
    profiler = bl.BrickProfiler("fingerprints", enabled=True)
    plan = repeats(0, 6)
    prepared = filled(plan, "megakernel", profiler=profiler, fingerprints=True)
    prepared()
    assert prepared.report is None, "no megakernel ran"
    assert len(profiler.kernel_traces()) == 6
    profiler.close()


# --------------------------------------------------------------------------------- reports and ends


def test_a_report_says_what_workers_did() -> None:
    prepared = filled(chain(50), "megakernel", trace=True, lineage=True)
    report = prepared().report
    assert report is not None
    assert report.is_complete
    assert report.items_processed == 50 * 128
    assert report.items_remaining == 0
    assert sum(each.items for each in report.workers) == 50 * 128
    assert report.spans is not None
    assert (report.spans.ready_ns >= report.spans.begin_ns).all()
    assert (report.spans.end_ns >= report.spans.ready_ns).all()
    # Whatever the clocks of two workers: who waits is ready after all that it waits for have ended.
    ended = [report.spans.end_ns[report.spans.task == task].max() for task in range(50)]
    ready = [report.spans.ready_ns[report.spans.task == task].min() for task in range(50)]
    slack = 3_000  # ns: clocks of workers are aligned by two moments
    assert all(later > earlier - slack for earlier, later in zip(ended, ready[1:], strict=False))


def test_times_of_a_short_list_are_of_this_run() -> None:
    prepared = filled(chain(3), "megakernel", trace=True)
    for _ in range(300):
        report = prepared().report
        assert report is not None
        assert report.spans is not None
        spans = report.spans
        assert (spans.ready_ns >= spans.begin_ns).all()
        assert (spans.end_ns >= spans.ready_ns).all()
        assert spans.end_ns.max() - spans.begin_ns.min() < report.wall_time_ns


def test_a_fault_skips_what_depends_on_it_and_nothing_else() -> None:
    plan = Plan("faults")
    at = plan.variable("at", -1, 100)
    names = ("a", "b", "c", "d", "e")
    a, b, c, d, e = (plan.buffer(name, 3200, "f32") for name in names)
    shift = chain(1).launches[0].kernel
    plan.launch(FAIL_AT, x=a, y=b, n=3200, at=at)
    plan.launch(shift, x=b, y=c, n=3200)  # waits for all of it
    plan.launch(ADD_ONE, x=a, y=d, n=3200)
    plan.launch(shift, x=d, y=e, n=3200)
    prepared = plan.prepare("CUDA:0", "megakernel")
    zeros = np.zeros(3200, np.float32)
    prepared.write("a", zeros)
    prepared(at=70)
    with pytest.raises(LaunchError, match=r"launch 0 \(fail_at\).*fault 20.*item 70"):
        prepared.synchronize()
    report = prepared.report
    assert report is not None
    assert [(each.task, each.item, each.code) for each in report.faults] == [(0, 70, "20")]
    assert report.items_processed + report.items_remaining == 400
    assert report.items_skipped == 100
    assert (prepared.read("e") == 2).all()
    assert (prepared.read("c") == 0).all()
    prepared.reset()
    assert (prepared(at=-1).read("c") == 2).all()


def test_a_deadline_leaves_a_true_report_and_a_usable_engine() -> None:
    plan = Plan("slow")
    turns = plan.variable("turns", 0, 1 << 30)
    x, y, z = (plan.buffer(name, 20_000, "f32") for name in "xyz")
    plan.launch(LINGER, x=x, y=y, n=20_000, turns=turns)
    plan.launch(LINGER, x=y, y=z, n=20_000, turns=0)
    prepared = plan.prepare("CUDA:0", "megakernel", max_wall_time=0.02)
    prepared(turns=0)
    with pytest.raises(DeadlineReached, match=r"of 40000 items were executed"):
        prepared(turns=1 << 20)  # some ms an item, 150 items a worker
    report = prepared.report
    assert report is not None
    assert 0 < report.items_processed < 20_000
    assert report.items_processed + report.items_remaining == 40_000
    # Items that count as done have their result, no other has.
    done = prepared.read("y")
    assert np.count_nonzero(np.abs(done - 2) < 1e-3) == report.items_processed
    prepared.reset()
    assert prepared(turns=0).report.is_complete  # type: ignore[union-attr]


HANG = """
import brickline as bl, numpy as np, sys
from brickline.errors import DeviceHung
kernel = bl.Kernel("stuck", '''
BRICKLINE void stuck(Block& block, const float* x, float* y, int64_t n) {
    if (block.index() == 3) while (*(const volatile float*)x == 0.0f) {}
    block.once([&] { y[block.index()] = 1.0f; });
}''', [bl.Param("x", "f32", 1), bl.Param("y", "f32", "n", "write"), bl.Scalar("n", low=1, high=64)],
    global_size="n", local_size=32)
plan = bl.Plan("hang")
x, y, z = plan.buffer("x", 1, "f32"), plan.buffer("y", 8, "f32"), plan.buffer("z", 8, "f32")
plan.launch(kernel, x=x, y=y, n=8)
plan.launch(kernel, x=y.view(1), y=z, n=8)
prepared = plan.prepare("CUDA:0", "megakernel", max_wall_time=0.1)
import time
began = time.monotonic()
try:
    prepared()
except DeviceHung as error:
    took = time.monotonic() - began
    print("hung", round(took, 1), error, flush=True)
import os
os._exit(0 if took < 2.1 else 1)
"""


def test_an_item_that_never_returns_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANG], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "item 3 of launch 0 (stuck)" in done.stdout


def test_stop_ends_a_run_and_the_engine_runs_again() -> None:
    plan = Plan("stopped")
    turns = plan.variable("turns", 0, 1 << 30)
    x, y = plan.buffer("x", 20_000, "f32"), plan.buffer("y", 20_000, "f32")
    plan.launch(LINGER, x=x, y=y, n=20_000, turns=turns)
    prepared = plan.prepare("CUDA:0", "megakernel")
    prepared(turns=0).synchronize()
    prepared(turns=1 << 18)
    prepared.stop()
    with pytest.raises(LaunchError, match="stop"):
        prepared.synchronize()
    prepared.reset()
    assert prepared(turns=0).report.is_complete  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------- refusals


def test_what_a_worker_cannot_run_is_refused_with_a_code() -> None:
    plan = Plan("odd")
    x, y = plan.buffer("x", 64, "f32"), plan.buffer("y", 64, "f32")
    odd = Kernel(
        "odd",
        "BRICKLINE void odd(Block& block, const float* x, float* y) { y[0] = x[0]; }",
        [Param("x", "f32", 64), Param("y", "f32", 64, "write")],
        local_size=48,
    )
    plan.launch(odd, x=x, y=y)
    with pytest.raises(PlanError, match="MK109"):
        plan.prepare("CUDA:0", "megakernel")
    with pytest.raises(PlanError, match="MK108"):
        chain(2).prepare("CUDA:0", "megakernel", workers=500)
