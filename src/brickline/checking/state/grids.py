"""Is a weight another one that was rounded to a grid, such as int8 per row or NF4 per block of 64?

No format is asked for: the elements of a tensor, a row or a block are looked at. Those of a grid
are few, and each is the nearest of them to the element that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

BLOCKS = (16, 32, 64, 128, 256)
"""Lengths of blocks along a row."""
SLACK = 1.02
"""What half a step may be exceeded by: scales are rounded, too."""
ENOUGH = 0.5
"""Part of the groups that must lie on a grid."""
MOST_LEVELS = 256
EVEN = 2e-2
"""Part of a step that a level may be off an even grid."""
NARROW = 1e-3
"""Relative error from which on elements hide steps of eight bits."""
SHOWN = 0.25
"""Part of a step that the rounding of an element may be for it to show whether it lies on one."""
ALIKE = 0.05
"""Part by which the steps of groups of one size may differ."""
MOSTLY = 0.9
"""Part of the elements that must lie on a grid."""
MOST_WRONG = 0.25
"""Part of the rows that may be off by more than half a step."""
NEAR = 0.5
"""Relative L2 up to which one weight can be another's on a grid."""

FORMATS = {
    "nf4": (
        -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ),
    "fp4": (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
}  # fmt: skip
EIGHT_BITS = {"fp8 e4m3": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Grid:
    """A grid on which a weight lies."""

    format: str
    group: str
    """What has a scale of its own: the tensor, each row, each block."""
    error: float
    """Largest distance of an element from the one that it stands for, relative to the largest."""
    wrong: tuple[int, ...] = ()
    """Rows with elements that are off by more than half a step."""

    @property
    def words(self) -> str:
        """Say it."""
        return f"on a grid of {self.format} per {self.group}, largest error {self.error:.2g}"


def on_grid(values: torch.Tensor, exact: torch.Tensor) -> Grid | None:
    """Return the grid on which one weight is another, None where it is on none.

    Args:
        values: The weight as it is used.
        exact: The weight that it stands for, of the same shape.
    """
    if values.ndim < 2 or values.shape != exact.shape or not values.numel():
        return None
    own, other = (part.detach().double().flatten(1) for part in (values, exact))
    other = other.to(own.device)
    gaps = (own - other).abs()
    if not 0 < float(gaps.norm()) <= NEAR * float(other.norm()):
        return None
    coarse = 4 * torch.finfo(values.dtype).eps / 2
    for words, groups in _groups(own):
        for name, halves in _formats(groups, other.reshape(groups.shape), coarse):
            off = gaps > (SLACK * halves).reshape(own.shape)
            rows = off.any(1)
            if float(rows.double().mean()) > MOST_WRONG:
                continue
            error = float(gaps[~off].amax() / other.abs().amax())
            return Grid(name, words, error, tuple(torch.nonzero(rows).reshape(-1).tolist()))
    return None


def _groups(values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the elements by what may have a scale of its own, the largest first."""
    yield "tensor", values.reshape(1, -1)
    yield "row", values
    for length in sorted(BLOCKS, reverse=True):
        if values.shape[1] % length == 0 and values.shape[1] > length:
            yield f"block of {length}", values.reshape(-1, length)


def _formats(
    groups: torch.Tensor, targets: torch.Tensor, coarse: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the formats in which groups may be, and half a step at each element; 0 off the grid."""
    for name, levels in FORMATS.items():
        wide = torch.tensor(levels, dtype=torch.float64)
        for scales in _scales(groups, targets, float(wide.abs().amax())):
            halves = _half_steps(groups, wide, scales, coarse)
            if halves is not None:
                yield name, halves
    even = _even(groups, coarse)
    if even is not None:
        yield even
    for name, kind in EIGHT_BITS.items():
        bits = torch.arange(256, dtype=torch.uint8).view(kind).double()
        wide = bits[bits.isfinite()].unique()
        one = torch.ones_like(groups[:, :1])
        for scales in (one, *_scales(groups, targets, float(wide.amax()))):
            halves = _half_steps(groups, wide, scales, coarse)
            if halves is not None:
                yield name, halves


def _scales(groups: torch.Tensor, targets: torch.Tensor, largest: float) -> Iterator[torch.Tensor]:
    """Yield the scales with which the largest element of a group is the largest level."""
    for tensor in (targets, groups):
        yield tensor.abs().amax(1, keepdim=True).clamp(min=1e-300) / largest


def _half_steps(
    groups: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, coarse: float
) -> torch.Tensor | None:
    """Return half a step at each element of a grid, None where too few elements lie on it."""
    levels = levels.to(groups.device)
    scaled = groups / scales
    at = torch.searchsorted((levels[1:] + levels[:-1]) / 2, scaled.contiguous())
    near = (scaled - levels[at]).abs() <= coarse * scaled.abs() + 1e-6 * levels.diff().amin()
    if float(near.double().mean()) <= MOSTLY:
        return None
    below = (levels[at] - levels[(at - 1).clamp(min=0)]) / 2
    above = (levels[(at + 1).clamp(max=len(levels) - 1)] - levels[at]) / 2
    halves = torch.maximum(below, above) * scales + coarse * groups.abs()
    return torch.where(near, halves, 0.0)


def _even(groups: torch.Tensor, coarse: float) -> tuple[str, torch.Tensor] | None:
    """Return the format and half a step at each element where all steps of a group are the same."""
    largest = groups.abs().amax(1)
    steps = _steps(groups, coarse / 3.8)
    known = steps > 0
    if float(known.double().mean()) <= ENOUGH:
        return None
    # A group that uses few of its levels does not show its step; others of its size do.
    span = groups.amax(1) - groups.amin(1)
    ones = torch.ones_like(largest)
    for sizes, alike in ((ones, 0.1 * ALIKE), (largest, 0.1 * ALIKE), (span, ALIKE)):
        parts = steps / sizes.clamp(min=1e-300)
        usual = parts[known].median()
        if float(((parts[known] / usual - 1).abs() < alike).double().mean()) > ENOUGH:
            other = (parts / usual - 1).abs() >= alike
            steps = torch.where(other, usual * sizes, steps)
            break
    levels = ((groups.amax(1) - groups.amin(1)) / steps.clamp(min=1e-300))[known].median()
    if levels > 16 and coarse > NARROW:
        return None  # the largest elements of a narrow float are as far apart as eight bits
    name = "int8" if levels > 16 else "int4" if levels > 4 else "int2"
    # What lies beyond the first or last level is cut off there: a zero point is rounded, too.
    least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    parts = torch.where((groups == least) | (groups == most), 1.0, 0.5)
    return name, steps[:, None] * parts + coarse * groups.abs()


def _steps(groups: torch.Tensor, coarse: float) -> torch.Tensor:
    """Return the step of each group, 0 where its elements lie on no even grid."""
    ordered = groups.sort(1).values
    gaps = ordered.diff(dim=1)
    sizes = ordered.abs()
    apart = gaps > coarse * torch.maximum(sizes[:, 1:], sizes[:, :-1])
    small = sizes[:, 1:] <= sizes.amax(1, keepdim=True) / 8  # there, rounding hides no step
    near_zero = torch.where(apart & small, gaps, torch.inf).amin(1, keepdim=True)
    anywhere = torch.where(apart, gaps, torch.inf).amin(1, keepdim=True)
    gap = torch.where(near_zero.isfinite(), near_zero, anywhere)
    above, largest = ordered - ordered[:, :1], sizes.amax(1, keepdim=True)
    span = above[:, -1:]
    found = torch.zeros_like(gap)
    for step in (gap, gap / 2, gap / 3, largest / 7, span / 15, largest / 127, span / 255):
        step = torch.where(step.isfinite() & (step > 0), step, 1.0)
        from_zero = _refined(ordered, step)
        from_least = span / (span / step).round().clamp(min=1)
        fits = _lies_on(ordered, from_zero, coarse * sizes)
        fits_least = _lies_on(above, from_least, coarse * (sizes + sizes[:, :1]))
        fitting = torch.where(fits, from_zero[:, 0], torch.where(fits_least, from_least[:, 0], 0.0))
        counts = span[:, 0] / fitting.clamp(min=1e-300)
        fits = (counts >= 0.5) & (counts <= MOST_LEVELS) & (found[:, 0] == 0)
        found[fits, 0] = fitting[fits]
    return found[:, 0]


def _refined(values: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return steps by all elements, the smallest first: one gap is known to a few digits only."""
    for most in (16, 64, MOST_LEVELS):
        counts = (values / steps).round()
        counts = torch.where(counts.abs() <= most, counts, 0.0)
        squares = counts.square().sum(1, keepdim=True)
        better = (values * counts).sum(1, keepdim=True) / squares.clamp(min=1.0)
        steps = torch.where(squares > 0, better, steps)
    return steps


def _lies_on(values: torch.Tensor, steps: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return whether all elements are multiples of a step, as far as their rounding shows."""
    places = values / steps
    off = (places - places.round()).abs() - noise / steps
    shown = noise / steps < SHOWN
    return (off <= EVEN).all(1) & (shown.double().mean(1) > ENOUGH)
