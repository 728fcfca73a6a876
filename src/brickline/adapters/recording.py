"""`record`: any PyTorch model into a run, without changing it.

Owns the options and the life of a recording. What happens inside is the matter of the `torch_`
modules beside it, which are loaded when a recording begins: this one imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from brickline.bricks import BrickId
from brickline.errors import UsageError
from brickline.profiler import BrickProfiler
from brickline.run.failures import failure_texts

if TYPE_CHECKING:
    from brickline.adapters.torch_recorder import Recorder

LEVELS = ("module", "op")
KEPT = ("none", "suspects", "all")


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded of a model."""

    level: str = "module"
    """``"module"``: one trace per module call. ``"op"``: one per aten op as well."""
    tensors: str = "none"
    """Whose contents are saved: ``"none"``, ``"suspects"`` or ``"all"``."""
    include: tuple[str, ...] = ()
    """Globs of module paths; empty: all modules."""
    exclude: tuple[str, ...] = ()
    steps: Collection[int] | None = None
    """Numbers of the root's calls to record; None: all."""
    bricks: Mapping[str | type, BrickId | str] = field(default_factory=dict)
    """Which brick a module is, by glob of its path or by class, before the built-in names."""
    fingerprints: bool = True
    """False: time alone."""
    twin: bool = False
    """Whether each call is made in float64 as well, and recorded beside the native one."""

    def __post_init__(self) -> None:
        _check_choice("level", self.level, LEVELS)
        _check_choice("tensors", self.tensors, KEPT)
        for key, brick in self.bricks.items():
            if not isinstance(key, str | type) or not isinstance(brick, str | int):
                raise UsageError(
                    f"bricks: expected globs or classes to BrickId or names, got {key!r}: {brick!r}"
                )
        if not isinstance(self.twin, bool):
            raise UsageError(f"twin: expected True or False, got {self.twin!r}")
        if self.twin and not self.fingerprints:
            raise UsageError(
                "twin=True records fingerprints in float64, got fingerprints=False; leave one out"
            )
        if not self.fingerprints and (self.level != "module" or self.tensors != "none"):
            raise UsageError(
                f"fingerprints=False records time alone, got level={self.level!r} and "
                f"tensors={self.tensors!r}; leave those out, or leave fingerprints on"
            )

    @property
    def stated_steps(self) -> dict[str, int] | list[int] | None:
        """`steps` as the run says it: a range as its ends, because it may be of any length."""
        asked = self.steps
        if isinstance(asked, range):
            return {"start": asked.start, "stop": asked.stop, "step": asked.step}
        return None if asked is None else sorted(asked)

    def wants(self, position: int) -> bool:
        """Whether a call of the root is to be recorded."""
        return self.steps is None or position in self.steps


def options_from(
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    steps: int | Iterable[int] | None = None,
    bricks: Mapping[str | type, BrickId | str] | None = None,
    **plain: Any,
) -> RecordOptions:
    """Return options from what a caller gave, in any of the accepted forms.

    Raises:
        UsageError: if one of them cannot be understood.
    """
    return RecordOptions(
        include=_globs("include", include),
        exclude=_globs("exclude", exclude),
        steps=_steps(steps),
        bricks=_bricks(bricks),
        **plain,
    )


