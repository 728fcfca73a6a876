"""What instrumentation adds to a decode step of 192 bricks of about 10 us of true work.

`in_situ` writes each variant into the source of the layer and measures it against the layer without
it; README.md has the method. Knows nothing of brickline nor of any peer.
"""

from __future__ import annotations

import gc
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness import compiled

LAYERS = 24
BRICKS: tuple[tuple[str, str, str], ...] = (
    ("RMS_NORM", "RmsNorm", "norm"),
    ("QKV_PROJECTION", "QkvProjection", "matvec"),
    ("ROPE_EMBEDDING", "RopeEmbedding", "rotate"),
    ("ATTENTION_SCORE", "AttentionScore", "attend"),
    ("OUTPUT_PROJECTION", "OutputProjection", "matvec"),
    ("GATE_PROJECTION", "GateProjection", "matvec"),
    ("ACTIVATION", "Activation", "norm"),
    ("DOWN_PROJECTION", "DownProjection", "matvec"),
)
"""Id, name and arithmetic of the bricks of one layer, in their order."""
BRICKS_PER_STEP = LAYERS * len(BRICKS)
WIDTH = 32
"""The weights of a step are 192 matrices of 4 KiB: no brick finds its own in the L1 cache."""
WARM_UP_ROUNDS = 3
STEPS_PER_TURN = 3
STEP_ROUNDS = 300
DEFERRED_WARM_UP_STEPS = 100
DEFERRED_STEPS = 250


@dataclass(frozen=True)
class Variant:
    """One way to instrument a brick.

    `context`, `before`, `after` and `around` are Python source in which `{id}` stands for the
    brick's id (RMS_NORM), `{name}` for its name (RmsNorm), `{handle}` for its entry of `handles`;
    the variable `layer` holds the layer's number.
    """

    name: str
    context: str = ""
    """Expression of a `with` around each brick."""
    before: str = ""
    after: str = ""
    around: str = ""
    """Expression of a `with` around the whole step."""
    names: Mapping[str, Any] = field(default_factory=dict)
    handles: Sequence[Sequence[Any]] | None = None
    """What the user keeps per layer and brick. Looking it up is not charged to any variant."""
    arm: Callable[[], None] | None = None
    """Switches global state on before the step; `disarm` switches it off. Neither is timed."""
    disarm: Callable[[], None] | None = None
    defers: bool = False
    """Whether some of the work is done later than the brick; it is then sought and charged."""


CONTROL = Variant("control")
SAME = Variant("same code twice")
"""Measured like every other variant: what it costs is the error of the method."""
YARDSTICK = Variant("clock calls", before="now()", after="now()", names={"now": time.perf_counter})


@dataclass
class InSitu:
    """What `in_situ` measured; lists hold one value per batch."""

    brick_ns: list[float] = field(default_factory=list)
    """Time of a brick without instrumentation."""
    added_ns: dict[str, list[float]] = field(default_factory=dict)
    """What each variant adds to a brick, deferred work included."""
    parts_ns: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """What `added_ns` is the sum of: the brick itself, its share of the step, later folding."""


Layer = Callable[[Any, Any, int], None]


@dataclass(frozen=True)
class _Pair:
    variant: Variant
    layer: Layer
    control: Layer
    enter: Callable[[], None]
    """Begins a step; `leave` ends it. Both do nothing for a variant without steps."""
    leave: Callable[[], None]


def _compile_pair(variant: Variant, model: Model) -> _Pair:
    enter, leave = _compile_step(variant)
    return _Pair(
        variant, compile_layer(variant, model), compile_layer(CONTROL, model), enter, leave
    )


def _compile_step(variant: Variant) -> tuple[Callable[[], None], Callable[[], None]]:
    names = dict(variant.names)
    enter, leave = "None", "None"
    if variant.around:
        enter, leave = f"{variant.around}; step.__enter__()", "step.__exit__(None, None, None)"
    return (
        compiled(f"def enter():\n    global step\n    step = {enter}", "enter", names),
        compiled(f"def leave():\n    {leave}", "leave", names),
    )


