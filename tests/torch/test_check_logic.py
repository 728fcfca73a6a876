"""Both sides in float64: small faults that rounding hides are named, and right code agrees."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import brickline as bl
from brickline.checking.execution.tape import check_indices
from brickline.checking.logic.carrying import carried_weights
from brickline.checking.logic.outputs import distance, largest_distance
from brickline.checking.state.tensors import is_rounded
from brickline.oracle.wide_calls.state import nudge

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def x(width: int = 128) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(16, width)


def logic_of(report: Any) -> str:
    return str(report.logic)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_a_row_that_is_off_by_less_than_rounding_is_named(compiled: bool) -> None:
    reference = Net(512).bfloat16().eval()
    candidate = copy.deepcopy(reference)
    candidate.layers[1].down.weight[3] *= 0.97
    if compiled:
        candidate = torch.compile(candidate, backend="aot_eager")
    report = bl.check(candidate, x(512).bfloat16(), reference=reference, repro=False)
    assert report.status == "diverged", report
    (culprit,) = report.culprits
    assert culprit.name == "layers.1.down"
    assert culprit.cause is not None
    assert culprit.cause.startswith("row 3 of its weight differs from the reference's by 0.03")
    assert culprit.evidence["float64_output_error"] > 1e-5
    assert culprit.evidence["float64_noise"] < 1e-7


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width).bfloat16())
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (h * scale).to(x.dtype)


@pytest.mark.parametrize("eps", [1e-4, 1e-3])
def test_an_epsilon_is_tried_and_named(eps: float) -> None:
    report = bl.check(RMSNorm(128, eps), x().bfloat16(), reference=RMSNorm(128, 1e-6), repro=False)
    assert report.status == "diverged"
    assert report.culprits[0].cause == f"its eps is {eps}; with the reference's 1e-06 it is right"


class Odd(nn.Module):
    """Puts numbers that are not finite into its output."""

    def __init__(self, places: dict[tuple[int, int], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.places = nn.Linear(8, 8), places

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        for place, value in self.places.items():
            y[place] = value
        return y


@pytest.mark.parametrize(
    ("ours", "theirs", "status"),
    [
        ({(0, 0): math.nan}, {(0, 0): math.nan}, "matched"),
        ({(0, 0): math.nan, (1, 1): math.nan}, {(0, 0): math.nan}, "diverged"),
        ({(0, 0): math.inf}, {(0, 0): math.inf}, "matched"),
        ({(0, 0): -math.inf}, {(0, 0): math.inf}, "diverged"),
        ({}, {(0, 0): math.nan}, "diverged"),
    ],
)
def test_numbers_that_are_not_finite_lie_in_the_same_places(
    ours: Any, theirs: Any, status: str
) -> None:
    torch.manual_seed(2)
    report = bl.check(Odd(ours), torch.randn(4, 8), reference=Odd(theirs), repro=False)
    assert report.status == status, report


class Scores(nn.Module):
    """Scores with minus infinity where they are masked, handed to the next module."""

    def __init__(self, diagonal: int) -> None:
        super().__init__()
        self.diagonal = diagonal

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        t = q.shape[-2]
        seen = torch.ones(t, t, dtype=torch.bool).triu(self.diagonal)
        return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(seen, -math.inf)


class Masked(nn.Module):
    def __init__(self, diagonals: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.ModuleList(Scores(diagonal) for diagonal in diagonals)
        self.softmax, self.out = nn.Softmax(-1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for scores in self.scores:
            x = x + self.out(self.softmax(scores(x, x)) @ x)
        return x


def test_a_mask_that_is_one_off_is_named_where_scores_are_handed_on() -> None:
    torch.manual_seed(3)
    report = bl.check(
        Masked((1, 2, 1)), torch.randn(2, 12, 16), reference=Masked((1, 1, 1)), repro=False
    )
    assert report.status == "diverged"
    assert report.culprits[0].name == "scores.1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_code_agrees_to_the_last_digits(dtype: torch.dtype) -> None:
    reference = Net().eval()
    report = bl.check(
        copy.deepcopy(reference).to(dtype), x().to(dtype), reference=reference, repro=False
    )
    assert report.status == "matched", report
    assert logic_of(report).endswith("are the same to the bit")


class Tables(nn.Module):
    """Angles from constants, quotients of integers and a stored table."""

    def __init__(self, *, stored: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        rates = torch.tensor([100.0 ** -(n / 8) for n in range(8)])
        if stored:
            self.register_buffer("rates", rates, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0])[:, None]
        if hasattr(self, "rates"):
            angles = places * self.rates
        else:
            angles = places / 100.0 ** (torch.arange(8) / 8)
        a, b = self.linear(x).chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos()), -1)


@pytest.mark.parametrize("ours", [True, False])
def test_a_table_that_one_side_keeps_rounded_is_no_difference(ours: bool) -> None:
    report = bl.check(
        Tables(stored=ours), torch.randn(40, 16), reference=Tables(stored=not ours), repro=False
    )
    assert report.status == "matched", report
    assert "differ by no more than rounding" in logic_of(report)


class Cached(nn.Module):
    """Keeps what it was given, so that later calls begin with what was rounded."""

    def __init__(self, wrong: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.register_buffer("kept", torch.zeros(4, 16))
        self.count = 0
        with torch.no_grad():
            self.linear.weight[2] *= wrong

    def forward(self, x: Tensor) -> Tensor:
        self.kept[self.count] = self.linear(x)
        self.count += 1
        return self.kept[: self.count].softmax(0).sum(0) + self.kept[self.count - 1]


def test_a_check_leaves_what_is_kept_as_it_is() -> None:
    def drive(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(4)
        return [model(torch.randn(16)) for _ in range(4)]

    alone = drive(Cached())
    candidate, outputs = Cached(), []
    report = bl.check(
        candidate, drive=lambda model: outputs.extend(drive(model)), reference=Cached(), repro=False
    )
    assert report.status == "matched", report
    assert candidate.count == 4
    assert all(torch.equal(one, two) for one, two in zip(outputs, alone, strict=True))
    assert not bl.check(Cached(1.001), drive=drive, reference=Cached(), repro=False)


# --- the pieces


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_what_was_rounded_once_is_the_same_weight(seed: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(33, generator=draw, dtype=torch.float64) + 1e-3
    narrow = wide.to(dtype)
    assert is_rounded(narrow, wide)
    assert not is_rounded(narrow, narrow.clone())
    off = narrow.double().clone()
    off[seed % 33] *= 1 + 3 * torch.finfo(dtype).eps
    assert not is_rounded(off.to(dtype), wide)


def test_carried_weights_are_put_back() -> None:
    reference, candidate = Net(), Net().bfloat16()
    before = copy.deepcopy(reference.state_dict())
    with carried_weights(candidate, reference):
        carried = reference.layers[0].up.weight
        assert torch.equal(carried, candidate.layers[0].up.weight)
    after = reference.state_dict()
    assert all(torch.equal(after[name], each) for name, each in before.items())
    assert {each.dtype for each in reference.parameters()} == {torch.float32}


def test_nudges_are_the_same_every_time_and_no_larger_than_a_rounding() -> None:
    values = torch.linspace(-3, 3, 100)
    one, two = (nudge(values, 2.0**-8, torch.Generator().manual_seed(5)) for _ in "ab")
    assert torch.equal(one, two)
    assert ((one - values).abs() <= 2.0**-8 * values.abs() * (1 + 1e-12)).all()
    assert not torch.equal(one, values.double())


def test_fillers_of_masks_are_one() -> None:
    one = torch.tensor([1.0, -math.inf, 2.0])
    assert distance(one, torch.tensor([1.0, torch.finfo(torch.float32).min, 2.0])) == 0
    assert distance(one, torch.tensor([1.0, math.inf, 2.0])) == math.inf
    assert distance(one, torch.tensor([1.0, 5.0, 2.0])) == math.inf
    assert distance(torch.zeros(2), torch.zeros(2)) == 0


def test_tokens_without_an_answer_do_not_count() -> None:
    idle = torch.tensor([[True, False, False], [False, False, False]])
    ours, theirs = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    ours[0, 0] = 7.0
    theirs[1, 1] = ours[1, 1] = 1.0
    assert largest_distance([ours], [theirs], idle) == 0
    assert largest_distance([ours], [theirs]) > 1
    by_heads = [each[:, None].expand(2, 5, 3, 4) for each in (ours, theirs)]
    assert largest_distance(by_heads[:1], by_heads[1:], idle) == 0


def test_a_function_that_has_no_parts_is_named_itself() -> None:
    def norm(eps: float) -> Any:
        def rms_norm(x: Tensor) -> Tensor:
            h = x.float()
            return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

        return rms_norm

    report = bl.check(norm(1e-3), x().bfloat16(), reference=norm(1e-6), repro=False)
    assert report.status == "diverged"
    assert [each.name for each in report.culprits] == ["rms_norm"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


def test_a_recurrent_layer_is_fed_too() -> None:
    candidate = Recurrent().bfloat16()
    with torch.no_grad():
        candidate.cell.bias_ih_l0[12] += 0.01
    torch.manual_seed(6)
    report = bl.check(
        candidate, torch.randn(2, 6, 16).bfloat16(), reference=Recurrent(), repro=False
    )
    assert [each.name for each in report.culprits] == ["cell"]


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_a_part_is_named_in_place_of_the_whole(compiled: bool) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Softmax(-1))

    candidate = model()
    candidate[0].weight.view(-1)[2176] -= 0.0032 * candidate[0].weight.abs().max()
    if compiled:
        candidate[0].weight *= 2
        candidate = torch.compile(candidate, backend="aot_eager")
    torch.manual_seed(7)
    report = bl.check(candidate, torch.randn(2, 12, 32), reference=model(), repro=False)
    assert [each.name for each in report.culprits] == ["0"]


class Picky(nn.Module):
    """Takes no call by its own but from the model around it, as a kernel that counts its calls."""

    def __init__(self, wrong: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.calls = nn.Linear(16, 16), 0
        with torch.no_grad():
            self.linear.weight[2] *= wrong

    def forward(self, x: Tensor, *, ready: list[bool]) -> Tensor:
        if not ready:
            raise RuntimeError("not from here")
        ready.clear()
        return self.linear(x)


class Around(nn.Module):
    def __init__(self, wrong: float = 1.0) -> None:
        super().__init__()
        self.picky = Picky(wrong)

    def forward(self, x: Tensor) -> Tensor:
        ready = [True]
        return self.picky(x, ready=ready) * 2


def test_a_whole_is_not_named_for_a_part_that_cannot_be_fed() -> None:
    torch.manual_seed(8)
    report = bl.check(
        Around(1.0005).bfloat16(), torch.randn(4, 16).bfloat16(), reference=Around(), repro=False
    )
    assert report.status != "matched"
    assert "Around" not in [each.name for each in report.culprits]


def test_a_whole_is_not_named_for_parts_that_there_was_no_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("brickline.checking.logic.feeding.MOST_BYTES", 1)
    reference = Net(512).bfloat16().eval()
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        candidate.layers[1].down.weight[3] *= 0.97
    report = bl.check(candidate, x(512).bfloat16(), reference=reference, repro=False)
    assert report.status == "inconclusive"
    assert "compute different functions" in report.headline


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten::embedding", (torch.zeros(4, 2), torch.tensor([0, 4]))),
        ("aten::index", (torch.zeros(4, 2), [None, torch.tensor([2])])),
        ("aten::gather", (torch.zeros(4, 2), 1, torch.tensor([[-3]]))),
    ],
)
def test_places_outside_a_table_are_refused_before_they_are_read(name: str, args: Any) -> None:
    with pytest.raises(IndexError, match=name):
        check_indices(name, args)


def test_places_inside_a_table_are_read() -> None:
    check_indices("aten::embedding", (torch.zeros(4, 2), torch.tensor([0, 3])))
    check_indices("aten::index", (torch.zeros(4, 2), [None, torch.tensor([True, False])]))
    check_indices("aten::gather", (torch.zeros(4, 2), 1, torch.tensor([[-2, 1]])))
