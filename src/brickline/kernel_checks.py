"""What the source and the names of a kernel may say: checks before any compiler is asked.

A source of language "block" runs on both devices, so what only CUDA has is refused there, with
what ``Block`` offers instead. Words in comments and literals do not count. It knows C's lexical
rules and nothing of parameters, devices or compilers.
"""

from __future__ import annotations

import re

from brickline.errors import KernelError

MAX_SOURCE_BYTES = 8 << 20
"""No source is larger; generated code beyond it is a mistake, and compilers fail at it slowly."""
MAX_NAME = 200
"""Characters of a name, so that names of files and symbols stay within every limit."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_KEYWORDS = re.compile(
    """
    alignas|alignof|and|and_eq|asm|auto|bitand|bitor|bool|break|case|catch|char|char8_t|char16_t|
    char32_t|class|co_await|co_return|co_yield|compl|concept|const|const_cast|consteval|constexpr|
    constinit|continue|decltype|default|delete|do|double|dynamic_cast|else|enum|explicit|export|
    extern|false|float|for|friend|goto|if|inline|int|long|mutable|namespace|new|noexcept|not|not_eq|
    nullptr|operator|or|or_eq|private|protected|public|register|reinterpret_cast|requires|restrict|
    return|short|signed|sizeof|static|static_assert|static_cast|struct|switch|template|this|
    thread_local|throw|true|try|typedef|typeid|typename|union|unsigned|using|virtual|void|volatile|
    wchar_t|while|xor|xor_eq
    """,
    re.VERBOSE,
)
"""Those of C and C++."""

_INSTEAD = {
    r"threadIdx": "block.each(n, f) or block.reduce(n, identity, combine, f)",
    r"blockIdx": "block.index(axis)",
    r"blockDim": "block.lanes()",
    r"gridDim": "block.blocks(axis)",
    r"warpSize|__shfl\w*|__syncwarp|__ballot\w*|__activemask": "block.groups(rows, f)",
    r"__shared__": "block.shared<T>(count)",
    r"__syncthreads\w*": "block.sync()",
    r"__global__|__device__|__launch_bounds__": "BRICKLINE in front of the function",
    r"atomic[A-Z]\w*": "block.atomic_add(pointer, value)",
}
"""What only CUDA has, and what takes its place."""

_CUDA_WORD = re.compile(rf"\b(?:{'|'.join(_INSTEAD)})\b", re.ASCII)
_INCLUDE = re.compile(r"^[ \t]*(#)[ \t]*include\b", re.ASCII | re.MULTILINE)
_SHARED = re.compile(r"(?:\.|->)\s*(?:template\s+)?(shared)\s*<", re.ASCII)
_ATOMIC_ADD = re.compile(r"\batomic_add\b", re.ASCII)

# Every form that ends at its own end or at the end of the text, so that no scan starts twice.
_TOKEN = re.compile(
    r"""
      //(?:[^\n\\]+|\\.)*+                                  # comments
    | /\*.*?(?:\*/|\Z)
    | (?:u8|[uUL])?R"(?P<fence>[^()\\\s]{0,16})\(.*?(?:\)(?P=fence)"|\Z)   # literals
    | "(?:[^"\\\n]+|\\.)*+"?
    | '(?:[^'\\\n]+|\\.)*+'?
    | \.?[0-9](?:[eEpP][+-]|'[0-9A-Za-z_]|[0-9A-Za-z_.])*+  # numbers: 1'000 opens no literal
    | (?P<word>[A-Za-z_][0-9A-Za-z_]*)
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)


def check_name(name: object, what: str) -> str:
    """Return an identifier that C, C++ and CUDA take.

    Raises:
        KernelError: It is none; ``what`` says what it names.
    """
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or len(name) > MAX_NAME:
        got, why = name, f"an identifier of C of at most {MAX_NAME} characters"
    elif _KEYWORDS.fullmatch(name) or name.startswith("brickline_"):
        got, why = name, "a name that is no keyword of C++ and does not begin with brickline_"
    else:
        return name
    raise KernelError(f"expected {what} as {why}, got {got!r:.80}; rename it")


