"""Where an output is wrong, in words: which rows, columns, blocks or positions, and the worst.

Knows shapes only. The last dimension is called columns; others are named where a shape or an op
makes their meaning plain, and numbered where it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from brickline.checking.residual import Residual


def place_of(residual: Residual, *, image: bool = False) -> str | None:
    """Return where the error is, with the worst element; None where nothing is wrong."""
    wrong = residual.wrong
    if not wrong.any():
        if not residual.error.any():
            return None
        area = "every element, each by little"
    else:
        area = area_of(wrong, image=image)
    return f"{area}; {_worst(residual)}"


def area_of(wrong: torch.Tensor, *, image: bool = False) -> str:
    """Return which part of a tensor a mask covers."""
    count, total = int(wrong.sum()), wrong.numel()
    if wrong.dim() == 0 or total == 1:
        return "its only element"
    names = dimension_names(wrong.dim(), image=image)
    sets = [_indices(wrong, dim) for dim in range(wrong.dim())]
    box = 1
    for each in sets:
        box *= len(each)
    if count == 1:
        return "one element"
    if box == total and count >= 0.5 * total:
        return "every element" if count >= 0.95 * total else f"{_percent(count, total)} of elements"
    parts = [
        indices_in_words(name, each, size)
        for name, each, size in zip(names, sets, wrong.shape, strict=True)
        if len(each) < size
    ]
    if not parts or (count < 0.2 * box and box > 8):
        return _scattered(count, total, parts)
    dense = "" if count >= 0.5 * box else f" ({_percent(count, box)} of their elements)"
    return ", ".join(parts) + dense


def _scattered(count: int, total: int, parts: Sequence[str]) -> str:
    within = f" within {', '.join(parts)}" if parts else ""
    return f"{count} of {total} elements ({_percent(count, total)}), scattered{within}"


def dimension_names(dims: int, *, image: bool = False) -> list[str]:
    """Return what the dimensions of an output are called."""
    if image and dims >= 3:
        inner = {1: ["x"], 2: ["y", "x"], 3: ["z", "y", "x"]}.get(dims - 2)
        if inner:
            return ["batch", "channel", *inner]
    known = {1: ["element"], 2: ["row", "column"], 3: ["batch", "position", "column"]}
    if dims in known:
        return known[dims]
    return ["batch", *(f"dim {index}" for index in range(1, dims - 1)), "column"]


def _indices(wrong: torch.Tensor, dim: int) -> list[int]:
    others = [each for each in range(wrong.dim()) if each != dim]
    hit = wrong.any(dim=others) if others else wrong
    return [int(each) for each in hit.nonzero().flatten()]


def indices_in_words(name: str, indices: Sequence[int], size: int) -> str:
    """Return a set of indices as ``rows 96..127 of 128 (last 25 %)``."""
    many = _plural(name)
    if len(indices) == size:
        return f"all {size} {many}" if size > 1 else f"{name} 0"
    if len(indices) == 1:
        end = " (the last)" if indices[0] == size - 1 and size > 1 else ""
        return f"{name} {indices[0]} of {size}{end}"
    first, last = indices[0], indices[-1]
    step = indices[1] - first
    if all(b - a == step for a, b in pairwise(indices)):
        if step == 1:
            return f"{many} {first}..{last} of {size}{_part(first, last, size)}"
        if len(indices) > 2:
            return f"every {_ordinal(step)} of the {many} from {first} to {last} of {size}"
    if len(indices) <= 6:
        return f"{many} {', '.join(map(str, indices))} of {size}"
    return f"{len(indices)} of {size} {many} between {first} and {last}"


def _part(first: int, last: int, size: int) -> str:
    count = last - first + 1
    if last == size - 1:
        return f" (last {_percent(count, size)})"
    if first == 0:
        return f" (first {_percent(count, size)})"
    if size % count == 0 and first % count == 0:
        return f" (block {first // count} of {size // count})"
    return ""


def _percent(count: int, total: int) -> str:
    share = 100 * count / total
    return f"{share:.0f} %" if share >= 1 else f"{share:.2g} %"


def _plural(name: str) -> str:
    special = {"batch": "batches", "x": "x", "y": "y", "z": "z"}
    if name.startswith("dim "):
        return f"{name} indices"
    return special.get(name, f"{name}s")


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third", 4: "fourth"}.get(number, f"{number}th")


def _worst(residual: Residual) -> str:
    weight = torch.where(residual.finite, residual.error.abs() / residual.noise(), 0.0)
    odd = residual.wrong & ~residual.finite
    flat = int(odd.flatten().int().argmax()) if odd.any() else int(weight.argmax())
    at = index_of(flat, residual.actual.shape)
    actual, exact = residual.actual.flatten()[flat], residual.exact.flatten()[flat]
    place = f"[{', '.join(map(str, at))}] " if at else ""
    word = "first" if odd.any() else "worst"
    return f"{word} at {place}{_figure(float(actual))} instead of {_figure(float(exact))}"


def index_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element with this number."""
    at: list[int] = []
    for size in reversed(shape):
        at.append(flat % size)
        flat //= size
    return tuple(reversed(at))


def _figure(value: float) -> str:
    return f"{value:.6g}"
