"""What a comparison says: `Verdict`, `Finding` and `DivergenceReport`.

Values only: how they were found is the matter of `comparison` and `checker`, how they look that
of `report`. A report is saved as one JSON document::

    {"format": "brickline-divergence", "version": 1, "status": "diverged", "findings": [...],
     "verdicts": {"name": [...], "verdict": [...], ...}, ...}
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from brickline.documents import parsed_json
from brickline.errors import RunDamaged, RunError, RunVersion
from brickline.files.paths import given_path
from brickline.traces import KernelTrace
from brickline.whole_files import OVERWRITE, whole_file

FORMAT = "brickline-divergence"
VERSION = 1


class Verdict(StrEnum):
    """What is said of one op."""

    IDENTICAL = "identical"
    """The same bits."""
    ROUNDING = "rounding"
    """Different, and no more than rounding explains."""
    WATCH = "watch"
    """More than the clean limit and less than twice it: listed, never the headline."""
    PROPAGATED = "propagated"
    """The error came with the inputs."""
    AMPLIFIED = "amplified"
    """The error came with the inputs and the op made it much larger."""
    SUSPECT = "suspect"
    """Fingerprints alone point here; a re-execution would prove it."""
    CULPRIT = "culprit"
    """Re-executed on its own inputs, it is wrong, again and again."""
    NONDETERMINISTIC = "nondeterministic"
    """Two executions of the same side differ by as much."""
    STRUCTURAL = "structural"
    """Another op, shape or dtype than on the other side."""
    TIE = "tie"
    """A choice between values that rounding cannot tell apart."""
    NONFINITE_ORIGIN = "non-finite origin"
    """Finite inputs, and an output that is not."""
    UNOBSERVABLE = "unobservable"
    """A difference of this size cannot be seen here."""
    UNKNOWN = "unknown"
    """Not shown either way; the reason is given."""
    ACCEPTED = "accepted"
    """Known and intended, within the accepted size."""


GUILTY = frozenset({Verdict.CULPRIT, Verdict.SUSPECT, Verdict.NONFINITE_ORIGIN})
"""Verdicts that make a report diverged."""
CLEAN = frozenset(
    {Verdict.IDENTICAL, Verdict.ROUNDING, Verdict.WATCH, Verdict.PROPAGATED, Verdict.AMPLIFIED}
    | {Verdict.TIE, Verdict.ACCEPTED}
)
"""Verdicts that leave a report matched."""


class Status(StrEnum):
    """What is said of the whole."""

    MATCHED = "matched"
    DIVERGED = "diverged"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Finding:
    """One thing worth a person's attention, with all that is known about it."""

    name: str
    """Dotted module path, or the name of the kernel or function, on the candidate's side."""
    verdict: Verdict
    layer_idx: int | None = None
    position: int | None = None
    """Number of the root's call, from 0, in which it first acts."""
    ordinal: int = 0
    """Repetition within that call."""
    brick: str | None = None
    """Name of the `BrickId`, or of the dynamic brick."""
    op: str | None = None
    """The operation inside, such as ``aten.mm``, where one was singled out."""
    direction: str = "forward"
    """``forward`` or ``backward``."""
    z: float | None = None
    """Largest of the three ratios; 1 is the clean limit. None from fingerprints alone."""
    local_error: float | None = None
    """Relative L2 of what it adds to its own inputs' error."""
    propagated_error: float | None = None
    """Relative L2 of its output to that of the other side."""
    share: float | None = None
    """Part of the final difference that goes away when it is repaired, from 0 to 1."""
    where: str | None = None
    """Which rows, columns or elements."""
    cause: str | None = None
    """Likely cause, in words."""
    repro: str | None = None
    """Path of a script that shows it alone."""
    reference_name: str | None = None
    """What it was held against."""
    reason: str | None = None
    """Why it is accepted, or why a field above is None."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Measured facts behind the verdict, by name."""

    def _repr_html_(self) -> str:
        from brickline.report.notebook import finding_html

        return finding_html(self)


class VerdictRow(NamedTuple):
    """One row of the table of verdicts."""

    name: str
    reference_name: str | None
    layer_idx: int | None
    position: int | None
    ordinal: int
    direction: str
    brick: str | None
    op: str | None
    verdict: Verdict
    z: float | None
    local_error: float | None
    propagated_error: float | None


