"""``brickline export``: a run in the form that another tool reads, as a file, sent or served.

The kept report of a megakernel goes the same ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from brickline.commands.streams import print_document, say
from brickline.errors import ExportError, UsageError
from brickline.export.megakernel_metrics import families_of_megakernel
from brickline.export.megakernel_otlp import requests_of_megakernel
from brickline.export.megakernel_perfetto import write_megakernel_perfetto
from brickline.export.otlp import Requests, refusals, requests_of_run
from brickline.export.otlp_http import Endpoint, Sender
from brickline.export.perfetto import Drawn, write_perfetto
from brickline.export.prometheus import Family, exposition_text, families_of_profile
from brickline.export.serving import PORT, MetricsServer, families_of_path, statistics_of_path
from brickline.graph import ExecutionGraph
from brickline.megakernel_files import is_megakernel_report
from brickline.megakernel_report import MegakernelReport
from brickline.profile import profile_from_run
from brickline.report.as_csv import profile_csv
from brickline.report.as_json import profile_json
from brickline.run.failures import problem_text
from brickline.runs import Run
from brickline.whole_files import refuse_taken_file, whole_file


class Form(StrEnum):
    """What a run can be exported to."""

    PERFETTO = "perfetto"
    OTLP = "otlp"
    PROMETHEUS = "prometheus"
    DOT = "dot"
    CSV = "csv"
    JSON = "json"


@dataclass(frozen=True)
class Options:
    """What was asked for beside the form and the target."""

    force: bool = False
    endpoint: Endpoint | None = None
    spans: int = 10_000


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="The run, or kept report of a megakernel, to export.", metavar="RUN|FILE"
        ),
    ],
    to: Annotated[Form, typer.Option("--to", help="The form to write.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Where to; default: text to the terminal, else a file named after the run.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="otlp: send to a receiver, such as http://127.0.0.1:4318."
        ),
    ] = None,
    spans: Annotated[
        int, typer.Option(min=0, metavar="N", help="otlp: spans at most, the newest.")
    ] = 10_000,
    serve: Annotated[
        bool, typer.Option("--serve", help="prometheus: answer scrapes on 127.0.0.1.")
    ] = False,
    port: Annotated[
        int, typer.Option(metavar="PORT", help="prometheus: where to serve; 0: any free one.")
    ] = PORT,
) -> None:
    """Write a run for Perfetto, OpenTelemetry, Prometheus, Graphviz, spreadsheets or programs.

    Example: brickline export decode.brick --to perfetto
    """
    if endpoint is not None and to is not Form.OTLP:
        raise UsageError(f"--endpoint is for --to otlp, got --to {to.value}")
    if serve and to is not Form.PROMETHEUS:
        raise UsageError(f"--serve is for --to prometheus, got --to {to.value}")
    if serve and out is not None:
        raise UsageError("expected --serve or -o, got both; a served run is written nowhere")
    options = Options(force, Endpoint(endpoint) if endpoint is not None else None, spans)
    if is_megakernel_report(run):
        _export_megakernel(run, to, out, options, port if serve else None)
        return
    if serve:
        _serve(run, port)
        return
    opened = Run.open(run)
    for problem in opened.problems:
        say(problem_text(problem, "left out"))
    if opened.is_live:
        say("the run is still being recorded; this is what it held now")
    TO[to](opened, out, options)


@contextmanager
def _placed(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    try:
        with whole_file(target, force=force) as stream:
            yield stream
    except OSError as error:
        raise ExportError(
            f"cannot write {target}: {error.strerror}; choose another place with -o"
        ) from error


def _perfetto(run: Run, target: Path | None, options: Options) -> None:
    file = target or Path(f"{run.path.stem}.perfetto-trace")
    with _placed(file, force=options.force) as stream:
        drawn = write_perfetto(run, stream)
    say(f"wrote {file}: {_drawn_words(drawn)}")
    _say_summaries(drawn.summaries, "slices")
    if not drawn.slices and not drawn.instants:
        say("nothing in it has a time: record with timeline_steps=N, or trace launches")
    else:
        say("open it at https://ui.perfetto.dev; the file stays on this machine")


def _say_summaries(count: int, what: str) -> None:
    if count:
        say(
            f"{count:,} {what} are bricks from their first entry to their last, because the run"
            " keeps no timeline; record with timeline_steps=N for every entry"
        )


def _drawn_words(drawn: Drawn) -> str:
    words = f"{drawn.slices:,} slices on {drawn.tracks:,} tracks, {drawn.flows:,} flows"
    if drawn.overlapping:
        words += f"; {drawn.overlapping:,} overlap others and have further tracks"
    if drawn.untimed:
        words += f"; {drawn.untimed:,} entries without a time are not in it"
    return words


def _otlp(run: Run, target: Path | None, options: Options) -> None:
    # A name that is taken is said before the work; without a file it is asked for on a failure.
    files = _otlp_files(run.path.stem, target)
    if target is not None or options.endpoint is None:
        for file in files.values():
            refuse_taken_file(file, force=options.force)
    found = requests_of_run(run, profile_from_run(run), limit=options.spans)
    _deliver(found, files, options, kept=target is not None)


def _deliver(found: Requests, files: Mapping[str, Path], options: Options, *, kept: bool) -> None:
    """Write requests, send them, or both, and say what is not among them."""
    if kept or options.endpoint is None:
        _write_requests(found, files, force=options.force)
    if options.endpoint is not None:
        _send(found, options.endpoint, files, kept=kept)
    if found.left_out:
        say(f"{found.left_out:,} older or inner spans are not in it; raise --spans for more")
    _say_summaries(found.summaries, "spans")
    if found.untimed:
        say(f"{found.untimed:,} entries have no start and end, so they are no spans")


def _otlp_files(stem: str, target: Path | None) -> dict[str, Path]:
    file = target or Path(f"{stem}.otlp")
    return {signal: file.with_name(f"{file.name}.{signal}.pb") for signal in ("traces", "metrics")}


def _write_requests(found: Requests, files: Mapping[str, Path], *, force: bool) -> None:
    for signal, file in files.items():
        with _placed(file, force=force) as stream:
            stream.writelines(found.bodies[signal])
    said = " and ".join(str(file) for file in files.values())
    say(f"wrote {said}: {found.spans:,} spans, {_points(found)}")


def _send(found: Requests, endpoint: Endpoint, files: Mapping[str, Path], *, kept: bool) -> None:
    try:
        sent = Sender(endpoint).send(found.bodies)
        refused = refusals(sent.answers)
    except ExportError as error:
        if not kept:
            _write_requests(found, _free(files), force=False)
        raise ExportError(f"{error}; nothing is lost: the files hold all of it") from None
    words = f"sent {found.spans:,} spans and {_points(found)} to {endpoint.url}"
    say(words + (f", {sent.repeats} requests again" if sent.repeats else ""))
    for each in refused:
        say(f"the receiver did not take everything: {each}")
    if refused:
        raise typer.Exit(1)


def _points(found: Requests) -> str:
    return f"{found.histograms:,} {found.points_are}"


def _free(files: Mapping[str, Path]) -> dict[str, Path]:
    """Return names that are not taken, so that what could not be sent replaces nothing."""
    for number in range(1, 1000):
        more = "" if number == 1 else f"-{number}"
        found = {
            signal: file.with_name(file.name.replace(f".{signal}.pb", f"{more}.{signal}.pb"))
            for signal, file in files.items()
        }
        if not any(file.exists() for file in found.values()):
            return found
    return dict(files)


def _prometheus(run: Run, target: Path | None, options: Options) -> None:
    _text(exposition_text(families_of_path(run.path)), target, options)


def _serve(run: Path, port: int) -> None:
    said: set[str] = set()

    def families() -> list[Family]:
        profile = statistics_of_path(run)
        for problem in profile.problems:
            if problem not in said:
                said.add(problem)
                say(problem_text(problem, "left out"))
        return families_of_profile(profile)

    families()  # what is wrong with the run is said before anybody scrapes
    _answer(families, port)


def _answer(families: Callable[[], list[Family]], port: int) -> None:
    with MetricsServer(families, port) as server:
        try:
            say(f"serving {server.url}; leave with Ctrl-C")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")


def _dot(run: Run, target: Path | None, options: Options) -> None:
    drawn = [part.graph for part in run.parts if len(part.graph.nodes)]
    if not drawn:
        raise UsageError(
            f"{run.path} holds no execution graph; record with BrickProfiler(graph=True)"
        )
    graphs = (ExecutionGraph.from_tables(tables, drop_torn_tail=True) for tables in drawn)
    _text("".join(graph.to_dot() for graph in graphs), target, options)


def _csv(run: Run, target: Path | None, options: Options) -> None:
    _text(profile_csv(profile_from_run(run)), target, options)


def _json(run: Run, target: Path | None, options: Options) -> None:
    _text(profile_json(profile_from_run(run)) + "\n", target, options)


def _text(text: str, target: Path | None, options: Options) -> None:
    """Write text to a file, or to the terminal where none was named."""
    if target is None:
        print_document(text)
        return
    with _placed(target, force=options.force) as stream:
        stream.write(text.encode("utf-8", "replace"))
    say(f"wrote {target}")


# Reports of megakernels


def _export_megakernel(
    path: Path, to: Form, target: Path | None, options: Options, port: int | None
) -> None:
    report = MegakernelReport.load(path)
    if port is not None:
        _answer(lambda: families_of_megakernel(MegakernelReport.load(path)), port)
    elif to is Form.PROMETHEUS:
        _text(exposition_text(families_of_megakernel(report)), target, options)
    elif to is Form.JSON:
        _text(report.to_json(), target, options)
    elif to is Form.OTLP:
        files = _otlp_files(_stem(path), target)
        if target is not None or options.endpoint is None:
            for file in files.values():
                refuse_taken_file(file, force=options.force)
        found = requests_of_megakernel(report, limit=options.spans)
        _deliver(found, files, options, kept=target is not None)
    elif to is Form.PERFETTO:
        file = target or Path(f"{_stem(path)}.perfetto-trace")
        with _placed(file, force=options.force) as stream:
            drawn = write_megakernel_perfetto(report, stream)
        say(f"wrote {file}: {_drawn_words(drawn)}")
        say("open it at https://ui.perfetto.dev; the file stays on this machine")
    else:
        raise UsageError(
            f"the report of a megakernel is exported --to perfetto, otlp, prometheus or json, got "
            f"--to {to.value}"
        )


def _stem(path: Path) -> str:
    return path.name.removesuffix(".json").removesuffix(".megakernel")


TO: Mapping[Form, Callable[[Run, Path | None, Options], None]] = {
    Form.PERFETTO: _perfetto,
    Form.OTLP: _otlp,
    Form.PROMETHEUS: _prometheus,
    Form.DOT: _dot,
    Form.CSV: _csv,
    Form.JSON: _json,
}
"""How each form is written."""
