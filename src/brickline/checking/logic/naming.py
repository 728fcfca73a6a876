"""Whose fault a cut is: the modules whose own operations, weights or hand-overs are left in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from brickline.checking.execution.tape import CONSTANT, WEIGHT, Frame, Step, Value
from brickline.checking.logic.known_values import is_plain_copy
from brickline.checking.logic.search import Cut, Handed, Search
from brickline.checking.stage import family_of

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm"})
"""Operations that only multiply and add."""
ARRANGING = frozenset(
    {
        "aten::constant_pad_nd",
        "aten::im2col",
        "aten::cat",
        "aten::stack",
        "aten::roll",
        "aten::flip",
    }
)
"""Operations that put elements in places and compute none."""


@dataclass(frozen=True)
class Blame:
    """The modules of which one is wrong, the likeliest first."""

    paths: tuple[str, ...]
    source: str | None = None
    """File and line of the operation that shows it."""
    handed: bool = False
    """Whether a module hands on something wrong, and does not compute it."""


def blame(search: Search, cuts: Sequence[Cut]) -> Blame:
    """Return whose fault some cuts are that are in the same place of several layers.

    What all of them have in common comes first: a mask or a table that all layers share.
    """
    first = cuts[0]
    if first.handed is not None:
        return _of_handed(search, first, first.handed)
    shared = set(first.region).intersection(*(cut.region for cut in cuts[1:]))
    common = [index for index in sorted(shared) if len(cuts) > 1]
    if any(search.ours.values[index].step.func is not None for index in common):
        return _of_region(search, first, common)
    return _of_region(search, first, first.region)


# --- what is computed wrongly


def _of_region(search: Search, cut: Cut, indices: Sequence[int]) -> Blame:
    values = search.ours.values
    region = [values[index] for index in indices]
    cleared = _cleared(search, cut)
    computed = [
        value
        for value in region
        if not value.step.moves
        and value.step.name not in (WEIGHT, CONSTANT)
        and value.index not in cleared
    ]
    computed = computed or [value for value in region if value.step.func is not None] or region
    paths = list(dict.fromkeys(value.step.frame.path for value in reversed(computed)))
    holders = [
        holder_of(value.name)
        for value in _weights_in(search, region)
        if _is_odd_weight(search, value.index)
    ]
    if len(set(holders)) == 1:
        paths = [holders[0]]
    elif holders:
        paths = [path for path in paths if path in holders] or paths
    else:
        arranger = _arranger(search, cut, region)
        if arranger is not None:
            return Blame((arranger,), _line(values[cut.value].step), handed=True)
    if len(paths) > 1:
        paths = [path for path in paths if not search.frames.is_usual(path)] or paths
    return Blame(tuple(paths), _line(values[cut.value].step))


def _arranger(search: Search, cut: Cut, region: Sequence[Value]) -> str | None:
    """Return who arranged what a layer is handed, where that layer only multiplies.

    A product with the reference's weights is right, so what it multiplies lies in a wrong order.
    """
    steps = {value.step.number: value.step for value in region}
    products = [step for step in steps.values() if step.func is not None and not step.moves]
    if len(products) != 1 or products[0].name not in PRODUCTS:
        return None
    product = products[0]
    weights = _weights_of(search, search.ours.values[product.outputs[0]])
    partner = search.theirs.values[search.origin(cut.partner)]
    needed = _weight_names(search, partner)
    if len(weights) < max(1, len(needed)):
        return None
    if any(search.explained.get(weight.index) is None for weight in weights):
        return None
    known = {weight.index for weight in weights}
    for source in product.inputs:
        path = _last_mover(search, source, product.frame, known)
        if path is not None:
            return path
    return None


def _weight_names(search: Search, partner: Value) -> list[str]:
    """Return the weights that the reference multiplies with or adds where a value is made."""
    names: list[str] = []
    for source in partner.step.inputs:
        value = search.theirs.values[source]
        while value.step.moves and len(value.step.inputs) == 1:
            value = search.theirs.values[value.step.inputs[0]]
        if value.step.name == WEIGHT:
            names.append(value.name)
    return names


def _last_mover(search: Search, index: int, frame: Frame, weights: set[int]) -> str | None:
    """Return the module around a layer that last arranged what the layer is handed."""
    values = search.ours.values
    value = values[index]
    while value.step.moves and value.step.inputs:
        outside = value.step.frame is not frame
        if outside and not is_plain_copy(search.ours.tape, value):
            return value.step.frame.path
        if outside and value.step.name.endswith(("permute", "transpose")):
            return value.step.frame.path
        value = values[value.step.inputs[0]]
        if value.index in weights:
            return None
    outside = value.step.frame is not frame and value.step.func is not None
    return value.step.frame.path if outside and value.step.name in ARRANGING else None


def _weights_in(search: Search, region: Sequence[Value]) -> list[Value]:
    """Return the weights that the operations of a region read, also those that are right."""
    weights = {value.index: value for value in region if value.step.name == WEIGHT}
    for value in region:
        if not value.step.moves and value.step.func is not None:
            weights.update((weight.index, weight) for weight in _weights_of(search, value))
    return list(weights.values())


def _cleared(search: Search, cut: Cut) -> set[int]:
    """Return values of a region that went into other values that are right: they are right, too."""
    ours, explained, region = search.ours, search.explained, set(cut.region)
    cleared: set[int] = set()
    for value in ours.values:
        right = explained.get(value.index) is not None
        if not right or value.index in region or value.index in search.healed:
            continue
        todo = [value.index]
        while todo:
            current = ours.values[todo.pop()]
            for source in current.step.inputs:
                part = current.step.moves and not is_plain_copy(ours.tape, current)
                if source in cleared or explained.get(source) is not None or part:
                    continue
                cleared.add(source)
                todo.append(source)
    return cleared


def _is_odd_weight(search: Search, index: int) -> bool:
    """Return whether a weight is made of the reference's in another way than its siblings are."""
    value = search.ours.values[index]
    family = family_of(value.name)
    siblings = [
        other
        for other in search.ours.values
        if other.step.name == WEIGHT and other.index != index and family_of(other.name) == family
    ]
    own = search.makeup.of(value)
    others = {search.makeup.of(other) for other in siblings}
    if len(others) == 1 and None not in others:
        return own not in others
    if search.explained.get(index) is not None or not search.ours.informative(index):
        return False
    if search.bank.parts(value.flat):
        return False
    return not siblings or any(
        search.explained.get(other.index) is not None or search.bank.parts(other.flat)
        for other in siblings
    )


