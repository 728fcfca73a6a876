"""Values: the tensors inside what a module takes and returns, and which of them can be observed.

Containers, dataclasses and caches of keys and values are looked into; what is neither that, nor a
tensor, nor plain is counted by its class. Knows nothing of modules, and nothing of what becomes of
the tensors.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from brickline import abi
from brickline.dtypes import DTYPES, DType

DEEPEST = 16
"""Containers inside containers that are looked into."""
_PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, type)
_STATE_NAMES = (
    "self_attention_cache",
    "cross_attention_cache",
    "layers",
    "keys",
    "values",
    "key_cache",
    "value_cache",
    "conv_states",
    "recurrent_states",
    "ssm_states",
)
"""Attributes by which caches of a model's state are told; those of transformers have them."""

_KNOWN_DTYPES: dict[torch.dtype, DType] = {
    dtype: each
    for each in DTYPES.values()
    if isinstance(dtype := getattr(torch, each.numpy_name, None), torch.dtype)
}


def known_dtype(dtype: torch.dtype) -> DType | None:
    """Return torch's dtype as brickline has it; None where it has none."""
    return _KNOWN_DTYPES.get(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def unobservable(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be fingerprinted; None where it can."""
    kind = type(tensor)
    if kind is not Tensor and kind is not torch.nn.Parameter and _is_wrapper(kind):
        return f"tensors of class {kind.__name__}"
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')} tensors"
    if tensor.is_quantized:
        return "quantised tensors"
    if not tensor.is_cpu and not tensor.is_cuda:
        return f"tensors on device {tensor.device.type}"
    if tensor.dtype not in _KNOWN_DTYPES:
        return f"{dtype_name(tensor.dtype)} tensors"
    if tensor.dim() > abi.FINGERPRINT_DIMENSIONS:
        return f"tensors of more than {abi.FINGERPRINT_DIMENSIONS} dimensions"
    return None


def _is_wrapper(kind: type) -> bool:
    """Whether a class of tensors holds its data elsewhere than in its own memory."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not torch._C._disabled_torch_dispatch_impl


def flatten(value: Any, found: list[Tensor], other: Counter[str], depth: int = 0) -> None:
    """Append the tensors in a value in order; what is neither a tensor nor plain is counted."""
    if isinstance(value, Tensor):
        found.append(value)
    elif value is None or isinstance(value, _PLAIN):
        pass
    else:
        parts = _parts_of(value) if depth < DEEPEST else None
        if parts is None:
            other[f"arguments of class {type(value).__name__}"] += 1
            return
        for each in parts:
            flatten(each, found, other, depth + 1)


def _parts_of(value: Any) -> list[Any] | None:
    """Return what lies in a container, a dataclass or a cache; None where it is none of these."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, torch.nn.Module):
        return None
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields:
        return [getattr(value, name, None) for name in fields]
    own = getattr(value, "__dict__", {})
    held = [own[name] for name in _STATE_NAMES if name in own and _may_hold(own[name])]
    return held or None


def _may_hold(part: Any) -> bool:
    """Whether a part of an object may hold state: a number of layers does not."""
    return isinstance(part, Tensor | list | tuple | dict | None) or hasattr(part, "__dict__")
