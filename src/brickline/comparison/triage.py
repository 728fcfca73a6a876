"""Who added to the difference, and who only passed it on: from fingerprints alone.

Owns the units of blame and the test of each. A unit is one stretch of computation between tensors
that both runs fingerprinted::

    LEAF   a launch that encloses no other: its inputs -> its outputs
    IN     what a module computes before it calls a child: its own inputs and the outputs of the
           children called before -> that child's inputs
    OUT    what it computes after the last child: the same -> its own outputs
    GRAD   backward alone: the gradients of a launch's outputs -> those of its own parameters

Each has a difference at its end (`target`) and the largest at its beginnings (`source`). Rounding
explains `envelope`. `ratio` is the target to what source and envelope explain together; a suspect
exceeds its limit, and the same unit in other layers. `bias_ratio` and `peak_ratio` say the same of
the part of a difference that has a direction. Knows nothing of tensors' contents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brickline.align.keys import Ints, hashed
from brickline.align.sequences import Bools
from brickline.comparison.operands import Differences, Floats
from brickline.comparison.pairing import Alignment
from brickline.comparison.rounding.directions import Directions
from brickline.comparison.rounding.envelope import ROUNDINGS_GLUE, ROUNDINGS_WHOLE, envelope
from brickline.comparison.rounding.limits import (
    GLUE_LIMIT,
    STATELESS,
    fan_in_of,
    glue_limit,
    limits_of,
    roundings_of,
)
from brickline.comparison.scopes import Scope, running_largest
from brickline.comparison.sides import PARAMETER_INDEX, Side

LEAF, IN, OUT, GRAD = 0, 1, 2, 3
HANDED = 2.0
"""What a clean unit may make of a bias that it is handed."""
UPDATED = 10.0
"""How often the difference of weights, that an optimiser made, may show in what comes of them."""


@dataclass(eq=False)
class Units:
    """Stretches of computation, in the order in which they end."""

    mode: Ints
    row: Ints
    """The launch at whose edge the unit ends."""
    blamed: Ints
    """The launch that computes it."""
    target: Floats
    source: Floats
    past: Floats
    """The largest difference in earlier calls, where something may have been kept."""
    gain: Floats
    """How much larger than 1 the gain of a clean unit may be, from the sizes of what goes in."""
    limit: Floats
    """Ratio up to which a unit of this sort is clean without siblings."""
    rounding: Floats
    bias: Floats
    """The part of the target that is a factor or a shift of the whole tensor."""
    handed_bias: Floats
    """The largest of these at the beginnings, and all of a difference that came otherwise."""
    floor: Floats
    """The bias that clean code may have whatever the target's size."""
    spread: Floats
    """Part of the source that shows as a bias where that has none."""
    own_spread: Floats
    """The same of what rounding explains."""
    peak: Floats
    """Error of single elements of the target beyond what the others have."""
    handed_peak: Floats
    group: Ints
    """The same unit in other layers and calls."""
    clean: Bools
    """The sources are the same to the bit, or by value."""
    known: Bools
    """Everything that went in and came out was compared."""
    blind: Bools
    """Launches without a partner lie inside."""
    choice: Bools
    """A choice differed before, so other rows were computed."""
    broken: Bools
    """The target has elements that are not finite, the sources have not."""
    resized: Bools
    """The target has another size, and no source has."""
    chosen: Bools
    """The target is a choice that differs, and no source is."""
    decided: Bools
    """A choice was made before, and it is the same on both sides."""
    foreign: Bools
    """The two sides are different code, paired by value: what differs may be no counterpart."""

    def __len__(self) -> int:
        return len(self.mode)

    @property
    def base(self) -> Floats:
        """What sources and rounding explain."""
        out: Floats = np.sqrt(self.source**2 + self.past**2 + self.rounding**2)
        return self.gain * out

    @property
    def ratio(self) -> Floats:
        """How often the target is what is explained."""
        return _ratio(self.target, self.base)

    @property
    def explained_bias(self) -> Floats:
        """The bias that sources and rounding explain."""
        came, made = self.spread * self.source, self.own_spread * self.rounding
        out: Floats = self.gain * np.hypot(came, made)
        return out + HANDED * (self.handed_bias + self.past) + self.floor

    @property
    def bias_ratio(self) -> Floats:
        """How often the bias is what is explained."""
        return _ratio(self.bias, self.explained_bias)

    @property
    def peak_ratio(self) -> Floats:
        """How often single elements are further off than is explained."""
        return _ratio(self.peak, self.base + self.handed_peak)


