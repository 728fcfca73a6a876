"""Claims: what one brick costs inside a decode step of 192 bricks of about 10 us.

* Enabled, with all statistics and their folding: at most 0.25 of `_RecordFunctionFast` with no
  profiler active.
* Disabled: at most two no-op C calls plus a quarter of one clock call.

Every peer is measured in the same run. A peer that cannot be imported is listed as absent, with the
reason. Where a peer is cheaper than brickline, the claim says so.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import in_situ
from harness import Claim
from in_situ import Variant

SEED = 20250
FAST = "torch _RecordFunctionFast, no profiler, new per use"
NO_OP = "two no-op C calls"
CLOCK = "one time.perf_counter_ns()"


# --- Peers: each function makes its variants or raises what keeps it from doing so ----------------


def primitives() -> list[Variant]:
    """Two no-op C calls and a clock call.

    `callable(None)` is the no-op: of the builtins it is among the cheapest calls there are (METH_O,
    one type check, a constant returned; 9 ns here), so it makes the strictest target. `len` is
    cheaper only because CPython compiles it to an instruction that makes no call.
    `gc.isenabled()` is METH_NOARGS, which CPython 3.11 calls the slow way (17 ns); it is listed.
    """
    import gc

    return [
        Variant(NO_OP, before="nop(None)", after="nop(None)", names={"nop": callable}),
        Variant(
            "two METH_NOARGS calls", before="nop()", after="nop()", names={"nop": gc.isenabled}
        ),
        Variant(CLOCK, before="clock()", names={"clock": time.perf_counter_ns}),
    ]


def record_function_fast() -> list[Variant]:
    from torch._C._profiler import _RecordFunctionFast

    kept = [[_RecordFunctionFast(name) for _, name, _ in in_situ.BRICKS]] * in_situ.LAYERS
    names = {"annotate": _RecordFunctionFast}
    return [
        Variant(FAST, context='annotate("{name}")', names=names),
        Variant("torch _RecordFunctionFast, no profiler, kept", context="{handle}", handles=kept),
    ]


def record_function() -> list[Variant]:
    from torch.profiler import record_function as annotate

    name = "torch record_function, no profiler"
    return [Variant(name, context='annotate("{name}")', names={"annotate": annotate})]


def nvtx_ranges() -> list[Variant]:
    import nvtx

    domain = nvtx.get_domain("benchmark")
    attributes = [[domain.get_event_attributes(message=name) for _, name, _ in in_situ.BRICKS]]
    return [
        Variant(
            "nvtx.annotate, no tool",
            context='annotate("{name}")',
            names={"annotate": nvtx.annotate},
        ),
        Variant(
            "nvtx Domain.push_range, prebuilt, no tool",
            before="domain.push_range({handle})",
            after="domain.pop_range()",
            names={"domain": domain},
            handles=attributes * in_situ.LAYERS,
        ),
    ]


def proton_scope_off() -> list[Variant]:
    import triton.profiler as proton

    return [Variant("proton.scope, off", context='scope("{name}")', names={"scope": proton.scope})]


def proton_scope_active() -> list[Variant]:
    """A session that needs no GPU: its tree is kept, no kernel ever reports to it."""
    import triton._C.libproton.proton as libproton
    import triton.profiler as proton
    from triton.profiler.flags import flags

    path = str(Path(tempfile.mkdtemp()) / "proton")
    session = libproton.start(path, "shadow", "tree", "instrumentation", "cuda")
    libproton.deactivate(session, False)

    def arm() -> None:
        libproton.activate(session)
        flags.profiling_on = True

    def disarm() -> None:
        flags.profiling_on = False
        libproton.deactivate(session, False)

    names = {"scope": proton.scope}
    name = "proton.scope, active session"
    return [Variant(name, context='scope("{name}")', names=names, arm=arm, disarm=disarm)]


def opentelemetry_span() -> list[Variant]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import (
        SimpleSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    class NullExporter(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(NullExporter()))
    span = provider.get_tracer("benchmark").start_as_current_span
    name = "OpenTelemetry span, SDK, null exporter"
    return [Variant(name, context='span("{name}")', names={"span": span})]


def prometheus_histogram() -> list[Variant]:
    from prometheus_client import CollectorRegistry, Histogram

    histogram = Histogram(
        "brick_seconds", "Time of a brick", ["brick"], registry=CollectorRegistry()
    )
    kept = [[histogram.labels(name) for _, name, _ in in_situ.BRICKS]] * in_situ.LAYERS
    return [
        Variant(
            "Prometheus Histogram.observe, label kept",
            before="begin = now()",
            after="{handle}.observe(now() - begin)",
            names={"now": time.perf_counter},
            handles=kept,
        )
    ]


class DictTimer:
    """What people write by hand: count, sum, smallest and largest per name."""

    def __init__(self) -> None:
        self.begun: dict[str, int] = {}
        self.totals: dict[str, list[int]] = {}

    def start(self, name: str) -> None:
        """Begin `name`."""
        self.begun[name] = time.perf_counter_ns()

    def stop(self, name: str) -> None:
        """End `name` and add it up."""
        spent = time.perf_counter_ns() - self.begun[name]
        total = self.totals.get(name)
        if total is None:
            self.totals[name] = [1, spent, spent, spent]
            return
        total[0] += 1
        total[1] += spent
        if spent < total[2]:
            total[2] = spent
        if spent > total[3]:
            total[3] = spent


def python_dict() -> list[Variant]:
    name = "Python dict start/stop"
    start, stop = 'timer.start("{name}")', 'timer.stop("{name}")'
    return [Variant(name, before=start, after=stop, names={"timer": DictTimer()})]


# --- brickline ------------------------------------------------------------------------------------

WITH, METHODS, HANDLE_MARK = "with kept handle", "handle.start/stop", "handle.mark"
START_STOP, MARK = "start_brick/stop_brick", "mark(id)"
INLINE = "with profiler.brick(id, layer=)"
FORMS = (WITH, METHODS, HANDLE_MARK, START_STOP, MARK, INLINE)


def brickline_variants(*, enabled: bool) -> list[Variant]:
    import brickline as bl

    profiler = bl.BrickProfiler("benchmark", enabled=enabled)
    handles = [
        [profiler.brick(getattr(bl.BrickId, brick), layer=layer) for brick, _, _ in in_situ.BRICKS]
        for layer in range(in_situ.LAYERS)
    ]
    forms: dict[str, dict[str, Any]] = {
        WITH: {"context": "{handle}", "handles": handles},
        METHODS: {"before": "{handle}.start()", "after": "{handle}.stop()", "handles": handles},
        HANDLE_MARK: {"before": "{handle}.mark()", "handles": handles},
        START_STOP: {
            "before": "timer = profiler.start_brick(BrickId.{id})",
            "after": "profiler.stop_brick(timer, 1)",
        },
        MARK: {"before": "profiler.mark(BrickId.{id})"},
        INLINE: {"context": "profiler.brick(BrickId.{id}, layer=layer)"},
    }
    names = {"profiler": profiler, "BrickId": bl.BrickId}
    around = 'profiler.step(tokens=1, phase="decode")'
    return [
        Variant(_title(form, enabled), around=around, names=names, defers=enabled, **sources)
        for form, sources in forms.items()
    ]


def _title(form: str, enabled: bool) -> str:
    return f"brickline {'enabled' if enabled else 'disabled'}, {form}"


# --- The run --------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[], list[Variant]]] = {
    "primitives": primitives,
    "brickline enabled": lambda: brickline_variants(enabled=True),
    "brickline disabled": lambda: brickline_variants(enabled=False),
    "torch _RecordFunctionFast": record_function_fast,
    "torch record_function": record_function,
    "nvtx": nvtx_ranges,
    "proton.scope, off": proton_scope_off,
    "proton.scope, active session": proton_scope_active,
    "OpenTelemetry span": opentelemetry_span,
    "Prometheus Histogram.observe": prometheus_histogram,
    "Python dict start/stop": python_dict,
}


def worker(number: int, quick: bool) -> dict[str, Any]:
    """One process: every variant in several batches."""
    with harness.quiet():
        variants: list[Variant] = []
        absent: dict[str, str] = {}
        for title, make in MAKERS.items():
            try:
                variants += make()
            except Exception as error:  # any failure of a peer's makes it absent
                absent[title] = f"{type(error).__name__}: {error}".splitlines()[0]
        work = "numpy" if "torch _RecordFunctionFast" in absent else "torch"
        measured = in_situ.in_situ(
            variants,
            batches=2 if quick else 4,
            rounds=10 if quick else 30,
            seed=SEED + number,
            work=work,
        )
    return {"work": work, "absent": absent, **vars(measured)}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measures and states the claims."""
    processes = 1 if quick else 3
    print(f"in situ: seed {SEED}, {processes} process(es)", file=sys.stderr)
    answers = harness.in_processes(__file__, ["--quick"] if quick else [], processes)
    return [claim.as_dict() for claim in claims_from_answers(answers)]


