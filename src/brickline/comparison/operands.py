"""How far the tensors of paired launches are apart, and how that adds up per launch.

Owns the pairing of operands and their distances. A difference is relative L2; nan means that it was
not observed. Choices (integers and booleans) have no size: they are equal or they are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from brickline.align.keys import Ints, hashed
from brickline.align.sequences import Bools
from brickline.comparison.fingerprint_columns import relative_distances, same_bits
from brickline.comparison.fused import fused_differences
from brickline.comparison.pairing import Alignment
from brickline.comparison.rounding.envelope import is_discrete, unit_roundoff
from brickline.comparison.sides import MODULE, PARAMETER_INDEX, Side
from brickline.comparison.similarity import NEAR, multiplies

Floats = NDArray[np.float64]

MOVED = 1.0
"""Relative L2 from which on two tensors with the same sums are taken for one in another layout,
where code or shapes differ: 1.41 is what unrelated places give."""
MASKED = 1e30
"""Largest element from which on a tensor holds a mask."""
MOST_REPAIRED = 5000
"""Launches whose inputs are paired anew by value."""
SAME_SUMS = 0.02
"""How far the sums of two such tensors may be apart: bfloat16 and some layers of rounding."""


@dataclass(eq=False)
class Group:
    """What is known of the inputs, outputs or parameters of each launch together."""

    count: Ints
    """Operands that hold something."""
    known: Bools
    """Whether each of them was compared, and there is one."""
    some: Bools
    """Whether one of them was compared."""
    delta: Floats
    """The largest difference that has a size; 0 where nothing was compared."""
    same: Bools
    """Whether every one of them is the same."""
    choice: Bools
    """Whether a choice differs."""
    resized: Bools
    nonfinite: Bools
    """Whether elements are not finite that are so on the other side."""
    width: Ints
    """Length of the last dimension of the first of them."""


@dataclass(eq=False)
class Differences:
    """One entry per operand of the candidate; the groups have one per launch."""

    side: Side
    other: Ints
    """The reference's operand, -1: none."""
    delta: Floats
    """Relative L2; nan where not observed, inf where other elements are not finite."""
    same: Bools
    """The same bits, or the same values in another dtype."""
    resized: Bools
    """Paired with a tensor of another number of elements."""
    discrete: Bools
    incomparable: Bools
    """A choice on one side and a number on the other, such as two sorts of masks."""
    fused: Bools
    """Measured by stripes, which may hide an error inside one."""
    roundoff: Floats
    """u of the coarsest dtype of a launch, on either side."""

    @cached_property
    def owner(self) -> Ints:
        """The launch of every operand."""
        return self.side.owner

    @cached_property
    def _is_weight(self) -> Bools:
        weights: Bools = self.side.index >= PARAMETER_INDEX
        return weights

    @cached_property
    def inputs(self) -> Group:
        """What goes in, parameters left out."""
        return self._group((self.side.role == 0) & ~self._is_weight)

    @cached_property
    def unfed(self) -> Bools:
        """Which launches were given something, and nothing that has a counterpart."""
        given = (self.side.role == 0) & ~self._is_weight & self.incomparable
        lost = np.bincount(self.owner[given], minlength=len(self.side)) > 0
        unfed: Bools = lost & (self.inputs.count == 0)
        return unfed

    @cached_property
    def parameters(self) -> Group:
        """The parameters of the module itself."""
        return self._group((self.side.role == 0) & self._is_weight)

    @cached_property
    def outputs(self) -> Group:
        """What comes out, gradients of parameters left out."""
        return self._group((self.side.role > 0) & ~self._is_weight)

    @cached_property
    def gradients(self) -> Group:
        """Gradients of parameters; backward launches alone have them."""
        return self._group((self.side.role > 0) & self._is_weight)

    @cached_property
    def made(self) -> Group:
        """All that comes out."""
        return self._group(self.side.role > 0)

    def _group(self, chosen: Bools) -> Group:
        a, owner, count = self.side, self.owner, len(self.side)
        holds = chosen & (a.elements != 0) & ~self.incomparable

        def per_launch(flags: Bools) -> Ints:
            return np.bincount(owner[flags], minlength=count)

        sized = holds & ~self.discrete & ~np.isnan(self.delta)
        finite = sized & np.isfinite(self.delta)
        delta = np.zeros(count)
        np.maximum.at(delta, owner[finite], self.delta[finite])
        total = per_launch(holds)
        compared = per_launch(holds & ~np.isnan(self.delta))
        width = np.ones(count, np.int64)
        at = np.flatnonzero(holds)[::-1]
        width[owner[at]] = a.width[at]
        return Group(
            count=total,
            known=(compared == total) & (total > 0),
            some=compared > 0,
            delta=delta,
            same=(per_launch(holds & self.same) == total) & (total > 0),
            choice=per_launch(holds & self.discrete & ~self.same & ~np.isnan(self.delta)) > 0,
            resized=per_launch(chosen & self.resized & ~self.incomparable) > 0,
            nonfinite=per_launch(sized & np.isinf(self.delta)) > 0,
            width=width,
        )


