"""A DivergenceReport as text for a terminal: who is guilty first, then what shows it.

`print_divergence` writes to a rich console, which decides on colour (NO_COLOR is honoured) and
width. Names are shown as they are, never read as markup. However large the comparison was, the
text stays short: what is left out is counted.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from brickline.report.error_curve import ErrorCurve, error_curve
from brickline.report.figures import Column, Look, fitting_table, percent, plain_console
from brickline.verdict import GUILTY, LEAST_SHARE, DivergenceReport, Finding, Status, Verdict

MAX_FINDINGS = 10
"""Rows of the table of findings."""
MAX_DETAILS = 4
"""Findings that are told in full."""
MAX_EXAMPLES = 4
"""Lines of any list: notes, launches without a partner, circumstances."""
MAX_TEXT = 600
"""Characters of one text that came with the report."""
WIDEST = 100
"""Columns of a text for which none were asked for, where the terminal has more."""
STATUS_STYLES = {
    Status.MATCHED: "bold green",
    Status.DIVERGED: "bold red",
    Status.INCONCLUSIVE: "bold yellow",
}
VERDICT_STYLES = {
    Verdict.WATCH: "yellow",
    Verdict.NONDETERMINISTIC: "yellow",
    Verdict.STRUCTURAL: "yellow",
    Verdict.UNKNOWN: "yellow",
    Verdict.ACCEPTED: "green",
} | dict.fromkeys(GUILTY, "bold red")


def print_divergence(report: DivergenceReport, console: Console) -> None:
    """Print the report on a console, as wide as that is; plain where it is no terminal."""
    if console.is_terminal:
        console.print(render_divergence(report, Look.of(console), console.width))
    else:
        console.file.write(_plain_text(report, Look.of(console), console.width))


def report_text(report: DivergenceReport, width: int | None = None) -> str:
    """Return the report as plain text that standard output can show.

    Args:
        report: what to show.
        width: columns; by default those of the terminal, 80 where there is none, 100 at most.
    """
    look = Look(unicode=(getattr(sys.stdout, "encoding", None) or "utf").lower().startswith("utf"))
    columns = width or min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    return _plain_text(report, look, columns)


def _plain_text(report: DivergenceReport, look: Look, width: int) -> str:
    stream = StringIO()
    console = plain_console(stream, width)
    console.print(render_divergence(report, look, width))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def render_divergence(report: DivergenceReport, look: Look, width: int) -> RenderableType:
    """Return the report as something that rich prints."""
    blocks: list[RenderableType] = [
        _first_line(report, look),
        _wrapped(look, report.headline, "bold"),
    ]
    for block in (
        _answers(report, look),
        _whys(report, look),
        _findings(report, look, width),
        _details(report, look),
        _curve(report, look, width),
        _repair(report, look),
        _facts(report, look),
        _next_step(report, look, width),
    ):
        if block:
            blocks += ["", *block]
    return Group(*blocks)


def _first_line(report: DivergenceReport, look: Look) -> Text:
    line = _wrapped(look, f"candidate {report.candidate} against reference {report.reference}: ")
    return line.append(str(report.status), style=STATUS_STYLES[report.status])


def _answers(report: DivergenceReport, look: Look) -> list[RenderableType]:
    return [
        _hanging(question.capitalize(), 12, _wrapped(look, str(answer)))
        for question, answer in report.answers.items()
    ]


def _whys(report: DivergenceReport, look: Look) -> list[RenderableType]:
    if not report.whys:
        return []
    return [look.text("Why", "bold"), *_items(look, report.whys, MAX_FINDINGS)]


def _findings(report: DivergenceReport, look: Look, width: int) -> list[RenderableType]:
    if not report.findings:
        return []
    shown = report.findings[:MAX_FINDINGS]
    hidden = len(report.findings) - len(shown)
    title = f"Findings (the first {len(shown)} of {len(report.findings)})" if hidden else "Findings"
    return [_finding_table(look, title, shown, width)]


def _finding_table(look: Look, title: str, shown: Sequence[Finding], width: int) -> Table:
    widest = max(12, width // 2 - 2)
    backward = any(each.direction != "forward" for each in shown)
    columns: list[Column[Finding]] = [
        Column("Finding", 0, lambda row: shorten(look.plain(row.title), widest, look), left=True),
        Column("Verdict", 1, lambda row: _verdict(look, row.verdict), left=True),
        Column("z", 2, lambda row: figure(row.z)),
        Column("Local error", 3, lambda row: error_figure(row.local_error)),
        Column("Share", 4, lambda row: share_figure(row.share)),
        Column("Call", 5, _call),
        Column("Pass", 6, lambda row: row.direction if backward else "", left=True),
        Column("Output error", 7, lambda row: error_figure(row.propagated_error)),
        Column("Where", 8, lambda row: _first_words(row.where), left=True),
    ]
    return fitting_table(look, title, columns, shown, width)


def _verdict(look: Look, verdict: Verdict) -> Text:
    return look.text(str(verdict), VERDICT_STYLES.get(verdict, ""))


def _call(row: Finding) -> str:
    if row.position is None:
        return ""
    return f"{row.position}.{row.ordinal}" if row.ordinal else str(row.position)


def _first_words(text: str | None) -> str:
    return "" if not text or len(text) > 40 else text


def _details(report: DivergenceReport, look: Look) -> list[RenderableType]:
    """Tell the guilty in full: where, why, against what, and how to see it again."""
    told = [each for each in report.findings if each.verdict in GUILTY]
    told = (told or [each for each in report.findings if each.reason or each.cause])[:MAX_DETAILS]
    blocks: list[RenderableType] = []
    for finding in told:
        lines = list(detail_lines(finding))
        if not lines:
            continue
        blocks.append(_wrapped(look, finding.title, VERDICT_STYLES.get(finding.verdict, "bold")))
        blocks += [_labelled(look, label, text) for label, text in lines]
    return blocks


def detail_lines(finding: Finding) -> Iterator[tuple[str, str]]:
    """Give what is known of a finding in words, each with its label."""
    if finding.where:
        yield "where", finding.where
    if finding.cause:
        yield "cause", finding.cause
    if finding.source:
        yield "source", finding.source
    if finding.alternatives:
        yield "or it is", ", ".join(finding.alternatives)
    if like := [name for name in finding.members if name != finding.name]:
        yield "like it", ", ".join(like)
    if finding.op and finding.op not in (finding.name, "output"):
        yield "op", finding.op
    if finding.reference_name and finding.reference_name != finding.name:
        yield "held to", finding.reference_name
    if finding.repro:
        yield "repro", f"{finding.repro} (it contains weights and inputs)"
    if finding.reason:
        yield "note", finding.reason


def _curve(report: DivergenceReport, look: Look, width: int) -> list[RenderableType]:
    found = shown_curve(report)
    return [] if found is None else list(_curve_lines(*found, look, width))


def shown_curve(
    report: DivergenceReport,
) -> tuple[ErrorCurve, Finding | None, int | None] | None:
    """Return the errors of the call to show, its culprit and its number; None without errors."""
    guilty = next((each for each in report.findings if each.verdict in GUILTY), None)
    positions = report.verdicts.columns["position"]
    first = next((each for each in positions if each is not None), None)
    position = guilty.position if guilty is not None and guilty.position is not None else first
    curve = error_curve(report.verdicts, position)
    return None if len(curve.names) < 2 or curve.is_empty else (curve, guilty, position)


def _curve_lines(
    curve: ErrorCurve, guilty: Finding | None, position: int | None, look: Look, width: int
) -> Iterator[RenderableType]:
    low, high = curve.limits()
    call = "" if position is None else f", call {position}"
    yield _wrapped(look, f"Error over depth{call}: {low:.0e} to {high:.1e}", "bold")
    indent = 12
    room = max(4, width - indent)
    for label, values in (("local", curve.local), ("propagated", curve.propagated)):
        if any(value is not None for value in values):
            drawn = curve.draw(values, room, unicode=look.unicode)
            yield Text(f"{label:<{indent}}{drawn}", no_wrap=True, overflow="crop")
    at = curve.column(guilty.name, room, guilty.layer_idx) if guilty is not None else None
    if guilty is not None and at is not None:
        yield _pointer(look, guilty.title, indent + at, width)


def _pointer(look: Look, name: str, at: int, width: int) -> Text:
    """Return an arrow below a column, with the name on the side where there is more room."""
    arrow = "▲" if look.unicode else "^"
    name = look.plain(name)
    if width - at - 2 >= at:
        line = f"{'':<{at}}{arrow} {shorten(name, max(width - at - 2, 1), look)}"
    else:
        line = f"{shorten(name, max(at - 1, 1), look):>{at - 1}} {arrow}"
    return Text(line, style="red", no_wrap=True, overflow="crop")


def _repair(report: DivergenceReport, look: Look) -> list[RenderableType]:
    if not report.repair:
        return []
    lines = [f"{name}: {value}" for name, value in report.repair.items()]
    return [look.text("Repair", "bold"), *_items(look, lines, MAX_FINDINGS)]


def _facts(report: DivergenceReport, look: Look) -> list[RenderableType]:
    """Say how much was seen, what was not, and in what the two sides' circumstances differ."""
    lines: list[RenderableType] = [_wrapped(look, sentence) for sentence in sentences(report)]
    for title, texts in (
        ("Not observed", report.coverage.notes),
        ("Without a partner", report.unmatched),
        ("Not told apart by their key", report.duplicates),
        ("Circumstances that differ", report.circumstances),
    ):
        if texts:
            count = f" ({len(texts)})" if len(texts) > MAX_EXAMPLES else ""
            lines += [look.text(f"{title}{count}", "bold"), *_items(look, texts, MAX_EXAMPLES)]
    return lines


