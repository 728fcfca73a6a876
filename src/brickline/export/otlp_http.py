"""Sends OTLP requests over HTTP: patient with a receiver that is busy, never for long.

Knows addresses, statuses and waiting; the requests are bytes to it. What is not delivered is said,
so that the caller can keep it.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from brickline.errors import ExportError, UsageError

TIMEOUT_S = 10.0
"""How long one answer is waited for."""
DEADLINE_S = 60.0
"""How long all of it may take with every repeat."""
ATTEMPTS = 4
BUSY = (429, 502, 503, 504)
"""Statuses after which OTLP says to try again."""
MAX_WAIT_S = 5.0
MAX_ANSWER = 64 * 1024


@dataclass(frozen=True)
class Endpoint:
    """An OTLP/HTTP receiver, such as ``http://127.0.0.1:4318``."""

    url: str

    def __post_init__(self) -> None:
        try:
            split = urlsplit(self.url)
            sound = split.scheme in ("http", "https") and split.hostname and split.port != 0
            sound = sound and self.url.isprintable() and " " not in self.url
        except ValueError:
            split, sound = None, False
        if split is not None and split.username is not None:
            raise UsageError(
                "the endpoint holds a name or password, which are not sent; give one without, such "
                "as http://127.0.0.1:4318"
            )
        if not sound:
            raise UsageError(
                f"expected an endpoint such as http://127.0.0.1:4318, got {self.url!r}"
            )

    def path(self, signal: str) -> str:
        """Return where requests of a signal go."""
        return f"{urlsplit(self.url).path.rstrip('/')}/v1/{signal}"

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection that is not open yet."""
        split = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if split.scheme == "https" else http.client.HTTPConnection
        )
        return kind(
            split.hostname or "", split.port or _default_port(split.scheme), timeout=timeout_s
        )


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


@dataclass
class Sent:
    """What the receiver has taken."""

    requests: int = 0
    repeats: int = 0
    answers: list[tuple[str, bytes]] = field(default_factory=list)
    """Signal and body of every answer; a receiver says there what it has refused."""


@dataclass
class Sender:
    """Sends requests one after the other; the clock is a field so that tests need not wait."""

    endpoint: Endpoint
    timeout_s: float = TIMEOUT_S
    deadline_s: float = DEADLINE_S
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic

    def send(self, bodies: Mapping[str, list[bytes]]) -> Sent:
        """Deliver every request.

        Raises:
            ExportError: if the receiver is down, too slow or refuses; nothing after that was sent.
        """
        sent, until = Sent(), self.now() + self.deadline_s
        for signal, requests in bodies.items():
            for body in requests:
                answer = self._deliver(signal, body, until, sent)
                sent.requests += 1
                sent.answers.append((signal, answer))
        return sent

    def _deliver(self, signal: str, body: bytes, until: float, sent: Sent) -> bytes:
        said = ""
        for attempt in range(ATTEMPTS):
            left = until - self.now()
            if left <= 0:
                break
            wait = 0.5 * 2**attempt
            try:
                status, retry_after, answer = self._post(signal, body, min(self.timeout_s, left))
            except TimeoutError:
                said = f"gave no answer within {min(self.timeout_s, left):.0f} s"
            except ConnectionRefusedError:
                said = "is not there (connection refused); is a collector running?"
            except (OSError, http.client.HTTPException) as error:
                said = f"broke off{quoted_words(str(error).encode('utf-8', 'replace'))}"
            else:
                if status == 200:
                    return answer
                said = f"answered {status} {http.client.responses.get(status, '')}".rstrip()
                if status not in BUSY:
                    raise self._failed(signal, said + quoted_words(answer))
                wait = wait if retry_after is None else retry_after
            if attempt + 1 < ATTEMPTS:
                sent.repeats += 1
                self.sleep(max(0.0, min(wait, MAX_WAIT_S, until - self.now())))
        raise self._failed(signal, f"{said}, also after repeats")

    def _post(self, signal: str, body: bytes, timeout_s: float) -> tuple[int, float | None, bytes]:
        connection = self.endpoint.connection(timeout_s)
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": "brickline"}
        try:
            with _cut_off(connection, timeout_s):
                connection.request("POST", self.endpoint.path(signal), body, headers)
                answer = connection.getresponse()
                found = answer.read(MAX_ANSWER)
            return answer.status, _seconds(answer.getheader("Retry-After")), found
        finally:
            connection.close()

    def _failed(self, signal: str, said: str) -> ExportError:
        return ExportError(
            f"the receiver at {self.endpoint.url} {said}; {signal} were not delivered"
        )


@contextmanager
def _cut_off(connection: http.client.HTTPConnection, timeout_s: float) -> Iterator[None]:
    """End a request after so long, whatever comes.

    A socket's own timeout begins anew with every byte, so a trickle would go on for ever; and what
    is cut off there looks like a whole answer without its last headers.
    """
    late = threading.Event()

    def cut() -> None:
        late.set()
        with suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if late.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def quoted_words(answer: bytes) -> str:
    """Return what a receiver says, after a colon, as far as it is text: without the framing."""
    text = "".join(
        each if each.isprintable() else " " for each in answer.decode("utf-8", "replace")
    )
    words = " ".join(text.split())[:200]
    return f": {words}" if words else ""
