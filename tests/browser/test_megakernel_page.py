"""The page of a megakernel's report in Chromium: it opens clean, and lineage is followed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made_megakernels import (
    decoder_report,
    decoder_rows,
    decoder_tasks,
    queue_report,
)
from hand_made_reports import EVIL

from brickline.megakernel_flow import Flow
from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import ItemFault, WorkerTimes

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoder_report().write_page(tmp_path_factory.mktemp("page") / "megakernel.html")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 360])
def test_it_opens_clean_and_fits(open_page: Open, path: Path, theme: str, width: int) -> None:
    opened = open_page(path, theme=theme, width=width)
    assert opened.overflow_px <= 0
    opened.shoot(f"megakernel-{width}-{theme}")
    assert opened.text("#complete") == "complete"


def test_the_figures_are_the_reports(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    figures = opened.text(".figures")
    for text in ("42", "60.0 µs", "plan 9.00 µs", "lineage 3.00 µs", "1.14", "13.1 %"):
        assert text in figures, text
    assert opened.page.locator("#workers g[data-worker]").count() == 4
    assert opened.page.locator("#workers g[data-worker='1'] rect.tasks").count() == 1
    assert opened.page.locator("#workers g[data-worker='0'] rect.tasks").count() == 0
    ops = opened.page.locator("#ops tbody tr").all_inner_texts()
    assert [row.split()[0] for row in ops] == ["gemv", "silu_gate", "attention", "rms_norm"]
    assert "8.00 µs" in ops[0]
    counters = opened.text("#counters")
    assert "compiled cache hit" in counters
    assert "Not measured" in counters


def test_lineage_is_followed_by_clicking(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    chosen = opened.page.locator("#lineage .chosen-task")
    assert chosen.get_attribute("data-task") == "7"  # the first output, the logits
    assert "In all 8 launches contributed, and given memory" in opened.text("#all-sources")
    opened.page.locator("#lineage .flow .node[data-task='6']").click()
    assert chosen.get_attribute("data-task") == "6"
    opened.page.locator("#lineage .flow .node[data-task='5']").focus()
    opened.page.keyboard.press("Enter")
    assert opened.text("#lineage h3") == "launch 5 (gemv, QkvProjection, layer 1)"
    given = opened.page.locator("#lineage .flow .node.given")
    assert given.all_text_contents() == ["ww"]  # its title, and its text
    assert "In all 6 launches" in opened.text("#all-sources")
    opened.page.locator("#lineage-back").click()
    assert chosen.get_attribute("data-task") == "6"
    opened.page.locator("#lineage .flow .node[data-task='7']").click()  # a reader
    assert chosen.get_attribute("data-task") == "7"
    opened.page.get_by_label("Output to explain").select_option(index=1)
    assert chosen.get_attribute("data-task") == "1"


def test_a_span_leads_to_its_lineage(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    canvas = opened.page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    # Worker 0 works without a pause; task 1 lies from 500 to 1,500 of 6,000 ns.
    at = {"x": 40 + (box["width"] - 44) * 1000 / 6000, "y": 22 + 10}
    canvas.hover(position=at)
    tip = opened.text(".tip")
    assert "launch 1 (gemv, QkvProjection, layer 0)" in tip
    assert "1.00 µs of work" in tip
    canvas.click(position=at)
    assert opened.page.locator("#lineage .chosen-task").get_attribute("data-task") == "1"


def test_dragging_zooms_the_timeline(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    canvas = opened.page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    opened.page.mouse.move(box["x"] + 200, box["y"] + 40)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + 500, box["y"] + 40, steps=4)
    opened.page.mouse.up()
    assert " to " in opened.text("#timeline .said")
    before = opened.text("#timeline .said")
    canvas.focus()
    opened.page.keyboard.press("+")
    assert opened.text("#timeline .said") != before
    opened.page.get_by_role("button", name="Whole run").click()
    assert opened.text("#timeline .said") == "0 ns to 6.00 µs"


def test_a_partial_queue_says_why(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(queue_report().write_page(tmp_path / "queue.html"))
    assert opened.text("#complete") == "partial"
    head = opened.text(".masthead")
    assert "4 of 15 items remain: 1 faulted, 3 skipped" in head
    assert "MK503" in opened.text("#faults")
    assert opened.page.locator("#timeline").count() == 0
    opened.page.locator("#tasks").get_by_role("button", name="Deduped").click()
    rows = opened.page.locator("#tasks tbody tr")
    assert rows.count() == 1
    rows.get_by_role("button", name="Lineage").click()
    assert "Computed by" in opened.text("#lineage .pairs")
    assert "submission 1 (add)" in opened.text("#lineage .pairs")


def test_names_are_text(open_page: Open, tmp_path: Path) -> None:
    report = decoder_report(
        name=EVIL,
        ops=(EVIL, *decoder_report().ops[1:]),
        outputs={EVIL: (7,)},
        notes=(EVIL,),
        flow=Flow([0, *range(8)], range(7), [0, *[1] * 8], [0], [EVIL]),
        faults=None,
    )
    opened = open_page(report.write_page(tmp_path / "evil.html"))
    assert opened.page.evaluate("window.evil") is None
    assert "onerror" in opened.text("h1")


def test_without_tracing_or_lineage(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(decoder_report(records=None, flow=None).write_page(tmp_path / "plain.html"))
    assert "Lineage was off" in opened.text("#lineage")
    assert opened.page.get_by_role("button", name="Lineage").count() == 0
    empty = MegakernelReport(
        name="empty",
        mode="queue",
        device="CPU",
        items_processed=0,
        items_remaining=0,
        wall_time_ns=1,
    )
    opened = open_page(empty.write_page(tmp_path / "empty.html"))
    assert "All 0 items are done" in opened.text(".masthead")


def test_a_large_report_stays_light(open_page: Open, tmp_path: Path) -> None:
    levels, wide = 400, 128
    count = levels * wide
    task = np.arange(count)
    sources = np.repeat(np.arange(levels - 1) * wide, wide)[:, None] + np.arange(wide)
    begin = np.concatenate([np.zeros(wide, int), np.arange(count - wide + 1) * wide])
    report = MegakernelReport.of_queue(
        name="wide",
        device="CUDA:0",
        ops=["level"],
        tasks={"op": np.zeros(count, int), "items": np.ones(count, int)},
        workers=[WorkerTimes(levels, 0, 0, levels * 1000, levels * 700, levels * 200)] * wide,
        items_processed=count,
        items_remaining=0,
        wall_time_ns=levels * 1000,
        spans={
            "worker": task % wide,
            "task": task,
            "begin_ns": task // wide * 1000,
            "ready_ns": task // wide * 1000 + 200,
            "end_ns": task // wide * 1000 + 900,
            "items": np.ones(count, int),
        },
        flow=Flow(begin, sources.ravel()),
        faults=[ItemFault(0, 0, "1", "level")] * 0,
    )
    path = report.write_page(tmp_path / "wide.html")
    assert path.stat().st_size < 4 * 2**20
    opened = open_page(path)
    assert "The first 20,000 of 51,200 tasks" in opened.text("main")
    opened.shoot("megakernel-wide")


def test_rows_and_tasks_agree() -> None:
    progress, records = decoder_rows()
    assert int(progress["items"].sum()) == sum(decoder_tasks()["items"])
    assert sum(len(each) for each in records) == int(progress["position"].sum())
