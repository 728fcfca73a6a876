"""Holds what an operation made against its own float64 execution on its own inputs.

`hold` gives a verdict for one call. Large calls are held in parts, where the operation allows.
Knows nothing of models, and does not repeat the operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch.utils._pytree import tree_map

from brickline.oracle import nonfinite, parts
from brickline.oracle.bounds import Kind, OpBound, OutputBound, kind_of, op_bound
from brickline.oracle.calls import Call, NoExactForm, real_dtype, widen
from brickline.oracle.ratios import Ratios, measure
from brickline.oracle.widen import is_out_of_memory, unit_roundoff
from brickline.verdict import Verdict

WATCH, CULPRIT = 1.0, 2.0
PROBED_CULPRIT = 8.0
"""An operation whose bound is only probed must be off by this much before it is called wrong."""
GROSS = 2e-3
"""…and by this part of its largest value: eight times the root of float32's unit roundoff."""
PROBES = 3
PROBE_GAIN = 4.0


@dataclass(frozen=True)
class Held:
    """What is said of one call."""

    verdict: Verdict
    z: float | None = None
    ratios: Ratios | None = None
    output: int = 0
    """Which output is meant."""
    actual: torch.Tensor | None = None
    exact: torch.Tensor | None = None
    bound: torch.Tensor | None = None
    reason: str | None = None
    """Why nothing is known, or what kind of value was made."""
    allowed: str | None = None
    probed: bool = False
    """Whether the bound comes from perturbing the inputs, not from the operation's arithmetic."""
    carried: bool = False
    """Of a value that is not finite: whether an input was infinite."""

    @property
    def rank(self) -> tuple[int, float]:
        """Return how bad it is, to choose the worst of several."""
        order = (Verdict.IDENTICAL, Verdict.TIE, Verdict.ROUNDING, Verdict.UNKNOWN, Verdict.WATCH)
        place = order.index(self.verdict) if self.verdict in order else len(order)
        return place, self.z or 0.0


