"""Claims: a plan as one persistent launch on a GPU, by gates.

Figures are times, so a rate of at least 0.97 is a time of at most 1.031.

* G0: a read of 2.47 GB through the workers' rings, to a plain streaming read: at most 1.031.
* G1: a level of a chain whose 128 items all wait for all of the level before, to a grid barrier of
  128 blocks: at most 0.7. Listed beside: a bare hop of a release-acquire counter.
* The same, to that hop: at most 1.1. Listed beside: the same plan as a CUDA graph.
* G2: a bf16 GEMV through the engine, to G0 for as many bytes: at most 1.031 over 2.47 GB of rows of
  2048, at most 1.111 at 128256 x 2048. Recording what every worker does: at most 1.02, and at most
  1.02 of levels of items of 10 us.
* 100,000 independent tiny items with planning, to as many launches from Python: at most 0.05.

Skipped where torch sees no CUDA device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
from harness import Claim
from streaming_read import streaming_read

import brickline as bl
from brickline.executor.megakernel.cuda import CudaEngine
from brickline.kernels.catalog import gemv
from brickline.plan import Plan

COLUMNS = 2048
ROWS = 603_424  # 2.47 GB of bf16, the weights of Llama-3.2-1B
VOCABULARY = 128_256
LEVELS, WIDTH = 10_000, 128

READ = """
BRICKLINE void read_rows(Block& block, const bf16* w, float* y, int64_t m, int64_t n) {
    const int64_t first = block.index() * ROWS;
    block.rows(w, first, minimum<int64_t>(ROWS, m - first), n,
               [&](Group& group, int64_t row, Row<bf16> values) {
        if (n < 0) y[row] = float(values[0]);
    });
}
"""
LEVEL = """
BRICKLINE void level(Block& block, int32_t* x) {
    if (COUNTS) block.once([&] { x[block.index() * 32] += 1; });
}
"""
LINGER = """
BRICKLINE void linger(Block& block, float* x, int64_t rounds) {
    float value = x[block.index() * 32];
    for (int64_t k = 0; k < rounds; ++k) value = value * 0.5f + 1.0f;
    block.once([&] { x[block.index() * 32] = value; });
}
"""
HOPS = """
__device__ __forceinline__ unsigned look(const unsigned* from) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
extern "C" __global__ void hops(unsigned* counters, long long count) {
    for (long long k = 0; k < count; ++k) {
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counters + k * 32)
                         : "memory");
            while (look(counters + k * 32) < gridDim.x) {}
        }
        __syncthreads();
    }
}
"""
BARRIERS = """
extern "C" __global__ void barriers(unsigned* words, long long count) {
    volatile unsigned* const turn = words + 32;
    for (long long k = 0; k < count; ++k) {
        __syncthreads();
        if (threadIdx.x == 0) {
            const unsigned before = *turn;
            __threadfence();
            if (atomicAdd(words, 1u) == gridDim.x - 1) {
                words[0] = 0;
                __threadfence();
                atomicAdd(words + 32, 1u);
            } else {
                while (*turn == before) {}
            }
            __threadfence();
        }
        __syncthreads();
    }
}
"""


def seconds(torch: Any, call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call on the device."""
    call()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def engine_of(prepared: Any, **options: Any) -> CudaEngine:
    """Return the launches of a prepared plan as a megakernel."""
    launches = prepared.launches
    assert len({launch.kernel.digest for launch in launches}) == 1
    apart = [False] * len(launches)
    return CudaEngine(
        prepared._core,
        launches,
        prepared.kernels,
        [0] * len(launches),
        apart,
        prepared._device,
        prepared.cache,
        **options,
    )


def running(engine: CudaEngine) -> Callable[[], object]:
    """Return a call that enqueues a run."""

    def call() -> None:
        outcome = engine.run()
        assert not outcome["problem"], outcome["problem"]

    return call


def read_plan(rows: int, block_rows: int, lanes: int) -> Plan:
    """A launch that streams a matrix and computes nothing."""
    first, end = f"block_x * {block_rows}", f"minimum((block_x + 1) * {block_rows}, m)"
    kernel = bl.Kernel(
        "read_rows",
        READ,
        [
            bl.Param(
                "w", "bf16", ("m", "n"), touches=(f"{first} * n * 2", f"{end} * n * 2"), align=16
            ),
            bl.Param("y", "f32", "m", "write"),
            bl.Scalar("m"),
            bl.Scalar("n"),
        ],
        global_size=f"ceil_div(m, {block_rows})",
        local_size=lanes,
        defines={"ROWS": block_rows},
    )
    plan = Plan("read")
    w, y = plan.buffer("w", (rows, COLUMNS), "bf16"), plan.buffer("y", rows, "f32")
    plan.launch(kernel, w=w, y=y, m=rows, n=COLUMNS)
    return plan


