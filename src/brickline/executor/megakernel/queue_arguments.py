"""From the arguments of a submission to the columns that the core takes.

`QueueOp` is one op of a queue: its kernel, compiled, as numbers. Buffers of one submission are
arrays of the parameter's shape; those of several are one array with a first axis more, a list of
arrays, or one array for all of them. Knows nothing of queues.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from brickline.buffers import Buffer, as_buffer
from brickline.cache import CachedKernel
from brickline.dtypes import DTYPES
from brickline.errors import LaunchError, QueueError
from brickline.executor.megakernel.block_ranges import block_bytes
from brickline.executor.megakernel.queue_refusals import refusal
from brickline.kernel import Kernel, Param, Scalar
from brickline.symbolic import Expr

IN_ORDER, PURE = 1, 2
"""MEGA_IN_ORDER, MEGA_PURE."""
_CPU = 1


@dataclass(frozen=True)
class Memory:
    """Which memory the workers of a queue work on."""

    kind: int = _CPU
    number: int = 0

    def problem_of(self, buffer: Buffer) -> str:
        """Say why they cannot work on a buffer; nothing where they can."""
        if buffer.kind == self.kind and (self.kind == _CPU or buffer.number == self.number):
            return ""
        if self.kind == _CPU:
            return f"expected memory of the host, got {buffer!r}; copy it"
        return (
            f"expected memory of CUDA:{self.number}, got {buffer!r}; copy it, with "
            f"tensor.to('cuda:{self.number}') or open_device('CUDA:{self.number}').from_numpy"
        )


HOST = Memory()


def check_kernel(name: str, kernel: Any) -> Kernel:
    """Return a kernel that a worker can execute block by block.

    Raises:
        QueueError: Why it cannot.
    """
    where = f"op {name}"
    if not isinstance(kernel, Kernel):
        raise refusal("MK501", where, f"expected a Kernel, got {kernel!r:.80}")
    if kernel.language != "block":
        raise refusal(
            "MK501",
            where,
            f"expected a kernel written against Block, got language {kernel.language!r}; write it "
            "with language 'block'",
        )
    if not kernel.host_parallel_safe:
        raise refusal(
            "MK501",
            where,
            "expected a kernel whose blocks may run at the same time, got "
            "host_parallel_safe=False; give it no static variables",
        )
    if any(param.strides is not None for param in kernel.params):
        raise refusal(
            "MK501", where, "expected parameters without strides; a Plan takes strided views"
        )
    return kernel


class QueueOp:
    """One op of a queue.

    Args:
        number: Its place among the ops.
        name: What submissions call it.
        cached: Its kernel, compiled.
        memory: Where its arguments are. Default the host.
    """

    def __init__(self, number: int, name: str, cached: CachedKernel, memory: Memory = HOST) -> None:
        assert cached.kernel is not None
        self.number = number
        self.name = name
        self.kernel = cached.kernel
        self.cached = cached
        params, scalars = self.kernel.params, self.kernel.scalars
        self.buffers = [each.name for each in self.kernel.signature if isinstance(each, Param)]
        """The names of its buffers, in the signature's order."""
        self._kinds = (
            _Kind("reads", [each for each in params if not each.access.writes], params, cached),
            _Kind("writes", [each for each in params if each.access.writes], (), cached),
            _Kind("params", scalars, (), cached),
        )
        self._rules = [_Rule(each, memory) for each in self.kernel.signature]

    def row(self) -> tuple[Any, ...]:
        """Return the op as the core takes it."""
        kernel = self.kernel
        names = [each.name for each in kernel.signature]
        sizes = (
            *kernel.global_size,
            *(kernel.local_size or (Expr.of(1),) * 3),
            kernel.shared_bytes,
        )
        # Blocks that add to one element do so in any order, so they run one after the other.
        adds = any(param.accumulate is not None for param in kernel.params)
        flags = IN_ORDER if adds else PURE if kernel.pure else 0
        return (
            self.cached.program.function,
            [_declared(each, names) for each in kernel.signature],
            [size.program(names) for size in sizes],
            flags,
        )

    def place(self, where: str, reads: Any, writes: Any, params: Any) -> list[Any]:
        """Return what was given for each argument, in the signature's order.

        Raises:
            QueueError: Something is missing, unknown or given twice.
        """
        given: list[Any] = [None] * len(self._rules)
        read_alone: set[str] = set()
        for kind, values in zip(self._kinds, (reads, writes, params), strict=True):
            if values is None:
                continue
            for name, value in kind.pairs(where, values):
                at = kind.places.get(name)
                if at is None:
                    raise kind.strange(where, name)
                if given[at] is not None and given[at] is not value:
                    raise refusal("MK507", where, f"{name} was given twice; pass it once")
                given[at] = value
                (read_alone.add if kind.name == "reads" else read_alone.discard)(name)
        for written in self._kinds[1].names:
            if written in read_alone:
                raise refusal("MK507", where, f"{written} is written; pass it in writes=")
        for at, value in enumerate(given):
            if value is None:
                name = self.kernel.signature[at].name
                kind = next(each for each in reversed(self._kinds) if name in each.places)
                raise refusal("MK507", where, f"{name} is missing; pass it in {kind.name}=")
        return given

    def columns(
        self, where: str, given: Sequence[Any], count: int | None
    ) -> tuple[list[Any], list[Buffer]]:
        """Return the columns of a submission, or of `count`, and the memory that they use."""
        columns: list[Any] = []
        held: list[Buffer] = []
        for rule, value in zip(self._rules, given, strict=True):
            if not rule.is_buffer:
                columns.append(_scalars(where, rule, value, count))
            elif count is None:
                buffer = rule.buffer(where, value)
                columns.append((buffer.address, 0, buffer.nbytes, buffer.shape))
                held.append(buffer)
            else:
                column, buffers = _buffers(where, rule, value, count)
                columns.append(column)
                held += buffers
        return columns, held

    def count_of(self, where: str, given: Sequence[Any]) -> int:
        """Return how many submissions the arguments are of, as the first column says.

        Raises:
            QueueError: None of them is a column.
        """
        for declared, value in zip(self.kernel.signature, given, strict=True):
            if isinstance(declared, Scalar):
                if np.ndim(value) == 1:
                    return len(value)
            elif isinstance(value, list | tuple):
                return len(value)
            elif len(getattr(value, "shape", ())) == len(declared.shape) + 1:
                return int(value.shape[0])
        raise refusal("MK507", where, "every argument is one for all submissions; pass count= too")


