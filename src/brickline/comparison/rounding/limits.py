"""How much a launch of each sort may add to a difference and be clean.

Owns the limits and roundings of sorts of modules, and how much terms that cancel amplify. Knows
nothing of units.
"""

from __future__ import annotations

import numpy as np

from brickline.align.keys import Ints
from brickline.align.sequences import Bools
from brickline.comparison.operands import Differences, Floats
from brickline.comparison.rounding.envelope import ROUNDINGS_GLUE, ROUNDINGS_LEAF, ROUNDINGS_NORM
from brickline.comparison.sides import PARAMETER_INDEX, Side

LEAN_LIMIT = 3.0
"""Clean linear layers, convolutions and embeddings stayed below 1.5 in benchmarks/localisation."""
LEAF_LIMIT = 3.5
"""Clean norms and activations reached 1.8 there…"""
UNEVEN_LIMIT = 6.0
"""…and 3.8 where some channels are 12 to 40 times the others."""
UNEVEN = 4.5
"""Largest element in root mean squares, from which on channels may be uneven: a thousand normally
distributed ones reach 3.5, and two large ones in 64 channels 5.6."""
GLUE_LIMIT = 4.0
"""Clean attention reached 2.1 with activations of ordinary size, and 6.0, which is half the limit,
with queries and keys that are several times larger."""

_LEAN = ("Linear", "Conv", "Embedding", "Dropout", "Identity", "Flatten", "Pool", "ReLU", "Pad")
"""Modules that round their output and little else."""
STATELESS = (*_LEAN, "Norm", "GELU", "SiLU", "Sigmoid", "Tanh", "Softmax", "Activation")
"""Modules that keep nothing from call to call."""


def roundings_of(a: Side, rows: Ints) -> Floats:
    """Return how often a leaf rounds, by its type."""
    return _by_type(a, rows, (ROUNDINGS_LEAF, ROUNDINGS_NORM, ROUNDINGS_GLUE))


def limits_of(a: Side, found: Differences, rows: Ints) -> Floats:
    """Return the ratio up to which each leaf is clean, by its type and its inputs."""
    uneven = _crest(a, found)[rows] > UNEVEN
    even = _by_type(a, rows, (LEAN_LIMIT, LEAF_LIMIT, GLUE_LIMIT))
    return np.where(uneven & ~is_lean(a, rows), UNEVEN_LIMIT, even)


def is_lean(a: Side, rows: Ints) -> Bools:
    """Return which launches round their output and little else."""
    lean: Bools = _by_type(a, rows, (1.0, 0.0, 0.0)) > 0
    return lean


def _crest(a: Side, found: Differences) -> Floats:
    """Return the largest element of each launch's inputs, in root mean squares."""
    out = np.zeros(len(a))
    chosen = (a.role == 0) & (a.index < PARAMETER_INDEX) & (a.print >= 0)
    chosen &= ~found.discrete & (a.elements > 0)
    prints = a.print[chosen]
    rms = a.prints.l2[prints] / np.sqrt(a.elements[chosen])
    with np.errstate(divide="ignore", invalid="ignore"):
        crest = np.nan_to_num(a.prints.absmax[prints] / rms, posinf=0.0)
    np.maximum.at(out, a.owner[chosen], crest)
    return out


def _by_type(a: Side, rows: Ints, values: tuple[float, float, float]) -> Floats:
    """Return one of three values: for lean modules, for others that keep nothing, for the rest."""
    numbers, at = np.unique(a.type[rows], return_inverse=True)
    chosen = []
    for number in numbers.tolist():
        name = a.words[number] if number >= 0 else ""
        lean = any(part in name for part in _LEAN)
        known = any(part in name for part in STATELESS)
        chosen.append(values[0] if lean else values[1] if known else values[2])
    return np.array(chosen, float)[at.reshape(-1)]


def glue_limit(size: Floats) -> Floats:
    """Return the limit of what a module computes from tensors of this root mean square.

    Attention multiplies a relative difference of a score by the score itself, and scores are of the
    size of q times that of k.
    """
    return GLUE_LIMIT * np.clip(size**2 / 2, 1.0, 3.0)


def fan_in_of(a: Side, found: Differences, rows: Ints) -> tuple[Floats, Floats]:
    """Return how many products a leaf sums, and how much larger they are than their sum.

    A product of weights and inputs has a norm of about ‖W‖·‖x‖/√K; where the output is smaller, its
    terms cancel, and every relative difference grows by as much.
    """
    count = len(a)
    owner = a.owner
    parameter = (a.role == 0) & (a.index >= PARAMETER_INDEX)
    entry = (a.role == 0) & ~parameter & ~found.discrete
    width_in = found.inputs.width.astype(float)
    width_out = np.maximum(found.outputs.width.astype(float), 1.0)
    weight = np.zeros(count)
    if parameter.any():
        np.maximum.at(weight, owner[parameter], a.elements[parameter].astype(float))
    fan_in = np.where(weight > width_out, weight / width_out, width_in)
    norms = []
    for chosen in (parameter, entry, a.role > 0):
        norm = np.zeros(count)
        seen = chosen & (a.print >= 0) & ~found.discrete
        if seen.any():
            np.maximum.at(norm, owner[seen], a.prints.l2[a.print[seen]])
        norms.append(norm)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = norms[0] * norms[1] / np.sqrt(np.maximum(fan_in, 1.0)) / norms[2]
    matrix = weight > 2 * np.maximum(width_in, width_out)
    cancelled = np.where(matrix & np.isfinite(ratio), np.clip(ratio, 1.0, 32.0), 1.0)
    return np.minimum(fan_in, 2.0**20)[rows], cancelled[rows]
