"""What holds for every folder: Ctrl-C works, and the end says what a missing program left out."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A suite in the background inherits a Ctrl-C that is ignored, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)

MISSING = ("not on PATH", "on the PATH", "not installed")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if any(words in said for words in MISSING):
            reasons[said.removeprefix("Skipped: ")] += 1
    if not reasons:
        return
    terminalreporter.write_sep("=", "not run, because something is missing here")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} tests: {reason}")
