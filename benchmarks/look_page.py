"""Claims: what the HTML page of a profile costs, for a run of a million traces.

* `brickline report RUN --html PAGE` takes at most 15 s and 1 GiB, reading the run included.
* The page is at most 4 MiB, and in Chromium every section of it is there within 2 s.

The run is that of `look_run`. A second one holds what weighs most on a page: a graph of a million
nodes, a million entries of a timeline, and thousands of bricks with long names. The command runs in
a fresh process; Chromium opens the file as a person would, and without chromium and playwright that
claim is not judged.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Claim, main, spread
from look_divergence import opening_s, write_page
from look_run import TRACES, million

HEAVY_STEPS = 260
HEAVY_LAYERS = 64
HEAVY_BRICKS = 60
DYNAMIC = 3000


def heavy_run(path: Path, steps: int) -> Path:
    """Record a run whose graph, timeline and names are all larger than a page."""
    import brickline as bl

    with bl.BrickProfiler(
        "heavy", enabled=True, device="NULL", path=path, timeline_steps=1024, graph=True
    ) as profiler:
        bricks = [
            profiler.brick(f"work_{at}", layer=layer)
            for layer in range(HEAVY_LAYERS)
            for at in range(HEAVY_BRICKS)
        ]
        for _ in range(steps):
            with profiler.step(tokens=1, phase="decode"):
                for brick in bricks:
                    with brick:
                        profiler.advance(1500)
        for at in range(DYNAMIC):
            with profiler.brick(f"dynamic.{at}." + "x" * (at % 200), layer=at % HEAVY_LAYERS):
                profiler.advance(at)
    return path


def claims_of(what: str, run: Path, page: Path, repeats: int) -> list[Claim]:
    """The four claims of one run."""
    took = [write_page(run, page) for _ in range(repeats)]
    opened = opening_s(page)
    best = min(took, key=lambda each: each["cpu_s"])
    walls = spread([each["wall_s"] for each in took], 1)
    known = opened if isinstance(opened, list) else None
    note = f"{spread(known, 2)} s over {len(known)} openings" if known else str(opened)
    ready = statistics.median(known) if known else None
    return [
        Claim(what, best["cpu_s"], "s", 15.0, note=f"CPU time; {walls} s by the wall"),
        Claim(f"{what}, memory", best["memory_mib"], "MiB", 1024.0, note="largest resident set"),
        Claim(f"{what}, size", best["page_mib"], "MiB", 4.0),
        Claim(f"{what}, ready in Chromium", ready, "s", 2.0, note=note),
    ]


def claims(quick: bool) -> list[Claim]:
    traces = TRACES // 20 if quick else TRACES
    steps = HEAVY_STEPS // 20 if quick else HEAVY_STEPS
    repeats = 1 if quick else 3
    with tempfile.TemporaryDirectory(prefix="brickline-look-") as folder:
        page = Path(folder) / "page.html"
        heavy = heavy_run(Path(folder) / "heavy.brick", steps)
        nodes = steps * (HEAVY_LAYERS * (HEAVY_BRICKS + 1) + 1)
        return [
            *claims_of(f"page of a run of {traces:,} traces", million(traces), page, repeats),
            *claims_of(f"page of a run with a graph of {nodes:,} nodes", heavy, page, repeats),
        ]


def run(quick: bool = False) -> list[dict[str, Any]]:
    return [claim.as_dict() for claim in claims(quick)]


if __name__ == "__main__":
    sys.exit(main(run, description=__doc__))
