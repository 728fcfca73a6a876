"""``brickline bench``: every claim of speed, measured here beside its peers."""

from __future__ import annotations

import importlib
import importlib.util
import json as json_module
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from brickline.commands.streams import print_document, say
from brickline.errors import UsageError

GROUPS = {
    "profiler": (
        "profiler_insitu",
        "profiler_hot",
        "profiler_scale",
        "own_cost",
        "graph",
        "look_top",
    ),
    "kernels": ("kernels_cache", "kernels_cpu", "kernels_cuda"),
    "plans": ("plans_cpu", "plans_cuda", "plans_decode"),
    "megakernel": ("megakernel_planning", "megakernel_queue", "megakernel_cuda"),
    "cuda": ("profiler_cuda", "kernels_cuda", "plans_cuda", "plans_decode", "megakernel_cuda"),
    "look": ("look",),
    "divergence": (
        "fingerprint",
        "recording",
        "compare",
        "directions",
        "random_edits",
        "checking",
        "clean_checks",
        "localisation",
    ),
}


def bench(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A group (profiler, kernels, plans, megakernel, cuda, divergence, look) or a "
            "file's name.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats; noisier.")] = False,
) -> None:
    """Measure the claims of benchmarks/, from a checkout; exit 1 where one is not met.

    Exit 3 where nothing could be measured here, because a GPU or a package is missing.

    Example: brickline bench profiler
    """
    directory = _benchmarks()
    chosen = _chosen(directory, name)
    console = Console(stderr=json)
    claims: list[dict[str, Any]] = []
    with _output_to_stderr() if json else nullcontext():
        for module in chosen:
            with console.status(f"Measuring {module}…"):
                claims += _measured(directory, module, quick=quick)
    if json:
        document = {"schema": "brickline-bench", "version": 1, "claims": claims}
        print_document(f"{json_module.dumps(document, indent=1)}\n")
    else:
        console.print(_table(claims))
        for words in _notes(claims):
            console.print(words, markup=False, highlight=False)
    if any(claim["met"] is False for claim in claims):
        raise typer.Exit(1)
    if all(claim["figure"] is None for claim in claims):
        say("nothing could be measured here; the notes of the claims say what is missing")
        raise typer.Exit(3)


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send what benchmarks and their children print to standard error: JSON goes out alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _measured(directory: Path, name: str, *, quick: bool) -> list[dict[str, Any]]:
    """Return a benchmark's claims; one that is not judged where a package is missing."""
    try:
        claims: list[dict[str, Any]] = _load(directory, name).run(quick=quick)
    except ImportError as error:
        return list(_harness(directory).not_measured(name, str(error)))
    return claims


def _benchmarks() -> Path:
    """Return the checkout's benchmarks: below here, or beside the package's sources."""
    for base in (Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[3]):
        if (base / "benchmarks" / "harness.py").is_file():
            return base / "benchmarks"
    raise UsageError("the benchmarks are not part of the package; run this inside a checkout")


def _chosen(directory: Path, name: str | None) -> list[str]:
    known = {
        path.parent.name if path.stem == "__init__" else path.stem
        for path in (*directory.glob("*.py"), *directory.glob("*/__init__.py"))
        if re.search(r"^def run\(quick", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    if name is None:
        return [each for each in GROUPS["profiler"] if each in known]
    if name in GROUPS:
        return [each for each in GROUPS[name] if each in known]
    if name in known:
        return [name]
    raise UsageError(
        f"there is no benchmark {name!r}; expected one of {', '.join(sorted(known | set(GROUPS)))}"
    )


def _load(directory: Path, name: str) -> Any:
    """Return a benchmark: a file, or a folder that is a package."""
    sys.path.insert(0, str(directory))
    if (directory / name).is_dir():
        return importlib.import_module(name)  # it imports its own modules when it runs
    try:
        return _from_file(directory / f"{name}.py", f"brickline_bench_{name}")
    finally:
        sys.path.remove(str(directory))


def _harness(directory: Path) -> Any:
    return _from_file(directory / "harness.py", "brickline_bench_harness")


def _from_file(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _figure(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "–" if value is None else str(value)
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _notes(claims: list[dict[str, Any]]) -> Iterator[str]:
    """Give what belongs to a figure and fits into no table, as why there is none."""
    yield ""
    for claim in claims:
        if claim["note"]:
            yield f"· {claim['name']}: {claim['note']}"


def _table(claims: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("Claim", "Figure", "Unit", "Target", "Met", "Peers in the same run"):
        table.add_column(
            column, justify="right" if column in ("Figure", "Target") else "left", overflow="fold"
        )
    for claim in claims:
        met = {True: "yes", False: "NO", None: "–"}[claim["met"]]
        peers = ", ".join(f"{peer} {_figure(value)}" for peer, value in claim["peers"].items())
        table.add_row(
            claim["name"],
            _figure(claim["figure"]),
            claim["unit"],
            _figure(claim["target"]),
            met,
            peers,
        )
    return table
