"""Second thoughts about partners, where something looks wrong.

A partner may be the wrong one: two operations of the same name in another order, two equal
weights. Taken away, nothing after it is wrong; a fault, though, shows at the next pair all the
same. And a weight that differs from all others may be meant for one of the reference's: that guess
is believed if it explains what is wrong after it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from brickline.checking.factors import Near, pair_by_factors
from brickline.checking.facts import Fact
from brickline.checking.guessing import guess_by_siblings, place_of
from brickline.checking.pairing import Pairing, Partner, is_boundary, is_end
from brickline.checking.patching import Shares
from brickline.checking.recording import Recording
from brickline.checking.stage import OUTPUT, Key
from brickline.checking.weight_uses import PRODUCTS

MAX_GUESSES = 24
"""How many guessed partners are tried for one call."""
MAX_ROUNDS = 5
"""How often partners are taken away that turn out to be doubtful without others."""
MAX_DROPS = 6
"""How many doubtful partners are taken away one by one."""
MAX_WRONG = 8
"""Of more wrong partners it is not asked whether one of them is the only one."""
STRANGE = 0.3
"""Relative L2 from which on two values may not be meant to be the same."""
NO_SHARE = 1e-3
"""Repairing a culprit removes more of the final difference than this, or it may be none."""

Hold = Callable[[Pairing], list[Fact]]
"""Runs the reference on the partners and returns what was measured."""


def settled(pairing: Pairing, facts: list[Fact], hold: Hold) -> tuple[Pairing, list[Fact]]:
    """Return the partners that stay and what was measured with them.

    What was no partner after all is taken out of `pairing` itself; guesses are not added to it.
    """
    if not any(each.suspicious for each in facts):
        return pairing, facts
    facts = _with_one_left(pairing, facts, hold)
    facts = _without_strangers(pairing, facts, hold)
    return _with_guesses(pairing, facts, hold)


def with_factors(
    pairing: Pairing,
    facts: list[Fact],
    hold: Hold,
    ours: Recording,
    theirs: Recording,
    near: Near,
) -> tuple[Pairing, list[Fact]]:
    """Believe partners up to a factor that several layers share, and what these are siblings of.

    Args:
        pairing: The partners so far.
        facts: What was measured with them.
        hold: Runs the reference on partners and returns what was measured.
        ours: The candidate's values.
        theirs: The reference's, made from the candidate's where these have partners.
        near: How far values of a dtype may be from each other to be the same.
    """
    more = pair_by_factors(ours, theirs, pairing, near)
    if not more:
        return pairing, facts
    tried = replace(pairing, partners={**pairing.partners, **more}, guesses={**pairing.guesses})
    guess_by_siblings(ours, theirs, tried)
    settled_on, found = settled(tried, hold(tried), hold)
    new = settled_on.partners.keys() - pairing.partners.keys()
    left, wrong = _wrong(found), _wrong(facts)
    explains = left - new < wrong if left & new else left <= wrong
    return (settled_on, found) if left and explains else (pairing, facts)


def unconfirmed(guilty: Iterable[Fact], shares: Shares) -> set[Key]:
    """Return the reference's keys of partners that look wrong, and whose repair changes nothing."""
    found = set()
    for fact in guilty:
        share = shares.share(fact.modules[0])
        idle = share is not None and share <= NO_SHARE
        # Of a module that made something before it, not all may have been repaired.
        own = len(fact.modules) == 1 and fact.key.path == fact.modules[0]
        if idle and own and not is_end(fact.reference_key):
            found.add(fact.reference_key)
    return found


def without(pairing: Pairing, keys: Iterable[Key]) -> Pairing:
    """Return the partners less some."""
    return _less(pairing, keys)


def _with_one_left(pairing: Pairing, facts: list[Fact], hold: Hold) -> list[Fact]:
    """Take all but one of the wrong partners away, where nothing else is wrong then.

    What is wrong shows at the next pair if its own is taken away, so the others were no partners:
    if the one that is left is as wrong as before, or some of the others are wrong in several
    layers alike, which is another way to write them.
    """
    before = {each.reference_key: each.ratios.relative_l2 for each in facts if each.suspicious}
    wrong = list(before)
    if pairing.same_code or not 1 < len(wrong) <= MAX_WRONG:
        return facts
    for left in wrong:
        gone: set[Key] = set()
        found = facts
        for _ in range(MAX_ROUNDS):
            # Values that are handed on have partners at every boundary that they cross.
            gone |= {key for key in _wrong(found) if key != left and not is_end(key)}
            found = hold(_less(pairing, gone))
            if _wrong(found) == {left}:
                rest = [each for each in found if each.suspicious]
                alike = len({place_of(key) for key in gone & before.keys()}) < len(
                    gone & before.keys()
                )
                if alike or all(_is_as_before(each, before) for each in rest):
                    _drop(pairing, gone)
                    return found
                break
            if _wrong(found) <= gone | {left} or any(map(is_end, _wrong(found))):
                break
    return facts


def _without_strangers(pairing: Pairing, facts: list[Fact], hold: Hold) -> list[Fact]:
    groups = _doubtful(pairing, facts)
    if not groups:
        return facts
    gone, found = _all_dropped(pairing, groups, hold)
    if not any(each.suspicious for each in found):
        _drop(pairing, gone)
        return found
    if len(groups) == 1:
        if _explains(gone, facts, found):
            _drop(pairing, gone)
            return found
        return facts
    for group in groups[:MAX_DROPS]:
        gone, found = _all_dropped(pairing, [group], hold, facts)
        if _explains(gone, facts, found):
            _drop(pairing, gone)
            facts = found
    return facts


