"""How other tools decide, each as one rule over the same models.

All but the last run both sides freely and name the first module, in the order in which modules
return, whose tensors differ from those of the module of the same name. The last is the strongest
script that one would write in an afternoon: it runs each module of the same name in float64 on the
candidate's own inputs. The rules are the tools' published constants, not their whole pipelines.
Knows nothing of brickline.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from localisation.cases import Case

Seen = list[tuple[tuple[str, int], list[Tensor]]]


# --- Rules on two tensors: true if they are held to differ ----------------------------------------


def bitwise(a: Tensor, b: Tensor) -> bool:
    """As hashes: OpGuard, DebugMode with a hash."""
    return a.dtype != b.dtype or not torch.equal(a, b)


def assert_close(a: Tensor, b: Tensor) -> bool:
    """`torch.testing.assert_close` with its tolerances for these dtypes."""
    try:
        torch.testing.assert_close(a, b, check_dtype=False, equal_nan=True)
    except AssertionError:
        return True
    return False


def allclose(a: Tensor, b: Tensor) -> bool:
    """Both tolerances 1e-3: tinygrad, SGLang."""
    return not torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-3, equal_nan=True)


def cosine(a: Tensor, b: Tensor) -> bool:
    """Below 0.99: msprobe's guidance."""
    a, b = a.double().flatten(), b.double().flatten()
    return not bool(torch.cosine_similarity(a, b, 0) >= 0.99) and not torch.equal(a, b)


def nmse(a: Tensor, b: Tensor) -> bool:
    """Above 5e-4: what llama.cpp allows a matrix product."""
    a, b = a.double(), b.double()
    return not bool((a - b).square().sum() <= 5e-4 * b.square().sum())


def statistics(a: Tensor, b: Tensor) -> bool:
    """Maximum, minimum, mean or norm off by half: msprobe compare -da."""
    pairs = zip(_statistics(a.double()), _statistics(b.double()), strict=True)
    return any(not bool((x - y).abs() <= 0.5 * y.abs()) for x, y in pairs)


def _statistics(a: Tensor) -> tuple[Tensor, ...]:
    return (a.max(), a.min(), a.mean(), a.norm()) if a.numel() else ()


RULES: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "bitwise": bitwise,
    "assert_close": assert_close,
    "allclose 1e-3": allclose,
    "cosine 0.99": cosine,
    "NMSE 5e-4": nmse,
    "statistics 50 %": statistics,
}


def first_by_rules(case: Case) -> dict[str, str | None]:
    """Return the first module that each rule names; None where it names none."""
    candidate, reference = _seen(case, case.candidate), dict(_seen(case, case.reference))
    out: dict[str, str | None] = {}
    for name, rule in RULES.items():
        out[name] = next(
            (
                key[0]
                for key, tensors in candidate
                if _differ(rule, tensors, reference.get(key)) and (key[0] or len(candidate) == 1)
            ),
            None,
        )
    return out


def _differ(
    rule: Callable[[Tensor, Tensor], bool], a: list[Tensor], b: list[Tensor] | None
) -> bool:
    if b is None:
        return False
    pairs = zip(a, b, strict=False)
    return any(x.shape != y.shape or (x.numel() > 0 and rule(x, y)) for x, y in pairs)


def _seen(case: Case, model: nn.Module) -> Seen:
    """Run one side freely; return what its modules gave, and their gradients, in order."""
    model = copy.deepcopy(_as_module(model))
    seen: Seen = []
    counts: Counter[str] = Counter()

    def keep(path: str, value: Any) -> None:
        tensors = [each.detach().clone() for each in tree_leaves(value) if isinstance(each, Tensor)]
        seen.append(((path, counts[path]), tensors))
        counts[path] += 1

    for path, module in model.named_modules():
        module.register_forward_hook(lambda m, a, out, p=path: keep(p, out))
        if case.direction == "backward":
            module.register_full_backward_hook(lambda m, into, out, p=path: keep(p + "'", into))
    dtype = next((each.dtype for each in model.parameters()), case.dtype)
    torch.manual_seed(11)
    case.run(dtype)(model)
    if case.direction == "backward":
        seen = _with_weights(seen, model)
    return [((path.rstrip("'"), number), tensors) for (path, number), tensors in seen]


class _Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _as_module(side: Any) -> nn.Module:
    return side if isinstance(side, nn.Module) else _Called(side)


def _with_weights(seen: Seen, model: nn.Module) -> Seen:
    """Keep the backward half, each module with the gradients of its own weights."""
    out: Seen = []
    for (path, number), tensors in seen:
        if path.endswith("'"):
            module = model.get_submodule(path.rstrip("'"))
            own = [each.grad for each in module.parameters(recurse=False) if each.grad is not None]
            out.append(((path, number), [*tensors, *own]))
    return out


# --- The script of an afternoon -------------------------------------------------------------------


def first_by_script(case: Case) -> str | None:
    """Return the first module whose errors are too large for its reference's in that dtype."""
    candidate, dtype = copy.deepcopy(_as_module(case.candidate)), case.dtype
    exact_side = copy.deepcopy(_as_module(case.reference)).double()
    clean_side = copy.deepcopy(_as_module(case.reference)).to(dtype)
    exact_of, clean_of = (dict(side.named_modules()) for side in (exact_side, clean_side))
    calls: dict[str, list[Any]] = {}
    guilty: list[str] = []

    def before(path: str, args: Any, kwargs: Any) -> None:
        calls.setdefault(path, []).append(copy.deepcopy(tree_map(_detached, (args, kwargs))))

    def after(path: str, out: Any) -> None:
        args, kwargs = calls[path].pop()
        try:
            with torch.no_grad():
                exact = exact_of[path](*tree_map(_wide, args), **tree_map(_wide, kwargs))
                clean = clean_of[path](*args, **kwargs)
        except Exception:
            return
        for y, r, c in zip(*(tree_leaves(each) for each in (out, exact, clean)), strict=False):
            if isinstance(y, Tensor) and y.is_floating_point() and y.shape == r.shape and y.numel():
                guilty.extend([path] if _too_large(y.detach(), r, c, dtype) else [])

    for path, module in candidate.named_modules():
        if path in exact_of:
            module.register_forward_pre_hook(
                lambda m, a, k, p=path: before(p, a, k), with_kwargs=True
            )
            module.register_forward_hook(lambda m, a, out, p=path: after(p, out))
    case.run(dtype)(candidate)
    return guilty[0] if guilty else None


def _too_large(y: Tensor, exact: Tensor, clean: Tensor, dtype: torch.dtype) -> bool:
    if (y.isfinite() != exact.isfinite()).any():
        return True
    y, exact, clean = (each.nan_to_num(0, 0, 0) for each in (y, exact, clean))
    error, usual = (y.double() - exact).abs(), (clean.double() - exact).abs()
    ulp = 0.29 * torch.finfo(dtype).eps
    mean = float(usual.square().mean().sqrt().maximum(ulp * exact.square().mean().sqrt()))
    most = float(usual.max().maximum(ulp * exact.abs().max()))
    rms = float(error.square().mean().sqrt())
    return not (rms <= 3 * mean and float(error.max()) <= 8 * most)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
