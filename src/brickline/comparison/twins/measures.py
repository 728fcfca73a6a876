"""Two runs with float64 twins: where the logic parts, and whose arithmetic is off.

In float64 two right implementations agree up to the noise that each run measured: what moving its
inputs and weights by their own rounding does to every tensor. What differs by more computes
something else. What a run put out natively differs from its own twin by its arithmetic alone. No
model of rounding is asked. Knows launches and operands as `sides` gives them, and no report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brickline.align.keys import Ints, hashed
from brickline.align.sequences import Bools
from brickline.comparison.conditions import all_recording_facts, uses_tf32
from brickline.comparison.operands import Differences, Floats
from brickline.comparison.report.run_pair import RunPair
from brickline.comparison.rounding.envelope import UNIT_ROUNDOFF, unit_roundoff
from brickline.comparison.sides import MODULE, PARAMETER_INDEX, Side
from brickline.errors import RunError
from brickline.run.twin_rows import read_twins, row_dtype
from brickline.runs import Run

MARGIN = 3.0
"""How many times the measured noise a difference must be: of right code it was up to 1.6."""
EXACT = 1e-13
"""What float64 leaves between two orders of the same sums, as a rounding to compare with: where
both sides hold the same bits, noise is scaled down to it."""
CONSTANTS = 3.0
"""Up to so many times the noise of float32 a difference may be that of a rounded constant."""
FLOOR = 1e-14
"""Relative L2 that the sums of a fingerprint leave between equal tensors."""
JUMP = 4.0
"""How many times the other side's own error, each in units of its rounding, is no rounding."""
SUMS = 50 * 2.0**-24
"""What the sums of a product may lose in float32, whatever the order."""
WEIGHT = 0.75
"""Rounding moves a tensor by 0.58 u in relative L2 at most, and the estimate has 9 %."""
STRIPE = 8.0
"""How many standard deviations a stripe of a weight must be off."""
FILLER = 1e30
"""Elements from here on are fillers of masks, which twins clamp and native tensors do not."""


@dataclass(eq=False)
class SideTwins:
    """The twins of one side, by operand."""

    rows: NDArray[np.void]
    at: Ints
    """Row of each operand's twin, -1: none."""
    narrow: bool
    """Whether some operation had no float64 form."""

    def column(self, name: str, operands: Ints) -> Floats:
        """Return a number of the fingerprints of some operands' twins."""
        values: Floats = self.rows["fingerprint"][name][self.at[operands]]
        return values


@dataclass(eq=False)
class Twins:
    """What the twins of both sides say of each operand of the candidate; nan where not known."""

    gap: Floats
    """Relative L2 of twin to twin; inf where a choice differs."""
    limit: Floats
    """Up to here the logic is the same."""
    weak: Floats
    """Up to here the difference may be that of a constant rounded to float32."""
    noise: Floats
    own: Floats
    """Relative L2 of the candidate's native value to its twin; inf where that alone is finite."""
    other_own: Floats
    """The same of the reference's."""
    own_units: Floats
    """`own` in units of the coarsest rounding in the candidate's call."""
    other_units: Floats
    own_moved: Floats
    """`own` in units of what the candidate's own measured noise is."""
    other_moved: Floats
    exact: Bools
    """Whether both sides hold the same bits: weights, and what the call was given."""
    weights: dict[int, tuple[float, float]]
    """Weights that differ by more than rounding: operand, difference and what rounding makes."""

    @property
    def parted(self) -> Bools:
        """Where the logic differs."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.gap > self.limit)

    @property
    def known(self) -> Bools:
        """Where twins were compared."""
        return ~np.isnan(self.gap)


def side_twins(run: Run, side: Side) -> SideTwins | None:
    """Return the twins of a run's operands; None where it has none that can be read."""
    tables, keys = [np.empty(0, row_dtype())], [np.empty(0, np.uint64)]
    for number, part in enumerate(run.parts):
        try:
            rows = read_twins(part.path)
        except RunError:  # the run says so as a problem of its own
            continue
        names = [side.words.number(part.string(int(name))) for name in rows["name"]]
        places = [rows[name].astype(np.int64) for name in ("position", "ordinal", "role", "index")]
        parts = np.full(len(rows), number, np.int64)
        tables.append(rows)
        keys.append(hashed(parts, np.array(names, np.int64), *places))
    table, known = np.concatenate(tables), np.concatenate(keys)
    if not len(table):
        return None
    owner = side.owner
    wanted = hashed(
        side.source[owner] >> 40,
        side.name[owner],
        side.position[owner],
        side.ordinal[owner],
        side.role,
        side.index,
    )
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)
    found = order[place]
    forward = (side.direction[owner] == 0) & (side.level[owner] == MODULE)
    is_twin = (known[found] == wanted) & forward
    noted = [facts.get("twin") for facts in all_recording_facts(run)]
    narrow = any(isinstance(twin, Mapping) and bool(twin.get("float32")) for twin in noted)
    return SideTwins(table, np.where(is_twin, found, -1), narrow)


