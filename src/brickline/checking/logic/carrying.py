"""Which tensors both sides share, and one set of weights for both.

The candidate's are used where they are the reference's but rounded: then float64 has no rounding
left to tell apart from a fault. What differs by more is a fact of its own and stays as it is. What
has no counterpart is moved by its own rounding to see what that may do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from brickline.checking.snapshot import tensors_in
from brickline.checking.weights import WeightMap
from brickline.oracle.wide_calls.state import nudge

FLOAT32 = 2.0**-24
"""Roundoff of the dtype in which tables are made."""
SLACK = 1.001
"""A rounding to nearest, and the rounding of the quotient that measures it."""


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


def named_tensors(root: Any) -> dict[str, torch.Tensor]:
    """Return the floating-point parameters and buffers of a module, by its own names."""
    if not isinstance(root, torch.nn.Module):
        return {}
    return {
        plain_name(name): tensor
        for name, tensor in (*root.named_parameters(), *root.named_buffers())
        if tensor.dtype.is_floating_point
    }


def plain_name(path: str) -> str:
    """Return the path of a module or tensor without what torch.compile puts in between."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def is_rounded(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors differ, and by no more than one rounding of each element."""
    if ours.shape != theirs.shape or not ours.numel():
        return False
    if ours.layout is not torch.strided or theirs.layout is not torch.strided:
        return False
    if not (ours.dtype.is_floating_point and theirs.dtype.is_floating_point):
        return False
    if is_equal(ours, theirs):
        return False
    coarse = max(torch.finfo(ours.dtype).eps, torch.finfo(theirs.dtype).eps) / 2
    one, two = ours.double(), theirs.to(ours.device).double()
    return bool(((one - two).abs() <= SLACK * coarse * torch.maximum(one.abs(), two.abs())).all())


def is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors are the same to the bit."""
    same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return bool(same and torch.equal(ours, theirs.to(ours.device)))


# --- what is not shared


def unshared_tensors(
    root: Any, other: Any, known: WeightMap | None, which: int
) -> dict[str, float]:
    """Return which tensors of one side the other lacks, and by how much rounding may move them.

    That is one rounding in the coarser dtype of both sides. Of a name that both have, it is one in
    float32: what differs by more there is no rounding.

    Args:
        root: The side.
        other: The other one.
        known: Partners of the candidate's weights under other names; None: nobody asked.
        which: 0 for the candidate, 1 for the reference.
    """
    own, theirs = held_tensors(root), held_tensors(other)
    partners = _partners(known, which)
    dtypes = {each.dtype for each in (*own.values(), *theirs.values())}
    coarse = max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=0.0)
    found: dict[str, float] = {}
    for name, tensor in own.items():
        partner = theirs.get(name)
        if partner is not None and partner.shape == tensor.shape:
            if not (is_equal(tensor, partner) or is_rounded(tensor, partner)):
                found[name] = FLOAT32
        elif name not in partners:
            found[name] = max(FLOAT32, coarse)
    return found


def held_tensors(root: Any) -> dict[str, torch.Tensor]:
    """Return all floating-point and complex tensors that a module holds, plain ones included."""
    if not isinstance(root, torch.nn.Module):
        return {}
    found = dict(root.named_parameters())
    for path, module in root.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if name.startswith("_") and name in vars(torch.nn.Module()):
                continue
            for place, tensor in () if isinstance(value, torch.nn.Module) else tensors_in(value):
                found.setdefault(f"{path}.{name}{place}" if path else f"{name}{place}", tensor)
    return {
        plain_name(name): tensor
        for name, tensor in found.items()
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex
    }


def _partners(known: WeightMap | None, which: int) -> set[str]:
    if known is None:
        return set()
    if which == 0:
        return {*known.whole, *known.rows, *known.ours}
    parts = {rows.reference for several in known.rows.values() for rows in several}
    return {*known.whole.values(), *known.inverse, *known.theirs, *parts}


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
