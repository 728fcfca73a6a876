"""Causes of different code: each is a repair that was run; a repro shows it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brickline as bl
from brickline.checking.explain import write_region_repro
from brickline.checking.logic.feeding import FedModule
from brickline.checking.repro import run_script
from brickline.checking.session import Session

pytestmark = pytest.mark.filterwarnings("ignore")
F = nn.functional
WIDTH, HEADS, LAYERS = 32, 4, 3


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            side(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.after = Norm(), Attention(), Norm()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(F.silu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    """The same layer, written by somebody else."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        attention = layer.attention
        inward = (attention.q, attention.k, attention.v)
        self.wqkv = nn.Parameter(torch.cat([side.weight for side in inward]).detach())
        self.bqkv = nn.Parameter(torch.cat([side.bias for side in inward]).detach())
        self.wo = nn.Parameter(attention.o.weight.detach().clone())
        self.bo = nn.Parameter(attention.o.bias.detach().clone())
        self.g1 = nn.Parameter(layer.before.weight.detach().clone())
        self.g2 = nn.Parameter(layer.after.weight.detach().clone())
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)
        self.fc1.load_state_dict(layer.up.state_dict())
        self.fc2.load_state_dict(layer.down.state_dict())
        self.eps, self.scale, self.shift = 1e-5, (WIDTH // HEADS) ** -0.5, 0
        self.act: Callable[[Tensor], Tensor] = F.silu
        self.kept = 1.0
        self.residual = True

    def normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return x / (x * x).mean(-1, keepdim=True).add(self.eps).sqrt() * gain

    def mixed(self, x: Tensor) -> Tensor:
        rows = F.linear(x, self.wqkv, self.bqkv)
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in rows.split(WIDTH, -1)
        )
        scores = (q * self.scale) @ k.transpose(-1, -2)
        size = x.shape[1]
        mask = torch.full((size, size), -torch.inf).triu(1 + self.shift)
        heads = (scores + mask).softmax(-1) @ v
        return F.linear(heads.transpose(1, 2).reshape(x.shape), self.wo, self.bo)

    def forward(self, x: Tensor) -> Tensor:
        middle = x * self.kept + self.mixed(self.normed(x, self.g1))
        fed = self.fc2(self.act(self.fc1(self.normed(middle, self.g2))))
        return middle + fed if self.residual else fed


