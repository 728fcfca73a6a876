"""Claims: `brickline top` takes little at ten frames a second, and costs whom it watches nothing.

The full interface runs in a pseudo-terminal of 120 by 40 and counts its own frames and CPU time, so
that its share of a core is that of ten frames a second even where a busy machine gives it fewer.

What being watched costs is too small to be seen at ten looks a second. So a reader takes hundreds,
each of them a spool read and folded, with the memory map and the load of the process as often as
they come with so many frames, and the cost of a decode step is divided by how many times ten looks
that is. It is held against the same reader at another process, because a reader takes its part of
the machine whomever it looks at.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import Claim, main

CHILD = """
import statistics, sys, time
import brickline as bl
from brickline.commands.demo_model import DemoModel
profiler = bl.BrickProfiler("watched", enabled=True)
model = DemoModel(profiler)
print("ready", flush=True)
for line in sys.stdin:
    # The same tokens at the same context lengths every time.
    model.reset()
    token, costs = model.prefill([1, 2, 3]).token, []
    for _ in range(int(line)):
        before = time.thread_time_ns()
        token = model.decode(token).token
        costs.append(time.thread_time_ns() - before)
    print(statistics.mean(costs), flush=True)
"""

DECOY = """
import time
import brickline as bl
from brickline.bricks import BrickId
profiler = bl.BrickProfiler("decoy", enabled=True)
bricks = [profiler.brick(each, layer=n) for n in range(6) for each in list(BrickId.ALL)[:16]]
print("ready", flush=True)
while True:
    with profiler.step(tokens=1, phase="decode"):
        for brick in bricks:
            with brick:
                pass
    time.sleep(0.02)
"""

INTERFACE = """
import json, sys, time
from brickline.top.app import TopApp
from brickline.top.watched import WatchedProcess

class Counted(TopApp):
    frames, cpu = -20, 0.0  # the first frames are what starting takes

    def look(self):
        now = time.process_time()
        self.frames += 1
        if self.frames == 0:
            self.begun = now
        elif self.frames > 0:
            self.cpu = now - self.begun
        super().look()

with WatchedProcess(int(sys.argv[1])) as process:
    app = Counted(process, 0.1)
    app.run()
with open(sys.argv[2], "w") as file:
    json.dump({"cpu_s": app.cpu, "frames": app.frames}, file)
"""

READER = """
import sys, threading, time
from brickline.top.live import Live
from brickline.top.machine import Machine
from brickline.top.watched import WatchedProcess
chosen, looks = None, 0

def obey():
    global chosen
    for line in sys.stdin:
        chosen = int(line) if line.strip() else None
        print(looks, time.monotonic(), flush=True)

watched = {int(pid): WatchedProcess(int(pid)) for pid in sys.argv[1:]}
lives = {pid: Live(process) for pid, process in watched.items()}
machines = {pid: Machine(pid) for pid in watched}
threading.Thread(target=obey, daemon=True).start()
print("ready", flush=True)
while True:
    pid = chosen
    if pid is not None:
        lives[pid].look()
        looks += 1
        if looks % 10 == 0:
            watched[pid]._look_around()
            machines[pid].look()
    time.sleep(0.002)
"""


def claims(quick: bool = False) -> list[Claim]:
    """Measure both claims."""
    with _started(CHILD) as child:
        return [_interface(child, 8 if quick else 20), _watched(child, quick)]


def _interface(child: subprocess.Popen[str], seconds: float) -> Claim:
    with tempfile.TemporaryDirectory(prefix="brickline-") as scratch:
        answer = Path(scratch) / "answer.json"
        with _terminal(child.pid, answer):
            deadline = time.monotonic() + 3 + seconds
            while time.monotonic() < deadline:
                _step_cost(child, 50)
        spent = json.loads(answer.read_text())
    return Claim(
        name="top: the interface at 10 frames a second",
        figure=10 * spent["cpu_s"] / spent["frames"],
        unit="of a core",
        target=0.10,
        note=f"{spent['frames']} frames of 120 x 40 with 16 bricks in 6 layers; CPU time of the"
        " interface, its threads included, per frame",
    )


def _watched(child: subprocess.Popen[str], quick: bool) -> Claim:
    rounds, steps = (10, 60) if quick else (40, 100)
    with _started(DECOY) as decoy, _started(READER, child.pid, decoy.pid) as reader:
        found = [_round(child, reader, decoy.pid, steps, at % 2 == 0) for at in range(rounds)]
    costs = [cost / (looks_per_s / 10) for cost, looks_per_s in found]
    low, middle, high = statistics.quantiles(costs, n=4)
    often = statistics.median(looks_per_s for _, looks_per_s in found)
    return Claim(
        name="top: added to a watched decode step",
        figure=middle,
        unit="relative",
        target=0.01,
        note=f"of 10 frames a second, from {often:.0f} looks a second, in which a step takes"
        f" {statistics.median(cost for cost, _ in found):+.1%}; half of {rounds} rounds lie"
        f" between {low:+.2%} and {high:+.2%}",
    )


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure the claims of this file."""
    return [claim.as_dict() for claim in claims(quick)]


def _round(
    child: subprocess.Popen[str],
    reader: subprocess.Popen[str],
    decoy: int,
    steps: int,
    watched_first: bool,
) -> tuple[float, float]:
    """Return what being watched adds to a step, and how often it was looked at in a second."""
    cost: dict[int, float] = {}
    looks_per_s = 0.0
    for pid in (child.pid, decoy) if watched_first else (decoy, child.pid):
        before, begun = _tell(reader, pid)
        cost[pid] = _step_cost(child, steps)
        after, ended = _tell(reader, "")
        if pid == child.pid:
            looks_per_s = (after - before) / (ended - begun)
    return cost[child.pid] / cost[decoy] - 1, looks_per_s


def _tell(reader: subprocess.Popen[str], line: int | str) -> tuple[float, float]:
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(f"{line}\n")
    reader.stdin.flush()
    looks, moment = reader.stdout.readline().split()
    return float(looks), float(moment)


def _step_cost(child: subprocess.Popen[str], steps: int) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{steps}\n")
    child.stdin.flush()
    return float(child.stdout.readline())


@contextmanager
def _started(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # One thread: a pool that spins while it waits would drown the effect.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _terminal(pid: int, answer: Path) -> Iterator[None]:
    """Run the interface in a terminal of its own; it leaves its figures when it is left."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", INTERFACE, str(pid), str(answer)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
        start_new_session=True,
    )
    os.close(theirs)
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    try:
        yield
        os.write(ours, b"q")
        process.wait(20)
    finally:
        process.kill()
        process.wait()


def _drain(terminal: int) -> None:
    with suppress(OSError):
        while os.read(terminal, 65536):
            pass


if __name__ == "__main__":
    sys.exit(main(run, description=__doc__))