class VerdictTable(Sequence[VerdictRow]):
    """A verdict for every pair that was compared, in the order of execution, by column."""

    def __init__(self, columns: Mapping[str, Sequence[Any]] | None = None) -> None:
        given = columns or {}
        self.columns: dict[str, list[Any]] = {
            name: list(given.get(name, ())) for name in VerdictRow._fields
        }

    def append(self, row: VerdictRow) -> None:
        """Add a row at the end."""
        for name, value in zip(VerdictRow._fields, row, strict=True):
            self.columns[name].append(value)

    def counts(self) -> dict[str, int]:
        """Return how often each verdict was given, the most frequent first."""
        return {str(each): count for each, count in Counter(self.columns["verdict"]).most_common()}

    def __len__(self) -> int:
        return len(self.columns["name"])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return VerdictTable({name: values[index] for name, values in self.columns.items()})
        return VerdictRow(*(self.columns[name][index] for name in VerdictRow._fields))

    def __iter__(self) -> Iterator[VerdictRow]:
        return map(VerdictRow._make, zip(*self.columns.values(), strict=True))


@dataclass(frozen=True)
class Coverage:
    """How much of the candidate was seen."""

    compared: int = 0
    """Ops or launches with a verdict other than unknown."""
    total: int = 0
    """Ops or launches of the candidate that could be compared."""
    notes: tuple[str, ...] = ()
    """What could not be observed, and why."""

    @property
    def complete(self) -> bool:
        """Whether everything was compared, and there was something to compare."""
        return 0 < self.total <= self.compared


@dataclass(frozen=True)
class DivergenceReport:
    """The answer to "do these two agree, and if not, who is guilty?". True only if matched."""

    status: Status
    candidate: str = "candidate"
    """What the first side is."""
    reference: str = "reference"
    """What the second side is; for a check without one, how it was checked."""
    findings: tuple[Finding, ...] = ()
    """Ranked: what explains most of the final difference first."""
    verdicts: VerdictTable = field(default_factory=VerdictTable)
    coverage: Coverage = field(default_factory=Coverage)
    unmatched: tuple[str, ...] = ()
    """Ops or launches of one side without a partner, each with its side."""
    duplicates: tuple[str, ...] = ()
    """Launches that cannot be told apart by their key."""
    noise_floor: float | None = None
    """Relative L2 of the final output that rounding or nondeterminism alone makes."""
    final_error: float | None = None
    """Relative L2 of the final output to the reference's."""
    headline: str = ""
    whys: tuple[str, ...] = ()
    """The chain from what is seen to what causes it, from measured facts."""
    circumstances: tuple[str, ...] = ()
    """Differences between the two sides' circumstances."""
    next_command: str | None = None
    """What would prove the top suspect."""
    first_divergent_kernel: KernelTrace | None = None
    expected_trace: KernelTrace | None = None
    actual_trace: KernelTrace | None = None
    kernels_compared: int = 0
    diagnosis: str = ""
    total_time_us: float | None = None
    """What the candidate's launches took together, of launches that were traced with their time."""
    reference_total_time_us: float | None = None
    outputs: int = 1
    """Final outputs: the final error and the noise floor are those of the one that differs most."""

    @property
    def matched(self) -> bool:
        """Whether the two agree, as far as everything was compared."""
        return self.status is Status.MATCHED

    @property
    def diverged(self) -> bool:
        """Whether a difference was found; neither this nor `matched` where it is inconclusive."""
        return self.status is Status.DIVERGED

    @property
    def culprits(self) -> tuple[Finding, ...]:
        """The findings that are shown to be wrong by re-execution."""
        guilty = (Verdict.CULPRIT, Verdict.NONFINITE_ORIGIN)
        return tuple(each for each in self.findings if each.verdict in guilty)

    @property
    def suspects(self) -> tuple[Finding, ...]:
        """The findings that fingerprints alone point at."""
        return tuple(each for each in self.findings if each.verdict is Verdict.SUSPECT)

    @property
    def exit_status(self) -> int:
        """Return 0 for matched, 1 for diverged, 3 for inconclusive."""
        return {Status.MATCHED: 0, Status.DIVERGED: 1, Status.INCONCLUSIVE: 3}[self.status]

    def __bool__(self) -> bool:
        return self.matched

    def __str__(self) -> str:
        from brickline.report.divergence import report_text

        return report_text(self)

    def _repr_html_(self) -> str:
        from brickline.report.notebook import divergence_html

        return divergence_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def to_json(self) -> str:
        """Return the report as one JSON document; `from_json` reads it again."""
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, VerdictTable):
                value = value.columns
            elif isinstance(value, Coverage):
                value = asdict(value)
            elif isinstance(value, KernelTrace):
                value = value.to_dict()
            elif each.name == "findings":
                value = [asdict(finding) for finding in value]
            document[each.name] = _plain(value)
        return json.dumps(document, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> DivergenceReport:
        """Read what `to_json` wrote.

        Raises:
            RunDamaged: if it is not such a document.
            RunVersion: if a newer brickline wrote it.
        """
        try:
            document = parsed_json(text)
            if not isinstance(document, dict) or document.get("format") != FORMAT:
                raise RunDamaged(f"expected a divergence report (format {FORMAT!r})")
            if document["version"] > VERSION:
                raise RunVersion(
                    f"the report has version {document['version']}, this brickline reads up to "
                    f"{VERSION}; upgrade it: pip install --upgrade brickline"
                )
            return cls(**_from_document(document))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunDamaged(
                "expected a report that check or compare kept, as JSON, found something else "
                f"({error}); a run is a directory"
            ) from error

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the report to a file, whole or not at all, and return its path.

        Raises:
            UsageError: if the file is there and overwriting was not asked for.
            RunError: if the disk refuses.
        """
        target = given_path(path)
        try:
            with whole_file(target, force=overwrite, how=OVERWRITE) as file:
                file.write(self.to_json().encode("utf-8"))
        except OSError as error:
            raise RunError(f"{target}: cannot write the report: {error.strerror}") from error
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DivergenceReport:
        """Read a saved report.

        Raises:
            RunError: if the file cannot be read, is damaged or from a newer brickline.
        """
        try:
            text = given_path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise RunError(f"{path}: cannot read the report: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RunDamaged(f"{path}: not a divergence report: not text") from error
        except UnicodeEncodeError as error:
            raise RunError(f"{path!a}: cannot read the report: no file has such a name") from error
        try:
            return cls.from_json(text)
        except RunDamaged as error:
            raise RunDamaged(f"{path}: {error}") from error


def _plain(value: Any) -> Any:
    """Return what JSON can hold; numbers that are not finite become their names."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return value
    if isinstance(value, Iterable):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float):
        return value
    return float(value) if hasattr(value, "__float__") else str(value)


