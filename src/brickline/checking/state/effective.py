"""The weights that a quantised module multiplies with, and on which grid they are the reference's.

A weight of codes and scales is known by what is computed from it: a value that no argument of the
call went into, and that a product reads. It is looked for by the name of the module that computes
it, then by its contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from brickline.checking.execution.tape import ARGUMENT, CONSTANT, WEIGHT, Tape, Value
from brickline.checking.state.answer import Kind, TensorAnswer
from brickline.checking.state.grids import on_grid
from brickline.checking.state.tensors import Tensors, held_tensors, is_plain, plain_name

PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::convolution",
        "aten::_convolution",
        "aten::linear",
        "aten::matmul",
        "aten::embedding",
    }
)
NARROWEST = 16
"""Bits of the floating dtypes that weights are not quantised in."""


def holds_codes(root: Any) -> bool:
    """Return whether a module holds weights as integers, or in eight bits."""
    if not isinstance(root, torch.nn.Module):
        return False
    tensors = (*root.parameters(), *root.buffers())
    return any(_is_code(tensor) for tensor in tensors if tensor.numel() > 1)


def _is_code(tensor: torch.Tensor) -> bool:
    if tensor.is_quantized:
        return True
    if tensor.dtype.is_floating_point:
        return bool(tensor.dtype.itemsize * 8 < NARROWEST)
    return tensor.dtype in (torch.uint8, torch.int8, torch.int32)


def effective_weights(tape: Tape) -> Iterator[Value]:
    """Yield the values computed from the side's own tensors alone that products read."""
    own: dict[int, bool] = {}
    computed: dict[int, bool] = {}
    for value in tape.values:
        inputs = value.step.inputs
        if value.step.name in (WEIGHT, CONSTANT):
            own[value.index], computed[value.index] = True, False
        elif value.step.name == ARGUMENT or not inputs:
            own[value.index] = computed[value.index] = False
        else:
            own[value.index] = all(own[index] for index in inputs)
            changes = not value.step.moves or any(computed[index] for index in inputs)
            computed[value.index] = own[value.index] and changes
    seen: set[int] = set()
    for step in tape.steps:
        for index in step.inputs if step.name in PRODUCTS else ():
            value = tape.values[index]
            if computed[index] and value.floating and len(value.shape) > 1 and index not in seen:
                seen.add(index)
                yield value


def quantised(
    tape: Tape, reference: Any, given: Any = None
) -> tuple[list[TensorAnswer], dict[str, torch.Tensor]]:
    """Return what the effective weights are, and what the reference computes with in their place.

    A row that is off by more than half a step stays the reference's: it is a fault.

    Args:
        tape: A call of the candidate in float64.
        reference: Whose weights they may be.
        given: The reference before it was rounded. Default None: it was not.
    """
    theirs = _matrices(held_tensors(reference))
    exact = theirs if given is None else {**theirs, **_matrices(held_tensors(given))}
    answers: list[TensorAnswer] = []
    values: dict[str, torch.Tensor] = {}
    for value in effective_weights(tape):
        path = plain_name(value.step.frame.path)
        for name in _likely(path, value.tensor, exact, values):
            answer, carried = _on_grid_of(path, value.tensor, name, exact[name])
            if answer is not None:
                answers.append(answer)
                values[name] = carried.to(theirs[name].device)
                break
    return answers, values


def _matrices(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in tensors.items() if is_plain(t) and t.ndim > 1}


def _likely(
    path: str, value: torch.Tensor, exact: Tensors, taken: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the names of tensors with as many elements, those of the same module first."""
    names = [name for name, tensor in exact.items() if name not in taken]
    names = [name for name in names if sorted(exact[name].shape) == sorted(value.shape)]
    yield from sorted(names, key=lambda name: name.rpartition(".")[0] != path)


def _on_grid_of(
    path: str, value: torch.Tensor, name: str, exact: torch.Tensor
) -> tuple[TensorAnswer | None, torch.Tensor]:
    for turned in (value, value.mT):
        if turned.shape != exact.shape:
            continue
        own = turned.double()
        wide = exact.to(own.device).double()
        grid = on_grid(own.float(), wide)
        if grid is not None:
            wrong = list(grid.wrong)
            carried = own.clone()
            carried[wrong] = wide[wrong]
            words = f"{path}.weight" if path else "weight"
            error = float((own - wide)[wrong].norm() / wide[wrong].norm()) if wrong else 0.0
            return TensorAnswer(
                words, Kind.QUANTISED, name, grid.wrong, error=error, grid=grid
            ), carried
    return None, value
