"""What the screen says: frames become lines and columns of styled pieces of text.

Pure functions; it knows neither textual nor colours. A piece is a text and the name of its style,
and no text is ever read as markup. Cells are made for the rows in view alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from brickline.abi import SlotKind
from brickline.bricks import BrickCategory
from brickline.histogram import FIRST_INDEX
from brickline.report.figures import Look, rate
from brickline.top.live import Figures, Frame, Order
from brickline.top.machine import GpuLoad, MachineLoad
from brickline.top.plain import size

Piece: TypeAlias = tuple[str, str]
"""Text, and the name of its style."""
Line: TypeAlias = tuple[Piece, ...]

LOOK = Look()
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKS_UP = " " + _SPARKS
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class ViewColumn:
    """One column; the higher the rank, the sooner it gives way."""

    title: str
    width: int
    """0: what the others leave."""
    rank: int
    cell: Callable[[int], Line | str]
    """Gives the cell of the n-th row in view."""
    left: bool = False
    order: Order | None = None
    """What a click on the title sorts by."""
    draw: Callable[[int, int], Line] | None = None
    """Gives the cell for a width, in place of `cell`."""


@dataclass(frozen=True)
class View:
    """A table: what its rows are, and the columns for those of them that are in view."""

    keys: Sequence[Any]
    columns: Callable[[Sequence[Any]], list[ViewColumn]]
    empty: str
    """What stands there when there are no rows."""


# --------------------------------------------------------------------------------- small pictures


def bar(share: float, width: int, style: str) -> Line:
    """Return a bar of a share from 0 to 1 on its track."""
    return stacked([(share, style)], width)


def stacked(shares: Sequence[tuple[float, str]], width: int) -> Line:
    """Return a bar of several shares that together are at most 1."""
    pieces: list[Piece] = []
    done, reached = 0, 0.0
    for at, (share, style) in enumerate(shares):
        reached = min(1.0, reached + max(0.0, share))
        end = round(reached * width * 8)
        whole = end // 8 - done
        if whole > 0:
            pieces.append(("█" * whole, style))
            done += whole
        if at == len(shares) - 1 and end % 8 and done < width:
            pieces.append((_EIGHTHS[end % 8], f"{style} track"))
            done += 1
    if done < width:
        pieces.append((" " * (width - done), "track"))
    return tuple(pieces)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values as a line of blocks, scaled to the largest."""
    last = values[-width:]
    high = max(last, default=0.0)
    if high <= 0:
        return ("▁" * len(last)).rjust(width)
    steps = len(_SPARKS) - 1
    return "".join(_SPARKS[round(value / high * steps)] for value in last).rjust(width)


def percent(share: float) -> str:
    """Return a share from 0 to 1 as a percentage."""
    return f"{100 * share:.1f} %"


def count(value: float) -> str:
    """Return a count that fits into seven characters."""
    if value < 1e6:
        return f"{value:.0f}"
    for unit, digits in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if value < digits * 1e3:
            return f"{value / digits:.2f} {unit}"
    return f"{value:.1e}"


# ------------------------------------------------------------------------------------------ tables


def bricks_view(frame: Frame, order: Order, *, reverse: bool = False, wanted: str = "") -> View:
    """Return the bricks, sorted and filtered."""
    keys = frame.bricks(order, reverse=reverse, wanted=wanted)
    empty = f"No brick's name holds “{wanted}”." if wanted else "No brick was recorded yet."
    return View(keys, lambda rows: _brick_columns(frame, rows), empty)


def _brick_columns(frame: Frame, rows: Sequence[int]) -> list[ViewColumn]:
    figures = frame.figures(rows)
    largest = max(figures.share, default=0.0) or 1.0

    def name(at: int) -> Line:
        row = frame.rows[rows[at]]
        return (("▎", row.category.label), (LOOK.plain(row.name), "name"))

    def share_bar(at: int) -> Line:
        style = frame.rows[rows[at]].category.label
        return bar(figures.share[at] / largest, 10, style)

    def trend(at: int) -> Line:
        return ((sparkline(frame.trend(rows[at], 16), 16), "trend"),)

    columns = [
        ViewColumn("Brick", 0, 0, name, left=True, order=Order.NAME),
        ViewColumn("", 10, 5, share_bar, left=True),
        ViewColumn("Share", 7, 0, lambda at: percent(figures.share[at]), order=Order.SHARE),
        *_timing_columns(figures),
        ViewColumn("Count", 8, 8, lambda at: count(figures.count[at]), order=Order.COUNT),
    ]
    if any(figures.gflops):
        columns.append(ViewColumn("GFLOP/s", 8, 9, lambda at: rate(figures.gflops[at])))
    if any(figures.gbps):
        columns.append(ViewColumn("GB/s", 7, 10, lambda at: rate(figures.gbps[at])))
    columns.append(ViewColumn("Busy, lately", 16, 2, trend, left=True))
    return columns


