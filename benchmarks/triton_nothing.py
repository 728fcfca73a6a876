"""A Triton kernel that does nothing: a peer of kernels_cuda.py. Triton reads it from this file."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


@triton.jit
def nothing(x, y, n, SIZE: tl.constexpr):  # noqa: N803
    if n < 0:
        tl.store(y, tl.load(x))


def burst(x: Any, y: Any, count: int) -> Callable[[], None]:
    """Launch it `count` times."""

    def run() -> None:
        for _ in range(count):
            nothing[(1,)](x, y, 16, SIZE=16)

    return run


@triton.jit
def numbered(x, y, n, NUMBER: tl.constexpr):  # noqa: N803
    at = tl.arange(0, 16)
    tl.store(y + at, tl.load(x + at, mask=at < n) + NUMBER, mask=at < n)
