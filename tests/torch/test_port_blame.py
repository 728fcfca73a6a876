"""Who is blamed in ports: small pairs of different code, one slip each."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import brickline as bl

WIDTH = 24


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight.data = weight.detach().clone()
    if bias is not None:
        made.bias.data = bias.detach().clone()
    return made


def _named(candidate: nn.Module, reference: nn.Module, x: Tensor) -> list[str]:
    report = bl.check(candidate, x, reference=reference, repro=False)
    return [each.name for each in report.culprits]


# --- What a layer is handed -----------------------------------------------------------------------


class _Side(nn.Module):
    """A norm, and two layers that both read it; their sum goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.join = nn.Linear(2 * WIDTH, WIDTH)
        self.way_out = nn.Linear(WIDTH, WIDTH)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.before(x)
        return normed, normed

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.read(x)
        made = self.way_out(torch.tanh(self.left(first))) + self.join(
            functional.gelu(self.right(second))
        )
        return x + made


class _Merged(nn.Module):
    """The same with one product in, and one out for both."""

    def __init__(self, of: _Side) -> None:
        super().__init__()
        self.norm = copy.deepcopy(of.before)
        self.wi = _linear(
            torch.cat((of.left.weight, of.right.weight)), torch.cat((of.left.bias, of.right.bias))
        )
        self.wo = _linear(
            torch.cat((of.way_out.weight, of.join.weight), 1), of.way_out.bias + of.join.bias
        )

    def act(self, x: Tensor) -> Tensor:
        return functional.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.wi(self.norm(x)).split((WIDTH, 2 * WIDTH), -1)
        return x + self.wo(torch.cat((torch.tanh(left), self.act(right)), -1))


class _Stack(nn.Module):
    def __init__(self, name: str, *layers: nn.Module) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList(layers))
        self.layers = getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def sides() -> tuple[_Stack, _Stack]:
    torch.manual_seed(0)
    side = _Stack("blocks", *(_Side() for _ in range(3)))
    for parameter in side.parameters():
        nn.init.normal_(parameter, std=0.3)
    return side, _Stack("h", *(_Merged(each) for each in side.blocks))


def test_ports_that_join_layers_are_right(sides: tuple[_Stack, _Stack]) -> None:
    x = _random(2, 5, WIDTH)
    assert bl.check(sides[0], x, reference=sides[1])
    assert bl.check(sides[1], x, reference=sides[0])


def test_who_hands_a_layer_the_wrong_input_is_blamed(sides: tuple[_Stack, _Stack]) -> None:
    side, merged = sides
    block = side.blocks[1]
    block.read = lambda x: (block.before(x), x)
    assert _named(side, merged, _random(2, 5, WIDTH)) == ["blocks.1"]


def test_a_norm_that_is_called_again_is_not_blamed(sides: tuple[_Stack, _Stack]) -> None:
    side, merged = sides
    block = side.blocks[1]
    block.read = lambda x: (block.before(x), block.before(torch.tanh(x)))
    assert _named(side, merged, _random(2, 5, WIDTH)) == ["blocks.1"]


def test_an_activation_before_a_joined_product_is_blamed(sides: tuple[_Stack, _Stack]) -> None:
    side, merged = sides
    merged.h[2].act = lambda x: functional.gelu(x, approximate="tanh")
    assert _named(merged, side, _random(2, 5, WIDTH)) == ["h.2"]


def test_a_constant_is_blamed_on_who_adds_it(sides: tuple[_Stack, _Stack]) -> None:
    side, merged = sides
    merged.h[1].wo.bias.data = side.blocks[1].join.bias.data.clone()
    assert _named(merged, side, _random(2, 5, WIDTH)) == ["h.1.wo"]


# --- Scales ---------------------------------------------------------------------------------------


