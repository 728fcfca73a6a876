"""Drop pairs of operations that do not belong together after all.

Modules of the same name may make the same operations in another order. Without their inner pairs
nothing after them is wrong then, while a fault shows at the next pair all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from brickline.checking.facts import Fact
from brickline.checking.held import Held, Hold
from brickline.checking.pairing import Pairing, is_boundary
from brickline.checking.stage import Key

MAX_ROUNDS = 5
"""How often partners are taken away that turn out to be doubtful without others."""
MAX_DROPS = 6
"""How many doubtful partners are taken away one by one."""
STRANGE = 0.3
"""Relative L2 from which on two values may not be meant to be the same."""


def without_strangers(held: Held, hold: Hold) -> Held:
    """Return what is held with the partners that stay; the others leave the pairing itself."""
    groups = _doubtful(held.pairing, held.facts)
    if not held.wrong or not groups:
        return held
    gone, found = _all_dropped(held, groups, hold, {})
    if not found.wrong:
        return _dropped(held, gone, found)
    if len(groups) == 1:
        return _dropped(held, gone, found) if _explains(gone, held, found) else held
    for group in groups[:MAX_DROPS]:
        gone, found = _all_dropped(held, [group], hold, held.errors)
        if _explains(gone, held, found):
            held = _dropped(held, gone, found)
    return held


def _all_dropped(
    held: Held, groups: list[frozenset[Key]], hold: Hold, known: Mapping[Key, float]
) -> tuple[set[Key], Held]:
    """Take doubtful partners away, and those that only then turn out to be doubtful.

    Values that are handed on have partners at every boundary that they cross: without the first,
    the next one is wrong.
    """
    gone = set(itertools.chain.from_iterable(groups))
    for _ in range(MAX_ROUNDS):
        found = hold(held.pairing.less(gone))
        # What is as wrong as it was has nothing to do with these.
        other = [each for each in found.facts if not _is_as_before(each, known)]
        more = set(itertools.chain.from_iterable(_doubtful(held.pairing, other))) - gone
        if not more or (known and len(found.wrong) > len(known)):
            break
        gone |= more
    return gone, found


def _doubtful(pairing: Pairing, facts: list[Fact]) -> list[frozenset[Key]]:
    """Return the keys of values that may not be meant for each other, to be dropped together."""
    groups: dict[tuple[str, int], frozenset[Key]] = {}
    for fact in facts:
        if not fact.suspicious or not _is_strange(fact):
            continue
        key = fact.reference_key
        if not is_boundary(key):
            groups[key.path, key.call] = frozenset(
                other
                for other in pairing.partners
                if other[:2] == key[:2] and not is_boundary(other)
            )
    return list(groups.values())


def _is_strange(fact: Fact) -> bool:
    return fact.ratios.relative_l2 > STRANGE or not fact.dtype.is_floating_point


def _dropped(held: Held, keys: Iterable[Key], found: Held) -> Held:
    """Take partners out of the pairing itself; `found` was measured without them."""
    for key in keys:
        held.pairing.partners.pop(key, None)
    return replace(held, facts=found.facts)


def _explains(gone: Collection[Key], held: Held, found: Held) -> bool:
    """Whether without a group of partners less is wrong, and the rest is as wrong as before."""
    before = held.errors
    return all(
        each.reference_key not in gone and _is_as_before(each, before)
        for each in found.facts
        if each.suspicious
    )


def _is_as_before(fact: Fact, before: Mapping[Key, float]) -> bool:
    """Whether a value is as wrong as it was."""
    error = before.get(fact.reference_key)
    return error is not None and abs(fact.ratios.relative_l2 - error) <= 0.01 * error
