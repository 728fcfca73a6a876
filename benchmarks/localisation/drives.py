"""How a model is run: its inputs, a decode loop, a step of training.

A drive gives the same inputs each time and leaves nothing behind, so it may be run again and again.
Knows nothing of the models but that they have `reset` or `new_cache` where they keep something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Run:
    """What `check` is handed: arguments of one call, or a drive."""

    args: tuple[Any, ...] = ()
    drive: Callable[[nn.Module], Any] | None = None

    def __call__(self, model: nn.Module) -> Any:
        """Run a model so."""
        return model(*self.args) if self.drive is None else self.drive(model)


def tokens(seed: int = 0, *, batch: int = 2, length: int = 16, vocab: int = 101) -> Tensor:
    """Return tokens, of which some occur twice."""
    generator = torch.Generator().manual_seed(1000 + seed)
    drawn = torch.randint(vocab, (batch, length), generator=generator)
    drawn[:, length // 2] = drawn[:, 1]
    return drawn


def image(seed: int = 0, *, side: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return two images with borders that matter."""
    generator = torch.Generator().manual_seed(2000 + seed)
    return (torch.randn(2, 3, side, side, generator=generator) + 0.3).to(dtype)


def text(dtype: torch.dtype) -> Run:
    """One call on two rows of tokens."""
    return Run((tokens(),))


def padded(dtype: torch.dtype) -> Run:
    """One call in which the second row is shorter than the first."""
    keep = torch.ones(2, 16, dtype=torch.bool)
    keep[1, 11:] = False
    return Run((tokens(), keep))


def picture(dtype: torch.dtype) -> Run:
    """One call on images."""
    return Run((image(dtype=dtype),))


PROMPT = 5
STEPS = 6
"""A prompt of 5 tokens at position 0 and six steps: positions 1 to 6."""


def decode(dtype: torch.dtype) -> Run:
    """A prompt, then token by token; the model keeps keys and values."""
    given = tokens(3, length=PROMPT + STEPS)

    def drive(model: nn.Module) -> list[Tensor]:
        model.reset()
        with torch.no_grad():
            out = [model(given[:, :PROMPT], torch.arange(PROMPT))]
            for at in range(PROMPT, PROMPT + STEPS):
                out.append(model(given[:, at : at + 1], torch.tensor([at])))
        return out

    return Run(drive=drive)


def decode_with_cache(dtype: torch.dtype) -> Run:
    """The same, and the caller keeps keys and values."""
    given = tokens(3, length=PROMPT + STEPS)

    def drive(model: nn.Module) -> list[Tensor]:
        cache = model.new_cache()
        with torch.no_grad():
            out = [model(given[:, :PROMPT], torch.arange(PROMPT), cache)]
            for at in range(PROMPT, PROMPT + STEPS):
                out.append(model(given[:, at : at + 1], torch.tensor([at]), cache))
        return out

    return Run(drive=drive)


def generate(dtype: torch.dtype) -> Run:
    """Greedy: each token is the model's own choice."""
    given = tokens(4, length=PROMPT)

    def drive(model: nn.Module) -> Tensor:
        model.reset()
        with torch.no_grad():
            out = model(given, torch.arange(PROMPT))
            for at in range(PROMPT, PROMPT + STEPS):
                out = model(out[:, -1:].argmax(-1), torch.tensor([at]))
        return out

    return Run(drive=drive)


def seeded(dtype: torch.dtype) -> Run:
    """One call with the random numbers fixed."""
    given = tokens()

    def drive(model: nn.Module) -> Tensor:
        torch.manual_seed(7)
        with torch.no_grad():
            return model(given)

    return Run(drive=drive)


def train(dtype: torch.dtype) -> Run:
    """One step of training: forward, loss, backward."""
    given = tokens(5)

    def drive(model: nn.Module) -> Tensor:
        model.zero_grad()
        out = model(given[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1).float(), given[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return Run(drive=drive)


def train_picture(dtype: torch.dtype) -> Run:
    """One step of training on images."""
    given = image(5, dtype=dtype)

    def drive(model: nn.Module) -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(given).float(), torch.tensor([3, 7]))
        loss.backward()
        return loss.detach()

    return Run(drive=drive)
