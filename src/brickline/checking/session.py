"""A check against a reference, call by call.

`Session` stands in for the candidate's root while its user drives it. Each call runs as it would,
is noted, and is then held against the reference (`examining`); the driver gets the candidate's own
output.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from brickline.checking.arbitration import Rerun
from brickline.checking.backward import BackwardWatch
from brickline.checking.endings import trouble_of
from brickline.checking.evidence import Evidence
from brickline.checking.examining import Examination, Position
from brickline.checking.forcing import arguments_written, objects_returned
from brickline.checking.inquiry import Inquiry
from brickline.checking.logic.functions import same_function
from brickline.checking.logic.wide_sides import left_by
from brickline.checking.masks import IDLE, NOTE, is_for_another
from brickline.checking.own_calls import OwnCall, has_other_inputs, own_calls
from brickline.checking.pairing import Pairing
from brickline.checking.partners import have_same_names, partners_of, signature_of
from brickline.checking.performance import Performance
from brickline.checking.recording import Recording
from brickline.checking.sides import Call, Side, in_dtype_of, working_dtype
from brickline.checking.snapshot import RandomState, State
from brickline.checking.stage import is_compiled
from brickline.checking.training import Weights
from brickline.verdict import Verdict

Progress = Callable[[int, "int | None", str], None]
PATIENCE_S = 60.0
"""How long a call waits for its turn while another thread's is checked."""


class Session:
    """Checks every call of a candidate against a reference."""

    def __init__(self, candidate: Any, reference: Any, *, progress: Progress | None = None) -> None:
        self.candidate = Side(candidate)
        self.reference = Side(in_dtype_of(reference, candidate))
        self.reference.given = reference
        self.reference.adds_masks = is_for_another(candidate, self.reference.root)
        self.positions: list[Position] = []
        self.notes: list[str] = []
        self.evidence: dict[str, Evidence] = {}
        self._progress = progress
        self._pairings: dict[int, Pairing] = {}
        self._drive: Callable[[Any], Any] | None = None
        self._own_calls: list[OwnCall] | None = None
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
        self._drive = drive
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
                    left = left_by(self.candidate.root, args, kwargs, output)
                    self._examine(position, performance.recording, call, before, dice, left)
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
        inquiry = Inquiry(self.candidate, self.reference, recording, call)
        state, dice = inquiry.state, RandomState()
        with contextlib.suppress(Exception), torch.no_grad():
            pairing = partners_of(recording, call, self.candidate, self.reference, state)
            position.facts = inquiry.hold(pairing).facts
            for each in position.facts:
                if each.suspicious:
                    each.verdict = Verdict.UNKNOWN
                    each.notes["reason"] = "more than rounding, in a call that cannot be repeated"
                each.release()
        state.restore()
        dice.restore()
        self._excused += inquiry.excused
        self.positions.append(position)

    def _examine(
        self,
        position: Position,
        recording: Recording,
        call: Call,
        before: State,
        dice: RandomState,
        left: Mapping[str, torch.Tensor],
    ) -> None:
        """Ask the reference about one call."""
        inquiry = self._inquiry(position.number, recording, call)
        rerun = Rerun(self._plain_root(), self.candidate, call, before, dice, left)
        try:
            try:
                pairing = self._pairing(recording, inquiry.call, inquiry.state)
            except Exception:
                inquiry.state.restore()
                if not self._drive_the_reference():
                    raise
                inquiry = self._inquiry(position.number, recording, call)
                pairing = self._pairing(recording, inquiry.call, inquiry.state)
        except Exception as error:
            inquiry.state.restore()
            self._compare_functions(position, inquiry, rerun, error)
            return
        examination = Examination(position, inquiry, rerun, self.dtype, self.evidence)
        try:
            examination.examine(pairing)
        except Exception as error:
            inquiry.state.restore()
            position.problem = f"the check of this call failed: {trouble_of(error)}"
        finally:
            self.evidence = examination.evidence
            self._excused += inquiry.excused

    def _inquiry(self, number: int, recording: Recording, call: Call) -> Inquiry:
        """Return the reference before a call: the candidate's, or the one that it is driven to."""
        inquiry = Inquiry(self.candidate, self.reference, recording, call)
        if self._own_calls is not None and number < len(self._own_calls):
            own = self._own_calls[number]
            if not has_other_inputs(call, own.call):
                inquiry.call, inquiry.state, inquiry.left = own.call, own.before, own.left
        return inquiry

    def _drive_the_reference(self) -> bool:
        """Let the drive run the reference, which takes none of the candidate's calls."""
        if self._own_calls is not None or self._drive is None or len(self.positions) > 1:
            return False
        if have_same_names(self.candidate, self.reference):
            return False
        try:
            self._own_calls = own_calls(self.reference, self._drive)
        except Exception:
            return False
        return bool(self._own_calls)

    def _compare_functions(
        self, position: Position, inquiry: Inquiry, rerun: Rerun, error: Exception
    ) -> None:
        """Compare in float64 what the reference cannot run as it is."""
        trouble = f"the reference cannot run this call: {trouble_of(error)}"
        position.problem = trouble
        if have_same_names(self.candidate, self.reference):
            return
        position.logic = same_function(rerun, inquiry)
        if position.logic.problem is None:
            dtype = str(self.dtype).removeprefix("torch.")
            words = "the functions are the same in float64" if not position.logic.differs else ""
            position.problem = f"{words}; in {dtype} {trouble}" if words else None
            position.ends_compared = position.logic.differs

    def _plain_root(self) -> Callable[..., Any]:
        """Return the candidate's root as it is without this session."""
        root = self.candidate.root
        if self.candidate.entry is not None:
            return functools.partial(self.candidate.entry, root)
        plain: Callable[..., Any] = self._original if isinstance(root, torch.nn.Module) else root
        return plain

    def first_act(self, path: str, found: int) -> int:
        """Return the call in which a culprit first acted: it may have kept something wrong."""
        earlier = (each.number for each in self.positions[:found] if path in each.apart)
        return min(earlier, default=found)

    def _pairing(self, recording: Recording, call: Call, state: State) -> Pairing:
        signature = signature_of(recording)
        known = self._pairings.get(signature)
        if known is None:
            known = partners_of(recording, call, self.candidate, self.reference, state)
            state.restore()
            self._pairings[signature] = known
        return known


def _as_function(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, so that signatures and code that inspects them still work."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    return forward
