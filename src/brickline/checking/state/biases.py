"""What a bias was made from, which goes with its weight.

Where rows of the weight are known to be rows of the other side's, the bias is theirs, multiplied
alike, with the shift of a norm that was folded in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from brickline.checking.state.pool import Pool
from brickline.checking.state.tensors import Tensors, agreement
from brickline.checking.state.terms import Term, Valued
from brickline.checking.state.unfolding import Fit, Unfolded
from brickline.checking.state.vectors import FEWEST, is_made_of, one_vector


def is_of_outputs(target: torch.Tensor, unfolded: Unfolded) -> bool:
    """Return whether a vector has an element for each row that a weight is known by."""
    assembly = unfolded.assembly
    rows = assembly.view.order[0]
    return assembly.view.leading == 1 and assembly.shape[rows] == target.numel()


def bias_term(target: torch.Tensor, unfolded: Unfolded, pool: Pool) -> Term | None:
    """Return what the bias of a weight was made from, None where that is not known.

    Args:
        target: The bias.
        unfolded: What its weight was made from.
        pool: All of the other side.
    """
    assembly = unfolded.assembly
    if not is_of_outputs(target, unfolded):
        return None
    across = torch.Size(assembly.shape).numel() // (target.numel() * assembly.length)
    fits = [fit for fit in unfolded.fits if fit.block.column == 0]
    parts: list[tuple[torch.Tensor, Term]] = []
    for fit in fits:
        places = fit.block.pieces // across
        own = target.detach().reshape(-1)[places.to(target.device)]
        term = next((t for t in _biases(fit, pool) if is_made_of(own, t, pool)), None)
        if term is None and own.numel() >= FEWEST:
            term = one_vector(own, pool)
        if term is not None:
            parts.append((places, _with_ones(own, term, pool)))
    return _scattered(parts, target.numel()) if parts else None


def _with_ones(target: torch.Tensor, term: Term, pool: Pool) -> Term:
    """Return a term, with one added where the target has it: 1 + scale, folded into a bias."""
    value, size = (part.to(target.device) for part in term.evaluate(pool.tensors))
    coarse = pool.roundoff(term.names)
    strayed = ~agreement(target, value, size, coarse).within
    ones = strayed.double()
    if not bool(strayed.any()) or not bool(
        agreement(target, value + ones, size, coarse).within.all()
    ):
        return term

    def evaluate(tensors: Tensors) -> Valued:
        value, size = term.evaluate(tensors)
        return value + ones.to(value.device), size

    return Term(f"{term.words} + 1 in places", term.names, evaluate, True)


def _scattered(parts: Sequence[tuple[torch.Tensor, Term]], count: int) -> Term:
    def evaluate(tensors: Tensors) -> Valued:
        values = [(places, term.evaluate(tensors)) for places, term in parts]
        value = values[0][1][0].new_full((count,), torch.nan)
        size = torch.zeros_like(value)
        for places, (part, of) in values:
            at = places.to(value.device)
            value[at], size[at] = part.to(value.device), of.to(value.device)
        return value, size

    names = tuple(dict.fromkeys(name for _, term in parts for name in term.names))
    words = ", ".join(dict.fromkeys(term.words for _, term in parts if term.words))
    return Term(words, names, evaluate, True)


def _biases(fit: Fit, pool: Pool) -> Iterator[Term]:
    source = fit.block.source
    start = source.term.names[0].rpartition(".")[0]
    own = _vectors_of(start, source.rows, pool)
    added = [] if fit.columns is None else _through(fit, pool)
    for bias in (*own, None):
        yield _folded_bias(fit, bias, None, None)
        for shift in _shifts(fit, pool):
            yield _folded_bias(fit, bias, shift, None)
        for through in added:
            yield _folded_bias(fit, bias, None, through)


def _vectors_of(start: str, length: int, pool: Pool) -> list[Term]:
    """Return the vectors of one module that have a length."""
    return [
        term
        for term in pool.terms
        if term.vector
        and len(term.names) == 1
        and term.names[0].rpartition(".")[0] == start
        and pool.tensors[term.names[0]].numel() == length
    ]


def _shifts(fit: Fit, pool: Pool) -> list[Term]:
    """Return what a norm adds whose scale is folded into the rows."""
    if fit.rows is None or not fit.rows.term.words.startswith("the scale of "):
        return []
    words = fit.rows.term.words.replace("the scale of ", "the shift of ", 1)
    return [term for term in pool.terms if term.words == words]


def _through(fit: Fit, pool: Pool) -> list[Term]:
    """Return what a norm adds whose scale is folded into the columns, after the weight."""
    assert fit.columns is not None
    term = fit.columns.term
    if term.words.startswith("the scale of "):
        words = term.words.replace("the scale of ", "the shift of ", 1)
        return [each for each in pool.terms if each.words == words]
    start = term.names[0].rpartition(".")[0]
    length = pool.tensors[term.names[0]].numel()
    return [v for v in _vectors_of(start, length, pool) if v.names[0] != term.names[0]]


def _folded_bias(fit: Fit, bias: Term | None, shift: Term | None, through: Term | None) -> Term:
    rows = fit.block.rows

    def evaluate(tensors: Tensors) -> Valued:
        wide, wide_size = fit.block.source.term.evaluate(tensors)
        value = torch.zeros(len(rows), dtype=torch.float64, device=wide.device)
        size = torch.zeros_like(value)
        at = rows.to(wide.device)
        if bias is not None:
            value, size = (part.reshape(-1)[at] for part in bias.evaluate(tensors))
        if through is not None and fit.columns is not None:
            view = fit.block.source.view
            passed, of = (part.reshape(-1) for part in through.evaluate(tensors))
            places = fit.columns.places.to(wide.device)
            matrix, matrix_size = view.matrix(wide)[at], view.matrix(wide_size)[at]
            value = value + matrix @ passed[places]
            size = size + matrix.abs() @ of[places] + matrix_size @ passed[places].abs()
        by, by_size = fit.of_rows(tensors, wide.device)
        value, size = value * by, size * by.abs() + value.abs() * by_size
        if shift is not None:
            added, of = (part.reshape(-1)[at] for part in shift.evaluate(tensors))
            value, size = value + added, size + of
        return value, size

    terms = [term for term in (bias, shift, through) if term is not None]
    folded = [term for term in fit.terms[1:] if bias is not None]
    names = [name for term in (*terms, *folded) for name in term.names]
    if through is not None:
        names += fit.block.source.term.names
    words = " * ".join(term.words for term in ((bias,) if bias else ()) + tuple(folded))
    words = " + ".join(part for part in (words, *(t.words for t in (shift, through) if t)) if part)
    return Term(words, tuple(dict.fromkeys(names)), evaluate, True)
