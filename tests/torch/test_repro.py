"""A repro fails in a fresh process as its op did, or there is none and a reason."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="torch is not installed: pip install 'brickline[torch]'"
)

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from brickline.checking import repro as repros  # noqa: E402
from brickline.checking.evidence import Evidence  # noqa: E402
from brickline.checking.repro import Repro, write_repro  # noqa: E402

Tensor = Any

SOURCE = """
import torch

STEPS = []

class Scaled(torch.nn.Module):
    def __init__(self, size, factor):
        super().__init__()
        self.inner = torch.nn.Linear(size, size)
        self.factor = factor

    def forward(self, x, *, also=None):
        return {"out": self.factor * self.inner(x)}


class Slow(Scaled):
    def forward(self, x):
        import os, time
        if os.environ.get("HANG"):
            time.sleep(600)
        return self.factor * self.inner(x)


class OnlyHere(Scaled):
    def forward(self, x):
        return (self.factor if STEPS else 1.0) * self.inner(x)


def doubled(x, y):
    return 2.0 * (x + y)
"""


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(7)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's module that was imported from a file."""
    import importlib.util

    path = tmp_path / "ported_layers.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("ported_layers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ported_layers", module)
    spec.loader.exec_module(module)
    return module


def run(path: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def found(made: Repro) -> Path:
    assert made.path is not None, made.reason
    assert made.reason is None
    return made.path


def in_this_process(path: Path, timeout: float) -> None:
    """Prove a repro without the seconds that a fresh process takes to import torch."""
    assert runpy.run_path(str(path))["main"]() == 1


def of_linear(wrong: float, rows: int = 64, size: int = 32, **options: Any) -> Evidence:
    """A linear layer that is held against another weight in some rows."""
    layer = nn.Linear(size, 24, **options)
    x = torch.randn(rows, size)
    weight = layer.weight.detach().double().clone()
    weight[5] *= 1 + wrong
    bias = None if layer.bias is None else layer.bias.detach().double()
    exact = F.linear(x.double(), weight, bias)
    with torch.no_grad():
        actual = layer(x)
    return Evidence("layers.3.up", actual, exact, exact.float(), module=layer, args=(x,))


def test_a_linear_layer(tmp_path: Path) -> None:
    path = found(write_repro(of_linear(0.5), tmp_path / "repros", z=12.5))
    text = path.read_text()
    assert path.name == "repro_layers_3_up.py"
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert "It contains weights and inputs" in text
    assert "layers.3.up (z 12.5)" in text
    assert "torch.nn.Linear(in_features=32" in text
    assert "weights_only=True" in text
    assert "output 1x24" in text, "cut to one row"
    assert "brickline" not in text
    status, said = run(path)
    assert status == 1
    assert "relative L2" in said
    assert said.strip().endswith("FAILS")


def test_it_says_when_it_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repros, "_prove", in_this_process)
    path = found(write_repro(of_linear(0.5, bias=False), tmp_path))
    text = path.read_text()
    mended = text.replace("assign=True)", "assign=True); module.weight.data[5] *= 1.5")
    assert mended != text
    path.write_text(mended)
    status, said = run(path)
    assert (status, said.strip().splitlines()[-1]) == (0, "MENDED")


def test_it_says_when_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repros, "_prove", in_this_process)
    path = found(write_repro(of_linear(0.5), tmp_path))
    path.write_text(path.read_text().replace("torch.nn.Linear(", "torch.nn.Linera("))
    status, said = run(path)
    assert status == 2
    assert "cannot run: AttributeError" in said


def test_large_data_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repros, "EMBEDDED_BYTES", 1000)
    path = found(write_repro(of_linear(0.5), tmp_path))
    beside = path.with_suffix(".pt")
    assert os.stat(beside).st_mode & 0o777 == 0o600
    assert len(path.read_text()) < 4000
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    path.rename(moved / path.name)
    beside.rename(moved / beside.name)
    assert run(moved / path.name)[0] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.LayerNorm(16), (2, 8, 16)),
        (lambda: nn.RMSNorm(16, eps=1e-3), (2, 8, 16)),
        (lambda: nn.Conv1d(4, 8, 3, padding=1, bias=False), (2, 4, 16)),
        (lambda: nn.GroupNorm(2, 4), (3, 4, 8)),
        (lambda: nn.BatchNorm1d(4).eval(), (6, 4)),
    ],
)
def test_known_layers(
    layer: Any,
    shape: tuple[int, ...],
    dtype: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repros, "_prove", in_this_process)
    module = layer().to(dtype)
    x = torch.randn(shape).to(dtype)
    with torch.no_grad():
        actual = module(x)
        exact = module.double()(x.double()) * 1.5
    module.to(dtype)
    evidence = Evidence("norm", actual, exact, exact.to(dtype), module=module, args=(x,))
    text = found(write_repro(evidence, tmp_path)).read_text()
    assert f"torch.nn.{type(module).__name__}(" in text
    assert "weights_only=True" in text


def test_an_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repros, "_prove", in_this_process)
    module, tokens = nn.Embedding(10, 8), torch.tensor([[1, 2, 3]])
    exact = module(tokens).detach().double()
    exact[0, 1] *= -1
    evidence = Evidence("embed", module(tokens).detach(), exact, module=module, args=(tokens,))
    found(write_repro(evidence, tmp_path))


def test_an_op(tmp_path: Path) -> None:
    a, b = torch.randn(16, 8), torch.randn(8, 4)
    exact = a.double() @ b.double()
    exact[3] += 1
    evidence = Evidence("scores", a @ b, exact, op="aten.mm.default", inputs=[a, b])
    text = found(write_repro(evidence, tmp_path)).read_text()
    assert "torch.ops.aten.mm.default" in text
    assert "output 1x4" in text


