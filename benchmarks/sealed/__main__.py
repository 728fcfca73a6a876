"""Score `brickline.check` on sealed sets: python -m sealed one [--only NAME] [--json FILE].

An outcome is **alone** (an expected module first, and no alternative), **set** (expected, in a set
of at most three), **wrong** (another module, or any module where nothing is wrong), **missed**
(matched, though something is wrong), **inconclusive**, **raised**, or **right** (matched, and
nothing is wrong).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections import Counter
from typing import Any

import torch
from torch import nn

from sealed.cases import Case

LARGEST_SET = 3
"""Modules that a set has at the most to count as one."""


def main(arguments: list[str] | None = None) -> int:
    """Print each case that is not named alone, and the counts; return 1 if one is wrong."""
    given = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    place, of = map(int, given.part.split("/"))
    for name in given.sets:
        chosen = [
            case
            for case in importlib.import_module(f"sealed.{name}").cases()
            if not given.only or any(part in case.name for part in given.only)
        ]
        for case in chosen[place::of]:
            row = score(case) | {"set": name}
            rows.append(row)
            if row["outcome"] not in ("alone", "right"):
                print(_line(row), file=sys.stderr, flush=True)
    print(table(rows))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)
    return int(any(row["outcome"] in ("wrong", "missed", "raised") for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sealed", description=__doc__)
    parser.add_argument("sets", nargs="+", help="names of sets: one, two, three")
    parser.add_argument("--only", action="append", default=[], help="part of a case's name")
    parser.add_argument("--part", default="0/1", help="K/N: every Nth case from the Kth on")
    parser.add_argument("--json", help="where to write all rows")
    return parser


def score(case: Case) -> dict[str, Any]:
    """Return what `check` says of one case."""
    import brickline

    start = time.perf_counter()
    row: dict[str, Any] = {
        "case": case.name,
        "architecture": case.architecture,
        "dtype": str(case.dtype).removeprefix("torch."),
        "expected": list(case.expected),
        "cause": case.cause,
        "precision": case.precision,
        "named": [],
        "stated": None,
    }
    try:
        pair = case.make()
        report = brickline.check(
            pair.candidate,
            *pair.args,
            reference=pair.reference,
            kwargs=pair.kwargs or None,
            drive=pair.drive,
            repro=False,
        )
        row["named"] = [[each.name, *each.alternatives, *each.members] for each in report.culprits]
        row["stated"] = report.culprits[0].cause if report.culprits else None
        row["headline"] = report.headline
        first = report.culprits[0] if report.culprits else None
        names = () if first is None else (first.name, *first.alternatives)
        row["outcome"] = outcome(case, pair.candidate, names, str(report.status))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        row |= {"outcome": "raised", "headline": f"{error!r:.300} at {frame.name}:{frame.lineno}"}
    return row | {"seconds": round(time.perf_counter() - start, 2)}


def outcome(case: Case, candidate: nn.Module, names: tuple[str, ...], status: str) -> str:
    """Return what an answer is worth."""
    root = type(candidate).__name__
    expected = {path or root for path in case.expected}
    if not names:
        if status == "inconclusive":
            return status
        return "right" if case.harmless else "missed"
    if names[0] in expected and (len(names) == 1 or expected.issuperset(names)):
        return "alone"
    is_set = len(names) <= LARGEST_SET and not expected.isdisjoint(names)
    return "set" if is_set else "wrong"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the counts by set and kind."""
    lines = []
    kinds = {
        "faults": lambda row: row["expected"] and not row["precision"],
        "precision": lambda row: row["expected"] and row["precision"],
        "harmless": lambda row: not row["expected"],
    }
    for name in dict.fromkeys(row["set"] for row in rows):
        for kind, belongs in kinds.items():
            chosen = [row for row in rows if row["set"] == name and belongs(row)]
            counts = Counter(row["outcome"] for row in chosen)
            told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
            lines.append(f"{name:8} {kind:10} {len(chosen):4}: {told}")
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    named = "; ".join(" or ".join(names) for names in row["named"][:3])
    return (
        f"{row['outcome']:12} {row['case']:48} expected {', '.join(row['expected'][:3])!r}, named "
        f"{named!r} [{row['seconds']:.1f} s] {row.get('headline', '')[:160]}"
    )


if __name__ == "__main__":
    sys.exit(main())
