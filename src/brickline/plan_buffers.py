"""PlanBuffer: memory as a plan sees it, named and placed, before it lies anywhere.

A storage is one piece of memory of a plan; a `PlanBuffer` is the whole of it or a view into it.
Sizes may be expressions over the plan's variables, and then memory is kept for the largest. Knows
bytes, shapes and dtypes, nothing of launches or devices.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex, TypeAlias

from brickline.buffers import Buffer
from brickline.dtypes import DTYPES, dtype_of
from brickline.errors import BricklineError, PlanError, SymbolicError
from brickline.symbolic import Expr
from brickline.symbolic_values import integer_of

Extent: TypeAlias = int | Expr
"""A size: a number, or an expression over the plan's variables."""


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """One piece of memory of a plan."""

    number: int
    name: str
    shape: tuple[Extent, ...]
    dtype: str
    read_only: bool = False
    """Whether no launch may write to it, as to weights."""
    memory: Buffer | None = None
    """What it is bound to where the plan was given memory; None where `prepare` finds it some."""
    source: Any = None
    """The array whose memory that is."""

    @property
    def nbytes(self) -> int:
        """Its bytes at the largest values of the variables."""
        return most(self.shape) * DTYPES[self.dtype].size_bytes

    @property
    def space(self) -> Hashable:
        """In what its bytes are counted: a device's addresses, or its own."""
        return self.number if self.memory is None else self.memory.device

    @property
    def base(self) -> int:
        """Where it begins in its space."""
        return 0 if self.memory is None else self.memory.address


