"""What a weight was made from: rows of the other side's weights, multiplied along rows or columns.

Which rows is known from their bits or signs. By what they were multiplied is then a quotient,
which is looked for among the vectors of the other side: a norm's weight g, 1 + g, the scale of a
norm over a batch, a residual's scale, and numbers such as 1 / sqrt(64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from brickline.checking.state.pool import Pool
from brickline.checking.state.rows import Assembly, Block, RowIndex
from brickline.checking.state.tensors import ENOUGH, Tensors, agreement, roundoff
from brickline.checking.state.terms import Term, Valued

SAMPLES = 64
MOST_ROWS = 512
"""Rows or columns from which a quotient is estimated."""
NEARLY = 0.9999
"""Cosine of the angle between a row and itself, rounded."""
MOST_MASKS = 64
"""Vectors with both signs that are tried."""
MOST_VECTORS = 4
"""Vectors of a length that are tried."""
MOSTLY = 0.75
"""Part of a quotient that must be a vector's: the rest may be wrong."""


@dataclass(frozen=True)
class Along:
    """A vector that multiplies rows or columns."""

    term: Term
    places: torch.Tensor
    """Which of its elements belongs to each row or column."""

    def valued(self, tensors: Tensors, device: torch.device) -> Valued:
        """Return its elements in place."""
        value, size = self.term.evaluate(tensors)
        places = self.places.to(value.device)
        return value.reshape(-1)[places].to(device), size.reshape(-1)[places].to(device)


@dataclass(frozen=True)
class Fit:
    """A block of rows and what they are multiplied with."""

    block: Block
    rows: Along | None = None
    columns: Along | None = None
    factor: Term | None = None

    @property
    def terms(self) -> tuple[Term, ...]:
        """Return all that it is made from."""
        along = tuple(each.term for each in (self.rows, self.columns) if each is not None)
        return (self.block.source.term, *along, *(() if self.factor is None else (self.factor,)))

    def of_rows(self, tensors: Tensors, device: torch.device) -> Valued:
        """Return by what each row is multiplied, the number included."""
        value = torch.ones(len(self.block.rows), dtype=torch.float64, device=device)
        size = torch.zeros_like(value)
        if self.rows is not None:
            value, size = self.rows.valued(tensors, device)
        if self.factor is not None:
            by, by_size = (part.reshape(()).to(device) for part in self.factor.evaluate(tensors))
            value, size = value * by, size * by.abs() + value.abs() * by_size
        return value, size

    def evaluate(self, tensors: Tensors) -> Valued:
        """Return the rows as they should be."""
        source = self.block.source
        wide, wide_size = source.term.evaluate(tensors)
        at = self.block.rows.to(wide.device)
        value, size = source.view.matrix(wide)[at], source.view.matrix(wide_size)[at]
        by, by_size = self.of_rows(tensors, wide.device)
        value, size = value * by[:, None], size * by.abs()[:, None] + value.abs() * by_size[:, None]
        if self.columns is not None:
            by, by_size = self.columns.valued(tensors, wide.device)
            value, size = value * by, size * by.abs() + value.abs() * by_size
        return value, size


@dataclass(frozen=True)
class Unfolded:
    """A weight as rows of others."""

    assembly: Assembly
    fits: tuple[Fit, ...]

    @property
    def is_folded(self) -> bool:
        """Whether anything is multiplied."""
        return any(len(fit.terms) > 1 for fit in self.fits)

    def term(self) -> Term:
        """Return how it is computed, with NaN where nothing is known."""
        assembly = self.assembly

        def evaluate(tensors: Tensors) -> Valued:
            parts = [fit.evaluate(tensors) for fit in self.fits]
            count = torch.Size(assembly.shape).numel() // assembly.length
            value = parts[0][0].new_full((count, assembly.length), torch.nan)
            size = torch.zeros_like(value)
            value[assembly.zeros.to(value.device)] = 0.0
            for fit, (part, of) in zip(self.fits, parts, strict=True):
                at = fit.block.pieces.to(value.device)
                value[at], size[at] = part.to(value.device), of.to(value.device)
            return assembly.tensor(value), assembly.tensor(size)

        names = tuple(dict.fromkeys(n for fit in self.fits for t in fit.terms for n in t.names))
        return Term(self.words, names, evaluate)

    @property
    def words(self) -> str:
        """Say what it was made from."""
        return ", ".join(dict.fromkeys(_words(fit) for fit in self.fits))


