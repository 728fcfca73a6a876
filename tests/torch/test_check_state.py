"""The first question of a check: are the weights and buffers the same?

What a weight was made from is drawn at random and must be found again; a row that was changed
afterwards must be named.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import brickline as bl
from brickline.checking.sides import in_dtype_of
from brickline.checking.state.answer import Kind, StateAnswer
from brickline.checking.state.carrying import carried_values, holding
from brickline.checking.state.grids import FORMATS, on_grid
from brickline.checking.state.question import ask_state
from brickline.checking.state.tensors import held_tensors

NARROW = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


class Holder(nn.Module):
    """Holds tensors under given names; computes nothing."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))


def asked(candidate: nn.Module, reference: nn.Module) -> StateAnswer:
    return ask_state(candidate, in_dtype_of(reference, candidate), reference)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def norm_weight(seed: int, size: int) -> Tensor:
    return 1 + 3 * drawn(seed, size)


# --- folding


FOLDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "columns": lambda w, g, b: w * g,
    "one plus": lambda w, g, b: w * (1 + g),
    "rows": lambda w, g, b: w * b[:, None],
    "both": lambda w, g, b: w * g * b[:, None],
    "a number": lambda w, g, b: w * 24**-0.5,
    "a number and columns": lambda w, g, b: w * g * 24**-0.5,
    "transposed": lambda w, g, b: (w * g).T.contiguous(),
    "in halves": lambda w, g, b: torch.cat([w[::2], w[1::2]]) * g,
    "side by side": lambda w, g, b: torch.cat([w * g, w * (1 + g)], 1),
    "both signs": lambda w, g, b: w * (1 - g),
    "with another": lambda w, g, b: torch.cat([w * g, 2 * w.flip(0)]),
}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), fold=st.sampled_from(sorted(FOLDS)), dtype=NARROW)
def test_what_was_folded_into_a_weight_is_found_again(
    seed: int, fold: str, dtype: torch.dtype
) -> None:
    weight, gain, scale = drawn(seed, 40, 24), norm_weight(seed + 1, 24), norm_weight(seed + 2, 40)
    reference = Holder(weight=weight, gain=gain, scale=scale, other=drawn(seed + 3, 40, 24))
    folded = FOLDS[fold](weight, gain, scale)
    candidate = Holder(folded=folded, other=drawn(seed + 3, 40, 24)).to(dtype)
    side = in_dtype_of(reference, candidate)
    state = ask_state(candidate, side, reference)
    [answer] = [tensor for tensor in state.tensors if tensor.name == "folded"]
    assert answer.kind is Kind.FOLDED, (answer, state.line)
    assert not answer.rows
    # What is put in its place is what the reference computes with, with no rounding at all.
    values = carried_values(held_tensors(candidate), held_tensors(side), state.candidate)
    exact = FOLDS[fold](*(tensor.data.double() for tensor in (side.weight, side.gain, side.scale)))
    assert torch.allclose(values["folded"], exact, rtol=1e-14, atol=0)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    fold=st.sampled_from(["columns", "rows", "both", "a number and columns"]),
    row=st.integers(0, 39),
)
def test_a_changed_row_of_a_folded_weight_is_named(seed: int, fold: str, row: int) -> None:
    weight, gain, scale = drawn(seed, 40, 24), norm_weight(seed + 1, 24), norm_weight(seed + 2, 40)
    folded = FOLDS[fold](weight, gain, scale)
    folded[row] *= 1.03
    reference, candidate = Holder(weight=weight, gain=gain, scale=scale), Holder(folded=folded)
    state = asked(candidate.bfloat16(), reference)
    [answer] = state.differing
    assert (answer.name, answer.rows) == ("folded", (row,))
    assert 0.01 < answer.error < 0.05
    values = carried_values(
        held_tensors(candidate), held_tensors(reference.bfloat16()), state.candidate
    )
    own = candidate.folded.data.double()
    changed = values["folded"][row] == own[row]
    assert changed.double().mean() > 0.5


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), dtype=NARROW)
def test_an_unrelated_weight_is_not_explained(seed: int, dtype: torch.dtype) -> None:
    reference = Holder(
        weight=drawn(seed, 40, 24), gain=norm_weight(seed + 1, 24), bias=drawn(seed + 2, 40)
    )
    candidate = Holder(
        other=drawn(seed + 3, 40, 24), vector=drawn(seed + 4, 24), shift=drawn(seed + 5, 40)
    )
    state = asked(candidate.to(dtype), reference)
    assert {answer.kind for answer in state.tensors} == {Kind.EXTRA, Kind.MISSING}
    assert not state.candidate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_over_a_batch_is_found_in_a_convolution(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(6, 12, 3), nn.BatchNorm2d(12, eps=1e-3)).eval()
    conv, norm = reference
    with torch.no_grad():
        for tensor in (norm.weight, norm.running_var):
            tensor.uniform_(0.5, 2)
        for tensor in (norm.bias, norm.running_mean):
            tensor.normal_()
        candidate = nn.Conv2d(6, 12, 3)
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        candidate.weight.copy_(conv.weight * factor[:, None, None, None])
        candidate.bias.copy_((conv.bias - norm.running_mean) * factor + norm.bias)
        candidate.to(dtype)
    state = asked(candidate, reference)
    assert [answer.kind for answer in state.tensors] == [Kind.FOLDED, Kind.FOLDED]
    assert "2 of 2 tensors are the reference's (2 with something folded in)" in state.line
    picture = torch.randn(2, 6, 8, 8).to(dtype)
    assert bl.check(candidate, picture, reference=reference, repro=False).status == "matched"


