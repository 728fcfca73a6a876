"""Launches on a GPU: a tensor has the same checksum and fingerprint there as on the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from brickline import BrickProfiler, Run
from brickline.checksums import fnv1a_f32
from brickline.fingerprints import fingerprint
from brickline.run_tensors import load_tensor, save_tensor

torch = pytest.importorskip("torch")


def test_checksums_do_not_depend_on_the_device() -> None:
    x = torch.arange(200, dtype=torch.bfloat16).reshape(2, 100)
    assert fnv1a_f32(x.cuda()) == fnv1a_f32(x)
    assert fnv1a_f32(x.cuda().T) == fnv1a_f32(x.T)


def test_a_gpu_is_compared_with_a_cpu(tmp_path: Path) -> None:
    x = torch.arange(200, dtype=torch.float32).reshape(2, 100)
    mine = BrickProfiler("gpu", enabled=True, path=tmp_path / "run")
    theirs = BrickProfiler("cpu", enabled=True)
    for p, device in ((mine, "cuda"), (theirs, "cpu")):
        here = x.to(device)
        p.trace("double", 0, 0, inputs=[here], outputs=[here * 2])
        p.trace("odd", 0, 1, inputs=[here], outputs=[here + (0.5 if device == "cuda" else 1)])
    report = mine.compare(theirs)
    assert [str(each) for each in report.verdicts.columns["verdict"]] == ["identical", "suspect"]
    assert "CPU (reference) checksum" in report.diagnosis
    assert "CUDA (candidate) checksum" in report.diagnosis
    mine.close()
    theirs.close()
    (part,) = Run.open(tmp_path / "run").parts
    assert {part.string(row["backend"]) for row in part.traces} == {"CUDA"}


def test_a_tensor_of_a_gpu_is_kept(tmp_path: Path) -> None:
    x = torch.randn(3, 4, device="cuda", dtype=torch.bfloat16).T
    save_tensor(tmp_path, fingerprint(x), x)
    found = load_tensor(tmp_path, fingerprint(x.cpu()))
    assert (found.astype(np.float32) == x.float().cpu().numpy()).all()