def measure(a: Side, b: Side, alignment: Alignment) -> Differences:
    """Pair operands of paired launches and measure every pair."""
    owner = a.owner
    other = _paired(a, b, alignment, owner)
    extra = _pair_by_value(a, b, alignment, other)
    paired = np.flatnonzero(other >= 0)
    resized = np.zeros(len(other), bool)
    resized[paired] = a.elements[paired] != b.elements[other[paired]]
    delta, same = np.full(len(other), np.nan), np.zeros(len(other), bool)
    seen = paired[(a.print[paired] >= 0) & (b.print[other[paired]] >= 0) & ~resized[paired]]
    _measure_pairs(a, b, seen, other[seen], owner[seen], delta, same, extra)
    _look_up(a, b, alignment, owner, delta, same)
    fused = np.zeros(len(other), bool)
    for operand, difference in fused_differences(a, b, alignment).items():
        delta[operand], fused[operand] = difference, True
    # Nothing can differ in a tensor without elements.
    empty = paired[(a.elements[paired] == 0) & ~resized[paired]]
    delta[empty], same[empty] = 0.0, True
    roundoffs = np.array([unit_roundoff(text) for text in a.words.texts], float)
    discrete = np.array([is_discrete(text) for text in a.words.texts], bool)
    incomparable = extra
    delta[extra] = np.nan
    incomparable |= _masks(a, b, owner, other, delta)
    incomparable[paired] |= discrete[a.dtype[paired]] != discrete[b.dtype[other[paired]]]
    delta[incomparable], same[incomparable] = np.nan, False
    delta[_drowned(a, b, other, delta, roundoffs)] = np.nan
    coarse = np.zeros(len(a))
    np.maximum.at(coarse, owner, roundoffs[a.dtype])
    np.maximum.at(coarse, owner[paired], roundoffs[b.dtype[other[paired]]])
    return Differences(
        a, other, delta, same, resized, discrete[a.dtype], incomparable, fused, coarse
    )


def _masks(a: Side, b: Side, owner: Ints, other: Ints, delta: Floats) -> Bools:
    """Return which operands are masks: infinities that end where they are used.

    Other code masks with another number, or with booleans. Where all who are given a tensor with
    infinities and no NaN put out finite numbers, the infinities were meant.
    """
    out = np.zeros(len(other), bool)
    odd = np.flatnonzero(np.isinf(delta) & (other >= 0))
    odd = odd[(a.print[odd] >= 0) & (b.print[other[odd]] >= 0)]
    if not len(odd):
        return out
    ours, theirs = a.print[odd], b.print[other[odd]]
    odd = odd[(a.prints.nan[ours] == 0) & (b.prints.nan[theirs] == 0)]
    seen = a.print >= 0
    broken = np.zeros(len(a), bool)
    made = np.flatnonzero(seen & (a.role > 0))
    broken[owner[made[a.prints.nonfinite[a.print[made]] > 0]]] = True
    given = seen & (a.role == 0)
    hashes = np.where(seen, a.prints.hash[a.print, 0], 0)
    wanted, at = np.unique(hashes[odd], return_inverse=True)
    used = np.isin(wanted, hashes[given])
    ends = ~np.isin(wanted, hashes[given & broken[owner]])
    out[odd] = (used & ends)[at.reshape(-1)]
    return out


def _drowned(a: Side, b: Side, other: Ints, delta: Floats, roundoffs: Floats) -> Bools:
    """Return which differences lie in small elements beside those of a finite mask.

    One unit in the last place of the mask would be larger; beside it nothing else has a size.
    """
    out = np.zeros(len(other), bool)
    odd = np.flatnonzero((delta > 0) & np.isfinite(delta) & (other >= 0))
    odd = odd[(a.print[odd] >= 0) & (b.print[other[odd]] >= 0)]
    masked = b.prints.absmax[b.print[other[odd]]] >= MASKED
    least = 0.1 * roundoffs[a.dtype[odd]] / np.sqrt(np.maximum(a.elements[odd], 1))
    out[odd[masked & (delta[odd] < least)]] = True
    return out


