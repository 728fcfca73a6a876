"""``brickline run``: a program of yours, with every profiler in it enabled, into one run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from brickline.errors import RunError, UsageError
from brickline.profiler import RUN_VARIABLE
from brickline.run_directory import PROCESSES
from brickline.runs import Run, RunWriter


def run(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="OUT", help="Where the run goes; default NAME.brick."),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="The program is a module rather than a script.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run at OUT.")] = False,
    torch: Annotated[
        bool, typer.Option("--torch", help="Record every PyTorch model as well, with fingerprints.")
    ] = False,
    level: Annotated[
        str,
        typer.Option(metavar="module|op", help="With --torch: record module calls, or ops too."),
    ] = "module",
    tensors: Annotated[
        str, typer.Option(metavar="none|suspects|all", help="With --torch: contents to save.")
    ] = "none",
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="With --torch: module paths to record.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="With --torch: paths to leave out.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="With --torch: record N calls of each model.")
    ] = None,
    fingerprints: Annotated[
        bool, typer.Option(help="With --torch: --no-fingerprints records time alone.")
    ] = True,
    twin: Annotated[
        bool,
        typer.Option("--twin", help="With --torch: record every call in float64 as well."),
    ] = False,
) -> None:
    """Run SCRIPT or -m MODULE with its ARGS; every profiler in it records into OUT.

    Children that are forked or spawned record into the same run. With --torch, every PyTorch model
    is recorded too, from its first call on.

    Example: brickline run -o decode.brick generate.py --tokens 64
    """
    if not context.args:
        raise UsageError(
            "expected a script, or -m and a module; for example: "
            "brickline run -o decode.brick generate.py"
        )
    program, *arguments = context.args
    if not module and not Path(program).is_file():
        raise UsageError(f"there is no script {program}; to run an installed module, use -m")
    path = out if out is not None else Path(f"{Path(program).stem}.brick")
    finder = None
    if torch:
        finder = _model_finder(
            level=level,
            tensors=tensors,
            include=include,
            exclude=exclude,
            steps=steps,
            fingerprints=fingerprints,
            twin=twin,
        )
    writer = RunWriter.create(path, name=Path(program).name, overwrite=force)
    os.environ[RUN_VARIABLE] = str(writer.path)
    ProcessLog(writer.path).install()
    facts = None
    try:
        if finder is not None:
            finder.install()
        try:
            status = _execute(program, arguments, module)
        finally:
            if finder is not None:
                facts = finder.close()
    finally:
        del os.environ[RUN_VARIABLE]
    _finish(writer, status)
    if finder is not None:
        _print_models(facts, writer.path)
    raise typer.Exit(status)


def _model_finder(**options: Any) -> Any:
    """Return what records the models of this process; it loads torch."""
    from brickline.adapters.recording import options_from

    checked = options_from(**options)
    try:
        from brickline.adapters.torch_roots import RootFinder
    except ImportError as error:
        raise UsageError(
            f"--torch needs PyTorch, which cannot be imported here ({error}); "
            "install it: pip install torch"
        ) from None
    return RootFinder(checked)


def _print_models(facts: dict[str, Any] | None, path: Path) -> None:
    from brickline.adapters.torch_summary import summary_text

    if facts is None:
        print("brickline: no PyTorch module was called", file=sys.stderr)
        return
    print(summary_text(facts, path), file=sys.stderr)


def _execute(program: str, arguments: Sequence[str], module: bool) -> int:
    """Run the program as `__main__` in this process and return its exit status."""
    try:
        _run_as_main(program, arguments, module)
    except SystemExit as leave:
        if leave.code is None or isinstance(leave.code, int):
            return leave.code or 0
        print(leave.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run_as_main(program: str, arguments: Sequence[str], module: bool) -> None:
    """Run the program; what it raises ends it with a traceback and status 1, as without us."""
    sys.argv = [program, *arguments]
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _print_without_our_frames(error)
        raise SystemExit(1) from error


def _print_without_our_frames(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__
        or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _finish(writer: RunWriter, status: int) -> None:
    from brickline.profiler import close_all

    try:
        try:
            close_all()
        finally:
            writer.close(exit_status=status)
    except RunError as error:  # a full disk: the program's own status is what counts
        print(f"brickline: {error}", file=sys.stderr)
    recorded = Run.open(writer.path)
    if recorded.parts:
        count = len(recorded.parts)
        parts = "one part" if count == 1 else f"{count} parts"
        print(
            f"brickline: wrote {writer.path} ({parts}); look at it with: "
            f"brickline report {writer.path}",
            file=sys.stderr,
        )
        return
    print(f"brickline: {writer.path} is empty: no BrickProfiler recorded anything", file=sys.stderr)
    for process in recorded.unfollowed:
        if process.get("pid") == os.getpid():
            continue
        command = " ".join(process.get("argv") or ["?"])
        print(
            f"brickline: process {process.get('pid')} was not followed: {command}", file=sys.stderr
        )


class ProcessLog:
    """Notes the processes that a program starts, so that an empty run can say what it missed."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / PROCESSES

    def install(self) -> None:
        """Note this process, and from now on every child that Python starts."""
        self._note(os.getpid(), sys.argv)
        self._wrap_popen()
        self._wrap(os, "fork", lambda pid, args: [*sys.argv, "(forked)"])
        for name in ("posix_spawn", "posix_spawnp"):
            self._wrap(os, name, lambda pid, args: [os.fsdecode(each) for each in args[1]])
        import multiprocessing.util

        self._wrap(
            multiprocessing.util,
            "spawnv_passfds",
            lambda pid, args: [os.fsdecode(each) for each in args[1]],
        )

    def _note(self, pid: int, argv: Sequence[str]) -> None:
        line = json.dumps({"pid": pid, "argv": list(argv), "parent": os.getpid()}) + "\n"
        # One write to a file opened for appending: lines of several processes do not mix.
        descriptor = os.open(
            self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def _wrap(self, owner: Any, name: str, describe: Callable[[int, Any], list[str]]) -> None:
        original = getattr(owner, name)

        def started(*args: Any, **kwargs: Any) -> Any:
            pid = original(*args, **kwargs)
            if pid:  # 0 in a forked child
                self._note(pid, describe(pid, args))
            return pid

        setattr(owner, name, started)

    def _wrap_popen(self) -> None:
        original = subprocess.Popen.__init__

        def started(popen: Any, *args: Any, **kwargs: Any) -> None:
            original(popen, *args, **kwargs)
            given = popen.args
            words = [given] if isinstance(given, str | bytes | os.PathLike) else list(given)
            self._note(popen.pid, [os.fsdecode(word) for word in words])

        subprocess.Popen.__init__ = started  # type: ignore[assignment, method-assign]
