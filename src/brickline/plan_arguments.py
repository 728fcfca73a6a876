"""The arguments of a planned launch: from what a caller passes to what is known to fit.

Scalars are held against their bounds, buffers against dtype, shape, alignment and each other, and
launch shapes are worked out, once for equal scalars. Knows one plan's variables and how to name an
array; not what other launches do with the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from brickline.bricks import BrickId
from brickline.errors import PlanError
from brickline.kernel import Kernel, Param, Scalar
from brickline.plan_buffers import Extent, PlanBuffer, has_strides, largest, shape_hint
from brickline.plan_launches import SIZES, Argument, FloatVariable
from brickline.symbolic import Expr, Variable
from brickline.symbolic_values import integer_of

BEYOND_F32 = (2 - 2**-24) * 2.0**127
"""The smallest number that rounds to infinity."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A kernel with its scalars: what depends on them."""

    scalars: tuple[Argument, ...]
    """By signature; of a buffer, 0."""
    shapes: tuple[tuple[Extent, ...], ...]
    """Of each buffer."""
    strides: tuple[tuple[Extent, ...] | None, ...]
    """Of each buffer; None where its elements follow each other."""
    sizes: tuple[Extent, ...]
    work: tuple[Extent | None, Extent | None]


class Arguments:
    """Checks the arguments of one plan's launches.

    Args:
        plan: The plan, which buffers must belong to.
        variables: Its integers by name.
        floats: Its floats by name.
        of_array: Makes a buffer of the plan of an array, for a parameter, at a place in words.
    """

    def __init__(
        self,
        plan: Any,
        variables: Mapping[str, Variable],
        floats: Mapping[str, FloatVariable],
        of_array: Callable[[Any, Param, str], PlanBuffer],
    ) -> None:
        self._plan = plan
        self._variables = variables
        self._floats = floats
        self._of_array = of_array
        self._bound: dict[tuple[Any, ...], Bound] = {}

    def check(
        self, kernel: Kernel, arguments: Mapping[str, Any], where: str
    ) -> tuple[Bound, list[Argument], list[tuple[Param, PlanBuffer]]]:
        """Return what follows from the scalars, all arguments by signature, and the buffers.

        Raises:
            PlanError: Something is missing, surplus or does not fit.
        """
        _check_names(kernel, arguments, where)
        bound = self._bind_scalars(kernel, arguments, where)
        given = list(bound.scalars)
        buffers: list[tuple[Param, PlanBuffer]] = []
        for place, declared in enumerate(kernel.signature):
            if isinstance(declared, Param):
                at = len(buffers)
                buffer = self._buffer(declared, arguments[declared.name], bound.shapes[at], where)
                _check_strides(buffer, bound.strides[at], f"{where}, {declared.name}")
                given[place] = buffer
                buffers.append((declared, buffer))
        _check_aliases(buffers, where)
        return bound, given, buffers

    def check_variables(self, sizes: Sequence[Extent], where: str) -> None:
        """Refuse an expression over variables that the plan does not have."""
        for size in sizes:
            if not isinstance(size, Expr):
                continue
            for variable in size.variables:
                if self._variables.get(variable.name) is not variable:
                    raise PlanError(
                        f"{where}: {size} has {variable!r}, which is no variable of plan "
                        f"{self._plan.name}; declare it with plan.variable"
                    )

    def _bind_scalars(self, kernel: Kernel, given: Mapping[str, Any], where: str) -> Bound:
        """Return shapes and sizes for the scalars of a launch, computed once for equal ones."""
        values = tuple(given[scalar.name] for scalar in kernel.scalars)
        key = _key(kernel, values)
        found = self._bound.get(key)
        if found is not None:
            return found
        scalars = [
            0 if isinstance(each, Param) else self._scalar(each, given[each.name], where)
            for each in kernel.signature
        ]
        integers = {
            declared.name: Expr.of(value)
            for declared, value in zip(kernel.signature, scalars, strict=True)
            if isinstance(declared, Scalar) and isinstance(value, int | Expr)
        }

        def extent(expression: Expr) -> Extent:
            found = expression.substitute(integers)
            return found if found.value is None else found.value

        local = kernel.local_size or (Expr.of(1),) * 3
        sizes = tuple(map(extent, (*kernel.global_size, *local, kernel.shared_bytes)))
        for name, size in zip(SIZES, sizes, strict=True):
            least = 0 if name == "shared_bytes" else 1
            if largest(size) < least:
                raise PlanError(
                    f"{where}: expected {name} of at least {least}, got {size}; skip the launch, "
                    "or pass other values"
                )
        found = Bound(
            tuple(scalars),
            tuple(tuple(map(extent, param.shape)) for param in kernel.params),
            tuple(param.strides and tuple(map(extent, param.strides)) for param in kernel.params),
            sizes,
            (
                None if kernel.flops is None else extent(kernel.flops),
                None if kernel.bytes is None else extent(kernel.bytes),
            ),
        )
        if key:
            self._bound[key] = found
        return found

    def _scalar(self, declared: Scalar, value: Any, where: str) -> Argument:
        place = f"{where}, {declared.name}"
        if declared.variable is None:
            if isinstance(value, FloatVariable):
                if self._floats.get(value.name) is not value:
                    raise PlanError(
                        f"{place}: {value.name} is no variable of plan {self._plan.name}; declare "
                        "it with plan.variable"
                    )
                return value
            real = checked_number(value, place)
            if declared.dtype == "f32" and BEYOND_F32 <= abs(real) < math.inf:
                raise PlanError(f"{place}: expected a number that fits f32, got {real}")
            return real
        found: Extent
        if isinstance(value, Expr) and value.value is None:
            self.check_variables((value,), place)
            found, low, high = value, value.low, value.high
        else:
            number = value.value if isinstance(value, Expr) else integer_of(value)
            if number is None:
                hint = _whole_hint(value)
                raise PlanError(
                    f"{place}: expected a whole number or an expression, got {value!r:.80}{hint}"
                )
            found = low = high = number
        if low < declared.variable.low or high > declared.variable.high:
            reach = f"{found}" if low == high else f"{found}, from {low} to {high}"
            raise PlanError(
                f"{place}: expected a value from {declared.variable.low} to "
                f"{declared.variable.high}, got {reach}"
            )
        return found

    def _buffer(
        self, param: Param, value: Any, shape: tuple[Extent, ...], where: str
    ) -> PlanBuffer:
        place = f"{where}, {param.name}"
        if isinstance(value, str):
            raise PlanError(
                f"{place}: expected a Buffer or an array, or a buffer of the plan, got the text "
                f"{value!r:.80}; pass what plan.buffer returned, not its name"
            )
        buffer = value if isinstance(value, PlanBuffer) else self._of_array(value, param, place)
        if buffer.plan is not self._plan:
            raise PlanError(
                f"{place}: {buffer!r} belongs to plan {buffer.plan.name}, not to plan "
                f"{self._plan.name}; declare it here too, with plan.buffer"
            )
        if buffer.dtype != param.dtype:
            raise PlanError(f"{place}: expected {param.dtype}, got {buffer.dtype}, {buffer!r}")
        if buffer.shape != shape:
            buffer = _beginning(buffer, shape, place)
        if (buffer.storage.base + buffer.offset) % param.align and buffer.span:
            raise PlanError(
                f"{place}: expected memory aligned to {param.align} bytes, got {buffer!r}; begin "
                "the view at a multiple"
            )
        memory = buffer.storage.memory
        if param.access.writes and memory is not None and memory.is_read_only:
            raise PlanError(f"{place}: writes to {buffer!r}, whose array is read-only")
        return buffer