def _measure_pairs(
    a: Side,
    b: Side,
    seen: Ints,
    others: Ints,
    rows: Ints,
    delta: Floats,
    same: Bools,
    extra: Bools,
) -> None:
    """Measure each pair of fingerprints once, however many launches share it."""
    count = max(len(b.prints), 1)
    pairs, at = np.unique(a.print[seen] * count + b.print[others], return_inverse=True)
    one, two = np.divmod(pairs, count)
    measured = relative_distances(a.prints, one, b.prints, two)
    equal = same_bits(a.prints, one, b.prints, two) | (measured == 0)
    laid_otherwise = moved(a, b, one, two) & (measured > MOVED)
    delta[seen], same[seen] = measured[at.reshape(-1)], equal[at.reshape(-1)]
    _forget_moved(a, b, seen, others, rows, laid_otherwise[at.reshape(-1)], delta, extra)


def _look_up(
    a: Side,
    b: Side,
    alignment: Alignment,
    owner: Ints,
    delta: Floats,
    same: Bools,
) -> None:
    """Give tensors of launches without a partner the difference that was measured elsewhere.

    The same tensor is often an operand of a launch that has one: what a wrapper returns, or what
    goes from a module of the candidate alone into one that both sides have.
    """
    own = (alignment.partner < 0) & ~np.isin(a.name, b.name) & (a.level == MODULE)
    lonely = own[owner]
    known = np.flatnonzero(~np.isnan(delta) & (a.print >= 0) & (alignment.partner[owner] >= 0))
    asked = np.flatnonzero(lonely & (a.print >= 0))
    if not len(known) or not len(asked):
        return
    # Where it was held against several, the nearest of them is its counterpart.
    known = known[np.argsort(delta[known], kind="stable")]
    hashes, first = np.unique(a.prints.hash[a.print[known], 0], return_index=True)
    wanted = a.prints.hash[a.print[asked], 0]
    place = np.searchsorted(hashes, wanted).clip(0, len(hashes) - 1)
    found = hashes[place] == wanted
    source = known[first[place[found]]]
    delta[asked[found]], same[asked[found]] = delta[source], same[source]


def _forget_moved(
    a: Side,
    b: Side,
    seen: Ints,
    others: Ints,
    rows: Ints,
    moved: Bools,
    delta: Floats,
    extra: Bools,
) -> None:
    """Call a difference unknown where other code keeps its tensors in another layout.

    It does so in every layer; where the same operand has the reference's layout in another layer,
    what was moved in one of them is a fault.
    """
    rows_b = np.searchsorted(b.first, others, side="right") - 1
    foreign = a.name[rows] != b.name[rows_b]
    foreign |= a.form[seen] != b.form[others]
    kinds = hashed(a.kind[rows], b.kind[rows_b], a.role[seen], a.index[seen])
    settled = np.isin(kinds, kinds[delta[seen] < NEAR])
    # An argument that is another thing in every layer is no counterpart.
    renamed = a.name[rows] != b.name[rows_b]
    unlike = renamed & (a.role[seen] == 0) & (delta[seen] > 0.5) & ~settled
    # What goes into a product by the same weights has the same role, however unlike it is, unless
    # other code keeps it in another layout.
    places = hashed(b.kind[rows_b], a.role[seen], a.index[seen])
    laid = np.isin(places, places[moved])
    unlike &= ~_same_weights(a, seen, rows, delta)[rows] | laid
    extra[seen[unlike & (a.index[seen] < PARAMETER_INDEX) & (a.layer[rows] >= 0)]] = True
    delta[seen[foreign & moved & ~settled]] = np.nan


def _same_weights(a: Side, seen: Ints, rows: Ints, delta: Floats) -> Bools:
    """Return which launches multiply by the reference's weights and do nothing else."""
    weights = a.index[seen] >= PARAMETER_INDEX
    count = np.bincount(rows[weights], minlength=len(a))
    near = np.bincount(rows[weights & (delta[seen] < SAME_SUMS)], minlength=len(a))
    held: Bools = (count > 0) & (near == count)
    return held & multiplies(a, np.arange(len(a)))


def moved(a: Side, b: Side, one: Ints, two: Ints) -> Bools:
    """Return which pairs hold about the same elements, at other places: another layout."""
    like = np.ones(len(one), bool)
    for name in ("l1", "l2", "absmax"):
        ours, theirs = getattr(a.prints, name)[one], getattr(b.prints, name)[two]
        like &= np.abs(ours - theirs) <= SAME_SUMS * np.abs(theirs)
    total = np.abs(a.prints.total[one] - b.prints.total[two])
    return like & (total <= SAME_SUMS * b.prints.l1[two])


