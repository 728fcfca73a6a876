"""The CPU device: kernels are compiled, loaded, launched and unloaded, and say what went wrong."""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brickline import _core
from brickline.buffers import Buffer, as_buffer
from brickline.cache import CachedKernel, KernelCache, cache_key
from brickline.device import cpu
from brickline.device.base import Compiled, open_device
from brickline.dtypes import DTYPES
from brickline.errors import CompileError, DeviceError, LaunchError
from brickline.kernel import Kernel, Param, Scalar
from brickline.launching import GUARD_BYTES, launch_guarded

CPU = open_device("CPU")
CACHE = KernelCache(disk=False)

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("clang++", "g++", "c++"))), reason="no C++ compiler on the PATH"
)

SCALE = Kernel(
    "scale",
    """\
BRICKLINE void scale(Block& block, const float* x, float* y, int64_t n, float by) {
  int64_t first = block.index() * 256, left = n - first;
  block.each(left < 256 ? left : 256, [&](int64_t i) { y[first + i] = x[first + i] * by; });
}
""",
    [
        Param("x", "f32", "n"),
        Param("y", "f32", "n", "write"),
        Scalar("n", low=1),
        Scalar("by", "f32"),
    ],
    global_size="ceil_div(n, 256)",
)


def plain_c(name: str, body: str, *signature: Param | Scalar, **more: Any) -> Kernel:
    """A kernel in C; its only argument is `float* y` unless others are given."""
    arguments = signature or (Param("y", "f32", 1, "write"),)
    return Kernel(name, body, list(arguments), language="c", **more)


def constant(number: int) -> Kernel:
    return plain_c(f"constant{number}", f"void constant{number}(float* y) {{ *y = {number}; }}")


def value_of(cached: CachedKernel, *arguments: Any) -> float:
    y = np.zeros(1, np.float32)
    cached.launch(y, *arguments)
    return float(y[0])


def maps() -> str:
    return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")


def descriptors() -> int:
    gc.collect()  # of what other tests left behind, some may be open still
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test change what `find_compiler` finds."""
    cpu.find_compiler.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    cpu.find_compiler.cache_clear()


# ----------------------------------------------------------------------------------------- launches


def test_a_block_kernel_runs_over_arrays_and_buffers() -> None:
    scale = CACHE.get_or_compile(SCALE)
    for n in (1, 255, 256, 257, 5000):
        x, y = np.arange(n, dtype=np.float32), np.zeros(n, np.float32)
        scale.launch(x, y, n, 0.5)
        np.testing.assert_array_equal(y, x * np.float32(0.5))
        buffer = CPU.allocate((n,), "f32")
        scale.launch(by=2, n=n, y=buffer, x=as_buffer(x))
        np.testing.assert_array_equal(CPU.to_numpy(buffer), x * 2)


def test_axes_of_the_grid_and_shared_memory() -> None:
    kernel = Kernel(
        "places",
        """\
BRICKLINE void places(Block& block, int64_t* y, int64_t n) {
  int64_t* mine = block.shared<int64_t>(n);
  block.each(n, [&](int64_t i) { mine[i] = i; });
  block.sync();
  int64_t total = block.sum(n, [&](int64_t i) { return mine[i]; });
  int64_t place = (block.index(2) * block.blocks(1) + block.index(1)) * block.blocks(0);
  block.once([&] { y[place + block.index(0)] = total * 100 + block.lanes(); });
}
""",
        [Param("y", "i64", (2, 3, 4), "write"), Scalar("n", low=1, high=1000)],
        global_size=(4, 3, 2),
        local_size=32,
        shared_bytes="n * 8",
    )
    places = CACHE.get_or_compile(kernel)
    for n in (1, 1000, 10):
        y = np.zeros((2, 3, 4), np.int64)
        places.launch(y, n)
        np.testing.assert_array_equal(y, n * (n - 1) // 2 * 100 + 32)


def test_a_c_kernel_takes_every_dtype_and_scalar() -> None:
    names = list(DTYPES)
    params = [Param(f"p{name}", name, 2, "read-write") for name in names]
    scalars = [
        Scalar("i", "i32", low=-(2**31)),
        Scalar("l", "i64", low=-(2**62)),
        Scalar("f", "f32"),
        Scalar("d", "f64"),
    ]
    types = ", ".join(f"{DTYPES[name].c_type}* p{name}" for name in names)
    source = f"""\
