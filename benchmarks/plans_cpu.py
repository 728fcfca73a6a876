"""Claims: a prepared plan on a CPU launches cheaply, overlaps where it pays, and builds quickly.

* A launch of a prepared serial plan, its tiny kernel included: at most 3 bare ctypes calls.
* `parallel` against `serial` on two cores, eight independent kernels of 1 ms: at least 1.7 times
  as fast; and never more than 5 % slower on any plan of the suite.
* Building and validating 10,000 launches: under 1 s, and twice as many take at most 2.2 times.

Peers in the same run: bare ctypes calls with prepared arguments, and a thread pool of Python.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
import numpy as np
from harness import Claim

import brickline as bl
from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, random_weights
from brickline.kernels.catalog import residual, rms_norm

LAUNCHES = 20
MOST_CTYPES = 3.0
LEAST_OVERLAP = 1.7
MOST_SLOWDOWN = 1.05
BUSY = """
BRICKLINE void busy(Block& block, float* x, int64_t rounds) {
    float value = x[0];
    for (int64_t i = 0; i < rounds; ++i) value = value * 0.999f + 0.5f;
    block.once([&] { x[0] = value; });
}
"""


def _seconds(call: Callable[[], object], number: int, repeats: int) -> float:
    """Return the smallest seconds of a call over several repeats of a loop."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(number):
            call()
        best = min(best, (time.perf_counter() - began) / number)
    return best


def tiny_plan() -> bl.Plan:
    """Return launches over 64 floats: all overhead."""
    plan = bl.Plan("tiny")
    buffers = [plan.buffer(f"b{k}", 64, "f32") for k in range(3)]
    for k in range(LAUNCHES):
        a, y = buffers[k % 3], buffers[(k + 1) % 3]
        plan.launch(residual(), a=a, b=a, y=y, n=64)
    return plan


def launching(repeats: int) -> dict[str, Any]:
    """The cost of a launch, in bare ctypes calls."""
    prepared = tiny_plan().prepare()
    bare = ctypes.CDLL(None).labs
    bare.argtypes, bare.restype = [ctypes.c_long], ctypes.c_long
    argument = ctypes.c_long(5)
    kernel = bl.KernelCache().get_or_compile(residual(), "CPU")
    x, y = (bl.as_buffer(np.zeros(64, np.float32)) for _ in range(2))
    whole = _seconds(prepared, 2000, repeats) / LAUNCHES
    one = _seconds(lambda: bare(argument), 20_000, repeats)
    alone = _seconds(lambda: kernel.launch(x, x, y, 64), 20_000, repeats)
    return Claim(
        "plans: a launch of a prepared serial plan of 20 tiny kernels, the kernel included",
        whole / one,
        "bare ctypes calls",
        MOST_CTYPES,
        {"a bare ctypes call": 1.0, "CachedKernel.launch": alone / one},
        f"{whole * 1e9:.0f} ns a launch; a bare ctypes call {one * 1e9:.0f} ns",
    ).as_dict()


def busy_kernel() -> bl.Kernel:
    """Return a kernel that keeps one thread busy."""
    return bl.Kernel(
        "busy",
        BUSY,
        [bl.Param("x", "f32", 1, "read-write"), bl.Scalar("rounds", high=2**40)],
        local_size=32,
    )


def busy_plan(count: int, rounds: int) -> bl.Plan:
    """Return independent launches of about a millisecond."""
    plan = bl.Plan("busy")
    for k in range(count):
        plan.launch(busy_kernel(), x=plan.buffer(f"x{k}", 1, "f32"), rounds=rounds)
    return plan


def _rounds_of_a_millisecond() -> int:
    prepared = busy_plan(1, 100_000).prepare()
    return max(1, int(100_000 * 1e-3 / _seconds(prepared, 5, 5)))


