"""Which of the candidate's modules hold what the reference holds too, number for number.

Where several modules had a hand in what is wrong, a layer with the reference's weights that only
multiplies with them is not the one; one whose weights are found nowhere, while those of the same
layers elsewhere are, is. Knows nothing of values and verdicts.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from brickline.checking.op_kinds import CONTRACTIONS
from brickline.checking.pairing import WeightEvidence, is_boundary
from brickline.checking.recording import Recording
from brickline.checking.weight_uses import SUMS

RUN = 8
"""So many numbers in a row are no coincidence."""
MOST_BIASES = 256
"""Of more weights of one size it is not asked which two of them another is the sum of."""
FAR = 1 << 32
"""More rows than a weight has."""
SOME = 0.25
"""A weight of which so many rows are held, but not all, was changed, not made of others."""
MOST_PLACES = 32
"""Where a stretch may begin is tried so often."""
MOST_NUMBERS = 1 << 23
"""Of larger models nothing is said."""
PLAIN = frozenset(each for each in (*CONTRACTIONS, *SUMS) if "convolution" not in each)
"""Operations that a layer with the right weights can only do right."""
Arrangement = tuple[tuple[int, int, int, int], ...]


class Place(NamedTuple):
    """Where a row of the candidate's is among the reference's weights."""

    way: int
    """How these are read."""
    tensor: int
    row: int
    """Rows of the tensor before it."""
    column: int
    """Numbers of its row before it."""


def modules_by_weights(
    plain: Collection[str],
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    scaled: Collection[str] = (),
    misfolded: Collection[str] = (),
) -> WeightEvidence:
    """Return what the weights say of the candidate's modules.

    Args:
        plain: Its modules that do nothing but multiply with weights and add biases.
        ours: Its weights by name.
        theirs: The reference's.
        scaled: Those of the candidate's that are the reference's but for a factor per row.
        misfolded: Those whose biases lack that factor.
    """
    if sum(each.numel() for each in (*ours.values(), *theirs.values())) > MOST_NUMBERS:
        return WeightEvidence()
    known = _Known(theirs.values())
    held: defaultdict[str, list[bool]] = defaultdict(list)
    intact: defaultdict[str, list[bool]] = defaultdict(list)
    owners: defaultdict[Place, set[str]] = defaultdict(set)
    seen: dict[str, list[Place]] = {}
    for name, tensor in ours.items():
        path = name.rpartition(".")[0]
        places = known.places(tensor)
        seen[name] = places
        held[path].append(bool(places))
        if tensor.ndim > 1:
            intact[path].append(bool(places) or not known.holds_some(tensor))
        for place in places:
            owners[place].add(path)
    # What the reference holds once and the candidate twice is in the wrong place once.
    twice = {path for each in owners.values() if len(each) > 1 for path in each}
    strange = _out_of_line(twice, seen) or twice
    strange |= _read_otherwise(seen, ours)
    summed = _sums_of_two(ours, theirs, seen)
    for name in summed:
        held[name.rpartition(".")[0]].remove(False)
    # Two biases are added on purpose; where others are, one of them alone is not.
    strange |= {name.rpartition(".")[0] for name in _of_their_like(ours, summed) - summed}
    factors = _Factors(ours, theirs)
    for name, folded_alike in factors.told({each for each, places in seen.items() if places}):
        path = name.rpartition(".")[0]
        if folded_alike:
            held[path].remove(False)
            intact[path] = [True]
        else:
            strange.add(path)
    strange |= {name.rpartition(".")[0] for name in misfolded}
    found = {path for path, each in held.items() if all(each)} - strange
    families: defaultdict[str, set[str]] = defaultdict(set)
    for path in held:
        families[_family(path)].add(path)
    changed: set[str] = set()
    for members in families.values():
        others = members - found
        if len(others) == 1 and len(members) > 1:
            strange |= others
        if others == members and len(members) > 1:
            # What is done to the weights of every layer is no slip.
            changed |= members
    folded = {name.rpartition(".")[0] for name in scaled}
    # Weights of a norm may be a part of others on the other side.
    unfound = {path for path, each in intact.items() if not all(each)}
    return WeightEvidence(found & set(plain), strange, found, unfound - folded - changed)


def _family(path: str) -> str:
    """Return what a module and those in its place in other layers have in common."""
    above, dot, own = path.rpartition(".")
    return re.sub(r"\d+", "*", above) + dot + ("*" if own.isdigit() else own)


def _out_of_line(twice: set[str], seen: Mapping[str, list[Place]]) -> set[str]:
    """Return those that the reference holds elsewhere, by where it holds those of their like."""
    lines: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, places in seen.items():
        path, _, own = name.rpartition(".")
        if places:
            # Tensors are far apart, rows of one are near each other.
            line = re.sub(r"\d+(?=\D*$)", "*", path), own
            lines[line][path] = places[0].tensor * FAR + places[0].row
    found: set[str] = set()
    for members in lines.values():
        if len(members) < 3 or twice.isdisjoint(members):
            continue
        paths = sorted(members, key=lambda path: [int(each) for each in re.findall(r"\d+", path)])
        steps = Counter(members[b] - members[a] for a, b in itertools.pairwise(paths))
        step = steps.most_common(1)[0][0]
        starts = {path: members[path] - step * number for number, path in enumerate(paths)}
        (usual, count), *_ = Counter(starts.values()).most_common(1)
        if 2 * count > len(members):
            found |= {path for path, start in starts.items() if start != usual and path in twice}
    return found


def _sums_of_two(
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    seen: Mapping[str, list[Place]],
) -> set[str]:
    """Return the weights of one dimension that are the sum of two of the reference's."""
    rows: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for each in theirs.values():
        if each.ndim == 1 and len(each) >= RUN:
            rows[len(each)].append(each.detach().double().cpu())
    found: set[str] = set()
    for name, each in ours.items():
        known = rows.get(len(each), []) if each.ndim == 1 and not seen[name] else []
        if not 1 < len(known) <= MOST_BIASES:
            continue
        wide, others = each.detach().double().cpu(), torch.stack(known)
        apart = torch.cdist((wide - others)[None], others[None])[0]
        near = 4 * float(torch.finfo(each.dtype).eps) * others.norm(dim=1).max()
        if bool((apart <= near).any()) and bool(wide.norm() > near):
            found.add(name)
    return found


