"""Calls of products, convolutions and attention, drawn at random."""

from __future__ import annotations

import math
from typing import Any

import torch
from clean_op_draws import Draw, Made, template

aten = torch.ops.aten


@template
def mm(d: Draw) -> Made:
    k = d.fan()
    n = d.rows(k)
    right = d(n, k, scale=k**-0.5).t() if d.pick(True, False) else d(k, n, scale=k**-0.5)
    return aten.mm.default, (d(d.rows(k), k), right), {}


@template
def one_token_mm(d: Draw) -> Made:
    k = d.fan()
    return aten.mm.default, (d(1, k), d(d.rows(k), k, plain=True).t()), {}


@template
def addmm(d: Draw) -> Made:
    k = d.fan()
    n = d.rows(k)
    return aten.addmm.default, (d(n), d(d.rows(k), k), d(n, k, scale=k**-0.5).t()), {}


@template
def bmm(d: Draw) -> Made:
    k = d.pick(16, 64, 128, 256, 1024)
    b, m, n = d.pick(1, 2, 8), d.random.randint(1, 40), d.random.randint(1, 40)
    return aten.bmm.default, (d(b, m, k), d(b, k, n)), {}


@template
def baddbmm(d: Draw) -> Made:
    k, b, m, n = d.pick(32, 64, 512), 3, d.random.randint(1, 30), d.random.randint(1, 30)
    kwargs = {"beta": d.pick(1, 0.5), "alpha": d.pick(1, 0.125)}
    return aten.baddbmm.default, (d(b, m, n), d(b, m, k), d(b, k, n)), kwargs


@template
def mv(d: Draw) -> Made:
    k = d.fan()
    return aten.mv.default, (d(d.rows(k), k), d(k, plain=True)), {}


@template
def dot(d: Draw) -> Made:
    k = d.fan()
    return aten.dot.default, (d(k), d(k, plain=True)), {}


@template
def addmm_alpha(d: Draw) -> Made:
    k, m, n = d.fan(), d.random.randint(1, 20), d.random.randint(1, 20)
    kwargs = {"beta": d.pick(0, 1, 0.5), "alpha": d.pick(1.0, 0.3)}
    return aten.addmm.default, (d(m, n), d(m, k), d(k, n)), kwargs


@template
def convolution(d: Draw) -> Made:
    groups = d.pick(1, 1, 2)
    cin, cout = d.pick(4, 16, 32, 64), d.pick(4, 8, 32)
    size, side = d.pick(1, 3, 3, 5), d.random.randint(6, 14)
    weight = d(cout, cin // groups, size, size, scale=(cin * size * size) ** -0.5)
    bias = d.pick(None, d(cout))
    stride, pad = d.pick(1, 2), size // 2
    args = (d(2, cin, side, side), weight, bias, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0])
    return aten.convolution.default, (*args, groups), {}


@template
def convolution1d(d: Draw) -> Made:
    c, length = d.pick(8, 64, 256), d.random.randint(8, 60)
    weight = d(c, c, 3, scale=(3 * c) ** -0.5)
    return (
        aten.convolution.default,
        (d(2, c, length), weight, d(c), [1], [1], [1], False, [0], 1),
        {},
    )


@template
def depthwise(d: Draw) -> Made:
    c, side = d.pick(8, 32, 64), d.random.randint(5, 15)
    args = (d(2, c, side, side), d(c, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], c)
    return aten.convolution.default, args, {}


@template
def transposed_convolution(d: Draw) -> Made:
    cin, cout, side = d.pick(4, 16, 32), d.pick(4, 8), d.random.randint(3, 9)
    args = (d(1, cin, side, side), d(cin, cout, 2, 2), d(cout), [2, 2], [0, 0], [1, 1], True)
    return aten.convolution.default, (*args, [0, 0], 1), {}


@template
def convolution_backward(d: Draw) -> Made:
    cin, cout, side = d.pick(4, 16, 32), d.pick(4, 8, 16), d.random.randint(5, 12)
    args = (d(2, cout, side, side, scale=0.1), d(2, cin, side, side), d(cout, cin, 3, 3), [cout])
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    return aten.convolution_backward.default, (*args, *rest), {}


# --- Attention ------------------------------------------------------------------------------------


def _heads(d: Draw) -> tuple[torch.Tensor, ...]:
    b, h, dim = d.pick(1, 2), d.pick(1, 4), d.pick(32, 64, 128)
    s = d.random.randint(1, 150)
    t = s if d.pick(True, False) else d.random.randint(s, 200)
    return d(b, h, s, dim), d(b, h, t, dim, plain=True), d(b, h, t, dim)


def _attention(d: Draw, q: Any, k: Any, v: Any) -> Made:
    causal = d.pick(True, False) and q.shape[2] == k.shape[2]
    if d.device == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v, 0.0, causal), {}
    if d.dtype is torch.float32 or d.pick(True, False):
        args = (q, k, v, None, True, 0.0, causal)
        return aten._scaled_dot_product_efficient_attention.default, args, {}
    return aten._scaled_dot_product_flash_attention.default, (q, k, v, 0.0, causal), {}


@template
def attention(d: Draw) -> Made:
    return _attention(d, *_heads(d))


@template
def attention_masked(d: Draw) -> Made:
    q, k, v = _heads(d)
    if d.device != "cpu":
        return _attention(d, q, k, v)
    mask = torch.zeros((1, 1, q.shape[2], k.shape[2]), dtype=d.dtype)
    mask[..., : k.shape[2] // 2] = -math.inf
    kwargs = {"attn_mask": mask}
    return aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v), kwargs


@template
def attention_backward(d: Draw) -> Made:
    q, k, v = _heads(d)
    func, args, kwargs = _attention(d, q, k, v)
    made = func(*args, **kwargs)
    grad, causal = d(*made[0].shape, plain=True), bool(args[-1])
    if d.device == "cpu":
        call = (grad, q, k, v, made[0], made[1], 0.0, causal)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default, call, {}
    if "efficient" in str(func):
        call = (grad, q, k, v, None, made[0], made[1], made[2], made[3], 0.0)
        call = (*call, [True, True, True, False], causal)
        return aten._scaled_dot_product_efficient_attention_backward.default, call, {}
    call = (grad, q, k, v, made[0], made[1], made[2], made[3], made[4], made[5], 0.0, causal)
    call = (*call, made[6], made[7])
    return aten._scaled_dot_product_flash_attention_backward.default, call, {}
