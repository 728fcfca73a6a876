"""What a vector or table was made from: others of its size in some form, sums of two, or parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from brickline.checking.state.pool import Pool
from brickline.checking.state.tensors import Tensors, agreement, roundoff
from brickline.checking.state.terms import (
    FORMS,
    Term,
    Valued,
    number,
    row,
    scaled,
    summed,
)

SAMPLES = 32
MOSTLY = 0.75
"""Part of the samples that must agree before all elements are compared."""
FEWEST = 4
"""Elements that a vector needs to be told from others."""
DISTINCT = 8
"""Elements that differ, which a tensor needs to be known by them in any order."""
MOST_ELEMENTS = 1 << 16
MOST_PARTS = 64
"""Vectors that one tensor may be a stack of."""
FIRST_ROWS = 4
"""Rows of a table that may have been added to something."""


def made_of_vectors(target: torch.Tensor, pool: Pool) -> Term | None:
    """Return what a tensor was made from, None where that is not known."""
    flat = target.detach().reshape(-1)
    if not flat.numel():
        return None
    if bool((flat == flat[0]).all()):  # such as zeros, which are anything times nothing
        return _constant(flat, target.shape, pool)
    term = one_vector(flat, pool)
    if term is None and target.ndim > 1:
        term = _with_a_vector(target, pool)
    if term is None:
        term = _stack(flat, pool)
    return None if term is None else shaped(term, target.shape)


def _constant(flat: torch.Tensor, shape: Sequence[int], pool: Pool) -> Term | None:
    """Return a tensor with the same number in every place."""
    if not bool(flat[0]):
        return shaped(Term("zeros", (), lambda _: (flat.double(), flat.double())), shape)
    terms, table = pool.vectors(flat.numel())
    forms = FORMS[:2] if flat.numel() > 1 else FORMS
    same = (table - flat[0].double().cpu()).abs().amax(1) <= 1e-7 * flat[0].double().abs().cpu()
    known = [terms[place] for place in torch.nonzero(same).reshape(-1).tolist()]
    allowed = [term for term in known if _form_of(term) in {form.words for form in forms}]
    if flat.numel() == 1 and not allowed:
        allowed = [term for term in _vectors(flat, pool) if is_made_of(flat, term, pool)]
        allowed = allowed if len(allowed) == 1 else []
    return shaped(allowed[0], shape) if allowed else None


def _form_of(term: Term) -> str:
    return term.words.replace(term.names[0], "{}")


def shaped(term: Term, shape: Sequence[int]) -> Term:
    """Return a term in another shape."""

    def evaluate(tensors: Tensors) -> Valued:
        value, size = term.evaluate(tensors)
        return value.reshape(shape), size.reshape(shape)

    return Term(term.words, term.names, evaluate)


def is_made_of(target: torch.Tensor, term: Term, pool: Pool) -> bool:
    """Return whether a tensor is a term's value, rounded."""
    value, size = term.evaluate(pool.tensors)
    if value.numel() != target.numel():
        return False
    value, size = (part.reshape(target.shape).to(target.device) for part in (value, size))
    return agreement(target, value, size, pool.roundoff(term.names)).holds


# --- one vector


def one_vector(target: torch.Tensor, pool: Pool) -> Term | None:
    """Return what a flat tensor was made from as a whole, None where that is not known."""
    return next((t for t in _vectors(target, pool) if is_made_of(target, t, pool)), None)


def _vectors(target: torch.Tensor, pool: Pool) -> Iterator[Term]:
    """Yield what a vector may be, judged by some of its elements."""
    places = torch.linspace(0, target.numel() - 1, min(target.numel(), SAMPLES)).round().long()
    terms, sampled = pool.sampled(target.numel(), places)
    if not terms:
        return
    some = target[places.to(target.device)].double().cpu()
    near = 4 * (roundoff(target.dtype) + pool.roundoff(tuple(t.names[0] for t in terms))) + 1e-6
    yield from _chosen(terms, (sampled - some).abs() <= near * (sampled.abs() + 1e-30))
    if target.numel() < FEWEST:
        return
    close = (sampled - some).abs() <= near * (sampled.abs() + 1)
    yield from _chosen(terms, close)
    yield from _multiples(terms, sampled, some, near, pool)
    yield from pool.lines(terms, sampled, some, near)
    yield from _sums(target, places, some, near, pool)


