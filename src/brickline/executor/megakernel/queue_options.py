"""What a queue of a megakernel is asked for: names, numbers, times and priorities, checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from brickline.buffers import Buffer, as_buffer
from brickline.errors import LaunchError
from brickline.executor.megakernel.options import LONGEST_S
from brickline.executor.megakernel.queue_arguments import check_kernel
from brickline.executor.megakernel.queue_refusals import refusal
from brickline.kernel import Kernel

MAX_SLOTS = 1 << 24
FOREVER = math.inf


class Priority(IntEnum):
    """How urgent a submission is."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3
    IDLE = 4


def count_of(where: str, name: str, value: Any, most: int, *, least: int = 1) -> int:
    """Return a whole number within bounds.

    Raises:
        QueueError: It is none.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        expected = f"expected a whole number from {least} to {most}"
        raise refusal("MK511", f"{where}, {name}", f"{expected}, got {value!r:.80}")
    return number


def flag_of(where: str, name: str, value: Any) -> bool:
    """Return a truth value; a text is none, whatever it says.

    Raises:
        QueueError: It is none.
    """
    if not isinstance(value, bool | np.bool_):
        raise refusal("MK511", f"{where}, {name}", f"expected True or False, got {value!r:.80}")
    return bool(value)


def codes_of(where: str, name: str, values: Any) -> list[int]:
    """Return codes of faults.

    Raises:
        QueueError: They are none.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise refusal(
            "MK511",
            f"{where}, {name}",
            f"expected a list of codes such as [20], got {values!r:.80}",
        )
    return [count_of(where, name, code, 2**32 - 2) for code in values]


def outputs_of(where: str, values: Any) -> dict[str, Buffer] | None:
    """Return memory by its names; None stays.

    Raises:
        QueueError: They are no arrays by name.
    """
    if values is None:
        return None
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise refusal("MK511", where, f'expected arrays by name, {{"y": y}}, got {values!r:.80}')
    found = {}
    for name, value in values.items():
        try:
            found[name] = as_buffer(value)
        except LaunchError as error:
            raise refusal("MK511", f"{where}, {name!r:.80}", f"{error}") from error
    return found


def named_kernels(where: str, ops: Any) -> dict[str, Kernel]:
    """Return kernels by the names of their ops.

    Raises:
        QueueError: They are none, or two have one name.
    """
    if isinstance(ops, Mapping):
        pairs = list(ops.items())
    elif isinstance(ops, Sequence) and not isinstance(ops, str):
        pairs = [(getattr(each, "name", repr(each)[:80]), each) for each in ops]
    else:
        raise refusal(
            "MK511",
            f"{where}, ops",
            f"expected a list of kernels, or kernels by name, got {ops!r:.80}",
        )
    if not pairs:
        raise refusal("MK511", f"{where}, ops", "expected a kernel at least, got none")
    found: dict[str, Kernel] = {}
    for name, kernel in pairs:
        if not isinstance(name, str) or not name or name in found:
            raise refusal(
                "MK511",
                f"{where}, ops",
                f"expected a name of its own for each, got {name!r:.80}; pass kernels by name",
            )
        found[name] = check_kernel(name, kernel)
    return found


def checked_name(name: Any) -> str:
    """Return the name of a queue.

    Raises:
        QueueError: It is no text.
    """
    if not isinstance(name, str) or not name:
        raise refusal("MK511", "name of a megakernel", f"expected text, got {name!r:.80}")
    return name


def seconds_of(where: str, value: Any) -> float:
    """Return a time to wait for; None is for ever.

    Raises:
        QueueError: It is no time.
    """
    if value is None:
        return FOREVER
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or isinstance(value, bool) or not 0 < value <= LONGEST_S:
        raise refusal(
            "MK508",
            where,
            f"expected a number of seconds above 0 and up to {LONGEST_S}, or None, which is for "
            f"ever, got {value!r:.80}",
        )
    return float(value)


def priority_of(where: str, value: Any) -> int:
    """Return the number of a priority.

    Raises:
        QueueError: There is no such priority.
    """
    if isinstance(value, str):
        found = Priority.__members__.get(value.upper())
        if found is not None:
            return int(found)
    elif isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value <= 4:
        return int(value)
    names = ", ".join(each.lower() for each in Priority.__members__)
    raise refusal("MK509", where, f"expected {names}, or 0 to 4, got {value!r:.80}")


def priorities_of(where: str, value: Any, count: int) -> Any:
    """Return one priority for all submissions, or an array with one for each.

    Raises:
        QueueError: One of them is none.
    """
    if np.ndim(value) == 0:
        return priority_of(where, value)
    array = np.asarray(value)
    if array.shape != (count,) or array.dtype.kind not in "iu" or ((array < 0) | (array > 4)).any():
        raise refusal("MK509", where, f"expected {count} numbers from 0 to 4, got {value!r:.80}")
    return np.ascontiguousarray(array, np.uint32)
