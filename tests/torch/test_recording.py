"""`brickline.record`: what a run holds of a model, and that the model does not notice."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from recorded import Row, facts_of, rows_of  # noqa: E402
from recorded import Tensor as Recorded  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from brickline import BrickId, _core  # noqa: E402
from brickline.adapters.recording import RecordOptions, record  # noqa: E402
from brickline.adapters.torch_recorder import Recorder  # noqa: E402
from brickline.errors import RunExists, UsageError  # noqa: E402
from brickline.fingerprints import fingerprint_bytes  # noqa: E402
from brickline.profiler import BrickProfiler  # noqa: E402
from brickline.run_tensors import load_tensor, tensor_names  # noqa: E402

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down_proj(self.act(self.up_proj(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(WIDTH, 16, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.lm_head(x)


@pytest.fixture(params=["with autograd", "without autograd"], autouse=True)
def autograd(request: pytest.FixtureRequest) -> Iterator[None]:
    """Python writes calls where there may be gradients, the core where there are none."""
    has_gradients = request.param == "with autograd"
    if not has_gradients and request.node.get_closest_marker("gradients"):
        pytest.skip("needs gradients")
    with torch.set_grad_enabled(has_gradients):
        yield


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(10).reshape(2, 5)


def named(rows: list[Row], name: str, direction: int = 0) -> list[Row]:
    return [row for row in rows if row.name == name and row.direction == direction]


def only(rows: list[Row], name: str, direction: int = 0) -> Row:
    (row,) = named(rows, name, direction)
    return row


# --------------------------------------------------------------------------------- what a run holds


def test_every_module_call_is_a_trace(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model) as recording:
        model(ids)
        model(ids)
    rows = rows_of(tmp_path / "r")
    first = [row for row in rows if row.position == 0]
    block = ["norm", "up_proj", "act", "down_proj"]
    expected = ["Decoder", "embed"]
    for layer in range(2):
        expected += [f"layers.{layer}", *(f"layers.{layer}.{name}" for name in block)]
    assert [row.name for row in first] == [*expected, "lm_head"]
    assert [row.name for row in rows if row.position == 1] == [row.name for row in first]
    assert [row.trace for row in rows] == list(range(1, len(rows) + 1))
    by_trace = {row.trace: row for row in rows}
    assert by_trace[only(first, "layers.1.act").parent].name == "layers.1"
    assert by_trace[only(first, "layers.1").parent].name == "Decoder"
    assert only(first, "Decoder").parent == 0
    assert [row.layer for row in first] == [-1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1]
    assert {row.backend for row in rows} == {"CPU"}
    assert recording.facts["counts"] == {"root calls": 2, "module calls": 26}
    assert not recording.unobserved


def test_a_name_that_no_file_can_hold_does_not_stop_a_model(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("half\ud800", nn.Linear(WIDTH, WIDTH))
    with record(tmp_path / "a.brick", model):
        model(torch.zeros(1, WIDTH))
    assert "half?" in {row.name for row in rows_of(tmp_path / "a.brick")}


def test_params_say_what_a_module_is(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model):
        model(ids)
    rows = rows_of(tmp_path / "r")
    params = only(rows, "layers.0.norm").params
    assert (params["level"], params["type"]) == ("module", "LayerNorm")
    assert params["parameters"] == ["weight", "bias"]
    assert params["settings"]["eps"] == 1e-5


def test_operands_are_fingerprinted(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model):
        out = model(ids)
    rows = rows_of(tmp_path / "r")
    embed, head = only(rows, "embed"), only(rows, "lm_head")
    assert embed.inputs[0].fingerprint == fingerprint_bytes(ids)
    assert head.outputs[0].fingerprint == fingerprint_bytes(out.detach())
    assert head.outputs[0].shape == (2, 5, 16)
    assert (embed.inputs[0].dtype, head.outputs[0].dtype) == ("int64", "float32")
    weights = only(rows, "layers.0.up_proj").weights
    assert [each.index for each in weights] == [1000, 1001]
    assert weights[0].fingerprint == fingerprint_bytes(model.layers[0].up_proj.weight.detach())


def test_dataflow_can_be_followed(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model):
        model(ids)
    rows = rows_of(tmp_path / "r")
    up, act = only(rows, "layers.0.up_proj"), only(rows, "layers.0.act")
    assert up.outputs[0].number == act.inputs[0].number
    assert only(rows, "layers.0").inputs[0].number == only(rows, "embed").outputs[0].number
    assert up.outputs[0].number != act.outputs[0].number


def test_tied_weights_are_one_tensor(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model):
        model(ids)
        model(ids)
    rows = rows_of(tmp_path / "r")
    numbers = {row.weights[0].number for row in rows if row.name in ("embed", "lm_head")}
    assert len(numbers) == 1


def test_a_weight_is_fingerprinted_once_per_version(
    tmp_path: Path, model: Decoder, ids: Tensor
) -> None:
    with record(tmp_path / "r", model) as recording:
        model(ids)
        before = recording.facts["fingerprints_taken"]
        model(ids)
        same = recording.facts["fingerprints_taken"] - before
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        model(ids)
        assert recording.facts["fingerprints_taken"] - before == 2 * same + 1
    rows = rows_of(tmp_path / "r")
    prints = [row.weights[0].fingerprint for row in named(rows, "lm_head")]
    assert prints[0] == prints[1] != prints[2]


def test_bricks_layers_and_steps_are_timed(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model) as recording:
        model(ids)
        model(ids[:, :1])
    profile = recording.profiler.profile()
    assert profile.brick("UpProjection").count == 4
    assert profile.brick(BrickId.LM_HEAD).count == 2
    assert {row.layer for row in profile.brick_layers if row.name == "DownProjection"} == {0, 1}
    assert profile.steps["prefill"].tokens == 10
    assert profile.steps["decode"].tokens == 2
    rows = rows_of(tmp_path / "r")
    assert only([row for row in rows if row.position == 0], "embed").brick == "Embedding"


def test_bricks_can_be_chosen(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    chosen = {"layers.*.act": "my gelu", nn.LayerNorm: BrickId.RMS_NORM, "layers.0": "first"}
    with record(tmp_path / "r", model, bricks=chosen):
        model(ids)
    rows = rows_of(tmp_path / "r")
    assert only(rows, "layers.1.act").brick == "my gelu"
    assert only(rows, "layers.1.norm").brick == "RmsNorm"
    assert only(rows, "layers.0").brick == "first"
    assert only(rows, "layers.1").brick == "Block"


def test_include_and_exclude(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model, include="layers.1*", exclude=["*.act"]):
        model(ids)
    rows = rows_of(tmp_path / "r")
    expected = ["layers.1", "layers.1.norm", "layers.1.up_proj", "layers.1.down_proj"]
    assert [row.name for row in rows] == expected
    assert rows[0].parent == 0
    assert rows[1].parent == rows[0].trace


@pytest.mark.parametrize(("steps", "kept"), [(2, [0, 1]), ([1, 3], [1, 3]), (range(1, 3), [1, 2])])
def test_steps_choose_calls_of_the_model(
    tmp_path: Path, model: Decoder, ids: Tensor, steps: Any, kept: list[int]
) -> None:
    with record(tmp_path / "r", model, steps=steps) as recording:
        for _ in range(4):
            model(ids)
    assert sorted({row.position for row in rows_of(tmp_path / "r")}) == kept
    assert "Left out by steps=" in recording.summary()


def test_a_module_called_twice_has_ordinals(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.same = self.one

        def forward(self, x: Tensor) -> Tensor:
            return self.same(self.one(x))

    model = Twice()
    with record(tmp_path / "r", model):
        model(torch.ones(1, 4))
        model(torch.ones(1, 4))
    calls = named(rows_of(tmp_path / "r"), "one")
    assert [(row.position, row.ordinal) for row in calls] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert calls[0].outputs[0].number == calls[1].inputs[0].number


def test_times_lie_inside_the_parents(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model):
        model(ids)
    rows = {row.trace: row for row in rows_of(tmp_path / "r")}
    for row in rows.values():
        assert 0 < row.start_ns <= row.end_ns
        if row.parent:
            assert rows[row.parent].start_ns <= row.start_ns
            assert row.end_ns <= rows[row.parent].end_ns


def test_calls_outside_the_root_belong_to_the_last_position(
    tmp_path: Path, model: Decoder, ids: Tensor
) -> None:
    with record(tmp_path / "r", model):
        model.embed(ids)
        model(ids)
        model(ids)
        model.embed(ids)
    calls = named(rows_of(tmp_path / "r"), "embed")
    assert [(row.position, row.ordinal) for row in calls] == [(0, 0), (0, 0), (1, 0), (1, 1)]
    assert calls[0].parent == 0


# ------------------------------------------------------------------------ the model does not notice


def test_results_are_the_same_bits(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    before = model(ids)
    with record(tmp_path / "r", model):
        during = model(ids)
    assert torch.equal(before, during)


@pytest.mark.parametrize("fingerprints", [True, False])
def test_nothing_is_left_on_exit(
    tmp_path: Path, model: Decoder, ids: Tensor, fingerprints: bool
) -> None:
    attributes = {id(module): dict(vars(module)) for module in model.modules()}
    forwards = {type(module): type(module).forward for module in model.modules()}
    with record(tmp_path / "r", model, fingerprints=fingerprints) as recording:
        model(ids)
        assert _core.is_watched(model.lm_head)
        for module in model.modules():
            assert vars(module) == attributes[id(module)], "nothing lies on the module meanwhile"
    for module in model.modules():
        assert vars(module) == attributes[id(module)]
        assert type(module).forward is forwards[type(module)]
        assert not _core.is_watched(module)
        assert "forward" not in vars(module)
    calls = recording.facts["counts"]["root calls"]
    model(ids)
    assert recording.facts["counts"]["root calls"] == calls


def test_nothing_is_left_after_an_exception(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("midway")

    handle = model.layers[1].act.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="midway"), record(tmp_path / "r", model):
        model(ids)
    handle.remove()
    assert not any(_core.is_watched(module) for module in model.modules())
    names = [row.name for row in rows_of(tmp_path / "r")]
    assert "layers.1.up_proj" in names
    assert "layers.1.act" not in names
    assert only(rows_of(tmp_path / "r"), "layers.1").params["raised"] is True
    assert only(rows_of(tmp_path / "r"), "Decoder").params["raised"] is True
    model(ids)


def test_a_model_that_raises_can_be_called_again(
    tmp_path: Path, model: Decoder, ids: Tensor
) -> None:
    with record(tmp_path / "r", model):
        with pytest.raises(IndexError):
            model(ids + 1000)
        model(ids)
    rows = rows_of(tmp_path / "r")
    assert [row.position for row in named(rows, "Decoder")] == [0, 1]
    assert only([row for row in rows if row.position == 1], "lm_head").outputs


@pytest.mark.parametrize("fingerprints", [True, False])
def test_signatures_stay(tmp_path: Path, model: Decoder, fingerprints: bool) -> None:
    before = inspect.signature(model.layers[0].forward)
    source = inspect.getsource(model.layers[0].forward)
    with record(tmp_path / "r", model, fingerprints=fingerprints):
        assert inspect.signature(model.layers[0].forward) == before
        assert list(inspect.signature(type(model).forward).parameters) == ["self", "ids"]
        assert inspect.getsource(model.layers[0].forward) == source
        assert isinstance(model.forward, types.MethodType)


@pytest.mark.parametrize("fingerprints", [True, False])
def test_a_deep_copy_computes_with_its_own_weights(
    tmp_path: Path, model: Decoder, ids: Tensor, fingerprints: bool
) -> None:
    with record(tmp_path / "r", model, fingerprints=fingerprints) as recording:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.count_nonzero(other(ids)) == 0
        assert torch.count_nonzero(model(ids)) > 0
    assert recording.facts["counts"]["root calls"] == 1
    assert "forward" not in vars(other)
    assert torch.count_nonzero(other(ids)) == 0


def test_shallow_copies_and_replicas_use_their_own_weights(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    with record(tmp_path / "r", model):
        replica = model._replicate_for_data_parallel()
        replica._parameters = {"weight": torch.zeros(2, 2), "bias": None}
        assert torch.count_nonzero(replica(torch.ones(1, 2))) == 0


@pytest.mark.parametrize("fingerprints", [True, False])
def test_pickling(tmp_path: Path, model: Decoder, ids: Tensor, fingerprints: bool) -> None:
    expected = model(ids)
    with record(tmp_path / "r", model, fingerprints=fingerprints):
        other = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=False)
        model.load_state_dict(other.state_dict())
    assert torch.equal(other(ids), expected)
    assert torch.equal(saved(ids), expected)


@pytest.mark.parametrize("fingerprints", [True, False])
def test_dtype_changes_inside(
    tmp_path: Path, model: Decoder, ids: Tensor, fingerprints: bool
) -> None:
    with record(tmp_path / "r", model, fingerprints=fingerprints):
        assert model(ids).dtype == torch.float32
        model.to(torch.bfloat16)
        assert model(ids).dtype == torch.bfloat16
        model.double()
        assert model(ids).dtype == torch.float64
    if fingerprints:
        heads = named(rows_of(tmp_path / "r"), "lm_head")
        assert [row.outputs[0].dtype for row in heads] == ["float32", "bfloat16", "float64"]
        assert [row.weights[0].dtype for row in heads] == ["float32", "bfloat16", "float64"]
        assert len({row.weights[0].fingerprint for row in heads}) == 3


def test_subclasses_that_call_their_base(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(2, 2), Scaled(2, 2))
    with record(tmp_path / "r", model) as recording:
        model(torch.ones(1, 2))
    assert [row.name for row in rows_of(tmp_path / "r")] == ["Sequential", "0", "1"]
    assert not recording.facts["unobserved"]


def test_forward_of_an_instance(tmp_path: Path) -> None:
    """As accelerate and others set it: a function, a bound method, a partial of the module."""

    def doubled(self: nn.Linear, x: Tensor) -> Tensor:
        return 2 * nn.Linear.forward(self, x)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].forward = types.MethodType(doubled, model[0])
    model[1].forward = functools.partial(doubled, model[1])
    inner = model[2].forward
    model[2].forward = lambda x: inner(x) + 1
    before = [vars(module)["forward"] for module in model]
    expected = model(torch.ones(1, 2))
    with record(tmp_path / "r", model):
        assert torch.equal(model(torch.ones(1, 2)), expected)
    assert [row.name for row in rows_of(tmp_path / "r")] == ["Sequential", "0", "1", "2"]
    assert [vars(module)["forward"] for module in model] == before


def test_hooks_of_the_user_are_called_as_before(
    tmp_path: Path, model: Decoder, ids: Tensor
) -> None:
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with record(tmp_path / "r", model):
        model(ids)
    assert seen == [(2, 5, 16)]


@pytest.mark.gradients
def test_tensors_are_not_kept_alive(tmp_path: Path, ids: Tensor, model: Decoder) -> None:
    kept: list[weakref.ref[Tensor]] = []
    model.layers[0].register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out)))
    with record(tmp_path / "r", model), torch.no_grad():
        model(ids)
        gc.collect()
        assert kept[0]() is None
    with record(tmp_path / "s", model):
        out = model(ids)
        assert kept[1]() is not None
        out.sum().backward()
        del out
        gc.collect()
        assert kept[1]() is None


# ------------------------------------------------------------------------------------ in-place work


def test_inputs_are_fingerprinted_before_in_place_modules(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with record(tmp_path / "r", model), torch.no_grad():
        model(x)
    with torch.no_grad():
        hidden = nn.Linear.forward(model[0], x)
    rows = rows_of(tmp_path / "r")
    relu = only(rows, "1")
    assert relu.inputs[0].fingerprint == fingerprint_bytes(hidden)
    assert relu.outputs[0].fingerprint == fingerprint_bytes(hidden.relu())
    assert relu.inputs[0].number != relu.outputs[0].number
    assert relu.outputs[0].version == relu.inputs[0].version + 1
    assert only(rows, "2").inputs[0].number == relu.outputs[0].number


def test_a_write_makes_another_tensor(tmp_path: Path) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            before = self.norm(x)
            x += 1
            return self.norm(x) + before

    model = Adds()
    x = torch.randn(2, 4)
    first = x.clone()
    with record(tmp_path / "r", model), torch.no_grad():
        model(x)
    one, two = named(rows_of(tmp_path / "r"), "norm")
    assert one.inputs[0].fingerprint == fingerprint_bytes(first)
    assert two.inputs[0].fingerprint == fingerprint_bytes(x)
    assert one.inputs[0].number != two.inputs[0].number


def test_inference_mode(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model) as recording, torch.inference_mode():
        out = model(ids)
    head = only(rows_of(tmp_path / "r"), "lm_head")
    with torch.inference_mode():
        assert head.outputs[0].fingerprint == fingerprint_bytes(out)
    assert not recording.unobserved


# ----------------------------------------------------------------------------------------- backward


@pytest.mark.gradients
def test_gradients_are_recorded(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    gradients: dict[str, Tensor] = {}
    with record(tmp_path / "r", model) as recording:
        out = model(ids)
        out.register_hook(lambda grad: gradients.__setitem__("out", grad.clone()))
        out.square().mean().backward()
    rows = rows_of(tmp_path / "r")
    backward = [row for row in rows if row.direction == 1]
    assert [row.name for row in backward][:3] == ["Decoder", "lm_head", "layers.1"]
    assert len(backward) == recording.facts["counts"]["backward calls"] == 13
    head = only(rows, "lm_head", 1)
    assert head.inputs[0].fingerprint == fingerprint_bytes(gradients["out"])
    up = only(rows, "layers.1.up_proj", 1)
    weight = model.layers[1].up_proj.weight.grad
    assert [each.role for each in up.weights] == [1, 1]
    assert up.weights[0].fingerprint == fingerprint_bytes(weight)
    assert only(rows, "layers.1.act", 1).outputs[0].number == up.inputs[0].number
    by_trace = {row.trace: row for row in rows}
    assert by_trace[up.parent].name == "layers.1"
    assert by_trace[up.parent].direction == 1
    assert {row.position for row in backward} == {0}


@pytest.mark.gradients
def test_gradients_are_those_without_recording(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    model(ids).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with record(tmp_path / "r", model):
        model(ids).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)
        assert not parameter._backward_hooks


@pytest.mark.gradients
def test_a_training_loop(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(tmp_path / "r", model):
        for _ in range(3):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
    rows = rows_of(tmp_path / "r")
    assert [row.position for row in named(rows, "lm_head", 1)] == [0, 1, 2]
    prints = [row.weights[0].fingerprint for row in named(rows, "layers.0.up_proj")]
    assert len(set(prints)) == 3


@pytest.mark.gradients
def test_checkpointed_layers_are_seen_twice(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    from torch.utils.checkpoint import checkpoint

    def run() -> None:
        x = model.embed(ids)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        model.lm_head(x).sum().backward()

    with record(tmp_path / "r", model):
        run()
    calls = named(rows_of(tmp_path / "r"), "layers.1.up_proj")
    assert [row.ordinal for row in calls] == [0, 1]
    assert calls[0].outputs[0].fingerprint == calls[1].outputs[0].fingerprint


@pytest.mark.gradients
def test_a_backward_that_raises_keeps_what_was_seen(
    tmp_path: Path, model: Decoder, ids: Tensor
) -> None:
    def fail(grad: Tensor) -> None:
        raise RuntimeError("in backward")

    with record(tmp_path / "r", model):
        model.layers[0].register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
        with pytest.raises(RuntimeError, match="in backward"):
            model(ids).sum().backward()
    assert only(rows_of(tmp_path / "r"), "layers.1.up_proj", 1).weights


# ---------------------------------------------------------------------------------------------- ops


def test_ops_are_traces_inside_modules(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model, level="op") as recording, torch.no_grad():
        out = model(ids)
    rows = rows_of(tmp_path / "r")
    ops = [row for row in rows if row.params["level"] == "op"]
    assert recording.facts["counts"]["op calls"] == len(ops)
    by_trace = {row.trace: row for row in rows}
    gelu = [row for row in ops if row.name == "aten.gelu.default"]
    assert [row.params["module"] for row in gelu] == ["layers.0.act", "layers.1.act"]
    assert by_trace[gelu[1].parent].name == "layers.1.act"
    assert [row.ordinal for row in gelu] == [0, 1]
    assert gelu[0].layer == 0
    assert gelu[0].outputs[0].number == by_trace[gelu[0].parent].outputs[0].number
    assert any(row.outputs[0].fingerprint == fingerprint_bytes(out) for row in ops if row.outputs)


def laid_out(values: np.ndarray, operand: Recorded) -> Tensor:
    """The values as they lay: processors may round a product of a transposed matrix differently."""
    found = torch.from_numpy(values.copy())
    return torch.empty_strided(operand.shape, operand.strides, dtype=found.dtype).copy_(found)


def test_ops_can_be_run_again_from_what_was_recorded(
    tmp_path: Path, model: Decoder, ids: Tensor
) -> None:
    with record(tmp_path / "r", model, level="op", tensors="all"), torch.no_grad():
        model(ids)
    checked = 0
    for row in rows_of(tmp_path / "r"):
        if row.params["level"] != "op":
            continue
        inputs = [
            laid_out(load_tensor(tmp_path / "r", each.fingerprint), each) for each in row.inputs
        ]

        def decoded(value: Any) -> Any:
            if isinstance(value, dict) and "tensor" in value:
                return inputs[value["tensor"]]  # noqa: B023
            if isinstance(value, list):
                return [decoded(each) for each in value]
            assert not isinstance(value, dict), value
            return value

        packet, overload = row.name.removeprefix("aten.").split(".")
        function = getattr(getattr(torch.ops.aten, packet), overload)
        kwargs = {name: decoded(value) for name, value in row.params.get("kwargs", {}).items()}
        result = function(*[decoded(each) for each in row.params["args"]], **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        assert fingerprint_bytes(first) == row.outputs[0].fingerprint, row.name
        checked += 1
    assert checked >= 16


def test_ops_in_place_have_their_input_from_before(tmp_path: Path) -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    model, x = Adds(), torch.zeros(3)
    with record(tmp_path / "r", model, level="op"):
        model(x)
    (op,) = [row for row in rows_of(tmp_path / "r") if row.params["level"] == "op"]
    assert op.name == "aten.add_.Tensor"
    assert op.inputs[0].fingerprint == fingerprint_bytes(torch.zeros(3))
    assert op.outputs[0].fingerprint == fingerprint_bytes(torch.ones(3))


@pytest.mark.gradients
def test_ops_of_the_backward_pass(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model, level="op"):
        model(ids).sum().backward()
    rows = rows_of(tmp_path / "r")
    backward = [row for row in rows if row.direction == 1 and row.params["level"] == "op"]
    gelu = [row for row in backward if row.name == "aten.gelu_backward.default"]
    assert [row.params["module"] for row in gelu] == ["layers.1.act", "layers.0.act"]


def test_ops_outside_the_model_are_not_recorded(
    tmp_path: Path, model: Decoder, ids: Tensor
) -> None:
    with record(tmp_path / "r", model, level="op"), torch.no_grad():
        torch.ones(3).cos()
        model(ids)
    assert "aten.cos.default" not in {row.name for row in rows_of(tmp_path / "r")}


def test_ops_in_other_threads(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model, level="op"):
        thread = threading.Thread(target=lambda: model(ids))
        thread.start()
        thread.join()
    assert len([r for r in rows_of(tmp_path / "r") if r.name == "aten.gelu.default"]) == 2


# ----------------------------------------------------------------------------------------- contents


def test_all_tensors_can_be_saved(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model, tensors="all") as recording, torch.no_grad():
        out = model(ids)
        model(ids)
    rows = rows_of(tmp_path / "r")
    saved = load_tensor(tmp_path / "r", named(rows, "lm_head")[0].outputs[0].fingerprint)
    assert torch.equal(torch.from_numpy(saved.copy()), out)
    prints = {each.fingerprint for row in rows for each in row.operands}
    assert len(tensor_names(tmp_path / "r")) == len(prints), "equal contents share a file"
    assert recording.facts["tensors_saved"] >= len(prints)


def test_suspects_are_those_that_make_the_first_nan(tmp_path: Path, ids: Tensor) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clone().index_put_((torch.tensor(0),), torch.tensor(float("nan")))

    model = nn.Sequential(nn.Linear(4, 4), Broken(), nn.Linear(4, 4))
    with record(tmp_path / "r", model, tensors="suspects") as recording, torch.no_grad():
        model(torch.randn(2, 4))
    rows = rows_of(tmp_path / "r")
    broken = only(rows, "1")
    names = tensor_names(tmp_path / "r")
    assert load_tensor(tmp_path / "r", broken.inputs[0].fingerprint) is not None
    assert load_tensor(tmp_path / "r", broken.outputs[0].fingerprint) is not None
    assert recording.facts["tensors_saved"] == len(names) == 2, "and not those of what is around it"


def test_suspects_are_those_that_include_names(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model, tensors="suspects", include="layers.0.up_proj"):
        model(ids)
    (row,) = rows_of(tmp_path / "r")
    for each in row.operands:
        assert load_tensor(tmp_path / "r", each.fingerprint).shape == each.shape


# ---------------------------------------------------------------------------------------- bad input


def test_tensors_that_cannot_be_fingerprinted_are_counted(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Any, *others: Any, **named: Any) -> Any:
            return x

    model = Odd()
    sparse = torch.eye(3).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch call them deprecated
        quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    meta = torch.empty(2, 2, device="meta")
    with record(tmp_path / "r", model) as recording:
        model(torch.empty(0, 4), sparse, quantised, meta, 3, "text", None, object(), set())
        model(torch.tensor(2.0), [sparse, {"x": torch.ones(2)}], named=torch.ones(1) * 1j)
    unobserved = recording.facts["unobserved"]
    assert unobserved["sparse_coo tensors"] == 2
    assert unobserved["quantised tensors"] == 1
    assert unobserved["tensors on device meta"] == 1
    assert unobserved["complex64 tensors"] == 1
    assert unobserved["arguments of class object"] == 1
    assert unobserved["arguments of class set"] == 1
    assert facts_of(tmp_path / "r")["unobserved"] == unobserved
    rows = rows_of(tmp_path / "r")
    assert [each.shape for each in rows[0].inputs] == [(0, 4), (3, 3), (3,), (2, 2)]
    assert [each.fingerprint is None for each in rows[0].inputs] == [False, True, True, True]
    for reason in unobserved:
        assert reason in recording.summary()


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module, got function"):
        record(tmp_path / "r", lambda x: x)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"level": "kernel"}, "level: expected one of module, op, got 'kernel'"),
        ({"tensors": "some"}, "tensors: expected one of none, suspects, all"),
        ({"steps": 0}, "steps: expected how many"),
        ({"steps": [-1]}, "steps: expected how many"),
        ({"steps": "all"}, "steps: expected how many"),
        ({"steps": 2**70}, "steps: expected how many"),
        ({"bricks": "RmsNorm"}, "bricks: expected globs"),
        ({"bricks": 3}, "bricks: expected globs"),
        ({"include": [3]}, "include: expected globs"),
        ({"include": 3}, "include: expected globs"),
        ({"exclude": ""}, "exclude: expected globs"),
        ({"bricks": {3: "x"}}, "bricks: expected globs or classes"),
        ({"fingerprints": False, "level": "op"}, "fingerprints=False records time alone"),
    ],
)
def test_options_are_checked(
    tmp_path: Path, model: Decoder, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        record(tmp_path / "r", model, **given)


def test_a_model_is_recorded_once_at_a_time(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model):
        with pytest.raises(UsageError, match="Decoder is being recorded already"):
            record(tmp_path / "s", model).__enter__()
        with pytest.raises(UsageError, match="is being recorded already"):
            record(tmp_path / "s", nn.Sequential(model.layers[0])).__enter__()
        assert not (tmp_path / "s").exists()
        model(ids)
    assert len(rows_of(tmp_path / "r")) == 13


def test_two_models_at_once(tmp_path: Path, ids: Tensor) -> None:
    one, two = Decoder(), Decoder(layers=1)
    first = record(tmp_path / "one", one)
    second = record(tmp_path / "two", two)
    first.__enter__()
    second.__enter__()
    one(ids)
    two(ids)
    first.__exit__(None, None, None)
    two(ids)
    one(ids)
    second.__exit__(None, None, None)
    assert len(rows_of(tmp_path / "one")) == 13
    assert len(rows_of(tmp_path / "two")) == 16


def test_a_path_that_is_taken_is_refused(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model):
        model(ids)
    with pytest.raises(RunExists), record(tmp_path / "r", model):
        pass
    assert not _core.is_watched(model)
    with record(tmp_path / "r", model, overwrite=True):
        model(ids[:1])
    assert only(rows_of(tmp_path / "r"), "lm_head").outputs[0].shape == (1, 5, 16)


def test_a_model_that_is_never_called(tmp_path: Path, model: Decoder) -> None:
    with record(tmp_path / "r", model) as recording:
        pass
    assert "never called" in recording.summary()
    with pytest.raises(UsageError, match="entered once"):
        recording.__enter__()


def test_an_observer_that_fails_does_not_stop_the_model(
    tmp_path: Path, model: Decoder, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from brickline.adapters import torch_tensors

    def broken(tensor: Tensor) -> bytes:
        raise RuntimeError("no fingerprint today")

    monkeypatch.setattr(torch_tensors, "fingerprint_bytes", broken)
    with record(tmp_path / "r", model) as recording:
        out = model(ids)
    assert out.shape == (2, 5, 16)
    assert any("no fingerprint today" in text for text in recording.failures)
    assert not recording.unobserved


def test_transforms_of_torch_func(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with record(tmp_path / "r", model) as recording:
        out = torch.func.vmap(model)(torch.ones(3, 4))
    assert torch.equal(out, model(torch.ones(3, 4)))
    assert sum(recording.facts["unobserved"].values()) >= 1
    assert recording.failures == []
    assert len(rows_of(tmp_path / "r")) == 1


def test_lazy_modules_and_buffers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are called experimental
        model = nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3))
    with record(tmp_path / "r", model) as recording:
        model(torch.randn(5, 4))
        model(torch.randn(5, 4))
    rows = rows_of(tmp_path / "r")
    assert [row.name for row in rows] == ["Sequential", "0", "1"] * 2
    assert rows[1].weights[0].shape == (3, 4)
    means = [row.weights[2].fingerprint for row in named(rows, "1")]
    assert means[0] != means[1], "its running mean was written to"
    assert not recording.unobserved


def test_a_recording_that_ends_while_a_thread_runs_the_model(
    tmp_path: Path, model: Decoder, ids: Tensor
) -> None:
    inside, over = threading.Event(), threading.Event()
    outs = []

    def wait(*given: Any) -> None:
        inside.set()
        assert over.wait(60)

    handle = model.layers[1].register_forward_pre_hook(wait)
    with record(tmp_path / "r", model):
        thread = threading.Thread(target=lambda: outs.append(model(ids)))
        thread.start()
        assert inside.wait(60)
    over.set()
    thread.join()
    handle.remove()
    assert outs[0].shape == (2, 5, 16)
    assert "layers.0.up_proj" in [row.name for row in rows_of(tmp_path / "r")]


def test_threads_have_stacks_of_their_own(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    def work() -> None:
        for _ in range(5):
            with torch.no_grad():
                model(ids)

    with record(tmp_path / "r", model) as recording:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = {row.trace: row for row in rows_of(tmp_path / "r")}
    assert len(rows) == 20 * 13
    assert recording.facts["counts"]["root calls"] == 20
    assert sorted(row.position for row in rows.values() if row.name == "Decoder") == list(range(20))
    for row in rows.values():
        assert row.ordinal == 0
        if row.parent:
            assert rows[row.parent].position == row.position
            assert row.name == "embed" or row.parent < row.trace


# --------------------------------------------------------------------------------------- time alone


def test_time_alone(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model, fingerprints=False, steps=[0, 2]) as recording:
        for _ in range(3):
            model(ids)
    assert rows_of(tmp_path / "r") == []
    profile = recording.profiler.profile()
    assert profile.brick("UpProjection").count == 4
    assert profile.steps["prefill"].count == 2
    assert profile.coverage > 0
    assert "time alone" in recording.summary()


def test_time_alone_through_an_exception(tmp_path: Path, model: Decoder, ids: Tensor) -> None:
    with record(tmp_path / "r", model, fingerprints=False) as recording:
        with pytest.raises(IndexError):
            model(ids + 1000)
        model(ids)
    assert recording.profiler.profile().brick("Embedding").count == 2
    assert recording.profiler.profile().steps["prefill"].count == 2


# ----------------------------------------------------------------------------------------- compiled


@pytest.fixture
def compiler() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch itself, while it loads its compiler
        torch._dynamo.reset()
    yield functools.partial(torch.compile, backend="eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("fingerprints", [True, False])
def test_a_compiled_model_is_one_brick(
    tmp_path: Path, model: Decoder, ids: Tensor, compiler: Any, fingerprints: bool
) -> None:
    compiled = compiler(model)
    with record(tmp_path / "r", compiled, fingerprints=fingerprints) as recording:
        out = compiled(ids)
        compiled(ids)
    assert torch.equal(out, model(ids))
    assert recording.profiler.profile().brick("Decoder").count == 2
    if fingerprints:
        rows = rows_of(tmp_path / "r")
        assert [row.name for row in rows] == ["Decoder", "Decoder"]
        assert rows[0].params["compiled"] is True
        assert rows[0].outputs[0].fingerprint == fingerprint_bytes(out.detach())
        assert "layers.0.norm.weight" in rows[0].params["parameters"]
        assert len(rows[0].weights) == len(rows[0].params["parameters"])


def test_a_compiled_part_is_one_brick(
    tmp_path: Path, model: Decoder, ids: Tensor, compiler: Any
) -> None:
    model.layers[1] = compiler(model.layers[1])
    with record(tmp_path / "r", model), torch.no_grad():
        model(ids)
    names = [row.name for row in rows_of(tmp_path / "r")]
    assert "layers.0.up_proj" in names
    assert "layers.1" in names
    assert not [name for name in names if name.startswith("layers.1.")]


def test_a_module_compiled_in_place_is_one_brick(
    tmp_path: Path, model: Decoder, ids: Tensor, compiler: Any
) -> None:
    model.layers[1].compile(backend="eager", fullgraph=True)
    with record(tmp_path / "r", model), torch.no_grad():
        model(ids)
    names = [row.name for row in rows_of(tmp_path / "r")]
    assert "layers.1" in names
    assert "layers.1.up_proj" not in names
    assert "layers.0.up_proj" in names


@pytest.mark.parametrize("level", ["module", "op"])
def test_the_original_of_a_compiled_model(
    tmp_path: Path, model: Decoder, ids: Tensor, compiler: Any, level: Any
) -> None:
    """Called through torch.compile, the model that is recorded is one brick."""
    compiled = compiler(model)
    with record(tmp_path / "r", model, level=level):
        compiled(ids)
    rows = rows_of(tmp_path / "r")
    assert [row.name for row in rows] in (["Decoder"], [])


def test_compiling_meanwhile_sees_the_plain_model(
    tmp_path: Path, model: Decoder, ids: Tensor, compiler: Any
) -> None:
    compiled = compiler(lambda given: model(given) * 2)
    with record(tmp_path / "r", model):
        during = compiled(ids)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(compiled(ids), during)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames, "nothing to recompile"
    assert torch.equal(during, model(ids) * 2)
    assert rows_of(tmp_path / "r") == []


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torch_script_is_one_brick(tmp_path: Path, how: str, level: Any) -> None:
    class Holder(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch call it deprecated
        plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        scripted = getattr(torch.jit, how)(plain, *[torch.ones(1, 2)] * (how == "trace"))
    model, x = Holder(scripted), torch.ones(1, 2)
    call = vars(nn.Module)["_call_impl"]
    with record(tmp_path / "r", model, level=level) as recording, torch.no_grad():
        made = model(x)
        assert vars(nn.Module)["_call_impl"] is call
    assert recording.unobserved == {}
    outer, inner = rows_of(tmp_path / "r")
    assert (outer.name, inner.name, inner.parent) == ("Holder", "inner", outer.trace)
    assert inner.params["type"] == "Sequential"
    assert inner.params["compiled"] is True
    assert [each.fingerprint for each in inner.inputs] == [fingerprint_bytes(x)]
    assert [each.fingerprint for each in inner.outputs] == [fingerprint_bytes(made)]
    assert len(inner.weights) == 2
    assert not scripted._forward_hooks
    model(x)
    assert len(rows_of(tmp_path / "r")) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torch_script_model_itself(tmp_path: Path) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with record(tmp_path / "r", model) as recording:
        model(torch.ones(1, 2))
        with pytest.raises(UsageError, match="recorded already"), record(tmp_path / "s", model):
            pass
    assert recording.unobserved == {}
    assert [row.name for row in rows_of(tmp_path / "r")] == ["Sequential"]


# ------------------------------------------------------------------------------------- Hugging Face


def test_a_hugging_face_model_generates(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(6).reshape(1, 6)
    kwargs = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **kwargs)
    with record(tmp_path / "r", model) as recording:
        assert torch.equal(model.generate(ids, **kwargs), expected)
    rows = rows_of(tmp_path / "r")
    assert sorted({row.position for row in rows}) == [0, 1, 2, 3]
    q_proj = named(rows, "model.layers.1.self_attn.q_proj")
    assert [row.position for row in q_proj] == [0, 1, 2, 3]
    assert [row.inputs[0].shape for row in q_proj] == [(1, 6, 16)] + [(1, 1, 16)] * 3
    assert (q_proj[0].layer, q_proj[0].brick) == (1, "QkvProjection")
    assert named(rows, "model.layers.0.mlp.down_proj")[0].brick == "DownProjection"
    assert named(rows, "model.layers.0.input_layernorm")[0].brick == "RmsNorm"
    assert named(rows, "model.rotary_emb")[0].brick == "RopeEmbedding"
    assert named(rows, "lm_head")[0].brick == "LmHead"
    profile = recording.profiler.profile()
    assert profile.steps["decode"].tokens == 3
    assert profile.steps["prefill"].tokens == 6


def test_a_module_whose_attributes_raise_is_recorded(tmp_path: Path) -> None:
    class Guarded(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            if name == "inplace":
                raise RuntimeError("no such thing")
            return super().__getattr__(name)

    with record(tmp_path / "r", Guarded(4, 4)) as recording:
        recording.model(torch.ones(2, 4))
    assert recording.facts["counts"]["module calls"] == 1


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_run_says_what_recording_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    model = Decoder()
    profiler = BrickProfiler("cost", enabled=True, device="NULL", path=tmp_path / "run")
    taken = 0

    def slow(tensor: Tensor) -> bytes:
        nonlocal taken
        taken += 1
        profiler.advance(700)
        return fingerprint_bytes(tensor)

    def work(*_: Any) -> None:
        profiler.advance(5_000)

    monkeypatch.setattr("brickline.adapters.torch_tensors.fingerprint_bytes", slow)
    worked = model.layers[0].register_forward_hook(work)
    recorder = Recorder(profiler, RecordOptions(level=level))
    recorder.attach(model)
    logits = model(torch.arange(4))
    if logits.requires_grad:
        logits.sum().backward()
    recording = profiler.profile().recording
    assert recording.observing_ns == recording.overhead_ns == 700 * taken > 0
    assert profiler._now_ns() == 700 * taken + 5_000
    recorder.close()
    worked.remove()
