"""Claim: timing a brick on a GPU costs a quarter of a torch event pair, and agrees with it.

Measured on the GPU at hand: host time of a brick's start and stop in Deferred mode beside a
`torch.cuda.Event` pair; stream times beside torch's events for kernels over 20 µs; and the slowdown
of a launch-bound decode step at the default sampling. Skipped, with the reason, where torch sees no
CUDA device.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import NO_GPU, Claim, not_measured, torch_with_cuda

import brickline as bl

LAYERS, BRICKS = 24, 8


def _claim(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return Claim(*args, **kwargs).as_dict()


def host_cost(torch: Any, repeats: int) -> dict[str, Any]:
    """Host nanoseconds of an empty brick and of an event pair, interleaved."""
    profiler = bl.BrickProfiler("bench", enabled=True, device="CUDA:0", sampling=bl.Sampling())
    brick = profiler.brick(bl.BrickId.RMS_NORM, layer=0)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(200)
    ]
    ours, fresh, reused = [], [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        before = time.perf_counter_ns()
        for _ in range(200):
            with brick:
                pass
        ours.append((time.perf_counter_ns() - before) / 200)
        torch.cuda.synchronize()
        before = time.perf_counter_ns()
        for _ in range(200):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            end.record()
        fresh.append((time.perf_counter_ns() - before) / 200)
        torch.cuda.synchronize()
        before = time.perf_counter_ns()
        for start, end in events:
            start.record()
            end.record()
        reused.append((time.perf_counter_ns() - before) / 200)
        profiler.drain()
    profiler.close()
    figure = statistics.median(ours)
    peers = {
        "torch.cuda.Event pair, new": statistics.median(fresh),
        "torch.cuda.Event pair, reused": statistics.median(reused),
    }
    ratio = figure / peers["torch.cuda.Event pair, new"]
    return _claim(
        name="cuda: start and stop of a brick, of a torch.cuda.Event pair",
        figure=ratio,
        unit="ratio",
        peers={"brickline ns": figure, **{f"{key} ns": value for key, value in peers.items()}},
        target=0.25,
    )


def agreement(torch: Any, repeats: int) -> list[dict[str, Any]]:
    """Stream time beside torch's events around the same kernel."""
    claims = []
    for size, label in ((1024, "about 50 us"), (4096, "about 3 ms")):
        a = torch.randn(size, size, device="cuda")
        b = torch.empty_like(a)
        for _ in range(10):
            torch.mm(a, a, out=b)
        profiler = bl.BrickProfiler("bench", enabled=True, device="CUDA:0", sampling=bl.Sampling())
        brick = profiler.brick("matmul")
        theirs = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Alternating, behind a sleep on the device, so that each pair encloses the kernel alone.
        for _ in range(repeats):
            torch.cuda._sleep(400_000)
            with brick:
                torch.mm(a, a, out=b)
            begin.record()
            torch.mm(a, a, out=b)
            end.record()
            torch.cuda.synchronize()
            theirs.append(begin.elapsed_time(end) * 1e3)
        ours_us = profiler.brick_stats("matmul").avg_us
        profiler.close()
        torch_us = statistics.mean(theirs)
        difference = abs(ours_us / torch_us - 1)
        claims.append(
            _claim(
                name=f"cuda: stream time against torch events, kernel of {label}",
                figure=difference,
                unit="relative",
                peers={"brickline us": ours_us, "torch events us": torch_us},
                target=0.02,
            )
        )
    return claims


def decode_slowdown(torch: Any, steps: int) -> list[dict[str, Any]]:
    """Host time of a launch-bound step, variants interleaved step by step in random order.

    Medians of single steps stand against each other, because this machine's speed drifts by more
    than the effect. A sampling period holds one timed step, so its mean is put together from the
    medians of timed and untimed steps.
    """
    x = torch.randn(1, 64, device="cuda")
    w = torch.randn(64, 64, device="cuda")
    source = """
def step():
    y = x
    {around}
        for layer in handles:
            for handle in layer:
                {brick}
"""
    forms = {
        "plain": "y = mm(y, w)",
        "plain again": "y = mm(y, w)",
        "with": "with handle: y = mm(y, w)",
        "handle.start/stop": "handle.start(); y = mm(y, w); handle.stop()",
        "handle.mark": "handle.mark(); y = mm(y, w)",
    }
    plain = ("plain", "plain again")
    profilers = []

    def compiled(form: str, enabled: bool) -> Callable[[], None]:
        device = {"enabled": True, "device": "CUDA:0"} if enabled else {}
        profiler = bl.BrickProfiler("bench", **device)
        profilers.append(profiler)
        handles = [
            [profiler.brick(f"brick{number}", layer=layer) for number in range(BRICKS)]
            for layer in range(LAYERS)
        ]
        around = "if True:" if form in plain else "with profiler.step(tokens=1):"
        names = {"x": x, "w": w, "mm": torch.mm, "handles": handles, "profiler": profiler}
        exec(source.replace("{around}", around).replace("{brick}", forms[form]), names)
        step: Callable[[], None] = names["step"]
        return step

    variants = {(form, False): compiled(form, False) for form in forms}
    variants |= {(form, True): compiled(form, True) for form in forms if form not in plain}
    period = profilers[-1].sampling.steps
    times: dict[Any, list[int]] = {key: [] for key in variants}
    timed: dict[str, list[int]] = {form: [] for form in forms}
    generator = random.Random(0)
    order = list(variants)
    for number in range(steps):
        generator.shuffle(order)
        for key in order:
            before = time.perf_counter_ns()
            variants[key]()
            spent = time.perf_counter_ns() - before
            (timed[key[0]] if key[1] and number % period == 0 else times[key]).append(spent)
        if number % 8 == 0:
            torch.cuda.synchronize()
    for profiler in profilers:
        profiler.close()
    base = statistics.median(times["plain", False])
    brick_us = base / LAYERS / BRICKS / 1e3

    def slowdown(values: list[int]) -> float:
        return statistics.median(values) / base - 1

    claims = []
    for form in forms:
        if form in plain:
            continue
        left_out, whole = slowdown(times[form, True]), slowdown(timed[form])
        claims.append(
            _claim(
                name=f"cuda: slowdown of a launch-bound decode step, default sampling, {form}",
                figure=((period - 1) * left_out + whole) / period,
                unit="relative",
                peers={
                    "the plain step again": slowdown(times["plain again", False]),
                    "disabled": slowdown(times[form, False]),
                    "a step left out by sampling": left_out,
                    "a timed step": whole,
                },
                target=0.01,
                note=f"{LAYERS * BRICKS} bricks of {brick_us:.1f} us, one step in {period} timed",
            )
        )
    return claims


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim of this file."""
    torch = torch_with_cuda()
    if torch is None:
        return not_measured("profiler_cuda", NO_GPU)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", file=sys.stderr)
    scale = 1 if quick else 4
    return [
        host_cost(torch, 50 * scale),
        *agreement(torch, 100 * scale),
        *decode_slowdown(torch, 700 * scale),
    ]


if __name__ == "__main__":
    import json

    print(json.dumps(run(), indent=1))
