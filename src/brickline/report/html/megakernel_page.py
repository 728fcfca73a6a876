"""A MegakernelReport as one HTML page: what the page's scripts are given.

Owns the figures and how much of each table a page holds; drawing is the scripts' matter. What was
not measured is None here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import TaskState
from brickline.report.figures import Look
from brickline.report.html.page import MAX_TEXT, PageOf, lines, named, packed
from brickline.report.megakernel import (
    PHASE_WORDS,
    counters,
    notes,
    remaining_words,
    worker_shares,
)

SCRIPTS = ("mega_workers.js", "mega_lineage.js", "megakernel.js")
STYLES = ("megakernel.css",)
MAX_TASKS = 20_000
"""Tasks of the table and of the lineage, the first ones."""
MAX_SPANS = 30_000
"""Spans of the timeline, the longest ones."""
MAX_WORKERS = 1_024
MAX_EDGES = 120_000
"""Sources of all tasks; a task has at least this many divided by the tasks."""
MAX_OUTPUTS = 500
MAX_FAULTS = 500
MAX_NAMES = 5_000
WORKER_FIELDS = (
    *("items", "skipped", "begin_ns", "end_ns", "work_ns", "dependency_wait_ns", "data_wait_ns"),
    *("ring_wait_ns", "other_ns", "state", "task", "missing"),
)


def megakernel_document(report: MegakernelReport) -> dict[str, Any]:
    """Return what the page's scripts show, as JSON values."""
    shown = min(len(report.tasks), MAX_TASKS)
    return {
        "name": named(report.name),
        "mode": report.mode,
        "device": named(report.device),
        "processed": report.items_processed,
        "remaining": report.items_remaining,
        "why_remaining": remaining_words(report) if report.items_remaining else None,
        "wall_ns": report.wall_time_ns,
        "phases": [
            [word, value]
            for name, word in PHASE_WORDS.items()
            if (value := getattr(report, name)) is not None
        ],
        "shares": worker_shares(report),
        "imbalance": report.imbalance,
        "workers": _workers(report),
        "workers_of": len(report.workers),
        "op_times": [[named(row[0]), *row[1:]] for row in report.op_times[:MAX_NAMES]],
        "ops": [named(name) for name in report.ops[:MAX_NAMES]],
        "bricks": [named(name) for name in report.bricks[:MAX_NAMES]],
        "states": [state.name.lower().replace("_", " ") for state in TaskState],
        "tasks": _tasks(report, shown),
        "tasks_of": len(report.tasks),
        "first": report.first_submission,
        "regions_of": len(report.regions),
        "spans": _spans(report, shown),
        "spans_of": None if report.spans is None else len(report.spans),
        "lineage": _lineage(report, shown),
        "outputs": list(_outputs(report, shown)),
        "outputs_of": len(report.outputs),
        "faults": [
            [
                *(*report.rows_of([fault.task]), fault.item, named(fault.code), named(fault.op)),
                *(named(fault.words, MAX_TEXT), fault.retries),
            ]
            for fault in report.faults[:MAX_FAULTS]
        ],
        "faults_of": len(report.faults),
        "counters": [[name, named(value)] for name, value in counters(report, Look())],
        "notes": lines(notes(report)),
    }


PAGE = PageOf(
    title=lambda report: f"{report.name}, a megakernel on {report.device} · brickline",
    document=megakernel_document,
    scripts=SCRIPTS,
    styles=STYLES,
)
megakernel_page = PAGE.text
write_megakernel_page = PAGE.write


def _workers(report: MegakernelReport) -> dict[str, list[Any]]:
    shown = report.workers[:MAX_WORKERS]
    return {name: [getattr(each, name) for each in shown] for name in WORKER_FIELDS}


def _tasks(report: MegakernelReport, shown: int) -> dict[str, Any]:
    columns = {
        name: packed(values[:shown].astype("i4") if name != "items" else _small(values[:shown]))
        for name, values in report.tasks.columns().items()
        if name != "done"
    }
    if report.tasks.done is not None:
        columns["done"] = packed(_small(report.tasks.done[:shown]))
    if report.spans is None:
        return columns
    spans, count = report.spans, len(report.tasks)
    work, wait = np.zeros(count, np.int64), np.zeros(count, np.int64)
    begin, end = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    np.add.at(work, spans.task, spans.work_ns)
    np.add.at(wait, spans.task, spans.wait_ns)
    np.maximum.at(end, spans.task, spans.end_ns)
    begin[spans.task] = np.iinfo(np.int64).max
    np.minimum.at(begin, spans.task, spans.ready_ns)
    times = {"work": work, "wait": wait, "begin": begin, "end": end}
    return columns | {name: packed(_small(values[:shown])) for name, values in times.items()}


def _small(values: NDArray[np.int64]) -> NDArray[Any]:
    """Return numbers as a page holds them: 32 bits where they fit, else as floats."""
    fits = not len(values) or int(np.abs(values).max()) < 2**31
    return values.astype(np.int32 if fits else np.float64)


def _spans(report: MegakernelReport, tasks: int) -> dict[str, Any] | None:
    spans = report.spans
    if spans is None:
        return None
    kept = np.flatnonzero((spans.task < tasks) & (spans.worker < MAX_WORKERS))
    if len(kept) > MAX_SPANS:
        length = spans.end_ns[kept] - spans.begin_ns[kept]
        kept = np.sort(kept[np.argsort(-length, kind="stable")[:MAX_SPANS]])
    columns = {name: values[kept] for name, values in spans.columns().items()}
    # Lengths are small numbers where times are large.
    columns["wait"] = columns.pop("ready_ns") - columns["begin_ns"]
    columns["length"] = columns.pop("end_ns") - columns["begin_ns"]
    return {name: packed(_small(values)) for name, values in columns.items()}


def _lineage(report: MegakernelReport, shown: int) -> dict[str, Any] | None:
    flow = report.flow
    if flow is None:
        return None
    most = max(8, MAX_EDGES // max(shown, 1))
    sources, begin, given, given_begin = [], [0], [], [0]
    for task in range(shown):
        sources += flow.direct(task)[:most]
        begin.append(len(sources))
        here = flow.given[flow.given_begin[task] : flow.given_begin[task + 1]][:most]
        given += [place for place in here.tolist() if place < MAX_NAMES]
        given_begin.append(len(given))
    columns = {"begin": begin, "sources": sources, "given_begin": given_begin, "given": given}
    document: dict[str, Any] = {
        name: packed(np.array(values, np.int32)) for name, values in columns.items()
    }
    document["counts"] = packed(flow.source_counts[:shown].astype(np.int32))
    document["memory"] = [named(name) for name in flow.memory[:MAX_NAMES]]
    return document


def _outputs(report: MegakernelReport, shown: int) -> Iterator[list[Any]]:
    for name, writers in list(report.outputs.items())[:MAX_OUTPUTS]:
        found = [row for row in report.rows_of(writers) if row < shown][:100]
        if found:
            yield [named(name), found]
