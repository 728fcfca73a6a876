"""Tiles: the parts of a brick's blocked work, at three levels.

Owns the levels and the calls that time a tile; the statistics of tiles are in
`brickline.profile_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from brickline.timers import checked_count, checked_flops

if TYPE_CHECKING:
    from brickline import _core
    from brickline.profile_rows import TileStats


MAX_PLACE = 2**32 - 2
"""The last row or column that a cell can name."""


class TileLevel(IntEnum):
    """How far down the blocking of a brick a tile lies."""

    MACRO = 0
    """Blocks for the last-level cache, or a GPU's global memory."""
    MIDI = 1
    """Blocks for the second-level cache, or a GPU's shared memory."""
    MICRO = 2
    """Blocks for registers."""

    @property
    def label(self) -> str:
        """The name shown in reports."""
        return self.name.lower()


class Tiles:
    """Times tiles into a profiler; reached as `BrickProfiler.tiles`.

    A tile belongs to the brick that is open when it starts. Its time is not taken from that
    brick's exclusive time: a tile is a part of the brick, not another one.
    """

    __slots__ = ("_core", "_enabled", "_reset", "_stats", "start", "stop")

    start: Callable[..., Any]
    """start(level, row=0, column=0): begin a tile; hand the timer to `stop`."""
    stop: Callable[..., None]
    """stop(timer, elements=1, flops=0, bytes=0): end a tile and record it."""

    def __init__(
        self,
        core: _core.ProfilerCore,
        stats: Callable[[Iterable[int]], tuple[TileStats, ...]],
        reset: Callable[[], None],
    ) -> None:
        self._core = core
        self._stats = stats
        self._reset = reset
        self._enabled = True
        # The native calls themselves, so that a tile costs no Python frame.
        self.start = core._tile_start
        self.stop = core._tile_stop

    def enable(self) -> None:
        """Record tiles whenever the profiler is enabled; the default."""
        self._enabled = True
        self._core._configure(tiles=True)

    def disable(self) -> None:
        """Record no tiles; bricks are not affected."""
        self._enabled = False
        self._core._configure(tiles=False)

    def is_enabled(self) -> bool:
        """Whether tiles are recorded while the profiler is enabled."""
        return self._enabled

    def record(
        self,
        level: TileLevel,
        duration_ns: int,
        *,
        row: int = 0,
        column: int = 0,
        elements: int = 1,
        flops: float = 0.0,
        bytes: int = 0,  # noqa: A002 - the same word as everywhere else
    ) -> None:
        """Record a tile that was timed elsewhere, such as inside a kernel."""
        self._core._tile_record(
            checked_count("level", level, len(TileLevel) - 1),
            checked_count("row", row, MAX_PLACE),
            checked_count("column", column, MAX_PLACE),
            checked_count("duration_ns", duration_ns, 2**62),
            checked_count("elements", elements),
            checked_flops(flops),
            checked_count("bytes", bytes, 2**60),
        )

    def reset(self) -> None:
        """Forget the statistics of all tiles, and go on recording; bricks keep theirs.

        Raises:
            UsageError: if the profiler was closed.
        """
        self._reset()

    def stats(self, level: TileLevel) -> TileStats:
        """Return the statistics of one level; count 0 where no tile was recorded."""
        (row,) = self._stats([checked_count("level", level, len(TileLevel) - 1)])
        return row

    def all_stats(self) -> tuple[TileStats, ...]:
        """Return the statistics of every level, indexed by `TileLevel`."""
        return self._stats(TileLevel)