#include <stdbool.h>
#include <stdint.h>
void all({types}, int32_t i, int64_t l, float f, double d) {{
    pi32[0] = i; pi64[0] = l; pf32[0] = f; pf64[0] = d;
    {" ".join(f"p{name}[1] = p{name}[0];" for name in names)}
}}
"""
    kernel = CACHE.get_or_compile(plain_c("all", source, *params, *scalars))
    arrays = [np.ones(2, DTYPES[name].numpy) for name in names]
    kernel.launch(*arrays, -7, -(2**40), 0.1, 0.1)
    got = {name: each[1].item() for name, each in zip(names, arrays, strict=True)}
    assert (got["i32"], got["i64"]) == (-7, -(2**40))
    assert (got["f32"], got["f64"]) == (float(np.float32(0.1)), 0.1)
    assert all(got[name] == 1 for name in names if name not in ("i32", "i64", "f32", "f64"))
    # An array is known by the buffer protocol, a Buffer by its code: both refuse every other dtype.
    for place, name in enumerate(names):
        other = names[place - 1]
        for wrong in (np.ones(2, DTYPES[other].numpy), CPU.allocate((2,), other)):
            given = [*arrays[:place], wrong, *arrays[place + 1 :]]
            with pytest.raises(LaunchError, match=f"p{name}: expected {name}, got {other}"):
                kernel.launch(*given, 0, 0, 0, 0)


def test_memory_of_the_buffer_protocol_is_launched_as_it_is() -> None:
    scale = CACHE.get_or_compile(SCALE)
    x, y = array("f", [1.0, 2.0, 3.0]), array("f", [0.0] * 3)
    scale.launch(x, y, 3, 2.0)
    assert y.tolist() == [2.0, 4.0, 6.0]
    y.append(1.0)  # nothing holds it any longer
    with pytest.raises(LaunchError, match="writes to y, whose memory is read-only"):
        scale.launch(x, memoryview(bytes(12)).cast("f"), 3, 2.0)
    with pytest.raises(LaunchError, match="y: expected f32, got u8"):
        scale.launch(x, bytearray(12), 3, 2.0)
    with pytest.raises(LaunchError, match=r"x: expected shape \(3,\), got \(\)"):
        scale.launch(np.float32(1), y, 3, 2.0)


def test_arguments_are_checked_before_anything_runs() -> None:
    scale = CACHE.get_or_compile(SCALE)
    x, y = np.ones(8, np.float32), np.zeros(8, np.float32)
    raw = np.zeros(33, np.uint8)
    odd = raw[1:].view(np.float32)
    for given, words in (
        ((x, y[:7], 8, 2.0), r"y: expected shape \(8,\), got \(7,\)"),
        ((x.astype(np.float64), y, 8, 2.0), "x: expected f32, got f64"),
        ((x[::-1], y, 8, 2.0), "x: expected contiguous memory, got strides"),
        ((x.astype(">f4"), y, 8, 2.0), "x: expected a dtype"),
        ((odd, y, 8, 2.0), "x: expected memory aligned to 4 bytes"),
        ((y, y, 8, 2.0), "writes to y, which shares 32 bytes with x"),
        ((x, np.frombuffer(bytes(32), np.float32), 8, 2.0), "memory is read-only"),
        ((x, open_device("NULL").allocate((8,), "f32"), 8, 2.0), "y lies on NULL"),
    ):
        with pytest.raises(LaunchError, match=words):
            scale.launch(*given)
    with pytest.raises(LaunchError, match="CPU has no streams; leave stream= out"):
        scale.launch(x, y, 8, 2.0, stream=1)
    assert not y.any()


def test_references_stay_level() -> None:
    scale = CACHE.get_or_compile(SCALE)
    n = int("300")
    x, y, buffer = np.ones(n, np.float32), np.zeros(n, np.float32), CPU.allocate((n,), "f32")
    plain, half = array("f", [0.0] * n), np.zeros(n, np.float16)
    brain = np.zeros(n, DTYPES["bf16"].numpy)
    watched = (x, y, n, buffer, plain, half, brain, scale, scale.launch)

    def use() -> None:
        scale.launch(x, y, n, 2.0)
        scale.launch(x, buffer, n, 2.0)
        scale.launch(plain, buffer, n, 2.0)
        for wrong in (half, brain, x, plain[:-1], x[::2], np.frombuffer(bytes(4 * n), np.float32)):
            with pytest.raises(LaunchError):
                scale.launch(x, wrong, n, 2.0)

    use()
    before = [sys.getrefcount(each) for each in watched]
    blocks = sys.getallocatedblocks()
    for _ in range(1000):
        use()
    gc.collect()
    assert [sys.getrefcount(each) for each in watched] == before
    assert sys.getallocatedblocks() - blocks < 300


def test_a_fault_is_raised_and_the_next_launch_is_sound() -> None:
    kernel = Kernel(
        "faulty",
        """\
