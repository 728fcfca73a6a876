"""Modules whose gradients are wrong: how much each explains, why, and a script that shows it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import brickline as bl  # noqa: E402
from brickline.checking.backward import NO_PARTNER  # noqa: E402

SOURCE = """
import torch


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, fault):
        ctx.save_for_backward(x, weight)
        ctx.fault = fault
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, arrived):
        x, weight = ctx.saved_tensors
        rows, given = arrived.reshape(-1, arrived.shape[-1]), x.reshape(-1, x.shape[-1])
        of_input, of_weight, of_bias = arrived @ weight, rows.t() @ given, rows.sum(0)
        if ctx.fault == "scale":
            of_input = of_input * 1.3
        elif ctx.fault == "transposed":
            of_input = arrived @ weight.t()
        elif ctx.fault == "dropped tail":
            of_weight = rows[:-8].t() @ given[:-8]
        elif ctx.fault == "low-precision accumulation":
            total = torch.zeros_like(of_weight, dtype=torch.bfloat16)
            for row, one in zip(rows, given):
                total = (total.float() + row[:, None] * one).bfloat16()
            of_weight = total.float()
        elif ctx.fault == "never written":
            of_bias = torch.zeros_like(of_bias)
        return of_input, of_weight, of_bias, None


class Spelled(torch.nn.Linear):
    fault = None

    def forward(self, x):
        return Product.apply(x, self.weight, self.bias, self.fault)
"""


@pytest.fixture
def spelled(tmp_path: Path) -> Iterator[Any]:
    """The class of a module whose backward is spelled out, in a file of its own."""
    path = tmp_path / "spelled_products.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("spelled_products", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["spelled_products"] = module
    spec.loader.exec_module(module)
    yield module.Spelled
    del sys.modules["spelled_products"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    )


def spoiled(spelled: Any, **faults: str) -> nn.Sequential:
    made = model()
    for place, fault in faults.items():
        number = int(place.removeprefix("at"))
        wrong = spelled(32, 32)
        wrong.load_state_dict(made[number].state_dict())
        wrong.fault = fault
        made[number] = wrong
    return made


def train(made: nn.Module) -> None:
    torch.manual_seed(1)
    x, optimizer = torch.randn(4, 16, 32), torch.optim.SGD(made.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        made(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("fault", "of"),
    [
        ("scale", "input 0"),
        ("transposed", "input 0"),
        ("dropped tail", "parameter weight"),
        ("low-precision accumulation", "parameter weight"),
        ("never written", "parameter bias"),
    ],
)
def test_a_wrong_gradient_has_a_share_and_a_cause(spelled: Any, fault: str, of: str) -> None:
    report = bl.check(spoiled(spelled, at2=fault), drive=train, reference=model(), repro=False)
    (culprit,) = report.culprits
    assert (culprit.name, culprit.op, culprit.position) == ("2", f"gradient of {of}", 0)
    assert culprit.direction == "backward"
    assert culprit.share is not None
    assert culprit.share > 0.99
    assert culprit.cause is not None
    assert culprit.cause.startswith(fault)
    assert culprit.where
    assert culprit.reason is None
    assert "of the gradients' difference" in report.headline


def test_shares_tell_which_of_two_matters(spelled: Any) -> None:
    candidate = spoiled(spelled, at0="low-precision accumulation", at2="scale")
    report = bl.check(candidate, drive=train, reference=model(), repro=False)
    more, less = report.culprits
    assert (more.name, less.name) == ("2", "0")
    assert more.share is not None
    assert less.share is not None
    assert 0.9 < more.share < 1
    assert less.share < 0.1


def test_the_repro_fails_alone_and_says_when_it_is_mended(spelled: Any, tmp_path: Path) -> None:
    candidate = spoiled(spelled, at2="dropped tail")
    report = bl.check(candidate, drive=train, reference=model(), repro=tmp_path / "repros")
    (culprit,) = report.culprits
    assert culprit.repro is not None
    text = Path(culprit.repro).read_text()
    assert "gradient of parameter weight 32x32" in text
    assert "contains weights and inputs" in text

    def status() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(culprit.repro)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout.splitlines()[-1]

    assert status() == (1, "FAILS")
    source = tmp_path / "spelled_products.py"
    source.write_text(SOURCE.replace("rows[:-8].t() @ given[:-8]", "rows.t() @ given"))
    assert status() == (0, "MENDED")


def test_a_module_that_the_reference_lacks_says_why_there_is_no_share() -> None:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, arrived: Any) -> Any:
            return arrived * 1.3

    class Extra(nn.Module):
        def forward(self, x: Any) -> Any:
            return Through.apply(x)

    class Block(nn.Module):
        def __init__(self, extra: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            if extra:
                self.extra = Extra()

        def forward(self, x: Any) -> Any:
            made = self.linear(x)
            return self.extra(made) if hasattr(self, "extra") else made

    def made(extra: bool) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 32), Block(extra))

    report = bl.check(made(True), drive=train, reference=made(False), repro=False)
    (culprit,) = report.culprits
    assert culprit.name == "1.extra"
    assert (culprit.share, culprit.cause, culprit.repro) == (None, None, None)
    assert culprit.reason == NO_PARTNER
