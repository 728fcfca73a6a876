"""Comparing two runs: planted local errors, harmless differences, and what cannot be judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hand_made_launches import Decoder, Launches
from hypothesis import given, settings
from hypothesis import strategies as st

from brickline.comparison.comparing import compare
from brickline.comparison.operands import measure
from brickline.comparison.pairing import align
from brickline.comparison.report.report import first_difference, identical_prefix
from brickline.comparison.sides import Vocabulary
from brickline.errors import NotARun, UsageError
from brickline.verdict import DivergenceReport, Status, Verdict

FP32 = 1e-7
BF16 = 2e-3
FAULTS = {
    "scaled": lambda x: x * 1.05,
    "row stale": lambda x: np.concatenate([x[:3], x[2:3], x[4:]]),
    "rows swapped": lambda x: np.concatenate([x[1:2], x[0:1], x[2:]]),
    "tail dropped": lambda x: np.concatenate([x[:, :-9], 0 * x[:, -9:]], axis=1),
}


def compared(candidate: Decoder, reference: Decoder | None = None) -> DivergenceReport:
    return compare(candidate.record().run("c"), (reference or Decoder()).record().run("r"))


@pytest.mark.parametrize("noise", [0.0, FP32])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["layers.0.up", "layers.2.down", "layers.3.down"])
def test_a_planted_error_is_named(name: str, fault: str, noise: float) -> None:
    report = compared(Decoder(noise=noise, faults={name: FAULTS[fault]}))
    assert report.status is Status.DIVERGED
    assert report.findings[0].name == name
    assert report.findings[0].verdict is Verdict.SUSPECT
    assert [each.name for each in report.findings] == [name]


def test_what_fingerprints_cannot_know_is_none_with_a_reason() -> None:
    finding = compared(Decoder(faults={"layers.1.up": FAULTS["scaled"]})).findings[0]
    assert (finding.z, finding.share, finding.repro) == (None, None, None)
    assert finding.reason is not None
    assert "re-execution" in finding.reason
    assert finding.local_error == pytest.approx(0.05, rel=0.3)
    assert finding.cause == "scaled by 1.05"


def test_the_command_that_would_prove_it_is_given() -> None:
    report = compared(Decoder(faults={"layers.1.up": FAULTS["scaled"]}))
    assert report.next_command is not None
    assert 'tensors="all", include="layers.1.up"' in report.next_command
    assert "brickline check --runs" in report.next_command


def test_where_is_said_from_the_stripes() -> None:
    report = compared(Decoder(faults={"layers.1.up": FAULTS["row stale"]}))
    assert report.findings[0].where == "rows 3 of 16"


def test_a_module_that_combines_its_children_wrongly_is_named_itself() -> None:
    report = compared(Decoder(noise=FP32, faults={"layers.2": FAULTS["rows swapped"]}))
    assert [each.name for each in report.findings] == ["layers.2"]
    assert report.findings[0].evidence["before"] == "layers.2.down"
    report = compared(Decoder(noise=FP32, faults={"layers.1+": FAULTS["scaled"]}))
    assert [each.name for each in report.findings] == ["layers.1"]


def test_a_parameter_that_differs_is_the_cause() -> None:
    weight = np.random.default_rng(1).standard_normal((64, 64)) / 8
    report = compared(Decoder(noise=FP32, weights={"layers.2.up": weight}))
    assert [each.name for each in report.findings] == ["layers.2.up"]
    assert report.findings[0].cause is not None
    assert "parameter 0" in report.findings[0].cause


def test_the_error_that_matters_comes_first() -> None:
    faults: dict[str, Any] = {"layers.0.up": lambda x: x * (1 + 2e-5)}
    faults["layers.3.down"] = FAULTS["tail dropped"]
    report = compared(Decoder(faults=faults))
    assert [each.name for each in report.findings] == ["layers.3.down", "layers.0.up"]


def test_a_fault_of_a_later_call_is_named_there() -> None:
    candidate, reference = Decoder(calls=4), Decoder(calls=4)
    launches = candidate.record()
    seen = {"count": 0}

    def from_third(x: Any) -> Any:
        seen["count"] += 1
        return x * 1.1 if seen["count"] > 2 else x

    launches = Decoder(calls=4, faults={"layers.1.up": from_third}).record()
    report = compare(launches.run("c"), reference.record().run("r"))
    assert (report.findings[0].name, report.findings[0].position) == ("layers.1.up", 2)
    assert len(report.findings) == 1


def test_non_finite_values_are_traced_to_their_origin() -> None:
    def broken(x: Any) -> Any:
        x = x.copy()
        x[2, 5] = np.nan
        return x

    report = compared(Decoder(noise=FP32, faults={"layers.1.down": broken}))
    assert report.findings[0].name == "layers.1.down"
    assert report.findings[0].verdict is Verdict.NONFINITE_ORIGIN
    assert report.status is Status.DIVERGED


@pytest.mark.parametrize("noise", [0.0, FP32])
def test_harmless_differences_match(noise: float) -> None:
    report = compared(Decoder(noise=noise, seed=1), Decoder(noise=noise, seed=2))
    assert report.status is Status.MATCHED, str(report.whys)
    assert not report.findings
    assert report.coverage.complete
    counts = set(report.verdicts.counts())
    assert counts == ({"identical"} if noise == 0 else {"rounding"})


@pytest.mark.parametrize("seed", range(6))
def test_other_names_are_paired_by_value(seed: int) -> None:
    candidate = Decoder(noise=FP32, seed=seed, prefix="h", layers=5)
    report = compared(candidate, Decoder(layers=5))
    assert report.status is Status.MATCHED
    pairs = zip(*(report.verdicts.columns[key] for key in ("name", "reference_name")), strict=True)
    assert all(one.replace("h.", "layers.") == two for one, two in pairs)


def test_a_fault_under_other_names_is_named_by_the_candidates() -> None:
    candidate = Decoder(noise=FP32, prefix="h", faults={"h.1.down": FAULTS["tail dropped"]})
    finding = compared(candidate).findings[0]
    assert (finding.name, finding.reference_name) == ("h.1.down", "layers.1.down")


# --- What cannot be judged ------------------------------------------------------------------------


def test_an_extra_call_shifts_nothing() -> None:
    long, short = Decoder(calls=4).record(), Decoder(calls=3).record()
    report = compare(long.run("c"), short.run("r"))
    assert report.status is Status.INCONCLUSIVE
    assert not report.findings
    assert set(report.verdicts.counts()) == {"identical", "structural"}
    assert all("call 3" in each for each in report.unmatched)


def test_other_inputs_are_said_and_are_no_suspect() -> None:
    candidate, reference = Launches(), Launches()
    for launches, tokens in ((candidate, [1, 2, 3, 4]), (reference, [1, 2, 9, 4])):
        drawn = np.random.default_rng(tokens[2])
        given, out = np.array(tokens), drawn.standard_normal((4, 8))
        launches.add("Model", [given], [out], kind="Model")
    report = compare(candidate.run(), reference.run())
    assert report.status is Status.INCONCLUSIVE
    assert not report.findings
    assert "other inputs" in report.headline


def test_a_run_without_fingerprints() -> None:
    bare = Launches()
    bare.add("Model", [np.ones(3)], [np.ones(3)], prints=False)
    report = compare(bare.run("bare.brick"), Decoder().record().run())
    assert report.status is Status.INCONCLUSIVE
    assert "bare.brick" in report.headline
    assert "no fingerprints" in report.headline


def test_a_run_without_launches() -> None:
    report = compare(Launches().run("empty.brick"), Decoder().record().run())
    assert report.status is Status.INCONCLUSIVE
    assert "empty.brick holds no launches" in report.headline
    assert not report


def test_a_run_that_was_cut_off_is_no_match() -> None:
    cut = Launches()
    x = np.random.default_rng(0).standard_normal((4, 8))
    cut.add("layers.0", [x], [x * 2], parent=77)
    report = compare(cut.run(), cut.run())
    assert report.status is Status.INCONCLUSIVE
    assert "did not end" in report.headline


def test_numbers_of_a_damaged_run_raise_no_warnings() -> None:
    candidate, reference = Decoder().record(), Decoder(noise=1e-7).record()
    for row in candidate.print_list:
        row["sketch"] = np.array([1e300, -1e300] * 32)
    assert compare(candidate.run(), reference.run()).status is not Status.MATCHED


def test_nothing_in_common() -> None:
    other = Launches()
    for number in range(5):
        value = np.random.default_rng(number).standard_normal((3, 7))
        other.add(f"kernel_{number}", [value], [value * 2], level=None)
    report = compare(other.run(), Decoder().record().run())
    assert report.status is Status.INCONCLUSIVE
    assert not report
    assert "no launch in common" in report.headline
    assert report.coverage.compared == 0
    assert report.unmatched


def test_another_vocabulary_is_structural() -> None:
    candidate, reference = Launches(), Launches()
    for launches, size in ((candidate, 10), (reference, 12)):
        x = np.random.default_rng(0).standard_normal((4, 8))
        launches.add("head", [x], [np.random.default_rng(1).standard_normal((4, size))])
    report = compare(candidate.run(), reference.run())
    assert report.verdicts[0].verdict in (Verdict.STRUCTURAL, Verdict.SUSPECT)
    assert report.status is not Status.MATCHED


def test_what_is_no_run_is_refused(tmp_path: Any) -> None:
    with pytest.raises(NotARun):
        compare(tmp_path, tmp_path)
    with pytest.raises(UsageError, match="expected the path of a run"):
        compare(3, tmp_path)  # type: ignore[arg-type]


def test_circumstances_come_with_the_report() -> None:
    numerics = {"tf32_matmul": True, "sdp_flash": False}
    ours = {"torch": "2.13.0", "numerics": numerics, "seeds": {"torch": 1}}
    theirs = {"torch": "2.11.0", "numerics": {"tf32_matmul": False, "sdp_flash": False}}
    theirs["seeds"] = {"torch": 2}
    report = compare(
        Decoder().record().run(circumstances=ours), Decoder().record().run(circumstances=theirs)
    )
    assert report.circumstances[0] == "TF32 in matrix products: on, reference off"
    assert "torch's seed: 1, reference 2" in report.circumstances
    assert "torch: 2.13.0, reference 2.11.0" in report.circumstances


# --- Properties -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_the_first_difference_equals_a_scan(same: list[bool]) -> None:
    candidate, reference = Launches(), Launches()
    for number, equal in enumerate(same):
        value = np.random.default_rng(number).standard_normal((2, 5))
        candidate.add(f"kernel_{number % 4}", [], [value], level=None, position=number)
        changed = value if equal else value + 1e-9
        reference.add(f"kernel_{number % 4}", [], [changed], level=None, position=number)
    words = Vocabulary()
    a, b = candidate.side(words), reference.side(words)
    alignment = align(a, b)
    found = measure(a, b, alignment)
    scanned = next((number for number, equal in enumerate(same) if not equal), None)
    assert first_difference(alignment, found) == scanned
    assert identical_prefix(alignment, found) == (len(same) if scanned is None else scanned)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_report_is_never_matched_where_a_tensor_differs_by_more_than_rounding(data: Any) -> None:
    layer = data.draw(st.integers(0, 3))
    part = data.draw(
        st.sampled_from([f"layers.{layer}.up", f"layers.{layer}.down", f"layers.{layer}"])
    )
    size = 10.0 ** data.draw(st.floats(-4, 0.5))
    noise = data.draw(st.sampled_from([0.0, FP32]))
    drawn = np.random.default_rng(data.draw(st.integers(0, 99)))

    def fault(x: Any) -> Any:
        return x + size * np.abs(x).mean() * drawn.standard_normal(x.shape)

    report = compared(Decoder(noise=noise, faults={part: fault}))
    assert report.status is Status.DIVERGED
    assert report.findings[0].name == part


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_coarse_rounding_is_no_suspect(seed: int) -> None:
    coarse = Decoder(noise=BF16, seed=seed).record()
    coarse.strings[coarse.strings.index("float32")] = "bfloat16"
    report = compare(coarse.run(), Decoder().record().run())
    assert not report.findings
    assert report.status is not Status.DIVERGED
