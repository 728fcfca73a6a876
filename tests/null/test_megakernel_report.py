"""MegakernelReport: every figure follows from what was measured, and nothing else is believed."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made_megakernels import (
    BRICKS,
    LAYERS,
    OPS,
    WORKERS,
    chain_flow,
    decoder_report,
    decoder_rows,
    decoder_tasks,
    faulted_rows,
    queue_report,
)
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import brickline
from brickline.commands import app
from brickline.errors import BricklineError, RunDamaged, RunError, RunVersion, UsageError
from brickline.export.megakernel_metrics import families_of_megakernel, sources_of
from brickline.megakernel_files import is_megakernel_report
from brickline.megakernel_flow import Flow
from brickline.megakernel_progress import FAULT, NO_TASK, PROGRESS, RECORD
from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import ItemFault, TaskState, WorkerState, WorkerTimes
from brickline.megakernel_telemetry import (
    MegakernelTelemetry,
    pressure_of,
    topology_of,
)
from brickline.report.megakernel import megakernel_text

HEADER = Path(brickline.__file__).parent / "include" / "brickline" / "megakernel.h"
COUNT = LAYERS * len(OPS)


# ----------------------------------------------------------------------------------- what it is of


def struct_of(name: str) -> list[tuple[str, str]]:
    """Names and kinds of a struct's fields, as the header spells them."""
    text = re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8"))
    body = re.search(rf"struct (?:alignas\(\d+\) )?{name} \{{(.*?)\n\}};", text, re.DOTALL)
    assert body is not None, f"{HEADER} has no struct {name}"
    widths = {"uint32_t": "<u4", "uint64_t": "<u8"}
    return [
        (field.strip(), widths[kind])
        for kind, names in re.findall(r"(uint\d+_t) ([^;]+);", body[1])
        for field in names.split(",")
    ]


@pytest.mark.parametrize(
    ("name", "dtype"), [("MegaProgress", PROGRESS), ("MegaRecord", RECORD), ("MegaFault", FAULT)]
)
def test_rows_are_the_headers(name: str, dtype: np.dtype[Any]) -> None:
    mine = [(field, dtype[field].str) for field in dtype.names or () if field != "padding"]
    assert mine == struct_of(name)
    found = re.search(rf"sizeof\({name}\) == (\d+)", HEADER.read_text(encoding="utf-8"))
    assert dtype.itemsize == (8 if found is None else int(found[1]))


def test_states_are_the_headers() -> None:
    text = HEADER.read_text(encoding="utf-8")
    body = re.search(r"enum class MegaState : uint32_t \{(.*?)\};", text, re.DOTALL)
    assert body is not None
    found = {int(number): name.lower() for name, number in re.findall(r"(\w+) = (\d+)", body[1])}
    assert [str(state) for state in WorkerState] == [found[at] for at in sorted(found)]


SEED = (
    *("items_processed", "items_remaining", "wall_time", "queue_plan_ns", "queue_publish_ns"),
    *("backend_dispatch_ns", "lineage_ns", "deduped_items", "published_items", "lineage_items"),
    *("telemetry", "region_lineage"),
)


def test_every_field_that_is_promised_is_there() -> None:
    report = decoder_report()
    for name in SEED:
        assert getattr(report, name) is not None, name
    assert {each.name for each in fields(MegakernelTelemetry)} >= {
        *("bytes_uploaded", "bytes_read_back", "bytes_moved", "resident_allocations"),
        *("kernel_launches", "sync_points", "occupancy_bps", "frontier_density_bps"),
        *("readback_buffers", "compiled_cache_hit", "resident_cache_hit", "topology", "pressure"),
        *("execution_mode", "capacity", "peak_memory_bytes", "memory_budget_bytes"),
    }


# ---------------------------------------------------------------------------------- program mode


