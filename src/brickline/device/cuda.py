"""CUDA's clock: pairs of driver events, recorded and resolved by the native core.

Knows how to find a device's current context and the stream that work goes to. The context belongs
to torch or cuda-core; brickline creates none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from brickline.device.base import Clock, Sampling
from brickline.errors import DeviceError

if TYPE_CHECKING:
    from brickline import _core


class CudaClock(Clock):
    """Times of bricks on one CUDA device, in its streams."""

    # A timed brick costs some eight microseconds of host time in a real decode loop. One timed step
    # in 128 keeps that below half a per cent of a launch-bound step.
    default_sampling = Sampling(steps=128)

    def __init__(self, number: int, stream: Any) -> None:
        self.name = f"CUDA:{number}"
        self._number = number
        self._stream = None if stream is None else stream_handle(stream)

    def prepare(self, core: _core.ProfilerCore) -> None:
        """Leave the host's ticks as they are: they time steps and enqueueing."""

    def attach(self, core: _core.ProfilerCore) -> None:
        """Hand the device's events to the core."""
        with _current_device(self._number) as getter:
            if self._stream is not None:
                core._use_cuda(self._number, self._stream, None)
            else:
                core._use_cuda(self._number, 0, getter)


def open_clock(number: int, stream: Any) -> CudaClock:
    """Return the clock of a CUDA device."""
    return CudaClock(number, stream)


def stream_handle(stream: Any) -> int:
    """Return the driver's handle of a stream of torch, CuPy or cuda-core, or of an integer."""
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    raise DeviceError(
        f"stream: expected a handle, or a stream of torch, CuPy or cuda-core, got {stream!r}"
    )


@contextmanager
def _current_device(number: int) -> Iterator[Callable[[int], int] | None]:
    """Make the primary context current; give torch's look-up of the current stream, if loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        if number >= torch.cuda.device_count():
            raise DeviceError(
                f"there is no device CUDA:{number}; torch sees {torch.cuda.device_count()}"
            )
        with torch.cuda.device(number):  # the caller's own device is current again afterwards
            torch.cuda.current_stream(number).query()  # the first use makes the context
            yield torch._C._cuda_getCurrentRawStream
        return
    try:
        from cuda.core import Device
    except ImportError:
        # The core says what is missing: the driver, the device or a current context.
        yield None
        return
    try:
        Device(number).set_current()
    except Exception as error:
        raise DeviceError(f"CUDA:{number} cannot be used: {error}") from error
    yield None