def _timing_columns(figures: Figures) -> list[ViewColumn]:
    calls, busy = figures.rate, figures.busy
    return [
        ViewColumn("Busy", 7, 7, lambda at: percent(busy[at]) if busy else "", order=Order.BUSY),
        ViewColumn("Calls/s", 8, 3, lambda at: rate(calls[at]) if calls else "", order=Order.RATE),
        ViewColumn("Avg", 8, 1, lambda at: _time(figures.avg_ns[at]), order=Order.AVG),
        ViewColumn("p50", 8, 6, lambda at: _time(figures.p50_ns[at]), order=Order.P50),
        ViewColumn("p99", 8, 4, lambda at: _tail(figures, at), order=Order.P99),
    ]


def _tail(figures: Figures, at: int) -> Line:
    """Return the 99th percentile, marked where it is far from the median."""
    far = figures.p99_ns[at] > 10 * figures.p50_ns[at] > 0
    return ((_time(figures.p99_ns[at]), "warn" if far else ""),)


def _time(ns: float) -> str:
    """Return a duration; nothing where no entry was timed."""
    return LOOK.time(ns) if ns else ""


def categories_view(frame: Frame) -> View:
    """Return the categories, largest first."""
    shares = dict(frame.categories)
    calls = frame.second is not None and _calls_by_category(frame)

    def columns(keys: Sequence[BrickCategory]) -> list[ViewColumn]:
        def part(at: int, width: int) -> Line:
            return bar(shares[keys[at]], width, keys[at].label)

        return [
            ViewColumn("Category", 9, 0, lambda at: ((keys[at].label, keys[at].label),), left=True),
            ViewColumn("Share", 7, 0, lambda at: percent(shares[keys[at]])),
            ViewColumn("Calls/s", 8, 1, lambda at: rate(calls[keys[at]]) if calls else ""),
            ViewColumn("", 0, 0, lambda at: "", left=True, draw=part),
        ]

    return View([each for each, _ in frame.categories], columns, "No brick was recorded yet.")


def _calls_by_category(frame: Frame) -> dict[BrickCategory, float]:
    bricks = frame.places(SlotKind.BRICK)
    sums = dict.fromkeys(BrickCategory, 0.0)
    for at, calls in zip(bricks, frame.figures(bricks).rate or (), strict=False):
        sums[frame.rows[at].category] += calls
    return sums


def layers_view(frame: Frame) -> View:
    """Return the layers in order, each with what its categories took."""
    cells = dict(frame.layers)
    totals = {layer: float(each.sum()) for layer, each in cells.items()}
    whole, longest = sum(totals.values()) or 1.0, max(totals.values(), default=0.0) or 1.0

    def columns(keys: Sequence[int]) -> list[ViewColumn]:
        def parts(at: int, width: int) -> Line:
            shares = cells[keys[at]] / longest
            found = [(float(shares[each]), each.label) for each in BrickCategory if shares[each]]
            return stacked(found, width)

        return [
            ViewColumn("Layer", 6, 0, lambda at: str(keys[at])),
            ViewColumn("Share", 7, 1, lambda at: percent(totals[keys[at]] / whole)),
            ViewColumn("Time", 9, 0, lambda at: LOOK.time(totals[keys[at]])),
            ViewColumn("", 0, 0, lambda at: "", left=True, draw=parts),
        ]

    return View(list(cells), columns, "No brick has a layer; give one with brick(..., layer=n).")


def tiles_view(frame: Frame) -> View:
    """Return the tiles by level and brick."""
    keys = sorted(
        frame.places(SlotKind.TILE), key=lambda at: (frame.rows[at].level, frame.rows[at].name)
    )

    def columns(rows: Sequence[int]) -> list[ViewColumn]:
        figures = frame.figures(rows)
        return [
            ViewColumn("Brick", 0, 0, lambda at: LOOK.plain(frame.rows[rows[at]].name), left=True),
            ViewColumn("Level", 6, 0, lambda at: frame.rows[rows[at]].level_name, left=True),
            ViewColumn("Count", 8, 8, lambda at: count(figures.count[at])),
            *_timing_columns(figures),
            ViewColumn("GFLOP/s", 8, 2, lambda at: rate(figures.gflops[at])),
        ]

    return View(keys, columns, "No tile was recorded; mark them with profiler.tiles.")


