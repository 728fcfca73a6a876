"""Traces: kernel launches as they happened.

Owns `KernelTrace` and the writing of launches, their operands and their fingerprints into a run. A
fingerprint is opaque here, one record of fixed size. Knows nothing of comparison.

A launch is written in this order, so that whoever finds a trace finds what it refers to::

    reserve()             -> 7            when it begins: ids are in order of beginning
    fingerprint(record)   -> 12, 13       of what went in and came out; or reserve_fingerprint()
    write(7, operands=…)                  when it has ended: its operands' rows, then its own
"""

from __future__ import annotations

import itertools
import math
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from brickline import _core, abi
from brickline.checksums import fnv1a_f32
from brickline.errors import CountError, UsageError
from brickline.timers import checked_count

FINGERPRINT_BYTES = 1016
"""Bytes of a fingerprint's record, `FingerprintRow` in abi.h."""
MOST_WAITING = 4096
"""Fingerprints held in memory until one that was reserved before them arrives."""
_MOST_CACHED = 1 << 16


@dataclass(frozen=True)
class KernelTrace:
    """One kernel launch: which, where in the model, on what, and how long it took.

    `new` and the `with_` calls build one step by step; each returns another trace.

    Example:
        >>> trace = KernelTrace.new("rope_neox", 0, 7, "CPU").with_output_checksum([1.0, 2.0])
        >>> trace.with_time_us(12.5).time_us
        12.5
    """

    kernel_name: str
    layer_idx: int | None
    """None outside layers, which is another place than layer 0."""
    position: int
    backend: str
    params: str = ""
    """Launch parameters, as JSON text."""
    time_us: float = 0.0
    """0 where it is not known."""
    input_checksum: int | None = None
    """None where none was taken; an unset checksum equals no other."""
    output_checksum: int | None = None

    def __post_init__(self) -> None:
        for name in ("kernel_name", "backend", "params"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name}: expected a str, got {getattr(self, name)!r}")
        # Numbers become Python's own: NumPy's are none that JSON could hold.
        for name, most in _MOST.items():
            number = getattr(self, name)
            if number is not None or name == "position":
                object.__setattr__(self, name, checked_count(name, number, most))
        object.__setattr__(self, "time_us", _checked_time(self.time_us))

    @classmethod
    def new(
        cls, kernel_name: str, layer_idx: int | None, position: int, backend: str
    ) -> KernelTrace:
        """Return a trace without checksums, parameters and time."""
        return cls(kernel_name, layer_idx, position, backend)

    def with_input_checksum(self, data: Any) -> KernelTrace:
        """Return the trace with the checksum of what went in; see `fnv1a_f32`."""
        return replace(self, input_checksum=fnv1a_f32(data))

    def with_output_checksum(self, data: Any) -> KernelTrace:
        """Return the trace with the checksum of what came out; see `fnv1a_f32`."""
        return replace(self, output_checksum=fnv1a_f32(data))

    def with_params(self, params: str) -> KernelTrace:
        """Return the trace with launch parameters, as JSON text."""
        return replace(self, params=params)

    def with_time_us(self, time_us: float) -> KernelTrace:
        """Return the trace with its duration in microseconds."""
        return replace(self, time_us=time_us)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold; checksums are text, as many readers cut off 64-bit numbers."""
        document = asdict(self)
        for name in ("input_checksum", "output_checksum"):
            if document[name] is not None:
                document[name] = f"0x{document[name]:016X}"
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> KernelTrace:
        """Read what `to_dict` made; checksums may also be whole numbers.

        As a number 0 stands for a checksum that was not taken, which is how systems write it whose
        checksums cannot be absent.

        Raises:
            UsageError: if a field is missing, unknown or of another kind.
        """
        if not isinstance(document, Mapping):
            raise UsageError(f"expected the dict of a trace, got {document!r:.60}")
        known = dict(document)
        for name in ("input_checksum", "output_checksum"):
            if isinstance(known.get(name), str):
                known[name] = _checksum_from_text(name, known[name])
            elif known.get(name) == 0:
                known[name] = None
        try:
            return cls(**known)
        except TypeError as error:
            raise UsageError(f"expected the fields of a trace: {error}") from None


_MOST = {
    "layer_idx": 2**31 - 1,
    "position": 2**32 - 1,
    "input_checksum": 2**64 - 1,
    "output_checksum": 2**64 - 1,
}
"""The largest number that the column of a field holds."""


def _checked_time(time_us: Any) -> float:
    try:
        number = float(time_us)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(time_us, str | bool) or not 0 <= number < math.inf:
        raise CountError(f"time_us: expected a finite number from 0 on, got {time_us!r}")
    return number


def span_until(ended_ns: int, time_us: float) -> dict[str, Any]:
    """Return the times of a launch that took so long, as `Traces.write` takes them.

    Whole ns on the run's clock. What took no time was not timed, and of what began before the
    clock's zero only the end is a moment of that clock.
    """
    if not time_us:
        return {"enqueue_ns": ended_ns, "start_ns": -1, "end_ns": -1}
    began_ns = ended_ns - round(time_us * 1e3)
    if began_ns < 0:
        return {"enqueue_ns": ended_ns, "start_ns": -1, "end_ns": ended_ns}
    return {"enqueue_ns": began_ns, "start_ns": began_ns, "end_ns": ended_ns}


def _checksum_from_text(name: str, text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        raise UsageError(f"{name}: expected 0x and 16 hex digits, got {text!r:.40}") from None


# ------------------------------------------------------------------------------------------ writing


class Operand(NamedTuple):
    """One tensor of one launch, as `Traces.write` takes it."""

    role: int
    """0 input, 1 output, 2 both."""
    index: int  # type: ignore[assignment]
    tensor: int
    """Id of the tensor, so that dataflow can be followed; 0: not known."""
    version: int
    dtype: str
    shape: Sequence[int]
    strides: Sequence[int]
    """In elements."""
    fingerprint: int
    """What `Traces.fingerprint` or `reserve_fingerprint` gave; 0: none."""


_TRACE = struct.Struct("<6Q4q2Q2Ii5IiIIii2I4B")  # TraceRow in abi.h
_TIME = struct.Struct("<Qd")  # TraceTimeRow
_OPERAND = struct.Struct("<3Q4I")  # OperandRow up to `dtype`
_VIEW = struct.Struct("<2I16q")  # and from `dimensions` on
_ZEROS = (0,) * 8


def launch_fields(trace: KernelTrace) -> dict[str, Any]:
    """Return what `Traces.write` takes of a trace, but the span that its run's clock has of it."""
    return {
        "name": trace.kernel_name,
        "layer": -1 if trace.layer_idx is None else trace.layer_idx,
        "position": trace.position,
        "backend": trace.backend,
        "params": trace.params,
        "time_us": trace.time_us or None,
        "input_checksum": trace.input_checksum,
        "output_checksum": trace.output_checksum,
    }