def _ratio(found: Floats, explained: Floats) -> Floats:
    """Return how often something is what is explained; 0 where there is nothing to explain."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = found / explained
    return np.where(found == 0, 0.0, np.nan_to_num(ratio, nan=0.0, posinf=np.inf))


def units_of(
    a: Side, b: Side, alignment: Alignment, found: Differences, directions: Directions
) -> Units:
    """Return every unit between compared tensors."""
    scope = Scope(a, b, alignment, found, directions)
    make = _Makers(a, b, alignment, found, directions, scope)
    parts = [make.leaves(), make.entries(), make.exits(), make.gradients()]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    # A unit at an entrance ends before what is inside, one at an exit after it.
    when = np.where(columns["mode"] == OUT, scope.last[columns["row"]], columns["row"])
    order = np.lexsort((columns["mode"] == OUT, columns["mode"] != IN, when))
    columns = {name: values[order] for name, values in columns.items()}
    # What an update brought explains what comes of it, and a nonlinear module makes more of it.
    brought = UPDATED * _updated(a, found)[columns["blamed"]]
    columns["known"] &= (brought == 0) | (columns["target"] > brought)
    past = _past(a, columns)
    other = alignment.partner[columns["row"]]
    foreign = (other < 0) | (a.name[columns["row"]] != b.name[other])
    # Other code hands other things around: of what went in, something must have been compared.
    columns["known"] |= foreign & columns.pop("partly")
    columns["known"] &= ~foreign | _main_input_known(a, found)[columns["blamed"]]
    return Units(past=past, foreign=foreign, **columns)


def _forward_of(a: Side, found: Differences) -> Floats:
    """Return what went wrong in the forward call that each backward launch belongs to."""
    out = np.zeros(len(a))
    if not (a.direction == 1).any():
        return out
    keys = hashed(a.rank, a.name, a.position, a.ordinal)
    ahead = np.flatnonzero(a.direction == 0)
    back = np.flatnonzero(a.direction == 1)
    worst = np.maximum(found.inputs.delta, found.outputs.delta)
    unique, at = np.unique(keys[ahead], return_inverse=True)
    largest = np.zeros(len(unique))
    np.maximum.at(largest, at.reshape(-1), worst[ahead])
    if len(unique):
        place = np.searchsorted(unique, keys[back]).clip(0, len(unique) - 1)
        out[back] = np.where(unique[place] == keys[back], largest[place], 0.0)
    return out


def _updated(a: Side, found: Differences) -> Floats:
    """Return how far own parameters are apart that were the same in the first call.

    Where a backward pass lies between, an optimiser changed them: they came with the update, as
    inputs do.
    """
    out = np.zeros(len(a))
    trained = a.position[a.direction == 1]
    moved = found.parameters.known & (found.parameters.delta > 2 * found.roundoff)
    moved &= a.position > trained.min(initial=np.iinfo(np.int64).max)
    if not moved.any():
        return out
    keys = hashed(a.rank, a.name)
    first = np.flatnonzero(found.parameters.known & (a.position == a.position.min()))
    same = keys[first[found.parameters.delta[first] <= 2 * found.roundoff[first]]]
    moved &= np.isin(keys, same)
    out[moved] = found.parameters.delta[moved]
    return out


def first_update(a: Side, found: Differences) -> int | None:
    """Return the first call with weights that an update made differ, None: there is none."""
    calls = a.position[_updated(a, found) > 0]
    return int(calls.min()) if len(calls) else None


# --- the units


@dataclass(eq=False)
class _Start:
    """What is known of the beginnings of some units; one entry per unit."""

    delta: Floats
    bias: Floats
    peak: Floats
    same: Bools
    choice: Bools
    """A choice differs, or a size."""
    nonfinite: Bools
    known: Bools
    some: Bools
    decided: Bools

    def joined(self, around: dict[str, Floats]) -> _Start:
        """Return the beginnings together with what lies around them."""
        return _Start(
            delta=np.maximum(self.delta, around["delta"]),
            bias=np.maximum(self.bias, around["bias"]),
            peak=np.maximum(self.peak, around["peak"]),
            same=self.same & ~(around["unlike"] > 0),
            choice=self.choice | (around["choice"] > 0),
            nonfinite=self.nonfinite | (around["broken"] > 0),
            known=self.known,
            some=self.some,
            decided=around["decided"] > 0,
        )


class _Makers:
    """Makes the units of each mode, as columns."""

    def __init__(
        self,
        a: Side,
        b: Side,
        alignment: Alignment,
        found: Differences,
        directions: Directions,
        scope: Scope,
    ) -> None:
        self._a, self._b, self._alignment = a, b, alignment
        self._found, self._directions, self._scope = found, directions, scope
        self._forward = _forward_of(a, found)

    def leaves(self) -> dict[str, np.ndarray]:
        """Return launches that enclose no other."""
        a, found = self._a, self._found
        told = (self._alignment.partner >= 0) | (found.outputs.known & found.inputs.known)
        rows = np.flatnonzero(told & ~a.has_children() & (found.outputs.count > 0))
        partner = self._alignment.partner[rows]
        whole = (partner >= 0) & self._b.has_children()[partner]
        fan_in, gain = fan_in_of(a, found, rows)
        start = self._start(rows)
        # The gradient of an input is the sum over all who use it, residuals of the parent included.
        backward = a.direction[rows] == 1
        around = np.where(backward & (a.parent[rows] >= 0), a.parent[rows], rows)
        shared = np.maximum(found.inputs.delta[around], self._forward[rows])
        start.delta = np.maximum(start.delta, shared)
        start.bias = np.maximum(self._directions.inputs.bias[rows], shared * backward)
        roundings = np.where(whole, ROUNDINGS_WHOLE, roundings_of(a, rows))
        return self._columns(
            LEAF,
            rows,
            rows,
            start,
            rounding=envelope(found.roundoff[rows], fan_in, roundings),
            limit=np.where(whole, GLUE_LIMIT, limits_of(a, found, rows)),
            gain=gain,
        )

    def entries(self) -> dict[str, np.ndarray]:
        """Return what modules compute before they call a child."""
        a, found, scope = self._a, self._found, self._scope
        inputs = found.inputs
        told = inputs.known | inputs.resized | (inputs.delta > 0)
        rows = np.flatnonzero((scope.around >= 0) & ((inputs.count > 0) | inputs.resized) & told)
        above = scope.around[rows]
        before = {name: values[rows] for name, values in scope.before.items()}
        start = self._start(above).joined(before)
        start.some = start.some & inputs.some[rows]
        roundoff = np.maximum(found.roundoff[rows], found.roundoff[above])
        return self._columns(
            IN,
            rows,
            a.parent[rows],
            start,
            rounding=_glue_rounding(roundoff, inputs.width[rows]),
            limit=glue_limit(before["size"]) * (1 + (before["fused"] > 0)),
            floor=np.maximum(self._directions.floor[rows], self._directions.floor[above]),
            blind=scope.blind_before[rows],
        )

    def exits(self) -> dict[str, np.ndarray]:
        """Return what modules compute after their last child."""
        a, found, scope = self._a, self._found, self._scope
        told = (self._alignment.partner >= 0) | found.outputs.known
        rows = np.flatnonzero(told & a.has_children() & (found.outputs.count > 0))
        inside = {name: values[rows] for name, values in scope.inside.items()}
        return self._columns(
            OUT,
            rows,
            rows,
            self._start(rows).joined(inside),
            rounding=_glue_rounding(scope.roundoff[rows], found.outputs.width[rows]),
            limit=glue_limit(inside["size"]) * (1 + (inside["fused"] > 0)),
            blind=scope.blind_inside[rows],
        )

    def gradients(self) -> dict[str, np.ndarray]:
        """Return gradients of parameters."""
        a, found = self._a, self._found
        paired = (self._alignment.partner >= 0) & (a.direction == 1)
        rows = np.flatnonzero(paired & (found.gradients.count > 0))
        start = self._start(rows)
        start.same &= found.inputs.same[rows]
        start.known &= found.inputs.known[rows]
        start.choice = np.zeros(len(rows), bool)
        return self._columns(
            GRAD,
            rows,
            rows,
            start,
            rounding=_glue_rounding(found.roundoff[rows], np.maximum(found.inputs.width[rows], 1)),
            limit=np.full(len(rows), GLUE_LIMIT),
        )

    def _start(self, rows: Ints) -> _Start:
        """Return what launches were given; of backward ones, what went wrong in forward too."""
        inputs, way, forward = self._found.inputs, self._directions.inputs, self._forward[rows]
        nothing = inputs.count[rows] == 0
        fed = ~self._found.unfed[rows]
        return _Start(
            delta=np.maximum(inputs.delta[rows], forward),
            bias=np.maximum(way.bias[rows], forward),
            peak=way.peak[rows],
            same=(inputs.same[rows] | nothing) & (forward == 0) & fed,
            choice=inputs.choice[rows] | inputs.resized[rows],
            nonfinite=inputs.nonfinite[rows],
            known=(inputs.known[rows] | nothing) & fed,
            some=inputs.some[rows],
            decided=np.zeros(len(rows), bool),
        )

    def _columns(
        self,
        mode: int,
        rows: Ints,
        blamed: Ints,
        start: _Start,
        *,
        rounding: Floats,
        limit: Floats,
        gain: Floats | float = 1.0,
        floor: Floats | None = None,
        blind: Bools | bool = False,
    ) -> dict[str, np.ndarray]:
        a, found, directions = self._a, self._found, self._directions
        end, way = {
            LEAF: (found.outputs, directions.outputs),
            IN: (found.inputs, directions.inputs),
            OUT: (found.outputs, directions.outputs),
            GRAD: (found.gradients, directions.gradients),
        }[mode]
        # What goes into a child is compared as the child's, what comes out as the launch's own.
        seen = {
            LEAF: end.known[rows] | end.resized[rows],
            IN: np.ones(len(rows), bool),
            OUT: end.known[rows],
            GRAD: end.known[rows],
        }[mode]
        sized = mode != GRAD
        return {
            "mode": np.full(len(rows), mode),
            "row": rows,
            "blamed": blamed,
            "target": end.delta[rows],
            "source": start.delta,
            "gain": np.broadcast_to(gain, len(rows)),
            "limit": limit,
            "rounding": rounding,
            "bias": way.bias[rows],
            "handed_bias": start.bias,
            "floor": directions.floor[rows] if floor is None else floor,
            "spread": way.spread[rows],
            "own_spread": way.own_spread[rows],
            "peak": way.peak[rows],
            "handed_peak": start.peak,
            "group": hashed(np.full(len(rows), mode), a.kind[rows], a.direction[rows]).view(
                np.int64
            ),
            "clean": start.same,
            "known": start.known & seen,
            "partly": start.some & (end.known[rows] | (mode == IN)) & sized,
            "blind": np.broadcast_to(blind, len(rows)),
            "choice": start.choice,
            "broken": end.nonfinite[rows] & ~start.nonfinite,
            "resized": end.resized[rows] & ~start.choice & sized,
            "chosen": end.choice[rows] & ~start.choice & sized,
            "decided": start.decided,
        }


def _glue_rounding(roundoff: Floats, width: Ints) -> Floats:
    """Return what rounding adds to what a module computes between its children."""
    return envelope(roundoff, width.astype(float), np.full(len(width), ROUNDINGS_GLUE))


def _main_input_known(a: Side, found: Differences) -> Bools:
    """Return which launches were given nothing large that was not compared."""
    chosen = (a.role == 0) & (a.index < PARAMETER_INDEX) & ~found.discrete & (a.elements > 0)
    seen, unseen = np.zeros(len(a)), np.zeros(len(a))
    known = chosen & ~np.isnan(found.delta)
    np.maximum.at(seen, found.owner[known], a.elements[known].astype(float))
    other = chosen & np.isnan(found.delta)
    np.maximum.at(unseen, found.owner[other], a.elements[other].astype(float))
    return seen >= unseen


def _past(a: Side, columns: dict[str, np.ndarray]) -> Floats:
    """Return the largest difference of each unit in earlier calls of the root."""
    rows, mode = columns["row"], columns["mode"]
    out = np.zeros(len(rows))
    if not len(rows) or int(a.position.max()) == int(a.position.min()):
        return out
    stateless = {
        int(number): number >= 0 and any(part in a.words[int(number)] for part in STATELESS)
        for number in np.unique(a.type)
    }
    alone = (mode == LEAF) | (mode == GRAD)
    keeps = np.array([not stateless[int(number)] for number in a.type[rows]]) | ~alone
    blamed = np.where(alone, rows, columns["blamed"])
    keys = hashed(a.rank[rows], a.direction[rows], a.name[blamed])
    worst = np.maximum(columns["target"], columns["source"])
    position = a.position[rows]
    order = np.lexsort((position, keys))
    begins = np.concatenate([[True], np.diff(keys[order]) != 0])
    new_call = begins | np.concatenate([[True], np.diff(position[order]) != 0])
    # The largest of each call, then the running maximum over the calls before it.
    starts = np.flatnonzero(new_call)
    per_call = np.maximum.reduceat(worst[order], starts)
    fresh = begins[starts]
    shifted = np.concatenate([[0.0], per_call[:-1]])
    before = running_largest(np.where(fresh, 0.0, shifted), fresh)
    out[order] = np.repeat(before, np.diff([*starts, len(order)]))
    return np.where(keeps, out, 0.0)
