"""The profile page in Chromium: figures are the run's, every view works, nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from profile_runs import HOSTILE, empty_run, hostile_run, rich_run, sampled_run

from brickline.profile import Profile, profile_from_run
from brickline.report.figures import Look, percent
from brickline.report.html.page import write_page
from brickline.report.html.profile_page import profile_page
from brickline.runs import Run

Open = Callable[..., Any]
LOOK = Look()
SECTIONS = ("bricks", "layers", "timeline", "roofline", "tiles", "graph", "steps", "recording")


def page_of(run: Path, target: Path) -> Path:
    opened = Run.open(run)
    return write_page(profile_page(profile_from_run(opened), run=opened), target)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile]:
    folder = tmp_path_factory.mktemp("rich")
    run = rich_run(folder / "rich.brick")
    return page_of(run, folder / "rich.html"), profile_from_run(Run.open(run))


@pytest.fixture
def rich(made: tuple[Path, Profile]) -> Path:
    return made[0]


@pytest.fixture
def profile(made: tuple[Path, Profile]) -> Profile:
    return made[1]


def cells(page: Any, section: str) -> list[dict[str, str]]:
    """The rows of a section's table by the titles of its columns."""
    rows: list[dict[str, str]] = page.evaluate(
        """(id) => {
          const table = document.querySelector(`#${id} .table table`);
          const titles = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
          return [...table.tBodies[0].querySelectorAll("tr[aria-rowindex]")].map((row) =>
            Object.fromEntries([...row.cells].map((cell, at) =>
              [titles[at], cell.textContent.trim()])));
        }""",
        section,
    )
    return rows


def column(page: Any, section: str, title: str) -> list[str]:
    return [row[title] for row in cells(page, section)]


def sort_by(page: Any, section: str, title: str) -> None:
    page.locator(f"#{section} thead button", has_text=re.compile(f"^{title}$")).first.click()


def timeline(page: Any) -> dict[str, Any]:
    state: dict[str, Any] = page.evaluate("brickline.timelineState()")
    return state


def test_figures_are_the_runs(open_page: Open, rich: Path, profile: Profile) -> None:
    opened = open_page(rich, width=1440)
    rows = {row["Brick"]: row for row in cells(opened.page, "bricks")}
    assert len(rows) == len(profile.bricks)
    for brick in profile.bricks:
        row = rows[brick.name]
        assert row["Share"] == percent(profile.share(brick))
        assert row["Count"] == f"{brick.count:,}"
        for title, value in (
            ("p50", brick.p50_ns),
            ("p90", brick.p90_ns),
            ("p99", brick.p99_ns),
            ("Mean", brick.avg_ns),
            ("Total", brick.total_ns),
        ):
            assert row[title] == LOOK.time(value)
    text = opened.text(".figures").replace("\u00a0", " ")
    assert LOOK.time((profile.us_per_token or 0) * 1e3) in text
    assert percent(profile.coverage or 0) in text
    assert f"{sum(step.count for step in profile.steps.values())}" in text
    steps = {row["Phase"]: row for row in cells(opened.page, "steps")}
    for step in profile.steps.values():
        assert steps[step.phase]["Tokens"] == f"{step.tokens}"
        assert steps[step.phase]["p99"] == LOOK.time(step.stats.p99_ns)
    opened.shoot("profile-light")


def test_bricks_sort_both_ways(open_page: Open, rich: Path, profile: Profile) -> None:
    page = open_page(rich, width=1440).page
    by_share = [row.name for row in sorted(profile.bricks, key=lambda row: -row.share_ns)]
    assert column(page, "bricks", "Brick") == by_share
    sort_by(page, "bricks", "Share")
    assert column(page, "bricks", "Brick") == by_share[::-1]
    assert page.locator("#bricks th[aria-sort=ascending]").inner_text().startswith("Share")
    sort_by(page, "bricks", "Brick")
    names = column(page, "bricks", "Brick")
    assert names == sorted(names, key=str.lower)
    sort_by(page, "bricks", "p99")
    longest = max(profile.bricks, key=lambda row: row.p99_ns)
    assert column(page, "bricks", "Brick")[0] == longest.name
    # A column with gaps keeps them last, whichever way it is sorted.
    for _ in range(2):
        sort_by(page, "bricks", "GFLOP/s")
        assert column(page, "bricks", "GFLOP/s")[-1] == ""


