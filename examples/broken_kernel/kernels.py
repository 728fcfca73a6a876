"""A hand-written RMS norm that reads each row in blocks, and forgets what no whole block covers.

On a GPU with Triton it is a Triton kernel. Elsewhere the same programs run in PyTorch, one for all
rows at once, with the same blocks and the same mistake.
"""

import torch

BLOCK = 64

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def rms_norm(x, weight, eps):
    """Scale each row of `x` to a root mean square of one, then by `weight`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    if triton is not None and x.is_cuda:
        _rms_norm_kernel[(rows.shape[0],)](rows, weight, out, rows.shape[1], eps, BLOCK=BLOCK)
    else:
        _rms_norm_program(rows, weight, out, rows.shape[1], eps)
    return out.reshape(x.shape)


def _rms_norm_program(x, weight, out, size, eps):
    total = torch.zeros(len(x), dtype=torch.float32)
    for start in range(0, size // BLOCK * BLOCK, BLOCK):  # the mistake: the tail is left out
        block = x[:, start : start + BLOCK].float()
        total += (block * block).sum(-1)
    scale = torch.rsqrt(total / size + eps)[:, None]
    for start in range(0, size, BLOCK):
        columns = slice(start, min(start + BLOCK, size))
        out[:, columns] = x[:, columns] * scale * weight[columns]


if triton is not None:

    @triton.jit
    def _rms_norm_kernel(x, weight, out, size, eps, BLOCK: tl.constexpr):  # noqa: N803
        row = tl.program_id(0)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, size // BLOCK * BLOCK, BLOCK):  # the mistake: the tail is left out
            block = tl.load(x + row * size + start + tl.arange(0, BLOCK)).to(tl.float32)
            total += block * block
        scale = 1 / tl.sqrt(tl.sum(total) / size + eps)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < size
            value = tl.load(x + row * size + columns, mask=inside)
            gain = tl.load(weight + columns, mask=inside)
            tl.store(out + row * size + columns, value * scale * gain, mask=inside)
