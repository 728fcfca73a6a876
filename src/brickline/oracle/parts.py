"""Large calls in parts that know nothing of each other, along rows or columns.

Says how a call may be cut and cuts it. Knows nothing of verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from brickline.oracle.bounds import RULES
from brickline.oracle.calls import Call, written

CHUNK_BYTES = 1 << 27
"""Size of a part's largest tensor in float64."""
LARGE_BYTES = 1 << 30
"""Calls whose tensors are larger in float64 are held in parts where they can be."""


@dataclass(frozen=True)
class Parting:
    """How a call falls into parts that know nothing of each other."""

    output: int
    """Dimension of the outputs along which they are cut."""
    arguments: Mapping[str, int]
    """Arguments that are cut too, each with its dimension."""


ROWS: dict[str, tuple[str, ...]] = {
    "aten::mm": ("self",),
    "aten::addmm": ("mat1", "self"),
    "aten::bmm": ("self", "mat2"),
    "aten::baddbmm": ("self", "batch1", "batch2"),
    "aten::_softmax": ("self",),
    "aten::_log_softmax": ("self",),
    "aten::native_layer_norm": ("input",),
    "aten::_fused_rms_norm": ("input",),
    "aten::convolution": ("input",),
    "aten::embedding": ("indices",),
    "aten::_scaled_dot_product_flash_attention": ("query", "key", "value"),
    "aten::_scaled_dot_product_efficient_attention": ("query", "key", "value"),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("query", "key", "value"),
}
"""Operations whose first dimension is independent, with the arguments that carry it."""
COLUMNS: dict[str, tuple[str, ...]] = {"aten::mm": ("mat2",), "aten::addmm": ("mat2", "self")}
"""Products that may be cut along their last dimension instead: a head is mostly its weight."""


def is_large(call: Call, outputs: Sequence[torch.Tensor | None]) -> bool:
    """Whether a call is better held in parts from the start."""
    tensors = [*call.inputs, *(each for each in outputs if each is not None)]
    wide = 8 * sum(each.numel() for each in tensors)
    return wide > LARGE_BYTES and _parting(call, outputs) is not None


def _parting(call: Call, outputs: Sequence[torch.Tensor | None]) -> Parting | None:
    first = outputs[0]
    if first is None or first.dim() < 2 or written(call.func):
        return None
    size = {name: each.numel() for name, each in call.arguments.items() if _is_tensor(each)}
    columns = COLUMNS.get(call.name)
    if columns is not None and size["mat2"] > size.get("mat1", size["self"]):
        return _cut_along(call, first, columns, -1)
    names = ROWS.get(call.name)
    if call.name in ("aten::_softmax", "aten::_log_softmax"):
        names = names if int(call.get("dim", -1)) % first.dim() else None
    tensors = {name: each for name, each in call.arguments.items() if _is_tensor(each)}
    alike = all(each.shape == first.shape or each.dim() == 0 for each in tensors.values())
    if names is None and alike and call.name in RULES and call.get("dim") is None:
        names = tuple(name for name, each in tensors.items() if each.dim())
    return _cut_along(call, first, names, 0) if names else None


def _cut_along(call: Call, first: torch.Tensor, names: Sequence[str], dim: int) -> Parting | None:
    length = first.shape[dim]
    cut = {
        name: dim
        for name in names
        if _is_tensor(call.get(name))
        and call.get(name).dim()
        and call.get(name).shape[dim] == length
    }
    return Parting(dim, cut) if length > 1 and cut else None


def parts(
    call: Call, outputs: Sequence[torch.Tensor | None]
) -> Iterator[tuple[Call, list[torch.Tensor | None]]]:
    """Yield the parts of a call with their outputs; nothing where it cannot be cut."""
    parting, first = _parting(call, outputs), outputs[0]
    if parting is None or first is None:
        return
    length = first.shape[parting.output]
    pieces = [first, *(call.get(name) for name in parting.arguments)]
    per_row = 8 * max(max(each.numel(), 1) for each in pieces) // length
    size = min(max(1, CHUNK_BYTES // max(per_row, 1)), -(-length // 2))
    for start in range(0, length, size):
        changed = dict(call.arguments)
        for name, dim in parting.arguments.items():
            changed[name] = _piece(changed[name], dim, start, size)
        made = [
            None
            if each is None or each.dim() < 1 or each.shape[parting.output] != length
            else _piece(each, parting.output, start, size)
            for each in outputs
        ]
        yield _rebuilt(call, changed), made


def _piece(value: torch.Tensor, dim: int, start: int, size: int) -> torch.Tensor:
    return value.narrow(dim, start, min(size, value.shape[dim] - start))


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _rebuilt(call: Call, arguments: dict[str, object]) -> Call:
    args, kwargs = [], {}
    for each in call.func._schema.arguments:
        if each.name not in arguments:
            continue
        if each.kwarg_only:
            kwargs[each.name] = arguments[each.name]
        else:
            args.append(arguments[each.name])
    return Call(call.func, tuple(args), kwargs)
