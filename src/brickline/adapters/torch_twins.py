"""Twins: each recorded call of a model made once more in float64, before its native run.

Owns which calls have a twin, what is noted of one, and where it is written. The call is made on
copies of its arguments, buffers and attributes, with the random numbers that the native run will
draw, and once more with inputs and weights moved by their own rounding: what that moves is the
twin's noise. The native run comes after and meets everything as it was. What cannot be done is
said in the run; it never stops the program.
"""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import brickline
from brickline import _core, abi
from brickline.adapters.torch_heard import Heard, Hearing
from brickline.adapters.torch_values import unobservable
from brickline.oracle.wide_calls.mode import ForeignWrite, WideCall
from brickline.oracle.wide_calls.snapshot import RandomState, snapshot
from brickline.oracle.wide_calls.state import copied_state, generators_of, nudge
from brickline.oracle.widen import is_narrow, is_out_of_memory, unit_roundoff
from brickline.run.twin_rows import TwinFile, packed_row

if TYPE_CHECKING:
    from brickline.adapters.torch_calls import Call, Place, Root
    from brickline.adapters.torch_recorder import Recorder
    from brickline.adapters.torch_sites import Site

MOST_FAILURES = 3
"""Calls in a row without a twin, for want of memory or another error, after which none is tried."""
MOST_NAMED = 10
"""Calls without a twin that are named, for each reason."""
PATIENCE_S = 20
"""How long a thread waits for the twin of another."""
MOST_CHARACTERS = 200
"""Of an error's message."""
_PACKAGE = Path(brickline.__file__).parent


class NoTwin(Exception):  # noqa: N818
    """A call has no twin; the message says why, in words for people."""


class Twins:
    """Makes the twins of one recorder's calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sites: dict[int, dict[int, Site]] = {}
        self._refusals: dict[int, str | None] = {}
        self._none: dict[str, list[int]] = {}
        self._file: TwinFile | None = None
        self._calls = self._rows = self._failures = 0
        self._ns = 0
        self._narrow: set[str] = set()
        self._lock = threading.RLock()
        self._open: set[Call] = set()
        self._is_stuck = False
        self.aside = [0, 0]
        """Calls that the core counted as passed aside and as unknown while twins were made."""

    def add(self, root: Root, site: Site) -> None:
        """Know a module of a model by its site."""
        self._sites.setdefault(id(root), {})[id(site.module)] = site

    def wait(self) -> None:
        """Wait for a twin that another thread makes: the model holds copies of its state then.

        Not for ever: a model that calls its modules in threads of its own would wait for them.
        """
        if self._lock.acquire(timeout=PATIENCE_S):
            self._lock.release()
        else:
            self._is_stuck = True

    def begin(self, call: Call, args: Any, kwargs: Any, *, compiled: bool) -> None:
        """Make the twin of a root's call that is about to run, unless another is under way."""
        with self._lock:
            if self._open:
                self._leave_out(call.place.position, "another call of a model is under way")
            else:
                self._make_one(call.site, call.place, args, kwargs, compiled=compiled)
            self._open.add(call)

    def end(self, call: Call) -> None:
        """Hear of the end of a call that began, or was given up."""
        self._open.discard(call)

    def _make_one(
        self, site: Site, place: Place, args: Any, kwargs: Any, *, compiled: bool
    ) -> None:
        began = time.perf_counter_ns()
        before = _core.watch_counts()
        try:
            if compiled:
                raise NoTwin("it is called from compiled code")
            self._make(site, place, args, kwargs or {})
        except NoTwin as reason:
            self._leave_out(place.position, str(reason))
        finally:
            self._ns += time.perf_counter_ns() - began
            counts = zip(_core.watch_counts(), before, strict=True)
            self.aside = [
                known + now - then for known, (now, then) in zip(self.aside, counts, strict=True)
            ]

    def facts(self) -> dict[str, Any]:
        """Return what was made and what was not, for the manifest."""
        return {
            "calls": self._calls,
            "rows": self._rows,
            "seconds": self._ns / 1e9,
            "none": [
                {"reason": reason, "calls": calls[:MOST_NAMED], "count": len(calls)}
                for reason, calls in self._none.items()
            ],
            "float32": sorted(self._narrow),
        }

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _leave_out(self, position: int, reason: str) -> None:
        self._none.setdefault(reason, []).append(position)

    # One call

    def _make(self, site: Site, place: Place, args: Any, kwargs: Any) -> None:
        root: Root = site.root
        self._refuse_stuck()
        if self._failures >= MOST_FAILURES:
            raise NoTwin(f"none was made of the {MOST_FAILURES} calls before")
        if id(root) not in self._refusals:
            self._refusals[id(root)] = refusal_of(root.model)
        refusal = self._refusals[id(root)] or passing_refusal_of(root.model)
        if refusal:
            raise NoTwin(refusal)
        try:
            self._make_twin(site, place, args, kwargs)
        except NoTwin:
            raise
        except Exception as error:
            self._failures += 1
            if is_own(error):
                self._recorder.failures.record_failure("making a float64 twin", error)
            raise NoTwin(reason_of(error)) from error
        self._failures = 0

    def _refuse_stuck(self) -> None:
        if self._is_stuck:
            raise NoTwin(f"a thread waited {PATIENCE_S} s for another call's twin")

    def _make_twin(self, site: Site, place: Place, args: Any, kwargs: Any) -> None:
        model = site.root.model
        with untouched(self._recorder, model, (args, kwargs)):
            mode = WideCall(working_dtype(model))
            plain = self._run(mode, site, args, kwargs)
            moving = WideCall(working_dtype(model), moved=True)
            moved = self._run(moving, site, args, kwargs)
        self._refuse_stuck()  # what a thread of the model's own did meanwhile was not wide
        self._narrow |= mode.narrow_ops
        self._write(place, plain, moved, moving.roundoff)

    def _run(self, mode: WideCall, site: Site, args: Any, kwargs: Any) -> Heard:
        """Make the call under a mode; give what its modules took and returned."""
        model = site.root.model
        generator = torch.Generator().manual_seed(20)

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if mode.is_moved and is_narrow(tensor):
                roundoff = unit_roundoff(tensor.dtype)
                mode.roundoff = max(mode.roundoff, roundoff)
                tensor = nudge(tensor, roundoff, generator)
            wide = tensor.double() if is_narrow(tensor) else tensor
            mode.own([wide])
            return wide

        dice = RandomState()
        hearing = Hearing(self._sites[id(site.root)])
        try:
            given, named = snapshot((tuple(args), dict(kwargs)), convert)
            with copied_state(model, convert), hearing.listening(), mode:
                hearing.begin(site, given, named)
                result = called(model, given, named)
                hearing.end(site, result)
            return hearing.heard()
        finally:
            dice.restore()

    def _write(self, place: Place, plain: Heard, moved: Heard, roundoff: float) -> None:
        spool = self._recorder.profiler._spool
        if spool is None or not plain:
            return
        if self._file is None or not self._file.belongs_to(spool):
            self._file = TwinFile(spool)
        noise = noise_of(plain, moved)
        rows = [
            packed_row((key[0], place.position, *key[1:]), roundoff, size, record)
            for (key, record), size in zip(plain.items(), noise, strict=True)
        ]
        self._file.append(b"".join(rows))
        self._calls += 1
        self._rows += len(rows)


