"""Builds the native tests with sanitizers and runs them: ASan with UBSan, and TSan.

A build goes to build/native-asan or build/native-tsan and is kept, so that a second run compiles
what has changed. Exits 1 when a build or a program fails. A compiler without a sanitizer is named,
and its programs run without that sanitizer, so that they are never simply left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


@dataclass(frozen=True)
class Sanitizer:
    """One build of the native tests."""

    name: str
    title: str
    flags: tuple[str, ...]
    programs: tuple[str, ...]
    environment: dict[str, str]


SANITIZERS = (
    Sanitizer(
        "asan",
        "ASan and UBSan",
        ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
        (
            "device_spans_test",
            "expression_test",
            "fingerprint_cuda_test",
            "fingerprint_test",
            "fold_test",
            "graph_test",
            "mega_cpu_test",
            "mega_planning_test",
            "mega_queue_model_test",
            "mega_queue_test",
            "plan_cuda_test",
            "plan_test",
            "snapshot_test",
            "spool_test",
            "threads_test",
        ),
        {
            "ASAN_OPTIONS": "abort_on_error=0:detect_stack_use_after_return=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    ),
    Sanitizer(
        "tsan",
        "TSan",
        ("-fsanitize=thread",),
        # The others have one thread, and single steps through TSan's runtime take minutes.
        (
            *("device_spans_test", "graph_test", "mega_cpu_test", "plan_test", "snapshot_test"),
            *("mega_queue_test", "threads_test"),
        ),
        {"TSAN_OPTIONS": "halt_on_error=0:exitcode=66:second_deadlock_stack=1"},
    ),
)


def find_tool(*names: str) -> str | None:
    """Return the first of these programs on PATH or beside this Python, where pip puts them."""
    places = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])
    return next((found for name in names if (found := shutil.which(name, path=places))), None)


def compiler() -> str | None:
    """Return the C++ compiler that CMake would take."""
    chosen = os.environ.get("CXX")
    return find_tool(chosen) if chosen else find_tool("c++", "g++", "clang++")


def can_sanitize(compiler_path: str, sanitizer: Sanitizer) -> bool:
    """Whether a program built so also starts; a missing runtime library shows only then."""
    with tempfile.TemporaryDirectory(prefix="brickline-") as scratch:
        source, program = Path(scratch) / "empty.cpp", Path(scratch) / "empty"
        source.write_text("int main() { return 0; }\n", encoding="utf-8")
        command = [compiler_path, *sanitizer.flags, str(source), "-o", str(program)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return False
        return any(
            subprocess.run([*prefix, str(program)], capture_output=True, check=False).returncode
            == 0
            for prefix in ([], fixed_addresses())
        )


def fixed_addresses() -> list[str]:
    """Return what starts a program without address randomisation.

    Kernels that randomise more bits than TSan's shadow allows make it fail before `main`.
    """
    setarch = find_tool("setarch")
    return [setarch, platform.machine(), "-R"] if setarch else []


def build(
    sanitizer: Sanitizer, compiler_path: str, cmake: str, sanitize: bool, lines: bool
) -> Path | None:
    """Compile the programs of one sanitizer; on failure print the compiler's words: None."""
    directory = ROOT / "build" / f"native-{sanitizer.name}"
    # Reports name functions. Lines take a sixth of the time: they are for who has a report to read.
    flags = ["-O1", "-g1" if lines else "-g0", "-fno-omit-frame-pointer"]
    if sanitize:
        flags += sanitizer.flags
    if sanitizer.name == "tsan" and "clang" not in Path(compiler_path).resolve().name:
        flags.append("-Wno-tsan")  # a fence that only the readers of the file need
    ninja = find_tool("ninja")
    configure = [
        *(cmake, "-S", str(ROOT), "-B", str(directory)),
        *(("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}") if ninja else ()),
        "-DBRICKLINE_NATIVE_TESTS=ON",
        "-DCMAKE_BUILD_TYPE=Sanitized",  # no type that CMake knows, so it adds no flags
        f"-DCMAKE_CXX_COMPILER={compiler_path}",
        f"-DCMAKE_CXX_FLAGS={' '.join(flags)}",
    ]
    compile_all = [cmake, "--build", str(directory), "--parallel", str(os.cpu_count() or 1)]
    compile_all += ["--target", *sanitizer.programs]
    for command in (configure, compile_all):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            output = done.stdout + done.stderr
            errors = [line for line in output.splitlines() if "error:" in line]  # before warnings
            print(*errors[:20], output[-8000:], sep="\n", flush=True)
            return None
    return directory / "tests" / "native"


