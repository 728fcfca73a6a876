"""Which weights of the candidate are which weights of the reference, by their contents.

Names tell little between two people's code; contents tell nearly everything. A weight may also be
several of the other side's below each other: then its rows are matched one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from brickline.checking.stage import family_of

SAME = 1e-9
"""Relative difference of two sums over the same numbers in another order."""
ENOUGH = 0.5
"""Part of a weight's rows that must be found again for it to be made of others."""
MOST = 0.75
"""Part of a weight's rows that must be another's for it to be meant as its copy."""
CHUNK = 1 << 22
"""Numbers that are widened at a time."""


@dataclass(frozen=True)
class Rows:
    """Rows of a candidate's weight that are rows of a reference's weight."""

    reference: str
    ours: np.ndarray
    theirs: np.ndarray


@dataclass
class WeightMap:
    """Partners of the candidate's weights."""

    whole: dict[str, str]
    """The candidate's name to the reference's, where the two hold the same numbers."""
    rows: dict[str, list[Rows]]
    """The candidate's name to rows of several weights, or to some rows of one."""
    inverse: dict[str, list[Rows]]
    """The reference's name to rows of several of the candidate's weights."""
    scaled: dict[str, str] = field(default_factory=dict)
    """The candidate's weights whose rows are multiples of those of one of the reference's."""
    stretched: dict[str, str] = field(default_factory=dict)
    """Those whose columns are."""
    misfolded: set[str] = field(default_factory=set)
    """Those whose rows are, though their biases are not, as those of other layers are."""
    ours: dict[str, str] = field(default_factory=dict)
    """The candidate's weights that are copies of another, to that one."""
    theirs: dict[str, str] = field(default_factory=dict)
    """The reference's weights that are copies of another, to that one."""


def named_tensors(root: object) -> dict[str, torch.Tensor]:
    """Return the floating-point parameters and buffers of a module by name."""
    if not isinstance(root, torch.nn.Module):
        return {}
    return {
        name: tensor.detach()
        for name, tensor in (*root.named_parameters(), *root.named_buffers())
        if tensor.dtype.is_floating_point and tensor.numel() > 1
    }


