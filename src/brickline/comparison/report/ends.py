"""What comes into a run from outside and what goes out of it, and how both differ.

Where one launch encloses all others that is what this root is given and puts out. Launches that
nothing encloses, such as those of a plan, have ends of their own: what a plan noted of them, or
else what no launch before put out, and what no launch after is given. Knows nothing of blame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brickline.align.keys import Ints, hashed
from brickline.align.sequences import Bools
from brickline.comparison.operands import Differences, Floats
from brickline.comparison.pairing import Alignment
from brickline.comparison.report.run_pair import launch_name
from brickline.comparison.sides import (
    FLAT,
    MOST_ARGUMENTS,
    PARAMETER_INDEX,
    Side,
    arguments_of,
    settings_of,
)

MOST_NAMED = 8
"""Inputs from outside that are told of; what differs after these seldom says more."""
MOST_LOOKED_AT = 1000
"""Operands or launches among which is looked for what to name."""


@dataclass(frozen=True)
class OddInput:
    """Something that came from outside and is not the reference's."""

    call: int
    text: str
    """In words: who was given it, and how it differs."""


@dataclass(frozen=True)
class Output:
    """One thing that goes out, in the call in which it differs most."""

    name: str
    where: str
    """The call in words, where there are several."""
    floor: float
    """What rounding alone may have grown to."""
    error: float | None = None
    """Relative L2 to the reference's; None where that has no size."""
    is_same: bool = False
    """The same bits, in every call."""
    odd: str = ""
    """How it differs, where that is no matter of a distance."""
    is_choice: bool = False
    """It holds choices, which are not near nor far."""

    @property
    def is_lost(self) -> bool:
        """Whether it is no choice and has no distance."""
        return self.error is None and not self.is_choice

    @property
    def text(self) -> str:
        """How it differs, in words."""
        if self.is_same or self.error == 0:
            return f"{self.name} is the same to the bit"
        if self.error is None or not np.isfinite(self.error):
            return f"{self.name}{self.where} {self.odd or 'could not be compared'}"
        word = "more" if self.error > self.floor else "no more"
        return (
            f"{self.name} differs by {self.error:.1e}{self.where}, {word} than the "
            f"{self.floor:.1e} that rounding may grow to"
        )


class RootEnds:
    """The ends of nested launches: what their root is given and puts out.

    Args:
        a: The candidate.
        alignment: The pairs.
        found: How their tensors differ.
        envelope: What rounding alone may have grown to at each launch.
        call: In which call the output is looked at; None: in the one that differs most.
    """

    def __init__(
        self,
        a: Side,
        alignment: Alignment,
        found: Differences,
        envelope: Floats,
        call: int | None,
    ) -> None:
        self._a, self._found, self._envelope, self._call = a, found, envelope, call
        self._roots = np.flatnonzero((a.parent < 0) & (alignment.partner >= 0) & (a.direction == 0))

    def odd_inputs(self) -> list[OddInput]:
        """Return the calls of the root that were given something else, in order."""
        inputs, roots = self._found.inputs, self._roots
        odd = inputs.choice[roots] | inputs.resized[roots]
        odd |= inputs.delta[roots] > self._envelope[roots]
        calls = np.unique(self._a.position[roots[odd]])[:MOST_NAMED].tolist()
        return [OddInput(call, f"the root was given other inputs in call {call}") for call in calls]

    def outputs(self) -> list[Output]:
        """Return what the root puts out, as one."""
        made, roots = self._found.made, self._roots
        if not len(roots):
            return []
        there = roots[self._a.position[roots] == self._call]
        row = int(there[0]) if len(there) else int(roots[np.argmax(made.delta[roots])])
        error = float(made.delta[row]) if made.known[row] else None
        return [Output("the output", "", float(self._envelope[row]), error)]


