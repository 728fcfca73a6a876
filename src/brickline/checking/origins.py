"""Where a value was made that was handed on as it is."""

from __future__ import annotations

from collections.abc import Collection

import torch

from brickline.checking.pairing import is_boundary
from brickline.checking.recording import Recording, Value
from brickline.checking.stage import Key


def origin(recording: Recording, value: Value, taken: Collection[Key] = ()) -> Value:
    """Return the value that an operation made and that came here as it is, unless it is taken."""
    by_index = recording.by_index
    current = value
    while is_boundary(current.key) and len(current.inputs) == 1:
        source = by_index.get(current.inputs[0])
        if source is None or source.tensor.numel() != value.tensor.numel():
            break
        if source.key in taken:
            return _crossing(recording, current, value)
        current = source
    if current.view or current.tensor.shape[-1:] != value.tensor.shape[-1:]:
        return value
    same = torch.equal(
        current.tensor.reshape(-1), value.tensor.reshape(-1).to(current.tensor.dtype)
    )
    return current if same else value


def _crossing(recording: Recording, first: Value, last: Value) -> Value:
    """Return the boundary behind which a value that crosses several goes more ways than one."""
    way = [last]
    while way[-1] is not first:
        way.append(recording.by_index[way[-1].inputs[0]])
    for value in reversed(way):
        if recording.readers.get(value.index, 0) > 1:
            return value
    return last
