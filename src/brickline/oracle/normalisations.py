"""Bounds of softmax, norms, variances, losses and layers that normalise, and of their gradients.

Each magnitude is that of the formula's parts before they cancel: a mean is taken away, a sum of
exponentials divides. What divides contributes by its relative error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from brickline.oracle.bounds import Budget, finite_part, rule
from brickline.oracle.calls import Call, exact_form

Exact = Sequence[torch.Tensor | None]


# --- Softmax --------------------------------------------------------------------------------------


@rule("_softmax", "softmax", "_safe_softmax", "_masked_softmax_none")
def softmax(call: Call, exact: Exact) -> list[Budget | None]:
    """The exponent's rounding counts by its size, the sum's by its length."""
    value, made = call.wide("self"), exact[0]
    assert made is not None
    dim = int(call.get("dim", -1))
    below = finite_part(value.amax(dim, keepdim=True) - value) if value.numel() else value
    # On CPU, sums along other dimensions than the last are kept in the tensors' dtype.
    last = dim % max(value.dim(), 1) == value.dim() - 1
    stored = made.abs() if call.device == "cpu" and not last else None
    return [Budget(made.abs() * (1 + below.clamp(max=1e3)), _extent(value, dim), stored=stored)]


@rule("_log_softmax", "log_softmax")
def log_softmax(call: Call, exact: Exact) -> list[Budget | None]:
    """As softmax, and the difference of values."""
    value = call.wide("self")
    dim = int(call.get("dim", -1))
    top = value.amax(dim, keepdim=True) if value.numel() else value
    magnitude = (
        finite_part(value.abs()) + finite_part(top.abs()) + math.log(_extent(value, dim)) + 1
    )
    # On CPU, largest value and sum are kept in the tensors' dtype.
    stored = magnitude if call.device == "cpu" else None
    return [Budget(magnitude, _extent(value, dim), stored=stored, stored_sd=stored)]


@rule("logsumexp", "special_logsumexp")
def logsumexp(call: Call, exact: Exact) -> list[Budget | None]:
    """Composed of operations in the tensors' own dtype."""
    value, made = call.wide("self"), exact[0]
    assert made is not None
    fan = max(value.numel() / max(made.numel(), 1), 1.0)
    magnitude = made.abs() + math.log(fan) + 1
    return [Budget(magnitude, fan, stored=magnitude)]


@rule("_softmax_backward_data")
def softmax_backward(call: Call, exact: Exact) -> list[Budget | None]:
    """``y (g - sum(g y))``."""
    grad, value = call.wide("grad_output").abs(), call.wide("output").abs()
    dim = int(call.get("dim", -1))
    products = grad * value
    magnitude = products + value * products.sum(dim, keepdim=True)
    if call.device == "cpu":
        return [Budget(magnitude, _extent(value, dim))]
    # On CUDA, the products are rounded to the tensors' dtype before they are added.
    spread = (products.square() + value.square() * products.square().sum(dim, keepdim=True)).sqrt()
    return [Budget(magnitude, _extent(value, dim), stored=magnitude, stored_sd=spread)]


@rule("_log_softmax_backward_data")
def log_softmax_backward(call: Call, exact: Exact) -> list[Budget | None]:
    """``g - exp(y) sum(g)``."""
    grad, value = call.wide("grad_output").abs(), call.wide("output")
    dim = int(call.get("dim", -1))
    share = value.exp() * (1 + finite_part(value.abs()))
    return [Budget(grad + share * grad.sum(dim, keepdim=True), _extent(value, dim))]


# --- Normalising layers ---------------------------------------------------------------------------