def match_weights(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> WeightMap:
    """Match two sides' weights by their contents."""
    whole = _match_whole(ours, theirs)
    taken = set(whole.values())
    left = {name: each for name, each in ours.items() if name not in whole}
    right = {name: each for name, each in theirs.items() if name not in taken}
    our_copies, their_copies = _copies(left), _copies(right)
    left = {name: each for name, each in left.items() if name not in our_copies}
    right = {name: each for name, each in right.items() if name not in their_copies}
    if our_copies or their_copies:
        again = _match_whole(left, right)
        whole.update(again)
        taken |= set(again.values())
    rest = (
        {name: each for name, each in left.items() if name not in whole},
        {name: each for name, each in right.items() if name not in taken},
    )
    multiples = dict(_scaled(*rest))
    scaled = _with_their_biases(multiples, ours, theirs)
    stretched = dict(
        _scaled(
            *({name: each.t() for name, each in some.items() if each.ndim == 2} for some in rest)
        )
    )
    left = {name: each for name, each in left.items() if name not in whole and each.ndim == 2}
    right = {name: each for name, each in right.items() if name not in taken and each.ndim == 2}
    rows = _match_rows(left, right)
    inverse = _match_rows(right, left)
    for name, parts in list(rows.items()):
        if len(parts) == 1 and _is_identity(parts[0], left[name], right[parts[0].reference]):
            whole[name] = parts[0].reference
            del rows[name]
            inverse.pop(parts[0].reference, None)
    # A weight that is several others is told from them, not they from it.
    rows = {name: parts for name, parts in rows.items() if _is_joined(left[name], parts, right)}
    told = {each.reference for parts in rows.values() for each in parts}
    inverse = {
        name: parts
        for name, parts in inverse.items()
        if name not in told and _is_joined(right[name], parts, left)
    }
    misfolded = multiples.keys() - scaled.keys()
    return WeightMap(whole, rows, inverse, scaled, stretched, misfolded, our_copies, their_copies)


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the weights that hold most rows of an earlier one in the same places."""
    found: dict[str, str] = {}
    first: defaultdict[tuple[int, ...], list[tuple[str, np.ndarray]]] = defaultdict(list)
    for name, tensor in tensors.items():
        marks = _marks(tensor.reshape(tensor.shape[0], -1) if tensor.ndim > 1 else tensor[:, None])
        for other, known in first[tuple(tensor.shape)]:
            if (np.abs(marks - known) <= SAME * np.maximum(np.abs(marks), 1e-3)).mean() > MOST:
                found[name] = other
                break
        else:
            first[tuple(tensor.shape)].append((name, marks))
    return found


def _scaled(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield the weights of which every row is a multiple of another's in the same place."""
    others: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, tensor in theirs.items():
        if tensor.ndim > 1:
            others[tuple(tensor.shape)].append(name)
    for name, tensor in ours.items():
        for other in others[tuple(tensor.shape)]:
            if _is_multiple(tensor.flatten(1), theirs[other].flatten(1)):
                yield name, other
                break


def _with_their_biases(
    partners: Mapping[str, str],
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
) -> dict[str, str]:
    """Return the scaled weights whose biases are scaled alike, or not in other layers either.

    More than a factor may be put into a bias; if so, then into those of all layers.
    """
    follow: defaultdict[str, dict[str, bool]] = defaultdict(dict)
    for name, other in partners.items():
        biases = (ours.get(_bias(name)), theirs.get(_bias(other)))
        follow[family_of(name)][name] = _follows(ours[name], theirs[other], *biases)
    found: dict[str, str] = {}
    for members in follow.values():
        known = any(members.values())
        found.update(
            (name, partners[name]) for name, follows in members.items() if follows or not known
        )
    return found


def _bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _follows(
    mine: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    other: torch.Tensor | None,
) -> bool:
    """Whether a bias has the factors of its weight's rows."""
    if bias is None or other is None or bias.shape != other.shape:
        return bias is None and other is None
    left, wide = mine.flatten(1).double(), right.to(mine.device).flatten(1).double()
    factors = (left * wide).sum(1) / wide.square().sum(1)
    wanted = factors * other.to(mine.device).double()
    near = 8 * float(torch.finfo(mine.dtype).eps)
    return bool((bias.double() - wanted).norm() <= near * wanted.norm())


def _is_multiple(mine: torch.Tensor, right: torch.Tensor) -> bool:
    left, other = mine.double(), right.to(mine.device).double()
    norms = left.norm(dim=1) * other.norm(dim=1)
    along = (left * other).sum(1)
    near = max(4 * float(torch.finfo(mine.dtype).eps), 1e-6)
    differ = not torch.equal(left, other)
    return bool(differ and (along.abs() >= (1 - near) * norms).all() and (norms > 0).all())


def _is_joined(tensor: torch.Tensor, parts: list[Rows], others: Mapping[str, torch.Tensor]) -> bool:
    return all(len(others[each.reference]) <= len(tensor) for each in parts)


def _is_identity(rows: Rows, mine: torch.Tensor, right: torch.Tensor) -> bool:
    return len(rows.ours) == len(mine) == len(right) and bool((rows.ours == rows.theirs).all())


def _match_whole(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    mine, other = _by_contents(ours), _by_contents(theirs)
    found: dict[str, str] = {}
    for contents, names in mine.items():
        partners = other.get(contents, [])
        # Equal weights, such as norms that are all ones, go in order, if they are as many.
        if len(names) == len(partners):
            found.update(
                (name, partner)
                for name, partner in zip(names, partners, strict=True)
                if _same_order(ours[name], theirs[partner])
            )
    return found


def _same_order(mine: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors with the same numbers have them in the same places."""
    left, other = mine, right.to(mine.device, mine.dtype)
    if other.dtype is not right.dtype and not torch.equal(other.to(right.dtype), right):
        return False
    if mine.shape == right.shape and torch.equal(left, other):
        return True
    if mine.ndim == right.ndim == 2 and torch.equal(left.t(), other):
        return True
    same: bool = mine.numel() == right.numel()
    return same and torch.equal(left.reshape(-1), other.reshape(-1))


def _by_contents(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[float, ...], list[str]]:
    found: defaultdict[tuple[float, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        wide = tensor if tensor.dtype is torch.float64 else tensor.float()
        size = wide.abs()
        parts = (wide, size, wide.square(), wide * size)
        sums = [each.sum(dtype=torch.float64) for each in parts]
        figures = [_rounded(float(each), float(sums[1])) for each in sums]
        found[(float(tensor.numel()), *figures)].append(name)
    return found


def _rounded(value: float, scale: float) -> float:
    """Round so that another order of summation does not matter."""
    if scale == 0 or not np.isfinite(value):
        return value
    step = 10.0 ** np.floor(np.log10(scale)) * 1e-8
    return float(np.round(value / step))


def _match_rows(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> dict[str, list[Rows]]:
    tables: dict[int, tuple[np.ndarray, list[tuple[str, int]]]] = {}
    for name, tensor in theirs.items():
        marks = _marks(tensor)
        known = tables.setdefault(tensor.shape[1], (np.empty(0), []))
        places = [(name, row) for row in range(len(marks))]
        tables[tensor.shape[1]] = (np.concatenate([known[0], marks]), known[1] + places)
    found: dict[str, list[Rows]] = {}
    for name, tensor in ours.items():
        known = tables.get(tensor.shape[1], (np.empty(0), []))
        rows = _rows_found(_marks(tensor), *known)
        if rows:
            sizes = {other: len(each) for other, each in theirs.items()}
            widths = {other: each.shape[1] for other, each in theirs.items()}
            fit = {other for other, width in widths.items() if width == tensor.shape[1]}
            found[name] = _completed(rows, len(tensor), sizes, fit)
    return found


def _completed(
    rows: list[Rows], length: int, sizes: Mapping[str, int], fit: set[str]
) -> list[Rows]:
    """Add the rows that differ between rows that agree: they are meant to be the same."""
    made: list[Rows] = []
    free = np.ones(length, dtype=bool)
    for each in rows:
        offsets, counts = np.unique(each.ours - each.theirs, return_counts=True)
        offset, size = int(offsets[counts.argmax()]), sizes[each.reference]
        whole = counts.max() > 0.5 * size and 0 <= offset <= length - size
        if whole:
            theirs = np.arange(size)
            each = Rows(each.reference, theirs + offset, theirs)
        if len(each.ours) >= 0.5 * size:
            made.append(each)
            free[each.ours] = False
    spare = [name for name in fit if name not in {each.reference for each in made}]
    for start, end in _ranges(free):
        same = [name for name in spare if sizes[name] == end - start]
        if len(same) == 1:
            theirs = np.arange(end - start)
            made.append(Rows(same[0], theirs + start, theirs))
    return made


def _ranges(free: np.ndarray) -> list[tuple[int, int]]:
    """Return the stretches that are set, as first and one past the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], free.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _marks(tensor: torch.Tensor) -> np.ndarray:
    """Return one number for each row that other rows hardly share."""
    width = tensor.shape[1]
    key = torch.cos(torch.arange(width, dtype=torch.float64) * 1.618 + 0.5).to(tensor.device)
    step = max(CHUNK // max(width, 1), 1)
    made = torch.cat([(each.double() * key).sum(1) for each in tensor.split(step)])
    marks: np.ndarray = made.cpu().numpy()
    return marks


def _rows_found(marks: np.ndarray, known: np.ndarray, places: list[tuple[str, int]]) -> list[Rows]:
    if not len(known):
        return []
    order = np.argsort(known, kind="stable")
    ranked = known[order]
    at = np.clip(np.searchsorted(ranked, marks), 1, len(ranked) - 1) if len(ranked) > 1 else None
    if at is None:
        nearest = np.zeros(len(marks), dtype=int)
    else:
        nearest = np.where(np.abs(ranked[at - 1] - marks) <= np.abs(ranked[at] - marks), at - 1, at)
    close = np.abs(ranked[nearest] - marks) <= SAME * np.maximum(np.abs(marks), 1e-3)
    groups: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in np.flatnonzero(close):
        name, other = places[order[nearest[row]]]
        groups[name].append((int(row), other))
    if close.mean() < ENOUGH:
        return []
    return [
        Rows(name, np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]))
        for name, pairs in groups.items()
    ]
