"""Frames as plain text: one after the other for a log, or in place where rich can redraw.

Names are shown as they are, never read as markup. It knows frames, not processes.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType

from brickline.abi import SlotKind
from brickline.report.figures import Column, Look, fitting_table, percent, rate
from brickline.top.live import Frame, Order
from brickline.top.machine import GpuLoad, MachineLoad

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render_frame(
    frame: Frame, title: str, look: Look, width: int, height: int | None = None
) -> RenderableType:
    """Return a frame as something that rich prints.

    Args:
        frame: what to show.
        title: the process, in words.
        look: what the console can show.
        width: columns of the terminal.
        height: its rows; all bricks are shown when None.
    """
    lines = [*headline(frame, title, look), *load_lines(frame.load)]
    if frame.ended:
        lines.append("The process has ended; this is its final state.")
    rows = frame.bricks(Order.SHARE)
    if height is not None:
        rows = rows[: max(3, height - len(lines) - 4)]
    figures = frame.figures(rows)
    known_rate, known_busy = figures.rate, figures.busy
    columns: list[Column[int]] = [
        Column("Brick", 0, lambda at: frame.rows[rows[at]].name, left=True),
        Column("Calls/s", 4, lambda at: rate(known_rate[at]) if known_rate else ""),
        Column("Busy", 3, lambda at: percent(known_busy[at]) if known_busy else ""),
        Column("Count", 7, lambda at: f"{figures.count[at]:.0f}"),
        Column("Avg", 1, lambda at: look.time(figures.avg_ns[at])),
        Column("p50", 6, lambda at: look.time(figures.p50_ns[at])),
        Column("p99", 5, lambda at: look.time(figures.p99_ns[at])),
        Column("Share", 2, lambda at: percent(figures.share[at])),
    ]
    table = fitting_table(look, "Bricks", columns, range(len(rows)), width)
    return Group(*(look.text(line) for line in lines), table)


def headline(frame: Frame, title: str, look: Look) -> Iterator[str]:
    """Give what comes first: tokens, time of a step, and what the figures are over."""
    steps = frame.places(SlotKind.STEP)
    parts = [title]
    if steps:
        count = int(sum(frame.now.sums["count"][steps]))
        parts.append(f"{count} steps, {frame.tokens} tokens")
    if frame.tokens_per_s:
        parts.append(f"{rate(frame.tokens_per_s)} tokens/s lately")
    yield " · ".join(parts)
    if frame.decode is not None:
        p50, p99 = (frame.quantiles([frame.decode], each)[0] for each in (0.5, 0.99))
        phase = frame.rows[frame.decode].name or "step"
        if p50:
            yield f"{phase}: p50 {look.time(p50)}, p99 {look.time(p99)} · {period(frame)}"
    if frame.now.lost:
        yield f"{frame.now.lost} entries found no space and are missing."


def period(frame: Frame) -> str:
    """Say what the figures of a frame are over."""
    if frame.window_s is None:
        return "figures since the recording began"
    return f"figures of the last {frame.window_s:.0f} s"


def load_lines(load: MachineLoad | None) -> Iterator[str]:
    """Give a line for the process and one for each GPU; what is not known is left out."""
    if load is None:
        return
    found = []
    if load.cpu is not None:
        cores = f" of {load.cores} cores" if load.cores else ""
        found.append(f"CPU {100 * load.cpu:.0f} %{cores}")
    if load.resident_bytes is not None:
        found.append(f"{size(load.resident_bytes)} resident")
    if load.threads is not None:
        found.append(f"{load.threads} thread{'s' * (load.threads != 1)}")
    if load.machine_cpu is not None:
        found.append(f"machine {100 * load.machine_cpu:.0f} % busy")
    if found:
        yield " · ".join(found)
    for gpu in load.gpus:
        yield " · ".join(gpu_figures(gpu))


def gpu_figures(gpu: GpuLoad) -> Iterator[str]:
    """Give what is known of a GPU, its name first."""
    yield f"GPU {gpu.index} {gpu.name}"
    if gpu.busy is not None:
        yield f"{100 * gpu.busy:.0f} % busy"
    if gpu.used_bytes is not None and gpu.total_bytes is not None:
        yield f"{size(gpu.used_bytes)} of {size(gpu.total_bytes)}"
    if gpu.process_bytes is not None:
        yield f"{size(gpu.process_bytes)} by the process"
    if gpu.power_w is not None:
        yield f"{gpu.power_w:.0f} W"
    if gpu.temperature_c is not None:
        yield f"{gpu.temperature_c:.0f} °C"


def size(count: float) -> str:
    """Return bytes in the unit that keeps them short."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
