"""How far two tensors are apart, estimated from their fingerprints alone.

A sketch of 64 buckets is linear: the difference of two sketches is the sketch of the difference,
whose norm is that of the difference give or take 1 / sqrt(2 * 64), about 9 %. Norms are exact in a
fingerprint, and bound what the sketch says. Knows records and not where they come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from brickline import abi
from brickline.errors import UsageError

if TYPE_CHECKING:
    from brickline.fingerprints import Fingerprint

Rows = NDArray[Any]

NOISE = 4e-15
"""Of the norms: what summing up in another order may leave in a difference of equal tensors."""

DISTANCE: list[tuple[str, str]] = [
    ("relative_l2", "<f8"),
    ("relative_l2_sigma", "<f8"),
    ("cosine", "<f8"),
    ("cosine_sigma", "<f8"),
    ("scale", "<f8"),
    ("scale_sigma", "<f8"),
    ("identical", "?"),
    ("comparable", "?"),
    ("same_nonfinite", "?"),
]
"""Columns of `distances`."""


class Estimate(float):
    """A number that is known up to its `uncertainty`."""

    __slots__ = ("uncertainty",)
    uncertainty: float
    """One standard deviation; 0 where the number is exact."""

    def __new__(cls, value: float, uncertainty: float = 0.0) -> Estimate:
        """Return an estimate of ``value``."""
        self = super().__new__(cls, value)
        self.uncertainty = float(uncertainty)
        return self

    def __reduce__(self) -> tuple[type[Estimate], tuple[float, float]]:
        return Estimate, (float(self), self.uncertainty)

    def __repr__(self) -> str:
        return f"{float(self):.4g} ± {self.uncertainty:.2g}"


@dataclass(frozen=True)
class Distance:
    """How far a candidate is from its reference."""

    relative_l2: Estimate
    """Norm of the difference, of the reference's norm; inf where the reference is zero, or where
    the two are not finite at different places."""
    cosine: Estimate
    """Cosine of the angle between the two; NaN where one of them is zero."""
    scale: Estimate
    """The factor by which the reference comes closest to the candidate; NaN where it is zero."""
    identical: bool
    """The same dtype, shape and bits."""
    same_nonfinite: bool = True
    """NaN and Inf stand at the same places. Estimates are over finite values alone."""


def distance(candidate: Fingerprint, reference: Fingerprint) -> Distance:
    """Return how far two tensors are apart, from their fingerprints.

    Args:
        candidate: Fingerprint of the one.
        reference: Fingerprint of the other, to whose norm the distance is relative. It may have
            another dtype, and come from another device or machine.

    Raises:
        UsageError: Not two fingerprints, or those of tensors with different shapes.
    """
    for each in (candidate, reference):
        if not hasattr(each, "record"):
            raise UsageError(
                f"expected two fingerprints, got {type(each).__name__}; take them with "
                "bl.fingerprint(tensor)"
            )
    if candidate.shape != reference.shape:
        raise UsageError(
            f"expected fingerprints of one shape, got {candidate.shape} and {reference.shape}; "
            "elements are compared by their logical position: reshape or transpose one tensor "
            "before its fingerprint is taken"
        )
    row = distances(candidate.record, reference.record)[0]
    return Distance(
        Estimate(row["relative_l2"], row["relative_l2_sigma"]),
        Estimate(row["cosine"], row["cosine_sigma"]),
        Estimate(row["scale"], row["scale_sigma"]),
        bool(row["identical"]),
        bool(row["same_nonfinite"]),
    )


def distances(candidates: Rows, references: Rows, piece: int = 65536) -> Rows:
    """Return the distances of many pairs, as rows of `DISTANCE`.

    Args:
        candidates: Records of dtype `abi.FINGERPRINT`; one record stands for all pairs.
        references: As many, or one.
        piece: Pairs that are worked on at a time, which bounds memory.

    Returns:
        One row per pair. Where the numbers of elements differ, or a record is empty, `comparable`
        is False and every estimate NaN. Shapes of equally many elements are comparable here: a
        fingerprint follows the logical order.
    """
    left, right = np.atleast_1d(candidates), np.atleast_1d(references)
    count = max(len(left), len(right)) if len(left) and len(right) else 0
    if {len(left), len(right)} - {1, count}:
        raise UsageError(f"expected as many records of both, got {len(left)} and {len(right)}")
    found = np.empty(count, DISTANCE)
    for start in range(0, count, piece):
        part = slice(start, start + piece)
        found[part] = _distances(
            left[part] if len(left) > 1 else left, right[part] if len(right) > 1 else right
        )
    return found


def _distances(a: Rows, b: Rows) -> Rows:
    found = np.empty(max(len(a), len(b)), DISTANCE)
    comparable = (a["elements"] == b["elements"]) & (a["dtype"] != 0) & (b["dtype"] != 0)
    identical = comparable & (a["hash"] == b["hash"]).all(1) & (a["dtype"] == b["dtype"])
    identical &= (a["dimensions"] == b["dimensions"]) & (a["shape"] == b["shape"]).all(1)
    same = (a["nan_count"] == b["nan_count"]) & (a["inf_count"] == b["inf_count"])
    same &= a["nonfinite_hash"] == b["nonfinite_hash"]
    with np.errstate(all="ignore"):
        _relative_l2(found, a, b)
        _cosine_and_scale(found, a, b)
    found["relative_l2"][comparable & ~same] = np.inf
    found["relative_l2_sigma"][comparable & ~same] = 0.0
    for name in ("relative_l2", "relative_l2_sigma"):
        found[name][identical] = 0.0
    for name in ("cosine", "scale"):
        found[name][identical & ~np.isnan(found[name])] = 1.0
        found[f"{name}_sigma"][identical] = 0.0
    for name in ("relative_l2", "cosine", "scale"):
        found[name][~comparable] = np.nan
        found[f"{name}_sigma"][~comparable] = np.nan
    found["identical"], found["comparable"], found["same_nonfinite"] = identical, comparable, same
    return found


def _length(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The norm of each row, also where squares overflow or vanish, as only those of f64 can."""
    length: NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    lost = ~np.isfinite(length) | (length == 0)
    if lost.any():
        some = vectors[lost]
        biggest = np.abs(some).max(1)
        scaled = some / np.where(biggest > 0, biggest, 1.0)[:, None]
        length[lost] = biggest * np.sqrt(np.square(scaled).sum(1))
    return length


