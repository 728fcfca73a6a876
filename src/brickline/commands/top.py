"""``brickline top``: the bricks of a live process, refreshing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from brickline.commands.watched import WatchedProcess
from brickline.profile import Profile, profile_from_parts
from brickline.report.figures import Column, Look, fitting_table, percent, rate
from brickline.report.text import headline
from brickline.stats import BrickStats


@dataclass(frozen=True)
class Frame:
    """One refresh: the state now, and what has changed since the one before."""

    profile: Profile
    ended: bool = False
    seconds: float = 0.0
    """Since the frame before; 0 for the first."""
    before: Profile | None = None

    def rate(self, row: BrickStats) -> float:
        """Return entries of a brick per second, lately."""
        old = self.before.brick(row.name) if self.before else None
        return self._per_second(row.count, old.count if old else 0)

    def busy(self, row: BrickStats) -> float:
        """Return the part of the time that was spent in a brick, lately."""
        old = self.before.brick(row.name) if self.before else None
        return self._per_second(row.total_ns, old.total_ns if old else 0) / 1e9

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, lately."""
        return self._per_second(
            self.profile.total_tokens, self.before.total_tokens if self.before else 0
        )

    def _per_second(self, now: float, before: float) -> float:
        # A reset in the watched process makes counts fall; that is no negative rate.
        if self.before is None or not self.seconds:
            return 0.0
        return max(0.0, now - before) / self.seconds


def top(
    pid: Annotated[int, typer.Argument(min=1, help="The process to watch.", metavar="PID")],
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.1, help="Seconds between refreshes.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and leave.")] = False,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Print snapshots one after the other, no screen control."),
    ] = False,
) -> None:
    """Watch the bricks of a running process; Ctrl-C leaves it running.

    Example: brickline top 4242 --interval 0.5
    """
    console = Console()
    with WatchedProcess(pid) as process, suppress(KeyboardInterrupt):
        if once:
            _print_frame(console, process, next(frames(process, interval)))
        elif plain or not console.is_terminal:
            for frame in frames(process, interval):
                _print_frame(console, process, frame)
                console.print()
        else:
            _show_live(console, process, interval)


def frames(process: WatchedProcess, interval: float) -> Iterator[Frame]:
    """Give a frame per interval until the process has ended; the last one is its final state."""
    before: Profile | None = None
    then = time.monotonic()
    while True:
        ended = process.wait(0.0)
        parts = process.parts()
        now = time.monotonic()
        if parts or before is None:
            profile = profile_from_parts(parts, name=f"process {process.pid}", is_live=not ended)
            yield Frame(profile, ended, now - then if before else 0.0, before)
            before, then = profile, now
        else:
            yield Frame(before, ended)
        if ended:
            return
        process.wait(interval)


def render_frame(frame: Frame, pid: int, look: Look, width: int, height: int) -> RenderableType:
    """Return a frame as something that rich prints."""
    columns: list[Column[BrickStats]] = [
        Column("Brick", 0, lambda row: row.name, left=True),
        Column("Calls/s", 4, lambda row: rate(frame.rate(row))),
        Column("Busy", 3, lambda row: percent(frame.busy(row)) if frame.before else ""),
        Column("Count", 7, lambda row: str(row.count)),
        Column("Avg", 1, lambda row: look.time(row.avg_ns)),
        Column("p50", 6, lambda row: look.time(row.p50_ns)),
        Column("p99", 5, lambda row: look.time(row.p99_ns)),
        Column("Share", 2, lambda row: percent(frame.profile.share(row))),
    ]
    lines = list(headline(frame.profile, look))
    if frame.before is not None and frame.tokens_per_s:
        lines.append(f"{rate(frame.tokens_per_s)} tokens/s lately")
    if frame.ended:
        lines.append(f"Process {pid} has ended; this is its final state.")
    rows = frame.profile.bricks[: max(3, height - len(lines) - 4)]
    table = fitting_table(look, "Bricks", columns, rows, width)
    return Group(*(look.text(line) for line in lines), table)


def _print_frame(console: Console, process: WatchedProcess, frame: Frame) -> None:
    console.print(render_frame(frame, process.pid, Look.of(console), console.width, 10_000))


def _show_live(console: Console, process: WatchedProcess, interval: float) -> None:
    with Live(console=console, auto_refresh=False) as live:
        for frame in frames(process, interval):
            look = Look.of(console)
            shown = render_frame(frame, process.pid, look, console.width, console.height)
            live.update(shown, refresh=True)