def _all_dropped(
    pairing: Pairing, groups: list[frozenset[Key]], hold: Hold, before: Iterable[Fact] = ()
) -> tuple[set[Key], list[Fact]]:
    """Take doubtful partners away, and those that only then turn out to be doubtful.

    Values that are handed on have partners at every boundary that they cross: without the first,
    the next one is wrong.
    """
    gone = set(itertools.chain.from_iterable(groups))
    known = {each.reference_key: each.ratios.relative_l2 for each in before if each.suspicious}
    for _ in range(MAX_ROUNDS):
        found = hold(_less(pairing, gone))
        # What is as wrong as it was has nothing to do with these.
        other = [each for each in found if not _is_as_before(each, known)]
        more = set(itertools.chain.from_iterable(_doubtful(pairing, other))) - gone
        if not more or (known and len(_wrong(found)) > len(known)):
            break
        gone |= more
    return gone, found


def _doubtful(pairing: Pairing, facts: list[Fact]) -> list[frozenset[Key]]:
    """Return the keys of values that may not be meant for each other, to be dropped together."""
    groups: dict[tuple[str, int] | Key, frozenset[Key]] = {}
    for fact in facts:
        if not fact.suspicious or not _is_strange(fact):
            continue
        key = fact.reference_key
        if not pairing.same_code and is_end(key):
            # What comes out is compared whatever else is not.
            continue
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
    return all(
        each.reference_key not in gone and _is_as_before(each, before)
        for each in found
        if each.suspicious
    )


def _is_as_before(fact: Fact, before: Mapping[Key, float]) -> bool:
    """Whether a value is as wrong as it was."""
    error = before.get(fact.reference_key)
    return error is not None and abs(fact.ratios.relative_l2 - error) <= 0.01 * error


def _with_guesses(pairing: Pairing, facts: list[Fact], hold: Hold) -> tuple[Pairing, list[Fact]]:
    """Believe the guesses that come out right, and those that explain what is wrong after them."""
    pairing, facts = _with_right_guesses(pairing, facts, hold)
    pairing, facts = _with_all_guesses(pairing, facts, hold)
    for guesses in itertools.islice(_together(pairing.guesses), MAX_GUESSES):
        wrong = _wrong(facts)
        if not wrong:
            break
        less = _less(pairing, _returned_by(pairing, guesses))
        tried = replace(less, partners={**less.partners, **guesses})
        found = hold(tried)
        left, keys = _wrong(found), set(guesses)
        if left & keys and len(left - keys) < len(wrong - keys):
            pairing, facts = tried, found
    return pairing, facts


def _returned_by(pairing: Pairing, guesses: Mapping[Key, Partner]) -> set[Key]:
    """Return the partners of what modules return of which something inside is guessed at.

    A module that makes one value has one partner.
    """
    guessed = [part.key for each in guesses.values() for part in each.parts]
    if any(key.op not in PRODUCTS for key in guessed):
        return set()
    calls = {key[:2] for key in guessed if key.path}
    return {
        key
        for key, partner in pairing.partners.items()
        if key not in guesses
        and all(part.key.op == OUTPUT and part.key[:2] in calls for part in partner.parts)
    }


def _with_right_guesses(
    pairing: Pairing, facts: list[Fact], hold: Hold
) -> tuple[Pairing, list[Fact]]:
    """Believe the guesses that are the same as their partners: they show what is not wrong."""
    waiting = {key: each for key, each in pairing.guesses.items() if key not in pairing.partners}
    for _ in range(MAX_ROUNDS):
        if not waiting:
            break
        found = hold(replace(pairing, partners={**pairing.partners, **waiting}))
        held = [each for each in found if each.reference_key in waiting]
        poor = {each.reference_key for each in held if each.ratios.z > 1}
        right = {each.reference_key for each in held} - poor
        if right:
            kept = {key: waiting[key] for key in right}
            tried = replace(pairing, partners={**pairing.partners, **kept})
            found = hold(tried)
            if _wrong(found) <= _wrong(facts):
                pairing, facts = tried, found
        # The first that is not may spoil what comes after it.
        first = next((each.reference_key for each in held if each.reference_key in poor), None)
        waiting = {key: each for key, each in waiting.items() if key in poor and key != first}
    left = {
        key: each for key, each in pairing.guesses.items() if pairing.partners.get(key) is not each
    }
    return replace(pairing, guesses=left), facts


def _with_all_guesses(
    pairing: Pairing, facts: list[Fact], hold: Hold
) -> tuple[Pairing, list[Fact]]:
    """Believe all guesses, if nothing else is wrong then, but for those that need not be."""
    guesses = {key: each for key, each in pairing.guesses.items() if key not in pairing.partners}
    if len(guesses) < 2 or not _wrong(facts):
        return pairing, facts
    tried = replace(pairing, partners={**pairing.partners, **guesses})
    found = hold(tried)
    suspects = [each.reference_key for each in found if each.suspicious]
    if not suspects or not guesses.keys() >= set(suspects) or len(suspects) > MAX_DROPS:
        return pairing, facts
    for key in reversed(suspects):
        less = _less(tried, {key})
        without_it = hold(less)
        if _wrong(without_it) <= set(suspects) and _wrong(without_it):
            tried, found = less, without_it
    return tried, found


def _together(guesses: Mapping[Key, Partner]) -> Iterator[dict[Key, Partner]]:
    """Yield each guess, and before them those that are about one value of the candidate."""
    about: defaultdict[Key, dict[Key, Partner]] = defaultdict(dict)
    for key, guess in guesses.items():
        about[guess.parts[0].key][key] = guess
    for group in about.values():
        if len(group) > 1:
            yield group
        yield from ({key: guess} for key, guess in group.items())
