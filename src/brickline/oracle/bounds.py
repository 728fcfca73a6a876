"""How far rounding may take each element of an operation's output from the exact value.

For an operation that is executed in its own dtype, with R its float64 result, M the same with
absolute values (``|A||B|`` for contractions, ``|x f'(x)|`` for elementwise functions) and K terms
in each sum::

    bound = u_out |R| + (C sqrt(K) + steps) u_acc M + u_in S + eta

``u`` are unit roundoffs: of the output's dtype, of the accumulator (float32 for everything
narrower) and of the inputs. S is what the operation itself rounds to the inputs' dtype on its way,
such as the probabilities of fused attention. ``eta`` is what underflow may lose. docs/oracle.md
says where the constants come from.

`noise` is the standard deviation to expect, for the ratio of root mean squares. The families of
operations are in `exact_ops`, `pointwise`, `contractions`, `convolutions`, `normalisations` and
`attention`. Knows nothing of what the operation made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from brickline.oracle.calls import Call, real_dtype
from brickline.oracle.widen import unit_roundoff

ROOT = 1.0
"""C: worst errors of sums grow with the square root of their length (Higham and Mary)."""
STEPS = 8.0
"""Roundings to the accumulator's precision besides those of the sum, in the worst element."""
ROUNDING_SD = 0.58
"""Standard deviation of one rounding, in unit roundoffs: 2 ulp / sqrt(12)."""
SUM_SD = 0.1
"""Standard deviation of a sum's error per sqrt(K), in units of u_acc M."""
PATH_SD = 0.45
"""…per sqrt(K) in units of u_acc and the partial sums on the way, where those are known."""
STEPS_SD = 0.25
"""Standard deviation of the other roundings, as a part of their worst case."""
TF32 = 2.0**-11
ACCUMULATOR = 2.0**-24
UNDERFLOW = 2.0**-110
"""Float32 kernels flush to zero below 2^-126, and some functions a little earlier."""


class Kind(StrEnum):
    """How an operation's outputs are held to its float64 execution."""

    ROUNDED = "rounded"
    """Within a bound."""
    EXACT = "exact"
    """The same values, rounded once to the output's dtype."""
    CHOICE = "choice"
    """Positions: those of equal values may be exchanged."""
    RANDOM = "random"
    """Random by design: not held to anything."""
    UNWRITTEN = "unwritten"
    """Memory without a value yet."""


@dataclass(frozen=True)
class Budget:
    """What one output's rounding errors are made of."""

    magnitude: torch.Tensor
    """M: the result with absolute values."""
    fan_in: float = 1.0
    """K: terms in each sum."""
    steps: float = STEPS
    stored: torch.Tensor | None = None
    """S: magnitude of what is rounded to the inputs' dtype inside."""
    stored_sd: torch.Tensor | None = None
    """Its standard deviation per unit roundoff; S over 4 where it is not given."""
    roundings: float = 1.0
    """How often the output is rounded to its own dtype."""
    path: torch.Tensor | None = None
    """Root mean square of the partial sums on the way to each element."""
    input_unit: float = 0.0
    """Unit roundoff to which inputs are rounded first; 0 for none, 2^-11 under TF32."""


@dataclass(frozen=True)
class OutputBound:
    """Limits for one output, in float64 and with its shape."""

    element: torch.Tensor
    noise: torch.Tensor


@dataclass(frozen=True)
class OpBound:
    """What is known about an operation's rounding."""

    kind: Kind
    outputs: tuple[OutputBound | None, ...] = ()
    """For `Kind.ROUNDED`, one for each output; None for an output that must be exact."""
    skipped: tuple[int, ...] = ()
    """Outputs that mean nothing by themselves: seeds, workspaces."""
    allowed: str | None = None
    """A setting of torch that the bound makes room for, in words."""


Rule = Callable[[Call, Sequence[torch.Tensor | None]], "Sequence[Budget | None]"]
FAMILIES = (
    *("exact_ops", "pointwise", "contractions", "convolutions"),
    *("normalisations", "attention", "attention_backward"),
)
RULES: dict[str, Rule] = {}
SKIPPED: dict[str, tuple[int, ...]] = {}
KINDS: dict[str, Kind] = {}


def rule(*names: str, skipped: tuple[int, ...] = ()) -> Callable[[Rule], Rule]:
    """Register the rule that gives a budget for each output of operations, named with blanks."""

    def register(function: Rule) -> Rule:
        for name in " ".join(names).split():
            RULES[f"aten::{name}"] = function
            if skipped:
                SKIPPED[f"aten::{name}"] = skipped
        return function

    return register