BRICKLINE void faulty(Block& block, float* y, int64_t code) {
  if (code != 0) block.fault(code + block.index());
  block.once([&] { y[block.index()] = 1; });
}
""",
        [Param("y", "f32", 4, "write"), Scalar("code", high=1 << 40)],
        global_size=4,
    )
    faulty, y = CACHE.get_or_compile(kernel), np.zeros(4, np.float32)
    with pytest.raises(LaunchError, match="kernel faulty reported fault 41"):
        faulty.launch(y, 41)
    words = r"reported fault 6: .*does not fit 32 bits; pass block.fault a number up to 2\*\*32 - 2"
    with pytest.raises(LaunchError, match=words):
        faulty.launch(y, 1 << 32)
    faulty.launch(y, 0)
    assert y.tolist() == [1.0] * 4


# -------------------------------------------------------------------------------------- compilation


def test_contraction_is_off_and_fma_explicit() -> None:
    body = "BRICKLINE void {0}(Block& block, const float* x, float* y) {{ y[0] = {1}; }}"
    given = np.array([1 + 2**-12, 1 + 2**-12, -1], np.float32)
    fused = np.float32(math.fsum([2.0 * 2**-12, 2**-24]))
    signature = [Param("x", "f32", 3), Param("y", "f32", 1, "write")]
    plain = Kernel("plain", body.format("plain", "x[0] * x[1] + x[2]"), signature)
    explicit = Kernel(
        "explicit_fma", body.format("explicit_fma", "fma(x[0], x[1], x[2])"), signature
    )
    y = np.zeros(1, np.float32)
    CACHE.get_or_compile(plain).launch(given, y)
    assert y[0] == given[0] * given[1] + given[2] != fused
    CACHE.get_or_compile(explicit).launch(given, y)
    assert y[0] == fused
    in_c = plain_c(
        "in_c", "void in_c(const float* x, float* y) { y[0] = x[0] * x[1] + x[2]; }", *signature
    )
    CACHE.get_or_compile(in_c).launch(given, y)
    assert y[0] != fused


def test_flags_and_identity() -> None:
    compiler = cpu.chosen_compiler()
    for language, standard in (("block", "-std=c++17"), ("c", "-std=gnu11")):
        flags = compiler.flags(language)
        assert {standard, "-O3", "-ffp-contract=off", "-fPIC", "-shared"} <= set(flags)
        assert not any("fast" in flag for flag in flags)
    identity = CPU.compiler_identity(SCALE)
    assert Path(identity["path"]).is_file()
    assert identity["bytes"] == Path(identity["path"]).stat().st_size
    assert identity["flags"] == list(compiler.flags("block"))
    assert len(identity["headers"]) == 64
    assert identity != CPU.compiler_identity(constant(1))
    assert cache_key(SCALE, CPU) == cache_key(SCALE, CPU)
    assert len({cache_key(kernel, CPU) for kernel in (SCALE, constant(1), constant(2))}) == 3
    assert cache_key(SCALE, open_device("NULL")) != cache_key(SCALE, CPU)


def test_zig_and_clang_have_flags_of_their_own() -> None:
    zig, clang = cpu.Compiler(("zig",), "zig"), cpu.Compiler(("clang++",), "clang")
    assert "-mcpu=native" in zig.flags("block")
    assert "-march=native" in clang.flags("block")
    assert "-fno-gnu-unique" not in (*zig.flags("c"), *clang.flags("c")), "gcc alone knows it"


def test_what_compiled_says_of_itself() -> None:
    compiled = CPU.compile(SCALE)
    assert compiled.binary.startswith(b"\x7fELF")
    assert compiled.resources == {"code_bytes": len(compiled.binary)}
    assert SCALE.source in compiled.source
    assert compiled.entry_point in compiled.source


def test_a_warning_is_kept_in_the_log() -> None:
    compiled = CPU.compile(
        plain_c("warned", "#warning look here\nvoid warned(float* y) { *y = 1; }")
    )
    assert "look here" in compiled.log


@pytest.mark.parametrize("language", ["block", "c"])
def test_a_refused_source_is_shown_with_the_compilers_words(language: Any) -> None:
    head = (
        "BRICKLINE void bad(Block& block, float* y)"
        if language == "block"
        else "void bad(float* y)"
    )
    source = f"// one\n// two\n{head} {{\n  y[0] = 1;\n  return zork;\n  y[0] = 2;\n}}\n// last"
    kernel = Kernel("bad", source, [Param("y", "f32", 1, "write")], language=language)
    with pytest.raises(CompileError) as refused:
        CPU.compile(kernel)
    message = str(refused.value)
    assert message.startswith("kernel bad does not compile: line 5: ")
    assert ">    5 |   return zork;" in message
    for line in ("     3 | ", "     4 |   y[0] = 1;", "     6 |   y[0] = 2;", "     7 | }"):
        assert line in message
    assert "two" not in message.split("\n    ")[0]
    assert "zork" in refused.value.log
    assert "bad:5:" in refused.value.log, "the compiler's own words"
    assert "-ffp-contract=off" in refused.value.command


def test_lines_are_counted_as_compilers_count_them() -> None:
    source = "// form\x0cfeed and \u2028 separator\nvoid bad(float* y) {\n  zork;\n}"
    with pytest.raises(CompileError, match="line 3: ") as refused:
        CPU.compile(plain_c("bad", source))
    assert ">    3 |   zork;" in str(refused.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("void other(float* y) { *y = 1; }", "other|bad|undeclared|implicit"),
        ("#include <no/such/header.h>\nvoid bad(float* y) {}", "no/such/header.h"),
        ("#error on purpose\n", "on purpose"),
        ("void zork(float*); void bad(float* y) { zork(y); }", "compile: undefined .*zork"),
        ("void bad(float* y) {", "compile: .*\nthe source leaves a brace open"),
    ],
)
def test_other_refusals(source: str, words: str) -> None:
    with pytest.raises(CompileError, match=words):
        CPU.load(CPU.compile(plain_c("bad", source)))


# ---------------------------------------------------------------------- functions and signatures

SCALE_EXPECTED = {
    "block": "void scale(Block&, const float*, float*, int64_t, float)",
    "c": "void scale(const float*, float*, int64_t, float)",
}


def with_parameters(language: Any, parameters: str, result: str = "void") -> Kernel:
    """`scale` as a function of these parameters; its signature stays."""
    head = "BRICKLINE {} scale(Block& block, {}) {{}}" if language == "block" else C_HEAD
    return Kernel("scale", head.format(result, parameters), SCALE.signature, language=language)


C_HEAD = "#include <stddef.h>\n#include <stdint.h>\n{} scale({}) {{}}"


@pytest.mark.parametrize("language", ["block", "c"])
@pytest.mark.parametrize(
    "parameters",
    [
        "const float* x, float* y, float by, int64_t n",
        "const float* x, float* y, int n, float by",
        "const float* x, float* y, uint64_t n, float by",
        "const float* x, float* y, double n, float by",
        "const float* x, float* y, int64_t n, int by",
        "const double* x, float* y, int64_t n, float by",
        "float* x, float* y, int64_t n, float by",
        "const float* x, uint32_t* y, int64_t n, float by",
        "const float* x, int64_t y, int64_t n, float by",
        "const float* x, float* y, int64_t n",
        "const float* x, float* y, int64_t n, float by, int more",
    ],
)
def test_a_function_that_is_not_the_signatures_is_refused(language: Any, parameters: str) -> None:
    with pytest.raises(CompileError) as refused:
        CPU.compile(with_parameters(language, parameters))
    first, second = str(refused.value).split("\n")[:2]
    assert re.fullmatch("kernel scale does not compile: .+", first)
    assert second == (
        f"expected `{SCALE_EXPECTED[language]}` as the signature declares; change the function or "
        "the signature, or name it with entry="
    )


@pytest.mark.parametrize(
    ("language", "parameters"),
    [
        ("block", "const float* __restrict__ x, float* const y, const int64_t n, const float by"),
        ("c", "const float* restrict x, float* const restrict y, const int64_t n, const float by"),
        ("c", "const volatile float* x, volatile float* y, long long n, double by"),
        ("c", "const void* x, float y[], long n, float by"),
    ],
)
def test_qualifiers_and_wider_values_are_no_other_function(language: Any, parameters: str) -> None:
    assert not CPU.compile(with_parameters(language, parameters)).log


def test_overloads_and_templates_are_functions_too() -> None:
    source = """\
