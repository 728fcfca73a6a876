"""What `bl.check` does with outputs, inputs and endings that cannot be compared: never a match."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import brickline as bl
from brickline.checking.inquiry import Inquiry
from brickline.errors import UsageError


def x() -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(3))


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


class Model(nn.Module):
    """A linear layer, and what is made of its output."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.linear(x))


def check(candidate: Any, reference: Any, **options: Any) -> bl.DivergenceReport:
    if not options:
        options = {"drive": lambda model: model(x())}
    return bl.check(Model(candidate), reference=Model(reference), repro=False, **options)


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [
        (lambda y: (y, y[:2]), lambda y: (y, y)),
        (lambda y: (y, y * 2), lambda y: (y,)),
        (lambda y: (y, 3), lambda y: (y, 4)),
        (lambda y: (y, y.sum().item() * 2), lambda y: (y, y.sum().item())),
        (lambda y: (y, "a"), lambda y: (y, "b")),
        (lambda y: (y, (y * 2).detach().numpy()), lambda y: (y, y.detach().numpy())),
        (lambda y: (y, torch.zeros(3)), lambda y: (y, torch.zeros(3).to_sparse())),
        (lambda y: y.reshape(-1), lambda y: y),
    ],
    ids=["rows", "more", "integer", "number", "text", "array", "sparse", "reshaped"],
)
def test_outputs_that_cannot_be_compared_are_no_match(candidate: Any, reference: Any) -> None:
    assert check(reference, reference).status in ("matched", "inconclusive")
    report = check(candidate, reference)
    assert report.status == "inconclusive"
    assert "output" in report.headline


def test_another_shape_in_a_later_call_is_seen() -> None:
    def late() -> Any:
        calls = []

        def make(y: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return y[:2] if len(calls) > 2 else y

        return make

    def drive(model: nn.Module) -> None:
        for _ in range(4):
            model(x())

    report = check(late(), lambda y: y, drive=drive)
    assert report.status == "inconclusive"
    assert "(2, 16)" in report.headline


def test_linear_layers_of_another_width_are_no_match() -> None:
    report = bl.check(nn.Linear(16, 32), x(), reference=nn.Linear(16, 31), repro=False)
    assert report.status != "matched"


def test_a_parameter_that_is_returned_counts() -> None:
    candidate, reference = Model(lambda y: y), Model(lambda y: y)
    for model, factor in ((candidate, 1.5), (reference, 1.0)):
        scale = nn.Parameter(torch.ones(3) * factor)
        model.register_parameter("scale", scale)
        model.make = lambda y, scale=scale: (y, scale)
    report = bl.check(candidate, x(), reference=reference, repro=False)
    assert report.status == "diverged"
    assert report.culprits[0].cause is not None
    assert "its scale differs from the reference's by 0.5" in report.culprits[0].cause


def test_tensors_inside_an_object_are_compared() -> None:
    assert check(lambda y: Pair(y, y * 2), lambda y: Pair(y, y * 2))
    report = check(lambda y: Pair(y.relu(), y * 2.1), lambda y: Pair(y.relu(), y * 2))
    assert report.status == "diverged"


def test_a_reference_without_finite_values_shows_nothing() -> None:
    report = check(lambda y: y * 2, lambda y: y * float("nan"))
    assert report.status == "inconclusive"
    assert "not finite" in report.headline


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_input_is_no_obstacle(layout: torch.layout) -> None:
    eye = torch.eye(16)
    sparse = eye.to_sparse() if layout is torch.sparse_coo else eye.to_sparse_csr()
    wide = x().T.contiguous()
    assert bl.check(lambda a, b: a @ b, sparse, wide, reference=lambda a, b: a @ b, repro=False)
    report = bl.check(
        lambda a, b: (a @ b) * 1.5, sparse, wide, reference=lambda a, b: a @ b, repro=False
    )
    assert report.status == "diverged"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantised_output_is_named() -> None:
    def quantised(scale: float) -> Any:
        return lambda a: torch.quantize_per_tensor(a, scale, 0, torch.qint8)

    report = bl.check(quantised(0.1), x(), reference=quantised(0.2), repro=False)
    assert report.status == "inconclusive"
    assert "quantised" in report.headline


# --- Endings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [True, False])
def test_a_candidate_that_ends_the_program_is_inconclusive(alone: bool) -> None:
    def leave(y: torch.Tensor) -> torch.Tensor:
        sys.exit(0)

    reference = None if alone else Model(lambda y: y)
    report = bl.check(Model(leave), x(), reference=reference, repro=False)
    assert report.status == "inconclusive"
    assert "SystemExit(0)" in report.headline


class Deep(nn.Module):
    def __init__(self, factor: float = 1.0, stop: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.factor, self.stop = factor, stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).relu()
            x = x * self.factor if number == 1 else x
            if number == self.stop:
                raise RuntimeError("boom")
        return x


def test_what_a_call_made_before_it_raised_is_compared() -> None:
    report = bl.check(Deep(stop=3), x(), reference=Deep(), repro=False)
    assert report.status == "inconclusive"
    assert "boom" in report.headline
    assert 0 < report.coverage.compared < report.coverage.total
    assert {row.verdict for row in report.verdicts} <= {"identical", "rounding"}
    wrong = bl.check(Deep(factor=1.1, stop=3), x(), reference=Deep(), repro=False)
    assert wrong.status == "inconclusive"
    assert "layers.2" in wrong.headline


def test_memory_that_runs_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Inquiry, "answer", short)
    report = bl.check(Model(lambda y: y), x(), reference=Model(lambda y: y), repro=False)
    assert report.status == "inconclusive"
    assert "memory ran out; check fewer tokens" in report.headline


