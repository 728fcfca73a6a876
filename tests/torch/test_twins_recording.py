"""Recording calls in float64 beside their native runs."""

from __future__ import annotations

import copy
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import rows_of
from torch import Tensor, nn

import brickline as bl
from brickline.errors import RunDamaged, RunVersion, UsageError
from brickline.run.twin_rows import read_twins


class Attention(nn.Module):
    """A step of decoding: keys are kept in a buffer, in an attribute and in the caller's list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("kept", torch.zeros(1, 8, width))
        self.calls: list[int] = []
        self.seen = 0

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        length = x.shape[1]
        self.kept[:, self.seen : self.seen + length] = self.k(x)
        self.seen += length
        self.calls.append(length)
        cache.append(self.kept[:, : self.seen].clone())
        weights = (self.q(x) @ cache[-1].transpose(1, 2)).softmax(-1)
        return weights @ cache[-1] + 0.1 * torch.rand(x.shape, dtype=x.dtype)


class Decoder(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, width), nn.LayerNorm(width)
        self.attention, self.head = Attention(width), nn.Linear(width, 40)

    def forward(self, tokens: Tensor, cache: list[Tensor]) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x), cache))


def decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(1)
    return Decoder().eval().to(dtype)


def decoded(model: nn.Module) -> list[Tensor]:
    """Three calls, and everything that they leave behind."""
    torch.manual_seed(2)
    cache: list[Tensor] = []
    tokens = torch.arange(4).reshape(1, 4)
    made = []
    with torch.no_grad():
        for _ in range(3):
            made.append(model(tokens, cache))
            tokens = made[-1][:, -1:].argmax(-1)
    attention: Any = model.attention
    state = torch.tensor([attention.seen, *attention.calls])
    return [*made, *cache, attention.kept.clone(), state, torch.rand(3)]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def twins_of(path: Path) -> tuple[Any, np.ndarray]:
    part = bl.Run.open(path).parts[0]
    return part, read_twins(part.path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_twin_changes_nothing_that_the_native_run_meets(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    expected = decoded(decoder(dtype))
    model = decoder(dtype)
    held = {name: (tensor, tensor._version) for name, tensor in model.named_parameters()}
    buffer = model.attention.kept
    with bl.record(tmp_path / "a.brick", model, twin=True) as recording:
        found = decoded(model)
    assert recording.facts["twin"]["calls"] == 3, recording.summary()
    assert not recording.failures
    for one, two in zip(expected, found, strict=True):
        assert torch.equal(one, two)
    assert model.attention.kept is buffer
    assert all(dict(model.named_parameters())[name] is held[name][0] for name in held)
    assert all(tensor._version == version for tensor, version in held.values())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_run_with_twins_has_the_traces_of_one_without(tmp_path: Path) -> None:
    for name, twin in (("plain", False), ("twin", True)):
        with bl.record(tmp_path / f"{name}.brick", model := decoder(), twin=twin):
            decoded(model)
    plain, twin = (rows_of(tmp_path / f"{name}.brick") for name in ("plain", "twin"))
    assert len(plain) == len(twin)
    for one, two in zip(plain, twin, strict=True):
        assert (one.name, one.position, one.ordinal) == (two.name, two.position, two.ordinal)
        assert [o.fingerprint for o in one.operands] == [o.fingerprint for o in two.operands]
    facts = bl.Run.open(tmp_path / "twin.brick").manifest["facts"]["recording"]
    before = bl.Run.open(tmp_path / "plain.brick").manifest["facts"]["recording"]
    assert facts["unobserved"] == before["unobserved"]
    assert "twin" not in before


def test_every_forward_tensor_has_its_twin(tmp_path: Path) -> None:
    with bl.record(tmp_path / "a.brick", model := decoder(), twin=True):
        decoded(model)
    _, twins = twins_of(tmp_path / "a.brick")
    part = bl.Run.open(tmp_path / "a.brick").parts[0]
    keys = {(part.string(int(row["name"])), *(int(row[name]) for name in PLACE)) for row in twins}
    for row in rows_of(tmp_path / "a.brick"):
        for tensor in (*row.inputs, *row.outputs):
            assert (row.name, row.position, row.ordinal, tensor.role, tensor.index) in keys
    assert len(keys) == len(twins)


PLACE = ("position", "ordinal", "role", "index")


def test_a_twin_is_the_model_in_float64(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(torch.bfloat16).eval()
    x = torch.randn(6, 16, dtype=torch.bfloat16)
    with bl.record(tmp_path / "a.brick", model, twin=True), torch.no_grad():
        model(x)
        exact = copy.deepcopy(model).double()(x.double())
    part, twins = twins_of(tmp_path / "a.brick")
    (row,) = [
        row for row in twins if part.string(int(row["name"])) == "Sequential" and row["role"] == 1
    ]
    found = bl.Fingerprint.from_bytes(row["fingerprint"].tobytes())
    assert bl.distance(found, bl.fingerprint(exact)).relative_l2 < 1e-14
    assert row["roundoff"] == 2.0**-8
    assert 1e-4 < row["noise"] / found.l2 < 2e-2


def test_constants_are_wide(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.arange(0, 8, 2) / 8 + torch.tensor(0.1) + torch.full((4,), 0.3)
            return x * table * torch.linspace(0.1, 0.7, 4)

    x = torch.randn(3, 4)
    with bl.record(tmp_path / "a.brick", Scaled().eval(), twin=True) as recording, torch.no_grad():
        recording.model(x)
    _, twins = twins_of(tmp_path / "a.brick")
    table = torch.arange(0, 8, 2).double() / 8 + 0.1 + 0.3
    exact = x.double() * table * torch.linspace(0.1, 0.7, 4, dtype=torch.float64)
    found = bl.Fingerprint.from_bytes(twins[-1]["fingerprint"].tobytes())
    assert bl.distance(found, bl.fingerprint(exact)).relative_l2 < 1e-14
    assert torch.get_default_dtype() is torch.float32


def test_fillers_of_masks_do_not_hide_the_rest(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.ones(4, 4).triu(1).bool(), torch.finfo(x.dtype).min)

    with bl.record(tmp_path / "a.brick", Masked().eval(), twin=True) as recording:
        recording.model(torch.randn(4, 4))
    _, twins = twins_of(tmp_path / "a.brick")
    assert np.isfinite(twins["fingerprint"]["l2"]).all()
    assert twins[-1]["fingerprint"]["absmax"] == 1e30


class Writing(nn.Module):
    """Writes to memory that belongs to nobody in the call."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.write = lambda x: target.add_(x.sum())

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.linear(x)


