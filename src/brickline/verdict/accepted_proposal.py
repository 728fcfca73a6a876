"""A proposal of accepted differences, from what a check found, for a person to go through.

Writes the form that `accepted_entries` reads.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from brickline.errors import AcceptError
from brickline.verdict.accepted_entries import (
    NEEDS_ENTRY,
    Accepted,
    fits_name,
    key_of,
    keys_of,
    size_of,
)
from brickline.verdict.finding import Finding
from brickline.verdict.report import DivergenceReport
from brickline.verdict.verdicts import Verdict


def propose_accept(report: DivergenceReport) -> str:
    """Return a file that accepts what the report found, for a person to fill in the reasons.

    Layers are put together (``layers.*.mlp``) where every one of them differs. Sizes are rounded
    up, with at least a tenth to spare. Entries that already accept something are kept.
    """
    lines = [
        "# Differences that are intended. Read each one, say why, and take out what is not.",
        "# relative_l2 is the largest accepted error of the brick's own; beyond it, it fails.",
    ]
    sizes: dict[str, list[Finding]] = {}
    needed = [finding for finding in report.findings if finding.verdict in NEEDS_ENTRY]
    blamed = {name for finding in needed for name in finding.names}
    for finding in needed:
        for name in finding.names:
            sizes.setdefault(_family(name, blamed, report), []).append(finding)
    for brick, findings in sizes.items():
        lines += ["", *_proposal(brick, findings, report)]
    if not sizes:
        lines += ["# Nothing differs, so there is nothing to accept."]
    return "\n".join(lines) + "\n"


def write_accept(
    report: DivergenceReport, path: str | os.PathLike[str], *, overwrite: bool = False
) -> Path:
    """Write what `propose_accept` says to a file, and return its path.

    Raises:
        AcceptError: if the file is there and overwriting was not asked for, or cannot be written.
    """
    target = Path(path)
    try:
        with open(target, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(propose_accept(report))
    except FileExistsError:
        raise AcceptError(
            f"{target} is there already; choose another name, or use --force (overwrite=True)"
        ) from None
    except OSError as error:
        raise AcceptError(f"{target}: cannot write the proposal: {error.strerror}") from None
    return target


def _family(name: str, blamed: AbstractSet[str], report: DivergenceReport) -> str:
    """Return a name, with ``*`` for the layer where all such bricks are to blame."""
    parts = name.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdigit()]
    plain = ".".join(_escaped(part) for part in parts)
    if not numbered:
        return plain
    glob = [_escaped(part) for part in parts]
    glob[numbered[0]] = "*"
    everyone = {row.name for row in report.verdicts if fits_name(glob, row.name.split("."))}
    return ".".join(glob) if len(everyone) > 1 and everyone <= blamed else plain


def _escaped(part: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", part)


def _proposal(brick: str, findings: Sequence[Finding], report: DivergenceReport) -> list[str]:
    keys = {key for finding in findings for key in keys_of(finding)}
    same = [row for row in report.verdicts if key_of(row) in keys and row.verdict in NEEDS_ENTRY]
    sizes = [*map(size_of, findings), *map(size_of, same)]
    measured = [size for size in sizes if size is not None]
    finite = [size for size in measured if math.isfinite(size)]
    endless = any(each.verdict is Verdict.NONFINITE_ORIGIN for each in findings)
    if endless or not finite or len(finite) < len(measured):
        why = "its values are not finite" if endless or finite else "its error was not measured"
        return [f"# {_comment(brick)} cannot be accepted: {why}."]
    try:
        Accepted(_one_line(brick), "to be checked", 0.0)
    except AcceptError:
        return [f"# {_comment(brick)} cannot be accepted: no glob can stand for such a name."]
    top = findings[0]
    if all(each.verdict is Verdict.ACCEPTED for each in findings):
        reason = top.reason or "accepted before"
        limit = max(float(each.evidence.get("accepted_relative_l2", 0)) for each in findings)
    else:
        reason = f"not explained yet; likely cause: {top.cause or 'unknown'}"
        limit = _rounded_up(max(finite))
    figure = f"# measured: relative L2 {max(finite):.3g}" + (
        f", {_comment(top.where)}" if top.where else ""
    )
    return [
        figure,
        "[[accept]]",
        f"brick = {_quoted(brick)}",
        f"reason = {_quoted(reason)}",
        f"relative_l2 = {limit:.1e}",
    ]


def _rounded_up(size: float) -> float:
    """Return the next of 1, 2, 5, 10, ... with at least a tenth to spare."""
    wanted = max(size * 1.1, 1e-300)
    power = math.floor(math.log10(wanted))
    steps = [factor * 10.0**power for factor in (1.0, 2.0, 5.0, 10.0)]
    return float(f"{next(step for step in steps if step >= wanted * (1 - 1e-12)):.1e}")


def _quoted(text: str) -> str:
    return json.dumps(_one_line(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    """Return what a comment may hold: one line, and no control characters."""
    return "".join(each if each.isprintable() else " " for each in _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())