def _words(fit: Fit) -> str:
    words = fit.block.source.term.words
    if fit.rows is not None:
        words += f" * {fit.rows.term.words} along rows"
    if fit.columns is not None:
        words += f" * {fit.columns.term.words} along columns"
    return words if fit.factor is None else f"{fit.factor.words} * {words}"


def unfold(
    target: torch.Tensor, index: RowIndex, pool: Pool, exact: torch.Tensor | None = None
) -> Unfolded | None:
    """Return what a target was made from, None where that is not known.

    Args:
        target: In the dtype in which it is used.
        index: Rows of the other side, by bits or by signs.
        pool: All of the other side.
        exact: The target before it was rounded to that. Default None: it was not.
    """
    wide = target.detach().double()
    assembly = index.assembly(wide)
    if assembly is None and index.signs:
        assembly = next(_turned(wide, index, pool), None)
    if assembly is None:
        return None
    pieces = assembly.pieces((target if exact is None else exact).detach())
    fits = [
        fit
        for block in assembly.blocks
        for part in _parts(block)
        for fit in (_fitted(pieces, part, pool) if index.signs else [Fit(part)])
    ]
    covered = sum(len(fit.block.pieces) for fit in fits)
    if not fits or covered + len(assembly.zeros) < ENOUGH * len(pieces):
        return None
    return Unfolded(assembly, tuple(fits))


def _turned(target: torch.Tensor, index: RowIndex, pool: Pool) -> Iterator[Assembly]:
    """Yield of which rows a target consists where a vector with both signs is folded into it."""
    for length in index.lengths:
        terms, table = pool.vectors(length)
        mixed = (table > 0).any(1) & (table < 0).any(1)
        masks = {
            tuple(table[place].sign().tolist())
            for place in torch.nonzero(mixed).reshape(-1).tolist()
            if terms[place].words.removeprefix("1 + ").removeprefix("1 - ") in pool.tensors
        }
        for mask in sorted(masks)[:MOST_MASKS]:
            assembly = index.assembly(target, torch.tensor(mask, dtype=torch.float64))
            if assembly is not None:
                yield assembly


def _parts(block: Block) -> list[Block]:
    """Return a block such that each row of the source is in a part once, as in copies of it."""
    seen: dict[int, int] = {}
    turns = []
    for place in block.rows.tolist():
        turns.append(seen.get(place, 0))
        seen[place] = turns[-1] + 1
    chosen = [torch.tensor(turns) == turn for turn in range(max(turns) + 1)]
    return [replace(block, pieces=block.pieces[k], rows=block.rows[k]) for k in chosen]


def _fitted(pieces: torch.Tensor, block: Block, pool: Pool) -> list[Fit]:
    """Return a block with what it is multiplied with, none where nothing that is known fits."""
    target = pieces[block.pieces.to(pieces.device)]
    for fit in _fits(target.double(), block, pool, roundoff(target.dtype)):
        value, size = fit.evaluate(pool.tensors)
        names = tuple(name for term in fit.terms for name in term.names)
        compared = agreement(
            target, value.to(target.device), size.to(target.device), pool.roundoff(names)
        )
        if compared.holds:
            strayed = compared.within.double().mean(1) < MOSTLY
            strays = bool(strayed.any())
            return [_found_again(fit, target, strayed.cpu(), pool) if strays else fit]
    return []


def _found_again(fit: Fit, target: torch.Tensor, strayed: torch.Tensor, pool: Pool) -> Fit:
    """Look among all rows of a source for those that were taken for others with the same signs."""
    block = fit.block
    places = torch.nonzero(strayed).reshape(-1)
    if len(places) > MOST_ROWS:
        return fit
    source = block.source.view.matrix(block.source.term.value(pool.tensors)).to(target.device)
    if fit.columns is not None:
        source = source * fit.columns.valued(pool.tensors, source.device)[0]
    wanted = target[places.to(target.device)].double()
    lengths = wanted.norm(dim=1, keepdim=True) * source.norm(dim=1)
    nearest = ((wanted @ source.T) / lengths.clamp(min=1e-300)).abs().max(1)
    near = (nearest.values > NEARLY).cpu()
    rows = block.rows.clone()
    rows[places[near]] = nearest.indices.cpu()[near]
    if fit.rows is None:
        return replace(fit, block=replace(block, rows=rows))
    ways = fit.rows.places.clone()
    known = {int(row): int(way) for row, way in zip(block.rows, ways, strict=True)}
    ways[places] = torch.tensor([known.get(int(row), 0) for row in rows[places]])
    return replace(fit, block=replace(block, rows=rows), rows=Along(fit.rows.term, ways))


