"""Whether a module's backward is the derivative of its own forward.

Needs no reference: the candidate's module is run in float64, shifted a little along random
directions, and its own gradients are held against the differences. It serves to tell which of the
modules that have no counterpart in the reference made a gradient wrong.
"""

from __future__ import annotations

import torch

from brickline.checking.backward_tensors import inputs_of
from brickline.checking.backward_visits import Visit
from brickline.checking.backward_vjp import Key, Outcome, Partner, gradients, projection
from brickline.checking.snapshot import State

STEP = 1e-6
"""Length of a shift, relative to the values' size."""
DIRECTIONS = 3
ROUNDING = 1e-14
"""Error of a sum in float64, relative to its terms' sizes, with room for what is before it."""
LARGEST = 1e-3
"""Disagreement that kinks and rounding in float64 do not reach."""


def is_derivative(visit: Visit, task: int) -> bool:
    """Whether the candidate's gradients are those of its forward; True where that is not known."""
    state = State(visit.module)
    try:
        return _agrees(visit, task)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
        return True
    finally:
        state.restore()


def _agrees(visit: Visit, task: int) -> bool:
    own = {}
    if isinstance(visit.module, torch.nn.Module):
        own = {
            name: parameter.detach()
            for name, parameter in visit.module.named_parameters()
            if parameter.requires_grad and parameter.dtype.is_floating_point
        }
    partner = Partner(visit.module, {name: name for name in own}, {})
    outcome = gradients(partner, visit, task, wide=True)
    if outcome.narrow:
        return True
    inputs = inputs_of(visit.given)
    places: list[tuple[Key, torch.Tensor]] = [
        (("inputs", number), inputs[number]) for number in sorted(visit.inputs - visit.written)
    ]
    places += [(("parameters", name), parameter) for name, parameter in own.items()]
    generator = torch.Generator().manual_seed(0)
    return all(_along(partner, visit, task, outcome, *place, generator) for place in places)


def _along(
    partner: Partner,
    visit: Visit,
    task: int,
    outcome: Outcome,
    key: Key,
    value: torch.Tensor,
    generator: torch.Generator,
) -> bool:
    found = getattr(outcome, key[0]).get(key[1])
    wide = value.detach().double()
    size = float(wide.square().mean().sqrt()) if wide.numel() else 0.0
    if not size:
        return True
    gradient = torch.zeros_like(wide) if found is None else found.double()
    for _ in range(DIRECTIONS):
        random = torch.randn(wide.shape, generator=generator, dtype=torch.float64)
        direction = size * random.to(wide.device)
        ahead, terms = projection(partner, visit, task, {key: STEP * direction})
        behind, _ = projection(partner, visit, task, {key: -STEP * direction})
        seen = (ahead - behind) / (2 * STEP)
        said = float((gradient * direction).sum())
        scale = max(abs(seen), abs(said), float(gradient.norm()) * size)
        if abs(seen - said) > LARGEST * scale + ROUNDING / STEP * terms:
            return False
    return True
