"""Finding CUDA's current context and streams, whoever made them.

Contexts belong to torch or cuda-core; brickline creates none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from brickline.errors import DeviceError


def is_cuda_error(error: Exception) -> bool:
    """Whether CUDA, or loading it, failed; anything else that is raised is a bug of ours.

    cuda-core exports no class of its errors and has moved the module that they are in, so the
    class is told by its name: `CUDAError`, and below it `NVRTCError`. Devices that are not there
    and drivers that cannot be loaded are built-in errors.
    """
    is_cudas = any(kind.__name__ == "CUDAError" for kind in type(error).__mro__)
    return is_cudas or isinstance(error, ValueError | RuntimeError | OSError | MemoryError)


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


def current_stream(number: int) -> int:
    """Return the handle of torch's current stream, or of the default stream without torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    return int(torch._C._cuda_getCurrentRawStream(number))


@contextmanager
def current_device(number: int) -> Iterator[Callable[[int], int] | None]:
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
        if not is_cuda_error(error):
            raise
        raise DeviceError(f"CUDA:{number} cannot be used: {error}") from error
    yield None
