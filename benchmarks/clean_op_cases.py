"""Calls of aten operations as transformers and convolutional networks make them, at random.

`cases` yields calls without end and without repeats: operation, shape, distribution of the values
and the values themselves are drawn anew each time. Products and attention are in
`clean_op_products`. Knows nothing of what is done with them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import clean_op_products  # noqa: F401  (it declares its templates)
import torch
from clean_op_draws import TEMPLATES, Draw, Made, template

aten = torch.ops.aten


def cases(
    device: str, dtype: torch.dtype, seed: int = 0, largest: int = 1 << 18
) -> Iterator[tuple[str, Made]]:
    """Yield the name of a template and a call, without end."""
    draw = Draw(random.Random(seed), device, dtype, largest)
    names = sorted(TEMPLATES)
    number = 0
    while True:
        for name in names:
            number += 1
            draw.seed(seed * 10_000_019 + number)
            yield f"{name}/{draw.distribution}", TEMPLATES[name](draw)


# --- Normalisations -------------------------------------------------------------------------------


def _matrix(d: Draw) -> torch.Tensor:
    k = d.fan()
    return d(d.rows(k), k)


@template
def softmax(d: Draw) -> Made:
    return aten._softmax.default, (_matrix(d), -1, False), {}


@template
def softmax_middle(d: Draw) -> Made:
    return (
        aten._softmax.default,
        (d(3, d.random.randint(2, 300), d.random.randint(1, 9)), 1, False),
        {},
    )


@template
def log_softmax(d: Draw) -> Made:
    return aten._log_softmax.default, (_matrix(d), -1, False), {}


@template
def softmax_backward(d: Draw) -> Made:
    value = _matrix(d)
    made = torch.softmax(value, -1)
    return aten._softmax_backward_data.default, (torch.randn_like(value), made, -1, d.dtype), {}


@template
def log_softmax_backward(d: Draw) -> Made:
    value = _matrix(d)
    made = torch.log_softmax(value, -1)
    return aten._log_softmax_backward_data.default, (d(*value.shape), made, -1, d.dtype), {}


@template
def layer_norm(d: Draw) -> Made:
    value = _matrix(d)
    k = value.shape[-1]
    bias = d.pick(None, d(k))
    return aten.native_layer_norm.default, (value, [k], d(k), bias, d.pick(1e-5, 1e-6)), {}


@template
def layer_norm_backward(d: Draw) -> Made:
    value = _matrix(d)
    k = value.shape[-1]
    weight, bias = d(k), d(k)
    _, mean, rstd = aten.native_layer_norm.default(value, [k], weight, bias, 1e-5)
    grad = d(*value.shape, plain=True)
    args = (grad, value, [k], mean, rstd, weight, bias, [True, True, True])
    return aten.native_layer_norm_backward.default, args, {}


@template
def group_norm(d: Draw) -> Made:
    c, side = d.pick(8, 16, 64), d.random.randint(3, 12)
    args = (d(2, c, side, side), d(c), d(c), 2, c, side * side, d.pick(2, 4), 1e-5)
    return aten.native_group_norm.default, args, {}


@template
def group_norm_backward(d: Draw) -> Made:
    func, args, _ = group_norm(d)
    _, mean, rstd = func(*args)
    grad = d(*args[0].shape, plain=True)
    call = (grad, args[0], mean, rstd, args[1], *args[3:7], [True, True, True])
    return aten.native_group_norm_backward.default, call, {}


@template
def batch_norm(d: Draw) -> Made:
    c, side = d.pick(4, 16, 64), d.random.randint(3, 12)
    kept = (torch.zeros(c, device=d.device, dtype=d.dtype), d(c).abs() + 0.5)
    args = (d(4, c, side, side), d(c), d(c), *kept, d.pick(True, False), 0.1, 1e-5)
    return aten.native_batch_norm.default, args, {}


@template
def batch_norm_backward(d: Draw) -> Made:
    c, side = d.pick(4, 16, 64), d.random.randint(3, 12)
    value, weight = d(4, c, side, side), d(c)
    kept = (torch.zeros(c, device=d.device, dtype=d.dtype), d(c).abs() + 0.5)
    made = aten.native_batch_norm.default(value, weight, d(c), *kept, True, 0.1, 1e-5)
    grad = d(4, c, side, side, plain=True)
    args = (grad, value, weight, *kept, made[1], made[2], True, 1e-5, [True, True, True])
    return aten.native_batch_norm_backward.default, args, {}


@template
def rms_norm(d: Draw) -> Made:
    value = _matrix(d)
    k = value.shape[-1]
    return aten._fused_rms_norm.default, (value, [k], d(k), 1e-6), {}


# --- Reductions -----------------------------------------------------------------------------------


@template
def reduction(d: Draw) -> Made:
    value = _matrix(d)
    func = d.pick(aten.sum.dim_IntList, aten.mean.dim)
    return func, (value, [d.pick(-1, 0)], d.pick(True, False)), {}


@template
def whole_reduction(d: Draw) -> Made:
    return d.pick(aten.sum.default, aten.mean.default), (_matrix(d),), {}


@template
def variance(d: Draw) -> Made:
    func = d.pick(aten.var.correction, aten.var_mean.correction, aten.std.correction)
    return func, (_matrix(d), [-1]), {"correction": d.pick(0, 1)}


@template
def vector_norm(d: Draw) -> Made:
    return aten.linalg_vector_norm.default, (_matrix(d), 2, d.pick([-1], None)), {}


@template
def cumsum(d: Draw) -> Made:
    return aten.cumsum.default, (_matrix(d), -1), {}


@template
def logsumexp(d: Draw) -> Made:
    return aten.logsumexp.default, (_matrix(d), [-1]), {}


@template
def pooling(d: Draw) -> Made:
    value = d(2, 4, d.random.randint(6, 20), d.random.randint(6, 20))
    return d.pick(
        (aten.avg_pool2d.default, (value, [2, 2]), {}),
        (aten._adaptive_avg_pool2d.default, (value, [3, 3]), {}),
        (aten.max_pool2d_with_indices.default, (value, [2, 2]), {}),
    )


@template
def upsampling(d: Draw) -> Made:
    value = d(2, 3, d.random.randint(3, 20), d.random.randint(3, 20))
    size = [value.shape[2] * 2, value.shape[3] * 2 + 1]
    return d.pick(
        (aten.upsample_bilinear2d.default, (value, size, d.pick(True, False)), {}),
        (aten.upsample_nearest2d.default, (value, size), {}),
    )


@template
def embedding(d: Draw) -> Made:
    return aten.embedding.default, (d(d.random.randint(5, 500), 64), d.integers(5, 3, 17)), {}


@template
def embedding_backward(d: Draw) -> Made:
    count, k = d.random.randint(5, 300), d.pick(16, 64, 256)
    args = (d(count, k), d.integers(20, count), 20, -1, False)
    return aten.embedding_dense_backward.default, args, {}


@template
def embedding_bag(d: Draw) -> Made:
    bags, per = d.random.randint(1, 20), d.random.randint(1, 40)
    offsets = torch.arange(0, bags * per, per, device=d.device)
    args = (d(100, d.pick(16, 64)), d.integers(100, bags * per), offsets)
    return aten._embedding_bag.default, (*args, False, d.pick(0, 1)), {}


@template
def index_add(d: Draw) -> Made:
    count, k = d.random.randint(1, 200), d.pick(8, 64)
    return aten.index_add.default, (d(10, k), 0, d.integers(10, count), d(count, k)), {}


@template
def nll_loss(d: Draw) -> Made:
    rows, width = d.random.randint(1, 200), d.random.randint(2, 500)
    logs = torch.log_softmax(d(rows, width).float(), -1).to(d.dtype)
    return aten.nll_loss_forward.default, (logs, d.integers(width, rows), None, 1, -100), {}


@template
def mse_loss(d: Draw) -> Made:
    value = _matrix(d)
    return aten.mse_loss.default, (value, d(*value.shape), d.pick(0, 1, 2)), {}


# --- Elementwise ----------------------------------------------------------------------------------


def _several(d: Draw, count: int) -> tuple[torch.Tensor, ...]:
    shape = (d.random.randint(1, 40), d.random.randint(1, 400))
    return tuple(d(*shape) for _ in range(count))


_UNARY = (
    *("gelu", "silu", "tanh", "sigmoid", "exp", "relu", "rsqrt", "sqrt"),
    *("log", "neg", "abs", "cos", "sin", "softplus", "mish", "elu"),
    *("hardswish", "leaky_relu", "reciprocal", "log1p", "expm1", "erf", "floor", "round"),
    *("square", "hardsigmoid", "log_sigmoid_forward", "exp2", "log2", "sign"),
)


def _unary(name: str) -> Callable[[Draw], Made]:
    def make(d: Draw) -> Made:
        value = _several(d, 1)[0]
        if name in ("rsqrt", "sqrt", "log", "log1p", "reciprocal", "log2"):
            value = value.abs() + 0.01
        if name in ("exp", "expm1", "exp2"):
            value = value.clamp(max=50)
        return getattr(aten, name).default, (value,), {}

    return make


TEMPLATES.update({f"unary_{name}": _unary(name) for name in _UNARY})


@template
def gelu_tanh(d: Draw) -> Made:
    return aten.gelu.default, _several(d, 1), {"approximate": "tanh"}


@template
def binary(d: Draw) -> Made:
    a, b = _several(d, 2)
    if d.pick(True, False):
        b = b[:1]
    func = d.pick(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
    return func, (a, b + 0.01 if func is aten.div.Tensor else b), {}


@template
def scalar(d: Draw) -> Made:
    value = _several(d, 1)[0]
    func = d.pick(aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor)
    return func, (value, d.pick(0.1, 0.125, 1 / 3, 1e-5, 7.3)), {}


@template
def scaled_add(d: Draw) -> Made:
    return aten.add.Tensor, _several(d, 2), {"alpha": d.pick(0.1, -2.0)}


@template
def power(d: Draw) -> Made:
    return aten.pow.Tensor_Scalar, (*_several(d, 1), d.pick(2, 3, 2.0)), {}


@template
def real_power(d: Draw) -> Made:
    value = _several(d, 1)[0].abs() + 0.01
    return aten.pow.Tensor_Scalar, (value, d.pick(0.5, -0.5, 1.7)), {}


@template
def ternary(d: Draw) -> Made:
    a, b, c = _several(d, 3)
    func = d.pick(aten.addcmul.default, aten.addcdiv.default)
    return func, (a, b, c.abs() + 0.1), {"value": d.pick(1, 0.1)}


@template
def lerp(d: Draw) -> Made:
    return aten.lerp.Scalar, (*_several(d, 2), d.pick(0.1, 0.9, 0.5)), {}


@template
def elementwise_backward(d: Draw) -> Made:
    grad, value = _several(d, 2)
    return d.pick(
        (aten.gelu_backward.default, (grad, value), {}),
        (aten.gelu_backward.default, (grad, value), {"approximate": "tanh"}),
        (aten.silu_backward.default, (grad, value), {}),
        (aten.tanh_backward.default, (grad, value.tanh()), {}),
        (aten.sigmoid_backward.default, (grad, value.sigmoid()), {}),
        (aten.threshold_backward.default, (grad, value, 0), {}),
    )


# --- Exact ----------------------------------------------------------------------------------------


@template
def moving(d: Draw) -> Made:
    a, b = _several(d, 2)
    index = d.integers(a.shape[0], 9)
    return d.pick(
        (aten.cat.default, ([a, b], 1), {}),
        (aten.index_select.default, (a, 0, index), {}),
        (aten.index.Tensor, (a, [index]), {}),
        (aten.where.self, (d.mask(*a.shape), a, b), {}),
        (aten.masked_fill.Scalar, (a, d.mask(*a.shape), -math.inf), {}),
        (aten.clone.default, (a.t(),), {"memory_format": torch.contiguous_format}),
        (aten.maximum.default, (a, b), {}),
        (aten.clamp.default, (a, -0.3, 0.7), {}),
        (aten.amax.default, (a, [-1]), {}),
        (aten.tril.default, (a,), {}),
        (aten.flip.default, (a, [0]), {}),
    )


@template
def cast(d: Draw) -> Made:
    to = d.pick(torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return aten._to_copy.default, _several(d, 1), {"dtype": to}


@template
def comparison(d: Draw) -> Made:
    a, b = _several(d, 2)
    return d.pick(aten.gt.Tensor, aten.le.Tensor, aten.eq.Tensor), (a, b), {}


@template
def comparison_with_constant(d: Draw) -> Made:
    return d.pick(aten.gt.Scalar, aten.le.Scalar), (*_several(d, 1), d.pick(0.1, 0.0, 1.0)), {}


@template
def choice(d: Draw) -> Made:
    value = _several(d, 1)[0]
    return d.pick(
        (aten.argmax.default, (value, -1), {}),
        (aten.topk.default, (value, min(5, value.shape[-1])), {}),
        (aten.sort.default, (value,), {}),
        (aten.max.dim, (value, -1), {}),
    )


@template
def integers(d: Draw) -> Made:
    a = d.integers(100, 50)
    return d.pick(
        (aten.add.Tensor, (a, a), {}),
        (aten.cumsum.default, (a, 0), {}),
        (aten.sum.default, (a,), {}),
        (aten.floor_divide.default, (a, 7), {}),
    )
