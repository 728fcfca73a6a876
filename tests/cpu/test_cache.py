"""The kernel cache: one compilation per key, whoever asks and whatever happens to the disk."""

from __future__ import annotations

import errno
import gc
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threads_together import outcomes_in_threads

import brickline as bl
from brickline import kernel_store
from brickline.cache import CachedKernel, KernelCache, cache_key
from brickline.device import base, cpu
from brickline.device.base import Compiled, open_device
from brickline.device.null import NullDevice
from brickline.errors import CacheError, CompileError, DeviceError, UsageError
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import residual

CPU = open_device("CPU")
REAL = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)

needs_compiler = pytest.mark.skipif(REAL is None, reason="no C++ compiler on the PATH")

SIGNATURE = '[Param("y", "f32", 1, "write")]'
PRELUDE = f"""\
import sys, threading
import numpy as np
from brickline.cache import KernelCache
from brickline.kernel import Kernel, Param
def constant(number):
    source = "void constant(float* y) {{ *y = %d; }}" % number
    return Kernel("constant", source, {SIGNATURE}, language="c")
def value_of(cached):
    y = np.zeros(1, np.float32)
    cached.launch(y)
    return int(y[0])
"""


def constant(number: int) -> Kernel:
    source = f"void constant(float* y) {{ *y = {number}; }}"
    return Kernel("constant", source, [Param("y", "f32", 1, "write")], language="c")


def value_of(cached: CachedKernel) -> int:
    y = np.zeros(1, np.float32)
    cached.launch(y)
    return int(y[0])


class CompilerStarts:
    """A compiler that counts its starts, and can be told to be slow or to fail."""

    def __init__(self, directory: Path) -> None:
        self.log, self.broken = directory / "starts", directory / "broken"
        self.path = directory / "counting-g++"
        self.path.write_text(
            f"#!/bin/sh\necho start >> '{self.log}'\nsleep 0.2\n"
            f"if [ -e '{self.broken}' ]; then echo 'out of order' >&2; exit 1; fi\n"
            f'exec {REAL} "$@"\n',
            encoding="utf-8",
        )
        self.path.chmod(0o700)

    @property
    def count(self) -> int:
        return len(self.log.read_text(encoding="utf-8").split()) if self.log.exists() else 0


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompilerStarts]:
    counting = CompilerStarts(tmp_path)
    monkeypatch.setenv("BRICKLINE_CXX", str(counting.path))
    cpu.find_compiler.cache_clear()
    yield counting
    monkeypatch.undo()
    cpu.find_compiler.cache_clear()


class Fake(NullDevice):
    """A device whose compiler is the test's."""

    name = "FAKE"

    def __init__(self, compiler: Callable[[Kernel], bytes] = lambda kernel: b"code") -> None:
        super().__init__()
        self.compiler, self.compiled = compiler, 0

    def compile(self, kernel: Kernel) -> Compiled:
        self.compiled += 1
        return Compiled(self.compiler(kernel), kernel.short, kernel.source)


def numbered(number: int) -> Kernel:
    source = f"BRICKLINE void numbered(Block& block, float* y) {{ y[0] = {number:04d}; }}"
    return Kernel("numbered", source, [Param("y", "f32", 1, "write")])


def python(
    code: str, *arguments: object, package: Path = Path(bl.__file__).parent
) -> subprocess.Popen[str]:
    """Start a program that sees the same brickline as this one, or a copy of it."""
    path = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def finish(program: subprocess.Popen[str], text: str | None = None) -> str:
    out, err = program.communicate(text, timeout=60)
    assert (program.returncode, err) == (0, "")
    return out


# ------------------------------------------------------------------------------------- what is kept


