"""The ledger: which tensor is which, and the fingerprint of each.

A tensor is one identity as long as the same object, or another view of the same memory with the
same shape and strides, is unmodified; each write makes another. A fingerprint is taken once for
each identity within a step, on the CPU at once and on CUDA in the tensor's stream, where small
tensors wait for company and share a launch. What cannot be fingerprinted is counted by reason.

Knows tensors; of modules and ops it knows nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brickline.adapters.torch_keeping import Keeper, version_of
from brickline.adapters.torch_rows import (
    FIRST_INPUT,
    FIRST_OUTPUT,
    Rows,
    identity_bytes,
    role_bytes,
)
from brickline.dtypes import DTYPES
from brickline.fingerprints import RECORD_BYTES, fingerprint_bytes
from brickline.traces import Operand, Traces

if TYPE_CHECKING:
    from brickline.fingerprint_cuda import DeviceFingerprints

SMALL_BYTES = 1 << 20
"""CUDA tensors up to this size share launches."""
RING_RECORDS = 1 << 14
"""Fingerprints that a device keeps until they are read."""
READ_AT = 1 << 13
"""From so many on they are read between two steps, if the device has come so far."""
MOST_WAITING = 64
"""Small tensors that wait for one launch, at most."""
MOST_KNOWN = 1 << 14
MOST_HELD_BACK = 1 << 11
"""Rows are written in order: so many of the host's may wait for those of a device."""
_PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, type)


Form = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Address, shape, strides and dtype."""


def form_of(tensor: Tensor) -> Form:
    """Return where and how a tensor lies in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class Known:
    """What the ledger remembers of one identity; `fingerprint` is 0 where none could be taken."""

    __slots__ = (
        "address",
        "dtype",
        "fingerprint",
        "input",
        "number",
        "output",
        "record",
        "ref",
        "shape",
        "strides",
        "version",
    )

    def __init__(self, tensor: Tensor, version: int, number: int, form: Form | None) -> None:
        self.ref: Callable[[], Any] = weakref.ref(tensor)
        self.version = version
        self.number = number
        self.address, self.shape, self.strides, dtype = form or form_of(tensor)
        self.dtype = _NAMES.get(dtype) or dtype_name(dtype)
        self.fingerprint = 0
        self.record: bytes | None = None
        self.input = self.output = b""
        """Its row as the first input and as the first output, without the trace."""

    def row(self, role: int, index: int) -> bytes:
        """Return its row as an operand, without the trace."""
        return self.input[:16] + role_bytes(role, index) + self.input[24:]

    def operand(self, role: int, index: int) -> Operand:
        """Return the tensor as an operand."""
        return Operand(
            role,
            index,
            self.number,
            max(self.version, 0),
            self.dtype,
            self.shape,
            self.strides,
            self.fingerprint,
        )


class Unknown(Known):
    """A tensor that cannot be fingerprinted."""

    __slots__ = ()

    def __init__(self, tensor: Tensor) -> None:
        self.version = self.number = self.fingerprint = 0
        try:
            self.shape = tuple(int(each) for each in tensor.shape)
            self.dtype = dtype_name(tensor.dtype)
        except Exception:
            self.shape, self.dtype = (), "unknown"
        self.strides = (0,) * len(self.shape)


