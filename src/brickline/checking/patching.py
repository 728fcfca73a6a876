"""How much of the final difference each culprit explains, shown by repairing it.

The candidate runs again with the culprit's value replaced by what it should have been, and the
distance of its final output to the reference's is taken before and after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from brickline.checking.arbitration import Rerun
from brickline.checking.facts import Fact
from brickline.checking.forcing import in_place_of
from brickline.checking.pairing import Pairing, is_end, roots_of
from brickline.checking.recording import Operation, Recording, Value
from brickline.checking.stage import INPUT, OUTPUT, Key


@dataclass
class Shares:
    """The final difference of one call, and what repairing each culprit leaves of it."""

    final: float | None
    """Relative L2 of the candidate's output to the reference's in float64."""
    floor: float | None
    """The same for the reference in the candidate's dtype."""
    repaired: dict[str, float] = field(default_factory=dict)
    """What is left of the final difference, by module path."""

    def share(self, path: str) -> float | None:
        """Return the part of the final difference that repairing removes, from 0 to 1."""
        left = self.repaired.get(path)
        if left is None or not self.final:
            return None
        if math.isinf(self.final):
            return 1.0 if math.isfinite(left) else 0.0
        # Rounding stays when a culprit is repaired; only what is beyond it can go away.
        floor = min(self.floor or 0.0, self.final)
        excess = 1.0 - (floor / self.final) ** 2
        if excess <= 0:
            return 0.0
        rest = min(max(left, floor) / self.final, 1.0)
        return (1.0 - rest**2) / excess


def final_errors(
    recording: Recording,
    exact: Mapping[Key, torch.Tensor],
    clean: Mapping[Key, torch.Tensor],
    guilty: list[Fact],
    rerun: Rerun,
    mend: Callable[[str, Collection[Key]], Mapping[Key, torch.Tensor]],
) -> Shares:
    """Repair each guilty module by itself and measure what is left.

    Args:
        recording: What the candidate made.
        exact: What the reference returns in float64 when it runs by itself.
        clean: The same in the candidate's dtype.
        guilty: The facts that are wrong, each with its module.
        rerun: The candidate's call.
        mend: Gives what a module should have made, by the candidate's keys.
    """
    wanted = _floating(exact)
    shares = Shares(_distance(_outputs(recording), wanted), _distance(_floating(clean), wanted))
    if shares.final is None:
        return shares
    for path in dict.fromkeys(each.modules[0] for each in guilty if each.modules):
        keys = {each.key for each in guilty if each.modules and each.modules[0] == path}
        left = _repaired_distance(rerun, mend(path, keys), wanted)
        if left is not None:
            shares.repaired[path] = left
    return shares


def apart_in_float64(rerun: Rerun, exact: Mapping[Key, torch.Tensor]) -> float | None:
    """Return the relative L2 between what both sides return in float64, each by itself."""
    try:
        made = rerun.perform(wide=True, keep=True)
    except Exception:
        return None
    return _distance(_outputs(made), _floating(exact))


class Mended:
    """Listener of a reference that runs on the candidate's values, but for one module.

    Inside that module it goes its own way, so that what comes out is what the module should have
    made of what it was given.
    """

    def __init__(
        self,
        path: str,
        guilty: Collection[Key],
        others: Collection[str],
        pairing: Pairing,
        recording: Recording,
    ) -> None:
        self.values: dict[Key, torch.Tensor] = {}
        """What the candidate should have made, in its own layout."""
        self._inside = f"{path}." if path else ""
        self._path = path
        self._guilty = guilty
        self._pairing = pairing
        self._recording = recording
        ends = {
            part.key
            for partner in pairing.partners.values()
            for part in partner.parts
            if part.key.path == path and part.key.op == OUTPUT
        }
        self._wanted = ends if path and ends else set(guilty)
        self._others = [each for each in others if each.startswith(self._inside) and each != path]

    def _is_others(self, key: Key) -> bool:
        """Whether it belongs to another guilty module inside: that is not repaired here."""
        return any(key.path == each or key.path.startswith(f"{each}.") for each in self._others)

    def __call__(self, value: Value, operation: Operation | None) -> torch.Tensor | None:
        """Keep what is wanted, go on with the candidate's value outside."""
        partner = self._pairing.partners.get(value.key)
        if partner is None:
            return None
        pieces = partner.pieces(self._recording, value.tensor)
        for part in partner.parts:
            if part.key in self._wanted and part.key in self._recording.by_key:
                # Several of the reference's values may make one of the candidate's.
                kept = self.values.get(part.key, self._recording.by_key[part.key].tensor)
                right = part.back(part.theirs(value.tensor).clone(), kept)
                if right is not None:
                    self.values[part.key] = right
        if not pieces or any(self._is_inside(part.key) for part, _ in pieces):
            return None
        return in_place_of(value.tensor, pieces)

    def _is_inside(self, key: Key) -> bool:
        if key in self._guilty or key in self._wanted:
            return True
        if not self._path or self._is_others(key):
            return False
        own = key.path == self._path and key.op != INPUT
        return own or key.path.startswith(self._inside)


