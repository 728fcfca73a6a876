"""The candidate's own gradients once more: whether they are the same, and what else they tell.

The candidate gets back what it kept and weighed when the call was made, for as long as that takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from brickline.checking.backward_capture import written_weights
from brickline.checking.backward_direct import Rests, direct_gradients
from brickline.checking.backward_tensors import floats_of
from brickline.checking.backward_visits import Visit
from brickline.checking.backward_vjp import Outcome, Partner, gradient_of, gradients
from brickline.checking.snapshot import State
from brickline.checking.training import Weights

UNSTEADY = 0.5
"""Part of an error by which a second run may differ for the error to be the module's."""


@dataclass(frozen=True)
class Setting:
    """What the two sides keep as a call of the root begins."""

    ours: State
    theirs: State


class Again:
    """The candidate's own gradients for the same call a second time."""

    def __init__(self, visit: Visit, task: int, root: Any, weights: Weights) -> None:
        self._visit, self._task, self._root = visit, task, root
        self._weights = weights
        self._run: Outcome | None = None
        self._tried = False

    def confirms(
        self, key: tuple[str, Any], actual: torch.Tensor | None, exact: torch.Tensor | None
    ) -> bool:
        """Whether the error is there again; True where the call cannot be made again."""
        if not self._tried:
            self._tried = True
            self._run = self._made()
        seen = None if self._run is None else gradient_of(self._run, key)
        if seen is None or actual is None or exact is None:
            return True
        if seen.shape != actual.shape:
            return True
        first = actual.double()
        apart = float((first - seen.double().to(first.device)).norm())
        error = float((first - exact.double().to(first.device)).norm())
        return not apart > UNSTEADY * error

    def direct(self, rests: Rests, clean: Outcome) -> list[tuple[str, torch.Tensor]]:
        """Return the gradients of weights that it reads itself and another one inside owns."""
        if not clean.direct or clean.free or not self._possible():
            return []
        found = direct_gradients(self._visit, self._task, rests, clean, self.as_it_was())
        return list(found)

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Give the candidate what it kept before the call, as long as this lasts."""
        now = State(self._root)
        if self._visit.setting is not None:
            self._visit.setting.ours.restore()
        try:
            with self._weights.as_called():
                yield
        finally:
            now.restore()

    def _possible(self) -> bool:
        """Whether the weights are those of the call, or can be again."""
        visit = self._visit
        return visit.weights == written_weights(visit.module) or self._weights.known()

    def _made(self) -> Outcome | None:
        visit = self._visit
        if not self._possible():
            return None
        names: dict[str, str] = {}
        if isinstance(visit.module, torch.nn.Module):
            names = {name: name for name, _ in visit.module.named_parameters()}
        try:
            with self.as_it_was():
                made = gradients(Partner(visit.module, names, {}), visit, self._task, wide=False)
        except Exception:
            return None
        first = floats_of(visit.returned)
        same = all(
            torch.allclose(mine.double(), again.double(), rtol=1e-2, atol=1e-6)
            for mine, again in zip(first, made.outputs, strict=True)
        )
        return made if same else None
