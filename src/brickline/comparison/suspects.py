"""Which units stand out: the rules that make a suspect, and how suspects are ranked.

Owns the thresholds. Conservative by design: a suspect on a clean pair costs more than a missed
fault, so every rule asks that all that went in was seen and that neither rounding, nor what the
inputs brought, nor an earlier choice explains what came out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from brickline.align.keys import Ints, hashed
from brickline.align.sequences import Bools
from brickline.comparison.alternatives import Alternatives
from brickline.comparison.operands import Differences, Floats
from brickline.comparison.pairing import Alignment
from brickline.comparison.rounding.envelope import unit_roundoff
from brickline.comparison.sides import FLAT, PARAMETER_INDEX, Side
from brickline.comparison.similarity import first_parameters, multiplies
from brickline.comparison.triage import GRAD, IN, LEAF, OUT, Units

SMALL = 2.0
"""Ratio up to which different code is not looked at closely."""
CALM = 1.5
"""Ratio up to which a unit confirms that different code has the same role."""
FUSED_CALM, FUSED_LIMIT = 4.0, 10.0
"""The same where stripes measure it, which takes an error that has structure for a larger one."""
SAME_KERNELS = 3.0
"""Where nearly all that had the same inputs made the same bits, both sides run one code, and
a difference counts from this part of the limit on: rounding explains it in fewer places."""
FEWEST_SAME = 8
SOLID = 30.0
"""From this ratio on nothing but a fault explains a unit; these come first, largest first."""
BIASED = 2.0
"""From this ratio on a factor or a shift is more than came along. Clean units reached 0.7…"""
BIASED_CLEAN = 1.0
"""…and 0.4 where all that went in was the same."""
PEAKED = 4.0
"""The same of single elements that are off, where all that went in was the same; clean units
reached 0.6. Of inputs that differ in one row alone, any unit makes a peak."""
TIES = 60.0
"""How much larger than the difference of what goes in the part of choices may be that it flips."""
LINEAR = 1e-5
"""Residual of the reference below which a tensor is the sum of others."""
MOST_CONFIRMED = 5000
"""Units of different code that are looked at closely."""
MOST = 32
"""Suspects that are kept."""
BLIND = "what it calls could not be compared, so that it or one of these is wrong"


class Sign(StrEnum):
    """What makes a unit stand out."""

    DISTANCE = "distance"
    BIAS = "bias"
    PEAK = "peak"


@dataclass(frozen=True)
class Spared:
    """One unit that stands out and is not blamed, and why."""

    unit: int
    reason: str


@dataclass(eq=False)
class Suspect:
    """One unit that stands out."""

    unit: int
    row: int
    """The candidate's launch that is blamed."""
    ratio: float
    excess: float
    """Relative L2 that it adds."""
    target: float
    source: float
    broken: bool = False
    sign: Sign = Sign.DISTANCE
    facts: dict[str, Any] = field(default_factory=dict)


def find_suspects(
    a: Side, b: Side, alignment: Alignment, found: Differences, units: Units
) -> tuple[list[Suspect], Spared | None]:
    """Return the suspects, the one that most likely matters most first, and who was spared."""
    ratio = units.ratio
    open_to_blame = units.known & (units.blamed >= 0) & (~units.choice | units.foreign)
    open_to_blame &= ~(units.blind & (units.foreign | bool(units.foreign.any())))
    # What goes with a choice goes otherwise with another, and rounding decides a tie.
    open_to_blame &= ~_flips(found, units)
    limit = np.where(units.clean & _repeats_bits(units), units.limit / SAME_KERNELS, units.limit)
    far = ratio > limit * np.maximum(_usual_ratios(a, units, ratio), 1.0)
    trusted = ~units.foreign | _confirmed(a, b, alignment, found, units, ratio)
    marked = open_to_blame & far & trusted
    marked |= units.broken & (units.blamed >= 0) & trusted
    sure = units.known & ~units.choice & ~units.blind & (units.blamed >= 0) & ~units.foreign
    sure &= ~alignment.by_value[units.row] & ~alignment.reordered[units.row]
    marked |= units.resized & sure & (units.clean | units.decided)
    quiet = np.maximum(units.source, units.past) <= 4 * units.rounding
    marked |= units.chosen & sure & quiet
    distant = marked.copy()
    biased = units.bias_ratio > np.where(units.clean, BIASED_CLEAN, BIASED)
    peaked = units.clean & (units.past == 0) & (units.peak_ratio > PEAKED)
    marked |= open_to_blame & (biased | peaked) & ~units.foreign
    if a.has_failures or b.has_failures:  # what nobody saw may be brickline's own doing
        marked &= units.known & ~units.blind
    alternatives = Alternatives(a, b, alignment, found, units)
    out: list[Suspect] = []
    spared: list[Spared] = []
    for unit in np.flatnonzero(marked).tolist():
        reason = alternatives.of(unit)
        if reason:
            spared.append(Spared(unit, reason))
            continue
        suspect = Suspect(
            unit=unit,
            row=int(units.blamed[unit]),
            ratio=float(ratio[unit]),
            excess=float(np.sqrt(max(units.target[unit] ** 2 - units.source[unit] ** 2, 0.0))),
            target=float(units.target[unit]),
            source=float(units.source[unit]),
            broken=bool(units.broken[unit]),
        )
        if not distant[unit]:
            _has_direction(units, suspect, biased=bool(biased[unit]))
        if _stands(a, b, alignment, found, units, suspect):
            if units.mode[unit] == IN:
                suspect.row = _maker(a, alignment, units, suspect)
            if units.foreign[unit]:
                suspect.row = alternatives.blamed(suspect.row)
            out.append(suspect)
        if len(out) >= 64 * MOST:
            break
    blind = np.flatnonzero(trusted & units.blind & units.known & ~units.choice & far)
    spared += [Spared(int(unit), BLIND) for unit in blind if units.blamed[unit] >= 0]
    return _ranked(a, out), min(spared, key=lambda each: each.unit, default=None)


