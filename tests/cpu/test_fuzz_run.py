"""Damaged runs: whatever the bytes, a reader gets figures or a BricklineError.

A worker process damages a copy of a real run again and again and reads it as a person would:
through `Run.open`, `Profile`, the reports, the tables and the command line. It runs under a memory
limit and an alarm, so that a huge allocation or a hang fails like a crash does. Run it by hand to
repeat one case: ``python tests/cpu/test_fuzz_run.py DIRECTORY SEED 0``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from brickline.spools import Part

MEMORY_BYTES = 6 << 30
CASE_SECONDS = 20
EXTENT_MAGIC = 0x54584542


# ------------------------------------------------------------------------------- a run to damage


def make_run(path: Path) -> None:
    """Record a little of everything, and leave some of it unfolded as a killed process does."""
    from brickline import BrickId, BrickProfiler, KernelTrace, TileLevel

    profiler = BrickProfiler("fuzz", enabled=True, path=path, graph=True, timeline_steps=1)
    for number in range(40):
        with profiler.step(tokens=1, phase="decode" if number else "prefill"):
            for layer in range(3):
                with profiler.brick(BrickId.ATTENTION_SCORE, layer=layer, flops=10.0, bytes=64):
                    profiler.tiles.record(TileLevel.MACRO, 50, row=layer, column=number % 4)
                    with profiler.brick("Inner µ"):
                        pass
        profiler.add_trace(KernelTrace("rope", 1, number, "cpu", '{"n": 1}', 2.0, 7, 8))
    profiler.record_elapsed("Other", 1234, 5, bytes_in=9, cycles=77)
    node = profiler.graph.add_kernel("k", timing_ns=3)
    profiler.graph.add_dependency(node, profiler.graph.add_function("f", file="f.py", line=3))
    profiler.set_l2_cache_hit_rate(0.5)
    for _ in range(30):
        with profiler.brick("Tail"):
            pass
    shutil.copytree(path, path.with_name("unfolded"))
    profiler.close()


# ------------------------------------------------------------------------------- damage


def extents(spool: bytes | bytearray) -> list[tuple[int, int, int]]:
    """Return offset, kind and used bytes of every extent of an undamaged spool."""
    found, offset = [], 4096
    while offset + 64 <= len(spool):
        magic, kind, _, _, length, used = struct.unpack_from("<4I2Q", spool, offset)
        if magic != EXTENT_MAGIC or not length:
            break
        found.append((offset, kind, used))
        offset += length
    return found


def odd_number(chosen: random.Random) -> int:
    """Return a number of the kind that breaks arithmetic."""
    return chosen.choice(
        [
            chosen.randrange(4),
            chosen.randrange(2**64),
            2 ** chosen.randrange(64),
            2**64 - 1 - chosen.randrange(4),
            2**63 - 1,
            2**32 - chosen.randrange(2),
        ]
    )


def damage_spool(chosen: random.Random, spool: bytearray) -> bytes:
    """Change a few fields where it matters: headers, rows, records, nodes; or cut the file."""
    places = extents(spool)
    for _ in range(chosen.choice([1, 1, 2, 5, 30])):
        offset, kind, used = chosen.choice(places)
        # A lane has no `used`: its header and the beginning of its ring are what is read.
        span = 64 + (used if kind != 1 else chosen.choice([700, 4096 + 40 * 32]))
        at = chosen.choice([chosen.randrange(200), offset + chosen.randrange(span)])
        if chosen.random() < 0.5:
            spool[at] ^= 1 << chosen.randrange(8)
        elif chosen.random() < 0.5:
            struct.pack_into("<Q", spool, min(at // 8 * 8, len(spool) - 8), odd_number(chosen))
        else:
            word = odd_number(chosen) >> chosen.choice([0, 32]) & 0xFFFFFFFF
            struct.pack_into("<I", spool, min(at // 4 * 4, len(spool) - 4), word)
    if chosen.random() < 0.1:
        return bytes(spool[: chosen.randrange(len(spool))])
    return bytes(spool)


def odd_value(chosen: random.Random) -> Any:
    """Return JSON that does not belong where it will stand."""
    return chosen.choice(
        [None, True, -1, 1e308, 10**40, "", "\ud800", "x" * 5000, [], {}, [[]], {"a": None}]
    )


def damage_document(chosen: random.Random, document: Any) -> None:
    """Replace or remove one entry somewhere in a JSON document."""
    while isinstance(document, dict) and document:
        key = chosen.choice(list(document))
        inner = document[key]
        if isinstance(inner, dict) and inner and chosen.random() < 0.6:
            document = inner
            continue
        if chosen.random() < 0.2:
            del document[key]
        else:
            document[key] = odd_value(chosen)
        return


def damage_manifest(chosen: random.Random, text: str) -> bytes:
    """Return a manifest that is wrong in its values, its syntax or its encoding."""
    if chosen.random() < 0.7:
        document = json.loads(text)
        for _ in range(chosen.choice([1, 1, 3])):
            damage_document(chosen, document)
        return json.dumps(document).encode("utf-8", "surrogatepass")
    data = bytearray(text.encode())
    for _ in range(chosen.choice([1, 5])):
        data[chosen.randrange(len(data))] = chosen.randrange(256)
    return bytes(chosen.choice([data, data[: chosen.randrange(len(data))], b"[" * 100_000]))


def damage(chosen: random.Random, source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    which = chosen.random()
    if which < 0.85:
        for spool in target.glob("spool/*.spool"):
            spool.write_bytes(damage_spool(chosen, bytearray(spool.read_bytes())))
    if which > 0.75:
        manifest = target / "manifest.json"
        manifest.write_bytes(damage_manifest(chosen, manifest.read_text(encoding="utf-8")))


# ------------------------------------------------------------------------------- reading


def look_at(chosen: random.Random, path: Path) -> None:
    """Read a run in every way there is; each may refuse it with a BricklineError alone."""
    from typer.testing import CliRunner

    from brickline import BricklineError, ExecutionGraph, Run
    from brickline.commands import app
    from brickline.profile import profile_from_run
    from brickline.report.as_csv import profile_csv
    from brickline.report.as_json import profile_json
    from brickline.report.text import profile_text

    def draw(part: Part) -> str:
        return ExecutionGraph.from_tables(part.graph, drop_torn_tail=True).to_json()

    def attempt(call: Callable[[], object]) -> None:
        with suppress(BricklineError):
            call()

    try:
        run = Run.open(path)
        profile = profile_from_run(run)
    except BricklineError:
        pass
    else:
        for call in (
            lambda: profile_text(profile),
            lambda: json.loads(profile_json(profile)),
            lambda: profile_csv(profile),
            lambda: profile.timeline,
            lambda: profile.validate(),
            lambda: run.unfollowed,
            lambda: [draw(part) for part in run.parts],
        ):
            attempt(call)
        if chosen.random() < 0.2:
            attempt(lambda: run.publish(force=True))
    option = chosen.choice([[], ["--json"], ["--csv"], ["--validate"]])
    result = CliRunner().invoke(app, ["report", str(path), *option])
    if result.exception and not isinstance(result.exception, BricklineError | SystemExit):
        raise result.exception


def fuzz(directory: Path, seed: int, seconds: float) -> int:
    """Damage and read until the time is up, at least once; return how many cases there were."""
    # A crash or a limit takes the process down; this says which case it was.
    progress = directory / "case"
    deadline, cases = time.monotonic() + seconds, 0
    while cases == 0 or time.monotonic() < deadline:
        progress.write_text(str(seed + cases), encoding="utf-8")
        chosen = random.Random(seed + cases)
        signal.alarm(CASE_SECONDS)
        damage(chosen, directory / chosen.choice(["closed", "unfolded"]), directory / "damaged")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            look_at(chosen, directory / "damaged")
        cases += 1
    signal.alarm(0)
    return cases


def main(directory: str, seed: str, seconds: str) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(f"{fuzz(Path(directory), int(seed), float(seconds))} cases")


def run_worker(directory: Path, seed: int, seconds: float) -> None:
    import brickline as bl

    make_run(directory / "closed")
    print(f"seed {seed}")
    package = str(Path(bl.__file__).parents[1])
    search = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    worker = subprocess.run(
        [sys.executable, __file__, str(directory), str(seed), str(seconds)],
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds + 120,
        check=False,
    )
    case = (directory / "case").read_text(encoding="utf-8")
    assert worker.returncode == 0, (
        f"case {case} ended with status {worker.returncode}; repeat it with\n"
        f"  python {__file__} {directory} {case} 0\n{worker.stderr[-6000:]}"
    )
    print(worker.stdout)


def test_damaged_runs_are_refused_or_read(tmp_path: Path):
    run_worker(tmp_path, 1, 8)


@pytest.mark.long
def test_damaged_runs_for_two_minutes(tmp_path: Path):
    run_worker(tmp_path, random.SystemRandom().randrange(2**32), 120)


if __name__ == "__main__":
    main(*sys.argv[1:])