_NUMBERS = ("z", "local_error", "propagated_error", "share")
_TOTALS = ("noise_floor", "final_error", "total_time_us", "reference_total_time_us")


def _from_document(document: Mapping[str, Any]) -> dict[str, Any]:
    known = {each.name for each in fields(DivergenceReport)}
    out = {name: value for name, value in document.items() if name in known}
    out["status"] = Status(out["status"])
    out["findings"] = tuple(_finding(each) for each in out.get("findings", ()))
    columns = dict(out.get("verdicts", {}))
    columns["verdict"] = [Verdict(each) for each in columns.get("verdict", ())]
    for name in _NUMBERS[:3]:
        columns[name] = [_number(each) for each in columns.get(name, ())]
    if len({len(columns.get(name, ())) for name in VerdictRow._fields}) != 1:
        raise ValueError("the columns of its verdicts have different lengths")
    out["verdicts"] = VerdictTable(columns)
    coverage = dict(out.get("coverage", {}))
    coverage["notes"] = tuple(coverage.get("notes", ()))
    out["coverage"] = Coverage(**coverage)
    for name in ("unmatched", "duplicates", "whys", "circumstances"):
        out[name] = tuple(out.get(name, ()))
    for name in _TOTALS:
        out[name] = _number(out.get(name))
    for name in ("first_divergent_kernel", "expected_trace", "actual_trace"):
        if out.get(name) is not None:
            out[name] = KernelTrace.from_dict(out[name])
    return out


def _finding(document: Mapping[str, Any]) -> Finding:
    known = {each.name for each in fields(Finding)}
    out = {name: value for name, value in document.items() if name in known}
    out["verdict"] = Verdict(out["verdict"])
    for name in _NUMBERS:
        out[name] = _number(out.get(name))
    return Finding(**out)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
