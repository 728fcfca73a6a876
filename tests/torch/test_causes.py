"""A planted fault is named for what it is, and nothing is named where nothing is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="torch is not installed: pip install 'brickline[torch]'"
)

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from brickline.checking.causes import Explanation, explain  # noqa: E402
from brickline.checking.evidence import Evidence  # noqa: E402

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(24, 64), (2, 12, 64), (3, 4, 8, 32)]

Tensor = Any


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(7)


def random(*shape: int, dtype: Any = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def told(actual: Tensor, exact: Tensor, dtype: Any = torch.float32, **more: Any) -> Explanation:
    """What is said of an output; the reference's own is the exact one, rounded."""
    evidence = Evidence("op", actual.to(dtype), exact, clean=exact.to(dtype), **more)
    return explain(evidence)


def signature(found: Explanation) -> str | None:
    return found.facts.get("signature")


class TestValuesAlone:
    """Faults that need nothing but the two outputs."""

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_scale(self, shape: tuple[int, ...], dtype: Any) -> None:
        exact = random(*shape).double()
        found = told(1.5 * exact, exact, dtype)
        assert signature(found) == "scale"
        assert "multiplied by 1.5" in str(found.cause)
        assert str(found.where).startswith("every element")

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_sign(self, dtype: Any) -> None:
        exact = random(16, 32).double()
        assert signature(told(-exact, exact, dtype)) == "sign"

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_scale_of_columns_and_rows(self, shape: tuple[int, ...], dtype: Any) -> None:
        exact = random(*shape).double()
        actual = exact.clone()
        actual[..., 5] *= 1.25
        found = told(actual, exact, dtype)
        assert signature(found) == "scale"
        assert f"column 5 of {shape[-1]}" in str(found.cause)
        assert f"column 5 of {shape[-1]}" in str(found.where)

    def test_scale_of_one_row(self) -> None:
        exact = random(128, 64).double()
        actual = exact.clone()
        actual[96:] *= 1.01
        found = told(actual, exact)
        assert signature(found) == "scale"
        assert "rows 96..127 of 128 (last 25 %)" in str(found.where)

    def test_the_scale_of_another_variance_is_recognised(self) -> None:
        exact = random(32, 64).double()
        found = told(exact * math.sqrt(63 / 64), exact)
        assert "variance over n-1" in str(found.cause)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_offset_of_columns(self, shape: tuple[int, ...], dtype: Any) -> None:
        exact, bias = random(*shape).double(), random(shape[-1]).double()
        found = told(exact - bias, exact, dtype)
        assert signature(found) == "offset"

    def test_missing_bias_is_named(self) -> None:
        layer = nn.Linear(32, 48)
        x = random(16, 32)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double()).detach()
        found = told(exact - layer.bias.double().detach(), exact, module=layer, inputs=[x])
        assert found.cause == "missing bias: bias is not added"

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_tail_never_written(self, shape: tuple[int, ...], dtype: Any) -> None:
        exact = random(*shape).double()
        actual = exact.clone()
        actual.reshape(-1, shape[-1])[-3:] = 0
        found = told(actual, exact, dtype)
        assert signature(found) == "dropped tail"
        assert "never written" in str(found.cause)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_last_columns_never_written(self, shape: tuple[int, ...], dtype: Any) -> None:
        exact = random(*shape).double()
        actual = exact.clone()
        actual[..., -3:] = 0
        found = told(actual, exact, dtype)
        assert signature(found) == "dropped tail"
        assert f"columns {shape[-1] - 3}..{shape[-1] - 1}" in str(found.cause)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize(
        ("order", "words"),
        [
            (lambda x: x.roll(1, 0), "permuted"),
            (lambda x: x.flip(0), "reversed"),
            (lambda x: x[[0, 1, 7, 3, 4, 5, 6, 2, *range(8, 24)]], "2 and 7 swapped"),
            (lambda x: torch.cat([x[:20], x[19:20].expand(4, -1)]), "repeat row 19"),
            (lambda x: torch.cat([x[:9], x[8:9], x[10:]]), "holds row 8"),
        ],
    )
    def test_rows(self, order: Callable[[Tensor], Tensor], words: str, dtype: Any) -> None:
        exact = random(24, 64).double()
        found = told(order(exact), exact, dtype)
        assert words in str(found.cause)
        assert signature(found) in ("permuted", "stale rows")

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("rows", [1, 12])
    def test_heads_swapped(self, rows: int, dtype: Any) -> None:
        exact = random(1, rows, 128).double()
        heads = exact.reshape(1, rows, 4, 32)
        found = told(heads[:, :, [1, 0, 2, 3]].reshape(exact.shape), exact, dtype)
        assert "head) 0 and 1 swapped" in str(found.cause)

    def test_slices_of_a_dimension(self) -> None:
        exact = random(2, 8, 16, 32).double()
        found = told(exact[:, [1, 0, 2, 3, 4, 5, 6, 7]], exact)
        assert "dim 1 0 and 1 swapped" in str(found.cause)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_transposed(self, dtype: Any) -> None:
        exact = random(32, 32).double()
        assert signature(told(exact.T, exact, dtype)) == "transposed"
        joined = random(2, 8, 64).double()
        heads = joined.reshape(2, 8, 4, 16).transpose(1, 2).reshape(2, 8, 64)
        found = told(heads, joined, dtype)
        assert "4 heads not exchanged" in str(found.cause)

    def test_transposed_with_another_shape(self) -> None:
        exact = random(8, 12).double()
        found = told(exact.T, exact)
        assert signature(found) == "transposed"
        assert "dims 0 and 1" in str(found.cause)
        assert signature(told(random(3, 4).double(), exact)) == "shape"

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_dropout(self, dtype: Any) -> None:
        exact = random(64, 64).double()
        found = told(F.dropout(exact, 0.1), exact, dtype)
        assert signature(found) == "dropout"
        assert "dropout left on" in str(found.cause)

    def test_flush_to_zero(self) -> None:
        exact = random(16, 64).double()
        exact[:, ::4] *= 1e-39
        actual = torch.where(exact.abs() < 2.0**-126, 0.0, exact)
        assert signature(told(actual, exact)) == "flush to zero"

    @pytest.mark.parametrize(("limit", "whose"), [(448.0, "float8_e4m3"), (1.5, "")])
    def test_saturation(self, limit: float, whose: str) -> None:
        exact = random(64, 64).double() * limit
        found = told(exact.clamp(-limit, limit), exact)
        assert signature(found) == "saturation"
        assert whose in str(found.cause)

    def test_overflow(self) -> None:
        exact = random(16, 16).double()
        exact[3, 4], exact[5, 6] = 70000.0, 80000.0
        found = told(exact.half(), exact, torch.float16)
        assert signature(found) == "overflow"
        assert "float16" in str(found.cause)
        assert "rows 3, 5" in str(found.where)
        found = told(exact.half().float(), exact)
        assert "overflow of float16" in str(found.cause)

    def test_not_a_number(self) -> None:
        exact, x = random(16, 16).double(), random(16, 16)
        found = told(torch.where(x < 0, torch.nan, exact), exact, inputs=[x])
        assert signature(found) == "nan"
        assert "exactly where input 0 is negative" in str(found.cause)
        actual = exact.clone()
        actual[0] = torch.nan
        found = told(actual, exact, op="aten._softmax.default")
        assert "every position is masked" in str(found.cause)
        assert "row 0 of 16" in str(found.where)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_stored_in_a_short_dtype(self, dtype: Any) -> None:
        exact = random(32, 64).double()
        name = str(dtype).removeprefix("torch.")
        found = told(exact.to(dtype).float(), exact)
        assert found.cause == f"low-precision storage: the answer, rounded to {name}"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_group_scale(self, dtype: Any) -> None:
        exact = random(16, 128).double()
        actual = exact.clone()
        actual[3, 32:64] *= 1.5
        actual[9, 64:96] *= 0.5
        actual[2, 96:] *= 0.7
        assert signature(told(actual, exact, dtype)) == "quantisation scale"


