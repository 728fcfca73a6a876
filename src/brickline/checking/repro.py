"""A script that shows one culprit alone: `write_repro`.

It holds the op's own inputs, cut to the rows that fail where the op allows, its weights and the
float64 answer. It is named only if it fails again in a fresh process; otherwise the reason is.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from brickline.checking.cause_trials import run_again
from brickline.checking.evidence import Evidence
from brickline.checking.repro_recipes import (
    HARMLESS,
    Recipe,
    Refused,
    aten_op,
    by_source,
    called,
    exported,
    known_module,
    of_gradient,
    words_of,
)
from brickline.checking.repro_script import Script
from brickline.checking.residual import dense, residual_of

EMBEDDED_BYTES = 1 << 20
"""Data above this lies beside the script."""
MOST_BYTES = 1 << 31
"""Data of a repro, at the most."""
_MOST_ROWS = 8
"""Rows that a cut keeps: the worst ones."""


class Repro(NamedTuple):
    """A script, or why there is none."""

    path: Path | None
    reason: str | None = None


class _TookTooLong(Refused):
    """A fresh process did not end; another would not either."""


def write_repro(
    evidence: Evidence,
    directory: str | os.PathLike[str],
    *,
    z: float | None = None,
    timeout: float = 60.0,
) -> Repro:
    """Write a script that shows a culprit alone, and run it in a fresh process before naming it.

    Args:
        evidence: The op, its call, what it made and what it should have made.
        directory: Where the script goes, with its data beside it where that is above 1 MiB. Made
            if it is not there. Files are readable by their owner only.
        z: The culprit's z, for the script's first lines.
        timeout: Seconds that the fresh process may take.

    Returns:
        The script's path, or the reason why there is none. Never raises for what the op does.
    """
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return Repro(_write(evidence, Path(directory), z, timeout))
    except Refused as refused:
        return Repro(None, str(refused))
    except OSError as error:
        return Repro(None, f"the repro cannot be written to {directory}: {error.strerror}")
    except Exception as error:  # the candidate's code runs here, and may raise anything
        return Repro(None, f"the op could not be taken out of its model: {words_of(error)}")


def _write(evidence: Evidence, directory: Path, z: float | None, timeout: float) -> Path:
    if evidence.actual.shape != evidence.exact.shape or not evidence.exact.numel():
        raise Refused("its output has another shape than the answer, so errors have no figure")
    evidence = _callable(evidence)
    if not _fails(evidence, _run(evidence)):
        raise Refused("it does not fail again on its own inputs in this process")
    if evidence.backward is None:
        evidence = _cut(evidence)
    reasons = []
    for recipe_of in (known_module, aten_op, by_source, exported):
        try:
            recipe = recipe_of(evidence)
            if recipe is None:
                continue
            if evidence.backward is not None:
                recipe = of_gradient(recipe, evidence.backward)
            return _proven(evidence, recipe, directory, z, timeout)
        except _TookTooLong:
            raise
        except Refused as refused:
            reasons.append(str(refused))
        except OSError:
            raise
        except Exception as error:  # pickling and exporting raise classes of their own
            reasons.append(words_of(error))
    raise Refused("; ".join(dict.fromkeys(reasons)) or "nothing says how to call it")


def _callable(evidence: Evidence) -> Evidence:
    """Return the evidence with a callable and a call."""
    args = evidence.args if evidence.args or evidence.kwargs else tuple(evidence.inputs)
    if evidence.module is not None:
        return replace(evidence, args=args)
    operator = _operator(evidence.op)
    if operator is None:
        raise Refused("neither its module nor its op is known")
    return replace(evidence, module=operator, args=args)


def _operator(name: str | None) -> Any:
    """Return the torch op of a name such as ``aten.mm.default``."""
    if name is None or not re.fullmatch(r"\w+\.\w+(\.\w+)?", name):
        return None
    namespace, operator, *overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), operator, None)
    return getattr(found, overload[0] if overload else "default", found)


def _run(evidence: Evidence) -> torch.Tensor:
    devices = [evidence.actual.device] if evidence.actual.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        made = run_again(evidence)
    if made is None:
        raise Refused("run again, it returns fewer tensors")
    return made


def _figures(actual: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    actual, exact = dense(actual).double(), dense(exact).double().to(actual.device)
    both = actual.isfinite() & exact.isfinite()
    error = torch.where(both, actual - exact, 0.0)
    size = float(exact[both].norm().clamp_min(1e-300)) if both.any() else 1.0
    values = torch.where(both, exact, 0.0)
    return {
        "relative L2": float(error.norm()) / size,
        "largest error": float(error.abs().max()),
        "mean error": abs(float(error.mean())),
        "scale error": abs(float((error * values).sum())) / size**2,
    }


def _limits(evidence: Evidence) -> dict[str, float]:
    """Return for each figure the middle between a clean and the recorded error, as a ratio.

    A figure that a clean op would not have much smaller is left out.
    """
    residual = residual_of(evidence)
    exact = torch.where(residual.finite, residual.exact, 0.0)
    size = float(exact.norm().clamp_min(1e-300))
    noise = residual.noise()
    clean = {
        "relative L2": float(noise.norm()) / size,
        "largest error": 6 * float(noise.max()),
        "mean error": 6 * float(noise.norm()) / noise.numel(),
        "scale error": 6 * float((noise * exact).norm()) / size**2,
    }
    recorded = _figures(evidence.actual, evidence.exact)
    return {
        name: math.sqrt(max(clean[name], 1e-300) * recorded[name])
        for name in clean
        if recorded[name] > 1.5 * clean[name]
    }


def _fails(evidence: Evidence, made: torch.Tensor) -> bool:
    if made.shape != evidence.exact.shape:
        return True
    finite = dense(made).isfinite() == dense(evidence.exact).isfinite().to(made.device)
    if not finite.all():
        return True
    limits, figures = _limits(evidence), _figures(made, evidence.exact)
    return any(figures[name] > limit for name, limit in limits.items())


def _cut(evidence: Evidence) -> Evidence:
    """Return the evidence of the worst rows alone, if the op fails on them as it did on all."""
    for smaller in _cuts(evidence):
        with contextlib.suppress(Exception):
            made = _run(smaller)
            same = made.shape == smaller.exact.shape
            if same and _fails(smaller, made) and _fails(smaller, smaller.actual):
                return smaller
    return evidence


def _cuts(evidence: Evidence) -> Iterator[Evidence]:
    exact = evidence.exact
    if exact.dim() < 2:
        return
    wrong = residual_of(evidence).wrong
    tensors = [each for each in pytree.tree_leaves(evidence.args) if _is_tensor(each)]
    if exact.dim() > 2 and tensors and isinstance(evidence.module, torch.nn.Linear):
        rows = math.prod(exact.shape[:-1])
        flat = [each.reshape(rows, each.shape[-1]) for each in tensors[:1]]
        yield from _row_cuts(_flattened(evidence, flat[0], rows), wrong.reshape(rows, -1))
    yield from _row_cuts(evidence, wrong)


def _flattened(evidence: Evidence, rows: torch.Tensor, count: int) -> Evidence:
    def flat(each: torch.Tensor | None) -> torch.Tensor | None:
        return None if each is None else each.reshape(count, -1)

    exact, actual = flat(evidence.exact), flat(evidence.actual)
    assert exact is not None
    assert actual is not None
    return replace(
        evidence,
        args=(rows, *evidence.args[1:]),
        exact=exact,
        actual=actual,
        clean=flat(evidence.clean),
        bound=None,
    )


def _row_cuts(evidence: Evidence, wrong: torch.Tensor) -> Iterator[Evidence]:
    count = evidence.exact.shape[0]
    badness = wrong.reshape(count, -1).sum(-1)
    order = badness.argsort(descending=True, stable=True)
    bad = int((badness > 0).sum())
    for keep in dict.fromkeys((1, min(bad, _MOST_ROWS), bad)):
        if not 0 < keep < count:
            continue
        rows = order[:keep].sort().values
        for every in (False, True):
            yield _rows_of(evidence, rows, count, every=every)


def _rows_of(evidence: Evidence, rows: torch.Tensor, count: int, *, every: bool) -> Evidence:
    """Return the call on some rows: of its first tensor, or of every tensor with as many."""
    taken = 0

    def pick(value: Any) -> Any:
        nonlocal taken
        fits = _is_tensor(value) and value.dim() > 0 and value.shape[0] == count
        if not fits or (taken and not every):
            return value
        taken += 1
        return value[rows.to(value.device)]

    args, kwargs = pytree.tree_map(pick, (evidence.args, dict(evidence.kwargs)))
    clean = evidence.clean
    return replace(
        evidence,
        args=args,
        kwargs=kwargs,
        exact=evidence.exact[rows.to(evidence.exact.device)],
        actual=evidence.actual[rows.to(evidence.actual.device)],
        clean=None if clean is None else clean[rows.to(clean.device)],
        bound=None,
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _proven(
    evidence: Evidence, recipe: Recipe, directory: Path, z: float | None, timeout: float
) -> Path:
    """Write the script and its data; keep them only if a fresh process fails as this one did."""
    payload = _payload(evidence, recipe)
    if len(payload) > MOST_BYTES:
        raise Refused(f"its data would take {len(payload) / 2**30:.1f} GiB")
    directory.mkdir(parents=True, exist_ok=True)
    path = free_path(directory, evidence.name)
    inside = len(payload) <= EMBEDDED_BYTES
    beside = path.with_suffix(".pt")
    script = _script(evidence, recipe, z)
    written = [path]
    try:
        if not inside:
            written.append(beside)
            write_private(beside, payload)
        text = script.text(payload if inside else None, None if inside else beside.name)
        write_private(path, text.encode("utf-8"))
        _prove(path, timeout)
    except BaseException:
        for each in written:
            each.unlink(missing_ok=True)
        raise
    return path


def _payload(evidence: Evidence, recipe: Recipe) -> bytes:
    def plain(value: Any) -> Any:
        # A clone leaves behind the rest of a storage that a view would carry along.
        return value.detach().cpu().clone() if _is_tensor(value) else value

    args, kwargs = pytree.tree_map(plain, (tuple(evidence.args), dict(evidence.kwargs)))
    exact = dense(evidence.exact).cpu().clone()
    buffer = io.BytesIO()
    try:
        torch.save({"args": args, "kwargs": kwargs, "exact": exact, **recipe.data}, buffer)
    except Exception as error:
        raise Refused(f"it cannot be pickled: {words_of(error)}") from None
    if not recipe.trusted:
        buffer.seek(0)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
        allowed = {each.rpartition(".")[2].strip("]')\"") for each in recipe.safe}
        others = [each for each in unsafe if each.rpartition(".")[2] not in allowed]
        if [each for each in others if each not in HARMLESS]:
            recipe.trusted = True
    return buffer.getvalue()


def _script(evidence: Evidence, recipe: Recipe, z: float | None) -> Script:
    rows = "x".join(map(str, evidence.exact.shape)) or "one number"
    figure = "" if z is None else f" (z {z:.3g})"
    device = evidence.actual.device
    made = "output"
    if evidence.backward is not None:
        kind, which = evidence.backward.wanted
        made = f"gradient of {kind.removesuffix('s')} {which}"
    return Script(
        title=f"Repro of {evidence.name}{figure}: {called(evidence.module)} on its own inputs, "
        f"{made} {rows}.",
        make=recipe.make,
        output=evidence.output_index,
        limits=_limits(evidence),
        device=device.type if device.type == "cpu" else str(device),
        needs=recipe.needs,
        imports=recipe.imports,
        settings=_settings(device),
        before_load=recipe.before_load,
        safe=recipe.safe,
        trusted=recipe.trusted,
        constants=recipe.constants,
    )


def _settings(device: torch.device) -> list[str]:
    """Return lines that set what decides how torch computes."""
    lines = [
        f"torch.set_num_threads({torch.get_num_threads()})",
        f"torch.set_flush_denormal({_flushes_denormals()})",
        f"torch.backends.mkldnn.enabled = {torch.backends.mkldnn.enabled}",
    ]
    # torch refuses to read these where they were set by its newer names.
    with contextlib.suppress(RuntimeError):
        precision = torch.get_float32_matmul_precision()
        lines.append(f"torch.set_float32_matmul_precision({precision!r})")
        if device.type == "cuda":
            lines.append(f"torch.backends.cudnn.allow_tf32 = {torch.backends.cudnn.allow_tf32}")
    return lines


def _flushes_denormals() -> bool:
    return float(torch.tensor([1e-39]).mul(1.0)) == 0.0


def free_path(directory: Path, name: str) -> Path:
    """Return a path for the script of a module that neither it nor its data have taken."""
    stem = "repro_" + (re.sub(r"[^\w.-]+", "_", name).strip("._") or "op")[:80].replace(".", "_")
    path = directory / f"{stem}.py"
    number = 2
    while path.exists() or path.with_suffix(".pt").exists():
        path = directory / f"{stem}_{number}.py"
        number += 1
    return path


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _prove(path: Path, timeout: float) -> None:
    """Run the script in a fresh process; return only if it runs and fails."""
    status, said = run_script(path, timeout)
    if status == 1 and said and said[-1] == "FAILS":
        return
    if status == 0:
        raise Refused("it does not fail in a fresh process, so it depends on more than its inputs")
    last = said[-1] if said else f"exit status {status}"
    raise Refused(f"it cannot run in a fresh process: {last}")


def run_script(path: Path, timeout: float) -> tuple[int, list[str]]:
    """Run a script in a fresh process; return its exit status and the lines that it printed."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(path.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            raise _TookTooLong(f"the repro did not end within {timeout:g} s") from None
        except BaseException:
            _end(process)
            raise
        out.seek(0)
        return status, out.read().decode("utf-8", "replace").strip().splitlines()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started; it leads a group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
