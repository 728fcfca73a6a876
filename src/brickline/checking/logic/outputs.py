"""The tensors that a call returns, and how far those of two sides are apart."""

from __future__ import annotations

from typing import Any

import torch

from brickline.checking.snapshot import tensors_in

MASKED = 1e30
"""Magnitude from which on an element is the filler of a mask, as infinity is."""


def outputs_of(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of what a call returns."""
    return [tensor.detach() for _, tensor in tensors_in(output) if is_output(tensor)]


def is_output(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that a call returns is compared."""
    return tensor.dtype.is_floating_point and bool(tensor.numel())


def paired(
    ours: list[torch.Tensor], theirs: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the outputs of both sides, each with the first of its shape that is left."""
    left, pairs = list(theirs), []
    for one in ours:
        other = next((each for each in left if each.shape == one.shape), None)
        if other is not None:
            left = [each for each in left if each is not other]
            pairs.append((one, other))
    return pairs


def largest_distance(
    ours: list[torch.Tensor], theirs: list[torch.Tensor], idle: torch.Tensor | None = None
) -> float:
    """Return the largest relative L2 between paired outputs; 0 without pairs.

    Args:
        ours: Of the candidate.
        theirs: Of the reference.
        idle: Which tokens of a batch have no answer. Default None: all have one.
    """
    pairs = paired(ours, theirs)
    return max((distance(_answers(a, idle), _answers(b, idle)) for a, b in pairs), default=0.0)


def _answers(output: torch.Tensor, idle: torch.Tensor | None) -> torch.Tensor:
    """Return what belongs to tokens that have an answer, of all heads where there are some."""
    if idle is None:
        return output
    if output.ndim == 4 and output.shape[1] != idle.shape[1]:
        output = output.transpose(1, 2)
    return output[~idle.to(output.device)] if output.shape[:2] == idle.shape else output


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the relative L2 between two tensors; infinite where others are not finite."""
    one, two = one.double().flatten(), two.to(one.device).double().flatten()
    if not torch.equal(one.isnan(), two.isnan()):
        return float("inf")
    fills = [torch.where(each.abs() > MASKED, each.sign(), 0.0) for each in (one, two)]
    if not torch.equal(fills[0].nan_to_num(), fills[1].nan_to_num()):
        return float("inf")
    plain = (fills[0] == 0) & ~one.isnan()
    gap, size = (one - two)[plain].norm(), two[plain].norm()
    return 0.0 if gap == 0 else float(gap / size) if size > 0 else float("inf")
