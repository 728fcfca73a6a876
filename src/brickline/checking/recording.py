"""What one execution of one side made: its values in order, each with its key and its sources.

Knows nothing of how they came about; `performance` notes them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from brickline.checking.op_kinds import CREATING
from brickline.checking.stage import Key


@dataclass(slots=True)
class Value:
    """One tensor that an operation made, or with which a module returned."""

    index: int
    key: Key
    tensor: torch.Tensor
    """Its contents at the time it was made."""
    inputs: tuple[int, ...] = ()
    """The values that it was made from."""
    parameters: tuple[str, ...] = ()
    """Parameters and buffers that it was made from."""
    narrowest: torch.dtype | None = None
    """The coarsest floating dtype among its direct inputs."""
    view: bool = False
    custom: bool = False
    """Made by an operation that is not PyTorch's own."""
    starved: bool = False
    """Made in float64, for which memory ran out on the way: it is no more exact than float32."""
    caller: str = ""
    """Of what a module is called with: the path of the module that calls it."""


@dataclass(slots=True)
class Operation:
    """The operation that is being executed, for a listener that wants to know more."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Listener = Callable[[Value, Operation | None], "torch.Tensor | None"]


@dataclass
class Recording:
    """What one execution made."""

    values: list[Value] = field(default_factory=list)
    by_key: dict[Key, Value] = field(default_factory=dict)
    output: Any = None
    opaque: int = 0
    """Values that came from outside PyTorch's operations."""
    narrow_ops: set[str] = field(default_factory=set)
    callers: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    """Which module call made which, as path and number."""

    @cached_property
    def by_index(self) -> dict[int, Value]:
        """Return the values by their index."""
        return {each.index: each for each in self.values}

    @cached_property
    def readers(self) -> Counter[int]:
        """Return how many values were made directly from each, by index."""
        return Counter(index for each in self.values if not each.view for index in each.inputs)

    @cached_property
    def readings(self) -> dict[int, list[Value]]:
        """Return the values that were made directly from each, by index; views are none."""
        found: defaultdict[int, list[Value]] = defaultdict(list)
        for each in self.values:
            if not each.view:
                for index in each.inputs:
                    found[index].append(each)
        return dict(found)

    @cached_property
    def constants(self) -> set[int]:
        """Return the values that neither inputs nor weights went into, by index."""
        found: set[int] = set()
        for each in self.values:
            made = bool(each.inputs) or each.key.op in CREATING
            if made and not each.parameters and found.issuperset(each.inputs):
                found.add(each.index)
        return found

    @cached_property
    def views(self) -> dict[int, list[Value]]:
        """Return the views of each value, by index."""
        found: defaultdict[int, list[Value]] = defaultdict(list)
        for each in self.values:
            if each.view and len(each.inputs) == 1:
                found[each.inputs[0]].append(each)
        return dict(found)

    def add(self, value: Value) -> None:
        """Keep a value."""
        self.values.append(value)
        self.by_key[value.key] = value