def _has_direction(units: Units, suspect: Suspect, *, biased: bool) -> None:
    """Note that it is the direction of a difference that stands out, and by how much."""
    unit = suspect.unit
    suspect.sign = Sign.BIAS if biased else Sign.PEAK
    suspect.ratio = float((units.bias_ratio if biased else units.peak_ratio)[unit])
    if biased:
        suspect.facts["bias"] = float(units.bias[unit])
        suspect.facts["bias_explained_by_rounding"] = float(units.explained_bias[unit])


def _flips(found: Differences, units: Units) -> Bools:
    """Return which leaves put out another choice, of inputs that are not the same."""
    flips: Bools = (units.mode == LEAF) & found.outputs.choice[units.row] & ~units.clean
    return flips


def _repeats_bits(units: Units) -> bool:
    """Return whether both sides make the same bits of the same inputs nearly everywhere."""
    told = units.clean & units.known & ~units.blind
    count = int(told.sum())
    return count >= FEWEST_SAME and int((told & (units.target > 0)).sum()) <= 0.1 * count


def _confirmed(
    a: Side, b: Side, alignment: Alignment, found: Differences, units: Units, ratio: Floats
) -> Bools:
    """Return where different code is known to have the same role.

    The same unit in other layers has the same counterpart there and no difference; or, of a leaf,
    all that goes in, its parameters included, is the counterpart's.
    """
    other = alignment.partner[units.row]
    kinds = hashed(
        units.mode,
        a.kind[units.row],
        np.where(other >= 0, b.kind[other], -1),
        a.direction[units.row],
        a.position[units.row],
    )
    told = units.known & units.foreign
    fused = (np.bincount(found.owner[found.fused], minlength=len(a)) > 0)[units.row]
    calm = told & (ratio <= np.where(fused, FUSED_CALM, CALM))
    names = a.name[units.row]
    weighed = found.parameters.known & (found.parameters.delta <= 2 * found.roundoff)
    fed = found.inputs.known & (found.inputs.delta <= 0.1) & ~found.inputs.choice
    alone = (units.mode == LEAF) & (weighed | _leads_to(a, found, weighed))[units.row]
    # One that has a counterpart elsewhere and none here is called in the wrong place.
    sorts = hashed(a.kind, a.type)
    elsewhere = np.isin(sorts[units.row], sorts[alignment.rows])
    alone &= fed[units.row] & ((other >= 0) | ~elsewhere)
    # What goes into the same weights has the same role.
    marked = multiplies(a, units.row) | _tells_apart(a, units.row)
    alone |= (units.mode == IN) & weighed[units.row] & marked
    # The whole is the whole.
    whole = (a.parent[units.row] < 0) & (other >= 0) & (units.mode != IN)
    alone |= whole & (b.parent[other] < 0)
    out = np.zeros(len(units), bool)
    for unit in np.flatnonzero(told & (ratio > SMALL))[:MOST_CONFIRMED].tolist():
        others = (kinds == kinds[unit]) & (names != names[unit])
        like, upset = int((others & calm).sum()), int((others & told & ~calm).sum())
        out[unit] = like > upset or (like == upset == 0 and bool(alone[unit]))
        out[unit] &= not fused[unit] or (upset == 0 and bool(ratio[unit] > FUSED_LIMIT))
    return out


