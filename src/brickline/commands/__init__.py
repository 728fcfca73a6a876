"""The command line: one file per verb. It sees everything, and nothing sees it.

A verb is loaded when it is called, because most of them load more than the shortest takes to
answer; only the list of all verbs loads them all.

Every error is caught once, here: a `BricklineError` is printed without a traceback, and every
exception ends with status 2. Status 1 is for results: a divergence, an exceeded budget, a missed
target; status 3 for a comparison that shows nothing either way.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_group

from brickline.commands.streams import say
from brickline.errors import BricklineError
from brickline.interrupts import silent_interrupts

VERBS = (
    *("demo", "check", "compare", "run", "report", "query", "top", "export", "doctor", "bench"),
    "kernels",
    "plan",
)
"""In the order of the help. Each is the function, or the app of its own, that its file is for."""

_SETTINGS: dict[str, dict[str, Any]] = {
    "run": {
        "options_metavar": "[OPTIONS] SCRIPT|-m MODULE [ARGS]...",
        "context_settings": {
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "allow_interspersed_args": False,
        },
    }
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Verbs(TyperGroup):
    """All verbs by name, and each loaded when it is first asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = dict.fromkeys(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb, or None where there is none of this name."""
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            with silent_interrupts():
                self.commands[cmd_name] = _load(cmd_name)
        return self.commands.get(cmd_name)


def _load(name: str) -> Any:
    found = getattr(import_module(f"brickline.commands.{name}"), name)
    alone = typer.Typer(rich_markup_mode=None)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name, **_SETTINGS.get(name, {}))(found)
    return get_group(alone).commands[name]


app = typer.Typer(
    name="brickline",
    cls=_Verbs,
    help="Find the kernel that went wrong and the brick that is slow.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        from brickline.circumstances import brickline_version

        typer.echo(f"brickline {brickline_version() or 'from a source tree'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Find the kernel that went wrong and the brick that is slow."""


def main() -> None:
    """Run the command line and leave with its status."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what cannot be written any more is said below
    except BricklineError as error:
        say(str(error))
        sys.exit(2)
    except BrokenPipeError:
        _leave_reader()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            _say_bug()
            sys.exit(2)
        _drop_output()
        say(f"cannot write the output: {error.strerror}; free some space, or write elsewhere")
        sys.exit(2)
    except SystemExit as leave:
        # The command line's own library ends with 1 where a reader has gone.
        if isinstance(leave.__context__, BrokenPipeError):
            _leave_reader()
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _say_bug()
        raise SystemExit(2) from error


def _leave_reader() -> NoReturn:
    """The reader has gone, as in `brickline report RUN | head`; that is no failure of ours."""
    _drop_output()
    sys.exit(0)


def _drop_output() -> None:
    """Give what is still held back a place to go, so that leaving says nothing more of it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]


def _say_bug() -> None:
    import traceback

    traceback.print_exc()
    say("this is a bug in brickline; please report it")
