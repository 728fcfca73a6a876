"""What `brickline top` folds: the same figures as a profile, from arrays alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import HandMadePart, decode_part
from hypothesis import given
from hypothesis import strategies as st

import brickline as bl
from brickline.abi import SlotKind
from brickline.bricks import BrickCategory
from brickline.histogram import FIRST_INDEX, Histogram, quantiles_of_rows
from brickline.profile import profile_from_parts
from brickline.spools import read_part, read_statistics
from brickline.top.live import Live, Order
from brickline.top.machine import GpuLoad, Machine, MachineLoad
from brickline.top.plain import load_lines
from brickline.top.views import bar, count, sparkline, stacked


class Parts:
    """A process whose parts a test changes."""

    pid = 1

    def __init__(self, *parts: HandMadePart) -> None:
        for number, part in enumerate(parts):
            part.path = Path(str(number))  # type: ignore[attr-defined]
        self.parts: list[Any] = list(parts)

    def statistics(self) -> list[Any]:
        return self.parts

    def wait(self, seconds: float) -> bool:
        return False


def test_the_figures_of_a_frame_are_those_of_the_profile() -> None:
    parts = [decode_part(), decode_part(steps=3, layers=6)]
    profile = profile_from_parts(parts)  # type: ignore[arg-type]
    frame = Live(Parts(*parts)).look(whole=True)
    rows = frame.bricks(Order.SHARE)
    figures = frame.figures(rows)
    assert {frame.rows[at].name for at in rows} == {row.name for row in profile.bricks}
    for at, row in enumerate(rows):
        known = profile.brick(frame.rows[row].name)
        assert known is not None
        assert figures.count[at] == known.count
        assert figures.avg_ns[at] == pytest.approx(known.avg_ns)
        assert figures.share[at] == pytest.approx(profile.share(known))
        # The profile knows the smallest and largest duration too, and clamps to them.
        assert figures.p50_ns[at] == pytest.approx(known.p50_ns, rel=0.045)
        assert figures.p99_ns[at] == pytest.approx(known.p99_ns, rel=0.045)
    assert frame.tokens == profile.total_tokens
    total = profile.share_total_ns
    for category, share in frame.categories:
        assert share == pytest.approx(profile.categories[category].share_ns / total)
    assert {layer: float(cells.sum()) for layer, cells in frame.layers} == pytest.approx(
        {layer: row.share_ns for layer, row in profile.layers.items()}
    )


@given(
    st.lists(st.lists(st.integers(0, 10**12), max_size=40), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles_of_many_rows_are_those_of_each(
    rows: Sequence[Sequence[int]], quantile: float
) -> None:
    histograms = [Histogram.from_durations(row) for row in rows]
    counts = np.zeros((len(rows), 700))
    for at, histogram in enumerate(histograms):
        counts[at, histogram.indices - FIRST_INDEX] = histogram.counts
    zeros = np.array([histogram.zero_count for histogram in histograms])
    found = quantiles_of_rows(counts, zeros, quantile)
    assert found == pytest.approx([histogram.quantile(quantile) for histogram in histograms])


def test_rates_and_windows_are_over_the_time_between() -> None:
    now = [0.0]
    process = Parts()
    live = Live(process, clock=lambda: now[0])
    for second in range(15):
        now[0] = float(second)
        part = HandMadePart().brick("slow", [10_000_000] * (second + 1))
        part.brick("late", [1000 if second < 10 else 64_000] * (second + 1))
        part.path = Path("p")  # type: ignore[attr-defined]
        process.parts = [part]
        frame = live.look()
    rows = {frame.rows[at].name: at for at in frame.places(SlotKind.BRICK)}
    figures = frame.figures([rows["slow"]])
    assert figures.rate == pytest.approx([1.0])
    assert figures.busy == pytest.approx([0.01])
    assert 8.0 <= (frame.window_s or 0.0) <= 12.0
    assert frame.trend(rows["slow"], 5) == pytest.approx([0.01] * 5)


def test_a_spool_that_cannot_be_read_for_a_moment_keeps_the_last_state() -> None:
    process = Parts(decode_part())
    live = Live(process)
    before = live.look()
    process.parts = []
    assert live.look().now is before.now


def test_an_empty_process_has_an_empty_frame() -> None:
    frame = Live(Parts()).look()
    assert frame.bricks(Order.P99) == []
    assert frame.figures([]).count == []
    assert frame.categories == frame.layers == []
    assert frame.tokens_per_s is None
    assert frame.decode is None


def test_a_row_that_a_damaged_part_does_not_describe_is_unknown() -> None:
    part = HandMadePart().brick("known", [5])
    part.node(4_000_000, [7])
    frame = Live(Parts(part)).look()
    assert [frame.rows[at].name for at in frame.bricks(Order.NAME)] == ["(unknown)", "known"]


def test_small_pictures() -> None:
    assert sparkline([0, 1, 2, 4], 6) == "  ▁▃▅█"
    assert sparkline([0, 0], 2) == "▁▁"
    assert "".join(text for text, _ in bar(0.5, 4, "x")) == "██  "
    assert "".join(text for text, _ in bar(2.0, 4, "x")) == "████"
    both = stacked([(0.25, "a"), (0.5, "b")], 8)
    assert both == (("██", "a"), ("████", "b"), ("  ", "track"))
    assert [count(each) for each in (12, 1_234_567, 5e9, 7e16)] == [
        "12",
        "1.23 M",
        "5.00 G",
        "7.0e+16",
    ]


def test_what_is_not_known_of_a_machine_is_not_said() -> None:
    assert list(load_lines(None)) == list(load_lines(MachineLoad())) == []
    one = MachineLoad(threads=1, gpus=(GpuLoad(3, "H200", busy=0.5),))
    assert list(load_lines(one)) == ["1 thread", "GPU 3 H200 · 50 % busy"]


def test_the_load_of_a_process_that_is_gone() -> None:
    machine = Machine(2**22 - 1)
    machine.look()
    assert machine.look().cpu is None
    machine.close()


def test_a_driver_that_refuses_each_question_leaves_the_name() -> None:
    class Refusing:
        class NVMLError(Exception):
            pass

        NVML_TEMPERATURE_GPU = 0

        @staticmethod
        def nvmlDeviceGetCount() -> int:  # noqa: N802
            return 1

        @staticmethod
        def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
            return index

        def __getattr__(self, name: str) -> Any:
            def refuse(*_: object) -> None:
                raise self.NVMLError("not supported")

            return refuse

    machine = Machine(1)
    machine._opened, machine._nvml = True, Refusing()
    assert machine.look().gpus == (GpuLoad(0, "GPU 0"),)
    machine.close()


def test_every_category_has_a_style() -> None:
    style = (Path(__file__).parents[2] / "src/brickline/top/top.tcss").read_text()
    assert all(f".lines--{each.label} " in style for each in BrickCategory)


def test_statistics_of_a_spool_are_those_of_the_whole_and_leave_the_rest_out(
    tmp_path: Path,
) -> None:
    with bl.BrickProfiler("t", enabled=True, path=tmp_path / "run", graph=True) as profiler:
        for layer in range(3):
            with profiler.step(tokens=1, phase="decode"), profiler.brick("mine", layer=layer):
                profiler.tiles.record(bl.TileLevel.MACRO, 250)
        for number in range(2000):
            profiler.trace(f"kernel {number}", layer=0, position=number)
        profiler.set_l2_cache_hit_rate(0.5)
        with profiler.brick("late"):
            pass
    (spool,) = (tmp_path / "run").rglob("*.spool")
    whole, part = read_part(spool), read_statistics(spool)
    for name in ("nodes", "bins", "slots", "node_lanes"):
        assert np.array_equal(getattr(part, name), getattr(whole, name))
    assert len(whole.traces) == 2000
    assert len(part.traces) == len(part.cells) == len(part.graph.nodes) == 0
    assert part.facts == whole.facts
    assert part.problems == whole.problems == []
    assert [part.string(name) for name in part.slots["name"]] == [
        whole.string(name) for name in whole.slots["name"]
    ]
