"""Causes that single values show: not finite, saturated, flushed to zero, on a coarse grid."""

from __future__ import annotations

import torch

from brickline.checking.guesses import Case, Guess
from brickline.checking.residual import as_rows, unit_roundoff

_LIMITS = {
    "float16": 65504.0,
    "float8_e4m3": 448.0,
    "float8_e5m2": 57344.0,
    "int8": 127.0,
    "int4": 7.0,
}
_GRIDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def nonfinite(case: Case) -> list[Guess]:
    """NaN or Inf where the exact answer is finite, by class."""
    residual = case.residual
    odd = ~residual.actual.isfinite() & residual.exact.isfinite()
    if not odd.any():
        return _should_be_infinite(case)
    nan = odd & residual.actual.isnan()
    facts = {"nan": int(nan.sum()), "inf": int((odd & ~nan).sum())}
    if not nan.any():
        return [_infinite(case, odd, facts)]
    rows = as_rows(nan)
    whole = rows.all(-1)
    facts["rows wholly NaN"] = int(whole.sum())
    if bool((whole == rows.any(-1)).all()) and ("softmax" in case.kind or "att" in case.kind):
        words = "NaN: whole rows, as a softmax makes where every position is masked"
        return [Guess("nan", words, facts=facts)]
    reason = _domain_error(case, nan) or _inputs_in_words(case)
    return [Guess("nan", f"NaN: {reason}", facts=facts)]


def _infinite(case: Case, odd: torch.Tensor, facts: dict[str, int]) -> Guess:
    largest = float(case.residual.exact[odd].abs().max())
    smallest = float(case.residual.exact[odd].abs().min())
    dtype = case.residual.dtype
    limit = float(torch.finfo(dtype).max)
    name = str(dtype).removeprefix("torch.")
    facts_ = {**facts, "smallest exact value there": smallest, "limit": limit}
    if smallest > limit:
        return Guess("overflow", f"overflow of {name}: the answer exceeds {limit:.6g}", 0.0, facts_)
    if smallest > _LIMITS["float16"]:
        kept = case.residual.exact[case.residual.finite].abs()
        if not kept.numel() or float(kept.max()) <= _LIMITS["float16"] * 1.001:
            words = f"overflow of float16: every answer above 65504 (up to {largest:.6g}) is Inf"
            return Guess("overflow", words, 0.0, facts_)
    words = f"overflow within: Inf where the answer is {smallest:.6g}, which {name} holds"
    return Guess("overflow", words, 0.0, facts_)


def _domain_error(case: Case, nan: torch.Tensor) -> str | None:
    """Return which argument an elementwise op cannot take, where inputs show it."""
    for index, each in enumerate(case.evidence.inputs):
        if each.shape != nan.shape or not each.dtype.is_floating_point:
            continue
        values = each.detach().to(nan.device)
        if bool((values < 0)[nan].all()) and not bool((values < 0)[~nan].any()):
            return f"exactly where input {index} is negative (a root or logarithm)"
        if bool((values == 0)[nan].all()) and not bool((values == 0)[~nan].any()):
            return f"exactly where input {index} is 0 (a division, or 0 times Inf)"
    return None


def _inputs_in_words(case: Case) -> str:
    floats = [each for each in case.evidence.inputs if each.dtype.is_floating_point]
    if not floats:
        return "where the answer is a number"
    finite = all(bool(each.isfinite().all()) for each in floats)
    return "from finite inputs" if finite else "from inputs that are not all finite"


def _should_be_infinite(case: Case) -> list[Guess]:
    residual = case.residual
    odd = residual.exact.isinf() & residual.actual.isfinite()
    if not odd.any():
        return []
    values = residual.actual[odd].unique()
    if len(values) != 1:
        return []
    words = f"saturation: {float(values[0]):.6g} stands where the answer is infinite"
    return [Guess("saturation", words, facts={"elements": int(odd.sum())})]