def _whole_hint(value: Any) -> str:
    if isinstance(value, FloatVariable):
        return "; declare an integer with plan.variable(name, low, high)"
    return "; convert it with int()" if isinstance(value, float) else ""


def _check_strides(buffer: PlanBuffer, strides: tuple[Extent, ...] | None, where: str) -> None:
    if strides is None:
        if buffer.strides is not None:
            raise PlanError(
                f"{where}: expected elements that follow each other, got {buffer!r}; plan a copy "
                "of it first, or declare strides= of the parameter"
            )
    elif not has_strides(buffer, strides):
        wanted = ", ".join(map(str, strides))
        raise PlanError(f"{where}: expected strides [{wanted}], got {buffer!r}")


def _key(kernel: Kernel, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return what scalars are found by; nothing where one may change under its owner's hands."""
    if not all(isinstance(value, int | float | Expr | FloatVariable) for value in values):
        return ()
    signs = [math.copysign(1.0, value) for value in values if isinstance(value, float)]
    return (kernel.digest, *((type(value), value) for value in values), *signs)  # 0.0 is -0.0


def _check_names(kernel: Kernel, given: Mapping[str, Any], where: str) -> None:
    names = [each.name for each in kernel.signature]
    if len(given) == len(names) and all(name in given for name in names):
        return
    taken = [name for name in ("brick", "layer") if name in names]
    if taken:
        raise PlanError(
            f"{where}: kernel {kernel.name} has an argument {' and one '.join(taken)}, which "
            "plan.launch takes for itself, to say what a launch belongs to; rename it in the "
            f"kernel, for example to {taken[0]}_index"
        )
    missing = [name for name in names if name not in given]
    surplus = [name for name in given if name not in names]
    problems = [f"misses {', '.join(missing)}"] if missing else []
    problems += [f"has no argument {', '.join(surplus)}"] if surplus else []
    raise PlanError(
        f"{where}: the launch {' and '.join(problems)}; kernel {kernel.name} takes "
        f"{', '.join(names)}"
    )


def brick_name(brick: str | BrickId | None, kernel: Kernel, where: str) -> str:
    """Return the name of the unit of work that a launch belongs to, else its kernel's."""
    if brick is None:
        return kernel.name
    if isinstance(brick, BrickId):
        return brick.label
    if not isinstance(brick, str) or not brick:
        raise PlanError(f"{where}: expected brick as a name or a BrickId, got {brick!r:.80}")
    return brick


def layer_number(layer: int | None, where: str) -> int | None:
    """Return the layer that a launch belongs to, if any."""
    number = None if layer is None else integer_of(layer)
    if layer is not None and (number is None or not 0 <= number < 2**31):
        raise PlanError(f"{where}: expected layer as a number from 0 on, got {layer!r:.80}")
    return number


def checked_flag(value: Any, where: str, name: str) -> bool:
    """Return a truth value; a text is none, whatever it says."""
    if not isinstance(value, bool | np.bool_):
        raise PlanError(f"{where}: expected {name} as True or False, got {value!r:.80}")
    return bool(value)


def checked_number(value: Any, where: str) -> float:
    """Return a floating-point number; texts and truth values are none."""
    if isinstance(value, Expr):
        raise PlanError(
            f"{where}: expected a number, got {value!r:.80}, an integer of the plan; declare a "
            'float with plan.variable(name, dtype="f32")'
        )
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError(type(value).__name__)
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"{where}: expected a number, got {value!r:.80} ({error})") from error


