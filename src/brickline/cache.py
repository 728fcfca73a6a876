"""KernelCache: a kernel is compiled once for a device, however many threads and processes ask.

In memory, kernels that were used last are kept up to a bound; on disk, `KernelStore` keeps what the
compiler made. The first who asks for a kernel compiles it, everyone else waits for that one. A
failure is not kept: every waiter gets the same error, and the next call tries again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from brickline.device.base import Compiled, Device, Program, open_device
from brickline.errors import CacheError, CacheUnavailable, CompileError, UsageError
from brickline.kernel import Kernel
from brickline.kernel_entries import Entry
from brickline.kernel_files import Removed
from brickline.kernel_store import EntryInfo, KernelStore, callers_level
from brickline.launching import make_launcher
from brickline.symbolic import Expr

_KEY_VERSION = 1
_COUNTS = ("hits", "disk_hits", "compilations", "waits", "failures", "evictions")


@dataclass(frozen=True, eq=False)
class CachedKernel:
    """A compiled kernel with all that is needed to launch it again. Shared, never copied."""

    program: Program
    device: str
    code: str
    """The source as the compiler saw it."""
    entry_point: str
    var_names: tuple[str, ...]
    """Scalar arguments in positional order."""
    globals: tuple[int, ...]
    """The place in the signature of every buffer: slot k is argument ``globals[k]``."""
    outs: tuple[int, ...]
    """Slots that are written."""
    ins: tuple[int, ...]
    """Slots that are read."""
    host_parallel_safe: bool
    """Whether a host scheduler may overlap it with other kernels."""
    global_size: tuple[Expr, Expr, Expr]
    local_size: tuple[Expr, Expr, Expr] | None
    """Lanes of a block; None of plain C, which is called once."""
    kernel: Kernel | None
    """The declaration; None where another library compiled it."""
    key: str
    """256 bits over everything that the code depends on, in hexadecimal."""
    launch: Callable[..., None]
    """Call it with the arguments of the kernel, by position or by name."""
    resources: Mapping[str, int] = field(default_factory=dict)
    """Registers, shared and local bytes of a block, where the device says so."""
    includes: Mapping[str, str] = field(default_factory=dict)
    """Files that the source includes by itself, with their SHA-256."""
    log: str = ""
    """What the compiler said: its warnings."""
    nbytes: int = 0

    def __repr__(self) -> str:
        return f"<CachedKernel {self.entry_point} on {self.device}, {self.key[:12]}>"


@dataclass(frozen=True)
class CacheStatistics:
    """What a cache has done since it was made, in this process."""

    hits: int = 0
    """Found in memory."""
    disk_hits: int = 0
    """Loaded from disk, without a compiler."""
    compilations: int = 0
    waits: int = 0
    """Calls that waited for another thread's compilation."""
    failures: int = 0
    evictions: int = 0
    """Dropped from memory to stay within the bound."""
    compile_seconds: float = 0.0
    entries: int = 0
    """In memory now."""
    nbytes: int = 0