def test_the_fields_of_a_cached_kernel(tmp_path: Path) -> None:
    kernel = Kernel(
        "fields",
        "BRICKLINE void fields(Block& block, float* a, int64_t n, const float* b, float s, "
        "float* c) {}",
        [
            Param("a", "f32", "n", "write"),
            Scalar("n", low=1),
            Param("b", "f32", "n"),
            Scalar("s", "f32"),
            Param("c", "f32", "n", "read-write"),
        ],
        global_size="ceil_div(n, 64)",
        local_size=64,
        host_parallel_safe=False,
    )
    cache = KernelCache(tmp_path / "cache")
    cached = cache.get_or_compile(kernel, "NULL")
    assert cached.kernel is kernel
    assert cached.device == "NULL"
    assert cached.code == kernel.source
    assert cached.entry_point == kernel.short
    assert cached.var_names == ("n", "s")
    assert cached.globals == (0, 2, 4)
    assert cached.outs == (0, 2)
    assert cached.ins == (1, 2)
    assert cached.host_parallel_safe is False
    assert cached.global_size == kernel.global_size
    assert cached.local_size == kernel.local_size
    assert cached.key == cache_key(kernel, open_device("NULL"))
    assert cached.nbytes == len(kernel.source)
    assert cached.program.function == 0
    assert repr(cached) == f"<CachedKernel {kernel.short} on NULL, {cached.key[:12]}>"
    with pytest.raises(AttributeError):
        cached.device = "CPU"  # type: ignore[misc]


@needs_compiler
def test_a_loaded_kernel_is_the_compiled_one(tmp_path: Path) -> None:
    first = KernelCache(tmp_path / "cache").get_or_compile(constant(5))
    again = KernelCache(tmp_path / "cache").get_or_compile(constant(5))
    assert again is not first
    for field in ("device", "code", "entry_point", "key", "resources", "nbytes", "outs"):
        assert getattr(again, field) == getattr(first, field)
    assert (value_of(first), value_of(again)) == (5, 5)
    assert first.local_size is None


def test_what_is_no_kernel_or_no_device() -> None:
    cache = KernelCache(disk=False)
    for wrong in (None, "kernel", Kernel):
        with pytest.raises(UsageError, match="expected a Kernel, got"):
            cache.get_or_compile(wrong)  # type: ignore[arg-type]
    for device in ("GPU", "", "CPU:1", None, 3, [], {}):
        with pytest.raises(DeviceError, match=r"unknown device|there is one CPU"):
            cache.get_or_compile(numbered(1), device)  # type: ignore[arg-type]
    assert cache.statistics.failures == 0


def test_a_device_by_any_of_its_names_is_one_device() -> None:
    cache, device = KernelCache(disk=False), Fake()
    first = cache.get_or_compile(numbered(1), "NULL")
    assert cache.get_or_compile(numbered(1), "null") is first
    assert cache.get_or_compile(numbered(1), "NULL:0") is first
    assert cache.get_or_compile(numbered(1), open_device("NULL")) is first
    assert cache.get_or_compile(numbered(1), device) is not first
    assert cache.get_or_compile(numbered(1), device) is cache.get_or_compile(numbered(1), device)
    assert device.compiled == 1


def test_a_cache_without_a_disk() -> None:
    cache = KernelCache(disk=False)
    assert cache.directory is None
    assert list(cache.entries()) == []
    cache.get_or_compile(numbered(1), "NULL")
    assert cache.gc() is None
    assert cache.clear() is None


def test_the_default_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRICKLINE_CACHE", str(tmp_path / "chosen"))
    assert KernelCache().directory == tmp_path / "chosen"


# ------------------------------------------------------------------------------------ single flight


@needs_compiler
def test_threads_and_processes_compile_a_cold_key_once(
    starts: CompilerStarts, tmp_path: Path
) -> None:
    code = """
cache, kernel, found = KernelCache(sys.argv[1]), constant(7), []
def work():
    ready.wait()
    found.append(cache.get_or_compile(kernel))
ready = threading.Barrier(9)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
print("ready", flush=True)
sys.stdin.readline()
ready.wait()
for thread in threads: thread.join()
facts = cache.statistics
assert len(found) == 8 and len({id(each) for each in found}) == 1
assert facts.compilations + facts.disk_hits == 1 and facts.failures == 0, facts
assert facts.waits + facts.hits == 7, facts
print(facts.compilations, value_of(found[0]))
"""
    programs = [python(code, tmp_path / "cache") for _ in range(4)]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("go\n")
        program.stdin.flush()
    lines = sorted(finish(program).split() for program in programs)
    assert lines == [["0", "7"]] * 3 + [["1", "7"]]
    assert starts.count == 1