def test_bricks_filter_by_words_and_category(open_page: Open, rich: Path) -> None:
    page = open_page(rich).page
    page.keyboard.press("/")
    page.keyboard.type("proj OUT")
    assert column(page, "bricks", "Brick") == ["OutputProjection"]
    assert page.locator("#bricks .said").inner_text() == "1 of 13 bricks"
    page.keyboard.type(" nothing like it")
    assert "No bricks match." in page.locator("#bricks tbody").inner_text()
    page.locator("#bricks input").fill("")
    page.locator("#bricks .choices button", has_text="FFN").click()
    assert set(column(page, "bricks", "Brick")) == {
        "GateProjection",
        "UpProjection",
        "Activation",
        "DownProjection",
    }


def test_a_brick_opens_with_the_keyboard(open_page: Open, rich: Path, profile: Profile) -> None:
    opened = open_page(rich, width=1440)
    page = opened.page
    page.locator("#bricks tr.opens").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    second = sorted(profile.bricks, key=lambda row: -row.share_ns)[1]
    details = page.locator("#bricks .details")
    assert second.name in details.inner_text()
    assert LOOK.time(second.p999_ns) in details.inner_text()
    label = details.locator("canvas").get_attribute("aria-label")
    assert f"{second.timed:,} durations" in label
    opened.shoot("profile-brick", whole=False)
    page.keyboard.press("Escape")
    assert details.count() == 0


def test_small_histograms_have_a_bar_for_each_group_of_buckets(open_page: Open, rich: Path) -> None:
    page = open_page(rich, width=1440).page
    shapes = page.eval_on_selector_all(
        "#bricks .spark path",
        "(all) => all.map((each) => each.getAttribute('d').split('M').length - 1)",
    )
    assert len(shapes) == 13
    assert max(shapes) > 8
    said = page.locator("#bricks .spark").first.get_attribute("aria-label")
    assert re.fullmatch(r"p50 .*, p90 .*, p99 .*", said)


def test_the_heat_map_shows_categories_and_bricks(
    open_page: Open, rich: Path, profile: Profile
) -> None:
    page = open_page(rich, width=1440).page
    table = page.locator("table.heat")
    last = table.locator("tbody tr").last.locator("td.sum")
    assert last.inner_text() == "100.0 %"
    label = table.locator("td[data-row='-1'][data-column='3']").get_attribute("aria-label")
    assert label == f"{100 * profile.share(profile.layers[3]):.2f} %"
    page.get_by_role("button", name="By brick").click()
    assert table.locator("tbody tr").count() == len(profile.bricks) + 1
    table.locator("td[data-row='0'][data-column='2']").hover()
    assert "layer 2" in page.locator(".tip").inner_text()


CONTRASTS = """(sweep) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const luminance = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data].map((byte) =>
      byte / 255 <= 0.04045 ? byte / 255 / 12.92 : ((byte / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (cell) => {
    const style = getComputedStyle(cell);
    const both = [luminance(style.color), luminance(style.backgroundColor)];
    const [dark, light] = both.sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const cells = [...document.querySelectorAll("table.heat td[data-row]")];
  if (!sweep) return cells.map(contrast);
  return Array.from({ length: 201 }, (_, at) => {
    cells[0].style.setProperty("--cell", brickline.heat(at / 200));
    return contrast(cells[0]);
  });
}"""


