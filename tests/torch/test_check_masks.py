"""`bl.check` of models of transformers whose caller makes masks for the candidate's attention."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import brickline as bl  # noqa: E402
from brickline.checking.masks import (  # noqa: E402
    IDLE,
    NOTE,
    as_added,
    idle_queries,
    is_for_another,
    without_idle,
)


def llama(attention: str, wrong: float = 1.0) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] *= wrong
    return model


def generate(model: Any) -> Any:
    ids = torch.arange(1, 7).reshape(1, 6)
    return model.generate(
        ids,
        max_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        disable_compile=True,
    )


@pytest.mark.parametrize("sides", [("sdpa", "eager"), ("eager", "sdpa"), ("sdpa", "sdpa")])
def test_a_static_cache_with_another_attention(sides: tuple[str, str]) -> None:
    candidate, reference = sides
    report = bl.check(llama(candidate), drive=generate, reference=llama(reference), repro=False)
    assert report.status == "matched", report
    assert (NOTE in report.circumstances) == (sides == ("sdpa", "eager"))


def test_a_fault_behind_such_a_mask_is_named() -> None:
    reference = llama("eager")
    report = bl.check(llama("sdpa", wrong=1.5), drive=generate, reference=reference, repro=False)
    assert [each.name for each in report.culprits] == ["model.layers.1.self_attn.v_proj"]


def test_masks_are_made_for_attention_that_adds_them() -> None:
    mask = torch.tensor([[[[True, False], [True, True]]]])
    lowest = torch.finfo(torch.float16).min
    expected = torch.tensor([[[[0, lowest], [0, 0]]]], dtype=torch.float16)
    made = as_added({"attention_mask": mask, "x": 1}, torch.float16)
    assert made is not None
    assert torch.equal(made["attention_mask"], expected)
    assert made["x"] == 1
    made = as_added({"attention_mask": {"full_attention": mask, "none": None}}, torch.float16)
    assert made is not None
    assert torch.equal(made["attention_mask"]["full_attention"], expected)
    assert as_added({"attention_mask": torch.ones(2, 2, dtype=torch.bool)}, torch.float16) is None
    assert as_added({"mask": mask}, torch.float16) is None
    assert is_for_another(llama("sdpa"), llama("eager"))
    assert not is_for_another(llama("eager"), llama("eager"))
    assert not is_for_another(torch.nn.Linear(1, 1), llama("eager"))


PADDED = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])


def batch(model: Any) -> Any:
    with torch.no_grad():
        return model(PADDED, attention_mask=(PADDED != 0).long())


def test_padding_on_the_left_has_no_answer() -> None:
    report = bl.check(llama("sdpa"), drive=batch, reference=llama("eager"), repro=False)
    assert report.status == "matched", report
    assert IDLE in report.circumstances
    wrong = llama("sdpa", wrong=1.5)
    report = bl.check(wrong, drive=batch, reference=llama("eager"), repro=False)
    assert [each.name for each in report.culprits] == ["model.layers.1.self_attn.v_proj"]


def test_which_queries_look_at_nothing() -> None:
    mask = (PADDED != 0).long()
    idle = torch.tensor([[True, True, False, False, False], [False] * 5])
    for given in (mask, mask.bool()):
        found = idle_queries((PADDED,), {"attention_mask": given})
        assert found is not None
        assert torch.equal(found, idle)
    # A decode step: the last query sees the whole row.
    assert idle_queries((PADDED[:, -1:],), {"attention_mask": mask}) is None
    assert idle_queries((PADDED,), {"attention_mask": mask.flip(-1)}) is None, "on the right"
    whole = (mask[:, None, None] * torch.ones(5, 5).tril()).bool()
    added = as_added({"attention_mask": whole}, torch.float32)
    assert added is not None
    for each in (whole, added["attention_mask"], {"full": whole, "sliding": whole}):
        found = idle_queries((), {"attention_mask": each})
        assert found is not None
        assert torch.equal(found, idle)
    assert idle_queries((PADDED,), {"attention_mask": None}) is None


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 4, 5, 3), (10, 3)])
def test_their_answers_are_made_right(shape: tuple[int, ...]) -> None:
    idle = torch.tensor([[True, True, False, False, False], [False] * 5])
    ours, right = torch.ones(shape), torch.zeros(shape)
    made = without_idle(idle, ours, right)
    assert made is not None
    assert int((made == 0).sum()) == 2 * ours.numel() // 10
    assert bool((made.reshape(-1, 3)[-1] == 1).all())
    assert without_idle(idle, torch.ones(3, 3), torch.zeros(3, 3)) is None
