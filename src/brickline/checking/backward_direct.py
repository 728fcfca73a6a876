"""Weights that a module reads itself although another one inside it owns them, such as tied heads.

What comes back for such a weight in all is known, and what each call of its owner gave; the rest is
the reader's. It is judged only where the candidate's own code, run again, gives that same rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from brickline.checking.backward_visits import Pass, Visit
from brickline.checking.backward_vjp import Outcome, Partner, gradients
from brickline.oracle.widen import unit_roundoff

SLACK = 64.0
"""Unit roundoffs of the summands by which a sum of gradients may be another."""


class Rests:
    """What weights got in a backward pass beside what the calls of their owners gave."""

    def __init__(self, task: int, backward: Pass, owners: Mapping[int, list[str]]) -> None:
        self.owners = owners
        self._whole, self._totals = backward.whole, backward.totals
        self._parts: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._known: dict[int, bool] = {}
        for visit in backward.visits.values():
            known = visit.gradients.get(task)
            if known is None or not isinstance(visit.module, torch.nn.Module):
                continue
            for name, own in visit.module._parameters.items():
                if own is not None and name in known.parameters:
                    self._parts[id(own)].append(known.parameters[name])

    def tells(self, parameter: torch.Tensor) -> bool:
        """Whether the rest can be anybody's but one reader's."""
        return self._whole and len(self.owners.get(id(parameter), ())) == 1

    def is_something(self, parameter: torch.Tensor) -> bool:
        """Whether there is a rest, beyond rounding."""
        known = self._known.get(id(parameter))
        if known is None:
            rest, slack = self.of(parameter)
            known = self._known[id(parameter)] = bool((rest.abs() > slack).any())
        return known

    def of(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rest in float64, and how far off rounding may have brought it."""
        total = self._totals.get(id(parameter))
        rest = torch.zeros_like(parameter, dtype=torch.float64) if total is None else total.double()
        sizes = rest.abs()
        for part in self._parts[id(parameter)]:
            rest, sizes = rest - part.double(), sizes + part.double().abs()
        return rest, SLACK * unit_roundoff(parameter.dtype) * sizes


def direct_gradients(
    visit: Visit,
    task: int,
    rests: Rests,
    clean: Outcome,
    as_it_was: AbstractContextManager[None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradients that a call gave for weights of modules inside it, by name.

    Those that neither side gives are left out, and those about which the sums do not agree.

    Args:
        visit: The call.
        task: The backward pass.
        rests: What weights got in it.
        clean: The reference's gradients in the candidate's dtypes.
        as_it_was: Context in which the candidate is as it was before the call.
    """
    module = visit.module
    if not isinstance(module, torch.nn.Module):
        return
    asked = {}
    for name, right in clean.direct.items():
        parameter = module.get_parameter(name)
        if rests.tells(parameter) and (right is not None or rests.is_something(parameter)):
            asked[name] = parameter
    if not asked:
        return
    with as_it_was:
        own = _own(visit, task, asked)
    for name, parameter in asked.items() if own is not None else ():
        found = own.direct.get(name) if own is not None else None
        mine = torch.zeros_like(parameter) if found is None else found
        rest, slack = rests.of(parameter)
        wide = mine.double().to(rest.device)
        allowed = slack + SLACK * unit_roundoff(mine.dtype) * wide.abs()
        if bool(((rest - wide).abs() <= allowed).all()):
            yield name, mine.detach()


def _own(visit: Visit, task: int, asked: Mapping[str, torch.Tensor]) -> Outcome | None:
    """Return the candidate's own gradients for the call, its calls inside as they were."""
    inside: dict[str, Any] = {each.path: each.module for each in visit.children}
    partner = Partner(visit.module, {name: name for name in asked}, inside)
    try:
        made = gradients(partner, visit, task, wide=False)
    except Exception:
        return None
    return None if made.free else made
