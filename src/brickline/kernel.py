"""Kernel: a source, its arguments and its symbolic launch shape. Belongs to no device.

A declaration checks itself when it is made: names, dtypes, expressions, and for single-source
kernels the code. Its identity is a hash of its content, so that equal declarations are the same
kernel in every process. Compiling and launching happen elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from brickline.errors import KernelError, LaunchError
from brickline.kernel_arguments import (
    BLOCK_INDEX,
    Access,
    Param,
    Scalar,
    Size,
    Sizes,
    declaring,
    sequence,
    set_fields,
)
from brickline.kernel_checks import check_block_source, check_name, check_source
from brickline.symbolic import Expr, Variable
from brickline.symbolic_values import check_values

__all__ = ["BLOCK_INDEX", "Access", "Kernel", "LaunchShape", "Param", "Scalar"]

Language: TypeAlias = Literal["block", "cuda", "c", "megakernel"]
"""The last one is generated: CUDA code around kernels of the first, with their meaning."""

MAX_ARGUMENTS = 64
"""As many as the launcher has places for."""
DEFAULT_LANES = 128
"""Lanes per block of a single-source kernel: four warps fill an SM at any register count."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How large one launch is."""

    global_size: tuple[int, int, int]
    """Blocks by axis."""
    local_size: tuple[int, int, int]
    """Lanes of a block by axis."""
    shared_bytes: int
    """Shared memory of a block."""


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Kernel:
    """What to compute, for any device: compared and hashed by its content.

    Example:
        >>> scale = Kernel(
        ...     "scale",
        ...     "BRICKLINE void scale(Block& block, float* x, int64_t n, float by) {"
        ...     "  int64_t first = block.index() * 1024, left = n - first;"
        ...     "  block.each(left < 1024 ? left : 1024, [&](int64_t i) { x[first + i] *= by; });"
        ...     "}",
        ...     [Param("x", "f32", "n", "read-write"), Scalar("n", low=1), Scalar("by", "f32")],
        ...     global_size="ceil_div(n, 1024)",
        ... )
        >>> scale.sizes({"n": 5000}).global_size
        (5, 1, 1)
    """

    name: str
    source: str
    signature: tuple[Param | Scalar, ...]
    """The arguments in the function's order."""
    global_size: tuple[Expr, Expr, Expr]
    """Blocks by axis."""
    local_size: tuple[Expr, Expr, Expr] | None
    """Lanes of a block by axis; None of plain C."""
    language: Language
    shared_bytes: Expr
    """Shared memory of a block."""
    flops: Expr | None
    """Estimated floating-point operations of a launch."""
    bytes: Expr | None
    """Estimated bytes that a launch moves."""
    pure: bool
    """Whether equal inputs give equal outputs and nothing else changes."""
    reference: Callable[..., Any] | None
    """The same computation in NumPy; no part of the identity."""
    defines: Mapping[str, int | float | str]
    """Macros by name, sorted."""
    entry: str
    """The function in the source."""
    host_parallel_safe: bool
    """Whether host threads may execute blocks of it, or launches of it, at the same time."""

    def __init__(
        self,
        name: str,
        source: str,
        signature: Sequence[Param | Scalar],
        global_size: Sizes = 1,
        local_size: Sizes | None = None,
        *,
        language: Language = "block",
        shared_bytes: Size = 0,
        flops: Size | None = None,
        bytes: Size | None = None,  # noqa: A002 - beside flops, what a roofline is made of
        pure: bool = True,
        reference: Callable[..., Any] | None = None,
        defines: Mapping[str, int | float | str] | None = None,
        entry: str | None = None,
        host_parallel_safe: bool = True,
    ) -> None:
        """Declare a kernel.

        Args:
            name: An identifier of C.
            source: The code, which defines the function `entry`.
            signature: A `Param` or `Scalar` for every argument, in the function's order; that of
                a "block" function without its first, the Block.
            global_size: Blocks, one to three sizes. Default 1.
            local_size: Lanes of a block, one to three sizes. Default 128 for "block"; required
                for "cuda", and absent for "c".
            language: "block" (one source for all devices, against ``brickline/kernel.h``), "cuda"
                (CUDA C++ as it is) or "c" (plain C as it is, called once). Default "block".
            shared_bytes: Shared memory of a block. Default 0.
            flops: Estimate for one launch. Default None: not known.
            bytes: Estimate for one launch. Default None: not known.
            pure: Default True; False for one that keeps state or draws random numbers.
            reference: The same computation in NumPy. Default None.
            defines: Macros for the source, part of the identity. Default none.
            entry: The function's name in the source. Default `name`.
            host_parallel_safe: Default True; False for a source with static variables.

        Raises:
            KernelError: The declaration contradicts itself.
        """
        where = f"kernel {check_name(name, 'the name of a kernel')}"
        _check_flags(language, pure, host_parallel_safe, reference, where)
        set_fields(
            self,
            name=name,
            source=check_source(source, where),
            language=language,
            entry=name if entry is None else check_name(entry, f"the entry of {where}"),
            pure=pure,
            reference=reference,
            host_parallel_safe=host_parallel_safe,
        )
        arguments = _arguments(signature, self.entry, where)
        if language != "megakernel":  # which is given tables instead
            _check_results(arguments, where)
        scope = _Scope(where, tuple(filter(None, map(_variable, arguments))))
        set_fields(
            self,
            signature=tuple(map(scope.argument, arguments)),
            global_size=scope.sizes(global_size, "global_size"),
            local_size=_local_size(scope, language, local_size),
            shared_bytes=scope.expression(shared_bytes, "shared_bytes"),
            flops=flops if flops is None else scope.expression(flops, "flops"),
            bytes=bytes if bytes is None else scope.expression(bytes, "bytes"),
            defines=_macros(
                {} if defines is None else defines,
                {self.entry, *(each.name for each in arguments)},
                where,
            ),
        )
        if language == "c":
            _check_launch_of_c(self, where)
        if language == "block":
            adds = any(param.accumulate == "add" for param in self.params)
            check_block_source(source, adds, self.shared_bytes.value != 0, where)

    @classmethod
    def from_source(cls, source: str, **declaration: Any) -> Kernel:
        """Declare a kernel, the code first and all else by keyword; see the class."""
        return cls(source=source, **declaration)

    @classmethod
    def from_json(cls, data: Any) -> Kernel:
        """Declare again what `to_json` returned; it has no `reference`.

        Raises:
            KernelError: It is something else, or contradicts itself.
        """
        try:
            fields = dict(data)
            signature = [_argument_from_json(dict(each)) for each in fields.pop("signature")]
            return cls(signature=signature, **fields)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            if isinstance(error, KernelError):
                raise
            raise KernelError(f"expected what Kernel.to_json returns, got {error}") from None

    def to_json(self) -> dict[str, Any]:
        """Return the declaration without `reference`, as JSON has it; expressions are texts."""
        return {
            "name": self.name,
            "source": self.source,
            "signature": [argument.to_json() for argument in self.signature],
            "global_size": [str(size) for size in self.global_size],
            "local_size": None
            if self.local_size is None
            else [str(size) for size in self.local_size],
            "language": self.language,
            "shared_bytes": str(self.shared_bytes),
            "flops": None if self.flops is None else str(self.flops),
            "bytes": None if self.bytes is None else str(self.bytes),
            "pure": self.pure,
            "defines": dict(self.defines),
            "entry": self.entry,
            "host_parallel_safe": self.host_parallel_safe,
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole declaration but `reference`, in hexadecimal."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return sha256(text.encode("ascii")).hexdigest()

    @property
    def short(self) -> str:
        """Name and start of the digest: an identifier that tells versions of a kernel apart."""
        return f"{self.name}_{self.digest[:8]}"

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """The buffers, in the order of their slots."""
        return tuple(each for each in self.signature if isinstance(each, Param))

    @cached_property
    def scalars(self) -> tuple[Scalar, ...]:
        """The scalars, in the signature's order."""
        return tuple(each for each in self.signature if isinstance(each, Scalar))

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        """The integer scalars as variables, in the signature's order."""
        return tuple(filter(None, map(_variable, self.signature)))

    @property
    def var_names(self) -> tuple[str, ...]:
        """The names of all scalars, in the order in which their values are passed."""
        return tuple(scalar.name for scalar in self.scalars)

    @property
    def globals(self) -> tuple[int, ...]:
        """The place in the signature of every buffer: slot k is argument ``globals[k]``."""
        places = enumerate(self.signature)
        return tuple(place for place, argument in places if isinstance(argument, Param))

    @property
    def outs(self) -> tuple[int, ...]:
        """The slots that are written."""
        return tuple(slot for slot, param in enumerate(self.params) if param.access.writes)

    @property
    def ins(self) -> tuple[int, ...]:
        """The slots that are read."""
        return tuple(slot for slot, param in enumerate(self.params) if param.access.reads)

    @property
    def define_lines(self) -> str:
        """The macros as lines of C."""
        return "".join(f"#define {name} {_c_text(value)}\n" for name, value in self.defines.items())

    def sizes(self, values: Mapping[str, Any]) -> LaunchShape:
        """Return the shape of a launch with these values of the scalars.

        Args:
            values: Integers by name; those of float scalars may be among them.

        Raises:
            SymbolicError: A value is missing, surplus or out of bounds, or a size overflows.
            LaunchError: A size is zero or below.
        """
        where = f"kernel {self.name}"
        if not isinstance(values, Mapping):
            raise LaunchError(f"expected values by name, got {values!r:.80} - at {where}")
        floats = {scalar.name for scalar in self.scalars if scalar.variable is None}
        integers = {name: value for name, value in values.items() if name not in floats}
        known = check_values(self.variables, integers, where)

        def size(expr: Expr, place: str, least: int = 1) -> int:
            found = expr.evaluate(known, f"{where}, {place}")
            if found >= least:
                return found
            given = ", ".join(f"{name}={value}" for name, value in known.items())
            raise LaunchError(
                f"expected {place} of at least {least}, got {found} with {given or 'no variables'} "
                f"- at {where}, {place} = {expr}; skip the launch, or pass other values"
            )

        local = self.local_size or (Expr.constant(1),) * 3
        x, y, z = (size(expr, f"global_size[{axis}]") for axis, expr in enumerate(self.global_size))
        i, j, k = (size(expr, f"local_size[{axis}]") for axis, expr in enumerate(local))
        return LaunchShape((x, y, z), (i, j, k), size(self.shared_bytes, "shared_bytes", 0))

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Kernel) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        names = ", ".join(argument.name for argument in self.signature)
        return f"<Kernel {self.short} ({names}), {self.language}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _kernel_from_parts, (self.to_json(), self.reference)


