"""How large a difference rounding explains, from dtypes and shapes alone: the frozen constants.

Every constant is calibrated once and names where it comes from; none depends on the runs that are
compared. `benchmarks/localisation` shows what they give. Differences are relative L2 throughout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
    "float4_e2m1fn_x2": 2.0**-2,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
}
"""Half the distance of 1 to the next number (reference/divergence.md, section 4)."""
_SHORT = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3": "float8_e4m3fn",
}

ROUNDINGS_LEAF = 1.0
"""Roundings in units of u that one simple module makes, both sides together: the weights and the
output are rounded to nearest on each side, 0.42 u each in relative L2 for bfloat16 (the root mean
square over mantissas), and twice that covers the unlucky mantissa."""
ROUNDINGS_NORM = 1.5
"""Norms and activations round inside once more."""
ROUNDINGS_GLUE = 3.0
"""What a module computes between its children: an attention rounds scores, weights and output."""
ROUNDINGS_WHOLE = 6.0
"""A module whose inside was not recorded on either side."""
ACCUMULATION = 0.5
"""Relative L2 of a sum of K products in another order is at most this times √K times the unit
roundoff of the accumulator: 0.4 for one running sum (Higham and Mary's law), less for blocks."""
DEPTH_FACTOR = 5.0
DEPTH_GROWTH = 1.03
"""A difference that only grew out of rounding is at most k·C^depth·u with k = 5 and C = 1.03
(TTrace, theorem 5.3, with the constants NVIDIA's BioNeMo uses)."""


def unit_roundoff(dtype: str) -> float:
    """Return u of a dtype by its name; 0 for integers, booleans and what is not known."""
    plain = dtype.removeprefix("torch.")
    return UNIT_ROUNDOFF.get(_SHORT.get(plain, plain), 0.0)


def is_discrete(dtype: str) -> bool:
    """Return whether a dtype holds choices, where a difference has no size."""
    plain = dtype.removeprefix("torch.")
    return plain.startswith(("int", "uint", "bool", "i8", "i16", "i32", "i64", "u8", "u16"))


def envelope(
    roundoff: NDArray[np.float64], fan_in: NDArray[np.float64], roundings: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return what one op may add to the difference of its inputs.

    Args:
        roundoff: u of the coarsest dtype of either side.
        fan_in: How many products are summed.
        roundings: How many roundings, in units of u.
    """
    accumulator = np.minimum(roundoff, UNIT_ROUNDOFF["float32"])
    out: NDArray[np.float64] = roundings * roundoff
    return out + ACCUMULATION * np.sqrt(np.maximum(fan_in, 1.0)) * accumulator


def deep_envelope(
    roundoff: NDArray[np.float64], depth: NDArray[np.float64], fan_in: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return what rounding alone may have grown to after `depth` layers."""
    one = envelope(roundoff, fan_in, np.ones(len(roundoff)))
    grown: NDArray[np.float64] = DEPTH_FACTOR * DEPTH_GROWTH**depth * one
    return grown
