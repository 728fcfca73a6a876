"""``brickline top``: the bricks of a live process, in a terminal interface or as plain text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live as Redrawn

from brickline.report.figures import Look
from brickline.top.live import Frame, Live
from brickline.top.machine import Machine
from brickline.top.plain import render_frame
from brickline.top.snapshot import recorded_name, save_snapshot
from brickline.top.watched import WatchedProcess

WITHOUT_TEXTUAL = "Sort, filter, pause and more views: pip install 'brickline[tui]'"


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
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="RUN", help="Keep what is recorded by now as a run, and leave."
        ),
    ] = None,
) -> None:
    """Watch the bricks of a running process; leaving lets it run on.

    Example: brickline top 4242 --interval 0.5
    """
    console = Console()
    with WatchedProcess(pid) as process, suppress(KeyboardInterrupt):
        if save is not None:
            saved = save_snapshot(process, save)
            console.print(Look.of(console).text(f"Saved {saved}"), soft_wrap=True)
        elif once:
            _print_frame(console, process, Live(process).look(whole=True))
        elif plain or not _can_redraw(console):
            for frame in frames(process, interval):
                _print_frame(console, process, frame)
                console.print()
        elif _can_show_app(console):
            _run_app(process, interval)
        else:
            _redraw(console, process, interval)


def frames(process: WatchedProcess, interval: float) -> Iterator[Frame]:
    """Give a frame per interval until the process has ended; the last one is its final state."""
    live, machine = Live(process), Machine(process.pid)
    try:
        while True:
            frame = live.look(machine.look())
            yield replace(frame, whole=True) if frame.ended else frame
            if frame.ended:
                return
            process.wait(interval)
    finally:
        machine.close()


def _can_redraw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _can_show_app(console: Console) -> bool:
    """Whether textual is there, and keys and every character of the screen reach us."""
    known = importlib.util.find_spec("textual") is not None
    return known and sys.stdin.isatty() and Look.of(console).unicode


def _title(process: WatchedProcess) -> str:
    name = recorded_name(process)
    return name if name == f"process {process.pid}" else f"{name} (process {process.pid})"


def _run_app(process: WatchedProcess, interval: float) -> None:
    from brickline.top.app import TopApp

    app = TopApp(process, interval)
    app.run()
    for path in app.saved:
        typer.echo(f"Saved {path}; show it with `brickline report {path}`")
    if app.return_code:  # textual has printed what happened
        raise typer.Exit(2)


def _print_frame(console: Console, process: WatchedProcess, frame: Frame) -> None:
    console.print(render_frame(frame, _title(process), Look.of(console), console.width))


def _redraw(console: Console, process: WatchedProcess, interval: float) -> None:
    look, title = Look.of(console), _title(process)
    if importlib.util.find_spec("textual") is None:
        console.print(look.text(WITHOUT_TEXTUAL, "dim"))
    with Redrawn(console=console, auto_refresh=False) as redrawn:
        for frame in frames(process, interval):
            shown = render_frame(frame, title, look, console.width, console.height)
            redrawn.update(shown, refresh=True)
