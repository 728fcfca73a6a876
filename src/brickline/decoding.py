"""Decoding: a decoder on a device, somewhere in a text, and the loop that goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from brickline.errors import UsageError
from brickline.executor.prepared import PreparedPlan
from brickline.symbolic_values import integer_of

if TYPE_CHECKING:
    from brickline.decoder import Decoder
    from brickline.profiler import BrickProfiler


class Decoding:
    """A decoder on a device, somewhere in a text."""

    def __init__(
        self, decoder: Decoder, prepared: PreparedPlan, profiler: BrickProfiler | None = None
    ) -> None:
        self.config = decoder.config
        self.prepared = prepared
        self.profiler = profiler
        self.position = 0
        """Where the next token stands."""

    def step(self, token: int | None = None, *, phase: str = "decode") -> None:
        """Run one token; the next one is found by `token` and fed by a step without one.

        Raises:
            UsageError: The caches are full, or the token is none of the vocabulary.
        """
        if self.position >= self.config.capacity:
            raise UsageError(
                f"expected at most {self.config.capacity} positions, as the caches have; begin "
                "again with restart(), or make a decoder of a larger capacity"
            )
        if token is not None:
            self.prepared.write("token", np.array([self._checked_token(token)], np.int32))
        within = (
            nullcontext() if self.profiler is None else self.profiler.step(tokens=1, phase=phase)
        )
        with within:
            self.prepared(position=self.position)
        self.position += 1

    def _checked_token(self, token: object) -> int:
        number = integer_of(token)
        if number is None or not 0 <= number < self.config.vocabulary:
            raise UsageError(
                f"expected a token from 0 to {self.config.vocabulary - 1}, got {token!r:.80}"
            )
        return number

    @property
    def token(self) -> int:
        """The token that the last step found, after waiting for it."""
        return int(self.prepared.read("token")[0])

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the last step, after waiting for them."""
        return self.prepared.read("logits")

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Feed a prompt, and return the tokens that follow, each the most likely one.

        Raises:
            UsageError: The prompt is empty, has a token of no vocabulary, or does not fit into the
                caches with what follows. Nothing has run then.
        """
        tokens = [self._checked_token(token) for token in _listed(prompt)]
        wanted = integer_of(count)
        if wanted is None or wanted < 0:
            raise UsageError(f"count: expected a number of tokens from 0 on, got {count!r:.80}")
        needed = self.position + len(tokens) + max(wanted - 1, 0)
        if needed > self.config.capacity:
            raise UsageError(
                f"expected at most {self.config.capacity} positions, as the caches have; the "
                f"prompt and what follows need {needed}, {self.position} of them are taken: begin "
                "again with restart(), or make a decoder of a larger capacity"
            )
        for token in tokens:
            self.step(token, phase="prefill")
        found = [self.token] if wanted > 0 else []
        while len(found) < wanted:
            self.step()
            found.append(self.token)
        return found

    def restart(self) -> None:
        """Begin another text; what the caches hold of the last one is not read again."""
        self.position = 0

    def __repr__(self) -> str:
        on, place = self.prepared, f"position {self.position} of {self.config.capacity}"
        return f"<Decoding on {on.device}, {on.executor}, at {place}>"


def _listed(prompt: Any) -> list[Any]:
    """Return the tokens of a list, a tuple or an array of one axis, a tensor's too."""
    shape = getattr(prompt, "shape", None)
    if shape is not None and len(shape) == 1 and shape[0] and hasattr(prompt, "tolist"):
        return list(prompt.tolist())
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence) or not len(prompt):
        axes = f" of {len(shape)} axes; take one row of it" if shape is not None else ""
        raise UsageError(f"expected a prompt as a list of tokens, got {prompt!r:.80}{axes}")
    return list(prompt)
