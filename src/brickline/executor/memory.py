"""The memory of a prepared plan: every storage of the plan, placed on one device.

Arrays that lie on the device are used where they are; others are copied there once; what nobody
binds is allocated and zero. Which pieces overlap is compared with what was planned, at every
binding: a plan whose edges were made for other aliasing is refused. Knows buffers and devices,
nothing of launches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from brickline.buffers import Buffer, as_buffer
from brickline.device.base import Device
from brickline.errors import LaunchError, PlanError, UsageError
from brickline.executor.room import check_room, no_room
from brickline.plan_buffers import Storage, largest
from brickline.plan_names import unknown_buffer
from brickline.symbolic import Expr


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy that was made to place a storage."""

    name: str
    source: str
    target: str
    nbytes: int


class PlanMemory:
    """Where the storages of a plan lie.

    Args:
        plan: Its name, for messages.
        storages: Those of the plan.
        variables: Names of its variables, for messages.
        device: Where they go.
        bind: Arrays by the name of the storage that they are the memory of.
        alignments: Bytes that the address of a storage is a multiple of, by its number.
        written: Numbers of the storages that launches write to.

    Raises:
        PlanError: A name is unknown, or an array does not fit.
    """

    def __init__(
        self,
        plan: str,
        storages: Sequence[Storage],
        variables: Collection[str],
        device: Device,
        bind: Mapping[str, Any],
        alignments: Mapping[int, int],
        written: Collection[int],
    ) -> None:
        self._plan = plan
        self._storages = storages
        self._variables = variables
        self._device = device
        self._alignments = alignments
        self._written = written
        self._by_name = {storage.name: storage for storage in storages}
        self.transfers: list[Transfer] = []
        self.buffers: list[Buffer] = []
        self._sources: dict[int, Any] = {}
        """Of arrays that could be moved under the plan, what tells so, by storage."""
        self._check_bound(bind)
        planned = [each for each in storages if each.memory is not None and each.name not in bind]
        self._planned = _overlaps((each.number, each.memory) for each in planned)
        found = [self._found(each, bind.get(each.name, each.source)) for each in storages]
        self._fresh = [
            storage
            for storage, source in zip(storages, found, strict=True)
            if source is None or source.device != device.name
        ]
        """Those that memory of the device is allocated for."""
        check_room(plan, self._fresh, device)
        for storage, source in zip(storages, found, strict=True):
            given = bind.get(storage.name, storage.source)
            self.buffers.append(self._placed(storage, given, source))
            self._check_alignment(storage, self.buffers[-1])
        self._check_overlaps(self.buffers)

    def storage(self, name: str) -> Storage:
        """Return a storage by its name.

        Raises:
            PlanError: There is none; the message has the names that there are.
        """
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is None:
            raise PlanError(unknown_buffer(self._plan, name, self._by_name, self._variables))
        return found

    def _check_bound(self, bind: Mapping[str, Any]) -> None:
        if not isinstance(bind, Mapping):
            raise PlanError(
                f"plan {self._plan}: expected bind as arrays by the name of their buffer, got "
                f"{type(bind).__name__}; for example bind={{{next(iter(self._by_name), 'x')!r}: "
                "array}"
            )
        for name, given in bind.items():
            self.storage(name)
            if given is None:
                raise PlanError(
                    f"plan {self._plan}, buffer {name}: expected an array in bind, got None; leave "
                    "the name out for fresh memory, which is zero"
                )

    def by_name(self) -> dict[str, Buffer]:
        """Return where each storage lies, by its name."""
        return {each.name: self.buffers[each.number] for each in self._storages}

    def _found(self, storage: Storage, given: Any) -> Buffer | None:
        """Return the memory of what was given for a storage, if anything was."""
        return None if given is None else self._fitting(storage, given)

    def _placed(self, storage: Storage, given: Any, source: Buffer | None) -> Buffer:
        if source is None:
            return self._allocated(storage)
        if source.device == self._device.name:
            if source.is_read_only and storage.number in self._written:
                raise PlanError(
                    f"plan {self._plan}: {storage.name} is bound to read-only memory, and launches "
                    "write to it; bind memory that may be written"
                )
            self._keep(storage, given, source)
            return source
        target = self._fresh_memory(storage)
        if source.nbytes and self._device.kind:  # memory of NULL has no contents
            self._device.copy(target, source)
        self.transfers.append(
            Transfer(storage.name, source.device, self._device.name, source.nbytes)
        )
        return target

    def _allocated(self, storage: Storage) -> Buffer:
        buffer = self._fresh_memory(storage)
        if buffer.nbytes and self._device.kind:
            self._device.copy(buffer, as_buffer(np.zeros(buffer.nbytes, np.uint8)))
        return buffer

    def _fresh_memory(self, storage: Storage) -> Buffer:
        try:
            return self._device.allocate(tuple(map(largest, storage.shape)), storage.dtype)
        except UsageError as error:
            words = no_room(self._plan, storage, self._fresh, self._device)
            raise PlanError(f"{words} ({error})") from error

    def _fitting(self, storage: Storage, given: Any) -> Buffer:
        buffer = self._memory_of(storage, given, PlanError)
        shape = tuple(map(largest, storage.shape))
        if buffer.dtype != storage.dtype or buffer.shape != shape:
            remedy = (
                f"convert it to {storage.dtype}, or declare the buffer as {buffer.dtype}"
                if buffer.dtype != storage.dtype
                else "a plan keeps the shapes that it was made for"
            )
            raise PlanError(
                f"{self._where(storage)}: expected {storage.dtype}{list(shape)}, got "
                f"{buffer.dtype}{list(buffer.shape)}; {remedy}"
            )
        return buffer

    def _memory_of(self, storage: Storage, given: Any, refusal: type[UsageError]) -> Buffer:
        try:
            return as_buffer(given)
        except LaunchError as error:
            is_value = isinstance(given, list | tuple | int | float)
            remedy = f"; make an array of {storage.dtype} of it" if is_value else ""
            raise refusal(f"{self._where(storage)}: {error}{remedy}") from error

    def _where(self, storage: Storage) -> str:
        return f"plan {self._plan}, buffer {storage.name}"

    def write(self, name: str, given: Any) -> None:
        """Copy an array into a storage.

        Raises:
            PlanError: There is no such buffer, or its memory was freed or resized.
            LaunchError: The array has another size or dtype, or the memory is read-only.
        """
        storage = self.storage(name)
        self.check_moved()
        array = np.ascontiguousarray(given) if isinstance(given, np.ndarray) else given
        source, target = self._memory_of(storage, array, LaunchError), self.buffers[storage.number]
        where, whole = self._where(storage), f"{target.dtype}{list(target.shape)}"
        if source.dtype != target.dtype:
            raise LaunchError(
                f"{where}: expected {whole}, got {source.dtype}{list(source.shape)}; convert it to "
                f"{target.dtype}"
            )
        if source.nbytes != target.nbytes:
            varies = any(isinstance(size, Expr) for size in storage.shape)
            room = ", with its room for the largest values" if varies else ""
            raise LaunchError(
                f"{where}: expected {whole}, got {source.dtype}{list(source.shape)}; a buffer is "
                f"written as a whole{room}"
            )
        try:
            self._device.copy(target, source)
        except LaunchError as error:
            raise LaunchError(f"{where}: {error}") from error

    def _keep(self, storage: Storage, given: Any, source: Buffer) -> None:
        self._sources.pop(storage.number, None)
        data_ptr = getattr(given, "data_ptr", None)
        if callable(data_ptr):
            self._sources[storage.number] = (data_ptr, source.address)
        elif isinstance(given, np.ndarray) and given.flags.owndata:  # others cannot be resized
            self._sources[storage.number] = (partial(getattr, given, "nbytes"), source.nbytes)

    def check_bindings(self, arrays: Mapping[str, Any]) -> dict[str, Buffer]:
        """Return the memory of arrays that storages may be bound to together, by name.

        Raises:
            PlanError: Memory lies elsewhere, has another shape or dtype, or overlaps what it did
                not overlap.
        """
        found = {name: self._other(self.storage(name), given) for name, given in arrays.items()}
        if found:
            after = list(self.buffers)
            for name, buffer in found.items():
                after[self.storage(name).number] = buffer
            self._check_overlaps(after)
        return found

    def _other(self, storage: Storage, given: Any) -> Buffer:
        source, name = self._fitting(storage, given), storage.name
        if source.device != self._device.name:
            raise PlanError(
                f"plan {self._plan} runs on {self._device.name}; {name} was given memory of "
                f"{source.device}: copy it with prepared.write({name!r}, array)"
            )
        if source.is_read_only and storage.number in self._written:
            raise PlanError(
                f"plan {self._plan}: {name} was given read-only memory, and launches write to it; "
                "give memory that may be written"
            )
        self._check_alignment(storage, source)
        return source

    def rebind(self, name: str, given: Any, buffer: Buffer) -> tuple[int, int]:
        """Bind a storage to memory that was checked; return its number and its new address."""
        storage = self.storage(name)
        self.buffers[storage.number] = buffer
        self._keep(storage, given, buffer)
        return storage.number, buffer.address

    def check_apart(self) -> None:
        """Refuse storages that share memory, where copies of them would not.

        Raises:
            PlanError: Two of them overlap, as was planned.
        """
        for first, second, _ in self._planned:
            names = f"{self._storages[first].name} and {self._storages[second].name}"
            raise PlanError(
                f"plan {self._plan}: {names} overlap, so that they cannot be checked apart; plan "
                "with views of one buffer"
            )

    def check_moved(self) -> None:
        """Refuse to run over memory that was freed or resized since it was bound.

        Raises:
            PlanError: An array does not lie any more where it lay.
        """
        for number, (now, before) in self._sources.items():
            if now() != before:
                name = self._storages[number].name
                raise PlanError(
                    f"plan {self._plan}: the array bound to {name} was resized or freed since; "
                    f"bind it again: prepared({name}=array)"
                )

    def _check_alignment(self, storage: Storage, buffer: Buffer) -> None:
        """Refuse memory that the kernels' loads would fault on."""
        align = self._alignments.get(storage.number, 1)
        if buffer.nbytes and (buffer.address - storage.base) % align:
            raise PlanError(
                f"plan {self._plan}, buffer {storage.name}: expected memory aligned to {align} "
                "bytes as it was planned, got other memory; bind a fresh array"
            )

    def _check_overlaps(self, buffers: Sequence[Buffer]) -> None:
        """Refuse aliasing that the plan's edges were not made for."""
        found = _overlaps(enumerate(buffers))
        for first, second, distance in found ^ self._planned:
            names = f"{self._storages[first].name} and {self._storages[second].name}"
            if (first, second, distance) in found:
                raise PlanError(
                    f"plan {self._plan}: {names} overlap, which was not planned: its launches may "
                    "run in an order that is wrong for that; plan with views of one buffer"
                )
            raise PlanError(
                f"plan {self._plan}: {names} were planned over memory that overlaps and do not "
                f"overlap on {self._device.name}; plan with views of one buffer, or bind both anew"
            )


def _overlaps(pieces: Any) -> set[tuple[int, int, int]]:
    """Return pairs of pieces that share bytes, with the distance between their beginnings."""
    ordered = sorted(
        (buffer.device, buffer.address, buffer.address + buffer.nbytes, number)
        for number, buffer in pieces
        if buffer.nbytes
    )
    found = set()
    open_pieces: list[tuple[str, int, int, int]] = []
    for device, begin, end, number in ordered:
        open_pieces = [each for each in open_pieces if each[0] == device and each[2] > begin]
        for _, other_begin, _, other in open_pieces:
            first, second = sorted(((number, begin), (other, other_begin)))
            found.add((first[0], second[0], second[1] - first[1]))
        open_pieces.append((device, begin, end, number))
    return found
