"""Plans as files: declarations, sources and launches as JSON; no memory and no code of Python.

A file is read by making the plan again, launch by launch, so everything that a plan checks holds of
one that was read. Edges are not stored: they follow from the launches. A digest over the contents
tells a damaged file from a whole one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from brickline.errors import BricklineError, PlanError
from brickline.kernel import Kernel
from brickline.plan import Plan
from brickline.plan_arguments import checked_flag
from brickline.plan_buffers import Extent, PlanBuffer
from brickline.plan_launches import Argument, FloatVariable
from brickline.symbolic import Expr, Variable
from brickline.whole_files import OVERWRITE, whole_file

FORMAT = "brickline plan"
VERSION = 1
MAX_BYTES = 256 << 20
"""Larger files are refused before they are read."""


def save_plan(plan: Plan, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a plan; see `Plan.save`.

    Raises:
        UsageError: The path is a directory or a device.
        PlanError: The path is taken and overwriting was not asked for, the disk refuses, or arrays
            of the plan overlap.
    """
    _check_path(path)
    _check_apart(plan)
    if not checked_flag(overwrite, f"plan {plan.name}", "overwrite") and os.path.lexists(path):
        raise PlanError(f"{path!s:.400} is there already; choose another name, or overwrite=True")
    text = json.dumps(_document(plan), indent=1, ensure_ascii=True, allow_nan=True)
    try:
        with whole_file(Path(path), force=overwrite, how=OVERWRITE) as file:
            file.write(text.encode("ascii"))
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise PlanError(f"cannot write {path!s:.400}: {_why(error)}") from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan; see `Plan.load`."""
    _check_path(path)
    where = f"{path!s:.400}"
    try:
        size = os.stat(path).st_size
        if os.path.exists(path) and not os.path.isfile(path):
            raise PlanError(f"{where}: expected a file, got a directory, a device or a pipe")
        if size > MAX_BYTES:
            raise PlanError(f"{where}: expected a plan of at most {MAX_BYTES} bytes, got {size}")
        data = Path(path).read_bytes()
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise PlanError(f"cannot read {where}: {_why(error)}") from error
    try:
        document = json.loads(data)
        return _plan(document, where)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{where} is no plan, or is cut off: {error!s:.200}; write it again with Plan.save"
        ) from None


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as the JSON values of a file.

    Raises:
        PlanError: Arrays of the plan overlap.
    """
    _check_apart(plan)
    return _document(plan)


def plan_from_document(document: Any, where: str, *, launches: int | None = None) -> Plan:
    """Return the plan of a file's JSON values, or what its first launches make.

    Raises:
        PlanError: They are damaged, contradict themselves, of a newer version or something else.
    """
    return _plan(document, where, launches)


def _check_path(path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise PlanError(f"expected a file's path as text or a Path, got {path!r:.80}")


def _why(error: Exception) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)


def _check_apart(plan: Plan) -> None:
    """Refuse arrays that overlap: a file has no addresses, so that edges would be lost."""
    pieces = sorted(
        (str(each.space), each.base, each.base + each.nbytes, each.name)
        for each in plan.storages
        if each.memory is not None and each.nbytes
    )
    for (space, _, end, name), (other_space, begin, _, other) in pairwise(pieces):
        if space == other_space and begin < end:
            raise PlanError(
                f"plan {plan.name}: {name} and {other} are arrays that overlap, which a file "
                "cannot say; plan with views of one buffer"
            )


def _document(plan: Plan) -> dict[str, Any]:
    kernels: dict[str, Kernel] = {}
    for launch in plan.launches:
        kernels.setdefault(launch.kernel.digest, launch.kernel)
    places = {digest: at for at, digest in enumerate(kernels)}
    contents = {
        "name": plan.name,
        "variables": [_variable(each, plan.defaults) for each in plan.variables.values()],
        "buffers": [
            {
                "name": storage.name,
                "shape": [_extent(size) for size in storage.shape],
                "dtype": storage.dtype,
                "read_only": storage.read_only,
            }
            for storage in plan.storages
        ],
        "protected": [[each.storage.number, each.offset, each.span] for each in plan.protected],
        "kernels": [kernel.to_json() for kernel in kernels.values()],
        "launches": [
            {
                "kernel": places[launch.kernel.digest],
                "brick": launch.brick,
                "layer": launch.layer,
                "arguments": [_argument(each) for each in launch.arguments],
            }
            for launch in plan.launches
        ],
    }
    return {"format": FORMAT, "version": VERSION, "digest": _digest(contents), "plan": contents}


