"""What holds for every folder: the end of a run says which tests a missing program left out."""

from __future__ import annotations

from collections import Counter
from typing import Any

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
