"""A Profile or a DivergenceReport as a short piece of HTML for a notebook's output.

Markup and style alone: no script, no link, nothing that is loaded. Whatever a run or a report says
is text, and is escaped by `tag`. Colours follow the notebook's own theme, because the text inherits
its colour and nothing has a background of its own. What is left out is counted; the whole is on the
page that `brickline report --html` writes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence

from brickline.profile import Profile
from brickline.report.divergence import (
    detail_lines,
    error_figure,
    figure,
    sentences,
    share_figure,
    shorten,
    shown_curve,
)
from brickline.report.error_curve import ErrorCurve, groups_of, size_of
from brickline.report.figures import Look, percent
from brickline.report.html.divergence_page import ESTIMATED, is_estimated
from brickline.report.text import DISABLED, EMPTY, notes
from brickline.report.text import headline as profile_headline
from brickline.stats import BrickStats
from brickline.verdict import CLEAN, GUILTY, DivergenceReport, Finding, Status

MAX_BRICKS = 12
"""Rows of the brick table."""
MAX_FINDINGS = 3
"""Findings told in full."""
MAX_LINES = 6
"""Lines of any list."""
MAX_NAME = 80
"""Characters of a name; it is cut in its middle."""
MAX_TEXT = 400
"""Characters of a sentence."""
CURVE = (560, 64)
"""Width and height of the curve of errors."""
STYLE = """
.brickline{font-size:13px;line-height:1.5;max-width:960px;overflow-x:auto;
 --good:#1f9254;--warn:#a9730a;--bad:#d6453d;--bar:#d2722f;--line:rgba(128,128,128,.35)}
[data-jp-theme-light="true"] .brickline,.vscode-light .brickline,[theme="light"] .brickline{
 --good:#1a7f4b;--warn:#8a5a00;--bad:#b3261e;--bar:#c9682b}
[data-jp-theme-light="false"] .brickline,.vscode-dark .brickline,[theme="dark"] .brickline{
 --good:#6fcf97;--warn:#e6b455;--bad:#ff8a80;--bar:#ec9a63}
.brickline p{margin:0 0 6px}.brickline .soft{opacity:.72}
.brickline table{border-collapse:collapse;table-layout:auto;margin:4px 0 8px;font-size:inherit;
 font-variant-numeric:tabular-nums}
.brickline th,.brickline td{padding:2px 10px 2px 0;text-align:right;border:0;
 border-bottom:1px solid var(--line);background:none;color:inherit;white-space:nowrap}
.brickline th:first-child,.brickline td:first-child,.brickline .left{text-align:left;
 white-space:normal;overflow-wrap:anywhere}
.brickline .bar{display:inline-block;height:8px;background:var(--bar);border-radius:2px}
.brickline td.room{width:90px;text-align:left}
.brickline .card{border-left:3px solid var(--line);padding:2px 0 2px 12px;margin:0 0 8px}
.brickline .card.bad{border-left-color:var(--bad)}
.brickline b.good{color:var(--good)}.brickline b.warn{color:var(--warn)}
.brickline b.bad{color:var(--bad)}
.brickline svg{display:block;max-width:100%;margin:0 0 6px}
"""

_LOOK = Look()
_STATUS = {Status.MATCHED: "good", Status.DIVERGED: "bad", Status.INCONCLUSIVE: "warn"}


class Markup(str):
    """HTML that this module made; every other str is text."""


def tag(name: str, *inside: str, **attributes: str) -> Markup:
    """Return an element; what is inside is escaped unless it is `Markup`. ``kind`` is its class."""
    given = {"class" if key == "kind" else key: value for key, value in attributes.items()}
    written = "".join(f' {key}="{html.escape(value)}"' for key, value in given.items() if value)
    body = "".join(each if isinstance(each, Markup) else text(each) for each in inside)
    return Markup(f"<{name}{written}>{body}</{name}>")


def text(words: str, most: int = MAX_TEXT) -> Markup:
    """Return words escaped, without characters that move others, and not longer than `most`."""
    cut = words if len(words) <= most else f"{words[:most]}…"
    return Markup(html.escape(_LOOK.plain(cut)))


def name_of(name: str) -> Markup:
    """Return a name as code, cut in its middle."""
    return tag("code", text(shorten(name, MAX_NAME, _LOOK)))


def _view(*blocks: str) -> str:
    return str(tag("div", Markup(f"<style>{STYLE}</style>"), *blocks, kind="brickline"))


# --- profiles -------------------------------------------------------------------------------------


def profile_html(profile: Profile) -> str:
    """Return the figures that come first, the longest bricks, categories and notes."""
    if not profile.enabled:
        return _view(tag("p", DISABLED))
    first, second = profile_headline(profile, _LOOK)
    blocks = [tag("p", tag("b", first)), tag("p", second, kind="soft")]
    if profile.is_live:
        blocks.append(tag("p", "Still recording: figures up to now.", kind="soft"))
    if profile.bricks:
        blocks += [_bricks(profile), *_more_bricks(profile), _categories(profile)]
    else:
        blocks.append(tag("p", EMPTY))
    blocks += _listed(list(notes(profile, _LOOK)))
    return _view(*blocks)


def _bricks(profile: Profile) -> Markup:
    titles = ("Brick", "Count", "Avg", "p50", "p99", "Total", "Share", "")
    head = tag("tr", *(tag("th", title) for title in titles))
    rows = [_brick(profile, row) for row in profile.bricks[:MAX_BRICKS]]
    return tag("table", tag("thead", head), tag("tbody", *rows))


def _brick(profile: Profile, row: BrickStats) -> Markup:
    share = profile.share(row)
    drawn = tag("span", kind="bar", style=f"width:{100 * min(max(share, 0.0), 1.0):.1f}%")
    times = (row.avg_ns, row.p50_ns, row.p99_ns, row.total_ns)
    cells = [str(row.count), *(_LOOK.time(each) if row.timed else "" for each in times)]
    return tag(
        "tr",
        tag("td", name_of(row.name)),
        *(tag("td", cell) for cell in cells),
        tag("td", percent(share)),
        tag("td", drawn, kind="room"),
    )


def _more_bricks(profile: Profile) -> Iterator[Markup]:
    rest = profile.bricks[MAX_BRICKS:]
    if rest:
        share = percent(sum(profile.share(row) for row in rest))
        yield tag("p", f"and {_counted(len(rest), 'more brick')}, {share} of the time", kind="soft")


def _categories(profile: Profile) -> Markup:
    rows = sorted(profile.categories.values(), key=lambda row: -row.share_ns)
    return tag("p", " · ".join(f"{row.name} {percent(profile.share(row))}" for row in rows))


# --- reports --------------------------------------------------------------------------------------


def divergence_html(report: DivergenceReport) -> str:
    """Return the answer, the culprits, the curve of errors, and what was seen of the whole."""
    status = tag("b", str(report.status), kind=_STATUS[report.status])
    sides = (name_of(report.candidate), " against ", name_of(report.reference), ": ")
    guilty = [each for each in report.findings if each.verdict in GUILTY]
    told = (guilty or [each for each in report.findings if each.verdict not in CLEAN])[
        :MAX_FINDINGS
    ]
    left = len(report.findings) - len(told)
    blocks = [tag("p", *sides, status), tag("p", tag("b", report.headline))]
    answers = [(question.capitalize(), str(answer)) for question, answer in report.answers.items()]
    blocks += _pairs(answers)
    blocks += [_card(finding) for finding in told]
    if left:
        blocks.append(tag("p", f"and {_counted(left, 'more finding')}", kind="soft"))
    blocks += _curve(report)
    blocks += [tag("p", sentence) for sentence in sentences(report)]
    if is_estimated(report):
        blocks.append(tag("p", ESTIMATED, kind="soft"))
    repair = [f"{name}: {value}" for name, value in (report.repair or {}).items()]
    for title, lines in (
        ("Why", report.whys),
        ("Repair", repair),
        ("Not observed", report.coverage.notes),
        ("Without a partner", report.unmatched),
        ("Circumstances that differ", report.circumstances),
    ):
        blocks += _folded(title, lines)
    return _view(*blocks)


def finding_html(finding: Finding) -> str:
    """Return one finding with all that is known about it."""
    return _view(_card(finding))


def _card(finding: Finding) -> Markup:
    kind = "bad" if finding.verdict in GUILTY else "good" if finding.verdict in CLEAN else "warn"
    figures = [
        ("z", figure(finding.z)),
        ("local error", error_figure(finding.local_error)),
        ("output error", error_figure(finding.propagated_error)),
        ("share", share_figure(finding.share)),
        ("call", "" if finding.position is None else str(finding.position)),
        ("pass", finding.direction if finding.direction != "forward" else ""),
    ]
    measured = " · ".join(f"{label} {value}" for label, value in figures if value)
    return tag(
        "div",
        tag("p", name_of(finding.title), " ", tag("b", str(finding.verdict), kind=kind)),
        *([tag("p", measured, kind="soft")] if measured else []),
        *_pairs(detail_lines(finding)),
        kind=f"card {kind}",
    )


def _pairs(lines: Iterable[tuple[str, str]]) -> list[Markup]:
    """Return lines below each other, each with its label; no table where there is no line."""
    rows = [
        tag("tr", tag("td", label, kind="soft"), tag("td", words, kind="left"))
        for label, words in lines
    ]
    return [tag("table", tag("tbody", *rows))] if rows else []


def _curve(report: DivergenceReport) -> Iterator[Markup]:
    found = shown_curve(report)
    if found is None:
        return
    curve, guilty, position = found
    low, high = curve.limits()
    call = "" if position is None else f", call {position}"
    yield tag("p", f"Error over depth{call}: {low:.0e} to {high:.1e}", kind="soft")
    yield _drawn(curve, guilty)


def _drawn(curve: ErrorCurve, guilty: Finding | None) -> Markup:
    """Return the curve as a picture: local errors as bars, propagated ones as dots above them."""
    width, height = CURVE
    groups = groups_of(len(curve.names), width // 4)
    step = width / len(groups)
    low, high = map(math.log10, curve.limits())
    at = None
    if guilty is not None:
        at = curve.column(guilty.name, len(groups), guilty.layer_idx)
    own: list[str] = []
    whose: list[str] = []
    spread: list[str] = []
    for place, (first, end) in enumerate(groups):
        x = (place + 0.5) * step
        local = _height(curve.local[first:end], low, high, height)
        if local:
            (whose if place == at else own).append(f"M{x:.1f} {height}V{height - local:.1f}")
        output = _height(curve.propagated[first:end], low, high, height)
        if output:
            spread.append(f"M{x - step * 0.4:.1f} {height - output + 1:.1f}h{step * 0.8:.1f}")
    label = "bars: error of each op itself; dashes: error of its output"
    size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
    lines = ((own, "var(--bar)", step * 0.8), (whose, "var(--bad)", step * 0.8))
    shapes = [_line(*each) for each in (*lines, (spread, "currentColor", 2.0)) if each[0]]
    return tag("svg", tag("title", label), *shapes, role="img", **size)


def _line(moves: Sequence[str], colour: str, width: float) -> Markup:
    return tag("path", **{"d": "".join(moves), "stroke": colour, "stroke-width": f"{width:.1f}"})


def _height(values: Sequence[float | None], low: float, high: float, height: int) -> float:
    """Return how high the largest of some errors is drawn, between two powers of ten."""
    largest = size_of(max(values, key=size_of))
    if largest <= 0:
        return 0.0
    share = (math.log10(largest) - low) / (high - low) if math.isfinite(largest) else 1.0
    return height * min(max(share, 0.03), 1.0)


# --- lists ----------------------------------------------------------------------------------------


def _counted(count: int, words: str) -> str:
    return f"{count} {words}{'s' if count != 1 else ''}"


def _listed(lines: Sequence[str]) -> list[Markup]:
    shown = [tag("p", f"· {line}", kind="soft") for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown.append(tag("p", f"· and {len(lines) - MAX_LINES} more", kind="soft"))
    return shown


def _folded(title: str, lines: Sequence[str]) -> Iterator[Markup]:
    if lines:
        yield tag("details", tag("summary", f"{title} ({len(lines)})"), *_listed(lines))