def measure_twins(pair: RunPair, found: Differences, ours: SideTwins, theirs: SideTwins) -> Twins:
    """Compare twin with twin, and each native value with its own twin."""
    a, b, count = pair.a, pair.b, len(found.other)
    other = found.other
    sized = (other >= 0) & ~found.resized & (ours.at >= 0)
    sized[sized] = theirs.at[other[sized]] >= 0
    at = np.flatnonzero(sized)
    partner = other[at]
    one, two = ours.rows[ours.at[at]], theirs.rows[theirs.at[partner]]
    gap, size = _gaps(one["fingerprint"], two["fingerprint"])
    noise_a, noise_b = one["noise"] / size, two["noise"] / size
    noise = np.hypot(noise_a, noise_b)
    coarse = np.maximum(one["roundoff"], two["roundoff"])
    weights, same = _weights(a, b, found)
    strict = same and not (ours.narrow or theirs.narrow)
    exact = _exact_calls(a, found, found.owner[at], same)
    gap_, limit, weak, spread, stray = (np.full(count, np.nan) for _ in range(5))
    with np.errstate(all="ignore"):
        gap_[at] = np.where(found.discrete[at], np.where(gap > 0, np.inf, 0.0), gap)
        spread[at] = noise
        single = np.where(coarse > 0, UNIT_ROUNDOFF["float32"] / coarse, 1.0)
        weak[at] = CONSTANTS * noise * single + FLOOR
        tight = MARGIN * noise * np.where(coarse > 0, EXACT / coarse, 1.0) + FLOOR
        stray[at] = gap / (noise + FLOOR)
        wide = MARGIN * noise * _strays(a, found, at, stray)[found.owner[at]] + FLOOR
        limit[at] = np.where(exact, tight if strict else weak[at], wide)
        weak[at] = np.where(exact, weak[at], wide)
    # Rounding flips a choice here and there: such a one is judged by what comes of it.
    few = found.discrete[at] & ~exact & (gap > 0)
    few &= ~_differ_throughout(one["fingerprint"], two["fingerprint"])
    gap_[at[few]] = np.nan
    gap_[at[np.isnan(noise)]] = np.nan
    bits = np.zeros(count, bool)
    bits[at] = exact
    own = _own(a, ours, np.flatnonzero(ours.at >= 0), count)
    own_b = _own(b, theirs, np.flatnonzero(theirs.at >= 0), len(theirs.at))
    own_other = np.full(count, np.nan)
    own_other[at] = own_b[partner]
    units, moved = _in_units(pair.candidate, ours, own, np.arange(count))
    units_b, moved_b = _in_units(pair.reference, theirs, own_b, np.arange(len(own_b)))
    other_units, other_moved = np.full(count, np.nan), np.full(count, np.nan)
    other_units[at], other_moved[at] = units_b[partner], moved_b[partner]
    return Twins(
        gap_,
        limit,
        weak,
        spread,
        own,
        own_other,
        units,
        other_units,
        moved,
        other_moved,
        bits,
        weights,
    )


def _gaps(one: NDArray[np.void], two: NDArray[np.void]) -> tuple[Floats, Floats]:
    """Return ‖a − b‖ / ‖b‖ of paired fingerprints, and ‖b‖; 0 where all bits are the same."""
    difference = one["sketch"] - two["sketch"]
    size = np.maximum(two["l2"], np.where(two["l2"] == 0, one["l2"], 0.0))
    size = np.where(size > 0, size, 1.0)
    with np.errstate(all="ignore"):
        gap = np.sqrt(np.einsum("ij,ij->i", difference, difference)) / size
    same = (one["hash"] == two["hash"]).all(axis=1) & (one["dtype"] == two["dtype"])
    gap[same] = 0.0
    gap[~same & (one["nonfinite_hash"] != two["nonfinite_hash"])] = np.inf
    gap[np.isnan(gap)] = np.inf
    return gap, size


def _differ_throughout(one: NDArray[np.void], two: NDArray[np.void]) -> Bools:
    """Return which paired tensors differ in most stripes of their rows and of their columns."""
    out = np.ones(len(one), bool)
    for name in ("rows", "columns"):
        used = (one[name] != 0) | (two[name] != 0)
        out &= 2 * (one[name] != two[name]).sum(axis=1) >= np.maximum(used.sum(axis=1), 1)
    return out


def _own(side: Side, twins: SideTwins, operands: Ints, count: int) -> Floats:
    """Return how far native values are from their twins."""
    out = np.full(count, np.nan)
    operands = operands[side.print[operands] >= 0]
    kinds = np.array([unit_roundoff(text) > 0 for text in side.words.texts], bool)
    operands = operands[kinds[side.dtype[operands]]]
    for begin in range(0, len(operands), 4096):
        chosen = operands[begin : begin + 4096]
        native = side.prints.records(side.print[chosen])
        exact = twins.rows["fingerprint"][twins.at[chosen]]
        gap, _ = _gaps(native, exact)
        lost = native["nan_count"] + native["inf_count"] > 0
        gap[lost] = np.inf
        masked = (exact["absmax"] >= FILLER) | (native["elements"] != exact["elements"])
        gap[masked | (exact["nan_count"] > 0)] = np.nan
        out[chosen] = gap
    return out


