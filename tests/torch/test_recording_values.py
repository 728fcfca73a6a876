"""Tensors inside what modules take: caches, dataclasses and containers are looked into."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from recorded import rows_of  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from brickline.adapters.recording import record  # noqa: E402
from brickline.adapters.torch_values import flatten  # noqa: E402


class Layer:
    def __init__(self, number: int | None) -> None:
        self.keys = None if number is None else torch.full((2,), float(number))
        self.values = None if number is None else torch.full((2,), number + 0.5)
        self.is_initialized = number is not None


class LayeredCache:
    def __init__(self, *numbers: int | None) -> None:
        self.layers = [Layer(number) for number in numbers]
        self.offloading = False


class ListCache:
    def __init__(self) -> None:
        self.key_cache = [torch.zeros(1), torch.ones(1)]
        self.value_cache = [torch.full((1,), 2.0), torch.full((1,), 3.0)]


@dataclass
class Output:
    logits: Tensor
    cache: Any = None


def found_in(value: Any) -> tuple[list[float], dict[str, int]]:
    found: list[Tensor] = []
    other: Counter[str] = Counter()
    flatten(value, found, other)
    return [float(each.flatten()[0]) for each in found], dict(other)


def test_caches_are_looked_into_in_order() -> None:
    assert found_in(LayeredCache(0, 1)) == ([0.0, 0.5, 1.0, 1.5], {})
    assert found_in(LayeredCache(4, None)) == ([4.0, 4.5], {})
    assert found_in(LayeredCache()) == ([], {})
    assert found_in(ListCache()) == ([0.0, 1.0, 2.0, 3.0], {})


def test_dataclasses_and_what_lies_in_them() -> None:
    assert found_in(Output(torch.full((1,), 7.0), ListCache()))[0] == [7.0, 0.0, 1.0, 2.0, 3.0]


def test_what_holds_no_state_is_counted() -> None:
    assert found_in(SimpleNamespace(layers=12)) == (
        [],
        {"arguments of class SimpleNamespace": 1},
    )
    assert found_in(object())[1] == {"arguments of class object": 1}
    assert found_in([nn.Linear(2, 2)])[1] == {"arguments of class Linear": 1}


def test_a_cycle_ends() -> None:
    cache = ListCache()
    cache.key_cache = [cache]  # type: ignore[list-item]
    values, other = found_in(cache)
    assert other == {"arguments of class list": 1} or other == {"arguments of class ListCache": 1}
    assert len(values) <= 32


def test_a_cache_is_an_operand(tmp_path: Path) -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            return x + cache.layers[0].keys

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attends()

        def forward(self, x: Tensor, cache: Any) -> Tensor:
            return self.attention(x, cache=cache)  # type: ignore[no-any-return]

    with record(tmp_path / "r", Model()) as recording, torch.no_grad():
        recording.model(torch.ones(2), LayeredCache(3))
    (row,) = [each for each in rows_of(tmp_path / "r") if each.name == "attention"]
    assert len(row.inputs) == 3
    assert all(each.fingerprint for each in row.inputs)
    assert not recording.unobserved
