"""The recorder: calls of modules become traces, entries of bricks and steps of a run.

It watches the `forward` of every site and hears of each call before and after. Owns positions,
ordinals and the nesting of calls in each thread; tensors are the ledger's matter, gradients and
ops have modules of their own. It never raises into the model: what cannot be observed is counted,
and what breaks here is kept in the run as a failure of brickline.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from brickline import _core
from brickline.adapters.recording import RecordOptions
from brickline.adapters.torch_calls import Call, Place, Root, ThreadState, tokens_of
from brickline.adapters.torch_gradients import Gradients
from brickline.adapters.torch_keeping import Keeper
from brickline.adapters.torch_ops import OpMode, dispatch_cost_ns
from brickline.adapters.torch_rows import Rows, with_role, without_fingerprint
from brickline.adapters.torch_sites import (
    PARAMETER_INDEX,
    UNSEEN_INDEX,
    Site,
    forward_of,
    name_of,
    sites_of,
)
from brickline.adapters.torch_tensors import Ledger, held_of
from brickline.adapters.torch_twins import Twins
from brickline.adapters.torch_values import flatten
from brickline.errors import BricklineError, RunError
from brickline.profiler import BrickProfiler
from brickline.run.failures import FailureLog

FULL_DISK = "calls of the model that are missing in whole or in part: the disk became full"


class Recorder:
    """Records models into the run of one profiler.

    Args:
        profiler: An enabled one; it is closed with the recorder.
        options: What is recorded.
    """

    def __init__(self, profiler: BrickProfiler, options: RecordOptions) -> None:
        self.profiler = profiler
        self.options = options
        self.unobserved: Counter[str] = Counter()
        self.failures = FailureLog(self._note_failures)
        self.counts: Counter[str] = Counter()
        self.state = ThreadState()
        self.roots: list[Root] = []
        run = profiler.path
        keeper = Keeper(run if run is not None else Path(), options.tensors, self.unobserved)
        self.rows = Rows(profiler)
        self.ledger = Ledger(profiler.traces, self.rows, self.unobserved, self.failures, keeper)
        self.gradients = Gradients(profiler, self.ledger, self.counts, self.state, self.failures)
        self._ops = OpMode(self) if options.level == "op" else None
        self._twins = Twins(self) if options.twin else None
        self._on_cuda = self._is_awake = False
        self._counts_before = _core.watch_counts()
        self._facts: dict[str, Any] | None = None
        self._now = profiler._now_ns
        self._reserve = profiler.traces.reserve
        self._process = os.getpid()
        self.module_calls = 0
        self.seed: int | None = None
        """Torch's, when the first recorded call began."""
        self._book = _core.CallBook(
            profiler,
            profiler.traces._ids,
            self.ledger.book,
            self._spread,
            self._failed,
            Tensor,
            nn.Parameter,
            profiler._rank,
            self.rows.string("CPU"),
            self.rows.string("CUDA"),
        )
        self._may_go_fast = options.level == "module" and options.tensors == "none"
        _core.set_frame_switch(torch._C._dynamo.eval_frame.set_eval_frame)
        self.dispatch_ns = 0
        """What it costs an op that the mode sees it at all."""
        if self._ops is not None:
            self.dispatch_ns = round(dispatch_cost_ns()) if profiler._has_costs else 0
            self._ops.enter()

    # ------------------------------------------------------------------------------ what is watched

    def attach(self, model: nn.Module, prefix: str = "") -> Root:
        """Watch the modules of a model."""
        root = Root(model, prefix or name_of(model))
        self.roots.append(root)
        self._on_cuda = self._on_cuda or torch.cuda.is_available()
        for site in sites_of(model, self.options, prefix):
            site.root = root
            found = forward_of(site.module)
            if found is None:
                self.unobserved["modules whose forward is no Python function"] += 1
                continue
            site.name_id = self.rows.string(site.name)
            site.params_id = self.rows.string(site.params)
            self._watch(root, site, *found)
            if self._twins is not None:
                self._twins.add(root, site)
        return root

    def _watch(self, root: Root, site: Site, key: Any, function: Any) -> None:
        brick = None
        if site.recorded:
            layer = site.layer if site.layer >= 0 else None
            brick = self.profiler.brick(site.brick, layer=layer)
            site.slot = brick.slot
        before: Any = None
        after: Any = None
        if self.options.fingerprints:
            before, after = self._before, self._after
        elif site.is_root:
            before, after = self._begin_root, self._end_root
        try:
            _core.watch_call(
                key, function, brick, before, after, site, site.is_compiled, self._fast(site)
            )
        except BricklineError as error:
            self.unobserved[f"modules that could not be watched ({error})"] += 1
            return
        root.keys.append(key)

    def _fast(self, site: Site) -> tuple[Any, ...] | None:
        """Return what the native book needs to write a site's calls; None: Python writes them."""
        if not self.options.fingerprints or site.is_root or site.is_compiled:
            return None
        return (
            self._book,
            site.name,
            site.name_id,
            site.params_id,
            self.rows.string(raised(site.params)),
            site.slot,
            site.layer,
            *site.tensors,
            site.mutates,
        )

    def _spread(self, value: Any) -> list[Tensor]:
        found: list[Tensor] = []
        flatten(value, found, self.unobserved)
        return found

    def _failed(self, error: BaseException) -> None:
        self.failures.record_failure("recording the tensors of a call", error)

    def _note_failures(self, documents: list[dict[str, Any]]) -> None:
        """Put failures into the run at once: the process may be killed before `close`."""
        writer = self.profiler._writer
        if writer is not None and self._facts is None:
            with suppress(RunError):  # a full disk; `close` tries again
                writer.note(recording={"failures": documents})

    def detach(self, root: Root) -> None:
        """Watch a model no more."""
        for key in root.keys:
            _core.unwatch_call(key)
        root.keys.clear()

    def close(self) -> None:
        """Watch nothing more, write what is still to come, note the facts and close the run."""
        if self._facts is not None:
            return
        for root in self.roots:
            self.detach(root)
        if self._ops is not None:
            self._ops.exit()
        if self._twins is not None:
            self._twins.close()
        self.gradients.close()
        is_cut = self._is_cut()
        try:
            self.ledger.drain()
        finally:
            if is_cut:
                self.unobserved[FULL_DISK] += 1  # the call in which it happened
            self._facts = self.facts()
            # The program has been warned of a full disk; it is not to end here for it.
            with suppress(RunError) if is_cut else nullcontext():
                self._finish(self._facts)

    def _finish(self, facts: dict[str, Any]) -> None:
        writer = self.profiler._writer
        try:
            if writer is not None:
                writer.note(recording=facts)
        finally:
            self.profiler.close()

    # ---------------------------------------------------------------------------- calls, time alone

    def _begin_root(self, site: Site, args: Any, kwargs: Any, compiled: bool) -> Any:
        """Begin a step; give False where the call is not to be recorded."""
        call = None
        try:
            began_ns = self._now()
            place = self._place(site)
            if place is None:
                return False
            call = Call(site, place, 0)
            self.state.stack.append(call)
            self.counts["root calls"] += 1
            call.step = self._begin_step(args, kwargs)
            self.profiler._spend(self._now() - began_ns)
            return call
        except Exception as error:
            self.failures.record_failure("beginning a call of the model", error)
            self._abandon(call)
            return None

    def _end_root(self, call: Call, result: Any, failed: bool) -> None:
        try:
            self._pop(call)
            if self._facts is None:
                self._end_step(call)
        except Exception as error:
            self.failures.record_failure("ending a call of the model", error)
            self._abandon(call)

    def _place(self, site: Site) -> Place | None:
        """Return where in the run a call of a root is; None where it is not to be recorded."""
        root: Root = site.root
        if any(call.site.root is root for call in self.state.stack):
            return self.state.places[id(root)]
        if self._is_capturing():
            self.unobserved["calls during the capture of a CUDA graph"] += 1
            return None
        if self._is_cut():
            self.unobserved[FULL_DISK] += 1
            return None
        place = Place(next(root.calls))
        if not self.options.wants(place.position):
            self.counts["calls of the model left out by steps="] += 1
            return None
        if self.seed is None:
            self.seed = int(torch.initial_seed())
        self.state.places[id(root)] = root.latest = place
        return place

    def _is_cut(self) -> bool:
        """Whether the disk became full: nothing more is written."""
        return not self.profiler.is_enabled() and bool(self.profiler._where()["full_disk"])

    def _begin_step(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        self._process = os.getpid()  # another one after a fork
        tokens, phase = tokens_of(args, kwargs)
        step = self.profiler.step(tokens=tokens, phase=phase)
        step.__enter__()
        return step

    def _end_step(self, call: Call) -> None:
        step, call.step = call.step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _abandon(self, call: Call | None) -> None:
        """Undo what a call has begun, where recording it broke: the thread is as it was."""
        if call is None:
            return
        try:
            if self._twins is not None:
                self._twins.end(call)
            if call in self.state.stack:
                self._pop(call)
            if self._ops is not None:
                self._ops.come_back()
                if call.enters:
                    self._ops.exit()
            self._end_step(call)
        except Exception as error:
            self.failures.record_failure("giving up a call", error)

    def _is_capturing(self) -> bool:
        if not self._on_cuda:
            return False
        self._is_awake = self._is_awake or torch.cuda.is_initialized()
        return self._is_awake and bool(torch._C._cuda_isCurrentStreamCapturing())

    def _pop(self, call: Call) -> None:
        stack = self.state.stack
        while stack and stack.pop() is not call:
            pass  # an inner call that another thread's recording left behind

    # --------------------------------------------------------------------- calls, with fingerprints

    def _before(self, site: Site, args: Any, kwargs: Any, compiled: bool) -> Any:
        """Begin a call; give False to let it pass aside, None not to hear of its end."""
        if self._facts is not None:  # closed by another thread meanwhile
            return None
        if self.state.replaying:
            return False
        call = None
        try:
            if self._twins is not None and not self.state.stack:
                self._twins.wait()
            began_ns = self._now()
            call = self._call_of(site)
            if call is None:
                return False
            if call.is_outermost and self._twins is not None:
                # No part of any time: neither of the step, which has not begun, nor of recording.
                twin_ns = self._now()
                self._twins.begin(call, args, kwargs, compiled=compiled)
                began_ns += self._now() - twin_ns
            place, state = call.place, self.state
            if call.is_outermost:
                call.step = self._begin_step(args, kwargs)
                where = self.profiler._where()
                place.step, place.phase = where["step"], where["phase"]
                place.thread = threading.get_native_id()
            if site.recorded:
                state.observing = True
                try:
                    self._observe_inputs(call, args, kwargs)
                except Exception as error:
                    call.is_whole = False
                    self.failures.record_failure("recording the inputs of a call", error)
                finally:
                    state.observing = False
            if self._ops is not None:
                call.enters = call.is_outermost and self._ops.enter()
                if compiled or site.is_compiled:
                    self._ops.leave()
            state.stack.append(call)
            if call.is_outermost:
                fast = self._may_go_fast and not torch.is_grad_enabled()
                self._book.begin(
                    place.position,
                    call.trace,
                    place.step,
                    place.phase,
                    place.thread,
                    self._process,
                    fast,
                    place.ordinals,
                )
            call.start_ns = self._now()
            self.profiler._spend(call.start_ns - began_ns)
            return call
        except Exception as error:
            self.failures.record_failure("beginning a call", error)
            self._abandon(call)
            return None

    def _call_of(self, site: Site) -> Call | None:
        """Return a call that begins, where it is in the run; None where it is not recorded."""
        state = self.state
        stack = state.stack
        is_outermost = site.is_root and not any(call.site.root is site.root for call in stack)
        if is_outermost:
            found = self._place(site)
            if found is None:
                return None
            place = found
            self.counts["root calls"] += 1
            self.ledger.begin_step()
        else:
            if self._is_capturing():
                self.unobserved["calls during the capture of a CUDA graph"] += 1
                return None
            if stack and stack[-1].site.root is site.root:
                place = stack[-1].place
            else:
                place = state.places.get(id(site.root)) or site.root.latest
                if not stack and not self.options.wants(place.position):
                    return None
        call = Call(site, place, self._book.current() or (stack[-1].trace if stack else 0))
        call.is_outermost = is_outermost
        return call

    def _observe_inputs(self, call: Call, args: Any, kwargs: Any) -> None:
        site, ledger, known, rows = call.site, self.ledger, call.known, call.operands
        call.trace = trace = self._reserve()
        prefix = trace.to_bytes(8, "little")
        ordinals = call.place.ordinals
        call.ordinal = ordinal = ordinals.get(site.name, 0)
        ordinals[site.name] = ordinal + 1
        inputs = call.inputs
        for each in args:
            if type(each) is Tensor:
                inputs.append(each)
            else:
                flatten(each, inputs, self.unobserved)
        if kwargs:
            flatten(kwargs, inputs, self.unobserved)
        for index, tensor in enumerate(inputs):
            found = ledger.row(tensor)
            known.append(found)
            rows += (prefix, with_role(found, 0, index) if index else found)
        index = PARAMETER_INDEX
        # Buffers are looked at in every step: batch norm writes to its own uncounted.
        for own, look in zip(site.tensors, (ledger.weight_row, ledger.row), strict=True):
            for tensor in own.values():
                if tensor is None:
                    continue
                found = look(tensor)
                known.append(found)
                rows += (prefix, with_role(found, 0, index))
                index += 1
        if site.mutates:
            ledger.flush()
        if torch.is_grad_enabled():
            self.gradients.begin(call, self._weights_of(site), self.state.stack)

    def _weights_of(self, site: Site) -> list[Tensor]:
        return [each for own in site.tensors for each in own.values() if each is not None]

    def _after(self, call: Call, result: Any, failed: bool) -> None:
        try:
            if self._twins is not None and call.is_outermost:
                self._twins.end(call)
            written = self._book.end() if call.is_outermost else 0
            if self._facts is not None:
                self._pop(call)
                return
            end_ns = self._now()
            self.module_calls += written
            self.profiler.traces.write_rows(written, b"", b"")
            self._pop(call)
            if self._ops is not None:
                self._ops.come_back()
            if call.site.recorded and call.trace != call.parent:
                self.state.observing = True
                try:
                    self._observe_outputs(call, result, failed, end_ns)
                except Exception as error:
                    call.is_whole = False
                    self.failures.record_failure("recording the outputs of a call", error)
                finally:
                    self.state.observing = False
                if not call.is_written:
                    self._write_unseen(call, failed, end_ns)
            if call.enters and self._ops is not None:
                self._ops.exit()
            if call.is_outermost:
                self._end_step(call)
                self.ledger.end_step()
            call.inputs, call.operands, call.known = (
                [],
                [],
                [],
            )  # its gradients may hold it for long
            self.profiler._spend(self._now() - end_ns)
        except Exception as error:
            self.failures.record_failure("ending a call", error)
            self._abandon(call)

    def _observe_outputs(self, call: Call, result: Any, failed: bool, end_ns: int) -> None:
        site, ledger, rows = call.site, self.ledger, call.operands
        if not call.is_whole:
            return
        outputs: list[Tensor] = []
        if type(result) is Tensor:
            outputs.append(result)
        else:
            flatten(result, outputs, self.unobserved)
        prefix = call.trace.to_bytes(8, "little")
        made = []
        for index, tensor in enumerate(outputs):
            found = ledger.row(tensor)
            made.append(found)
            rows += (prefix, with_role(found, 1, index))
        self._write_call(call, outputs, failed, end_ns)
        if call.gradients is not None:
            self.gradients.end(call.gradients, outputs)
        keeper = ledger.keeper
        if keeper.keeps_suspects:
            tensors = [*call.inputs, *self._weights_of(site)]
            inputs, made_of = held_of(call.known, tensors), held_of(made, outputs)
            keeper.called(call.trace, call.parent, inputs, made_of, named=site.named)

    def _write_unseen(self, call: Call, failed: bool, end_ns: int) -> None:
        """Write a call that broke: its tensors have no fingerprints, and there may be others.

        With some of them, what came of an input that is missing would look like its own doing.
        """
        known = [without_fingerprint(row) for row in call.operands[1 : 2 * len(call.known) : 2]]
        known += [with_role(self.rows.unseen, role, UNSEEN_INDEX) for role in (0, 1)]
        prefix = call.trace.to_bytes(8, "little")
        call.operands = [piece for row in known for piece in (prefix, row)]
        self._write_call(call, [], failed, end_ns)

    def _write_call(self, call: Call, outputs: list[Tensor], failed: bool, end_ns: int) -> None:
        """Write a call that has ended."""
        site = call.site
        shown = outputs[0] if outputs else call.inputs[0] if call.inputs else None
        is_cuda = shown is not None and shown.is_cuda
        if shown is not None and not (is_cuda or shown.is_cpu):
            site.backend = shown.device.type.upper()
        else:
            site.backend = "CUDA" if is_cuda else "CPU"
        params = self.rows.string(raised(site.params)) if failed else site.params_id
        device = shown.get_device() if is_cuda and shown is not None else -1
        row = self.rows.of_call(call, self._process, end_ns, params, device)
        self.module_calls += self.rows.add(row, call.operands)
        call.is_written = True

    # ---------------------------------------------------------------------------- what was recorded

    def facts(self) -> dict[str, Any]:
        """Return what was recorded and what could not be, for the manifest."""
        if self._facts is not None:
            return self._facts
        aside, unknown = (
            now - before
            for now, before in zip(_core.watch_counts(), self._counts_before, strict=True)
        )
        twin = {}
        if self._twins is not None:
            aside, unknown = aside - self._twins.aside[0], unknown - self._twins.aside[1]
            twin = {"twin": self._twins.facts()}
        unobserved = dict(self.unobserved)
        modules = {"module calls": self.module_calls} if self.module_calls else {}
        if aside:
            unobserved["calls inside compiled modules, captured graphs or calls left out"] = aside
        # With a choice of modules, the others are left out on purpose.
        if unknown and not (self.options.include or self.options.exclude):
            unobserved["calls of modules that are no part of the model"] = unknown
        return {
            "level": self.options.level,
            "model": ", ".join(root.name for root in self.roots),
            "fingerprints": self.options.fingerprints,
            "tensors": self.options.tensors,
            "include": list(self.options.include),
            "exclude": list(self.options.exclude),
            "steps": self.options.stated_steps,
            "counts": dict(self.counts) | modules,
            "fingerprints_taken": self.ledger.fingerprints,
            "tensors_saved": self.ledger.keeper.saved,
            "seed": self.seed,
            "unobserved": unobserved,
            "failures": self.failures.documents(),
            **twin,
        }


def raised(params: str) -> str:
    """Return a trace's params with the word that the call raised."""
    return f'{params[:-1]}, "raised": true}}'