def test_the_folded_side_may_be_the_reference() -> None:
    weight, gain = drawn(0, 40, 24), norm_weight(1, 24)
    candidate, reference = Holder(weight=weight, gain=gain).bfloat16(), Holder(folded=weight * gain)
    side = in_dtype_of(reference, candidate)
    state = ask_state(candidate, side, reference)
    assert not state.unknown
    values = carried_values(held_tensors(side), held_tensors(candidate), state.reference)
    exact = candidate.weight.data.double() * candidate.gain.data.double()
    assert torch.equal(values["folded"], exact)
    with torch.no_grad():
        candidate.weight[4] *= 1.05
    [answer] = ask_state(candidate, side, reference).differing
    assert (answer.partner, answer.rows) == ("folded", (4,))


@pytest.mark.parametrize(
    "made",
    [
        lambda a, b: a + b,
        lambda a, b: (a + b) / 2,
        lambda a, b: -a.exp(),
        lambda a, b: 1 + a,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.stack([1 + a, 1 + b]),
        lambda a, b: torch.stack([a, b], 1).reshape(-1),
    ],
)
def test_vectors_are_told_from_what_they_were_made_of(
    made: Callable[[Tensor, Tensor], Tensor],
) -> None:
    one, other = drawn(0, 32), drawn(1, 32)
    state = asked(Holder(vector=made(one, other)).bfloat16(), Holder(one=one, other=other))
    assert state.tensors[0].kind in (Kind.FOLDED, Kind.LAYOUT)
    assert not state.tensors[0].rows


def test_weights_are_put_back() -> None:
    holder = Holder(weight=drawn(0, 4, 4))
    data = holder.weight.data
    with holding(holder, {"weight": torch.zeros(4, 4, dtype=torch.float64)}):
        assert holder.weight.dtype is torch.float64
    assert holder.weight.data.data_ptr() == data.data_ptr()


# --- a whole check