def _tells_apart(a: Side, rows: Ints) -> Bools:
    """Return which launches own a parameter whose elements differ, so that it marks them."""
    own = first_parameters(a)[rows]
    seen = (own >= 0) & (a.print[own] >= 0)
    out = np.zeros(len(rows), bool)
    prints = a.print[own[seen]]
    even = a.prints.l1[prints] ** 2 >= 0.999 * a.prints.elements[prints] * a.prints.l2[prints] ** 2
    out[seen] = ~even
    return out


def _leads_to(a: Side, found: Differences, weighed: Bools) -> Bools:
    """Return which launches put out what goes into a counterpart with the same weights."""
    given = (a.role == 0) & (a.index < PARAMETER_INDEX) & (a.print >= 0)
    given &= (weighed & multiplies(a, np.arange(len(a))))[found.owner]
    made = np.flatnonzero((a.role > 0) & (a.print >= 0))
    hashes = a.prints.hash[:, 0]
    leads = made[np.isin(hashes[a.print[made]], hashes[a.print[given]])]
    out = np.zeros(len(a), bool)
    out[found.owner[leads]] = True
    return out


def _stands(
    a: Side, b: Side, alignment: Alignment, found: Differences, units: Units, suspect: Suspect
) -> bool:
    """Return whether a closer look leaves a marked unit standing."""
    unit = suspect.unit
    if a.direction[suspect.row] == 1 and _lacks_rows(a, b, alignment, suspect.row):
        return False
    if a.direction[suspect.row] == 1 and units.mode[unit] == OUT and _has_users(a, suspect.row):
        return False
    if a.direction[suspect.row] == 1 and units.mode[unit] == IN and _is_handed_on(a, units, unit):
        return False
    if suspect.broken or units.resized[unit]:
        return True
    ratio, limit = suspect.ratio, float(units.limit[unit])
    if units.chosen[unit] and (ratio <= limit or _flips(found, units)[unit]):
        return bool(units.clean[unit]) or _most_differ(a, b, found, units, unit)
    if a.direction[suspect.row] == 1 and units.mode[unit] == LEAF:
        return _stands_backward(a, b, alignment, suspect)
    alone = units.mode[unit] in (LEAF, GRAD) or bool(units.clean[unit])
    return alone or not _is_sum(a, b, alignment, units, suspect)


def _stands_backward(a: Side, b: Side, alignment: Alignment, suspect: Suspect) -> bool:
    """Return whether the gradient of an input tells who is wrong; blame the parent where it does.

    It is the sum over all who use the input. Where another module uses it too, nobody can be named.
    Where what is missing or too much is what came into the parent, the parent's own sum is wrong.
    """
    row = suspect.row
    outputs = [each for each in _operands(a, row, outputs=True) if a.index[each] < PARAMETER_INDEX]
    prints = a.print[outputs]
    users = np.flatnonzero((a.role > 0) & np.isin(a.print, prints) & (a.index < PARAMETER_INDEX))
    rows = np.unique(np.searchsorted(a.first, users, side="right") - 1)
    rows = rows[a.direction[rows] == 1]
    parent = int(a.parent[row])
    above = {parent, int(a.parent[parent]) if parent >= 0 else -1}
    if any(int(each) not in {row, *above} for each in rows):
        return False
    if parent >= 0 and _sums_wrongly(a, b, alignment, outputs, parent):
        suspect.row = parent
    return True


def _has_users(a: Side, row: int) -> bool:
    """Return whether a launch inside makes the same gradient, which then tells of that one."""
    hashes = _hashes(a, row, outputs=True)
    inside = np.flatnonzero((a.parent == row) & (a.direction == 1))
    return any(hashes & _hashes(a, int(each), outputs=True) for each in inside)


def _is_handed_on(a: Side, units: Units, unit: int) -> bool:
    """Return whether another launch's gradient goes in as it is; that one tells then."""
    row = int(units.row[unit])
    prints = a.print[_operands(a, row, outputs=False)]
    made = (a.role > 0) & (a.index < PARAMETER_INDEX) & np.isin(a.print, prints)
    return bool((a.direction[a.owner[made]] == 1).any()) if made.any() else False