# ------------------------------------------------------------------------------------ head and side


@dataclass(frozen=True)
class Status:
    """What the head says beside the figures."""

    name: str
    pid: int
    paused: bool = False


def head_lines(frame: Frame, status: Status, width: int, height: int) -> list[Line]:
    """Return the lines above the table, the most important first."""
    lines = [_title_line(frame, status, width), _tokens_line(frame, width)]
    if frame.load is not None:
        lines += _load_lines(frame.load, width)
    return [line for line in lines if line][: max(1, height)]


def _title_line(frame: Frame, status: Status, width: int) -> Line:
    state = ("live", "good")
    if frame.ended or status.paused:
        state = ("ended", "bad") if frame.ended else ("paused", "warn")
    over = "since the start" if frame.window_s is None else f"last {frame.window_s:.0f} s"
    right: list[Piece] = [("● ", state[1]), (state[0], state[1])]
    if width >= 56:
        right += [("   figures ", "dim"), (over, "value")]
    room = width - sum(len(text) for text, _ in right) - 2
    pid = "" if status.name.endswith(f" {status.pid}") else f"  {status.pid}"
    name = _cut(LOOK.plain(status.name), max(4, room - len(pid)))
    left: list[Piece] = [(name, "title"), (pid, "dim")]
    return (*left, _gap(left, right, width), *right)


