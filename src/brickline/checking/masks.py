"""Masks of attention: in the form that the reference takes them, and what they leave undefined.

A caller such as `generate` of transformers makes a mask for the attention that the candidate has:
boolean for SDPA, true where it looks. Spelled-out attention adds its mask to the scores and would
take true for 1, so such a reference is given the same mask as 0 and the lowest number.

A query that may look at nothing, as padding on the left, has no answer: SDPA makes 0 of it and
spelled-out attention the mean of all. Nobody reads what becomes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MASK = "attention_mask"
_GIVEN = ("input_ids", "inputs_embeds", "hidden_states")
ADDS = "eager"
"""What transformers calls attention that adds its mask."""
NOTE = (
    "the boolean attention_mask of the calls was made for the candidate's attention; the "
    "reference, whose attention adds its mask, was given it as 0 and the lowest number"
)

IDLE = (
    "queries that the attention_mask lets look at nothing (padding) have no answer: where the two "
    "sides differ in these alone, that was not held against the candidate"
)


def is_for_another(candidate: Any, reference: Any) -> bool:
    """Whether the reference adds the masks that the candidate's attention only looks at."""
    return _attention_of(reference) == ADDS and _attention_of(candidate) not in (None, ADDS)


def is_of_transformers(root: Any) -> bool:
    """Whether a model takes masks as those of transformers: true, or 1, where a query looks."""
    return _attention_of(root) is not None


def as_added(kwargs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any] | None:
    """Return keywords with a boolean mask as it is added to scores; None where there is none."""
    mask = kwargs.get(MASK)
    if isinstance(mask, Mapping):
        added = {name: _added(each, dtype) for name, each in mask.items()}
        is_meant = any(each is not mask[name] for name, each in added.items())
        return {**kwargs, MASK: added} if is_meant else None
    made = _added(mask, dtype)
    return None if made is mask else {**kwargs, MASK: made}


def _added(mask: Any, dtype: torch.dtype) -> Any:
    """Return a mask of (batch, heads, queries, keys) as numbers; anything else as it is."""
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or mask.dim() != 4:
        return mask
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


def idle_queries(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which queries a call's mask lets look at nothing, as (batch, query); None: none."""
    mask = kwargs.get(MASK)
    masks = list(mask.values()) if isinstance(mask, Mapping) else [mask]
    found: torch.Tensor | None = None
    for each in masks:
        idle = _idle(each, args, kwargs)
        if idle is None:
            return None
        found = idle if found is None else found & idle
    return found if found is not None and bool(found.any()) else None


def _idle(mask: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    if not isinstance(mask, torch.Tensor) or mask.layout is not torch.strided or mask.is_meta:
        return None
    if mask.dim() == 4:
        floating = mask.dtype.is_floating_point
        looks = mask > torch.finfo(mask.dtype).min / 2 if floating else mask != 0
        return ~looks.any(-1).any(1)
    if mask.dim() != 2 or mask.dtype.is_floating_point:
        return None
    given = next((kwargs[name] for name in _GIVEN if kwargs.get(name) is not None), None)
    given = args[0] if given is None and args else given
    if not isinstance(given, torch.Tensor) or given.dim() < 2 or given.shape[0] != len(mask):
        return None
    # The last queries of the sequence, each with all before it: padding on the left is idle.
    return (mask != 0).cumsum(-1)[:, mask.shape[1] - given.shape[1] :] == 0


def without_idle(
    idle: torch.Tensor, ours: torch.Tensor, right: torch.Tensor
) -> torch.Tensor | None:
    """Return a value with the answers of idle queries made right; None where it has no queries."""
    batch, queries = idle.shape
    idle = idle.to(ours.device)
    if ours.dim() >= 3 and ours.shape[:2] == (batch, queries):
        rows = idle
    elif ours.dim() >= 3 and ours.shape[0] == batch and ours.shape[2] == queries:
        rows = idle[:, None].expand(ours.shape[:3])
    elif ours.dim() == 2 and ours.shape[0] == batch * queries:
        rows = idle.reshape(-1)
    else:
        return None
    made = ours.clone()
    made[rows] = right.to(made.device)[rows].to(made.dtype)
    return made


def _attention_of(root: Any) -> str | None:
    """Return the attention that a model of transformers is configured with; None for others."""
    config = getattr(getattr(root, "_orig_mod", root), "config", None)
    found = getattr(config, "_attn_implementation", None)
    return found if isinstance(found, str) else None
