"""Bounds of convolutions and of their gradients."""

from __future__ import annotations

from dataclasses import replace

import torch

from brickline.oracle.bounds import ACCUMULATOR, TF32, Budget, rule
from brickline.oracle.calls import Call
from brickline.oracle.contractions import BFLOAT16, Exact, budgets, setting

_CONVOLUTIONS = """convolution convolution_overrideable cudnn_convolution cudnn_convolution_relu
    mkldnn_convolution _conv_depthwise2d conv_depthwise3d thnn_conv2d slow_conv3d
    slow_conv_transpose2d cudnn_convolution_transpose miopen_convolution conv2d conv1d conv3d
    _slow_conv2d_forward slow_conv_dilated2d"""


@rule(_CONVOLUTIONS)
def convolution(call: Call, exact: Exact) -> list[Budget | None]:
    """Convolutions; those by transforms spread their errors over the image."""
    weight = call.get("weight")
    weight = call.args[1] if weight is None else weight
    fan = weight[0].numel() if not call.get("transposed") else weight.numel() // weight.shape[1]
    unit = convolution_input_unit(call)
    made = [
        _spread(call, each, weight)
        for each in budgets(call, exact, fan, input_unit=unit, steps=16.0)
    ]
    if call.get("transposed"):
        made = [_gathered(call, each) for each in made]
    return [_rounded_inside(call, each, exact[0], weight) for each in made]


ROUNDED_PARTS, ROUNDED_PARTS_SD = 6.0, 0.35
"""Largest error of a narrow convolution's rounded parts and its spread, in u_in of their size."""


def _rounded_inside(
    call: Call, budget: Budget | None, exact: torch.Tensor | None, weight: torch.Tensor
) -> Budget | None:
    """On CUDA, narrow convolutions round parts of their sums, and before they add the bias."""
    if budget is None or exact is None or call.device == "cpu" or call.unit <= ACCUMULATOR:
        return budget
    bias = call.get("bias")
    whole = exact
    if bias is not None:
        whole = exact - bias.double().reshape(1, -1, *[1] * (exact.dim() - 2))
    stored = whole.abs() if bias is not None else torch.zeros_like(exact)
    likely = stored / 2
    if weight[0, 0].numel() > 1:
        parts = _root_of_squares(call)
        stored, likely = stored + ROUNDED_PARTS * parts, likely + ROUNDED_PARTS_SD * parts
    if budget.stored is not None:
        stored, likely = stored + budget.stored, likely + budget.stored / 4
    return replace(budget, stored=stored, stored_sd=likely)


def _root_of_squares(call: Call) -> torch.Tensor:
    """Return the root of the sum of the squares of each element's terms, bias apart."""
    changed = dict(call.arguments, bias=None)
    squares = {
        name: each.double().square()
        if isinstance(each, torch.Tensor) and each.dtype.is_floating_point
        else each
        for name, each in changed.items()
    }
    schema = call.func._schema.arguments
    args = [squares[each.name] for each in schema if not each.kwarg_only]
    made = call.func(*args)
    return made.clamp(min=0).sqrt()


def _gathered(call: Call, budget: Budget | None) -> Budget | None:
    """Overlapping windows are added in the tensors' dtype: on CPU, and on CUDA in float16."""
    half = any(each.dtype is torch.float16 for each in call.narrow)
    if budget is None or (call.device != "cpu" and not half):
        return budget
    return replace(budget, stored=2 * budget.magnitude, stored_sd=budget.magnitude / 4)


def _spread(call: Call, budget: Budget | None, weight: torch.Tensor) -> Budget | None:
    """Winograd and Fourier kernels have errors of the size of the largest sum around."""
    if budget is None or call.device == "cpu" or weight[0, 0].numel() == 1:
        return budget
    places = tuple(range(2, budget.magnitude.dim()))
    if not places:
        return budget
    largest = budget.magnitude.amax(places, keepdim=True).expand_as(budget.magnitude)
    return replace(budget, magnitude=largest)


@rule("convolution_backward")
def convolution_backward(call: Call, exact: Exact) -> list[Budget | None]:
    """Gradients of input, weight and bias."""
    grad, data, weight = call.args[0], call.args[1], call.args[2]
    places = grad.numel() // max(grad.shape[1], 1)
    fans = (weight.numel() // max(min(weight.shape[:2]), 1), places, places)
    unit = convolution_input_unit(call)
    made = budgets(call, exact, *fans, input_unit=unit, steps=16.0)
    if call.device != "cpu" and made[0] is not None and data.dim() > 2:
        made[0] = _spread(call, made[0], weight)
    return [_gathered(call, each) for each in made]


def convolution_input_unit(call: Call) -> float:
    """As `matmul_input_unit`, for convolutions, where TF32 is torch's default on CUDA."""
    if not any(each.dtype is torch.float32 for each in call.narrow):
        return 0.0
    if call.device == "cuda":
        return TF32 if setting("cudnn", "conv") == "tf32" else 0.0
    return {"tf32": TF32, "bf16": BFLOAT16}.get(setting("mkldnn", "conv"), 0.0)
