"""Makes the golden run of the current format version, and the figures that it must give for ever.

Run it once when a format version is new, and review what it writes::

    python tests/golden/make_run.py        # writes version-N.zip and version-N.json beside itself

Time is that of device NULL, so the figures do not depend on the machine. The run of a version is
never made again once that version is released: it stands for the runs that people have.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from brickline import BrickId, BrickProfiler, KernelTrace, Profile, Run, Sampling, TileLevel
from brickline.abi import FORMAT_VERSION
from brickline.stats import BrickStats

HERE = Path(__file__).parent
KEPT = ("format", "version", "id", "name", "created", "ended", "peaks", "facts", "changed")


def record(path: Path) -> None:
    """Record all that a run can hold: two partitions, and one of a process that was killed."""
    main = BrickProfiler(
        "golden", enabled=True, device="NULL", path=path, timeline_steps=1, graph=True
    )
    decode(main)
    supply(main)
    leave_out_of_order(main)
    os.environ["BRICKLINE_RUN"] = str(path)
    sampled = BrickProfiler("sampled", device="NULL", sampling=Sampling(steps=2))
    killed = BrickProfiler("killed", device="NULL")
    del os.environ["BRICKLINE_RUN"]
    for _ in range(4):
        with sampled.step(tokens=1, phase="decode"), sampled.brick("LmHead", elements=8):
            sampled.advance(5_000)
    with killed.step(tokens=2, phase="prefill"), killed.brick("Embedding"):
        killed.advance(700)
    with killed.step(tokens=2, phase="prefill"), killed.brick("not finished"):
        killed.advance(1)
        for spool in (path / "spool").iterdir():
            shutil.copyfile(spool, path / "spool" / f"{spool.stem}.copy")
    for profiler in (main, sampled, killed):
        profiler.close()
    restore_killed(path)


def decode(p: BrickProfiler) -> None:
    """Two prefills and three decode steps of two layers, with tiles and nested bricks."""
    for phase, tokens, steps in (("prefill", 128, 2), ("decode", 1, 3)):
        for _ in range(steps):
            with p.step(tokens=tokens, phase=phase):
                p.mark("Embedding")
                p.advance(90 * tokens)
                p.mark(None)
                for layer in range(2):
                    with p.brick(BrickId.ATTENTION_OUTPUT, layer=layer, elements=tokens):
                        p.advance(50 + layer)
                        with p.brick("my softmax: Ω", layer=layer, bytes=64, flops=128.0):
                            p.advance(30)
                    with p.brick("Gate", layer=layer):
                        for column in range(3):
                            tile = p.tiles.start(TileLevel.MIDI, layer, column)
                            p.advance(100 * (column + 1))
                            p.tiles.stop(tile, 16, 512.0, 256)
                p.advance(11)


def supply(p: BrickProfiler) -> None:
    """What a caller measured: spans, bytes, cycles, facts and launches."""
    p.record_elapsed("MemoryCopy", 4_000, 2, bytes_in=4096, bytes_out=1024, cycles=9_000)
    for start_ns, brick in enumerate((BrickId.RMS_NORM, BrickId.LAYER_NORM)):
        p.record_deferred(brick, 5_000 * start_ns)
    p.finalize(310_000)
    p.set_l2_cache_hit_rate(0.625)
    p.add_trace(
        KernelTrace(
            "rope", 1, 7, "NULL", '{"n": 64}', time_us=2.5, output_checksum=0x8FAA0A18FAF0FB98
        )
    )


def leave_out_of_order(p: BrickProfiler) -> None:
    first, second = p.start("first"), p.start("second")
    p.advance(10)
    p.stop(first)
    p.advance(20)
    p.stop(second)


def restore_killed(path: Path) -> None:
    """Put back the third partition as it was when its process would have been killed."""
    for copy in sorted((path / "spool").glob("*.copy")):
        spool = copy.with_suffix(".spool")
        part = next(part for part in Run.open(path).parts if part.path == spool)
        if any("not finished" in text for text in part.strings):
            copy.replace(spool)
        else:
            copy.unlink()


def forget_the_machine(path: Path) -> None:
    """Leave out where and by whom the run was made: it is published with the sources."""
    for file in (path / "manifest.json", *path.glob("joined/*.json")):
        document = json.loads(file.read_text())
        kept = {key: document[key] for key in (*KEPT, "process") if key in document}
        circumstances = {"brickline": document["circumstances"].get("brickline")}
        file.write_text(json.dumps(kept | {"circumstances": circumstances}, indent=1))


def figures(run: Run) -> dict[str, Any]:
    """Return what reading the run says, without what depends on who reads it."""
    profile = Profile.from_run(run)
    return {
        "bricks": {row.name: brick_figures(row) for row in profile.bricks},
        "brick_layers": {f"{row.name}/{row.layer}": row.total_ns for row in profile.brick_layers},
        "brick_phases": {f"{row.name}/{row.phase}": row.total_ns for row in profile.brick_phases},
        "categories": {each.label: row.total_ns for each, row in profile.categories.items()},
        "steps": {
            phase: [row.count, row.tokens, row.wall_ns] for phase, row in profile.steps.items()
        },
        "tiles": {
            f"{row.owner}/{row.level_name}": [
                [cell.row, cell.column, cell.count, cell.total_ns, cell.total_flops]
                for cell in row.cells
            ]
            for row in profile.tiles
        },
        "coverage": profile.coverage,
        "us_per_token": profile.us_per_token,
        "facts": dict(profile.facts),
        "recording": {
            name: getattr(profile.recording, name)
            for name in ("counted", "timed", "approximate", "out_of_order", "lost", "unclosed")
        },
        "timeline": [
            [span.name, span.layer, span.phase, span.step, span.start_ns, span.end_ns, span.depth]
            for span in profile.timeline
        ],
        "traces": [
            [
                part.string(row["name"]),
                *(int(row[name]) for name in ("layer", "position", "start_ns", "end_ns")),
                hex(row["output_checksum"]),
            ]
            for part in run.parts
            for row in part.traces
        ],
        "graph": [
            [len(part.graph.nodes), len(part.graph.edges)]
            for part in run.parts
            if len(part.graph.nodes)
        ],
        "problems": [type(problem).__name__ for problem in run.problems],
    }


def brick_figures(row: BrickStats) -> dict[str, Any]:
    names = ("count", "timed", "total_ns", "min_ns", "max_ns", "exclusive_ns", "exclusive_count")
    names += ("total_elements", "total_bytes", "total_compressed_bytes", "total_flops")
    names += ("total_cycles", "out_of_order", "approximate")
    found = {name: getattr(row, name) for name in names}
    return found | {
        "category": row.category.label,
        "std_ns": round(row.std_ns, 6),
        "p50_ns": round(row.p50_ns, 6),
        "p99_ns": round(row.p99_ns, 6),
        "buckets": dict(
            zip(row.histogram.indices.tolist(), row.histogram.counts.tolist(), strict=True)
        ),
    }


def main() -> None:
    target = HERE / f"version-{FORMAT_VERSION}"
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "golden.brick"
        record(run)
        forget_the_machine(run)
        found = figures(Run.open(run))
        with zipfile.ZipFile(
            target.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED, compresslevel=9
        ) as archive:
            for file in sorted(path for path in run.rglob("*") if path.is_file()):
                archive.write(file, file.relative_to(run))
    text = json.dumps(found, indent=1, ensure_ascii=False)
    target.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(f"wrote {target}.zip ({target.with_suffix('.zip').stat().st_size} bytes) and its .json")


if __name__ == "__main__":
    main()
