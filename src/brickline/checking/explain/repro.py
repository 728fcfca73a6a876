"""A script that shows one region alone, as it is and repaired: `write_region_repro`."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from brickline.checking.execution.tape import REFUSALS
from brickline.checking.explain.cause import Cause
from brickline.checking.explain.program import Program
from brickline.checking.explain.region import OutOfTimeError, Region
from brickline.checking.explain.script import script
from brickline.checking.repro import MOST_BYTES, Repro, free_path, run_script, write_private
from brickline.checking.repro_recipes import Refused, words_of

REFERENCE = "What the reference computes from the same values."
REPAIRED = "The same, repaired."


@dataclass(frozen=True)
class ShownRegion:
    """A region with all that a script needs to show it."""

    program: Program
    repaired: Program
    right: torch.Tensor
    tolerance: float
    words: str
    label: str


def shown_region(region: Region, cause: Cause | None) -> ShownRegion | None:
    """Return a region with its repair, or with the reference's operations where none is known."""
    programs: list[tuple[Program, str]] = []
    if cause is not None:
        programs.append((cause.program, REPAIRED))
    programs.append((region.as_reference(), REFERENCE))
    for repaired, label in programs:
        try:
            right = region.agrees(repaired)
        except (*REFUSALS, OutOfTimeError):
            right = False
        if right:
            words = "No cause is known." if cause is None else f"Cause: {cause.words}."
            # Between the two errors, so that another machine's rounding decides nothing.
            limit = max(
                region.tolerance, (region.gap * max(region.gap_of(repaired), 1e-300)) ** 0.5
            )
            limit = min(limit, region.gap / 2)
            return ShownRegion(region.program, repaired, region.right_tensor, limit, words, label)
    return None


def write_region_repro(
    shown: ShownRegion, name: str, directory: str | os.PathLike[str], *, timeout: float = 60.0
) -> Repro:
    """Write a script that shows a region alone, and run it in a fresh process before naming it.

    Args:
        shown: The region and its repair.
        name: Of the module it is in.
        directory: Where the script goes, with its tensors beside it. Files are readable by their
            owner only.
        timeout: Seconds that the fresh process may take.

    Returns:
        The script's path, or the reason why there is none.
    """
    try:
        return Repro(_write(shown, name, Path(directory), timeout))
    except Refused as refused:
        return Repro(None, str(refused))
    except OSError as error:
        return Repro(None, f"the repro cannot be written to {directory}: {error.strerror}")


def _write(shown: ShownRegion, name: str, directory: Path, timeout: float) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = free_path(directory, name or "model")
    beside = path.with_suffix(".pt")
    title = (
        f"Repro of {name or 'the model'}: what it computes from values that are right, in float64."
    )
    text, constants = script(
        title,
        shown.words,
        shown.label,
        shown.tolerance,
        (shown.program, shown.repaired),
        beside.name,
    )
    written: list[Path] = []
    try:
        for target, content in ((beside, _data(shown, constants)), (path, text.encode())):
            written.append(target)
            write_private(target, content)
        status, said = run_script(path, timeout)
        if status != 0:
            last = said[-1] if said else f"exit status {status}"
            raise Refused(f"it does not show the difference in a fresh process: {last}")
    except BaseException:
        for target in written:
            target.unlink(missing_ok=True)
        raise
    return path


def _data(shown: ShownRegion, constants: list[torch.Tensor]) -> bytes:
    values = shown.program.inputs
    others = {
        index: tensor
        for index, tensor in shown.repaired.inputs.items()
        if values.get(index) is not tensor
    }
    buffer = io.BytesIO()
    try:
        torch.save(
            {
                "values": {index: _plain(tensor) for index, tensor in values.items()},
                "repaired": {index: _plain(tensor) for index, tensor in others.items()},
                "constants": [_plain(tensor) for tensor in constants],
                "right": _plain(shown.right),
            },
            buffer,
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise Refused(f"it cannot be saved: {words_of(error)}") from None
    content = buffer.getvalue()
    if len(content) > MOST_BYTES:
        raise Refused(f"its data would take {len(content) / 2**30:.1f} GiB")
    return content


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()
