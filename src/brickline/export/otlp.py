"""A run as OTLP: spans with the times that were recorded, and exact exponential histograms.

Owns the messages, made with opentelemetry-proto (extra ``otel``), and how they are cut into
requests; `otlp_spans` owns which spans there are, `otlp_http` how requests are sent. Durations are
histograms in nanoseconds: base 2 and scale 4 have the edges of the run's own buckets there, so
every count is exact. A file is the requests of one kind one after the other, which protobuf reads
as one message with all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from brickline.errors import ExportError, UsageError
from brickline.export.otlp_http import quoted_words
from brickline.export.otlp_spans import PartSpans, SpanRow, spans_of_run
from brickline.profile import Profile
from brickline.runs import Part, Run
from brickline.stats import BrickStats

SPANS_AT_ONCE = 2_000
"""Spans of one request, well below the 4 MiB that receivers take."""
MAX_INT = 2**63 - 1
"""The largest integer of OTLP; only a damaged run has larger ones."""
POINTS_AT_ONCE = 500
"""Histograms of one request."""


@dataclass(frozen=True)
class Requests:
    """What is sent: serialised requests by signal, ``traces`` and ``metrics``."""

    bodies: Mapping[str, list[bytes]]
    spans: int
    left_out: int
    untimed: int
    histograms: int
    """Points of metrics."""
    points_are: str = "histograms"
    """What the points are called."""
    summaries: int = 0
    """Spans that stand for all entries of a brick."""


def requests_of_run(run: Run, profile: Profile, *, limit: int) -> Requests:
    """Return a run as requests of OTLP.

    Args:
        run: its spans are sent.
        profile: of the same run; its histograms are sent.
        limit: spans in all, steps and the newest first.

    Raises:
        UsageError: if opentelemetry-proto is not installed.
    """
    proto = Proto()
    spans = list(spans_of_run(run, limit))
    points = sum(bool(row.timed) for row in profile.brick_layers)
    points += sum(bool(step.stats.timed) for step in profile.steps.values())
    return Requests(
        bodies={
            "traces": [body for part in spans for body in _span_bodies(proto, run, part)],
            "metrics": list(_metric_bodies(proto, run, profile)),
        },
        spans=sum(len(part.rows) for part in spans),
        left_out=sum(part.left_out for part in spans),
        untimed=sum(part.untimed for part in spans),
        summaries=sum(row.entries > 0 for part in spans for row in part.rows),
        histograms=points,
    )


def refusals(answers: Iterable[tuple[str, bytes]]) -> list[str]:
    """Return in words what a receiver took the request for, but not all that was in it.

    Raises:
        ExportError: if an answer is none of OTLP's, so that nobody may have taken anything.
    """
    proto = Proto()
    said = []
    for signal, body in answers:
        part = proto.answer(signal, body)
        words = part.error_message
        refused = part.rejected_spans if signal == "traces" else part.rejected_data_points
        if refused or words:
            what = "spans" if signal == "traces" else "data points"
            said.append(f"{refused} {what} refused" + (f": {words}" if words else ""))
    return said


class Proto:
    """The messages that are used, imported when something is exported."""

    def __init__(self) -> None:
        try:
            from google.protobuf import json_format, message
            from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
            from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
            from opentelemetry.proto.common.v1 import common_pb2
            from opentelemetry.proto.metrics.v1 import metrics_pb2
            from opentelemetry.proto.resource.v1 import resource_pb2
            from opentelemetry.proto.trace.v1 import trace_pb2
        except ImportError as error:
            raise UsageError(
                "OTLP needs opentelemetry-proto, which is not installed: "
                "pip install 'brickline[otel]'"
            ) from error
        self.json: Any = json_format
        self.refused_bytes: tuple[type[Exception], ...] = (
            message.DecodeError,
            json_format.ParseError,
        )
        self.common: Any = common_pb2
        self.resource: Any = resource_pb2
        self.trace: Any = trace_pb2
        self.metrics: Any = metrics_pb2
        self.trace_service: Any = trace_service_pb2
        self.metrics_service: Any = metrics_service_pb2

    def attributes(self, values: Mapping[str, Any]) -> list[Any]:
        """Return attributes; those that are None are left out."""
        return [
            self.common.KeyValue(key=key, value=self._value(value))
            for key, value in values.items()
            if value is not None
        ]

    def _value(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            values = [self._value(each) for each in value]
            return self.common.AnyValue(array_value=self.common.ArrayValue(values=values))
        if isinstance(value, float):
            return self.common.AnyValue(double_value=value)
        if isinstance(value, int) and abs(value) <= MAX_INT:
            return self.common.AnyValue(int_value=value)
        return self.common.AnyValue(string_value=readable(str(value)))

    def answer(self, signal: str, body: bytes) -> Any:
        """Return what an answer says was not taken: protobuf, as OTLP asks for, or its JSON.

        Any text can be read as protobuf that nobody knows, so one must say what OTLP can say.
        """
        service = self.trace_service if signal == "traces" else self.metrics_service
        kind = (
            "ExportTraceServiceResponse" if signal == "traces" else "ExportMetricsServiceResponse"
        )
        found = getattr(service, kind)()
        try:
            if body.startswith(b"{"):
                self.json.Parse(body, found)
            else:
                found.ParseFromString(body)
                if body and not found.HasField("partial_success"):
                    raise self.refused_bytes[0]
        except self.refused_bytes:
            raise ExportError(
                f"expected {kind} as the answer, got{quoted_words(body) or ': something else'}; is "
                "an OTLP/HTTP receiver there? Its usual port is 4318"
            ) from None
        return found.partial_success

    @property
    def scope(self) -> Any:
        """Who says all of it."""
        return self.common.InstrumentationScope(name="brickline")

    def spans_request(self, resource: Any, spans: list[Any]) -> bytes:
        """Return a request with spans."""
        scoped = self.trace.ScopeSpans(scope=self.scope, spans=spans)
        group = self.trace.ResourceSpans(resource=resource, scope_spans=[scoped])
        request = self.trace_service.ExportTraceServiceRequest(resource_spans=[group])
        return bytes(request.SerializeToString(deterministic=True))

    def metrics_request(self, resource: Any, metrics: list[Any]) -> bytes:
        """Return a request with metrics."""
        scoped = self.metrics.ScopeMetrics(scope=self.scope, metrics=metrics)
        group = self.metrics.ResourceMetrics(resource=resource, scope_metrics=[scoped])
        request = self.metrics_service.ExportMetricsServiceRequest(resource_metrics=[group])
        return bytes(request.SerializeToString(deterministic=True))


def _resource(proto: Proto, run: Run, part: Part | None) -> Any:
    values: dict[str, Any] = {
        "service.name": run.name,
        "brickline.run.id": run.manifest["id"],
        "host.name": run.circumstances.get("hostname"),
    }
    if part is not None:
        values |= {"process.pid": part.process, "brickline.rank": part.rank}
    return proto.resource.Resource(attributes=proto.attributes(values))


# Spans


def _span_bodies(proto: Proto, run: Run, part: PartSpans) -> Iterator[bytes]:
    resource = _resource(proto, run, part.part)
    for batch in batches(part.rows, SPANS_AT_ONCE):
        yield proto.spans_request(resource, [_span(proto, row) for row in batch])


def _span(proto: Proto, row: SpanRow) -> Any:
    on_device = row.place.device >= 0
    values = {
        "brickline.kind": row.kind.name.lower(),
        "brickline.category": row.category,
        "brickline.phase": row.phase or None,
        "brickline.step": row.step or None,
        "brickline.layer": None if row.layer < 0 else row.layer,
        "brickline.elements": row.elements or None,
        "brickline.trace": row.launch or None,
        "brickline.entries": row.entries or None,
        "brickline.total_ns": row.total_ns if row.entries else None,
        "brickline.device": f"CUDA:{row.place.device}" if on_device else None,
        "brickline.stream": f"{row.place.number:#x}" if on_device else None,
        "thread.id": None if on_device else row.place.number,
    }
    return proto.trace.Span(
        trace_id=row.trace_id,
        span_id=row.span_id,
        parent_span_id=row.parent_id,
        name=readable(row.name),
        kind=proto.trace.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=row.start_ns,
        end_time_unix_nano=row.end_ns,
        attributes=proto.attributes(values),
    )


# Metrics


def _metric_bodies(proto: Proto, run: Run, profile: Profile) -> Iterator[bytes]:
    resource = _resource(proto, run, None)
    for name, unit, points in _metrics(proto, run, profile):
        for batch in batches(points, POINTS_AT_ONCE):
            cumulative = proto.metrics.AGGREGATION_TEMPORALITY_CUMULATIVE
            shared = {"data_points": batch, "aggregation_temporality": cumulative}
            if unit == "ns":
                data = {"exponential_histogram": proto.metrics.ExponentialHistogram(**shared)}
            else:
                data = {"sum": proto.metrics.Sum(**shared, is_monotonic=True)}
            metric = proto.metrics.Metric(name=name, unit=unit, **data)
            yield proto.metrics_request(resource, [metric])


def _metrics(proto: Proto, run: Run, profile: Profile) -> Iterator[tuple[str, str, list[Any]]]:
    """Return name, unit and points of every metric."""
    times = _run_times(run)
    bricks = [(proto.attributes(_brick_values(row)), row) for row in profile.brick_layers]
    steps = [
        (proto.attributes({"brickline.phase": step.phase}), step.stats)
        for step in profile.steps.values()
    ]
    for what, elements, rows in (("brick", "element", bricks), ("step", "token", steps)):
        yield (
            f"brickline.{what}.duration",
            "ns",
            [_histogram_point(proto, row, found, times) for found, row in rows if row.timed],
        )
        for column, name, unit in (
            ("count", "entries", "{entry}"),
            ("total_elements", f"{elements}s", f"{{{elements}}}"),
        ):
            points = [
                proto.metrics.NumberDataPoint(
                    attributes=found, as_int=min(getattr(row, column), MAX_INT), **times
                )
                for found, row in rows
            ]
            yield f"brickline.{what}.{name}", unit, points


def _histogram_point(
    proto: Proto, row: BrickStats, attributes: list[Any], times: dict[str, int]
) -> Any:
    found = row.histogram.to_otlp()
    return proto.metrics.ExponentialHistogramDataPoint(
        attributes=attributes,
        count=found["count"],
        sum=float(row.total_ns),
        scale=found["scale"],
        zero_count=found["zero_count"],
        positive=proto.metrics.ExponentialHistogramDataPoint.Buckets(**found["positive"]),
        min=float(row.min_ns),
        max=float(row.max_ns),
        **times,
    )


def _brick_values(row: BrickStats) -> dict[str, Any]:
    return {
        "brickline.brick": row.name,
        "brickline.category": row.category.label,
        "brickline.layer": row.layer,
    }


def _run_times(run: Run) -> dict[str, int]:
    """Return when the figures begin and end; a live run, or one that was killed, ends now."""
    start = _unix_ns(run.manifest.get("created")) or 0
    end = _unix_ns(run.manifest.get("ended")) or int(datetime.now(UTC).timestamp() * 1e9)
    return {"start_time_unix_nano": start, "time_unix_nano": max(start, end)}


def _unix_ns(text: Any) -> int | None:
    try:
        moment = datetime.fromisoformat(str(text)) - datetime(1970, 1, 1, tzinfo=UTC)
    except (TypeError, ValueError):
        return None
    return (moment.days * 86_400 + moment.seconds) * 10**9 + moment.microseconds * 1000


def batches(rows: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Return rows in lists of at most so many."""
    all_rows = list(rows)
    for first in range(0, len(all_rows), size):
        yield all_rows[first : first + size]


def readable(text: str) -> str:
    """Return text that UTF-8 can hold; a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
