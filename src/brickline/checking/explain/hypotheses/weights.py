"""Hypotheses about weights: rows exchanged or scaled, a transpose, another layer's weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from brickline.checking.execution.tape import CONSTANT, WEIGHT, Value
from brickline.checking.explain.hypotheses.slices import Places, places_of, slice_words
from brickline.checking.explain.region import Region, Trial

Array = np.ndarray
LIKE = 1e-9
"""Part of the largest element by which equal weights may differ, beside their tolerance."""
HALF = 0.5
"""Part of a weight's rows that must be where they belong to say where the others do."""


def other_weights(region: Region) -> Iterator[Trial]:
    """Yield the region with the reference's elements in one of its weights."""
    for index in region.program.inputs:
        if index >= len(region.ours.values):
            continue
        value = region.ours.values[index]
        if value.step.name not in (WEIGHT, CONSTANT) or not value.floating:
            continue
        value = replace(value, tensor=region.known[index], _flat=None)
        name = value.name or "a constant tensor"
        seen: list[torch.Tensor] = []
        for tensor, words, repair in (*_whole(region, value), *_patched(region, value)):
            if any(torch.equal(tensor, other) for other in seen):
                continue
            seen.append(tensor)
            facts = {"kind": "weight", "tensor": name, **repair}
            yield Trial(region.program.with_input(index, tensor), f"{name} {words}", facts)


def _partners(region: Region) -> Iterator[Value]:
    """Yield the reference's weights behind the right value, nearest first."""
    for index in (region.partner, *region.sources):
        value = region.theirs.values[index]
        if value.floating and value.step.name in (WEIGHT, CONSTANT):
            yield value


def _whole(region: Region, value: Value) -> Iterator[tuple[torch.Tensor, str, dict[str, Any]]]:
    """Yield whole weights of the reference in the place of one of ours."""
    mine = value.tensor
    partner = region.theirs.values[region.partner]
    if value.index == region.program.output and partner.step.name in (WEIGHT, CONSTANT):
        other = partner
        name = other.name or "value"
        words = _difference(region, value, region.right_tensor, name, other.shape == mine.shape)
        yield region.right_tensor, words, {"right": name}
    for other in _partners(region):
        if other.tensor.numel() != mine.numel() or mine.numel() < 2:
            continue
        for tensor in region.in_layout(other.index, mine.shape):
            same = other.shape == mine.shape
            words = _difference(region, value, tensor, other.name or "constant", same)
            yield tensor, words, {"right": other.name}


def _difference(region: Region, value: Value, right: torch.Tensor, name: str, same: bool) -> str:
    """Say how a weight differs from the one that belongs there."""
    mine = value.tensor
    there = f"the reference's {name}"
    ours, theirs = mine.numpy(force=True), right.numpy(force=True)
    tolerance = _tolerance(region, value, theirs)
    best: str | None = None
    for dim in range(mine.ndim):
        if mine.shape[dim] < 2 or (mine.numel() == mine.shape[dim] and mine.ndim > 1):
            continue
        places = places_of(ours, theirs, dim, tolerance)
        words = slice_words(ours, theirs, dim, places)
        if words is not None:
            kind = (
                "element"
                if mine.ndim == 1
                else "row"
                if dim == 0
                else "column"
                if mine.ndim == 2
                else f"slice of dimension {dim}"
            )
            best = f"is not {there}: by {kind}s, {words}"
            break
    if not bool(mine.any()):
        return f"is zero, and {there} is not"
    factor = float((mine * right).sum() / (right * right).sum().clamp_min(1e-300))
    if float((mine - factor * right).abs().max()) <= tolerance:
        return f"is {factor:.6g} times {there}"
    known = region.search.bank.equals(value.flat, region.ours.tolerances[value.index])
    names = [region.theirs.values[k].name for k in known if region.theirs.values[k].name]
    if (
        mine.ndim == 2
        and mine.shape[0] == mine.shape[1]
        and float((mine.T - right).abs().max()) <= tolerance
    ):
        return f"is the transpose of {there}"
    if best is not None:
        return best
    if names and names[0] != name:
        return f"equals the reference's {names[0]}; {name} belongs there"
    if names:
        return f"has the elements of {there} in another order"
    gap = float((mine - right).norm() / right.norm().clamp_min(1e-300))
    return f"differs from {there} by {gap:.2g} (relative L2)"


def _tolerance(region: Region, value: Value, right: Array) -> float:
    return region.ours.tolerances[value.index] + LIKE * float(np.abs(right).max(initial=0.0))


def _patched(region: Region, value: Value) -> Iterator[tuple[torch.Tensor, str, dict[str, Any]]]:
    """Yield one of our weights with the rows put right that are not where the others say."""
    mine = value.tensor.numpy(force=True)
    for dim in range(min(mine.ndim, 2)):
        rows = np.moveaxis(mine, dim, 0).reshape(mine.shape[dim], -1)
        right = rows.copy()
        facts: list[str] = []
        for other in _partners(region):
            theirs = other.tensor.numpy(force=True)
            for axis in range(min(theirs.ndim, 2)):
                known = np.moveaxis(theirs, axis, 0).reshape(theirs.shape[axis], -1)
                if known.shape[1] != rows.shape[1]:
                    continue
                tolerance = _tolerance(region, value, theirs)
                shifted = _expected(rows, known, tolerance)
                for first, last, offset, places in shifted:
                    part, wanted = rows[first:last], known[first - offset : last - offset]
                    words = slice_words(part, wanted, 0, places)
                    if words is None:
                        continue
                    right[first:last] = wanted
                    kind = "element" if mine.ndim == 1 else "row" if dim == 0 else "column"
                    behind = f" from {kind} {first} on" if first else ""
                    facts.append(f"{other.name or 'a constant'}{behind}: by {kind}s, {words}")
        if facts:
            shape = np.moveaxis(mine, dim, 0).shape
            tensor = np.moveaxis(right.reshape(shape), 0, dim)
            made = torch.from_numpy(np.ascontiguousarray(tensor)).to(value.tensor.device)
            words = "is not the reference's " + "; ".join(dict.fromkeys(facts))
            yield made, words, {"dimension": dim}


def _expected(
    rows: Array, known: Array, tolerance: float
) -> Iterator[tuple[int, int, int, Places]]:
    """Yield where a weight of the reference lies in ours: first and last row, offset, places."""
    places = places_of(rows, known, 0, tolerance)
    votes = Counter(index - place for index, place in enumerate(places) if place is not None)
    for offset, count in votes.most_common(1):
        first, last = max(offset, 0), min(len(known) + offset, len(rows))
        if count >= HALF * len(known) and last - first == len(known) and count < len(known):
            inner = [None if place is None else place for place in places[first:last]]
            yield first, last, offset, inner
