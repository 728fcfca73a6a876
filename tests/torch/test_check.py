"""`bl.check` as its users call it: with a reference, a drive, a kernel, and wrongly."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import brickline as bl
from brickline.errors import AcceptError, UsageError


class Attention(nn.Module):
    """One head that keeps its keys and values."""

    def __init__(self, width: int = 16, slots: int = 12) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.register_buffer("keys", torch.zeros(slots, width))
        self.register_buffer("values", torch.zeros(slots, width))

    def forward(self, x: torch.Tensor, place: int) -> torch.Tensor:
        self.keep(x, place)
        scores = self.q(x) @ self.keys[: place + 1].T / 4
        return self.o(torch.softmax(scores, -1) @ self.values[: place + 1])

    def keep(self, x: torch.Tensor, place: int) -> None:
        self.keys[place] = self.k(x)[0]
        self.values[place] = self.v(x)[0]


class Decoder(nn.Module):
    """Two layers of attention over tokens that come one by one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(2))
        self.head = nn.Linear(width, 32)

    def forward(self, token: torch.Tensor, place: int = 0) -> torch.Tensor:
        x = self.embed(token)
        for layer in self.layers:
            x = x + layer(x, place)
        return self.head(x)


def decode(model: nn.Module) -> list[int]:
    token = torch.tensor([3])
    made = []
    with torch.no_grad():
        for place in range(6):
            token = model(token, place).argmax(-1)
            made.append(int(token))
    return made


@pytest.fixture
def reference() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


class Stale(Attention):
    def keep(self, x: torch.Tensor, place: int) -> None:
        super().keep(x, place if place < 3 else place - 1)


def test_the_same_model_matches(reference: Decoder) -> None:
    report = bl.check(copy.deepcopy(reference), reference=reference, drive=decode)
    assert report
    assert report.status == "matched"
    assert report.coverage.complete
    assert set(report.verdicts.counts()) == {"identical"}
    assert {row.position for row in report.verdicts} == set(range(6))


def test_a_slot_that_goes_wrong_at_the_third_step(reference: Decoder) -> None:
    candidate = copy.deepcopy(reference)
    candidate.layers[1].__class__ = Stale
    report = bl.check(candidate, reference=reference, drive=decode, repro=False)
    assert not report
    top = report.culprits[0]
    assert (top.name, top.position, top.layer_idx) == ("layers.1", 3, 1)
    assert top.share is not None
    assert top.share > 0.99
    assert top.z > 2
    assert report.final_error > 10 * report.noise_floor


def test_the_driver_sees_what_it_would_see_without_a_check(reference: Decoder) -> None:
    candidate = copy.deepcopy(reference)
    plain = decode(copy.deepcopy(reference))
    seen: list[list[int]] = []
    bl.check(candidate, reference=reference, drive=lambda model: seen.append(decode(model)))
    assert seen == [plain]


def test_nothing_is_left_on_the_models(reference: Decoder) -> None:
    candidate = copy.deepcopy(reference)
    kept = copy.deepcopy(reference.state_dict())
    bl.check(candidate, torch.tensor([1]), reference=reference)
    for model in (candidate, reference):
        assert "forward" not in model.__dict__
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
    # The reference keeps what it kept; the candidate has run once, as its user asked.
    assert all(torch.equal(each, reference.state_dict()[name]) for name, each in kept.items())
    assert not torch.equal(candidate.layers[0].keys, reference.layers[0].keys)


def test_a_function_against_another() -> None:
    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w

    def port(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5) * w

    def wrong(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-3) * w

    x, w = torch.randn(8, 64), torch.randn(64)
    assert bl.check(port, x, w, reference=norm).status == "matched"
    report = bl.check(wrong, x, w, reference=norm, repro=False)
    assert [each.name for each in report.culprits] == ["wrong"]
    assert "eps" in (report.culprits[0].cause or "")


def test_keyword_arguments_go_along() -> None:
    report = bl.check(
        lambda x, *, by: x * by, torch.randn(4), kwargs={"by": 2.0}, reference=lambda x, by: x + x
    )
    assert report.status == "matched"