class TestWithInputs:
    """Faults that inputs and weights explain."""

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_residual_dropped(self, dtype: Any) -> None:
        x = random(2, 8, 32, dtype=dtype)
        exact = random(2, 8, 32).double() + x.double()
        found = told(exact - x.double(), exact, dtype, inputs=[x])
        assert found.cause == "residual: input 0 is not added"

    def test_rows_that_were_not_computed(self) -> None:
        x = random(32, 64)
        exact = random(32, 64).double()
        actual = exact.clone()
        actual[28:] = x[28:].double()
        found = told(actual, exact, inputs=[x])
        assert signature(found) == "stale rows"
        assert "rows 28..31" in str(found.cause)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize(
        ("right", "wrong"),
        [("silu", "gelu"), ("gelu", "gelu (tanh)"), ("gelu", "relu"), ("silu", "quick gelu")],
    )
    def test_activation(self, right: str, wrong: str, dtype: Any) -> None:
        from brickline.checking.cause_pointwise import ACTIVATIONS

        x = (3 * random(32, 64)).to(dtype)
        exact, actual = ACTIVATIONS[right](x.double()), ACTIVATIONS[wrong](x.double())
        found = told(actual, exact, dtype, inputs=[x])
        if dtype is torch.float32 or wrong != "gelu (tanh)":
            assert found.cause == f"activation: {wrong} instead of {right}"
        gate, up = x.chunk(2, -1)
        exact = ACTIVATIONS[right](gate.double()) * up.double()
        actual = ACTIVATIONS[wrong](gate.double()) * up.double()
        found = told(actual, exact, dtype, inputs=[x])
        if dtype is torch.float32 or wrong != "gelu (tanh)":
            assert found.cause == f"activation: {wrong} instead of {right} of the gate"

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("centred", [False, True])
    def test_eps(self, centred: bool, dtype: Any) -> None:
        x = (random(24, 64) * torch.logspace(-3, 0, 24)[:, None]).to(dtype)
        weight, bias = random(64, dtype=dtype), random(64, dtype=dtype)

        def norm(eps: float) -> Tensor:
            values = x.double()
            if centred:
                return F.layer_norm(values, (64,), weight.double(), bias.double(), eps)
            root = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
            return values * root * weight.double()

        inputs = [x, weight, bias] if centred else [x, weight]
        found = told(norm(1e-5), norm(1e-6), dtype, inputs=inputs)
        assert found.cause == "eps: 1e-05 explains the output, where the reference has 1e-06"
        assert found.facts["eps"] == 1e-5

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_other_norms(self, dtype: Any) -> None:
        x, weight = random(24, 64, dtype=dtype) + 0.5, random(64, dtype=dtype)
        values = x.double()
        exact = F.layer_norm(values, (64,), weight.double(), None, 1e-5)
        actual = F.rms_norm(values, (64,), weight.double(), 1e-5)
        found = told(actual, exact, dtype, inputs=[x, weight])
        assert found.cause == "normalisation: the mean is not taken off"
        found = told(F.layer_norm(values, (64,)), exact, dtype, inputs=[x, weight])
        assert found.cause == "normalisation: input 1 is not applied"

    @pytest.mark.parametrize("shape", [(32,), (2, 9)])
    @pytest.mark.parametrize("terms", [64, 300, 1024])
    def test_tf32(self, shape: tuple[int, ...], terms: int) -> None:
        from brickline.checking.cause_products import to_tf32

        x, layer = random(*shape, terms), nn.Linear(terms, 40)
        w, b = layer.weight.detach(), layer.bias.detach()
        exact = x.double() @ w.double().T + b.double()
        clean = x @ w.T + b
        actual = (to_tf32(x).float() @ to_tf32(w).float().T + b).float()
        evidence = Evidence("fc", actual, exact, clean=clean, module=layer, inputs=[x])
        found = explain(evidence)
        assert signature(found) == "TF32"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_short_inputs(self, dtype: Any) -> None:
        x, w = random(32, 128), random(128, 48)
        exact = x.double() @ w.double()
        actual = x.to(dtype).double() @ w.to(dtype).double()
        found = told(actual, exact, inputs=[x, w])
        names = (
            ("low-precision inputs",)
            if dtype is torch.bfloat16
            else ("TF32", "low-precision inputs")
        )
        assert signature(found) in names, "float16 has as many bits as TF32"
        found = told(x.double() @ w.to(dtype).double(), exact, inputs=[x, w])
        assert "input 1 was rounded" in str(found.cause)

    @pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("step", [1, 16, 64])
    def test_short_sums(self, step: int, kept: Any) -> None:
        x, w = random(16, 512, dtype=kept), random(512, 32, dtype=kept)
        exact = x.double() @ w.double()
        total = torch.zeros(16, 32, dtype=kept)
        for at in range(0, 512, step):
            part = x[:, at : at + step].double() @ w[at : at + step].double()
            total = (total.double() + part.to(kept).double()).to(kept)
        found = told(total, exact, kept, inputs=[x, w])
        assert signature(found) == "low-precision accumulation"
        assert found.facts["step"] == step

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("dropped", [1, 7, 16, 64])
    def test_dropped_terms(self, dropped: int, dtype: Any) -> None:
        x, w = random(2, 8, 250, dtype=dtype), random(48, 250, dtype=dtype)
        exact = x.double() @ w.double().T
        actual = x[..., :-dropped].double() @ w[:, :-dropped].double().T
        found = told(actual, exact, dtype, inputs=[x, w])
        assert signature(found) == "dropped tail"
        which = f"terms {250 - dropped}..249" if dropped > 1 else "term 249"
        assert which in str(found.cause)

    def test_a_block_of_terms_that_counts_otherwise(self) -> None:
        x, w = random(16, 256), random(256, 48)
        exact = x.double() @ w.double()
        part = x[:, 64:128].double() @ w[64:128].double()
        assert signature(told(exact - part, exact, inputs=[x, w])) == "dropped terms"
        assert signature(told(exact + part, exact, inputs=[x, w])) == "doubled terms"
        one = torch.zeros(48)
        one[7] = 1
        found = told(exact + 0.3 * part * one, exact, inputs=[x, w])
        assert signature(found) == "quantisation scale"
        assert "column 7 of 48" in str(found.where)

    def test_weights_of_its_own(self) -> None:
        layer = nn.Linear(32, 48)
        x = random(16, 32)
        other = layer.weight.detach().double().clone()
        other[17] *= 1.3
        bias = layer.bias.detach().double()
        exact = x.double() @ other.T + bias
        actual = layer(x).detach()
        clean = x @ other.T.float() + bias.float()
        found = explain(Evidence("fc", actual, exact, clean, module=layer, inputs=[x]))
        assert signature(found) == "weights"
        assert "row 17 of 48" in str(found.cause)
        assert "column 17 of 48" in str(found.where)

    def test_one_weight(self) -> None:
        x, w = random(32, 64), random(64, 48)
        other = w.double().clone()
        other[11, 7] += 0.5
        found = told(x.double() @ other, x.double() @ w.double(), inputs=[x, w])
        assert "term 11" in str(found.cause)
        assert "column 7" in str(found.where)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_products_of_batches(self, dtype: Any) -> None:
        a, b = random(3, 4, 8, 64, dtype=dtype), random(3, 4, 64, 16, dtype=dtype)
        exact = a.double() @ b.double()
        actual = a[..., :48].double() @ b[..., :48, :].double()
        found = told(actual, exact, dtype, inputs=[a, b])
        assert "terms 48..63" in str(found.cause)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"off": 1}, "one position too many"),
            ({"off": -1}, "one position too few"),
            ({"causal": False}, "not causal"),
            ({"scale": 1 / 16}, "divided by 16"),
            ({"shared": "cat"}, "grouped heads"),
        ],
    )
    def test_attention(self, change: dict[str, Any], words: str, dtype: Any) -> None:
        q = random(2, 4, 12, 16, dtype=dtype)
        k, v = random(2, 2, 12, 16, dtype=dtype), random(2, 2, 12, 16, dtype=dtype)

        def attend(
            off: int = 0, causal: bool = True, scale: float = 0.25, shared: str = "near"
        ) -> Tensor:
            keys, values = (
                each.double().repeat_interleave(2, 1)
                if shared == "near"
                else torch.cat([each.double()] * 2, 1)
                for each in (k, v)
            )
            scores = q.double() @ keys.mT * scale
            if causal:
                hidden = ~torch.ones(12, 12, dtype=torch.bool).tril(off)
                scores = scores.masked_fill(hidden, -torch.inf)
            return scores.softmax(-1).nan_to_num(0.0) @ values

        found = told(attend(**change), attend(), dtype, inputs=[q, k, v])
        assert words in str(found.cause)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("halves", [False, True])
    def test_rotation(self, halves: bool, dtype: Any) -> None:
        x = random(2, 4, 16, 32, dtype=dtype)

        def rotate(base: float, shift: int = 0) -> Tensor:
            steps = torch.arange(16, dtype=torch.float64)[:, None] + shift
            angle = steps * base ** -(torch.arange(16, dtype=torch.float64) / 16)
            values = x.double()
            if halves:
                one, two = values.chunk(2, -1)
            else:
                one, two = values[..., ::2], values[..., 1::2]
            cos, sin = angle.cos(), angle.sin()
            pair = (one * cos - two * sin, one * sin + two * cos)
            return torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)

        for wrong in (rotate(5e5), rotate(1e4, shift=1)):
            found = told(wrong, rotate(1e4), dtype, inputs=[x])
            assert signature(found) == "rotation", found

    def test_the_base_of_a_table(self) -> None:
        def table(base: float) -> Tensor:
            angle = torch.arange(16, dtype=torch.float64)[:, None] * base ** -(
                torch.arange(16, dtype=torch.float64) / 16
            )
            return torch.cat([angle, angle], -1).cos()[None]

        found = told(table(5e5), table(1e4))
        assert "the base is 500000, where the reference has 10000" in str(found.cause)


