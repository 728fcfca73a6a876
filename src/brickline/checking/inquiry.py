"""The reference, asked about one call of the candidate: its counterpart is `Rerun`.

Every question puts the reference back into the state in which it was when the call was made. What
it is asked, and what follows from its answers, is the matter of `examining`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from brickline.checking.facts import Fact
from brickline.checking.forcing import Clean, Exact, perform
from brickline.checking.held import Held
from brickline.checking.masks import idle_queries, is_of_transformers
from brickline.checking.pairing import Pairing
from brickline.checking.patching import Free, Mended
from brickline.checking.recording import Recording
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import State
from brickline.checking.stage import Key


class Answer(NamedTuple):
    """What the reference makes of the candidate's values."""

    facts: list[Fact]
    after: State
    """The state that it leaves."""
    output: Any


class Inquiry:
    """The reference before one call of the candidate, ready to be asked again and again."""

    def __init__(self, candidate: Side, reference: Side, recording: Recording, call: Call) -> None:
        self.candidate = candidate
        self.reference = reference
        self.recording = recording
        """What the candidate made in the call."""
        self.call = call
        self.state = State(reference.root)
        self.left: Mapping[str, torch.Tensor] | None = None
        """What the call left behind natively, where the reference is driven by itself."""
        self.excused = 0
        """Values that differ in the answers of idle queries alone."""

    def answer(self, pairing: Pairing) -> Answer:
        """Run the reference on the candidate's values, and measure."""
        self.state.restore()
        clean = Clean(pairing, self.recording)
        output = perform(self.reference, self.call, keep=False, listener=clean).output
        after = State(self.reference.root)
        self.state.restore()
        # Elsewhere a mask of this name may mean the contrary.
        known = any(is_of_transformers(side.root) for side in (self.reference, self.candidate))
        idle = idle_queries(self.call.args, self.call.kwargs) if known else None
        exact = Exact(pairing, self.recording, clean.values, idle=idle)
        perform(self.reference, self.call, wide=True, keep=False, listener=exact)
        facts = exact.measured()
        self.excused += exact.excused
        return Answer(facts, after, output)

    def hold(self, pairing: Pairing) -> Held:
        """Return what is measured with partners."""
        return Held(pairing, self.answer(pairing).facts)

    def ran(self) -> tuple[Recording, State]:
        """Let the reference make the call as it is; return what it makes and leaves."""
        self.state.restore()
        recording = perform(self.reference, self.call)
        return recording, State(self.reference.root)

    def free(self, pairing: Pairing, *, wide: bool) -> Free:
        """Let the reference run by itself, in float64 or as it is."""
        self.state.restore()
        free = Free(self.recording, pairing)
        perform(self.reference, self.call, wide=wide, keep=False, listener=free)
        return free

    def mended(
        self, path: str, guilty: Collection[Key], others: Collection[str], pairing: Pairing
    ) -> Mapping[Key, torch.Tensor]:
        """Return what takes the place of one culprit's values, so that it alone is repaired."""
        self.state.restore()
        mended = Mended(path, guilty, others, pairing, self.recording)
        perform(self.reference, self.call, wide=True, keep=False, listener=mended)
        return mended.values