def sentences(report: DivergenceReport) -> Iterator[str]:
    """Give the final difference, and how much was compared."""
    if report.final_error is not None:
        floor = report.noise_floor
        beside = "" if floor is None else f"; rounding alone makes {error_figure(floor)}"
        error = error_figure(report.final_error)
        what = "The final output differs by"
        if report.outputs > 1:
            what = f"The largest difference of {report.outputs} final outputs is"
        yield f"{what} {error} (relative L2){beside}."
    elif report.noise_floor is not None:
        yield f"Rounding alone makes {error_figure(report.noise_floor)} of the final output."
    coverage = report.coverage
    if coverage.total:
        counts = ", ".join(f"{count} {word}" for word, count in report.verdicts.counts().items())
        pairs = len(report.verdicts)
        # A value may be compared with what is made of it, so there may be fewer pairs.
        within = f", in {pairs} pairs" if counts and pairs != coverage.compared else ""
        yield f"Compared {coverage.compared} of {coverage.total}{within}" + (
            f": {counts}." if counts else "."
        )
    elif not report.kernels_compared:
        yield "Nothing was compared."


def _next_step(report: DivergenceReport, look: Look, width: int) -> list[RenderableType]:
    if not report.next_command:
        return []
    lines = [line for each in report.next_command.splitlines() for line in _command(each, width)]
    return [look.text("Next", "bold"), *(_indented(look, line) for line in lines)]


