"""Which operations of one side work with which weight, and what each is given and makes.

A weight may be multiplied in parts, and its bias added by an operation apart: what counts is what
the whole makes. Knows one side only; `alignment` pairs the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch

from brickline.checking.op_kinds import CONTRACTIONS
from brickline.checking.pairing import is_boundary
from brickline.checking.recording import Recording, Value
from brickline.checking.stage import INPUT, OPERAND, OUTPUT, Key

SUMS = ("aten::add", "aten::add_")
"""Operations that may add a bias."""
AFFINE = (
    *SUMS,
    "aten::sub",
    "aten::mul",
    "aten::mul_",
    "aten::div",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit_no_training",
    "aten::cudnn_batch_norm",
    "aten::batch_norm",
)
"""Operations that may give each channel a factor and a sum."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear")
"""Operations that multiply with a weight of two dimensions."""


class Use:
    """One operation that works with a weight; what its module returns, where it is all of it."""

    def __init__(self, value: Value, operand: Value | None) -> None:
        self.value = value
        self.operand = operand
        self.entrance: Value | None = None
        """What the module is called with, where the weight's work is all that it does."""
        self.partial = False
        """Whether it stands for several products with parts of the weight."""
        self.op = value.key.op
        self.adds = self.op in SUMS
        """Whether the weight is added to something, rather than multiplied with or looked up."""
        self.shape = (value.tensor.shape[-1:], operand and operand.tensor.shape[-1:])

    def add_bias(self, recording: Recording, widths: Mapping[str, int]) -> None:
        """Take the sum with a bias for what the weight makes, where that is an operation apart."""
        made = self.value
        if made.key.op not in CONTRACTIONS or len(made.parameters) > 1:
            return
        for value in recording.readings.get(made.index, ()):
            biases = [widths.get(name) for name in value.parameters]
            plain = value.key[:2] == made.key[:2] and value.key.op in SUMS
            if plain and biases == [made.tensor.shape[-1]] and value.inputs == (made.index,):
                self.value = value
                return

    def with_factors(self, recording: Recording, widths: Mapping[str, int]) -> Value:
        """Return what the weight makes once every channel has got its factor and its sum."""
        made = current = self.value
        while True:
            ways = [
                each
                for each in recording.readings.get(current.index, ())
                if each.inputs == (current.index,) and each.tensor.shape == current.tensor.shape
            ]
            if len(ways) != 1:
                return made
            current = ways[0]
            if is_boundary(current.key):
                continue
            if current.key.op not in AFFINE or not current.parameters:
                return made
            sizes = {widths.get(name) for name in current.parameters}
            if len(sizes) != 1 or sizes.isdisjoint(current.tensor.shape[1:]):
                return made
            made = current

    def settle(self, recording: Recording) -> None:
        """Take what the module returns for what its only weight makes."""
        key, made = self.value.key, self.value.tensor
        if not key.path or any(path.startswith(f"{key.path}.") for path, _ in recording.callers):
            return
        given = [
            each
            for each in recording.by_key.values()
            if each.key[:3] == (key.path, key.call, INPUT) and each.tensor.dtype.is_floating_point
        ]
        if len(given) == 1:
            self.entrance = given[0]
        output = recording.by_key.get(Key(key.path, key.call, OUTPUT, 0))
        if output is None or output.tensor.numel() != made.numel():
            return
        if output.tensor.shape[-1:] == made.shape[-1:]:
            self.value, self.partial = output, False


def uses_of(
    recording: Recording,
    copies: Mapping[str, str],
    widths: Mapping[str, int],
    apart: Collection[str] = (),
) -> dict[str, list[Use]]:
    """Return the operations that use each weight, in order; biases come with their weights.

    Args:
        recording: The values of one side.
        copies: Weights that are copies of another, to that one: they count as one.
        widths: How many numbers each weight holds.
        apart: Paths of modules that are left out.
    """
    found: defaultdict[str, list[Use]] = defaultdict(list)
    waiting: dict[tuple[str, int], Value] = {}
    for value in recording.values:
        if value.key.op.startswith(OPERAND):
            waiting[value.key.path, value.key.call] = value
            continue
        if value.view or is_boundary(value.key) or not value.parameters or value.key.out:
            continue
        if value.key.path in apart:
            continue
        if not value.tensor.dtype.is_floating_point:
            continue
        operand = None
        if value.key.op in CONTRACTIONS:
            operand = waiting.pop((value.key.path, value.key.call), None)
        # A weight holds more numbers than its bias.
        name = max(reversed(value.parameters), key=lambda each: widths.get(each, 0))
        found[copies.get(name, name)].append(Use(value, operand))
    _join_partial(found, widths)
    busy: defaultdict[tuple[str, int], list[Use]] = defaultdict(list)
    for uses in found.values():
        for use in uses:
            busy[use.value.key[:2]].append(use)
    for uses in found.values():
        for use in uses:
            others = [each for each in busy[use.value.key[:2]] if each is not use]
            product = use.value.key.op in CONTRACTIONS
            if not others or (product and all(_is_bias(each, widths) for each in others)):
                use.settle(recording)
            if product:
                use.add_bias(recording, widths)
    whole = {name: [use for use in uses if not use.partial] for name, uses in found.items()}
    return {name: uses for name, uses in whole.items() if uses}


def _join_partial(found: dict[str, list[Use]], widths: Mapping[str, int]) -> None:
    """Let the products with parts of one weight in one call of a module count as one.

    What the whole weight makes is what the module returns; what it is multiplied with, what the
    module is called with. The last part stands for all.
    """
    for name, uses in found.items():
        for use in uses:
            use.partial = _is_part(use, widths)
        last = {use.value.key[:2]: use for use in uses if use.partial}
        found[name] = [use for use in uses if not use.partial or last[use.value.key[:2]] is use]
        for use in last.values():
            use.operand = None


def _is_part(use: Use, widths: Mapping[str, int]) -> bool:
    """Whether it is a product with some rows or columns of a weight only."""
    if use.operand is None or use.value.key.op not in PRODUCTS:
        return False
    size = use.operand.tensor.shape[-1] * use.value.tensor.shape[-1]
    return bool(size < widths.get(use.value.parameters[-1], 0))


def _is_bias(use: Use, widths: Mapping[str, int]) -> bool:
    """Whether it only adds one number for each column."""
    value = use.value
    if value.key.op not in SUMS:
        return False
    return [widths.get(name) for name in value.parameters] == [value.tensor.shape[-1]]


def made_of_weights(recording: Recording, sizes: Collection[int]) -> list[torch.Tensor]:
    """Return what was made of weights alone, such as weights with lengths of their own.

    Args:
        recording: The values of one side.
        sizes: How many numbers those hold that are asked for.
    """
    alone: set[int] = set()
    found: list[torch.Tensor] = []
    for value in recording.values:
        reads = value.key.op in CONTRACTIONS or "embedding" in value.key.op
        if reads or not (value.parameters or value.inputs) or not alone.issuperset(value.inputs):
            continue
        alone.add(value.index)
        plain = not value.view and not is_boundary(value.key)
        if plain and value.tensor.ndim > 1 and value.tensor.numel() in sizes:
            found.append(value.tensor)
    return found
