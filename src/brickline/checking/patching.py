"""How much of the final difference each culprit explains, shown by repairing it.

The candidate runs again with the culprit's value replaced by what it should have been, and the
distance of its final output to the reference's is taken before and after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from brickline.checking.arbitration import Rerun
from brickline.checking.facts import Fact
from brickline.checking.pairing import Pairing, roots_of
from brickline.checking.performance import Operation, Recording, Value
from brickline.checking.stage import ARGUMENT, Key


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
        return max(0.0, min(1.0, 1.0 - left / self.final))


def final_errors(
    recording: Recording,
    exact: Recording,
    clean: Recording,
    guilty: list[Fact],
    pairing: Pairing,
    rerun: Rerun,
) -> Shares:
    """Repair each guilty module by itself and measure what is left."""
    wanted = _outputs(exact)
    shares = Shares(_distance(_outputs(recording), wanted), _distance(_outputs(clean), wanted))
    if shares.final is None:
        return shares
    for path in dict.fromkeys(each.modules[0] for each in guilty if each.modules):
        repair = {
            each.key: _in_candidates_layout(each, recording)
            for each in guilty
            if each.modules and each.modules[0] == path and each.exact is not None
        }
        left = _repaired_distance(rerun, repair, wanted)
        if left is not None:
            shares.repaired[path] = left
    return shares


def _in_candidates_layout(fact: Fact, recording: Recording) -> torch.Tensor | None:
    value = recording.by_key[fact.key]
    if fact.exact is None or fact.part is None:
        return None
    return fact.part.back(fact.exact, value.tensor)


def _repaired_distance(
    rerun: Rerun, repair: dict[Key, torch.Tensor | None], wanted: dict[Key, torch.Tensor]
) -> float | None:
    def listener(value: Value, operation: Operation | None) -> torch.Tensor | None:
        right = repair.get(value.key)
        if right is None:
            return None
        return torch.empty_like(value.tensor).copy_(right)

    try:
        made = rerun.perform(keep=True, listener=listener)
    except Exception:
        return None
    # What is repaired at the end is what comes out.
    outputs = _outputs(made)
    for key, right in repair.items():
        if key in outputs and right is not None:
            outputs[key] = right
    return _distance(outputs, wanted)


def _outputs(recording: Recording) -> dict[Key, torch.Tensor]:
    return {
        each.key: each.tensor
        for each in roots_of(recording)
        if each.tensor.dtype.is_floating_point and not each.key.op.startswith(ARGUMENT)
    }


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
        difference = left.to(wide.device).double() - wide
        finite = difference.isfinite()
        if bool((~finite & (left.to(wide.device).double() != wide)).any()):
            return math.inf
        error += float(difference[finite].square().sum())
        size += float(wide[finite].square().sum())
    if not seen:
        return None
    return math.sqrt(error / size) if size else math.sqrt(error)
