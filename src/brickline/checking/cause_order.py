"""Causes that put right values in wrong places: permuted, stale, transposed, never written."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from brickline.checking.guesses import Case, Guess, best
from brickline.checking.places import dimension_names, indices_in_words
from brickline.checking.residual import floats_of

_MOST_PRODUCTS = 1 << 33
"""Multiplications that looking for a row's double may cost."""


def never_written(case: Case) -> list[Guess]:
    """Whole slices are 0."""
    for name, dim in _slicings(case):
        actual, exact, noise = (_sliced(each, dim) for each in _three(case))
        zero = (actual == 0).all(-1) & (exact.abs() > 6 * noise).any(-1)
        if not zero.any() or bool(zero.all()):
            continue
        output = torch.where(zero[:, None], 0.0, exact)
        where = indices_in_words(name, zero.nonzero().flatten().tolist(), len(zero))
        tail = "a dropped tail: " if _is_tail(zero) else ""
        words = f"{tail}{where} never written (0)"
        kind = "dropped tail" if tail else "never written"
        found = case.guess(kind, words, _unsliced(output, case, dim), slices=int(zero.sum()))
        if found:
            return [found]
    residual = case.residual
    if bool((residual.actual == 0).all()) and bool(residual.wrong.any()):
        return [Guess("never written", "never written: every element is 0")]
    return []


def passed_through(case: Case) -> list[Guess]:
    """Whole rows are those of an input, as if the op had not run on them."""
    guesses: list[Guess | None] = []
    for name, each in floats_of(case.evidence, case.shape):
        actual, exact, noise = (_sliced(value, None) for value in _three(case))
        given = _sliced(each, None)
        far = ((actual - exact).abs() > 6 * noise).any(-1)
        same = far & ((actual - given).abs() <= noise).all(-1)
        if not same.any() or not given[same].any():
            continue
        output = torch.where(same[:, None], given, exact).reshape(case.shape)
        if bool(same.all()):
            words = f"not computed: the output is {name}, unchanged"
        else:
            where = indices_in_words("row", same.nonzero().flatten().tolist(), len(same))
            words = f"stale rows: {where} hold {name}, unchanged"
        guesses.append(case.guess("stale rows", words, output, rows=int(same.sum())))
    return best(guesses)


def permuted(case: Case) -> list[Guess]:
    """Slices of the output are other slices of the exact answer."""
    for name, dim in _slicings(case):
        found = _permuted(case, name, dim)
        if found:
            return [found]
    return []