def test_a_failure_is_in_the_headline_without_a_reference() -> None:
    report = bl.check(Model(lambda y: y))
    assert "missing 1 required positional argument" in report.headline


# --- State that both sides share ------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda y: (torch.multinomial(y.softmax(-1), 3), y),
        lambda y: y * (1 + random.random()),
        lambda y: y * float(1 + np.random.rand()),
    ],
    ids=["sampling", "python", "numpy"],
)
def test_both_sides_draw_the_same_numbers(make: Any) -> None:
    def drive(model: nn.Module) -> None:
        for _ in range(3):
            model(x())

    assert check(make, make, drive=drive)


def test_a_layer_that_is_made_in_the_first_call() -> None:
    class Late(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "late"):
                self.late = nn.Linear(16, 16)
            return self.late(self.linear(x))

    def drive(model: nn.Module) -> None:
        for _ in range(2):
            model(x())

    assert bl.check(Late(None), drive=drive, reference=Late(None), repro=False)


# --- Threads and compiled code --------------------------------------------------------------------


def test_calls_from_several_threads_are_all_checked() -> None:
    def drive(model: nn.Module) -> None:
        threads = [threading.Thread(target=model, args=(x(),)) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    report = check(lambda y: y, lambda y: y, drive=drive)
    assert report.status == "matched"
    assert {row.position for row in report.verdicts} == {0, 1, 2}
    assert check(lambda y: y * 1.1, lambda y: y, drive=drive).status == "diverged"


class Threaded(Model):
    def forward(self, x: torch.Tensor) -> Any:
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(self.linear(x)))
        thread.start()
        thread.join()
        return self.make(made[0])


def test_modules_on_other_threads_are_counted() -> None:
    report = bl.check(Threaded(lambda y: y + 1), x())
    assert report.status == "inconclusive"
    assert "other threads" in " ".join(report.coverage.notes)
    reference = Threaded(lambda y: y + 1)
    assert bl.check(Threaded(lambda y: y + 1), x(), reference=reference, repro=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_one_brick() -> None:
    def scripted(factor: float) -> Any:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        with torch.no_grad():
            inner[0].weight[0] *= factor
        return inner, torch.jit.script(inner)

    plain, compiled = scripted(1.0)
    assert bl.check(compiled, x(), reference=plain, repro=False)
    assert bl.check(plain, x(), reference=compiled, repro=False)
    assert bl.check(compiled, x())
    assert bl.check(scripted(1.5)[1], x(), reference=plain, repro=False).status == "diverged"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("of_reference", ["plain", "script"])
def test_torchscript_inside_a_model_is_held_at_its_boundary(of_reference: str) -> None:
    def made(factor: float, kind: str) -> nn.Sequential:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        with torch.no_grad():
            inner[0].weight[:4] *= factor
        ends = nn.Linear(16, 16), nn.Linear(16, 16)
        return nn.Sequential(
            ends[0], torch.jit.script(inner) if kind == "script" else inner, ends[1]
        )

    reference = made(1.0, of_reference)
    assert bl.check(made(1.0, "script"), x(), reference=reference, repro=False)
    wrong = made(1.5, "script")
    report = bl.check(wrong, x(), reference=reference, repro=False)
    assert [each.name for each in report.culprits] == ["1"]
    assert not wrong[1]._forward_hooks
    # What is one brick in the reference is one in the candidate too.
    report = bl.check(made(1.5, of_reference), x(), reference=made(1.0, "script"), repro=False)
    assert [each.name for each in report.culprits] == ["1"]


# --- Wrong use ------------------------------------------------------------------------------------


def test_wrong_use_is_said_before_the_work() -> None:
    with pytest.raises(UsageError, match="kwargs"):
        bl.check(Model(None), kwargs=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="class Model"):
        bl.check(Model, x())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_lazy_module_must_be_called_first() -> None:
    with pytest.raises(UsageError, match="lazy"):
        bl.check(nn.LazyLinear(4), x(), reference=nn.LazyLinear(4))


def test_a_reference_that_cannot_be_copied_says_what_to_give() -> None:
    reference = Model(lambda y: y)
    reference.lock = threading.Lock()
    with pytest.raises(UsageError, match="bfloat16"):
        bl.check(Model(lambda y: y).bfloat16(), x().bfloat16(), reference=reference)


def test_complex_numbers_are_verified_without_a_reference() -> None:
    assert bl.check(lambda a: torch.fft.ifft(torch.fft.fft(a) * 2).real, x())
