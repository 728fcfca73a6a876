"""Partners for the reference's values, also where the two sides are different code.

Where most modules have the same names, names are trusted. Elsewhere partners are found by
evidence: the same weights at work (`weights`), then the same values, which are looked for again
and again while the reference runs on what is paired already, so that a fault upstream does not
hide what follows it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch

from brickline.checking.forcing import Clean, perform
from brickline.checking.pairing import (
    Layout,
    Pairing,
    Part,
    Partner,
    WeightEvidence,
    is_boundary,
    pair_by_key,
    precision,
)
from brickline.checking.recording import Recording, Value
from brickline.checking.row_orders import Leading, RowOrders, spread_of
from brickline.checking.segments import strangers_of
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import State
from brickline.checking.stage import ARGUMENT, INPUT, OPERAND, OUTPUT, Key
from brickline.checking.weight_evidence import modules_by_weights, plain_modules
from brickline.checking.weight_uses import Use, uses_of
from brickline.checking.weights import Rows, WeightMap, match_weights, named_tensors
from brickline.oracle.widen import unit_roundoff

SAME_NAMES = 0.7
"""Part of the module paths that both sides share, from which on names are trusted."""
ROUNDS = 3
"""How often values are looked for while more and more is paired."""
NEAR = 8.0
"""Values are the same if they differ by at most this many unit roundoffs…"""
NEAR_FLOOR = 1e-4
"""…or by this much, as relative L2."""
MOST_DIMENSIONS = 5
"""Tensors of more dimensions are not looked at in other orders of them."""


def align(
    recording: Recording,
    call: Call,
    candidate: Side,
    reference: Side,
    state: State,
) -> Pairing:
    """Return which of the reference's values stand for which of the candidate's."""
    theirs = perform(reference, call, views=True)
    pairing = pair_by_key(recording, theirs)
    if _same_names(candidate, reference):
        pairing.strangers = strangers_of(
            recording.callers, set(theirs.callers), {path for path, _ in theirs.callers}
        )
        return pairing
    pairing.same_code = False
    search = _Search(recording, theirs, candidate, reference)
    search.keep_roots(pairing)
    search.by_weights()
    state.restore()
    search.by_rows(call)
    for _ in range(ROUNDS):
        state.restore()
        if not search.by_values(call):
            break
    search.by_siblings()
    search.pairing.by_weights = _by_weights(
        candidate, reference, plain_modules(recording), search.weights.scaled
    )
    return search.pairing


def _by_weights(
    candidate: Side, reference: Side, plain: Collection[str], scaled: Collection[str]
) -> Callable[[], WeightEvidence]:
    """Return what finds out what their weights say of the modules; it keeps no values."""

    @functools.cache
    def found() -> WeightEvidence:
        ours, theirs = named_tensors(candidate.root), named_tensors(reference.root)
        return modules_by_weights(plain, ours, theirs, scaled)

    return found


def signature_of(recording: Recording) -> int:
    """Return a number that two recordings share if the same partners serve both."""
    return hash(
        tuple(
            (each.key, tuple(size == 1 for size in each.tensor.shape)) for each in recording.values
        )
    )


def _same_names(candidate: Side, reference: Side) -> bool:
    ours = {path for path in candidate.stage.modules if path}
    theirs = {path for path in reference.stage.modules if path}
    if not ours and not theirs:
        return True
    return len(ours & theirs) >= SAME_NAMES * max(len(ours), len(theirs))


class _Search:
    """The search for partners between two recordings of different code."""

    def __init__(
        self,
        ours: Recording,
        theirs: Recording,
        candidate: Side,
        reference: Side,
    ) -> None:
        self.ours = ours
        self.theirs = theirs
        self.reference = reference
        self.pairing = Pairing(same_code=False)
        if candidate.weights is None:
            candidate.weights = match_weights(
                named_tensors(candidate.root), named_tensors(reference.root)
            )
        self.weights = candidate.weights
        self._usual = _usual_orders(self.weights)
        self._widths = (_widths(candidate), _widths(reference))
        self._used: set[Key] = set()

    def keep_roots(self, by_key: Pairing) -> None:
        """What the root is given and returns has its partner by its place."""
        for key, partner in by_key.partners.items():
            if not key.path and (key.op == OUTPUT or key.op.startswith(ARGUMENT)):
                self._pair(key, partner)

    def _pair(self, key: Key, partner: Partner) -> None:
        self.pairing.partners[key] = partner
        self._used.update(part.key for part in partner.parts)

    # Weights

    def by_weights(self) -> None:
        """Pair what is made with the same weights, and what those weights are multiplied with."""
        ours = uses_of(self.ours, self.weights.ours, self._widths[0])
        theirs = uses_of(self.theirs, self.weights.theirs, self._widths[1])
        for name, other in self.weights.whole.items():
            for mine, right in zip(ours.get(name, ()), theirs.get(other, ()), strict=False):
                self._pair_use(mine, right)
        for name, rows in self.weights.rows.items():
            self._pair_joined(name, ours.get(name, []), rows, theirs)
        for name, rows in self.weights.inverse.items():
            self._pair_split(name, theirs.get(name, []), rows, ours)
        self.pairing.trusted = {
            each.key
            for each in self.ours.values
            if not self.weights.scaled.isdisjoint(each.parameters) and not each.view
        }
        for name, other in self._remaining(ours, theirs).items():
            for mine, right in zip(ours[name], theirs[other], strict=False):
                self._guess(mine, right)

    def _guess(self, mine: Use, right: Use) -> None:
        """Two weights that differ may be meant to be the same."""
        ours, theirs = mine.value, right.value
        same = ours.tensor.numel() == theirs.tensor.numel()
        if same and ours.tensor.shape[-1:] == theirs.tensor.shape[-1:] and _fine(ours, theirs):
            self.pairing.guesses[theirs.key] = Partner((Part(ours.key),))

    def _remaining(
        self, ours: dict[str, list[Use]], theirs: dict[str, list[Use]]
    ) -> dict[str, str]:
        """Pair weights that differ, where their place between equal ones leaves one choice."""
        known = dict(self.weights.whole)
        for name, rows in self.weights.rows.items():
            known.update({name: rows[0].reference} if rows else {})
        order = list(theirs)
        taken = set(self.weights.whole.values())
        taken |= {each.reference for rows in self.weights.rows.values() for each in rows}
        taken |= set(self.weights.inverse)
        spoken = {each.reference for rows in self.weights.inverse.values() for each in rows}
        found: dict[str, str] = {}
        names = list(ours)
        for at, name in enumerate(names):
            if name in known or name in spoken:
                continue
            before = [known[each] for each in names[:at] if known.get(each) in order]
            after = [known[each] for each in names[at + 1 :] if known.get(each) in order]
            low = order.index(before[-1]) if before else -1
            high = order.index(after[0]) if after else len(order)
            shape = ours[name][0].shape
            choices = [
                each
                for each in order[low + 1 : high]
                if each not in taken and theirs[each][0].shape == shape
            ]
            if choices:
                found[name] = choices[0]
                taken.add(choices[0])
        return found

    def _pair_use(self, mine: Use, right: Use) -> None:
        self._pair_entrance(mine, right)
        self._pair_same(mine.value, right.value)

    def _pair_entrance(self, mine: Use, right: Use) -> None:
        """Pair what two weights are multiplied with, or two modules of one weight called with."""
        for ours, theirs in ((mine.operand, right.operand), (mine.entrance, right.entrance)):
            if ours is None or theirs is None:
                continue
            made = _origin(self.theirs, theirs)
            if made.key not in self.pairing.partners:
                # What goes in may go elsewhere too: it is replaced where it is made.
                self._pair_same(_origin(self.ours, ours, self._used), made)
            if made is not theirs:
                self._pair_same(ours, theirs)

    def _pair_same(self, mine: Value, right: Value) -> None:
        same = mine.tensor.numel() == right.tensor.numel()
        ends = mine.tensor.shape[-1:] == right.tensor.shape[-1:]
        if same and ends and right.key not in self.pairing.partners and _fine(mine, right):
            self._pair(right.key, Partner((Part(mine.key),)))

    def _pair_joined(
        self, name: str, uses: list[Use], rows: list[Rows], theirs: dict[str, list[Use]]
    ) -> None:
        """The candidate multiplies once with what the reference multiplies with one by one."""
        for each in rows:
            for mine, right in zip(uses, theirs.get(each.reference, ()), strict=False):
                if right.value.tensor.shape[-1] != len(each.theirs):
                    continue
                order = torch.from_numpy(each.ours[each.theirs.argsort()])
                if mine.value.tensor.shape[-1] <= int(order.max()):
                    continue
                if right.value.key not in self.pairing.partners:
                    self._pair(right.value.key, Partner((Part(mine.value.key, columns=order),)))
                    # Another order of rows may be meant, or it may be the fault.
                    usual = self._usual_order(name, each.reference)
                    if usual is None or np.array_equal(usual, order.numpy()):
                        self._guess(mine, right)
                    elif usual.max() < mine.value.tensor.shape[-1]:
                        part = Part(mine.value.key, columns=torch.from_numpy(usual))
                        self.pairing.guesses[right.value.key] = Partner((part,))
                self._pair_entrance(mine, right)

    def _pair_split(
        self, name: str, uses: list[Use], rows: list[Rows], ours: dict[str, list[Use]]
    ) -> None:
        """The reference multiplies once with what the candidate multiplies with one by one."""
        for number, right in enumerate(uses):
            parts: list[Part] = []
            meant: list[Part] = []
            for each in rows:
                mine = ours.get(each.reference, [])
                if number >= len(mine) or mine[number].value.tensor.shape[-1] != len(each.theirs):
                    continue
                order = torch.from_numpy(each.ours[each.theirs.argsort()])
                if right.value.tensor.shape[-1] <= int(order.max()):
                    continue
                parts.append(Part(mine[number].value.key, place=order))
                usual = self._usual_order(name, each.reference)
                plain = order.sort().values if usual is None else torch.from_numpy(usual)
                meant.append(Part(mine[number].value.key, place=plain))
                self._pair_entrance(mine[number], right)
            if parts and right.value.key not in self.pairing.partners:
                self._pair(right.value.key, Partner(tuple(parts)))
                if any(
                    not torch.equal(a.place, b.place) for a, b in zip(parts, meant, strict=True)
                ):
                    # Another order of rows may be meant, or it may be the fault.
                    self.pairing.guesses[right.value.key] = Partner(tuple(meant))

    def _usual_order(self, name: str, reference: str) -> np.ndarray | None:
        """Return the order of rows in other layers, or else in other parts of a layer."""
        families = _family(name), _family(reference)
        return self._usual.get(families, self._usual.get((families[0], _kind(reference))))

    # Rows

    def by_rows(self, call: Call) -> None:
        """Find out in which order the rows of those lie that the two sides keep otherwise."""
        spreads: dict[Key, Leading | None] = {}
        for key, partner in (*self.pairing.partners.items(), *self.pairing.guesses.items()):
            theirs = self.theirs.by_key.get(key)
            wide = None if theirs is None else spread_of(self.theirs, theirs)
            ours = (self.ours.by_key.get(each.key) for each in partner.parts)
            if wide and any(each and spread_of(self.ours, each) != wide for each in ours):
                spreads[key] = wide
        if spreads:
            listener = RowOrders(self.pairing, self.ours, spreads)
            perform(self.reference, call, keep=False, listener=listener)

    # Values

    def by_values(self, call: Call) -> int:
        """Run the reference on what is paired and pair what comes out the same; return how many."""
        listener = Clean(self.pairing, self.ours)
        made = perform(self.reference, call, views=True, listener=listener)
        mine = _by_size(
            each for each in self.ours.values if each.key not in self._used and _telling(each)
        )
        norms = _norms(each for group in mine.values() for each in group)
        found = 0
        wanted = [
            each
            for each in made.values
            if each.key not in self.pairing.partners and _telling(each) and not each.view
        ]
        sizes = _norms(wanted)
        for right in wanted:
            choices = [
                each
                for each in mine.get(right.tensor.numel(), [])
                if abs(norms[each.key] - sizes[right.key]) <= _near(each) * sizes[right.key]
            ]
            part = self._same_value(right, choices) if choices else None
            if part is not None:
                self._pair(right.key, Partner((part,)))
                found += 1
        return found

    def _same_value(self, right: Value, choices: list[Value]) -> Part | None:
        best: tuple[float, Part] | None = None
        for mine in choices:
            if mine.key in self._used or not _fine(mine, right):
                continue
            found = _layouts(mine.tensor, right.tensor, _near(mine))
            if found is not None and (best is None or found[1] < best[0]):
                best = (found[1], Part(mine.key, fit=found[0], near=2 * _near(mine)))
        return None if best is None else best[1]

    # Siblings

    def by_siblings(self) -> None:
        """Guess partners from those of the same places in other layers, in order."""
        ours, theirs = _ranked(self.ours), _ranked(self.theirs)
        votes: defaultdict[tuple[Key, Key], list[tuple[int, Part]]] = defaultdict(list)
        for key, partner in self.pairing.partners.items():
            if len(partner.parts) != 1 or partner.parts[0].columns is not None:
                continue
            part = partner.parts[0]
            mine, right = _place(part.key), _place(key)
            if len(ours.get(mine, ())) != len(theirs.get(right, ())):
                continue
            number = ours[mine].index(part.key)
            same = theirs[right].index(key) == number
            votes[mine, right].append((number if same else -1, part))
        for (mine, right), found in votes.items():
            numbers = {number for number, _ in found}
            if -1 in numbers or len(numbers) == len(ours[mine]):
                continue
            for number, (own, other) in enumerate(zip(ours[mine], theirs[right], strict=True)):
                if number not in numbers and self._is_free(own, other):
                    self._guess_like(found[0][1], own, other)

    def _is_free(self, own: Key, other: Key) -> bool:
        """Whether neither has a partner, nor what ours is a part of."""
        known = other in self.pairing.partners or other in self.pairing.guesses
        if known or own in self._used or other.op == INPUT or other.op.startswith(OPERAND):
            return False
        value = self.ours.by_key[own]
        sources = [self.ours.by_index[each] for each in value.inputs if value.view]
        return not any(
            each.key in self._used or _origin(self.ours, each).key in self._used for each in sources
        )

    def _guess_like(self, part: Part, own: Key, other: Key) -> None:
        mine, right = self.ours.by_key[own], self.theirs.by_key[other]
        laid = part.fit is None or part.fit(mine.tensor, right.tensor.shape) is not None
        if laid and mine.tensor.numel() == right.tensor.numel() and _fine(mine, right):
            self.pairing.guesses[other] = Partner((Part(own, fit=part.fit),))


def _widths(side: Side) -> dict[str, int]:
    """Return how many numbers each parameter and buffer of a side holds."""
    if not isinstance(side.root, torch.nn.Module):
        return {}
    named = (*side.root.named_parameters(), *side.root.named_buffers())
    return {name: tensor.numel() for name, tensor in named}


def _kind(name: str) -> str:
    """Return the last words of a weight's name: its own, and that of the module that holds it."""
    return "…" + ".".join(name.split(".")[-2:])


