"""Recording a model on CUDA: the same fingerprints as on the CPU's copy, and no wait on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from recorded import rows_of  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from brickline.adapters.recording import record  # noqa: E402
from brickline.fingerprints import Fingerprint, fingerprint  # noqa: E402
from brickline.run_tensors import load_tensor  # noqa: E402


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.act(self.up_proj(self.norm(x))))


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).cuda()


def check_all_taken(rows: Any) -> None:
    for row in rows:
        for each in row.operands:
            assert each.fingerprint is not None
            assert any(each.fingerprint), (row.name, each)


def equal(record_of: bytes, tensor: Tensor) -> bool:
    return Fingerprint.from_bytes(record_of) == fingerprint(tensor)


def test_fingerprints_are_those_of_the_tensors(tmp_path: Path, model: Any) -> None:
    x = torch.randn(4, 64, device="cuda")
    with record(tmp_path / "r", model) as recording, torch.no_grad():
        outs = [model(x + step) for step in range(4)]
    rows = rows_of(tmp_path / "r")
    check_all_taken(rows)
    heads = [row for row in rows if row.name == "Sequential"]
    for step, (row, out) in enumerate(zip(heads, outs, strict=True)):
        assert equal(row.inputs[0].fingerprint, (x + step).cpu())
        assert equal(row.outputs[0].fingerprint, out.cpu())
        assert row.backend == "CUDA"
    up = next(row for row in rows if row.name == "1.up_proj")
    assert equal(up.weights[0].fingerprint, model[1].up_proj.weight.detach().cpu())
    assert not recording.facts["unobserved"]


def test_large_tensors(tmp_path: Path, model: Any) -> None:
    x = torch.randn(8192, 64, device="cuda")
    with record(tmp_path / "r", model), torch.no_grad():
        out = model(x)
    rows = rows_of(tmp_path / "r")
    check_all_taken(rows)
    assert equal(rows[0].outputs[0].fingerprint, out.cpu())


def test_writes_in_place(tmp_path: Path) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            x += 1
            return self.norm(x) + y

    model = Adds().cuda()
    with record(tmp_path / "r", model) as recording, torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 16, device="cuda")
            first = x.clone()
            model(x)
    rows = [row for row in rows_of(tmp_path / "r") if row.position == 2 and row.name == "norm"]
    assert equal(rows[0].inputs[0].fingerprint, first.cpu())
    assert equal(rows[1].inputs[0].fingerprint, x.cpu())
    assert not recording.facts["unobserved"], "a model that writes has its tensors taken at once"


def test_in_place_modules_after_sharing_began(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)).cuda()
    x = torch.randn(2, 16, device="cuda")
    with torch.no_grad():
        hidden = model[0](x)
        with record(tmp_path / "r", model):
            for _ in range(3):
                model(x)
    for row in rows_of(tmp_path / "r"):
        if row.name == "1":
            assert equal(row.inputs[0].fingerprint, hidden.cpu())
            assert equal(row.outputs[0].fingerprint, hidden.relu().cpu())


def test_backward(tmp_path: Path, model: Any) -> None:
    with record(tmp_path / "r", model) as recording:
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(4, 64, device="cuda")).square().mean().backward()
    rows = rows_of(tmp_path / "r")
    up = [row for row in rows if row.name == "1.up_proj" and row.direction == 1]
    assert [row.position for row in up] == [0, 1]
    assert equal(up[1].weights[0].fingerprint, model[1].up_proj.weight.grad.cpu())
    assert recording.facts["counts"]["backward calls"] == 32


def test_other_streams(tmp_path: Path, model: Any) -> None:
    side = torch.cuda.Stream()
    x = torch.randn(4, 64, device="cuda")
    torch.cuda.synchronize()
    with record(tmp_path / "r", model), torch.no_grad():
        for _ in range(3):
            first = model(x)
            with torch.cuda.stream(side):
                second = model(x)
            side.synchronize()
    rows = [row for row in rows_of(tmp_path / "r") if row.name == "Sequential"]
    assert equal(rows[-1].outputs[0].fingerprint, second.cpu())
    assert equal(rows[-2].outputs[0].fingerprint, first.cpu())


def test_the_capture_of_a_graph_passes_by(tmp_path: Path, model: Any) -> None:
    x = torch.randn(4, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with record(tmp_path / "r", model) as recording, torch.no_grad():
        model(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            out = model(x)
        graph.replay()
        expected = model(x)
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected)
    assert recording.unobserved["calls during the capture of a CUDA graph"] == 1
    positions = {row.position for row in rows_of(tmp_path / "r")}
    assert len(positions) == 3


@pytest.mark.filterwarnings("ignore")  # torch's own, while it loads its compiler
def test_compiled(tmp_path: Path, model: Any) -> None:
    compiled = torch.compile(model)
    x = torch.randn(4, 64, device="cuda")
    with record(tmp_path / "r", compiled), torch.no_grad():
        out = compiled(x)
    rows = rows_of(tmp_path / "r")
    assert [row.name for row in rows] == ["Sequential"]
    assert equal(rows[0].outputs[0].fingerprint, out.cpu())


def test_time_alone_is_of_the_device(tmp_path: Path, model: Any) -> None:
    x = torch.randn(4, 64, device="cuda")
    with record(tmp_path / "r", model, fingerprints=False) as recording, torch.no_grad():
        for _ in range(3):
            model(x)
        torch.cuda.synchronize()
    stats = recording.profiler.profile().brick("UpProjection")
    assert stats.count == 9
    assert stats.timed >= 3


def test_contents(tmp_path: Path, model: Any) -> None:
    x = torch.randn(4, 64, device="cuda")
    with record(tmp_path / "all", model, tensors="all"), torch.no_grad():
        out = model(x)
    row = rows_of(tmp_path / "all")[0]
    found = torch.from_numpy(load_tensor(tmp_path / "all", row.outputs[0].fingerprint).copy())
    assert torch.equal(found, out.cpu())

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0

    model = nn.Sequential(model[0], Broken(), model[1])
    with record(tmp_path / "some", model, tensors="suspects"), torch.no_grad():
        model(x)
    (row,) = [row for row in rows_of(tmp_path / "some") if row.name == "1"]
    assert load_tensor(tmp_path / "some", row.inputs[0].fingerprint).shape == (4, 64)


def test_ops(tmp_path: Path, model: Any) -> None:
    x = torch.randn(4, 64, device="cuda")
    with record(tmp_path / "r", model, level="op"), torch.no_grad():
        for _ in range(2):
            model(x)
    rows = rows_of(tmp_path / "r")
    check_all_taken(rows)
    assert len([row for row in rows if row.name == "aten.gelu.default"]) == 6
