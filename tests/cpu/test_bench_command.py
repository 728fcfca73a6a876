"""``brickline bench``: every benchmark of the checkout runs, and says what it could not measure.

How fast anything is has no place here: a claim may be missed on a busy machine, so exit status 1
is as good as 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from brickline.commands.bench import GROUPS, _benchmarks, _chosen
from brickline.errors import UsageError

ROOT = Path(__file__).parents[2]
GPU = {"kernels_cuda", "plans_cuda", "plans_decode", "megakernel_cuda", "profiler_cuda"}
CHEAP = (
    *("graph", "profiler_scale", "kernels_cuda", "plans_decode", "profiler_cuda"),
    *("megakernel_planning", "megakernel_queue", "fingerprint", "compare"),
)
"""A second or three each; what is in no group, or takes longer, is run by `make test-long`."""


def everything() -> list[str]:
    try:
        _chosen(ROOT / "benchmarks", "no such benchmark")
    except UsageError as error:
        names = str(error).split("expected one of ")[1].split(", ")
        return [name for name in names if name not in GROUPS or name == "look"]
    raise AssertionError("an unknown name was taken")


def bench(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "brickline", "bench", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


def quick(name: str) -> None:
    done = bench(name, "--quick", "--json")
    assert done.returncode in (0, 1, 3), done.stderr
    document = json.loads(done.stdout)
    claims = document["claims"]
    assert document["schema"] == "brickline-bench"
    assert claims
    for claim in claims:
        assert set(claim) == {"name", "figure", "unit", "target", "met", "peers", "note"}
        assert claim["figure"] is not None or claim["note"], "not measured, and not said why"
    measured = any(claim["figure"] is not None for claim in claims)
    assert (done.returncode == 3) == (not measured)
    assert ("nothing could be measured here" in done.stderr) == (not measured)
    if name in GPU and not measured:
        assert "needs PyTorch and a GPU" in claims[0]["note"]


@pytest.mark.parametrize("name", CHEAP)
def test_a_cheap_benchmark_runs(name: str) -> None:
    quick(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*everything()} - {*CHEAP}))
def test_a_benchmark_runs(name: str) -> None:
    quick(name)


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_holds_benchmarks_that_exist(group: str) -> None:
    assert _chosen(_benchmarks(), group) == list(GROUPS[group])
    assert {*GROUPS[group]} <= {*everything()}


def test_what_a_benchmark_prints_is_kept_from_the_document(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    harness = (ROOT / "benchmarks" / "harness.py").read_text(encoding="utf-8")
    (folder / "harness.py").write_text(harness, encoding="utf-8")
    (folder / "noisy.py").write_text(
        "import os, subprocess, warnings\n"
        "from harness import Claim\n\n"
        "def run(quick=False):\n"
        "    print('printed')\n"
        "    os.write(1, b'written\\n')\n"
        "    subprocess.run(['echo', 'from a child'], check=True)\n"
        "    warnings.warn('warned', stacklevel=1)\n"
        "    return [Claim('fast', 1.0, 's', 2.0).as_dict()]\n",
        encoding="utf-8",
    )
    (folder / "lacking.py").write_text(
        "import no_such_package\n\ndef run(quick=False):\n    return []\n", encoding="utf-8"
    )
    done = bench("noisy", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["claims"][0]["met"]) == (0, True)
    for words in ("printed", "written", "from a child", "warned"):
        assert words in done.stderr
    done = bench("lacking", cwd=tmp_path)
    assert done.returncode == 3
    assert "No module named 'no_such_package'" in done.stdout
