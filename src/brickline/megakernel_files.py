"""Reports of megakernels as files: one JSON document with a digest over its contents.

Everything that a report checks holds of one that was read; what is damaged, of a newer version or
something else is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from brickline.errors import RunDamaged, RunError, RunVersion, UsageError
from brickline.megakernel_flow import Flow
from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import ItemFault, Spans, Tasks, WorkerTimes
from brickline.megakernel_telemetry import MegakernelTelemetry
from brickline.whole_files import whole_file

FORMAT = "brickline-megakernel"
VERSION = 1
MAX_BYTES = 512 << 20
"""Larger files are refused before they are read."""
HEAD_BYTES = 4096
_SAYS = re.compile(rb'"format"\s*:\s*"' + FORMAT.encode() + b'"')
_TABLES = ("telemetry", "workers", "tasks", "spans", "flow", "faults")


def is_megakernel_report(path: str | os.PathLike[str]) -> bool:
    """Whether a file says at its beginning that it is such a report."""
    try:
        with open(path, "rb") as file:
            return _SAYS.search(file.read(HEAD_BYTES)) is not None
    except OSError:
        return False


def report_json(report: MegakernelReport) -> str:
    """Return a report as one JSON document."""
    contents = _contents(report)
    text = _text(contents)
    head = {"format": FORMAT, "version": VERSION, "digest": _digest(text)}
    return f'{json.dumps(head)[:-1]}, "report": {text}}}\n'


def report_from_json(text: str | bytes) -> MegakernelReport:
    """Read what `report_json` wrote; see `MegakernelReport.from_json`."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunDamaged(
            f"expected a megakernel's report as JSON, found something else or a cut one: "
            f"{error!s:.200}"
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunDamaged(f"expected a megakernel's report (format {FORMAT!r})")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RunDamaged(f"expected a version from 1 on, got {version!r:.80}")
    if version > VERSION:
        raise RunVersion(
            f"the report has version {version}, this brickline reads up to {VERSION}; upgrade it: "
            "pip install --upgrade brickline"
        )
    contents: Any = document.get("report")
    if _digest(_text(contents)) != document.get("digest"):
        raise RunDamaged(
            "the report is damaged: its contents do not have the digest that it states"
        )
    try:
        return _report(contents)
    except UsageError as error:
        raise RunDamaged(f"the report contradicts itself: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunDamaged(f"the report is damaged: {type(error).__name__}: {error!s:.200}") from None


def save_report(report: MegakernelReport, path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Write a report; see `MegakernelReport.save`."""
    target = Path(path)
    text = report_json(report)
    try:
        with whole_file(target, force=overwrite) as file:
            file.write(text.encode("ascii"))
    except OSError as error:
        raise RunError(f"{target}: cannot write the report: {error.strerror}") from error
    return target


def load_report(path: str | os.PathLike[str]) -> MegakernelReport:
    """Read a saved report; see `MegakernelReport.load`."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise RunDamaged(f"{path}: expected a file, got a directory, a device or a pipe")
        size = os.stat(path).st_size
        if size > MAX_BYTES:
            raise RunDamaged(f"{path}: expected at most {MAX_BYTES} bytes, got {size}")
        data = Path(path).read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot read the report: {error.strerror}") from error
    try:
        return report_from_json(data)
    except (RunDamaged, RunVersion) as error:
        raise type(error)(f"{path}: {error}") from error


def _text(contents: Any) -> str:
    try:
        return json.dumps(contents, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise RunDamaged(f"the report holds what no report holds: {error!s:.200}") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


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
    if out["op_work_ns"] is not None:
        out["op_work_ns"] = tuple(map(int, out["op_work_ns"]))
    outputs = out["outputs"]
    out["outputs"] = {name: tuple(writers) for name, writers in outputs.items()}
    return MegakernelReport(**out)


def _texts(values: Any, name: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise UsageError(f"{name}: expected a list of texts, got {values!r:.80}")
    return tuple(values)
