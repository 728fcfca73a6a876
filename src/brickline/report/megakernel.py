"""A MegakernelReport as text for a terminal: headline, phases, workers, ops, faults, counters.

What was not measured is not shown, and named at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from brickline.megakernel_report import PHASES, MegakernelReport
from brickline.megakernel_tables import ItemFault, OpTimes, WorkerState, WorkerTimes
from brickline.report.figures import Column, Look, fitting_table, percent, plain_console

MAX_WORKERS = 24
"""More workers than this are shown as runs of neighbours."""
MAX_OPS = 24
MAX_FAULTS = 16
PHASE_WORDS = dict(zip(PHASES, ("plan", "publish", "dispatch", "lineage"), strict=True))
BYTES = ("bytes_uploaded", "bytes_read_back", "bytes_moved")
MEMORY = ("peak_memory_bytes", "memory_budget_bytes")


def print_megakernel(report: MegakernelReport, console: Console) -> None:
    """Print every section that has something to say."""
    console.print(render_megakernel(report, Look.of(console), console.width))


def megakernel_text(report: MegakernelReport, width: int = 100) -> str:
    """Return the report as plain text."""
    stream = StringIO()
    plain_console(stream, width).print(render_megakernel(report, Look(), width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def render_megakernel(report: MegakernelReport, look: Look, width: int) -> RenderableType:
    """Return the report as something that rich prints."""
    blocks: list[RenderableType] = [look.text(line) for line in headline(report, look)]
    if report.faults:
        blocks += ["", _faults(report, look, width)]
    if report.workers:
        blocks += ["", _workers(report, look, width)]
    if report.op_times:
        blocks += ["", _ops(report, look, width)]
    found = list(counters(report, look))
    if found:
        blocks += ["", look.text("Counters", "bold")]
        blocks += [look.text(f"{name:<22} {value}") for name, value in found]
    said = list(notes(report))
    if said:
        blocks += ["", *(look.text(f"· {note}", "dim") for note in said)]
    return Group(*blocks)


def headline(report: MegakernelReport, look: Look) -> Iterator[str]:
    """Give the figures that come first: items, time, who waited."""
    total = report.items_processed + report.items_remaining
    done = f"{report.items_processed:,} of {total:,} items"
    parts = [f"{report.name} on {report.device}, {report.mode} mode", done]
    parts.append(look.time(report.wall_time_ns))
    if report.workers:
        parts.append(f"{len(report.workers)} workers")
    yield " · ".join(parts)
    if report.items_remaining:
        left = (
            "1 item remains"
            if report.items_remaining == 1
            else f"{report.items_remaining:,} items remain"
        )
        yield f"{left}: {remaining_words(report)}"
    phases = [
        f"{word} {look.time(value)}"
        for name, word in PHASE_WORDS.items()
        if (value := getattr(report, name)) is not None
    ]
    if phases:
        yield " · ".join(phases)
    shares = [f"{word} {percent(share)}" for word, share in worker_shares(report)]
    if report.imbalance is not None:
        shares.append(f"imbalance {report.imbalance:.2f}")
    if shares:
        yield "workers: " + " · ".join(shares)


def remaining_words(report: MegakernelReport) -> str:
    """Say why items remain, as far as it is known."""
    parts = []
    if report.items_faulted:
        parts.append(f"{report.items_faulted:,} faulted")
    if report.items_skipped:
        parts.append(f"{report.items_skipped:,} skipped, because something that they need faulted")
    rest = report.items_remaining - (report.items_faulted or 0) - (report.items_skipped or 0)
    if rest:
        parts.append(f"{rest:,} not begun or not ended when the run did")
    return ", ".join(parts)


def worker_shares(report: MegakernelReport) -> list[tuple[str, float]]:
    """Return which parts of the run's time went where; empty where it was not measured.

    The whole is the time from the start of the workers until all have left, once for each.
    """
    there = sum(worker.span_ns or 0 for worker in report.workers)
    run_ns = report.backend_dispatch_ns or report.wall_time_ns
    total = max(there, run_ns * len(report.workers))
    if not there or any(worker.work_ns is None for worker in report.workers):
        return []
    rows = (
        ("work", "work_ns"),
        ("waiting for tasks", "dependency_wait_ns"),
        ("waiting for data", "data_wait_ns"),
        ("other", "other_ns"),
    )
    sums = [(word, sum(getattr(each, name) or 0 for each in report.workers)) for word, name in rows]
    sums.append(("away", total - there))
    return [(word, value / total) for word, value in sums if value or word == "work"]


# ------------------------------------------------------------------------------------------ tables


def _workers(report: MegakernelReport, look: Look, width: int) -> Table:
    rows = _worker_groups(report.workers)
    longest = max((_mean(each, "span_ns") for _, each in rows), default=0.0) or 1.0
    bar = max(8, min(36, width - 74))
    columns: list[Column[tuple[str, Sequence[WorkerTimes]]]] = [
        Column("Worker", 0, lambda row: row[0]),
        Column("Items", 1, lambda row: f"{sum(each.items for each in row[1]):,}"),
        Column("Work", 0, lambda row: _time(look, row[1], "work_ns")),
        Column("For tasks", 2, lambda row: _time(look, row[1], "dependency_wait_ns")),
        Column("For data", 4, lambda row: _time(look, row[1], "data_wait_ns")),
        Column("For room", 6, lambda row: _time(look, row[1], "ring_wait_ns")),
        Column("Other", 5, lambda row: _time(look, row[1], "other_ns")),
        Column("Ended", 3, _endings, left=True),
        Column("", 7, lambda row: _bar(look, row[1], longest, bar), left=True),
    ]
    title = "Workers"
    if len(rows) < len(report.workers):
        title += " (means of neighbours; items are summed)"
    return fitting_table(look, title, columns, rows, width)


def _worker_groups(workers: Sequence[WorkerTimes]) -> list[tuple[str, Sequence[WorkerTimes]]]:
    size = max(1, -(-len(workers) // MAX_WORKERS))
    groups = []
    for first in range(0, len(workers), size):
        group = workers[first : first + size]
        last = first + len(group) - 1
        groups.append((str(first) if last == first else f"{first}-{last}", group))
    return groups


def _mean(group: Sequence[WorkerTimes], name: str) -> float:
    known = [value for each in group if (value := getattr(each, name)) is not None]
    return sum(known) / len(known) if known else 0.0


def _time(look: Look, group: Sequence[WorkerTimes], name: str) -> str:
    mean = _mean(group, name)
    return look.time(mean) if mean else ""


def _endings(row: tuple[str, Sequence[WorkerTimes]]) -> str:
    ends = sorted(each.state for each in row[1] if each.state != WorkerState.FINISHED)
    return ", ".join(
        f"{len(list(each))} {state}" if len(row[1]) > 1 else str(state)
        for state, each in groupby(ends)
    )


def _bar(look: Look, group: Sequence[WorkerTimes], longest: float, width: int) -> Text:
    """Return work against waiting: filled, shaded, and nothing for the rest."""
    work = _mean(group, "work_ns") / longest
    waited = (_mean(group, "dependency_wait_ns") + _mean(group, "data_wait_ns")) / longest
    full, part = ("█", "░") if look.unicode else ("#", ".")
    first = min(round(work * width), width)
    second = min(round((work + waited) * width), width) - first
    drawn = Text(full * first, style="green")
    drawn.append(part * max(second, 0), style="yellow")
    return drawn.append(" " * (width - first - max(second, 0)))


def _ops(report: MegakernelReport, look: Look, width: int) -> Table:
    rows = report.op_times[:MAX_OPS]
    known = [row.work_ns for row in report.op_times if row.work_ns is not None]
    total = sum(known) if len(known) == len(report.op_times) else 0

    def share(row: OpTimes) -> str:
        return percent(row.work_ns / total) if row.work_ns is not None and total else ""

    def each(row: OpTimes) -> str:
        return look.time(row.work_ns / row.items) if row.work_ns and row.items else ""

    columns: list[Column[OpTimes]] = [
        Column("Op", 0, lambda row: row.name, left=True),
        Column("Tasks", 3, lambda row: f"{row.tasks:,}"),
        Column("Items", 2, lambda row: "" if row.items is None else f"{row.items:,}"),
        Column("Work", 0, lambda row: "" if row.work_ns is None else look.time(row.work_ns)),
        Column("Share", 1, share),
        Column("An item", 4, each),
        Column("Waited before", 5, lambda row: look.time(row.wait_ns) if row.wait_ns else ""),
    ]
    hidden = len(report.op_times) - len(rows)
    title = f"Ops (the first {len(rows)} of {len(report.op_times)})" if hidden else "Ops"
    return fitting_table(look, title, columns, rows, width)


def _faults(report: MegakernelReport, look: Look, width: int) -> Table:
    rows = report.faults[:MAX_FAULTS]
    columns: list[Column[ItemFault]] = [
        Column("Task", 0, lambda row: report.task_name(row.task), left=True),
        Column("Item", 0, lambda row: f"{row.item:,}"),
        Column("Code", 0, lambda row: row.code),
        Column("Retries", 2, lambda row: str(row.retries or "")),
        Column("Meaning", 1, lambda row: row.words, left=True),
    ]
    hidden = len(report.faults) - len(rows)
    title = f"Faults (the first {len(rows)} of {len(report.faults)})" if hidden else "Faults"
    return fitting_table(look, title, columns, rows, width)


# ------------------------------------------------------------------------------ counters and notes


def counters(report: MegakernelReport, look: Look) -> Iterator[tuple[str, str]]:
    """Give every counter that was measured, in words and with its unit."""
    mine = ("published_items", "deduped_items", "lineage_items", "items_requeued")
    for name in mine:
        value = getattr(report, name)
        if value is not None:
            yield name.replace("_", " "), f"{value:,}"
    if report.flow is not None:
        yield "regions", f"{len(report.regions):,}"
    for name, value in report.telemetry.known().items():
        word = name.replace("_bps", "").replace("_bytes", "").replace("_", " ")
        if name.endswith("_bps"):
            yield word, percent(value / 10_000)
        elif isinstance(value, bool):
            yield word, "yes" if value else "no"
        elif name in BYTES or name in MEMORY:
            yield word, bytes_text(value)
        else:
            yield word, f"{value:,}" if isinstance(value, int) else value


def bytes_text(value: int) -> str:
    """Return a size in the unit that keeps it short."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value} B"


def notes(report: MegakernelReport) -> Iterator[str]:
    """Say what matters beside the figures."""
    yield from report.notes
    for number, worker in enumerate(report.workers):
        if worker.state is WorkerState.HUNG:
            at = "" if worker.task is None else f" at {report.task_name(worker.task)}"
            yield f"Worker {number} did not leave{at}."
    if report.spans is None:
        yield "Tasks were not traced: there is no timeline, and no time of a region."
    if report.flow is None:
        yield "Lineage was off: no output can be explained."
    missing = report.not_measured
    if missing:
        yield f"Not measured: {', '.join(missing)}."