def _chosen(terms: Sequence[Term], same: torch.Tensor) -> Iterator[Term]:
    share = same.double().mean(1)
    for place in torch.argsort(share, descending=True, stable=True).tolist():
        if share[place] < MOSTLY:
            return
        yield terms[place]


def _multiples(
    terms: Sequence[Term], sampled: torch.Tensor, some: torch.Tensor, near: float, pool: Pool
) -> Iterator[Term]:
    ratios = some / sampled
    ratios[~ratios.isfinite()] = torch.nan
    middle = ratios.nanmedian(1).values
    same = (ratios / middle[:, None] - 1).abs() <= near
    for place in torch.nonzero(same.double().mean(1) >= MOSTLY).reshape(-1).tolist():
        factor = pool.numbers.nearest(float(middle[place]), near / len(some) ** 0.5)
        if factor is not None:
            yield scaled(terms[place], factor)


def _sums(
    target: torch.Tensor, places: torch.Tensor, some: torch.Tensor, near: float, pool: Pool
) -> Iterator[Term]:
    """Yield the sums of two vectors or first rows of tables, and their means."""
    terms, sampled = pool.sampled(target.numel(), places)
    plain = [place for place, term in enumerate(terms) if term.words in pool.tensors]
    rows = _first_rows(target.numel(), pool)
    parts = [shaped(terms[place], (-1,)) for place in plain] + rows
    if len(parts) < 2:
        return
    own = [part.value(pool.tensors).reshape(-1)[places].cpu() for part in rows]
    table = torch.cat([sampled[plain], torch.stack(own)]) if own else sampled[plain]
    for factor in (1.0, 0.5):
        for first in range(len(parts) - 1):
            pair = factor * (table[first] + table[first + 1 :])
            size = factor * (table[first].abs() + table[first + 1 :].abs())
            share = ((pair - some).abs() <= near * size + 1e-30).double().mean(1)
            for second in torch.nonzero(share >= MOSTLY).reshape(-1).tolist():
                yield _mean_or_sum(parts[first], parts[first + 1 + second], factor)


def _mean_or_sum(one: Term, other: Term, factor: float) -> Term:
    both = summed(one, other)
    return both if factor == 1 else scaled(both, number(0.5, "0.5"), f"0.5 * ({both.words})")