def overlapping(repeats: int) -> dict[str, Any]:
    """Eight independent kernels of a millisecond on two threads."""
    rounds = _rounds_of_a_millisecond()
    plan = busy_plan(8, rounds)
    serial, parallel = plan.prepare(), plan.prepare(executor="parallel", threads=2)
    single = [busy_plan(1, rounds).prepare() for _ in range(8)]
    for _ in range(12):
        parallel()
    ratios, pooled = [], []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(repeats):
            plain = _seconds(serial, 1, 1)
            ratios.append(plain / _seconds(parallel, 1, 1))
            pooled.append(plain / _seconds(lambda: list(pool.map(lambda p: p(), single)), 1, 1))
    figure = 1 / statistics.median(ratios)
    return Claim(
        "plans: parallel on two threads, eight independent kernels of 1 ms",
        figure,
        "of serial's time",
        1 / LEAST_OVERLAP,
        {"ThreadPoolExecutor of Python": 1 / statistics.median(pooled)},
        f"{1 / figure:.2f} times as fast",
    ).as_dict()


def suite() -> dict[str, Any]:
    """Return plans of several kinds, prepared with both executors."""
    config = DecoderConfig(
        vocabulary=4096, dim=256, hidden=704, layers=4, heads=8, kv_heads=4, head_dim=32
    )
    decoder, weights = Decoder(config, dtype="f32"), random_weights(config, dtype="f32")
    bind = {**weights, "rates": config.rates()}
    return {
        "tiny chain": (tiny_plan(), {}),
        "busy, one": (busy_plan(1, 20_000), {}),
        "busy, eight small": (busy_plan(8, 2_000), {}),
        "decoder": (decoder.plan, bind),
    }


def never_slower(repeats: int) -> list[dict[str, Any]]:
    """`parallel` beside `serial` on every plan of the suite."""
    claims = []
    for name, (plan, bind) in suite().items():
        serial = plan.prepare(bind=bind)
        parallel = plan.prepare(executor="parallel", bind=bind)
        for _ in range(12):
            parallel()
        number = max(1, int(0.02 / _seconds(serial, 1, 3)))
        ratios = []
        for _ in range(repeats):
            plain = _seconds(serial, number, 1)
            ratios.append(_seconds(parallel, number, 1) / plain)
        claims.append(
            Claim(
                f"plans: parallel on {name}",
                statistics.median(ratios),
                "of serial's time",
                MOST_SLOWDOWN,
            ).as_dict()
        )
    return claims


def big_plan(count: int) -> bl.Plan:
    """Return a chain of launches over 40 buffers, as layers of a model make it."""
    plan = bl.Plan("big")
    norm, add = rms_norm(), residual()
    buffers = [plan.buffer(f"b{k}", (1, 2048), "f32") for k in range(40)]
    flat = [each.reshape(2048) for each in buffers]
    weights = [plan.buffer(f"w{k}", 2048, "f32", read_only=True) for k in range(40)]
    for k in range(count // 2):
        a, b, y = k % 40, (k + 1) % 40, (k + 2) % 40
        row = {"rows": 1, "n": 2048, "eps": 1e-5, "layer": k % 16}
        plan.launch(norm, x=buffers[a], weight=weights[a], y=buffers[b], **row)
        plan.launch(add, a=flat[b], b=flat[a], y=flat[y], n=2048, layer=k % 16)
    return plan


def building(repeats: int) -> list[dict[str, Any]]:
    """Building and validating, and how it grows."""
    times = {count: _seconds(lambda c=count: big_plan(c), 1, repeats) for count in (10_000, 20_000)}
    return [
        Claim("plans: building 10,000 launches", times[10_000], "s", 1.0).as_dict(),
        Claim(
            "plans: building 20,000 launches", times[20_000] / times[10_000], "of 10,000's", 2.2
        ).as_dict(),
    ]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim of this file."""
    repeats = 3 if quick else 9
    return [
        launching(repeats),
        overlapping(repeats),
        *never_slower(repeats),
        *building(2 if quick else 3),
    ]


if __name__ == "__main__":
    raise SystemExit(harness.main(run, None, __doc__))