def holder_of(weight: str) -> str:
    """Return the module that holds a weight, by the weight's name."""
    return weight.rpartition(".")[0]


# --- what is handed on wrongly


def _of_handed(search: Search, cut: Cut, handed: Handed) -> Blame:
    values, steps = search.ours.values, search.ours.tape.steps
    step, value = steps[handed.step], values[handed.value]
    if value.step.name == WEIGHT:
        elsewhere = handed.partner is not None and _has_weight(search, handed.partner, value)
        caller = (
            step.frame.parent if elsewhere and holder_of(value.name) == step.frame.path else None
        )
        return Blame((holder_of(value.name) if caller is None else caller.path,), _line(step))
    odd = [weight for weight in _weights_of(search, value) if _is_odd_weight(search, weight.index)]
    if odd:
        return Blame((holder_of(odd[0].name),), _line(step))
    if handed.partner is None:
        return Blame((step.frame.path,), _line(step), handed=True)
    giver = _chooser(search, handed, step.frame) or _giver(search, handed.value, step.frame)
    usual = _usual_giver(search, handed, giver)
    if usual is not None:
        return Blame((usual,), _line(step), handed=True)
    inner = _inner_giver(search, handed, giver)
    paths = [frame.path for frame in (inner, giver) if frame is not None]
    holders = _holders(search, handed)
    if holders:
        around = [frame.path for frame in step.frame.line()]
        paths = [*paths, *around[around.index(giver.path) :]]
        fit = [path for path in paths if all(encloses(path, holder) for holder in holders)]
        paths = fit[:1] or paths
    return Blame(tuple(dict.fromkeys(paths)), _line(step), handed=True)


def _weights_of(search: Search, value: Value) -> list[Value]:
    """Return the weights from which a value was made directly."""
    values = search.ours.values
    while value.step.moves and value.step.inputs:
        value = values[value.step.inputs[0]]
    weights: list[Value] = []
    for source in value.step.inputs:
        current = values[source]
        while current.step.moves and len(current.step.inputs) == 1:
            current = values[current.step.inputs[0]]
        if current.step.name == WEIGHT:
            weights.append(current)
    return weights


def _holders(search: Search, handed: Handed) -> list[str]:
    """Return the modules with weights of ours that the right value needs, and that nobody reads."""
    partner = handed.partner
    assert partner is not None
    stops = {other for other in search.explained.values() if other is not None}
    holders: list[str] = []
    for source in search.theirs.sources(partner, stops):
        weight = search.theirs.values[source]
        if weight.step.name == WEIGHT and source not in stops:
            holders += [holder_of(name) for name in search.idle_weights(weight)]
    return holders


def encloses(path: str, inner: str) -> bool:
    """Return whether a module is another one or has it inside."""
    return not path or path == inner or inner.startswith(f"{path}.")


