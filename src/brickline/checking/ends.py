"""What the two sides return, and whether all of it was held against something.

A match says that what comes out is the same. A tensor that one side alone returns or that has
another shape, a number that is no tensor, and elements for which the reference itself has no finite
value must not pass for compared. Judges nothing: what is wrong with a value is said elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from brickline.checking.facts import Fact
from brickline.checking.pairing import is_end, roots_of
from brickline.checking.recording import Recording
from brickline.checking.snapshot import holds_numbers, tensors_in
from brickline.checking.stage import Key

CLOSE = 1e-3
"""Two numbers that are no tensors are the same up to this; nobody knows how they were made."""
LISTED = 4
"""How many outputs of one call are named."""


def unshown_ends(ours: Any, theirs: Any, facts: Iterable[Fact]) -> list[str]:
    """Say what of the candidate's output was not held against the reference's.

    Args:
        ours: What the candidate returned.
        theirs: What the reference returned on the candidate's own values.
        facts: What was measured in this call.
    """
    facts = list(facts)
    ends = [each for each in facts if is_end(each.reference_key)]
    mine, yours = {each.key.out for each in ends}, {each.reference_key.out for each in ends}
    found = list(_outputs_apart(ours, theirs, mine, yours))
    count = sum(each.notes.get("unshown", 0) for each in facts)
    if count:
        found.append(
            f"the reference has NaN in {count} elements where the candidate has a number; nothing "
            "is shown there"
        )
    return found[:LISTED]


def unshown_elements(ours: torch.Tensor, exact: torch.Tensor) -> int:
    """Return in how many elements the reference has NaN and the candidate has not."""
    if not (ours.dtype.is_floating_point and exact.dtype.is_floating_point):
        return 0
    hidden = exact.isnan()
    if not bool(hidden.any()):
        return 0
    return int((hidden & ~ours.to(exact.device).isnan()).sum())


def nonfinite_ends(recording: Recording, free: Mapping[Key, torch.Tensor]) -> list[str]:
    """Say where the reference left to itself returns no finite values and the candidate others."""
    found = []
    for each in roots_of(recording):
        theirs = free.get(each.key)
        if theirs is None or theirs.shape != each.tensor.shape:
            continue
        if not (theirs.dtype.is_floating_point and each.tensor.dtype.is_floating_point):
            continue
        ours = each.tensor.detach().to(theirs.device).double()
        same = theirs.isfinite() | (ours == theirs) | (ours.isnan() & theirs.isnan())
        count = int((~same).sum())
        if count:
            found.append(
                f"output {each.key.out}: the reference is not finite in {count} elements where the "
                "candidate has others; nothing is shown there"
            )
    return found[:LISTED]


def tensors_in_objects(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors inside objects that are returned, such as a dataclass or a cache."""
    for number, leaf in enumerate(tree_flatten(output)[0]):
        if not isinstance(leaf, torch.Tensor):
            yield from tensors_in(leaf, f" of output {number}")


def _outputs_apart(ours: Any, theirs: Any, mine: set[int], yours: set[int]) -> Iterator[str]:
    left, right = tree_flatten(ours)[0], tree_flatten(theirs)[0]
    for number in range(max(len(left), len(right))):
        one = left[number] if number < len(left) else _NOTHING
        other = right[number] if number < len(right) else _NOTHING
        if number in mine and number in yours:
            continue
        if _same(one, other):
            continue
        bare = [x for x in (one, other) if isinstance(x, torch.Tensor) and not holds_numbers(x)]
        if bare:
            yield f"output {number} is {_kind(bare[0])} and was not compared; return a plain tensor"
        elif _shape(one) is not None and _shape(one) == _shape(other):
            yield f"output {number} is another than the reference's, and was not looked into"
        else:
            yield (
                f"output {number}: the candidate returns {_words(one)}, the reference "
                f"{_words(other)}; they cannot be compared"
            )


def _same(one: Any, other: Any) -> bool:
    """Whether two outputs are the same without a measurement."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensor(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(one, bool | int | float | complex) and isinstance(
        other, bool | int | float | complex
    ):
        return _same_number(one, other)
    if isinstance(one, str | bytes) or isinstance(other, str | bytes):
        return bool(one == other)
    if _is_array(one) and _is_array(other):
        return _same_tensor(torch.as_tensor(one), torch.as_tensor(other))
    # Of other objects the tensors inside are values of their own.
    return type(one) is type(other) or (one is not _NOTHING and other is not _NOTHING)


def _same_number(one: complex, other: complex) -> bool:
    if one == other or (one != one and other != other):
        return True
    if isinstance(one, int) and isinstance(other, int):
        return False
    size = max(abs(one), abs(other))
    return math.isfinite(size) and abs(one - other) <= CLOSE * size


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    if not (holds_numbers(one) and holds_numbers(other)):
        return False
    one, other = one.detach().to(other.device), other.detach()
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") and hasattr(value, "dtype")


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, torch.Tensor) or _is_array(value):
        return tuple(value.shape)
    return None


def _kind(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "a meta tensor"
    return "quantised" if tensor.is_quantized else "sparse"


def _words(value: Any) -> str:
    shape = _shape(value)
    if shape is not None:
        return str(shape)
    return repr(value) if isinstance(value, int | float | complex | str) else type(value).__name__


class _Nothing:
    """Stands where one side returns nothing."""


_Nothing.__name__ = "nothing"
_NOTHING = _Nothing()
