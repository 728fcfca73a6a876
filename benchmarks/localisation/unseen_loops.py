"""How the decoder of `unseen_caches` is run: token by token, in chunks, by beams, by guesses.

The prompt has four tokens and is position 0; token number `at` is position ``at - 3``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from localisation.drives import Run, tokens
from localisation.unseen_caches import BATCH, HEAD, HEADS, LONGEST, VOCAB

PROMPT, END = 4, 13


def _given(length: int = END) -> Tensor:
    return tokens(71, batch=BATCH, length=length, vocab=VOCAB)


def _drive(function: Callable[[nn.Module, torch.dtype], Any]) -> Callable[[torch.dtype], Run]:
    @functools.wraps(function)
    def run(dtype: torch.dtype) -> Run:
        def drive(model: nn.Module) -> Any:
            model.reset()
            with torch.no_grad():
                return function(model, dtype)

        return Run(drive=drive)

    return run


@_drive
def loop(model: nn.Module, dtype: torch.dtype) -> Any:
    """Token by token."""
    given = _given()
    out = [model(given[:, :PROMPT], 0)]
    out += [model(given[:, at : at + 1], at) for at in range(PROMPT, END)]
    return out


@_drive
def chunked(model: nn.Module, dtype: torch.dtype) -> Any:
    """The prompt in three chunks, then token by token."""
    given = _given()
    edges = (0, 3, 6, 8, 9, 10, 11)
    return [model(given[:, a:b], a) for a, b in itertools.pairwise(edges)]


@_drive
def greedy(model: nn.Module, dtype: torch.dtype) -> Any:
    """Each token is the model's own choice."""
    out = model(_given()[:, :PROMPT], 0)
    for at in range(PROMPT, END):
        out = model(out[:, -1:].argmax(-1), at)
    return out


@_drive
def sampled(model: nn.Module, dtype: torch.dtype) -> Any:
    """Each token is drawn, with a seed."""
    torch.manual_seed(5)
    out = model(_given()[:, :PROMPT], 0)
    for at in range(PROMPT, END):
        drawn = torch.multinomial((out[:, -1].float() / 0.8).softmax(-1), 1)
        out = model(drawn, at)
    return out


@_drive
def beams(model: nn.Module, dtype: torch.dtype) -> Any:
    """The two rows are beams, one of which may go on twice."""
    out = model(_given()[:1, :PROMPT].repeat(2, 1), 0)
    for at in range(PROMPT, END):
        _scores, chosen = out[:, -1].float().log_softmax(-1).topk(3)
        beam = torch.tensor([1, 0] if at % 2 == 0 else [0, 0])
        rank = torch.tensor([0, 1])
        out = model(chosen[beam, rank][:, None], at, None, beam)
    return out


@_drive
def handed(model: nn.Module, dtype: torch.dtype) -> Any:
    """What is kept comes out of each call and goes into the next."""
    given, past = _given(), ((), ())
    logits, past = model(given[:, :PROMPT], 0, past)
    for at in range(PROMPT, END):
        logits, past = model(given[:, at : at + 1], at, past)
    return logits


@_drive
def guessed(model: nn.Module, dtype: torch.dtype) -> Any:
    """Three tokens at a time, of which some are taken back."""
    given, past = _given(24), ((), ())
    logits, past = model(given[:, :PROMPT], 0, past)
    start = PROMPT
    for accepted in (3, 2, 3, 1, 2):
        guess = (
            given[:, start : start + 3] if accepted == 3 else given[:, start : start + 3].flip(1)
        )
        logits, past = model(guess, start, past)
        start += accepted
    return logits


@_drive
def pooled(model: nn.Module, dtype: torch.dtype) -> Any:
    """The caller's tensor holds what all layers keep."""
    given, pool = _given(), torch.zeros(2, 2, BATCH, LONGEST, HEADS, HEAD, dtype=dtype)
    logits = model(given[:, :PROMPT], 0, pool)
    for at in range(PROMPT, END):
        logits = model(given[:, at : at + 1], at, pool)
    return logits