def gemv_plan(rows: int, block_rows: int, lanes: int) -> Plan:
    """A matrix times a vector."""
    plan = Plan("gemv")
    w, x = plan.buffer("w", (rows, COLUMNS), "bf16"), plan.buffer("x", COLUMNS, "bf16")
    y = plan.buffer("y", rows, "f32")
    kernel = gemv(rows_per_block=block_rows, lanes=lanes)
    plan.launch(kernel, w=w, x=x, y=y, m=rows, n=COLUMNS)
    return plan


def share_of(rows: int, items: int, workers: int, groups: int = 12) -> int:
    """Return the rows of an item so that all workers have as many items, and groups as many rows.

    An item begins with loads of the vector, so it is worth while to have few of them.
    """
    return -(-rows // (workers * items * groups)) * groups


def chain_plan(levels: int = LEVELS, width: int = WIDTH, *, counts: bool = False) -> Plan:
    """Levels that each wait for all of the level before; items count a word, or do nothing."""
    kernel = bl.Kernel(
        "level",
        LEVEL,
        [bl.Param("x", "i32", width * 32, "read-write")],
        global_size=width,
        local_size=32,
        defines={"COUNTS": int(counts)},
    )
    plan = Plan("chain")
    x = plan.buffer("x", width * 32, "i32")
    for _ in range(levels):
        plan.launch(kernel, x=x)
    return plan


def plain(torch: Any, source: str, name: str, count: int) -> float:
    """Return the seconds of one round of a kernel of 128 blocks that meet again and again."""
    words = torch.zeros(count * 32, device="cuda", dtype=torch.int32).view(torch.uint32)
    kernel = bl.Kernel(
        name,
        source,
        [bl.Param("words", "u32", words.numel(), "read-write"), bl.Scalar("count")],
        global_size=WIDTH,
        local_size=32,
        language="cuda",
    )
    launch = bl.KernelCache().get_or_compile(kernel, "CUDA:0").launch

    def call() -> None:
        words.zero_()
        launch(words, count)

    return (seconds(torch, call, 5) - seconds(torch, words.zero_, 5)) / count


def streaming(torch: Any, repeats: int) -> list[dict[str, Any]]:
    """G0 and G2."""
    matrix = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16).normal_()
    x = torch.randn(COLUMNS, device="cuda", dtype=torch.bfloat16)
    size = ROWS * COLUMNS * 2
    workers = torch.cuda.get_device_properties(0).multi_processor_count
    read, sink = streaming_read(bl.KernelCache()), torch.zeros(4, device="cuda").view(torch.uint32)
    words = matrix.view(torch.uint32).view(-1, 4)
    bare = seconds(torch, lambda: read(words, sink[:1], size // 16), repeats)
    reading = read_plan(ROWS, 32, 256).prepare("CUDA:0")(w=matrix)
    ring = seconds(torch, running(engine_of(reading)), repeats)
    multiplying = gemv_plan(ROWS, share_of(ROWS, 3, workers), 384).prepare("CUDA:0")(w=matrix, x=x)
    expected = multiplying.read("y").copy()
    product = seconds(torch, running(engine_of(multiplying)), repeats)
    is_same = bool((multiplying.read("y") == expected).all())
    traced = seconds(torch, running(engine_of(multiplying, trace=True)), repeats)
    small = gemv_plan(VOCABULARY, share_of(VOCABULARY, 1, workers), 384).prepare("CUDA:0")(
        w=matrix[:VOCABULARY], x=x
    )
    call = running(engine_of(small))

    def ten() -> None:
        for _ in range(10):
            call()

    share = ring * VOCABULARY / ROWS
    vocabulary = seconds(torch, ten, repeats) / 10

    def rate(time: float, rows: int = ROWS) -> str:
        return f"{rows * COLUMNS * 2 / time / 1e9:.0f} GB/s"

    return [
        Claim(
            "megakernel G0: 2.47 GB through the rings",
            ring / bare,
            "of a streaming read",
            1 / 0.97,
            note=f"{rate(ring)}; a streaming read {rate(bare)}",
        ).as_dict(),
        Claim(
            "megakernel G2: bf16 GEMV of 2.47 GB",
            product / ring,
            "of G0",
            1 / 0.97,
            note=f"{rate(product)}; bits of the serial plan: {'yes' if is_same else 'NO'}",
        ).as_dict(),
        Claim(
            "megakernel G2: bf16 GEMV of 128256 x 2048",
            vocabulary / share,
            "of G0 for as many bytes",
            1 / 0.90,
            note=f"{rate(vocabulary, VOCABULARY)}, ten runs one after the other",
        ).as_dict(),
        Claim("megakernel: G2 recorded entry by entry", traced / product, "of G2", 1.02).as_dict(),
    ]


def hopping(torch: Any, repeats: int) -> list[dict[str, Any]]:
    """G1 and the chain."""
    hop, barrier = plain(torch, HOPS, "hops", LEVELS), plain(torch, BARRIERS, "barriers", LEVELS)
    levels = {}
    for counts in (False, True):
        prepared = chain_plan(counts=counts).prepare("CUDA:0")
        engine = engine_of(prepared, workers=WIDTH)
        levels[counts] = seconds(torch, running(engine), repeats) / LEVELS
    graph = chain_plan(2000).prepare("CUDA:0", "graph")
    beside = seconds(torch, graph, repeats) / 2000
    micros = f"{levels[False] * 1e6:.2f} us a level; a hop {hop * 1e6:.2f}, a grid barrier "
    micros += f"{barrier * 1e6:.2f}; items that count a word {levels[True] * 1e6:.2f}"
    return [
        Claim(
            "megakernel G1: a level of 128 items that wait for all of the level before",
            levels[False] / barrier,
            "of a grid barrier",
            0.7,
            {"a bare hop": hop / barrier},
            micros,
        ).as_dict(),
        Claim(
            "megakernel: a level of a chain of 10,000 levels",
            levels[False] / hop,
            "of a bare hop",
            1.1,
            {"CUDA graph of 2,000 levels": beside / hop},
            micros,
        ).as_dict(),
    ]


def recording(torch: Any, repeats: int, levels: int = 500) -> dict[str, Any]:
    """Levels of items of 10 us, each recorded with its times or not."""
    kernel = bl.Kernel(
        "linger",
        LINGER,
        [bl.Param("x", "f32", WIDTH * 32, "read-write"), bl.Scalar("rounds", high=1 << 20)],
        global_size=WIDTH,
        local_size=32,
    )
    plan = Plan("lingering")
    x = plan.buffer("x", WIDTH * 32, "f32")
    for _ in range(levels):
        plan.launch(kernel, x=x, rounds=2_400)
    prepared = plan.prepare("CUDA:0")
    times = [
        seconds(torch, running(engine_of(prepared, workers=WIDTH, trace=trace)), repeats)
        for trace in (False, True)
    ]
    return Claim(
        "megakernel: items of 10 us recorded one by one",
        times[1] / times[0],
        "of as many that are not",
        1.02,
        note=f"{1e6 * times[0] / levels:.2f} us a level of {WIDTH} items",
    ).as_dict()


TINY = """
BRICKLINE void tiny(Block& block, float* y, int64_t at) {
    block.each(32, [&](int64_t i) { y[at * 32 + i] = float(at); });
}
BRICKLINE void tiny_all(Block& block, float* y, int64_t n) { tiny(block, y, block.index()); }
"""


def independent(torch: Any, count: int = 100_000) -> dict[str, Any]:
    """Tiny items as launches of a plan, from the first call of Plan to the last result."""
    y = torch.zeros(count * 32, device="cuda")
    memory = bl.Param("y", "f32", count * 32, "read-write")
    one = bl.Kernel("tiny", TINY, [memory, bl.Scalar("at", high=count)], local_size=32)
    scalar = bl.Scalar("n", low=1, high=count)
    every = bl.Kernel(
        "tiny_all", TINY, [memory, scalar], global_size="n", local_size=32, entry="tiny_all"
    )
    launch = bl.KernelCache().get_or_compile(one, "CUDA:0").launch

    def by_launches() -> None:
        for at in range(count):
            launch(y, at)
        torch.cuda.synchronize()

    def as_items() -> None:
        plan = Plan("items")
        plan.launch(every, y=plan.buffer("y", count * 32, "f32"), n=count)
        plan.prepare("CUDA:0", "megakernel", bind={"y": y})().synchronize()

    times = []
    for call in (by_launches, as_items):
        call()
        y.zero_()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
        assert float(y[-1]) == count - 1
    return Claim(
        "megakernel: 100,000 independent tiny items, planned and run",
        times[1] / times[0],
        "of as many launches from Python",
        0.05,
        note=f"{times[1] * 1e3:.1f} and {times[0] * 1e3:.0f} ms",
    ).as_dict()


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim of this file."""
    torch = harness.torch_with_cuda()
    if torch is None:
        return harness.not_measured("megakernel_cuda", harness.NO_GPU)
    repeats = 3 if quick else 9
    return [
        *streaming(torch, repeats),
        *hopping(torch, repeats),
        recording(torch, repeats),
        independent(torch),
    ]


if __name__ == "__main__":
    raise SystemExit(harness.main(run, None, __doc__))
