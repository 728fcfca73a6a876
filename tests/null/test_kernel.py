"""Kernels: what a declaration derives, what identifies it, and what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from brickline.dtypes import DTYPES
from brickline.errors import KernelError, LaunchError, SymbolicError
from brickline.kernel import BLOCK_INDEX, Access, Kernel, LaunchShape, Param, Scalar
from brickline.kernel_checks import MAX_SOURCE_BYTES
from brickline.symbolic import Expr, Variable, ceil_div, maximum

SOURCE = """
BRICKLINE void rms_norm(Block& block, const bf16* x, int64_t rows, float* y, int64_t n, float eps) {
}
"""
SIGNATURE = (
    Param("x", "bf16", ("rows", "n"), align=16),
    Scalar("rows"),
    Param("y", "f32", ("rows", "n"), "write", touches=("block_x*n*4", "(block_x + 1)*n*4")),
    Scalar("n", low=1, high=65536),
    Scalar("eps", "f32"),
)


def kernel(**changes: Any) -> Kernel:
    declaration: dict[str, Any] = {
        "name": "rms_norm",
        "source": SOURCE,
        "signature": SIGNATURE,
        "global_size": "rows",
    }
    return Kernel(**declaration | changes)


def scaling(source: str = "void scale() {}", **changes: Any) -> Kernel:
    """A kernel of one buffer."""
    given = {"signature": [Param("x", "f32", "n", "read-write"), Scalar("n")], "global_size": 1}
    return Kernel("scale", source, **given | changes)


def test_what_a_declaration_derives():
    rms = kernel(shared_bytes="n*4", flops="3*rows*n", bytes="6*rows*n", local_size="min(n, 256)")
    rows, n = Variable("rows", 0, 2**62), Variable("n", 1, 65536)
    assert [param.name for param in rms.params] == ["x", "y"]
    assert [scalar.name for scalar in rms.scalars] == ["rows", "n", "eps"]
    assert rms.variables == (rows, n)
    assert rms.var_names == ("rows", "n", "eps")
    assert rms.globals == (0, 2)
    assert (rms.ins, rms.outs) == ((0,), (1,))
    assert rms.global_size == (rows, Expr.constant(1), Expr.constant(1))
    assert rms.shared_bytes is 4 * n
    assert rms.flops is 3 * n * rows
    assert rms.params[0].shape == (rows, n)
    x = BLOCK_INDEX[0]
    assert rms.params[1].touches == (4 * n * x, 4 * n * (x + 1))
    assert rms.params[1].touches[1] - rms.params[1].touches[0] is 4 * n
    assert (rms.params[0].align, rms.params[1].align) == (16, 4)
    assert rms.entry == "rms_norm"
    assert repr(rms) == f"<Kernel rms_norm_{rms.digest[:8]} (x, rows, y, n, eps), block>"


def test_expressions_may_be_given_as_such():
    n = Variable("n", 0, 2**62)
    made = scaling(global_size=(ceil_div(n, 256), maximum(n, 1), np.int64(2)), local_size=[32, 2])
    assert made == scaling(global_size=("ceil_div(n, 256)", "max(n, 1)", 2), local_size=("32", 2))
    assert [str(size) for size in made.global_size] == ["ceil_div(n, 256)", "maximum(1, n)", "2"]


def test_a_buffer_that_is_read_and_written_is_in_both():
    assert (scaling().ins, scaling().outs) == ((0,), (0,))
    assert Param("x", np.float32, 4).access is Access.READ
    assert Param("x", DTYPES["f32"], ()).shape == ()


def test_scalars_have_bounds_by_default():
    assert Scalar("n") == Scalar("n", "int64", 0, 2**62)
    assert Scalar("n", "i32") == Scalar("n", np.int32, np.int8(0), 2**31 - 1)
    assert Scalar("n", "i32", low=-(2**31)).variable is Variable("n", -(2**31), 2**31 - 1)
    assert Scalar("eps", "f64").variable is None


# Identity.


def test_equal_declarations_are_one_kernel():
    assert kernel() == kernel()
    assert len({kernel(), kernel(), scaling()}) == 2
    assert kernel() != "rms_norm"
    assert kernel(reference=lambda x: x) == kernel()
    assert kernel().digest == kernel(local_size=128, entry="rms_norm", defines={}).digest
    assert kernel(defines={"A": 1, "B": 2}).digest == kernel(defines={"B": 2, "A": 1}).digest
    assert re.fullmatch("[0-9a-f]{64}", kernel().digest)
    assert kernel().short == f"rms_norm_{kernel().digest[:8]}"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"source": SOURCE + " "},
        {"signature": SIGNATURE[:-1]},
        {"signature": (*SIGNATURE[:-1], Scalar("eps", "f64"))},
        {"signature": (Param("x", "bf16", ("rows", "n")), *SIGNATURE[1:])},
        {"global_size": "rows + 1"},
        {"local_size": 64},
        {"language": "cuda", "local_size": 128},
        {"shared_bytes": 4},
        {"flops": 0},
        {"bytes": 0},
        {"pure": False},
        {"defines": {"N": 1}},
        {"defines": {"N": 1.0}},
        {"defines": {"N": "1"}},
        {"entry": "other"},
        {"host_parallel_safe": False},
    ],
    ids=str,
)
def test_every_part_but_the_reference_is_in_the_identity(change: dict[str, Any]):
    changed = kernel(**change)
    assert changed != kernel()
    assert changed != kernel(defines={"M": 1})
    assert Kernel.from_json(json.loads(json.dumps(changed.to_json()))) == changed


def test_the_digest_is_the_same_in_another_process():
    code = (
        "import json, sys\n"
        "from brickline.kernel import Kernel\n"
        "print(Kernel.from_json(json.load(sys.stdin)).digest)"
    )
    text = json.dumps(kernel().to_json())
    done = subprocess.run(
        [sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == kernel().digest


def test_a_kernel_is_frozen_and_travels():
    rms = kernel(reference=np.sqrt, defines={"N": 4})
    with pytest.raises(dataclasses.FrozenInstanceError):
        rms.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        rms.defines["N"] = 5  # type: ignore[index]
    again = pickle.loads(pickle.dumps(rms))
    assert again == rms
    assert again.reference is np.sqrt
    assert dataclasses.replace(rms, pure=False).to_json() == {**rms.to_json(), "pure": False}
    assert Kernel.from_source(SOURCE, name="rms_norm", signature=SIGNATURE) == kernel(global_size=1)


def test_json_is_what_json_gives_back():
    data = kernel(defines={"N": np.int32(4), "E": np.float64(1e-5), "T": "float"}).to_json()
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize(
    "data", [None, 3, [], {}, {"name": "k"}, {"signature": 3}, {"signature": [{"shape": 1}]}]
)
def test_json_that_is_no_kernel(data: Any):
    with pytest.raises(KernelError, match=r"expected what Kernel\.to_json returns, got"):
        Kernel.from_json(data)


def test_json_with_something_else_in_it():
    with pytest.raises(KernelError, match="surplus"):
        Kernel.from_json({**kernel().to_json(), "surplus": 1})
    with pytest.raises(KernelError, match="expected language"):
        Kernel.from_json({**kernel().to_json(), "language": "fortran"})


def test_macros_become_lines():
    made = scaling(defines={"WIDTH": 4, "EPS": -1e-05, "T": "float", "LOW": -3, "EMPTY": ""})
    assert made.define_lines == (
        "#define EMPTY \n#define EPS (-1e-05)\n#define LOW (-3)\n#define T float\n#define WIDTH 4\n"
    )


# Launch shapes.


def test_sizes():
    rms = kernel(shared_bytes="n*4", local_size="min(n, 256)")
    shape = rms.sizes({"rows": 7, "n": np.int64(100), "eps": 1e-5})
    assert shape == LaunchShape((7, 1, 1), (100, 1, 1), 400)
    assert scaling(language="c").sizes({"n": 0}) == LaunchShape((1, 1, 1), (1, 1, 1), 0)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"rows": 0, "n": 1}, LaunchError, "global_size[0] of at least 1, got 0 with rows=0, n=1"),
        ({"rows": 1}, SymbolicError, "a value of n from 1 to 65536, got none - at kernel rms_norm"),
        ({"rows": 1, "n": 0}, SymbolicError, "expected n from 1 to 65536, got 0"),
        ({"rows": 1, "n": 1, "x": 1}, SymbolicError, "got one for x too - at kernel rms_norm"),
        ({"rows": 1.0, "n": 1}, SymbolicError, "expected rows as an integer"),
    ],
)
def test_sizes_that_no_launch_has(values: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=re.escape(words)):
        kernel().sizes(values)


def test_a_size_that_overflows_names_its_place():
    large = kernel(global_size=(1, "rows*rows"))
    with pytest.raises(
        SymbolicError, match=r"int64, got .* - at kernel rms_norm, global_size\[1\]"
    ):
        large.sizes({"rows": 2**40, "n": 1})
    negative = kernel(shared_bytes="100 - n")
    assert negative.sizes({"rows": 1, "n": 100}).shared_bytes == 0
    with pytest.raises(LaunchError, match="expected shared_bytes of at least 0, got -1"):
        negative.sizes({"rows": 1, "n": 101})


def test_zero_elements_are_a_shape():
    made = scaling(signature=[Param("x", "f32", (0, "n"), "write"), Scalar("n")])
    assert [size.low for size in made.params[0].shape] == [0, 0]


# Refusals.


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Param("2x", "f32", 1), "the name of a parameter as an identifier of C"),
        (lambda: Param("float", "f32", 1), "no keyword of C"),
        (lambda: Param("brickline_x", "f32", 1), "does not begin with brickline_"),
        (lambda: Param("x" * 201, "f32", 1), "at most 200 characters"),
        (lambda: Param(7, "f32", 1), "got 7"),
        (lambda: Param("x", "f31", 1), "parameter x: expected a dtype"),
        (lambda: Param("x", "f32", 1, "readwrite"), "one of read, write, read-write, got 'readw"),
        (
            lambda: Param("x", "f32", 1, "write", accumulate="mul"),
            "one of add, max, min, got 'mul'",
        ),
        (lambda: Param("x", "f32", 1, "write", accumulate="add"), "expected access 'read-write'"),
        (
            lambda: Param("x", "f32", 1, accumulate="add"),
            "'read-write' with accumulate, got 'read'",
        ),
        (lambda: Param("x", "f32", 1, align=2), "a power of two from 4 (the size of f32) to 4096"),
        (lambda: Param("x", "f32", 1, align=24), "got 24"),
        (lambda: Param("x", "u8", 1, align=True), "got True"),
        (lambda: Param("x", "f32", 1, align=8192), "got 8192"),
        (lambda: Param("x", "f32", 1, touches=(0,)), "touches as (first byte, end), got (0,)"),
        (lambda: Param("x", "f32", 1, touches="ab"), "got 'ab'"),
        (lambda: Scalar("n", "bf16"), "expected a scalar of i64, i32, f64, f32, got bf16"),
        (lambda: Scalar("n", "bool"), "got bool"),
        (lambda: Scalar("eps", "f32", low=0), "expected bounds of integers alone, got 0 to None"),
        (lambda: Scalar("n", "i32", high=2**31), "within i32, from -2147483648 to 2147483647"),
        (lambda: Scalar("n", low=1, high=0), "scalar n: expected bounds of n within int64"),
        (lambda: Scalar("n", low=0.5), "expected integer bounds of n, got 0.5"),
        (lambda: Scalar("block_x"), "expected a name other than the block's place"),
        (lambda: Scalar("lambda"), "scalar lambda: expected a variable's name"),
    ],
)
def test_an_argument_that_contradicts_itself(build: Any, words: str):
    with pytest.raises(KernelError, match=re.escape(words)):
        build()


X = Param("x", "f32", "n", "write")
N = Scalar("n")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "rms-norm"}, "the name of a kernel as an identifier of C"),
        ({"entry": "a::b"}, "the entry of kernel rms_norm as an identifier"),
        ({"source": ""}, "expected a source, got '' - at kernel rms_norm"),
        ({"source": " \n"}, "expected a source, got ' \\n'"),
        ({"source": b"void"}, "expected the source as text, got bytes"),
        ({"source": "a\n\0"}, "without NUL characters, got one in line 2"),
        ({"source": "a\n\n// \ud800"}, "valid Unicode, got '\\ud800' in line 3"),
        ({"signature": ["x"]}, "expected a Param or Scalar, got 'x' - at kernel rms_norm, signat"),
        ({"signature": [X, N, Scalar("x")]}, "got x twice - at kernel rms_norm"),
        ({"signature": [X, N, Scalar("rms_norm")]}, "got rms_norm twice"),
        ({"signature": []}, "access 'write' or 'read-write', got none"),
        ({"signature": [Param("x", "f32", 1)]}, "got none - at kernel rms_norm; declare what"),
        ({"signature": [X]}, "kernel rms_norm, parameter x, shape[0]: expected a variable (none"),
        ({"signature": [Param("x", "f32", -1, "write")]}, "reaches 0, got -1, at most -1"),
        ({"signature": [Param("x", "f32", 1.5, "write")]}, "an integer, got 1.5"),
        ({"signature": [Param("x", "f32", True, "write")]}, "an integer, got True"),
        (
            {"signature": [N, dataclasses.replace(X, touches=("block_x*4 + 4", "block_x*4"))]},
            "the end not before it, got (4*block_x + 4, 4*block_x) - at kernel rms_norm, parameter",
        ),
        ({"global_size": "cols"}, "global_size[0]: expected a variable (rows, n), got 'cols'"),
        ({"global_size": "eps"}, "expected a variable (rows, n), got 'eps'"),
        ({"global_size": "block_x"}, "got 'block_x'"),
        ({"global_size": Variable("n", 0, 5)}, "got Variable('n', 0, 5) in n - at kernel rms_norm"),
        ({"global_size": 0}, "reaches 1, got 0, at most 0 - at kernel rms_norm, global_size[0]"),
        ({"global_size": (1, 1, 1, 1)}, "global_size with one to three sizes, got 4"),
        ({"global_size": ()}, "global_size with one to three sizes, got 0"),
        ({"local_size": "-n"}, "local_size[0]; no launch of it is possible"),
        ({"shared_bytes": -1}, "reaches 0, got -1"),
        ({"flops": "n/2"}, "kernel rms_norm, flops: expected integers, variables"),
        ({"language": "opencl"}, "language as one of block, cuda, c, got 'opencl'"),
        ({"language": "cuda"}, "expected local_size for CUDA code, got none"),
        ({"language": "c"}, "expected global_size 1 for plain C, got rows, 1, 1"),
        (
            {"language": "c", "global_size": 1, "local_size": 1},
            "expected no local_size for plain C",
        ),
        ({"language": "c", "global_size": 1, "shared_bytes": 4}, "no shared_bytes for plain C"),
        ({"pure": 1}, "expected pure as True or False, got 1"),
        ({"host_parallel_safe": None}, "expected host_parallel_safe as True or False"),
        ({"reference": 3}, "expected reference as a function"),
        ({"defines": {"a b": 1}}, "the name of a macro of kernel rms_norm as an identifier"),
        ({"defines": {"n": 1}}, "no argument and not the function, got n"),
        ({"defines": {"A": True}}, "one line of text, got True - at kernel rms_norm, defines['A']"),
        ({"defines": {"A": float("nan")}}, "a finite float"),
        ({"defines": {"A": "1\n"}}, "one line of text"),
        ({"defines": {"A": "1\\"}}, "one line of text"),
        ({"defines": {"A": 2**64}}, "within int64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_kernel_that_contradicts_itself(changes: dict[str, Any], words: str):
    with pytest.raises(KernelError, match=re.escape(words)):
        kernel(**changes)


# Sources.


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("threadIdx.x", "block.each(n, f) or block.reduce(n, identity, combine, f)"),
        ("blockIdx.x", "block.index(axis)"),
        ("blockDim.x", "block.lanes()"),
        ("gridDim.x", "block.blocks(axis)"),
        ("__shared__ float a[4]", "block.shared<T>(count)"),
        ("__syncthreads()", "block.sync()"),
        ("__syncwarp()", "block.groups(rows, f)"),
        ("__shfl_xor_sync(a, b, c)", "block.groups(rows, f)"),
        ("atomicAdd(x, 1.0f)", "block.atomic_add(pointer, value)"),
        ("__global__ void f()", "BRICKLINE in front of the function"),
    ],
)
def test_what_only_cuda_has_is_refused_in_a_single_source(word: str, instead: str):
    source = f"// first\nvoid scale() {{ {word}; }}"
    with pytest.raises(KernelError, match=re.escape(f"use {instead}, or declare language='cuda'")):
        scaling(source)
    assert scaling(source, language="cuda", local_size=32).source == source
    name = re.match(r"\w+", word)
    assert name is not None
    with pytest.raises(KernelError, match=f"got {name[0]} in line 2 - at kernel scale"):
        scaling(source)


@pytest.mark.parametrize(
    "source",
    [
        "// threadIdx",
        "// continued \\\n threadIdx",
        "/* threadIdx \n threadIdx */ int a;",
        "/* not closed threadIdx",
        'const char* a = "threadIdx";',
        r'const char* a = "\"threadIdx";',
        'const char* a = R"(" threadIdx)";',
        'const char* a = u8R"x()" threadIdx )x";',
        "int a = 'threadIdx';",
        "int a = 1'000; // ' threadIdx",
        "int threadIdx_ = 0, my_threadIdx = 1, threadIdxs = 2;",
        "double a = 0x1.8p+1, b = 1e-5, c = .5f;",
        "block.atomic_added(x);",
    ],
)
def test_words_in_comments_literals_and_other_names_do_not_count(source: str):
    assert scaling(source).source == source


@pytest.mark.parametrize(
    "source",
    [
        "/* closed */ threadIdx.x;",
        '"a" threadIdx "b";',
        "'\"' threadIdx '\"'",
        "int a = 1'000'000 + threadIdx.x; // '",
        'R"x()" )x" threadIdx "',
        "// one line\nthreadIdx",
        "a = '\\''; threadIdx",
        '"not closed\nthreadIdx',
        "a/b; threadIdx; /**/",
        "L'a' threadIdx ' '",
    ],
)
def test_words_between_comments_and_literals_count(source: str):
    with pytest.raises(KernelError, match="expected code against Block, got threadIdx in line"):
        scaling(source)


def test_atomic_addition_is_declared():
    source = "void scale() { block.atomic_add(x, 1.0f); }"
    with pytest.raises(KernelError, match="with accumulate='add' for atomic_add in line 1, got no"):
        scaling(source)
    target = Param("x", "f32", "n", "read-write", accumulate="add")
    assert scaling(source, signature=[target, N]).params[0].accumulate == "add"


def test_a_source_of_100_mb_is_refused_at_once():
    source = "x" * 100_000_000
    start = time.perf_counter()
    with pytest.raises(
        KernelError, match=f"at most {MAX_SOURCE_BYTES} bytes, got at least 1000000"
    ):
        scaling(source)
    assert time.perf_counter() - start < 0.05


def test_the_limit_of_a_source_is_in_bytes():
    assert len(scaling("x" * MAX_SOURCE_BYTES).source) == MAX_SOURCE_BYTES
    with pytest.raises(KernelError, match="got at least 8388609"):
        scaling("x" * (MAX_SOURCE_BYTES + 1))
    with pytest.raises(KernelError, match="got at least 8388610"):
        scaling("é" * (MAX_SOURCE_BYTES // 2 + 1))


@pytest.mark.parametrize("piece", ['R"(', "/*", '"', "'", "1'", "//\\\n", "\\", 'R"a', "a "])
def test_no_source_takes_long_to_look_through(piece: str):
    source = "threadIdx".join((piece * (2**20 // len(piece)), ""))
    start = time.perf_counter()
    with contextlib.suppress(KernelError):
        scaling(source)
    assert time.perf_counter() - start < 2


def test_a_block_source_includes_nothing() -> None:
    source = "\n  # include <math.h>\nBRICKLINE void f(Block& block, float* x) {}"
    with pytest.raises(KernelError, match=r"got #include in line 2 - at kernel f"):
        Kernel("f", source, [Param("x", "f32", 1, "write")])
    y = Param("x", "f32", 1, "write")
    Kernel("f", "// #include is not needed\nvoid f();", [y])
    for harmless in (
        "/*\n#include <math.h>\n*/",
        "// a \\\n#include <math.h>",
        'const char* text = R"(\n#include <math.h>\n)";',
        "int include;",
    ):
        Kernel("f", f"{harmless}\nvoid f();", [y])
    with pytest.raises(KernelError, match=r"got #include in line 3 - at kernel f"):
        Kernel("f", "/*\n*/\n/* why */ #include <math.h>\nvoid f();", [y])


@pytest.mark.parametrize(
    "code",
    [
        "block.shared<float>(n)",
        "block . shared < float > (n)",
        "(&block)->shared<float>(n)",
        "block.template shared<float>(n)",
        "block./* all */shared<float>(n)",
    ],
)
def test_shared_memory_is_declared(code: str) -> None:
    source = f"BRICKLINE void f(Block& block, float* x, int64_t n) {{\n  float* y = {code};\n}}"
    signature = [Param("x", "f32", 1, "write"), Scalar("n")]
    for nothing in (0, "0", "0 * n"):
        with pytest.raises(
            KernelError, match=r"expected shared_bytes for shared.* in line 2, got 0"
        ):
            Kernel("f", source, signature, shared_bytes=nothing)
    Kernel("f", source, signature, shared_bytes="4 * n")


@pytest.mark.parametrize(
    "code", ["// block.shared<float>(n)", "float shared; shared < n;", '"block.shared<float>(n)";']
)
def test_other_uses_of_the_word_shared_need_no_memory(code: str) -> None:
    source = f"BRICKLINE void f(Block& block, float* x) {{\n  {code}\n}}"
    Kernel("f", source, [Param("x", "f32", 1, "write")])


def test_limits_of_the_launcher_are_known_at_declaration() -> None:
    source = "BRICKLINE void f(Block& block) {}"
    many = [Param(f"x{number}", "f32", 1, "write") for number in range(65)]
    with pytest.raises(KernelError, match="at most 64 arguments, got 65"):
        Kernel("f", source, many)
    with pytest.raises(KernelError, match="at most 8 dimensions, got 9"):
        Param("x", "f32", (1,) * 9)
    for wrong in (None, many[0], "x"):
        with pytest.raises(KernelError, match="expected the signature as a list"):
            Kernel("f", source, wrong)  # type: ignore[arg-type]