def _norm(rows: Rows) -> NDArray[np.float64]:
    """The norm; the sketch's where squares were lost."""
    norm: NDArray[np.float64] = rows["l2"]
    lost = ~np.isfinite(norm) | ((norm == 0) & (rows["absmax"] > 0))
    if lost.any():
        norm = norm.copy()
        norm[lost] = _length(rows["sketch"][lost])
    return norm


def _relative_l2(found: Rows, a: Rows, b: Rows) -> None:
    norm_a, norm_b = _norm(a), _norm(b)
    sketched = _length(a["sketch"] - b["sketch"])
    floor = NOISE * (norm_a + norm_b)
    # A difference is at least that of the norms, and at most their sum; both are exact.
    low, high = np.abs(norm_a - norm_b), norm_a + norm_b
    size = np.clip(sketched, np.where(low > floor, low, 0.0), high)
    zero = norm_b == 0
    found["relative_l2"] = np.where(zero, np.where(norm_a == 0, 0.0, np.inf), size / norm_b)
    sigma = size / math.sqrt(2 * abi.SKETCH_BUCKETS) + floor
    found["relative_l2_sigma"] = np.where(zero, 0.0, sigma / norm_b)


def _cosine_and_scale(found: Rows, a: Rows, b: Rows) -> None:
    norm_a, norm_b = _norm(a), _norm(b)
    x, y = a["sketch"] / norm_a[:, None], b["sketch"] / norm_b[:, None]
    product = np.einsum("ij,ij->i", x, y)
    excess = np.einsum("ij,ij->i", x, x) + np.einsum("ij,ij->i", y, y) - 2.0
    # The sketches' own norms are known to be wrong by `excess`, and the product is wrong alike:
    # what of it that explains is taken away, which leaves the least variance at weight c / (1+c²).
    cosine = np.clip(product, -1.0, 1.0)
    for _ in range(3):
        cosine = np.clip(product - excess * cosine / (1.0 + np.square(cosine)), -1.0, 1.0)
    square = np.square(cosine)
    sigma = (1.0 - square) / np.sqrt((1.0 + square) * abi.SKETCH_BUCKETS) + 2 * NOISE
    found["cosine"], found["cosine_sigma"] = cosine, np.where(np.isnan(cosine), np.nan, sigma)
    ratio = norm_a / norm_b
    found["scale"] = np.where(norm_a == 0, np.where(norm_b == 0, np.nan, 0.0), cosine * ratio)
    found["scale_sigma"] = np.where(norm_a == 0, 0.0, sigma * ratio)