def _digest(contents: Any) -> str:
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _extent(size: Extent) -> int | str:
    return str(size) if isinstance(size, Expr) else size


def _variable(each: Variable | FloatVariable, defaults: Mapping[str, float]) -> dict[str, Any]:
    if isinstance(each, FloatVariable):
        return {"name": each.name, "default": each.default}
    bounds = {"low": each.low, "high": each.high}
    return {"name": each.name, **bounds, "default": defaults[each.name]}


def _argument(given: Argument) -> Any:
    if isinstance(given, PlanBuffer):
        return {
            "buffer": given.storage.number,
            "offset": given.offset,
            "shape": [_extent(size) for size in given.shape],
            "dtype": given.dtype,
            "strides": None if given.strides is None else list(given.strides),
        }
    if isinstance(given, FloatVariable):
        return {"variable": given.name}
    return {"expression": str(given)} if isinstance(given, Expr) else given


# ------------------------------------------------------------------------------------------ reading


def _plan(document: Any, where: str, launches: int | None = None) -> Plan:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError(f"{where} holds something else than a plan that Plan.save wrote")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise PlanError(f"{where}: expected a version from 1 on, got {version!r:.80}")
    if version > VERSION:
        raise PlanError(
            f"{where} is a plan of version {version}; this brickline reads up to {VERSION}: "
            "upgrade brickline, or save the plan again with this one"
        )
    contents = document.get("plan")
    if _digest(contents) != document.get("digest"):
        raise PlanError(
            f"{where} is damaged: its contents do not have the digest that it states; build the "
            "plan and write it again, a file is not edited by hand"
        )
    try:
        return _made(contents, launches)
    except BricklineError as error:
        raise PlanError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise PlanError(
            f"{where} describes no plan: {type(error).__name__}: {error!s:.200}"
        ) from None


def _made(contents: Any, launches: int | None = None) -> Plan:
    plan = Plan(contents["name"])
    for each in contents["variables"]:
        if "low" in each:
            plan.variable(each["name"], each["low"], each["high"], default=each["default"])
        else:
            plan.variable(each["name"], dtype="f64", default=each["default"])
    integers = [each for each in plan.variables.values() if isinstance(each, Variable)]

    def extent(size: Any) -> Extent:
        return Expr.parse(size, integers) if isinstance(size, str) else size

    buffers = [
        plan.buffer(
            each["name"],
            [extent(size) for size in each["shape"]],
            each["dtype"],
            read_only=bool(each["read_only"]),
        )
        for each in contents["buffers"]
    ]
    for number, offset, count in contents["protected"]:
        whole = buffers[_place(number, len(buffers), "the buffer of what is protected")]
        plan.protect(whole.view(count, offset, dtype="u8"))
    kernels = [Kernel.from_json(each) for each in contents["kernels"]]
    for number, each in enumerate(contents["launches"][:launches]):
        kernel = kernels[_place(each["kernel"], len(kernels), f"the kernel of launch {number}")]
        names = [declared.name for declared in kernel.signature]
        given = each["arguments"]
        if len(given) != len(names):
            raise PlanError(
                f"launch {number}: {kernel.name} takes {len(names)} arguments, got {len(given)}"
            )
        arguments = {
            name: _read_argument(plan, buffers, value, extent, f"launch {number}, {name}")
            for name, value in zip(names, given, strict=True)
        }
        plan.launch(kernel, brick=each["brick"], layer=each["layer"], **arguments)
    return plan


def _read_argument(
    plan: Plan, buffers: list[PlanBuffer], value: Any, extent: Any, where: str
) -> Any:
    if not isinstance(value, dict):
        return value
    if "variable" in value:
        return plan.variables[value["variable"]]
    if "expression" in value:
        return extent(value["expression"])
    whole = buffers[_place(value["buffer"], len(buffers), f"the buffer of {where}")]
    offset = _place(value["offset"], max(whole.storage.nbytes, 1), f"the offset of {where}")
    shape = [extent(size) for size in value["shape"]]
    # A view counts elements; whatever dtype has its offset as a multiple serves to move there.
    at = whole.view(whole.storage.nbytes - offset, offset, dtype="u8")
    return at.view(shape, dtype=value["dtype"], strides=value["strides"])


def _place(number: Any, count: int, what: str) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        raise PlanError(f"expected {what} below {count}, got {number!r:.80}")
    return number
