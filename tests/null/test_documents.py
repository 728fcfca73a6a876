"""JSON that nests too deeply is damaged like any other, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from brickline import peaks
from brickline.documents import parsed_json, stated_format
from brickline.errors import PlanError, RunDamaged
from brickline.megakernel_report import MegakernelReport
from brickline.plan import Plan
from brickline.table_index import published_rows
from brickline.verdict import DivergenceReport

DEEP = "[" * 200_000


def test_deep_json_is_a_value_error() -> None:
    assert parsed_json(b'{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nests too deeply"):
        parsed_json(DEEP)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (DivergenceReport.load, RunDamaged),
        (MegakernelReport.load, RunDamaged),
        (Plan.load, PlanError),
    ],
)
def test_every_reader_refuses_it(
    read: Callable[[Path], object], error: type[Exception], tmp_path: Path
) -> None:
    path = tmp_path / "deep.json"
    path.write_text(DEEP, encoding="ascii")
    with pytest.raises(error, match=r"deep\.json"):
        read(path)


def test_what_is_only_remembered_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / peaks.FILE).write_text(DEEP, encoding="ascii")
    monkeypatch.setattr(peaks, "state_directory", lambda **_: tmp_path)
    assert peaks.load_peaks("CPU") is None
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "index.json").write_text(DEEP, encoding="ascii")
    assert published_rows(tmp_path, []) is None


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text, expected in (
        ('{"format": "brickline-replay", "version": 1}', "brickline-replay"),
        ('{\n "format": "brickline plan"', "brickline plan"),
        ("", ""),
        ("[]", None),
        ('{"a": {"format": "x"}}', None),
    ):
        path.write_text(text, encoding="utf-8")
        assert stated_format(path) == expected
    assert stated_format(tmp_path) is None
    assert stated_format(tmp_path / "none") is None
