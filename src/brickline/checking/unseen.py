"""Memory that changed although no operation was seen to write it.

A kernel that is launched past PyTorch (Triton, ctypes, a library of one's own) leaves no trace but
its result. `Unseen` sums the bytes of what operations made and looks again when they are read.
Does not see a kernel that writes what it found there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

LARGEST_BYTES = 1 << 28
"""Larger memory is not followed."""


class Unseen:
    """Sums of the memory that was made by operations, as long as it lives."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}

    def note(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Remember what an operation has just made or written."""
        for each in tensors:
            if each is None or not _is_plain(each):
                continue
            storage = each.untyped_storage()
            self._sums[storage._cdata] = (StorageWeakRef(storage), _sum(storage))

    def changed(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return how many tensors are not as they were left, and take them as they are now."""
        found = 0
        for each in tensors:
            if not _is_plain(each):
                continue
            storage = each.untyped_storage()
            known = self._sums.get(storage._cdata)
            if known is None:
                continue
            if known[0].expired():
                del self._sums[storage._cdata]
                continue
            now = _sum(storage)
            if not torch.equal(known[1], now):
                found += 1
                self._sums[storage._cdata] = (known[0], now)
        return found

    def forget(self) -> None:
        """Drop what is no longer alive."""
        self._sums = {key: each for key, each in self._sums.items() if not each[0].expired()}


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return 0 < int(tensor.untyped_storage().nbytes()) <= LARGEST_BYTES


def _sum(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a sum of the memory's words, and of its last bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    # The second sum tells the order apart, as a sum alone would not.
    half = words[: words.numel() // 2 * 2].view(-1, 2)
    return torch.stack([words.sum(), half[:, 0].sum(), flat[whole:].sum(dtype=torch.int64)])
