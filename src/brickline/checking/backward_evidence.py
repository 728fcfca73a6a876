"""The evidence against a module whose gradients are wrong: its own VJP, and what repairs it.

Its call is made again on the inputs that it had, with the gradients that arrived at its outputs:
by the candidate's module, and by the reference's in float64. Then the whole backward pass is run
again with the reference's module in its place, to see how much of the final difference goes away.
The final difference is that of the gradients of all weights and of the root's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from brickline.checking.backward_again import Again
from brickline.checking.backward_partners import Partners
from brickline.checking.backward_visits import Pass, Visit
from brickline.checking.backward_vjp import Key, Outcome, Partner, gradient_of, gradients
from brickline.checking.evidence import Backward, Evidence
from brickline.checking.facts import CULPRIT_LIMIT
from brickline.checking.sides import Side
from brickline.checking.snapshot import State
from brickline.checking.training import Weights
from brickline.oracle.ratios import measure

MOST_BYTES = 1 << 30
"""Weights and gradients beyond this are not kept for an explanation."""


@dataclass(frozen=True)
class Accusation:
    """What is known of one module whose gradients are wrong."""

    evidence: Evidence | None = None
    share: float | None = None
    """Part of the final difference of the gradients that goes away when it is repaired."""
    left: float | None = None
    """The difference that is left then."""
    reason: str | None = None
    """Why something of this is not known."""


class Accuser:
    """Makes calls and backward passes of the two sides again."""

    def __init__(self, candidate: Side, reference: Side, weights: Weights) -> None:
        self._candidate, self._reference = candidate, reference
        self._weights = weights
        self._partners = Partners(candidate, reference)

    def accuse(
        self, visit: Visit, partner: Partner, state: State | None, task: int, backward: Pass
    ) -> Accusation:
        """Return what repairs a module and what shows its error; never raises."""
        again = Again(visit, task, self._candidate.root, self._weights)
        whole = Partner(partner.module, partner.parameters, {}, partner.transposed)
        evidence, why = None, None
        try:
            with torch.no_grad():
                evidence = self._evidence(again, visit, whole, state, task)
            if evidence is None:
                why = "no cause and no repro: together with what it calls, its gradient is right"
        except Exception as error:
            why = f"no cause and no repro: its call cannot be made again ({type(error).__name__})"
        root = next((each for each in backward.visits.values() if not each.path), None)
        if root is None or root.hidden or root.position != visit.position:
            return Accusation(evidence, reason=why or "no share: the root's gradients are not seen")
        try:
            with torch.no_grad():
                first, left = self._differences(again, visit, root, whole, state, task)
        except Exception as error:
            words = f"no share: the pass cannot be made again ({type(error).__name__})"
            return Accusation(evidence, reason=why or words)
        share = min(max(1.0 - left / first, 0.0), 1.0) if first > 0 else None
        return Accusation(evidence, share, left, why)

    # The module alone

    def _evidence(
        self, again: Again, visit: Visit, partner: Partner, state: State | None, task: int
    ) -> Evidence | None:
        with again.as_it_was():
            names = {name: name for name in partner.parameters}
            mine = gradients(Partner(visit.module, names, {}), visit, task, wide=False)
            kept = _weights_of(visit.module)
        clean, exact = (_theirs(partner, visit, task, state, wide=wide) for wide in (False, True))
        worst: tuple[float, Key] | None = None
        for key in _keys(exact):
            ours, right, rough = (gradient_of(each, key) for each in (mine, exact, clean))
            if ours is None or right is None:
                continue
            turned = _turned(ours, key, partner)
            if turned.shape != right.shape:
                continue
            z = measure(turned, right, clean=rough).z
            if worst is None or z > worst[0]:
                worst = (z, key)
        if worst is None or worst[0] <= CULPRIT_LIMIT:
            return None
        return self._chosen(worst[1], visit, task, (mine, clean, exact), partner, kept)

    def _chosen(
        self,
        key: Key,
        visit: Visit,
        task: int,
        runs: tuple[Outcome, Outcome, Outcome],
        partner: Partner,
        kept: Mapping[str, torch.Tensor],
    ) -> Evidence:
        mine, clean, exact = (gradient_of(each, key) for each in runs)
        assert mine is not None
        assert exact is not None
        arrived = visit.gradients[task].outputs
        if key[0] == "parameters" and key[1] in partner.transposed:
            exact, clean = exact.t(), None if clean is None else clean.t()
        values = (*visit.given.args, *visit.given.kwargs.values())
        given = [each for each in values if _is_plain(each)]
        return Evidence(
            self._candidate.stage.display(visit.path),
            mine,
            exact,
            clean,
            inputs=_factors(key, list(arrived.values()), given),
            module=visit.module,
            args=visit.given.args,
            kwargs=visit.given.kwargs,
            backward=Backward(arrived, key, kept),
        )

    # The whole pass

    def _differences(
        self,
        again: Again,
        visit: Visit,
        root: Visit,
        partner: Partner,
        state: State | None,
        task: int,
    ) -> tuple[float, float]:
        """Return how far the candidate's gradients are from the reference's, and repaired ones."""
        model = self._candidate.root
        named: Any = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
        names = {name: name for name, each in named if each.requires_grad}
        found = self._partners.of(root, names)
        if found is None:
            raise ValueError("the reference has no root")
        theirs = Partner(found[0].module, found[0].parameters, {}, found[0].transposed)
        right = _theirs(theirs, root, task, state, wide=False)
        ours = Partner(model, names, {})
        with again.as_it_was():
            mine = gradients(ours, root, task, wide=False)
        if state is not None:
            state.restore()
        with again.as_it_was(), _repaired(visit.module, partner):
            mended = gradients(ours, root, task, wide=False)
        return _difference(mine, right, theirs), _difference(mended, right, theirs)


def _theirs(
    partner: Partner, visit: Visit, task: int, state: State | None, *, wide: bool
) -> Outcome:
    if state is not None:
        state.restore()
    return gradients(partner, visit, task, wide=wide)


@contextmanager
def _repaired(module: Any, partner: Partner) -> Iterator[None]:
    """Let the reference's module do a module's work, with the weights that it has."""
    if not isinstance(module, torch.nn.Module) or not isinstance(partner.module, torch.nn.Module):
        raise TypeError("only modules can be repaired")
    had: Callable[..., Any] | None = module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(module.named_parameters(remove_duplicate=False))
        weights = {
            theirs: own[ours].t() if ours in partner.transposed else own[ours]
            for ours, theirs in partner.parameters.items()
        }
        return functional_call(partner.module, weights, args, kwargs)

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if had is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = had


def _keys(outcome: Outcome) -> Iterator[Key]:
    for number in outcome.inputs:
        yield "inputs", number
    for name in outcome.parameters:
        yield "parameters", name


def _turned(gradient: torch.Tensor, key: Key, partner: Partner) -> torch.Tensor:
    return gradient.t() if key[0] == "parameters" and key[1] in partner.transposed else gradient


def _difference(mine: Outcome, right: Outcome, partner: Partner) -> float:
    """Return the relative L2 of all gradients of one run to those of another."""
    apart = size = 0.0
    for key in _keys(right):
        theirs, ours = gradient_of(right, key), gradient_of(mine, key)
        if theirs is None:
            continue
        wide = theirs.double()
        size += float(wide.square().sum())
        if ours is not None:
            wide = wide - _turned(ours, key, partner).to(wide.device).double()
        apart += float(wide.nan_to_num(1e30).square().sum())
    return (apart / size) ** 0.5 if size else 0.0


def _weights_of(module: Any) -> dict[str, torch.Tensor]:
    """Return copies of a module's weights as they are now."""
    if not isinstance(module, torch.nn.Module):
        return {}
    named = dict((*module.named_parameters(), *module.named_buffers()))
    if sum(each.numel() * each.element_size() for each in named.values()) > MOST_BYTES:
        return {}
    return {name: each.detach().clone() for name, each in named.items()}


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _factors(
    key: Key, arrived: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what a gradient is made from; that of a weight is a sum over all rows."""
    if key[0] == "inputs":
        return [*arrived, *given]
    return [*(_rows_of(each).t() for each in arrived), *map(_rows_of, given)]


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)


@contextmanager
def with_weights(evidence: Evidence) -> Iterator[None]:
    """Give a module the weights that it had in the call, as long as this lasts."""
    backward, module = evidence.backward, evidence.module
    if backward is None or not isinstance(module, torch.nn.Module):
        yield
        return
    named = dict((*module.named_parameters(), *module.named_buffers()))
    before = {name: named[name].data for name in backward.weights if name in named}
    try:
        for name in before:
            named[name].data = backward.weights[name]
        yield
    finally:
        for name, data in before.items():
            named[name].data = data
