"""A megakernel's report as Prometheus metrics, and which sources an output has.

Owns the names, which are stable and carry their units; `prometheus` writes them, `megakernel_otlp`
sends the same figures. A report is of one run that is over, so everything is a gauge. What was not
measured has no sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from brickline.export.prometheus import Family, Sample
from brickline.megakernel_report import PHASES, MegakernelReport
from brickline.megakernel_telemetry import WHOLE_BPS

MAX_OUTPUTS = 64
"""Outputs whose sources are exported; series must stay few."""
MAX_SOURCES = 64
"""Sources of one output: pairs of op, brick and layer."""
PREFIX = "brickline_megakernel"


@dataclass(frozen=True)
class Source:
    """What one op, in one brick and layer, contributed to an output."""

    op: str
    brick: str
    layer: str
    tasks: int
    items: int
    """That are done."""


def families_of_megakernel(report: MegakernelReport) -> list[Family]:
    """Return every metric of a report."""
    found = [
        *_about(report),
        *_items(report),
        *_times(report),
        *_counters(report),
        *_workers(report),
        *_ops(report),
        *_sources(report),
    ]
    return [family for family in found if family.samples]


def sources_of(report: MegakernelReport, writers: tuple[int, ...]) -> list[Source]:
    """Return what contributed to what some tasks wrote, most items first; empty without lineage.

    A task of which no item is done wrote nothing, and nothing contributed to that.
    """
    if report.flow is None:
        return []
    tasks, found = report.tasks, report.flow.all_sources(_written(report, writers))
    found = found[tasks.alias[found] < 0]  # the others repeat one of these, which is there, too
    done = tasks.items if tasks.done is None else tasks.done
    counts: Counter[tuple[int, int, int]] = Counter()
    items: Counter[tuple[int, int, int]] = Counter()
    columns = (tasks.op, tasks.brick, tasks.layer, done)
    for op, brick, layer, count in zip(*(each[found].tolist() for each in columns), strict=True):
        counts[op, brick, layer] += 1
        items[op, brick, layer] += count
    return [
        Source(
            report.ops[key[0]],
            "" if key[1] < 0 else report.bricks[key[1]],
            "" if key[2] < 0 else str(key[2]),
            counts[key],
            many,
        )
        for key, many in items.most_common()
    ]


def _written(report: MegakernelReport, writers: tuple[int, ...]) -> list[int]:
    """Return the rows of those tasks that wrote something, as far as that is known."""
    done = report.tasks.done
    return [row for row in report.rows_of(writers) if done is None or done[row]]


def _gauge(name: str, words: str, samples: list[Sample]) -> Family:
    return Family(f"{PREFIX}_{name}", words, "gauge", samples)


def _about(report: MegakernelReport) -> Iterator[Family]:
    labels = {"name": report.name, "mode": report.mode, "device": report.device, "id": report.id}
    for name in ("execution_mode", "topology", "pressure"):
        value = getattr(report.telemetry, name)
        labels |= {} if value is None else {name: value}
    yield _gauge("info", "The run that is shown.", [Sample(tuple(labels.items()), 1)])
    yield _gauge("complete", "1 if every item is done.", [Sample((), int(report.is_complete))])


def _items(report: MegakernelReport) -> Iterator[Family]:
    figures = {
        "processed": report.items_processed,
        "remaining": report.items_remaining,
        "faulted": report.items_faulted,
        "skipped": report.items_skipped,
        "published": report.published_items,
        "deduped": report.deduped_items,
        "lineage": report.lineage_items,
        "requeued": report.items_requeued,
    }
    samples = [
        Sample((("state", name),), value) for name, value in figures.items() if value is not None
    ]
    yield _gauge("items", "Items by what became of them.", samples)
    faults = Counter((fault.op, fault.code) for fault in report.faults)
    samples = [Sample((("op", op), ("code", code)), count) for (op, code), count in faults.items()]
    yield _gauge("faults", "Faults by op and code.", samples)


def _times(report: MegakernelReport) -> Iterator[Family]:
    yield _gauge("wall_seconds", "All of the run.", [Sample((), report.wall_time)])
    samples = [
        Sample((("phase", name.removeprefix("queue_").removeprefix("backend_")[:-3]),), value / 1e9)
        for name in PHASES
        if (value := getattr(report, name)) is not None
    ]
    yield _gauge("phase_seconds", "What the host spent its time on.", samples)


def _counters(report: MegakernelReport) -> Iterator[Family]:
    for name, value in report.telemetry.known().items():
        words = name.replace("_", " ")
        if name.endswith("_bps"):
            short = name.removesuffix("_bps")
            yield _gauge(f"{short}_ratio", f"The {words[:-4]}.", [Sample((), value / WHOLE_BPS)])
        elif isinstance(value, int):
            unit = name if not name.startswith("bytes_") else f"{name.removeprefix('bytes_')}_bytes"
            yield _gauge(unit, f"Measured {words}.", [Sample((), int(value))])
    if report.imbalance is not None:
        words = "Work of the busiest worker to the mean."
        yield _gauge("imbalance_ratio", words, [Sample((), report.imbalance)])


def _workers(report: MegakernelReport) -> Iterator[Family]:
    samples = [
        Sample((("worker", str(number)), ("kind", name.removesuffix("_ns"))), value / 1e9)
        for number, worker in enumerate(report.workers)
        for name in ("work_ns", "dependency_wait_ns", "data_wait_ns", "ring_wait_ns")
        if (value := getattr(worker, name)) is not None
    ]
    yield _gauge("worker_seconds", "Where the time of each worker went.", samples)
    samples = [
        Sample((("worker", str(number)),), worker.items)
        for number, worker in enumerate(report.workers)
    ]
    yield _gauge("worker_items", "Items that each worker executed.", samples)


def _ops(report: MegakernelReport) -> Iterator[Family]:
    rows = report.op_times
    timed = [
        Sample((("op", row.name),), row.work_ns / 1e9) for row in rows if row.work_ns is not None
    ]
    yield _gauge("op_seconds", "Time inside the items of an op, over all workers.", timed)
    counted = [Sample((("op", row.name),), row.items) for row in rows if row.items is not None]
    yield _gauge("op_items", "Items of an op that were executed.", counted)


def _sources(report: MegakernelReport) -> Iterator[Family]:
    items: list[Sample] = []
    given: list[Sample] = []
    for name, writers in list(report.outputs.items())[:MAX_OUTPUTS]:
        if report.flow is None or not writers:
            continue
        for source in sources_of(report, writers)[:MAX_SOURCES]:
            labels = (
                *(("output", name), ("op", source.op)),
                *(("brick", source.brick), ("layer", source.layer)),
            )
            items.append(Sample(labels, source.items))
        found = report.flow.all_sources(_written(report, writers)).tolist()
        memory = report.flow.given_to_all(found)
        given += [Sample((("output", name), ("memory", each)), 1) for each in memory[:MAX_SOURCES]]
    yield _gauge(
        "output_source_items",
        "Items of an op that are done and contributed to an output, by lineage.",
        items,
    )
    yield _gauge("output_given", "Given memory that an output was made from.", given)
