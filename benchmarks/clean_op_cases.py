"""Calls of aten operations as transformers and convolutional networks make them, at random.

`cases` yields calls without end and without repeats: operation, shape, distribution of the values
and the values themselves are drawn anew each time. Fan-in reaches 16,384; one case in four has
outlier channels, a hundred times as large. Knows nothing of what is done with them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
FANS = (16, 64, 100, 256, 768, 1000, 1024, 2048, 4096, 8192, 11008, 16384)
DISTRIBUTIONS = ("normal", "outliers", "positive", "offset", "small", "large")


@dataclass
class Draw:
    """Random tensors of one device, dtype and distribution."""

    random: random.Random
    device: str
    dtype: torch.dtype
    largest: int
    """Most elements of one tensor."""
    distribution: str = "normal"
    _generator: Any = None

    def seed(self, number: int) -> None:
        """Start a new case."""
        self._generator = torch.Generator(device="cpu").manual_seed(number)
        self.distribution = self.random.choice(DISTRIBUTIONS)

    def __call__(self, *shape: int, scale: float = 1.0, plain: bool = False) -> torch.Tensor:
        """Return a tensor of the case's distribution; a plain one is normal."""
        value = torch.randn(shape, generator=self._generator)
        kind = "normal" if plain else self.distribution
        if kind == "outliers" and len(shape):
            width = shape[-1]
            chosen = torch.randperm(width, generator=self._generator)[: max(1, width // 64)]
            value[..., chosen] *= 100
        elif kind == "positive":
            value = value.abs()
        elif kind == "offset":
            value = value + 3
        elif kind == "small":
            value = value * 1e-3
        elif kind == "large":
            value = value * 30
        return (value * scale).to(self.device, self.dtype)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Return indices below `high`."""
        return torch.randint(0, high, shape, generator=self._generator).to(self.device)

    def mask(self, *shape: int) -> torch.Tensor:
        """Return booleans."""
        return (torch.rand(shape, generator=self._generator) < 0.5).to(self.device)

    def rows(self, width: int) -> int:
        """Return a number of rows such that a tensor of them is not too large."""
        most = max(1, min(96, self.largest // max(width, 1)))
        return self.random.randint(1, most)

    def fan(self) -> int:
        """Return a fan-in."""
        return self.random.choice([each for each in FANS if each <= self.largest])

    def pick(self, *values: Any) -> Any:
        """Return one of some values."""
        return self.random.choice(values)


Made = tuple[Any, tuple[Any, ...], dict[str, Any]]
TEMPLATES: dict[str, Callable[[Draw], Made]] = {}


def template(function: Callable[[Draw], Made]) -> Callable[[Draw], Made]:
    TEMPLATES[function.__name__] = function
    return function


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


# --- Products -------------------------------------------------------------------------------------


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
