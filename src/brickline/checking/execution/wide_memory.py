"""What calls leave behind, in float64: caches and states that the next call goes on from.

In the dtype of the model they are rounded, each side's in its own way, and two sides that compute
the same would part from call to call. So a tensor that a call left natively is known again by its
contents, and what the same call left in float64 takes its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from brickline.checking.snapshot import holds_numbers
from brickline.oracle.widen import is_narrow

MOST_BYTES = 4 << 30
"""What is kept at the most; the oldest goes first."""
_Key = tuple[tuple[int, ...], torch.dtype, float]


class WideMemory:
    """Tensors as a call left them natively, with the same in float64."""

    def __init__(self) -> None:
        self._pairs: defaultdict[_Key, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self._bytes = 0

    def note(self, native: Mapping[str, torch.Tensor], wide: Mapping[str, torch.Tensor]) -> None:
        """Remember what one call left, by place."""
        for place, tensor in native.items():
            other = wide.get(place)
            if other is None or other.shape != tensor.shape or not _is_kept(tensor):
                continue
            if torch.equal(other, tensor.to(other.device, other.dtype)):
                continue  # what no call has changed
            if self._bytes > MOST_BYTES:
                self._pairs.clear()
                self._bytes = 0
            self._pairs[_key(tensor)].append((tensor.detach().clone(), other.detach().clone()))
            self._bytes += 3 * other.numel() * other.element_size()

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in float64: as a call left it, where one did."""
        known = self._known(tensor)
        return tensor.double() if known is None else known.clone()

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a call left this tensor."""
        return self._known(tensor) is not None

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if _is_kept(tensor) and self._pairs:
            for native, wide in reversed(self._pairs.get(_key(tensor), ())):
                if torch.equal(native, tensor):
                    return wide
        return None


def _is_kept(tensor: torch.Tensor) -> bool:
    return is_narrow(tensor) and holds_numbers(tensor) and bool(tensor.numel())


def _key(tensor: torch.Tensor) -> _Key:
    return tuple(tensor.shape), tensor.dtype, float(tensor.sum(dtype=torch.float64))
