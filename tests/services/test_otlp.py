"""OTLP over loopback, received through opentelemetry-proto's own service classes.

Receivers are also down, slow, busy or choosy.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import export_runs
import pytest
from hand_made_megakernels import decoder_report
from typer.testing import CliRunner

from brickline.commands import app
from brickline.errors import ExportError, UsageError
from brickline.export.otlp import refusals
from brickline.export.otlp_http import ATTEMPTS, Endpoint, Sender
from brickline.profile import profile_from_run
from brickline.runs import Run

pytest.importorskip("opentelemetry.proto", reason="opentelemetry-proto is not installed")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

Answer = Callable[[str, int], tuple[int, bytes, dict[str, str]]]


class Receiver(ThreadingHTTPServer):
    """Takes requests, and answers as it is told."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.traces: list[Any] = []
        self.metrics: list[Any] = []
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.asked += 1
        status, answer, headers = self.server.answer(self.path, self.server.asked)
        if status == 200 and self.path == "/v1/traces":
            self.server.traces.append(ExportTraceServiceRequest.FromString(body))
        elif status == 200 and self.path == "/v1/metrics":
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        pass


def accepted(path: str, number: int) -> tuple[int, bytes, dict[str, str]]:
    kind = ExportTraceServiceResponse if path == "/v1/traces" else ExportMetricsServiceResponse
    return 200, kind().SerializeToString(), {}