class LaunchEnds:
    """The ends of launches that nothing encloses.

    Args:
        a: The candidate.
        b: The reference.
        alignment: Their pairs.
        found: How their tensors differ.
        envelope: What rounding alone may have grown to at each launch of the candidate.
    """

    def __init__(
        self, a: Side, b: Side, alignment: Alignment, found: Differences, envelope: Floats
    ) -> None:
        self._a, self._b, self._alignment = a, b, alignment
        self._found, self._envelope = found, envelope
        self.is_plan = bool((a.entering >= 0).any())
        """Whether they are a plan's."""
        forward = (alignment.partner >= 0) & (a.direction == 0)
        own = forward[a.owner] & (a.index < PARAMETER_INDEX) & (found.other >= 0)
        self._kept = _kept(a)
        self._given = np.flatnonzero(own & (a.role == 0) & _marked(a, a.entering, ~self._kept))
        self._made = np.flatnonzero(own & (a.role > 0) & _marked(a, a.results, ~_handed_on(a)))

    def odd_inputs(self) -> list[OddInput]:
        """Return what came from outside and is not the reference's: each thing once, in order."""
        found = self._found
        odd = found.resized | self._are_other_choices()
        odd |= found.delta > self._envelope[found.owner]
        rows = self._given[odd[self._given]]
        # What a plan keeps from call to call came from outside where either side was given it.
        kept = self._kept[rows] & _kept(self._b)[found.other[rows]]
        named: dict[str, OddInput] = {}
        for operand in rows[~kept][:MOST_LOOKED_AT].tolist():
            argument, whole = self._argument(operand, "reads")
            named.setdefault(whole, self._odd(operand, argument))
            if len(named) == MOST_NAMED:
                break
        return list(named.values())

    def outputs(self) -> list[Output]:
        """Return each thing that goes out, where it differs most."""
        a, made, found = self._a, self._made, self._found
        size = np.nan_to_num(found.delta[made], nan=-1.0)
        size = np.where(found.resized[made] | self._are_other_choices()[made], np.inf, size)
        rows = found.owner[made]
        keys = hashed(a.rank[rows], a.name[rows], a.layer[rows], a.index[made])
        order = np.argsort(-size, kind="stable")
        worst = made[order[np.unique(keys[order], return_index=True)[1]]]
        return [self._output(int(each)) for each in np.sort(worst)]

    def odd_values(self) -> str | None:
        """Return the first launch that was launched with other values, in words."""
        a, rows = self._a, self._alignment.rows
        rows = rows[a.params[rows] != self._b.params[self._alignment.partner[rows]]]
        texts = (self._values(row) for row in rows[:MOST_LOOKED_AT].tolist())
        return next((text for text in texts if text is not None), None)

    def _are_other_choices(self) -> Bools:
        found = self._found
        choices: Bools = found.discrete & ~found.same & ~np.isnan(found.delta)
        return choices

    def _values(self, row: int) -> str | None:
        ours = settings_of(self._a, row)
        theirs = settings_of(self._b, int(self._alignment.partner[row]))
        odd = [key for key in ours if key in theirs and ours[key] != theirs[key]]
        if not odd:
            return None
        shown = ", ".join(f"{key}={ours[key]}, reference {theirs[key]}" for key in odd[:3])
        return f"{launch_name(self._a, row)}{self._in_call(row)} was launched with {shown}"

    def _odd(self, operand: int, argument: str) -> OddInput:
        a, found = self._a, self._found
        row, delta = int(found.owner[operand]), float(found.delta[operand])
        text = f"{launch_name(a, row)}{self._in_call(row)} was given another {argument}"
        if found.resized[operand]:
            sizes = f"{int(a.elements[operand])} elements, reference {self._size(operand)}"
            # A size follows from the values that a launch has.
            text = self._values(row) or f"{text}: {sizes}"
        elif not found.discrete[operand] and np.isfinite(delta):
            text += f", which differs by {delta:.1e}"
        return OddInput(int(a.position[row]), text)

    def _output(self, operand: int) -> Output:
        a, found = self._a, self._found
        row, delta = int(found.owner[operand]), float(found.delta[operand])
        odd = ""
        if found.resized[operand]:
            odd = f"has {int(a.elements[operand])} elements, reference {self._size(operand)}"
        elif found.discrete[operand]:
            odd = "holds other values"
        elif np.isinf(delta):
            odd = "is finite at other places than the reference's"
        _, buffer = self._argument(operand, "writes")
        return Output(
            f"{buffer} of {launch_name(a, row)}",
            self._in_call(row),
            float(self._envelope[row]),
            None if np.isnan(delta) or found.resized[operand] or found.discrete[operand] else delta,
            bool(found.same[operand]),
            odd,
            bool(found.discrete[operand]),
        )

    def _size(self, operand: int) -> int:
        return int(self._b.elements[self._found.other[operand]])

    def _argument(self, operand: int, which: str) -> tuple[str, str]:
        """Return what an operand is called, and what it lies in: a plan's names, or its number."""
        a, row, number = self._a, int(self._found.owner[operand]), int(self._a.index[operand])
        names = arguments_of(a.plan_of(row), which)
        if number >= len(names):
            name = f"{'input' if which == 'reads' else 'output'} {number}"
            return name, name if which == "writes" else f"{name} of {launch_name(a, row)}"
        argument, buffer = names[number]
        if which == "writes":
            return argument, f"output {buffer}"
        return argument if argument == buffer else f"{argument} (buffer {buffer})", buffer

    def _in_call(self, row: int) -> str:
        calls = self._a.position
        return f" in call {int(calls[row])}" if calls.max() > calls.min() else ""


