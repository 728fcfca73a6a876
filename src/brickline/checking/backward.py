"""Whether each module's gradients are right: the backward half of a check.

`BackwardWatch` goes with a session. While the candidate is driven it notes what comes back through
each module call; between the root's calls it asks the reference for the gradients of the same
call, from the candidate's own inputs and the gradients that arrived at the candidate's outputs.
A call whose forward the reference does not confirm is not judged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from brickline.checking.backward_again import Again, Setting
from brickline.checking.backward_capture import Capture
from brickline.checking.backward_direct import Rests
from brickline.checking.backward_evidence import Accusation, Accuser
from brickline.checking.backward_noise import Disturbed
from brickline.checking.backward_numeric import is_derivative
from brickline.checking.backward_partners import Partners
from brickline.checking.backward_tensors import floats_of, inputs_of
from brickline.checking.backward_visits import Pass, Visit
from brickline.checking.backward_vjp import (
    DifferentError,
    Outcome,
    TooLargeError,
    gradient_of,
    gradients,
)
from brickline.checking.facts import CULPRIT_LIMIT, verdict_of
from brickline.checking.sides import Side
from brickline.checking.snapshot import RandomState, State
from brickline.checking.stage import Stage
from brickline.checking.training import Weights
from brickline.oracle.ratios import Ratios, measure
from brickline.oracle.widen import is_out_of_memory
from brickline.verdict import Verdict

MOST_ACCUSED = 8
"""Modules that are repaired, each with backward passes of the whole model."""
NO_PARTNER = "no share, cause or repro: the reference has no module that stands for it"
STARVED = "memory ran out in float64; check fewer tokens or a smaller batch"
NO_GRADIENT = 1e-5
"""What the reference gives no gradient for is wrong above this part of the arriving gradient."""


@dataclass(eq=False)
class BackwardFact:
    """One gradient of the candidate against the reference's."""

    path: str
    call: int
    position: int
    ratios: Ratios
    what: str
    """Such as ``input 0``, ``parameter weight`` or ``gradient for act_fn``."""
    actual: torch.Tensor | None
    exact: torch.Tensor | None
    clean: torch.Tensor | None
    verdict: Verdict
    reference_path: str = ""

    @property
    def guilty(self) -> bool:
        """Whether rounding does not explain it."""
        return self.verdict is Verdict.CULPRIT

    def release(self) -> None:
        """Let the tensors go; the figures stay."""
        self.actual = self.exact = self.clean = None


@dataclass(eq=False)
class _Judged:
    visit: Visit
    facts: list[BackwardFact] = field(default_factory=list)
    free: set[str] = field(default_factory=set)
    accuse: Callable[[], Accusation] | None = None
    """Finds out what is known of it, should it be wrong."""


