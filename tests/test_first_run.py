"""The whole story: a stranger runs the demo, their own program, looks at it and gates it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing, sys, time
import brickline as bl

def work(tokens):
    profiler = bl.BrickProfiler("story")
    for _ in range(tokens):
        with profiler.step(tokens=1, phase="decode"):
            with profiler.brick(bl.BrickId.RMS_NORM, layer=0):
                sum(range(200))
            with profiler.brick("Custom", layer=0):
                sum(range(2000))
    return profiler

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[2]).Process(target=work, args=(5,))
    child.start()
    work(int(sys.argv[1]))
    child.join()
    print("tokens", sys.argv[1])
"""


@pytest.fixture
def brickline(tmp_path):
    def call(*words, status=0):
        done = subprocess.run(
            [sys.executable, "-m", "brickline", *map(str, words)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "NO_COLOR": "1"},
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout, done.stderr

    return call


def test_the_demo_shows_everything_it_promises(brickline, tmp_path):
    out, _ = brickline("demo", "--tokens", 40)
    assert out.index("Which brick went wrong?") < out.index("Where does the time go?")
    assert out.index("Where does the time go?") < out.index("Is it the same everywhere?")
    _, _, everywhere = out.partition("Is it the same everywhere?")
    rows = {row.split()[1]: row for row in everywhere.splitlines() if row.startswith("CPU ")}
    assert list(rows) == ["serial", "parallel", "megakernel"]
    for executor, row in rows.items():
        assert re.search(r" \d+ +[\d.]+ (ms|µs) +[A-Z]\w+ \d+%", row), "tokens/s, a step, a brick"
        assert ("the same bits" in row) == (executor != "serial")
    assert re.search(r"decode on CPU, program mode · ([\d,]+) of \1 items", everywhere)
    assert re.search(r"workers: work [\d.]+ % · .*waiting for tasks", everywhere)
    assert re.search(r"imbalance \d\.\d\d", everywhere)
    assert "brickline report demo.megakernel.json" in everywhere
    assert "Workers" in brickline("report", "demo.megakernel.json")[0]
    for words in (
        "numpy.allclose, defaults",
        "layers.3.mlp.norm is wrong: an epsilon",
        "▲",
    ):
        assert words in out
    for word in ("Bricks", "Categories", "Layers", "Tiles", "Execution graph", "Critical path"):
        assert word in out
    for brick in ("Embedding", "RmsNorm", "QkvProjection", "AttentionScore", "LmHead", "Sampling"):
        assert brick in out
    assert (tmp_path / "demo.brick" / "manifest.json").is_file()
    assert (tmp_path / "demo.brick" / "tables").is_dir()
    assert out.rstrip().endswith("demo.html")
    assert "<!doctype html>" in (tmp_path / "demo.html").read_text(encoding="utf-8")
    compared, _ = brickline("compare", "demo-candidate.brick", "demo-reference.brick", status=1)
    assert "layers.3.mlp.norm" in compared
    assert "demo-2.brick" in brickline("demo", "--tokens", 2)[0]
    document = json.loads(brickline("report", "demo.brick", "--json")[0])
    assert document["schema"] == "brickline-profile"
    counts = {brick["name"]: brick["count"] for brick in document["bricks"]}
    assert counts["LmHead"] == 40
    validated, _ = brickline("report", "demo.brick", "--validate")
    assert "coverage" in validated
    assert unknown_to_git(tmp_path) == [], "what two demos left in a clone is ignored there"


def unknown_to_git(folder):
    """Files that a clone with this repository's .gitignore would show as untracked."""
    if shutil.which("git") is None:
        pytest.skip("git is not on PATH")
    shutil.copy(Path(__file__).parents[1] / ".gitignore", folder)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    words = ["git", "status", "--porcelain", "--untracked-files=all", "--", ".", ":!state"]
    shown = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout
    return [line for line in shown.splitlines() if line != "?? .gitignore"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_program_of_ones_own_with_children(brickline, tmp_path, method):
    (tmp_path / "story.py").write_text(textwrap.dedent(PROGRAM))
    out, err = brickline("run", "-o", "story.brick", "story.py", 20, method)
    assert "tokens 20" in out
    assert "brickline report" in err
    document = json.loads(brickline("report", "story.brick", "--json")[0])
    counts = {brick["name"]: brick["count"] for brick in document["bricks"]}
    assert counts == {"RmsNorm": 25, "Custom": 25}
    assert "--force" in brickline("run", "-o", "story.brick", "story.py", 1, method, status=2)[1]
    brickline("run", "--force", "-o", "story.brick", "story.py", 1, method)


def test_budgets_gate(brickline, tmp_path):
    (tmp_path / "story.py").write_text(textwrap.dedent(PROGRAM))
    brickline("run", "-o", "story.brick", "story.py", 20, "fork")
    (tmp_path / "loose.toml").write_text("[bricks]\nRmsNorm = 1e9\n")
    (tmp_path / "tight.toml").write_text("[bricks]\nCustom = 0.001\n")
    (tmp_path / "typo.toml").write_text("[bricks]\nRmsNrom = 1.0\n")
    brickline("report", "story.brick", "--budget", "loose.toml")
    out, _ = brickline("report", "story.brick", "--budget", "tight.toml", status=1)
    assert "Custom" in out
    _, err = brickline("report", "story.brick", "--budget", "typo.toml", status=2)
    assert "RmsNrom" in err
    assert "RmsNorm" in err


def test_an_empty_run_says_who_was_not_followed(brickline, tmp_path):
    (tmp_path / "empty.py").write_text("import subprocess; subprocess.run(['true'])\n")
    _, err = brickline("run", "-o", "empty.brick", "empty.py")
    assert "no BrickProfiler recorded anything" in err
    assert "was not followed: true" in err


def test_the_programs_own_status_and_errors_come_through(brickline, tmp_path):
    (tmp_path / "status.py").write_text("raise SystemExit(7)\n")
    brickline("run", "-o", "a.brick", "status.py", status=7)
    (tmp_path / "fails.py").write_text("1 / 0\n")
    _, err = brickline("run", "-o", "b.brick", "fails.py", status=1)
    assert "ZeroDivisionError" in err
    assert "runpy" not in err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("report", "nothing.brick"), "nothing.brick"),
        (("report", "."), "run"),
        (("check",), "expected either CANDIDATE or --runs"),
        (("run",), "expected a script"),
        (("run", "missing.py"), "no script"),
        (("top", "999999"), "999999"),
        (("bench", "nonsense"), "bench"),
        (("doctor", "--peaks", "--device", "TPU"), "CUDA"),
    ],
)
def test_mistakes_end_with_status_two_and_a_next_step(brickline, words, wanted):
    _, err = brickline(*words, status=2)
    assert wanted in err
    assert "Traceback" not in err


