"""The HTML page without a browser: what stands in the file, how large it gets, what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hand_made import HandMadePart, profile_of
from hypothesis import given
from hypothesis import strategies as st
from profile_runs import HOSTILE, empty_run, hostile_run, rich_run, sampled_run

from brickline import BrickProfiler
from brickline.abi import RECORD, TRACE, ClockDomain
from brickline.commands import main
from brickline.errors import RunError, UsageError
from brickline.graph import EdgeKind, ExecutionGraph
from brickline.histogram import Histogram, merge_histograms
from brickline.profile import Profile, profile_from_run
from brickline.report.html import page as shell
from brickline.report.html.bands import bands
from brickline.report.html.graph_tree import graph_views
from brickline.report.html.page import MAX_BYTES, asset, named, packed, page, write_page
from brickline.report.html.profile_page import histogram_fields, page_document, profile_page
from brickline.report.html.timeline import timeline_view
from brickline.runs import Run

ASSETS = Path(shell.__file__).parent / "assets"
ROOM = 2**22


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run.open(rich_run(tmp_path_factory.mktemp("rich") / "rich.brick", steps=12, layers=4))


@pytest.fixture(scope="module")
def profile(rich: Run) -> Profile:
    return profile_from_run(rich)


def document_of(text: str) -> dict[str, Any]:
    """The data of a page, as a browser finds it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


# The shell


def test_the_policy_allows_exactly_what_the_page_holds() -> None:
    text = page("title", {}, scripts=("heat.js",), styles=("profile.css",))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    inline = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", text, re.DOTALL)
    allowed = re.findall(r"'sha256-([^']*)'", policy[1])
    digests = [hashlib.sha256(each.encode()).digest() for each in inline]
    assert sorted(allowed) == sorted(base64.b64encode(each).decode() for each in digests)
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


def test_a_page_names_no_other_place(profile: Profile) -> None:
    text = profile_page(profile)
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:script|img|iframe)[^>]*\bsrc=", text)


@pytest.mark.parametrize("script", sorted(path.name for path in ASSETS.glob("*.js")))
def test_no_script_makes_markup_or_code_from_text(script: str) -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "srcdoc", "createContextualFragment", "DOMParser", "fetch(",
                 "XMLHttpRequest", "import("):  # fmt: skip
        assert word not in asset(script), f"{script} uses {word}"


@pytest.mark.parametrize("text", [*HOSTILE, "\ud800 alone", "@@DATA@@", "</SCRIPT\t>", "&lt;"])
def test_no_text_leaves_its_place(text: str) -> None:
    made = page(text, {"name": text, text: [text]}, scripts=())
    made.encode("utf-8")
    assert document_of(made) == {"name": text, text: [text]}
    # Comments and scripts of the page itself, and nothing more.
    plain = page("title", {}, scripts=())
    for tag in ("<script", "</script", "<!--", "<img", "<title"):
        assert made.lower().count(tag) == plain.lower().count(tag)


def test_numbers_that_are_not_finite_become_their_names() -> None:
    values = [float("nan"), float("inf"), -float("inf"), 1.5]
    made = document_of(page("t", {"values": values, "deep": {"a": (float("nan"),)}}, scripts=()))
    assert made == {"values": ["NaN", "Infinity", "-Infinity", 1.5], "deep": {"a": ["NaN"]}}


def test_a_page_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.html"
    assert write_page("one", target) == target
    with pytest.raises(UsageError, match="--force"):
        write_page("two", target)
    assert write_page("two", target, force=True).read_text() == "two"
    with pytest.raises(UsageError, match="directory"):
        write_page("three", tmp_path, force=True)
    with pytest.raises(UsageError, match="no directory"):
        write_page("four", tmp_path / "missing" / "a.html")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(RunError, match="cannot write the page: No space left"):
        write_page("five", target, force=True)
    assert target.read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_long_names_are_cut_and_counted() -> None:
    assert named("x" * 300) == "x" * 300
    assert named("x" * 1300) == "x" * 300 + "… (1,000 more characters)"


@given(st.lists(st.integers(0, 255)), st.sampled_from(["u1", "<u2", ">u4", "<f8", "<i4"]))
def test_a_packed_column_is_little_endian(values: list[int], kind: str) -> None:
    column = packed(np.array(values, kind))
    raw = base64.b64decode(column["data"])
    assert np.frombuffer(raw, f"<{column['kind']}").tolist() == values


