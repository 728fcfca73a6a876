"""Shows that the cases of a set are what they say, with no tool: python -m sealed.verify one.

In float64, a harmless candidate puts out what the reference does, and a faulty one does not.
"""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from sealed.cases import Case, Pair

RIGHT = 2e-5
"""Relative L2 up to which outputs of right code agree: code may round to float32 on its way."""
WRONG = 1e-6
"""Relative L2 from which a fault can be seen in float64."""


def main(names: list[str]) -> int:
    """Print each case that is not what it says; return 1 if there is one."""
    bad = count = faults = 0
    for name in names:
        for case in importlib.import_module(f"sealed.{name}").cases():
            problem = problem_of(case)
            count, faults, bad = (
                count + 1,
                faults + (not case.harmless),
                bad + (problem is not None),
            )
            if problem is not None:
                print(f"{case.name}: {problem}", flush=True)
    print(f"{count} cases, {faults} faults, {bad} not as they say")
    return int(bad > 0)


def problem_of(case: Case) -> str | None:
    """Return in words why a case is not what it says."""
    pair = case.make()
    modules = dict(pair.candidate.named_modules())
    missing = [path for path in case.expected if path and path not in modules]
    if missing:
        return f"the candidate has no module {missing[0]}"
    distance = distance_of(pair)
    if case.harmless or case.precision:
        return None if distance <= RIGHT else f"the sides differ by {distance:.1e} in float64"
    return None if distance >= WRONG else f"the fault moves the outputs by {distance:.1e} only"


def distance_of(pair: Pair) -> float:
    """Return the largest relative L2 of the candidate's outputs to the reference's, in float64."""
    ours, theirs = _outputs(pair.candidate, pair), _outputs(pair.reference, pair)
    assert len(ours) == len(theirs), "the sides put out different numbers of tensors"
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape, f"shapes differ: {one.shape}, {other.shape}"
        gap = (one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30)
        worst = max(worst, float(gap)) if gap.isfinite() else float("inf")
    return worst


def _outputs(model: nn.Module, pair: Pair) -> list[torch.Tensor]:
    def wide(value: Any) -> Any:
        narrow = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
        return value.double() if narrow else value

    model = copy.deepcopy(model).double()
    with torch.no_grad():
        if pair.drive is not None:
            output = pair.drive(model)
        else:
            output = model(*tree_map(wide, pair.args), **tree_map(wide, pair.kwargs))
    return [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