def test_what_a_call_writes_into_its_arguments_is_compared() -> None:
    def fill(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(x * 2)

    def wrong(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(x * 2)
        y[1] = 0

    x = torch.randn(6)
    assert bl.check(fill, x, torch.zeros(6), reference=fill).status == "matched"
    report = bl.check(wrong, x, torch.zeros(6), reference=fill, repro=False)
    assert [each.name for each in report.culprits] == ["wrong"]


def test_bfloat16_against_float32_is_cleared_and_a_fault_in_it_named() -> None:
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))
    candidate = copy.deepcopy(reference).to(torch.bfloat16)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    assert bl.check(candidate, x, reference=reference).status == "matched"
    with torch.no_grad():
        candidate[3].weight[2] *= 1.5
    report = bl.check(candidate, x, reference=reference, repro=False)
    assert [each.name for each in report.culprits] == ["3"]


def test_a_kernel_of_the_catalogue() -> None:
    from brickline.kernels.catalog import rms_norm

    def norm(x, w, rows, n, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w

    x, w = torch.randn(4, 64), torch.randn(64)
    assert bl.check(rms_norm("f32"), x, w, 4, 64, 1e-5, reference=norm).status == "matched"
    report = bl.check(
        rms_norm("f32"), x, w, 4, 64, 1e-3, reference=lambda *a: norm(*a[:4], 1e-5), repro=False
    )
    assert report.culprits[0].name == "rms_norm"
    with pytest.raises(UsageError, match=r"expected 6 arguments .*, got 2") as error:
        bl.check(rms_norm("f32"), x, w, reference=norm)
    assert error


def test_a_drive_that_calls_parts(reference: Decoder) -> None:
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        candidate.head.weight[0] *= 2
    report = bl.check(
        candidate,
        reference=reference,
        drive=lambda model: model.head(model.embed(torch.tensor([1, 2]))),
        repro=False,
    )
    assert [each.name for each in report.culprits] == ["head"]
    assert any("whole drive" in each for each in report.circumstances)


def test_dropout_left_on_is_named() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.Linear(32, 4)).eval()
    candidate = copy.deepcopy(reference)
    candidate[1].train()
    report = bl.check(candidate, torch.randn(8, 32), reference=reference, repro=False)
    assert [each.name for each in report.culprits] == ["1"]


def test_a_value_that_is_not_finite_is_traced_to_its_origin() -> None:
    class Overflow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 1e30) * 1e30

    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    candidate = copy.deepcopy(reference)
    candidate[1].__class__ = Overflow
    report = bl.check(candidate, torch.randn(3, 8), reference=reference, repro=False)
    assert report.culprits[0].name == "1"
    assert report.culprits[0].verdict == "non-finite origin"


def test_a_repro_fails_again_in_a_fresh_process(tmp_path) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        candidate[2].bias[1] += 1
    report = bl.check(candidate, torch.randn(5, 16), reference=reference, repro=tmp_path)
    script = report.culprits[0].repro
    assert script is not None, report.culprits[0].reason
    assert subprocess.run([sys.executable, script], capture_output=True).returncode == 1


def test_accepted_differences(tmp_path) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        candidate[2].weight[1] *= 1.001
    x = torch.randn(5, 16)
    known = tmp_path / "accept.toml"
    known.write_text('[[accept]]\nbrick = "2"\nreason = "new scale"\nrelative_l2 = 1e-2\n')
    report = bl.check(candidate, x, reference=reference, accept=known, repro=False)
    assert report.status == "matched"
    assert [each.verdict for each in report.findings] == ["accepted"]
    with torch.no_grad():
        candidate[2].weight[1] *= 1.5
    report = bl.check(candidate, x, reference=reference, accept=known, repro=False)
    assert report.status == "diverged"
    with pytest.raises(AcceptError):
        bl.check(candidate, x, reference=reference, accept=[{"brick": "2"}])


def test_a_report_survives_json(reference: Decoder) -> None:
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        candidate.head.bias[3] += 1
    report = bl.check(candidate, torch.tensor([1]), reference=reference, repro=False)
    again = bl.DivergenceReport.from_json(report.to_json())
    assert again.status == report.status
    assert again.findings[0].name == "head"
    assert len(again.verdicts) == len(report.verdicts)
    assert str(again).splitlines()[0] == str(report).splitlines()[0]