def _tokens_line(frame: Frame, width: int) -> Line:
    pieces: list[Piece] = []
    if frame.tokens_per_s is not None and frame.decode is not None:
        pieces += [(rate(frame.tokens_per_s) or "0", "big"), (" tokens/s ", "dim")]
    if frame.decode is not None:
        if width >= 60:
            values = [tokens for _, tokens in frame.trends]
            points = min(30, width // 4, len(values))
            pieces += [(sparkline(values, points), "trend"), ("  ", "")]
        p50, p99 = (frame.quantiles([frame.decode], each)[0] for each in (0.5, 0.99))
        phase = LOOK.plain(frame.rows[frame.decode].name) or "step"
        if p50:
            pieces += _pairs((f"{phase} p50", LOOK.time(p50)), ("p99", LOOK.time(p99)))
        pieces += _pairs(("tokens", count(frame.tokens)))
    if frame.now.lost:
        pieces += [(f"  {frame.now.lost} entries lost", "bad")]
    return _fitting(pieces, width)


def _load_lines(load: MachineLoad, width: int) -> list[Line]:
    pieces: list[Piece] = []
    if load.cpu is not None:
        pieces += _meter("CPU  ", load.cpu / (load.cores or 1), width)
        cores = f" of {load.cores} cores" if load.cores else ""
        pieces += [(f"{load.cpu:4.2f}", "value"), (f"{cores}  ", "dim")]
    if load.resident_bytes is not None:
        pieces += _pairs(("memory", size(load.resident_bytes)))
    if load.threads is not None:
        pieces += _pairs(("threads", str(load.threads)))
    if load.machine_cpu is not None:
        pieces += _pairs(("machine", percent(load.machine_cpu)))
    lines = [_fitting(pieces, width)] if pieces else []
    return lines + [_gpu_line(gpu, width) for gpu in load.gpus[:8]]


def _gpu_line(gpu: GpuLoad, width: int) -> Line:
    pieces: list[Piece] = []
    if gpu.busy is not None:
        pieces += _meter(f"GPU{gpu.index} ", gpu.busy, width)
        pieces += [(f"{100 * gpu.busy:3.0f} %  ", "value")]
    else:
        pieces += [(f"GPU{gpu.index} ", "dim")]
    if gpu.used_bytes is not None and gpu.total_bytes is not None:
        pieces += _pairs(("memory", f"{size(gpu.used_bytes)} / {size(gpu.total_bytes)}"))
    if gpu.process_bytes is not None:
        pieces += _pairs(("process", size(gpu.process_bytes)))
    if gpu.power_w is not None:
        pieces += _pairs(("power", f"{gpu.power_w:.0f} W"))
    if gpu.temperature_c is not None:
        pieces += _pairs(("", f"{gpu.temperature_c:.0f} °C"))
    return _fitting([*pieces, (LOOK.plain(gpu.name), "dim")], width)


def _meter(label: str, share: float, width: int) -> list[Piece]:
    style = "bad" if share > 0.9 else "warn" if share > 0.7 else "good"
    room = max(6, min(20, width // 6))
    return [(label, "label"), *bar(share, room, style), (" ", "")]


def _pairs(*pairs: tuple[str, str]) -> list[Piece]:
    pieces: list[Piece] = []
    for label, value in pairs:
        pieces += [(f"{label} " if label else "", "label"), (value, "value"), ("  ", "")]
    return pieces


def detail_lines(frame: Frame, row: int, width: int, height: int) -> list[Line]:
    """Return how long the entries of a brick took, as a picture: shorter ones on the left."""
    brick, room = frame.rows[row], height - 2
    counts = frame.buckets([row])[0]
    filled = [at for at, each in enumerate(counts) if each]
    quantiles = [frame.quantiles([row], each)[0] for each in (0.5, 0.9, 0.99, 0.999)]
    named = zip(("p50", "p90", "p99", "p99.9"), quantiles, strict=True)
    title = _pairs(*((name, LOOK.time(value)) for name, value in named))
    lines = [_fitting([(LOOK.plain(brick.name), "title"), ("   ", ""), *title], width)]
    if not filled or room < 1:
        return lines
    first, last = filled[0], filled[-1] + 1
    columns = _spread(counts[first:last], width)
    high = max(columns)
    eighths = [max(1, round(each / high * room * 8)) if each else 0 for each in columns]
    for level in reversed(range(room)):
        drawn = (_SPARKS_UP[min(max(each - 8 * level, 0), 8)] for each in eighths)
        lines.append((("".join(drawn), brick.category.label),))
    low, top = (LOOK.time(2.0 ** ((at + FIRST_INDEX) / 16)) for at in (first, last))
    lines.append(((low, "dim"), (" " * max(1, width - len(low) - len(top)), ""), (top, "dim")))
    return lines


def _spread(counts: Any, width: int) -> list[float]:
    """Return counts as so many columns: neighbours are summed, or each is repeated."""
    if len(counts) <= width:
        times = max(1, width // len(counts))
        return [float(each) for each in counts for _ in range(times)]
    edges = [round(at * len(counts) / width) for at in range(width + 1)]
    return [float(sum(counts[a:b])) for a, b in pairwise(edges)]


def side_lines(frame: Frame, width: int, height: int) -> list[Line]:
    """Return the panel beside the table: categories, then as many layers as fit."""
    lines: list[Line] = [(("Categories", "title"),)]
    room = width - 19
    for category, share in frame.categories:
        label, figure = (f"{category.label:<10}", category.label), (f"{percent(share):>8}", "")
        lines.append((label, *bar(share, room, category.label), figure))
    layers = frame.layers
    rows = height - len(lines) - 2
    if not layers or rows < 2:
        return lines
    lines += [(), (("Layers", "title"),)]
    groups = _layer_groups(layers, rows)
    longest = max(float(cells.sum()) for _, cells in groups) or 1.0
    whole = sum(float(cells.sum()) for _, cells in groups) or 1.0
    for name, cells in groups:
        shares = cells / longest
        parts = [(float(shares[each]), each.label) for each in BrickCategory if shares[each]]
        figure = (f"{percent(float(cells.sum()) / whole):>8}", "")
        lines.append(((f"{name:<10}", "dim"), *stacked(parts, room), figure))
    return lines


def _layer_groups(layers: list[tuple[int, Any]], rows: int) -> list[tuple[str, Any]]:
    """Return layers, or runs of neighbours where there are more than fit."""
    several = -(-len(layers) // rows)
    groups = []
    for start in range(0, len(layers), several):
        group = layers[start : start + several]
        first, last = group[0][0], group[-1][0]
        label = f"{first}" if first == last else f"{first}-{last}"
        groups.append((label, sum(cells for _, cells in group)))
    return groups


def _gap(left: Sequence[Piece], right: Sequence[Piece], width: int) -> Piece:
    used = sum(len(text) for text, _ in (*left, *right))
    return " " * max(1, width - used), ""


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _fitting(pieces: Sequence[Piece], width: int) -> Line:
    """Return the pieces that fit whole; figures are never cut."""
    kept: list[Piece] = []
    used = 0
    for text, style in pieces:
        if used + len(text) > width:
            break
        kept.append((text, style))
        used += len(text)
    # A label whose figure did not fit says nothing.
    while kept and kept[-1][1] in ("label", ""):
        kept.pop()
    return tuple(kept)