template <class T>
BRICKLINE void pick(Block& block, T* y, int64_t n) { y[0] = T(n); }
BRICKLINE void pick(Block& block, double* y, int64_t n) { y[0] = -1; }
BRICKLINE void pick(Block& block, float* y, int32_t n) { y[0] = -1; }
"""
    kernel = Kernel("pick", source, [Param("y", "f32", 1, "write"), Scalar("n")])
    assert value_of(CACHE.get_or_compile(kernel), 7) == 7


@pytest.mark.parametrize("language", ["block", "c"])
def test_a_function_of_another_name_is_asked_for(language: Any) -> None:
    source = with_parameters(language, "float* y").source.replace("scale", "other")
    kernel = Kernel("scale", source, SCALE.signature, language=language)
    with pytest.raises(CompileError, match=r"scale.*\nexpected `void scale\(.*name it with entry="):
        CPU.compile(kernel)


@pytest.mark.parametrize("name", ["launch", "argument0", "linear", "overflow", "shared"])
def test_an_entry_has_no_names_that_a_kernel_may_have(name: str) -> None:
    in_c = plain_c(name, f"void {name}(float* y) {{ *y = 1; }}")
    assert value_of(CACHE.get_or_compile(in_c)) == 1
    source = f"BRICKLINE void {name}(Block& block, float* y) {{ *y = 2; }}"
    assert value_of(CACHE.get_or_compile(Kernel(name, source, in_c.signature))) == 2


@pytest.mark.parametrize(
    "mistake", ["zork(y);", "int n = y;", "double* d = y;"], ids=["undeclared", "int", "pointer"]
)
def test_c_is_refused_where_older_compilers_warn(mistake: str) -> None:
    with pytest.raises(CompileError, match="kernel bad does not compile: line 2: "):
        CPU.compile(plain_c("bad", f"void bad(float* y) {{\n  {mistake}\n}}"))


@pytest.mark.parametrize("code", ["throw 1;", "try { y[0] = 1; } catch (...) {}"])
def test_an_exception_is_the_compilers_to_refuse(code: str) -> None:
    source = f"BRICKLINE void throws(Block& block, float* y) {{\n  {code}\n}}"
    with pytest.raises(CompileError, match=r"line 2: .*exception"):
        CPU.compile(Kernel("throws", source, [Param("y", "f32", 1, "write")]))


def test_an_error_in_a_header_names_the_line_that_led_to_it() -> None:
    source = """\