@given(st.sets(st.integers(0, 10_000), min_size=1), st.integers(1, 64))
def test_bands_hold_every_place_in_order(places: set[int], most: int) -> None:
    labels, band_of = bands(sorted(places), most)
    assert len(labels) <= most
    assert band_of.keys() == places
    assert sorted(set(band_of.values())) == list(range(len(labels)))
    assert [band_of[place] for place in sorted(places)] == sorted(band_of.values())


@given(st.lists(st.integers(0, 2**40), max_size=300), st.integers(1, 60))
def test_a_coarser_histogram_loses_no_entry(durations: list[int], most: int) -> None:
    histogram = Histogram.from_durations(durations)
    fields = histogram_fields(histogram, most)
    assert len(fields["counts"]) <= max(most, 2)
    assert sum(fields["counts"]) + fields["zero"] == len(durations)
    if fields["counts"]:
        indices = np.cumsum([fields["first"], *fields["steps"]])
        # Every bucket of the run lies in the coarser one of its own place.
        assert set(indices.tolist()) == {int(at) >> fields["doubled"] for at in histogram.indices}


# The profile's document


def test_figures_are_the_profiles(profile: Profile, rich: Run) -> None:
    document = page_document(profile, run=rich)
    assert [row["name"] for row in document["bricks"]] == [row.name for row in profile.bricks]
    for made, row in zip(document["bricks"], profile.bricks, strict=True):
        assert made["count"] == row.count
        assert made["total_ns"] == row.total_ns
        assert made["share"] == pytest.approx(profile.share(row))
        assert made["p99_us"] == pytest.approx(row.p99_ns / 1e3)
        assert sum(made["histogram"]["counts"]) == row.timed
    assert document["figures"]["us_per_token"] == profile.us_per_token
    assert document["figures"]["coverage"] == profile.coverage
    assert dict(document["recording"])["entries counted"] == profile.recording.counted


def test_heat_sums_to_the_whole(profile: Profile) -> None:
    heat = page_document(profile)["heat"]
    assert heat["columns"] == ["0", "1", "2", "3", "no layer"]
    for grid in (heat["categories"], heat["bricks"]):
        assert sum(map(sum, grid["cells"])) == pytest.approx(1.0, abs=1e-4)
    layer = sum(row[2] for row in heat["categories"]["cells"])
    assert layer == pytest.approx(profile.share(profile.layers[2]), abs=1e-4)


def test_roofline_gives_points_or_reasons(profile: Profile) -> None:
    roofline = page_document(profile)["roofline"]
    assert roofline["peaks"] == {"gflops": 900.0, "gbps": 90.0}
    point = next(
        each for each in roofline["points"] if profile.bricks[each["brick"]].name == "LmHead"
    )
    row = profile.brick("LmHead")
    assert row is not None
    assert point["attainable_gflops"] == pytest.approx(min(900.0, row.arithmetic_intensity * 90.0))
    assert dict(roofline["left_out"]) == {
        "declare neither FLOPs nor bytes": 1,
        "declare bytes and no FLOPs": 2,
    }
    bare = page_document(profile_of(HandMadeGraphless()))["roofline"]
    assert (bare["peaks"], bare["points"]) == (None, [])


