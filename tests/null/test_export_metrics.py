"""Prometheus and OTLP: figures, names and ids, held to the run's profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import export_runs
import numpy as np
import profile_runs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_families import MetricFamily, families_from_bytes

from brickline.export.otlp import requests_of_run
from brickline.export.otlp_spans import SpanRow, spans_of_run
from brickline.export.prometheus import (
    OCTAVES,
    Durations,
    Family,
    exposition_text,
    families_of_profile,
    number_text,
)
from brickline.export.prometheus_protobuf import bucket_spans, exposition_protobuf
from brickline.export.spans import Kind
from brickline.histogram import Histogram
from brickline.profile import Profile, profile_from_run
from brickline.runs import Run


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    path = tmp_path_factory.mktemp("runs") / "rich.brick"
    return profile_from_run(Run.open(profile_runs.rich_run(path, steps=12, layers=3)))


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample as Prometheus' own Python client reads it."""
    parser = pytest.importorskip(
        "prometheus_client.parser", reason="prometheus_client is not installed"
    )
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_text_has_the_figures_of_the_run(rich: Profile) -> None:
    samples = parsed(exposition_text(families_of_profile(rich)))
    row = next(each for each in rich.brick_layers if each.name == "RmsNorm" and each.layer == 1)
    labels = frozenset({("brick", "RmsNorm"), ("category", "Norm"), ("layer", "1")})
    assert samples["brickline_brick_duration_seconds_count", labels] == row.timed
    assert samples["brickline_brick_duration_seconds_sum", labels] == row.total_ns / 1e9
    assert samples["brickline_brick_entries_total", labels] == row.count
    assert samples["brickline_brick_read_bytes_total", labels] == row.total_bytes
    assert samples["brickline_tokens_total", frozenset({("phase", "decode")})] == 12
    assert samples["brickline_run_live", frozenset()] == 0
    assert samples["brickline_run_coverage_ratio", frozenset()] == rich.coverage


@given(st.lists(st.integers(0, 2**40), max_size=40))
def test_classic_buckets_count_what_is_not_longer(durations: list[int]) -> None:
    found = Durations((), Histogram.from_durations(durations), sum(durations))
    for octave, (edge, count) in zip(OCTAVES, found.below(), strict=True):
        assert edge == 2**octave / 1e9
        assert count == sum(each <= 2**octave for each in durations)


@given(st.lists(st.integers(0, 2**40), max_size=40))
def test_native_histograms_hold_every_bucket(durations: list[int]) -> None:
    histogram = Histogram.from_durations(durations)
    family = Family(
        "d", "", "histogram", [], [Durations((), histogram, sum(durations))], native=True
    )
    (read,) = families_from_bytes(exposition_protobuf([family]))
    point = read.metric[0].histogram
    index, counts, total = 0, {}, 0
    deltas = iter(point.positive_delta)
    for span in point.positive_span:
        index += span.offset
        for _ in range(span.length):
            total += next(deltas)
            counts[index - 1] = total  # Prometheus' index names the upper edge
            index += 1
    assert counts == dict(zip(histogram.indices.tolist(), histogram.counts.tolist(), strict=True))
    assert (point.schema, point.zero_count) == (4, durations.count(0))
    assert (point.sample_count, point.sample_sum) == (len(durations), sum(durations))
    lengths = [length for _, length in bucket_spans(histogram)]
    assert sum(lengths) == len(histogram.indices)


def test_protobuf_has_what_text_has_and_native_histograms(rich: Profile) -> None:
    families = families_of_profile(rich)
    read: dict[str, MetricFamily] = {
        each.name: each for each in families_from_bytes(exposition_protobuf(families))
    }
    samples = parsed(exposition_text(families))
    for name, family in read.items():
        for metric in family.metric:
            labels = frozenset((each.name, each.value) for each in metric.label)
            if metric.HasField("counter") or metric.HasField("gauge"):
                value = (metric.counter if metric.HasField("counter") else metric.gauge).value
                assert samples[name, labels] == value
            elif name.endswith("_seconds"):
                assert samples[f"{name}_count", labels] == metric.histogram.sample_count
                assert samples[f"{name}_sum", labels] == metric.histogram.sample_sum
                bucket = metric.histogram.bucket[9]
                edge = ("le", number_text(bucket.upper_bound))
                assert samples[f"{name}_bucket", labels | {edge}] == bucket.cumulative_count
    native = read["brickline_brick_duration_nanoseconds"]
    assert len(native.metric) == len(read["brickline_brick_duration_seconds"].metric)
    assert all(metric.histogram.schema == 4 for metric in native.metric)