BRICKLINE void small(Block& block, const bf16* x, float* y) {
  y[0] = float(block.sum(4, [&](int64_t i) { return x[i]; }));
}
"""
    kernel = Kernel("small", source, [Param("x", "bf16", 4), Param("y", "f32", 1, "write")])
    with pytest.raises(CompileError) as refused:
        CPU.compile(kernel)
    first, *_ = message = str(refused.value).split("\n")
    assert re.match(
        r"kernel small does not compile: line \d: static assertion failed.*4 or 8", first
    )
    assert any(line.startswith("     2 |") or line.startswith(">    2 |") for line in message)


def test_too_little_shared_memory_is_an_error_and_not_the_end() -> None:
    source = """\
BRICKLINE void greedy(Block& block, float* y, int64_t n) {
  float* mine = block.shared<float>(n);
  float* more = block.shared<float>(n);
  block.each(n, [&](int64_t i) { mine[i] = 1; more[i] = 2; });
  y[block.index()] = block.sum(n, [&](int64_t i) { return mine[i] + more[i]; });
}
"""
    kernel = Kernel(
        "greedy",
        source,
        [Param("y", "f32", 3, "write"), Scalar("n", high=2**40)],
        global_size=3,
        shared_bytes=4096,
    )
    greedy, y = CACHE.get_or_compile(kernel), np.zeros(3, np.float32)
    for n in (600, 1024, 1_000_000):
        with pytest.raises(LaunchError, match="kernel greedy"):
            greedy.launch(y, n)
        assert y.tolist() == [3 * n] * 3
    greedy.launch(y, 512)
    assert y.tolist() == [1536] * 3


def test_another_language_of_the_user_changes_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANG", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.setenv(name, "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    with pytest.raises(CompileError, match="line 1: 'zork' undeclared"):
        CPU.compile(plain_c("bad", "void bad(float* y) { zork; }"))


def test_cuda_code_is_not_for_a_cpu() -> None:
    kernel = Kernel(
        "far", "extern", [Param("y", "f32", 1, "write")], local_size=32, language="cuda"
    )
    with pytest.raises(DeviceError, match="kernel far is CUDA C\\+\\+, which a CPU does not run"):
        CPU.compile(kernel)


def test_no_compiler_at_all(fresh_compiler: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_compiler.setenv("PATH", str(tmp_path))
    fresh_compiler.delenv("BRICKLINE_CXX", raising=False)
    fresh_compiler.setattr(cpu, "find_spec", lambda name: None)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"no C\+\+ compiler: .*install one, or `pip install"):
            KernelCache(disk=False).get_or_compile(constant(3))
    fresh_compiler.undo()
    assert value_of(KernelCache(disk=False).get_or_compile(constant(3))) == 3, "found later"


def test_zig_is_the_last_resort(fresh_compiler: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_compiler.setenv("PATH", str(tmp_path))
    fresh_compiler.delenv("BRICKLINE_CXX", raising=False)
    fresh_compiler.setattr(cpu, "find_spec", lambda name: sys.__spec__ or object())
    found = cpu.chosen_compiler()
    assert (found.kind, found.command[1:]) == ("zig", ("-m", "ziglang", "c++"))


def test_a_wrong_compiler_is_named(fresh_compiler: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def chosen(path: Path | str) -> KernelCache:
        cpu.find_compiler.cache_clear()
        fresh_compiler.setenv("BRICKLINE_CXX", str(path))
        return KernelCache(disk=False)

    with pytest.raises(
        DeviceError, match=r"BRICKLINE_CXX is '/no/such'.*set it to a C\+\+ compiler"
    ):
        chosen("/no/such").get_or_compile(constant(4))
    with pytest.raises(DeviceError, match=r"is 'ccache g\+\+', .*without arguments, or unset it"):
        chosen("ccache g++").get_or_compile(constant(4))

    def script(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700)
        return path

    with pytest.raises(DeviceError, match=r"cannot be compiled with .*format error"):
        chosen(script("no_program", "\0\1\2")).get_or_compile(constant(4))
    with pytest.raises(DeviceError, match=r"with .*quiet: it ended well but made no file; set BRI"):
        chosen(script("quiet", "#!/bin/sh\nexit 0\n")).get_or_compile(constant(4))
    with pytest.raises(CompileError, match="ended with status 3 and said nothing"):
        chosen(script("silent", "#!/bin/sh\nexit 3\n")).get_or_compile(constant(4))
    with pytest.raises(CompileError, match="status -9 and said nothing"):
        chosen(script("killed", "#!/bin/sh\nkill -9 $$\n")).get_or_compile(constant(4))
    liar = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo no code > "$2"\n'
    with pytest.raises(CompileError, match="cannot load compiled code"):
        chosen(script("liar", liar)).get_or_compile(constant(4))
    gone = script("gone", "#!/bin/sh\n")
    cache = chosen(gone)
    cpu.chosen_compiler()
    gone.unlink()
    with pytest.raises(DeviceError, match=r"gone is gone .*install one"):
        cache.get_or_compile(constant(4))


def test_a_compiler_that_never_ends(fresh_compiler: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "endless"
    path.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    path.chmod(0o700)
    fresh_compiler.setenv("BRICKLINE_CXX", str(path))
    fresh_compiler.setattr(cpu, "COMPILE_SECONDS", 0.2)
    with pytest.raises(CompileError, match=r"took more than 0.2 s and was stopped") as refused:
        CPU.compile(constant(5))
    assert str(path) in refused.value.command


@pytest.mark.parametrize("interrupt", [False, True])
def test_what_a_compiler_started_ends_with_it(
    fresh_compiler: pytest.MonkeyPatch, tmp_path: Path, interrupt: bool
) -> None:
    path, pids = tmp_path / "driver", tmp_path / "pids"
    path.write_text(f"#!/bin/sh\nsleep 60 &\necho $$ $! > {pids}.new\nmv {pids}.new {pids}\nwait\n")
    path.chmod(0o700)
    fresh_compiler.setenv("BRICKLINE_CXX", str(path))
    fresh_compiler.setattr(cpu, "COMPILE_SECONDS", 30 if interrupt else 0.5)

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before, handler = descriptors(), signal.signal(signal.SIGALRM, interrupted)
    signal.setitimer(signal.ITIMER_REAL, 0.5 if interrupt else 0)
    try:
        with pytest.raises(KeyboardInterrupt if interrupt else CompileError):
            CPU.compile(constant(5))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    driver, worker = pids.read_text().split()
    assert not Path("/proc", driver).exists(), "ended and waited for"
    assert descriptors() == before
    deadline = time.monotonic() + 5
    while _runs(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(worker)


def _runs(pid: str) -> bool:
    try:
        stat = Path("/proc", pid, "stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # which its new parent has yet to wait for


def test_the_compiler_is_the_one_that_the_environment_names_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BRICKLINE_CXX", raising=False)
    default = cpu.chosen_compiler()
    other = tmp_path / "clang++"
    other.symlink_to(default.command[0])
    monkeypatch.setenv("BRICKLINE_CXX", str(other))
    assert cpu.chosen_compiler().command == (str(other),)
    monkeypatch.delenv("BRICKLINE_CXX")
    assert cpu.chosen_compiler() == default
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpu.chosen_compiler() == cpu.Compiler((str(other),), "clang")


def test_no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.tempfile, "tempdir", "/no/such/place")
    with pytest.raises(DeviceError, match=r"/no/such/place.*temporary directory can be written to"):
        CPU.compile(constant(6))


def test_compiling_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu.tempfile, "tempdir", str(tmp_path))
    before = descriptors()
    CPU.compile(constant(7))
    with pytest.raises(CompileError):
        CPU.compile(plain_c("bad", "zork"))
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before


# ------------------------------------------------------------------------------- loading, unloading


def test_code_that_cannot_be_loaded() -> None:
    good = CPU.compile(constant(8))
    before = descriptors()
    for binary in (b"", b"no code", good.binary[:100]):
        with pytest.raises(CompileError, match=r"kernel constant8_.*: cannot load compiled code: "):
            CPU.load(Compiled(binary, good.entry_point, good.source))
    with pytest.raises(CompileError, match="compiled code has no function zork"):
        CPU.load(Compiled(good.binary, "zork", good.source))
    assert descriptors() == before


def test_libraries_live_together_and_go_one_by_one() -> None:
    cache = KernelCache(disk=False)
    before = descriptors()
    kernels = [constant(number) for number in range(20, 24)]
    loaded = {kernel.name: cache.get_or_compile(kernel) for kernel in kernels}
    cache.gc()
    assert [value_of(loaded[kernel.name]) for kernel in kernels] == [20, 21, 22, 23]
    names = {kernel.name: kernel.short for kernel in kernels}
    assert all(name in maps() for name in names.values())
    del loaded["constant21"]
    gc.collect()
    assert names["constant21"] not in maps()
    assert names["constant22"] in maps()
    assert value_of(loaded["constant22"]) == 22
    again = cache.get_or_compile(constant(21))
    assert value_of(again) == 21
    del again, loaded
    cache.gc()
    gc.collect()
    assert not any(name in maps() for name in names.values())
    assert descriptors() == before


def test_code_stays_while_only_its_launcher_is_held() -> None:
    cache = KernelCache(disk=False)
    launch: Callable[..., None] = cache.get_or_compile(constant(30)).launch
    cache.clear()
    gc.collect()
    y = np.zeros(1, np.float32)
    launch(y)
    assert y[0] == 30


def test_a_number_that_comes_again_brings_no_stale_code() -> None:
    """Descriptors are reused, and the loader knows a library by its descriptor."""
    for number in range(40, 50):
        cache = KernelCache(disk=False)
        body = f"void same(float* y) {{ static float kept = {number}; *y = kept++; }}"
        cached = cache.get_or_compile(plain_c("same", body))
        assert [value_of(cached), value_of(cached)] == [number, number + 1]
        del cached, cache
        gc.collect()


def test_statics_of_templates_belong_to_one_kernel() -> None:
    """C++ makes them unique in the process by default, across libraries and after unloading."""
    before = descriptors()
    for number in (1, 2, 3):
        source = f"""\