@contextmanager
def receiving(answer: Answer = accepted) -> Iterator[Receiver]:
    with Receiver(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return export_runs.launched_run(tmp_path / "run.brick", steps=3)


def export(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_a_receiver_has_the_spans_and_the_histograms(run: Path) -> None:
    with receiving() as receiver:
        result = export(run, "--to", "otlp", "--endpoint", receiver.url)
    assert result.exit_code == 0, result.output
    assert "sent 15 spans and 3 histograms" in result.output
    spans = [
        span
        for request in receiver.traces
        for group in request.resource_spans
        for span in group.scope_spans[0].spans
    ]
    assert len(spans) == 15
    assert {span.name for span in spans} == {"decode", "RmsNorm", "rms_0", "rms_1"}
    points = {
        metric.name: metric.exponential_histogram.data_points
        for request in receiver.metrics
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
    }
    profile = profile_from_run(Run.open(run))
    assert sum(point.count for point in points["brickline.brick.duration"]) == 6
    assert points["brickline.step.duration"][0].sum == profile.wall_ns
    assert not list(run.parent.glob("*.pb"))


def test_a_receiver_has_the_regions_of_a_megakernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = decoder_report().save(tmp_path / "decode.megakernel.json")
    with receiving() as receiver:
        result = export(saved, "--to", "otlp", "--endpoint", receiver.url)
    assert result.exit_code == 0, result.output
    assert "sent 5 spans and " in result.output
    (request,) = receiver.traces
    root, *regions = request.resource_spans[0].scope_spans[0].spans
    assert root.name == "decode"
    ids = {span.span_id for span in regions}
    assert [len(span.links) for span in regions] == [0, 1, 1, 1]
    assert all(link.span_id in ids for span in regions for link in span.links)
    assert len(receiver.metrics) > 10
    assert not list(tmp_path.glob("*.pb"))


def test_a_file_holds_what_a_receiver_would_have_got(run: Path) -> None:
    with receiving() as receiver:
        export(run, "--to", "otlp", "--endpoint", receiver.url, "-o", "kept.otlp")
    (sent,) = receiver.traces
    data = (run.parent / "kept.otlp.traces.pb").read_bytes()
    assert ExportTraceServiceRequest.FromString(data) == sent
    again = export(run, "--to", "otlp", "-o", "kept.otlp")
    assert isinstance(again.exception, UsageError)
    assert export(run, "--to", "otlp", "-o", "kept.otlp", "--force").exit_code == 0


def test_a_receiver_that_is_down_loses_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brickline.commands.export.Sender", patient)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = export(run, "--to", "otlp", "--endpoint", f"http://127.0.0.1:{port}")
    assert isinstance(result.exception, ExportError)
    assert "connection refused" in str(result.exception)
    assert "nothing is lost" in str(result.exception)
    data = (run.parent / "run.otlp.traces.pb").read_bytes()
    assert len(ExportTraceServiceRequest.FromString(data).resource_spans) == 1
    # What a second failure keeps replaces nothing.
    export(run, "--to", "otlp", "--endpoint", f"http://127.0.0.1:{port}")
    assert (run.parent / "run.otlp-2.metrics.pb").is_file()


def patient(endpoint: Endpoint) -> Sender:
    return Sender(endpoint, sleep=lambda _: None)


def test_a_busy_receiver_is_asked_again_after_as_long_as_it_says() -> None:
    waited: list[float] = []

    def busy(path: str, number: int) -> tuple[int, bytes, dict[str, str]]:
        return (429, b"", {"Retry-After": "3"}) if number == 1 else accepted(path, number)

    with receiving(busy) as receiver:
        sent = Sender(Endpoint(receiver.url), sleep=waited.append).send({"traces": [b""]})
    assert (sent.requests, sent.repeats, waited) == (1, 1, [3.0])


@pytest.mark.parametrize("status", [429, 503])
def test_a_receiver_that_stays_busy_is_left(status: int) -> None:
    waited: list[float] = []
    with receiving(lambda *_: (status, b"", {})) as receiver:
        with pytest.raises(ExportError, match=f"answered {status}.*repeats; traces were not"):
            Sender(Endpoint(receiver.url), sleep=waited.append).send({"traces": [b""]})
        assert receiver.asked == ATTEMPTS
    assert waited == [0.5, 1.0, 2.0]


def test_a_refusal_is_quoted_and_not_repeated() -> None:
    with receiving(lambda *_: (400, b"\x0a\x05bad\x00 span", {})) as receiver:
        with pytest.raises(ExportError, match=r"answered 400 Bad Request: .*bad span"):
            Sender(Endpoint(receiver.url)).send({"traces": [b""]})
        assert receiver.asked == 1


def test_a_receiver_that_trickles_is_left_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def trickle() -> None:
            while not stop.is_set():
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n")
                    while not stop.wait(0.02):
                        try:
                            connection.sendall(b"X-Slow: 1\r\n")
                        except OSError:
                            break

        thread = threading.Thread(target=trickle)
        thread.start()
        began = time.monotonic()
        sender = Sender(
            Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}"),
            timeout_s=0.3,
            deadline_s=1.0,
            sleep=lambda _: None,
        )
        with pytest.raises(ExportError, match="gave no answer within"):
            sender.send({"traces": [b""]})
        assert time.monotonic() - began < 20
        stop.set()
    thread.join()


def test_what_is_taken_in_part_is_said(run: Path) -> None:
    def choosy(path: str, number: int) -> tuple[int, bytes, dict[str, str]]:
        if path == "/v1/traces":
            answer = ExportTraceServiceResponse()
            answer.partial_success.rejected_spans = 4
            answer.partial_success.error_message = "too old"
            return 200, answer.SerializeToString(), {}
        return accepted(path, number)

    with receiving(choosy) as receiver:
        result = export(run, "--to", "otlp", "--endpoint", receiver.url)
    assert result.exit_code == 1
    assert "4 spans refused: too old" in result.output
    assert refusals([("metrics", b""), ("traces", b"{}")]) == []
    said = b'{"partialSuccess": {"rejectedDataPoints": "3"}}'
    assert refusals([("metrics", said)]) == ["3 data points refused"]


@pytest.mark.parametrize(
    "answer",
    [b"<html>Welcome</html>", b"OK", b"a12345678", b'{"status": "ok"}', b"[]", b"\xff\xff\xff"],
)
def test_an_answer_of_somebody_else_is_no_delivery(run: Path, answer: bytes) -> None:
    with receiving(lambda *_: (200, answer, {})) as receiver:
        result = export(run, "--to", "otlp", "--endpoint", receiver.url)
    assert isinstance(result.exception, ExportError)
    assert "is an OTLP/HTTP receiver there?" in str(result.exception)
    assert "nothing is lost" in str(result.exception)
    assert "sent" not in result.output
    assert len(list(run.parent.glob("*.pb"))) == 2


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "ftp://x", "http://", "http://x:99999", "http://[::1"]
)
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected an endpoint such as"):
        Endpoint(url)


def test_a_path_in_front_is_kept() -> None:
    assert Endpoint("http://h:1/prefix/").path("traces") == "/prefix/v1/traces"
