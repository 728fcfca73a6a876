"""Prepared plans on CPU: every executor the same bits, and every failure said and survived."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from random_plans import (
    COLUMNS,
    COUNT,
    MIX,
    ROWS,
    Launch,
    by_themselves,
    drawn,
    launches,
    planned,
)
from threads_together import in_threads

import brickline as bl
from brickline.cache import KernelCache
from brickline.errors import CompileError, DeviceError, LaunchError, PlanError, SymbolicError
from brickline.graph import DROPPED_NODE, KernelRegistry
from brickline.graph_rows import (
    EdgeKind,
    KernelDetail,
    NodeKind,
    TransferDetail,
    TransferDirection,
)
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import residual, rms_norm, silu_gate
from brickline.plan import Plan
from brickline.profile import profile_from_run
from brickline.verdict import Status

pytestmark = pytest.mark.usefixtures("state")
SIZE = ROWS * COLUMNS

FAIL = Kernel(
    "fail",
    """BRICKLINE void fail(Block& block, const float* x, float* y, int64_t n, int64_t when) {
           if (when) block.fault(20);
           block.each(n, [&](int64_t i) { y[i] = x[i] + 1; });
       }""",
    [
        *(Param("x", "f32", "n"), Param("y", "f32", "n", "write")),
        *(Scalar("n", low=1), Scalar("when", high=1)),
    ],
)
STRAY = Kernel(
    "stray",
    """BRICKLINE void stray(Block& block, const float* x, float* y, int64_t n, int64_t by) {
           block.each(n, [&](int64_t i) { y[i] = x[i] + 1; });
           block.once([&] { if (by) y[by] = 0.1f; });
       }""",
    [
        *(Param("x", "f32", "n"), Param("y", "f32", "n", "write")),
        *(Scalar("n", low=1), Scalar("by", low=-64, high=64)),
    ],
)
GATE = Kernel(
    "gate",
    """BRICKLINE void gate(Block& block, int32_t* state) {
           volatile int32_t* shared = state;
           shared[0] = 1;
           while (!shared[1]) {}
       }""",
    [Param("state", "i32", 2, "read-write")],
)
PAUSE = Kernel(
    "rest",
    """#include <stdint.h>