def _fits(target: torch.Tensor, block: Block, pool: Pool, own: float) -> Iterator[Fit]:
    """Yield what a block may be multiplied with, the plainest first."""
    yield Fit(block)
    source = block.source.view.matrix(block.source.term.value(pool.tensors)).to(target.device)
    quotient = target / source[block.rows.to(target.device)]
    quotient[~quotient.isfinite()] = torch.nan
    some_rows = quotient[_some(len(quotient), quotient.device)]
    some_columns = quotient[:, _some(quotient.shape[1], quotient.device)]
    near = 4 * (own + pool.roundoff(block.source.term.names)) + 1e-6
    middle = quotient.nanmedian()
    for factor in _numbers(float(middle), some_rows.numel(), near, pool):
        yield Fit(block, factor=factor)
    rows = some_columns.nanmedian(1).values
    columns = some_rows.nanmedian(0).values
    for along in _columns(columns, near, pool):
        for number in _left_over(columns, along, near, pool):
            yield Fit(block, columns=along, factor=_unless_one(number))
    for along in _rows(rows, block, near, pool):
        for number in _left_over(rows, along, near, pool):
            yield Fit(block, rows=along, factor=_unless_one(number))
    columns = (some_rows / rows[_some(len(quotient), quotient.device)][:, None]).nanmedian(0).values
    rows = (some_columns / columns[_some(len(columns), columns.device)]).nanmedian(1).values
    for across in _columns(columns, near, pool):
        for along in _rows(rows, block, near, pool):
            scale = across.valued(pool.tensors, rows.device)[0]
            both = (some_rows / scale).nanmedian(1).values
            chosen = Along(along.term, along.places[_some(len(quotient), along.places.device)])
            for number in _left_over(both, chosen, near, pool):
                yield Fit(block, along, across, _unless_one(number))


def _some(size: int, device: torch.device) -> torch.Tensor:
    """Return places spread over a dimension."""
    return torch.linspace(0, size - 1, min(size, MOST_ROWS), device=device).round().long()


def _numbers(value: float, count: int, near: float, pool: Pool) -> Iterator[Term]:
    """Yield the numbers, and the functions of tensors of one element, for an estimate."""
    known = pool.numbers.nearest(value, near / max(count, 1) ** 0.5 + 1e-9)
    if known is not None:
        yield known
    terms, table = pool.vectors(1)
    for term, own in zip(terms, table.reshape(-1).tolist(), strict=True):
        if own and abs(value / own - 1) <= near:
            yield term


def _left_over(quotient: torch.Tensor, along: Along, near: float, pool: Pool) -> Iterator[Term]:
    """Yield the numbers by which a quotient is more than a vector."""
    value = along.valued(pool.tensors, quotient.device)[0]
    ratio = quotient / value
    ratio[~ratio.isfinite()] = torch.nan
    yield from _numbers(float(ratio.nanmedian()), len(quotient), near, pool)


def _unless_one(number: Term) -> Term | None:
    return None if number.words == "1" else number


def _columns(quotient: torch.Tensor, near: float, pool: Pool) -> Iterator[Along]:
    size = len(quotient)
    yield from _alongs(quotient, size, torch.arange(size), near, pool)


def _rows(quotient: torch.Tensor, block: Block, near: float, pool: Pool) -> Iterator[Along]:
    yield from _alongs(quotient, block.source.rows, block.rows, near, pool)


def _alongs(
    quotient: torch.Tensor, size: int, places: torch.Tensor, near: float, pool: Pool
) -> Iterator[Along]:
    """Yield the vectors of which a quotient is a multiple, the nearest first."""
    quotient = quotient.cpu()
    few = torch.linspace(0, len(quotient) - 1, min(len(quotient), SAMPLES)).round().long()
    for length in pool.lengths():
        if length < 2 or size % length:
            continue
        terms, table = pool.vectors(length)
        ways = [places] if length == size else [places % length, places // (size // length)]
        for way in ways:
            ratios = table[:, way[few]] / quotient[few]
            ratios[~ratios.isfinite()] = torch.nan
            ratios = (ratios / ratios.nanmedian(1, keepdim=True).values - 1).abs()
            share = (ratios <= near).double().mean(1)
            gaps = torch.where(share >= MOSTLY, ratios.nanmedian(1).values, torch.inf)
            for number in torch.argsort(gaps, stable=True)[:MOST_VECTORS].tolist():
                if not gaps[number].isfinite():
                    break
                if float(table[number].amax() - table[number].amin()) > 0:
                    yield Along(terms[number], way)
            for term in pool.lines(terms, table[:, way[few]], quotient[few], near):
                yield Along(term, way)
