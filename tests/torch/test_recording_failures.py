"""What breaks inside brickline while it records: the model goes on, and every reader is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

import brickline as bl
from brickline.adapters import torch_ops, torch_recorder, torch_tensors
from brickline.adapters.recording import RecordOptions, record
from brickline.adapters.torch_gradients import Gradients
from brickline.adapters.torch_keeping import Keeper
from brickline.adapters.torch_recorder import Recorder
from brickline.adapters.torch_roots import RootFinder
from brickline.adapters.torch_rows import Rows
from brickline.adapters.torch_tensors import Ledger
from brickline.comparison.comparing import compare
from brickline.errors import InternalError
from brickline.export.serving import statistics_of_path
from brickline.profile import profile_from_run
from brickline.report.as_json import profile_json
from brickline.report.html.profile_page import profile_page
from brickline.report.text import profile_text
from brickline.run.failures import FAILED, MOST_KINDS, FailureLog, failure_texts, problem_text
from brickline.runs import Run
from brickline.verdict import Status


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return given["x"] + self.down(self.act(self.up(given["x"])))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer({"x": x})
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


INPUT = torch.linspace(-1, 1, 24).reshape(3, 8)


def calls(model: nn.Module, *, grad: bool) -> list[Tensor]:
    """What two calls put out, and the gradients that they leave."""
    out = []
    for shift in (0, 1):
        with torch.set_grad_enabled(grad):
            out.append(model(INPUT + shift))
        if grad:
            out[-1].sum().backward()
    out += [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return out


def broken(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("a bug")


def broken_for_dicts(value: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(value, dict):
        broken()
    flatten(value, *args, **kwargs)


flatten, fingerprint_bytes = torch_recorder.flatten, torch_tensors.fingerprint_bytes

PLACES: dict[str, tuple[Any, str, Callable[..., Any], dict[str, Any], str]] = {
    "inputs of an op": (torch_ops, "encoded", broken, {"level": "op"}, "the inputs of an op"),
    "outputs of an op": (torch_ops._Op, "write", broken, {"level": "op"}, "the outputs of an op"),
    "inputs": (torch_recorder, "flatten", broken_for_dicts, {}, "the inputs of a call"),
    "inputs at once": (Recorder, "_observe_inputs", broken, {}, "the inputs of a call"),
    "weights": (Ledger, "weight_row", broken, {}, "the inputs of a call"),
    "outputs": (Gradients, "end", broken, {}, "the outputs of a call"),
    "end of a call": (Rows, "of_call", broken, {}, "ending a call"),
    "suspects": (Keeper, "called", broken, {"tensors": "suspects"}, "the outputs of a call"),
    "place of a call": (Recorder, "_place", broken, {}, "beginning a call"),
    "step": (Recorder, "_begin_step", broken, {"level": "op"}, "beginning a call"),
    "step, time alone": (
        Recorder,
        "_begin_step",
        broken,
        {"fingerprints": False},
        "beginning a call of the model",
    ),
    "end, time alone": (
        Recorder,
        "_end_step",
        broken,
        {"fingerprints": False},
        "ending a call of the model",
    ),
    "fingerprint": (torch_tensors, "fingerprint_bytes", broken, {}, "the fingerprint of a tensor"),
    "new sort of tensor": (Ledger, "_teach", broken, {}, "the fingerprint of a tensor"),
    "gradient": (Ledger, "operand", broken, {}, "recording a gradient"),
    "backward pass": (Gradients, "_write_one", broken, {}, "the backward pass of a call"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_disturbs_nothing_and_is_said(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name, breaks, options, doing = PLACES[place]
    expected = calls(model, grad=True)
    with record(tmp_path / "sound", model, **options) as sound:
        calls(model, grad=True)
    assert sound.failures == []
    assert sound.facts["failures"] == []
    modes = torch._C._len_torch_dispatch_stack()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaks)
        with record(tmp_path / "failed", model, **options) as recording:
            found = calls(model, grad=True)
            assert torch._C._len_torch_dispatch_stack() >= modes
    assert torch._C._len_torch_dispatch_stack() == modes
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert_is_said(tmp_path / "failed", recording, doing)
    assert_inconclusive(tmp_path)


def assert_is_said(path: Path, recording: Any, doing: str) -> None:
    text = next(each for each in recording.failures if doing in each)
    assert text.startswith(f"{FAILED}: KeyError: 'a bug' - at brickline/adapters/torch_")
    assert text in recording.summary()
    documents = recording.facts["failures"]
    kinds = [(each["while"], each["error"], each["where"]) for each in documents]
    assert len(set(kinds)) == len(kinds) <= 4, "by kind, not by call"
    assert sum(each["count"] for each in documents) > 1
    assert not [reason for reason in recording.unobserved if "bug" in reason]

    run = Run.open(path)
    problem = next(each for each in run.problems if str(each) == text)
    assert isinstance(problem, InternalError)
    profile = profile_from_run(run)
    flat = " ".join(profile_text(profile, 4000).split())
    assert text in flat
    assert f"Not read: {FAILED}" not in flat
    assert text in json.loads(profile_json(profile))["problems"]
    page = profile_page(profile, run=run)
    assert "brickline failed" in page
    assert "damaged or cut off" not in page
    assert text in statistics_of_path(path).problems


def assert_inconclusive(tmp_path: Path) -> None:
    for pair in (("failed", "sound"), ("sound", "failed"), ("failed", "failed")):
        report = compare(*(tmp_path / each for each in pair))
        assert report.status is Status.INCONCLUSIVE, pair
        assert FAILED in str(report), pair
        assert FAILED in report.to_json(), pair
        assert not report.findings


@pytest.mark.parametrize("place", ["inputs", "fingerprint"])
def test_native_calls_keep_failures_too(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name, breaks, _, _ = PLACES[place]
    expected = calls(model, grad=False)
    with record(tmp_path / "sound", model):
        calls(model, grad=False)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaks)
        with record(tmp_path / "failed", model) as recording:
            found = calls(model, grad=False)
    assert all(map(torch.equal, found, expected))
    doing = {"inputs": "the tensors of a call", "fingerprint": "the fingerprint of a tensor"}
    assert_is_said(tmp_path / "failed", recording, doing[place])
    assert_inconclusive(tmp_path)


def test_tensors_of_inference_mode(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_tensors, "fingerprint_bytes", broken)
    with record(tmp_path / "failed", model) as recording, torch.inference_mode():
        model(INPUT.clone())
    assert_is_said(tmp_path / "failed", recording, "the fingerprint of a tensor")


def test_a_nested_tensor_hides_even_its_shape(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="prototype"):
        nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    with record(tmp_path / "r", nn.ReLU()) as recording:
        recording.model(nested)
    assert recording.failures == []
    assert sum(recording.unobserved.values()) >= 1


def test_an_op_that_raises_raises_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ops._Op, "write", broken)
    model = nn.Linear(4, 2)
    with (
        record(tmp_path / "failed", model, level="op") as recording,
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        model(torch.ones(3, 5))
    assert "the outputs of an op" in recording.failures[0]


def test_a_model_that_nobody_named_goes_on_too(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(Recorder, "attach", broken)
    expected = calls(model, grad=True)
    finder = RootFinder(RecordOptions())
    finder.install()
    try:
        found = calls(model, grad=True)
    finally:
        facts = finder.close()
    assert all(map(torch.equal, found, expected))
    assert facts is not None
    assert facts["failures"][0]["while"] == "beginning to record a model"


def test_memory_that_runs_out_is_no_failure_of_ours(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensor: Tensor) -> bytes:
        raise torch.OutOfMemoryError("no memory for a copy")

    monkeypatch.setattr(torch_tensors, "fingerprint_bytes", full)
    with record(tmp_path / "r", model) as recording:
        calls(model, grad=True)
    assert recording.failures == []
    assert any("no memory for a copy" in reason for reason in recording.unobserved)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_a_fault_is_named_and_no_module_that_was_not_seen_whole(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, grad: bool, side: str
) -> None:
    other = Model().eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.layers[0].up.weight.mul_(1.5)  # what every later module is given differs
    for name, each in (("candidate", other), ("reference", model)):
        with monkeypatch.context() as patch:
            if name == side:
                patch.setattr(torch_recorder, "flatten", broken_for_dicts)
            with record(tmp_path / name, each):
                calls(each, grad=grad)
    report = compare(tmp_path / "candidate", tmp_path / "reference")
    assert report.status is Status.DIVERGED
    assert {finding.name for finding in report.findings} == {"layers.0.up"}
    assert any(note.startswith(f"{side}: {FAILED}") for note in report.coverage.notes)


def test_who_passes_on_what_nobody_saw_is_no_origin(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Model().eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.layers[0].up.weight[0, 0] = torch.nan
    with record(tmp_path / "reference", model):
        calls(model, grad=False)
    missed: list[Tensor] = []

    def misses_one(tensor: Tensor) -> bytes:
        if tensor.shape == (3, 16) and len(missed) < 2 and tensor.isnan().any():
            missed.append(tensor)
            if len(missed) == 1:  # what layers.0.up puts out, and layers.0.act is given
                broken()
        return fingerprint_bytes(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch_tensors, "fingerprint_bytes", misses_one)
        with record(tmp_path / "candidate", other), torch.no_grad():
            other(INPUT)
    assert missed
    report = compare(tmp_path / "candidate", tmp_path / "reference")
    assert not {finding.name for finding in report.findings} & {"layers.0.act", "layers.0.down"}


KILLED = """
import os, signal, sys, torch
import brickline as bl
from brickline.adapters import torch_tensors