def test_ticks_become_ns_of_one_clock() -> None:
    report = decoder_report()
    assert report.spans is not None
    # Worker 0 begins at 0; a tick is half a ns, on four clocks with other origins.
    first = report.spans.worker == 0
    assert report.spans.begin_ns[first][:3].tolist() == [0, 500, 1500]
    assert report.spans.end_ns[first][-1] == 6000
    for worker in range(1, WORKERS):
        mine = report.spans.worker == worker
        assert report.spans.ready_ns[mine][0] == 500
        assert report.workers[worker].begin_ns == 10 * worker
    assert [worker.work_ns for worker in report.workers] == [6000, 5000, 5000, 5000]
    assert report.workers[1].dependency_wait_ns == 990
    assert report.workers[1].other_ns == 0


def test_counts_and_sums_are_those_of_the_rows() -> None:
    report = decoder_report()
    assert (report.items_processed, report.items_remaining) == (42, 0)
    assert (report.published_items, report.deduped_items, report.lineage_items) == (42, 0, 42)
    assert report.is_complete
    assert report.imbalance == pytest.approx(6000 / 5250)
    assert report.telemetry.bytes_moved == 5120
    assert report.telemetry.capacity == 42
    assert report.backend_dispatch_ns == 40_000
    assert report.telemetry.occupancy_bps == round(10_000 * 21_000 / (WORKERS * 40_000))
    assert "work 13.1 % · waiting for tasks 1.8 % · away 85.0 %" in str(report)
    assert {row.name: (row.tasks, row.items, row.work_ns) for row in report.op_times} == {
        "rms_norm": (2, 2, 1000),
        "gemv": (2, 16, 8000),
        "attention": (2, 8, 4000),
        "silu_gate": (2, 16, 8000),
    }
    regions = report.regions
    assert regions.items.tolist() == [9, 12, 9, 12]
    assert regions.begin_ns is not None
    assert regions.end_ns is not None
    assert regions.begin_ns.tolist() == [0, 1500, 3000, 4500]
    assert regions.end_ns.tolist() == [1500, 3000, 4500, 6000]


def test_a_fault_is_executed_and_not_done() -> None:
    report = decoder_report(faults=faulted_rows(), fault_words={7: "an index past the end"})
    assert (report.items_processed, report.items_remaining, report.items_faulted) == (41, 1, 1)
    assert report.faults == (ItemFault(5, 3, "7", "gemv", "an index past the end"),)
    assert report.tasks.state is not None
    assert report.tasks.state[5] == TaskState.FAULTED
    assert "1 item remains: 1 faulted" in str(report)
    assert "an index past the end" in str(report)


def test_what_was_skipped_for_a_fault() -> None:
    progress, records = decoder_rows()
    records = [rows[rows["task"] <= 5] for rows in records]
    progress["items"] = [sum(rows["blocks"]) for rows in records]
    progress["skipped"] = 3
    report = decoder_report(progress=progress, records=records, faults=faulted_rows())
    assert (report.items_faulted, report.items_skipped, report.items_remaining) == (1, 12, 13)
    assert report.tasks.state is not None
    assert report.tasks.state.tolist()[5:] == [TaskState.FAULTED, *[TaskState.SKIPPED] * 2]


def test_a_run_that_was_stopped_is_partial_and_true() -> None:
    progress, records = decoder_rows()
    records = [rows[rows["task"] < 3] for rows in records]
    progress["state"] = 2
    progress["task"], progress["missing"] = 3, 2
    progress["items"] = [sum(rows["blocks"]) for rows in records]
    report = decoder_report(progress=progress, records=records)
    assert (report.items_processed, report.items_remaining) == (13, 29)
    assert report.tasks.done is not None
    assert report.tasks.done.tolist() == [1, 8, 4, 0, 0, 0, 0, 0]
    assert report.tasks.state is not None
    assert report.tasks.state.tolist() == [0, 0, 0, *[TaskState.NOT_RUN] * 5]
    assert (report.workers[0].task, report.workers[0].missing) == (3, 2)
    # Without records it is known how many, and not which.
    report = decoder_report(progress=progress, records=None, waits=None)
    assert (report.items_processed, report.items_remaining) == (13, 29)
    assert report.tasks.done is None
    assert report.regions.begin_ns is None


