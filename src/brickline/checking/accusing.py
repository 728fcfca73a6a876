"""Which of the candidate's values may be wrong where something is.

Those from the values compared before it on, less those that something right was made from. What is
right shows nothing of the rest of what it is a part of, nor of those whom else it was handed to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from brickline.checking.facts import Fact
from brickline.checking.op_kinds import POINTWISE
from brickline.checking.pairing import is_boundary
from brickline.checking.recording import Recording, Value
from brickline.checking.segments import Segment, is_handed, origin_of
from brickline.checking.stage import ARGUMENT


def accused_values(
    facts: list[Fact], ways: Sequence[Segment], recording: Recording
) -> dict[int, list[Value]]:
    """Return the values that may be wrong, by the `id` of each suspicious fact.

    Args:
        facts: All that was measured at one call.
        ways: How each of the compared values came about.
        recording: The candidate's values.
    """
    innocent = _innocent(facts, ways, recording)
    found: dict[int, list[Value]] = {}
    for fact, way in zip(facts, ways, strict=True):
        if not fact.suspicious:
            continue
        accused = [each for each in way.values if each.index not in innocent] or way.values[-1:]
        if all(each.key.op.startswith(ARGUMENT) for each in accused):
            accused = way.values
        found[id(fact)] = accused
    return found


def _innocent(facts: list[Fact], ways: Sequence[Segment], recording: Recording) -> set[int]:
    """Return the values that something right was made from."""
    found: set[int] = set()
    wrong: set[int] = set()
    for fact, way in zip(facts, ways, strict=True):
        value = recording.by_key[fact.key]
        wholes = _wholes(recording, value)
        if fact.part is not None and fact.part.columns is not None:
            wholes |= {value.index, origin_of(recording, value).index}
        if fact.suspicious:
            # What went on from there went on without the part that is wrong.
            wrong |= wholes
        elif fact.ratios.z <= 1 and not way.again:
            # Of what it is a part of, and of what that was made from, the rest may be wrong.
            wholes |= _partly_read(way.values, recording)
            size = min(
                (recording.by_index[index].tensor.numel() for index in wholes), default=math.inf
            )
            found.update(each.index for each in _shown_by(way.values) if each.tensor.numel() < size)
    return found - wrong


def _shown_by(way: list[Value]) -> list[Value]:
    """Return what a right value shows: not that it was right to hand it to somebody else, too."""
    busy = {each.key.path for each in way if not each.view and not is_boundary(each.key)}
    inside = {above for path in busy for above in _and_above(path)}
    return [each for each in way if not is_handed(each.key) or each.key.path in inside]


def _and_above(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules that it lies in."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _partly_read(way: list[Value], recording: Recording) -> set[int]:
    """Return the values of which only a part went into what was made from them pointwise."""
    return {
        index
        for value in way
        if value.key.op in POINTWISE
        for index in value.inputs
        if index in recording.by_index
        and recording.by_index[index].tensor.numel() > value.tensor.numel()
    }


def _wholes(recording: Recording, part: Value) -> set[int]:
    """Return the larger values that a view shows a part of, across boundaries."""
    found: set[int] = set()
    waiting = [part] if part.view else []
    while waiting:
        for index in waiting.pop().inputs:
            source = recording.by_index.get(index)
            if source is not None and source.tensor.numel() > part.tensor.numel():
                found.add(index)
                waiting += [source] if is_boundary(source.key) else []
    return found
