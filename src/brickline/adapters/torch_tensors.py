"""The ledger: which tensor is which, and the fingerprint of each.

A tensor is one identity as long as the same object, or another view of the same memory with the
same shape and strides, is unmodified; each write makes another. A fingerprint is taken once for
each identity within a step, on the CPU at once and on CUDA in the tensor's stream, where all but
the largest wait for company and share a launch. What cannot be fingerprinted is counted by reason;
where fingerprinting broke, that is a failure of brickline's own, and the tensor has none.

The core's `TensorBook` does this for plain tensors by itself. Here is what it asks for: tensors of
the host, of new classes and dtypes, those whose writes torch does not count, and reading devices.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brickline import _core
from brickline.adapters.torch_keeping import Keeper, version_of
from brickline.adapters.torch_rows import Rows, fingerprint_in, identity_bytes
from brickline.adapters.torch_sites import UNSEEN_INDEX
from brickline.adapters.torch_values import dtype_name, known_dtype, unobservable
from brickline.fingerprints import BY_DLPACK, RECORD_BYTES, fingerprint_bytes
from brickline.run.failures import FailureLog
from brickline.traces import Operand, Traces

if TYPE_CHECKING:
    from brickline.fingerprint_cuda import DeviceFingerprints

SHARED_BYTES = 1 << 25
"""CUDA tensors up to this size share launches; larger ones fill a device alone."""
RING_RECORDS = 1 << 14
"""Fingerprints that a device keeps until they are read."""
READ_AT = 1 << 13
"""From so many on they are read between two steps, if the device has come so far."""
MOST_HELD_BACK = 1 << 11
"""Rows are written in order: so many of the host's may wait for those of a device."""
_DLPACK = {code: known for known, code in BY_DLPACK.items()}


class _CapturingError(Exception):
    """Nothing can be read from a device while a CUDA graph is captured on it."""


_OUT_OF_REACH = (_CapturingError, BufferError, torch.OutOfMemoryError)
"""What the machine or a tensor's own class may refuse: no fault of the recorder."""