def _kernel_from_parts(data: dict[str, Any], reference: Callable[..., Any] | None) -> Kernel:
    kernel = Kernel.from_json(data)
    set_fields(kernel, reference=reference)
    return kernel


def _argument_from_json(data: dict[str, Any]) -> Param | Scalar:
    return Param(**data) if "shape" in data else Scalar(**data)


def _variable(argument: Param | Scalar) -> Variable | None:
    return argument.variable if isinstance(argument, Scalar) else None


@dataclass(frozen=True)
class _Scope:
    """What the expressions of one kernel may name."""

    where: str
    variables: tuple[Variable, ...]

    def expression(
        self, value: Size, place: str, least: int = 0, more: tuple[Variable, ...] = ()
    ) -> Expr:
        """Return an expression over the variables, and ``more``, that can reach ``least``."""
        where = f"{self.where}, {place}"
        known = self.variables + more
        with declaring(where):
            expr = Expr.of(value, known)
        strangers = sorted(repr(variable) for variable in expr.variables - set(known))
        if strangers:
            names = ", ".join(map(repr, known)) or "no variables"
            raise KernelError(
                f"expected an expression over {names}, got {', '.join(strangers)} in {expr} - at "
                f"{where}; declare a Scalar of this name and these bounds"
            )
        if expr.high < least:
            raise KernelError(
                f"expected a size that reaches {least}, got {expr}, at most {expr.high} - at "
                f"{where}; no launch of it is possible"
            )
        return expr

    def sizes(self, value: Sizes, place: str) -> tuple[Expr, ...]:
        """Return three sizes; missing ones are 1."""
        given = sequence(value)
        if not 1 <= len(given) <= 3:
            raise KernelError(
                f"expected {place} with one to three sizes, got {len(given)} - at {self.where}"
            )
        padded = (*given, *(1,) * (3 - len(given)))
        return tuple(
            self.expression(size, f"{place}[{axis}]", least=1) for axis, size in enumerate(padded)
        )

    def argument(self, argument: Param | Scalar) -> Param | Scalar:
        """Return an argument whose texts are read."""
        if isinstance(argument, Scalar):
            return argument
        place = f"parameter {argument.name}"
        shape = tuple(
            self.expression(size, f"{place}, shape[{axis}]")
            for axis, size in enumerate(argument.shape)
        )
        strides = argument.strides and tuple(
            self.expression(step, f"{place}, strides[{axis}]", least=1)
            for axis, step in enumerate(argument.strides)
        )
        if argument.touches is None:
            return replace(argument, shape=shape, strides=strides)
        first, end = (
            self.expression(byte, f"{place}, touches[{which}]", more=BLOCK_INDEX)
            for which, byte in enumerate(argument.touches)
        )
        with declaring(f"{self.where}, {place}, touches"):
            most = (end - first).high
        if most < 0:  # none at all may be what a block touches
            raise KernelError(
                f"expected touches as (first byte, end), the end not before it, got ({first}, "
                f"{end}) - at {self.where}, {place}; name the first byte of a block, then the one "
                "after its last"
            )
        return replace(argument, shape=shape, strides=strides, touches=(first, end))