def run(program: Path, sanitizer: Sanitizer) -> bool:
    """Run one program, print its line, and say whether it passed."""
    prefix = fixed_addresses() if sanitizer.name == "tsan" else []
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*prefix, str(program)],
            env=os.environ | sanitizer.environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as expired:
        status, output = -1, f"still running after {expired.timeout:.0f} s"
    lines = [line for line in output.splitlines() if line.endswith(" failed")]
    passed = status == 0 and bool(lines) and lines[-1].endswith(" 0 failed")
    summary = lines[-1] if lines else f"ended with status {status}"
    word, seconds = "ok" if passed else "FAILED", time.monotonic() - began
    line = f"{word:6} {sanitizer.name}  {program.name:18} {seconds:5.1f} s  {summary}"
    # In one piece: other programs end at the same time.
    print(line if passed else f"{line}\n{output[-12000:]}", flush=True)
    return passed


def prepare(sanitizer: Sanitizer, compiler_path: str, cmake: str, lines: bool) -> Path | None:
    """Build the programs of one sanitizer and return where they are; None when that failed."""
    sanitize = can_sanitize(compiler_path, sanitizer)
    if not sanitize:
        print(
            f"{compiler_path} cannot build or run programs with {sanitizer.title}: install its "
            "runtime library or set CXX to another compiler; the programs run without it"
        )
    began = time.monotonic()
    directory = build(sanitizer, compiler_path, cmake, sanitize, lines)
    print(f"build  {sanitizer.name}  {time.monotonic() - began:24.1f} s", flush=True)
    return directory


def check(sanitizers: list[Sanitizer], compiler_path: str, cmake: str, lines: bool) -> bool:
    """Build side by side, so that no core waits for a slow file; then run what was built.

    Every program runs, even after one has failed, and none beside these builds: most of them wait a
    good part of their time, but threads that poll for each other need a core each.
    """
    with ThreadPoolExecutor(len(sanitizers)) as pool:
        built = list(pool.map(lambda each: prepare(each, compiler_path, cmake, lines), sanitizers))
    programs = [
        (directory / name, sanitizer)
        for directory, sanitizer in zip(built, sanitizers, strict=True)
        if directory is not None
        for name in sanitizer.programs
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = list(pool.map(lambda each: run(*each), programs))
    return None not in built and all(passed)


def main() -> int:
    """Run the sanitizers that were asked for, all by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [sanitizer.name for sanitizer in SANITIZERS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=" or ".join(names))
    parser.add_argument("--lines", action="store_true", help="give reports lines of the sources")
    given = parser.parse_args()
    wanted = given.names or names
    if unknown := set(wanted) - set(names):
        parser.error(f"expected {' or '.join(names)}, got {', '.join(sorted(unknown))}")
    cmake, compiler_path = find_tool("cmake"), compiler()
    if cmake is None or compiler_path is None:
        missing = "a C++ compiler (or set CXX)" if cmake else "cmake (pip install cmake ninja)"
        print(f"expected {missing}, found none on PATH or beside {sys.executable}")
        return 1
    chosen = [sanitizer for sanitizer in SANITIZERS if sanitizer.name in wanted]
    return 0 if check(chosen, compiler_path, cmake, given.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