class BackwardWatch:
    """Notes the candidate's gradients and holds each module's against the reference's."""

    def __init__(self, candidate_side: Side, reference_side: Side, weights: Weights) -> None:
        self.candidate, self.reference = candidate_side, reference_side
        self._weights = weights
        self.notes: Counter[str] = Counter()
        """Calls that were judged neither themselves nor as a part of another, by reason."""
        self.judged = 0
        """Module calls whose gradients were held against the reference's."""
        self._capture = Capture(candidate_side.stage)
        self._facts: list[BackwardFact] = []
        self._accused: set[str] = set()
        self._partners = Partners(candidate_side, reference_side)
        self._accuser = Accuser(candidate_side, reference_side, weights)
        self.accusations: dict[str, Accusation] = {}
        """Of modules whose gradients are wrong, by path, from the first call in which they are."""

    def following(self) -> AbstractContextManager[None]:
        """Return a context in which the candidate's modules and gradients are followed."""
        return self._following()

    @contextmanager
    def _following(self) -> Iterator[None]:
        with self._capture.following():
            try:
                yield
            finally:
                self.flush()

    def followed(
        self, function: Callable[..., Any], number: int, before: State
    ) -> Callable[..., Any]:
        """Return the root's function such that its call, of this number, is followed.

        Args:
            function: The root's own.
            number: The call's.
            before: What the candidate keeps as the call begins.
        """
        self.flush()
        if not torch.is_grad_enabled():
            return function
        setting = Setting(before, State(self.reference.root))
        return self._capture.followed(function, number, setting)

    @property
    def judging(self) -> bool:
        """Whether gradients are being held against the reference's right now."""
        return self._capture.off

    def culprits(self) -> list[BackwardFact]:
        """Return the gradients that are wrong, in the order in which they were found."""
        return [each for each in self._facts if each.guilty]

    def rows(self) -> list[BackwardFact]:
        """Return all that was measured."""
        return list(self._facts)

    # Judging

    def flush(self) -> None:
        """Judge the backward passes that have run."""
        passes = self._capture.take()
        if not any(each.visits for each in passes.values()):
            return
        now, dice, off = State(self.reference.root), RandomState(), self._capture.off
        self._capture.off = True
        try:
            for task, each in passes.items():
                if each.complete:
                    self._judge_pass(task, each)
                else:
                    self.notes["their backward pass did not come to its end"] += len(each.visits)
        finally:
            self._capture.off = off
            now.restore()
            dice.restore()

    def _judge_pass(self, task: int, backward: Pass) -> None:
        paths = Counter(each.path for each in backward.visits.values())
        rests = Rests(task, backward, _owners(self.candidate.stage))
        found: list[_Judged] = []
        left: list[tuple[Visit, str]] = []
        for visit in backward.visits.values():
            try:
                judged = self._judge(task, visit, backward, paths, rests)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                judged = STARVED
            if isinstance(judged, str):
                left.append((visit, judged))
            else:
                found.append(judged)
        for visit, why in left:
            if not any(_vouches(each, visit) for each in found):
                self.notes[why] += 1
        found.sort(key=lambda each: (each.visit.position, each.visit.path, each.visit.call))
        guilty = {each.visit.path for each in found if any(fact.guilty for fact in each.facts)}
        for each in found:
            self._settle(each, guilty, task)

    def _settle(self, judged: _Judged, guilty: set[str], task: int) -> None:
        """Excuse a module for what one that it calls has done, and name that one."""
        inside = {path for path in guilty if _lies_in(path, judged.visit.path)}
        excused = any(_covers(free, inside) for free in judged.free)
        wrong = [each for each in judged.facts if each.guilty]
        blamed = None
        if wrong and not excused and judged.free:
            blamed = _wrong_inside(judged.visit, judged.free, task)
        for fact in wrong:
            if excused:
                fact.verdict = Verdict.PROPAGATED
            elif blamed is not None:
                fact.path, fact.call = blamed.path, blamed.call
        self._facts += judged.facts
        fresh = {each.path for each in wrong if each.guilty} - self._accused
        for path in fresh:
            if len(self.accusations) >= MOST_ACCUSED:
                known = Accusation(reason=f"no share: {MOST_ACCUSED} modules were repaired already")
            elif judged.accuse is None or blamed is not None:
                known = Accusation(reason=NO_PARTNER)
            else:
                known = judged.accuse()
            self.accusations[path] = known
        for fact in judged.facts:
            if fact.path not in fresh or not fact.guilty:
                fact.release()
        self._accused |= fresh

    def _judge(
        self,
        task: int,
        visit: Visit,
        backward: Pass,
        paths: Counter[str],
        rests: Rests,
    ) -> _Judged | str:
        """Hold a call's gradients against the reference's; return why not, where that cannot be."""
        if visit.hidden:
            return "gradients also pass by what it keeps"
        actual = _actual_parameters(visit, task, backward, paths, rests.owners)
        found = self._partners.of(visit, actual)
        if found is None:
            return "the reference has no module that stands for it"
        partner, path = found
        setting: Setting | None = visit.setting
        state = None if setting is None else setting.theirs
        try:
            with torch.no_grad():
                runs: list[Outcome] = []
                for wide in (False, True):
                    if state is not None:
                        state.restore()
                    direct = runs[0].read if runs else ()
                    runs.append(gradients(partner, visit, task, wide=wide, direct=direct))
        except DifferentError as error:
            return str(error)
        except TooLargeError:
            return "its weights in float64 take too much memory"
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"the reference cannot run it: {type(error).__name__}"
        clean, exact = runs
        if not _same_forward(visit, exact, clean):
            return "its forward is not the reference's"
        self.judged += 1
        disturbed = Disturbed(
            partner, visit, task, state, bool(exact.free) or path != visit.path, clean.read
        )
        again = Again(visit, task, self.candidate.root, self._weights)
        judged = _Judged(visit, free=exact.free)
        judged.accuse = partial(self._accuser.accuse, visit, partner, state, task, backward)
        for what, key, mine in _compared(visit, task, actual, exact):
            if mine is None and not backward.whole:
                continue
            if mine is not None and key[0] == "parameters" and key[1] in partner.transposed:
                mine = mine.t()
            fact = _held(visit, what, key, mine, exact, clean, disturbed)
            if (
                fact is not None
                and fact.guilty
                and not again.confirms(key, fact.actual, fact.exact)
            ):
                fact.verdict = Verdict.NONDETERMINISTIC
                self.notes["wrong once, and another gradient the second time"] += 1
            if fact is not None:
                fact.reference_path = path
                judged.facts.append(fact)
        for name, mine in again.direct(rests, clean):
            key, what = ("direct", name), f"parameter {name}"
            fact = _held(visit, what, key, mine, exact, clean, disturbed)
            if fact is not None:
                fact.reference_path = path
                judged.facts.append(fact)
        return judged


