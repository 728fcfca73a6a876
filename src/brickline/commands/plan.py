"""``brickline plan``: look at a saved plan, and run it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from rich.console import Console

from brickline.dtypes import DTYPES
from brickline.errors import UsageError
from brickline.executor.prepared import PreparedPlan
from brickline.plan import Plan
from brickline.plan_buffers import largest
from brickline.plan_launches import FloatVariable
from brickline.profiler import BrickProfiler

plan = typer.Typer(help="Explain and run a saved plan.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(metavar="FILE", help="A plan that Plan.save wrote.")]
T = TypeVar("T")


@plan.command()
def explain(
    file: File,
    first: Annotated[
        int | None, typer.Argument(metavar="FIRST", help="The number of a launch.")
    ] = None,
    second: Annotated[
        int | None, typer.Argument(metavar="SECOND", help="The number of another.")
    ] = None,
) -> None:
    """Say why each launch waits, or why two launches may or may not overlap.

    Example: brickline plan explain decode.plan 3 7
    """
    _say(Plan.load(file).explain(first, second))


@plan.command()
def run(
    file: File,
    device: Annotated[str, typer.Option("--device", help="CPU, CUDA:n or NULL.")] = "CPU",
    executor: Annotated[
        str, typer.Option("--executor", help="serial, parallel or graph.")
    ] = "serial",
    values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A variable; may be repeated."),
    ] = None,
    bind: Annotated[
        list[str] | None,
        typer.Option(
            "--bind", metavar="NAME=FILE.npy", help="A buffer's contents; may be repeated."
        ),
    ] = None,
    out: Annotated[
        list[str] | None,
        typer.Option(
            "--out", metavar="NAME=FILE.npy", help="Write a buffer afterwards; may be repeated."
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(
            "--random", min=0, metavar="SEED", help="Fill other float buffers with noise."
        ),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="How often to run.")] = 1,
    checked: Annotated[
        bool, typer.Option("--checked", help="Look for writes out of bounds; slow.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="RUN", help="Record bricks and fingerprints as a run."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run at --save.")] = False,
) -> None:
    """Run a plan and say how long it took.

    Example: brickline plan run decode.plan --random 0 --set position=7 --save cpu.brick
    """
    loaded = Plan.load(file)
    numbers = _assigned(values, "--set", lambda name, text: _value(loaded, name, text))
    given = _assigned(bind, "--bind", lambda name, text: _array(name, text))
    targets = _assigned(out, "--out", lambda name, text: Path(text))
    for name in targets:
        if name not in {storage.name for storage in loaded.storages}:
            raise UsageError(f"--out: plan {loaded.name} has no buffer {name!r}")
    if random is not None:
        given = _noise(loaded, random) | given
    profiler = None
    if save is not None:
        profiler = BrickProfiler(loaded.name, enabled=True, path=save, overwrite=force)
    try:
        prepared = loaded.prepare(
            device,
            executor,
            bind=given,
            checked=checked,
            profiler=profiler,
            fingerprints=save is not None,
        )
        times = _timed(prepared, numbers, repeat)
        for name, path in targets.items():
            _write(path, prepared.read(name))
    finally:
        if profiler is not None:
            profiler.close()
    _say(
        f"{loaded.name}: {len(loaded.launches)} launches on {prepared.device}, {executor}: "
        f"{statistics.median(times) * 1e6:.1f} µs a run (median of {repeat})"
        + ("" if save is None else ", recording included")
    )
    if save is not None:
        _say(f"Saved {save}")


def _say(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def _timed(prepared: PreparedPlan, values: Mapping[str, Any], repeat: int) -> list[float]:
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        prepared(**values).synchronize()
        times.append(time.perf_counter() - began)
    return times


def _assigned(given: list[str] | None, option: str, read: Callable[[str, str], T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for each in given or ():
        name, equals, text = each.partition("=")
        if not equals or not name or not text:
            raise UsageError(f"{option}: expected NAME=…, got {each!r:.80}")
        found[name] = read(name, text)
    return found


def _value(loaded: Plan, name: str, text: str) -> int | float:
    variable = loaded.variables.get(name)
    if variable is None:
        names = ", ".join(loaded.variables) or "no variables"
        raise UsageError(f"--set: plan {loaded.name} has no variable {name!r}; it has {names}")
    try:
        return float(text) if isinstance(variable, FloatVariable) else int(text)
    except ValueError:
        raise UsageError(f"--set {name}: expected a number, got {text!r:.80}") from None


def _array(name: str, text: str) -> Any:
    try:
        return np.load(text, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--bind {name}: cannot read {text}: {error}") from error


def _write(path: Path, array: Any) -> None:
    try:
        with open(path, "wb") as file:
            np.save(file, array, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"--out: cannot write {path}: {error}") from error


def _noise(loaded: Plan, seed: int) -> dict[str, Any]:
    """Return random contents for float buffers, small enough to pass through many launches."""
    rng = np.random.default_rng(seed)
    made = {}
    for storage in loaded.storages:
        shape = tuple(map(largest, storage.shape))
        if DTYPES[storage.dtype].kind == "float" and shape:
            values = rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)
            made[storage.name] = values.astype(DTYPES[storage.dtype].numpy)
    return made
