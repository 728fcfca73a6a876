"""Packets of a Perfetto trace: ids, tracks, interned names and events, written as they come.

Knows Perfetto's messages by the numbers of their fields, and nothing of runs. Every track is a
packet sequence of its own, whose first packet has the track's id and the clock as defaults and the
names in it once, so that an event is its time, a type and numbers:

::

    packet { timestamp: 81234  sequence: 7  flags: 2                        08 … 50 07 68 02
             track_event { type: 1  name_iid: 3  category_iids: 2           48 01 50 03 18 02
                           debug_annotations { name_iid: 1 int_value: 9 }   22 04 08 01 20 09
                           terminating_flow_ids: 5 } }                      81 03 05 00 …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.export.wire import (
    Message,
    Piece,
    Same,
    bytes_field,
    encode_rows,
    fixed64s,
    number_field,
    text_field,
    varints,
)

Integers: TypeAlias = NDArray[np.int64]
Flows: TypeAlias = NDArray[np.uint64]

AT_ONCE = 1 << 16
"""Events that are encoded together; what an export holds in memory beside the run's columns."""
MAX_NAME = 1024
"""Characters of a name; a viewer shows fewer."""

# Trace and TracePacket
PACKET, CLOCK_SNAPSHOT, TIMESTAMP, SEQUENCE, TRACK_EVENT, INTERNED = 1, 6, 8, 10, 11, 12
SEQUENCE_FLAGS, DEFAULT_CLOCK, DEFAULTS, TRACK_DESCRIPTOR, TRACE_UUID = 13, 58, 59, 60, 89
CLEARED, NEEDS_STATE = 1, 2
REALTIME, MONOTONIC = 1, 3
# TrackEvent
CATEGORY_IID, ANNOTATION, TYPE, NAME_IID, TRACK_UUID, FLOW, LAST_FLOW = 3, 4, 9, 10, 11, 47, 48
BEGIN, END, INSTANT = 1, 2, 3
# TrackDescriptor
UUID, NAME, PROCESS, THREAD, PARENT, ORDERING, RANK = 1, 2, 3, 4, 5, 11, 12
EXPLICIT = 3
# InternedData
CATEGORY_NAMES, EVENT_NAMES, ANNOTATION_NAMES = 1, 2, 3
FIRST_SEQUENCE = 1
"""The sequence of what belongs to no track's events."""


@dataclass(frozen=True)
class Events:
    """Events of one track, in order of time."""

    time: Integers
    kind: Integers
    """BEGIN, END or INSTANT; an end has a time only."""
    name: Integers
    """Row of the names that the track was opened with."""
    category: Integers
    annotations: Sequence[Integers]
    """One column per name of annotations; negative: absent."""
    flow: Flows | None = None
    """Ids of flows; 0: none."""
    flow_ends: bool = False
    """Whether flows end here rather than begin."""

    def between(self, first: int, last: int) -> Events:
        """Return some of the events."""
        here = slice(first, last)
        return Events(
            self.time[here],
            self.kind[here],
            self.name[here],
            self.category[here],
            [each[here] for each in self.annotations],
            None if self.flow is None else self.flow[here],
            self.flow_ends,
        )


