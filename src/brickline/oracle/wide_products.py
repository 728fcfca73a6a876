"""Matrix products in float64 whose second factor is too large to be widened whole.

The weight of an output head is four times its size in float64. Columns of a product do not depend
on each other, so they are made a part at a time and no more than a part is wide at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

PART_BYTES = 1 << 27
"""A second factor that takes more in float64 is widened in parts of this size."""


_FACTORS = {"aten::mm": 2, "aten::addmm": 3}
"""Products by name, with how many arguments stand up to the second factor."""


def is_large_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation is a matrix product with a large, narrow second factor."""
    schema = func._schema
    if schema.overload_name or _FACTORS.get(schema.name) != len(args):
        return False
    right = args[-1]
    is_narrow = right.dtype.is_floating_point and right.dtype is not torch.float64
    return is_narrow and right.numel() * 8 > PART_BYTES


def product_in_parts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return ``left @ right``, or ``beta * bias + alpha * (left @ right)``, in float64.

    Args:
        args: Left and right factor, with the bias before them where there is one.
        kwargs: Beta and alpha, of a product with a bias.
    """
    left, right = args[-2].double(), args[-1]
    made = left.new_empty(left.shape[0], right.shape[1])
    columns = max(1, PART_BYTES // (8 * max(1, right.shape[0])))
    for start in range(0, right.shape[1], columns):
        # No name for the wide part: it would outlive the making of the next.
        made[:, start : start + columns] = left @ right[:, start : start + columns].double()
    if len(args) == 2:
        return made
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    made = made if alpha == 1 else made.mul_(alpha)
    return made.add_(args[0].double(), alpha=beta) if beta else made
