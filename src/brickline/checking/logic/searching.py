"""Which modules compute another function, where the two sides are different code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from brickline.checking.execution.tape import Tape
from brickline.checking.explain import explained
from brickline.checking.logic.carrying import nudge, nudged
from brickline.checking.logic.feeding import FedModule
from brickline.checking.logic.known_values import KnownValues
from brickline.checking.logic.naming import blame
from brickline.checking.logic.outputs import largest_distance
from brickline.checking.logic.search import Cut, Search
from brickline.checking.logic.wide_sides import WideSide

TINY = 2.0**-52
MOST_ALTERNATIVES = 3
"""Modules of which one is wrong, where the evidence tells them not apart; of more, none is named."""


def searched_modules(
    candidate: WideSide,
    reference: WideSide,
    unshared: Sequence[Mapping[str, float]],
    limit: float,
    idle: torch.Tensor | None = None,
) -> tuple[FedModule, ...]:
    """Return the modules of the candidate that compute something else, in the order found.

    Args:
        candidate: Before its call.
        reference: Before the same call.
        unshared: Tensors of each side that the other lacks, with their rounding.
        limit: Relative L2 up to which outputs are the same.
        idle: Which tokens of a batch have no answer. Default None: all have one.
    """
    search = make_search(candidate, reference, unshared, limit, idle)
    cuts = search.run()
    found: dict[str, FedModule] = {}
    for several in _families(search, cuts):
        blamed = blame(search, several)
        names = blamed.paths
        if len(names) > MOST_ALTERNATIVES or any(name in found for name in names):
            continue
        explanation = explained(search, several[0])
        found[names[0]] = FedModule(
            names[0],
            0.0,
            cause=explanation.words,
            alternatives=names[1:],
            source=blamed.source,
            repair=explanation.repair,
            shown=explanation.shown,
        )
    return tuple(found.values())


def _families(search: Search, cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Return cuts by the place in a layer in which they are, and by what is handed wrongly."""
    families: dict[tuple[object, ...], list[Cut]] = {}
    for cut in cuts:
        handed = cut.handed
        key: tuple[object, ...] = search.ours.values[cut.value].key
        if handed is not None and handed.partner is not None:
            key = ("handed", handed.partner)
        families.setdefault(key, []).append(cut)
    return list(families.values())


def make_search(
    candidate: WideSide,
    reference: WideSide,
    unshared: Sequence[Mapping[str, float]],
    limit: float,
    idle: torch.Tensor | None = None,
) -> Search:
    ours = KnownValues(candidate.tape(), _moved(candidate, unshared[0]))
    theirs = KnownValues(reference.tape(), _moved(reference, unshared[1]))

    def differs(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.shape != other.shape or largest_distance([one], [other], idle) > limit

    def rerun(elements: Mapping[int, np.ndarray]) -> Tape:
        return candidate.tape(replaced=elements)

    outputs = _paired(ours.tape, theirs.tape)
    return Search(ours, theirs, outputs, differs, rerun, candidate.weights())


def _moved(side: WideSide, places: Mapping[str, float]) -> Tape:
    """Return a call with what rounding may have moved."""
    generator = torch.Generator().manual_seed(0)
    return side.tape(
        lambda tensor: nudge(tensor, TINY, generator),
        prepared=nudged(side.root, dict(places), generator),
    )


def _paired(ours: Tape, theirs: Tape) -> list[tuple[int, int]]:
    """Pair the outputs of both sides, each with the first of its shape that is left."""
    left, pairs = list(theirs.outputs), []
    for one in ours.outputs:
        shape = ours.values[one].shape
        other = next((index for index in left if theirs.values[index].shape == shape), None)
        if other is not None:
            left.remove(other)
            pairs.append((one, other))
    return pairs
