"""Bounds of sums of products: matrix products, poolings, reductions.

All are linear in each of their tensors, so the magnitude is the operation itself on absolute
values. Only the number of terms in a sum differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from brickline.oracle.bounds import ACCUMULATOR, TF32, Budget, rule
from brickline.oracle.calls import Call, exact_form, outputs_of, wide_dtype, written
from brickline.oracle.widen import unit_roundoff

Exact = Sequence[torch.Tensor | None]
BFLOAT16 = 2.0**-8


def absolute(call: Call) -> list[torch.Tensor | None]:
    """Execute a linear operation on absolute values."""
    wide = call._fresh()
    args, kwargs = _abs(wide[0]), _abs(wide[1])
    result = call.func(*args, **kwargs)
    made = outputs_of(call.func, args, kwargs, result)
    return [None if each is None else _magnitude(each) for each in made]


def _abs(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        floating = value.dtype.is_floating_point or value.is_complex()
        return value.abs().to(wide_dtype(value.dtype)) if floating else value
    if isinstance(value, float):
        return abs(value)
    if isinstance(value, list | tuple):
        return type(value)(_abs(each) for each in value)
    if isinstance(value, dict):
        return {name: _abs(each) for name, each in value.items()}
    return value


def _magnitude(value: torch.Tensor) -> torch.Tensor:
    size = value.abs()
    return torch.stack([size, size], dim=-1) * math.sqrt(2) if value.is_complex() else size


def budgets(call: Call, exact: Exact, *fans: float, **more: Any) -> list[Budget | None]:
    """One budget for each floating output; the last fan-in serves what follows."""
    made: list[Budget | None] = []
    for number, value in enumerate(absolute(call)):
        fan = fans[min(number, len(fans) - 1)]
        floating = value is not None and value.dtype.is_floating_point
        made.append(Budget(value, fan, **more) if value is not None and floating else None)
    return made


# --- Matrix products ------------------------------------------------------------------------------


def _product_rule(fan_in: Callable[[Call], int]) -> Callable[[Call, Exact], Any]:
    def apply(call: Call, exact: Exact) -> list[Budget | None]:
        path, stored = _partial_sums(call)
        more: dict[str, Any] = {"path": path, "input_unit": matmul_input_unit(call)}
        if stored is not None:
            spread = _split_spread(call, stored)
            more |= {"stored": SPLIT * spread * stored, "stored_sd": SPLIT_SD * spread * stored}
        rounded = _rounded_before_adding(call, exact[0])
        if rounded is not None:
            more["stored"] = more.get("stored", 0.0) + rounded
            more["stored_sd"] = more.get("stored_sd", 0.0) + rounded / 4
        return budgets(call, exact, fan_in(call), **more)

    return apply


def _partial_sums(call: Call) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the size of a matrix product's partial sums, for those who depend on it.

    First, for float32 and wider, the root mean square of the sums on the way. Narrower outputs are
    rounded by more than the sum's own errors, but where torch lets CUDA add the parts of a sum in
    their dtype: then, second, the size of those parts.
    """
    operands = _FACTORS.get(call.name)
    wide = call.unit <= ACCUMULATOR
    if operands is None or not (wide or _parts_are_narrow(call)):
        return None, None
    left, right = (call.wide(name) for name in operands)
    if left.dim() != right.dim() or not left.shape[-1]:
        return None, None
    size = left.shape[-1]
    width = -(-size // CHECKPOINTS)
    total: Any = 0.0
    on_the_way: Any = 0.0
    parts: Any = 0.0
    for start in range(0, size, width):
        part = left[..., start : start + width] @ right[..., start : start + width, :]
        total = total + part
        on_the_way = on_the_way + total.square()
        parts = parts + part.square()
    alpha = abs(float(call.get("alpha", 1)))
    mean = on_the_way / (-(-size // width))
    added = 0.0 if call.name in _PLAIN else call.wide("self").abs()
    if call.name not in _PLAIN:
        added = added * abs(float(call.get("beta", 1)))
    if wide:
        return mean.sqrt() * alpha + added, None
    return None, (mean + parts).sqrt() * alpha + added


def _rounded_before_adding(call: Call, exact: torch.Tensor | None) -> torch.Tensor | None:
    """Return the size of what CUDA may round to a narrow dtype before it adds it to the product."""
    adds = call.name in _FACTORS and call.name not in _PLAIN
    if not adds or exact is None or call.device != "cuda" or call.unit <= ACCUMULATOR:
        return None
    added = call.wide("self") * float(call.get("beta", 1))
    return (exact - added).abs() + added.abs()


def _tiles(call: Call) -> int:
    """Return how many blocks of 64 x 64 a product's output has."""
    shape = [call.get(name).shape for name in _FACTORS[call.name]]
    return int(-(-shape[0][-2] // 64) * -(-shape[1][-1] // 64))


def _split_spread(call: Call, stored: torch.Tensor) -> float:
    """Return how far CUDA's narrow parts move this very product, in units of u_in of their size.

    The product is made again as torch is set and with narrow parts forbidden; 0 when nothing was
    split. What the candidate's own kernel made is not asked, so that a fault excuses nothing.
    """
    if written(call.func):
        return 1.0
    as_set = call.func(*call.args, **call.kwargs)
    with _wide_parts():
        apart = (as_set.double() - call.func(*call.args, **call.kwargs).double()) / stored
    unit = unit_roundoff(as_set.dtype)
    moved = float(apart.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()) / unit
    return min(moved, _root_of_parts(call))


@contextmanager
def _wide_parts() -> Iterator[None]:
    """Forbid CUDA to add the parts of a sum in the inputs' dtype."""
    settings = torch.backends.cuda.matmul
    names = _NARROW_PARTS.values()
    kept = {
        name: (getattr(settings, name), getattr(settings, f"{name}_split_k", True))
        for name in names
    }
    try:
        for name, (_, split) in kept.items():
            setattr(settings, name, False if split else (False, split))
        yield
    finally:
        for name, (value, split) in kept.items():
            setattr(settings, name, value if split else (value, split))


def _root_of_parts(call: Call) -> float:
    """Return how errors grow when a sum is cut into as many parts as keep a GPU busy.

    An output of few tiles leaves the multiprocessors to the sum; each part adds its rounding.
    """
    length = call.get(_FACTORS[call.name][0]).shape[-1]
    parts = min(length / 64, MULTIPROCESSORS / max(_tiles(call), 1))
    return math.sqrt(max(parts, 1.0))


def _parts_are_narrow(call: Call) -> bool:
    """Whether CUDA may split a product's sum and add the parts in the inputs' dtype."""
    if call.device != "cuda" or _tiles(call) > MOST_TILES:
        return False
    settings = torch.backends.cuda.matmul
    names = [_NARROW_PARTS[each.dtype] for each in call.narrow if each.dtype in _NARROW_PARTS]
    found = [getattr(settings, name) for name in names]
    return any(bool(each[0] if isinstance(each, tuple) else each) for each in found)


_NARROW_PARTS = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}
SPLIT, SPLIT_SD = 8.0, 1.25
"""Largest error of adding narrow parts and its spread, in units of the spread that is measured."""
MULTIPROCESSORS = 132
"""Parts that a large GPU may cut one tile's sum into."""
MOST_TILES = 1024
"""Outputs of more tiles keep a GPU busy without splitting sums."""
_PLAIN = frozenset({"aten::mm", "aten::bmm"})
_FACTORS = {
    "aten::mm": ("self", "mat2"),
    "aten::bmm": ("self", "mat2"),
    "aten::addmm": ("mat1", "mat2"),
    "aten::baddbmm": ("batch1", "batch2"),
}
CHECKPOINTS = 16
"""How many partial sums of a product are looked at."""


rule("mm", "bmm", "matmul", "dot", "vdot", "mv", "_int_mm", "inner", "ger", "outer")(
    _product_rule(lambda call: int(call.args[0].shape[-1]))
)
rule("addmm", "_addmm_activation_none", "addmv", "addbmm", "baddbmm", "addr", "sspaddmm")(
    _product_rule(lambda call: int(call.args[1].shape[-1]) * (_batches(call)))
)
rule("linear")(_product_rule(lambda call: int(call.args[0].shape[-1])))


def _batches(call: Call) -> int:
    return int(call.args[1].shape[0]) if call.name == "aten::addbmm" else 1


@rule("_scaled_mm")
def scaled_product(call: Call, exact: Exact) -> list[Budget | None]:
    """Products of eight-bit numbers with scales."""
    magnitude = _scaled(call, torch.Tensor.abs)
    return [Budget(magnitude, int(call.args[0].shape[-1]), steps=64.0)]


@exact_form("_scaled_mm")
def _scaled_product(call: Call) -> list[torch.Tensor | None]:
    return [_scaled(call, lambda each: each)]


def _scaled(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    left, right = call.wide("self"), call.wide("mat2")
    value = change(left * call.wide("scale_a")) @ change(right * call.wide("scale_b"))
    if call.get("bias") is not None:
        value = value + change(call.wide("bias"))
    return value if call.get("scale_result") is None else value * call.wide("scale_result")


def matmul_input_unit(call: Call) -> float:
    """Return to what torch's settings let a float32 product round its inputs; 0 for not at all."""
    if not any(each.dtype is torch.float32 for each in call.narrow):
        return 0.0
    if call.device == "cuda":
        return TF32 if setting("cuda", "matmul") == "tf32" else 0.0
    return {"tf32": TF32, "bf16": BFLOAT16}.get(setting("mkldnn", "matmul"), 0.0)


def setting(backend: str, kind: str) -> str:
    """Return ``tf32``, ``bf16`` or ``ieee`` from torch's settings, old and new."""
    owner = getattr(torch.backends, backend)
    new = str(getattr(getattr(owner, kind, None), "fp32_precision", "none"))
    try:
        if backend == "cudnn":
            old = "tf32" if owner.allow_tf32 else "ieee"
        elif backend == "cuda":
            old = "tf32" if owner.matmul.allow_tf32 else "ieee"
        else:
            old = {"medium": "bf16"}.get(torch.get_float32_matmul_precision(), "ieee")
    except RuntimeError:  # torch refuses to mix its old and its new settings
        old = "ieee"
    known = {"tf32": TF32, "bf16": BFLOAT16}
    return max((new, old), key=lambda each: known.get(each, 0.0))


@exact_form("_grouped_mm")
def _grouped_product(call: Call) -> list[torch.Tensor | None]:
    left, right = call.wide("self"), call.wide("mat2")
    bounds = call.get("offs")
    if left.dim() == 3 and right.dim() == 3:
        return [left @ right]
    ends = [int(each) for each in bounds.tolist()]
    starts = [0, *ends[:-1]]
    if left.dim() == 2 and right.dim() == 3:
        parts = [left[a:b] @ right[i] for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
        rest = left.new_zeros((left.shape[0] - ends[-1], right.shape[-1]))
        return [torch.cat([*parts, rest])]
    if left.dim() == 3:
        parts = [left[i] @ right[:, a:b] for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
        return [torch.cat(parts, -1)]
    parts = [left[:, a:b] @ right[a:b] for a, b in zip(starts, ends, strict=True)]
    return [torch.stack(parts)]


@rule("_grouped_mm")
def grouped_product(call: Call, exact: Exact) -> list[Budget | None]:
    """Products of groups of rows with their own matrices."""
    value = _grouped_product(Call(call.func, _abs(call.args), _abs(dict(call.kwargs))))[0]
    return [Budget(value, int(call.args[0].shape[-1]))] if value is not None else [None]


# --- Reductions, poolings, scatters ---------------------------------------------------------------


def _reduced(call: Call, exact: Exact) -> float:
    """Terms of each sum of a reduction."""
    value = exact[0]
    size = call.inputs[0].numel()
    return float(size / max(value.numel(), 1) if value is not None else size)


@rule("sum", "nansum", "trace")
def total(call: Call, exact: Exact) -> list[Budget | None]:
    """Sums."""
    if exact[0] is not None and not exact[0].dtype.is_floating_point:
        return [None]
    return budgets(call, exact, _reduced(call, exact))


@rule("mean", "nanmean")
def mean(call: Call, exact: Exact) -> list[Budget | None]:
    """Means: some devices round the sum to the output's dtype before they divide."""
    return budgets(call, exact, _reduced(call, exact), roundings=2.0)


@rule("cumsum", "logcumsumexp_none")
def running_total(call: Call, exact: Exact) -> list[Budget | None]:
    """Running sums, made in blocks or one after another."""
    if exact[0] is not None and not exact[0].dtype.is_floating_point:
        return [None]
    data = call.args[0]
    value, dim = exact[0], int(call.get("dim", 0))
    if value is None or not value.dim() or not value.numel():
        return budgets(call, exact, 1.0)
    size = data.shape[dim]
    made = budgets(call, exact, size)
    if call.device == "cuda" and made[0] is not None:
        # On CUDA, sums of blocks are made and passed on in the tensors' dtype.
        peak = value.abs().cummax(dim).values * (2 + math.log2(size + 1) / 2 + size / 1024)
        made[0] = replace(made[0], stored=peak, stored_sd=peak / 2)
    return made


_POOLS = """adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d
    avg_pool2d_backward avg_pool3d_backward adaptive_avg_pool1d _adaptive_avg_pool2d
    _adaptive_avg_pool3d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    _upsample_nearest_exact2d_backward col2im im2col_backward reflection_pad1d_backward
    reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward"""


@rule(_POOLS)
def pool(call: Call, exact: Exact) -> list[Budget | None]:
    """Sums over windows, and gradients that are added where windows overlap."""
    value = exact[0]
    made = max(value.numel(), 1) if value is not None else 1
    fan = max(call.inputs[0].numel() / made, 64.0)
    # Gradients of overlapping windows may be added in the storage of the output itself.
    magnitudes = absolute(call)
    return [
        Budget(each, fan, stored=each if "backward" in call.name else None, roundings=2.0)
        if each is not None and each.dtype.is_floating_point
        else None
        for each in magnitudes
    ]


_UPSAMPLES = """upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_linear1d_backward
    upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward
    grid_sampler_2d"""


@rule(_UPSAMPLES)
def interpolation(call: Call, exact: Exact) -> list[Budget | None]:
    """Interpolations: their weights come from float32 coordinates, good to the image's size."""
    data = call.inputs[0]
    extent = max(exact[0].shape[-1] if exact[0] is not None else 1, data.shape[-1])
    magnitudes = absolute(call)
    made: list[Budget | None] = []
    for each in magnitudes:
        if each is None:
            made.append(None)
            continue
        places = tuple(range(2, each.dim()))
        largest = each.amax(places, keepdim=True).expand_as(each)
        stored = 4 * each if "backward" in call.name else None
        made.append(Budget(largest * 2, 64.0, 8.0 * extent, stored=stored))
    return made


_SCATTERS = """scatter scatter_add put index_add index_put scatter_reduce index_reduce
    embedding_dense_backward embedding_backward _embedding_bag _embedding_bag_forward_only
    embedding_bag _embedding_bag_dense_backward _index_put_impl segment_reduce"""


@rule(_SCATTERS, skipped=(1, 2, 3))
def scatter(call: Call, exact: Exact) -> list[Budget | None]:
    """Sums at given places, sometimes in the storage of the output itself."""
    chosen = str(call.get("reduce") or "sum")
    plain = call.name.rstrip("_") == "aten::scatter" and call.get("reduce") is None
    adds = chosen in ("sum", "mean", "add") and call.get("accumulate", True) is not False
    adds = adds and not plain
    if not adds or exact[0] is None or not exact[0].dtype.is_floating_point:
        return [None for _ in exact]
    if call.get("mode", 0) == 2:
        return [None for _ in exact]
    indices = [each for each in call.inputs if not each.dtype.is_floating_point]
    fan = max((_crowd(each) for each in indices), default=1)
    made: list[Budget | None] = []
    for number, each in enumerate(absolute(call)):
        floating = each is not None and each.dtype.is_floating_point
        if number or each is None or not floating:
            made.append(None)
            continue
        made.append(Budget(each, fan, stored=each * math.sqrt(fan), stored_sd=each))
    return made


def _crowd(indices: torch.Tensor) -> int:
    """Return how many values meet at the most crowded place, at least."""
    if indices.dtype is torch.bool or not indices.numel():
        return 1
    return int(torch.unique(indices, return_counts=True)[1].max())


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d")
def likelihood(call: Call, exact: Exact) -> list[Budget | None]:
    """Mean of chosen elements: magnitude and the total weight."""
    made = budgets(call, exact, call.args[1].numel(), roundings=2.0)
    if call.device == "cpu" and made[0] is not None:
        # On CPU, sums are kept in the tensors' dtype.
        kept = made[0].magnitude * (2 + math.sqrt(call.args[1].numel()) / 3)
        made[0] = replace(made[0], stored=kept, stored_sd=kept / 2)
    return made


@rule("nll_loss_backward", "nll_loss2d_backward")
def likelihood_backward(call: Call, exact: Exact) -> list[Budget | None]:
    """One product and one quotient for each chosen element."""
    return budgets(call, exact, 1.0, roundings=2.0)
