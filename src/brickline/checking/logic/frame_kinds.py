"""Which modules do what their siblings in other layers do: the same operations and numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

import torch
from torch.utils._pytree import tree_leaves

from brickline.checking.execution.tape import CONSTANT, WEIGHT, Ref, Step, Tape
from brickline.checking.stage import family_of


class FrameKinds:
    """What each module of a call computes, weights left aside."""

    def __init__(self, tape: Tape) -> None:
        steps: defaultdict[str, list[Hashable]] = defaultdict(list)
        for step in tape.steps:
            if step.func is not None:
                steps[step.frame.path].append(_kind(tape, step))
        self._kinds = {path: tuple(kinds) for path, kinds in steps.items()}
        families: defaultdict[str, Counter[tuple[Hashable, ...]]] = defaultdict(Counter)
        for path, kind in self._kinds.items():
            families[family_of(path)][kind] += 1
        self._families = families

    def is_usual(self, path: str) -> bool:
        """Return whether a module does what another one in its place in another layer does.

        Where all layers do the same, this says nothing of a fault that they share.
        """
        kinds = self._families.get(family_of(path), Counter())
        return kinds[self._kinds.get(path, ())] > 1


def _kind(tape: Tape, step: Step) -> Hashable:
    """Return an operation with the numbers that it is given, and small tables that it reads."""
    leaves = tree_leaves((step.args, step.kwargs))
    numbers = tuple(str(leaf) for leaf in leaves if not isinstance(leaf, Ref | torch.Tensor))
    tables = tuple(
        _digest(tape.values[index].tensor)
        for index in step.inputs
        if tape.values[index].step.name in (WEIGHT, CONSTANT) and _is_table(tape, index)
    )
    return step.name, numbers, tables


def _is_table(tape: Tape, index: int) -> bool:
    return index in tape.tables


def _digest(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), float(tensor.double().sum()), float(tensor.double().abs().sum())
