"""A check without a reference: every operation against its own float64 execution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from brickline.checking.alone import check_alone  # noqa: E402
from brickline.checking.regions import REGION  # noqa: E402
from brickline.verdict import Status, Verdict  # noqa: E402


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A norm, a gated product and a sum."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.inner = inner or nn.GELU()

    def forward(self, x: Any) -> Any:
        return x + self.down(self.inner(self.up(self.norm(x))))


class Model(nn.Module):
    """Two layers and a head."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(inner)])
        self.head = nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# --- Custom operations, some of them wrong --------------------------------------------------------


@torch.library.custom_op("brickline_test::good_sum", mutates_args=())
def good_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


@torch.library.custom_op("brickline_test::short_sum", mutates_args=())
def short_sum(x: torch.Tensor) -> torch.Tensor:
    """Drops the last term in float32 only, as a kernel with a wrong tail does."""
    return x[..., :-1].sum(-1) if x.dtype is torch.float32 else x.sum(-1)


@torch.library.custom_op("brickline_test::only_float32", mutates_args=())
def only_float32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise RuntimeError("only float32 is supported")
    return x + 1


CALLS = {"count": 0}


@torch.library.custom_op("brickline_test::racy", mutates_args=())
def racy(x: torch.Tensor) -> torch.Tensor:
    """Wrong the first time it runs in float32, right ever after."""
    if x.dtype is torch.float64:
        return x * 2
    CALLS["count"] += 1
    return x * (3 if CALLS["count"] == 1 else 2)