def _place(key: Key) -> Key:
    """Return a key as it is in all layers."""
    return key._replace(path=_family(key.path))


def _ranked(recording: Recording) -> dict[Key, list[Key]]:
    """Return the keys of the same place in all layers, in order."""
    found: defaultdict[Key, list[Key]] = defaultdict(list)
    for value in recording.values:
        if value.tensor.dtype.is_floating_point:
            found[_place(value.key)].append(value.key)
    return dict(found)


def _family(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _usual_orders(weights: WeightMap) -> dict[tuple[str, str], np.ndarray]:
    """Return the order of rows that most layers share, by the families of both names."""
    seen: defaultdict[tuple[str, str], Counter[tuple[int, ...]]] = defaultdict(Counter)
    for name, rows in (*weights.rows.items(), *weights.inverse.items()):
        for each in rows:
            rank = tuple(each.ours[each.theirs.argsort()].tolist())
            seen[_family(name), _family(each.reference)][rank] += 1
            seen[_family(name), _kind(each.reference)][rank] += 1
    found: dict[tuple[str, str], np.ndarray] = {}
    for families, orders in seen.items():
        order, count = orders.most_common(1)[0]
        if count > 1:
            found[families] = np.array(order)
    return found


def _origin(recording: Recording, value: Value, taken: Collection[Key] = ()) -> Value:
    """Return the value that an operation made and that came here as it is, unless it is taken."""
    by_index = recording.by_index
    current = value
    while is_boundary(current.key) and len(current.inputs) == 1:
        source = by_index.get(current.inputs[0])
        if source is None or source.tensor.numel() != value.tensor.numel():
            break
        if source.key in taken:
            return _crossing(recording, current, value)
        current = source
    if current.view or current.tensor.shape[-1:] != value.tensor.shape[-1:]:
        return value
    same = torch.equal(
        current.tensor.reshape(-1), value.tensor.reshape(-1).to(current.tensor.dtype)
    )
    return current if same else value


def _crossing(recording: Recording, first: Value, last: Value) -> Value:
    """Return the boundary behind which a value that crosses several goes more ways than one."""
    way = [last]
    while way[-1] is not first:
        way.append(recording.by_index[way[-1].inputs[0]])
    for value in reversed(way):
        if recording.readers.get(value.index, 0) > 1:
            return value
    return last


def _telling(value: Value) -> bool:
    """Whether a value can be told from others by its contents."""
    tensor = value.tensor
    if not tensor.dtype.is_floating_point or tensor.numel() < 4:
        return False
    return value.key.op != INPUT and not value.key.op.startswith(ARGUMENT)


def _near(value: Value) -> float:
    """Return how far a value may be from another to be the same but for rounding."""
    return max(NEAR * unit_roundoff(value.tensor.dtype), NEAR_FLOOR)


def _norms(values: Iterable[Value]) -> dict[Key, float]:
    """Return the norm of each value; those that are not finite, or constant, have none."""
    found: dict[Key, float] = {}
    for each in values:
        wide = each.tensor.double()
        size = float(wide.norm())
        varies = size > 0 and float(wide.std()) > 1e-6 * float(wide.abs().max())
        found[each.key] = size if varies else float("nan")
    return found


def _fine(mine: Value, right: Value) -> bool:
    return precision(mine.tensor.dtype) >= precision(right.tensor.dtype)


def _by_size(values: Iterable[Value]) -> dict[int, list[Value]]:
    found: defaultdict[int, list[Value]] = defaultdict(list)
    for each in values:
        found[each.tensor.numel()].append(each)
    return found


def _layouts(mine: torch.Tensor, right: torch.Tensor, near: float) -> tuple[Any, float] | None:
    """Return the plainest way to lay one tensor like another that makes them the same."""
    wide = right.double()
    left = mine.to(right.device).double()
    size = float(wide.norm())
    for fit in _fits(tuple(right.shape)):
        made = left.reshape(wide.shape) if fit is None else fit(left, wide.shape)
        if made is None:
            continue
        distance = float((made - wide).norm()) / size
        if distance <= near:
            return fit, distance
    return None


def _fits(shape: tuple[int, ...]) -> Iterable[Layout | None]:
    """Yield the ways in which the dimensions of a tensor may lie, the plainest first."""
    yield None
    dimensions = tuple(number for number, size in enumerate(shape) if size > 1)
    if len(dimensions) > MOST_DIMENSIONS:
        return
    for order in itertools.permutations(dimensions):
        if order != dimensions:
            yield Layout(order)