def _declared(each: Param | Scalar, names: Sequence[str]) -> tuple[Any, ...]:
    if isinstance(each, Param):
        access = each.access.reads + 2 * each.access.writes
        shape, own = [size.program(names) for size in each.shape], block_bytes(each)
        return "buffer", access, each.align, shape, None if own is None else own.program(names)
    return each.dtype, each.low or 0, each.high or 0


class _Kind:
    """reads, writes or params: which arguments they are, by name and in order."""

    def __init__(
        self,
        name: str,
        expected: Sequence[Param | Scalar],
        also: Sequence[Param],
        cached: CachedKernel,
    ) -> None:
        assert cached.kernel is not None
        self.name = name
        self.names = [each.name for each in expected]
        known = {*self.names, *(each.name for each in also)}
        places = enumerate(cached.kernel.signature)
        self.places = {each.name: at for at, each in places if each.name in known}

    def pairs(self, where: str, values: Any) -> Iterable[tuple[Any, Any]]:
        if isinstance(values, Mapping):
            return values.items()
        if not isinstance(values, list | tuple) or len(values) != len(self.names):
            raise refusal(
                "MK507",
                where,
                f"{self.name}: expected {', '.join(self.names) or 'nothing'}, by name or in this "
                f"order, got {values!r:.80}",
            )
        return zip(self.names, values, strict=True)

    def strange(self, where: str, name: Any) -> QueueError:
        takes = ", ".join(self.names) or "nothing"
        return refusal(
            "MK507", where, f"{self.name}: expected {takes}, got {name!r:.80}; see its kernel"
        )