def saturation(case: Case) -> list[Guess]:
    """Every wrong element stands at one limit that the exact answer goes beyond."""
    residual = case.residual
    wrong = residual.wrong & residual.finite
    if not wrong.any():
        return []
    values, exact = residual.actual[wrong], residual.exact[wrong]
    limit = float(values.abs().max())
    held = bool((values.abs() == limit).all()) and bool((exact.abs() > limit).all())
    same_sign = bool((values.sign() == exact.sign()).all())
    within = float(residual.actual[residual.finite].abs().max()) <= limit
    one_sided = bool((values == values[0]).all())
    beyond_other_side = one_sided and not within
    known = next((name for name, each in _LIMITS.items() if each == limit), None)
    if not held or not same_sign or limit == 0.0 or (len(values) < 3 and known is None):
        return []
    if beyond_other_side:
        side = values[0].sign()
        if bool((residual.actual * side > limit).any()):
            return []
    whose = f", the limit of {known}" if known else ""
    words = f"saturation: answers beyond {limit:.6g} are held at it{whose}"
    return [Guess("saturation", words, facts={"limit": limit, "elements": len(values)})]


def flush_to_zero(case: Case) -> list[Guess]:
    """Only answers below the smallest normal number are wrong, and they are 0."""
    residual = case.residual
    dtype = residual.dtype
    tiny = float(torch.finfo(dtype).tiny)
    least = tiny * float(torch.finfo(dtype).eps)
    small = (residual.exact.abs() < tiny) & (residual.exact.abs() >= least)
    flushed = small & (residual.actual == 0)
    others = residual.wrong & ~small
    if int(flushed.sum()) < 2 or bool((small & ~flushed).any()) or bool(others.any()):
        return []
    words = f"flush to zero: every answer below {tiny:.3g} is 0"
    return [Guess("flush to zero", words, facts={"elements": int(flushed.sum())})]


def coarse_grid(case: Case) -> list[Guess]:
    """The output has fewer bits than its dtype: it was stored or summed in a shorter one."""
    residual = case.residual
    if residual.dtype not in (torch.float32, torch.float64):
        return []
    wrong = residual.wrong & residual.finite
    count = int(wrong.sum())
    if count < 16:
        return []
    values, exact = residual.actual[wrong], residual.exact[wrong]
    for name, dtype in _GRIDS.items():
        on_grid = float((values.to(dtype).double() == values).double().mean())
        by_chance = float((exact.to(dtype).double() == exact.float().double()).double().mean())
        if on_grid < 0.999 or by_chance > 0.5:
            continue
        if bool((values == 0).all()) or not _uses_last_bit(values, dtype):
            continue
        step = 2 * unit_roundoff(dtype) * exact.abs()
        error = (values - exact).abs()
        allowed = 4 * residual.noise()[wrong]
        ratio = float((error.square().mean() / (step / 3.4641).square().mean()).sqrt())
        facts = {"on grid": on_grid, "error in rounding steps": ratio}
        if float((error <= 0.51 * step + allowed).double().mean()) >= 0.999:
            words = f"low-precision storage: the answer, rounded to {name}"
            return [Guess("low-precision storage", words, facts=facts)]
        inward = float((values.abs() <= exact.abs() + allowed).double().mean())
        if inward >= 0.999 and float((error <= 1.01 * step + allowed).double().mean()) >= 0.999:
            words = f"low-precision storage: the answer, cut off after the bits of {name}"
            return [Guess("low-precision storage", words, facts=facts)]
        if 2 < ratio < 30:
            words = (
                f"low-precision accumulation: every value is a {name} number, with "
                f"{ratio:.2g} times the error of one rounding to it"
            )
            return [Guess("low-precision accumulation", words, facts=facts)]
    return []


def _uses_last_bit(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether about half of the values need the last bit; a coarser grid does not."""
    short = values[values != 0].to(dtype)
    odd = short.view(torch.int16) & 1
    return bool(0.3 < float(odd.double().mean()) < 0.7) if short.numel() else False
