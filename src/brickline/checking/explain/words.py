"""How values, operations and numbers are called in a cause."""

from __future__ import annotations

from typing import Any

from brickline.checking.execution.tape import ARGUMENT, CONSTANT, WEIGHT, Step, Value
from brickline.checking.logic.known_values import KnownValues, is_plain_copy


def op_words(step: Any) -> str:
    """Return the name of an operation, of a step or an overload."""
    name: str = step.name if isinstance(step, Step) else step._schema.name
    return name.rpartition("::")[2].strip("_")


def number_words(value: Any) -> str:
    """Return a number with no more digits than it needs."""
    if isinstance(value, float):
        return next(
            text for text in (f"{value:.{k}g}" for k in (3, 6, 9, 17)) if _is_near(text, value)
        )
    return str(value)


def _is_near(text: str, value: float) -> bool:
    return value != value or abs(float(text) - value) <= 1e-12 * abs(value) or text == repr(value)


def value_words(side: KnownValues, index: int) -> str:
    """Return what a value is: a weight, an argument, or the output of a module or operation."""
    index = origin(side, index)
    value = side.values[index]
    step = value.step
    if step.name == WEIGHT:
        return value.name
    if step.name == ARGUMENT:
        return f"the argument {value.name}"
    if step.name == CONSTANT:
        return value.name or f"a constant of {step.frame.path or 'the model'}"
    part = _part(side, value)
    if part is not None:
        return part
    path = step.frame.path
    of = f"the output of {path}" if path else "the model's output"
    last = step.frame.returned
    if any(origin(side, k) == index for k in last):
        return of
    return (
        f"what {op_words(step)} puts out in {path}" if path else f"what {op_words(step)} puts out"
    )


def origin(side: KnownValues, index: int) -> int:
    """Return the value that one is a plain copy of."""
    value = side.values[index]
    while is_plain_copy(side.tape, value):
        index = value.step.inputs[0]
        value = side.values[index]
    return index


def _part(side: KnownValues, value: Value) -> str | None:
    """Return which part of another value one is; None where it is not a part."""
    step = value.step
    if step.name not in _PARTS or not step.inputs:
        return None
    source = side.values[step.inputs[0]]
    if source.tensor.numel() == value.tensor.numel():
        return None
    whole = value_words(side, source.index)
    numbers = [leaf for leaf in step.args[1:] if isinstance(leaf, int)]
    if step.name in ("aten::slice", "aten::narrow") and len(numbers) >= 2:
        dim, start = numbers[:2]
        size = value.shape[dim]
        start = start % source.shape[dim] if start < 0 else start
        return f"elements {start} to {start + size - 1} (dimension {dim}) of {whole}"
    if step.name == "aten::select" and len(numbers) == 2:
        return f"element {numbers[1]} (dimension {numbers[0]}) of {whole}"
    return f"part {value.out} of {whole}"


_PARTS = frozenset(
    {
        "aten::slice",
        "aten::narrow",
        "aten::select",
        "aten::split",
        "aten::split_with_sizes",
        "aten::chunk",
        "aten::unbind",
    }
)