def broken(tensor):
    raise KeyError("a bug")

model = torch.nn.Linear(4, 2)
with bl.record(sys.argv[1], model):
    model(torch.ones(3, 4))
    torch_tensors.fingerprint_bytes = broken
    model(torch.ones(3, 4))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_its_failures(tmp_path: Path) -> None:
    path = tmp_path / "killed.brick"
    package = str(Path(bl.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)],
        env=os.environ | {"PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (problem,) = (each for each in Run.open(path).problems if isinstance(each, InternalError))
    assert "KeyError: 'a bug'" in str(problem)


# ------------------------------------------------------------------------------------------ the log


class Unspeakable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("no words")


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_failures_are_counted_by_kind() -> None:
    told: list[int] = []
    log = FailureLog(lambda documents: told.append(len(documents)))
    assert not log
    for number in range(3):
        log.record_failure("counting", raised(KeyError(number)))
    log.record_failure("adding", raised(KeyError(3)))
    log.record_failure("adding", raised(Unspeakable()))
    assert told == [1, 2, 3], "once for each kind"
    first, second, third = log.documents()
    assert (first["message"], first["count"], second["count"]) == ("0", 3, 1)
    assert first["where"] == "brickline's core", "no line of brickline's was on the way"
    assert "str() failed" in third["message"]
    assert json.loads(json.dumps(log.documents())) == log.documents()
    texts = list(failure_texts(log.documents()))
    assert ", 3 times" in texts[0]
    assert "times" not in texts[1]
    assert problem_text(texts[0], "not read") == texts[0]
    assert problem_text("spool 7", "not read") == "not read: spool 7"


def test_messages_and_kinds_are_bounded() -> None:
    log = FailureLog()
    for number in range(2 * MOST_KINDS):
        log.record_failure(f"deed {number}", raised(ValueError("long\n" * 1000)))
    assert len(log.documents()) == MOST_KINDS + 1
    assert sum(each["count"] for each in log.documents()) == 2 * MOST_KINDS
    assert max(len(each["message"]) for each in log.documents()) < 600


def test_a_manifest_that_was_edited_breaks_no_reader() -> None:
    assert list(failure_texts(3)) == []
    assert list(failure_texts("text")) == []
    assert len(list(failure_texts([{}, 3, {"count": "x"}]))) == 2
