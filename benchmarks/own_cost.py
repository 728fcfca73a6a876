"""Is what a run says that recording took what recording took?

Claim: for each way to record, the run's own figure lies within a factor of two of the measured
difference between the work recorded and the same work left alone. Opening and closing a run are not
in either figure; folding samples into statistics is in both. There are no peers: no other profiler
states its cost.

The two are measured in direct succession, in turns, and medians over the rounds are compared.
Run with ``python benchmarks/own_cost.py``.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
from harness import Claim
from recording import gpt

TARGET = 2.0
CALLS = 2000
MODULES = 200


@dataclass(frozen=True)
class Case:
    """Work left alone, the same work recorded, and the profiler that records it."""

    name: str
    plain: Callable[[], None]
    recorded: Callable[[], None]
    profiler: Any
    clock: Callable[[], int] = time.perf_counter_ns
    """The wall's, as what a run measures of itself; the process's, where the run counts entries."""


# -------------------------------------------------------------------------------------------- cases


def profiler_cases(bl: Any, stack: ExitStack) -> Iterator[Case]:
    """Bricks around a microsecond of work, and traces of arrays."""
    import numpy as np

    weights, x = np.ones((64, 64), np.float32), np.ones(64, np.float32)

    def plain() -> None:
        for _ in range(CALLS):
            weights @ x

    for name, graph in (("bricks", False), ("bricks drawn into a graph", True)):
        profiler = stack.enter_context(bl.BrickProfiler(name, enabled=True, graph=graph))
        brick = profiler.brick("Work")

        def recorded(brick: Any = brick) -> None:
            for _ in range(CALLS):
                with brick:
                    weights @ x

        yield Case(name, plain, recorded, profiler, time.process_time_ns)
    tracer = stack.enter_context(bl.BrickProfiler("traces", enabled=True))

    def traced() -> None:
        for position in range(CALLS // 10):
            weights @ x
            tracer.trace("work", position=position, inputs=[weights, x], outputs=[x])

    def untraced() -> None:
        for _ in range(CALLS // 10):
            weights @ x

    yield Case("traces with fingerprints", untraced, traced, tracer)


def plan_cases(bl: Any, stack: ExitStack) -> Iterator[Case]:
    """A plan of twenty launches, watched."""
    from brickline.kernels.catalog import residual

    plan = bl.Plan("chain")
    buffers = [plan.buffer(f"x{at}", 4096, "f32") for at in range(21)]
    for left, right in pairwise(buffers):
        plan.launch(residual(), a=left, b=left, y=right, n=4096, brick="Residual")
    alone = plan.prepare("CPU")
    for fingerprints in (False, True):
        name = "a plan's launches" + (" with fingerprints" if fingerprints else "")
        profiler = stack.enter_context(bl.BrickProfiler(name, enabled=True))
        watched = plan.prepare("CPU", profiler=profiler, fingerprints=fingerprints)
        yield Case(name, alone, watched, profiler)


def model_cases(bl: Any, stack: ExitStack, device: str) -> Iterator[Case]:
    """A small GPT, passes of one token or a training step; a chain of small modules."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brickline-cost-")))
    layers = 2 if device == "cpu" else 12
    transformer = gpt(torch, layers).to(device)
    chain = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(MODULES))).to(device)
    ids = torch.arange(64, device=device).reshape(1, 64)
    row = torch.ones(1, 16, device=device)

    def small_passes(model: Any) -> None:
        with torch.no_grad():
            for _ in range(10):
                model(row)
        synchronise(torch, device)

    def passes(model: Any) -> None:
        with torch.no_grad():
            for _ in range(10):
                model(ids[:, :1])
        synchronise(torch, device)

    def training(model: Any) -> None:
        model(ids).square().mean().backward()
        model.zero_grad()
        synchronise(torch, device)

    ways: tuple[tuple[str, Callable[[Any], None], dict[str, Any]], ...] = (
        ("time alone", small_passes, {"fingerprints": False}),
        ("fingerprints", passes, {}),
        ("ops", passes, {"level": "op"}),
        ("fingerprints, with gradients", training, {}),
        ("ops, with gradients", training, {"level": "op"}),
    )
    for name, work, options in ways:
        bare = chain if work is small_passes else transformer
        model = copy.deepcopy(bare)
        path = directory / name.replace(" ", "-").replace(",", "")
        recording = bl.record(path, model, **options)

        def alone(work: Any = work, bare: Any = bare) -> None:
            with _disable_current_modes():  # the mode that sees ops stays for the whole recording
                work(bare)

        def recorded(model: Any = model, work: Any = work) -> None:
            work(model)

        with recording:
            label = f"{name}, {device.upper()}"
            is_counted = work is small_passes and device == "cpu"
            clock = time.process_time_ns if is_counted else time.perf_counter_ns
            yield Case(label, alone, recorded, recording.profiler, clock)


