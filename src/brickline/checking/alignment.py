"""Partners for the reference's values, also where the two sides are different code."""

from __future__ import annotations

from brickline.checking.forcing import perform
from brickline.checking.pairing import Pairing, pair_by_key
from brickline.checking.performance import Recording
from brickline.checking.segments import strangers_of
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import State


def align(
    recording: Recording,
    call: Call,
    candidate: Side,
    reference: Side,
    state: State,
    parameters: dict[int, str],
    reference_parameters: dict[int, str],
) -> Pairing:
    """Return which of the reference's values stand for which of the candidate's."""
    theirs = perform(reference, call, views=True, parameters=reference_parameters)
    pairing = pair_by_key(recording, theirs)
    pairing.strangers = strangers_of(
        recording.callers, set(theirs.callers), {path for path, _ in theirs.callers}
    )
    return pairing
