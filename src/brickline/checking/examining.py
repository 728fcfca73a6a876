"""What is wrong in one call of the candidate, and who did it.

What was measured is thought over: partners that are none are taken away, others are looked for,
then arbitration names culprits, and their shares in the final difference are found out. Knows
nothing of how the candidate is driven, nor of its other calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from brickline.checking.arbitration import Rerun, arbitrate, leave_open, unstable_values
from brickline.checking.arithmetic.own_errors import Native, first_culprit, own_errors
from brickline.checking.drop_pairs import without_strangers
from brickline.checking.ends import nonfinite_ends, unshown_ends
from brickline.checking.evidence import Evidence
from brickline.checking.facts import Fact
from brickline.checking.gathering import gather
from brickline.checking.held import Held
from brickline.checking.inquiry import Inquiry
from brickline.checking.keeping import kept_apart
from brickline.checking.logic.functions import Logic, same_function
from brickline.checking.logic.known_values import KnownValues
from brickline.checking.pairing import Pairing, is_end
from brickline.checking.patching import Shares, final_errors
from brickline.checking.recording import Recording
from brickline.checking.snapshot import State
from brickline.checking.stage import Key
from brickline.verdict import GUILTY, Verdict

ENOUGH = 0.5
"""Part of the final difference that a culprit explains to be named while something is open."""


@dataclass
class Position:
    """What one call of the root gave."""

    number: int
    facts: list[Fact] = field(default_factory=list)
    culprits: list[Fact] = field(default_factory=list)
    shares: Shares | None = None
    values: int = 0
    """Values that the candidate made."""
    problem: str | None = None
    """Why the reference could not be asked."""
    unstable: int = 0
    """Values that differ between two executions of the candidate."""
    ends_compared: bool = False
    """Whether what the call returns was held against something."""
    unshown: list[str] = field(default_factory=list)
    """What of it was not."""
    apart: frozenset[str] = frozenset()
    """Modules that keep something else after the call than those of the reference."""
    propagated: dict[Key, float] = field(default_factory=dict)
    """Relative L2 of the candidate's values to those of the reference left to itself."""
    logic: Logic | None = None
    """Whether both sides compute the same function; None where nobody asked."""


class Examination:
    """One call of the candidate's root, held against the reference.

    Args:
        position: What is found out about the call.
        inquiry: The reference, ready to be asked.
        rerun: The candidate's call, ready to be made again.
        dtype: What the candidate works in.
        evidence: What is known of culprits so far, by path.
    """

    def __init__(
        self,
        position: Position,
        inquiry: Inquiry,
        rerun: Rerun,
        dtype: torch.dtype,
        evidence: dict[str, Evidence],
    ) -> None:
        self.position = position
        self.evidence = evidence
        self._inquiry = inquiry
        self._rerun = rerun
        self._dtype = dtype
        self._candidate = rerun.side

    def examine(self, pairing: Pairing) -> None:
        """Find out what is wrong: in the logic, and in the arithmetic where the logic is right.

        Args:
            pairing: Partners by name; of different code, only what is returned.
        """
        if pairing.same_code:
            self._examine_arithmetic(pairing)
            self.position.logic = same_function(self._rerun, self._inquiry)
            return
        theirs, after = self._inquiry.ran()
        logic = same_function(self._rerun, self._inquiry, wants_values=True)
        self.position.logic = replace(logic, values=None)
        if logic.values is not None:
            self._compare_own_errors(theirs, *logic.values)
        elif not logic.differs:
            self._examine_arithmetic(pairing)
        self.position.ends_compared = self.position.ends_compared or logic.differs
        if logic.differs or not self.position.number:
            self._look_at_the_end(self.position, pairing)
        after.restore()

    def _compare_own_errors(
        self, theirs: Recording, ours_wide: KnownValues, theirs_wide: KnownValues
    ) -> None:
        """Find out whether the candidate rounds more, where both compute the same function."""
        position, recording = self.position, self._inquiry.recording
        if not position.number:
            position.unstable = unstable_values(recording, self._rerun)
        candidate, reference = Native(recording, ours_wide), Native(theirs, theirs_wide)
        position.facts = own_errors(candidate, reference, self._dtype)
        culprit = first_culprit(position.facts)
        position.culprits = [] if culprit is None else [culprit]
        position.ends_compared = any(is_end(fact.key) for fact in position.facts)

    def _examine_arithmetic(self, pairing: Pairing) -> None:
        position, recording = self.position, self._inquiry.recording
        facts, after, output = self._inquiry.answer(pairing)
        if pairing.same_code:
            own = State(self._candidate.root)
            position.apart = kept_apart(self._rerun.before, own, self._inquiry.state, after)
        if not position.number:
            position.unstable = unstable_values(recording, self._rerun)
            self._look_at_the_end(position, pairing)
        if pairing.same_code:
            held = without_strangers(Held(pairing, facts), self._inquiry.hold)
            if held.facts is not facts:
                pairing = held.pairing
                facts, after, output = self._inquiry.answer(pairing)
        position.facts = facts
        position.unshown += unshown_ends(recording.output, output, facts)
        reached = any(not fact.reference_key.path for fact in facts)
        position.ends_compared = reached and not position.unshown
        if any(fact.suspicious for fact in facts):
            self._accuse(position, pairing)
            self._leave_open()
            for fact in position.facts:
                fact.release()
        after.restore()

    def _look_at_the_end(self, position: Position, pairing: Pairing) -> None:
        """Let the reference run by itself once, and see how far apart the two sides end."""
        recording = self._inquiry.recording
        free = self._inquiry.free(pairing, wide=True)
        rough = self._inquiry.free(pairing, wide=False)

        def mend(path: str, guilty: Collection[Key]) -> Mapping[Key, torch.Tensor]:
            others = {each.modules[0] for each in position.culprits}
            return self._inquiry.mended(path, guilty, others, pairing)

        position.shares = final_errors(
            recording, free.ends, rough.ends, position.culprits, self._rerun, mend
        )
        position.propagated = free.distances
        position.unshown = [] if position.culprits else nonfinite_ends(recording, free.ends)

    def _accuse(self, position: Position, pairing: Pairing) -> None:
        inquiry = self._inquiry
        guilty = arbitrate(position.facts, inquiry.recording, pairing, self._rerun, self._dtype)
        if not guilty:
            return
        for fact in guilty:
            # What the reference has as one brick is one here too.
            outer = map(inquiry.reference.stage.boundary, fact.modules)
            fact.modules = tuple(dict.fromkeys(outer))
        position.culprits = guilty
        fresh = {each.modules[0]: each for each in reversed(guilty)}
        fresh = {path: each for path, each in fresh.items() if path not in self.evidence}
        if fresh:
            self._look_at_the_end(position, pairing)
        for path, fact in fresh.items():
            inquiry.state.restore()
            self.evidence[path] = gather(
                fact, path, inquiry.call, self._candidate, inquiry.reference, self._rerun
            )

    def _leave_open(self) -> None:
        """Name nobody who explains little, where it is open who did the rest."""
        position, shares = self.position, self.position.shares
        if not any(each.suspicious and each.verdict is Verdict.UNKNOWN for each in position.facts):
            return
        for fact in position.culprits:
            share = None if shares is None else shares.share(fact.modules[0])
            if share is None or share < ENOUGH:
                leave_open(fact, self._candidate.stage.display)
        position.culprits = [each for each in position.culprits if each.verdict in GUILTY]
