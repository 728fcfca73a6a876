"""What the modules of one call take and return, as fingerprints by place.

Hooks hear of the calls of a model's sites in one thread as long as that is asked for, and are gone
afterwards. Knows nothing of why the call is made.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from brickline.adapters.torch_keeping import version_of
from brickline.adapters.torch_sites import Site
from brickline.adapters.torch_values import flatten, unobservable
from brickline.fingerprints import Fingerprint, fingerprint_bytes
from brickline.oracle.wide_calls.recurrent import Recurrent
from brickline.oracle.widen import widened

if TYPE_CHECKING:
    from brickline.fingerprint_cuda import DeviceFingerprints

Key: TypeAlias = tuple[int, int, int, int]
"""Id of the name, ordinal, role and index."""
Heard: TypeAlias = dict[Key, bytes]

FILLER = 1e30
"""Larger elements are fillers of masks: their squares would hide everything else."""
RING_RECORDS = 1 << 12


class Hearing:
    """Hears of one call.

    Args:
        sites: The sites of the model by the id of their module.
    """

    def __init__(self, sites: dict[int, Site]) -> None:
        self._sites = sites
        self._thread = threading.get_ident()
        self._ordinals: Counter[str] = Counter()
        self._open: list[tuple[Site, int]] = []
        self._records: dict[Key, bytes | int] = {}
        self._known: dict[int, tuple[Any, int, bytes | int]] = {}
        self._devices: dict[int, DeviceFingerprints] = {}
        self._labels = 0
        self._recurrent = Recurrent(wide=True, in_steps=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of the calls of sites as long as this lasts."""
        hooks = []
        try:
            for site in self._sites.values():
                if not site.is_root and not isinstance(site.module, torch.jit.ScriptModule):
                    before, after = self._hooks_of(site)
                    hooks.append(
                        site.module.register_forward_pre_hook(
                            before, with_kwargs=True, prepend=True
                        )
                    )
                    hooks.append(site.module.register_forward_hook(after, with_kwargs=True))
            yield
        finally:
            self._recurrent.close()
            for hook in hooks:
                hook.remove()

    def _hooks_of(self, site: Site) -> tuple[Any, Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return None
            self.begin(site, args, kwargs)
            return widened((args, kwargs)) if self._recurrent.enter(module) else None

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if threading.get_ident() == self._thread:
                self._recurrent.leave(module)
                self.end(site, result)

        return before, after

    def begin(self, site: Site, args: Any, kwargs: Any) -> None:
        """Hear of a call that begins."""
        ordinal = self._ordinals[site.name]
        self._ordinals[site.name] += 1
        self._open.append((site, ordinal))
        if site.recorded:
            self._take(site, ordinal, 0, (*args, *([kwargs] if kwargs else ())))

    def end(self, site: Site, result: Any) -> None:
        """Hear of the end of a call."""
        while self._open:
            current, ordinal = self._open.pop()
            if current is site:
                if site.recorded:
                    self._take(site, ordinal, 1, (result,))
                return

    def heard(self) -> Heard:
        """Return the fingerprints, once devices have taken theirs."""
        arrived: dict[int, bytes] = {}
        for device in self._devices.values():
            arrived.update(device.drain_labelled())
        found = {
            key: arrived.get(record) if isinstance(record, int) else record
            for key, record in self._records.items()
        }
        return {key: record for key, record in found.items() if record is not None}

    def _take(self, site: Site, ordinal: int, role: int, values: tuple[Any, ...]) -> None:
        tensors: list[Tensor] = []
        flatten(values, tensors, Counter())
        with _disable_current_modes():
            for index, tensor in enumerate(tensors):
                record = self._record(tensor)
                if record is not None and index < 1000:
                    self._records[site.name_id, ordinal, role, index] = record

    def _record(self, tensor: Tensor) -> bytes | int | None:
        if unobservable(tensor):
            return None
        known = self._known.get(id(tensor))
        version = version_of(tensor)
        if known is not None and known[0]() is tensor and known[1] == version >= 0:
            return known[2]
        taken = self._on_device(tensor) if tensor.is_cuda else _on_host(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), version, taken
        return taken

    def _on_device(self, tensor: Tensor) -> int:
        device = _ring_of(tensor.get_device())
        self._devices[tensor.get_device()] = device
        self._labels += 1
        device.take(without_fillers(tensor) if tensor.is_floating_point() else tensor, self._labels)
        return self._labels


@cache
def _ring_of(number: int) -> DeviceFingerprints:
    from brickline.fingerprint_cuda import DeviceFingerprints

    return DeviceFingerprints(number, RING_RECORDS)


def _on_host(tensor: Tensor) -> bytes:
    record = fingerprint_bytes(tensor)
    if tensor.is_floating_point():
        row = Fingerprint(record)
        if row.inf_count or row.absmax > FILLER:
            return fingerprint_bytes(without_fillers(tensor))
    return record


def without_fillers(tensor: Tensor) -> Tensor:
    """Return a tensor in which the fillers of masks are as large as squares allow."""
    return tensor.clamp(-FILLER, FILLER)