def hold(call: Call, outputs: Sequence[torch.Tensor | None]) -> Held | None:
    """Return a verdict for what a call made, or None where there is nothing to hold.

    Args:
        call: The call with its arguments as they were before it ran.
        outputs: What it made: results in order, then written arguments.
    """
    which = kind_of(call)
    if which is Kind.UNWRITTEN or not any(each is not None for each in outputs):
        return None
    if which is Kind.RANDOM:
        return Held(Verdict.NONDETERMINISTIC, reason="random by design")
    strange = _strange([*call.inputs, *(each for each in outputs if each is not None)])
    if strange is not None:
        return Held(Verdict.UNKNOWN, reason=strange)
    if parts.is_large(call, outputs):
        return _hold_parts(call, outputs)
    try:
        return _hold_whole(call, outputs)
    except NoExactForm as error:
        origin = nonfinite.origin(call, outputs, None)
        if origin is not None:
            return Held(
                Verdict.NONFINITE_ORIGIN,
                output=origin.output,
                reason=origin.kind,
                carried=origin.carried,
            )
        return Held(Verdict.UNKNOWN, reason=f"no float64 form: {error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            return Held(Verdict.UNKNOWN, reason=f"float64 form failed: {str(error)[:160]}")
    return _hold_parts(call, outputs)


def _hold_parts(call: Call, outputs: Sequence[torch.Tensor | None]) -> Held:
    """Hold a call in parts; UNKNOWN where it cannot be parted or memory is short even so."""
    short = Held(Verdict.UNKNOWN, reason="out of memory in float64")
    worst: Held | None = None
    try:
        for part, made in parts.parts(call, outputs):
            held = _hold_whole(part, made)
            if worst is None or held.rank > worst.rank:
                worst = held
    except (RuntimeError, MemoryError, NoExactForm) as error:
        if isinstance(error, NoExactForm) or is_out_of_memory(error):
            return short
        raise
    return worst or short


def _strange(tensors: Sequence[torch.Tensor]) -> str | None:
    """Return why a call's tensors cannot be held to anything, or None."""
    for each in tensors:
        if each.is_meta:
            return "meta tensors hold no values"
        if each.layout is not torch.strided:
            return f"a tensor is {str(each.layout).removeprefix('torch.')}"
        if each.is_quantized:
            return "a tensor is quantised"
        if each.is_nested:
            return "a tensor is nested"
        if type(each) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return f"a tensor is a {type(each).__name__}"
    return None


def _hold_whole(call: Call, given: Sequence[torch.Tensor | None]) -> Held:
    exact = call.exact()
    outputs = [_cut(made, value) for made, value in zip_longest(given, exact)]
    origin = nonfinite.origin(call, outputs, exact)
    dtypes = [None if each is None else each.dtype for each in outputs]
    bound = None
    try:
        bound = op_bound(call.func, call.args, call.kwargs, exact, dtypes)
    except (RuntimeError, TypeError, ValueError, AssertionError, IndexError, KeyError) as error:
        if is_out_of_memory(error):
            raise
    worst: Held | None = None
    for number, (made, value) in enumerate(zip(outputs, exact, strict=False)):
        if made is None or value is None or (bound is not None and number in bound.skipped):
            continue
        held = _hold_output(call, outputs, exact, number, bound)
        if worst is None or held.rank > worst.rank:
            worst = held
    if worst is None:
        return Held(Verdict.UNKNOWN, reason="it made no tensor that can be compared")
    if origin is not None and worst.verdict is not Verdict.UNKNOWN:
        found = outputs[origin.output]
        return replace(
            worst,
            verdict=Verdict.NONFINITE_ORIGIN,
            reason=origin.kind,
            carried=origin.carried,
            output=origin.output,
            actual=found,
            exact=exact[origin.output],
        )
    return worst


def _hold_output(
    call: Call,
    outputs: Sequence[torch.Tensor | None],
    exact: Sequence[torch.Tensor | None],
    number: int,
    bound: OpBound | None,
) -> Held:
    made, value = outputs[number], exact[number]
    assert made is not None
    assert value is not None
    if made.shape != value.shape:
        shapes = f"{tuple(value.shape)} instead of {tuple(made.shape)}"
        return Held(Verdict.UNKNOWN, reason=f"its float64 form has the shape {shapes}")
    where = {"output": number, "actual": made, "exact": value}
    if same(made, value):
        return Held(Verdict.IDENTICAL, 0.0, **where)
    if bound is not None and bound.kind is Kind.CHOICE:
        return _hold_choice(call, outputs, exact, number)
    limit = bound.outputs[number] if bound is not None and bound.outputs else None
    exact_kind = bound is not None and limit is None
    if exact_kind or not (made.dtype.is_floating_point or made.is_complex()):
        if bound is None and not made.dtype.is_floating_point:
            return Held(Verdict.UNKNOWN, reason="integers of an operation whose rule is not known")
        return _hold_exact(call, number, made, value)
    allowed = bound.allowed if bound is not None else None
    probed = limit is None
    if limit is None:
        limit = _probe(call, exact, number)
        if limit is None:
            return Held(Verdict.UNKNOWN, reason="neither a bound nor a probe of its rounding")
    ratios = measure(
        _real(made),
        _real(value),
        bound=None if probed else limit.element,
        noise=limit.noise,
        dtype=real_dtype(made.dtype),
    )
    return _judged(
        Held(
            Verdict.ROUNDING,
            ratios.z,
            ratios,
            bound=limit.element,
            allowed=allowed,
            probed=probed,
            **where,
        )
    )


def _judged(held: Held) -> Held:
    z = held.z or 0.0
    if held.probed and z > CULPRIT and (z <= PROBED_CULPRIT or not _is_gross(held)):
        reason = f"off by {z:.1f} times a limit that is only probed"
        return replace(held, verdict=Verdict.UNKNOWN, reason=reason)
    if z > CULPRIT:
        return replace(held, verdict=Verdict.CULPRIT)
    return replace(held, verdict=Verdict.WATCH if z > WATCH else Verdict.ROUNDING)


def _is_gross(held: Held) -> bool:
    """Whether an error is large against the whole output, whatever cancels inside."""
    if held.ratios is None or held.actual is None or held.exact is None:
        return True
    if held.ratios.nonfinite:
        return True
    largest = float(_real(held.exact).abs().nan_to_num(posinf=0.0).max())
    unit = unit_roundoff(real_dtype(held.actual.dtype))
    return held.ratios.largest > max(GROSS, 8 * unit) * largest


def same(made: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether an output is the float64 one, rounded once to its dtype."""
    rounded = exact.to(made.dtype)
    if torch.equal(made, rounded):
        return True
    if not (made.dtype.is_floating_point or made.is_complex()):
        return False
    return bool(((made == rounded) | (made.isnan() & rounded.isnan())).all())


def _hold_exact(call: Call, number: int, made: torch.Tensor, value: torch.Tensor) -> Held:
    """An operation that computes nothing must give the very values."""
    where = {"output": number, "actual": made, "exact": value}
    wrong = _real(made).double() != _real(value.to(made.dtype)).double()
    wrong &= ~(_real(made).isnan() & _real(value).isnan())
    if not made.dtype.is_floating_point and not made.is_complex():
        wrong &= ~_beyond_integers(call, made)
        if made.dtype is torch.bool and not bool((wrong & ~_close_calls(call, made)).any()):
            return Held(Verdict.TIE, 0.0, **where)
    if not bool(wrong.any()):
        return Held(Verdict.IDENTICAL, 0.0, **where)
    error = (_real(made).double() - _real(value).double()).abs()
    error = torch.where(error.isfinite(), error, torch.zeros_like(error))
    size = float(_real(value).double().nan_to_num(posinf=0.0, neginf=0.0).norm())
    relative = float(error.norm()) / size if size else math.inf
    place = int(wrong.reshape(-1).int().argmax())
    ratios = Ratios(math.inf, math.inf, 0.0, relative, float(error.max()), place)
    return Held(Verdict.CULPRIT, math.inf, ratios, **where)


def _beyond_integers(call: Call, made: torch.Tensor) -> torch.Tensor:
    """Floats that no integer of the dtype holds become anything: C leaves it open."""
    source = call.inputs[-1]
    if made.dtype is torch.bool or source.shape != made.shape:
        return torch.zeros_like(made, dtype=torch.bool)
    info = torch.iinfo(made.dtype)
    value = _real(source).double() if not source.is_complex() else source.abs().double()
    return ~((value > info.min) & (value < info.max))


def _close_calls(call: Call, made: torch.Tensor) -> torch.Tensor:
    """Comparisons with a constant that the tensor's dtype cannot hold exactly."""
    constants = [each for each in call.args if isinstance(each, float)]
    if not constants or not call.narrow or call.narrow[0].shape != made.shape:
        return torch.zeros_like(made, dtype=torch.bool)
    other = constants[0]
    margin = unit_roundoff(real_dtype(call.narrow[0].dtype)) * abs(other)
    return (call.narrow[0].double() - other).abs() <= margin


def _hold_choice(
    call: Call,
    outputs: Sequence[torch.Tensor | None],
    exact: Sequence[torch.Tensor | None],
    number: int,
) -> Held:
    """Positions differ: harmless where the values at both are the same."""
    made, value = outputs[number], exact[number]
    assert made is not None
    assert value is not None
    where = {"output": number, "actual": made, "exact": value}
    source = call.inputs[0].double()
    dim = call.get("dim")
    if made.dtype.is_floating_point:
        if call.get("sorted") is False and dim is not None and same(*_sorted(made, value, dim)):
            return Held(Verdict.IDENTICAL, 0.0, **where)
        return _hold_exact(call, number, made, value)
    if "pool" in call.name:
        # Positions count through a whole plane, or volume.
        start = -3 if "3d" in call.name else -2
        source, dim = source.flatten(start), -1
        made, value = made.flatten(start), value.flatten(start)
    elif dim is None:
        dim = 0 if "arg" in call.name else -1
        if "arg" in call.name:
            source = source.reshape(-1)
    keep = made.dim() == source.dim()
    left, right = (each if keep else each.unsqueeze(dim) for each in (made, value))
    within = bool(((left >= 0) & (left < max(source.shape[dim], 1))).all())
    if within:
        chosen, expected = source.gather(dim, left), source.gather(dim, right)
        if call.get("sorted") is False:
            chosen, expected = _sorted(chosen, expected, dim)
        if same(chosen, expected):
            return Held(Verdict.TIE, 0.0, **where)
    return _hold_exact(call, number, where["actual"], where["exact"])


def _sorted(left: torch.Tensor, right: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return left.sort(dim).values, right.sort(dim).values


def _probe(call: Call, exact: Sequence[torch.Tensor | None], number: int) -> OutputBound | None:
    """Return how far rounding its inputs moves an operation, where no rule says more."""
    value = exact[number]
    unit = max(call.unit, 2.0**-24)
    if value is None or not call.unit:
        return None
    total = torch.zeros_like(_real(value))
    generator = torch.Generator(device="cpu").manual_seed(0)

    def moved(each: object) -> object:
        if not isinstance(each, torch.Tensor):
            return each
        if not (each.dtype.is_floating_point or each.is_complex()):
            return each
        signs = torch.rand(each.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return each * (1 + unit * signs.to(each.device))

    try:
        for _ in range(PROBES):
            wide = Call(call.func, *_wide(call))
            args, kwargs = tree_map(moved, (wide.args, dict(wide.kwargs)))
            other = Call(call.func, args, kwargs).exact()[number]
            if other is None or other.shape != value.shape:
                return None
            total = total + _real(other - value).square()
    except (NoExactForm, RuntimeError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        return None
    noise = (total / PROBES).sqrt() * PROBE_GAIN
    return OutputBound(noise * 24, noise)


def _wide(call: Call) -> tuple[tuple[object, ...], dict[str, object]]:
    return tuple(widen(call.args)), dict(widen(dict(call.kwargs)))


def _cut(made: torch.Tensor | None, exact: torch.Tensor | None) -> torch.Tensor | None:
    """Return the part of a padded output that means something."""
    if made is None or exact is None or made.shape == exact.shape or not made.numel():
        return made
    if made.numel() == exact.numel():
        return made.reshape(exact.shape)
    if made.dim() != exact.dim():
        return made
    if any(a < b for a, b in zip(made.shape, exact.shape, strict=True)):
        return made
    return made[tuple(slice(0, size) for size in exact.shape)]


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