def _of_their_like(ours: Mapping[str, torch.Tensor], names: Collection[str]) -> set[str]:
    """Return the weights in the places of some, in this or other layers."""
    places = {(_family(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}
    return {
        name
        for name in ours
        if (_family(name.rpartition(".")[0]), name.rpartition(".")[2]) in places
    }


class _Factors:
    """By which factors the rows of one side's weights are multiples of the other's."""

    def __init__(
        self, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
    ) -> None:
        self._ours = {name: each for name, each in ours.items() if each.ndim == 2}
        self._rows: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for each in theirs.values():
            if each.ndim == 2:
                wide = each.detach().double().cpu()
                self._rows[each.shape[1]].append(wide)
                self._rows[each.shape[0]].append(wide.t())

    def told(self, found: Collection[str]) -> Iterator[tuple[str, bool]]:
        """Yield the weights that are not found, or are unlike their like.

        With each whether its factors are those of most of its like.
        """
        families: defaultdict[tuple[str, str, torch.Size], list[str]] = defaultdict(list)
        for name, each in self._ours.items():
            path, _, own = name.rpartition(".")
            families[_family(path), own, each.shape].append(name)
        for names in families.values():
            if len(names) < 2 or all(name in found for name in names):
                continue
            factors = {name: self._of(name, name in found) for name in names}
            known = [each for each in factors.values() if each is not None]
            if 2 * len(known) <= len(names):
                continue
            usual = torch.stack(known).median(0).values
            alike = {
                name: each is not None and bool(((each - usual).abs() <= 0.01 * usual.abs()).all())
                for name, each in factors.items()
            }
            if 2 * sum(alike.values()) > len(names):
                yield from (
                    (name, alike[name]) for name in names if not alike[name] or name not in found
                )

    def _of(self, name: str, found: bool) -> torch.Tensor | None:
        """Return the factors of some rows; None where one is no multiple of any."""
        wide = self._ours[name].detach().double().cpu()
        rows = wide[:: max(len(wide) // MOST_PLACES, 1)][:MOST_PLACES]
        if found:
            return torch.ones(len(rows), dtype=torch.float64)
        choices = self._rows.get(wide.shape[1])
        if not choices:
            return None
        others = torch.cat(choices)
        sizes = others.norm(dim=1).clamp_min(1e-300)
        along = (rows @ others.t()) / sizes
        best = along.abs().argmax(1)
        own = along.gather(1, best[:, None])[:, 0]
        near = max(4 * float(torch.finfo(self._ours[name].dtype).eps), 1e-6)
        if bool((own.abs() < (1 - near) * rows.norm(dim=1)).any()):
            return None
        return own / sizes[best]


def _read_otherwise(seen: Mapping[str, list[Place]], ours: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the modules whose weights lie otherwise in the reference's than those of their like.

    The columns of one for the rows of the others, or the same rows in another order.
    """
    families: defaultdict[tuple[str, str, torch.Size], dict[str, list[Place]]] = defaultdict(dict)
    for name, places in seen.items():
        if places and ours[name].ndim > 1:
            path, _, own = name.rpartition(".")
            families[_family(path), own, ours[name].shape][name] = places
    found: set[str] = set()
    for members in families.values():
        lying = {name: _arrangement(places) for name, places in members.items()}
        counts = Counter(lying.values())
        if 2 * max(counts.values()) <= len(members):
            # They may be parts of one.
            lying = {name: _arrangement(places, apart=True) for name, places in members.items()}
            counts = Counter(lying.values())
        usual = max(counts, key=lambda each: (counts[each], _is_plain(each)))
        found |= {name.rpartition(".")[0] for name, each in lying.items() if each != usual}
    return found


def _arrangement(places: list[Place], *, apart: bool = False) -> Arrangement:
    """Return how the rows of a weight lie in others, wherever these are.

    Args:
        places: Where the rows are.
        apart: Whether it does not count where in the others they begin.
    """
    first = min(each.tensor for each in places)
    begins: defaultdict[int, int] = defaultdict(int)
    if apart:
        for each in places:
            begins[each.tensor] = min(each.row, begins.get(each.tensor, each.row))
    return tuple(
        (each.way, each.tensor - first, each.row - begins[each.tensor], each.column)
        for each in places
    )


def _is_plain(arrangement: Arrangement) -> bool:
    """Whether rows are rows, in order."""
    return arrangement == tuple(sorted(arrangement)) and arrangement[0][0] == 0


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

    def holds_some(self, tensor: torch.Tensor) -> bool:
        """Whether some rows of a weight are here, though not all of them."""
        wide = tensor.detach().double().cpu().flatten(1)
        rows = wide[:: max(len(wide) // MOST_PLACES, 1)]
        return any(line.part_of(rows) >= SOME for line in self._lines[:2])

    def places(self, tensor: torch.Tensor) -> list[Place]:
        """Return where the rows of a weight are, or else its columns, all of them read one way."""
        wide = tensor.detach().double().cpu()
        readings = [wide.flatten(1) if wide.ndim > 1 else wide]
        if wide.ndim > 2:
            readings += [wide, wide.mT]
        for reading in readings:
            for way, line in enumerate(self._lines):
                found = line.covering(reading)
                if found:
                    return [Place(way, *line.place(start)) for start in found]
        if wide.ndim == 2:
            # Columns belong to what is multiplied: their order counts.
            for way, line in enumerate(self._lines[:2]):
                found = line.covering(wide.mT)
                if found and all(b - a == len(wide) + 1 for a, b in itertools.pairwise(found)):
                    return [Place(way, *line.place(start)) for start in found]
        return []


class _Line:
    """Rows one after the other; zeros are left out."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        gap = np.array([np.nan])
        rows = [each.reshape(-1, each.shape[-1]) for each in parts]
        kept = [row[row != 0].numpy() for each in rows for row in each]
        pieces = [piece for row in kept for piece in (row, gap)]
        self._first_rows = np.cumsum([0, *map(len, rows)])
        self._starts = np.cumsum([0, *(len(row) + 1 for row in kept)])
        self._numbers = np.concatenate(pieces)
        self._order = np.argsort(self._numbers, kind="stable")
        self._ranked = self._numbers[self._order]

    def place(self, start: int) -> tuple[int, int, int]:
        """Return the tensor, the row and the column of a place; zeros are no columns."""
        row = int(np.searchsorted(self._starts, start, "right")) - 1
        tensor = int(np.searchsorted(self._first_rows, row, "right")) - 1
        return tensor, row - int(self._first_rows[tensor]), start - int(self._starts[row])

    def covering(self, reading: torch.Tensor) -> list[int]:
        """Return where the rows begin of which a reading is made; none if one is not found.

        A row may be a part of one here, or several whole ones of the same number side by side;
        numbers of one dimension may be several parts.
        """
        found: list[int] = []
        splits: set[tuple[int, ...]] = set()
        for row in reading.reshape(-1, reading.shape[-1]):
            numbers = row[row != 0].numpy()
            at, lengths = 0, []
            while at < len(numbers):
                start, length = self._longest(numbers[at:])
                whole = length == len(numbers) - at
                if not whole and length < RUN:
                    return []
                if reading.ndim > 1 and (at or not whole) and not self._is_row(start, length):
                    return []
                found.append(start)
                lengths.append(length)
                at += length
            splits.add(tuple(lengths))
            if len({self.place(each)[1] for each in found[len(found) - len(lengths) :]}) > 1:
                return []
            if len(splits) > 1 and any(len(each) > 1 for each in splits) and reading.ndim > 1:
                return []
        return found

    def part_of(self, rows: torch.Tensor) -> float:
        """Return which part of some rows is here."""
        return sum(bool(self.covering(row[None])) for row in rows) / max(len(rows), 1)

    def _is_row(self, start: int, length: int) -> bool:
        """Whether a stretch is all of a row."""
        end = start + length
        begins = start == 0 or bool(np.isnan(self._numbers[start - 1]))
        return begins and bool(np.isnan(self._numbers[end]))

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
