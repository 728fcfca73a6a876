"""A megakernel's report as OTLP: a span for the run and each region, linked to where it came from.

Owns which spans there are and what they say; `otlp` owns messages and requests. A region's span
links to the spans of the regions whose values it read, and names in attributes all ops, bricks and
given memory that contributed to it, so that a tracing system answers "what made this?". Figures are
gauges, the same as Prometheus gets. Ids follow from the report's id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from brickline.errors import ExportError
from brickline.export.megakernel_metrics import families_of_megakernel
from brickline.export.otlp import (
    MAX_INT,
    POINTS_AT_ONCE,
    SPANS_AT_ONCE,
    Proto,
    Requests,
    batches,
    readable,
)
from brickline.megakernel_flow import Flow
from brickline.megakernel_report import PHASES, MegakernelReport
from brickline.megakernel_tables import Column

MAX_NAMES = 128
"""Sources that a span names; how many there are is said."""
MAX_LINKS = 32
"""Regions that a span links to; how many it read from is said. Receivers take 128 by default."""
MAX_EVENTS = 128
"""Faults that are events."""


def requests_of_megakernel(report: MegakernelReport, *, limit: int) -> Requests:
    """Return a report as requests of OTLP.

    Args:
        report: What to send.
        limit: Spans in all: that of the run, and of the latest regions.

    Raises:
        UsageError: opentelemetry-proto is not installed.
        ExportError: The report does not say when the run was.
    """
    if report.began_unix_ns is None:
        raise ExportError(
            f"the report of {report.name} does not say when it ran, and a span needs that; export "
            "it with --to prometheus or --to json"
        )
    proto = Proto()
    shown, hidden, untimed = _shown(report, max(limit - 1, 0))
    spans = [_run_span(proto, report), *_region_spans(proto, report, shown)][: max(limit, 0)]
    resource = _resource(proto, report)
    metrics, points = _metrics(proto, report, resource)
    return Requests(
        bodies={
            "traces": [
                proto.spans_request(resource, each) for each in batches(spans, SPANS_AT_ONCE)
            ],
            "metrics": metrics,
        },
        spans=len(spans),
        left_out=hidden,
        untimed=untimed,
        histograms=points,
        points_are="gauges",
    )


def _resource(proto: Proto, report: MegakernelReport) -> Any:
    values = {
        "service.name": report.name,
        "brickline.megakernel.id": report.id,
        "brickline.device": report.device,
    }
    return proto.resource.Resource(attributes=proto.attributes(values))


# --- spans ----------------------------------------------------------------------------------------


def _shown(report: MegakernelReport, limit: int) -> tuple[Column, int, int]:
    """Return the places of regions that get a span, how many more ran, and how many did not."""
    regions = report.regions
    if regions.begin_ns is None or regions.end_ns is None:
        return np.empty(0, np.int64), 0, len(regions)
    ran = np.flatnonzero(regions.end_ns >= 0)
    order = ran[np.argsort(regions.begin_ns[ran], kind="stable")]
    shown = order[max(len(order) - limit, 0) :]
    return shown, len(ran) - len(shown), len(regions) - len(ran)


def _run_span(proto: Proto, report: MegakernelReport) -> Any:
    ends = [worker.end_ns for worker in report.workers if worker.end_ns is not None]
    length = max(ends, default=report.backend_dispatch_ns or report.wall_time_ns)
    began = report.began_unix_ns or 0
    values: dict[str, Any] = {
        "brickline.kind": "megakernel",
        "brickline.megakernel.mode": report.mode,
        "brickline.megakernel.items_processed": report.items_processed,
        "brickline.megakernel.items_remaining": report.items_remaining,
        "brickline.megakernel.items_deduped": report.deduped_items,
        "brickline.megakernel.workers": len(report.workers),
        "brickline.megakernel.imbalance": report.imbalance,
    }
    values |= {f"brickline.megakernel.{name}": getattr(report, name) for name in PHASES}
    for name, value in report.telemetry.known().items():
        values[f"brickline.megakernel.{name}"] = int(value) if isinstance(value, bool) else value
    events = [
        proto.trace.Span.Event(
            time_unix_nano=began + length,
            name="fault",
            attributes=proto.attributes(
                {
                    "brickline.megakernel.task": fault.task,
                    "brickline.megakernel.item": fault.item,
                    "brickline.megakernel.op": fault.op,
                    "error.type": fault.code,
                    "exception.message": fault.words or None,
                }
            ),
        )
        for fault in report.faults[:MAX_EVENTS]
    ]
    code = proto.trace.Status.STATUS_CODE_ERROR if report.faults else 0
    return proto.trace.Span(
        trace_id=_trace_id(report),
        span_id=_run_id(report),
        name=readable(report.name),
        kind=proto.trace.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=began,
        end_time_unix_nano=began + length,
        attributes=proto.attributes(values),
        events=events,
        status=proto.trace.Status(code=code),
    )


def _region_spans(proto: Proto, report: MegakernelReport, shown: Column) -> Iterator[Any]:
    if not len(shown):
        return
    regions = report.regions
    assert regions.begin_ns is not None
    assert regions.end_ns is not None
    assert regions.work_ns is not None
    assert regions.wait_ns is not None
    members = _members(report)
    sources = None if report.flow is None else _Sources(report, report.flow)
    began, trace_id, run_id = report.began_unix_ns or 0, _trace_id(report), _run_id(report)
    for place in shown.tolist():
        number, tasks = int(regions.number[place]), members[place]
        kinds = _kinds(report, tasks)
        values: dict[str, Any] = {
            "brickline.kind": "region",
            "brickline.megakernel.region": number,
            "brickline.megakernel.tasks": tasks[:MAX_NAMES],
            "brickline.megakernel.items": int(regions.items[place]),
            "brickline.megakernel.work_ns": int(regions.work_ns[place]),
            "brickline.megakernel.wait_ns": int(regions.wait_ns[place]),
            "brickline.megakernel.ops": list(dict.fromkeys(op for op, _, _ in kinds)),
            "brickline.brick": next((brick for _, brick, _ in kinds if brick), None),
            "brickline.layer": next((layer for _, _, layer in kinds if layer is not None), None),
        }
        links: list[Any] = []
        if sources is not None:
            read = sources.direct_regions(tasks)
            values |= sources.attributes(tasks)
            values["brickline.megakernel.regions_read"] = len(read)
            links = [
                proto.trace.Span.Link(trace_id=trace_id, span_id=_region_id(report.id, other))
                for other in read[:MAX_LINKS]
            ]
        yield proto.trace.Span(
            trace_id=trace_id,
            span_id=_region_id(report.id, number),
            parent_span_id=run_id,
            name=readable(" + ".join(values["brickline.megakernel.ops"])[:400]),
            kind=proto.trace.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=began + int(regions.begin_ns[place]),
            end_time_unix_nano=began + int(regions.end_ns[place]),
            attributes=proto.attributes(values),
            links=links,
        )


def _members(report: MegakernelReport) -> list[list[int]]:
    """Return the tasks of each region, by its place."""
    order = np.argsort(report.tasks.region, kind="stable")
    ends = np.cumsum(report.regions.tasks)
    return [each.tolist() for each in np.split(order, ends[:-1])]


def _kinds(
    report: MegakernelReport, tasks: Sequence[int]
) -> list[tuple[str, str | None, int | None]]:
    rows = report.tasks
    found = dict.fromkeys(
        zip(
            rows.op[tasks].tolist(),
            rows.brick[tasks].tolist(),
            rows.layer[tasks].tolist(),
            strict=True,
        )
    )
    return [
        (
            report.ops[op],
            report.bricks[brick] if brick >= 0 else None,
            layer if layer >= 0 else None,
        )
        for op, brick, layer in found
    ]


class _Sources:
    """What contributed to each task, by kind: one pass over all tasks, in order.

    A set of kinds (op, brick, layer) or of given memory is an integer with a bit for each.
    """

    def __init__(self, report: MegakernelReport, flow: Flow) -> None:
        self._flow = flow
        self._region = report.tasks.region
        rows = report.tasks
        keys = np.stack([rows.op, rows.brick, rows.layer], axis=1)
        kinds, kind = np.unique(keys, axis=0, return_inverse=True)
        self._names = [
            ", ".join(
                [report.ops[op]]
                + ([report.bricks[brick]] if brick >= 0 else [])
                + ([f"layer {layer}"] if layer >= 0 else [])
            )
            for op, brick, layer in kinds.tolist()
        ]
        self._kinds: list[int] = []
        self._given: list[int] = []
        lists: dict[int, tuple[int, int]] = {}
        given_begin, given = flow.given_begin.tolist(), flow.given.tolist()
        which = flow.lists.tolist()
        for task, own in enumerate(np.ravel(kind).tolist()):
            if which[task] not in lists:
                lists[which[task]] = self._union(flow.direct(task))
            kinds_before, memory = lists[which[task]]
            for place in given[given_begin[task] : given_begin[task + 1]]:
                memory |= 1 << place
            self._kinds.append(kinds_before | 1 << own)
            self._given.append(memory)

    def _union(self, tasks: Sequence[int]) -> tuple[int, int]:
        kinds = memory = 0
        for task in tasks:
            kinds |= self._kinds[task]
            memory |= self._given[task]
        return kinds, memory

    def attributes(self, tasks: Sequence[int]) -> dict[str, Any]:
        """Return what names the sources of some tasks."""
        kinds, memory = self._union(tasks)
        return {
            "brickline.megakernel.sources": _picked(self._names, kinds),
            "brickline.megakernel.source_count": kinds.bit_count(),
            "brickline.megakernel.given": _picked(self._flow.memory, memory),
        }

    def direct_regions(self, tasks: Sequence[int]) -> list[int]:
        """Return the other regions whose values some tasks read."""
        mine = set(self._region[tasks].tolist())
        found = dict.fromkeys(
            region for task in tasks for region in self._region[self._flow.direct(task)].tolist()
        )
        return [region for region in found if region not in mine]


def _picked(names: Sequence[str], bits: int) -> list[str]:
    found: list[str] = []
    while bits and len(found) < MAX_NAMES:
        lowest = bits & -bits
        found.append(names[lowest.bit_length() - 1])
        bits ^= lowest
    return found


# --- metrics --------------------------------------------------------------------------------------


def _metrics(proto: Proto, report: MegakernelReport, resource: Any) -> tuple[list[bytes], int]:
    run_ns = report.backend_dispatch_ns or report.wall_time_ns  # that may hold earlier planning
    moment = (report.began_unix_ns or 0) + run_ns
    bodies, count = [], 0
    for family in families_of_megakernel(report):
        points = [
            proto.metrics.NumberDataPoint(
                attributes=proto.attributes(dict(sample.labels)),
                time_unix_nano=min(moment, MAX_INT),
                as_double=float(sample.value),
            )
            for sample in family.samples
        ]
        count += len(points)
        for batch in batches(points, POINTS_AT_ONCE):
            metric = proto.metrics.Metric(
                name=family.name.replace("_", ".", 2),
                description=family.help,
                gauge=proto.metrics.Gauge(data_points=batch),
            )
            bodies.append(proto.metrics_request(resource, [metric]))
    return bodies, count


def _trace_id(report: MegakernelReport) -> bytes:
    return _id(16, report.id, "trace")


def _run_id(report: MegakernelReport) -> bytes:
    return _id(8, report.id, "run")


@lru_cache(1 << 16)
def _region_id(report_id: str, region: int) -> bytes:
    return _id(8, report_id, "region", region)


def _id(size: int, *what: object) -> bytes:
    """Return bytes that follow from what they name; never all zero, which means none."""
    digest = hashlib.blake2b(repr(what).encode("utf-8", "replace"), digest_size=size).digest()
    return digest if any(digest) else b"\x01" * size