def _first_rows(length: int, pool: Pool) -> list[Term]:
    if length in pool.first_rows:
        return pool.first_rows[length]
    rows = pool.first_rows[length] = []
    for term in pool.terms:
        if term.vector or len(term.names) > 1:
            continue
        shape = pool.tensors[term.names[0]].shape
        if shape[-1] == length:
            count = min(shape.numel() // length, FIRST_ROWS)
            rows += [row(term, place) for place in range(count)]
    return rows


# --- tables


def _with_a_vector(target: torch.Tensor, pool: Pool) -> Term | None:
    """Return a table as part of another plus one vector for all rows."""
    matrix = target.detach().double().flatten(0, -2)
    count, length = matrix.shape
    for term in pool.terms:
        if term.vector or len(term.names) > 1 or pool.tensors[term.names[0]].shape[-1] != length:
            continue
        whole = term.value(pool.tensors).flatten(0, -2)
        for start in dict.fromkeys((0, 1, 2, len(whole) - count)):
            if not 0 <= start <= len(whole) - count:
                continue
            gaps = matrix - whole[start : start + count].to(matrix.device)
            middle = gaps.median(0).values
            spread = (gaps - middle).abs().median(0).values
            if bool((spread <= 4 * roundoff(target.dtype) * whole.abs().amax()).all()):
                for vector in _like(middle, target, whole, pool):
                    both = _beneath(term, start, count, vector)
                    if is_made_of(target, both, pool):
                        return both
    return None


def _like(
    middle: torch.Tensor, target: torch.Tensor, whole: torch.Tensor, pool: Pool
) -> Iterator[Term]:
    """Yield the vectors and first rows of tables that are near one."""
    terms, table = pool.vectors(len(middle))
    plain = [place for place, term in enumerate(terms) if term.words in pool.tensors]
    rows = _first_rows(len(middle), pool)
    parts = [terms[place] for place in plain] + rows
    own = [part.value(pool.tensors).reshape(-1).cpu() for part in rows]
    known = torch.cat([table[plain], torch.stack(own)]) if own else table[plain]
    gaps = (known - middle.cpu()).abs().amax(1)
    most = 8 * roundoff(target.dtype) * float(whole.abs().amax())
    for place in torch.nonzero(gaps <= most).reshape(-1).tolist():
        yield parts[place]


def _beneath(term: Term, start: int, count: int, vector: Term) -> Term:
    def evaluate(tensors: Tensors) -> Valued:
        (value, size), (other, of) = term.evaluate(tensors), vector.evaluate(tensors)
        value, size = (part.flatten(0, -2)[start : start + count] for part in (value, size))
        return value + other.reshape(-1), size + of.reshape(-1)

    return Term(f"{term.words} + {vector.words}", term.names + vector.names, evaluate)


# --- several vectors one after the other


def _stack(target: torch.Tensor, pool: Pool) -> Term | None:
    for length in pool.lengths():
        parts = target.numel() // max(length, 1)
        if length < FEWEST or target.numel() % length or not 1 < parts <= MOST_PARTS:
            continue
        terms: list[Term] = []
        for part in target.reshape(parts, length):
            term = one_vector(part, pool)
            if term is None:
                break
            terms.append(term)
        if len(terms) == parts:
            return stacked(terms)
    return None


def stacked(terms: Sequence[Term]) -> Term:
    """Return vectors one after the other."""

    def evaluate(tensors: Tensors) -> Valued:
        values, sizes = zip(*(term.evaluate(tensors) for term in terms), strict=True)
        flat = [torch.cat([part.reshape(-1) for part in several]) for several in (values, sizes)]
        return flat[0], flat[1]

    names = tuple(dict.fromkeys(name for term in terms for name in term.names))
    return Term(", ".join(term.words for term in terms), names, evaluate)


def in_another_order(target: torch.Tensor, pool: Pool) -> Term | None:
    """Return a small tensor as elements of one source, or of several that it holds whole."""
    own = target.detach().double().cpu().reshape(-1)
    known = own.unique()
    if not DISTINCT <= len(known) <= MOST_ELEMENTS:
        return None
    covered = torch.zeros(len(own), dtype=torch.bool)
    parts: list[Term] = []
    for term in pool.terms:
        if len(term.names) > 1 or pool.sizes[term] > MOST_ELEMENTS:
            continue
        elements = term.value(pool.tensors).reshape(-1).cpu().to(target.dtype).double().unique()
        inside = torch.isin(own, elements)
        if bool(inside.all()):
            return _as_it_is(target, (term,))
        whole = len(elements) >= DISTINCT and bool(torch.isin(elements, known).all())
        if whole and not bool(covered[inside].all()):
            covered |= inside
            parts.append(term)
    return _as_it_is(target, tuple(parts)) if bool(covered.all()) else None


def _as_it_is(target: torch.Tensor, terms: Sequence[Term]) -> Term:
    wide = target.detach().double()
    names = tuple(name for term in terms for name in term.names)
    words = ", ".join(term.words for term in terms)
    return Term(f"{words} in another order", names, lambda _: (wide, wide.abs()))
