"""The seed's comparison: against a brute-force scan, and case by case without the seed's traps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brickline.checksums import KernelChecksum
from brickline.comparison.traces.comparison import compare_traces, first_divergence
from brickline.errors import UsageError
from brickline.traces import KernelTrace
from brickline.verdict import DivergenceReport, Status, Verdict

SUMS = st.one_of(st.none(), st.integers(0, 2))


@st.composite
def traces(draw: st.DrawFn) -> list[KernelTrace]:
    key = st.tuples(st.sampled_from(["rope", "norm"]), st.integers(0, 1), st.integers(0, 1))
    rows = draw(st.lists(st.tuples(key, SUMS, SUMS), max_size=8))
    return [
        KernelTrace(*key, "CPU", input_checksum=given_, output_checksum=made)
        for key, given_, made in rows
    ]


def place(trace: KernelTrace) -> tuple[str, int, int]:
    return trace.kernel_name, trace.layer_idx, trace.position


def scan(
    actual: Sequence[KernelTrace], expected: Sequence[KernelTrace]
) -> list[tuple[int, KernelTrace, KernelTrace]]:
    """Pair the n-th of a key with the n-th, by looking at everything each time."""
    found = []
    for index, trace in enumerate(actual):
        before = sum(place(other) == place(trace) for other in actual[:index])
        partners = [other for other in expected if place(other) == place(trace)]
        if before < len(partners):
            found.append((index, trace, partners[before]))
    return found


def differ(one: int | None, other: int | None) -> bool | None:
    return None if one is None or other is None else one != other


def verdict(pairs: Sequence[tuple[int, KernelTrace, KernelTrace]], index: int) -> Verdict:
    _, mine, theirs = pairs[index]
    outputs = differ(mine.output_checksum, theirs.output_checksum)
    inputs = differ(mine.input_checksum, theirs.input_checksum)
    if outputs is None:
        return Verdict.UNKNOWN
    if not outputs:
        return Verdict.IDENTICAL
    if inputs is not None:
        return Verdict.PROPAGATED if inputs else Verdict.SUSPECT
    earlier = [differ(m.output_checksum, t.output_checksum) for _, m, t in pairs[:index]]
    return Verdict.UNKNOWN if True in earlier else Verdict.SUSPECT


@given(traces(), traces())
def test_it_says_what_a_brute_force_scan_says(
    actual: list[KernelTrace], expected: list[KernelTrace]
) -> None:
    report = compare_traces(actual, expected)
    pairs = scan(actual, expected)
    verdicts = [verdict(pairs, index) for index in range(len(pairs))]
    assert report.verdicts.columns["verdict"] == verdicts
    known = [differ(m.output_checksum, t.output_checksum) is not None for _, m, t in pairs]
    suspects = [i for i, each in enumerate(verdicts) if each is Verdict.SUSPECT]
    guilty = (suspects or [i for i, v in enumerate(verdicts) if v is Verdict.PROPAGATED] or [None])[
        0
    ]
    if guilty is not None:
        assert report.status is (Status.DIVERGED if suspects else Status.INCONCLUSIVE)
        assert report.actual_trace is report.first_divergent_kernel is pairs[guilty][1]
        assert report.expected_trace is pairs[guilty][2]
        assert report.kernels_compared == sum(known[: guilty + 1])
        assert (len(report.suspects), len(report.findings)) == (len(suspects), len(suspects) or 1)
    else:
        whole = len(pairs) == len(actual) == len(expected) and pairs and all(known)
        assert report.status is (Status.MATCHED if whole else Status.INCONCLUSIVE)
        assert report.first_divergent_kernel is report.expected_trace is report.actual_trace is None
        assert report.kernels_compared == sum(known)
    assert (report.coverage.compared, report.coverage.total) == (sum(known), len(actual))
    alone = [text.startswith("candidate: ") for text in report.unmatched]
    assert (sum(alone), len(alone)) == (
        len(actual) - len(pairs),
        len(actual) + len(expected) - 2 * len(pairs),
    )


@given(traces())
def test_no_run_diverges_from_itself(both: list[KernelTrace]) -> None:
    report = compare_traces(both, both)
    complete = both and all(trace.output_checksum is not None for trace in both)
    assert report.status is (Status.MATCHED if complete else Status.INCONCLUSIVE)
    assert bool(report) is report.matched is bool(complete)
    assert not report.diverged
    assert (report.findings, report.unmatched) == ((), ())


@given(traces(), traces())
def test_a_report_survives_its_file(actual: list[KernelTrace], expected: list[KernelTrace]) -> None:
    report = compare_traces(actual, expected)
    again = DivergenceReport.from_json(report.to_json())
    assert again.verdicts.columns == report.verdicts.columns
    fields = ("status", "findings", "diagnosis", "expected_trace", "actual_trace", "unmatched")
    assert [getattr(again, each) for each in fields] == [getattr(report, each) for each in fields]


def trace(name: str = "rope", position: int = 0, **fields: Any) -> KernelTrace:
    return KernelTrace(name, 0, position, **({"backend": "CPU"} | fields))


def test_labels_follow_the_backends_and_the_roles() -> None:
    mine = [trace(backend="Vulkan", output_checksum=0xA, params='{"n": 1}')]
    theirs = [trace(backend="ROCm", output_checksum=0xB, params='{"n": 1}')]
    report = compare_traces(mine, theirs)
    assert report.diagnosis == (
        'DIVERGENCE: kernel "rope" (layer 0, position 0): '
        "ROCm (reference) checksum 0x000000000000000B != "
        "Vulkan (candidate) checksum 0x000000000000000A; "
        'inputs were not recorded; params of the candidate: {"n": 1}'
    )
    assert "GPU" not in report.diagnosis + report.candidate + report.reference
    assert (report.candidate, report.reference) == ("candidate (Vulkan)", "reference (ROCm)")


def test_nothing_in_common_is_not_a_match() -> None:
    report = compare_traces([trace("a", output_checksum=1)], [trace("b", output_checksum=1)])
    assert report.status is Status.INCONCLUSIVE
    assert "nothing in common" in report.diagnosis
    assert report.unmatched == (
        "candidate: a (layer 0, position 0)",
        "reference: b (layer 0, position 0)",
    )
    assert report.kernels_compared == 0


@pytest.mark.parametrize("side", [0, 1])
def test_a_side_without_traces_is_named(side: int) -> None:
    some = [trace(output_checksum=1)]
    report = compare_traces(*((), some) if side == 0 else (some, ()))
    assert report.status is Status.INCONCLUSIVE
    assert f"the {('candidate', 'reference')[side]} has no traces" in report.diagnosis


def test_an_unset_checksum_equals_no_other() -> None:
    both = [trace("a", output_checksum=5), trace("b")]
    report = compare_traces(both, both)
    assert report.status is Status.INCONCLUSIVE
    assert [str(each) for each in report.verdicts.columns["verdict"]] == ["identical", "unknown"]
    assert (report.kernels_compared, report.coverage.complete) == (1, False)
    assert "1 without an output checksum" in report.diagnosis


def test_a_difference_counts_although_something_is_unset() -> None:
    mine = [trace("a"), trace("b", output_checksum=1)]
    theirs = [trace("a"), trace("b", output_checksum=2)]
    assert compare_traces(mine, theirs).status is Status.DIVERGED


def test_inputs_tell_who_passed_an_error_on() -> None:
    theirs = [
        trace("embed", input_checksum=1, output_checksum=10),
        trace("rope", input_checksum=10, output_checksum=20),
        trace("attend", input_checksum=20, output_checksum=30),
    ]
    mine = [
        trace("embed", input_checksum=1, output_checksum=10),
        trace("rope", input_checksum=10, output_checksum=21),
        trace("attend", input_checksum=21, output_checksum=31),
    ]
    report = compare_traces(mine, theirs)
    assert [str(each) for each in report.verdicts.columns["verdict"]] == [
        *("identical", "suspect", "propagated"),
    ]
    (finding,) = report.findings
    assert (finding.name, finding.verdict) == ("rope", Verdict.SUSPECT)
    assert finding.evidence["inputs"] == "agree"
    assert report.first_divergent_kernel is mine[1]
    assert report.kernels_compared == 2
    assert report.headline == (
        "rope (layer 0) is the first suspect: the same inputs gave another output"
    )


def test_inputs_that_differ_from_the_start_accuse_nobody() -> None:
    mine, theirs = ([trace(input_checksum=n, output_checksum=n)] for n in (1, 2))
    report = compare_traces(mine, theirs)
    assert (report.status, report.suspects) == (Status.INCONCLUSIVE, ())
    assert report.findings[0].verdict is Verdict.PROPAGATED
    assert report.headline.endswith("differs first, and its inputs differed already")


def test_after_a_difference_a_launch_without_inputs_is_not_accused() -> None:
    mine = [trace(position=n, output_checksum=n) for n in range(3)]
    theirs = [trace(position=n, output_checksum=n + 9) for n in range(3)]
    verdicts = compare_traces(mine, theirs).verdicts.columns["verdict"]
    assert verdicts == [Verdict.SUSPECT, Verdict.UNKNOWN, Verdict.UNKNOWN]


def test_duplicates_are_paired_in_order_and_listed() -> None:
    mine = [trace(output_checksum=n) for n in (1, 2, 3)]
    theirs = [trace(output_checksum=n) for n in (1, 2)]
    report = compare_traces(mine, theirs)
    assert report.duplicates == (
        "candidate: rope (layer 0, position 0) ×3",
        "reference: rope (layer 0, position 0) ×2",
    )
    assert report.unmatched == ("candidate: rope (layer 0, position 0)",)
    assert report.status is Status.INCONCLUSIVE
    assert report.verdicts.columns["ordinal"] == [0, 1]
    assert compare_traces(theirs, theirs).status is Status.MATCHED


def test_a_match_says_what_was_compared() -> None:
    both = [trace(position=n, output_checksum=n) for n in range(4)]
    report = compare_traces(both, both)
    assert report.diagnosis == ("all 4 kernels matched between candidate (CPU) and reference (CPU)")
    assert report.coverage.notes == (
        "of 4 outputs only the first 64 floats were compared (checksums)",
    )


@pytest.mark.parametrize("wrong", ["text", 3, None, [1], [KernelChecksum("a", 0, 0, 1)]], ids=repr)
def test_what_is_no_trace_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="candidate: expected"):
        compare_traces(wrong, [])
    with pytest.raises(UsageError, match="reference: expected"):
        compare_traces([], wrong)


@given(traces(), traces())
def test_the_first_divergence_is_that_of_a_scan(
    actual: list[KernelTrace], expected: list[KernelTrace]
) -> None:
    mine, theirs = (
        [KernelChecksum(*place(each), each.output_checksum or 0) for each in side]
        for side in (actual, expected)
    )
    different = [
        (place(one), other.output_checksum or 0, one.output_checksum or 0)
        for _, one, other in scan(actual, expected)
        if (one.output_checksum or 0) != (other.output_checksum or 0)
    ]
    found = first_divergence(mine, theirs)
    if not different:
        assert found is None
    else:
        assert found is not None
        key = (found.kernel_name, found.layer_idx, found.position)
        assert (key, found.expected_checksum, found.actual_checksum) == different[0]
