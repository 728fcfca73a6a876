"""Products in float64 a part at a time: the same as whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from brickline.oracle import wide_products  # noqa: E402
from brickline.oracle.widen import Widened  # noqa: E402


def made(function: Callable[..., Any], *given: Any) -> Any:
    with torch.no_grad(), Widened():
        return function(*given)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: x @ w.t(),
        lambda x, w, b: torch.nn.functional.linear(x, w, b),
        lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5, alpha=2.0),
        lambda x, w, b: torch.addmm(b * float("nan"), x, w.t(), beta=0),
    ],
)
def test_parts_make_the_whole(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    given = [torch.randn(*shape).bfloat16() for shape in ((5, 16), (37, 16), (37,))]
    whole = made(function, *given)
    monkeypatch.setattr(wide_products, "PART_BYTES", 8 * 16 * 7)
    parts = made(function, *given)
    assert parts.dtype is torch.float64
    torch.testing.assert_close(parts, whole, rtol=1e-14, atol=1e-14)


def test_what_is_wide_or_small_is_left_alone() -> None:
    product = torch.ops.aten.mm.default
    wide = torch.empty(1 << 13, 1 << 12, dtype=torch.float64, device="meta")
    assert not wide_products.is_large_product(product, (wide, wide))
    assert wide_products.is_large_product(product, (wide, wide.float()))
    assert not wide_products.is_large_product(product, (wide, wide.float()[:8]))
    assert not wide_products.is_large_product(torch.ops.aten.add.Tensor, (wide, wide.float()))
