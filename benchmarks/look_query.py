"""Claims: what questions about a run of a million traces cost, with its tables published.

* `brickline query RUN` gives the ten slowest bricks, with percentiles, within 1 s.
* The ten slowest kernels, out of all the traces, likewise.

Each command runs in a fresh process, so starting Python and loading DuckDB are in the figure. It is
CPU time of the process and its threads; wall time, and the first call, which publishes the tables,
are in the note.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Claim, main, spread
from look_run import TRACES, million

COMPILED = Path(tempfile.gettempdir()) / f"brickline-look-{os.getuid()}" / "compiled"
QUESTIONS = {
    "the slowest ten bricks": "FROM brick_times ORDER BY total_ns DESC LIMIT 10",
    "the slowest ten kernels": "FROM kernel_times ORDER BY total_ns DESC LIMIT 10",
}


def ask(run: Path, sql: str) -> tuple[float, float]:
    """Run the command in a fresh process; return CPU and wall time in seconds."""
    began = time.perf_counter()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "brickline", "query", str(run), sql],
        # Compiled once, as an installed package is.
        {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(COMPILED)},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"brickline query {run} {sql!r} ended with {status}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - began


def claims(quick: bool) -> list[Claim]:
    if importlib.util.find_spec("duckdb") is None:
        raise ImportError("duckdb is not installed")
    run = million(TRACES // 20 if quick else TRACES)
    _, first_s = ask(run, "FROM runs LIMIT 1")
    repeats, what = (3, f"{TRACES // 20:,}") if quick else (9, f"{TRACES:,}")
    return [
        _claim(run, f"query: {name} of {what} traces", sql, repeats, first_s)
        for name, sql in QUESTIONS.items()
    ]


def _claim(run: Path, name: str, sql: str, repeats: int, first_s: float) -> Claim:
    took = [ask(run, sql) for _ in range(repeats)]
    walls = [wall for _, wall in took]
    return Claim(
        name,
        statistics.median(cpu for cpu, _ in took),
        "s",
        1.0,
        note=f"{spread(walls, 2)} s by the wall over {repeats} calls; the call before them, which"
        f" publishes the tables where they are not yet, took {first_s:.1f} s",
    )


def run(quick: bool = False) -> list[dict[str, Any]]:
    return [claim.as_dict() for claim in claims(quick)]


if __name__ == "__main__":
    sys.exit(main(run, description=__doc__))
