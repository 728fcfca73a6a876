"""``brickline plan``: look at a saved plan, run it, and replay what ran."""

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
from brickline.executor.megakernel.queue_replay import QUEUE
from brickline.executor.megakernel.replay import replay as replay_log
from brickline.executor.megakernel.replay_log import ReplayLog
from brickline.executor.megakernel.replay_recording import ReplayRecorder
from brickline.executor.prepared import EXECUTORS, PreparedPlan
from brickline.executor.room import size_text
from brickline.plan import Plan
from brickline.plan_buffers import Storage, largest
from brickline.plan_launches import FloatVariable
from brickline.plan_names import listed, nearest, unknown_buffer
from brickline.plan_words import counted
from brickline.profiler import BrickProfiler
from brickline.whole_files import refuse_taken_file

plan = typer.Typer(help="Explain, run and replay a saved plan.", no_args_is_help=True)
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
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="LOG", help="Log the runs for `brickline plan replay`."),
    ] = None,
    contents: Annotated[
        bool,
        typer.Option("--contents", help="--log: keep what buffers hold, however large."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what is at --save and --log.")
    ] = False,
) -> None:
    """Run a plan and say how long it took.

    Example: brickline plan run decode.plan --random 0 --set position=7 --save cpu.brick
    """
    if checked and save is not None:
        raise UsageError(
            "expected --checked or --save, got both: a checked run is not recorded; run it twice"
        )
    if log is not None:
        _check_logged(log, checked=checked, save=save, force=force)
    elif contents:
        raise UsageError("--contents goes with --log LOG: it says what the log keeps")
    loaded = Plan.load(file)
    numbers = _assigned(values, "--set", lambda name, text: _value(loaded, name, text))
    given = _assigned(bind, "--bind", lambda name, text: _array(loaded, name, text))
    targets = _assigned(out, "--out", lambda name, text: _target(loaded, name, text))
    _check_apart(targets)
    if random is not None:
        given = _noise(loaded, random) | given
    prepared = loaded.prepare(device, executor, bind=given, checked=checked)
    profiler = None
    if save is not None:
        profiler = BrickProfiler(loaded.name, enabled=True, path=save, overwrite=force)
    try:
        prepared.watch(profiler, fingerprints=save is not None)
        if log is None:
            times = _timed(prepared, numbers, repeat)
        else:
            recorder = ReplayRecorder(prepared, contents=contents or None)
            with recorder.recording():
                times = _timed(prepared, numbers, repeat)
            recorder.log().save(log, overwrite=force)
        for name, path in targets.items():
            _write(path, prepared.read(name))
    finally:
        if profiler is not None:
            profiler.close()
    _say(
        f"{loaded.name}: {counted(len(loaded.launches), 'launch')} on {prepared.device}, "
        f"{executor}: "
        f"{statistics.median(times) * 1e6:.1f} µs a run (median of {repeat})"
        + ("" if save is None and log is None else ", recording included")
    )
    if save is not None:
        _say(f"Saved {save}")
    if log is not None:
        _say(f"Logged {log}; compare with: brickline plan replay {log} --executor parallel")


@plan.command()
def replay(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="LOG", help="A log of `brickline plan run --log` or Megakernel(log=)."
        ),
    ],
    device: Annotated[str, typer.Option("--device", help="CPU or CUDA:n.")] = "CPU",
    executor: Annotated[
        str, typer.Option("--executor", help=f"{', '.join((*EXECUTORS, QUEUE))}.")
    ] = "serial",
    every: Annotated[
        bool,
        typer.Option("--every", help="Compare overwritten outputs, too, with those of a CPU."),
    ] = False,
    bind: Annotated[
        list[str] | None,
        typer.Option(
            "--bind",
            metavar="NAME=FILE.npy",
            help="A buffer's contents where the log has none; may be repeated.",
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option("--random", min=0, metavar="SEED", help="Noise as `plan run --random` made."),
    ] = None,
) -> None:
    """Run what a log holds again, elsewhere, and name the first item that differs.

    Exits 0 where all is the same, 1 where something differs, 3 where the log has no digests.

    Example: brickline plan replay decode.replay.json --device CUDA:0 --executor graph
    """
    log = ReplayLog.load(file)
    given = _assigned(bind, "--bind", lambda name, text: _array(log.plan, name, text))
    if random is not None:
        given = _noise(log.plan, random) | given
    found = replay_log(log, device, executor, bind=given, every=every)
    _say(str(found))
    if found.exit_status:
        raise typer.Exit(found.exit_status)


