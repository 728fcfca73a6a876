"""A deterministic part of benchmarks/localisation: check names the guilty module and no other.

The benchmark itself is tested too: what it expects must be true before a tool is held against it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from localisation import faults_two, models, ports  # noqa: E402
from localisation.cases import GROUPS, Case, cases  # noqa: E402
from localisation.drives import decode, padded, picture, text  # noqa: E402
from localisation.observable import FACTOR, ratios, widened  # noqa: E402
from localisation.planting import FAULTS, fault  # noqa: E402
from localisation.rules import first_by_rules, first_by_script  # noqa: E402
from localisation.score import Answer, by_check, counts, outcome, score  # noqa: E402

CASES = {each.name: each for each in cases()}

NAMED = (
    "llama.one_row_scaled/same",
    "llama.eps_a_hundred_times/same",
    "llama.sees_the_next_token/reordered",
    "llama.residual_scaled/same",
    "llama.first_row_all_masked/same",
    "gpt2.positions_from_one/same",
    "gpt2.padding_ignored/bf16",
    "gpt2.dropout_left_on/same",
    "convnet.wrong_number_of_groups/same",
    "convnet.stride_starts_one_late/bf16",
    "vit.layer_scale_ignored/outliers",
    "quantised.nibbles_in_the_wrong_order/same",
    "moe.shares_not_made_to_one/same",
    "FusedLlama.sees_the_next/same",
    "FusedLlama.rows_of_the_values_swapped/bf16",
    "InlineLlama.inline_glu_forgets_the_gate/same",
    "SplitGPT.split_scale/same",
    "buffered.slot_one_early_from_step_three/same",
    "growing.mask_one_short_when_alone/same",
    "two.small first/same",
    "llama.silu_forgets_a_term/same",
)
CLEARED = (
    "harmless.llama text/bf16",
    "harmless.gpt2 text/outliers",
    "harmless.llama as FusedLlama text/same",
    "harmless.convnet.channels_last/same",
    "harmless.buffered decode/reordered",
    "harmless.llama.residual_in_place/same",
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def case(request):
    chosen = CASES[request.param]
    yield chosen
    chosen.forget()


# --- The tool -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", NAMED, indirect=True)
def test_check_names_the_fault(case: Case):
    answer = by_check(case)
    assert outcome(case, answer) == "named", (case.expected, case.position, answer)
    planted = {case.named(each) for each in (case.expected, *case.also)}
    assert set(answer.names) <= planted


@pytest.mark.parametrize("case", CLEARED, indirect=True)
def test_check_clears_what_is_harmless(case: Case):
    assert by_check(case).names == ()


# --- The benchmark --------------------------------------------------------------------------------


def test_there_is_enough_of_everything():
    assert len(FAULTS) >= 60
    assert len({each.build for each in FAULTS}) >= 3
    assert sum(each.harmless for each in CASES.values()) >= 20
    assert sum(each.group == "held out" for each in CASES.values()) >= 15
    assert {each.group for each in CASES.values()} == set(GROUPS)
    assert {"same", "reordered", "bf16", "outliers"} == {each.regime for each in CASES.values()}


@pytest.mark.parametrize(
    ("build", "port", "run"),
    [
        (models.llama, ports.FusedLlama, text),
        (models.llama, ports.InlineLlama, text),
        (models.llama, ports.FlatLlama, text),
        (models.llama, ports.OneLlama, text),
        (models.llama, ports.NestedLlama, text),
        (lambda: models.llama("buffers"), ports.FusedLlama, decode),
        (lambda: models.llama("growing"), ports.NestedLlama, decode),
        (models.gpt2, ports.SplitGPT, padded),
        (models.gpt2, ports.ConvGPT, text),
        (models.moe, ports.stacked_moe, text),
        (models.convnet, ports.LastNet, picture),
        (models.vit, ports.PatchViT, picture),
    ],
)
def test_a_port_computes_what_its_reference_computes(build, port, run):
    model = build()
    other = port(model).double().eval()
    with torch.no_grad(), widened():
        expected, actual = run(torch.float64)(model.double()), run(torch.float64)(other)
    for a, b in zip([*actual], [*expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_fault_acts_from_its_position_on():
    for name in (
        "buffered.an_old_slot_overwritten_at_step_three/same",
        "handed.keys_scaled_as_they_are_kept/same",
        "NestedLlama.nested_keeps_keys_twice/same",
        "recurrent.state_stops_at_step_three/same",
    ):
        found = [each > FACTOR for each in ratios(CASES[name])]
        assert found.index(True) == CASES[name].position
        CASES[name].forget()


def test_repairing_the_fault_that_matters_leaves_less():
    for name, left, other in faults_two.matters():
        assert 5 * left < other, name


def test_what_rounding_hides_is_not_counted():
    hidden = CASES["llama.softmax_in_bf16/bf16"]
    (row,) = score([hidden], ["fp64 script"])
    assert not row.observable
    assert sum(counts([row])[hidden.group, "fp64 script"].values()) == 0


def test_the_script_names_a_fault_and_the_rules_run():
    case = CASES["llama.gelu_for_silu/same"]
    assert first_by_script(case) == case.expected
    assert first_by_rules(case)["bitwise"] == case.expected
    case.forget()


def test_an_answer_is_worth_what_it_names():
    case = CASES["llama.gelu_for_silu/same"]
    assert outcome(case, Answer((case.expected,))) == "named"
    assert outcome(case, Answer(("layers.0",))) == "wrong"
    assert outcome(case, Answer()) == "missed"
    assert outcome(case, Answer(inconclusive=True)) == "inconclusive"
    assert outcome(case, Answer(error="x")) == "raised"
    late = CASES["buffered.slot_one_early_from_step_three/same"]
    assert outcome(late, Answer((late.expected,), position=4)) == "wrong"
    clean = CASES["harmless.llama text/same"]
    assert outcome(clean, Answer(("lm_head",))) == "wrong"
    assert outcome(clean, Answer()) == "named"
    case.forget()
    late.forget()
    clean.forget()


def test_a_fault_is_declared_under_its_models_name():
    known = len(FAULTS)
    try:

        @fault(models.gpt2, "ln_f", "eps")
        def something(module, root):
            module.eps = 1.0

        assert FAULTS[-1].name == "gpt2.something"
        trio = FAULTS[-1].case("same").trio
        assert trio.candidate.ln_f.eps == 1.0
        assert trio.clean.ln_f.eps == trio.reference.ln_f.eps == 1e-5
    finally:
        del FAULTS[known:]