class PlanBuffer:
    """A storage of a plan, or a view into one.

    ``buffer[3]`` and ``buffer[2:5]`` are views along the first axis, ``buffer[::2]`` a strided one;
    `view` takes any shape at any place, and `reshape` the same elements in another shape.
    """

    __slots__ = ("dtype", "offset", "plan", "shape", "storage", "strides")

    def __init__(
        self,
        plan: Any,
        storage: Storage,
        offset: int,
        shape: tuple[Extent, ...],
        dtype: str,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.plan = plan
        self.storage = storage
        self.offset = offset
        """Bytes from the storage's beginning to its first element."""
        self.shape = shape
        self.dtype = dtype
        self.strides = strides
        """Elements from one to the next by axis; None where they follow each other."""

    @property
    def name(self) -> str:
        """Name of its storage."""
        return self.storage.name

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].size_bytes

    @property
    def span(self) -> int:
        """Bytes from its first element to the end of its last, at the most."""
        return self._span_of([largest(size) for size in self.shape])

    def _span_of(self, sizes: Sequence[int]) -> int:
        if self.strides is None or 0 in sizes:
            return math.prod(sizes) * self.itemsize
        last = sum((size - 1) * step for size, step in zip(sizes, self.strides, strict=True))
        return (last + 1) * self.itemsize

    @property
    def range(self) -> tuple[Hashable, int, int]:
        """Space, first byte and end of all that it may touch."""
        begin = self.storage.base + self.offset
        return self.storage.space, begin, begin + self.span

    def range_at(self, values: Mapping[str, int]) -> tuple[Hashable, int, int]:
        """The same where the plan's variables have some values."""
        begin = self.storage.base + self.offset
        pairs = (size.evaluate(values) if isinstance(size, Expr) else size for size in self.shape)
        return self.storage.space, begin, begin + self._span_of(list(pairs))

    def view(
        self,
        shape: Sequence[Extent] | Extent,
        offset: int = 0,
        *,
        strides: Sequence[int] | None = None,
        dtype: object = None,
    ) -> PlanBuffer:
        """Return a view of any shape.

        Args:
            shape: Its sizes.
            offset: Elements of its dtype from here to its first. Default 0.
            strides: Elements from one to the next by axis, each 1 or more. Default None: they
                follow each other.
            dtype: Read the bytes as these. Default the same.

        Raises:
            PlanError: It reaches outside of this buffer.
        """
        if self.strides is not None and (strides is None or dtype is not None):
            raise PlanError(
                f"{self!r} is strided; take the view from the buffer that it is a view of"
            )
        try:
            kind = self.dtype if dtype is None else dtype_of(dtype).name
        except BricklineError as error:
            raise PlanError(f"a view of {self.name}: {error}") from error
        sizes = checked_shape(shape, f"a view of {self.name}")
        steps = None if strides is None else _checked_strides(strides, sizes, self.name)
        itemsize = DTYPES[kind].size_bytes
        start = integer_of(offset)
        if start is None or start < 0:
            raise PlanError(f"expected an offset from 0 on, got {offset!r} - at {self!r}")
        made = PlanBuffer(
            self.plan, self.storage, self.offset + start * itemsize, sizes, kind, steps
        )
        if made.offset + made.span > self.offset + self.span:
            over = made.offset + made.span - self.offset - self.span
            raise PlanError(
                f"a view of shape {_text(sizes)} at element {start} reaches {over} bytes beyond "
                f"{self!r}; views stay inside of what they are views of"
            )
        return made

    def reshape(self, shape: Sequence[Extent] | Extent, *more: Extent) -> PlanBuffer:
        """Return the same elements in another shape.

        Args:
            shape: Its sizes, or the first of them.
            *more: The others, where they are not given together.

        Raises:
            PlanError: They are not as many, or do not follow each other.
        """
        given: Any = (shape, *more) if more else shape
        where = f"a reshape of {self.name}{_left_out(given, self.shape)}"
        sizes = checked_shape(given, where)
        if self.strides is not None:
            raise PlanError(
                f"expected elements that follow each other, got {self!r}; reshape the buffer that "
                "it is a view of, or plan a copy of it first"
            )
        if _count(sizes) is not (_count(self.shape) or 0):
            raise PlanError(
                f"expected as many elements, {_counted(self.shape)} as {self!r} has, got "
                f"{_counted(sizes)} of {_text(sizes)}; {_reshape_hint(self, sizes)}"
            )
        return PlanBuffer(self.plan, self.storage, self.offset, sizes, self.dtype)

    def __getitem__(self, key: int | slice) -> PlanBuffer:
        if not self.shape:
            raise PlanError(f"{self!r} has no axis to index")
        rows, inner = self.shape[0], self.shape[1:]
        if isinstance(rows, Expr) or any(isinstance(size, Expr) for size in inner):
            raise PlanError(f"{self!r} has sizes that vary; take a view(shape, offset)")
        steps: tuple[int, ...] | None = self.strides or _dense(self.shape)
        assert steps is not None
        if isinstance(key, slice):
            try:
                picked = range(rows)[key]
            except (TypeError, ValueError) as error:
                raise PlanError(
                    f"expected a slice of whole numbers: {error} - at {self!r}"
                    f"{_index_hint(key.start if key.stop is None else key.stop)}"
                ) from None
            if picked.step < 0:
                raise PlanError(f"expected a slice that goes forward, got {key} - at {self!r}")
            first, shape = picked.start if len(picked) else 0, (len(picked), *inner)
            strides = (steps[0] * picked.step, *steps[1:])
        else:
            place = integer_of(key)
            if place is None or not -rows <= place < rows:
                raise PlanError(
                    f"expected an index below {rows}, from {-rows} on, got {key!r:.80} - at "
                    f"{self!r}{_index_hint(key)}"
                )
            first, shape, strides = place % rows, inner, steps[1:]
        offset = self.offset + first * steps[0] * self.itemsize
        steps = None if _is_dense(shape, strides) else strides
        return PlanBuffer(self.plan, self.storage, offset, shape, self.dtype, steps)

    def __iter__(self) -> Iterator[PlanBuffer]:
        return (self[place] for place in range(len(self)))

    def __len__(self) -> int:
        if not self.shape or isinstance(self.shape[0], Expr):
            raise TypeError(f"{self!r} has no fixed length")
        return self.shape[0]

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise PlanError(
            f"{self!r} is declared and has no contents; read them from what was prepared: "
            f"prepared.read({self.name!r})"
        )

    def __repr__(self) -> str:
        place = f"+{self.offset}" if self.offset else ""
        stride = f" strides {_text(self.strides)}" if self.strides else ""
        return f"<{self.name}{place} {self.dtype}{_text(self.shape)}{stride}>"


def has_strides(buffer: PlanBuffer, strides: Sequence[Extent]) -> bool:
    """Whether elements lie so far apart; an axis that has one of them may say anything."""
    found = buffer.strides or _dense(buffer.shape)
    pairs = zip(buffer.shape, found, strides, strict=True)
    return all(size == 1 or mine == wanted for size, mine, wanted in pairs)


def largest(size: Extent) -> int:
    """Return a size at the largest values of its variables."""
    return size.high if isinstance(size, Expr) else size


def most(shape: Sequence[Extent]) -> int:
    """Return how many elements a shape has at the most."""
    return math.prod(map(largest, shape))


