"""What a kernel should compute: its NumPy reference, called as the kernel would be.

References are written in float32 and wider. 16- and 8-bit floats are widened on their way in, and
what comes back is rounded to the dtype of the parameter that it stands for. Knows no device.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.dtypes import dtype_of
from brickline.errors import KernelError, LaunchError
from brickline.kernel import Kernel, Param


def run_reference(kernel: Kernel, arguments: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return what the kernel writes, by parameter, as its reference computes it.

    Args:
        kernel: A kernel with a `reference`.
        arguments: Host arrays of the parameters that are read, and all scalars. Those that are
            only written may be among them; their contents do not matter.

    Raises:
        KernelError: if there is no reference, or it returns something else than it should.
        LaunchError: if an argument is missing or of another shape.
    """
    if kernel.reference is None:
        raise KernelError(f"kernel {kernel.name} has no reference; declare it with reference=")
    known = {each.name for each in kernel.signature}
    strangers = ", ".join(sorted(arguments.keys() - known))
    if strangers:
        raise LaunchError(
            f"kernel {kernel.name} has no argument {strangers}; it takes "
            f"{', '.join(each.name for each in kernel.signature)}"
        )
    scalars = {
        scalar.name: arguments[scalar.name] for scalar in kernel.scalars if scalar.name in arguments
    }
    kernel.sizes(scalars)  # refuses integers that are missing or out of bounds
    for scalar in kernel.scalars:
        value = scalars.get(scalar.name)
        if scalar.variable is None and not isinstance(value, Real):
            raise LaunchError(
                f"kernel {kernel.name}: {scalar.name}: expected a number, got {value!r:.80}"
            )
    integers = {scalar.name: scalars[scalar.name] for scalar in kernel.scalars if scalar.variable}
    given = {
        param.name: _widened(kernel, param, arguments, integers)
        for param in kernel.params
        if param.access.reads
    }
    try:
        bound = inspect.signature(kernel.reference).bind(**given, **scalars)
    except TypeError as error:
        names = ", ".join([*given, *scalars])
        raise KernelError(
            f"expected the reference of kernel {kernel.name} to take {names}: what is read, and "
            f"the scalars; {error}"
        ) from None
    result = kernel.reference(*bound.args, **bound.kwargs)
    outs = [kernel.params[slot] for slot in kernel.outs]
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != len(outs):
        names = ", ".join(out.name for out in outs)
        raise KernelError(
            f"expected the reference of kernel {kernel.name} to return {names}, got {len(results)} "
            "results; return a tuple in the order of the signature"
        )
    return {
        out.name: _narrowed(kernel, out, array, integers)
        for out, array in zip(outs, results, strict=True)
    }


def _shape(param: Param, integers: Mapping[str, Any], where: str) -> tuple[int, ...]:
    return tuple(size.evaluate(integers, where) for size in param.shape)


def _widened(
    kernel: Kernel, param: Param, arguments: Mapping[str, Any], integers: Mapping[str, Any]
) -> NDArray[Any]:
    where = f"kernel {kernel.name}, {param.name}"
    if param.name not in arguments:
        raise LaunchError(f"kernel {kernel.name}: argument {param.name} is missing")
    array, dtype = np.asarray(arguments[param.name]), dtype_of(param.dtype)
    shape = _shape(param, integers, where)
    if array.dtype != dtype.numpy or array.shape != shape:
        raise LaunchError(
            f"expected {dtype}{list(shape)}, got {array.dtype}{list(array.shape)} - at {where}"
        )
    is_small = dtype.kind == "float" and dtype.size_bytes < 4
    return array.astype(np.float32) if is_small else array


def _narrowed(kernel: Kernel, out: Param, array: Any, integers: Mapping[str, Any]) -> NDArray[Any]:
    where = f"kernel {kernel.name}, {out.name}"
    found, shape = np.asarray(array), _shape(out, integers, where)
    if found.shape != shape:
        raise KernelError(
            f"expected the reference to return shape {shape}, got {found.shape} - at {where}"
        )
    return found.astype(dtype_of(out.dtype).numpy)
