"""Which value of the reference stands for which value of the candidate.

Where both sides are the same code, keys are equal. Elsewhere `alignment` finds partners by
weights, values and dataflow; this holds what was found.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from brickline.checking.recording import Recording, Value
from brickline.checking.stage import ARGUMENT, INPUT, OPERAND, OUTPUT, Key

MOST_DIMENSIONS = 5
"""Tensors of more dimensions are not looked at in other orders of them."""


@dataclass(frozen=True)
class Layout:
    """Reads a tensor as one whose dimensions are in another order; of any size."""

    order: tuple[int, ...]
    """The reference's dimensions in the order in which they lie in the candidate's value."""

    def __call__(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """Return the candidate's value as the reference's lies; None where it cannot be told."""
        if any(size > 1 and number not in self.order for number, size in enumerate(shape)):
            return None
        read = [shape[number] for number in self.order]
        if tensor.numel() != shape.numel():
            return None
        return tensor.reshape(read).permute(self._back()).reshape(shape)

    @staticmethod
    def laid(
        tensor: torch.Tensor, shape: torch.Size
    ) -> Iterator[tuple[Layout | None, torch.Tensor]]:
        """Yield a tensor in every way in which its dimensions may lie, the plainest first."""
        yield None, tensor.reshape(shape)
        dimensions = tuple(number for number, size in enumerate(shape) if size > 1)
        if len(dimensions) > MOST_DIMENSIONS:
            return
        for order in itertools.permutations(dimensions):
            made = None if order == dimensions else Layout(order)(tensor, shape)
            if made is not None:
                yield Layout(order), made

    def undo(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Lay a reference's tensor out as the candidate's lies."""
        kept = sorted(self.order)
        squeezed = tensor.reshape([tensor.shape[number] for number in kept])
        return squeezed.permute([kept.index(number) for number in self.order]).reshape(shape)

    def _back(self) -> list[int]:
        return [self.order.index(number) for number in sorted(self.order)]


@dataclass(frozen=True)
class RowOrder:
    """Reads the rows of a tensor in another order; of one number of rows."""

    order: torch.Tensor
    """The candidate's row for each of the reference's."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the candidate's rows as the reference's lie; None where they are not as many."""
        if tensor.shape[0] != len(self.order):
            return None
        return tensor[self.order.to(tensor.device)]


