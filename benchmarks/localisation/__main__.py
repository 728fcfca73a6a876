"""Score the tools on the planted faults: python -m localisation [--only NAME] [--list] ..."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from localisation.cases import Case, cases
from localisation.rules import RULES
from localisation.score import SCRIPT, Row, as_dict, score, table


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if brickline named a wrong module."""
    given = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [each for each in cases() if _wanted(each, given)]
    if given.list:
        for each in chosen:
            print(f"{each.group:18} {each.name:55} {_where(each.expected, each.position)}")
        print(len(chosen), "cases")
        return 0
    rows = []
    for row in score(chosen, _tools(given)):
        rows.append(row)
        if _told(row, given):
            print(_line(row), file=sys.stderr, flush=True)
    print(json.dumps([as_dict(row) for row in rows], indent=1) if given.json else table(rows))
    ours = [row for row in rows if row.tool in ("check", "compare")]
    return int(any(row.outcome in ("wrong", "raised") for row in ours))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m localisation", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="part of a case's name")
    parser.add_argument("--group", action="append", default=[], help="one group")
    parser.add_argument("--regime", action="append", default=[], help="one regime")
    parser.add_argument("--list", action="store_true", help="list the cases, run none")
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    parser.add_argument("--compare", action="store_true", help="score record and compare too")
    parser.add_argument("--tool", action="append", default=[], help="score only these tools")
    parser.add_argument("--no-peers", action="store_true", help="score brickline alone")
    parser.add_argument(
        "--verbose", action="store_true", help="print every case, not only ours that fail"
    )
    return parser


def _wanted(case: Case, given: argparse.Namespace) -> bool:
    return (
        (not given.only or any(each in case.name for each in given.only))
        and (not given.group or case.group in given.group)
        and (not given.regime or case.regime in given.regime)
    )


def _tools(given: argparse.Namespace) -> list[str]:
    if given.tool:
        return list(given.tool)
    ours = ["check", "compare"] if given.compare else ["check"]
    return ours if given.no_peers else [*ours, SCRIPT, *RULES]


def _told(row: Row, given: argparse.Namespace) -> bool:
    if given.verbose:
        return True
    ours = row.tool in ("check", "compare", *given.tool)
    good = row.outcome == "named" and not row.extra
    hidden = row.outcome == "missed" and not row.observable
    return ours and not (good or hidden)


def _line(row: Row) -> str:
    named = _where(row.named, row.named_position)
    extra = f" and {', '.join(row.extra)}" if row.extra and row.outcome != "wrong" else ""
    seen = "" if row.observable or row.expected is None else " (not observable)"
    return (
        f"{row.outcome:12} {row.tool:12} {row.case:50} expected "
        f"{_where(row.expected, row.position)}, named {named}{extra}{seen}"
        f" [{row.seconds:.1f} s] {row.text}"
    )


def _where(path: str | None, position: int | None) -> str:
    if path is None:
        return "nothing"
    return (path or "(root)") + (f" at {position}" if position else "")


if __name__ == "__main__":
    sys.exit(main())
