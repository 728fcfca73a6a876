"""The run on disk: made, joined, overwritten, saved, read when damaged, and published."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import brickline as bl
from brickline import _core, abi, circumstances
from brickline.errors import (
    NotARun,
    RunDamaged,
    RunError,
    RunExists,
    RunVersion,
    UsageError,
)
from brickline.profile import profile_from_part
from brickline.runs import Run, RunWriter, live_processes, read_manifest
from brickline.spool_copies import copy_spool
from brickline.spools import read_part
from brickline.table_columns import SCHEMAS
from brickline.tables import table_from_run

FORMAT_PAGE = Path(__file__).parents[2] / "docs" / "run-format.md"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps runs without a path out of the user's state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def record(path: Path, layers: int = 2, **options: Any) -> Path:
    profiler = bl.BrickProfiler("t", enabled=True, path=path, **options)
    for layer in range(layers):
        with profiler.brick(bl.BrickId.RMS_NORM, layer=layer, elements=7):
            pass
    profiler.close()
    return path


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, **options)


RECORD_AND_WAIT = """
import sys, brickline as bl
profiler = bl.BrickProfiler("child", enabled=True, path=sys.argv[1])
with profiler.brick(bl.BrickId.RMS_NORM, layer=0): pass
print("ready", flush=True)
sys.stdin.readline()
profiler.close()
"""


# Making a run


def test_a_new_run_has_a_manifest_and_is_private(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "a.brick", name="decode", weights_hash="abc")
    manifest = read_manifest(writer.path)
    assert manifest["format"] == "brickline-run"
    assert manifest["version"] == abi.FORMAT_VERSION
    assert len(manifest["id"]) == 32
    assert manifest["name"] == "decode"
    assert manifest["created"].endswith("+00:00")
    assert manifest["ended"] is None
    assert manifest["circumstances"]["weights_hash"] == "abc"
    assert manifest["circumstances"]["pid"] == os.getpid()
    assert (writer.path.stat().st_mode & 0o777) == 0o700
    assert ((writer.path / "manifest.json").stat().st_mode & 0o777) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.brick"]


def test_recording_imports_neither_pyarrow_nor_torch() -> None:
    code = "import sys, brickline.runs; print({'pyarrow', 'torch', 'pandas'} & set(sys.modules))"
    assert python(code).communicate()[0].strip() == "set()"


def test_missing_parents_are_made(tmp_path: Path) -> None:
    assert RunWriter.create(tmp_path / "x" / "y" / "a.brick", name="t").path.is_dir()


def test_an_existing_run_is_refused_and_both_ways_out_are_named(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "a.brick", name="first")
    with pytest.raises(RunExists, match=r"overwrite=True.*--force"):
        RunWriter.create(tmp_path / "a.brick", name="second")
    assert read_manifest(tmp_path / "a.brick")["name"] == "first"


def test_overwriting_replaces_a_run(tmp_path: Path) -> None:
    record(tmp_path / "a.brick")
    RunWriter.create(tmp_path / "a.brick", name="second", overwrite=True)
    assert Run.open(tmp_path / "a.brick").name == "second"
    assert Run.open(tmp_path / "a.brick").parts == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.brick"]


@pytest.mark.parametrize("make", ["file", "directory", "other manifest", "foreign file"])
def test_overwriting_leaves_everything_else_alone(tmp_path: Path, make: str) -> None:
    path = tmp_path / "a.brick"
    if make == "file":
        path.write_text("mine")
    elif make == "directory":
        path.mkdir()
    elif make == "other manifest":
        path.mkdir()
        (path / "manifest.json").write_text('{"name": "web app"}')
    else:
        RunWriter.create(path, name="t")
        (path / "notes.txt").write_text("mine")
    before = sorted(map(str, tmp_path.rglob("*")))
    with pytest.raises(RunExists, match="choose another path"):
        RunWriter.create(path, name="t", overwrite=True)
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_overwriting_fails_while_another_process_records(tmp_path: Path) -> None:
    child = python(RECORD_AND_WAIT, tmp_path / "a.brick")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(RunExists, match=f"process {child.pid} is recording"):
        RunWriter.create(tmp_path / "a.brick", name="t", overwrite=True)
    child.communicate("\n")
    RunWriter.create(tmp_path / "a.brick", name="t", overwrite=True)


def test_of_many_makers_one_wins(tmp_path: Path) -> None:
    def make(number: int) -> bool:
        try:
            RunWriter.create(tmp_path / "a.brick", name=str(number))
        except RunExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(make, range(32))) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.brick"]


def test_a_run_without_a_path_lies_in_the_state_directory(state: Path) -> None:
    first, second = (RunWriter.create(name="my model/7") for _ in range(2))
    assert first.path != second.path
    assert first.temporary
    assert first.path.parent == state.resolve() / "brickline" / "runs"
    assert f"-my-model-7-{os.getpid()}-" in first.path.name
    first.discard()
    assert not first.path.exists()
    assert second.path.exists()


def test_without_a_state_directory_the_temporary_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert RunWriter.create(name="t").path.parent == tmp_path.resolve()


def test_spool_names_are_never_given_twice(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "a.brick", name="t")
    writers = [writer, *(RunWriter.join(writer.path) for _ in range(3))]
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda n: writers[n % 4].spool_path(), range(400)))
    assert len(set(names)) == 400
    assert f"{os.getpid()}-0.spool" in {name.name for name in names}
    assert RunWriter.join(writer.path).spool_path(123).name.startswith("123-")


def test_a_refusing_disk_is_a_run_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="check the path"):
        RunWriter.create(tmp_path / "file" / "a.brick", name="t")


# Joining, noting, closing


def test_who_joins_fills_what_the_maker_did_not_know(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "a.brick", name="t")
    code = """