class Ledger:
    """Gives tensors their numbers and fingerprints, for one run.

    Args:
        traces: Where fingerprints are written.
        rows: Packs what is said of a tensor.
        unobserved: Counts what could not be, by reason.
        failures: Keeps what broke here.
        keeper: Saves contents, where they are asked for.
    """

    def __init__(
        self,
        traces: Traces,
        rows: Rows,
        unobserved: Counter[str],
        failures: FailureLog,
        keeper: Keeper,
    ) -> None:
        self.keeper = keeper
        self._failures = failures
        self._rows = rows
        self._traces = traces
        self._unobserved = unobserved
        self._taken = 0
        exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
        self.book = _core.TensorBook(
            self._look,
            self._take,
            self._lost,
            traces.reserve_fingerprint,
            facts_of,
            exchange,
            SHARED_BYTES,
        )
        self._is_native = exchange is not None
        self._uncounted: dict[bool, dict[int, _Uncounted]] = {False: {}, True: {}}
        """Tensors and weights whose writes torch does not count, by id."""
        self._lock = threading.RLock()
        self._devices: dict[int, DeviceFingerprints] = {}
        self._done: dict[int, Any] = {}
        """Events at the end of the last step, by device."""
        self._held_back = 0
        """Fingerprints of the host that wait for those of a device."""

    @property
    def fingerprints(self) -> int:
        """How many have been taken."""
        return self._taken + self.book.taken

    def begin_step(self) -> None:
        """Forget tensors: what torch does not count as a write is stale for one step at most."""
        if self._pending() >= READ_AT and all(event.query() for event in self._done.values()):
            self.drain()
        self._uncounted[False] = {}
        self.book.begin_step()

    def end_step(self) -> None:
        """Take what waits, and see whether tensors may share launches.

        They may after a step in which none was written to while it would have waited: until then
        each is taken at once.
        """
        if not self._devices:
            return
        self.book.end_step()
        for device in self._devices:
            event = self._done.setdefault(device, torch.cuda.Event())
            event.record(torch.cuda.current_stream(device))

    def flush(self) -> None:
        """Fingerprint the tensors that wait; call it before something is written to.

        One that was written to meanwhile is counted as not observed, and its row stays empty.
        """
        self.book.flush()

    # ------------------------------------------------------------------------------------- operands

    def row(self, tensor: Tensor, *, ahead: bool = False) -> bytes:
        """Return a tensor's row as the first input, without the trace; it holds what it is now.

        Args:
            tensor: The tensor.
            ahead: It has just been written to, and torch has not counted that yet.
        """
        return self.book.row(tensor, False, ahead)

    def weight_row(self, tensor: Tensor) -> bytes:
        """The same for a parameter, which is remembered beyond the step."""
        return self.book.row(tensor, True)

    def operand(self, tensor: Tensor, role: int, index: int, *, ahead: bool = False) -> Operand:
        """Return a tensor as an operand; see `row`."""
        return self._rows.operand(self.row(tensor, ahead=ahead), role, index)

    def unseen(self, role: int) -> Operand:
        """Return the operand that stands for tensors nobody could look at."""
        return self._rows.operand(self._rows.unseen, role, UNSEEN_INDEX)

    def _look(self, tensor: Tensor, weight: bool) -> bytes | None:
        """Return the row of a tensor that the book cannot tell; None where it can from now on."""
        try:
            reason = unobservable(tensor)
            if reason is None and version_of(tensor) < 0:
                return self._look_uncounted(tensor, weight)
            if reason is None and self._teach(tensor):
                return None
            self._unobserved[reason or "tensors without memory of their own"] += 1
        except _OUT_OF_REACH as error:
            self._count(error)
        except Exception as error:
            self._failures.record_failure("taking the fingerprint of a tensor", error)
        return self._unknown(tensor)

    def _teach(self, tensor: Tensor) -> bool:
        """Teach the book class, dtype and device of a tensor; False where it knew them."""
        dtype = known_dtype(tensor.dtype)
        assert dtype is not None
        name = self._rows.string(dtype.numpy_name)
        is_new = self.book.add_dtype(*_DLPACK[dtype.code], dtype.code, name)
        is_new = self.book.add_type(type(tensor)) or is_new
        if tensor.is_cuda:
            device = tensor.get_device()
            by_python = self.keeper.keeps_all or not self._is_native
            is_new = (
                self.book.add_device(device, None if by_python else self._of(device).ring) or is_new
            )
        return is_new

    def _unknown(self, tensor: Tensor) -> bytes:
        """Return the row of a tensor without fingerprint; a nested one even hides its shape."""
        try:
            shape, dtype = tuple(int(each) for each in tensor.shape), dtype_name(tensor.dtype)
        except (RuntimeError, TypeError, ValueError):
            return self._rows.unseen
        return identity_bytes(0, 0) + self._rows.view_bytes(0, dtype, shape, (0,) * len(shape))

    def _look_uncounted(self, tensor: Tensor, weight: bool) -> bytes:
        """Look at a tensor of inference mode: while it holds the same, it is the same."""
        seen = self._uncounted[weight]
        fingerprint, record = self._fingerprint(tensor)
        before = seen.get(id(tensor))
        if before is None or before.ref() is not tensor or before.record != record:
            before = seen[id(tensor)] = _Uncounted(tensor, record, self.book.next_number())
        view = (0, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride())
        return identity_bytes(before.number, fingerprint) + self._rows.view_bytes(*view)

    # --------------------------------------------------------------------------------- fingerprints

    def _take(self, tensor: Tensor, version: int) -> int:
        """Take the fingerprint of a tensor that the book leaves to Python; 0: it cannot be."""
        try:
            return self._fingerprint(tensor)[0]
        except _OUT_OF_REACH as error:
            self._count(error)
        except Exception as error:
            self._failures.record_failure("taking the fingerprint of a tensor", error)
        return 0

    def _count(self, error: Exception) -> None:
        self._unobserved[f"tensors that could not be fingerprinted ({error})"] += 1

    def _fingerprint(self, tensor: Tensor) -> tuple[int, bytes | None]:
        """Take a fingerprint; give its id, and its record where that is known at once."""
        self._taken += 1
        if tensor.is_cuda and not self.keeper.keeps_all:
            return self._on_device(tensor), None
        host = tensor.detach().cpu() if tensor.is_cuda else tensor  # contents cross anyway
        record = fingerprint_bytes(host)
        number = self._traces.fingerprint(record)
        self.keeper.taken(number, record, host)
        if self._devices and self._pending():
            self._held_back += 1
            if self._held_back >= MOST_HELD_BACK:
                self.drain()
        return number, record

    def _on_device(self, tensor: Tensor) -> int:
        prints = self._of(tensor.get_device())
        number = self._traces.reserve_fingerprint()
        with ExitStack() as undo:
            undo.callback(self._arrived, number, None)
            prints.take(tensor, number)
            undo.pop_all()
        return number

    def _of(self, device: int) -> DeviceFingerprints:
        if torch._C._cuda_isCurrentStreamCapturing():
            raise _CapturingError("a CUDA graph is being captured")
        with self._lock:
            found = self._devices.get(device)
            if found is None:
                from brickline.fingerprint_cuda import DeviceFingerprints

                found = self._devices[device] = DeviceFingerprints(device, RING_RECORDS)
            return found

    def _pending(self) -> int:
        return sum(prints.pending for prints in self._devices.values())

    def drain(self) -> None:
        """Wait for the devices, and write the fingerprints that they have taken."""
        if not self._devices:
            return
        self.flush()
        with self._lock:
            self._held_back = 0
            for prints in self._devices.values():
                for number, record in prints.drain_labelled():
                    self._arrived(number, record)
        self.keeper.look_again()

    def _lost(self, number: int, stale: bool) -> None:
        """Hear of a fingerprint that the book had promised and cannot take."""
        if stale:
            self._unobserved["tensors written to before their fingerprint was taken"] += 1
        self._arrived(number, None)

    def _arrived(self, number: int, record: bytes | None) -> None:
        self._traces.fingerprint(record or bytes(RECORD_BYTES), number)
        if record is not None:
            self.keeper.arrived(number, record)


class _Uncounted:
    """A tensor whose writes torch does not count, and what it held."""

    __slots__ = ("number", "record", "ref")

    def __init__(self, tensor: Tensor, record: bytes | None, number: int) -> None:
        self.ref = weakref.ref(tensor)
        self.record = record
        self.number = number


def facts_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what DLPack would say of a tensor, for a torch without its C interface."""
    dtype = known_dtype(tensor.dtype)
    assert dtype is not None
    kind, number = (2, tensor.get_device()) if tensor.is_cuda else (1, 0)
    where = (kind, number, tuple(tensor.shape), tensor.stride())
    return tensor.data_ptr(), *_DLPACK[dtype.code], *where


def operands_of(ledger: Ledger, tensors: Iterable[Tensor], role: int) -> list[Operand]:
    """Return tensors as operands of one role, in order."""
    return [ledger.operand(tensor, role, index) for index, tensor in enumerate(tensors)]


def held_of(rows: Iterable[bytes], tensors: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
    """Return tensors with the ids of their fingerprints, 0: none."""
    return [(fingerprint_in(row), each) for row, each in zip(rows, tensors, strict=True)]
