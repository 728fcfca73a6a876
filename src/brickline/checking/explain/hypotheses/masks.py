"""Hypotheses about masks: which positions a softmax may look at, on either side."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from brickline.align.equality import CLIPPED, comparable
from brickline.checking.execution.tape import Step, flat_of
from brickline.checking.explain.hypotheses.slices import listed
from brickline.checking.explain.program import SELF, Program, operation
from brickline.checking.explain.region import Region, Trial

ATEN = torch.ops.aten
SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax", "aten::softmax"})
MASKING = frozenset({"aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::add"})
FILLER = 1e4
"""Magnitude of what is added to a score so that it counts for nothing."""

Array = np.ndarray


def other_masks(region: Region) -> Iterator[Trial]:
    """Yield the region with the reference's mask in the place of its own."""
    right = _reference_mask(region)
    if right is None:
        return
    for step, scores in _masked(region):
        shape = region.known[step.outputs[0]].shape
        mine = _allowed(region.known[step.outputs[0]])
        wanted = _fitted(right, shape)
        if mine is None or wanted is None or np.array_equal(mine, wanted):
            continue
        words = mask_words(mine, wanted)
        blocked = torch.from_numpy(~wanted).to(region.known[scores].device)
        program = _with_mask(region.program, step, scores, blocked)
        yield Trial(program, words, {"kind": "mask", "words": words})


def _reference_mask(region: Region) -> Array | None:
    """Return where the reference's softmax may look."""
    steps = [*region.reference_steps, region.theirs.values[region.partner].step]
    for step in steps:
        if step.name in SOFTMAX:
            before = region.theirs.values[step.inputs[0]].tensor
            allowed = _allowed(before)
            after = region.theirs.values[step.outputs[0]].tensor.numpy(force=True)
            return allowed if allowed is not None and not allowed.all() else after != 0
    for step in steps:
        if step.outputs and step.name in MASKING and step.func is not None:
            allowed = _allowed(region.theirs.values[step.outputs[0]].tensor)
            if allowed is not None and not allowed.all():
                return allowed
    return None


def _masked(region: Region) -> Iterator[tuple[Step, int]]:
    """Yield the operations that put fillers into scores, or that take scores with none."""
    for step in reversed(region.program.steps):
        if not step.outputs:
            continue
        output = region.known[step.outputs[0]]
        if not output.dtype.is_floating_point or output.ndim < 2:
            continue
        if step.name in MASKING:
            for source in step.inputs:
                scores = region.known[source]
                if scores.shape == output.shape and scores.dtype.is_floating_point:
                    yield step, source
        elif any(reader.name in SOFTMAX for reader in region.program.readers(step.outputs[0])):
            yield step, step.outputs[0]
        if step.name in SOFTMAX and region.program.producer(step.inputs[0]) is None:
            yield step, step.inputs[0]


def _with_mask(program: Program, step: Step, scores: int, blocked: torch.Tensor) -> Program:
    fill = operation(ATEN.masked_fill.Scalar, SELF, blocked, -float("inf"))
    if step.name in MASKING and scores in step.inputs:
        fresh = program.fresh()
        longer = program.inserted(scores, [fill], readers=())
        readers = program.readers(step.outputs[0])
        chosen = [item for item in longer.steps if item in readers]
        moved = longer.reading(chosen, {step.outputs[0]: fresh})
        output = fresh if program.output == step.outputs[0] else program.output
        return Program(moved.steps, moved.inputs, output)
    return program.inserted(scores, [fill])


def _allowed(tensor: torch.Tensor) -> Array | None:
    if not tensor.dtype.is_floating_point or tensor.ndim < 2:
        return None
    elements = comparable(flat_of(tensor)).reshape(tensor.shape)
    allowed: Array = elements > -min(CLIPPED, FILLER)
    return allowed


def _fitted(mask: Array, shape: torch.Size) -> Array | None:
    """Return a mask in the shape of our scores; None where it does not fit."""
    if mask.shape == tuple(shape):
        return mask
    if mask.size == int(np.prod(shape)) and mask.shape[-2:] == tuple(shape[-2:]):
        if _is_shared(mask):
            return np.broadcast_to(mask.reshape(-1, *shape[-2:])[0], shape).copy()
        return mask.reshape(shape)
    if mask.shape[-2:] == tuple(shape[-2:]) and _is_shared(mask):
        return np.broadcast_to(mask.reshape(-1, *shape[-2:])[0], shape).copy()
    return None


def _is_shared(mask: Array) -> bool:
    several = mask.reshape(-1, *mask.shape[-2:])
    return bool((several == several[:1]).all())


def mask_words(mine: Array, right: Array) -> str:
    """Say how one mask differs from another, with the queries last but one and the keys last."""
    more, less = (mine & ~right), (right & ~mine)
    facts = [_seen(more, right, "sees"), _seen(less, mine, "does not see")]
    return "its mask is not the reference's: " + "; ".join(fact for fact in facts if fact)


def _seen(odd: Array, other: Array, verb: str) -> str | None:
    if not odd.any():
        return None
    flat = odd.reshape(-1, *odd.shape[-2:])
    count = int(flat.any(axis=0).sum())
    queries, keys = np.nonzero(flat.any(axis=0))
    size = odd.shape[-1] - odd.shape[-2]
    gaps = sorted(set((keys - queries - max(size, 0)).tolist()))
    square = odd.shape[-1] >= odd.shape[-2] > 1
    where = ""
    if square and gaps == [0]:
        where = f"a position {verb} itself"
    elif square and gaps == [1]:
        where = f"a position {verb} the one after it"
    elif square and gaps[0] > 0 and len(gaps) > 1:
        where = f"a position {verb} those after it"
    elif square and len(gaps) == 1 and count > 2:
        where = f"a position {verb} the one {-gaps[0]} before it (a window or shift that is off)"
    elif len(set(keys.tolist())) <= max(1, odd.shape[-1] // 2):
        where = f"it {verb} positions {listed(sorted(set(keys.tolist())))}"
    elif square and gaps[-1] < 0:
        where = f"a position {verb} those {-gaps[-1]} to {-gaps[0]} before it"
    else:
        where = f"a position {verb} {count} others that the reference treats otherwise"
    batches = flat.reshape(odd.shape).any(axis=(-1, -2))
    if batches.ndim and not batches.all() and batches.shape[0] > 1:
        chosen = np.flatnonzero(batches.reshape(batches.shape[0], -1).any(axis=1)).tolist()
        if len(chosen) < batches.shape[0]:
            where += f" (in sequences {listed(chosen)})"
    return where
