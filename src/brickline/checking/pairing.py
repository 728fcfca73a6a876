"""Which value of the reference stands for which value of the candidate.

Where both sides are the same code, keys are equal. Elsewhere `alignment` finds partners by
weights, values and dataflow; this holds what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from brickline.checking.performance import Recording, Value
from brickline.checking.stage import ARGUMENT, INPUT, OUTPUT, Key

Fit = Callable[[torch.Tensor], torch.Tensor]
"""Brings a candidate's value into the layout of the reference's."""


@dataclass(frozen=True)
class Partner:
    """A candidate's value, and how it lies in the reference's layout."""

    key: Key
    fit: Fit | None = None

    def tensor(self, recording: Recording) -> torch.Tensor | None:
        """Return the value in the reference's layout, None where it was not made."""
        value = recording.by_key.get(self.key)
        if value is None:
            return None
        return value.tensor if self.fit is None else self.fit(value.tensor)


@dataclass
class Pairing:
    """Partners of the reference's values, by their keys."""

    partners: dict[Key, Partner] = field(default_factory=dict)
    same_code: bool = True
    notes: list[str] = field(default_factory=list)
    strangers: dict[tuple[str, int], str] = field(default_factory=dict)
    """Calls of the candidate that the reference does not make, with the path of who makes them."""

    def candidate_keys(self) -> set[Key]:
        """Return the keys of the candidate's values that have a partner."""
        return {each.key for each in self.partners.values()}


def precision(dtype: torch.dtype) -> float:
    """Return a number that is larger for finer dtypes."""
    return 1.0 / float(torch.finfo(dtype).eps) if dtype.is_floating_point else float("inf")


def fits(ours: Value, theirs: Value) -> bool:
    """Whether a candidate's value can stand for a reference's, by shape and dtype."""
    left, right = ours.tensor, theirs.tensor
    if left.shape != right.shape or left.numel() == 0:
        return False
    if left.dtype.is_floating_point != right.dtype.is_floating_point:
        return False
    # What the candidate keeps more coarsely than the reference is seen where it acts.
    return precision(left.dtype) >= precision(right.dtype)


def pair_by_key(candidate: Recording, reference: Recording) -> Pairing:
    """Pair values with equal keys.

    What a module is called with and returns is paired wherever both sides have it; what it makes
    inside only where it makes the same operations in the same order.
    """
    pairing = Pairing()
    ours_done, theirs_done = _programs(candidate), _programs(reference)
    for key, theirs in reference.by_key.items():
        ours = candidate.by_key.get(key)
        if ours is None or ours.view or not fits(ours, theirs):
            continue
        where = (key.path, key.call)
        if is_boundary(key) or ours_done.get(where) == theirs_done.get(where):
            pairing.partners[key] = Partner(key)
    return pairing


def is_boundary(key: Key) -> bool:
    """Whether it is a value that crosses the boundary of a module."""
    return key.op in (INPUT, OUTPUT) or key.op.startswith(ARGUMENT)


def _programs(recording: Recording) -> dict[tuple[str, int], list[str]]:
    """Return the operations that each module call makes itself, in order."""
    found: dict[tuple[str, int], list[str]] = {}
    for value in recording.values:
        if not value.view and not is_boundary(value.key):
            found.setdefault((value.key.path, value.key.call), []).append(value.key.op)
    return found


def roots_of(recording: Recording) -> list[Value]:
    """Return the values that the root returns."""
    return [each for each in recording.values if each.key.op == OUTPUT and not each.key.path]
