"""``brickline plan run``: what it is told is taken once and as it is meant, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

import brickline as bl
from brickline.commands import app
from brickline.errors import BricklineError
from brickline.kernels.catalog import residual
from brickline.plan import Plan

SIZE = 8


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plans and some arrays in the working directory."""
    monkeypatch.chdir(tmp_path)
    for dtype in ("f32", "bf16"):
        plan = Plan(dtype)
        n = plan.variable("n", 1, SIZE)
        plan.variable("t", dtype="f32")
        a, b, y = (plan.buffer(name, n, dtype) for name in ("a", "b", "y"))
        plan.launch(residual(dtype), a=a, b=b, y=y, n=n)
        plan.save(f"{dtype}.plan")
    np.save("a.npy", np.zeros(SIZE, np.float32))
    np.save("bf16.npy", np.zeros(SIZE, ml_dtypes.bfloat16))
    np.savez("several.npz", a=np.zeros(SIZE))
    Path("text.npy").write_text("no array")


def run(*arguments: str, plan: str = "f32.plan") -> Result:
    return CliRunner().invoke(app, ["plan", "run", plan, "--device", "NULL", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--set n=1 --set n=2", "--set: expected n once, got '1' and '2'"),
        ("--bind a=a.npy --bind a=b.npy", "--bind: expected a once, got 'a.npy' and 'b.npy'"),
        ("--out y=1.npy --out y=2.npy", "--out: expected y once, got '1.npy' and '2.npy'"),
        ("--out y=1.npy --out a=1.npy", "a file for each buffer, got 1.npy for both y and a"),
        ("--set m=3", "has no variable 'm'; it has the variables n, t"),
        ("--set N=3", "did you mean 'n'?"),
        ("--set a=3", "that is a buffer: --bind a=FILE.npy"),
        ("--set n=1.5", "--set n: expected a whole number from 1 to 8, got '1.5'"),
        ("--set t=x", "--set t: expected a number, got 'x'"),
        ("--set n", "--set: expected NAME=…, got 'n'"),
        ("--bind c=none.npy", "--bind: plan f32 has no buffer 'c'; it has a, b, y"),
        ("--bind n=a.npy", "that is a variable: --set n=VALUE"),
        ("--bind a=none.npy", "--bind a: cannot read none.npy: No such file"),
        ("--bind a=text.npy", "expected a .npy file, got text.npy, which is none"),
        ("--bind a=several.npz", "got several.npz, an archive of several"),
        ("--bind a=bf16.npy", "buffer a: expected"),
        ("--out c=1.npy", "--out: plan f32 has no buffer 'c'; it has a, b, y"),
        ("--out n=1.npy", "that is a variable: --set n=VALUE"),
        ("--out y=/none/1.npy", "--out: cannot write /none/1.npy: No such file"),
        ("--checked --save a.brick", "expected --checked or --save, got both"),
    ],
)
def test_what_is_refused(arguments: str, words: str) -> None:
    done = run(*arguments.split())
    assert isinstance(done.exception, BricklineError), done.output
    assert words in str(done.exception)
    assert not list(Path().glob("*.brick"))


def test_a_value_is_set_with_spaces_around_it() -> None:
    assert run("--set", "n = 3").exit_code == 0


def test_what_was_written_is_bound_again_whatever_its_dtype() -> None:
    assert run("--out", "y=y.npy", plan="bf16.plan").exit_code == 0
    assert np.load("y.npy").dtype.kind == "V", "a .npy file names no bf16"
    done = run("--bind", "a=y.npy", plan="bf16.plan")
    assert done.exit_code == 0, done.exception
    assert "bf16: 1 launch on NULL, serial" in done.output


def test_a_run_that_was_refused_leaves_the_one_that_is_there() -> None:
    with bl.BrickProfiler("kept", enabled=True, path="a.brick") as profiler, profiler.brick("Kept"):
        pass
    before = contents("a.brick")
    done = run("--save", "a.brick", "--force", "--executor", "fast")
    assert "expected executor" in str(done.exception)
    assert contents("a.brick") == before


def contents(path: str) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in Path(path).rglob("*") if each.is_file()}


def test_noise_that_no_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def standard_normal(self, *_: Any, **__: Any) -> Any:
            raise MemoryError

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Full())
    done = run("--random", "0")
    assert "no memory for the noise of buffer a, which needs 32 bytes" in str(done.exception)