@pytest.mark.parametrize("how", ["asked for by the system", "chosen on the page"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_cell_of_the_heat_map_can_be_read(
    open_page: Open, rich: Path, theme: str, how: str
) -> None:
    """4.5 to 1 is what WCAG asks of text (level AA)."""
    chosen = how == "chosen on the page"
    other = {"light": "dark", "dark": "light"}[theme]
    page = open_page(rich, width=1440, theme=other if chosen else theme).page
    if chosen:
        page.locator("#theme").click()
    for rows in ("By category", "By brick"):
        page.get_by_role("button", name=rows).click()
        found = page.evaluate(CONTRASTS, False)
        assert len(found) > 40
        assert min(found) >= 4.5
    assert min(page.evaluate(CONTRASTS, True)) >= 4.5  # every colour that there is


def test_the_timeline_zooms_and_pans(open_page: Open, rich: Path, profile: Profile) -> None:
    opened = open_page(rich, width=1440)
    page = opened.page
    canvas = page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    assert timeline(page)["size"] == len(profile.timeline)
    canvas.focus()
    page.keyboard.press("0")
    whole = timeline(page)
    assert whole["to"] - whole["from"] >= whole["end"]
    page.keyboard.press("+")
    page.keyboard.press("+")
    closer = timeline(page)
    assert closer["to"] - closer["from"] < 0.6 * whole["end"]
    page.keyboard.press("ArrowRight")
    later = timeline(page)
    assert later["from"] > closer["from"]
    assert later["to"] - later["from"] == pytest.approx(closer["to"] - closer["from"])
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 80)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function(f"brickline.timelineState().to < {later['to']}")
    wheeled = timeline(page)
    page.mouse.down()
    page.mouse.move(box["x"] + 800, box["y"] + 80, steps=4)
    page.mouse.up()
    assert timeline(page)["from"] < wheeled["from"]
    page.mouse.click(box["x"] + 3, box["y"] + 8)
    assert timeline(page)["from"] < 0.05 * whole["end"]
    page.get_by_role("button", name="Last step").click()
    assert timeline(page)["to"] == pytest.approx(whole["end"], rel=0.05)
    opened.shoot("profile-timeline", whole=False)


def test_an_entry_of_the_timeline_can_be_chosen(
    open_page: Open, rich: Path, profile: Profile
) -> None:
    page = open_page(rich, width=1440).page
    page.locator("#timeline canvas").focus()
    page.keyboard.press("End")
    page.keyboard.press("]")
    page.keyboard.press("]")
    name, times = timeline(page)["facts"][:2]
    assert any(
        span.name == name and times.startswith(LOOK.time(span.end_ns - span.start_ns))
        for span in profile.timeline
    )
    assert page.locator("#timeline output").inner_text().startswith(name)
    before = timeline(page)
    page.keyboard.press("Enter")
    after = timeline(page)
    assert after["to"] - after["from"] < before["to"] - before["from"]
    page.keyboard.press("Escape")
    assert timeline(page)["facts"] is None


def test_the_roofline_gives_each_distance(open_page: Open, rich: Path, profile: Profile) -> None:
    page = open_page(rich, width=1440).page
    declared = [row for row in profile.bricks if row.total_flops and row.moved_bytes]
    assert page.locator("#roofline .point").count() == len(declared)
    rows = {row["Brick"]: row for row in cells(page, "roofline")}
    for brick in declared:
        roof = min(900.0, 90.0 * brick.arithmetic_intensity)
        assert rows[brick.name]["Below the roof"] == percent(1 - brick.gflops / roof)
    assert "2 bricks that declare bytes and no FLOPs" in page.locator("#roofline").inner_text()
    page.locator("#roofline .point").first.focus()
    assert "below its roof" in page.locator(".tip").inner_text()


def test_tiles_stand_by_row_and_column(open_page: Open, rich: Path, profile: Profile) -> None:
    page = open_page(rich, width=1440).page
    found = page.eval_on_selector_all(
        "#tiles rect[data-mean]", "(all) => all.map((each) => Number(each.dataset.mean))"
    )
    means = [cell.total_ns / cell.count for cell in profile.tiles[0].cells]
    assert sorted(found) == pytest.approx(sorted(means), abs=0.06)
    assert page.locator("#tiles .margin").count() == 4 + 8
    page.locator("#tiles rect[data-mean]").nth(3).hover()
    assert "row 0, column 3" in page.locator(".tip").inner_text()


def test_the_graph_folds_and_marks_the_path(open_page: Open, rich: Path) -> None:
    opened = open_page(rich, width=1440)
    page = opened.page
    assert "Critical path:" in page.locator("#graph .path h3").inner_text()
    rows = page.locator("#graph li[data-at]")
    page.get_by_role("button", name="Fold all").click()
    assert rows.count() == 1
    assert "100.0 % of the path" in rows.first.inner_text()
    rows.first.focus()
    page.keyboard.press("ArrowRight")
    opened_rows = rows.count()
    assert opened_rows > 16
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.at") != "0"
    page.get_by_role("button", name="Open all").click()
    assert rows.count() == 195
    assert "critical" in rows.nth(3).get_attribute("class")
    page.get_by_role("button", name="Critical path only").click()
    assert 100 < rows.count() <= 195
    page.locator("#graph").scroll_into_view_if_needed()
    opened.shoot("profile-graph", whole=False)


def test_sections_keys_and_theme(open_page: Open, rich: Path) -> None:
    opened = open_page(rich, width=1440, theme="dark")
    page = opened.page
    assert page.eval_on_selector_all(
        "nav a", "(all) => all.map((each) => each.hash.slice(1))"
    ) == list(SECTIONS)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.shoot("profile-dark")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.keyboard.press("?")
    assert "Keys" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    for _ in SECTIONS:
        page.keyboard.press("j")
    page.wait_for_function("document.activeElement.id === 'recording'")
    page.keyboard.press("k")
    page.wait_for_function("document.activeElement.id === 'steps'")


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_window_needs_no_sideways_scrolling(
    open_page: Open, rich: Path, width: int
) -> None:
    opened = open_page(rich, width=width, height=760)
    assert opened.overflow_px <= 0
    opened.page.locator("#bricks tr.opens").first.click()
    opened.page.get_by_role("button", name="By brick").click()
    opened.page.get_by_role("button", name="Open all").click()
    assert opened.overflow_px <= 0
    opened.shoot(f"profile-{width}")


def test_names_from_a_run_are_only_ever_text(open_page: Open, tmp_path: Path) -> None:
    page = page_of(hostile_run(tmp_path / "h.brick"), tmp_path / "h.html")
    opened = open_page(page, width=1440)
    for row in opened.page.locator("#bricks tr.opens").all():
        row.click()
    opened.page.get_by_role("button", name="By brick").click()
    opened.page.locator("#timeline canvas").focus()
    for key in ("]", "]", "Enter"):
        opened.page.keyboard.press(key)
    assert opened.page.evaluate("window.pwned") is None
    assert opened.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    names = opened.page.eval_on_selector_all(
        "#graph .tree-name", "(all) => all.map((each) => each.textContent)"
    )
    assert HOSTILE[0] in names
    assert any("\\u{202e}" in name for name in names)
    assert not any("\u202e" in name for name in names)
    assert opened.page.locator("h1").inner_text() == HOSTILE[0]
    opened.shoot("profile-hostile")


def test_odd_runs_say_what_they_are(open_page: Open, tmp_path: Path) -> None:
    empty = open_page(page_of(empty_run(tmp_path / "e.brick"), tmp_path / "e.html"))
    assert "No brick was recorded" in empty.text(".masthead")
    assert empty.page.locator("section").count() == 1
    sampled = open_page(page_of(sampled_run(tmp_path / "s.brick"), tmp_path / "s.html"))
    assert "Sampled: 50 of 80 entries were timed" in sampled.text(".notice")
    assert column(sampled.page, "bricks", "Timed") == ["25 %"]
    for section, words in (
        ("timeline", "keeps no timeline"),
        ("roofline", "were not measured"),
        ("graph", "drew no execution graph"),
        ("layers", "names a layer"),
    ):
        assert words in sampled.text(f"#{section}")
