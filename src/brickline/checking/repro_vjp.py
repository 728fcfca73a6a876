"""One gradient of one op: what a repro of a wrong backward pass runs.

`gradient` is copied into such a script as it stands, so it needs torch and nothing else of this
package.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


def gradient(op: Any, args: Any, kwargs: Any, arrived: Any, wanted: Any) -> Any:
    """Return the gradient of an input by number, or of a parameter by name.

    Args:
        op: A module, or another callable.
        args: Its arguments.
        kwargs: The same by keyword.
        arrived: The gradients at its floating-point outputs, by number.
        wanted: ("inputs", number) or ("parameters", name).
    """
    leaves = []

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1].clone()  # no leaf, as the op may write to it
        if isinstance(value, tuple):
            parts = [leaf(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    def floats(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [value] if value.dtype.is_floating_point else []
        if not isinstance(value, (tuple, list, dict)):
            return []
        parts = value.values() if isinstance(value, dict) else value
        return [one for each in parts for one in floats(each)]

    with torch.enable_grad():
        outputs = floats(
            op(*[leaf(each) for each in args], **{name: leaf(kwargs[name]) for name in kwargs})
        )
        kind, key = wanted
        target = leaves[key] if kind == "inputs" else dict(op.named_parameters())[key]
        heads = [outputs[number] for number in arrived]
        given = [each.to(head.dtype) for each, head in zip(arrived.values(), heads)]  # noqa: B905
        (found,) = torch.autograd.grad(heads, [target], given, allow_unused=True)
    return torch.zeros_like(target) if found is None else found.to_dense()


def source_of_gradient() -> list[str]:
    """Return the lines of `gradient`, without types."""
    text = inspect.getsource(gradient)
    for word in (": Any", " -> Any", "  # noqa: B905"):
        text = text.replace(word, "")
    return text.splitlines()