class Attend(nn.Module):
    """Attention as it is written by hand."""

    def __init__(self, off: int) -> None:
        super().__init__()
        self.qkv, self.off = nn.Linear(32, 96), off

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(32)
        size = x.shape[-2]
        hidden = ~torch.ones(size, size, dtype=torch.bool).tril(self.off)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


class Gated(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], rate: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(32, 64), nn.Linear(64, 32), act
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(x))))


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def tried(module: nn.Module, right: nn.Module, x: Tensor) -> Explanation:
    import copy

    right.load_state_dict(module.state_dict())
    with torch.no_grad():
        exact = copy.deepcopy(right).double().eval()(x.double())
        actual, clean = module(x), right.eval()(x)
    return explain(Evidence("block", actual, exact, clean, module=module, args=(x,), inputs=[x]))


class TestTrials:
    """Faults inside a module, shown by running it again with one thing changed."""

    @pytest.mark.parametrize("off", [-1, 1, 2])
    def test_mask(self, off: int) -> None:
        found = tried(Attend(off), Attend(0), random(2, 12, 32))
        if off < 0:
            assert signature(found) in ("mask", "nan")
        else:
            assert signature(found) == "mask"
            assert "later positions are seen" in str(found.cause)

    def test_activation(self) -> None:
        found = tried(Gated(F.gelu), Gated(F.silu), random(2, 12, 32))
        assert found.cause == "activation: gelu instead of silu; exchanged, it is right"

    def test_dropout(self) -> None:
        module = Gated(F.gelu, 0.2)
        found = tried(module, Gated(F.gelu), random(2, 12, 32))
        assert found.cause == "dropout left on: in evaluation mode it is right (Dropout)"
        assert module.training, "the module itself is left as it was"

    def test_precision(self) -> None:
        module = Short()
        x = random(2, 12, 32)
        exact_of = Short()
        exact_of.load_state_dict(module.state_dict())
        with torch.no_grad():
            exact = exact_of.double()(x.double())
            actual = module.bfloat16()(x.bfloat16())
        evidence = Evidence(
            "block", actual, exact, exact.float(), module=module, args=(x.bfloat16(),)
        )
        assert signature(explain(evidence)) in ("low precision", None)

    def test_a_module_that_cannot_be_copied_is_left_alone(self) -> None:
        class Once(nn.Module):
            def __deepcopy__(self, memo: Any) -> Any:
                raise RuntimeError("one of a kind")

            def forward(self, x: Tensor) -> Tensor:
                return x

        x, exact = random(8, 32), random(8, 32).double()
        assert told(random(8, 32), exact, module=Once(), args=(x,)).cause is None