def _lacks_rows(a: Side, b: Side, alignment: Alignment, row: int) -> bool:
    """Return whether the reference has backward launches in this call that the candidate lacks."""
    missing = (alignment.back(len(b)) < 0) & (b.direction == 1)
    return bool((missing & (b.position == a.position[row])).any())


def _sums_wrongly(a: Side, b: Side, alignment: Alignment, outputs: list[int], parent: int) -> bool:
    """Return whether a multiple of the parent's own gradient is what differs."""
    for operand, other in zip(outputs, _partners(a, b, alignment, outputs), strict=True):
        if other is None:
            continue
        gap = a.prints.sketches(a.print[[operand]])[0] - b.prints.sketches(b.print[[other]])[0]
        entered = [
            each
            for each in _sources(a, parent, int(a.first.searchsorted(operand, "right")) - 1, IN)
            if a.elements[each] == a.elements[operand] and a.print[each] != a.print[operand]
        ]
        if not entered or not gap.any():
            continue
        sketches = a.prints.sketches(a.print[entered])
        weights, *_ = np.linalg.lstsq(sketches.T, gap, rcond=1e-9)
        left = np.linalg.norm(gap - weights @ sketches) / np.linalg.norm(gap)
        if left < 0.1:
            return True
    return False


def _most_differ(a: Side, b: Side, found: Differences, units: Units, unit: int) -> bool:
    """Return whether more elements of a choice differ than rounding flips.

    Those are ties, and of these there are as many as what went in differs.
    """
    row, mode = int(units.row[unit]), int(units.mode[unit])
    for operand in _operands(a, row, outputs=mode != IN):
        other = int(found.other[operand])
        if (
            other < 0
            or not found.discrete[operand]
            or found.same[operand]
            or found.resized[operand]
        ):
            continue
        gap = a.prints.sketches(a.print[[operand]]) - b.prints.sketches(b.print[[other]])
        expected = 64 * (1 - (63 / 64) ** float(a.elements[operand]))
        ties = min(0.6, TIES * float(units.source[unit]))
        if a.elements[operand] > 1 and np.count_nonzero(gap) > ties * expected:
            return True
    return False


def _maker(a: Side, alignment: Alignment, units: Units, suspect: Suspect) -> int:
    """Return who made the tensor that goes into a child: its parent, unless that was handed it.

    A wrapper that only the candidate has, and that hands on what it made, is then the maker.
    """
    hashes = _hashes(a, int(units.row[suspect.unit]), outputs=False)
    row = suspect.row
    while row >= 0 and alignment.partner[row] < 0:
        if not hashes & _hashes(a, row, outputs=False):
            return row
        above = int(a.parent[row])
        before = np.flatnonzero((a.parent == above) & (np.arange(len(a)) < row))
        for other in reversed(before.tolist()):
            if hashes & _hashes(a, int(other), outputs=True):
                # One whose counterpart puts out the same is right; it was handed to the wrong one.
                return int(other) if alignment.partner[other] < 0 else above
        row = above
    return row if row >= 0 else suspect.row


def _hashes(a: Side, row: int, *, outputs: bool) -> set[int]:
    return {int(a.prints.hash[a.print[each], 0]) for each in _operands(a, row, outputs=outputs)}


def _is_sum(a: Side, b: Side, alignment: Alignment, units: Units, suspect: Suspect) -> bool:
    """Return whether the unit's tensors are sums on both sides, hence rightly computed.

    A sketch is linear: where a tensor of the reference is a sum of tensors that were there before,
    such as a residual, the same sum must give the candidate's tensor, whatever error came along.
    """
    unit = suspect.unit
    row, mode = int(units.row[unit]), int(units.mode[unit])
    chosen = _operands(a, row, outputs=mode == OUT)
    sources = _sources(a, int(units.blamed[unit]), row, mode)
    verdicts = []
    for operand in chosen:
        fit = _fit(a, b, alignment, operand, sources)
        if fit is None:
            continue
        ours, theirs = fit
        verdicts.append(ours <= max(LINEAR, 4 * float(units.rounding[unit]), 3 * theirs))
        suspect.facts["sum_residual"] = ours
    return bool(verdicts) and all(verdicts)


def _usual_ratios(a: Side, units: Units, ratio: Floats) -> Floats:
    """Return the median ratio of the same unit under other names; 1 where there is none."""
    usual = np.ones(len(units))
    names = a.name[units.row]
    moved = (ratio > 0) & np.isfinite(ratio)
    for group in np.unique(units.group[moved & (ratio > 1.0)]):
        members = np.flatnonzero(moved & (units.group == group))
        own, ratios = names[members], ratio[members]
        for name in np.unique(own[ratios > 1.0]):
            if (own != name).any():
                usual[members[own == name]] = np.exp(np.median(np.log(ratios[own != name])))
    return usual


