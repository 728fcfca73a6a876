"""Where the two sides come together again after something wrong.

Where no weight tells partners apart, a wrong value hides all that is made from it. If the reference
goes on from one of the candidate's values, and all that follows comes out right, then that value
was meant for the one it took the place of, and what is wrong was done before it. The earliest such
value leaves the fewest to be asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from brickline.checking.blaming import odd_modules
from brickline.checking.facts import Fact
from brickline.checking.held import Held, Hold
from brickline.checking.pairing import Layout, Pairing, Part, Partner, is_boundary, is_fine
from brickline.checking.recording import Recording, Value
from brickline.checking.segments import is_handed, modules_of, segment_of, segments_of
from brickline.checking.stage import ARGUMENT, OUTPUT, Key

MOST_TRIES = 24
"""So many values are tried for one that is wrong."""
MOST_STEPS = 4
"""So often an earlier value is looked for than the one that was found."""
MOST_CHOICES = 2
"""So many of the reference's values are tried for one of the candidate's."""

Glance = Callable[[Pairing, Key], bool]
"""Whether one of the reference's values comes out right with partners."""
Try = tuple[Value, Value, Layout | None]


def resumed(held: Held, hold: Hold, glance: Glance, ours: Recording, theirs: Recording) -> Held:
    """Return what is held with the partners from which on all is right.

    Args:
        held: The partners so far, and what was measured with them.
        hold: Runs the reference on partners and measures.
        glance: Whether one of the reference's values comes out right with partners.
        ours: The candidate's values.
        theirs: The reference's, made from the candidate's where these have partners.
    """
    keys = held.wrong
    if len(keys) != 1:
        # What several wrong values have in common says more.
        return held
    wrong = keys.pop()
    for _ in range(MOST_STEPS):
        found = _earlier(wrong, held, hold, glance, ours, theirs)
        if found is None:
            break
        held, wrong = found
        proven = held.pairing.proven | {wrong}
        held = replace(held, pairing=replace(held.pairing, proven=proven))
    return held


def _earlier(
    wrong: Key, held: Held, hold: Hold, glance: Glance, ours: Recording, theirs: Recording
) -> tuple[Held, Key] | None:
    """Return the partners with one before a wrong value that explains it, and that one's key."""
    pairing, facts = held.pairing, held.facts
    ways = (each for fact, each in _ways(facts, ours) if fact.reference_key == wrong)
    way = next(ways, [])
    if len(modules_of(way, pairing.strangers, ours.constants)) < 2 or wrong not in theirs.by_key:
        return None
    known = pairing.partners.keys() - {wrong}
    right = segment_of(theirs, wrong, known)[:-1]
    last = _own_key(facts, wrong)
    values = [each for each in way if each.key != last]
    returned = [each for each in values if each.key.op == OUTPUT]
    # What encloses much comes first: it is soon told whether all of that is right.
    returned.sort(key=lambda each: (each.key.path.count("."), each.index))
    inside = [*_sources(way, ours), *(each for each in values if each.key.op != OUTPUT)]
    for chosen in (returned, inside):
        for mine, other, fit in itertools.islice(_tries(chosen, right, way), MOST_TRIES):
            tried = held.pairing.more({other.key: Partner((Part(mine.key, fit=fit),))})
            if not glance(tried, wrong):
                continue
            found = hold(tried)
            if other.key in found.wrong and found.wrong - {other.key} <= held.wrong - {wrong}:
                return found, other.key
    return None


def is_vague(held: Held, ours: Recording, *, weights_only: bool = False) -> bool:
    """Whether several modules had a hand in something wrong, and none or several stand out.

    Args:
        held: The partners, and what was measured with them.
        ours: The candidate's values.
        weights_only: Whether a module stands out by its weights only, and not by what it does.
    """
    hands = _hands(held, ours)
    if not hands:
        return False
    weights = held.pairing.by_weights()
    known = {*weights.odd, *weights.unfound, *(() if weights_only else odd_modules(ours))}
    return any(len(known.intersection(each)) != 1 for each in hands)


def _hands(held: Held, ours: Recording) -> list[tuple[str, ...]]:
    """Return the modules that had a hand in what is wrong, where there are several."""
    ways = (way for fact, way in _ways(held.facts, ours) if fact.suspicious)
    found = (modules_of(way, held.pairing.strangers, ours.constants) for way in ways)
    return [each for each in found if len(each) > 1]


def _sources(way: Sequence[Value], ours: Recording) -> list[Value]:
    """Return the compared values that were handed on: something may not have been done to them."""
    inside = {each.index for each in way}
    read = (index for each in way for index in each.inputs if index in ours.by_index)
    found = {index: ours.by_index[index] for index in read}
    return [found[index] for index in sorted(found.keys() - inside)]


def _own_key(facts: Sequence[Fact], wrong: Key) -> Key:
    """Return the candidate's key of a wrong value."""
    return next(each.key for each in facts if each.reference_key == wrong)


def _ways(facts: Sequence[Fact], ours: Recording) -> Iterator[tuple[Fact, list[Value]]]:
    """Yield each fact with how its value came about from those that were compared before it."""
    order = [
        (each.key, each.reference_key, each.part is None or each.part.columns is None)
        for each in facts
    ]
    for fact, (_, segment) in zip(facts, segments_of(ours, order), strict=True):
        yield fact, segment.values


def _tries(mine: Sequence[Value], right: Sequence[Value], way: Sequence[Value]) -> Iterator[Try]:
    """Yield the values that may be meant for each other, in the candidate's order."""
    inside = {each.index for each in way}
    made = {each.index for each in right}
    others = [each for each in right if _is_own(each, made)]
    for value in mine:
        if value.index in inside and value.key.op != OUTPUT and not _is_own(value, inside):
            continue
        choices = [
            (likeness, -number, other, fit)
            for number, other in enumerate(others)
            if _fits(value, other)
            for likeness, fit in (_likest(value.tensor, other.tensor),)
        ]
        choices.sort(key=lambda each: each[:2], reverse=True)
        yield from ((value, other, fit) for *_, other, fit in choices[:MOST_CHOICES])


def _is_own(value: Value, inside: set[int]) -> bool:
    """Whether it is made here, and not only handed on."""
    if value.view or is_handed(value.key) or value.key.op.startswith(ARGUMENT):
        return False
    return not is_boundary(value.key) or not inside.issuperset(value.inputs)


def _fits(mine: Value, right: Value) -> bool:
    left, other = mine.tensor, right.tensor
    if left.numel() != other.numel() or left.numel() < 4 or not is_fine(mine, right):
        return False
    numbers = left.dtype.is_floating_point and other.dtype.is_floating_point
    return numbers or (left.dtype is torch.bool and other.dtype is torch.bool)


def _likest(mine: torch.Tensor, right: torch.Tensor) -> tuple[float, Layout | None]:
    """Return how alike two tensors are in the layout in which they are most, and that layout."""
    left, wide = mine.to(right.device).double(), right.double()
    sizes = float(left.norm()) * float(wide.norm())
    found = [
        (float((made * wide).sum()) / sizes if sizes else 0.0, fit)
        for fit, made in Layout.laid(left, wide.shape)
    ]
    return max(found, key=lambda each: each[0])