# Used wrongly


def test_neither_a_module_nor_a_callable() -> None:
    with pytest.raises(UsageError, match=r"candidate: expected .*, got int"):
        bl.check(3, torch.zeros(1))
    with pytest.raises(UsageError, match=r"reference: expected .*, got str"):
        bl.check(lambda x: x, torch.zeros(1), reference="model")


def test_a_model_in_the_place_of_inputs() -> None:
    with pytest.raises(UsageError, match=r"got a model \(Linear\); .* reference=model"):
        bl.check(nn.Linear(2, 2), nn.Linear(2, 2), torch.zeros(1, 2))


def test_a_model_against_itself() -> None:
    """It would be asked for its own values while it makes them, and never come to an end."""
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"got the candidate itself.*copy\.deepcopy"):
        bl.check(model, torch.zeros(1, 2), reference=model)
    assert bl.check(model, torch.zeros(1, 2), reference=copy.deepcopy(model), repro=False)


def test_arguments_and_a_drive() -> None:
    with pytest.raises(UsageError, match="either arguments or drive="):
        bl.check(lambda x: x, torch.zeros(1), drive=lambda model: model)
    with pytest.raises(UsageError, match="drive: expected a callable"):
        bl.check(lambda x: x, drive=3)


def test_a_model_that_raises_midway_keeps_what_was_seen(reference: Decoder) -> None:
    def drive(model: nn.Module) -> None:
        model(torch.tensor([1]), 0)
        model(torch.tensor([99]), 1)

    report = bl.check(copy.deepcopy(reference), reference=reference, drive=drive)
    assert report.status == "inconclusive"
    assert len(report.verdicts) > 5
    assert any("IndexError" in each for each in report.coverage.notes)


def test_an_interrupt_leaves_a_partial_report(reference: Decoder) -> None:
    def drive(model: nn.Module) -> None:
        model(torch.tensor([1]), 0)
        raise KeyboardInterrupt

    report = bl.check(copy.deepcopy(reference), reference=reference, drive=drive)
    assert report.status == "inconclusive"
    assert len(report.verdicts) > 5


def test_a_reference_that_raises() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    report = bl.check(lambda x: x + 1, torch.randn(3), reference=broken)
    assert report.status == "inconclusive"
    assert "boom" in report.headline


def test_other_shapes_are_said() -> None:
    report = bl.check(lambda x: x[:2] * 1, torch.randn(3), reference=lambda x: x * 1)
    assert report.status == "inconclusive"
    assert "(2,)" in report.headline
    assert "(3,)" in report.headline


def test_a_drive_that_calls_nothing(reference: Decoder) -> None:
    report = bl.check(copy.deepcopy(reference), reference=reference, drive=lambda model: None)
    assert report.status == "inconclusive"


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(0, 16),
        torch.zeros(2, 16).to_sparse(),
        torch.zeros(2, 16, device="meta"),
    ],
    ids=["empty", "sparse", "meta"],
)
def test_tensors_without_contents_are_no_match(given: torch.Tensor) -> None:
    report = bl.check(lambda x: x + x, given, reference=lambda x: x + x)
    assert report.status in ("inconclusive", "matched")
    if report.status == "matched":
        assert given.numel() == 0 or given.layout is torch.sparse_coo


def test_a_training_loop_is_followed() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    candidate = copy.deepcopy(reference)
    x, y = torch.randn(32, 8), torch.randn(32, 1)

    def train(model: nn.Module) -> None:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimiser.step()

    kept = copy.deepcopy(reference.state_dict())
    report = bl.check(candidate, reference=reference, drive=train, repro=False)
    assert report.status == "matched", str(report)
    assert all(torch.equal(each, reference.state_dict()[name]) for name, each in kept.items())
    with torch.no_grad():
        candidate.load_state_dict(kept)
        candidate[2].weight[0, 3] += 0.5
    report = bl.check(candidate, reference=reference, drive=train, repro=False)
    assert {each.name for each in report.culprits} == {"2"}
