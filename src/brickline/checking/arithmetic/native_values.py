"""Which value of a call in float64 is which value of the same call as it ran.

Both are the same code, yet not the same operations: attention is one operation natively and many
in float64. So the operations of each module's call are aligned by name and shape.
"""

from __future__ import annotations

from collections import defaultdict
from difflib import SequenceMatcher

from brickline.checking.execution.tape import Tape
from brickline.checking.op_kinds import PASSING
from brickline.checking.pairing import is_boundary
from brickline.checking.recording import Recording, Value

Place = tuple[str, int]
"""Path and number of a module's call."""


def native_values(recording: Recording, tape: Tape) -> dict[int, Value]:
    """Return the values of a recording by the index of the same in a tape."""
    native: defaultdict[Place, list[Value]] = defaultdict(list)
    for value in recording.values:
        if not value.view and not is_boundary(value.key):
            native[value.key.path, value.key.call].append(value)
    wide: defaultdict[Place, list[int]] = defaultdict(list)
    for step in tape.steps:
        if step.func is not None and not step.moves and step.name not in PASSING:
            wide[step.frame.path, step.frame.call] += step.outputs
    found: dict[int, Value] = {}
    for place, indices in wide.items():
        values = native.get(place, [])
        ours = [(value.key.op, value.key.out, value.tensor.shape) for value in values]
        theirs = [
            (tape.values[index].step.name, tape.values[index].out, tape.values[index].shape)
            for index in indices
        ]
        blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
        for block in blocks:
            for offset in range(block.size):
                found[indices[block.b + offset]] = values[block.a + offset]
    return found