def record(
    path: str | os.PathLike[str],
    model: Any,
    level: Literal["module", "op"] = "module",
    tensors: Literal["none", "suspects", "all"] = "none",
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    steps: int | Iterable[int] | None = None,
    bricks: Mapping[str | type, BrickId | str] | None = None,
    overwrite: bool = False,
    fingerprints: bool = True,
    twin: bool = False,
) -> Recording:
    """Record what a PyTorch model computes into a run, while the `with` block lasts.

    Every call of a module becomes a trace with fingerprints of its inputs, outputs, parameters and
    gradients, and an entry of its brick. The model is not changed.

    Args:
        path: Where the run goes.
        model: A `torch.nn.Module`; what `torch.compile` made of one is recorded as one brick.
        level: ``"module"`` (default), or ``"op"`` for every aten op as well.
        tensors: Contents to save: ``"none"`` (default); ``"suspects"``, the tensors of calls that
            make the first NaN or Inf and of modules that `include` names; ``"all"``, everything
            at a recorded boundary, once for each content.
        include: Globs of module paths to record, such as ``"layers.3.*"``. Default: all.
        exclude: Globs of module paths to leave out. Default: none.
        steps: How many calls of the model to record, or the numbers of those to record, from 0.
            Default: all.
        bricks: Which brick a module is, by glob of its path or by class. Default: by its name and
            class, as `docs/recording.md` lists.
        overwrite: Replace a run at `path`. Default False.
        fingerprints: False records time alone, at a tenth of a microsecond a call. Default True.
        twin: Make each call in float64 as well, before it runs, and record the fingerprints of that
            beside the native ones, so that `compare` can tell a fault from rounding. It takes
            several times as long, and changes nothing of what the model computes. Default False.

    Raises:
        UsageError: if an argument is not one of the above, or the model is recorded already.
        RunExists: on entering, if `path` is taken and `overwrite` is False.

    Example:
        >>> with record("gpu.brick", model) as recording:          # doctest: +SKIP
        ...     model(tokens)
        >>> print(recording.summary())                             # doctest: +SKIP
    """
    options = options_from(
        level=level,
        tensors=tensors,
        include=include,
        exclude=exclude,
        steps=steps,
        bricks=bricks,
        fingerprints=fingerprints,
        twin=twin,
    )
    return Recording(path, model, options, overwrite=overwrite)


class Recording:
    """A model that is being recorded; a context manager that `record` returns."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Any,
        options: RecordOptions,
        *,
        overwrite: bool = False,
    ) -> None:
        from brickline.adapters.torch_sites import check_model

        check_model(model)
        self.model = model
        self.options = options
        self._path = path
        self._overwrite = overwrite
        self._recorder: Recorder | None = None
        self._entered = False

    def __enter__(self) -> Self:
        from brickline.adapters.torch_recorder import Recorder
        from brickline.adapters.torch_sites import device_of, name_of, refuse_watched

        if self._entered:
            raise UsageError("a recording is entered once; call brickline.record again")
        refuse_watched(self.model)
        self._entered = True
        name = name_of(self.model)
        profiler = BrickProfiler(
            name,
            enabled=True,
            path=self._path,
            overwrite=self._overwrite,
            device=device_of(self.model),
        )
        self._recorder = Recorder(profiler, self.options)
        with ExitStack() as undo:
            undo.callback(self._recorder.close)
            self._recorder.attach(self.model)
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._recorder is not None:
            self._recorder.close()

    @property
    def path(self) -> Path:
        """Where the run lies."""
        found = None if self._recorder is None else self._recorder.profiler.path
        return Path(self._path) if found is None else found

    @property
    def profiler(self) -> BrickProfiler:
        """The profiler that it records into.

        Raises:
            UsageError: before the recording was entered.
        """
        return self._begun().profiler

    @property
    def facts(self) -> dict[str, Any]:
        """What was recorded and what could not be, as the run's manifest says it."""
        return self._begun().facts()

    @property
    def unobserved(self) -> dict[str, int]:
        """How often something could not be observed, by reason."""
        return dict(self._begun().unobserved)

    @property
    def failures(self) -> list[str]:
        """What broke inside brickline meanwhile, a sentence for each kind; usually nothing."""
        return list(failure_texts(self._begun().failures.documents()))

    def summary(self) -> str:
        """Return what was recorded, what could not be observed and what failed, as text."""
        from brickline.adapters.torch_summary import summary_text

        return summary_text(self.facts, self.path)

    def _begun(self) -> Recorder:
        if self._recorder is None:
            raise UsageError("the recording has not begun; use it in a `with`")
        return self._recorder


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _globs(name: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    globs = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    for each in globs:
        if not isinstance(each, str) or not each:
            raise UsageError(f'{name}: expected globs of module paths ("layers.3.*"), got {each!r}')
    return globs


def _bricks(given: Mapping[str | type, BrickId | str] | None) -> dict[str | type, BrickId | str]:
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"bricks: expected globs or classes to BrickId or names, got {given!r}")
    return dict(given or {})


def _steps(given: int | Iterable[int] | None) -> Collection[int] | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= sys.maxsize:
        return range(given)
    if isinstance(given, range):
        return given
    try:
        numbers = frozenset(given) if not isinstance(given, int) else frozenset({-1})
    except TypeError:
        numbers = frozenset({-1})
    if not all(isinstance(each, int) and each >= 0 for each in numbers):
        raise UsageError(
            "steps: expected how many calls of the model to record, or their numbers from 0, "
            f"got {given!r}"
        )
    return numbers
