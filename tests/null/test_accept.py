"""Accepted differences: read strictly, applied in the open, and never larger than was said."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brickline.errors import AcceptError, UsageError
from brickline.traces import KernelTrace
from brickline.verdict import (
    Accepted,
    Coverage,
    DivergenceReport,
    Finding,
    Status,
    Verdict,
    VerdictRow,
    VerdictTable,
    apply_accepted,
    load_accepted,
    parse_accepted,
    propose_accept,
    unused_entries,
    write_accept,
)

ENTRY = {"brick": "layers.*.mlp", "reason": "tanh-GELU", "relative_l2": 1e-3}


def row(
    name: str, verdict: Verdict, error: float | None = 1e-7, position: int | None = 0
) -> VerdictRow:
    return VerdictRow(
        name, name, None, position, 0, "forward", None, None, verdict, None, error, error
    )


def a_report(
    *findings: Finding, rows: tuple[VerdictRow, ...] = (), **more: Any
) -> DivergenceReport:
    """A complete report, with a row for each finding and one that is clean."""
    table = VerdictTable()
    for each in (*(row(f.name, f.verdict, f.local_error, f.position) for f in findings), *rows):
        table.append(each)
    table.append(row("embed", Verdict.IDENTICAL, 0.0))
    given = {
        "coverage": Coverage(len(table), len(table)),
        **more,
    }
    return DivergenceReport(findings=findings, verdicts=table, **given)


def culprit(name: str = "layers.3.mlp", error: float | None = 5e-4, **more: Any) -> Finding:
    return Finding(name, more.pop("verdict", Verdict.CULPRIT), local_error=error, **more)


class TestLoading:
    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "accept.toml"
        path.write_text(
            '[[accept]]\nbrick = "layers.*.mlp"\nreason = "tanh"\nrelative_l2 = 1e-3\n'
            '[[accept]]\nbrick = "head"\nreason = "int8"\nrelative_l2 = 1\n'
        )
        first, second = load_accepted(path)
        assert (first.brick, first.reason, first.relative_l2) == ("layers.*.mlp", "tanh", 1e-3)
        assert first.source == f"{path}: accept[0]"
        assert second.relative_l2 == 1
        assert load_accepted(str(path)) == (first, second)

    def test_from_python(self) -> None:
        entry = Accepted("head", "int8", 0.1)
        assert load_accepted(None) == ()
        assert load_accepted(entry) == (entry,)
        assert load_accepted([entry, ENTRY])[0] is entry
        assert load_accepted(ENTRY)[0].brick == "layers.*.mlp"
        assert load_accepted([]) == ()

    def test_an_empty_file_accepts_nothing(self) -> None:
        assert parse_accepted("# nothing yet\n") == ()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[[accept]\n", "expected TOML in f.toml"),
            ("[accept]\nbrick = 'a'\n", r"got \[accept\]; double the brackets"),
            ("[[acept]]\nbrick = 'a'\n", "got 'acept'; begin each entry with"),
            ("accept = [3]\n", r"got 3 - at f.toml: accept\[0\]"),
            ("[[accept]]\nbrick = 'a'\nrelative_l2 = 1\n", "reason is missing"),
            ("[[accept]]\nbrick = 'a'\nreason = 'r'\n", "relative_l2 is missing"),
            (
                "[[accept]]\nbrik = 'a'\nreason = 'r'\nrelative_l2 = 1\n",
                r"got 'brik' - at f.toml: accept\[0\]; did you mean 'brick'\?",
            ),
            ("[[accept]]\nbrick='a'\nreason=' '\nrelative_l2=1\n", "expected a reason"),
            ("[[accept]]\nbrick='a'\nreason=3\nrelative_l2=1\n", "expected a reason, got 3"),
            ("[[accept]]\nbrick='a'\nreason='r'\nrelative_l2=-1\n", "from 0 on, got -1"),
            ("[[accept]]\nbrick='a'\nreason='r'\nrelative_l2=nan\n", "got nan"),
            ("[[accept]]\nbrick='a'\nreason='r'\nrelative_l2=inf\n", "got inf"),
            ("[[accept]]\nbrick='a'\nreason='r'\nrelative_l2=true\n", "got True"),
            ("[[accept]]\nbrick='a'\nreason='r'\nrelative_l2='1'\n", "got '1'"),
        ],
    )
    def test_what_cannot_be_understood(self, text: str, message: str) -> None:
        with pytest.raises(AcceptError, match=message):
            parse_accepted(text, "f.toml")

    @pytest.mark.parametrize(
        "glob", ["", " ", " a", "a..b", ".a", "a.", "layers.[0-9.mlp", "a**", "a.b**.c", 3]
    )
    def test_bad_globs(self, glob: Any) -> None:
        with pytest.raises(AcceptError, match=r"expected .* got .* - at accept\.brick; write"):
            Accepted(glob, "r", 1.0)

    def test_files_that_are_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(AcceptError, match=r"No such file.*--write-accept"):
            load_accepted(tmp_path / "none.toml")
        (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(AcceptError, match="not UTF-8"):
            load_accepted(tmp_path / "bytes")
        with pytest.raises(AcceptError, match="Is a directory"):
            load_accepted(tmp_path)

    def test_other_things(self) -> None:
        for given_ in (3, [3], [None]):
            with pytest.raises(UsageError, match="write for example"):
                load_accepted(given_)  # type: ignore[arg-type]


class TestGlobs:
    @pytest.mark.parametrize(
        ("glob", "name", "fits"),
        [
            ("layers.*.mlp", "layers.3.mlp", True),
            ("layers.*.mlp", "layers.3.mlp.up", False),
            ("layers.*.mlp", "layers.3.self.mlp", False),
            ("layers.*.mlp.**", "layers.3.mlp", True),
            ("layers.*.mlp.**", "layers.3.mlp.up.weight", True),
            ("**.mlp", "model.layers.3.mlp", True),
            ("**.mlp", "mlp", True),
            ("**", "anything.at.all", True),
            ("*", "head", True),
            ("*", "layers.3", False),
            ("layers.[0-3].mlp", "layers.2.mlp", True),
            ("layers.[!0-3].mlp", "layers.2.mlp", False),
            ("layers.1?.mlp", "layers.12.mlp", True),
            ("Head", "head", False),
            ("kernel[[]0]", "kernel[0]", True),
        ],
    )
    def test_parts(self, glob: str, name: str, fits: bool) -> None:
        assert Accepted(glob, "r", 1.0).covers(name) is fits

    @given(st.lists(st.text("ab[]*?!^-x", min_size=1, max_size=5), min_size=1, max_size=4))
    def test_any_glob_is_taken_or_refused(self, parts: list[str]) -> None:
        try:
            entry = Accepted(".".join(parts), "r", 1.0)
        except AcceptError:
            return
        entry.covers("a.b.x")


class TestApplying:
    def test_an_accepted_finding_stays_listed(self) -> None:
        report = apply_accepted(a_report(culprit()), [ENTRY])
        (finding,) = report.findings
        assert (finding.verdict, finding.reason) == (Verdict.ACCEPTED, "tanh-GELU")
        assert finding.evidence["accepted_relative_l2"] == 1e-3
        assert report.status is Status.MATCHED
        assert bool(report)
        assert report.exit_status == 0
        assert report.culprits == ()
        assert report.verdicts[0].verdict is Verdict.ACCEPTED
        assert report.headline == "1 accepted difference (largest relative L2 0.0005); " + (
            "nothing else differs"
        )
        assert DivergenceReport.from_json(report.to_json()).findings == report.findings

    def test_one_that_grows_fails(self) -> None:
        report = apply_accepted(a_report(culprit(error=5e-3)), [ENTRY])
        (finding,) = report.findings
        assert finding.verdict is Verdict.CULPRIT
        assert "grew beyond what is accepted: relative L2 0.005, accepted up to 0.001" in str(
            finding.reason
        )
        assert report.status is Status.DIVERGED
        assert any("grew" in each for each in report.whys)
        assert report.headline == "layers.3.mlp is wrong"

    def test_it_may_grow_in_a_later_call(self) -> None:
        later = row("layers.3.mlp", Verdict.CULPRIT, 2e-3, position=7)
        report = apply_accepted(a_report(culprit(), rows=(later,)), [ENTRY])
        assert report.findings[0].verdict is Verdict.CULPRIT
        assert "0.002" in str(report.findings[0].reason)
        assert report.status is Status.DIVERGED

    @pytest.mark.parametrize("error", [math.nan, math.inf])
    def test_errors_that_are_not_finite_are_never_within(self, error: float) -> None:
        report = apply_accepted(a_report(culprit(error=error)), [{**ENTRY, "relative_l2": 1e300}])
        assert report.status is Status.DIVERGED

    def test_what_was_not_measured_is_not_accepted(self) -> None:
        report = apply_accepted(a_report(culprit(error=None)), [ENTRY])
        assert "its error was not measured" in str(report.findings[0].reason)
        assert report.status is Status.DIVERGED

    def test_non_finite_values_have_no_size(self) -> None:
        finding = culprit(verdict=Verdict.NONFINITE_ORIGIN, error=1e-9)
        report = apply_accepted(a_report(finding), [ENTRY])
        assert report.status is Status.DIVERGED
        assert "not finite" in str(report.findings[0].reason)

    def test_the_next_culprit_comes_first(self) -> None:
        other = culprit("head", cause="scale: multiplied by 2", where="every element")
        report = apply_accepted(a_report(culprit(), other), [ENTRY])
        assert [each.name for each in report.findings] == ["head", "layers.3.mlp"]
        assert report.status is Status.DIVERGED
        assert report.headline == ("head is wrong: scale: multiplied by 2; 1 other accepted")

    def test_suspects_from_fingerprints(self) -> None:
        suspect = Finding("layers.3.mlp", Verdict.SUSPECT, propagated_error=5e-4)
        report = a_report(suspect, next_command="brickline check ...")
        accepted = apply_accepted(report, [ENTRY])
        assert accepted.status is Status.MATCHED
        assert accepted.next_command is None

    def test_by_the_name_of_its_brick(self) -> None:
        finding = culprit("blk.3.ffn", brick="Mlp")
        report = a_report(finding)
        table = VerdictTable(report.verdicts.columns)
        table.columns["brick"][0] = "Mlp"
        report = replace(report, verdicts=table)
        assert apply_accepted(report, [{**ENTRY, "brick": "Mlp"}]).status is Status.MATCHED

    def test_a_match_that_was_not_shown_is_not_reported(self) -> None:
        for more in (
            {"coverage": Coverage(1, 9)},
            {"unmatched": ("reference: tail",)},
            {"rows": (row("odd", Verdict.UNKNOWN),)},
        ):
            report = apply_accepted(a_report(culprit(), **more), [ENTRY])  # type: ignore[arg-type]
            assert report.status is Status.INCONCLUSIVE
            assert "was not shown to match" in report.headline

    def test_rows_without_a_finding_keep_it_diverged(self) -> None:
        report = a_report(culprit(), rows=(row("layers.9.attn", Verdict.CULPRIT, 1.0),))
        accepted = apply_accepted(report, [ENTRY])
        assert accepted.status is Status.DIVERGED
        assert accepted.headline == "layers.9.attn is wrong; 1 other accepted"

    @pytest.mark.parametrize("field", ["alternatives", "members"])
    def test_a_finding_about_several_needs_an_entry_for_each(self, field: str) -> None:
        report = a_report(culprit(**{field: ("layers.3.mlp", "head")}))
        refused = apply_accepted(report, [ENTRY])
        assert refused.status is Status.DIVERGED
        assert "it is about head as well" in str(refused.findings[0].reason)
        assert apply_accepted(report, [ENTRY, {**ENTRY, "brick": "head"}]).matched
        entries = parse_accepted(propose_accept(report))
        assert [entry.brick for entry in entries] == ["layers.3.mlp", "head"]
        assert apply_accepted(report, entries).matched

    def test_a_shared_fault_that_grows_in_one_place_fails(self) -> None:
        row_of_another = row("layers.5.mlp", Verdict.CULPRIT, 2e-3)
        report = a_report(culprit(members=("layers.3.mlp", "layers.5.mlp")), rows=(row_of_another,))
        refused = apply_accepted(report, [ENTRY])
        assert refused.status is Status.DIVERGED
        assert "grew beyond what is accepted: relative L2 0.002" in str(refused.findings[0].reason)

    def test_the_first_kernel_is_taken_back(self) -> None:
        trace = KernelTrace("mlp", 3, 0, "CPU")
        report = a_report(culprit(), first_divergent_kernel=trace, actual_trace=trace)
        assert apply_accepted(report, [ENTRY]).first_divergent_kernel is None

    def test_nothing_to_accept_changes_nothing(self) -> None:
        report = a_report(culprit())
        assert apply_accepted(report, None) is report
        matched = a_report()
        after = apply_accepted(matched, [ENTRY])
        assert (after.status, after.headline) == (Status.MATCHED, matched.headline)
        twice = apply_accepted(apply_accepted(report, [ENTRY]), [ENTRY])
        assert twice.status is Status.MATCHED


class TestUnused:
    def test_a_brick_that_is_mended(self) -> None:
        report = apply_accepted(a_report(), [{**ENTRY, "brick": "embed"}])
        (note,) = report.coverage.notes
        assert "'embed'" in note
        assert "do not differ any more; take the entry out" in note

    def test_a_name_that_nothing_has(self) -> None:
        (note,) = unused_entries(a_report(culprit()), [{**ENTRY, "brick": "layer.3.mlp"}])
        assert "no brick has such a name; did you mean 'layers.3.mlp'?" in note

    def test_used_ones_do_not_warn(self) -> None:
        report = a_report(culprit(), culprit("layers.4.mlp", 1.0))
        assert unused_entries(report, [ENTRY]) == ()
        assert unused_entries(apply_accepted(report, [ENTRY]), [ENTRY]) == ()


class TestProposing:
    def test_what_it_proposes_accepts_the_report(self) -> None:
        report = a_report(
            culprit("layers.0.mlp", 4.2e-4, cause='GELU "tanh"\n\\', where="every element"),
            culprit("layers.1.mlp", 9.1e-4),
            culprit("layers.1.attn", 1e-2),
            rows=(row("layers.0.attn", Verdict.ROUNDING),),
        )
        text = propose_accept(report)
        entries = parse_accepted(text)
        assert [each.brick for each in entries] == ["layers.*.mlp", "layers.1.attn"]
        assert [each.relative_l2 for each in entries] == [2e-3, 2e-2]
        assert "GELU" in entries[0].reason
        assert apply_accepted(report, entries).status is Status.MATCHED

    def test_what_cannot_be_accepted_is_a_comment(self) -> None:
        report = a_report(
            culprit("a", verdict=Verdict.NONFINITE_ORIGIN),
            culprit("b", None),
            culprit("c", math.nan),
        )
        text = propose_accept(report)
        assert parse_accepted(text) == ()
        assert "# a cannot be accepted: its values are not finite." in text
        assert "# b cannot be accepted: its error was not measured." in text
        assert "# c cannot be accepted" in text

    def test_what_is_accepted_already_is_kept(self) -> None:
        report = apply_accepted(a_report(culprit()), [ENTRY])
        (entry,) = parse_accepted(propose_accept(report))
        assert (entry.reason, entry.relative_l2) == ("tanh-GELU", 1e-3)

    def test_nothing_differs(self) -> None:
        assert tomllib.loads(propose_accept(a_report())) == {}

    @given(st.text(min_size=1), st.floats(1e-12, 1e6))
    def test_any_name_and_size(self, name: str, error: float) -> None:
        text = propose_accept(a_report(culprit(name, error, cause=name)))
        for entry in parse_accepted(text):
            assert entry.relative_l2 > error

    def test_writing(self, tmp_path: Path) -> None:
        path = write_accept(a_report(culprit()), tmp_path / "accept.toml")
        assert load_accepted(path)[0].brick == "layers.3.mlp"
        with pytest.raises(AcceptError, match="is there already"):
            write_accept(a_report(culprit()), path)
        write_accept(a_report(culprit("head")), path, overwrite=True)
        assert load_accepted(path)[0].brick == "head"
        with pytest.raises(AcceptError, match="cannot write"):
            write_accept(a_report(), tmp_path / "none" / "accept.toml")
