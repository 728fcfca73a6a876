"""``brickline check``: exit statuses, what is printed, what is kept, and mistakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brickline.commands import main, named
from brickline.verdict import DivergenceReport

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.up, self.norm = nn.Linear(16, 48), nn.LayerNorm(48, eps=eps)
        self.down = nn.Linear(48, 8)
    def forward(self, x):
        return self.down(self.norm(self.up(x)))

def right():
    return Net()
def wrong():
    return Net(eps=0.1)
def raises():
    def forward(x):
        raise ValueError("out of luck")
    return forward
def leaves():
    def forward(x):
        raise SystemExit(0)
    return forward
def inputs():
    return (torch.randn(6, 16),)
def drive(model):
    torch.manual_seed(5)
    for _ in range(2):
        model(torch.randn(6, 16))
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = set(sys.modules)
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(named, "_loaded_files", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "80")
    yield
    for name in [each for each in sys.modules if each not in modules and "models" in each]:
        del sys.modules[name]


@pytest.fixture
def brickline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    def call(*words: str, status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["brickline", *words])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert (left.value.code or 0) == status, out + err
        return out, err

    return call


AGAINST = ("--reference", "models.py:right")


def test_a_matched_model_ends_with_nought(brickline):
    out, _ = brickline("check", "models.py:right", *AGAINST)
    first = out.splitlines()[0]
    assert first == "candidate models.py:right against reference models.py:right: matched"


def test_a_wrong_model_ends_with_one_and_is_named(brickline):
    out, err = brickline("check", "models.py:wrong", *AGAINST, status=1)
    assert "models.py:wrong against reference models.py:right: diverged" in out
    assert "norm" in out.splitlines()[1]
    assert not err


def test_a_drive_in_place_of_inputs(brickline):
    out, _ = brickline("check", "models.py:wrong", *AGAINST, "--drive", "models.py:drive", status=1)
    assert "diverged" in out


def test_without_a_reference(brickline):
    out, _ = brickline("check", "models.py:wrong", "--inputs", "models.py:inputs")
    assert "matched" in out.splitlines()[0]


def test_a_page_is_written_beside_the_text(brickline):
    words = ("check", "models.py:wrong", *AGAINST, "--html", "page.html")
    out, err = brickline(*words, "-o", "kept.json", status=1)
    assert "norm" in out.splitlines()[1]
    assert "wrote page.html" in err
    page = Path("page.html").read_text(encoding="utf-8")
    _, err = brickline(*words, status=2)
    assert "--force" in err
    _, err = brickline("check", "models.py:wrong", "--html", "nowhere/page.html", status=2)
    assert "nowhere" in err
    brickline("report", "kept.json", "--html", "again.html")
    assert Path("again.html").read_text(encoding="utf-8") == page


def test_a_kept_report_is_shown_again(brickline):
    shown, err = brickline("check", "models.py:wrong", *AGAINST, "-o", "kept.json", status=1)
    assert "wrote kept.json" in err
    again, _ = brickline("report", "kept.json")
    assert again == shown
    document = json.loads(brickline("report", "kept.json", "--json")[0])
    assert document["format"] == "brickline-divergence"
    assert DivergenceReport.load("kept.json").culprits[0].name == "norm"
    _, err = brickline("check", "models.py:wrong", *AGAINST, "-o", "kept.json", status=2)
    assert "--force" in err
    brickline("check", "models.py:wrong", *AGAINST, "-o", "kept.json", "--force", status=1)
    assert "no run" in brickline("report", "kept.json", "--csv", status=2)[1]


def test_json_alone_is_on_standard_output(brickline):
    out, _ = brickline("check", "models.py:wrong", *AGAINST, "--json", status=1)
    document = json.loads(out)
    assert document["status"] == "diverged"
    assert document["candidate"] == "models.py:wrong"


def test_accepted_differences(brickline, tmp_path):
    _, err = brickline("check", "models.py:wrong", *AGAINST, "--write-accept", "a.toml", status=1)
    assert "wrote a.toml" in err
    proposed = (tmp_path / "a.toml").read_text()
    assert 'brick = "norm"' in proposed
    (tmp_path / "b.toml").write_text(
        '[[accept]]\nbrick = "norm"\nreason = "another eps"\nrelative_l2 = 0.5\n'
    )
    out, _ = brickline("check", "models.py:wrong", *AGAINST, "--accept", "b.toml")
    assert "accepted" in out
    assert "another eps" in out
    (tmp_path / "c.toml").write_text("[[accept]]\nbrik = 1\n")
    _, err = brickline("check", "models.py:wrong", *AGAINST, "--accept", "c.toml", status=2)
    assert "did you mean 'brick'" in err


def test_repros_go_where_they_are_asked_for(brickline, tmp_path):
    out, _ = brickline("check", "models.py:wrong", *AGAINST, "--repro-dir", "repros", status=1)
    assert "repros" in out
    assert list((tmp_path / "repros").rglob("*.py"))


def test_a_candidate_that_raises_is_inconclusive_and_says_why(brickline):
    out, _ = brickline("check", "models.py:raises", *AGAINST, status=3)
    assert "out of luck" in out


def test_a_candidate_that_exits_with_nought_does_not_read_as_a_match(brickline):
    for options in ((), AGAINST):
        out, _ = brickline("check", "models.py:leaves", *options, status=3)
        assert "SystemExit(0)" in out


def test_an_interrupt_leaves_a_partial_report(brickline, tmp_path):
    with open(tmp_path / "models.py", "a") as file:
        file.write("\ndef interrupted(model):\n    drive(model)\n    raise KeyboardInterrupt\n")
    out, _ = brickline(
        "check", "models.py:right", *AGAINST, "--drive", "models.py:interrupted", status=3
    )
    assert "inconclusive" in out.splitlines()[0]
    assert "Compared" in out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), "expected either CANDIDATE or --runs"),
        (("models.py",), "expected file.py:name"),
        (("gone.py:net",), "there is no gone.py"),
        (("models.py:wrnog",), "did you mean 'wrong'?"),
        (("models.py:wrong", "--inputs", "models.py:input"), "did you mean 'inputs'?"),
        (("models.py:wrong", "--drive", "models.py:gone"), "--drive"),
        (("models.py:wrong", "--reference", "gone.module:net"), "--reference gone.module:net"),
        (("models.py:wrong", "--runs", "a.brick", "b.brick"), "expected either"),
        (("models.py:wrong", "--inputs", "a:b", "--drive", "c:d"), "got both"),
        (("--runs", "a.brick", "b.brick", "--reference", "models.py:right"), "no other model"),
        (("models.py:wrong", "--accept", "gone.toml"), "gone.toml"),
    ],
)
def test_mistakes_end_with_two_and_a_next_step(brickline, words, wanted):
    _, err = brickline("check", *words, status=2)
    assert wanted in err
    assert "Traceback" not in err


def test_without_torch_it_says_what_to_install(brickline, monkeypatch):
    import importlib.util

    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "torch" else original(name, *rest),
    )
    _, err = brickline("check", "models.py:right", status=2)
    assert "pip install 'brickline[torch]'" in err


def test_a_file_that_is_no_report(brickline, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    _, err = brickline("report", "other.json", status=2)
    assert "other.json" in err