def test_deduped_items_are_done_when_their_values_are() -> None:
    tasks = {**decoder_tasks(), "alias": [-1] * 7 + [3]}
    progress, records = decoder_rows()
    records = [rows[rows["task"] < 7] for rows in records]
    progress["items"] = [sum(rows["blocks"]) for rows in records]
    report = decoder_report(tasks=tasks, progress=progress, records=records)
    assert (report.published_items, report.deduped_items) == (34, 8)
    assert (report.items_processed, report.items_remaining) == (42, 0)
    assert report.tasks.state is not None
    assert report.tasks.state[7] == TaskState.DEDUPED


def test_ops_count_what_was_executed() -> None:
    progress, records = decoder_rows()
    records = [rows[rows["task"] < 3] for rows in records]
    progress["state"] = 2
    progress["task"] = 3
    progress["items"] = [sum(rows["blocks"]) for rows in records]
    report = decoder_report(progress=progress, records=records)
    assert {row.name: row.items for row in report.op_times} == {
        "rms_norm": 1,
        "gemv": 8,
        "attention": 4,
        "silu_gate": 0,
    }
    # One item more than was recorded: its time is missing.
    report = decoder_report(progress=progress, records=records, op_items=(1, 9, 4, 0))
    assert {row.name: (row.items, row.work_ns) for row in report.op_times} == {
        "rms_norm": (1, 500),
        "gemv": (9, None),
        "attention": (4, 2000),
        "silu_gate": (0, 0),
    }
    # Without records nobody knows whose items these were.
    report = decoder_report(progress=progress, records=None, waits=None)
    assert {row.items for row in report.op_times} == {None}
    assert MegakernelReport.from_json(report.to_json()).op_items is None


def test_the_op_of_a_worker_that_hangs_has_no_time() -> None:
    progress, records = decoder_rows()
    progress[2]["state"], progress[2]["task"] = 3, 6
    report = decoder_report(progress=progress, records=records)
    assert {row.name: row.work_ns is None for row in report.op_times} == {
        "rms_norm": False,
        "gemv": False,
        "attention": True,
        "silu_gate": False,
    }


def test_tasks_are_walked_row_by_row() -> None:
    tasks = decoder_report().tasks
    assert [task.items for task in tasks] == tasks.items.tolist()
    assert tasks[5] == (
        1,
        8,
        2,
        -1,
        *(int(each[5]) for each in (tasks.brick, tasks.layer)),
        8,
        0,
        None,
        None,
    )
    assert tasks[-1].state is TaskState.DONE
    with pytest.raises(IndexError):
        tasks[8]


def test_what_never_ran_contributed_nothing() -> None:
    progress, records = decoder_rows()
    records = [rows[rows["task"] <= 5] for rows in records]
    progress["items"] = [sum(rows["blocks"]) for rows in records]
    progress["skipped"] = 3
    report = decoder_report(
        progress=progress,
        records=records,
        faults=faulted_rows(),
        outputs={"cache": (5,), "y": (7,)},
    )
    assert report.tasks.done is not None
    done = int(report.tasks.done[:6].sum())
    assert f"with 30 items, of which {done} are done" in report.explain("cache")
    assert sum(each.items for each in sources_of(report, (5,))) == done == 29
    assert sources_of(report, (7,)) == []
    names = {family.name: family for family in families_of_megakernel(report)}
    shown = names["brickline_megakernel_output_source_items"].samples
    assert {dict(sample.labels)["output"] for sample in shown} == {"cache"}
    counted = names["brickline_megakernel_op_items"].samples
    assert sum(sample.value for sample in counted) == 30


def test_a_worker_that_hangs_is_named() -> None:
    progress, records = decoder_rows()
    progress[2]["state"], progress[2]["task"], progress[2]["end_ns"] = 3, 6, 0
    report = decoder_report(progress=progress, records=None)
    assert report.workers[2].state is WorkerState.HUNG
    assert report.workers[2].end_ns is None
    assert "Worker 2 did not leave at launch 6 (attention, Attention, layer 1)." in str(report)
    assert len(records) == WORKERS


