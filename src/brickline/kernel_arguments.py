"""Param and Scalar: the arguments of a kernel, each checked when it is declared.

A parameter is a buffer with a symbolic shape; an integer scalar is a variable of the kernel's
expressions. Knows nothing of the source or of other arguments: `kernel` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, SupportsIndex, TypeAlias, cast, get_args

from brickline.dtypes import DType, dtype_of
from brickline.errors import KernelError, UsageError
from brickline.kernel_checks import check_name
from brickline.symbolic import Expr, Variable

Size: TypeAlias = Expr | SupportsIndex | str
"""An integer expression; a text is read with the kernel's variables."""
Sizes: TypeAlias = Size | Sequence[Size]
Accumulate: TypeAlias = Literal["add", "max", "min"]

BLOCK_INDEX = tuple(Variable(f"block_{axis}", 0, 2**32 - 2) for axis in "xyz")
"""The place of a block in the grid, for `Param.touches`."""
MAX_ALIGN = 4096
MAX_DIMENSIONS = 8
_DEFAULT_HIGH = {"i64": 2**62, "i32": 2**31 - 1}
_SCALAR_DTYPES = (*_DEFAULT_HIGH, "f64", "f32")


class Access(StrEnum):
    """What a kernel does with a buffer."""

    READ = "read"
    WRITE = "write"
    READ_WRITE = "read-write"

    @property
    def reads(self) -> bool:
        """Whether what the buffer held before matters."""
        return self is not Access.WRITE

    @property
    def writes(self) -> bool:
        """Whether the buffer holds something else afterwards."""
        return self is not Access.READ


@dataclass(frozen=True, init=False)
class Param:
    """A buffer argument.

    A text among the expressions stays one until a `Kernel` takes the parameter and reads it with
    its variables: `Kernel.params` holds expressions alone.
    """

    name: str
    dtype: str
    """A name of `brickline.dtypes.DTYPES`."""
    shape: tuple[Expr, ...]
    """Elements by axis, the last one contiguous; () is a single element."""
    access: Access
    touches: tuple[Expr, Expr] | None
    """First byte and end of what one block touches, or None where it may be everything."""
    accumulate: Accumulate | None
    """How the writes of several blocks to one element combine, or None where they do not."""
    align: int
    """Bytes that its address is a multiple of."""
    strides: tuple[Expr, ...] | None
    """Elements from one to the next by axis; None where they follow each other."""

    def __init__(
        self,
        name: str,
        dtype: object,
        shape: Sizes,
        access: Access | str = Access.READ,
        *,
        touches: tuple[Size, Size] | None = None,
        accumulate: Accumulate | None = None,
        align: int | None = None,
        strides: Sizes | None = None,
    ) -> None:
        """Declare a buffer.

        Args:
            name: As the function calls it.
            dtype: Of its elements: ``"bf16"``, a NumPy dtype, a torch dtype.
            shape: One size or several, each an integer, an expression or a text such as ``"n*4"``.
            access: "read", "write" or "read-write". Default "read".
            touches: Byte range of the block at ``block_x, block_y, block_z``, end excluded.
                Default None: any block may touch all of it.
            accumulate: "add", "max" or "min" where several blocks write one element atomically;
                needs access "read-write". Default None.
            align: A power of two in bytes. Default the size of an element; 16 for vector loads.
            strides: Elements from one to the next by axis, as many as sizes. A kernel that
                declares them takes strided views, and is launched in a `Plan` alone. Default None:
                elements follow each other.

        Raises:
            KernelError: The declaration contradicts itself.
        """
        where = f"parameter {check_name(name, 'the name of a parameter')}"
        found = _dtype(dtype, where)
        set_fields(
            self,
            name=name,
            dtype=found.name,
            shape=sequence(shape),
            access=_access(access, where),
            touches=None if touches is None else sequence(touches),
            accumulate=accumulate,
            align=_alignment(found, align, where),
            strides=None if strides is None else sequence(strides),
        )
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise KernelError(
                f"expected {len(self.shape)} strides, one for each size, got {len(self.strides)} - "
                f"at {where}"
            )
        if len(self.shape) > MAX_DIMENSIONS:
            raise KernelError(
                f"expected at most {MAX_DIMENSIONS} dimensions, got {len(self.shape)} - at "
                f"{where}; merge some"
            )
        _check_accumulate(accumulate, self.access, where)
        if self.touches is not None and len(self.touches) != 2:
            raise KernelError(
                f"expected touches as (first byte, end), got {touches!r:.80} - at {where}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return what declares it again, as JSON has it."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": [str(size) for size in self.shape],
            "access": self.access.value,
            "touches": None if self.touches is None else [str(end) for end in self.touches],
            "accumulate": self.accumulate,
            "align": self.align,
            # Left out where there are none, so that a kernel without them keeps its identity.
            **({} if self.strides is None else {"strides": [str(step) for step in self.strides]}),
        }