def _beginning(buffer: PlanBuffer, shape: tuple[Extent, ...], where: str) -> PlanBuffer:
    """Return the part of a buffer that a shape whose first size varies takes of it.

    Raises:
        PlanError: The shape is another one.
    """
    fits = (
        len(shape) == len(buffer.shape)
        and bool(shape)
        and shape[1:] == buffer.shape[1:]
        and isinstance(shape[0], Expr)
        and isinstance(buffer.shape[0], int)
        and shape[0].high <= buffer.shape[0]
    )
    if not fits:
        wanted = f"[{', '.join(map(str, shape))}]"
        highest = [size.high for size in shape if isinstance(size, Expr)]
        most = f" (at most {math.prod(map(largest, shape))} elements)" if highest else ""
        hint = shape_hint(buffer, shape)
        raise PlanError(f"{where}: expected shape {wanted}{most}, got {buffer!r}{hint}")
    return buffer.view(shape)


def _check_aliases(buffers: Sequence[tuple[Param, PlanBuffer]], where: str) -> None:
    """Refuse a launch that writes where another of its arguments lies."""
    for at, (param, buffer) in enumerate(buffers):
        for other, theirs in buffers[at + 1 :]:
            if not (param.access.writes or other.access.writes):
                continue
            space, begin, end = buffer.range
            their_space, their_begin, their_end = theirs.range
            shared = min(end, their_end) - max(begin, their_begin)
            if space == their_space and shared > 0:
                writer, reader = (param, other) if param.access.writes else (other, param)
                raise PlanError(
                    f"{where} writes to {writer.name}, which shares {shared} bytes with "
                    f"{reader.name}; use memory of its own, or a kernel with one read-write "
                    "argument"
                )
