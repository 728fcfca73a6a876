"""Which partners of a port are believed where something is wrong, and which are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import brickline as bl
from brickline.checking.facts import Fact
from brickline.checking.stage import Key
from brickline.oracle.ratios import Ratios
from brickline.verdict import Verdict

WIDTH = 24


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _fact(path: str, error: float) -> Fact:
    key = Key(path, 0, "aten::add", 0, 0)
    ratios = Ratios(1e6 * error, 0.0, 0.0, error, error, 0)
    return Fact(key, key, ratios, Verdict.CULPRIT, torch.float32)


def _named(candidate: nn.Module, reference: nn.Module, x: Tensor) -> list[str]:
    report = bl.check(candidate, x, reference=reference, repro=False)
    return [each.name for each in report.culprits]


# --- Places that go through a product on their own ------------------------------------------------


class _Placed(nn.Module):
    """Places are added to what asks and is asked, not to what is told."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = self.q(x + at), self.k(x + at), self.v(x)
        return x + self.o(functional.scaled_dot_product_attention(q, k, v))


class _PlacedApart(nn.Module):
    def __init__(self, of: _Placed) -> None:
        super().__init__()
        self.qkv = _joined(of.q, of.k, of.v)
        self.at = _joined(of.q, of.k)
        self.at.bias.data.zero_()
        self.out = _joined(of.o)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        more_q, more_k = self.at(at).chunk(2, -1)
        seen = functional.scaled_dot_product_attention(q + more_q, k + more_k, v)
        return self.end(x, self.out(seen))

    def end(self, x: Tensor, seen: Tensor) -> Tensor:
        return x + seen


def _joined(*layers: nn.Linear) -> nn.Linear:
    weights = [each.weight.detach() for each in layers]
    made = nn.Linear(weights[0].shape[1], sum(map(len, weights)))
    made.weight.data = torch.cat(weights)
    made.bias.data = torch.cat([each.bias.detach() for each in layers])
    return made


class _Places(nn.Module):
    def __init__(self, name: str, *layers: nn.Module) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList(layers))
        self.parts = getattr(self, name)
        self.register_buffer("at", _random(7, WIDTH, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.parts:
            x = layer(x, self.at)
        return x


@pytest.fixture
def placed() -> tuple[_Places, _Places]:
    torch.manual_seed(0)
    layers = [_Placed() for _ in range(2)]
    return _Places("blocks", *layers), _Places("h", *map(_PlacedApart, layers))


def test_products_of_different_values_are_no_partners_of_one(
    placed: tuple[_Places, _Places],
) -> None:
    x = _random(2, 7, WIDTH)
    assert bl.check(placed[0], x, reference=placed[1], repro=False)
    assert bl.check(placed[1], x, reference=placed[0], repro=False)


def test_beside_such_products_a_fault_is_named_alone(placed: tuple[_Places, _Places]) -> None:
    port = placed[1]
    port.parts[1].end = lambda x, seen: x - seen
    assert _named(port, placed[0], _random(2, 7, WIDTH)) == ["h.1"]


# --- Both sides end alike -------------------------------------------------------------------------


# --- Where the sides come together again ----------------------------------------------------------


class _Weighed(nn.Module):
    """Its weight has a length of its own, so that nothing is multiplied with what is held."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.length = nn.Parameter(torch.rand(width, 1) + 0.5)
        self.way = nn.Parameter(torch.randn(width, width))

    def weight(self) -> Tensor:
        return self.way * (self.length / self.way.norm(dim=1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight().t()


class _Plain(nn.Module):
    def __init__(self, of: _Weighed) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.proj.weight.data = of.weight().detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class _Chain(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.parts = list(parts.values())

    def act(self, x: Tensor, number: int) -> Tensor:
        return functional.elu(x)

    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            x = self.act(part(x), number)
        return x


@pytest.fixture
def chains() -> tuple[_Chain, _Chain]:
    torch.manual_seed(0)
    weighed = {name: _Weighed(WIDTH) for name in ("first", "then", "later", "last")}
    plain = {f"p_{name}": _Plain(each) for name, each in weighed.items()}
    return _Chain(**weighed), _Chain(**plain)


def test_without_weights_to_go_by_the_chains_are_the_same(chains: tuple[_Chain, _Chain]) -> None:
    assert bl.check(chains[1], _random(5, WIDTH), reference=chains[0], repro=False)


def test_the_earliest_value_from_which_all_is_right_tells_who_is_wrong(
    chains: tuple[_Chain, _Chain],
) -> None:
    port = chains[1]
    port.act = lambda x, number: (functional.leaky_relu if number == 1 else functional.elu)(x)
    assert _named(port, chains[0], _random(5, WIDTH))[:1] == ["_Chain"]


# --- A factor that all layers share ---------------------------------------------------------------


class _Scores(nn.Module):
    """Scales what comes of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.norm(self.q(x)) @ self.k(x).mT / 5
        return x + scores.softmax(-1) @ self.v(x)


class _ScaledNorm(nn.Module):
    """Has the scale in the weight of its norm."""

    def __init__(self, of: _Scores) -> None:
        super().__init__()
        self.qkv = _joined(of.q, of.k, of.v)
        self.q_norm = nn.RMSNorm(WIDTH)
        self.q_norm.weight.data = of.norm.weight.detach() / 5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + functional.scaled_dot_product_attention(self.q_norm(q), k, v, scale=1.0)


def test_another_factor_than_that_of_other_layers_is_wrong() -> None:
    torch.manual_seed(0)
    layers = [_Scores() for _ in range(3)]
    for layer in layers:
        nn.init.normal_(layer.norm.weight, 1.0, 0.3)
    reference = nn.Sequential(*layers)
    port = _Chain(**{f"h{number}": _ScaledNorm(each) for number, each in enumerate(layers)})
    port.act = lambda x, number: x
    x = _random(2, 7, WIDTH)
    assert bl.check(port, x, reference=reference, repro=False)
    port.h1.q_norm.weight.data *= 1.5
    finding = bl.check(port, x, reference=reference, repro=False).culprits[0]
    assert "h1.q_norm" in (finding.name, *finding.alternatives)


# --- Weights that are made in each call -----------------------------------------------------------