def _has_weight(search: Search, partner: int, other: Value) -> bool:
    """Return whether the candidate holds one of the reference's weights elsewhere."""
    read = any(
        right == partner and search.ours.values[index].step.name == WEIGHT and index != other.index
        for index, right in search.explained.items()
    )
    return read or bool(search.idle_weights(search.theirs.values[partner]))


def _chooser(search: Search, handed: Handed, frame: Frame) -> Frame | None:
    """Return the module that had both the right value and the wrong one, and chose the latter."""
    right = [
        index
        for index, other in search.explained.items()
        if other == handed.partner and index < search.ours.tape.steps[handed.step].outputs[0]
    ]
    same = set(_copies(search, handed.value))
    outer: Frame | None = frame
    while outer is not None:
        given = not same.isdisjoint(outer.given)
        if any(_is_at_hand(search, outer, index) for index in right):
            return outer
        outer = outer.parent if given else None
    return None


def _giver(search: Search, index: int, frame: Frame) -> Frame:
    """Return the module that did not get a value from its caller, but chose it itself."""
    same = set(_copies(search, index))
    while frame.parent is not None and not same.isdisjoint(frame.given):
        frame = frame.parent
    return frame


def _copies(search: Search, index: int) -> Iterator[int]:
    """Yield a value and what it is a plain copy of."""
    yield index
    value = search.ours.values[index]
    while is_plain_copy(search.ours.tape, value):
        index = value.step.inputs[0]
        value = search.ours.values[index]
        yield index


def _inner_giver(search: Search, handed: Handed, giver: Frame) -> Frame | None:
    """Return a module that returned the value to the giver and could have made the right one."""
    same = set(_copies(search, handed.value))
    partner = handed.partner
    assert partner is not None
    there: dict[int, int] = {}
    for index, other in search.explained.items():
        if other is not None and index < max(same) + 1:
            there.setdefault(other, index)
    needed = [index for index in _needed(search, partner, there) if index not in same]
    for frame in search.ours.tape.frames:
        returned = frame.parent is giver and not same.isdisjoint(frame.returned)
        if returned and needed and all(_is_at_hand(search, frame, index) for index in needed):
            return frame
    return None


def _needed(search: Search, partner: int, there: dict[int, int]) -> list[int]:
    """Return our values from which the reference makes one of its own."""
    needed: list[int] = []
    seen = {partner}
    todo = [partner]
    while todo:
        for source in search.theirs.values[todo.pop()].step.inputs:
            if source in seen:
                continue
            seen.add(source)
            name = search.theirs.values[source].step.name
            if source in there:
                needed.append(there[source])
            elif name != WEIGHT:
                todo.append(source)
    return needed


def _is_at_hand(search: Search, frame: Frame, index: int) -> bool:
    """Return whether a module was given a value, or made it."""
    for copy in _copies(search, index):
        if copy in frame.given or frame in search.ours.values[copy].step.frame.line():
            return True
    readers = search.ours.readers(index)
    return any(frame in search.ours.values[reader].step.frame.line() for reader in readers)


def _usual_giver(search: Search, handed: Handed, giver: Frame) -> str | None:
    """Return which module makes the right value in other layers, for the layer in question.

    None where the candidate has the right value, too, and the giver chose another one.
    """
    assert handed.partner is not None
    if any(other == handed.partner for other in search.explained.values()):
        return None
    partner = search.theirs.values[handed.partner]
    origin = list(_copies(search, handed.value))[-1]
    near = [*search.ours.values[origin].step.frame.line(), *giver.line()]
    paths = list(dict.fromkeys(frame.path for frame in near))
    for index, other in search.explained.items():
        if other is None or index in search.healed:
            continue
        value, known = search.ours.values[index], search.theirs.values[other]
        if known.key != partner.key or value.step.func is None or value.step.moves:
            continue
        shift = _shift(known.step.frame.path, partner.step.frame.path)
        usual = value.step.frame.path
        family = [path for path in paths if family_of(path) == family_of(usual)]
        for path in (*_shifted(usual, shift), *family):
            # What a part makes in other layers is passed on by the module around it.
            around = next((outer for outer in _outwards(path) if outer in paths), None)
            if around is not None:
                return around
    return None


def _outwards(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it, but for the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _shift(one: str, other: str) -> int:
    """Return how many layers lie between two modules of the same family."""
    pairs = zip(_numbers(one), _numbers(other), strict=True)
    return next((second - first for first, second in pairs if first != second), 0)


def _shifted(path: str, shift: int) -> Iterator[str]:
    """Yield a module's path so many layers further on, for each of its numbers."""
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            yield ".".join((*parts[:place], str(int(part) + shift), *parts[place + 1 :]))


def _numbers(path: str) -> list[int]:
    return [int(part) for part in path.split(".") if part.isdigit()]


def _line(step: Step) -> str | None:
    return None if step.source is None else f"{step.source[0]}:{step.source[1]}"