def in_situ(
    variants: Sequence[Variant], *, batches: int, rounds: int, seed: int, work: str
) -> InSitu:
    """What each variant adds to a brick of a decode step.

    A batch compiles everything anew, since the placement of code alone moves a figure by some ns.
    It runs rounds; a round gives every variant its turn, in random order. A turn is a few steps, of
    which the first is not kept: in a model, too, the step before used the same profiler. A step
    runs every layer twice, instrumented and as control, in random order and with different weights,
    and takes the difference: on a shared machine the noise lasts longer than the 0.2 ms of such a
    pair and cancels, where it does not between whole steps. The figure of a batch is the median
    over pairs. Entering and leaving the step is timed apart, see `_step_ns`.
    """
    rng = random.Random(seed)
    everything = [SAME, *variants]
    result = InSitu(added_ns={item.name: [] for item in everything})
    for _ in range(batches):
        model = WORKLOADS[work]()
        pairs = [_compile_pair(item, model) for item in everything]
        batch = _run_batch(pairs, model, rounds, rng)
        result.brick_ns.append(batch.brick_ns)
        for pair in pairs:
            name = pair.variant.name
            parts = {"brick": batch.bricks_ns[name]}
            if pair.variant.around:
                parts["step"] = _step_ns(pair, model) / BRICKS_PER_STEP
            if pair.variant.defers:
                parts["folding"] = _deferred_ns(pair, model, DEFERRED_STEPS)
            result.added_ns[name].append(sum(parts.values()))
            for part, value in parts.items():
                result.parts_ns.setdefault(name, {}).setdefault(part, []).append(value)
    return result


@dataclass(frozen=True)
class _Batch:
    brick_ns: float
    bricks_ns: dict[str, float] = field(default_factory=dict)
    """What each variant adds to a brick."""


def _run_batch(pairs: Sequence[_Pair], model: Model, rounds: int, rng: random.Random) -> _Batch:
    controls: list[int] = []
    differences: dict[str, list[int]] = {pair.variant.name: [] for pair in pairs}
    order = list(pairs)
    for number in range(-WARM_UP_ROUNDS, rounds):
        rng.shuffle(order)
        for pair in order:
            for turn in range(STEPS_PER_TURN):
                step_controls, step_differences = _run_step(pair, model, rng)
                if number >= 0 and turn > 0:
                    controls += step_controls
                    differences[pair.variant.name] += step_differences
        if number % 50 == 0:
            gc.collect()
    batch = _Batch(statistics.median(controls) / len(BRICKS))
    for name, values in differences.items():
        batch.bricks_ns[name] = statistics.median(values) / len(BRICKS)
    return batch


