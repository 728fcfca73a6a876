"""Which launch of the candidate is which launch of the reference.

Owns the pairing: equal places first, then values. Two launches are one when they have the same
name in the same place; where names differ, tensors with the same contents say it. It never raises
on launches that have no partner, and says nothing of who is wrong.

1. Calls of the root are paired, so that an extra call shifts nothing.
2. Launches unique in (place, name) on both sides are anchors, as are repetitions of equal number.
3. Between anchors, banded dynamic programming over what is left finds the pairing in order with the
   largest evidence: hashes and cosines of what went in and came out, types, names, shapes. Names
   that are paired once so are one name from then on, so the next call needs no search.
4. What lies out of order is paired last, where name or value leave one choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brickline.align.keys import Ints, Keys, hashed, pairs_by_key
from brickline.align.sequences import (
    BAND,
    CELL_BUDGET,
    Bools,
    best_in_order,
    keep_ordered,
    out_of_order,
    pair_between,
)
from brickline.comparison.fingerprint_columns import relative_distances
from brickline.comparison.sides import MODULE, PARAMETER_INDEX, Side
from brickline.comparison.similarity import (
    NEAR,
    Similarity,
    first_outputs,
    first_parameters,
    is_near,
)

LIKE = 0.5
"""Relative L2 from which on the contents of two tensors speak against their being one."""


@dataclass(eq=False)
class Alignment:
    """Pairs of launches, by row."""

    partner: Ints
    """Row of the reference for each row of the candidate, -1: none."""
    reordered: Bools
    """Pairs that are out of order."""
    by_value: Bools
    """Pairs that names alone do not give."""

    @property
    def rows(self) -> Ints:
        """The candidate's rows that have a partner."""
        return np.flatnonzero(self.partner >= 0)

    def back(self, count: int) -> Ints:
        """Return the candidate's row for each of the reference's `count` rows, -1: none."""
        out = np.full(count, -1, np.int64)
        out[self.partner[self.rows]] = self.rows
        return out


def align(a: Side, b: Side) -> Alignment:
    """Pair the launches of the candidate with those of the reference."""
    partner = np.full(len(a), -1, np.int64)
    if not len(a) or not len(b):
        none = np.zeros(len(a), bool)
        return Alignment(partner, none, none.copy())
    position = paired_positions(a, b)
    names = np.arange(len(a.words.texts))
    _pair_by_place(a, b, position, names, partner)
    keep_ordered(partner)
    anchored = partner >= 0
    _search_first_call(a, b, position, partner, names)
    for _ in range(2):
        found = pair_between(Similarity(a, b, position).scores, partner, len(b))
        renamed = len(found) and _learn_names(a, b, partner, found, names)
        if not renamed or not _pair_by_place(a, b, position, names, partner):
            break
        keep_ordered(partner)
    reordered = _rescue(a, b, position, names, partner)
    _drop_unconfirmed(a, b, partner)
    _drop_other_work(a, b, partner)
    reordered &= partner >= 0
    return Alignment(partner, reordered, (partner >= 0) & ~anchored & ~reordered)


# --- calls of the root


def paired_positions(a: Side, b: Side) -> Ints:
    """Return the reference's position for each of the candidate's launches, -1: none."""
    ours, theirs = np.unique(a.position), np.unique(b.position)
    table = _position_table(a, b, ours, theirs)
    return table[np.searchsorted(ours, a.position)]


def _position_table(a: Side, b: Side, ours: Ints, theirs: Ints) -> Ints:
    same = np.where(np.isin(ours, theirs), ours, -1)
    if len(ours) == len(theirs) or not ((a.level == MODULE).any() and (b.level == MODULE).any()):
        return same
    shapes_a, inputs_a = _root_inputs(a, ours, 1 << 60)
    shapes_b, inputs_b = _root_inputs(b, theirs, 1 << 61)
    # The same contents count much, the same shape a little, being at the same place least.
    score = np.where(inputs_a[:, None] == inputs_b[None, :], 4.0, 0.0)
    score += np.where(shapes_a[:, None] == shapes_b[None, :], 1.0, -9.0)
    score += 0.5 * (ours[:, None] == theirs[None, :])
    if score.size > CELL_BUDGET:
        return same
    out = np.full(len(ours), -1, np.int64)
    for row, column in best_in_order(score):
        out[row] = theirs[column]
    return out


