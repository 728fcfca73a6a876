"""Metrics over loopback: our own scrapes, and a real Prometheus that asks and is asked."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import profile_runs
import pytest
from hand_made_megakernels import decoder_report
from metric_families import families_from_bytes

from brickline import BrickProfiler
from brickline.errors import ExportError
from brickline.export.megakernel_metrics import families_of_megakernel
from brickline.export.prometheus import TEXT_TYPE
from brickline.export.prometheus_protobuf import PROTOBUF_TYPE
from brickline.export.serving import MetricsServer, families_of_path
from brickline.profile import profile_from_run
from brickline.runs import Run

PATIENCE_S = 60.0
ACCEPT_PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,"
    "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@contextmanager
def served(path: Path) -> Iterator[MetricsServer]:
    with MetricsServer(lambda: families_of_path(path), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def scraped(server: MetricsServer, accept: str | None = None, path: str = "/metrics") -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("GET", path, headers={} if accept is None else {"Accept": accept})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.getheader("Content-Type"), body


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, TEXT_TYPE),
        ("*/*", TEXT_TYPE),
        ("text/plain;version=0.0.4", TEXT_TYPE),
        (ACCEPT_PROTOBUF, PROTOBUF_TYPE),
        (ACCEPT_PROTOBUF.replace("delimited,", "delimited;q=0.4,"), TEXT_TYPE),
        (ACCEPT_PROTOBUF.replace("delimited,", "text,"), TEXT_TYPE),
        ("application/vnd.google.protobuf;q=nonsense", TEXT_TYPE),
        (";;,=,q", TEXT_TYPE),
    ],
)
def test_the_client_chooses_the_form(tmp_path: Path, accept: str | None, kind: str) -> None:
    run = profile_runs.sampled_run(tmp_path / "run.brick")
    with served(run) as server:
        status, found, body = scraped(server, accept)
    assert (status, found) == (200, kind)
    if kind == PROTOBUF_TYPE:
        assert "brickline_step_duration_nanoseconds" in {e.name for e in families_from_bytes(body)}
    else:
        assert b'brickline_steps_total{phase="decode"} 40\n' in body


def test_the_report_of_a_megakernel_is_served() -> None:
    report = decoder_report()
    with MetricsServer(lambda: families_of_megakernel(report), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            status, _, body = scraped(server)
            _, kind, message = scraped(server, ACCEPT_PROTOBUF)
        finally:
            server.shutdown()
            thread.join()
    assert status == 200
    assert b'brickline_megakernel_items{state="processed"} 42\n' in body
    assert kind == PROTOBUF_TYPE
    names = {each.name for each in families_from_bytes(message)}
    assert "brickline_megakernel_output_source_items" in names


def test_a_live_run_is_folded_at_every_scrape(tmp_path: Path) -> None:
    path = tmp_path / "run.brick"
    line = b'brickline_brick_entries_total{brick="LmHead",category="Other",layer=""} %d\n'
    profiler = BrickProfiler("live", enabled=True, device="NULL", path=path)
    with profiler, served(path) as server:
        for entries in (1, 2, 3):
            with profiler.brick("LmHead"):
                profiler.advance(1_000)
            _, _, body = scraped(server)
            assert line % entries in body
            assert b"brickline_run_live 1\n" in body


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    run = profile_runs.empty_run(tmp_path / "run.brick")
    with served(run) as server:
        assert scraped(server, path="/other")[0] == 404
        shutil.rmtree(run)
        status, _, body = scraped(server)
    assert status == 503
    assert b"brickline: " in body


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ExportError, match=f"port {port} .* in use.*--port"):
            MetricsServer(list, port)
    with pytest.raises(ExportError, match="from 0 to 65535"):
        MetricsServer(list, 70_000)


def test_a_client_that_says_nothing_holds_nobody_up(tmp_path: Path) -> None:
    run = profile_runs.empty_run(tmp_path / "run.brick")
    with served(run) as server, socket.create_connection(("127.0.0.1", server.port)):
        assert scraped(server)[0] == 200


def test_a_damaged_part_is_said_and_counted(tmp_path: Path) -> None:
    run = profile_runs.sampled_run(tmp_path / "run.brick")
    with served(run) as server:
        assert b"brickline_run_problems 0\n" in scraped(server)[2]
    (run / "spool" / "1-0.spool").write_bytes(b"not a spool at all" * 1000)
    with serving_command(run, said_first="left out: ") as (process, port):
        url = f"http://127.0.0.1:{port}/metrics"
        for _ in range(3):
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                text = answer.read()
            assert b"brickline_run_problems 1\n" in text
            assert b'brickline_steps_total{phase="decode"} 40\n' in text
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "brickline: stopped\n"  # said once, not at every scrape


@contextmanager
def serving_command(
    path: Path, *, said_first: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """``brickline export --serve`` as a process of its own, and its port."""
    command = [sys.executable, "-m", "brickline", "export", str(path)]
    process = subprocess.Popen(
        [*command, "--to", "prometheus", "--serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    try:
        if said_first is not None:
            assert said_first in process.stderr.readline()
        said = process.stderr.readline()
        assert "serving http://127.0.0.1:" in said, said + process.stderr.read()
        yield process, int(said.partition("127.0.0.1:")[2].partition("/")[0])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_ctrl_c_leaves_cleanly(tmp_path: Path) -> None:
    with serving_command(profile_runs.empty_run(tmp_path / "run.brick")) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "brickline: stopped\n"


def test_a_real_prometheus_has_the_figures(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not on PATH")
    run = profile_runs.rich_run(tmp_path / "rich.brick", steps=12, layers=3)
    profile = profile_from_run(Run.open(run))
    row = next(each for each in profile.brick_layers if each.name == "RmsNorm" and each.layer == 1)
    with serving_command(run) as (_, port), prometheus(program, tmp_path, port) as ask:
        labels = '{brick="RmsNorm",category="Norm",layer="1"}'
        native = f"brickline_brick_duration_nanoseconds{labels}"
        assert ask(f"histogram_count({native})") == row.timed
        assert ask(f"histogram_sum({native})") == row.total_ns
        for quantile in (0.5, 0.9, 0.99):
            found = ask(f"histogram_quantile({quantile}, {native})")
            assert found == pytest.approx(row.quantile_ns(quantile), rel=2 ** (1 / 16) - 1)
        classic = "brickline_brick_duration_seconds"
        assert ask(f"{classic}_count{labels}") == row.timed
        assert ask(f"{classic}_sum{labels}") == row.total_ns / 1e9
        below = f'{classic}_bucket{{brick="RmsNorm",layer="1",le="1.6384e-05"}}'
        counted = row.histogram.counts[row.histogram.indices < 14 * 16].sum()
        assert ask(below) == counted + row.histogram.zero_count
        assert ask('brickline_tokens_total{phase="decode"}') == 12
        every = f"sum(histogram_count({native.partition('{')[0]}))"
        assert ask(every) == sum(each.timed for each in profile.brick_layers)


@contextmanager
def prometheus(program: str, folder: Path, port: int) -> Iterator[Any]:
    """A Prometheus that scrapes the port; yields how it is asked for one value."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": "brickline", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{own}",
                "--enable-feature=native-histograms",
            ],
            stdout=log,
            stderr=log,
        )

    def ask(query: str) -> float:
        until = time.monotonic() + PATIENCE_S
        url = f"http://127.0.0.1:{own}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        while True:
            try:
                with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                    found = json.load(answer)["data"]["result"]
                if found:
                    (series,) = found
                    return float(series["value"][1])
            except OSError:
                pass
            words = f"{query}: no answer\n{(folder / 'prometheus.log').read_text()[-3000:]}"
            assert process.poll() is None, words
            assert time.monotonic() < until, words
            time.sleep(0.2)

    try:
        yield ask
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