class _Flight:
    """One compilation that is under way, and its result."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.done = threading.Event()
        self.result: CachedKernel | None = None
        self.error: BaseException | None = None


class KernelCache:
    """Compiled kernels, in memory and on disk.

    Args:
        directory: Where compiled code is kept. Default: ``$BRICKLINE_CACHE``, else the user's cache
            directory. None with ``disk=False``, and where it cannot be made: then a RuntimeWarning
            says so, and kernels are kept in memory alone.
        max_bytes: Most bytes on disk. Default 1 GiB.
        memory_bytes: Most bytes of code kept in memory beside what is in use. Default 256 MiB.
        disk: Whether to use a disk at all. Default True.

    Raises:
        CacheError: if the directory is not the user's own, others may write to it, or it holds
            something else.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int = 1 << 30,
        memory_bytes: int = 256 << 20,
        disk: bool = True,
    ) -> None:
        if not isinstance(memory_bytes, int) or isinstance(memory_bytes, bool) or memory_bytes < 0:
            raise UsageError(
                f"memory_bytes: expected a whole number from 0 on, got {memory_bytes!r}"
            )
        self._store = _store_in(directory, max_bytes) if disk else None
        self._memory_bytes = memory_bytes
        self._reset()
        _caches.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[tuple[str, str], _Flight] = {}
        self._recent: OrderedDict[tuple[str, str], CachedKernel] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[tuple[str, str], CachedKernel] = (
            weakref.WeakValueDictionary()
        )
        self._nbytes = 0
        self._compile_seconds = 0.0
        self._counts = dict.fromkeys(_COUNTS, 0)

    @property
    def directory(self) -> Path | None:
        """Where compiled code is kept; None without a disk."""
        return None if self._store is None else self._store.directory

    @property
    def statistics(self) -> CacheStatistics:
        """What this cache has done so far."""
        with self._lock:
            return CacheStatistics(
                **self._counts,
                compile_seconds=self._compile_seconds,
                entries=len(self._recent),
                nbytes=self._nbytes,
            )

    def get_or_compile(self, kernel: Kernel, device: str | Device = "CPU") -> CachedKernel:
        """Return a kernel compiled for a device, compiling it only if nobody has.

        Raises:
            CompileError: if the compiler refuses the source.
            DeviceError: if the device or its compiler is absent.
        """
        if not isinstance(kernel, Kernel):
            raise UsageError(f"expected a Kernel, got {type(kernel).__name__}")
        name = device if isinstance(device, str) else open_device(device).name
        place = (kernel.digest, name)
        with self._lock:
            found = self._recent.get(place)
            if found is not None and not found.includes:  # the way of nearly every call
                self._recent.move_to_end(place)
                self._counts["hits"] += 1
                return found
        opened = open_device(device)
        place = (kernel.digest, opened.name)
        while True:
            with self._lock:
                found = self._alive.get(place)
                if found is not None and not _are_current(found.includes):
                    self._forget(place)
                    found = None
                if found is not None:
                    self._counts["hits"] += 1
                    self._remember(place, found)
                    return found
                flight = self._flights.get(place)
                if flight is None:
                    mine = self._flights[place] = _Flight()
                    break
            found = self._wait(flight, kernel)
            if found is not None:
                return found
        return self._fly(mine, place, kernel, opened)

    def gc(self, max_bytes: int | None = None) -> Removed | None:
        """Drop from memory what nobody uses, and from disk what exceeds a bound.

        Args:
            max_bytes: Most bytes on disk. Default: what the cache was made with.
        """
        with self._lock:
            self._recent.clear()
            self._nbytes = 0
        return None if self._store is None else self._store.gc(max_bytes)

    def clear(self) -> Removed | None:
        """Drop what nobody uses from memory, and everything from disk.

        A kernel that is in use stays loaded, and asking for it gives the same object.
        """
        with self._lock:
            self._recent.clear()
            self._nbytes = 0
        return None if self._store is None else self._store.clear()

    def entries(self) -> Iterator[EntryInfo]:
        """Yield what is on disk."""
        return iter(()) if self._store is None else self._store.entries()

    # ----------------------------------------------------------------------------------- the inside

    def _fly(
        self, flight: _Flight, place: tuple[str, str], kernel: Kernel, device: Device
    ) -> CachedKernel:
        """Load or compile for all who wait."""
        try:
            result = self._load_or_compile(kernel, device)
            with self._lock:
                self._alive[place] = result
                self._remember(place, result)
            flight.result = result
        except BaseException as error:
            flight.error = error
            with self._lock:
                self._counts["failures"] += 1
            raise
        finally:
            try:
                with self._lock:
                    self._flights.pop(place, None)
            finally:  # whatever happens, nobody waits for ever
                flight.done.set()
        return result

    def _wait(self, flight: _Flight, kernel: Kernel) -> CachedKernel | None:
        """Return what another thread makes; None where that thread was interrupted."""
        if flight.owner == threading.get_ident():
            raise CacheError(f"compiling {kernel.name} asks for {kernel.name} itself")
        with self._lock:
            self._counts["waits"] += 1
        flight.done.wait()
        if isinstance(flight.error, Exception):
            raise flight.error
        return flight.result

    def _load_or_compile(self, kernel: Kernel, device: Device) -> CachedKernel:
        key = cache_key(kernel, device)
        if self._store is None:
            return self._finish(kernel, device, key, self._compile(kernel, device))
        found = self._load(kernel, device, key)
        if found is not None:
            return found
        with self._store.locked(key):
            found = self._load(kernel, device, key)  # another process may have been first
            if found is not None:
                return found
            compiled = self._compile(kernel, device)
            found = self._finish(kernel, device, key, compiled)  # code that loads is worth keeping
            facts = {
                "name": kernel.name,
                "device": device.name,
                "language": kernel.language,
                "entry_point": compiled.entry_point,
                "kernel": kernel.to_json(),
                "resources": dict(compiled.resources),
                "compiler": dict(device.compiler_identity(kernel)),
                "includes": dict(compiled.includes),
            }
            blobs = {
                "binary": compiled.binary,
                "source": compiled.source.encode(),
                "log": compiled.log.encode(errors="replace"),
            }
            self._store.put(key, facts, blobs)
        return found

    def _load(self, kernel: Kernel, device: Device, key: str) -> CachedKernel | None:
        assert self._store is not None
        entry = self._store.get(key)
        if entry is None:
            return None
        try:
            compiled = _compiled_from_entry(entry)
            if not _are_current(compiled.includes):
                return None
            found = self._finish(kernel, device, key, compiled)
        except (KeyError, TypeError, ValueError, CompileError) as error:
            warnings.warn(
                f"kernel {kernel.name}: what {self.directory} holds of it cannot be used "
                f"({type(error).__name__}: {error}); compiling it again",
                RuntimeWarning,
                stacklevel=5,
            )
            return None
        with self._lock:
            self._counts["disk_hits"] += 1
        return found

    def _compile(self, kernel: Kernel, device: Device) -> Compiled:
        begin = time.perf_counter()
        compiled = device.compile(kernel)
        with self._lock:
            self._counts["compilations"] += 1
            self._compile_seconds += time.perf_counter() - begin
        return compiled

    def _finish(self, kernel: Kernel, device: Device, key: str, compiled: Compiled) -> CachedKernel:
        program = device.load(compiled)
        return CachedKernel(
            program=program,
            device=device.name,
            code=compiled.source,
            entry_point=compiled.entry_point,
            var_names=kernel.var_names,
            globals=kernel.globals,
            outs=kernel.outs,
            ins=kernel.ins,
            host_parallel_safe=kernel.host_parallel_safe,
            global_size=kernel.global_size,
            local_size=kernel.local_size,
            kernel=kernel,
            key=key,
            launch=make_launcher(kernel, device, program),
            resources=compiled.resources,
            includes=compiled.includes,
            log=compiled.log,
            nbytes=len(compiled.binary) + len(compiled.source),
        )

    def _forget(self, place: tuple[str, str]) -> None:
        """Let go of a kernel that is out of date."""
        self._alive.pop(place, None)
        dropped = self._recent.pop(place, None)
        if dropped is not None:
            self._nbytes -= dropped.nbytes

    def _remember(self, place: tuple[str, str], cached: CachedKernel) -> None:
        """Keep a kernel as the one used last; what is dropped lives on where it is in use."""
        if place not in self._recent:
            self._nbytes += cached.nbytes
        self._recent[place] = cached
        self._recent.move_to_end(place)
        while self._nbytes > self._memory_bytes and len(self._recent) > 1:
            _, dropped = self._recent.popitem(last=False)
            self._nbytes -= dropped.nbytes
            self._counts["evictions"] += 1