def _check_logged(log: Path, *, checked: bool, save: Path | None, force: bool) -> None:
    if checked or save is not None:
        other = "--checked" if checked else "--save"
        raise UsageError(f"expected --log or {other}, got both; run it twice")
    refuse_taken_file(log, force=force)


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
    texts: dict[str, str] = {}
    for each in given or ():
        name, equals, text = each.partition("=")
        name = name.strip()
        if not equals or not name or not text:
            raise UsageError(f"{option}: expected NAME=…, got {each!r:.80}")
        if name in texts:
            raise UsageError(
                f"{option}: expected {name} once, got {texts[name]!r:.80} and {text!r:.80}"
            )
        texts[name] = text
    return {name: read(name, text) for name, text in texts.items()}


def _value(loaded: Plan, name: str, text: str) -> int | float:
    variable = loaded.variables.get(name)
    if variable is None:
        names = listed(loaded.variables, "variables")
        hint = nearest(name, loaded.variables)
        if any(name == storage.name for storage in loaded.storages):
            hint = f"; that is a buffer: --bind {name}=FILE.npy"
        raise UsageError(
            f"--set: plan {loaded.name} has no variable {name!r}; it has {names}{hint}"
        )
    try:
        return float(text) if isinstance(variable, FloatVariable) else int(text)
    except ValueError:
        what = "a number"
        if not isinstance(variable, FloatVariable):
            what = f"a whole number from {variable.low} to {variable.high}"
        raise UsageError(f"--set {name}: expected {what}, got {text!r:.80}") from None


def _storage(loaded: Plan, option: str, name: str) -> Storage:
    by_name = {storage.name: storage for storage in loaded.storages}
    if name in loaded.variables:
        raise UsageError(
            f"{option}: plan {loaded.name} has no buffer {name!r}; that is a variable: --set "
            f"{name}=VALUE"
        )
    if name not in by_name:
        words = unknown_buffer(loaded.name, name, by_name, tuple(loaded.variables))
        raise UsageError(f"{option}: {words}")
    return by_name[name]


def _array(loaded: Plan, name: str, text: str) -> Any:
    storage = _storage(loaded, "--bind", name)
    try:
        found = np.load(text, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"--bind {name}: cannot read {text}: {error.strerror}") from error
    except (ValueError, EOFError) as error:
        raise UsageError(
            f"--bind {name}: expected a .npy file, got {text}, which is none, is cut off or holds "
            "objects of Python; write one with np.save"
        ) from error
    if not isinstance(found, np.ndarray):
        found.close()
        raise UsageError(
            f"--bind {name}: expected a .npy file of one array, got {text}, an archive of several; "
            "write one with np.save"
        )
    dtype = DTYPES[storage.dtype].numpy
    if found.dtype.kind == "V" and found.dtype.itemsize == dtype.itemsize:
        return found.view(dtype)  # a .npy file names no bf16 and no fp8
    return found


def _target(loaded: Plan, name: str, text: str) -> Path:
    _storage(loaded, "--out", name)
    return Path(text)


def _check_apart(targets: Mapping[str, Path]) -> None:
    seen: dict[Path, str] = {}
    for name, path in targets.items():
        other = seen.setdefault(path.absolute(), name)
        if other != name:
            raise UsageError(
                f"--out: expected a file for each buffer, got {path} for both {other} and {name}"
            )


def _write(path: Path, array: Any) -> None:
    try:
        with open(path, "wb") as file:
            np.save(file, array, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"--out: cannot write {path}: {error.strerror}") from error


def _noise(loaded: Plan, seed: int) -> dict[str, Any]:
    """Return random contents for float buffers, small enough to pass through many launches."""
    rng = np.random.default_rng(seed)
    made = {}
    for storage in loaded.storages:
        shape = tuple(map(largest, storage.shape))
        if DTYPES[storage.dtype].kind != "float" or not shape:
            continue
        try:
            values = rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)
        except MemoryError as error:
            raise UsageError(
                f"--random: no memory for the noise of buffer {storage.name}, which needs "
                f"{size_text(storage.nbytes)}; bind an array to it, or plan with smaller bounds"
            ) from error
        made[storage.name] = values.astype(DTYPES[storage.dtype].numpy)
    return made
