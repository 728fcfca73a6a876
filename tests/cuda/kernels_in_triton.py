"""A norm in Triton that forgets the last columns; Triton reads the source of its kernels."""

import torch
import triton
import triton.language as tl


@triton.jit
def _norm(x, weight, y, columns, eps, block: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, block)
    # The mask leaves the last four columns out of the sum.
    seen = tl.load(x + row * columns + at, mask=at < columns - 4, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(seen * seen, 0) / columns + eps)
    value = tl.load(x + row * columns + at, mask=at < columns, other=0.0)
    gain = tl.load(weight + at, mask=at < columns, other=0.0)
    tl.store(y + row * columns + at, value * scale * gain, mask=at < columns)


def broken_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise, wrongly."""
    y = torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    _norm[(rows,)](x, weight, y, x.shape[-1], eps, triton.next_power_of_2(x.shape[-1]))
    return y