def _command(line: str, width: int) -> Iterator[str]:
    """Break a command where a shell goes on reading, so that it can be copied as it stands."""
    room = max(width - 4, 8)
    if len(line) <= room + 2 or not line.startswith(("brickline ", "python ")):
        yield line
        return
    kept = ""
    for word in line.split(" "):
        if kept and len(kept) + 1 + len(word) > room:
            yield f"{kept} \\"
            kept = f"  {word}"
        else:
            kept = f"{kept} {word}" if kept else word
    yield kept


def _indented(look: Look, text: str) -> RenderableType:
    return Padding(_wrapped(look, text), (0, 0, 0, 2))


def _items(look: Look, texts: Sequence[str], most: int) -> Iterator[RenderableType]:
    mark = "·" if look.unicode else "-"
    for text in texts[:most]:
        yield _hanging(mark, 2, _wrapped(look, text))
    if len(texts) > most:
        yield _hanging(mark, 2, look.text(f"and {len(texts) - most} more", "dim"))


def _labelled(look: Look, label: str, text: str) -> RenderableType:
    return _hanging(f"  {label}", 11, _wrapped(look, text))


def _hanging(mark: str, indent: int, text: Text) -> Table:
    """Return a text whose lines all begin at the same column, right of its mark."""
    grid = Table.grid(padding=0)
    grid.add_column(width=indent, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark), text)
    return grid


def _wrapped(look: Look, text: str, style: str = "") -> Text:
    """Return text that folds anywhere rather than run over the edge, and that ends somewhere."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}…"
    shown = look.text(text, style)
    shown.overflow = "fold"
    return shown


def shorten(name: str, most: int, look: Look) -> str:
    """Return a name cut in its middle: the ends of a dotted path say the most."""
    dots = "…" if look.unicode else ".."
    if len(name) <= most:
        return name
    if most <= len(dots) + 1:
        return name[:most]
    head = (most - len(dots)) // 3
    return f"{name[:head]}{dots}{name[len(name) - (most - len(dots) - head) :]}"


def figure(value: float | None) -> str:
    """Return three significant digits, or whole numbers; empty where there is no figure."""
    if value is None:
        return ""
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def error_figure(value: float | None) -> str:
    """Return an error in scientific notation; empty where there is none."""
    if value is None:
        return ""
    return f"{value:.1e}" if value and math.isfinite(value) else f"{value:.0f}"


def share_figure(value: float | None) -> str:
    """Return a share as a percentage; one that is not a number as it is, none where it is none."""
    if value is None or abs(value) < LEAST_SHARE:
        return ""
    if not math.isfinite(value):
        return str(value)
    return "> 99.9 %" if 0.9995 <= value < 1 else percent(value)
