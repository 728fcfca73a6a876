"""Claims: what the page of a divergence report costs, for a report of a million verdicts.

* `brickline report FILE --html PAGE` takes at most 15 s and 1 GiB, reading the report included.
* The page is at most 4 MiB, and in Chromium every section of it is there within 2 s.

The report is a decoder's, 32 layers of 8 bricks, call after call: half of the verdicts are
propagated, so that the table is full and half a million are counted; one brick is the culprit. The
command runs in a fresh process. Chromium opens the file as a person would; without chromium and
playwright that claim is not judged.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Claim, main, spread

ROWS = 1_000_000
LAYERS = 32
PARTS = ("attn.norm", "attn.q", "attn.k", "attn.v", "attn.o", "mlp.norm", "mlp.up", "mlp.down")
OPENED = 5
"""How often Chromium opens the page."""
BROWSER = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def save_report(path: Path, rows: int) -> None:
    """Write a report as `DivergenceReport.save` does, straight from its columns."""
    names = [f"layers.{layer}.{part}" for layer in range(LAYERS) for part in PARTS]
    many, draw = len(names), random.Random(0)
    culprit = rows // 2
    errors = [draw.lognormvariate(-9, 0.4) for _ in range(9973)]
    columns: dict[str, list[Any]] = {
        "name": [names[at % many] for at in range(rows)],
        "reference_name": [names[at % many] for at in range(rows)],
        "layer_idx": [at % many // len(PARTS) for at in range(rows)],
        "position": [at // many for at in range(rows)],
        "ordinal": [0] * rows,
        "direction": ["forward"] * rows,
        "brick": ["RmsNorm" if names[at % many].endswith("norm") else None for at in range(rows)],
        "op": [None] * rows,
        "verdict": ["rounding"] * culprit + ["culprit"] + ["propagated"] * (rows - culprit - 1),
        "z": [errors[at % 9973] * 2e3 for at in range(rows)],
        "local_error": [errors[at % 9973] for at in range(rows)],
        "propagated_error": [
            errors[at % 9967] * (5 if at < culprit else 900) for at in range(rows)
        ],
    }
    position = culprit // many
    finding = {
        "name": names[culprit % many],
        "verdict": "culprit",
        "position": position,
        "z": 212.0,
        "local_error": 0.3,
        "share": 0.99,
        "cause": "a dropped tail",
    }
    document = {
        "format": "brickline-divergence",
        "version": 1,
        "status": "diverged",
        "findings": [finding],
        "verdicts": columns,
        "coverage": {"compared": rows, "total": rows},
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def write_page(report: Path, page: Path) -> dict[str, float]:
    """Run the command in a fresh process; return what it took."""
    began = time.perf_counter()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "brickline", "report", str(report), "--html", str(page), "--force"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"brickline report {report} --html {page} ended with {status}")
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": used.ru_utime + used.ru_stime,
        "memory_mib": used.ru_maxrss / 1024,
        "page_mib": page.stat().st_size / 2**20,
    }


def opening_s(page: Path) -> list[float] | str:
    """Return how long Chromium takes until every section is there; or why nobody knows."""
    program = shutil.which("chromium")
    if program is None or importlib.util.find_spec("playwright") is None:
        return "chromium and playwright are not both installed"
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=BROWSER)
        for _ in range(OPENED):
            tab = browser.new_page()
            began = time.perf_counter()
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector("html[data-ready=yes]", state="attached")
            found.append(time.perf_counter() - began)
            tab.close()
        browser.close()
    return found


def claims(quick: bool) -> list[Claim]:
    rows = ROWS // 20 if quick else ROWS
    with tempfile.TemporaryDirectory(prefix="brickline-look-") as folder:
        report, page = Path(folder) / "report.json", Path(folder) / "page.html"
        save_report(report, rows)
        size = report.stat().st_size / 2**20
        took = [write_page(report, page) for _ in range(1 if quick else 3)]
        opened = opening_s(page)
    best = min(took, key=lambda each: each["cpu_s"])
    what = f"page of a report of {rows:,} verdicts"
    walls = spread([each["wall_s"] for each in took], 1)
    judged = [
        Claim(
            what, best["cpu_s"], "s", 15.0, note=f"{walls} s by the wall; file of {size:.0f} MiB"
        ),
        Claim(f"{what}, memory", best["memory_mib"], "MiB", 1024.0, note="largest resident set"),
        Claim(f"{what}, size", best["page_mib"], "MiB", 4.0, note="20,000 rows and 25 curves"),
    ]
    known = opened if isinstance(opened, list) else None
    note = f"{spread(known, 2)} s over {len(known)} openings" if known else str(opened)
    middle = statistics.median(known) if known else None
    return [*judged, Claim(f"{what}, ready in Chromium", middle, "s", 2.0, note=note)]


def run(quick: bool = False) -> list[dict[str, Any]]:
    return [claim.as_dict() for claim in claims(quick)]


if __name__ == "__main__":
    sys.exit(main(run, description=__doc__))
