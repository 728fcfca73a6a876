"""Recording two models and comparing the runs; then executing the runs again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brickline.adapters.recording import record
from brickline.checking.replay import check_runs
from brickline.comparison.comparing import compare
from brickline.verdict import DivergenceReport, Status, Verdict


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


TOKENS = torch.arange(12).reshape(2, 6)


def recorded(path: Path, model: nn.Module, **options: Any) -> Path:
    with record(path, model, **options), torch.no_grad():
        model(TOKENS)
        model(TOKENS + 7)
    return path


def compared(
    tmp_path: Path, candidate: nn.Module, reference: nn.Module, **options: Any
) -> DivergenceReport:
    return compare(
        recorded(tmp_path / "candidate.brick", candidate, **options),
        recorded(tmp_path / "reference.brick", reference, **options),
    )


def wrong_row(model: Model) -> None:
    with torch.no_grad():
        model.layers[1].up.weight[3] *= 1.5


def wrong_eps(model: Model) -> None:
    model.layers[2].norm.eps = 1e-2


def wrong_residual(model: Model) -> None:
    class Half(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.5 * self.down(self.act(self.up(self.norm(x))))

    model.layers[1].__class__ = Half


FAULTS: dict[str, Callable[[Model], None]] = {
    "layers.1.up": wrong_row,
    "layers.2.norm": wrong_eps,
    "layers.1": wrong_residual,
}


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(tmp_path: Path, model: Model, name: str, level: str) -> None:
    candidate = copy.deepcopy(model)
    FAULTS[name](candidate)
    report = compared(tmp_path, candidate, model, level=level)
    assert report.status is Status.DIVERGED
    assert (report.findings[0].name, report.findings[0].position) == (name, 0)
    assert report.exit_status == 1


def test_the_same_model_matches(tmp_path: Path, model: Model) -> None:
    report = compared(tmp_path, copy.deepcopy(model), model)
    assert report.status is Status.MATCHED
    assert set(report.verdicts.counts()) == {"identical"}


def test_bfloat16_is_no_suspect(tmp_path: Path, model: Model) -> None:
    report = compared(tmp_path, copy.deepcopy(model).bfloat16(), model)
    assert not report.findings
    assert report.status is not Status.DIVERGED


def test_causes_come_from_parameters_and_settings(tmp_path: Path, model: Model) -> None:
    candidate = copy.deepcopy(model)
    wrong_row(candidate)
    finding = compared(tmp_path / "a", candidate, model).findings[0]
    assert finding.cause is not None
    assert finding.cause.startswith("its weight differs")
    candidate = copy.deepcopy(model)
    wrong_eps(candidate)
    finding = compared(tmp_path / "b", candidate, model).findings[0]
    assert finding.cause == "its settings differ: eps 0.01, reference 1e-05"


def test_gradients_are_compared(tmp_path: Path, model: Model) -> None:
    def trained(path: Path, one: nn.Module) -> Path:
        with record(path, one):
            one(TOKENS).logsumexp(-1).sum().backward()
        return path

    candidate = copy.deepcopy(model)
    candidate.layers[1].down.weight.register_hook(lambda grad: grad * 1.5)
    # The hook comes before the recorder's, so what is recorded is what it returns.
    report = compare(trained(tmp_path / "c.brick", candidate), trained(tmp_path / "r.brick", model))
    assert [(each.name, each.direction) for each in report.findings] == [
        ("layers.1.down", "backward")
    ]


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("name", ["layers.1.up", "layers.2.norm"])
def test_runs_with_tensors_prove_it(tmp_path: Path, model: Model, name: str, level: str) -> None:
    candidate = copy.deepcopy(model)
    FAULTS[name](candidate)
    options = {"level": level, "tensors": "all"}
    ours = recorded(tmp_path / "c.brick", candidate, **options)
    theirs = recorded(tmp_path / "r.brick", model, **options)
    assert compare(ours, theirs).next_command == f"brickline check --runs {ours} {theirs}"
    report = check_runs(ours, theirs)
    top = report.findings[0]
    assert (top.name, top.verdict) == (name, Verdict.CULPRIT)
    assert top.z is not None
    assert top.z > 2
    assert report.status is Status.DIVERGED


def test_clean_runs_with_tensors_are_cleared(tmp_path: Path, model: Model) -> None:
    options = {"level": "op", "tensors": "all"}
    ours = recorded(tmp_path / "c.brick", copy.deepcopy(model), **options)
    report = check_runs(ours, recorded(tmp_path / "r.brick", model, **options))
    assert report.status is Status.MATCHED
    assert not report.findings


def test_runs_without_tensors_say_what_to_record(tmp_path: Path, model: Model) -> None:
    ours = recorded(tmp_path / "c.brick", model)
    report = check_runs(ours, ours)
    assert "holds no tensors" in report.headline
    assert 'tensors="all"' in report.headline


class Raising(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.layers[0](self.embed(tokens))
        raise RuntimeError("boom")


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("level", ["module", "op"])
def test_a_model_that_raised_is_no_match(tmp_path: Path, level: str, both: bool) -> None:
    runs = []
    for name, kind in (("c", Raising), ("r", Raising if both else Model)):
        torch.manual_seed(0)
        model = kind().eval()
        runs.append(tmp_path / f"{name}.brick")
        with contextlib.suppress(RuntimeError), record(runs[-1], model, level=level):
            model(TOKENS)
    report = compare(*runs)
    assert report.status is Status.INCONCLUSIVE
    assert report.coverage.compared
    assert "call 0 of Raising raised" in report.headline


def test_what_proves_a_suspect_can_clear_it_too(tmp_path: Path, model: Model) -> None:
    options = {"level": "op", "tensors": "all", "include": "layers.1.norm"}
    ours = recorded(tmp_path / "c.brick", copy.deepcopy(model), **options)
    report = check_runs(ours, recorded(tmp_path / "r.brick", model, **options))
    assert report.status is Status.MATCHED
    assert not report.coverage.notes


class Norm(nn.Module):
    """An RMS norm of bfloat16 values that computes in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width).bfloat16())
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


@pytest.mark.parametrize(("eps", "status"), [(1e-2, Status.DIVERGED), (1.1e-6, Status.MATCHED)])
def test_a_norm_that_is_half_a_percent_off_in_bfloat16_does_not_match(
    tmp_path: Path, eps: float, status: Status
) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 512).bfloat16()
    paths = []
    for name, used in (("candidate", eps), ("reference", 1e-6)):
        paths.append(tmp_path / name)
        model = Norm(512, used)
        with record(paths[-1], model), torch.no_grad():
            model(x)
    report = compare(*paths)
    assert report.status is status
    assert [finding.name for finding in report.findings] == ["Norm"] * (status is Status.DIVERGED)