def _moments(value: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return mean, mean of absolute values, and deviation, along some dimensions."""
    mean = value.mean(dims, keepdim=True)
    deviation = (value - mean).square().mean(dims, keepdim=True).sqrt()
    return mean, value.abs().mean(dims, keepdim=True), deviation


def _normalised(
    value: torch.Tensor, dims: tuple[int, ...], scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised values and their magnitude before the mean was taken away."""
    mean, mean_abs, deviation = _moments(value, dims)
    result = (value - mean) * scale
    # The deviation's own relative error grows with mean / deviation.
    offset = mean.abs() / deviation.clamp(min=1e-300)
    offset = torch.where(deviation > 0, offset, torch.ones_like(offset))
    excess = result.abs() * (1 + offset.clamp(max=1e6))
    return result, (value.abs() + mean_abs) * scale.abs() + excess


def _statistics(
    value: torch.Tensor, dims: tuple[int, ...], eps: float, shapes: tuple[torch.Size, ...]
) -> list[Budget]:
    """Budgets of the saved mean and the saved reciprocal deviation."""
    fan = _count(value, dims)
    mean, mean_abs, deviation = _moments(value, dims)
    scale = (deviation.square() + eps).rsqrt()
    offset = 1 + (mean.abs() * scale).clamp(max=1e6)
    return [
        Budget(mean_abs.reshape(shapes[0]), fan),
        Budget((scale * offset).reshape(shapes[1]), fan, 16.0, roundings=2.0),
    ]


@rule("native_layer_norm layer_norm")
def layer_norm(call: Call, exact: Exact) -> list[Budget | None]:
    """Mean and deviation of the last dimensions."""
    value, weight, bias = call.wide("input"), call.wide("weight"), call.wide("bias")
    dims = tuple(range(-len(call.get("normalized_shape")), 0))
    eps = float(call.get("eps"))
    fan = _count(value, dims)
    scale = (value.var(dims, correction=0, keepdim=True) + eps).rsqrt()
    _, magnitude = _normalised(value, dims, scale)
    magnitude = _affine(magnitude, weight, bias)
    made: list[Budget | None] = [Budget(magnitude, fan, 16.0)]
    shapes = tuple(_shape(each) for each in exact[1:3])
    if len(shapes) == 2 and all(each.numel() for each in shapes):
        made += _statistics(value, dims, eps, shapes)
    return made


@rule("_fused_rms_norm", "rms_norm")
def rms_norm(call: Call, exact: Exact) -> list[Budget | None]:
    """A mean of squares divides: all errors are relative."""
    value, made = call.wide("input"), exact[0]
    assert made is not None
    dims = tuple(range(-len(call.get("normalized_shape")), 0))
    fan = _count(value, dims)
    budgets: list[Budget | None] = [Budget(made.abs(), fan, roundings=2.0)]
    if len(exact) > 1 and exact[1] is not None:
        budgets.append(Budget(exact[1].abs(), fan))
    return budgets


@rule("native_group_norm")
def group_norm(call: Call, exact: Exact) -> list[Budget | None]:
    """Mean and deviation of each group of channels."""
    value, groups = call.wide("input"), int(call.get("group"))
    rows = value.reshape(value.shape[0], groups, -1)
    eps = float(call.get("eps"))
    scale = (rows.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    _, magnitude = _normalised(rows, (-1,), scale)
    shape = (1, -1) + (1,) * (value.dim() - 2)
    weight, bias = (_reshaped(call.wide(each), shape) for each in ("weight", "bias"))
    magnitude = _affine(magnitude.reshape(value.shape), weight, bias)
    # The kernels fold weight and bias into one product and one sum, rounded in between.
    made: list[Budget | None] = [Budget(magnitude, rows.shape[-1], 16.0, stored=magnitude)]
    return made + list(_statistics(rows, (-1,), eps, (_shape(exact[1]), _shape(exact[2]))))


_BATCH_NORMS = """native_batch_norm cudnn_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update
    miopen_batch_norm"""


@rule(_BATCH_NORMS)
def batch_norm(call: Call, exact: Exact) -> list[Budget | None]:
    """Mean and deviation of each channel, or the running ones."""
    value = call.wide("input")
    dims = (0, *range(2, value.dim()))
    shape = (1, -1) + (1,) * (value.dim() - 2)
    weight, bias = (_reshaped(call.wide(each), shape) for each in ("weight", "bias"))
    eps = float(call.get("eps", call.get("epsilon", 1e-5)))
    training = bool(call.get("training", "_no_" not in call.name))
    fan = _count(value, dims)
    if not training:
        mean = call.wide("running_mean").reshape(shape)
        scale = (call.wide("running_var").reshape(shape) + eps).rsqrt()
        magnitude = _affine((value.abs() + mean.abs()) * scale, weight, bias)
        # Folded into one product and one sum: the parts are larger than their difference.
        stored = magnitude if call.device == "cpu" else None
        return [Budget(magnitude, 1.0, 16.0, stored=stored), *_rest(exact, value, eps)]
    scale = (value.var(dims, correction=0, keepdim=True) + eps).rsqrt()
    _, magnitude = _normalised(value, dims, scale)
    magnitude = _affine(magnitude, weight, bias)
    stored = magnitude if call.device == "cpu" else None
    made: list[Budget | None] = [Budget(magnitude, fan, 16.0, stored=stored)]
    return made + _saved(call, exact, value, dims, eps)


def _rest(exact: Exact, value: torch.Tensor, eps: float) -> list[Budget | None]:
    return [
        None if each is None or not each.is_floating_point() else Budget(each.abs() + 0.0, 1.0)
        for each in exact[1:]
    ]


def _saved(
    call: Call, exact: Exact, value: torch.Tensor, dims: tuple[int, ...], eps: float
) -> list[Budget | None]:
    """Budgets of saved statistics and of the running ones that are updated."""
    fan = _count(value, dims)
    mean, mean_abs, deviation = (each.reshape(-1) for each in _moments(value, dims))
    variance = deviation.square()
    scale = (variance + eps).rsqrt()
    offset = 1 + (mean.abs() * scale).clamp(max=1e6)
    saved = [mean_abs, scale * offset]
    running = [
        _plus(call.wide("running_mean"), mean_abs),
        _plus(call.wide("running_var"), 2 * variance * offset),
    ]
    made: list[Budget | None] = []
    for number, each in enumerate(exact[1:]):
        pool = saved if number < 2 else running
        written = len(exact) - 1 - number
        chosen = pool[number] if number < 2 else (pool[2 - written] if written <= 2 else None)
        fits = each is not None and chosen is not None and each.shape == chosen.shape
        if not fits or chosen is None:
            made.append(None)
            continue
        # Running statistics are updated in the tensors' dtype, step by step.
        kept = chosen if number >= 2 or call.device == "cpu" else None
        made.append(Budget(chosen, fan, 16.0, stored=kept))
    return made


@rule("native_layer_norm_backward")
def layer_norm_backward(call: Call, exact: Exact) -> list[Budget | None]:
    """Gradients of input, weight and bias."""
    grad, value, weight = call.wide("grad_out"), call.wide("input"), call.wide("weight")
    dims = tuple(range(-len(call.get("normalized_shape")), 0))
    scale, mean = call.wide("rstd").reshape(*_kept(value, dims)), call.wide("mean")
    mean = mean.reshape(*_kept(value, dims))
    hats = (value.abs() + mean.abs()) * scale
    scaled = grad.abs() if weight is None else grad.abs() * weight.abs()
    inner = scaled + scaled.mean(dims, keepdim=True)
    inner = inner + hats * (scaled * hats).mean(dims, keepdim=True)
    rows = tuple(range(value.dim() - len(dims)))
    fan, many = _count(value, dims), float(max(_count(value, rows), 1))
    parts: list[Budget | None] = [Budget(scale * inner, fan, 16.0), None, None]
    if rows:
        sizes = (grad.abs() * hats).sum(rows), grad.abs().sum(rows)
        # On CPU, the sum over rows is kept in the tensors' dtype.
        kept = 2 + math.sqrt(many) / 2
        parts[1:] = [
            Budget(each, many, stored=kept * each if call.device == "cpu" else None)
            for each in sizes
        ]
    return [
        each if each is not None and made is not None else None
        for each, made in zip(parts, exact, strict=False)
    ]


@rule("_fused_rms_norm_backward")
def rms_norm_backward(call: Call, exact: Exact) -> list[Budget | None]:
    """Gradients of input and weight."""
    grad, value, weight = call.wide("grad_out"), call.wide("input"), call.wide("weight")
    dims = tuple(range(-len(call.get("normalized_shape")), 0))
    scale = call.wide("rstd").reshape(*_kept(value, dims))
    hats = value.abs() * scale
    scaled = grad.abs() if weight is None else grad.abs() * weight.abs()
    inner = scaled + hats * (scaled * hats).mean(dims, keepdim=True)
    rows = tuple(range(value.dim() - len(dims)))
    made: list[Budget | None] = [Budget(scale * inner, _count(value, dims), 16.0)]
    if len(exact) > 1 and exact[1] is not None and rows:
        made.append(Budget((grad.abs() * hats).sum(rows), float(_count(value, rows))))
    return made


@rule("native_group_norm_backward")
def group_norm_backward(call: Call, exact: Exact) -> list[Budget | None]:
    """Gradients of input, weight and bias."""
    grad, value = call.wide("grad_out").abs(), call.wide("input")
    groups = int(call.get("group"))
    rows = (value.shape[0], groups, -1)
    mean = call.wide("mean").reshape(value.shape[0], groups, 1)
    scale = call.wide("rstd").reshape(value.shape[0], groups, 1)
    shape = (1, -1) + (1,) * (value.dim() - 2)
    weight = _reshaped(call.wide("weight"), shape)
    hats = ((value.reshape(rows).abs() + mean.abs()) * scale).reshape(value.shape)
    scaled = (grad if weight is None else grad * weight.abs()).reshape(rows)
    flat = hats.reshape(rows)
    inner = scaled + scaled.mean(-1, keepdim=True)
    inner = inner + flat * (scaled * flat).mean(-1, keepdim=True)
    fan = float(scaled.shape[-1])
    dims = (0, *range(2, value.dim()))
    # The kernels expand the formula: x times a coefficient plus another that nearly cancels it.
    return [
        Budget((scale * inner).reshape(value.shape) * 2, fan, 32.0),
        Budget((grad * hats).sum(dims), _count(value, dims), 32.0),
        Budget(grad.sum(dims), _count(value, dims)),
    ]


@rule("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def batch_norm_backward(call: Call, exact: Exact) -> list[Budget | None]:
    """Gradients of input, weight and bias."""
    grad = call.arguments.get("grad_out", call.get("grad_output")).double().abs()
    value, weight = call.wide("input"), call.wide("weight")
    dims = (0, *range(2, value.dim()))
    shape = (1, -1) + (1,) * (value.dim() - 2)
    train = bool(call.get("train", call.get("update", True)))
    eps = float(call.get("eps", call.get("epsilon", 1e-5)))
    if train:
        mean = value.mean(dims, keepdim=True)
        scale = (value.var(dims, correction=0, keepdim=True) + eps).rsqrt()
    else:
        mean = call.wide("running_mean").reshape(shape)
        scale = (call.wide("running_var").reshape(shape) + eps).rsqrt()
    hats = (value.abs() + mean.abs()) * scale
    inner = grad
    if train:
        inner = grad + grad.mean(dims, keepdim=True) + hats * (grad * hats).mean(dims, keepdim=True)
    size = scale if weight is None else scale * weight.reshape(shape).abs()
    fan = _count(value, dims)
    sizes = (size * inner, (grad * hats).sum(dims), grad.sum(dims))
    # On CUDA, some kernels round the parts to the tensors' dtype before they are added.
    return [
        Budget(each, fan, 16.0, stored=None if call.device == "cpu" else each)
        if made is not None
        else None
        for each, made in zip(sizes, exact, strict=False)
    ]


# --- Norms, variances, losses ---------------------------------------------------------------------


@rule("linalg_vector_norm", "norm", "prod", "dist", "cumprod", "frobenius_norm", "renorm")
def positive(call: Call, exact: Exact) -> list[Budget | None]:
    """Sums of positive terms, and products: all errors are relative."""
    value = exact[0]
    if value is None or not value.dtype.is_floating_point:
        return [None]
    fan = call.inputs[0].numel() / max(value.numel(), 1)
    if "prod" in call.name:
        fan = float(call.inputs[0].numel()) ** 2
    # torch composes some of these of operations in the tensors' own dtype.
    return [Budget(value.abs(), fan, roundings=2.0)]


@rule("var", "std", "var_mean", "std_mean")
def variance(call: Call, exact: Exact) -> list[Budget | None]:
    """Squares of differences to the mean."""
    value = call.wide("self")
    first = exact[0]
    assert first is not None
    dims = call.get("dim") or list(range(value.dim()))
    axes = tuple(int(each) for each in dims)
    fan = _count(value, axes)
    mean, mean_abs, deviation = (each.reshape(first.shape) for each in _moments(value, axes))
    offset = 1 + mean.abs() / deviation.clamp(min=1e-300)
    offset = torch.where(deviation > 0, offset.clamp(max=1e6), torch.ones_like(offset))
    made: list[Budget | None] = [Budget(first.abs() * offset + mean_abs * 1e-8, fan)]
    if len(exact) > 1:
        made.append(Budget(mean_abs, fan))
    return made


_LOSSES = """mse_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div soft_margin_loss
    binary_cross_entropy_with_logits mse_loss_backward smooth_l1_loss_backward huber_loss_backward
    binary_cross_entropy_backward"""


@rule(_LOSSES)
def loss(call: Call, exact: Exact) -> list[Budget | None]:
    """Differences of two tensors, and their mean."""
    value = exact[0]
    assert value is not None
    sizes: Any = [call.wide(each) for each in ("self", "target")]
    reach = sum(finite_part(each.abs()) for each in sizes) + 1
    grad = call.wide("grad_output")
    fan = float(sizes[0].numel())
    if grad is not None:
        # The mean's reciprocal is part of the value: the largest element tells its size.
        unit = grad.abs().max() * (1 if grad.numel() > 1 else 1 / fan)
        return [Budget(value.abs() + reach * unit, 1.0, 32.0, roundings=2.0)]
    spread = value.abs() + (reach.square().mean() if value.dim() == 0 else reach.square())
    return [Budget(spread, fan, stored=value.abs() * 2, roundings=2.0)]


# --- Small things ---------------------------------------------------------------------------------


def _affine(magnitude: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    if weight is not None:
        magnitude = magnitude * weight.abs()
    return magnitude if bias is None else magnitude + bias.abs()


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    return None if value is None else value.reshape(shape)


def _plus(running: Any, update: torch.Tensor) -> torch.Tensor | None:
    return None if running is None else running.abs() + update


def _shape(value: torch.Tensor | None) -> torch.Size:
    return torch.Size([0]) if value is None else value.shape


def _kept(value: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
    return [*value.shape[: value.dim() - len(dims)], *([1] * len(dims))]


def _count(value: torch.Tensor, dims: tuple[int, ...]) -> float:
    return float(math.prod(value.shape[each] for each in dims))


def _extent(value: torch.Tensor, dim: int) -> float:
    return float(value.shape[dim]) if value.dim() else 1.0


# --- Forms without a float64 kernel, or that need what only the narrow kernel made ----------------


@exact_form("cudnn_batch_norm_backward")
def _cudnn_batch_norm_backward(call: Call) -> list[torch.Tensor | None]:
    made = torch.ops.aten.native_batch_norm_backward.default(
        call.wide("grad_output"),
        call.wide("input"),
        call.wide("weight"),
        call.wide("running_mean"),
        call.wide("running_var"),
        call.wide("save_mean"),
        call.wide("save_var"),
        True,
        float(call.get("epsilon")),
        [True, True, True],
    )
    return list(made)


@exact_form("_fused_rms_norm")
def _rms_norm(call: Call) -> list[torch.Tensor | None]:
    value, weight, eps = call.wide("input"), call.wide("weight"), call.get("eps")
    dims = tuple(range(-len(call.get("normalized_shape")), 0))
    if eps is None:
        eps = torch.finfo(call.get("input").dtype).eps
    scale = (value.square().mean(dims, keepdim=True) + float(eps)).rsqrt()
    made = value * scale
    return [made if weight is None else made * weight, scale]
