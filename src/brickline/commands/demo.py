"""``brickline demo``: a port that goes wrong, the same model profiled, and a decoder of kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from brickline.commands.demo_decoder import CONFIG, Decoded, DemoDecoder, cuda_device
from brickline.commands.demo_divergence import (
    Decode,
    Port,
    RepairedPort,
    check_decode,
    first_not_close,
    record_decode,
)
from brickline.commands.demo_model import DemoModel
from brickline.commands.demo_weights import ModelConfig
from brickline.comparison.comparing import compare
from brickline.errors import RunExists
from brickline.peaks import keep_peaks, load_peaks, measure_peaks
from brickline.profile import profile_from_run
from brickline.profiler import BrickProfiler
from brickline.report.divergence import print_divergence
from brickline.report.figures import Look
from brickline.report.html.page import write_page
from brickline.report.html.profile_page import profile_page
from brickline.report.megakernel import headline
from brickline.report.text import print_profile
from brickline.runs import Run
from brickline.verdict import DivergenceReport

PROMPT = (17, 4, 1042, 311, 9, 2048, 77, 5, 630, 12, 8, 1999, 256, 3, 91, 400)
TIMELINE_STEPS = 8
"""Steps that the page draws entry by entry."""

TOLERANCES = {
    "numpy.allclose, defaults": (1e-5, 1e-8),
    "numpy.allclose, 1e-3": (1e-3, 1e-3),
}
"""Relative and absolute: too strict for another order of summation, and what people use then."""


def demo(
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="RUN", help="Where the run goes."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=1500, help="Tokens to decode.")] = 400,
    force: Annotated[bool, typer.Option("--force", help="Replace a run at --out.")] = False,
) -> None:
    """Find the wrong brick in a port, show where the time goes, and decode on every device.

    Example: brickline demo --tokens 100
    """
    console = Console()
    path = out if out is not None else _free_path()
    page = path.with_suffix(".html")
    for taken in _written(path):
        if taken.exists() and not force:
            raise RunExists(
                f"{taken} is there already; choose another --out, or replace it with --force"
            )
    console.print("1. Which brick went wrong?", style="bold underline")
    _diverge(path, console, force=force)
    console.print("\n2. Where does the time go?", style="bold underline")
    if load_peaks("CPU") is None:
        console.print("Measuring this machine's peaks, once…", style="dim")
        keep_peaks("CPU", measure_peaks("CPU", seconds=1.0))
    with BrickProfiler(
        "demo", enabled=True, path=path, overwrite=force, timeline_steps=TIMELINE_STEPS
    ) as profiler:
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
    profile = profile_from_run(run)
    print_profile(profile, console)
    console.print("\nExecution graph of the last step", style="bold")
    console.print(tree, markup=False, highlight=False)
    console.print()
    console.print(critical, markup=False, highlight=False)
    write_page(profile_page(profile, run=run), page, force=force)
    console.print("\n3. Is it the same everywhere?", style="bold underline")
    _everywhere(path, console, force=force)
    console.print(f"\nThe run is in {path}. Look at it again with: brickline report {path}")
    console.print(f"The same as a page to open in a browser: {page}", markup=False)


def _everywhere(path: Path, console: Console, *, force: bool) -> None:
    """Decode with every executor, and compare the CPU with a GPU where there is one."""
    demo, device = DemoDecoder.make(), cuda_device()
    console.print(
        f"A Llama-style decoder made of kernels: {CONFIG.layers} layers, width {CONFIG.dim}, "
        f"float32, {len(demo.decoder.plan.launches)} launches a token, planned once. They run one "
        "after the other, in parallel, and all of a step as one megakernel; each way is profiled."
    )
    ways = [("CPU", "serial"), ("CPU", "parallel"), ("CPU", "megakernel")]
    if device is not None:
        ways += [(device, "serial"), (device, "graph"), (device, "megakernel")]
    _show_ways([demo.decode(*way, PROMPT) for way in ways], path, console, force=force)
    if device is None:
        console.print(
            "There is no CUDA device here. With one, the same plan decodes there too, and both "
            "runs are compared launch by launch."
        )
        return
    ours, theirs = _devices(path)
    demo.record(device, ours, PROMPT, overwrite=force)
    demo.record("CPU", theirs, PROMPT, overwrite=force)
    console.print(f"The same plan on {device} and on CPU, launch by launch:\n", markup=False)
    print_divergence(compare(ours, theirs), console)


def _show_ways(ways: Sequence[Decoded], path: Path, console: Console, *, force: bool) -> None:
    """Show times and sameness of all ways, what a megakernel did, and keep its report."""
    look, reference = Look.of(console), ways[0]
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column()
    for _ in range(2):
        table.add_column(justify="right")
    same = f"as {reference.device} {reference.executor}?"
    words = ("", "", "tokens/s", "profiled step", "most of it in", same)
    table.add_row(*words, style="dim")
    for way in ways:
        brick, share = way.busiest
        table.add_row(
            way.device,
            way.executor,
            f"{way.tokens_per_second:.0f}",
            look.time(way.step_ns),
            f"{brick} {share:.0%}",
            "" if way is reference else way.against(reference),
        )
    console.print(table)
    console.print(
        f"Compared were {len(reference.tokens)} tokens, and {reference.logits.size} logits of "
        f"{len(reference.logits)} steps.\n"
    )
    reports = [way.report for way in ways if way.report is not None]
    for report in reports:
        for line in headline(report, look):
            console.print(look.text(line))
    kept = reports[-1].save(_report(path), overwrite=force)
    console.print(f"Worker by worker: brickline report {kept}\n", markup=False)


def _diverge(path: Path, console: Console, *, force: bool) -> None:
    """Record a port and its model, and say which brick of the port is wrong."""
    ours, theirs = _compared(path)
    candidate = record_decode(Port, PROMPT, ours, overwrite=force)
    reference = record_decode(DemoModel, PROMPT, theirs, overwrite=force)
    checked = check_decode(candidate, reference, record_decode(RepairedPort, PROMPT, None))
    console.print(
        "A model and a port of it decode the same tokens. The port adds up its products in another"
        " order, which is harmless, and has one fault planted.\n"
    )
    answers = Table.grid(padding=(0, 2))
    for name, (rtol, atol) in TOLERANCES.items():
        answers.add_row(name, _allclose_answer(candidate, reference, checked, rtol, atol))
    answers.add_row("brickline compare", _compare_answer(ours, theirs))
    answers.add_row("brickline check", "each brick again in float64, on the inputs that it had:")
    console.print(answers)
    console.print()
    print_divergence(checked, console)
    console.print(
        f"\nBoth runs stay; compare them again with: brickline compare {ours} {theirs}",
        markup=False,
    )


def _allclose_answer(
    candidate: Decode, reference: Decode, checked: DivergenceReport, rtol: float, atol: float
) -> str:
    count, first = first_not_close(candidate, reference, rtol, atol)
    if first is None:
        return f"none of {len(candidate.launches)} launches differ: the port would pass"
    wrong = any(first.name == each.name for each in checked.culprits)
    return (
        f"{count} of {len(candidate.launches)} launches differ; the first is {first.name},"
        f" which is {'wrong' if wrong else 'right'}"
    )


def _compare_answer(candidate: Path, reference: Path) -> str:
    suspects = compare(candidate, reference).suspects
    named = suspects[0].name if suspects else "none"
    return f"the first suspect is {named}, from the fingerprints in two runs"


def _compared(path: Path) -> tuple[Path, Path]:
    """Return where the port's run goes, and the model's."""
    return (
        path.with_name(f"{path.stem}-candidate{path.suffix}"),
        path.with_name(f"{path.stem}-reference{path.suffix}"),
    )


def _devices(path: Path) -> tuple[Path, Path]:
    """Return where the GPU's run goes, and the CPU's."""
    return (
        path.with_name(f"{path.stem}-cuda{path.suffix}"),
        path.with_name(f"{path.stem}-cpu{path.suffix}"),
    )


def _report(path: Path) -> Path:
    """Return where the report of the megakernel goes."""
    return path.with_name(f"{path.stem}.megakernel.json")


def _written(path: Path) -> tuple[Path, ...]:
    """Return all that a demo may leave behind."""
    page = path.with_suffix(".html")
    return (path, *_compared(path), *_devices(path), _report(path), page)


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
    while any(each.exists() for each in _written(path)):
        number += 1
        path = Path(f"demo-{number}.brick")
    return path
