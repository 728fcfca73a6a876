"""Models that nobody named: every module that is called outside a recorded one is a model.

`brickline run --torch` records a program's models without a word in the program. The first call of
a module at the top is heard of natively; calls inside a model cost nothing more.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from brickline import _core
from brickline.adapters.recording import RecordOptions
from brickline.adapters.torch_calls import Root
from brickline.adapters.torch_recorder import Recorder
from brickline.adapters.torch_sites import device_of, name_of
from brickline.profiler import BrickProfiler


class RootFinder:
    """Records every model of the process, from `install` to `close`.

    The first model has plain paths as names; those of each further one begin with its class.
    """

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self._recorder: Recorder | None = None
        self._inside: dict[int, nn.Module] = {}
        self._names: set[str] = set()
        self._lock = threading.RLock()

    def install(self) -> None:
        """Hear of models from now on."""
        _core.gate_calls(nn.Module.__dict__["__call__"], self._found)

    def close(self) -> dict[str, Any] | None:
        """Hear of no more models and finish; give the facts, or None where no model was called."""
        _core.ungate_calls()
        if self._recorder is None:
            return None
        self._recorder.close()
        return self._recorder.facts()

    def _found(self, module: Any) -> None:
        with self._lock:
            if not isinstance(module, nn.Module) or id(module) in self._inside:
                return
            try:
                self._record(module)
            except Exception as error:
                if self._recorder is None:  # there is no run to say it in
                    raise
                self._inside[id(module)] = module
                self._recorder.failures.record_failure("beginning to record a model", error)

    def _record(self, module: nn.Module) -> None:
        recorder = self._recorder
        if recorder is None:
            profiler = BrickProfiler(name_of(module), enabled=True, device=device_of(module))
            recorder = self._recorder = Recorder(profiler, self._options)
        prefix = self._prefix(module, self._taken_over(recorder, module))
        recorder.attach(module, prefix)
        self._inside.update((id(each), each) for each in module.modules())

    def _taken_over(self, recorder: Recorder, module: nn.Module) -> list[Root]:
        """Detach the models that turn out to be parts of this one."""
        parts = {id(each) for each in module.modules()}
        found = [root for root in recorder.roots if id(root.model) in parts]
        for root in found:
            recorder.detach(root)
            recorder.roots.remove(root)
            self._names.discard(root.name)
        return found

    def _prefix(self, module: nn.Module, parts: list[Root]) -> str:
        recorder = self._recorder
        name = name_of(module)
        if recorder is not None and not recorder.roots:
            self._names.add(name)
            return ""
        number, unique = 1, name
        while unique in self._names:
            number += 1
            unique = f"{name}_{number}"
        self._names.add(unique)
        return unique