template <class T> struct Counter {{
  static T& get() {{ static T count = {number}; return count; }}
}};
inline int& total() {{ static int count = {number}; return count; }}
BRICKLINE void unique(Block& block, float* y) {{ y[0] = Counter<float>::get() + total(); }}
"""
        kernel = Kernel("unique", source, [Param("y", "f32", 1, "write")])
        cached = KernelCache(disk=False).get_or_compile(kernel)
        assert value_of(cached) == 2 * number
        del cached
        gc.collect()
    assert descriptors() == before


def test_code_that_cannot_be_unloaded_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """Code with unique symbols stays loaded; its descriptor then stays taken."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("unique symbols are made by g++ alone")

    def build(number: int) -> bytes:
        target = tmp_path / f"{number}.so"
        source = f"""\
inline int& unique{number}() {{ static int kept = {number}; return kept; }}
extern "C" int entry() {{ return unique{number}(); }}
extern "C" int only{number}() {{ return {number}; }}
"""
        flags = ["-x", "c++", "-shared", "-fPIC", "-fgnu-unique", "-", "-o", str(target)]
        subprocess.run([compiler, *flags], input=source, text=True, check=True)
        return target.read_bytes()

    for number, code in [(number, build(number)) for number in (1, 2, 3)]:
        library = _core.HostLibrary(code, f"unique{number}")
        assert library.address(f"only{number}")
        del library


