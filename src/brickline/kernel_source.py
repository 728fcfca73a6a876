"""The text that a compiler is given for a kernel: its source, and an entry that calls it.

The entry is the only generated code. Lines of the user's source keep their numbers and carry the
kernel's name as their file, so a compiler's message points at them. A single-source function
stands in a namespace of its own, inside that of the headers: ``exp`` is brickline's on every
device. It knows what the headers need of a compiler, and neither compilers nor devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

from brickline.dtypes import dtype_of
from brickline.errors import KernelError
from brickline.kernel import Kernel, Param, Scalar

INCLUDE_DIRECTORY = Path(__file__).parent / "include"
"""What a compiler searches for ``brickline/kernel.h``."""
CPU_HEADERS = (
    "arithmetic",
    "elements",
    "entry_cpu",
    "kernel",
    "launch",
    "platform",
    "reductions",
    "simd",
)
CUDA_HEADERS = ("arithmetic", "elements", "entry_cuda", "kernel", "platform", "reductions")
MEGAKERNEL_HEADERS = (
    *CUDA_HEADERS,
    "megakernel",
    "megakernel_cuda",
    "megakernel_device",
    "megakernel_entries",
    "megakernel_intake",
    "megakernel_lists",
    "megakernel_queue",
    "megakernel_queue_cuda",
)
CPU_FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-exceptions")
"""What the meaning of a single-source kernel rests on; how much to optimise is the device's. An
exception could only end the process, so the compiler refuses it."""

# No function, argument or macro of a kernel may have such a name.
_LAUNCH = "brickline_the_launch"
_ARGUMENT = "brickline_argument"

_C_CHECKS = (
    "conversion",
    "implicit-function-declaration",
    "incompatible-pointer-types",
    "int-conversion",
    "pointer-sign",
)
"""Warnings which say that a call of a C function changes its arguments."""


def entry_point(kernel: Kernel) -> str:
    """Return the symbol of the compiled code: unique per kernel, but for CUDA code its own."""
    return kernel.entry if kernel.language in ("cuda", "megakernel") else kernel.short


def expected_function(kernel: Kernel) -> str:
    """Return the declaration of the function that the signature of a kernel asks for."""
    return f"void {kernel.entry}({', '.join(_parameter_types(kernel))})"


def headers(kernel: Kernel, *, cuda: bool) -> list[Path]:
    """Return the headers of brickline that its text includes, in a fixed order."""
    names = {
        ("block", False): CPU_HEADERS,
        ("block", True): CUDA_HEADERS,
        ("c", False): ("launch",),
        ("megakernel", True): MEGAKERNEL_HEADERS,
    }.get((kernel.language, cuda), ())
    return [INCLUDE_DIRECTORY / "brickline" / f"{name}.h" for name in names]


def cpu_source(kernel: Kernel) -> str:
    """Return what the host compiler is given: C++17 for language "block", C11 for "c".

    Raises:
        KernelError: The kernel is CUDA code.
    """
    if kernel.language in ("cuda", "megakernel"):
        raise KernelError(
            f"expected a kernel that runs on a CPU, got CUDA code - at kernel {kernel.name}; write "
            "it against Block, or launch it on a CUDA device"
        )
    return _plain_c_unit(kernel) if kernel.language == "c" else _cpu_unit(kernel)


def cuda_source(kernel: Kernel) -> str:
    """Return what NVRTC is given.

    Raises:
        KernelError: The kernel is plain C.
    """
    if kernel.language == "c":
        raise KernelError(
            f"expected a kernel that runs on CUDA, got plain C - at kernel {kernel.name}; write it "
            "against Block, or launch it on the CPU"
        )
    return _cuda_unit(kernel) if kernel.language == "block" else _user_text(kernel)


def _cpu_unit(kernel: Kernel) -> str:
    return f"""\
#include "brickline/entry_cpu.h"
{in_namespace(kernel)}
namespace brickline {{

// Flattened: what a kernel hands to Block is inlined, or its loops would not vectorise.
extern "C" __attribute__((visibility("default"), flatten)) void
{entry_point(kernel)}(const brickline_launch* {_LAUNCH}) {{
{exact_types(kernel)}
{_unpacked(kernel)}
    for (uint64_t linear = {_LAUNCH}->first; linear < {_LAUNCH}->last; ++linear) {{
        Overflow overflow;
        Block block(place_of(*{_LAUNCH}, linear, overflow));
        user::{kernel.entry}({_passed(kernel, "block")});
    }}
}}

}}  // namespace brickline
"""


def _cuda_unit(kernel: Kernel) -> str:
    parameters = [
        f"{_type(argument)} {_ARGUMENT}{place}" for place, argument in enumerate(kernel.signature)
    ]
    return f"""\