@dataclass(frozen=True)
class Part:
    """A candidate's value that stands for a reference's, or for some of its columns."""

    key: Key
    fit: Layout | None = None
    """How the dimensions lie; None for the same order."""
    columns: torch.Tensor | None = None
    """The candidate's columns that are meant; None for all."""
    place: torch.Tensor | None = None
    """The reference's columns that they stand for; None for all."""
    rows: RowOrder | None = None
    """How its rows lie, all dimensions but the last as one; None for the same order."""
    near: float | None = None
    """Of a partner that was found by its value: how far it may be from it to be one."""
    factor: float = 1.0
    """The candidate's numbers are so many times those of the reference."""

    def accepts(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Whether the two are partners still; those found by weight or name always are."""
        if self.near is None:
            return True
        wide = self.theirs(theirs).double()
        distance = (ours.to(wide.device).double() - wide).norm()
        return bool(distance <= self.near * wide.norm())

    def back(self, right: torch.Tensor, ours: torch.Tensor) -> torch.Tensor | None:
        """Return a reference's value in the layout of the candidate's."""
        if self.factor != 1:
            right = right.double().mul(self.factor).to(right.dtype)
        if self.fit is not None:
            return self.fit.undo(right, ours.shape)
        if self.columns is None and self.rows is None:
            return right.reshape(ours.shape) if right.numel() == ours.numel() else None
        made = ours.to(right.dtype).clone().reshape(-1, ours.shape[-1])
        order = torch.arange(len(made)) if self.rows is None else self.rows.order
        if len(order) != len(made):
            return None
        columns = torch.arange(made.shape[-1]) if self.columns is None else self.columns
        flat = right.reshape(len(made), -1).to(made.device)
        made[order.to(made.device)[:, None], columns.to(made.device)] = flat
        return made.reshape(ours.shape)

    def ours(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """Return the candidate's side, in the layout of the reference's columns."""
        if self.factor != 1:
            tensor = tensor.double().div(self.factor).to(tensor.dtype)
        if self.fit is not None:
            return self.fit(tensor, shape)
        if self.columns is not None:
            if tensor.shape[-1] <= int(self.columns.max()):
                return None
            tensor = tensor.reshape(-1, tensor.shape[-1])[:, self.columns.to(tensor.device)]
        if self.rows is not None:
            laid = self.rows(tensor.reshape(-1, tensor.shape[-1]))
            if laid is None:
                return None
            tensor = laid
        wanted = shape
        if self.place is not None:
            wanted = torch.Size((*shape[:-1], len(self.place)))
        if tensor.numel() != wanted.numel():
            return None
        return tensor.reshape(wanted)

    def theirs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the reference's side: the columns that are meant."""
        if self.place is None:
            return tensor
        return tensor[..., self.place.to(tensor.device)]


@dataclass(frozen=True)
class Partner:
    """The candidate's values that stand for one of the reference's."""

    parts: tuple[Part, ...]

    def pieces(self, recording: Recording, theirs: torch.Tensor) -> list[tuple[Part, torch.Tensor]]:
        """Return each part that was made, in the reference's layout."""
        found = []
        for part in self.parts:
            value = recording.by_key.get(part.key)
            tensor = None if value is None else part.ours(value.tensor, theirs.shape)
            if tensor is not None and part.accepts(tensor, theirs):
                found.append((part, tensor))
        return found


@dataclass
class Pairing:
    """Partners of the reference's values, by their keys."""

    partners: dict[Key, Partner] = field(default_factory=dict)
    same_code: bool = True
    strangers: dict[tuple[str, int], str] = field(default_factory=dict)
    """Calls of the candidate that the reference does not make, with the path of who makes them."""

    def pieces(self, value: Value, candidate: Recording) -> list[tuple[Part, torch.Tensor]]:
        """Return what the candidate made for a value of the reference; empty without a partner."""
        partner = self.partners.get(value.key)
        return [] if partner is None else partner.pieces(candidate, value.tensor)

    def candidate_keys(self) -> set[Key]:
        """Return the keys of the candidate's values that have a partner."""
        return {part.key for each in self.partners.values() for part in each.parts}

    def less(self, keys: Collection[Key]) -> Pairing:
        """Return the partners without some."""
        kept = {key: each for key, each in self.partners.items() if key not in keys}
        return replace(self, partners=kept)

    def more(self, partners: Mapping[Key, Partner]) -> Pairing:
        """Return the partners with others."""
        return replace(self, partners={**self.partners, **partners})


def precision(dtype: torch.dtype) -> float:
    """Return a number that is larger for finer dtypes."""
    return 1.0 / float(torch.finfo(dtype).eps) if dtype.is_floating_point else float("inf")


def is_fine(ours: Value, theirs: Value) -> bool:
    """Whether a candidate's value is kept no more coarsely than a reference's."""
    return precision(ours.tensor.dtype) >= precision(theirs.tensor.dtype)


def fits(ours: Value, theirs: Value) -> bool:
    """Whether a candidate's value can stand for a reference's, by shape and dtype."""
    left, right = ours.tensor, theirs.tensor
    if left.shape != right.shape or left.numel() == 0:
        return False
    if left.dtype.is_floating_point != right.dtype.is_floating_point:
        return False
    # What the candidate keeps more coarsely than the reference is seen where it acts.
    return is_fine(ours, theirs)


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
            pairing.partners[key] = Partner((Part(key),))
    return pairing


def is_boundary(key: Key) -> bool:
    """Whether it is a value that crosses the boundary of a module."""
    return key.op in (INPUT, OUTPUT) or key.op.startswith((ARGUMENT, OPERAND))


def _programs(recording: Recording) -> dict[tuple[str, int], list[str]]:
    """Return the operations that each module call makes itself, in order."""
    found: dict[tuple[str, int], list[str]] = {}
    for value in recording.values:
        if not value.view and not is_boundary(value.key):
            found.setdefault((value.key.path, value.key.call), []).append(value.key.op)
    return found


def roots_of(recording: Recording) -> list[Value]:
    """Return the values that the root returns."""
    return [each for each in recording.values if is_end(each.key)]


def is_end(key: Key) -> bool:
    """Whether it is what the root returns."""
    return key.op == OUTPUT and not key.path
