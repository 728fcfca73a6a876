"""Which values of two people's code stand for each other, and who is to blame between them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import brickline as bl
from brickline.checking.facts import Fact, verdict_of
from brickline.checking.pairing import Layout
from brickline.checking.recording import Recording, Value
from brickline.checking.segments import modules_of, origin_of, segment_of, segments_of
from brickline.checking.stage import INPUT, OUTPUT, Key, Stage
from brickline.checking.weights import match_weights
from brickline.oracle.ratios import Ratios


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- Weights --------------------------------------------------------------------------------------


def test_equal_weights_are_matched_under_other_names_and_transposed() -> None:
    first, second = _random(8, 4, seed=1), _random(8, 4, seed=2)
    found = match_weights({"a": first, "b": second.t()}, {"x": second, "y": first})
    assert found.whole == {"a": "y", "b": "x"}


def test_a_fused_weight_is_matched_row_by_row() -> None:
    parts = {name: _random(4, 6, seed=seed) for seed, name in enumerate(("q", "k", "v"))}
    found = match_weights({"qkv": torch.cat(list(parts.values()))}, parts)
    assert [each.reference for each in found.rows["qkv"]] == ["q", "k", "v"]
    assert found.rows["qkv"][1].ours.tolist() == [4, 5, 6, 7]


def test_rows_in_another_order_are_told() -> None:
    weight = _random(6, 5)
    order = [3, 1, 2, 0, 5, 4]
    found = match_weights({"a": weight[order]}, {"b": weight})
    (rows,) = found.rows["a"]
    assert rows.theirs[rows.ours.argsort()].tolist() == order


def test_copies_count_as_one_even_if_a_row_differs() -> None:
    weight = _random(8, 4)
    other = weight.clone()
    other[2] *= -1
    found = match_weights({"a": weight, "b": other, "c": weight.clone()}, {"x": weight})
    assert found.ours == {"b": "a", "c": "a"}
    assert found.whole == {"a": "x"}


def test_weights_with_a_factor_per_row_are_known() -> None:
    weight = _random(8, 3, 2, 2)
    folded = weight * (1 + _random(8, seed=3).abs())[:, None, None, None]
    assert match_weights({"conv": weight}, {"folded": folded}).scaled == {"conv": "folded"}
    assert not match_weights({"conv": weight}, {"other": _random(8, 3, 2, 2, seed=4)}).scaled


def test_a_bias_without_the_factor_of_its_weight_is_not_trusted() -> None:
    theirs, ours = {}, {}
    for layer in range(3):
        weight, bias = _random(8, 5, seed=layer), _random(8, seed=10 + layer)
        factor = 1 + _random(8, seed=20 + layer).abs()
        theirs |= {f"a.{layer}.weight": weight, f"a.{layer}.bias": bias}
        ours |= {f"b.{layer}.weight": weight * factor[:, None], f"b.{layer}.bias": bias * factor}
    ours["b.1.bias"] = ours["b.1.bias"] * 2
    assert match_weights(ours, theirs).scaled.keys() == {"b.0.weight", "b.2.weight"}


# --- Layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 1, 3, 4)])
def test_a_layout_serves_every_length(shape: tuple[int, ...]) -> None:
    theirs = _random(*shape)
    ours = theirs.permute(0, 2, 1, 3).contiguous()
    layout = Layout((0, 2, 1, 3))
    found = layout(ours, theirs.shape)
    assert found is not None
    assert torch.equal(found, theirs)
    assert torch.equal(layout.undo(theirs, ours.shape), ours)


def test_a_layout_says_where_it_knows_too_little() -> None:
    assert Layout((0, 2))(_random(2, 3, 4), torch.Size((2, 3, 4))) is None


# --- Segments and blame ---------------------------------------------------------------------------


def _recording(*values: tuple[Key, tuple[int, ...]]) -> Recording:
    recording = Recording()
    for index, (key, inputs) in enumerate(values):
        recording.add(Value(index, key, torch.zeros(2), inputs))
    return recording


def _op(path: str, op: str = "aten::mul", number: int = 0) -> Key:
    return Key(path, 0, op, number)


def test_a_segment_ends_at_what_was_compared() -> None:
    a, b, c = _op("a"), _op("b"), _op("c")
    recording = _recording((a, ()), (b, (0,)), (c, (1,)))
    assert [each.key for each in segment_of(recording, c, {a})] == [b, c]
    assert modules_of(segment_of(recording, c, {a})) == ("b", "c")


def test_what_only_crossed_a_boundary_shows_nothing_again() -> None:
    made, left, entered = _op("norm"), _op("norm", OUTPUT), _op("linear", INPUT)
    recording = _recording((made, ()), (left, (0,)), (entered, (1,)))
    assert origin_of(recording, recording.by_key[entered]).key == made
    found = dict(segments_of(recording, [(entered, made, True), (left, left, True)]))
    assert not found[entered].again
    assert found[left].again
    assert modules_of(found[entered].values) == ("norm",)


def _wrong(*modules: str) -> Fact:
    ratios = Ratios(9.0, 9.0, 9.0, 0.1, 1.0, 0)
    key = _op(modules[-1])
    return Fact(key, key, ratios, verdict_of(9.0), torch.float32, modules=modules)


class _Places(nn.Module):
    """Two linear layers; perhaps places come before the batch inside."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        torch.manual_seed(0)
        names = ("up", "down") if first else ("w1", "w2")
        for name in names:
            self.add_module(name, nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1) if self.first else x
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x.transpose(0, 1) if self.first else x


