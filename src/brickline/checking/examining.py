"""What is wrong in one call of the candidate, and who did it.

What was measured is thought over: partners that are none are taken away, others are looked for,
then arbitration names culprits, and their shares in the final difference are found out. Knows
nothing of how the candidate is driven, nor of its other calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from brickline.checking.agreeing import contradicted, end_alike, keeps_nothing
from brickline.checking.arbitration import Rerun, arbitrate, leave_open, unstable_values
from brickline.checking.ends import nonfinite_ends, unshown_ends
from brickline.checking.evidence import Evidence
from brickline.checking.facts import Fact
from brickline.checking.gathering import gather
from brickline.checking.held import Held
from brickline.checking.inquiry import Inquiry
from brickline.checking.keeping import kept_apart
from brickline.checking.logic.functions import Logic, same_function
from brickline.checking.pairing import Pairing
from brickline.checking.patching import Shares, apart_in_float64, final_errors
from brickline.checking.resuming import is_vague, resumed
from brickline.checking.settling import MAX_ROUNDS, NO_SHARE, settled, unconfirmed, with_factors
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
        """Find out what is wrong, starting from the partners that alignment found."""
        position, recording = self.position, self._inquiry.recording
        facts, after, output = self._inquiry.answer(pairing)
        if pairing.same_code:
            own = State(self._candidate.root)
            position.apart = kept_apart(self._rerun.before, own, self._inquiry.state, after)
        if not position.number:
            position.unstable = unstable_values(recording, self._rerun)
            self._look_at_the_end(position, pairing)
        held = self._settled(Held(pairing, facts))
        pairing = held.pairing
        if held.facts is not facts:
            facts, after, output = self._inquiry.answer(pairing)
        position.facts = facts
        position.unshown += unshown_ends(recording.output, output, facts)
        reached = any(not each.reference_key.path for each in facts)
        position.ends_compared = reached and not position.unshown
        if any(each.suspicious for each in facts):
            self._accuse(position, pairing)
            self._think_again(pairing)
            if not pairing.same_code:
                self._leave_idle_open()
            self._leave_open()
            for each in position.facts:
                each.release()
        after.restore()
        position.logic = same_function(self._rerun, self._inquiry)

    def _settled(self, held: Held) -> Held:
        """Return what is held with the partners that stay."""
        hold = self._inquiry.hold
        kept = keeps_nothing(self._rerun.before, State(self._candidate.root))
        held = settled(held, hold)
        if held.pairing.same_code or not held.wrong:
            return held
        if is_vague(held, self._inquiry.recording, weights_only=True):
            held = self._looked_closer(held)
        if not kept:
            return held
        apart = self._apart_at_the_end(held.pairing)
        for _ in range(MAX_ROUNDS):
            gone = set() if apart is None else contradicted(held.facts, apart, self._dtype)
            if not gone:
                break
            held = hold(held.pairing.less(gone))
        return held

    def _looked_closer(self, held: Held) -> Held:
        """Look for partners by what is found out only where something is wrong."""
        hold, recording = self._inquiry.hold, self._inquiry.recording
        theirs = self._inquiry.recorded(held.pairing)
        held = with_factors(held, hold, recording, theirs)
        if not is_vague(held, recording):
            return held
        return resumed(held, hold, self._glance, recording, theirs)

    def _glance(self, pairing: Pairing, key: Key) -> bool:
        return self._inquiry.glance(pairing, key, self._dtype)

    def _apart_at_the_end(self, pairing: Pairing) -> float | None:
        """Return how far apart the two sides end in float64, where rounding explains the rest."""
        position = self.position
        if position.shares is None:
            self._look_at_the_end(position, pairing)
        if position.unshown or not end_alike(position.shares, self._dtype):
            return None
        return apart_in_float64(self._rerun, self._inquiry.free(pairing, wide=True).ends)

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

    def _think_again(self, pairing: Pairing) -> None:
        """Do without the partners whose repair changes nothing, where that explains more."""
        position = self.position
        shares = position.shares
        if pairing.same_code or shares is None or not position.culprits:
            return
        doubtful = unconfirmed(position.culprits, shares) - pairing.proven
        if not doubtful:
            return
        less = pairing.less(doubtful)
        before, self.evidence = self.evidence, {}
        other = replace(position, facts=self._inquiry.hold(less).facts, culprits=[])
        if any(each.suspicious for each in other.facts):
            self._accuse(other, less)
        idle = {each.modules[0] for each in position.culprits if each.reference_key in doubtful}
        # A true partner keeps right what comes after it.
        spread = _count_wrong(other) > _count_wrong(position) == 1
        more = not spread and _best_share(other) > _best_share(position) + NO_SHARE
        if more or _is_less(other, position, idle):
            position.facts, position.culprits = other.facts, other.culprits
            position.shares, position.propagated = other.shares, other.propagated
            kept = {each.modules[0] for each in position.culprits}
            before = {path: each for path, each in before.items() if path in kept}
        self.evidence = {**self.evidence, **before}

    def _leave_idle_open(self) -> None:
        """Name none of several that are as likely, if repairing several things changes nothing."""
        position, shares = self.position, self.position.shares
        counts = Counter(each.modules[0] for each in position.culprits)
        for fact in position.culprits:
            share = None if shares is None else shares.share(fact.modules[0])
            idle = share is not None and share <= NO_SHARE
            if idle and counts[fact.modules[0]] > 1 and fact.notes.get("equals"):
                leave_open(fact, self._candidate.stage.display)
        position.culprits = [each for each in position.culprits if each.verdict in GUILTY]

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


def _best_share(position: Position) -> float:
    """Return the largest part of the final difference that repairing one culprit removes."""
    shares = position.shares
    found = (shares and shares.share(each.modules[0]) for each in position.culprits)
    return max((each or 0.0 for each in found), default=0.0)


def _count_wrong(position: Position) -> int:
    return sum(each.suspicious for each in position.facts)


def _is_less(some: Position, more: Position, idle: Collection[str]) -> bool:
    """Whether the culprits are left that were not idle, and nothing else is open."""
    left = {each.modules[0] for each in some.culprits}
    open_facts = any(each.suspicious and each.verdict is Verdict.UNKNOWN for each in some.facts)
    return left <= {each.modules[0] for each in more.culprits} - set(idle) and not open_facts
