"""A Profile as text for a terminal: headline, bricks, categories, layers, tiles, notes.

`print_profile` writes to a rich console, which decides on colour (NO_COLOR is honoured) and width;
columns that do not fit give way. Names are shown as they are, never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table

from brickline.budgets import BudgetResult
from brickline.profile import Profile
from brickline.profile_checks import ProfileFinding
from brickline.profile_rows import StepStats, TileStats
from brickline.report.figures import Column, Look, fitting_table, percent, plain_console, rate
from brickline.run.failures import problem_text
from brickline.stats import BrickBottleneck, BrickStats, CategoryStats

MAX_LAYER_ROWS = 48
"""More layers than this are shown in runs of neighbours."""
DISABLED = (
    "Profiling is disabled, so nothing was recorded. Enable it with"
    " BrickProfiler(enabled=True) or profiler.enable(), or start the program with `brickline run`."
)
EMPTY = (
    "No brick was recorded. Wrap work in `with profiler.brick(...)`, and model passes in"
    " `with profiler.step(tokens=...)`."
)


def print_profile(profile: Profile, console: Console, *, limit: int | None = None) -> None:
    """Print every section that has something to say.

    Args:
        profile: what to show.
        console: where to.
        limit: rows of the brick table at most; all of them when None.
    """
    console.print(render_profile(profile, Look.of(console), console.width, limit=limit))


def profile_text(profile: Profile, width: int = 100) -> str:
    """Return the report as plain text."""
    stream = StringIO()
    console = plain_console(stream, width)
    console.print(render_profile(profile, Look(), width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def render_profile(
    profile: Profile, look: Look, width: int, *, limit: int | None = None
) -> RenderableType:
    """Return the report as something that rich prints."""
    if not profile.enabled:
        return look.text(DISABLED)
    blocks: list[RenderableType] = [look.text(line) for line in headline(profile, look)]
    if not profile.bricks:
        blocks.append(look.text(EMPTY))
    else:
        blocks += [
            "",
            brick_table(profile, look, width, limit),
            "",
            _categories(profile, look, width),
        ]
    if len(profile.steps) > 1:
        blocks += ["", _steps(profile, look, width)]
    if profile.layers:
        blocks += ["", _layers(profile, look, width)]
    if profile.tiles:
        blocks += ["", _tiles(profile, look, width)]
    found = list(notes(profile, look))
    if found:
        blocks += ["", *(look.text(f"· {note}", "dim") for note in found)]
    return Group(*blocks)


def headline(profile: Profile, look: Look) -> Iterator[str]:
    """Give the figures that come first: tokens, time per token, coverage."""
    steps, decode = sum(step.count for step in profile.steps.values()), profile.decode
    parts = [profile.name]
    if decode is not None:
        parts.append(f"{steps} steps, {profile.total_tokens} tokens")
        if decode.us_per_token:
            phase = f" ({decode.phase})" if decode.phase else ""
            parts.append(f"{look.time(decode.us_per_token * 1e3)} per token{phase}")
            parts.append(f"{rate(decode.tokens_per_s)} tokens/s")
    if profile.coverage is not None:
        parts.append(f"bricks cover {percent(profile.coverage)}")
    yield " · ".join(parts)
    yield (
        f"{look.time(profile.total_ns)} in bricks ({look.time(profile.exclusive_ns)} exclusive)"
        f" · {profile.total_elements} elements"
    )


def brick_table(profile: Profile, look: Look, width: int, limit: int | None = None) -> Table:
    """Return the bricks, longest total first."""
    columns: list[Column[BrickStats]] = [
        Column("Brick", 0, lambda row: row.name, left=True),
        Column("Count", 3, lambda row: str(row.count)),
        Column("Avg", 1, lambda row: look.time(row.avg_ns)),
        Column("p50", 5, lambda row: look.time(row.p50_ns)),
        Column("p99", 4, lambda row: look.time(row.p99_ns)),
        Column("Total", 6, lambda row: look.time(row.total_ns)),
        Column("Share", 2, lambda row: percent(profile.share(row))),
        Column("Exclusive", 7, lambda row: look.time(row.exclusive_ns)),
        Column("GB/s", 8, lambda row: rate(row.throughput_gbps)),
        Column("GFLOP/s", 10, lambda row: rate(row.gflops)),
        Column("Bound by", 9, lambda row: _bound_by(profile, row), left=True),
    ]
    rows = profile.bricks[:limit]
    hidden = len(profile.bricks) - len(rows)
    title = f"Bricks (the first {len(rows)} of {len(profile.bricks)})" if hidden else "Bricks"
    return fitting_table(look, title, columns, rows, width)


def _bound_by(profile: Profile, row: BrickStats) -> str:
    bound = row.bottleneck(profile.peaks)
    return "" if bound is BrickBottleneck.UNKNOWN else str(bound)


def _categories(profile: Profile, look: Look, width: int) -> Table:
    columns: list[Column[CategoryStats]] = [
        Column("Category", 0, lambda row: row.name, left=True),
        Column("Count", 3, lambda row: str(row.count)),
        Column("Avg", 2, lambda row: look.time(row.avg_us * 1e3)),
        Column("Share", 0, lambda row: percent(profile.share(row))),
        Column("", 4, lambda row: look.bar(profile.share(row), 20), left=True),
    ]
    rows = sorted(profile.categories.values(), key=lambda row: -row.share_ns)
    return fitting_table(look, "Categories", columns, rows, width)


def _steps(profile: Profile, look: Look, width: int) -> Table:
    columns: list[Column[StepStats]] = [
        Column("Phase", 0, lambda row: row.phase or "(none)", left=True),
        Column("Steps", 2, lambda row: str(row.count)),
        Column("Tokens", 1, lambda row: str(row.tokens)),
        Column("Wall", 3, lambda row: look.time(row.wall_ns)),
        Column("Step p50", 4, lambda row: look.time(row.stats.p50_ns)),
        Column("Step p99", 5, lambda row: look.time(row.stats.p99_ns)),
        Column("Per token", 0, lambda row: look.time(row.us_per_token * 1e3)),
        Column("Tokens/s", 1, lambda row: rate(row.tokens_per_s)),
    ]
    return fitting_table(look, "Steps", columns, list(profile.steps.values()), width)


def _layers(profile: Profile, look: Look, width: int) -> Table:
    groups = _layer_groups(profile)
    longest = max((share for _, share in groups), default=0.0) or 1.0
    bar = max(8, min(40, width - 30))
    columns: list[Column[tuple[str, float]]] = [
        Column("Layer", 0, lambda row: row[0]),
        Column("Time", 0, lambda row: look.time(row[1]) if row[1] else "not timed"),
        Column("Share", 1, lambda row: percent(row[1] / (profile.share_total_ns or 1.0))),
        Column("", 2, lambda row: look.bar(row[1] / longest, bar), left=True),
    ]
    return fitting_table(look, "Layers", columns, groups, width)


def _layer_groups(profile: Profile) -> list[tuple[str, float]]:
    """Return label and exclusive time per layer, or per run of neighbours if there are many."""
    layers = sorted(profile.layers)
    size = -(-len(layers) // MAX_LAYER_ROWS)
    groups = []
    for start in range(0, len(layers), size):
        group = layers[start : start + size]
        label = str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"
        groups.append((label, sum(profile.layers[layer].share_ns for layer in group)))
    return groups


def _tiles(profile: Profile, look: Look, width: int) -> Table:
    peak = profile.peaks.gflops if profile.peaks else 0.0
    columns: list[Column[TileStats]] = [
        Column("Level", 0, lambda row: row.level_name, left=True),
        Column("Brick", 0, lambda row: row.owner or "", left=True),
        Column("Count", 2, lambda row: str(row.count)),
        Column("Avg", 1, lambda row: look.time(row.avg_ns)),
        Column("p99", 4, lambda row: look.time(row.p99_ns)),
        Column("GFLOP/s", 3, lambda row: rate(row.gflops)),
        Column("FLOP/byte", 5, lambda row: rate(row.arithmetic_intensity)),
        Column("Of peak", 6, lambda row: percent(row.peak_share(peak)) if peak else ""),
        Column("Rows × columns", 7, _tile_extent),
    ]
    return fitting_table(look, "Tiles", columns, profile.tiles, width)


def _tile_extent(row: TileStats) -> str:
    return f"{len(row.by_row())} × {len(row.by_column())}" if row.cells else ""


def notes(profile: Profile, look: Look) -> Iterator[str]:
    """Say how the figures came to be, where that matters."""
    recording = profile.recording
    if recording.timed < recording.counted:
        yield (
            f"Sampled: {recording.timed} of {recording.counted} entries were timed;"
            " shares are scaled to all of them."
        )
    if recording.approximate:
        yield f"{recording.approximate} spans were supplied by the caller; they are approximate."
    if recording.out_of_order:
        yield f"{recording.out_of_order} entries were left out of order and have no exclusive time."
    if recording.host_bound:
        yield f"{recording.host_bound} device entries waited for the host (host-bound)."
    if recording.pending_device_spans:
        yield f"{recording.pending_device_spans} device spans have not been read yet."
    if recording.lost:
        yield f"{recording.lost} entries found no space and are missing."
    if recording.abandoned_timers:
        yield f"{recording.abandoned_timers} timers were started and never stopped."
    if recording.orphan_exits:
        yield f"{recording.orphan_exits} bricks were left that had not been entered."
    if recording.unclosed and not profile.is_live:
        count = recording.unclosed
        parts = "1 part was" if count == 1 else f"{count} parts were"
        yield f"{parts} not closed; all that had finished is here."
    if recording.processes > 1:
        yield f"{recording.processes} processes; times are summed over them."
    if recording.timed:
        share = profile.overhead_share
        of_wall = f", {percent(share)} of the steps" if share is not None else ""
        yield f"Recording took about {look.time(recording.overhead_ns)}{of_wall}."
    if recording.waiting_ns:
        yield f"Its sync mode waited {look.time(recording.waiting_ns)} for the device besides."
    for problem in profile.problems:
        yield problem_text(problem, "Not read")


def render_findings(findings: Sequence[ProfileFinding], look: Look) -> RenderableType:
    """Return the checks of `Profile.validate`, one a line."""
    styles = {"ok": "green", "skipped": "dim", "warning": "yellow", "error": "bold red"}
    return Group(
        look.text("Checks", "bold"),
        *(
            look.text(f"{each.severity:<8} {each.code:<17} {each.message}", styles[each.severity])
            for each in findings
        ),
    )


def render_budgets(results: Sequence[BudgetResult], look: Look) -> RenderableType:
    """Return the budgets, one a line, the exceeded ones first."""
    ordered = sorted(results, key=lambda result: result.passed)
    return Group(
        look.text("Budgets", "bold"),
        *(
            look.text(f"{'ok' if each else 'FAILED':<8} {each}", "green" if each else "bold red")
            for each in ordered
        ),
    )
