"""A whole check: drive, examine, rank, explain, and write it down as a `DivergenceReport`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brickline.checking.session import Progress, Session
from brickline.checking.writing import report_of
from brickline.verdicts import DivergenceReport


def conduct(
    candidate: Any,
    reference: Any,
    drive: Callable[[Any], Any],
    *,
    accept: Any = None,
    progress: Progress | None = None,
    repro: Any = None,
) -> DivergenceReport:
    """Check a candidate and report."""
    session = Session(candidate, reference, progress=progress)
    failure: BaseException | None = None
    try:
        session.drive(drive)
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    return report_of(session, failure)
