"""What the core records and what a Profile says of it, on a clock that moves only when told to."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brickline import BrickProfiler, Profile, Run, Sampling
from brickline.histogram import Histogram
from brickline.stats import BrickStats


def profiler_at(path: Path, **options: object) -> BrickProfiler:
    return BrickProfiler("test", enabled=True, device="NULL", path=path, **options)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 10**11), min_size=1, max_size=40))
def test_recorded_durations_are_the_statistics_of_the_raw_ones(durations: list[int]):
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "run"
        with profiler_at(path) as profiler:
            brick = profiler.brick("Work", elements=3)
            for duration in durations:
                with brick:
                    profiler.advance(duration)
        found = Profile.from_run(Run.open(path)).brick("Work")
    assert found is not None
    expected = BrickStats.from_durations("Work", durations, elements=3)
    assert found.histogram == Histogram.from_durations(durations)
    for name in ("count", "timed", "total_ns", "min_ns", "max_ns", "exclusive_ns"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.total_elements == expected.total_elements
    assert found.std_ns == pytest.approx(expected.std_ns, rel=1e-6, abs=1e-6 * max(durations))


def decode(profiler: BrickProfiler, steps: int = 4, layers: int = 4) -> None:
    for _ in range(steps):
        with profiler.step(tokens=1, phase="decode"):
            for layer in range(layers):
                with profiler.brick("Block", layer=layer):
                    profiler.advance(100)
                    with profiler.brick("RmsNorm", layer=layer):
                        profiler.advance(900)
            with profiler.brick("LmHead"):
                profiler.advance(5000)
            profiler.advance(1000)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(steps=2), Sampling(layers=2)])
def test_sampling_leaves_shares_and_coverage_as_they_are(tmp_path: Path, sampling: Sampling):
    with profiler_at(tmp_path / "run", sampling=sampling) as profiler:
        decode(profiler)
        profile = profiler.profile()
    shares = {row.name: profile.share(row) for row in profile.bricks}
    assert shares == pytest.approx({"LmHead": 5 / 9, "RmsNorm": 3.6 / 9, "Block": 0.4 / 9})
    assert profile.coverage == pytest.approx(0.9)
    assert profile.us_per_token == pytest.approx(10.0)
    assert all(each.passed for each in profile.validate())


def test_supplied_spans_stay_out_of_coverage_and_have_a_share(tmp_path: Path):
    with profiler_at(tmp_path / "run") as profiler:
        decode(profiler)
        profiler.record_elapsed("Elsewhere", 9000 * 4)
        profile = profiler.profile()
    elsewhere = profile.brick("Elsewhere")
    assert elsewhere is not None
    assert elsewhere.exclusive_ns == 0
    assert profile.share(elsewhere) == pytest.approx(0.5)
    assert profile.coverage == pytest.approx(0.9)


def test_tiles_and_timeline(tmp_path: Path):
    with profiler_at(tmp_path / "run", timeline_steps=2) as profiler:
        with profiler.step(tokens=1, phase="decode"), profiler.brick("LmHead"):
            for column in range(3):
                timer = profiler.tiles.start(0, 1, column)
                profiler.advance(100)
                profiler.tiles.stop(timer, 10, 400.0, 100)
        profile = profiler.profile()
    (tile,) = profile.tiles
    assert (tile.owner, tile.level_name, tile.count) == ("LmHead", "macro", 3)
    assert tile.gflops == pytest.approx(4.0)
    assert tile.arithmetic_intensity == pytest.approx(4.0)
    assert [cell.column for cell in tile.by_column()] == [0, 1, 2]
    head = profile.brick("LmHead")
    assert head is not None
    assert head.exclusive_ns == 300, "tiles take nothing from their brick"
    assert "LmHead" in {span.name for span in profile.timeline}
