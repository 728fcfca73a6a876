"""Which modules compute another function, where the two sides are different code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from brickline.align.equality import comparable
from brickline.checking.execution.tape import Tape
from brickline.checking.explain import explained
from brickline.checking.logic.carrying import nudged
from brickline.checking.logic.feeding import FedModule
from brickline.checking.logic.known_values import KnownValues
from brickline.checking.logic.naming import blame
from brickline.checking.logic.outputs import largest_distance
from brickline.checking.logic.search import Cut, Search
from brickline.checking.logic.wide_sides import WideSide
from brickline.checking.stage import family_of
from brickline.checking.state.tensors import plain_name
from brickline.oracle.wide_calls.state import nudge

TINY = 2.0**-52
"""By how much inputs are moved: float64's own rounding."""
COMPUTED = "with the reference's value in place of its own, what follows is right in float64"
HANDED = "it hands on the wrong value: with the right one, what it is read for is right in float64"
MOST_ALTERNATIVES = 3
"""Modules that the evidence does not tell apart; of more, none is named."""


def searched_modules(
    candidate: WideSide,
    reference: WideSide,
    unshared: Sequence[Mapping[str, float]],
    limit: float,
    idle: torch.Tensor | None = None,
) -> tuple[tuple[FedModule, ...], str | None]:
    """Return the modules that compute something else, the one that matters most first.

    And what they leave unexplained, in words; None where they explain all.

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
        first = several[0]
        explanation = explained(search, first)
        partner = search.theirs.values[first.partner]
        found[names[0]] = FedModule(
            names[0],
            _distance(search, first),
            cause=explanation.words,
            alternatives=names[1:],
            source=blamed.source,
            counterpart=reference.side.stage.display(partner.step.frame.path),
            members=_members(search, several, names[0]),
            share=min(1.0, sum(search.share(cut) for cut in several)),
            reason=HANDED if blamed.handed else COMPUTED,
            repair=explanation.repair,
            shown=explanation.shown,
        )
    modules = sorted(found.values(), key=lambda module: -(module.share or 0.0))
    return tuple(modules), search.remainder


def _distance(search: Search, cut: Cut) -> float:
    """Return the relative L2 between what is computed and what belongs there."""
    mine = comparable(search.original.values[cut.value].flat)
    right = comparable(search.theirs.values[cut.partner].flat[cut.order])
    size = float(np.linalg.norm(right))
    gap = float(np.linalg.norm(mine - right))
    return gap / size if size else float("inf")


def _members(search: Search, cuts: Sequence[Cut], name: str) -> tuple[str, ...]:
    """Return the modules of other layers in which the same is wrong."""
    if len(cuts) < 2:
        return ()
    paths = [path for cut in cuts for path in blame(search, [cut]).paths]
    family = family_of(name)
    members = dict.fromkeys(path for path in paths if family_of(path) == family)
    return tuple(members) if len(members) > 1 else ()


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


def known_values(
    candidate: WideSide, reference: WideSide, unshared: Sequence[Mapping[str, float]]
) -> tuple[KnownValues, KnownValues]:
    """Return all that both sides compute in float64, with its tolerances."""
    sides = zip((candidate, reference), unshared, strict=True)
    ours, theirs = (KnownValues(side.tape(), _moved(side, places)) for side, places in sides)
    return ours, theirs


def make_search(
    candidate: WideSide,
    reference: WideSide,
    unshared: Sequence[Mapping[str, float]],
    limit: float,
    idle: torch.Tensor | None = None,
) -> Search:
    """Return a search for the place where the candidate leaves the reference."""
    ours, theirs = known_values(candidate, reference, unshared)

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return float("inf") if one.shape != other.shape else largest_distance([one], [other], idle)

    def rerun(elements: Mapping[int, np.ndarray]) -> Tape:
        return candidate.tape(replaced=elements)

    outputs = _paired(ours.tape, theirs.tape)
    weights = {
        name: candidate.carried.get(plain_name(name), weight)
        for name, weight in candidate.weights().items()
    }
    return Search(ours, theirs, outputs, distance, limit, rerun, weights)


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
