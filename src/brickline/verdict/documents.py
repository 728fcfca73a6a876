"""The JSON document of a report, and the facts in one.

::

    {"format": "brickline-divergence", "version": 1, "status": "diverged", "headline": "...",
     "findings": [{"name": "...", ...}, ...], "logic": {"line": "...", "figure": 0.02, ...}, ...,
     "verdicts": {"name": [...], "verdict": [...], ...}, ...}

Fields are only added within a version. Numbers that are not finite are written as their names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from brickline.documents import parsed_json
from brickline.errors import RunDamaged, RunVersion
from brickline.traces import KernelTrace
from brickline.verdict.answer import QUESTIONS, Answer
from brickline.verdict.facts import Coverage, Facts
from brickline.verdict.finding import Finding
from brickline.verdict.table import VerdictRow, VerdictTable
from brickline.verdict.verdicts import GUILTY, Status, Verdict

FORMAT = "brickline-divergence"
VERSION = 1


def json_from_facts(facts: Facts, **conclusions: Any) -> str:
    """Return the document of a report; its conclusions come first, for whoever reads it."""
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION, **conclusions}
    for entry in fields(Facts):
        document[entry.name] = _plain(getattr(facts, entry.name))
    return json.dumps(document, indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    """Return what JSON can hold; numbers that are not finite become their names."""
    if isinstance(value, VerdictTable):
        value = value.columns
    elif isinstance(value, KernelTrace):
        value = value.to_dict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return value
    if isinstance(value, Iterable):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float):
        return value
    return float(value) if hasattr(value, "__float__") else str(value)


@contextmanager
def read_as_damaged() -> Iterator[None]:
    """Turn what goes wrong while a report is read into the error of a damaged file."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDamaged(
            "expected a report that check or compare kept, as JSON, found something else "
            f"({error}); a run is a directory"
        ) from error


_TEXTS = ("unshown", "unmatched", "duplicates", "whys", "circumstances")
_TOTALS = ("noise_floor", "final_error", "total_time_us", "reference_total_time_us")
_TRACES = ("first_divergent_kernel", "expected_trace", "actual_trace")


def facts_from_json(text: str | bytes) -> dict[str, Any]:
    """Return the facts in a document, by the names of the fields of `Facts`."""
    document = parsed_json(text)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunDamaged(f"expected a divergence report (format {FORMAT!r})")
    if document["version"] > VERSION:
        raise RunVersion(
            f"the report has version {document['version']}, this brickline reads up to "
            f"{VERSION}; upgrade it: pip install --upgrade brickline"
        )
    out = {name: value for name, value in document.items() if name in _names(Facts)}
    out["findings"] = tuple(map(_finding, out.get("findings", ())))
    out["verdicts"] = _table(out.get("verdicts", {}))
    coverage = dict(out.get("coverage", {}))
    coverage["notes"] = tuple(coverage.get("notes", ()))
    out["coverage"] = Coverage(**coverage)
    for name in _TEXTS:
        out[name] = tuple(out.get(name, ()))
    for name in _TOTALS:
        out[name] = _number(out.get(name))
    for name in QUESTIONS:
        out[name] = _answer(out.get(name))
    for name in _TRACES:
        if out.get(name) is not None:
            out[name] = KernelTrace.from_dict(out[name])
    status = Status(document["status"])
    if "unshown" not in document and status is not Status.MATCHED:
        out["unshown"] = _unshown_before(document, out["findings"])
    return out


def _unshown_before(document: Mapping[str, Any], findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return why a report was inconclusive that was kept when only its headline said so."""
    if any(finding.verdict in GUILTY for finding in findings):
        return ()
    words = (document.get("headline"), document.get("diagnosis"), "nothing was shown either way")
    return (str(next(filter(None, words))),)


def _table(document: Mapping[str, Any]) -> VerdictTable:
    columns = dict(document)
    columns["verdict"] = [Verdict(value) for value in columns.get("verdict", ())]
    for name in ("z", "local_error", "propagated_error"):
        columns[name] = [_number(value) for value in columns.get(name, ())]
    if len({len(columns.get(name, ())) for name in VerdictRow._fields}) != 1:
        raise ValueError("the columns of its verdicts have different lengths")
    return VerdictTable(columns)


def _finding(document: Mapping[str, Any]) -> Finding:
    out = {name: value for name, value in document.items() if name in _names(Finding)}
    out["verdict"] = Verdict(out["verdict"])
    for name in ("z", "local_error", "propagated_error", "share"):
        out[name] = _number(out.get(name))
    for name in ("alternatives", "members"):
        out[name] = tuple(map(str, out.get(name, ())))
    return Finding(**out)


def _answer(document: Mapping[str, Any] | None) -> Answer | None:
    if document is None:
        return None
    out = {name: value for name, value in document.items() if name in _names(Answer)}
    return Answer(**out | {name: _number(out.get(name)) for name in ("figure", "limit")})


def _names(kind: type[Any]) -> set[str]:
    return {entry.name for entry in fields(kind)}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
