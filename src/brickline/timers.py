"""Timers: spans that the caller times, and spans that end together.

Owns the deferred arithmetic of the seed and supplied durations. Measuring itself is the core's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from brickline.abi import MAX_ELEMENTS, MAX_FLOPS
from brickline.bricks import BrickId
from brickline.errors import CountError, UsageError

if TYPE_CHECKING:
    from brickline import _core


def checked_count(name: str, value: Any, limit: int = MAX_ELEMENTS) -> int:
    """Return a count that a record can hold.

    Raises:
        CountError: if it is negative, not whole, or too large.
    """
    if isinstance(value, float) and not value.is_integer():
        raise CountError(f"{name}: expected a whole number from 0 to {limit}, got {value!r}")
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if isinstance(value, bool | str) or not 0 <= number <= limit:
        raise CountError(f"{name}: expected a whole number from 0 to {limit}, got {value!r}")
    return number


def checked_flag(name: str, value: Any) -> bool:
    """Return a yes or no.

    Raises:
        UsageError: if it is neither.
    """
    if not isinstance(value, int) or value not in (0, 1):
        raise UsageError(f"{name}: expected True or False, got {value!r:.80}")
    return bool(value)


def checked_flops(flops: float) -> float:
    """Return a number of operations.

    Raises:
        CountError: if it is negative, not finite, too large, or no number.
    """
    try:
        number = float(flops)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(flops, str) or not 0 <= number <= MAX_FLOPS:
        raise CountError(f"flops: expected a number from 0 to {MAX_FLOPS:g}, got {flops!r}")
    return number


@dataclass(frozen=True, slots=True)
class _Pending:
    brick: BrickId | str
    start_ns: int
    elements: int


class Timers:
    """Times bricks into a profiler; reached as `BrickProfiler.timers`."""

    __slots__ = (
        "_core",
        "_epoch_ns",
        "_pending",
        "brick",
        "mark",
        "start",
        "start_brick",
        "stop",
        "stop_brick",
    )

    brick: Callable[..., _core.BrickHandle]
    start_brick: Callable[..., _core.BrickTimer]
    stop_brick: Callable[..., None]
    start: Callable[..., _core.BrickTimer]
    stop: Callable[..., None]
    mark: Callable[..., None]

    def __init__(self, core: _core.ProfilerCore) -> None:
        self._core = core
        self._pending: deque[_Pending] = deque()
        self._epoch_ns = core._now_ns()
        # The native calls themselves, so that they cost no Python frame.
        self.brick = core.brick
        self.start_brick = core.start_brick
        self.stop_brick = core.stop_brick
        self.start = core.start
        self.stop = core.stop
        self.mark = core.mark

    def record_elapsed(
        self,
        brick: BrickId | str,
        elapsed: timedelta | int,
        elements: int = 1,
        *,
        layer: int | None = None,
        bytes_in: int = 0,
        bytes_out: int = 0,
        flops: float = 0.0,
        cycles: int = 0,
    ) -> None:
        """Record a duration that was measured elsewhere.

        Its length is exact but its place in time is not known, so it takes no part in the coverage
        of steps and has no exclusive time.

        Args:
            brick: A `BrickId` or a name.
            elapsed: Nanoseconds, or a `timedelta`.
            elements: Elements processed.
            layer: Layer, where there is one.
            bytes_in: Bytes read, before compression.
            bytes_out: Bytes written, after compression.
            flops: Operations done.
            cycles: Cycles that a counter measured; 0 where none did.
        """
        if not self._core.is_enabled():
            return
        if isinstance(elapsed, timedelta):
            elapsed = (elapsed // timedelta(microseconds=1)) * 1000
        self._core._record(
            brick,
            checked_count("elapsed", elapsed, 2**62),
            checked_count("elements", elements),
            layer=layer,
            bytes_in=checked_count("bytes_in", bytes_in, 2**60),
            bytes_out=checked_count("bytes_out", bytes_out, 2**60),
            flops=checked_flops(flops),
            cycles=checked_count("cycles", cycles, 2**48 - 1),
        )

    def elapsed_ns(self) -> int:
        """Return the nanoseconds since the epoch; what `record_deferred` takes as a start."""
        return self._core._now_ns() - self._epoch_ns

    def reset_epoch(self) -> None:
        """Count `elapsed_ns` from now on, as at the start of a pass."""
        self._epoch_ns = self._core._now_ns()

    def record_deferred(self, brick: BrickId, start_ns: int, elements: int = 1) -> None:
        """Note a span that ends when `finalize` is called."""
        self._defer(brick, start_ns, elements)

    def record_deferred_dynamic(self, name: str, start_ns: int, elements: int = 1) -> None:
        """Note a span by name; a known name or alias goes to its id."""
        self._defer(name, start_ns, elements)

    def _defer(self, brick: BrickId | str, start_ns: int, elements: int) -> None:
        if not self._core.is_enabled():
            return
        self._core.brick(brick)  # refuses an unknown id here, where its caller can be seen
        self._pending.append(
            _Pending(
                brick,
                checked_count("start_ns", start_ns, 2**62),
                checked_count("elements", elements),
            )
        )

    def finalize(self, end_ns: int) -> None:
        """End every pending span at `end_ns`.

        All share one end, so their sum may exceed the wall time; they are marked approximate and
        stay out of coverage. A start after the end gives 0. While the profiler is disabled they
        go on waiting.
        """
        end_ns = checked_count("end_ns", end_ns, 2**62)
        if not self._core.is_enabled():
            return
        for _ in range(len(self._pending)):
            try:
                span = self._pending.popleft()
            except IndexError:  # another thread finalizes, too
                return
            duration_ns = max(0, end_ns - span.start_ns)
            self._core._record(span.brick, duration_ns, span.elements, approximate=True)

    def pending_count(self) -> int:
        """Return how many spans wait for `finalize`."""
        return len(self._pending)

    def has_pending(self) -> bool:
        """Whether any span waits for `finalize`."""
        return bool(self._pending)

    def _restart(self) -> None:
        self._drop_pending()
        self.reset_epoch()

    def _drop_pending(self) -> None:
        self._pending.clear()

    def __repr__(self) -> str:
        return f"<timers of {self._core!r}>"


class TimerCalls:
    """The calls of `Timers` on the profiler itself; a base of `BrickProfiler`, never used alone."""

    __slots__ = ()

    if TYPE_CHECKING:
        timers: Timers

    def record_elapsed(
        self, brick: BrickId | str, elapsed: timedelta | int, elements: int = 1, **work: Any
    ) -> None:
        """Record a duration that was measured elsewhere; see `Timers.record_elapsed`."""
        self.timers.record_elapsed(brick, elapsed, elements, **work)

    def record_deferred(self, brick: BrickId, start_ns: int, elements: int = 1) -> None:
        """Note a span that ends when `finalize` is called."""
        self.timers.record_deferred(brick, start_ns, elements)

    def record_deferred_dynamic(self, name: str, start_ns: int, elements: int = 1) -> None:
        """Note a span by name that ends when `finalize` is called."""
        self.timers.record_deferred_dynamic(name, start_ns, elements)

    def finalize(self, end_ns: int) -> None:
        """End every pending span; see `Timers.finalize`."""
        self.timers.finalize(end_ns)

    def pending_count(self) -> int:
        """Return how many spans wait for `finalize`."""
        return self.timers.pending_count()

    def has_pending(self) -> bool:
        """Whether any span waits for `finalize`."""
        return self.timers.has_pending()

    def elapsed_ns(self) -> int:
        """Return the nanoseconds since the epoch."""
        return self.timers.elapsed_ns()

    def reset_epoch(self) -> None:
        """Count `elapsed_ns` from now on."""
        self.timers.reset_epoch()