def checked_shape(shape: Sequence[Extent] | SupportsIndex | Expr, where: str) -> tuple[Extent, ...]:
    """Return sizes as numbers and expressions.

    Raises:
        PlanError: A size is negative, or no size at all.
    """
    given = shape if isinstance(shape, list | tuple) else (shape,)
    sizes: list[Extent] = []
    for size in given:
        if isinstance(size, Expr) and size.value is None:
            if size.low < 0:
                raise PlanError(
                    f"expected sizes from 0 on, got {size}, from {size.low} - at {where}; declare "
                    "its variables with other bounds, or take maximum(..., 0)"
                )
            sizes.append(size)
            continue
        number = size.value if isinstance(size, Expr) else integer_of(size)
        if number is None or number < 0:
            raise PlanError(
                f"expected sizes from 0 on, got {size!r:.80} - at {where}{_size_hint(size)}"
            )
        sizes.append(number)
    return tuple(sizes)


def shape_hint(buffer: PlanBuffer, shape: Sequence[Extent]) -> str:
    """Return how a buffer is passed as another shape, where it has the elements for that."""
    if buffer.strides is not None or most(shape) > most(buffer.shape):
        return ""
    name, sizes = buffer.name, _code(shape)
    if not buffer.offset and _count(shape) is (_count(buffer.shape) or 0):
        return f"; pass {name}.reshape({sizes})"
    return f"; pass other sizes, or a part of it, such as {name}.view({sizes})"


def _reshape_hint(buffer: PlanBuffer, shape: Sequence[Extent]) -> str:
    whole = f"{buffer.name}.reshape({_counted(buffer.shape)}) has all of them"
    if most(shape) > most(buffer.shape):
        return whole
    return f"{whole}, {buffer.name}.view({_code(shape)}) a part"


def _left_out(given: object, shape: Sequence[Extent]) -> str:
    """Return what a single -1 among sizes stands for, in words, or nothing."""
    sizes = list(given) if isinstance(given, list | tuple) else [given]
    others = [size for size in sizes if not (isinstance(size, int) and size == -1)]
    count = _count(shape)
    if len(others) != len(sizes) - 1 or count is None:
        return ""
    rest = _count([size for size in others if isinstance(size, int | Expr)])
    if rest is None or rest.low < 1 or (count % rest).value != 0:
        return ""
    return f", where -1 stands for {count // rest}"


def _size_hint(size: object) -> str:
    if isinstance(size, str) and size in DTYPES:
        return "; the shape comes before the dtype"
    if isinstance(size, str):
        return "; write an expression over variables of the plan without quotes, such as n * 64"
    if isinstance(size, float):
        return "; convert it with int(), or divide with //"
    if size is None or integer_of(size) is not None:
        return "; write every size out"
    return "; pass the sizes as a tuple" if isinstance(size, Iterable) else ""


def _index_hint(key: object) -> str:
    if isinstance(key, tuple):
        return "; index the first axis alone, x[i][j], or take view(shape, offset, strides=...)"
    if isinstance(key, Expr):
        return "; a place that varies is passed to the kernel, as a scalar"
    return ""


def _checked_strides(
    strides: Sequence[int], shape: tuple[Extent, ...], name: str
) -> tuple[int, ...] | None:
    given = strides if isinstance(strides, list | tuple) else (strides,)
    steps = tuple(integer_of(step) or 0 for step in given)
    if len(steps) != len(shape) or any(step < 1 for step in steps):
        raise PlanError(
            f"expected {len(shape)} strides of 1 or more, got {strides!r:.80} - at a view of {name}"
        )
    return None if _is_dense(shape, steps) else steps


def _dense(shape: Sequence[Extent]) -> tuple[int, ...]:
    """Return the strides of elements that follow each other."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * largest(size))
    return tuple(reversed(steps))[-len(shape) :] if shape else ()


def _is_dense(shape: Sequence[Extent], strides: Sequence[int]) -> bool:
    """Whether elements follow each other; the stride of an axis that has one of them is any."""
    if any(isinstance(size, Expr) for size in shape[1:]):
        return False
    pairs = zip(shape, strides, _dense(shape), strict=True)
    return all(size == 1 or step == dense for size, step, dense in pairs)


def _count(shape: Sequence[Extent]) -> Expr | None:
    """Return the number of elements; equal numbers are one object, None where none holds it."""
    try:
        return math.prod((Expr.of(size) for size in shape), start=Expr.of(1))
    except SymbolicError:
        return None


def _counted(shape: Sequence[Extent]) -> str:
    count = _count(shape)
    return "more than int64 holds" if count is None else str(count)


def _code(sizes: Sequence[Extent]) -> str:
    """Return sizes as a caller writes them."""
    return str(sizes[0]) if len(sizes) == 1 else f"({', '.join(map(str, sizes))})"


def _text(sizes: Sequence[Extent]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
