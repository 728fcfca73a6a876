"""A check against a reference, call by call.

`Session` stands in for the candidate's root while its user drives it. Each call runs as it would,
is noted, and is then held against the reference; the driver gets the candidate's own output.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from brickline.checking.agreeing import contradicted, end_alike, keeps_nothing
from brickline.checking.alignment import align, nearness, signature_of
from brickline.checking.arbitration import Rerun, arbitrate, leave_open, unstable_values
from brickline.checking.backward import BackwardWatch
from brickline.checking.endings import trouble_of
from brickline.checking.ends import nonfinite_ends, unshown_ends
from brickline.checking.evidence import Evidence
from brickline.checking.facts import Fact
from brickline.checking.forcing import (
    Clean,
    Exact,
    arguments_written,
    objects_returned,
    perform,
)
from brickline.checking.gathering import gather
from brickline.checking.keeping import kept_apart
from brickline.checking.masks import IDLE, NOTE, idle_queries, is_for_another, is_of_transformers
from brickline.checking.pairing import Pairing
from brickline.checking.patching import Free, Mended, Shares, apart_in_float64, final_errors
from brickline.checking.performance import Performance
from brickline.checking.recording import Recording
from brickline.checking.resuming import is_vague, resumed
from brickline.checking.settling import (
    MAX_ROUNDS,
    NO_SHARE,
    settled,
    unconfirmed,
    with_factors,
    without,
)
from brickline.checking.sides import Call, Side, in_dtype_of, working_dtype
from brickline.checking.snapshot import RandomState, State
from brickline.checking.stage import Key, is_compiled
from brickline.checking.training import Weights
from brickline.verdicts import GUILTY, Verdict

Progress = Callable[[int, "int | None", str], None]
ENOUGH = 0.5
"""Part of the final difference that a culprit explains to be named while something is open."""
PATIENCE_S = 60.0
"""How long a call waits for its turn while another thread's is checked."""


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


