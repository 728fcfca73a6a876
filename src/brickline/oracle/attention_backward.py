"""Gradients of fused attention: what they mean in float64, and how far rounding may take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from brickline.oracle.attention import empty_like_inputs, heads
from brickline.oracle.bounds import Budget, rule
from brickline.oracle.calls import Call, exact_form
from brickline.oracle.contractions import matmul_input_unit

BACKWARD = """_scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_fused_attention_overrideable_backward"""


def _gradient(call: Call) -> torch.Tensor:
    found = call.get("grad_out")
    return call.get("grad_out_") if found is None else found


@exact_form(BACKWARD)
def _backward(call: Call) -> list[torch.Tensor | None]:
    queries, keys, values = empty_like_inputs(call)
    grads, outs = _gradient(call), call.get("out")
    for head in heads(call):
        grad, out = grads[head.where].double(), outs[head.where].double()
        weights, shared = head.probabilities, (head.where[0], head.shared)
        values[shared] += weights.T @ grad
        inner = weights * (grad @ head.value.T - (grad * out).sum(-1, keepdim=True))
        queries[head.where] = inner @ head.key * head.scale
        keys[shared] += inner.T @ head.query * head.scale
    return [queries, keys, values]


@rule(BACKWARD, skipped=(3,))
def backward(call: Call, exact: Sequence[torch.Tensor | None]) -> list[Budget | None]:
    """Budgets of the gradients of queries, keys and values."""
    sizes = [torch.zeros_like(each) for each in exact[:3] if each is not None]
    stored = [torch.zeros_like(each) for each in sizes]
    grads, outs = _gradient(call), call.get("out")
    least = float(torch.finfo(call.get("query").dtype).smallest_normal)
    for head in heads(call):
        grad, out = grads[head.where].double().abs(), outs[head.where].double().abs()
        weights, shared = head.probabilities, (head.where[0], head.shared)
        average = (weights * head.sizes).sum(-1, keepdim=True)
        doubt = weights * (1 + head.sizes + average)
        reach = grad @ head.value.abs().T + (grad * out).sum(-1, keepdim=True)
        inner, scale = doubt * reach, abs(head.scale)
        sizes[0][head.where] = inner @ head.key.abs() * scale
        sizes[1][shared] += inner.T @ head.query.abs() * scale
        sizes[2][shared] += doubt.T @ grad
        rounded = (weights * reach).clamp(min=least)
        stored[0][head.where] = rounded @ head.key.abs() * scale
        stored[1][shared] += rounded.T @ head.query.abs() * scale
        stored[2][shared] += weights.clamp(min=least).T @ grad
    fan = float(call.get("query").shape[2] + call.get("key").shape[2])
    unit = matmul_input_unit(call)
    narrow = call.get("query").dtype in (torch.bfloat16, torch.float16)
    # The gradients of scores leave float16's normal range.
    factor = 64.0 if call.get("query").dtype is torch.float16 else 2.0
    return [
        Budget(size, fan, 32.0, stored=factor * kept if narrow else None, input_unit=unit)
        for size, kept in zip(sizes, stored, strict=True)
    ]