def _run_step(pair: _Pair, model: Model, rng: random.Random) -> tuple[list[int], list[int]]:
    """Control times of the layers, and what the variant added to each."""
    clock = time.process_time_ns
    variant, run, control = pair.variant, pair.layer, pair.control
    handles = variant.handles or NO_HANDLES
    controls: list[int] = []
    differences: list[int] = []
    if variant.arm:
        variant.arm()
    pair.enter()
    for number in range(LAYERS):
        h = handles[number]
        weights = model.weights[number]
        other_weights = model.weights[(number + LAYERS // 2) % LAYERS]
        if rng.random() < 0.5:
            begin = clock()
            run(weights, h, number)
            middle = clock()
            control(other_weights, h, number)
            end = clock()
            controls.append(end - middle)
            differences.append((middle - begin) - (end - middle))
        else:
            begin = clock()
            control(other_weights, h, number)
            middle = clock()
            run(weights, h, number)
            end = clock()
            controls.append(middle - begin)
            differences.append((end - middle) - (middle - begin))
    pair.leave()
    if variant.disarm:
        variant.disarm()
    return controls, differences


def _step_ns(pair: _Pair, model: Model) -> float:
    """What entering and leaving a step takes, caches as cold as a model leaves them.

    A layer lasts 100 us, in which a difference of one microsecond drowns; so the calls alone are
    timed, between layers, and what empty calls take in the same place is taken off.
    """
    idle_enter, idle_leave = _compile_step(CONTROL)
    calls = (pair.enter, pair.leave, idle_enter, idle_leave)
    spent: list[list[int]] = [[] for _ in calls]
    clock = time.perf_counter_ns
    for number in range(STEP_ROUNDS):
        for call, values in zip(calls, spent, strict=True):
            pair.control(model.weights[number % LAYERS], NO_HANDLES[0], number)
            begin = clock()
            call()
            values.append(clock() - begin)
    enter, leave, *idle = (statistics.median(values) for values in spent)
    return enter + leave - sum(idle)


def _deferred_ns(pair: _Pair, model: Model, steps: int) -> float:
    """Per brick, the work that a median over layers does not see.

    Two parts: bursts in the recording thread, and all CPU time of other threads. Bursts are sought
    in recordings of one layer without its work (1 us), where folding thousands of records stands
    out. The host interrupts a virtual machine as well, so what clock calls of the same length
    suffer is taken off. Control layers run in between, so that caches are as cold as in a model.
    The steps fill the ring of a profiler of bounded memory several times over, so what it still
    holds at the end is made up for by what it held at the start.
    """
    variant, control = pair.variant, pair.control
    record, yardstick = compile_layer(variant, None), compile_layer(YARDSTICK, None)
    handles = variant.handles or NO_HANDLES
    clock = time.thread_time_ns
    recordings: list[int] = []
    yardsticks: list[int] = []
    for _ in range(DEFERRED_WARM_UP_STEPS):  # the first folds also make the nodes
        for number in range(LAYERS):
            record(None, handles[number], number)
    process_begin, thread_begin = time.process_time_ns(), clock()
    for _ in range(steps):
        for number in range(LAYERS):
            h = handles[number]
            control(model.weights[number], h, number)
            begin = clock()
            record(None, h, number)
            recordings.append(clock() - begin)
            control(model.weights[number - 1], h, number)
            begin = clock()
            yardstick(None, h, number)
            yardsticks.append(clock() - begin)
    thread_ns = clock() - thread_begin
    elsewhere = max(0, time.process_time_ns() - process_begin - thread_ns)
    share = max(0.0, _burst_share(recordings) - _burst_share(yardsticks))
    bursts = share * statistics.median(recordings) * len(recordings)
    return float(bursts + elsewhere) / (steps * BRICKS_PER_STEP)


def _burst_share(spent: Sequence[int]) -> float:
    """Time beyond the typical in values over twice the typical, as a share of typical time."""
    typical = statistics.median(spent)
    return sum(value - typical for value in spent if value > 2 * typical) / (typical * len(spent))


def compile_layer(variant: Variant, model: Model | None) -> Layer:
    """Eight bricks with the variant's instrumentation in their source; no model, no work."""
    bricks = "".join(_brick_source(variant, number, model) for number in range(len(BRICKS)))
    unpack = ", ".join(f"h{number}" for number in range(len(BRICKS))) + " = h\nx = start\n"
    source = "def run(w, h, layer):\n" + textwrap.indent(unpack + bricks, "    ")
    names = {**(model.functions if model else {}), **variant.names}
    run: Layer = compiled(source, "run", {"start": model.start if model else None, **names})
    return run


def _brick_source(variant: Variant, number: int, model: Model | None) -> str:
    brick_id, name, function = BRICKS[number]

    def fill(source: str) -> str:
        source = source.replace("{id}", brick_id).replace("{name}", name)
        return source.replace("{handle}", f"h{number}")

    work = f"x = {function}(x, w[{number}])" if model else "pass"
    if variant.context:
        return f"with {fill(variant.context)}:\n    {work}\n"
    lines = (fill(variant.before), work, fill(variant.after))
    return "".join(f"{line}\n" for line in lines if line)


# --- The arithmetic of the bricks -----------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Functions by the names in BRICKS, weights per layer and brick, the first activation."""

    functions: Mapping[str, Callable[[Any, Any], Any]]
    weights: Sequence[Sequence[Any]]
    start: Any


NO_HANDLES: list[list[None]] = [[None] * len(BRICKS)] * LAYERS


def numpy_model() -> Model:
    import numpy as np

    def norm(x: Any, w: Any) -> Any:
        y = x * (1.0 / np.sqrt(np.mean(x * x) + 1e-5)) * w[0]
        return np.tanh(y + w[1])

    def matvec(x: Any, w: Any) -> Any:
        y = w @ x
        y = y / (1.0 + np.exp(-y))
        return (y - y.mean()) * w[0]

    def rotate(x: Any, w: Any) -> Any:
        other_half = np.concatenate((x[WIDTH // 2 :], x[: WIDTH // 2]))
        return x * np.cos(w[1]) + other_half * np.sin(w[1])

    def attend(x: Any, w: Any) -> Any:
        score = w @ x
        score = np.exp(score - score.max())
        return (score / score.sum()) @ w

    rng = np.random.default_rng(0)
    weights = [
        [rng.standard_normal((WIDTH, WIDTH)).astype("f4") / 10 for _ in BRICKS]
        for _ in range(LAYERS)
    ]
    functions = {"norm": norm, "matvec": matvec, "rotate": rotate, "attend": attend}
    return Model(functions, weights, np.ones(WIDTH, "f4"))


def torch_model() -> Model:
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    def norm(x: Any, w: Any) -> Any:
        return x * torch.rsqrt((x * x).mean() + 1e-5) * w[0]

    def matvec(x: Any, w: Any) -> Any:
        y = torch.mv(w, x)
        return torch.sigmoid(y) * y + x * 0.5

    def rotate(x: Any, w: Any) -> Any:
        return x * w[1] + torch.roll(x, WIDTH // 2) * w[2]

    def attend(x: Any, w: Any) -> Any:
        return torch.mv(w.t(), torch.softmax(torch.mv(w, x), 0)) + x

    plain = numpy_model()
    weights = [[torch.from_numpy(matrix) for matrix in layer] for layer in plain.weights]
    functions = {"norm": norm, "matvec": matvec, "rotate": rotate, "attend": attend}
    return Model(functions, weights, torch.from_numpy(plain.start))


WORKLOADS: dict[str, Callable[[], Model]] = {"numpy": numpy_model, "torch": torch_model}