@dataclass(frozen=True, init=False)
class Scalar:
    """A scalar argument. Integers are variables of the kernel's expressions."""

    name: str
    dtype: str
    """A name of `brickline.dtypes.DTYPES`."""
    low: int | None
    """The smallest value of an integer; None of a float."""
    high: int | None
    """The largest value of an integer; None of a float."""

    def __init__(
        self,
        name: str,
        dtype: object = "i64",
        low: SupportsIndex | None = None,
        high: SupportsIndex | None = None,
    ) -> None:
        """Declare a scalar.

        Args:
            name: As the function calls it.
            dtype: "i64", "i32", "f64" or "f32". Default "i64".
            low: Of integers alone. Default 0, because most are sizes.
            high: Default 2**31 - 1 of an i32 and 2**62 of an i64, which leaves room for sums.

        Raises:
            KernelError: The declaration contradicts itself.
        """
        where = f"scalar {check_name(name, 'the name of a scalar')}"
        found = _dtype(dtype, where)
        if found.name not in _SCALAR_DTYPES:
            raise KernelError(
                f"expected a scalar of {', '.join(_SCALAR_DTYPES)}, got {found} - at {where}; take "
                "the next wider one and convert it in the function"
            )
        bounds: tuple[int, int] | tuple[None, None] = (None, None)
        if found.name in _DEFAULT_HIGH:
            bounds = _integer_bounds(name, found, low, high, where)
        elif low is not None or high is not None:
            raise KernelError(
                f"expected bounds of integers alone, got {low!r:.80} to {high!r:.80} of {found} - "
                f"at {where}; leave them out"
            )
        set_fields(self, name=name, dtype=found.name, low=bounds[0], high=bounds[1])

    @property
    def variable(self) -> Variable | None:
        """The variable that an integer is in expressions; None of a float."""
        if self.low is None or self.high is None:
            return None
        return Variable(self.name, self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """Return what declares it again, as JSON has it."""
        return {"name": self.name, "dtype": self.dtype, "low": self.low, "high": self.high}


@contextmanager
def declaring(where: str) -> Iterator[None]:
    """Say where a declaration is wrong."""
    try:
        yield
    except UsageError as error:
        raise KernelError(f"{where}: {error}") from None


def set_fields(instance: object, **facts: object) -> None:
    """Set fields of a frozen dataclass while it is made."""
    for name, value in facts.items():
        object.__setattr__(instance, name, value)


def sequence(value: Sizes) -> tuple[Any, ...]:
    """Return several sizes as they are, and one as the only one."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(cast("Sequence[Size]", value)) if several else (value,)


def _dtype(value: object, where: str) -> DType:
    with declaring(where):
        return dtype_of(value)


def _access(value: Access | str, where: str) -> Access:
    try:
        return Access(value)
    except ValueError:
        names = ", ".join(Access)
        raise KernelError(
            f"expected access as one of {names}, got {value!r:.80} - at {where}"
        ) from None


def _alignment(dtype: DType, align: int | None, where: str) -> int:
    if align is None:
        return dtype.size_bytes
    powers = [1 << shift for shift in range(MAX_ALIGN.bit_length())]
    if isinstance(align, bool) or align not in powers or align < dtype.size_bytes:
        raise KernelError(
            f"expected align as a power of two from {dtype.size_bytes} (the size of {dtype}) to "
            f"{MAX_ALIGN}, got {align!r:.80} - at {where}; leave it out, or pass 16 for vectors"
        )
    return int(align)


def _check_accumulate(accumulate: Accumulate | None, access: Access, where: str) -> None:
    if accumulate is None:
        return
    if accumulate not in get_args(Accumulate):
        names = ", ".join(get_args(Accumulate))
        raise KernelError(
            f"expected accumulate as one of {names}, got {accumulate!r:.80} - at {where}"
        )
    if access is not Access.READ_WRITE:
        raise KernelError(
            f"expected access 'read-write' with accumulate, got {access.value!r} - at {where}; "
            "what is accumulated is added to what the buffer holds"
        )


def _integer_bounds(
    name: str, dtype: DType, low: SupportsIndex | None, high: SupportsIndex | None, where: str
) -> tuple[int, int]:
    if name in {index.name for index in BLOCK_INDEX}:
        raise KernelError(
            f"expected a name other than the block's place, got {name!r} - at {where}; rename it"
        )
    top = _DEFAULT_HIGH[dtype.name] if high is None else high
    with declaring(where):
        variable = Variable(name, 0 if low is None else low, top)
    limit = 2 ** (8 * dtype.size_bytes - 1)
    if not -limit <= variable.low <= variable.high < limit:
        raise KernelError(
            f"expected bounds within {dtype}, from {-limit} to {limit - 1}, got {variable.low} to "
            f"{variable.high} - at {where}; narrow them, or declare it as i64"
        )
    return variable.low, variable.high