@needs_compiler
def test_a_warm_process_starts_no_compiler(starts: CompilerStarts, tmp_path: Path) -> None:
    code = """
cache = KernelCache(sys.argv[1])
print([value_of(cache.get_or_compile(constant(number))) for number in range(3)])
print(cache.statistics.compilations, cache.statistics.disk_hits)
"""
    assert finish(python(code, tmp_path / "cache")) == "[0, 1, 2]\n3 0\n"
    assert starts.count == 3
    assert finish(python(code, tmp_path / "cache")) == "[0, 1, 2]\n0 3\n"
    assert starts.count == 3


@needs_compiler
def test_a_failure_is_everyones_and_not_kept(starts: CompilerStarts, tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    starts.broken.touch()
    outcomes = outcomes_in_threads(8, lambda _: cache.get_or_compile(constant(1)))
    assert all(isinstance(each, CompileError) for each in outcomes)
    assert all("out of order" in str(each) for each in outcomes)
    facts = cache.statistics
    assert len({id(each) for each in outcomes}) == facts.failures == starts.count
    assert facts.waits + facts.failures == 8
    assert facts.waits > 0
    assert list(cache.entries()) == []
    attempts = starts.count
    with pytest.raises(CompileError, match="out of order"):
        cache.get_or_compile(constant(1))
    assert starts.count == attempts + 1, "the next call tries again"
    starts.broken.unlink()
    assert value_of(cache.get_or_compile(constant(1))) == 1
    assert cache.statistics.compilations == 1


def test_every_waiter_gets_the_very_same_error() -> None:
    entered, leave = threading.Event(), threading.Event()
    error = CompileError("refused", log="words")

    def refuse(kernel: Kernel) -> bytes:
        entered.set()
        leave.wait(20)
        raise error

    cache, device = KernelCache(disk=False), Fake(refuse)
    outcomes: list[BaseException] = []

    def work() -> None:
        try:
            cache.get_or_compile(numbered(1), device)
        except CompileError as raised:
            outcomes.append(raised)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert entered.wait(20)
    while cache.statistics.waits < 7:
        time.sleep(0.001)
    leave.set()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 8
    assert all(each is error for each in outcomes)
    assert device.compiled == 1


def test_waiters_get_the_result_even_if_it_is_cleared_at_once() -> None:
    leave = threading.Event()
    cache = KernelCache(disk=False)
    device = Fake(lambda kernel: b"code" if leave.wait(20) else b"")
    threads = [
        threading.Thread(target=lambda: found.append(cache.get_or_compile(numbered(1), device)))
        for _ in range(4)
    ]
    found: list[CachedKernel] = []
    for thread in threads:
        thread.start()
    while cache.statistics.waits < 3:
        time.sleep(0.001)
    cache.clear()
    leave.set()
    cache.clear()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({id(each) for each in found}) == 1


def test_an_interrupted_compilation_is_taken_over() -> None:
    """Ctrl-C belongs to the thread that got it; who waits for it compiles."""
    entered, leave, outcomes = threading.Event(), threading.Event(), []

    def interrupted_once(kernel: Kernel) -> bytes:
        if device.compiled == 1:
            entered.set()
            leave.wait(20)
            raise KeyboardInterrupt
        return b"code"

    cache, device = KernelCache(disk=False), Fake(interrupted_once)

    def work() -> None:
        try:
            outcomes.append(cache.get_or_compile(numbered(1), device))
        except KeyboardInterrupt as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert entered.wait(20)
    while cache.statistics.waits < 3:
        time.sleep(0.001)
    leave.set()
    for thread in threads:
        thread.join()
    kernels = [each for each in outcomes if isinstance(each, CachedKernel)]
    assert len(outcomes) == 4
    assert len(kernels) == 3
    assert len(set(map(id, kernels))) == 1
    assert device.compiled == 2


def test_a_kernel_that_needs_itself_is_an_error() -> None:
    cache = KernelCache(disk=False)
    device = Fake(lambda kernel: cache.get_or_compile(kernel, device).key.encode())
    with pytest.raises(CacheError, match="compiling numbered asks for numbered itself"):
        cache.get_or_compile(numbered(1), device)
    device.compiler = lambda kernel: b"code"
    assert cache.get_or_compile(numbered(1), device)


def test_a_kernel_may_need_another() -> None:
    cache = KernelCache(disk=False)

    def nested(kernel: Kernel) -> bytes:
        return cache.get_or_compile(numbered(2), "NULL").key.encode()

    assert cache.get_or_compile(numbered(1), Fake(nested)).kernel == numbered(1)


def test_different_kernels_compile_at_the_same_time() -> None:
    meet = threading.Barrier(2, timeout=20)

    def together(kernel: Kernel) -> bytes:
        meet.wait()
        return b"code"

    cache, device = KernelCache(disk=False), Fake(together)
    outcomes = outcomes_in_threads(2, lambda n: cache.get_or_compile(numbered(n), device))
    assert all(isinstance(each, CachedKernel) for each in outcomes)


# ------------------------------------------------------------------------------------------- memory


def test_memory_is_bounded_by_use() -> None:
    size = len(numbered(0).source) + 1000
    cache, device = KernelCache(disk=False, memory_bytes=3 * size), Fake(lambda kernel: bytes(1000))
    for number in range(3):
        cache.get_or_compile(numbered(number), device)
    assert (cache.statistics.entries, cache.statistics.nbytes) == (3, 3 * size)
    cache.get_or_compile(numbered(0), device)  # so that 1 is the one used longest ago
    cache.get_or_compile(numbered(3), device)
    assert (cache.statistics.entries, cache.statistics.nbytes) == (3, 3 * size)
    assert cache.statistics.evictions == 1
    gc.collect()
    for number in (0, 2, 3):
        cache.get_or_compile(numbered(number), device)
    assert device.compiled == 4
    cache.get_or_compile(numbered(1), device)
    assert device.compiled == 5


def test_what_is_in_use_is_never_dropped() -> None:
    cache, device = KernelCache(disk=False, memory_bytes=1), Fake()
    held = [cache.get_or_compile(numbered(number), device) for number in range(5)]
    assert cache.statistics.entries == 1, "the bound holds for what nobody uses"
    assert cache.statistics.evictions == 4
    for number, each in enumerate(held):
        assert cache.get_or_compile(numbered(number), device) is each
    cache.gc()
    for number, each in enumerate(held):
        assert cache.get_or_compile(numbered(number), device) is each
    assert device.compiled == 5
    del held, each
    cache.gc()
    gc.collect()
    cache.get_or_compile(numbered(0), device)
    assert device.compiled == 6


def test_bytes_are_counted_level() -> None:
    cache, device = KernelCache(disk=False, memory_bytes=200), Fake()
    for round_ in range(50):
        cache.get_or_compile(numbered(round_ % 7), device)
    facts = cache.statistics
    assert facts.nbytes == facts.entries * (len(numbered(0).source) + 4)
    cache.clear()
    assert (cache.statistics.entries, cache.statistics.nbytes) == (0, 0)


def test_statistics(tmp_path: Path) -> None:
    cache, device = KernelCache(tmp_path / "cache"), Fake()
    for _ in range(3):
        cache.get_or_compile(numbered(1), device)
    cache.get_or_compile(numbered(2), device)
    facts = cache.statistics
    assert (facts.hits, facts.compilations, facts.disk_hits) == (2, 2, 0)
    assert (facts.waits, facts.failures, facts.evictions, facts.entries) == (0, 0, 0, 2)
    assert 0 < facts.compile_seconds < 10
    assert {entry.facts["name"] for entry in cache.entries()} == {"numbered"}
    again = KernelCache(tmp_path / "cache")
    again.get_or_compile(numbered(1), device)
    assert (again.statistics.disk_hits, again.statistics.compilations) == (1, 0)


def test_gc_and_clear(tmp_path: Path) -> None:
    cache, device = KernelCache(tmp_path / "cache"), Fake()
    held = cache.get_or_compile(numbered(1), device)
    cache.get_or_compile(numbered(2), device)
    removed = cache.gc()
    assert removed is not None
    assert removed.entries == 0
    assert cache.statistics.entries == 0
    assert cache.get_or_compile(numbered(1), device) is held
    removed = cache.gc(max_bytes=0)
    assert removed is not None
    assert removed.entries == 2
    assert cache.get_or_compile(numbered(1), device) is held, "in use, so still in memory"
    with pytest.raises(UsageError, match="expected max_bytes of at least 0"):
        cache.gc(max_bytes=-1)
    cache.clear()
    assert cache.get_or_compile(numbered(1), device) is held
    del held
    gc.collect()
    cache.clear()
    compiled = device.compiled
    cache.get_or_compile(numbered(1), device)
    assert device.compiled == compiled + 1
    removed = cache.clear()
    assert removed is not None
    assert removed.entries == 1
    assert list(cache.entries()) == []


# -------------------------------------------------------------------------------------------- forks


def child(body: Callable[[], object]) -> int:
    """Run `body` in a forked child and return its exit status; 14 is a hang."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking among threads, on purpose
        pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            body()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("disk", [False, True])
def test_a_fork_in_the_middle_of_a_compilation(tmp_path: Path, disk: bool) -> None:
    entered, leave, parent = threading.Event(), threading.Event(), os.getpid()

    def slow(kernel: Kernel) -> bytes:
        entered.set()
        if os.getpid() == parent:
            leave.wait(30)
        return b"code"

    cache = KernelCache(tmp_path / "cache", disk=disk)
    device, found = Fake(slow), []
    thread = threading.Thread(
        target=lambda: found.append(cache.get_or_compile(numbered(1), device))
    )
    thread.start()
    assert entered.wait(20)

    def others() -> None:
        cache.get_or_compile(numbered(2), device)
        assert cache.statistics.compilations == 1

    def same() -> None:
        assert cache.get_or_compile(numbered(1), device).kernel == numbered(1)

    assert child(others) == 0
    if not disk:  # on a disk the parent holds the key's lock, and the child rightly waits for it
        assert child(same) == 0
    leave.set()
    thread.join()
    assert len(found) == 1
    assert cache.get_or_compile(numbered(1), device) is found[0]
    assert child(same) == 0


@pytest.mark.parametrize("owner", ["cache", "devices"])
def test_a_fork_while_another_thread_holds_a_lock(owner: str) -> None:
    cache, held, leave = KernelCache(disk=False), threading.Event(), threading.Event()
    lock = {"cache": cache._lock, "devices": base._devices_lock}[owner]

    def hold() -> None:
        with lock:
            held.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)

    def use() -> None:
        cache.get_or_compile(numbered(1), "NULL")

    status = child(use)
    leave.set()
    thread.join()
    assert status == 0


@needs_compiler
def test_a_child_launches_what_its_parent_compiled() -> None:
    cached = KernelCache(disk=False).get_or_compile(constant(9))

    def use() -> None:
        assert value_of(cached) == 9

    assert child(use) == 0
    assert value_of(cached) == 9


# ------------------------------------------------------------------------------- damage and trouble


def entry_file(cache: KernelCache) -> Path:
    assert cache.directory is not None
    (path,) = cache.directory.glob("entries/*/*.blk")
    return path


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:2000] + bytes([data[2000] ^ 1]) + data[2001:],
        lambda data: b"something else entirely",
        lambda data: data + b"more",
    ],
)
def test_a_damaged_entry_is_compiled_again_with_a_note(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    first = KernelCache(tmp_path / "cache")
    first.get_or_compile(constant(3))
    path = entry_file(first)
    path.write_bytes(damage(path.read_bytes()))
    again = KernelCache(tmp_path / "cache")
    with pytest.warns(RuntimeWarning, match="aside|damaged|expected"):
        cached = again.get_or_compile(constant(3))
    assert value_of(cached) == 3
    assert again.statistics.compilations == 1
    third = KernelCache(tmp_path / "cache")
    third.get_or_compile(constant(3))
    assert third.statistics.disk_hits == 1, "the entry is sound again"


def change(**facts: Any) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    return lambda kept, blobs: kept.update(facts)


@needs_compiler
@pytest.mark.parametrize(
    "edit",
    [
        lambda facts, blobs: blobs.clear(),
        lambda facts, blobs: facts.clear(),
        lambda facts, blobs: blobs.pop("binary"),
        lambda facts, blobs: blobs.pop("source"),
        lambda facts, blobs: blobs.pop("log"),
        lambda facts, blobs: facts.pop("entry_point"),
        lambda facts, blobs: facts.pop("resources"),
        lambda facts, blobs: blobs.update(source=b"\xff\xfe"),
        lambda facts, blobs: blobs.update(binary=b""),
        lambda facts, blobs: blobs.update(binary=b"no code"),
        change(entry_point=3),
        change(entry_point="another_function"),
        change(entry_point=""),
        change(resources=[1]),
        change(resources=None),
    ],
)
def test_a_sound_entry_of_another_shape_is_compiled_again(tmp_path: Path, edit: Any) -> None:
    first = KernelCache(tmp_path / "cache")
    key = first.get_or_compile(constant(4)).key
    store = kernel_store.KernelStore(tmp_path / "cache")
    entry = store.get(key)
    assert entry is not None
    facts, blobs = dict(entry.facts), dict(entry.blobs)
    edit(facts, blobs)
    assert store.put(key, facts, blobs)
    again = KernelCache(tmp_path / "cache")
    with pytest.warns(RuntimeWarning, match="kernel constant: what .* holds of it cannot be used"):
        cached = again.get_or_compile(constant(4))
    assert value_of(cached) == 4
    assert (again.statistics.compilations, again.statistics.disk_hits) == (1, 0)
    third = KernelCache(tmp_path / "cache")
    assert value_of(third.get_or_compile(constant(4))) == 4
    assert third.statistics.disk_hits == 1, "the entry is as it should be"


@needs_compiler
def test_code_that_does_not_load_is_not_kept(tmp_path: Path) -> None:
    class Liar(cpu.CpuDevice):
        def compile(self, kernel: Kernel) -> Compiled:
            return Compiled(b"no code", kernel.short, kernel.source)

    cache = KernelCache(tmp_path / "cache")
    with pytest.raises(CompileError, match="cannot load compiled code"):
        cache.get_or_compile(constant(5), Liar())
    assert list(cache.entries()) == []


@needs_compiler
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(tmp_path / "cache")

    def full(path: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(kernel_store, "publish", full)
    with pytest.warns(RuntimeWarning, match="No space left on device; going on without"):
        assert value_of(cache.get_or_compile(constant(6))) == 6
    assert value_of(cache.get_or_compile(constant(6))) == 6
    assert cache.statistics.compilations == 1
    assert list(cache.entries()) == []


@needs_compiler
def test_a_read_only_directory() -> None:
    code = """
import ctypes, os, warnings
KernelCache(disk=False).get_or_compile(constant(7))  # imports what it needs
if os.geteuid() == 0:  # no permission stops root, unless its files are opened as somebody else
    ctypes.CDLL(None).setfsuid(65534)
with warnings.catch_warnings(record=True) as notes:
    warnings.simplefilter("always")
    cache = KernelCache(sys.argv[1])
    assert value_of(cache.get_or_compile(constant(8))) == 8
    assert value_of(cache.get_or_compile(constant(9))) == 9
print(cache.statistics.compilations, len(notes))
print(notes[0].message)
"""
    # pytest's own directories are closed to somebody else, and so may the installed headers be.
    with tempfile.TemporaryDirectory() as opened:
        directory, package = Path(opened, "cache"), Path(opened, "brickline")
        shutil.copytree(Path(bl.__file__).parent, package)
        for path in (Path(opened), package, *package.rglob("*")):
            path.chmod(0o755)
        directory.mkdir(mode=0o555)
        out = finish(python(code, directory, package=package)).splitlines()
        assert os.listdir(directory) == []
    assert out[0] == "2 1", "compiled without a lock, and said once"
    assert "Permission denied; going on without" in out[1]


@needs_compiler
def test_a_directory_without_room_for_entries(tmp_path: Path) -> None:
    for name in ("entries", "locks"):
        (tmp_path / name).touch()
    tmp_path.chmod(0o700)
    cache = KernelCache(tmp_path)
    with pytest.warns(RuntimeWarning, match="going on without"):
        assert value_of(cache.get_or_compile(constant(8))) == 8
    assert list(cache.entries()) == []


def double(way: str) -> None:
    """Run a kernel in one of all ways, with the user's cache."""
    x, y = np.ones(8, np.float32), np.zeros(8, np.float32)
    if way == "cache":
        cache = KernelCache()
        for _ in range(2):
            cache.get_or_compile(residual(), "CPU").launch(x, x, y, 8)
        assert cache.statistics.compilations == 1
        assert list(cache.entries()) == []
    elif way == "queue":
        with bl.Megakernel("CPU", [residual()], workers=1) as mega:
            mega.submit("residual", {"a": x, "b": x}, {"y": y}, {"n": 8})
            mega.drain()
    else:
        plan = bl.Plan("doubled")
        plan.launch(residual(), a=x, b=x, y=y, n=8)
        plan.prepare("CPU", way)()
    assert y.tolist() == [2] * 8, way


WAYS = ("cache", "serial", "parallel", "megakernel", "queue")


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["BRICKLINE_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_a_cache_directory_that_cannot_be_made_disables_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for other in ("BRICKLINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, str(tmp_path / "file" / "below"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        double(way)
    (warning,) = caught
    assert warning.category is RuntimeWarning
    words = "kernels are kept in memory alone: cannot use the cache directory "
    assert str(warning.message).startswith(f"{words}{tmp_path / 'file' / 'below'}")
    assert "Not a directory; choose another directory with BRICKLINE_CACHE" in str(warning.message)
    assert warning.filename == __file__, "it points at the call"
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_cache_without_its_directory_is_one_without_a_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="; name another directory, or do without a disk"):
        cache = KernelCache(tmp_path / "file" / "below")
    assert cache.directory is None
    assert (cache.gc(), cache.clear(), list(cache.entries())) == (None, None, [])
    device = Fake()
    assert cache.get_or_compile(numbered(1), device) is cache.get_or_compile(numbered(1), device)
    assert device.compiled == 1


AS_NOBODY = """
import os, warnings
import brickline as bl
from brickline.kernels.catalog import residual
{double}
directory = sys.argv[1]
os.environ["BRICKLINE_CACHE"] = directory + "/warm"  # what is imported late is imported now
for way in {ways}[1:]:
    double(way)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for place in ("closed/new/cache", "closed"):
    os.environ["BRICKLINE_CACHE"] = directory + "/" + place
    for way in {ways}:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            double(way)
        said = [str(each.message) for each in caught]
        assert len(said) == 1, (place, way, said)
        assert "Permission denied" in said[0], (place, way, said)
print("done")
"""


@needs_compiler
def test_a_read_only_directory_disables_the_disk() -> None:
    code = AS_NOBODY.format(double=inspect.getsource(double), ways=WAYS)
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        # Compilers read its headers as that user, who need not see where it is installed.
        package = Path(directory) / "brickline"
        shutil.copytree(Path(bl.__file__).parent, package)
        closed = Path(directory) / "closed"
        closed.mkdir(mode=0o500)
        if os.geteuid() == 0:
            os.chown(closed, 65534, 65534)
        try:
            assert finish(python(code, directory, package=package)) == "done\n"
        finally:
            closed.chmod(0o700)


def test_foreign_directories_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(CacheError, match=r"only user .* can write to, found mode 0777"):
        KernelCache(shared)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "VERSION").write_text("somebody else's\n", encoding="utf-8")
    with pytest.raises(CacheError, match="another program owns it"):
        KernelCache(other)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CacheError, match="expected a directory, found a file"):
        KernelCache(file)
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 65534, 65534)
        with pytest.raises(CacheError, match="found one of user 65534"):
            KernelCache(foreign)