def _check_flags(
    language: object, pure: object, parallel: object, reference: object, where: str
) -> None:
    if language not in get_args(Language):
        names = ", ".join(get_args(Language)[:3])
        raise KernelError(f"expected language as one of {names}, got {language!r:.80} - at {where}")
    for flag, value in (("pure", pure), ("host_parallel_safe", parallel)):
        if not isinstance(value, bool):
            raise KernelError(f"expected {flag} as True or False, got {value!r:.80} - at {where}")
    if reference is not None and not callable(reference):
        raise KernelError(
            f"expected reference as a function of NumPy arrays, got {reference!r:.80} - at {where}"
        )


def _arguments(
    signature: Sequence[Param | Scalar], entry: str, where: str
) -> tuple[Param | Scalar, ...]:
    if not isinstance(signature, Sequence) or isinstance(signature, str):
        raise KernelError(
            f"expected the signature as a list of Param and Scalar, got {signature!r:.80} - at "
            f"{where}"
        )
    arguments = tuple(signature)
    if len(arguments) > MAX_ARGUMENTS:
        raise KernelError(
            f"expected at most {MAX_ARGUMENTS} arguments, got {len(arguments)} - at {where}; put "
            "several values into one buffer"
        )
    for place, argument in enumerate(arguments):
        if not isinstance(argument, Param | Scalar):
            raise KernelError(
                f"expected a Param or Scalar, got {argument!r:.80} - at {where}, signature[{place}]"
            )
    names = [entry, *(argument.name for argument in arguments)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise KernelError(
            f"expected a name of its own for every argument and the function, got "
            f"{', '.join(twice)} twice - at {where}; rename one"
        )
    return arguments


def _check_results(arguments: Sequence[Param | Scalar], where: str) -> None:
    if not any(isinstance(each, Param) and each.access.writes for each in arguments):
        raise KernelError(
            f"expected a parameter with access 'write' or 'read-write', got none - at {where}; "
            "declare what it computes into"
        )


def _local_size(
    scope: _Scope, language: Language, local_size: Sizes | None
) -> tuple[Expr, ...] | None:
    if language == "c":
        if local_size is not None:
            raise KernelError(
                f"expected no local_size for plain C, got {local_size!r:.80} - at {scope.where}; "
                "leave it out, the function is called once"
            )
        return None
    if local_size is None and language == "cuda":
        raise KernelError(
            f"expected local_size for CUDA code, got none - at {scope.where}; pass the threads of "
            "a block that the code is written for"
        )
    return scope.sizes(DEFAULT_LANES if local_size is None else local_size, "local_size")


def _check_launch_of_c(kernel: Kernel, where: str) -> None:
    if any(size.value != 1 for size in kernel.global_size):
        sizes = ", ".join(map(str, kernel.global_size))
        raise KernelError(
            f"expected global_size 1 for plain C, got {sizes} - at {where}; loop in the function, "
            "or write it against Block"
        )
    if kernel.shared_bytes.value != 0:
        raise KernelError(
            f"expected no shared_bytes for plain C, got {kernel.shared_bytes} - at {where}; use "
            "local variables"
        )


def _macros(
    defines: Mapping[str, int | float | str], taken: set[str], where: str
) -> Mapping[str, int | float | str]:
    macros = {}
    if not isinstance(defines, Mapping):
        raise KernelError(f"expected macros by name, got {defines!r:.80} - at {where}, defines")
    for name, value in defines.items():
        check_name(name, f"the name of a macro of {where}")
        if name in taken:
            raise KernelError(
                f"expected a macro that is no argument and not the function, got {name} - at "
                f"{where}; rename it"
            )
        macros[name] = _macro_value(value, f"{where}, defines[{name!r}]")
    return MappingProxyType(dict(sorted(macros.items())))


def _macro_value(value: Any, where: str) -> int | float | str:
    if isinstance(value, str) and value.isprintable() and not value.endswith("\\"):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if hasattr(value, "__index__") and not isinstance(value, bool):
        with declaring(where):
            return Expr.constant(value).low
    raise KernelError(
        f"expected an integer, a finite float or one line of text, got {value!r:.80} - at {where}; "
        "pass 0 or 1 for a bool"
    )


def _c_text(value: int | float | str) -> str:
    return value if isinstance(value, str) else f"({value!r})" if value < 0 else repr(value)