def _in_units(run: Run, twins: SideTwins, own: Floats, operands: Ints) -> tuple[Floats, Floats]:
    units, moved = np.full(len(own), np.nan), np.full(len(own), np.nan)
    at = operands[twins.at >= 0]
    rows = twins.rows[twins.at[at]]
    coarse = np.where(rows["roundoff"] > 0, rows["roundoff"], UNIT_ROUNDOFF["float32"])
    if uses_tf32(run):
        coarse = np.maximum(coarse, UNIT_ROUNDOFF["tf32"])
    size = np.where(rows["fingerprint"]["l2"] > 0, rows["fingerprint"]["l2"], 1.0)
    units[at] = own[at] / coarse
    with np.errstate(all="ignore"):
        scaled = np.where(rows["roundoff"] > 0, coarse / rows["roundoff"], 1.0)
        moved[at] = own[at] / np.maximum(rows["noise"] / size * scaled, coarse)
    return units, moved


# --- the state


def _weights(a: Side, b: Side, found: Differences) -> tuple[dict[int, tuple[float, float]], bool]:
    """Return the weights that differ by more than rounding, and whether all others are the same."""
    own = _weights_of(a)
    theirs = _weights_of(b)
    paired = own[(found.other[own] >= 0) & (a.print[own] >= 0) & ~found.fused[own]]
    same = found.same[paired]
    kept = float(same.mean()) > 0.5 if len(paired) else False
    odd: dict[int, tuple[float, float]] = {}
    roundoffs = np.array([unit_roundoff(text) for text in a.words.texts], float)
    for operand in paired[~same].tolist():
        partner = int(found.other[operand])
        if a.form[operand] != b.form[partner] or b.print[partner] < 0:
            continue
        coarse = max(roundoffs[a.dtype[operand]], roundoffs[b.dtype[partner]])
        difference = float(found.delta[operand])
        if not coarse or np.isnan(difference):
            continue
        # Where most weights are the same bits, the others were not rounded: they were changed.
        changed = kept and a.dtype[operand] == b.dtype[partner]
        one, two = a.prints.records(a.print[[operand]])[0], b.prints.records(b.print[[partner]])[0]
        if changed or difference > WEIGHT * coarse or _stripe_is_off(one, two, coarse):
            odd[operand] = difference, 0.0 if changed else 0.58 * coarse
    rest = ~np.isin(paired, list(odd))
    if len(paired) < len(own) or not same[rest].all():
        return odd, False
    # The reference may use a weight more often; it may have none that the candidate lacks.
    known = {b.prints.hash[row].tobytes() for row in b.print[found.other[paired]]}
    return odd, {b.prints.hash[row].tobytes() for row in b.print[theirs]} <= known


def _weights_of(side: Side) -> Ints:
    """Return the parameters and buffers in the first call of the root."""
    owner = side.owner
    is_weight = (side.index >= PARAMETER_INDEX) & (side.role == 0) & (side.direction[owner] == 0)
    return np.flatnonzero(is_weight & (side.position[owner] == side.position.min(initial=0)))


def _stripe_is_off(one: np.void, two: np.void, coarse: float) -> bool:
    """Whether the sum of a stripe differs by more than rounding its elements makes."""
    if coarse <= UNIT_ROUNDOFF["float32"] or one["elements"] < 1024:
        return False  # sums of stripes are no more exact than that
    spread = 0.58 * coarse * float(two["l2"]) / np.sqrt(32.0)
    worst = max(float(np.abs(one[name] - two[name]).max()) for name in ("rows", "columns"))
    return bool(worst > STRIPE * spread)


def _inputs_of_roots(a: Side, found: Differences) -> Bools:
    owner = found.owner
    outer = (a.parent[owner] < 0) & (a.direction[owner] == 0)
    is_input: Bools = outer & (a.role == 0) & (a.index < PARAMETER_INDEX) & (found.other >= 0)
    return is_input


def _exact_calls(a: Side, found: Differences, launches: Ints, same: bool) -> Bools:
    """Return which launches lie in calls of the root that were given the same bits."""
    odd = np.flatnonzero(_inputs_of_roots(a, found) & ~found.same)
    positions = np.unique(a.position[found.owner[odd]])
    exact: Bools = same & ~np.isin(a.position[launches], positions)
    return exact


def _strays(a: Side, found: Differences, at: Ints, stray: Floats) -> Floats:
    """Return how many times their noise the inputs of each launch's call differ; 1 at least.

    What a call was given carries what earlier calls rounded, such as keys and values.
    """
    inputs = at[_inputs_of_roots(a, found)[at] & ~found.discrete[at]]
    worst: dict[int, float] = {}
    for operand in inputs.tolist():
        position = int(a.position[found.owner[operand]])
        if np.isfinite(stray[operand]):
            worst[position] = max(worst.get(position, 1.0), float(stray[operand]))
    return np.array([worst.get(int(position), 1.0) for position in a.position], float)
