"""Launches one at a time between guard zones: who writes where it must not.

Every storage is copied between two zones of a known pattern. After each launch the zones must be
untouched, and so must all bytes of its storages that the launch does not declare to write. What
launches wrote is copied back, up to the one that strayed. A write that lands beyond the zones is
not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline import _core
from brickline.buffers import Buffer, as_buffer
from brickline.device.base import Device
from brickline.errors import LaunchError
from brickline.executor.memory import PlanMemory
from brickline.launching import GUARD_BYTE, GUARD_BYTES
from brickline.plan_launches import Launch, written_storages


class GuardedExecutor:
    """Runs launches in order, each one watched."""

    def __init__(
        self,
        core: _core.PlanCore,
        launches: Sequence[Launch],
        memory: PlanMemory,
        device: Device,
    ) -> None:
        self._core = core
        self._launches = launches
        self._memory = memory
        self._device = device
        memory.check_apart()
        self._zones = [self._zone(buffer) for buffer in memory.buffers]

    def _zone(self, buffer: Buffer) -> tuple[Buffer, Buffer]:
        """Return room for a buffer, and the larger memory that it lies inside."""
        zone = self._device.allocate((buffer.nbytes + 2 * GUARD_BYTES,), "u8")
        return buffer.at(zone.address + GUARD_BYTES, owner=zone), zone

    def run(self, stream: int) -> tuple[int, int, int]:
        """Run every launch; raise LaunchError of the first that strays."""
        if not self._device.kind:  # memory of NULL has no contents
            return self._core.run_serial(stream)
        self._fill()
        done = 0
        try:
            for launch in self._launches:
                outcome = self._watched(launch, stream)
                if outcome[1]:
                    return done, outcome[1], launch.number
                done += 1
        finally:
            self._give_back(done)
        return done, 0, -1

    def _fill(self) -> None:
        for number, ((inside, zone), buffer) in enumerate(
            zip(self._zones, self._memory.buffers, strict=True)
        ):
            self._device.copy(zone, as_buffer(np.full(zone.nbytes, GUARD_BYTE, np.uint8)))
            if buffer.nbytes:
                self._device.copy(inside, buffer)
            self._core.bind(number, inside.address)

    def _give_back(self, done: int) -> None:
        """Copy what the first `done` launches wrote to where it belongs, and bind that again."""
        written = written_storages(self._launches[:done])
        for number, buffer in enumerate(self._memory.buffers):
            if number in written and buffer.nbytes:
                self._device.copy(buffer, self._zones[number][0])
            self._core.bind(number, buffer.address)

    def _watched(self, launch: Launch, stream: int) -> tuple[int, int, int]:
        touched = {buffer.storage.number: buffer.name for _, buffer in launch.buffers()}
        before = {number: self._bytes(number) for number in touched}
        outcome = self._core.run_serial(stream, launch.number, launch.number + 1)
        self._device.synchronize()
        for number, name in touched.items():
            after = self._bytes(number)
            allowed = np.zeros(len(after), bool)
            for param, buffer in launch.buffers():
                if param.access.writes and buffer.storage.number == number:
                    first = GUARD_BYTES + buffer.offset
                    allowed[first : first + buffer.span] = True
            changed = np.flatnonzero((after != before[number]) & ~allowed)
            if len(changed):
                self._undo(before)
                self._refuse(launch, name, changed - GUARD_BYTES, self._memory.buffers[number])
        return outcome

    def _bytes(self, number: int) -> NDArray[np.uint8]:
        found: NDArray[Any] = self._device.to_numpy(self._zones[number][1])
        return found

    def _undo(self, before: Mapping[int, NDArray[np.uint8]]) -> None:
        """Put back what a launch that strayed has changed."""
        for number, contents in before.items():
            self._device.copy(self._zones[number][1], as_buffer(np.ascontiguousarray(contents)))

    def _refuse(self, launch: Launch, name: str, places: Any, buffer: Buffer) -> None:
        first = int(places[0])
        if first < 0:
            where = f"{-first} bytes before it"
        elif first >= buffer.nbytes:
            where = f"{first - buffer.nbytes} bytes after its end"
        else:
            where = f"at byte {first}, outside of what the launch declares to write"
        raise LaunchError(
            f"{launch} writes out of bounds of {name}, which has {buffer.nbytes} bytes: first "
            f"{where}, {len(places)} bytes in all; look at the kernel's bounds"
        )