def test_what_was_not_measured_is_none_and_said() -> None:
    report = decoder_report(
        records=None, waits=None, flow=None, telemetry={}, lineage_ns=None, queue_plan_ns=None
    )
    assert report.lineage_ns is None
    assert report.lineage_items is None
    assert list(report.region_lineage) == []
    for ask in (lambda: report.region_lineage[-1], lambda: report.explain("none")):
        with pytest.raises(UsageError, match="kept no lineage; run it again with lineage=True"):
            ask()
    assert report.telemetry.frontier_density_bps is None
    assert report.telemetry.topology is None
    assert report.telemetry.bytes_moved is None
    text = str(report)
    assert "Lineage was off" in text
    assert "queue_plan_ns" in text.partition("Not measured")[2]
    assert "plan " not in text.splitlines()[1]


def test_the_frontier_is_what_could_have_run() -> None:
    """Two tasks of four items on four workers, one after the other."""
    count = 4
    spans = {
        "worker": np.tile(np.arange(count), 2),
        "task": np.repeat([0, 1], count),
        "begin_ns": np.repeat([0, 100], count),
        "ready_ns": np.repeat([0, 100], count),
        "end_ns": np.repeat([100, 200], count),
        "items": np.ones(2 * count, int),
    }
    made: dict[str, Any] = {
        "name": "q",
        "device": "CPU",
        "ops": ["a"],
        "tasks": {"op": [0, 0], "items": [4, 4]},
        "workers": [WorkerTimes(2, 0, 0, 200, 200, 0)] * count,
        "items_processed": 8,
        "items_remaining": 0,
        "wall_time_ns": 200,
        "spans": spans,
    }
    chained = MegakernelReport.of_queue(**made, waits=([0, 0, 1], [0]))
    assert chained.telemetry.frontier_density_bps == 10_000
    free = MegakernelReport.of_queue(**made, waits=([0, 0, 0], []))
    assert free.telemetry.frontier_density_bps == 15_000
    made["tasks"]["region"] = [0, 0]  # joined: a worker's second part follows its first
    joined = MegakernelReport.of_queue(**made, waits=([0, 0, 0], []))
    assert joined.telemetry.frontier_density_bps == 10_000


@pytest.mark.parametrize(
    ("items", "density", "memory", "word"),
    [
        (0, None, (None, None), "empty"),
        (9, None, (None, None), None),
        (9, 500, (None, None), "sparse"),
        (9, 501, (1, 100), "hybrid"),
        (9, 4000, (None, 100), "dense"),
        (9, 4000, (85, 100), "memory-constrained"),
        (9, None, (85, 100), "memory-constrained"),
    ],
)
def test_topologies(items: int, density: int, memory: tuple[int, int], word: str) -> None:
    assert topology_of(items, density, *memory) == word


def test_pressures() -> None:
    found = [pressure_of(items, 4) for items in (0, 3, 4, 15, 16)]
    assert found == ["empty", "light", "balanced", "balanced", "saturated"]
    assert pressure_of(1, 4, requeued=1) == "saturated"


# ------------------------------------------------------------------------------------- queue mode


def test_regions_of_a_queue_are_told_a_line_each() -> None:
    count = 300
    report = MegakernelReport.of_queue(
        name="queue",
        device="CPU",
        ops=("op",),
        tasks={
            "op": np.zeros(count, int),
            "items": np.ones(count, int),
            "region": [0] * 30 + [30, 30] + list(range(32, count)),
            "apart": [0] * 32 + [307] * (count - 33) + [999],
        },
        workers=[],
        items_processed=count,
        items_remaining=0,
        wall_time_ns=1,
        first_submission=7,
    )
    lines = report.explain_regions().splitlines()
    assert lines[0] == "300 submissions in 270 regions"
    assert lines[1].startswith("submissions 7, 8, 9, ")
    assert " 26 ... are one region" in lines[1]
    assert lines[2] == (
        "submissions 37, 38 are one region: a worker runs their items without a hop"
    )
    assert lines[3] == "submission 39: MK307: it waits for something else, too"
    assert lines[-1] == "and 170 more lines"
    with pytest.raises(UsageError, match=r"prepared\.regions\.explain"):
        decoder_report().explain_regions()
    with pytest.raises(UsageError, match="tasks, apart"):
        decoder_report(tasks={"op": [0], "items": [1], "apart": [5000]})