def ends_of(
    a: Side,
    b: Side,
    alignment: Alignment,
    found: Differences,
    envelope: Floats,
    call: int | None,
) -> RootEnds | LaunchEnds:
    """Return the ends of the candidate.

    Args:
        a: The candidate.
        b: The reference.
        alignment: Their pairs.
        found: How their tensors differ.
        envelope: What rounding alone may have grown to at each launch of the candidate.
        call: In which call a root's output is looked at; None: in the one that differs most.
    """
    if (a.level != FLAT).any() or (a.parent >= 0).any():
        return RootEnds(a, alignment, found, envelope, call)
    return LaunchEnds(a, b, alignment, found, envelope)


def _marked(side: Side, noted: Ints, otherwise: Bools) -> Bools:
    """Return which operands are ends: by what a plan noted of their launch, else as given."""
    bits = noted[side.owner]
    place = np.minimum(side.index, MOST_ARGUMENTS).astype(np.int64)
    return np.where(bits >= 0, (bits >> place) & 1 == 1, otherwise)


def _kept(side: Side) -> Bools:
    """Return which operands hold what a launch before them put out."""
    contents, owner = _contents(side), side.owner
    first = np.full(int(contents.max(initial=-1)) + 1, len(side), np.int64)
    made, known = (contents >= 0) & (side.role > 0), contents >= 0
    np.minimum.at(first, contents[made], owner[made])
    out = np.zeros(len(contents), bool)
    out[known] = first[contents[known]] < owner[known]
    return out


def _handed_on(side: Side) -> Bools:
    """Return which operands hold what a launch after them is given."""
    contents, owner = _contents(side), side.owner
    last = np.full(int(contents.max(initial=-1)) + 1, -1, np.int64)
    given, known = (contents >= 0) & (side.role == 0), contents >= 0
    np.maximum.at(last, contents[given], owner[given])
    out = np.zeros(len(contents), bool)
    out[known] = last[contents[known]] > owner[known]
    return out


def _contents(side: Side) -> Ints:
    """Return a number for the contents of every operand, -1 where they are not known."""
    out = np.full(len(side.print), -1, np.int64)
    seen = side.print >= 0
    hashes = side.prints.hash[side.print[seen], 0]
    out[seen] = np.unique(hashes, return_inverse=True)[1].reshape(-1)
    return out
