"""Which rows of a tensor are rows of another side's tensors, in whatever layout.

A tensor is seen as a matrix in several ways, by its dimensions in other orders and by how many of
them count the rows. A row is known by a number made from its bits, or from its signs alone: these
stay the same when rows or columns are multiplied with positive numbers and rounded.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from brickline.checking.state.tensors import Tensors
from brickline.checking.state.terms import Term

CHUNK = 1 << 22
FEWEST_BITS, FEWEST_SIGNS = 4, 10
"""Elements that a row needs for its number to tell it from others."""
ENOUGH = 0.5
"""Part of a tensor's rows that must be known for it to be made of others."""
GLANCED = 64
"""Pieces that are looked at before all of them are."""
MOST_EQUAL = 8
"""Rows with one number that are looked at."""


@dataclass(frozen=True)
class View:
    """A tensor seen as a matrix."""

    order: tuple[int, ...]
    leading: int
    """How many dimensions, in this order, count the rows."""

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the matrix."""
        turned = tensor.permute(self.order)
        return turned.reshape(prod(turned.shape[: self.leading]), -1)

    def tensor(self, matrix: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor of a shape from its matrix."""
        turned = matrix.reshape([shape[k] for k in self.order])
        return turned.permute([self.order.index(k) for k in range(len(self.order))])


@cache
def views(dimensions: int, every: bool = False) -> tuple[View, ...]:
    """Return how a tensor may be seen, the plainest first.

    Args:
        dimensions: Of the tensor.
        every: Whether four dimensions are taken in all orders. Default False: in usual ones.
    """
    plain = tuple(range(dimensions))
    if dimensions == 2:
        return View((0, 1), 1), View((1, 0), 1)
    if dimensions == 3:
        orders = [plain, *itertools.permutations(plain)]
        return tuple(View(order, k) for order in dict.fromkeys(orders) for k in (1, 2))
    if dimensions == 4 and every:
        return tuple(View(order, k) for order in itertools.permutations(plain) for k in (1, 2, 3))
    if dimensions == 4:
        last = (0, 2, 3, 1), (1, 2, 3, 0), (2, 3, 1, 0), (2, 3, 0, 1)
        once = [View(order, 1) for order in (plain, (1, 0, 2, 3), *last[:2])]
        return (*once, View(plain, 2), View(last[2], 3), View(last[3], 3))
    return tuple(_in_three(dimensions)) if dimensions > 4 else ()


def _in_three(dimensions: int) -> Iterator[View]:
    """Yield views in which neighbouring dimensions stay together, in three groups."""
    for first, second in itertools.combinations(range(1, dimensions), 2):
        bounds = (range(first), range(first, second), range(second, dimensions))
        for groups in itertools.permutations(bounds):
            order = tuple(itertools.chain(*groups))
            yield View(order, len(groups[0]))
            yield View(order, len(groups[0]) + len(groups[1]))


