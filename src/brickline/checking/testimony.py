"""What speaks for the modules that had a hand in what is wrong, and against them.

A difference that is the same in every row was added, one that is a multiple of what is right was
multiplied. A layer with the reference's weights that only multiplies with them is right; who handed
it its input may not be. Weights tell only of those that were at work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from brickline.checking.blaming import odd_modules
from brickline.checking.facts import Fact
from brickline.checking.op_kinds import CONTRACTIONS
from brickline.checking.pairing import WeightEvidence, is_boundary
from brickline.checking.recording import Recording, Value
from brickline.checking.segments import is_handed, path_of, writers_of
from brickline.checking.stage import ARGUMENT, INPUT, OUTPUT, Key
from brickline.checking.weight_uses import SUMS
from brickline.oracle.widen import unit_roundoff

NEAR = 8.0
"""A layer multiplies if what it makes is this many unit roundoffs from the product, at most."""
ALIKE = 0.03
"""What is wrong is a constant, or a multiple of what is right, up to this part of itself."""
ADDING = frozenset({"aten::addmm", "aten::linear", "aten::convolution", *SUMS})
"""Operations that may add a constant to every row."""
TURNED = 0.9
"""Rows with a cosine below it point elsewhere."""
PUTTING = frozenset({"aten::cat", "aten::stack", *SUMS})
"""Operations that put a weight beside other values or on top of them."""
SCALING = frozenset({"aten::mul", "aten::mul_", "aten::div", "aten::div_"})
"""Operations that may multiply by a number."""


def weights_at_work(
    weights: WeightEvidence, guilty: list[Fact], working: Mapping[int, list[Value]]
) -> WeightEvidence:
    """Return what is known of the weights that had a hand in what is wrong."""
    used: set[str] = set()
    for fact in guilty:
        # What is added to everything makes everything wrong alike.
        added = _is_constant(_difference(fact))
        for value in working[id(fact)]:
            if added is not False or value.key.op not in PUTTING:
                used.update(name.rpartition(".")[0] for name in value.parameters)
    odd = {each for each in weights.odd if each in used}
    return replace(weights, odd=odd, unfound={each for each in weights.unfound if each in used})


def _speaks_for_itself(fact: Fact, accused: list[Value]) -> bool:
    """Blame who adds a constant or multiplies by a number, if only that is wrong."""
    wrong = _difference(fact)
    if wrong is None or not wrong.ndim:
        return False
    first = wrong.movedim(1, -1) if wrong.ndim > 2 else wrong
    rows = (each.reshape(-1, each.shape[-1]) for each in (wrong, first))
    if any(_is_constant(each) for each in rows):
        makers = [each for each in accused if each.key.op in ADDING and each.parameters]
    elif len(fact.modules) > 1 and _is_factor(fact):
        makers = [each for each in accused if each.key.op in SCALING and len(each.inputs) == 1]
    else:
        return False
    paths = [each.key.path for each in makers if each.key.path in fact.modules]
    if paths:
        fact.modules = (paths[-1],)
    return bool(paths)


def _is_constant(wrong: torch.Tensor | None) -> bool | None:
    """Whether what is wrong is the same in every row; None where that cannot be told."""
    if wrong is None or wrong.ndim < 2 or len(wrong) < 2:
        return None
    return bool((wrong - wrong.mean(0)).norm() <= ALIKE * wrong.norm())


def _is_factor(fact: Fact) -> bool:
    """Whether what is wrong is what is right times a number."""
    wrong = _difference(fact)
    if wrong is None or fact.exact is None:
        return False
    right = fact.exact.double()
    factor = (wrong * right).sum() / right.square().sum().clamp_min(1e-300)
    return bool((wrong - factor * right).norm() <= ALIKE * wrong.norm())


def _difference(fact: Fact) -> torch.Tensor | None:
    if fact.actual is None or fact.exact is None:
        return None
    wrong = fact.actual.to(fact.exact.device).double() - fact.exact.double()
    return wrong if bool(wrong.isfinite().all()) else None


def clear_the_right(
    guilty: list[Fact],
    working: Mapping[int, list[Value]],
    weights: WeightEvidence,
    alike: Collection[str],
    modules: Mapping[str, Any],
    recording: Recording,
) -> None:
    """Ask whoever handed a module its input instead of it, if its weights speak for it.

    Args:
        guilty: What is wrong, each with the modules that had a hand in it.
        working: The values that may be wrong, by the `id` of each.
        weights: What the modules' weights say of them.
        alike: Modules whose weights the reference uses in the same operations.
        modules: The candidate's modules by path.
        recording: What the candidate made.
    """
    asked = [each for each in guilty if not _speaks_for_itself(each, working[id(each)])]
    busy = {path for each in asked for path in each.modules if path in weights.cleared}
    right = {each for each in busy if _multiplies(modules[each], each, recording)}
    same = {each for each in alike if each in weights.held and _does_one_thing(each, recording)}
    alone = {each.modules[0] for each in asked if len(each.modules) == 1}
    for fact in asked:
        if len(fact.modules) > 1 and not alone.isdisjoint(fact.modules):
            continue
        cleared = right | (same if _is_turned(fact) else set())
        only = cleared.issuperset(fact.modules)
        left: dict[str, None] = {}
        for path in fact.modules:
            if path in cleared:
                left.update(dict.fromkeys(_handing(path, working[id(fact)], recording, alone=only)))
            else:
                left[path] = None
        if fact.modules[0] in cleared and len(fact.modules) == 1 and _is_factor(fact):
            left = dict.fromkeys(_without_a_factor(fact, recording)) or left
        fact.modules = tuple(left) or fact.modules


def _without_a_factor(fact: Fact, recording: Recording) -> list[str]:
    """Return the first of those that called a module that does other things than its like."""
    odd = odd_modules(recording)
    call = fact.key[:2]
    while call in recording.callers:
        call = recording.callers[call]
        if call[0] in odd:
            return [call[0]]
    return []


def _does_one_thing(path: str, recording: Recording) -> bool:
    """Whether a module is one operation that is no product, such as a norm of torch."""
    made = [
        each.key.op
        for each in recording.values
        if each.key.path == path
        and not each.view
        and not is_boundary(each.key)
        and not each.key.out
    ]
    return len(set(made)) == 1 and made[0] not in CONTRACTIONS


def _is_turned(fact: Fact) -> bool:
    """Whether rows point elsewhere than they should: no other constant of a norm does that."""
    if fact.actual is None or fact.exact is None or fact.exact.ndim < 2:
        return False
    ours = fact.actual.to(fact.exact.device).double().flatten(0, -2)
    right = fact.exact.double().flatten(0, -2)
    cosines = torch.cosine_similarity(ours, right, dim=-1)
    return bool(cosines.isfinite().all()) and float(cosines.median()) < TURNED


def _multiplies(module: Any, path: str, recording: Recording) -> bool:
    """Whether a module with one matrix returns its product with all that it is called with."""
    tensors = list(module.parameters(recurse=False)) + list(module.buffers(recurse=False))
    matrices = [each.detach().double() for each in tensors if each.ndim == 2]
    biases = [each.detach().double() for each in tensors if each.ndim == 1]
    given = recording.by_key.get(Key(path, 0, INPUT, 0))
    made = recording.by_key.get(Key(path, 0, OUTPUT, 0))
    if len(matrices) != 1 or given is None or made is None or len(biases) > 1:
        # Without a matrix there is no product to make again, and its weights are right.
        return not matrices
    right, near = made.tensor.double(), NEAR * unit_roundoff(made.tensor.dtype)
    for matrix in (matrices[0].t(), matrices[0]):
        if (given.tensor.shape[-1], right.shape[-1]) == tuple(matrix.shape):
            product = given.tensor.double() @ matrix + sum(biases)
            if product.shape == right.shape and (product - right).norm() <= near * right.norm():
                return True
    return False


def _handing(path: str, accused: list[Value], recording: Recording, alone: bool) -> tuple[str, ...]:
    """Return who handed a module what it multiplies, where that is not known to be right.

    Beside others who did something, only who rearranged what was right is asked.
    """
    by_index = {each.index: each for each in accused}
    for value in accused:
        if value.key.path != path or not is_handed(value.key):
            continue
        while len(value.inputs) == 1 and value.inputs[0] in by_index:
            source = by_index[value.inputs[0]]
            if not is_handed(source.key):
                break
            value = source
        giver = path_of(value)
        made = [recording.by_index[each].tensor.shape for each in value.inputs]
        as_it_is = made == [value.tensor.shape]
        return () if giver == path or (as_it_is and not alone) else (giver,)
    return ()


def ask_the_writers(guilty: list[Fact], recording: Recording) -> None:
    """Blame a wrong argument of the call on who wrote to it, where that is known."""
    named = [path for each in guilty if not _is_written(each) for path in each.modules]
    accused = [path for path in dict.fromkeys(named) if path]
    for fact in guilty:
        if not _is_written(fact) or fact.modules != ("",):
            continue
        writers = writers_of(recording, recording.by_key[fact.key])
        known = tuple(each for each in accused if any(_lies_in(path, each) for path in writers))
        if known or len(writers) == 1:
            fact.modules = known or writers


def _lies_in(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.")


def _is_written(fact: Fact) -> bool:
    return fact.key.op.startswith(ARGUMENT)