def _store_in(directory: str | os.PathLike[str] | None, max_bytes: int) -> KernelStore | None:
    """Return the store, or None where its directory cannot be made: a cache is worth no failure."""
    try:
        return KernelStore(directory, max_bytes)
    except CacheUnavailable as error:
        words = f"kernels are kept in memory alone: {error}"
        warnings.warn(words, RuntimeWarning, stacklevel=callers_level())
        return None


def _compiled_from_entry(entry: Entry) -> Compiled:
    """Return what `_load_or_compile` stored; KeyError, TypeError or ValueError of all else."""
    facts, blobs = entry.facts, entry.blobs
    entry_point, resources = facts["entry_point"], facts["resources"]
    if not isinstance(entry_point, str) or not isinstance(resources, dict):
        raise TypeError(f"entry_point is {entry_point!r:.80}, resources are {resources!r:.80}")
    return Compiled(
        binary=blobs["binary"],
        entry_point=entry_point,
        source=blobs["source"].decode(),
        log=blobs["log"].decode(errors="replace"),
        resources=resources,
        includes=dict(facts["includes"]),
    )


def _are_current(includes: Mapping[str, str]) -> bool:
    """Whether files that a source includes by itself still hold what was compiled."""
    try:
        return all(
            hashlib.sha256(Path(path).read_bytes()).hexdigest() == digest
            for path, digest in includes.items()
        )
    except OSError:
        return False


def cache_key(kernel: Kernel, device: Device) -> str:
    """Return 256 bits over everything that a compiled kernel depends on, in hexadecimal."""
    document = {
        "version": _KEY_VERSION,
        "kernel": kernel.digest,
        "device": type(device).__name__,
        "compiler": dict(device.compiler_identity(kernel)),
    }
    text = json.dumps(document, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


_caches: weakref.WeakSet[KernelCache] = weakref.WeakSet()


def _after_fork() -> None:
    """Forget compilations of threads that do not exist in the child."""
    for cache in list(_caches):
        cache._lock = threading.Lock()
        cache._flights = {}


os.register_at_fork(after_in_child=_after_fork)
