"""Kernels compiled by the host compiler and called through ctypes, without a device in between.

And a cache for a module's kernels, and a place for runs that have no path.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brickline.cache import KernelCache
from brickline.dtypes import dtype_of
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernel_source import CPU_FLAGS, INCLUDE_DIRECTORY, cpu_source, entry_point

FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unused-parameter")
"""Warnings are printed, not errors: other compilers have others."""
COMPILERS = ("c++", "g++", "clang++")


class Launch(ctypes.Structure):
    """brickline_launch of launch.h."""

    _fields_ = (
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("lanes", ctypes.c_uint32 * 3),
        ("first", ctypes.c_uint64),
        ("last", ctypes.c_uint64),
        ("shared", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_uint64),
        ("fault", ctypes.c_void_p),
    )


class Guarded:
    """A copy of an array at a multiple of 64 bytes, with a pattern before and after it."""

    ZONE = np.full(64, 0xA5, np.uint8)

    def __init__(self, array: Any) -> None:
        self.array = array
        self.memory = np.zeros(array.nbytes + 192, np.uint8)
        self.start = 64 + -self.memory.ctypes.data % 64
        self.end = self.start + array.nbytes
        self.memory[self.start - 64 : self.start] = self.ZONE
        self.memory[self.start : self.end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.memory[self.end : self.end + 64] = self.ZONE

    @property
    def address(self) -> int:
        return self.memory.ctypes.data + self.start

    def check(self) -> None:
        """Fail where the kernel wrote outside."""
        np.testing.assert_array_equal(self.memory[self.start - 64 : self.start], self.ZONE)
        np.testing.assert_array_equal(self.memory[self.end : self.end + 64], self.ZONE)

    def copy_back(self) -> None:
        inside = self.memory[self.start : self.end]
        self.array[...] = inside.view(self.array.dtype).reshape(self.array.shape)


@dataclass
class HostKernel:
    """A compiled kernel. Calling it launches it and returns the fault code."""

    kernel: Kernel
    entry: Any

    def __call__(self, blocks: tuple[int, int] | None = None, **values: Any) -> int:
        """Launch all blocks, or the linear ones of a range, on guarded copies of the arrays."""
        params = {param.name: param for param in self.kernel.params}
        shape = self.kernel.sizes({name: values[name] for name in values.keys() - params.keys()})
        # What is too large to copy is passed as it is.
        copies = {name: Guarded(values[name]) for name in params if values[name].nbytes < 1 << 30}
        held = [
            _slot(argument, copies.get(argument.name), values[argument.name])
            for argument in self.kernel.signature
        ]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        shared = Guarded(np.full(shape.shared_bytes, 0xAB, np.uint8))
        fault = ctypes.c_uint32(0)
        launch = Launch(
            ctypes.addressof(pointers),
            shape.global_size,
            shape.local_size,
            *(blocks or (0, prod(shape.global_size))),
            shared.address,
            shape.shared_bytes,
            ctypes.addressof(fault),
        )
        self.entry(ctypes.byref(launch))
        for guarded in (shared, *copies.values()):
            guarded.check()
        for name, guarded in copies.items():
            if params[name].access.writes:
                guarded.copy_back()
        return fault.value


def _slot(argument: Param | Scalar, copy: Guarded | None, value: Any) -> Any:
    """Eight bytes that hold a pointer or a scalar."""
    if isinstance(argument, Param):
        raw = (copy.address if copy else value.ctypes.data).to_bytes(8, "little")
    else:
        raw = np.asarray(value, dtype_of(argument.dtype).numpy).tobytes()
    return ctypes.create_string_buffer(raw, 8)


class HostCompiler:
    """The first compiler on the PATH. BRICKLINE_TEST_CXXFLAGS adds flags, such as a sanitizer's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = next(filter(None, map(shutil.which, COMPILERS)), None)
        self._loaded: dict[str, HostKernel] = {}

    def load(self, kernel: Kernel) -> HostKernel:
        """Compile a kernel once and load it."""
        if kernel.digest not in self._loaded:
            library = self.directory / f"{kernel.short}.so"
            self.compile(kernel, library)
            entry = getattr(ctypes.CDLL(str(library)), entry_point(kernel))
            entry.argtypes, entry.restype = [ctypes.c_void_p], None
            self._loaded[kernel.digest] = HostKernel(kernel, entry)
        return self._loaded[kernel.digest]

    def compile(self, kernel: Kernel, library: Path) -> None:
        """Raise CalledProcessError with the compiler's words in `stderr`."""
        if self.path is None:
            pytest.skip("no C++ compiler on the PATH")
        plain = kernel.language == "c"
        source = library.with_suffix(".c" if plain else ".cpp")
        source.write_text(cpu_source(kernel), encoding="utf-8")
        command = [
            *(self.path, *FLAGS, *(("-x", "c") if plain else CPU_FLAGS)),
            *os.environ.get("BRICKLINE_TEST_CXXFLAGS", "").split(),
            *(f"-I{INCLUDE_DIRECTORY}", str(source), "-o", str(library)),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostCompiler:
    return HostCompiler(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def cache() -> KernelCache:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler on the PATH")
    return KernelCache()


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps runs without a path out of the user's state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    monkeypatch.delenv("BRICKLINE_RUN", raising=False)