class Port(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(layer) for layer in model.layers)
        self.out = nn.Linear(WIDTH, 24)
        self.out.load_state_dict(model.head.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def exchange(weight: Tensor, one: int, other: int) -> None:
    rows = weight.data[[one, other]].clone()
    weight.data[[other, one]] = rows


def fault(**settings: Any) -> Callable[[Block], None]:
    return lambda block: [setattr(block, *item) for item in settings.items()] and None


def zero_bias(block: Block) -> None:
    block.bqkv.data[2 * WIDTH :] = 0


FAULTS: dict[str, tuple[Callable[[Block], None], tuple[str, ...], str]] = {
    "epsilon": (fault(eps=1e-3), ("0.001", "1e-05"), "constant"),
    "scale": (fault(scale=0.4), ("0.4", "0.353"), "constant"),
    "activation": (fault(act=F.gelu), ("gelu", "silu"), "function"),
    "extra factor": (fault(kept=1.05), ("mul (1.05) too many",), "extra operation"),
    "mask": (fault(shift=1), ("a position sees the one after it",), "mask"),
    "rows": (lambda block: exchange(block.wo, 3, 17), ("3 and 17 are exchanged",), "weight"),
    "fused rows": (
        lambda block: exchange(block.wqkv, 2 * WIDTH + 1, 2 * WIDTH + 9),
        ("1 and 9 are exchanged", "attention.v.weight"),
        "weight",
    ),
    "row": (lambda block: block.wo.data[5].mul_(1.03), ("5 is 1.03 times",), "weight"),
    "transpose": (
        lambda block: block.wo.data.copy_(block.wo.data.T.clone()),
        ("transpose",),
        "weight",
    ),
    "no residual": (fault(residual=False), ("is not added to",), "operand"),
}


def searched(plant: Callable[[Block], None]) -> FedModule:
    """Return the first module that a check names in float64."""
    reference = Model().eval()
    candidate = Port(reference).eval()
    with torch.no_grad():
        plant(candidate.blocks[1])  # type: ignore[arg-type]
    torch.manual_seed(1)
    x = torch.randn(2, 10, WIDTH)
    session = Session(candidate, reference)
    session.drive(lambda model: model(x))
    logic = session.positions[0].logic
    assert logic is not None
    assert logic.modules, logic.problem
    return logic.modules[0]


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_the_planted_one(name: str) -> None:
    plant, words, kind = FAULTS[name]
    module = searched(plant)
    assert module.cause is not None
    assert "blocks.1" in f"{module.name} {module.cause}"
    assert all(word in module.cause for word in words), module.cause
    assert module.repair is not None
    assert module.repair["kind"] == kind
    json.dumps(dict(module.repair))


def muddled(x: Tensor) -> Tensor:
    for shift in range(1, 6):
        x = torch.sin(x + 0.3 * x.roll(shift, -1))
    return x


def test_nothing_is_said_where_no_hypothesis_computes_the_right_value() -> None:
    module = searched(fault(act=muddled))
    assert module.cause is None
    assert module.repair is None
    assert module.shown is not None


def test_the_first_repair_is_the_report_s_and_others_are_the_findings() -> None:
    reference = Model().eval()
    candidate = Port(reference).eval()
    with torch.no_grad():
        FAULTS["activation"][0](candidate.blocks[0])  # type: ignore[arg-type]
        FAULTS["row"][0](candidate.blocks[2])  # type: ignore[arg-type]
    torch.manual_seed(1)
    report = bl.check(candidate, torch.randn(2, 10, WIDTH), reference=reference, repro=False)
    first, second = report.culprits[:2]
    assert report.repair is not None, report
    assert "repair" not in first.evidence
    assert {report.repair["kind"], second.evidence["repair"]["kind"]} == {"function", "weight"}
    assert bl.DivergenceReport.from_json(report.to_json()).repair == report.repair


@pytest.mark.parametrize("name", ["fused rows", "mask", "unknown"])
def test_a_repro_shows_the_difference_and_its_end(name: str, tmp_path: Path) -> None:
    plant = fault(act=muddled) if name == "unknown" else FAULTS[name][0]
    module = searched(plant)
    assert module.shown is not None
    repro = write_region_repro(module.shown, module.name, tmp_path)
    assert repro.path is not None, repro.reason
    text = repro.path.read_text()
    assert "torch.ops.aten" in text
    assert (module.cause or "No cause is known") in text
    assert {path.suffix for path in tmp_path.iterdir()} == {".py", ".pt"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_a_repro_that_shows_nothing_is_not_kept(tmp_path: Path) -> None:
    module = searched(FAULTS["activation"][0])
    assert module.shown is not None
    right = replace(module.shown, program=module.shown.repaired)
    repro = write_region_repro(right, module.name, tmp_path)
    assert repro.path is None
    assert repro.reason is not None
    assert "does not show the difference" in repro.reason
    assert not list(tmp_path.iterdir())


def test_a_repro_fails_where_its_repair_is_undone(tmp_path: Path) -> None:
    module = searched(FAULTS["epsilon"][0])
    assert module.shown is not None
    path = write_region_repro(module.shown, module.name, tmp_path).path
    assert path is not None
    text = path.read_text()
    undone = text.replace("def repaired(v, c):", "def other(v, c):", 1) + "\n"
    undone = undone.replace("repaired({**values", "region({**values")
    path.write_text(undone)
    status, said = run_script(path, 60.0)
    assert status == 1
    assert said[-1].startswith("off by")
