"""Kernel sources by the hash of their content.

Answers "which source is behind this hash" for graph nodes and traces. Compiles nothing and knows
no device; the hash is FNV-1a 64 over all bytes of the source, PTX or cubin.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from brickline import _core
from brickline.errors import GraphError


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One source and everything it was registered as."""

    source_hash: int
    source: bytes
    names: tuple[str, ...]
    """Every name it was registered under, in order; the same source may have several."""
    paths: tuple[str, ...]
    """Every path it was registered with, in order."""

    @property
    def text(self) -> str:
        """The source as text; bytes that are not UTF-8 are replaced."""
        return self.source.decode("utf-8", "replace")


class KernelRegistry:
    """Kernel sources, registered once and looked up by hash. Safe to use from several threads.

    Example:
        >>> registry = KernelRegistry()
        >>> source_hash = registry.register("rms_norm", "__global__ void rms_norm() {}")
        >>> registry.lookup_name(source_hash)
        'rms_norm'
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[int, KernelSource] = {}

    @staticmethod
    def hash_source(source: str | bytes) -> int:
        """Return the FNV-1a 64 hash of all bytes of a source (text as UTF-8)."""
        return _core.fnv1a_64(source.encode() if isinstance(source, str) else bytes(source))

    def register(self, name: str, source: str | bytes, path: str | None = None) -> int:
        """Keep a source and return its hash.

        Args:
            name: The kernel's name; a second name for the same source is kept beside the first.
            source: Source text, PTX or a binary image.
            path: Where it was read from. Default None, for sources made in memory.

        Raises:
            GraphError: Another source with this hash is registered.
        """
        content = source.encode() if isinstance(source, str) else bytes(source)
        source_hash = self.hash_source(content)
        with self._lock:
            known = self._sources.get(source_hash)
            if known is not None and known.source != content:
                raise GraphError(
                    f"expected one source per hash, got a second one for 0x{source_hash:016x} "
                    f"({name!r} beside {known.names[0]!r}); register it in a KernelRegistry of "
                    "its own"
                )
            names = known.names if known else ()
            paths = known.paths if known else ()
            if name not in names:
                names += (name,)
            if path is not None and path not in paths:
                paths += (path,)
            self._sources[source_hash] = KernelSource(source_hash, content, names, paths)
        return source_hash

    def lookup(self, source_hash: int) -> KernelSource | None:
        """Return what is known of a hash, or None."""
        return self._sources.get(source_hash)

    def lookup_name(self, source_hash: int) -> str | None:
        """Return the latest name of a hash, or None; `lookup` has all of them."""
        known = self._sources.get(source_hash)
        return known.names[-1] if known else None

    def lookup_path(self, source_hash: int) -> str | None:
        """Return the latest path of a hash, or None."""
        known = self._sources.get(source_hash)
        return known.paths[-1] if known and known.paths else None

    @property
    def hashes(self) -> tuple[int, ...]:
        """Every hash, in order of registration."""
        with self._lock:
            return tuple(self._sources)

    def __contains__(self, source_hash: object) -> bool:
        return source_hash in self._sources

    def __len__(self) -> int:
        return len(self._sources)