def claims_from_answers(answers: list[dict[str, Any]]) -> list[Claim]:
    added = _joined(answers, "added_ns")
    parts = {
        name: _joined([answer["parts_ns"] for answer in answers], name)
        for name in answers[0]["parts_ns"]
    }
    absent: dict[str, str] = {
        key: why for answer in answers for key, why in answer["absent"].items()
    }
    bricks = [value for answer in answers for value in answer["brick_ns"]]
    context = (
        f"a {answers[0]['work']} brick takes {statistics.median(bricks):.0f} ns; "
        f"same code twice: {harness.spread(added[in_situ.SAME.name])} ns"
    )
    context += "".join(f"; absent: {title} ({why})" for title, why in absent.items())
    enabled = [
        _claim(form, True, added, parts, absent, added.get(FAST), 0.25, FAST, context)
        for form in FORMS
    ]
    bound = [calls + clock / 4 for calls, clock in zip(added[NO_OP], added[CLOCK], strict=True)]
    unit = "two no-op C calls + 1/4 clock call"
    disabled = [
        _claim(form, False, added, parts, absent, bound, 1.0, unit, context) for form in FORMS
    ]
    return enabled + disabled


def _joined(answers: list[dict[str, Any]], key: str) -> dict[str, list[float]]:
    names = {name: None for answer in answers for name in answer[key]}
    return {
        name: [value for answer in answers for value in answer[key].get(name, ())] for name in names
    }