def test_a_module_from_a_file(other: Any, tmp_path: Path) -> None:
    module, x = other.Scaled(16, 1.5), torch.randn(8, 16)
    exact = module.inner(x).detach().double()
    evidence = Evidence(
        "block", module(x)["out"].detach(), exact, module=module, args=(x,), kwargs={"also": None}
    )
    text = found(write_repro(evidence, tmp_path / "out")).read_text()
    assert "ported_layers.py" in text
    assert "weights_only=True" in text, "only the classes of the module are let in"


def test_a_function_from_a_file(other: Any, tmp_path: Path) -> None:
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    exact = (x + y).double()
    evidence = Evidence("add", other.doubled(x, y), exact, module=other.doubled, args=(x, y))
    text = found(write_repro(evidence, tmp_path / "out")).read_text()
    assert ".doubled" in text
    assert "output 1x16" in text


def test_a_local_class_is_exported(tmp_path: Path) -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * 2

    module, x = Local(), torch.randn(8, 16)
    exact = (x * module.weight).detach().double()
    evidence = Evidence("local", module(x).detach(), exact, module=module, args=(x,))
    assert "torch.export.load" in found(write_repro(evidence, tmp_path)).read_text()


STARTED = """
import sys
import torch
from brickline.checking.evidence import Evidence  # noqa: E402
from brickline.checking.repro import write_repro  # noqa: E402

class Mine(torch.nn.Module):
    def forward(self, x):
        return 2 * x

if __name__ == "__main__":
    x = torch.randn(8, 16)
    print(write_repro(Evidence("op", 2 * x, x.double(), module=Mine(), args=(x,)), sys.argv[1]))
"""


def test_a_class_of_the_script_that_was_started(tmp_path: Path) -> None:
    script = tmp_path / "started.py"
    script.write_text(STARTED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert "reason=None" in done.stdout, done.stdout + done.stderr
    (path,) = (tmp_path / "out").iterdir()
    assert "started.py" in path.read_text()
    assert "export" not in path.read_text()


def test_a_closure_is_exported(tmp_path: Path) -> None:
    factor, x = 2.0, torch.randn(8, 16)
    evidence = Evidence("scale", x * 2, x.double(), module=lambda t: t * factor, args=(x,))
    assert "torch.export.load" in found(write_repro(evidence, tmp_path)).read_text()


class TestNoRepro:
    """Each with a reason, and nothing left behind."""

    def left(self, made: Repro, directory: Path) -> str:
        assert made.path is None
        assert not list(directory.glob("repro_*"))
        return str(made.reason)

    def test_it_does_not_fail_again(self, tmp_path: Path) -> None:
        x = torch.randn(8, 16)
        evidence = Evidence("op", x * 2, x.double(), module=lambda t: t * 1.0, args=(x,))
        reason = self.left(write_repro(evidence, tmp_path), tmp_path)
        assert reason == "it does not fail again on its own inputs in this process"

    def test_it_does_not_fail_in_a_fresh_process(
        self, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other.STEPS.append(1)
        module, x = other.OnlyHere(16, 1.5), torch.randn(8, 16)
        exact = module.inner(x).detach().double()
        evidence = Evidence("block", module(x).detach(), exact, module=module, args=(x,))
        monkeypatch.setattr(repros, "exported", lambda evidence: None)
        reason = self.left(write_repro(evidence, tmp_path / "out"), tmp_path / "out")
        assert "does not fail in a fresh process" in reason

    def test_it_hangs(self, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        module, x = other.Slow(16, 1.5), torch.randn(8, 16)
        exact = module.inner(x).detach().double()
        evidence = Evidence("block", module(x).detach(), exact, module=module, args=(x,))
        monkeypatch.setattr(repros, "exported", lambda evidence: None)
        prove = repros._prove

        def hanging(path: Path, timeout: float) -> None:
            monkeypatch.setenv("HANG", "1")
            prove(path, timeout)

        monkeypatch.setattr(repros, "_prove", hanging)
        start = time.monotonic()
        reason = self.left(write_repro(evidence, tmp_path / "out", timeout=8), tmp_path / "out")
        assert "did not end within 8 s" in reason
        assert time.monotonic() - start < 60

    def test_it_cannot_be_pickled(self, tmp_path: Path) -> None:
        import threading

        lock, x = threading.Lock(), torch.randn(8, 16)
        evidence = Evidence("op", x * 2, x.double(), module=_locked, args=(x, lock))
        reason = self.left(write_repro(evidence, tmp_path), tmp_path)
        assert "cannot be pickled" in reason

    def test_nothing_is_known(self, tmp_path: Path) -> None:
        x = torch.randn(8, 16)
        reason = self.left(write_repro(Evidence("op", x * 2, x.double()), tmp_path), tmp_path)
        assert reason == "neither its module nor its op is known"

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        made = write_repro(of_linear(0.5), tmp_path / "file" / "repros")
        assert made.path is None
        assert "cannot be written" in str(made.reason)

    def test_it_raises(self, tmp_path: Path) -> None:
        def broken(x: Tensor) -> Tensor:
            raise KeyError("gone")

        x = torch.randn(8, 16)
        evidence = Evidence("op", x * 2, x.double(), module=broken, args=(x,))
        reason = self.left(write_repro(evidence, tmp_path), tmp_path)
        assert "KeyError" in reason


def _locked(x: Tensor, lock: Any) -> Tensor:
    return x * 2


def test_names_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repros, "_prove", in_this_process)
    first = found(write_repro(of_linear(0.5), tmp_path))
    second = found(write_repro(of_linear(0.5), tmp_path))
    assert first != second
    assert second.name == "repro_layers_3_up_2.py"