class _Rule:
    """What one argument must be; found once, because every submission asks."""

    def __init__(self, declared: Param | Scalar, memory: Memory) -> None:
        self.name = declared.name
        self.memory = memory
        self.dtype = declared.dtype
        self.is_buffer = isinstance(declared, Param)
        self.is_float = isinstance(declared, Scalar) and declared.variable is None
        self.code = DTYPES[declared.dtype].code
        self.is_written = isinstance(declared, Param) and declared.access.writes
        self.dimensions = len(declared.shape) if isinstance(declared, Param) else 0

    def buffer(self, where: str, value: Any) -> Buffer:
        """Return memory that fits it.

        Raises:
            QueueError: Why it does not.
        """
        try:
            buffer = value if type(value) is Buffer else as_buffer(value)
        except LaunchError as error:
            raise refusal("MK507", f"{where}, {self.name}", str(error)) from error
        problem = self.memory.problem_of(buffer)
        if problem:
            pass
        elif buffer.dtype_code != self.code:
            problem = f"expected {self.dtype}, got {buffer.dtype}"
        elif self.is_written and buffer.is_read_only:
            problem = "it is written, and its memory is read-only"
        if problem:
            raise refusal("MK507", f"{where}, {self.name}", problem)
        return buffer


def _buffers(
    where: str, rule: _Rule, value: Any, count: int
) -> tuple[tuple[Any, ...], list[Buffer]]:
    place = f"{where}, {rule.name}"
    if isinstance(value, list | tuple):
        buffers = [rule.buffer(f"{where}, array {k}", each) for k, each in enumerate(value)]
        if len(buffers) != count:
            raise refusal("MK507", place, f"expected {count} arrays, got {len(buffers)}")
        if any(each.shape != buffers[0].shape for each in buffers):
            raise refusal(
                "MK507", place, "expected arrays of one shape; submit the others in a call apart"
            )
        if not buffers:
            return (0, 0, 0, ()), []
        addresses = np.fromiter((each.address for each in buffers), np.uint64, count)
        return (addresses, None, buffers[0].nbytes, buffers[0].shape), buffers
    buffer = rule.buffer(where, value)
    shape = buffer.shape
    if len(shape) <= rule.dimensions:
        return (buffer.address, 0, buffer.nbytes, shape), [buffer]
    if len(shape) != rule.dimensions + 1 or shape[0] != count:
        raise refusal(
            "MK507",
            place,
            f"expected a first axis of {count} and {rule.dimensions} more, got shape {shape}",
        )
    step = math.prod(shape[1:]) * DTYPES[rule.dtype].size_bytes
    return (buffer.address, step, step, shape[1:]), [buffer]


def _scalars(where: str, rule: _Rule, value: Any, count: int | None) -> Any:
    is_float = rule.is_float
    if is_float:
        if type(value) is float:
            return value
    elif type(value) is int and -(2**63) <= value < 2**63:
        return value
    where = f"{where}, {rule.name}"
    if count is not None and np.ndim(value) == 1:
        kind = "number" if is_float else "whole number"
        array = np.asarray(value)
        fits = array.dtype.kind in ("iuf" if is_float else "iu") and len(array) == count
        if not fits or (array.dtype.kind == "u" and array.max(initial=0) >> 63):
            raise refusal(
                "MK507",
                where,
                f"expected a {kind} for each of {count} submissions, got {len(array)} of "
                f"{array.dtype}",
            )
        return np.ascontiguousarray(array, np.float64 if is_float else np.int64)
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError
        if is_float:
            return float(value)
        number = operator.index(value)
        if -(2**63) <= number < 2**63:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    kind = "a number" if is_float else "a whole number of 64 bits"
    raise refusal("MK507", where, f"expected {kind}, got {value!r:.80}")
