"""The first question of a check: are the weights and buffers the same?

Names are looked at first, then bits, then signs, then vectors. What a tensor of the candidate was
made from is looked for among the reference's, and what is left of the reference's among the
candidate's: a folded norm may be on either side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from brickline.checking.state.answer import Carried, Kind, StateAnswer, TensorAnswer
from brickline.checking.state.biases import bias_term
from brickline.checking.state.grids import Grid, on_grid
from brickline.checking.state.pool import Pool
from brickline.checking.state.rows import RowIndex
from brickline.checking.state.tensors import (
    agreement,
    held_tensors,
    is_equal,
    is_plain,
    is_rounded,
    plain_name,
)
from brickline.checking.state.terms import Numbers, Term, raw_term
from brickline.checking.state.unfolding import Unfolded, unfold
from brickline.checking.state.vectors import in_another_order, made_of_vectors

FEW = 0.05
"""Part of a tensor that may differ for the rest to be known."""
MOST_ROWS = 64
"""Rows that are named."""


def ask_state(
    candidate: Any,
    reference: Any,
    given: Any = None,
    *,
    kept: tuple[Collection[str], Collection[str]] = ((), ()),
) -> StateAnswer:
    """Compare the tensors of both sides, and leave both as they are.

    Args:
        candidate: Whose tensors are looked for.
        reference: Among whose they are looked for, in the candidate's dtypes.
        given: The reference before it was rounded to these. Default None: it was not.
        kept: Tensors of each side that calls leave behind: they say what calls did, and are not
            compared. Default: none.
    """
    with torch.no_grad():
        return _asked(candidate, reference, reference if given is None else given, kept)


def _asked(
    candidate: Any, reference: Any, given: Any, kept: tuple[Collection[str], Collection[str]]
) -> StateAnswer:
    ours, theirs = _plain(candidate, kept[0]), _plain(reference, kept[1])
    exact = _plain(given, kept[1])
    exact = {name: exact.get(name, tensor) for name, tensor in theirs.items()}
    answers, alike = _by_name(ours, theirs)
    left = {name: tensor for name, tensor in ours.items() if name not in answers}
    over = {name: tensor for name, tensor in theirs.items() if name not in alike}
    if not left and not over:
        return StateAnswer(tuple(answers.values()), settled=(frozenset(ours), frozenset(theirs)))
    numbers = Numbers(candidate, reference)
    forward = _Side(Pool(reference, exact, numbers), over, theirs)
    folded = forward.explain(left)
    used = {name for term in folded.values() for name in term.names} | alike
    over = {name: tensor for name, tensor in over.items() if name not in used}
    backward = _Side(Pool(candidate, ours, numbers), left, ours)
    turned = backward.explain({name: theirs[name] for name in over}, exact) if over else {}
    carried: dict[str, Carried] = {}
    for name, tensor in left.items():
        partner = theirs.get(name)
        if name in folded and _is_layout(tensor, folded[name], theirs):
            answers[name] = TensorAnswer(name, Kind.LAYOUT, folded[name].words)
        elif name in folded:
            answers[name], carried[name] = _answer(name, tensor, folded[name], exact)
        elif partner is not None and partner.shape == tensor.shape:
            answers[name] = _differing(name, tensor, exact[name])
    sources = {name for term in turned.values() for name in term.names}
    for name in left:
        if name not in answers:
            kind = Kind.FOLDED if name in sources else Kind.EXTRA
            words = ", ".join(target for target, term in turned.items() if name in term.names)
            answers[name] = TensorAnswer(name, kind, words)
    turned_answers = {name: _answer(name, exact[name], term, ours) for name, term in turned.items()}
    back = {name: each for name, (_, each) in turned_answers.items()}
    missing = [name for name in over if name not in turned and name not in ours]
    lasting = _lasting(candidate), _lasting(reference)
    tensors = [
        answers[name] for name in ours if answers[name].kind is not Kind.EXTRA or name in lasting[0]
    ]
    tensors += [TensorAnswer(name, Kind.MISSING) for name in missing if name in lasting[1]]
    wrong = [answer for answer, _ in turned_answers.values() if answer.rows]
    tensors += [replace(each, name=each.partner, partner=each.name) for each in wrong]
    half = {name for name, each in (carried | back).items() if not each.complete}
    half |= {each.name for each in (*answers.values(), *wrong) if each.differing > FEW}
    known = {name for name, answer in answers.items() if answer.kind is not Kind.EXTRA}
    settled = frozenset(known) - half, frozenset(theirs) - half - set(missing)
    effective = {
        name: _right_rows(ours[name], theirs[name], answer.rows)
        for name, answer in answers.items()
        if answer.kind is Kind.QUANTISED
    }
    return StateAnswer(tuple(tensors), carried, back, effective, settled)


def _right_rows(
    tensor: torch.Tensor, partner: torch.Tensor, wrong: tuple[int, ...]
) -> torch.Tensor:
    """Return a quantised weight for the other side, whose own rows stay where it is wrong."""
    value = tensor.detach().to(partner.device).double()
    value[list(wrong)] = partner.detach().double()[list(wrong)]
    return value


def _plain(root: Any, kept: Collection[str]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in held_tensors(root).items()
        if is_plain(tensor) and name not in kept
    }


def _lasting(root: Any) -> set[str]:
    """Return the tensors that a file of weights would hold; the rest is made or left by calls."""
    return {plain_name(name) for name in root.state_dict()} if _is_module(root) else set()


def _is_module(root: Any) -> bool:
    return isinstance(root, torch.nn.Module)


def _by_name(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, TensorAnswer], set[str]]:
    """Return the tensors of the same name that are the same, but for rounding."""
    answers: dict[str, TensorAnswer] = {}
    for name, tensor in ours.items():
        partner = theirs.get(name)
        if partner is None or partner.shape != tensor.shape:
            continue
        if is_equal(tensor, partner):
            answers[name] = TensorAnswer(name, Kind.SAME, name)
        elif is_rounded(tensor, partner):
            answers[name] = TensorAnswer(name, Kind.ROUNDED, name)
    return answers, set(answers)


class _Side:
    """The side among whose tensors is looked."""

    def __init__(
        self, pool: Pool, likely: Collection[str], rounded: Mapping[str, torch.Tensor]
    ) -> None:
        self._pool = pool
        self._rounded = rounded
        self._likely = [term for term in pool.terms if set(term.names) & set(likely)]
        self._indices: dict[tuple[bool, bool], RowIndex] = {}

    def explain(
        self, targets: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Term]:
        """Return what each target was made from, where that is known.

        Args:
            targets: In the dtype in which they are used.
            given: The same before they were rounded to that. Default None: they were not.
        """
        exact = targets if given is None else {name: given[name] for name in targets}
        terms: dict[str, Term] = {}
        weights: dict[str, Unfolded] = {}
        for name, tensor in targets.items():
            if tensor.ndim > 1:
                unfolded = self._unfolded(tensor, exact[name])
                if unfolded is not None:
                    weights[name], terms[name] = unfolded, unfolded.term()
        for name, tensor in exact.items():
            if name not in terms and tensor.ndim == 1:
                term = self._bias(name, tensor, weights)
                if term is not None:
                    terms[name] = term
        for name, tensor in exact.items():
            if name not in terms:
                term = made_of_vectors(tensor, self._pool)
                term = term or in_another_order(targets[name], self._pool)
                if term is not None:
                    terms[name] = term
        return terms

    def _unfolded(self, tensor: torch.Tensor, exact: torch.Tensor) -> Unfolded | None:
        for signs in (False, True):
            for likely in (True, False):
                unfolded = unfold(tensor, self._index(signs, likely), self._pool, exact)
                if unfolded is not None:
                    return unfolded
        return None

    def _index(self, signs: bool, likely: bool) -> RowIndex:
        index = self._indices.get((signs, likely))
        if index is None:
            terms = self._likely if likely else self._pool.terms
            terms = [term for term in terms if not term.vector]
            index = RowIndex(terms, self._pool.tensors if signs else self._rounded, signs=signs)
            self._indices[signs, likely] = index
        return index

    def _bias(
        self, name: str, tensor: torch.Tensor, weights: Mapping[str, Unfolded]
    ) -> Term | None:
        start = name.rpartition(".")[0]
        for other, unfolded in weights.items():
            if other.rpartition(".")[0] != start:
                continue
            term = bias_term(tensor, unfolded, self._pool)
            if term is not None and is_partly(tensor, term, self._pool):
                return term
        return None


def is_partly(tensor: torch.Tensor, term: Term, pool: Pool) -> bool:
    """Return whether a tensor is a term's value for the most part."""
    value, size = term.evaluate(pool.tensors)
    value, size = value.to(tensor.device), size.to(tensor.device)
    return agreement(tensor, value, size, pool.roundoff(term.names)).share >= 0.5


