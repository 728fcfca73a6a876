"""Values that are the reference's but for a factor that is the same in every layer.

A scale may be put into a weight beforehand: then what is made with it differs by a number up to
where the other side multiplies. Only a number that several layers share is one; a layer with
another number is held to theirs. Asked for where something is wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import torch

from brickline.checking.guessing import place_of
from brickline.checking.pairing import Layout, Pairing, Part, Partner, is_fine
from brickline.checking.recording import Recording, Value
from brickline.checking.same_values import nearness
from brickline.checking.stage import INPUT, OPERAND, Key

DIGITS = 3
"""Factors are the same if so many digits of them are."""
DROWNING = 1e6
"""Numbers so many times larger than the others are all that can be seen of a value."""
MOST_CHOICES = 8
"""Of more values that look alike none is taken."""

Found = tuple[Value, Value, Layout | None, float]


def pair_by_factors(ours: Recording, theirs: Recording, pairing: Pairing) -> dict[Key, Partner]:
    """Return partners up to a factor, for each place that several layers have in common.

    Args:
        ours: The candidate's values.
        theirs: The reference's, made from the candidate's where these have partners.
        pairing: The partners known so far.
    """
    families: defaultdict[tuple[Key, Key], list[Found]] = defaultdict(list)
    for found in _multiples(ours, theirs, pairing):
        families[place_of(found[0].key), place_of(found[1].key)].append(found)
    partners: dict[Key, Partner] = {}
    for members in families.values():
        factors = Counter(_told(factor) for *_, factor in members)
        usual, count = factors.most_common(1)[0]
        if count < 2 or usual == _told(1.0):
            continue
        factor = next(factor for *_, factor in members if _told(factor) == usual)
        for mine, right, fit, _ in members:
            partners[right.key] = Partner((Part(mine.key, fit=fit, factor=factor),))
    return partners


def _multiples(ours: Recording, theirs: Recording, pairing: Pairing) -> Iterator[Found]:
    """Yield the values that are a number times one of the reference's."""
    used = pairing.candidate_keys()
    mine: defaultdict[int, list[tuple[Value, tuple[float, float]]]] = defaultdict(list)
    for value in _telling(ours.values):
        if value.key not in used:
            mine[value.tensor.numel()].append((value, _form(value.tensor)))
    taken: set[Key] = set()
    for right in _telling(theirs.values):
        if right.key in pairing.partners:
            continue
        form = _form(right.tensor)
        choices = [
            value
            for value, other in mine.get(right.tensor.numel(), ())
            if value.key not in taken
            and is_fine(value, right)
            and _alike(form, other, nearness(value.tensor.dtype))
        ]
        if 0 < len(choices) <= MOST_CHOICES:
            for value in choices:
                laid = _laid(value.tensor, right.tensor, nearness(value.tensor.dtype))
                if laid is not None:
                    taken.add(value.key)
                    yield value, right, *laid
                    break


def _telling(values: Iterable[Value]) -> Iterator[Value]:
    for value in values:
        plain = value.tensor.dtype.is_floating_point and value.tensor.numel() >= 16
        handed = value.key.op == INPUT or value.key.op.startswith(OPERAND)
        if plain and not handed and not value.view:
            yield value


def _form(tensor: torch.Tensor) -> tuple[float, float]:
    """Return two figures that neither a factor nor another order changes."""
    wide = tensor.double().abs().flatten()
    size = float(wide.norm())
    usual = float(wide.median())
    # A mask as large as its dtype allows drowns what it is added to.
    if not 0 < size < float("inf") or float(wide.max()) > DROWNING * usual:
        return float("nan"), float("nan")
    return float(wide.sum()) / size, float(wide.max()) / size


def _alike(some: tuple[float, float], other: tuple[float, float], near: float) -> bool:
    return all(abs(a - b) <= 4 * near * abs(a) for a, b in zip(some, other, strict=True))


def _laid(
    mine: torch.Tensor, right: torch.Tensor, near: float
) -> tuple[Layout | None, float] | None:
    """Return how one tensor lies in another that it is a multiple of, and the factor."""
    left, wide = mine.to(right.device).double(), right.double()
    for fit, made in Layout.laid(left, wide.shape):
        factor = float((made * wide).sum() / wide.square().sum())
        if float((made - factor * wide).norm()) <= near * float(made.norm()):
            return fit, factor
    return None


def _told(factor: float) -> str:
    return f"{factor:.{DIGITS}g}"