class _Scaled(nn.Module):
    """Looks up, scales, and adds what normed layers make."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def scale(self, x: Tensor) -> Tensor:
        return x * WIDTH**0.5

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.scale(self.table(tokens))
        for norm, way in zip(self.norms, self.ways, strict=True):
            x = x + way(norm(x))
        return x


class _Step(nn.Module):
    def __init__(self, norm: nn.Module, way: nn.Module) -> None:
        super().__init__()
        self.ln, self.fc = copy.deepcopy(norm), copy.deepcopy(way)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.ln(x)) + x


class _Steps(_Scaled):
    def __init__(self, of: _Scaled) -> None:
        nn.Module.__init__(self)
        self.wte = copy.deepcopy(of.table)
        self.h = nn.ModuleList(map(_Step, of.norms, of.ways))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.scale(self.wte(tokens))
        for step in self.h:
            x = step(x)
        return x


def test_a_scale_that_the_first_norm_hides_is_found() -> None:
    torch.manual_seed(0)
    reference = _Steps(_Scaled())
    candidate = _Scaled()
    candidate.load_state_dict(
        {
            "table.weight": reference.wte.weight,
            **{
                f"norms.{n}.{k}": v
                for n in range(3)
                for k, v in reference.h[n].ln.state_dict().items()
            },
            **{
                f"ways.{n}.{k}": v
                for n in range(3)
                for k, v in reference.h[n].fc.state_dict().items()
            },
        }
    )
    tokens = torch.arange(20).reshape(2, 10)
    assert bl.check(candidate, tokens, reference=reference)
    candidate, reference = _Steps(candidate), candidate
    candidate.scale = lambda x: x
    assert _named(candidate, reference, tokens) == ["_Steps"]


# --- Norms folded into convolutions ---------------------------------------------------------------


class _Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        for norm in self.norms:
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.normal_(norm.running_mean)
            nn.init.normal_(norm.bias)
            nn.init.uniform_(norm.weight, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + functional.silu(norm(conv(x)))
        return x


class _FoldedConv(nn.Module):
    def __init__(self, of: _Conv) -> None:
        super().__init__()
        self.c = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        for mine, conv, norm in zip(self.c, of.convs, of.norms, strict=True):
            factor = norm.weight / (norm.running_var + norm.eps).sqrt()
            mine.weight.data = conv.weight.detach() * factor.detach()[:, None, None, None]
            mine.bias.data = (norm.bias - norm.running_mean * factor).detach()

    def after(self, x: Tensor) -> Tensor:
        return functional.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.c:
            x = x + self.after(conv(x))
        return x


@pytest.fixture
def convolutions() -> tuple[_Conv, _FoldedConv]:
    torch.manual_seed(0)
    reference = _Conv().eval()
    return reference, _FoldedConv(reference).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folded_norms_are_right(
    convolutions: tuple[_Conv, _FoldedConv], dtype: torch.dtype
) -> None:
    reference, folded = convolutions
    x = _random(2, 8, 6, 6).to(dtype)
    assert bl.check(folded.to(dtype), x, reference=reference.to(dtype))


def test_a_norm_that_is_folded_wrongly_is_found(convolutions: tuple[_Conv, _FoldedConv]) -> None:
    reference, folded = convolutions
    folded.c[1].weight.data *= 1.02
    assert _named(folded, reference, _random(2, 8, 6, 6)) == ["c.1"]


def test_an_activation_after_a_folded_norm_is_found(
    convolutions: tuple[_Conv, _FoldedConv],
) -> None:
    reference, folded = convolutions
    calls = iter(range(99))
    folded.after = lambda x: functional.gelu(x) if next(calls) % 3 == 1 else functional.silu(x)
    report = bl.check(folded, _random(2, 8, 6, 6), reference=reference, repro=False)
    assert [each.name for each in report.culprits] == ["_FoldedConv"]


# --- What weights say -----------------------------------------------------------------------------


# --- Layouts and copies ---------------------------------------------------------------------------


class _TimeFirst(nn.Module):
    """The layers of a `_Side` stack, with places before the batch and one product in."""

    def __init__(self, of: _Stack) -> None:
        super().__init__()
        self.h = nn.ModuleList(_Merged(each) for each in of.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1).contiguous()
        for layer in self.h:
            x = layer(x)
        return x.transpose(0, 1)


def test_places_before_the_batch_hide_no_fault(sides: tuple[_Stack, _Stack]) -> None:
    side = sides[0]
    port = _TimeFirst(side)
    x = _random(3, 5, WIDTH)
    assert bl.check(port, x, reference=side)
    port.h[1].act = functional.silu
    assert _named(port, side, x) == ["h.1"]


class _Gains(nn.Module):
    """A norm whose gains are widened, and a layer; perhaps the norm is called twice."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        self.add_module(names[0], nn.RMSNorm(WIDTH))
        self.add_module(names[1], nn.Linear(WIDTH, WIDTH))
        self.norm, self.way = getattr(self, names[0]), getattr(self, names[1])

    def normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * self.norm.weight.float()).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.way(self.normed(x)))


