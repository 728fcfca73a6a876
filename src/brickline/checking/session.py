"""A check against a reference, call by call.

`Session` stands in for the candidate's root while its user drives it. Each call runs as it would,
is noted, and is then held against the reference; the driver gets the candidate's own output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from brickline.checking.alignment import align, signature_of
from brickline.checking.arbitration import Rerun, arbitrate, unstable_values
from brickline.checking.backward import BackwardWatch
from brickline.checking.evidence import Evidence
from brickline.checking.facts import Fact
from brickline.checking.forcing import Clean, Exact, arguments_written, perform
from brickline.checking.gathering import gather
from brickline.checking.keeping import kept_apart
from brickline.checking.pairing import Pairing
from brickline.checking.patching import Free, Mended, Shares, final_errors, shape_differences
from brickline.checking.performance import Performance, Recording
from brickline.checking.settling import settled
from brickline.checking.sides import Call, Side, in_dtype_of, working_dtype
from brickline.checking.snapshot import RandomState, State
from brickline.checking.stage import Key, is_compiled
from brickline.checking.training import Weights

Progress = Callable[[int, "int | None", str], None]


@dataclass
class Position:
    """What one call of the root gave."""

    number: int
    facts: list[Fact] = field(default_factory=list)
    culprits: list[Fact] = field(default_factory=list)
    shares: Shares | None = None
    values: int = 0
    """Values that the candidate made."""
    unpaired: int = 0
    problem: str | None = None
    """Why the reference could not be asked."""
    unstable: int = 0
    """Values that differ between two executions of the candidate."""
    ends_compared: bool = False
    """Whether what the call returns was held against something."""
    apart: frozenset[str] = frozenset()
    """Modules that keep something else after the call than those of the reference."""
    propagated: dict[Key, float] = field(default_factory=dict)
    """Relative L2 of the candidate's values to those of the reference left to itself."""


class Session:
    """Checks every call of a candidate against a reference."""

    def __init__(self, candidate: Any, reference: Any, *, progress: Progress | None = None) -> None:
        self.candidate = Side(candidate)
        self.reference = Side(in_dtype_of(reference, candidate))
        self.positions: list[Position] = []
        self.notes: list[str] = []
        self.evidence: dict[str, Evidence] = {}
        self._progress = progress
        self._pairings: dict[int, Pairing] = {}
        self._compiled = is_compiled(candidate)
        self.backward = BackwardWatch(self.candidate, self.reference)
        self._weights = Weights(candidate, self.reference.root)
        self._stale: str | None = None
        self.dtype = working_dtype(candidate)

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
        number = len(self.positions)
        # Gradients of the last call are held against the weights that made them.
        self.backward.flush()
        stale = self._weights.follow()
        function = self.backward.followed(function, number)
        call = Call.taken(args, kwargs)
        before, dice = State(self.candidate.root), RandomState()
        performance = Performance(
            self.candidate.stage, views=True, parameters=self.candidate.parameters
        )
        if self._compiled:
            output = function(*args, **kwargs)
            performance.returned("", 0, output)
        else:
            with performance.performing():
                output = function(*args, **kwargs)
                performance.returned("", 0, output)
                performance.settle()
        with torch.no_grad():
            arguments_written(performance, call, Call(args, kwargs))
            after, dice_after = State(self.candidate.root), RandomState()
            position = Position(number, values=len(performance.recording.values))
            self.positions.append(position)
            self._stale = self._stale or stale
            position.problem = self._stale
            try:
                if self._stale is None:
                    self._examine(position, performance.recording, call, before, dice)
            finally:
                after.restore()
                dice_after.restore()
        self._weights.keep()
        if self._progress is not None:
            self._progress(number + 1, None, f"call {number}")
        return output

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
            position.problem = f"the reference cannot run this call: {_words(error)}"
            return
        rerun = Rerun(self._plain_root(), self.candidate, call, before, dice)
        try:
            facts, after = self._held(pairing, recording, call, state)
            if pairing.same_code:
                position.apart = kept_apart(before, State(self.candidate.root), state, after)
            if not position.number:
                position.unstable = unstable_values(recording, rerun)
                self._look_at_the_end(position, recording, pairing, rerun, state)
            pairing, facts = settled(
                pairing, facts, lambda each: self._held(each, recording, call, state)[0]
            )
            position.facts = facts
            position.ends_compared = any(not each.reference_key.path for each in facts)
            if any(each.suspicious for each in facts):
                self._accuse(position, recording, pairing, rerun, call, state)
            after.restore()
        except Exception as error:
            state.restore()
            position.problem = f"the check of this call failed: {_words(error)}"

    def _held(
        self, pairing: Pairing, recording: Recording, call: Call, state: State
    ) -> tuple[list[Fact], State]:
        """Run the reference on the candidate's values; return what was measured, and its state."""
        state.restore()
        clean = Clean(pairing, recording)
        perform(self.reference, call, keep=False, listener=clean)
        after = State(self.reference.root)
        state.restore()
        exact = Exact(pairing, recording, clean.values)
        perform(self.reference, call, wide=True, keep=False, listener=exact)
        return exact.measured(), after

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
        for note in shape_differences(recording, free.ends):
            if note not in self.notes:
                self.notes.append(note)

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
        position.culprits = guilty
        fresh = {each.modules[0]: each for each in reversed(guilty)}
        fresh = {path: each for path, each in fresh.items() if path not in self.evidence}
        if fresh:
            self._look_at_the_end(position, recording, pairing, rerun, state)
        for path, fact in fresh.items():
            state.restore()
            self.evidence[path] = gather(fact, path, call, self.candidate, self.reference, rerun)
        for each in position.facts:
            each.release()

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


def _as_function(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, so that signatures and code that inspects them still work."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    return forward


def _words(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
