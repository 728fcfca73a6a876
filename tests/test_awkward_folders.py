"""The suite passes wherever it lies: in a clone called brickline, in a folder with a space in its
name that is closed to others, as a home is, with all that is installed inside the clone.

Tests that start programs, change user, compile, load files or look at paths are run there again::

    a folder/            mode 0700
      brickline/         the clone
        tests/           a copy
        installed/       a copy of brickline, and links to the packages beside it
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

import brickline

TESTS = Path(__file__).parent
CHOSEN = (
    "cpu/test_cache.py::test_a_read_only_directory",
    "cpu/test_cache.py::test_a_read_only_directory_disables_the_disk",
    "cpu/test_cache.py::test_foreign_directories_are_refused",
    "cpu/test_kernel_store.py::test_a_read_only_directory_is_read",
    "cpu/test_kernel_store.py::test_a_directory_that_cannot_be_made_is_an_error",
    "null/test_named.py",
    "null/test_pytest_plugin.py::test_the_entry_point_leads_to_the_plugin",
    "null/test_pytest_plugin.py::test_a_run_that_does_not_use_it_loads_nothing",
    "test_first_run.py::test_the_programs_own_status_and_errors_come_through",
    "torch/test_run_torch.py::test_a_script_that_raises_keeps_what_was_recorded",
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    closed = tmp_path / "a folder"
    made = closed / "brickline"
    installed = made / "installed"
    installed.mkdir(parents=True)
    closed.chmod(0o700)
    shutil.copy(TESTS.parent / "pyproject.toml", made)
    left_out = shutil.ignore_patterns("__pycache__", "*.zip", "native", "snapshots")
    shutil.copytree(TESTS, made / "tests", ignore=left_out)
    shutil.copytree(Path(brickline.__file__).parent, installed / "brickline")
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site).iterdir():
            if entry.suffix != ".pth" and not (installed / entry.name).exists():
                (installed / entry.name).symlink_to(entry)
    return made


def run_there(clone: Path, *words: str) -> str:
    """Run Python in the clone with what is installed there; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=clone,
        env=environment | {"PYTHONPATH": str(clone / "installed")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def test_tests_pass_in_an_awkward_folder(clone: Path) -> None:
    # Above the clone a folder without __init__.py is called brickline; the package comes first.
    code = "import os; os.chdir('..'); import brickline, numpy; print(brickline, numpy)"
    assert run_there(clone, "-c", code).count(str(clone / "installed")) == 2
    has_torch = find_spec("torch") is not None
    chosen = [f"tests/{each}" for each in CHOSEN if has_torch or not each.startswith("torch/")]
    options = ("-q", "-p", "no:cacheprovider", f"--basetemp={clone / 'temporary'}")
    said = run_there(clone, "-m", "pytest", *options, *chosen)
    assert " passed" in said
    assert " failed" not in said
