"""Whether each module's gradients are right: the backward half of a check.

`BackwardWatch` goes with a session. While the candidate is driven it notes what comes back through
each module call; between the root's calls it asks the reference for the gradients of the same
call, from the candidate's own inputs and the gradients that arrived at the candidate's outputs.
A call whose forward the reference does not confirm is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from brickline.checking.backward_capture import Capture, Pass, Visit, floats_of, inputs_of
from brickline.checking.backward_vjp import (
    DifferentError,
    Outcome,
    Partner,
    TooLargeError,
    gradients,
)
from brickline.checking.facts import CULPRIT_LIMIT, verdict_of
from brickline.checking.sides import Side
from brickline.checking.snapshot import RandomState, State
from brickline.checking.stage import Stage
from brickline.oracle.ratios import Ratios, measure
from brickline.verdicts import Verdict

DISTURBANCES = 2
"""How often rounding is imitated before a gradient is held to be wrong."""
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


class BackwardWatch:
    """Notes the candidate's gradients and holds each module's against the reference's."""

    def __init__(self, candidate_side: Side, reference_side: Side) -> None:
        self.candidate, self.reference = candidate_side, reference_side
        self.notes: Counter[str] = Counter()
        """What was not judged, by reason."""
        self.judged = 0
        """Module calls whose gradients were held against the reference's."""
        self._capture = Capture(candidate_side.stage)
        self._facts: list[BackwardFact] = []
        self._states: dict[int, State] = {}
        self._accused: set[str] = set()

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

    def followed(self, function: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Return the root's function such that its call, of this number, is followed."""
        self.flush()
        if not torch.is_grad_enabled():
            return function
        self._states[number] = State(self.reference.root)
        return self._capture.followed(function, number)

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
        owners = _owners(self.candidate.stage)
        found: list[_Judged] = []
        for visit in backward.visits.values():
            if visit.hidden:
                self.notes["gradients also pass by what it keeps"] += 1
                continue
            judged = self._judge(task, visit, backward, paths, owners)
            if judged is not None:
                found.append(judged)
        found.sort(key=lambda each: (each.visit.position, each.visit.path, each.visit.call))
        guilty = {each.visit.path for each in found if any(fact.guilty for fact in each.facts)}
        for each in found:
            self._settle(each, guilty)

    def _settle(self, judged: _Judged, guilty: set[str]) -> None:
        """Excuse a module for what one that it calls has done."""
        inside = {path for path in guilty if _lies_in(path, judged.visit.path)}
        excused = bool(inside and any(_covers(free, inside) for free in judged.free))
        for fact in judged.facts:
            if fact.guilty and excused:
                fact.verdict = Verdict.PROPAGATED
            if not fact.guilty or fact.path in self._accused:
                fact.release()
        if any(fact.guilty for fact in judged.facts):
            self._accused.add(judged.visit.path)
        self._facts += judged.facts

    def _judge(
        self,
        task: int,
        visit: Visit,
        backward: Pass,
        paths: Counter[str],
        owners: dict[int, int],
    ) -> _Judged | None:
        actual = _actual_parameters(visit, task, backward, paths, owners, self.candidate.stage)
        partner = self._partner(visit, set(actual))
        if partner is None:
            self.notes["the reference has no module of that path"] += 1
            return None
        state = self._states.get(visit.position)
        try:
            with torch.no_grad():
                runs = []
                for wide in (False, True):
                    if state is not None:
                        state.restore()
                    runs.append(gradients(partner, visit, task, wide=wide))
        except DifferentError as error:
            self.notes[str(error)] += 1
            return None
        except TooLargeError:
            self.notes["its weights in float64 take too much memory"] += 1
            return None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.notes[f"the reference cannot run it: {type(error).__name__}"] += 1
            return None
        clean, exact = runs
        if not _same_forward(visit, exact, clean):
            self.notes["its forward is not the reference's"] += 1
            return None
        self.judged += 1
        disturbed = _Disturbed(partner, visit, task, state)
        judged = _Judged(visit, free=exact.free)
        for what, key, mine in _compared(visit, task, actual, exact):
            if mine is None and not backward.whole:
                continue
            fact = _held(visit, what, key, mine, exact, clean, disturbed)
            if fact is not None:
                judged.facts.append(fact)
        return judged

    def _partner(self, visit: Visit, names: set[str]) -> Partner | None:
        modules = self.reference.stage.modules
        if not visit.path:
            module = self.reference.root
        else:
            module = modules.get(visit.path)
            if module is None:
                return None
        theirs: dict[str, torch.Tensor] = {}
        if isinstance(module, torch.nn.Module):
            theirs = dict(module.named_parameters(remove_duplicate=False))
        ours = {}
        if isinstance(visit.module, torch.nn.Module):
            ours = dict(visit.module.named_parameters(remove_duplicate=False))
        same = {
            name: name
            for name in names
            if name in theirs and name in ours and theirs[name].shape == ours[name].shape
        }
        return Partner(module, same, modules)


class _Disturbed:
    """How far rounding carries, found out where a gradient looks wrong."""

    def __init__(self, partner: Partner, visit: Visit, task: int, state: State | None) -> None:
        self._ask = (partner, visit, task)
        self._state = state
        self._runs: list[Outcome] | None = None

    def noise(self, key: tuple[str, Any], exact: torch.Tensor) -> torch.Tensor | None:
        """Return the error that rounding of the inputs makes in one gradient."""
        if self._runs is None:
            self._runs = []
            for seed in range(DISTURBANCES):
                if self._state is not None:
                    self._state.restore()
                with torch.no_grad():
                    self._runs.append(gradients(*self._ask, wide=True, seed=seed))
        squares = torch.zeros_like(exact)
        for run in self._runs:
            found = _gradient(run, key)
            if found is not None:
                squares += (found - exact).square()
        return (squares / DISTURBANCES).sqrt()


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


def _gradient(outcome: Outcome, key: tuple[str, Any]) -> torch.Tensor | None:
    found: torch.Tensor | None = getattr(outcome, key[0]).get(key[1])
    return found


def _held(
    visit: Visit,
    what: str,
    key: tuple[str, Any],
    actual: torch.Tensor | None,
    exact: Outcome,
    clean: Outcome,
    disturbed: _Disturbed,
) -> BackwardFact | None:
    right, rough = _gradient(exact, key), _gradient(clean, key)
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
    owners: dict[int, int],
    stage: Stage,
) -> dict[str, torch.Tensor | None]:
    """Return the gradients that a call gave for parameters, None for none.

    Its own parameters' come from their aliases. Those of modules inside that were not called are
    its own work too; they are known where the call is the only one.
    """
    module = visit.module
    if not isinstance(module, torch.nn.Module):
        return {}
    seen = visit.gradients[task].parameters
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        if name in seen:
            found[name] = seen[name]
            continue
        where = ".".join(filter(None, [visit.path, *name.split(".")[:-1]]))
        if _nearest(where, paths) != visit.path or paths[visit.path] > 1:
            continue
        if owners.get(id(parameter), 0) == 1:
            found[name] = backward.totals.get(id(parameter))
    return found


def _nearest(path: str, paths: Counter[str]) -> str:
    """Return the innermost module that was called, from a path upwards."""
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path


def _owners(stage: Stage) -> dict[int, int]:
    """Return how many modules own each parameter."""
    found: Counter[int] = Counter()
    for module in stage.modules.values():
        found.update(id(each) for each in module._parameters.values() if each is not None)
    return found


def _lies_in(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}."))


def _covers(free: str, inside: set[str]) -> bool:
    return any(path == free or _lies_in(path, free) for path in inside)
