"""Which tensors both sides share, and one set of weights for both.

The candidate's are used where they are the reference's but rounded: then float64 has no rounding
left to tell apart from a fault. What differs by more is a fact of its own and stays as it is. What
has no counterpart is moved by its own rounding to see what that may do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from brickline.align.pieces import Pieces
from brickline.checking.execution.wide_memory import WideMemory
from brickline.checking.state.tensors import held_tensors, is_equal, is_rounded, named_tensors
from brickline.oracle.wide_calls.state import nudge

FLOAT32 = 2.0**-24
"""Roundoff of the dtype in which tables are made."""
MOSTLY = 0.5
"""Share of a tensor from which on it is meant to be the other side's."""


@contextmanager
def carried_weights(candidate: Any, reference: Any) -> Iterator[None]:
    """Let the reference compute with the candidate's weights as long as this lasts.

    Tensors are those of the same name and shape that agree within rounding to the coarser of both
    dtypes, element by element.
    """
    own = named_tensors(candidate)
    with torch.no_grad():
        pairs = [
            (theirs, own[name])
            for name, theirs in named_tensors(reference).items()
            if name in own and is_rounded(own[name], theirs)
        ]
    kept = [(theirs, theirs.data) for theirs, _ in pairs]
    try:
        for theirs, ours in pairs:
            theirs.data = ours.data.to(theirs.device)
        yield
    finally:
        for theirs, data in kept:
            theirs.data = data


# --- what is not shared


def unshared_tensors(root: Any, other: Any, left: WideMemory | None = None) -> dict[str, float]:
    """Return which tensors of one side the other lacks, and by how much rounding may move them.

    That is one rounding in the coarser dtype of both sides. Of a tensor that is there for the most
    part, or of a name that both have, it is one in float32: what differs by more is no rounding.
    """
    own, theirs = held_tensors(root), held_tensors(other)
    dtypes = {tensor.dtype for tensor in (*own.values(), *theirs.values())}
    coarse = max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=0.0)
    unshared: dict[str, float] = {}
    unknown: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        partner = theirs.get(name)
        if left is not None and left.knows(tensor):
            continue
        if partner is None or partner.shape != tensor.shape:
            unknown[name] = tensor
        elif not (is_equal(tensor, partner) or is_rounded(tensor, partner)):
            unshared[name] = FLOAT32
    if unknown:
        pieces = Pieces(_elements(tensor) for tensor in theirs.values())
        for name, tensor in unknown.items():
            share = pieces.share(_elements(tensor))
            if share < 1:
                unshared[name] = FLOAT32 if share >= MOSTLY else max(FLOAT32, coarse)
    return unshared


def _elements(tensor: torch.Tensor) -> np.ndarray:
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    elements: np.ndarray = plain.double().cpu().numpy()
    return elements


@contextmanager
def nudged(root: Any, places: dict[str, float], generator: torch.Generator) -> Iterator[None]:
    """Move tensors of a side by their own rounding as long as this lasts."""
    own = held_tensors(root)
    there = {name: roundoff for name, roundoff in places.items() if name in own}
    kept = [(own[name], own[name].data, roundoff) for name, roundoff in there.items()]
    try:
        for tensor, data, roundoff in kept:
            tensor.data = nudge(data, roundoff, generator)
        yield
    finally:
        for tensor, data, _ in kept:
            tensor.data = data
