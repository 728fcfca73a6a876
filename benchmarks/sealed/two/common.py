"""What the architectures of this set share: weights, conversions, edits, declarations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sealed.cases import Case, Pair

Edit = Callable[[nn.Module], "nn.Module | None"]
"""Changes a candidate in place, or returns another in its stead."""

SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Family:
    """Declares the cases of one architecture."""

    architecture: str
    build: Callable[..., Pair]
    """Called with the dtype of the candidate, an edit or none, and options."""
    trained: bool = False

    def fault(
        self,
        name: str,
        edit: Edit | None,
        expected: str | tuple[str, ...],
        cause: str,
        *,
        dtype: torch.dtype = torch.float32,
        precision: bool = False,
        **options: Any,
    ) -> Case:
        """Return a case with a fault; expected is one path or several."""
        return Case(
            name=f"{self.architecture}.{name}/{SHORT[dtype]}",
            architecture=self.architecture,
            make=partial(self.build, dtype, edit, **options),
            dtype=dtype,
            expected=(expected,) if isinstance(expected, str) else expected,
            cause=cause,
            precision=precision,
            trained=self.trained,
        )

    def harmless(
        self,
        name: str,
        edit: Edit | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Case:
        """Return a case with nothing wrong."""
        return Case(
            name=f"{self.architecture}.{name}/{SHORT[dtype]}",
            architecture=self.architecture,
            make=partial(self.build, dtype, edit, **options),
            dtype=dtype,
            trained=self.trained,
        )


@torch.no_grad()
def finish(
    candidate: nn.Module, reference: nn.Module, dtype: torch.dtype, edit: Edit | None
) -> tuple[nn.Module, nn.Module]:
    """Return both sides ready to run, the candidate edited and its weights in dtype."""
    if edit is not None:
        candidate = edit(candidate) or candidate
    return narrow(candidate, dtype).eval(), reference.eval()


@torch.no_grad()
def narrow(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the parameters of a model; buffers (tables) keep their dtype."""
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Round the parameters of a model to what dtype can hold; they stay as wide as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    return model


@torch.no_grad()
def randomise(
    model: nn.Module,
    seed: int,
    gain: float = 1.0,
    embedding: float = 1.0,
    centre: float = 1.0,
    bias: float = 0.2,
) -> nn.Module:
    """Draw weights with which every part matters: norms and biases are not trivial."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(parameter: Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                drawn(parameter, embedding)
            elif "norm" in type(module).__name__.lower():
                drawn(parameter, bias, centre if name == "weight" else 0.0)
            elif parameter.ndim >= 2:
                drawn(parameter, gain * parameter[0].numel() ** -0.5)
            else:
                drawn(parameter, bias)
    return model


def tokens(seed: int, *shape: int, below: int, start: int = 3) -> Tensor:
    """Return random token numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(start, below, shape, generator=generator)


def noise(seed: int, *shape: int) -> Tensor:
    """Return normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def paths(pattern: str, *counts: int) -> tuple[str, ...]:
    """Return a path for each number (or for each of the given numbers)."""
    numbers = range(counts[0]) if len(counts) == 1 else counts
    return tuple(pattern.format(number) for number in numbers)


def recode(cls: type[nn.Module], *where: str) -> Edit:
    """Give the modules at some paths the code of another class, under the name they have."""
    named = next(each for each in cls.__mro__ if not each.__name__.startswith("_"))

    def edit(model: nn.Module) -> None:
        cls.__name__ = named.__name__
        for path in where:
            model.get_submodule(path).__class__ = cls

    return edit


def setting(name: str, value: Any, *where: str) -> Edit:
    """Set an attribute of the modules at some paths."""

    def edit(model: nn.Module) -> None:
        for path in where:
            setattr(model.get_submodule(path), name, value)

    return edit


def replaced(make: Callable[[nn.Module], nn.Module], *where: str) -> Edit:
    """Put other modules at some paths."""

    def edit(model: nn.Module) -> None:
        for path in where:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))

    return edit


def reweighed(path: str, change: Callable[[Tensor], Tensor], name: str = "weight") -> Edit:
    """Change one parameter or buffer of the module at a path."""

    def edit(model: nn.Module) -> None:
        tensor = getattr(model.get_submodule(path), name)
        tensor.data = change(tensor.data.clone()).contiguous()

    return edit


def copied(target: str, source: str, name: str = "weight") -> Edit:
    """Load one module with the weight of another."""

    def edit(model: nn.Module) -> None:
        other = getattr(model.get_submodule(source), name)
        getattr(model.get_submodule(target), name).data = other.data.clone()

    return edit


def exchanged(one: str, other: str) -> Edit:
    """Exchange the parameters of two modules of the same kind."""

    def edit(model: nn.Module) -> None:
        first, second = model.get_submodule(one), model.get_submodule(other)
        for left, right in zip(first.parameters(), second.parameters(), strict=True):
            left.data, right.data = right.data, left.data

    return edit


def zeroed(path: str, name: str = "bias") -> Edit:
    """Leave a parameter at zero, as when a conversion forgets it."""
    return reweighed(path, torch.zeros_like, name)


def scaled_row(row: int, factor: float) -> Callable[[Tensor], Tensor]:
    """Scale one row of a weight."""

    def change(weight: Tensor) -> Tensor:
        weight[row] *= factor
        return weight

    return change


def both(*edits: Edit) -> Edit:
    """Do several edits."""

    def edit(model: nn.Module) -> None:
        for each in edits:
            each(model)

    return edit
