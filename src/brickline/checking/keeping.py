"""What modules keep between calls: where the two sides part there, a fault has acted already.

A cache that was not written, a state that stood still: the call itself returns the right thing, and
the next one does not. What is kept is no proof by itself, since two people may keep different
things; it dates a culprit that was found by other means.
"""

from __future__ import annotations

import torch

from brickline.checking.snapshot import State
from brickline.oracle.widen import unit_roundoff

APART = 16.0
"""What is kept is another thing from this many unit roundoffs of relative L2 on."""


def kept_apart(
    ours_before: State, ours_after: State, theirs_before: State, theirs_after: State
) -> frozenset[str]:
    """Return the modules that keep something else after a call than their namesakes do.

    Only elements that one of the two calls has changed are looked at.
    """
    found: set[str] = set()
    before, earlier = ours_before.tensors(), theirs_before.tensors()
    theirs = theirs_after.tensors()
    for place, ours in ours_after.tensors().items():
        right = theirs.get(place)
        if right is None or place[0] in found or not _comparable(ours, right):
            continue
        changed = _changed(before.get(place), ours) | _changed(earlier.get(place), right).to(
            ours.device
        )
        if bool(changed.any()) and _differ(ours[changed], right.to(ours.device)[changed]):
            found.add(place[0])
    return frozenset(found)


def _comparable(ours: torch.Tensor, right: torch.Tensor) -> bool:
    plain = ours.layout is torch.strided and not ours.is_meta and ours.dtype.is_floating_point
    return plain and ours.shape == right.shape and right.dtype.is_floating_point


def _changed(before: torch.Tensor | None, after: torch.Tensor) -> torch.Tensor:
    if before is None or before.shape != after.shape or before.dtype != after.dtype:
        return torch.ones_like(after, dtype=torch.bool)
    return before.to(after.device) != after


def _differ(ours: torch.Tensor, right: torch.Tensor) -> bool:
    coarse = max((ours.dtype, right.dtype), key=unit_roundoff)
    wide = right.double()
    distance = (ours.double() - wide).norm()
    return not bool(distance <= APART * unit_roundoff(coarse) * wide.norm())
