"""`DivergenceReport`: the facts of a comparison, and what follows from them.

Status and headline are computed whenever a report is made, so none can contradict its own figures,
also one that was changed with `dataclasses.replace`. How a report looks is the matter of the room
`brickline.report`, what its file holds that of `documents`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brickline.errors import RunDamaged, RunError
from brickline.files.paths import given_path
from brickline.verdict.documents import facts_from_json, json_from_facts, read_as_damaged
from brickline.verdict.facts import Facts
from brickline.verdict.status import status_of
from brickline.verdict.verdicts import Status
from brickline.verdict.words import headline_of
from brickline.whole_files import OVERWRITE, whole_file


@dataclass(frozen=True)
class DivergenceReport(Facts):
    """The answer to "do these two agree, and if not, who is guilty?". True only if matched."""

    status: Status = field(init=False)
    """Follows from the facts: diverged where a finding is guilty, matched where nothing is open."""
    headline: str = field(init=False)
    """Who, what and how sure, in one sentence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", status_of(self))
        object.__setattr__(self, "headline", headline_of(self, self.status))

    @property
    def matched(self) -> bool:
        """Whether the two agree, as far as everything was compared."""
        return self.status is Status.MATCHED

    @property
    def diverged(self) -> bool:
        """Whether somebody is guilty; neither this nor `matched` where it is inconclusive."""
        return self.status is Status.DIVERGED

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
        return json_from_facts(self, status=self.status, headline=self.headline)

    @classmethod
    def from_json(cls, text: str | bytes) -> DivergenceReport:
        """Read what `to_json` wrote; status and headline are computed anew from its facts.

        Raises:
            RunDamaged: if it is not such a document.
            RunVersion: if a newer brickline wrote it.
        """
        with read_as_damaged():
            return cls(**facts_from_json(text))

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
