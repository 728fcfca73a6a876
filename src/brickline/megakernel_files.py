"""Reports of megakernels as files: one JSON document with a digest over its contents.

Everything that a report checks holds of one that was read; what is damaged, of a newer version or
something else is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from brickline.documents import DocumentFormat, stated_format
from brickline.errors import RunDamaged, RunError, RunVersion, UsageError
from brickline.megakernel_flow import Flow
from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import ItemFault, Spans, Tasks, WorkerTimes
from brickline.megakernel_telemetry import MegakernelTelemetry

DOCUMENT = DocumentFormat(
    "brickline-megakernel",
    version=1,
    key="report",
    name="megakernel's report",
    remedy="save it again",
    damaged=RunDamaged,
    newer=RunVersion,
    inaccessible=RunError,
)
_TABLES = ("telemetry", "workers", "tasks", "spans", "flow", "faults")


def is_megakernel_report(path: str | os.PathLike[str]) -> bool:
    """Whether a file says at its beginning that it is such a report."""
    return stated_format(path) == DOCUMENT.format


def report_json(report: MegakernelReport) -> str:
    """Return a report as one JSON document."""
    return DOCUMENT.text(_contents(report))


def report_from_json(text: str | bytes, where: str = "the report") -> MegakernelReport:
    """Read what `report_json` wrote; see `MegakernelReport.from_json`."""
    contents = DOCUMENT.contents(text, where)
    try:
        return _report(contents)
    except UsageError as error:
        raise RunDamaged(f"{where} contradicts itself: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunDamaged(f"{where} is damaged: {type(error).__name__}: {error!s:.200}") from None


def save_report(report: MegakernelReport, path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Write a report; see `MegakernelReport.save`."""
    return DOCUMENT.write(report_json(report), path, overwrite=overwrite)


def load_report(path: str | os.PathLike[str]) -> MegakernelReport:
    """Read a saved report; see `MegakernelReport.load`."""
    return report_from_json(DOCUMENT.read(path), f"{path!s:.400}")


def _contents(report: MegakernelReport) -> dict[str, Any]:
    out: dict[str, Any] = {
        each.name: getattr(report, each.name) for each in fields(report) if each.name not in _TABLES
    }
    out["outputs"] = {name: list(writers) for name, writers in report.outputs.items()}
    out["telemetry"] = report.telemetry.known()
    out["workers"] = [asdict(worker) for worker in report.workers]
    out["faults"] = [asdict(fault) for fault in report.faults]
    out["tasks"] = {name: values.tolist() for name, values in report.tasks.columns().items()}
    spans, flow = report.spans, report.flow
    out["spans"] = None
    if spans is not None:
        out["spans"] = {name: values.tolist() for name, values in spans.columns().items()}
    out["flow"] = None
    if flow is not None:
        small = flow.shared()
        columns = ("begin", "sources", "given_begin", "given", "lists")
        out["flow"] = {name: getattr(small, name).tolist() for name in columns}
        out["flow"]["memory"] = list(flow.memory)
    return out


def _report(contents: Mapping[str, Any]) -> MegakernelReport:
    known = {each.name for each in fields(MegakernelReport)}
    out = {name: value for name, value in contents.items() if name in known}
    out["telemetry"] = MegakernelTelemetry(**out["telemetry"])
    out["workers"] = tuple(WorkerTimes(**each) for each in out["workers"])
    out["faults"] = tuple(ItemFault(**each) for each in out["faults"])
    out["tasks"] = Tasks.of(out["tasks"])
    out["spans"] = None if out["spans"] is None else Spans.of(out["spans"])
    out["flow"] = None if out["flow"] is None else Flow(**out["flow"])
    for name in ("ops", "bricks", "notes"):
        out[name] = _texts(out[name], name)
    for name in ("op_work_ns", "op_items"):
        if out.get(name) is not None:
            out[name] = tuple(out[name])
    outputs = out["outputs"]
    out["outputs"] = {name: tuple(writers) for name, writers in outputs.items()}
    return MegakernelReport(**out)


def _texts(values: Any, name: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise UsageError(f"{name}: expected a list of texts, got {values!r:.80}")
    return tuple(values)