def check_source(source: object, where: str) -> str:
    """Return a text that a compiler can be given.

    Raises:
        KernelError: It is no text, empty, too large, or not Unicode.
    """
    if not isinstance(source, str):
        raise KernelError(
            f"expected the source as text, got {type(source).__name__} - at {where}; read files "
            "with Path.read_text()"
        )
    # The length in characters is known at once; only a text that may fit is encoded.
    size = len(source) if len(source) > MAX_SOURCE_BYTES else _encoded_size(source, where)
    if size > MAX_SOURCE_BYTES:
        raise KernelError(
            f"expected a source of at most {MAX_SOURCE_BYTES} bytes, got at least {size} - at "
            f"{where}; pass data as buffers, not as text"
        )
    if not source or source.isspace():
        raise KernelError(
            f"expected a source, got {source!r:.20} - at {where}; pass the code of the function"
        )
    if "\0" in source:
        raise KernelError(
            f"expected a source without NUL characters, got one in line "
            f"{_line(source, source.index(chr(0)))} - at {where}; remove it, compilers stop there"
        )
    return source


def _encoded_size(source: str, where: str) -> int:
    if source.isascii():
        return len(source)
    try:
        return len(source.encode())
    except UnicodeEncodeError as error:
        raise KernelError(
            f"expected a source of valid Unicode, got {source[error.start]!r} in line "
            f"{_line(source, error.start)} - at {where}; decode the file as UTF-8"
        ) from None


def check_block_source(source: str, accumulates: bool, has_shared: bool, where: str) -> None:
    """Refuse what ``Block`` takes the place of, and what the declaration lacks.

    Args:
        source: Code against ``brickline/kernel.h``.
        accumulates: Whether a parameter declares that it is added to atomically.
        has_shared: Whether the declaration gives blocks shared memory.
        where: The kernel, for the error.

    Raises:
        KernelError: The code names something that only CUDA has, includes headers, adds
            atomically where no parameter declares it, or takes shared memory that it has not.
    """
    found = _first_word(source, _CUDA_WORD)
    if found is not None:
        instead = next(text for word, text in _INSTEAD.items() if re.fullmatch(word, found[0]))
        raise KernelError(
            f"expected code against Block, got {found[0]} in line {found[1]} - at {where}; use "
            f"{instead}, or declare language='cuda' for code that is CUDA's alone"
        )
    line = _first_line(source, "include", _INCLUDE)
    if line is not None:
        raise KernelError(
            f"expected code without headers of its own, got #include in line {line} - at {where}; "
            "Block has what kernels need, or declare language='cuda' or 'c'"
        )
    line = None if has_shared else _first_line(source, "shared", _SHARED)
    if line is not None:
        raise KernelError(
            f"expected shared_bytes for shared<T>(count) in line {line}, got 0 - at {where}; "
            "declare shared_bytes= as the bytes that a block takes"
        )
    found = None if accumulates else _first_word(source, _ATOMIC_ADD)
    if found is not None:
        raise KernelError(
            f"expected a parameter with accumulate='add' for {found[0]} in line {found[1]}, got "
            f"none - at {where}; declare it on the parameter that is added to"
        )


def _first_word(source: str, wanted: re.Pattern[str]) -> tuple[str, int] | None:
    """Return the first match that is a word of the code, and its line."""
    if not wanted.search(source):  # most sources, without taking them apart
        return None
    for token in _TOKEN.finditer(source):
        word = token["word"]
        if word is not None and wanted.fullmatch(word):
            return word, _line(source, token.start())
    return None


def _first_line(source: str, word: str, wanted: re.Pattern[str]) -> int | None:
    """Return the line of the first match's group in the code, without comments and literals."""
    if word not in source:  # most sources, without taking them apart
        return None
    found = wanted.search(_TOKEN.sub(_blanked, source))
    return None if found is None else _line(source, found.start(1))


def _blanked(token: re.Match[str]) -> str:
    """Return a word or a number as it is, anything else as blanks in as many lines."""
    text = token[0]
    keep = token["word"] is not None or text[0] in ".0123456789"
    return text if keep else re.sub(r"[^\n]", " ", text)


def _line(source: str, place: int) -> int:
    return source.count("\n", 0, place) + 1
