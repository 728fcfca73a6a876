"""Claims: a queue of a megakernel costs little for an item on two cores, and beats thread pools.

* Items that do nothing, from submission to report: at most 0.5 us each, 2 million a second; as
  submissions of 64 blocks, and as submissions of one block, each with memory and hazards of its
  own, where the host that plans and publishes them is what takes the time.
* Items of 10 us against `concurrent.futures.ThreadPoolExecutor` and joblib's threads, which call
  the same compiled function with the GIL released: at most the time of the faster one.
* Items of 10 us that are recorded, to the same that are not: at most 1.02 of the time from the
  first submission to the last item.
* A chain of a batch, in which block k needs what block k of the submission before writes, joined
  into one region: at most the time of the same chain apart, on a CPU with blocks of 16 KiB, small
  enough for its cache, and on a GPU; with tiny blocks on a CPU there is no target.
* On a GPU, items that do nothing, from submission to report, beside the same launched one by one
  from Python and as a CUDA graph. Skipped without a GPU; no target.

Wall time of the whole process on two cores: workers are threads, and so is whoever feeds them.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import harness
import numpy as np
from harness import Claim

import brickline as bl
from brickline.cache import KernelCache
from brickline.errors import DeviceError
from brickline.executor.megakernel.queue import Megakernel

MOST_US = 0.5
CORES = 2
NOTHING = bl.Kernel(
    "nothing",
    "BRICKLINE void nothing(Block& block, const int32_t* x, int32_t* y, int64_t blocks) {}",
    [bl.Param("x", "i32", 1), bl.Param("y", "i32", 1, "write"), bl.Scalar("blocks", low=1)],
    global_size="blocks",
    pure=False,
)
BUSY = bl.Kernel(
    "busy",
    """BRICKLINE void busy(Block& block, float* y, int64_t rounds) {
           float value = y[0];
           for (int64_t i = 0; i < rounds; ++i) value = value * 0.999f + 0.5f;
           y[0] = value;
       }""",
    [bl.Param("y", "f32", 1, "read-write"), bl.Scalar("rounds", high=2**40)],
    local_size=32,
)
STEP = bl.Kernel(
    "step",
    """BRICKLINE void step(Block& block, const float* x, float* y, int64_t blocks, int64_t size) {
           int64_t first = block.index() * size;
           block.each(size, [&](int64_t i) { y[first + i] = x[first + i] + 1; });
       }""",
    [
        bl.Param("x", "f32", "blocks*size", touches=("block_x*size*4", "(block_x + 1)*size*4")),
        bl.Param(
            "y", "f32", "blocks*size", "write", touches=("block_x*size*4", "(block_x + 1)*size*4")
        ),
        *(bl.Scalar(name, low=1, high=1 << 16) for name in ("blocks", "size")),
    ],
    global_size="blocks",
    local_size=32,
)


class Launch(ctypes.Structure):
    """brickline_launch of launch.h."""

    _fields_ = (
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("lanes", ctypes.c_uint32 * 3),
        ("first", ctypes.c_uint64),
        ("last", ctypes.c_uint64),
        ("shared", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_uint64),
        ("fault", ctypes.c_void_p),
    )


def _seconds(call: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


def nothing(blocks: int, items: int, repeats: int) -> dict[str, Any]:
    """Items that do nothing, from the first submission to the report."""
    count = items // blocks
    part = max(1, 16_384 // blocks)
    x, y = np.zeros((part, 1), np.int32), np.zeros((part, 1), np.int32)
    with Megakernel("CPU", [NOTHING], workers=CORES, slots=1 << 16) as mega:

        def feed() -> None:
            left = count
            while left:
                now = min(part, left)
                mega.submit_many("nothing", [x[:now]], [y[:now]], [blocks])
                left -= now
            report = mega.drain()
            assert report.items_processed == count * blocks, report

        feed()
        times = _seconds(feed, repeats)
    per_item = [1e6 * each / (count * blocks) for each in times]
    figure = statistics.median(per_item)
    return Claim(
        f"queue: an item that does nothing, {count:,} submissions of {blocks} blocks",
        figure,
        "us",
        MOST_US,
        note=f"{1 / figure:.2f} million items a second; {harness.spread(per_item, 3)} us",
    ).as_dict()


def _rounds_of(seconds: float) -> int:
    """Return how many rounds of `busy` take so long, on one core."""
    launch = KernelCache().get_or_compile(BUSY).launch
    y = np.zeros(1, np.float32)
    best = min(_seconds(lambda: launch(y, 100_000), 20))
    return max(1, round(100_000 * seconds / best))


def _calls(count: int, rounds: int) -> tuple[list[Callable[[], None]], list[Any]]:
    """Return calls of the compiled function without the GIL, each with memory of its own."""
    program = KernelCache().get_or_compile(BUSY).program
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(program.function)
    calls, kept = [], [program]
    for _ in range(count):
        y, fault = np.zeros(1, np.float32), ctypes.c_uint32(0)
        values = [ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(rounds)]
        pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(each) for each in values))
        launch = Launch(ctypes.addressof(pointers), (1, 1, 1), (32, 1, 1), 0, 1)
        launch.fault = ctypes.addressof(fault)
        kept.append((y, fault, values, pointers, launch))
        calls.append(partial(function, ctypes.addressof(launch)))
    return calls, kept


def beside_pools(items: int, repeats: int) -> dict[str, Any]:
    """Independent items of 10 us."""
    rounds = _rounds_of(10e-6)
    memory = np.zeros((items, 1), np.float32)
    calls, kept = _calls(items, rounds)
    alone = min(_seconds(lambda: [call() for call in calls], 3)) / items
    with (
        Megakernel("CPU", [BUSY], workers=CORES, slots=1 << 16) as mega,
        ThreadPoolExecutor(CORES) as pool,
    ):

        def queued() -> None:
            mega.submit_many("busy", writes=[memory], params=[rounds])
            assert mega.drain().items_processed == items

        def pooled() -> None:
            for future in [pool.submit(call) for call in calls]:
                future.result()

        joblib_seconds, why = _joblib(calls)
        ours, pools, libs = [], [], []
        for _ in range(repeats):
            ours += _seconds(queued, 1)
            pools += _seconds(pooled, 1)
            if joblib_seconds is not None:
                libs.append(joblib_seconds())
    del kept
    own, pool_time = statistics.median(ours), statistics.median(pools)
    lib_time = statistics.median(libs) if libs else None
    fastest = min(each for each in (pool_time, lib_time) if each is not None)
    return Claim(
        f"queue: {items:,} independent items of 10 us on two cores",
        own / fastest,
        "of the faster pool's time",
        1.0,
        {
            "ThreadPoolExecutor": pool_time / fastest,
            "joblib, threads": None if lib_time is None else lib_time / fastest,
        },
        f"{1e6 * own / items:.2f} us an item; one after the other through ctypes "
        f"{1e6 * alone:.2f} us, ThreadPoolExecutor {1e6 * pool_time / items:.2f} us{why}",
    ).as_dict()


def _joblib(calls: list[Callable[[], None]]) -> tuple[Callable[[], float] | None, str]:
    try:
        from joblib import Parallel, delayed
    except ImportError:
        return None, "; joblib is not installed"

    def measure() -> float:
        with Parallel(n_jobs=CORES, backend="threading") as parallel:
            return _seconds(lambda: parallel(delayed(call)() for call in calls), 1)[0]

    return measure, ""


def recorded(items: int, repeats: int) -> dict[str, Any]:
    """Independent items of 10 us, each recorded with its times or not."""
    rounds = _rounds_of(10e-6)
    memory = np.zeros((items, 1), np.float32)
    ratios, reports = [], []
    with (
        Megakernel("CPU", [BUSY], workers=CORES, slots=1 << 16) as plain,
        Megakernel("CPU", [BUSY], workers=CORES, slots=1 << 16, trace=True) as traced,
    ):

        def executed(mega: Megakernel) -> None:
            last = mega.submit_many("busy", writes=[memory], params=[rounds])[-1]
            mega.wait(last)

        for _ in range(repeats):
            took = []
            for mega in (plain, traced):
                took += _seconds(partial(executed, mega), 1)
                reports.append(_seconds(mega.drain, 1)[0])
            ratios.append(took[1] / took[0])
    return Claim(
        f"queue: {items:,} items of 10 us recorded one by one",
        statistics.median(ratios),
        "of as many that are not",
        1.02,
        note=f"{harness.spread(ratios, 3)}; the report {1e3 * min(reports[::2]):.2f} ms, and "
        f"{1e3 * min(reports[1::2]):.2f} ms with them",
    ).as_dict()


def joined(
    device: Any, blocks: int, size: int, count: int, repeats: int, most: float | None = 1.0
) -> dict[str, Any]:
    """A chain of submissions as one region and apart, in turns: what a hop costs."""
    shape = (blocks * size,)
    pair = [
        np.zeros(shape, np.float32) if device is None else device.zeros(shape, "f32")
        for _ in range(2)
    ]
    rows = [[pair[(k + first) % 2] for k in range(count)] for first in (0, 1)]
    where, options = ("CPU", {"workers": CORES}) if device is None else (device.name, {})
    times: dict[bool, list[float]] = {True: [], False: []}
    queues = {
        fuse: Megakernel(where, [STEP], slots=1 << 17, fuse=fuse, **options) for fuse in times
    }
    for turn in range(repeats + 1):
        for fuse, mega in queues.items():
            mega.submit_many("step", [rows[0]], [rows[1]], [blocks, size])
            report = mega.drain()
            assert report.items_processed == count * blocks
            assert report.backend_dispatch_ns is not None
            if turn:
                times[fuse].append(report.backend_dispatch_ns / 1e3 / count)
    for mega in queues.values():
        mega.close()
    one, apart = (statistics.median(times[fuse]) for fuse in (True, False))
    return Claim(
        f"queue on {where}: a chain of {count:,} submissions of {blocks} blocks of {size * 4:,} "
        "bytes as a region",
        one / apart,
        "of the time apart",
        most,
        note=f"{one:.2f} and {apart:.2f} us a submission, from its publication",
    ).as_dict()


def _gpu() -> Any:
    try:
        return bl.open_device("CUDA:0")
    except DeviceError:
        return None


def nothing_on(
    device: Any, blocks: int, items: int, repeats: int, **options: Any
) -> dict[str, Any]:
    """Items that do nothing on a GPU, and the same launched one by one and as a graph."""
    count = items // blocks
    part = min(count, max(1, 32_768 // blocks))
    x, y = (device.zeros((part, 1), "i32") for _ in range(2))
    with Megakernel(device, [NOTHING], slots=1 << 16, **options) as mega:

        def feed() -> None:
            left = count
            while left:
                now = min(part, left)
                mega.submit_many("nothing", [_rows(x, now)], [_rows(y, now)], [blocks])
                left -= now
            report = mega.drain()
            assert report.items_processed == count * blocks, report

        feed()
        times = _seconds(feed, repeats)
        workers = mega.workers
    per_item = [1e6 * each / (count * blocks) for each in times]
    one, graph = _one_by_one(device, blocks), _as_graph(device, blocks)
    figure = statistics.median(per_item)
    return Claim(
        f"queue on a GPU: an item that does nothing, {count:,} submissions of {blocks} blocks",
        figure,
        "us",
        None,
        {"launches from Python": one, "CUDA graph": graph},
        f"{1 / figure:.2f} million items a second on {workers} workers; "
        f"{harness.spread(per_item, 3)} us; {one / figure:.1f} times faster than launches",
    ).as_dict()


def _rows(buffer: Any, count: int) -> Any:
    return bl.Buffer.at_address(
        buffer.address, (count, 1), "i32", kind=buffer.kind, number=buffer.number, owner=buffer
    )


def _one_by_one(device: Any, blocks: int) -> float:
    """Return the microseconds of an item, launched from Python."""
    count = 10_000
    x, y = device.zeros((1,), "i32"), device.zeros((1,), "i32")
    launch = KernelCache().get_or_compile(NOTHING, device).launch

    def feed() -> None:
        for _ in range(count):
            launch(x, y, blocks)
        device.synchronize()

    feed()
    return 1e6 * min(_seconds(feed, 3)) / (count * blocks)


def _as_graph(device: Any, blocks: int) -> float:
    """Return the microseconds of an item of a CUDA graph, without making it."""
    count = 2_000
    plan = bl.Plan("nothing")
    x = plan.buffer("x", 1, "i32")
    for number in range(count):
        plan.launch(NOTHING, x=x, y=plan.buffer(f"y{number}", 1, "i32"), blocks=blocks)
    prepared = plan.prepare(device, "graph")

    def feed() -> None:
        prepared()
        device.synchronize()

    feed()
    return 1e6 * min(_seconds(feed, 5)) / (count * blocks)


def run_on_gpu(quick: bool = False) -> list[dict[str, Any]]:
    """Measure what needs a GPU; nothing where there is none."""
    device = _gpu()
    if device is None:
        return []
    repeats = 3 if quick else 9
    return [
        nothing_on(device, 64, 2_000_000 if not quick else 400_000, repeats),
        nothing_on(device, 1, 400_000 if not quick else 100_000, repeats),
        *(joined(device, blocks, 32, 1_000, repeats) for blocks in (1, 64)),
    ]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim of this file."""
    repeats = 3 if quick else 9
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:CORES])
    try:
        return [
            nothing(64, 2_000_000 if not quick else 400_000, repeats),
            nothing(1, 1_000_000 if not quick else 200_000, repeats),
            beside_pools(20_000 if not quick else 5_000, repeats),
            recorded(20_000 if not quick else 5_000, 2 * repeats),
            joined(None, 64, 4096, 100, repeats),
            joined(None, 64, 32, 1_000, repeats, most=None),
            *run_on_gpu(quick),
        ]
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    raise SystemExit(harness.main(run, None, __doc__))
