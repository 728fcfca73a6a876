"""A megakernel's report as a Perfetto trace: a track for each worker, work and waiting on it.

Owns the tracks; `perfetto_packets` owns the packets. Times are ns from the beginning of the run,
and a clock snapshot says where that lies in Unix time, if the report knows.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

import numpy as np

from brickline.errors import ExportError
from brickline.export.perfetto import Drawn
from brickline.export.perfetto_packets import (
    BEGIN,
    END,
    EXPLICIT,
    NAME,
    ORDERING,
    PROCESS,
    RANK,
    Events,
    PacketWriter,
    cut,
)
from brickline.export.wire import bytes_field, number_field, text_field
from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import Column, Spans

CATEGORIES = ("work", "waiting")
ANNOTATIONS = ("task", "items", "region", "layer")
"""What is said of a slice when it is selected."""


def write_megakernel_perfetto(report: MegakernelReport, file: BinaryIO) -> Drawn:
    """Write the trace of a report.

    Args:
        report: What to show.
        file: Where to; it is only appended to.

    Raises:
        ExportError: Its tasks were not traced.
    """
    if report.spans is None:
        raise ExportError(
            f"the run of {report.name} was not traced, so that nothing has a time; run it again "
            "with trace=True"
        )
    digest = hashlib.blake2b(report.id.encode("utf-8", "replace"), digest_size=16).digest()
    packets, drawn = PacketWriter(file, int.from_bytes(digest, "big")), Drawn()
    packets.begin(0, report.began_unix_ns or 0)
    label = f"{report.name} on {report.device}"
    process = bytes_field(PROCESS, number_field(1, 1) + text_field(6, cut(label)))
    top = packets.describe(process + number_field(ORDERING, EXPLICIT))
    for worker in range(len(report.workers)):
        text = text_field(NAME, f"worker {worker}") + number_field(RANK, worker)
        track = packets.describe(text, top)
        rows = np.flatnonzero(report.spans.worker == worker)
        rows = rows[np.lexsort((report.spans.end_ns[rows], report.spans.begin_ns[rows]))]
        drawn.slices += _write(packets, track, report, report.spans, rows)
    drawn.tracks = packets.tracks
    return drawn


def _write(
    packets: PacketWriter, track: int, report: MegakernelReport, spans: Spans, rows: Column
) -> int:
    """Write what one worker did, and return how many slices that is."""
    # One thing at a time: where rounding lets two overlap, the later one begins at the end.
    ends = np.maximum.accumulate(spans.end_ns[rows]) if len(rows) else rows
    before = np.concatenate([[0], ends[:-1]])[: len(rows)]
    begin = np.maximum(spans.begin_ns[rows], before)
    ready = np.maximum(spans.ready_ns[rows], begin)
    end = np.maximum(spans.end_ns[rows], ready)
    waits = ready > begin
    place = np.arange(len(rows))
    # Of each row: its waiting begins and ends, then its work does.
    kinds = ((begin, BEGIN, 1), (ready, END, 1), (ready, BEGIN, 0), (end, END, 0))
    at = np.concatenate([place[waits], place[waits], place, place])
    counts = (waits.sum(), waits.sum(), len(rows), len(rows))
    step = np.repeat(np.arange(4), counts)
    order = np.lexsort((step, at))
    at, step = at[order], step[order]
    time = np.stack([each[0] for each in kinds])[step, at]
    kind = np.array([each[1] for each in kinds])[step]
    category = np.array([each[2] for each in kinds])[step]
    task = spans.task[rows][at]
    names = (*report.ops, "waiting")
    name = np.where(category == 1, len(report.ops), report.tasks.op[task])
    number = task + report.first_submission
    annotations = [
        number,
        spans.items[rows][at],
        report.tasks.region[task],
        report.tasks.layer[task],
    ]
    packets.write(
        track, Events(time, kind, name, category, annotations), names, CATEGORIES, ANNOTATIONS
    )
    return len(at) // 2