def kind(which: Kind, names: str) -> None:
    """Register operations, separated by blanks, of one kind."""
    KINDS.update((f"aten::{name}", which) for name in names.split())


def op_bound(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    exact: Sequence[torch.Tensor | None],
    dtypes: Sequence[torch.dtype | None] | None = None,
) -> OpBound | None:
    """Return the rounding bound of an operation, or None where it is not known.

    Args:
        func: The overload, such as ``torch.ops.aten.mm.default``.
        args: Its arguments as they were before it ran.
        kwargs: Its keyword arguments, likewise.
        exact: What it makes in float64: results in order, then written arguments.
        dtypes: Dtypes of what it really made. Default: that of its narrowest input.
    """
    _load_families()
    call = Call(func, tuple(args), kwargs)
    name = _plain_name(call.name)
    which = kind_of(call)
    if which is not None:
        return OpBound(which)
    found = RULES.get(name)
    if found is None:
        return None
    budgets = list(found(call, exact))
    budgets += [None] * (len(exact) - len(budgets))
    made: list[OutputBound | None] = []
    for number, (value, budget) in enumerate(zip(exact, budgets, strict=False)):
        if value is None or budget is None:
            made.append(None)
            continue
        dtype = dtypes[number] if dtypes is not None else None
        made.append(_output_bound(call, value, budget, dtype))
    allowed = None
    if any(each is not None and each.input_unit for each in budgets):
        allowed = f"{call.func}: TF32 or narrower inputs are allowed by torch's settings"
    return OpBound(Kind.ROUNDED, tuple(made), SKIPPED.get(name, ()), allowed)


def kind_of(call: Call) -> Kind | None:
    """Return the kind of an operation that needs no bound, or None."""
    _load_families()
    found = KINDS.get(_plain_name(call.name))
    if found is Kind.RANDOM and (call.get("train") is False or call.get("p") == 0):
        return Kind.EXACT
    if found is None and (call.get("dropout_p") or 0.0):
        return Kind.RANDOM
    if (
        found is None
        and torch.Tag.nondeterministic_seeded in call.func.tags
        and _plain_name(call.name) not in RULES
    ):
        return Kind.RANDOM
    return found


def accumulator_unit(call: Call) -> float:
    """Return the unit roundoff in which sums are made: float32 for narrower inputs."""
    unit = call.unit or ACCUMULATOR
    return min(unit, ACCUMULATOR)


def _plain_name(name: str) -> str:
    """Return the name of the functional form: ``aten::add_`` is ``aten::add``."""
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1]
    return name


def _output_bound(
    call: Call, exact: torch.Tensor, budget: Budget, dtype: torch.dtype | None
) -> OutputBound:
    own = real_dtype(dtype) if dtype is not None else _narrowest(call)
    if not own.is_floating_point:
        own = torch.float32
    u_out, u_acc = unit_roundoff(own), accumulator_unit(call)
    size = torch.view_as_real(exact).abs() if exact.is_complex() else exact.abs()
    magnitude = budget.magnitude.expand(size.shape)
    sums = math.sqrt(max(budget.fan_in, 1.0))
    worst = (ROOT * sums + budget.steps) * u_acc + 2 * budget.input_unit
    eta = float(torch.finfo(own).smallest_normal) * u_out + UNDERFLOW
    element = size * (budget.roundings * u_out) + magnitude * worst + eta
    usual = STEPS_SD * budget.steps * u_acc + budget.input_unit * 0.5
    if budget.path is None:
        usual += SUM_SD * sums * u_acc
    variance = (size * (budget.roundings * ROUNDING_SD * u_out)).square()
    variance = variance + (magnitude * usual).square()
    if budget.path is not None:
        variance = variance + (budget.path * (PATH_SD * sums * u_acc)).square()
    if budget.stored is not None:
        element = element + budget.stored * call.unit
        likely = budget.stored / 4 if budget.stored_sd is None else budget.stored_sd
        variance = variance + (likely * (2 * ROUNDING_SD * call.unit)).square()
    return OutputBound(element, variance.sqrt())


def finite_part(value: torch.Tensor) -> torch.Tensor:
    """Return a magnitude with zeros for what is not finite."""
    return torch.where(value.isfinite(), value, torch.zeros_like(value))


def _narrowest(call: Call) -> torch.dtype:
    kinds = [real_dtype(each.dtype) for each in call.narrow]
    return max(kinds, key=unit_roundoff, default=torch.float32)


@lru_cache(maxsize=1)
def _load_families() -> None:
    """Register every family's rules; they import this module, so it asks for them late."""
    for name in FAMILIES:
        import_module(f"brickline.oracle.{name}")