class Traces:
    """Writes traces into a profiler's run; reached as `BrickProfiler.traces`.

    Every call may be made from any thread. Rows go straight into the mapped spool, so what was
    written is there after SIGKILL.
    """

    __slots__ = (
        "_checksums_from",
        "_core",
        "_count",
        "_fingerprints",
        "_ids",
        "_is_open",
        "_lock",
        "_lost",
        "_next_fingerprint",
        "_process",
        "_rank",
        "_strings",
        "_views",
        "_waiting",
    )

    def __init__(self, core: _core.ProfilerCore, rank: int) -> None:
        self._core = core
        self._rank = rank
        self._restart()

    def _restart(self) -> None:
        """Begin anew, for another spool; whoever held the lock may be gone with a fork."""
        self._lock = threading.Lock()
        self._process: int = os.getpid()
        self._is_open: bool = False
        self._ids = itertools.count(1)
        self._count: int = 0
        self._strings: dict[str, int] = {}
        self._views: dict[tuple[tuple[int, ...], tuple[int, ...]], bytes] = {}
        self._fingerprints: int = 0
        self._next_fingerprint: int = 0
        self._waiting: dict[int, bytes] = {}
        self._lost: int = 0
        self._checksums_from: int = 0

    def __len__(self) -> int:
        return self._count

    def reserve(self) -> int:
        """Return the id of a launch that begins now."""
        return next(self._ids)

    def write(
        self,
        trace_id: int,
        *,
        name: str,
        enqueue_ns: int,
        start_ns: int,
        end_ns: int,
        time_us: float | None = None,
        layer: int = -1,
        position: int = 0,
        ordinal: int = 0,
        parent: int = 0,
        slot: int = abi.NO_SLOT,
        direction: int = 0,
        backend: str = "CPU",
        params: str = "",
        device: int = -1,
        stream: int = 0,
        clock_domain: int = 0,
        kernel_hash: int = 0,
        input_checksum: int | None = None,
        output_checksum: int | None = None,
        operands: Sequence[Operand] = (),
        while_disabled: bool = False,
    ) -> None:
        """Append a launch that has ended, and its operands.

        Args:
            trace_id: What `reserve` gave when it began.
            name: Of the kernel, or the module's path.
            enqueue_ns: When the host enqueued it; -1: not known.
            start_ns: When it began to run; -1: not known.
            end_ns: When it ended; -1: not known.
            time_us: How long it took, kept as it is. Default None: what lies between the two.
            layer: -1 outside layers.
            position: Number of the pass that it is a part of, or place in the sequence.
            ordinal: Repetition of the same name within the position.
            parent: Id of the launch that it is a part of; 0: none.
            slot: Slot of its brick.
            direction: 0 forward, 1 backward.
            backend: Who executed it.
            params: JSON text.
            device: Number of the device; -1: the host.
            stream: Handle of the stream.
            clock_domain: Whose clock the times are on; see `abi.ClockDomain`.
            kernel_hash: Hash of the kernel's source; 0: not known.
            input_checksum: FNV-1a of what went in, if taken.
            output_checksum: FNV-1a of what came out, if taken.
            operands: Its tensors.
            while_disabled: Whether it is kept although nothing is measured. Default False.

        Raises:
            CountError: if a number does not fit its column.
        """
        core = self._core
        if not core.is_enabled() and not while_disabled:
            return
        strings, where = self._strings, core._where()
        intern = self._intern
        try:
            rows = [self._operand_row(trace_id, operand) for operand in operands]
            row = _TRACE.pack(
                trace_id,
                parent,
                kernel_hash,
                stream,
                1,
                int(start_ns >= 0 <= end_ns),
                enqueue_ns,
                start_ns,
                end_ns,
                -1,
                input_checksum or 0,
                output_checksum or 0,
                strings.get(name) or intern(name),
                slot,
                layer,
                position,
                ordinal,
                self._rank,
                self._process,
                threading.get_native_id(),
                device,
                where["step"],
                clock_domain,
                -1,
                -1,
                strings.get(params) or intern(params),
                strings.get(backend) or intern(backend),
                where["phase"],
                direction,
                (input_checksum is not None) + 2 * (output_checksum is not None),
                0,
            )
        except struct.error as error:
            raise CountError(
                f"expected numbers that fit the columns of a trace, got {name!r:.60} at layer "
                f"{layer!r}, position {position!r}: {error}"
            ) from None
        if rows:
            core._append(19, b"".join(rows))
        if time_us:
            core._append(26, _TIME.pack(trace_id, time_us))
        core._append(18, row)
        if core._where()["full_disk"]:  # which has ended the recording
            return
        with self._lock:
            self._count += 1

    def write_rows(self, count: int, traces: bytes, operands: bytes) -> bool:
        """Append the rows of `count` launches that the caller has packed.

        Gives False where they were not: when disabled, and on a full disk. Their ids are from
        `reserve`; operands are written first, so that a trace finds its own.
        Without rows, `count` launches are counted that the core has written.
        """
        core = self._core
        if not core.is_enabled():
            return False
        if operands:
            core._append(19, operands)
        if traces:
            core._append(18, traces)
        if not core.is_enabled():  # a full disk has ended the recording
            return False
        with self._lock:
            self._count += count
        return True

    def add(self, trace: KernelTrace) -> int:
        """Append a launch that has just ended, enabled or not, and return its id."""
        number = self.reserve()
        self.write(
            number,
            **launch_fields(trace),
            **span_until(self._core._now_ns(), trace.time_us),
            while_disabled=True,
        )
        return number

    @property
    def checksums_from(self) -> int:
        """Launches up to this id are out of `BrickProfiler.get_checksums`."""
        return self._checksums_from

    def forget_checksums(self) -> None:
        """Leave what is recorded so far out of `BrickProfiler.get_checksums`."""
        self._checksums_from = self.reserve()

    def reserve_fingerprint(self) -> int:
        """Return an id for a fingerprint that comes later, as from a device.

        Its record is given to ``fingerprint(record, number)``. Fingerprints with larger ids wait
        in memory until it arrives; where too many wait, its row is written empty.
        """
        with self._lock:
            self._next_fingerprint += 1
            return self._next_fingerprint

    def fingerprint(self, record: bytes, number: int | None = None) -> int:
        """Append a fingerprint's record and return its id; 0 when disabled.

        One that was reserved before is still taken, until the run is closed.

        Args:
            record: The record, `abi.FINGERPRINT`.
            number: The id that was reserved for it. Default: a new one.

        Raises:
            UsageError: if the record has another size, or the id was not reserved.
        """
        if number is None and not self._core.is_enabled():
            return 0
        if not self._is_open or self._process != os.getpid():
            return 0
        if len(record) != FINGERPRINT_BYTES:
            raise UsageError(
                f"expected {FINGERPRINT_BYTES} bytes of fingerprint, got {len(record)}"
            )
        with self._lock:
            if number is None:
                number = self._next_fingerprint = self._next_fingerprint + 1
            written = self._fingerprints
            if number == written + 1 and not self._waiting:
                self._core._append(20, record)
                self._fingerprints = number
            elif written < number <= self._next_fingerprint:
                self._waiting[number] = bytes(record)
                self._write_waiting()
            elif number > self._next_fingerprint:
                raise UsageError(f"fingerprint {number} was not reserved; call reserve_fingerprint")
            return number

    @property
    def lost_fingerprints(self) -> int:
        """How many were reserved and had not arrived when their place had to be written."""
        return self._lost

    def begin(self) -> None:
        """Begin anew, in a spool that was just opened."""
        self._restart()
        self._is_open = True

    def finish(self) -> None:
        """Write what waits for a fingerprint that has not arrived; the spool is closed next."""
        with self._lock:
            if self._is_open:
                self._write_waiting(most=0)
            self._is_open = False

    def _write_waiting(self, most: int = MOST_WAITING) -> None:
        rows, waiting = [], self._waiting
        while waiting:
            record = waiting.pop(self._fingerprints + 1, None)
            if record is None:
                if len(waiting) <= most:
                    break
                record = bytes(FINGERPRINT_BYTES)
                self._lost += 1
            rows.append(record)
            self._fingerprints += 1
        if rows:
            self._core._append(20, b"".join(rows))

    def _operand_row(self, trace_id: int, operand: Operand) -> bytes:
        role, index, tensor, version, dtype, shape, strides, fingerprint = operand
        key = (tuple(shape), tuple(strides))
        view = self._views.get(key)
        if view is None:
            view = self._pack_view(*key)
        return (
            _OPERAND.pack(
                trace_id,
                tensor,
                fingerprint,
                role,
                index,
                version,
                self._strings.get(dtype) or self._intern(dtype),
            )
            + view
        )

    def _pack_view(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        packed = _VIEW.pack(len(shape), 0, *(shape + _ZEROS)[:8], *(strides + _ZEROS)[:8])
        if len(self._views) >= _MOST_CACHED:
            self._views.clear()
        self._views[shape, strides] = packed
        return packed

    def _intern(self, text: str) -> int:
        number = self._core._intern(text)
        if len(self._strings) >= _MOST_CACHED:
            self._strings.clear()
        self._strings[text] = number
        return number