#include <time.h>
void rest(int32_t* runs, int64_t ns) {
    struct timespec left = {ns / 1000000000, ns % 1000000000};
    while (nanosleep(&left, &left)) {}
    runs[0] += 1;
}""",
    [Param("runs", "i32", 1, "read-write"), Scalar("ns", high=1 << 40)],
    language="c",
)
"""Takes so long, however fast the machine is and whatever signals come."""


def scaled(by: float) -> Kernel:
    return Kernel(
        "scale",
        "BRICKLINE void scale(Block& block, const float* x, float* y, int64_t n) {"
        f" block.each(n, [&](int64_t i) {{ y[i] = {by!r}f * x[i]; }}); }}",
        [Param("x", "f32", "n"), Param("y", "f32", "n", "write"), Scalar("n", low=1)],
    )


def together(prepared: Any) -> Any:
    """Settle a parallel plan on its threads, whatever is faster here."""
    prepared._run.choose(1)
    return prepared


# ------------------------------------------------------------------------ random plans, bit for bit

WAYS = [
    *({"executor": "serial"}, {"executor": "serial", "checked": True}),
    *({"executor": "parallel", "threads": threads} for threads in (1, 2, 3, 8)),
]


@given(program=launches)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_executor_has_the_bits_of_launches_by_themselves(
    cache: KernelCache, program: list[Launch]
) -> None:
    plan, taken = planned(program)
    for values in ({}, {"t": -1.5, "n": 1}, {"n": COLUMNS}):
        settled = {**plan.defaults, **values}
        expected = by_themselves(cache, taken, settled["t"], int(settled["n"]))
        for way in WAYS:
            prepared = plan.prepare("CPU", cache=cache, **way)
            meets = way.get("threads", 1) > 1
            if meets:
                together(prepared)
            for name, seed in zip("abc", range(3), strict=True):
                prepared.write(name, drawn(ROWS, COLUMNS, seed=seed))
            prepared(**values, meet=int(meets))
            for name, array in zip("abc", expected, strict=True):
                assert prepared.read(name).tobytes() == array.tobytes(), (way, name)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_plan_of_long_launches_has_the_same_bits_in_every_run(
    cache: KernelCache, threads: int
) -> None:
    """Long enough that threads share it, in every run."""
    plan, n = Plan("long"), 1 << 16
    buffers = [plan.buffer(f"b{number}", n, "f32") for number in range(6)]
    order = np.random.default_rng(threads).integers(0, 6, (24, 2))
    for source, target in order[order[:, 0] != order[:, 1]]:
        plan.launch(MIX, x=buffers[source], y=buffers[target], n=n, by=0.5)
    plan.launch(COUNT, y=buffers[0], n=n, restart=1)
    plan.launch(COUNT, y=buffers[1], n=n, restart=0)
    serial = plan.prepare("CPU", cache=cache)
    parallel = together(plan.prepare("CPU", "parallel", cache=cache, threads=threads))
    for number in range(6):
        for prepared in (serial, parallel):
            prepared.write(f"b{number}", drawn(n, seed=number))
    for _ in range(12):
        serial()
        parallel()
        for number in range(6):
            name = f"b{number}"
            assert serial.read(name).tobytes() == parallel.read(name).tobytes()


def test_a_parallel_plan_that_chooses_keeps_its_bits(cache: KernelCache) -> None:
    plan, _ = planned([("mix", 0, 1, 0, 0, 5), ("mix", 0, 2, 0, 0, 5), ("softmax", 1, 0, 1, 6, 3)])
    serial = plan.prepare("CPU", cache=cache)
    parallel = plan.prepare("CPU", "parallel", cache=cache, threads=2)
    for prepared in (serial, parallel):
        prepared.write("a", drawn(ROWS, COLUMNS))
    for _ in range(20):
        serial()
        parallel()
        for name in "abc":
            assert serial.read(name).tobytes() == parallel.read(name).tobytes()


@pytest.mark.parametrize("threads", [2, 8])
def test_independent_launches_run_at_the_same_time(cache: KernelCache, threads: int) -> None:
    plan, _ = planned([])
    together(plan.prepare("CPU", "parallel", cache=cache, threads=threads))(meet=1)


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2", 5000])
def test_threads_are_a_number(cache: KernelCache, threads: Any) -> None:
    plan, _ = planned([("mix", 0, 1, 0, 0, 5)])
    with pytest.raises(PlanError, match="threads: expected a number from 1 to 1024"):
        plan.prepare("CPU", "parallel", cache=cache, threads=threads)


# --------------------------------------------------------------------------------- what may change


class Doubled:
    """y = 2 x, prepared; n of 8 elements where it is a variable."""

    def __init__(self, cache: KernelCache, executor: str = "serial", **options: Any) -> None:
        self.plan = Plan("doubled")
        self.n = self.plan.variable("n", 1, 8, default=8)
        x, y = (self.plan.buffer(name, 8, "f32") for name in "xy")
        self.plan.launch(residual(), a=x, b=x, y=y, n=self.n)
        self.run = self.plan.prepare("CPU", executor, cache=cache, **options)


@pytest.mark.parametrize("executor", ["serial", "parallel"])
def test_variables_change_from_run_to_run_and_stay(cache: KernelCache, executor: str) -> None:
    run = Doubled(cache, executor).run
    run.write("x", np.ones(8, np.float32))
    for n, expected in ((3, 3), (None, 3), (5, 5), (1, 5)):
        run(**({} if n is None else {"n": n}))
        assert run.read("y").sum() == 2 * expected, "what lies beyond n is left"
    assert run.values == {"n": 1}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"n": 0}, SymbolicError, "expected n from 1 to 8, got 0"),
        ({"n": 9}, SymbolicError, "expected n from 1 to 8, got 9"),
        ({"n": 2.0}, SymbolicError, "expected n as an integer"),
        ({"n": True}, SymbolicError, "expected n as an integer"),
        ({"n": 10**30}, SymbolicError, "expected n"),
        ({"m": 3}, PlanError, "has no buffer 'm'; it has x, y"),
        ({"x": 3.0}, PlanError, "expected a Buffer or an array"),
        ({"x": np.zeros(7, np.float32)}, PlanError, r"expected f32\[8\], got f32\[7\]"),
        ({"x": np.zeros((2, 4), np.float32)}, PlanError, r"got f32\[2, 4\]"),
        ({"x": np.zeros(8)}, PlanError, r"got f64\[8\]"),
        ({"x": np.zeros(16, np.float32)[::2]}, PlanError, "contiguous"),
        ({"y": np.frombuffer(bytes(32), np.float32)}, PlanError, "read-only memory"),
        ({"stream": 7}, DeviceError, "CPU has no streams"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    cache: KernelCache, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    run = Doubled(cache).run
    run.write("x", np.ones(8, np.float32))
    before = {name: buffer.address for name, buffer in run.buffers.items()}
    with pytest.raises(error, match=words):
        run(**change)
    assert {name: buffer.address for name, buffer in run.buffers.items()} == before
    assert not run.read("y").any(), "nothing ran"
    assert run().read("y").sum() == 16
    assert run.values == {"n": 8}


def test_one_change_that_does_not_fit_keeps_the_others_out(cache: KernelCache) -> None:
    run = Doubled(cache).run
    before = {name: buffer.address for name, buffer in run.buffers.items()}
    fresh = np.ones(8, np.float32)
    for bad in ({"y": np.zeros(3)}, {"n": 99}, {"other": 1}):
        with pytest.raises(bl.BricklineError):
            run(x=fresh, **({"n": 4} | bad))
    assert {name: buffer.address for name, buffer in run.buffers.items()} == before
    assert run.values == {"n": 8}


def test_a_float_too_large_for_its_kernel_is_refused(cache: KernelCache) -> None:
    plan = Plan("float")
    t = plan.variable("t", dtype="f32")
    plan.launch(MIX, x=plan.buffer("x", 8, "f32"), y=plan.buffer("y", 8, "f32"), n=8, by=t)
    run = plan.prepare("CPU", cache=cache)
    for value in (1e300, "1", True, None):
        with pytest.raises(PlanError, match="t"):
            run(t=value)
    assert run(t=float("inf")).values == {"t": float("inf")}


def test_buffers_are_rebound_to_other_memory(cache: KernelCache) -> None:
    run = Doubled(cache).run
    x, y = np.full(8, 3, np.float32), np.zeros(8, np.float32)
    run(x=x, y=y)
    assert y.tolist() == [6] * 8
    x[:] = 4
    run()
    assert y.tolist() == [8] * 8, "the memory is used, not copied"
    assert run.read("y").tolist() == [8] * 8
    again = np.zeros(8, np.float32)
    run(y=again, n=2)
    assert again.tolist() == [8] * 2 + [0] * 6
    assert y.tolist() == [8] * 8


def test_two_buffers_change_places(cache: KernelCache) -> None:
    a, b = np.ones(8, np.float32), np.zeros(8, np.float32)
    run = Doubled(cache, bind={"x": a, "y": b}).run
    for step in range(1, 7):
        run(**({"x": a, "y": b} if step % 2 else {"x": b, "y": a}))
    assert (a[0], b[0]) == (64, 32)


def test_plain_memory_is_bound(cache: KernelCache) -> None:
    plan = Plan("bytes")
    kernel = Kernel(
        "invert",
        "BRICKLINE void invert(Block& block, uint8_t* x) {"
        " block.each(4, [&](int64_t i) { x[i] = uint8_t(255 - x[i]); }); }",
        [Param("x", "u8", 4, "read-write")],
    )
    plan.launch(kernel, x=plan.buffer("x", 4, "u8"))
    memory, other = bytearray(b"\0\1\2\3"), bytearray(4)
    run = plan.prepare("CPU", cache=cache, bind={"x": memory})
    run()
    assert memory == b"\xff\xfe\xfd\xfc"
    run(x=other)
    assert other == b"\xff" * 4
    with pytest.raises(BufferError, match="re-sized"):
        other.append(0)
    memory.append(0)  # nobody uses it any more
    with pytest.raises(PlanError, match="read-only"):
        run(x=bytes(4))


@pytest.mark.parametrize("shift", [0, 3, -3, 7])
def test_memory_that_would_alias_is_refused(cache: KernelCache, shift: int) -> None:
    run = Doubled(cache).run
    memory = np.ones(24, np.float32)
    run(y=memory[8:16])
    kept = run.read("y").tobytes()
    before = run.buffers["x"].address
    with pytest.raises(PlanError, match="x and y overlap, which was not planned"):
        run(x=memory[8 + shift : 16 + shift])
    assert run.buffers["x"].address == before
    assert run().read("y").tobytes() == kept
    assert memory[:8].tolist() == memory[16:].tolist() == [1] * 8
    run(x=memory[16:])
    assert memory[8:16].tolist() == [2] * 8


def test_bound_memory_that_aliases_is_refused_unless_planned_so(cache: KernelCache) -> None:
    memory = np.arange(12, dtype=np.float32)
    plan = Doubled(cache).plan
    with pytest.raises(PlanError, match="x and y overlap"):
        plan.prepare("CPU", cache=cache, bind={"x": memory[:8], "y": memory[4:]})
    plan = Plan("aliased")
    low, high = plan.buffer("low", array=memory[:8]), plan.buffer("high", array=memory[4:])
    plan.launch(residual(), a=low[:4], b=low[:4], y=high[:4], n=4)
    plan.launch(residual(), a=low[4:], b=low[4:], y=high[4:], n=4)
    assert plan.launches[1].waits_for == (0,)
    run = plan.prepare("CPU", cache=cache)
    run()
    assert memory.tolist() == [0, 1, 2, 3, 0, 2, 4, 6, 0, 4, 8, 12]
    with pytest.raises(PlanError, match="were planned over memory that overlaps"):
        run(low=np.zeros(8, np.float32))
    with pytest.raises(PlanError, match="cannot be checked apart"):
        plan.prepare("CPU", cache=cache, checked=True)


def test_memory_that_kernels_cannot_load_from_is_refused(cache: KernelCache) -> None:
    kernel = Kernel(
        "wide",
        "BRICKLINE void wide(Block& block, float* x) {"
        " block.each(4, [&](int64_t i) { x[i] = 1; }); }",
        [Param("x", "f32", 4, "write", align=16)],
    )
    plan = Plan("wide")
    plan.launch(kernel, x=plan.buffer("x", 4, "f32"))
    memory = np.zeros(64, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    odd = memory[start : start + 16].view(np.float32)
    with pytest.raises(PlanError, match="aligned to 16 bytes"):
        plan.prepare("CPU", cache=cache, bind={"x": odd})
    with pytest.raises(PlanError, match="aligned to 16 bytes"):
        plan.prepare("CPU", cache=cache)(x=odd)
    assert not memory.any()


def test_arrays_of_another_device_are_refused(cache: KernelCache) -> None:
    run = Doubled(cache).run
    elsewhere = bl.open_device("NULL").allocate((8,), "f32")
    with pytest.raises(PlanError, match=r"x was given memory of NULL: .*prepared.write\('x'"):
        run(x=elsewhere)


def test_writing_and_reading_check_what_they_are_given(cache: KernelCache) -> None:
    run = Doubled(cache).run
    for name in ("write", "read"):
        with pytest.raises(PlanError, match="has no buffer 'w'"):
            getattr(run, name)("w", *([np.zeros(8)] if name == "write" else []))
    for bad in (np.zeros(8), np.zeros(7, np.float32), [1.0] * 8):
        with pytest.raises(LaunchError):
            run.write("x", bad)
    run.write("x", np.zeros(16, np.float32)[::2])
    copied = run.read("x")
    copied[:] = 7
    assert not run.read("x").any()


def test_read_only_memory_is_bound_where_no_launch_writes(cache: KernelCache) -> None:
    plan, fixed = Plan("weights"), np.ones(8, np.float32)
    fixed.flags.writeable = False
    w = plan.buffer("w", 8, "f32")
    plan.launch(residual(), a=w, b=w, y=plan.buffer("y", 8, "f32"), n=8)
    run = plan.prepare("CPU", cache=cache, bind={"w": fixed})
    assert run().read("y").tolist() == [2] * 8
    with pytest.raises(LaunchError, match="read-only"):
        run.write("w", np.zeros(8, np.float32))
    with pytest.raises(PlanError, match="bound to read-only memory, and launches"):
        plan.prepare("CPU", cache=cache, bind={"y": fixed})


# ------------------------------------------------------------------------------------------- torch


def test_tensors_are_bound_and_watched(cache: KernelCache) -> None:
    torch = pytest.importorskip("torch")
    run = Doubled(cache).run
    x, y = torch.full((8,), 3.0), torch.zeros(8)
    run(x=x, y=y)
    assert y.tolist() == [6.0] * 8
    with pytest.raises(PlanError, match=r"got f64\[8\]"):
        run(x=torch.zeros(8, dtype=torch.float64))
    with pytest.raises(PlanError, match="contiguous"):
        run(x=torch.zeros(8, 2)[:, 0])
    y.resize_(1 << 16)
    with pytest.raises(PlanError, match=r"bound to y was resized or freed.*prepared\(y=array\)"):
        run()
    run(y=torch.zeros(8))
    x.set_(torch.ones(8))
    with pytest.raises(PlanError, match="bound to x was resized or freed"):
        run()
    assert run(x=x).read("y").tolist() == [2.0] * 8


def test_an_array_that_was_resized_is_noticed(cache: KernelCache) -> None:
    run, y = Doubled(cache).run, np.zeros(8, np.float32)
    run(y=y)
    with pytest.raises(ValueError, match="refcheck"):
        y.resize(1 << 16)
    y.resize(1 << 16, refcheck=False)
    with pytest.raises(PlanError, match="bound to y was resized or freed"):
        run()
    run(y=np.zeros(8, np.float32))


def test_a_tensor_replaced_by_an_array_is_not_watched_any_more(cache: KernelCache) -> None:
    torch = pytest.importorskip("torch")
    run = Doubled(cache).run
    y = torch.zeros(8)
    run(y=y)
    run(y=np.zeros(8, np.float32))
    y.resize_(1 << 16)
    run()


# ----------------------------------------------------------------------------------------- failures


def failing(cache: KernelCache, executor: str, **options: Any) -> Any:
    """A chain of three, the second of which fails when it is told to."""
    plan = Plan("chain")
    when = plan.variable("when", 0, 1)
    buffers = [plan.buffer(f"b{number}", 8, "f32") for number in range(4)]
    for number in range(3):
        fails = {"when": when if number == 1 else 0}
        plan.launch(FAIL, x=buffers[number], y=buffers[number + 1], n=8, **fails)
    return plan.prepare("CPU", executor, cache=cache, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "serial"},
        {"executor": "parallel", "threads": 3},
        {"executor": "serial", "checked": True},
    ],
)
def test_a_plan_that_fails_says_where_and_is_poisoned_until_reset(
    cache: KernelCache, options: dict[str, Any]
) -> None:
    run = failing(cache, **options)
    if "threads" in options:
        together(run)
    run()
    run.write("b0", np.full(8, 10, np.float32))
    words = (
        r"plan chain failed at launch 1 \(fail\), which reported fault 20: .*; "
        "1 of 3 launches had finished, their results stay"
    )
    with pytest.raises(LaunchError, match=words):
        run(when=1)
    assert run.read("b1").tolist() == [11] * 8, "what came before it stays"
    assert run.read("b3").tolist() == [3] * 8, "what comes after it did not run"
    assert "poisoned" in repr(run)
    for _ in range(2):
        with pytest.raises(PlanError, match=r"launch 1 \(fail\).*fault 20.*call reset\(\)"):
            run(when=0)
    run.reset()
    assert run.values == {"when": 1}, "a poisoned plan takes no values"
    assert run(when=0).read("b3").tolist() == [13] * 8
    assert "poisoned" not in repr(run)


def test_independent_launches_that_fail_name_the_first(cache: KernelCache) -> None:
    plan = Plan("wide")
    for number in range(6):
        x, y = (plan.buffer(f"{name}{number}", 8, "f32") for name in "xy")
        plan.launch(FAIL, x=x, y=y, n=8, when=int(number in (2, 4)))
    for executor, threads in (("serial", None), ("parallel", 2), ("parallel", 8)):
        run = plan.prepare("CPU", executor, cache=cache, threads=threads)
        if threads:
            together(run)
        with pytest.raises(LaunchError, match=r"failed at launch 2 \(fail\).*2 of 6"):
            run()
        assert run.read("y1").tolist() == [1] * 8


@pytest.mark.parametrize(
    ("by", "words"),
    [
        (8, r"launch 1 \(stray\).*of y, which has 32 bytes: first 0 bytes after its end, 4 bytes"),
        (11, "first 12 bytes after its end"),
        (-1, "first 4 bytes before it"),
        (-5, "first 20 bytes before it"),
    ],
)
def test_a_kernel_that_writes_out_of_bounds_is_named(
    cache: KernelCache, by: int, words: str
) -> None:
    plan = Plan("stray")
    shift = plan.variable("shift", -64, 64, default=0)
    x, y, z = (plan.buffer(name, 8, "f32") for name in "xyz")
    plan.launch(STRAY, x=x, y=z, n=8, by=0)
    plan.launch(STRAY, x=z, y=y, n=8, by=shift)
    memory = np.full(24, 5, np.float32)
    run = plan.prepare("CPU", cache=cache, checked=True, bind={"y": memory[8:16]})
    with pytest.raises(LaunchError, match=words):
        run(shift=by)
    assert memory.tolist() == [5] * 24, "what surrounds it stays, and so does what it held"
    assert run.read("z").tolist() == [1] * 8, "results before it stay"
    with pytest.raises(PlanError, match=r"stray.*call reset\(\)"):
        run(shift=0)
    run.reset()
    run(shift=0)
    assert memory[8:16].tolist() == [2] * 8


def test_a_write_outside_of_a_view_is_named_though_it_is_inside_of_the_buffer(
    cache: KernelCache,
) -> None:
    plan = Plan("inside")
    x, y = plan.buffer("x", 8, "f32"), plan.buffer("y", 8, "f32")
    plan.launch(STRAY, x=x[:4], y=y[2:6], n=4, by=5)
    run = plan.prepare("CPU", cache=cache, checked=True)
    with pytest.raises(LaunchError, match=r"of y, .*at byte 28, outside of what the launch decl"):
        run()
    assert not run.read("y").any()


def test_a_compiler_that_refuses_is_quoted(cache: KernelCache) -> None:
    plan = Plan("broken")
    source = "BRICKLINE void broken(Block& block, float* y) { y[0] = nonsense; }"
    kernel = Kernel("broken", source, [Param("y", "f32", 1, "write")])
    plan.launch(kernel, y=plan.buffer("y", 1, "f32"))
    with pytest.raises(CompileError, match="nonsense"):
        plan.prepare("CPU", cache=cache)
    plan.prepare("NULL", cache=cache)


def test_a_launch_shape_that_the_device_has_not_is_refused_before_anything_runs(
    cache: KernelCache,
) -> None:
    kernel = Kernel(
        "many",
        "BRICKLINE void many(Block& block, float* y, int64_t n) {"
        " block.once([&] { y[0] = float(n); }); }",
        [Param("y", "f32", 1, "write"), Scalar("n", low=0, high=1 << 20)],
        local_size="n",
    )
    plan = Plan("many")
    n = plan.variable("n", 0, 1 << 20, default=32)
    plan.launch(kernel, y=plan.buffer("y", 1, "f32"), n=n)
    run = plan.prepare("CPU", cache=cache)
    assert run().read("y")[0] == 32
    for value in (0, 1 << 20):
        with pytest.raises(PlanError, match=r"launch 0 \(many\): local_size\[0\] = n is"):
            run(n=value)
    assert run().read("y")[0] == 32, "the last values that fitted stay"


# ------------------------------------------------------------------------------------------ signals

PAUSES = 400


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Have a handler for SIGINT, and send that signal to this process before long."""
    before = signal.signal(signal.SIGINT, handler)
    timer = threading.Timer(0.25, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def pausing(cache: KernelCache, executor: str) -> Any:
    """Independent launches, each of which counts how often it has run."""
    plan = Plan("pauses")
    ns = plan.variable("ns", 0, 1 << 40)
    runs = plan.buffer("runs", PAUSES, "i32")
    for number in range(PAUSES):
        plan.launch(PAUSE, runs=runs[number : number + 1], ns=ns)
    prepared = plan.prepare("CPU", executor, cache=cache, threads=2)
    return together(prepared) if executor == "parallel" else prepared


@pytest.mark.parametrize("executor", ["serial", "parallel"])
def test_an_interrupt_ends_a_run_between_launches(cache: KernelCache, executor: str) -> None:
    run = pausing(cache, executor)
    with handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        run(ns=5_000_000)
    ran = run.read("runs")
    done = int(ran.sum())
    assert 0 < done < PAUSES, "it did not wait for the end of the plan"
    if executor == "serial":
        assert ran.tolist() == [1] * done + [0] * (PAUSES - done)
    assert "poisoned" in repr(run)
    words = (
        f"plan pauses was stopped by KeyboardInterrupt; {done} of {PAUSES} launches had finished, "
        r"their results stay; call reset\(\)"
    )
    for _ in range(2):
        with pytest.raises(PlanError, match=words):
            run(ns=0)
    time.sleep(0.02)
    assert run.read("runs").sum() == done, "no thread goes on behind its back"
    run.reset()
    assert run(ns=0).read("runs").sum() == done + PAUSES
    assert "poisoned" not in repr(run)


@pytest.mark.parametrize("executor", ["serial", "parallel"])
def test_whatever_a_handler_of_a_signal_raises_goes_through(
    cache: KernelCache, executor: str
) -> None:
    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("too slow")

    run = pausing(cache, executor)
    with handled_by(handler), pytest.raises(TimeoutError, match=r"^too slow$"):
        run(ns=5_000_000)
    with pytest.raises(PlanError, match=r"was stopped by too slow; \d+ of 400 launches had"):
        run(ns=0)


@pytest.mark.parametrize("executor", ["serial", "parallel"])
def test_a_handler_that_returns_runs_meanwhile_and_ends_nothing(
    cache: KernelCache, executor: str
) -> None:
    run, seen = pausing(cache, executor), []
    kernel = Kernel(
        "large",
        "BRICKLINE void large(Block& block, float* y) {"
        " block.once([&] { y[0] += *block.shared<float>(100000) * 0 + 1; }); }",
        [Param("y", "f32", 1, "read-write")],
        shared_bytes=400_000,
    )
    plan = Plan("within")
    plan.launch(kernel, y=plan.buffer("y", 1, "f32"))
    within = plan.prepare("CPU", cache=cache)

    def handler(number: int, frame: Any) -> None:
        seen.append(int(run.buffers["runs"].numpy().sum()))
        within()  # by the same thread

    with handled_by(handler):
        run(ns=2_000_000)
    assert len(seen) == 1
    assert 0 < seen[0] < PAUSES, "it did not wait for the end of the plan"
    assert run.read("runs").tolist() == [1] * PAUSES
    assert within.read("y").tolist() == [1]


def test_a_watched_run_that_is_interrupted_says_so(cache: KernelCache) -> None:
    run = pausing(cache, "serial")
    run.watch(bl.BrickProfiler("pauses", enabled=True))
    with handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        run(ns=5_000_000)
    assert 0 < run.read("runs").sum() < PAUSES
    with pytest.raises(PlanError, match=r"plan pauses failed: KeyboardInterrupt; call reset\(\)"):
        run(ns=0)


def test_a_second_interrupt_leaves_no_plan_unpoisoned(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(error: BaseException) -> str:
        raise KeyboardInterrupt  # as Python does at any call

    run = pausing(cache, "serial")
    monkeypatch.setattr(run, "_stopped_text", interrupted)
    with handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        run(ns=5_000_000)
    with pytest.raises(PlanError, match=r"plan pauses failed; call reset\(\)"):
        run(ns=0)


def test_a_run_in_another_thread_leaves_signals_to_the_main_one(cache: KernelCache) -> None:
    run, seen = pausing(cache, "serial"), []
    thread = threading.Thread(target=run, kwargs={"ns": 2_000_000})
    with handled_by(lambda number, frame: seen.append(threading.get_ident())):
        thread.start()
        thread.join()
    assert seen == [threading.main_thread().ident]
    assert run.read("runs").tolist() == [1] * PAUSES


# -------------------------------------------------------------------------------- threads and forks


@pytest.mark.parametrize("executor", ["serial", "parallel"])
def test_a_plan_is_run_by_one_thread_at_a_time(cache: KernelCache, executor: str) -> None:
    plan, flags = Plan("gate"), np.zeros(2, np.int32)
    plan.launch(GATE, state=plan.buffer("state", 2, "i32"))
    run = plan.prepare("CPU", executor, cache=cache, bind={"state": flags})
    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not flags[0]:
            pass
        with pytest.raises(PlanError, match="running in another thread; prepare it once for each"):
            run()
        with pytest.raises(PlanError, match="running in another thread"):
            run(state=np.ones(2, np.int32))
        assert run.buffers["state"].address == flags.ctypes.data
    finally:
        flags[1] = 1
        thread.join()
    run()


@pytest.mark.parametrize("executor", ["serial", "parallel"])
def test_one_plan_is_prepared_for_several_threads(cache: KernelCache, executor: str) -> None:
    plan, n = Plan("shared"), 1 << 15
    buffers = [plan.buffer(f"b{number}", n, "f32") for number in range(5)]
    for number in range(1, 5):
        plan.launch(MIX, x=buffers[0], y=buffers[number], n=n, by=float(number))
    runs = [plan.prepare("CPU", executor, cache=cache, threads=3) for _ in range(3)]

    def work(number: int) -> None:
        run = runs[number] if executor == "serial" else together(runs[number])
        run.write("b0", drawn(n, seed=number))
        for _ in range(10):
            run()

    in_threads(3, work)
    for number, run in enumerate(runs):
        expected = np.zeros(n, np.float32)
        for _ in range(10):
            cache.get_or_compile(MIX, "CPU").launch(drawn(n, seed=number), expected, n, 2.0)
        assert run.read("b2").tobytes() == expected.tobytes()


def test_threads_that_fight_for_one_plan_break_nothing(cache: KernelCache) -> None:
    run = Doubled(cache).run
    run.write("x", np.ones(8, np.float32))
    refused = []

    def work(number: int) -> None:
        for _ in range(200):
            try:
                run(n=8)
            except PlanError as error:
                refused.append(str(error))

    in_threads(4, work)
    assert all("running in another thread" in each for each in refused)
    assert run().read("y").tolist() == [2] * 8


FORKED = """
import os, sys, warnings
import numpy as np
from brickline.cache import KernelCache
from brickline.kernels.catalog import residual
from brickline.plan import Plan
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
cache, n = KernelCache(sys.argv[1]), 1 << 16
def prepared(name):
    plan = Plan(name)
    x = plan.buffer("x", n, "f32")
    for number in range(4):
        plan.launch(residual(), a=x, b=x, y=plan.buffer(f"y{number}", n, "f32"), n=n)
    run = plan.prepare("CPU", "parallel", threads=4, cache=cache)
    run._run.choose(1)
    run.write("x", np.ones(n, np.float32))
    return run
def works(run):
    for _ in range(10):
        run()
    return all(run.read(f"y{number}").tolist() == [2] * n for number in range(4))
run = prepared("parent")
assert works(run)
child = os.fork()
if child == 0:
    os._exit(0 if works(prepared("child")) and works(run) else 1)
assert works(run)
assert os.waitpid(child, 0)[1] == 0
assert works(run)
"""


def test_a_forked_child_has_threads_of_its_own(cache: KernelCache, tmp_path: Path) -> None:
    package = str(Path(bl.__file__).parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    program = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED, str(tmp_path / "cache")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (program.returncode, program.stderr) == (0, "")


# ------------------------------------------------------------------------------------------ memory


def test_a_prepared_plan_outlives_the_names_of_its_plan(cache: KernelCache) -> None:
    made = Doubled(cache)
    run = made.run
    del made
    gc.collect()
    run.write("x", np.ones(8, np.float32))
    assert run().read("y").tolist() == [2] * 8


def test_arrays_live_as_long_as_they_are_used(cache: KernelCache) -> None:
    plan, x = Plan("arrays"), np.ones(8, np.float32)
    y, other = np.zeros(8, np.float32), np.zeros(8, np.float32)
    seen = [weakref.ref(each) for each in (x, y, other)]
    plan.launch(residual(), a=x, b=x, y=plan.buffer("y", 8, "f32"), n=8)
    run = plan.prepare("CPU", cache=cache, bind={"y": y})
    del x, y
    gc.collect()
    assert run().read("y").tolist() == [2] * 8
    run(y=other)
    del other
    gc.collect()
    alive = [reference() is not None for reference in seen]
    assert alive == [True, False, True], "what was bound before is given back"
    del run, plan
    gc.collect()
    assert [reference() for reference in seen] == [None] * 3


def test_a_run_with_changes_leaks_nothing(cache: KernelCache) -> None:
    run = Doubled(cache).run
    arrays = [np.zeros(8, np.float32) for _ in range(2)]
    counts = []
    for _ in range(3):
        for number in range(50):
            run(x=arrays[number % 2], n=number % 8 + 1)
        gc.collect()
        counts.append([sys.getrefcount(each) for each in arrays])
    assert counts[0] == counts[1] == counts[2]


# --------------------------------------------------------------------------------------- profilers


def watched_plan() -> Plan:
    """Two layers, of which the second kernel of each occurs twice."""
    plan = Plan("model")
    x = plan.buffer("x", (2, 64), "f32")
    w = plan.buffer("w", 64, "f32", read_only=True)
    h, g = plan.buffer("h", (2, 64), "f32"), plan.buffer("g", 128, "f32")
    for layer in range(2):
        plan.launch(
            *(rms_norm(),),
            **{"x": x, "weight": w, "y": h, "rows": 2, "n": 64, "eps": 1e-5},
            **{"brick": "RmsNorm", "layer": layer},
        )
        flat = h.reshape(128)
        plan.launch(silu_gate(), gate=flat, up=flat, y=g, n=128, brick="Gate", layer=layer)
        plan.launch(residual(), a=g[:64], b=flat[:64], y=x[0], n=64, brick="Add", layer=layer)
        plan.launch(residual(), a=g[64:], b=flat[64:], y=x[1], n=64, brick="Add", layer=layer)
    return plan


def filled(run: Any) -> Any:
    run.write("x", drawn(2, 64))
    run.write("w", np.ones(64, np.float32))
    return run


@pytest.fixture
def profiler() -> Iterator[bl.BrickProfiler]:
    made = bl.BrickProfiler("plans", enabled=True, graph=True)
    yield made
    made.close()


@pytest.mark.parametrize("executor", ["serial", "parallel"])
@pytest.mark.parametrize("fingerprints", [False, True])
def test_a_profiler_is_told_of_bricks_layers_and_dependencies(
    cache: KernelCache, profiler: bl.BrickProfiler, executor: str, fingerprints: bool
) -> None:
    plan = watched_plan()
    options = {"profiler": profiler, "fingerprints": fingerprints}
    run = filled(plan.prepare("CPU", executor, cache=cache, threads=2, **options))
    if executor == "parallel":
        together(run)
    for _ in range(3):
        run()
    for name, count in (("RmsNorm", 6), ("Gate", 6), ("Add", 12)):
        assert profiler.brick_stats(name).count == count
    nodes = profiler.graph.kernel_nodes()
    places = {node.id: place for place, node in enumerate(nodes)}
    assert len(nodes) == 3 * len(plan.launches)
    for place, launch in enumerate(plan.launches * 3):
        edges = profiler.graph.incoming_edges(nodes[place].id)
        found = [places[edge.source] for edge in edges if edge.kind is EdgeKind.DEPENDS_ON]
        first = place - launch.number
        assert sorted(found) == [first + earlier for earlier in launch.waits_for]
    expected = filled(plan.prepare("CPU", cache=cache))
    for _ in range(3):
        expected()
    assert run.read("x").tobytes() == expected.read("x").tobytes(), "watching changes nothing"


@pytest.mark.parametrize("executor", ["serial", "parallel", "megakernel"])
def test_a_trace_has_kernel_brick_checksums_and_time_at_once(
    cache: KernelCache, profiler: bl.BrickProfiler, executor: str
) -> None:
    plan = watched_plan()
    run = plan.prepare("CPU", executor, cache=cache, profiler=profiler, fingerprints=True)
    filled(run)()
    run()
    part = profiler._part()
    assert part is not None
    for place, (trace, row) in enumerate(zip(profiler.kernel_traces(), part.traces, strict=True)):
        launch = plan.launches[place % 8]
        assert (trace.kernel_name, trace.layer_idx) == (launch.kernel.name, launch.layer)
        assert trace.position == place // 8
        assert (trace.input_checksum is None, trace.output_checksum is None) == (False, False)
        assert trace.time_us == (row["end_ns"] - row["start_ns"]) / 1e3 > 0
        (slot,) = part.slots[part.slots["slot"] == row["slot"]]
        known = profiler.brick(launch.brick, launch.layer)
        assert (part.string(slot["name"]), slot["layer"]) == (known.name, launch.layer)
        assert row["kernel_hash"] == KernelRegistry.hash_source(launch.kernel.source)
        assert row["ordinal"] == (place % 4 == 3), "the second residual of its layer"
        brick = json.loads(trace.params)["brick"]
        assert brick == ("RmsNorm", "Gate", "Add", "Add#2")[place % 4]


def test_a_run_says_what_watching_a_plan_took(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bl.BrickProfiler("p", enabled=True, device="NULL") as profiler:
        taken = 0

        def slow(tensor: Any) -> Any:
            nonlocal taken
            taken += 1
            profiler.advance(700)
            return bl.fingerprint(tensor)

        monkeypatch.setattr("brickline.launch_traces.fingerprint", slow)
        run = watched_plan().prepare("CPU", cache=cache, profiler=profiler, fingerprints=True)
        # What the plan itself takes is no cost.
        monkeypatch.setattr(run._device, "synchronize", lambda: profiler.advance(5_000))
        filled(run)()
        assert profiler._now_ns() == 700 * taken + 8 * 5_000
        assert profiler.profile().recording.observing_ns == 700 * taken > 0


@pytest.mark.parametrize("fingerprints", [False, True])
@pytest.mark.parametrize("executor", ["serial", "parallel", "megakernel"])
def test_a_kernel_is_launched_by_its_brick_once(
    cache: KernelCache, profiler: bl.BrickProfiler, executor: str, fingerprints: bool
) -> None:
    plan = watched_plan()
    options = {"profiler": profiler, "fingerprints": fingerprints}
    run = filled(plan.prepare("CPU", executor, cache=cache, **options))
    with profiler.step(phase="decode"):
        run()
        run()
    graph = profiler.graph
    kernels = graph.kernel_nodes()
    assert [node.name for node in kernels] == [each.kernel.name for each in plan.launches] * 2
    for node, launch in zip(kernels, plan.launches * 2, strict=True):
        registry = KernelRegistry()
        known = registry.register(launch.kernel.name, launch.kernel.source)
        assert isinstance(node.detail, KernelDetail)
        assert node.detail.source_hash == known
        (edge,) = [e for e in graph.incoming_edges(node.id) if e.kind is EdgeKind.LAUNCHES]
        brick = graph.node(edge.source)
        assert (brick.kind, brick.layer) == (NodeKind.BRICK, launch.layer)
        assert profiler.brick_stats(launch.brick).name == brick.name
        assert (node.timing_ns, brick.timing_ns) != (None, None)
    drawn = [node for node in graph.nodes() if node.kind is NodeKind.BRICK]
    assert len(drawn) == len(kernels) + 1, "no launch twice, and the step"
    containers = graph.store.containers().tolist()
    roots = [node.name for node in graph.nodes() if containers[node.id] == DROPPED_NODE]
    assert roots == ["Step (decode)"]
    assert graph.critical_path().total_ns > 0


def test_copies_to_the_device_are_drawn(cache: KernelCache, profiler: bl.BrickProfiler) -> None:
    plan = Plan("copied")
    w = plan.buffer("w", array=np.ones(8, np.float32))
    plan.launch(residual(), a=w, b=w, y=plan.buffer("y", 8, "f32"), n=8)
    run = plan.prepare("NULL", cache=cache, profiler=profiler)
    run()
    run()
    details = [node.detail for node in profiler.graph.nodes()]
    (copied,) = [detail for detail in details if isinstance(detail, TransferDetail)]
    assert (copied.source, copied.target, copied.size_bytes) == ("CPU:w", "NULL", 32)
    assert copied.direction is TransferDirection.HOST_TO_DEVICE


def test_a_failure_is_the_same_under_a_profiler(
    cache: KernelCache, profiler: bl.BrickProfiler
) -> None:
    for options in ({"executor": "serial"}, {"executor": "parallel", "threads": 2}):
        for fingerprints in (False, True):
            run = failing(cache, **options, profiler=profiler, fingerprints=fingerprints)
            with pytest.raises(LaunchError, match=r"failed at launch 1 \(fail\).*1 of 3"):
                run(when=1)
            assert run.read("b1").tolist() == [1] * 8
            run.reset()
            assert run(when=0).read("b3").tolist() == [3] * 8


def test_watching_ends_and_a_disabled_profiler_hears_nothing(
    cache: KernelCache, profiler: bl.BrickProfiler
) -> None:
    run = Doubled(cache, profiler=profiler).run
    run()
    profiler.disable()
    run()
    profiler.enable()
    run.watch(None)
    run()
    assert profiler.brick_stats("residual").count == 1


def test_a_checked_plan_is_not_watched(cache: KernelCache, profiler: bl.BrickProfiler) -> None:
    with pytest.raises(PlanError, match="is checked, which no profiler watches"):
        Doubled(cache, checked=True, profiler=profiler)


# --------------------------------------------------------------------------------------- comparison


def recorded(path: Path, cache: KernelCache, executor: str, wrong: float = 2.0) -> Path:
    """Two runs of a plan of three layers, the scale of whose second one may be wrong."""
    plan = Plan("model")
    x = plan.buffer("x", (4, 64), "f32")
    w = plan.buffer("w", 64, "f32", read_only=True)
    h, a = plan.buffer("h", (4, 64), "f32"), plan.buffer("a", 256, "f32")
    for layer in range(3):
        plan.launch(
            *(rms_norm(),),
            **{"x": x, "weight": w, "y": h, "rows": 4, "n": 64, "eps": 1e-5, "layer": layer},
        )
        flat = h.reshape(256)
        plan.launch(scaled(wrong if layer == 1 else 2.0), x=flat, y=a, n=256, layer=layer)
        plan.launch(silu_gate(), gate=a, up=flat, y=x.reshape(256), n=256, layer=layer)
    profiler = bl.BrickProfiler(path.stem, enabled=True, path=path)
    run = plan.prepare("CPU", executor, cache=cache, profiler=profiler, fingerprints=True)
    run.write("x", drawn(4, 64))
    run.write("w", np.ones(64, np.float32))
    run()
    run()
    profiler.close()
    return path


def test_two_recorded_runs_of_one_plan_match(cache: KernelCache, tmp_path: Path) -> None:
    reference = recorded(tmp_path / "serial.brick", cache, "serial")
    report = bl.compare(recorded(tmp_path / "parallel.brick", cache, "parallel"), reference)
    assert report.status is Status.MATCHED
    assert not report.findings


@pytest.mark.parametrize("executor", ["serial", "parallel", "megakernel"])
def test_fingerprints_tell_each_launch_once(
    cache: KernelCache, tmp_path: Path, executor: str
) -> None:
    run = bl.Run.open(recorded(tmp_path / "once.brick", cache, executor))
    counts = {stats.name: stats.count for stats in profile_from_run(run).bricks}
    assert counts == {"rms_norm": 6, "scale": 6, "silu_gate": 6}


def test_a_kernel_that_was_planted_wrong_is_the_first_suspect(
    cache: KernelCache, tmp_path: Path
) -> None:
    reference = recorded(tmp_path / "right.brick", cache, "serial")
    report = bl.compare(recorded(tmp_path / "wrong.brick", cache, "serial", 2.5), reference)
    assert report.status is Status.DIVERGED
    assert (report.findings[0].name, report.findings[0].layer_idx) == ("scale", 1)


# ----------------------------------------------------------------------------------- strided views

COLUMN_SUM = """
BRICKLINE void column_sum(Block& block, const float* x, float* y, int64_t m, int64_t n,
                          int64_t step) {
    block.each(m, [&](int64_t r) {
        float sum = 0.0f;
        for (int64_t c = 0; c < n; ++c) sum = sum + x[r * step + c];
        y[r * step] = sum;
    });
}
"""


def column_sum() -> Kernel:
    """Sum the first n columns of every row into a column of another strided view."""
    return Kernel(
        "column_sum",
        COLUMN_SUM,
        [
            Param("x", "f32", ("m", "n"), strides=("step", 1)),
            Param("y", "f32", "m", "write", strides="step"),
            Scalar("m", low=1),
            Scalar("n", low=1),
            Scalar("step", low=1),
        ],
    )


def strided_plan() -> Plan:
    plan = Plan("strided")
    x = plan.buffer("x", (6, 10), "f32")
    columns = x.view((6, 4), 0, strides=(10, 1))
    result = x.view(6, 9, strides=(10,))
    y = plan.buffer("y", (6, 10), "f32")
    plan.launch(column_sum(), x=columns, y=y.view(6, 2, strides=(10,)), m=6, n=4, step=10)
    plan.launch(column_sum(), x=y.view((6, 3), strides=(10, 1)), y=result, m=6, n=3, step=10)
    return plan


@pytest.mark.parametrize("executor", ["serial", "parallel"])
def test_a_kernel_that_declares_strides_takes_strided_views(executor: str) -> None:
    plan = strided_plan()
    assert [launch.waits_for for launch in plan.launches] == [(), (0,)]
    prepared = plan.prepare(executor=executor)
    values = np.arange(60, dtype=np.float32).reshape(6, 10)
    prepared.write("x", values)
    prepared()
    sums = values[:, :4].sum(axis=1)
    assert np.array_equal(prepared.read("y")[:, 2], sums)
    expected = values.copy()
    expected[:, 9] = sums
    assert np.array_equal(prepared.read("x"), expected)


def test_strided_plans_are_checked_saved_and_watched(tmp_path: Path) -> None:
    plan = strided_plan()
    plan.save(tmp_path / "strided.plan")
    again = Plan.load(tmp_path / "strided.plan")
    profiler = bl.BrickProfiler("strided", enabled=True)
    prepared = again.prepare(profiler=profiler, fingerprints=True)
    prepared.write("x", np.ones((6, 10), np.float32))
    assert np.array_equal(prepared().read("x")[:, 9], np.full(6, 4, np.float32))
    assert len(profiler.kernel_traces()) == 2
    assert np.array_equal(plan.prepare(checked=True)().read("x"), np.zeros((6, 10), np.float32))


def test_strides_that_are_not_those_of_the_kernel_are_refused() -> None:
    plan = Plan("refused")
    x = plan.buffer("x", (6, 10), "f32")
    y = plan.buffer("y", 60, "f32")
    with pytest.raises(PlanError, match=r"expected strides \[9, 1\]"):
        plan.launch(column_sum(), x=x.view((6, 4), strides=(10, 1)), y=y[::9][:6], m=6, n=4, step=9)
    cached = KernelCache().get_or_compile(column_sum(), "CPU")
    with pytest.raises(LaunchError, match="Plan"):
        cached.launch(x=np.zeros((6, 4)), y=np.zeros(6), m=6, n=4, step=4)


# ----------------------------------------------------------------------------------------- mistakes


def test_memory_that_the_machine_lacks_is_refused_with_its_buffer(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, size = Plan("large"), 1 << 45
    x, y = (plan.buffer(name, size, "f32") for name in "xy")
    plan.launch(residual(), a=x[:8], b=x[8:16], y=y[:8], n=8)
    needed = (
        r"plan large: buffer x, f32\[35184372088832\], needs 128\.0 TiB, all buffers together "
        r"256\.0 TiB; CPU has [0-9.]+ \w+ available: declare less, or bind memory of your own"
    )
    with pytest.raises(PlanError, match=needed):
        plan.prepare("CPU", cache=cache)
    monkeypatch.setattr("brickline.executor.memory.check_room", lambda *_: None)
    with pytest.raises(PlanError, match=rf"{needed}.*\(cannot allocate 140737488355328 bytes"):
        plan.prepare("CPU", cache=cache)


def test_memory_that_is_bound_needs_no_room(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "brickline.executor.memory.check_room",
        lambda plan, storages, device: asked.extend(each.name for each in storages),
    )
    plan = Plan("bound")
    w = plan.buffer("w", array=np.ones(8, np.float32))
    x, y = (plan.buffer(name, 8, "f32") for name in "xy")
    plan.launch(residual(), a=w, b=x, y=y, n=8)
    plan.prepare("CPU", cache=cache, bind={"x": np.ones(8, np.float32)})
    assert asked == ["y"]


def test_what_is_written_over_read_only_memory_is_named(cache: KernelCache) -> None:
    fixed = np.frombuffer(bytes(32), np.float32)
    run = Doubled(cache, bind={"x": fixed}).run
    with pytest.raises(LaunchError, match=r"plan doubled, buffer x: .*read-only"):
        run.write("x", np.zeros(8, np.float32))
