"""compute-sanitizer over megakernels: no error of memory, no race between the warps of a worker.

Some of the tests beside this one are run again below it. With BRICKLINE_RACECHECK every lane
arrives at barriers itself, and those of a part of a block lie in shared memory, which is what
racecheck follows. It finds nothing in the others either, but takes minutes for them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
# Rows copied ahead by their sizes, 77 x 256 and 300 x 1024.
PLANS = "77 or 1024 or without_a_hop or skips_what"
QUEUES = "every_block or shared or again or starves or fault or one_region or catalog or two_blocks"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")

RACES = """
import sys
import torch
from brickline import Kernel, Megakernel, Param, Plan

way, is_right = sys.argv[1], sys.argv[2] == "right"


def kernel_of(lanes):
    return Kernel(
        f"turn_{lanes}",
        '''BRICKLINE void turn(Block& block, float* y) {
               float* near = block.shared<float>(64);
               block.each(64, [&](int64_t k) { near[k] = float(k); });
               if (IS_RIGHT) block.sync();
               block.each(64, [&](int64_t k) { y[k] = near[63 - k]; });
           }''',
        [Param("y", "f32", 64, "write")],
        global_size=1,
        local_size=lanes,
        shared_bytes=256,
        entry="turn",
        defines={"IS_RIGHT": int(is_right)},
    )


if way == "plan":
    plan = Plan("turning")
    plan.launch(kernel_of(64), y=plan.buffer("y", 64, "f32"))
    plan.prepare("CUDA:0", "megakernel")().read("y")
else:  # items use 64 of the 256 threads of their worker
    with Megakernel("CUDA:0", [kernel_of(64), kernel_of(256)], workers=2) as queue:
        queue.submit("turn_64", writes=[torch.zeros(64, device="cuda")])
        queue.drain()
"""


def found_by(tool: str, *command: str) -> tuple[int, str]:
    """How much a tool finds in a program of Python, and all that was printed."""
    sanitizer = shutil.which("compute-sanitizer", path=PROGRAMS)
    if not sanitizer:
        pytest.skip("compute-sanitizer is not on PATH")
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [
            *(sanitizer, "--tool", tool, "--report-api-errors", "no"),
            *("--target-processes", "all", sys.executable, *command),
        ],
        env={**alone, "BRICKLINE_RACECHECK": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    return sum(int(count) for count in SUMMARY.findall(printed)), printed


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize(
    ("file", "names"),
    [("test_megakernel.py", PLANS), ("test_megakernel_queue.py", QUEUES)],
    ids=["plans", "queues"],
)
def test_workers_access_memory_as_they_may(tool: str, file: str, names: str) -> None:
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    count, printed = found_by(tool, *tests, str(HERE / file), "-k", names)
    assert SUMMARY.search(printed)
    assert re.search(r"[1-9]\d* passed", printed)
    assert count == 0, printed[-6000:]


@pytest.mark.parametrize("way", ["plan", "queue"])
def test_a_race_would_be_found(way: str, tmp_path: Path) -> None:
    script = tmp_path / "races.py"
    script.write_text(RACES, encoding="utf-8")
    assert found_by("racecheck", str(script), way, "wrong")[0] > 0
    assert found_by("racecheck", str(script), way, "right")[0] == 0
