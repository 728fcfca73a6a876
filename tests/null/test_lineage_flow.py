"""Lineage in a report: the same sets as `Lineage` finds, and the same given memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from brickline.executor.megakernel.lineage_flow import flow_from_lineage
from brickline.executor.megakernel.planning import PURE, TaskBuilder, plan_tasks
from brickline.lineage import Lineage
from brickline.megakernel_report import MegakernelReport

spans = st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 6))
programs = st.lists(
    st.tuples(
        st.integers(0, 2), st.lists(spans, max_size=3), st.lists(spans, min_size=1, max_size=2)
    ),
    max_size=14,
)


@given(programs)
def test_sets_are_those_of_the_lineage(program: list[tuple[int, list, list]]) -> None:
    builder = TaskBuilder()
    for op, reads, writes in program:
        builder.add(
            op,
            [(space, begin, begin + size) for space, begin, size in reads],
            [(space, begin, begin + size) for space, begin, size in writes],
        )
    lineage = Lineage(builder.tasks())
    flow = flow_from_lineage(lineage)
    assert len(flow) == len(program)
    for task in range(len(program)):
        assert flow.all_sources([task]).tolist() == [*lineage.of(task).tolist(), task]
        names = {f"space {each.space}" for each in lineage.initial(task)}
        assert set(flow.given_to_all(flow.all_sources([task]).tolist())) == names


def test_a_deduped_task_has_what_computed_it_as_its_source() -> None:
    builder = TaskBuilder()
    for _ in range(2):
        builder.add(0, [(0, 0, 8)], [(1, 0, 8)], flags=PURE)
    builder.add(1, [(1, 0, 8)], [(2, 0, 8)])
    planned = plan_tasks(builder.tasks())
    assert planned.alias.tolist() == [-1, 0, -1]
    flow = flow_from_lineage(Lineage(planned))
    assert flow.direct(1) == [0]
    assert flow.given_to(1) == []
    assert flow.given_to(0) == ["space 0"]
    report = MegakernelReport.of_queue(
        name="q",
        device="CPU",
        ops=["copy", "add"],
        tasks={"op": [0, 0, 1], "items": [1, 1, 1], "alias": np.array(planned.alias)},
        workers=[],
        items_processed=3,
        items_remaining=0,
        wall_time_ns=1,
        flow=flow,
    )
    assert "= 0, which computed the same" in report.explain(1)
    assert "given memory space 0" in report.explain(2)


def test_tasks_that_read_the_same_share_a_list() -> None:
    builder = TaskBuilder()
    for task in range(8):
        builder.add(0, [], [(0, 8 * task, 8 * task + 8)])
    for task in range(8):
        builder.add(0, [(0, 0, 64)], [(1, 8 * task, 8 * task + 8)])
    flow = flow_from_lineage(Lineage(builder.tasks()))
    assert len(flow.begin) == 3
    assert flow.direct(15) == list(range(8))
