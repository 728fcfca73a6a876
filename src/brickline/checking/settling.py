"""Second thoughts about partners, where something looks wrong.

A partner may be the wrong one: two operations of the same name in another order, two equal
weights. Taken away, nothing after it is wrong; a fault, though, shows at the next pair all the
same. And a weight that differs from all others may be meant for one of the reference's: that guess
is believed if it explains what is wrong after it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from brickline.checking.factors import pair_by_factors
from brickline.checking.facts import Fact
from brickline.checking.guessing import guess_by_siblings, place_of
from brickline.checking.held import Held, Hold
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


def settled(held: Held, hold: Hold) -> Held:
    """Return what is held with the partners that stay.

    What was no partner after all is taken out of the pairing itself; guesses are not added to it.
    """
    if not held.wrong:
        return held
    held = _with_one_left(held, hold)
    held = _without_strangers(held, hold)
    return _with_guesses(held, hold)


def with_factors(held: Held, hold: Hold, ours: Recording, theirs: Recording) -> Held:
    """Believe partners up to a factor that several layers share, and what these are siblings of.

    Args:
        held: The partners so far, and what was measured with them.
        hold: Runs the reference on partners and measures.
        ours: The candidate's values.
        theirs: The reference's, made from the candidate's where these have partners.
    """
    more = pair_by_factors(ours, theirs, held.pairing)
    if not more:
        return held
    tried = replace(held.pairing.more(more), guesses={**held.pairing.guesses})
    guess_by_siblings(ours, theirs, tried)
    found = settled(hold(tried), hold)
    new = found.pairing.partners.keys() - held.pairing.partners.keys()
    left, wrong = found.wrong, held.wrong
    explains = left - new < wrong if left & new else left <= wrong
    return found if left and explains else held


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


def _with_one_left(held: Held, hold: Hold) -> Held:
    """Take all but one of the wrong partners away, where nothing else is wrong then.

    What is wrong shows at the next pair if its own is taken away, so the others were no partners:
    if the one that is left is as wrong as before, or some of the others are wrong in several
    layers alike, which is another way to write them.
    """
    before = held.errors
    if held.pairing.same_code or not 1 < len(before) <= MAX_WRONG:
        return held
    for left in before:
        gone: set[Key] = set()
        found = held
        for _ in range(MAX_ROUNDS):
            # Values that are handed on have partners at every boundary that they cross.
            gone |= {key for key in found.wrong if key != left and not is_end(key)}
            found = hold(held.pairing.less(gone))
            if found.wrong == {left}:
                rest = [each for each in found.facts if each.suspicious]
                alike = len({place_of(key) for key in gone & before.keys()}) < len(
                    gone & before.keys()
                )
                if alike or all(_is_as_before(each, before) for each in rest):
                    return _dropped(held, gone, found)
                break
            if found.wrong <= gone | {left} or any(map(is_end, found.wrong)):
                break
    return held


def _without_strangers(held: Held, hold: Hold) -> Held:
    groups = _doubtful(held.pairing, held.facts)
    if not groups:
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


def _with_guesses(held: Held, hold: Hold) -> Held:
    """Believe the guesses that come out right, and those that explain what is wrong after them."""
    held = _with_right_guesses(held, hold)
    held = _with_all_guesses(held, hold)
    for guesses in itertools.islice(_together(held.pairing.guesses), MAX_GUESSES):
        wrong = held.wrong
        if not wrong:
            break
        less = held.pairing.less(_returned_by(held.pairing, guesses))
        found = hold(less.more(guesses))
        left, keys = found.wrong, set(guesses)
        if left & keys and len(left - keys) < len(wrong - keys):
            held = found
    return held


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


def _with_right_guesses(held: Held, hold: Hold) -> Held:
    """Believe the guesses that are the same as their partners: they show what is not wrong."""
    waiting = _unpaired_guesses(held.pairing)
    for _ in range(MAX_ROUNDS):
        if not waiting:
            break
        tried = hold(held.pairing.more(waiting))
        tested = [each for each in tried.facts if each.reference_key in waiting]
        poor = {each.reference_key for each in tested if each.ratios.z > 1}
        right = {each.reference_key for each in tested} - poor
        if right:
            found = hold(held.pairing.more({key: waiting[key] for key in right}))
            if found.wrong <= held.wrong:
                held = found
        # The first that is not may spoil what comes after it.
        first = next((each.reference_key for each in tested if each.reference_key in poor), None)
        waiting = {key: each for key, each in waiting.items() if key in poor and key != first}
    known, guesses = held.pairing.partners, held.pairing.guesses
    left = {key: each for key, each in guesses.items() if known.get(key) is not each}
    return replace(held, pairing=replace(held.pairing, guesses=left))


def _with_all_guesses(held: Held, hold: Hold) -> Held:
    """Believe all guesses, if nothing else is wrong then, but for those that need not be."""
    guesses = _unpaired_guesses(held.pairing)
    if len(guesses) < 2 or not held.wrong:
        return held
    found = hold(held.pairing.more(guesses))
    suspects = [each.reference_key for each in found.facts if each.suspicious]
    if not suspects or not guesses.keys() >= set(suspects) or len(suspects) > MAX_DROPS:
        return held
    for key in reversed(suspects):
        without_it = hold(found.pairing.less({key}))
        if without_it.wrong and without_it.wrong <= set(suspects):
            found = without_it
    return found


def _unpaired_guesses(pairing: Pairing) -> dict[Key, Partner]:
    return {key: each for key, each in pairing.guesses.items() if key not in pairing.partners}


def _together(guesses: Mapping[Key, Partner]) -> Iterator[dict[Key, Partner]]:
    """Yield each guess, and before them those that are about one value of the candidate."""
    about: defaultdict[Key, dict[Key, Partner]] = defaultdict(dict)
    for key, guess in guesses.items():
        about[guess.parts[0].key][key] = guess
    for group in about.values():
        if len(group) > 1:
            yield group
        yield from ({key: guess} for key, guess in group.items())