def _vouches(judged: _Judged, visit: Visit) -> bool:
    """Whether a call was judged together with the work of one inside it."""
    above = judged.visit
    if above.position != visit.position or not _lies_in(visit.path, above.path):
        return False
    return any(_is_in(visit.path, free) for free in judged.free)


def _wrong_inside(visit: Visit, free: set[str] | None, task: int) -> Visit | None:
    """Return the innermost call inside whose backward is not the derivative of its forward."""
    for child in visit.children:
        if free is not None and child.path not in free:
            continue
        known = child.gradients.get(task)
        if child.hidden or known is None or not known.outputs:
            continue
        if not is_derivative(child, task):
            return _wrong_inside(child, None, task) or child
    return None


def _compared(
    visit: Visit, task: int, actual: dict[str, torch.Tensor | None], exact: Outcome
) -> Iterator[tuple[str, tuple[str, Any], torch.Tensor | None]]:
    """Yield what is compared: words, where it is found in an outcome, and the candidate's."""
    known = visit.gradients[task]
    for number in sorted(visit.inputs - visit.written):
        yield f"input {number}", ("inputs", number), known.inputs.get(number)
    for name in exact.parameters:
        yield f"parameter {name}", ("parameters", name), actual[name]
    for number, child in enumerate(visit.children):
        if child.path in exact.free:
            continue
        mine = child.gradients.get(task)
        for output in sorted(child.outputs):
            arrived = None if mine is None else mine.outputs.get(output)
            yield f"gradient for {child.path}", ("arrivals", (number, output)), arrived


def _held(
    visit: Visit,
    what: str,
    key: tuple[str, Any],
    actual: torch.Tensor | None,
    exact: Outcome,
    clean: Outcome,
    disturbed: Disturbed,
) -> BackwardFact | None:
    right, rough = gradient_of(exact, key), gradient_of(clean, key)
    if actual is None and right is None:
        return None
    structural = right is None
    if right is None:
        assert actual is not None
        right = torch.zeros_like(actual, dtype=torch.float64)
    if rough is None:
        rough = torch.zeros_like(right)
    if actual is None:
        actual = torch.zeros_like(right, dtype=rough.dtype)
    if actual.shape != right.shape:
        return None
    ratios = measure(actual, right, clean=rough)
    if ratios.z > CULPRIT_LIMIT:
        if structural and _is_nothing(actual, visit):
            return None
        ratios = measure(actual, right, clean=rough, noise=disturbed.noise(key, right))
    verdict = verdict_of(ratios.z)
    return BackwardFact(
        visit.path,
        visit.call,
        visit.position,
        ratios,
        what,
        actual,
        right,
        rough,
        verdict,
        visit.path,
    )


def _is_nothing(actual: torch.Tensor, visit: Visit) -> bool:
    """Whether a gradient that the reference does not give is rounding of zero."""
    largest = max(
        (
            float(each.abs().max())
            for known in visit.gradients.values()
            for each in known.outputs.values()
            if each.numel()
        ),
        default=0.0,
    )
    return float(actual.abs().max()) <= NO_GRADIENT * largest


def _same_forward(visit: Visit, exact: Outcome, clean: Outcome) -> bool:
    """Whether the reference's own forward makes what the candidate's made."""
    theirs = floats_of(visit.returned)
    for mine, right, rough in zip(theirs, exact.outputs, clean.outputs, strict=True):
        if measure(mine, right, clean=rough).z > CULPRIT_LIMIT:
            return False
    for (number, index), right in exact.child_inputs.items():
        mine = inputs_of(visit.children[number].given)[index]
        rough = clean.child_inputs.get((number, index))
        if measure(mine, right, clean=rough).z > CULPRIT_LIMIT:
            return False
    return True


def _actual_parameters(
    visit: Visit,
    task: int,
    backward: Pass,
    paths: Counter[str],
    owners: Mapping[int, list[str]],
) -> dict[str, torch.Tensor | None]:
    """Return the gradients that a call gave for parameters, None for none.

    Its own parameters' come from their aliases; those of modules inside are known in all, where
    the call is the only one.
    """
    module = visit.module
    if not isinstance(module, torch.nn.Module):
        return {}
    seen = visit.gradients[task].parameters
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        holders = owners.get(id(parameter), [])
        if name in seen:
            found[name] = seen[name]
        elif paths[visit.path] == 1 and all(_is_in(each, visit.path) for each in holders):
            found[name] = backward.totals.get(id(parameter))
    return found


def _owners(stage: Stage) -> dict[int, list[str]]:
    """Return the paths of the modules that own each parameter, by the parameter's id."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for path, module in stage.modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)].append(path)
    return found


def _is_in(path: str, above: str) -> bool:
    return path == above or _lies_in(path, above)


def _lies_in(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}."))


def _covers(free: str, inside: set[str]) -> bool:
    return any(path == free or _lies_in(path, free) for path in inside)
