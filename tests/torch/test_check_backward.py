"""The backward half of a check against a reference: each module's VJP on the candidate's values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import brickline as bl
from brickline.checking.session import Session
from brickline.verdict import Status


class Through(torch.autograd.Function):
    """Passes a tensor on, and changes the gradient that comes back."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


class Feed(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.layers = nn.ModuleList([Feed(), Feed()])
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(1))


def training(model) -> None:
    torch.manual_seed(3)
    model.zero_grad()
    out = model(TOKENS)
    functional.cross_entropy(out.flatten(0, 1).float(), TOKENS.flatten()).backward()


def pair(make=Model) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make()
    return copy.deepcopy(model), model


def backward_names(report: bl.DivergenceReport) -> list[str]:
    return [each.name for each in report.findings if each.direction == "backward"]


def spoil(module: nn.Module, change) -> None:
    forward = module.forward
    module.forward = lambda *args: Through.apply(forward(*args), change)


def checked(candidate, reference, drive=training) -> bl.DivergenceReport:
    return bl.check(candidate, reference=reference, drive=drive, repro=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clean_training_step_matches_and_lists_its_gradients(dtype):
    candidate, reference = pair()
    report = checked(candidate.to(dtype), reference)
    assert report.status is Status.MATCHED
    rows = [each for each in report.verdicts if each.direction == "backward"]
    names = {each.name for each in rows}
    assert {"Model", "table", "layers.0", "layers.1.act", "head"} <= names
    assert {each.op for each in rows if each.name == "layers.0.up"} == {
        "input 0",
        "parameter weight",
        "parameter bias",
    }


@pytest.mark.parametrize("path", ["table", "layers.0.act", "layers.1.down", "layers.1", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_gradient_names_its_module_alone(path, dtype):
    candidate, reference = pair()
    spoil(candidate.get_submodule(path), lambda grad: grad * 1.3)
    report = checked(candidate.to(dtype), reference)
    assert report.status is Status.DIVERGED
    assert backward_names(report) == [path]
    assert [each.name for each in report.culprits] == [path]
    assert report.culprits[0].position == 0


def test_glue_that_loses_a_gradient_names_the_parent():
    class Cut(Feed):
        def forward(self, x):
            return x.detach() + self.dropout(self.down(self.act(self.up(self.norm(x)))))

    candidate, reference = pair()
    candidate.layers[1].__class__ = Cut
    report = checked(candidate, reference)
    assert backward_names(report) == ["layers.1"]
    assert "input 0" in report.culprits[0].evidence["gradients_wrong"]


def test_a_child_whose_output_gets_no_gradient_names_the_parent():
    class Cut(Feed):
        def forward(self, x):
            return x + self.down(self.act(self.up(self.norm(x)).detach()))

    candidate, reference = pair()
    for each in (candidate, reference):
        each.eval()
    candidate.layers[0].__class__ = Cut
    assert backward_names(checked(candidate, reference)) == ["layers.0"]


def test_two_wrong_gradients_are_both_named():
    candidate, reference = pair()
    spoil(candidate.layers[0], lambda grad: grad * 2)
    spoil(candidate.layers[0].act, lambda grad: -grad)
    assert set(backward_names(checked(candidate, reference))) == {"layers.0", "layers.0.act"}


def test_a_wrong_gradient_of_a_parameter_is_seen_where_the_weight_is_tied():
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.table.weight

    candidate, reference = pair(Tied)
    assert checked(candidate, reference).status is Status.MATCHED
    head = candidate.head
    head.forward = lambda x: functional.linear(x, Through.apply(head.weight, lambda grad: grad / 2))
    report = checked(candidate, reference)
    assert backward_names(report) == ["head"]


def test_a_module_that_is_wrong_in_forward_is_not_judged_in_backward():
    candidate, reference = pair()
    forward = candidate.layers[0].act.forward
    candidate.layers[0].act.forward = lambda x: forward(x) * 1.1
    report = checked(candidate, reference)
    assert [each.name for each in report.culprits] == ["layers.0.act"]
    assert backward_names(report) == []


def test_functions_are_checked_too():
    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.relu()

        @staticmethod
        def backward(ctx, grad):
            return grad

    def mine(x):
        return Relu.apply(x)

    def relu(x):
        return x.relu()

    x = torch.randn(4, 8, requires_grad=True)
    report = checked(mine, relu, lambda function: function(x).sum().backward())
    assert backward_names(report) == ["mine"]
    report = checked(relu, relu, lambda function: function(x).sum().backward())
    assert report.status is Status.MATCHED


def test_nothing_is_kept_or_judged_without_gradients():
    candidate, reference = pair()
    session = Session(candidate, reference)
    with torch.no_grad():
        session.drive(lambda model: model(TOKENS))
    session.drive(lambda model: model(TOKENS))
    assert session.backward.rows() == []
    assert session.backward.judged == 0


def test_the_model_is_left_as_it_was():
    candidate, reference = pair()
    before = copy.deepcopy(candidate)
    training(before)
    checked(candidate, reference)
    for path, module in candidate.named_modules():
        assert not module._forward_hooks, path
        assert not module._forward_pre_hooks, path
        assert not {"forward", "weight", "bias"} & module.__dict__.keys()
    for name, parameter in candidate.named_parameters():
        assert torch.equal(parameter.grad, dict(before.named_parameters())[name].grad), name
        assert not parameter._backward_hooks


def test_gradients_that_were_not_asked_for_are_not_missed():
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x).tanh())

    def penalty(model):
        x = torch.randn(4, 8, requires_grad=True)
        out = model(x).square().sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        (out + grad.square().sum()).backward()

    candidate, reference = pair(Dense)
    assert checked(candidate, reference, penalty).status is Status.MATCHED


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_judged(reentrant):
    class Saving(Model):
        def forward(self, tokens):
            x = self.table(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(x)

    candidate, reference = pair(Saving)
    # A reentrant checkpoint hides the root's own gradients, which is then said.
    clean = Status.INCONCLUSIVE if reentrant else Status.MATCHED
    assert checked(candidate, reference).status is clean
    spoil(candidate.layers[1].up, lambda grad: grad * 2)
    assert backward_names(checked(candidate, reference)) == ["layers.1.up"]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn(self.relu(self.conv(x)))
        out += x
        return self.relu(out)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


class Chained(nn.Module):
    """One output is made from another; one argument is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.join = Both(), Join()

    def forward(self, x):
        a, b = self.both(x)
        return self.join([a, b, x])


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.a(x).tanh()
        return self.b(hidden), hidden


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(24, 4)

    def forward(self, parts):
        return self.out(torch.cat(parts, -1))


class Keeping(nn.Module):
    """Keeps a tensor with its gradient from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), None

    def forward(self, x):
        self.kept = self.linear(x) if self.kept is None else (self.linear(x) + self.kept).tanh()
        return self.kept


HARMLESS = {
    "in place": (Residual, (2, 3, 6, 6)),
    "recurrent": (Recurrent, (2, 5, 8)),
    "chained": (Chained, (4, 8)),
    "torch's own": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        (2, 5, 8),
    ),
    "sparse": (lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)), None),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_structures_match(name):
    make, shape = HARMLESS[name]
    candidate, reference = pair(make)
    given = torch.randint(10, (2, 3)) if shape is None else torch.randn(shape)

    def drive(model):
        model(given).square().sum().backward()

    report = checked(candidate, reference, drive)
    assert backward_names(report) == []
    assert report.status is Status.MATCHED


