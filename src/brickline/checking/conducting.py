"""A whole check: drive, examine, rank, explain, and write it down as a `DivergenceReport`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from brickline.checking.alone import check_alone
from brickline.checking.backward_evidence import with_weights
from brickline.checking.causes import explain
from brickline.checking.evidence import Evidence
from brickline.checking.explain import ShownRegion, write_region_repro
from brickline.checking.kernels import as_callable
from brickline.checking.plans import PlanModule, held_by_reference
from brickline.checking.repro import write_repro
from brickline.checking.session import Progress, Session
from brickline.checking.writing import report_of
from brickline.errors import UsageError
from brickline.executor.prepared import PreparedPlan
from brickline.kernel import Kernel
from brickline.verdict import GUILTY, DivergenceReport, Finding, apply_accepted, load_accepted

EXPLAINED = 8
"""Culprits whose cause is looked for; the rest are listed."""
WRITTEN = 3
"""Culprits for which a repro is written."""


def conduct(
    candidate: Any,
    reference: Any,
    drive: Callable[[Any], Any],
    *,
    accept: Any = None,
    progress: Progress | None = None,
    repro: Any = None,
) -> DivergenceReport:
    """Check a candidate and report."""
    accepted = load_accepted(accept)
    if reference is None and isinstance(candidate, PreparedPlan):
        reference = held_by_reference(candidate)
    candidate, reference = _as_model(candidate), _as_model(reference)
    if reference is None:
        report = check_alone(candidate, drive=drive, progress=progress, repro=repro)
    else:
        report = _against(candidate, reference, drive, progress, repro)
    return apply_accepted(report, accepted)


def _as_model(given: Any) -> Any:
    """Return a kernel as a function of tensors and a prepared plan as a module."""
    if isinstance(given, Kernel):
        return as_callable(given)
    return PlanModule(given) if isinstance(given, PreparedPlan) else given


def _against(
    candidate: Any,
    reference: Any,
    drive: Callable[[Any], Any],
    progress: Progress | None,
    repro: Any,
) -> DivergenceReport:
    for role, side in (("candidate", candidate), ("reference", reference)):
        _need_weights(role, side)
    if candidate is reference and isinstance(candidate, torch.nn.Module):
        raise UsageError(
            "reference: expected another model, got the candidate itself, which cannot run beside "
            "itself; give copy.deepcopy(model), or no reference to hold every op to its float64"
        )
    session = Session(candidate, reference, progress=progress)
    failure: BaseException | None = None
    try:
        session.drive(drive)
    except UsageError:
        raise
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        failure = error
    named, regions = _named_evidence(session), _named_regions(session)
    return report_of(
        session, failure, lambda findings: _explained(findings, named, regions, repro, progress)
    )


def _named_evidence(session: Session) -> dict[tuple[str, str], Evidence]:
    """Return the evidence by the findings' names and directions."""
    display = session.candidate.stage.display
    named = {(display(path), "forward"): each for path, each in session.evidence.items()}
    for path, known in session.backward.accusations.items():
        if known.evidence is not None:
            named[display(path), "backward"] = known.evidence
    return named


def _named_regions(session: Session) -> dict[str, ShownRegion]:
    """Return the operations that compute something else, by the findings' names."""
    display = session.candidate.stage.display
    return {
        display(module.name): module.shown
        for position in reversed(session.positions)
        for module in (() if position.logic is None else position.logic.modules)
        if module.shown is not None
    }


def _need_weights(role: str, side: Any) -> None:
    if isinstance(side, torch.nn.Module):
        for name, parameter in side.named_parameters():
            if torch.nn.parameter.is_lazy(parameter):
                raise UsageError(
                    f"{role}: {name} has no shape yet, because its module is lazy; call the model "
                    "once on such inputs before it is checked"
                )


def _explained(
    findings: tuple[Finding, ...],
    evidence: dict[tuple[str, str], Evidence],
    regions: dict[str, ShownRegion],
    repro: Any,
    progress: Progress | None,
) -> tuple[Finding, ...]:
    made: list[Finding] = []
    directory = _Directory(repro)
    for number, finding in enumerate(findings):
        kept = evidence.get((finding.name, finding.direction))
        region = regions.get(finding.name) if finding.direction == "forward" else None
        if region is not None and "float64_output_error" in finding.evidence:
            if number < WRITTEN and repro is not False:
                finding = _with_region(finding, region, directory)
            made.append(finding)
            continue
        if kept is None or finding.verdict not in GUILTY or number >= EXPLAINED:
            made.append(finding)
            continue
        if progress is not None:
            progress(number, len(findings), f"explaining {finding.name}")
        with with_weights(kept):
            finding = _with_cause(finding, kept)
            if number < WRITTEN and repro is not False:
                finding = _with_repro(finding, kept, directory)
        made.append(finding)
    return tuple(made)


def _with_cause(finding: Finding, evidence: Evidence) -> Finding:
    with torch.no_grad():
        found = explain(evidence)
    facts = {**finding.evidence, **found.facts}
    return replace(finding, cause=found.cause, where=found.where, evidence=facts)


def _with_repro(finding: Finding, evidence: Evidence, directory: _Directory) -> Finding:
    if evidence.module is None:
        reason = "no repro: the reference has no module of this name to hold it against"
        return replace(finding, reason=finding.reason or reason)
    try:
        made = write_repro(evidence, directory.path(), z=finding.z)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        return replace(finding, reason=f"no repro: {error}")
    if made.path is None:
        return replace(finding, reason=f"no repro: {made.reason}")
    return replace(finding, repro=str(made.path))


def _with_region(finding: Finding, region: ShownRegion, directory: _Directory) -> Finding:
    written = write_region_repro(region, finding.name, directory.path())
    if written.path is None:
        return replace(finding, reason=finding.reason or f"no repro: {written.reason}")
    return replace(finding, repro=str(written.path))


class _Directory:
    """Where repros go: made when the first one is written."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._made: Path | None = None

    def path(self) -> Path:
        if self._made is None:
            if self._given is not None:
                self._made = Path(self._given)
                self._made.mkdir(parents=True, exist_ok=True)
            else:
                self._made = Path(tempfile.mkdtemp(prefix="brickline-repro-"))
                os.chmod(self._made, 0o700)
        return self._made
