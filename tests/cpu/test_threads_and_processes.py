"""Threads, forks, spawned processes, two profilers, and another process looking on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from threads_together import in_threads

import brickline as bl
from brickline import BrickProfiler, Profile, Run
from brickline.profile import profile_from_part


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps runs without a path out of the user's state directory."""
    directory = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    monkeypatch.delenv("BRICKLINE_RUN", raising=False)
    return directory


def python(code: str | Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start a program, its text or its file, that sees the same brickline as this one."""
    program = ["-c", code] if isinstance(code, str) else [str(code)]
    package = str(Path(bl.__file__).parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-W", "error", *program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def finish(program: subprocess.Popen[str]) -> str:
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err
    assert err == "", "a sound program says nothing"
    return out


def profile_at(path: Path) -> Profile:
    run = Run.open(path)
    assert run.problems == []
    return Profile.from_run(run)


# ------------------------------------------------------------------------------------------ threads


def test_eight_threads_lose_no_sample(tmp_path: Path) -> None:
    entries = 30_000
    with BrickProfiler("t", enabled=True, path=tmp_path / "run") as p:

        def work(number: int) -> None:
            shared, own = p.brick("RmsNorm", layer=0), p.brick(f"own {number}")
            for _ in range(entries):
                with own, shared:
                    pass
            timer = p.start("Timer")
            p.stop(timer, number)

        in_threads(8, work)
        live = p.profile()
    profile = profile_at(tmp_path / "run")
    for each in (live, profile):
        counts = {row.name: row.count for row in each.bricks}
        assert counts == {f"own {number}": entries for number in range(8)} | {
            "RmsNorm": 8 * entries,
            "Timer": 8,
        }
        timer = each.brick("Timer")
        assert timer is not None
        assert timer.total_elements == sum(range(8))
        assert each.recording.lost == 0
        assert each.recording.out_of_order == 0
    for row in profile.bricks:
        assert row.exclusive_count == row.count
    assert profile.exclusive_ns <= sum(lane.span_ns for lane in profile.lanes)


def test_threads_that_run_together_have_lanes_of_their_own(tmp_path: Path) -> None:
    identities: set[int] = set()
    together = threading.Barrier(8)
    with BrickProfiler("t", enabled=True, path=tmp_path / "run") as p:

        def work(number: int) -> None:
            identities.add(threading.get_native_id())
            for _ in range(number + 1):
                with p.brick("Work"):
                    pass
            together.wait()

        in_threads(8, work)
    lanes = profile_at(tmp_path / "run").lanes
    assert {lane.thread for lane in lanes} == identities
    assert sorted(lane.stats.count for lane in lanes) == list(range(1, 9))
    assert {lane.process for lane in lanes} == {os.getpid()}


def test_exclusive_time_is_kept_within_a_thread(tmp_path: Path) -> None:
    """A brick in one thread is no part of a brick that another has open."""
    inside = threading.Event()
    leave = threading.Event()
    with BrickProfiler("t", enabled=True, device="NULL", path=tmp_path / "run") as p:

        def outer() -> None:
            with p.brick("outer"):
                inside.set()
                leave.wait()

        thread = threading.Thread(target=outer)
        thread.start()
        inside.wait()
        with p.brick("elsewhere"):
            p.advance(100)
        leave.set()
        thread.join()
        assert p.brick_stats("outer").exclusive_ns == 100
        assert p.brick_stats("elsewhere").exclusive_ns == 100
        assert p.profile().recording.out_of_order == 0


def test_a_hundred_short_threads_share_lanes(tmp_path: Path) -> None:
    tasks: list[Path] = []

    def work(_: int) -> None:
        tasks.append(Path(f"/proc/self/task/{threading.get_native_id()}"))
        p.stop(p.start("Work"), 2)

    with BrickProfiler("t", enabled=True, path=tmp_path / "run") as p:
        for _ in range(100):
            in_threads(1, work)
            while tasks[-1].exists():  # Python joins a thread before the system has ended it
                time.sleep(0)
    run = Run.open(tmp_path / "run")
    (part,) = run.parts
    assert len(part.lanes) <= 2
    assert sum(lane["threads"] for lane in part.lanes) == 100
    work = Profile.from_run(run).brick("Work")
    assert work is not None
    assert (work.count, work.total_elements) == (100, 200)
    assert part.path.stat().st_size < 4 * 2**20


def test_what_an_ended_thread_left_open_is_not_taken_from_the_next(tmp_path: Path) -> None:
    with BrickProfiler("t", enabled=True, device="NULL", path=tmp_path / "run", graph=True) as p:

        def leaves(_: int) -> None:
            p.brick("never left").__enter__()
            with p.brick("inner"):
                p.advance(40)

        def follows(_: int) -> None:
            with p.brick("next"):
                p.advance(100)

        in_threads(1, leaves)
        in_threads(1, follows)
        assert p.brick_stats("inner").total_ns == 40
        assert p.brick_stats("next").exclusive_ns == 100
        assert p.stats("never left") is None
        assert "inner" not in p.graph.to_tree().partition("next")[2]


def test_a_timer_stopped_on_another_thread_is_flagged(tmp_path: Path) -> None:
    with BrickProfiler("t", enabled=True, device="NULL", path=tmp_path / "run") as p:
        timer = p.start("moved")
        p.advance(10)
        in_threads(1, lambda _: p.stop(timer, 3))
        with p.brick("after"):
            p.advance(5)
        moved, after = p.brick_stats("moved"), p.brick_stats("after")
        assert (moved.count, moved.total_ns, moved.total_elements) == (1, 10, 3)
        assert (moved.out_of_order, moved.exclusive_ns) == (1, 0)
        assert (after.exclusive_ns, after.out_of_order) == (5, 0)


def test_a_thread_outside_steps_belongs_to_the_step_of_its_profiler(tmp_path: Path) -> None:
    with BrickProfiler("t", enabled=True, path=tmp_path / "run") as p:
        with p.step(tokens=1, phase="decode"):
            in_threads(4, lambda _: p.stop(p.start("helper")))
        (row,) = p.profile().brick_phases
        assert (row.name, row.phase, row.count) == ("helper", "decode", 4)


def test_threads_in_steps_of_their_own_do_not_mix_phases(tmp_path: Path) -> None:
    began, other_began, ended = (threading.Event() for _ in range(3))
    with BrickProfiler("t", enabled=True, path=tmp_path / "run") as p:

        def work(number: int) -> None:
            if number == 0:
                with p.step(tokens=128, phase="prefill"):
                    began.set()
                    other_began.wait()
                    p.stop(p.start("a"))
                ended.set()
            else:
                began.wait()
                with p.step(tokens=1, phase="decode"):
                    other_began.set()
                    ended.wait()
                    p.stop(p.start("b"))

        in_threads(2, work)
        p.stop(p.start("c"))
        profile = p.profile()
    phases = {row.name: row.phase for row in profile.brick_phases}
    assert phases == {"a": "prefill", "b": "decode", "c": ""}
    assert {phase: row.tokens for phase, row in profile.steps.items()} == {
        "prefill": 128,
        "decode": 1,
    }


@pytest.mark.parametrize("sampling", [bl.Sampling(steps=2), bl.Sampling(layers=2)])
def test_new_threads_are_counted_under_sampling(tmp_path: Path, sampling: bl.Sampling) -> None:
    with BrickProfiler("t", enabled=True, path=tmp_path / "run", sampling=sampling) as p:

        def work(_: int) -> None:
            for layer in range(4):
                with p.brick("Work", layer=layer):
                    pass

        for _ in range(4):
            with p.step(tokens=1, phase="decode"):
                in_threads(4, work)
        work_stats = p.brick_stats("Work")
        assert (work_stats.count, work_stats.timed) == (64, 32)
        assert p.profile().recording.orphan_exits == 0


def test_reading_while_others_record(tmp_path: Path) -> None:
    done = threading.Event()
    with BrickProfiler("t", enabled=True, path=tmp_path / "run") as p:
        written = [0] * 4

        def work(number: int) -> None:
            brick = p.brick("Work", layer=number)
            while not done.is_set() or written[number] < 1000:
                with brick:
                    pass
                written[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        seen = [p.brick_stats("Work").count for _ in range(20)]
        done.set()
        for thread in threads:
            thread.join()
        assert seen == sorted(seen)
        assert p.brick_stats("Work").count == sum(written)


def test_two_profilers_in_one_process(tmp_path: Path) -> None:
    p = BrickProfiler("p", enabled=True, path=tmp_path / "p")
    q = BrickProfiler("q", enabled=True, path=tmp_path / "q")

    def work(number: int) -> None:
        for _ in range(1000):
            with p.brick("outer"), q.brick("inner"):
                pass

    in_threads(4, work)
    p.close()
    work(0)
    q.close()
    outer, inner = profile_at(tmp_path / "p").bricks, profile_at(tmp_path / "q").bricks
    assert [(row.name, row.count) for row in outer] == [("outer", 4000)]
    assert [(row.name, row.count) for row in inner] == [("inner", 5000)]
    assert all(row.exclusive_ns == row.total_ns for row in (*outer, *inner))


def test_many_profilers_come_and_go(state: Path) -> None:
    for number in range(50):
        p = BrickProfiler(f"profiler {number}", enabled=True)
        with p.brick("Work"):
            pass
        assert p.brick_stats("Work").count == 1
        p.close()
    assert list(state.rglob("*.spool")) == []


# ----------------------------------------------------------------------------------- fork and spawn

FORK = """
import os, sys, threading
import brickline as bl

p = bl.BrickProfiler("t", enabled=True, path=sys.argv[1], graph=True)
brick, timer = p.brick("Work"), p.start("open across the fork")
with p.step(tokens=1, phase="parent"):
    for _ in range(1000):
        with brick:
            pass
    # A second thread records all the time: its locks must not be inherited held.
    stop = threading.Event()
    def busy():
        while not stop.is_set():
            with p.brick("Busy"):
                pass
    thread = threading.Thread(target=busy)
    thread.start()
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            p.stop(timer)
            for _ in range(10 * (number + 1)):
                with brick:
                    pass
            assert p.brick_stats("Work").count == 10 * (number + 1)
            assert p.is_enabled()
            p.close() if number else sys.exit(0)
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    thread.join()
    with brick:
        pass
p.stop(timer)
assert p.brick_stats("Work").count == 1001
p.close()
print(*children)
"""


def test_a_forked_child_records_into_its_own_partition(tmp_path: Path) -> None:
    program = python(FORK, tmp_path / "run")
    children = {int(pid) for pid in finish(program).split()}
    run = Run.open(tmp_path / "run")
    assert run.problems == []
    assert {part.process for part in run.parts} == {program.pid, *children}
    counts = {
        part.process: row.count
        for part in run.parts
        for row in profile_from_part(part).bricks
        if row.name == "Work"
    }
    assert counts.pop(program.pid) == 1001
    assert sorted(counts.values()) == [10, 20, 30]
    assert all(part.header["closed"] for part in run.parts)
    parent = next(part for part in run.parts if part.process == program.pid)
    assert profile_from_part(parent).brick("open across the fork") is not None
    whole = Profile.from_run(run).brick("Work")
    assert whole is not None
    assert whole.count == 1061


def test_spans_that_are_pending_at_a_fork_count_once(tmp_path: Path) -> None:
    code = """
import os, sys
import brickline as bl

p = bl.BrickProfiler("t", enabled=True, path=sys.argv[1])
p.record_deferred("Norm", 0)
child = os.fork()
if child == 0:
    assert not p.has_pending()
    p.record_deferred("Own", 0)
p.finalize(100)
p.close()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    finish(python(code, tmp_path / "run"))
    counts = {row.name: row.count for row in profile_at(tmp_path / "run").bricks}
    assert counts == {"Norm": 1, "Own": 1}


def test_a_child_of_a_disabled_profiler_records_nothing(tmp_path: Path) -> None:
    code = """
import os, sys
import brickline as bl
p = bl.BrickProfiler("t", enabled=True, path=sys.argv[1])
with p.brick("Work"): pass
p.disable()
child = os.fork()
if child == 0:
    with p.brick("Work"): pass
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
p.enable()
with p.brick("Work"): pass
p.close()
"""
    finish(python(code, tmp_path / "run"))
    run = Run.open(tmp_path / "run")
    assert len(run.parts) == 1
    work = Profile.from_run(run).brick("Work")
    assert work is not None
    assert work.count == 2


WORKERS = """
import multiprocessing, os, sys
import brickline as bl

def work(number):
    profiler = bl.BrickProfiler("worker")
    assert profiler.is_enabled(), "under `brickline run` every profiler is enabled"
    for _ in range(number + 1):
        with profiler.brick("Work"):
            pass
    profiler.close()

if __name__ == "__main__":
    p = bl.BrickProfiler("main")
    with p.brick("Main"):
        pass
    context = multiprocessing.get_context(sys.argv[1])
    workers = [context.Process(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    print(os.getpid(), *(worker.pid for worker in workers))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_record_into_the_run_of_the_command(tmp_path: Path, method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(WORKERS)
    writer = bl.runs.RunWriter.create(tmp_path / "run", name="program")
    program = python(script, method, BRICKLINE_RUN=str(tmp_path / "run"))
    main, *workers = (int(pid) for pid in finish(program).split())
    writer.close()
    run = Run.open(tmp_path / "run")
    assert run.problems == []
    counts: dict[int, dict[str, int]] = {}
    for part in run.parts:
        rows = profile_from_part(part).bricks
        counts.setdefault(part.process, {}).update({row.name: row.count for row in rows})
    assert counts[main] == {"Main": 1}
    assert [counts[pid]["Work"] for pid in workers] == [1, 2, 3]
    assert {document["process"] for document in run.joined} >= {main, *workers}


# ----------------------------------------------------------------------------------- life and death


def spools(state: Path) -> list[Path]:
    return sorted(state.rglob("*.spool"))


TEMPORARY = """
import os, signal, sys
import brickline as bl
p = bl.BrickProfiler("t", enabled=True)
with p.brick("Work"):
    pass
print(p.path, flush=True)
how = sys.argv[1]
if how == "save":
    p.save(sys.argv[2])
elif how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "raise":
    raise KeyError("mine")
elif how == "exit":
    sys.exit(3)
elif how == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert p.path.exists(), "a child's exit does not remove its parent's run"
"""


@pytest.mark.parametrize("how", ["end", "exit", "raise", "fork"])
def test_a_run_without_a_path_is_removed_at_a_clean_exit(state: Path, how: str) -> None:
    program = python(TEMPORARY, how)
    out, err = program.communicate(timeout=60)
    assert program.returncode == {"end": 0, "exit": 3, "raise": 1, "fork": 0}[how], err
    assert not Path(out.strip()).exists()
    assert spools(state) == []


def test_a_saved_run_is_kept(tmp_path: Path, state: Path) -> None:
    finish(python(TEMPORARY, "save", tmp_path / "kept"))
    assert profile_at(tmp_path / "kept").bricks[0].count == 1
    assert spools(state) == []


def test_the_run_of_a_killed_process_is_kept(state: Path) -> None:
    program = python(TEMPORARY, "kill")
    out, _ = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGKILL
    profile = profile_at(Path(out.strip()))
    assert profile.bricks[0].count == 1
    assert profile.recording.unclosed == 1


def test_a_profiler_that_is_still_in_use_at_exit_is_quiet(tmp_path: Path) -> None:
    code = """
import sys, threading
import brickline as bl
p = bl.BrickProfiler("t", enabled=True, path=sys.argv[1], graph=True)
handle, timer, tile = p.brick("A"), p.start("never stopped"), p.tiles.start(0)
@p.brick("Decorated")
def work(): pass
work()
step = p.step(); step.__enter__()
def forever():
    while True:
        with handle: pass
threading.Thread(target=forever, daemon=True).start()
"""
    finish(python(code, tmp_path / "run"))
    decorated = profile_at(tmp_path / "run").brick("Decorated")
    assert decorated is not None
    assert decorated.count == 1


LIVE = """
import sys
import brickline as bl
p = bl.BrickProfiler("t", enabled=True, path=sys.argv[1])
for line in sys.stdin:
    for _ in range(int(line)):
        with p.step(tokens=1, phase="decode"), p.brick("Work"):
            pass
    print("done", flush=True)
"""


def test_another_process_looks_on(tmp_path: Path) -> None:
    program = python(LIVE, tmp_path / "run")
    assert program.stdin is not None
    assert program.stdout is not None
    total = 0
    for count in (1, 10, 10_000, 3):
        program.stdin.write(f"{count}\n")
        program.stdin.flush()
        assert program.stdout.readline() == "done\n"
        total += count
        run = Run.open(tmp_path / "run")
        assert run.is_live
        profile = Profile.from_run(run)
        assert profile.is_live
        assert profile.total_tokens == total, "what is finished is seen at once"
        assert profile.bricks[0].count == total
    program.send_signal(signal.SIGKILL)
    program.communicate()
    run = Run.open(tmp_path / "run")
    assert not run.is_live
    assert Profile.from_run(run).total_tokens == total


def test_watching_a_process_that_never_rests(tmp_path: Path) -> None:
    code = """
import sys
import brickline as bl
p = bl.BrickProfiler("t", enabled=True, path=sys.argv[1])
outer, inner = p.brick("outer"), p.brick("inner")
print("ready", flush=True)
while True:
    with outer, inner:
        pass
"""
    program = python(code, tmp_path / "run")
    assert program.stdout is not None
    program.stdout.readline()
    seen = []
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        rows = {row.name: row for row in Profile.from_run(Run.open(tmp_path / "run")).bricks}
        if len(rows) == 2:
            assert 0 <= rows["inner"].count - rows["outer"].count <= 1
            assert rows["outer"].total_ns >= rows["outer"].exclusive_ns
            seen.append(rows["outer"].count)
    program.kill()
    program.communicate()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


# ------------------------------------------------------------------------------------------ imports


def test_importing_brickline_imports_nothing_heavy() -> None:
    code = """
import sys
import brickline
heavy = {"pyarrow", "torch", "cuda", "rich", "typer", "pandas", "duckdb", "textual", "triton"}
found = sorted(heavy & set(sys.modules))
p = brickline.BrickProfiler("t", enabled=True)
with p.brick("Work"): pass
p.brick_stats("Work")
p.close()
print(found, sorted({"pyarrow", "torch"} & set(sys.modules)))
"""
    assert finish(python(code)).strip() == "[] []"


def test_importing_brickline_leaves_the_process_alone() -> None:
    code = """
import os, signal, sys, threading
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
hooks = sys.excepthook, threading.excepthook
environment = dict(os.environ)
import brickline
assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}
assert hooks == (sys.excepthook, threading.excepthook)
assert environment == dict(os.environ)
assert threading.active_count() == 1
brickline.BrickProfiler()
assert threading.active_count() == 1
"""
    finish(python(code))
