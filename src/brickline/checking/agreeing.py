"""Whether two sides of different code end alike: then what is far apart between was no pair.

A value that is wrong by much shows at the end. Where all that comes out is the same but for
rounding, in the candidate's dtype and in float64, two values that are far from each other are not
meant for each other, and nobody is to blame. Says nothing of what modules keep for the next call.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from brickline.checking.arbitration import EXCUSED_RATIO, EXCUSED_ULPS
from brickline.checking.blaming import FAINT
from brickline.checking.facts import Fact
from brickline.checking.pairing import is_end
from brickline.checking.patching import Shares
from brickline.checking.snapshot import State
from brickline.checking.stage import Key
from brickline.oracle.widen import unit_roundoff


def end_alike(shares: Shares | None, dtype: torch.dtype) -> bool:
    """Whether what comes out of one call differs by no more than rounding."""
    if shares is None or shares.final is None:
        return False
    rounding = max(EXCUSED_ULPS * unit_roundoff(dtype), EXCUSED_RATIO * (shares.floor or 0.0))
    return shares.final <= rounding


def contradicted(facts: Iterable[Fact], apart: float, dtype: torch.dtype) -> set[Key]:
    """Return the reference's keys of partners that are too far apart for how alike the ends are.

    Args:
        facts: All that was measured at one call.
        apart: Relative L2 between what both sides return in float64.
        dtype: What the candidate works in.
    """
    if not apart <= EXCUSED_ULPS * unit_roundoff(dtype):
        return set()
    return {
        fact.reference_key
        for fact in facts
        if fact.suspicious
        and not is_end(fact.reference_key)
        and apart <= FAINT * fact.ratios.relative_l2
    }


def keeps_nothing(before: State, after: State) -> bool:
    """Whether modules hold after a call what they held before it."""
    earlier, later = before.tensors(), after.tensors()
    return earlier.keys() == later.keys() and all(
        _same(each, later[place]) for place, each in earlier.items()
    )


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    plain = before.layout is torch.strided and not before.is_meta
    alike = before.shape == after.shape and before.dtype == after.dtype
    return alike and (not plain or torch.equal(before, after))