def event_cases(bl: Any, stack: ExitStack) -> Iterator[Case]:
    """Bricks on a device's clock, all of them timed."""
    import torch

    weights = torch.ones(64, 64, device="cuda")

    def plain() -> None:
        for _ in range(CALLS // 10):
            weights @ weights
        torch.cuda.synchronize()

    every = bl.Sampling(steps=1)
    profiler = stack.enter_context(
        bl.BrickProfiler("events", enabled=True, device="CUDA:0", sampling=every)
    )
    brick = profiler.brick("Work")

    def recorded() -> None:
        for _ in range(CALLS // 10):
            with brick:
                weights @ weights
        torch.cuda.synchronize()

    yield Case("bricks on CUDA's clock", plain, recorded, profiler)


def synchronise(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cases(stack: ExitStack) -> Iterator[Case]:
    import brickline as bl

    yield from profiler_cases(bl, stack)
    yield from plan_cases(bl, stack)
    if harness.has_torch():
        yield from model_cases(bl, stack, "cpu")
        if harness.torch_with_cuda() is not None:
            yield from event_cases(bl, stack)
            yield from model_cases(bl, stack, "cuda")


# ---------------------------------------------------------------------------------------- measuring


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Nanoseconds of each side, and what the run says that it added, one value per round."""
    plain, recorded, stated = [], [], []
    case.recorded()  # what is compiled, allocated or fingerprinted once
    before = stated_ns(case.profiler)
    for at in range(rounds):
        for is_plain in (at % 2 == 0, at % 2 == 1):
            began = case.clock()
            if is_plain:
                case.plain()
                plain.append(case.clock() - began)
                continue
            case.recorded()
            case.profiler._flush()  # folds what a longer run would fold on its way
            recorded.append(case.clock() - began)
            now = stated_ns(case.profiler)
            stated.append(now - before)
            before = now
    return {"name": case.name, "plain": plain, "recorded": recorded, "stated": stated}


def stated_ns(profiler: Any) -> float:
    return float(profiler.profile().recording.overhead_ns)


def worker(_: int, quick: bool) -> list[dict[str, Any]]:
    """Every case of this machine, in one process."""
    if harness.has_torch():
        import torch

        torch.set_num_threads(1)
    with ExitStack() as stack, harness.quiet():
        return [measure(case, 5 if quick else 41) for case in cases(stack)]


# ------------------------------------------------------------------------------------------- claims


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One claim for each case."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (rows,) = harness.in_processes(__file__, ["--quick"] if quick else [], 1)
    return [_claim(row) for row in rows]


def _claim(row: dict[str, Any]) -> dict[str, Any]:
    plain, recorded = statistics.median(row["plain"]), statistics.median(row["recorded"])
    stated, measured = statistics.median(row["stated"]), recorded - plain
    factor = None
    if stated > 0 and measured > 0:
        factor = max(stated / measured, measured / stated)
    return Claim(
        name=f"own cost: {row['name']}",
        figure=factor,
        unit="times too much or too little",
        target=TARGET,
        note=f"stated {stated / 1e3:.4g} us, measured {measured / 1e3:.4g} us; "
        f"{plain / 1e3:.4g} us alone, {recorded / 1e3:.4g} us recorded",
    ).as_dict()


if __name__ == "__main__":
    sys.exit(harness.main(run, worker, __doc__))
