"""How far rounding carries into a gradient: the reference's call, disturbed as rounding would."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from brickline.checking.backward_visits import Visit
from brickline.checking.backward_vjp import Outcome, Partner, gradient_of, gradients
from brickline.checking.snapshot import State

DISTURBANCES = 2
"""How often rounding is imitated before a gradient is held to be wrong."""


class Disturbed:
    """How far rounding carries, found out where a gradient looks wrong."""

    def __init__(
        self,
        partner: Partner,
        visit: Visit,
        task: int,
        state: State | None,
        other_code: bool,
        direct: Collection[str],
    ) -> None:
        self._other_code, self._direct = other_code, direct
        self._ask = (partner, visit, task)
        self._state = state
        self._runs: list[Outcome] | None = None

    def noise(self, key: tuple[str, Any], exact: torch.Tensor) -> torch.Tensor | None:
        """Return the error that rounding of the inputs makes in one gradient."""
        if self._runs is None:
            self._runs = []
            for seed in range(DISTURBANCES):
                if self._state is not None:
                    self._state.restore()
                with torch.no_grad():
                    run = gradients(
                        *self._ask,
                        wide=True,
                        seed=seed,
                        every_operation=self._other_code,
                        direct=self._direct,
                    )
                    self._runs.append(run)
        squares = torch.zeros_like(exact)
        for run in self._runs:
            found = gradient_of(run, key)
            if found is not None:
                squares += (found - exact).square()
        return (squares / DISTURBANCES).sqrt()
