"""Serves a run's metrics on loopback: every scrape reads the spools anew.

Nothing is pushed and nothing runs between scrapes. The recording process is not asked for anything:
its spools are read and folded here.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from brickline.errors import BricklineError, ExportError, RunError
from brickline.export.prometheus import TEXT_TYPE, Family, exposition_text, families_of_profile
from brickline.export.prometheus_protobuf import PROTOBUF_TYPE, exposition_protobuf
from brickline.profile import Profile, profile_from_parts
from brickline.runs import Part, failures_of_run, live_processes, read_manifest
from brickline.spools import has_begun, read_statistics, spools_of_run

HOST = "127.0.0.1"
PORT = 9478
"""Where a run is served unless another port is asked for."""
PATIENCE_S = 10.0
"""A client that is slower than this is left."""


def families_of_path(path: Path) -> list[Family]:
    """Return the metrics of a run as it is now; see `statistics_of_path`."""
    return families_of_profile(statistics_of_path(path))


def statistics_of_path(path: Path) -> Profile:
    """Return the figures of a run as it is now, without its traces; damaged parts are `problems`.

    Raises:
        RunError: if nothing of it can be read.
    """
    manifest = read_manifest(path)
    parts: list[Part] = []
    problems: list[RunError] = []
    for spool in filter(has_begun, spools_of_run(path)):
        try:
            parts.append(read_statistics(spool))
        except RunError as error:
            problems.append(error)
    if problems and not parts:
        raise problems[0]
    return profile_from_parts(
        parts,
        name=str(manifest["name"]),
        manifest=manifest,
        problems=(
            *map(str, problems),
            *(f"{text} - at {part.path}" for part in parts for text in part.problems),
            *failures_of_run(path),
        ),
        is_live=bool(live_processes(path)),
    )


class MetricsServer(ThreadingHTTPServer):
    """Answers ``GET /metrics``; text, or protobuf where the client prefers it."""

    daemon_threads = True

    def __init__(self, families: Callable[[], list[Family]], port: int = PORT) -> None:
        """Take the port; `serve_forever` answers.

        Args:
            families: gives the metrics of this moment.
            port: on loopback; 0 takes a free one, and `port` says which.

        Raises:
            ExportError: if somebody else listens there, or the port is not for everybody.
        """
        self.families = families
        self.scraping = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ExportError(_words(port, error)) from None

    @property
    def port(self) -> int:
        """The port that is served."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """What to give to a scraper."""
        return f"http://{HOST}:{self.port}/metrics"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""


def _words(port: int, error: OSError | OverflowError) -> str:
    other = "choose another with --port, or 0 for any free one"
    if isinstance(error, OverflowError):
        return f"expected a port from 0 to 65535, got {port}; {other}"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {HOST} is in use by another program; {other}"
    if error.errno == errno.EACCES:
        return f"port {port} on {HOST} needs rights that you do not have; {other}"
    return f"cannot serve on {HOST}:{port}: {error.strerror}; {other}"


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = PATIENCE_S
    server_version = "brickline"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self._answer(404, "text/plain; charset=utf-8", b"the metrics are at /metrics\n")
            return
        try:
            with self.server.scraping:
                families = self.server.families()
            kind = negotiated(self.headers)
            text = kind == TEXT_TYPE
            body = exposition_text(families).encode() if text else exposition_protobuf(families)
        except BricklineError as error:
            self._answer(503, "text/plain; charset=utf-8", f"brickline: {error}\n".encode())
            return
        self._answer(200, kind, body)

    do_HEAD = do_GET  # noqa: N815 - as http.server calls it

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Vary", "Accept")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as http.server calls it
        """Print nothing: a scrape every few seconds is not news."""


def negotiated(headers: Message) -> str:
    """Return the content type that a client prefers: protobuf only where it asks for it."""
    protobuf, text = -1.0, -1.0
    for entry in ",".join(headers.get_all("Accept", [])).split(","):
        kind, *rest = (piece.strip().lower() for piece in entry.split(";"))
        options = dict(piece.partition("=")[::2] for piece in rest)
        weight = _weight(options.get("q", "1"))
        if kind == "application/vnd.google.protobuf":
            asked = options.get("proto", "").strip('"') == "io.prometheus.client.metricfamily"
            if asked and options.get("encoding", "delimited") == "delimited":
                protobuf = max(protobuf, weight)
        elif kind in ("text/plain", "text/*", "*/*"):
            text = max(text, weight)
    return PROTOBUF_TYPE if protobuf > 0 and protobuf >= text else TEXT_TYPE


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
