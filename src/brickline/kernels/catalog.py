"""The kernels that ship: one function each, from dtypes to a `Kernel`.

A module a family declares them. A reference takes the buffers that the kernel reads and its scalars
by name, 16- and 8-bit floats widened to float32, computes in float64 and returns what the kernel
writes. It knows no device.
"""

from brickline.kernels.attention import attention_combine, attention_decode, rope_attention
from brickline.kernels.declaring import FAULT_CAPACITY, FAULT_TOKEN
from brickline.kernels.elementwise import gelu_gate, residual, silu_gate
from brickline.kernels.fused import gated_gemv, gemv_residual, norm_gemv
from brickline.kernels.norms import layer_norm, rms_norm, softmax
from brickline.kernels.products import gemm, gemv
from brickline.kernels.rotary import kv_append, rope, rope_append
from brickline.kernels.tokens import argmax_combine, argmax_tiles, embedding

__all__ = [
    "FAULT_CAPACITY",
    "FAULT_TOKEN",
    "argmax_combine",
    "argmax_tiles",
    "attention_combine",
    "attention_decode",
    "embedding",
    "gated_gemv",
    "gelu_gate",
    "gemm",
    "gemv",
    "gemv_residual",
    "kv_append",
    "layer_norm",
    "norm_gemv",
    "residual",
    "rms_norm",
    "rope",
    "rope_append",
    "rope_attention",
    "silu_gate",
    "softmax",
]