class TestNoCause:
    """A wrong cause is worse than none."""

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", [*SHAPES, (1, 64), (64, 1), (5,), (3, 3), (1, 1), ()])
    @pytest.mark.parametrize("size", [1e-3, 1.0])
    def test_noise(self, shape: tuple[int, ...], size: float, dtype: Any) -> None:
        exact = random(*shape).double()
        x = random(*shape, dtype=dtype)
        found = told(exact + size * random(*shape).double(), exact, dtype, inputs=[x])
        assert found.cause is None
        assert found.where or dtype is not torch.float32

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_other_numbers_altogether(self, dtype: Any) -> None:
        exact = random(16, 64).double()
        x, w = random(16, 32, dtype=dtype), random(32, 64, dtype=dtype)
        assert told(random(16, 64), exact, dtype, inputs=[x, w]).cause is None

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("terms", [32, 256, 2048])
    def test_a_clean_product(self, terms: int, dtype: Any) -> None:
        x, w = random(16, terms, dtype=dtype), random(terms, 48, dtype=dtype)
        exact = x.double() @ w.double()
        halves = x[:, ::2].float() @ w[::2].float() + x[:, 1::2].float() @ w[1::2].float()
        found = told(halves, exact, dtype, inputs=[x, w])
        assert found.cause is None

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_a_clean_norm(self, dtype: Any) -> None:
        x, w = random(16, 64, dtype=dtype), random(64, dtype=dtype)
        exact = F.rms_norm(x.double(), (64,), w.double(), 1e-6)
        actual = F.rms_norm(x.float(), (64,), w.float(), 1e-6)
        assert told(actual, exact, dtype, inputs=[x, w]).cause is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(16,), (2, 8), (4,)])
    def test_faults_that_are_in_no_list(self, shape: tuple[int, ...], dtype: Any) -> None:
        x, w = random(*shape, 32, dtype=dtype), random(32, 32, dtype=dtype)
        exact = x.double() @ w.double()
        size = exact.abs().amax(-1, keepdim=True)
        one = torch.zeros_like(exact)
        one[..., -1, 5] = 1
        row = torch.zeros_like(exact)
        row[..., -1, :] = random(32)
        faults = {
            "square": exact + 0.1 * exact**2,
            "rank 1": exact + 0.1 * random(*shape, 1) * random(1, 32),
            "rounded weights": x.double() @ ((w.double() * 20).round() / 20),
            "noise in weights": x.double() @ (w.double() + 0.01 * random(32, 32)),
            "rounded inputs": ((x.double() * 10).round() / 10) @ w.double(),
            "two at once": 1.5 * exact.roll(1, -2),
            "a scale and a bias": 1.5 * exact + random(32),
            "a tail and a bias": x[..., :-5].double() @ w[:-5].double() + random(32),
            "mean of rows": 0.5 * (exact + exact.roll(1, -2)),
            "running sum": exact.cumsum(-2),
            "sorted": exact.sort(-1).values,
            "softmax": exact.softmax(-1),
            "rounded": exact.round(),
            "8 bits": (exact / size * 127).round() * size / 127,
            "float8": exact.to(torch.float8_e4m3fn).double(),
            "one row": exact + row,
            "one element": exact + one,
            "random signs": torch.where(torch.rand_like(exact) < 0.05, -exact, exact),
            "zeros": torch.where(torch.rand_like(exact) < 0.2, 0.0, exact),
        }
        said = {
            name: cause
            for name, actual in faults.items()
            if (cause := told(actual, exact, dtype, inputs=[x, w]).cause) is not None
        }
        assert said == {}

    def test_nothing_differs(self) -> None:
        exact = random(4, 4).double()
        found = explain(Evidence("op", exact, exact))
        assert (found.cause, found.where) == (None, None)

    def test_noise_in_a_product(self) -> None:
        x, w = random(32, 256), random(256, 48)
        exact = x.double() @ w.double()
        wrong = exact.clone()
        wrong[:, 20:30] += random(32, 10).double()
        found = told(wrong, exact, inputs=[x, w])
        assert found.cause is None
        assert "columns 20..29 of 48" in str(found.where)