def keys_by_bits(matrix: torch.Tensor) -> torch.Tensor:
    """Return a number for each row, the same for the same elements in the same order."""
    weights = _weights(matrix.shape[1], matrix.device)
    step = max(CHUNK // max(matrix.shape[1], 1), 1)
    return torch.cat([(_mixed(part) * weights).sum(1) for part in matrix.split(step)])


def _mixed(elements: torch.Tensor) -> torch.Tensor:
    """Return the bits of elements, spread: those of narrow ones are all at the upper end."""
    bits = (elements.double() + 0.0).view(torch.int64)
    bits = (bits ^ (bits >> 29)) * 0x3F58476D1CE4E5B9
    return bits ^ (bits >> 32)


def keys_by_signs(matrix: torch.Tensor) -> torch.Tensor:
    """Return a number for each row, the same for the same signs or all of them turned."""
    weights = _weights(matrix.shape[1], matrix.device)
    step = max(CHUNK // max(matrix.shape[1], 1), 1)
    keys = []
    for part in matrix.split(step):
        above, below = ((part > 0) * weights).sum(1), ((part < 0) * weights).sum(1)
        keys.append(torch.minimum(above, below))
    return torch.cat(keys)


def _weights(length: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    drawn = torch.randint(-(2**62), 2**62, (length,), generator=generator)
    return (2 * drawn + 1).to(device)  # odd, so that no bit is lost


@dataclass(frozen=True)
class SourceView:
    """A term seen as a matrix."""

    term: Term
    view: View
    rows: int


@dataclass(frozen=True)
class Block:
    """Pieces of a target that are rows of one source."""

    source: SourceView
    column: int
    """Which part of the target's rows, from the left."""
    pieces: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Assembly:
    """A target, cut into pieces that are rows of sources."""

    view: View
    shape: tuple[int, ...]
    length: int
    """Elements of a piece."""
    blocks: tuple[Block, ...]
    zeros: torch.Tensor
    """Pieces that hold nothing."""

    def pieces(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the pieces of the target."""
        return self.view.matrix(tensor).reshape(-1, self.length)

    def tensor(self, pieces: torch.Tensor) -> torch.Tensor:
        """Return the target of its pieces."""
        rows = prod(self.shape[k] for k in self.view.order[: self.view.leading])
        return self.view.tensor(pieces.reshape(rows, -1), self.shape)


class RowIndex:
    """The rows of many terms by their numbers."""

    def __init__(self, terms: Iterable[Term], tensors: Tensors, *, signs: bool) -> None:
        self.signs = signs
        self._keys = keys_by_signs if signs else keys_by_bits
        self._fewest = FEWEST_SIGNS if signs else FEWEST_BITS
        self._sources: list[SourceView] = []
        parts: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for term in terms:
            value = term.value(tensors)
            seen: set[tuple[int, ...]] = set()
            for view in views(value.ndim):
                matrix = view.matrix(value)
                kept = tuple(k for k in view.order if value.shape[k] > 1)
                known = (matrix.shape[0], *kept)
                if matrix.shape[1] < self._fewest or known in seen:
                    continue
                seen.add(known)
                parts[matrix.shape[1]].append((len(self._sources), self._keys(matrix)))
                self._sources.append(SourceView(term, view, matrix.shape[0]))
        self._tables = {length: _table(several) for length, several in parts.items()}

    @property
    def lengths(self) -> list[int]:
        """Return how long rows are."""
        return sorted(self._tables, reverse=True)

    def assembly(self, target: torch.Tensor, mask: torch.Tensor | None = None) -> Assembly | None:
        """Return of which rows a target consists for the most part, None where of none.

        Args:
            target: In float64.
            mask: By what pieces of its length are multiplied first. Default None: by nothing.
        """
        best: tuple[float, Assembly] | None = None
        for view in views(target.ndim, every=True):
            matrix = view.matrix(target)
            width = matrix.shape[1]
            for length in sorted(self._tables, reverse=True):
                if width % length or (mask is not None and len(mask) != length):
                    continue
                pieces = matrix.reshape(-1, length)
                pieces = pieces if mask is None else pieces * mask.to(pieces.device)
                assembly = self._assembly(target, view, pieces, width)
                if assembly is None:
                    continue
                if assembly[0] == 1.0:
                    return assembly[1]
                if best is None or assembly[0] > best[0]:
                    best = assembly
        return None if best is None else best[1]

    def _assembly(
        self, target: torch.Tensor, view: View, pieces: torch.Tensor, width: int
    ) -> tuple[float, Assembly] | None:
        length = pieces.shape[1]
        table = tuple(part.to(pieces.device) for part in self._tables[length])
        some = pieces[:: max(len(pieces) // GLANCED, 1)]
        some = some[(some != 0).any(1)]
        if not len(some) or float(_known(self._keys(some), table[0]).double().mean()) < ENOUGH / 2:
            return None
        across = width // length
        source, row = _assigned(self._keys(pieces), across, *table)
        empty = (pieces == 0).all(1).cpu()
        source[empty] = -1
        share = float((source[~empty] >= 0).double().mean()) if not bool(empty.all()) else 0.0
        if share < ENOUGH:
            return None
        if share < 1:
            _fill_between(source, row, across, [each.rows for each in self._sources], empty)
        blocks = []
        columns = torch.arange(len(source)) % across
        for column in range(across):
            for number in source[columns == column].unique().tolist():
                where = torch.nonzero((source == number) & (columns == column)).reshape(-1)
                if number >= 0:
                    blocks.append(Block(self._sources[number], column, where, row[where]))
        zeros = torch.nonzero(empty).reshape(-1)
        return share, Assembly(view, tuple(target.shape), length, tuple(blocks), zeros)


def _table(
    several: list[tuple[int, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the numbers in ascending order, with the source and the row of each."""
    keys = torch.cat([part for _, part in several])
    sources = torch.cat([torch.full((len(part),), number) for number, part in several])
    rows = torch.cat([torch.arange(len(part)) for _, part in several])
    order = torch.argsort(keys, stable=True)
    return keys[order], sources.to(keys.device)[order], rows.to(keys.device)[order]


def _known(keys: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return which numbers are among others, which are in ascending order."""
    at = torch.searchsorted(known, keys).clamp(max=len(known) - 1)
    return known[at] == keys


def _assigned(
    keys: torch.Tensor,
    across: int,
    known: torch.Tensor,
    sources: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the source and row of each piece; -1 where none is known."""
    first = torch.searchsorted(known, keys)
    choices = []
    for further in range(MOST_EQUAL):
        at = (first + further).clamp(max=len(known) - 1)
        same = known[at] == keys
        choices.append((torch.where(same, sources[at], -1).cpu(), rows[at].cpu()))
    hits = torch.cat([choice[choice >= 0] for choice, _ in choices])
    source = torch.full((len(keys),), -1)
    row = torch.zeros(len(keys), dtype=torch.int64)
    numbers, counts = hits.unique(return_counts=True)
    for number in numbers[torch.argsort(counts, descending=True, stable=True)].tolist():
        for choice, place in choices:
            fresh = (choice == number) & (source < 0)
            source[fresh], row[fresh] = number, place[fresh]
    _follow(source, row, choices, across)
    return source, row


def _follow(
    source: torch.Tensor,
    row: torch.Tensor,
    choices: Sequence[tuple[torch.Tensor, torch.Tensor]],
    across: int,
) -> None:
    """Of several rows with one number, take the one that follows that of the piece before."""
    several = torch.nonzero(choices[1][0] >= 0).reshape(-1)
    for piece in several[several >= across].tolist():
        before = int(source[piece - across]), int(row[piece - across]) + 1
        for choice, place in choices:
            if (int(choice[piece]), int(place[piece])) == before:
                source[piece], row[piece] = before


def _fill_between(
    source: torch.Tensor,
    row: torch.Tensor,
    across: int,
    sizes: Sequence[int],
    empty: torch.Tensor,
) -> None:
    """Say which rows those pieces are meant to be that lie beside known ones."""
    taken = set(zip(source.tolist(), row.tolist(), strict=True))
    for piece in torch.nonzero((source < 0) & ~empty).reshape(-1).tolist():
        for step in (-across, across):
            beside = piece + step
            if not 0 <= beside < len(source) or source[beside] < 0:
                continue
            number = int(source[beside])
            place = int(row[beside]) + (1 if step < 0 else -1)
            if 0 <= place < sizes[number] and (number, place) not in taken:
                source[piece], row[piece] = number, place
                taken.add((number, place))
                break