def _paired(a: Side, b: Side, alignment: Alignment, owner: Ints) -> Ints:
    """Return the reference's operand with the same role and index of the paired launch."""
    other = np.full(len(owner), -1, np.int64)
    if not len(owner) or not len(b.role):
        return other
    back = alignment.back(len(b))
    owner_b = back[b.owner]
    key_a = hashed(owner, a.role > 0, a.index)
    key_b = hashed(owner_b, b.role > 0, b.index)
    mine = np.flatnonzero(alignment.partner[owner] >= 0)
    theirs = np.flatnonzero(owner_b >= 0)
    _, at_a, at_b = np.intersect1d(key_a[mine], key_b[theirs], return_indices=True)
    other[mine[at_a]] = theirs[at_b]
    _pair_by_size(a, b, other, mine, theirs, owner, owner_b)
    return other


def _pair_by_value(a: Side, b: Side, alignment: Alignment, other: Ints) -> Bools:
    """Pair inputs anew where one side was given more of them; return those left without a pair.

    An argument that one side alone passes, such as a mask, moves the numbers of all after it.
    """
    extra = np.zeros(len(other), bool)
    count_a, count_b = _input_counts(a), _input_counts(b)
    rows = alignment.rows
    rows = rows[count_a[rows] != count_b[alignment.partner[rows]]]
    for row in rows[:MOST_REPAIRED].tolist():
        mine, theirs = _inputs(a, row), _inputs(b, int(alignment.partner[row]))
        if not len(mine) or not len(theirs):
            extra[mine] = True
            continue
        other[mine] = -1
        pairs = [
            (float(_distance(a, one, b, two)), one, two)
            for one in mine.tolist()
            for two in theirs.tolist()
            if a.elements[one] == b.elements[two] and a.print[one] >= 0 and b.print[two] >= 0
        ]
        taken: set[int] = set()
        for distance, one, two in sorted(pairs):
            if distance < 0.5 and other[one] < 0 and two not in taken:
                other[one] = two
                taken.add(two)
        # What comes first is what the launch works on, however far it is from the reference's.
        one, two = int(mine[0]), int(theirs[0])
        if other[one] < 0 and two not in taken and a.elements[one] == b.elements[two]:
            other[one] = two
        extra[mine[other[mine] < 0]] = True
    return extra


def _input_counts(side: Side) -> Ints:
    chosen = (side.role == 0) & (side.index < PARAMETER_INDEX)
    return np.bincount(side.owner[chosen], minlength=len(side))


def _inputs(side: Side, row: int) -> Ints:
    own = np.arange(side.first[row], side.first[row + 1])
    inputs: Ints = own[(side.role[own] == 0) & (side.index[own] < PARAMETER_INDEX)]
    return inputs


def _distance(a: Side, one: int, b: Side, two: int) -> float:
    return float(relative_distances(a.prints, a.print[[one]], b.prints, b.print[[two]])[0])


def _pair_by_size(
    a: Side, b: Side, other: Ints, mine: Ints, theirs: Ints, owner: Ints, owner_b: Ints
) -> None:
    """Pair anew where the order of arguments differs: tensors of one size with one choice."""
    paired = other >= 0
    wrong = np.zeros(len(other), bool)
    wrong[paired] = a.elements[paired] != b.elements[other[paired]]
    other[wrong] = -1
    free = np.ones(len(b.role), bool)
    free[other[other >= 0]] = False
    loose_a, loose_b = mine[other[mine] < 0], theirs[free[theirs]]
    if not len(loose_a) or not len(loose_b):
        return
    fine_a = hashed(
        owner[loose_a],
        a.role[loose_a] > 0,
        a.elements[loose_a],
        a.index[loose_a] >= PARAMETER_INDEX,
    )
    fine_b = hashed(
        owner_b[loose_b],
        b.role[loose_b] > 0,
        b.elements[loose_b],
        b.index[loose_b] >= PARAMETER_INDEX,
    )
    keys_a, first_a, count_a = np.unique(fine_a, return_index=True, return_counts=True)
    keys_b, first_b, count_b = np.unique(fine_b, return_index=True, return_counts=True)
    _, at_a, at_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    once = (count_a[at_a] == 1) & (count_b[at_b] == 1)
    other[loose_a[first_a[at_a[once]]]] = loose_b[first_b[at_b[once]]]
    # What is left keeps its place, so that a change of size is seen as one.
    still = np.flatnonzero(wrong & (other < 0))
    if len(still):
        back = np.full(len(b.role), -1, np.int64)
        key_a, key_b = (
            hashed(owner[still], a.role[still] > 0, a.index[still]),
            hashed(owner_b[theirs], b.role[theirs] > 0, b.index[theirs]),
        )
        back[other[other >= 0]] = 1
        _, at_a, at_b = np.intersect1d(key_a, key_b, return_indices=True)
        unused = back[theirs[at_b]] < 0
        other[still[at_a[unused]]] = theirs[at_b[unused]]
