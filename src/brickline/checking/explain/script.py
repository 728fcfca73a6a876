"""The text of a repro of a region: its operations as they are, and repaired.

Knows programs and text. Whether the script does what it says is `repro`'s matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from brickline.checking.execution.tape import READ, Ref, Step
from brickline.checking.explain.program import Program

_SCRIPT = '''\
"""{title}

{cause}

It contains weights and inputs of the model it was taken from: share it only where these may go.
It needs torch, and nothing else; the tensors lie in {data} beside it.

Exit status: 0 if the region differs from the reference and the repaired one agrees with it, else 1.
"""

import pathlib
import sys

import torch

TOLERANCE = {tolerance!r}  # how far an element may be off; larger than what rounding explains


def region(v, c):
    """What the candidate computes."""
{region}


def repaired(v, c):
    """{label}"""
{repaired}


def tensors(value):
    """Return every tensor of a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for part in value or () for item in tensors(part)]


def read(parts, places):
    """Put together what lies in partly overwritten memory."""
    *written, own = places
    size = max(first + sum((n - 1) * k for n, k in zip(*rest)) + 1 for first, *rest in places)
    memory = torch.zeros(size, dtype=parts[0].dtype)
    for part, (first, shape, strides) in zip(parts, written):
        memory.as_strided(shape, strides, first).copy_(part.reshape(shape))
    return memory.as_strided(own[1], own[2], own[0]).contiguous()


def gap(tensor, right):
    """Return the largest distance of two tensors; fillers of masks are equal to one another."""
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (tensor, right))
    one, other = (torch.nan_to_num(t.double().flatten(), 9e5, 1e6, -1e6) for t in (one, other))
    return float((one.clamp(-1e6, 1e6) - other.clamp(-1e6, 1e6)).abs().max())


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    data = torch.load(pathlib.Path(__file__).with_name({data!r}), weights_only=True)
    values, constants, right = data["values"], data["constants"], data["right"]
    with torch.no_grad():
        wrong = gap(region(dict(values), constants), right)
        mended = gap(repaired({{**values, **data["repaired"]}}, constants), right)
    print(f"off by {{wrong:.4g}}, repaired by {{mended:.4g}} (limit {{TOLERANCE:.4g}})")
    return 0 if wrong > TOLERANCE >= mended else 1


if __name__ == "__main__":
    sys.exit(main())
'''


def script(
    title: str, cause: str, label: str, tolerance: float, programs: Sequence[Program], data: str
) -> tuple[str, list[torch.Tensor]]:
    """Return the script, and the tensors among the arguments of its operations.

    Args:
        title: Its first line.
        cause: What is known of the cause.
        label: What the repaired region is.
        tolerance: How far an element may be off.
        programs: The region, and the repaired one.
        data: Name of the file with the tensors.
    """
    constants: list[torch.Tensor] = []
    bodies = [
        "\n".join(f"    {line}" for line in _lines(program, constants)) for program in programs
    ]
    text = _SCRIPT.format(
        title=_comment(title),
        cause=_comment(cause),
        label=_comment(label),
        tolerance=tolerance,
        region=bodies[0],
        repaired=bodies[1],
        data=data,
    )
    return text, constants


def _lines(program: Program, constants: list[torch.Tensor]) -> list[str]:
    lines = []
    for step in program.steps:
        note = "" if step.source is None else f"  # line {step.source[1]}"
        lines.append(_assignment(step, constants) + note)
    return [*lines, f"return v[{program.output}]"]


def _assignment(step: Step, constants: list[torch.Tensor]) -> str:
    targets = ", ".join(f"v[{index}]" for index in step.outputs)
    if step.name == READ:
        parts = ", ".join(f"v[{index}]" for index in step.inputs)
        return f"{targets} = read([{parts}], {step.geometries!r})"
    given = [_text(arg, step, constants) for arg in step.args]
    given += [f"{name}={_text(arg, step, constants)}" for name, arg in step.kwargs.items()]
    name = str(step.func)
    call = f"torch.ops.{name}({', '.join(given)})"
    single = (
        len(step.func._schema.returns) == 1 and str(step.func._schema.returns[0].type) == "Tensor"
    )
    if single:
        return f"{targets} = {call}"
    return f"for i, t in zip({step.outputs!r}, tensors({call})): v[i] = t"


def _text(leaf: Any, step: Step, constants: list[torch.Tensor]) -> str:
    if isinstance(leaf, Ref):
        return f"v[{leaf.index}].clone()" if leaf.index in step.writes else f"v[{leaf.index}]"
    if isinstance(leaf, torch.Tensor):
        constants.append(leaf)
        return f"c[{len(constants) - 1}]"
    if isinstance(leaf, list | tuple):
        inner = ", ".join(_text(item, step, constants) for item in leaf)
        return f"[{inner}]"
    if isinstance(leaf, torch.dtype):
        return "torch.float64" if leaf.is_floating_point else repr(leaf)
    if isinstance(leaf, torch.device):
        return '"cpu"'
    if isinstance(leaf, float) and not math.isfinite(leaf):
        return f'float("{leaf}")'
    return repr(leaf)


def _comment(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")