def test_bounds_that_are_none(tmp_path: Path) -> None:
    for wrong in (0, -1, True, "many", 1.5):
        with pytest.raises(UsageError, match="expected max_bytes as a whole number above 0"):
            KernelCache(tmp_path / "cache", max_bytes=wrong)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="expected an entry of at most 10 bytes"):
        KernelCache(tmp_path / "cache", max_bytes=10).get_or_compile(numbered(1), Fake())


# -------------------------------------------------------------------------------- clear, and others


@needs_compiler
def test_a_clear_takes_nothing_from_those_who_use_it(
    starts: CompilerStarts, tmp_path: Path
) -> None:
    code = """
cache = KernelCache(sys.argv[1])
held = cache.get_or_compile(constant(1))
print(value_of(held), flush=True)
sys.stdin.readline()
assert cache.get_or_compile(constant(1)) is held
print(value_of(held))
"""
    program = python(code, tmp_path / "cache")
    assert program.stdout is not None
    assert program.stdout.readline() == "1\n"
    mine = KernelCache(tmp_path / "cache")
    removed = mine.clear()
    assert removed is not None
    assert removed.entries == 1
    assert finish(program, "go\n") == "1\n"
    assert value_of(mine.get_or_compile(constant(1))) == 1
    assert starts.count == 2, "compiled again by whoever came next"


