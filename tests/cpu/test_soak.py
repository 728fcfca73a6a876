"""Soak: minutes of recording in every way at once, watched all the while.

Every entry is counted by the test as well. In the end nothing may be missing, and memory and the
run's size may not have grown with the number of entries.
"""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from brickline import BrickProfiler, Run, Sampling, TileLevel
from brickline.profile import profile_from_run

SECONDS = float(os.environ.get("SOAK_SECONDS", "90"))
THREADS = 4
BRICKS = [f"brick {number}" for number in range(12)]
PHASES = ("prefill", "decode", "")


def resident_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * (resource.getpagesize() // 1024)


class Worker(threading.Thread):
    """Records until it is told to stop, and counts what it does."""

    def __init__(self, profiler: BrickProfiler, seed: int) -> None:
        super().__init__()
        self.profiler, self.random = profiler, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.steps = 0
        self.stopped = False
        self.handles = {
            (name, layer): profiler.brick(name, layer=layer, elements=layer + 1)
            for name in BRICKS
            for layer in range(4)
        }

    def run(self) -> None:
        while not self.stopped:
            phase = self.random.choice(PHASES)
            with self.profiler.step(tokens=1, phase=phase):
                self.steps += 1
                for _ in range(50):
                    self.enter_one()
                self.profiler.mark()

    def enter_one(self) -> None:
        name, layer = self.random.choice(BRICKS), self.random.randrange(4)
        handle, profiler = self.handles[name, layer], self.profiler
        form = self.random.randrange(7)
        if form == 0:
            with handle:
                pass
        elif form == 1:
            handle.start()
            handle.stop()
        elif form == 2:
            handle.mark()
        elif form == 3:
            profiler.stop_brick(profiler.start_brick(name, layer), layer + 1)
        elif form == 4:
            with profiler.brick(name, layer=layer, elements=layer + 1):
                profiler.tiles.record(TileLevel.MACRO, 10, row=layer, column=0)
        elif form == 5:
            profiler.record_elapsed(name, 100, layer + 1)
        else:
            with handle, self.handles[BRICKS[0], 0]:
                pass
            self.counts[BRICKS[0]] += 1
            self.elements[BRICKS[0]] += 1
        self.counts[name] += 1
        self.elements[name] += layer + 1


@pytest.mark.long
def test_hours_of_recording_in_little_room(tmp_path: Path) -> None:
    path = tmp_path / "run"
    profiler = BrickProfiler("soak", enabled=True, path=path, sampling=Sampling(steps=3))
    workers = [Worker(profiler, seed) for seed in range(THREADS)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + SECONDS
    seen, sizes, resident = 0, [], []
    while time.monotonic() < deadline:
        time.sleep(SECONDS / 30)
        found = profile_from_run(Run.open(path))
        assert found.problems == ()
        assert found.recording.counted >= seen
        seen = found.recording.counted
        sizes.append(sum(os.path.getsize(spool) for spool in path.glob("spool/*.spool")))
        resident.append(resident_kib())
    for worker in workers:
        worker.stopped = True
    for worker in workers:
        worker.join()
    counts = sum((worker.counts for worker in workers), Counter[str]())
    elements = sum((worker.elements for worker in workers), Counter[str]())
    profiler.close()
    profile = profile_from_run(Run.open(path))
    rows = {row.name: row for row in profile.bricks}
    assert {name: rows[name].count for name in BRICKS} == counts
    assert {name: rows[name].total_elements for name in BRICKS} == elements
    assert sum(step.count for step in profile.steps.values()) == sum(w.steps for w in workers)
    assert (profile.recording.lost, profile.recording.orphan_exits) == (0, 0)
    assert sizes[-1] == sizes[len(sizes) // 3], "the run grows with its entries"
    assert resident[-1] - resident[len(resident) // 3] < 8 * 1024, "memory grows with entries"
