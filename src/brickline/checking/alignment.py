"""Partners for the reference's values, also where the two sides are different code.

Where most modules have the same names, names are trusted. Elsewhere partners are found by
evidence: the same weights at work (`weights`), then the same values, which are looked for again
and again while the reference runs on what is paired already, so that a fault upstream does not
hide what follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable

import numpy as np
import torch

from brickline.checking.forcing import Clean, perform
from brickline.checking.guessing import guess_by_modules, guess_by_siblings
from brickline.checking.origins import origin
from brickline.checking.pairing import (
    Pairing,
    Part,
    Partner,
    WeightEvidence,
    is_fine,
    pair_by_key,
)
from brickline.checking.recording import Recording, Value
from brickline.checking.row_orders import Leading, RowOrders, spread_of
from brickline.checking.same_values import Choices, is_telling
from brickline.checking.segments import origin_of, strangers_of
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import State
from brickline.checking.stage import ARGUMENT, OUTPUT, Key
from brickline.checking.usual_orders import UsualOrders
from brickline.checking.weight_evidence import modules_by_weights, plain_modules
from brickline.checking.weight_uses import Use, made_of_weights, uses_of
from brickline.checking.weights import Rows, WeightMap, match_weights, named_tensors

SAME_NAMES = 0.7
"""Part of the module paths that both sides share, from which on names are trusted."""
ROUNDS = 3
"""How often values are looked for while more and more is paired."""


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
    guess_by_siblings(recording, theirs, search.pairing)
    guess_by_modules(recording, theirs, search.pairing, search.weights)
    search.pairing.by_weights = _by_weights(
        candidate,
        reference,
        plain_modules(recording),
        search.weights,
        made_of_weights(theirs, {each.numel() for each in named_tensors(candidate.root).values()}),
    )
    return search.pairing


def _by_weights(
    candidate: Side,
    reference: Side,
    plain: Collection[str],
    weights: WeightMap,
    made: Collection[torch.Tensor],
) -> Callable[[], WeightEvidence]:
    """Return what finds out what their weights say of the modules; it keeps no activations."""

    @functools.cache
    def found() -> WeightEvidence:
        ours, theirs = named_tensors(candidate.root), named_tensors(reference.root)
        return modules_by_weights(plain, ours, theirs, weights.scaled, weights.misfolded, made)

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
        self._usual = UsualOrders(self.weights)
        self._widths = (_widths(candidate), _widths(reference))
        self._recurrent = (_recurrent(candidate), _recurrent(reference))
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
        ours = uses_of(self.ours, self.weights.ours, self._widths[0], self._recurrent[0])
        theirs = uses_of(self.theirs, self.weights.theirs, self._widths[1], self._recurrent[1])
        for name, other in self.weights.whole.items():
            for mine, right in zip(ours.get(name, ()), theirs.get(other, ()), strict=False):
                self._pair_use(mine, right)
                self._guess_usual_order(name, other, mine.value, right.value)
                if mine.op == right.op:
                    self.pairing.alike.add(name.rpartition(".")[0])
            if other in theirs:
                self._note_strangers(name, ours.get(name, []), len(theirs[other]))
        for name, rows in self.weights.rows.items():
            self._pair_joined(name, ours.get(name, []), rows, theirs)
        for name, rows in self.weights.inverse.items():
            self._pair_split(name, theirs.get(name, []), rows, ours)
        self.pairing.trusted = {
            each.key
            for each in self.ours.values
            if not self.weights.scaled.keys().isdisjoint(each.parameters) and not each.view
        }
        for name, other in self._remaining(ours, theirs).items():
            for mine, right in zip(ours[name], theirs[other], strict=False):
                self._guess(mine.value, right.value)
        self._guess_folded(ours, theirs)

    def _guess_folded(self, ours: dict[str, list[Use]], theirs: dict[str, list[Use]]) -> None:
        """Guess that weights that differ by factors make the same once these are applied."""
        for name, other in self.weights.stretched.items():
            for mine, right in zip(ours.get(name, ()), theirs.get(other, ()), strict=False):
                if right.value.key not in self.pairing.partners:
                    self._guess(mine.value, right.value)
        for name, other in self.weights.scaled.items():
            for mine, right in zip(ours.get(name, ()), theirs.get(other, ()), strict=False):
                made = right.with_factors(self.theirs, self._widths[1])
                if made.key not in self.pairing.partners:
                    self._guess(mine.with_factors(self.ours, self._widths[0]), made)

    def _guess_usual_order(self, name: str, other: str, ours: Value, theirs: Value) -> None:
        """Guess that rows that lie as the reference's are meant to lie as those of other layers."""
        width = theirs.tensor.shape[-1]
        usual = self._usual.of_layers(name, other)
        if usual is not None and len(usual) == width == ours.tensor.shape[-1]:
            part = Part(ours.key, columns=torch.from_numpy(usual))
            self.pairing.guesses[theirs.key] = Partner((part,))

    def _note_strangers(self, name: str, uses: list[Use], most: int) -> None:
        """Note the calls of a module beyond those in which the reference uses its weight."""
        for use in uses:
            path, call = use.value.key[:2]
            if path == name.rpartition(".")[0] and call >= most and path:
                self.pairing.strangers[path, call] = self.ours.callers[path, call][0]

    def _guess(self, ours: Value, theirs: Value) -> None:
        """What is made with weights that differ may be meant to be the same."""
        same = ours.tensor.numel() == theirs.tensor.numel()
        ends = ours.tensor.shape[-1:] == theirs.tensor.shape[-1:]
        if same and ends and is_fine(ours, theirs):
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
        folded = self.weights.scaled.keys() | self.weights.stretched.keys()
        found: dict[str, str] = {}
        names = list(ours)
        for at, name in enumerate(names):
            if name in known or name in spoken or name in folded:
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
        if mine.adds != right.adds:
            return
        self._pair_entrance(mine, right)
        self._pair_same(mine.value, right.value)

    def _pair_entrance(self, mine: Use, right: Use) -> None:
        """Pair what two weights are multiplied with, or two modules of one weight called with."""
        for ours, theirs in ((mine.operand, right.operand), (mine.entrance, right.entrance)):
            if ours is None or theirs is None:
                continue
            made = origin(self.theirs, theirs)
            if made.key not in self.pairing.partners:
                # What goes in may go elsewhere too: it is replaced where it is made.
                self._pair_same(origin(self.ours, ours, self._used), made)
            if made is not theirs:
                self._pair_same(ours, theirs)

    def _pair_same(self, mine: Value, right: Value) -> None:
        same = mine.tensor.numel() == right.tensor.numel()
        ends = mine.tensor.shape[-1:] == right.tensor.shape[-1:]
        if same and ends and right.key not in self.pairing.partners and is_fine(mine, right):
            self._pair(right.key, Partner((Part(mine.key),)))

    def _pair_joined(
        self, name: str, uses: list[Use], rows: list[Rows], theirs: dict[str, list[Use]]
    ) -> None:
        """The candidate multiplies once with what the reference multiplies with one by one."""
        several = [theirs.get(each.reference, []) for each in rows]
        for each in rows:
            pairs = zip(uses, theirs.get(each.reference, ()), strict=False)
            for number, (mine, right) in enumerate(pairs):
                if right.value.tensor.shape[-1] != len(each.theirs):
                    continue
                order = torch.from_numpy(each.ours[each.theirs.argsort()])
                if mine.value.tensor.shape[-1] <= int(order.max()):
                    continue
                partner = Partner((Part(mine.value.key, columns=order),))
                if not _is_one(self.theirs, several, number):
                    self.pairing.guesses.setdefault(right.value.key, partner)
                    continue
                if right.value.key not in self.pairing.partners:
                    self._pair(right.value.key, partner)
                    # Another order of rows may be meant, or it may be the fault.
                    usual = self._usual.near(name, each.reference, order)
                    if usual is None or np.array_equal(usual, order.numpy()):
                        self._guess(mine.value, right.value)
                    elif usual.max() < mine.value.tensor.shape[-1]:
                        part = Part(mine.value.key, columns=torch.from_numpy(usual))
                        self.pairing.guesses[right.value.key] = Partner((part,))
                self._pair_entrance(mine, right)

    def _pair_split(
        self, name: str, uses: list[Use], rows: list[Rows], ours: dict[str, list[Use]]
    ) -> None:
        """The reference multiplies once with what the candidate multiplies with one by one."""
        several = [ours.get(each.reference, []) for each in rows]
        for number, right in enumerate(uses):
            sure = _is_one(self.ours, several, number)
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
                usual = self._usual.near(name, each.reference, order)
                plain = order.sort().values if usual is None else torch.from_numpy(usual)
                meant.append(Part(mine[number].value.key, place=plain))
                if sure:
                    self._pair_entrance(mine[number], right)
            if parts and not sure:
                self.pairing.guesses.setdefault(right.value.key, Partner(tuple(parts)))
            elif parts and right.value.key not in self.pairing.partners:
                self._pair(right.value.key, Partner(tuple(parts)))
                if any(
                    not torch.equal(a.place, b.place) for a, b in zip(parts, meant, strict=True)
                ):
                    # Another order of rows may be meant, or it may be the fault.
                    self.pairing.guesses[right.value.key] = Partner(tuple(meant))

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
        choices = Choices(
            each for each in self.ours.values if each.key not in self._used and is_telling(each)
        )
        found = 0
        wanted = [
            each
            for each in made.values
            if each.key not in self.pairing.partners and is_telling(each) and not each.view
        ]
        for right in wanted:
            part = choices.same_as(right, self._used)
            if part is not None:
                self._pair(right.key, Partner((part,)))
                found += 1
        return found


def _is_one(recording: Recording, several: Iterable[list[Use]], number: int) -> bool:
    """Whether weights that are one on the other side are all multiplied with the same value.

    If not, what that one is multiplied with is not what they are, nor is what it makes.
    """
    given = [uses[number].operand for uses in several if number < len(uses)]
    makers = {origin_of(recording, each).index for each in given if each is not None}
    return len(makers) <= 1


def _recurrent(side: Side) -> set[str]:
    """Return the paths of torch's recurrent layers: they add biases where nobody else does."""
    modules = side.stage.modules
    return {path for path, each in modules.items() if isinstance(each, torch.nn.RNNBase)}


def _widths(side: Side) -> dict[str, int]:
    """Return how many numbers each parameter and buffer of a side holds."""
    if not isinstance(side.root, torch.nn.Module):
        return {}
    named = (*side.root.named_parameters(), *side.root.named_buffers())
    return {name: tensor.numel() for name, tensor in named}
