"""`bl.check` where memory runs out in float64: one brick is not held, and the check goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import brickline as bl  # noqa: E402
from brickline.checking.forcing import STARVED  # noqa: E402
from brickline.oracle.widen import Widened  # noqa: E402

WORDS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
]


class Hungry(nn.Module):
    """Its sinh cannot be had in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sinh(x)


class Spelled(nn.Module):
    """The same up to rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.exp() - (-x).exp()) / 2


@pytest.fixture(params=WORDS, ids=["device", "host"])
def starving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Callable[..., object] = Widened._run_wide

    def limited(mode: Widened, func: object, args: tuple[object, ...], kwargs: object) -> object:
        if "sinh" in str(func):
            raise request.param
        return run(mode, func, args, kwargs)

    monkeypatch.setattr(Widened, "_run_wide", limited)


def made(kind: type[nn.Module] = Hungry, wrong: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), kind(), nn.Linear(16, 16), nn.Linear(16, 4))
    with torch.no_grad():
        model[3].weight[0] *= wrong
    return model


def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 16)


@pytest.mark.usefixtures("starving")
def test_one_brick_is_not_held_and_the_check_goes_on() -> None:
    report = bl.check(made(Spelled), x(), reference=made(), repro=False)
    assert report.status == "inconclusive"
    assert [each.name for each in report.findings] == ["1"]
    assert {(each.reason, each.z) for each in report.findings} == {(STARVED, None)}
    assert "memory ran out in float64, in 1;" in report.coverage.notes[0]
    assert report.coverage.compared < report.coverage.total
    assert "memory ran out" in report.headline
    held = {row.name: row.verdict for row in report.verdicts}
    assert held["3"] in ("identical", "propagated")
    assert not report


@pytest.mark.usefixtures("starving")
def test_a_culprit_elsewhere_is_named_all_the_same() -> None:
    report = bl.check(made(Spelled, wrong=1.5), x(), reference=made(), repro=False)
    assert report.status == "diverged"
    assert [each.name for each in report.culprits] == ["3"]
    assert report.culprits[0].cause
    assert any("memory ran out" in note for note in report.coverage.notes)


@pytest.mark.usefixtures("starving")
def test_what_is_the_same_to_the_bit_needs_no_float64() -> None:
    assert bl.check(made(), x(), reference=made(), repro=False)


@pytest.mark.usefixtures("starving")
def test_gradients_that_float64_has_no_memory_for_are_counted() -> None:
    def train(model: nn.Module) -> None:
        model(x()).square().mean().backward()

    report = bl.check(made(), drive=train, reference=made(), repro=False)
    assert report.status == "inconclusive"
    (note,) = report.coverage.notes
    assert note.startswith("the gradients of 1 module calls were not judged: memory ran out")
    held = {row.name for row in report.verdicts if row.direction == "backward"}
    assert {"0", "2", "3"} <= held