def _answer(
    name: str, tensor: torch.Tensor, term: Term, sources: Mapping[str, torch.Tensor]
) -> tuple[TensorAnswer, Carried]:
    """Say what a tensor was made from, and what it differs in."""
    value, size = (part.to(tensor.device) for part in term.evaluate(sources))
    coarse = max((torch.finfo(sources[n].dtype).eps / 2 for n in term.names), default=0.0)
    compared = agreement(tensor, value, size, coarse)
    within = compared.within
    plain = all(mark not in term.words for mark in ("*", "+", "(", "scale", "shift", "/", " - "))
    kind = Kind.LAYOUT if plain else Kind.FOLDED
    if bool(within.all()):
        return TensorAnswer(name, kind, term.words), Carried(term)
    wrong = ~within & value.isfinite()
    rows, error = _rows(tensor.double(), torch.where(wrong, value, tensor.double()), ~wrong)
    share = float(wrong.double().mean())
    return TensorAnswer(name, kind, term.words, rows, share, error), Carried(
        term, within, bool(value.isfinite().all())
    )


def _is_layout(tensor: torch.Tensor, term: Term, sources: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a tensor holds the elements of its sources as they are, to the bit."""
    value = term.value(sources)
    return all(name in sources for name in term.names) and bool(
        value.shape == tensor.shape and torch.equal(value.to(tensor.device), tensor.double())
    )


def _rows(
    own: torch.Tensor, other: torch.Tensor, within: torch.Tensor
) -> tuple[tuple[int, ...], float]:
    """Return the rows that differ, and by how much."""
    shape = (own.shape[0] if own.ndim else 1, -1)
    rows = torch.nonzero(~within.reshape(shape).all(1)).reshape(-1)
    one, two = own.reshape(shape)[rows], other.reshape(shape)[rows].nan_to_num()
    error = float((one - two).norm() / two.norm().clamp(min=1e-300))
    return tuple(rows[:MOST_ROWS].tolist()), error


def _differing(name: str, tensor: torch.Tensor, partner: torch.Tensor) -> TensorAnswer:
    """Say in what two tensors of one name differ, or on what grid one of them is the other."""
    grid: Grid | None = on_grid(tensor, partner)
    term = raw_term(name, partner)
    value, size = (part.to(tensor.device) for part in term.evaluate({name: partner}))
    within = agreement(tensor, value, size, torch.finfo(partner.dtype).eps / 2).within
    rows, error = _rows(tensor.double(), value, within)
    if grid is not None:
        return TensorAnswer(name, Kind.QUANTISED, name, grid.wrong, 0.0, error, grid)
    return TensorAnswer(name, Kind.DIFFERS, name, rows, 1 - float(within.double().mean()), error)
