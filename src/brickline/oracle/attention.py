"""Fused attention: what it means in float64, and how far rounding may take it.

``R = softmax(scale Q K' + mask) V``. Scores carry the error of their own products, probabilities
are rounded to the inputs' dtype before they meet V (all fused kernels do so), and the sum over keys
adds its own. Works head by head, so that no more than one matrix of scores is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from brickline.oracle.bounds import Budget, rule
from brickline.oracle.calls import Call, NoExactForm, exact_form
from brickline.oracle.contractions import matmul_input_unit

FORWARD = """_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
    scaled_dot_product_attention"""


_WITHOUT_SUMS = ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math")
"""Unfused or undecomposed: they return no logarithms of sums that could be compared."""


@dataclass(frozen=True)
class Head:
    """Queries, keys and values of some heads of one batch entry, and their probabilities."""

    where: tuple[int, int]
    """Batch entry and head."""
    shared: int
    """Head of the keys and values."""
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scores: torch.Tensor
    probabilities: torch.Tensor
    sizes: torch.Tensor
    """Scores with absolute values, and those of the row's average."""
    scale: float


def mask_of(call: Call) -> torch.Tensor | None:
    """Return the additive or boolean mask of a call."""
    for name in ("attn_mask", "attn_bias"):
        mask = call.get(name)
        if isinstance(mask, torch.Tensor) and mask.numel():
            return mask
    return None


def heads(call: Call) -> Iterator[Head]:
    """Go through the heads of a call in float64."""
    query, key, value = (_in_batches(call.get(name)) for name in ("query", "key", "value"))
    given = call.get("scale")
    scale = float(given) if given is not None else 1 / math.sqrt(query.shape[-1])
    mask, causal = mask_of(call), bool(call.get("is_causal", False))
    groups = query.shape[1] // max(key.shape[1], 1)
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            shared = head // groups
            q, k, v = (
                each.double()
                for each in (query[batch, head], key[batch, shared], value[batch, shared])
            )
            scores = (q @ k.T) * scale
            sizes = (q.abs() @ k.abs().T) * abs(scale)
            scores = _masked(scores, mask, causal, batch, head)
            probabilities = torch.softmax(scores, -1)
            # A row without a key that counts is zero in every fused kernel.
            probabilities = torch.nan_to_num(probabilities, nan=0.0)
            yield Head((batch, head), shared, q, k, v, scores, probabilities, sizes, scale)


def _in_batches(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of four dimensions; further ones count as batches."""
    return value.reshape(-1, *value.shape[-3:]) if value.dim() >= 3 else value[None, None]


def _masked(
    scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, batch: int, head: int
) -> torch.Tensor:
    if causal:
        above = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    if mask is None:
        return scores
    own = mask
    while own.dim() < 4:
        own = own[None]
    own = own[min(batch, own.shape[0] - 1), min(head, own.shape[1] - 1)]
    if own.dtype is torch.bool:
        return scores.masked_fill(~own, -math.inf)
    return scores + own.double()


@exact_form(FORWARD)
def _forward(call: Call) -> list[torch.Tensor | None]:
    query, value = _in_batches(call.get("query")), call.get("value")
    if call.get("query").dim() > 4 and mask_of(call) is not None:
        raise NoExactForm("attention with a mask over more than four dimensions")
    shape = (*query.shape[:3], value.shape[-1])
    made = torch.empty(shape, dtype=torch.float64, device=query.device)
    sums = torch.empty(query.shape[:3], dtype=torch.float64, device=query.device)
    for head in heads(call):
        made[head.where] = head.probabilities @ head.value
        sums[head.where] = head.scores.logsumexp(-1)
    if call.name in _WITHOUT_SUMS:
        return [made.reshape(*call.get("query").shape[:-1], value.shape[-1])]
    return [made, sums]


@rule(FORWARD, skipped=(2, 3, 4, 5, 6, 7, 8))
def forward(call: Call, exact: Sequence[torch.Tensor | None]) -> list[Budget | None]:
    """Budgets of the output and of the logarithms of sums."""
    made = exact[0]
    assert made is not None
    like = _in_batches(made)
    magnitude, stored, spread = (torch.empty_like(like) for _ in range(3))
    sums = torch.empty(like.shape[:3], dtype=torch.float64, device=like.device)
    least = float(torch.finfo(call.get("query").dtype).smallest_normal)
    for head in heads(call):
        weights, size = head.probabilities, head.value.abs()
        average = (weights * head.sizes).sum(-1, keepdim=True)
        magnitude[head.where] = (weights * (1 + head.sizes + average)) @ size
        # Below its smallest normal number, a dtype's rounding is absolute.
        stored[head.where] = weights.clamp(min=least) @ size
        spread[head.where] = (weights.square() @ size.square()).sqrt()
        sums[head.where] = 1 + head.sizes.amax(-1) if head.sizes.shape[-1] else 0.0
    fan = float(call.get("query").shape[-1] + call.get("key").shape[-2])
    unit = matmul_input_unit(call)
    narrow = call.get("query").dtype in (torch.bfloat16, torch.float16)
    budgets: list[Budget | None] = [
        Budget(
            magnitude.reshape(made.shape),
            fan,
            16.0,
            stored=stored.reshape(made.shape) if narrow else None,
            stored_sd=spread.reshape(made.shape) if narrow else None,
            input_unit=unit,
        )
    ]
    if len(exact) > 1 and exact[1] is not None:
        sums = sums + exact[1].abs().nan_to_num(posinf=0.0)
        # On CPU, the exponentials that are summed come from a short polynomial.
        rough = torch.ones_like(sums) if narrow and call.device == "cpu" else None
        budgets.append(Budget(sums, fan, stored=rough, input_unit=unit))
    return budgets


def empty_like_inputs(call: Call) -> tuple[Any, ...]:
    """Return zeros in float64 with the shapes of queries, keys and values."""
    return tuple(
        torch.zeros(call.get(name).shape, dtype=torch.float64, device=call.get(name).device)
        for name in ("query", "key", "value")
    )
