"""What the architectures of this set share: rows that declare cases, and seeded weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sealed.cases import Case, Pair

FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
SHORT = {FULL: "float32", BRAIN: "bfloat16", HALF: "float16"}


@dataclass(frozen=True)
class Row:
    """One case of an architecture."""

    name: str
    plant: Callable[[nn.Module], object] | None = None
    """Changes the candidate in place, before it is converted to ``dtype``."""
    expected: str | tuple[str, ...] = ()
    """A path, or several; a path with ``{}`` stands for every layer of ``layers``."""
    cause: str = ""
    dtype: torch.dtype = FULL
    precision: bool = False
    kind: str = ""
    """Which pair of the architecture; its builder knows the words."""
    layers: Iterable[int] = (0, 1, 2)

    def paths(self) -> tuple[str, ...]:
        """Return the expected paths, one for each layer."""
        given = (self.expected,) if isinstance(self.expected, str) else self.expected
        return tuple(
            path.replace("{}", str(layer))
            for path in given
            for layer in (self.layers if "{}" in path else (0,))
        )


def cases_of(
    architecture: str,
    build: Callable[[str], Pair],
    rows: Iterable[Row],
    trained: bool = False,
) -> Iterator[Case]:
    """Yield the cases that the rows declare."""
    for row in rows:
        yield Case(
            name=f"{architecture}.{row.name}/{SHORT[row.dtype]}",
            architecture=architecture,
            make=_maker(build, row),
            dtype=row.dtype,
            expected=row.paths(),
            cause=row.cause,
            precision=row.precision,
            trained=trained,
        )


def _maker(build: Callable[[str], Pair], row: Row) -> Callable[[], Pair]:
    def make() -> Pair:
        pair = build(row.kind)
        with torch.no_grad():
            if row.plant is not None:
                row.plant(pair.candidate)
        narrow(pair.candidate, row.dtype).eval()
        pair.reference.eval()
        for side in (pair.candidate, pair.reference):
            side.requires_grad_(False)
        return pair

    return make


def narrow(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the weights; tables and frequencies stay float32, as loaders keep them."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def change(*modules: nn.Module, **members: Any) -> None:
    """Give the modules other methods, as an edit of their class would."""
    for module in modules:
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})


def every(model: nn.Module, kind: type[nn.Module] | str) -> list[nn.Module]:
    """Return the modules of a class, or those whose path ends in a name."""
    if isinstance(kind, str):
        return [module for path, module in model.named_modules() if f".{path}".endswith(f".{kind}")]
    return [module for module in model.modules() if isinstance(module, kind)]


def fill(model: nn.Module, seed: int, gain: float = 1.0, embedding: float = 0.3) -> nn.Module:
    """Draw weights under which every part of a small model matters."""
    draw = torch.Generator().manual_seed(seed)
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if id(weight) in embeddings:
                weight.copy_(embedding * noise)
            elif weight.dim() >= 2 and weight.shape[0] > 1:
                fan = weight[0].numel() if weight.dim() != 3 else weight.shape[-1]
                last = any(part in name for part in ("o_proj", "down_proj", "output.dense"))
                weight.copy_(noise * (0.5 if last else 1.0) * gain * fan**-0.5)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            elif "lambda" in name:
                weight.copy_(0.5 + 0.2 * noise)
            elif "norm" in name.lower():
                weight.copy_(1 + 0.2 * noise)
            else:
                weight.copy_(embedding * noise)
    return exact(model)


def exact(model: nn.Module) -> nn.Module:
    """Round the weights to values that bfloat16 and float16 hold: checkpoints come so."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16().half())
    return model


def tokens(seed: int, *shape: int, vocabulary: int, low: int = 0) -> torch.Tensor:
    """Return token ids drawn with a seed."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(low, vocabulary, shape, generator=draw)


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the values of two tensors."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def rough_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum the last axis one by one in the dtype of x, as a kernel without a wide register does."""
    total = torch.zeros_like(x[..., 0])
    for part in x.unbind(-1):
        total = total + part
    return total.unsqueeze(-1)


def rough_linear(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Multiply one column at a time, with sums in the dtype of x, as a poor split-K does."""
    total = torch.zeros((), dtype=x.dtype)
    for one, other in zip(x.split(1, -1), self.weight.split(1, -1), strict=True):
        total = total + one @ other.T
    return total if self.bias is None else total + self.bias


class Logits(nn.Module):
    """A transformers language model that puts out its logits only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch without padding."""
        return self.model(input_ids=input_ids, use_cache=False).logits


class Stepper(nn.Module):
    """A transformers language model that goes on where the last call ended."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.past = None

    def forward(self, input_ids: torch.Tensor, start: int) -> torch.Tensor:
        """Return the logits of the next tokens; a start of zero forgets what was kept."""
        past = None if start == 0 else self.past
        output = self.model(input_ids=input_ids, past_key_values=past, use_cache=True)
        self.past = output.past_key_values
        return output.logits


def decoding(ids: torch.Tensor, prefill: int) -> Callable[[nn.Module], tuple[torch.Tensor, ...]]:
    """Return what runs a prefill, then one token at a time."""

    def drive(model: nn.Module) -> tuple[torch.Tensor, ...]:
        outputs = [model(ids[:, :prefill], 0)]
        outputs += [model(ids[:, at : at + 1], at) for at in range(prefill, ids.shape[1])]
        return tuple(outputs)

    return drive