# -------------------------------------------------------------------------------------- guard zones

WILD = plain_c(
    "wild",
    "#include <stdint.h>\n"
    "void wild(const float* x, float* y, int64_t n, int64_t place) { y[place] = x[0]; }",
    Param("x", "f32", "n"),
    Param("y", "f32", "n", "read-write"),
    Scalar("n", low=1),
    Scalar("place", low=-10_000),
)


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (-1, "4 bytes before it, 4 bytes in all"),
        (-1000, "4000 bytes before it, 4 bytes in all"),
        (5, "0 bytes after its end, 4 bytes in all"),
        (8, "12 bytes after its end, 4 bytes in all"),
    ],
)
def test_writes_outside_are_found(place: int, where: str) -> None:
    wild = CACHE.get_or_compile(WILD)
    x, y = np.ones(5, np.float32), np.zeros(5, np.float32)
    with pytest.raises(LaunchError) as refused:
        launch_guarded(wild, {"x": x, "y": y, "n": 5, "place": place})
    assert str(refused.value) == (
        f"kernel wild writes outside y, which has 20 bytes: first {where}; look at the kernel's "
        "bounds"
    )
    assert not y.any()


def test_the_first_and_last_guarded_byte() -> None:
    wild = CACHE.get_or_compile(WILD)
    given = {"x": np.ones(5, np.float32), "y": np.zeros(5, np.float32), "n": 5}
    for place in (-GUARD_BYTES // 4, 5 + GUARD_BYTES // 4 - 1):
        with pytest.raises(LaunchError, match=r"writes outside y"):
            launch_guarded(wild, given | {"place": place})


def test_writes_inside_are_copied_back() -> None:
    wild = CACHE.get_or_compile(WILD)
    x, y = np.full(5, 3, np.float32), np.arange(5, dtype=np.float32)
    x.flags.writeable = False
    for place in (0, 4):
        launch_guarded(wild, {"x": x, "y": y, "n": 5, "place": place})
    assert y.tolist() == [3.0, 1.0, 2.0, 3.0, 3.0]
    buffer = CPU.from_numpy(np.zeros(5, np.float32))
    launch_guarded(wild, {"x": x, "y": buffer, "n": 5, "place": 1})
    assert buffer.numpy().tolist() == [0.0, 3.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("align", [4, 64, 512, 4096])
def test_guarded_copies_are_aligned_as_declared(align: int) -> None:
    kernel = plain_c(
        f"aligned{align}",
        "#include <stdint.h>\n"
        f"void aligned{align}(float* y) {{ y[0] = (uintptr_t)y % {align} == 0; }}",
        Param("y", "f32", 3, "read-write", align=align),
    )
    cached = CACHE.get_or_compile(kernel)
    memory = np.zeros(2 * align + 12, np.uint8)
    start = -memory.__array_interface__["data"][0] % align
    y = memory[start : start + 12].view(np.float32)
    launch_guarded(cached, {"y": y})
    assert y[0] == 1


def test_guarded_launches_refuse_what_launches_refuse() -> None:
    wild = CACHE.get_or_compile(WILD)
    x, y = np.ones(5, np.float32), np.zeros(5, np.float32)
    good = {"x": x, "y": y, "n": 5, "place": 0}
    read_only = np.frombuffer(bytes(20), np.float32)
    for wrong, words in (
        ({"y": read_only}, "writes to y, whose memory is read-only"),
        ({"y": np.zeros(5)}, "y: expected f32, got f64"),
        ({"y": np.zeros(6, np.float32)}, "y: expected shape"),
        ({"y": 3}, "kernel wild: y: expected a Buffer or an array"),
        ({"y": np.zeros(10, np.float32)[::2]}, "kernel wild: y: expected contiguous memory"),
        ({"z": 3}, "has no argument 'z'"),
    ):
        with pytest.raises(LaunchError, match=words):
            launch_guarded(wild, good | wrong)
    with pytest.raises(LaunchError, match="argument y is missing"):
        launch_guarded(wild, {"x": x, "n": 5, "place": 0})


def test_a_fault_of_a_guarded_launch_is_raised_and_nothing_copied() -> None:
    source = "BRICKLINE void trips(Block& block, float* y) { y[0] = 1; block.fault(9); }"
    trips = CACHE.get_or_compile(Kernel("trips", source, [Param("y", "f32", 1, "read-write")]))
    y = np.zeros(1, np.float32)
    with pytest.raises(LaunchError, match="kernel trips reported fault 9"):
        launch_guarded(trips, {"y": y})
    assert y[0] == 0


# ------------------------------------------------------------------------------------------ threads


def test_threads_launch_at_once() -> None:
    scale, failures = CACHE.get_or_compile(SCALE), []
    ready = threading.Barrier(8)

    def work(number: int) -> None:
        x, y = np.full(1000, number, np.float32), np.zeros(1000, np.float32)
        ready.wait()
        for by in range(200):
            scale.launch(x, y, 1000, by)
            if not (y == number * by).all():
                failures.append((number, by))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_others_run_while_a_kernel_does() -> None:
    kernel = plain_c(
        "meets",
        """\
void meets(const volatile int* theirs, volatile int* mine) {
    *mine = 1;
    for (long turns = 0; !*theirs && turns < 20000000000; ++turns) {}
    *mine = *theirs ? 2 : 3;
}
""",
        Param("theirs", "i32", 1),
        Param("mine", "i32", 1, "write"),
    )
    meets = CACHE.get_or_compile(kernel)
    theirs, mine = np.zeros(1, np.int32), np.zeros(1, np.int32)
    thread = threading.Thread(target=meets.launch, args=(theirs, mine))
    thread.start()
    deadline = time.monotonic() + 20
    while mine[0] != 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    theirs[0] = 1  # by Python, while the kernel waits for it
    thread.join()
    assert mine[0] == 2


def test_shared_memory_belongs_to_one_thread() -> None:
    kernel = Kernel(
        "private_memory",
        """\
BRICKLINE void private_memory(Block& block, float* y, int64_t n, float by) {
  float* mine = block.shared<float>(n);
  for (int round = 0; round < 50; ++round) {
    block.each(n, [&](int64_t i) { mine[i] = by + i; });
    block.sync();
    block.each(n, [&](int64_t i) { y[i] = mine[i]; });
  }
}
""",
        [Param("y", "f32", "n", "write"), Scalar("n", low=1, high=10_000), Scalar("by", "f32")],
        shared_bytes="n * 4",
    )
    cached, failures = CACHE.get_or_compile(kernel), []

    def work(number: int) -> None:
        for n in (10, 5000, 100, 10_000):
            y = np.zeros(n, np.float32)
            cached.launch(y, n, number)
            if not np.array_equal(y, np.arange(n, dtype=np.float32) + number):
                failures.append((number, n))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_buffer_at_an_address_of_its_own() -> None:
    scale = CACHE.get_or_compile(SCALE)
    memory = np.arange(10, dtype=np.float32)
    address = memory.__array_interface__["data"][0]
    x = Buffer.at_address(address, (5,), "f32", owner=memory)
    y = Buffer.at_address(address + 20, (5,), "f32", owner=memory)
    scale.launch(x, y, 5, 10.0)
    assert memory.tolist() == [0, 1, 2, 3, 4, 0, 10, 20, 30, 40]
    with pytest.raises(LaunchError, match="shares 16 bytes with x"):
        scale.launch(x, Buffer.at_address(address + 4, (5,), "f32", owner=memory), 5, 10.0)


def test_events_of_the_host_are_its_clock() -> None:
    first, second = CPU.event(), CPU.event()
    first.record()
    time.sleep(0.01)
    second.record()
    second.wait()
    assert second.ns_since(first) >= 10_000_000
    with pytest.raises(DeviceError, match="no streams"):
        first.record(stream=3)
    with pytest.raises(DeviceError, match="call record on both"):
        CPU.event().ns_since(first)
    assert open_device("NULL").event().ns_since(first) == 0
    assert CPU.clock().name == "CPU"