class Rms(nn.Module):
    """A norm, and two products that read it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gain = nn.Parameter(1 + 0.3 * torch.randn(32))
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.rms_norm(x, (32,), eps=1e-6) * self.gain
        return x + self.down(nn.functional.silu(self.up(h)))


class Folded(nn.Module):
    """The same with the norm's weight in the first product."""

    def __init__(self, of: Rms) -> None:
        super().__init__()
        self.w1 = nn.Parameter((of.up.weight * of.gain).detach())
        self.w2 = nn.Parameter(of.down.weight.detach().T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return (
            x + nn.functional.silu(nn.functional.rms_norm(x, (32,), eps=1e-6) @ self.w1.T) @ self.w2
        )


def test_a_folded_port_in_bfloat16_needs_no_wider_tolerance() -> None:
    torch.manual_seed(4)
    tokens = torch.randn(2, 16, 32).bfloat16()
    candidate = Folded(Rms()).bfloat16()
    assert bl.check(candidate, tokens, reference=Rms(), repro=False).status == "matched"
    with torch.no_grad():
        candidate.w1[5] *= 1.02  # less than what a tolerance for bfloat16 would let pass
    assert bl.check(candidate, tokens, reference=Rms(), repro=False).status != "matched"


# --- grids


def per_group(weight: Tensor, size: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(weight.reshape(-1, size)).reshape(weight.shape)


def even(bits: int) -> Callable[[Tensor], Tensor]:
    most = 2 ** (bits - 1) - 1

    def function(groups: Tensor) -> Tensor:
        scale = groups.abs().amax(-1, keepdim=True) / most
        return (groups / scale).round() * scale

    return function


def with_zeros(bits: int) -> Callable[[Tensor], Tensor]:
    def function(groups: Tensor) -> Tensor:
        least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (most - least) / (2**bits - 1)
        zero = (-least / scale).round()
        return ((groups / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale

    return function


def by_levels(name: str) -> Callable[[Tensor], Tensor]:
    levels = torch.tensor(FORMATS[name])

    def function(groups: Tensor) -> Tensor:
        scale = groups.abs().amax(-1, keepdim=True) / levels.abs().amax()
        return levels[(groups[..., None] / scale[..., None] - levels).abs().argmin(-1)] * scale

    return function


def in_eight(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def function(groups: Tensor) -> Tensor:
        scale = groups.abs().amax(-1, keepdim=True) / torch.finfo(dtype).max
        return (groups / scale).to(dtype).float() * scale

    return function


GRIDS = [
    ("int8", "tensor", 64 * 256, even(8)),
    ("int8", "row", 256, even(8)),
    ("int8", "row", 256, with_zeros(8)),
    ("int4", "block of 32", 32, even(4)),
    ("int4", "block of 128", 128, with_zeros(4)),
    ("nf4", "block of 64", 64, by_levels("nf4")),
    ("fp4", "block of 32", 32, by_levels("fp4")),
    ("fp8 e4m3", "tensor", 64 * 256, in_eight(torch.float8_e4m3fn)),
    ("fp8 e4m3", "row", 256, in_eight(torch.float8_e4m3fn)),
    ("fp8 e5m2", "tensor", 64 * 256, in_eight(torch.float8_e5m2)),
]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), case=st.sampled_from(GRIDS), row=st.integers(0, 63))
def test_a_grid_is_recognised_and_a_wrong_row_is_named(
    seed: int, case: tuple[str, str, int, Callable[[Tensor], Tensor]], row: int
) -> None:
    name, group, size, function = case
    weight = drawn(seed, 64, 256)
    values = per_group(weight, size, function)
    grid = on_grid(values, weight)
    assert grid is not None
    assert (grid.format, grid.group, grid.wrong) == (name, group, ())
    assert grid.error == pytest.approx(
        float((values - weight).abs().amax() / weight.abs().amax()), rel=1e-3
    )
    values[row] *= 1.5
    grid = on_grid(values, weight)
    assert grid is not None
    assert grid.wrong == (row,)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), dtype=NARROW)
def test_noise_is_no_grid(seed: int, dtype: torch.dtype) -> None:
    weight = drawn(seed, 64, 256)
    assert on_grid((weight * (1 + 0.01 * drawn(seed + 1, 64, 256))).to(dtype), weight) is None


class Linear8bit(nn.Module):
    """A linear layer whose weight is held in eight bits, with a scale per row."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        scale = of.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (of.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype))


def quantised() -> Rms:
    model = Rms()
    model.up, model.down = Linear8bit(model.up), Linear8bit(model.down)  # type: ignore[assignment]
    return model


def logic_of(candidate: nn.Module, reference: nn.Module) -> tuple[float, StateAnswer]:
    from brickline.checking.session import Session

    torch.manual_seed(5)
    tokens = torch.randn(2, 16, 32)
    session = Session(candidate, reference)
    session.drive(lambda model: model(tokens))
    logic, state = session.positions[0].logic, session.candidate.state
    assert logic is not None
    assert logic.error is not None, logic
    assert state is not None
    return logic.error, state


def test_logic_is_compared_exactly_beside_a_quantised_weight() -> None:
    error, state = logic_of(quantised(), Rms())
    assert error < 1e-12
    assert {grid.words.partition(",")[0] for grid in state.grids} == {"on a grid of int8 per row"}
    assert not state.differing
    assert not state.unknown


def test_a_fault_beside_a_quantised_weight_is_seen() -> None:
    candidate = quantised()
    candidate.gain.data[3] *= 1.001
    assert logic_of(candidate, Rms())[0] > 1e-6


def test_a_wrong_row_of_a_quantised_weight_is_named() -> None:
    candidate = quantised()
    candidate.up.scale[7] *= 1.2  # type: ignore[operator,index]
    error, state = logic_of(candidate, Rms())
    assert error > 1e-6
    assert [(answer.name, answer.rows) for answer in state.differing] == [("up.weight", (7,))]


def test_a_fake_quantised_weight_is_on_a_grid() -> None:
    candidate = Rms()
    candidate.up.weight.data = per_group(candidate.up.weight.data, 32, even(4))
    error, state = logic_of(candidate, Rms())
    assert error < 1e-12
    assert state.grids[0].format == "int4"
    assert "3 of 3 tensors are the reference's (1 quantised on a grid of int4" in state.line