@needs_compiler
def test_two_processes_and_one_that_clears(tmp_path: Path) -> None:
    code = """
for round in range(8):
    cache = KernelCache(sys.argv[1])
    for number in range(3):
        assert value_of(cache.get_or_compile(constant(number))) == number
print("done")
"""
    programs = [python(code, tmp_path / "cache") for _ in range(2)]
    cache, cleared = KernelCache(tmp_path / "cache"), 0
    while any(program.poll() is None for program in programs):
        removed = cache.clear()
        assert removed is not None
        cleared += removed.entries
        time.sleep(0.01)
    assert [finish(program) for program in programs] == ["done\n"] * 2
    assert cleared > 0
    assert kernel_store.KernelStore(tmp_path / "cache").verify() == []


# --------------------------------------------------------------------------------------------- keys


def test_a_key_covers_kernel_device_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Fake()
    key = cache_key(numbered(1), device)
    assert len(key) == 64
    assert cache_key(numbered(1), Fake()) == key
    assert cache_key(numbered(2), device) != key
    assert cache_key(numbered(1), open_device("NULL")) != key
    defined = Kernel("numbered", numbered(1).source, numbered(1).signature, defines={"N": 1})
    assert cache_key(defined, device) != key
    monkeypatch.setattr(Fake, "compiler_identity", lambda self, kernel: {"version": 2})
    assert cache_key(numbered(1), device) != key


