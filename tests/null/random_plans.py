"""Random plans over rows of three buffers, and what launching each kernel by itself gives.

Among the kernels are some that keep state, run alone, take long, or vary in length, so that a wrong
order or a missing wait shows in the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from brickline.cache import KernelCache
from brickline.errors import PlanError
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import residual, rms_norm, silu_gate, softmax
from brickline.plan import Plan
from brickline.plan_buffers import PlanBuffer

ROWS, COLUMNS = 12, 512

MIX = Kernel(
    "mix",
    """BRICKLINE void mix(Block& block, const float* x, float* y, int64_t n, float by) {
           int64_t first = block.index() * 256;
           block.each(minimum(n - first, int64_t(256)), [&](int64_t i) {
               y[first + i] = y[first + i] * 0.5f + by * x[first + i];
           });
       }""",
    [
        *(Param("x", "f32", "n"), Param("y", "f32", "n", "read-write")),
        *(Scalar("n", low=1, high=1 << 20), Scalar("by", "f32")),
    ],
    global_size="ceil_div(n, 256)",
)
SLOW = Kernel(
    "slow",
    """BRICKLINE void slow(Block& block, const float* x, float* y, int64_t n) {
           float spent = x[0];
           for (int64_t i = 0; i < 50000; ++i) spent = spent * 0.5f + 1.0f;
           block.each(n, [&](int64_t i) { y[i] = x[i] - spent; });
       }""",
    [Param("x", "f32", "n"), Param("y", "f32", "n", "write"), Scalar("n", low=1)],
)
MEET = Kernel(
    "meet",
    """static int64_t arrived = 0;
       BRICKLINE void meet(Block& block, float* y, int64_t wanted) {
           if (!wanted) return;
           int64_t both = (__atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST) + 1) / 2 * 2;
           int64_t left = int64_t(1) << 33;
           while (__atomic_load_n(&arrived, __ATOMIC_SEQ_CST) < both && left) --left;
           if (!left) block.fault(21);
       }""",
    [Param("y", "f32", 1, "write"), Scalar("wanted", high=1)],
    pure=False,
)
"""Two launches of it wait until both run: what follows them finds two threads awake."""
COUNT = Kernel(
    "count",
    """static int64_t calls = 0;
       BRICKLINE void count(Block& block, float* y, int64_t n, int64_t restart) {
           calls = restart ? 1 : calls + 1;
           float number = float(calls);
           block.each(n, [&](int64_t i) { y[i] += number; });
       }""",
    [Param("y", "f32", "n", "read-write"), Scalar("n", low=1), Scalar("restart", high=1)],
    pure=False,
    host_parallel_safe=False,
)
ALONE = Kernel(
    "shuffle",
    """static float kept[4096];
       BRICKLINE void shuffle(Block& block, const float* x, float* y, int64_t n) {
           for (int64_t i = 0; i < n; ++i) kept[i % 4096] = x[i];
           for (int64_t i = 0; i < n; ++i) y[i] = kept[(n - 1 - i) % 4096];
       }""",
    [Param("x", "f32", "n"), Param("y", "f32", "n", "write"), Scalar("n", low=1)],
    host_parallel_safe=False,
)


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


Launch = tuple[str, int, int, int, int, int]
launches = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("residual", "silu_gate", "rms_norm", "softmax", "mix", "count", "shuffle"),
                *("vary", "slow", "slow"),  # while a slow one runs, what waits for it must wait
            ]
        ),
        *(st.integers(0, 2),) * 2,
        *(st.integers(0, ROWS - 1),) * 2,
        st.integers(1, 5),
    ),
    min_size=1,
    max_size=14,
)


def arguments(
    kind: str, source: Any, target: Any, rows: int, t: Any, n: Any
) -> tuple[Kernel, dict[str, Any]]:
    """A kernel over rows of two buffers, whatever these are made of."""
    length = rows * COLUMNS
    x, y = source.reshape(length), target.reshape(length)
    if kind == "residual":
        return residual(), {"a": x, "b": x, "y": y, "n": length}
    if kind == "silu_gate":
        return silu_gate(), {"gate": x, "up": x, "y": y, "n": length}
    if kind == "mix":
        return MIX, {"x": x, "y": y, "n": length, "by": t}
    if kind == "count":
        return COUNT, {"y": y, "n": length, "restart": 0}
    if kind == "slow":
        return SLOW, {"x": x, "y": y, "n": length}
    if kind == "shuffle":
        return ALONE, {"x": x, "y": y, "n": length}
    if kind == "vary":
        return MIX, {"x": x[:n], "y": y[:n], "n": n, "by": 0.25}
    if kind == "softmax":
        return softmax(), {"x": source, "y": target, "rows": rows, "n": COLUMNS}
    weight = {"weight": x[:COLUMNS]}
    return rms_norm(), {"x": source, "y": target, "rows": rows, "n": COLUMNS, "eps": 1e-5} | weight


class Prefix:
    """A planned view whose beginning of symbolic length is taken by the launch."""

    def __init__(self, buffer: PlanBuffer) -> None:
        self.buffer = buffer

    def __getitem__(self, key: slice) -> PlanBuffer:
        stop = key.stop
        return self.buffer[:stop] if isinstance(stop, int) else self.buffer

    def __repr__(self) -> str:
        return repr(self.buffer)


class Rows:
    """Rows of a planned buffer, with NumPy's reshape."""

    def __init__(self, buffer: PlanBuffer) -> None:
        self.buffer = buffer

    def reshape(self, length: int) -> Prefix:
        return Prefix(self.buffer.reshape(length))


def plain(value: Any) -> Any:
    return value.buffer if isinstance(value, Prefix | Rows) else value


def planned(program: list[Launch]) -> tuple[Plan, list[Launch]]:
    """A plan, and those launches that it took: none reads what it writes."""
    plan, taken = Plan("random"), []
    t = plan.variable("t", dtype="f32", default=0.75)
    n = plan.variable("n", 1, COLUMNS, default=100)
    buffers = [plan.buffer(name, (ROWS, COLUMNS), "f32") for name in "abc"]
    first = plan.buffer("first", 1, "f32")
    plan.launch(COUNT, y=first, n=1, restart=1)  # counts from here on
    meet = plan.variable("meet", 0, 1)
    for name in ("m0", "m1"):
        plan.launch(MEET, y=plan.buffer(name, 1, "f32"), wanted=meet)
    for launch in program:
        kind, source, target, begin, end, rows = launch
        rows = min(rows, ROWS - max(begin, end))
        x, y = buffers[source][begin : begin + rows], buffers[target][end : end + rows]
        kernel, given = arguments(kind, Rows(x), Rows(y), rows, t, n)
        try:
            plan.launch(kernel, **{name: plain(value) for name, value in given.items()})
        except PlanError:
            continue
        taken.append((kind, source, target, begin, end, rows))
    return plan, taken


def by_themselves(cache: KernelCache, taken: list[Launch], t: float, n: int) -> list[Any]:
    """What launching each kernel by itself, in order, gives."""
    arrays = [drawn(ROWS, COLUMNS, seed=seed) for seed in range(3)]
    cache.get_or_compile(COUNT, "CPU").launch(y=np.zeros(1, np.float32), n=1, restart=1)
    for kind, source, target, begin, end, rows in taken:
        x, y = arrays[source][begin : begin + rows], arrays[target][end : end + rows]
        kernel, given = arguments(kind, x, y, rows, t, n)
        cache.get_or_compile(kernel, "CPU").launch(**given)
    return arrays