def test_places_may_come_before_the_batch() -> None:
    x = _random(3, 7, 16)
    assert bl.check(_Places(True), x, reference=_Places(False))
    wrong = _Places(True)
    wrong.down.weight.data[3] *= 1.5
    report = bl.check(wrong, x, reference=_Places(False))
    assert [each.name for each in report.culprits] == ["down"]


# --- The whole ------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(x)))


def _model() -> nn.Module:
    torch.manual_seed(0)
    activation = nn.GELU()
    return nn.Sequential(*(_Block(activation) for _ in range(3)))


def test_a_module_with_several_names_has_that_of_its_caller() -> None:
    stage = Stage(_model())
    seen = []
    stage.on_enter = lambda path, call, args, kwargs: seen.append((path, call))
    with stage.following():
        stage.root(_random(2, 16))
    assert [each for each in seen if "activation" in each[0]] == [
        (f"{number}.activation", 0) for number in range(3)
    ]


def test_a_shared_module_is_named_where_it_was_replaced() -> None:
    candidate = _model()
    candidate[1].activation = nn.GELU(approximate="tanh")
    report = bl.check(candidate, _random(4, 16), reference=_model())
    assert [each.name for each in report.culprits] == ["1.activation"]


class _Picker(nn.Module):
    """Adds up parts, in one order or the other."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        self.backwards = backwards
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = range(4)
        out = torch.zeros_like(x)
        for number in reversed(numbers) if self.backwards else numbers:
            out = out + x * (x.sum(-1, keepdim=True).round() % 4 == number)
        return self.last(out)


def test_the_same_operations_in_another_order_are_no_fault() -> None:
    torch.manual_seed(0)
    candidate, reference = _Picker(True), _Picker(False)
    reference.load_state_dict(candidate.state_dict())
    report = bl.check(candidate, _random(16, 8), reference=reference)
    assert report, report


def test_recurrent_layers_of_torch_are_checked() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.GRU(8, 8, batch_first=True))
    candidate = nn.Sequential(nn.GRU(8, 8, batch_first=True))
    candidate.load_state_dict(reference.state_dict())
    assert bl.check(candidate, _random(2, 5, 8), reference=reference)
    with torch.no_grad():
        candidate[0].weight_hh_l0[3] *= -1
    report = bl.check(candidate, _random(2, 5, 8), reference=reference)
    assert [each.name for each in report.culprits] == ["0"]
