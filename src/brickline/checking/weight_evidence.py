"""Which of the candidate's modules hold what the reference holds too, number for number.

Where several modules had a hand in what is wrong, a layer with the reference's weights that only
multiplies with them is not the one; one whose weights are found nowhere, while those of the same
layers elsewhere are, is. Knows nothing of values and verdicts.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch

from brickline.checking.op_kinds import CONTRACTIONS
from brickline.checking.pairing import WeightEvidence, is_boundary
from brickline.checking.recording import Recording
from brickline.checking.weight_uses import SUMS

RUN = 8
"""So many numbers in a row are no coincidence."""
MOST_PLACES = 32
"""Where a stretch may begin is tried so often."""
MOST_NUMBERS = 1 << 23
"""Of larger models nothing is said."""
PLAIN = frozenset(each for each in (*CONTRACTIONS, *SUMS) if "convolution" not in each)
"""Operations that a layer with the right weights can only do right."""


def modules_by_weights(
    plain: Collection[str],
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    scaled: Collection[str] = (),
) -> WeightEvidence:
    """Return what the weights say of the candidate's modules.

    Args:
        plain: Its modules that do nothing but multiply with weights and add biases.
        ours: Its weights by name.
        theirs: The reference's.
        scaled: Those of the candidate's that are the reference's but for a factor per row.
    """
    if sum(each.numel() for each in (*ours.values(), *theirs.values())) > MOST_NUMBERS:
        return WeightEvidence()
    known = _Known(theirs.values())
    held: defaultdict[str, list[bool]] = defaultdict(list)
    owners: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for name, tensor in ours.items():
        path = name.rpartition(".")[0]
        places = known.places(tensor)
        held[path].append(bool(places))
        for place in places:
            owners[place].add(path)
    # What the reference holds once and the candidate twice is in the wrong place once.
    twice = {path for each in owners.values() if len(each) > 1 for path in each}
    found = {path for path, each in held.items() if all(each)} - twice
    families: defaultdict[str, set[str]] = defaultdict(set)
    for path in held:
        families[re.sub(r"\d+", "*", path)].add(path)
    strange = set(twice)
    for members in families.values():
        others = members - found
        if len(others) == 1 and len(members) > 1:
            strange |= others
    folded = {name.rpartition(".")[0] for name in scaled}
    # Weights of a norm may be a part of others on the other side.
    matrices = {name.rpartition(".")[0] for name, each in ours.items() if each.ndim > 1}
    return WeightEvidence(found & set(plain), strange, matrices - found - folded)


def plain_modules(recording: Recording) -> set[str]:
    """Return the modules that do nothing but multiply with weights and add biases."""
    done: defaultdict[str, set[str]] = defaultdict(set)
    for value in recording.values:
        if not value.view and not is_boundary(value.key):
            done[value.key.path].add(value.key.op)
    callers = {path for path, _ in recording.callers.values()}
    return {path for path, ops in done.items() if ops <= PLAIN and path not in callers}


class _Known:
    """The rows of one side's weights, read in every way in which they may be multiplied."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        wide = [each.detach().double().cpu() for each in tensors]
        matrices = [each for each in wide if each.ndim > 1]
        kernels = [each.flatten(2) for each in wide if each.ndim > 2]
        self._lines = [
            _Line(each)
            for each in (
                [
                    *(each.flatten(1) for each in matrices),
                    *(each for each in wide if each.ndim < 2),
                ],
                [each.mT for each in matrices],
                [each.permute(2, 0, 1) for each in kernels],
                [each.permute(2, 1, 0) for each in kernels],
            )
            if each
        ]

    def places(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """Return where the rows of a weight are, or else its columns, all of them read one way."""
        wide = tensor.detach().double().cpu()
        readings = [wide.flatten(1) if wide.ndim > 1 else wide]
        if wide.ndim > 2:
            readings += [wide, wide.mT]
        for reading in readings:
            for way, line in enumerate(self._lines):
                found = line.covering(reading)
                if found:
                    return [(way, start) for start in found]
        if wide.ndim == 2:
            # Columns belong to what is multiplied: their order counts.
            for way, line in enumerate(self._lines[:2]):
                found = line.covering(wide.mT)
                if found and all(b - a == len(wide) + 1 for a, b in itertools.pairwise(found)):
                    return [(way, start) for start in found]
        return []


class _Line:
    """Rows one after the other; zeros are left out."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        gap = np.array([np.nan])
        rows = [row for each in parts for row in each.reshape(-1, each.shape[-1])]
        self._numbers = np.concatenate(
            [each for row in rows for each in (row[row != 0].numpy(), gap)]
        )
        self._order = np.argsort(self._numbers, kind="stable")
        self._ranked = self._numbers[self._order]

    def covering(self, reading: torch.Tensor) -> list[int]:
        """Return where the rows begin of which a reading is made; none if one is not found.

        A row may be a part of one here; numbers of one dimension may be several.
        """
        found: list[int] = []
        for row in reading.reshape(-1, reading.shape[-1]):
            numbers = row[row != 0].numpy()
            at = 0
            while at < len(numbers):
                start, length = self._longest(numbers[at:])
                whole = length == len(numbers) - at
                if not whole and (reading.ndim > 1 or length < RUN):
                    return []
                found.append(start)
                at += length
        return found

    def _longest(self, numbers: np.ndarray) -> tuple[int, int]:
        """Return where the longest stretch is that begins with these numbers, and its length."""
        low, high = (np.searchsorted(self._ranked, numbers[0], side) for side in ("left", "right"))
        starts = self._order[low:high]
        for ahead in range(1, min(RUN, len(numbers))):
            starts = starts[starts + ahead < len(self._numbers)]
            starts = starts[self._numbers[starts + ahead] == numbers[ahead]]
        best = (0, 0)
        for start in starts[:MOST_PLACES]:
            line = self._numbers[start : start + len(numbers)]
            differ = np.flatnonzero(line != numbers[: len(line)])
            length = int(differ[0]) if len(differ) else len(line)
            if length > best[1]:
                best = (int(start), length)
        return best
