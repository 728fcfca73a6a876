"""Second thoughts about partners, where something looks wrong.

A partner may be the wrong one: two operations of the same name in another order, two equal
weights. Taken away, nothing after it is wrong; a fault, though, shows at the next pair all the
same. And a weight that differs from all others may be meant for one of the reference's: that guess
is believed if it explains what is wrong after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

from brickline.checking.facts import Fact
from brickline.checking.pairing import Pairing, is_boundary
from brickline.checking.stage import Key

MAX_GUESSES = 24
"""How many guessed partners are tried for one call."""
MAX_DROPS = 6
"""How many doubtful partners are taken away one by one."""
STRANGE = 0.3
"""Relative L2 from which on two values may not be meant to be the same."""

Hold = Callable[[Pairing], list[Fact]]
"""Runs the reference on the partners and returns what was measured."""


def settled(pairing: Pairing, facts: list[Fact], hold: Hold) -> tuple[Pairing, list[Fact]]:
    """Return the partners that stay and what was measured with them.

    What was no partner after all is taken out of `pairing` itself; guesses are not added to it.
    """
    if not any(each.suspicious for each in facts):
        return pairing, facts
    facts = _without_strangers(pairing, facts, hold)
    return _with_guesses(pairing, facts, hold)


def _without_strangers(pairing: Pairing, facts: list[Fact], hold: Hold) -> list[Fact]:
    groups = _doubtful(pairing, facts)
    if not groups:
        return facts
    found = hold(_less(pairing, itertools.chain.from_iterable(groups)))
    if not any(each.suspicious for each in found):
        _drop(pairing, itertools.chain.from_iterable(groups))
        return found
    if len(groups) == 1:
        if _explains(groups[0], facts, found):
            _drop(pairing, groups[0])
            return found
        return facts
    for group in groups[:MAX_DROPS]:
        found = hold(_less(pairing, group))
        if _explains(group, facts, found):
            _drop(pairing, group)
            facts = found
    return facts


def _doubtful(pairing: Pairing, facts: list[Fact]) -> list[frozenset[Key]]:
    """Return the keys of values that may not be meant for each other, to be dropped together."""
    groups: dict[tuple[str, int] | Key, frozenset[Key]] = {}
    for fact in facts:
        if not fact.suspicious or not _is_strange(fact):
            continue
        key = fact.reference_key
        if pairing.same_code and not is_boundary(key):
            groups[key.path, key.call] = frozenset(
                each for each in pairing.partners if each[:2] == key[:2] and not is_boundary(each)
            )
        elif not pairing.same_code:
            groups[key] = frozenset({key})
    return list(groups.values())


def _is_strange(fact: Fact) -> bool:
    return fact.ratios.relative_l2 > STRANGE or not fact.dtype.is_floating_point


def _less(pairing: Pairing, keys: Iterable[Key]) -> Pairing:
    gone = set(keys)
    kept = {key: each for key, each in pairing.partners.items() if key not in gone}
    return replace(pairing, partners=kept)


def _drop(pairing: Pairing, keys: Iterable[Key]) -> None:
    for key in keys:
        pairing.partners.pop(key, None)


def _wrong(facts: list[Fact]) -> set[Key]:
    return {each.reference_key for each in facts if each.suspicious}


def _explains(group: Iterable[Key], facts: list[Fact], found: list[Fact]) -> bool:
    """Whether without a group of partners less is wrong, and the rest is as wrong as before."""
    before = {each.reference_key: each.ratios.relative_l2 for each in facts if each.suspicious}
    gone = set(group)
    for each in found:
        if not each.suspicious:
            continue
        key, error = each.reference_key, each.ratios.relative_l2
        if key in gone or key not in before or abs(error - before[key]) > 0.01 * before[key]:
            return False
    return True


def _with_guesses(pairing: Pairing, facts: list[Fact], hold: Hold) -> tuple[Pairing, list[Fact]]:
    """Believe the guesses that explain what is wrong after them."""
    for key, guess in itertools.islice(pairing.guesses.items(), MAX_GUESSES):
        wrong = _wrong(facts)
        if not wrong:
            break
        tried = replace(pairing, partners={**pairing.partners, key: guess})
        found = hold(tried)
        left = _wrong(found)
        if key in left and len(left - {key}) < len(wrong - {key}):
            pairing, facts = tried, found
    return pairing, facts