def test_top_follows_a_live_process_and_survives_its_death(brickline, tmp_path):
    (tmp_path / "live.py").write_text(
        "import time, brickline as bl\n"
        "p = bl.BrickProfiler('live', enabled=True)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    with p.step(tokens=1, phase='decode'), p.brick('Work', layer=0):\n"
        "        time.sleep(0.001)\n"
    )
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    live = subprocess.Popen(
        [sys.executable, tmp_path / "live.py"], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert live.stdout.readline() == "ready\n"
        time.sleep(0.3)
        once, _ = brickline("top", live.pid, "--once")
        assert "Work" in once
        watcher = subprocess.Popen(
            [sys.executable, "-m", "brickline", "top", str(live.pid), "--plain", "-n", "0.2"],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        limit = threading.Timer(120, watcher.kill)
        limit.start()
        shown = any("Work" in line for line in watcher.stdout)  # reads until it has been shown
        limit.cancel()
        assert shown, "the watcher ended, or was ended, before it showed the process"
        live.send_signal(signal.SIGKILL)
        live.wait()
        out, _ = watcher.communicate(timeout=30)
        assert watcher.returncode == 0
        assert "ended" in out
    finally:
        live.kill()
        live.wait()
        live.stdout.close()


def test_doctor_says_what_is_there(brickline):
    out, _ = brickline("doctor")
    for word in ("Python", "Compiler", "CUDA driver", "Clock", "Peaks"):
        assert word in out
