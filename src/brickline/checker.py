"""`check`: is this candidate right, and if not, which of its bricks is wrong?

Drives the candidate as its user does, asks the reference or the float64 oracle about each of its
bricks, and says what was found. How that is done is in `checking`; what it needs of PyTorch is
loaded when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from brickline.errors import UsageError
from brickline.executor.prepared import PreparedPlan
from brickline.kernel import Kernel
from brickline.verdict import DivergenceReport

Progress = Callable[[int, int | None, str], None]
_NO_REFERENCE = ("reference", None)


def check(
    candidate: Any,
    *args: Any,
    reference: Any = None,
    drive: Callable[[Any], Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    accept: Any = None,
    progress: Progress | None = None,
    repro: Any = None,
) -> DivergenceReport:
    """Hold a candidate against a reference, or against float64, brick by brick.

    Args:
        candidate: A `torch.nn.Module`, or any callable on tensors.
        *args: What to call it with, where `drive` is not given.
        reference: What it should compute: another module or callable with the same call. Default:
            none; then the arithmetic of every operation is verified and the logic is not.
        drive: Runs the candidate as its user does, for example a decode loop; it is called with
            the candidate, in place of `args`.
        kwargs: Keyword arguments that go with `args`.
        accept: Differences that are intended: a path of a TOML file, or its entries.
        progress: Called with calls done, calls in all if known, and a word.
        repro: Directory for scripts that show each culprit alone; False for none, which saves the
            seconds that running each in a fresh process takes. Default: a temporary directory.

    Raises:
        UsageError: if there is nothing to call, or torch is missing.
    """
    _checked_arguments(candidate, reference, args, drive, kwargs)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "check needs PyTorch, which is not installed; pip install 'brickline[torch]'"
        ) from error
    from brickline.checking.conducting import conduct

    return conduct(
        candidate,
        reference,
        drive if drive is not None else _plain_drive(args, kwargs or {}),
        accept=accept,
        progress=progress,
        repro=repro,
    )


def _plain_drive(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Any], Any]:
    def drive(model: Any) -> Any:
        return model(*args, **kwargs)

    return drive


def _plan_hint(given: Any) -> str:
    """Return how to come from a plan, or from what holds one, to what can be checked."""
    if isinstance(getattr(given, "prepared", None), PreparedPlan):
        return "; pass its .prepared, and drive=lambda plan: plan(...) with its variables"
    if callable(getattr(given, "prepare", None)):
        return "; prepare it first, .prepare(...)"
    return ""


def _checked_arguments(
    candidate: Any,
    reference: Any,
    args: tuple[Any, ...],
    drive: Callable[[Any], Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> None:
    for role, given in (("candidate", candidate), ("reference", reference)):
        if not (callable(given) or isinstance(given, Kernel) or (role, given) == _NO_REFERENCE):
            raise UsageError(
                f"{role}: expected a torch.nn.Module, a callable on tensors, a brickline.Kernel or "
                f"a prepared plan, got {type(given).__name__}{_plan_hint(given)}"
            )
        if isinstance(given, type):
            raise UsageError(
                f"{role}: expected a model, got the class {given.__name__}; make one of it first"
            )
    if reference is None and args and hasattr(args[0], "named_parameters"):
        raise UsageError(
            f"expected the candidate's inputs after it, got a model ({type(args[0]).__name__}); "
            "the reference is given by name: check(candidate, inputs, reference=model)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(
            f"kwargs: expected a mapping of keyword arguments, got {type(kwargs).__name__}; "
            'for example kwargs={"attention_mask": mask}'
        )
    if args and isinstance(candidate, PreparedPlan):
        raise UsageError(
            f"expected the variables of a plan by name, got {args[0]!r:.80}; for example "
            'check(prepared, kwargs={"n": 7}), or drive=lambda plan: plan(n=7)'
        )
    if drive is not None and (args or kwargs):
        raise UsageError(
            "expected either arguments or drive=, got both; with drive= the driver makes the calls"
        )
    if drive is not None and not callable(drive):
        raise UsageError(
            f"drive: expected a callable that runs the model, got {type(drive).__name__}; "
            "for example drive=lambda model: model.generate(tokens)"
        )
