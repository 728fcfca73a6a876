"""What stands out and is no suspect: ports that fold and share, updates, masks and ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hand_made_launches import Array, Launches

from brickline.comparison.comparing import compare
from brickline.comparison.pairing import align
from brickline.comparison.sides import Vocabulary
from brickline.verdict import DivergenceReport, Status, Verdict

WIDTH, ROWS = 32, 8


def drawn(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape or (ROWS, WIDTH))


def matrix(seed: int) -> Array:
    return drawn(seed, WIDTH, WIDTH) / np.sqrt(WIDTH)


class Recorded(Launches):
    """Launches whose outputs come after what they enclose."""

    def returns(self, launch: int, *outputs: Array) -> None:
        for index, array in enumerate(outputs):
            self._operand(launch, 1, index, array, "float32", True)

    def product(
        self, name: str, x: Array, weight: Array, parent: int, layer: int = -1, **options: Any
    ) -> Array:
        y = x @ weight
        self.add(name, [x], [y], [weight], parent=parent, layer=layer, **options)
        return y


def compared(candidate: Launches, reference: Launches) -> DivergenceReport:
    return compare(candidate.run("c"), reference.run("r"))


def names(report: DivergenceReport) -> list[str]:
    return [each.name for each in report.findings]


# --- Values that are not finite -------------------------------------------------------------------


def masked(fill: float, broken: float | None = None) -> Recorded:
    """A model that hands a mask to its layers, which put out finite numbers."""
    out = Recorded()
    x = drawn(0)
    mask = np.triu(np.full((ROWS, ROWS), fill), 1)
    root = out.add("Model", [x], kind="Model")
    for layer in range(3):
        block = out.add(f"layers.{layer}", [x, mask], kind="Block", parent=root, layer=layer)
        x = np.tanh(out.product(f"layers.{layer}.up", x, matrix(layer), block, layer))
        if broken is not None and layer == 1:
            x = np.where(np.arange(WIDTH) == 3, broken, x)
        out.returns(block, x)
    out.returns(root, x)
    return out


def test_infinities_that_end_where_they_are_used_are_a_mask() -> None:
    assert names(compared(masked(-np.inf), masked(-1e9))) == []


def test_infinities_that_go_on_have_an_origin() -> None:
    report = compared(masked(-1e9, broken=np.inf), masked(-1e9))
    assert report.findings[0].name == "layers.1"
    assert report.findings[0].verdict is Verdict.NONFINITE_ORIGIN


# --- What follows takes it back -------------------------------------------------------------------


def scaled(prefix: str, *, folded: bool, fault: float = 1.0) -> Recorded:
    """Logits times a factor, which a port folds into the weight of its head."""
    out = Recorded()
    x = drawn(0)
    root = out.add(prefix.title(), [x], kind=prefix.title())
    for layer in range(3):
        gain = fault if layer == 1 else 1.0
        x = np.tanh(gain * out.product(f"{prefix}.{layer}", x, matrix(layer), root, layer))
    head = matrix(9)
    y = out.product("head", x, 8 * head if folded else head, root)
    out.returns(root, y if folded else 8 * y)
    return out


def test_a_factor_that_is_folded_into_a_weight_is_no_suspect() -> None:
    report = compared(scaled("port", folded=True), scaled("model", folded=False))
    assert names(report) == []
    assert report.headline.startswith("head stands out, but what follows takes it back")


def test_a_fault_is_named_before_a_factor_that_is_folded() -> None:
    report = compared(scaled("port", folded=True, fault=1.5), scaled("model", folded=False))
    assert "head" not in names(report)


def test_a_weight_with_a_factor_that_nobody_takes_back_is_named() -> None:
    wrong = scaled("model", folded=False)
    right = scaled("model", folded=False)
    head, root = wrong.trace_rows[4]["trace"], wrong.trace_rows[0]["trace"]
    for launches in (wrong,):
        for row, operand in enumerate(launches.operand_list):
            made = operand["role"] == 1 and operand["trace"] in (head, root)
            if made or (operand["trace"] == head and operand["index"] >= 1000):
                fingerprint = launches.print_list[operand["fingerprint"] - 1]
                fingerprint["hash"] = (row, row)
                for field in ("sketch", "l1", "l2", "total", "absmax", "rows", "columns"):
                    fingerprint[field] = fingerprint[field] * 1.5
    assert names(compared(wrong, right)) == ["head"]


# --- Weights that an update changed ---------------------------------------------------------------


def trained(rate: float, backward: bool = True) -> Recorded:
    """Two calls with an update between, of which no gradient was recorded but that of the input."""
    out = Recorded()
    x, weight, given = drawn(0), matrix(1), drawn(3)
    for call in range(2):
        root = out.add("Model", [x], kind="Model", position=call)
        y = out.product("up", x, weight, root, position=call)
        out.returns(root, y)
        if backward:
            made = out.add("Model", [given], kind="Model", position=call, direction=1)
            out.returns(made, given @ matrix(1).T)
        weight = weight - rate * matrix(2)
    return out


def test_weights_that_an_update_made_differ_are_no_suspects() -> None:
    report = compared(trained(0.1), trained(0.01))
    assert names(report) == []
    assert report.status is Status.INCONCLUSIVE
    assert report.headline.startswith("weights differ from call 1 on that were the same before")


def test_weights_that_differ_without_an_update_are() -> None:
    assert names(compared(trained(0.1, backward=False), trained(0.01, backward=False))) == ["up"]


def test_a_table_that_is_used_elsewhere_too_has_another_gradient() -> None:
    runs = []
    for tied in (0.0, 1.0):
        out = Recorded()
        tokens = np.array([1, 2, 3])
        given = drawn(0, 3, WIDTH)
        table = np.zeros((20, WIDTH))
        table[tokens] = given
        table += tied * drawn(5, 20, WIDTH)
        root = out.add("Model", [tokens], [given], kind="Model")
        out.add("embed", [tokens], [given], [drawn(4, 20, WIDTH)], kind="Embedding", parent=root)
        back = out.add("Model", [given], [given], kind="Model", direction=1)
        launch = out.add("embed", [given], kind="Embedding", parent=back, direction=1)
        out._operand(launch, 1, 1000, table, "float32", True)
        out.print_list[-1]["zeros"] = (table == 0).sum()
        runs.append(out)
    report = compared(*runs)
    assert names(report) == []
    assert "used elsewhere too" in report.headline


# --- What was not compared ------------------------------------------------------------------------


def turned(
    prefix: str, angles: Callable[[int], Array], *, handed: bool, fault: int = -1
) -> Recorded:
    """Blocks that use a table of angles; a port hands it to them, the reference looks it up."""
    out = Recorded()
    x = drawn(0)
    root = out.add(prefix.title(), [x], kind=prefix.title())
    for layer in range(3):
        name = f"{prefix}.{layer}"
        given = [x, angles(layer)] if handed else [x]
        block = out.add(name, given, kind=prefix, parent=root, layer=layer)
        up = out.product(f"{name}.up", x, matrix(layer), block, layer)
        mixed = up * angles(layer).mean(0) * (1.5 if layer == fault else 1.0)
        x = x + out.product(f"{name}.down", np.tanh(mixed), matrix(10 + layer), block, layer)
        out.returns(block, x)
    out.returns(root, x)
    return out


RIGHT, WRONG = drawn(7), drawn(8)


def test_who_is_given_a_wrong_table_is_not_blamed_for_it() -> None:
    candidate = turned("port", lambda _: WRONG, handed=True)
    report = compared(candidate, turned("model", lambda _: RIGHT, handed=False))
    assert names(report) == []
    assert "port.0 stands out, but it was given a tensor" in report.headline


def test_a_table_that_served_another_layer_well_is_right() -> None:
    candidate = turned("port", lambda _: RIGHT, handed=True, fault=1)
    report = compared(candidate, turned("model", lambda _: RIGHT, handed=False))
    assert names(report) == ["port.1"]


# --- Choices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flipped", "guilty"), [(1, []), (40, ["router"])])
def test_a_tie_takes_its_shares_along(flipped: int, guilty: list[str]) -> None:
    runs = []
    for one in (True, False):
        out = Recorded()
        x = drawn(0, 64, WIDTH) * (1 + 1e-2 * one * drawn(1, 64, WIDTH))
        chosen, shares = np.arange(64) % 8, np.abs(drawn(2, 64, 1))
        if one:
            chosen = np.where(np.arange(64) < flipped, (chosen + 1) % 8, chosen)
            shares = np.where(np.arange(64)[:, None] < flipped, 3 * shares, shares)
        root = out.add("Model", [x], kind="Model", dtype="bfloat16")
        out.add("router", [x], [chosen, shares], kind="Router", parent=root, dtype="bfloat16")
        out.returns(root, x)
        runs.append(out)
    assert names(compared(*runs)) == guilty


# --- Weights in other pieces ----------------------------------------------------------------------


def mixers(prefix: str, order: Callable[[int], Array], fault: int = -1) -> Recorded:
    """Mixers that keep the columns of their first product in an order of their own."""
    out = Recorded()
    x = drawn(0)
    root = out.add(prefix.title(), [x], kind=prefix.title())
    for layer in range(4):
        name = f"{prefix}.{layer}"
        block = out.add(name, [x], kind=prefix, parent=root, layer=layer)
        moved = out.product(f"{name}.{prefix}_in", x, matrix(layer)[:, order(layer)], block, layer)
        glued = np.tanh(moved[:, np.argsort(ORDER if prefix == "port" else PLAIN)])
        glued = glued * (1.5 if layer == fault else 1.0)
        x = out.product(f"{name}.{prefix}_out", glued, matrix(10 + layer), block, layer)
        out.returns(block, x)
    out.returns(root, x)
    return out


PLAIN = np.arange(WIDTH)
ORDER = np.random.default_rng(3).permutation(WIDTH)


def test_products_with_the_references_numbers_hide_no_fault() -> None:
    report = compared(mixers("port", lambda _: ORDER, fault=1), mixers("model", lambda _: PLAIN))
    assert names(report) == ["port.1"]


def test_one_that_keeps_its_weights_unlike_its_siblings_is_named() -> None:
    candidate = mixers("port", lambda layer: PLAIN if layer == 2 else ORDER)
    assert names(compared(candidate, mixers("model", lambda _: PLAIN))) == ["port.2.port_in"]


# --- Pairs ----------------------------------------------------------------------------------------


def test_a_leaf_is_not_the_module_that_owns_its_weight() -> None:
    gain, x = np.abs(drawn(5, WIDTH)), drawn(0)
    normed = x / np.sqrt((x**2).mean(1, keepdims=True)) * gain
    spread = normed @ matrix(1)
    candidate, reference = Recorded(), Recorded()
    root = candidate.add("Port", [x], kind="Port")
    block = candidate.add("parts", [x], kind="Part", parent=root)
    candidate.add("parts.norm", [x], [normed], [gain], kind="Norm", parent=block)
    candidate.product("parts.up", normed, matrix(1), block)
    candidate.returns(block, x + spread)
    candidate.returns(root, x + spread)
    root = reference.add("Model", [x], kind="Model")
    block = reference.add("blocks", [x], [], [gain], kind="Block", parent=root)
    reference.product("blocks.wide", normed, matrix(1), block)
    reference.returns(block, x + spread)
    reference.returns(root, x + spread)
    words = Vocabulary()
    a, b = candidate.side(words), reference.side(words)
    partner = align(a, b).partner
    pairs = {a.path(row): b.path(int(partner[row])) for row in np.flatnonzero(partner >= 0)}
    assert pairs == {"Port": "Model", "parts": "blocks", "parts.up": "blocks.wide"}
    assert names(compared(candidate, reference)) == []


def test_what_a_module_works_on_is_compared_though_one_side_has_more_arguments() -> None:
    runs = []
    for one in (True, False):
        out = Recorded()
        x, more = drawn(0), drawn(6, 4, 4)
        root = out.add("Model", [x], kind="Model")
        y = 2 * drawn(3) if one else drawn(1)
        out.add("first", [x], [y], kind="Thing", parent=root)
        given = [y, more] if one else [y]
        block = out.add("block", given, kind="Block", parent=root)
        z = out.product("block.up", y, matrix(1), block)
        out.returns(block, z)
        out.returns(root, z)
        runs.append(out)
    assert names(compared(*runs)) == ["first"]
