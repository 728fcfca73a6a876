"""Let both sides compute with one set of weights: what one was made from is put in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from brickline.checking.state.answer import Carried
from brickline.checking.state.tensors import Tensors, agreement, held_tensors, roundoff


def carried_values(
    own: Tensors, sources: Tensors, carried: Mapping[str, Carried]
) -> dict[str, torch.Tensor]:
    """Return what a side computes with in float64 in place of its own tensors.

    What differs beyond rounding stays the side's own, and so does a tensor that a call has changed.

    Args:
        own: The side's tensors.
        sources: Those of the other side, as it computes with them.
        carried: What the side's were made from.
    """
    values: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, each in carried.items():
            tensor = own.get(name)
            if tensor is None or any(source not in sources for source in each.term.names):
                continue
            value, size = (part.to(tensor.device) for part in each.term.evaluate(sources))
            if value.shape != tensor.shape:
                continue
            within = each.within
            if not isinstance(tensor, torch.nn.Parameter):
                coarse = max((roundoff(sources[s].dtype) for s in each.term.names), default=0.0)
                within = agreement(tensor, value, size, max(coarse, roundoff(tensor.dtype))).within
            if within is not None:
                value = torch.where(within.to(value.device), value, tensor.detach().double())
            values[name] = value
    return values


@contextmanager
def holding(root: Any, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a side hold other values in some of its tensors as long as this lasts."""
    own = held_tensors(root) if values else {}
    kept = [(own[name], own[name].data, value) for name, value in values.items() if name in own]
    try:
        for tensor, _, value in kept:
            # A call may write to a buffer, but not to what is carried into the next one.
            tensor.data = value if isinstance(tensor, torch.nn.Parameter) else value.clone()
        yield
    finally:
        for tensor, data, _ in kept:
            tensor.data = data
