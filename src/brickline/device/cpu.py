"""The CPU: the host's compiler and memory.

Kernels become shared objects, compiled for the very processor they run on, loaded from memory and
launched by the core. The compiler is the first of clang, gcc and zig (from PyPI) that is found, or
what ``BRICKLINE_CXX`` names.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from brickline import _core
from brickline.buffers import Buffer, aligned_memory, copy_host
from brickline.device.base import Compiled, Device, Event, Limits, Program
from brickline.device.compiling import compile_error, file_digest, headers_digest
from brickline.errors import CompileError, DeviceError
from brickline.kernel import Kernel
from brickline.kernel_source import (
    CPU_FLAGS,
    INCLUDE_DIRECTORY,
    cpu_source,
    entry_point,
    headers,
)

COMPILE_SECONDS = 300
"""How long a compiler may take before it is stopped."""
_C_FLAGS = (
    "-std=gnu11",
    "-ffp-contract=off",
    # Mistakes for which older compilers only warn, and call a function with rubbish.
    "-Werror=implicit-function-declaration",
    "-Werror=int-conversion",
    "-Werror=incompatible-pointer-types",
)
_REMEDY = "install one, or `pip install ziglang`, or set BRICKLINE_CXX"


@dataclass(frozen=True)
class Compiler:
    """A C and C++ compiler of the host."""

    command: tuple[str, ...]
    kind: str
    """``clang``, ``gcc`` or ``zig``."""

    def flags(self, language: str) -> tuple[str, ...]:
        """Return the flags that code of a kernel is compiled with."""
        target = "-mcpu=native" if self.kind == "zig" else "-march=native"
        # No contraction: an inlined body gives the same bits wherever it is inlined.
        standard = ("-x", "c", *_C_FLAGS) if language == "c" else ("-x", "c++", *CPU_FLAGS)
        # Unique symbols would keep code loaded for ever.
        more = {"zig": ("-fno-sanitize=all",), "gcc": ("-fno-gnu-unique",)}.get(self.kind, ())
        # Signed overflow and traps stay as the language has them; errno of math functions does not.
        shared = ("-O3", target, "-fno-math-errno", "-fPIC", "-shared")
        # A function that nobody defines is the compiler's to refuse, not the loader's.
        return (*standard, *shared, *more, "-Wl,-z,defs")

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """Return what tells this compiler from another, without starting it."""
        path = Path(self.command[0]).resolve()
        if self.kind == "zig":
            spec = find_spec("ziglang")
            path = Path(spec.origin).resolve() if spec and spec.origin else path
        try:
            facts = path.stat()
        except OSError as error:
            raise DeviceError(
                f"the compiler {path} is gone ({error.strerror}); {_REMEDY}"
            ) from error
        return {
            "kind": self.kind,
            "path": str(path),
            "bytes": facts.st_size,
            "mtime_ns": facts.st_mtime_ns,
        }


def chosen_compiler() -> Compiler:
    """Return the compiler of kernels, as the environment has it now.

    Raises:
        DeviceError: if there is none.
    """
    return find_compiler(os.environ.get("BRICKLINE_CXX"), os.environ.get("PATH"))


@cache
def find_compiler(named: str | None, search_path: str | None) -> Compiler:
    """Return the compiler of this name, or else the first that is found.

    Raises:
        DeviceError: if there is none.
    """
    if named:
        path = shutil.which(named, path=search_path)
        if path is None:
            raise DeviceError(
                f"BRICKLINE_CXX is {named!r}, which is no program on PATH; set it to a C++ "
                "compiler, without arguments, or unset it"
            )
        return Compiler((path,), "clang" if "clang" in Path(path).name else "gcc")
    for name, kind in (("clang++", "clang"), ("g++", "gcc"), ("c++", "gcc")):
        path = shutil.which(name, path=search_path)
        if path is not None:
            return Compiler((path,), kind)
    if find_spec("ziglang") is not None:
        return Compiler((sys.executable, "-m", "ziglang", "c++"), "zig")
    raise DeviceError(
        f"no C++ compiler: looked for clang++, g++ and c++ on PATH and for zig; {_REMEDY}"
    )


@cache
def _processor() -> str:
    """Return what `-march=native` depends on."""
    wanted = ("flags", "Features", "model name", "CPU part")
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            facts = dict.fromkeys(line.strip() for line in file if line.startswith(wanted))
    except OSError:
        facts = {}
    return f"{platform.machine()} {sorted(facts)}"


def _run_compiler(
    compiler: Compiler, kernel: Kernel, source: str, directory: str
) -> tuple[bytes, str, dict[str, str]]:
    """Return the shared object, what the compiler said of it, and which files it read."""
    target, listing = Path(directory) / "kernel.so", Path(directory) / "kernel.d"
    flags = (*compiler.flags(kernel.language), f"-I{INCLUDE_DIRECTORY}", "-MMD", "-MF", listing)
    command = [*compiler.command, *map(str, flags), "-o", str(target), "-", "-lm"]
    shown = " ".join(command)
    try:
        status, said = _run_group(command, source.encode(), directory)
    except subprocess.TimeoutExpired as error:
        raise CompileError(
            f"kernel {kernel.name}: the compiler took more than {COMPILE_SECONDS} s and was "
            f"stopped: {shown}",
            command=shown,
        ) from error
    log = said.decode(errors="replace")
    if status != 0:
        nothing = f"the compiler ended with status {status} and said nothing"
        raise compile_error(kernel, log.strip() or nothing, shown)
    if not target.exists():
        raise DeviceError(
            f"kernel {kernel.name} cannot be compiled with {compiler.command[0]}: it ended well "
            "but made no file; set BRICKLINE_CXX to a C++ compiler, or unset it"
        )
    return target.read_bytes(), log, _included(listing)


def _run_group(command: list[str], source: bytes, directory: str) -> tuple[int, bytes]:
    """Return a compiler's status and words. Whatever interrupts it ends all that it started."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=directory,
        env=os.environ | {"LC_ALL": "C"},  # its words are looked through for "error"
        start_new_session=True,  # a driver leaves the real compiler behind when it alone is ended
    ) as process:
        try:
            _, said = process.communicate(source, timeout=COMPILE_SECONDS)
        except BaseException:
            if process.returncode is None:  # else its number may be another's by now
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
    return process.returncode, said