def _claim(
    form: str,
    enabled: bool,
    added: dict[str, list[float]],
    parts: dict[str, dict[str, list[float]]],
    absent: dict[str, str],
    bases: list[float] | None,
    target: float,
    base_name: str,
    context: str,
) -> Claim:
    name = _title(form, enabled)
    title = f"in situ, {name.removeprefix('brickline ')}"
    unit = f"of {base_name}"
    if name not in added or not bases:
        missing = "brickline" if name not in added else base_name
        return Claim(title, None, unit, target, note=f"{missing} was not measured; {context}")
    base = statistics.median(bases)
    ratios = [value / each for value, each in zip(added[name], bases, strict=True)]
    peers: dict[str, float | None] = {
        peer: statistics.median(values) / base
        for peer, values in added.items()
        if not peer.startswith("brickline") and peer != in_situ.SAME.name
    }
    figure = statistics.median(ratios)
    cheaper = [peer for peer, value in peers.items() if value is not None and value < figure]
    peers |= dict.fromkeys(title for title in absent if not title.startswith("brickline"))
    note = f"{statistics.median(added[name]):.0f} ns of {base:.0f} ns"
    medians = {part: statistics.median(values) for part, values in parts[name].items()}
    note += f" ({' + '.join(f'{value:.0f} {part}' for part, value in medians.items())})"
    note += f"; ratio {harness.spread(ratios, 2)} over batches; {context}"
    note += f"; cheaper here: {', '.join(cheaper)}" if cheaper else ""
    return Claim(title, figure, unit, target, peers, note)


if __name__ == "__main__":
    raise SystemExit(harness.main(run, worker, __doc__))