@needs_compiler
def test_another_compiler_is_another_key(starts: CompilerStarts) -> None:
    key = cache_key(constant(1), CPU)
    text = starts.path.read_text(encoding="utf-8")
    starts.path.write_text(f"{text}# a newer version\n", encoding="utf-8")
    cpu.find_compiler.cache_clear()
    assert cache_key(constant(1), CPU) != key


@needs_compiler
def test_a_header_that_a_source_includes_is_part_of_what_is_cached(
    tmp_path: Path, starts: CompilerStarts
) -> None:
    header = tmp_path / "my number.h"
    header.write_text("#define NUMBER 4\n", encoding="utf-8")
    source = f'#include <math.h>\n#include "{header}"\nvoid f(float* y) {{ *y = NUMBER; }}'
    kernel = Kernel("f", source, [Param("y", "f32", 1, "write")], language="c")
    directory = tmp_path / "cache"
    assert value_of(KernelCache(directory).get_or_compile(kernel)) == 4
    assert value_of(KernelCache(directory).get_or_compile(kernel)) == 4
    assert starts.count == 1
    header.write_text("#define NUMBER 5\n", encoding="utf-8")
    assert value_of(KernelCache(directory).get_or_compile(kernel)) == 5
    assert value_of(KernelCache(directory).get_or_compile(kernel)) == 5
    assert starts.count == 2
    header.unlink()
    with pytest.raises(CompileError, match=r"my number\.h"):
        KernelCache(directory).get_or_compile(kernel)


