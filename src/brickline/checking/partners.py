"""Partners of the reference's values before anything was computed in float64: by name."""

from __future__ import annotations

from brickline.checking.forcing import perform
from brickline.checking.pairing import Pairing, pair_by_key
from brickline.checking.recording import Recording
from brickline.checking.segments import strangers_of
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import State
from brickline.checking.stage import ARGUMENT, OUTPUT
from brickline.checking.state.tensors import plain_name


def partners_of(
    recording: Recording, call: Call, candidate: Side, reference: Side, state: State
) -> Pairing:
    """Return partners by name; where the modules have other names, of what is returned only.

    Args:
        recording: What the candidate made.
        call: What both sides are called with; the reference makes the call once.
        candidate: The one side.
        reference: The other one.
        state: Of the reference before the call; it is restored.
    """
    theirs = perform(reference, call, views=True)
    state.restore()
    pairing = pair_by_key(recording, theirs)
    if have_same_names(candidate, reference):
        pairing.strangers = strangers_of(
            recording.callers, set(theirs.callers), {path for path, _ in theirs.callers}
        )
        return pairing
    pairing.same_code = False
    pairing.partners = {
        key: partner
        for key, partner in pairing.partners.items()
        if not key.path and (key.op == OUTPUT or key.op.startswith(ARGUMENT))
    }
    return pairing


def have_same_names(candidate: Side, reference: Side) -> bool:
    """Return whether the modules of both sides have the same names."""
    ours, theirs = (
        {plain_name(path) for path in side.stage.modules if path} for side in (candidate, reference)
    )
    return ours == theirs


def signature_of(recording: Recording) -> int:
    """Return a number that two recordings share if the same partners serve both."""
    return hash(
        tuple(
            (value.key, tuple(size == 1 for size in value.tensor.shape))
            for value in recording.values
        )
    )
