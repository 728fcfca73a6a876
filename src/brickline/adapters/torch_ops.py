"""Ops: every aten op of a recorded model, as a trace that says enough to run it again.

``params`` is JSON: the module it ran in, and its arguments with tensors replaced by the index of
their operand::

    {"level": "op", "module": "layers.3.mlp.up", "args": [{"tensor": 0}, {"tensor": 1}, 2.0],
     "kwargs": {"dtype": {"dtype": "float32"}}}

The mode stands in one thread, below autograd, so it sees the ops of the backward pass as well.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from brickline import abi
from brickline.adapters.torch_tensors import operands_of
from brickline.adapters.torch_values import dtype_name, flatten
from brickline.measurement_cost import difference_ns

if TYPE_CHECKING:
    from brickline.adapters.torch_calls import Place
    from brickline.adapters.torch_recorder import Recorder


class OpMode:
    """Hears of ops in every thread that runs the model."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._local = _ThreadModes()

    def enter(self) -> bool:
        """Hear of this thread's ops from now on; False where it did so already."""
        if self._local.mode is not None:
            return False
        self._local.mode = _Mode(self)
        self._local.mode.__enter__()
        return True

    def exit(self) -> None:
        """Hear of this thread's ops no more."""
        mode, self._local.mode = self._local.mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def leave(self) -> None:
        """Stand aside for compiled code, which no mode may see."""
        self._local.left = ExitStack()
        self._local.left.enter_context(_disable_current_modes())

    def come_back(self) -> None:
        """Undo `leave`, if it was called."""
        left, self._local.left = self._local.left, None
        if left is not None:
            left.close()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, and record it where it belongs to the model."""
        recorder = self._recorder
        stack = recorder.state.stack
        in_backward = torch._C._current_graph_task_id() != -1
        outside = not stack and not (in_backward and recorder.roots)
        if outside or recorder.state.observing or (stack and not stack[-1].site.recorded):
            return func(*args, **kwargs)
        op = self._begin(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            self._end(op, (), raised=True)
            raise
        self._end(op, result)
        return result

    def _begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Op | None:
        recorder = self._recorder
        recorder.state.observing = True
        try:
            return _Op(recorder, func, args, kwargs)
        except Exception as error:
            recorder.failures.record_failure("recording the inputs of an op", error)
            return None
        finally:
            recorder.state.observing = False

    def _end(self, op: _Op | None, result: Any, *, raised: bool = False) -> None:
        if op is None:
            return
        recorder = self._recorder
        recorder.state.observing = True
        try:
            op.write(recorder, result, raised=raised)
        except Exception as error:
            recorder.failures.record_failure("recording the outputs of an op", error)
        finally:
            recorder.state.observing = False


class _ThreadModes(threading.local):
    def __init__(self) -> None:
        self.mode: _Mode | None = None
        self.left: ExitStack | None = None


class _Mode(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    def __init__(self, ops: OpMode) -> None:
        super().__init__()
        self._ops = ops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._ops.run(func, args, kwargs or {})


class _NothingRecorded(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@functools.cache
def dispatch_cost_ns() -> float:
    """Return what it costs an op to pass through a mode that records nothing; measured once."""
    left, right = torch.zeros(2, 2)
    count = range(20)

    def plain() -> None:
        for _ in count:
            torch.add(left, right)

    def measured() -> None:
        with _NothingRecorded():
            plain()

    with torch.no_grad(), _disable_current_modes():
        return difference_ns(plain, measured) / len(count)


class _Op:
    """One op that is under way."""

    def __init__(self, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> None:
        self._began_ns = recorder.profiler._now_ns()
        stack = recorder.state.stack
        self.name = str(func)
        self.call = stack[-1] if stack else None
        self.direction = 0
        self.parent = self.call.trace if self.call is not None else 0
        site = self.call.site if self.call is not None else None
        self.place: Place = self.call.place if self.call is not None else recorder.roots[-1].latest
        if self.call is None:
            self.direction = 1
            current = recorder.gradients.current
            if current is not None:
                site, self.parent, self.place = current.call.site, current.trace, current.call.place
        self.site = site
        self.trace = recorder.profiler.traces.reserve()
        self.ordinal = self.place.ordinals.get(self.name, 0)
        self.place.ordinals[self.name] = self.ordinal + 1
        self.inputs: list[Tensor] = []
        document: dict[str, Any] = {
            "level": "op",
            "module": "" if site is None else site.name,
            "args": [encoded(each, self.inputs) for each in args],
        }
        if kwargs:
            document["kwargs"] = {
                name: encoded(value, self.inputs) for name, value in kwargs.items()
            }
        self.params = json.dumps(document)
        self.operands = operands_of(recorder.ledger, self.inputs, 0)
        self.written: list[Tensor] = []
        if func._schema.is_mutable:
            self.written = written_by(func, args, kwargs)
            recorder.ledger.flush()
        self.start_ns = recorder.profiler._now_ns()

    def write(self, recorder: Recorder, result: Any, raised: bool = False) -> None:
        end_ns = recorder.profiler._now_ns()
        outputs: list[Tensor] = []
        flatten(result, outputs, recorder.unobserved)
        written = {id(each) for each in self.written}
        returned = {id(each) for each in outputs}
        outputs += [each for each in self.written if id(each) not in returned]
        # Autograd counts a write after the op has come back through this mode.
        made = [
            recorder.ledger.operand(tensor, 1, index, ahead=id(tensor) in written)
            for index, tensor in enumerate(outputs)
        ]
        recorder.counts["op calls"] += 1
        shown = outputs[0] if outputs else self.inputs[0] if self.inputs else None
        is_cuda = shown is not None and shown.is_cuda
        recorder.profiler.traces.write(
            self.trace,
            name=self.name,
            layer=-1 if self.site is None else self.site.layer,
            position=self.place.position,
            ordinal=self.ordinal,
            parent=self.parent,
            slot=abi.NO_SLOT if self.site is None else self.site.slot,
            direction=self.direction,
            backend="CPU" if shown is None else shown.device.type.upper(),
            params=self.params[:-1] + ', "raised": true}' if raised else self.params,
            device=shown.device.index or 0 if is_cuda and shown is not None else -1,
            enqueue_ns=self.start_ns,
            start_ns=-1 if is_cuda else self.start_ns,
            end_ns=-1 if is_cuda else end_ns,
            operands=self.operands + made,
        )
        keeper = recorder.ledger.keeper
        if keeper.keeps_suspects:
            named = self.site is not None and self.site.named
            inputs = [(o.fingerprint, t) for o, t in zip(self.operands, self.inputs, strict=True)]
            made_of = [(o.fingerprint, t) for o, t in zip(made, outputs, strict=True)]
            keeper.called(self.trace, self.parent, inputs, made_of, named=named)
        before_ns = self.start_ns - self._began_ns + recorder.dispatch_ns
        recorder.profiler._spend(before_ns + recorder.profiler._now_ns() - end_ns)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an op writes to, by its schema."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [each for each in _listed(value) if isinstance(each, Tensor)]
    return found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def encoded(value: Any, tensors: list[Tensor]) -> Any:
    """Return an argument as JSON can hold it; its tensors are appended to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return [encoded(each, tensors) for each in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, int | torch.SymInt):
        return int(value)
    if isinstance(value, float | torch.SymFloat):
        number = float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    return {"opaque": type(value).__name__}
