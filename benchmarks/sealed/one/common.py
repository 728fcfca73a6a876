"""What the architectures of this set share: declaring cases, drawing weights, changing code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from sealed.cases import Case, Pair

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHORT = {F32: "f32", BF16: "bf16", F16: "f16"}


@dataclass(frozen=True)
class Entry:
    """One case of an architecture, before its pair is built."""

    name: str
    change: Callable[[Any], None] | None = None
    """Plants the fault, or rewrites the candidate to something that computes the same."""
    expected: tuple[str, ...] = ()
    cause: str = ""
    dtype: torch.dtype = F32
    precision: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """For the builder of the architecture."""


def declare(
    architecture: str,
    build: Callable[..., Pair],
    entries: Iterable[Entry],
    trained: bool = False,
) -> Iterator[Case]:
    """Yield the cases of an architecture from its entries."""
    for entry in entries:
        yield Case(
            name=f"{architecture}.{entry.name}/{SHORT[entry.dtype]}",
            architecture=architecture,
            make=partial(_make, build, entry),
            dtype=entry.dtype,
            expected=entry.expected,
            cause=entry.cause,
            precision=entry.precision,
            trained=trained,
        )


def _make(build: Callable[..., Pair], entry: Entry) -> Pair:
    torch.manual_seed(0)
    with torch.no_grad():
        pair = build(dtype=entry.dtype, **entry.options)
        if entry.change is not None:
            entry.change(pair.candidate)
        pair.candidate.to(entry.dtype)
    pair.candidate.eval().requires_grad_(False)
    pair.reference.eval().requires_grad_(False)
    return pair


def randomise(model: nn.Module, seed: int, gain: float = 1.0, embedding: float = 1.0) -> None:
    """Draw weights of which none is without effect: also norms and biases are not trivial."""
    generator = torch.Generator().manual_seed(seed)
    drawn = set()

    def draw(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        if id(parameter) in drawn:
            return  # tied to another
        drawn.add(id(parameter))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for module in model.modules():
            kind = type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 1:
                    draw(parameter, 0.2, 0.0 if name == "bias" else 1.0)
                elif kind == "Embedding":
                    draw(parameter, embedding)
                elif kind == "Conv1D":
                    draw(parameter, gain * parameter.shape[0] ** -0.5)
                elif kind == "Conv2d":
                    draw(parameter, gain * parameter[0].numel() ** -0.5)
                else:
                    draw(parameter, gain * parameter.shape[-1] ** -0.5)


def round_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights to what the narrower side can hold, so that both sides have the same."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def rewrite(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Give one module other methods than its class has."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def tokens(batch: int, length: int, vocabulary: int, seed: int = 1, low: int = 3) -> torch.Tensor:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, vocabulary, (batch, length), generator=generator)


def padding(lengths: Iterable[int], width: int, left: bool = False) -> torch.Tensor:
    """Return a mask with 1 at real tokens."""
    mask = torch.zeros(len(list(lengths := tuple(lengths))), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
        if not left:
            mask[row] = mask[row].flip(0)
    return mask


def decode(prompt: torch.Tensor, steps: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    """Run a prompt and then fixed tokens one by one through a model that has ``new_cache``."""
    cache = model.new_cache(prompt.shape[0])
    outputs = [model(prompt, cache=cache)]
    for index in range(steps.shape[1]):
        outputs.append(model(steps[:, index : index + 1], cache=cache))
    return outputs


def scale_row(weight: torch.Tensor, row: int, factor: float = 1.03) -> None:
    """Scale one row of a weight in place."""
    weight[row] *= factor
