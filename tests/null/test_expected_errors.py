"""What is expected is caught by its name; a bug is said, at an exit, by a driver, in a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import brickline
from brickline.circumstances import gather_circumstances
from brickline.device.cuda_context import current_device, is_cuda_error
from brickline.errors import DeviceError
from brickline.runs import Run


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(brickline.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


CLOSING = """
import sys
from brickline import BrickProfiler
from brickline.errors import RunError

class Broken(BrickProfiler):
    def close(self):
        raise eval(sys.argv[2])

kinds = [BrickProfiler, Broken, BrickProfiler]
profilers = [
    kind(f"p{n}", enabled=True, path=f"{sys.argv[1]}/{n}") for n, kind in enumerate(kinds)
]
for profiler in profilers:
    with profiler.brick("work"):
        pass
"""


@pytest.mark.parametrize(
    ("error", "said"), [("RunError('a full disk')", ""), ("KeyError('a bug')", "KeyError: 'a bug'")]
)
def test_at_exit_every_profiler_is_closed_and_a_bug_is_said(
    tmp_path: Path, error: str, said: str
) -> None:
    done = python(CLOSING, tmp_path, error)
    assert done.returncode == 0
    assert said in done.stderr
    assert bool(done.stderr) is bool(said)
    ended = [Run.open(tmp_path / str(number)).manifest["ended"] for number in range(3)]
    assert [each is not None for each in ended] == [True, False, True]


FORKING = """
import os, sys
from brickline import BrickProfiler, profiler as module
from brickline.errors import RunError

profiler = BrickProfiler("p", enabled=True, path=sys.argv[1])

def broken(path):
    raise eval(sys.argv[2])

module.RunWriter.join = broken
child = os.fork()
if not child:
    with profiler.brick("work"):  # goes on without
        pass
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    ("error", "said"), [("RunError('gone')", ""), ("KeyError('a bug')", "KeyError: 'a bug'")]
)
def test_a_child_goes_on_where_it_cannot_record(tmp_path: Path, error: str, said: str) -> None:
    done = python(FORKING, tmp_path / "r", error)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert said in done.stderr
    assert bool(done.stderr) is bool(said)


def test_a_bug_in_a_command_is_said_with_its_place() -> None:
    done = python(
        "import brickline.commands as c\n"
        "def app(): raise KeyError('a bug')\n"
        "c.app = app\n"
        "c.main()\n"
    )
    assert done.returncode == 2
    assert "KeyError: 'a bug'" in done.stderr
    assert "this is a bug in brickline; please report it" in done.stderr


class HalfImported(ModuleType):
    """A torch of which no more than its name is there, or which has no GPU."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")


def test_a_half_imported_torch_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = gather_circumstances()
    assert found["torch"] is None
    assert found["seeds"]["torch"] is None
    assert set(found["numerics"].values()) == {None}
    torch.version = torch.cuda = HalfImported("torch.cuda")
    assert gather_circumstances()["cuda"] is None


class CUDAError(Exception):
    """As cuda-core's, which is told by its name."""


class NVRTCError(CUDAError):
    pass


def test_errors_of_cuda_are_told_from_bugs() -> None:
    for error in (CUDAError(), NVRTCError(), ValueError(), RuntimeError(), OSError()):
        assert is_cuda_error(error)
    for error in (KeyError(), TypeError(), AttributeError(), AssertionError()):
        assert not is_cuda_error(error)


@pytest.mark.parametrize(
    ("error", "caught"), [(CUDAError("no device"), DeviceError), (TypeError("a bug"), TypeError)]
)
def test_a_device_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, error: Exception, caught: type[Exception]
) -> None:
    def device(number: int) -> Any:
        raise error

    core = ModuleType("cuda.core")
    core.Device = device  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(caught, match=str(error)), current_device(0):
        pass
