"""``brickline kernels``: what is compiled and kept on disk."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from brickline.errors import UsageError
from brickline.kernel_entries import Entry
from brickline.kernel_store import EntryInfo, KernelStore, default_directory
from brickline.private_directory import is_vacant

kernels = typer.Typer(
    help="List, show and clean the compiled kernels on disk.", no_args_is_help=True
)
Directory = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The cache; default the user's, $BRICKLINE_CACHE."),
]


@kernels.command("list")
def list_kernels(directory: Directory = None) -> None:
    """List the compiled kernels, those used last first.

    Example: brickline kernels list
    """
    store = _open(directory)
    table = Table(box=None, pad_edge=False)
    for title in ("key", "kernel", "device", "bytes", "used"):
        justify: Literal["left", "right"] = "right" if title == "bytes" else "left"
        table.add_column(title, justify=justify, no_wrap=title != "kernel", overflow="fold")
    for entry in sorted(store.entries(), key=lambda each: -each.used):
        name, device = (str(entry.facts.get(fact, "?")) for fact in ("name", "device"))
        used = datetime.datetime.fromtimestamp(entry.used).isoformat(" ", "seconds")
        table.add_row(entry.key[:12], escape(name), escape(device), f"{entry.bytes:,}", used)
    console = Console()
    if table.row_count:
        console.print(table, highlight=False)
    facts = store.statistics()
    console.print(
        f"{facts.entries} kernels, {facts.bytes:,} of at most {facts.max_bytes:,} bytes in "
        f"{facts.directory}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@kernels.command()
def show(
    key: Annotated[str, typer.Argument(metavar="KEY|NAME", help="Start of a key, or a name.")],
    assembly: Annotated[
        bool, typer.Option("--assembly", help="Print the machine code instead of the source.")
    ] = False,
    directory: Directory = None,
) -> None:
    """Show one kernel: what it needs, and its source or machine code.

    Example: brickline kernels show rms_norm --assembly
    """
    if _is_unmade(directory):
        raise _unknown(key)
    store = _open(directory)
    info = _find(store, key)
    entry = store.get(info.key)
    if entry is None:
        raise UsageError(f"kernel {info.key[:12]} is damaged or gone; compile it again")
    if assembly:
        typer.echo(_disassemble(entry))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    facts = entry.facts
    for name in ("name", "device", "language", "entry_point"):
        table.add_row(name, escape(str(facts.get(name))))
    table.add_row("key", entry.key)
    # Whoever wrote the entry, its facts are shown as far as they are understood.
    resources, compiler = (
        found if isinstance(found := facts.get(name), dict) else {}
        for name in ("resources", "compiler")
    )
    needs = ", ".join(f"{name} {value}" for name, value in resources.items())
    table.add_row("resources", escape(needs))
    table.add_row("compiler", escape(str(compiler.get("path") or compiler.get("kind") or "none")))
    Console().print(table, highlight=False)
    typer.echo(f"\n{entry.blobs.get('source', b'').decode(errors='replace')}")
    log = entry.blobs.get("log", b"").decode(errors="replace").strip()
    if log:
        typer.echo(f"\nThe compiler said:\n{log}")


@kernels.command()
def gc(
    max_bytes: Annotated[
        int | None, typer.Option(min=0, help="Most bytes to keep; default the cache's bound.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Remove what was unused so long.")
    ] = None,
    directory: Directory = None,
) -> None:
    """Remove the kernels that were used longest ago, and what is damaged.

    Example: brickline kernels gc --older-than 30
    """
    seconds = None if older_than is None else older_than * 86400
    removed = _open(directory).gc(max_bytes, seconds)
    typer.echo(f"removed {removed.entries} kernels, {removed.bytes:,} bytes")


@kernels.command()
def clear(directory: Directory = None) -> None:
    """Remove every compiled kernel. Processes that use one keep it.

    Example: brickline kernels clear
    """
    removed = _open(directory).clear()
    typer.echo(f"removed {removed.entries} kernels, {removed.bytes:,} bytes")


@kernels.command()
def verify(directory: Directory = None) -> None:
    """Check every byte of the cache; exit 1 where an entry is damaged.

    Example: brickline kernels verify
    """
    store = _open(directory)
    problems = store.verify()
    for problem in problems:
        typer.echo(str(problem), err=True)
    typer.echo(f"{store.statistics().entries} kernels, {len(problems)} damaged")
    if problems:
        raise typer.Exit(1)


def _is_unmade(directory: Path | None) -> bool:
    """Whether the user's own cache is meant, and nothing has been compiled yet."""
    return directory is None and is_vacant(default_directory())


def _open(directory: Path | None) -> KernelStore:
    """Return a cache that exists; a verb looks or cleans, so it makes none."""
    if _is_unmade(directory):
        typer.echo(f"no kernels: nothing is in {os.path.abspath(default_directory())} yet")
        raise typer.Exit
    return KernelStore(directory, create=False)


def _find(store: KernelStore, key: str) -> EntryInfo:
    entries = list(store.entries())
    found = [each for each in entries if each.key.startswith(key) or each.facts.get("name") == key]
    if len(found) == 1:
        return found[0]
    if not found:
        raise _unknown(key)
    keys = ", ".join(each.key[:12] for each in found)
    raise UsageError(f"{key!r} means {len(found)} kernels ({keys}); give the start of one key")


def _unknown(key: str) -> UsageError:
    return UsageError(f"no kernel {key!r} in the cache; see `brickline kernels list`")


def _disassemble(entry: Entry) -> str:
    on_cuda = str(entry.facts.get("device", "")).startswith("CUDA")
    tool = "nvdisasm" if on_cuda else "objdump"
    binary, path = entry.blobs.get("binary"), shutil.which(tool)
    if not binary:
        raise UsageError(f"kernel {entry.facts.get('name')} has no machine code")
    if path is None:
        raise UsageError(f"showing machine code needs {tool}, which is not on PATH")
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(binary)
        file.flush()
        options = [] if on_cuda else ["-d", "--no-show-raw-insn", "-C"]
        done = subprocess.run(
            [path, *options, file.name],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode != 0:
        raise UsageError(f"{tool} refuses the code: {done.stderr.strip()}")
    return done.stdout