def test_gradients_that_pass_by_a_call_are_not_judged():
    candidate, reference = pair(Keeping)

    def drive(model):
        model.kept = None
        sum(model(torch.full((2, 8), float(n))).sum() for n in range(3)).backward()

    session = Session(candidate, reference)
    session.drive(drive)
    assert session.backward.culprits() == []
    assert session.backward.notes["gradients also pass by what it keeps"] == 3


def test_a_backward_pass_that_fails_accuses_nobody():
    candidate, reference = pair()

    def fail(grad):
        raise RuntimeError("no")

    candidate.layers[0].up.weight.register_hook(fail)
    report = checked(candidate, reference)
    assert report.status is Status.INCONCLUSIVE
    assert backward_names(report) == []


def test_other_code_is_judged_by_weights_and_by_differences():
    class Own(nn.Module):
        def __init__(self, feed: Feed) -> None:
            super().__init__()
            self.ln, self.w1, self.w2 = feed.norm, feed.up, feed.down
            self.gelu = Gelu()

        def forward(self, x):
            return self.w2(self.gelu(self.w1(self.ln(x)))) + x

    class Gelu(nn.Module):
        def forward(self, x):
            return functional.gelu(x)

    class Port(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.emb, self.out = model.table, model.head
            self.body = nn.Sequential(*(Own(each) for each in model.layers))

        def forward(self, tokens):
            return self.out(self.body(self.emb(tokens)))

    _, reference = pair()
    reference.eval()
    assert checked(Port(copy.deepcopy(reference)), reference).status is Status.MATCHED
    for path in ("body.0.w2", "body.1.gelu", "body.1"):
        candidate = Port(copy.deepcopy(reference))
        spoil(candidate.get_submodule(path), lambda grad: grad * 1.5)
        assert backward_names(checked(candidate, reference)) == [path]


def test_gradients_that_change_from_run_to_run_are_no_culprits():
    candidate, reference = pair()
    reference.eval(), candidate.eval()
    generator = torch.Generator().manual_seed(5)

    def noisy(grad):
        return grad + torch.randn(grad.shape, generator=generator) * grad.abs().mean()

    spoil(candidate.layers[0].act, noisy)
    report = checked(candidate, reference)
    assert backward_names(report) == []
    assert "nondeterministic" in report.verdicts.counts()


def test_a_step_of_an_optimizer_after_backward_changes_nothing():
    candidate, reference = pair()
    spoil(candidate.layers[0].act, lambda grad: grad * 2)

    def drive(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        training(model)
        optimizer.step()

    assert backward_names(checked(candidate, reference, drive)) == ["layers.0.act"]