class HandMadeGraphless(HandMadePart):
    """A part with bricks, no graph, no traces."""

    graph = SimpleNamespace(nodes=())
    traces = np.empty(0, TRACE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.brick("LmHead", [1000, 2000])


def test_tiles_are_placed(profile: Profile) -> None:
    grid = page_document(profile)["tiles"]["grids"][0]
    assert (grid["level"], grid["owner"]) == ("macro", "LmHead")
    assert (grid["rows"], grid["columns"]) == (
        [str(at) for at in range(4)],
        [str(at) for at in range(8)],
    )
    assert sum(cell[2] for cell in grid["cells"]) == grid["count"]
    assert sum(cell[3] for cell in grid["cells"]) == grid["total_ns"]


# Timeline


def timed_part(process: int, spans: list[tuple[int, int, int]]) -> HandMadePart:
    part = HandMadeGraphless(process=process)
    part.add_lane(ClockDomain.CUDA, device=0, stream=7)
    slot = part.slot_list[0][0]
    part.recent = np.zeros(len(spans), RECORD)
    part.recent["slot"] = slot
    part.recent["start"] = [start for start, _, _ in spans]
    part.recent["end"] = [end for _, end, _ in spans]
    part.recent_lanes = np.array([lane for _, _, lane in spans], np.uint32)
    return part


def column(view: dict[str, Any], name: str) -> list[Any]:
    packed_column = view["columns"][name]
    raw = base64.b64decode(packed_column["data"])
    values: list[Any] = np.frombuffer(raw, f"<{packed_column['kind']}").tolist()
    return values


def test_the_timeline_has_a_lane_for_each_thread_and_stream() -> None:
    parts = [timed_part(9, [(100, 300, 1), (50, 90, 0)]), timed_part(4, [(70, 80, 0)])]
    view = timeline_view(profile_of(*parts), ROOM)
    assert view is not None
    assert [lane["device"] for lane in view["lanes"]] == [False, False, True]
    assert "process 4" in view["lanes"][0]["name"]
    assert "CUDA:0 stream 0x7" in view["lanes"][2]["name"]
    rows = list(
        zip(column(view, "lane"), column(view, "start"), column(view, "duration"), strict=True)
    )
    assert rows == [(0, 20, 10), (1, 0, 40), (2, 50, 200)]


def test_the_timeline_has_a_lane_for_the_launches_of_each_stream() -> None:
    part = timed_part(3, [(10, 400, 0)])
    part.traces = np.zeros(5, TRACE)
    part.traces["name"] = [part.string_id(name) for name in ("outer", "inner", "next", "lost", "c")]
    part.traces["start_ns"] = [100, 120, 200, -1, 150]
    part.traces["end_ns"] = [190, 180, 300, 7, 170]
    part.traces["clock_domain"] = [1, 1, 1, 1, 0]
    part.traces["stream"], part.traces["thread"] = 0x20, 77
    view = timeline_view(profile_of(part), ROOM)
    assert view is not None
    assert [lane["name"] for lane in view["lanes"]] == [
        "thread 7",
        "thread 77 · launches",
        "CUDA:0 stream 0x20 · launches",
    ]
    names = [view["names"][at] for at in column(view, "name")]
    rows = list(zip(names, column(view, "depth"), column(view, "duration"), strict=True))
    assert rows[2:] == [("outer", 0, 90), ("inner", 1, 60), ("next", 0, 100)]


def test_the_timeline_keeps_the_newest_that_fit() -> None:
    part = timed_part(1, [(at * 10, at * 10 + 5, 0) for at in range(1000)])
    view = timeline_view(profile_of(part), 32 * 100 + 4 * 80 * 2000)
    assert view is not None
    assert (view["total"], view["shown"]) == (1000, 100)
    assert column(view, "start") == [at * 10 for at in range(100)]
    assert timeline_view(profile_of(part), 0)["shown"] == 0  # type: ignore[index]


# Graph


def drawn(graph: ExecutionGraph) -> dict[str, Any]:
    part = SimpleNamespace(graph=graph.tables(), header={"process": 1})
    views = graph_views(SimpleNamespace(parts=[part]))  # type: ignore[arg-type]
    view: dict[str, Any] = views["graphs"][0]
    return view


def test_the_tree_holds_every_node_or_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from brickline.report.html import graph_tree

    monkeypatch.setattr(graph_tree, "MAX_ROWS", 40)
    graph = ExecutionGraph()
    for layer in range(12):
        with graph.scope(graph.add_layer(layer)):
            for at in range(20):
                graph.record_brick("Same" if at % 2 else f"own {at}", timing_ns=10)
    view = drawn(graph)
    rows = view["tree"]["rows"]
    assert len(rows) == 40
    # Each layer holds ten names of its own, and ten alike that share a row.
    assert view["tree"]["shown"] + sum(row[7] for row in rows) == graph.num_nodes
    assert max(row[3] for row in rows) == 10
    assert view["path"]["total_ns"] == 12 * 20 * 10
    assert sum(ns for _, _, ns in view["path"]["names"]) == view["path"]["total_ns"]
    assert sum(ns for _, ns in view["path"]["pieces"]) == view["path"]["total_ns"]


def test_a_graph_that_waits_for_itself_is_said() -> None:
    graph = ExecutionGraph()
    a, b = graph.add_brick("a", timing_ns=1), graph.add_brick("b", timing_ns=1)
    graph.add_edge(a, b, EdgeKind.DEPENDS_ON)
    graph.add_edge(b, a, EdgeKind.DEPENDS_ON)
    view = drawn(graph)
    assert "no critical path" in view["problem"]
    assert len(view["tree"]["rows"]) == 2


def test_a_chain_of_containers_is_cut() -> None:
    graph = ExecutionGraph()
    node = graph.add_brick("0")
    for at in range(1, 4000):
        inner = graph.add_brick(str(at))
        graph.add_edge(node, inner, EdgeKind.CONTAINS)
        node = inner
    view = drawn(graph)
    assert len(view["tree"]["rows"]) == 2500
    assert view["tree"]["rows"][-1][7] == 1


# Odd runs


def test_a_page_stays_small_whatever_the_run_holds(tmp_path: Path) -> None:
    path = tmp_path / "wide.brick"
    with BrickProfiler(
        "wide", enabled=True, device="NULL", path=path, timeline_steps=128, graph=True
    ) as profiler:
        for at in range(4000):
            with profiler.step(phase=f"phase {at % 12}"):
                with profiler.brick(f"{at:04d}" + "🧱" * 250, layer=at):
                    profiler.advance(1 + at * 977)
                for inner in range(24):
                    with profiler.brick(f"inner {inner}", layer=inner):
                        profiler.advance(3**inner % 100_000)
    opened = Run.open(path)
    made = profile_page(profile_from_run(opened), run=opened)
    assert len(made.encode()) <= MAX_BYTES
    document = document_of(made)
    assert document["bricks_left_out"]["count"] == 4024 - len(document["bricks"])
    assert len(document["heat"]["columns"]) <= 65
    assert document["timeline"]["shown"] < document["timeline"]["total"]


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    document = page_document(profile_from_run(Run.open(empty_run(tmp_path / "e.brick"))))
    assert "No brick was recorded" in document["headline"][0][0]
    assert (document["bricks"], document["timeline"], document["tiles"]) == ([], None, None)


def test_a_sampled_run_says_so(tmp_path: Path) -> None:
    document = page_document(profile_from_run(Run.open(sampled_run(tmp_path / "s.brick"))))
    assert [kind for kind, _ in document["notices"]] == ["info"]
    assert "Sampled: 50 of 80 entries" in document["notices"][0][1]


def test_a_live_run_says_so(tmp_path: Path) -> None:
    with BrickProfiler("live", enabled=True, device="NULL", path=tmp_path / "l.brick") as profiler:
        with profiler.brick("LmHead"):
            profiler.advance(10)
        opened = Run.open(tmp_path / "l.brick")
        document = page_document(profile_from_run(opened), run=opened)
    assert document["notices"][0][0] == "warn"
    assert "still being recorded" in document["notices"][0][1]
    assert dict(document["recording"])["ended"] == "still recording"


def test_a_damaged_part_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    path = hostile_run(tmp_path / "d.brick")
    (path / "spool" / "77-0.spool").write_bytes(b"BRKSPOOL" + b"\xff" * 9000)
    opened = Run.open(path)
    document = page_document(profile_from_run(opened), run=opened)
    assert document["notices"][0][0] == "bad"
    assert any("77-0.spool" in line for line in document["problems"])
    assert len(document["bricks"]) == len(HOSTILE)


# The command


Report = Callable[..., tuple[int, str, str]]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Report:
    """Runs `brickline report` here and returns its status, output and errors."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["brickline", "report", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


def test_the_command_writes_the_page_and_names_it(
    report: Report, rich: Run, tmp_path: Path
) -> None:
    target = tmp_path / "page.html"
    assert report(rich.path, "--html", target) == (0, f"The page is in {target}\n", "")
    assert document_of(target.read_text(encoding="utf-8"))["name"] == "llama decode"
    status, _, errors = report(rich.path, "--html", target)
    assert (status, "--force" in errors) == (2, True)
    assert report(rich.path, "--html", target, "--force")[0] == 0


def test_the_command_refuses_in_clear_words(report: Report, rich: Run, tmp_path: Path) -> None:
    newer = empty_run(tmp_path / "newer.brick")
    manifest = json.loads((newer / "manifest.json").read_text(encoding="utf-8"))
    (newer / "manifest.json").write_text(json.dumps(manifest | {"version": 99}), encoding="utf-8")
    for words, expected in (
        ((rich.path, "--html", tmp_path / "a.html", "--json"), "ask for one"),
        ((tmp_path / "nothing", "--html", tmp_path / "a.html"), "expected a run"),
        ((newer, "--html", tmp_path / "a.html"), "99"),
        ((rich.path, "--html", tmp_path / "no" / "a.html"), "no directory"),
    ):
        status, _, errors = report(*words)
        assert status == 2
        assert expected in errors
        assert "Traceback" not in errors
    assert not (tmp_path / "a.html").exists()


def test_merged_histograms_are_what_the_page_merges() -> None:
    parts = [Histogram.from_durations([10, 20]), Histogram.from_durations([20, 3000])]
    assert histogram_fields(merge_histograms(parts), 200)["counts"] == [1, 2, 1]