class Calling(nn.Module):
    """Calls a function, with an activation around it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


# --- Clean ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_clean_model_is_cleared(dtype: Any) -> None:
    report = check_alone(Model().to(dtype), (torch.randn(6, 32).to(dtype),))
    assert report.status is Status.MATCHED
    assert report
    assert "model logic" in report.headline
    assert report.coverage.complete
    assert (report.candidate, report.findings) == ("Model", ())
    names = {row.name for row in report.verdicts}
    assert {"layers.0.norm", "layers.1.up", "layers.1", "head"} <= names
    row = next(row for row in report.verdicts if row.name == "layers.1.up")
    assert (row.op, row.layer_idx, row.position) == ("aten.addmm.default", 1, 0)


def test_backward_is_seen_with_its_modules() -> None:
    report = check_alone(Model(), drive=lambda model: model(torch.randn(6, 32)).sum().backward())
    assert report.status is Status.MATCHED
    backward = {(row.name, row.op) for row in report.verdicts if row.direction == "backward"}
    assert ("layers.1.down", "aten.mm.default") in backward
    assert ("layers.0.norm", "aten.native_layer_norm_backward.default") in backward
    assert ("layers.0.inner", "aten.gelu_backward.default") in backward


def test_gradients_belong_to_the_module_whose_operation_they_are_of() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU())

    def drive(model: Any) -> None:
        torch.nn.functional.mse_loss(model(torch.randn(2, 2, 9)), torch.zeros(2, 4, 7)).backward()

    report = check_alone(model, drive=drive)
    backward = {(row.name, row.op) for row in report.verdicts if row.direction == "backward"}
    assert ("0", "aten.convolution_backward.default") in backward
    assert ("1", "aten.native_batch_norm_backward.default") in backward
    assert not any("mse_loss" in op for _, op in backward)


def test_position_counts_the_roots_calls_and_ordinal_repeats_within_one() -> None:
    shared = nn.Linear(32, 32)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: Any) -> Any:
            return self.shared(self.shared(x))

    report = check_alone(Twice(), drive=lambda m: [m(torch.randn(2, 32)) for _ in range(3)])
    rows = [(row.position, row.ordinal) for row in report.verdicts if row.name == "shared"]
    assert rows == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_what_the_driver_computes_is_not_the_candidates() -> None:
    def drive(model: Any) -> None:
        (model(torch.randn(6, 32)).softmax(-1) * 3).argmax()

    ops = {row.op for row in check_alone(Model(), drive=drive).verdicts}
    assert "aten.addmm.default" in ops
    assert not ops & {"aten._softmax.default", "aten.argmax.default", "aten.mul.Tensor"}


def test_a_function_is_a_candidate_too() -> None:
    def scaled(x: Any) -> Any:
        return torch.softmax(x * 0.5, -1)

    report = check_alone(scaled, (torch.randn(4, 9),))
    assert report.status is Status.MATCHED
    assert {row.name for row in report.verdicts} == {"scaled"}


def test_in_place_operations_are_held_to_what_they_were_given() -> None:
    def overwrites(x: Any) -> Any:
        x = x.clone()
        x[1:].copy_(x[:-1].clone())
        return x.mul_(0.1).add_(x)

    report = check_alone(overwrites, (torch.randn(5, 5),))
    assert report.status is Status.MATCHED
    assert {"aten.mul_.Tensor", "aten.add_.Tensor", "aten.copy_.default"} <= {
        row.op for row in report.verdicts
    }


def test_the_candidate_computes_what_it_would_have_computed() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            return self.drop(self.norm(x))

    x, outputs = torch.randn(16, 8), []
    models = [Stateful(), Stateful()]
    torch.manual_seed(5)
    outputs.append(models[0](x))
    torch.manual_seed(5)
    report = check_alone(models[1], drive=lambda model: outputs.append(model(x)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(models[0].norm.running_var, models[1].norm.running_var)
    assert models[1].norm.num_batches_tracked == 1
    assert report.status is Status.MATCHED
    assert any("random by design" in note for note in report.coverage.notes)
    assert "forward" not in models[1].__dict__
    assert not models[1].norm._forward_hooks


def test_inference_mode_and_autocast_are_no_obstacle() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 32)
    with torch.inference_mode():
        report = check_alone(layer, (x,))
    assert report.status is Status.MATCHED, report.coverage.notes

    def drive(model: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).sum()
        loss.backward()

    report = check_alone(layer, drive=drive)
    assert report.status is Status.MATCHED, report.coverage.notes


# --- Wrong ----------------------------------------------------------------------------------------


def test_a_wrong_custom_operation_is_the_culprit() -> None:
    model = Model(Calling(lambda x: torch.relu(x) + short_sum(x)[..., None]))
    report = check_alone(model, (torch.randn(6, 32),))
    assert report.status is Status.DIVERGED
    assert not report
    (finding,) = report.culprits
    assert (finding.name, finding.op) == ("layers.1.inner", "brickline_test.short_sum.default")
    assert (finding.layer_idx, finding.position, finding.direction) == (1, 0, "forward")
    assert finding.z > 2
    assert finding.local_error > 0
    assert "short_sum" in report.headline
    assert "model logic" in str(report.logic)
    assert report.exit_status == 1
    assert type(report).from_json(report.to_json()).culprits[0].name == finding.name


def test_a_good_custom_operation_is_cleared() -> None:
    report = check_alone(Calling(good_sum), (torch.randn(6, 32),))
    assert report.status is Status.MATCHED


def test_an_operation_that_refuses_float64_leaves_it_open() -> None:
    report = check_alone(Calling(only_float32), (torch.randn(6),))
    assert report.status is Status.INCONCLUSIVE
    assert report.coverage.compared < report.coverage.total
    assert any("only float32 is supported" in note for note in report.coverage.notes)
    assert [row.verdict for row in report.verdicts if "only" in row.op] == [Verdict.UNKNOWN]


def test_wrong_once_and_right_again_is_nondeterministic() -> None:
    CALLS["count"] = 0
    report = check_alone(Calling(racy), (torch.randn(6),))
    assert report.status is Status.INCONCLUSIVE
    assert [each.verdict for each in report.findings] == [Verdict.NONDETERMINISTIC]
    assert not report.culprits


def test_a_kernel_that_is_launched_past_torch_is_noticed() -> None:
    def past_torch(x: Any) -> Any:
        made = torch.empty(x.shape)
        made.numpy()[...] = x.numpy() + 1
        return made * 2

    report = check_alone(Calling(past_torch), (torch.randn(6),))
    assert report.status is Status.INCONCLUSIVE
    assert any("changed without an operation" in note for note in report.coverage.notes)


def test_what_is_returned_without_an_operation_is_noticed() -> None:
    def past_torch(x: Any) -> Any:
        made = torch.zeros(x.shape)
        made.numpy()[...] = x.numpy() + 1
        return made

    assert check_alone(Calling(past_torch), (torch.randn(6),)).status is Status.INCONCLUSIVE


# --- Values that are not finite -------------------------------------------------------------------


def test_the_origin_of_a_nan_is_named() -> None:
    model = Model(Calling(lambda x: torch.log(x) * 2))
    report = check_alone(model, (torch.randn(6, 32),))
    assert report.status is Status.DIVERGED
    first = report.findings[0]
    assert (first.name, first.op) == ("layers.1.inner", "aten.log.default")
    assert first.verdict is Verdict.NONFINITE_ORIGIN
    assert "negative number" in first.cause
    assert len(report.findings) == 1


def test_an_infinity_that_reaches_no_output_is_watched() -> None:
    def masked(x: Any) -> Any:
        bias = torch.log((x > 0).float())
        return torch.softmax(x + bias, -1)

    report = check_alone(masked, (torch.arange(-3.0, 4.0).reshape(1, 7),))
    assert report.status is Status.MATCHED
    assert Verdict.WATCH in {row.verdict for row in report.verdicts}


def test_a_row_that_is_all_masked_is_classed() -> None:
    def attention(x: Any) -> Any:
        return torch.softmax(x.masked_fill(x < 10, -math.inf), -1)

    report = check_alone(attention, (torch.randn(3, 4),))
    assert "all masked" in report.findings[0].cause


# --- Runs that end early --------------------------------------------------------------------------


def test_a_candidate_that_raises_keeps_what_was_seen() -> None:
    def raises(x: Any) -> Any:
        x = x @ x
        raise ValueError("no more")

    report = check_alone(raises, (torch.randn(6, 6),))
    assert report.status is Status.INCONCLUSIVE
    assert report.coverage.compared == 1
    assert "ValueError: no more" in report.coverage.notes[0]


def test_an_interrupt_leaves_a_report() -> None:
    def interrupted(x: Any) -> Any:
        short_sum(x)
        raise KeyboardInterrupt

    report = check_alone(interrupted, (torch.randn(6, 6),))
    assert report.status is Status.DIVERGED
    assert "interrupted" in report.coverage.notes[0]


def test_a_candidate_that_computes_nothing_is_not_matched() -> None:
    report = check_alone(lambda x: x, (torch.randn(3),))
    assert report.status is Status.INCONCLUSIVE
    assert "nothing could be compared" in report.headline


def test_progress_is_told() -> None:
    told: list[tuple[int, Any, str]] = []
    check_alone(
        Model(),
        drive=lambda model: [model(torch.randn(2, 32)) for _ in range(4)],
        progress=lambda *each: told.append(each),
    )
    assert told
    assert told[0][0] > 0


# --- Compiled -------------------------------------------------------------------------------------


def wrong_backend(graph: Any, inputs: Any) -> Any:
    """A compiler that scales what it compiles."""
    return lambda *args: tuple(each * 1.01 for each in graph(*args))


def test_a_compiled_module_is_one_brick() -> None:
    model = torch.compile(Model(), backend="eager")
    report = check_alone(model, (torch.randn(6, 32),))
    assert report.status is Status.MATCHED
    assert [(row.name, row.op) for row in report.verdicts] == [("Model", REGION)]


def test_a_wrong_compiler_is_found_at_the_boundary() -> None:
    model = Model()
    model.layers[1].compile(backend=wrong_backend)
    with torch.no_grad():
        report = check_alone(model, (torch.randn(6, 32),))
        whole = check_alone(torch.compile(Model(), backend=wrong_backend), (torch.randn(6, 32),))
    assert [(each.name, each.op) for each in report.culprits] == [("layers.1", REGION)]
    assert report.culprits[0].z > 2
    assert [each.op for each in whole.culprits] == [REGION]


def test_a_compiled_function_is_a_brick() -> None:
    function = torch.compile(lambda x: torch.softmax(x, -1), backend="eager")
    report = check_alone(function, (torch.randn(3, 9),))
    assert [row.op for row in report.verdicts] == [REGION]
    inside = Calling(torch.compile(lambda x: x * 2, backend=wrong_backend))
    report = check_alone(inside, (torch.randn(3, 9),))
    assert [each.op for each in report.culprits] == [REGION]
