"""Recordings that end before the program wants them to: a full disk, and SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from recorded import rows_of

import brickline as bl
from brickline.adapters.torch_recorder import FULL_DISK
from brickline.runs import Run

MODEL = """
import sys
import torch
from torch import nn
import brickline as bl

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
x = torch.ones(2, 8)
torch.set_grad_enabled(sys.argv[2] == "grad")
"""

FULL = """
import resource
import warnings

rows = 0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with bl.record(sys.argv[1], model, level=sys.argv[3]) as recording:
        expected = model(x).clone()
        (spool,) = (recording.path / "spool").iterdir()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (spool.stat().st_size + 300_000, hard))
        for _ in range(400):
            made = model(x)
            assert torch.equal(made, expected)
            if made.requires_grad:
                made.sum().backward()
        sys.stderr.flush()
print("the program goes on")
for warning in caught:
    print(warning.category.__name__, warning.message)
print(recording.summary())
"""

KILLED = """
class Last(nn.Module):
    def forward(self, x):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
        return x

model.append(Last())
with bl.record(sys.argv[1], model):
    model(x)
"""


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("BRICKLINE_RUN", None)
    return subprocess.run(
        [sys.executable, "-c", MODEL + program, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("mode", ["grad", "no grad"])
def test_a_full_disk_ends_the_recording_and_not_the_program(
    tmp_path: Path, mode: str, level: str
) -> None:
    done = run(FULL, tmp_path / "r", mode, level)
    assert done.returncode == 0, done.stderr
    assert "the program goes on" in done.stdout
    assert done.stdout.count("RuntimeWarning brickline stopped recording") == 1, done.stdout
    assert done.stdout.count("Warning") == 1, done.stdout
    assert "free some space" in done.stdout
    assert FULL_DISK in done.stdout
    found = Run.open(tmp_path / "r")
    assert found.problems == []
    facts = found.manifest["facts"]["recording"]
    recorded = facts["counts"]["root calls"]
    assert facts["unobserved"][FULL_DISK] == 402 - recorded
    rows = rows_of(tmp_path / "r")
    assert {row.position for row in rows} >= set(range(recorded - 1))
    assert len([row for row in rows if row.direction == 0 and row.position == 0]) >= 13
    calls = sum(row.params["level"] == "module" and not row.direction for row in rows)
    assert facts["counts"]["module calls"] == calls
    report = bl.compare(tmp_path / "r", tmp_path / "r")
    assert report.status == "inconclusive"
    assert "disk" in " ".join(report.coverage.notes)


@pytest.mark.parametrize("mode", ["grad", "no grad"])
def test_what_had_ended_survives_sigkill_in_the_first_call(tmp_path: Path, mode: str) -> None:
    done = run(KILLED, tmp_path / "r", mode)
    assert done.returncode == -signal.SIGKILL
    rows = rows_of(tmp_path / "r")
    assert [row.name for row in rows] == [str(number) for number in range(12)]
    assert all(row.inputs[0].fingerprint and row.outputs[0].fingerprint for row in rows)
    assert bl.compare(tmp_path / "r", tmp_path / "r").status != "diverged"
