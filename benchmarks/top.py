"""Claim: `brickline top` costs the process that it watches at most 1 %.

A child decodes the same tokens through the demo model again and again and reports its own CPU
time, with and without a watcher at its default refresh, alternating.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

from harness import Claim

CHILD = """
import sys, time
import brickline as bl
from brickline.commands.demo_model import DemoModel
profiler = bl.BrickProfiler("watched", enabled=True)
model = DemoModel(profiler)
print("ready", flush=True)
for line in sys.stdin:
    # The same tokens at the same context lengths every time.
    model.reset()
    token = model.prefill([1, 2, 3]).token
    before = time.process_time()
    for _ in range(int(line)):
        token = model.decode(token).token
    print(time.process_time() - before, flush=True)
"""


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure the claim of this file."""
    rounds, steps = (5, 600) if quick else (15, 1200)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # One thread: a pool that spins while it waits would drown the effect.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    ratios = []
    try:
        child.stdout.readline()

        def cpu_seconds() -> float:
            child.stdin.write(f"{steps}\n")
            child.stdin.flush()
            return float(child.stdout.readline())

        cpu_seconds()
        for _ in range(rounds):
            alone = cpu_seconds()
            watcher = subprocess.Popen(
                [sys.executable, "-m", "brickline", "top", str(child.pid), "--plain"],
                stdout=subprocess.DEVNULL,
            )
            time.sleep(1.0)  # the watcher's own start is not what is measured
            watched = cpu_seconds()
            watcher.terminate()
            watcher.wait()
            ratios.append(watched / alone - 1)
    finally:
        child.kill()
        child.wait()
    return [
        Claim(
            name="top: cost to the watched process",
            figure=statistics.median(ratios),
            unit="relative",
            target=0.01,
            note=f"CPU time a decode step; {min(ratios):+.3f} to {max(ratios):+.3f} over rounds",
        ).as_dict()
    ]


if __name__ == "__main__":
    import json

    print(json.dumps(run("--quick" in sys.argv), indent=1))