class Session:
    """Checks every call of a candidate against a reference."""

    def __init__(self, candidate: Any, reference: Any, *, progress: Progress | None = None) -> None:
        self.candidate = Side(candidate)
        self.reference = Side(in_dtype_of(reference, candidate))
        self.reference.adds_masks = is_for_another(candidate, self.reference.root)
        self.positions: list[Position] = []
        self.notes: list[str] = []
        self.evidence: dict[str, Evidence] = {}
        self._progress = progress
        self._pairings: dict[int, Pairing] = {}
        self._compiled = is_compiled(candidate)
        self._weights = Weights(candidate, self.reference.root)
        self.backward = BackwardWatch(self.candidate, self.reference, self._weights)
        self._stale: str | None = None
        self.dtype = working_dtype(candidate)
        self._turn = threading.RLock()
        self._excused = 0
        self.unobserved = 0
        """Calls that were not checked, because another thread's did not end."""

    def drive(self, drive: Callable[[Any], Any]) -> Any:
        """Drive the candidate as its user does, and check each call of its root."""
        with ExitStack() as stack:
            stack.callback(State(self.reference.root).restore)
            stack.callback(self._weights.restore)
            stack.enter_context(self.candidate.stage.following())
            stack.enter_context(self.reference.stage.following())
            stack.enter_context(self.backward.following())
            root = self.candidate.root
            if not isinstance(root, torch.nn.Module):
                return drive(functools.partial(self._call, root))
            original = root.forward
            wrapper = functools.wraps(original)(functools.partial(self._call, original))
            had = root.__dict__.get("forward")
            root.__dict__["forward"] = _as_function(wrapper, original)
            self._original = original
            self._had = had
            try:
                output = drive(root)
            finally:
                self._unwrap()
            if not self.positions:
                self._drive_whole(drive)
            return output

    def said(self) -> tuple[str, ...]:
        """Return what a reader must know of how the sides were run."""
        found = [NOTE] if self.reference.masks_added else []
        found += [IDLE] if self._excused else []
        return (*self.notes, *found)

    def _drive_whole(self, drive: Callable[[Any], Any]) -> None:
        """Take the drive for the call, where it does not call the root but parts of it."""
        self.notes.append(
            "the drive does not call the model itself, so the whole drive counts as one call"
        )
        ours, theirs = self.candidate, self.reference
        ours.entry = theirs.entry = drive
        self._call(functools.partial(drive, ours.root))

    def _unwrap(self) -> None:
        if self._had is None:
            self.candidate.root.__dict__.pop("forward", None)
        else:
            self.candidate.root.__dict__["forward"] = self._had

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.backward.judging:
            # The candidate is asked for its gradients once more: no call of the driver's.
            return function(*args, **kwargs)
        if not self._turn.acquire(timeout=PATIENCE_S):
            self.unobserved += 1
            return function(*args, **kwargs)
        try:
            return self._checked(function, args, kwargs)
        finally:
            self._turn.release()

    def _checked(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make one call of the root and hold it against the reference."""
        number = len(self.positions)
        # Gradients of the last call are held against the weights that made them.
        self.backward.flush()
        stale = self._weights.follow()
        call = Call.taken(args, kwargs)
        before, dice = State(self.candidate.root), RandomState()
        function = self.backward.followed(function, number, before)
        performance = Performance(
            self.candidate.stage, views=True, parameters=self.candidate.parameters
        )
        try:
            output = self._run(performance, function, args, kwargs)
        except Exception:
            if not self._compiled and stale is None:
                self._look_at_the_rest(performance.recording, call)
            raise
        with torch.no_grad():
            objects_returned(performance, output, Call(args, kwargs))
            arguments_written(performance, call, Call(args, kwargs))
            after, dice_after = State(self.candidate.root), RandomState()
            position = Position(number, values=len(performance.recording.values))
            self.positions.append(position)
            self._stale = self._stale or stale
            position.problem = self._stale
            try:
                if self._stale is None:
                    performance.recording.output = output
                    self._examine(position, performance.recording, call, before, dice)
            finally:
                after.restore()
                dice_after.restore()
        self._weights.keep()
        if self._progress is not None:
            self._progress(number + 1, None, f"call {number}")
        return output

    def _run(
        self,
        performance: Performance,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make one call of the root and note what it makes."""
        if self._compiled:
            output = function(*args, **kwargs)
            performance.returned("", 0, output)
            return output
        with performance.performing():
            output = function(*args, **kwargs)
            performance.returned("", 0, output)
            performance.settle()
        return output

    def _look_at_the_rest(self, recording: Recording, call: Call) -> None:
        """Hold what a call made before it raised against the reference; it cannot be repeated."""
        position = Position(len(self.positions), values=len(recording.values))
        position.problem = "the candidate raised before its end"
        state, dice = State(self.reference.root), RandomState()
        with contextlib.suppress(Exception), torch.no_grad():
            pairing = align(recording, call, self.candidate, self.reference, state)
            state.restore()
            position.facts = self._held(pairing, recording, call, state)[0]
            for each in position.facts:
                if each.suspicious:
                    each.verdict = Verdict.UNKNOWN
                    each.notes["reason"] = "more than rounding, in a call that cannot be repeated"
                each.release()
        state.restore()
        dice.restore()
        self.positions.append(position)

    def _examine(
        self,
        position: Position,
        recording: Recording,
        call: Call,
        before: State,
        dice: RandomState,
    ) -> None:
        """Ask the reference about one call."""
        state = State(self.reference.root)
        try:
            pairing = self._pairing(recording, call, state)
        except Exception as error:
            state.restore()
            position.problem = f"the reference cannot run this call: {trouble_of(error)}"
            return
        rerun = Rerun(self._plain_root(), self.candidate, call, before, dice)
        try:
            facts, after, theirs = self._held(pairing, recording, call, state)
            if pairing.same_code:
                position.apart = kept_apart(before, State(self.candidate.root), state, after)
            if not position.number:
                position.unstable = unstable_values(recording, rerun)
                self._look_at_the_end(position, recording, pairing, rerun, state)
            pairing, left = self._settled(position, recording, pairing, rerun, before, state, facts)
            if left is not facts:
                facts, after, theirs = self._held(pairing, recording, call, state)
            position.facts = facts
            position.unshown += unshown_ends(recording.output, theirs, facts)
            reached = any(not each.reference_key.path for each in facts)
            position.ends_compared = reached and not position.unshown
            if any(each.suspicious for each in facts):
                self._accuse(position, recording, pairing, rerun, call, state)
                self._think_again(position, recording, pairing, rerun, call, state)
                if not pairing.same_code:
                    self._leave_idle_open(position)
                self._leave_open(position)
                for each in position.facts:
                    each.release()
            after.restore()
        except Exception as error:
            state.restore()
            position.problem = f"the check of this call failed: {trouble_of(error)}"

    def _settled(
        self,
        position: Position,
        recording: Recording,
        pairing: Pairing,
        rerun: Rerun,
        before: State,
        state: State,
        facts: list[Fact],
    ) -> tuple[Pairing, list[Fact]]:
        """Return the partners that stay, and what was measured with them."""

        def hold(tried: Pairing) -> list[Fact]:
            return self._held(tried, recording, rerun.call, state)[0]

        kept = keeps_nothing(before, State(self.candidate.root))
        pairing, facts = settled(pairing, facts, hold)
        if pairing.same_code or not any(each.suspicious for each in facts):
            return pairing, facts
        if is_vague(pairing, facts, recording, weights_only=True):
            pairing, facts = self._looked_closer(pairing, facts, recording, rerun.call, state, hold)
        if not kept:
            return pairing, facts
        apart = self._apart_at_the_end(position, recording, pairing, rerun, state)
        for _ in range(MAX_ROUNDS):
            gone = set() if apart is None else contradicted(facts, apart, self.dtype)
            if not gone:
                break
            pairing = without(pairing, gone)
            facts = hold(pairing)
        return pairing, facts

    def _looked_closer(
        self,
        pairing: Pairing,
        facts: list[Fact],
        recording: Recording,
        call: Call,
        state: State,
        hold: Callable[[Pairing], list[Fact]],
    ) -> tuple[Pairing, list[Fact]]:
        """Look for partners by what is found out only where something is wrong."""

        def glance(tried: Pairing, key: Key) -> bool:
            state.restore()
            listener = Clean(tried, recording)
            try:
                perform(self.reference, call, keep=False, listener=listener)
            except Exception:
                # A value in the wrong place may be one with which it cannot run.
                return False
            return listener.is_near(key, 2 * nearness(self.dtype))

        state.restore()
        theirs = perform(self.reference, call, views=True, listener=Clean(pairing, recording))
        pairing, facts = with_factors(pairing, facts, hold, recording, theirs, nearness)
        if not is_vague(pairing, facts, recording):
            return pairing, facts
        return resumed(pairing, facts, hold, glance, recording, theirs)

    def _apart_at_the_end(
        self,
        position: Position,
        recording: Recording,
        pairing: Pairing,
        rerun: Rerun,
        state: State,
    ) -> float | None:
        """Return how far apart the two sides end in float64, where rounding explains the rest."""
        if position.shares is None:
            self._look_at_the_end(position, recording, pairing, rerun, state)
        if position.unshown or not end_alike(position.shares, self.dtype):
            return None
        state.restore()
        free = Free(recording, pairing)
        perform(self.reference, rerun.call, wide=True, keep=False, listener=free)
        return apart_in_float64(rerun, free.ends)

    def _held(
        self, pairing: Pairing, recording: Recording, call: Call, state: State
    ) -> tuple[list[Fact], State, Any]:
        """Run the reference on the candidate's values.

        Returns what was measured, the state that it leaves, and what it returns.
        """
        state.restore()
        clean = Clean(pairing, recording)
        theirs = perform(self.reference, call, keep=False, listener=clean).output
        after = State(self.reference.root)
        state.restore()
        # Elsewhere a mask of this name may mean the contrary.
        known = is_of_transformers(self.reference.root) or is_of_transformers(self.candidate.root)
        idle = idle_queries(call.args, call.kwargs) if known else None
        exact = Exact(pairing, recording, clean.values, idle=idle)
        perform(self.reference, call, wide=True, keep=False, listener=exact)
        facts = exact.measured()
        self._excused += exact.excused
        return facts, after, theirs

    def _plain_root(self) -> Callable[..., Any]:
        """Return the candidate's root as it is without this session."""
        root = self.candidate.root
        if self.candidate.entry is not None:
            return functools.partial(self.candidate.entry, root)
        plain: Callable[..., Any] = self._original if isinstance(root, torch.nn.Module) else root
        return plain

    def _look_at_the_end(
        self,
        position: Position,
        recording: Recording,
        pairing: Pairing,
        rerun: Rerun,
        state: State,
    ) -> None:
        """Let the reference run by itself once, and see how far apart the two sides end."""
        state.restore()
        free = Free(recording, pairing)
        perform(self.reference, rerun.call, wide=True, keep=False, listener=free)
        state.restore()
        rough = Free(recording, pairing)
        perform(self.reference, rerun.call, keep=False, listener=rough)

        def mend(path: str, guilty: Collection[Key]) -> Mapping[Key, torch.Tensor]:
            state.restore()
            others = {each.modules[0] for each in position.culprits}
            mended = Mended(path, guilty, others, pairing, recording)
            perform(self.reference, rerun.call, wide=True, keep=False, listener=mended)
            return mended.values

        position.shares = final_errors(
            recording, free.ends, rough.ends, position.culprits, rerun, mend
        )
        position.propagated = free.distances
        position.unshown = [] if position.culprits else nonfinite_ends(recording, free.ends)

    def _accuse(
        self,
        position: Position,
        recording: Recording,
        pairing: Pairing,
        rerun: Rerun,
        call: Call,
        state: State,
    ) -> None:
        guilty = arbitrate(position.facts, recording, pairing, rerun, self.dtype)
        if not guilty:
            return
        for fact in guilty:
            # What the reference has as one brick is one here too.
            outer = map(self.reference.stage.boundary, fact.modules)
            fact.modules = tuple(dict.fromkeys(outer))
        position.culprits = guilty
        fresh = {each.modules[0]: each for each in reversed(guilty)}
        fresh = {path: each for path, each in fresh.items() if path not in self.evidence}
        if fresh:
            self._look_at_the_end(position, recording, pairing, rerun, state)
        for path, fact in fresh.items():
            state.restore()
            self.evidence[path] = gather(fact, path, call, self.candidate, self.reference, rerun)

    def _think_again(
        self,
        position: Position,
        recording: Recording,
        pairing: Pairing,
        rerun: Rerun,
        call: Call,
        state: State,
    ) -> None:
        """Do without the partners whose repair changes nothing, where that explains more."""
        shares = position.shares
        if pairing.same_code or shares is None or not position.culprits:
            return
        doubtful = unconfirmed(position.culprits, shares) - pairing.proven
        if not doubtful:
            return
        less = without(pairing, doubtful)
        before, self.evidence = self.evidence, {}
        other = replace(position, facts=self._held(less, recording, call, state)[0], culprits=[])
        if any(each.suspicious for each in other.facts):
            self._accuse(other, recording, less, rerun, call, state)
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

    def _leave_idle_open(self, position: Position) -> None:
        """Name none of several that are as likely, if repairing several things changes nothing."""
        shares = position.shares
        counts = Counter(each.modules[0] for each in position.culprits)
        for fact in position.culprits:
            share = None if shares is None else shares.share(fact.modules[0])
            idle = share is not None and share <= NO_SHARE
            if idle and counts[fact.modules[0]] > 1 and fact.notes.get("equals"):
                leave_open(fact, self.candidate.stage.display)
        position.culprits = [each for each in position.culprits if each.verdict in GUILTY]

    def _leave_open(self, position: Position) -> None:
        """Name nobody who explains little, where it is open who did the rest."""
        shares = position.shares
        if not any(each.suspicious and each.verdict is Verdict.UNKNOWN for each in position.facts):
            return
        for fact in position.culprits:
            share = None if shares is None else shares.share(fact.modules[0])
            if share is None or share < ENOUGH:
                leave_open(fact, self.candidate.stage.display)
        position.culprits = [each for each in position.culprits if each.verdict in GUILTY]

    def first_act(self, path: str, found: int) -> int:
        """Return the call in which a culprit first acted: it may have kept something wrong."""
        earlier = (each.number for each in self.positions[:found] if path in each.apart)
        return min(earlier, default=found)

    def _pairing(self, recording: Recording, call: Call, state: State) -> Pairing:
        signature = signature_of(recording)
        known = self._pairings.get(signature)
        if known is None:
            known = align(recording, call, self.candidate, self.reference, state)
            state.restore()
            self._pairings[signature] = known
        return known


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


def _as_function(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, so that signatures and code that inspects them still work."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    return forward