def test_a_bound_that_is_no_number_is_refused_at_once(tmp_path: Path) -> None:
    for wrong in ("256M", -1, None, 1.5, True):
        with pytest.raises(UsageError, match="memory_bytes: expected a whole number"):
            KernelCache(tmp_path / "cache", memory_bytes=wrong)  # type: ignore[arg-type]


def test_nobody_waits_for_ever_when_the_end_of_a_compilation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(tmp_path / "cache")
    begun, going_on = threading.Event(), threading.Event()

    def compiler(kernel: Kernel) -> bytes:
        begun.set()
        going_on.wait(10)
        return b"code"

    def fail(*arguments: object) -> None:
        raise MemoryError("no room to remember")

    monkeypatch.setattr(cache, "_remember", fail)
    device = Fake(compiler)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            cache.get_or_compile(numbered(1), device)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    going_on.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert len(errors) == 3


@needs_compiler
def test_an_edited_header_is_noticed_in_the_same_process(tmp_path: Path) -> None:
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 4\n", encoding="utf-8")
    source = f'#include "{header}"\nvoid f(float* y) {{ *y = NUMBER; }}'
    kernel = Kernel("f", source, [Param("y", "f32", 1, "write")], language="c")
    cache = KernelCache(tmp_path / "cache")
    first = cache.get_or_compile(kernel)
    assert cache.get_or_compile(kernel) is first
    header.write_text("#define NUMBER 5\n", encoding="utf-8")
    second = cache.get_or_compile(kernel)
    assert (value_of(first), value_of(second)) == (4, 5)
    assert cache.get_or_compile(kernel) is second