import os, sys, types
os.environ["RANK"] = "3"
sys.modules["triton"] = types.SimpleNamespace(__version__="9.9")
from brickline.runs import RunWriter
joined = RunWriter.join(sys.argv[1])
joined.note(peaks={"flops": 1e12})
joined.close(steps=4)
"""
    child = python(code, writer.path)
    child.communicate()
    writer.close()
    run = Run.open(writer.path)
    assert run.circumstances["triton"] == "9.9"
    assert run.circumstances["rank"] == 3
    assert run.circumstances["pid"] == os.getpid()
    assert run.manifest["circumstances"]["triton"] is None
    assert run.peaks == {"flops": 1e12}
    assert [document["process"] for document in run.joined] == [child.pid]
    assert run.joined[0]["facts"] == {"steps": 4}
    assert run.joined[0]["ended"] is not None


def test_joining_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        RunWriter.join(tmp_path / "a.brick")


def test_closing_notes_the_end_once(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "a.brick", name="t", peaks={"bytes": 2.0})
    writer.note(tokens=3, ratio=float("nan"), where=tmp_path)
    writer.close(steps=5)
    first = read_manifest(writer.path)
    writer.close(steps=6)
    assert read_manifest(writer.path) == first
    assert first["ended"] >= first["created"]
    assert first["facts"] == {"tokens": 3, "ratio": None, "where": str(tmp_path), "steps": 5}
    assert first["peaks"] == {"bytes": 2.0}


def test_a_failed_write_leaves_the_manifest_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter.create(tmp_path / "a.brick", name="t")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="free some space"):
            writer.note(tokens=3)
    assert read_manifest(writer.path)["facts"] == {}
    assert sorted(os.listdir(writer.path)) == ["manifest.json", "spool"]


def test_an_overwritten_run_is_not_closed_into_the_new_one(tmp_path: Path) -> None:
    old = RunWriter.create(tmp_path / "a.brick", name="old")
    RunWriter.create(tmp_path / "a.brick", name="new", overwrite=True)
    old.close()
    old.discard()
    assert read_manifest(tmp_path / "a.brick")["name"] == "new"
    assert read_manifest(tmp_path / "a.brick")["ended"] is None


def test_what_changed_meanwhile_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    writer = RunWriter.create(tmp_path / "a.brick", name="t")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    writer.close()
    manifest = read_manifest(writer.path)
    assert manifest["changed"] == {"environment.OMP_NUM_THREADS": "2"}
    assert manifest["circumstances"]["environment"]["OMP_NUM_THREADS"] == "1"


# Circumstances


def test_the_commit_is_read_and_the_dirty_state_asked_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    tree = tmp_path / "tree"
    tree.mkdir()

    def call(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        command = [git, *identity, *arguments]
        return subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout

    call("init", "-q")
    (tree / "file").write_text("1")
    call("add", "file")
    call("commit", "-q", "-m", "one")
    monkeypatch.chdir(tree)
    commit = call("rev-parse", "HEAD").strip()
    for packed, text, dirty in ((False, "1", False), (True, "2", True)):
        if packed:
            call("pack-refs", "--all")
        (tree / "file").write_text(text)
        writer = RunWriter.create(tmp_path / "a.brick", name="t", overwrite=True)
        assert read_manifest(writer.path)["circumstances"]["git"]["commit"] == commit
        writer.close()
        assert read_manifest(writer.path)["circumstances"]["git"]["dirty"] is dirty


def test_no_secret_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    arguments = ["x", "--api-key=hunter2", "--hf-token", "hunter2", "--layers", "3"]
    monkeypatch.setattr(sys, "argv", arguments)
    found = circumstances.gather_circumstances()
    assert "hunter2" not in json.dumps(found)
    assert found["argv"] == ["x", "--api-key=***", "--hf-token", "***", "--layers", "3"]
    assert set(found["environment"]) <= set(circumstances.ENVIRONMENT)


def test_an_odd_torch_does_not_stop_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    found = circumstances.gather_circumstances()
    assert found["torch"] is None
    assert set(found["numerics"].values()) == {None}


# Reading


@pytest.mark.parametrize("make", ["nothing", "file", "directory", "other"])
def test_what_is_not_a_run_says_so(tmp_path: Path, make: str) -> None:
    path = tmp_path / "a.brick"
    if make == "file":
        path.write_text("text")
    elif make != "nothing":
        path.mkdir()
    if make == "other":
        (path / "manifest.json").write_text('{"format": "web"}')
    with pytest.raises(NotARun, match=r"expected .* found .* at .*brickline run"):
        Run.open(path)


def test_a_newer_run_says_how_to_read_it(tmp_path: Path) -> None:
    path = record(tmp_path / "a.brick")
    manifest = read_manifest(path)
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(RunVersion, match=r"version 1 or older, found 2 .* upgrade"):
        Run.open(path)


@pytest.mark.parametrize("text", ['{"format": "brick', "\x00\x01", '{"format": "brickline-run"}'])
def test_a_damaged_manifest_says_so(tmp_path: Path, text: str) -> None:
    path = record(tmp_path / "a.brick")
    (path / "manifest.json").write_text(text)
    with pytest.raises(RunDamaged, match=r"manifest\.json"):
        Run.open(path)


def test_a_lost_manifest_is_damage_and_not_another_directory(tmp_path: Path) -> None:
    path = record(tmp_path / "a.brick")
    (path / "manifest.json").unlink()
    with pytest.raises(RunDamaged, match=r"manifest\.json beside the spools"):
        Run.open(path)


def spool_of(path: Path) -> Path:
    (spool,) = (path / "spool").iterdir()
    return spool


def test_one_damaged_partition_does_not_hide_the_others(tmp_path: Path) -> None:
    path = record(tmp_path / "a.brick")
    (path / "spool" / "1-0.spool").write_bytes(b"not a spool at all" * 1000)
    run = Run.open(path)
    assert [part.process for part in run.parts] == [os.getpid()]
    assert len(run.problems) == 1
    assert isinstance(run.problems[0], RunDamaged)
    assert "1-0.spool" in str(run.problems[0])
    assert run.publish() is not None


def test_a_run_without_a_readable_partition_is_damaged(tmp_path: Path) -> None:
    path = record(tmp_path / "a.brick")
    spool_of(path).write_bytes(b"not a spool at all" * 1000)
    with pytest.raises(RunDamaged):
        Run.open(path)


def test_a_newer_partition_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "a.brick")
    spool = spool_of(path)
    data = bytearray(spool.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    spool.write_bytes(data)
    with pytest.raises(RunVersion):
        Run.open(path)


@pytest.mark.parametrize("size", [9, 100])
def test_a_partition_cut_off_within_its_header_is_damaged(tmp_path: Path, size: int) -> None:
    spool = spool_of(record(tmp_path / "a.brick"))
    spool.write_bytes(spool.read_bytes()[:size])
    with pytest.raises(RunDamaged, match=spool.name):
        Run.open(tmp_path / "a.brick")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_of_a_truncated_partition_the_rest_is_read(tmp_path: Path, share: float) -> None:
    spool = spool_of(record(tmp_path / "a.brick"))
    whole = spool.read_bytes()
    spool.write_bytes(whole[: max(4096, int(len(whole) * share))])
    run = Run.open(tmp_path / "a.brick")
    assert "truncated" in str(run.problems[0])
    assert str(spool) in str(run.problems[0])
    assert run.publish() is not None


def test_a_partition_that_never_began_is_not_a_problem(tmp_path: Path) -> None:
    path = record(tmp_path / "a.brick")
    (path / "spool" / "1-0.spool").write_bytes(b"")
    (path / "spool" / "1-1.spool").write_bytes(bytes(4096))
    run = Run.open(path)
    assert len(run.parts) == 1
    assert run.problems == []


def test_a_killed_process_leaves_a_readable_run(tmp_path: Path) -> None:
    child = python(RECORD_AND_WAIT, tmp_path / "a.brick")
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    run = Run.open(tmp_path / "a.brick")
    assert not run.is_live
    assert run.manifest["ended"] is None
    assert table_from_run(run, "bricks")["count"].to_pylist() == [1]
    assert run.publish() is not None


def test_a_live_run_is_found_read_and_not_published(tmp_path: Path) -> None:
    child = python(RECORD_AND_WAIT, tmp_path / "a.brick")
    assert child.stdout is not None
    child.stdout.readline()
    run = Run.open(tmp_path / "a.brick")
    assert run.is_live
    assert live_processes(run.path) == [child.pid]
    assert table_from_run(run, "bricks")["count"].to_pylist() == [1]
    assert run.publish() is None
    assert run.publish(force=True) is not None
    child.communicate("\n")
    assert not run.is_live
    written = (run.path / "tables" / "parts.parquet").stat().st_mtime_ns
    assert Run.open(run.path).publish() is not None
    assert (run.path / "tables" / "parts.parquet").stat().st_mtime_ns > written
    assert pq.read_table(run.path / "tables" / "parts.parquet")["closed"].to_pylist() == [True]


def test_processes_that_left_no_partition_are_named(tmp_path: Path) -> None:
    path = record(tmp_path / "a.brick")
    lines = [{"pid": os.getpid(), "argv": ["a"]}, {"pid": 1, "argv": ["b"], "parent": 0}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"pid": 2, "ar'
    (path / "processes.jsonl").write_text(text)
    run = Run.open(path)
    assert [process["pid"] for process in run.processes] == [os.getpid(), 1]
    assert run.unfollowed == [lines[1]]


# Publishing


def test_publishing_writes_every_table_with_its_columns(tmp_path: Path) -> None:
    run = Run.open(record(tmp_path / "a.brick"))
    directory = run.publish()
    assert directory == run.path / "tables"
    for name, schema in SCHEMAS.items():
        file = directory / f"{name}.parquet"
        found = pq.read_schema(file)
        assert found.remove_metadata().equals(schema)
        assert found.metadata[b"brickline.version"] == b"3"
        assert found.metadata[b"brickline.run"] == run.manifest["id"].encode()
        assert (file.stat().st_mode & 0o777) == 0o600
        assert pq.read_table(file).equals(table_from_run(run, name))
    assert not [entry for entry in os.listdir(directory) if entry.endswith(".tmp")]


def test_version_1_has_the_columns_that_later_rooms_need() -> None:
    traces = set(SCHEMAS["traces"].names)
    assert traces >= {"trace", "parent", "ordinal", "direction", "enqueue_ns", "start_ns", "end_ns"}
    assert traces >= {"entries", "timed", "rank", "process", "thread", "device", "stream", "step"}
    assert traces >= {"phase", "clock_domain", "worker", "item", "region"}
    operands = set(SCHEMAS["operands"].names)
    assert operands >= {"trace", "role", "index", "tensor", "version", "shape", "dtype", "strides"}
    assert "fingerprint" in operands


def test_every_table_and_column_is_documented() -> None:
    page = FORMAT_PAGE.read_text()
    for table, schema in SCHEMAS.items():
        assert f"### {table}" in page or f"and {table}" in page
        assert [name for name in schema.names if f"`{name}`" not in page] == []


def test_publishing_twice_writes_once(tmp_path: Path) -> None:
    path = record(tmp_path / "a.brick")
    files = [path / "tables" / f"{name}.parquet" for name in SCHEMAS]
    Run.open(path).publish()
    first = [file.stat().st_mtime_ns for file in files]
    Run.open(path).publish()
    assert [file.stat().st_mtime_ns for file in files] == first
    files[0].unlink()
    Run.open(path).publish()
    assert files[0].exists()


def test_a_new_partition_is_published(tmp_path: Path) -> None:
    path = record(tmp_path / "a.brick")
    Run.open(path).publish()
    other = record(tmp_path / "b.brick", layers=5)
    shutil.copy2(spool_of(other), path / "spool" / "9-9.spool")
    directory = Run.open(path).publish()
    assert directory is not None
    assert pq.read_table(directory / "bricks.parquet").num_rows == 7


def test_a_run_that_cannot_be_written_to_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path / "a.brick")
    if os.geteuid() == 0:  # root may write anywhere

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        path.chmod(0o500)
    run = Run.open(path)
    assert run.publish() is None
    assert table_from_run(run, "bricks").num_rows == 2
    path.chmod(0o700)


def test_tables_resolve_names(tmp_path: Path) -> None:
    profiler = bl.BrickProfiler("t", enabled=True, path=tmp_path / "a.brick")
    with profiler.step(tokens=3, phase="decode"):
        with profiler.brick(bl.BrickId.RMS_NORM, layer=4, elements=7):
            pass
        with profiler.brick("my own brick"):
            pass
    profiler.close()
    run = Run.open(tmp_path / "a.brick")
    bricks = {row["name"]: row for row in table_from_run(run, "bricks").to_pylist()}
    norm, own = bricks["RmsNorm"], bricks["my own brick"]
    assert (norm["layer"], norm["category"], norm["phase"]) == (4, "Norm", "decode")
    assert (norm["brick"], norm["elements"], norm["device"]) == (int(bl.BrickId.RMS_NORM), 7, None)
    assert (own["layer"], own["category"], own["brick"]) == (None, "Other", None)
    assert norm["clock_domain"] == "host"
    assert norm["process"] == os.getpid()
    assert norm["cycles"] is None
    (step,) = table_from_run(run, "steps").to_pylist()
    assert (step["tokens"], step["count"], step["phase"]) == (3, 1, "decode")
    buckets = table_from_run(run, "histograms").to_pylist()
    for brick in (norm, own):
        counted = sum(row["count"] for row in buckets if row["name"] == brick["name"])
        assert counted + brick["zero_count"] == brick["timed"]


def test_traces_are_published(tmp_path: Path) -> None:
    profiler = bl.BrickProfiler("t", enabled=True, path=tmp_path / "a.brick")
    profiler.traces.add(bl.KernelTrace("rope", 3, 7, "CUDA", time_us=2.0, output_checksum=99))
    profiler.close()
    (trace,) = table_from_run(Run.open(tmp_path / "a.brick"), "traces").to_pylist()
    assert (trace["name"], trace["layer"], trace["position"]) == ("rope", 3, 7)
    assert (trace["backend"], trace["direction"], trace["parent"]) == ("CUDA", "forward", None)
    assert (trace["input_checksum"], trace["output_checksum"]) == (None, 99)
    assert (trace["worker"], trace["item"], trace["region"], trace["slot"]) == (None,) * 4
    assert trace["end_ns"] - trace["start_ns"] == 2000
    assert (trace["process"], trace["clock_domain"]) == (os.getpid(), "host")


def test_an_unknown_table_is_refused(tmp_path: Path) -> None:
    run = Run.open(record(tmp_path / "a.brick"))
    with pytest.raises(UsageError, match="bricks"):
        table_from_run(run, "brick")


Entry = tuple[bl.BrickId, int, int]
ENTRIES = st.lists(
    st.tuples(st.sampled_from(bl.BrickId.ALL), st.integers(0, 5), st.integers(0, abi.MAX_ELEMENTS)),
    max_size=60,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(entries=ENTRIES)
def test_what_is_recorded_is_what_is_read(tmp_path: Path, entries: list[Entry]) -> None:
    profiler = bl.BrickProfiler("t", enabled=True, path=tmp_path / "a.brick", overwrite=True)
    for brick, layer, elements in entries:
        with profiler.brick(brick, layer=layer, elements=elements):
            pass
    profiler.close()
    counts: Counter[tuple[str, int]] = Counter()
    sums: Counter[tuple[str, int]] = Counter()
    for brick, layer, elements in entries:
        counts[brick.label, layer] += 1
        sums[brick.label, layer] += elements
    directory = Run.open(tmp_path / "a.brick").publish()
    assert directory is not None
    rows = pq.read_table(directory / "bricks.parquet").to_pylist()
    assert {(row["name"], row["layer"]): row["count"] for row in rows} == dict(counts)
    assert {(row["name"], row["layer"]): row["elements"] for row in rows} == dict(sums)
    assert all(row["min_ns"] <= row["max_ns"] <= row["total_ns"] for row in rows)


# Saving


def test_a_run_is_moved_while_it_is_recorded(tmp_path: Path) -> None:
    child = python(
        """
