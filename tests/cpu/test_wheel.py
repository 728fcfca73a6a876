"""The wheel, built and tried in an environment of its own outside the tree."""

from __future__ import annotations

import importlib.util
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNEL = """
import numpy as np
import brickline as bl
from brickline.kernels.catalog import residual
a, b, y = np.arange(3, dtype="f4"), np.ones(3, "f4"), np.empty(3, "f4")
bl.KernelCache().get_or_compile(residual("f32")).launch(a, b, y, 3)
print(y)
"""
PROGRAM = """
import brickline as bl
profiler = bl.BrickProfiler("wheel", enabled=True)
with profiler.step(tokens=1, phase="decode"), profiler.brick("RmsNorm", layer=0):
    pass
print(profiler.summary())
"""


def run(*command: object, **options: str) -> subprocess.CompletedProcess[str]:
    """Run outside the tree, without its sources in the way."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | options,
        cwd=options.get("PWD", "/"),
    )
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a user builds it; without an isolated environment where what it needs is here.

    The build directory is the one of `pip install`: what has changed since is compiled again, so
    that after an installation from these sources nothing is.
    """
    target = tmp_path_factory.mktemp("wheel")
    here = all(importlib.util.find_spec(name) for name in ("nanobind", "scikit_build_core"))
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", target),
        *(["--no-build-isolation"] if here else []),
        ROOT,
        # The tools of this interpreter's own environment: CMake and Ninja may be there.
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    )
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel; other packages are this one's, so nothing is fetched."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    packages = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])").stdout.strip()
    )
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"),
        *("--no-index", "--disable-pip-version-check", wheel),
    )
    # After the wheel in the path, so that an installed brickline here does not hide it.
    others = [*site.getsitepackages(), site.getusersitepackages()]
    (packages / "zz_others.pth").write_text("\n".join(filter(os.path.isdir, others)) + "\n")
    return environment / "bin"


def test_the_wheel_holds_what_it_must_and_nothing_of_the_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"brickline/py.typed", "brickline/_core.pyi", "brickline/__init__.py"} <= names
    assert "brickline/include/brickline/abi.h" in names
    assert (
        len([name for name in names if name.startswith("brickline/_core.") and ".so" in name]) == 1
    )
    assert any(name.endswith("licenses/LICENSE") for name in names)
    roots = {name.partition("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"brickline"}
    assert not [name for name in names if name.endswith((".cpp", ".a", ".pyc"))]
    headers = {path.name for path in (ROOT / "src/brickline").rglob("*.h")}
    assert {Path(name).name for name in names if name.endswith(".h")} == headers


def test_the_wheel_describes_itself(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    text = archive.read(metadata).decode()
    assert "Requires-Python: >=3.11" in text
    assert "License-Expression: Apache-2.0" in text
    required = {
        line.removeprefix("Requires-Dist: ").split(">")[0]
        for line in text.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert required == {"ml_dtypes", "numpy", "pyarrow", "rich", "typer"}
    assert "linux" in wheel.name


def test_the_wheel_alone_is_imported(installed: Path) -> None:
    code = "import brickline, brickline._core; print(brickline.__file__, brickline._core.__file__)"
    for file in run(installed / "python", "-c", code).stdout.split():
        assert Path(file).is_relative_to(installed.parent)


def test_the_command_helps(installed: Path) -> None:
    text = run(installed / "brickline", "--help").stdout
    for verb in ("demo", "check", "run", "report", "top", "doctor", "bench"):
        assert verb in text
        assert "Example" in run(installed / "brickline", verb, "--help").stdout


def test_a_kernel_compiles_against_the_headers_of_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    cache = str(tmp_path / "cache")
    for _ in range(2):
        done = run(installed / "python", "-c", KERNEL, BRICKLINE_CACHE=cache)
        assert done.stdout == "[1. 2. 3.]\n"
    listed = run(installed / "brickline", "kernels", "list", BRICKLINE_CACHE=cache).stdout
    assert "residual" in listed
    assert "1 kernels" in listed


def test_a_program_of_five_lines(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "python", "-c", PROGRAM, XDG_STATE_HOME=str(tmp_path / "state"))
    assert "RmsNorm" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.rglob("*.spool")) == []


def test_a_run_is_recorded_and_reported(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    out = tmp_path / "run"
    state = str(tmp_path / "state")
    run(installed / "brickline", "run", "-o", out, tmp_path / "program.py", XDG_STATE_HOME=state)
    assert "RmsNorm" in run(installed / "brickline", "report", out, XDG_STATE_HOME=state).stdout
    assert (out / "tables" / "bricks.parquet").is_file() or not (out / "tables").exists()
