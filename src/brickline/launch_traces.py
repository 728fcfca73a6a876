"""What `BrickProfiler.trace` writes of one launch: checksums and fingerprints of its tensors.

Knows tensors of torch, NumPy and DLPack, and `traces`; not the profiler, and no comparison.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from brickline.checksums import fnv1a_f32_of_all
from brickline.errors import BricklineError, CountError, UsageError
from brickline.fingerprints import Fingerprint, fingerprint
from brickline.timers import checked_count
from brickline.traces import KernelTrace, Operand, Traces, launch_fields, span_until

_MASK = 2**64 - 1


def write_launch(
    traces: Traces,
    ended_ns: int,
    *,
    name: str,
    layer: int | None,
    position: int,
    inputs: Any,
    outputs: Any,
    params: str | Mapping[str, Any],
    time_us: float | None,
    backend: str | None,
    **place: Any,
) -> KernelTrace:
    """Append a launch that has ended and return what a comparison will see of it.

    Args:
        traces: Where it is written.
        ended_ns: When it ended, on the run's clock.
        name: As those that follow, of `BrickProfiler.trace`.
        layer: None: outside layers.
        position: Number of the pass.
        inputs: A tensor or several.
        outputs: Likewise.
        params: JSON text or a mapping.
        time_us: None: not known.
        backend: None: where its tensors lie.
        place: What else is known of it, by the arguments of `Traces.write`: its brick's slot, its
            ordinal, the hash of its source.

    Raises:
        UsageError: if something given is of another kind, or a tensor cannot be read.
    """
    given, made = _tensors("inputs", inputs), _tensors("outputs", outputs)
    trace = KernelTrace(
        name,
        None if layer is None else checked_count("layer", layer, 2**31 - 1),
        position,
        _backend_of((*made, *given)) if backend is None else backend,
        _params_text(params),
        0.0 if time_us is None else time_us,
        _checksum("inputs", given),
        _checksum("outputs", made),
    )
    prints = [_print("inputs", tensor) for tensor in given]
    prints += [_print("outputs", tensor) for tensor in made]
    number = traces.reserve()
    roles = [(0, index) for index in range(len(given))] + [(1, index) for index in range(len(made))]
    traces.write(
        number,
        **launch_fields(trace),
        **span_until(ended_ns, trace.time_us),
        **place,
        operands=[
            _operand(traces, role, index, tensor, taken)
            for (role, index), tensor, taken in zip(roles, (*given, *made), prints, strict=True)
        ],
    )
    return trace


def _tensors(role: str, given: Any) -> tuple[Any, ...]:
    """Return the tensors of one argument, which may be a single one."""
    if _is_tensor(given):
        return (given,)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise UsageError(f"{role}: expected a tensor or a list of tensors, got {given!r:.60}")
    tensors = tuple(given)
    for tensor in tensors:
        if not _is_tensor(tensor):
            raise UsageError(
                f"{role}: expected tensors of torch, NumPy or DLPack, got {tensor!r:.60}; "
                "numbers go to params="
            )
    return tensors


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__")


def _params_text(params: str | Mapping[str, Any]) -> str:
    if isinstance(params, str):
        return params
    try:
        return json.dumps(dict(params), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"params: expected JSON text or a mapping of plain values: {error}"
        ) from None


def _backend_of(tensors: Iterable[Any]) -> str:
    """Return the device that the first tensor lies on, as backends are called."""
    for tensor in tensors:
        device = getattr(tensor, "device", None)
        kind = getattr(device, "type", None) or str(device or "cpu").partition(":")[0]
        return str(kind).upper()
    return "CPU"


def _checksum(role: str, tensors: tuple[Any, ...]) -> int | None:
    if not tensors:
        return None
    try:
        return fnv1a_f32_of_all(tensors)
    except UsageError as error:
        raise UsageError(f"{role}: {error}") from None


def _print(role: str, tensor: Any) -> Fingerprint:
    try:
        return fingerprint(tensor)
    except CountError:
        raise
    except BricklineError as error:
        raise UsageError(f"{role}: {error}") from error


def _operand(traces: Traces, role: int, index: int, tensor: Any, taken: Fingerprint) -> Operand:
    return Operand(
        role,
        index,
        _identity_of(tensor, taken),
        int(getattr(tensor, "_version", 0)) if _is_torch(tensor) else 0,
        taken.dtype,
        taken.shape,
        _strides(tensor, taken.shape),
        traces.fingerprint(taken.to_bytes()),
    )


def _is_torch(tensor: Any) -> bool:
    return isinstance(tensor, getattr(sys.modules.get("torch"), "Tensor", ()))


def _identity_of(tensor: Any, taken: Fingerprint) -> int:
    """Return the same number for the same memory with the same contents, never 0."""
    if _is_torch(tensor):
        address = tensor.data_ptr()
    elif hasattr(tensor, "__array_interface__"):
        address = tensor.__array_interface__["data"][0]
    else:
        address = getattr(tensor, "address", 0)
    return hash((address, taken.hash)) & _MASK or 1


def _strides(tensor: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides in elements; of what does not say, those of contiguous memory."""
    if _is_torch(tensor):
        return tuple(tensor.stride())
    strides, size = getattr(tensor, "strides", None), getattr(tensor, "itemsize", 0)
    if isinstance(strides, tuple) and size:
        return tuple(stride // size for stride in strides)
    found, step = [], 1
    for length in reversed(shape):
        found.append(step)
        step *= length
    return tuple(reversed(found))
