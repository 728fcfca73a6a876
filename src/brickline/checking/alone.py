"""A check without a reference: is every operation what float64 makes of its own inputs?

Drives the candidate as its user does under a `Watch` and writes down what was seen. It verifies
arithmetic. That the right operations are called with the right constants it cannot know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from brickline.checking.alone_report import report_of
from brickline.checking.regions import Regions, is_region, without_insides
from brickline.checking.stage import Stage
from brickline.checking.watching import Progress, Watch
from brickline.oracle.calls import tensors_of
from brickline.oracle.nonfinite import holds_nonfinite
from brickline.verdict import DivergenceReport


def check_alone(
    candidate: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    drive: Callable[[Any], Any] | None = None,
    progress: Progress | None = None,
    repro: Any = None,
) -> DivergenceReport:
    """Hold every operation of a candidate against its own float64 execution.

    Args:
        candidate: A `torch.nn.Module`, or any callable on tensors.
        args: What to call it with, where `drive` is not given.
        kwargs: Keyword arguments that go with `args`.
        drive: Runs the candidate as its user does; called with it.
        progress: Called with operations done, None, and where the candidate is.
        repro: Directory for scripts that show each culprit alone. Default: none are written.

    Returns:
        A report, also where the candidate raised or the user interrupted: of what was seen so far.
    """
    stage = Stage(candidate)
    without_insides(stage)
    watch = Watch(stage, progress)
    calls = _Calls(watch)
    failure: BaseException | None = None
    try:
        with ExitStack() as stack:
            driven = stack.enter_context(calls.standing_in(candidate))
            stack.enter_context(stage.following())
            stack.enter_context(watch)
            if drive is not None:
                drive(driven)
            else:
                driven(*args, **(kwargs or {}))
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        failure = error
    return report_of(watch, calls.nonfinite, failure, repro)


class _Calls:
    """Stands in for the candidate's root, and counts its calls."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._regions = Regions(watch)
        self.nonfinite: set[int] = set()
        """Positions whose output is not finite."""

    @contextmanager
    def standing_in(self, candidate: Any) -> Iterator[Any]:
        """Yield what the driver is to call in the candidate's place."""
        with self._regions.standing_in():
            if not isinstance(candidate, torch.nn.Module):
                call = candidate
                if is_region(candidate):
                    call = self._regions.wrapped(candidate, candidate, "")
                yield functools.partial(self._call, call)
                return
            holder, original = candidate.__dict__, candidate.forward
            name = "forward"
            if holder.get("_compiled_call_impl") is not None:
                name, original = "_compiled_call_impl", holder["_compiled_call_impl"]
            had = holder.get(name)
            holder[name] = self._function(original)
            try:
                yield candidate
            finally:
                if had is None:
                    holder.pop(name, None)
                else:
                    holder[name] = had

    def _function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(original, *args, **kwargs)

        return forward

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._watch.call_of_root():
            output = function(*args, **kwargs)
            self._watch.returned(output)
        if self._watch.depth == 0 and any(map(_is_bad, tensors_of(output))):
            self.nonfinite.add(self._watch.position)
        return output


def _is_bad(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and holds_nonfinite(tensor.detach())