_NAMES: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: ``"bfloat16"``."""
    name = str(dtype).removeprefix("torch.")
    _NAMES[dtype] = name
    return name


class Ledger:
    """Gives tensors their numbers and fingerprints, for one run.

    Args:
        traces: Where fingerprints are written.
        rows: Packs what is said of a tensor.
        unobserved: Counts what could not be, by reason.
        keeper: Saves contents, where they are asked for.
    """

    def __init__(
        self, traces: Traces, rows: Rows, unobserved: Counter[str], keeper: Keeper
    ) -> None:
        self.keeper = keeper
        self._rows = rows
        self.fingerprints = 0
        self._traces = traces
        self._unobserved = unobserved
        self._numbers = count(1)
        self.weights: dict[int, Known] = {}
        """Parameters by id."""
        self._known: dict[int, Known] = {}
        self._views: dict[tuple[Any, ...], Known] = {}
        self._lock = threading.RLock()
        self._waiting: list[tuple[Tensor, int, int]] = []
        self._waiting_stream = (0, 0)
        self._shares = False
        self._trial: list[tuple[Tensor, int]] = []
        self._devices: dict[int, DeviceFingerprints] = {}
        self._tickets: dict[tuple[int, Any], int] = {}
        self._done: dict[int, Any] = {}
        """Events at the end of the last step, by device."""
        self._held_back = 0
        """Fingerprints of the host that wait for those of a device."""

    def begin_step(self) -> None:
        """Forget tensors: what torch does not count as a write is stale for one step at most."""
        if len(self._tickets) >= READ_AT and all(event.query() for event in self._done.values()):
            self.drain()
        self._forget()

    def _forget(self) -> None:
        self._known = {}
        self._views = {}

    def end_step(self) -> None:
        """Take what waits, and see whether small tensors may share launches.

        They may after a step in which none was written to: until then each is taken at once.
        """
        if not self._devices:
            return
        with self._lock:
            self.flush()
            kept, self._trial = self._trial, []
            if kept:
                self._shares = all(tensor._version == version for tensor, version in kept)
            for device in self._devices:
                event = self._done.setdefault(device, torch.cuda.Event())
                event.record(torch.cuda.current_stream(device))

    # ------------------------------------------------------------------------------------- operands

    def operand(self, tensor: Tensor, role: int, index: int, *, ahead: bool = False) -> Operand:
        """Return a tensor as an operand; see `known`."""
        return self.known(tensor, ahead=ahead).operand(role, index)

    def known(self, tensor: Tensor, *, ahead: bool = False) -> Known:
        """Return what a tensor is, with a fingerprint of what it holds now.

        Args:
            tensor: The tensor.
            ahead: It has just been written to, and torch has not counted that yet.
        """
        known = self._known.get(id(tensor))
        if known is not None and known.ref() is tensor and not ahead:
            try:
                if known.version == tensor._version:
                    return known
            except RuntimeError:  # inference tensors have none: they are looked at every time
                pass
        return self._packed(self._look(tensor, int(ahead)) or Unknown(tensor))

    def row(self, tensor: Tensor) -> bytes:
        """Return a tensor's row as an operand, without the trace; `known` in a shorter way.

        It is for tensors that are not known yet, of which a model makes one in every module.
        """
        device = tensor.get_device() if type(tensor) is Tensor and tensor.is_cuda else -1
        ring, dtype = self._devices.get(device), tensor.dtype
        if (
            ring is None
            or dtype not in _DTYPES
            or tensor.layout is not _STRIDED
            or tensor.is_inference()
            or tensor.is_neg()
            or self.keeper.is_asked
            or torch._C._cuda_isCurrentStreamCapturing()
        ):
            return self.known(tensor).input
        version = tensor._version
        form = (tensor.data_ptr(), tensor.shape, tensor.stride(), dtype)
        known, seen = self._known.get(id(tensor)), self._views.get(form)
        # Addresses and ids are used again for other tensors, so being there is not enough.
        is_same = known is not None and known.ref() is tensor
        is_view = seen is not None and seen.version == version and _same_version(seen, version)
        if is_same or is_view or not form[0]:
            return self.known(tensor).input
        known = Known(tensor, version, next(self._numbers), form)
        known.fingerprint = number = self._traces.reserve_fingerprint()
        self.fingerprints += 1
        self._enqueue(ring, device, tensor, version, number)
        self._known[id(tensor)] = self._views[form] = known
        return self._packed(known).input

    def known_weight(self, tensor: Tensor) -> Known:
        """The same for a parameter, which is remembered beyond the step."""
        known = self.weights.get(id(tensor))
        # A change of dtype or device gives a parameter other memory and leaves its version.
        if known is not None and known.ref() is tensor and known.address == tensor.data_ptr():
            try:
                if known.version == tensor._version:
                    return known
            except RuntimeError:  # made in inference mode
                pass
        return self._packed(self._look_at_weight(tensor) or Unknown(tensor))

    def _packed(self, known: Known) -> Known:
        identity = identity_bytes(known.number, known.fingerprint)
        version = max(known.version, 0)
        view = self._rows.view_bytes(version, known.dtype, known.shape, known.strides)
        known.input = identity + FIRST_INPUT + view
        known.output = identity + FIRST_OUTPUT + view
        return known

    def _refused(self, tensor: Tensor) -> bool:
        reason = unobservable(tensor)
        if reason is not None:
            self._unobserved[reason] += 1
        return reason is not None

    def _look_at_weight(self, tensor: Tensor) -> Known | None:
        if self._refused(tensor):
            return None
        return self._remember(tensor, version_of(tensor), self.weights)

    def _look(self, tensor: Tensor, ahead: int) -> Known | None:
        if self._refused(tensor):
            return None
        version = version_of(tensor)
        if version < 0:
            return self._remember(tensor, version, self._known)
        version += ahead
        try:
            form = form_of(tensor)
        except RuntimeError:  # inside a torch.func transform, for one
            self._unobserved["tensors without memory of their own"] += 1
            return None
        known = None if ahead or not form[0] else self._views.get(form)
        if known is not None and known.version == version and _same_version(known, version):
            self._known[id(tensor)] = alias = Known(tensor, version, known.number, form)
            alias.fingerprint = known.fingerprint
            return alias
        found = self._remember(tensor, version, self._known, form)
        if found is not None:
            self._views[form] = found
            if len(self._known) > MOST_KNOWN:
                self._forget()
        return found

    def _remember(
        self, tensor: Tensor, version: int, where: dict[int, Known], form: Form | None = None
    ) -> Known | None:
        try:
            known = Known(tensor, version, next(self._numbers), form)
            known.fingerprint, record = self._fingerprint(tensor, version)
        except Exception as error:  # never the model's problem
            self._unobserved[f"tensors that could not be fingerprinted ({error})"] += 1
            return None
        if version < 0:  # nobody counts writes to it: while it holds the same, it is the same
            known.record = record
            before = where.get(id(tensor))
            if before is not None and before.ref() is tensor and before.record == record:
                known.number = before.number
        where[id(tensor)] = known
        return known

    # --------------------------------------------------------------------------------- fingerprints

    def _fingerprint(self, tensor: Tensor, version: int) -> tuple[int, bytes | None]:
        """Take a fingerprint; give its id, and its record where that is known at once."""
        self.fingerprints += 1
        if tensor.is_cuda and not self.keeper.keeps_all:
            return self._on_device(tensor, version), None
        host = tensor.detach().cpu() if tensor.is_cuda else tensor  # contents cross anyway
        record = fingerprint_bytes(host)
        number = self._traces.fingerprint(record)
        self.keeper.taken(number, record, host)
        if self._tickets:
            self._held_back += 1
            if self._held_back >= MOST_HELD_BACK:
                self.drain()
        return number, record

    def _on_device(self, tensor: Tensor, version: int) -> int:
        if torch._C._cuda_isCurrentStreamCapturing():
            raise RuntimeError("a CUDA graph is being captured")
        device = tensor.get_device()
        ring = self._of(device)
        number = self._traces.reserve_fingerprint()
        self._enqueue(ring, device, tensor, version, number)
        return number

    def _enqueue(
        self, ring: DeviceFingerprints, device: int, tensor: Tensor, version: int, number: int
    ) -> None:
        small = version >= 0 and tensor.nbytes <= SMALL_BYTES
        stream = (device, torch._C._cuda_getCurrentRawStream(device))
        with self._lock:
            if self._waiting and (
                self._waiting_stream != stream or len(self._waiting) >= MOST_WAITING
            ):
                self.flush()
            if small and self._shares:
                self._waiting_stream = stream
                self._waiting.append((tensor, version, number))
                return
            if small and len(self._trial) < MOST_KNOWN:
                self._trial.append((tensor, version))
            self._tickets[device, ring.take(tensor)] = number

    def _of(self, device: int) -> DeviceFingerprints:
        found = self._devices.get(device)
        if found is None:
            from brickline.fingerprint_cuda import DeviceFingerprints

            found = self._devices[device] = DeviceFingerprints(device, RING_RECORDS)
        return found

    def flush(self) -> None:
        """Fingerprint the small tensors that wait; call it before something is written to.

        One that was written to meanwhile is counted as not observed, and its row stays empty.
        """
        if not self._waiting:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, []
            current = []
            for each in waiting:
                if each[0]._version == each[1]:
                    current.append(each)
                    continue
                self._unobserved["tensors written to before their fingerprint was taken"] += 1
                self._arrived(each[2], None)
                self._shares = False
            if not current:
                return
            device, stream = self._waiting_stream
            with ExitStack() as stack:
                if torch._C._cuda_getCurrentRawStream(device) != stream:
                    stack.enter_context(torch.cuda.stream(_stream(stream, device)))
                tickets = self._of(device).take_many([each[0] for each in current])
                for ticket, (_, _, number) in zip(tickets, current, strict=True):
                    self._tickets[device, ticket] = number

    def drain(self) -> None:
        """Wait for the devices, and write the fingerprints that they have taken."""
        if not self._devices:
            return
        with self._lock:
            self.flush()
            self._held_back = 0
            for device, prints in self._devices.items():
                torch.cuda.synchronize(device)
                for ticket, record in prints.drain():
                    self._arrived(self._tickets.pop((device, ticket)), record)
        self.keeper.look_again()

    def _arrived(self, number: int, record: bytes | None) -> None:
        self._traces.fingerprint(record or bytes(RECORD_BYTES), number)
        if record is not None:
            self.keeper.arrived(number, record)


def _stream(handle: int, device: int) -> Any:
    """Return a stream by its handle."""
    if not handle:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)


def _same_version(known: Known, version: int) -> bool:
    """Whether the tensor behind a view is still alive and unmodified."""
    tensor = known.ref()
    return tensor is not None and tensor._version == version and tensor.data_ptr() == known.address


_STRIDED = torch.strided
_DTYPES = frozenset(
    dtype
    for name in (each.numpy_name for each in DTYPES.values())
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
)


def unobservable(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be fingerprinted; None where it can."""
    kind = type(tensor)
    if (
        (kind is Tensor or kind is torch.nn.Parameter or not _is_wrapper(kind))
        and tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
    ):
        return None
    if kind is not Tensor and kind is not torch.nn.Parameter and _is_wrapper(kind):
        return f"tensors of class {kind.__name__}"
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')} tensors"
    if tensor.is_quantized:
        return "quantised tensors"
    if not tensor.is_cpu and not tensor.is_cuda:
        return f"tensors on device {tensor.device.type}"
    return f"{dtype_name(tensor.dtype)} tensors"


def _is_wrapper(kind: type) -> bool:
    """Whether a class of tensors holds its data elsewhere than in its own memory."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not torch._C._disabled_torch_dispatch_impl


def flatten(value: Any, found: list[Tensor], other: Counter[str], depth: int = 0) -> None:
    """Append the tensors in a value in order; what is neither a tensor nor plain is counted."""
    if isinstance(value, Tensor):
        found.append(value)
    elif value is None or isinstance(value, _PLAIN):
        pass
    elif isinstance(value, dict) and depth < 16:
        for each in value.values():
            flatten(each, found, other, depth + 1)
    elif isinstance(value, list | tuple) and depth < 16:
        for each in value:
            flatten(each, found, other, depth + 1)
    elif (
        getattr(value, "__dataclass_fields__", None) and depth < 16 and not isinstance(value, type)
    ):
        for name in value.__dataclass_fields__:
            flatten(getattr(value, name, None), found, other, depth + 1)
    else:
        other[f"arguments of class {type(value).__name__}"] += 1


def operands_of(ledger: Ledger, tensors: Iterable[Tensor], role: int) -> list[Operand]:
    """Return tensors as operands of one role, in order."""
    return [ledger.operand(tensor, role, index) for index, tensor in enumerate(tensors)]