#include "brickline/entry_cuda.h"
{in_namespace(kernel)}
namespace brickline {{

extern "C" __global__ void {_launch_bounds(kernel)}
{entry_point(kernel)}({", ".join([*parameters, "uint32_t* fault"])}) {{
{exact_types(kernel)}
    platform::let_others_begin();
    __shared__ uint4 scratch[Place::SCRATCH_BYTES / sizeof(uint4)];
    extern __shared__ uint4 shared[];
    Block block(place_of_thread(scratch, shared, fault));
{_asked_ahead(kernel)}    platform::wait_for_others();
    user::{kernel.entry}({_passed(kernel, "block")});
}}

}}  // namespace brickline
"""


def _asked_ahead(kernel: Kernel) -> str:
    """The call of what a kernel asks for before the launches that it depends on have ended."""
    ahead = f"{kernel.entry}_ahead"
    if not re.search(rf"\b{ahead}\b", kernel.source):
        return ""
    return f"    user::{ahead}({_passed(kernel, 'block')});\n"


def _plain_c_unit(kernel: Kernel) -> str:
    checks = "\n".join(f'#pragma GCC diagnostic error "-W{name}"' for name in _C_CHECKS)
    return f"""\
{_user_text(kernel)}
#include "brickline/launch.h"

// The call may add qualifiers and widen a value, and nothing else. C has no way to ask for the
// types of a function's parameters; a second declaration would refuse volatile and long long.
{checks}
#ifndef __clang__  // which counts them as incompatible
#pragma GCC diagnostic error "-Wdiscarded-qualifiers"
#endif
__attribute__((visibility("default"))) void
{entry_point(kernel)}(const brickline_launch* {_LAUNCH}) {{
{_unpacked(kernel)}
    {kernel.entry}({_passed(kernel)});
}}
"""


def _user_text(kernel: Kernel) -> str:
    """The macros, the source with its own line numbers, and the end of both."""
    undone = "".join(f"#undef {name}\n" for name in kernel.defines)
    return (
        f'{kernel.define_lines}#line 1 "{kernel.name}"\n{kernel.source}\n'
        f'#line 1 "entry of {kernel.name}"\n{undone}'
    )


def in_namespace(kernel: Kernel, name: str = "user") -> str:
    """Return the source of a kernel inside a namespace of the headers' own."""
    return (
        f"namespace brickline::{name} {{\n{_user_text(kernel)}}}  // namespace brickline::{name}\n"
    )


def argument_type(argument: Param | Scalar) -> str:
    """Return the type of an argument of a single-source kernel."""
    return _type(argument)


def _type(argument: Param | Scalar, *, plain: bool = False) -> str:
    dtype = dtype_of(argument.dtype)
    kind = dtype.c_type if plain else dtype.block_type
    if isinstance(argument, Scalar):
        return kind
    return f"{kind}*" if argument.access.writes else f"const {kind}*"


def _parameter_types(kernel: Kernel) -> list[str]:
    plain = kernel.language == "c"
    types = [_type(argument, plain=plain) for argument in kernel.signature]
    return ["Block&", *types] if kernel.language == "block" else types


def exact_types(kernel: Kernel, namespace: str = "user") -> str:
    """Return a line that compiles if the function, or an overload, has the signature's types.

    A call alone would convert scalars. Qualifiers of the parameters themselves are no part of it.
    """
    types = ", ".join(_parameter_types(kernel))
    return f"    (void)sizeof(static_cast<void (*)({types})>({namespace}::{kernel.entry}));"


def _unpacked(kernel: Kernel) -> str:
    """One line per argument, which reads its value through the launch's pointer to it."""
    plain = kernel.language == "c"
    kinds = [_type(argument, plain=plain) for argument in kernel.signature]
    return "\n".join(
        f"    {kind} const {_ARGUMENT}{place} = *({kind} const*){_LAUNCH}->arguments[{place}];"
        for place, kind in enumerate(kinds)
    )


def _passed(kernel: Kernel, *first: str) -> str:
    return ", ".join(_arguments(first, len(kernel.signature)))


def _arguments(first: Iterable[str], count: int) -> Iterable[str]:
    yield from first
    yield from (f"{_ARGUMENT}{place}" for place in range(count))


def _launch_bounds(kernel: Kernel) -> str:
    """Tell NVRTC the number of lanes where it is fixed, so that registers suffice for them."""
    lanes = [size.value for size in kernel.local_size or ()]
    return f"__launch_bounds__({prod(filter(None, lanes))})" if all(lanes) else ""
