"""A side's tensors, what several of them amount to, and functions of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from brickline.checking.state.tensors import Tensors, roundoff
from brickline.checking.state.terms import (
    FORMS,
    Numbers,
    Term,
    derived_terms,
    formed,
    raised,
    raw_term,
    scaled,
)

FEWEST_ON_A_LINE = 8
"""Elements that tell a line from others."""
MOSTLY = 0.75
"""Part of them that must lie on it: the rest may be wrong."""


class Pool:
    """All terms of a side, and vectors by their length with what is computed from each."""

    def __init__(self, root: Any, tensors: Tensors, numbers: Numbers) -> None:
        self.tensors = tensors
        self.numbers = numbers
        self.terms = [raw_term(name, tensor) for name, tensor in tensors.items()]
        self.terms += derived_terms(tensors, root)
        self.sizes = {
            term: tensors[term.words].numel()
            if term.words in tensors
            else term.value(tensors).numel()
            for term in self.terms
        }
        """How many elements each has."""
        self.first_rows: dict[int, list[Term]] = {}
        """The first rows of tables, by their length."""
        self._tables: dict[int, tuple[list[Term], torch.Tensor]] = {}
        self._samples: dict[int, tuple[list[Term], torch.Tensor]] = {}

    def roundoff(self, names: tuple[str, ...]) -> float:
        """Return the coarsest rounding that the sources of a term went through."""
        return max((roundoff(self.tensors[name].dtype) for name in names), default=0.0)

    def vectors(self, length: int) -> tuple[list[Term], torch.Tensor]:
        """Return the vectors of a length in every form, and a table of their elements."""
        if length not in self._tables:
            terms = [
                formed(term, form)
                for term in self.terms
                if term.vector and self.sizes[term] == length
                for form in FORMS
            ]
            rows = [term.value(self.tensors).reshape(-1).cpu() for term in terms]
            table = torch.stack(rows) if rows else torch.empty(0, length).double()
            self._tables[length] = terms, table
        return self._tables[length]

    def sampled(self, size: int, places: torch.Tensor) -> tuple[list[Term], torch.Tensor]:
        """Return all terms of a size in every form, and a table of some of their elements."""
        if size not in self._samples:
            terms: list[Term] = []
            rows: list[torch.Tensor] = []
            for term in self.terms:
                if self.sizes[term] != size:
                    continue
                flat = term.value(self.tensors).reshape(-1)
                some = flat[places.to(flat.device)].cpu()
                terms += [formed(term, form) for form in FORMS]
                rows += [form.function(some) for form in FORMS]
            table = torch.stack(rows) if rows else torch.empty(0, len(places)).double()
            self._samples[size] = terms, table
        return self._samples[size]

    def lines(
        self, terms: list[Term], table: torch.Tensor, some: torch.Tensor, near: float
    ) -> Iterator[Term]:
        """Yield the vectors of which some elements are a number plus a multiple.

        Args:
            terms: Vectors.
            table: Their elements in the places that are looked at.
            some: What they may be, there.
            near: How far an element may be off, relative to the largest.
        """
        plain = [place for place, term in enumerate(terms) if term.words in self.tensors]
        if len(some) < FEWEST_ON_A_LINE or not plain:
            return
        known, size = table[plain], float(some.abs().amax())
        middle, own = known.median(1, keepdim=True).values, some.median()
        slopes = (some - own) / (known - middle)
        slopes[~slopes.isfinite()] = torch.nan
        steep = slopes.nanmedian(1, keepdim=True).values
        over = (some - steep * known).median(1, keepdim=True).values
        off = (some - steep * known - over).abs() <= near * size
        for place in torch.nonzero(off.double().mean(1) >= MOSTLY).reshape(-1).tolist():
            spread = float(known[place].amax() - known[place].amin())
            factor = self.numbers.nearest(float(steep[place]), near * size / max(spread, 1e-300))
            least = max(abs(float(over[place])), 1e-300)
            added = self.numbers.nearest(float(over[place]), near * size / least)
            if factor is not None and added is not None:
                term = terms[plain[place]]
                yield raised(term if factor.words == "1" else scaled(term, factor), added)

    def lengths(self) -> list[int]:
        """Return the lengths of all vectors, longest first."""
        return sorted({self.sizes[t] for t in self.terms if t.vector}, reverse=True)
