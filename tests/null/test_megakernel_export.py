"""A megakernel's report for Prometheus and OpenTelemetry: every figure, and what made an output."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import export_runs
import pytest
from hand_made_megakernels import BEGAN_UNIX_NS, decoder_report, faulted_rows, queue_report
from hand_made_reports import EVIL
from metric_families import families_from_bytes
from typer.testing import CliRunner

from brickline.commands import app
from brickline.errors import ExportError, UsageError
from brickline.export.megakernel_metrics import families_of_megakernel, sources_of
from brickline.export.megakernel_otlp import requests_of_megakernel
from brickline.export.megakernel_perfetto import write_megakernel_perfetto
from brickline.export.prometheus import exposition_text
from brickline.export.prometheus_protobuf import exposition_protobuf
from brickline.megakernel_flow import Flow
from brickline.megakernel_report import MegakernelReport

pytest.importorskip("opentelemetry.proto", reason="opentelemetry-proto is not installed")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families


def samples(report: MegakernelReport) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of the text, as Prometheus' own parser reads it."""
    text = exposition_text(families_of_megakernel(report))
    return {
        (
            sample.name.removeprefix("brickline_megakernel_"),
            frozenset(sample.labels.items()),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Any, name: str, **labels: str) -> float:
    return float(found[name, frozenset(labels.items())])


def test_prometheus_has_every_figure() -> None:
    found = samples(decoder_report())
    assert value(found, "items", state="processed") == 42
    assert value(found, "items", state="deduped") == 0
    assert value(found, "wall_seconds") == 60e-6
    assert value(found, "phase_seconds", phase="plan") == 9e-6
    assert value(found, "phase_seconds", phase="dispatch") == 40e-6
    assert value(found, "phase_seconds", phase="lineage") == 3e-6
    assert value(found, "worker_seconds", worker="1", kind="dependency_wait") == 990e-9
    assert value(found, "op_seconds", op="gemv") == 8e-6
    assert value(found, "uploaded_bytes") == 4096
    assert value(found, "moved_bytes") == 5120
    assert value(found, "peak_memory_bytes") == 1 << 20
    assert value(found, "compiled_cache_hit") == 1
    assert value(found, "occupancy_ratio") == decoder_report().telemetry.occupancy_bps / 10_000
    assert value(found, "imbalance_ratio") == pytest.approx(6000 / 5250)
    (info,) = [dict(labels) for name, labels in found if name == "info"]
    assert (info["topology"], info["execution_mode"]) == ("dense", "threads")
    for name, _ in found:
        assert re.fullmatch(r"[a-z_]+", name)
    assert not [labels for name, labels in found if name == "resident_cache_hit"]  # not measured


def test_prometheus_attributes_outputs_to_their_sources() -> None:
    found = samples(decoder_report())
    labels = {"output": "cache", "op": "gemv", "brick": "QkvProjection"}
    assert value(found, "output_source_items", **labels, layer="0") == 8
    assert value(found, "output_source_items", **labels, layer="1") == 8
    # What comes after the cache is written contributes to the logits alone.
    late = {"op": "silu_gate", "brick": "Mlp", "layer": "1"}
    assert value(found, "output_source_items", output="logits", **late) == 8
    assert ("output_source_items", frozenset({"output": "cache", **late}.items())) not in found
    assert value(found, "output_given", output="cache", memory="w") == 1
    assert not [name for name, _ in samples(decoder_report(flow=None)) if "source" in name]
    assert [source.items for source in sources_of(decoder_report(), (1,))] == [8, 1]


def test_faults_are_counted_by_op_and_code() -> None:
    assert value(samples(queue_report()), "faults", op="add", code="MK503") == 1
    assert value(samples(queue_report()), "items", state="skipped") == 3


def test_hostile_names_stay_labels() -> None:
    report = decoder_report(ops=(EVIL, "a\nb", 'c"d', "e\\f"), outputs={EVIL: (7,)})
    found = samples(report)
    assert value(found, "op_items", op="a\nb") == 16
    assert len(families_from_bytes(exposition_protobuf(families_of_megakernel(report)))) > 10


# ------------------------------------------------------------------------------------------- OTLP


def spans_of(report: MegakernelReport, limit: int = 1000) -> list[Any]:
    bodies = requests_of_megakernel(report, limit=limit).bodies["traces"]
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    return [
        span
        for request in requests
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, kind)


def said(span: Any) -> dict[str, Any]:
    return {
        each.key.removeprefix("brickline.megakernel."): plain(each.value)
        for each in span.attributes
    }


def test_a_span_for_the_run_and_each_region() -> None:
    root, *regions = spans_of(decoder_report())
    assert root.name == "decode"
    assert root.start_time_unix_nano == BEGAN_UNIX_NS
    assert root.end_time_unix_nano == BEGAN_UNIX_NS + 6000
    assert said(root)["items_processed"] == 42
    assert said(root)["queue_plan_ns"] == 9000
    assert [span.name for span in regions] == ["rms_norm + gemv", "attention + silu_gate"] * 2
    assert {span.parent_span_id for span in regions} == {root.span_id}
    assert len({span.span_id for span in regions}) == 4
    second = regions[1]
    assert second.start_time_unix_nano == BEGAN_UNIX_NS + 1500
    assert second.end_time_unix_nano == BEGAN_UNIX_NS + 3000
    assert said(second)["work_ns"] == 6000
    assert said(second)["brickline.layer"] == 0


def test_spans_name_and_link_their_sources() -> None:
    _, *regions = spans_of(decoder_report())
    assert said(regions[0])["sources"] == [
        "rms_norm, RmsNorm, layer 0",
        "gemv, QkvProjection, layer 0",
    ]
    assert said(regions[0])["given"] == ["x", "w"]
    assert said(regions[3])["source_count"] == 8
    assert [link.span_id for link in regions[2].links] == [regions[1].span_id]
    assert not regions[0].links
    without = spans_of(decoder_report(flow=None))
    assert "sources" not in said(without[1])


def test_a_fault_is_an_event_and_an_error() -> None:
    root = spans_of(decoder_report(faults=faulted_rows(), fault_words={7: "past the end"}))[0]
    assert root.status.code == 2
    (event,) = root.events
    found = said(event)
    assert (found["task"], found["item"], found["op"]) == (5, 3, "gemv")
    assert (found["error.type"], found["exception.message"]) == ("7", "past the end")


def test_ids_follow_from_the_report() -> None:
    report = decoder_report()
    again = MegakernelReport.from_json(report.to_json())
    assert (
        requests_of_megakernel(report, limit=9).bodies
        == requests_of_megakernel(again, limit=9).bodies
    )
    other = spans_of(decoder_report())[0]
    assert other.trace_id != spans_of(report)[0].trace_id


def test_more_regions_than_asked_for_are_counted() -> None:
    found = requests_of_megakernel(decoder_report(), limit=3)
    assert (found.spans, found.left_out, found.untimed) == (3, 2, 0)
    assert [span.name for span in spans_of(decoder_report(), 3)][1:] == [
        "rms_norm + gemv",
        "attention + silu_gate",
    ]
    assert requests_of_megakernel(decoder_report(records=None), limit=9).untimed == 4
    assert requests_of_megakernel(decoder_report(), limit=0).spans == 0


def test_otlp_metrics_are_those_of_prometheus() -> None:
    report = decoder_report()
    found = requests_of_megakernel(report, limit=9)
    metrics = {
        metric.name: metric.gauge.data_points
        for body in found.bodies["metrics"]
        for group in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for metric in group.scope_metrics[0].metrics
    }
    assert (
        sum(len(points) for points in metrics.values()) == len(samples(report)) == found.histograms
    )
    assert metrics["brickline.megakernel.wall_seconds"][0].as_double == 60e-6


def test_long_graphs_are_sent_in_time() -> None:
    """A chain of thousands of regions: sets of sources are found in one pass."""
    count = 5000
    report = MegakernelReport.of_queue(
        name="long",
        device="CPU",
        ops=["a", "b"],
        tasks={"op": [at % 2 for at in range(count)], "items": [1] * count},
        workers=decoder_report().workers,
        items_processed=count,
        items_remaining=0,
        wall_time_ns=1,
        began_unix_ns=BEGAN_UNIX_NS,
        spans={
            "worker": [0] * count,
            "task": list(range(count)),
            **{name: list(range(count)) for name in ("begin_ns", "ready_ns", "end_ns")},
            "items": [1] * count,
        },
        flow=Flow([0, *range(count)], list(range(count - 1))),
    )
    spans = spans_of(report, 10_000)
    assert len(spans) == count + 1
    assert said(spans[-1])["sources"] == ["a", "b"]


def test_without_a_time_there_are_no_spans() -> None:
    with pytest.raises(ExportError, match="does not say when it ran"):
        requests_of_megakernel(queue_report(), limit=9)


# --------------------------------------------------------------------------------------- commands


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return decoder_report().save(tmp_path / "decode.megakernel.json")


def export(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_the_command_writes_every_form(saved: Path) -> None:
    text = export(saved, "--to", "prometheus")
    assert text.exit_code == 0, text.output
    assert 'brickline_megakernel_items{state="processed"} 42' in text.stdout
    assert export(saved, "--to", "json").stdout == saved.read_text(encoding="ascii")
    written = export(saved, "--to", "otlp")
    assert written.exit_code == 0, written.output
    assert "5 spans" in written.stderr
    assert "gauges" in written.stderr
    data = (saved.parent / "decode.otlp.traces.pb").read_bytes()
    request = ExportTraceServiceRequest.FromString(data)
    assert len(request.resource_spans[0].scope_spans[0].spans) == 5
    again = export(saved, "--to", "otlp")
    assert isinstance(again.exception, UsageError)
    assert export(saved, "--to", "otlp", "--force").exit_code == 0


@pytest.mark.parametrize("form", ["dot", "csv"])
def test_other_forms_are_refused(saved: Path, form: str) -> None:
    refused = export(saved, "--to", form)
    assert isinstance(refused.exception, UsageError)
    assert "perfetto, otlp, prometheus or json" in str(refused.exception)


# --------------------------------------------------------------------------------------- Perfetto


def test_perfetto_has_a_track_for_each_worker() -> None:
    pytest.importorskip("perfetto", reason="perfetto is not installed")
    file = io.BytesIO()
    report = decoder_report()
    drawn = write_megakernel_perfetto(report, file)
    trace = export_runs.read_trace(file.getvalue())
    assert report.spans is not None
    assert drawn.slices == len(report.spans) + int((report.spans.wait_ns > 0).sum())
    for worker in range(4):
        slices = trace.track(f"worker {worker}").slices
        mine = report.spans.worker == worker
        work = [(start, end, name) for start, end, name, _ in slices if name != "waiting"]
        ops = [report.ops[report.tasks.op[task]] for task in report.spans.task[mine]]
        times = (report.spans.ready_ns[mine].tolist(), report.spans.end_ns[mine].tolist())
        assert work == list(zip(*times, ops, strict=True))
        waited = sum(end - start for start, end, name, _ in slices if name == "waiting")
        assert waited == int(report.spans.wait_ns[mine].sum())
    said = trace.track("worker 1").slices[1][3]
    assert (said["task"], said["items"], said["region"], said["layer"]) == (1, 2, 0, 0)


def test_perfetto_needs_a_trace(saved: Path) -> None:
    with pytest.raises(ExportError, match="was not traced"):
        write_megakernel_perfetto(decoder_report(records=None), io.BytesIO())
    written = export(saved, "--to", "perfetto")
    assert written.exit_code == 0, written.output
    assert (saved.parent / "decode.perfetto-trace").stat().st_size > 500
    untraced = decoder_report(records=None).save(saved.parent / "untraced.json")
    refused = export(untraced, "--to", "perfetto", "-o", "new")
    assert isinstance(refused.exception, ExportError)
    assert not Path("new").exists()
