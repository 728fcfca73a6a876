"""Comparing runs that have float64 twins, and runs of which one has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brickline as bl
from brickline.query import open_database
from brickline.tables import table_from_run
from brickline.verdict import DivergenceReport, Verdict

F32, BF16 = torch.float32, torch.bfloat16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.act = nn.Linear(width, 2 * width), nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(Block(64) for _ in range(3))
        self.head, self.offset = nn.Linear(64, 50), 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens + self.offset)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(24).reshape(2, 12)
Change = Callable[[Any], Any]


def recorded(
    path: Path,
    dtype: torch.dtype = F32,
    change: Change | None = None,
    *,
    twin: bool = True,
    tokens: Tensor = TOKENS,
) -> Path:
    torch.manual_seed(0)
    model = Model().eval()
    if change is not None:
        change(model)
    model = model.to(dtype)
    with bl.record(path, model, twin=twin), torch.no_grad():
        model(tokens)
    return path


def compared(
    path: Path,
    dtype: torch.dtype = F32,
    change: Change | None = None,
    reference: torch.dtype = F32,
    other_change: Change | None = None,
) -> DivergenceReport:
    candidate = recorded(path / "candidate.brick", dtype, change)
    return bl.compare(candidate, recorded(path / "reference.brick", reference, other_change))


class Coarse(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        weights = self.weight.bfloat16(), self.bias.bfloat16()
        return nn.functional.layer_norm(x.bfloat16(), (64,), *weights, self.eps).to(x.dtype)


class Reversed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        one, two = (x.chunk(2, -1), self.weight.chunk(2, -1))
        return one[1] @ two[1].T + one[0] @ two[0].T + self.bias


def coarse(model: Any) -> None:
    model.layers[1].norm.__class__ = Coarse


def reversed_sums(model: Any) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Reversed


def eps(model: Any) -> None:
    model.layers[2].norm.eps = 1e-6


def row(model: Any) -> None:
    with torch.no_grad():
        model.layers[1].up.weight[5] *= 1.03


def offset(model: Any) -> None:
    model.offset = 1


def tanh(model: Any) -> None:
    model.layers[0].act.approximate = "tanh"


@pytest.mark.parametrize(
    ("dtype", "change", "reference"),
    [(F32, None, F32), (BF16, None, F32), (BF16, None, torch.float16), (F32, reversed_sums, F32)],
    ids=["same", "bf16-f32", "bf16-f16", "other sums"],
)
def test_right_runs_match(
    tmp_path: Path, dtype: torch.dtype, change: Change | None, reference: torch.dtype
) -> None:
    report = compared(tmp_path, dtype, change, reference)
    assert report.matched, report
    assert "1 call agrees in float64" in report.whys[0]
    assert not report.findings
    assert not {Verdict.SUSPECT, Verdict.CULPRIT} & set(report.verdicts.columns["verdict"])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (eps, "layers.2.norm", "its settings differ: eps 1e-06, reference 1e-05"),
        (row, "layers.1.up", "its weight differs from the reference's by"),
        (offset, "Model", "its settings differ: offset 1, reference 0"),
        (tanh, "layers.0.act", "its settings differ: approximate tanh, reference none"),
    ],
    ids=["eps", "row", "offset", "tanh"],
)
def test_logic_that_differs_is_a_culprit(
    tmp_path: Path, dtype: torch.dtype, change: Change, name: str, words: str
) -> None:
    report = compared(tmp_path, dtype, change, dtype)
    assert report.diverged
    finding = report.findings[0]
    assert (finding.name, finding.verdict) == (name, Verdict.CULPRIT)
    assert words in (finding.cause or ""), finding.cause
    assert "float64 twins" in (finding.reason or "")
    assert report.headline.startswith(f"{name} is wrong: {finding.cause}")
    assert DivergenceReport.from_json(report.to_json()).findings == report.findings


def test_a_row_of_a_weight_shows_beside_another_dtype(tmp_path: Path) -> None:
    report = compared(tmp_path, BF16, row, F32)
    assert report.findings[0].name == "layers.1.up"


@pytest.mark.parametrize("reference", [F32, BF16], ids=["f32", "bf16"])
def test_arithmetic_that_is_off_is_told_from_logic(tmp_path: Path, reference: torch.dtype) -> None:
    report = compared(tmp_path, F32, coarse, reference)
    assert report.findings[0].name == "layers.1.norm"
    cause = str(report.findings[0].cause)
    assert "its arithmetic is off: both compute the same in float64" in cause


def test_arithmetic_of_the_reference_is_called_so(tmp_path: Path) -> None:
    report = compared(tmp_path, F32, None, F32, coarse)
    assert report.findings[0].name == "layers.1.norm"
    assert "the reference's arithmetic is off" in str(report.findings[0].cause)


def test_a_run_without_twins_is_compared_as_before(tmp_path: Path) -> None:
    one = recorded(tmp_path / "one.brick", F32, tanh)
    two = recorded(tmp_path / "two.brick", twin=False)
    three = recorded(tmp_path / "three.brick", F32, tanh, twin=False)
    report, before = bl.compare(one, two), bl.compare(three, two)
    assert [each.verdict for each in report.findings] == [Verdict.SUSPECT]
    assert (report.status, report.headline) == (before.status, before.headline)
    assert "one.brick has float64 twins and two.brick has none" in str(report.coverage.notes)


def test_other_inputs_are_no_fault_of_a_module(tmp_path: Path) -> None:
    one = recorded(tmp_path / "one.brick")
    two = recorded(tmp_path / "two.brick", tokens=TOKENS + 3)
    report = bl.compare(one, two)
    assert not report.culprits
    assert not report.matched


def test_a_call_without_a_twin_is_not_matched(tmp_path: Path) -> None:
    paths = []
    for name in ("one", "two"):
        torch.manual_seed(0)
        model = Model().eval()
        with bl.record(tmp_path / f"{name}.brick", model, twin=True) as recording, torch.no_grad():
            model(TOKENS)
            model.train()(TOKENS)
        paths.append(recording.path)
    report = bl.compare(*paths)
    assert report.status == "inconclusive"
    assert "1 more has no twin on both sides" in report.headline
    assert "no twin of call 1: the model is in training mode" in str(report.coverage.notes)


def test_twins_that_a_newer_brickline_wrote_are_a_problem_of_the_run(tmp_path: Path) -> None:
    path = recorded(tmp_path / "one.brick")
    spool = bl.Run.open(path).parts[0].path
    file = spool.with_suffix(".twins")
    file.write_bytes(file.read_bytes()[:8] + b"\x09\0\0\0" + file.read_bytes()[12:])
    run = bl.Run.open(path)
    assert "twins of version 1 or older, found 9" in str(run.problems[0])
    assert len(table_from_run(run, "twins")) == 0
    report = bl.compare(path, recorded(tmp_path / "two.brick"))
    assert not report.matched


def test_a_twin_is_a_row_of_its_own_table_and_no_launch(tmp_path: Path) -> None:
    one = recorded(tmp_path / "one.brick")
    two = recorded(tmp_path / "two.brick", twin=False)
    with open_database([one, two]) as database:
        counts = "SELECT run, count(*) FROM {} GROUP BY run"
        traces, twins = (
            dict(database.ask(counts.format(table)).rows) for table in ("traces", "twins")
        )
    operands = len(table_from_run(bl.Run.open(one), "operands"))
    assert traces["one"] == traces["two"]
    assert set(twins) == {"one"}
    assert 0 < twins["one"] < operands