import sys, brickline as bl
from brickline.runs import RunWriter
profiler = bl.BrickProfiler("t", enabled=True)
brick = profiler.brick(bl.BrickId.RMS_NORM, layer=0)
with brick: pass
profiler.save(sys.argv[1])
with brick: pass
profiler.close()
""",
        tmp_path / "a.brick",
    )
    child.communicate()
    assert child.returncode == 0
    assert table_from_run(Run.open(tmp_path / "a.brick"), "bricks")["count"].to_pylist() == [2]


def across(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every run seem to be moved to another filesystem."""
    monkeypatch.setattr("brickline.runs.rename_run", lambda *_: False)


def test_across_filesystems_the_copy_follows_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    across(monkeypatch)
    writer = RunWriter.create(name="t")
    original = writer.path
    writer.move_to(tmp_path / "a.brick")
    assert read_manifest(tmp_path / "a.brick")["ended"] is None
    writer.close(steps=3)
    assert read_manifest(tmp_path / "a.brick")["facts"] == {"steps": 3}
    assert writer.path == tmp_path / "a.brick"
    assert not writer.temporary
    assert not original.exists()


def test_a_joined_run_is_copied_and_stays(tmp_path: Path) -> None:
    writer = RunWriter.join(record(tmp_path / "a.brick"))
    writer.move_to(tmp_path / "b.brick")
    writer.close()
    first, second = Run.open(tmp_path / "a.brick"), Run.open(tmp_path / "b.brick")
    assert first.manifest == second.manifest
    assert second.joined[0]["ended"] is not None
    assert table_from_run(first, "bricks").equals(table_from_run(second, "bricks"))
    mode = spool_of(tmp_path / "b.brick").stat().st_mode & 0o777
    assert mode == 0o600