def test_a_weight_in_another_dtype_is_the_same_weight() -> None:
    torch.manual_seed(0)
    ours, theirs = _Gains(("ln", "fc")).bfloat16(), _Gains(("gain", "proj")).bfloat16()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        nn.init.normal_(mine)
        other.data = mine.data.clone()
    x = _random(4, WIDTH).bfloat16()
    assert bl.check(ours, x, reference=theirs)
    ours.fc.bias.data += 0.5
    assert _named(ours, theirs, x) == ["fc"]


# --- Recurrent layers -----------------------------------------------------------------------------


class _Speaker(nn.Module):
    """Looks up, and hands what it found to layers of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.table(tokens))[0])


class _Step1(nn.Module):
    """One layer, step by step; both biases are one."""

    def __init__(self, of: nn.LSTM, layer: int) -> None:
        super().__init__()
        bias = getattr(of, f"bias_ih_l{layer}") + getattr(of, f"bias_hh_l{layer}")
        self.inward = _linear(getattr(of, f"weight_ih_l{layer}"), bias)
        self.across = nn.Parameter(getattr(of, f"weight_hh_l{layer}").detach().t().clone())

    def shown(self, gate: Tensor, cell: Tensor) -> Tensor:
        return gate * torch.tanh(cell)

    def forward(self, x: Tensor) -> Tensor:
        given, made = self.inward(x), []
        h = c = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            i, f, g, o = (given[:, step] + h @ self.across).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = self.shown(torch.sigmoid(o), c)
            made.append(h)
        return torch.stack(made, 1)


class _Stepper(nn.Module):
    def __init__(self, of: _Speaker) -> None:
        super().__init__()
        self.wte, self.out = copy.deepcopy(of.table), copy.deepcopy(of.head)
        self.stack = nn.ModuleList(_Step1(of.rnn, layer) for layer in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for layer in self.stack:
            x = layer(x)
        return self.out(x)


@pytest.fixture
def speaker() -> _Speaker:
    torch.manual_seed(0)
    return _Speaker()


def test_recurrent_layers_after_a_table_are_checked(speaker: _Speaker) -> None:
    tokens = torch.arange(14).reshape(2, 7)
    candidate = copy.deepcopy(speaker)
    assert bl.check(candidate, tokens, reference=speaker)
    candidate.rnn.weight_hh_l1.data[3] *= 1.5
    assert _named(candidate, speaker, tokens) == ["rnn"]


def test_a_port_that_steps_by_hand_is_checked(speaker: _Speaker) -> None:
    tokens = torch.arange(14).reshape(2, 7)
    candidate = _Stepper(speaker)
    assert bl.check(candidate, tokens, reference=speaker)
    assert bl.check(speaker, tokens, reference=candidate)
    candidate.stack[1].shown = lambda gate, cell: gate * cell
    assert _named(candidate, speaker, tokens) == ["stack.1"]