class PacketWriter:
    """Gives out ids that no other trace has, and writes packets."""

    def __init__(self, file: BinaryIO, trace: int) -> None:
        """Write to a file.

        Args:
            file: is only appended to.
            trace: 128 bits that tell this trace from all others.
        """
        self.tracks = 0
        self._file = file
        self._trace = trace
        self._seed = trace >> 64
        self._sequence = FIRST_SEQUENCE
        self._flow = 0

    def begin(self, clock_ns: int, unix_ns: int) -> None:
        """Write which trace it is, and one moment on its clock and in Unix time."""
        clocks = [
            number_field(1, clock) + number_field(2, time)
            for clock, time in ((MONOTONIC, clock_ns), (REALTIME, unix_ns))
        ]
        snapshot = b"".join(bytes_field(1, clock) for clock in clocks) + number_field(2, MONOTONIC)
        uuid = number_field(1, self._trace >> 64) + number_field(2, self._trace % 2**64)
        self._packet(bytes_field(CLOCK_SNAPSHOT, snapshot))
        self._packet(bytes_field(TRACE_UUID, uuid))

    def describe(self, descriptor: bytes, parent: int = 0) -> int:
        """Write a new track below another and return its id."""
        self.tracks += 1
        # An odd constant, so that the ids of one trace differ: 2^64 over the golden ratio.
        uuid = (self._seed + self.tracks * 0x9E3779B97F4A7C15) % 2**64 or 1
        above = number_field(PARENT, parent) if parent else b""
        self._packet(bytes_field(TRACK_DESCRIPTOR, number_field(UUID, uuid) + above + descriptor))
        return uuid

    def flows(self, count: int) -> Flows:
        """Return ids of new flows."""
        numbers = np.arange(self._flow + 1, self._flow + count + 1, dtype=np.uint64)
        self._flow += count
        # The high half tells traces apart, the low one flows.
        return numbers + np.uint64(self._seed >> 32 << 32)

    def write(
        self,
        uuid: int,
        events: Events,
        names: Sequence[str],
        categories: Sequence[str],
        annotations: Sequence[str],
    ) -> None:
        """Write events of a track, as a sequence of their own.

        Args:
            uuid: what `describe` gave.
            events: what happened.
            names: what `Events.name` leads into; only those in use are written.
            categories: what `Events.category` leads into.
            annotations: names of the columns of `Events.annotations`.
        """
        self._sequence += 1
        used, name = np.unique(events.name, return_inverse=True)
        texts = (
            (EVENT_NAMES, [names[row] for row in used.tolist()]),
            (CATEGORY_NAMES, categories),
            (ANNOTATION_NAMES, annotations),
        )
        interned = b"".join(
            bytes_field(field, number_field(1, iid) + text_field(2, cut(text)))
            for field, found in texts
            for iid, text in enumerate(found, 1)
        )
        event = bytes_field(TRACK_EVENT, number_field(TRACK_UUID, uuid))
        self._packet(
            number_field(SEQUENCE_FLAGS, CLEARED | NEEDS_STATE)
            + bytes_field(DEFAULTS, number_field(DEFAULT_CLOCK, MONOTONIC) + event)
            + bytes_field(INTERNED, interned),
            self._sequence,
        )
        for first in range(0, len(events.time), AT_ONCE):
            chunk = events.between(first, first + AT_ONCE)
            self._file.write(_encoded(self._sequence, chunk, name[first : first + AT_ONCE]))

    def _packet(self, payload: bytes, sequence: int = FIRST_SEQUENCE) -> None:
        self._file.write(bytes_field(PACKET, payload + number_field(SEQUENCE, sequence)))


def _encoded(sequence: int, events: Events, name: Integers) -> bytes:
    named = events.kind != END
    event: list[Piece] = [
        varints(TYPE, events.kind),
        varints(NAME_IID, name + 1, named),
        varints(CATEGORY_IID, events.category + 1, named),
    ]
    for iid, values in enumerate(events.annotations, 1):
        where = named & (values >= 0)
        if where.any():
            inner = [Same(number_field(1, iid), where), varints(4, values, where)]
            event.append(Message(ANNOTATION, inner, where))
    if events.flow is not None:
        where = named & (events.flow != 0)
        event.append(fixed64s(LAST_FLOW if events.flow_ends else FLOW, events.flow, where))
    state = number_field(SEQUENCE, sequence) + number_field(SEQUENCE_FLAGS, NEEDS_STATE)
    pieces = [varints(TIMESTAMP, events.time), Same(state), Message(TRACK_EVENT, event)]
    return encode_rows(Message(PACKET, pieces), len(events.time))


def cut(text: str) -> str:
    """Return a name of a length that a viewer can show; NUL, which would end it, is replaced."""
    return text[:MAX_NAME].replace("\x00", "\ufffd")
