"""Failures: what broke inside brickline while it watched somebody else's program.

The program goes on as if nobody watched, so such an error is never raised into it. It is kept by
kind, with a count, and noted in the run: whoever reads the run is told that brickline failed, and
never takes what is missing for agreement or for a fault of the model. A document per kind::

    {"while": "recording an op", "error": "KeyError", "message": "'x'",
     "where": "brickline/adapters/torch_ops.py:214", "count": 3}

Knows neither runs nor models; who keeps a log says where its documents go.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

FAILED = "brickline failed here"
"""How the text of every failure begins."""
MOST_KINDS = 100
"""Kinds that are kept one by one; the others are counted together."""
MOST_CHARACTERS = 500
"""Of a message; some hold a compiler's whole output."""
_PACKAGE = Path(__file__).parents[1]
_OTHERS = ("recording", "errors", "of other kinds", "several places")


class FailureLog:
    """The failures of one recorder.

    Args:
        on_new: Called with all documents when a failure of a new kind was kept, so that a process
            that is killed leaves them behind. Default: nobody is told.
    """

    def __init__(self, on_new: Callable[[list[dict[str, Any]]], None] | None = None) -> None:
        self._on_new = on_new
        self._counts: dict[tuple[str, str, str], int] = {}
        self._messages: dict[tuple[str, str, str], str] = {}
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def record_failure(self, doing: str, error: BaseException) -> None:
        """Keep an error of brickline's own; the caller goes on without what it could not do.

        Errors are of one kind where the deed, the class and the line are the same: a message may
        name another tensor each time. That of the first is kept.

        Args:
            doing: What failed, as in ``"recording an op"``.
            error: What was raised, with its traceback.
        """
        name, message = _words_of(error)
        kind = (doing, name, _line_of(error.__traceback__))
        with self._lock:
            if kind not in self._counts and len(self._counts) >= MOST_KINDS:
                (doing, name, message, where) = _OTHERS
                kind = (doing, name, where)
            is_new = kind not in self._counts
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._messages.setdefault(kind, message)
        if is_new and self._on_new is not None:
            self._on_new(self.documents())

    def documents(self) -> list[dict[str, Any]]:
        """Return the failures so far, one document per kind, as JSON can hold them."""
        with self._lock:
            return [
                {
                    "while": doing,
                    "error": name,
                    "message": self._messages[doing, name, where],
                    "where": where,
                    "count": count,
                }
                for (doing, name, where), count in self._counts.items()
            ]


def failure_texts(documents: Any) -> Iterator[str]:
    """Give failures as sentences; what is none of their documents is left out."""
    for document in documents if isinstance(documents, Iterable) else ():
        if isinstance(document, Mapping):
            yield _text_of(document)


def is_failure(problem: object) -> bool:
    """Whether what is wrong with a run is a failure of brickline, rather than damage."""
    return str(problem).startswith(FAILED)


def problem_text(problem: object, damaged: str) -> str:
    """Return what is wrong with a run as a line; damage is introduced by the word `damaged`."""
    return str(problem) if is_failure(problem) else f"{damaged}: {problem}"


def _text_of(document: Mapping[str, Any]) -> str:
    count = document.get("count")
    times = f", {count} times" if isinstance(count, int) and count > 1 else ""
    return (
        f"{FAILED}: {document.get('error')}: {document.get('message')} - at "
        f"{document.get('where')}, while {document.get('while')}{times}; it did not disturb the "
        "program, and what was not recorded is missing here; please report it"
    )


def _words_of(error: BaseException) -> tuple[str, str]:
    """Return an error's class and message; a class whose own words cannot be had breaks nothing."""
    lines = traceback.format_exception_only(error)
    first = next((line for line in lines if not line.startswith(" ")), lines[0]).strip()
    name, _, message = first.partition(": ")
    text = message if len(message) <= MOST_CHARACTERS else f"{message[:MOST_CHARACTERS]} …"
    return name, " ".join(text.split())


def _line_of(trace: TracebackType | None) -> str:
    """Return the innermost line of brickline's in a traceback; the core has none."""
    found = "brickline's core"
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE):
            found = f"brickline/{file.relative_to(_PACKAGE).as_posix()}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