def _permuted(case: Case, name: str, dim: int | str | None) -> Guess | None:
    actual, exact, noise = (_sliced(each, dim) for each in _three(case))
    count, width = exact.shape
    wrong = ((actual - exact).abs() > 6 * noise).any(-1).nonzero().flatten()
    if count < 2 or width < 4 or not len(wrong):
        return None
    if len(wrong) * count * width > _MOST_PRODUCTS or not case.residual.finite.all():
        return None
    few = wrong[:: max(len(wrong) // 4, 1)]
    if not _fitting(few, _nearest(actual[few], exact), actual, exact, noise).double().mean() > 0.5:
        return None
    source = _nearest(actual[wrong], exact)
    fits = _fitting(wrong, source, actual, exact, noise)
    if float(fits.double().mean()) < 0.9:
        return None
    output = exact.clone()
    output[wrong[fits]] = exact[source[fits]]
    pairs = list(zip(wrong[fits].tolist(), source[fits].tolist(), strict=True))
    words, kind = _permutation_words(name, pairs, count)
    return case.guess(kind, words, _unsliced(output, case, dim), slices=len(pairs))


def _fitting(
    wrong: torch.Tensor,
    source: torch.Tensor,
    actual: torch.Tensor,
    exact: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """Return which wrong slices are the exact one that they are nearest to."""
    away = (actual[wrong] - exact[wrong]).square().sum(-1)
    near = (actual[wrong] - exact[source]).square().sum(-1)
    limit = torch.maximum(9 * noise[source].square().sum(-1), 1e-6 * away)
    # A slice that is hardly different from its neighbours would fit any of them.
    fits = (near <= limit) & (near < 0.01 * away) & (source != wrong)
    return fits & (exact[source].abs().amax(-1) > 6 * noise[source].amax(-1))


def _nearest(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the number of the exact slice that each actual one is nearest to."""
    squares = exact.square().sum(-1)
    found = []
    for part in actual.split(512):
        found.append((squares[None] - 2 * part @ exact.T).argmin(-1))
    return torch.cat(found)


def _permutation_words(name: str, pairs: list[tuple[int, int]], count: int) -> tuple[str, str]:
    shifts = {(source - index) for index, source in pairs}
    circular = {(source - index) % count for index, source in pairs}
    sources = {source for _, source in pairs}
    where = indices_in_words(name, [index for index, _ in pairs], count)
    other = name if name.endswith(("row", "column", "head")) else f"{name} index"
    if len(sources) == 1 and len(pairs) > 1:
        return f"stale rows: {where} repeat {name} {sources.pop()}", "stale rows"
    if len(shifts) == 1:
        shift = shifts.pop()
        words = f"hold that of {other} {abs(shift)} {'later' if shift > 0 else 'earlier'}"
        single = f"holds {name} {pairs[0][1]}"
        if len(pairs) == 1:
            return f"stale rows: {where} {single}", "stale rows"
        return f"permuted: {where} {words} (shifted by {-shift:+d})", "permuted"
    if len(circular) == 1:
        return f"permuted: {where} rotated by {-circular.pop() % count}", "permuted"
    swapped = dict(pairs)
    if all(swapped.get(source) == index for index, source in pairs):
        shown = ", ".join(f"{a} and {b}" for a, b in pairs if a < b and len(pairs) <= 8)
        if all(a + b == pairs[0][0] + pairs[0][1] for a, b in pairs) and len(pairs) > 2:
            return f"permuted: {where} reversed", "permuted"
        return f"permuted: {name} {shown} swapped" if shown else f"permuted: {where}", "permuted"
    shown = ", ".join(f"{index} holds {source}" for index, source in pairs[:3])
    return f"permuted: {where} hold others ({name} {shown}{', …' * (len(pairs) > 3)})", "permuted"


def other_order(case: Case) -> list[Guess]:
    """The whole answer in another order: transposed, reversed, heads interleaved otherwise."""
    residual = case.residual
    exact, shape = residual.exact, case.shape
    dims = exact.dim()
    tries: list[tuple[str, str, torch.Tensor]] = []
    for first in range(dims):
        if shape[first] > 1:
            tries.append(("permuted", f"dim {first} reversed", exact.flip(first)))
        for second in range(first + 1, dims):
            if shape[first] > 1 and shape[second] > 1:
                turned = exact.transpose(first, second).reshape(shape)
                tries.append(("transposed", f"dims {first} and {second} exchanged", turned))
    for heads in _head_counts(shape):
        split = exact.reshape(*shape[:-1], heads, shape[-1] // heads)
        inner = split.transpose(-1, -2).reshape(shape)
        tries.append(("permuted", f"columns of {heads} heads interleaved otherwise", inner))
        if dims >= 2 and shape[-2] > 1:
            outer = split.transpose(-2, -3).reshape(shape)
            back = exact.reshape(*shape[:-2], heads, shape[-2], shape[-1] // heads)
            words = f"{heads} heads not exchanged with positions before they are joined"
            tries.append(("transposed", words, outer))
            tries.append(("transposed", words, back.transpose(-2, -3).reshape(shape)))
    return best([case.guess(kind, f"{kind}: {words}", output) for kind, words, output in tries])


def _head_counts(shape: torch.Size) -> list[int]:
    size = shape[-1] if len(shape) else 1
    return [
        heads for heads in (2, 3, 4, 6, 8, 12, 16, 32, 64) if size % heads == 0 and heads < size
    ]


def _three(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    residual = case.residual
    return residual.actual, residual.exact, residual.noise()


def _slicings(case: Case) -> Iterator[tuple[str, int | str | None]]:
    """Yield ways to cut the output into slices: rows, each dimension, blocks of columns."""
    dims = len(case.shape)
    if dims < 2 or case.shape[-1] < 2:
        return
    names = dimension_names(dims)
    if dims > 2:
        for dim in range(dims - 1):
            if case.shape[dim] > 1:
                yield names[dim], dim
    yield "row", None
    for heads in _head_counts(case.shape):
        yield f"block of {case.shape[-1] // heads} columns (head)", f"/{heads}"
    yield "column", dims - 1


def _sliced(tensor: torch.Tensor, dim: int | str | None) -> torch.Tensor:
    if dim is None:
        return tensor.reshape(-1, tensor.shape[-1])
    if isinstance(dim, str):
        heads = int(dim[1:])
        blocks = tensor.reshape(-1, heads, tensor.shape[-1] // heads)
        return blocks.transpose(0, 1).reshape(heads, -1)
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _unsliced(slices: torch.Tensor, case: Case, dim: int | str | None) -> torch.Tensor:
    shape = case.shape
    if dim is None:
        return slices.reshape(shape)
    if isinstance(dim, str):
        heads = int(dim[1:])
        blocks = slices.reshape(heads, -1, shape[-1] // heads).transpose(0, 1)
        return blocks.reshape(shape)
    moved = [shape[dim], *(size for index, size in enumerate(shape) if index != dim)]
    return slices.reshape(moved).movedim(0, dim)


def _is_tail(mask: torch.Tensor) -> bool:
    """Return whether only the last ones, and not all, are set."""
    count = int(mask.sum())
    return 0 < count < len(mask) and bool(mask[-count:].all())