def noise_of(plain: Heard, moved: Heard) -> list[float]:
    """Return the L2 norm of what moving inputs and weights did to each tensor; NaN: not known."""
    both = [key for key in plain if key in moved]
    one, two = (
        np.frombuffer(b"".join(side[key] for key in both), abi.FINGERPRINT)
        for side in (plain, moved)
    )
    gap = one["sketch"] - two["sketch"]
    sizes = np.sqrt(np.einsum("ij,ij->i", gap, gap))
    sizes[one["elements"] != two["elements"]] = np.nan
    known = dict(zip(both, sizes.tolist(), strict=True))
    return [known.get(key, float("nan")) for key in plain]


def called(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a model's forward, that of the original for a compiled one."""
    return getattr(model, "_orig_mod", model).forward(*args, **kwargs)


def working_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that a model works in: that of its first floating-point weight."""
    floating = (each.dtype for each in model.parameters() if each.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())


# --- what stays as it is


@contextmanager
def untouched(recorder: Recorder, model: nn.Module, given: Any) -> Iterator[None]:
    """Keep what a call of a model may change as it was: random numbers, modes, warnings."""
    state = recorder.state
    dice = RandomState()
    generators = [(each, each.get_state()) for each in generators_of(model, given)]
    with ExitStack() as undo:
        undo.callback(dice.restore)
        for generator, kept in generators:
            undo.callback(generator.set_state, kept)
        state.replaying = True
        undo.callback(setattr, state, "replaying", False)
        undo.enter_context(_disable_current_modes())
        undo.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                undo.enter_context(torch.autocast(device, enabled=False))
        if any(hasattr(each, "_orig_mod") for each in model.modules()):
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


# --- what has no twin


def passing_refusal_of(model: nn.Module) -> str | None:
    """Return why this call has no twin although another may have one; None: it has."""
    if any(module.training for module in model.modules()):
        return "the model is in training mode; call model.eval() first"
    for path, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch."):
                return (
                    f"{path or type(module).__name__} has forward hooks of the program's own, "
                    "which another call would run again"
                )
    return None


def refusal_of(model: nn.Module) -> str | None:
    """Return why no call of a model has a twin; None where calls have one."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{path or 'the model'} is TorchScript"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            return f"{name} has no shape before the first call"
        if tensor.device.type not in ("cpu", "cuda"):
            return f"{name} is on {tensor.device.type}, where float64 is not available"
        reason = unobservable(tensor)
        if (reason and tensor.layout is not torch.strided) or tensor.is_quantized:
            return f"{name} is one of {reason}"
        if reason and reason.startswith("tensors of class"):
            return f"{name} is one of the {reason}"
    return None


def is_own(error: Exception) -> bool:
    """Whether an error is brickline's rather than the program's or torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and Path(frames[-1].filename).is_relative_to(_PACKAGE)
    return inside and not isinstance(error, ForeignWrite | OSError)


def reason_of(error: Exception) -> str:
    """Return why making a twin failed, in words for people."""
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, ForeignWrite):
        return str(error)
    if isinstance(error, OSError):
        return f"the disk refuses ({error.strerror or error})"
    first = traceback.format_exception_only(error)[0].splitlines()[0]
    return f"in float64 it raised {first[:MOST_CHARACTERS]}"
