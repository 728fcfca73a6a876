"""Loops as people write them: a pool that layers write to, tied heads, optimisers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import brickline as bl
from brickline.verdict import Status


class Pooled(nn.Module):
    """Adds what it and those before it wrote into a pool that comes with the call."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.project = number, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, pool: torch.Tensor, at: int) -> torch.Tensor:
        pool[self.row(at), at] = self.project(x)
        return x + pool[self.number, : at + 1].sum(0) + pool[:, at].sum(0)

    def row(self, at: int) -> int:
        return self.number


class Wrong(Pooled):
    """Writes to another one's row from the fourth call on."""

    def row(self, at: int) -> int:
        return 0 if at >= 3 else self.number


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Pooled(number) for number in range(3))

    def forward(self, x: torch.Tensor, pool: torch.Tensor, at: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, pool, at)
        return x


def decode(model: Any) -> None:
    pool = torch.zeros(3, 6, 8)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for at in range(6):
            model(torch.randn(8, generator=generator), pool, at)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_one_layer_writes_into_an_argument_the_next_one_reads(mode: Any) -> None:
    def drive(model: Any) -> None:
        with mode():
            decode(model)

    report = bl.check(Stack(), drive=drive, reference=Stack())
    assert report.status is Status.MATCHED, report.headline


def test_a_wrong_argument_is_the_matter_of_who_wrote_to_it() -> None:
    candidate = Stack()
    candidate.layers[2].__class__ = Wrong
    report = bl.check(candidate, drive=decode, reference=Stack(), repro=False)
    assert [(each.name, each.position) for each in report.culprits] == [("layers.2", 3)]


class Masked(nn.Module):
    """Masks with the smallest number of whatever dtype it meets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(1, 4, dtype=x.dtype)
        mask[:, 3] = torch.finfo(x.dtype).min
        return (x + mask).softmax(-1)


def test_a_mask_as_large_as_its_dtype_allows_is_no_obstacle() -> None:
    report = bl.check(Masked(), torch.randn(1, 4), reference=Masked())
    assert report.status is Status.MATCHED, report.headline


# --- Training -------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A head that is the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.body = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.linear(torch.tanh(self.body(self.table(tokens))), self.head())

    def head(self) -> torch.Tensor:
        return self.table.weight


class Untied(Tied):
    def head(self) -> torch.Tensor:
        return self.table.weight.detach()


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.arange(10).view(2, 5)
    for _ in range(3):
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_no_fault(dtype: torch.dtype) -> None:
    report = bl.check(Tied().to(dtype), drive=train, reference=Tied())
    assert report.status is Status.MATCHED, report.headline
    assert {"table", "Tied"} <= {row.name for row in report.verdicts if row.direction == "backward"}


def test_a_head_that_does_not_train_its_table_is_found() -> None:
    report = bl.check(Untied(), drive=train, reference=Tied(), repro=False)
    (finding,) = report.culprits
    assert (finding.name, finding.position, finding.direction) == ("Untied", 0, "backward")
    assert finding.op == "gradient of parameter table.weight"
    assert {row.position for row in report.verdicts} == {0, 1, 2}


class Slope(torch.autograd.Function):
    """The square, with the slope that it is handed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slope)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Stale(nn.Module):
    """The square, whose gradient is that of the step before from the third step on."""

    calls, slope = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, before = self.calls + 1, self.slope
        self.slope = 2 * x.detach()
        return Slope.apply(x, before if self.calls > 2 else self.slope)


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def test_what_a_gradient_was_made_from_is_as_it_was_when_it_is_asked_again() -> None:
    torch.manual_seed(3)
    reference = nn.Sequential(nn.Embedding(11, 8), Square(), nn.Linear(8, 11))
    candidate = copy.deepcopy(reference)
    candidate[1] = Stale()
    report = bl.check(candidate, drive=train, reference=reference, repro=False)
    assert [(each.name, each.position) for each in report.culprits] == [("1", 2)]


# --- Without a reference --------------------------------------------------------------------------


class Hot(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1000).half().exp().float()


def test_a_nan_made_from_an_overflow_is_its_consequence() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 8), Hot(), nn.Linear(8, 8))
    report = bl.check(model, torch.randn(4, 8), repro=False)
    assert [each.name for each in report.culprits] == ["1"]
    assert report.culprits[0].repro is None
    assert "PathLike" not in (report.culprits[0].reason or "")
