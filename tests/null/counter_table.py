"""The table of docs/megakernel.md that says where a counter is measured, against reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_telemetry import MegakernelTelemetry

DOCUMENT = Path(__file__).parents[2] / "docs" / "megakernel.md"
HEAD = "| Counter | plan, CPU |"
CELLS = {"yes", "no", "`trace=True`", "`memory_budget=`"}


def counters_of(mode: str) -> dict[str, str]:
    """Return of each counter when it is measured in a mode, such as "queue, CPU"."""
    lines = iter(DOCUMENT.read_text(encoding="utf-8").splitlines())
    head = next(line for line in lines if line.startswith(HEAD))
    column = _cells(head).index(mode)
    assert set(next(lines)) == set("|-")
    rows = []
    while line := next(lines):
        rows.append(_cells(line))
    found = {row[0].strip("`"): row[column] for row in rows}
    assert len(found) == len(rows)
    assert set(found) == set(MegakernelTelemetry.__dataclass_fields__)
    assert set(found.values()) <= CELLS
    assert all(row[-1] for row in rows if set(row[1:-1]) != {"yes"}), "a reason where it is None"
    return found


def check_counters(mode: str, reports: Mapping[str, MegakernelReport]) -> None:
    """Compare reports, by the option that they were made with, with what the table says."""
    for name, when in counters_of(mode).items():
        for option, report in reports.items():
            is_measured = getattr(report.telemetry, name) is not None
            assert is_measured == (when in ("yes", option)), (mode, name, option)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