def _operands(a: Side, row: int, *, outputs: bool) -> list[int]:
    own = np.arange(a.first[row], a.first[row + 1])
    chosen = a.role[own] > 0 if outputs else (a.role[own] == 0) & (a.index[own] < PARAMETER_INDEX)
    return [int(each) for each in own[chosen & (a.print[own] >= 0)]]


def _sources(a: Side, blamed: int, row: int, mode: int) -> list[int]:
    """Return the operands that were there before the unit, the latest last."""
    inputs = _operands(a, blamed, outputs=False)
    children = np.flatnonzero(a.parent == blamed)
    if mode == IN:
        children = children[children < row]
    made = [each for child in children.tolist()[-12:] for each in _operands(a, child, outputs=True)]
    return inputs + made


def _fit(
    a: Side, b: Side, alignment: Alignment, operand: int, sources: list[int]
) -> tuple[float, float] | None:
    """Return how far the candidate's and the reference's tensor are from one sum of sources."""
    partners = _partners(a, b, alignment, [operand, *sources])
    target = partners[0]
    if target is None:
        return None
    pairs: dict[tuple[int, int], None] = {}
    for mine, other in zip(sources, partners[1:], strict=True):
        if other is None or a.elements[mine] != a.elements[operand]:
            continue
        pairs[(int(a.print[mine]), int(b.print[other]))] = None
    pairs.pop((int(a.print[operand]), int(b.print[target])), None)
    if not pairs or len(pairs) > 16:
        return None
    ours = a.prints.sketches(np.array([a.print[operand], *(pair[0] for pair in pairs)]))
    theirs = b.prints.sketches(np.array([b.print[target], *(pair[1] for pair in pairs)]))
    weights, *_ = np.linalg.lstsq(theirs[1:].T, theirs[0], rcond=1e-9)
    # A residual adds what is there: any other weights would fit noise.
    weights = np.where(np.abs(weights) < 1e-3, 0.0, weights)
    size_b, size_a = np.linalg.norm(theirs[0]), np.linalg.norm(ours[0])
    if size_b == 0 or size_a == 0:
        return None
    left_b = float(np.linalg.norm(theirs[0] - weights @ theirs[1:]) / size_b)
    if left_b > max(LINEAR, 4 * _roundoff(b, target)):
        return None
    return float(np.linalg.norm(ours[0] - weights @ ours[1:]) / size_a), left_b


def _roundoff(side: Side, operand: int) -> float:
    return unit_roundoff(side.words[int(side.dtype[operand])])


def _partners(a: Side, b: Side, alignment: Alignment, operands: list[int]) -> list[int | None]:
    out: list[int | None] = []
    owners = np.searchsorted(a.first, operands, side="right") - 1
    for operand, row in zip(operands, owners.tolist(), strict=True):
        other = int(alignment.partner[row])
        if other < 0:
            out.append(None)
            continue
        own = np.arange(b.first[other], b.first[other + 1])
        match = own[
            ((b.role[own] > 0) == (a.role[operand] > 0))
            & (b.index[own] == a.index[operand])
            & (b.elements[own] == a.elements[operand])
            & (b.print[own] >= 0)
        ]
        out.append(int(match[0]) if len(match) else None)
    return out


def _ranked(a: Side, suspects: list[Suspect]) -> list[Suspect]:
    """Return one suspect per name, solid ones by size first, then the others by ratio."""
    first: dict[tuple[int, int, int], Suspect] = {}
    for suspect in suspects:
        row = suspect.row
        # A module's name tells its layer.
        layer = int(a.layer[row]) if a.level[row] == FLAT else -1
        key = (int(a.name[row]), layer, int(a.direction[row]))
        first.setdefault(key, suspect)
    return sorted(first.values(), key=_rank)[:MOST]


def _rank(suspect: Suspect) -> tuple[int, float, int]:
    if suspect.broken:
        return 0, 0.0, suspect.unit
    if suspect.ratio >= SOLID:
        # Of about equal size, the earlier one: a large difference makes others downstream.
        return 1, -round(float(np.log10(max(suspect.excess, 1e-30))) * 2) / 2, suspect.unit
    return 2, -suspect.ratio, suspect.unit
