"""What their weights say of the candidate's modules.

Where several modules had a hand in what is wrong, a layer with the reference's weights that only
multiplies with them is not the one; one whose weights are not the reference's, or lie otherwise in
them, while those of the same layers elsewhere are, is. Knows nothing of values and verdicts.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping

import torch

from brickline.checking.op_kinds import CONTRACTIONS
from brickline.checking.pairing import Layout, WeightEvidence, is_boundary
from brickline.checking.recording import Recording
from brickline.checking.stage import family_of
from brickline.checking.weight_places import MOST_PLACES, RUN, Known, Place
from brickline.checking.weight_uses import SUMS

MOST_BIASES = 256
"""Of more weights of one size it is not asked which two of them another is the sum of."""
FAR = 1 << 32
"""More rows than a weight has."""
MOST_NUMBERS = 1 << 23
"""Of larger models nothing is said."""
PLAIN = frozenset(each for each in (*CONTRACTIONS, *SUMS) if "convolution" not in each)
"""Operations that a layer with the right weights can only do right."""
Arrangement = tuple[tuple[int, int, int, int], ...]


def modules_by_weights(
    plain: Collection[str],
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    scaled: Collection[str] = (),
    misfolded: Collection[str] = (),
    made: Collection[torch.Tensor] = (),
) -> WeightEvidence:
    """Return what the weights say of the candidate's modules.

    Args:
        plain: Its modules that do nothing but multiply with weights and add biases.
        ours: Its weights by name.
        theirs: The reference's.
        scaled: Those of the candidate's that are the reference's but for a factor per row.
        misfolded: Those whose biases lack that factor.
        made: What the reference makes of its weights alone.
    """
    if sum(each.numel() for each in (*ours.values(), *theirs.values())) > MOST_NUMBERS:
        return WeightEvidence()
    known = Known(theirs.values())
    seen = {name: known.places(tensor) for name, tensor in ours.items()}
    right = {name for name, places in seen.items() if places}
    strange = _twice(seen) | _read_otherwise(seen, ours) | set(map(_owner, misfolded))
    summed = _sums_of_two(ours, theirs, seen)
    # Two biases are added on purpose; where others are, one of them alone is not.
    strange |= set(map(_owner, _of_their_like(ours, summed) - summed))
    told = dict(_Factors(ours, theirs).told(right))
    strange |= {_owner(name) for name, alike in told.items() if not alike}
    right |= summed | _made_of_weights(ours, right, made)
    right |= {name for name, alike in told.items() if alike}
    owned: defaultdict[str, set[str]] = defaultdict(set)
    for name in ours:
        owned[_owner(name)].add(name)
    found = {path for path, names in owned.items() if right >= names} - strange
    families: defaultdict[str, set[str]] = defaultdict(set)
    for path in owned:
        families[_family(path)].add(path)
    changed: set[str] = set()
    for members in families.values():
        others = members - found
        if len(others) == 1 and len(members) > 1:
            strange |= others
        if others == members and len(members) > 1:
            # What is done to the weights of every layer is no slip.
            changed |= members
    # Weights of a norm may be a part of others on the other side.
    unfound = {
        _owner(name)
        for name, tensor in ours.items()
        if tensor.ndim > 1 and name not in right and known.holds_some(tensor)
    }
    return WeightEvidence(
        found & set(plain),
        strange,
        found,
        unfound - set(map(_owner, scaled)) - changed,
    )


def _owner(name: str) -> str:
    """Return the path of the module that holds a weight."""
    return name.rpartition(".")[0]


def _family(path: str) -> str:
    """Return what a module and those in its place in other layers have in common."""
    above, dot, own = path.rpartition(".")
    return family_of(above) + dot + ("*" if own.isdigit() else own)


def _twice(seen: Mapping[str, list[Place]]) -> set[str]:
    """Return the modules with weights that the reference holds once and the candidate twice.

    One of two is in the wrong place; where those of its like tell which, the other is left out.
    """
    owners: defaultdict[Place, set[str]] = defaultdict(set)
    lines: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, places in seen.items():
        path, _, own = name.rpartition(".")
        for place in places:
            owners[place].add(path)
        if places:
            # Tensors are far apart, rows of one are near each other.
            line = re.sub(r"\d+(?=\D*$)", "*", path), own
            lines[line][path] = places[0].tensor * FAR + places[0].row
    twice = {path for each in owners.values() if len(each) > 1 for path in each}
    for members in lines.values():
        if len(members) > 2 and not twice.isdisjoint(members):
            twice -= _in_line(members)
    return twice


def _in_line(members: Mapping[str, int]) -> set[str]:
    """Return those that the reference holds where it should, if most are at equal distances."""
    paths = sorted(members, key=lambda path: [int(each) for each in re.findall(r"\d+", path)])
    steps = Counter(members[b] - members[a] for a, b in itertools.pairwise(paths))
    step = steps.most_common(1)[0][0]
    starts = {path: members[path] - step * number for number, path in enumerate(paths)}
    usual, count = Counter(starts.values()).most_common(1)[0]
    if 2 * count <= len(members):
        return set()
    return {path for path, start in starts.items() if start == usual}


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


def _made_of_weights(
    ours: Mapping[str, torch.Tensor], found: Collection[str], made: Collection[torch.Tensor]
) -> set[str]:
    """Return the weights that the other side makes of its own in each call, in any layout."""
    return {
        name
        for name, tensor in ours.items()
        if tensor.ndim > 1
        and name not in found
        and any(_is_laid_out(tensor, each) for each in made if each.numel() == tensor.numel())
    }


def _is_laid_out(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    wide = other.detach().double().cpu()
    mine = tensor.detach().double().cpu()
    near = 8 * float(torch.finfo(tensor.dtype).eps) * float(wide.norm())
    return any(float((made - wide).norm()) <= near for _, made in Layout.laid(mine, wide.shape))


def _of_their_like(ours: Mapping[str, torch.Tensor], names: Collection[str]) -> set[str]:
    """Return the weights in the places of some, in this or other layers."""
    places = {_place_of(name) for name in names}
    return {name for name in ours if _place_of(name) in places}


def _place_of(name: str) -> tuple[str, str]:
    """Return what a weight and those in its place in other layers have in common."""
    path, _, own = name.rpartition(".")
    return _family(path), own


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
            families[*_place_of(name), each.shape].append(name)
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
            families[*_place_of(name), ours[name].shape][name] = places
    found: set[str] = set()
    for members in families.values():
        lying = {name: _arrangement(places) for name, places in members.items()}
        counts = Counter(lying.values())
        if 2 * max(counts.values()) <= len(members):
            # They may be parts of one.
            lying = {name: _arrangement(places, apart=True) for name, places in members.items()}
            counts = Counter(lying.values())
        usual = max(counts, key=lambda each: (counts[each], _is_plain(each)))
        found |= {_owner(name) for name, each in lying.items() if each != usual}
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
