"""`brickline run --torch`: the models of a program that says nothing of brickline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from recorded import rows_of

import brickline as brickline_package
from brickline.runs import Run

TRAINING = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
loss = nn.CrossEntropyLoss()
for _ in range(3):
    loss(model(torch.ones(5, 4)), torch.zeros(5, dtype=torch.long)).backward()
print("arguments", sys.argv[1:], type(model).forward is nn.Sequential.forward)
"""


def brickline(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("BRICKLINE_RUN", None)
    return subprocess.run(
        [sys.executable, "-m", "brickline", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "training.py"
    path.write_text(TRAINING)
    return path


def test_models_of_a_script_are_recorded(tmp_path: Path, script: Path) -> None:
    done = brickline("run", "--torch", "-o", "r.brick", "training.py", "--lr", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "arguments ['--lr', '1'] True\n"
    assert "Sequential, CrossEntropyLoss · 6 calls" in done.stderr
    rows = rows_of(tmp_path / "r.brick")
    forward = [row for row in rows if row.direction == 0 and row.position == 1]
    assert [row.name for row in forward] == ["Sequential", "0", "1", "2", "CrossEntropyLoss"]
    assert [row.position for row in rows if row.name == "CrossEntropyLoss"] == [0, 0, 1, 1, 2, 2]
    assert {row.position for row in rows if row.direction == 1} == {0, 1, 2}
    facts = Run.open(tmp_path / "r.brick").joined[0]["facts"]["recording"]
    assert facts["model"] == "Sequential, CrossEntropyLoss"


def test_a_module_and_its_options(tmp_path: Path, script: Path) -> None:
    done = brickline(
        *("run", "--torch", "--level", "op", "--steps", "1", "--include", "[02]"),
        *("-o", "r.brick", "-m", "training"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "r.brick")
    assert {row.position for row in rows if row.direction == 0} == {0}
    forward = [row for row in rows if row.direction == 0]
    assert {row.name for row in forward if row.params["level"] == "module"} == {"0", "2"}
    assert "aten.addmm.default" in {row.name for row in forward}


def test_time_alone(tmp_path: Path, script: Path) -> None:
    done = brickline("run", "--torch", "--no-fingerprints", "training.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "time alone" in done.stderr
    assert rows_of(tmp_path / "training.brick") == []
    report = brickline("report", "training.brick", cwd=tmp_path)
    assert "Linear" in report.stdout


def test_a_script_that_raises_keeps_what_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(TRAINING + "\nmodel(torch.ones(5, 3))\n")
    done = brickline("run", "--torch", "bad.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "mat1 and mat2 shapes cannot be multiplied" in done.stderr
    frames = done.stderr.split("Traceback")[1].split("RuntimeError")[0]
    assert f'File "{Path(brickline_package.__file__).parent}{os.sep}' not in frames
    assert 'File "<frozen runpy>"' not in frames
    assert len({row.position for row in rows_of(tmp_path / "bad.brick")}) == 4


def test_a_part_that_is_called_before_its_model(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        TRAINING.replace("for _", "model[0](torch.ones(1, 4))\nfor _").replace(
            "range(3)", "range(1)"
        )
    )
    done = brickline("run", "--torch", "parts.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = [row.name for row in rows_of(tmp_path / "parts.brick") if row.direction == 0]
    assert names == ["Linear", "Sequential", "0", "1", "2", "CrossEntropyLoss"]


def test_a_script_without_models(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("import torch\nprint(torch.ones(1).item())\n")
    done = brickline("run", "--torch", "none.py", cwd=tmp_path)
    assert done.returncode == 0
    assert "no PyTorch module was called" in done.stderr


SEEDED = """
import sys
import torch

torch.manual_seed(int(sys.argv[1]))
torch.nn.Linear(2, 2)(torch.ones(1, 2))
"""


@pytest.mark.parametrize("other", [7, 8])
def test_the_seed_is_that_of_the_first_call(tmp_path: Path, other: int) -> None:
    (tmp_path / "seeded.py").write_text(SEEDED)
    for name, seed in (("a.brick", 7), ("b.brick", other)):
        done = brickline("run", "--torch", "-o", name, "seeded.py", str(seed), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        run = Run.open(tmp_path / name)
        assert run.joined[0]["facts"]["recording"]["seed"] == seed
    compared = brickline("compare", "a.brick", "b.brick", cwd=tmp_path)
    assert ("torch's seed: 7, reference 8" in compared.stdout) == (other == 8)
    assert ("torch's seed" in compared.stdout) == (other == 8)


def test_a_wrong_option(tmp_path: Path, script: Path) -> None:
    done = brickline("run", "--torch", "--level", "kernel", "training.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "level: expected one of module, op, got 'kernel'" in done.stderr
    assert not (tmp_path / "training.brick").exists()


def test_twins_are_recorded_of_a_program_that_says_nothing(tmp_path: Path) -> None:
    script = tmp_path / "inferring.py"
    script.write_text(TRAINING.split("loss = ")[0] + "print(model.eval()(torch.ones(5, 4)).sum())")
    plain = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=300
    )
    done = brickline("run", "--torch", "--twin", "-o", "twin.brick", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "1 call has a float64 twin" in done.stderr
    shown = brickline("report", "twin.brick", cwd=tmp_path)
    assert "1 call has a float64 twin, made in" in shown.stdout
    refused = brickline("run", "--torch", "--twin", "--no-fingerprints", str(script), cwd=tmp_path)
    assert refused.returncode == 2
    assert "leave one out" in refused.stderr