def _included(listing: Path) -> dict[str, str]:
    """Return the files of a compiler's list that are neither its own nor brickline's."""
    try:
        text = listing.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return {}
    names = shlex.split(text.partition(":")[2].replace("\\\n", " "))
    paths = [Path(name) for name in names if Path(name).is_file()]
    own = INCLUDE_DIRECTORY.resolve()
    return {
        str(path.resolve()): file_digest(path)
        for path in paths
        if not path.resolve().is_relative_to(own)
    }


class HostEvent(Event):
    """A moment of the host: what was launched before it is done."""

    def __init__(self) -> None:
        self._ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Read the host's clock."""
        if stream is not None:
            raise DeviceError("CPU has no streams; leave stream= out")
        self._ns = _core.monotonic_ns()

    def wait(self) -> None:
        """Return at once."""

    def ns_since(self, earlier: Event) -> float:
        """Return the host's time between two moments."""
        if not isinstance(earlier, HostEvent) or earlier._ns is None or self._ns is None:
            raise DeviceError("expected two recorded events of CPU; call record on both first")
        return float(self._ns - earlier._ns)


class CpuDevice(Device):
    """The host itself. A launch runs in the calling thread and is done when it returns."""

    name = "CPU"
    kind = 1
    # A grid is bounded as CUDA bounds it, so that what runs here is not refused there.
    limits = Limits((2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024, 1 << 20)

    def compiler_identity(self, kernel: Kernel) -> Mapping[str, Any]:
        """Return the compiler, its flags, the processor and the headers."""
        compiler = chosen_compiler()
        return {
            **compiler.identity,
            "flags": list(compiler.flags(kernel.language)),
            "processor": _processor(),
            "headers": headers_digest(headers(kernel, cuda=False)),
        }

    def compile(self, kernel: Kernel) -> Compiled:
        """Compile a kernel to a shared object."""
        if kernel.language in ("cuda", "megakernel"):
            raise DeviceError(
                f"kernel {kernel.name} is CUDA C++, which a CPU does not run; compile it for "
                f"CUDA:n, or write it against brickline/kernel.h"
            )
        compiler, source = chosen_compiler(), cpu_source(kernel)
        try:
            with tempfile.TemporaryDirectory(prefix="brickline-") as directory:
                binary, log, includes = _run_compiler(compiler, kernel, source, directory)
        except OSError as error:
            raise DeviceError(
                f"kernel {kernel.name} cannot be compiled with {compiler.command[0]}: {error}; see "
                "that it runs and that the temporary directory can be written to, or set "
                "BRICKLINE_CXX"
            ) from error
        resources = {"code_bytes": len(binary)}
        return Compiled(binary, entry_point(kernel), source, log, resources, includes)

    def load(self, compiled: Compiled) -> Program:
        """Load a shared object from memory."""
        try:
            library = _core.HostLibrary(compiled.binary, compiled.entry_point[:200])
            return Program(library.address(compiled.entry_point), library)
        except RuntimeError as error:
            raise CompileError(f"kernel {compiled.entry_point}: {error}") from error

    def allocate(self, shape: Sequence[int], dtype: str) -> Buffer:
        """Return fresh host memory."""
        return aligned_memory(shape, dtype)

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy host memory."""
        copy_host(target, source)

    def synchronize(self) -> None:
        """Return at once: a launch is done when it returns."""

    def event(self) -> HostEvent:
        """Return an event of the host."""
        return HostEvent()


def open_device(number: int) -> CpuDevice:
    """Return the CPU."""
    return CpuDevice()