def test_label_values_are_escaped(tmp_path: Path) -> None:
    run = profile_runs.hostile_run(tmp_path / "run.brick")
    profile = profile_from_run(Run.open(run))
    families = families_of_profile(profile)
    samples = parsed(exposition_text(families))
    bricks = {dict(labels).get("brick") for _, labels in samples}
    expected = {name.replace("\x00", "\ufffd") for name in profile_runs.HOSTILE}
    assert expected <= bricks
    read = families_from_bytes(exposition_protobuf(families))
    values = {label.value for each in read for metric in each.metric for label in metric.label}
    assert expected <= values


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3.0, "3"), (0.25, "0.25"), (float("inf"), "+Inf"), (float("nan"), "NaN")],
)
def test_numbers_are_spelt_as_the_format_wants(value: float, text: str) -> None:
    assert number_text(value) == text


def test_an_empty_run_has_metrics_of_itself_only(tmp_path: Path) -> None:
    profile = profile_from_run(Run.open(profile_runs.empty_run(tmp_path / "run.brick")))
    names = {family.name for family in families_of_profile(profile)}
    assert "brickline_run_info" in names
    assert not {name for name in names if name.startswith(("brickline_brick", "brickline_step"))}


# OTLP


def otlp(run: Run, limit: int = 10_000) -> tuple[Any, Any]:
    pytest.importorskip("opentelemetry.proto", reason="opentelemetry-proto is not installed")
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    bodies = requests_of_run(run, profile_from_run(run), limit=limit).bodies
    traces, metrics = (b"".join(bodies[signal]) for signal in ("traces", "metrics"))
    return TracesData.FromString(traces), MetricsData.FromString(metrics)


def test_exponential_histograms_are_those_of_the_run(rich: Profile) -> None:
    run = Run.open(rich.parts[0].path.parents[1])
    _, metrics = otlp(run)
    points = {
        tuple(sorted((each.key, _plain(each.value)) for each in point.attributes)): point
        for resource in metrics.resource_metrics
        for metric in resource.scope_metrics[0].metrics
        if metric.name == "brickline.brick.duration" and metric.unit == "ns"
        for point in metric.exponential_histogram.data_points
    }
    assert len(points) == len(rich.brick_layers)
    for row in rich.brick_layers:
        key = {"brickline.brick": row.name, "brickline.category": row.category.label}
        key |= {} if row.layer is None else {"brickline.layer": row.layer}
        point = points[tuple(sorted(key.items()))]
        found = {
            "scale": point.scale,
            "zero_count": point.zero_count,
            "count": point.count,
            "positive": {
                "offset": point.positive.offset,
                "bucket_counts": list(point.positive.bucket_counts),
            },
        }
        assert found == row.histogram.to_otlp()
        assert (point.sum, point.min, point.max) == (row.total_ns, row.min_ns, row.max_ns)
        assert 0 < point.start_time_unix_nano < point.time_unix_nano


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def test_spans_have_the_recorded_times_and_parents(tmp_path: Path) -> None:
    run = Run.open(export_runs.launched_run(tmp_path / "run.brick", steps=3))
    traces, _ = otlp(run)
    (group,) = traces.resource_spans
    spans = {span.span_id: span for span in group.scope_spans[0].spans}
    assert len(spans) == 3 + 6 + 6
    anchor = run.parts[0].header["anchor_unix_ns"] - run.parts[0].header["anchor_ns"]
    kinds = {}
    for span in spans.values():
        said = {each.key: _plain(each.value) for each in span.attributes}
        kinds[span.span_id] = said["brickline.kind"]
        assert span.start_time_unix_nano >= anchor
        if said["brickline.kind"] == "step":
            assert not span.parent_span_id
            continue
        parent = spans[span.parent_span_id]
        assert parent.trace_id == span.trace_id
        above = {each.key: _plain(each.value) for each in parent.attributes}
        assert above["brickline.step"] == said["brickline.step"]
    assert len({span.trace_id for span in spans.values()}) == 3
    assert sorted(kinds.values()) == ["brick"] * 6 + ["launch"] * 6 + ["step"] * 3


