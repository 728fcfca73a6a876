"""What holds for every folder: Ctrl-C works, long files come first, kernels are compiled once for
all tests and not into the user's cache, and the end says what a missing program left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A suite in the background inherits a Ctrl-C that is ignored, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)

MISSING = ("not on PATH", "on the PATH", "not installed")

TESTS = Path(__file__).parent
LONG_FILES = (
    "torch/test_examples.py",
    "torch/test_gallery.py",
    "torch/test_how_to.py",
    "cpu/test_kill.py",
    "null/test_docs_examples.py",
    "test_first_run.py",
    "torch/test_repro.py",
    "torch/test_run_torch.py",
    "torch/test_recording_ends.py",
    "cpu/test_kernels_decoding.py",
    "cpu/test_kernels_launches.py",
    "torch/test_localisation.py",
    "torch/test_causes.py",
    "torch/test_check_backward.py",
    "torch/test_port_blame.py",
    "torch/test_check_command.py",
    "null/test_regressions.py",
    "tui/test_app.py",
    "null/test_command_streams.py",
    "browser/test_divergence_page.py",
    "browser/test_profile_page.py",
    "cpu/test_megakernel.py",
    "cpu/test_kernels_fused.py",
    "cpu/test_wheel.py",
    "torch/test_pytest_check.py",
    "torch/test_check_gradients.py",
    "torch/test_recording.py",
    "torch/test_recording_failures.py",
    "test_awkward_folders.py",
)
"""A worker takes file after file; a long one that begins last would keep the others waiting."""


def pytest_configure(config: Any) -> None:
    if "BRICKLINE_CACHE" not in os.environ:  # workers of xdist have it from here
        config.brickline_kernels = tempfile.mkdtemp(prefix="brickline-kernels-")
        os.environ["BRICKLINE_CACHE"] = config.brickline_kernels


def pytest_unconfigure(config: Any) -> None:
    if made := getattr(config, "brickline_kernels", None):
        shutil.rmtree(made, ignore_errors=True)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    place = {TESTS / name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if any(words in said for words in MISSING):
            reasons[said.removeprefix("Skipped: ")] += 1
    if not reasons:
        return
    terminalreporter.write_sep("=", "not run, because something is missing here")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} tests: {reason}")