def _root_inputs(
    side: Side, positions: Ints, salt: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return hashes of shapes and of contents of what the root was called with."""
    roots = np.flatnonzero((side.parent < 0) & (side.direction == 0))
    root_at = roots[np.searchsorted(side.position[roots], positions).clip(0, len(roots) - 1)]
    shapes = np.zeros(len(positions), np.uint64)
    contents = np.zeros(len(positions), np.uint64)
    for at, row in enumerate(root_at):
        own = slice(side.first[row], side.first[row + 1])
        inputs = (side.role[own] != 1) & (side.index[own] < PARAMETER_INDEX)
        prints = side.print[own][inputs]
        prints = prints[prints >= 0]
        shapes[at] = np.bitwise_xor.reduce(side.form[own][inputs], initial=np.uint64(0))
        found = hashed(*side.prints.hash[prints].T) if len(prints) else np.empty(0, np.uint64)
        # Without contents, no two are the same.
        contents[at] = np.bitwise_xor.reduce(found) if len(found) else np.uint64(salt + at)
    return shapes, contents


# --- by place


def _pair_by_place(a: Side, b: Side, position: Ints, names: Ints, partner: Ints) -> int:
    """Pair launches with equal names in equal places; return how many were added.

    A name that occurs in a place as often on both sides is paired one by one. One that occurs more
    often on one side is left to the search, because a count alone would shift everything after it.
    """
    key_a = _places(a, position, names)
    key_b = _places(b, b.position, np.arange(len(names)))
    free_a = np.flatnonzero((partner < 0) & (position >= 0))
    before = partner >= 0
    _join(key_a, free_a, key_b, _free(b, partner), partner)
    _take_back_shifted(a, b, key_a, partner, ~before)
    return int(((partner >= 0) & ~before).sum())


def _take_back_shifted(
    a: Side, b: Side, key_a: NDArray[np.uint64], partner: Ints, added: Bools
) -> None:
    """Take back repetitions whose contents say that one more and one less evened out."""
    rows = np.flatnonzero(added & (partner >= 0))
    _, at, count = np.unique(key_a[rows], return_inverse=True, return_counts=True)
    many = rows[count[at.reshape(-1)] > 1]
    if not len(many):
        return
    output_a, output_b = first_outputs(a), first_outputs(b)
    ours, theirs = output_a[many], output_b[partner[many]]
    seen = (ours >= 0) & (theirs >= 0)
    prints_a, prints_b = a.print[ours[seen]], b.print[theirs[seen]]
    known = (prints_a >= 0) & (prints_b >= 0)
    many = many[seen][known]
    apart = relative_distances(a.prints, prints_a[known], b.prints, prints_b[known]) > LIKE
    resized = a.prints.elements[prints_a[known]] != b.prints.elements[prints_b[known]]
    doubtful = np.unique(key_a[many[apart | resized]])
    partner[rows[np.isin(key_a[rows], doubtful)]] = -1


def _places(side: Side, position: Ints, names: Ints) -> NDArray[np.uint64]:
    parent = np.where(side.parent >= 0, names[side.name[side.parent]], -1)
    return hashed(side.rank, side.direction, position, side.layer, parent, names[side.name])


def _join(key_a: Keys, free_a: Ints, key_b: Keys, free_b: Ints, partner: Ints) -> None:
    """Pair free rows with equal keys."""
    if len(free_a) and len(free_b):
        rows, others = pairs_by_key(key_a[free_a], key_b[free_b])
        partner[free_a[rows]] = free_b[others]


# --- by value


def _search_first_call(a: Side, b: Side, position: Ints, partner: Ints, names: Ints) -> None:
    """Search in the first call that has launches without a partner; other calls learn from it."""
    free = np.flatnonzero((partner < 0) & (position >= 0) & (a.direction == 0))
    if not len(free):
        return
    call = int(a.position[free[0]])
    rows = np.flatnonzero((a.position == call) & (a.direction == 0))
    columns = np.flatnonzero((b.position == int(position[free[0]])) & (b.direction == 0))
    if not len(columns):
        return
    inside = (partner[rows] >= columns[0]) & (partner[rows] <= columns[-1])
    part = np.where(inside, partner[rows] - columns[0], -1)
    if rows[-1] - rows[0] + 1 != len(rows) or columns[-1] - columns[0] + 1 != len(columns):
        return
    similarity = Similarity(a, b, position)
    near, far = rows[0], columns[0]
    added = pair_between(
        lambda one, two: similarity.scores(one + near, two + far), part, len(columns)
    )
    partner[added + near] = part[added] + far
    added += near
    if len(added) and _learn_names(a, b, partner, added, names):
        # What was learnt from all layers replaces what one of them seemed to say.
        partner[added[names[a.name[added]] != b.name[partner[added]]]] = -1
        _pair_by_place(a, b, position, names, partner)
        # Other code nests otherwise, so that a name that was learnt may lie in another place.
        _pair_by_name(a, b, position, names, partner)
        keep_ordered(partner)


def _learn_names(a: Side, b: Side, partner: Ints, found: Ints, names: Ints) -> bool:
    """Note which names of the candidate are other names of the reference; return if any is new.

    What one layer shows holds for the others: where names of two kinds belong together by value and
    are equally many, they are paired in order, so that a fault in one layer pairs nothing wrongly.
    """
    pairs = np.stack([a.name[found], b.name[partner[found]]], axis=1)
    renamed = pairs[pairs[:, 0] != pairs[:, 1]]
    if not len(renamed):
        return False
    unique, count = np.unique(renamed, axis=0, return_counts=True)
    for at in np.argsort(count, kind="stable"):
        names[unique[at, 0]] = unique[at, 1]
    _learn_kinds(a, b, partner, found, names)
    return True


def _learn_kinds(a: Side, b: Side, partner: Ints, found: Ints, names: Ints) -> None:
    shared = np.intersect1d(a.name, b.name)
    output_a, output_b = first_outputs(a), first_outputs(b)
    ours, theirs = output_a[found], output_b[partner[found]]
    rows = found[(ours >= 0) & (theirs >= 0)]
    prints_a, prints_b = a.print[output_a[rows]], b.print[output_b[partner[rows]]]
    seen = (prints_a >= 0) & (prints_b >= 0)
    rows, prints_a, prints_b = rows[seen], prints_a[seen], prints_b[seen]
    near = relative_distances(a.prints, prints_a, b.prints, prints_b) < NEAR
    near &= a.prints.elements[prints_a] == b.prints.elements[prints_b]
    rows = rows[near & ~np.isin(a.name[rows], shared)]
    if not len(rows):
        return
    kinds = np.stack([a.kind[rows], b.kind[partner[rows]]], axis=1)
    unique, count = np.unique(kinds, axis=0, return_counts=True)
    order_a, order_b = _names_of_kinds(a), _names_of_kinds(b)
    taken: set[int] = set()
    for at in np.argsort(-count, kind="stable"):
        one, two = int(unique[at, 0]), int(unique[at, 1])
        if one in taken or len(order_a[one]) != len(order_b[two]):
            continue
        taken.add(one)
        for mine, other in zip(order_a[one], order_b[two], strict=True):
            names[mine] = other


def _names_of_kinds(side: Side) -> dict[int, list[int]]:
    """Return the names of each kind, in the order in which they first occur."""
    numbers, first = np.unique(side.name, return_index=True)
    out: dict[int, list[int]] = {}
    for at in np.argsort(first, kind="stable"):
        out.setdefault(int(side.kind[first[at]]), []).append(int(numbers[at]))
    return out


def _rescue(a: Side, b: Side, position: Ints, names: Ints, partner: Ints) -> Bools:
    """Pair what is out of order: by place, by a name with one choice in its call, by value."""
    before = partner >= 0
    _pair_by_place(a, b, position, names, partner)
    _pair_by_name(a, b, position, names, partner)
    _drop_crossed(a, b, partner, names)
    if _pair_by_contents(a, b, position, names, partner):
        _pair_by_name(a, b, position, names, partner)
    return out_of_order(partner, before)


def _pair_by_name(a: Side, b: Side, position: Ints, names: Ints, partner: Ints) -> None:
    free_a = np.flatnonzero((partner < 0) & (position >= 0))
    keys_a = hashed(a.rank, a.direction, position, names[a.name])
    keys_b = hashed(b.rank, b.direction, b.position, b.name)
    _join(keys_a, free_a, keys_b, _free(b, partner), partner)


def _free(b: Side, partner: Ints) -> Ints:
    free = np.ones(len(b), bool)
    free[partner[partner >= 0]] = False
    return np.flatnonzero(free)


def _pair_by_contents(a: Side, b: Side, position: Ints, names: Ints, partner: Ints) -> bool:
    """Pair launches of one call whose outputs are the same by value, whatever their order."""
    free_a = np.flatnonzero((partner < 0) & (position >= 0) & (a.direction == 0))
    free_b = _free(b, partner)
    if not len(free_a) or not len(free_b):
        return False
    call = int(position[free_a[0]])
    rows = free_a[position[free_a] == call][: 4 * BAND]
    columns = free_b[(b.position[free_b] == call) & (b.direction[free_b] == 0)][: 4 * BAND]
    if not len(rows) or not len(columns):
        return False
    similarity = Similarity(a, b, position)
    score = np.where(similarity.same_role(rows, columns), similarity.scores(rows, columns), -1.0)
    added = []
    while score.size and score.max() > 0:
        one, two = np.unravel_index(int(np.argmax(score)), score.shape)
        partner[rows[one]] = columns[two]
        added.append(int(rows[one]))
        score[one, :] = score[:, two] = -1.0
    return bool(added) and _learn_names(a, b, partner, np.array(added, np.int64), names)


def _drop_crossed(a: Side, b: Side, partner: Ints, names: Ints) -> None:
    """Take back pairs of unlike contents and weights, in modules that are paired with others."""
    rows = np.flatnonzero(partner >= 0)
    rows = rows[(a.name[rows] != b.name[partner[rows]]) & (a.parent[rows] >= 0)]
    above, other = a.parent[rows], b.parent[partner[rows]]
    back = np.full(len(b), -1, np.int64)
    back[partner[partner >= 0]] = np.flatnonzero(partner >= 0)
    crossed = (other >= 0) & (partner[above] >= 0) & (partner[above] != other)
    crossed &= back[other] >= 0
    rows = rows[crossed]
    if len(rows):
        near = is_near(a, b, rows, partner[rows], first_outputs)
        owns = first_parameters(a)[rows] >= 0
        wrong = rows[owns & ~near & ~is_near(a, b, rows, partner[rows], first_parameters)]
        partner[wrong] = -1
        names[a.name[wrong]] = a.name[wrong]


def _drop_other_work(a: Side, b: Side, partner: Ints) -> None:
    """Take back launches of plans that are other kernels over tensors of other numbers or sizes.

    Where one plan fuses what the other does in two steps, a name means more in one of them.
    """
    rows = np.flatnonzero(partner >= 0)
    ours, theirs = a.kernel[rows], b.kernel[partner[rows]]
    rows = rows[(ours >= 0) & (theirs >= 0) & (ours != theirs)]
    if len(rows):
        partner[rows[_operand_sizes(a)[rows] != _operand_sizes(b)[partner[rows]]]] = -1


def _operand_sizes(side: Side) -> NDArray[np.uint64]:
    """Return a hash of the sizes of what goes in and comes out of each launch, place by place."""
    out = np.zeros(len(side), np.uint64)
    np.add.at(out, side.owner, hashed(side.role > 0, side.index, side.elements))
    return out


def _drop_unconfirmed(a: Side, b: Side, partner: Ints) -> None:
    """Take back pairs of other names that no contents, weights or other layers confirm.

    Calls of the root are paired by their number.
    """
    rows = np.flatnonzero(partner >= 0)
    rows = rows[a.name[rows] != b.name[partner[rows]]]
    rows = rows[(a.parent[rows] >= 0) | (b.parent[partner[rows]] >= 0)]
    if not len(rows):
        return
    near = is_near(a, b, rows, partner[rows], first_outputs)
    weighed = is_near(a, b, rows, partner[rows], first_parameters)
    kinds = hashed(a.kind[rows], b.kind[partner[rows]])
    confirmed = np.isin(kinds, kinds[near])
    partner[rows[~(near | weighed | confirmed)]] = -1