def rows(run: Run, limit: int = 10_000) -> list[SpanRow]:
    return [row for part in spans_of_run(run, limit) for row in part.rows]


def test_ids_follow_from_the_run(tmp_path: Path) -> None:
    first, other = (
        Run.open(export_runs.launched_run(tmp_path / name)) for name in ("a.brick", "b.brick")
    )
    ids = [row.span_id for row in rows(first)]
    assert ids == [row.span_id for row in rows(Run.open(first.path))]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & {row.span_id for row in rows(other)}
    assert all(len(row.span_id) == 8 and len(row.trace_id) == 16 for row in rows(first))


def test_a_limit_keeps_steps_and_the_newest_and_says_the_rest(tmp_path: Path) -> None:
    run = Run.open(export_runs.launched_run(tmp_path / "run.brick", steps=4))
    (found,) = spans_of_run(run, 6)
    assert [row.kind for row in found.rows].count(Kind.STEP) == 4
    assert found.left_out == 4 + 8 + 8 - 6
    newest = [row for row in found.rows if row.kind is Kind.BRICK]
    assert {row.step for row in newest} == {4}
    kept = {row.span_id for row in found.rows}
    assert all(row.parent_id in kept for row in newest)
    assert rows(run, 0) == []


def test_a_launch_lies_inside_the_one_it_names(tmp_path: Path) -> None:
    from brickline import BrickProfiler

    with BrickProfiler(
        "nested", enabled=True, device="NULL", path=tmp_path / "r.brick"
    ) as profiler:
        outer, inner, lost = (profiler.traces.reserve() for _ in range(3))
        write = profiler.traces.write
        write(inner, name="inner", parent=outer, enqueue_ns=50, start_ns=50, end_ns=60)
        write(outer, name="outer", enqueue_ns=0, start_ns=0, end_ns=20)
        write(lost, name="lost", parent=999, enqueue_ns=70, start_ns=70, end_ns=80)
    found = {row.name: row for row in rows(Run.open(tmp_path / "r.brick"))}
    assert found["inner"].parent_id == found["outer"].span_id
    assert found["inner"].trace_id == found["outer"].trace_id
    assert found["lost"].parent_id == b""


def test_launches_inside_each_other_do_not_hang(tmp_path: Path) -> None:
    from brickline import BrickProfiler

    with BrickProfiler(
        "circle", enabled=True, device="NULL", path=tmp_path / "r.brick"
    ) as profiler:
        one, two = profiler.traces.reserve(), profiler.traces.reserve()
        write = profiler.traces.write
        write(one, name="one", parent=two, enqueue_ns=0, start_ns=0, end_ns=10)
        write(two, name="two", parent=one, enqueue_ns=20, start_ns=20, end_ns=30)
    assert len(rows(Run.open(tmp_path / "r.brick"))) == 2
    assert len(rows(Run.open(tmp_path / "r.brick"), 1)) == 1


def test_hostile_names_come_through(tmp_path: Path) -> None:
    traces, _ = otlp(Run.open(profile_runs.hostile_run(tmp_path / "run.brick")))
    names = {span.name for each in traces.resource_spans for span in each.scope_spans[0].spans}
    assert set(profile_runs.HOSTILE) <= names


def test_an_empty_run_has_no_spans_and_no_points(tmp_path: Path) -> None:
    traces, metrics = otlp(Run.open(profile_runs.empty_run(tmp_path / "run.brick")))
    assert not traces.resource_spans
    assert not metrics.resource_metrics


def test_sampled_entries_are_counted_apart(tmp_path: Path) -> None:
    profile = profile_from_run(Run.open(profile_runs.sampled_run(tmp_path / "run.brick")))
    samples = parsed(exposition_text(families_of_profile(profile)))
    labels = frozenset({("brick", "LmHead"), ("category", "Other"), ("layer", "")})
    assert samples["brickline_brick_entries_total", labels] == 40
    assert samples["brickline_brick_duration_seconds_count", labels] == 10
    assert np.isclose(samples["brickline_brick_duration_seconds_sum", labels], 10 * 10_000 / 1e9)
