"""Where an output of a megakernel came from, as text: each task once, the latest first.

A chain is a graph: a task that several others read is one line, with the numbers of what it read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from brickline.errors import UsageError
from brickline.megakernel_flow import Flow
from brickline.megakernel_report import MegakernelReport

MAX_SOURCES = 12
"""Sources named in one line; how many more there are is said."""


def lineage_text(report: MegakernelReport, output: int | str, limit: int | None = 100) -> str:
    """Return the sources of an output, as `MegakernelReport.explain` says.

    Raises:
        UsageError: There is no such output, or lineage was off.
    """
    writers = report.writers(output)
    flow = known_flow(report)
    if not writers:
        return f"{output}: nobody of this report wrote to it"
    found = flow.all_sources(report.rows_of(writers)).tolist()[::-1]
    shown = found if limit is None else found[: max(limit, 0)]
    of = "" if isinstance(output, int) else f"{output} comes from "
    lines = [
        of + listed([report.task_name(task) for task in writers], " and ") + _state(report, writers)
    ]
    lines += [_line(report, flow, row) for row in shown]
    if len(shown) < len(found):
        lines.append(f"      … {len(found) - len(shown):,} earlier ones; limit=None lists them")
    lines.append(_summary(report, flow, found))
    return "\n".join(lines)


def known_flow(report: MegakernelReport) -> Flow:
    """Return a report's lineage.

    Raises:
        UsageError: It was off.
    """
    if report.flow is None:
        raise UsageError(
            f"the run of {report.name} kept no lineage; run it again with lineage=True"
        )
    return report.flow


def _state(report: MegakernelReport, writers: Iterable[int]) -> str:
    if report.tasks.done is None:
        return ""
    left = report.tasks.done < report.tasks.items
    missing = [task for task in writers if left[task - report.first_submission]]
    return f"; {report.task_name(missing[0])} is not complete" if missing else ""


def _line(report: MegakernelReport, flow: Flow, row: int) -> str:
    tasks, first = report.tasks, report.first_submission
    words = [report.ops[tasks.op[row]]]
    brick, layer = int(tasks.brick[row]), int(tasks.layer[row])
    words += [] if brick < 0 or report.bricks[brick] == words[0] else [report.bricks[brick]]
    words += [] if layer < 0 else [f"layer {layer}"]
    text = f"{first + row:>6}  {'  '.join(words)}"
    if tasks.alias[row] >= 0:
        return f"{text}  = {first + tasks.alias[row]}, which computed the same"
    names = [str(first + each) for each in flow.direct(row)] + flow.given_to(row)
    return text + (f"  from {listed(names)}" if names else "")


def _summary(report: MegakernelReport, flow: Flow, found: list[int]) -> str:
    word = ("launch", "launches") if report.mode == "program" else ("submission", "submissions")
    ran = report.tasks.alias[found] < 0  # items of the others are those of whom they repeat
    items = int(report.tasks.items[found][ran].sum())
    parts = [f"in all {_count(len(found), *word)} with {_count(items, 'item', 'items')}"]
    done = items if report.tasks.done is None else int(report.tasks.done[found][ran].sum())
    if done < items:
        parts[0] += f", of which {done:,} {'is' if done == 1 else 'are'} done"
    bricks = source_bricks(report, found)
    if bricks:
        parts.append(f"bricks {listed(list(bricks))}")
    given = flow.given_to_all(found)
    if given:
        parts.append(f"given memory {listed(given)}")
    return "; ".join(parts)


def source_bricks(report: MegakernelReport, found: Iterable[int]) -> dict[str, int]:
    """Return the bricks of some tasks with how many tasks each has, in order of first use."""
    counts = Counter(report.tasks.brick[sorted(found)].tolist())
    return {report.bricks[brick]: count for brick, count in counts.items() if brick >= 0}


def listed(names: list[str], last: str = ", ") -> str:
    """Return names one after the other; of very many the first, and how many more there are."""
    if len(names) > MAX_SOURCES:
        return f"{', '.join(names[:MAX_SOURCES])} and {len(names) - MAX_SOURCES:,} more"
    return last.join(names)


def _count(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"