def _repaired_distance(
    rerun: Rerun, repair: Mapping[Key, torch.Tensor], wanted: dict[Key, torch.Tensor]
) -> float | None:
    def listener(value: Value, operation: Operation | None) -> torch.Tensor | None:
        right = repair.get(value.key)
        if right is None:
            return None
        return torch.empty_like(value.tensor).copy_(right)

    try:
        if not repair:
            return None
        made = rerun.perform(keep=True, listener=listener)
    except Exception:
        return None
    # What is repaired at the end is what comes out.
    outputs = _outputs(made)
    for key, right in repair.items():
        if key in outputs:
            outputs[key] = right
    return _distance(outputs, wanted)


class Free:
    """Listener of a reference that runs by itself: keeps its ends, and how far apart the sides are.

    Holds no other value, so that a large model needs no second set of activations.
    """

    def __init__(self, recording: Recording, pairing: Pairing) -> None:
        self.ends: dict[Key, torch.Tensor] = {}
        self.distances: dict[Key, float] = {}
        """Relative L2 of the candidate's values to the reference's, by the candidate's key."""
        self._recording = recording
        self._pairing = pairing

    def __call__(self, value: Value, operation: Operation | None) -> None:
        """Look at one value."""
        if is_end(value.key):
            self.ends[value.key] = value.tensor.detach().clone()
        partner = self._pairing.partners.get(value.key)
        if partner is None or not value.tensor.dtype.is_floating_point:
            return
        for part in partner.parts:
            ours = self._recording.by_key.get(part.key)
            mine = None if ours is None else part.ours(ours.tensor, value.tensor.shape)
            right = part.theirs(value.tensor)
            if mine is None or mine.shape != right.shape:
                continue
            distance = _distance({value.key: mine}, {value.key: right})
            if distance is not None:
                self.distances[part.key] = distance


def _outputs(recording: Recording) -> dict[Key, torch.Tensor]:
    return _floating({each.key: each.tensor for each in roots_of(recording)})


def _floating(ends: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    return {key: tensor for key, tensor in ends.items() if tensor.dtype.is_floating_point}


def _distance(ours: dict[Key, torch.Tensor], theirs: dict[Key, torch.Tensor]) -> float | None:
    """Return the relative L2 distance over all outputs that both have."""
    error = size = 0.0
    seen = False
    for key, right in theirs.items():
        left = ours.get(key)
        if left is None or left.shape != right.shape:
            continue
        seen = True
        wide = right.double()
        difference = left.to(wide.device, torch.float64, copy=True).sub_(wide)
        apart = float(torch.linalg.vector_norm(difference))
        length = float(torch.linalg.vector_norm(wide))
        if not (math.isfinite(apart) and math.isfinite(length)):
            finite = difference.isfinite()
            other = left.to(wide.device).double() != wide
            if bool((~finite & other & ~(left.to(wide.device).isnan() & wide.isnan())).any()):
                return math.inf
            apart = float(difference[finite].norm())
            length = float(wide[finite].norm())
        # A mask may be as large as its dtype allows: its square is not a number any more.
        error = math.hypot(error, apart)
        size = math.hypot(size, length)
    if not seen:
        return None
    return error / size if size else error
