"""``brickline demo``: decode through a small real transformer, profiled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from brickline.commands.demo_model import DemoModel, ModelConfig
from brickline.errors import RunExists
from brickline.peaks import keep_peaks, load_peaks, measure_peaks
from brickline.profile import profile_from_run
from brickline.profiler import BrickProfiler
from brickline.report.text import print_profile
from brickline.runs import Run

PROMPT = (17, 4, 1042, 311, 9, 2048, 77, 5, 630, 12, 8, 1999, 256, 3, 91, 400)


def demo(
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="RUN", help="Where the run goes."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=1500, help="Tokens to decode.")] = 400,
    force: Annotated[bool, typer.Option("--force", help="Replace a run at --out.")] = False,
) -> None:
    """Decode some tokens through a small transformer and show where the time goes.

    Example: brickline demo --tokens 100
    """
    console = Console()
    path = out if out is not None else _free_path()
    if path.exists() and not force:
        raise RunExists(
            f"{path} is there already; choose another --out, or replace it with --force"
        )
    if load_peaks("CPU") is None:
        console.print("Measuring this machine's peaks, once…", style="dim")
        keep_peaks("CPU", measure_peaks("CPU", seconds=1.0))
    with BrickProfiler("demo", enabled=True, path=path, overwrite=force) as profiler:
        model = DemoModel(profiler, ModelConfig())
        console.print(
            f"Decoding {tokens} tokens after a prompt of {len(PROMPT)}: "
            f"{model.config.layers} layers, width {model.config.dim}, float32, NumPy."
        )
        # The last steps are drawn into the graph: one step is enough to see its shape.
        made, seconds = _decode(model, profiler, tokens, console)
        graph = profiler.graph
        tree = graph.to_tree(max_rows=40)
        critical = graph.critical_path_summary(max_rows=8)
    console.print(f"First tokens: {', '.join(map(str, made[:12]))}, …  ({seconds:.1f} s)\n")
    run = Run.open(path)
    run.publish()
    print_profile(profile_from_run(run), console)
    console.print("\nExecution graph of the last step", style="bold")
    console.print(tree, markup=False, highlight=False)
    console.print()
    console.print(critical, markup=False, highlight=False)
    console.print(f"\nThe run is in {path}. Look at it again with: brickline report {path}")


def _decode(
    model: DemoModel, profiler: BrickProfiler, tokens: int, console: Console
) -> tuple[list[int], float]:
    before = time.perf_counter()
    made: list[int] = []
    columns = (
        TextColumn("decoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("decoding", total=tokens)
        for token in model.generate(PROMPT, tokens):
            made.append(token)
            progress.update(task, completed=len(made))
            if len(made) == tokens - 1:
                profiler.enable_graph()
    return made, time.perf_counter() - before


def _free_path() -> Path:
    """Return demo.brick, or the first numbered name that is free."""
    path = Path("demo.brick")
    number = 1
    while path.exists():
        number += 1
        path = Path(f"demo-{number}.brick")
    return path
