"""Partners that are believed only where they explain what is wrong after them.

A value of the reference without a partner may be meant for one that is wrong: that of the same
place in another layer, or what a module is called with, or returns, that works with the same
weights. Knows nothing of verdicts; `settling` tries the guesses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from brickline.checking.origins import origin
from brickline.checking.pairing import Pairing, Part, Partner, is_fine
from brickline.checking.recording import Recording, Value
from brickline.checking.stage import INPUT, OPERAND, OUTPUT, Key, family_of
from brickline.checking.weights import WeightMap


def guess_by_siblings(ours: Recording, theirs: Recording, pairing: Pairing) -> None:
    """Guess partners from those of the same places in other layers, in order."""
    mine, right = _ranked(ours), _ranked(theirs)
    votes: defaultdict[tuple[Key, Key], list[tuple[int, Part]]] = defaultdict(list)
    for key, partner in pairing.partners.items():
        if len(partner.parts) != 1 or partner.parts[0].columns is not None:
            continue
        part = partner.parts[0]
        places = place_of(part.key), place_of(key)
        if len(mine.get(places[0], ())) != len(right.get(places[1], ())):
            continue
        number = mine[places[0]].index(part.key)
        same = right[places[1]].index(key) == number
        votes[places].append((number if same else -1, part))
    used = pairing.candidate_keys()
    for places, found in votes.items():
        numbers = {number for number, _ in found}
        if -1 in numbers or len(numbers) == len(mine[places[0]]):
            continue
        pairs = zip(mine[places[0]], right[places[1]], strict=True)
        for number, (own, other) in enumerate(pairs):
            known = other in pairing.partners or other in pairing.guesses
            # Two layers that agree may know better than a weight.
            taken = used if len(found) < 2 else used - {own}
            if number not in numbers and not known and _is_free(own, other, ours, taken):
                _guess_like(found[0][1], ours.by_key[own], theirs.by_key[other], pairing)


def _is_free(own: Key, other: Key, ours: Recording, used: set[Key]) -> bool:
    """Whether ours has no partner, nor what it is a part of."""
    if own in used or other.op == INPUT or other.op.startswith(OPERAND):
        return False
    value = ours.by_key[own]
    sources = [ours.by_index[each] for each in value.inputs if value.view]
    return not any(each.key in used or origin(ours, each).key in used for each in sources)


def _guess_like(part: Part, mine: Value, right: Value, pairing: Pairing) -> None:
    laid = part.fit is None or part.fit(mine.tensor, right.tensor.shape) is not None
    if laid and mine.tensor.numel() == right.tensor.numel() and is_fine(mine, right):
        pairing.guesses[right.key] = Partner((Part(mine.key, fit=part.fit, factor=part.factor),))


def place_of(key: Key) -> Key:
    """Return a key as it is in all layers."""
    return key._replace(path=family_of(key.path))


def _ranked(recording: Recording) -> dict[Key, list[Key]]:
    """Return the keys of the same place in all layers, in order."""
    found: defaultdict[Key, list[Key]] = defaultdict(list)
    for value in recording.values:
        if value.tensor.dtype.is_floating_point:
            found[place_of(value.key)].append(value.key)
    return dict(found)


def guess_by_modules(
    ours: Recording, theirs: Recording, pairing: Pairing, weights: WeightMap
) -> None:
    """Guess that modules with the same weights are called with the same, and return the same."""
    used = pairing.candidate_keys()
    taken = {name for each in _partners_of(weights).values() for name in each}
    by_weights: defaultdict[frozenset[str], list[str]] = defaultdict(list)
    for path, names in _below({name: {name} for name in taken}).items():
        by_weights[frozenset(names)].append(path)
    for path, names in _below(_partners_of(weights)).items():
        for other in by_weights.get(frozenset(names), ()):
            for mine, right in _crossings(ours, theirs, path, other):
                # What goes in may go elsewhere too: it is replaced where it is made.
                made, ours_made = origin(theirs, right), origin(ours, mine, used)
                known = {right.key, made.key}
                if known.isdisjoint(pairing.partners) and known.isdisjoint(pairing.guesses):
                    pairing.guesses[made.key] = Partner((Part(ours_made.key),))


def _partners_of(weights: WeightMap) -> dict[str, set[str]]:
    """Return the reference's weights that each of the candidate's is made of, or is a part of."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, other in weights.whole.items():
        found[name].add(other)
    for name, rows in weights.rows.items():
        found[name].update(each.reference for each in rows)
    for other, rows in weights.inverse.items():
        for each in rows:
            found[each.reference].add(other)
    return dict(found)


def _below(names: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return what belongs to the weights of each module and of those in it; not the root's."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, each in names.items():
        path = name.rpartition(".")[0]
        while path:
            found[path] |= each
            path = path.rpartition(".")[0]
    return dict(found)


def _crossings(
    ours: Recording, theirs: Recording, path: str, other: str
) -> Iterator[tuple[Value, Value]]:
    """Yield what two modules are called with, and what they return, where there is one choice."""
    for op in (INPUT, OUTPUT):
        mine, right = _at(ours, path, op), _at(theirs, other, op)
        for place in mine.keys() & right.keys():
            if len(mine[place]) == len(right[place]) == 1:
                pair = mine[place][0], right[place][0]
                if is_fine(*pair):
                    yield pair


def _at(recording: Recording, path: str, op: str) -> dict[tuple[int, int, int], list[Value]]:
    """Return the numbers that cross a module's boundary, by its calls and their sizes."""
    found: defaultdict[tuple[int, int, int], list[Value]] = defaultdict(list)
    for value in recording.values:
        tensor = value.tensor
        same = value.key.path == path and value.key.op == op
        if same and tensor.ndim and tensor.dtype.is_floating_point:
            found[value.key.call, tensor.numel(), tensor.shape[-1]].append(value)
    return dict(found)
