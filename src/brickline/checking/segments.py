"""Which part of the candidate made the difference at a pair.

Between a pair and the pairs before it lies a segment: the candidate's operations that made the
value from values already compared. Its modules are the ones to blame.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from brickline.checking.op_kinds import CREATING
from brickline.checking.pairing import is_boundary
from brickline.checking.recording import Recording, Value
from brickline.checking.stage import INPUT, OPERAND, Key


@dataclass(frozen=True)
class Segment:
    """How one compared value came about."""

    values: list[Value]
    """From the values compared before it up to it, in order, its own included."""
    again: bool
    """Whether the same value was compared before, under another key: then this shows nothing."""


def segments_of(
    recording: Recording, compared: Iterable[tuple[Key, Key, bool]]
) -> Iterator[tuple[Key, Segment]]:
    """Yield the segment of each compared value, in the order in which they were compared.

    Args:
        recording: The candidate's values.
        compared: Their keys in the order in which the reference made their partners, each with
            its partner's and whether the whole value was compared.
    """
    done: set[Key] = set()
    known: set[int] = set()
    for key, partner, whole in compared:
        origin = origin_of(recording, recording.by_key[key]).index
        # What the reference computes anew is compared anew; what it hands on is not.
        again = origin in known and is_boundary(partner)
        yield key, Segment(segment_of(recording, key, done), again)
        done.add(key)
        if whole:
            known.add(origin)
            done.update(_shown_whole(recording, recording.by_key[key]))


def _shown_whole(recording: Recording, value: Value) -> Iterator[Key]:
    """Yield the keys of what a view shows all of: whoever reads it does not read the view."""
    current = value
    while current.view and len(current.inputs) == 1:
        source = recording.by_index.get(current.inputs[0])
        if source is None or source.tensor.numel() != value.tensor.numel():
            return
        yield source.key
        current = source


def segment_of(recording: Recording, key: Key, compared: Collection[Key]) -> list[Value]:
    """Return the values from the compared ones up to a key, in order, the key's own included."""
    by_index = recording.by_index
    start = recording.by_key[key]
    found: dict[int, Value] = {}
    waiting = [start]
    while waiting:
        value = waiting.pop()
        if value.index in found:
            continue
        found[value.index] = value
        sources = [by_index[index] for index in value.inputs if index in by_index]
        written = _written_over(sources, compared)
        waiting += [
            each for each in sources if each.key not in compared and each.index not in written
        ]
    return [found[index] for index in sorted(found)]


def _written_over(sources: Iterable[Value], compared: Collection[Key]) -> set[int]:
    """Return the writes to a tensor before one that was compared: it holds what they wrote."""
    return {
        index
        for each in sources
        if each.key.op.endswith("_") and each.key in compared
        for index in each.inputs
    }


def origin_of(recording: Recording, value: Value) -> Value:
    """Return the value that crossed boundaries to get here, as its operation made it."""
    current = value
    while is_boundary(current.key) and len(current.inputs) == 1:
        source = recording.by_index.get(current.inputs[0])
        if source is None or source.tensor.numel() != value.tensor.numel():
            break
        current = source
    return current


def modules_of(
    segment: list[Value],
    strangers: Mapping[tuple[str, int], str] | None = None,
    constants: Collection[int] = (),
) -> tuple[str, ...]:
    """Return the paths of the modules that computed in a segment, in order of appearance.

    Args:
        segment: As `segment_of` gives it.
        strangers: Calls that the reference does not make, with the path of who makes them.
        constants: Values that neither inputs nor weights went into.
    """
    away = strangers or {}
    working = [each for each in segment if not each.view and not is_boundary(each.key)]
    # Where nothing was computed, those who handed the value on are asked.
    chosen = working or [each for each in segment if not each.view] or segment[-1:]
    # What is made from nothing, such as a mask of ones, comes last: it is hardly ever wrong.
    chosen.sort(key=lambda each: (each.index in constants, each.key.op in CREATING))
    paths: list[str] = []
    for value in chosen:
        path = away.get((value.key.path, value.key.call), path_of(value))
        if path not in paths:
            paths.append(path)
    return tuple(paths)


def writers_of(recording: Recording, value: Value) -> tuple[str, ...]:
    """Return the modules whose operations made a value, however it was handed on since."""
    paths: list[str] = []
    waiting, seen = [value], {value.index}
    while waiting:
        for index in waiting.pop().inputs:
            source = recording.by_index.get(index)
            if source is None or index in seen:
                continue
            seen.add(index)
            if is_boundary(source.key):
                waiting.append(source)
            elif source.key.path not in paths:
                paths.append(source.key.path)
    return tuple(paths)


def path_of(value: Value) -> str:
    """Return the module that made a value; what a module is called with is its caller's."""
    return value.caller if is_handed(value.key) else value.key.path


def is_handed(key: Key) -> bool:
    """Whether it is what a module is called with, or what it multiplies."""
    return key.op == INPUT or key.op.startswith(OPERAND)


def strangers_of(
    callers: Mapping[tuple[str, int], tuple[str, int]],
    made: Collection[tuple[str, int]],
    known: Collection[str],
) -> dict[tuple[str, int], str]:
    """Return the calls of known modules that the other side does not make, and who makes them.

    Args:
        callers: Which call of the candidate made which.
        made: The calls that the reference makes.
        known: Paths of modules that the reference calls at all.
    """
    found: dict[tuple[str, int], str] = {}
    for call in callers:
        owner = call
        while owner in callers and owner not in made and owner[0] in known:
            owner = callers[owner]
        if owner != call:
            found[call] = owner[0]
    return found