class TestBadInput:
    @pytest.mark.parametrize(
        ("actual", "exact"),
        [
            (torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.float64)),
            (torch.zeros(2, 4, device="meta"), torch.zeros(2, 4, dtype=torch.float64)),
            (torch.eye(4).to_sparse(), 2 * torch.eye(4, dtype=torch.float64)),
            (torch.zeros(4, dtype=torch.complex64), torch.ones(4, dtype=torch.complex128)),
            (torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)),
            (torch.full((4,), torch.nan), torch.ones(4, dtype=torch.float64)),
            (torch.ones(4), torch.full((4,), torch.nan, dtype=torch.float64)),
        ],
    )
    def test_odd_tensors(self, actual: Tensor, exact: Tensor) -> None:
        assert isinstance(explain(Evidence("op", actual, exact)), Explanation)

    def test_whole_numbers(self) -> None:
        actual, exact = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 9]])
        found = explain(Evidence("argmax", actual, exact))
        assert found.where == "one element; first at [1, 1] 4 instead of 9"


class TestWhere:
    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ((slice(None), 3), "batch"),
            (
                (0, slice(4, 8)),
                "batch 0 of 2, positions 4..7 of 12 (block 1 of 3), columns 5, 9 of 64",
            ),
            ((slice(None), slice(11, 12)), "position 11 of 12 (the last), columns 5, 9 of 64"),
        ],
    )
    def test_three_dimensions(self, wrong: tuple[Any, ...], words: str) -> None:
        exact = random(2, 12, 64).double()
        actual = exact.clone()
        part = torch.zeros(2, 12, 64)
        part[(*wrong, slice(5, 10, 4))] = 1
        actual += part * random(2, 12, 64)
        found = told(actual, exact)
        if words != "batch":
            assert str(found.where).startswith(words)

    def test_the_worst_element_with_both_values(self) -> None:
        exact = random(4, 32).double()
        actual = exact.clone()
        actual[2, 7] = 100.0
        exact[2, 7] = 1.25
        assert str(told(actual, exact).where) == "one element; worst at [2, 7] 100 instead of 1.25"

    def test_a_strided_pattern(self) -> None:
        exact = random(8, 64).double()
        actual = exact.clone()
        actual[:, ::4] += random(8, 16)
        assert "every fourth of the columns from 0 to 60 of 64" in str(told(actual, exact).where)