class Raising(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.linear, self.error = nn.Linear(8, 8), error

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise self.error
        return self.linear(x)


def reason(path: Path, model: nn.Module, calls: int = 1) -> str:
    x = torch.ones(2, 8)
    with torch.no_grad():
        expected = model(x)
        with bl.record(path, model, twin=True, overwrite=True) as recording:
            for _ in range(calls):
                assert torch.equal(model(x), expected)
    assert not recording.failures
    assert recording.facts["twin"]["calls"] == 0
    return " ".join(line for line in recording.summary().splitlines() if "no twin" in line)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_has_no_twin_says_why(tmp_path: Path) -> None:
    path = tmp_path / "a.brick"
    assert "training mode" in reason(path, Small().train())
    hooked = Small().eval()
    hooked.up.register_forward_hook(lambda module, args, result: None)
    assert "up has forward hooks of the program's own" in reason(path, hooked)
    assert "TorchScript" in reason(path, nn.Sequential(torch.jit.script(nn.Linear(8, 8))).eval())
    assert "out of memory" in reason(path, Raising(torch.OutOfMemoryError("no")).eval())
    text = reason(path, Raising(ValueError("odd dtype")).eval(), 5)
    assert "no twin of calls 0, 1, 2: in float64 it raised ValueError: odd dtype" in text
    assert "no twin of calls 3, 4: none was made of the 3 calls before" in text


def test_a_write_outside_the_call_is_refused_before_it_happens(tmp_path: Path) -> None:
    target = torch.zeros(1)
    model = Writing(target).eval()
    text = reason(tmp_path / "a.brick", model)
    assert "aten.add_.Tensor writes to a tensor that is neither an argument" in text
    assert target == 16 * 2


def test_an_operation_without_float64_runs_in_float32_and_is_named(tmp_path: Path) -> None:
    library = torch.library.Library("brickline_twins", "DEF")
    library.define("halve(Tensor x) -> Tensor")

    def halve(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError("no float64")
        return x / 2

    library.impl("halve", halve, "CPU")

    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.brickline_twins.halve(x)

    with bl.record(tmp_path / "a.brick", Halved().eval(), twin=True) as recording:
        recording.model(torch.ones(4))
    assert recording.facts["twin"]["float32"] == ["brickline_twins.halve.default"]
    assert "ran in float32" in recording.summary()


def test_compiled_models_have_a_twin_of_the_original(tmp_path: Path) -> None:
    model = torch.compile(Small().eval(), backend="eager")
    with bl.record(tmp_path / "a.brick", model, twin=True) as recording, torch.no_grad():
        model(torch.ones(2, 8))
    assert recording.facts["twin"]["calls"] == 1, recording.summary()


def test_recurrent_layers_have_twins(tmp_path: Path) -> None:
    model = nn.ModuleDict({"lstm": nn.LSTM(8, 8)})
    model.forward = lambda x: model["lstm"](x)[0]  # type: ignore[method-assign]
    model.eval().to(torch.bfloat16)
    with bl.record(tmp_path / "a.brick", model, twin=True) as recording, torch.no_grad():
        model(torch.ones(3, 2, 8, dtype=torch.bfloat16))
    assert recording.facts["twin"]["calls"] == 1, recording.summary()
    assert recording.facts["twin"]["float32"] == []


def test_a_file_of_twins_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    with bl.record(tmp_path / "a.brick", Small().eval(), twin=True) as recording:
        recording.model(torch.ones(2, 8))
    spool = bl.Run.open(tmp_path / "a.brick").parts[0].path
    file = spool.with_suffix(".twins")
    rows = read_twins(spool)
    assert file.stat().st_mode & 0o777 == 0o600
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert len(read_twins(spool)) == len(rows) - 1
    file.write_bytes(whole[:8] + struct.pack("<I", 2) + whole[12:])
    with pytest.raises(RunVersion, match="twins of version 1 or older, found 2"):
        read_twins(spool)
    file.write_bytes(b"something else entirely")
    with pytest.raises(RunDamaged, match="expected a file of twins"):
        read_twins(spool)
    file.unlink()
    assert len(read_twins(spool)) == 0


def test_twins_are_fingerprints(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave one out"):
        bl.record(tmp_path / "a.brick", Small(), twin=True, fingerprints=False)
    with pytest.raises(UsageError, match="expected True or False"):
        bl.record(tmp_path / "a.brick", Small(), twin=2)  # type: ignore[arg-type]


def test_threads_that_call_one_model_do_not_meet_its_twin(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).eval()
    inputs = torch.randn(4, 5, 16)
    made: dict[int, list[Tensor]] = {number: [] for number in range(4)}

    def call(number: int) -> None:
        with torch.no_grad():
            made[number] += [model(inputs[number]) for _ in range(8)]

    with torch.no_grad():
        expected = [model(each) for each in inputs]
    with bl.record(tmp_path / "a.brick", model, twin=True) as recording:
        threads = [threading.Thread(target=call, args=(number,)) for number in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, results in made.items():
        assert len(results) == 8
        assert all(torch.equal(result, expected[number]) for result in results)
    twin = recording.facts["twin"]
    assert twin["calls"] + sum(entry["count"] for entry in twin["none"]) == 32
    assert {entry["reason"] for entry in twin["none"]} <= {"another call of a model is under way"}
    assert not recording.failures


def test_a_model_with_threads_of_its_own_does_not_wait_for_them_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brickline.adapters.torch_twins.PATIENCE_S", 0.2)

    class Threaded(Small):
        def forward(self, x: Tensor) -> Tensor:
            made: list[Tensor] = []
            thread = threading.Thread(target=lambda: made.append(self.up(x.float())))
            thread.start()
            thread.join()
            return made[0]

    model, x = Threaded().eval(), torch.ones(2, 8)
    expected = model(x)
    with bl.record(tmp_path / "a.brick", model, twin=True) as recording:
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
    assert "a thread waited 0.2 s" in recording.summary()
    assert recording.facts["twin"]["calls"] == 0
