"""Rounding bounds: clean operations stay within them, small faults do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from brickline.oracle import contractions, holding, parts  # noqa: E402
from brickline.oracle.bounds import Kind, op_bound  # noqa: E402
from brickline.oracle.calls import Call, NoExactForm, outputs_of  # noqa: E402
from brickline.oracle.holding import hold  # noqa: E402
from brickline.verdict import Verdict  # noqa: E402

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16]
CLEAN = (Verdict.IDENTICAL, Verdict.ROUNDING, Verdict.WATCH, Verdict.TIE)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def held(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Execute an operation and hold what it made."""
    before = torch.utils._pytree.tree_map(
        lambda each: each.clone() if isinstance(each, torch.Tensor) else each, (args, kwargs)
    )
    result = func(*args, **kwargs)
    return hold(Call(func, *before), outputs_of(func, args, kwargs, result))


def held_as(made: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Hold something as if an operation had made it."""
    return hold(Call(func, args, kwargs), [made])


Maker = Callable[[Any], tuple[Any, ...]]
CALLS: dict[str, Maker] = {
    "mm": lambda r: (aten.mm.default, r(40, 1000), r(1000, 30)),
    "addmm": lambda r: (aten.addmm.default, r(30), r(40, 500), r(500, 30)),
    "bmm": lambda r: (aten.bmm.default, r(3, 20, 64), r(3, 64, 20)),
    "baddbmm": lambda r: (aten.baddbmm.default, r(3, 20, 20), r(3, 20, 64), r(3, 64, 20)),
    "convolution": lambda r: (
        *(aten.convolution.default, r(2, 8, 9, 9), r(4, 8, 3, 3), r(4)),
        *([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    "convolution_backward": lambda r: (
        *(aten.convolution_backward.default, r(2, 4, 9, 9), r(2, 8, 9, 9), r(4, 8, 3, 3), [4]),
        *([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]),
    ),
    "attention": lambda r: (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        *(r(2, 3, 33, 32) for _ in range(3)),
        0.0,
        True,
    ),
    "softmax": lambda r: (aten._softmax.default, r(20, 333), -1, False),
    "log_softmax": lambda r: (aten._log_softmax.default, r(20, 333), -1, False),
    "layer_norm": lambda r: (aten.native_layer_norm.default, r(20, 96), [96], r(96), r(96), 1e-5),
    "group_norm": lambda r: (
        *(aten.native_group_norm.default, r(2, 8, 5, 5), r(8), r(8)),
        *(2, 8, 25, 2, 1e-5),
    ),
    "gelu": lambda r: (aten.gelu.default, r(1000) * 4),
    "silu": lambda r: (aten.silu.default, r(1000) * 40),
    "gelu_backward": lambda r: (aten.gelu_backward.default, r(1000), r(1000)),
    "tanh_backward": lambda r: (aten.tanh_backward.default, r(1000), r(1000).tanh()),
    "sum": lambda r: (aten.sum.dim_IntList, r(20, 5000), [-1]),
    "mean": lambda r: (aten.mean.dim, r(20, 5000), [-1]),
    "var": lambda r: (aten.var.correction, r(20, 500) + 5, [-1]),
    "cumsum": lambda r: (aten.cumsum.default, r(20, 500), -1),
    "pow": lambda r: (aten.pow.Tensor_Scalar, r(500).abs() + 0.1, 1.7),
    "embedding_backward": lambda r: (
        *(aten.embedding_dense_backward.default, r(60, 16), torch.arange(60) % 7),
        *(7, -1, False),
    ),
    "nll_loss": lambda r: (
        *(aten.nll_loss_forward.default, torch.log_softmax(r(30, 9), -1), torch.arange(30) % 9),
        *(None, 1, -100),
    ),
    "in_place": lambda r: (aten.add_.Tensor, r(100), r(100)),
    "complex": lambda r: (
        aten.mul.Tensor,
        torch.view_as_complex(r(50, 2).float()),
        torch.view_as_complex(r(50, 2).float()),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_clean_operations_are_clean(name: str, dtype: Any) -> None:
    func, *args = CALLS[name](lambda *shape: torch.randn(shape).to(dtype))
    found = held(func, *args)
    assert found.verdict in CLEAN, (found.verdict, found.z, found.reason)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("dropped tail", lambda a, b: a[:, :-1] @ b[:-1]),
        ("scale", lambda a, b: (a @ b) * 1.01),
        ("swapped rows", lambda a, b: (a @ b).roll(1, 0)),
        ("another dtype's sum", lambda a, b: (a * 1.0).bfloat16().cumsum(1)[:, -1:] + 0 * (a @ b)),
    ],
)
def test_small_faults_are_seen(fault: str, change: Any, dtype: Any) -> None:
    left, right = torch.randn(64, 1024).to(dtype), torch.randn(1024, 96).to(dtype)
    found = held_as(change(left, right).to(dtype), aten.mm.default, left, right)
    assert found.verdict is Verdict.CULPRIT, (fault, found.z)


def test_tf32_is_seen_where_it_is_not_allowed() -> None:
    left, right = torch.randn(64, 4096), torch.randn(4096, 96)
    narrow = [(each.view(torch.int32) & ~0x1FFF).view(torch.float32) for each in (left, right)]
    found = held_as(narrow[0] @ narrow[1], aten.mm.default, left, right)
    assert found.verdict is Verdict.CULPRIT


def test_what_torch_allows_is_allowed_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.randn(64, 256), torch.randn(256, 96)
    monkeypatch.setattr(contractions, "setting", lambda backend, kind: "tf32")
    narrow = [(each.view(torch.int32) & ~0x1FFF).view(torch.float32) for each in (left, right)]
    found = held_as(narrow[0] @ narrow[1], aten.mm.default, left, right)
    assert found.verdict in CLEAN
    assert "TF32" in found.allowed


def test_one_wrong_element_is_found_and_placed() -> None:
    left, right = torch.randn(64, 256), torch.randn(256, 96)
    made = left @ right
    made[3, 5] += 0.01
    found = held_as(made, aten.mm.default, left, right)
    assert found.verdict is Verdict.CULPRIT
    assert found.ratios.worst == 3 * 96 + 5


# --- Exact operations -----------------------------------------------------------------------------


def test_operations_that_compute_nothing_must_be_equal() -> None:
    value = torch.randn(10, 4)
    assert held(aten.cat.default, [value, value]).verdict is Verdict.IDENTICAL
    wrong = value.clone()
    wrong[0, 0] = math.nextafter(float(wrong[0, 0]), math.inf)
    wrong[1, 1] += 1e-6
    found = held_as(wrong, aten.clone.default, value)
    assert (found.verdict, found.z) == (Verdict.CULPRIT, math.inf)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_rounds_once_to_nearest(to: Any) -> None:
    value = torch.randn(1000)
    assert held(aten._to_copy.default, value, dtype=to).verdict is Verdict.IDENTICAL
    if to is torch.bfloat16:
        cut = (value.view(torch.int32) & ~0xFFFF).view(torch.float32).to(to)
        call = Call(aten._to_copy.default, (value,), {"dtype": to})
        assert hold(call, [cut]).verdict is Verdict.CULPRIT


def test_a_nan_is_equal_to_a_nan() -> None:
    value = torch.tensor([1.0, math.nan, math.inf])
    assert held(aten.clone.default, value).verdict is Verdict.IDENTICAL


def test_a_choice_between_equal_values_is_a_tie() -> None:
    value = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    call = Call(aten.argmax.default, (value, -1), {})
    assert hold(call, [torch.tensor([2, 0])]).verdict is Verdict.TIE
    assert hold(call, [torch.tensor([0, 0])]).verdict is Verdict.CULPRIT
    assert hold(call, [torch.tensor([7, 0])]).verdict is Verdict.CULPRIT


def test_topk_and_sort_may_exchange_equal_values() -> None:
    value = torch.tensor([3.0, 3.0, 1.0, 1.0])
    call = Call(aten.sort.default, (value,), {})
    made = [torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([3, 2, 1, 0])]
    assert hold(call, made).verdict is Verdict.TIE
    made[1] = torch.tensor([0, 1, 2, 3])
    assert hold(call, made).verdict is Verdict.CULPRIT


def test_a_comparison_with_a_constant_may_differ_where_the_dtype_cannot_hold_it() -> None:
    value = torch.full((3,), 0.1, dtype=torch.bfloat16)
    found = held(aten.gt.Scalar, value, 0.1)
    assert found.verdict in (Verdict.IDENTICAL, Verdict.TIE)


def test_random_operations_are_held_to_nothing() -> None:
    bound = op_bound(aten.rand_like.default, (torch.zeros(3),), {}, [torch.zeros(3)])
    assert bound.kind is Kind.RANDOM
    assert hold(Call(aten.rand_like.default, (torch.zeros(3),), {}), [torch.rand(3)]).reason
    dropout = aten._scaled_dot_product_flash_attention_for_cpu.default
    call = Call(dropout, (torch.zeros(1, 1, 2, 8),) * 3 + (0.5,), {})
    assert hold(call, [torch.zeros(1, 1, 2, 8), None]).verdict is Verdict.NONDETERMINISTIC


# --- What is not known ----------------------------------------------------------------------------


def test_an_operation_without_a_rule_is_probed() -> None:
    value = torch.randn(20, 20)
    assert op_bound(aten.linalg_det.default, (value,), {}, [torch.zeros(())]) is None
    found = held(aten._linalg_det.default, value)
    assert found.verdict in (*CLEAN, Verdict.UNKNOWN)
    # It cancels inside, which a probe cannot know: never a culprit for that.
    found = held(aten._euclidean_dist.default, value, value)
    assert found.verdict is Verdict.UNKNOWN
    assert "only probed" in found.reason


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (lambda: torch.zeros(3, device="meta"), "meta"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
    ],
)
def test_tensors_without_plain_values_are_unknown(value: Any, word: str) -> None:
    tensor = value()
    found = hold(Call(aten.mul.Tensor, (tensor, 2.0), {}), [tensor * 2.0])
    assert found.verdict is Verdict.UNKNOWN
    assert word in found.reason


def test_empty_tensors_are_no_trouble() -> None:
    found = held(aten.mm.default, torch.zeros(0, 4), torch.zeros(4, 3))
    assert found.verdict in CLEAN
    assert held(aten._softmax.default, torch.zeros(0, 4), -1, False).verdict in CLEAN


def test_short_memory_goes_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Call.exact
    sizes: list[int] = []

    def limited(self: Any) -> Any:
        sizes.append(self.args[0].shape[0])
        if self.args[0].shape[0] > 16:
            raise torch.OutOfMemoryError("out of memory")
        return exact(self)

    monkeypatch.setattr(Call, "exact", limited)
    monkeypatch.setattr(parts, "CHUNK_BYTES", 16 * 100 * 8)
    left, right = torch.randn(40, 100), torch.randn(100, 30)
    assert held(aten.mm.default, left, right).verdict in CLEAN
    assert sizes == [40, 16, 16, 8]
    made = left @ right
    made[39, 0] += 1
    assert held_as(made, aten.mm.default, left, right).verdict is Verdict.CULPRIT


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (torch.randn(4, 100), torch.randn(100, 300))),
        (aten.addmm.default, (torch.randn(300), torch.randn(4, 100), torch.randn(100, 300))),
        (aten.add.Tensor, (torch.randn(50, 20), torch.randn(50, 20))),
        (aten.native_layer_norm.default, (torch.randn(50, 20), [20], torch.randn(20), None, 1e-5)),
        (aten._softmax.default, (torch.randn(50, 20), -1, False)),
        (aten.embedding.default, (torch.randn(9, 4), torch.arange(8))),
    ],
    ids=lambda each: str(each) if not isinstance(each, tuple) else "",
)
def test_a_large_call_is_held_in_parts(
    func: Any, args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LARGE_BYTES", 1)
    monkeypatch.setattr(parts, "CHUNK_BYTES", 2000)
    seen: list[int] = []
    whole = holding._hold_whole

    def counted(*each: Any) -> Any:
        seen.append(1)
        return whole(*each)

    monkeypatch.setattr(holding, "_hold_whole", counted)
    assert held(func, *args).verdict in CLEAN
    assert len(seen) > 1
    made = func(*args)
    first = made[0] if isinstance(made, tuple) else made
    first[-1, -1] += 1
    rest = list(made[1:]) if isinstance(made, tuple) else []
    assert hold(Call(func, args, {}), [first, *rest]).verdict is Verdict.CULPRIT


def test_memory_that_never_suffices_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Call, "exact", none)
    found = held(aten.mm.default, torch.randn(4, 4), torch.randn(4, 4))
    assert (found.verdict, found.reason) == (Verdict.UNKNOWN, "out of memory in float64")


def test_an_operation_that_refuses_float64_says_so() -> None:
    def refuse(self: Any) -> Any:
        raise NoExactForm("only float16")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "exact", refuse)
        found = held(aten.mm.default, torch.randn(4, 4), torch.randn(4, 4))
    assert found.verdict is Verdict.UNKNOWN
    assert "only float16" in found.reason


# --- Values that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "kind"),
    [
        (aten.log.default, (torch.tensor([0.0, 1.0]),), {}, "logarithm of zero"),
        (aten.log.default, (torch.tensor([-1.0, 1.0]),), {}, "negative number"),
        (aten.div.Tensor, (torch.ones(2), torch.zeros(2)), {}, "division by zero"),
        (aten.div.Tensor, (torch.zeros(2), torch.zeros(2)), {}, "0 / 0"),
        (
            aten._to_copy.default,
            (torch.full((2,), 1e6),),
            {"dtype": torch.float16},
            "overflow of a cast to float16",
        ),
        (aten._softmax.default, (torch.full((1, 3), -math.inf), -1, False), {}, "all masked"),
        (aten.mul.Tensor, (torch.zeros(2), torch.full((2,), math.inf)), {}, "0 * inf"),
        (
            aten.sub.Tensor,
            (torch.full((2,), math.inf), torch.full((2,), math.inf)),
            {},
            "inf - inf",
        ),
    ],
)
def test_the_origin_of_what_is_not_finite_is_classed(
    func: Any, args: Any, kwargs: Any, kind: str
) -> None:
    found = held(func, *args, **kwargs)
    assert found.verdict is Verdict.NONFINITE_ORIGIN
    assert kind in found.reason


def test_an_infinity_that_came_in_is_no_origin() -> None:
    found = held(aten.mul.Tensor, torch.tensor([math.inf, 1.0]), 2.0)
    assert found.verdict is Verdict.IDENTICAL
    mask = torch.tensor([True, False])
    found = held(aten.masked_fill.Scalar, torch.ones(2), mask, -math.inf)
    assert found.verdict is Verdict.IDENTICAL


def test_positions_of_a_pool_may_be_those_of_equal_values() -> None:
    value = torch.ones(1, 1, 4, 4)
    call = Call(aten.max_pool2d_with_indices.default, (value, [2, 2]), {})
    made = [torch.ones(1, 1, 2, 2), torch.tensor([[[[5, 7], [13, 15]]]])]
    assert hold(call, made).verdict is Verdict.TIE
    value[0, 0, 0, 0] = 2
    made[0][0, 0, 0, 0] = 2
    assert hold(call, made).verdict is Verdict.CULPRIT


@pytest.mark.parametrize(
    "call",
    [
        Call(aten.max.dim, (torch.ones(3, 4), -1), {}),
        Call(aten.arange.start_step, (0.0, 10.0, 0.1), {}),
        Call(aten.eye.default, (4,), {}),
        Call(aten.dropout.default, (torch.randn(4), 0.5, False), {}),
        Call(aten.layer_norm.default, (torch.randn(4, 8), [8]), {}),
        Call(aten.scaled_dot_product_attention.default, (torch.randn(2, 3, 5, 8),) * 3, {}),
        Call(aten.scaled_dot_product_attention.default, (torch.randn(3, 5, 8),) * 3, {}),
        Call(aten.scatter.src, (torch.zeros(5), 0, torch.tensor([0, 2]), torch.ones(2)), {}),
    ],
)
def test_calls_with_positions_and_steps_are_clean(call: Any) -> None:
    made = call.func(*call.args)
    assert hold(call, outputs_of(call.func, call.args, {}, made)).verdict in CLEAN
