"""Copies of calls and of state, from the room where calls are made again."""

from __future__ import annotations

from brickline.oracle.wide_calls.snapshot import (
    Convert,
    RandomState,
    State,
    holds_numbers,
    like_tuple,
    snapshot,
    tensors_in,
)

__all__ = [
    "Convert",
    "RandomState",
    "State",
    "holds_numbers",
    "like_tuple",
    "snapshot",
    "tensors_in",
]