def test_a_queue_says_what_remains_and_why() -> None:
    text = str(queue_report())
    assert "11 of 15 items" in text
    assert "4 items remain: 1 faulted, 3 skipped" in text
    assert "MK503" in text
    assert "add        3       5   700 ns" in text


# ---------------------------------------------------------------------------------------- lineage


def test_a_chain_is_explained_back_to_given_memory() -> None:
    assert decoder_report().explain("cache") == "\n".join(
        [
            "cache comes from launch 1 (gemv, QkvProjection, layer 0) and "
            "launch 5 (gemv, QkvProjection, layer 1)",
            "     5  gemv  QkvProjection  layer 1  from 4, w",
            "     4  rms_norm  RmsNorm  layer 1  from 3",
            "     3  silu_gate  Mlp  layer 0  from 2, w",
            "     2  attention  Attention  layer 0  from 1",
            "     1  gemv  QkvProjection  layer 0  from 0, w",
            "     0  rms_norm  RmsNorm  layer 0  from x",
            "in all 6 launches with 30 items; bricks RmsNorm, QkvProjection, Attention, Mlp; given "
            "memory x, w",
        ]
    )


def test_a_deduped_task_is_an_alias_of_what_computed_it() -> None:
    text = queue_report().explain(2)
    assert "     2  add  = 1, which computed the same" in text
    assert "     1  add  from 0" in text


def test_an_output_that_is_not_complete_is_said_to_be() -> None:
    assert "submission 5 (add) is not complete" in queue_report().explain(5)


def test_long_chains_are_cut_and_say_so() -> None:
    text = decoder_report().explain(7, limit=2)
    assert text.count("\n") == 4
    assert "6 earlier ones; limit=None lists them" in text
    assert "in all 8 launches" in text


@pytest.mark.parametrize("output", ["nothing", 8, -1, 1.5, True, None])
def test_what_is_no_output_is_refused(output: Any) -> None:
    with pytest.raises(UsageError, match=r"outputs are logits, cache|expected a task"):
        decoder_report().explain(output)


def test_without_lineage_nothing_is_explained() -> None:
    with pytest.raises(UsageError, match="kept no lineage"):
        decoder_report(flow=None).explain(0)


graphs = st.integers(1, 24).flatmap(
    lambda count: st.tuples(
        *(
            st.lists(st.integers(0, task - 1), max_size=4) if task else st.just([])
            for task in range(count)
        )
    )
)


@given(graphs, st.randoms())
def test_sources_are_those_of_a_plain_walk(
    graph: tuple[list[int], ...], draw: random.Random
) -> None:
    direct = [sorted(set(sources)) for sources in graph]
    begin = np.cumsum([0, *map(len, direct)])
    names = [f"m{at}" for at in range(3)]
    given_to = [sorted(draw.sample(range(3), draw.randrange(3))) for _ in direct]
    flow = Flow(
        begin,
        list(chain(*direct)),
        np.cumsum([0, *map(len, given_to)]),
        list(chain(*given_to)),
        names,
    )

    assert len(flow.shared().begin) == len({tuple(each) for each in direct}) + 1
    flow = draw.choice([flow, flow.shared()])

    def walk(task: int) -> set[int]:
        return {task}.union(*map(walk, direct[task]))

    for task in range(len(direct)):
        found = flow.all_sources([task]).tolist()
        assert found == sorted(walk(task))
        memory = {names[place] for each in found for place in given_to[each]}
        assert set(flow.given_to_all(found)) == memory
        assert flow.readers(task) == [at for at, each in enumerate(direct) if task in each]
    count = len(direct)
    report = MegakernelReport.of_queue(
        name="q",
        device="CPU",
        ops=["a"],
        tasks={
            "op": [0] * count,
            "items": [1] * count,
            "region": [draw.randrange(count) for _ in range(count)],
        },
        workers=[],
        items_processed=count,
        items_remaining=0,
        wall_time_ns=1,
        flow=flow,
    )
    regions = sorted(set(report.tasks.region.tolist()))
    for number, sources in zip(regions, report.region_lineage, strict=True):
        members = np.flatnonzero(report.tasks.region == number).tolist()
        assert set(sources) == set().union(*map(walk, members))