def test_saving_refuses_an_existing_path(tmp_path: Path) -> None:
    record(tmp_path / "a.brick")
    writer = RunWriter.create(tmp_path / "b.brick", name="mine")
    with pytest.raises(RunExists, match="overwrite=True"):
        writer.move_to(tmp_path / "a.brick")
    assert writer.path == tmp_path / "b.brick"
    writer.move_to(tmp_path / "a.brick", overwrite=True)
    assert read_manifest(tmp_path / "a.brick")["name"] == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.brick"]


def test_a_run_is_not_copied_into_itself(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "a.brick", name="t")
    with pytest.raises(RunError, match="outside the run"):
        writer.copy_to(tmp_path / "a.brick" / "b.brick")


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    across(monkeypatch)
    writer = RunWriter.create(tmp_path / "a.brick", name="t")
    (tmp_path / "there").mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "before":
        empty = os.statvfs_result((4096, 4096, 100, 0, 0, 1, 1, 1, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: empty)
    else:
        monkeypatch.setattr("shutil.copyfile", full)
    size = (writer.path / "manifest.json").stat().st_size
    with pytest.raises(RunError, match=rf"there/b\.brick needs {size} bytes.*free some space"):
        writer.move_to(tmp_path / "there" / "b.brick")
    assert os.listdir(tmp_path / "there") == []
    assert read_manifest(writer.path)["name"] == "t"


BUSY = """
import sys
import brickline as bl
profiler = bl.BrickProfiler("busy", enabled=True, path=sys.argv[1])
brick = profiler.brick("Work", layer=0)
for number in range(10**9):
    with profiler.step(tokens=1, phase="decode"):
        with brick:
            pass
        with brick:
            pass
    if number % 1000 == 0:
        with profiler.brick(f"Work {number}"):
            print("ready", flush=True)
"""


def test_a_spool_that_folds_all_the_time_is_copied_whole(tmp_path: Path) -> None:
    busy = python(BUSY, tmp_path / "a.brick")
    try:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "ready\n"
        threading.Thread(target=busy.stdout.read, daemon=True).start()
        copies = tmp_path / "copies" / "spool"
        copies.mkdir(parents=True)
        for number in range(20):
            copy = copies / f"1-{number}.spool"
            copy_spool(spool_of(tmp_path / "a.brick"), copy)
            profile = profile_from_part(read_part(copy))
            assert profile.problems == ()
            steps, work = profile.steps["decode"].count, profile.brick("Work")
            assert steps > 0
            assert work is not None
            assert 0 <= work.count - 2 * steps <= 2
            assert work.timed == work.histogram.count == work.count
            assert all(row.name.startswith("Work") for row in profile.bricks)
    finally:
        busy.kill()
        busy.communicate()


def test_a_damaged_spool_is_copied_as_it_is(tmp_path: Path) -> None:
    spool = spool_of(record(tmp_path / "a.brick"))
    for damage in (spool.read_bytes()[:9000], b"no spool", b""):
        spool.write_bytes(damage)
        copy_spool(spool, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == damage


def test_a_lane_that_never_rests_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = spool_of(record(tmp_path / "a.brick"))
    restless = iter(range(0, 100_000, 2))
    monkeypatch.setattr("brickline.spool_copies.time.sleep", lambda _: None)
    monkeypatch.setattr("brickline.spool_copies._Copy._moment", lambda *_: (next(restless), 0, 0))
    with pytest.raises(RunError, match="changes faster than it can be copied; try again"):
        copy_spool(spool, tmp_path / "copy")


def test_a_forked_child_leaves_the_writer_alone(tmp_path: Path) -> None:
    code = """
import os, sys
from brickline.runs import RunWriter
writer = RunWriter.create(sys.argv[1], name="t")
child = os.fork()
if child == 0:
    writer.note(tokens=1)
    writer.close()
    writer.discard()
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""
    child = python(code, tmp_path / "a.brick")
    child.communicate()
    assert child.returncode == 0
    manifest = read_manifest(tmp_path / "a.brick")
    assert manifest["ended"] is None
    assert manifest["facts"] == {}


def test_a_damaged_graph_leaves_the_statistics_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path / "a.brick")
    whole = _core.read_spool

    def damaged(spool: str) -> dict[str, Any]:
        snapshot = whole(spool)
        snapshot["tables"][int(abi.Table.GRAPH_NODE)] = b"half a row"
        return snapshot

    monkeypatch.setattr(_core, "read_spool", damaged)
    run = Run.open(path)
    (part,) = run.parts
    assert len(part.nodes)
    assert len(part.graph.nodes) == 0
    assert "damaged graph tables" in str(run.problems[0])
