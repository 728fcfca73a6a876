"""Gradients: the backward pass of recorded calls, as traces of their own.

A backward trace has the name, position and ordinal of the call it belongs to and direction 1. What
goes in are the gradients of the call's outputs; what comes out are those of its inputs, summed over
all who use them, and of its own parameters (from `PARAMETER_INDEX` on). Hooks lie on tensors, so
the graph of autograd stays as it is.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor

from brickline.adapters.torch_sites import PARAMETER_INDEX, UNSEEN_INDEX
from brickline.adapters.torch_tensors import Ledger
from brickline.profiler import BrickProfiler
from brickline.run.failures import FailureLog
from brickline.traces import Operand


class GradientCall:
    """The backward pass of one call."""

    __slots__ = ("call", "end_ns", "is_whole", "operands", "parent", "start_ns", "task", "trace")

    def __init__(self, call: Any, parent: GradientCall | None) -> None:
        self.call = call
        self.parent = parent
        self.trace = 0
        self.task = -1
        self.start_ns = self.end_ns = 0
        self.operands: dict[tuple[int, int], Operand] = {}
        self.is_whole = True
        """Whether every gradient that arrived could be looked at."""


class Gradients:
    """Hears of gradients and writes a trace for each call that has some."""

    def __init__(
        self,
        profiler: BrickProfiler,
        ledger: Ledger,
        counts: Counter[str],
        state: Any,
        failures: FailureLog,
    ) -> None:
        self._profiler = profiler
        self._failures = failures
        self._state = state
        self._ledger = ledger
        self._counts = counts
        self._open: dict[int, list[GradientCall]] = {}
        self._handles: list[Any] = []
        self._lock = threading.RLock()
        self._closed = False
        self.current: GradientCall | None = None
        """The call whose backward pass began last."""

    def begin(self, call: Any, weights: list[Tensor], stack: list[Any]) -> None:
        """Hear of a call that begins, while its inputs are still what they are."""
        inputs = [(index, each) for index, each in enumerate(call.inputs) if each.requires_grad]
        parent = next((each.gradients for each in reversed(stack) if each.gradients), None)
        mine = call.gradients = GradientCall(call, parent)
        for index, tensor in inputs:
            handle = tensor.register_hook(partial(self._arrived, mine, 1, index))
            if tensor.is_leaf:  # the others go with their graph
                self._handles.append(handle)
        site = call.site
        for index, tensor in enumerate(weights, PARAMETER_INDEX):
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in site.hooked:
                site.hooked.add(id(tensor))
                self._handles.append(tensor.register_hook(partial(self._of_weight, site, index)))

    def end(self, mine: GradientCall, outputs: list[Tensor]) -> None:
        """Hear of a call that has ended with these outputs."""
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad:
                handle = tensor.register_hook(partial(self._arrived, mine, 0, index))
                if tensor.is_leaf:
                    self._handles.append(handle)

    def close(self) -> None:
        """Take the hooks off and write what has begun."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for task in list(self._open):
            self._write(task)

    def _arrived(self, mine: GradientCall, role: int, index: int, gradient: Tensor) -> None:
        if self._closed or not isinstance(gradient, Tensor):
            return
        try:
            self._take(mine, role, index, gradient)
        except Exception as error:
            mine.is_whole = False
            self._failures.record_failure("recording a gradient", error)

    def _take(self, mine: GradientCall, role: int, index: int, gradient: Tensor) -> None:
        began_ns = self._profiler._now_ns()
        with self._lock:
            if not mine.trace:
                self._begin(mine)
            if role == 0:
                mine.call.site.gradients = mine
            self._state.observing = True
            try:
                mine.operands[role, index] = self._ledger.operand(gradient, role, index)
            finally:
                self._state.observing = False
            mine.end_ns = self._profiler._now_ns()
        self._profiler._spend(mine.end_ns - began_ns)

    def _of_weight(self, site: Any, index: int, gradient: Tensor) -> None:
        mine = site.gradients
        if mine is not None and mine.trace in {
            each.trace for each in self._open.get(mine.task, ())
        }:
            self._arrived(mine, 1, index, gradient)

    def _begin(self, mine: GradientCall) -> None:
        """Give the trace its number, after those of the calls around it."""
        if mine.parent is not None and not mine.parent.trace:
            self._begin(mine.parent)
        mine.trace = self._profiler.traces.reserve()
        mine.start_ns = self._profiler._now_ns()
        mine.task = torch._C._current_graph_task_id()
        if mine.task not in self._open:
            self._open[mine.task] = []
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._write, mine.task))
        self._open[mine.task].append(mine)
        self.current = mine

    def _write(self, task: int) -> None:
        began_ns = self._profiler._now_ns()
        with self._lock:
            try:
                for mine in self._open.pop(task, ()):
                    self._write_one(mine)
                self._ledger.flush()
            except Exception as error:
                self._failures.record_failure("writing the backward pass of a call", error)
            self.current = None
        self._profiler._spend(self._profiler._now_ns() - began_ns)

    def _write_one(self, mine: GradientCall) -> None:
        call = mine.call
        site = call.site
        operands = mine.operands
        if not mine.is_whole:  # what came of a gradient that is missing would look like its doing
            operands = {key: each._replace(fingerprint=0) for key, each in operands.items()}
            operands |= {(role, UNSEEN_INDEX): self._ledger.unseen(role) for role in (0, 1)}
        self._counts["backward calls"] += 1
        self._profiler.traces.write(
            mine.trace,
            name=site.name,
            layer=site.layer,
            position=call.place.position,
            ordinal=call.ordinal,
            parent=mine.parent.trace if mine.parent is not None else 0,
            slot=site.slot,
            direction=1,
            backend=site.backend,
            params=site.params,
            enqueue_ns=mine.start_ns or -1,
            start_ns=mine.start_ns or -1,
            end_ns=mine.end_ns or mine.start_ns or -1,
            operands=[operands[key] for key in sorted(operands)],
        )