# ------------------------------------------------------------------------------------ bad figures


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name: expected text"),
        ({"wall_time_ns": -1}, f"wall_time_ns: expected a number from 0 to {2**62 - 1}, got -1"),
        ({"wall_time_ns": 1.5}, "wall_time_ns: expected a number"),
        ({"lineage_ns": True}, "lineage_ns: expected a number"),
        ({"tasks": {"op": [0] * COUNT}}, "expected a column items"),
        ({"tasks": {**decoder_tasks(), "stranger": []}}, "got 'stranger'"),
        ({"tasks": {**decoder_tasks(), "op": [4] * COUNT}}, "from 0 to 3, got 4 at row 0"),
        ({"tasks": {**decoder_tasks(), "items": [0.5] * COUNT}}, "expected a list of integers"),
        ({"tasks": {**decoder_tasks(), "layer": [0]}}, "expected 8 rows, got 1"),
        ({"tasks": {**decoder_tasks(), "alias": [0] + [-1] * 7}}, "expected an earlier task"),
        ({"tasks": {**decoder_tasks(), "alias": [-1, 0, 1, *[-1] * 5]}}, "an alias itself"),
        ({"outputs": {"y": (8,)}}, "output 'y': expected a task from 0 to 7, got 8"),
        ({"flow": chain_flow(7)}, "lineage: expected 8 tasks, got 7"),
        ({"published_items": 41}, "expected 41 items processed and remaining"),
        ({"items_skipped": 5}, "at most 0 items faulted and skipped"),
        ({"lineage_items": 43}, "lineage_items: expected at most 42, as many as were submitted"),
        ({"op_items": (1,)}, "op_items: expected 4, got 1"),
        ({"telemetry": {"capacity": 2**62}}, f"a number from 0 to {2**62 - 1}, got {2**62}"),
        ({"telemetry": {"topology": "round"}}, "topology: expected empty"),
        ({"telemetry": {"stranger": 1}}, "telemetry has no field 'stranger'"),
        (
            {"telemetry": {"bytes_uploaded": 1, "bytes_read_back": 1, "bytes_moved": 3}},
            "expected 2, both ways together, got 3",
        ),
        ({"progress": np.zeros(4)}, "progress: expected rows"),
        ({"records": [np.zeros(0, RECORD)]}, "expected 4 workers, got 1"),
        ({"faults": np.zeros(3, FAULT)}, "a row for each of 8 tasks, got 3"),
    ],
)
def test_figures_that_contradict_each_other_are_refused(changes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        decoder_report(**changes)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (([0, 1], [0]), "task 0 has the source 0, which is not earlier"),
        (([0, 0, 1], [1]), "which is not earlier"),
        (([0, 1, 1], []), "places that rise from 0 to 0"),
        (([1], []), "places that rise"),
        (([], []), "places that rise"),
        (([0, 0], [], [0, 1], [0]), "from 0 to -1, got 0"),
        (([0, 0, 1], [0], None, (), (), [1, 0]), "task 0 has the source 0"),
        (([0, 0, 1], [0], None, (), (), [0, 2]), "lists: expected values from 0 to 1, got 2"),
        (([0, 0], [], [0]), "are not of as many tasks"),
    ],
)
def test_lineage_that_points_nowhere_is_refused(columns: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        Flow(*columns)


def test_a_record_that_ends_before_it_begins_is_refused() -> None:
    progress, records = decoder_rows()
    records[0]["end"][0] = records[0]["begin"][0]
    records[0]["ready"][0] += 2
    with pytest.raises(UsageError, match="row 0 is ready before it begins or after it ends"):
        decoder_report(progress=progress, records=records)


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("make", [decoder_report, queue_report])
def test_what_is_saved_comes_back(make: Callable[[], MegakernelReport], tmp_path: Path) -> None:
    report = make()
    path = report.save(tmp_path / "a.megakernel.json")
    again = MegakernelReport.load(path)
    assert again.to_json() == report.to_json() == path.read_text(encoding="ascii")
    assert str(again) == str(report)
    assert again.explain(3) == report.explain(3)
    assert list(again.region_lineage) == list(report.region_lineage)
    with pytest.raises(UsageError, match=r"is there already; .* or use overwrite=True"):
        report.save(path)
    report.save(path, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["a.megakernel.json"]


def signed(contents: Any) -> str:
    """A document whose digest is right, whatever it says."""
    text = json.dumps(contents, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    head = {"format": "brickline-megakernel", "version": 1, "digest": digest}
    return json.dumps({**head, "report": contents})


def test_damage_is_found_and_said(tmp_path: Path) -> None:
    path = decoder_report().save(tmp_path / "a.megakernel.json")
    whole = path.read_bytes()
    for text, words in (
        (whole[:-40], "is cut off"),
        (whole.replace(b'"items_processed":42', b'"items_processed":41'), "digest"),
        (whole.replace(b'"version": 1', b'"version": 0'), "version from 1 on"),
        (b"", "is no megakernel's report"),
        (b"[" * 200_000, "nests too deeply"),
        (b"[]", "format 'brickline-megakernel'"),
        (b"\xff\xfe", "is no megakernel's report"),
        (b'{"format": "brickline-divergence"}', "format 'brickline-megakernel'"),
    ):
        path.write_bytes(text)
        with pytest.raises(RunDamaged, match=words) as error:
            MegakernelReport.load(path)
        assert str(path) in str(error.value)
    path.write_bytes(whole.replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(RunVersion, match="upgrade"):
        MegakernelReport.load(path)
    with pytest.raises(RunError, match="No such file"):
        MegakernelReport.load(tmp_path / "none")
    with pytest.raises(RunDamaged, match="got a directory"):
        MegakernelReport.load(tmp_path)


@pytest.mark.parametrize(
    ("way", "value", "words"),
    [
        (("lineage_items",), 10**15, "lineage_items: expected at most 42"),
        (("workers", 1, "dependency_wait_ns"), 10**15, "worker 1, dependency_wait_ns: expected at"),
        (("workers", 1, "task"), 8, "worker 1: expected a task from 0 to 7, got 8"),
        (("tasks", "items", 0), 2, "items of tasks: expected at most 42"),
        (("items_processed",), 41, "tasks, done: expected at most 41 together"),
        (("op_items",), [1, 2, 3, -1], "op_items: expected a number"),
    ],
)
def test_a_report_that_contradicts_itself_is_refused(
    way: tuple[Any, ...], value: Any, words: str
) -> None:
    contents = json.loads(decoder_report().to_json())["report"]
    holder = contents
    for key in way[:-1]:
        holder = holder[key]
    holder[way[-1]] = value
    if way == ("items_processed",):
        contents["items_remaining"] = 1
    with pytest.raises(RunDamaged, match=f"contradicts itself: {re.escape(words)}"):
        MegakernelReport.from_json(signed(contents))


def test_a_time_that_no_worker_can_have_had_is_not_measured() -> None:
    made = queue_report(workers=[WorkerTimes(1, 0, 0, 900, 10, 10**12)] * 2)
    assert [each.dependency_wait_ns for each in made.workers] == [None, None]


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [way] + [each for key, inner in inside for each in places(inner, (*way, key))]


JUNK = [None, True, -1, 2**63, 1.5, "x", [], {}, [0], {"a": 1}, float("1e300")]


def test_levels_that_read_all_of_the_level_before_stay_small() -> None:
    levels, wide = 100, 128
    lists = np.repeat(np.arange(levels), wide)
    begin = np.concatenate([[0], np.arange(levels) * wide])
    flow = Flow(begin, np.arange((levels - 1) * wide), lists=lists)
    assert flow.direct(wide * 5 + 3) == list(range(wide * 4, wide * 5))
    assert flow.readers(wide * 4) == list(range(wide * 5, wide * 6))
    assert len(flow.all_sources([levels * wide - 1])) == (levels - 1) * wide + 1
    full = Flow(
        np.concatenate([[0], np.cumsum(flow.source_counts)]),
        list(chain(*(flow.direct(task) for task in range(len(flow))))),
    )
    assert len(full.sources) == (levels - 1) * wide * wide
    assert full.shared().sources.tolist() == flow.sources.tolist()
    assert full.shared().lists.tolist() == flow.lists.tolist()


@given(st.data())
def test_a_hostile_document_is_refused_or_a_report(data: st.DataObject) -> None:
    """Whatever is put anywhere, with a digest that fits: an error of ours, or a sound report."""
    make = data.draw(st.sampled_from([decoder_report, queue_report]))
    contents = json.loads(make().to_json())["report"]
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(places(contents)[1:]))
        holder = contents
        for key in way[:-1]:
            holder = holder[key]
        if data.draw(st.booleans()):
            holder[way[-1]] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
        elif isinstance(holder, dict):
            del holder[way[-1]]
    try:
        report = MegakernelReport.from_json(signed(contents))
    except RunDamaged:
        return
    megakernel_text(report)
    if report.flow is not None:
        for task in range(len(report.tasks)):
            report.explain(task)


@given(st.binary(max_size=200))
def test_bytes_are_no_report(data: bytes) -> None:
    with pytest.raises(RunDamaged):
        MegakernelReport.from_json(data)


# --------------------------------------------------------------------------------------- commands


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_command_shows_it(tmp_path: Path) -> None:
    path = decoder_report().save(tmp_path / "a.megakernel.json")
    assert is_megakernel_report(path)
    shown = run("report", path)
    assert shown.exit_code == 0, shown.output
    assert "42 of 42 items" in shown.output
    assert "imbalance 1.14" in shown.output
    document = run("report", path, "--json")
    assert MegakernelReport.from_json(document.stdout).items_processed == 42
    page = run("report", path, "--html", tmp_path / "a.html")
    assert page.exit_code == 0, page.output
    assert "Content-Security-Policy" in (tmp_path / "a.html").read_text(encoding="utf-8")
    refused = run("report", path, "--csv")
    assert isinstance(refused.exception, UsageError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is an empty file"),
        ('{"format": "brickline-replay", "version": 1}', "is a replay log: brickline plan replay"),
        ('{\n "format": "brickline plan", "version": 1}', "is a plan: brickline plan explain"),
        ("[" * 200_000, "nests too deeply"),
    ],
)
def test_the_command_says_what_else_a_file_is(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    refused = run("report", path)
    assert isinstance(refused.exception, BricklineError)
    assert words in str(refused.exception)
    assert str(path) in str(refused.exception)


def test_many_workers_are_shown_as_neighbours() -> None:
    report = queue_report(
        workers=[WorkerTimes(1, 0, 0, 900, 10 * at, 5) for at in range(132)], spans=None
    )
    text = megakernel_text(report, width=120)
    rows = text.partition("Workers")[2].partition("Ops")[0].splitlines()
    assert len(rows) <= 30
    assert any(row.split()[:1] == ["0-5"] for row in rows)


def test_names_stay_text() -> None:
    evil = "[red]x\x1b[31m\u202e"
    report = decoder_report(name=evil, ops=(evil, *OPS[1:]), bricks=(evil, *BRICKS[1:]))
    text = str(report)
    assert "\x1b" not in text
    assert "[red]x" in text
    assert NO_TASK not in report.tasks.op
