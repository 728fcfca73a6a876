"""Causes of ops that work on each element or pair: another activation, another rotation.

Recognised by values: a known activation of an input is the exact answer; pairs of columns keep
their lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from brickline.checking.guesses import Case, Guess, best
from brickline.checking.residual import floats_of

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu (tanh)": lambda x: functional.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky relu": functional.leaky_relu,
    "elu": functional.elu,
    "softplus": functional.softplus,
    "hardswish": functional.hardswish,
    "mish": functional.mish,
    "relu²": lambda x: torch.relu(x).square(),
    "no activation": lambda x: x,
}
_SAME = 1e-9


def activation(case: Case) -> list[Guess]:
    """Another activation of the same input, gated or not."""
    for described, gate, factor in _gates(case):
        exact = case.residual.exact
        for name, function in ACTIVATIONS.items():
            if not _is_same(function(gate) * factor, exact):
                continue
            guesses = [
                case.guess(
                    "activation",
                    f"activation: {other} instead of {name}{described}",
                    each(gate) * factor,
                )
                for other, each in ACTIVATIONS.items()
                if other != name
            ]
            if described:
                swapped = function(_as_tensor(factor, gate)) * gate
                words = "activation: the gate and what it gates are swapped"
                guesses.append(case.guess("activation", words, swapped))
            return best(guesses)
    return []


def _gates(case: Case) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | float]]:
    """Yield inputs that may be activated, with what they are multiplied by."""
    same = [each for _, each in floats_of(case.evidence, case.shape)]
    for each in same:
        yield "", each, 1.0
    for first in same:
        for second in same:
            if first is not second:
                yield " of the gate", first, second
    if len(case.shape):
        doubled = (*case.shape[:-1], 2 * case.shape[-1])
        for _, each in floats_of(case.evidence, doubled):
            first, second = each.chunk(2, -1)
            yield " of the gate", first, second
            yield " of the gate", second, first


def _as_tensor(factor: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    return factor if isinstance(factor, torch.Tensor) else torch.full_like(like, factor)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).norm()) <= _SAME * float(other.norm()) and bool(other.any())


def rotation(case: Case) -> list[Guess]:
    """Pairs of columns keep their lengths and are turned by other angles."""
    residual = case.residual
    columns = case.shape[-1] if len(case.shape) else 0
    if columns % 2 or columns < 4 or len(case.shape) < 2 or not residual.finite.all():
        return []
    for name, split in (("halves", _halves), ("neighbours", _neighbours)):
        actual, exact = split(residual.actual), split(residual.exact)
        noise = split(residual.noise()).abs() * math.sqrt(2)
        same_length = (actual.abs() - exact.abs()).abs() <= 6 * noise
        turned = (actual - exact).abs() > 6 * noise
        share = float(same_length.double().mean())
        if share < 0.999 or int(turned.sum()) < 8:
            continue
        return _rotation_words(case, actual * exact.conj(), turned, name)
    return []


def _halves(values: torch.Tensor) -> torch.Tensor:
    first, second = values.chunk(2, -1)
    return torch.complex(first.contiguous(), second.contiguous())


def _neighbours(values: torch.Tensor) -> torch.Tensor:
    return torch.complex(values[..., 0::2].contiguous(), values[..., 1::2].contiguous())


def _rotation_words(
    case: Case, turn: torch.Tensor, turned: torch.Tensor, pairs: str
) -> list[Guess]:
    facts: dict[str, Any] = {
        "pairs": pairs,
        "largest angle": float(turn[turned].angle().abs().max()),
    }
    shape = turn.shape
    guesses: list[Guess | None] = []
    for dim in range(len(shape) - 1):
        # The angle of a rotary embedding depends on one position and on the pair, on nothing else.
        if shape[dim] < 2:
            continue
        others = [each for each in range(len(shape) - 1) if each != dim]
        copies = turn.numel() // (shape[dim] * shape[-1])
        if copies < 2:
            continue
        mean = turn.sum(dim=others, keepdim=True)
        output = _rotated(case, mean / mean.abs().clamp_min(1e-300), pairs)
        words = "rotation: pairs of columns keep their lengths and are turned by another angle"
        by_position = turned.any(-1).any(dim=others)
        first = int(by_position.int().argmax())
        words += (
            f" at each position, from {first} on (RoPE)" if first else " at each position (RoPE)"
        )
        guesses.append(case.guess("rotation", words, output, **facts))
    return best(guesses)


def _rotated(case: Case, turn: torch.Tensor, pairs: str) -> torch.Tensor:
    exact = case.residual.exact
    if pairs == "halves":
        value = _halves(exact) * turn
        return torch.cat((value.real, value.imag), -1)
    value = _neighbours(exact) * turn
    return torch.stack((value.real, value.imag), -1).reshape(exact.shape)


def rotary_table(case: Case) -> list[Guess]:
    """A table of cosines or sines whose angles grow by another base or another step."""
    exact, shape = case.residual.exact, case.shape
    if len(shape) < 2 or shape[-2] < 3 or shape[-1] < 4 or float(exact.abs().max()) > 1 + 1e-9:
        return []
    rows, actual = exact.reshape(-1, *shape[-2:])[0], case.residual.actual
    actual_rows = actual.reshape(-1, *shape[-2:])[0]
    for name, function, inverse in (
        ("cos", torch.cos, torch.arccos),
        ("sin", torch.sin, torch.arcsin),
    ):
        for copies in (2, 1):
            found = _table_base(rows, function, inverse, copies)
            if found is None:
                continue
            other = _fitted_base(actual_rows, inverse, copies)
            if other is None:
                return []
            base = float(f"{other:.3g}")
            guesses = []
            for each in dict.fromkeys((base, other)):
                table = function(_angles(rows, each, copies)).expand(shape)
                words = (
                    f"RoPE: the base is {each:.6g}, where the reference has {found:.6g} ({name})"
                )
                guesses.append(case.guess("rotation", words, table, base=each))
            return best(guesses)
    return []


def _angles(rows: torch.Tensor, base: float, copies: int) -> torch.Tensor:
    pairs = rows.shape[-1] // copies
    place = torch.arange(pairs, dtype=torch.float64, device=rows.device) / pairs
    steps = torch.arange(rows.shape[-2], dtype=torch.float64, device=rows.device)
    angles = steps[:, None] * base**-place
    return torch.cat([angles] * copies, -1)


def _fitted_base(
    rows: torch.Tensor, inverse: Callable[[torch.Tensor], torch.Tensor], copies: int
) -> float | None:
    pairs = rows.shape[-1] // copies
    found = []
    for at in range(1, pairs):
        angle = float(inverse(rows[1, at].clamp(-1, 1)))
        # The inverse is exact enough only away from where the function is flat.
        if 0.1 < angle < 0.95:
            found.append(angle ** (-pairs / at))
    return sorted(found)[len(found) // 2] if found else None


def _table_base(
    rows: torch.Tensor,
    function: Callable[[torch.Tensor], torch.Tensor],
    inverse: Callable[[torch.Tensor], torch.Tensor],
    copies: int,
) -> float | None:
    base = _fitted_base(rows, inverse, copies)
    if base is None or rows.shape[-1] % copies:
        return None
    rounded = float(f"{base:.4g}")
    for each in (rounded, base):
        if float((function(_angles(rows, each, copies)) - rows).abs().max()) < 1e-4:
            return each
    return None
