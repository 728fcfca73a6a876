"""Reports: what they say, that they fit, and that a name is never more than a name."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from hand_made import HandMadePart, decode_part, profile_of
from rich.console import Console

from brickline.budgets import check_budgets, parse_budgets
from brickline.profile import Profile
from brickline.profile_rows import Recording
from brickline.report.as_csv import profile_csv
from brickline.report.as_json import profile_document, profile_json
from brickline.report.figures import Look
from brickline.report.text import (
    print_profile,
    profile_text,
    render_budgets,
    render_findings,
)
from brickline.stats import Peaks

EVIL = "[red]a[/red][link=x]\x1b[31m\nb"


@pytest.mark.parametrize(
    ("ns", "words"),
    [
        (999, "999 ns"),
        (999.6, "1.00 µs"),
        (999_400, "999 µs"),
        (999_600, "1.00 ms"),
        (1e9, "1.00 s"),
    ],
)
def test_a_time_is_rounded_before_its_unit_is_chosen(ns: float, words: str) -> None:
    assert Look().time(ns) == words


def printed(profile: Profile, **options: object) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=stream, width=120, **options)  # type: ignore[arg-type]
    print_profile(profile, console)
    stream.flush()
    stream.seek(0)
    return stream.read()


def test_the_report_has_every_section():
    part = decode_part().tile("LmHead", 0, [1000, 2000], flops=8e4, bytes_in=400)
    part.step("prefill", [5_000_000], tokens=12)
    text = profile_text(profile_of(part, name="demo", peaks=Peaks(100, 10)), width=140)
    assert "demo · 9 steps, 20 tokens · 1.00 ms per token (decode)" in text
    for words in ("Bricks", "Categories", "Steps", "Layers", "Tiles", "Recording took"):
        assert words in text
    row = next(line for line in text.splitlines() if line.startswith("RmsNorm"))
    assert row.split()[:3] == ["RmsNorm", "64", "10.0"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_lines_fit_the_width(width: int):
    part = decode_part().brick("x" * 150, [1, 2, 3])
    text = profile_text(profile_of(part), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "LmHead" in text


def test_a_name_is_never_markup_nor_control():
    text = profile_text(profile_of(HandMadePart().brick(EVIL, [5]), name=EVIL), width=200)
    assert "[red]a[/red][link=x]\\x1b[31m\\nb" in text
    assert "\x1b" not in text


def test_no_colour_when_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed(profile_of(decode_part()), force_terminal=True)
    monkeypatch.delenv("NO_COLOR")
    coloured = printed(profile_of(decode_part()), force_terminal=True, color_system="standard")
    assert "\x1b[3" in coloured


def test_a_stream_without_unicode_gets_ascii():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    part = decode_part().brick("µ-kernel", [5])
    part.tile("LmHead", 0, [10])
    print_profile(profile_of(part), Console(file=stream, width=120))
    stream.flush()
    stream.seek(0)
    text = stream.read()
    assert "350 us" in text
    assert "####" in text


def test_a_disabled_profiler_says_so_and_how_to_enable_it():
    text = profile_text(Profile("x", enabled=False))
    assert "disabled" in text
    assert "enabled=True" in text
    assert "No brick was recorded" in profile_text(Profile("x"))


def test_notes():
    part = decode_part()
    part.brick("Late", [5, 5], count=9, approximate=1, out_of_order=1, host_bound=1)
    part.header |= {"lost_records": 1, "orphan_exits": 2, "abandoned_timers": 3, "closed": 0}
    profile = replace(profile_of(part), problems=("spool 7 is damaged",))
    text = profile_text(profile, width=200)
    for words in (
        "Sampled:",
        "approximate",
        "out of order",
        "host-bound",
        "1 entries found no space",
        "2 bricks were left",
        "3 timers",
        "not closed",
        "Not read: spool 7 is damaged",
    ):
        assert words in text


def test_many_layers_are_shown_in_runs_of_neighbours():
    text = profile_text(profile_of(decode_part(steps=1, layers=126)), width=100)
    assert " 0-2 " in text
    assert "123-125" in text


def test_limit_says_what_is_hidden():
    stream = io.StringIO()
    print_profile(profile_of(decode_part()), Console(file=stream, width=100), limit=2)
    assert "the first 2 of 4" in stream.getvalue()
    assert "RmsNorm" not in stream.getvalue()


def test_findings_and_budgets_are_printed():
    profile = profile_of(decode_part())
    stream = io.StringIO()
    console = Console(file=stream, width=150)
    console.print(render_findings(profile.validate(), Look()))
    results = check_budgets(profile, parse_budgets("bricks.LmHead = 1\ntotal.us_per_token = 1e9"))
    console.print(render_budgets(results, Look()))
    text = stream.getvalue()
    assert "ok       coverage" in text
    assert text.index("FAILED   bricks.LmHead.avg: 350.00 µs exceeds 1 µs") < text.index(
        "ok       total.us_per_token"
    )


def test_json_is_versioned_and_has_units():
    part = decode_part().brick(EVIL, [5]).tile("LmHead", 0, [10, 20])
    part.facts["l2_cache_hit_rate"] = float("nan")
    profile = profile_of(part, name="demo")
    results = check_budgets(profile, parse_budgets("total.us_per_token = 1"))
    document = json.loads(profile_json(profile, findings=profile.validate(), budgets=results))
    assert (document["schema"], document["version"]) == ("brickline-profile", 1)
    assert {row["name"] for row in document["bricks"]} >= {"LmHead", EVIL}
    head = next(row for row in document["bricks"] if row["name"] == "LmHead")
    assert (head["avg_us"], head["count"], head["category"]) == (350.0, 8, "Other")
    assert sum(head["histogram_ns"]["positive"]["bucket_counts"]) == 8
    assert document["steps"][0]["us_per_token"] == 1000.0
    assert [cell["index"] for cell in document["tiles"][0]["columns"]] == [0, 1]
    assert document["budgets"][0]["passed"] is False
    assert document["checks"][0]["code"] == "coverage"
    assert document["facts"]["l2_cache_hit_rate"] is None
    assert "budgets" not in profile_document(profile)


def test_what_lies_outside_of_bricks_is_unknown_where_they_are_timed_on_a_device():
    profile = profile_of(decode_part())
    on_device = replace(
        profile, bricks=tuple(replace(brick, host_ns=5) for brick in profile.bricks)
    )
    host, device = (profile_document(one)["steps"][0] for one in (profile, on_device))
    assert host["outside_bricks_ns"] >= 0
    assert device["outside_bricks_ns"] is None


def test_csv_has_one_table():
    rows = list(
        csv.DictReader(io.StringIO(profile_csv(profile_of(decode_part().brick(EVIL, [5])))))
    )
    assert {row["table"] for row in rows} == {"brick", "brick_layer", "brick_phase", "step"}
    assert EVIL in {row["name"] for row in rows}
    head = next(row for row in rows if row["name"] == "LmHead")
    assert float(head["avg_us"]) == 350.0


def test_waits_for_a_device_are_told_apart_from_what_recording_took() -> None:
    recording = Recording(timed=1, measuring_ns=50.0, waiting_ns=3_000_000)
    assert recording.overhead_ns == 50.0
    profile = replace(profile_of(decode_part()), recording=recording)
    assert "Its sync mode waited 3.00 ms for the device besides." in profile_text(profile)
